//! Every metadata command of a store, as one serializable request and one function that runs it.
//!
//! The command line runs [`execute`] on a store it opened itself, or sends the same [`Request`] to
//! the server that owns the store, which runs the same function: so both behave alike. Results are
//! the types of [`dbs_core::info`] and of this module, as JSON; `docs/json.md` lists them. The
//! member `usage` of volumes and snapshots takes a walk over every layer: only lists that ask for it have
//! it, and `show` unless it is asked not to.

mod meant;
mod run;
mod secret;
mod usage;

use dbs_core::info::{Labels, MapRange};
use dbs_core::store::WrappedKey;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use run::{execute, list};
pub use secret::Given;

/// Name of the marker snapshot. A volume that has it and is rebuilding is being received.
pub use dbs_core::volume::RECEIVING as MARKER;

/// How the labels begin by which a receive knows what it has received, and how far: no user sets them.
pub const OWN_LABELS: &str = "dbs.";

/// Most ranges one answer to [`Request::VolumeMap`] or [`Request::VolumeDiff`] holds.
pub const RANGES_MAX: usize = 4096;

/// Most cells of the answer to [`Request::SpaceMap`].
pub const CELLS_MAX: u32 = 4096;
/// As many as it has unless it is told.
pub const CELLS: u32 = 1024;

/// One command. Names of methods and parameters are stable: they are the control protocol.
///
/// `volume` is a volume's name, `snapshot` a snapshot's name in it; sizes and offsets are bytes. A request with `uuid` is
/// carried out if what it names has that uuid in the step that carries it out, else it is refused with `NotFound`: names are
/// used again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "method", content = "params", deny_unknown_fields)]
#[allow(missing_docs, reason = "fields named for what they are")]
pub enum Request {
    /// Facts about the store: `StoreInfo`.
    #[serde(rename = "info")]
    Info,
    /// Grows the store to `size`: `StoreInfo`.
    #[serde(rename = "grow")]
    Grow {
        /// New size of the store.
        size: u64,
    },
    /// Compacts and shortens a file: [`Vacuumed`].
    #[serde(rename = "vacuum")]
    Vacuum {
        /// Bytes to leave free for new data; if absent a sixteenth of those in use, at least 64 MiB.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        keep: Option<u64>,
    },
    /// Checks all metadata: `CheckReport`.
    #[serde(rename = "check")]
    Check,
    /// Compares all data with its checksums: `ScrubReport`.
    #[serde(rename = "scrub")]
    Scrub {
        /// Most bytes read in a second, without a limit if absent.
        #[serde(default)]
        rate: Option<u64>,
        /// Whether to begin anew where an earlier one was stopped.
        #[serde(default)]
        restart: bool,
    },
    /// All metadata, as one object.
    #[serde(rename = "dump")]
    Dump,
    /// Makes everything acknowledged durable: null.
    #[serde(rename = "flush")]
    Flush,
    /// Does some background work: `WorkReport`.
    #[serde(rename = "work")]
    Work {
        /// Most steps to do.
        steps: u64,
    },

    /// What a part of the data region holds: `SpaceMap`.
    #[serde(rename = "space.map")]
    SpaceMap {
        #[serde(default)]
        offset: u64,
        /// Length, to the end if absent.
        #[serde(default)]
        length: Option<u64>,
        /// Most cells of the map, at most [`CELLS_MAX`], [`CELLS`] if absent.
        #[serde(default)]
        cells: Option<u32>,
    },
    /// Who holds a part of the data region: `SpaceOwners`.
    #[serde(rename = "space.owners")]
    SpaceOwners { offset: u64, length: u64 },

