//! How many data blocks each snapshot's own layer holds: kept with every change of a bitmap, so that
//! asking costs nothing. And what was read and written of a volume.

use crate::info::VolumeIo;
use std::sync::atomic::{AtomicU64, Ordering};

/// What was read and written of a volume, counted by requests beside one another.
#[derive(Debug, Default)]
pub struct IoCounts {
    reads: AtomicU64,
    writes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl IoCounts {
    /// A read.
    #[inline]
    pub fn count_read(&self, bytes: u64) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A write.
    #[inline]
    pub fn count_write(&self, bytes: u64) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The counts.
    pub fn get(&self) -> VolumeIo {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        VolumeIo {
            reads: of(&self.reads),
            writes: of(&self.writes),
            read_bytes: of(&self.read_bytes),
            written_bytes: of(&self.written_bytes),
            ..VolumeIo::default()
        }
    }
}

/// Data blocks by owner, once started.
#[derive(Debug, Default)]
pub struct Counts {
    on: bool,
    blocks: Vec<u64>,
    changes: u64,
}

impl Counts {
    /// Counts from zero.
    pub fn started() -> Self {
        Self { on: true, ..Self::default() }
    }

    /// Whether it was started.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Whether both say the same of every owner.
    pub fn is_equal(&self, other: &Self) -> bool {
        let owners = self.blocks.len().max(other.blocks.len()) as u32;
        (0..owners).all(|owner| self.get(owner) == other.get(owner))
    }

    /// How often they have changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Blocks of an owner.
    pub fn get(&self, owner: u32) -> u64 {
        self.blocks.get(owner as usize).copied().unwrap_or(0)
    }

    /// An owner has blocks more.
    #[inline]
    pub fn add(&mut self, owner: u32, blocks: u32) {
        if blocks == 0 || !self.on {
            return;
        }
        self.changes += 1;
        match self.blocks.get_mut(owner as usize) {
            Some(count) => *count += u64::from(blocks),
            None => self.add_first(owner, blocks),
        }
    }

    #[cold]
    fn add_first(&mut self, owner: u32, blocks: u32) {
        self.blocks.resize(owner as usize + 1, 0);
        self.blocks[owner as usize] = u64::from(blocks);
    }

    /// An owner has blocks less.
    #[inline]
    pub fn remove(&mut self, owner: u32, blocks: u32) {
        if blocks > 0 && self.on {
            self.changes += 1;
            self.blocks[owner as usize] -= u64::from(blocks);
        }
    }
}
