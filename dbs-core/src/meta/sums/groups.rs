//! Groups of pages: what the device says of each, and how they are opened and closed.
//!
//! A block is written only while its group is open, or nothing was ever said of any of its blocks
//! (*fresh*). Pages are written at any time to an open group. `docs/format.md`, section 21, has the
//! rules and the argument.

use super::{LOOKS, Need, Sums};
use crate::format::sums::{PAGES_PER_GROUP, PageSums, Stored, StoredSums};
use crate::sabotage::{self, Bug};
use std::collections::HashSet;
use std::ops::Range;

/// All pages of a group.
const ALL: u16 = u16::MAX;
const _: () = assert!(PAGES_PER_GROUP == u16::BITS);

/// What the device durably says of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// None of its pages was ever written: nothing is said, as if it were open.
    Fresh,
    /// Its pages count.
    Closed,
    /// None of its pages counts after a crash.
    Open,
}

/// A group that somebody has asked about.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) state: State,
    /// Being opened or closed.
    pub(super) moving: bool,
    /// Its leader could not be read: see [`Page::unread`](super::Page).
    pub(super) unread: bool,
    /// Pages of which nothing is believed that the device says: they were open at a crash, or what
    /// was known of one was forgotten before the device had it.
    pub(super) stale: u16,
    /// Of those the ones that say nothing, as they were never written.
    pub(super) blank: u16,
    /// In `busy`.
    queued: bool,
    /// When something of it last changed.
    changed_ns: u64,
}

impl Group {
    /// Whether its leader must not be written closed as it is: pages would count that must not.
    pub(super) fn has_doubts(&self) -> bool {
        self.unread || self.stale & !self.blank != 0
    }

    /// Nothing of it changed later than this.
    pub(super) fn changed_by(&mut self, now_ns: u64) {
        self.changed_ns = self.changed_ns.min(now_ns);
    }

    /// Whether none of its pages may be written yet.
    pub(super) fn must_open(&self) -> bool {
        match self.state {
            State::Open => false,
            State::Fresh => true,
            State::Closed => self.has_doubts(),
        }
    }

    /// The device has the page as it is in memory.
    pub(super) fn page_written(&mut self, page: u32) {
        self.page_tried(page);
        self.stale &= !bit(page);
    }

    /// Writing the page was tried: the device may have it now, or a part, and what it says may get old.
    pub(super) fn page_tried(&mut self, page: u32) {
        self.blank &= !bit(page);
    }
}

/// What to write to close a group.
pub struct Closing {
    /// Its number.
    pub group: u32,
    /// Whether it is open: else it has only learnt, or is fresh.
    open: bool,
    /// Whether its leader comes after all else is durable. If not, what its pages say must be so
    /// before any of them is written.
    pub pages_first: bool,
    /// Its pages that the device has otherwise, but for the leader; `None` says nothing.
    pub pages: Vec<(u32, Option<Box<PageSums>>)>,
    /// Its leader, if that is to be written: last.
    pub leader: Option<Box<PageSums>>,
}

/// How closing a group ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// The device says what is known.
    Done,
    /// It is as it was, but for pages that do not count yet.
    NotBegun,
    /// The device may say any of it.
    Unknown,
}

/// The group of a page.
pub const fn group_of(page: u32) -> u32 {
    page / PAGES_PER_GROUP
}

/// The leader of a group.
pub const fn leader_of(group: u32) -> u32 {
    group * PAGES_PER_GROUP
}

pub(super) fn bit(page: u32) -> u16 {
    1 << (page % PAGES_PER_GROUP)
}

impl Sums {
    /// Pages of a group.
    pub fn pages_of(&self, group: u32) -> Range<u32> {
        let leader = leader_of(group);
        leader..(leader + PAGES_PER_GROUP).min(self.count)
    }

    /// Of the groups of these pages the ones whose leaders are to be read by the caller, who says then
    /// what they are.
    pub fn start_loading_groups(&mut self, pages: Range<u32>) -> Vec<u32> {
        if pages.is_empty() {
            return Vec::new();
        }
        let groups = group_of(pages.start)..=group_of(pages.end - 1);
        let absent = |g: &u32| !self.groups.contains_key(g) && !self.loading_groups.contains(g);
        let groups: Vec<_> = groups.filter(absent).collect();
        self.loading_groups.extend(&groups);
        groups
    }

    /// Whether somebody reads the leader of the page's group.
    pub fn is_loading_group(&self, page: u32) -> bool {
        self.loading_groups.contains(&group_of(page))
    }

    /// The reading of these groups was given up.
    pub fn groups_not_loaded(&mut self, groups: &[u32]) {
        self.loading_groups.retain(|group| !groups.contains(group));
    }

