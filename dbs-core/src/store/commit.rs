//! Commit: the one place where metadata reaches the device.
//!
//! Order, and what each step rests on (`docs/format.md`, "Commit", has the crash points):
//!
//! 1. Take the records. The data each points to was written before it was recorded.
//! 2. Flush: that data is durable, and so are metadata copies written by earlier commits.
//! 3. Write the group, and the second copy of blocks whose first is durable since step 2.
//! 4. Flush: the group is durable; freed extents may be reused.
//! 5. Write the first copy of blocks captured at step 1; the next commit makes them durable.

use super::{Inner, Store};
use crate::error::{Error, Result};
use crate::io::WriteRequest;
use crate::meta::commit::{Copies, Room, WriteBack};
use crate::sabotage::{self, Bug};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// What is said when the file of the tail was removed.
const TAIL_LOST: &str = "the file of the tail was removed while the store was open, and was made \
                         again. Had the process died in between, writes that it had just \
                         acknowledged would have been lost. Keep the tail in a directory that \
                         nobody removes";

/// Who asked for a commit, and up to which request they are done.
#[derive(Debug, Default)]
pub(crate) struct Commits {
    requested: u64,
    completed: u64,
    running: bool,
}

impl Commits {
    /// Asks for a commit: the number by which [`Commits::is_done`] knows.
    fn ask(&mut self) -> u64 {
        self.requested += 1;
        self.requested
    }

    /// Whether a commit has ended that began after this was asked.
    fn is_done(&self, ticket: u64) -> bool {
        self.completed >= ticket
    }

    /// Becomes the one who commits, for all requests made so far; `None` if somebody does.
    pub(super) fn begin(&mut self) -> Option<u64> {
        if self.running {
            return None;
        }
        self.running = true;
        Some(self.requested)
    }

    /// Ends a turn that covers so many requests: who came after it began waits for the next.
    fn end(&mut self, covers: u64) {
        self.running = false;
        self.completed = covers;
    }

    /// Ends a turn in which nothing was committed.
    pub(super) fn end_without_commit(&mut self) {
        self.running = false;
    }
}

impl Store {
    /// Commits what no flush has committed yet, and writes some metadata back so that the next
    /// open finds little to redo. For a server's spare moments; costs nothing when there is
    /// nothing to do. Whether there is more.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub fn settle(&self) -> Result<bool> {
        if self.inner.read_only || self.inner.meta().is_idle() {
            return Ok(false);
        }
        self.inner.commit_as(WriteBack::All)?;
        Ok(!self.inner.meta().is_idle())
    }
}

impl Inner {
    /// Makes everything acknowledged so far durable. Calls made while one runs share the next.
    ///
    /// # Errors
    /// `Io`, which poisons, even for want of space: what of it is on the device nobody knows. `Poisoned`.
    pub(crate) fn commit(&self) -> Result<()> {
        self.commit_as(WriteBack::Needed)
    }

