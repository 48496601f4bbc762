//! Requests in two steps: what they say, what they hold, and what is left when they fail.

use crate::common::{
    BLOCK, Event, FixedEnv, Mem, MemTail, finish_work, init_unchecked, open, pattern,
};
use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::{Finish, Read, ReadPart, Request, Start};
use dbs_core::{ErrorKind, Store, Volume};
use std::io;
use std::sync::{Arc, mpsc};
use std::time::Duration;

const EXTENT: usize = 64 << 10;

fn bench() -> (Arc<Mem>, Store, Volume) {
    let disk = init_unchecked(1);
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let env = Arc::new(FixedEnv::new(2));
    let store = Store::open_on(storage, Some(MemTail::boxed()), env, false).unwrap();
    let volume = volume(&store);
    (disk, store, volume)
}

/// An empty volume in a store that has reserved what metadata needs: nothing is blocked for that.
fn volume(store: &Store) -> Volume {
    store.create_volume("w", 1 << 20).unwrap();
    store.volume("w").unwrap().write_at(0, &[1; BLOCK], false).unwrap();
    store.flush().unwrap();
    store.create_volume("v", 1 << 20).unwrap();
    store.volume("v").unwrap()
}

/// As a server does it.
fn read(disk: &Mem, volume: &Volume, offset: u64, length: usize) -> Vec<u8> {
    let mut request = Request::new();
    let mut buf = vec![0xee; length];
    let start = volume.start_read(offset, length as u64, &mut request).unwrap();
    for part in request.segments() {
        disk.read_at(part.device, &mut buf[part.start..][..part.length]).unwrap();
    }
    request.zeros().iter().for_each(|range| buf[range.clone()].fill(0));
    match start {
        Start::Io => assert_eq!(request.finish_read(Ok(()), &buf).unwrap(), Read::Done),
        Start::Done => assert!(request.segments().is_empty() && !request.is_running()),
        Start::Blocked => panic!("blocked"),
    }
    buf
}

fn write(disk: &Mem, volume: &Volume, offset: u64, buf: &[u8]) -> Finish {
    let mut request = Request::new();
    match volume.start_write(offset, buf.len() as u64, &mut request).unwrap() {
        Start::Io => {}
        Start::Blocked => {
            // The group is as long as it may get, or space must be freed.
            volume.write_at(offset, buf, false).unwrap();
            return Finish::Done;
        }
        Start::Done => panic!("there is something to write"),
    }
    request.seal(buf);
    for part in request.segments() {
        disk.write_at(part.device, &buf[part.start..][..part.length]).unwrap();
    }
    request.finish_write(Ok(())).unwrap()
}

#[test]
fn the_two_steps_and_the_blocking_calls_are_the_same() {
    let (disk, store, volume) = bench();
    let mut model = vec![0; 1 << 20];
    let mut rng = fastrand::Rng::with_seed(1);
    for round in 0..300 {
        let block = rng.usize(..256);
        let length = rng.usize(1..=(256 - block).min(40)) * BLOCK;
        let at = block * BLOCK;
        let bytes = pattern(round as u8, length);
        if rng.bool() {
            assert_eq!(write(&disk, &volume, at as u64, &bytes), Finish::Done);
        } else {
            volume.write_at(at as u64, &bytes, false).unwrap();
        }
        model[at..at + length].copy_from_slice(&bytes);
        let start = rng.usize(..2048) * 512;
        let length = rng.usize(0..=(2048 - start / 512).min(400)) * 512;
        assert_eq!(read(&disk, &volume, start as u64, length), model[start..start + length]);
        let mut buf = vec![0; length];
        volume.read_at(start as u64, &mut buf).unwrap();
        assert_eq!(buf, model[start..start + length]);
        read_many_as(&volume, &model, &mut rng);
        if round == 150 {
            store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
        }
        if round % 100 == 70 {
            volume.discard(0, 100 << 10).unwrap();
            model[..100 << 10].fill(0);
        }
    }
    let snapshot = store.volume("v@s").unwrap();
    let mut buf = vec![0; 1 << 20];
    snapshot.read_at(0, &mut buf).unwrap();
    assert_eq!(read(&disk, &snapshot, 0, 1 << 20), buf);
    assert!(store.check().unwrap().findings.is_empty());
}

