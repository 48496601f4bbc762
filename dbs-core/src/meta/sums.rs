//! Checksums of data blocks in memory: pages of them, as the device has them and as they are by
//! now. `docs/format.md`, section 21, says why no crash makes one wrong.
//!
//! A page may be written to (its blocks, that is) only while it is *open* on the device. Blocks
//! being written are *claimed*, each by one write at a time: of two in flight together nobody could
//! say which is the last. A page that nobody claims may be closed, or forgotten; one that is
//! forgotten while open has lost what was known, and nothing else.

use super::bits::word_mask;
use super::ids::IdMap;
use crate::format::sums::{PageSums, SUMS_PER_PAGE, Stored, UNKNOWN};
use crate::format::{Geometry, RegionKind};
use crate::info::ChecksumInfo;
use crate::limits::{SUMS_CACHE_BYTES, SUMS_CACHE_MIN_BYTES, SUMS_WINDOW};
use crate::units::BLOCK_BYTES;
use std::collections::VecDeque;
use std::ops::Range;

/// Words of a bitmap with a bit for each block of a page.
const WORDS: usize = SUMS_PER_PAGE.div_ceil(64);
/// Changed pages looked at by one call, which bounds how long it holds the metadata lock.
const LOOKS: usize = 1024;
/// Fewest pages kept in memory.
const CAPACITY_MIN: usize = (SUMS_CACHE_MIN_BYTES / BLOCK_BYTES) as usize;
/// Pages that one look for a victim passes by.
const CLOCK_LOOKS: usize = 128;
/// Times that pages are not closed to make room after that has failed.
const CLOSE_PAUSE: u32 = 64;

/// What is in the way of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The page is not in memory, or is not open on the device: load it, or open it.
    Page(u32),
    /// Somebody works on the page, or writes the blocks: wait for a change.
    Wait,
}

/// Why bytes read are not taken for right at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// The page is not in memory.
    Page(u32),
    /// This one of the blocks differs from its sum: damaged, or written meanwhile.
    Block(usize),
}

/// The checksums of a store.
pub struct Sums {
    /// Byte offset of the data region.
    data: u64,
    /// Pages of the region.
    count: u32,
    pages: IdMap<Box<Page>>,
    /// Pages being read.
    loading: Vec<u32>,
    /// Pages in memory, for the choice of one to forget.
    ring: VecDeque<u32>,
    /// Pages that know what the device does not, oldest change first.
    changed: VecDeque<u32>,
    capacity: usize,
    /// Times yet that pages are not closed to make room.
    pause: u32,
    /// Reads with a lower fence number learn nothing: since they began a write has failed, or what
    /// was known of one was forgotten.
    learn_from: u64,
    /// Time of the last look at the clock.
    now_ns: u64,
    /// What has been counted; memory is not.
    pub counters: ChecksumInfo,
}

struct Page {
    sums: PageSums,
    /// Claimed blocks.
    claimed: [u64; WORDS],
    /// Claims: one for each write and page.
    claims: u32,
    /// The device says, durably, that the page says nothing.
    open: bool,
    /// Reading it failed: the device may say what is not known here, and must not be made to
    /// forget it by what is learnt.
    unread: bool,
    /// Being opened or closed.
    moving: bool,
    /// In `changed`.
    changed: bool,
    /// Used since somebody looked for a page to forget.
    used: bool,
    /// When something of it last changed.
    changed_ns: u64,
}

impl Page {
    fn new(stored: Option<&Stored>) -> Box<Self> {
        let (sums, open) = match stored {
            Some(Stored::Closed(sums)) => (**sums, false),
            Some(Stored::Blank | Stored::Open) => ([UNKNOWN; SUMS_PER_PAGE], true),
            // What it is read as the next time is not known.
            Some(Stored::Damaged(_)) | None => ([UNKNOWN; SUMS_PER_PAGE], false),
        };
        Box::new(Self {
            sums,
            claimed: [0; WORDS],
            claims: 0,
            open,
            unread: stored.is_none(),
            moving: false,
            changed: false,
            used: true,
            changed_ns: 0,
        })
    }

    fn is_claimed(&self, blocks: &Range<u32>) -> bool {
        words(blocks).any(|word| self.claimed[word] & word_mask(blocks, word) != 0)
    }

