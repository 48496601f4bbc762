//! Keys of what has to be made: one chain has one key, or none.

use super::Mender;
use crate::format::RegionKind;
use crate::format::slots::{KeySlot, SnapshotSlot, VolumeSlot};
use crate::info::RepairKind;
use std::collections::BTreeMap;
use zerocopy::FromZeros;

/// Which key what was made is encrypted with, as long as that is not known: one that nobody has. So nothing is shown as
/// it lies there that may be encrypted.
const UNKNOWN: [u8; 16] = [0xff; 16];

impl Mender<'_> {
    /// What a slot that is made begins with.
    pub(super) fn made_family(&self) -> [u8; 16] {
        if self.loader.has_encrypted { UNKNOWN } else { [0; 16] }
    }

    /// Gives what was made the key of what builds on it, of what it builds on, or of its volume.
    pub(super) fn families(&mut self) {
        if !self.loader.has_encrypted {
            return;
        }
        // Each pass may make more known of the next.
        while self.more_families() {}
        // Volumes of one family have the same key, each wrapped for a secret of its own.
        let mut keys = BTreeMap::new();
        for (index, slot) in self.loader.volumes.iter().enumerate() {
            let family = self.family_of(slot);
            // What is not known may be of several.
            if family != UNKNOWN && slot.key.is_some() && !slot.key.is_lost() {
                keys.entry(family).or_insert((index + 1, slot.key));
            }
        }
        for index in 0..self.loader.volumes.len() {
            let slot = self.loader.volumes[index];
            if slot == VolumeSlot::new_zeroed() {
                continue;
            }
            let family = self.family_of(&slot);
            let key = &mut self.loader.volumes[index].key;
            match (family == [0; 16], key.is_some() && !key.is_lost()) {
                (true, false) => *key = KeySlot::new_zeroed(),
                (false, false) => match keys.get(&family) {
                    Some((other, found)) => {
                        *key = *found;
                        let text = format!(
                            "volume {} has the key of volume {other}, which holds what was cloned from the same: the \
                             secret of that one unlocks it",
                            index + 1
                        );
                        let index = Some(index as u32);
                        self.step(RepairKind::Mended, RegionKind::Volumes, index, text);
                    }
                    None => *key = KeySlot::lost(),
                },
                _ => {}
            }
        }
    }

    /// What the data of a volume is encrypted with.
    fn family_of(&self, slot: &VolumeSlot) -> [u8; 16] {
        self.slot(slot.head.get()).map_or([0; 16], |head| head.family)
    }

    fn slot(&self, id: u32) -> Option<&SnapshotSlot> {
        let slot = self.loader.snapshots.get((id as usize).wrapping_sub(1));
        slot.filter(|slot| slot.used == 1)
    }

    fn more_families(&mut self) -> bool {
        let (mut below, mut of_volumes) = (BTreeMap::new(), BTreeMap::new());
        let known = |slot: &&SnapshotSlot| slot.used == 1 && slot.family != UNKNOWN;
        for slot in self.loader.snapshots.iter().filter(known) {
            below.insert(slot.parent.get(), slot.family);
            of_volumes.insert(slot.volume.get(), slot.family);
        }
        of_volumes.remove(&0);
        let mut found = Vec::new();
        for (index, slot) in self.loader.snapshots.iter().enumerate() {
            if slot.used != 1 || slot.family != UNKNOWN {
                continue;
            }
            let parent = self.slot(slot.parent.get()).filter(known).map(|slot| slot.family);
            // Without key the volume is not encrypted: one whose key was lost says that.
            let volume = self.loader.volumes.get((slot.volume.get() as usize).wrapping_sub(1));
            let plain =
                volume.filter(|slot| **slot != VolumeSlot::new_zeroed() && !slot.key.is_some());
            let family = below
                .get(&(index as u32 + 1))
                .copied()
                .or(parent)
                .or(of_volumes.get(&slot.volume.get()).copied())
                .or(plain.map(|_| [0; 16]));
            found.extend(family.map(|family| (index, family)));
        }
        found.iter().for_each(|(index, family)| self.loader.snapshots[*index].family = *family);
        !found.is_empty()
    }
}
