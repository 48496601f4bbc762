//! Whether a flush vouches for what was written before it: it does not for what a former server had.

use super::lock;
use dbs_core::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What was written to a store: to each volume, whichever of the objects that had it open wrote, and to all of them.
#[derive(Debug, Default)]
pub(super) struct Vouches {
    /// Of the store.
    pub all: Vouch,
    /// By identity: of the volumes that are open, or of which something is not flushed.
    volumes: Mutex<HashMap<String, Arc<Vouch>>>,
}

impl Vouches {
    /// The one of a volume.
    pub fn volume(&self, uuid: &str) -> Arc<Vouch> {
        let mut volumes = lock(&self.volumes);
        volumes.retain(|_, vouch| Arc::strong_count(vouch) > 1 || vouch.is_owed());
        Arc::clone(volumes.entry(uuid.to_owned()).or_default())
    }

    /// A connection broke: the next ones may be to another server.
    pub fn broke(&self) {
        self.all.broke();
        lock(&self.volumes).values().for_each(|vouch| vouch.broke());
    }

    /// Whether something was written that nobody flushed, and nobody was told that it may be lost.
    pub fn is_owed(&self) -> bool {
        lock(&self.volumes).values().any(|vouch| vouch.is_owed())
    }

    /// Before a flush, which is of the whole store: what it covers, if it succeeds.
    pub fn before_flush(&self) -> Covered {
        let volumes = lock(&self.volumes);
        let volumes = volumes.values().map(|vouch| (Arc::clone(vouch), vouch.begun()));
        Covered { all: self.all.begun(), volumes: volumes.collect() }
    }

    /// A flush that covers so much has succeeded, and this vouch is the one to be told.
    ///
    /// # Errors
    /// As [`Vouch::check`].
    pub fn flushed(&self, covered: &Covered, told: &Vouch) -> Result<()> {
        let checked = told.check();
        let every = covered.volumes.iter().map(|(vouch, begun)| (&**vouch, *begun));
        for (vouch, begun) in every.chain([(&self.all, covered.all)]) {
            // Who is told now knows it; the others are told by a flush of their own.
            if std::ptr::eq(vouch, told) || !vouch.unsure.load(Ordering::SeqCst) {
                vouch.flushed.fetch_max(begun, Ordering::SeqCst);
            }
        }
        checked
    }
}

/// What a flush covers.
pub(super) struct Covered {
    all: u64,
    volumes: Vec<(Arc<Vouch>, u64)>,
}

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
        if self.is_owed() {
            self.unsure.store(true, Ordering::SeqCst);
        }
    }

    /// Whether something was written that is not known to be durable.
    pub fn is_owed(&self) -> bool {
        self.begun() > self.flushed.load(Ordering::SeqCst)
    }

    fn begun(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    /// Says once that something may be lost.
    ///
    /// # Errors
    /// `Io`.
    pub fn check(&self) -> Result<()> {
        if self.unsure.swap(false, Ordering::SeqCst) { Err(lost()) } else { Ok(()) }
    }

    /// As [`Vouch::check`], and a flush says it again.
    ///
    /// # Errors
    /// `Io`.
    pub fn look(&self) -> Result<()> {
        if self.unsure.load(Ordering::SeqCst) { Err(lost()) } else { Ok(()) }
    }
}

fn lost() -> Error {
    let text = "the connection to the server broke, or a flush failed: what was written since the last flush that \
                succeeded may be lost";
    Error::new(ErrorKind::Io, text)
}