    fn set_claimed(&mut self, blocks: &Range<u32>, on: bool) {
        for word in words(blocks) {
            let mask = word_mask(blocks, word);
            match on {
                true => self.claimed[word] |= mask,
                false => self.claimed[word] &= !mask,
            }
        }
        if on {
            self.claims += 1;
        } else {
            self.claims -= 1;
        }
    }

    fn is_idle(&self) -> bool {
        self.claims == 0 && !self.moving
    }
}

fn words(blocks: &Range<u32>) -> Range<usize> {
    blocks.start as usize / 64..(blocks.end as usize).div_ceil(64)
}

/// Blocks of one page: its number, and which of it.
fn split(
    data: u64,
    address: u64,
    blocks: usize,
) -> impl Iterator<Item = (u32, Range<u32>)> + Clone {
    let per_page = SUMS_PER_PAGE as u64;
    let mut next = (address - data) / BLOCK_BYTES;
    let end = next + blocks as u64;
    std::iter::from_fn(move || {
        let (page, first) = (next / per_page, next % per_page);
        let count = (end - next).min(per_page - first);
        next += count;
        (count > 0).then_some((page as u32, first as u32..(first + count) as u32))
    })
}

impl Sums {
    /// Those of a store, none of them in memory yet; `None` if it has none.
    pub fn new(geometry: &Geometry) -> Option<Box<Self>> {
        geometry.has_sums().then(|| {
            let data = geometry.region(RegionKind::Data).offset;
            let count = geometry.needed_blocks(RegionKind::Sums);
            Box::new(Self::of(data, count, (SUMS_CACHE_BYTES / BLOCK_BYTES) as usize))
        })
    }

    fn of(data: u64, count: u32, capacity: usize) -> Self {
        Self {
            data,
            count,
            pages: IdMap::default(),
            loading: Vec::new(),
            ring: VecDeque::new(),
            changed: VecDeque::new(),
            capacity,
            pause: 0,
            learn_from: 0,
            now_ns: 0,
            counters: ChecksumInfo::default(),
        }
    }

    /// Changes how many pages are kept in memory; it is enough for any one request.
    pub fn set_capacity(&mut self, pages: usize) {
        self.capacity = pages.max(CAPACITY_MIN);
    }

