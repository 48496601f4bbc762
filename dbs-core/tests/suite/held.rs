//! What is remembered, or read, while the tree under it changes: an open handle, a read on its way to
//! the device. Whatever is cut off, merged, freed and written anew meanwhile, it must never show
//! another volume's bytes.

use crate::common::{BLOCK, FixedEnv, Mem, MemTail, init, init_unchecked, open};
use dbs_core::Store;
use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::{Read, Request, Start};
use std::sync::{Arc, Mutex};

const EXTENT: u64 = 64 << 10;

fn snapshot(store: &Store, volume: &str, name: &str) {
    store.create_snapshot(volume, name, &SnapshotOptions::default()).unwrap();
}

/// Background work, until nothing is left, or what is left waits for reads.
fn work(store: &Store) -> bool {
    loop {
        let report = store.work(100).unwrap();
        if report.remaining == 0 || report.waits {
            return report.waits;
        }
    }
}

fn block(store: &Store, spec: &str, at: u64) -> u8 {
    let mut bytes = [0xaa; BLOCK];
    store.volume(spec).unwrap().read_at(at * BLOCK as u64, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mix");
    bytes[0]
}

/// Writes a block of every extent there is left.
fn fill_store(store: &Store, at: u64, byte: u8) {
    store.create_volume("q", 1 << 30).unwrap();
    let q = store.volume("q").unwrap();
    let mut extents = 0..(1 << 30) / EXTENT;
    let full = extents
        .find(|i| q.write_at(i * EXTENT + at * BLOCK as u64, &[byte; BLOCK], false).is_err());
    assert!(full.is_some(), "the store is never full");
}

/// Found by review: cutting a clone off dropped the view of the layer that was cut, and of none above
/// it. The head went on reading extents of the origin, whoever had got them by then, and a write of
/// part of a block stored what it read.
#[test]
fn a_handle_looks_again_when_what_it_builds_on_is_cut_off() {
    for disk in [init(1), init_unchecked(1)] {
        let store = open(&disk, 2, false).unwrap();
        store.create_volume("v", 4 * EXTENT).unwrap();
        snapshot(&store, "v", "r");
        store.volume("v").unwrap().write_at(0, &[b'S'; BLOCK], false).unwrap();
        snapshot(&store, "v", "s");
        store.clone_volume("v", "s", "w").unwrap();
        let w = store.volume("w").unwrap();
        w.write_at(0, &[b'X'; BLOCK], false).unwrap();
        snapshot(&store, "w", "x");
        let mut bytes = [1; BLOCK];
        w.read_at(BLOCK as u64, &mut bytes).unwrap();
        assert_eq!(bytes, [0; BLOCK]);
        store.flatten("w", &mut |_, _| true).unwrap();
        store.rollback("v", "r").unwrap();
        work(&store);
        store.delete_snapshot("v", "s").unwrap();
        work(&store);
        fill_store(&store, 1, b'Q');
        w.read_at(BLOCK as u64, &mut bytes).unwrap();
        assert_eq!(bytes, [0; BLOCK], "another volume's bytes");
        store.volume("q").unwrap().discard(0, EXTENT).unwrap();
        store.flush().unwrap();
        w.write_at(BLOCK as u64, &[b'w'; 512], true).unwrap();
        w.read_at(BLOCK as u64, &mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[512]), (b'w', 0), "another volume's bytes are stored");
        assert!(store.check().unwrap().findings.is_empty());
    }
}

