//! The states of the blocks of entries, each entry's known by one number: a stretch in itself, or an index
//! of bitmaps.

use super::slab::Slab;
use super::stretch::{PACKED_BITS, Stretch};
use crate::format::entry::EntryBytes;
use crate::format::record::FillState;
use crate::limits::EXTENT_MAX_BYTES;
use crate::meta::bits::word_mask;
use crate::units::BLOCK_BYTES;
use std::ops::Range;

/// Numbers with this bit, and without [`WIDE`], are a packed [`Stretch`]; with neither an index of
/// `narrow`.
const STRETCH: u32 = 1 << 30;
/// Numbers with this bit, and without [`STRETCH`], are an index of `wide`.
const WIDE: u32 = 1 << 31;
const _: () = assert!(PACKED_BITS <= 30);
/// All blocks are data.
pub const FULL: u32 = STRETCH | Stretch::all(FillState::Data).pack();
/// All blocks are absent.
pub const ABSENT: u32 = STRETCH | Stretch::all(FillState::Absent).pack();
/// A free entry, or a zero run: there are no blocks.
pub const NO_BITS: u32 = u32::MAX;
/// Numbers with both bits, but for [`NO_BITS`]: the bitmaps are on the device alone. The rest says how many
/// blocks are data.
const AWAY: u32 = WIDE | STRETCH;
/// In the row of an extent whose blocks are compressed. To who knows no better it is as if they were on the device alone;
/// how they are known is beside the rows. No count is as high.
pub const COMPRESSED: u32 = AWAY | 1 << 29;
/// Words of a bitmap of the largest extents.
const WORDS_MAX: usize = (EXTENT_MAX_BYTES / BLOCK_BYTES / 64) as usize;

/// The bitmaps of those that need any.
#[derive(Debug)]
pub struct States {
    /// Those without zero blocks: data words.
    narrow: Slab,
    /// Those with zero blocks: data words, then zero words.
    wide: Slab,
    blocks: u32,
    words: usize,
}

impl States {
    /// For extents of `blocks` blocks.
    pub fn new(blocks: u32) -> Self {
        let words = blocks.div_ceil(64) as usize;
        Self { narrow: Slab::new(words), wide: Slab::new(2 * words), blocks, words }
    }

    /// Blocks of an extent.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Words of a bitmap.
    pub fn words(&self) -> usize {
        self.words
    }

    /// State of one block; `None` if only the device knows.
    #[inline]
    pub fn state(&self, bits: u32, block: u32) -> Option<FillState> {
        if bits == FULL {
            return Some(FillState::Data);
        }
        if let Some(stretch) = stretch_of(bits) {
            return Some(stretch.state(block));
        }
        let (word, bit) = ((block / 64) as usize, 1u64 << (block % 64));
        if is_away(bits) {
            None
        } else if self.data_word(bits, word) & bit != 0 {
            Some(FillState::Data)
        } else if self.zero_word(bits, word) & bit != 0 {
            Some(FillState::Zero)
        } else {
            Some(FillState::Absent)
        }
    }

    /// Whether all blocks of the range are data.
    #[inline]
    pub fn all_data(&self, bits: u32, blocks: &Range<u32>) -> bool {
        let first = (blocks.start / 64) as usize;
        let last = (blocks.end.saturating_sub(1) / 64) as usize;
        let has_all = |word| {
            let mask = word_mask(blocks, word);
            self.data_word(bits, word) & mask == mask
        };
        bits == FULL || (first..=last).all(has_all)
    }

    /// Word of the bitmap of the data blocks; no block is data of which only the device knows.
    #[inline]
    pub fn data_word(&self, bits: u32, word: usize) -> u64 {
        match stretch_of(bits) {
            Some(stretch) => stretch.word(FillState::Data, word, self.blocks),
            None if bits & STRETCH != 0 => 0,
            None => self.bitmaps(bits)[word],
        }
    }

