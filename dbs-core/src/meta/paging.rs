//! Which bitmaps of extents are away: on the device alone. They go and come by metadata blocks, as far as the
//! memory that the user gives them is short. Owners, volume extents and counts of blocks stay.
//!
//! Bitmaps may go when the device has them: their block is not dirty and not being written back, so its newest
//! copy is durable, and its sequence is known ([`Held::lsn`]). What comes back must be of that sequence.
//! A step that needs bitmaps that are away changes nothing and stops ([`Stop::Away`](super::Stop)); what a
//! step has brought stays until it is over, and bitmaps that a write is about to change are pinned.
//!
//! Nothing goes unless the memory has a bound.

use super::Meta;
use super::entries::Entries;
use crate::error::{Error, Result};
use crate::format::{RegionKind, entry};
use crate::info::LookupInfo;
use crate::sabotage::{self, Bug};
use crate::units::SnapshotId;
use std::collections::BTreeSet;
use std::ops::Range;

/// Blocks that are looked at in vain under one hold of the lock, for some that may go.
const LOOKS: u32 = 256;
/// Entries that are looked at for those that a step needs next.
const AHEAD: usize = 1024;
/// Blocks that are passed by meanwhile, as they are away.
const PASSES: u32 = 8192;

/// Metadata blocks of extents, as far as their bitmaps are concerned.
#[derive(Debug)]
pub struct Paging {
    held: Vec<Held>,
    /// Extents of a metadata block.
    items: u32,
    /// Where the search for some that may go continues.
    hand: u32,
    /// Bytes of memory for bitmaps and for what look-ups have found; none is no bound.
    capacity: Option<usize>,
    /// Bytes of records that writes may add which were planned, unpinned, while there was no bound.
    unpinned: usize,
    /// Blocks that came back.
    came: u64,
    /// Blocks that could not be brought the last time, as they are damaged.
    damaged: BTreeSet<u32>,
}

/// A metadata block.
#[derive(Debug, Clone, Copy, Default)]
pub struct Held {
    /// Group that its copies on the device include, when it is clean.
    lsn: u64,
    /// Who needs its bitmaps in memory.
    pins: u32,
    /// Bitmaps of it went. Those of extents that were freed since need not come back.
    is_away: bool,
}

impl Held {
    /// A block that was loaded as of a group.
    pub fn new(lsn: u64, is_away: bool) -> Self {
        Self { lsn, pins: 0, is_away }
    }
}

impl Paging {
    /// Of blocks as they were loaded, of so many extents each.
    pub fn new(held: Vec<Held>, items: u32) -> Self {
        let (capacity, damaged) = (None, BTreeSet::new());
        Self { held, items, hand: 0, capacity, unpinned: 0, came: 0, damaged }
    }

    #[inline]
    fn get_mut(&mut self, block: u32) -> &mut Held {
        let block = block as usize;
        if self.held.len() <= block {
            self.grow(block);
        }
        &mut self.held[block]
    }

    #[cold]
    fn grow(&mut self, block: usize) {
        self.held.resize(block + 1, Held::default());
    }

    fn extents_of(&self, block: u32) -> Range<u32> {
        block * self.items..(block + 1) * self.items
    }

    /// Whether bitmaps of a metadata block are away.
    pub fn is_away(&self, entries: &Entries, key: (RegionKind, u32)) -> bool {
        key.0 == RegionKind::Extents && self.expected(entries, key.1).is_some()
    }

    /// The group that a block on the device must include, if bitmaps of it are away.
    fn expected(&self, entries: &Entries, block: u32) -> Option<u64> {
        let held = self.held.get(block as usize).filter(|held| held.is_away)?;
        entries.any_away(self.extents_of(block)).then_some(held.lsn)
    }
}

impl Meta {
    /// Bitmaps, and what look-ups have found, may take so many bytes; how often [`Meta::shrink_bitmaps`] is to be
    /// called for that.
    pub fn set_metadata_memory(&mut self, bytes: u64) -> u32 {
        if !self.is_paging() {
            self.paging.unpinned = self.log.expected_records();
        }
        self.paging.capacity = Some(usize::try_from(bytes).unwrap_or(usize::MAX));
        self.share_memory();
        // Twice around: once to bring together what is left of many.
        2 * self.marks[RegionKind::Extents.mark()].div_ceil(LOOKS)
    }

    /// What look-ups have found may take so many bytes, if it has no bound together with bitmaps.
    pub fn set_lookup_memory(&mut self, bytes: u64) {
        if self.paging.capacity.is_none() {
            self.views.set_capacity(bytes);
        }
    }

