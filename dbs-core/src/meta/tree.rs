//! Volumes, snapshots and clones: every command that changes the tree, as one batch of records.

use super::holders::Target;
use super::{Meta, Seen, Sight, Snapshot, Step, Stop, Volume, names};
use crate::error::{Error, Result};
use crate::format::geometry::LABEL_BLOCKS;
use crate::format::record::Record;
use crate::format::slots::{
    SNAPSHOT_DELETED, SNAPSHOT_HEAD, SNAPSHOT_LABELLED, SNAPSHOT_PROTECTED, SNAPSHOT_USER_CREATED,
};
use crate::format::{RegionKind, labels};
use crate::info::Labels;
use crate::limits::VOLUME_MAX_BYTES;
use crate::sabotage::{self, Bug};
use crate::units::{SECTOR_BYTES, SnapshotId, VolumeId};
use std::collections::{BTreeMap, BTreeSet};

/// Identity and time of a new thing, from outside.
#[derive(Debug, Clone, Copy)]
pub struct Birth {
    /// Identity.
    pub uuid: [u8; 16],
    /// Nanoseconds since the Unix epoch.
    pub now_ns: u64,
}

impl Meta {
    /// Whether a volume may have this name and size.
    ///
    /// # Errors
    /// `Exists`, `Invalid`.
    pub fn check_new_volume(&self, name: &str, size: u64) -> Result<()> {
        names::check("volume", name)?;
        self.check_volume_name_free(name)?;
        check_size(size)?;
        self.free_volume()?;
        self.free_snapshot().map(drop)
    }

    fn free_volume(&self) -> Result<u32> {
        self.volumes_free.lowest().ok_or_else(|| {
            Error::no_space(format!(
                "the volume table is full ({} volumes); delete one, or make a store with a larger \
                 --max-volumes",
                self.geometry.volumes
            ))
        })
    }

    fn free_snapshot(&self) -> Result<u32> {
        self.snapshots_free.lowest().ok_or_else(|| {
            Error::no_space(format!(
                "the snapshot table is full ({} slots, heads included); delete a snapshot, or make \
                 a store with a larger --max-snapshots",
                self.geometry.snapshots
            ))
        })
    }

    /// Creates a volume, on a snapshot or empty.
    ///
    /// # Errors
    /// `Exists`, `Invalid`, `NoSpace` when a table is full; [`Stop::Room`].
    pub fn create_volume(
        &mut self,
        name: &str,
        size: u64,
        parent: SnapshotId,
        births: [Birth; 2],
    ) -> Step<VolumeId> {
        self.check_new_volume(name, size)?;
        let head = self.next_snapshot()?;
        let slot = self.free_volume()?;
        self.require_block(RegionKind::Volumes, slot)?;
        let (key_slot, key) = self.key_of(parent)?;
        self.volumes_free.remove(slot);
        let id = VolumeId(slot + 1);
        self.put_snapshot(head, new_head(id, parent, size, births[1]));
        let volume = Volume {
            name: name.to_owned(),
            uuid: births[0].uuid,
            size,
            created_ns: births[0].now_ns,
            revision: 0,
            flags: 0,
            head,
            snapshots: BTreeMap::new(),
            writes: Default::default(),
            io: Default::default(),
            pace: Default::default(),
            key_slot,
            key,
            rebuilds: 0,
        };
        if self.volumes.len() <= slot as usize {
            self.volumes.resize_with(slot as usize + 1, || None);
        }
        self.volumes[slot as usize] = Some(volume);
        self.volume_names.insert(name.to_owned(), id);
        self.append_volume(id);
        Ok(id)
    }

    /// Renames a volume.
    ///
    /// # Errors
    /// `Exists`, `Invalid`.
    pub fn rename_volume(&mut self, id: VolumeId, new: &str) -> Result<()> {
        names::check("volume", new)?;
        if self.volume(id).name == new {
            return Ok(());
        }
        self.check_volume_name_free(new)?;
        let old = std::mem::replace(&mut self.volume_mut(id).name, new.to_owned());
        self.volume_names.remove(&old);
        self.volume_names.insert(new.to_owned(), id);
        self.append_volume(id);
        Ok(())
    }

