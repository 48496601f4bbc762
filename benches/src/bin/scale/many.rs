//! Many volumes, and many clones of one snapshot.

use crate::probe::probe;
use dbs_benches::content::{BLOCK, Content};
use dbs_benches::report::{Table, mib, spread, time};
use dbs_benches::{Bench, Outcome, drain, open, timed};
use dbs_core::Store;
use dbs_core::store::SnapshotOptions;
use std::path::Path;
use std::time::Duration;

/// Blocks of each volume, and of them those written.
const BLOCKS: u64 = 2560;
const WRITTEN: u64 = 4;
/// Every so manieth clone is written to.
const WRITTEN_CLONES: u64 = 100;

/// Takes the measurement.
///
/// # Errors
/// Those of the store, or content that is not what was written.
pub fn measure(bench: &Bench) -> Outcome<Table> {
    let (volumes, clones) = (bench.pick(1000, 40), bench.pick(10_000, 200));
    let path = bench.init("many.dbs", 64 << 30)?;
    let title = format!("{volumes} volumes, {clones} clones of a snapshot");
    let mut table = Table::new(&title, &["what", "in all", "median each", "longest"]);
    let mut add = |what: &str, each: Vec<Duration>| {
        let all = each.iter().sum();
        let [p50, _, max] = spread(each).map(time);
        table.row(&[&what, &time(all), &p50, &max]);
    };

    let store = open(&path)?;
    let names: Vec<_> = (0..volumes).map(|number| format!("v{number}")).collect();
    add("create volumes", each(&names, |name| store.create_volume(name, size()).map(drop))?);
    let mut contents = Vec::new();
    for (seed, name) in (1..).zip(&names) {
        contents.push(write_some(&store, name, Content::new(seed, BLOCKS))?);
    }
    add("list volumes", listed(&store, volumes)?);
    store.create_snapshot("v0", "s", &SnapshotOptions::default())?;

    let clone_names: Vec<_> = (0..clones).map(|number| format!("c{number}")).collect();
    let made = each(&clone_names, |name| store.clone_volume("v0", "s", name).map(drop))?;
    add("create clones", made);
    add("list volumes and clones", listed(&store, volumes + clones)?);
    let mut clone_contents = Vec::new();
    for name in clone_names.iter().step_by(WRITTEN_CLONES as usize) {
        clone_contents.push(write_some(&store, name, contents[0].clone())?);
    }
    add("close", vec![timed(|| store.close())?.1]);

    let probed = probe(&path)?;
    let store = open(&path)?;
    for (name, content) in clone_names.iter().step_by(WRITTEN_CLONES as usize).zip(&clone_contents)
    {
        content.verify(&store.volume(name)?)?;
    }
    contents[0].verify(&store.volume(&clone_names[1])?)?;
    add("delete clones", each(&clone_names, |name| store.delete_volume(name))?);
    add("reclaim their space", vec![drain(&store)?.merged]);
    for (name, content) in names.iter().zip(&contents) {
        content.verify(&store.volume(name)?)?;
    }
    add("delete volumes", each(&names, |name| store.delete_volume(name))?);
    add("reclaim their space", vec![drain(&store)?.merged]);
    finish(store, &path)?;
    let memory = mib(probed.memory);
    table.row(&[&format!("open with them all ({memory} of memory)"), &time(probed.time), &"", &""]);
    Ok(table)
}

fn size() -> u64 {
    BLOCKS * BLOCK as u64
}

fn each(
    names: &[String],
    mut run: impl FnMut(&str) -> dbs_core::Result<()>,
) -> Outcome<Vec<Duration>> {
    names.iter().map(|name| Ok(timed(|| run(name))?.1)).collect()
}

fn listed(store: &Store, expected: usize) -> Outcome<Vec<Duration>> {
    let (list, took) = timed(|| Outcome::Ok(store.volumes(false)))?;
    if list.len() != expected {
        return Err(format!("{} volumes listed, not {expected}", list.len()).into());
    }
    Ok(vec![took])
}

/// Writes blocks at the begin and in the middle.
fn write_some(store: &Store, name: &str, mut content: Content) -> Outcome<Content> {
    let volume = store.volume(name)?;
    content.write(&volume, 0, WRITTEN / 2)?;
    content.write(&volume, BLOCKS / 2, WRITTEN / 2)?;
    Ok(content)
}

/// Everything was deleted: nothing may be in use.
fn finish(store: Store, path: &Path) -> Outcome<()> {
    let info = store.info();
    if info.volumes != 0 || info.snapshots != 0 || info.extents_free != info.extents_total {
        return Err(format!("something is left in {}: {info:?}", path.display()).into());
    }
    Ok(store.close()?)
}
