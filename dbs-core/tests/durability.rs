//! Order of writes that only a crash at the wrong moment, or two of them, would show.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    BLOCK, Event, FixedEnv, Mem, MemTail, SIZE, contents, fill, init, open, options, pattern,
};
use dbs_core::format::{BlockKind, block, entry};
use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::{ErrorKind, Store, Volume};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Offset and length of the regions, in device order.
fn regions(store: &Store) -> Vec<(u64, u64)> {
    let dump: serde_json::Value = serde_json::from_str(&common::dump(store)).unwrap();
    let region =
        |r: &serde_json::Value| (r["offset"].as_u64().unwrap(), r["length"].as_u64().unwrap());
    dump["regions"].as_array().unwrap().iter().map(region).collect()
}

fn uuid(disk: &Mem) -> [u8; 16] {
    disk.bytes()[16..32].try_into().unwrap()
}

/// Opens a store with a tail, so that nothing is committed that need not be.
fn open_with_tail(disk: &Arc<Mem>) -> Store {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    let env = Arc::new(FixedEnv::new(2));
    Store::open_on(storage, Some(MemTail::boxed()), env, false).unwrap()
}

/// A closed sample store.
fn sample() -> Arc<Mem> {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    fill(&store);
    store.close().unwrap();
    disk
}

/// Changes the payload of a metadata block and seals both copies anew.
fn reseal(
    disk: &Mem,
    (offset, length): (u64, u64),
    block: u64,
    kind: BlockKind,
    change: &dyn Fn(&mut [u8]),
) {
    for copy in 0..2 {
        let at = offset + copy * length / 2 + block * BLOCK as u64;
        let mut bytes = vec![0; BLOCK];
        disk.read_at(at, &mut bytes).unwrap();
        let lsn = block::open(&bytes, kind, &uuid(disk), at).unwrap().lsn.get();
        change(&mut bytes[block::HEADER_BYTES..]);
        block::seal(&mut bytes, kind, &uuid(disk), at, lsn, [0; 24]);
        disk.put(at, &bytes);
    }
}

#[test]
fn healing_the_superblock_never_writes_a_good_copy() {
    let good = sample();
    let copies = [0, BLOCK as u64, SIZE - BLOCK as u64];
    for bad in 1..7u32 {
        let disk = Arc::new(good.fork());
        let is_bad = |copy: usize| bad >> copy & 1 == 1;
        (0..3).filter(|copy| is_bad(*copy)).for_each(|copy| disk.flip(copies[copy] + 100, 1));
        let store = open(&disk, 3, false).unwrap();
        for event in disk.take_events() {
            let Event::Write(at, _) = event else { continue };
            if let Some(copy) = copies.iter().position(|address| *address == at) {
                assert!(is_bad(copy), "copies {bad:#b} bad: wrote {copy}");
            }
        }
        drop(store);
        let healed = disk.bytes();
        for (copy, at) in copies.iter().enumerate() {
            let at = *at as usize;
            assert_eq!(healed[at..at + BLOCK], good.bytes()[at..at + BLOCK], "copy {copy}");
        }
    }
}

#[test]
fn the_only_good_copy_of_a_block_is_written_last() {
    let good = sample();
    let regions = regions(&open(&good, 2, true).unwrap());
    for (region, bad) in [(0, 1), (1, 0), (1, 1), (5, 1)] {
        let disk = Arc::new(good.fork());
        let address = |copy: u64| regions[region].0 + copy * regions[region].1 / 2;
        disk.flip(address(bad) + 700, 1);
        let store = open(&disk, 3, false).unwrap();
        store.close().unwrap();
        let events = disk.take_events();
        let write_of = |copy| events.iter().position(|e| *e == Event::Write(address(copy), BLOCK));
        let (first, second) = (write_of(bad).unwrap(), write_of(1 - bad).unwrap());
        assert!(first < second, "region {region}, copy {bad} bad");
        assert!(events[first..second].contains(&Event::Flush), "region {region}, copy {bad} bad");
    }
}

