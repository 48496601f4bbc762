//! Encrypted volumes: what is on the medium, what is shown to whom, and what goes on without a key.

use crate::common::{BLOCK, FixedEnv, Mem, dump, finish_work, init, open, options};
use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::{Read, ReadPart, Request, Start, Volume};
use dbs_core::{ErrorKind, InitOptions, OpenOptions, Secret, Store};
use std::sync::Arc;

const EXTENT: u64 = 64 << 10;
/// Where the superblock says which features everybody must know.
const INCOMPAT: usize = 64;
const ENCRYPTED: u8 = 0x10;

fn secret(byte: u8) -> Secret {
    Secret::KeyFile([byte; 32].into())
}

/// Sectors of which each says where it was written, and by which write: 16 bytes of it are found nowhere else.
fn sectors(write: u8, first: u64, count: u64) -> Vec<u8> {
    let sector = |at: u64| format!("plain {write:03} {at:05} ").into_bytes().repeat(32);
    (first..first + count).flat_map(sector).collect()
}

/// Whether any of what [`sectors`] makes lies open on the medium.
fn is_open(disk: &Mem) -> bool {
    disk.bytes().windows(7).any(|part| part == b"plain 0")
}

fn put(volume: &Volume, write: u8, first: u64, count: u64) {
    volume.write_at(first * 512, &sectors(write, first, count), false).unwrap();
}

fn shows(volume: &Volume, write: u8, first: u64, count: u64) {
    let mut found = vec![0xaa; count as usize * 512];
    volume.read_at(first * 512, &mut found).unwrap();
    assert!(found == sectors(write, first, count), "{}: sector {first}", volume.spec());
}

fn locked<T>(result: dbs_core::Result<T>) {
    let error = result.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    assert!(error.to_string().contains("dbs volume unlock v"), "{error}");
}

/// Whole blocks and parts of them, zeros in between, snapshots, a clone.
fn fill(store: &Store) {
    store.create_encrypted("v", 16 * EXTENT, &secret(1)).unwrap();
    let v = store.volume("v").unwrap();
    put(&v, 1, 0, 300);
    put(&v, 2, 301, 3);
    put(&v, 3, 1021, 17);
    v.write_zeroes(16 * 512, 24 * 512, false).unwrap();
    v.write_zeroes(100 * 512, 3 * 512, false).unwrap();
    store.create_snapshot("v", "one", &SnapshotOptions::default()).unwrap();
    put(&v, 4, 8, 64);
    v.write_bytes_at(700 * 512 + 3, &sectors(5, 700, 1)[..100]).unwrap();
    store.create_snapshot("v", "two", &SnapshotOptions::default()).unwrap();
    put(&v, 6, 10, 2);
    store.clone_volume("v", "one", "c").unwrap();
    put(&store.volume("c").unwrap(), 7, 200, 5);
}

fn check_content(store: &Store) {
    let v = store.volume("v").unwrap();
    shows(&v, 4, 8, 2);
    shows(&v, 6, 10, 2);
    shows(&v, 4, 12, 60);
    shows(&v, 1, 104, 196);
    shows(&v, 2, 301, 3);
    shows(&v, 3, 1021, 17);
    let mut part = [0; 1024];
    v.read_at(700 * 512, &mut part).unwrap();
    assert!(part[3..103] == sectors(5, 700, 1)[..100]);
    assert!(part[..3].iter().chain(&part[103..]).all(|byte| *byte == 0));
    v.read_at(100 * 512, &mut part).unwrap();
    assert!(part.iter().all(|byte| *byte == 0));
    let c = store.volume("c").unwrap();
    shows(&c, 7, 200, 5);
    shows(&c, 1, 205, 95);
    shows(&c, 1, 0, 16);
}