    /// Word of the bitmap of the zero blocks.
    pub fn zero_word(&self, bits: u32, word: usize) -> u64 {
        match stretch_of(bits) {
            Some(stretch) => stretch.word(FillState::Zero, word, self.blocks),
            None if bits & STRETCH != 0 => 0,
            None => self.bitmaps(bits).get(self.words + word).copied().unwrap_or(0),
        }
    }

    /// Number of data blocks.
    pub fn data_blocks(&self, bits: u32) -> u32 {
        match stretch_of(bits) {
            Some(stretch) => stretch.count(FillState::Data, self.blocks),
            None if bits == NO_BITS => 0,
            None if bits & STRETCH != 0 => bits & !AWAY,
            None => self.bitmaps(bits)[..self.words].iter().map(|word| word.count_ones()).sum(),
        }
    }

    /// Sets the state of a range of blocks that is not empty: what they are known by then, and how many
    /// data blocks there are more and less.
    pub fn fill(&mut self, bits: u32, range: &Range<u32>, state: FillState) -> (u32, u32, u32) {
        if let Some(stretch) = stretch_of(bits)
            && let Some(filled) = stretch.fill(range, state, self.blocks)
        {
            let [before, now] = [&stretch, &filled].map(|s| s.count(FillState::Data, self.blocks));
            let packed = STRETCH | filled.pack();
            return (packed, now.saturating_sub(before), before.saturating_sub(now));
        }
        let bits = self.own(bits, state == FillState::Zero);
        let (count, words) = (self.blocks, self.words);
        let (data, zero) = self.halves_mut(bits);
        let (mut gained, mut lost) = (0, 0);
        let (first, last) = ((range.start / 64) as usize, ((range.end - 1) / 64) as usize);
        for (at, data) in data[first..=last].iter_mut().enumerate() {
            let word = first + at;
            let mask = word_mask(range, word);
            if state == FillState::Data {
                gained += (mask & !*data).count_ones();
                *data |= mask;
            } else {
                lost += (mask & *data).count_ones();
                *data &= !mask;
            }
            if let Some(zero) = zero.get_mut(word) {
                *zero &= !mask;
                if state == FillState::Zero {
                    *zero |= mask;
                }
            }
        }
        let full = gained > 0 && (0..words).all(|word| data[word] == word_mask(&(0..count), word));
        if full {
            self.release(bits);
        }
        (if full { FULL } else { bits }, gained, lost)
    }

    /// From the bitmaps of an entry on the device.
    pub fn load(&mut self, bytes: &EntryBytes<'_>) -> u32 {
        // A fold, not a search: for millions of entries the compiler's vectors pay.
        if bytes.data.iter().fold(0xff, |all, byte| all & byte) == 0xff {
            return FULL;
        }
        let (mut data, mut zero) = ([0; WORDS_MAX], [0; WORDS_MAX]);
        let (data, zero) = (&mut data[..self.words], &mut zero[..self.words]);
        words_from(bytes.data, data);
        words_from(bytes.zero, zero);
        if let Some(stretch) = Stretch::of(data, zero, self.blocks) {
            return STRETCH | stretch.pack();
        }
        let bits = self.take(zero.iter().any(|word| *word != 0));
        let (own_data, own_zero) = self.halves_mut(bits);
        own_data.copy_from_slice(data);
        own_zero.iter_mut().zip(zero).for_each(|(own, zero)| *own = *zero);
        bits
    }

    /// Writes both bitmaps as on the device to `data` and `zero`, which are zeroed.
    pub fn encode(&self, bits: u32, data: &mut [u8], zero: &mut [u8]) {
        if bits == FULL {
            return data.fill(0xff);
        }
        assert!(!is_away(bits), "what is written is in memory");
        words_to((0..self.words).map(|word| self.data_word(bits, word)), data);
        words_to((0..self.words).map(|word| self.zero_word(bits, word)), zero);
    }

    /// Gives the bitmaps back.
    pub fn release(&mut self, bits: u32) {
        match bits {
            // With none of its own.
            bits if bits & STRETCH != 0 => {}
            bits if bits & WIDE != 0 => self.wide.give_back(bits & !WIDE),
            bits => self.narrow.give_back(bits),
        }
    }

