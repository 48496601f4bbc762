//! The store end to end on real files, through the public API.

use crate::common::finish_work;
use dbs_core::store::{Link, RepairOptions, SnapshotOptions};
use dbs_core::{ErrorKind, InitOptions, OpenOptions, Store, TailPlace};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a close that waits for what it should end may take before that counts as a failure.
const CLOSES_WITHIN: Duration = Duration::from_secs(60);

fn init(dir: &Path, size: u64) -> std::path::PathBuf {
    let path = dir.join("store.dbs");
    Store::init(&path, &InitOptions { size: Some(size), ..Default::default() }).unwrap();
    path
}

fn open(path: &Path) -> Store {
    Store::open(path, &OpenOptions { tail: TailPlace::None, ..Default::default() }).unwrap()
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn read(store: &Store, spec: &str, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0xaa; len];
    store.volume(spec).unwrap().read_at(offset, &mut buf).unwrap();
    buf
}

#[test]
fn content_and_snapshots_survive_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 256 << 20);
    let store = open(&path);
    store.create_volume("v", 64 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(512, &pattern(1, 3 << 20), false).unwrap();
    store.create_snapshot("v", "s1", &SnapshotOptions::default()).unwrap();
    volume.write_at(1 << 20, &pattern(2, 5000 / 512 * 512), false).unwrap();
    volume.discard(2 << 20, 1 << 20).unwrap();
    store.clone_volume("v", "s1", "c").unwrap();
    let clone = store.volume("c").unwrap();
    clone.write_at(0, &pattern(3, 4096), true).unwrap();
    drop((volume, clone));
    store.close().unwrap();

    let store = open(&path);
    assert_eq!(read(&store, "v@s1", 512, 3 << 20), pattern(1, 3 << 20));
    assert_eq!(read(&store, "v", 1 << 20, 4608), pattern(2, 4608));
    assert_eq!(read(&store, "v", 2 << 20, 1 << 20), vec![0; 1 << 20]);
    assert_eq!(read(&store, "c", 0, 4096), pattern(3, 4096));
    assert_eq!(read(&store, "c", 4096, 8192), read(&store, "v@s1", 4096, 8192));
    assert!(store.check().unwrap().findings.is_empty(), "{:?}", store.check().unwrap());
    assert_eq!(store.children("v", Some("s1")).unwrap(), ["c"]);

    store.delete_snapshot("v", "s1").unwrap();
    store.flatten("c", &mut |_, _| true).unwrap();
    finish_work(&store);
    assert_eq!(read(&store, "v", 1 << 20, 4608), pattern(2, 4608));
    assert_eq!(read(&store, "c", 0, 4096), pattern(3, 4096));
    assert_eq!(read(&store, "c", 4096, 8192), pattern(1, 3 << 20)[4096 - 512..][..8192]);
    assert_eq!(store.volume_info("c").unwrap().origin, None);
    assert!(store.check().unwrap().findings.is_empty(), "{:?}", store.check().unwrap());
    store.delete_volume("v").unwrap();
    store.delete_volume("c").unwrap();
    finish_work(&store);
    let info = store.info();
    assert_eq!((info.allocated, info.snapshots), (0, 0));
}

#[test]
fn dropping_without_close_loses_no_flushed_write() {
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 64 << 20);
    let store = open(&path);
    store.create_volume("v", 16 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    for block in 0..500u64 {
        volume.write_at(block * 8192, &pattern(block as u8, 4096), false).unwrap();
    }
    drop((volume, store));
    let store = open(&path);
    for block in 0..500u64 {
        assert_eq!(read(&store, "v", block * 8192, 4096), pattern(block as u8, 4096));
    }
}