    /// All volumes: array of `VolumeInfo`.
    #[serde(rename = "volume.list")]
    VolumeList {
        /// Whether to compute the space of each, which walks every layer.
        #[serde(default)]
        usage: bool,
    },
    /// One volume: `VolumeInfo`.
    #[serde(rename = "volume.show")]
    VolumeShow {
        volume: String,
        /// Whether to compute its space, which walks every layer.
        #[serde(default = "yes")]
        usage: bool,
    },
    /// Creates an empty volume: `VolumeInfo`.
    #[serde(rename = "volume.create")]
    VolumeCreate {
        /// Name of the new volume.
        volume: String,
        /// Provisioned size, a multiple of 512.
        size: u64,
        /// It is about to be filled: nobody else can open it before [`Request::VolumeComplete`].
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        rebuilding: bool,
    },
    /// Creates an empty volume whose data is encrypted: `VolumeInfo`. It is unlocked.
    #[serde(rename = "volume.create_encrypted")]
    VolumeCreateEncrypted {
        /// Name of the new volume.
        volume: String,
        /// Provisioned size, a multiple of 512.
        size: u64,
        /// What unlocks it.
        secret: Given,
        /// It is about to be filled: nobody else can open it before [`Request::VolumeComplete`].
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        rebuilding: bool,
    },
    /// Creates an empty encrypted volume of a key that was wrapped elsewhere, which is about to be filled: `VolumeInfo`. It is
    /// locked.
    #[serde(rename = "volume.create_wrapped")]
    VolumeCreateWrapped {
        /// Name of the new volume.
        volume: String,
        /// Provisioned size, a multiple of 512.
        size: u64,
        /// Its key.
        key: WrappedKey,
    },
    /// The wrapped key of an encrypted volume, for a copy of the volume elsewhere: `WrappedKey`.
    #[serde(rename = "volume.wrapped_key")]
    VolumeWrappedKey { volume: String },
    /// Unlocks an encrypted volume until it is locked, or the store is closed: `VolumeInfo`.
    #[serde(rename = "volume.unlock")]
    VolumeUnlock { volume: String, secret: Given },
    /// Forgets the key of an encrypted volume: `VolumeInfo`.
    #[serde(rename = "volume.lock")]
    VolumeLock { volume: String },
    /// Gives an encrypted volume another secret: `VolumeInfo`.
    #[serde(rename = "volume.rekey")]
    VolumeRekey {
        volume: String,
        /// The present one.
        secret: Given,
        /// The new one.
        new: Given,
    },
    /// Says that a volume that was being filled is complete: `VolumeInfo`.
    #[serde(rename = "volume.complete")]
    VolumeComplete {
        volume: String,
        /// Only of the volume with this uuid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        uuid: Option<String>,
    },
    /// Renames a volume: `VolumeInfo`.
    #[serde(rename = "volume.rename")]
    VolumeRename {
        volume: String,
        /// Its new name.
        new: String,
    },
    /// Changes the size of a volume: `VolumeInfo`.
    #[serde(rename = "volume.resize")]
    VolumeResize {
        volume: String,
        /// New provisioned size.
        size: u64,
        /// Allows a smaller size, which destroys what lies beyond it.
        #[serde(default)]
        shrink: bool,
        /// Only of the volume with this uuid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        uuid: Option<String>,
    },
    /// Sets how fast the clients of a volume may use it: `VolumeInfo`. What is absent stays as it is.
    #[serde(rename = "volume.set")]
    VolumeSet {
        /// Volume.
        volume: String,
        /// Most requests in a second; 0 for no limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        iops: Option<u32>,
        /// Most bytes in a second; 0 for no limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bandwidth: Option<u64>,
        /// What the limits allow in so many seconds may be used at once.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        burst_seconds: Option<u32>,
    },
    /// Deletes a volume and its snapshots: [`Deleted`].
    #[serde(rename = "volume.delete")]
    VolumeDelete {
        volume: String,
        /// Only of the volume with this uuid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        uuid: Option<String>,
        /// Only while it is being filled, or if what filled it has ended half way.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        rebuilding: bool,
    },
    /// Creates a volume on a snapshot: `VolumeInfo`.
    #[serde(rename = "volume.clone")]
    VolumeClone {
        /// Volume of the snapshot.
        volume: String,
        snapshot: String,
        /// Name of the new volume.
        new: String,
        /// It is about to be filled: nobody else can open it before [`Request::VolumeComplete`].
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        rebuilding: bool,
    },
    /// Makes a clone independent of its origin: `VolumeInfo`. Can be stopped and run again.
    #[serde(rename = "volume.flatten")]
    VolumeFlatten { volume: String },
    /// Clones made from a volume's snapshots, or from one: array of names.
    #[serde(rename = "volume.children")]
    VolumeChildren {
        volume: String,
        /// One of its snapshots, all if absent.
        #[serde(default)]
        snapshot: Option<String>,
    },
    /// Space of a volume or snapshot: `Usage`.
    #[serde(rename = "volume.du")]
    VolumeDu {
        volume: String,
        /// One of its snapshots, the volume itself if absent.
        #[serde(default)]
        snapshot: Option<String>,
    },
    /// What a part of a volume or snapshot holds: [`Ranges`], without gaps.
    #[serde(rename = "volume.map")]
    VolumeMap {
        volume: String,
        /// One of its snapshots, the head if absent.
        #[serde(default)]
        snapshot: Option<String>,
        #[serde(default)]
        offset: u64,
        /// Length, to the end if absent.
        #[serde(default)]
        length: Option<u64>,
    },
    /// Where the content of `to` may differ from that of `from`: [`Ranges`].
    #[serde(rename = "volume.diff")]
    VolumeDiff {
        volume: String,
        /// One of its snapshots, or `volume@snapshot` of another one; an empty volume if absent.
        #[serde(default)]
        from: Option<String>,
        /// One of its snapshots, the head if absent.
        #[serde(default)]
        to: Option<String>,
        #[serde(default)]
        offset: u64,
        /// Length, to the end if absent.
        #[serde(default)]
        length: Option<u64>,
    },
    /// Runs the background work to its end, which gives the space of what was deleted and
    /// discarded back to the file system or device: [`Trimmed`].
    #[serde(rename = "volume.trim")]
    VolumeTrim,
    /// Gives up the blocks of a volume that hold nothing but zeros: `TrimReport`.
    #[serde(rename = "volume.release")]
    VolumeRelease {
        volume: String,
        /// Only look for them.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        dry_run: bool,
    },
    /// Compresses extents of a volume or of one of its snapshots: `CompressReport`. Can be stopped and run again.
    #[serde(rename = "volume.compress")]
    VolumeCompress {
        volume: String,
        /// One of its snapshots, with those below it; all of the volume if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        snapshot: Option<String>,
    },

