//! Compressed extents: the same bytes by every way to read, and what is written to them.

use crate::common::{
    BLOCK, FixedEnv, Mem, contents, dump, fill, finish_work, init, init_unchecked, open, options,
    pattern,
};
use dbs_core::format::crc::crc32c;
use dbs_core::info::CompressReport;
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::{Request, Start, Volume};
use dbs_core::{ErrorKind, InitOptions, OpenOptions, Secret, Store};
use std::collections::BTreeMap;
use std::sync::Arc;

const EXTENT: usize = 64 << 10;
/// Where the superblock says which features everybody must know.
const INCOMPAT: usize = 64;
const COMPRESSED: u8 = 0x20;

fn compress(store: &Store, spec: &str) -> CompressReport {
    store.compress(spec, &mut |_| true).unwrap()
}

fn compress_all(store: &Store) -> CompressReport {
    let names: Vec<_> = store.volumes(false).into_iter().map(|volume| volume.name).collect();
    let mut all = CompressReport::default();
    for report in names.iter().map(|name| compress(store, name)) {
        all.checked += report.checked;
        all.compressed += report.compressed;
        all.stored += report.stored;
    }
    all
}

/// Extents that are compressed.
fn stored(store: &Store) -> usize {
    dump(store).matches("\"stored\"").count()
}

fn is_well(store: &Store) {
    assert_eq!(store.check().unwrap().findings, []);
    if store.checksums().is_some() {
        assert_eq!(store.scrub(true, &mut |_| true).unwrap().damaged, 0);
    }
}

/// A store with something of everything, compressed; what it shows.
fn compressed(disk: &Arc<Mem>) -> (Store, BTreeMap<String, Vec<u8>>) {
    let store = open(disk, 2, false).unwrap();
    fill(&store);
    finish_work(&store);
    let before = contents(&store);
    let report = compress_all(&store);
    assert!(
        report.compressed > 2 * EXTENT as u64 && report.stored < report.compressed / 2,
        "{report:?}"
    );
    (store, before)
}

fn read(volume: &Volume, offset: u64, length: usize) -> Vec<u8> {
    let mut found = vec![0xaa; length];
    volume.read_at(offset, &mut found).unwrap();
    found
}

#[test]
fn what_is_compressed_is_the_same_by_every_way() {
    for disk in [init(1), init_unchecked(1)] {
        let (store, before) = compressed(&disk);
        assert_eq!(contents(&store), before);
        is_well(&store);
        let again = compress_all(&store);
        assert_eq!(again.compressed, 0, "{again:?}");
        let alpha = store.volume("alpha").unwrap();
        let whole = &before["alpha"];
        // Parts that begin and end anywhere; as a reactor reads, and one that only looks.
        for (offset, length) in [(512, 512), (0, 4096), (15 << 10, 3 << 10), (60 << 10, 70 << 10)] {
            let wanted = &whole[offset..offset + length];
            assert_eq!(read(&alpha, offset as u64, length), wanted);
            let mut seen = vec![0; length];
            store.observe("alpha").unwrap().read_at(offset as u64, &mut seen).unwrap();
            assert_eq!(seen, wanted);
        }
        let started = alpha.start_read(128 << 10, 4096, &mut Request::new()).unwrap();
        assert_eq!(started, Start::Blocked, "a reactor waits for nothing");
        let layer = store.layer("copy", Some("x")).unwrap();
        let mut found = vec![0; 30 << 10];
        layer.read_at(130 << 10, &mut found).unwrap();
        assert_eq!(found, pattern(4, 30 << 10));
        store.close().unwrap();
        let store = open(&disk, 3, false).unwrap();
        assert_eq!(contents(&store), before);
        is_well(&store);
        drop(store);
        assert_eq!(contents(&open(&disk, 4, true).unwrap()), before, "for reading only");
    }
}

