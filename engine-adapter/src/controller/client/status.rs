//! What is shown of volumes, snapshots and jobs. As JSON these have upstream's keys, in its order.

use crate::proto::controller::Volume;
use crate::proto::ptypes;
use serde::Serialize;
use std::collections::BTreeMap;

/// A volume: `longhorn info`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeInfo {
    /// Its name.
    pub name: String,
    /// Bytes; 0 before the start.
    pub size: i64,
    /// Replicas, in whatever mode.
    pub replica_count: i32,
    /// Where the frontend is reached.
    pub endpoint: String,
    /// Kind of the frontend.
    pub frontend: String,
    /// `up`, `down`, or empty without a frontend.
    pub frontend_state: String,
    /// Whether an expansion goes on.
    pub is_expanding: bool,
    /// Why the last expansion failed.
    pub last_expansion_error: String,
    /// When, RFC 3339.
    pub last_expansion_failed_at: String,
    /// Whether unmaps mark the snapshots they reach as removed.
    pub unmap_mark_snap_chain_removed: bool,
    /// Most snapshots.
    pub snapshot_max_count: i32,
    /// Most bytes of snapshots; 0 for no limit. Upstream's key begins with a capital letter.
    #[serde(rename = "SnapshotMaxSize")]
    pub snapshot_max_size: i64,
}

impl From<Volume> for VolumeInfo {
    fn from(volume: Volume) -> Self {
        Self {
            name: volume.name,
            size: volume.size,
            replica_count: volume.replica_count,
            endpoint: volume.endpoint,
            frontend: volume.frontend,
            frontend_state: volume.frontend_state,
            is_expanding: volume.is_expanding,
            last_expansion_error: volume.last_expansion_error,
            last_expansion_failed_at: volume.last_expansion_failed_at,
            unmap_mark_snap_chain_removed: volume.unmap_mark_snap_chain_removed,
            snapshot_max_count: volume.snapshot_max_count,
            snapshot_max_size: volume.snapshot_max_size,
        }
    }
}

/// A snapshot, or the head: `longhorn snapshot info`. Names are bare, the head's is `volume-head`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskInfo {
    /// Its name.
    pub name: String,
    /// What it is based on; empty for the first.
    pub parent: String,
    /// What is based on it.
    pub children: BTreeMap<String, bool>,
    /// Whether it is only kept until a purge.
    pub removed: bool,
    /// Whether somebody asked for it, and it was not taken for a rebuild or an expansion.
    #[serde(rename = "usercreated")]
    pub user_created: bool,
    /// When, RFC 3339.
    pub created: String,
    /// Allocated bytes, decimal.
    pub size: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
}

/// A replica's purge: `longhorn snapshot purge-status`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PurgeStatus {
    /// Why it failed.
    pub error: String,
    /// Whether it goes on.
    pub is_purging: bool,
    /// Percent.
    pub progress: i32,
    /// Empty, `in_progress`, `complete` or `error`, as in all of these.
    pub state: String,
}

impl From<ptypes::SnapshotPurgeStatusResponse> for PurgeStatus {
    fn from(status: ptypes::SnapshotPurgeStatusResponse) -> Self {
        Self {
            error: status.error,
            is_purging: status.is_purging,
            progress: status.progress,
            state: status.state,
        }
    }
}

/// A replica's rebuild: `longhorn rebuild-status`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RebuildStatus {
    /// Why it failed.
    pub error: String,
    /// Whether it goes on.
    pub is_rebuilding: bool,
    /// Percent.
    pub progress: i32,
    /// As of [`PurgeStatus`].
    pub state: String,
    /// Where it is copied from. `null` if it is not, as upstream prints that.
    pub from_replica_address_list: Option<Vec<String>>,
}

impl From<ptypes::ReplicaRebuildStatusResponse> for RebuildStatus {
    fn from(status: ptypes::ReplicaRebuildStatusResponse) -> Self {
        let mut from = status.from_replica_address_list;
        // All that older replicas tell.
        if from.is_empty() && !status.from_replica_address.is_empty() {
            from.push(status.from_replica_address);
        }
        Self {
            error: status.error,
            is_rebuilding: status.is_rebuilding,
            progress: status.progress,
            state: status.state,
            from_replica_address_list: (!from.is_empty()).then_some(from),
        }
    }
}

