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

fn spec_of(snapshot: &SnapshotInfo) -> String {
    format!("{}@{}", snapshot.volume, snapshot.name)
}
