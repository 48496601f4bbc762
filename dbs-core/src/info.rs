//! What the store tells about itself. These types are the JSON that `--json` and the control
//! socket carry: a field is added, never renamed or removed. All sizes are bytes, all times
//! nanoseconds since the Unix epoch (UTC).

mod space;

pub use space::{ExtentCounts, SpaceMap, SpaceOwner, SpaceOwners, SpaceRun};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Labels of a snapshot.
pub type Labels = BTreeMap<String, String>;

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The store as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StoreInfo {
    /// On-disk format version, `2.0.0`.
    pub format: String,
    /// Identity, chosen at init, in the usual 8-4-4-4-12 form.
    pub uuid: String,
    /// Size of the device or file in bytes.
    pub size: u64,
    /// Bytes the store can grow to without moving its metadata.
    pub max_size: u64,
    /// Extent size in bytes.
    pub extent_size: u64,
    /// Data extents in all.
    pub extents_total: u64,
    /// Data extents that can be allocated now.
    pub extents_free: u64,
    /// Data extents freed but not yet reusable (their freeing is not durable, or still read).
    pub extents_pending: u64,
    /// Bytes of data extents in use.
    pub allocated: u64,
    /// Of that, bytes of data that are compressed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub compressed: u64,
    /// Bytes that these are stored in.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub compressed_stored: u64,
    /// Bytes of data extents that can be allocated now.
    #[serde(default)]
    pub free: u64,
    /// Bytes before the data region: superblock, tables, journal, extent status.
    pub metadata: u64,
    /// Volumes in use and the table's capacity.
    pub volumes: u64,
    /// Capacity of the volume table.
    pub volumes_max: u64,
    /// Snapshot slots in use: heads, snapshots and hidden ones.
    pub snapshots: u64,
    /// Capacity of the snapshot table.
    pub snapshots_max: u64,
    /// Snapshots deleted but still being merged or reclaimed in the background.
    pub snapshots_deleting: u64,
    /// Of those, snapshots that are not merged for now, as something that the merge needs cannot be read or written.
    #[serde(default)]
    pub snapshots_put_off: u64,
    /// Steps of background work known to remain: merging and freeing what was deleted.
    #[serde(default)]
    pub work_remaining: u64,
    /// Sequence number of the last durable commit group.
    pub sequence: u64,
    /// Whether this handle may write.
    pub read_only: bool,
    /// I/O driver in use: `io_uring`, `pread`, `sim`.
    pub driver: String,
    /// Whether acknowledged writes survive `kill -9` through a tail (else each allocating write
    /// commits before it is acknowledged).
    pub tail: bool,
    /// What was found of checksums of data since the store was opened; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksums: Option<ChecksumInfo>,
    /// What is remembered of look-ups in volumes and snapshots with a parent.
    #[serde(default)]
    pub lookups: LookupInfo,
    /// Things the operator should know: a healed metadata copy, a lost tail.
    pub warnings: Vec<String>,
}

/// Memory of what was found by looking through layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LookupInfo {
    /// Bytes of memory it takes.
    pub memory: u64,
    /// Bytes of memory it may take, together with bitmaps of extents if these have a bound.
    pub memory_max: u64,
    /// Pieces of 512 volume extents that were forgotten as others needed the memory, since the store was
    /// opened.
    pub forgotten: u64,
    /// Bytes of memory that bitmaps of extents take.
    #[serde(default)]
    pub bitmap_memory: u64,
    /// Metadata blocks whose bitmaps were read again after they had left memory.
    #[serde(default)]
    pub bitmap_reads: u64,
}

/// Checksums of data, counted since the store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ChecksumInfo {
    /// Blocks read that were compared with their checksum, and equal.
    pub verified: u64,
    /// Blocks read of which no checksum was known.
    pub unknown: u64,
    /// Times a damaged block was met.
    pub mismatches: u64,
    /// Damaged blocks written again from a copy that has their checksum.
    #[serde(default)]
    pub healed: u64,
    /// Groups of checksums met that said nothing, as they were open when the last process ended, and
    /// pages that are damaged.
    pub untrusted: u64,
    /// Bytes of memory they take.
    pub memory: u64,
    /// Times that checksums were found in memory.
    #[serde(default)]
    pub hits: u64,
    /// Pages of checksums read from the device.
    #[serde(default)]
    pub misses: u64,
    /// Groups of checksums opened, each with a share in a flush.
    #[serde(default)]
    pub openings: u64,
    /// Groups of checksums closed.
    #[serde(default)]
    pub closings: u64,
    /// Groups of checksums that are open.
    #[serde(default)]
    pub open: u64,
}

