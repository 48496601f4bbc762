//! Proving that what was loaded fits together, and building the state from it.

use super::{LEAKS_MAX, Loader, faults};
use crate::error::{Error, Result};
use crate::format::RegionKind;
use crate::format::geometry::LABEL_BLOCKS;
use crate::format::record::Record;
use crate::format::slots::{self, SNAPSHOT_BACKED, SNAPSHOT_LABELLED, SnapshotSlot, VolumeSlot};
use crate::info::{CheckReport, Finding, Severity, VolumeLimits};
use crate::limits::{EXTENT_MIN_BYTES, LABELS_MAX_BYTES, VOLUME_MAX_BYTES};
use crate::meta::alloc::{Allocator, FreeSet};
use crate::meta::entries::{Entries, SPARE_BASE};
use crate::meta::layer::SeenLayer;
use crate::meta::locks::{Fence, RangeLocks};
use crate::meta::log::{Log, Ring};
use crate::meta::pace::Pace;
use crate::meta::paging::Paging;
use crate::meta::{Meta, Sight, Snapshot, Volume};
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use zerocopy::FromZeros;

/// Entries that are sorted before they go to their layers: 48 MiB, so that memory has a bound. Tests have stores of
/// several batches.
const BATCH: usize = if cfg!(any(test, feature = "sabotage")) { 61 } else { 4 << 20 };

impl Loader {
    /// Proves that everything fits together and builds the state. With `strict`, anything corrupt
    /// is an error; otherwise look at [`Loader::findings`] first.
    ///
    /// # Errors
    /// `Corrupt` with the first finding.
    pub fn finish(mut self, session: u64, boot: [u8; 16]) -> Result<(Meta, Vec<Finding>)> {
        self.first_corruption()?;
        let (volumes, names) = self.build_volumes();
        let mut snapshots = self.build_snapshots(&volumes);
        self.link(&mut snapshots);
        self.first_corruption()?;
        self.check_heads(&volumes, &snapshots);
        self.check_families(&volumes, &snapshots);
        let volumes = self.name_snapshots(volumes, &snapshots);
        self.build_layers(&mut snapshots);
        self.first_corruption()?;
        Ok(self.assemble(volumes, names, snapshots, (session, boot)))
    }

    /// Proves as much as can be proven of a store that may be damaged, and reports it.
    pub fn verify(mut self) -> CheckReport {
        let (volumes, _) = self.build_volumes();
        let mut snapshots = self.build_snapshots(&volumes);
        self.link(&mut snapshots);
        self.check_heads(&volumes, &snapshots);
        self.check_families(&volumes, &snapshots);
        let volumes = self.name_snapshots(volumes, &snapshots);
        self.build_layers(&mut snapshots);
        CheckReport {
            blocks_checked: self.blocks_read,
            extents_checked: self.entries.used().count() as u64,
            volumes_checked: volumes.iter().flatten().count() as u64,
            snapshots_checked: snapshots.iter().flatten().filter(|s| s.live() && !s.head()).count()
                as u64,
            findings: self.findings,
            checksums_open: 0,
        }
    }

    fn first_corruption(&self) -> Result<()> {
        match self.findings.iter().find(|f| f.severity == Severity::Corrupt) {
            None => Ok(()),
            Some(f) => {
                let index = f.index.map_or(String::new(), |index| format!(" {index}"));
                Err(Error::corrupt(format!(
                    "{}{index}: {}; `dbs check` lists all damage",
                    f.region, f.message
                )))
            }
        }
    }