#[test]
fn a_copy_of_an_earlier_store_behind_the_end_is_not_believed() {
    let earlier = Mem::new(2 * SIZE);
    Store::init_on(&earlier, &options(), &FixedEnv::new(9)).unwrap();
    let earlier = Arc::new(earlier);
    (0..3).for_each(|i| open(&earlier, i, false).unwrap().close().unwrap());
    let disk = sample();
    let before = contents(&open(&disk, 3, true).unwrap());
    disk.set_size(2 * SIZE).unwrap();
    let last = 2 * SIZE - BLOCK as u64;
    disk.put(last, &earlier.bytes()[last as usize..]);
    let store = open(&disk, 3, false).unwrap();
    assert_eq!(contents(&store), before);
    store.grow(2 * SIZE).unwrap();
    store.close().unwrap();
    assert_eq!(contents(&open(&disk, 4, false).unwrap()), before);
}

/// Deletes `v@s` while another thread, in the first flush of the deletion's commit, does a step of
/// background work and then `write`; the deletion must be durable before data is written.
fn delete_beside_work(write_before: bool, write: impl Fn(&Volume) + Send + Clone + 'static) {
    let disk = init(1);
    let store = open_with_tail(&disk);
    store.create_volume("v", 64 << 10).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &pattern(1, 64 << 10), false).unwrap();
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    if write_before {
        volume.write_at(0, &pattern(2, 4096), true).unwrap();
    }
    let data = regions(&store)[6].0;
    disk.take_events();
    let (done, finished) = mpsc::channel();
    let worker = (store.clone(), volume.clone());
    let mut once = Some(done);
    disk.on_flush(move || {
        let Some(done) = once.take() else { return };
        let (worker, write) = (worker.clone(), write.clone());
        std::thread::spawn(move || {
            while worker.0.work(1).unwrap().remaining > 1 {}
            write(&worker.1);
            done.send(()).unwrap();
        });
        std::thread::sleep(Duration::from_millis(200));
    });
    store.delete_snapshot("v", "s").unwrap();
    finished.recv_timeout(Duration::from_secs(20)).unwrap();
    let events = disk.take_events();
    let position = |wanted: &dyn Fn(u64) -> bool| {
        events.iter().position(|e| matches!(e, Event::Write(at, _) if wanted(*at))).unwrap()
    };
    let (group, overwritten) = (position(&|at| at < data), position(&|at| at >= data));
    assert!(group < overwritten, "{events:?}");
    assert!(events[group..overwritten].contains(&Event::Flush), "{events:?}");
    let mut bytes = vec![0; 8192];
    volume.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes[..4096], pattern(2, 4096));
    assert_eq!(bytes[4096..], pattern(1, 8192)[4096..]);
}

#[test]
fn a_merge_copies_nothing_before_the_deletion_is_durable() {
    delete_beside_work(true, |_| {});
}

#[test]
fn a_deleted_snapshots_extent_is_given_to_nobody_before_that_is_durable() {
    // Handed to the head, the extent would be overwritten in place.
    delete_beside_work(false, |volume| volume.write_at(0, &pattern(2, 4096), false).unwrap());
}

#[test]
fn vacuum_keeps_extents_whose_freeing_is_not_durable() {
    let disk = init(1);
    let store = open_with_tail(&disk);
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &pattern(1, 1 << 20), true).unwrap();
    // Each flush of the vacuum, the last one too, finds one more extent freed behind its back.
    let next = AtomicU64::new(15);
    let on = Arc::new(AtomicBool::new(true));
    let (enabled, writer) = (Arc::clone(&on), volume.clone());
    disk.on_flush(move || {
        if enabled.load(Ordering::Relaxed) && next.load(Ordering::Relaxed) > 0 {
            let extent = next.fetch_sub(1, Ordering::Relaxed);
            writer.discard(extent << 16, 1 << 16).unwrap();
        }
    });
    store.vacuum(&mut |_, _| true).unwrap();
    on.store(false, Ordering::Relaxed);
    // Power is lost: what was not flushed, the last discard, never was.
    let disk = Arc::new(disk.fork());
    let after = contents(&open(&disk, 3, false).unwrap());
    let expected = pattern(1, 1 << 20);
    for (index, extent) in after["v"].chunks(1 << 16).enumerate() {
        let old = expected[index << 16..(index + 1) << 16] == *extent;
        assert!(old || extent.iter().all(|byte| *byte == 0), "extent {index}");
    }
    assert!(after["v"][..1 << 16] == expected[..1 << 16]);
}

