//! Taking deleted snapshots out of the tree, one volume extent at a time. Every step leaves the
//! content of every live volume and snapshot as it was, so a crash between steps needs no care.

use super::entries::{Away, Bits};
use super::locks::Space;
use super::{Meta, Seen, Snapshot, Step, Stop};
use crate::format::record::FillState;
use crate::sabotage::{self, Bug};
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::collections::BTreeSet;
use std::ops::Range;

/// Entries a step without copying may handle under one hold of the lock, fewer if they are long.
const ENTRIES_PER_STEP: usize = 64;
/// Bytes of the extents merged together, and their number: while they are, writes to them wait.
const MERGE_BYTES: u64 = 16 << 20;
const MERGE_EXTENTS: u64 = 64;

/// What the next step of background work is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Nothing.
    Idle,
    /// A step was taken; nothing to copy.
    Stepped,
    /// Commit: a deletion is not durable yet. Until it is, a crash would bring back what it took
    /// out of sight, and find its blocks given to others.
    Commit,
    /// Nothing before reads have ended that began before something lost sight of a snapshot: they may
    /// be of blocks that a merge writes over, or hands to a head that does.
    Wait,
    /// Merge these volume extents of a deleted snapshot into its only child.
    Merge(Merge),
}

/// Volume extents to merge, near one another. Each is for itself: any of them may be done or not
/// when a crash comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merge {
    /// Deleted snapshot.
    pub snapshot: SnapshotId,
    /// Its only child.
    pub child: SnapshotId,
    /// Volume extents, ascending, at least one.
    pub extents: Vec<u32>,
    /// Where the child's blocks must be held exclusively.
    pub lock: Space,
}

/// A copy within the data region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// Byte offset to read at.
    pub from: u64,
    /// Byte offset to write at.
    pub to: u64,
    /// Bytes.
    pub length: u64,
    /// It is in a compressed extent: what would be at `from` if that was not.
    pub expands: bool,
}

impl Copy {
    /// Blocks.
    pub fn blocks(&self) -> usize {
        (self.length / BLOCK_BYTES) as usize
    }
}

/// How one volume extent is merged.
#[derive(Debug)]
pub struct MergePlan {
    snapshot: SnapshotId,
    child: SnapshotId,
    logical: u32,
    /// Entry that stays, now the child's.
    target: u32,
    /// Entry that is freed.
    freed: u32,
    data: Bits,
    zero: Bits,
    /// To be done before [`Meta::finish_merge`].
    pub copies: Vec<Copy>,
}

impl Meta {
    /// Takes the next step of background work, or says which extents to merge, `most` at most.
    ///
    /// # Errors
    /// [`super::Stop::Room`], [`super::Stop::Long`].
    pub fn next_work(&mut self, most: u64) -> Step<Work> {
        let Some(next) = self.next_deleted() else {
            return Ok(Work::Idle);
        };
        self.next_deleted = next;
        self.check_log()?;
        let seen = self.still_seen(self.sight());
        if seen == Some(Seen::ByCrash) {
            return Ok(Work::Commit);
        }
        let reads = seen == Some(Seen::ByReads) && !sabotage::is(Bug::MergeBesideReads);
        // What is freed waits for reads by itself.
        let free = |id: &&u32| self.snapshot(SnapshotId(**id)).children.is_empty();
        let id = match self.deleting.iter().find(free).copied() {
            Some(leaf) if reads => SnapshotId(leaf),
            None if reads => return Ok(Work::Wait),
            _ => next,
        };
        let snapshot = self.snapshot(id);
        let Some(child) = snapshot.children.first().copied().map(SnapshotId) else {
            self.reclaim(id);
            return Ok(Work::Stepped);
        };
        let first = snapshot.layer.iter().next();
        if let Some((logical, _)) = first {
            if self.snapshot(child).layer.get(logical).is_none() {
                self.move_entries(id, child)?;
                return Ok(Work::Stepped);
            }
            return Ok(Work::Merge(self.next_merge(id, child, most)));
        }
        let run = snapshot.layer.runs.iter().next().map(|(start, run)| (*start, *run));
        match run {
            Some((start, (length, spare))) => {
                self.merge_run(id, child, start..start + length, spare)?;
            }
            None => self.unlink(id),
        }
        Ok(Work::Stepped)
    }

    /// The deleted snapshot to take out of the tree next: of neighbours that all can be, the topmost. So
    /// each extent moves once, to where it stays, or is freed where it is. From the bottom, the lowest
    /// snapshot's extents would move through each of the others.
    pub(super) fn next_deleted(&self) -> Option<SnapshotId> {
        let ready = |id: &SnapshotId| {
            let snapshot = self.try_snapshot(*id).filter(|snapshot| !snapshot.live());
            snapshot.is_some_and(|snapshot| self.is_ready(snapshot))
        };
        // The place where the last one went: the walk up its neighbours is over.
        let mut next = Some(self.next_deleted)
            .filter(ready)
            .or_else(|| self.deleting.iter().copied().map(SnapshotId).find(ready))?;
        while let Some(child) = self.snapshot(next).children.first().copied().map(SnapshotId)
            && ready(&child)
        {
            next = child;
        }
        Some(next)
    }

