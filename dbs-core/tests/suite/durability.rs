//! Order of writes that only a crash at the wrong moment, or two of them, would show.

use crate::common::{
    BLOCK, Event, FixedEnv, Mem, MemTail, SIZE, contents, fill, finish_work, init, open, options,
    pattern,
};
use dbs_core::format::{BlockKind, block, entry};
use dbs_core::io::{Storage, tail as tails};
use dbs_core::store::{SnapshotOptions, peek_uuid, uuid_text};
use dbs_core::volume::{Finish, Request, Start};
use dbs_core::{ErrorKind, InitOptions, OpenOptions, Store, TailPlace, Volume};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Offset and length of the regions, in device order.
fn regions(store: &Store) -> Vec<(u64, u64)> {
    let dump: serde_json::Value = serde_json::from_str(&crate::common::dump(store)).unwrap();
    let region =
        |r: &serde_json::Value| (r["offset"].as_u64().unwrap(), r["length"].as_u64().unwrap());
    dump["regions"].as_array().unwrap().iter().map(region).collect()
}

fn uuid(disk: &Mem) -> [u8; 16] {
    disk.bytes()[16..32].try_into().unwrap()
}

/// Opens a store with a tail, so that nothing is committed that need not be.
pub fn open_with_tail(disk: &Arc<Mem>) -> Store {
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
    finished.recv_timeout(Duration::from_secs(120)).unwrap();
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

/// Found by review: beside thousands of clones of one snapshot, a look at the space in use stopped all I/O for seconds. It
/// counted extents, and for each of them it asks every clone.
#[test]
fn the_space_of_what_has_many_clones_is_looked_at_in_steps() {
    let (extents, clones) = (40, 200);
    let wide = InitOptions { max_volumes: Some(256), max_snapshots: Some(512), ..options() };
    let disk = Mem::new(256 << 20);
    Store::init_on(&disk, &wide, &FixedEnv::new(1)).unwrap();
    let store = open_with_tail(&Arc::new(disk));
    let extent = store.info().extent_size;
    store.create_volume("v", extents * extent).unwrap();
    let volume = store.volume("v").unwrap();
    for index in 0..extents {
        volume.write_at(index * extent, &pattern(1, 4096), false).unwrap();
    }
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    for index in 0..clones {
        let clone = format!("c{index}");
        store.clone_volume("v", "s", &clone).unwrap();
        // All of it is hidden, without space.
        store.volume(&clone).unwrap().write_zeroes(0, extents * extent, false).unwrap();
    }
    volume.write_zeroes(0, extents * extent, false).unwrap();
    let mut steps = 0;
    let mut count = || {
        steps += 1;
        true
    };
    let usage = store.usage_while("v", Some("s"), &mut count).unwrap();
    assert_eq!((usage.referenced, usage.exclusive), (extents * 4096, extents * 4096));
    assert!(steps > extents * clones / 4096, "{steps} steps");
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
    let image = Arc::new(image.recv_timeout(Duration::from_secs(120)).unwrap());
    let found = contents(&open(&image, 2, false).unwrap());
    assert!(found["v"][..BLOCK] == pattern(2, BLOCK), "an acknowledged write is lost");
}

/// Found by review: closing looked for what was not committed and gave the tail up later, with the
/// superblock's writes in between. What was acknowledged meanwhile was in the tail only.
#[test]
fn what_is_acknowledged_while_a_store_is_closed_is_kept() {
    let disk = init(1);
    let store = open_with_tail(&disk);
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &pattern(1, BLOCK), false).unwrap();
    // Begun before, in an extent of its own.
    let mut request = Request::new();
    assert_eq!(volume.start_write(1 << 16, BLOCK as u64, &mut request).unwrap(), Start::Io);
    disk.write_at(request.segments()[0].device, &pattern(2, BLOCK)).unwrap();
    let (send, finished) = mpsc::channel();
    let (mut request, image) = (Some(request), Arc::downgrade(&disk));
    disk.on_flush(move || {
        let last = image.upgrade().and_then(|disk| disk.last_event());
        if last == Some(Event::Write(SIZE - BLOCK as u64, BLOCK))
            && let Some(mut request) = request.take()
        {
            send.send(request.finish_write(Ok(())).unwrap()).unwrap();
        }
    });
    store.close().unwrap();
    let acknowledged = match finished.try_recv().expect("the superblock is written") {
        Finish::Done => true,
        Finish::Commit => volume.flush().is_ok(),
    };
    drop(volume);
    let store = open(&disk, 3, false).unwrap();
    let found = contents(&store);
    assert!(!acknowledged || found["v"][1 << 16..][..BLOCK] == pattern(2, BLOCK), "it is lost");
    assert!(found["v"][..BLOCK] == pattern(1, BLOCK));
    assert!(store.check().unwrap().findings.is_empty());
}

