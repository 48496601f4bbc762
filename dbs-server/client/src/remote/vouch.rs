//! Whether a flush vouches for what was written before it: it does not for what a former server had.

use dbs_core::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What was written over connections to a server, and what of it is known to be durable.
#[derive(Debug, Default)]
pub(super) struct Vouch {
    /// Changes begun.
    begun: AtomicU64,
    /// Of these, the ones before a flush that succeeded.
    flushed: AtomicU64,
    /// What was not flushed may be lost, whatever the next flush says: it may be another server's.
    unsure: AtomicBool,
}

impl Vouch {
    /// A change begins, or has ended: a flush that began in between says nothing of it.
    pub fn wrote(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    /// A connection broke: the next one may be to another server.
    pub fn broke(&self) {
        if self.begun.load(Ordering::SeqCst) > self.flushed.load(Ordering::SeqCst) {
            self.unsure.store(true, Ordering::SeqCst);
        }
    }

    /// Before a flush: what it covers, if it succeeds.
    pub fn before_flush(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    /// A flush that covers so much has succeeded.
    ///
    /// # Errors
    /// As [`Vouch::check`].
    pub fn flushed(&self, covered: u64) -> Result<()> {
        // One that a former server answered covers what the present one has; said once, it is known.
        let checked = self.check();
        self.flushed.fetch_max(covered, Ordering::SeqCst);
        checked
    }

    /// As [`Vouch::flushed`], for who is not the one to be told.
    pub fn flushed_by_one(&self, covered: u64) {
        if !self.unsure.load(Ordering::SeqCst) {
            self.flushed.fetch_max(covered, Ordering::SeqCst);
        }
    }

    /// Says once that something may be lost.
    ///
    /// # Errors
    /// `Io`.
    pub fn check(&self) -> Result<()> {
        if !self.unsure.swap(false, Ordering::SeqCst) {
            return Ok(());
        }
        let text = "the connection to the server broke, or a flush failed: what was written since the last flush that \
                    succeeded may be lost";
        Err(Error::new(ErrorKind::Io, text))
    }
}
