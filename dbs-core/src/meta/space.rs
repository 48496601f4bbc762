//! File space of data extents, had before they are written: a file system that must find room for
//! each first write, block by block, takes five times as long for it.

use super::alloc::FreeSet;
use std::ops::Range;

/// Bytes of file space asked for at first, and at most. It doubles each time, so that it stays
/// below what was needed since the store was opened.
const FIRST_BYTES: u64 = 64 << 20;
const MOST_BYTES: u64 = 512 << 20;

/// Which data extents have file space as far as is known.
#[derive(Debug, Default)]
pub struct Space {
    /// Extents to ask for at once; 0 where there is no file.
    ahead: u32,
    most: u32,
    had: FreeSet,
}

impl Space {
    /// For a file with extents of this size, of which nothing is known yet.
    pub fn of_file(extent_bytes: u64) -> Self {
        let extents = |bytes: u64| (bytes / extent_bytes) as u32;
        Self { ahead: extents(FIRST_BYTES), most: extents(MOST_BYTES), had: FreeSet::default() }
    }

    /// How many extents to reserve, from this one on, before it is handed out; 0 if it is.
    pub fn wanted(&self, extent: u32) -> u32 {
        if self.had.has(extent) { 0 } else { self.ahead }
    }

    /// This was reserved, or cannot be.
    pub fn reserved(&mut self, extents: &Range<u32>) {
        for extent in extents.clone() {
            if !self.had.has(extent) {
                self.had.insert(extent);
            }
        }
        if extents.len() as u64 >= u64::from(self.ahead) {
            self.ahead = (self.ahead * 2).min(self.most);
        }
    }

    /// The file system has it back.
    pub fn given_back(&mut self, extents: impl IntoIterator<Item = u32>) {
        for extent in extents {
            self.had.remove(extent);
        }
    }

    /// Extents that were reserved, ascending.
    pub fn all(&self) -> impl Iterator<Item = u32> {
        self.had.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_once_for_more_and_more() {
        let mut space = Space::of_file(1 << 20);
        let mut asked = Vec::new();
        for extent in 0..2000 {
            let wanted = space.wanted(extent);
            if wanted > 0 {
                space.reserved(&(extent..extent + wanted));
                asked.push(wanted);
            }
        }
        assert_eq!(asked, [64, 128, 256, 512, 512, 512, 512]);
        space.given_back(5..7);
        assert_eq!((space.wanted(4), space.wanted(6)), (0, 512));
        assert_eq!(Space::default().wanted(0), 0);
        assert!(space.all().eq((0..5).chain(7..64 + 128 + 256 + 4 * 512)));
    }
}