/// Found by review: each of the commits that closing made found what somebody had written meanwhile.
#[test]
fn a_store_can_be_closed_while_somebody_writes_to_it() {
    let disk = init(1);
    let store = open_with_tail(&disk);
    store.create_volume("v", 1 << 20).unwrap();
    let writer = store.volume("v").unwrap();
    let flushes = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&flushes);
    let refused = Arc::new(std::sync::Mutex::new(None));
    let last = Arc::clone(&refused);
    disk.on_flush(move || {
        if count.fetch_add(1, Ordering::Relaxed) < 100 {
            let written = writer.write_at(0, &pattern(1, BLOCK), false);
            let written = written.and_then(|()| writer.discard(0, 1 << 16));
            *last.lock().unwrap() = written.err().map(|error| (error.kind(), error.to_string()));
        }
    });
    store.close().unwrap();
    assert!(flushes.load(Ordering::Relaxed) < 20, "{flushes:?} flushes");
    let (kind, text) = refused.lock().unwrap().take().expect("nothing new begins");
    assert_eq!(kind, ErrorKind::Poisoned);
    assert!(text.contains("being closed"), "{text}");
}

/// What only a deleted volume held: no pattern, and nothing written later, has it.
const SECRET: u8 = 0xee;

/// What can be read of a store that a deleted volume held.
fn secrets(store: &Store) -> Vec<String> {
    let read = contents(store).into_iter().filter(|(_, bytes)| bytes.contains(&SECRET));
    read.map(|(spec, _)| spec).collect()
}

/// A store all of whose free extents hold what a deleted volume, and its snapshot, had written: this
/// disk forgets nothing when it is told to discard.
fn with_secrets_in_all_free_extents() -> (Arc<Mem>, Store) {
    let disk = init(1);
    let store = open_with_tail(&disk);
    let free = store.info().extents_free;
    store.create_volume("secret", 2 * SIZE).unwrap();
    let secret = store.volume("secret").unwrap();
    let piece = vec![SECRET; 64 << 10];
    let filled = (0..2 * SIZE).step_by(piece.len()).find_map(|at| {
        if at == SIZE / 2 {
            store.create_snapshot("secret", "s", &SnapshotOptions::default()).unwrap();
        }
        secret.write_at(at, &piece, false).err()
    });
    assert_eq!(filled.map(|error| error.kind()), Some(ErrorKind::NoSpace));
    drop(secret);
    store.delete_snapshot("secret", "s").unwrap();
    store.delete_volume("secret").unwrap();
    finish_work(&store);
    store.flush().unwrap();
    assert_eq!(store.info().extents_free, free);
    (disk, store)
}

