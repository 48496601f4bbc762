//! Extent and spare entries: those that cannot be, and those that two claim.

use super::doubts::Runs;
use super::{Doubt, Mender};
use crate::format::RegionKind;
use crate::info::RepairKind;
use crate::limits::{EXTENT_MIN_BYTES, VOLUME_MAX_BYTES};
use crate::meta::entries::SPARE_BASE;
use crate::meta::load::prove::place_of;
use std::ops::Range;

impl Mender<'_> {
    /// Volume extents that a volume can have.
    pub(super) fn most(&self) -> u64 {
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

    /// Extents that say they are compressed, and of what: nothing encrypted is. An old copy of the superblock may not tell
    /// of them.
    pub(super) fn compressed(&mut self) {
        let ids = self.loader.entries.used().take_while(|id| *id < SPARE_BASE);
        let all: Vec<u32> = ids.filter(|id| self.loader.entries.is_compressed(*id)).collect();
        for id in &all {
            let Some((owner, logical)) = self.loader.entries.owner(*id) else { continue };
            let slot = self.loader.snapshots.get((owner as usize).wrapping_sub(1));
            if slot.is_none_or(|slot| slot.family == [0; 16]) {
                continue;
            }
            self.loader.entries.release(*id);
            self.doubt(owner, logical..logical + 1);
            let text = format!(
                "compressed, of a layer that is encrypted: extent {logical} of snapshot {owner} is lost"
            );
            self.step(RepairKind::Lost, RegionKind::Extents, Some(*id), text);
        }
        if !all.is_empty() && !self.loader.has_compressed {
            self.loader.has_compressed = true;
            let text =
                "the superblock says from now on that there are compressed extents".to_owned();
            self.step(RepairKind::Mended, RegionKind::Extents, None, text);
        }
    }

    /// Where an entry belongs; frees it if that is nowhere.
    fn place(&mut self, id: u32) -> Option<(u32, u32)> {
        let (owner, logical) = self.loader.entries.owner(id)?;
        let (region, index) = place_of(id);
        let end = u64::from(logical) + u64::from(self.loader.entries.run(id).max(1));
        let (kind, text) = if !self.is_used(owner) {
            (RepairKind::Freed, format!("snapshot {owner} does not exist: its entry is freed"))
        } else if end > self.most() {
            // Before all that would mark such a place as lost: nothing could be proven of that.
            self.doubts.insert(owner, Doubt::All);
            let text = format!(
                "an entry of snapshot {owner} behind the end of any volume is dropped; which part is \
                 lost is not known"
            );
            (RepairKind::Lost, text)
        } else if region == RegionKind::Extents && id >= self.loader.geometry.data_extents() {
            self.doubt(owner, logical..end as u32);
            let text = format!(
                "an extent behind the data region: extent {logical} of snapshot {owner} is lost"
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
}