    fn build_volumes(&mut self) -> (Vec<Option<Volume>>, HashMap<String, VolumeId>) {
        let mut volumes = Vec::new();
        let mut names = HashMap::new();
        for (index, slot) in std::mem::take(&mut self.volumes).into_iter().enumerate() {
            if slot == VolumeSlot::new_zeroed() {
                volumes.push(None);
                continue;
            }
            let index = index as u32;
            for fault in faults::volume(&slot, index, &self.geometry) {
                self.corrupt(RegionKind::Volumes, Some(index), &fault.to_string());
            }
            let name = slots::decode_name(&slot.name, slot.name_bytes).unwrap_or_default();
            let twin = names.insert(name.to_owned(), VolumeId(index + 1)).is_some();
            if twin && !name.is_empty() {
                let text = format!("a volume named {name:?} twice: one of them cannot be found");
                self.corrupt(RegionKind::Volumes, Some(index), &text);
            }
            let limits = VolumeLimits {
                iops: slot.limit_iops.get(),
                bandwidth: slot.limit_bandwidth.get(),
                burst_seconds: slot.limit_burst_seconds.get(),
            };
            volumes.push(Some(Volume {
                name: name.to_owned(),
                uuid: slot.uuid,
                size: slot.size.get(),
                created_ns: slot.created_ns.get(),
                revision: slot.revision.get(),
                flags: slot.flags.get(),
                head: SnapshotId(slot.head.get()),
                snapshots: BTreeMap::new(),
                writes: Default::default(),
                io: Default::default(),
                pace: Arc::new(Pace::new(limits)),
                key_slot: slot.key,
                key: None,
                rebuilds: 0,
            }));
        }
        (volumes, names)
    }

    fn build_snapshots(&mut self, volumes: &[Option<Volume>]) -> Vec<Option<Snapshot>> {
        let mut snapshots = Vec::new();
        for (index, slot) in std::mem::take(&mut self.snapshots).into_iter().enumerate() {
            if slot.used == 0 && slot == SnapshotSlot::new_zeroed() {
                snapshots.push(None);
                continue;
            }
            let is_volume =
                |id: u32| id != 0 && volumes.get(id as usize - 1).is_some_and(Option::is_some);
            for fault in faults::snapshot(&slot, index as u32, &self.geometry, is_volume) {
                self.corrupt(RegionKind::Snapshots, Some(index as u32), &fault.to_string());
            }
            let flags = slot.flags.get();
            if flags & SNAPSHOT_BACKED != 0 && !self.has_bases {
                let text = "a base, which the superblock does not tell of: an older version would read zeros";
                self.corrupt(RegionKind::Snapshots, Some(index as u32), text);
            }
            let name = slots::decode_name(&slot.name, slot.name_bytes);
            let labels = self.build_labels(index as u32, flags);
            snapshots.push(Some(Snapshot {
                name: name.unwrap_or_default().to_owned(),
                uuid: slot.uuid,
                size: slot.size.get(),
                created_ns: slot.created_ns.get(),
                revision: slot.revision.get(),
                volume: VolumeId(slot.volume.get()),
                parent: SnapshotId(slot.parent.get()),
                flags,
                family: slot.family,
                labels,
                children: BTreeSet::new(),
                layer: SeenLayer::default(),
            }));
        }
        snapshots
    }

    /// The labels in the label blocks of a slot, if they can be.
    pub(super) fn labels_of(&self, index: u32) -> Option<Vec<u8>> {
        let mut all = Vec::new();
        for part in 0..LABEL_BLOCKS {
            let bytes = self.labels.get(&(index * LABEL_BLOCKS + part));
            let mut bytes = bytes.cloned().unwrap_or_default();
            bytes.resize(crate::format::PAYLOAD_BYTES, 0);
            all.extend_from_slice(&bytes);
        }
        let length = u32::from_le_bytes([all[0], all[1], all[2], all[3]]) as usize;
        let labels = all.get(4..4usize.saturating_add(length))?;
        let right = length <= LABELS_MAX_BYTES && crate::format::labels::decode(labels).is_some();
        right.then(|| labels.to_vec())
    }

    fn build_labels(&mut self, index: u32, flags: u32) -> Vec<u8> {
        if flags & SNAPSHOT_LABELLED == 0 {
            return Vec::new();
        }
        let labels = self.labels_of(index);
        if labels.is_none() {
            let text = "impossible labels: they are lost";
            self.corrupt(RegionKind::Labels, Some(index * LABEL_BLOCKS), text);
        }
        (0..LABEL_BLOCKS).for_each(|part| drop(self.labels.remove(&(index * LABEL_BLOCKS + part))));
        labels.unwrap_or_default()
    }