#[test]
fn entries_of_a_free_slot_are_freed_and_inherited_by_nobody() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 128 << 10).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(1, 4096), true).unwrap();
    let (extents, data) = (regions(&store)[5], regions(&store)[6].0);
    store.close().unwrap();
    disk.put(data + (64 << 10), &pattern(9, 64 << 10));
    // A second entry says that its owner is snapshot 2, which is the next to be created.
    reseal(&disk, extents, 0, BlockKind::Extents, &|payload| {
        let length = entry::HEADER_BYTES + 4;
        let (first, second) = payload.split_at_mut(length);
        second[..length].copy_from_slice(first);
        second[..4].copy_from_slice(&2u32.to_le_bytes());
        second[4..8].copy_from_slice(&1u32.to_le_bytes());
    });
    let store = open(&disk, 3, false).unwrap();
    assert!(store.info().warnings.iter().any(|w| w.contains("snapshot slot 2")));
    store.create_volume("w", 128 << 10).unwrap();
    store.close().unwrap();
    let store = open(&disk, 4, false).unwrap();
    assert!(contents(&store)["w"].iter().all(|byte| *byte == 0));
    assert!(store.check().unwrap().findings.is_empty());
}

#[test]
fn more_entries_of_free_slots_than_fit_a_group_are_damage() {
    let disk = sample();
    let extents = regions(&open(&disk, 2, true).unwrap())[5];
    reseal(&disk, extents, 0, BlockKind::Extents, &|payload| {
        for (logical, entry) in payload.chunks_exact_mut(20).take(128).enumerate() {
            entry.fill(0);
            entry[0] = 16;
            entry[4] = logical as u8;
        }
    });
    for read_only in [true, false] {
        let error = open(&disk, 3, read_only).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn a_snapshot_that_is_its_own_parent_is_refused() {
    let disk = sample();
    let snapshots = regions(&open(&disk, 2, true).unwrap())[1];
    reseal(&disk, snapshots, 0, BlockKind::Snapshots, &|payload| {
        payload[44..48].copy_from_slice(&1u32.to_le_bytes());
    });
    for read_only in [true, false] {
        let error = open(&disk, 3, read_only).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("loop"), "{error}");
    }
    assert!(Store::check_on(&*disk).unwrap().findings.iter().any(|f| f.message.contains("loop")));
}

#[test]
fn usage_of_a_long_chain_needs_no_deep_stack() {
    let mut wide = options();
    wide.max_snapshots = Some(8000);
    let disk = Mem::new(256 << 20);
    Store::init_on(&disk, &wide, &FixedEnv::new(1)).unwrap();
    let disk = Arc::new(disk);
    let store = open_with_tail(&disk);
    store.create_volume("v", 64 << 10).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(1, 4096), false).unwrap();
    for index in 0..4000 {
        store.create_snapshot("v", &format!("s{index}"), &SnapshotOptions::default()).unwrap();
    }
    for index in 1..3999 {
        store.delete_snapshot("v", &format!("s{index}")).unwrap();
    }
    let small = std::thread::Builder::new().stack_size(512 << 10);
    let usage = small.spawn(move || store.usage("v", Some("s0")).unwrap()).unwrap().join().unwrap();
    assert_eq!((usage.referenced, usage.exclusive), (4096, 0));
}

/// Without a tail: a write over a block whose first write is still being committed needs no record
/// of its own, and must not be acknowledged before the other's is durable.
#[test]
fn an_overwrite_is_not_acknowledged_before_the_record_it_rests_on() {
    let disk = init(1);
    let store = open(&disk, 1, false).unwrap();
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    let (acknowledged, image) = mpsc::channel();
    let mut second = Some((volume.clone(), Arc::clone(&disk), acknowledged));
    disk.on_flush(move || {
        let Some((volume, disk, acknowledged)) = second.take() else { return };
        std::thread::spawn(move || {
            volume.write_at(0, &pattern(2, BLOCK), false).unwrap();
            // What a kill at this moment leaves.
            acknowledged.send(disk.fork()).unwrap();
        });
        // Time enough for an acknowledgement that comes too early.
        std::thread::sleep(Duration::from_millis(200));
    });
    volume.write_at(0, &pattern(1, BLOCK), false).unwrap();
    let image = Arc::new(image.recv_timeout(Duration::from_secs(10)).unwrap());
    let found = contents(&open(&image, 2, false).unwrap());
    assert!(found["v"][..BLOCK] == pattern(2, BLOCK), "an acknowledged write is lost");
}