    /// Whether a deleted snapshot can be taken out of the tree. One that lost something cannot be
    /// merged, nor can another one into what did; nor can a base, nor what was put off.
    fn is_ready(&self, snapshot: &Snapshot) -> bool {
        let mut children = snapshot.children.iter().map(|id| self.snapshot(SnapshotId(*id)));
        match (children.next(), children.next()) {
            (None, _) => true,
            (Some(child), None) => {
                let is_lost = !snapshot.layer.lost.is_empty() || !child.layer.lost.is_empty();
                !is_lost && !snapshot.backed() && !self.put_off.contains_key(&child.parent.0)
            }
            _ => false,
        }
    }

    /// A deleted snapshot is not merged for now: what its merge needs cannot be read or written, or the file system
    /// below is full (`for_room`).
    pub fn put_off(&mut self, id: SnapshotId, for_room: bool) {
        self.put_off.insert(id.0, for_room);
    }

    /// What was put off for want of room below is tried again.
    pub fn end_put_off_for_room(&mut self) {
        self.put_off.retain(|_, for_room| !*for_room);
    }

    /// What was put off is tried again.
    pub fn end_put_off(&mut self) {
        self.put_off.clear();
    }

    /// Deleted snapshots that are put off.
    pub fn snapshots_put_off(&self) -> u64 {
        self.put_off.len() as u64
    }

    /// Whether a deleted snapshot is put off.
    pub(super) fn is_put_off(&self, id: SnapshotId) -> bool {
        self.put_off.contains_key(&id.0)
    }

    /// The metadata blocks whose bitmaps merges found by [`Meta::next_work`] need and that are away, each once.
    pub fn away_for(&self, merge: &Merge) -> Vec<u32> {
        let layers = [merge.snapshot, merge.child].map(|id| self.try_snapshot(id));
        let entries = merge.extents.iter().flat_map(|logical| {
            layers.iter().filter_map(|snapshot| snapshot.as_ref()?.layer.get(*logical))
        });
        let away = entries.filter(|entry| self.entries.need(*entry).is_err());
        let blocks: BTreeSet<u32> = away.map(|entry| self.block_of(entry)).collect();
        blocks.into_iter().collect()
    }

    /// The deleted snapshot that [`Meta::next_work`] took last.
    pub fn last_deleted(&self) -> SnapshotId {
        self.next_deleted
    }

    /// These are what the step of background work that is planned now works on. A writer that needs
    /// space leaves them alone.
    pub fn use_snapshots(&mut self, ids: &[SnapshotId]) {
        self.in_use.extend(ids);
    }

    /// The step is over.
    pub fn end_use(&mut self) {
        self.in_use.clear();
    }

    /// Frees leaves of the tree that nobody needs, for a writer that found the store full.
    pub fn reclaim_leaves(&mut self, max: usize) -> bool {
        let mut any = false;
        for _ in 0..max {
            if self.log.is_long() {
                break;
            }
            let leaf = |id: &&u32| {
                let id = SnapshotId(**id);
                self.snapshot(id).children.is_empty() && !self.in_use.contains(&id)
            };
            let Some(id) = self.deleting.iter().find(leaf).copied() else { break };
            self.reclaim(SnapshotId(id));
            any = true;
        }
        any
    }

    /// The first extents of `id` that `child` holds too: few enough, and near enough to one
    /// another, to be held together for a moment.
    fn next_merge(&self, id: SnapshotId, child: SnapshotId, most: u64) -> Merge {
        let owner = self.snapshot(child);
        let most = most.min(u64::from(sabotage::at_once(MERGE_EXTENTS as u32)));
        let fitting = (MERGE_BYTES / self.geometry.extent_bytes).clamp(1, MERGE_EXTENTS);
        let mut extents: Vec<u32> = Vec::new();
        for (logical, _) in self.snapshot(id).layer.iter().take(fitting.min(most.max(1)) as usize) {
            let first = *extents.first().unwrap_or(&logical);
            if u64::from(logical - first) >= MERGE_EXTENTS || owner.layer.get(logical).is_none() {
                break;
            }
            extents.push(logical);
        }
        let lock = owner.space();
        Merge { snapshot: id, child, extents, lock }
    }

