//! Checksums of data blocks in memory: pages of them, as the device has them and as they are by
//! now. `docs/format.md`, section 21, says why no crash makes one wrong.
//!
//! Blocks being written are *claimed*, each by one write at a time: of two in flight together nobody
//! could say which is the last. A claim needs that the block's group is open (`groups`), and no page
//! in memory: what is written to a page that nobody read is kept until the page is written
//! (`memory`). A page that is forgotten while it knows more than the device has lost that, and
//! nothing else.

mod groups;
mod memory;
mod page;
mod pages;

use super::ids::IdMap;
use crate::format::sums::{SUMS_PER_PAGE, UNKNOWN};
use crate::format::{Geometry, RegionKind};
use crate::info::ChecksumInfo;
use crate::limits::{SUMS_CACHE_BYTES, SUMS_CACHE_MIN_BYTES};
use crate::units::BLOCK_BYTES;
use groups::Group;
pub use groups::{Closed, Closing, leader_of};
use page::Page;
use pages::Pages;
use std::collections::VecDeque;
use std::ops::Range;

/// Pages or groups looked at by one call, which bounds how long it holds the metadata lock.
const LOOKS: usize = 1024;

/// What is in the way of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The page is not in memory: load it.
    Page(u32),
    /// The group of this page is not open on the device, or not known: open it.
    Group(u32),
    /// Too much is known that the device does not know: write some.
    Room,
    /// Somebody works on the page or its group, or writes the blocks: wait for a change.
    Wait,
}

/// Who claims blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// One that may not wait: it hands over to one that may.
    Passing,
    /// One that may wait.
    Waiting,
    /// One that has made room, or tried to.
    Served,
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
    pages: Pages,
    groups: IdMap<Group>,
    /// Pages being read.
    loading: Vec<u32>,
    /// Groups whose leaders are being read.
    loading_groups: Vec<u32>,
    /// Pages in memory, for the choice of one to write or to forget.
    ring: VecDeque<u32>,
    /// Groups to be closed some time.
    busy: VecDeque<u32>,
    /// Groups that are open on the device.
    open: usize,
    /// Bytes of memory there may be.
    capacity: usize,
    /// Nothing can be written: what is learnt is kept as long as there is room.
    read_only: bool,
    /// Bytes of the pages in memory, and of those that know what the device does not, but for those being
    /// written.
    bytes: usize,
    changed: usize,
    /// Somebody writes pages to make room.
    making_room: bool,
    /// Somebody was told to have room made.
    asked_for_room: bool,
    /// Times yet that pages are not written to make room.
    pause: u32,
    /// The page behind the last ones loaded.
    behind: u32,
    /// Reads with a lower fence number learn nothing: since they began a write has failed, or what
    /// was known of one was forgotten.
    learn_from: u64,
    /// Time of the last look at the clock.
    now_ns: u64,
    /// What has been counted; memory is not.
    pub counters: ChecksumInfo,
}

