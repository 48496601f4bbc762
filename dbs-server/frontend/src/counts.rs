//! What a client has asked for.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a client has asked for since it connected, counted by one thread at a time.
#[derive(Debug, Default)]
pub struct Counts {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    others: AtomicU64,
}

/// The same at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Reads.
    pub reads: u64,
    /// Bytes of these.
    pub read_bytes: u64,
    /// Writes, and ranges made zero.
    pub writes: u64,
    /// Bytes of these.
    pub written_bytes: u64,
    /// Other requests.
    pub others: u64,
}

impl Counts {
    /// A read of so many bytes.
    #[inline]
    pub fn read(&self, bytes: u64) {
        add(&self.reads, 1);
        add(&self.read_bytes, bytes);
    }

    /// A write of so many bytes, or a range made zero.
    #[inline]
    pub fn write(&self, bytes: u64) {
        add(&self.writes, 1);
        add(&self.written_bytes, bytes);
    }

    /// Another request.
    #[inline]
    pub fn other(&self) {
        add(&self.others, 1);
    }

    /// What was counted so far.
    #[must_use]
    pub fn get(&self) -> Counted {
        Counted {
            reads: self.reads.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            writes: self.writes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            others: self.others.load(Relaxed),
        }
    }
}

impl std::ops::AddAssign for Counted {
    fn add_assign(&mut self, more: Self) {
        self.reads += more.reads;
        self.read_bytes += more.read_bytes;
        self.writes += more.writes;
        self.written_bytes += more.written_bytes;
        self.others += more.others;
    }
}

/// Only one thread adds.
#[inline]
fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Relaxed).wrapping_add(more), Relaxed);
}
