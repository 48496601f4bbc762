//! Giving up blocks of retired snapshots that nothing live can see: those that a layer above
//! covers. Only records change, nothing is copied or overwritten, so a crash leaves more or less
//! pruned, and what the head shows is the same with either.

use super::entries::{Bits, SPARE_BASE};
use super::{Meta, Snapshot, Step};
use crate::format::record::FillState;
use crate::format::slots::{SNAPSHOT_PROTECTED, SNAPSHOT_RETIRED};
use crate::sabotage::{self, Bug};
use crate::units::{SnapshotId, VolumeId};
use std::ops::Range;

/// Layers times volume extents looked at under one hold of the lock.
const LOOKS_PER_STEP: u32 = 1024;

impl Meta {
    /// The next volume extents from `logical` on, and before `end`, at which a prune has anything
    /// to look at: few enough for one step.
    pub fn next_prune(&self, volume: VolumeId, logical: u32, end: u32) -> Option<Range<u32>> {
        let run = self.retired_run(volume);
        let held = run.iter().filter_map(|id| {
            self.snapshot(*id).layer.iter_from(logical).next().map(|(logical, _)| logical)
        });
        let first = held.min().filter(|first| *first < end)?;
        let most = (sabotage::at_once(LOOKS_PER_STEP) / run.len() as u32).max(1);
        Some(first..end.min(first.saturating_add(most)))
    }

    /// Drops the blocks of retired snapshots under a head that a layer above holds itself, and adds
    /// the number of data blocks to `freed`. The caller holds the blocks of head and snapshots, so
    /// that nothing is merged or moved there meanwhile.
    ///
    /// # Errors
    /// [`super::Stop::Long`], [`super::Stop::Room`]; what was done until then stays done.
    pub fn prune_blocks(
        &mut self,
        volume: VolumeId,
        blocks: Range<u64>,
        freed: &mut u64,
    ) -> Step<()> {
        let head = self.volume(volume).head;
        self.note_write(head);
        let run = self.retired_run(volume);
        for (logical, part) in super::plan::split(blocks, self.blocks_per_extent()) {
            let part = Bits::range(&part);
            let (data, zero) = self.held(head, logical)?;
            let mut covered = data.or(&zero);
            for id in &run {
                self.check_log()?;
                let (data, zero) = self.held(*id, logical)?;
                if sabotage::is(Bug::PruneUncovered) && !covered.is_empty() {
                    covered = part;
                }
                *freed += u64::from(self.drop_covered(*id, logical, &covered.and(&part))?);
                covered = covered.or(&data).or(&zero);
            }
        }
        Ok(())
    }

    /// The retired and deleted snapshots directly under a head, topmost first, through which only
    /// the head looks.
    fn retired_run(&self, volume: VolumeId) -> Vec<SnapshotId> {
        let head = self.volume(volume).head;
        // Under what is lost in the head, these hold the last that is left.
        if !self.snapshot(head).layer.lost.is_empty() {
            return Vec::new();
        }
        let sole = |s: &Snapshot| s.children.len() == 1 || sabotage::is(Bug::PruneShared);
        self.chain(head)
            .skip(1)
            .take_while(|id| {
                let s = self.snapshot(*id);
                s.volume == volume && s.layer.lost.is_empty() && sole(s) && self.unwanted(*id, s)
            })
            .collect()
    }

    fn unwanted(&self, id: SnapshotId, snapshot: &Snapshot) -> bool {
        let retired = snapshot.flags & (SNAPSHOT_RETIRED | SNAPSHOT_PROTECTED) == SNAPSHOT_RETIRED;
        !snapshot.live() || (retired && !self.open_snapshots.contains_key(&id.0))
    }

    /// Takes blocks out of a layer; how many of them were data.
    fn drop_covered(&mut self, owner: SnapshotId, logical: u32, covered: &Bits) -> Step<u32> {
        let layer = &self.snapshot(owner).layer;
        let Some(entry) = layer.get(logical) else { return Ok(0) };
        let (data, zero) = (self.entries.data_bits(entry)?, self.entries.zero_bits(entry)?);
        let (gone, left) = (data.and(covered), data.without(covered));
        // Inside a run there are no absent blocks: what is dropped there is zero, as the run says. And what another
        // volume shows through absent blocks of this one, a flatten copies into them at once, while reads of what was
        // dropped go on, and a crash may bring it back.
        let in_run = layer.in_run(logical);
        let to_zero = in_run || self.is_foreign_child(self.snapshot(owner).volume, owner);
        let state = if to_zero { FillState::Zero } else { FillState::Absent };
        let dropped = if to_zero { gone } else { gone.or(&zero.and(covered)) };
        let (zero, all) = (zero.without(&dropped), Bits::range(&(0..self.blocks_per_extent())));
        let as_run = in_run && data.or(&zero) == all;
        if left.is_empty() && (as_run || (!in_run && zero.is_empty())) {
            self.layer_mut(owner, logical..logical + 1).remove(logical);
            self.free_entry(entry);
        } else {
            if !dropped.is_empty() {
                self.log_entry(entry);
                self.fill_all(entry, &dropped, state);
                if !to_zero {
                    // A merge may copy there what lies below: not before reads of what is dropped have ended.
                    self.lose_sight();
                }
            }
            if left.is_empty() && entry < SPARE_BASE {
                self.carry_by_spare(owner, logical, entry)?;
            }
        }
        Ok(gone.count())
    }
}
