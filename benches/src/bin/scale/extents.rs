//! A volume of many extents: snapshots, clones, merging and opening, with the sizes that the Go
//! prototype was measured with.

use crate::probe::probe;
use dbs_benches::content::{BLOCK, Content};
use dbs_benches::report::{Table, mib, spread, time};
use dbs_benches::{Bench, Outcome, drain, open, timed};
use dbs_core::store::SnapshotOptions;
use dbs_core::{Store, Volume};
use fastrand::Rng;

/// Blocks of an extent.
const PER_EXTENT: u64 = 256;
/// Snapshots and clones timed.
const REPEATS: usize = 32;
/// Snapshots the extents of the second store are spread over.
const LAYERS: u64 = 64;

/// Takes the measurement.
///
/// # Errors
/// Those of the store, or content that is not what was written.
pub fn measure(bench: &Bench) -> Outcome<Table> {
    let extents = bench.pick(60_000, 500);
    let title = format!("A volume with {extents} extents of 1 MiB");
    let mut table = Table::new(&title, &["what", "time", "the Go prototype"]);
    one_layer(bench, extents, &mut table)?;
    many_layers(bench, extents, &mut table)?;
    Ok(table)
}

fn one_layer(bench: &Bench, extents: u64, table: &mut Table) -> Outcome<()> {
    let path = bench.init("extents.dbs", 256 << 30)?;
    let store = open(&path)?;
    store.create_volume("v", extents * PER_EXTENT * BLOCK as u64)?;
    let mut content = Content::new(1, extents * PER_EXTENT);
    let volume = store.volume("v")?;
    let ((), took) = timed(|| write_each(&volume, &mut content, 0, 0..extents))?;
    table.row(&[&"first write of a block in each extent, in order", &time(took), &""]);
    drop(volume);
    store.close()?;
    let probed = probe(&path)?;
    let open_row = format!("open ({} of memory)", mib(probed.memory));
    table.row(&[&open_row, &time(probed.time), &"0.05 s"]);

    let store = open(&path)?;
    latencies(&store, table)?;
    let volume = store.volume("v")?;
    merge(&store, &volume, "none of them in its child", &content, table)?;
    store.create_snapshot("v", "s", &SnapshotOptions::default())?;
    write_each(&volume, &mut content, 1, 0..extents)?;
    merge(&store, &volume, "all of them also in its child, a block to copy each", &content, table)?;
    drop(volume);
    Ok(store.close()?)
}

/// Takes snapshots and clones, one after the other, and removes them; the snapshot `s` stays and
/// holds all extents.
fn latencies(store: &Store, table: &mut Table) -> Outcome<()> {
    let options = SnapshotOptions::default();
    store.create_snapshot("v", "s", &options)?;
    let (mut snapshots, mut clones) = (Vec::new(), Vec::new());
    for number in 0..REPEATS {
        let name = format!("t{number}");
        snapshots.push(timed(|| store.create_snapshot("v", &name, &options))?.1);
        clones.push(timed(|| store.clone_volume("v", &name, &name))?.1);
    }
    for (what, times, before) in
        [("take a snapshot", snapshots, ""), ("clone a snapshot", clones, "18 s for 4 GiB")]
    {
        let [p50, _, max] = spread(times).map(time);
        table.row(&[&format!("{what}: median, longest"), &format!("{p50}, {max}"), &before]);
    }
    for number in 0..REPEATS {
        store.delete_volume(&format!("t{number}"))?;
        store.delete_snapshot("v", &format!("t{number}"))?;
    }
    drain(store)?;
    Ok(())
}

/// Deletes the snapshot `s` and waits until it is merged.
fn merge(
    store: &Store,
    volume: &Volume,
    what: &str,
    content: &Content,
    table: &mut Table,
) -> Outcome<()> {
    store.delete_snapshot("v", "s")?;
    let took = drain(store)?;
    check_each(volume, content)?;
    table.row(&[&format!("merge a snapshot of all extents, {what}"), &time(took.merged), &"10 s"]);
    table.row(&[&"and give what that freed back to the file system", &time(took.given_back), &""]);
    Ok(())
}

fn many_layers(bench: &Bench, extents: u64, table: &mut Table) -> Outcome<()> {
    let path = bench.init("layers.dbs", 256 << 30)?;
    let store = open(&path)?;
    store.create_volume("v", extents * PER_EXTENT * BLOCK as u64)?;
    let mut content = Content::new(2, extents * PER_EXTENT);
    let volume = store.volume("v")?;
    let mut order: Vec<_> = (0..extents).collect();
    Rng::with_seed(3).shuffle(&mut order);
    for (number, part) in (0..).zip(order.chunks(extents.div_ceil(LAYERS) as usize)) {
        write_each(&volume, &mut content, 0, part.iter().copied())?;
        store.create_snapshot("v", &format!("s{number}"), &SnapshotOptions::default())?;
    }
    drop(volume);
    store.close()?;
    let probed = probe(&path)?;
    let row = format!(
        "open with the extents spread over {LAYERS} snapshots ({} of memory)",
        mib(probed.memory)
    );
    table.row(&[&row, &time(probed.time), &"1.8 s"]);
    let store = open(&path)?;
    check_each(&store.volume("v")?, &content)?;
    Ok(store.close()?)
}

/// Writes one block of each of these extents.
fn write_each(
    volume: &Volume,
    content: &mut Content,
    block: u64,
    extents: impl Iterator<Item = u64>,
) -> Outcome<()> {
    for extent in extents {
        content.write(volume, extent * PER_EXTENT + block, 1)?;
    }
    Ok(volume.flush()?)
}

/// Verifies the first blocks of each extent.
fn check_each(volume: &Volume, content: &Content) -> Outcome<()> {
    for extent in 0..content.blocks() / PER_EXTENT {
        content.check(volume, extent * PER_EXTENT, 3)?;
    }
    Ok(())
}