/// A place in a volume or snapshot, by the layer that holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPlace {
    /// Volume; absent if it was deleted and a clone still needs the layer.
    pub volume: Option<String>,
    /// Snapshot, absent for the head; `(deleted)` for a hidden one.
    pub snapshot: Option<String>,
    /// Offset in bytes.
    pub offset: u64,
}

impl fmt::Display for DataPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let volume = self.volume.as_deref().unwrap_or("(deleted)");
        match &self.snapshot {
            Some(snapshot) => write!(f, "byte {} of `{volume}@{snapshot}`", self.offset),
            None => write!(f, "byte {} of `{volume}`", self.offset),
        }
    }
}

/// How far a scrub has come, and what it found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScrubReport {
    /// Bytes of data compared with their checksums by this call.
    pub checked: u64,
    /// Of those, bytes of which no checksum was known: it is known now.
    pub learnt: u64,
    /// Bytes found damaged: they differ from their checksums, the device does not read them, or the metadata is
    /// damaged that says which of them are data.
    pub damaged: u64,
    /// Where; at most a thousand ranges.
    pub ranges: Vec<DamagedRange>,
    /// Bytes of the data region that are done, of `total`; an earlier call may have done some.
    pub done: u64,
    /// Bytes of the data region to look at.
    pub total: u64,
}

/// What [`Store::compress`](crate::Store::compress) has done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressReport {
    /// Bytes of data that were tried.
    pub checked: u64,
    /// Of those the ones that are compressed now.
    pub compressed: u64,
    /// Bytes that these take on the device.
    pub stored: u64,
    /// Bytes of extents that are left as they are, as they are damaged or cannot be read.
    pub unreadable: u64,
    /// Extents passed.
    pub done: u64,
    /// Extents there are.
    pub total: u64,
}

/// How far a trim of a volume has come, and what it found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrimReport {
    /// Bytes of data that were read.
    pub checked: u64,
    /// Of those, bytes of blocks that hold nothing but zeros, and are given up.
    pub zeros: u64,
    /// Bytes of extents that hold nothing any more, and become free.
    pub freed: u64,
    /// Bytes of data that were passed over, as some of their extent is damaged.
    pub unreadable: u64,
    /// Bytes of the volume that are done, of `total`.
    pub done: u64,
    /// Size of the volume.
    pub total: u64,
}

/// Data that is not what was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedRange {
    /// Where it begins.
    #[serde(flatten)]
    pub place: DataPlace,
    /// Bytes.
    pub length: u64,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeInfo {
    /// Name, unique in the store.
    pub name: String,
    /// Identity in the usual text form.
    pub uuid: String,
    /// Provisioned size in bytes.
    pub size: u64,
    /// Creation time.
    pub created_ns: u64,
    /// The snapshot the head is based on, as `volume@snapshot`; absent for a root, and
    /// `(hidden)` where it was deleted while clones still need it.
    pub parent: Option<String>,
    /// The foreign snapshot this volume was cloned from and still depends on.
    pub origin: Option<String>,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Layers from the head to the root, the head included.
    pub depth: u64,
    /// Whether a server exports it or somebody holds it open.
    pub open: bool,
    /// Its content is incomplete: somebody is still filling it.
    #[serde(default)]
    pub rebuilding: bool,
    /// Counter that its owner keeps; 0 if unused.
    #[serde(default)]
    pub revision: u64,
    /// How fast its clients may use it; absent without limits.
    #[serde(default, skip_serializing_if = "VolumeLimits::is_none")]
    pub limits: VolumeLimits,
    /// What identifies the file outside the store that it rests on; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// How it is encrypted; absent if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<EncryptionInfo>,
    /// Space.
    pub usage: Usage,
}

/// How a volume is encrypted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncryptionInfo {
    /// What unlocks it: a `passphrase` or a `key file`; `lost` if nothing does any more.
    pub secret: String,
    /// Whether it cannot be read or written until it is unlocked.
    pub locked: bool,
    /// Which key it has, in the text form of a uuid: a volume and its clones share one.
    pub family: String,
}

/// How fast the clients of a volume may use it and its snapshots, all of them together. A server delays requests
/// that come faster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeLimits {
    /// Most requests in a second: reads, writes, discards and ranges made zero. 0 if there is no limit.
    #[serde(default)]
    pub iops: u32,
    /// Most bytes read and written in a second; 0 if there is no limit, else at least 4096.
    #[serde(default)]
    pub bandwidth: u64,
    /// What the limits allow in so many seconds may be used at once, after as many seconds without use.
    #[serde(default)]
    pub burst_seconds: u32,
}

