//! Who holds how much, what a volume looks like as ranges, and where two points differ.

use super::entries::{Away, Bits, SPARE_BASE};
pub use super::ranges::Ranges;
use super::view::{LOST, Layers, source_of};
use super::{Meta, Snapshot, Step, Stop};
use crate::info::{RangeState, Usage};
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::cmp::Ordering;
use std::collections::HashSet;
use std::ops::Range;

/// What volume extents show of which no layer has an entry.
#[derive(Clone, Copy)]
enum Shown {
    /// No layer says anything.
    Hole,
    /// The topmost that says something says zeros.
    Zero,
    /// It says that its content is lost, or in the file of a base.
    Below(u32),
}

impl Shown {
    /// As maps tell it. Whoever is told of data reads it, and learns if it cannot be had.
    fn state(self) -> RangeState {
        match self {
            Self::Hole => RangeState::Hole,
            Self::Zero => RangeState::Zero,
            Self::Below(_) => RangeState::Data,
        }
    }

    /// As [`Meta::source`] tells it.
    fn source(self) -> Option<u32> {
        match self {
            Self::Below(source) => Some(source),
            Self::Hole | Self::Zero => None,
        }
    }
}

/// Layers to ask, extent by extent, before the metadata is somebody else's again: well below a millisecond.
const LAYERS_PER_HOLD: u64 = 4096;

impl Meta {
    /// Adds to `usage` the space of a snapshot, or of a head seen with its volume's snapshots, from a
    /// volume extent on, until much has been looked at; where the rest begins.
    ///
    /// # Errors
    /// [`Stop::Away`]: nothing was added.
    pub fn usage_step(&self, id: SnapshotId, first: u32, usage: &mut Usage) -> Step<Option<u32>> {
        let snapshot = self.snapshot(id);
        let scope = if snapshot.head() { Scope::Volume(snapshot.volume) } else { Scope::One(id) };
        let mut next = first;
        let (depth, mut looks) = (self.depth(id), 0);
        while looks < LAYERS_PER_HOLD {
            looks += depth;
            let Some(logical) = self.next_entry(id, next) else {
                let own = u64::from(snapshot.layer.extents());
                let (allocated, more) = match scope {
                    Scope::One(_) if snapshot.children.is_empty() => (own, own),
                    Scope::One(_) => (own, 0),
                    Scope::Volume(volume) => self.volume_extents(volume),
                };
                usage.allocated = allocated * self.geometry.extent_bytes;
                usage.reclaimable += more * self.geometry.extent_bytes;
                return Ok(None);
            };
            let found = self.visible(id, logical, scope, &mut looks);
            let found = found.and_then(|seen| Ok((seen, self.merge_frees(scope, logical)?)));
            let ((all, alone), is_freed) = match found {
                Err(_) if next > first => break,
                found => found.map_err(|away| Stop::ahead(away, self.extents_per_hold(id)))?,
            };
            if is_freed {
                usage.reclaimable += self.geometry.extent_bytes;
            }
            usage.referenced += u64::from(all) * BLOCK_BYTES;
            usage.exclusive += u64::from(alone) * BLOCK_BYTES;
            usage.shared += u64::from(all - alone) * BLOCK_BYTES;
            next = logical + 1;
        }
        Ok(Some(next))
    }

    /// The first volume extent from `logical` on for which a layer of the chain has an entry.
    pub(super) fn next_entry(&self, id: SnapshotId, logical: u32) -> Option<u32> {
        let first = |at| self.snapshot(at).layer.iter_from(logical).next().map(|item| item.0);
        self.chain(id).filter_map(first).min()
    }

    /// Number of layers from a snapshot to its root.
    pub fn depth(&self, id: SnapshotId) -> u64 {
        self.chain(id).count() as u64
    }

    /// A snapshot and its ancestors.
    pub fn chain(&self, id: SnapshotId) -> impl Iterator<Item = SnapshotId> {
        let first = (!id.is_none()).then_some(id);
        std::iter::successors(first, |at| {
            let parent = self.snapshot(*at).parent;
            (!parent.is_none()).then_some(parent)
        })
    }

    /// Adds the map of blocks of a snapshot to `ranges` until these are full or much has been looked at;
    /// where the rest begins.
    ///
    /// # Errors
    /// [`Stop::Away`]: nothing was added.
    pub fn map_step(&self, id: SnapshotId, blocks: Range<u64>, ranges: &mut Ranges) -> Step<u64> {
        let per_extent = u64::from(self.blocks_per_extent());
        let mut next = blocks.start;
        for _ in 0..self.extents_per_hold(id) {
            if next >= blocks.end || ranges.full() {
                break;
            }
            let logical = (next / per_extent) as u32;
            let uniform = self.uniform(id, logical, ranges.with_file);
            let end = uniform.map_or(logical + 1, |(_, end)| end);
            let end = blocks.end.min(u64::from(end) * per_extent);
            match uniform {
                Some((shown, _)) => ranges.push(next..end, shown.state()),
                None => match self.map_extent_of(id, logical, next..end, ranges) {
                    Err(_) if next > blocks.start => break,
                    mapped => mapped
                        .map_err(|away| self.ahead(away, &blocks, self.extents_per_hold(id)))?,
                },
            }
            next = end;
        }
        Ok(next)
    }

