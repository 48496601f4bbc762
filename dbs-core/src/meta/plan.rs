//! Reading and writing whole blocks: where they are, what to allocate, and what to record when
//! the data has been written.

use super::entries::{Away, SPARE_BASE};
use super::pieces::{ReadPiece, push_read};
use super::view::is_place;
use super::{Meta, Step, Stop};
use crate::error::{Error, Result};
use crate::format::RegionKind;
use crate::format::record::{FillState, Record};
use crate::sabotage::{self, Bug, at_once};
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::ops::Range;

/// Free extents that are kept while any extent is compressed. What is written to one, and what is merged with one, moves
/// to a free extent first, one expansion and one step of background work at a time, and gives one back with its commit:
/// so both go on when the store is full, as they do without compression.
const KEPT_FOR_MOVES: u32 = 2;

/// A part of a write: blocks of one data extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WritePiece {
    /// Byte offset on the device.
    pub address: u64,
    /// Data extent.
    pub entry: u32,
    /// Volume extent.
    pub logical: u32,
    /// Blocks in it.
    pub blocks: Range<u32>,
    /// The extent was allocated for this write.
    fresh: bool,
    /// Its end may make a record. Else all of it was data in an extent that is in a record, and stays so
    /// as long as its blocks are held.
    records: bool,
    /// The bitmaps of its extent are pinned: it was planned since memory has a bound.
    pinned: bool,
}

impl Meta {
    /// Finds the blocks of a range. The caller holds a fence number until it has read them.
    ///
    /// # Errors
    /// `Corrupt` if any of them is lost; [`Stop::Away`].
    pub fn plan_read(
        &mut self,
        from: SnapshotId,
        blocks: Range<u64>,
        out: &mut Vec<ReadPiece>,
    ) -> Step<()> {
        out.clear();
        for (logical, part) in split(blocks, self.blocks_per_extent()) {
            // One by one: looking up the next extent may forget this one, when memory is short.
            self.look_up(from, logical)?;
            let known = self.plan_extent(from, logical, part, out)?;
            assert!(known, "looked up before: zeros would be wrong");
        }
        Ok(())
    }

    /// As [`Meta::plan_read`], beside other requests; `false` if something has to be looked up or read first.
    ///
    /// # Errors
    /// `Corrupt`, as there.
    #[inline]
    pub fn plan_remembered(
        &self,
        from: SnapshotId,
        blocks: Range<u64>,
        out: &mut Vec<ReadPiece>,
    ) -> Result<bool> {
        out.clear();
        for (logical, part) in split(blocks, self.blocks_per_extent()) {
            match self.plan_extent(from, logical, part, out) {
                Ok(true) => {}
                Err(Stop::Error(error)) => return Err(error),
                Ok(false) | Err(_) => return Ok(false),
            }
        }
        Ok(true)
    }

    #[inline]
    fn plan_extent(
        &self,
        from: SnapshotId,
        logical: u32,
        part: Range<u32>,
        out: &mut Vec<ReadPiece>,
    ) -> Step<bool> {
        let Some(found) = self.remembered(from, logical) else { return Ok(false) };
        let mut block = part.start;
        while block < part.end {
            let source = found.source(self, block)?;
            let start = block;
            let uniform = part.end - start > 1 && found.is_uniform(self);
            block = if uniform { part.end } else { start + 1 };
            while block < part.end && found.source(self, block)? == source {
                block += 1;
            }
            let blocks = u64::from(block - start);
            let piece = match source {
                Some(source) if !is_place(source) => {
                    let far = self.far(source, start);
                    let far = Some(far.ok_or_else(|| self.is_lost(from, logical, start))?);
                    ReadPiece { address: None, far, blocks }
                }
                entry => {
                    let address = entry.map(|entry| self.address(entry, start));
                    ReadPiece { address, far: None, blocks }
                }
            };
            push_read(out, piece);
        }
        Ok(true)
    }

    /// What there is to say of a block that is lost.
    pub(super) fn is_lost(&self, id: SnapshotId, logical: u32, block: u32) -> Error {
        let snapshot = self.snapshot(id);
        let volume = self.volumes().find(|(volume, _)| *volume == snapshot.volume);
        let spec = match (volume, snapshot.name.as_str()) {
            (Some((_, volume)), "") => volume.name.clone(),
            (Some((_, volume)), name) => format!("{}@{name}", volume.name),
            (None, _) => "a deleted snapshot".to_owned(),
        };
        let block = u64::from(logical) * u64::from(self.blocks_per_extent()) + u64::from(block);
        Error::corrupt(format!(
            "`{spec}`: the content at byte {} is lost, as the repair of the store reported",
            block * BLOCK_BYTES
        ))
    }