#[test]
fn a_full_store_says_so_and_goes_on_when_space_is_freed() {
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 64 << 20);
    let store = open(&path);
    store.create_volume("v", 1 << 30).unwrap();
    store.create_volume("keep", 1 << 20).unwrap();
    store.volume("keep").unwrap().write_at(0, &pattern(9, 4096), false).unwrap();
    for round in 0..10 {
        let volume = store.volume("v").unwrap();
        let mut written = 0;
        let error = loop {
            match volume.write_at(written << 20, &pattern(round, 1 << 20), false) {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(written > 40, "{written}");
        assert_eq!(read(&store, "v", (written - 1) << 20, 1 << 20), pattern(round, 1 << 20));
        volume.discard(0, 1 << 30).unwrap();
    }
    assert_eq!(read(&store, "keep", 0, 4096), pattern(9, 4096));
}

#[test]
fn growing_and_vacuum_keep_content() {
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 64 << 20);
    let store = open(&path);
    store.create_volume("v", 1 << 30).unwrap();
    let volume = store.volume("v").unwrap();
    store.grow(256 << 20).unwrap();
    // Also if not even the metadata would fit.
    for smaller in [4096, 128 << 20] {
        let refused = store.grow(smaller).unwrap_err().to_string();
        assert!(refused.contains("268435456 bytes already"), "{refused}");
    }
    for extent in 0..200 {
        volume.write_at(extent << 20, &pattern(extent as u8, 8192), false).unwrap();
    }
    volume.discard(0, 190 << 20).unwrap();
    let size = store.vacuum(&mut |_, _| true).unwrap();
    assert!(size < 64 << 20, "{size}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
    for extent in 190..200 {
        assert_eq!(read(&store, "v", extent << 20, 8192), pattern(extent as u8, 8192));
    }
    drop(volume);
    store.close().unwrap();
    let store = open(&path);
    assert_eq!(read(&store, "v", 195 << 20, 8192), pattern(195, 8192));
    assert!(store.check().unwrap().findings.is_empty());
}

/// A store with a clone `c`, which a flatten of one extent makes independent, and `r`, which is being rebuilt.
fn with_a_clone(dir: &Path) -> Store {
    let store = open(&init(dir, 64 << 20));
    store.create_volume("v", 16 << 20).unwrap();
    store.volume("v").unwrap().write_at(0, &[1; 4096], false).unwrap();
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    store.clone_volume("v", "s", "c").unwrap();
    store.create_rebuilding("r", 1 << 20).unwrap();
    store.insert_snapshot("r", "s", 1 << 20, &SnapshotOptions::default()).unwrap();
    // It ends within a block.
    store.create_volume("w", 5 << 9).unwrap();
    store.volume("w").unwrap().write_at(0, &[2; 5 << 9], false).unwrap();
    store.create_snapshot("w", "s", &SnapshotOptions::default()).unwrap();
    store.resize_volume("w", 1 << 20).unwrap();
    store
}

/// Calls this at each step of `job`, on another thread, and waits for it.
fn beside<T: Send + 'static>(
    store: &Store,
    job: impl FnOnce(&mut dyn FnMut(u64, u64) -> bool),
    call: impl Fn(Store) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let (told, hears) = std::sync::mpsc::channel();
    let mut answers = Vec::new();
    job(&mut |_, _| {
        let (store, told, call) = (store.clone(), told.clone(), call.clone());
        std::thread::spawn(move || told.send(call(store)));
        answers.push(hears.recv_timeout(Duration::from_secs(60)).expect("it waits"));
        true
    });
    assert!(!answers.is_empty());
    answers
}

/// Found by review: housekeeping waited for the end of a flatten, which may take hours, and committed nothing meanwhile.
/// Growing, a check, another uuid, and the end of a rebuild waited without a word, too.
#[test]
fn a_flatten_holds_up_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_a_clone(dir.path());
    let flatten = |step: &mut dyn FnMut(u64, u64) -> bool| store.flatten("c", step).unwrap();
    let calls = |store: Store| {
        store.housekeep(Duration::from_millis(1)).unwrap();
        store.grow(store.info().size + (16 << 20)).unwrap();
        store.set_uuid(None).unwrap();
        let links = [Link { snapshot: "s".into(), created_ns: 1, ..Link::default() }];
        store.relink("r", &links, Some("s")).unwrap();
        store.rollback_keeping_size("w", "s").unwrap();
        assert!(store.check().unwrap().findings.is_empty());
    };
    assert!(beside(&store, flatten, calls).len() > 1);
    assert_eq!(store.info().size, 96 << 20);
    assert_eq!(read(&store, "c", 0, 4096), [1; 4096]);
    assert_eq!(read(&store, "w", 0, 4096)[..5 << 9], [2; 5 << 9]);
    assert!(store.check().unwrap().findings.is_empty());
}