#[test]
fn nothing_of_what_is_written_lies_open_on_the_medium() {
    for checksums in [true, false] {
        let disk = Arc::new(Mem::new(8 << 20));
        let options = InitOptions { size: Some(8 << 20), checksums, ..options() };
        Store::init_on(&*disk, &options, &FixedEnv::new(1)).unwrap();
        let store = open(&disk, 2, false).unwrap();
        fill(&store);
        check_content(&store);
        // Ways that are not those of a volume.
        let (mut one, mut two) = ([0; 512], [0; 1536]);
        let parts = &mut [
            ReadPart { offset: 10 * 512, buf: &mut one },
            ReadPart { offset: 303 * 512, buf: &mut two },
        ];
        store.volume("v").unwrap().read_many(parts).unwrap();
        assert!(one[..] == sectors(6, 10, 1) && two[..512] == sectors(2, 303, 1));
        store.observe("v@two").unwrap().read_at(9 * 512, &mut two).unwrap();
        assert!(two[..] == sectors(4, 9, 3));
        store.layer("v", None).unwrap().read_at(10 * 512, &mut one).unwrap();
        assert!(one[..] == sectors(6, 10, 1));
        // Data moves: by a merge, a flatten, a vacuum; and a block is cut off by a rollback.
        store.delete_snapshot("v", "two").unwrap();
        finish_work(&store);
        store.flatten("c", &mut |_, _| true).unwrap();
        check_content(&store);
        store.create_encrypted("short", 5 * 512, &secret(1)).unwrap();
        put(&store.volume("short").unwrap(), 8, 0, 5);
        store.create_snapshot("short", "s", &SnapshotOptions::default()).unwrap();
        store.resize_volume("short", 3 * 512).unwrap();
        store.create_snapshot("short", "cut", &SnapshotOptions::default()).unwrap();
        store.resize_volume("short", 8 * EXTENT).unwrap();
        store.rollback_keeping_size("short", "cut").unwrap();
        let short = store.volume("short").unwrap();
        shows(&short, 8, 0, 3);
        let mut behind = [1; 1024];
        short.read_at(3 * 512, &mut behind).unwrap();
        assert_eq!(behind, [0; 1024]);
        // A volume that is rebuilt is written by its layers.
        store.create_encrypted_rebuilding("r", 4 * EXTENT, &secret(1)).unwrap();
        store.insert_snapshot("r", "s", 4 * EXTENT - 512, &SnapshotOptions::default()).unwrap();
        let layer = store.layer("r", Some("s")).unwrap();
        layer.write_at(8 * 512, &sectors(9, 8, 24)).unwrap();
        layer.write_at(4 * EXTENT - 4096, &sectors(9, 504, 7)).unwrap();
        store.set_rebuilding("r", false).unwrap();
        shows(&store.volume("r@s").unwrap(), 9, 8, 24);
        shows(&store.volume("r@s").unwrap(), 9, 504, 7);
        store.delete_volume("short").unwrap_err();
        drop(short);
        store.delete_volume("short").unwrap();
        finish_work(&store);
        store.vacuum(&mut |_, _| true).unwrap();
        check_content(&store);
        store.flush().unwrap();
        assert!(!is_open(&disk), "it can be read on the medium");
        // Else the test would say so of anything.
        store.grow(8 << 20).unwrap();
        store.create_volume("plain", EXTENT).unwrap();
        put(&store.volume("plain").unwrap(), 10, 0, 1);
        assert!(is_open(&disk));
        assert!(Store::check_on(&*disk).unwrap().is_clean());
    }
}

/// Each way in is refused for a volume that is locked.
fn is_refused(store: &Store) {
    let (mut buf, mut request) = ([0xaa; BLOCK], Request::new());
    for spec in ["v", "v@one"] {
        let volume = store.volume(spec).unwrap();
        locked(volume.read_at(0, &mut buf));
        locked(volume.read_many(&mut [ReadPart { offset: 512, buf: &mut buf[..512] }]));
        locked(store.complete_volume(spec));
        locked(store.observe(spec).unwrap().read_at(0, &mut buf));
        assert_eq!(volume.start_read(0, 4096, &mut request).unwrap(), Start::Blocked);
        locked(volume.start_read_beside(0, 4096, &mut request));
        assert!(!request.is_running() && request.extra_bytes() == 0);
    }
    let volume = store.volume("v").unwrap();
    locked(volume.write_at(0, &buf, false));
    locked(volume.write_at(512, &buf[..512], false));
    locked(volume.write_bytes_at(3, &buf[..5]));
    locked(volume.write_zeroes(512, 512, false));
    locked(volume.discard(0, 8192));
    locked(volume.trim(false, &mut |_| true));
    locked(volume.heal(0, &buf));
    locked(store.layer("v", Some("one")).unwrap().read_at(0, &mut buf));
    assert_eq!(volume.start_write(0, 4096, &mut request).unwrap(), Start::Blocked);
    locked(volume.start_write_own(0, 4096, &mut request));
    assert!(buf == [0xaa; BLOCK], "shown");
}

