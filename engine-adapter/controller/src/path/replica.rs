//! A replica, as the whole path sees it.

use crate::rules::{ReplicaId, Slot};
use dbs_frontend::Listen;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

/// Where connections are to be had in place of those that broke.
#[derive(Debug)]
pub(super) enum Anew {
    /// There, for the client of this number.
    Remote { address: Listen, client: u64 },
    /// A simulation has them.
    #[cfg(feature = "sabotage")]
    Simulated(super::simulated_links::Anew),
}

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
    /// How connections to it are made anew that break, if it knows what to make of that.
    pub anew: Option<Anew>,
    /// How often a reactor's were.
    pub reconnected: AtomicU64,
    /// Why it became `ERR`.
    pub why: OnceLock<String>,
    /// Requests that met damaged data in it.
    pub mismatches: AtomicU64,
    /// Blocks of it that were healed.
    pub healed: AtomicU64,
}
