//! Blocks that a change is on its way to, so that no other one overtakes it.
//!
//! Nothing orders two requests in flight to a replica, even if they overlap: one replica may apply them
//! in this order, another in that, and both would be complete and different. Upstream leaves it at
//! that. Here a change claims its blocks before it is sent, and one that overlaps waits until they are
//! given back. A widened write, which reads before it writes, depends on it even more.
//!
//! Claims are bits of a table by block number: threads share it without a lock, a 4 KiB write costs one
//! atomic instruction to claim and one to give back. Far blocks share bits, which lets a change wait
//! for one that it does not overlap, rarely, and for no longer than that takes. Who fails to claim has
//! claimed nothing and tries again when something was given back, at the latest at its next turn: two
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
pub struct Claims {
    words: Box<[AtomicU64]>,
}

impl Default for Claims {
    fn default() -> Self {
        Self { words: (0..WORDS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl Claims {
    /// Claims the blocks of this range, all or nothing; says whether they are claimed.
    #[must_use]
    pub fn claim(&self, offset: u64, length: u64) -> bool {
        if is(Bug::NoClaims) {
            return true;
        }
        for (claimed, (word, mask)) in masks(offset, length).enumerate() {
            let before = self.words[word].fetch_or(mask, Ordering::SeqCst);
            if before & mask == 0 {
                continue;
            }
            self.words[word].fetch_and(!(mask & !before), Ordering::SeqCst);
            for (word, mask) in masks(offset, length).take(claimed) {
                self.words[word].fetch_and(!mask, Ordering::SeqCst);
            }
            return false;
        }
        true
    }

    /// Gives back what was claimed with the same range.
    pub fn release(&self, offset: u64, length: u64) {
        if is(Bug::NoClaims) {
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
        let claims = Claims::default();
        assert!(claims.claim(8192, 8192));
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
            assert_eq!(claims.claim(offset, length), free, "{offset}+{length}");
            if free {
                claims.release(offset, length);
            }
        }
        claims.release(8192, 8192);
        assert!(claims.claim(0, 65536));
    }

    #[test]
    fn a_claim_that_fails_leaves_nothing_behind() {
        let claims = Claims::default();
        let (offset, length) = (60 * BLOCK, 200 * BLOCK);
        assert!(claims.claim(259 * BLOCK, 1));
        assert!(!claims.claim(offset, length));
        assert!(claims.claim(offset, 199 * BLOCK));
        assert!(claims.claim(260 * BLOCK, BLOCK));
    }

    #[test]
    fn a_range_may_be_longer_than_the_table() {
        for offset in [0, 5 * BLOCK, FAR - BLOCK, 63 * BLOCK + 17] {
            let claims = Claims::default();
            assert!(claims.claim(offset, 3 * FAR), "{offset}");
            assert!(!claims.claim(12345 * BLOCK, 1));
            claims.release(offset, 3 * FAR);
            assert!(claims.words.iter().all(|word| word.load(Ordering::SeqCst) == 0));
        }
    }

    #[test]
    fn threads_never_hold_the_same_block() {
        let claims = Claims::default();
        let held: Vec<_> = (0..64).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (claims, held) = (&claims, &held);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(thread);
                    for _ in 0..20_000 {
                        let first = random.usize(0..60);
                        let count = random.usize(1..5);
                        let range = ((first as u64 + 40) * BLOCK, count as u64 * BLOCK);
                        if !claims.claim(range.0, range.1) {
                            continue;
                        }
                        for block in &held[first..first + count] {
                            assert_eq!(block.fetch_add(1, Ordering::SeqCst), 0);
                        }
                        for block in &held[first..first + count] {
                            block.fetch_sub(1, Ordering::SeqCst);
                        }
                        claims.release(range.0, range.1);
                    }
                });
            }
        });
        assert!(claims.words.iter().all(|word| word.load(Ordering::SeqCst) == 0));
    }
}