/// A store that was never compressed has no bit, and neither has one in which nothing was worth it.
#[test]
fn only_what_saves_a_quarter_is_compressed() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 4 * EXTENT as u64).unwrap();
    let volume = store.volume("v").unwrap();
    let mut rng = fastrand::Rng::with_seed(3);
    let noise: Vec<u8> = (0..2 * EXTENT).map(|_| rng.u8(..)).collect();
    volume.write_at(0, &noise, false).unwrap();
    // Two blocks are never fewer.
    volume.write_at(2 * EXTENT as u64, &pattern(1, 2 * BLOCK), true).unwrap();
    let report = compress(&store, "v");
    assert_eq!((report.checked, report.compressed), (2 * EXTENT as u64, 0));
    assert_eq!(disk.bytes()[INCOMPAT] & COMPRESSED, 0);
    volume.write_at(2 * EXTENT as u64, &pattern(1, 5 * BLOCK), true).unwrap();
    let report = compress(&store, "v");
    assert_eq!((report.compressed, report.stored), (5 * BLOCK as u64, 2 * BLOCK as u64));
    assert_eq!(disk.bytes()[INCOMPAT] & COMPRESSED, COMPRESSED);
    assert_eq!(read(&volume, 2 * EXTENT as u64, 5 * BLOCK), pattern(1, 5 * BLOCK));
}

#[test]
fn what_is_written_to_what_is_compressed_is_read() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 6 * EXTENT as u64).unwrap();
    let volume = store.volume("v").unwrap();
    let mut wanted = pattern(9, 6 * EXTENT);
    volume.write_at(0, &wanted, false).unwrap();
    let mut rng = fastrand::Rng::with_seed(5);
    for round in 0..40 {
        assert_eq!(compress(&store, "v").unreadable, 0);
        for _ in 0..4 {
            let length = 512 * rng.usize(1..64);
            let at = 512 * rng.usize(0..(wanted.len() - length) / 512);
            match rng.u8(0..4) {
                0 => {
                    volume.write_zeroes(at as u64, length as u64, false).unwrap();
                    wanted[at..at + length].fill(0);
                }
                1 => {
                    volume.discard(at as u64, length as u64).unwrap();
                    let (first, end) = (at.next_multiple_of(BLOCK), (at + length) / BLOCK * BLOCK);
                    wanted[first.min(end)..end].fill(0);
                }
                _ => {
                    let bytes = pattern(rng.u8(..), length);
                    volume.write_at(at as u64, &bytes, false).unwrap();
                    wanted[at..at + length].copy_from_slice(&bytes);
                }
            }
            assert!(read(&volume, 0, wanted.len()) == wanted, "round {round}");
        }
        if round % 7 == 0 {
            store.create_snapshot("v", &format!("s{round}"), &SnapshotOptions::default()).unwrap();
        }
        if round % 7 == 6 {
            store.delete_snapshot("v", &format!("s{}", round - 6)).unwrap();
            finish_work(&store);
            assert!(read(&volume, 0, wanted.len()) == wanted, "round {round}");
        }
    }
    is_well(&store);
}

/// Both layers of a merge are compressed, and each has what the other one lacks.
#[test]
fn compressed_layers_merge() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 2 * EXTENT as u64).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &pattern(1, EXTENT), false).unwrap();
    store.create_snapshot("v", "below", &SnapshotOptions::default()).unwrap();
    volume.write_at(BLOCK as u64, &pattern(2, 6 * BLOCK), false).unwrap();
    volume.discard(9 * BLOCK as u64, BLOCK as u64).unwrap();
    let wanted = read(&volume, 0, EXTENT);
    assert_eq!(compress(&store, "v").compressed, EXTENT as u64 + 6 * BLOCK as u64);
    store.delete_snapshot("v", "below").unwrap();
    finish_work(&store);
    let info = store.info();
    assert_eq!((info.snapshots, info.allocated), (1, EXTENT as u64), "{info:?}");
    assert!(read(&volume, 0, EXTENT) == wanted);
    is_well(&store);
}

/// A clone is cut off from its origin, which stays compressed.
#[test]
fn a_clone_of_what_is_compressed_is_flattened() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 3 * EXTENT as u64).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(1, 2 * EXTENT), false).unwrap();
    store.create_snapshot("v", "gold", &SnapshotOptions::default()).unwrap();
    store.clone_volume("v", "gold", "c").unwrap();
    let clone = store.volume("c").unwrap();
    clone.write_at(9 * BLOCK as u64, &pattern(2, 6 * BLOCK), false).unwrap();
    clone.discard(BLOCK as u64, BLOCK as u64).unwrap();
    let before = contents(&store);
    // What the clone has of an extent is compressed, too, and expanded where the rest comes beside it.
    compress_all(&store);
    assert_eq!(stored(&store), 3);
    store.flatten("c", &mut |_, _| true).unwrap();
    assert_eq!(store.volume_info("c").unwrap().origin, None);
    assert_eq!(contents(&store), before);
    assert_eq!(stored(&store), 2, "extents of the origin");
    is_well(&store);
}

