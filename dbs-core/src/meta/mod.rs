//! The state of an open store in memory. No I/O, no clock, no threads: each call is a step of a
//! state machine, and says what must be read, written or committed by whom it is called.

pub mod adopt;
pub mod alloc;
pub mod attributes;
pub mod base;
pub mod bits;
pub mod commit;
pub mod compress;
pub mod counts;
pub mod encryption;
pub mod entries;
pub mod flatten;
pub mod holders;
pub mod ids;
pub mod lanes;
pub mod layer;
pub mod layer_write;
pub mod layers;
pub mod load;
pub mod locks;
pub mod log;
pub mod merge;
pub mod names;
pub mod pace;
pub mod paging;
pub mod pieces;
pub mod plan;
pub mod prune;
mod ranges;
pub mod relink;
pub mod rollback;
pub mod sums;
pub mod table;
pub mod tail;
pub mod tree;
pub mod usage;
pub mod view;
pub mod watch;
pub mod zero;

use crate::crypt::DataKey;
use crate::error::{Error, Result};
use crate::format::entry::ENTRY_MAX_BYTES;
use crate::format::geometry::LABEL_BLOCKS;
use crate::format::record::Record;
use crate::format::slots::{
    self, KeySlot, SNAPSHOT_BACKED, SNAPSHOT_DELETED, SNAPSHOT_HEAD, SnapshotSlot, VolumeSlot,
};
use crate::format::{Geometry, RegionKind};
use crate::info::DataPlace;
use crate::limits::ROOM_BLOCKS;
use crate::looks;
use crate::units::{BLOCK_BYTES, DeviceExtent, SnapshotId, VolumeId};
use alloc::{Allocator, FreeSet};
use counts::IoCounts;
use entries::{Away, Entries, SPARE_BASE};
use ids::IdMap;
use layer::SeenLayer;
use locks::{Fence, RangeLocks, Space};
use log::Log;
use pace::Pace;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use view::Views;
use zerocopy::IntoBytes;

/// Why a step cannot be taken now, and what its caller does before it tries again.
#[derive(Debug)]
pub enum Stop {
    /// It never can.
    Error(Error),
    /// Reserve storage for these metadata blocks of a region.
    Room(RegionKind, std::ops::Range<u32>),
    /// The next group is as long as it may get: commit, and try again.
    Long,
    /// No extent is free: free what is deleted, commit, and try again if that helped.
    Space,
    /// Read the metadata block of this data extent ([`paging`]), and those of the entries that its layer has in so
    /// many volume extents from there on.
    Away { extent: u32, ahead: u32 },
    /// This data extent is compressed, and blocks of it are to be written: move it to one that is not. Who asks holds
    /// blocks of that place in the layer, or has the turn of background work: but until it is its turn somebody else may
    /// have moved the extent, and given the place on the device to another layer. So it says whose it was.
    Expand { extent: u32, owner: Option<(u32, u32)> },
}

