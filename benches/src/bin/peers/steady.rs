//! Loads on images that are fully written: nothing is allocated.

use crate::bench::Bench;
use crate::systems::System;
use dbs_benches::Outcome;
use dbs_benches::fio::Job;

/// One row of a table.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub cell: &'static str,
    pub title: &'static str,
    pattern: &'static str,
    block: u64,
    depth: u32,
    /// So many clients with one request in flight each, who flush each write.
    flushing: Option<u32>,
}

const fn random(
    cell: &'static str,
    title: &'static str,
    pattern: &'static str,
    depth: u32,
) -> Load {
    Load { cell, title, pattern, block: 4096, depth, flushing: None }
}

const fn flushed(cell: &'static str, title: &'static str, clients: u32) -> Load {
    Load { flushing: Some(clients), ..random(cell, title, "randwrite", 1) }
}

/// Requests in flight of sequential loads.
const SEQUENTIAL_DEPTH: u32 = 4;

const fn sequential(cell: &'static str, title: &'static str, pattern: &'static str) -> Load {
    Load { block: 1 << 20, ..random(cell, title, pattern, SEQUENTIAL_DEPTH) }
}

pub const RANDOM: [Load; 6] = [
    random("read/1", "4 KiB random read, QD 1", "randread", 1),
    random("read/32", "4 KiB random read, QD 32", "randread", 32),
    random("read/128", "4 KiB random read, QD 128", "randread", 128),
    random("overwrite/1", "4 KiB overwrite, QD 1", "randwrite", 1),
    random("overwrite/32", "4 KiB overwrite, QD 32", "randwrite", 32),
    random("overwrite/128", "4 KiB overwrite, QD 128", "randwrite", 128),
];
pub const FLUSHED: [Load; 2] = [
    flushed("flushed/1", "4 KiB write + flush each, QD 1", 1),
    flushed("flushed/16", "4 KiB write + flush each, QD 16", 16),
];
pub const SEQUENTIAL: [Load; 2] = [
    sequential("sequential/read", "1 MiB sequential read, QD 4", "read"),
    sequential("sequential/write", "1 MiB sequential write, QD 4", "write"),
];

const fn large(cell: &'static str, title: &'static str, pattern: &'static str, depth: u32) -> Load {
    Load { block: 1 << 20, ..random(cell, title, pattern, depth) }
}

/// What checksums are measured with.
pub const CHECKED: [Load; 8] = [
    random("sums/read/1", "4 KiB random read, QD 1", "randread", 1),
    random("sums/read/128", "4 KiB random read, QD 128", "randread", 128),
    random("sums/overwrite/1", "4 KiB overwrite, QD 1", "randwrite", 1),
    random("sums/overwrite/128", "4 KiB overwrite, QD 128", "randwrite", 128),
    large("sums/large/read/1", "1 MiB random read, QD 1", "randread", 1),
    large("sums/large/read/128", "1 MiB random read, QD 128", "randread", 128),
    large("sums/large/overwrite/1", "1 MiB overwrite, QD 1", "randwrite", 1),
    large("sums/large/overwrite/128", "1 MiB overwrite, QD 128", "randwrite", 128),
];

/// Random reads and overwrites.
///
/// # Errors
/// If a server does not start.
pub fn random_loads(bench: &mut Bench) -> Outcome<()> {
    run(bench, &RANDOM, all)
}

/// Writes, each flushed.
///
/// # Errors
/// If a server does not start.
pub fn flushed_loads(bench: &mut Bench) -> Outcome<()> {
    run(bench, &FLUSHED, all)
}

/// Large requests in order.
///
/// # Errors
/// If a server does not start.
pub fn sequential_loads(bench: &mut Bench) -> Outcome<()> {
    run(bench, &SEQUENTIAL, all)
}

/// Ours with and without checksums, one right after the other.
///
/// # Errors
/// If a server does not start.
pub fn checked_loads(bench: &mut Bench) -> Outcome<()> {
    run(bench, &CHECKED, |_, round| match round % 2 {
        0 => vec![System::Dbs, System::Unchecked],
        _ => vec![System::Unchecked, System::Dbs],
    })
}

fn all(bench: &Bench<'_>, round: u32) -> Vec<System> {
    bench.systems(round)
}

/// Each load on each system in turn, in each round; `systems` gives their order.
fn run(
    bench: &mut Bench,
    loads: &[Load],
    systems: impl Fn(&Bench<'_>, u32) -> Vec<System>,
) -> Outcome<()> {
    let mut served = Vec::new();
    for system in systems(bench, 0) {
        served.push((system, bench.full(system)?));
    }
    for round in 0..bench.sizes.rounds() {
        for load in loads {
            for system in systems(bench, round) {
                let found = served.iter().find(|(found, _)| *found == system);
                let Some((_, (image, served))) = found else { continue };
                let (size, seconds) = (bench.sizes.image(), bench.sizes.seconds());
                let job = Job::random(load.pattern, load.depth, size, seconds);
                let (flush, clients) = (load.flushing.is_some(), load.flushing.unwrap_or(1));
                let job = Job { block: load.block, flush, clients, ..job };
                bench.run(load.cell, (system, round), (image, served), &job)?;
            }
        }
    }
    Ok(())
}