    /// Takes a snapshot of the head: `SnapshotInfo`.
    #[serde(rename = "snapshot.create")]
    SnapshotCreate {
        volume: String,
        /// Name of the new snapshot.
        snapshot: String,
        /// Labels to start with.
        #[serde(default)]
        labels: Labels,
        /// Taken by the system, not by a person.
        #[serde(default)]
        system: bool,
        /// Whether the volume is being filled from then on; as it was if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rebuilding: Option<bool>,
    },
    /// Snapshots of a volume, oldest first: array of `SnapshotInfo`.
    #[serde(rename = "snapshot.list")]
    SnapshotList {
        volume: String,
        /// Whether to compute the space of each.
        #[serde(default)]
        usage: bool,
    },
    /// One snapshot: `SnapshotInfo`.
    #[serde(rename = "snapshot.show")]
    SnapshotShow {
        volume: String,
        snapshot: String,
        /// Whether to compute its space.
        #[serde(default = "yes")]
        usage: bool,
    },
    /// Renames a snapshot: `SnapshotInfo`.
    #[serde(rename = "snapshot.rename")]
    SnapshotRename {
        volume: String,
        snapshot: String,
        /// Its new name.
        new: String,
    },
    /// Deletes a snapshot: [`Deleted`].
    #[serde(rename = "snapshot.delete")]
    SnapshotDelete {
        volume: String,
        snapshot: String,
        /// Only of the snapshot with this uuid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        uuid: Option<String>,
    },
    /// Discards the head and starts a new one on the snapshot: `VolumeInfo`.
    #[serde(rename = "snapshot.rollback")]
    SnapshotRollback {
        volume: String,
        snapshot: String,
        /// Only of the snapshot with this uuid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        uuid: Option<String>,
    },
    /// Protects a snapshot from deletion: `SnapshotInfo`.
    #[serde(rename = "snapshot.protect")]
    SnapshotProtect { volume: String, snapshot: String },
    /// Takes the protection away: `SnapshotInfo`.
    #[serde(rename = "snapshot.unprotect")]
    SnapshotUnprotect { volume: String, snapshot: String },
    /// Sets and removes labels: `SnapshotInfo`.
    #[serde(rename = "snapshot.label")]
    SnapshotLabel {
        volume: String,
        snapshot: String,
        /// Labels to add or replace.
        #[serde(default)]
        set: Labels,
        /// Keys to remove; a key that is not there is no error.
        #[serde(default)]
        remove: Vec<String>,
    },

    /// Makes a block device of a volume or snapshot, which the server of the store serves:
    /// `Attached`.
    #[serde(rename = "device.attach")]
    DeviceAttach {
        volume: String,
        /// One of its snapshots, the head if absent.
        #[serde(default)]
        snapshot: Option<String>,
        /// Queues, 1 if absent.
        #[serde(default)]
        queues: Option<u16>,
        /// Requests of a queue at a time, 128 if absent.
        #[serde(default)]
        depth: Option<u16>,
        /// Whether the device refuses writes.
        #[serde(default)]
        read_only: bool,
        /// Number of the device, the kernel's choice if absent.
        #[serde(default)]
        id: Option<u32>,
    },
    /// Removes a block device: `Attached`, as it was.
    #[serde(rename = "device.detach")]
    DeviceDetach {
        /// `VOLUME`, `VOLUME@SNAPSHOT`, or the path of the device or of a link to it.
        target: String,
    },
    /// Block devices of the store: array of `Attached`.
    #[serde(rename = "device.list")]
    DeviceList,

