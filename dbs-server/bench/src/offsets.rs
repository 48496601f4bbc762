//! Where the requests of a load go.

use super::catalog::Pattern;
use fastrand::Rng;
use std::sync::atomic::{AtomicU64, Ordering};

/// Rounds of the network that permutes blocks: enough to look random.
const ROUNDS: u64 = 4;

/// Offsets for all threads of a load together.
#[derive(Debug)]
pub struct Offsets {
    pattern: Pattern,
    block: u64,
    blocks: u64,
    /// Places that get a request, where each gets one.
    most: u64,
    next: AtomicU64,
    order: Permutation,
}

impl Offsets {
    /// Offsets of whole blocks in the first `length` bytes. The same seed gives the same ones.
    pub fn new(pattern: Pattern, block: u32, length: u64, seed: u64) -> Self {
        let block = u64::from(block);
        let blocks = length / block;
        let order = Permutation::new(blocks, seed);
        Self { pattern, block, blocks, most: blocks, next: AtomicU64::new(0), order }
    }

    /// Where each place gets one request: of no more than so many places.
    pub fn at_most(self, most: Option<u64>) -> Self {
        Self { most: most.unwrap_or(self.blocks).min(self.blocks), ..self }
    }

    /// The next offset; `None` when each place had its request and none is to have two.
    pub fn next(&self, random: &mut Rng) -> Option<u64> {
        if self.blocks == 0 {
            return None;
        }
        let index = match self.pattern {
            Pattern::Random => random.u64(..self.blocks),
            Pattern::Sequential => self.count() % self.blocks,
            Pattern::RandomOnce => self.order.get(self.once()?),
            Pattern::SequentialOnce => self.once()?,
        };
        Some(index * self.block)
    }

    fn count(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn once(&self) -> Option<u64> {
        Some(self.count()).filter(|index| *index < self.most)
    }
}

/// A random order of `0..count` that takes no memory: a Feistel network on the next even power
/// of two, walked until it is back in range.
#[derive(Debug)]
struct Permutation {
    count: u64,
    half_bits: u32,
    seed: u64,
}

impl Permutation {
    fn new(count: u64, seed: u64) -> Self {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        Self { count, half_bits: bits.div_ceil(2).max(1), seed }
    }

    fn get(&self, index: u64) -> u64 {
        let mut at = index;
        loop {
            at = self.step(at);
            if at < self.count {
                return at;
            }
        }
    }

    fn step(&self, at: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (at >> self.half_bits, at & mask);
        for round in 0..ROUNDS {
            let key = self.seed.wrapping_add(round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (left, right) = (right, left ^ mix(right.wrapping_add(key)) & mask);
        }
        left << self.half_bits | right
    }
}

/// Spreads every bit over all others: the end of MurmurHash3.
fn mix(mut value: u64) -> u64 {
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        value = (value ^ value >> 33).wrapping_mul(factor);
    }
    value ^ value >> 33
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pattern: Pattern, length: u64, seed: u64) -> Vec<u64> {
        let offsets = Offsets::new(pattern, 4096, length, seed);
        let mut random = Rng::with_seed(seed);
        (0..10_000).map_while(|_| offsets.next(&mut random)).collect()
    }

    #[test]
    fn each_place_once_in_no_order() {
        for blocks in [1, 2, 3, 5, 255, 256, 257, 5000] {
            let shuffled = all(Pattern::RandomOnce, blocks * 4096, 7);
            let mut sorted = shuffled.clone();
            sorted.sort_unstable();
            let expected: Vec<_> = (0..blocks).map(|block| block * 4096).collect();
            assert_eq!(sorted, expected, "{blocks}");
            assert_eq!(all(Pattern::SequentialOnce, blocks * 4096, 7), expected);
            if blocks > 100 {
                let near = shuffled.windows(2).filter(|w| w[0].abs_diff(w[1]) <= 4 * 4096);
                assert!(near.count() < blocks as usize / 10, "{blocks}");
                assert_ne!(shuffled, all(Pattern::RandomOnce, blocks * 4096, 8));
            }
        }
        let some = Offsets::new(Pattern::RandomOnce, 4096, 1 << 20, 7).at_most(Some(9));
        let mut random = Rng::with_seed(7);
        assert_eq!(std::iter::from_fn(|| some.next(&mut random)).count(), 9);
    }

    #[test]
    fn others_go_on_for_ever() {
        assert_eq!(all(Pattern::Sequential, 3 * 4096, 1)[..4], [0, 4096, 8192, 0]);
        let random = all(Pattern::Random, 64 * 4096, 1);
        assert_eq!(random, all(Pattern::Random, 64 * 4096, 1), "a seed repeats itself");
        for block in 0..64 {
            let hits = random.iter().filter(|at| **at == block * 4096).count();
            assert!((80..240).contains(&hits), "block {block}: {hits} of 10000");
        }
        assert!(all(Pattern::Random, 100, 1).is_empty());
    }
}
