//! Which pages are in memory: loading them, writing what the device does not know, and forgetting.

use super::groups::{bit, group_of, leader_of};
use super::page::Page;
use super::{LOOKS, Need, Sums, Who};
use crate::format::sums::{PageSums, SUMS_PER_PAGE, Stored, StoredSums, UNKNOWN};
use crate::limits::SUMS_WINDOW;
use crate::sabotage::{self, Bug};
use std::ops::Range;

/// Pages that one look for a victim passes by.
const CLOCK_LOOKS: usize = 128;
/// As [`CLOCK_LOOKS`], of a write that made its page larger.
const CLOCK_LOOKS_FEW: usize = 8;
/// Pages written together to make room, with less and with more memory.
const WRITE_MIN: usize = 16;
const WRITE_MAX: usize = 256;
/// Times that pages are not written to make room after that has failed.
const WRITE_PAUSE: u32 = 64;

const NOTHING: PageSums = [UNKNOWN; SUMS_PER_PAGE];

impl Sums {
    /// Pages around `page`, itself among them, that are loaded together: where memory is full, and it
    /// is not behind the last ones, it is alone, as its neighbours would only push out others.
    pub fn window(&self, page: u32) -> Range<u32> {
        if self.bytes >= self.capacity && page != self.behind {
            return page..page + 1;
        }
        let start = page / SUMS_WINDOW * SUMS_WINDOW;
        start..(start + SUMS_WINDOW).min(self.count)
    }

    /// Of these pages, whose groups are known, the ones to be read by the caller, who says then what
    /// they are.
    pub fn start_loading(&mut self, pages: Range<u32>) -> Vec<u32> {
        let mut reading = Vec::new();
        self.behind = pages.end;
        for number in pages {
            let is_whole = self.pages.get(number).is_some_and(|page| page.sums().is_some());
            let Some(group) = self.groups.get(&group_of(number)) else { continue };
            if is_whole || self.loading.contains(&number) {
                continue;
            }
            if group.stale & bit(number) != 0 {
                let unread = group.unread;
                self.complete(number, &NOTHING, unread);
                continue;
            }
            self.loading.push(number);
            reading.push(number);
        }
        reading
    }

    /// Whether the pages can be read now without waiting for anybody.
    pub fn can_load(&self, pages: Range<u32>) -> bool {
        pages
            .into_iter()
            .all(|page| self.groups.contains_key(&group_of(page)) && !self.loading.contains(&page))
    }

    /// Whether somebody reads the page.
    pub fn is_loading(&self, page: u32) -> bool {
        self.loading.contains(&page)
    }

    /// The reading of these pages was given up.
    pub fn not_loaded(&mut self, pages: &[u32]) {
        self.loading.retain(|page| !pages.contains(page));
    }

    /// What a page that was read says; `None` if reading it failed. `fence` is the next fence number.
    pub fn loaded(&mut self, number: u32, stored: Option<&Stored>, fence: u64) {
        self.loading.retain(|page| *page != number);
        self.counters.misses += 1;
        if matches!(stored.map(|stored| &stored.sums), Some(StoredSums::Damaged(_)) | None) {
            self.counters.untrusted += 1;
            // More may have been known of it when those began who read now.
            self.learn_from = fence;
        }
        // What was known of it may have been forgotten meanwhile.
        let group = self.groups.get(&group_of(number));
        let stale = group.is_none_or(|group| group.stale & bit(number) != 0);
        match stored.map(|stored| &stored.sums) {
            Some(StoredSums::Known(sums)) if !stale => self.complete(number, sums, false),
            _ => self.complete(number, &NOTHING, stored.is_none()),
        }
    }

    /// The page is whole in memory, with what the `device` says of what is not known.
    fn complete(&mut self, number: u32, device: &PageSums, unread: bool) {
        self.make_page(number);
        self.change(number, |page| {
            page.complete(device);
            page.unread = unread && !page.changed;
        });
    }

    /// The page is in memory, if with nothing.
    pub(super) fn make_page(&mut self, number: u32) {
        if self.pages.get(number).is_none() {
            let page = Page::part();
            self.bytes += page.bytes();
            self.pages.insert(number, page);
            self.ring.push_back(number);
        }
    }

