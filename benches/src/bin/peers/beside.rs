//! What running I/O feels of snapshots, clones and deletions.

use crate::bench::Bench;
use crate::systems::System;
use dbs_benches::Outcome;
use dbs_benches::fio::{Job, Log, Logged, read_log};
use dbs_benches::process::sleep;
use dbs_benches::server::Served;
use jiff::Timestamp;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Between two commands, so that each is seen alone.
const APART: Duration = Duration::from_millis(300);
/// How long after a command its effect is looked for.
const AFTER_MS: u64 = 50;
/// I/O alone, before the snapshot is deleted.
const ALONE: Duration = Duration::from_secs(5);
/// Longest wait for a merge.
const MERGE: Duration = Duration::from_secs(600);
/// Between two questions whether it is done.
const LOOK: Duration = Duration::from_millis(100);

/// Names of figures: milliseconds.
pub const SNAPSHOT_LATENCY: &str = "longest latency around a snapshot, ms";
pub const SNAPSHOT_GAP: &str = "longest pause of all I/O around a snapshot, ms";
pub const CLONE_LATENCY: &str = "longest latency around a clone, ms";
pub const CLONE_GAP: &str = "longest pause of all I/O around a clone, ms";
pub const ALONE_LATENCY: &str = "longest latency without either, ms";
pub const ALONE_GAP: &str = "longest pause of all I/O without either, ms";
/// And of the deletion.
pub const DELETE_BEFORE: &str = "IOPS before the deletion";
pub const DELETE_DURING: &str = "IOPS during the deletion";
pub const DELETE_RATIO: &str = "IOPS during over before the deletion";
pub const DELETE_SECONDS: &str = "deletion and merge, s";

/// Milliseconds since 1970, from and to.
type Window = (u64, u64);

/// Takes snapshots and clones of a volume that is being overwritten at queue depth 32.
///
/// # Errors
/// If anything fails.
pub fn snapshots(bench: &mut Bench) -> Outcome<()> {
    let (store, served) = filled(bench, "snapshots.dbs", bench.sizes.image())?;
    for round in 0..bench.sizes.rounds() {
        let count = bench.sizes.snapshots();
        let seconds = APART.as_secs_f64() * f64::from(3 * count + 4) + f64::from(count);
        let job = Job::random("randwrite", 32, bench.sizes.image(), seconds.ceil() as u32);
        let running = Job { log: Some(Log::Latency), ..job }.start(&served.target, bench.dir)?;
        sleep(Duration::from_secs(1))?;
        let [mut snapshots, mut clones, mut alone] = [const { Vec::new() }; 3];
        for number in 0..count {
            let (snapshot, clone) = (format!("v@s{round}-{number}"), format!("c{round}-{number}"));
            let dbs = &bench.tools.dbs;
            snapshots.push(window(|| dbs.run(&store, &["snapshot", "create", &snapshot]))?);
            clones.push(window(|| dbs.run(&store, &["volume", "clone", &snapshot, &clone]))?);
            // As much work for the CPUs, none for the volume.
            alone.push(window(|| dbs.run(&store, &["volume", "show", "v"]))?);
        }
        running.finish()?;
        let log = read_log(bench.dir, &Log::Latency)?;
        for (windows, latency, gap) in [
            (snapshots, SNAPSHOT_LATENCY, SNAPSHOT_GAP),
            (clones, CLONE_LATENCY, CLONE_GAP),
            (alone, ALONE_LATENCY, ALONE_GAP),
        ] {
            let worst = |measure: fn(&[Logged], Window) -> f64| {
                windows.iter().map(|window| measure(&log, *window)).fold(0.0, f64::max)
            };
            bench.results.note(latency, worst(longest_latency));
            bench.results.note(gap, worst(longest_gap));
        }
    }
    Ok(())
}