/// Found by review: a merge marked zeros in an entry that a write in flight had made, and that was in no record yet. When
/// the write failed, the zeros went with the entry, and the data came back that had been discarded below.
#[test]
fn zeros_are_merged_beside_a_write_that_fails() {
    let disk = init_unchecked(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 4 * EXTENT).unwrap();
    let v = store.volume("v").unwrap();
    v.write_at(0, &[b'P'; EXTENT as usize], false).unwrap();
    snapshot(&store, "v", "p");
    v.discard(0, EXTENT).unwrap();
    snapshot(&store, "v", "s");
    v.write_zeroes(0, BLOCK as u64, false).unwrap();
    let mut request = Request::new();
    let start = v.start_write(8 * BLOCK as u64, BLOCK as u64, &mut request).unwrap();
    assert_eq!(start, Start::Io);
    store.delete_snapshot("v", "s").unwrap();
    work(&store);
    let gone = std::io::Error::from_raw_os_error(5);
    request.finish_write(Err(gone)).unwrap_err();
    work(&store);
    let zeros = |store: &Store| (0..16).all(|at| block(store, "v", at) == 0);
    assert!(zeros(&store), "discarded data comes back");
    assert_eq!(block(&store, "v@p", 5), b'P');
    drop((v, request));
    store.close().unwrap();
    let store = open(&disk, 2, false).unwrap();
    assert!(zeros(&store), "discarded data comes back at the next open");
    assert!(store.check().unwrap().findings.is_empty());
}

/// Found by review: what was pruned of a layer made room for what lay below it, in another volume's deleted snapshot. A read
/// that had been on its way to the layer got content that was older than what it had been sent for.
#[test]
fn a_read_of_what_is_pruned_meanwhile_gets_nothing_older() {
    for disk in [init(1), init_unchecked(1)] {
        let store = open(&disk, 2, false).unwrap();
        store.create_volume("v", 4 * EXTENT).unwrap();
        snapshot(&store, "v", "empty");
        store.volume("v").unwrap().write_at(0, &[b'D'; 3 * BLOCK], false).unwrap();
        snapshot(&store, "v", "d");
        store.clone_volume("v", "d", "w").unwrap();
        store.volume("w").unwrap().write_at(0, &[b'R'; 8 * BLOCK], false).unwrap();
        snapshot(&store, "w", "r");
        store.set_retired("w", "r", true).unwrap();
        store.rollback("v", "empty").unwrap();
        assert!(!work(&store));
        store.delete_snapshot("v", "d").unwrap();
        let changed = {
            let store = store.clone();
            move || {
                store.volume("w").unwrap().write_at(0, &[b'H'; BLOCK], false).unwrap();
                store.prune("w", 0, 4 * EXTENT).unwrap();
                work(&store)
            }
        };
        let (found, _) = read_while(&disk, &store, Reader::Volume, "w", changed);
        assert!(found[0] != b'D', "older than what was there");
        assert_eq!(block(&store, "w", 0), b'H');
        assert_eq!((block(&store, "w", 1), block(&store, "w", 7)), (b'R', b'R'));
        assert!(!work(&store), "the read is over");
        assert!(store.check().unwrap().findings.is_empty());
    }
}

/// Found by review: a flatten copied into blocks that a prune had made absent, while a read went on, and before
/// that was durable.
#[test]
fn what_is_pruned_in_a_clone_is_not_flattened_over() {
    for disk in [init(1), init_unchecked(1)] {
        let store = open(&disk, 2, false).unwrap();
        store.create_volume("v", 4 * EXTENT).unwrap();
        store.volume("v").unwrap().write_at(0, &[b'A'; BLOCK], false).unwrap();
        snapshot(&store, "v", "p");
        store.clone_volume("v", "p", "w").unwrap();
        store.volume("w").unwrap().write_at(0, &[b'B'; 8 * BLOCK], false).unwrap();
        snapshot(&store, "w", "r");
        store.set_retired("w", "r", true).unwrap();
        store.flush().unwrap();
        let changed = {
            let store = store.clone();
            move || {
                store.volume("w").unwrap().write_at(0, &[b'H'; BLOCK], false).unwrap();
                store.prune("w", 0, 4 * EXTENT).unwrap();
                store.flatten("w", &mut |_, _| true).unwrap();
                true
            }
        };
        let (found, _) = read_while(&disk, &store, Reader::Volume, "w", changed);
        assert!(found[0] != b'A', "another volume's block");
        assert_eq!((block(&store, "w", 0), block(&store, "w", 7)), (b'H', b'B'));
        assert!(store.check().unwrap().findings.is_empty());
    }
}