    /// Plans those merges found by [`Meta::next_work`] that are still to be done.
    ///
    /// # Errors
    /// [`Stop::Away`], [`Stop::Expand`].
    pub fn plan_merges(&mut self, merge: &Merge) -> Step<Vec<MergePlan>> {
        let snapshot = self.try_snapshot(merge.snapshot);
        let due = snapshot.is_some_and(|s| {
            // While it waited a head may have become a snapshot, whose blocks it does not hold.
            let held = || self.snapshot(merge.child).space() == merge.lock;
            !s.live()
                && s.children.len() == 1
                && s.children.first() == Some(&merge.child.0)
                && held()
        });
        if due {
            self.use_snapshots(&[merge.snapshot, merge.child]);
        }
        let extents = if due { merge.extents.as_slice() } else { &[] };
        extents.iter().filter_map(|logical| self.plan_merge(merge, *logical).transpose()).collect()
    }

    /// Plans the merge of a volume extent, if both hold it.
    fn plan_merge(&mut self, at: &Merge, logical: u32) -> Step<Option<MergePlan>> {
        let of = |id| self.snapshot(id).layer.get(logical);
        let (Some(upper), Some(lower)) = (of(at.child), of(at.snapshot)) else { return Ok(None) };
        self.entries.need(upper)?;
        self.entries.need(lower)?;
        self.log_entry(upper);
        self.log_entry(lower);
        let (upper_data, mut upper_zero) =
            (self.entries.data_bits(upper)?, self.entries.zero_bits(upper)?);
        if sabotage::is(Bug::MergeIgnoresZeros) {
            upper_zero = Bits::default();
        }
        let hidden = upper_data.or(&upper_zero);
        let lower_data = self.entries.data_bits(lower)?.without(&hidden);
        let mut zero = self.entries.zero_bits(lower)?.without(&hidden).or(&upper_zero);
        if self.is_bottom(at.snapshot, at.child) {
            zero = Bits::default();
        }
        // The data that is fewer moves; what it lands on is visible to nobody: blocks the child
        // does not hold, or blocks of the deleted snapshot that the child hides.
        // Nothing is written to compressed blocks.
        let far = [upper, lower].map(|entry| self.entries.is_compressed(entry));
        let keep_upper = lower_data.is_empty()
            || (!upper_data.is_empty()
                && match far {
                    [false, false] => lower_data.count() <= upper_data.count(),
                    [true, true] => return Err(self.to_expand(upper)),
                    [_, lower_is] => lower_is,
                });
        let (target, freed, moving) =
            if keep_upper { (upper, lower, lower_data) } else { (lower, upper, upper_data) };
        let copies = moving
            .runs(self.blocks_per_extent())
            .map(|run| Copy {
                from: self.address(freed, run.start),
                to: self.address(target, run.start),
                length: u64::from(run.end - run.start) * BLOCK_BYTES,
                expands: self.entries.is_compressed(freed),
            })
            .collect();
        let data = lower_data.or(&upper_data);
        let (snapshot, child) = (at.snapshot, at.child);
        Ok(Some(MergePlan { snapshot, child, logical, target, freed, data, zero, copies }))
    }

    /// The copies of a plan have been written: makes the merge real.
    pub fn finish_merge(&mut self, plan: &MergePlan) {
        let MergePlan { snapshot, child, logical, .. } = *plan;
        self.entries.set_owner(plan.target, child.0);
        self.entries.set_bits(plan.target, &plan.data, &plan.zero);
        self.layer_mut(snapshot, logical..logical + 1).remove(logical);
        self.layer_mut(child, logical..logical + 1).insert(logical, plan.target);
        self.append_entry(plan.target);
        self.free_entry(plan.freed);
    }

    /// Steps of background work known to remain.
    pub fn work_remaining(&self) -> u64 {
        let ready = self.deleting.iter().map(|id| self.snapshot(SnapshotId(*id)));
        let steps = ready.filter(|s| self.is_ready(s));
        steps.map(|s| 1 + u64::from(s.layer.len()) + s.layer.runs.len() as u64).sum::<u64>()
            + u64::from(self.extents.unpunched())
    }

    /// Of those steps the ones for deleted snapshots of a volume.
    pub fn merging_remaining(&self, volume: VolumeId) -> u64 {
        let ready = self.deleting.iter().map(|id| self.snapshot(SnapshotId(*id)));
        let steps = ready.filter(|s| s.volume == volume && self.is_ready(s));
        steps.map(|s| 1 + u64::from(s.layer.len()) + s.layer.runs.len() as u64).sum()
    }

