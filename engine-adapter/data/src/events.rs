//! What requests tell the replica that they are carried out for.

use dbs_core::Error;

/// What the data connections tell the replica that they work for, and ask of it. All methods are
/// called on workers and may block; none may wait for a lock under which [`Gate::set`](super::gate::Gate::set) is called,
/// as that waits for them.
pub trait ActiveEvents: Send + Sync {
    /// The first write or unmap has come and will not be acknowledged before this returns.
    fn first_change(&self);

    /// Unmaps the whole 4 KiB blocks inside the range, which lies inside the volume.
    /// Returns the bytes freed.
    ///
    /// # Errors
    /// Those of the store.
    fn unmap(&self, offset: u64, length: u64) -> Result<u64, Error>;

    /// Makes everything acknowledged so far durable, the revision counter with it.
    ///
    /// # Errors
    /// Those of the store.
    fn commit(&self) -> Result<(), Error>;

    /// What a ping is to say of the replica: a poisoned store, a directory that is gone.
    ///
    /// # Errors
    /// The text the ping is answered with.
    fn healthy(&self) -> Result<(), String>;
}
