//! What is said of volumes and snapshots: kept over a reopening, and listed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Mem, init, open};
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
