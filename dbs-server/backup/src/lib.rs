//! Backups of the volumes of a store, idle or served: what `dbs backup create` and `restore` do, and Python.
//!
//! The crate `dbs-backup` knows backups and no stores; this one has the snapshots and volumes of a store made into backups
//! ([`create()`]) and back ([`restore()`]). What differs between a command and a library is its [`Host`].

mod create;
pub mod lazy;
pub mod place;
mod restore;
pub mod taken;
mod volume;

pub use create::{Options, create};
pub use restore::{Wanted, restore};

use dbs_backup::Work;
use dbs_control::api::Request;
use dbs_core::Result;
use dbs_transfer::StoreAccess;
use serde_json::Value;
use std::num::NonZeroU64;

/// What is called with the bytes done and the bytes in all, and returns whether to go on.
pub type Meter<'a> = Box<dyn FnMut(u64, u64) -> bool + 'a>;

/// The store whose volumes are backed up or restored, how its commands run, and who is told what.
#[allow(clippy::missing_errors_doc)]
pub trait Host {
    /// Its volumes and their data.
    fn store(&self) -> Result<&(dyn StoreAccess + Sync)>;
    /// Runs a command.
    fn call(&self, request: &Request) -> Result<Value>;
    /// As [`Host::call`], for a short command that cleans up: what has stopped the operation does not stop this.
    fn clean_up(&self, request: &Request) -> Result<()>;
    /// Refuses to go on if a volume or snapshot is another one than that with this identity.
    fn check_same(&self, spec: &str, uuid: &str) -> Result<()>;
    /// Says something that is neither result nor failure.
    fn note(&self, text: &str);
    /// Says that something went wrong that is no failure of the operation.
    fn warn(&self, text: &str);
    /// Shows how far what `label` names is, until it is dropped.
    fn meter(&self, label: &str) -> Meter<'_>;
}

/// How much at once.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Blocks in flight.
    pub workers: usize,
    /// Bytes to or from the backup store in a second, at most.
    pub rate: Option<NonZeroU64>,
}

impl Pace {
    /// Work at this pace.
    pub fn work<'a>(&self, progress: &'a mut dyn FnMut(u64, u64) -> bool) -> Work<'a> {
        Work { workers: self.workers, rate: self.rate, progress }
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self { workers: 4, rate: None }
    }
}
