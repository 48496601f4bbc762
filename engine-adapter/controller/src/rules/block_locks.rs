//! Locks of blocks that a change is on its way to, so that no other one overtakes it.
//!
//! Nothing orders two requests in flight to a replica, even if they overlap: one replica may apply them
//! in this order, another in that, and both would be complete and different. Upstream leaves it at
//! that. Here a change locks its blocks before it is sent, and one that overlaps waits until they are
//! unlocked. A widened write, which reads before it writes, depends on it even more.
//!
//! Locks are bits of a table by block number: threads share it without a mutex, a 4 KiB write costs one
//! atomic instruction to lock and one to unlock. Far blocks share bits, which lets a change wait
//! for one that it does not overlap, rarely, and for no longer than that takes. Who fails to lock has
//! locked nothing and tries again when something was unlocked, at the latest at its next turn: two
//! that met each other half way have both failed.

use super::sabotage::{Bug, is};
use super::widen::BLOCK;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of a word.
const WORD: u64 = 64;
/// Words of a table: blocks 256 MiB apart share a bit.
const WORDS: usize = 1024;

/// The blocks of a volume that are being changed.
#[derive(Debug)]
pub struct BlockLocks {
    words: Box<[AtomicU64]>,
}

impl Default for BlockLocks {
    fn default() -> Self {
        Self { words: (0..WORDS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl BlockLocks {
    /// Locks the blocks of this range, all or nothing; says whether they are locked.
    #[must_use]
    pub fn try_lock(&self, offset: u64, length: u64) -> bool {
        if is(Bug::NoBlockLocks) {
            return true;
        }
        for (locked, (word, mask)) in masks(offset, length).enumerate() {
            let before = self.words[word].fetch_or(mask, Ordering::SeqCst);
            if before & mask == 0 {
                continue;
            }
            self.words[word].fetch_and(!(mask & !before), Ordering::SeqCst);
            for (word, mask) in masks(offset, length).take(locked) {
                self.words[word].fetch_and(!mask, Ordering::SeqCst);
            }
            return false;
        }
        true
    }

    /// Unlocks what was locked with the same range.
    pub fn unlock(&self, offset: u64, length: u64) {
        if is(Bug::NoBlockLocks) {
            return;
        }
        for (word, mask) in masks(offset, length) {
            self.words[word].fetch_and(!mask, Ordering::SeqCst);
        }
    }
}

/// The words of a range's blocks and the bits in each; each word at most once.
fn masks(offset: u64, length: u64) -> impl Iterator<Item = (usize, u64)> {
    let table = WORDS as u64 * WORD;
    let first = offset / BLOCK;
    let blocks = match length {
        0 => 0,
        length => ((offset % BLOCK + length).div_ceil(BLOCK)).min(table),
    };
    // From the middle of a word all the way round, the rest of that word is one more piece, at the end.
    let mut at = first % table;
    let mut left = blocks;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let bit = at % WORD;
        let count = (WORD - bit).min(left);
        let mask = (u64::MAX >> (WORD - count)) << bit;
        let word = (at / WORD) as usize;
        at = (at + count) % table;
        left -= count;
        Some((word, mask))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: u64 = WORDS as u64 * WORD * BLOCK;

    #[test]
    fn what_overlaps_waits() {
        let locks = BlockLocks::default();
        assert!(locks.try_lock(8192, 8192));
        for (offset, length, free) in [
            (0, 8192, true),
            (16384, 4096, true),
            (12288, 512, false),
            (12800, 512, false),
            (0, 8193, false),
            (16383, 1, false),
            (8192 + FAR, 1, false),
            (9000, 0, true),
        ] {
            assert_eq!(locks.try_lock(offset, length), free, "{offset}+{length}");
            if free {
                locks.unlock(offset, length);
            }
        }
        locks.unlock(8192, 8192);
        assert!(locks.try_lock(0, 65536));
    }

    #[test]
    fn a_lock_that_fails_leaves_nothing_behind() {
        let locks = BlockLocks::default();
        let (offset, length) = (60 * BLOCK, 200 * BLOCK);
        assert!(locks.try_lock(259 * BLOCK, 1));
        assert!(!locks.try_lock(offset, length));
        assert!(locks.try_lock(offset, 199 * BLOCK));
        assert!(locks.try_lock(260 * BLOCK, BLOCK));
    }

    #[test]
    fn a_range_may_be_longer_than_the_table() {
        for offset in [0, 5 * BLOCK, FAR - BLOCK, 63 * BLOCK + 17] {
            let locks = BlockLocks::default();
            assert!(locks.try_lock(offset, 3 * FAR), "{offset}");
            assert!(!locks.try_lock(12345 * BLOCK, 1));
            locks.unlock(offset, 3 * FAR);
            assert!(locks.words.iter().all(|word| word.load(Ordering::SeqCst) == 0));
        }
    }

    #[test]
    fn threads_never_hold_the_same_block() {
        let locks = BlockLocks::default();
        let held: Vec<_> = (0..64).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (locks, held) = (&locks, &held);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(thread);
                    for _ in 0..20_000 {
                        let first = random.usize(0..60);
                        let count = random.usize(1..5);
                        let range = ((first as u64 + 40) * BLOCK, count as u64 * BLOCK);
                        if !locks.try_lock(range.0, range.1) {
                            continue;
                        }
                        for block in &held[first..first + count] {
                            assert_eq!(block.fetch_add(1, Ordering::SeqCst), 0);
                        }
                        for block in &held[first..first + count] {
                            block.fetch_sub(1, Ordering::SeqCst);
                        }
                        locks.unlock(range.0, range.1);
                    }
                });
            }
        });
        assert!(locks.words.iter().all(|word| word.load(Ordering::SeqCst) == 0));
    }
}
