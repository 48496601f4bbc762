//! Making blocks read as zeros: freeing what the head holds itself, and covering what the parent
//! would show through. Costs no data space; a run of whole extents costs one spare entry.

use super::entries::{Bits, SPARE_BASE};
use super::plan::split;
use super::{Meta, Step, Stop};
use crate::format::record::{FillState, Record};
use crate::limits::DATA_SHARE;
use crate::sabotage::{self, Bug};
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::ops::Range;

impl Meta {
    /// Makes whole blocks of a volume read as zeros. With `must`, an error if that needs space
    /// there is none of; otherwise such blocks keep their content. The caller holds the blocks
    /// exclusively and keeps the range within a few thousand extents.
    ///
    /// # Errors
    /// [`Stop::Space`], [`Stop::Long`], [`Stop::Room`]; what was done until then stays done.
    pub fn zero_blocks(&mut self, volume: VolumeId, blocks: Range<u64>, must: bool) -> Step<()> {
        let head = self.volume(volume).head;
        let whole = self.blocks_per_extent();
        let end = self.volume(volume).size.div_ceil(BLOCK_BYTES);
        // Blocks behind the volume's end hold nothing: the last extent counts as whole.
        let blocks = if blocks.end >= end && !blocks.is_empty() {
            blocks.start..blocks.end.next_multiple_of(u64::from(whole))
        } else {
            blocks
        };
        self.zero_blocks_of(head, blocks, must)
    }

    /// As [`Meta::zero_blocks`] without `must`, and with the metadata blocks there are: blocks keep their
    /// content that would need another one.
    ///
    /// # Errors
    /// [`Stop::Long`]; what was done until then stays done.
    pub fn zero_within_room(&mut self, volume: VolumeId, blocks: Range<u64>) -> Step<()> {
        self.within_room = true;
        let zeroed = self.zero_blocks(volume, blocks, false);
        self.within_room = false;
        zeroed
    }

    /// As [`Meta::zero_blocks`], of the layer of a head or snapshot, and no more than these blocks.
    ///
    /// # Errors
    /// As there.
    pub fn zero_blocks_of(
        &mut self,
        owner: SnapshotId,
        blocks: Range<u64>,
        must: bool,
    ) -> Step<()> {
        self.check_not_lost(owner)?;
        self.note_write(owner);
        let whole = self.blocks_per_extent();
        let mut run: Option<Range<u32>> = None;
        for (logical, part) in split(blocks, whole) {
            self.check_log()?;
            if part == (0..whole) {
                let start = run.as_ref().map_or(logical, |run| run.start);
                run = Some(start..logical + 1);
            } else {
                self.zero_part(owner, logical, part, must)?;
            }
        }
        run.map_or(Ok(()), |run| self.zero_extents(owner, run, must))
    }

    /// Makes whole volume extents of a layer read as zeros.
    fn zero_extents(&mut self, owner: SnapshotId, extents: Range<u32>, must: bool) -> Step<()> {
        let covered = !self.shows_parent(owner) || self.add_run(owner, extents.clone(), None)?;
        if !covered {
            let whole = 0..self.blocks_per_extent();
            for logical in extents {
                self.check_log()?;
                // A step that has stopped for a later one does not record this one again.
                if !self.reads_zeros(owner, logical)? {
                    self.zero_part(owner, logical, whole.clone(), must)?;
                }
            }
            return Ok(());
        }
        let layer = &self.snapshot(owner).layer;
        let held: Vec<_> =
            layer.iter_from(extents.start).take_while(|item| item.0 < extents.end).collect();
        // In one group with the run: an entry with absent blocks inside a durable run would be taken for zeros there
        // by a merge, though reads find the parent's data.
        for (logical, entry) in held {
            self.layer_mut(owner, logical..logical + 1).remove(logical);
            self.free_entry(entry);
        }
        Ok(())
    }

    /// Whether an entry of a layer, without data, says that all of a volume extent is zeros.
    fn reads_zeros(&self, owner: SnapshotId, logical: u32) -> Step<bool> {
        let Some(entry) = self.snapshot(owner).layer.get(logical) else { return Ok(false) };
        let is_new = self.unlogged.contains_key(&entry);
        Ok(!is_new && self.entries.zero_bits(entry)? == self.all_blocks())
    }

