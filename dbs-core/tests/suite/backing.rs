//! Volumes that rest on a file outside the store.

use crate::common::{FixedEnv, Mem, dump, finish_work, init, open};
use dbs_core::info::{LayerState, MapRange, RangeState};
use dbs_core::store::{Link, SnapshotOptions};
use dbs_core::volume::{Request, Start};
use dbs_core::{Backing, ErrorKind, Store};
use std::io;
use std::sync::Arc;

pub const BLOCK: usize = 4096;
pub const EXTENT: usize = 64 << 10;
/// Five blocks and a half behind the third extent: the file ends within an extent, and within a block.
const FILE: usize = 3 * EXTENT + 5 * BLOCK + 2048;
pub const SIZE: usize = 8 * EXTENT;

struct File {
    identity: String,
    bytes: Vec<u8>,
}

impl Backing for File {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn name(&self) -> String {
        "image".to_owned()
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        assert!(offset.is_multiple_of(512) && buf.len().is_multiple_of(512));
        buf.copy_from_slice(&self.bytes[offset as usize..][..buf.len()]);
        Ok(())
    }
}

pub fn file_of(salt: u8) -> Arc<dyn Backing> {
    let bytes = (0..FILE).map(|at| (at / 512) as u8 ^ salt | 1).collect();
    Arc::new(File { identity: format!("file {salt}"), bytes })
}

/// What the volume shows at first.
pub fn fresh(salt: u8) -> Vec<u8> {
    let mut shown: Vec<u8> = (0..FILE).map(|at| (at / 512) as u8 ^ salt | 1).collect();
    shown.resize(SIZE, 0);
    shown
}

pub struct Sample {
    pub disk: Arc<Mem>,
    pub store: Store,
    _file: Arc<dyn Backing>,
}

pub fn sample() -> Sample {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    let file = store.attach_backing(file_of(2));
    store.create_backed("v", SIZE as u64, &file).unwrap();
    Sample { disk, store, _file: file }
}

pub fn read(store: &Store, spec: &str) -> Vec<u8> {
    let volume = store.volume(spec).unwrap();
    let mut buf = vec![0xaa; volume.size() as usize];
    volume.read_at(0, &mut buf).unwrap();
    buf
}

pub fn write(store: &Store, spec: &str, at: usize, bytes: &[u8], model: &mut [u8]) {
    store.volume(spec).unwrap().write_bytes_at(at as u64, bytes).unwrap();
    model[at..][..bytes.len()].copy_from_slice(bytes);
}

pub fn snapshot(store: &Store, volume: &str, name: &str) {
    store.create_snapshot(volume, name, &SnapshotOptions::default()).unwrap();
}

#[test]
fn what_no_layer_has_comes_from_the_file_and_zeros_behind_it() {
    let sample = sample();
    let (store, mut model) = (&sample.store, fresh(2));
    assert_eq!(read(store, "v"), model);
    // Parts of a block take the rest of it from the file, and from behind its end.
    write(store, "v", 5 * BLOCK + 100, &[7; 33], &mut model);
    write(store, "v", EXTENT + 512, &[8; 1024], &mut model);
    write(store, "v", FILE - 700, &[9; 1400], &mut model);
    write(store, "v", 6 * EXTENT, &[10; 2 * BLOCK], &mut model);
    assert_eq!(read(store, "v"), model);
    // Parts of what is in the file, with what is not.
    let volume = store.volume("v").unwrap();
    for (at, length) in [(512, 512), (5 * BLOCK - 512, 2 * BLOCK), (FILE - 2560, 8192)] {
        let mut part = vec![0xaa; length];
        volume.read_at(at as u64, &mut part).unwrap();
        assert_eq!(part, model[at..][..length], "{at}");
    }
    assert_eq!(store.backing("v").unwrap().unwrap().identity, "file 2");
    assert_eq!(store.info().snapshots_deleting, 0);
    assert!(store.volume_info("v").unwrap().parent.is_none(), "a root");
}

