//! Writing all metadata of a store anew, from a state that was proven. A crash in the middle leaves
//! a store that says so and that nobody opens.

use super::open::write_superblock;
use crate::error::{Error, Result};
use crate::format::geometry::{Geometry, LABEL_BLOCKS};
use crate::format::superblock::{INCOMPAT_REPAIRING, Superblock};
use crate::format::{RegionKind, block};
use crate::io::{Storage, WriteRequest};
use crate::meta::Meta;
use crate::units::BLOCK_BYTES;
use std::io;

/// How much higher the superblock's sequence is when all is written.
pub(super) const CHANGES: u64 = 2;
/// Metadata blocks written at once, of each copy.
const BLOCKS_AT_ONCE: u32 = 256;

/// Makes `storage` hold `meta`, and nothing else but data. `superblock` is the one to be there in
/// the end, but for its sequence, which is that of the newest copy there now.
///
/// 1. All superblock copies say that a repair runs: from here on nobody opens the store.
/// 2. All metadata blocks, as of `superblock.clean_sequence`, and the journal, empty. Flush.
/// 3. All superblock copies without that mark. With the first of them durable the store is whole.
///
/// # Errors
/// `Io`, `NoSpace`: what was there must be put back then.
pub(super) fn rewrite(storage: &dyn Storage, meta: &Meta, superblock: &Superblock) -> Result<()> {
    let failed = |error| Error::io(error, "writing the metadata anew failed");
    let running = Superblock {
        sequence: superblock.sequence + 1,
        incompat: superblock.incompat | INCOMPAT_REPAIRING,
        ..*superblock
    };
    write_superblock(storage, &running).map_err(failed)?;
    let blocks = Blocks { storage, meta, superblock };
    blocks.write().and_then(|()| storage.flush()).map_err(failed)?;
    let done = Superblock { sequence: superblock.sequence + CHANGES, ..*superblock };
    write_superblock(storage, &done).map_err(failed)
}

struct Blocks<'a> {
    storage: &'a dyn Storage,
    meta: &'a Meta,
    superblock: &'a Superblock,
}

impl Blocks<'_> {
    fn geometry(&self) -> &Geometry {
        &self.superblock.geometry
    }

    fn write(&self) -> io::Result<()> {
        let marks = self.meta.marks();
        let marked = RegionKind::MARKED.map(|region| (region, marks[region.mark()]));
        // Storage first: running out of it half-way helps nobody.
        for (region, count) in marked.into_iter().filter(|(_, count)| *count > 0) {
            for copy in 0..2 {
                let at = self.geometry().block_address(region, 0, copy);
                self.storage.allocate(at, u64::from(count) * BLOCK_BYTES)?;
            }
        }
        for (region, count) in marked {
            for first in (0..count).step_by(BLOCKS_AT_ONCE as usize) {
                let blocks: Vec<_> = (first..count.min(first + BLOCKS_AT_ONCE)).collect();
                self.write_blocks(region, &blocks)?;
            }
        }
        let labelled = self.meta.snapshots().filter(|(_, s)| !s.labels.is_empty());
        for (id, _) in labelled {
            let first = (id.0 - 1) * LABEL_BLOCKS;
            let blocks: Vec<_> = (first..first + LABEL_BLOCKS).collect();
            self.write_blocks(RegionKind::Labels, &blocks)?;
        }
        let journal = self.geometry().region(RegionKind::Journal);
        let zeros = vec![0; journal.length.min(1 << 20) as usize];
        for at in (0..journal.length).step_by(zeros.len()) {
            let part = (journal.length - at).min(zeros.len() as u64) as usize;
            self.storage.write_at(journal.offset + at, &zeros[..part])?;
        }
        Ok(())
    }

    /// Both copies of some blocks.
    fn write_blocks(&self, region: RegionKind, blocks: &[u32]) -> io::Result<()> {
        let mut copies = Vec::with_capacity(2 * blocks.len());
        for index in blocks {
            let mut bytes = vec![0; block::BLOCK];
            self.meta.image(region, *index, &mut bytes[block::HEADER_BYTES..]);
            for copy in 0..2 {
                let at = self.geometry().block_address(region, *index, copy);
                let (uuid, lsn) = (&self.superblock.uuid, self.superblock.clean_sequence);
                let mut sealed = bytes.clone();
                block::seal(&mut sealed, region.block_kind(), uuid, at, lsn, [0; 24]);
                copies.push((at, sealed));
            }
        }
        let writes: Vec<_> =
            copies.iter().map(|(offset, buf)| WriteRequest { offset: *offset, buf }).collect();
        self.storage.write_many(&writes)
    }
}