/// The same when power is lost before anything of that is durable.
#[test]
fn what_a_flatten_copies_is_not_seen_where_a_prune_was_lost() {
    let disk = init(1);
    let env = Arc::new(FixedEnv::new(2));
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let store = Store::open_on(storage, Some(MemTail::boxed()), env, false).unwrap();
    store.create_volume("v", 4 * EXTENT).unwrap();
    let write = |name: &str, length: usize, byte: u8| {
        let volume = store.volume(name).unwrap();
        for at in [0, EXTENT] {
            volume.write_at(at, &vec![byte; length], false).unwrap();
        }
    };
    write("v", BLOCK, b'A');
    snapshot(&store, "v", "p");
    store.clone_volume("v", "p", "w").unwrap();
    write("w", 8 * BLOCK, b'B');
    snapshot(&store, "w", "r");
    store.set_retired("w", "r", true).unwrap();
    store.flush().unwrap();
    write("w", BLOCK, b'H');
    store.prune("w", 0, 4 * EXTENT).unwrap();
    let mut images = Vec::new();
    let flattened = store.flatten("w", &mut |_, _| {
        images.push(disk.fork());
        true
    });
    flattened.unwrap();
    assert!(images.len() > 1);
    for image in images {
        let store = open(&Arc::new(image), 3, false).unwrap();
        assert!([b'B', b'H'].contains(&block(&store, "w", 0)), "another volume's block");
    }
}

/// Who reads.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reader {
    Volume,
    Request,
    Many,
    Layer,
    Observer,
}

/// What takes the snapshot that is read out of the reader's sight, and what then happens to its block.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Change {
    /// The clone that reads is cut off; a merge copies over the block.
    FlattenThenCopy,
    /// As before, but the extent is handed to the other volume's head, which is written.
    FlattenThenWrite,
    /// The volume that reads is rolled back; the extent is handed to its clone, which is written.
    RollbackThenWrite,
    /// The snapshot that is looked at is deleted; its extent is handed to the head, which is written.
    DeleteThenWrite,
}

/// Found by review. The number of the fence that a read holds kept freed extents from being used again,
/// and nothing else: a merge wrote over the block that was read, or handed its extent to a head that
/// did. The checksum fits, as it is that of the new content.
#[test]
fn a_read_on_its_way_is_of_what_was_there_when_it_began() {
    use Change::{DeleteThenWrite, FlattenThenCopy, FlattenThenWrite, RollbackThenWrite};
    use Reader::{Layer, Many, Observer, Request, Volume};
    for reader in [Volume, Request, Many, Observer] {
        for change in [FlattenThenCopy, FlattenThenWrite, RollbackThenWrite] {
            read_beside(init(1), reader, change);
            read_beside(init_unchecked(1), reader, change);
        }
    }
    // A layer shows what is hidden below it, until it is cut off or given up.
    for change in [FlattenThenCopy, FlattenThenWrite] {
        read_beside(init(1), Layer, change);
    }
    read_beside(init(1), Observer, DeleteThenWrite);
}

fn read_beside(disk: Arc<Mem>, reader: Reader, change: Change) {
    let what = format!("{reader:?} beside {change:?}");
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 4 * EXTENT).unwrap();
    let v = store.volume("v").unwrap();
    snapshot(&store, "v", "r");
    v.write_at(0, &[b'S'; 3 * BLOCK], false).unwrap();
    snapshot(&store, "v", "s");
    let mut other = store.volume("v").unwrap();
    let mut spec = "v@s";
    if change != Change::DeleteThenWrite {
        store.clone_volume("v", "s", "w").unwrap();
        if change == Change::FlattenThenCopy {
            v.write_at(0, &[b'V'; BLOCK], false).unwrap();
        }
        store.delete_snapshot("v", "s").unwrap();
        spec = "w";
    }
    if change == Change::RollbackThenWrite {
        other = store.volume("w").unwrap();
        spec = "v";
    }
    let changed = {
        let store = store.clone();
        move || {
            match change {
                Change::FlattenThenCopy | Change::FlattenThenWrite => {
                    store.flatten("w", &mut |_, _| true).unwrap();
                }
                Change::RollbackThenWrite => store.rollback("v", "r").unwrap(),
                Change::DeleteThenWrite => store.delete_snapshot("v", "s").unwrap(),
            }
            let waits = work(&store);
            if change != Change::FlattenThenCopy {
                other.write_at(0, &[b'V'; BLOCK], true).unwrap();
            }
            waits
        }
    };
    let (found, waited) = read_while(&disk, &store, reader, spec, changed);
    assert!(found == [b'S'; BLOCK], "{what}: {:?}", found[0] as char);
    assert!(waited, "{what}: nothing waited for the read");
    assert!(!work(&store), "{what}: the read is over");
    assert_eq!(store.work(1).unwrap().remaining, 0, "{what}");
    if spec == "w" {
        assert_eq!(block(&store, "w", 0), b'S', "{what}");
    }
    assert!(store.check().unwrap().findings.is_empty(), "{what}");
}

