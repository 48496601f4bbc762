//! What is said of volumes and snapshots: kept over a reopening, and listed.

use crate::common::{Mem, dump, init, open};
use dbs_core::info::VolumeLimits;
use dbs_core::store::SnapshotOptions;
use dbs_core::{ErrorKind, Store};
use std::sync::Arc;

/// A store with volume `v` of 1 MiB and its snapshots `a` and `b`.
fn sample() -> (Arc<Mem>, Store) {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 1 << 20).unwrap();
    for name in ["a", "b"] {
        store.create_snapshot("v", name, &SnapshotOptions::default()).unwrap();
    }
    (disk, store)
}

fn retired(store: &Store, name: &str) -> bool {
    store.snapshot_info("v", name).unwrap().retired
}

fn rebuilding(store: &Store) -> bool {
    store.volume_info("v").unwrap().rebuilding
}

#[test]
fn a_retired_snapshot_is_kept_and_no_base_any_more() {
    let (disk, store) = sample();
    store.set_retired("v", "a", true).unwrap();
    store.set_protected("v", "a", true).unwrap();
    assert!(retired(&store, "a") && !retired(&store, "b"));
    drop(store);
    let store = open(&disk, 3, false).unwrap();
    assert!(retired(&store, "a") && !retired(&store, "b"));
    for result in [store.rollback("v", "a"), store.clone_volume("v", "a", "c").map(drop)] {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("`v@a` is retired"), "{error}");
    }
    store.rollback("v", "b").unwrap();
    store.set_retired("v", "a", false).unwrap();
    assert!(store.snapshot_info("v", "a").unwrap().protected && !retired(&store, "a"));
    store.clone_volume("v", "a", "c").unwrap();
    assert_eq!(store.set_retired("v", "x", true).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(store.check().unwrap().findings.is_empty());
}

