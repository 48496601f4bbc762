//! The states of an extent's blocks where one stretch of them is alike and so are all others: in the
//! room of an index, without bitmaps. So are extents that are being filled, those of which one block
//! was written since a snapshot, and those with one hole.

use crate::format::record::FillState;
use crate::meta::bits::word_mask;
use std::ops::Range;

/// Bits of the number of a block, and of the one behind the last.
const BLOCK_BITS: u32 = 11;
const BLOCK_MASK: u32 = (1 << BLOCK_BITS) - 1;
/// Bits of a packed stretch.
pub const PACKED_BITS: u32 = 2 * BLOCK_BITS + 4;

/// One stretch of blocks in one state, and all others in another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    within: Range<u32>,
    inside: FillState,
    outside: FillState,
}

impl Stretch {
    /// All blocks in one state.
    pub const fn all(state: FillState) -> Self {
        Self { within: 0..0, inside: state, outside: state }
    }

    /// That of these bitmaps, if it can be.
    pub fn of(data: &[u64], zero: &[u64], blocks: u32) -> Option<Self> {
        let bits = |state| match state {
            FillState::Data => run_of(data.iter().copied()),
            FillState::Zero => run_of(zero.iter().copied()),
            FillState::Absent => {
                let zero = zero.iter().copied().chain(std::iter::repeat(0));
                let other = (0..).zip(data.iter().zip(zero));
                run_of(other.map(|(word, (d, z))| word_mask(&(0..blocks), word) & !(d | z)))
            }
        };
        let every = [FillState::Data, FillState::Zero, FillState::Absent];
        let mut found = every.map(|state| (state, bits(state)));
        // Of two states, one must be in one run; a third one there must not be.
        found.sort_unstable_by_key(|(_, run)| *run != Some(0..0));
        let (inside, within, outside) = match found {
            [(_, Some(none)), (a, Some(run)), (b, _)] if none.is_empty() => (a, run, b),
            [(_, Some(none)), (a, None), (b, Some(run))] if none.is_empty() => (b, run, a),
            _ => return None,
        };
        Some(Self { within, inside, outside }.tidy(blocks))
    }

    /// From [`Stretch::pack`].
    #[inline]
    pub fn unpack(packed: u32) -> Self {
        let states = packed >> (2 * BLOCK_BITS);
        Self {
            within: packed & BLOCK_MASK..packed >> BLOCK_BITS & BLOCK_MASK,
            inside: state_of(states & 3),
            outside: state_of(states >> 2 & 3),
        }
    }

    /// In [`PACKED_BITS`] bits.
    pub const fn pack(&self) -> u32 {
        let states = self.inside as u32 | (self.outside as u32) << 2;
        self.within.start | self.within.end << BLOCK_BITS | states << (2 * BLOCK_BITS)
    }

    /// State of a block.
    #[inline]
    pub fn state(&self, block: u32) -> FillState {
        if self.within.contains(&block) { self.inside } else { self.outside }
    }

    /// Word of the bitmap of those in a state.
    #[inline]
    pub fn word(&self, state: FillState, word: usize, blocks: u32) -> u64 {
        let inside = word_mask(&self.within, word);
        let mut bits = if self.inside == state { inside } else { 0 };
        if self.outside == state {
            bits |= word_mask(&(0..blocks), word) & !inside;
        }
        bits
    }

    /// Number of blocks in a state.
    pub fn count(&self, state: FillState, blocks: u32) -> u32 {
        let inside = self.within.end - self.within.start;
        let of = |held, count| if held == state { count } else { 0 };
        of(self.inside, inside) + of(self.outside, blocks - inside)
    }

    /// Sets the state of some blocks; `None` if that is no stretch any more.
    pub fn fill(&self, range: &Range<u32>, state: FillState, blocks: u32) -> Option<Self> {
        let Self { within, inside, outside } = self;
        let (start, end) = (within.start, within.end);
        let new = |within, inside, outside| Self { within, inside, outside }.tidy(blocks);
        let covers = range.start <= start && end <= range.end;
        if covers || within.is_empty() {
            return Some(new(range.clone(), state, *outside));
        }
        let apart = range.end < start || end < range.start;
        let disjoint = range.end <= start || end <= range.start;
        if state == *inside {
            let joined = start.min(range.start)..end.max(range.end);
            return (!apart).then(|| new(joined, *inside, *outside));
        }
        if state != *outside {
            return None;
        }
        match disjoint {
            true => Some(self.clone()),
            false if range.start <= start => Some(new(range.end..end, *inside, *outside)),
            false if end <= range.end => Some(new(start..range.start, *inside, *outside)),
            false => None,
        }
    }

