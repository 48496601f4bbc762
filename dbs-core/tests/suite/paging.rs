//! Bitmaps of extents within a bound of memory: what does not fit is on the device alone.

use crate::common::BLOCK;
use dbs_core::format::{Geometry, RegionKind};
use dbs_core::info::RangeState;
use dbs_core::{ErrorKind, InitOptions, OpenOptions, Store, TailPlace};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const EXTENT: u64 = 64 << 10;
const EXTENTS: u64 = 1600;
/// Bytes of memory, and of the bitmaps of a metadata block: 201 extents, a word each.
const MEMORY: u64 = 4 << 10;
const OF_A_BLOCK: u64 = 201 * 8;

fn open(path: &Path, memory: u64, read_only: bool) -> Store {
    let tail = TailPlace::None;
    let options =
        OpenOptions { metadata_memory: Some(memory), tail, read_only, ..Default::default() };
    Store::open(path, &options).unwrap()
}

/// A store of extents of which every other block is data.
fn make(path: &Path) {
    let options = InitOptions {
        size: Some(128 << 20),
        extent_size: EXTENT,
        checksums: false,
        ..InitOptions::default()
    };
    Store::init(path, &options).unwrap();
    // With a tail, or each write would be a commit.
    let options = OpenOptions { metadata_memory: Some(MEMORY), ..OpenOptions::default() };
    let store = Store::open(path, &options).unwrap();
    store.create_volume("v", EXTENTS * EXTENT).unwrap();
    let volume = store.volume("v").unwrap();
    for at in (0..EXTENTS * EXTENT).step_by(2 * BLOCK) {
        volume.write_at(at, &[at as u8 | 1; BLOCK], false).unwrap();
    }
    store.close().unwrap();
}

fn bitmaps(store: &Store) -> u64 {
    store.info().lookups.bitmap_memory
}

/// Without a bound it takes 12.8 KB. Not even while all of it is read, or told, does it take more than the
/// memory and what one step needs.
#[test]
fn a_store_whose_every_other_block_is_data_is_open_within_its_memory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    make(&path);
    let all = open(&path, 1 << 20, false);
    assert_eq!(bitmaps(&all), EXTENTS * 8);
    all.set_metadata_memory(MEMORY);
    assert!(bitmaps(&all) <= MEMORY, "{}", bitmaps(&all));
    all.close().unwrap();
    for read_only in [true, false] {
        let store = open(&path, MEMORY, read_only);
        assert!(bitmaps(&store) <= MEMORY, "{}", bitmaps(&store));
        let volume = store.volume("v").unwrap();
        let mut bytes = vec![0; 2 * BLOCK];
        for at in (0..EXTENTS * EXTENT).step_by(bytes.len()) {
            volume.read_at(at, &mut bytes).unwrap();
            assert_eq!((bytes[0], bytes[BLOCK]), (at as u8 | 1, 0));
            assert!(bitmaps(&store) <= MEMORY + OF_A_BLOCK, "{}", bitmaps(&store));
        }
        let map = volume.map(0, EXTENTS * EXTENT, usize::MAX).unwrap();
        let data = map.iter().filter(|range| range.state == RangeState::Data).count() as u64;
        assert_eq!(data, EXTENTS * EXTENT / BLOCK as u64 / 2);
        assert!(bitmaps(&store) <= MEMORY, "{}", bitmaps(&store));
        assert!(store.info().lookups.bitmap_reads > 8);
        let mut dump = Vec::new();
        store.dump(&mut dump).unwrap();
        assert!(dump.len() as u64 > EXTENTS * 100);
    }
}