    /// Fills in children, and proves that parents exist and lead to a root.
    fn link(&mut self, snapshots: &mut [Option<Snapshot>]) {
        let parents: Vec<_> =
            snapshots.iter().map(|s| s.as_ref().map_or(0, |s| s.parent.0)).collect();
        let used: Vec<_> = snapshots.iter().map(Option::is_some).collect();
        for (index, parent) in parents.iter().enumerate() {
            let at = *parent as usize;
            if at == 0 {
                continue;
            }
            match snapshots.get_mut(at - 1).and_then(Option::as_mut) {
                Some(parent) => {
                    parent.children.insert(index as u32 + 1);
                }
                None => {
                    let text = format!(
                        "its parent, snapshot {at}, does not exist: what shows through it is not known"
                    );
                    self.corrupt(RegionKind::Snapshots, Some(index as u32), &text);
                }
            }
        }
        // 0 unknown, 1 on the present path, 2 leads to a root.
        let mut state = vec![0u8; parents.len()];
        for start in (0..parents.len()).filter(|index| used[*index]) {
            let mut path = Vec::new();
            let mut at = start;
            let mut ends = false;
            while state[at] == 0 {
                state[at] = 1;
                path.push(at);
                match parents[at] as usize {
                    parent if (1..=parents.len()).contains(&parent) => at = parent - 1,
                    _ => {
                        ends = true;
                        break;
                    }
                }
            }
            if !ends && state[at] == 1 {
                let text = "its parents form a loop: what shows through it is not known";
                self.corrupt(RegionKind::Snapshots, Some(start as u32), text);
            }
            path.into_iter().for_each(|index| state[index] = 2);
        }
    }

    fn check_heads(&mut self, volumes: &[Option<Volume>], snapshots: &[Option<Snapshot>]) {
        let get =
            |id: SnapshotId| snapshots.get(id.index().wrapping_sub(1)).and_then(Option::as_ref);
        let mut heads = BTreeSet::new();
        for (index, volume) in volumes.iter().enumerate() {
            let Some(volume) = volume else { continue };
            let fault = match get(volume.head) {
                None => Some("does not exist: what the volume holds is not known".to_owned()),
                Some(head) if !head.head() || head.volume.index() != index + 1 => {
                    Some("is not a head of it: what the volume holds is not known".to_owned())
                }
                Some(head) if !head.children.is_empty() => {
                    Some("has children: writing to it would change what they show".to_owned())
                }
                Some(head) if head.size != volume.size => Some(format!(
                    "has {} bytes, not {}: where the volume ends is not known",
                    head.size, volume.size
                )),
                Some(_) => None,
            };
            if let Some(fault) = fault {
                let text = format!("its head, snapshot {}, {fault}", volume.head);
                self.corrupt(RegionKind::Volumes, Some(index as u32), &text);
            }
            heads.insert(volume.head.0);
        }
        for (index, snapshot) in snapshots.iter().enumerate() {
            let stray = snapshot.as_ref().is_some_and(|s| s.head());
            if stray && !heads.contains(&(index as u32 + 1)) {
                let text = "a head of no volume: nobody can find what it holds";
                self.corrupt(RegionKind::Snapshots, Some(index as u32), text);
            }
        }
    }

    fn name_snapshots(
        &mut self,
        mut volumes: Vec<Option<Volume>>,
        snapshots: &[Option<Snapshot>],
    ) -> Vec<Option<Volume>> {
        for (index, snapshot) in snapshots.iter().enumerate() {
            let Some(snapshot) = snapshot.as_ref().filter(|s| s.live() && !s.head()) else {
                continue;
            };
            let at = snapshot.volume.index().wrapping_sub(1);
            let Some(volume) = volumes.get_mut(at).and_then(Option::as_mut) else { continue };
            let id = SnapshotId(index as u32 + 1);
            if volume.snapshots.insert(snapshot.name.clone(), id).is_some() {
                let text = format!(
                    "a snapshot named {:?} twice in its volume: one of them cannot be found",
                    snapshot.name
                );
                self.corrupt(RegionKind::Snapshots, Some(index as u32), &text);
            }
        }
        volumes
    }

    /// Gives every entry to the layer it belongs to.
    fn build_layers(&mut self, snapshots: &mut [Option<Snapshot>]) {
        // Out of `self` for the time, so that findings can be noted on the way.
        let blocks = self.geometry.blocks_per_extent();
        let entries = std::mem::replace(&mut self.entries, Entries::new(blocks));
        let mut batch = Vec::new();
        for id in entries.used() {
            let Some((owner, logical)) = self.place(&entries, snapshots, id) else { continue };
            batch.push((owner, logical, id));
            if batch.len() == BATCH {
                self.add_to_layers(snapshots, &mut batch);
            }
        }
        self.add_to_layers(snapshots, &mut batch);
        self.entries = entries;
        snapshots.iter_mut().flatten().for_each(|snapshot| snapshot.layer.changeable().compact());
    }