/// Deletes a snapshot, half of whose extents have been written to since, while its volume is read
/// and written.
///
/// # Errors
/// If anything fails.
pub fn deletion(bench: &mut Bench) -> Outcome<()> {
    let size = bench.sizes.deleted();
    let (store, served) = filled(bench, "deletion.dbs", size)?;
    bench.tools.dbs.run(&store, &["snapshot", "create", "v@s"])?;
    let half = Job { once: true, ..Job::random("randwrite", 32, size / 2, bench.sizes.seconds()) };
    served.measure(&half, bench.dir)?;
    sleep(Duration::from_secs(2))?;
    let job = Job::random("randrw", 32, size, (ALONE + MERGE).as_secs() as u32);
    let running = Job { log: Some(Log::Rate), ..job }.start(&served.target, bench.dir)?;
    sleep(Duration::from_secs(1))?;
    let begun = now();
    sleep(ALONE)?;
    let (deleted, at) = (now(), Instant::now());
    bench.tools.dbs.run(&store, &["snapshot", "delete", "v@s"])?;
    while bench.tools.dbs.snapshots_deleting(&store)? > 0 {
        if at.elapsed() > MERGE {
            return Err(format!("the snapshot is not merged after {MERGE:?}").into());
        }
        sleep(LOOK)?;
    }
    let (merged, took) = (now(), at.elapsed());
    running.stop()?;
    drop(served);
    let log = read_log(bench.dir, &Log::Rate)?;
    let before = rate(&log, (begun, deleted));
    let during = rate(&log, (deleted, merged));
    bench.results.note(DELETE_BEFORE, before);
    bench.results.note(DELETE_DURING, during);
    bench.results.note(DELETE_RATIO, during / before);
    bench.results.note(DELETE_SECONDS, took.as_secs_f64());
    Ok(())
}

/// A store with a volume `v` that is fully written, served.
fn filled(bench: &Bench, name: &str, size: u64) -> Outcome<(PathBuf, Served)> {
    let store = bench.dir.join(name);
    bench.tools.create(System::Dbs, &store, size, bench.sizes.store().max(4 * size))?;
    let served = bench.tools.serve(System::Dbs, Path::new(&store), "v")?;
    bench.fill(&served, size)?;
    Ok((store, served))
}

/// Runs a command after a pause; when its effect may be seen.
fn window<T>(command: impl FnOnce() -> Outcome<T>) -> Outcome<Window> {
    sleep(APART)?;
    let begun = now();
    command()?;
    Ok((begun, now() + AFTER_MS))
}

fn now() -> u64 {
    Timestamp::now().as_millisecond().unsigned_abs()
}

/// Of requests completed in the window, in ms; fio logs nanoseconds.
fn longest_latency(log: &[Logged], (from, to): Window) -> f64 {
    let inside = log.iter().filter(|(at, _)| (from..=to).contains(at));
    inside.map(|(_, nanoseconds)| nanoseconds / 1e6).fold(0.0, f64::max)
}

/// The longest time in the window without any completion, in ms.
fn longest_gap(log: &[Logged], (from, to): Window) -> f64 {
    let times: Vec<_> = log.iter().map(|entry| entry.0).collect();
    let first = times.partition_point(|at| *at < from).saturating_sub(1);
    let last = times.partition_point(|at| *at <= to).min(times.len().saturating_sub(1));
    let pairs = times.get(first..=last).unwrap_or_default().windows(2);
    pairs.map(|pair| (pair[1] - pair[0]) as f64).fold(0.0, f64::max)
}

/// Mean rate in a window of a log that has a line for reads and one for writes each time.
fn rate(log: &[Logged], (from, to): Window) -> f64 {
    let inside: Vec<_> = log.iter().filter(|(at, _)| (from..=to).contains(at)).collect();
    let mut times: Vec<_> = inside.iter().map(|(at, _)| at).collect();
    times.dedup();
    inside.iter().map(|(_, rate)| rate).sum::<f64>() / times.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_sees_what_reaches_into_it() {
        let log = [(10, 1e6), (11, 2e6), (40, 30e6), (41, 1e6), (90, 1e6)];
        assert_eq!(longest_latency(&log, (11, 39)), 2.0);
        assert_eq!(longest_latency(&log, (11, 40)), 30.0);
        assert_eq!(longest_gap(&log, (12, 20)), 29.0);
        assert_eq!(longest_gap(&log, (40, 41)), 49.0);
        assert_eq!(longest_gap(&log, (95, 99)), 0.0);
        assert_eq!(longest_gap(&[], (0, 9)), 0.0);
    }

    #[test]
    fn a_rate_adds_reads_and_writes() {
        let log = [(100, 10.0), (100, 20.0), (200, 30.0), (200, 40.0), (300, 1000.0)];
        assert_eq!(rate(&log, (100, 250)), 50.0);
        assert_eq!(rate(&log, (400, 500)), 0.0);
    }
}
