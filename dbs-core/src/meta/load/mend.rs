//! Mending what was loaded of a damaged store, without inventing anything: what two places say is
//! taken from the one that is good, what nothing says any more is marked as lost, so that reading
//! it fails. `finish` proves the outcome as it proves what was read off any store.
//!
//! Two marks say "lost". A *lost run* in a layer: what the layer held at these volume extents is
//! not known; entries there are right all the same, and hide it. The *void*, a deleted snapshot with
//! a lost run over everything, is the parent of what had a parent that is not known.

mod doubts;
mod entries;
mod families;
mod slots;
mod tree;

use super::{Loader, faults};
use crate::format::RegionKind;
use crate::format::geometry::LABEL_BLOCKS;
use crate::format::slots::{SNAPSHOT_DELETED, SNAPSHOT_LABELLED, SnapshotSlot};
use crate::info::{RepairKind, RepairStep};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use zerocopy::FromZeros;

/// Steps reported one by one; a hostile image has any number.
const STEPS_MAX: usize = if cfg!(test) { 12 } else { 10_000 };

/// What a repair may do beyond what costs nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Permit {
    /// Go back to the state before the first commit group that cannot be read.
    pub lose_journal: bool,
}

/// What is not known of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Doubt {
    /// What it held where no entry is left.
    All,
    /// As that, but its zero runs are right.
    AllButRuns,
    /// What it held at these volume extents.
    Some(Vec<Range<u32>>),
}

/// A repair in progress.
struct Mender<'a> {
    loader: &'a mut Loader,
    steps: Vec<RepairStep>,
    /// By snapshot id.
    doubts: BTreeMap<u32, Doubt>,
    /// Snapshot ids whose parent is not known.
    orphans: BTreeSet<u32>,
    /// Slots in blocks that are lost.
    lost_slots: BTreeSet<u32>,
    /// Seeds identities.
    uuid: [u8; 16],
    /// The volume for snapshots of which nothing is known; 0 if there is none yet.
    orphanage: u32,
    /// What has to be made may be encrypted.
    makes_encrypted: bool,
    /// Who owns entries, and where the last one of each ends. A slot that is gone and owns some is not
    /// free.
    owners: BTreeMap<u32, u64>,
    /// No volume id below is free, no snapshot slot, and no spare entry.
    next_volume: u32,
    next_snapshot: u32,
    next_spare: u32,
    refused: bool,
}

impl Loader {
    /// Mends what can be mended; the steps say what was done, or what stands in the way. Then what
    /// is left may be proven by [`Loader::finish`], unless a step is refused. `uuid` is random: the
    /// identity of what has to be made is derived from it.
    pub fn mend(&mut self, permit: Permit, uuid: [u8; 16]) -> Vec<RepairStep> {
        let mut mender = Mender {
            loader: self,
            steps: Vec::new(),
            doubts: BTreeMap::new(),
            orphans: BTreeSet::new(),
            lost_slots: BTreeSet::new(),
            uuid,
            orphanage: 0,
            makes_encrypted: false,
            owners: BTreeMap::new(),
            next_volume: 1,
            next_snapshot: 0,
            next_spare: 0,
            refused: false,
        };
        mender.run(permit);
        let steps = mender.steps;
        self.findings.clear();
        (self.damaged, self.noted) = (0, 0);
        steps
    }
}

