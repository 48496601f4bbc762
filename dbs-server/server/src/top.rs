//! What a served store does at a moment: what `dbs top` shows.

use crate::clients::Client;
use crate::jobs::Job;
use dbs_core::Store;
use dbs_core::info::{EncryptionInfo, StoreInfo, VolumeIo};
use dbs_ublk::Attached;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// All that happens. Rates are the differences of two of these, over the difference of their clocks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Top {
    /// The server's process.
    pub pid: u32,
    /// When the server started; its counts are its own.
    pub started_ns: u64,
    /// Nanoseconds since then, by a clock that is never set.
    pub clock_ns: u64,
    /// The store.
    pub store: StoreInfo,
    /// Its volumes.
    pub volumes: Vec<VolumeLoad>,
    /// Who uses them.
    pub clients: Vec<Client>,
    /// The block devices among these.
    pub devices: Vec<Attached>,
    /// What runs: long commands, and the background work if there is some.
    pub jobs: Vec<Job>,
}

/// A volume, with what is asked of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeLoad {
    /// Name.
    pub name: String,
    /// Identity.
    pub uuid: String,
    /// Provisioned size in bytes.
    pub size: u64,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Layers from the head to the root.
    pub depth: u64,
    /// Whether somebody has it open.
    pub open: bool,
    /// Its content is incomplete.
    pub rebuilding: bool,
    /// How it is encrypted; absent if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<EncryptionInfo>,
    /// What was read and written since the store was opened.
    #[serde(flatten)]
    pub io: VolumeIo,
}

/// When a server started: by its clock, and since the Unix epoch.
#[derive(Debug, Clone, Copy)]
pub struct Started {
    clock: Instant,
    time: Duration,
}

impl Started {
    /// At this moment.
    #[must_use]
    pub fn now() -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { clock: Instant::now(), time }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Top {
    /// What there is now. It walks no layer: the space that a volume takes is not among it.
    #[must_use]
    pub fn now(
        store: &Store,
        started: Started,
        clients: Vec<Client>,
        devices: Vec<Attached>,
        mut jobs: Vec<Job>,
    ) -> Self {
        let info = store.info();
        if info.work_remaining > 0 {
            jobs.push(Job::background(info.work_remaining));
        }
        let volumes = store.volume_io().into_iter().map(|(volume, io)| VolumeLoad {
            name: volume.name,
            uuid: volume.uuid,
            size: volume.size,
            snapshots: volume.snapshots,
            depth: volume.depth,
            open: volume.open,
            rebuilding: volume.rebuilding,
            encryption: volume.encryption,
            io,
        });
        Self {
            volumes: volumes.collect(),
            // Behind the counts, so that a rate is rather too low than too high.
            clock_ns: nanoseconds(started.clock.elapsed()),
            pid: std::process::id(),
            started_ns: nanoseconds(started.time),
            store: info,
            clients,
            devices,
            jobs,
        }
    }
}
