//! What is on the disk and in its cache, and what a flush does to it.

use super::Medium;
use super::blocks::{self, BLOCK, Block, Blocks, SECTORS, garbage};
use super::fault::enospc;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// A part of a write, or of a discard, that falls into one block, not yet flushed.
#[derive(Clone)]
pub(super) struct Piece {
    /// Number of the write it is part of; later writes have higher ones.
    pub(super) write: u64,
    /// Sectors it covers, one bit each.
    pub(super) sectors: u8,
    /// The new bytes of those sectors.
    pub(super) bytes: Arc<Block>,
}

/// A block as the cache has it.
#[derive(Clone)]
pub(super) struct Cached {
    pub(super) newest: Arc<Block>,
    /// What a flush makes durable; empty after a failed flush lost it.
    pub(super) pieces: Vec<Piece>,
}

/// What is on the disk and in its cache: all that a crash needs.
#[derive(Clone)]
pub(super) struct Contents {
    pub(super) durable: Blocks,
    pub(super) cache: BTreeMap<u64, Cached>,
    pub(super) size: u64,
    pub(super) durable_size: u64,
    pub(super) medium: Medium,
    pub(super) next_write: u64,
}

impl Contents {
    pub(super) fn newest(&self, index: u64) -> &Block {
        match self.cache.get(&index) {
            Some(cached) => &cached.newest,
            None => self.durable.read(index),
        }
    }

    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) {
        for part in parts(offset, buf.len()) {
            buf[part.buf].copy_from_slice(&self.newest(part.index)[part.block]);
        }
    }

    pub(super) fn write(&mut self, offset: u64, buf: &[u8]) {
        let write = self.next_write;
        self.next_write += 1;
        for part in parts(offset, buf.len()) {
            let first = part.block.start / 512;
            let count = part.block.len() / 512;
            let sectors = (((1u16 << count) - 1) << first) as u8;
            let mut bytes = if count == SECTORS { [0; BLOCK] } else { *self.newest(part.index) };
            bytes[part.block].copy_from_slice(&buf[part.buf]);
            self.cache_piece(part.index, Piece { write, sectors, bytes: Arc::new(bytes) });
        }
    }

    /// Adds a piece whose bytes outside its sectors are those of the newest content.
    pub(super) fn cache_piece(&mut self, index: u64, piece: Piece) {
        let newest = Arc::clone(&piece.bytes);
        let cached = self
            .cache
            .entry(index)
            .or_insert_with(|| Cached { newest: Arc::clone(&newest), pieces: Vec::new() });
        cached.newest = newest;
        cached.pieces.push(piece);
    }

    pub(super) fn discard(&mut self, offset: u64, len: u64, rng: &mut fastrand::Rng) {
        let write = self.next_write;
        self.next_write += 1;
        let first = offset.div_ceil(BLOCK as u64);
        let end = (offset + len) / BLOCK as u64;
        for index in first..end {
            let bytes = match rng.u8(0..3) {
                0 => continue,
                1 => blocks::zero(),
                _ => garbage(rng),
            };
            self.cache_piece(index, Piece { write, sectors: u8::MAX, bytes });
        }
    }

    /// Makes durable all writes before this number.
    pub(super) fn flush(&mut self, until: u64) {
        for (index, mut cached) in std::mem::take(&mut self.cache) {
            let covered = cached.pieces.iter().take_while(|piece| piece.write < until).count();
            if covered > 0 && covered == cached.pieces.len() {
                self.durable.set(index, cached.newest);
                continue;
            }
            if let Some(last) = cached.pieces.drain(..covered).next_back() {
                // Its bytes are those of the whole block, as it was then.
                self.durable.set(index, last.bytes);
            }
            self.cache.insert(index, cached);
        }
        self.durable_size = self.size;
    }

    /// A flush that failed: some blocks are durable, the others stay readable but are forgotten,
    /// so that no later flush writes them. That is what kernels do.
    pub(super) fn fail_flush(&mut self, rng: &mut fastrand::Rng) {
        for (index, cached) in &mut self.cache {
            if rng.bool() && !cached.pieces.is_empty() {
                self.durable.set(*index, Arc::clone(&cached.newest));
            }
            cached.pieces.clear();
        }
    }

    /// What a flush lost reads as what is stored: nothing keeps it in memory any more.
    pub(super) fn forget_lost(&mut self) {
        self.cache.retain(|_, cached| !cached.pieces.is_empty());
    }

    pub(super) fn is_hole(&self, index: u64) -> bool {
        !self.cache.contains_key(&index) && self.durable.is_hole(index)
    }

    pub(super) fn any_hole(&self, offset: u64, len: usize) -> bool {
        parts(offset, len).any(|part| self.is_hole(part.index))
    }

    pub(super) fn fill_holes(&mut self, offset: u64, len: usize) -> io::Result<()> {
        if self.medium.room.is_some() {
            for part in parts(offset, len) {
                if self.is_hole(part.index) {
                    self.take_room()?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn take_room(&mut self) -> io::Result<()> {
        match &mut self.medium.room {
            Some(0) => Err(enospc()),
            Some(room) => {
                *room -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    pub(super) fn set_size(&mut self, size: u64) {
        let end = size.div_ceil(BLOCK as u64);
        if size < self.size {
            self.cache.retain(|index, _| *index < end);
        }
        // Blocks beyond a smaller size are cut at the next flush or crash at the latest; nothing
        // reads there meanwhile, and growing again gives zeros.
        self.durable.resize(end, size < self.size);
        self.size = size;
    }
}

/// Where a range falls into one block.
struct Part {
    index: u64,
    block: std::ops::Range<usize>,
    buf: std::ops::Range<usize>,
}

fn parts(offset: u64, len: usize) -> impl Iterator<Item = Part> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = offset + done as u64;
        let start = (at % BLOCK as u64) as usize;
        let take = (BLOCK - start).min(len - done);
        let part =
            Part { index: at / BLOCK as u64, block: start..start + take, buf: done..done + take };
        done += take;
        Some(part)
    })
}
