//! Changing the layer of a snapshot, which only a volume that is being rebuilt allows: data and
//! zeros as for a head, and giving blocks up so that the parent shows through again.

use super::entries::Bits;
use super::plan::split;
use super::{Meta, Step};
use crate::error::{Error, Result};
use crate::format::record::FillState;
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::ops::Range;

impl Meta {
    /// Refuses what only a rebuilding volume allows.
    ///
    /// # Errors
    /// `ReadOnly`.
    pub fn check_rebuilding(&self, id: VolumeId) -> Result<()> {
        if self.is_rebuilding(id) {
            return Ok(());
        }
        Err(Error::read_only(format!(
            "`{}` is not being rebuilt: its snapshots do not change",
            self.volume(id).name
        )))
    }

    /// Refuses to write to a snapshot's layer that somebody relies on, or behind its end.
    ///
    /// # Errors
    /// `ReadOnly` if its volume is not being rebuilt, `Busy` if another volume builds on it,
    /// `Invalid`.
    pub fn check_layer_writable(&self, id: SnapshotId, blocks: &Range<u64>) -> Result<()> {
        let snapshot = self.snapshot(id);
        self.check_rebuilding(snapshot.volume)?;
        self.check_not_lost(id)?;
        if blocks.end > snapshot.size.div_ceil(BLOCK_BYTES) {
            return Err(Error::invalid(format!(
                "the range is outside `{}@{}` of {} bytes",
                self.volume(snapshot.volume).name,
                snapshot.name,
                snapshot.size
            )));
        }
        if self.foreign_below(snapshot, snapshot.volume) {
            return Err(Error::busy(format!(
                "snapshot `{}@{}` cannot change: another volume is a clone of it or of a snapshot \
                 above it; flatten or delete the clone first",
                self.volume(snapshot.volume).name,
                snapshot.name
            )));
        }
        Ok(())
    }

    /// Makes blocks of a snapshot's layer absent. The caller holds them exclusively and keeps the
    /// range within a few thousand extents.
    ///
    /// # Errors
    /// `NoSpace` if a zero run must be split and there is no spare entry, `Busy` if a deleted
    /// snapshot below has still to become part of this one, `ReadOnly` if the layer lost something;
    /// [`super::Stop::Long`], [`super::Stop::Room`], [`super::Stop::Space`]. What was done until then stays done.
    pub fn clear_blocks(&mut self, owner: SnapshotId, blocks: Range<u64>) -> Step<()> {
        self.check_not_lost(owner)?;
        let span = self.span(owner);
        if span.members.len() > 1 {
            let is_put_off = span.members.iter().any(|id| self.is_put_off(*id));
            return Err(super::Stop::Error(self.still_merging(owner, is_put_off)));
        }
        self.note_write(owner);
        let whole = self.blocks_per_extent();
        let mut extents: Option<Range<u32>> = None;
        for (logical, part) in split(blocks, whole) {
            self.check_log()?;
            if part == (0..whole) {
                let start = extents.as_ref().map_or(logical, |extents| extents.start);
                extents = Some(start..logical + 1);
            } else {
                self.clear_part(owner, logical, part)?;
            }
        }
        extents.map_or(Ok(()), |extents| self.clear_extents(owner, extents))
    }

    /// Why a layer with deleted snapshots below it must wait.
    fn still_merging(&self, owner: SnapshotId, is_put_off: bool) -> Error {
        let owner = self.snapshot(owner);
        if is_put_off {
            return Error::corrupt(format!(
                "a deleted snapshot below `{}@{}` cannot be merged, as something that this needs cannot be read or \
                 written; `dbs check` lists all damage",
                self.volume(owner.volume).name,
                owner.name
            ));
        }
        Error::busy(format!(
            "a deleted snapshot below `{}@{}` is not merged yet; try again when background work \
             has ended",
            self.volume(owner.volume).name,
            owner.name
        ))
    }

    fn clear_extents(&mut self, owner: SnapshotId, extents: Range<u32>) -> Step<()> {
        self.carve_runs(owner, &extents)?;
        let layer = &self.snapshot(owner).layer;
        let held: Vec<_> =
            layer.iter_from(extents.start).take_while(|item| item.0 < extents.end).collect();
        for (logical, entry) in held {
            self.layer_mut(owner, logical..logical + 1).remove(logical);
            self.free_entry(entry);
        }
        Ok(())
    }

    /// Whatever stops it in between leaves the layer saying what it said before.
    fn clear_part(&mut self, owner: SnapshotId, logical: u32, part: Range<u32>) -> Step<()> {
        if let Some(entry) = self.snapshot(owner).layer.get(logical) {
            self.entries.need(entry)?;
        }
        if self.snapshot(owner).layer.in_run(logical) {
            if self.snapshot(owner).layer.get(logical).is_none() {
                self.unfold(owner, logical)?;
            }
            self.carve_runs(owner, &(logical..logical + 1))?;
        }
        let Some(entry) = self.snapshot(owner).layer.get(logical) else { return Ok(()) };
        self.log_entry(entry);
        self.fill(entry, part, FillState::Absent);
        self.slim(owner, logical, entry)
    }

    /// Says by an entry what a zero run says of a volume extent.
    fn unfold(&mut self, owner: SnapshotId, logical: u32) -> Step<()> {
        let Some(entry) = self.add_carrier(owner, logical, true)? else {
            return Err(super::Stop::Space);
        };
        self.log_entry(entry);
        self.fill_all(entry, &Bits::range(&(0..self.blocks_per_extent())), FillState::Zero);
        Ok(())
    }

    /// Takes volume extents out of a layer's zero runs: those without an entry become absent.
    pub(super) fn carve_runs(&mut self, owner: SnapshotId, extents: &Range<u32>) -> Step<()> {
        let runs = &self.snapshot(owner).layer.runs;
        let touching: Vec<_> = runs
            .range(..extents.end)
            .rev()
            .take_while(|(start, (length, _))| *start + *length > extents.start)
            .map(|(start, (length, spare))| (*start..*start + *length, *spare))
            .collect();
        for (run, spare) in touching {
            let left = run.start..extents.start.max(run.start);
            let right = extents.end.min(run.end)..run.end;
            let second = match !left.is_empty() && !right.is_empty() {
                true => Some(self.take_spare()?.ok_or_else(no_spare)?),
                false => None,
            };
            let carved = run.start.max(extents.start)..run.end.min(extents.end);
            self.layer_mut(owner, carved).runs.remove(&run.start);
            let parts = [left, right].into_iter().filter(|part| !part.is_empty());
            let mut entries = [Some(spare), second].into_iter().flatten();
            for part in parts {
                let Some(spare) = entries.next() else { break };
                let length = part.end - part.start;
                self.entries.assign_run(spare, owner.0, part.start, length);
                // It said the same before.
                self.layer_mut(owner, 0..0).runs.insert(part.start, (length, spare));
                self.append_entry(spare);
            }
            entries.for_each(|spare| self.free_entry(spare));
        }
        Ok(())
    }
}

fn no_spare() -> super::Stop {
    super::Stop::Error(Error::no_space(
        "no spare entry is left to split a run of zeros; delete snapshots or volumes",
    ))
}
