//! A device in memory, a tail, and an environment that repeats itself: a store without a kernel.

use dbs_core::format::{Geometry, RegionKind};
use dbs_core::io::{ReadRequest, Storage, TailMemory, WriteRequest};
use dbs_core::limits::TAIL_BYTES;
use dbs_core::store::Env;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{InitOptions, Result, Store};
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A device in memory that counts what it is asked for.
pub struct Memory {
    size: u64,
    bytes: Mutex<Bytes>,
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
}

/// What is kept: everything, or all but the data region.
#[derive(Clone)]
struct Bytes {
    first: Vec<u8>,
    /// The last block: a copy of the superblock.
    last: Vec<u8>,
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
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self::keeping(size, size - BLOCK_BYTES)
    }

    /// A device for a store made with these options that keeps metadata only: data written is
    /// dropped, and reads leave their buffers as they are. It may be far larger than memory.
    ///
    /// # Errors
    /// Impossible options.
    pub fn without_data(size: u64, options: &InitOptions) -> Result<Self> {
        let geometry = Geometry::plan(size, options)?;
        Ok(Self::keeping(size, geometry.region(RegionKind::Data).offset))
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
    #[must_use]
    pub fn fork(&self) -> Self {
        Self::of(self.size, self.bytes.lock().unwrap_or_else(PoisonError::into_inner).clone())
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

    fn keeping(size: u64, first: u64) -> Self {
        let last = vec![0; BLOCK_BYTES as usize];
        Self::of(size, Bytes { first: vec![0; first as usize], last })
    }

    fn of(size: u64, bytes: Bytes) -> Self {
        Self { size, bytes: bytes.into(), reads: 0.into(), writes: 0.into(), flushes: 0.into() }
    }

    fn with<T>(
        &self,
        offset: u64,
        length: usize,
        run: impl FnOnce(Place<'_>) -> T,
    ) -> io::Result<T> {
        let outside = || io::Error::new(io::ErrorKind::UnexpectedEof, "behind the end");
        let end = offset.checked_add(length as u64).filter(|end| *end <= self.size);
        let end = end.ok_or_else(outside)?;
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let last = self.size - BLOCK_BYTES;
        if end <= bytes.first.len() as u64 {
            return Ok(run(Place::Kept(&mut bytes.first[offset as usize..end as usize])));
        }
        if offset >= last {
            let range = (offset - last) as usize..(end - last) as usize;
            return Ok(run(Place::Kept(&mut bytes.last[range])));
        }
        Ok(run(Place::Dropped))
    }
}

enum Place<'a> {
    Kept(&'a mut [u8]),
    Dropped,
}

impl Storage for Memory {
    fn size_bytes(&self) -> u64 {
        self.size
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        device_read(self, requests)
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        device_write(self, requests)
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

    fn resizable(&self) -> bool {
        false
    }

    fn driver(&self) -> &'static str {
        "memory"
    }
}

/// The device's own work, under a name by which the counting of instructions is switched off.
#[inline(never)]
fn device_read(device: &Memory, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
    for ReadRequest { offset, buf } in requests {
        device.reads.fetch_add(1, Ordering::Relaxed);
        device.with(*offset, buf.len(), |place| {
            if let Place::Kept(bytes) = place {
                buf.copy_from_slice(bytes);
            }
        })?;
    }
    Ok(())
}

/// As [`device_read`].
#[inline(never)]
fn device_write(device: &Memory, requests: &[WriteRequest<'_>]) -> io::Result<()> {
    for WriteRequest { offset, buf } in requests {
        device.writes.fetch_add(1, Ordering::Relaxed);
        device.with(*offset, buf.len(), |place| {
            if let Place::Kept(bytes) = place {
                bytes.copy_from_slice(buf);
            }
        })?;
    }
    Ok(())
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
