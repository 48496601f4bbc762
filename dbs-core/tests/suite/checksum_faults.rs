//! Checksums of a device that fails to read or to write here and there: what is well is found, learnt and
//! kept all the same, in the memory that there may be.

use crate::checksums::{assert_damaged, large, open, scrub};
use crate::common::{BLOCK, Event, FixedEnv, Mem, finish_work, init, init_unchecked, pattern};
use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::{Read, Request, Start};
use dbs_core::{Damage, ErrorKind, Store, Volume};
use std::sync::Arc;
use std::time::Duration;

/// Blocks of a page, and of a group.
const PAGE: usize = 1008;
const GROUP: usize = 16 * PAGE;

fn at(block: usize) -> u64 {
    (block * BLOCK) as u64
}

/// The place of a block on the device.
fn device(volume: &Volume, block: usize) -> u64 {
    volume.read_at(at(block), &mut [0; BLOCK]).unwrap();
    crate::checksums::device(volume, at(block))
}

fn read(store: &Store, block: usize) -> dbs_core::Result<()> {
    store.volume("v").unwrap().read_at(at(block), &mut [0; BLOCK])
}

#[test]
fn a_scrub_goes_on_behind_what_cannot_be_read() {
    let (disk, store, volume) = large(4 * PAGE);
    disk.spoil(device(&volume, 5));
    disk.flip(device(&volume, 9), 1);
    disk.flip(device(&volume, 3 * PAGE), 1);
    let report = scrub(&store);
    assert_eq!((report.damaged, report.ranges.len()), (3 * BLOCK as u64, 3));
    assert_eq!(report.ranges[0].place.to_string(), "byte 20480 of `v`");
    assert_eq!(report.done, report.total);
    // A device that is gone is not damaged data.
    let (disk, store, volume) = large(5 * PAGE);
    let first = device(&volume, 0);
    (0..5 * PAGE).for_each(|block| disk.spoil(first + at(block)));
    let error = store.scrub(true, &mut |_| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
}

/// A merge that cannot read its block is put off.
#[test]
fn neither_failed_work_nor_a_block_that_cannot_be_read_keeps_checksums_from_being_learnt() {
    let (disk, store, volume) = large(2 * PAGE);
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    let below = device(&volume, 1);
    volume.write_at(0, &[2; BLOCK], false).unwrap();
    volume.write_at(at(PAGE), &[2; BLOCK], false).unwrap();
    store.delete_snapshot("v", "s").unwrap();
    store.flush().unwrap();
    let (above, unread) = (device(&volume, 0), device(&volume, PAGE + 20));
    let learnt = device(&volume, PAGE + 21);
    let disk = Arc::new(disk.fork());
    [below, above, unread].into_iter().for_each(|address| disk.spoil(address));
    let store = open(&disk);
    (0..100).for_each(|_| _ = store.housekeep(Duration::from_millis(5)).unwrap());
    assert_eq!(store.info().snapshots_put_off, 1, "the merge can be done");
    disk.recover();
    disk.flip(learnt, 1);
    assert_damaged(read(&store, PAGE + 21), "of `v");
    read(&store, PAGE + 20).unwrap();
}

/// What is said to be learnt is known to the next.
#[test]
fn a_scrub_learns_what_it_says_though_it_finds_a_damaged_page() {
    let (disk, store, volume) = large(3 * PAGE);
    disk.take_events();
    volume.write_at(at(PAGE), &[3; BLOCK], false).unwrap();
    let Event::Write(leader, _) = disk.take_events()[0] else { panic!("no group was opened") };
    // Nothing is left of what is of the leader, so that the damaged page is the first that is looked at.
    volume.discard(0, at(PAGE)).unwrap();
    drop(volume);
    finish_work(&store);
    store.close().unwrap();
    disk.flip(leader + at(1) + 100, 1);
    let store = open(&disk);
    let learnt = scrub(&store).learnt;
    assert!(learnt > at(PAGE - 200), "{learnt}");
    assert_eq!(scrub(&store).learnt, 0);
    store.close().unwrap();
    assert_eq!(scrub(&open(&disk)).learnt, 0);
}

#[test]
fn a_group_that_cannot_be_written_is_left_open_alone() {
    for is_leader in [true, false] {
        let (disk, store, volume) = large(2 * GROUP);
        disk.take_events();
        volume.write_at(at(PAGE), &[3; BLOCK], false).unwrap();
        let Event::Write(leader, _) = disk.take_events()[0] else { panic!("no group was opened") };
        volume.write_at(at(GROUP + PAGE), &[3; BLOCK], true).unwrap();
        let places = [PAGE, GROUP + PAGE].map(|block| device(&volume, block));
        disk.refuse(if is_leader { leader } else { leader + at(1) });
        drop(volume);
        store.close().unwrap();
        disk.recover();
        places.iter().for_each(|place| disk.flip(*place, 1));
        let store = open(&disk);
        read(&store, PAGE).unwrap();
        assert_damaged(read(&store, GROUP + PAGE), "of `v`");
    }
}

fn read_beside(disk: &Mem, volume: &Volume, block: usize) {
    let (mut request, mut buf) = (Request::new(), Vec::new());
    match volume.start_read_beside(at(block), BLOCK as u64, &mut request).unwrap() {
        Start::Io => {}
        // Somebody who may wait does it.
        _ => return volume.read_at(at(block), &mut [0; BLOCK]).unwrap(),
    }
    buf.resize(BLOCK + request.extra_bytes(), 0);
    for part in request.segments() {
        disk.read_at(part.device, &mut buf[part.start..][..part.length]).unwrap();
    }
    assert_eq!(request.finish_read(Ok(()), &buf).unwrap(), Read::Done);
}

/// A page of which one block was written is small, and becomes a whole one that the device does not have.
#[test]
fn reads_beside_writes_take_no_more_memory_than_there_may_be() {
    const PAGES: usize = 72;
    let (disk, store, volume) = large(PAGES * PAGE);
    store.set_checksum_cache(0);
    for page in 0..PAGES {
        volume.write_at(at(page * PAGE), &[2; BLOCK], false).unwrap();
    }
    for page in 0..PAGES {
        read_beside(&disk, &volume, page * PAGE + 16);
        let memory = store.checksums().unwrap().memory;
        assert!(memory < 276 << 10, "{memory} bytes after page {page}");
    }
    // After a crash, read-only: what is learnt cannot be written.
    store.flush().unwrap();
    let disk = Arc::new(disk.fork());
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let store = Store::open_on(storage, None, Arc::new(FixedEnv::new(5)), true).unwrap();
    store.set_checksum_cache(0);
    let volume = store.volume("v").unwrap();
    for page in 0..PAGES {
        read_beside(&disk, &volume, page * PAGE + 16);
        let memory = store.checksums().unwrap().memory;
        assert!(memory < 276 << 10, "{memory} bytes after page {page}, read-only");
    }
}

/// With checksums or without, a read says which block cannot be read, and the block is healed from a copy.
#[test]
fn a_block_that_cannot_be_read_is_named_and_healed() {
    for checked in [true, false] {
        let disk = if checked { init(1) } else { init_unchecked(1) };
        let store = open(&disk);
        store.create_volume("v", 1 << 20).unwrap();
        let volume = store.volume("v").unwrap();
        let good = pattern(1, 16 * BLOCK);
        let copy = |block: usize| &good[at(block) as usize..][..BLOCK];
        volume.write_at(0, &good, true).unwrap();
        store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
        volume.write_at(at(9), copy(9), true).unwrap();
        let places = [5, 9].map(|block| device(&volume, block));
        places.iter().for_each(|place| disk.spoil(*place));
        let mut buf = vec![0; 16 * BLOCK];
        for (block, first, length) in [(5, 0, 16), (5, 5, 1), (9, 6, 10)] {
            let error = volume.read_at(at(first), &mut buf[..length * BLOCK]).unwrap_err();
            let damage = Damage { offset: at(block), in_snapshot: block == 5 };
            assert_eq!((error.kind(), error.damage()), (ErrorKind::Io, Some(damage)), "{error}");
            let place = format!("byte {} of `v", at(block));
            assert!(error.to_string().contains(&place), "{error}");
        }
        // What a write of a part of the block needs, too.
        let error = volume.write_at(at(5) + 512, &[1; 512], false).unwrap_err();
        assert_eq!(error.damage().map(|damage| damage.offset), Some(at(5)));
        if checked {
            assert_damaged(volume.heal(at(5), copy(6)), "the copy differs");
        }
        assert_eq!(volume.heal(at(6), copy(5)).unwrap(), 0, "it is well");
        assert_eq!(volume.heal(0, &good).unwrap(), 2 * BLOCK as u64);
        volume.read_at(0, &mut buf).unwrap();
        assert!(buf == good);
        // One that cannot be written either stays what it is.
        disk.spoil(places[0]);
        disk.refuse(places[0]);
        assert_eq!(volume.heal(at(5), copy(5)).unwrap_err().kind(), ErrorKind::Io);
        assert!(volume.read_at(at(5), &mut buf[..BLOCK]).is_err());
        disk.recover();
        volume.read_at(0, &mut buf).unwrap();
        assert!(buf == good, "neither is it changed");
    }
}

/// A device that cannot read a block now, and can in a moment: which one it was is not known, but that it was one
/// of these blocks is.
#[test]
fn a_block_that_can_be_read_again_is_named_by_its_range() {
    for checked in [true, false] {
        let disk = if checked { init(1) } else { init_unchecked(1) };
        let store = open(&disk);
        store.create_volume("v", 1 << 20).unwrap();
        let volume = store.volume("v").unwrap();
        let good = pattern(1, 16 * BLOCK);
        volume.write_at(0, &good, true).unwrap();
        disk.spoil(device(&volume, 5));
        let later = Arc::clone(&disk);
        disk.on_read(move || {
            let then = Arc::clone(&later);
            later.on_read(move || then.recover());
        });
        let mut buf = vec![0; 4 * BLOCK];
        let error = volume.read_at(at(4), &mut buf).unwrap_err();
        let damage = Damage { offset: at(4), in_snapshot: false };
        assert_eq!((error.kind(), error.damage()), (ErrorKind::Io, Some(damage)), "{error}");
        volume.read_at(at(4), &mut buf).unwrap();
        assert!(buf == good[4 * BLOCK..8 * BLOCK]);
    }
}

/// Without checksums nothing but the heal itself keeps a newer write from being undone.
#[test]
fn a_write_waits_for_the_heal_of_its_block() {
    let disk = init_unchecked(1);
    let store = open(&disk);
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; BLOCK], true).unwrap();
    disk.spoil(device(&volume, 0));
    let (writer, written) = (store.volume("v").unwrap(), std::sync::mpsc::channel());
    let sender = written.0;
    disk.on_read(move || {
        std::thread::spawn(move || {
            writer.write_at(0, &[2; BLOCK], false).unwrap();
            sender.send(()).unwrap();
        });
        std::thread::sleep(Duration::from_millis(100));
    });
    assert_eq!(volume.heal(0, &[1; BLOCK]).unwrap(), BLOCK as u64);
    written.1.recv().unwrap();
    let mut buf = [0; BLOCK];
    volume.read_at(0, &mut buf).unwrap();
    assert_eq!(buf, [2; BLOCK]);
}