/// Bitmaps that came in any order lie beside those of other metadata blocks. Memory has its bound all the same, and is
/// used.
#[test]
fn what_is_left_of_bitmaps_in_many_places_comes_together() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = InitOptions {
        size: Some(128 << 20),
        extent_size: EXTENT,
        checksums: false,
        ..InitOptions::default()
    };
    Store::init(&path, &options).unwrap();
    let options = OpenOptions { metadata_memory: Some(1 << 20), ..OpenOptions::default() };
    let store = Store::open(&path, &options).unwrap();
    store.create_volume("v", EXTENTS * EXTENT).unwrap();
    let volume = store.volume("v").unwrap();
    let at = |extent: u64, block: u64| extent * EXTENT + block * BLOCK as u64;
    (0..EXTENTS).for_each(|extent| volume.write_at(at(extent, 1), &[1; BLOCK], false).unwrap());
    // All extents, but no two neighbours one after the other: 397 and 1600 have no divisor in common.
    for extent in (0..EXTENTS).map(|number| number * 397 % EXTENTS) {
        volume.write_at(at(extent, 3), &[3; BLOCK], false).unwrap();
    }
    while store.settle().unwrap() {}
    assert_eq!(bitmaps(&store), EXTENTS * 8);
    store.set_metadata_memory(MEMORY);
    let left = bitmaps(&store);
    assert!((MEMORY / 4..=MEMORY).contains(&left), "{left}");
    for extent in 0..EXTENTS {
        let mut bytes = [0; BLOCK];
        for block in [1, 3] {
            volume.read_at(at(extent, block), &mut bytes).unwrap();
            assert_eq!(bytes, [block as u8; BLOCK]);
        }
        assert!(bitmaps(&store) <= MEMORY + 2 * OF_A_BLOCK, "{}", bitmaps(&store));
    }
}

/// Nothing leaves memory unless the user has given a bound.
#[test]
fn without_a_bound_nothing_leaves_memory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    make(&path);
    let options = OpenOptions { lookup_memory: Some(0), ..OpenOptions::default() };
    let store = Store::open(&path, &options).unwrap();
    while store.settle().unwrap() {}
    let volume = store.volume("v").unwrap();
    volume.write_at(BLOCK as u64, &[1; BLOCK], true).unwrap();
    while store.settle().unwrap() {}
    let lookups = store.info().lookups;
    assert!(lookups.bitmap_memory >= (EXTENTS - 1) * 8, "{lookups:?}");
    assert_eq!((lookups.bitmap_reads, lookups.memory_max), (0, 0));
}

/// What the journal and the tail change is redone on bitmaps that are read for it.
#[test]
fn what_was_not_written_back_is_redone_on_what_is_on_the_device() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    make(&path);
    // With room, or a commit would write the metadata block back.
    let options = |memory| OpenOptions { metadata_memory: Some(memory), ..OpenOptions::default() };
    let store = Store::open(&path, &options(1 << 20)).unwrap();
    let volume = store.volume("v").unwrap();
    let odd = |extent: u64| extent * EXTENT + BLOCK as u64;
    volume.write_at(odd(3), &[2; BLOCK], true).unwrap();
    volume.write_at(odd(900), &[2; BLOCK], false).unwrap();
    drop((volume, store));
    let store = Store::open(&path, &options(0)).unwrap();
    let volume = store.volume("v").unwrap();
    for (extent, byte) in [(3, 2), (900, 2), (4, 0), (901, 0)] {
        let mut bytes = [1; BLOCK];
        volume.read_at(odd(extent), &mut bytes).unwrap();
        assert_eq!(bytes, [byte; BLOCK], "extent {extent}");
    }
    let report = store.check().unwrap();
    assert_eq!(report.worst(), None, "{report:?}");
}

/// A write whose first extent is new, and whose second one has its bitmap on the device alone, takes one extent.
#[test]
fn a_write_that_stops_at_its_second_extent_gives_the_first_one_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    make(&path);
    let store = open(&path, 0, false);
    let volume = store.volume("v").unwrap();
    volume.discard(5 * EXTENT, EXTENT).unwrap();
    while store.settle().unwrap() {}
    let before = store.info().allocated;
    // Even blocks are data: the last one of an extent is not, and the first one is, which the device knows.
    let bytes = [3; 3 * BLOCK];
    volume.write_at(6 * EXTENT - BLOCK as u64, &bytes, false).unwrap();
    assert_eq!(store.info().allocated, before + EXTENT);
    let mut found = [0; 5 * BLOCK];
    volume.read_at(6 * EXTENT - 2 * BLOCK as u64, &mut found).unwrap();
    assert!(found[..BLOCK] == [0; BLOCK] && found[BLOCK..4 * BLOCK] == bytes);
    assert_ne!(found[4 * BLOCK], 3);
    assert_eq!(store.check().unwrap().worst(), None);
    // None if the bitmap cannot be had.
    while store.settle().unwrap() {}
    store.set_metadata_memory(0);
    let options = InitOptions { extent_size: EXTENT, checksums: false, ..InitOptions::default() };
    rot(&path, 128 << 20, &options);
    volume.discard(5 * EXTENT, EXTENT).unwrap();
    let before = store.info().allocated;
    let written = volume.write_at(6 * EXTENT - BLOCK as u64, &bytes, false);
    assert_eq!(written.unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(store.info().allocated, before);
}