    /// Lets bitmaps go that are on the device: what is known of them by then. `None` if there are none.
    pub fn let_go(&mut self, bits: u32) -> Option<u32> {
        let count = (bits & STRETCH == 0).then(|| self.data_blocks(bits))?;
        self.release(bits);
        Some(AWAY | count)
    }

    /// Moves bitmaps to where they take less memory, if there is such a place: what they are known by then.
    pub fn pack(&mut self, bits: u32) -> u32 {
        match bits {
            bits if bits & STRETCH != 0 => bits,
            bits if bits & WIDE != 0 => self.wide.pack(bits & !WIDE) | WIDE,
            bits => self.narrow.pack(bits),
        }
    }

    /// Whether the bitmaps that there are would have room in half of the memory that they take.
    pub fn is_sparse(&self) -> bool {
        let taken = self.narrow.taken_bytes() + self.wide.taken_bytes();
        self.bytes() > 2 * taken + self.narrow.chunk_bytes() + self.wide.chunk_bytes()
    }

    /// Bytes of memory for them.
    pub fn bytes(&self) -> usize {
        self.narrow.bytes() + self.wide.bytes()
    }

    /// Bitmaps to change, with room for zero blocks if `wide`.
    fn own(&mut self, old: u32, wide: bool) -> u32 {
        debug_assert!(old != NO_BITS, "entry has no bitmaps");
        assert!(!is_away(old), "what is changed is in memory");
        let (has_own, is_wide) = (old & STRETCH == 0, old & WIDE != 0);
        if has_own && (is_wide || !wide) {
            return old;
        }
        let any_zero = (0..self.words).any(|word| self.zero_word(old, word) != 0);
        let new = self.take(wide || any_zero);
        for word in 0..self.words {
            let (data, zero) = (self.data_word(old, word), self.zero_word(old, word));
            let (own_data, own_zero) = self.halves_mut(new);
            own_data[word] = data;
            own_zero.get_mut(word).into_iter().for_each(|own| *own = zero);
        }
        self.release(old);
        new
    }

    fn take(&mut self, wide: bool) -> u32 {
        if wide { self.wide.take() | WIDE } else { self.narrow.take() }
    }

    fn bitmaps(&self, bits: u32) -> &[u64] {
        debug_assert!(bits & STRETCH == 0, "entry has no bitmaps");
        if bits & WIDE != 0 { self.wide.get(bits & !WIDE) } else { self.narrow.get(bits) }
    }

    /// Data words, and zero words if there are any.
    fn halves_mut(&mut self, bits: u32) -> (&mut [u64], &mut [u64]) {
        debug_assert!(bits & STRETCH == 0, "entry has no bitmaps");
        let all = match bits & WIDE {
            0 => self.narrow.get_mut(bits),
            _ => self.wide.get_mut(bits & !WIDE),
        };
        all.split_at_mut(self.words)
    }
}

/// Whether the bitmaps are on the device alone.
#[inline]
pub fn is_away(bits: u32) -> bool {
    bits & AWAY == AWAY && bits != NO_BITS
}

/// The stretch that an entry is known by.
#[inline]
fn stretch_of(bits: u32) -> Option<Stretch> {
    (bits & (WIDE | STRETCH) == STRETCH).then(|| Stretch::unpack(bits & !STRETCH))
}

/// Little-endian bytes to words, as many as both have.
fn words_from(bytes: &[u8], out: &mut [u64]) {
    for (bytes, out) in bytes.chunks(8).zip(out) {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        *out = u64::from_le_bytes(word);
    }
}

/// Words to little-endian bytes, as many as both have.
fn words_to(mut words: impl Iterator<Item = u64>, out: &mut [u8]) {
    let (whole, rest) = out.as_chunks_mut();
    for (out, word) in whole.iter_mut().zip(&mut words) {
        *out = word.to_le_bytes();
    }
    if let Some(word) = words.next() {
        rest.copy_from_slice(&word.to_le_bytes()[..rest.len()]);
    }
}
