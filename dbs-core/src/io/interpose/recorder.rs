//! A record of everything that changes the storage, from which a test makes what a power loss may
//! leave of it.
//!
//! The file is a sequence of entries: a header of 32 bytes (kind, ticket, offset, length; each a
//! little-endian `u64`) and, for a write, its bytes. Something has an entry when it is about to be
//! handed to the kernel and another one, [`END`] or [`FAILED`] with the same ticket, when it has
//! ended. So a flush that has ended made durable what had ended when it began.

use super::Access;
use crate::error::{Error, Result};
use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Kinds of entries.
const WRITE: u64 = 1;
const FLUSH: u64 = 2;
const DISCARD: u64 = 3;
const SET_SIZE: u64 = 4;
const END: u64 = 5;
const FAILED: u64 = 6;

/// Writes the record.
#[derive(Debug)]
pub struct Recorder {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: File,
    /// Tickets of what has begun and not ended.
    open: HashSet<u64>,
    /// Nothing can be written any more; a record that ends early is still a record.
    broken: bool,
}

impl Recorder {
    /// Records into a new file, for the owner of the process only: it has all that is written.
    ///
    /// # Errors
    /// `Io` if there can be no such file, or there is one.
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::options().write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|error| {
            Error::io(error, format!("cannot record writes in `{}`", path.display()))
        })?;
        let state = State { file, open: HashSet::new(), broken: false };
        Ok(Self { state: Mutex::new(state) })
    }

    /// Takes note of what is about to be handed to the kernel.
    pub(super) fn begin(&self, ticket: u64, offset: u64, access: Access<'_>) {
        let (kind, len, bytes): (_, _, &[u8]) = match access {
            Access::Write(bytes) => (WRITE, bytes.len() as u64, bytes),
            Access::Flush => (FLUSH, 0, &[]),
            Access::Discard(len) => (DISCARD, len, &[]),
            Access::SetSize(size) => (SET_SIZE, size, &[]),
            Access::Read(_) | Access::Allocate(_) => return,
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.open.insert(ticket);
        state.put(kind, ticket, offset, len, bytes);
    }

    /// Takes note of its end.
    pub(super) fn end(&self, ticket: u64, done: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.open.remove(&ticket) {
            state.put(if done { END } else { FAILED }, ticket, 0, 0, &[]);
        }
    }
}

impl State {
    fn put(&mut self, kind: u64, ticket: u64, offset: u64, len: u64, bytes: &[u8]) {
        if self.broken {
            return;
        }
        // One call each: a process that is killed leaves whole entries.
        let mut entry = Vec::with_capacity(32 + bytes.len());
        for word in [kind, ticket, offset, len] {
            entry.extend_from_slice(&word.to_le_bytes());
        }
        entry.extend_from_slice(bytes);
        self.broken = self.file.write_all(&entry).is_err();
    }
}
