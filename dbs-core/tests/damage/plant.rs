//! Changing fields of a store on the device, with checksums that are right, so that only what the
//! field means can tell.

use crate::common::{BLOCK, Mem, SIZE};
use dbs_core::format::crc::crc32c;
use dbs_core::format::{BlockHeader, BlockKind, Record, SnapshotSlot, VolumeSlot, block, journal};
use dbs_core::format::{slots, superblock};
use dbs_core::io::Storage;
use serde_json::Value;
use zerocopy::FromBytes;

/// Regions as the dump lists them.
pub const VOLUMES: usize = 0;
pub const SNAPSHOTS: usize = 1;
pub const LABELS: usize = 2;
pub const JOURNAL: usize = 3;
pub const SPARES: usize = 4;
pub const EXTENTS: usize = 5;

/// Bytes of an entry of extents of 64 KiB.
pub const ENTRY: usize = 20;
/// Where the superblock copies are.
pub const COPIES: [u64; 3] = [0, BLOCK as u64, SIZE - BLOCK as u64];
/// Ids of spare entries begin here.
const SPARE_BASE: u64 = 1 << 30;

/// A store to be damaged.
pub struct Plant<'a> {
    pub disk: &'a Mem,
    /// Its dump before.
    pub dump: &'a Value,
}

