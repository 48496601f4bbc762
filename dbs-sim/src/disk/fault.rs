//! Faults on request, and the counts they are planned by.

use std::io;
use std::ops::Range;

/// Text by which [`is_stop`] knows the end of the simulated process.
const STOPPED: &str = "the simulated process ended here";

/// Operations by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Read requests.
    pub reads: u64,
    /// Everything that is not a read; each request of a batch counts.
    pub changes: u64,
    /// Write requests.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Allocations.
    pub allocates: u64,
    /// Size changes.
    pub resizes: u64,
    /// Allocations, and writes into holes: what a full file system refuses.
    pub space_requests: u64,
}

/// What goes wrong, all counted from 1 at [`super::SimDisk::arm`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// At this change the process ends; a part of a write may still be done.
    pub stop_at: Option<u64>,
    /// This change fails with `EIO`.
    pub eio_at: Option<u64>,
    /// This change is refused with `ENOSPC`, as by a thin device or a copy-on-write file system.
    pub refused_at: Option<u64>,
    /// This request for space, and every later one, fails with `ENOSPC`.
    pub enospc_from: Option<u64>,
    /// This write lands elsewhere.
    pub misdirect_at: Option<u64>,
    /// This write is acknowledged and forgotten.
    pub lose_at: Option<u64>,
    /// This flush is answered and not done; the next one makes all durable.
    pub forget_flush_at: Option<u64>,
    /// This read fails with `EIO`.
    pub read_eio_at: Option<u64>,
    /// Reads that touch this range of bytes fail with `EIO`.
    pub read_eio_in: Option<Range<u64>>,
    /// Before these changes the state is captured for crash images.
    pub captures_at: Vec<u64>,
}

/// Whether a change happens.
pub(super) enum Verdict {
    Go,
    Stop,
    Fail(io::Error),
}

impl Verdict {
    pub(super) fn into_result(self) -> io::Result<()> {
        match self {
            Self::Go => Ok(()),
            Self::Stop => Err(stop_error()),
            Self::Fail(error) => Err(error),
        }
    }
}

impl Faults {
    /// Whether the order of a batch matters to the plan.
    pub(super) fn planned(&self) -> bool {
        self.stop_at.is_some()
            || self.eio_at.is_some()
            || self.refused_at.is_some()
            || !self.captures_at.is_empty()
    }

    pub(super) fn check_change(&self, change: u64) -> Verdict {
        if self.stop_at == Some(change) {
            Verdict::Stop
        } else if self.eio_at == Some(change) {
            Verdict::Fail(eio())
        } else if self.refused_at == Some(change) {
            Verdict::Fail(enospc())
        } else {
            Verdict::Go
        }
    }

    pub(super) fn check_space(&self, request: u64) -> io::Result<()> {
        match self.enospc_from {
            Some(from) if request >= from => Err(enospc()),
            _ => Ok(()),
        }
    }

    pub(super) fn check_read(&self, read: u64, offset: u64, len: u64) -> io::Result<()> {
        let hit = self.read_eio_at == Some(read)
            || self
                .read_eio_in
                .as_ref()
                .is_some_and(|range| offset < range.end && range.start < offset + len);
        if hit { Err(eio()) } else { Ok(()) }
    }
}

/// Whether this error, or the one it came from, is the end of the simulated process.
#[must_use]
pub fn is_stop(error: &dyn std::error::Error) -> bool {
    error.to_string().contains(STOPPED)
}

pub(super) fn stop_error() -> io::Error {
    io::Error::other(STOPPED)
}

pub(super) fn enospc() -> io::Error {
    io::Error::from_raw_os_error(28)
}

fn eio() -> io::Error {
    io::Error::from_raw_os_error(5)
}