/// A replica's part in a clone: `longhorn snapshot clone-status`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CloneStatus {
    /// Whether it goes on.
    pub is_cloning: bool,
    /// Why it failed.
    pub error: String,
    /// Percent.
    pub progress: i32,
    /// As of [`PurgeStatus`].
    pub state: String,
    /// The source.
    pub from_replica_address: String,
    /// What is cloned.
    pub snapshot_name: String,
}

impl From<ptypes::SnapshotCloneStatusResponse> for CloneStatus {
    fn from(status: ptypes::SnapshotCloneStatusResponse) -> Self {
        Self {
            is_cloning: status.is_cloning,
            error: status.error,
            progress: status.progress,
            state: status.state,
            from_replica_address: status.from_replica_address,
            snapshot_name: status.snapshot_name,
        }
    }
}

/// A replica's checksum of a snapshot: `longhorn snapshot hash-status`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HashStatus {
    /// As of [`PurgeStatus`].
    pub state: String,
    /// Sixteen hexadecimal digits.
    pub checksum: String,
    /// Why there is none.
    pub error: String,
    /// Whether the content differs from that of an earlier checksum. Upstream's command line forgets
    /// to pass this on.
    pub silently_corrupted: bool,
}

impl From<ptypes::SnapshotHashStatusResponse> for HashStatus {
    fn from(status: ptypes::SnapshotHashStatusResponse) -> Self {
        Self {
            state: status.state,
            checksum: status.checksum,
            error: status.error,
            silently_corrupted: status.silently_corrupted,
        }
    }
}

/// A program's version: `longhorn version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Version {
    /// The release.
    pub version: String,
    /// Commit it was built from.
    pub git_commit: String,
    /// When it was built.
    pub build_date: String,
    /// Version of the command line.
    #[serde(rename = "cliAPIVersion")]
    pub cli_api: i64,
    /// Oldest command line it can stand in for.
    #[serde(rename = "cliAPIMinVersion")]
    pub cli_api_min: i64,
    /// Version of the controller's service.
    #[serde(rename = "controllerAPIVersion")]
    pub controller_api: i64,
    /// Oldest it can stand in for.
    #[serde(rename = "controllerAPIMinVersion")]
    pub controller_api_min: i64,
    /// Of replicas' data.
    pub data_format_version: i64,
    /// Oldest that is readable.
    pub data_format_min_version: i64,
}

/// Numbers of the interfaces: those of upstream 1.12, which ours follow.
const CLI_API: i64 = 12;
const CLI_API_MIN: i64 = 8;
const CONTROLLER_API: i64 = 6;
const CONTROLLER_API_MIN: i64 = 4;
const DATA_FORMAT: i64 = 1;

impl Version {
    /// Ours.
    #[must_use]
    pub fn ours() -> Self {
        Self {
            version: concat!("v", env!("CARGO_PKG_VERSION")).to_owned(),
            git_commit: option_env!("DBS_GIT_COMMIT").unwrap_or_default().to_owned(),
            build_date: option_env!("DBS_BUILD_DATE").unwrap_or_default().to_owned(),
            cli_api: CLI_API,
            cli_api_min: CLI_API_MIN,
            controller_api: CONTROLLER_API,
            controller_api_min: CONTROLLER_API_MIN,
            data_format_version: DATA_FORMAT,
            data_format_min_version: DATA_FORMAT,
        }
    }
}

impl From<ptypes::VersionOutput> for Version {
    fn from(output: ptypes::VersionOutput) -> Self {
        Self {
            version: output.version,
            git_commit: output.git_commit,
            build_date: output.build_date,
            cli_api: output.cli_api_version,
            cli_api_min: output.cli_api_min_version,
            controller_api: output.controller_api_version,
            controller_api_min: output.controller_api_min_version,
            data_format_version: output.data_format_version,
            data_format_min_version: output.data_format_min_version,
        }
    }
}

impl From<Version> for ptypes::VersionOutput {
    fn from(version: Version) -> Self {
        Self {
            version: version.version,
            git_commit: version.git_commit,
            build_date: version.build_date,
            cli_api_version: version.cli_api,
            cli_api_min_version: version.cli_api_min,
            controller_api_version: version.controller_api,
            controller_api_min_version: version.controller_api_min,
            data_format_version: version.data_format_version,
            data_format_min_version: version.data_format_min_version,
        }
    }
}