#[test]
fn a_vacuum_moves_what_is_compressed() {
    let disk = init(1);
    let (store, mut before) = compressed(&disk);
    let compressed = stored(&store);
    store.delete_volume("beta").unwrap();
    before.remove("beta");
    let small = store.vacuum(&mut |_, _| true).unwrap();
    assert!(small < 3 << 20, "{small}");
    assert_eq!(stored(&store), compressed - 1, "one was the volume's that is gone");
    assert_eq!(contents(&store), before);
    store.grow(4 << 20).unwrap();
    compress(&store, "alpha");
    assert_eq!(contents(&store), before);
    is_well(&store);
}

/// Found by review: a vacuum cut off the free extents that are kept for what is compressed.
#[test]
fn after_a_vacuum_what_is_compressed_is_written_over() {
    let disk = init(1);
    let (store, before) = compressed(&disk);
    store.vacuum(&mut |_, _| true).unwrap();
    assert_eq!(store.info().extents_free, 2, "they are kept, and no more");
    let mut expanded = 0;
    for (name, content) in before.iter().filter(|(name, _)| !name.contains('@')) {
        let (volume, was) = (store.volume(name).unwrap(), stored(&store));
        for at in (0..content.len() / BLOCK * BLOCK).step_by(BLOCK) {
            volume.write_at(at as u64, &content[at..at + BLOCK], true).ok();
        }
        expanded += was - stored(&store);
    }
    assert!(expanded > 0);
    assert_eq!(contents(&store), before);
    is_well(&store);
}

/// Where the first compressed extent lies.
fn place(disk: &Mem) -> usize {
    let bytes = disk.bytes();
    let mut starts = (0..bytes.len()).step_by(BLOCK);
    starts.find(|at| bytes[*at..].starts_with(b"DBSi")).unwrap()
}

#[test]
fn what_is_damaged_is_not_taken_for_data() {
    for (disk, what) in
        [(init(1), "checksum"), (init_unchecked(1), "index"), (init_unchecked(1), "frame")]
    {
        let store = open(&disk, 2, false).unwrap();
        store.create_volume("v", 3 * EXTENT as u64).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &pattern(1, 2 * EXTENT), false).unwrap();
        compress(&store, "v");
        disk.flip(place(&disk) as u64 + if what == "index" { 20 } else { BLOCK as u64 + 9 }, 4);
        let error = volume.read_at(0, &mut [0; EXTENT]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged, "{what}: {error}");
        assert!(error.to_string().contains("extent of byte 0 of `v`"), "{what}: {error}");
        // What is left of it is not written over in silence; whole extents are.
        let refused = volume.write_at(512, &[7; 512], false).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Damaged, "{what}: {refused}");
        assert!(read(&volume, EXTENT as u64, EXTENT) == pattern(1, 2 * EXTENT)[EXTENT..], "{what}");
        assert_eq!(volume.heal(0, &[0; BLOCK]).unwrap_err().kind(), ErrorKind::Damaged);
        if what == "checksum" {
            let report = store.scrub(true, &mut |_| true).unwrap();
            let ranges: Vec<_> = report.ranges.iter().map(|r| (r.place.offset, r.length)).collect();
            assert_eq!(ranges, [(0, EXTENT as u64)], "all that may be lost");
            assert_eq!(report.damaged, EXTENT as u64);
        }
        volume.discard(0, EXTENT as u64).unwrap();
        volume.write_at(512, &[7; 512], false).unwrap();
        assert_eq!(read(&volume, 512, 512), [7; 512]);
        assert_eq!(store.check().unwrap().findings, []);
    }
}

/// An older version refuses the store, and this one believes no entry that the superblock does not tell of.
#[test]
fn the_superblock_tells_of_what_is_compressed() {
    let disk = init(1);
    let (store, before) = compressed(&disk);
    store.close().unwrap();
    let bare = disk.fork();
    for at in [0, BLOCK, bare.bytes().len() - BLOCK] {
        let mut block = bare.bytes()[at..at + BLOCK].to_vec();
        block[INCOMPAT] &= !COMPRESSED;
        block[12..16].fill(0);
        let crc = crc32c(&block);
        block[12..16].copy_from_slice(&crc.to_le_bytes());
        bare.put(at as u64, &block);
    }
    let bare = Arc::new(bare);
    let error = open(&bare, 3, true).map(drop).unwrap_err();
    assert!(error.to_string().contains("compressed"), "{error}");
    assert!(!Store::check_on(&*bare).unwrap().findings.is_empty());
    // A repair knows what the entries say.
    let repair = Store::plan_repair_on(&*bare, None, &FixedEnv::new(4), false).unwrap();
    repair.carry_out(&*bare).unwrap();
    assert_eq!(contents(&open(&bare, 5, false).unwrap()), before);
}