/// New volumes on extents that a deleted one had, through all that reads, copies and moves them.
fn live_on_recycled_extents(store: &Store, mut check: impl FnMut(&str)) {
    const EXTENT: u64 = 64 << 10;
    let write = |name: &str, at: u64, length: usize| {
        store.volume(name).unwrap().write_at(at, &vec![0x11; length], false).unwrap();
    };
    let snapshot = |name: &str, snapshot: &str| {
        store.create_snapshot(name, snapshot, &SnapshotOptions::default()).unwrap();
    };
    let work = || finish_work(store);
    store.create_volume("v", 12 * EXTENT + 512).unwrap();
    check("an empty volume");
    // Sectors at the start, within and at the end of a block; blocks; two blocks cut.
    for (extent, at, length) in [
        (0, 0, 512),
        (1, 1024, 512),
        (2, 8192 - 512, 512),
        (3, 4096, 4096),
        (4, 3584, 1024),
        (5, EXTENT - 512, 1024),
        (12, 0, 512),
    ] {
        write("v", extent * EXTENT + at, length);
        check("a small write into an extent of its own");
    }
    store.volume("v").unwrap().flush().unwrap();
    snapshot("v", "one");
    store.clone_volume("v", "one", "copy").unwrap();
    for extent in 0..6 {
        write("copy", extent * EXTENT + 512, 512);
        write("v", extent * EXTENT + 5120, 512);
    }
    check("small writes over a snapshot");
    let v = store.volume("v").unwrap();
    v.discard(512, 8192).unwrap();
    v.write_zeroes(3 * EXTENT + 4608, 512, true).unwrap();
    v.discard(7 * EXTENT, EXTENT).unwrap();
    write("v", 7 * EXTENT + 512, 512);
    check("discards and what is written behind them");
    snapshot("v", "two");
    write("v", EXTENT + 20480, 512);
    store.delete_snapshot("v", "two").unwrap();
    work();
    check("a merge");
    store.flatten("copy", &mut |_, _| true).unwrap();
    check("a clone of its own");
    store.delete_snapshot("v", "one").unwrap();
    work();
    drop(v);
    store.resize_volume("v", 11 * EXTENT + 1024).unwrap();
    write("v", 11 * EXTENT, 512);
    store.resize_volume("v", 14 * EXTENT).unwrap();
    write("v", 13 * EXTENT + 512, 512);
    check("shrinking within an extent and growing again");
    store.vacuum(&mut |_, _| true).unwrap();
    check("vacuum");
    store.volume("v").unwrap().flush().unwrap();
}

/// Freed space is not wiped: what keeps it unseen is that nothing shows blocks of an extent that were
/// not written since it was given out.
#[test]
fn recycled_extents_never_show_what_a_deleted_volume_held() {
    let (disk, store) = with_secrets_in_all_free_extents();
    // What a kill in each flush leaves.
    let seen = Arc::new(std::sync::Mutex::new((0, Vec::new())));
    let (image, of_crashes) = (Arc::downgrade(&disk), Arc::clone(&seen));
    disk.on_flush(move || {
        let Some(disk) = image.upgrade() else { return };
        let store = open(&Arc::new(disk.fork()), 3, false).unwrap();
        let mut seen = of_crashes.lock().unwrap();
        seen.0 += 1;
        seen.1.extend(secrets(&store));
    });
    live_on_recycled_extents(&store, |when| {
        assert_eq!(secrets(&store), Vec::<String>::new(), "{when}");
    });
    store.close().unwrap();
    let (images, shown) = &*seen.lock().unwrap();
    assert!(*images > 10 && shown.is_empty(), "{images} images show {shown:?}");
    // It was there to be shown: in the very extents that are in use.
    let data = regions(&open(&disk, 4, true).unwrap())[6].0 as usize;
    let extents = disk.bytes()[data..].chunks(64 << 10).map(<[u8]>::to_vec).collect::<Vec<_>>();
    let mixed = extents.iter().filter(|e| e.contains(&SECRET) && e.contains(&0x11)).count();
    assert!(mixed >= 5, "only {mixed} extents hold both");
}

