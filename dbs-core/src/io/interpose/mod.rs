//! What stands between a driver and the kernel, in tests and nowhere else: faults on purpose
//! ([`Rules`]), and a record of everything that changes the storage ([`Recorder`]).
//!
//! A driver asks [`Interposer::begin`] before it hands something to the kernel and says
//! [`Interposer::end`] when that has ended. Without an interposer it asks nobody, which costs a
//! comparison.

mod recorder;
mod rules;

pub use recorder::Recorder;
pub use rules::Rules;

use crate::error::Result;
use crate::format::Geometry;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Transfers are cut short at a multiple of this, so that direct I/O can go on behind it.
const GRANULE_BYTES: usize = 4096;

/// What is about to be handed to the kernel.
#[derive(Debug, Clone, Copy)]
pub enum Access<'a> {
    /// A read of so many bytes.
    Read(usize),
    /// A write of these bytes.
    Write(&'a [u8]),
    /// Everything completed is to be made durable.
    Flush,
    /// So many bytes are given back.
    Discard(u64),
    /// Space for so many bytes is reserved.
    Allocate(u64),
    /// The storage gets this size.
    SetSize(u64),
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fate {
    /// How long it takes to get there.
    pub delay: Duration,
    /// The error number it fails with, without having reached the kernel.
    pub errno: Option<i32>,
    /// Bytes of a transfer that are handed over at most, not 0.
    pub len: usize,
    /// Its number, for [`Interposer::end`].
    pub ticket: u64,
}

/// Faults, and the record.
#[derive(Debug, Default)]
pub struct Interposer {
    rules: Option<Rules>,
    recorder: Option<Recorder>,
    tickets: AtomicU64,
}

impl Interposer {
    /// Injects what `rules` say (see [`Rules::parse`]), and records into the file `record`.
    ///
    /// # Errors
    /// `Invalid` for what are no rules, `Io` if the record cannot be made.
    pub fn new(rules: Option<&str>, record: Option<&Path>) -> Result<Self> {
        Ok(Self {
            rules: rules.map(Rules::parse).transpose()?,
            recorder: record.map(Recorder::create).transpose()?,
            tickets: AtomicU64::new(0),
        })
    }

    /// Faults injected so far.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.rules.as_ref().map_or(0, Rules::injected)
    }

    /// Where the regions are, for rules that name one.
    pub(crate) fn set_geometry(&self, geometry: &Geometry) {
        if let Some(rules) = &self.rules {
            rules.set_geometry(geometry);
        }
    }

    /// Decides about something that is about to be handed to the kernel.
    pub fn begin(&self, offset: u64, access: Access<'_>) -> Fate {
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed) + 1;
        let mut fate = Fate { delay: Duration::ZERO, errno: None, len: usize::MAX, ticket };
        if let Some(rules) = &self.rules {
            rules.decide(offset, access, &mut fate);
        }
        if let Some(recorder) = &self.recorder
            && fate.errno.is_none()
        {
            let access = match access {
                Access::Write(bytes) => Access::Write(&bytes[..bytes.len().min(fate.len)]),
                other => other,
            };
            recorder.begin(ticket, offset, access);
        }
        fate
    }

    /// What had this ticket has ended; `done` says that it succeeded.
    pub fn end(&self, ticket: u64, done: bool) {
        if let Some(recorder) = &self.recorder {
            recorder.end(ticket, done);
        }
    }

    /// As [`Interposer::begin`], for a thread that may wait: the bytes that may be handed over,
    /// and the ticket.
    ///
    /// # Errors
    /// The one that is injected.
    pub(super) fn admit(&self, offset: u64, access: Access<'_>) -> io::Result<(usize, u64)> {
        let fate = self.begin(offset, access);
        if !fate.delay.is_zero() {
            std::thread::sleep(fate.delay);
        }
        match fate.errno {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok((fate.len, fate.ticket)),
        }
    }

    /// Makes a call that transfers nothing, if `interposer` lets it.
    pub(super) fn around(
        interposer: Option<&Self>,
        offset: u64,
        access: Access<'_>,
        call: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(interposer) = interposer else { return call() };
        let (_, ticket) = interposer.admit(offset, access)?;
        let result = call();
        interposer.end(ticket, result.is_ok());
        result
    }
}

/// Half of a transfer, if it can be cut.
fn shortened(len: usize) -> Option<usize> {
    (len > GRANULE_BYTES).then(|| (len / 2 / GRANULE_BYTES * GRANULE_BYTES).max(GRANULE_BYTES))
}