#[test]
fn a_rebuilding_volume_stays_so_until_told_otherwise() {
    let (disk, store) = sample();
    assert!(!rebuilding(&store));
    store.set_rebuilding("v", true).unwrap();
    store.create_snapshot("v", "c", &SnapshotOptions::default()).unwrap();
    store.rename_volume("v", "w").unwrap();
    store.rename_volume("w", "v").unwrap();
    drop(store);
    let store = open(&disk, 3, false).unwrap();
    assert!(rebuilding(&store));
    assert!(store.volumes(false)[0].rebuilding);
    store.set_rebuilding("v", false).unwrap();
    store.close().unwrap();
    let store = open(&disk, 4, false).unwrap();
    assert!(!rebuilding(&store));
    assert_eq!(store.set_rebuilding("x", true).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(store.check().unwrap().findings.is_empty());
}

#[test]
fn a_snapshot_can_have_been_taken_earlier() {
    let (disk, store) = sample();
    let options = SnapshotOptions { created_ns: Some(1_234_567_890), ..Default::default() };
    let info = store.create_snapshot("v", "c", &options).unwrap();
    assert_eq!(info.created_ns, 1_234_567_890);
    drop(store);
    let store = open(&disk, 3, false).unwrap();
    let listed = store.snapshots("v", false).unwrap();
    let names: Vec<_> = listed.iter().map(|s| s.name.as_str()).collect();
    assert_eq!((names, listed[0].created_ns), (vec!["c", "a", "b"], 1_234_567_890));
    assert!(listed[1].created_ns > 1_234_567_890, "the clock's");
}

/// Makes something of `v` while, in the first flush of its commit, another thread deletes volume `name`.
fn make_while_deleted<T>(make: impl FnOnce(&Store) -> T, name: &'static str) -> T {
    let (disk, store) = sample();
    let (other, mut once) = (store.clone(), true);
    disk.on_flush(move || {
        if std::mem::take(&mut once) {
            let store = other.clone();
            std::thread::spawn(move || store.delete_volume(name));
            while other.volumes(false).iter().any(|volume| volume.name == name) {
                std::thread::yield_now();
            }
        }
    });
    let made = make(&store);
    store.create_volume("after", 1 << 20).unwrap();
    made
}

/// Found by review: what a command had made was looked up once more when it was durable, and a panic
/// said that it was gone. Nothing was written any more after that.
#[test]
fn what_is_deleted_while_its_creation_is_committed_was_made_all_the_same() {
    let made = make_while_deleted(|store| store.create_volume("w", 1 << 20), "w").unwrap();
    assert_eq!((made.name.as_str(), made.size), ("w", 1 << 20));
    let made = make_while_deleted(|store| store.clone_volume("v", "a", "w"), "w").unwrap();
    assert_eq!((made.name.as_str(), made.origin.as_deref()), ("w", Some("v@a")));
    let options = SnapshotOptions::default();
    let made = make_while_deleted(|store| store.create_snapshot("v", "c", &options), "v").unwrap();
    assert_eq!((made.volume.as_str(), made.name.as_str()), ("v", "c"));
}

#[test]
fn who_fills_a_volume_has_it_alone() {
    let (_disk, store) = sample();
    let kind = |result: dbs_core::Result<dbs_core::Volume>| result.err().unwrap().kind();
    store.create_rebuilding("w", 1 << 20).unwrap();
    assert!(store.volume_info("w").unwrap().rebuilding);
    assert_eq!(kind(store.complete_volume("w")), ErrorKind::Busy);
    let filling = store.open_to_fill("w", None).unwrap();
    assert_eq!(kind(store.open_to_fill("w", None)), ErrorKind::Busy);
    filling.write_at(0, &[1; 4096], false).unwrap();
    drop(filling);
    store.set_rebuilding("w", false).unwrap();
    assert_eq!(kind(store.open_to_fill("w", None)), ErrorKind::Invalid);

    // It begins and ends with a snapshot, in the same step; with nobody there when it begins.
    let user = store.complete_volume("w").unwrap();
    let begins = SnapshotOptions { rebuilding: Some(true), ..Default::default() };
    let refused = store.create_snapshot("w", "begun", &begins).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    assert!(!store.volume_info("w").unwrap().rebuilding);
    assert_eq!(store.snapshots("w", false).unwrap(), []);
    drop(user);
    store.create_snapshot("w", "begun", &begins).unwrap();
    assert_eq!(kind(store.complete_volume("w")), ErrorKind::Busy);
    assert_eq!(kind(store.complete_volume("w@begun")), ErrorKind::Busy);
    // Of one that is received, what came before is complete.
    store.create_snapshot("w", dbs_core::volume::RECEIVING, &Default::default()).unwrap();
    store.complete_volume("w@begun").unwrap();
    let ends = SnapshotOptions { rebuilding: Some(false), ..Default::default() };
    store.create_snapshot("w", "ended", &ends).unwrap();
    store.complete_volume("w").unwrap();
}

#[test]
fn limits_are_kept_and_hold_at_once() {
    let (disk, store) = sample();
    let info = |store: &Store, name: &str| store.volume_info(name).unwrap().limits;
    let limits = VolumeLimits { iops: 100, bandwidth: 8192, burst_seconds: 2 };
    let open_before = store.volume("v").unwrap();
    store.set_limits("v", limits).unwrap();
    assert_eq!(open_before.pace().limits(), limits, "of a handle from before");
    let snapshot = store.volume("v@a").unwrap();
    assert!(Arc::ptr_eq(open_before.pace(), snapshot.pace()), "the volume's own");
    drop((open_before, snapshot));
    store.create_snapshot("v", "c", &SnapshotOptions::default()).unwrap();
    store.rollback("v", "a").unwrap();
    store.rename_volume("v", "w").unwrap();
    store.clone_volume("w", "a", "clone").unwrap();
    let dumped: serde_json::Value = serde_json::from_str(&dump(&store)).unwrap();
    assert_eq!(dumped["volumes"][0]["limits"]["bandwidth"], 8192);
    drop(store);
    let store = open(&disk, 3, false).unwrap();
    assert_eq!((info(&store, "w"), info(&store, "clone")), (limits, VolumeLimits::default()));
    let tiny = VolumeLimits { bandwidth: 4095, ..limits };
    assert_eq!(store.set_limits("w", tiny).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(store.set_limits("x", limits).unwrap_err().kind(), ErrorKind::NotFound);
    // A burst alone limits nothing.
    store.set_limits("w", VolumeLimits { burst_seconds: 2, ..VolumeLimits::default() }).unwrap();
    store.close().unwrap();
    let store = open(&disk, 4, false).unwrap();
    assert_eq!(info(&store, "w"), VolumeLimits::default());
    assert!(store.check().unwrap().findings.is_empty());
}

#[test]
fn a_restored_dump_keeps_limits() {
    let (disk, store) = sample();
    let limits = VolumeLimits { iops: 1, bandwidth: 1 << 40, burst_seconds: 3600 };
    store.set_limits("v", limits).unwrap();
    let dumped = dump(&store);
    store.set_limits("v", VolumeLimits::default()).unwrap();
    drop(store);
    Store::plan_restore_on(&*disk, dumped.as_bytes()).unwrap().carry_out(&*disk).unwrap();
    assert_eq!(open(&disk, 3, false).unwrap().volume_info("v").unwrap().limits, limits);
}

/// Found by review: after a clock was set back, the newest snapshot was not the one that was taken last.
#[test]
fn a_snapshot_is_newer_than_what_it_builds_on_whatever_the_clock_says() {
    let (_, store) = sample();
    // Far ahead of the tests' clock: as if that had been set back since.
    let ahead = SnapshotOptions { created_ns: Some(1 << 62), ..SnapshotOptions::default() };
    store.create_snapshot("v", "m", &ahead).unwrap();
    for name in ["c", "d"] {
        store.create_snapshot("v", name, &SnapshotOptions::default()).unwrap();
    }
    let listed: Vec<_> = store.snapshots("v", false).unwrap().into_iter().map(|s| s.name).collect();
    assert_eq!(listed, ["a", "b", "m", "c", "d"]);
    // One whose time is known from elsewhere keeps it.
    let before = SnapshotOptions { created_ns: Some(5), ..SnapshotOptions::default() };
    assert_eq!(store.create_snapshot("v", "e", &before).unwrap().created_ns, 5);
}
