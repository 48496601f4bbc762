//! The map of the device: what its extents hold, in as many cells as were asked for, and who holds them.

use crate::checksums::{device, scrub};
use crate::common::{BLOCK, FixedEnv, Mem, SIZE, finish_work, init_unchecked, options, pattern};
use dbs_core::info::{ExtentCounts, SpaceMap};
use dbs_core::{ErrorKind, InitOptions, Store};
use std::sync::Arc;

const EXTENT: usize = 64 << 10;

fn open(disk: &Arc<Mem>) -> Store {
    let storage: Arc<dyn dbs_core::io::Storage> = Arc::clone(disk) as _;
    Store::open_on(storage, None, Arc::new(FixedEnv::new(2)), false).unwrap()
}

/// All extents by kind: free, pending, data, shared, dirty, damaged.
fn sum(map: &SpaceMap) -> [u32; 6] {
    let mut sum = [0; 6];
    for run in &map.runs {
        let of = kinds(&run.extents);
        sum.iter_mut().zip(of).for_each(|(sum, count)| *sum += run.cells * count);
    }
    sum
}

fn kinds(counts: &ExtentCounts) -> [u32; 6] {
    let ExtentCounts { free, pending, data, shared, dirty, damaged, .. } = *counts;
    [free, pending, data, shared, dirty, damaged]
}

fn all(store: &Store) -> [u32; 6] {
    sum(&store.space_map(0, None, u32::MAX).unwrap())
}

#[test]
fn each_extent_is_counted_once_in_any_number_of_cells() {
    let store = open(&init_unchecked(1));
    let total = store.info().extents_total as u32;
    assert_eq!(all(&store), [total, 0, 0, 0, 0, 0]);
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &pattern(1, 3 * EXTENT), true).unwrap();
    assert_eq!(all(&store), [total - 3, 0, 3, 0, 0, 0]);
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    volume.write_at(0, &pattern(2, EXTENT), true).unwrap();
    let expected = [total - 4, 0, 1, 3, 0, 0];
    for cells in (1..70).chain([total - 1, total, total + 1, u32::MAX]) {
        let map = store.space_map(0, None, cells).unwrap();
        let there: u32 = map.runs.iter().map(|run| run.cells).sum();
        assert!(there <= cells, "{there} of {cells}");
        assert_eq!(u64::from(there), map.length.div_ceil(map.cell_size));
        assert_eq!(sum(&map), expected, "{cells} cells");
        assert_eq!(map.runs.iter().map(|run| run.extents.total() * run.cells).sum::<u32>(), total);
    }
    // A part in the middle of extents is widened to them, and nothing is beyond the end.
    let part = store.space_map(EXTENT as u64 + 1, Some(EXTENT as u64), 9).unwrap();
    assert_eq!((part.offset, part.length), (EXTENT as u64, 2 * EXTENT as u64));
    assert_eq!(sum(&part), [0, 0, 0, 2, 0, 0]);
    let last = store.space_map(part.size - 1, Some(u64::MAX), 1).unwrap();
    assert_eq!((last.length, sum(&last)), (EXTENT as u64, [1, 0, 0, 0, 0, 0]));
    for (offset, cells) in [(part.size, 1), (u64::MAX, 1), (0, 0)] {
        let error = store.space_map(offset, None, cells).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }

    drop(volume);
    store.delete_volume("v").unwrap();
    finish_work(&store);
    store.flush().unwrap();
    assert_eq!(store.info().extents_free as u32, total);
    let freed = all(&store);
    assert_eq!((freed[0] + freed[1], freed[2..].iter().sum::<u32>()), (total, 0));
}

#[test]
fn owners_are_named_those_that_hold_most_first() {
    let store = open(&init_unchecked(1));
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    for at in 0..10_usize {
        let extents = if at == 7 { 3 } else { 1 };
        volume.write_at(EXTENT as u64, &pattern(1, extents * EXTENT), true).unwrap();
        store.create_snapshot("v", &format!("s{at}"), &Default::default()).unwrap();
    }
    let size = store.space_map(0, None, 1).unwrap().size;
    let found = store.space_owners(0, size).unwrap();
    assert_eq!((found.owners.len(), found.others, found.length), (8, 2, size));
    assert_eq!(found.owners[0].place.to_string(), "byte 65536 of `v@s7`");
    assert_eq!(found.owners[0].extents, 3);
    assert_eq!((found.extents.data, found.extents.shared), (0, 12));
    let one = store.space_owners(0, 1).unwrap();
    assert_eq!((one.length, one.owners.len(), one.others), (EXTENT as u64, 1, 0));
    assert_eq!(one.owners[0].place.to_string(), "byte 65536 of `v@s0`");
    let free = store.space_owners(size - 1, 1).unwrap();
    assert_eq!((free.owners.len(), free.extents.free), (0, 1));
    assert_eq!(store.space_owners(size, 1).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn what_is_written_is_dirty_and_what_is_damaged_is_shown_until_it_is_scrubbed_anew() {
    let disk = Mem::new(SIZE);
    let checked = InitOptions { checksums: true, ..options() };
    Store::init_on(&disk, &checked, &FixedEnv::new(1)).unwrap();
    let disk = Arc::new(disk);
    let store = open(&disk);
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &pattern(1, 2 * EXTENT), true).unwrap();
    let total = store.info().extents_total as u32;
    assert_eq!(all(&store), [total - 2, 0, 0, 0, 2, 0]);
    let place = device(&volume, EXTENT as u64);
    drop(volume);
    store.close().unwrap();

    let store = open(&disk);
    assert_eq!(all(&store), [total - 2, 0, 2, 0, 0, 0]);
    disk.flip(place, 1);
    assert_eq!(scrub(&store).damaged, BLOCK as u64);
    assert_eq!(all(&store), [total - 2, 0, 1, 0, 0, 1]);
    let damaged = store.space_map(0, None, u32::MAX).unwrap();
    assert_eq!(kinds(&damaged.runs[1].extents), [0, 0, 0, 0, 0, 1], "the second extent");
    disk.flip(place, 1);
    assert_eq!(scrub(&store).damaged, 0);
    assert_eq!(all(&store), [total - 2, 0, 2, 0, 0, 0]);

    // A read finds it as well.
    disk.flip(place, 1);
    let volume = store.volume("v").unwrap();
    volume.read_at(EXTENT as u64, &mut vec![0; BLOCK]).unwrap_err();
    assert_eq!(all(&store), [total - 2, 0, 1, 0, 0, 1]);
    // What takes the place of the extent is not damaged.
    drop(volume);
    store.delete_volume("v").unwrap();
    finish_work(&store);
    store.flush().unwrap();
    assert_eq!(all(&store)[5], 0);
    store.create_volume("w", 1 << 20).unwrap();
    let volume = store.volume("w").unwrap();
    volume.write_at(0, &pattern(3, 2 * EXTENT), true).unwrap();
    assert_eq!(all(&store)[2..], [0, 0, 2, 0]);
}