    /// Gives entries (snapshot id, volume extent, entry id) to their layers, in the order of these: in another
    /// order each would go to another place in memory.
    fn add_to_layers(
        &mut self,
        snapshots: &mut [Option<Snapshot>],
        batch: &mut Vec<(u32, u32, u32)>,
    ) {
        batch.sort_unstable();
        for (owner, logical, id) in batch.drain(..) {
            if let Some(snapshot) = &mut snapshots[owner as usize - 1]
                && snapshot.layer.changeable().insert(logical, id).is_some()
            {
                // A finding that no layer outlives: which of the two it has does not matter.
                self.claimed_twice(id);
            }
        }
    }

    /// Proves one entry. A zero run goes to its layer at once; what else belongs to a snapshot is
    /// returned as snapshot id and volume extent.
    fn place(
        &mut self,
        entries: &Entries,
        snapshots: &mut [Option<Snapshot>],
        id: u32,
    ) -> Option<(u32, u32)> {
        let most = VOLUME_MAX_BYTES / EXTENT_MIN_BYTES.max(self.geometry.extent_bytes);
        let (region, index) = place_of(id);
        let (owner, logical) = entries.owner(id)?;
        let run = entries.run(id);
        if region == RegionKind::Extents && id >= self.geometry.data_extents() {
            let text = "extent in use behind the data region: what it held is lost";
            self.corrupt(region, Some(index), text);
            return None;
        }
        if u64::from(logical) + u64::from(run.max(1)) > most {
            let text = "behind the end of any volume: which part of one it is is not known";
            self.corrupt(region, Some(index), text);
            return None;
        }
        let slot = snapshots.get_mut((owner as usize).wrapping_sub(1));
        let Some(snapshot) = slot.and_then(Option::as_mut) else {
            let text = format!("owned by snapshot slot {owner}, which is free: a writer frees it");
            self.finding(Severity::Leak, region, Some(index), &text);
            self.leaked.push(id);
            if self.leaked.len() == LEAKS_MAX {
                self.corrupt(region, Some(index), "too many entries are owned by free slots");
            }
            return None;
        };
        if snapshot.backed() {
            let text =
                "owned by a base, whose content is in a file: which of them is right is not known";
            self.corrupt(region, Some(index), text);
            return None;
        }
        if let Some(fault) = self.compressed_fault(entries, id, snapshot.encrypted()) {
            self.corrupt(region, Some(index), fault);
            return None;
        }
        if run == 0 {
            return Some((owner, logical));
        }
        let reaches_in = |runs: &BTreeMap<u32, (u32, u32)>| {
            let before = runs.range(..logical + run).next_back();
            before.is_some_and(|(start, (length, _))| start + length > logical)
        };
        let layer = snapshot.layer.changeable();
        let overlaps = reaches_in(&layer.runs) || reaches_in(&layer.lost);
        if entries.is_lost(id) {
            layer.lost.insert(logical, (run, id));
            let text = format!(
                "extents {logical} to {} of snapshot {owner} are lost since a repair: reading them \
                 fails where nothing hides them",
                logical + run - 1
            );
            self.note(region, index, &text);
        } else {
            layer.runs.insert(logical, (run, id));
        }
        if overlaps {
            self.claimed_twice(id);
        }
        None
    }