/// Some ranges at once, empty and overlapping ones among them.
fn read_many_as(volume: &Volume, model: &[u8], rng: &mut fastrand::Rng) {
    let range = |_| {
        let start = rng.usize(..=2048);
        start * 512..(start + rng.usize(0..=(2048 - start).min(20))) * 512
    };
    let ranges: Vec<_> = (0..7).map(range).collect();
    let mut bufs: Vec<_> = ranges.iter().map(|range| vec![0xee; range.len()]).collect();
    let reads = ranges.iter().zip(&mut bufs);
    let mut reads: Vec<_> =
        reads.map(|(range, buf)| ReadPart { offset: range.start as u64, buf }).collect();
    volume.read_many(&mut reads).unwrap();
    for (range, buf) in ranges.into_iter().zip(bufs) {
        assert!(buf == model[range.clone()], "{range:?}");
    }
}

#[test]
fn many_reads_are_checked_before_any_and_planned_in_steps() {
    let (disk, _store, volume) = bench();
    let bytes = pattern(3, 1 << 20);
    volume.write_at(0, &bytes, false).unwrap();
    let mut buf = vec![0; 2000 * 512];
    let mut reads: Vec<_> = (0..)
        .zip(buf.chunks_mut(512))
        .map(|(sector, buf)| ReadPart { offset: sector * 512, buf })
        .collect();
    volume.read_many(&mut reads).unwrap();
    assert!(buf == bytes[..buf.len()]);
    for (offset, length) in [(1 << 20, 512), (100, 512), (0, 100), (u64::MAX - 511, 512)] {
        let (mut good, mut bad) = ([0xee; BLOCK], vec![0; length]);
        let reads =
            &mut [ReadPart { offset: 0, buf: &mut good }, ReadPart { offset, buf: &mut bad }];
        assert_eq!(volume.read_many(reads).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(good, [0xee; BLOCK]);
    }
    // Nothing is held: what was freed by the discard can be used again.
    volume.discard(0, 1 << 20).unwrap();
    volume.flush().unwrap();
    drop(disk);
}

#[test]
fn neighbours_on_the_device_are_one_segment() {
    let (disk, _store, volume) = bench();
    let _ = write(&disk, &volume, 0, &pattern(1, 4 * EXTENT));
    let mut request = Request::new();
    assert_eq!(volume.start_write(0, 4 * EXTENT as u64, &mut request).unwrap(), Start::Io);
    assert_eq!(request.segments().len(), 1);
    assert!(request.finish_write(Ok(())).is_ok());
    // Half of the read is beyond what was written.
    assert_eq!(volume.start_read(512, 8 * EXTENT as u64, &mut request).unwrap(), Start::Io);
    let written = 4 * EXTENT - 512;
    let segments: Vec<_> = request.segments().iter().map(|s| (s.start, s.length)).collect();
    assert_eq!(segments, [(0, written)]);
    assert_eq!(request.zeros(), std::slice::from_ref(&(written..8 * EXTENT)));
    request.cancel();
}

#[test]
fn a_read_of_nothing_is_over_at_once() {
    let (disk, _store, volume) = bench();
    let _ = write(&disk, &volume, 0, &pattern(1, BLOCK));
    let mut request = Request::new();
    for offset in [0, 512, 1 << 20] {
        assert_eq!(volume.start_read(offset, 0, &mut request).unwrap(), Start::Done);
        assert!(request.segments().is_empty());
    }
}

#[test]
fn what_would_wait_is_blocked_and_holds_nothing() {
    let (_disk, store, volume) = bench();
    let mut request = Request::new();
    let mut start = |offset, length| volume.start_write(offset, length, &mut request);
    assert_eq!(start(512, 4096).unwrap(), Start::Blocked);
    assert_eq!(start(0, 512).unwrap(), Start::Blocked);
    assert_eq!(start(0, 0).unwrap(), Start::Done);
    assert_eq!(start(1 << 20, 4096).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(start(0, !511).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(start(1, 4096).unwrap_err().kind(), ErrorKind::Invalid);
    // A snapshot waits for nothing: the whole volume is free.
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    let snapshot = store.volume("v@s").unwrap();
    let refused = snapshot.start_write(0, 4096, &mut request).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnly);
    store.close().unwrap();
    let refused = volume.start_write(0, 4096, &mut request).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Poisoned);
}

#[test]
fn others_wait_for_a_started_write_and_it_for_them() {
    let (disk, store, volume) = bench();
    let mut first = Request::new();
    let mut second = Request::new();
    assert_eq!(volume.start_write(0, 8192, &mut first).unwrap(), Start::Io);
    assert_eq!(volume.start_write(4096, 8192, &mut second).unwrap(), Start::Io, "writes share");
    assert!(second.finish_write(Ok(())).is_ok());
    let (send, snapshot) = mpsc::channel();
    let other = store.clone();
    let taker = std::thread::spawn(move || {
        other.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
        send.send(()).unwrap();
    });
    // Once it waits, nothing more begins.
    while volume.start_write(1 << 19, 4096, &mut second).unwrap() == Start::Io {
        second.cancel();
        assert!(!taker.is_finished(), "the snapshot waits for the write");
        std::thread::yield_now();
    }
    assert!(!second.is_running());
    assert!(snapshot.try_recv().is_err(), "the snapshot waits for the write");
    for part in first.segments() {
        disk.write_at(part.device, &pattern(9, part.length)).unwrap();
    }
    assert_eq!(first.finish_write(Ok(())).unwrap(), Finish::Done);
    snapshot.recv_timeout(Duration::from_secs(120)).unwrap();
    taker.join().unwrap();
    assert_eq!(volume.start_write(1 << 19, 4096, &mut second).unwrap(), Start::Io);
    second.cancel();
    let frozen = store.volume("v@s").unwrap();
    assert_eq!(read(&disk, &frozen, 0, 8192), pattern(9, 8192));
}

#[test]
fn a_failed_or_cancelled_write_leaves_nothing_behind() {
    let (_disk, store, volume) = bench();
    let free = store.info().extents_free;
    let mut request = Request::new();
    assert_eq!(volume.start_write(0, 3 * EXTENT as u64, &mut request).unwrap(), Start::Io);
    assert_eq!(store.info().extents_free, free - 3);
    let failed = request.finish_write(Err(io::Error::from_raw_os_error(5))).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Io);
    assert!(failed.to_string().contains("writing `v` failed"), "{failed}");
    assert_eq!(store.info().extents_free, free);
    assert_eq!(volume.start_write(0, 4096, &mut request).unwrap(), Start::Io);
    request.cancel();
    assert_eq!(store.info().extents_free, free);
    // Nothing is held: this would wait.
    volume.discard(0, 1 << 20).unwrap();
    assert!(store.check().unwrap().findings.is_empty());
}