    /// What the leader of a group says, `None` if reading it failed, and whether none of the group's
    /// pages was ever written.
    pub fn group_loaded(&mut self, number: u32, leader: Option<&Stored>, blank: bool) {
        self.loading_groups.retain(|group| *group != number);
        let believed = sabotage::is(Bug::TrustOpenGroup);
        let (state, stale) = match leader {
            _ if blank => (State::Fresh, ALL),
            Some(stored) if stored.group_open && believed => (State::Open, 0),
            Some(stored) if stored.group_open => (State::Open, ALL),
            Some(Stored { sums: StoredSums::Damaged(_), .. }) | None => (State::Closed, ALL),
            Some(_) => (State::Closed, 0),
        };
        let group = Group {
            state,
            moving: false,
            unread: leader.is_none(),
            stale,
            blank: if blank { ALL } else { 0 },
            queued: false,
            changed_ns: self.now_ns,
        };
        self.groups.insert(number, group);
        if state == State::Open {
            self.open += 1;
            self.counters.untrusted += 1;
            self.note_busy(number);
        }
    }

    /// Whether a crash may have cost the sums of the page: its group was open, or is fresh, and the device has
    /// nothing of it since.
    pub fn is_doubtful(&self, page: u32) -> bool {
        let group = self.groups.get(&group_of(page));
        group.is_some_and(|group| group.stale & bit(page) != 0)
    }

