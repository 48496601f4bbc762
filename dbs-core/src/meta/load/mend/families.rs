//! Keys: one chain has one key, or none, and a volume has that of its head.

use super::Mender;
use crate::crypt::FAMILY_UNKNOWN;
use crate::format::RegionKind;
use crate::format::slots::{KeySlot, SNAPSHOT_DELETED, SnapshotSlot, VolumeSlot};
use crate::info::RepairKind;
use crate::looks;
use crate::meta::entries::SPARE_BASE;
use std::collections::BTreeMap;
use zerocopy::FromZeros;

/// What is not encrypted has this.
const PLAIN: [u8; 16] = [0; 16];

/// What is known of keys beside snapshots whose own is not known.
#[derive(Default)]
struct Near {
    /// Of what builds on a snapshot, by its id.
    below: BTreeMap<u32, [u8; 16]>,
    of_volumes: BTreeMap<u32, [u8; 16]>,
    /// The unknown ones that build on a snapshot, by its id, and those of a volume: until they are looked at.
    above: BTreeMap<u32, Vec<u32>>,
    members: BTreeMap<u32, Vec<u32>>,
}

impl Near {
    fn note(&mut self, slot: &SnapshotSlot) {
        self.below.insert(slot.parent.get(), slot.family);
        if slot.volume.get() != 0 {
            self.of_volumes.insert(slot.volume.get(), slot.family);
        }
    }
}

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
        if self.loader.has_encrypted {
            self.families_of_compressed();
            self.spread_families();
            self.part_chains();
            self.part_volumes();
        }
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

    /// Nothing that is encrypted is compressed: a compressed extent proves that its layer is not.
    fn families_of_compressed(&mut self) {
        let ids = self.loader.entries.used().take_while(|id| *id < SPARE_BASE);
        let compressed = ids.filter(|id| self.loader.entries.is_compressed(*id));
        let owners: Vec<u32> =
            compressed.filter_map(|id| Some(self.loader.entries.owner(id)?.0)).collect();
        for owner in owners.into_iter().filter_map(|owner| owner.checked_sub(1)) {
            if self.is_unknown(owner) {
                self.loader.snapshots[owner as usize].family = PLAIN;
            }
        }
    }

    /// Gives what has no known key that of what is nearest to it. Each round looks only at what is beside what became known in
    /// the one before: a hostile chain has any length.
    fn spread_families(&mut self) {
        let (mut near, mut open) = (Near::default(), Vec::new());
        for (index, slot) in (0..).zip(&self.loader.snapshots).filter(|(_, slot)| slot.used == 1) {
            if slot.family == FAMILY_UNKNOWN {
                near.above.entry(slot.parent.get()).or_default().push(index);
                near.members.entry(slot.volume.get()).or_default().push(index);
                open.push(index);
            } else {
                near.note(slot);
            }
        }
        while !open.is_empty() {
            let beside = |index| Some((index, self.family_beside(index, &near)?));
            let found: Vec<_> = open.drain(..).filter_map(beside).collect();
            for (index, family) in found {
                let slot = &mut self.loader.snapshots[index as usize];
                slot.family = family;
                near.note(slot);
                let (parent, volume) = (slot.parent.get(), slot.volume.get());
                open.extend(parent.checked_sub(1).filter(|parent| self.is_unknown(*parent)));
                open.extend(near.above.remove(&(index + 1)).unwrap_or_default());
                open.extend(
                    near.members.remove(&volume).filter(|_| volume != 0).unwrap_or_default(),
                );
            }
        }
    }

    fn is_unknown(&self, index: u32) -> bool {
        self.slot(index + 1).is_some_and(|slot| slot.family == FAMILY_UNKNOWN)
    }

    /// The known key of what builds on a snapshot without one, of what it builds on, or of its volume.
    fn family_beside(&self, index: u32, near: &Near) -> Option<[u8; 16]> {
        looks::one();
        let slot = self.slot(index + 1).filter(|slot| slot.family == FAMILY_UNKNOWN)?;
        let parent = self.slot(slot.parent.get()).map(|parent| parent.family);
        // Without key the volume is not encrypted: one whose key was lost says that.
        let volume = self.loader.volumes.get((slot.volume.get() as usize).wrapping_sub(1));
        let key = volume
            .filter(|slot| **slot != VolumeSlot::new_zeroed() && !slot.key.is_lost())
            .map(|slot| slot.key.family);
        let below = near.below.get(&(index + 1)).copied();
        below
            .or(parent.filter(|family| *family != FAMILY_UNKNOWN))
            .or_else(|| near.of_volumes.get(&slot.volume.get()).copied())
            .or(key)
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

    /// The lowest snapshot of each chain, by the index of each of its snapshots. No chain is a loop.
    fn roots(&self) -> Vec<usize> {
        let mut roots = vec![usize::MAX; self.loader.snapshots.len()];
        for start in 0..roots.len() {
            let (mut path, mut at) = (Vec::new(), start);
            while roots[at] == usize::MAX
                && let parent = self.loader.snapshots[at].parent.get()
                && self.slot(parent).is_some()
            {
                path.push(at);
                at = parent as usize - 1;
            }
            let root = if roots[at] == usize::MAX { at } else { roots[at] };
            path.into_iter().chain([at]).for_each(|at| roots[at] = root);
        }
        roots
    }

    /// Volumes of one family have the same key, each wrapped for a secret of its own: any of them is better than none. That
    /// of a clone goes first: of a volume that was received only its stream said which family it is of.
    fn keys(&mut self) {
        let (mut keys, mut of_trees) = (BTreeMap::new(), BTreeMap::new());
        let roots = self.roots();
        let root = |slot: &VolumeSlot| roots.get((slot.head.get() as usize).wrapping_sub(1));
        for (index, slot) in self.loader.volumes.iter().enumerate() {
            keys.entry(slot.key.family).or_insert((index + 1, slot.key));
            if slot.key.is_some() && !slot.key.is_lost() && slot.key.family == self.family_of(slot)
            {
                of_trees.entry(root(slot)).or_insert((index + 1, slot.key));
            }
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
            } else if let Some((other, key)) = of_trees.get(&root(&slot)).or(keys.get(&family)) {
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

#[cfg(test)]
#[cfg(debug_assertions)]
mod tests {
    use super::*;
    use crate::format::superblock::{INCOMPAT_ENCRYPTED, Superblock};
    use crate::format::{Geometry, InitOptions, slots};
    use crate::meta::entries::Bits;
    use crate::meta::load::mend::Permit;
    use crate::meta::load::{Loader, Scan};

    const LONG: u32 = 400;
    const FAMILY: [u8; 16] = [5; 16];

    /// Each snapshot builds on the one before it.
    fn chain(change: impl Fn(u32, &mut SnapshotSlot)) -> Loader {
        let options = InitOptions { max_snapshots: Some(2 * LONG), ..InitOptions::default() };
        let superblock = Superblock {
            uuid: [3; 16],
            given: None,
            sequence: 5,
            created_ns: 1,
            compat: 0,
            unknown_ro: 0,
            incompat: INCOMPAT_ENCRYPTED,
            geometry: Geometry::plan(64 << 20, &options).unwrap(),
            clean_sequence: 4,
            clean_marks: [0; 4],
        };
        let mut loader = Loader::new(&superblock, Scan::default());
        for index in 0..LONG {
            let (name, name_bytes) = slots::encode_name(&format!("s{index}"));
            let mut slot = SnapshotSlot {
                uuid: [index as u8; 16],
                size: (1 << 20).into(),
                volume: 1.into(),
                parent: index.into(),
                used: 1,
                family: FAMILY_UNKNOWN,
                name,
                name_bytes,
                ..SnapshotSlot::new_zeroed()
            };
            change(index, &mut slot);
            loader.set_snapshot(index, slot);
        }
        loader
    }

    /// How many looks at slots it takes to repair it.
    fn looks(loader: &mut Loader) -> u64 {
        looks::begin();
        let _ = looks::take_most();
        let steps = loader.mend(Permit::default(), [7; 16]);
        assert!(steps.iter().all(|step| step.kind != RepairKind::Refused), "{steps:?}");
        looks::take_most()
    }

    /// Found by review: each pass over all snapshots told the key of one more, and a hostile chain has any length.
    #[test]
    fn keys_of_a_long_chain_are_found_with_a_look_or_two_at_each() {
        // The key of the lowest one is known, or that of the highest; no volume tells.
        for known in [0, LONG - 1] {
            let mut loader = chain(|index, slot| {
                slot.flags = SNAPSHOT_DELETED.into();
                (slot.name, slot.name_bytes) = slots::encode_name("");
                slot.volume = 0.into();
                if index == known {
                    slot.family = FAMILY;
                }
            });
            let looks = looks(&mut loader);
            assert!((1..4 * u64::from(LONG)).contains(&looks), "{looks}");
            assert!(loader.snapshots.iter().all(|slot| slot.family == FAMILY));
        }
    }

    /// Found by review: it was taken for encrypted, and what was compressed of it was dropped.
    #[test]
    fn what_is_compressed_is_not_encrypted() {
        let mut loader = chain(|_, slot| {
            slot.flags = SNAPSHOT_DELETED.into();
            (slot.name, slot.name_bytes) = slots::encode_name("");
            slot.volume = 0.into();
        });
        loader.entries.assign(3, 1, 0);
        loader.entries.set_bits(3, &Bits::range(&(0..5)), &Bits::default());
        loader.entries.set_compressed(3, 2);
        looks(&mut loader);
        assert!(loader.snapshots.iter().all(|slot| slot.family == PLAIN));
        assert!(loader.entries.is_compressed(3));
    }

    /// For each snapshot without a volume all that builds on it was looked for among all others.
    #[test]
    fn volumes_of_a_long_chain_are_found_with_a_look_or_two_at_each() {
        for known in [None, Some(LONG - 1)] {
            let mut loader = chain(|index, slot| {
                slot.volume = 9.into();
                if Some(index) == known {
                    slot.volume = 1.into();
                    slot.flags = crate::format::slots::SNAPSHOT_HEAD.into();
                    (slot.name, slot.name_bytes) = slots::encode_name("");
                }
            });
            let looks = looks(&mut loader);
            assert!((1..8 * u64::from(LONG)).contains(&looks), "{known:?}: {looks}");
            let volumes: std::collections::BTreeSet<_> =
                loader.snapshots.iter().map(|slot| slot.volume.get()).collect();
            assert!(!volumes.contains(&9) || known.is_none(), "{volumes:?}");
        }
    }
}
