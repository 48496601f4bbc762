//! What 4 KiB reads wait for while something else works on a store of a million extents.

use dbs_benches::report::{Table, spread, time};
use dbs_benches::{Bench, Outcome, drain, timed};
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, OpenOptions, Store};
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const EXTENT_BYTES: u64 = 64 << 10;
const BLOCK_BYTES: usize = 4096;
/// Threads that fill the store; they wait for the device, mostly.
const WRITERS: u64 = 16;

/// Takes the measurement.
///
/// # Errors
/// Those of the store, or a read that shows what was not written.
pub fn measure(bench: &Bench) -> Outcome<Table> {
    let extents = bench.pick(1 << 20, 2048);
    let longest = bench.pick(Duration::from_secs(10), Duration::from_millis(200));
    let store = filled(bench, extents)?;
    let title =
        format!("Reads of 4 KiB, one at a time, beside other work: {extents} extents of 64 KiB");
    let mut table = Table::new(&title, &["beside", "reads", "median", "p99", "longest"]);
    let mut row = |what: &str, work: &dyn Fn(&dyn Fn() -> bool) -> Outcome<()>| -> Outcome<()> {
        let reads = read_beside(&store, extents, longest, work)?;
        let [median, p99, max] = spread(reads.clone()).map(time);
        table.row(&[&what, &reads.len(), &median, &p99, &max]);
        Ok(())
    };
    row("nothing", &|goes_on| {
        while goes_on() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    })?;
    row("a scrub", &|goes_on| stopped(store.scrub(true, &mut |_| goes_on())))?;
    store.delete_volume("low")?;
    drain(&store)?;
    let size = store.info().size;
    row("a vacuum", &|goes_on| stopped(store.vacuum(&mut |_, _| goes_on())))?;
    if store.info().size < size {
        store.grow(size)?;
    }
    store.create_snapshot("v", "s", &SnapshotOptions::default())?;
    store.clone_volume("v", "s", "clone")?;
    row("flattening a clone of all", &|goes_on| {
        stopped(store.flatten("clone", &mut |_, _| goes_on()))
    })?;
    store.delete_volume("clone")?;
    drain(&store)?;
    write_all(&store, "v", extents / 16, 2)?;
    store.delete_snapshot("v", "s")?;
    row("merging a snapshot of all, a sixteenth also in its child", &|goes_on| {
        while goes_on() && store.work(1)?.remaining > 0 {}
        Ok(())
    })?;
    drain(&store)?;
    store.close()?;
    Ok(table)
}

/// A store whose low extents are those of the volume `low`, and the others of `v`.
fn filled(bench: &Bench, extents: u64) -> Outcome<Store> {
    let path = bench.dir.join("beside.dbs");
    let size = Some((extents * 5 / 2 + 4096) * EXTENT_BYTES);
    let options = InitOptions {
        size,
        max_size: size,
        max_snapshots: Some(16384),
        extent_size: EXTENT_BYTES,
        ..InitOptions::default()
    };
    Store::init(&path, &options)?;
    let store = Store::open(&path, &OpenOptions::default())?;
    for (name, extents) in [("low", extents / 16), ("v", extents)] {
        store.create_volume(name, extents * EXTENT_BYTES)?;
        write_all(&store, name, extents, 1)?;
    }
    drain(&store)?;
    Ok(store)
}

/// Writes one block of each of the first `extents` extents.
fn write_all(store: &Store, name: &str, extents: u64, fill: u8) -> Outcome<()> {
    std::thread::scope(|scope| {
        let writer = |first: u64| {
            let volume = store.volume(name)?;
            let block = [fill; BLOCK_BYTES];
            for extent in (first..extents).step_by(WRITERS as usize) {
                volume.write_at(extent * EXTENT_BYTES, &block, false)?;
            }
            Ok::<_, dbs_core::Error>(())
        };
        let writers: Vec<_> =
            (0..WRITERS).map(|first| scope.spawn(move || writer(first))).collect();
        writers
            .into_iter()
            .try_for_each(|writer| Ok(writer.join().map_err(|_| "a writer panicked")??))
    })
}

/// How long reads of the volume took while `work` ran, which asks whether it should go on.
fn read_beside(
    store: &Store,
    extents: u64,
    longest: Duration,
    work: &dyn Fn(&dyn Fn() -> bool) -> Outcome<()>,
) -> Outcome<Vec<Duration>> {
    let done = AtomicBool::new(false);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| -> Outcome<Vec<Duration>> {
            let volume = store.volume("v")?;
            let (mut rng, mut block) = (Rng::with_seed(1), [0; BLOCK_BYTES]);
            let mut reads = Vec::new();
            while !done.load(Ordering::Relaxed) || reads.is_empty() {
                let offset = rng.u64(..extents) * EXTENT_BYTES;
                reads.push(timed(|| volume.read_at(offset, &mut block))?.1);
                if block[0] == 0 || block != [block[0]; BLOCK_BYTES] {
                    return Err(format!("wrong content at {offset}").into());
                }
            }
            Ok(reads)
        });
        let result = work(&|| begun.elapsed() < longest);
        done.store(true, Ordering::Relaxed);
        let reads = reader.join().map_err(|_| "the reader panicked")?;
        result.and(reads)
    })
}

/// Work that was told to stop has not failed.
fn stopped<T>(result: dbs_core::Result<T>) -> Outcome<()> {
    match result {
        Err(error) if error.kind() != dbs_core::ErrorKind::Interrupted => Err(error.into()),
        _ => Ok(()),
    }
}
