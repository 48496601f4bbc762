//! Sets of blocks of an extent.

use std::ops::Range;

/// The bits of word `word` that are in a range of blocks.
pub(super) fn word_mask(blocks: &Range<u32>, word: usize) -> u64 {
    let base = word as u32 * 64;
    let start = blocks.start.max(base);
    let end = blocks.end.min(base + 64);
    if start >= end {
        return 0;
    }
    (u64::MAX >> (64 - (end - start))) << (start - base)
}

/// A set of blocks of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bits([u64; 16]);

impl Bits {
    /// The blocks of a range.
    pub fn range(blocks: &Range<u32>) -> Self {
        Self::from_words((0..16).map(|word| word_mask(blocks, word)))
    }

    pub(super) fn from_words(words: impl Iterator<Item = u64>) -> Self {
        let mut bits = Self::default();
        bits.0.iter_mut().zip(words).for_each(|(out, word)| *out = word);
        bits
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Number of blocks.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether a block is in it.
    pub fn has(&self, block: u32) -> bool {
        self.0[(block / 64) as usize] >> (block % 64) & 1 == 1
    }

    /// Union.
    pub fn or(&self, other: &Self) -> Self {
        Self::from_words(self.0.iter().zip(other.0).map(|(a, b)| a | b))
    }

    /// Intersection.
    pub fn and(&self, other: &Self) -> Self {
        Self::from_words(self.0.iter().zip(other.0).map(|(a, b)| a & b))
    }

    /// Those not in `other`.
    pub fn without(&self, other: &Self) -> Self {
        Self::from_words(self.0.iter().zip(other.0).map(|(a, b)| a & !b))
    }

    /// Maximal runs, ascending, among the first `blocks` blocks.
    pub fn runs(&self, blocks: u32) -> impl Iterator<Item = Range<u32>> + use<> {
        let bits = *self;
        let mut next = 0;
        std::iter::from_fn(move || {
            while next < blocks && !bits.has(next) {
                next += 1;
            }
            let start = next;
            while next < blocks && bits.has(next) {
                next += 1;
            }
            (start < next).then_some(start..next)
        })
    }
}