    /// The memory that bitmaps and look-ups take, and what that costs.
    pub fn memory_info(&self) -> LookupInfo {
        let lookups = self.views.info();
        LookupInfo {
            memory_max: self.paging.capacity.map_or(lookups.memory_max, |bytes| bytes as u64),
            bitmap_memory: self.entries.bitmap_memory() as u64,
            bitmap_reads: self.paging.came,
            ..lookups
        }
    }

    /// Half of the memory is for each; what one of them does not take the other may.
    fn share_memory(&mut self) {
        let Some(all) = self.paging.capacity else { return };
        let bitmaps = self.entries.bitmap_bytes();
        self.views.set_capacity((all - bitmaps.min(all / 2)) as u64);
    }

    fn bitmaps_max(&self) -> usize {
        let Some(all) = self.paging.capacity else { return usize::MAX };
        all - self.views.bytes().min(all / 2)
    }

    /// Whether bitmaps take more memory than they may: those of dirty blocks stay in memory.
    pub fn are_bitmaps_crowded(&self) -> bool {
        self.entries.bitmap_bytes() > self.bitmaps_max()
    }

    /// Whether they take twice as much as they may.
    pub fn are_bitmaps_swollen(&self) -> bool {
        self.entries.bitmap_bytes() / 2 > self.bitmaps_max()
    }

    /// The metadata block of a data extent.
    #[inline]
    pub fn block_of(&self, extent: u32) -> u32 {
        extent / self.paging.items
    }

    /// The group that a metadata block on the device must include, if bitmaps of it are away.
    pub fn expected(&self, block: u32) -> Option<u64> {
        self.paging.expected(&self.entries, block)
    }

    /// Whether bitmaps may leave memory.
    #[inline]
    pub(super) fn is_paging(&self) -> bool {
        self.paging.capacity.is_some()
    }

    /// A write that is not pinned has ended: once none is left bitmaps may leave.
    pub(super) fn unpinned_write_ended(&mut self) {
        self.paging.unpinned -= self.record_bytes();
    }

    /// The bitmaps of an extent stay in memory until [`Meta::unpin`].
    #[inline]
    pub(super) fn pin(&mut self, extent: u32) {
        if !sabotage::is(Bug::PlannedBitmapsGo) {
            self.pin_block(self.block_of(extent));
        }
    }

    /// Takes back a [`Meta::pin`].
    #[inline]
    pub(super) fn unpin(&mut self, extent: u32) {
        if !sabotage::is(Bug::PlannedBitmapsGo) {
            self.unpin_block(self.block_of(extent));
        }
    }

    /// As [`Meta::pin`], of all extents of a metadata block.
    #[inline]
    pub fn pin_block(&mut self, block: u32) {
        self.paging.get_mut(block).pins += 1;
    }

    /// Takes back a [`Meta::pin_block`].
    #[inline]
    pub fn unpin_block(&mut self, block: u32) {
        self.paging.get_mut(block).pins -= 1;
    }

    /// Blocks are on the device, both copies durable, as of these groups.
    pub(super) fn note_written_back(&mut self, blocks: &[((RegionKind, u32), u64)]) {
        for ((_, block), lsn) in blocks.iter().filter(|(key, _)| key.0 == RegionKind::Extents) {
            let held = self.paging.get_mut(*block);
            (held.lsn, held.is_away) = (*lsn, false);
        }
    }

    /// Lets bitmaps of some blocks go, if they take more memory than they may. Where there are few in the memory that
    /// they take, they come together first: else all would have to go to give it back.
    pub fn shrink_bitmaps(&mut self) {
        if !self.is_paging() {
            return;
        }
        self.share_memory();
        let blocks = self.marks[RegionKind::Extents.mark()];
        let (mut looks, mut passes) = (LOOKS.min(blocks), PASSES.min(blocks));
        while looks > 0 && passes > 0 && self.are_bitmaps_crowded() {
            let block = self.paging.hand % blocks;
            self.paging.hand = (block + 1) % blocks;
            if self.paging.get_mut(block).is_away {
                passes -= 1;
                continue;
            }
            looks -= 1;
            let extents = self.paging.extents_of(block);
            if self.entries.are_bitmaps_sparse() {
                self.entries.pack_bitmaps(extents);
            } else if self.may_go(block) && self.entries.let_go(extents) {
                self.paging.get_mut(block).is_away = true;
            }
        }
    }

    /// Whether the device has the bitmaps of a block, and nobody needs them in memory.
    fn may_go(&mut self, block: u32) -> bool {
        if self.paging.get_mut(block).pins > 0 || self.paging.unpinned > 0 {
            return false;
        }
        let is_clean = self.log.is_clean((RegionKind::Extents, block));
        let is_logged = |extent| !self.unlogged.contains_key(&extent);
        (is_clean || sabotage::is(Bug::DirtyBitmapsGo))
            && (self.unlogged.is_empty() || self.paging.extents_of(block).all(is_logged))
    }