    fn commit_as(&self, amount: WriteBack) -> Result<()> {
        self.check_unfailed(&[Bug::CommitAfterFailure])?;
        let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = commits.ask();
        let covers = loop {
            if commits.is_done(ticket) {
                drop(commits);
                return self.check_unfailed(&[Bug::CommitAfterFailure]);
            }
            match commits.begin() {
                Some(covers) => break covers,
                None => {
                    let wait = self.commit_done.wait(commits);
                    commits = wait.unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        drop(commits);
        // Again: the commit that this one waited for may have failed. A group after one that is not
        // there could not be redone, and a flush after one that failed makes nothing durable.
        let unfailed = self.check_unfailed(&[Bug::CommitAfterFailure]);
        let result = unfailed.and_then(|()| self.commit_until_roomy(amount));
        let result = result.map_err(|error| self.poison_by(error));
        let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        commits.end(covers);
        drop(commits);
        self.commit_done.notify_all();
        self.wake();
        result
    }

    /// One commit, and more until all that waited is in a group and half of the journal is free
    /// again.
    fn commit_until_roomy(&self, amount: WriteBack) -> Result<()> {
        self.commit_once(amount)?;
        while self.has_to_go_on() {
            self.commit_once(WriteBack::Needed)?;
        }
        Ok(())
    }

    fn has_to_go_on(&self) -> bool {
        let meta = self.meta();
        meta.journal_short() || meta.staged_left()
    }

    /// One commit; the caller makes sure that there is only one at a time. What takes long, the
    /// sealing and the I/O, happens without the lock.
    pub(super) fn commit_once(&self, amount: WriteBack) -> Result<()> {
        let (room, tail_lost) = {
            let mut meta = self.meta();
            (Room::new(meta.blocks_to_capture(amount)), meta.log.take_tail_lost())
        };
        if tail_lost {
            self.warn(TAIL_LOST.to_owned());
        }
        let group = self.meta().begin_commit(amount, room)?;
        let sealed = group.as_ref().map(|group| (group.address, group.seal()));
        let skip = match group {
            Some(_) => sabotage::is(Bug::SkipDataFlush),
            None => sabotage::is(Bug::SkipEmptyFlush),
        };
        if !skip {
            self.flush_storage()?;
        }
        let second = self.meta().flushed();
        self.write_metadata(&second, sealed.as_ref().map(|(at, bytes)| (*at, &bytes[..])))?;
        self.meta().copies_written(&second);
        let Some(group) = group else { return Ok(()) };
        if !sabotage::is(Bug::SkipGroupFlush) {
            self.flush_storage()?;
        }
        let first = self.meta().group_durable(group);
        self.write_metadata(&first, None)?;
        self.meta().copies_written(&first);
        Ok(())
    }

    /// Makes durable what was written before this call. Calls made while one runs share the next.
    pub(super) fn flush_storage(&self) -> Result<()> {
        self.flush_together(|| self.storage.flush())
    }

    fn flush_together(&self, flush: impl FnOnce() -> std::io::Result<()>) -> Result<()> {
        let ticket = self.flushes_asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut covered = self.flushes.lock().unwrap_or_else(PoisonError::into_inner);
        if *covered >= ticket {
            return self.check_unfailed(&[Bug::CommitAfterFailure, Bug::FlushBesideFailure]);
        }
        // Who asks from here on may have written after it began.
        let covers = self.flushes_asked.load(Ordering::SeqCst);
        self.flush_alone("flush failed", flush)?;
        *covered = match sabotage::is(Bug::ShareRunningFlush) {
            true => self.flushes_asked.load(Ordering::SeqCst),
            false => covers,
        };
        Ok(())
    }

    /// Does what flushes the storage, alone: the kernel tells of a failure once, and who flushes
    /// beside the one that is told, or after, would take what is lost for durable.
    ///
    /// # Errors
    /// `Io`, which poisons; `Poisoned`.
    pub(super) fn flushing(
        &self,
        failure: &str,
        flush: impl FnOnce() -> std::io::Result<()>,
    ) -> Result<()> {
        let _one = self.flushes.lock().unwrap_or_else(PoisonError::into_inner);
        self.flush_alone(failure, flush)
    }

    /// As [`Inner::flushing`], for who has locked out all others.
    fn flush_alone(
        &self,
        failure: &str,
        flush: impl FnOnce() -> std::io::Result<()>,
    ) -> Result<()> {
        self.check_unfailed(&[Bug::CommitAfterFailure, Bug::FlushBesideFailure])?;
        flush().map_err(|error| self.poison_by(Error::io(error, failure)))
    }

    /// As [`Inner::check_sound`], where these planted bugs leave it out.
    fn check_unfailed(&self, unless: &[Bug]) -> Result<()> {
        if unless.iter().any(|bug| sabotage::is(*bug)) {
            return Ok(());
        }
        self.check_sound()
    }

    pub(super) fn write_metadata(
        &self,
        copies: &Copies,
        group: Option<(u64, &[u8])>,
    ) -> Result<()> {
        let sealed = copies.seal();
        let all: Vec<_> = sealed.writes().chain(group).collect();
        if all.is_empty() {
            return Ok(());
        }
        self.keep_still(&all);
        let writes: Vec<_> =
            all.into_iter().map(|(offset, buf)| WriteRequest { offset, buf }).collect();
        self.storage
            .write_many(&writes)
            .map_err(|error| Error::io(error, "writing metadata failed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::interpose::Interposer;
    use crate::store::{InitOptions, OpenOptions, TailPlace};
    use crate::volume::{Request, Start};
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    const DIRTY_BLOCKS: u64 = 16 << 10;

    #[test]
    fn a_commit_is_for_those_who_asked_before_it_began() {
        let mut commits = Commits::default();
        let first = commits.ask();
        let covers = commits.begin().unwrap();
        let late = commits.ask();
        assert_eq!(commits.begin(), None, "one at a time");
        commits.end(covers);
        assert!(commits.is_done(first) && !commits.is_done(late));
        let (covers, shared) = (commits.begin().unwrap(), late);
        commits.end(covers);
        assert!(commits.is_done(shared));
        // One that does nothing is for nobody.
        let third = commits.ask();
        commits.begin().unwrap();
        commits.end_without_commit();
        assert!(!commits.is_done(third));
    }

    /// Found by injecting faults under load: the next commit wrote its group behind the one that
    /// was missing, its callers were told that they were durable, and the store could not be opened.
    #[test]
    fn who_waits_for_a_commit_that_fails_commits_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let rules = directory.path().join("rules");
        std::fs::write(&rules, "").unwrap();
        let interposer = Interposer::new(Some(&format!("@{}", rules.display())), None).unwrap();
        let open = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
        let faulty = OpenOptions { interposer: Some(interposer.into()), ..open.clone() };
        let store = Store::open(&path, &faulty).unwrap();
        store.create_volume("v", 8 << 20).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &[1; 4096], false).unwrap();
        let mut request = Request::new();
        let mut write = |offset| {
            assert_eq!(volume.start_write(offset, 4096, &mut request).unwrap(), Start::Io);
            let _ = request.finish_write(Ok(())).unwrap();
        };
        let wait = |what: fn(&Commits) -> bool| {
            let deadline = Instant::now() + Duration::from_secs(120);
            while !what(&store.inner.commits.lock().unwrap()) {
                assert!(Instant::now() < deadline);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        write(4096);
        store.inner.commits.lock().unwrap().requested = 100;
        // Slow enough for somebody else to come.
        let new = directory.path().join("new");
        std::fs::write(&new, "flush delay=5s; write eio in=journal count=1").unwrap();
        std::fs::rename(&new, &rules).unwrap();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| volume.flush());
            wait(|commits| commits.running);
            write(8192);
            let second = scope.spawn(|| volume.flush());
            wait(|commits| commits.requested == 102);
            assert_eq!(first.join().unwrap().unwrap_err().kind(), crate::ErrorKind::Io);
            assert_eq!(second.join().unwrap().unwrap_err().kind(), crate::ErrorKind::Poisoned);
        });
        drop((request, volume));
        drop(store);
        Store::open(&path, &open).unwrap();
    }

    /// Opening pages of checksums flushes, and so do commits. The kernel says once that it failed.
    #[test]
    fn who_flushes_beside_a_flush_that_fails_is_told_too() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options =
            InitOptions { size: Some(64 << 20), checksums: true, ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let rules = directory.path().join("rules");
        std::fs::write(&rules, "").unwrap();
        let interposer = Interposer::new(Some(&format!("@{}", rules.display())), None).unwrap();
        let interposer = Arc::new(interposer);
        let open =
            OpenOptions { interposer: Some(Arc::clone(&interposer)), ..OpenOptions::default() };
        let store = Store::open(&path, &open).unwrap();
        store.create_volume("v", 8 << 20).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &[1; 4096], true).unwrap();
        store.close_checksums(Duration::ZERO).unwrap();
        let new = directory.path().join("new");
        std::fs::write(&new, "flush delay=500ms; flush eio count=1").unwrap();
        std::fs::rename(&new, &rules).unwrap();
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| volume.write_at(0, &[2; 4096], false));
            while interposer.injected() == 0 && !opening.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(volume.flush().unwrap_err().kind(), crate::ErrorKind::Poisoned);
            assert_eq!(opening.join().unwrap().unwrap_err().kind(), crate::ErrorKind::Io);
        });
    }

    #[test]
    fn who_comes_while_a_flush_runs_shares_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        let inner = &*store.inner;
        let before = inner.flushes_asked.load(Ordering::SeqCst);
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
            while inner.flushes_asked.load(Ordering::SeqCst) < before + 4 {
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

    /// What every request waits for while metadata is written back. No test: it prints a figure.
    #[test]
    #[ignore = "measures; run with --release --nocapture"]
    fn longest_hold_of_the_lock_in_a_commit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions { size: Some(1 << 40), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let open = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
        let store = Store::open(&path, &open).unwrap();
        store.create_volume("v", 1 << 40).unwrap();
        let volume = store.volume("v").unwrap();
        let geometry = store.inner.meta().geometry;
        let step = u64::from(geometry.items_per_block(crate::format::RegionKind::Extents));
        let mut request = Request::new();
        let mut write = |offset| match volume.start_write(offset, 4096, &mut request).unwrap() {
            Start::Io => drop(request.finish_write(Ok(())).unwrap()),
            Start::Blocked => volume.write_at(offset, &[1; 4096], false).unwrap(),
            Start::Done => unreachable!("there is something to write"),
        };
        (0..DIRTY_BLOCKS * step).for_each(|extent| write(extent << 20));
        while store.settle().unwrap() {}
        (0..DIRTY_BLOCKS).for_each(|block| write(((block * step) << 20) + 8192));
        let mut all = Vec::new();
        while !store.inner.meta().log.is_idle() {
            all.push(holds(&store.inner));
        }
        for step in 0..4 {
            let mut times: Vec<_> = all.iter().map(|times| times[step]).collect();
            times.sort_unstable();
            let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
            println!(
                "step {step} of {} commits: median {median:?}, longest {longest:?}",
                all.len()
            );
        }
    }

    /// [`Inner::commit_once`], with the time of each step that holds the lock.
    fn holds(inner: &Inner) -> [Duration; 4] {
        let mut times = [Duration::ZERO; 4];
        let room = Room::new(inner.meta().blocks_to_capture(WriteBack::All));
        let start = Instant::now();
        let group = inner.meta().begin_commit(WriteBack::All, room).unwrap();
        times[0] = start.elapsed();
        let sealed = group.as_ref().map(|group| (group.address, group.seal()));
        inner.flush_storage().unwrap();
        let start = Instant::now();
        let second = inner.meta().flushed();
        times[1] = start.elapsed();
        inner.write_metadata(&second, sealed.as_ref().map(|(at, b)| (*at, &b[..]))).unwrap();
        inner.meta().copies_written(&second);
        let Some(group) = group else { return times };
        inner.flush_storage().unwrap();
        let start = Instant::now();
        let first = inner.meta().group_durable(group);
        times[2] = start.elapsed();
        inner.write_metadata(&first, None).unwrap();
        let start = Instant::now();
        inner.meta().copies_written(&first);
        times[3] = start.elapsed();
        times
    }
}
