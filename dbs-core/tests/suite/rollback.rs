//! Rollback that keeps the volume's size: behind the snapshot's end there is nothing, whatever its
//! layers still hold.

use crate::common::{BLOCK, Mem, finish_work, init, open, pattern};
use dbs_core::info::LayerState;
use dbs_core::store::SnapshotOptions;
use dbs_core::{ErrorKind, Store};
use std::sync::Arc;

const EXTENT: u64 = 64 << 10;

/// A volume of six extents full of data, snapshot `full` of it, then `cut` of its first `size`
/// bytes: as shrinking leaves them, or with all of `full` behind its end.
fn sample(size: u64, bare: bool) -> (Arc<Mem>, Store) {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 6 * EXTENT).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(1, 6 * EXTENT as usize), false).unwrap();
    store.create_snapshot("v", "full", &SnapshotOptions::default()).unwrap();
    store.resize_volume("v", size).unwrap();
    if bare {
        store.rollback_keeping_size("v", "full").unwrap();
    }
    store.create_snapshot("v", "cut", &SnapshotOptions::default()).unwrap();
    (disk, store)
}

fn read(store: &Store, spec: &str) -> Vec<u8> {
    let volume = store.volume(spec).unwrap();
    let mut bytes = vec![0xaa; volume.size() as usize];
    volume.read_at(0, &mut bytes).unwrap();
    bytes
}

fn wanted(size: u64, end: u64) -> Vec<u8> {
    let mut bytes = pattern(1, 6 * EXTENT as usize);
    bytes[size as usize..].fill(0);
    bytes.resize(end as usize, 0);
    bytes
}

#[test]
fn what_is_behind_the_snapshot_reads_as_zeros() {
    let block = BLOCK as u64;
    for size in [512, block, block + 512, EXTENT, EXTENT + block, 2 * EXTENT - 512, 5 * EXTENT] {
        for keep in [size + 512, 3 * EXTENT + 1536, 6 * EXTENT, 7 * EXTENT - block] {
            if keep > size {
                roll_back_to_cut(size, keep, false);
                roll_back_to_cut(size, keep, true);
            }
        }
    }
}

fn roll_back_to_cut(size: u64, keep: u64, bare: bool) {
    let (disk, store) = sample(size, bare);
    store.resize_volume("v", keep).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(9, 512), false).unwrap();
    store.rollback_keeping_size("v", "cut").unwrap();
    let what = format!("snapshot of {size}, volume of {keep}, bare {bare}");
    assert_eq!(store.volume_info("v").unwrap().size, keep, "{what}");
    assert!(read(&store, "v") == wanted(size, keep), "{what}");
    assert!(read(&store, "v@cut") == wanted(size, size), "{what}");
    drop(store);
    // As durable, and with nothing that is behind the new end either.
    let store = open(&disk, 3, false).unwrap();
    store.resize_volume("v", 8 * EXTENT).unwrap();
    assert!(read(&store, "v") == wanted(size, 8 * EXTENT), "{what}, grown");
    finish_work(&store);
    assert!(read(&store, "v") == wanted(size, 8 * EXTENT), "{what}, merged");
    assert!(store.check().unwrap().findings.is_empty(), "{what}");
}

#[test]
fn a_larger_snapshot_shows_its_beginning() {
    let (_, store) = sample(EXTENT + 512, true);
    store.rollback_keeping_size("v", "full").unwrap();
    assert!(read(&store, "v") == wanted(EXTENT + 512, EXTENT + 512));
    store.resize_volume("v", 2 * EXTENT).unwrap();
    assert!(read(&store, "v") == wanted(EXTENT + 512, 2 * EXTENT));
    assert_eq!(read(&store, "v@full"), pattern(1, 6 * EXTENT as usize));
    // The other kind takes the snapshot's size.
    store.rollback("v", "full").unwrap();
    assert_eq!(read(&store, "v"), pattern(1, 6 * EXTENT as usize));
}

#[test]
fn a_refused_rollback_changes_nothing_and_leaks_nothing() {
    let (_, store) = sample(EXTENT + 512, true);
    store.resize_volume("v", 6 * EXTENT).unwrap();
    // What is deleted would make room. The last slots go to other volumes.
    finish_work(&store);
    let mut filler = 0;
    while store.create_volume(&format!("filler{filler}"), 512).is_ok() {
        filler += 1;
    }
    while store.info().snapshots < store.info().snapshots_max {
        let name = format!("s{}", store.info().snapshots);
        store.create_snapshot("filler0", &name, &SnapshotOptions::default()).unwrap();
    }
    let before = store.info();
    for _ in 0..3 {
        let error = store.rollback_keeping_size("v", "cut").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    }
    let after = store.info();
    assert_eq!((before.extents_free, before.extents_pending), (after.extents_free, 0));
    store.delete_snapshot("filler0", &store.snapshots("filler0", false).unwrap()[0].name).unwrap();
    finish_work(&store);
    store.rollback_keeping_size("v", "cut").unwrap();
    assert!(read(&store, "v") == wanted(EXTENT + 512, 6 * EXTENT));
    assert_eq!(store.rollback_keeping_size("v", "gone").unwrap_err().kind(), ErrorKind::NotFound);
}

