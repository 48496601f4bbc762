//! Extent and spare entries: those that cannot be, those that two claim, and the marks of what is
//! lost.

use super::{Doubt, Mender};
use crate::format::RegionKind;
use crate::format::slots::{SNAPSHOT_DELETED, VOLUME_REBUILDING};
use crate::info::RepairKind;
use crate::limits::{EXTENT_MIN_BYTES, VOLUME_MAX_BYTES};
use crate::meta::entries::SPARE_BASE;
use crate::meta::load::prove::place_of;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Spare entries of a layer's runs, and what they cover.
type Runs = BTreeMap<u32, Vec<(Range<u32>, u32)>>;

impl Mender<'_> {
    /// Volume extents that a volume can have.
    fn most(&self) -> u64 {
        VOLUME_MAX_BYTES / EXTENT_MIN_BYTES.max(self.loader.geometry.extent_bytes)
    }

    /// Entries that made no sense: what they said of their place is all that is known of them.
    pub(super) fn unread_entries(&mut self) {
        for (region, index, header) in std::mem::take(&mut self.loader.unread.entries) {
            let (owner, logical) = (header.snapshot.get(), header.logical.get());
            let end = u64::from(logical) + u64::from(header.run.get().max(1));
            let text = if !self.is_used(owner) {
                self.doubt_every_layer(&Doubt::All);
                "an impossible entry is dropped; whose it was is not known".to_owned()
            } else if end > self.most() {
                self.doubts.insert(owner, Doubt::All);
                format!("an impossible entry of snapshot {owner} is dropped; which part is lost")
            } else {
                self.doubt(owner, logical..end as u32);
                format!(
                    "an impossible entry is dropped: extents {logical} to {} of snapshot {owner} are \
                     lost",
                    end - 1
                )
            };
            self.step(RepairKind::Lost, region, Some(index), text);
        }
    }

    /// Entries that are intact by themselves: their owners and places.
    pub(super) fn claims(&mut self) {
        let ids: Vec<u32> = self.loader.entries.used().collect();
        let mut claims = Vec::new();
        let mut runs = Runs::new();
        for id in ids {
            let Some((owner, logical)) = self.place(id) else { continue };
            match self.loader.entries.run(id) {
                0 => claims.push((owner, logical, id)),
                run => runs.entry(owner).or_default().push((logical..logical + run, id)),
            }
        }
        claims.sort_unstable();
        for claimants in claims.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            if let [(owner, logical, _), _, ..] = claimants {
                claimants.iter().for_each(|(_, _, id)| self.loader.entries.release(*id));
                self.doubt(*owner, *logical..*logical + 1);
                let (region, index) = place_of(claimants[0].2);
                let text = format!(
                    "{} entries claim extent {logical} of snapshot {owner}: none is believed, and \
                     the extent is lost",
                    claimants.len()
                );
                self.step(RepairKind::Lost, region, Some(index), text);
            }
        }
        for (owner, mut runs) in runs {
            runs.sort_unstable_by_key(|(extents, id)| (extents.start, *id));
            self.part_runs(owner, &runs);
        }
    }

    /// Where an entry belongs; frees it if that is nowhere.
    fn place(&mut self, id: u32) -> Option<(u32, u32)> {
        let (owner, logical) = self.loader.entries.owner(id)?;
        let (region, index) = place_of(id);
        let end = u64::from(logical) + u64::from(self.loader.entries.run(id));
        let (kind, text) = if !self.is_used(owner) {
            (RepairKind::Freed, format!("snapshot {owner} does not exist: its entry is freed"))
        } else if region == RegionKind::Extents && id >= self.loader.geometry.data_extents() {
            self.doubt(owner, logical..logical.saturating_add(1));
            let text = format!(
                "an extent behind the data region: extent {logical} of snapshot {owner} is lost"
            );
            (RepairKind::Lost, text)
        } else if end > self.most() {
            self.doubts.insert(owner, Doubt::All);
            let text = format!(
                "an entry of snapshot {owner} behind the end of any volume is dropped; which part is \
                 lost is not known"
            );
            (RepairKind::Lost, text)
        } else {
            return Some((owner, logical));
        };
        self.loader.entries.release(id);
        self.step(kind, region, Some(index), text);
        None
    }

    /// Runs that overlap: none of them is believed.
    fn part_runs(&mut self, owner: u32, runs: &[(Range<u32>, u32)]) {
        let mut end = 0;
        let mut clusters: Vec<Vec<&(Range<u32>, u32)>> = Vec::new();
        for run in runs {
            match clusters.last_mut() {
                Some(cluster) if run.0.start < end => cluster.push(run),
                _ => clusters.push(vec![run]),
            }
            end = end.max(run.0.end);
        }
        for cluster in clusters.into_iter().filter(|cluster| cluster.len() > 1) {
            for (extents, id) in &cluster {
                self.loader.entries.release(*id);
                self.doubt(owner, extents.clone());
            }
            let (region, index) = place_of(cluster[0].1);
            let text = format!(
                "{} runs of snapshot {owner} overlap: none is believed, and what they cover is lost",
                cluster.len()
            );
            self.step(RepairKind::Lost, region, Some(index), text);
        }
    }

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
        let used: BTreeSet<u32> =
            (1..=self.loader.snapshots.len() as u32).filter(|id| self.is_used(*id)).collect();
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
            self.lay(id, &doubt, ranges, runs.remove(&id).unwrap_or_default());
            if self.refused {
                return;
            }
        }
    }

    fn is_plain_root(&self, id: u32) -> bool {
        let slot = &self.loader.snapshots[id as usize - 1];
        let volume = self.loader.volumes.get((slot.volume.get() as usize).wrapping_sub(1));
        let rebuilding = volume.is_some_and(|v| v.flags.get() & VOLUME_REBUILDING != 0);
        slot.parent.get() == 0 && !rebuilding && !self.loader.has_lost
    }

    /// Lays the runs of a layer anew, with those of what is lost.
    fn lay(
        &mut self,
        owner: u32,
        doubt: &Doubt,
        ranges: Vec<Range<u32>>,
        old: Vec<(Range<u32>, u32)>,
    ) {
        let size = self.loader.snapshots[owner as usize - 1].size.get();
        let extent = self.loader.geometry.extent_bytes;
        let all = 0..size.div_ceil(extent).min(self.most()) as u32;
        let (mut lost, mut zero) = (ranges, Vec::new());
        for (extents, spare) in &old {
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
        for (extents, is_lost) in without(&zero, &lost)
            .into_iter()
            .map(|e| (e, false))
            .chain(lost.iter().map(|extents| (extents.clone(), true)))
        {
            let Some(spare) = self.free_spare() else { return };
            let length = extents.end - extents.start;
            self.assign(spare, owner, extents.start, length, is_lost);
        }
        let slot = &self.loader.snapshots[owner as usize - 1];
        if slot.flags.get() & SNAPSHOT_DELETED == 0 || doubt != &Doubt::All {
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