/// Found by review: the file of the tail can be removed under a running process (with a user's last
/// login, for one). All that was acknowledged from then on was lost by a kill.
#[test]
fn a_tail_that_is_removed_is_not_relied_on_and_made_anew() {
    let Ok(tails) = tempfile::tempdir_in("/dev/shm") else {
        println!("SKIPPED: /dev/shm cannot be written to");
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
    Store::init(&path, &options).unwrap();
    let place = tails.path().join("dbs");
    std::fs::create_dir(&place).unwrap();
    std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o700)).unwrap();
    let open = || {
        let tail = TailPlace::Directory(place.clone());
        Store::open(&path, &OpenOptions { tail, ..OpenOptions::default() })
    };
    let store = open().unwrap();
    store.create_volume("v", 32 << 20).unwrap();
    let write = |store: &Store, at: u64| {
        store.volume("v").unwrap().write_at(at << 20, &[7; BLOCK], false).unwrap();
        store.info().sequence
    };
    let mut written = 0;
    let mut next = |store: &Store| {
        written += 1;
        write(store, written - 1)
    };
    let first = next(&store);
    assert_eq!(next(&store), first, "the tail has it: no commit");
    std::fs::remove_dir_all(&place).unwrap();
    assert_ne!(next(&store), first, "nothing has it: a commit");
    assert!(store.info().warnings.iter().any(|text| text.contains("tail was removed")));
    let anew = next(&store);
    let last = (0..4).map(|_| next(&store)).last();
    assert_eq!(last, Some(anew), "the new one has them");
    // As a kill leaves it: nothing is closed.
    drop(store);
    let store = open().unwrap();
    assert_eq!(store.info().warnings, Vec::<String>::new());
    let mut found = [0; BLOCK];
    for at in 0..written {
        store.volume("v").unwrap().read_at(at << 20, &mut found).unwrap();
        assert_eq!(found, [7; BLOCK], "write {at}");
    }
}

/// Found by review: a tail that is there and could not be opened (no descriptor left, another mode) counted as
/// gone. The first group of the new session made it worth nothing, and what it held was lost.
#[test]
fn a_tail_that_cannot_be_opened_is_not_taken_for_gone() {
    let candidates = tails::default_candidates();
    if tails::pick_directory(&candidates).is_none() {
        println!("SKIPPED: there is no tmpfs for a tail");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
    Store::init(&path, &options).unwrap();
    let open = |read_only| Store::open(&path, &OpenOptions { read_only, ..OpenOptions::default() });
    let store = open(false).unwrap();
    store.create_volume("v", 32 << 20).unwrap();
    store.volume("v").unwrap().write_at(0, &[7; BLOCK], false).unwrap();
    drop(store);
    let uuid = uuid_text(&peek_uuid(&path).unwrap());
    let files = candidates.iter().filter_map(|at| std::fs::read_dir(at).ok()).flatten();
    let mut files = files.map(|file| file.unwrap().path());
    let is_tail = |file: &std::path::PathBuf| file.to_string_lossy().contains(&uuid);
    let tail = files.find(is_tail).unwrap();
    let set_mode = |mode| {
        std::fs::set_permissions(&tail, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let before = std::fs::read(&path).unwrap();
    set_mode(0o644);
    for read_only in [true, false] {
        let error = open(read_only).err().expect("what the tail holds would be lost");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("try again"), "{error}");
        assert!(error.to_string().contains(&uuid), "{error}");
    }
    assert!(std::fs::read(&path).unwrap() == before, "something was written");
    set_mode(0o600);
    let store = open(false).unwrap();
    let mut found = [0; BLOCK];
    store.volume("v").unwrap().read_at(0, &mut found).unwrap();
    assert_eq!(found, [7; BLOCK]);
    drop(store);
    // Whoever gives it up may.
    std::fs::remove_file(&tail).unwrap();
    let store = open(false).unwrap();
    assert!(store.info().warnings.iter().any(|text| text.contains("its tail is gone")));
    store.close().unwrap();
}