/// As a server does it, in a buffer of its own; false if somebody who may wait is to do it.
fn write_own(disk: &Mem, volume: &Volume, offset: u64, buf: &mut [u8]) -> bool {
    let mut request = Request::new();
    if volume.start_write_own(offset, buf.len() as u64, &mut request).unwrap() != Start::Io {
        return false;
    }
    assert!(request.is_open());
    request.seal_own(buf);
    assert!(!request.is_open());
    for part in request.segments() {
        disk.write_at(part.device, &buf[part.start..][..part.length]).unwrap();
    }
    let _ = request.finish_write(Ok(())).unwrap();
    true
}

/// The same for a read, and whether it was checked by what was fetched beside it.
fn read_own(disk: &Mem, volume: &Volume, offset: u64, length: usize) -> Option<(Vec<u8>, bool)> {
    let mut request = Request::new();
    let start = volume.start_read_beside(offset, length as u64, &mut request).unwrap();
    let beside = request.extra_bytes();
    let mut buf = vec![0xee; length + beside];
    for part in request.segments() {
        disk.read_at(part.device, &mut buf[part.start..][..part.length]).unwrap();
    }
    request.zeros().iter().for_each(|range| buf[range.clone()].fill(0));
    match start {
        Start::Blocked => return None,
        Start::Done => {}
        Start::Io => assert_eq!(request.finish_read_own(Ok(()), &mut buf).unwrap(), Read::Done),
    }
    buf.truncate(length);
    Some((buf, beside > 0))
}

#[test]
fn a_server_encrypts_and_decrypts_in_buffers_of_its_own() {
    for checksums in [true, false] {
        let disk = Arc::new(Mem::new(8 << 20));
        let options = InitOptions { size: Some(8 << 20), checksums, ..options() };
        Store::init_on(&*disk, &options, &FixedEnv::new(1)).unwrap();
        let store = open(&disk, 2, false).unwrap();
        let size = 16 * EXTENT;
        store.create_encrypted("v", size, &secret(1)).unwrap();
        let mut model = vec![0; size as usize];
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut writes, mut reads, mut beside) = (0, 0, 0);
        let check = |store: &Store, model: &[u8], range: std::ops::Range<usize>| {
            let v = store.volume("v").unwrap();
            let (mut found, start) = (vec![0xaa; range.len()], range.start as u64);
            v.read_at(start, &mut found).unwrap();
            assert!(found == model[range.clone()], "blocking: {range:?}");
            let read = read_own(&disk, &v, start, range.len());
            read.map(|(found, beside)| {
                assert!(found == model[range.clone()], "own: {range:?}");
                beside
            })
        };
        for round in 0..120 {
            let v = store.volume("v").unwrap();
            let (first, count) = (rng.u64(0..size / 4096 - 8), rng.u64(1..=8));
            let range = first as usize * BLOCK..(first + count) as usize * BLOCK;
            let text = sectors(round, first * 8, count * 8);
            if write_own(&disk, &v, first * 4096, &mut text.clone()) {
                writes += 1;
            } else {
                v.write_at(first * 4096, &text, false).unwrap();
            }
            model[range.clone()].copy_from_slice(&text);
            if round == 60 {
                store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
            }
            reads += usize::from(check(&store, &model, range).is_some());
        }
        // Holes and data by turns; parts of blocks, where nothing is to be checked.
        for at in (0..model.len()).step_by(8 * BLOCK) {
            check(&store, &model, at..at + 8 * BLOCK);
        }
        assert_eq!(check(&store, &model, 512..1024).is_some(), !checksums);
        store.close().unwrap();
        let store = open(&disk, 3, false).unwrap();
        store.unlock("v", &secret(1)).unwrap();
        let v = store.volume("v").unwrap();
        v.read_at(0, &mut [0; BLOCK]).unwrap();
        if checksums {
            // Where they are is known from here on, and nothing else.
            store.crowd_checksums(true).unwrap();
        }
        for at in (0..model.len()).step_by(8 * BLOCK) {
            if let Some((found, fetched)) = read_own(&disk, &v, at as u64, 8 * BLOCK) {
                assert!(found == model[at..at + 8 * BLOCK]);
                beside += usize::from(fetched);
            }
        }
        assert!(writes > 60 && reads > 60, "{writes} {reads}");
        assert_eq!(beside > 0, checksums);
        assert!(!is_open(&disk), "it can be read on the medium");
    }
}

