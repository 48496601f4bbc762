//! Changes of a small store's bytes: as rot makes them, or under checksums that are made right again.

use crate::disk::{BLOCK, Disk};
use crate::input::Input;
use crate::sample::{End, Sample, contents};
use dbs_core::Store;
use dbs_core::format::block::{self, HEADER_BYTES};
use dbs_core::format::crc::crc32c;
use dbs_core::format::geometry::SUPERBLOCK_SECOND;
use dbs_core::format::{BlockKind, RegionKind};
use dbs_core::io::Storage;
use std::sync::Arc;

/// Changes that one input makes.
const CHANGES_MAX: usize = 8;

/// Where the re-sealed blocks are.
const TABLES: [(RegionKind, BlockKind); 5] = [
    (RegionKind::Volumes, BlockKind::Volumes),
    (RegionKind::Snapshots, BlockKind::Snapshots),
    (RegionKind::Labels, BlockKind::Labels),
    (RegionKind::Spares, BlockKind::Spares),
    (RegionKind::Extents, BlockKind::Extents),
];

/// Bits of the flags: how the sample ended, whether checksums are mended, whether data has checksums.
const KILLED: u8 = 1;
const MENDED: u8 = 2;
const SUMS: u8 = 8;

/// A sample with changes.
pub(crate) struct Hostile {
    pub sample: &'static Sample,
    pub disk: Arc<Disk>,
    /// Metadata checksums are right.
    pub mended: bool,
    /// Data has checksums.
    pub sums: bool,
    /// Data was changed, or checksums of it say something else.
    pub data: bool,
    /// Checksums of data are rotten: those are not known then, and rot of the data does not show.
    pages: bool,
}

impl Hostile {
    /// Reads how many changes there are (one byte), and makes them.
    pub fn new(flags: u8, input: &mut Input<'_>) -> Self {
        let sums = flags & SUMS != 0;
        let end = if flags & KILLED == 0 { End::Closed } else { End::Killed };
        let sample = Sample::of(end, sums);
        let mended = flags & MENDED != 0;
        let disk = Arc::new(sample.disk());
        let mut hostile = Self { sample, disk, mended, sums, data: false, pages: false };
        for _ in 0..usize::from(input.u8()).min(CHANGES_MAX) {
            if mended {
                hostile.mend(input);
            } else {
                // In a store that was killed nothing vouches for the data.
                hostile.damage(sums && end == End::Closed, input);
            }
        }
        hostile
    }

    /// Whether what is shown as right must be right.
    pub fn is_comparable(&self) -> bool {
        !(self.mended || self.data && self.pages)
    }

    /// What such a store shows is what the sample shows.
    pub fn assert_right(&self, store: &Store) {
        let (shown, known) = (contents(store), &self.sample.contents);
        let right = shown.iter().all(|(spec, seen)| known.get(spec) == Some(seen));
        assert!(right, "wrong data taken for right");
        assert!(self.data || shown.len() == known.len(), "what is good is not shown");
    }

    /// Changes metadata as rot, or a misdirected write, does; data as well where rot of it shows.
    fn damage(&mut self, data: bool, input: &mut Input<'_>) {
        let (sample, disk) = (self.sample, &*self.disk);
        let last = sample.geometry.superblock_last();
        let metadata = if data { last } else { sample.metadata_bytes() };
        let kind = input.u8();
        let at = input.below(metadata + BLOCK as u64);
        let at = if at < metadata { at } else { last + at - metadata };
        // No change is longer than this, but whole blocks.
        self.data |= at < last && at + 64 > sample.metadata_bytes();
        self.pages |=
            self.sums && at < sample.metadata_bytes() && at + 64 > sample.geometry.metadata_end();
        match kind % 4 {
            0 | 1 => {
                let mut byte = [0];
                let sector = at / 512 * 512;
                let mut old = [0; 512];
                disk.read_at(sector, &mut old).unwrap();
                byte[0] = old[(at - sector) as usize] ^ input.u8().max(1);
                disk.put(at, &byte);
            }
            2 => {
                let length = input.below(64) as usize;
                let bytes = input.bytes(length);
                let room = if at < metadata { metadata - at } else { BLOCK as u64 };
                disk.put(at, &bytes[..bytes.len().min(room as usize)]);
            }
            _ => {
                // Another block's content, or zeros.
                let from = input.below(metadata / BLOCK as u64) * BLOCK as u64;
                let mut block = [0; BLOCK];
                if input.flag() {
                    disk.read_at(from, &mut block).unwrap();
                }
                disk.put(at / BLOCK as u64 * BLOCK as u64, &block);
            }
        }
    }

