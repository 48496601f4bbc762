//! The pages in memory, and who writes blocks of which, in lanes: requests look at and change them beside
//! one another.

use super::page::Page;
use super::words;
use crate::format::sums::SUMS_PER_PAGE;
use crate::meta::bits::word_mask;
use crate::meta::ids::IdMap;
use crate::meta::lanes::{LANES, Lane};
use crate::sabotage::{self, Bug};
use std::ops::Range;
use std::sync::MutexGuard;

/// All of them. What is called with `&mut self` is of who has the state alone.
pub(super) struct Pages {
    lanes: Box<[Lane<Pile>]>,
}

/// Those of a lane.
#[derive(Debug, Default)]
pub(super) struct Pile {
    pages: IdMap<Page>,
    /// Blocks claimed, by page.
    claims: IdMap<Claims>,
    /// What requests have found beside one another: pages, and blocks that were right.
    pub hits: u64,
    pub verified: u64,
}

/// Claims of blocks of a page.
#[derive(Debug, Default)]
struct Claims {
    blocks: [u64; SUMS_PER_PAGE.div_ceil(64)],
    /// One for each write.
    count: u32,
}

impl Claims {
    fn has(&self, blocks: &Range<u32>) -> bool {
        words(blocks).any(|word| self.blocks[word] & word_mask(blocks, word) != 0)
    }
}

impl Pile {
    #[inline]
    pub fn page(&mut self, number: u32) -> Option<&mut Page> {
        self.pages.get_mut(&number)
    }

    /// Claims blocks that nobody has claimed, of a page that nobody is writing; whether they were.
    #[inline]
    pub fn claim(&mut self, number: u32, blocks: &Range<u32>) -> bool {
        if self.pages.get(&number).is_some_and(|page| page.moving) {
            return false;
        }
        let claims = self.claims.entry(number).or_default();
        if claims.has(blocks) && !sabotage::is(Bug::ClaimTwice) {
            return false;
        }
        words(blocks).for_each(|word| claims.blocks[word] |= word_mask(blocks, word));
        claims.count += 1;
        true
    }

    /// Gives claimed blocks back.
    #[inline]
    pub fn unclaim(&mut self, number: u32, blocks: &Range<u32>) {
        let Some(claims) = self.claims.get_mut(&number) else { return };
        words(blocks).for_each(|word| claims.blocks[word] &= !word_mask(blocks, word));
        claims.count -= 1;
        if claims.count == 0 {
            self.claims.remove(&number);
        }
    }
}

impl Pages {
    pub fn new() -> Self {
        Self { lanes: Lane::all() }
    }

    /// What is beside a page, and the page.
    #[inline]
    pub fn lock(&self, number: u32) -> MutexGuard<'_, Pile> {
        self.lanes[number as usize % LANES].lock()
    }

    #[inline]
    fn pile(&mut self, number: u32) -> &mut Pile {
        self.lanes[number as usize % LANES].get_mut()
    }

    #[inline]
    pub fn get(&mut self, number: u32) -> Option<&Page> {
        self.pile(number).pages.get(&number)
    }

    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut Page> {
        self.pile(number).page(number)
    }

    /// Puts a page into memory that is not there.
    pub fn insert(&mut self, number: u32, page: Page) {
        self.pile(number).pages.insert(number, page);
    }

    pub fn remove(&mut self, number: u32) -> Option<Page> {
        self.pile(number).pages.remove(&number)
    }

    /// Whether anybody writes a block of the page.
    pub fn is_claimed(&mut self, number: u32) -> bool {
        self.pile(number).claims.contains_key(&number)
    }

    /// Pages that requests have found, and blocks that were right.
    pub fn counts(&self) -> (u64, u64) {
        self.lanes.iter().fold((0, 0), |(hits, verified), lane| {
            let pile = lane.lock();
            (hits + pile.hits, verified + pile.verified)
        })
    }
}
