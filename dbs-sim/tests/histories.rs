//! Random histories with crashes: at least 100,000 crash images, each opened and compared.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_sim::generate::Generator;
use dbs_sim::runner::run_trees;
use dbs_sim::{Config, Stats, run, runner};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Crash images to take; `DBS_SIM_IMAGES` changes it.
const IMAGES: u64 = 100_000;
/// Histories of trees.
const TREES: u64 = 2000;
/// Histories on a medium that tears blocks.
const TORN: u64 = 150;
/// Threads; each history has its own disk.
const THREADS: usize = 2;

#[test]
fn crash_images_hold_what_was_promised() {
    let wanted = match std::env::var("DBS_SIM_IMAGES") {
        Ok(text) => text.parse().expect("DBS_SIM_IMAGES is a number"),
        Err(_) => IMAGES,
    };
    let started = std::time::Instant::now();
    let seed = AtomicU64::new(0);
    let total = Mutex::new(Stats::default());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while total.lock().unwrap().images < wanted {
                    let stats = run(seed.fetch_add(1, Ordering::Relaxed), runner::STEPS).unwrap();
                    *total.lock().unwrap() += stats;
                }
            });
        }
    });
    let stats = total.into_inner().unwrap();
    println!("{} histories, {stats:?}, {:.1?}", seed.into_inner(), started.elapsed());
    assert!(stats.images >= wanted);
    assert!(stats.no_space > 0, "no history ever filled the store");
}

/// Where a sector is all that is written at once, a block that was overwritten and not flushed may mix old
/// and new sectors. Nothing else is different: not its neighbours, not metadata, not checksums.
#[test]
fn a_medium_that_tears_blocks_mixes_sectors_of_what_was_not_flushed() {
    let mut stats = Stats::default();
    let mut torn = 0;
    for seed in 0..TORN {
        let config = Config { tears: true, ..Generator::config(seed) };
        stats += runner::run_on(&config, runner::STEPS).unwrap();
        torn += u64::from(dbs_sim::verify::torn_seen() > 0);
    }
    println!("{stats:?}, torn blocks in {torn} of {TORN} histories");
    assert!(torn > TORN / 4, "blocks hardly ever tear");
}

/// Clones, flatten, rollback and deletion under handles that are kept and reads that take long, with
/// extents used again at once.
#[test]
fn what_is_held_or_read_never_shows_what_others_wrote() {
    let seed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let seed @ 0..TREES = seed.fetch_add(1, Ordering::Relaxed) {
                    run_trees(seed, runner::TREE_STEPS).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_seed_repeats_itself() {
    for seed in [3, 4, 5] {
        let first = run(seed, runner::STEPS).unwrap();
        assert_eq!(first, run(seed, runner::STEPS).unwrap());
    }
}
