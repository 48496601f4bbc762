//! Volume and snapshot slots: fields that cannot be, slots that are gone, names that occur twice.

use super::Mender;
use crate::format::RegionKind;
use crate::format::slots::{
    self, KeySlot, SNAPSHOT_DELETED, SNAPSHOT_FLAGS, SNAPSHOT_HEAD, SnapshotSlot, VOLUME_FLAGS,
    VolumeSlot,
};
use crate::info::RepairKind;
use crate::limits::NAME_MAX_BYTES;
use crate::looks;
use crate::meta::load::Loader;
use crate::meta::load::faults::{self, SnapshotFault, VolumeFault};
use crate::meta::names;
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::FromZeros;

impl Mender<'_> {
    pub(super) fn volume_slots(&mut self) {
        for index in 0..self.loader.volumes.len() as u32 {
            let slot = self.loader.volumes[index as usize];
            if slot == VolumeSlot::new_zeroed() {
                continue;
            }
            for fault in faults::volume(&slot, index, &self.loader.geometry) {
                self.mend_volume(index, fault);
            }
        }
    }

    fn mend_volume(&mut self, index: u32, fault: VolumeFault) {
        let id = index + 1;
        let head = self.loader.volumes[index as usize].head.get();
        let head_size = self.snapshot_size(head);
        let slot = &mut self.loader.volumes[index as usize];
        let (kind, text) = match fault {
            VolumeFault::Name => {
                let name = format!("repaired-{id}");
                (slot.name, slot.name_bytes) = slots::encode_name(&name);
                (RepairKind::Lost, format!("volume {id}: its name is lost: it is `{name}` now"))
            }
            VolumeFault::Size(_) => match head_size {
                Some(size) => {
                    slot.size = size.into();
                    (RepairKind::Mended, format!("volume {id} has the {size} bytes of its head"))
                }
                None => (RepairKind::Refused, format!("volume {id}: nothing says how large it is")),
            },
            VolumeFault::Flags(flags) => {
                slot.flags = (slot.flags.get() & VOLUME_FLAGS).into();
                (RepairKind::Mended, format!("volume {id}: unknown flags {flags:#x} are cleared"))
            }
            VolumeFault::Key if self.loader.has_encrypted => {
                slot.key = KeySlot::lost();
                (RepairKind::Lost, format!("volume {id}: its key is lost"))
            }
            // Nothing is encrypted.
            VolumeFault::Key => {
                slot.key = KeySlot::new_zeroed();
                (RepairKind::Mended, format!("volume {id}: a key that is none is cleared"))
            }
            VolumeFault::Capacity => {
                *slot = VolumeSlot::new_zeroed();
                (RepairKind::Lost, "a volume behind the table's end is dropped".to_owned())
            }
        };
        self.step(kind, RegionKind::Volumes, Some(index), text);
    }

    fn snapshot_size(&self, id: u32) -> Option<u64> {
        let slot = self.loader.snapshots.get((id as usize).wrapping_sub(1))?;
        Some(slot.size.get()).filter(|size| slot.used == 1 && faults::is_size(*size))
    }

    pub(super) fn snapshot_slots(&mut self) {
        let entries = &self.loader.entries;
        for (id, (owner, logical)) in entries.used().filter_map(|id| Some((id, entries.owner(id)?)))
        {
            let end = u64::from(logical) + u64::from(entries.run(id).max(1));
            let last = self.owners.entry(owner).or_default();
            *last = end.max(*last);
        }
        let mut referring = Referring::new(self.loader);
        for index in 0..self.loader.snapshots.len() as u32 {
            let slot = self.loader.snapshots[index as usize];
            if slot == SnapshotSlot::new_zeroed() {
                continue;
            }
            // Whether its volume is there is looked at when all volumes are.
            for fault in faults::snapshot(&slot, index, &self.loader.geometry, |_| true) {
                self.mend_snapshot(index, fault, &mut referring);
                if self.loader.snapshots[index as usize] == SnapshotSlot::new_zeroed() {
                    // Freed: what else was wrong with it is of no account.
                    break;
                }
            }
        }
    }

    fn mend_snapshot(&mut self, index: u32, fault: SnapshotFault, referring: &mut Referring) {
        let id = index + 1;
        let is_head = referring.heads.contains(&id);
        let referred = is_head || referring.has_children(id) || self.owners.contains_key(&id);
        let volume = self.loader.snapshots[index as usize].volume.get() as usize;
        let volume_size = self.loader.volumes.get(volume.wrapping_sub(1)).map(|v| v.size.get());
        let slot = &mut self.loader.snapshots[index as usize];
        let (kind, text) = match fault {
            SnapshotFault::Used(_) if referred => {
                referring.kept(slot);
                slot.used = 1;
                (RepairKind::Mended, format!("snapshot {id} is referred to: it is in use"))
            }
            SnapshotFault::Used(_) => {
                referring.dropped(slot);
                *slot = SnapshotSlot::new_zeroed();
                (RepairKind::Freed, format!("nothing refers to snapshot {id}: its slot is free"))
            }
            SnapshotFault::Size(_) => match volume_size.filter(|size| faults::is_size(*size)) {
                Some(size) => {
                    slot.size = size.into();
                    let text = format!(
                        "snapshot {id}: its size is lost: it has its volume's, {size} bytes, now"
                    );
                    (RepairKind::Lost, text)
                }
                None => {
                    (RepairKind::Refused, format!("snapshot {id}: nothing says how large it is"))
                }
            },
            SnapshotFault::Flags(flags) => {
                slot.flags = (slot.flags.get() & SNAPSHOT_FLAGS).into();
                (RepairKind::Mended, format!("snapshot {id}: unknown flags {flags:#x} are cleared"))
            }
            SnapshotFault::HeadAndDeleted => {
                let wrong = if is_head { SNAPSHOT_DELETED } else { SNAPSHOT_HEAD };
                slot.flags = (slot.flags.get() & !wrong).into();
                let what = if is_head { "a volume's head" } else { "no volume's head" };
                (RepairKind::Mended, format!("snapshot {id} is {what}"))
            }
            SnapshotFault::Base => {
                (RepairKind::Refused, format!("snapshot {id}: nothing says what it rests on"))
            }
            SnapshotFault::Name => {
                let name = format!("repaired-{id}");
                (slot.name, slot.name_bytes) = slots::encode_name(&name);
                (RepairKind::Lost, format!("snapshot {id}: its name is lost: it is `{name}` now"))
            }
            SnapshotFault::Named => {
                (slot.name, slot.name_bytes) = slots::encode_name("");
                (RepairKind::Mended, format!("snapshot {id} loses a name that it cannot have"))
            }
            SnapshotFault::Volume(_) => return,
            SnapshotFault::Capacity => {
                referring.dropped(slot);
                *slot = SnapshotSlot::new_zeroed();
                (RepairKind::Lost, "a snapshot behind the table's end is dropped".to_owned())
            }
        };
        self.step(kind, RegionKind::Snapshots, Some(index), text);
    }

    /// Slots that are gone and that something refers to: what they held themselves is there, what
    /// showed through them is not known any more.
    pub(super) fn missing_slots(&mut self) {
        let capacity = self.loader.geometry.snapshots;
        let owners: BTreeSet<u32> = self.owners.keys().copied().collect();
        let is_missing = |this: &Self, id: u32| (1..=capacity).contains(&id) && !this.is_used(id);
        let is_lost = |this: &Self, id: u32| {
            is_missing(this, id) && (this.lost_slots.contains(&(id - 1)) || owners.contains(&id))
        };
        for volume in 0..self.loader.volumes.len() {
            let VolumeSlot { head, size, created_ns, revision, .. } = self.loader.volumes[volume];
            if is_lost(self, head.get()) {
                let slot = SnapshotSlot {
                    size,
                    created_ns,
                    revision,
                    volume: (volume as u32 + 1).into(),
                    flags: SNAPSHOT_HEAD.into(),
                    ..SnapshotSlot::new_zeroed()
                };
                let text = format!("head of volume {}", volume + 1);
                self.make_snapshot(head.get(), slot, &text);
            }
        }
        // As large as the largest that shows it.
        let mut parents = BTreeMap::<u32, u64>::new();
        for slot in self.loader.snapshots.iter().filter(|slot| slot.used == 1) {
            let size = parents.entry(slot.parent.get()).or_default();
            *size = slot.size.get().max(*size);
        }
        for (id, size) in parents {
            if is_lost(self, id) {
                let slot = SnapshotSlot {
                    size: size.into(),
                    flags: SNAPSHOT_DELETED.into(),
                    ..SnapshotSlot::new_zeroed()
                };
                self.make_snapshot(id, slot, "a snapshot whose name and volume are lost");
            }
        }
        for id in owners {
            if is_missing(self, id) && self.lost_slots.contains(&(id - 1)) {
                self.make_orphan(id);
            }
        }
    }

    fn make_snapshot(&mut self, id: u32, slot: SnapshotSlot, what: &str) {
        let (uuid, family) = (self.identity(id, b's'), self.made_family());
        let slot = SnapshotSlot { uuid, family, used: 1, ..slot };
        self.loader.set_snapshot(id - 1, slot);
        self.raise_mark(RegionKind::Snapshots, id - 1);
        self.orphans.insert(id);
        let text = format!(
            "snapshot {id}, {what}: made anew over what it holds itself; what showed through it is lost"
        );
        self.step(RepairKind::Lost, RegionKind::Snapshots, Some(id - 1), text);
    }

    /// A layer that is left without slot, and nothing says whose it was: a volume of its own.
    fn make_orphan(&mut self, id: u32) {
        let end = self.owners.get(&id).copied();
        let size = end.unwrap_or(1).saturating_mul(self.loader.geometry.extent_bytes);
        let size = size.min(crate::limits::VOLUME_MAX_BYTES);
        let Some(volume) = self.volume_of_orphans(size) else { return };
        let (name, name_bytes) = slots::encode_name(&format!("repaired-{id}"));
        let slot = SnapshotSlot {
            size: size.into(),
            volume: volume.into(),
            name,
            name_bytes,
            ..SnapshotSlot::new_zeroed()
        };
        let text = format!(
            "whose volume, name and size are lost: it is `repaired-{id}` of volume {volume} now"
        );
        self.make_snapshot(id, slot, &text);
    }

    /// The volume, new and empty, that has snapshots of which nothing is known as its own.
    fn volume_of_orphans(&mut self, size: u64) -> Option<u32> {
        if self.orphanage == 0 {
            self.orphanage = self.make_empty_volume(size, self.made_family())?;
        }
        Some(self.orphanage)
    }

    pub(super) fn make_empty_volume(&mut self, size: u64, family: [u8; 16]) -> Option<u32> {
        let head = self.free_snapshot()?;
        let slot = SnapshotSlot {
            uuid: self.identity(head, b's'),
            size: size.into(),
            flags: SNAPSHOT_HEAD.into(),
            used: 1,
            family,
            ..SnapshotSlot::new_zeroed()
        };
        self.loader.set_snapshot(head - 1, slot);
        self.make_volume(head, 0)
    }

    /// Volumes that are gone and whose head, or snapshots, are there.
    pub(super) fn missing_volumes(&mut self) {
        for index in 0..self.loader.snapshots.len() {
            let SnapshotSlot { volume, flags, used, .. } = self.loader.snapshots[index];
            if used != 1 || self.is_volume(volume.get()) {
                continue;
            }
            let id = index as u32 + 1;
            if flags.get() & SNAPSHOT_HEAD != 0 {
                let _ = self.make_volume(id, volume.get());
            } else if flags.get() & SNAPSHOT_DELETED != 0 {
                self.loader.snapshots[index].volume = 0.into();
                if volume.get() != 0 {
                    let text = format!("snapshot {id}, deleted, belongs to no volume any more");
                    self.step(RepairKind::Mended, RegionKind::Snapshots, Some(id - 1), text);
                }
            }
        }
        // Those that have a name go to the volume that builds on them, or become one.
        let mut above = BTreeMap::new();
        let used = self.loader.snapshots.iter().filter(|slot| slot.used == 1);
        let used = used.map(|slot| (slot.parent.get(), slot.volume.get()));
        let known = used.filter(|(_, volume)| self.is_volume(*volume)).collect();
        self.spread_volumes(known, &mut above);
        for index in 0..self.loader.snapshots.len() {
            let SnapshotSlot { volume, used, .. } = self.loader.snapshots[index];
            if used != 1 || self.is_volume(volume.get()) {
                continue;
            }
            let slot = self.loader.snapshots[index];
            let id = index as u32 + 1;
            if slot.flags.get() & SNAPSHOT_DELETED != 0 && volume.get() == 0 {
                continue;
            }
            match above.get(&id).copied() {
                Some(volume) => {
                    self.loader.snapshots[index].volume = volume.into();
                    let text =
                        format!("snapshot {id} is given to volume {volume}, which builds on it");
                    self.step(RepairKind::Mended, RegionKind::Snapshots, Some(id - 1), text);
                }
                None => {
                    let slot = &mut self.loader.snapshots[index];
                    slot.flags = SNAPSHOT_HEAD.into();
                    (slot.name, slot.name_bytes) = slots::encode_name("");
                    let parent = slot.parent.get();
                    if let Some(made) = self.make_volume(id, volume.get()) {
                        self.spread_volumes(vec![(parent, made)], &mut above);
                    }
                }
            }
        }
    }

    fn is_volume(&self, id: u32) -> bool {
        let slot = self.loader.volumes.get((id as usize).wrapping_sub(1));
        slot.is_some_and(|slot| *slot != VolumeSlot::new_zeroed())
    }

    /// Notes for what has no volume, of snapshots with these volumes building on it, one of those: each once, as a hostile
    /// chain has any length.
    fn spread_volumes(&self, mut open: Vec<(u32, u32)>, above: &mut BTreeMap<u32, u32>) {
        while let Some((id, volume)) = open.pop() {
            looks::one();
            let slot = self.loader.snapshots.get((id as usize).wrapping_sub(1));
            if let Some(slot) =
                slot.filter(|slot| slot.used == 1 && !self.is_volume(slot.volume.get()))
                && above.insert(id, volume).is_none()
            {
                open.push((slot.parent.get(), volume));
            }
        }
    }

    /// Makes a volume of a head, in the slot it is said to have if that is free.
    fn make_volume(&mut self, head: u32, wanted: u32) -> Option<u32> {
        let capacity = self.loader.geometry.volumes;
        let is_free = |this: &Self, id: u32| (1..=capacity).contains(&id) && !this.is_volume(id);
        let free = Some(wanted).filter(|id| is_free(self, *id));
        let Some(id) = free.or_else(|| {
            self.next_volume = (self.next_volume..=capacity).find(|id| is_free(self, *id))?;
            Some(self.next_volume)
        }) else {
            let text = format!("the table is full: no slot is left for the volume of head {head}");
            self.step(RepairKind::Refused, RegionKind::Volumes, None, text);
            return None;
        };
        let name = format!("repaired-{id}");
        let (field, name_bytes) = slots::encode_name(&name);
        let of = self.loader.snapshots[head as usize - 1];
        let encrypted = of.family != [0; 16];
        let slot = VolumeSlot {
            uuid: self.identity(id, b'v'),
            size: of.size,
            created_ns: of.created_ns,
            revision: of.revision,
            head: head.into(),
            key: if encrypted { KeySlot::lost() } else { KeySlot::new_zeroed() },
            name: field,
            name_bytes,
            ..VolumeSlot::new_zeroed()
        };
        self.loader.set_volume(id - 1, slot);
        self.raise_mark(RegionKind::Volumes, id - 1);
        self.loader.snapshots[head as usize - 1].volume = id.into();
        let key = if encrypted { " and the key of its data" } else { "" };
        let text = format!("volume {id}: its slot and name{key} are lost: it is `{name}` now");
        self.step(RepairKind::Lost, RegionKind::Volumes, Some(id - 1), text);
        Some(id)
    }

    /// Names that occur twice: the later slot gets another one.
    pub(super) fn names(&mut self) {
        let mut volumes = BTreeSet::new();
        for index in 0..self.loader.volumes.len() {
            let slot = self.loader.volumes[index];
            let Some(name) = slots::decode_name(&slot.name, slot.name_bytes) else { continue };
            if name.is_empty() || volumes.insert(name.to_owned()) {
                continue;
            }
            let new = another_name(name, |name| !volumes.contains(name) && !self.has_volume(name));
            let slot = &mut self.loader.volumes[index];
            (slot.name, slot.name_bytes) = slots::encode_name(&new);
            let text = format!("volume {}, the second `{name}`, is `{new}` now", index + 1);
            volumes.insert(new);
            self.step(RepairKind::Renamed, RegionKind::Volumes, Some(index as u32), text);
        }
        let mut snapshots = BTreeSet::new();
        for index in 0..self.loader.snapshots.len() {
            let slot = self.loader.snapshots[index];
            let volume = slot.volume.get();
            let Some(name) = slots::decode_name(&slot.name, slot.name_bytes) else { continue };
            if slot.used != 1 || name.is_empty() || snapshots.insert((volume, name.to_owned())) {
                continue;
            }
            let free = |name: &str| {
                !snapshots.contains(&(volume, name.to_owned())) && !self.has_snapshot(volume, name)
            };
            let new = another_name(name, free);
            let slot = &mut self.loader.snapshots[index];
            (slot.name, slot.name_bytes) = slots::encode_name(&new);
            let text = format!(
                "snapshot {}, the second `{name}` of volume {volume}, is `{new}` now",
                index + 1
            );
            snapshots.insert((volume, new));
            self.step(RepairKind::Renamed, RegionKind::Snapshots, Some(index as u32), text);
        }
    }

    fn has_volume(&self, name: &str) -> bool {
        let mut all = self.loader.volumes.iter();
        all.any(|slot| slots::decode_name(&slot.name, slot.name_bytes) == Some(name))
    }

    fn has_snapshot(&self, volume: u32, name: &str) -> bool {
        let mut all = self.loader.snapshots.iter().filter(|slot| slot.volume.get() == volume);
        all.any(|slot| slots::decode_name(&slot.name, slot.name_bytes) == Some(name))
    }
}

