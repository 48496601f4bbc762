//! One page of checksums in memory: all of it, or, of a page that the device has and nobody read,
//! what was written since. The latter costs some bytes for each block instead of 4 KiB.

use crate::format::sums::{PageSums, SUMS_PER_PAGE, UNKNOWN};
use std::ops::Range;

/// What is known.
#[derive(Debug)]
enum Known {
    /// Of some blocks, ascending; the device has the others.
    Part(Vec<Entry>),
    /// Of all.
    Whole(Box<PageSums>),
}

/// The sum of a block of a part, in 6 bytes.
#[derive(Debug, Clone, Copy)]
struct Entry {
    block: u16,
    sum: [u8; 4],
}

impl Entry {
    fn new(block: u32, sum: u32) -> Self {
        Self { block: block as u16, sum: sum.to_le_bytes() }
    }

    fn block(self) -> u32 {
        self.block.into()
    }

    fn sum(self) -> u32 {
        u32::from_le_bytes(self.sum)
    }
}

/// A page in memory.
#[derive(Debug)]
pub struct Page {
    known: Known,
    /// Reading it failed: the device may say what is not known here, and must not be made to
    /// forget it by what is learnt.
    pub unread: bool,
    /// Being written.
    pub moving: bool,
    /// It knows what the device does not.
    pub changed: bool,
    /// Used since somebody looked for a page to forget.
    pub used: bool,
    /// It is read only to be written.
    pub brief: bool,
}

/// Bytes of a page beside its sums, its place in the maps among them.
const FIXED_BYTES: usize = 96;

impl Page {
    /// One of which nothing is known but what will be written.
    pub fn part() -> Self {
        let known = Known::Part(Vec::new());
        Self { known, unread: false, moving: false, changed: false, used: true, brief: false }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        FIXED_BYTES
            + match &self.known {
                Known::Part(sums) => sums.capacity() * size_of::<Entry>(),
                Known::Whole(_) => size_of::<PageSums>(),
            }
    }

    /// Bytes of memory that are in use until somebody writes the page: none once somebody does.
    pub fn waiting_bytes(&self) -> usize {
        if self.changed && !self.moving { self.bytes() } else { 0 }
    }

    /// All sums, if all are known here.
    pub fn sums(&self) -> Option<&PageSums> {
        match &self.known {
            Known::Part(_) => None,
            Known::Whole(sums) => Some(sums),
        }
    }

    /// Whether the device need not be asked about these blocks.
    #[inline]
    pub fn covers(&self, blocks: &Range<u32>) -> bool {
        match &self.known {
            Known::Part(sums) => places(sums, blocks).len() == blocks.len(),
            Known::Whole(_) => true,
        }
    }

    /// Compares blocks with what was `found`, if they are covered: the first that differs, or how
    /// many nothing is known of.
    #[inline]
    pub fn compare(&self, blocks: &Range<u32>, found_sums: &[u32]) -> Result<usize, usize> {
        let mut unknown = 0;
        let mut look = |(at, (known, found)): (usize, (u32, u32))| {
            unknown += usize::from(known == UNKNOWN);
            if known == UNKNOWN || known == found { Ok(()) } else { Err(at) }
        };
        let found = found_sums.iter().copied();
        match &self.known {
            Known::Part(sums) => {
                let known = sums[places(sums, blocks)].iter().map(|entry| entry.sum());
                known.zip(found).enumerate().try_for_each(&mut look)?;
            }
            Known::Whole(sums) => {
                let known = &sums[blocks.start as usize..blocks.end as usize];
                // Nothing that is read has the sum that says that nothing is known.
                if *known == *found_sums {
                    return Ok(0);
                }
                known.iter().copied().zip(found).enumerate().try_for_each(&mut look)?;
            }
        }
        Ok(unknown)
    }

    /// What is known of a covered block.
    pub fn get(&self, block: u32) -> u32 {
        match &self.known {
            Known::Part(sums) => {
                sums[places(sums, &(block..block + 1))].first().map_or(UNKNOWN, |entry| entry.sum())
            }
            Known::Whole(sums) => sums[block as usize],
        }
    }

