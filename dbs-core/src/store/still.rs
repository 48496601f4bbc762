//! The metadata of an open store as it was on the device at one moment, for a reader who takes long.
//! Commits go on: what one is about to write over is read first, and kept until the reader has had it.

use super::Inner;
use crate::error::Result;
use crate::format::geometry::SUPERBLOCK_SECOND;
use crate::io::buffer::AlignedBuf;
use crate::io::reading::ReadBy;
use crate::io::{ReadRequest, Storage};
use crate::units::BLOCK_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Blocks kept at most. A commit that would keep more waits for the reader.
const KEPT_MAX: usize = if cfg!(test) { 8 } else { 32 << 10 };

/// What is kept of one moment.
#[derive(Debug, Default)]
pub(crate) struct Still {
    state: Mutex<State>,
    /// The reader has come further.
    read: Condvar,
}

/// A block, unless the device cannot read it.
type Kept = Option<AlignedBuf>;

#[derive(Debug, Default)]
struct State {
    /// Blocks that were written over since, by address.
    kept: BTreeMap<u64, Kept>,
    /// What the reader has had, start to end.
    done: BTreeMap<u64, u64>,
    over: bool,
}

impl State {
    fn is_done(&self, address: u64) -> bool {
        self.over || self.done.range(..=address).next_back().is_some_and(|(_, end)| *end > address)
    }

    /// The reader has had `start..end`, which it reads once and mostly in order.
    fn note_done(&mut self, start: u64, mut end: u64) {
        let before = self.done.range(..=start).next_back().map(|(start, end)| (*start, *end));
        let start = before.filter(|before| before.1 >= start).map_or(start, |(start, before)| {
            end = end.max(before);
            start
        });
        while let Some((next, behind)) = self.done.range(start..=end).next().map(|(s, e)| (*s, *e))
        {
            self.done.remove(&next);
            end = end.max(behind);
        }
        self.done.insert(start, end);
    }
}

impl Still {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what is at these blocks, which are about to be written over. One commit at a time.
    fn keep(&self, storage: &dyn Storage, addresses: impl Iterator<Item = u64>) {
        let mut state = self.state();
        let mut wanted: Vec<u64> = addresses.collect();
        loop {
            wanted.retain(|at| !state.is_done(*at) && !state.kept.contains_key(at));
            // Whatever it takes, one commit has room: what it waits for is a reader, who never does.
            if wanted.is_empty()
                || state.kept.is_empty()
                || state.kept.len() + wanted.len() <= KEPT_MAX
            {
                break;
            }
            state = self.read.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        let kept = read_blocks(storage, &wanted);
        let mut state = self.state();
        for (address, block) in wanted.into_iter().zip(kept) {
            if !state.is_done(address) {
                state.kept.insert(address, block);
            }
        }
    }

    /// Puts what is kept into what the device was just asked for, and lets go of it; or fails, and the
    /// reader will ask again.
    fn put_back(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        let mut state = self.state();
        for request in &mut *requests {
            let end = request.offset + request.buf.len() as u64;
            for (address, block) in state.kept.range(request.offset..end) {
                let block = block.as_ref().ok_or_else(unreadable)?;
                let at = (address - request.offset) as usize;
                request.buf[at..at + BLOCK_BYTES as usize].copy_from_slice(block);
            }
        }
        for request in requests {
            let end = request.offset + request.buf.len() as u64;
            let mut read = state.kept.split_off(&request.offset);
            state.kept.append(&mut read.split_off(&end));
            state.note_done(request.offset, end);
        }
        drop(state);
        self.read.notify_all();
        Ok(())
    }
}

/// Blocks as they are; none where the device cannot read one.
fn read_blocks(storage: &dyn Storage, addresses: &[u64]) -> Vec<Kept> {
    let mut blocks: Vec<_> =
        addresses.iter().map(|_| AlignedBuf::zeroed(BLOCK_BYTES as usize)).collect();
    let mut requests: Vec<_> = addresses
        .iter()
        .zip(&mut blocks)
        .map(|(offset, buf)| ReadRequest { offset: *offset, buf })
        .collect();
    if requests.is_empty() || storage.read_many(&mut requests).is_ok() {
        return blocks.into_iter().map(Some).collect();
    }
    let one = |(address, mut block): (&u64, AlignedBuf)| {
        storage.read_at(*address, &mut block).is_ok().then_some(block)
    };
    addresses.iter().zip(blocks).map(one).collect()
}

/// What the device says of a block that it cannot read.
fn unreadable() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

/// Ends the keeping, whatever becomes of the reader.
struct Ends<'a>(&'a Inner, &'a Still);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        *self.0.still.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let mut state = self.1.state();
        state.over = true;
        state.kept.clear();
        drop(state);
        self.1.read.notify_all();
    }
}