    /// Who uses the store: array of `Client`.
    #[serde(rename = "client.list")]
    ClientList {
        /// Measure rates for so long; none if absent.
        #[serde(default)]
        interval_ms: Option<u64>,
    },
    /// What the server does at this moment: `Top`.
    #[serde(rename = "top")]
    Top,
    /// Disconnects an NBD client: `Client`, as it was.
    #[serde(rename = "client.kick")]
    ClientKick {
        /// Its number.
        client: u64,
    },
}

fn yes() -> bool {
    true
}

impl Request {
    /// A request as it is written on the wire. A method without parameters takes an empty object of them,
    /// and one whose parameters may all be absent takes none.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_wire(mut value: Value) -> serde_json::Result<Self> {
        let error = match Self::deserialize(&value) {
            Ok(request) => return Ok(request),
            Err(error) => error,
        };
        let Some(members) = value.as_object_mut() else { return Err(error) };
        match members.remove("params") {
            None => drop(members.insert("params".to_owned(), Value::Object(Map::new()))),
            Some(Value::Object(params)) if params.is_empty() => {}
            Some(_) => return Err(error),
        }
        Self::deserialize(&value).map_err(|_| error)
    }

    /// Whether it changes the store, and so needs it open for writing.
    #[must_use]
    pub fn writes(&self) -> bool {
        !matches!(
            self,
            Self::Info
                | Self::Check
                | Self::Dump
                | Self::SpaceMap { .. }
                | Self::SpaceOwners { .. }
                | Self::VolumeList { .. }
                | Self::VolumeShow { .. }
                | Self::VolumeChildren { .. }
                | Self::VolumeDu { .. }
                | Self::VolumeMap { .. }
                | Self::VolumeDiff { .. }
                | Self::VolumeRelease { dry_run: true, .. }
                | Self::VolumeUnlock { .. }
                | Self::VolumeLock { .. }
                | Self::VolumeWrappedKey { .. }
                | Self::SnapshotList { .. }
                | Self::SnapshotShow { .. }
                | Self::DeviceList
                | Self::ClientList { .. }
                | Self::Top
                | Self::ClientKick { .. }
        )
    }

    /// Whether it lists volumes or snapshots, of which there may be many.
    #[must_use]
    pub fn is_list(&self) -> bool {
        matches!(self, Self::VolumeList { .. } | Self::SnapshotList { .. })
    }

    /// Whether it leaves background work behind: a server does that in its own time, a command on
    /// an idle store has to see to it.
    #[must_use]
    pub fn leaves_work(&self) -> bool {
        matches!(
            self,
            Self::VolumeDelete { .. }
                | Self::VolumeResize { .. }
                | Self::VolumeRelease { dry_run: false, .. }
                | Self::VolumeCompress { .. }
                | Self::SnapshotDelete { .. }
                | Self::SnapshotRollback { .. }
        )
    }
}

/// How far a long command is; the unit is the command's (bytes, extents or steps).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Done so far.
    pub done: u64,
    /// Known in all; may still grow.
    pub total: u64,
}

/// Result of [`Request::Vacuum`], bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vacuumed {
    /// Size of the store before.
    pub before: u64,
    /// Size of the store now.
    pub after: u64,
    /// Free for new data.
    #[serde(default)]
    pub free: u64,
}

/// Result of [`Request::VolumeDelete`] and [`Request::SnapshotDelete`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deleted {
    /// `volume` or `volume@snapshot`.
    pub deleted: String,
}

/// Result of [`Request::VolumeTrim`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trimmed {
    /// Steps of background work done.
    pub done: u64,
    /// Bytes of extents that became free (others may have allocated some meanwhile).
    pub freed: u64,
    /// Bytes of extents in use now.
    pub allocated: u64,
}

/// Result of [`Request::VolumeMap`] and [`Request::VolumeDiff`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranges {
    /// In order of offset, at most [`RANGES_MAX`].
    pub ranges: Vec<MapRange>,
    /// Where the next request continues; absent at the end.
    pub next: Option<u64>,
}

#[cfg(test)]
mod tests;