    /// What a snapshot shows at a volume extent if no layer has an entry for it, and the first one behind
    /// at which that may be something else. Runs may be as long as the largest volume: nobody looks at
    /// their extents one by one.
    fn uniform(&self, id: SnapshotId, logical: u32, with_file: bool) -> Option<(Shown, u32)> {
        let mut shown = Shown::Hole;
        let (mut layers, mut end_of_file) = (0, None);
        for at in self.chain(id) {
            let snapshot = self.snapshot(at);
            let layer = &snapshot.layer;
            layers += 1;
            if layer.get(logical).is_some() {
                return None;
            }
            if layer.in_run(logical) {
                shown = Shown::Zero;
                break;
            }
            if layer.in_lost(logical) {
                shown = Shown::Below(LOST);
                break;
            }
            if snapshot.backed() && with_file {
                // An extent that the file ends in is looked at by blocks.
                let whole = (snapshot.size / self.geometry.extent_bytes) as u32;
                if logical < whole {
                    (shown, end_of_file) = (Shown::Below(source_of(at)), Some(whole));
                } else if snapshot.size > u64::from(logical) * self.geometry.extent_bytes {
                    return None;
                }
                break;
            }
        }
        let change = |at| self.snapshot(at).layer.next_change(logical);
        let end = self.chain(id).take(layers).filter_map(change).chain(end_of_file).min();
        Some((shown, end.unwrap_or(u32::MAX)))
    }

    /// Adds blocks of one volume extent at which the chain holds something.
    fn map_extent_of(
        &self,
        id: SnapshotId,
        logical: u32,
        blocks: Range<u64>,
        ranges: &mut Ranges,
    ) -> Result<(), Away> {
        let layers = self.chain(id).filter(|at| ranges.with_file || !self.snapshot(*at).backed());
        let (data, zero) = self.states_in(layers, logical)?;
        let every = self.all_blocks();
        if every.without(&data).is_empty() {
            ranges.push(blocks, RangeState::Data);
            return Ok(());
        }
        if every.without(&zero).is_empty() {
            ranges.push(blocks, RangeState::Zero);
            return Ok(());
        }
        let base = u64::from(logical) * u64::from(self.blocks_per_extent());
        for block in blocks {
            let at = (block - base) as u32;
            let state = if data.has(at) {
                RangeState::Data
            } else if zero.has(at) {
                RangeState::Zero
            } else {
                RangeState::Hole
            };
            ranges.push(block..block + 1, state);
        }
        Ok(())
    }

    /// Stops a walk over these blocks that looks at so many extents, `most` at most.
    pub(super) fn ahead(&self, away: Away, blocks: &Range<u64>, most: u64) -> Stop {
        let extents = (blocks.end - blocks.start).div_ceil(u64::from(self.blocks_per_extent()));
        Stop::ahead(away, extents.min(most))
    }

    /// Extents to look at before others get the metadata: fewer of long chains, of which each layer is
    /// asked.
    pub(super) fn extents_per_hold(&self, id: SnapshotId) -> u64 {
        (LAYERS_PER_HOLD / self.depth(id).max(1)).max(1)
    }

