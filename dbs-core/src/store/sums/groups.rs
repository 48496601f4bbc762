//! Groups of checksums opened, durably, before any of their blocks is written, and closed when what
//! was written to them is durable. `docs/format.md`, section 21, has the argument.

use super::super::Inner;
use super::memory::PageOut;
use crate::error::Result;
use crate::format::sums::PageSums;
use crate::limits::SUMS_OPEN_GROUPS;
use crate::meta::sums::{Closed, Closing, Need, leader_of};
use crate::sabotage::{self, Bug};

/// Groups closed with one flush.
const CLOSE_GROUPS: usize = 128;

impl Inner {
    /// Opens the group of a page, so that its blocks may be written. Who needs it looks again.
    pub(super) fn open_group(&self, page: u32) -> Result<()> {
        self.load_groups(page..page + 1);
        let crowded =
            self.meta().sums.as_ref().is_some_and(|s| s.open_groups() >= SUMS_OPEN_GROUPS);
        if crowded {
            self.close_some_groups(u64::MAX)?;
        }
        let mut meta = self.meta();
        let Some(sums) = &mut meta.sums else { return Ok(()) };
        let (group, leader) = match sums.start_opening(page) {
            Ok(Some(opening)) => opening,
            Ok(None) => return Ok(()),
            Err(Need::Page(leader)) => {
                drop(meta);
                self.load_page(leader);
                return Ok(());
            }
            Err(_) => {
                drop(self.wait(meta));
                return Ok(());
            }
        };
        drop(meta);
        self.open_started(&[(group, leader)])
    }

    /// Opens those of `groups` that can be opened now, for pages that are to be written; whether the
    /// storage was flushed for that.
    pub(super) fn open_groups_of(&self, groups: &[u32], pages: &[u32]) -> Result<bool> {
        // Their leaders must be in memory.
        groups.iter().for_each(|group| self.load_pages(leader_of(*group)..leader_of(*group) + 1));
        let opening: Vec<_> = match &mut self.meta().sums {
            Some(sums) => {
                let start = |group: &u32| Some((*group, sums.start_opening_for(*group, pages)?));
                groups.iter().filter_map(start).collect()
            }
            None => Vec::new(),
        };
        self.open_started(&opening)?;
        Ok(!opening.is_empty())
    }

    /// Writes leaders so that they say that their groups are open, and makes that durable.
    fn open_started(&self, opening: &[(u32, Box<PageSums>)]) -> Result<()> {
        if opening.is_empty() {
            return Ok(());
        }
        let writes: Vec<PageOut<'_>> =
            opening.iter().map(|(group, sums)| (leader_of(*group), Some(&**sums), true)).collect();
        let opened = self.check_sound().and_then(|()| {
            let lost = sabotage::is(Bug::LoseIntent);
            let written = if lost { Ok(()) } else { self.write_pages(&writes) };
            // If only some were written too: what is read as open later is so durably.
            let late = lost || sabotage::is(Bug::LateIntent);
            let flushed = if late { Ok(()) } else { self.flush_storage() };
            written.and(flushed)
        });
        if let Some(sums) = &mut self.meta().sums {
            opening.iter().for_each(|(group, _)| sums.opened(*group, opened.is_ok()));
        }
        self.wake();
        opened
    }

    /// Closes the groups that have not changed since `until_ns`. Those that cannot be written stay: without
    /// them the sums are as after a crash, nothing is lost that was promised, and space for them may come.
    ///
    /// # Errors
    /// Of a flush.
    pub(in crate::store) fn close_groups(&self, until_ns: u64) -> Result<()> {
        let rounds = self.meta().sums.as_ref().map_or(0, |sums| sums.closing_rounds(CLOSE_GROUPS));
        (0..rounds).try_for_each(|_| self.close_some_groups(until_ns))
    }

    /// As [`Inner::close_groups`], at most [`CLOSE_GROUPS`] of them.
    fn close_some_groups(&self, until_ns: u64) -> Result<()> {
        let groups = match &mut self.meta().sums {
            Some(sums) => sums.start_closing(until_ns, CLOSE_GROUPS),
            None => return Ok(()),
        };
        if groups.is_empty() {
            return Ok(());
        }
        for group in &groups {
            let needed = self.meta().sums.as_ref().map(|sums| sums.needed_to_close(*group));
            needed.into_iter().flatten().for_each(|page| self.load_page(page));
        }
        let mut closing = Vec::with_capacity(groups.len());
        // One at a time: others need the metadata meanwhile.
        for group in &groups {
            let mut meta = self.meta();
            let Some(sums) = &mut meta.sums else { continue };
            match sums.take_closing(*group) {
                Some(taken) => closing.push(taken),
                None => sums.not_closing(*group),
            }
        }
        let (how, outcome) = match self.check_sound().and_then(|()| self.write_closing(&closing)) {
            Ok(how) => (how, Ok(())),
            Err(error) => (Closed::NotBegun, Err(error)),
        };
        if let Some(sums) = &mut self.meta().sums {
            closing.iter().for_each(|closing| sums.closed(closing, how));
        }
        self.wake();
        outcome
    }

    /// First all pages that do not count yet. Then a flush: these are durable, and so is what was
    /// written to the blocks of all groups. Then what makes pages count.
    ///
    /// # Errors
    /// Of the flush.
    fn write_closing(&self, closing: &[Closing]) -> Result<Closed> {
        let early = sabotage::is(Bug::ClearIntentEarly);
        let late = closing.iter().filter(|closing| closing.pages_first);
        let pages: Vec<_> = late.flat_map(pages_of).collect();
        let mut counts: Vec<_> =
            closing.iter().filter(|closing| !closing.pages_first).flat_map(pages_of).collect();
        counts.extend(closing.iter().filter_map(|closing| {
            Some((leader_of(closing.group), Some(&**closing.leader.as_ref()?), false))
        }));
        counts.sort_unstable_by_key(|(page, ..)| *page);
        if self.write_pages(&pages).is_err() {
            return Ok(Closed::NotBegun);
        }
        if !early {
            self.flush_storage()?;
        }
        Ok(if self.write_pages(&counts).is_ok() { Closed::Done } else { Closed::Unknown })
    }
}

/// Pages of a group but for its leader.
fn pages_of(closing: &Closing) -> impl Iterator<Item = PageOut<'_>> {
    closing.pages.iter().map(|(page, sums)| (*page, sums.as_deref(), false))
}