    /// Takes the bitmaps of a block back that are away, from its payload on the device.
    ///
    /// # Errors
    /// `Corrupt` if they are not those that went.
    pub fn take_back(&mut self, block: u32, payload: &[u8]) -> Result<()> {
        let bytes = self.geometry.entry_bytes();
        for (item, extent) in (0..).zip(self.paging.extents_of(block)) {
            let found = entry::get(payload, item, bytes);
            let is_same = found.is_some_and(|found| self.entries.take_back(extent, &found));
            if !is_same {
                let text = format!(
                    "extent status {extent}: the device holds something else than what was \
                     written there; `dbs check` lists all damage"
                );
                return Err(Error::corrupt(text));
            }
        }
        self.paging.get_mut(block).is_away = false;
        self.paging.came += 1;
        self.log.unpark((RegionKind::Extents, block));
        if self.paging.damaged.remove(&block) {
            self.end_put_off();
        }
        Ok(())
    }

    /// A block could not be brought, as it is damaged.
    pub fn note_damaged(&mut self, block: u32) {
        self.paging.damaged.insert(block);
    }

    /// Whether something waits until metadata that is damaged can be read.
    pub fn waits_for_damaged(&self) -> bool {
        self.snapshots_put_off() > 0 || self.log.parked().next().is_some()
    }

    /// The metadata block of an extent whose bitmaps are away, and up to `most` in all, with those that a look
    /// through the layers below needs next if it gets there.
    pub fn away_below(&self, extent: u32, most: usize) -> Vec<u32> {
        let mut blocks = vec![self.block_of(extent)];
        let Some((owner, logical)) = self.entries.owner(extent) else { return blocks };
        for at in self.chain(SnapshotId(owner)) {
            let layer = &self.snapshot(at).layer;
            let entry = layer.get(logical).filter(|entry| self.entries.need(*entry).is_err());
            if let Some(block) = entry.map(|entry| self.block_of(entry))
                && !blocks.contains(&block)
            {
                blocks.push(block);
            }
            if blocks.len() >= most || layer.in_run(logical) || layer.in_lost(logical) {
                break;
            }
        }
        blocks
    }

    /// The metadata blocks, `most` at most, of the next entries of the same layer whose bitmaps are away, as far as so
    /// many volume extents.
    pub fn away_ahead(&self, extent: u32, extents: u32, most: usize) -> BTreeSet<u32> {
        let Some((owner, logical)) = self.entries.owner(extent) else { return BTreeSet::new() };
        let entries = self.snapshot(SnapshotId(owner)).layer.iter_from(logical);
        let near = entries.take_while(|(at, _)| at - logical < extents).take(AHEAD);
        let away = near.filter(|(_, entry)| self.entries.need(*entry).is_err());
        let mut blocks = BTreeSet::new();
        for (_, entry) in away {
            if blocks.len() < most {
                blocks.insert(self.block_of(entry));
            }
        }
        blocks
    }

    /// Of a metadata block this copy alone is good: when it is written back, the other one is written first. That is
    /// next, unless it can be put off: where a device cannot read, it may fail to write as well.
    pub fn heal_block(&mut self, block: u32, good: u32, now: bool) {
        let key = (RegionKind::Extents, block);
        if now {
            self.log.mark_dirty(key);
        }
        self.log.trust_copy(key, good);
    }

    /// A dirty block cannot be brought, and not be written back therefore.
    pub fn park(&mut self, block: u32) {
        if self.expected(block).is_some() {
            self.log.park((RegionKind::Extents, block));
        }
    }

    /// Blocks that [`Meta::park`] was called for, and of which bitmaps are still away.
    pub fn parked(&mut self) -> Vec<u32> {
        let all: Vec<_> = self.log.parked().collect();
        let (parked, here): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|key| self.paging.is_away(&self.entries, *key));
        here.into_iter().for_each(|key| self.log.unpark(key));
        parked.into_iter().map(|key| key.1).collect()
    }

    /// Makes sure that all that is dirty can be written back, so that the journal is not needed any more.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn check_none_parked(&self) -> Result<()> {
        let Some((region, index)) = self.log.parked().next() else { return Ok(()) };
        let text = format!(
            "{} {index} cannot be read, and what has changed there is in the journal alone; `dbs check` lists \
             all damage",
            region.name()
        );
        Err(Error::corrupt(text))
    }

    /// Of the dirty blocks that are written back next, `most` at most, those whose bitmaps are away, in the order
    /// of the device.
    pub fn dirty_away(&self, most: usize) -> Vec<u32> {
        if !self.is_paging() {
            return Vec::new();
        }
        let dirty = self.log.dirty_first(most);
        let mut away: Vec<_> =
            dirty.filter(|key| self.paging.is_away(&self.entries, *key)).map(|key| key.1).collect();
        away.sort_unstable();
        away
    }
}