    /// Sets the size; what lies beyond is the caller's business.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn set_size(&mut self, id: VolumeId, size: u64) -> Result<()> {
        check_size(size)?;
        let head = self.volume(id).head;
        self.note_write(head);
        self.volume_mut(id).size = size;
        self.snapshot_mut(head).size = size;
        self.append_volume(id);
        self.append_snapshot(head);
        Ok(())
    }

    /// Deletes a volume: its snapshots and head lose their names at once, their extents later.
    ///
    /// # Errors
    /// `Busy` if it is open or has a protected snapshot.
    pub fn delete_volume(&mut self, id: VolumeId) -> Result<()> {
        self.check_closed(id)?;
        let volume = self.volume(id);
        let name = volume.name.clone();
        for (snapshot, id) in &volume.snapshots {
            self.check_deletable(&name, snapshot, *id)?;
        }
        let members: Vec<_> =
            self.snapshots().filter(|(_, s)| s.volume == id).map(|(s, _)| s).collect();
        if members.len() * 16 > self.log.pending_soft_max() {
            return Err(Error::busy(format!(
                "volume `{name}` has too many snapshots ({}) to be deleted in one step with this \
                 journal; delete some of them first",
                members.len()
            )));
        }
        for member in members {
            self.drop_snapshot(member, VolumeId::NONE);
        }
        self.volumes[id.index() - 1] = None;
        self.volume_names.remove(&name);
        self.volumes_free.insert(id.0 - 1);
        self.append_volume(id);
        Ok(())
    }

    /// Refuses what [`Meta::create_snapshot`] would refuse now, and asks for what it needs: it
    /// should find all that in place, as writers wait for it.
    ///
    /// # Errors
    /// As [`Meta::create_snapshot`].
    pub fn prepare_snapshot(&mut self, id: VolumeId, name: &str, with: &Labels) -> Step<()> {
        self.check_snapshot_name_free(id, name)?;
        self.require_labels(self.volume(id).head, &encode_labels(with)?)?;
        self.next_snapshot()?;
        Ok(())
    }

    /// The earliest time at which a snapshot of the head can have been taken: right after what the head builds on. A clock that was
    /// set back must not make it older, since the newest snapshot is looked for by time.
    pub fn behind_parent_ns(&self, id: VolumeId) -> u64 {
        let parent = self.snapshot(self.volume(id).head).parent;
        if parent.is_none() { 0 } else { self.snapshot(parent).created_ns.saturating_add(1) }
    }

    /// Freezes the head as a snapshot and gives the volume a new, empty one on top. The caller
    /// has made sure that no write is in flight. The snapshot gets an identity of its own: that of its head
    /// is also in each copy of the store, where the next snapshot holds something else.
    ///
    /// # Errors
    /// `Exists`, `Invalid`, `NoSpace` when a table is full; [`Stop::Room`].
    pub fn create_snapshot(
        &mut self,
        id: VolumeId,
        name: &str,
        user_created: bool,
        with: &Labels,
        births: [Birth; 2],
    ) -> Step<SnapshotId> {
        self.check_snapshot_name_free(id, name)?;
        let encoded = encode_labels(with)?;
        self.require_labels(self.volume(id).head, &encoded)?;
        let new = self.next_snapshot()?;
        let (frozen, size, revision) = {
            let volume = self.volume(id);
            (volume.head, volume.size, volume.revision)
        };
        self.put_snapshot(new, new_head(id, frozen, size, births[1]));
        let snapshot = self.snapshot_mut(frozen);
        name.clone_into(&mut snapshot.name);
        snapshot.uuid = births[0].uuid;
        snapshot.created_ns = births[0].now_ns;
        snapshot.revision = revision;
        snapshot.flags &= !SNAPSHOT_HEAD;
        if user_created {
            snapshot.flags |= SNAPSHOT_USER_CREATED;
        }
        self.put_labels(frozen, encoded);
        let volume = self.volume_mut(id);
        volume.head = new;
        volume.snapshots.insert(name.to_owned(), frozen);
        self.append_snapshot(frozen);
        self.append_volume(id);
        // What was looked up for the old head is as true for the new one.
        self.views.hand_over(frozen.0, new.0);
        Ok(frozen)
    }

    /// Renames a snapshot.
    ///
    /// # Errors
    /// `Exists`, `Invalid`.
    pub fn rename_snapshot(&mut self, volume: VolumeId, id: SnapshotId, new: &str) -> Result<()> {
        if self.snapshot(id).name == new {
            return Ok(());
        }
        self.check_snapshot_name_free(volume, new)?;
        let old = std::mem::replace(&mut self.snapshot_mut(id).name, new.to_owned());
        let volume = self.volume_mut(volume);
        volume.snapshots.remove(&old);
        volume.snapshots.insert(new.to_owned(), id);
        self.append_snapshot(id);
        Ok(())
    }

    /// Deletes a snapshot: its name goes at once, its extents are merged or freed later.
    ///
    /// # Errors
    /// `Busy` if it is protected or open.
    pub fn delete_snapshot(&mut self, volume: VolumeId, id: SnapshotId) -> Result<()> {
        let name = self.snapshot(id).name.clone();
        self.check_deletable(&self.volume(volume).name, &name, id)?;
        self.volume_mut(volume).snapshots.remove(&name);
        self.drop_snapshot(id, volume);
        Ok(())
    }

    /// Removes a deleted snapshot whose layer is empty and that has at most one child, which
    /// takes its place under its parent.
    pub(super) fn unlink(&mut self, id: SnapshotId) {
        let snapshot = self.snapshot(id);
        assert!(!snapshot.live() && snapshot.layer.is_empty() && snapshot.children.len() <= 1);
        let (parent, child) = (snapshot.parent, snapshot.children.first().copied());
        self.deleting.remove(&id.0);
        self.put_off.remove(&id.0);
        self.views.remove(id.0);
        self.snapshots[id.index() - 1] = None;
        self.snapshots_free.insert(id.0 - 1);
        if !parent.is_none() {
            self.snapshot_mut(parent).children.remove(&id.0);
            self.next_deleted = parent;
        }
        if let Some(child) = child.map(SnapshotId) {
            // An empty layer between them said nothing: what views remember stays true.
            self.link(child, parent);
        }
        self.append_snapshot(id);
    }

    /// Gives `child` another parent, or none: what it showed through the old one is out of sight. `flaw`
    /// is the planted bug that leaves views as they are.
    pub(super) fn set_parent(&mut self, child: SnapshotId, parent: SnapshotId, flaw: Bug) {
        let old = self.snapshot(child).parent;
        if !old.is_none() {
            self.snapshot_mut(old).children.remove(&child.0);
        }
        self.link(child, parent);
        self.lose_sight();
        if !sabotage::is(flaw) {
            self.tree_version += 1;
        }
    }

    /// Something visible no longer shows a snapshot that it showed until now.
    pub(super) fn lose_sight(&mut self) {
        self.sight = Sight { group: self.log.next, fence: self.fence.next() };
    }

    /// When something was lost sight of last.
    pub fn sight(&self) -> Sight {
        self.sight
    }

    /// Who may still be shown what was lost sight of until `until`; nobody from some moment on.
    pub fn still_seen(&mut self, until: Sight) -> Option<Seen> {
        if until.group > self.log.durable {
            return Some(Seen::ByCrash);
        }
        if until.fence > 0 && self.fence.oldest() < until.fence {
            return Some(Seen::ByReads);
        }
        if self.sight.fence <= until.fence {
            // Reads need not be looked through again until the next time.
            self.sight.fence = 0;
        }
        None
    }

    pub(super) fn link(&mut self, child: SnapshotId, parent: SnapshotId) {
        self.snapshot_mut(child).parent = parent;
        if !parent.is_none() {
            self.snapshot_mut(parent).children.insert(child.0);
        }
        self.append_snapshot(child);
    }

    /// Counts a handle on a volume or snapshot.
    pub fn opened(&mut self, volume: VolumeId, snapshot: Option<SnapshotId>) {
        let count = match snapshot {
            Some(snapshot) => self.open_snapshots.entry(snapshot.0),
            None => self.open_volumes.entry(volume.0),
        };
        *count.or_default() += 1;
    }

    /// Ends a handle; the last one drops what was remembered for it.
    pub fn closed(&mut self, volume: VolumeId, snapshot: Option<SnapshotId>) {
        let (table, key, view) = match snapshot {
            Some(snapshot) => (&mut self.open_snapshots, snapshot.0, snapshot.0),
            None => {
                let head = self.volumes[volume.index() - 1].as_ref().map_or(0, |v| v.head.0);
                (&mut self.open_volumes, volume.0, head)
            }
        };
        if let Some(count) = table.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                table.remove(&key);
                self.views.remove(view);
            }
        }
    }

    /// Counts a read of a volume or of its snapshots.
    #[inline]
    pub fn count_read(&self, volume: VolumeId, bytes: u64) {
        if let Some(Some(volume)) = self.volumes.get(volume.index() - 1) {
            volume.io.count_read(bytes);
        }
    }

    /// Counts a write of a volume.
    #[inline]
    pub fn count_write(&self, volume: VolumeId, bytes: u64) {
        if let Some(Some(volume)) = self.volumes.get(volume.index() - 1) {
            volume.io.count_write(bytes);
        }
    }

    /// Whether somebody holds the volume's head open.
    pub fn is_open(&self, volume: VolumeId) -> bool {
        self.open_volumes.contains_key(&volume.0)
    }

    /// Refuses what cannot be done to a volume that somebody has open.
    ///
    /// # Errors
    /// `Busy`.
    pub fn check_closed(&self, volume: VolumeId) -> Result<()> {
        if self.is_open(volume) {
            let name = &self.volume(volume).name;
            return Err(self.open_error(&format!("volume `{name}`"), &Target::Volume(volume)));
        }
        Ok(())
    }

    pub(super) fn check_volume_name_free(&self, name: &str) -> Result<()> {
        if self.volume_names.contains_key(name) {
            return Err(Error::exists(format!("a volume `{name}` exists already")));
        }
        Ok(())
    }

    pub(super) fn check_snapshot_name_free(&self, volume: VolumeId, name: &str) -> Result<()> {
        names::check("snapshot", name)?;
        let volume = self.volume(volume);
        if volume.snapshots.contains_key(name) {
            let full = format!("{}@{name}", volume.name);
            return Err(Error::exists(format!("a snapshot `{full}` exists already")));
        }
        Ok(())
    }

    fn check_deletable(&self, volume: &str, name: &str, id: SnapshotId) -> Result<()> {
        if self.snapshot(id).flags & SNAPSHOT_PROTECTED != 0 {
            return Err(Error::busy(format!(
                "snapshot `{volume}@{name}` is protected; unprotect it first"
            )));
        }
        if self.open_snapshots.contains_key(&id.0) {
            let target = Target::Snapshot(self.snapshot(id).volume, id);
            return Err(self.open_error(&format!("snapshot `{volume}@{name}`"), &target));
        }
        Ok(())
    }

    pub(super) fn drop_snapshot(&mut self, id: SnapshotId, volume: VolumeId) {
        let snapshot = self.snapshot_mut(id);
        snapshot.flags = SNAPSHOT_DELETED;
        snapshot.volume = volume;
        snapshot.name.clear();
        snapshot.labels.clear();
        self.deleting.insert(id.0);
        self.views.remove(id.0);
        self.lose_sight();
        self.append(&Record::Drop { index: id.0 - 1, volume: volume.0 });
    }

    /// Whether the table has no place for all snapshots that are about to come, and something is deleted that leaves some.
    pub fn wants_slots(&self) -> bool {
        self.snapshots_free.count() < self.slots_kept && !self.deleting.is_empty()
    }

    /// The slot the next snapshot gets; nothing is changed but the high-water mark.
    pub(super) fn next_snapshot(&mut self) -> Step<SnapshotId> {
        let slot = self.free_snapshot()?;
        self.require_block(RegionKind::Snapshots, slot)?;
        Ok(SnapshotId(slot + 1))
    }

    /// Fills a slot, with a snapshot that is encrypted as its parent is.
    pub(super) fn put_snapshot(&mut self, id: SnapshotId, mut snapshot: Snapshot) {
        let parent = snapshot.parent;
        if !parent.is_none() {
            snapshot.family = self.snapshot(parent).family;
        }
        self.snapshots_free.remove(id.0 - 1);
        if self.snapshots.len() < id.index() {
            self.snapshots.resize_with(id.index(), || None);
        }
        self.snapshots[id.index() - 1] = Some(snapshot);
        if !parent.is_none() {
            self.snapshot_mut(parent).children.insert(id.0);
        }
        self.append_snapshot(id);
    }

    pub(super) fn require_labels(&self, id: SnapshotId, encoded: &[u8]) -> Step<()> {
        if encoded.is_empty() || self.label_room.contains(&(id.0 - 1)) {
            return Ok(());
        }
        let first = (id.0 - 1) * LABEL_BLOCKS;
        Err(Stop::Room(RegionKind::Labels, first..first + LABEL_BLOCKS))
    }

    pub(super) fn put_labels(&mut self, id: SnapshotId, encoded: Vec<u8>) {
        let snapshot = self.snapshot_mut(id);
        if encoded.is_empty() && snapshot.labels.is_empty() {
            return;
        }
        snapshot.flags &= !SNAPSHOT_LABELLED;
        if !encoded.is_empty() {
            snapshot.flags |= SNAPSHOT_LABELLED;
        }
        snapshot.labels = encoded;
        let labels = snapshot.labels.clone();
        for part in 0..LABEL_BLOCKS {
            let index = (id.0 - 1) * LABEL_BLOCKS + part;
            self.append(&Record::Labels { index, bytes: &super::label_part(&labels, part) });
        }
    }
}

