//! What a reactor works on: sockets and files, and parts of transfers.

use super::slab::Slab;
use std::os::fd::OwnedFd;

/// A socket of a reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Socket(pub(crate) u32);

#[cfg(feature = "testing")]
impl Socket {
    /// The socket of no reactor, for code that is run without one.
    #[must_use]
    pub const fn nowhere() -> Self {
        Self(u32::MAX)
    }
}

/// A file or block device of a reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct File(pub(crate) u32);

/// An event that is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch(pub(crate) u32);

/// A part of a transfer between a buffer and a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Byte offset in the file.
    pub offset: u64,
    /// First byte in the buffer.
    pub start: usize,
    /// Length in bytes, not 0.
    pub len: usize,
}

/// Descriptors of a driver.
pub(crate) type Targets = Slab<OwnedFd>;
