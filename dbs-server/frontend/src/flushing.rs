//! Commits in which there is nothing to do but to flush the storage: the reactor does that by itself, without
//! a worker.

use super::direct::Storage;
use dbs_core::volume::{Asked, Flush, StartFlush, Wake};
use dbs_core::{Error, Volume};
use dbs_reactor::Io;
use std::io;

/// The flush of a reactor: one at a time.
pub struct Flushing {
    asked: Asked,
    flush: Option<Flush>,
    wake: Wake,
}

/// How a commit goes on.
#[derive(Debug)]
pub enum Going {
    /// It is over.
    Ended(Result<(), Error>),
    /// [`Flushing::synced`] is to come, or `wake` and then [`Flushing::start`] again.
    Flushing,
    /// Somebody who may wait is to commit.
    Blocked,
}

impl Flushing {
    /// `wake` tells the reactor, from any thread, to call [`Flushing::start`] again if it
    /// [waits](Flushing::is_waiting).
    #[must_use]
    pub fn new(wake: Wake) -> Self {
        Self { asked: Asked::default(), flush: None, wake }
    }

    /// Begins a commit or goes on with it; what it flushes ends in [`dbs_reactor::Handler::synced`] with
    /// this tag.
    pub fn start(
        &mut self,
        io: &mut Io,
        storage: Option<&Storage>,
        volume: &Volume,
        tag: u64,
    ) -> Going {
        let Some(storage) = storage else { return Going::Blocked };
        match volume.start_flush(&mut self.asked, &self.wake) {
            Ok(StartFlush::Io(flush)) => {
                self.flush = Some(flush);
                io.sync(storage.file, tag);
                Going::Flushing
            }
            Ok(StartFlush::Later) => Going::Flushing,
            Ok(StartFlush::Blocked) => Going::Blocked,
            Ok(StartFlush::Done) => Going::Ended(Ok(())),
            Err(error) => Going::Ended(Err(error)),
        }
    }

    /// Whether it waits until somebody else has flushed.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.asked.is_waiting()
    }

    /// Ends the flush with what the reactor has told: the outcome of the commit.
    ///
    /// # Errors
    /// Those of [`Flush::finish`].
    pub fn synced(&mut self, outcome: io::Result<()>) -> Result<(), Error> {
        match self.flush.take() {
            Some(flush) => flush.finish(outcome),
            None => Err(Error::invalid("internal error: a sync that no flush has begun")),
        }
    }
}