    /// Adds blocks of `to` whose content may differ from `from` (an empty volume if `None`), until `ranges`
    /// are full or much has been looked at; where the rest begins.
    ///
    /// # Errors
    /// [`Stop::Away`]: nothing was added.
    pub fn diff_step(
        &self,
        from: Option<SnapshotId>,
        to: SnapshotId,
        blocks: Range<u64>,
        ranges: &mut Ranges,
    ) -> Step<u64> {
        let per_extent = u64::from(self.blocks_per_extent());
        let mut next = blocks.start;
        // Behind its end the shorter one has nothing, whatever its layers still hold there. The
        // block it ends in is told apart by no layer.
        let from_end = match from.map(|id| self.snapshot(id).size) {
            Some(size) if size < self.snapshot(to).size => size / BLOCK_BYTES,
            _ => u64::MAX,
        };
        type Source = Option<u32>;
        let tell = |ranges: &mut Ranges, blocks: Range<u64>, source: Source, before: Source| {
            let differs = match blocks.start.cmp(&from_end) {
                // What is lost is not known to be the same, and reading it says so.
                Ordering::Less => source != before || source == Some(LOST),
                Ordering::Equal => source.is_some() || before.is_some(),
                Ordering::Greater => source.is_some(),
            };
            if differs && !blocks.is_empty() {
                let state = if source.is_some() { RangeState::Data } else { RangeState::Zero };
                ranges.push(blocks, state);
            }
        };
        let holds = from.into_iter().chain([to]).map(|id| self.extents_per_hold(id)).min();
        for _ in 0..holds.unwrap_or(1) {
            if next >= blocks.end || ranges.full() {
                break;
            }
            let logical = (next / per_extent) as u32;
            let before =
                from.map_or(Some((Shown::Hole, u32::MAX)), |id| self.uniform(id, logical, true));
            if let (Some((old, old_end)), Some((new, new_end))) =
                (before, self.uniform(to, logical, true))
            {
                let end = blocks.end.min(u64::from(old_end.min(new_end)) * per_extent);
                // The block that the shorter one ends in is one of its own.
                let borders = [next, from_end, from_end.saturating_add(1), end];
                for pair in borders.map(|at| at.clamp(next, end)).windows(2) {
                    tell(ranges, pair[0]..pair[1], new.source(), old.source());
                }
                next = end;
                continue;
            }
            let base = u64::from(logical) * per_extent;
            let old = from.map_or(Ok(Layers::default()), |id| self.resolve(id, logical));
            let (old, new) = match old.and_then(|old| Ok((old, self.resolve(to, logical)?))) {
                Err(_) if next > blocks.start => break,
                both => {
                    both.map_err(|away| self.ahead(away, &blocks, self.extents_per_hold(to)))?
                }
            };
            for block in next..blocks.end.min(base + per_extent) {
                let at = (block - base) as u32;
                let source = |layers| -> Result<_, Away> {
                    Ok(self.source(layers, at)?.filter(|at| !self.is_behind(*at, block)))
                };
                // What was resolved is in memory.
                let (new, old) = (source(&new)?, source(&old)?);
                tell(ranges, block..block + 1, new, old);
            }
            next = base + per_extent;
        }
        Ok(next.min(blocks.end))
    }

    /// The first volume extent from `logical` on at which the chain holds anything.
    pub(super) fn next_held(&self, id: SnapshotId, logical: u32) -> Option<u32> {
        self.chain(id)
            .filter_map(|at| {
                let layer = &self.snapshot(at).layer;
                let in_file = || !self.held_in_file(at, logical).is_empty();
                if layer.in_run(logical) || layer.in_lost(logical) || in_file() {
                    return Some(logical);
                }
                let entry = layer.iter_from(logical).next().map(|item| item.0);
                let run = layer.runs.range(logical..).next().map(|item| *item.0);
                let lost = layer.lost.range(logical..).next().map(|item| *item.0);
                entry.into_iter().chain(run).chain(lost).min()
            })
            .min()
    }

    /// Data and explicit zeros of a volume extent as a snapshot shows it.
    pub(super) fn states(&self, id: SnapshotId, logical: u32) -> Result<(Bits, Bits), Away> {
        self.states_in(self.chain(id), logical)
    }

    /// Data and explicit zeros of a volume extent as these layers, topmost first, show it.
    pub(super) fn states_in(
        &self,
        layers: impl Iterator<Item = SnapshotId>,
        logical: u32,
    ) -> Result<(Bits, Bits), Away> {
        let mut open = self.all_blocks();
        let (mut data, mut zero) = (Bits::default(), Bits::default());
        for at in layers {
            let (held_data, held_zero) = self.held(at, logical)?;
            data = data.or(&held_data.and(&open));
            zero = zero.or(&held_zero.and(&open));
            open = open.without(&held_data).without(&held_zero);
            if open.is_empty() {
                break;
            }
        }
        Ok((data, zero))
    }

    /// Data and zeros of one layer at a volume extent.
    pub(super) fn held(&self, id: SnapshotId, logical: u32) -> Result<(Bits, Bits), Away> {
        let layer = &self.snapshot(id).layer;
        Ok(match layer.get(logical) {
            Some(entry) => (self.entries.data_bits(entry)?, self.entries.zero_bits(entry)?),
            None if layer.in_run(logical) => (Bits::default(), self.all_blocks()),
            // Whoever is told of data reads it, and learns that it cannot be had.
            None if layer.in_lost(logical) => (self.all_blocks(), Bits::default()),
            None => (self.held_in_file(id, logical), Bits::default()),
        })
    }

    pub(super) fn all_blocks(&self) -> Bits {
        Bits::range(&(0..self.blocks_per_extent()))
    }