impl Mender<'_> {
    fn run(&mut self, permit: Permit) {
        self.journal(permit);
        self.copies();
        self.marks();
        self.blocks();
        if self.refused {
            return;
        }
        self.look_for_keys();
        self.volume_slots();
        self.snapshot_slots();
        self.missing_slots();
        self.missing_volumes();
        self.heads();
        self.parents();
        self.labels();
        self.unread_entries();
        self.claims();
        self.families();
        self.compressed();
        self.names();
        self.lay_void();
        self.lay_doubts();
    }

    fn step(&mut self, kind: RepairKind, region: RegionKind, index: Option<u32>, message: String) {
        let refused = kind == RepairKind::Refused;
        // The first one decides what becomes of all others.
        if self.steps.len() < STEPS_MAX || (refused && !self.refused) {
            self.steps.push(RepairStep {
                kind,
                region: region.name().to_owned(),
                index: index.map(u64::from),
                message,
            });
        }
        self.refused |= refused;
    }

    /// What the journal lost cannot be told from what it did not: it takes a permit.
    fn journal(&mut self, permit: Permit) {
        let Some((first, last)) = self.loader.unread.groups else { return };
        let groups = if first == last {
            format!("commit group {first}")
        } else {
            format!("commit groups {first} to {last}")
        };
        let (kind, text) = if permit.lose_journal {
            let text = "volumes go back to the group before, or to a later group where its \
                        metadata had been written back. Later writes may be missing in any \
                        volume, and space that was used again since may show the newer content. \
                        Check the content of all volumes";
            (RepairKind::Lost, format!("{groups} cannot be read: {text}"))
        } else {
            let text = "only `--lose-journal` goes back to the state before; what was written \
                        since is lost then";
            (RepairKind::Refused, format!("{groups} cannot be read: {text}"))
        };
        self.step(kind, RegionKind::Journal, None, text);
    }

    /// Copies that differ are written again.
    fn copies(&mut self) {
        let differ: Vec<_> =
            self.loader.trusted.iter().map(|(block, copy)| (*block, *copy)).collect();
        for ((region, index), copy) in differ {
            let lost = self.loader.unread.blocks.contains(&(region, index));
            if !lost && self.loader.last_session.is_none() {
                let text = format!("copy {} is written again from copy {copy}", 1 - copy);
                self.step(RepairKind::Mended, region, Some(index), text);
            }
        }
    }

    /// Marks that cannot be were taken for the regions' ends.
    fn marks(&mut self) {
        for region in std::mem::take(&mut self.loader.unread.marks) {
            let text = "the high-water mark is the region's end".to_owned();
            self.step(RepairKind::Mended, region, None, text);
        }
    }

    /// Blocks without a good copy: tells what is lost with each.
    fn blocks(&mut self) {
        let (mut runs, mut all) = (false, false);
        for (region, index) in self.loader.unread.blocks.clone() {
            let items = self.loader.geometry.items_per_block(region);
            let lost = faults::lost_block(region, index, items);
            if self.loader.unread.refused.contains(&(region, index)) {
                let text = format!(
                    "no good copy, and one that the device cannot read, which may be: without it {lost}. \
                     Try again; or copy all that can be read to another device, and repair that"
                );
                self.step(RepairKind::Refused, region, Some(index), text);
                continue;
            }
            let text = format!("no good copy: {lost}");
            self.step(RepairKind::Lost, region, Some(index), text);
            match region {
                RegionKind::Snapshots => self.lost_slots.extend(index * items..(index + 1) * items),
                RegionKind::Spares => runs = true,
                RegionKind::Extents => all = true,
                _ => {}
            }
            let mark = match region {
                RegionKind::Labels => continue,
                region => &mut self.loader.marks[region.mark()],
            };
            *mark = (*mark).max(index + 1);
        }
        if all {
            self.doubt_every_layer(&Doubt::All);
        } else if runs {
            self.doubt_every_layer(&Doubt::AllButRuns);
        }
    }

    /// Every layer that is known of, or will be: the mark is id 0.
    fn doubt_every_layer(&mut self, doubt: &Doubt) {
        let every = self.doubts.entry(0).or_insert_with(|| doubt.clone());
        if *doubt == Doubt::All {
            *every = Doubt::All;
        }
    }

    /// What a layer held at these volume extents is not known.
    fn doubt(&mut self, owner: u32, extents: Range<u32>) {
        match self.doubts.entry(owner).or_insert_with(|| Doubt::Some(Vec::new())) {
            Doubt::Some(ranges) => ranges.push(extents),
            Doubt::All | Doubt::AllButRuns => {}
        }
    }

    fn labels(&mut self) {
        for index in 0..self.loader.snapshots.len() as u32 {
            let slot = &self.loader.snapshots[index as usize];
            if slot.used != 1 || slot.flags.get() & SNAPSHOT_LABELLED == 0 {
                continue;
            }
            if self.loader.labels_of(index).is_some() {
                continue;
            }
            let slot = &mut self.loader.snapshots[index as usize];
            slot.flags = (slot.flags.get() & !SNAPSHOT_LABELLED).into();
            let text = format!("snapshot {}: its labels are lost", index + 1);
            self.step(RepairKind::Lost, RegionKind::Labels, Some(index * LABEL_BLOCKS), text);
        }
    }

    /// Gives those with an unknown parent one that says so: one for all that have the same key, or none.
    fn lay_void(&mut self) {
        let mut orphans = BTreeMap::<_, Vec<_>>::new();
        for id in std::mem::take(&mut self.orphans) {
            let family = self.loader.snapshots[id as usize - 1].family;
            orphans.entry(family).or_default().push(id);
        }
        orphans.into_iter().for_each(|(family, orphans)| self.lay_void_below(family, &orphans));
    }

    fn lay_void_below(&mut self, family: [u8; 16], orphans: &[u32]) {
        let size = |id: &u32| self.loader.snapshots[*id as usize - 1].size.get();
        let Some(size) = orphans.iter().map(size).max() else { return };
        let Some(void) = self.free_snapshot() else { return };
        let slot = SnapshotSlot {
            uuid: self.identity(void, b's'),
            size: size.into(),
            flags: SNAPSHOT_DELETED.into(),
            used: 1,
            family,
            ..SnapshotSlot::new_zeroed()
        };
        self.loader.set_snapshot(void - 1, slot);
        self.doubts.insert(void, Doubt::All);
        for id in orphans {
            self.loader.snapshots[*id as usize - 1].parent = void.into();
        }
    }

    /// A snapshot id that nothing uses; its slot is below the high-water mark then.
    fn free_snapshot(&mut self) -> Option<u32> {
        let used = |index: &u32| {
            self.loader.snapshots.get(*index as usize).is_some_and(|slot| slot.used != 0)
                || self.owners.contains_key(&(index + 1))
        };
        let mut all = self.next_snapshot..self.loader.geometry.snapshots;
        let free = all.find(|index| !used(index));
        let Some(index) = free else {
            let text = "the table is full: no slot is left for what has to be made";
            self.step(RepairKind::Refused, RegionKind::Snapshots, None, text.to_owned());
            return None;
        };
        self.next_snapshot = index + 1;
        self.raise_mark(RegionKind::Snapshots, index);
        self.loader.set_snapshot(index, SnapshotSlot::new_zeroed());
        Some(index + 1)
    }

    fn raise_mark(&mut self, region: RegionKind, index: u32) {
        let block = index / self.loader.geometry.items_per_block(region);
        let mark = &mut self.loader.marks[region.mark()];
        *mark = (*mark).max(block + 1);
    }

    /// An identity for what has to be made.
    fn identity(&self, id: u32, what: u8) -> [u8; 16] {
        let mut uuid = self.uuid;
        uuid[0] ^= what;
        for (byte, more) in uuid[8..12].iter_mut().zip(id.to_le_bytes()) {
            *byte ^= more;
        }
        // Version 4, as others are.
        uuid[6] = uuid[6] & 0x0f | 0x40;
        uuid[8] = uuid[8] & 0x3f | 0x80;
        uuid
    }

    fn is_used(&self, id: u32) -> bool {
        let index = (id as usize).wrapping_sub(1);
        self.loader.snapshots.get(index).is_some_and(|slot| slot.used == 1)
    }
}
