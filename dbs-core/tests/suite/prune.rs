//! Pruning: space of retired snapshots comes back at once, and nothing else changes.

use crate::common::{Mem, finish_work, init, open};
use dbs_core::store::SnapshotOptions;
use dbs_core::{ErrorKind, Store};
use std::sync::Arc;

const SIZE: u64 = 8 * EXTENT;
const EXTENT: u64 = 64 << 10;
const BLOCK: u64 = 4096;

fn write(store: &Store, spec: &str, offset: u64, length: u64, byte: u8) {
    store.volume(spec).unwrap().write_at(offset, &vec![byte; length as usize], false).unwrap();
}

fn read(store: &Store, spec: &str) -> Vec<u8> {
    let volume = store.volume(spec).unwrap();
    let mut buf = vec![0xaa; volume.size() as usize];
    volume.read_at(0, &mut buf).unwrap();
    buf
}

fn snapshot(store: &Store, name: &str) {
    store.create_snapshot("v", name, &SnapshotOptions::default()).unwrap();
}

fn held(store: &Store, name: &str) -> u64 {
    store.usage("v", Some(name)).unwrap().allocated
}

/// Volume `v` of eight extents, all of it in each of the snapshots `a`, `b` and `c`, `b` and `c` retired.
fn sample() -> (Arc<Mem>, Store) {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", SIZE).unwrap();
    for (name, byte) in [("a", 1), ("b", 2), ("c", 3)] {
        write(&store, "v", 0, SIZE, byte);
        snapshot(&store, name);
    }
    store.set_retired("v", "b", true).unwrap();
    store.set_retired("v", "c", true).unwrap();
    (disk, store)
}

#[test]
fn what_a_layer_above_covers_goes_and_comes_back_as_space() {
    let (disk, store) = sample();
    let extent = store.info().extent_size;
    assert_eq!(extent, EXTENT);
    // `c` covers all of `b`.
    assert_eq!(store.prune("v", 0, SIZE).unwrap(), SIZE);
    assert_eq!((held(&store, "b"), held(&store, "c")), (0, SIZE));
    write(&store, "v", 3 * BLOCK, BLOCK, 4);
    store.volume("v").unwrap().discard(2 * EXTENT, EXTENT + BLOCK).unwrap();
    let shown = read(&store, "v");
    // Whole blocks inside the range only.
    assert_eq!(store.prune("v", 3 * BLOCK + 512, 2 * BLOCK).unwrap(), 0);
    assert_eq!(store.prune("v", 3 * BLOCK, BLOCK).unwrap(), BLOCK);
    let free = store.info().extents_free;
    assert_eq!(store.prune("v", 0, SIZE).unwrap(), EXTENT + BLOCK);
    assert_eq!(held(&store, "c"), SIZE - EXTENT);
    store.flush().unwrap();
    assert_eq!(store.info().extents_free, free + 1, "free after a commit");
    assert_eq!(store.prune("v", 0, SIZE).unwrap(), 0, "nothing is left to do");
    assert_eq!(read(&store, "v"), shown);
    assert_eq!(read(&store, "v@a"), vec![1; SIZE as usize]);
    drop(store);
    let store = open(&disk, 3, false).unwrap();
    assert_eq!(read(&store, "v"), shown);
    assert!(store.check().unwrap().findings.is_empty());
    // Deleting what was pruned still shows the same.
    store.delete_snapshot("v", "c").unwrap();
    store.delete_snapshot("v", "b").unwrap();
    finish_work(&store);
    assert_eq!(read(&store, "v"), shown);
}

#[test]
fn the_run_ends_at_what_somebody_may_want() {
    type Change = fn(&Store);
    let changes: [(&str, Change, u64); 4] = [
        ("nothing", |_| {}, 2 * SIZE),
        ("a clone", |store| drop(store.clone_volume("v", "c", "k").unwrap()), 0),
        ("not retired", |store| store.set_retired("v", "c", false).unwrap(), 0),
        ("protected", |store| store.set_protected("v", "b", true).unwrap(), SIZE),
    ];
    for (what, change, freed) in changes {
        let (_disk, store) = sample();
        write(&store, "v", 0, SIZE, 4);
        if what == "a clone" {
            store.set_retired("v", "c", false).unwrap();
        }
        change(&store);
        if what == "a clone" {
            store.set_retired("v", "c", true).unwrap();
        }
        let before = [read(&store, "v"), read(&store, "v@a")];
        assert_eq!(store.prune("v", 0, SIZE).unwrap(), freed, "{what}");
        assert_eq!([read(&store, "v"), read(&store, "v@a")], before, "{what}");
        if what == "a clone" {
            assert_eq!(read(&store, "k"), vec![3; SIZE as usize]);
        }
    }
    let (_disk, store) = sample();
    write(&store, "v", 0, SIZE, 4);
    let handle = store.volume("v@c").unwrap();
    assert_eq!(store.prune("v", 0, SIZE).unwrap(), 0, "`c` is open");
    drop(handle);
    assert_eq!(store.prune("v", 0, SIZE).unwrap(), 2 * SIZE);
    assert_eq!(store.prune("v", SIZE, 512).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(store.prune("x", 0, SIZE).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn zero_marks_below_stay_right() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", SIZE).unwrap();
    write(&store, "v", 0, SIZE, 1);
    snapshot(&store, "a");
    // A run of zeros in `b`, with an entry inside it.
    store.volume("v").unwrap().discard(0, 4 * EXTENT).unwrap();
    write(&store, "v", EXTENT, 2 * BLOCK, 2);
    snapshot(&store, "b");
    store.set_retired("v", "b", true).unwrap();
    write(&store, "v", EXTENT, BLOCK, 3);
    write(&store, "v", 5 * EXTENT, BLOCK, 3);
    let mut shown = read(&store, "v");
    assert_eq!(store.prune("v", 0, SIZE).unwrap(), BLOCK);
    assert_eq!(read(&store, "v"), shown);
    write(&store, "v", EXTENT + BLOCK, BLOCK, 4);
    assert_eq!(store.prune("v", 0, SIZE).unwrap(), BLOCK);
    shown[(EXTENT + BLOCK) as usize..][..BLOCK as usize].fill(4);
    assert_eq!(read(&store, "v"), shown);
    assert_eq!(held(&store, "b"), 0);
    store.delete_snapshot("v", "b").unwrap();
    finish_work(&store);
    assert_eq!(read(&store, "v"), shown);
    assert!(store.check().unwrap().findings.is_empty());
}