    /// Refuses to change a layer that lost something: an entry there would say that its absent
    /// blocks are its parent's.
    ///
    /// # Errors
    /// `ReadOnly`.
    pub(crate) fn check_not_lost(&self, owner: SnapshotId) -> Result<()> {
        let snapshot = self.snapshot(owner);
        if snapshot.layer.lost.is_empty() {
            return Ok(());
        }
        let volume = self.volumes().find(|(volume, _)| *volume == snapshot.volume);
        Err(Error::read_only(format!(
            "`{}` has ranges that were lost before the store was repaired, and cannot be written; \
             take a snapshot first: then new writes are kept, and the lost ranges stay lost",
            volume.map_or("", |(_, volume)| volume.name.as_str())
        )))
    }

    /// Finds or allocates the place of every block of a write to a volume's head. On an error
    /// nothing has been allocated.
    ///
    /// # Errors
    /// [`Stop::Space`], [`Stop::Long`], [`Stop::Room`], [`Stop::Expand`].
    pub fn plan_write(
        &mut self,
        volume: VolumeId,
        blocks: Range<u64>,
        out: &mut Vec<WritePiece>,
    ) -> Step<()> {
        self.plan_write_to(self.volume(volume).head, blocks, out)
    }

    /// A compressed extent is to be expanded first.
    #[cold]
    pub(super) fn to_expand(&self, extent: u32) -> Stop {
        Stop::Expand { extent, owner: self.entries.owner(extent) }
    }

    /// What has to come before blocks of an entry become data.
    #[cold]
    fn not_ready(&self, Away(entry): Away) -> Stop {
        if self.entries.is_compressed(entry) { self.to_expand(entry) } else { Away(entry).into() }
    }