pub(super) fn new_head(volume: VolumeId, parent: SnapshotId, size: u64, birth: Birth) -> Snapshot {
    Snapshot {
        name: String::new(),
        uuid: birth.uuid,
        size,
        created_ns: birth.now_ns,
        revision: 0,
        volume,
        parent,
        flags: SNAPSHOT_HEAD,
        family: [0; 16],
        labels: Vec::new(),
        children: BTreeSet::new(),
        layer: super::layer::SeenLayer::default(),
    }
}

pub(crate) fn encode_labels(with: &Labels) -> Result<Vec<u8>> {
    if with.is_empty() {
        return Ok(Vec::new());
    }
    labels::encode(with).ok_or_else(|| {
        Error::invalid(format!(
            "the labels need more than {} bytes; remove or shorten some",
            crate::limits::LABELS_MAX_BYTES
        ))
    })
}

/// Whether a volume can have this size.
///
/// # Errors
/// `Invalid`.
pub fn check_size(size: u64) -> Result<()> {
    if size == 0 || !size.is_multiple_of(SECTOR_BYTES) || size > VOLUME_MAX_BYTES {
        return Err(Error::invalid(format!(
            "a volume cannot have {size} bytes: the size must be a multiple of 512 bytes, up to \
             64 TiB"
        )));
    }
    Ok(())
}
