//! The layer that a backup is restored to.

use crate::agent::uses::interrupted;
use crate::replica::Replica;
use dbs_backup::Target;
use dbs_core::volume::Layer;
use dbs_core::{Result, Store};
use std::sync::{PoisonError, RwLock};

/// A layer that nobody sees yet.
pub struct Staged {
    size: u64,
    held: RwLock<Option<(Store, Layer)>>,
}

impl Staged {
    /// Begins it, for this disk.
    ///
    /// # Errors
    /// Those of [`crate::replica::Incoming::begin_restore`].
    pub fn new(replica: &Replica, disk: &str) -> Result<Self> {
        let layer = replica.incoming().begin_restore(disk)?;
        Ok(Self { size: layer.size(), held: RwLock::new(Some((replica.store()?, layer))) })
    }

    /// Lets go of the store: from now on nothing can be written.
    pub fn release(&self) {
        *self.held.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether it has let go.
    pub fn is_released(&self) -> bool {
        self.held.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn held(&self) -> Result<(Store, Layer)> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner).clone();
        held.ok_or_else(interrupted)
    }
}

impl Target for Staged {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.held()?.1.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.held()?.1.write_at(offset, buf)
    }

    fn zero(&self, offset: u64, length: u64) -> Result<()> {
        self.held()?.1.zero(offset, length)
    }

    fn flush(&self) -> Result<()> {
        self.held()?.0.flush()
    }
}