    /// # Errors
    /// That room must be made for what a write will make known: by one, while the others go on, and
    /// wait only if it becomes much more.
    pub(super) fn check_room(&self, who: Who) -> Result<(), Need> {
        let (some, most) = (self.capacity / 8 * 6, self.capacity / 8 * 7);
        if self.changed < some || who == Who::Served {
            return Ok(());
        }
        let is_seen_to = self.making_room || (self.asked_for_room && who == Who::Passing);
        match self.changed {
            changed if is_seen_to && changed < most => Ok(()),
            _ if self.making_room => Err(Need::Wait),
            _ => Err(Need::Room),
        }
    }

    /// Somebody was told [`Need::Room`]: the others need not be told as well.
    pub fn ask_for_room(&mut self) {
        self.asked_for_room = true;
    }

    /// Begins to make room; `false` if somebody does.
    pub fn start_making_room(&mut self) -> bool {
        !std::mem::replace(&mut self.making_room, true)
    }

    /// Room was made, or could not be.
    pub fn end_making_room(&mut self) {
        (self.making_room, self.asked_for_room) = (false, false);
    }

    /// Whether writing pages to make room has failed a short while ago.
    pub fn pauses_writing(&mut self) -> bool {
        let pauses = self.pause > 0;
        self.pause = self.pause.saturating_sub(1);
        pauses
    }

    /// Some pages to be written by the caller, though their groups stay as they are: those that know
    /// what the device does not. Nobody changes them until [`Sums::pages_written`].
    pub fn start_writing(&mut self) -> Vec<u32> {
        // Those of which a part is known are read for that, and take memory meanwhile.
        let most = (self.capacity / 4 / size_of::<PageSums>()).clamp(WRITE_MIN, WRITE_MAX);
        let mut writing = Vec::new();
        let mut passed = Vec::new();
        for _ in 0..self.ring.len().min(LOOKS) {
            if writing.len() == most {
                break;
            }
            let Some(number) = self.ring.pop_front() else { break };
            let is_held = self.pages.is_claimed(number) || self.loading.contains(&number);
            let Some(page) = self.pages.get(number) else { continue };
            let group = self.groups.get(&group_of(number));
            let group_moves = group.is_none_or(|group| group.moving);
            if page.changed && !page.moving && !group_moves && !is_held {
                self.change(number, |page| {
                    page.moving = true;
                    page.brief = page.sums().is_none();
                });
                writing.push(number);
            } else {
                passed.push(number);
            }
        }
        self.ring.extend(passed);
        // As they lie on the device.
        writing.sort_unstable();
        writing
    }

    /// Of pages being written those that must be read first.
    pub fn parts_of(&mut self, pages: &[u32]) -> Vec<u32> {
        pages.iter().flat_map(|page| self.start_loading(*page..*page + 1)).collect()
    }

    /// Of pages being written the groups that must be opened first.
    pub fn closed_groups(&self, pages: &[u32]) -> Vec<u32> {
        let mut groups: Vec<_> = pages.iter().map(|page| group_of(*page)).collect();
        groups.dedup();
        groups.retain(|group| self.groups.get(group).is_some_and(|group| group.must_open()));
        if sabotage::is(Bug::WriteFreshPages) { Vec::new() } else { groups }
    }

    /// Begins to open a group of pages being written, of which the caller may have the leader: the
    /// sums of that. `None` if that cannot be now.
    pub fn start_opening_for(&mut self, group: u32, pages: &[u32]) -> Option<Box<PageSums>> {
        let leader = leader_of(group);
        // A writer may have opened it meanwhile.
        let known = self.groups.get(&group).filter(|group| group.must_open())?;
        let held = self.pages.get(leader).is_none_or(|page| page.moving);
        if known.moving || self.loading.contains(&leader) || (held && !pages.contains(&leader)) {
            return None;
        }
        let sums = Box::new(*self.pages.get(leader)?.sums()?);
        self.groups.get_mut(&group)?.moving = true;
        Some(sums)
    }

    /// Whether all of the pages are of groups that are open: they may be written before what they say
    /// is durable.
    pub fn are_open(&self, pages: &[u32]) -> bool {
        let is_open = |page: &u32| self.group_is_open(*page);
        pages.iter().all(is_open)
    }

    fn group_is_open(&self, page: u32) -> bool {
        let group = self.groups.get(&group_of(page));
        group.is_some_and(|group| group.state == super::groups::State::Open)
    }