impl Stop {
    /// Of a step that goes on to the next entries of the same layer, as far as so many volume extents.
    fn ahead(Away(extent): Away, extents: u64) -> Self {
        Self::Away { extent, ahead: u32::try_from(extents).unwrap_or(u32::MAX).max(1) }
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl From<Away> for Stop {
    fn from(Away(extent): Away) -> Self {
        Self::Away { extent, ahead: 1 }
    }
}

/// Result of a step.
pub type Step<T> = std::result::Result<T, Stop>;

/// A volume.
#[derive(Debug)]
pub struct Volume {
    /// Name, unique.
    pub name: String,
    /// Identity.
    pub uuid: [u8; 16],
    /// Size in bytes.
    pub size: u64,
    /// Creation time.
    pub created_ns: u64,
    /// Revision counter.
    pub revision: u64,
    /// `VOLUME_*` flags.
    pub flags: u32,
    /// Head.
    pub head: SnapshotId,
    /// Named snapshots.
    pub snapshots: BTreeMap<String, SnapshotId>,
    /// Changes of the content of its head, or of a snapshot, since the store was opened. Counted when they
    /// can be read.
    pub writes: AtomicU64,
    /// What was read and written since the store was opened.
    pub io: IoCounts,
    /// How fast it may be used.
    pub pace: Arc<Pace>,
    /// Key of what its layers hold, wrapped; zeros if there is none.
    pub key_slot: KeySlot,
    /// The key, while it is unlocked.
    pub key: Option<Arc<DataKey>>,
    /// Goes up when somebody begins to write its layers anew. Where it begins is another number each time that the
    /// store is opened.
    pub rebuilds: u64,
}

/// A snapshot or head.
#[derive(Debug)]
pub struct Snapshot {
    /// Name; empty for heads and deleted ones.
    pub name: String,
    /// Identity.
    pub uuid: [u8; 16],
    /// Size in bytes.
    pub size: u64,
    /// Creation time.
    pub created_ns: u64,
    /// Revision counter when it was taken.
    pub revision: u64,
    /// Volume it belongs to.
    pub volume: VolumeId,
    /// Parent.
    pub parent: SnapshotId,
    /// `SNAPSHOT_*` flags.
    pub flags: u32,
    /// Which key its data is encrypted with, as that of all layers it builds on; zeros if it is not.
    pub family: [u8; 16],
    /// Labels as encoded on the device; empty for none.
    pub labels: Vec<u8>,
    /// Children.
    pub children: BTreeSet<u32>,
    /// Its own layer.
    pub layer: SeenLayer,
}

impl Snapshot {
    /// Whether it is visible to users: a head or a named snapshot.
    pub fn live(&self) -> bool {
        self.flags & SNAPSHOT_DELETED == 0
    }

    /// Where its blocks are held.
    pub fn space(&self) -> Space {
        if self.head() { Space::Head(self.volume) } else { Space::Snapshots(self.volume) }
    }

    /// Whether it is a base: its content is in a file outside the store.
    pub fn backed(&self) -> bool {
        self.flags & SNAPSHOT_BACKED != 0
    }

    /// Whether what it holds, and what shows through it, is encrypted.
    #[inline]
    pub fn encrypted(&self) -> bool {
        self.family != [0; 16]
    }

    /// Whether it is a head.
    pub fn head(&self) -> bool {
        self.flags & SNAPSHOT_HEAD != 0
    }
}

/// When something visible lost sight of a snapshot: a snapshot or volume was deleted or rolled back, a
/// clone was cut off, or a tree was linked anew.
#[derive(Debug, Clone, Copy)]
pub struct Sight {
    /// Group that makes it durable.
    group: u64,
    /// Reads numbered below this may have been planned before it.
    fence: u64,
}

/// Who may still be shown what something visible has lost sight of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// That is not durable: a crash would bring back what showed it.
    ByCrash,
    /// Reads that began before.
    ByReads,
}

/// The state of an open store. Aligned so that nobody who takes the lock around it is in the way of who
/// looks at it.
#[repr(align(128))]
pub struct Meta {
    /// Shape.
    pub geometry: Geometry,
    /// What the store's metadata is marked with.
    pub uuid: [u8; 16],
    /// The uuid it was given since, if it was.
    pub given: Option<[u8; 16]>,
    /// Boot this process runs in.
    pub boot: [u8; 16],
    volumes: Vec<Option<Volume>>,
    volume_names: HashMap<String, VolumeId>,
    volumes_free: FreeSet,
    snapshots: Vec<Option<Snapshot>>,
    snapshots_free: FreeSet,
    /// Snapshots that are about to come, each with a place in the table if there are enough.
    pub(crate) slots_kept: u32,
    deleting: BTreeSet<u32>,
    /// Those of them that are not merged for now ([`Meta::put_off`]); whether room below may end that.
    put_off: BTreeMap<u32, bool>,
    /// Where background work goes on: a deleted snapshot, unless it is gone.
    next_deleted: SnapshotId,
    /// Snapshots whose entries a step of background work is copying: they are not freed meanwhile, nor
    /// handed to others.
    in_use: Vec<SnapshotId>,
    /// Extent and spare entries.
    pub entries: Entries,
    /// Which of their bitmaps are away.
    paging: paging::Paging,
    /// Data extents.
    pub extents: Allocator,
    spares: Allocator,
    /// Entries handed out but in no record yet, with the spare entry each will replace.
    unlogged: IdMap<Option<u32>>,
    /// Extents that content is being moved to: taken, and no layer's yet.
    moving: BTreeSet<u32>,
    /// Next extent to prefer, so that neighbours stay adjacent.
    next_extent: u32,
    /// The last change by which something visible lost sight of a snapshot.
    sight: Sight,
    /// Changes of parents by which views have become wrong.
    tree_version: u64,
    /// Volumes whose revision counter has changed since their last record.
    staged: BTreeSet<u32>,
    /// The last group had no room for some of them.
    staged_left: bool,
    /// Valid metadata blocks by [`RegionKind::mark`].
    marks: [u32; 4],
    /// The marks when the last group was taken.
    group_marks: [u32; 4],
    /// Metadata blocks whose storage is reserved.
    room: [u32; 4],
    /// Nothing may be done now that needs more of it.
    within_room: bool,
    /// Snapshot slots whose label blocks' storage is reserved.
    label_room: HashSet<u32>,
    /// What is on its way to the device.
    pub log: Log,
    /// Checksums of data, if the store has them.
    pub sums: Option<Box<sums::Sums>>,
    /// Order among writers.
    pub locks: RangeLocks,
    /// Running I/O.
    pub fence: Fence,
    /// Reads of volumes begun with the state to themselves.
    pub(crate) requests: u64,
    /// Changes of what volumes and snapshots there are, and of what is said of them.
    pub changes: u64,
    /// What look-ups have found.
    pub views: Views,
    open_volumes: HashMap<u32, u32>,
    open_snapshots: HashMap<u32, u32>,
    holders: holders::Holders,
}

impl Meta {
    /// The uuid of the store, for its users.
    pub fn identity(&self) -> [u8; 16] {
        self.given.unwrap_or(self.uuid)
    }