    /// Frees some entries of a deleted snapshot without children, and at last the snapshot.
    fn reclaim(&mut self, id: SnapshotId) {
        let most = sabotage::at_once(ENTRIES_PER_STEP as u32) as usize;
        let layer = &self.snapshot(id).layer;
        let some: Vec<_> = layer.iter().take(most).collect();
        for (logical, entry) in &some {
            self.layer_mut(id, *logical..*logical + 1).remove(*logical);
            self.free_entry(*entry);
        }
        for _ in some.len()..most {
            // Nothing looks through a deleted snapshot without children.
            let layer = self.layer_mut(id, 0..0);
            match layer.runs.pop_first().or_else(|| layer.lost.pop_first()) {
                Some((_, (_, spare))) => self.free_entry(spare),
                None => return self.unlink(id),
            }
        }
    }

    /// Hands entries to the child as far as it has none there; those its zero runs hide are freed.
    fn move_entries(&mut self, id: SnapshotId, child: SnapshotId) -> Step<()> {
        let most = self.entries_per_step(ENTRIES_PER_STEP);
        let layer = &self.snapshot(id).layer;
        let some: Vec<_> = layer.iter().take(most).collect();
        let last = some.last().map_or(0, |(last, _)| *last);
        for (at, (logical, entry)) in some.into_iter().enumerate() {
            let owner = &self.snapshot(child).layer;
            if owner.get(logical).is_some() {
                break;
            }
            match self.entries.need(entry) {
                Err(_) if at > 0 => break,
                needed => {
                    needed.map_err(|away| Stop::ahead(away, u64::from(last - logical) + 1))?
                }
            }
            let hidden = owner.in_run(logical) && !sabotage::is(Bug::MergeIgnoresZeros);
            self.layer_mut(id, logical..logical + 1).remove(logical);
            if hidden {
                self.free_entry(entry);
            } else {
                self.entries.set_owner(entry, child.0);
                self.layer_mut(child, logical..logical + 1).insert(logical, entry);
                if !self.log_entry(entry) {
                    self.append_entry(entry);
                }
            }
        }
        Ok(())
    }

    /// Whether below a deleted snapshot there is nothing, and never will be for its child: then
    /// zero marks say nothing.
    fn is_bottom(&self, id: SnapshotId, child: SnapshotId) -> bool {
        self.snapshot(id).parent.is_none() && !self.is_rebuilding(self.snapshot(child).volume)
    }

    /// Hands a zero run to the child, from its start on up to where the child has more entries than one step
    /// takes: marks zeros in those, then gives it that part of the run.
    fn merge_run(
        &mut self,
        id: SnapshotId,
        child: SnapshotId,
        extents: Range<u32>,
        spare: u32,
    ) -> Step<()> {
        if self.is_bottom(id, child) {
            self.layer_mut(id, extents.clone()).runs.remove(&extents.start);
            self.free_entry(spare);
            return Ok(());
        }
        let most = self.entries_per_step(ENTRIES_PER_STEP);
        let next = self.entries_in(child, &extents).nth(most);
        let part = extents.start..next.map_or(extents.end, |(logical, _)| logical);
        self.mark_zeros(child, &part)?;
        if part.end < extents.end {
            if self.add_run(child, part.clone(), None)? {
                return self.carve_runs(id, &part);
            }
            // No spare entry is left for a part: all of it is given at once.
            if self.mark_zeros(child, &extents)? > 0 {
                return Ok(());
            }
        }
        self.layer_mut(id, extents.clone()).runs.remove(&extents.start);
        let given = self.add_run(child, extents, Some(spare))?;
        assert!(given, "the donor is a spare");
        Ok(())
    }

    fn entries_in(
        &self,
        id: SnapshotId,
        extents: &Range<u32>,
    ) -> impl Iterator<Item = (u32, u32)> + use<'_> {
        let end = extents.end;
        let entries = self.snapshot(id).layer.iter_from(extents.start);
        entries.take_while(move |(logical, _)| *logical < end)
    }

    /// Makes absent blocks zeros in some entries of a layer that have any; in how many.
    fn mark_zeros(&mut self, id: SnapshotId, extents: &Range<u32>) -> Step<usize> {
        let all = self.all_blocks();
        let ahead = u64::from(extents.end - extents.start);
        let open: Vec<(u32, Bits)> = self
            .entries_in(id, extents)
            .map(|(_, entry)| Ok((entry, all.without(&self.entries.held_bits(entry)?))))
            .filter(|open| open.as_ref().map_or(true, |(_, absent)| !absent.is_empty()))
            .take(self.entries_per_step(ENTRIES_PER_STEP))
            .collect::<Result<_, Away>>()
            .map_err(|away| Stop::ahead(away, ahead))?;
        for (entry, absent) in &open {
            // A write on its way may have made it: if the write fails, what is in no record goes.
            if !sabotage::is(Bug::MarkUnrecorded) {
                self.log_entry(*entry);
            }
            self.fill_all(*entry, absent, FillState::Zero);
        }
        Ok(open.len())
    }
}
