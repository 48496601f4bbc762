//! Flushes of the storage: one at a time, each for all who asked before it began. The kernel tells of a
//! failure once: who flushed beside the one that is told, or after, would take what is lost for durable.

use super::Inner;
use super::turns::{Held, Look, Wake};
use crate::error::{Error, Result};
use crate::sabotage::{self, Bug};
use std::io;
use std::sync::Arc;

const FAILED: &str = "flush failed";

/// A flush of the storage that somebody does by other means than the storage's: a flush of
/// [`Store::direct_io`](super::Store::direct_io)'s file that is begun after this was given out, and ended
/// with [`Flush::finish`]. Nobody else flushes before that. If it is dropped, nobody knows what is durable,
/// and nothing is written any more until the store is opened again.
#[must_use]
pub struct Flush {
    inner: Arc<Inner>,
    covers: u64,
    running: bool,
}

/// That somebody has asked for a flush, and waits for it: the same for all calls until it has ended.
#[derive(Debug, Default)]
pub struct Asked(Option<u64>);

impl Asked {
    /// Whether somebody waits.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.0.is_some()
    }
}

/// What [`Volume::start_flush`](crate::Volume::start_flush) asks its caller to do.
pub enum StartFlush {
    /// Flush, and finish it.
    Io(Flush),
    /// Nothing: everything is durable that was acknowledged before it was asked for.
    Done,
    /// Somebody else flushes: ask again when that is over, as the caller is told.
    Later,
    /// More is to be done than to flush, or it would have to wait: use the blocking call, on a thread that
    /// may.
    Blocked,
}

impl Flush {
    /// Ends it, with what became of it.
    ///
    /// # Errors
    /// `Io`, which poisons.
    pub fn finish(mut self, outcome: io::Result<()>) -> Result<()> {
        self.running = false;
        let outcome = if sabotage::is(Bug::IgnoreFlushFailure) { Ok(()) } else { outcome };
        let outcome = self.inner.outcome_of_flush(outcome);
        let flushed = outcome.map_err(|error| self.inner.poison_by(Error::io(error, FAILED)));
        self.inner.flushes.end(self.inner.covered(self.covers, flushed.is_ok()));
        flushed
    }
}

impl Drop for Flush {
    fn drop(&mut self) {
        if self.running {
            self.inner.poison("a flush was dropped before it ended");
            self.inner.give_tail_up();
            self.inner.flushes.end(None);
        }
    }
}

impl Inner {
    /// See [`Volume::start_flush`](crate::Volume::start_flush).
    pub(crate) fn start_flush(
        self: &Arc<Self>,
        asked: &mut Asked,
        wake: &Wake,
    ) -> Result<StartFlush> {
        let start = self.try_flush(&mut asked.0, wake);
        if !matches!(start, Ok(StartFlush::Later)) {
            asked.0 = None;
        }
        start
    }

    fn try_flush(self: &Arc<Self>, number: &mut Option<u64>, wake: &Wake) -> Result<StartFlush> {
        // What is acknowledged later does not matter: it was not when this was asked for.
        let looks = number.is_none() && !sabotage::is(Bug::FlushUncommitted);
        if looks && !self.shared().is_committed() {
            return Ok(StartFlush::Blocked);
        }
        let start = match self.flushes.try_take(number, wake) {
            Look::Busy if !sabotage::is(Bug::AnswerAmidFlush) => StartFlush::Later,
            Look::Busy | Look::Done => StartFlush::Done,
            Look::Turn(covers) => {
                StartFlush::Io(Flush { inner: Arc::clone(self), covers, running: true })
            }
        };
        // The one that this waited for may have failed: then this has the turn for nothing.
        self.check_unfailed(&[Bug::FlushBesideFailure])?;
        Ok(start)
    }

    /// Makes durable what was written before this call. Calls made while one runs share the next.
    pub(super) fn flush_storage(&self) -> Result<()> {
        self.flush_together(|| self.flush_device())
    }

    /// Flushes the storage for who has the turn.
    pub(super) fn flush_device(&self) -> io::Result<()> {
        self.outcome_of_flush(self.storage.flush())
    }

    /// After a failure nobody knows what is stored of what was written before. The kernel tells of it once: the
    /// next process would flush without an error, replay the tail, and show as data what a block had held
    /// before it was written.
    fn outcome_of_flush(&self, outcome: io::Result<()>) -> io::Result<()> {
        outcome.inspect_err(|_| self.give_tail_up())
    }

