//! Opening within a bound of memory: bitmaps of extents stay on the device, but for those that the journal or
//! the tail changes.

use super::Loader;
use crate::format::record::Record;
use crate::format::{RegionKind, block, entry};
use crate::meta::entries::SPARE_BASE;
use crate::meta::paging::Held;
use std::collections::HashSet;

impl Loader {
    /// Bitmaps may take so many bytes of memory, and what the journal changes. Called before any block is read.
    pub fn bound_bitmaps(&mut self, bytes: u64) {
        self.bitmaps_max = usize::try_from(bytes).unwrap_or(usize::MAX);
        let payloads = self.groups.iter().map(|group| &group.3[..]);
        self.changed = changed(payloads, self.geometry.items_per_block(RegionKind::Extents));
    }

    /// Lets the bitmaps of a block go that was just read, if nothing changes it.
    pub(super) fn let_go(&mut self, block: u32) {
        let is_dirty = self.dirty.contains(&(RegionKind::Extents, block));
        let items = self.geometry.items_per_block(RegionKind::Extents);
        let extents = block * items..(block + 1) * items;
        if !is_dirty && !self.changed.contains(&block) && self.entries.let_go(extents) {
            self.away.insert(block);
        }
    }

    /// The blocks that a tail changes and whose bitmaps are away, for [`Loader::block_again`].
    pub fn changed_away(&self, batches: &[Vec<u8>]) -> Vec<u32> {
        let items = self.geometry.items_per_block(RegionKind::Extents);
        let all = changed(batches.iter().map(Vec::as_slice), items);
        all.into_iter().filter(|block| self.away.contains(block)).collect()
    }

    /// Takes the bitmaps of a block back.
    pub fn block_again(&mut self, index: u32, copies: [Option<&[u8]>; 2]) {
        let region = RegionKind::Extents;
        let known = self.lsns[region.mark()].get(index as usize).copied();
        let found = self.choose(region, index, copies).filter(|(lsn, _)| Some(*lsn) == known);
        let Some((_, bytes)) = found else { return self.lose_block(region, index, copies) };
        let (items, size) = (self.geometry.items_per_block(region), self.geometry.entry_bytes());
        for item in 0..items {
            let id = index * items + item;
            let found = entry::get(block::payload(bytes), item, size);
            if !found.is_some_and(|found| self.entries.take_back(id, &found)) {
                self.corrupt(region, Some(id), "it has changed while the store was opened");
            }
        }
        self.away.remove(&index);
    }

    /// Bytes of memory that bitmaps take.
    #[cfg(test)]
    pub fn bitmap_bytes(&self) -> usize {
        self.entries.bitmap_bytes()
    }

    /// What is known of the blocks' bitmaps.
    pub(super) fn held(&self) -> Vec<Held> {
        let lsns = self.lsns[RegionKind::Extents.mark()].iter().enumerate();
        lsns.map(|(block, lsn)| Held::new(*lsn, self.away.contains(&(block as u32)))).collect()
    }
}

/// The metadata blocks of extents, of so many items each, that records change.
fn changed<'a>(payloads: impl Iterator<Item = &'a [u8]>, items: u32) -> HashSet<u32> {
    let mut all = HashSet::new();
    for mut rest in payloads {
        while !rest.is_empty()
            && let Some(record) = Record::decode(&mut rest)
        {
            let (Record::Entry { entry, .. } | Record::Fill { entry, .. } | Record::Free { entry }) =
                record
            else {
                continue;
            };
            if entry < SPARE_BASE {
                all.insert(entry / items);
            }
        }
    }
    all
}