    /// With one form for the same states.
    fn tidy(self, blocks: u32) -> Self {
        if self.within.is_empty() || self.inside == self.outside {
            Self::all(self.outside)
        } else if self.within == (0..blocks) {
            Self::all(self.inside)
        } else {
            self
        }
    }
}

/// The one run of bits that are set, `0..0` for none; `None` if there are several.
fn run_of(words: impl Iterator<Item = u64>) -> Option<Range<u32>> {
    let mut run = 0..0;
    for (base, word) in (0..).step_by(64).zip(words) {
        if word == 0 {
            continue;
        }
        let (first, count) = (word.trailing_zeros(), word.count_ones());
        if first + count + word.leading_zeros() != 64 {
            return None;
        }
        if run.is_empty() {
            run = base + first..base + first;
        }
        if run.end != base + first {
            return None;
        }
        run.end += count;
    }
    Some(run)
}

fn state_of(bits: u32) -> FillState {
    match bits {
        1 => FillState::Data,
        2 => FillState::Zero,
        _ => FillState::Absent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [FillState; 3] = [FillState::Absent, FillState::Data, FillState::Zero];

    fn bitmap(states: &[FillState], wanted: FillState) -> Vec<u64> {
        let words = states.chunks(64);
        let word = |states: &[FillState]| {
            let bits = states.iter().enumerate().filter(|(_, state)| **state == wanted);
            bits.fold(0, |word, (bit, _)| word | 1 << bit)
        };
        words.map(word).collect()
    }

    /// Beside blocks one by one. What is refused has more than two changes of state, or three states.
    #[test]
    fn a_stretch_is_what_its_blocks_are() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut refused = 0;
        for step in 0..60_000 {
            let blocks = [16, 64, 256, 1024][step % 4];
            let range = |rng: &mut fastrand::Rng| {
                let start = if rng.bool() { rng.u32(..blocks) } else { 0 };
                start..if rng.bool() { rng.u32(start..=blocks) } else { blocks }
            };
            let states = [STATES[rng.usize(..3)], STATES[rng.usize(..3)], STATES[rng.usize(..3)]];
            let mut plain = vec![states[0]; blocks as usize];
            let mut stretch = Some(Stretch::all(states[0]));
            for state in &states[1..] {
                let range = range(&mut rng);
                plain[range.start as usize..range.end as usize].fill(*state);
                stretch = stretch.and_then(|stretch| stretch.fill(&range, *state, blocks));
            }
            let (data, zero) = (bitmap(&plain, FillState::Data), bitmap(&plain, FillState::Zero));
            let kinds = STATES.iter().filter(|state| plain.contains(state)).count();
            let changes = plain.windows(2).filter(|pair| pair[0] != pair[1]).count();
            let loaded = Stretch::of(&data, &zero, blocks);
            assert_eq!(loaded.is_some(), kinds < 3 && changes <= 2, "{plain:?}");
            assert!(stretch.is_none() || loaded.is_some(), "{plain:?}");
            refused += usize::from(stretch.is_none() && loaded.is_some());
            for stretch in stretch.into_iter().chain(loaded) {
                let packed = stretch.pack();
                assert!(packed < 1 << PACKED_BITS);
                assert_eq!(Stretch::unpack(packed), stretch);
                for (block, state) in (0..).zip(&plain) {
                    assert_eq!(stretch.state(block), *state, "{stretch:?}");
                }
                for state in STATES {
                    let words = bitmap(&plain, state);
                    let got = (0..words.len()).map(|word| stretch.word(state, word, blocks));
                    assert!(got.eq(words.iter().copied()), "{stretch:?} {state:?}");
                    let count = plain.iter().filter(|held| **held == state).count();
                    assert_eq!(stretch.count(state, blocks) as usize, count);
                }
            }
        }
        assert!(refused < 60_000 / 5, "{refused}");
    }
}