#[test]
fn what_is_long_to_encrypt_is_for_who_may_wait() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    let (long, mut request) = ((1 << 20) + 4096, Request::new());
    store.create_encrypted("v", 2 * long, &secret(1)).unwrap();
    let v = store.volume("v").unwrap();
    v.write_at(0, &[1; BLOCK], false).unwrap();
    assert_eq!(v.start_write_own(0, long, &mut request).unwrap(), Start::Blocked);
    assert_eq!(v.start_read_beside(0, long, &mut request).unwrap(), Start::Blocked);
    // One that is given up leaves nothing behind for the next user of the request.
    assert_eq!(v.start_read_beside(0, 4096, &mut request).unwrap(), Start::Io);
    assert!(request.is_open());
    request.cancel();
    assert!(!request.is_open());
}

#[test]
#[should_panic(expected = "what was written is not encrypted")]
fn a_write_that_was_not_encrypted_does_not_end() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_encrypted("v", EXTENT, &secret(1)).unwrap();
    let v = store.volume("v").unwrap();
    v.write_at(0, &[1; BLOCK], false).unwrap();
    let mut request = Request::new();
    assert_eq!(v.start_write_own(0, BLOCK as u64, &mut request).unwrap(), Start::Io);
    request.seal(&[1; BLOCK]);
    let _ = request.finish_write(Ok(()));
}

#[test]
fn a_locked_volume_shows_nothing_and_takes_nothing() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    fill(&store);
    for spec in ["v", "v@one"] {
        let user = store.volume(spec).unwrap();
        assert_eq!(store.lock("v").unwrap_err().kind(), ErrorKind::Busy);
        drop(user);
    }
    let observer = store.observe("v").unwrap();
    store.lock("v").unwrap();
    store.lock("v").unwrap();
    is_refused(&store);
    locked(observer.read_at(0, &mut [0; 512]));
    // A clone has a lock of its own.
    shows(&store.volume("c").unwrap(), 7, 200, 5);
    let others = [
        (secret(2), "the key file is not the one"),
        (Secret::passphrase("x").unwrap(), "a key file unlocks it"),
    ];
    for (other, text) in others {
        let error = store.unlock("v", &other).unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains(text), "{error}");
    }
    let info = store.volume_info("v").unwrap().encryption.unwrap();
    assert_eq!((info.secret.as_str(), info.locked), ("key file", true));
    store.create_volume("plain", EXTENT).unwrap();
    assert!(store.volume_info("plain").unwrap().encryption.is_none());
    for done in [store.unlock("plain", &secret(1)), store.lock("plain")] {
        assert!(done.unwrap_err().to_string().contains("is not encrypted"));
    }
    store.close().unwrap();
    for read_only in [true, false] {
        let store = open(&disk, 3, read_only).unwrap();
        if !read_only {
            is_refused(&store);
        }
        locked(store.volume("v").unwrap().read_at(0, &mut [0; 512]));
        for name in ["v", "c"] {
            assert!(store.unlock(name, &secret(2)).is_err());
            store.unlock(name, &secret(1)).unwrap();
            store.unlock(name, &secret(1)).unwrap();
        }
        check_content(&store);
    }
}

#[test]
fn what_looks_at_no_content_needs_no_key() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    fill(&store);
    store.close().unwrap();
    let store = open(&disk, 3, false).unwrap();
    store.create_snapshot("v", "three", &SnapshotOptions::default()).unwrap();
    store.clone_volume("v", "three", "d").unwrap();
    assert!(store.volume_info("d").unwrap().encryption.unwrap().locked);
    store.rename_volume("v", "w").unwrap();
    store.rename_volume("w", "v").unwrap();
    store.resize_volume("v", 20 * EXTENT).unwrap();
    assert!(!store.diff("v", Some("one"), None, 0, EXTENT).unwrap().is_empty());
    assert!(!store.volume("v").unwrap().map(0, EXTENT, 100).unwrap().is_empty());
    store.delete_snapshot("v", "two").unwrap();
    finish_work(&store);
    store.rollback("v", "three").unwrap();
    store.flatten("c", &mut |_, _| true).unwrap();
    finish_work(&store);
    store.vacuum(&mut |_, _| true).unwrap();
    assert_eq!(store.scrub(true, &mut |_| true).unwrap().damaged, 0);
    assert!(store.check().unwrap().is_clean());
    store.create_encrypted("gone", EXTENT, &secret(4)).unwrap();
    store.lock("gone").unwrap();
    store.delete_volume("gone").unwrap();
    ["v", "c", "d"].iter().for_each(|name| store.unlock(name, &secret(1)).unwrap());
    check_content(&store);
    shows(&store.volume("d").unwrap(), 6, 10, 2);
    // Its origin goes, and it has its key all the same.
    store.delete_volume("v").unwrap();
    finish_work(&store);
    store.close().unwrap();
    let store = open(&disk, 4, false).unwrap();
    store.unlock("d", &secret(1)).unwrap();
    shows(&store.volume("d").unwrap(), 6, 10, 2);
}