    fn give_tail_up(&self) {
        if !sabotage::is(Bug::KeepTailAfterFailure) {
            self.meta().log.give_tail_up();
        }
    }

    fn flush_together(&self, flush: impl FnOnce() -> io::Result<()>) -> Result<()> {
        let Some(covers) = self.flushes.take() else {
            return self.check_unfailed(&[Bug::CommitAfterFailure, Bug::FlushBesideFailure]);
        };
        let turn = Held::new(&self.flushes, self);
        let flushed = self.flush_alone(FAILED, flush);
        turn.end(self.covered(covers, flushed.is_ok()));
        flushed
    }

    /// What a turn has done: who asked since it began may have written since.
    fn covered(&self, covers: u64, done: bool) -> Option<u64> {
        let covers =
            if sabotage::is(Bug::ShareRunningFlush) { self.flushes.asked() } else { covers };
        done.then_some(covers)
    }

    /// Does what flushes the storage in some way of its own.
    ///
    /// # Errors
    /// `Io`, which poisons; `Poisoned`.
    pub(super) fn flushing(
        &self,
        failure: &str,
        flush: impl FnOnce() -> io::Result<()>,
    ) -> Result<()> {
        self.flushes.take_alone();
        let turn = Held::new(&self.flushes, self);
        let flushed = self.flush_alone(failure, flush);
        turn.end(None);
        flushed
    }

    /// As [`Inner::flushing`], for who has the turn.
    fn flush_alone(&self, failure: &str, flush: impl FnOnce() -> io::Result<()>) -> Result<()> {
        self.check_unfailed(&[Bug::CommitAfterFailure, Bug::FlushBesideFailure])?;
        flush().map_err(|error| self.poison_by(Error::io(error, failure)))
    }

    /// As [`Inner::check_sound`], where these planted bugs leave it out.
    pub(super) fn check_unfailed(&self, unless: &[Bug]) -> Result<()> {
        if unless.iter().any(|bug| sabotage::is(*bug)) {
            return Ok(());
        }
        self.check_sound()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::store::{InitOptions, OpenOptions, Store};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn who_comes_while_a_flush_runs_shares_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        let inner = &*store.inner;
        let before = inner.flushes.asked();
        let (end, ended) = mpsc::channel();
        let (begin, begun) = mpsc::channel();
        let flushes = AtomicU64::new(0);
        let flush = || {
            flushes.fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        std::thread::scope(|scope| {
            let first = scope.spawn(move || {
                inner.flush_together(|| {
                    begin.send(()).unwrap();
                    ended.recv().unwrap();
                    Ok(())
                })
            });
            begun.recv().unwrap();
            let others: Vec<_> =
                (0..3).map(|_| scope.spawn(|| inner.flush_together(flush))).collect();
            while inner.flushes.asked() < before + 4 {
                std::thread::yield_now();
            }
            assert_eq!(flushes.load(Ordering::SeqCst), 0, "one at a time");
            end.send(()).unwrap();
            first.join().unwrap().unwrap();
            others.into_iter().for_each(|other| other.join().unwrap().unwrap());
        });
        assert_eq!(flushes.load(Ordering::SeqCst), 1, "not the one that ran, and only one more");
        inner.flush_together(flush).unwrap();
        assert_eq!(flushes.load(Ordering::SeqCst), 2);
    }

    /// Found by review: who panicked amid a flush or a commit kept its turn, and whoever came next waited for ever.
    #[test]
    fn who_panics_with_a_turn_gives_it_back() {
        type Panics = fn(&Inner);
        let cases: [Panics; 3] = [
            |inner| drop(inner.flush_together(|| panic!("planned"))),
            |inner| drop(inner.flushing("it", || panic!("planned"))),
            |inner| inner.without_commits(|| panic!("planned")),
        ];
        for panics in cases {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("store");
            let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
            Store::init(&path, &options).unwrap();
            let store = Arc::new(Store::open(&path, &OpenOptions::default()).unwrap());
            store.create_volume("v", 1 << 20).unwrap();
            let inner = Arc::clone(&store.inner);
            assert!(std::thread::spawn(move || panics(&inner)).join().is_err());
            let (tell, told) = mpsc::channel();
            let another = Arc::clone(&store);
            std::thread::spawn(move || tell.send((another.flush(), another.delete_volume("v"))));
            let (flushed, deleted) = told.recv_timeout(Duration::from_secs(60)).unwrap();
            for refused in [flushed, deleted] {
                let error = refused.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
            }
        }
    }
}
