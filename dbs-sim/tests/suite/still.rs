//! Checking a store that is in use: commits go on, and what is checked is the store of one moment.

use dbs_core::format::{Geometry, RegionKind};
use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, Store};
use dbs_sim::{Medium, SimDisk, SimEnv};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const SIZE: u64 = 8 << 20;
/// Longest that a commit may take before it counts as stopped.
const HANG: Duration = Duration::from_secs(60);
/// The first read of a check, of the superblock, is made between two commits.
const FIRST: u64 = 2;

fn options(checksums: bool) -> InitOptions {
    InitOptions {
        size: Some(SIZE),
        extent_size: 64 << 10,
        journal_size: Some(128 << 10),
        checksums,
        ..InitOptions::default()
    }
}

fn open(checksums: bool) -> (Arc<SimDisk>, Store) {
    let env = Arc::new(SimEnv::new(1));
    let disk = Arc::new(SimDisk::new(Medium::file(SIZE), 1));
    Store::init_on(&*disk, &options(checksums), &*env).unwrap();
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let store = Store::open_on(storage, None, env, false).unwrap();
    for name in ["a", "b"] {
        store.create_volume(name, 1 << 20).unwrap();
        let volume = store.volume(name).unwrap();
        volume.write_at(0, &[1; 256 << 10], false).unwrap();
        store.create_snapshot(name, "old", &SnapshotOptions::default()).unwrap();
        volume.write_at(64 << 10, &[2; 128 << 10], true).unwrap();
    }
    while store.settle().unwrap() {}
    (disk, store)
}

/// Found by review: every commit waited until all metadata and all checksums had been read.
#[test]
fn a_commit_does_not_wait_for_a_check() {
    for checksums in [false, true] {
        let (disk, store) = open(checksums);
        for nth in FIRST.. {
            let other = store.clone();
            disk.after_read(nth, move || {
                let (send, done) = mpsc::channel();
                std::thread::spawn(move || {
                    let volume = other.volume("a").unwrap();
                    volume.write_at(nth % 8 * 4096, &[3; 4096], true).unwrap();
                    send.send(()).unwrap();
                });
                done.recv_timeout(HANG).expect("the commit waits for the check");
            });
            assert_eq!(store.check().unwrap().findings, [], "read {nth}");
            if disk.awaits_read() {
                assert!(nth >= 6, "a check makes {nth} reads");
                break;
            }
        }
    }
}

/// Changes all that can change, and has all of it written back.
fn change(store: &Store, round: u64) {
    let labels = [("round".to_owned(), round.to_string())].into();
    let options = SnapshotOptions { labels, ..SnapshotOptions::default() };
    store.create_snapshot("a", &format!("s{round}"), &options).unwrap();
    store.create_volume(&format!("v{round}"), 1 << 20).unwrap();
    let volume = store.volume("a").unwrap();
    volume.write_at(round % 8 * (64 << 10), &[4; 64 << 10], true).unwrap();
    volume.discard(round % 7 * (64 << 10), 128 << 10).unwrap();
    if let Some(before) = round.checked_sub(1) {
        let _ = store.delete_snapshot("a", &format!("s{before}"));
        let _ = store.delete_volume(&format!("v{before}"));
    }
    store.flush().unwrap();
    while store.work(100).unwrap().done > 0 {}
    while store.settle().unwrap() {}
}

/// Read block by block while others are written back, the metadata would be of many moments.
#[test]
fn a_check_is_of_one_moment() {
    for checksums in [false, true] {
        let (disk, store) = open(checksums);
        for nth in FIRST.. {
            let info = store.info();
            let other = store.clone();
            disk.after_read(nth, move || change(&other, nth));
            let report = store.check().unwrap();
            assert_eq!(report.findings, [], "changed after read {nth}");
            assert_eq!(report.volumes_checked, info.volumes, "changed after read {nth}");
            let snapshots = info.snapshots - info.volumes - info.snapshots_deleting;
            assert_eq!(report.snapshots_checked, snapshots, "changed after read {nth}");
            if disk.awaits_read() {
                assert!(nth >= 6, "a check makes {nth} reads");
                break;
            }
        }
    }
}

/// What is damaged on the device is found, whatever is written meanwhile.
#[test]
fn damage_is_found_beside_commits() {
    let (disk, store) = open(false);
    store.flush().unwrap();
    assert!(!disk.dirty(), "the damage would not be seen");
    let geometry = Geometry::plan(SIZE, &options(false)).unwrap();
    for copy in 0..2 {
        disk.flip_bit(geometry.block_address(RegionKind::Extents, 0, copy) + 777, 3);
    }
    let other = store.clone();
    disk.after_read(FIRST, move || change(&other, 0));
    let report = store.check().unwrap();
    let found = report.findings.iter().any(|f| f.message.contains("both copies are damaged"));
    assert!(found, "{:?}", report.findings);
}
