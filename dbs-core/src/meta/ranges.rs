//! Maps and differences, as they are found.

use crate::info::{MapRange, RangeState};
use crate::units::BLOCK_BYTES;
use std::ops::Range;

/// Ranges as they are found, in order.
pub struct Ranges {
    list: Vec<MapRange>,
    limit: usize,
    /// What comes from the file of a base counts as data.
    pub(super) with_file: bool,
}

impl Ranges {
    /// For so many of them; what follows is not kept.
    pub fn new(limit: usize) -> Self {
        Self { list: Vec::new(), limit, with_file: true }
    }

    /// Of layers alone: what comes from the file of a base is a hole.
    #[must_use]
    pub fn without_file(self) -> Self {
        Self { with_file: false, ..self }
    }

    /// Those there are, in bytes, cut to a range.
    pub fn into_clipped(mut self, offset: u64, length: u64) -> Vec<MapRange> {
        self.list.truncate(self.limit);
        for range in &mut self.list {
            let start = range.offset.max(offset);
            let end = (range.offset + range.length).min(offset + length);
            (range.offset, range.length) = (start, end - start);
        }
        self.list
    }

    /// One more than asked for, so that the last of those is known to be complete.
    pub fn full(&self) -> bool {
        self.list.len() > self.limit
    }

    /// Up to which byte those that are kept tell everything, if `reached` was looked at.
    pub fn told_to(&self, reached: u64) -> u64 {
        self.list.get(self.limit).map_or(reached, |first_not_kept| first_not_kept.offset)
    }

    pub(super) fn push(&mut self, blocks: Range<u64>, state: RangeState) {
        let (offset, length) =
            (blocks.start * BLOCK_BYTES, (blocks.end - blocks.start) * BLOCK_BYTES);
        let full = self.full();
        match self.list.last_mut() {
            Some(last) if last.state == state && last.offset + last.length == offset => {
                last.length += length;
            }
            _ if full => {}
            _ => self.list.push(MapRange { offset, length, state }),
        }
    }
}
