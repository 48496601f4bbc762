//! Loads on images that are fully written: nothing is allocated.

use crate::bench::Bench;
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

/// Random reads and overwrites.
///
/// # Errors
/// If a server does not start.
pub fn random_loads(bench: &mut Bench) -> Outcome<()> {
    run(bench, &RANDOM)
}

/// Writes, each flushed.
///
/// # Errors
/// If a server does not start.
pub fn flushed_loads(bench: &mut Bench) -> Outcome<()> {
    run(bench, &FLUSHED)
}

/// Large requests in order.
///
/// # Errors
/// If a server does not start.
pub fn sequential_loads(bench: &mut Bench) -> Outcome<()> {
    run(bench, &SEQUENTIAL)
}

/// Each load on each system in turn, in each round.
fn run(bench: &mut Bench, loads: &[Load]) -> Outcome<()> {
    let mut served = Vec::new();
    for system in bench.systems(0) {
        served.push((system, bench.full(system)?));
    }
    for round in 0..bench.sizes.rounds() {
        for load in loads {
            for system in bench.systems(round) {
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
