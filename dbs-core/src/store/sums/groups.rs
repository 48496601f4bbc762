//! Groups of checksums opened, durably, before any of their blocks is written, and closed when what
//! was written to them is durable. `docs/format.md`, section 21, has the argument.

use super::super::Inner;
use super::memory::PageOut;
use crate::error::Result;
use crate::format::sums::PageSums;
use crate::limits::SUMS_OPEN_GROUPS;
use crate::meta::sums::{Closed, Closing, Need, leader_of};
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;
use std::collections::HashSet;
use std::sync::TryLockError;

/// Groups closed with one flush.
const CLOSE_GROUPS: usize = 128;

impl Inner {
    /// Opens the group of a page, so that its blocks may be written. Who needs it looks again.
    pub(super) fn open_group(&self, page: u32) -> Result<()> {
        self.load_groups(page..page + 1);
        let crowded =
            || self.meta().sums.as_ref().is_some_and(|s| s.open_groups() >= SUMS_OPEN_GROUPS);
        let none = HashSet::new();
        if crowded() {
            self.close_some_groups(u64::MAX, &mut { usize::MAX }, self.learnt(), &none)?;
        }
        if crowded() {
            self.close_some_groups(u64::MAX, &mut { usize::MAX }, None, &none)?;
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
        self.close_groups_but(until_ns, self.learnt(), &HashSet::new())
    }

    /// As [`Inner::close_groups`] when the store is closed, of which all up to the page `learnt` was learnt after a
    /// crash: what came later is kept where all of it is known.
    ///
    /// # Errors
    /// Of a flush.
    pub(in crate::store) fn close_all_groups(&self, learnt: Option<u32>) -> Result<()> {
        let early = learnt.zip(self.meta().sums.as_ref()).map(|(page, sums)| sums.busy_from(page));
        let whole = early.into_iter().flatten().filter(|group| self.is_whole(*group)).collect();
        self.close_groups_but(u64::MAX, learnt, &whole)
    }

    /// Whether the sums of all data of a group are known, or on the device.
    fn is_whole(&self, group: u32) -> bool {
        let mut meta = self.meta();
        let Some(sums) = &meta.sums else { return false };
        let stale: Vec<_> = sums.pages_of(group).filter(|page| sums.is_doubtful(*page)).collect();
        // Where it is not known which blocks are in use, it is not known whether their sums are.
        let runs = |page| meta.runs_in_use(page, &[]).ok();
        let runs: Option<Vec<_>> = stale.into_iter().map(runs).collect();
        let Some(runs) = runs else { return false };
        let Some(sums) = &mut meta.sums else { return false };
        let blocks = |(address, blocks): (u64, usize)| {
            (address..).step_by(BLOCK_BYTES as usize).take(blocks)
        };
        runs.into_iter().flatten().flat_map(blocks).all(|address| sums.known(address).is_some())
    }

    fn close_groups_but(
        &self,
        until_ns: u64,
        learnt: Option<u32>,
        whole: &HashSet<u32>,
    ) -> Result<()> {
        // Each once: one that cannot be written is put behind the others.
        let mut looks = self.meta().sums.as_ref().map_or(0, |sums| sums.busy_groups());
        while looks > 0 {
            self.close_some_groups(until_ns, &mut looks, learnt, whole)?;
        }
        Ok(())
    }

    /// The page from which on checksums that a crash has cost are still to be made again.
    fn learnt(&self) -> Option<u32> {
        match self.relearn.try_lock() {
            Ok(cursor) => *cursor,
            Err(TryLockError::Poisoned(cursor)) => *cursor.into_inner(),
            // Somebody makes them again now.
            Err(TryLockError::WouldBlock) => Some(0),
        }
    }

    /// As [`Inner::close_groups`], at most [`CLOSE_GROUPS`] of them, after some of `looks`.
    fn close_some_groups(
        &self,
        until_ns: u64,
        looks: &mut usize,
        learnt: Option<u32>,
        whole: &HashSet<u32>,
    ) -> Result<()> {
        let groups = match &mut self.meta().sums {
            Some(sums) => sums.start_closing(until_ns, CLOSE_GROUPS, looks, learnt, whole),
            None => return Ok(()),
        };
        if groups.is_empty() {
            return Ok(());
        }
        for group in &groups {
            let needed = self.meta().sums.as_mut().map(|sums| sums.needed_to_close(*group));
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
            Err(error) => (vec![Closed::NotBegun; closing.len()], Err(error)),
        };
        if let Some(sums) = &mut self.meta().sums {
            closing.iter().zip(how).for_each(|(closing, how)| sums.closed(closing, how));
        }
        self.wake();
        outcome
    }

    /// First all pages that do not count yet. Then a flush: these are durable, and so is what was
    /// written to the blocks of all groups. Then what makes pages count. How each group ended.
    ///
    /// # Errors
    /// Of the flush.
    fn write_closing(&self, closing: &[Closing]) -> Result<Vec<Closed>> {
        let mut how = vec![Closed::Done; closing.len()];
        self.write_each(closing, &mut how, before_flush, Closed::NotBegun);
        if how.iter().all(|how| *how == Closed::NotBegun) {
            return Ok(how);
        }
        if !sabotage::is(Bug::ClearIntentEarly) {
            self.flush_storage()?;
        }
        self.write_each(closing, &mut how, after_flush, Closed::Unknown);
        Ok(how)
    }

    /// Writes pages of all groups that are being closed, together; if that fails, of each by itself, so that
    /// one that cannot be written does not keep the others open.
    fn write_each(
        &self,
        closing: &[Closing],
        how: &mut [Closed],
        pages: fn(&Closing) -> Vec<PageOut<'_>>,
        failed: Closed,
    ) {
        let going = closing.iter().zip(&*how).filter(|(_, how)| **how == Closed::Done);
        let mut all: Vec<_> = going.flat_map(|(closing, _)| pages(closing)).collect();
        all.sort_unstable_by_key(|(page, ..)| *page);
        if self.write_pages(&all).is_ok() {
            return;
        }
        for (closing, how) in closing.iter().zip(how).filter(|(_, how)| **how == Closed::Done) {
            if self.write_pages(&pages(closing)).is_err() {
                *how = failed;
            }
        }
    }
}

/// Pages of a group that do not count before its leader says so.
fn before_flush(closing: &Closing) -> Vec<PageOut<'_>> {
    if closing.pages_first { pages_of(closing).collect() } else { Vec::new() }
}

/// What counts from when the device has it.
fn after_flush(closing: &Closing) -> Vec<PageOut<'_>> {
    let leader =
        closing.leader.as_deref().map(|sums| (leader_of(closing.group), Some(sums), false));
    pages_of(closing).filter(|_| !closing.pages_first).chain(leader).collect()
}

/// Pages of a group but for its leader.
fn pages_of(closing: &Closing) -> impl Iterator<Item = PageOut<'_>> {
    closing.pages.iter().map(|(page, sums)| (*page, sums.as_deref(), false))
}
