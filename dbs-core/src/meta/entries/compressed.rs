//! Extents whose blocks are compressed: what is known of them beside their rows, whose bits say [`COMPRESSED`]. So whoever
//! asks for the state of a block in a hurry finds it to be on the device alone, and takes the long way.

use super::states::COMPRESSED;
use super::{Away, Entries};
use crate::format::record::FillState;
use crate::meta::ids::IdMap;

/// How the blocks of a compressed extent are known, and how many the device holds for them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Compressed {
    pub bits: u32,
    pub stored: u16,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct AllCompressed {
    by_id: IdMap<Compressed>,
    /// Blocks of data in them.
    pub data: u64,
    /// Blocks that they are stored in.
    stored: u64,
}

impl AllCompressed {
    #[inline]
    pub fn bits(&self, id: u32) -> u32 {
        self.by_id[&id].bits
    }

    pub fn set_bits(&mut self, id: u32, bits: u32) {
        if let Some(found) = self.by_id.get_mut(&id) {
            found.bits = bits;
        }
    }

    pub fn stored(&self, id: u32) -> Option<u16> {
        self.by_id.get(&id).map(|found| found.stored)
    }

    pub fn insert(&mut self, id: u32, bits: u32, stored: u16) {
        self.by_id.insert(id, Compressed { bits, stored });
        self.stored += u64::from(stored);
    }

    /// Forgets one; the bits it had.
    pub fn remove(&mut self, id: u32) -> Option<u32> {
        let Compressed { bits, stored } = self.by_id.remove(&id)?;
        self.stored -= u64::from(stored);
        Some(bits)
    }
}

impl Entries {
    /// Whether the blocks of a data extent are compressed.
    #[inline]
    pub fn is_compressed(&self, id: u32) -> bool {
        self.row_bits(id) == COMPRESSED
    }

    /// Blocks that a compressed extent is stored in; none if it is not compressed.
    pub fn stored_blocks(&self, id: u32) -> Option<u16> {
        self.compressed.stored(id)
    }

    /// Whether any extent is compressed.
    #[inline]
    pub fn any_compressed(&self) -> bool {
        !self.compressed.by_id.is_empty()
    }

    /// The blocks of data in compressed extents, and the blocks that they are stored in.
    pub fn compressed_counts(&self) -> (u64, u64) {
        (self.compressed.data, self.compressed.stored)
    }

    /// The blocks of a data extent, known as they are, are compressed from now on.
    pub fn set_compressed(&mut self, id: u32, stored: u16) {
        let bits = self.row_bits(id);
        debug_assert!(bits != COMPRESSED, "it is compressed");
        self.compressed.insert(id, bits, stored);
        self.compressed.data += u64::from(self.states.data_blocks(bits));
        self.data.set_bits(id as usize, COMPRESSED);
    }

    /// How the blocks of an entry are known, compressed or not.
    #[inline]
    pub(super) fn bits(&self, id: u32) -> u32 {
        match self.row_bits(id) {
            COMPRESSED => self.compressed.bits(id),
            bits => bits,
        }
    }

    pub(super) fn put_bits(&mut self, id: u32, bits: u32) {
        if self.is_compressed(id) {
            self.compressed.set_bits(id, bits);
        } else {
            let (rows, index) = self.place_mut(id);
            rows.set_bits(index, bits);
        }
    }

    /// As [`Entries::state`], of a compressed extent.
    ///
    /// # Errors
    /// [`Away`].
    #[cold]
    pub fn state_in_compressed(&self, id: u32, block: u32) -> Result<FillState, Away> {
        self.states.state(self.bits(id), block).ok_or(Away(id))
    }

    /// Whether the bitmaps of an entry are in memory, and what becomes data can be written to its place.
    ///
    /// # Errors
    /// [`Away`], also if it is compressed.
    #[inline]
    pub fn need_to_write(&self, id: u32) -> Result<(), Away> {
        if super::is_away(self.row_bits(id)) { Err(Away(id)) } else { Ok(()) }
    }
}