#[test]
fn another_secret_is_there_after_a_crash_or_the_old_one_is() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    fill(&store);
    assert!(store.rekey("v", &secret(2), &secret(3)).is_err());
    let word = Secret::passphrase("a word").unwrap();
    store.rekey("v", &secret(1), &word).unwrap();
    // The process dies.
    drop(store);
    let store = open(&disk, 3, false).unwrap();
    assert!(store.unlock("v", &secret(1)).is_err(), "the old one");
    store.unlock("v", &word).unwrap();
    assert_eq!(store.volume_info("v").unwrap().encryption.unwrap().secret, "passphrase");
    store.unlock("c", &secret(1)).unwrap();
    check_content(&store);
    store.rekey("v", &word, &secret(5)).unwrap();
    shows(&store.volume("v").unwrap(), 6, 10, 2);
    // A clone of now has the secret of now.
    store.clone_volume("v", "one", "e").unwrap();
    store.lock("e").unwrap();
    store.unlock("e", &secret(5)).unwrap();
}

#[test]
fn a_store_says_that_it_has_encrypted_volumes_from_the_first_on() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("plain", EXTENT).unwrap();
    let says = || disk.bytes()[INCOMPAT] & ENCRYPTED != 0;
    assert!(store.create_encrypted("plain", EXTENT, &secret(1)).is_err());
    assert!(store.create_encrypted("odd", 100, &secret(1)).is_err());
    // The tables are full.
    let mut made = 1;
    while store.create_volume(&format!("p{made}"), EXTENT).is_ok() {
        made += 1;
    }
    let full = store.create_encrypted("v", EXTENT, &secret(1)).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::NoSpace);
    assert!(!says(), "what was refused changed the store");
    let reader = open(&disk, 3, true).unwrap();
    let refused = reader.create_encrypted("v", EXTENT, &secret(1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnly, "not that the table is full");
    drop(reader);
    store.delete_volume("p1").unwrap();
    finish_work(&store);
    store.create_encrypted("v", EXTENT, &secret(1)).unwrap();
    assert!(says());
    store.delete_volume("v").unwrap();
    finish_work(&store);
    store.close().unwrap();
    assert!(says());
    open(&disk, 3, false).unwrap();
}

#[test]
fn a_dump_has_the_keys_wrapped_and_restores_them() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    fill(&store);
    store.close().unwrap();
    let store = open(&disk, 3, true).unwrap();
    let (text, data) = (dump(&store), store.info().metadata);
    drop(store);
    // Who does not know keys must not restore volumes that are not encrypted of it.
    assert!(text.contains("\"format\": \"2.1.0\""), "{}", &text[..100]);
    let plain = open(&init(1), 2, false).unwrap();
    plain.create_volume("plain", EXTENT).unwrap();
    assert!(dump(&plain).contains("\"format\": \"2.0.0\""));
    drop(plain);
    let wiped = Arc::new(Mem::from_bytes(disk.bytes()));
    wiped.put(0, &vec![0; data as usize]);
    wiped.put(wiped.size_bytes() - BLOCK as u64, &[0; BLOCK]);
    Store::plan_restore_on(&*wiped, text.as_bytes()).unwrap().carry_out(&*wiped).unwrap();
    let store = open(&wiped, 4, false).unwrap();
    locked(store.volume("v").unwrap().read_at(0, &mut [0; 512]));
    ["v", "c"].iter().for_each(|name| store.unlock(name, &secret(1)).unwrap());
    check_content(&store);
    drop(store);
    // One chain has one key: else what is stored would be shown as it lies there.
    let text = crate::common::unsummed(&text);
    // The last one is a snapshot's.
    let at = text.rfind("\"family\": ").unwrap() + 10;
    for family in [format!("\"{}\"", "ab".repeat(16)), "null".to_owned()] {
        let changed = [&text[..at], &family, &text[at + 34..]].concat();
        let error = Store::plan_restore_on(&*wiped, changed.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("another key"), "{error}");
    }
}