    /// Why an extent cannot be compressed that says so.
    fn compressed_fault(
        &self,
        entries: &Entries,
        id: u32,
        is_encrypted: bool,
    ) -> Option<&'static str> {
        match entries.is_compressed(id) {
            true if !self.has_compressed => Some(
                "compressed, which the superblock does not tell of: an older version would read it as it lies",
            ),
            true if is_encrypted => {
                Some("compressed, of a layer that is encrypted: what it holds is not known")
            }
            _ => None,
        }
    }

    fn claimed_twice(&mut self, id: u32) {
        let (region, index) = place_of(id);
        let text = "another entry claims the same volume extent: which one is right is not known";
        self.corrupt(region, Some(index), text);
    }

    fn assemble(
        mut self,
        mut volumes: Vec<Option<Volume>>,
        names: HashMap<String, VolumeId>,
        snapshots: Vec<Option<Snapshot>>,
        (session, boot): (u64, [u8; 16]),
    ) -> (Meta, Vec<Finding>) {
        let geometry = self.geometry;
        self.leaked.iter().for_each(|id| self.entries.release(*id));
        self.entries.compact();
        self.entries.start_counting();
        // Who asked before the store was opened anew finds another number.
        volumes.iter_mut().flatten().for_each(|volume| volume.rebuilds = session >> 16);
        let items = self.geometry.items_per_block(RegionKind::Extents);
        let paging = Paging::new(self.held(), items);
        let free_slots = |capacity: u32, used: &dyn Fn(usize) -> bool| {
            let mut free = FreeSet::default();
            (0..capacity).filter(|slot| !used(*slot as usize)).for_each(|slot| free.insert(slot));
            free
        };
        let volumes_free =
            free_slots(geometry.volumes, &|i| volumes.get(i).is_some_and(Option::is_some));
        let snapshots_free =
            free_slots(geometry.snapshots, &|i| snapshots.get(i).is_some_and(Option::is_some));
        let deleting = snapshots
            .iter()
            .enumerate()
            .filter(|(_, s)| s.as_ref().is_some_and(|s| !s.live()))
            .map(|(index, _)| index as u32 + 1)
            .collect();
        let labelled = |(index, s): (usize, &Option<Snapshot>)| {
            s.as_ref().filter(|s| !s.labels.is_empty()).map(|_| index as u32)
        };
        let label_room = snapshots.iter().enumerate().filter_map(labelled).collect();
        let mut extents = Allocator::new(true);
        let mut spares = Allocator::new(false);
        extents.add_free(0..geometry.data_extents());
        spares.add_free(0..geometry.spares);
        for id in self.entries.used() {
            match id.checked_sub(SPARE_BASE) {
                Some(spare) => spares.withdraw(spare..spare + 1),
                None => extents.withdraw(id..id + 1),
            }
        }
        let ring_blocks = (geometry.region(RegionKind::Journal).length / BLOCK_BYTES) as u32;
        let live = self.ring_groups();
        let mut log = Log::new(self.durable, session, Ring::new(ring_blocks, live, self.head));
        for key in self.dirty {
            log.mark_dirty_since(key, self.checkpoint + 1);
        }
        for (key, copy) in self.trusted {
            log.trust_copy(key, copy);
        }
        let mut meta = Meta {
            geometry,
            uuid: self.uuid,
            given: self.given,
            boot,
            volumes,
            volume_names: names,
            volumes_free,
            snapshots,
            snapshots_free,
            slots_kept: 0,
            deleting,
            put_off: BTreeMap::new(),
            next_deleted: SnapshotId::NONE,
            in_use: Vec::new(),
            entries: self.entries,
            paging,
            extents,
            spares,
            unlogged: Default::default(),
            moving: BTreeSet::new(),
            next_extent: 0,
            sight: Sight { group: self.durable + 1, fence: 0 },
            tree_version: 0,
            staged: BTreeSet::new(),
            staged_left: false,
            marks: self.marks,
            group_marks: self.durable_marks,
            room: self.marks,
            within_room: false,
            label_room,
            log,
            locks: RangeLocks::default(),
            fence: Fence::default(),
            requests: 0,
            changes: 0,
            sums: crate::meta::sums::Sums::new(&geometry),
            views: Default::default(),
            open_volumes: HashMap::new(),
            open_snapshots: HashMap::new(),
            holders: Default::default(),
        };
        for batch in &self.tail {
            let mut rest = batch.as_slice();
            while let Some(record) = Record::decode(&mut rest) {
                meta.append(&record);
            }
        }
        self.leaked.iter().for_each(|id| meta.append(&Record::Free { entry: *id }));
        (meta, self.findings)
    }

    fn ring_groups(&self) -> VecDeque<(u64, u32, u32)> {
        self.groups.iter().map(|(sequence, at, blocks, _)| (*sequence, *at, *blocks)).collect()
    }
}

/// Region and index there of an entry.
pub(super) fn place_of(id: u32) -> (RegionKind, u32) {
    match id.checked_sub(SPARE_BASE) {
        Some(index) => (RegionKind::Spares, index),
        None => (RegionKind::Extents, id),
    }
}