/// Found by review: its extent was free at once, and what the kernel still wrote there was in somebody
/// else's data.
#[test]
fn a_write_that_is_dropped_keeps_its_extent_and_ends_all_writing() {
    let (disk, store, volume) = bench();
    volume.write_at(1 << 19, &pattern(1, 4096), true).unwrap();
    let free = store.info().extents_free;
    let mut request = Request::new();
    assert_eq!(volume.start_write(0, 4096, &mut request).unwrap(), Start::Io);
    std::thread::scope(|scope| {
        // It waits for the blocks, and must not write once it has them.
        let waiting = scope.spawn(|| volume.write_at(0, &pattern(2, 512), false));
        let mut other = Request::new();
        while volume.start_write(0, 4096, &mut other).unwrap() == Start::Io {
            other.cancel();
            assert!(!waiting.is_finished(), "it waits for the write");
            std::thread::yield_now();
        }
        drop(request);
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::Poisoned);
    });
    assert_eq!(store.info().extents_free, free - 1);
    let error = volume.write_at(1 << 19, &pattern(3, 4096), false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned);
    assert!(error.to_string().contains("a write to `v` was dropped"), "{error}");
    assert!(volume.discard(0, 4096).is_err() && store.flush().is_err());
    assert_eq!(read(&disk, &volume, 1 << 19, 4096), pattern(1, 4096));
    drop((volume, store));
    let store = open(&disk, 3, false).unwrap();
    assert_eq!(store.info().extents_free, free);
    assert!(store.check().unwrap().findings.is_empty());
}

#[test]
fn space_is_not_reused_while_a_read_runs() {
    let (_disk, store, volume) = bench();
    volume.write_at(0, &pattern(3, EXTENT), false).unwrap();
    let mut request = Request::new();
    assert_eq!(volume.start_read(0, 4096, &mut request).unwrap(), Start::Io);
    volume.discard(0, EXTENT as u64).unwrap();
    store.flush().unwrap();
    assert_eq!(store.info().extents_pending, 1);
    drop(request);
    assert_eq!(store.info().extents_pending, 0);
}