/// Found by review: a vacuum that waited for the end of a flatten was not asked whether to stop.
#[test]
fn a_vacuum_that_waits_for_a_flatten_can_be_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_a_clone(dir.path());
    let flatten = |step: &mut dyn FnMut(u64, u64) -> bool| store.flatten("c", step).unwrap();
    let calls = |store: Store| store.vacuum(&mut |_, _| false).unwrap_err().kind();
    let answers = beside(&store, flatten, calls);
    assert!(answers.iter().all(|answer| *answer == ErrorKind::Interrupted), "{answers:?}");
}

/// A vacuum would cut off again what is added.
#[test]
fn growing_is_refused_while_a_vacuum_runs() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_a_clone(dir.path());
    store.volume("v").unwrap().write_at(1 << 20, &pattern(1, 4096), false).unwrap();
    store.volume("v").unwrap().discard(0, 1 << 20).unwrap();
    store.delete_volume("w").unwrap();
    let vacuum = |step: &mut dyn FnMut(u64, u64) -> bool| assert!(store.vacuum(step).is_ok());
    let calls = |store: Store| {
        assert!(store.check().unwrap().findings.is_empty());
        store.set_uuid(None).unwrap();
        store.grow(128 << 20).err().map(|error| error.kind())
    };
    let answers = beside(&store, vacuum, calls);
    assert_eq!(answers.last(), Some(&Some(ErrorKind::Busy)));
    store.grow(128 << 20).unwrap();
}

/// Who closes a store has waited for the end of a flatten.
#[test]
fn closing_ends_a_flatten() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_a_clone(dir.path());
    let (other, mut closes) = (store.clone(), None);
    let flattened = store.flatten("c", &mut |_, _| {
        let (store, other) = (other.clone(), other.clone());
        closes.get_or_insert_with(|| std::thread::spawn(move || store.close()));
        // It has begun. If that waits for the flatten, this one ends it.
        let asked = Instant::now();
        while other.create_volume("n", 1 << 20).is_ok() {
            if asked.elapsed() > CLOSES_WITHIN {
                return false;
            }
            // If not, the next one says so.
            drop(other.delete_volume("n"));
        }
        true
    });
    assert_eq!(flattened.unwrap_err().kind(), ErrorKind::Poisoned, "the close waits for it");
    closes.unwrap().join().unwrap().unwrap();
    drop((store, other));
    let store = open(&dir.path().join("store.dbs"));
    assert_eq!(read(&store, "c", 0, 4096), [1; 4096]);
    assert!(store.check().unwrap().findings.is_empty());
}

/// Found by review: all that was to be merged and freed was so before a vacuum was asked whether to stop.
#[test]
fn a_vacuum_can_be_stopped_before_it_moves_anything() {
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 256 << 20);
    let store = open(&path);
    store.create_volume("v", 256 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    for extent in 0..100 {
        volume.write_at(extent << 20, &[1; 4096], false).unwrap();
    }
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    for extent in 0..100 {
        volume.write_at(extent << 20, &[2; 4096], false).unwrap();
    }
    store.delete_snapshot("v", "s").unwrap();
    let stopped = store.vacuum(&mut |_, _| false).unwrap_err();
    assert_eq!(stopped.kind(), ErrorKind::Interrupted);
    assert!(store.work(1).unwrap().remaining > 0, "all was done");
    store.vacuum(&mut |_, _| true).unwrap();
}

/// Regression, simulation seeds 5001687 and 9000829: a shorter snapshot has nothing behind its end, so all of
/// a longer volume there differs from it, whatever they share.
#[test]
fn a_difference_includes_what_lies_behind_the_end_of_the_shorter() {
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 64 << 20);
    let store = open(&path);
    store.create_volume("v", 608 * 512).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(1, 608 * 512), false).unwrap();
    store.create_snapshot("v", "long", &SnapshotOptions::default()).unwrap();
    store.resize_volume("v", 483 * 512).unwrap();
    store.create_snapshot("v", "short", &SnapshotOptions::default()).unwrap();
    store.rollback("v", "long").unwrap();
    let ranges = store.diff("v", Some("short"), None, 0, 608 * 512).unwrap();
    let first = ranges.first().expect("they differ");
    assert_eq!(first.offset, 60 * 4096, "the block in which the shorter one ends");
    assert_eq!(ranges.iter().map(|range| range.length).sum::<u64>(), 608 * 512 - 60 * 4096);

    store.create_volume("w", 256 * 512).unwrap();
    store.create_snapshot("w", "empty", &SnapshotOptions::default()).unwrap();
    store.resize_volume("w", 202 * 512).unwrap();
    store.volume("w").unwrap().write_at(0, &pattern(1, 202 * 512), false).unwrap();
    store.create_snapshot("w", "short", &SnapshotOptions::default()).unwrap();
    store.rollback("w", "empty").unwrap();
    let ranges = store.diff("w", Some("short"), None, 0, 256 * 512).unwrap();
    assert_eq!(ranges.iter().map(|range| range.length).sum::<u64>(), 26 * 4096);
}

