//! A volume's controller, as its service needs it.

use dbs_core::Result;
use longhorn_wire::proto::controller::{Metrics, ReplicaMode, Volume};
use longhorn_wire::proto::ptypes::SyncFileInfo;
use std::collections::HashMap;

/// What can be asked of a controller. Calls block as long as they take, and may come at once; errors
/// carry the texts that callers of upstream's go by.
pub trait Control: Send + Sync {
    /// How the volume is.
    fn volume(&self) -> Volume;

    /// Starts the volume with these replicas; sizes in bytes.
    fn start(&self, replicas: &[String], size: i64, current_size: i64) -> Result<()>;

    /// Ends the frontend and closes all replicas.
    fn shutdown(&self) -> Result<()>;

    /// Takes a snapshot; its name, which is made up if `name` is empty.
    fn snapshot(
        &self,
        name: &str,
        labels: HashMap<String, String>,
        freeze_filesystem: bool,
    ) -> Result<String>;

    /// Goes back to a snapshot.
    fn revert(&self, snapshot: &str) -> Result<()>;

    /// Begins an expansion to this many bytes.
    fn expand(&self, size: i64) -> Result<()>;

    /// Starts a frontend of this kind.
    fn start_frontend(&self, frontend: &str) -> Result<()>;

    /// Ends the frontend.
    fn shutdown_frontend(&self) -> Result<()>;

    /// Sets whether unmaps mark the snapshots they reach as removed.
    fn set_unmap_mark(&self, enabled: bool) -> Result<()>;

    /// Sets how many snapshots there may be.
    fn set_snapshot_max_count(&self, count: i32) -> Result<()>;

    /// Sets how many bytes they may have; 0 for no limit.
    fn set_snapshot_max_size(&self, size: i64) -> Result<()>;

    /// Addresses and modes of all replicas, in the order they were added.
    fn replicas(&self) -> Vec<(String, ReplicaMode)>;

    /// Adds a replica in this mode.
    fn create_replica(
        &self,
        address: &str,
        snapshot_required: bool,
        mode: ReplicaMode,
    ) -> Result<()>;

    /// Removes a replica; an unknown one is no error.
    fn delete_replica(&self, address: &str) -> Result<()>;

    /// Sets a replica's mode.
    fn update_replica(&self, address: &str, mode: ReplicaMode) -> Result<()>;

    /// Makes a replica ready to be filled; what it has to be given. `instance`, if not empty, is what
    /// it must be.
    fn prepare_rebuild(&self, address: &str, instance: &str) -> Result<Vec<SyncFileInfo>>;

    /// Checks a replica that was filled, and uses it.
    fn verify_rebuild(&self, address: &str, instance: &str) -> Result<()>;

    /// From how many replicas one may be filled at once.
    fn sync_limit(&self) -> i32;

    /// Sets that.
    fn set_sync_limit(&self, limit: i32) -> Result<()>;

    /// Writes the last requests to the log, so many at most, or all if 0.
    fn journal(&self, limit: i64);

    /// Of the last full second.
    fn metrics(&self) -> Metrics;

    /// Since the start.
    fn counters(&self) -> Counters;
}

/// What was done since the start, of reads and of writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads that were answered.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Nanoseconds they took, summed.
    pub read_ns: u64,
    /// Writes that were answered.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Nanoseconds they took, summed.
    pub write_ns: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Reads that another replica was asked for again.
    pub retries: u64,
    /// Replicas that became `ERR`, by what for.
    pub faults: Vec<(&'static str, u64)>,
    /// What was damaged, for each replica of the data path.
    pub damage: Vec<DamageCount>,
}

/// Damage met in one replica.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DamageCount {
    /// Its address.
    pub replica: String,
    /// Requests that met data which is not what was written.
    pub mismatches: u64,
    /// Blocks that were healed from another replica.
    pub healed: u64,
}
