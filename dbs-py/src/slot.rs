//! What a call has opened, kept for those that follow.

use dbs_transfer::BlockAccess;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// An open volume or snapshot, as all calls that use it share it.
pub type Access = Arc<Opened>;

/// What a call has opened. Letting go of the last one may wait for a server.
pub struct Opened {
    /// Its bytes.
    pub blocks: Box<dyn BlockAccess>,
    /// This process keeps its checksums.
    pub has_sums: bool,
}

/// A volume that may be open.
#[derive(Default)]
pub struct Slot {
    access: RwLock<Option<Access>>,
    /// Held by who opens it. Nobody waits for it who has the interpreter.
    pub opening: Mutex<()>,
}

impl Slot {
    /// Opened, for who comes next.
    pub fn set(&self, access: Access) {
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = Some(access);
    }

    /// Lets go of the volume. Calls that run keep it until they end.
    pub fn clear(&self) {
        // Not with the lock in hand: others look there with the interpreter.
        let access = self.take();
        drop(access);
    }

    /// Taken out of it.
    pub fn take(&self) -> Option<Access> {
        self.access.write().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The volume, if it is open.
    pub fn get(&self) -> Option<Access> {
        self.access.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