/// The requests of a killed writer may still be on their way to the medium when its lock is gone:
/// its successor waits for them, which hold on to the file they were made on.
#[test]
fn a_writer_waits_for_the_requests_of_a_dead_one() {
    use nix::fcntl::{FcntlArg, fcntl};
    use std::sync::atomic::{AtomicBool, Ordering};
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 64 << 20);
    let lock = |kind: i32| nix::libc::flock {
        l_type: kind as i16,
        l_whence: nix::libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let requests = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    fcntl(&requests, FcntlArg::F_OFD_SETLK(&lock(nix::libc::F_WRLCK))).unwrap();
    let landed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(300));
            landed.store(true, Ordering::SeqCst);
            drop(requests);
        });
        let store = open(&path);
        assert!(landed.load(Ordering::SeqCst), "opened while requests were under way");
        store.close().unwrap();
    });
}

/// A tail in a directory of one's own: what was acknowledged and not committed is shown to readers
/// and kept by the next writer.
#[test]
fn a_tail_is_kept_where_it_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 64 << 20);
    let with = |place: &Path, read_only| OpenOptions {
        tail: TailPlace::Directory(place.to_owned()),
        read_only,
        ..OpenOptions::default()
    };
    // Not on tmpfs, or not there.
    assert!(Store::open(&path, &with(&dir.path().join("none"), false)).is_err());
    let Ok(shm) = tempfile::tempdir_in("/dev/shm") else {
        println!("SKIPPED tail of one's own: needs /dev/shm");
        return;
    };
    let store = Store::open(&path, &with(shm.path(), false)).unwrap();
    store.create_volume("v", 1 << 20).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(5, 8192), false).unwrap();
    assert_eq!(std::fs::read_dir(shm.path()).unwrap().count(), 1);
    drop(store);
    let none = OpenOptions { tail: TailPlace::None, read_only: true, ..OpenOptions::default() };
    let without = Store::open(&path, &none).unwrap();
    assert!(without.info().warnings.iter().any(|text| text.contains("its tail is gone")));
    drop(without);
    let reader = Store::open(&path, &with(shm.path(), true)).unwrap();
    assert_eq!(read(&reader, "v", 0, 8192), pattern(5, 8192));
    drop(reader);
    let writer = Store::open(&path, &with(shm.path(), false)).unwrap();
    assert_eq!(read(&writer, "v", 0, 8192), pattern(5, 8192));
    writer.close().unwrap();
    assert_eq!(std::fs::read_dir(shm.path()).unwrap().count(), 0);
}