/// Both copies of each metadata block of volumes, and then of snapshots, are gone.
#[test]
fn what_a_repair_makes_anew_shows_nothing_that_is_encrypted() {
    for region in ["volumes", "snapshots"] {
        let disk = init(1);
        let store = open(&disk, 2, false).unwrap();
        fill(&store);
        store.create_volume("plain", EXTENT).unwrap();
        put(&store.volume("plain").unwrap(), 10, 0, 8);
        store.close().unwrap();
        lose_first_block(&disk, region);
        let env = FixedEnv::new(9);
        Store::plan_repair_on(&*disk, None, &env, false).unwrap().carry_out(&*disk).unwrap();
        assert!(Store::check_on(&*disk).unwrap().is_clean());
        let store = open(&disk, 5, false).unwrap();
        for info in store.volumes(false) {
            // Those whose slot is there have their key.
            let opened = store.unlock(&info.name, &secret(1));
            let volume = store.volume(&info.name).unwrap();
            let mut buf = vec![0; volume.size() as usize];
            for (block, bytes) in buf.chunks_mut(BLOCK).enumerate() {
                if volume.read_at((block * BLOCK) as u64, bytes).is_ok() && opened.is_err() {
                    let is_known = bytes.starts_with(b"plain 010") || bytes.iter().all(|b| *b == 0);
                    assert!(is_known, "{region}: {} shows what nobody wrote", info.name);
                }
            }
        }
    }
}

#[test]
fn a_damaged_block_is_healed_with_what_it_held() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    fill(&store);
    let v = store.volume("v").unwrap();
    let mut before = [0; BLOCK];
    v.read_at(40 << 10, &mut before).unwrap();
    // It has one bit in its first half that is another.
    let stored = disk.bytes();
    let at = (store.info().metadata..stored.len() as u64).step_by(BLOCK);
    let mut changed = 0;
    for at in at {
        let mut byte = [stored[at as usize]];
        byte[0] ^= 1;
        disk.put(at, &byte);
        let damaged = v.read_at(40 << 10, &mut [0; BLOCK]);
        if damaged.is_err() {
            assert_eq!(v.heal(40 << 10, &[1; BLOCK]).unwrap_err().kind(), ErrorKind::Damaged);
            assert_eq!(v.heal(40 << 10, &before).unwrap(), BLOCK as u64);
            changed += 1;
        }
        byte[0] ^= 1;
        disk.put(at, &byte);
    }
    assert_eq!(changed, 1);
    check_content(&store);
}

#[test]
fn a_store_that_was_opened_with_a_secret_unlocks_what_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    Store::init(&path, &InitOptions { size: Some(64 << 20), ..InitOptions::default() }).unwrap();
    let with = |secret| OpenOptions { secret, ..OpenOptions::default() };
    let store = Store::open(&path, &with(None)).unwrap();
    fill(&store);
    store.create_encrypted("other", EXTENT, &secret(2)).unwrap();
    store.close().unwrap();
    let store = Store::open(&path, &with(Some(secret(1)))).unwrap();
    let is_locked = |store: &Store| store.volume_info("v").unwrap().encryption.unwrap().locked;
    assert!(is_locked(&store), "nobody has opened it");
    check_content(&store);
    assert!(!is_locked(&store));
    assert!(store.volume("other").unwrap().read_at(0, &mut [0; 512]).is_err());
    // What was locked stays so.
    store.lock("v").unwrap();
    locked(store.volume("v").unwrap().read_at(0, &mut [0; 512]));
    // So does what is cloned of it meanwhile, until that is unlocked.
    store.clone_volume("v", "one", "kept").unwrap();
    let kept = || store.volume("kept").unwrap().read_at(0, &mut [0; 512]);
    assert_eq!(kept().unwrap_err().kind(), ErrorKind::Locked);
    store.unlock("kept", &secret(1)).unwrap();
    kept().unwrap();
    store.unlock("v", &secret(1)).unwrap();
    store.clone_volume("v", "one", "open").unwrap();
    store.volume("open").unwrap().read_at(0, &mut [0; 512]).unwrap();
    check_content(&store);
    store.close().unwrap();
    let store = Store::open(&path, &with(Some(secret(1)))).unwrap();
    let all = store.observe_volumes();
    let (_, v) = all.iter().find(|(name, _)| name == "v").unwrap();
    v.map(0, EXTENT, 10).unwrap();
    let two = store.observe("v@two").unwrap();
    assert!(is_locked(&store), "nobody has read it");
    let mut found = [0; 512];
    v.read_at(10 * 512, &mut found).unwrap();
    assert!(found[..] == sectors(6, 10, 1) && !is_locked(&store));
    two.read_at(10 * 512, &mut found).unwrap();
    assert!(found[..] == sectors(4, 10, 1));
    let other = store.observe("other").unwrap();
    assert_eq!(other.read_at(0, &mut found).unwrap_err().kind(), ErrorKind::Locked);
}