    /// Makes some blocks of one volume extent read as zeros.
    fn zero_part(
        &mut self,
        owner: SnapshotId,
        logical: u32,
        part: Range<u32>,
        must: bool,
    ) -> Step<()> {
        let covers = self.shows_parent(owner);
        let state = if covers { FillState::Zero } else { FillState::Absent };
        let entry = match self.snapshot(owner).layer.get(logical) {
            Some(entry) => entry,
            None if !covers || self.snapshot(owner).layer.in_run(logical) => return Ok(()),
            None => match self.add_carrier(owner, logical, must)? {
                Some(entry) => entry,
                None if must => return Err(Stop::Space),
                None => return Ok(()),
            },
        };
        self.entries.need(entry)?;
        self.log_entry(entry);
        self.fill(entry, part, state);
        self.slim(owner, logical, entry)
    }

    /// Whoever changes an entry has recorded it: if the write that made it fails, what is in no record goes.
    fn check_recorded(&self, entry: u32) {
        let planted = sabotage::is(Bug::MarkUnrecorded);
        debug_assert!(planted || !self.unlogged.contains_key(&entry), "it is in no record");
    }

    /// Sets blocks of an entry, recording it unless the entry is in no record yet.
    pub(super) fn fill(&mut self, entry: u32, blocks: Range<u32>, state: FillState) {
        self.check_recorded(entry);
        self.forget_entry(entry);
        self.entries.fill(entry, blocks.clone(), state);
        if !self.unlogged.contains_key(&entry) {
            self.append(&Record::Fill {
                entry,
                start: blocks.start as u16,
                count: (blocks.end - blocks.start) as u16,
                state,
            });
        }
    }

    /// Sets any set of blocks of an entry, in one record.
    pub(super) fn fill_all(&mut self, entry: u32, blocks: &Bits, state: FillState) {
        self.check_recorded(entry);
        self.forget_entry(entry);
        for run in blocks.runs(self.blocks_per_extent()) {
            self.entries.fill(entry, run, state);
        }
        if !self.unlogged.contains_key(&entry) {
            self.append_entry(entry);
        }
    }

    /// Replaces an entry without data by less: nothing, a zero run, or a zero-only layer.
    pub(super) fn slim(&mut self, owner: SnapshotId, logical: u32, entry: u32) -> Step<()> {
        // A write to other blocks of the extent may be on its way: then the entry stays.
        let sole = self.locks.sole(self.snapshot(owner).space(), &self.extent_blocks(logical));
        if !sole || self.entries.data_blocks(entry) > 0 {
            return Ok(());
        }
        let zeros = self.entries.zero_bits(entry)?;
        let all = Bits::range(&(0..self.blocks_per_extent()));
        let gone = if zeros == all {
            self.add_run(owner, logical..logical + 1, None)?
        } else {
            zeros.is_empty() && !self.snapshot(owner).layer.in_run(logical)
        };
        if gone {
            self.layer_mut(owner, logical..logical + 1).remove(logical);
            self.free_entry(entry);
        } else if entry < SPARE_BASE {
            self.carry_by_spare(owner, logical, entry)?;
        }
        Ok(())
    }

    /// Replaces a data extent without data by a spare entry, if there is one.
    pub(super) fn carry_by_spare(
        &mut self,
        owner: SnapshotId,
        logical: u32,
        entry: u32,
    ) -> Step<()> {
        let zeros = self.entries.zero_bits(entry)?;
        let Some(spare) = self.take_spare()? else { return Ok(()) };
        self.entries.assign(spare, owner.0, logical);
        self.entries.set_bits(spare, &Bits::default(), &zeros);
        self.layer_mut(owner, logical..logical + 1).insert(logical, spare);
        self.append_entry(spare);
        self.free_entry(entry);
        Ok(())
    }

    /// A new entry without content at a volume extent that has none: a spare, else a data extent. Unless
    /// it `must` be, not one of the last, which data needs more.
    pub(super) fn add_carrier(
        &mut self,
        owner: SnapshotId,
        logical: u32,
        must: bool,
    ) -> Step<Option<u32>> {
        if let Some(spare) = self.take_spare()? {
            self.entries.assign(spare, owner.0, logical);
            self.layer_mut(owner, logical..logical + 1).insert(logical, spare);
            self.append_entry(spare);
            return Ok(Some(spare));
        }
        if !must && self.extents.available() <= self.geometry.data_extents() / DATA_SHARE {
            return Ok(None);
        }
        match self.allocate(owner, logical) {
            Ok(entry) => Ok(Some(entry)),
            Err(Stop::Space) => Ok(None),
            Err(stop) => Err(stop),
        }
    }

