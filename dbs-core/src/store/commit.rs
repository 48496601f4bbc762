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
use crate::meta::commit::{Copies, WriteBack};
use crate::sabotage::{self, Bug};
use std::sync::PoisonError;

/// Who asked for a commit, and up to which request they are done.
#[derive(Debug, Default)]
pub(crate) struct Commits {
    requested: u64,
    completed: u64,
    running: bool,
}

impl Commits {
    /// Becomes the one who commits, for all requests made so far; `None` if somebody does.
    pub(super) fn begin(&mut self) -> Option<u64> {
        if self.running {
            return None;
        }
        self.running = true;
        Some(self.requested)
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
        if self.inner.read_only || self.inner.meta().log.is_idle() {
            return Ok(false);
        }
        self.inner.commit_as(WriteBack::All)?;
        Ok(!self.inner.meta().log.is_idle())
    }
}

impl Inner {
    /// Makes everything acknowledged so far durable. Calls made while one runs share the next.
    pub(crate) fn commit(&self) -> Result<()> {
        self.commit_as(WriteBack::Needed)
    }

    fn commit_as(&self, amount: WriteBack) -> Result<()> {
        self.check_writable()?;
        let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        commits.requested += 1;
        let ticket = commits.requested;
        let covers = loop {
            if commits.completed >= ticket {
                drop(commits);
                return self.check_writable();
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
        let result = self.commit_until_roomy(amount);
        if let Err(error) = &result {
            self.poison(&error.to_string());
        }
        let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        commits.running = false;
        commits.completed = covers;
        drop(commits);
        self.commit_done.notify_all();
        self.wake();
        result
    }

    /// One commit, and more until half of the journal is free again.
    fn commit_until_roomy(&self, amount: WriteBack) -> Result<()> {
        self.commit_once(amount)?;
        while self.meta().journal_short() {
            self.commit_once(WriteBack::Needed)?;
        }
        Ok(())
    }

    /// One commit; the caller makes sure that there is only one at a time.
    pub(super) fn commit_once(&self, amount: WriteBack) -> Result<()> {
        let group = self.meta().begin_commit(amount);
        let skip = match group {
            Some(_) => sabotage::is(Bug::SkipDataFlush),
            None => sabotage::is(Bug::SkipEmptyFlush),
        };
        if !skip {
            self.flush_storage()?;
        }
        let second = self.meta().flushed();
        let group_write = group.as_ref().map(|group| (group.address, group.bytes.as_slice()));
        self.write_metadata(&second, group_write)?;
        self.meta().copies_written(&second);
        let Some(group) = group else { return Ok(()) };
        if !sabotage::is(Bug::SkipGroupFlush) {
            self.flush_storage()?;
        }
        let first = self.meta().group_durable(&group);
        self.write_metadata(&first, None)?;
        self.meta().copies_written(&first);
        Ok(())
    }

    pub(super) fn flush_storage(&self) -> Result<()> {
        self.storage.flush().map_err(|error| Error::io(error, "flush failed"))
    }

    pub(super) fn write_metadata(
        &self,
        copies: &Copies,
        group: Option<(u64, &[u8])>,
    ) -> Result<()> {
        let copies = copies.writes.iter().map(|(at, bytes)| (*at, bytes.as_slice()));
        let writes: Vec<_> =
            copies.chain(group).map(|(offset, buf)| WriteRequest { offset, buf }).collect();
        if writes.is_empty() {
            return Ok(());
        }
        self.storage
            .write_many(&writes)
            .map_err(|error| Error::io(error, "writing metadata failed"))
    }
}
