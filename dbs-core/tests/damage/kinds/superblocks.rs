//! The superblock, one copy and all.

use super::{Kind, SUPERBLOCK, VOLUME, corrupt, error, note};
use crate::common::{BLOCK, SIZE};
use crate::plant::{COPIES, LABELS, VOLUMES};
use dbs_core::ErrorKind;
use dbs_core::io::Storage;

/// One copy of the superblock.
pub fn superblock_copies() -> Vec<Kind> {
    vec![
        note(SUPERBLOCK, "magic of copy 1", &["no magic", "another copy is good"], |p| {
            p.superblock(&COPIES[..1], |bytes| bytes[0] = b'X');
            Some(0)
        }),
        note(SUPERBLOCK, "version of copy 1", &["another copy is good"], |p| {
            p.superblock(&COPIES[..1], |bytes| bytes[8] = 9);
            Some(0)
        }),
        note(SUPERBLOCK, "checksum of copy 2", &["checksum", "another copy is good"], |p| {
            p.disk.flip(COPIES[1] + 300, 1);
            Some(1)
        }),
        note(SUPERBLOCK, "copy 3 overwritten with zeros", &["another copy is good"], |p| {
            p.disk.put(COPIES[2], &[0; BLOCK]);
            Some(SIZE / BLOCK as u64 - 1)
        }),
        note(SUPERBLOCK, "copy 1 written at copy 2", &["another copy is good"], |p| {
            p.disk.put(COPIES[1], &p.get(0, BLOCK));
            Some(1)
        }),
        note(SUPERBLOCK, "copy 3 of another store", &["of another store"], |p| {
            p.superblock(&COPIES[2..], |bytes| bytes[20] ^= 1);
            Some(SIZE / BLOCK as u64 - 1)
        }),
        note(SUPERBLOCK, "copy 2 stale", &["older than the others"], |p| {
            p.superblock(&COPIES[1..2], |bytes| bytes[32] -= 1);
            Some(1)
        }),
    ]
}

/// All copies of the superblock, each intact by itself.
pub fn superblocks() -> Vec<Kind> {
    vec![
        error(ErrorKind::Invalid, "all copies of the superblock gone", &["not a DBS store"], |p| {
            COPIES.iter().for_each(|at| p.disk.put(*at, &[0; BLOCK]));
            None
        }),
        error(ErrorKind::Unsupported, "unknown version", &["version"], |p| {
            p.field(8, &[0, 0, 9, 0]);
            None
        }),
        error(ErrorKind::Unsupported, "unknown incompatible feature", &["feature"], |p| {
            p.field(71, &[0x80]);
            None
        }),
        corrupt(SUPERBLOCK, "checksums of all copies", &["checksum"], |p| {
            COPIES.iter().for_each(|at| p.disk.flip(*at + 200, 4));
            None
        }),
        corrupt(SUPERBLOCK, "size beyond the device", &["truncated", "lost"], |p| {
            p.field(80, &(SIZE * 2).to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "size within the data", &["place of the data region"], |p| {
            p.field(80, &(SIZE - (256 << 10)).to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "size of no whole block", &["impossible store size"], |p| {
            p.field(80, &(SIZE - 512).to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "extent size no power of two", &["impossible extent size"], |p| {
            p.field(88, &(96u64 << 10).to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "block size", &["impossible block size"], |p| {
            p.field(96, &512u32.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "no volume slots", &["impossible table capacity"], |p| {
            p.field(100, &0u32.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "too many volume slots", &["place of the volume table"], |p| {
            p.field(100, &1000u32.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "too many snapshot slots", &["impossible table capacity"], |p| {
            p.field(104, &u32::MAX.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "too many spare entries", &["place of the spare entries"], |p| {
            p.field(108, &100_000u32.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "fewer extent entries than extents", &["place of the data"], |p| {
            p.field(112, &3u32.to_le_bytes());
            None
        }),
    ]
}

/// All copies: where regions are, sequences, and how much of the store is there.
pub fn geometries() -> Vec<Kind> {
    vec![
        corrupt(SUPERBLOCK, "regions that overlap", &["impossible place of the snapshot"], |p| {
            p.field(144 + 24 + 8, &p.region(VOLUMES).0.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "a region not at a block", &["impossible place of the labels"], |p| {
            p.field(144 + 48 + 8, &(p.region(LABELS).0 + 512).to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "a region behind the end", &["impossible place of the extent"], |p| {
            p.field(144 + 5 * 24 + 8, &(SIZE * 4).to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "journal too short", &["impossible place of the journal"], |p| {
            p.field(144 + 3 * 24 + 16, &4096u64.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "no data region", &["no room for data"], |p| {
            p.field(144 + 6 * 24 + 16, &0u64.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "region table out of order", &["out of order"], |p| {
            p.field(144, &2u32.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "impossible sequence", &["impossible sequence"], |p| {
            p.field(32, &u64::MAX.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "impossible clean sequence", &["impossible sequence"], |p| {
            p.field(120, &u64::MAX.to_le_bytes());
            None
        }),
        corrupt(VOLUME, "high-water mark behind the region", &["mark beyond the region"], |p| {
            p.field(128, &1000u32.to_le_bytes());
            None
        }),
        corrupt(SUPERBLOCK, "the file cut off", &["truncated", "is lost"], |p| {
            p.disk.set_size(SIZE - (300 << 10)).unwrap();
            None
        }),
        corrupt(SUPERBLOCK, "another byte of each copy", &["checksum"], |p| {
            COPIES.iter().zip([90, 100, 200]).for_each(|(at, byte)| p.disk.flip(at + byte, 4));
            None
        }),
        corrupt(SUPERBLOCK, "data in use cut off", &["truncated", "is lost"], |p| {
            let last = p.data_of("beta").into_iter().max().unwrap();
            p.disk.set_size(p.start_of("data") + (last << 16) + BLOCK as u64).unwrap();
            None
        }),
        error(ErrorKind::Invalid, "the file cut off at its beginning", &["only 8192 bytes"], |p| {
            p.disk.set_size(8192).unwrap();
            None
        }),
    ]
}