    /// Reads and writes of volumes begun.
    pub fn requests_begun(&mut self) -> u64 {
        self.requests + self.locks.requests() + self.fence.requests()
    }

    /// A volume by id.
    ///
    /// # Panics
    /// If there is none: ids come from names and handles that keep the volume.
    pub fn volume(&self, id: VolumeId) -> &Volume {
        self.volumes[id.index() - 1].as_ref().expect("volume ids in use are live")
    }

    fn volume_mut(&mut self, id: VolumeId) -> &mut Volume {
        self.volumes[id.index() - 1].as_mut().expect("volume ids in use are live")
    }

    /// A snapshot by id.
    ///
    /// # Panics
    /// If there is none: ids are proven at load and never reused while referenced.
    pub fn snapshot(&self, id: SnapshotId) -> &Snapshot {
        looks::one();
        self.snapshots[id.index() - 1].as_ref().expect("snapshot ids in use are live")
    }

    /// A snapshot by an id that may be anything.
    pub fn try_snapshot(&self, id: SnapshotId) -> Option<&Snapshot> {
        looks::one();
        self.snapshots.get(id.index().wrapping_sub(1))?.as_ref()
    }

    fn snapshot_mut(&mut self, id: SnapshotId) -> &mut Snapshot {
        self.snapshots[id.index() - 1].as_mut().expect("snapshot ids in use are live")
    }

    /// The content of a head or snapshot has changed.
    #[inline]
    fn note_write(&self, owner: SnapshotId) {
        let volume = self.snapshot(owner).volume;
        self.volume(volume).writes.fetch_add(1, Ordering::Relaxed);
    }

    /// All volumes in use, by id.
    pub fn volumes(&self) -> impl Iterator<Item = (VolumeId, &Volume)> {
        self.volumes_from(0)
    }

    /// As [`Meta::volumes`], of those behind the first so many ids.
    pub fn volumes_from(&self, first: usize) -> impl Iterator<Item = (VolumeId, &Volume)> {
        let all = self.volumes.iter().enumerate().skip(first);
        all.filter_map(|(index, v)| Some((VolumeId(index as u32 + 1), v.as_ref()?)))
    }

    /// All snapshots in use, heads and deleted ones included, by id.
    pub fn snapshots(&self) -> impl Iterator<Item = (SnapshotId, &Snapshot)> {
        let all = self.snapshots.iter().enumerate();
        let all = all.inspect(|_| looks::one());
        all.filter_map(|(index, s)| Some((SnapshotId(index as u32 + 1), s.as_ref()?)))
    }

    /// Deleted snapshots still in the tree, but for bases, which are there to stay.
    pub fn unneeded(&self) -> impl Iterator<Item = SnapshotId> {
        let all = self.deleting.iter().map(|id| SnapshotId(*id));
        all.filter(|id| !self.snapshot(*id).backed())
    }

    /// The volume of this name.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn find_volume(&self, name: &str) -> Result<VolumeId> {
        let found = self.volume_names.get(name).copied();
        found.ok_or_else(|| Error::not_found(format!("no volume `{name}` in this store")))
    }

