//! Many snapshots on one volume, taken, and deleted in random order while a writer goes on.

use dbs_benches::content::{BLOCK, Content};
use dbs_benches::report::{Table, spread, time};
use dbs_benches::{Bench, Outcome, open, timed};
use dbs_core::store::SnapshotOptions;
use dbs_core::{Store, Volume};
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Every so manieth operation of the writer reads and verifies.
const READS: u64 = 8;
/// Background work as `dbs serve` does it: so many steps, then as long a rest as they took.
const STEPS: u64 = 16;
const PAUSE_MIN: Duration = Duration::from_millis(2);

/// What a writer did.
struct Written {
    times: Vec<Duration>,
    elapsed: Duration,
}

/// Takes the measurement.
///
/// # Errors
/// Those of the store, or content that is not what was written.
pub fn measure(bench: &Bench) -> Outcome<Table> {
    let count = bench.pick(250, 24);
    let blocks = bench.pick(65_536, 2048);
    let size = blocks * BLOCK as u64;
    let mut rng = Rng::with_seed(1);
    let store = open(&bench.init("snapshots.dbs", 64 << 30)?)?;
    store.create_volume("v", size)?;
    let volume = store.volume("v")?;
    let mut content = Content::new(1, blocks);
    content.write_all(&volume)?;

    let mut taken = Vec::new();
    let mut create = Vec::new();
    for number in 0..count {
        let name = format!("s{number}");
        let options = SnapshotOptions::default();
        create.push(timed(|| store.create_snapshot("v", &name, &options))?.1);
        taken.push((name, content.clone()));
        for _ in 0..bench.pick(200, 20) {
            content.write(&volume, rng.u64(..blocks), 1)?;
        }
    }

    let still = Duration::from_millis(bench.pick(5000, 100));
    let alone = write_during(&volume, &mut content, || {
        thread::sleep(still);
        Ok(())
    })?;
    rng.shuffle(&mut taken);
    let mut delete = Vec::new();
    let mut total = [Duration::ZERO; 2];
    let beside = write_during(&volume, &mut content, || {
        total = delete_all(&store, &mut taken, &mut delete, &mut rng)?;
        Ok(())
    })?;
    content.verify(&volume)?;
    drop(volume);
    let left = store.snapshots("v", false)?.len();
    if left != 0 || store.info().snapshots_deleting != 0 {
        return Err("snapshots are left".into());
    }
    store.close()?;
    Ok(table(count, size, [create, delete], total, [alone, beside]))
}

fn table(
    count: usize,
    size: u64,
    [create, delete]: [Vec<Duration>; 2],
    [merged, given_back]: [Duration; 2],
    writers: [Written; 2],
) -> Table {
    let title = format!("{count} snapshots of a volume of {} MiB", size >> 20);
    let mut table = Table::new(&title, &["what", "median", "99 %", "longest", "in all"]);
    for (what, times) in [
        ("take a snapshot, with random writes between", create),
        ("delete a snapshot, in random order beside a writer", delete),
    ] {
        let sum: Duration = times.iter().sum();
        let [p50, p99, max] = spread(times).map(time);
        table.row(&[&what, &p50, &p99, &max, &time(sum)]);
    }
    for (what, total) in [
        ("until all were deleted and merged", merged),
        ("until their space was given back to the file system", given_back),
    ] {
        table.row(&[&what, &"", &"", &"", &time(total)]);
    }
    for (what, writer) in ["alone", "beside deletion and merging"].iter().zip(writers) {
        let rate = writer.times.len() as f64 / writer.elapsed.as_secs_f64();
        let [p50, p99, max] = spread(writer.times).map(time);
        let what = format!("4 KiB random writes, one at a time, {what}");
        table.row(&[&what, &p50, &p99, &max, &format!("{rate:.0} IOPS")]);
    }
    table
}

/// Deletes all snapshots, verifying some before they go, and waits until the last is merged and
/// its space given back; how long either took from the start.
fn delete_all(
    store: &Store,
    taken: &mut Vec<(String, Content)>,
    delete: &mut Vec<Duration>,
    rng: &mut Rng,
) -> Outcome<[Duration; 2]> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let merger = scope.spawn(|| merge(store, &done));
        let mut step = || -> Outcome<()> {
            while let Some((name, _)) = taken.pop() {
                delete.push(timed(|| store.delete_snapshot("v", &name))?.1);
                if !taken.is_empty() && taken.len().is_multiple_of(8) {
                    let (name, content) = &taken[rng.usize(..taken.len())];
                    content.verify(&store.volume(&format!("v@{name}"))?)?;
                }
            }
            Ok(())
        };
        let deleted = step();
        done.store(true, Ordering::Relaxed);
        let times = merger.join().map_err(|_| "the merging thread panicked")??;
        deleted.map(|()| times)
    })
}

/// Works in the background until told that no more comes and nothing is left; when all was merged,
/// and when all space was given back.
fn merge(store: &Store, done: &AtomicBool) -> Outcome<[Duration; 2]> {
    let begun = Instant::now();
    let mut merged = None;
    loop {
        let last = done.load(Ordering::Relaxed);
        let (report, took) = timed(|| store.work(STEPS))?;
        if last && store.info().snapshots_deleting == 0 {
            let merged = *merged.get_or_insert_with(|| begun.elapsed());
            if report.remaining == 0 {
                return Ok([merged, begun.elapsed()]);
            }
        }
        thread::sleep(took.max(PAUSE_MIN));
    }
}

/// Runs something while a thread writes and verifies at random.
fn write_during(
    volume: &Volume,
    content: &mut Content,
    run: impl FnOnce() -> Outcome<()>,
) -> Outcome<Written> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| write_until(volume, content, &stop));
        let ran = run();
        stop.store(true, Ordering::Relaxed);
        let written = writer.join().map_err(|_| "the writer panicked")?;
        ran?;
        written
    })
}

fn write_until(volume: &Volume, content: &mut Content, stop: &AtomicBool) -> Outcome<Written> {
    let mut rng = Rng::with_seed(2);
    let mut times = Vec::new();
    let mut reading = Duration::ZERO;
    let begun = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let block = rng.u64(..content.blocks());
        times.push(timed(|| content.write(volume, block, 1))?.1);
        if rng.u64(..READS) == 0 {
            let block = rng.u64(..content.blocks());
            reading += timed(|| content.check(volume, block, 1))?.1;
        }
    }
    Ok(Written { times, elapsed: begun.elapsed() - reading })
}