#[test]
fn without_a_tail_a_first_write_must_be_committed() {
    let disk = init_unchecked(1);
    let store = open(&disk, 2, false).unwrap();
    let volume = volume(&store);
    assert_eq!(write(&disk, &volume, 0, &pattern(1, BLOCK)), Finish::Commit);
    volume.flush().unwrap();
    assert_eq!(write(&disk, &volume, 0, &pattern(2, BLOCK)), Finish::Done);
}

#[test]
fn the_descriptor_reads_what_the_store_wrote() {
    use std::os::unix::fs::FileExt;
    let (_disk, store, _volume) = bench();
    assert!(store.direct_io().unwrap().is_none(), "memory has no descriptor");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = dbs_core::InitOptions { size: Some(64 << 20), ..Default::default() };
    Store::init(&path, &options).unwrap();
    let store = Store::open(&path, &dbs_core::OpenOptions::default()).unwrap();
    store.create_volume("v", 8 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(8192, &pattern(7, 8192), false).unwrap();
    let direct = store.direct_io().unwrap().unwrap();
    assert!(direct.offset_alignment <= BLOCK && direct.memory_alignment <= BLOCK);
    let mut request = Request::new();
    assert_eq!(volume.start_read(8192, 8192, &mut request).unwrap(), Start::Io);
    let mut buf = dbs_core::io::buffer::AlignedBuf::zeroed(8192);
    let file = std::fs::File::from(direct.file);
    file.read_exact_at(&mut buf, request.segments()[0].device).unwrap();
    assert_eq!(request.finish_read(Ok(()), &buf).unwrap(), Read::Done);
    assert_eq!(&buf[..], pattern(7, 8192));
}

/// No group is longer than an eighth of the journal, however many writes end at once.
#[test]
fn writes_on_their_way_are_records_of_the_next_group() {
    const JOURNAL: u64 = dbs_core::limits::JOURNAL_MIN_BYTES;
    const EXTENTS: u64 = 2000;
    let disk = Arc::new(Mem::new(512 << 20));
    let (extent_size, journal_size) = (EXTENT as u64, Some(JOURNAL));
    let init = dbs_core::InitOptions { extent_size, journal_size, ..Default::default() };
    Store::init_on(&*disk, &init, &FixedEnv::new(1)).unwrap();
    let store = open(&disk, 2, false).unwrap();
    // Afterwards there are metadata blocks for as many extents.
    store.create_volume("w", EXTENTS * EXTENT as u64).unwrap();
    let volume = store.volume("w").unwrap();
    let places = (0..EXTENTS).map(|extent| extent * EXTENT as u64);
    places.clone().for_each(|at| volume.write_at(at, &[1; BLOCK], false).unwrap());
    drop(volume);
    store.delete_volume("w").unwrap();
    finish_work(&store);
    store.create_volume("v", EXTENTS * EXTENT as u64).unwrap();
    let volume = store.volume("v").unwrap();
    let mut requests = Vec::new();
    for at in places {
        let mut request = Request::new();
        if volume.start_write(at, BLOCK as u64, &mut request).unwrap() == Start::Io {
            request.seal(&[1; BLOCK]);
            requests.push(request);
        }
    }
    let count = requests.len();
    assert!(count > 100, "only {count} at once");
    for mut request in requests {
        let _ = request.finish_write(Ok(())).unwrap();
    }
    disk.take_events();
    volume.flush().unwrap();
    let is_group = |at| {
        let mut start = [0; 512];
        disk.read_at(at, &mut start).unwrap();
        start[..4] == *b"DBSj"
    };
    let groups = disk.take_events().into_iter().filter_map(|event| match event {
        Event::Write(at, length) if is_group(at) => Some(length as u64),
        _ => None,
    });
    let longest = groups.max().unwrap();
    assert!(longest <= JOURNAL / 8, "{count} writes made a group of {longest} bytes");
}

#[test]
fn a_long_group_is_no_full_store() {
    const THREADS: u64 = 16;
    const EACH: u64 = 1024;
    let disk = Arc::new(Mem::new(512 << 20));
    let journal = dbs_core::limits::JOURNAL_MIN_BYTES;
    let options = dbs_core::InitOptions {
        extent_size: EXTENT as u64,
        journal_size: Some(journal),
        ..Default::default()
    };
    Store::init_on(&*disk, &options, &FixedEnv::new(1)).unwrap();
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let env = Arc::new(FixedEnv::new(2));
    let store = Store::open_on(storage, Some(MemTail::boxed()), env, false).unwrap();
    store.create_volume("v", THREADS * EACH * BLOCK as u64).unwrap();
    let volume = store.volume("v").unwrap();
    // Each write is recorded, and the group is long again and again, for all at the same time.
    disk.on_flush(|| std::thread::sleep(Duration::from_micros(200)));
    let writer = |thread: u64| {
        for block in (0..EACH).map(|block| block * THREADS + thread) {
            volume.write_at(block * BLOCK as u64, &[1; BLOCK], false).unwrap();
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|thread| drop(scope.spawn(move || writer(thread))));
    });
}