impl VolumeLimits {
    /// Whether nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        !self.is_some()
    }

    /// Whether anything is limited.
    #[must_use]
    pub fn is_some(&self) -> bool {
        self.iops > 0 || self.bandwidth > 0
    }
}

/// The file outside the store that a volume rests on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BackingInfo {
    /// What identifies the file, as it was recorded.
    pub identity: String,
    /// The file was given, so that what is in it can be read.
    pub attached: bool,
    /// Where it ends, in bytes of whole blocks: from there on the volume shows nothing of it.
    pub end: u64,
}

/// What was read from a volume and its snapshots, and written to it, since the store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VolumeIo {
    /// Reads.
    pub reads: u64,
    /// Writes; neither discards nor zeros.
    pub writes: u64,
    /// Bytes read, in whole blocks.
    pub read_bytes: u64,
    /// Bytes written, in whole blocks.
    pub written_bytes: u64,
    /// Requests of clients that the limits of the volume have delayed.
    #[serde(default)]
    pub delayed: u64,
    /// Nanoseconds of these delays, together.
    #[serde(default)]
    pub delayed_ns: u64,
    /// Goes up with each change of the content, also by zeros, discards and rollbacks: with a write when it has ended,
    /// perhaps by more than one.
    #[serde(default)]
    pub changes: u64,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    /// Volume it belongs to.
    pub volume: String,
    /// Name, unique in the volume.
    pub name: String,
    /// Identity in the usual text form.
    pub uuid: String,
    /// Size of the volume when it was taken.
    pub size: u64,
    /// Creation time.
    pub created_ns: u64,
    /// Parent as `volume@snapshot`, absent for a root.
    pub parent: Option<String>,
    /// Children: `volume` for a head, `volume@snapshot` otherwise.
    pub children: Vec<String>,
    /// Refuses deletion.
    pub protected: bool,
    /// Taken by a person, not by the system.
    pub user_created: bool,
    /// Its owner has no more use for it: it is kept until deleted, its content not necessarily.
    #[serde(default)]
    pub retired: bool,
    /// Free-form labels.
    pub labels: Labels,
    /// Changes when a rebuild of its volume begins, and when the store is opened: who reads it for long compares this
    /// with what it was before.
    #[serde(default)]
    pub rebuilds: u64,
    /// Space.
    pub usage: Usage,
}

/// Space, exact at the time of the call. `docs/format.md` has the definitions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes of data blocks visible through this volume or snapshot.
    pub referenced: u64,
    /// Of those, bytes visible through nothing else (for a volume: nothing outside it).
    pub exclusive: u64,
    /// `referenced - exclusive`.
    pub shared: u64,
    /// Bytes of extents its own layers hold (for a volume: head and snapshots).
    pub allocated: u64,
    /// Bytes of extents that deleting it would free.
    pub reclaimable: u64,
}

/// What a range of a volume or snapshot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RangeState {
    /// Stored bytes.
    Data,
    /// Zeros, explicitly stored as such.
    Zero,
    /// Never written: reads as zeros.
    Hole,
}

/// A range of the map of a volume or snapshot, or of a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRange {
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// What is there.
    pub state: RangeState,
}

/// One layer of a volume: a snapshot or the head, with what it holds itself and not its parent.
/// A hidden snapshot (deleted, but still needed) counts as part of each layer that builds on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// Name of the snapshot; absent for the head.
    pub name: Option<String>,
    /// Identity in the usual text form. A snapshot has another one than the head that it was.
    pub uuid: String,
    /// The nearest snapshot of this volume below it.
    pub parent: Option<String>,
    /// Of the volume's lowest layer, the snapshot of another volume that it is cloned from, as
    /// `volume@snapshot`.
    pub origin: Option<String>,
    /// Layers of this volume whose `parent` it is, each as its `name`.
    pub children: Vec<Option<String>>,
    /// Size in bytes. Behind it the layer shows nothing, whatever is below.
    pub size: u64,
    /// Creation time.
    pub created_ns: u64,
    /// Taken by a person, not by the system.
    pub user_created: bool,
    /// Its owner has no more use for it.
    pub retired: bool,
    /// Free-form labels.
    pub labels: Labels,
    /// Bytes of the data blocks that it holds. Exact, unless a hidden snapshot counts with it:
    /// blocks of that one which this layer replaces count too.
    pub data_bytes: u64,
}