    /// The snapshot of this name in a volume.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn find_snapshot(&self, volume: &str, name: &str) -> Result<(VolumeId, SnapshotId)> {
        let id = self.find_volume(volume)?;
        let found = self.volume(id).snapshots.get(name).copied();
        found
            .map(|snapshot| (id, snapshot))
            .ok_or_else(|| Error::not_found(format!("no snapshot `{volume}@{name}` in this store")))
    }

    /// Blocks of an extent.
    pub fn blocks_per_extent(&self) -> u32 {
        self.entries.blocks()
    }

    /// Byte offset of a block of a data extent.
    pub fn address(&self, entry: u32, block: u32) -> u64 {
        self.geometry.extent_address(DeviceExtent(entry)) + u64::from(block) * BLOCK_BYTES
    }

    /// What holds a byte of the data region.
    pub fn place_of(&self, address: u64) -> DataPlace {
        let inside = address - self.geometry.region(RegionKind::Data).offset;
        let (entry, rest) =
            (inside / self.geometry.extent_bytes, inside % self.geometry.extent_bytes);
        let Some((owner, logical)) = self.entries.owner(entry as u32) else {
            return DataPlace { volume: None, snapshot: Some("(free)".to_owned()), offset: inside };
        };
        let offset = u64::from(logical) * self.geometry.extent_bytes + rest;
        let owner = self.snapshot(SnapshotId(owner));
        let volume = self.volumes.get(owner.volume.index().wrapping_sub(1));
        let volume = volume.and_then(Option::as_ref).map(|volume| volume.name.clone());
        let snapshot = match (owner.head(), owner.live()) {
            (true, _) => None,
            (false, true) => Some(owner.name.clone()),
            (false, false) => Some("(deleted)".to_owned()),
        };
        DataPlace { volume, snapshot, offset }
    }

    /// The extent behind the last one that is in use, was when a crash happens now, or may still
    /// be read: the data region must not end before it.
    pub fn extents_end(&self) -> u32 {
        let last = self.entries.last_extent();
        let moving = self.moving.last().map_or(0, |last| last + 1);
        last.map_or(0, |last| last + 1).max(moving).max(self.extents.quarantine_end())
    }

    /// High-water marks.
    pub fn marks(&self) -> [u32; 4] {
        self.marks
    }

    /// Storage for these metadata blocks of a region is reserved.
    pub fn reserved(&mut self, region: RegionKind, blocks: &std::ops::Range<u32>) {
        if region == RegionKind::Labels {
            self.label_room.insert(blocks.start / LABEL_BLOCKS);
            return;
        }
        let room = &mut self.room[region.mark()];
        *room = (*room).max(blocks.end);
    }

    /// Metadata blocks without storage that marking a parent's blocks as zeros will need first, if there is
    /// none left with storage.
    pub fn spares_to_reserve(&self) -> Option<std::ops::Range<u32>> {
        let at = RegionKind::Spares.mark();
        let (mark, room) = (self.marks[at], self.room[at]);
        let most = self.geometry.needed_blocks(RegionKind::Spares);
        (room <= mark && mark < most).then(|| mark..(mark + ROOM_BLOCKS).min(most))
    }

    /// Ends a batch of records; whether the caller must commit before it acknowledges.
    pub fn publish(&mut self) -> bool {
        self.log.publish();
        self.log.is_unsafe()
    }

    /// Makes sure that item `index` of a region has a valid metadata block.
    fn require_block(&mut self, region: RegionKind, index: u32) -> Step<()> {
        let block = index / self.geometry.items_per_block(region);
        let mark = self.marks[region.mark()];
        if block < mark {
            return Ok(());
        }
        if block >= self.room[region.mark()] {
            let ahead = (mark / 4).clamp(ROOM_BLOCKS, 4 * ROOM_BLOCKS);
            let most = self.geometry.needed_blocks(region);
            return Err(Stop::Room(region, mark..(block + ahead).min(most)));
        }
        self.marks[region.mark()] = block + 1;
        self.append(&Record::Mark { region: region.mark() as u8, blocks: block + 1 });
        for new in mark..=block {
            self.log.mark_dirty((region, new));
        }
        Ok(())
    }

    fn append(&mut self, record: &Record<'_>) {
        self.changes += u64::from(watch::is_seen(record));
        let of = |kind, index: u32| Some((kind, index / self.geometry.items_per_block(kind)));
        let block = match *record {
            Record::Checkpoint { .. } | Record::Mark { .. } => None,
            Record::Volume { index, .. } => of(RegionKind::Volumes, index),
            Record::Snapshot { index, .. } | Record::Drop { index, .. } => {
                of(RegionKind::Snapshots, index)
            }
            Record::Labels { index, .. } => of(RegionKind::Labels, index),
            Record::Entry { entry, .. } | Record::Fill { entry, .. } | Record::Free { entry } => {
                match entry.checked_sub(SPARE_BASE) {
                    Some(index) => of(RegionKind::Spares, index),
                    None => of(RegionKind::Extents, entry),
                }
            }
        };
        self.log.append(record, block);
    }

    fn append_volume(&mut self, id: VolumeId) {
        self.staged.remove(&id.0);
        let slot = self.volume_slot(id);
        self.append(&Record::Volume { index: id.0 - 1, slot: slot.as_bytes() });
    }

    fn append_snapshot(&mut self, id: SnapshotId) {
        let slot = self.snapshot_slot(id);
        self.append(&Record::Snapshot { index: id.0 - 1, slot: slot.as_bytes() });
    }

    fn append_entry(&mut self, entry: u32) {
        let mut bytes = [0; ENTRY_MAX_BYTES];
        let bytes = &mut bytes[..self.geometry.entry_bytes()];
        self.entries.encode(entry, bytes);
        self.append(&Record::Entry { entry, bytes });
    }

    /// The slot of a volume as on the device; all zeros if it is free.
    fn volume_slot(&self, id: VolumeId) -> VolumeSlot {
        let Some(volume) = self.volumes.get(id.index() - 1).and_then(Option::as_ref) else {
            return zerocopy::FromZeros::new_zeroed();
        };
        let (name, name_bytes) = slots::encode_name(&volume.name);
        let limits = volume.pace.limits();
        VolumeSlot {
            uuid: volume.uuid,
            size: volume.size.into(),
            created_ns: volume.created_ns.into(),
            revision: volume.revision.into(),
            head: volume.head.0.into(),
            flags: volume.flags.into(),
            name_bytes,
            reserved0: [0; 14],
            name,
            limit_iops: limits.iops.into(),
            limit_burst_seconds: limits.burst_seconds.into(),
            limit_bandwidth: limits.bandwidth.into(),
            key: volume.key_slot,
            reserved1: [0; 52],
        }
    }

    /// The slot of a snapshot as on the device; all zeros if it is free.
    fn snapshot_slot(&self, id: SnapshotId) -> SnapshotSlot {
        let Some(snapshot) = self.snapshots.get(id.index() - 1).and_then(Option::as_ref) else {
            return zerocopy::FromZeros::new_zeroed();
        };
        let (name, name_bytes) = slots::encode_name(&snapshot.name);
        SnapshotSlot {
            uuid: snapshot.uuid,
            size: snapshot.size.into(),
            created_ns: snapshot.created_ns.into(),
            revision: snapshot.revision.into(),
            volume: snapshot.volume.0.into(),
            parent: snapshot.parent.0.into(),
            flags: snapshot.flags.into(),
            name_bytes,
            used: 1,
            reserved0: [0; 9],
            name,
            family: snapshot.family,
            reserved1: [0; 168],
        }
    }

    /// Writes the payload of a metadata block as of now to `payload`, which is zeroed. Entries in
    /// no record yet are free there.
    pub fn image(&self, region: RegionKind, block: u32, payload: &mut [u8]) {
        let items = self.geometry.items_per_block(region);
        let first = block * items;
        match region {
            RegionKind::Volumes => (0..items).for_each(|i| {
                slots::put(payload, i, &self.volume_slot(VolumeId(first + i + 1)));
            }),
            RegionKind::Snapshots => (0..items).for_each(|i| {
                slots::put(payload, i, &self.snapshot_slot(SnapshotId(first + i + 1)));
            }),
            RegionKind::Labels => {
                let snapshot = self.snapshots.get((block / LABEL_BLOCKS) as usize);
                let labels = snapshot.and_then(Option::as_ref).map_or(&[][..], |s| &s.labels);
                let part = label_part(labels, block % LABEL_BLOCKS);
                payload[..part.len()].copy_from_slice(&part);
            }
            RegionKind::Extents | RegionKind::Spares => {
                let base = if region == RegionKind::Spares { SPARE_BASE } else { 0 };
                let bytes = self.geometry.entry_bytes();
                for (i, out) in payload.chunks_exact_mut(bytes).take(items as usize).enumerate() {
                    let id = base + first + i as u32;
                    if !self.unlogged.contains_key(&id) {
                        self.entries.encode(id, out);
                    }
                }
            }
            RegionKind::Journal | RegionKind::Sums | RegionKind::Data => {
                unreachable!("not mirrored")
            }
        }
    }
}

/// The bytes of encoded labels (behind their length) that go into label block 0 or 1.
fn label_part(labels: &[u8], part: u32) -> Vec<u8> {
    let mut all = (labels.len() as u32).to_le_bytes().to_vec();
    all.extend_from_slice(labels);
    let start = part as usize * crate::format::PAYLOAD_BYTES;
    let end = (start + crate::format::PAYLOAD_BYTES).min(all.len());
    all.get(start..end).unwrap_or_default().to_vec()
}