/// As `what_was_deleted_makes_room_in_the_snapshot_table`.
#[test]
fn what_was_deleted_makes_room_for_an_encrypted_volume() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("plain", EXTENT).unwrap();
    let snapshot = |number: usize| {
        put(&store.volume("plain").unwrap(), number as u8, 0, 1);
        store.create_snapshot("plain", &number.to_string(), &SnapshotOptions::default())
    };
    let taken = (0..).take_while(|number| snapshot(*number).is_ok()).count();
    assert!(store.create_encrypted("v", EXTENT, &secret(1)).is_err());
    store.delete_snapshot("plain", "0").unwrap();
    store.create_encrypted("v", EXTENT, &secret(1)).unwrap();
    put(&store.volume("v").unwrap(), 99, 0, 1);
    shows(&store.volume("v").unwrap(), 99, 0, 1);
    let newest = format!("plain@{}", taken - 1);
    shows(&store.volume(&newest).unwrap(), taken as u8 - 1, 0, 1);
    assert_eq!(store.check().unwrap().findings, []);
}

/// All volumes of a family have one key: the slot of a clone has it, too.
#[test]
fn a_repair_finds_the_key_in_a_clone() {
    let disk = Arc::new(Mem::new(4 << 20));
    let wide = InitOptions { max_volumes: Some(16), max_snapshots: Some(32), ..options() };
    Store::init_on(&*disk, &wide, &FixedEnv::new(1)).unwrap();
    let store = open(&disk, 2, false).unwrap();
    fill(&store);
    // So many that the table has a second block.
    let per_block = BLOCK / 504;
    for number in 0..per_block {
        store.clone_volume("v", "one", &format!("c{number}")).unwrap();
    }
    let last = format!("c{}", per_block - 1);
    store.rekey(&last, &secret(1), &secret(9)).unwrap();
    store.close().unwrap();
    lose_first_block(&disk, "volumes");
    let env = FixedEnv::new(9);
    let repair = Store::plan_repair_on(&*disk, None, &env, false).unwrap();
    repair.carry_out(&*disk).unwrap();
    assert!(Store::check_on(&*disk).unwrap().is_clean());
    let store = open(&disk, 5, false).unwrap();
    let unlocked = store.volumes(false).into_iter().filter(|info| {
        info.name.starts_with("repaired")
            && [1, 9].iter().any(|byte| store.unlock(&info.name, &secret(*byte)).is_ok())
    });
    assert!(unlocked.count() >= 2);
    let shown = store.volumes(false).into_iter().any(|info| {
        let mut found = [0; 512];
        let read = store.volume(&info.name).unwrap().read_at(10 * 512, &mut found);
        info.name.starts_with("repaired") && read.is_ok() && found[..] == sectors(6, 10, 1)
    });
    assert!(shown, "what `v` held");
}

/// Both copies of the first block of a table are gone.
fn lose_first_block(disk: &Arc<Mem>, region: &str) {
    let text: serde_json::Value =
        serde_json::from_str(&dump(&open(disk, 3, true).unwrap())).unwrap();
    let regions = text["regions"].as_array().unwrap();
    let named = |at: &&serde_json::Value| at["name"].as_str().unwrap().starts_with(&region[..6]);
    let found = regions.iter().find(named).unwrap();
    let [offset, length] = ["offset", "length"].map(|what| found[what].as_u64().unwrap());
    [offset, offset + length / 2].iter().for_each(|at| disk.put(*at, &[0x55; BLOCK]));
    assert!(open(disk, 4, false).is_err());
}