    /// Changes metadata and makes the checksums right: what somebody malicious does.
    fn mend(&mut self, input: &mut Input<'_>) {
        let (sample, disk) = (self.sample, &*self.disk);
        let tables = TABLES.len() + 1 + usize::from(self.sums);
        let which = usize::from(input.u8()) % tables;
        if which == TABLES.len() {
            return superblock(sample, disk, input);
        }
        let Some((region, kind)) = TABLES.get(which) else {
            self.data = true;
            return page(sample, disk, input);
        };
        let index = input.below(u64::from(sample.geometry.needed_blocks(*region))) as u32;
        let at = input.below((BLOCK - HEADER_BYTES) as u64) as usize;
        let length = 1 + input.below(40) as usize;
        let bytes = input.bytes(length);
        let lsn = if input.flag() { sample.sequence } else { input.u64() };
        for copy in 0..2 {
            let address = sample.geometry.block_address(*region, index, copy);
            let mut block = [0; BLOCK];
            disk.read_at(address, &mut block).unwrap();
            let end = (HEADER_BYTES + at + bytes.len()).min(BLOCK);
            let start = HEADER_BYTES + at;
            block[start..end].copy_from_slice(&bytes[..end - start]);
            block::seal(&mut block, *kind, &sample.uuid, address, lsn, [0; 24]);
            disk.put(address, &block);
        }
    }
}

/// Other checksums of data, and whether they are to be believed.
fn page(sample: &Sample, disk: &Disk, input: &mut Input<'_>) {
    let pages = sample.geometry.needed_blocks(RegionKind::Sums);
    let address = sample.geometry.sums_address(input.below(u64::from(pages)) as u32);
    let at = HEADER_BYTES + input.below((BLOCK - HEADER_BYTES) as u64) as usize;
    let length = 1 + input.below(40) as usize;
    let bytes = input.bytes(length);
    let mut block = [0; BLOCK];
    disk.read_at(address, &mut block).unwrap();
    let end = (at + bytes.len()).min(BLOCK);
    block[at..end].copy_from_slice(&bytes[..end - at]);
    let mut extra = [0; 24];
    extra[0] = input.u8();
    block::seal(&mut block, BlockKind::Sums, &sample.uuid, address, 0, extra);
    disk.put(address, &block);
}

fn superblock(sample: &Sample, disk: &Disk, input: &mut Input<'_>) {
    // Magic, version, checksum, uuid stay: all else is to be proven.
    let at = 32 + input.below(368);
    let length = 1 + input.below(8) as usize;
    let bytes = input.bytes(length);
    for address in [0, SUPERBLOCK_SECOND, sample.geometry.superblock_last()] {
        let mut block = vec![0; BLOCK];
        disk.read_at(address, &mut block).unwrap();
        block[at as usize..][..bytes.len()].copy_from_slice(bytes);
        if !(40..48).contains(&at) {
            block[40..48].copy_from_slice(&address.to_le_bytes());
        }
        block[12..16].fill(0);
        let crc = crc32c(&block);
        block[12..16].copy_from_slice(&crc.to_le_bytes());
        disk.put(address, &block);
    }
}
