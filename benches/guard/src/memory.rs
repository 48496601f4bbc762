//! A device in memory, a tail, and an environment that repeats itself: a store without a kernel.

use crate::Outcome;
use dbs_core::format::{Geometry, RegionKind};
use dbs_core::io::{DirectIo, ReadRequest, Storage, TailMemory, WriteRequest};
use dbs_core::limits::TAIL_BYTES;
use dbs_core::store::Env;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{InitOptions, Result, Store};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A device in memory that counts what it is asked for.
pub struct Memory {
    /// An unnamed file in memory; what was not written takes none.
    file: File,
    size: u64,
    /// Bytes from here to there are not kept.
    dropped: Range<u64>,
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
}

/// Requests a device has got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requests {
    /// Ranges read.
    pub reads: u64,
    /// Ranges written.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
}

impl std::ops::Sub for Requests {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            reads: self.reads - other.reads,
            writes: self.writes - other.writes,
            flushes: self.flushes - other.flushes,
        }
    }
}

impl Memory {
    /// An empty device.
    ///
    /// # Errors
    /// The system has no such files.
    pub fn new(size: u64) -> io::Result<Self> {
        let file = File::from(memfd_create(c"device", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(size)?;
        Ok(Self { file, size, dropped: 0..0, reads: 0.into(), writes: 0.into(), flushes: 0.into() })
    }

    /// A device for a store made with these options that keeps metadata only: data written is
    /// dropped, and reads leave their buffers as they are. It may be far larger than memory.
    ///
    /// # Errors
    /// Impossible options.
    pub fn without_data(size: u64, options: &InitOptions) -> Outcome<Self> {
        let data = Geometry::plan(size, options)?.region(RegionKind::Data).offset;
        // The last block is a copy of the superblock.
        Ok(Self { dropped: data..size - BLOCK_BYTES, ..Self::new(size)? })
    }

    /// Formats a device in memory as a store.
    ///
    /// # Errors
    /// Those of [`Store::init_on`].
    pub fn format(self, options: &InitOptions) -> Result<Arc<Self>> {
        Store::init_on(&self, options, &Repeating::default())?;
        Ok(Arc::new(self))
    }

    /// Opens the store on it for writing, with a tail if `tail`.
    ///
    /// # Errors
    /// Those of [`Store::open_on`].
    pub fn open(self: &Arc<Self>, tail: bool) -> Result<Store> {
        let storage: Arc<dyn Storage> = Arc::clone(self) as _;
        let memory = tail.then(|| Box::new(MemoryTail(vec![0; TAIL_BYTES])) as _);
        Store::open_on(storage, memory, Arc::new(Repeating::default()), false)
    }

    /// A device of its own with the same content.
    ///
    /// # Errors
    /// As [`Memory::new`].
    pub fn fork(&self) -> io::Result<Self> {
        let fork = Self { dropped: self.dropped.clone(), ..Self::new(self.size)? };
        for kept in [0..self.dropped.start, self.dropped.end..self.size] {
            let mut bytes = vec![0; (kept.end - kept.start) as usize];
            self.file.read_exact_at(&mut bytes, kept.start)?;
            fork.file.write_all_at(&bytes, kept.start)?;
        }
        Ok(fork)
    }

    /// Reads a range, as [`Storage::read_at`] does.
    ///
    /// # Errors
    /// The range is outside.
    #[inline(never)]
    pub fn device_read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if self.dropped.contains(&offset) { Ok(()) } else { self.file.read_exact_at(buf, offset) }
    }

    /// Writes a range, as [`Storage::write_at`] does.
    ///
    /// # Errors
    /// The range is outside.
    #[inline(never)]
    pub fn device_write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "behind the end"));
        }
        if self.dropped.contains(&offset) { Ok(()) } else { self.file.write_all_at(buf, offset) }
    }

    /// What it has been asked for so far.
    #[must_use]
    pub fn requests(&self) -> Requests {
        Requests {
            reads: self.reads.load(Ordering::Relaxed),
            writes: self.writes.load(Ordering::Relaxed),
            flushes: self.flushes.load(Ordering::Relaxed),
        }
    }
}

impl Storage for Memory {
    fn size_bytes(&self) -> u64 {
        self.size
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        requests.iter_mut().try_for_each(|part| self.device_read(part.offset, part.buf))
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        requests.iter().try_for_each(|part| self.device_write(part.offset, part.buf))
    }

    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn discard(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_size(&self, _size_bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn direct_io(&self) -> io::Result<Option<DirectIo>> {
        let file = self.file.try_clone()?.into();
        Ok(Some(DirectIo { file, offset_alignment: 512, memory_alignment: 512 }))
    }

    fn resizable(&self) -> bool {
        false
    }

    fn driver(&self) -> &'static str {
        "memory"
    }
}

/// A tail that is gone with its store.
struct MemoryTail(Vec<u8>);

impl TailMemory for MemoryTail {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn remove(&mut self) {}
}

/// Time and identities that are the same in every run.
#[derive(Default)]
struct Repeating(AtomicU64);

impl Env for Repeating {
    fn now_ns(&self) -> u64 {
        1_700_000_000_000_000_000 + self.0.fetch_add(1, Ordering::Relaxed) * 1_000_000
    }

    fn random(&self) -> [u8; 16] {
        let seed = self.0.fetch_add(1, Ordering::Relaxed);
        fastrand::Rng::with_seed(seed).u128(..).to_le_bytes()
    }

    fn boot_id(&self) -> [u8; 16] {
        [7; 16]
    }
}
