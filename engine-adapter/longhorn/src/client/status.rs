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