    /// The time now.
    pub fn tick(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    /// Whether the pages of these blocks are in memory.
    #[inline]
    pub fn knows(&mut self, address: u64, blocks: usize) -> bool {
        split(self.data, address, blocks).all(|(page, _)| match self.pages.get_mut(&page) {
            Some(page) => {
                page.used = true;
                true
            }
            None => false,
        })
    }

    /// Compares blocks read from `address` on with what is known, and learns what is not: of how
    /// many that was. They were read under the fence number `fence`.
    ///
    /// # Errors
    /// The first [`Doubt`].
    #[inline]
    pub fn check(&mut self, address: u64, found: &[u32], fence: u64) -> Result<usize, Doubt> {
        let may_learn = fence >= self.learn_from;
        let (mut done, mut unknown) = (0, 0);
        for (number, blocks) in split(self.data, address, found.len()) {
            let Some(page) = self.pages.get_mut(&number) else { return Err(Doubt::Page(number)) };
            page.used = true;
            let known = &mut page.sums[blocks.start as usize..blocks.end as usize];
            let found = &found[done..done + known.len()];
            if *known == *found {
                self.counters.verified += found.len() as u64;
                done += found.len();
                continue;
            }
            let differs = |(known, found): (&u32, &u32)| *known != UNKNOWN && known != found;
            if let Some(block) = known.iter().zip(found).position(differs) {
                return Err(Doubt::Block(done + block));
            }
            let new = known.iter().filter(|sum| **sum == UNKNOWN).count();
            self.counters.unknown += new as u64;
            self.counters.verified += (found.len() - new) as u64;
            done += found.len();
            if page.unread {
                continue;
            }
            unknown += new;
            if may_learn {
                known.copy_from_slice(found);
                note_changed(page, number, self.now_ns, &mut self.changed);
            }
        }
        Ok(unknown)
    }

    /// What is known of a block whose page is in memory.
    pub fn known(&mut self, address: u64) -> Option<u32> {
        let (number, blocks) = split(self.data, address, 1).next()?;
        let sum = *self.pages.get(&number)?.sums.get(blocks.start as usize)?;
        (sum != UNKNOWN).then_some(sum)
    }

    /// Blocks of a page, from the start of the data region.
    pub fn blocks_of(page: u32) -> Range<u64> {
        let first = u64::from(page) * SUMS_PER_PAGE as u64;
        first..first + SUMS_PER_PAGE as u64
    }

    /// What is known of blocks whose content is copied elsewhere, put over what was `found`: a
    /// damaged one stays one in its new place.
    ///
    /// # Errors
    /// The first [`Doubt`]: of a block the known sum is in place then, and of those behind it none.
    pub fn carry(&mut self, address: u64, found: &mut [u32]) -> Result<(), Doubt> {
        let parts = split(self.data, address, found.len());
        if let Some((page, _)) = parts.clone().find(|(page, _)| !self.pages.contains_key(page)) {
            return Err(Doubt::Page(page));
        }
        let mut found = found.iter_mut().enumerate();
        for (number, blocks) in parts {
            let Some(page) = self.pages.get_mut(&number) else { continue };
            page.used = true;
            let known = &page.sums[blocks.start as usize..blocks.end as usize];
            for (known, (block, found)) in known.iter().zip(&mut found) {
                match *known {
                    UNKNOWN => self.counters.unknown += 1,
                    known if known == *found => self.counters.verified += 1,
                    known => {
                        *found = known;
                        return Err(Doubt::Block(block));
                    }
                }
            }
        }
        Ok(())
    }

    /// Claims blocks that are about to be written, or none of them.
    ///
    /// # Errors
    /// What must come first.
    #[inline]
    pub fn claim(&mut self, address: u64, blocks: usize) -> Result<(), Need> {
        self.claim_pages(address, blocks, true)
    }

    /// Claims a block that is about to be read again, so that nobody writes it meanwhile.
    ///
    /// # Errors
    /// What must come first.
    pub fn claim_to_read(&mut self, address: u64) -> Result<(), Need> {
        self.claim_pages(address, 1, false)
    }

    #[inline]
    fn claim_pages(&mut self, address: u64, blocks: usize, write: bool) -> Result<(), Need> {
        let parts = split(self.data, address, blocks);
        for (number, blocks) in parts.clone() {
            let Some(page) = self.pages.get(&number) else {
                let loading = self.loading.contains(&number);
                return Err(if loading { Need::Wait } else { Need::Page(number) });
            };
            if page.moving || page.is_claimed(&blocks) {
                return Err(Need::Wait);
            }
            if write && !page.open {
                return Err(Need::Page(number));
            }
        }
        for (number, blocks) in parts {
            if let Some(page) = self.pages.get_mut(&number) {
                page.set_claimed(&blocks, true);
                page.used = true;
            }
        }
        Ok(())
    }

    /// Gives claimed blocks back that were not written.
    pub fn unclaim(&mut self, address: u64, blocks: usize) {
        for (number, blocks) in split(self.data, address, blocks) {
            if let Some(page) = self.pages.get_mut(&number) {
                page.set_claimed(&blocks, false);
            }
        }
    }

    /// Gives claimed blocks back that were written with these sums.
    #[inline]
    pub fn written(&mut self, address: u64, sums: &[u32]) {
        let mut done = 0;
        for (number, blocks) in split(self.data, address, sums.len()) {
            let Some(page) = self.pages.get_mut(&number) else { continue };
            let count = blocks.len();
            page.sums[blocks.start as usize..blocks.end as usize]
                .copy_from_slice(&sums[done..done + count]);
            page.set_claimed(&blocks, false);
            note_changed(page, number, self.now_ns, &mut self.changed);
            done += count;
        }
    }

    /// Gives claimed blocks back that may have been written, in part or not at all. Who reads under
    /// a fence number below `fence`, the next one, may have seen anything.
    pub fn failed(&mut self, address: u64, blocks: usize, fence: u64) {
        self.learn_from = fence;
        for (number, blocks) in split(self.data, address, blocks) {
            let Some(page) = self.pages.get_mut(&number) else { continue };
            page.sums[blocks.start as usize..blocks.end as usize].fill(UNKNOWN);
            page.set_claimed(&blocks, false);
            note_changed(page, number, self.now_ns, &mut self.changed);
        }
    }

    /// Pages around `page`, itself among them, that are opened together: where memory is full, and the
    /// page before is not written to either, it is alone, as its neighbours would only push out others.
    pub fn window(&self, page: u32) -> Range<u32> {
        let before = page.checked_sub(1).and_then(|before| self.pages.get(&before));
        let in_order = before.is_some_and(|before| before.open && before.changed);
        if self.pages.len() >= self.capacity && !in_order {
            return page..page + 1;
        }
        let start = page / SUMS_WINDOW * SUMS_WINDOW;
        start..(start + SUMS_WINDOW).min(self.count)
    }

    /// Of these pages the ones to be read by the caller, who says then what they are.
    pub fn start_loading(&mut self, pages: Range<u32>) -> Vec<u32> {
        let absent = |page: &u32| !self.pages.contains_key(page) && !self.loading.contains(page);
        let pages: Vec<_> = pages.filter(absent).collect();
        self.loading.extend(&pages);
        pages
    }

    /// Whether somebody reads the page.
    pub fn is_loading(&self, page: u32) -> bool {
        self.loading.contains(&page)
    }

    /// The reading of these pages was given up.
    pub fn not_loaded(&mut self, pages: &[u32]) {
        self.loading.retain(|page| !pages.contains(page));
    }

    /// What a page that was read says; `None` if reading it failed.
    pub fn loaded(&mut self, number: u32, stored: Option<&Stored>) {
        self.loading.retain(|page| *page != number);
        if matches!(stored, Some(Stored::Open | Stored::Damaged(_)) | None) {
            self.counters.untrusted += 1;
        }
        self.pages.insert(number, Page::new(stored));
        self.ring.push_back(number);
    }

    /// Of these pages the ones to be opened by the caller: those in memory that are closed. One
    /// that could not be read is opened only if it is `wanted` itself.
    pub fn start_opening(&mut self, pages: Range<u32>, wanted: u32) -> Vec<u32> {
        let mut opening = Vec::new();
        for number in pages {
            let Some(page) = self.pages.get_mut(&number) else { continue };
            if !page.open && !page.moving && (!page.unread || number == wanted) {
                page.moving = true;
                opening.push(number);
            }
        }
        opening
    }

    /// Pages whose opening was tried: only then they are durably open.
    pub fn opened(&mut self, pages: &[u32], done: bool) {
        for number in pages {
            let Some(page) = self.pages.get_mut(number) else { continue };
            page.moving = false;
            page.open = done;
            page.unread &= !done;
            if page.unread {
                // The device may have it as it was.
                continue;
            }
            // It is to be closed again, whether or not anybody writes to it.
            note_changed(page, *number, self.now_ns, &mut self.changed);
        }
    }

    /// Some pages, at most `most`, to be closed by the caller, with their sums: those that changed
    /// and did so last at `until_ns` or before. Nobody writes to them until
    /// [`Sums::closed`].
    pub fn start_closing(&mut self, until_ns: u64, most: usize) -> Vec<(u32, Box<PageSums>)> {
        let mut closing = Vec::new();
        for _ in 0..self.changed.len().min(LOOKS) {
            if closing.len() == most {
                break;
            }
            let Some(number) = self.changed.pop_front() else { break };
            let Some(page) = self.pages.get_mut(&number) else { continue };
            if !page.is_idle() || page.changed_ns > until_ns {
                self.changed.push_back(number);
                continue;
            }
            (page.moving, page.changed) = (true, false);
            closing.push((number, Box::new(page.sums)));
        }
        closing
    }

    /// Pages whose closing was tried. If it failed nobody knows what they are on the device.
    pub fn closed(&mut self, pages: &[(u32, Box<PageSums>)], done: bool) {
        self.pause = if done { 0 } else { CLOSE_PAUSE };
        for (number, _) in pages {
            let Some(page) = self.pages.get_mut(number) else { continue };
            (page.moving, page.open) = (false, false);
            if !done {
                note_changed(page, *number, self.now_ns, &mut self.changed);
            }
        }
    }

    /// The closing of these pages was given up before any was written.
    pub fn not_closed(&mut self, pages: &[(u32, Box<PageSums>)]) {
        for (number, _) in pages {
            let Some(page) = self.pages.get_mut(number) else { continue };
            page.moving = false;
            note_changed(page, *number, self.now_ns, &mut self.changed);
        }
    }

    /// Whether closing pages to make room has failed a short while ago.
    pub fn pauses_closing(&mut self) -> bool {
        let pauses = self.pause > 0;
        self.pause = self.pause.saturating_sub(1);
        pauses
    }

    /// Forgets pages, but none of `keep`, until few enough are left; with `all`, also those that
    /// know what the device does not. Who reads under a fence number below `fence`, the next one,
    /// must not teach those anew what they held before. Whether there are still too many.
    pub fn shrink(&mut self, all: bool, keep: &[u32], fence: u64) -> bool {
        let mut looks = CLOCK_LOOKS;
        while self.pages.len() > self.capacity && looks > 0 {
            looks -= 1;
            let Some(number) = self.ring.pop_front() else { break };
            let Some(page) = self.pages.get_mut(&number) else { continue };
            if keep.contains(&number) {
                self.ring.push_back(number);
                continue;
            }
            if page.used || !page.is_idle() || (page.changed && !all) {
                page.used = false;
                self.ring.push_back(number);
                continue;
            }
            if page.changed {
                self.learn_from = fence;
                self.changed.retain(|changed| *changed != number);
            }
            self.pages.remove(&number);
        }
        self.pages.len() > self.capacity
    }

    /// What has been counted.
    pub fn info(&self) -> ChecksumInfo {
        ChecksumInfo { memory: self.pages.len() as u64 * BLOCK_BYTES, ..self.counters }
    }
}

#[inline]
fn note_changed(page: &mut Page, number: u32, now_ns: u64, changed: &mut VecDeque<u32>) {
    page.changed_ns = now_ns;
    if !page.changed {
        page.changed = true;
        changed.push_back(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::BlockFault;

    const PAGE_BYTES: u64 = SUMS_PER_PAGE as u64 * BLOCK_BYTES;

    fn with_pages(count: u32, stored: Option<&Stored>) -> Sums {
        let mut sums = Sums::of(0, 1000, CAPACITY_MIN);
        let pages = sums.start_loading(0..count);
        assert!(sums.is_loading(0) && sums.start_loading(0..count).is_empty());
        pages.iter().for_each(|page| sums.loaded(*page, stored));
        assert!(!sums.is_loading(0));
        sums
    }

    #[test]
    fn a_page_that_was_not_read_is_neither_learnt_nor_closed() {
        let mut sums = with_pages(2, None);
        assert_eq!(sums.check(0, &[5, 6], u64::MAX), Ok(0));
        assert_eq!(sums.check(0, &[7, 8], u64::MAX), Ok(0));
        assert!(sums.start_closing(u64::MAX, 9).is_empty());
        // A neighbour is left alone, and the page itself as long as it cannot be opened.
        assert_eq!(sums.claim(0, 1), Err(Need::Page(0)));
        assert_eq!(sums.start_opening(0..2, 0), [0]);
        sums.opened(&[0], false);
        assert!(sums.start_closing(u64::MAX, 9).is_empty());
        assert_eq!(sums.start_opening(0..2, 0), [0]);
        sums.opened(&[0], true);
        assert_eq!(sums.claim(0, 1), Ok(()));
        sums.written(0, &[5]);
        assert_eq!(sums.check(0, &[6, 6], u64::MAX), Err(Doubt::Block(0)));
        assert_eq!(sums.check(0, &[5, 6], u64::MAX), Ok(1));
        let closing = sums.start_closing(u64::MAX, 9);
        assert_eq!(
            (closing.len(), closing[0].0, closing[0].1[..3].to_vec()),
            (1, 0, vec![5, 6, 0])
        );
        // One that was read, but damaged, is learnt.
        let mut sums = with_pages(1, Some(&Stored::Damaged(BlockFault::Checksum)));
        assert_eq!(sums.check(0, &[5, 6], u64::MAX), Ok(2));
        assert_eq!(sums.start_closing(u64::MAX, 9).len(), 1);
    }

    #[test]
    fn neighbours_are_opened_too_unless_they_push_out_others() {
        let mut sums = with_pages(CAPACITY_MIN as u32 - 1, Some(&Stored::Open));
        assert_eq!(sums.window(100), 96..112);
        sums.start_loading(500..501);
        sums.loaded(500, Some(&Stored::Open));
        assert_eq!(
            (sums.window(100), sums.window(501), sums.window(0)),
            (100..101, 501..502, 0..1)
        );
        let last = 500 * PAGE_BYTES;
        assert_eq!(sums.claim(last, 1), Ok(()));
        sums.written(last, &[5]);
        assert_eq!(sums.window(501), 496..512, "what is written in order goes on so");
    }

    #[test]
    fn a_page_given_up_is_loaded_by_the_next() {
        let mut sums = Sums::of(0, 1000, CAPACITY_MIN);
        assert_eq!(sums.start_loading(0..2), [0, 1]);
        sums.not_loaded(&[0]);
        assert_eq!((sums.claim(0, 1), sums.is_loading(1)), (Err(Need::Page(0)), true));
        assert_eq!(sums.start_loading(0..2), [0]);
    }

    #[test]
    fn what_was_forgotten_is_not_learnt_from_before() {
        let count = CAPACITY_MIN as u32 + 1;
        let last = count - 1;
        let mut sums = with_pages(count, Some(&Stored::Open));
        for page in 0..last {
            assert_eq!(sums.claim(u64::from(page) * PAGE_BYTES, 1), Ok(()));
            sums.written(u64::from(page) * PAGE_BYTES, &[9]);
        }
        // All others know what the device does not, and the last one is needed.
        for _ in 0..4 {
            assert!(sums.shrink(false, &[last], 7));
        }
        assert_eq!(sums.learn_from, 0);
        for _ in 0..4 {
            sums.shrink(true, &[last], 7);
        }
        assert_eq!(sums.pages.len(), CAPACITY_MIN);
        assert!(sums.pages.contains_key(&last));
        let gone: Vec<_> = (0..last).filter(|page| !sums.pages.contains_key(page)).collect();
        assert_eq!(gone.len(), 1);
        let address = u64::from(gone[0]) * PAGE_BYTES;
        assert_eq!(sums.start_loading(gone[0]..gone[0] + 1), gone);
        sums.loaded(gone[0], Some(&Stored::Open));
        // The first began before.
        for (found, fence) in [(8, 6), (9, 7), (9, 8)] {
            assert!(sums.check(address, &[found], fence).is_ok());
        }
        assert_eq!(sums.check(address, &[8], 8), Err(Doubt::Block(0)));
    }

    #[test]
    fn after_a_page_was_not_closed_room_is_made_without_that() {
        let mut sums = with_pages(1, Some(&Stored::Open));
        assert_eq!(sums.check(0, &[5], 0), Ok(1));
        assert!(!sums.pauses_closing());
        let closing = sums.start_closing(u64::MAX, 9);
        sums.closed(&closing, false);
        assert!((0..CLOSE_PAUSE).all(|_| sums.pauses_closing()));
        assert!(!sums.pauses_closing());
        let closing = sums.start_closing(u64::MAX, 9);
        assert_eq!(closing.len(), 1);
        sums.closed(&closing, false);
        let closing = sums.start_closing(u64::MAX, 9);
        sums.closed(&closing, true);
        assert!(!sums.pauses_closing());
    }

    #[test]
    fn a_block_that_differs_is_carried_with_the_sum_that_is_known() {
        let mut sums = with_pages(1, Some(&Stored::Open));
        assert_eq!(sums.check(0, &[5, 6], 0), Ok(2));
        let mut found = [5, 7, 8];
        assert_eq!(sums.carry(0, &mut found), Err(Doubt::Block(1)));
        assert_eq!(found, [5, 6, 8]);
        assert_eq!(sums.carry(0, &mut found), Ok(()));
        assert_eq!(sums.carry(PAGE_BYTES, &mut found), Err(Doubt::Page(1)));
    }
}
