//! Which extents are in use.

use crate::meta::table::Table;

/// A set of ids. Like the table it is kept in, it takes memory for the parts in use alone.
#[derive(Debug)]
pub struct IdBits {
    words: Table<u64>,
    /// Behind the last word that is not empty.
    end: usize,
}

impl IdBits {
    /// None.
    pub fn new() -> Self {
        Self { words: Table::new(0), end: 0 }
    }

    /// Puts an id in, or takes it out.
    pub fn set(&mut self, id: u32, there: bool) {
        let (word, bit) = ((id / 64) as usize, 1 << (id % 64));
        if there {
            *self.words.get_mut(word) |= bit;
            self.end = self.end.max(word + 1);
        } else if self.words.get(word) & bit != 0 {
            *self.words.get_mut(word) &= !bit;
            while self.end > 0 && self.words.get(self.end - 1) == 0 {
                self.end -= 1;
            }
        }
    }

    /// The last one.
    pub fn last(&self) -> Option<u32> {
        let last = self.end.checked_sub(1)?;
        Some(last as u32 * 64 + self.words.get(last).ilog2())
    }

    /// Number of those from `first` on.
    pub fn count_from(&self, first: u32) -> u32 {
        let word = (first / 64) as usize;
        let begun = (self.words.get(word) >> (first % 64)).count_ones();
        begun + (word + 1..self.end).map(|word| self.words.get(word).count_ones()).sum::<u32>()
    }
}
