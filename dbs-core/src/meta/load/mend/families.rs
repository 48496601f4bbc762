//! Keys: one chain has one key, or none, and a volume has that of its head.

use super::Mender;
use crate::crypt::FAMILY_UNKNOWN;
use crate::format::RegionKind;
use crate::format::slots::{KeySlot, SNAPSHOT_DELETED, SnapshotSlot, VolumeSlot};
use crate::info::RepairKind;
use std::collections::BTreeMap;
use zerocopy::FromZeros;

/// What is not encrypted has this.
const PLAIN: [u8; 16] = [0; 16];

impl Mender<'_> {
    /// Whether what has to be made may be encrypted: then it gets a key that nobody has, as long as that is all that is
    /// known, so that nothing is shown as it lies there. Where no trace of a key is left, and no place where one could have
    /// been, it is not: only what is left of an encrypted volume that had just been deleted, all of whose slots are lost,
    /// is taken for another's then.
    pub(super) fn look_for_keys(&mut self) {
        let loader = &self.loader;
        let lost_volumes =
            loader.unread.blocks.iter().any(|(region, _)| *region == RegionKind::Volumes);
        self.makes_encrypted = loader.has_encrypted
            && (lost_volumes
                || loader.unread.groups.is_some()
                || loader.volumes.iter().any(|slot| slot.key.is_some())
                || loader.snapshots.iter().any(|slot| slot.family != PLAIN));
    }

    /// What a slot that is made begins with.
    pub(super) fn made_family(&self) -> [u8; 16] {
        if self.makes_encrypted { FAMILY_UNKNOWN } else { PLAIN }
    }

    /// Gives what was made the key of what builds on it, of what it builds on, or of its volume; parts what does not have the
    /// same key; and gives each volume the key of its head.
    pub(super) fn families(&mut self) {
        if !self.loader.has_encrypted {
            return;
        }
        // Each pass may make more known of the next.
        while self.more_families() {}
        self.part_chains();
        self.part_volumes();
        self.keys();
    }

    fn slot(&self, id: u32) -> Option<&SnapshotSlot> {
        let slot = self.loader.snapshots.get((id as usize).wrapping_sub(1));
        slot.filter(|slot| slot.used == 1)
    }

    /// What the data of a volume is encrypted with.
    fn family_of(&self, slot: &VolumeSlot) -> [u8; 16] {
        self.slot(slot.head.get()).map_or(PLAIN, |head| head.family)
    }

    fn more_families(&mut self) -> bool {
        let (mut below, mut of_volumes) = (BTreeMap::new(), BTreeMap::new());
        let known = |slot: &&SnapshotSlot| slot.used == 1 && slot.family != FAMILY_UNKNOWN;
        for slot in self.loader.snapshots.iter().filter(known) {
            below.insert(slot.parent.get(), slot.family);
            of_volumes.insert(slot.volume.get(), slot.family);
        }
        of_volumes.remove(&0);
        let mut found = Vec::new();
        for (index, slot) in self.loader.snapshots.iter().enumerate() {
            if slot.used != 1 || slot.family != FAMILY_UNKNOWN {
                continue;
            }
            let parent = self.slot(slot.parent.get()).filter(known).map(|slot| slot.family);
            // Without key the volume is not encrypted: one whose key was lost says that.
            let volume = self.loader.volumes.get((slot.volume.get() as usize).wrapping_sub(1));
            let key = volume
                .filter(|slot| **slot != VolumeSlot::new_zeroed() && !slot.key.is_lost())
                .map(|slot| slot.key.family);
            let family = below
                .get(&(index as u32 + 1))
                .copied()
                .or(parent)
                .or(of_volumes.get(&slot.volume.get()).copied())
                .or(key);
            found.extend(family.map(|family| (index, family)));
        }
        found.iter().for_each(|(index, family)| self.loader.snapshots[*index].family = *family);
        !found.is_empty()
    }

    /// What was written back at different times may say that a snapshot builds on one with another key. It does not.
    fn part_chains(&mut self) {
        for index in 0..self.loader.snapshots.len() {
            let SnapshotSlot { used, parent, family, .. } = self.loader.snapshots[index];
            if used == 1 && self.slot(parent.get()).is_some_and(|below| below.family != family) {
                self.lose_parent(index as u32 + 1, "does not have its key");
                self.loader.snapshots[index].parent = 0.into();
            }
        }
    }

    /// A snapshot that does not have the key of its volume's head is another volume's, whose slot is gone.
    fn part_volumes(&mut self) {
        let mut made = BTreeMap::new();
        for index in 0..self.loader.snapshots.len() {
            let slot = self.loader.snapshots[index];
            let Some(of) = self.loader.volumes.get((slot.volume.get() as usize).wrapping_sub(1))
            else {
                continue;
            };
            if slot.used != 1 || self.family_of(of) == slot.family {
                continue;
            }
            let from = slot.volume.get();
            let (to, text) = if slot.flags.get() & SNAPSHOT_DELETED != 0 {
                (0, "deleted, belongs to no volume any more".to_owned())
            } else {
                let to = match made.get(&(from, slot.family)) {
                    Some(to) => *to,
                    None => {
                        let Some(to) = self.make_empty_volume(slot.size.get(), slot.family) else {
                            return;
                        };
                        made.insert((from, slot.family), to);
                        to
                    }
                };
                (to, format!("which does not have the key of volume {from}, is volume {to}'s now"))
            };
            self.loader.snapshots[index].volume = to.into();
            let text = format!("snapshot {}, {text}", index + 1);
            self.step(RepairKind::Mended, RegionKind::Snapshots, Some(index as u32), text);
        }
    }

    /// Volumes of one family have the same key, each wrapped for a secret of its own: any of them is better than none.
    fn keys(&mut self) {
        let mut keys = BTreeMap::new();
        for (index, slot) in self.loader.volumes.iter().enumerate() {
            keys.entry(slot.key.family).or_insert((index + 1, slot.key));
        }
        // Those without one, and those whose key is lost.
        keys.remove(&PLAIN);
        for index in 0..self.loader.volumes.len() {
            let slot = self.loader.volumes[index];
            let family = self.family_of(&slot);
            let is_key = slot.key.is_some() && !slot.key.is_lost();
            if slot.key.fits(&family) && (is_key || family == PLAIN) {
                continue;
            }
            let id = index + 1;
            let (key, told) = if family == PLAIN {
                let text = "is not encrypted: the key in its slot is not its own, and goes";
                (KeySlot::new_zeroed(), is_key.then(|| (RepairKind::Lost, text.to_owned())))
            } else if let Some((other, key)) = keys.get(&family) {
                let text = format!(
                    "gets the key in the slot of volume {other}, which is of the same family: the secret of that one \
                     unlocks it"
                );
                (*key, Some((RepairKind::Mended, text)))
            } else {
                let text = "has a key that is not that of its data, which is lost".to_owned();
                (KeySlot::lost(), is_key.then_some((RepairKind::Lost, text)))
            };
            self.loader.volumes[index].key = key;
            if let Some((kind, text)) = told {
                let text = format!("volume {id} {text}");
                self.step(kind, RegionKind::Volumes, Some(index as u32), text);
            }
        }
    }
}