#[test]
fn writes_at_any_byte_change_those_bytes_alone() {
    let (_disk, _store, volume) = bench();
    let size = volume.size();
    let mut model = vec![0; 8 * BLOCK];
    volume.write_at(0, &pattern(3, 8 * BLOCK), false).unwrap();
    model.copy_from_slice(&pattern(3, 8 * BLOCK));
    for (offset, length) in
        [(1, 1), (511, 2), (4095, 2), (100, 9000), (4096, 3), (5000, 3192), (0, 512), (7, 0)]
    {
        let bytes = pattern(offset as u8, length);
        volume.write_bytes_at(offset as u64, &bytes).unwrap();
        model[offset..offset + length].copy_from_slice(&bytes);
        let mut now = vec![0; model.len()];
        volume.read_at(0, &mut now).unwrap();
        assert!(now == model, "{offset}+{length}");
    }
    volume.write_bytes_at(size - 3, b"end").unwrap();
    for (offset, length) in [(size - 3, 4), (size, 1), (size + 1, 1), (u64::MAX, 1), (u64::MAX, 2)]
    {
        let refused = volume.write_bytes_at(offset, &vec![1; length]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{offset}+{length}");
    }
}

/// Runs `command`, which waits for a write to volume `a`, while that one gets another name and volume
/// `b` gets its name. The error, and what there is then.
fn while_names_move(
    command: impl FnOnce(&Store) -> dbs_core::Result<()> + Send,
) -> (dbs_core::Result<()>, Store) {
    let (_disk, store, _) = bench();
    for (name, seed) in [("a", 1), ("b", 2)] {
        store.create_volume(name, 1 << 20).unwrap();
        let volume = store.volume(name).unwrap();
        volume.write_at(0, &pattern(seed, EXTENT), false).unwrap();
        store.create_snapshot(name, "s", &SnapshotOptions::default()).unwrap();
        volume.write_at(0, &pattern(seed + 2, BLOCK), true).unwrap();
    }
    let volume = store.volume("a").unwrap();
    let (mut in_flight, mut other) = (Request::new(), Request::new());
    assert_eq!(volume.start_write(0, 4096, &mut in_flight).unwrap(), Start::Io);
    let result = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| command(&store));
        // Once it waits, nothing more begins.
        while volume.start_write(8192, 4096, &mut other).unwrap() == Start::Io {
            other.cancel();
            assert!(!waiting.is_finished(), "it waits for the write");
            std::thread::yield_now();
        }
        store.rename_volume("a", "old").unwrap();
        store.rename_volume("b", "a").unwrap();
        assert!(in_flight.finish_write(Ok(())).is_ok());
        waiting.join().unwrap()
    });
    (result, store)
}

/// Found by review: the name was looked up again after the wait, and the volume that had it by then
/// was rolled back with its writes in flight.
#[test]
fn a_rollback_is_of_the_volume_whose_writes_have_ended() {
    let (result, store) = while_names_move(|store| store.rollback("a", "s"));
    let error = result.expect_err("of which volume?");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("renamed meanwhile"), "{error}");
    let mut found = vec![0; BLOCK];
    store.volume("a").unwrap().read_at(0, &mut found).unwrap();
    assert!(found == pattern(4, BLOCK), "the other volume was rolled back");
    assert!(store.check().unwrap().findings.is_empty());
}

/// As with the rollback: it froze a head with writes in flight.
#[test]
fn a_snapshot_is_of_the_volume_whose_writes_have_ended() {
    let take =
        |store: &Store| store.create_snapshot("a", "t", &SnapshotOptions::default()).map(drop);
    let (result, store) = while_names_move(take);
    let error = result.expect_err("of which volume?");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("renamed meanwhile"), "{error}");
    for name in ["a", "old"] {
        assert_eq!(store.snapshots(name, false).unwrap().len(), 1, "{name}");
    }
}
