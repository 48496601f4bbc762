//! Fills the extent status region of a store as if its data had been written, which on a device
//! of many TiB nobody waits for. Uses the public codecs of `dbs_core::format`, so what it writes
//! is what the engine would have written.

use crate::Outcome;
use crate::process::check_interrupted;
use dbs_core::format::entry::{EntryHeader, HEADER_BYTES};
use dbs_core::format::geometry::SUPERBLOCK_SECOND;
use dbs_core::format::slots::{self, SNAPSHOT_HEAD};
use dbs_core::format::{Geometry, RegionKind, SnapshotSlot, Superblock, block};
use dbs_core::io::buffer::AlignedBuf;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use zerocopy::IntoBytes;

/// Metadata blocks written at once.
const BATCH: u32 = 256;

/// What the entries look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filling {
    /// Extents lie in the volume in another order than on the device.
    pub scattered: bool,
    /// Every other block of an extent holds data, so that its bitmaps are needed.
    pub partial: bool,
}

/// What was filled.
#[derive(Debug, Clone, Copy)]
pub struct Filled {
    /// Extents now in use: all.
    pub extents: u32,
    /// Where the bytes lie that an open reads for them.
    pub offset: u64,
    /// Their length, both copies.
    pub length: u64,
}

/// Makes every data extent of the closed store at `path` belong to its only volume, in turn to
/// each of the volume's layers.
///
/// # Errors
/// If this is not such a store, or cannot be read or written.
pub fn fill(path: &Path, filling: Filling) -> Outcome<Filled> {
    let file = File::options().read(true).write(true).open(path)?;
    let mut superblock = vec![0; block::BLOCK];
    file.read_exact_at(&mut superblock, 0)?;
    let mut superblock = Superblock::decode(&superblock, 0)?;
    let owners = layers(&file, &superblock)?;
    let geometry = superblock.geometry;
    let extents = geometry.data_extents();
    let blocks = extents.div_ceil(geometry.items_per_block(RegionKind::Extents));
    let writer = Writer { superblock: &superblock, owners: &owners, filling };
    for first in (0..blocks).step_by(BATCH as usize) {
        let count = BATCH.min(blocks - first);
        for copy in 0..2 {
            let bytes: Vec<u8> =
                (first..first + count).flat_map(|index| writer.block(index, copy)).collect();
            file.write_all_at(&bytes, geometry.block_address(RegionKind::Extents, first, copy))?;
        }
    }
    superblock.sequence += 1;
    superblock.clean_marks[RegionKind::Extents.mark()] = blocks;
    for at in [SUPERBLOCK_SECOND, geometry.superblock_last(), 0] {
        file.write_all_at(&superblock.encode(at), at)?;
    }
    file.sync_all()?;
    let region = geometry.region(RegionKind::Extents);
    Ok(Filled { extents, offset: region.offset, length: 2 * u64::from(blocks) * BLOCK_BYTES })
}

/// Writes all of the data region of the closed store at `path`, as if its medium had been written
/// before it was formatted: formatting a file gives its space back.
///
/// # Errors
/// If it is no store, or cannot be written.
pub fn write_data(path: &Path) -> Outcome<()> {
    let mut options = File::options();
    let file = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut superblock = AlignedBuf::zeroed(block::BLOCK);
    file.read_exact_at(&mut superblock, 0)?;
    let region = Superblock::decode(&superblock, 0)?.geometry.region(RegionKind::Data);
    let bytes = AlignedBuf::copy_of(&[0xd5; 1 << 20]);
    let mut at = 0;
    while at < region.length {
        check_interrupted()?;
        let count = (region.length - at).min(1 << 20);
        file.write_all_at(&bytes[..count as usize], region.offset + at)?;
        at += count;
    }
    Ok(file.sync_all()?)
}

const BLOCK_BYTES: u64 = block::BLOCK as u64;

struct Writer<'a> {
    superblock: &'a Superblock,
    owners: &'a [u32],
    filling: Filling,
}

impl Writer<'_> {
    fn geometry(&self) -> &Geometry {
        &self.superblock.geometry
    }

    /// A sealed copy of a metadata block of the extent status region.
    fn block(&self, index: u32, copy: u32) -> Vec<u8> {
        let geometry = self.geometry();
        let mut bytes = vec![0; block::BLOCK];
        let items = geometry.items_per_block(RegionKind::Extents);
        let entries = bytes[block::HEADER_BYTES..].chunks_exact_mut(geometry.entry_bytes());
        let ids = index * items..geometry.data_extents().min((index + 1) * items);
        for (id, entry) in ids.zip(entries) {
            self.entry(id, entry);
        }
        let address = geometry.block_address(RegionKind::Extents, index, copy);
        let lsn = self.superblock.clean_sequence;
        let kind = RegionKind::Extents.block_kind();
        block::seal(&mut bytes, kind, &self.superblock.uuid, address, lsn, [0; 24]);
        bytes
    }

    fn entry(&self, id: u32, out: &mut [u8]) {
        let header = EntryHeader {
            snapshot: self.owners[id as usize % self.owners.len()].into(),
            logical: self.logical(id).into(),
            ..EntryHeader::default()
        };
        let (head, bitmaps) = out.split_at_mut(HEADER_BYTES);
        head.copy_from_slice(header.as_bytes());
        let half = bitmaps.len() / 2;
        bitmaps[..half].fill(if self.filling.partial { 0x55 } else { 0xff });
    }

    /// The volume extent that a data extent is: a permutation of them all.
    fn logical(&self, id: u32) -> u32 {
        if !self.filling.scattered {
            return id;
        }
        let extents = u64::from(self.geometry().data_extents());
        // Any multiplier without a common divisor permutes; this prime is larger than any divisor
        // of the number of extents it could share.
        (u64::from(id) * 2_654_435_761 % extents) as u32
    }
}

/// Ids of the layers of the only volume: its snapshots and its head.
fn layers(file: &File, superblock: &Superblock) -> Outcome<Vec<u32>> {
    let geometry = superblock.geometry;
    let kind = RegionKind::Snapshots;
    let mut ids = Vec::new();
    let mut heads = 0;
    for index in 0..superblock.clean_marks[kind.mark()] {
        let address = geometry.block_address(kind, index, 0);
        let mut bytes = vec![0; block::BLOCK];
        file.read_exact_at(&mut bytes, address)?;
        block::open(&bytes, kind.block_kind(), &superblock.uuid, address)
            .map_err(|fault| format!("snapshot table block {index}: {}", fault.text()))?;
        for item in 0..geometry.items_per_block(kind) {
            let slot = slots::get::<SnapshotSlot>(block::payload(&bytes), item);
            if let Some(slot) = slot.filter(|slot| slot.used == 1) {
                ids.push(index * geometry.items_per_block(kind) + item + 1);
                heads += u32::from(slot.flags.get() & SNAPSHOT_HEAD != 0);
            }
        }
    }
    if heads == 1 { Ok(ids) } else { Err(format!("one volume expected, not {heads}").into()) }
}