/// Found by review: the tail was looked for by where the store is, and what a killed process had acknowledged was gone
/// from a store that was moved, though its tail was there.
#[test]
fn a_store_that_was_moved_does_not_lose_its_tail() {
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 64 << 20);
    let Ok(shm) = tempfile::tempdir_in("/dev/shm") else {
        println!("SKIPPED tail of one's own: needs /dev/shm");
        return;
    };
    let with = |read_only| OpenOptions {
        tail: TailPlace::Directory(shm.path().to_owned()),
        read_only,
        ..OpenOptions::default()
    };
    let store = Store::open(&path, &with(false)).unwrap();
    store.create_volume("v", 1 << 20).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(5, 8192), false).unwrap();
    drop(store);
    let moved = dir.path().join("moved");
    let before = std::fs::read(&path).unwrap();
    std::fs::write(&moved, &before).unwrap();
    // Kept open: its inode must not become that of another file, for which the tail would be the right one.
    let _inode = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let reader = Store::open(&moved, &with(true)).unwrap();
    assert!(reader.info().warnings.iter().any(|text| text.contains("rename the tail to")));
    drop(reader);
    let refused = Store::open(&moved, &with(false)).err().expect("acknowledged writes are lost");
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    let text = refused.to_string();
    let named: Vec<_> = text.split('`').filter(|part| part.ends_with(".tail")).collect();
    assert!(std::fs::read(&moved).unwrap() == before, "something was written");
    assert!(!Path::new(named[1]).exists(), "an empty one could hide it");
    let options = RepairOptions { tail: with(false).tail, ..RepairOptions::default() };
    let damaged = dir.path().join("damaged");
    std::fs::write(&damaged, [&[0; 4096], &before[4096..]].concat()).unwrap();
    let plan = Store::plan_repair(&damaged, &options).expect_err("they would be given up");
    assert!(plan.to_string().contains("rename the tail"), "{plan}");
    let stale = shm.path().join(named[0].replace(".tail", "0.tail"));
    std::fs::copy(named[0], &stale).unwrap();
    std::fs::rename(named[0], named[1]).unwrap();
    let store = Store::open(&moved, &with(false)).unwrap();
    assert_eq!(read(&store, "v", 0, 8192), pattern(5, 8192));
    // That of another session says nothing.
    store.volume("v").unwrap().write_at(0, &pattern(7, 8192), false).unwrap();
    drop(store);
    std::fs::remove_file(named[1]).unwrap();
    let store = Store::open(&moved, &with(false)).unwrap();
    assert!(store.info().warnings.iter().any(|text| text.contains("its tail is gone")));
    store.close().unwrap();
    std::fs::remove_file(&stale).unwrap();
    // While its process lives, what is found elsewhere is a copy: of a file system's snapshot, as after a power cut.
    let store = Store::open(&moved, &with(false)).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(6, 8192), false).unwrap();
    std::fs::copy(&moved, &path).unwrap();
    Store::open(&path, &with(false)).unwrap().close().unwrap();
    store.close().unwrap();
}

#[test]
fn which_store_it_is_can_be_asked_without_opening_it() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 64 << 20);
    let uuid = dbs_core::store::peek_uuid(&path).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&[0xff], 20).unwrap();
    assert_eq!(dbs_core::store::peek_uuid(&path).unwrap(), uuid, "by its second copy");
    file.write_all_at(&[0xff], 4096 + 20).unwrap();
    let kind = |path: &Path| dbs_core::store::peek_uuid(path).unwrap_err().kind();
    assert_eq!(kind(&path), ErrorKind::Corrupt);
    file.set_len(100).unwrap();
    assert_eq!(kind(&path), ErrorKind::Invalid);
    assert_eq!(kind(&dir.path().join("none")), ErrorKind::NotFound);
    assert_eq!(kind(&path.join("below")), ErrorKind::Io);
}

/// An embedder had to know of three calls, and of the order that spares a crash the most.
#[test]
fn housekeeping_leaves_nothing_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(&init(directory.path(), 64 << 20));
    let free = store.info().extents_free;
    store.create_volume("v", 1 << 20).unwrap();
    for name in ["a", "b", "c"] {
        store.volume("v").unwrap().write_at(0, &pattern(1, 256 << 10), false).unwrap();
        store.create_snapshot("v", name, &SnapshotOptions::default()).unwrap();
    }
    store.delete_volume("v").unwrap();
    let mut calls = 0..100;
    while store.housekeep(std::time::Duration::ZERO).unwrap() {
        assert!(calls.next().is_some(), "it never ends");
    }
    let info = store.info();
    assert_eq!((info.extents_free, info.snapshots_deleting), (free, 0));
    assert!(!store.settle().unwrap(), "something was left to be committed");
}

/// Found by review: a copy of a store had the same head, whose identity the next snapshot got in both. So a
/// difference against the one was taken for a difference against the other.
#[test]
fn snapshots_of_copies_have_identities_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = init(dir.path(), 64 << 20);
    let store = open(&path);
    store.create_volume("v", 4 << 20).unwrap();
    let first = store.create_snapshot("v", "s0", &SnapshotOptions::default()).unwrap();
    store.close().unwrap();
    let copy = dir.path().join("copy.dbs");
    std::fs::copy(&path, &copy).unwrap();
    let uuids = [&path, &copy].map(|path| {
        let store = open(path);
        assert_eq!(store.snapshots("v", false).unwrap()[0].uuid, first.uuid);
        let taken = store.create_snapshot("v", "s1", &SnapshotOptions::default()).unwrap();
        store.close().unwrap();
        // What was said of it is what is stored.
        assert_eq!(open(path).snapshots("v", false).unwrap()[1].uuid, taken.uuid);
        taken.uuid
    });
    assert_ne!(uuids[0], uuids[1]);
}
