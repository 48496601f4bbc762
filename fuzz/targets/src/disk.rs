//! Storage in memory that never fails: a shared image, and the blocks that differ from it.

use dbs_core::io::{ReadRequest, Storage, WriteRequest};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) const BLOCK: usize = 4096;

/// The largest it may get: no input asks for more.
const SIZE_MAX: u64 = 256 << 20;

/// The storage; a fork of an image costs nothing.
pub(crate) struct Disk {
    base: Arc<Vec<u8>>,
    changes: Mutex<Changes>,
}

struct Changes {
    /// By index; shorter than the disk.
    blocks: Vec<Option<Box<[u8; BLOCK]>>>,
    size: u64,
}

impl Disk {
    pub fn new(base: Arc<Vec<u8>>) -> Self {
        let size = base.len() as u64;
        Self { base, changes: Mutex::new(Changes { blocks: Vec::new(), size }) }
    }

    pub fn empty(size: usize) -> Self {
        Self::new(Arc::new(vec![0; size]))
    }

    /// A copy as it is now.
    pub fn fork(&self) -> Self {
        let changes = self.changes();
        let copy = Changes { blocks: changes.blocks.clone(), size: changes.size };
        Self { base: Arc::clone(&self.base), changes: Mutex::new(copy) }
    }

    /// Whether both hold the same bytes.
    pub fn is_same(&self, other: &Self) -> bool {
        if self.size_bytes() != other.size_bytes() || !Arc::ptr_eq(&self.base, &other.base) {
            return self.bytes() == other.bytes();
        }
        let count = self.changes().blocks.len().max(other.changes().blocks.len());
        let changed = |disk: &Self, index: usize| {
            disk.changes().blocks.get(index).is_some_and(|block| block.is_some())
        };
        let (mut mine, mut others) = ([0; BLOCK], [0; BLOCK]);
        (0..count).filter(|index| changed(self, *index) || changed(other, *index)).all(|index| {
            let at = (index * BLOCK) as u64;
            // The last block may be cut off.
            let length = (self.size_bytes() - at).min(BLOCK as u64) as usize;
            self.read_at(at, &mut mine[..length]).unwrap();
            other.read_at(at, &mut others[..length]).unwrap();
            mine[..length] == others[..length]
        })
    }

    /// All of it.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.size_bytes() as usize];
        self.read_at(0, &mut bytes).unwrap();
        bytes
    }

    /// Puts bytes anywhere; what lies behind the end is left out.
    pub fn put(&self, offset: u64, bytes: &[u8]) {
        let mut changes = self.changes();
        let room = changes.size.saturating_sub(offset).min(bytes.len() as u64);
        self.copy_in(&mut changes, offset, &bytes[..room as usize]);
    }

    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copy_in(&self, changes: &mut Changes, offset: u64, mut bytes: &[u8]) {
        let mut at = offset;
        while !bytes.is_empty() {
            let skip = (at % BLOCK as u64) as usize;
            let (part, rest) = bytes.split_at(bytes.len().min(BLOCK - skip));
            let block = self.block(changes, at / BLOCK as u64, part.len() == BLOCK);
            block[skip..skip + part.len()].copy_from_slice(part);
            at += part.len() as u64;
            bytes = rest;
        }
    }

    /// A block to change; what it held matters unless all of it is `replaced`.
    fn block<'a>(
        &self,
        changes: &'a mut Changes,
        index: u64,
        replaced: bool,
    ) -> &'a mut [u8; BLOCK] {
        let at = index as usize;
        if changes.blocks.len() <= at {
            changes.blocks.resize_with(at + 1, || None);
        }
        changes.blocks[at].get_or_insert_with(|| {
            let mut block = Box::new([0; BLOCK]);
            if !replaced {
                self.copy_base(index * BLOCK as u64, &mut block[..]);
            }
            block
        })
    }

    fn copy_base(&self, offset: u64, into: &mut [u8]) {
        let known = usize::try_from(offset).ok().and_then(|at| self.base.get(at..));
        let known = known.unwrap_or_default();
        let (old, beyond) = into.split_at_mut(known.len().min(into.len()));
        old.copy_from_slice(&known[..old.len()]);
        beyond.fill(0);
    }
}

fn behind(changes: &Changes, offset: u64, length: usize) -> io::Result<()> {
    match offset.checked_add(length as u64) {
        Some(end) if end <= changes.size => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "behind the end of the storage")),
    }
}

impl Storage for Disk {
    fn size_bytes(&self) -> u64 {
        self.changes().size
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        let changes = self.changes();
        for request in requests {
            behind(&changes, request.offset, request.buf.len())?;
            let mut at = request.offset;
            let mut rest = &mut *request.buf;
            while !rest.is_empty() {
                let skip = (at % BLOCK as u64) as usize;
                let (part, later) = rest.split_at_mut(rest.len().min(BLOCK - skip));
                match changes.blocks.get((at / BLOCK as u64) as usize) {
                    Some(Some(block)) => part.copy_from_slice(&block[skip..skip + part.len()]),
                    _ => self.copy_base(at, part),
                }
                at += part.len() as u64;
                rest = later;
            }
        }
        Ok(())
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        let mut changes = self.changes();
        for request in requests {
            behind(&changes, request.offset, request.buf.len())?;
            self.copy_in(&mut changes, request.offset, request.buf);
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        assert!(size_bytes <= SIZE_MAX, "a small store fills the disk");
        let mut changes = self.changes();
        changes.size = size_bytes;
        changes.blocks.truncate(size_bytes.div_ceil(BLOCK as u64) as usize);
        Ok(())
    }

    fn driver(&self) -> &'static str {
        "memory"
    }
}