    /// The sums of pages being written, and whether each is the leader of an open group. Those of
    /// which that cannot be said are left out.
    pub fn pages_to_write(&mut self, pages: &[u32]) -> Vec<(u32, Box<PageSums>, bool)> {
        let parts = pages.iter().filter_map(|number| {
            let group = self.groups.get(&group_of(*number))?;
            let held = group.moving && *number == leader_of(group_of(*number));
            let unopened = group.must_open() && !sabotage::is(Bug::WriteFreshPages);
            let says = self.group_is_open(*number) && *number == leader_of(group_of(*number));
            let sums = self.pages.get(*number)?.sums()?;
            (!unopened && !held).then(|| (*number, Box::new(*sums), says))
        });
        parts.collect()
    }

    /// Pages that were to be written: writing these `tried` ones was begun, and is `done` or has failed.
    pub fn pages_written(&mut self, pages: &[u32], tried: &[u32], done: bool) {
        self.pause = if done { 0 } else { WRITE_PAUSE };
        for number in pages {
            let is_tried = tried.binary_search(number).is_ok();
            let is_written = done && is_tried;
            self.change(*number, |page| {
                page.moving = false;
                if is_written {
                    // Who needs it soon writes, and does not have to read it for that.
                    (page.changed, page.used) = (false, false);
                }
            });
            if let Some(group) = self.groups.get_mut(&group_of(*number)) {
                match (is_written, is_tried) {
                    (true, _) => group.page_written(*number),
                    (false, true) => group.page_tried(*number),
                    (false, false) => {}
                }
            }
            // As a whole page it would take the memory of hundreds of sums, once one is written to it.
            let brief = self.pages.get(*number).is_some_and(|page| page.brief && !page.changed);
            if brief && !self.is_held(*number, &[]) {
                self.forget(*number, 0);
            } else {
                self.ring.push_back(*number);
            }
        }
    }

    /// Whether so much is known that the device does not know that nobody may add to it.
    pub fn is_crowded(&self) -> bool {
        !self.read_only && self.changed >= self.capacity / 8 * 7
    }

    /// Forgets pages, but none of `keep`, until few enough are left; with `all`, also those that
    /// know what the device does not. Who reads under a fence number below `fence`, the next one,
    /// must not teach those anew what they held before. Whether there are still too many.
    pub fn shrink(&mut self, all: bool, keep: &[u32], fence: u64) -> bool {
        self.look_at_ring(CLOCK_LOOKS, all, keep, fence);
        self.bytes > self.capacity
    }

    /// As [`Sums::shrink`], a few pages that the device has.
    #[inline]
    pub fn forget_some(&mut self) {
        if self.bytes > self.capacity {
            self.look_at_ring(CLOCK_LOOKS_FEW, false, &[], 0);
        }
    }

    fn look_at_ring(&mut self, mut looks: usize, all: bool, keep: &[u32], fence: u64) {
        let all = all || self.read_only;
        while self.bytes > self.capacity && looks > 0 {
            looks -= 1;
            let Some(number) = self.ring.pop_front() else { break };
            let Some(page) = self.pages.get_mut(number) else { continue };
            let used = std::mem::take(&mut page.used) && !(all && page.changed);
            let changed = page.changed;
            if used || (changed && !all) || self.is_held(number, keep) {
                self.ring.push_back(number);
                continue;
            }
            self.forget(number, fence);
        }
    }

    fn is_held(&mut self, number: u32, keep: &[u32]) -> bool {
        let moving = self.pages.get(number).is_some_and(|page| page.moving);
        let group_moves = self.groups.get(&group_of(number)).is_some_and(|group| group.moving);
        let in_use = self.pages.is_claimed(number) || self.loading.contains(&number);
        moving || group_moves || in_use || keep.contains(&number)
    }

    fn forget(&mut self, number: u32, fence: u64) {
        let Some(page) = self.pages.remove(number) else { return };
        self.bytes -= page.bytes();
        if !page.changed {
            return;
        }
        self.changed -= page.waiting_bytes();
        self.learn_from = self.learn_from.max(fence);
        if let Some(group) = self.groups.get_mut(&group_of(number))
            && group.state != super::groups::State::Closed
            && !sabotage::is(Bug::ForgetKeepsPage)
        {
            // What the device says is of before.
            group.stale |= bit(number);
        }
    }

    /// Forgets all pages that are not in use, as if memory were full: for tests.
    pub fn forget_all(&mut self, fence: u64) {
        let capacity = std::mem::replace(&mut self.capacity, 0);
        for _ in 0..2 {
            self.look_at_ring(self.ring.len(), true, &[], fence);
        }
        self.capacity = capacity;
    }
}