/// A dump says which extents are compressed, and a version that does not know it refuses the dump.
#[test]
fn a_dump_brings_back_what_is_compressed() {
    let disk = init(1);
    let (store, before) = compressed(&disk);
    let text = dump(&store);
    assert!(text.contains("\"format\": \"2.2.0\""));
    store.close().unwrap();
    let damaged = disk.fork();
    damaged.put(64 << 10, &[0xff; 256 << 10]);
    let damaged = Arc::new(damaged);
    assert!(open(&damaged, 3, true).is_err());
    let restore = Store::plan_restore_on(&*damaged, text.as_bytes()).unwrap();
    restore.carry_out(&*damaged).unwrap();
    let store = open(&damaged, 5, false).unwrap();
    assert_eq!(contents(&store), before);
    is_well(&store);
}

#[test]
fn what_cannot_be_compressed_says_so() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    let refused = |spec: &str| store.compress(spec, &mut |_| true).unwrap_err().kind();
    store.create_encrypted("secret", EXTENT as u64, &Secret::KeyFile([1; 32].into())).unwrap();
    assert_eq!(refused("secret"), ErrorKind::Unsupported);
    assert_eq!(refused("nobody"), ErrorKind::NotFound);
    store.create_volume("v", 4 * EXTENT as u64).unwrap();
    assert_eq!(refused("v@nothing"), ErrorKind::NotFound);
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &pattern(1, 4 * EXTENT), false).unwrap();
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    volume.write_at(0, &pattern(2, EXTENT), false).unwrap();
    // It is stopped, goes on, and leaves the head alone.
    let mut steps = 0;
    let stopped = store.compress("v@s", &mut |_| {
        steps += 1;
        steps < 3
    });
    assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Interrupted);
    let rest = compress(&store, "v@s");
    assert_eq!(rest.compressed, 2 * EXTENT as u64);
    assert_eq!(compress(&store, "v@s").compressed, 0);
    assert_eq!(compress(&store, "v").compressed, EXTENT as u64);
    drop(volume);
    store.set_rebuilding("v", true).unwrap();
    assert_eq!(refused("v"), ErrorKind::Busy);
}

/// What it saves is given back: by files that have holes.
#[test]
fn a_file_takes_less_space_by_it() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    Store::init(&path, &InitOptions { size: Some(64 << 20), ..InitOptions::default() }).unwrap();
    let store = Store::open(&path, &OpenOptions::default()).unwrap();
    store.create_volume("v", 16 << 20).unwrap();
    let wanted = pattern(1, 16 << 20);
    store.volume("v").unwrap().write_at(0, &wanted, true).unwrap();
    let taken = || std::fs::metadata(&path).unwrap().blocks() * 512;
    let before = taken();
    let report = compress(&store, "v");
    assert_eq!(report.compressed, 16 << 20);
    finish_work(&store);
    let saved = before - taken();
    assert!(saved > (report.compressed - report.stored) * 9 / 10, "{saved} of {report:?}");
    assert!(read(&store.volume("v").unwrap(), 0, 16 << 20) == wanted);
    let info = store.info();
    assert_eq!((info.compressed, info.compressed_stored), (report.compressed, report.stored));
}

/// Bitmaps of what is compressed leave memory, too.
#[test]
fn compressed_extents_need_no_memory_for_their_bitmaps() {
    let disk = Arc::new(Mem::new(4 << 20));
    Store::init_on(&*disk, &options(), &FixedEnv::new(1)).unwrap();
    let open = || {
        let storage: Arc<dyn dbs_core::io::Storage> = Arc::clone(&disk) as _;
        Store::open_within(storage, None, Arc::new(FixedEnv::new(2)), false, Some(0)).unwrap()
    };
    let store = open();
    store.create_volume("v", EXTENT as u64 * 8).unwrap();
    let volume = store.volume("v").unwrap();
    for at in (0..8 * EXTENT).step_by(8 * BLOCK) {
        volume.write_at(at as u64, &pattern(at as u8, 3 * BLOCK), false).unwrap();
        volume.write_at((at + 4 * BLOCK) as u64, &pattern(1, 2 * BLOCK), false).unwrap();
    }
    let before = contents(&store);
    assert!(compress(&store, "v").compressed > 0);
    assert_eq!(contents(&store), before);
    drop(volume);
    store.close().unwrap();
    let store = open();
    assert_eq!(contents(&store), before);
    store.volume("v").unwrap().write_at(512, &[3; 512], true).unwrap();
    store.volume("v").unwrap().discard(5 * EXTENT as u64, 9 * BLOCK as u64).unwrap();
    let mut wanted = before["v"].clone();
    wanted[512..1024].fill(3);
    wanted[5 * EXTENT..5 * EXTENT + 9 * BLOCK].fill(0);
    assert!(contents(&store)["v"] == wanted);
    is_well(&store);
}