/// Found by review: a volume was grown by the size it had had before it was held. What lay behind its
/// end in its last block came to light.
#[test]
fn a_volume_that_shrinks_before_it_is_held_to_be_grown_shows_nothing_old() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", EXTENT + 512).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(1, EXTENT as usize + 512), false).unwrap();
    // Growing looks at the last block first.
    let other = store.clone();
    disk.on_read(move || other.resize_volume("v", 512).unwrap());
    store.resize_volume("v", 3 * EXTENT).unwrap();
    assert!(read(&store, "v") == wanted(512, 3 * EXTENT));
}

/// Found by review: what was asked of a snapshot was done to its volume, with the snapshot's bytes.
#[test]
fn a_snapshot_is_neither_resized_nor_flattened() {
    let (_, store) = sample(EXTENT + 512, true);
    let before = read(&store, "v");
    for size in [512, 6 * EXTENT] {
        assert_eq!(store.resize_volume("v@cut", size).unwrap_err().kind(), ErrorKind::NotFound);
    }
    let flattened = store.flatten("v@cut", &mut |_, _| true);
    assert_eq!(flattened.unwrap_err().kind(), ErrorKind::NotFound);
    assert!(read(&store, "v") == before);
}

/// Found by review: who grew a volume cleared what others had written behind its old end since it had
/// looked.
#[test]
fn what_is_written_while_another_grows_the_volume_stays() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 4096).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(1, 4096), false).unwrap();
    store.resize_volume("v", 512).unwrap();
    let other = store.clone();
    // Growing looks at the last block first.
    disk.on_read(move || {
        other.resize_volume("v", 8192).unwrap();
        other.volume("v").unwrap().write_at(512, &pattern(2, 3584), false).unwrap();
    });
    store.resize_volume("v", 16384).unwrap();
    assert!(read(&store, "v")[512..4096] == pattern(2, 3584));
}

/// Found by review: a size that was refused had hidden what is behind the old end before, as far as the refused size: no
/// store opens that has something behind the end of each possible volume. With larger sizes it was the beginning.
#[test]
fn a_size_that_is_refused_changes_nothing() {
    const LARGEST: u64 = 64 << 40;
    for size in [LARGEST + 512, 100 << 40, 1 << 52, 5 << 50, 1 << 63, u64::MAX - 511, EXTENT + 1, 0]
    {
        // Something is held behind the old end: the last block, and what the snapshot has of the last extent.
        let (disk, store) = sample(EXTENT + 1536, false);
        store.clone_volume("v", "cut", "clone").unwrap();
        let before = read(&store, "clone");
        let refused = store.resize_volume("clone", size).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{size}: {refused}");
        assert!(read(&store, "clone") == before, "{size}");
        drop(store);
        let store = open(&disk, 3, false).unwrap();
        assert!(read(&store, "clone") == before, "{size}");
        assert!(store.check().unwrap().findings.is_empty(), "{size}");
    }
}

/// Found by review: a volume's I/O waited for time in proportion to its new size, not to what is there: half a minute for 64 TiB.
#[test]
fn growing_goes_no_further_than_what_is_there() {
    const FAR: u64 = 100 << 20;
    const SIZE: u64 = 1 << 30;
    const LENGTH: u64 = BLOCK as u64;
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", SIZE).unwrap();
    let block = pattern(1, BLOCK);
    for at in [0, EXTENT, FAR] {
        store.volume("v").unwrap().write_at(at, &block, false).unwrap();
    }
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    store.clone_volume("v", "s", "c").unwrap();
    for volume in ["v", "c"] {
        store.resize_volume(volume, EXTENT + 512).unwrap();
        store.resize_volume(volume, SIZE).unwrap();
        let ranges = store.layer(volume, None).unwrap().map(0, SIZE, usize::MAX).unwrap();
        let hides = |state| ranges.iter().filter(move |range| range.state == state);
        let end = hides(LayerState::Zero).map(|range| range.offset + range.length).max().unwrap();
        assert!((FAR + LENGTH..FAR + (64 << 20)).contains(&end), "{volume}: {end}");
        let mut found = vec![1; BLOCK];
        for at in [EXTENT + LENGTH, FAR, SIZE - LENGTH] {
            store.volume(volume).unwrap().read_at(at, &mut found).unwrap();
            assert!(found.iter().all(|byte| *byte == 0), "{volume}: {at}");
        }
    }
    drop(store);
    assert!(open(&disk, 3, false).unwrap().check().unwrap().findings.is_empty());
}