/// Reads the first block of `spec`, with `change` carried out between plan and device; the bytes, and
/// what it returned.
fn read_while(
    disk: &Arc<Mem>,
    store: &Store,
    reader: Reader,
    spec: &str,
    change: impl FnOnce() -> bool + Send + 'static,
) -> ([u8; BLOCK], bool) {
    let mut bytes = [0; BLOCK];
    let waits = Arc::new(Mutex::new(false));
    if reader == Reader::Request {
        let volume = store.volume(spec).unwrap();
        let mut request = Request::new();
        // The first read of a page of checksums is one that blocks.
        volume.read_at(0, &mut bytes).unwrap();
        assert_eq!(volume.start_read(0, BLOCK as u64, &mut request).unwrap(), Start::Io);
        let waited = change();
        dbs_core::io::Storage::read_at(&**disk, request.segments()[0].device, &mut bytes).unwrap();
        assert_eq!(request.finish_read(Ok(()), &bytes).unwrap(), Read::Done);
        return (bytes, waited);
    }
    let observer = store.observe(spec).unwrap();
    let (layer, volume) = match reader {
        Reader::Layer => (Some(store.layer(spec, None).unwrap()), None),
        Reader::Observer => (None, None),
        _ => (None, Some(store.volume(spec).unwrap())),
    };
    let told = Arc::clone(&waits);
    disk.on_read(move || *told.lock().unwrap() = change());
    match (&layer, &volume) {
        (Some(layer), _) => layer.read_at(0, &mut bytes).unwrap(),
        (None, Some(volume)) if reader == Reader::Many => {
            let mut parts = [dbs_core::volume::ReadPart { offset: 0, buf: &mut bytes }];
            volume.read_many(&mut parts).unwrap();
        }
        (None, Some(volume)) => volume.read_at(0, &mut bytes).unwrap(),
        (None, None) => observer.read_at(0, &mut bytes).unwrap(),
    }
    let waited = *waits.lock().unwrap();
    (bytes, waited)
}

/// A read over more extents than look-ups may be remembered of: what was looked up for its first extents
/// is forgotten while its last are looked up.
#[test]
fn a_read_needs_no_memory_for_all_that_it_looks_up() {
    let store = open(&init_unchecked(1), 2, false).unwrap();
    let middle = 512 * EXTENT;
    store.create_volume("v", 2 * middle).unwrap();
    let v = store.volume("v").unwrap();
    for extent in [511, 512] {
        v.write_at(extent * EXTENT, &[b'a'; BLOCK], false).unwrap();
    }
    snapshot(&store, "v", "s");
    v.write_at(middle, &[b'b'; BLOCK], false).unwrap();
    for memory in [0, 1 << 20] {
        store.set_metadata_memory(memory);
        let mut bytes = vec![1; 2 * EXTENT as usize];
        v.read_at(middle - EXTENT, &mut bytes).unwrap();
        assert_eq!([bytes[0], bytes[BLOCK], bytes[EXTENT as usize]], [b'a', 0, b'b']);
        let info = store.info().lookups;
        assert_eq!((info.forgotten > 0, info.memory_max), (true, memory));
        assert!(info.memory < 8 << 10, "{}", info.memory);
    }
}
