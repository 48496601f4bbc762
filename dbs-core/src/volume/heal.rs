//! Damaged blocks written again from a copy that somebody else has kept.

use super::{Request, Volume, is_whole, outside};
use crate::error::{Error, Result};
use crate::meta::locks::Space;
use crate::meta::pieces::{Far, ReadPiece};
use crate::units::BLOCK_BYTES;

impl Volume {
    /// Writes blocks again that are not what was written, or that the device cannot read, from `copy`,
    /// what the range should hold: so many bytes had to be. Only a block whose checksum the copy has is
    /// written, where it lies, be it the head's or a snapshot's: no content changes, and all who read
    /// the block read it right. What is well is left alone, whatever the copy says of it. Where no
    /// checksum is known, as in a store without them, only a block that cannot be read is written, and
    /// the caller is believed.
    ///
    /// # Errors
    /// `Invalid` outside the volume or not of whole blocks; `Damaged` if a block stays so: its checksum
    /// is not the copy's, or not known any more, or the storage does not keep what is written; `Io`,
    /// `ReadOnly`, `Poisoned`. Blocks before it are healed then.
    pub fn heal(&self, offset: u64, copy: &[u8]) -> Result<u64> {
        let (length, size) = (copy.len() as u64, self.size());
        if !is_whole(offset) || !is_whole(length) {
            return Err(Error::invalid(format!("{length} bytes at {offset} are no whole blocks")));
        }
        // The last block of a volume is whole on the device.
        let end = size.next_multiple_of(BLOCK_BYTES);
        if offset.checked_add(length).is_none_or(|range_end| range_end > end) {
            return Err(outside(offset, length, size, self.spec()));
        }
        let mut healed = 0;
        for (block, at) in copy.chunks_exact(BLOCK_BYTES as usize).zip(0_u64..) {
            let at = offset + at * BLOCK_BYTES;
            let done = self.heal_block(at, block).map_err(|error| {
                error.context(format!("healing byte {at} of `{}` failed", self.spec()))
            })?;
            healed += if done { BLOCK_BYTES } else { 0 };
        }
        Ok(healed)
    }

    /// Heals the block at `offset`; whether it had to be.
    fn heal_block(&self, offset: u64, copy: &[u8]) -> Result<bool> {
        let block = offset / BLOCK_BYTES;
        let encrypted = self.encrypt(offset, copy)?;
        let copy = encrypted.as_deref().unwrap_or(copy);
        let mut held = Request::new();
        let without_sums = !self.store().has_sums;
        if without_sums {
            // Nothing else keeps writes away from the block.
            self.wait_hold(block..block + 1, true, &mut held);
        }
        // Nor those to layers of a volume that is being rebuilt.
        let _layers = without_sums.then(|| {
            let space = Space::Snapshots(self.handle.volume);
            self.store().hold_in(space, block..block + 1, true)
        });
        let mut pieces = Vec::new();
        // As a read: as long as it runs nobody else is given the block.
        let _fenced = self.store().look(|meta| {
            let source = self.source(meta);
            meta.plan_read(source, block..block + 1, &mut pieces)?;
            Ok(self.store().fence(meta))
        })?;
        let healed = match pieces.first() {
            Some(ReadPiece { address: Some(address), .. }) => {
                self.store().heal_block(*address, copy)
            }
            Some(ReadPiece { far: Some(Far::Compressed { .. }), .. }) => {
                Err(Error::damaged("it is compressed, and what is compressed is not healed"))
            }
            _ => Ok(false),
        };
        held.cancel();
        healed
    }
}
