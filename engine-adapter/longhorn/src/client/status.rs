//! What is shown of volumes, snapshots and jobs. As JSON these have upstream's keys, in its order: messages by
//! attributes in `build.rs`, the others here.

use longhorn_wire::proto::ptypes;
use serde::Serialize;
use std::collections::BTreeMap;

/// A replica's part in a clone: `longhorn snapshot clone-status`.
pub use longhorn_wire::proto::ptypes::SnapshotCloneStatusResponse as CloneStatus;
/// A replica's checksum of a snapshot: `longhorn snapshot hash-status`. Upstream's command line forgets
/// to pass on whether the content differs from that of an earlier checksum.
pub use longhorn_wire::proto::ptypes::SnapshotHashStatusResponse as HashStatus;
/// A replica's purge: `longhorn snapshot purge-status`.
pub use longhorn_wire::proto::ptypes::SnapshotPurgeStatusResponse as PurgeStatus;
/// A program's version: `longhorn version`.
pub use longhorn_wire::proto::ptypes::VersionOutput as Version;

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
    /// Empty, `in_progress`, `complete` or `error`.
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

/// A backup: `longhorn backup status`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupStatus {
    /// Percent.
    pub progress: i32,
    /// The backup, once it is complete.
    #[serde(rename = "backupURL", skip_serializing_if = "String::is_empty")]
    pub backup_url: String,
    /// Why it failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Bare name of the snapshot.
    pub snapshot_name: String,
    /// `in_progress`, `complete` or `error`.
    pub state: String,
    /// The replica that makes it.
    pub replica_address: String,
}

/// A replica's restore: `longhorn backup restore-status`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoreStatus {
    /// Whether it goes on.
    pub is_restoring: bool,
    /// Percent.
    #[serde(skip_serializing_if = "is_zero")]
    pub progress: i32,
    /// Why it failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Disk that is restored.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub filename: String,
    /// Empty, `in_progress`, `complete` or `error`.
    pub state: String,
    /// The backup that is being restored, or was.
    #[serde(rename = "backupURL")]
    pub backup_url: String,
    /// The backup that was restored last.
    pub last_restored: String,
    /// The one that is being restored.
    pub current_restoring_backup: String,
}

impl From<ptypes::RestoreStatusResponse> for RestoreStatus {
    fn from(status: ptypes::RestoreStatusResponse) -> Self {
        Self {
            is_restoring: status.is_restoring,
            progress: status.progress,
            error: status.error,
            filename: status.dest_file_name,
            state: status.state,
            backup_url: status.backup_url,
            last_restored: status.last_restored,
            current_restoring_backup: status.current_restoring_backup,
        }
    }
}

/// As serde asks for it.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(progress: &i32) -> bool {
    *progress == 0
}