    /// Sets sums of blocks: `sum` gives that of the first, the second, and so on.
    #[inline]
    pub fn set(&mut self, blocks: &Range<u32>, sum: impl Fn(usize) -> u32) {
        let part = match &mut self.known {
            Known::Whole(sums) => {
                let known = &mut sums[blocks.start as usize..blocks.end as usize];
                known.iter_mut().enumerate().for_each(|(at, known)| *known = sum(at));
                return;
            }
            Known::Part(part) => part,
        };
        let places = places(part, blocks);
        let new = blocks.clone().enumerate().map(|(at, block)| Entry::new(block, sum(at)));
        if places.len() == blocks.len() {
            part[places].iter_mut().zip(new).for_each(|(old, new)| *old = new);
        } else {
            // Not twice as much at once: what is left over cannot be used for other pages.
            let missing = blocks.len() - places.len();
            if part.len() + missing > part.capacity() {
                part.reserve_exact(missing.max(part.len() / 4 + 2));
            }
            part.splice(places, new);
        }
        if part.len() == SUMS_PER_PAGE {
            self.complete(&[UNKNOWN; SUMS_PER_PAGE]);
        }
    }

    /// Sets sums of blocks of a whole page that knows already what the device does not, which changes
    /// nothing else; whether it is one.
    #[inline]
    pub fn set_again(&mut self, blocks: &Range<u32>, new: &[u32]) -> bool {
        let Known::Whole(sums) = &mut self.known else { return false };
        if !self.changed {
            return false;
        }
        let known = &mut sums[blocks.start as usize..blocks.end as usize];
        known.copy_from_slice(&new[..known.len()]);
        (self.used, self.unread) = (true, false);
        true
    }

    /// What the device says, of the blocks that nothing else is known of.
    pub fn complete(&mut self, device: &PageSums) {
        if let Known::Part(part) = &self.known {
            let mut sums = Box::new(*device);
            part.iter().for_each(|entry| sums[entry.block() as usize] = entry.sum());
            self.known = Known::Whole(sums);
        }
    }
}

/// Where the sums of blocks are in a part, or belong.
fn places(part: &[Entry], blocks: &Range<u32>) -> Range<usize> {
    let first = part.partition_point(|entry| entry.block() < blocks.start);
    let count = part[first..].partition_point(|entry| entry.block() < blocks.end);
    first..first + count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_page_says_what_the_whole_does() {
        let mut rng = fastrand::Rng::with_seed(6);
        for _ in 0..50 {
            let device: PageSums = std::array::from_fn(|_| rng.u32(0..3));
            let (mut part, mut whole) = (Page::part(), Page::part());
            whole.complete(&device);
            let mut written = [false; SUMS_PER_PAGE];
            for _ in 0..rng.usize(0..60) {
                let start = rng.usize(0..SUMS_PER_PAGE);
                let end = (start + rng.usize(1..40)).min(SUMS_PER_PAGE);
                let blocks = start as u32..end as u32;
                let sums: Vec<u32> = blocks.clone().map(|_| rng.u32(0..5)).collect();
                part.set(&blocks, |at| sums[at]);
                whole.set(&blocks, |at| sums[at]);
                written[start..end].fill(true);
                let start = rng.usize(0..SUMS_PER_PAGE);
                let end = (start + rng.usize(1..3)).min(SUMS_PER_PAGE);
                let blocks = start as u32..end as u32;
                let covered = written[start..end].iter().all(|written| *written);
                assert_eq!(part.covers(&blocks), covered || part.sums().is_some());
                let found = [rng.u32(1..5); 2];
                if part.covers(&blocks) {
                    let found = &found[..blocks.len()];
                    assert_eq!(part.compare(&blocks, found), whole.compare(&blocks, found));
                    assert_eq!(part.get(blocks.start), whole.get(blocks.start));
                }
            }
            part.complete(&device);
            assert_eq!(part.sums(), whole.sums());
        }
    }

    #[test]
    fn a_page_that_is_written_from_end_to_end_is_whole() {
        let mut page = Page::part();
        for block in 0..SUMS_PER_PAGE as u32 {
            assert!(page.sums().is_none());
            page.set(&(block..block + 1), |_| block + 1);
        }
        assert_eq!(page.sums().unwrap()[9], 10);
        assert_eq!(page.compare(&(3..5), &[4, 6]), Err(1));
    }
}