/// What refers to snapshots, besides entries.
struct Referring {
    heads: BTreeSet<u32>,
    /// How many slots in use say that this is their parent.
    children: BTreeMap<u32, u32>,
}

impl Referring {
    fn new(loader: &Loader) -> Self {
        let heads = loader.volumes.iter().map(|volume| volume.head.get()).collect();
        let mut children = BTreeMap::new();
        for slot in loader.snapshots.iter().filter(|slot| slot.used != 0) {
            *children.entry(slot.parent.get()).or_default() += 1;
        }
        Self { heads, children }
    }

    fn has_children(&self, id: u32) -> bool {
        self.children.get(&id).is_some_and(|count| *count > 0)
    }

    /// A slot is about to be in use.
    fn kept(&mut self, slot: &SnapshotSlot) {
        if slot.used == 0 {
            *self.children.entry(slot.parent.get()).or_default() += 1;
        }
    }

    /// A slot is about to be free.
    fn dropped(&mut self, slot: &SnapshotSlot) {
        if slot.used != 0
            && let Some(count) = self.children.get_mut(&slot.parent.get())
        {
            *count -= 1;
        }
    }
}

/// `name.repaired-N` for the first N that gives a name nobody has, cut off if it is too long.
fn another_name(name: &str, is_free: impl Fn(&str) -> bool) -> String {
    let with = |n: u64| {
        let suffix = format!(".repaired-{n}");
        let mut end = name.len().min(NAME_MAX_BYTES - suffix.len());
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        format!("{}{suffix}", &name[..end])
    };
    let new = (1..).map(with).find(|new| is_free(new)).unwrap_or_else(|| with(0));
    debug_assert!(names::check_stored("volume", &new).is_ok());
    new
}