/// Two who write to the same extents, each its own blocks, and one who reads, while all is compressed again and again, and
/// snapshots come and go.
#[test]
fn others_read_and_write_while_extents_are_compressed() {
    const ROUNDS: u8 = 40;
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 4 * EXTENT as u64).unwrap();
    let blocks = 4 * EXTENT / BLOCK;
    store.volume("v").unwrap().write_at(0, &pattern(0, 4 * EXTENT), false).unwrap();
    let block = |at: usize, round: u8| pattern(at as u8 ^ round.wrapping_mul(37), BLOCK);
    let write = |first: usize| {
        let volume = store.volume("v").unwrap();
        for round in 1..=ROUNDS {
            for at in (first..blocks).step_by(2) {
                volume.write_at((at * BLOCK) as u64, &block(at, round), false).unwrap();
                assert!(read(&volume, (at * BLOCK) as u64, BLOCK) == block(at, round), "{at}");
            }
        }
    };
    let compressed = std::thread::scope(|scope| {
        let writers = [scope.spawn(|| write(0)), scope.spawn(|| write(1))];
        let mut compressed = 0;
        while writers.iter().any(|writer| !writer.is_finished()) {
            compressed += compress(&store, "v").compressed;
            store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
            let before = read(&store.volume("v@s").unwrap(), 0, 4 * EXTENT);
            compressed += compress(&store, "v@s").compressed;
            assert!(read(&store.volume("v@s").unwrap(), 0, 4 * EXTENT) == before);
            store.delete_snapshot("v", "s").unwrap();
            finish_work(&store);
        }
        compressed
    });
    assert!(compressed > 0);
    let volume = store.volume("v").unwrap();
    for at in 0..blocks {
        assert!(read(&volume, (at * BLOCK) as u64, BLOCK) == block(at, ROUNDS), "{at}");
    }
    drop(volume);
    is_well(&store);
    store.close().unwrap();
    let store = open(&disk, 3, false).unwrap();
    assert!(read(&store.volume("v").unwrap(), 0, BLOCK) == block(0, ROUNDS));
    is_well(&store);
}

/// Found by review: on a full store nothing could be written over, and a deletion freed nothing, as each of both wanted a
/// free extent first.
#[test]
fn on_a_full_store_what_is_compressed_is_written_over_and_merged() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 4 * EXTENT as u64).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &pattern(1, 4 * EXTENT), false).unwrap();
    store.create_snapshot("v", "a", &SnapshotOptions::default()).unwrap();
    for at in 0..4 {
        volume.write_at((at * EXTENT) as u64, &pattern(2, 6 * BLOCK), false).unwrap();
    }
    store.create_snapshot("v", "b", &SnapshotOptions::default()).unwrap();
    volume.write_at(0, &pattern(3, 6 * BLOCK), true).unwrap();
    compress(&store, "v");
    let wanted = read(&volume, 0, 4 * EXTENT);
    store.create_volume("filler", 256 * EXTENT as u64).unwrap();
    let filler = store.volume("filler").unwrap();
    let full = (0..256)
        .find_map(|at| filler.write_at(at * EXTENT as u64, &pattern(at as u8, EXTENT), true).err());
    assert_eq!(full.unwrap().kind(), ErrorKind::NoSpace);
    // What the head has.
    volume.write_at(0, &pattern(3, BLOCK), true).unwrap();
    let before = store.info();
    store.delete_snapshot("v", "a").unwrap();
    finish_work(&store);
    let info = store.info();
    assert_eq!((info.snapshots_deleting, info.snapshots_put_off), (0, 0), "{info:?}");
    assert!(info.extents_free > before.extents_free, "{before:?} {info:?}");
    assert!(read(&volume, 0, 4 * EXTENT) == wanted);
    is_well(&store);
}
