//! Snapshots on their way between stores: the stream that `docs/stream.md` specifies.

mod access;
mod fit;
mod header;
mod plan;
mod receive;
mod record;
mod send;
mod sequence;
#[cfg(test)]
mod tests;

pub use access::StoreAccess;
pub use header::{BaseSnapshot, ResumeToken, StreamHeader};
pub use plan::plan;
pub use receive::{Received, pending, receive};
pub use send::{SendOptions, check_same, check_whole, send};
pub use sequence::{ReceiveOptions, receive_all};

use dbs_core::info::SnapshotInfo;

/// Label that holds the identity of a received snapshot: the uuid it has where it was taken.
const RECEIVED_LABEL: &str = "dbs.received-uuid";

/// The uuid by which a snapshot is known in streams: that of the snapshot it is a copy of, or
/// its own.
fn identity(snapshot: &SnapshotInfo) -> &str {
    snapshot.labels.get(RECEIVED_LABEL).unwrap_or(&snapshot.uuid)
}

/// Whether a snapshot was received from another store.
#[must_use]
pub fn is_received(snapshot: &SnapshotInfo) -> bool {
    snapshot.labels.contains_key(RECEIVED_LABEL)
}

/// The label of a snapshot that `dbs volume export` takes of a volume in use and deletes at its end, and its value.
pub const EXPORT_LABEL: (&str, &str) = ("dbs-export", "temporary");

/// What its name is before a `-` and the time.
pub const EXPORT_NAME: &str = "export";

/// Whether a snapshot is one that `dbs volume export` has taken in this store, and deletes: nothing may come to rest on it.
#[must_use]
pub fn is_of_export(snapshot: &SnapshotInfo) -> bool {
    let (label, value) = EXPORT_LABEL;
    let rest = snapshot.name.strip_prefix(EXPORT_NAME);
    rest.is_some_and(|rest| rest.starts_with('-'))
        && snapshot.labels.get(label).is_some_and(|found| found == value)
        && !snapshot.user_created
        && !is_received(snapshot)
}

fn spec_of(snapshot: &SnapshotInfo) -> String {
    format!("{}@{}", snapshot.volume, snapshot.name)
}