/// Of a run of zeros that is merged over many entries each is looked at once, and few at a time.
#[test]
fn a_run_of_zeros_is_merged_part_by_part() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = InitOptions {
        size: Some(256 << 20),
        extent_size: EXTENT,
        checksums: false,
        ..InitOptions::default()
    };
    Store::init(&path, &options).unwrap();
    let store = Store::open(&path, &OpenOptions::default()).unwrap();
    store.create_volume("v", EXTENTS * EXTENT).unwrap();
    let volume = store.volume("v").unwrap();
    let at = |extent: u64, block: u64| extent * EXTENT + block * BLOCK as u64;
    (0..EXTENTS).for_each(|extent| volume.write_at(at(extent, 1), &[1; BLOCK], false).unwrap());
    store.create_snapshot("v", "below", &Default::default()).unwrap();
    volume.discard(0, EXTENTS * EXTENT).unwrap();
    store.create_snapshot("v", "zeros", &Default::default()).unwrap();
    (0..EXTENTS).for_each(|extent| volume.write_at(at(extent, 2), &[2; BLOCK], false).unwrap());
    (0..EXTENTS).for_each(|extent| volume.write_at(at(extent, 9), &[9; BLOCK], false).unwrap());
    store.delete_snapshot("v", "zeros").unwrap();
    let settle = || {
        while store.settle().unwrap() {}
        store.set_metadata_memory(0);
    };
    settle();
    let before = store.info().lookups.bitmap_reads;
    let mut steps = 0;
    while store.work(1).unwrap().remaining > 0 {
        settle();
        steps += 1;
    }
    let reads = store.info().lookups.bitmap_reads - before;
    assert!(steps >= EXTENTS / 64, "{steps} steps");
    // 64 extents are in one metadata block, or in two.
    assert!(reads <= EXTENTS / 64 + EXTENTS / 201 + 8, "{reads} reads");
    let mut found = vec![0; EXTENT as usize];
    for extent in 0..EXTENTS {
        volume.read_at(at(extent, 0), &mut found).unwrap();
        for (block, bytes) in (0..).zip(found.chunks_exact(BLOCK)) {
            let expected = if [2, 9].contains(&block) { block } else { 0 };
            assert_eq!(bytes[0], expected, "block {block} of extent {extent}");
        }
    }
    drop(volume);
    assert_eq!(store.check().unwrap().worst(), None);
}

/// A scrub counts what nobody knows the blocks of as damaged, and goes on.
#[test]
fn a_scrub_goes_on_after_a_metadata_block_that_is_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let size = 64 << 20;
    let options = InitOptions { size: Some(size), extent_size: EXTENT, ..InitOptions::default() };
    Store::init(&path, &options).unwrap();
    let store = open(&path, 0, false);
    let items = u64::from(geometry(size, &options).items_per_block(RegionKind::Extents));
    let extents = items + 20;
    store.create_volume("v", extents * EXTENT).unwrap();
    let volume = store.volume("v").unwrap();
    for extent in 0..extents {
        for block in [0, 2] {
            volume.write_at(extent * EXTENT + block * BLOCK as u64, &[5; BLOCK], false).unwrap();
        }
    }
    while store.settle().unwrap() {}
    let found = store.scrub(true, &mut |_| true).unwrap();
    assert_eq!((found.checked, found.damaged), (extents * 2 * BLOCK as u64, 0));
    rot(&path, size, &options);
    let found = store.scrub(true, &mut |_| true).unwrap();
    assert_eq!((found.checked, found.damaged), (20 * 2 * BLOCK as u64, items * EXTENT));
    assert_eq!(found.ranges.iter().map(|range| range.length).sum::<u64>(), items * EXTENT);
    assert_eq!(found.done, found.total);
}

/// Damages both copies of the first metadata block of extents.
fn rot(path: &Path, size: u64, options: &InitOptions) {
    let file = File::options().write(true).open(path).unwrap();
    for copy in 0..2 {
        let at = geometry(size, options).block_address(RegionKind::Extents, 0, copy);
        file.write_all_at(&[7; BLOCK], at).unwrap();
    }
}

fn geometry(size: u64, options: &InitOptions) -> Geometry {
    Geometry::plan(size, options).unwrap()
}
