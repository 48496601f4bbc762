//! A replica, as the whole path sees it.

use crate::rules::{ReplicaId, Slot};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

/// A replica of the path.
pub(super) struct Replica {
    pub id: ReplicaId,
    /// Its place in the modes.
    pub slot: Slot,
    /// Never given to another, as `slot` is.
    pub serial: u64,
    /// As error texts have it.
    pub name: String,
    pub flushes: bool,
    /// Why it became `ERR`.
    pub why: OnceLock<String>,
    /// Requests that met damaged data in it.
    pub mismatches: AtomicU64,
    /// Blocks of it that were healed.
    pub healed: AtomicU64,
}
