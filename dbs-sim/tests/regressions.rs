//! Bugs that were found, each by name with the seed that found it. Where the sequence of events is
//! what matters it is spelled out here, as a seed means another history once the generator changes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_core::io::Storage;
use dbs_core::{InitOptions, Store};
use dbs_sim::{CrashMode, Faults, Medium, SimDisk, SimEnv};
use std::sync::Arc;

const SIZE: u64 = 4 << 20;

fn small_store(env: &SimEnv) -> SimDisk {
    let disk = SimDisk::new(Medium::file(SIZE), 1);
    let options = InitOptions {
        size: Some(SIZE),
        extent_size: 64 << 10,
        max_volumes: Some(8),
        max_snapshots: Some(16),
        journal_size: Some(128 << 10),
        ..InitOptions::default()
    };
    Store::init_on(&disk, &options, env).unwrap();
    disk
}

fn open(disk: &SimDisk, env: &Arc<SimEnv>) -> dbs_core::Result<Store> {
    let storage: Arc<dyn Storage> = Arc::new(disk.fork());
    Store::open_on(storage, None, Arc::clone(env) as _, false)
}

/// Seed 1259: processes that ended soon after opening, one after the other, each added groups to
/// the journal and wrote nothing back, until it was full and the store could not be opened.
#[test]
fn opening_again_and_again_does_not_fill_the_journal() {
    let env = Arc::new(SimEnv::new(1));
    let mut disk = small_store(&env);
    for round in 0..200 {
        let storage = Arc::new(disk.fork());
        let store =
            Store::open_on(Arc::clone(&storage) as _, None, Arc::clone(&env) as _, false).unwrap();
        if round % 10 == 0 {
            store.create_volume(&format!("v{}", round / 10 % 4), 1 << 20).ok();
        }
        drop(store);
        disk = storage.crash_image(&mut fastrand::Rng::with_seed(round), CrashMode::Kept);
    }
    assert_eq!(open(&disk, &env).unwrap().volumes(false).len(), 4);
}

/// The same, ended at each device operation of opening in turn.
#[test]
fn dying_while_opening_does_not_fill_the_journal() {
    for at in 1..24 {
        let env = Arc::new(SimEnv::new(1));
        let mut disk = small_store(&env);
        {
            let storage = Arc::new(disk.fork());
            let store =
                Store::open_on(Arc::clone(&storage) as _, None, Arc::clone(&env) as _, false)
                    .unwrap();
            store.create_volume("v", 1 << 20).unwrap();
            drop(store);
            disk = storage.fork();
        }
        for round in 0..100 {
            let storage = Arc::new(disk.fork());
            storage.arm(Faults { stop_at: Some(at), ..Faults::default() });
            drop(Store::open_on(Arc::clone(&storage) as _, None, Arc::clone(&env) as _, false));
            storage.revive();
            disk = storage.crash_image(&mut fastrand::Rng::with_seed(round), CrashMode::Kept);
        }
        assert_eq!(open(&disk, &env).unwrap().volumes(false).len(), 1, "operation {at}");
    }
}

/// Histories that once failed: 429 (a torn write of a metadata block's only good copy), 1174 (a
/// superblock larger than its file), 1259, 5001687 and 9000829 (a difference that missed what lies
/// behind the end of the shorter snapshot).
#[test]
fn seeds_that_once_failed() {
    for seed in [409, 429, 1174, 1259, 102_676, 5_001_687, 9_000_829] {
        dbs_sim::run(seed, 60).unwrap();
    }
}