/// Zeros that were written or discarded stay zeros, whatever goes from above and below them.
#[test]
fn zeros_hide_the_file() {
    let sample = sample();
    let (store, mut model) = (&sample.store, fresh(2));
    let volume = store.volume("v").unwrap();
    volume.discard(0, 2 * EXTENT as u64).unwrap();
    model[..2 * EXTENT].fill(0);
    volume.write_zeroes(2 * EXTENT as u64 + 512, 3 * BLOCK as u64, false).unwrap();
    model[2 * EXTENT + 512..][..3 * BLOCK].fill(0);
    assert_eq!(read(store, "v"), model);
    write(store, "v", BLOCK, &[3; BLOCK], &mut model);
    volume.discard(BLOCK as u64, BLOCK as u64).unwrap();
    model[BLOCK..2 * BLOCK].fill(0);
    assert_eq!(read(store, "v"), model);
    drop(volume);
    // The oldest snapshot is merged into what is above it, with its marks.
    snapshot(store, "v", "a");
    write(store, "v", 4 * BLOCK, &[4; BLOCK], &mut model);
    snapshot(store, "v", "b");
    store.delete_snapshot("v", "a").unwrap();
    finish_work(store);
    assert_eq!(read(store, "v"), model);
    store.delete_snapshot("v", "b").unwrap();
    finish_work(store);
    assert_eq!(read(store, "v"), model);
    let store = open(&sample.disk.fork().into(), 3, true).unwrap();
    let _file = store.attach_backing(file_of(2));
    assert_eq!(read(&store, "v"), model, "opened again");
}

#[test]
fn nothing_reads_zeros_in_place_of_a_file_that_is_not_there() {
    let sample = sample();
    write(&sample.store, "v", 0, &[1; BLOCK], &mut fresh(2));
    snapshot(&sample.store, "v", "s");
    sample.store.clone_volume("v", "s", "clone").unwrap();
    sample.store.close().unwrap();
    let disk = sample.disk.fork().into();
    let store = open(&disk, 3, false).unwrap();
    assert!(!store.backing("v").unwrap().unwrap().attached);
    let refused = |store: &Store, what: &str| {
        for spec in ["v", "v@s", "clone"] {
            let volume = store.volume(spec).unwrap();
            let error = volume.read_at(BLOCK as u64, &mut [0; BLOCK]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io, "{what}: {error}");
            assert!(error.to_string().contains("file 2"), "{error}");
            let mut request = Request::new();
            let start = volume.start_read(BLOCK as u64, BLOCK as u64, &mut request).unwrap();
            assert_eq!(start, Start::Blocked);
            // What a layer has needs no file.
            volume.read_at(0, &mut [0; BLOCK]).unwrap();
        }
        // A part of a block would have to be completed from the file.
        let error = store.volume("v").unwrap().write_at(BLOCK as u64, &[1; 512], false);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Io);
        let observer = store.observe("v").unwrap();
        assert!(observer.read_at(BLOCK as u64, &mut [0; BLOCK]).is_err());
    };
    refused(&store, "none");
    let other = store.attach_backing(file_of(5));
    refused(&store, "another file");
    drop(other);
    let file = store.attach_backing(file_of(2));
    let second = store.attach_backing(file_of(2));
    assert!(Arc::ptr_eq(&file, &second), "one file for all that need it");
    drop(file);
    assert_eq!(read(&store, "v")[BLOCK..], fresh(2)[BLOCK..]);
    drop(second);
    refused(&store, "given back");
}

/// A version without the feature refuses the store. A store without such a volume has not the bit.
#[test]
fn the_superblock_says_that_there_are_such_volumes() {
    let incompat = |disk: &Mem| disk.bytes()[64];
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("plain", SIZE as u64).unwrap();
    let before = incompat(&disk);
    assert_eq!(before & 8, 0);
    let file = file_of(2);
    let small = store.create_backed("v", FILE as u64 - 512, &file).unwrap_err();
    assert_eq!((small.kind(), incompat(&disk)), (ErrorKind::Invalid, before));
    store.create_backed("v", SIZE as u64, &file).unwrap();
    assert_eq!(incompat(&disk), before | 8);
    store.close().unwrap();
    assert_eq!(incompat(&disk), before | 8);
}

