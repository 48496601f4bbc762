//! What a replica is started with, on its command line or by the process that was started for it.

use crate::replica::ReplicaOptions;
use longhorn_data::Durability;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A replica to be served. As JSON it is what a shim tells the server of its store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// Its directory, absolute.
    pub dir: PathBuf,
    /// Longhorn's name of the volume, which callers are checked by; empty if unknown.
    pub volume_name: String,
    /// Name of the instance, likewise.
    pub instance_name: String,
    /// Size of the volume, if it is to be created when absent.
    pub size: Option<u64>,
    /// The file that the volume rests on, absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_file: Option<PathBuf>,
    /// Whether writes are counted.
    pub revision_counter: bool,
    /// Whether unmaps mark the snapshots they reach as removed.
    pub unmap_mark: bool,
    /// Most snapshots.
    pub snapshot_max_count: i32,
    /// Most bytes of snapshots; 0 for no limit.
    pub snapshot_max_size: u64,
    /// Whether the content is encrypted.
    pub encrypted: bool,
    /// Whether each write is committed before it is acknowledged.
    pub durable_writes: bool,
    /// Bytes after which a commit begins.
    pub commit_bytes: u64,
    /// Whether data requests touch no data.
    pub null_storage: bool,
}

impl Options {
    /// For the replica itself, on a volume of this name in its store.
    #[must_use]
    pub fn replica(&self, volume: &str, store_file: Option<&Path>) -> ReplicaOptions {
        ReplicaOptions {
            store_file: store_file.map(Path::to_owned),
            backing_file: self.backing_file.clone(),
            revision_counter: self.revision_counter,
            unmap_mark: self.unmap_mark,
            snapshot_max_count: self.snapshot_max_count,
            snapshot_max_size: i64::try_from(self.snapshot_max_size).unwrap_or(i64::MAX),
            encrypted: self.encrypted,
            durability: if self.durable_writes { Durability::Power } else { Durability::Interval },
            commit_bytes: self.commit_bytes,
            null_storage: self.null_storage,
            ..ReplicaOptions::new(&self.dir, volume)
        }
    }

    /// Name of the replica for logs and metrics: that of its directory.
    #[must_use]
    pub fn name(&self) -> String {
        let name = self.dir.file_name().unwrap_or(self.dir.as_os_str());
        name.to_string_lossy().into_owned()
    }
}
