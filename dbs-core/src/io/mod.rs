//! Storage below the engine: one narrow trait, and its drivers.

pub mod buffer;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod env;
pub mod file;
pub mod freeze;
pub(crate) mod in_use;
pub(crate) mod lock;
pub mod open;
mod piece;
pub mod probe;
pub mod queue;
pub mod reading;
mod sys;
pub mod tail;
pub mod uring;

pub use sys::is_open_for_writing;

use std::io;
use std::os::fd::OwnedFd;

/// One read of a batch.
#[derive(Debug)]
pub struct ReadRequest<'a> {
    /// Byte offset on the device.
    pub offset: u64,
    /// Filled completely on success.
    pub buf: &'a mut [u8],
}

/// One write of a batch.
#[derive(Debug)]
pub struct WriteRequest<'a> {
    /// Byte offset on the device.
    pub offset: u64,
    /// The bytes to write.
    pub buf: &'a [u8],
}

/// The descriptor below a [`Storage`], for I/O beside it.
#[derive(Debug)]
pub struct DirectIo {
    /// A duplicate of the descriptor the storage uses, with its lock: the file stays taken until
    /// this is closed, too.
    pub file: OwnedFd,
    /// Offsets and lengths in bytes must be multiples of this power of two, at most 4096.
    pub offset_alignment: usize,
    /// Addresses of memory must be multiples of this power of two, at most 4096.
    pub memory_alignment: usize,
}

/// A block device or file. Offsets and lengths are multiples of 512 bytes; buffers may have any
/// alignment in memory (a driver that needs more bounces them).
///
/// What the engine assumes of an implementation is the list "Media assumptions" in
/// `docs/format.md`; `io::conformance` tests it.
pub trait Storage: Send + Sync {
    /// Current size in bytes.
    fn size_bytes(&self) -> u64;

    /// Reads all requests, in any order and at once; returns when all are complete. Reading past
    /// the end is an error, a hole reads as zeros.
    ///
    /// # Errors
    /// The first failure; the buffers are then undefined.
    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()>;

    /// Writes all requests, in any order and at once; returns when all are complete (in the
    /// volatile cache of the device, not durable). Writing past the end is an error.
    ///
    /// # Errors
    /// The first failure; any part of any request may have been written.
    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()>;

    /// Makes every write completed before this call durable.
    ///
    /// # Errors
    /// After a failure nothing is known about any write since the last success.
    fn flush(&self) -> io::Result<()>;

    /// Gives the range back to the file system or device. Afterwards it reads as anything.
    /// Advisory: storage that cannot do it returns `Ok`.
    ///
    /// # Errors
    /// Only real failures.
    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()>;

    /// Reserves the range so that writing it cannot fail for lack of space (file: `fallocate`;
    /// device: nothing to do). Content is kept.
    ///
    /// # Errors
    /// `ENOSPC`, or a failure of the storage.
    fn allocate(&self, offset: u64, len_bytes: u64) -> io::Result<()>;

    /// Changes the size of a file; a device only succeeds if it already has this size.
    ///
    /// # Errors
    /// `Unsupported` for a device of another size, or a failure of the storage.
    fn set_size(&self, size_bytes: u64) -> io::Result<()>;

    /// Whether [`Storage::set_size`] can change the size: files yes, devices no.
    fn resizable(&self) -> bool {
        true
    }

    /// Whether another machine, or a process that does not see this one's locks, may write it too.
    fn may_be_shared(&self) -> bool {
        false
    }

    /// The descriptor below, if there is one.
    ///
    /// # Errors
    /// It cannot be duplicated.
    fn direct_io(&self) -> io::Result<Option<DirectIo>> {
        Ok(None)
    }

    /// Whether a block of 4 KiB that one request writes is known to be written whole or not at all, also when the power
    /// fails: false where that cannot be told.
    fn writes_whole_blocks(&self) -> bool {
        false
    }

    /// Driver name for the log and `dbs info`: `io_uring`, `pread`, `sim`.
    fn driver(&self) -> &'static str;

    /// Reads one range.
    ///
    /// # Errors
    /// As [`Storage::read_many`].
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_many(&mut [ReadRequest { offset, buf }])
    }

    /// Writes one range.
    ///
    /// # Errors
    /// As [`Storage::write_many`].
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_many(&[WriteRequest { offset, buf }])
    }
}

/// Memory that survives the end of this process but not the end of this boot: a shared mapping of
/// a file on tmpfs, or the simulator's.
pub trait TailMemory: Send + Sync {
    /// The whole mapping; its length is fixed and at least [`crate::limits::TAIL_BYTES`].
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Removes the file behind the mapping: the store was closed in good order.
    fn remove(&mut self);

    /// Whether the next process would find these bytes. If not, which is told once, they are zeros from
    /// here on, in a place where it will find them if there is one.
    fn is_kept(&mut self) -> bool {
        true
    }
}