    /// Data blocks of a volume extent that a snapshot shows, and those nothing else shows. The layers that are asked add to
    /// `looks`: beside many clones these are many.
    fn visible(
        &self,
        id: SnapshotId,
        logical: u32,
        scope: Scope,
        looks: &mut u64,
    ) -> Result<(u32, u32), Away> {
        let mut open = self.all_blocks();
        let mut elsewhere = Bits::default();
        let (mut all, mut alone) = (0, 0);
        let mut below = SnapshotId::NONE;
        for at in self.chain(id) {
            let snapshot = self.snapshot(at);
            if snapshot.backed() {
                // What is in a file takes no space here.
                break;
            }
            if scope.counts(at, snapshot) {
                elsewhere = self.all_blocks();
            }
            for child in snapshot.children.iter().filter(|child| **child != below.0) {
                let asked = open.without(&elsewhere);
                if asked.is_empty() {
                    break;
                }
                let seen = self.seen(SnapshotId(*child), logical, asked, scope, looks)?;
                elsewhere = elsewhere.or(&seen);
            }
            let (data, zero) = self.held(at, logical)?;
            let shown = data.and(&open);
            all += shown.count();
            alone += shown.without(&elsewhere).count();
            open = open.without(&data).without(&zero);
            if open.is_empty() {
                break;
            }
            below = at;
        }
        Ok((all, alone))
    }

    /// Which of a parent's blocks are seen through a child by anything that counts. With a stack
    /// of its own: chains are as long as the snapshot table.
    fn seen(
        &self,
        id: SnapshotId,
        logical: u32,
        blocks: Bits,
        scope: Scope,
        looks: &mut u64,
    ) -> Result<Bits, Away> {
        let mut seen = Bits::default();
        let mut open = vec![(id, blocks)];
        while let Some((id, blocks)) = open.pop() {
            *looks += 1;
            let snapshot = self.snapshot(id);
            let (data, zero) = self.held(id, logical)?;
            let left = blocks.without(&data).without(&zero).without(&seen);
            if left.is_empty() {
                continue;
            }
            if scope.counts(id, snapshot) {
                seen = seen.or(&left);
            } else {
                open.extend(snapshot.children.iter().map(|child| (SnapshotId(*child), left)));
            }
        }
        Ok(seen)
    }

    /// Whether an extent is freed at a volume extent when a snapshot is merged into its only child.
    fn merge_frees(&self, scope: Scope, logical: u32) -> Result<bool, Away> {
        let Scope::One(id) = scope else { return Ok(false) };
        let snapshot = self.snapshot(id);
        let Some(entry) = snapshot.layer.get(logical).filter(|entry| *entry < SPARE_BASE) else {
            return Ok(false);
        };
        let mut children = snapshot.children.iter();
        let (Some(child), None) = (children.next(), children.next()) else { return Ok(false) };
        let child = self.snapshot(SnapshotId(*child));
        Ok(match child.layer.get(logical) {
            None => child.layer.in_run(logical),
            Some(upper) if upper < SPARE_BASE => true,
            Some(upper) => {
                let data = self.entries.data_bits(entry)?;
                data.without(&self.entries.zero_bits(upper)?).is_empty()
            }
        })
    }

    /// Extents of a volume's layers, and those whose layers no other volume builds on.
    fn volume_extents(&self, volume: VolumeId) -> (u64, u64) {
        let of_it = || self.snapshots().filter(|(_, snapshot)| snapshot.volume == volume);
        let is_foreign = |child: &u32| self.snapshot(SnapshotId(*child)).volume != volume;
        // Upwards, and each once: seen from above, a chain would be walked for each of its snapshots.
        let mut built_on = HashSet::new();
        for (id, _) in of_it().filter(|(_, snapshot)| snapshot.children.iter().any(is_foreign)) {
            let above = self.chain(id).take_while(|at| self.snapshot(*at).volume == volume);
            for at in above {
                if !built_on.insert(at.0) {
                    break;
                }
            }
        }
        let (mut allocated, mut reclaimable) = (0, 0);
        for (id, snapshot) in of_it() {
            let extents = u64::from(snapshot.layer.extents());
            allocated += extents;
            if !built_on.contains(&id.0) {
                reclaimable += extents;
            }
        }
        (allocated, reclaimable)
    }

    pub(super) fn foreign_below(&self, snapshot: &Snapshot, volume: VolumeId) -> bool {
        let mut stack: Vec<_> = snapshot.children.iter().copied().collect();
        while let Some(id) = stack.pop() {
            let child = self.snapshot(SnapshotId(id));
            if child.volume != volume {
                return true;
            }
            stack.extend(&child.children);
        }
        false
    }
}

/// What "elsewhere" means when asking who else shows a block.
#[derive(Debug, Clone, Copy)]
enum Scope {
    /// Any other volume or snapshot.
    One(SnapshotId),
    /// Anything of another volume.
    Volume(VolumeId),
}

impl Scope {
    fn counts(self, id: SnapshotId, snapshot: &Snapshot) -> bool {
        snapshot.live()
            && match self {
                Self::One(own) => id != own,
                Self::Volume(own) => snapshot.volume != own,
            }
    }
}