    /// Covers volume extents with a zero run, joined with those it touches; `donor` is a spare the
    /// caller gives away for it. `false` if no spare entry is left.
    pub(super) fn add_run(
        &mut self,
        owner: SnapshotId,
        extents: Range<u32>,
        donor: Option<u32>,
    ) -> Step<bool> {
        let (covered, mut joined) = (extents.clone(), extents);
        let mut spares = Vec::new();
        let runs = &self.snapshot(owner).layer.runs;
        let touching: Vec<_> = runs
            .range(..=joined.end)
            .rev()
            .take_while(|(start, (length, _))| *start + *length >= joined.start)
            .map(|(start, (length, spare))| (*start, *length, *spare))
            .collect();
        if let [(start, length, _)] = touching.as_slice()
            && *start <= joined.start
            && joined.end <= start + length
            && donor.is_none()
        {
            return Ok(true);
        }
        for (start, length, spare) in &touching {
            joined = joined.start.min(*start)..joined.end.max(start + length);
            spares.push(*spare);
        }
        spares.extend(donor);
        let spare = match spares.pop() {
            Some(spare) => spare,
            None => match self.take_spare()? {
                Some(spare) => spare,
                None => return Ok(false),
            },
        };
        for (start, _, _) in touching {
            // What comes covers it.
            self.layer_mut(owner, 0..0).runs.remove(&start);
        }
        spares.into_iter().for_each(|spare| self.free_entry(spare));
        let length = joined.end - joined.start;
        self.entries.assign_run(spare, owner.0, joined.start, length);
        self.layer_mut(owner, covered).runs.insert(joined.start, (length, spare));
        self.append_entry(spare);
        Ok(true)
    }

    /// Whether absent blocks of a layer show a parent's, or may later.
    fn shows_parent(&self, owner: SnapshotId) -> bool {
        let owner = self.snapshot(owner);
        let may = self.is_rebuilding(owner.volume) && !sabotage::is(Bug::ForgetZeroInRebuilding);
        may || (!owner.parent.is_none() && !sabotage::is(Bug::ForgetZeroOnDiscard))
    }

    /// Blocks behind the end of a volume that have to be hidden before it grows by these: all if anything there may be shown.
    pub fn to_hide(&self, volume: VolumeId, blocks: Range<u64>) -> Range<u64> {
        let (whole, head) = (u64::from(self.blocks_per_extent()), self.volume(volume).head);
        let end = blocks.end.next_multiple_of(whole);
        if self.holds_behind(head, (blocks.start / whole) as u32) {
            return blocks.start..end;
        }
        // As far as was cut off, unless all of that is hidden already: see `mark_end`.
        let last = self.snapshot(head).layer.runs.iter().next_back();
        let last = last.filter(|_| self.is_rebuilding(volume));
        let marked = last.map_or(0..0, |(start, (length, _))| {
            u64::from(*start) * whole..u64::from(start + length) * whole
        });
        let edge = blocks.start.next_multiple_of(whole);
        let to = if marked.start <= edge { marked.end.min(edge) } else { marked.end };
        blocks.start..end.min(to)
    }

    /// Marks the end of what is cut off of a volume, in the step that does so. All of it is hidden later, and a kill may
    /// come between: while the volume is being rebuilt, layers that hold nothing there as yet may get content, and nothing else
    /// would tell that a volume which grows again was ever larger.
    ///
    /// # Errors
    /// As [`Meta::zero_blocks`].
    pub fn mark_end(&mut self, volume: VolumeId, blocks: Range<u64>) -> Step<()> {
        if !self.is_rebuilding(volume) || blocks.is_empty() {
            return Ok(());
        }
        let whole = u64::from(self.blocks_per_extent());
        let last = (blocks.end - 1) / whole * whole;
        self.zero_blocks(volume, blocks.start.max(last)..blocks.end, true)
    }

    /// Whether anything in the chain may hold content, or have lost it, at or behind a volume extent.
    pub fn holds_behind(&self, snapshot: SnapshotId, logical: u32) -> bool {
        let mut at = snapshot;
        while !at.is_none() {
            let snapshot = self.snapshot(at);
            let in_file = snapshot.backed()
                && snapshot.size > u64::from(logical) * self.geometry.extent_bytes;
            let lost = snapshot.layer.lost.iter().next_back();
            if in_file
                || snapshot.layer.iter_from(logical).next().is_some()
                || lost.is_some_and(|(start, (length, _))| start + length > logical)
            {
                return true;
            }
            at = snapshot.parent;
        }
        false
    }
}
