//! What may stand between a reactor and the kernel: for tests of what becomes of faults.

use std::fmt::Debug;
use std::time::Duration;

/// A part of a transfer, or a sync, that is about to be handed to the kernel.
#[derive(Debug, Clone, Copy)]
pub enum Part<'a> {
    /// So many bytes are read.
    Read(usize),
    /// These bytes are written.
    Write(&'a [u8]),
    /// What was written is made durable.
    Sync,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fate {
    /// How long it waits first.
    pub delay: Duration,
    /// The error number it fails with, without having reached the kernel.
    pub errno: Option<i32>,
    /// Bytes that are handed over at most, not 0; the reactor goes on behind them.
    pub len: usize,
    /// Its number, for [`Interpose::end`].
    pub ticket: u64,
}

/// Decides about reads, writes and syncs of files ([`crate::Io::read`], [`crate::Io::write`],
/// [`crate::Io::sync`]).
pub trait Interpose: Send + Sync + Debug {
    /// A part of a transfer is about to be handed to the kernel, or the rest of one is, or a sync.
    fn begin(&self, offset: u64, part: Part<'_>) -> Fate;

    /// What had this ticket has ended; `done` says that the kernel moved some of it, or made it durable.
    fn end(&self, ticket: u64, done: bool);
}
