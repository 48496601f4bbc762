//! What the server serves: an [`Export`] is one disk, [`Exports`] finds them by name.

use super::wire::{Errno, PAYLOAD_MAX_BYTES};
use dbs_core::volume::Finish;
use dbs_core::{DirectIo, Volume};
use std::fmt;
use std::sync::Arc;

/// The metadata context every export has.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Why a request failed: a value for the wire and a text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The value on the wire.
    pub errno: Errno,
    /// What clients of structured replies show.
    pub message: String,
}

/// Result with [`Failure`].
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure with its text.
    pub fn new(errno: Errno, message: impl Into<String>) -> Self {
        Self { errno, message: message.into() }
    }

    /// [`Errno::Invalid`] with its text.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Errno::Invalid, message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.message, self.errno)
    }
}

impl std::error::Error for Failure {}

/// Sizes in bytes that requests keep to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Requests not aligned to this fail.
    pub minimum: u32,
    /// Requests aligned to this are efficient.
    pub preferred: u32,
    /// Largest read, and largest payload of a write.
    pub maximum: u32,
}

impl Default for BlockSizes {
    fn default() -> Self {
        Self { minimum: 512, preferred: 4096, maximum: PAYLOAD_MAX_BYTES }
    }
}

/// How zeros are to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZeroOptions {
    /// Durable before it is answered: whoever calls the export sees to that.
    pub fua: bool,
    /// The range must be allocated afterwards.
    pub no_hole: bool,
    /// Fail with [`Errno::NotSupported`] rather than be as slow as writing.
    pub fast: bool,
}

/// A run of bytes with the same status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, not 0.
    pub length: u64,
    /// Meaning defined by the context.
    pub flags: u32,
}

/// A disk to serve. The server has checked ranges, alignment and permission before it calls; calls
/// come from many threads at once, and ask for no more than takes some milliseconds.
pub trait Export: Send + Sync {
    /// Name in the list of exports, whatever name it was opened by.
    fn name(&self) -> String;
    /// A text for people.
    fn description(&self) -> String;
    /// Size in bytes, a multiple of the minimum block size.
    fn size(&self) -> u64;
    /// Whether writes are refused.
    fn read_only(&self) -> bool;
    /// Size constraints; powers of two except the maximum.
    fn block_sizes(&self) -> BlockSizes {
        BlockSizes::default()
    }
    /// The volume that the export is, which then is read, written and flushed directly; all such
    /// volumes of a server are of the store that [`Exports::direct_io`] is about.
    fn volume(&self) -> Option<&Volume> {
        None
    }
    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// A failure of the storage; the same for all methods below.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Writes `buf` at `offset`. Of this and the two below callers flush behind what they are to make
    /// durable, or what says that it takes a commit.
    ///
    /// # Errors
    /// See [`Export::read`].
    fn write(&self, offset: u64, buf: &[u8]) -> Result<Finish>;
    /// Gives up the content of the range, as far as that is convenient.
    ///
    /// # Errors
    /// See [`Export::read`].
    fn trim(&self, offset: u64, length: u64) -> Result<Finish>;
    /// Whether the range can be zeroed in this way. Long ranges are then zeroed piece by piece.
    ///
    /// # Errors
    /// [`Errno::NotSupported`] if it was to be fast and would not be.
    fn check_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let _ = (offset, length, options);
        Ok(())
    }
    /// Makes the range read as zeros.
    ///
    /// # Errors
    /// See [`Export::read`].
    fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<Finish>;
    /// Makes every write that has returned, on any connection, durable.
    ///
    /// # Errors
    /// See [`Export::read`].
    fn flush(&self) -> Result<()>;
    /// Hint that the range will be read soon.
    ///
    /// # Errors
    /// See [`Export::read`].
    fn cache(&self, offset: u64, length: u64) -> Result<()> {
        let _ = (offset, length);
        Ok(())
    }
    /// Metadata contexts whose names start with `prefix`.
    fn contexts(&self, prefix: &str) -> Vec<String>;
    /// What [`Export::block_status`] calls a context that a client selects: what a name in it means may be
    /// something else later. None if there is no such context.
    fn select(&self, context: &str) -> Option<String> {
        self.contexts(context).into_iter().find(|name| name == context)
    }
    /// Status of the range in a context that was selected, from `offset` on without gaps: at least one extent, at
    /// most `limit`, together at most `length` bytes; fewer where all of them would take long.
    ///
    /// # Errors
    /// See [`Export::read`].
    fn block_status(
        &self,
        context: &str,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>>;
}

/// The client that an export is opened for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer {
    /// Its number in the server.
    pub id: u64,
    /// Where it comes from: `tcp:ADDRESS`, or `unix:` and the socket it used.
    pub address: String,
    /// Its process, where it is on this machine.
    pub process: Option<u32>,
    /// It came over the control socket.
    pub trusted: bool,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.trusted {
            // Commands and programs that reach the store through its server.
            true => f.write_str("local program")?,
            false => write!(f, "NBD client {}", self.address)?,
        }
        self.process.map_or(Ok(()), |process| write!(f, " (process {process})"))
    }
}

/// The exports of a server.
pub trait Exports: Send + Sync {
    /// Opens an export for a client; the empty name is the default one. Dropping it closes it.
    ///
    /// # Errors
    /// No such export, or it cannot be opened: the message says which.
    fn open(&self, name: &str, peer: &Peer) -> Result<Arc<dyn Export>>;
    /// The file or device that the volumes of [`Export::volume`] lie in, for a reactor to use.
    fn direct_io(&self) -> Option<DirectIo> {
        None
    }
    /// Names and descriptions of all exports that are there for a client.
    fn list(&self, peer: &Peer) -> Vec<(String, String)>;
}

/// Appends an extent, merging it with the one before if that has the same flags.
pub fn push_extent(extents: &mut Vec<Extent>, length: u64, flags: u32) {
    match extents.last_mut() {
        Some(last) if last.flags == flags => last.length += length,
        _ if length > 0 => extents.push(Extent { length, flags }),
        _ => {}
    }
}