    /// The group is to be closed some time.
    pub(super) fn note_busy(&mut self, number: u32) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        group.changed_ns = self.now_ns;
        if !group.queued {
            group.queued = true;
            self.busy.push_back(number);
        }
    }

    /// Whether [`Sums::note_busy`] would change nothing.
    #[inline]
    pub(super) fn is_noted(&self, number: u32) -> bool {
        let group = self.groups.get(&number);
        group.is_some_and(|group| group.queued && group.changed_ns == self.now_ns)
    }

    /// Whether blocks of the page may be written.
    #[inline]
    pub(super) fn group_need(&self, page: u32) -> Result<(), Need> {
        let number = group_of(page);
        match self.groups.get(&number) {
            Some(group) if group.moving => Err(Need::Wait),
            Some(group) if group.state != State::Closed => Ok(()),
            None if self.loading_groups.contains(&number) => Err(Need::Wait),
            Some(_) | None => Err(Need::Group(page)),
        }
    }

    /// Begins to open the group of a page: its number, and the sums of its leader, to be written so
    /// that they say it is open. `None` if it is open.
    ///
    /// # Errors
    /// What must come first.
    pub fn start_opening(&mut self, page: u32) -> Result<Option<(u32, Box<PageSums>)>, Need> {
        let number = group_of(page);
        match self.group_need(page) {
            Ok(()) => return Ok(None),
            Err(Need::Group(_)) => {}
            Err(need) => return Err(need),
        }
        let leader = leader_of(number);
        if self.loading.contains(&leader) {
            return Err(Need::Wait);
        }
        let sums = match self.pages.get(leader) {
            Some(page) if page.moving => return Err(Need::Wait),
            Some(page) => page.sums().ok_or(Need::Page(leader))?,
            None => return Err(Need::Page(leader)),
        };
        let sums = Box::new(*sums);
        let Some(group) = self.groups.get_mut(&number) else { return Err(Need::Page(leader)) };
        group.moving = true;
        Ok(Some((number, sums)))
    }

    /// A group whose opening was tried: only then it is durably open.
    pub fn opened(&mut self, number: u32, done: bool) {
        let leader = leader_of(number);
        let Some(group) = self.groups.get_mut(&number) else { return };
        group.moving = false;
        if done {
            group.state = State::Open;
            group.unread = false;
            group.page_written(leader);
            self.open += 1;
            self.counters.openings += 1;
            if let Some(page) = self.pages.get_mut(leader) {
                page.unread = false;
            }
            self.note_busy(number);
            return;
        }
        // The device may have it by now, or not, or half of it. Where its pages count, that must not
        // stay so.
        group.page_tried(leader);
        if group.state == State::Closed && !group.has_doubts() {
            self.note_changed(leader);
        }
    }

    /// Whether the device says nothing of a page that is in use: its group is open, or was never written.
    pub fn is_open(&self, page: u32) -> bool {
        let group = self.groups.get(&group_of(page));
        group.is_some_and(|group| group.state != State::Closed)
    }

    /// Groups that are open on the device.
    pub fn open_groups(&self) -> usize {
        self.open
    }

    /// Groups that may be closed, from that of a page on.
    pub fn busy_from(&self, page: u32) -> Vec<u32> {
        self.busy.iter().copied().filter(|group| *group >= group_of(page)).collect()
    }

    /// How many groups may be closed.
    pub fn busy_groups(&self) -> usize {
        self.busy.len()
    }

    /// Some groups, at most `most`, to be closed by the caller: those that changed, and did so last at
    /// `until_ns` or before. Nobody writes to them until [`Sums::closed`]. Of `looks`, those at groups
    /// that may still be looked at, the ones taken are subtracted.
    ///
    /// After a crash, data is read again in the order of its pages, and `learnt` is the first page still to come. A
    /// group from there on would be closed without sums that it is about to get, and nobody would look for them again;
    /// unless it is one of `whole`, of which all sums are known.
    pub fn start_closing(
        &mut self,
        until_ns: u64,
        most: usize,
        looks: &mut usize,
        learnt: Option<u32>,
        whole: &HashSet<u32>,
    ) -> Vec<u32> {
        let learnt = learnt.map(group_of);
        let mut closing = Vec::new();
        for _ in 0..(*looks).min(LOOKS) {
            if closing.len() == most {
                break;
            }
            let Some(number) = self.busy.pop_front() else {
                *looks = 0;
                break;
            };
            *looks -= 1;
            let early = |group: &Group| {
                group.stale != 0
                    && learnt.is_some_and(|learnt| learnt <= number)
                    && !whole.contains(&number)
            };
            let late = |group: &Group| group.moving || group.changed_ns > until_ns || early(group);
            if self.groups.get(&number).is_none_or(late) || !self.is_idle(number) {
                self.busy.push_back(number);
                continue;
            }
            let changed = self.pages_of(number).any(|page| self.is_changed(page));
            let Some(group) = self.groups.get_mut(&number) else { continue };
            group.queued = false;
            if changed || group.state == State::Open {
                group.moving = true;
                closing.push(number);
            }
        }
        closing
    }

    fn is_idle(&mut self, group: u32) -> bool {
        self.pages_of(group).all(|page| {
            let moving = self.pages.get(page).is_some_and(|page| page.moving);
            !moving && !self.pages.is_claimed(page) && !self.loading.contains(&page)
        })
    }

    fn is_changed(&mut self, page: u32) -> bool {
        self.pages.get(page).is_some_and(|page| page.changed)
    }

    /// Pages of a group that is being closed that must be whole in memory.
    pub fn needed_to_close(&mut self, number: u32) -> Vec<u32> {
        let says = |group: &Group| group.state == State::Open || group.has_doubts();
        let with_leader = self.groups.get(&number).is_some_and(says);
        let leader = leader_of(number);
        let pages = self.pages_of(number);
        pages.filter(|page| self.is_changed(*page) || (with_leader && *page == leader)).collect()
    }

    /// What is to be written of a group that is being closed; `None` if that cannot be, as somebody
    /// else reads one of its pages.
    pub fn take_closing(&mut self, number: u32) -> Option<Closing> {
        let group = self.groups.get(&number)?;
        let (leader, open) = (leader_of(number), group.state == State::Open);
        // Of a fresh group every page counts from when the device has it, also if opening it was tried.
        let pages_first = open || (group.state == State::Closed && group.has_doubts());
        let keeps = sabotage::is(Bug::CloseKeepsDoubts);
        let doubts = if keeps { 0 } else { group.stale & !group.blank };
        let needed = self.needed_to_close(number);
        if needed.iter().any(|page| self.pages.get(*page).is_none_or(|page| page.sums().is_none()))
        {
            return None;
        }
        let mut closing =
            Closing { group: number, open, pages_first, pages: Vec::new(), leader: None };
        for page in self.pages_of(number) {
            if !needed.contains(&page) && (page == leader || doubts & bit(page) == 0) {
                continue;
            }
            let sums = self.change(page, |page| {
                page.changed = false;
                page.sums().map(|sums| Box::new(*sums))
            });
            match sums.flatten() {
                Some(sums) if page == leader => closing.leader = Some(sums),
                sums => closing.pages.push((page, sums)),
            }
        }
        Some(closing)
    }

    /// A group whose closing was tried.
    pub fn closed(&mut self, closing: &Closing, how: Closed) {
        let pages = closing.pages.iter().map(|(page, _)| *page);
        let all = pages.chain(closing.leader.is_some().then_some(leader_of(closing.group)));
        if let Some(group) = self.groups.get_mut(&closing.group) {
            group.moving = false;
            match how {
                Closed::Done => all.clone().for_each(|page| group.page_written(page)),
                Closed::NotBegun | Closed::Unknown => {
                    all.clone().for_each(|page| group.page_tried(page));
                }
            }
            if how == Closed::Unknown && closing.open {
                // The device may have the leader as it was while the group was open.
                group.page_tried(leader_of(closing.group));
                group.stale |= bit(leader_of(closing.group));
            }
            // From here on its pages count, or may: also of one that was fresh.
            if how != Closed::NotBegun {
                group.state = State::Closed;
                self.open -= usize::from(closing.open);
                self.counters.closings += u64::from(closing.open);
            }
        }
        if how != Closed::Done {
            all.for_each(|page| self.note_changed(page));
            self.note_busy(closing.group);
        }
    }

    /// The closing of this group was given up before anything was taken of it.
    pub fn not_closing(&mut self, number: u32) {
        if let Some(group) = self.groups.get_mut(&number) {
            group.moving = false;
        }
        self.note_busy(number);
    }
}
