//! The marks of what is lost: runs in the layers that lost it.

use super::{Doubt, Mender};
use crate::format::RegionKind;
use crate::format::slots::{SNAPSHOT_BACKED, SNAPSHOT_DELETED, VOLUME_REBUILDING};
use crate::info::RepairKind;
use crate::meta::entries::SPARE_BASE;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Spare entries of a layer's runs, and what they cover.
pub(super) type Runs = BTreeMap<u32, Vec<(Range<u32>, u32)>>;

/// The runs that a layer is to have.
struct Plan {
    owner: u32,
    doubt: Doubt,
    lost: Vec<Range<u32>>,
    zero: Vec<Range<u32>>,
}

impl Plan {
    fn runs(&self) -> usize {
        self.lost.len() + self.zero.len()
    }
}

impl Mender<'_> {
    /// Marks what is not known as lost.
    pub(super) fn lay_doubts(&mut self) {
        let doubts = std::mem::take(&mut self.doubts);
        let every = doubts.get(&0).cloned();
        let mut runs = Runs::new();
        for id in self.loader.entries.used().filter(|id| *id >= SPARE_BASE) {
            let (run, owner) = (self.loader.entries.run(id), self.loader.entries.owner(id));
            if let Some((owner, logical)) = owner.filter(|_| run != 0) {
                runs.entry(owner).or_default().push((logical..logical + run, id));
            }
        }
        // A base has no content here that could be lost.
        let used: BTreeSet<u32> = (1..=self.loader.snapshots.len() as u32)
            .filter(|id| self.is_used(*id) && !self.is_base(*id))
            .collect();
        let mut plans = Vec::new();
        for id in used {
            let own = doubts.get(&id);
            // Zeros and nothing are the same in a root; a run of what is lost is neither.
            let every =
                every.as_ref().filter(|every| **every == Doubt::All || !self.is_plain_root(id));
            let doubt = match (own, every) {
                (None, None) => continue,
                (Some(Doubt::All), _) | (_, Some(Doubt::All)) => Doubt::All,
                (Some(Doubt::AllButRuns), _) | (_, Some(Doubt::AllButRuns)) => Doubt::AllButRuns,
                _ => Doubt::Some(Vec::new()),
            };
            let ranges = match own {
                Some(Doubt::Some(ranges)) => ranges.clone(),
                _ => Vec::new(),
            };
            plans.push(self.plan(id, doubt, ranges, &runs.remove(&id).unwrap_or_default()));
        }
        self.join_what_does_not_fit(&mut plans);
        for plan in plans {
            self.lay(&plan);
            if self.refused {
                return;
            }
        }
    }

    fn is_base(&self, id: u32) -> bool {
        self.loader.snapshots[id as usize - 1].flags.get() & SNAPSHOT_BACKED != 0
    }

    fn is_plain_root(&self, id: u32) -> bool {
        let slot = &self.loader.snapshots[id as usize - 1];
        let volume = self.loader.volumes.get((slot.volume.get() as usize).wrapping_sub(1));
        let rebuilding = volume.is_some_and(|v| v.flags.get() & VOLUME_REBUILDING != 0);
        slot.parent.get() == 0 && !rebuilding && !self.loader.has_lost
    }

    /// Takes the runs of a layer away, and says which it is to have.
    fn plan(
        &mut self,
        owner: u32,
        doubt: Doubt,
        ranges: Vec<Range<u32>>,
        old: &[(Range<u32>, u32)],
    ) -> Plan {
        let size = self.loader.snapshots[owner as usize - 1].size.get();
        let extent = self.loader.geometry.extent_bytes;
        let all = 0..size.div_ceil(extent).min(self.most()) as u32;
        let (mut lost, mut zero) = (ranges, Vec::new());
        for (extents, spare) in old {
            let is_lost = self.loader.entries.is_lost(*spare);
            if is_lost { &mut lost } else { &mut zero }.push(extents.clone());
            self.loader.entries.release(*spare);
            self.next_spare = self.next_spare.min(*spare - SPARE_BASE);
        }
        match doubt {
            Doubt::All => {
                lost.push(all);
                zero.clear();
            }
            Doubt::AllButRuns => lost.extend(without(&[all], &zero)),
            Doubt::Some(_) => {}
        }
        let lost = union(lost);
        Plan { owner, doubt, zero: without(&zero, &lost), lost }
    }

    /// Where there are fewer spare entries than runs, runs of what is lost become one with what is between
    /// them: first those between which the layer has entries, which hide it, and little else.
    fn join_what_does_not_fit(&mut self, plans: &mut [Plan]) {
        let entries = &self.loader.entries;
        let in_use = entries.used().filter(|id| *id >= SPARE_BASE).count();
        let room = (self.loader.geometry.spares as usize).saturating_sub(in_use);
        let excess = plans.iter().map(Plan::runs).sum::<usize>().saturating_sub(room);
        if excess == 0 {
            return;
        }
        let mut held: BTreeMap<u32, Vec<u32>> =
            plans.iter().map(|plan| (plan.owner, Vec::new())).collect();
        for (owner, logical) in entries.used().filter_map(|id| entries.owner(id)) {
            held.entry(owner).and_modify(|held| held.push(logical));
        }
        held.values_mut().for_each(|held| held.sort_unstable());
        let mut gaps = Vec::new();
        for (at, plan) in plans.iter().enumerate() {
            let held = &held[&plan.owner];
            for (before, behind) in plan.lost.iter().zip(plan.lost.iter().skip(1)) {
                let gap = before.end..behind.start;
                let below = |end: u32| held.partition_point(|logical| *logical < end) as u32;
                let shown = below(gap.end) - below(gap.start);
                gaps.push(((gap.end - gap.start).saturating_sub(shown), at, gap));
            }
        }
        gaps.sort_unstable_by_key(|(cost, at, gap)| (*cost, *at, gap.start));
        gaps.truncate(excess);
        let mut costs = BTreeMap::new();
        for (cost, at, gap) in gaps {
            *costs.entry(at).or_insert(0) += u64::from(cost);
            plans[at].lost.push(gap);
        }
        for (at, cost) in costs {
            let plan = &mut plans[at];
            plan.lost = union(std::mem::take(&mut plan.lost));
            plan.zero = without(&plan.zero, &plan.lost);
            let text = format!(
                "snapshot {}: there are too few spare entries to mark each range that is lost: {cost} \
                 extents between them are lost with them",
                plan.owner
            );
            let index = Some(plan.owner - 1);
            self.step(RepairKind::Lost, RegionKind::Snapshots, index, text);
        }
    }

    /// Gives a layer its runs.
    fn lay(&mut self, plan: &Plan) {
        let Plan { owner, doubt, lost, zero } = plan;
        let zero = zero.iter().map(|extents| (extents, false));
        for (extents, is_lost) in zero.chain(lost.iter().map(|extents| (extents, true))) {
            let Some(spare) = self.free_spare() else { return };
            let length = extents.end - extents.start;
            self.assign(spare, *owner, extents.start, length, is_lost);
        }
        let slot = &self.loader.snapshots[*owner as usize - 1];
        if slot.flags.get() & SNAPSHOT_DELETED == 0 || *doubt != Doubt::All {
            let what = match doubt {
                Doubt::All => "of what it held itself, only extents that have an entry are known",
                Doubt::AllButRuns => {
                    "of what it held itself, only extents with entry or run are known"
                }
                Doubt::Some(_) => "some extents of what it held itself are not known",
            };
            let text = format!("snapshot {owner}: {what}: reading the others fails from now on");
            self.step(RepairKind::Lost, RegionKind::Snapshots, Some(owner - 1), text);
        }
    }

    fn assign(&mut self, spare: u32, owner: u32, start: u32, length: u32, lost: bool) {
        let entries = &mut self.loader.entries;
        if lost {
            entries.assign_lost(spare, owner, start, length);
        } else {
            entries.assign_run(spare, owner, start, length);
        }
    }

    fn free_spare(&mut self) -> Option<u32> {
        let free = (self.next_spare..self.loader.geometry.spares)
            .find(|index| self.loader.entries.owner(SPARE_BASE + index).is_none());
        let Some(index) = free else {
            let text = "no spare entry is left to mark what is lost";
            self.step(RepairKind::Refused, RegionKind::Spares, None, text.to_owned());
            return None;
        };
        self.next_spare = index + 1;
        self.raise_mark(RegionKind::Spares, index);
        Some(SPARE_BASE + index)
    }
}

/// Ranges in order, joined where they touch, without empty ones.
fn union(mut ranges: Vec<Range<u32>>) -> Vec<Range<u32>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u32>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// What of `ranges` is not in `others`.
fn without(ranges: &[Range<u32>], others: &[Range<u32>]) -> Vec<Range<u32>> {
    let others = union(others.to_vec());
    let mut left = Vec::new();
    for range in ranges {
        let mut start = range.start;
        let first = others.partition_point(|other| other.end <= range.start);
        for other in others[first..].iter().take_while(|other| other.start < range.end) {
            if other.start > start {
                left.push(start..other.start);
            }
            start = start.max(other.end);
        }
        if start < range.end {
            left.push(start..range.end);
        }
    }
    left
}