impl Plant<'_> {
    pub fn get(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.disk.read_at(at, &mut bytes).unwrap();
        bytes
    }

    pub fn uuid(&self) -> [u8; 16] {
        self.get(16, 16).try_into().unwrap()
    }

    pub fn sequence(&self) -> u64 {
        self.dump["sequence"].as_u64().unwrap()
    }

    /// Offset and length of a region.
    pub fn region(&self, region: usize) -> (u64, u64) {
        let region = &self.dump["regions"][region];
        (region["offset"].as_u64().unwrap(), region["length"].as_u64().unwrap())
    }

    /// Where the first page of checksums is.
    pub fn page(&self) -> u64 {
        self.start_of("checksums")
    }

    /// Where the region of this name begins.
    pub fn start_of(&self, region: &str) -> u64 {
        let regions = self.dump["regions"].as_array().unwrap();
        regions.iter().find(|r| r["name"] == region).unwrap()["offset"].as_u64().unwrap()
    }

    /// Changes superblock copies and makes their checksums right.
    pub fn superblock(&self, copies: &[u64], edit: impl Fn(&mut [u8])) {
        for at in copies {
            let mut bytes = self.get(*at, BLOCK);
            edit(&mut bytes);
            bytes[12..16].fill(0);
            let crc = crc32c(&bytes);
            bytes[12..16].copy_from_slice(&crc.to_le_bytes());
            self.disk.put(*at, &bytes);
        }
    }

    /// Sets a field of all superblock copies.
    pub fn field(&self, at: usize, bytes: &[u8]) {
        assert!(at < size_of::<superblock::SuperblockBytes>());
        self.superblock(&COPIES, |block| block[at..at + bytes.len()].copy_from_slice(bytes));
    }

    /// Where a copy of a metadata block is.
    pub fn address(&self, region: usize, block: u64, copy: u64) -> u64 {
        let (offset, length) = self.region(region);
        offset + copy * length / 2 + block * BLOCK as u64
    }

    /// Breaks the checksum of a copy.
    pub fn rot(&self, region: usize, block: u64, copy: u64) {
        self.disk.flip(self.address(region, block, copy) + 777, 0x10);
    }

    pub fn rot_both(&self, region: usize, block: u64) {
        (0..2).for_each(|copy| self.rot(region, block, copy));
    }

    /// Changes the payload of both copies, and how new they are.
    pub fn seal(&self, region: usize, block: u64, newer: i64, edit: impl Fn(&mut [u8])) {
        (0..2).for_each(|copy| self.seal_copy(region, block, copy, newer, &edit));
    }

    pub fn seal_copy(
        &self,
        region: usize,
        block: u64,
        copy: u64,
        newer: i64,
        edit: impl Fn(&mut [u8]),
    ) {
        let at = self.address(region, block, copy);
        let mut bytes = self.get(at, BLOCK);
        let lsn = BlockHeader::read_from_prefix(&bytes).unwrap().0.lsn.get();
        edit(&mut bytes[block::HEADER_BYTES..]);
        let lsn = lsn.checked_add_signed(newer).unwrap();
        block::seal(&mut bytes, kind(region), &self.uuid(), at, lsn, [0; 24]);
        self.disk.put(at, &bytes);
    }

    /// Slot index of a volume.
    pub fn volume_slot(&self, name: &str) -> u64 {
        let volumes = self.dump["volumes"].as_array().unwrap();
        volumes.iter().find(|v| v["name"] == name).unwrap()["id"].as_u64().unwrap() - 1
    }

    /// Slot index of a snapshot (`volume@snapshot`), a head (`volume`) or a deleted one (nothing).
    pub fn snapshot_slot(&self, spec: &str) -> u64 {
        let snapshots = self.dump["snapshots"].as_array().unwrap();
        let found = match spec.split_once('@') {
            None if spec.is_empty() => {
                snapshots.iter().find(|s| s["flags"].as_u64().unwrap() & 8 != 0)
            }
            None => {
                let volume = &self.dump["volumes"].as_array().unwrap()[..];
                let volume = volume.iter().find(|v| v["name"] == spec).unwrap();
                snapshots.iter().find(|s| s["id"] == volume["head"])
            }
            Some((volume, name)) => {
                let volume = self.volume_slot(volume) + 1;
                snapshots.iter().find(|s| s["name"] == name && s["volume"] == volume)
            }
        };
        found.unwrap()["id"].as_u64().unwrap() - 1
    }

    pub fn volume(&self, name: &str, edit: impl Fn(&mut VolumeSlot)) -> Option<u64> {
        self.volume_at(self.volume_slot(name), edit)
    }

    pub fn volume_at(&self, slot: u64, edit: impl Fn(&mut VolumeSlot)) -> Option<u64> {
        self.seal(VOLUMES, slot / 8, 0, |payload| {
            let mut value = slots::get(payload, (slot % 8) as u32).unwrap();
            edit(&mut value);
            slots::put(payload, (slot % 8) as u32, &value);
        });
        Some(slot)
    }

    pub fn snapshot(&self, spec: &str, edit: impl Fn(&mut SnapshotSlot)) -> Option<u64> {
        let slot = self.snapshot_slot(spec);
        self.seal(SNAPSHOTS, slot / 8, 0, |payload| {
            let mut value = slots::get(payload, (slot % 8) as u32).unwrap();
            edit(&mut value);
            slots::put(payload, (slot % 8) as u32, &value);
        });
        Some(slot)
    }

    /// Changes the bytes of an extent or spare entry.
    pub fn entry(&self, region: usize, index: u64, edit: impl Fn(&mut [u8])) -> Option<u64> {
        let items = (BLOCK - block::HEADER_BYTES) as u64 / ENTRY as u64;
        self.seal(region, index / items, 0, |payload| {
            let at = (index % items) as usize * ENTRY;
            edit(&mut payload[at..at + ENTRY]);
        });
        Some(index)
    }

    /// The data entries of a snapshot, head or deleted one.
    pub fn data_of(&self, spec: &str) -> Vec<u64> {
        let owner = self.snapshot_slot(spec) + 1;
        self.entries(|e| e["snapshot"] == owner && e["entry"].as_u64().unwrap() < SPARE_BASE)
    }

    /// Spare entries that are zero runs, or zero-only layers; indexes in their region.
    pub fn spares(&self, runs: bool) -> Vec<u64> {
        let spare =
            |e: &Value| e["entry"].as_u64().unwrap() >= SPARE_BASE && (e["zero_run"] != 0) == runs;
        self.entries(spare).into_iter().map(|id| id - SPARE_BASE).collect()
    }

    fn entries(&self, wanted: impl Fn(&Value) -> bool) -> Vec<u64> {
        let all = self.dump["entries"].as_array().unwrap().iter();
        all.filter(|e| wanted(e)).map(|e| e["entry"].as_u64().unwrap()).collect()
    }

    /// Entries of a region that nothing uses, of the first `count`.
    pub fn free(&self, region: usize, count: u64) -> Vec<u64> {
        let base = if region == SPARES { SPARE_BASE } else { 0 };
        let used = self.entries(|_| true);
        (0..count).filter(|index| !used.contains(&(base + index))).collect()
    }

    /// Another group at the start of the ring, `after` the last one.
    pub fn group(&self, after: u64, payload: &[u8]) {
        let at = self.region(JOURNAL).0;
        self.disk.put(at, &journal::encode(payload, self.sequence() + after, 1, &self.uuid(), at));
    }

    /// Another group behind the last one, of a header and these records.
    pub fn records(&self, records: &[Record<'_>]) {
        self.group(1, &self.payload(self.sequence(), records));
    }

    pub fn payload(&self, checkpoint: u64, records: &[Record<'_>]) -> Vec<u8> {
        let marks = self.dump["marks"].as_array().unwrap().iter();
        let marks: Vec<u32> = marks.map(|mark| mark.as_u64().unwrap() as u32).collect();
        let marks = marks.try_into().unwrap();
        let head = Record::Checkpoint { sequence: checkpoint, marks, boot: [0; 16], tail: false };
        let mut payload = Vec::new();
        head.encode(&mut payload);
        records.iter().for_each(|record| record.encode(&mut payload));
        payload
    }

    /// What is in the ring.
    pub fn scan(&self) -> journal::Scan {
        let (at, length) = self.region(JOURNAL);
        journal::scan(&self.get(at, length as usize), &self.uuid(), at)
    }

    /// Where a group lies, and its blocks.
    pub fn group_at(&self, sequence: u64) -> (u64, u64) {
        let scan = self.scan();
        let group = &scan.groups[&sequence];
        let at = self.region(JOURNAL).0 + u64::from(group.position) * BLOCK as u64;
        (at, u64::from(group.blocks))
    }
}

/// A name field.
pub fn name(text: &[u8]) -> ([u8; 256], zerocopy::byteorder::little_endian::U16) {
    let mut field = [0; 256];
    field[..text.len()].copy_from_slice(text);
    (field, (text.len() as u16).into())
}

/// Bytes of an entry.
pub fn entry(snapshot: u64, logical: u32, run: u32, data: u16, zero: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [snapshot as u32, logical, run, 0] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(&data.to_le_bytes());
    bytes.extend_from_slice(&zero.to_le_bytes());
    bytes
}

fn kind(region: usize) -> BlockKind {
    match region {
        VOLUMES => BlockKind::Volumes,
        SNAPSHOTS => BlockKind::Snapshots,
        LABELS => BlockKind::Labels,
        SPARES => BlockKind::Spares,
        EXTENTS => BlockKind::Extents,
        _ => BlockKind::Journal,
    }
}
