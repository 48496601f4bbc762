//! What is shown of volumes, snapshots and jobs. As JSON these have upstream's keys, in its order: messages by
//! attributes in `build.rs`, the others here.

use longhorn_wire::proto::ptypes;
use serde::Serialize;
use std::collections::BTreeMap;

/// A replica's restore: `longhorn backup restore-status`.
pub use longhorn_wire::proto::ptypes::RestoreStatusResponse as RestoreStatus;
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
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupStatus {
    /// What the replica says.
    #[serde(flatten)]
    pub status: ptypes::BackupStatusResponse,
    /// The replica that makes it.
    pub replica_address: String,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_in_upstream_s_order_and_some_only_if_they_say_something() {
        let mut restore = RestoreStatus { progress: 7, error: "e".into(), ..Default::default() };
        restore.dest_file_name = "f".into();
        let shown = serde_json::to_string(&restore).unwrap();
        let behind = r#""state":"","backupURL":"","lastRestored":"","currentRestoringBackup":""}"#;
        let filled = r#"{"isRestoring":false,"progress":7,"error":"e","filename":"f","#;
        assert_eq!(shown, format!("{filled}{behind}"));
        let shown = serde_json::to_string(&RestoreStatus::default()).unwrap();
        assert_eq!(shown, format!("{}{behind}", r#"{"isRestoring":false,"#));

        let mut backup = BackupStatus { replica_address: "r".into(), ..Default::default() };
        let behind = r#""snapshotName":"","state":"","replicaAddress":"r"}"#;
        let shown = serde_json::to_string(&backup).unwrap();
        assert_eq!(shown, format!("{}{behind}", r#"{"progress":0,"#));
        (backup.status.backup_url, backup.status.error) = ("u".into(), "e".into());
        let shown = serde_json::to_string(&backup).unwrap();
        assert_eq!(shown, format!("{}{behind}", r#"{"progress":0,"backupURL":"u","error":"e","#));
    }
}