impl Inner {
    /// Lets `read` have the metadata of volumes and snapshots as it is on the device now, while commits
    /// go on: each block once, and nothing else. One such reader at a time.
    ///
    /// # Errors
    /// What `read` returns.
    pub(super) fn read_still<T>(&self, read: impl FnOnce(&dyn Storage) -> Result<T>) -> Result<T> {
        let _one = self.stills.lock().unwrap_or_else(PoisonError::into_inner);
        let still = Arc::new(Still::default());
        // Between commits all that they write is there. Superblocks are few, and written by others too.
        let (size, superblocks) = self.without_commits(|| {
            let superblock = self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
            let size = self.storage.size_bytes();
            let end = (size / BLOCK_BYTES * BLOCK_BYTES).saturating_sub(BLOCK_BYTES);
            let last = superblock.geometry.superblock_last();
            let copies = BTreeSet::from([0, SUPERBLOCK_SECOND, last, end]);
            let copies = Vec::from_iter(copies);
            let blocks = read_blocks(&*self.storage, &copies);
            let blocks = copies.into_iter().zip(blocks);
            *self.still.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&still));
            (size, blocks.collect::<BTreeMap<_, _>>())
        });
        let _ends = Ends(self, &still);
        let storage = ReadBy::new(size, |requests: &mut [ReadRequest<'_>]| {
            if let [ReadRequest { offset, buf }] = requests
                && let Some(block) = superblocks.get(offset)
                && buf.len() == BLOCK_BYTES as usize
            {
                buf.copy_from_slice(block.as_ref().ok_or_else(unreadable)?);
                return Ok(());
            }
            self.storage.read_many(requests)?;
            still.put_back(requests)
        });
        read(&storage)
    }

    /// Before metadata is written: keeps what is there for whoever reads it as it was.
    pub(super) fn keep_still(&self, writes: &[(u64, &[u8])]) {
        let still = self.still.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(still) = still {
            let blocks = writes.iter().flat_map(|(offset, bytes)| {
                (*offset..offset + bytes.len() as u64).step_by(BLOCK_BYTES as usize)
            });
            still.keep(&*self.storage, blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = BLOCK_BYTES as usize;

    /// A device whose blocks hold their value, or cannot be read.
    fn device(blocks: &Mutex<Vec<Option<u8>>>) -> impl Storage {
        ReadBy::new(1 << 20, |requests: &mut [ReadRequest<'_>]| {
            for request in requests {
                let first = request.offset as usize / BLOCK;
                for (block, bytes) in request.buf.chunks_mut(BLOCK).enumerate() {
                    bytes.fill(blocks.lock().unwrap()[first + block].ok_or_else(unreadable)?);
                }
            }
            Ok(())
        })
    }

    /// What a reader gets of some blocks.
    fn read(
        still: &Still,
        storage: &dyn Storage,
        blocks: std::ops::Range<usize>,
    ) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; blocks.len() * BLOCK];
        let mut requests = [ReadRequest { offset: (blocks.start * BLOCK) as u64, buf: &mut bytes }];
        storage.read_many(&mut requests)?;
        still.put_back(&mut requests)?;
        Ok(bytes.chunks(BLOCK).map(|block| block[0]).collect())
    }

    fn addresses(blocks: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
        blocks.map(|block| block * BLOCK_BYTES)
    }

    #[test]
    fn what_is_written_over_is_read_once_as_it_was() {
        let blocks = Mutex::new(vec![Some(1), None, Some(3), Some(4)]);
        let (still, storage) = (Still::default(), device(&blocks));
        for _ in 0..2 {
            still.keep(&storage, addresses(0..3));
            blocks.lock().unwrap()[..3].fill(Some(9));
        }
        assert!(read(&still, &storage, 0..4).is_err(), "one could not be read then");
        assert_eq!(read(&still, &storage, 0..1).unwrap(), [1]);
        assert!(read(&still, &storage, 1..2).is_err());
        assert_eq!(read(&still, &storage, 2..4).unwrap(), [3, 4]);
        still.keep(&storage, addresses(2..4));
        assert_eq!(still.state().kept.len(), 1, "what the reader has had is kept no more");
    }

    #[test]
    fn who_keeps_too_much_waits_for_the_reader() {
        let blocks = Mutex::new(vec![Some(1); 3 * KEPT_MAX]);
        let (still, storage) = (Still::default(), device(&blocks));
        still.keep(&storage, addresses(0..KEPT_MAX as u64));
        std::thread::scope(|scope| {
            scope.spawn(|| still.keep(&storage, addresses(KEPT_MAX as u64..2 * KEPT_MAX as u64)));
            assert_eq!(still.state().kept.len(), KEPT_MAX);
            read(&still, &storage, 0..KEPT_MAX).unwrap();
        });
        assert_eq!(still.state().kept.len(), KEPT_MAX);
        // One who keeps more than that at once has to be let.
        read(&still, &storage, 0..2 * KEPT_MAX).unwrap();
        let still = Still::default();
        still.keep(&storage, addresses(0..3 * KEPT_MAX as u64));
        assert_eq!(still.state().kept.len(), 3 * KEPT_MAX);
    }

    #[test]
    fn what_was_read_is_one_range_where_it_touches() {
        let mut state = State::default();
        for (start, end) in [(8, 12), (0, 4), (20, 24), (4, 8), (16, 20), (2, 6), (30, 31)] {
            state.note_done(start, end);
        }
        assert_eq!(Vec::from_iter(state.done.clone()), [(0, 12), (16, 24), (30, 31)]);
        let done: Vec<u64> = (0..32).filter(|at| state.is_done(*at)).collect();
        assert_eq!(done, Vec::from_iter((0..12).chain(16..24).chain(30..31)));
    }
}