    /// As [`Meta::plan_write`], to the layer of a head or snapshot.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn plan_write_to(
        &mut self,
        owner: SnapshotId,
        blocks: Range<u64>,
        out: &mut Vec<WritePiece>,
    ) -> Step<()> {
        out.clear();
        self.check_log()?;
        self.check_not_lost(owner)?;
        for (logical, part) in split(blocks, self.blocks_per_extent()) {
            let found = match self.snapshot(owner).layer.get(logical) {
                Some(entry) if entry < SPARE_BASE => match self.is_recorded(entry, &part) {
                    true => Ok((entry, false, false)),
                    false => match self.entries.need_to_write(entry) {
                        Ok(()) => Ok((entry, false, true)),
                        Err(away) => Err(self.not_ready(away)),
                    },
                },
                _ => self.allocate(owner, logical).map(|entry| (entry, true, true)),
            };
            let (entry, fresh, records) = match found {
                Ok(found) => found,
                Err(stop) => {
                    let fresh = out.iter().filter(|piece| piece.fresh);
                    fresh.for_each(|piece| self.unallocate(owner, piece.logical));
                    return Err(stop);
                }
            };
            let (address, pinned) = (self.address(entry, part.start), false);
            out.push(WritePiece { address, entry, logical, blocks: part, fresh, records, pinned });
        }
        self.log.expect_records(self.expected_bytes(out));
        self.pin_pieces(out);
        Ok(())
    }

    /// Finds the places of a write to a volume's head that overwrites data and makes no record, beside
    /// other requests; `false` if it is none.
    #[inline]
    pub fn plan_overwrite(
        &self,
        volume: VolumeId,
        blocks: Range<u64>,
        out: &mut Vec<WritePiece>,
    ) -> bool {
        out.clear();
        let layer = &self.snapshot(self.volume(volume).head).layer;
        for (logical, part) in split(blocks, self.blocks_per_extent()) {
            let Some(entry) = layer.get(logical).filter(|entry| *entry < SPARE_BASE) else {
                return false;
            };
            if !self.is_recorded(entry, &part) {
                return false;
            }
            let address = self.address(entry, part.start);
            let (fresh, records, pinned) = (false, false, false);
            out.push(WritePiece { address, entry, logical, blocks: part, fresh, records, pinned });
        }
        layer.lost.is_empty()
    }

    /// The bitmaps that the end of a write may change stay in memory until then.
    #[inline]
    fn pin_pieces(&mut self, pieces: &mut [WritePiece]) {
        if self.is_paging() {
            for piece in pieces.iter_mut().filter(|piece| piece.records) {
                self.pin(piece.entry);
                piece.pinned = true;
            }
        }
    }

    /// Takes back a [`Meta::pin_pieces`].
    #[inline]
    fn unpin_pieces(&mut self, pieces: &[WritePiece]) {
        if self.is_paging() {
            for piece in pieces.iter().filter(|piece| piece.records) {
                if piece.pinned { self.unpin(piece.entry) } else { self.unpinned_write_ended() }
            }
        }
    }

    /// Whether all of these blocks are data in an entry that is in a record.
    #[inline]
    fn is_recorded(&self, entry: u32, blocks: &Range<u32>) -> bool {
        self.entries.all_data(entry, blocks) && !self.unlogged.contains_key(&entry)
    }

    /// Bytes of records that the pieces of a write may make.
    fn expected_bytes(&self, pieces: &[WritePiece]) -> usize {
        pieces.iter().filter(|piece| piece.records).count() * self.record_bytes()
    }

    /// Whether a write that was planned makes no record when it ends.
    #[inline]
    pub fn is_overwrite(&self, pieces: &[WritePiece]) -> bool {
        pieces.iter().all(|piece| !piece.records)
    }

    /// A write has ended that makes no record.
    #[inline]
    pub fn note_overwrite(&self, volume: VolumeId) {
        self.note_write(self.volume(volume).head);
    }

    /// The data of these pieces has been written: records what became data.
    pub fn finish_write(&mut self, volume: VolumeId, pieces: &[WritePiece]) {
        self.finish_write_to(self.volume(volume).head, pieces);
    }

    /// As [`Meta::finish_write`], to the layer of a head or snapshot.
    #[inline]
    pub fn finish_write_to(&mut self, owner: SnapshotId, pieces: &[WritePiece]) {
        self.note_write(owner);
        self.log.expected_records_came(self.expected_bytes(pieces));
        self.unpin_pieces(pieces);
        for piece in pieces.iter().filter(|piece| piece.records) {
            // Another write may have made it one meanwhile.
            if self.is_recorded(piece.entry, &piece.blocks) {
                continue;
            }
            self.entries.fill(piece.entry, piece.blocks.clone(), FillState::Data);
            if self.snapshot(owner).head() {
                self.note_filled(owner, piece.logical, piece.entry, &piece.blocks);
            } else {
                self.forget_entry(piece.entry);
            }
            if !self.log_entry(piece.entry) {
                self.append(&Record::Fill {
                    entry: piece.entry,
                    start: piece.blocks.start as u16,
                    count: (piece.blocks.end - piece.blocks.start) as u16,
                    state: FillState::Data,
                });
            }
        }
    }

    /// A write failed: extents allocated for it are free again unless somebody else uses them.
    pub fn abort_write(&mut self, volume: VolumeId, pieces: &[WritePiece]) {
        self.abort_write_to(self.volume(volume).head, pieces);
    }

    /// As [`Meta::abort_write`], to the layer of a head or snapshot.
    pub fn abort_write_to(&mut self, owner: SnapshotId, pieces: &[WritePiece]) {
        // Some of it may have reached the device.
        self.note_write(owner);
        self.log.expected_records_came(self.expected_bytes(pieces));
        let space = self.snapshot(owner).space();
        self.unpin_pieces(pieces);
        for piece in pieces {
            let unused = self.entries.data_blocks(piece.entry) == 0;
            let whole = self.extent_blocks(piece.logical);
            if unused && self.unlogged.contains_key(&piece.entry) && self.locks.sole(space, &whole)
            {
                self.unallocate(owner, piece.logical);
            }
        }
    }

    /// Makes sure that the next group stays small enough for the journal, with what writes in
    /// flight will add to it.
    ///
    /// # Errors
    /// [`Stop::Long`].
    pub fn check_log(&self) -> Step<()> {
        if self.log.is_long() { Err(Stop::Long) } else { Ok(()) }
    }

    /// Entries that a step may record, `most` at most: no more than a quarter of a group's records.
    pub(super) fn entries_per_step(&self, most: usize) -> usize {
        let fitting = self.log.pending_soft_max() / 4 / self.record_bytes();
        fitting.clamp(1, at_once(most as u32) as usize)
    }

    /// Bytes of the largest record a piece of a write can make.
    pub(super) fn record_bytes(&self) -> usize {
        self.geometry.entry_bytes() + 16
    }

    /// Blocks of a volume extent, counted from the volume's start.
    pub fn extent_blocks(&self, logical: u32) -> Range<u64> {
        let blocks = u64::from(self.blocks_per_extent());
        u64::from(logical) * blocks..(u64::from(logical) + 1) * blocks
    }

    /// Gives `owner` a data extent at `logical`, with the zero marks of what it replaces there
    /// (a zero run or a zero-only layer). It is in no record until [`Meta::log_entry`].
    pub(super) fn allocate(&mut self, owner: SnapshotId, logical: u32) -> Step<u32> {
        let replaced = self.snapshot(owner).layer.get(logical);
        let zeros = match replaced {
            Some(spare) => self.entries.zero_bits(spare)?,
            None if self.snapshot(owner).layer.in_run(logical) => {
                super::entries::Bits::range(&(0..self.blocks_per_extent()))
            }
            None => super::entries::Bits::default(),
        };
        let entry = self.take_extent()?;
        self.entries.assign(entry, owner.0, logical);
        for run in zeros.runs(self.blocks_per_extent()) {
            self.entries.fill(entry, run, FillState::Zero);
        }
        self.layer_mut(owner, logical..logical + 1).insert(logical, entry);
        self.unlogged.insert(entry, replaced);
        Ok(entry)
    }

    /// Puts an entry that is in no record yet into one, with all it holds; whether it was so.
    pub(super) fn log_entry(&mut self, entry: u32) -> bool {
        let Some(replaced) = self.unlogged.remove(&entry) else { return false };
        self.append_entry(entry);
        if let Some(spare) = replaced {
            self.free_entry(spare);
        }
        true
    }

    /// Entries in no record yet that are not as they were made: without data, and with the zeros of the spare
    /// entry that each will replace.
    pub fn wrong_unlogged(&self) -> impl Iterator<Item = u32> {
        let unlogged = self.unlogged.iter().map(|(entry, replaced)| (*entry, *replaced));
        let wrong = unlogged.filter(|(entry, replaced)| {
            let zero = self.entries.zero_bits(*entry);
            let other = replaced.is_some_and(|spare| self.entries.zero_bits(spare) != zero);
            other || self.entries.data_blocks(*entry) > 0
        });
        wrong.map(|(entry, _)| entry)
    }

    /// Frees an entry that no layer map refers to any more.
    pub(super) fn free_entry(&mut self, entry: u32) {
        self.entries.release(entry);
        if let Some(replaced) = self.unlogged.remove(&entry) {
            if let Some(spare) = replaced {
                self.free_entry(spare);
            }
            // Nobody but an aborted write ever touched it.
            self.extents.put_back(entry);
            return;
        }
        self.append(&Record::Free { entry });
        let (group, fence) = if sabotage::is(Bug::ReuseFreedEarly) {
            (0, 0)
        } else {
            (self.log.next, self.fence.next())
        };
        match entry.checked_sub(SPARE_BASE) {
            Some(spare) => self.spares.free(spare, group, fence),
            None => self.extents.free(entry, group, fence),
        }
    }

    /// Takes a free data extent, unless it is one of the last that moves of compressed ones need.
    ///
    /// # Errors
    /// [`Stop::Space`], [`Stop::Room`].
    pub fn take_extent(&mut self) -> Step<u32> {
        if self.keeps_for_moves() {
            self.leave_for_moves()?;
        }
        self.take_any()
    }

    /// Whether extents are kept: some are compressed, or about to be.
    fn keeps_for_moves(&self) -> bool {
        self.entries.any_compressed() || !self.moving.is_empty()
    }

    /// Free extents that a store may not be without.
    pub fn kept_extents(&self) -> u64 {
        if self.keeps_for_moves() { KEPT_FOR_MOVES.into() } else { 0 }
    }

    /// Refuses to take one of the last extents.
    ///
    /// # Errors
    /// [`Stop::Space`].
    pub(super) fn leave_for_moves(&mut self) -> Step<()> {
        self.release_freed();
        if self.extents.available() <= KEPT_FOR_MOVES { Err(Stop::Space) } else { Ok(()) }
    }

    /// Takes a free data extent, be it the last one.
    ///
    /// # Errors
    /// [`Stop::Space`], [`Stop::Room`].
    pub(super) fn take_any(&mut self) -> Step<u32> {
        self.release_freed();
        // Neighbours stay adjacent as long as that does not spread the store: beyond the present
        // mark, the lowest free extent comes first.
        let known = self.marks[RegionKind::Extents.mark()]
            * self.geometry.items_per_block(RegionKind::Extents);
        let preferred = if self.next_extent < known { self.next_extent } else { 0 };
        let Some(entry) = self.extents.take(preferred) else { return Err(Stop::Space) };
        if let Err(stop) = self.require_block(RegionKind::Extents, entry) {
            self.extents.put_back(entry);
            return Err(if self.within_room { Stop::Space } else { stop });
        }
        self.next_extent = entry + 1;
        Ok(entry)
    }

    /// The next extent taken is the lowest free one.
    pub(super) fn forget_preference(&mut self) {
        self.next_extent = 0;
    }

    /// Takes a free spare entry; `None` if there is none.
    pub(super) fn take_spare(&mut self) -> Step<Option<u32>> {
        self.release_freed();
        let Some(spare) = self.spares.take(0) else { return Ok(None) };
        if let Err(stop) = self.require_block(RegionKind::Spares, spare) {
            self.spares.put_back(spare);
            return if self.within_room { Ok(None) } else { Err(stop) };
        }
        Ok(Some(SPARE_BASE + spare))
    }

    /// Lets freed entries out of quarantine whose freeing is durable.
    pub fn release_freed(&mut self) {
        if self.extents.quarantined() == 0 && self.spares.quarantined() == 0 {
            return;
        }
        let durable = if sabotage::is(Bug::ReuseFreedEarly) { u64::MAX } else { self.log.durable };
        let oldest = self.fence.oldest();
        self.extents.release(durable, oldest);
        self.spares.release(durable, oldest);
    }

    /// Whether extents that [`Meta::release_freed`] has left are free once reads have ended, which will. Others wait for
    /// a commit, which who waits here would never make.
    pub fn extents_wait_for_reads(&self) -> bool {
        self.extents.wait_for_io(self.log.durable)
    }

    /// Why no extent is free, for people.
    pub fn no_space(&self) -> Error {
        let merging = if self.next_deleted().is_some() {
            "; what was deleted is not merged yet: a server does that in the background, and `dbs volume trim` at once"
        } else {
            ""
        };
        let kept = if self.keeps_for_moves() {
            format!(" (or kept to write to compressed data: the last {KEPT_FOR_MOVES})")
        } else {
            String::new()
        };
        Error::no_space(format!(
            "the store is full: all {} extents of {} are in use{kept}; delete snapshots or volumes, \
             discard, or grow the store{merging}",
            self.geometry.data_extents(),
            crate::units::format_size(self.geometry.extent_bytes),
        ))
    }

    /// Takes back [`Meta::allocate`]: the layer has what it had before.
    pub(super) fn unallocate(&mut self, owner: SnapshotId, logical: u32) {
        let Some(entry) = self.snapshot(owner).layer.get(logical) else { return };
        let Some(replaced) = self.unlogged.remove(&entry) else { return };
        let layer = self.layer_mut(owner, logical..logical + 1);
        match replaced {
            Some(spare) => layer.insert(logical, spare),
            None => layer.remove(logical),
        };
        self.entries.release(entry);
        self.extents.put_back(entry);
    }
}

/// Splits blocks of a volume at extent borders: (volume extent, blocks in it).
pub fn split(blocks: Range<u64>, per_extent: u32) -> impl Iterator<Item = (u32, Range<u32>)> {
    let per_extent = u64::from(per_extent);
    let mut next = blocks.start;
    std::iter::from_fn(move || {
        if next >= blocks.end {
            return None;
        }
        let logical = next / per_extent;
        let end = blocks.end.min((logical + 1) * per_extent);
        let base = logical * per_extent;
        let part = (next - base) as u32..(end - base) as u32;
        next = end;
        Some((logical as u32, part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_split_at_extents() {
        let parts: Vec<_> = split(250..530, 256).collect();
        assert_eq!(parts, [(0, 250..256), (1, 0..256), (2, 0..18)]);
        assert_eq!(split(5..5, 256).count(), 0);
    }
}