#[test]
fn maps_and_differences_say_where_the_file_shows() {
    let sample = sample();
    let store = &sample.store;
    let volume = store.volume("v").unwrap();
    let size = SIZE as u64;
    let map = |store: &Store| store.volume("v").unwrap().map(0, size, usize::MAX).unwrap();
    let range = |start: usize, end: usize, state| MapRange {
        offset: start as u64,
        length: (end - start) as u64,
        state,
    };
    let end = FILE.next_multiple_of(BLOCK);
    let hole = range(end, SIZE, RangeState::Hole);
    assert_eq!(map(store), [range(0, end, RangeState::Data), hole]);
    snapshot(store, "v", "s");
    assert_eq!(store.diff("v", None, Some("s"), 0, size).unwrap()[0].length, end as u64);
    assert_eq!(store.diff("v", Some("s"), None, 0, size).unwrap(), []);
    volume.discard(0, EXTENT as u64).unwrap();
    volume.write_at(end as u64, &[1; BLOCK], false).unwrap();
    let changed = [range(0, EXTENT, RangeState::Zero), range(end, end + BLOCK, RangeState::Data)];
    assert_eq!(store.diff("v", Some("s"), None, 0, size).unwrap(), changed);
    // A layer is without the file, which is no space of the store's either.
    let layer = store.layer("v", Some("s")).unwrap().map(0, size, usize::MAX).unwrap();
    assert!(layer.iter().all(|range| range.state == LayerState::Absent));
    assert_eq!(store.usage("v", Some("s")).unwrap().referenced, 0);
    assert_eq!(store.usage("v", None).unwrap().referenced, BLOCK as u64);
    // Another volume on another file.
    let other = store.attach_backing(file_of(5));
    store.create_backed("w", size, &other).unwrap();
    snapshot(store, "w", "t");
    assert!(!store.diff("v", Some("w@t"), Some("s"), 0, size).unwrap().is_empty());
}

#[test]
fn what_a_file_has_behind_a_smaller_size_does_not_come_back() {
    let sample = sample();
    let (store, mut model) = (&sample.store, fresh(2));
    snapshot(store, "v", "whole");
    store.resize_volume("v", EXTENT as u64 + 512).unwrap();
    snapshot(store, "v", "small");
    store.resize_volume("v", SIZE as u64).unwrap();
    model[EXTENT + 512..].fill(0);
    assert_eq!(read(store, "v"), model);
    write(store, "v", 2 * EXTENT, &[6; BLOCK], &mut model);
    store.rollback_keeping_size("v", "small").unwrap();
    model[2 * EXTENT..][..BLOCK].fill(0);
    assert_eq!(read(store, "v"), model);
    store.rollback("v", "whole").unwrap();
    assert_eq!(read(store, "v"), fresh(2));
    // A layer that is smaller than the file, and says nothing of what is behind its end.
    store.set_rebuilding("v", true).unwrap();
    store.insert_snapshot("v", "short", EXTENT as u64, &SnapshotOptions::default()).unwrap();
    store.set_rebuilding("v", false).unwrap();
    store.rollback_keeping_size("v", "short").unwrap();
    let mut model = fresh(2);
    model[EXTENT..].fill(0);
    assert_eq!(read(store, "v"), model);
}

/// The base ends with a block, the volume within it: found by review, it could not be rebuilt.
#[test]
fn a_volume_may_end_in_the_last_block_of_its_file() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    let file = store.attach_backing(file_of(2));
    store.create_backed("v", FILE as u64, &file).unwrap();
    store.set_rebuilding("v", true).unwrap();
    store.insert_snapshot("v", "a", FILE as u64, &SnapshotOptions::default()).unwrap();
    let link = Link { snapshot: "a".to_owned(), ..Link::default() };
    store.relink("v", &[link], Some("a")).unwrap();
    store.set_rebuilding("v", false).unwrap();
    assert_eq!(read(&store, "v"), fresh(2)[..FILE]);
}

