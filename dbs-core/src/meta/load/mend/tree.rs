//! Heads and parents.

use super::Mender;
use crate::format::RegionKind;
use crate::format::slots::{self, SNAPSHOT_DELETED, SNAPSHOT_HEAD, SnapshotSlot, VolumeSlot};
use crate::info::RepairKind;
use crate::meta::load::faults;
use std::collections::BTreeSet;
use zerocopy::FromZeros;

impl Mender<'_> {
    /// Gives every volume its head, and every head its volume.
    pub(super) fn heads(&mut self) {
        for index in 0..self.loader.volumes.len() as u32 {
            if self.loader.volumes[index as usize] != VolumeSlot::new_zeroed() {
                self.head_of(index + 1);
            }
        }
        let heads: BTreeSet<u32> = self.loader.volumes.iter().map(|v| v.head.get()).collect();
        for index in 0..self.loader.snapshots.len() {
            let slot = &mut self.loader.snapshots[index];
            let id = index as u32 + 1;
            if slot.used != 1 || slot.flags.get() & SNAPSHOT_HEAD == 0 || heads.contains(&id) {
                continue;
            }
            let name = format!("repaired-{id}");
            slot.flags = (slot.flags.get() & !SNAPSHOT_HEAD).into();
            (slot.name, slot.name_bytes) = slots::encode_name(&name);
            let text = format!("snapshot {id}, a head of no volume, is `{name}` of its volume now");
            self.step(RepairKind::Renamed, RegionKind::Snapshots, Some(id - 1), text);
        }
        // What builds on a head does so by mistake: what it builds on is not known.
        for index in 0..self.loader.snapshots.len() as u32 {
            let slot = &self.loader.snapshots[index as usize];
            let parent = slot.parent.get();
            if slot.used == 1 && parent != 0 && parent != index + 1 && heads.contains(&parent) {
                self.lose_parent(index + 1, "is a head");
            }
        }
    }

    pub(super) fn lose_parent(&mut self, id: u32, why: &str) {
        let parent = self.loader.snapshots[id as usize - 1].parent.get();
        self.orphans.insert(id);
        let text =
            format!("snapshot {id}: its parent, {parent}, {why}: what it shows of others is lost");
        self.step(RepairKind::Lost, RegionKind::Snapshots, Some(id - 1), text);
    }

    fn head_of(&mut self, volume: u32) {
        let head = self.loader.volumes[volume as usize - 1].head.get();
        let slot = self.loader.snapshots.get((head as usize).wrapping_sub(1)).copied();
        let slot = slot.filter(|slot| slot.used == 1 && slot.flags.get() & SNAPSHOT_DELETED == 0);
        let is_head = slot.is_some_and(|slot| slot.flags.get() & SNAPSHOT_HEAD != 0);
        let owner = slot.map_or(0, |slot| slot.volume.get());
        if is_head && owner == volume {
            return self.same_size(volume, head);
        }
        let mut strays = self.strays(volume).into_iter();
        let (chosen, text) = if let (Some(stray), None) = (strays.next(), strays.next()) {
            (stray, "the only head that says it is of it".to_owned())
        } else if is_head && !self.is_head_of(head, owner) {
            self.loader.snapshots[head as usize - 1].volume = volume.into();
            (head, format!("which said it was of volume {owner}, whose head is another one"))
        } else if slot.is_some() && owner == volume && !self.has_children(head) {
            let slot = &mut self.loader.snapshots[head as usize - 1];
            slot.flags = SNAPSHOT_HEAD.into();
            (slot.name, slot.name_bytes) = slots::encode_name("");
            (head, "which nothing builds on".to_owned())
        } else {
            return self.make_head(volume);
        };
        self.loader.volumes[volume as usize - 1].head = chosen.into();
        let text = format!("the head of volume {volume} is snapshot {chosen}, {text}");
        self.step(RepairKind::Mended, RegionKind::Volumes, Some(volume - 1), text);
        self.same_size(volume, chosen);
    }

    /// Heads that say they are of this volume and that no volume refers to.
    fn strays(&self, volume: u32) -> Vec<u32> {
        let all = self.loader.snapshots.iter().enumerate();
        all.filter(|(index, slot)| {
            slot.used == 1
                && slot.flags.get() & SNAPSHOT_HEAD != 0
                && slot.volume.get() == volume
                && !self.loader.volumes.iter().any(|v| v.head.get() == *index as u32 + 1)
        })
        .map(|(index, _)| index as u32 + 1)
        .collect()
    }

    fn is_head_of(&self, head: u32, volume: u32) -> bool {
        let slot = self.loader.volumes.get((volume as usize).wrapping_sub(1));
        slot.is_some_and(|slot| slot.head.get() == head)
    }

    fn has_children(&self, id: u32) -> bool {
        self.loader.snapshots.iter().any(|slot| slot.used == 1 && slot.parent.get() == id)
    }

    /// A head of which everything is lost.
    fn make_head(&mut self, volume: u32) {
        let Some(head) = self.free_snapshot() else { return };
        let of = &mut self.loader.volumes[volume as usize - 1];
        of.head = head.into();
        let slot = SnapshotSlot {
            size: of.size,
            created_ns: of.created_ns,
            revision: of.revision,
            volume: volume.into(),
            flags: SNAPSHOT_HEAD.into(),
            used: 1,
            ..SnapshotSlot::new_zeroed()
        };
        let (uuid, family) = (self.identity(head, b's'), self.made_family());
        let slot = SnapshotSlot { uuid, family, ..slot };
        self.loader.set_snapshot(head - 1, slot);
        self.orphans.insert(head);
        let text = format!("the head of volume {volume} is gone: all it showed is lost");
        self.step(RepairKind::Lost, RegionKind::Volumes, Some(volume - 1), text);
    }

    /// A volume and its head have one size: the larger one, so that nothing is cut off.
    fn same_size(&mut self, volume: u32, head: u32) {
        let (of, slot) = (
            self.loader.volumes[volume as usize - 1].size.get(),
            self.loader.snapshots[head as usize - 1].size.get(),
        );
        if of == slot || !faults::is_size(of) || !faults::is_size(slot) {
            return;
        }
        let size = of.max(slot);
        self.loader.volumes[volume as usize - 1].size = size.into();
        self.loader.snapshots[head as usize - 1].size = size.into();
        let text = format!(
            "volume {volume} has {size} bytes: it and its head said {of} and {slot}, and nothing is \
             cut off"
        );
        self.step(RepairKind::Mended, RegionKind::Volumes, Some(volume - 1), text);
    }

    /// Parents that are not there, and loops.
    pub(super) fn parents(&mut self) {
        for index in 0..self.loader.snapshots.len() as u32 {
            let slot = &self.loader.snapshots[index as usize];
            let parent = slot.parent.get();
            if slot.used == 1
                && parent != 0
                && !self.is_used(parent)
                && !self.orphans.contains(&(index + 1))
            {
                self.lose_parent(index + 1, "does not exist");
            }
        }
        // Of what is known to have lost its parent nothing more is said.
        for id in &self.orphans {
            self.loader.snapshots[*id as usize - 1].parent = 0.into();
        }
        for member in self.loops() {
            self.lose_parent(member, "leads back to it");
            self.loader.snapshots[member as usize - 1].parent = 0.into();
        }
    }

    /// Snapshots that are ancestors of themselves.
    fn loops(&self) -> Vec<u32> {
        let parents: Vec<usize> = self
            .loader
            .snapshots
            .iter()
            .map(|slot| if slot.used == 1 { slot.parent.get() as usize } else { 0 })
            .collect();
        // 0 unknown, else the walk that came here first.
        let mut walks = vec![0usize; parents.len() + 1];
        let mut members = Vec::new();
        for start in 1..=parents.len() {
            let mut at = start;
            while at != 0 && walks[at] == 0 {
                walks[at] = start;
                at = parents[at - 1];
            }
            if at != 0 && walks[at] == start {
                let first = at;
                loop {
                    members.push(at as u32);
                    at = parents[at - 1];
                    if at == first {
                        break;
                    }
                }
            }
        }
        members
    }
}