/// What one layer says of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerState {
    /// Bytes of its own.
    Data,
    /// Zeros, whatever the parent holds.
    Zero,
    /// Nothing: the parent shows, or zeros where there is none.
    Absent,
}

/// A range of the map of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRange {
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// What is there.
    pub state: LayerState,
}

/// How bad a finding of a check is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Healed or harmless.
    Note,
    /// Space that nothing uses: no data at risk.
    Leak,
    /// Something cannot be trusted.
    Corrupt,
}

/// One thing a check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// Region: `superblock`, `volume table`, `snapshot table`, `labels`, `journal`,
    /// `extent status`, `checksums`, `data`.
    pub region: String,
    /// Metadata block, slot or extent in that region, where one can be named.
    pub index: Option<u64>,
    /// What is wrong and what follows from it.
    pub message: String,
}

/// Result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CheckReport {
    /// Everything found, worst first.
    pub findings: Vec<Finding>,
    /// Metadata blocks read.
    pub blocks_checked: u64,
    /// Extent entries in use.
    pub extents_checked: u64,
    /// Volumes in use.
    pub volumes_checked: u64,
    /// Snapshots; neither heads nor deleted ones.
    pub snapshots_checked: u64,
    /// Of an idle store: bytes of data, at most, of which no checksums are known, as they were being
    /// written when the last process ended without closing the store. No damage: they are made again.
    #[serde(default)]
    pub checksums_open: u64,
}

impl CheckReport {
    /// The worst severity found, if anything was.
    #[must_use]
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|f| f.severity).max()
    }
}

/// What a step of a repair comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RepairKind {
    /// Put right, from what says the same elsewhere.
    Mended,
    /// Space that nothing uses is free again.
    Freed,
    /// Something has another name.
    Renamed,
    /// Something is gone, and marked so.
    Lost,
    /// It cannot be done: nothing is.
    Refused,
}

/// One thing a repair does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RepairStep {
    /// What it comes to.
    pub kind: RepairKind,
    /// Region, as that of a [`Finding`], or `store`.
    pub region: String,
    /// Metadata block, slot or entry in that region, where one can be named.
    pub index: Option<u64>,
    /// What is done.
    pub message: String,
}

/// A range of a volume or snapshot that cannot be read after a repair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostRange {
    /// Volume, by the name it has then.
    pub volume: String,
    /// Snapshot of it; none for the volume itself.
    pub snapshot: Option<String>,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// A repair, planned or done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RepairReport {
    /// What a check found.
    pub findings: Vec<Finding>,
    /// What is done about it, in this order.
    pub steps: Vec<RepairStep>,
    /// What cannot be read afterwards, by volume and snapshot; at most ten thousand ranges.
    pub lost: Vec<LostRange>,
    /// Ranges that cannot be read either, and are not in `lost`.
    #[serde(default)]
    pub lost_more: u64,
    /// It was done, not only planned.
    pub done: bool,
    /// The file that the metadata was saved to.
    pub saved: Option<String>,
}

/// What a piece of background work did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WorkReport {
    /// Steps done by this call (an extent merged, freed or moved is a step).
    pub done: u64,
    /// Steps known to remain; 0 means there is nothing left to do.
    pub remaining: u64,
    /// The call stopped because a read that has begun must end first.
    pub waits: bool,
}

/// What kind of user has a volume or snapshot open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HolderKind {
    /// A client of the NBD server.
    Nbd,
    /// A block device.
    Device,
    /// The replica of a Longhorn volume.
    Replica,
    /// A virtual machine, over vhost-user.
    VhostUser,
    /// A host of NVMe over TCP.
    NvmeTcp,
}

/// Who opens a volume or snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// What kind of user.
    pub kind: HolderKind,
    /// As errors name it: `NBD client tcp:10.0.0.3:5123`.
    pub who: String,
    /// The number of an NBD client.
    pub id: Option<u64>,
    /// Whether it may write.
    pub writes: bool,
    /// Whether others who open the volume may not write.
    pub alone: bool,
    /// How to have it let go.
    pub remedy: String,
}

/// Who has a volume or snapshot open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderInfo {
    /// Volume.
    pub volume: String,
    /// One of its snapshots; none for the volume itself.
    pub snapshot: Option<String>,
    /// Since when.
    pub since_ns: u64,
    /// Who it is.
    #[serde(flatten)]
    pub holder: Holder,
}