/// Words of a bitmap of a page that have a bit of these blocks.
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
            Box::new(Self::of(data, count, SUMS_CACHE_BYTES as usize))
        })
    }

    fn of(data: u64, count: u32, capacity: usize) -> Self {
        Self {
            data,
            count,
            pages: Pages::new(),
            groups: IdMap::default(),
            loading: Vec::new(),
            loading_groups: Vec::new(),
            ring: VecDeque::new(),
            busy: VecDeque::new(),
            open: 0,
            capacity,
            read_only: false,
            bytes: 0,
            changed: 0,
            making_room: false,
            asked_for_room: false,
            pause: 0,
            behind: 0,
            learn_from: 0,
            now_ns: 0,
            counters: ChecksumInfo::default(),
        }
    }

    /// Changes how much memory they may take.
    pub fn set_capacity(&mut self, bytes: u64) {
        self.capacity = bytes.max(SUMS_CACHE_MIN_BYTES) as usize;
    }

    /// Whether nothing can be written.
    pub fn set_read_only(&mut self, read_only: bool) {
        self.read_only = read_only;
    }

    /// The time now. If the clock was set back, what changed by the time before changed now: its groups
    /// would be left open until the clock is there again.
    pub fn tick(&mut self, now_ns: u64) {
        if now_ns < self.now_ns {
            self.groups.values_mut().for_each(|group| group.changed_by(now_ns));
        }
        self.now_ns = now_ns;
    }

    /// Blocks of a page, from the start of the data region.
    pub fn blocks_of(page: u32) -> Range<u64> {
        let first = u64::from(page) * SUMS_PER_PAGE as u64;
        first..first + SUMS_PER_PAGE as u64
    }

    /// Pages of blocks.
    pub fn pages_at(&self, address: u64, blocks: usize) -> Range<u32> {
        let per_page = SUMS_PER_PAGE as u64;
        let first = (address - self.data) / BLOCK_BYTES;
        (first / per_page) as u32..(first + blocks as u64).div_ceil(per_page) as u32
    }

    /// Whether the device need not be asked about these blocks.
    #[inline]
    pub fn knows(&self, address: u64, blocks: usize) -> bool {
        split(self.data, address, blocks).all(|(number, blocks)| {
            let mut pile = self.pages.lock(number);
            let Some(page) = pile.page(number) else { return false };
            page.used = true;
            page.covers(&blocks)
        })
    }

    /// As [`Sums::check`], beside other requests, up to the first block that is in doubt or of which
    /// nothing is known: how many were right.
    #[inline]
    pub fn check_beside(&self, address: u64, found: &[u32]) -> usize {
        let mut done = 0;
        for (number, blocks) in split(self.data, address, found.len()) {
            let mut pile = self.pages.lock(number);
            let found = &found[done..done + blocks.len()];
            let right = pile
                .page(number)
                .is_some_and(|page| page.covers(&blocks) && page.compare(&blocks, found) == Ok(0));
            if !right {
                break;
            }
            pile.hits += 1;
            pile.verified += found.len() as u64;
            done += found.len();
        }
        done
    }

    /// Whether more is in memory than there is room for.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.bytes > self.capacity
    }

    /// Compares blocks read from `address` on with what is known, and learns what is not: how many that
    /// were. They were read under the fence number `fence`.
    ///
    /// # Errors
    /// The first [`Doubt`].
    #[inline]
    pub fn check(&mut self, address: u64, found: &[u32], fence: u64) -> Result<usize, Doubt> {
        let may_learn = fence >= self.learn_from;
        let (mut done, mut learnt) = (0, 0);
        for (number, blocks) in split(self.data, address, found.len()) {
            let Some(page) = self.pages.get_mut(number) else { return Err(Doubt::Page(number)) };
            page.used = true;
            if !page.covers(&blocks) {
                return Err(Doubt::Page(number));
            }
            let found = &found[done..done + blocks.len()];
            let new = page.compare(&blocks, found).map_err(|block| Doubt::Block(done + block))?;
            self.counters.hits += 1;
            self.counters.unknown += new as u64;
            self.counters.verified += (found.len() - new) as u64;
            done += found.len();
            if new > 0 && may_learn && !page.unread {
                learnt += new;
                self.set(number, &blocks, |at| found[at]);
            }
        }
        Ok(learnt)
    }

    /// What is known of a block whose page is in memory.
    pub fn known(&mut self, address: u64) -> Option<u32> {
        let (number, blocks) = split(self.data, address, 1).next()?;
        let sum = self.pages.get(number)?.get(blocks.start);
        (sum != UNKNOWN).then_some(sum)
    }

    /// What is known of blocks whose content is copied elsewhere, put over what was `found`: a
    /// damaged one stays one in its new place.
    ///
    /// # Errors
    /// The first [`Doubt`]: of a block the known sum is in place then, and of those behind it none.
    pub fn carry(&mut self, address: u64, found: &mut [u32]) -> Result<(), Doubt> {
        let parts = split(self.data, address, found.len());
        for (number, blocks) in parts.clone() {
            let page = self.pages.get_mut(number).ok_or(Doubt::Page(number))?;
            page.used = true;
            if !page.covers(&blocks) {
                return Err(Doubt::Page(number));
            }
        }
        let mut found = found.iter_mut().enumerate();
        for (number, blocks) in parts {
            let Some(page) = self.pages.get(number) else { continue };
            for (block, (index, found)) in blocks.zip(&mut found) {
                match page.get(block) {
                    UNKNOWN => self.counters.unknown += 1,
                    known if known == *found => self.counters.verified += 1,
                    known => {
                        *found = known;
                        return Err(Doubt::Block(index));
                    }
                }
            }
        }
        Ok(())
    }

    /// Claims blocks that are about to be written, or none of them; also beside other requests.
    ///
    /// # Errors
    /// What must come first.
    #[inline]
    pub fn claim(&self, address: u64, blocks: usize, who: Who) -> Result<(), Need> {
        self.check_room(who)?;
        let mut claimed = 0;
        for (number, part) in split(self.data, address, blocks) {
            if let Err(need) = self.group_need(number).and_then(|()| self.claim_part(number, &part))
            {
                self.unclaim(address, claimed);
                return Err(need);
            }
            claimed += part.len();
        }
        Ok(())
    }

    #[inline]
    fn claim_part(&self, number: u32, blocks: &Range<u32>) -> Result<(), Need> {
        if self.pages.lock(number).claim(number, blocks) { Ok(()) } else { Err(Need::Wait) }
    }

    /// Claims a block that is about to be read again, so that nobody writes it meanwhile, and its page
    /// stays in memory.
    ///
    /// # Errors
    /// What must come first.
    pub fn claim_to_read(&mut self, address: u64) -> Result<(), Need> {
        for (number, blocks) in split(self.data, address, 1) {
            match self.pages.get(number) {
                Some(page) if page.covers(&blocks) => self.claim_part(number, &blocks)?,
                _ if self.loading.contains(&number) => return Err(Need::Wait),
                _ => return Err(Need::Page(number)),
            }
        }
        Ok(())
    }

    /// Gives claimed blocks back that were not written.
    pub fn unclaim(&self, address: u64, blocks: usize) {
        for (number, blocks) in split(self.data, address, blocks) {
            self.pages.lock(number).unclaim(number, &blocks);
        }
    }

    /// Gives claimed blocks back that were written with these sums.
    #[inline]
    pub fn written(&mut self, address: u64, sums: &[u32]) {
        let mut done = 0;
        for (number, blocks) in split(self.data, address, sums.len()) {
            self.make_page(number);
            self.set(number, &blocks, |at| sums[done + at]);
            done += blocks.len();
            self.pages.lock(number).unclaim(number, &blocks);
        }
        self.forget_some();
    }

    /// As [`Sums::written`], beside other requests, up to the first page of which more changes than these
    /// sums: how many are done.
    #[inline]
    pub fn written_beside(&self, address: u64, sums: &[u32]) -> usize {
        let mut done = 0;
        for (number, blocks) in split(self.data, address, sums.len()) {
            let mut pile = self.pages.lock(number);
            let set = self.is_noted(groups::group_of(number))
                && pile.page(number).is_some_and(|page| page.set_again(&blocks, &sums[done..]));
            if !set {
                break;
            }
            pile.unclaim(number, &blocks);
            done += blocks.len();
        }
        done
    }

    /// Gives claimed blocks back that may have been written, in part or not at all. Who reads under
    /// a fence number below `fence`, the next one, may have seen anything.
    pub fn failed(&mut self, address: u64, blocks: usize, fence: u64) {
        self.learn_from = fence;
        for (number, blocks) in split(self.data, address, blocks) {
            self.make_page(number);
            self.set(number, &blocks, |_| UNKNOWN);
            self.pages.lock(number).unclaim(number, &blocks);
        }
    }

    /// Changes a page in memory, keeping count of memory.
    #[inline]
    fn change<T>(&mut self, number: u32, change: impl FnOnce(&mut Page) -> T) -> Option<T> {
        let page = self.pages.get_mut(number)?;
        let before = (page.bytes(), page.waiting_bytes());
        let outcome = change(page);
        self.bytes = self.bytes - before.0 + page.bytes();
        self.changed = self.changed - before.1 + page.waiting_bytes();
        Some(outcome)
    }

    /// Sets sums of a page in memory that the device does not have.
    #[inline]
    fn set(&mut self, number: u32, blocks: &Range<u32>, sum: impl Fn(usize) -> u32) {
        self.change(number, |page| {
            page.set(blocks, sum);
            (page.used, page.changed, page.unread) = (true, true, false);
        });
        self.note_busy(groups::group_of(number));
    }

    /// The device does not have what is known of the page.
    fn note_changed(&mut self, number: u32) {
        if self.change(number, |page| page.changed = true).is_some() {
            self.note_busy(groups::group_of(number));
        }
    }

    /// What has been counted.
    pub fn info(&self) -> ChecksumInfo {
        let (memory, open) = (self.bytes as u64, self.open as u64);
        let (hits, verified) = self.pages.counts();
        let (hits, verified) = (self.counters.hits + hits, self.counters.verified + verified);
        ChecksumInfo { memory, open, hits, verified, ..self.counters }
    }
}

#[cfg(test)]
mod tests;