#[test]
fn clones_keep_the_file_when_their_origin_goes_and_it_goes_with_the_last() {
    let sample = sample();
    let (store, mut model) = (&sample.store, fresh(2));
    write(store, "v", 0, &[1; BLOCK], &mut model);
    snapshot(store, "v", "s");
    store.clone_volume("v", "s", "clone").unwrap();
    let error = store.flatten("clone", &mut |_, _| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    store.flatten("v", &mut |_, _| true).unwrap();
    assert_eq!(read(store, "v"), model, "it was no clone");
    store.delete_volume("v").unwrap();
    finish_work(store);
    assert_eq!(read(store, "clone"), model);
    let slots = store.info().snapshots;
    store.delete_volume("clone").unwrap();
    finish_work(store);
    assert_eq!((slots, store.info().snapshots), (2, 0), "the base and the head");
    store.flush().unwrap();
    let report = Store::check_on(&*sample.disk).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

/// A replica's layers come without the file, in any order, and are linked on top of it.
#[test]
fn a_volume_that_is_rebuilt_keeps_its_file() {
    let sample = sample();
    let (store, mut model) = (&sample.store, fresh(2));
    store.set_rebuilding("v", true).unwrap();
    let size = SIZE as u64;
    for name in ["b", "a"] {
        store.insert_snapshot("v", name, size, &SnapshotOptions::default()).unwrap();
    }
    let layer = store.layer("v", Some("a")).unwrap();
    layer.write_at(0, &[1; BLOCK]).unwrap();
    layer.zero(EXTENT as u64, EXTENT as u64).unwrap();
    drop(layer);
    assert_eq!(read(store, "v@b"), fresh(2), "a root, as it was inserted");
    let link = |name: &str, parent: Option<&str>| Link {
        snapshot: name.to_owned(),
        parent: parent.map(str::to_owned),
        ..Link::default()
    };
    store.relink("v", &[link("a", None), link("b", Some("a"))], Some("b")).unwrap();
    store.set_rebuilding("v", false).unwrap();
    model[..BLOCK].fill(1);
    model[EXTENT..2 * EXTENT].fill(0);
    assert_eq!(read(store, "v"), model);
    store.set_rebuilding("v", true).unwrap();
    store.relink("v", &[link("a", None), link("b", None)], None).unwrap();
    store.set_rebuilding("v", false).unwrap();
    assert_eq!((read(store, "v"), read(store, "v@b")), (fresh(2), fresh(2)));
}

#[test]
fn a_restored_dump_keeps_the_file() {
    let sample = sample();
    let store = &sample.store;
    store.volume("v").unwrap().discard(0, EXTENT as u64).unwrap();
    store.flush().unwrap();
    let mut dump = Vec::new();
    store.dump(&mut dump).unwrap();
    let mut model = fresh(2);
    model[..EXTENT].fill(0);
    sample.store.close().unwrap();
    let disk: Arc<Mem> = sample.disk.fork().into();
    Store::plan_restore_on(&*disk, &dump).unwrap().carry_out(&*disk).unwrap();
    assert_eq!(disk.bytes()[64] & 8, 8);
    let store = open(&disk, 4, false).unwrap();
    assert!(store.volume("v").unwrap().read_at(EXTENT as u64, &mut [0; BLOCK]).is_err());
    let _file = store.attach_backing(file_of(2));
    assert_eq!(read(&store, "v"), model);
}

/// Found by review: a base was to have lost content as well, which none can have, and the repair was refused.
#[test]
fn a_store_with_a_base_is_repaired_when_entries_of_extents_are_lost() {
    let Sample { disk, store, .. } = sample();
    store.volume("v").unwrap().write_at(0, &[7; BLOCK], false).unwrap();
    store.close().unwrap();
    let (at, length) = {
        let dump: serde_json::Value =
            serde_json::from_str(&dump(&open(&disk, 3, true).unwrap())).unwrap();
        let regions = dump["regions"].as_array().unwrap();
        let extents = regions.iter().find(|region| region["name"] == "extent status").unwrap();
        (extents["offset"].as_u64().unwrap(), extents["length"].as_u64().unwrap())
    };
    [at, at + length / 2].iter().for_each(|copy| disk.put(*copy, &[0x55; BLOCK]));
    let repair = Store::plan_repair_on(&*disk, None, &FixedEnv::new(4), false).unwrap();
    repair.carry_out(&*disk).unwrap();
    let store = open(&disk, 5, false).unwrap();
    let _file = store.attach_backing(file_of(2));
    // Where the volume may have had something of its own, that is lost; the file is there all the same.
    store.volume("v").unwrap().read_at(0, &mut [0; BLOCK]).unwrap_err();
    store.create_backed("w", SIZE as u64, &file_of(2)).unwrap();
    assert!(read(&store, "w") == fresh(2));
}

/// Found by review: the store was closed to older programs, though it has no base.
#[test]
fn a_volume_on_a_file_that_is_refused_changes_nothing() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", SIZE as u64).unwrap();
    for (name, size, kind) in [
        ("v", SIZE as u64, ErrorKind::Exists),
        ("a@b", SIZE as u64, ErrorKind::Invalid),
        ("w", SIZE as u64 + 1, ErrorKind::Invalid),
    ] {
        assert_eq!(store.create_backed(name, size, &file_of(2)).unwrap_err().kind(), kind);
    }
    store.close().unwrap();
    assert_eq!(disk.bytes()[64] & 8, 0);
    let store = open(&disk, 3, false).unwrap();
    store.create_backed("w", SIZE as u64, &file_of(2)).unwrap();
    store.close().unwrap();
    assert_eq!(disk.bytes()[64] & 8, 8);
}
