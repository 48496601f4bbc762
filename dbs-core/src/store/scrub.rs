//! Reading all data there is, to compare it with its checksums and to learn those that are not
//! known.

use super::bring::is_damage;
use super::sums::ReadFault;
use super::{Inner, Store};
use crate::error::{Error, Result};
use crate::format::RegionKind;
use crate::format::sums::{self, SUMS_PER_PAGE};
use crate::info::{DamagedRange, DataPlace, ScrubReport};
use crate::io::ReadRequest;
use crate::io::buffer::AlignedBuf;
use crate::meta::Meta;
use crate::meta::entries::{Away, Bits};
use crate::meta::sums::Sums;
use crate::units::{BLOCK_BYTES, format_size};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Damaged ranges that a report has.
const RANGES_MAX: usize = 1000;
/// Blocks that a call passes over as it cannot read them; more is no damage, but a device that is gone.
const UNREADABLE_MAX: usize = 4096;

/// Damage that a scrub which goes on will not come by again.
#[derive(Default)]
pub(super) struct Passed {
    /// What it found before it was stopped, and how many bytes that were.
    ranges: Vec<DamagedRange>,
    damaged: u64,
    /// Where damaged blocks were moved to.
    moved: Vec<u64>,
}

impl Store {
    /// Reads all data in use and compares it with its checksums; what is damaged, or cannot be read, is
    /// reported and left as it is. Goes on where an earlier call on this open store was stopped, unless
    /// `restart`; return `false` from `progress` to stop. Safe to call beside any I/O.
    ///
    /// # Errors
    /// `Unsupported` in a store without checksums, `Busy` if one runs, `Io` if more cannot be read than
    /// 16 MiB, `Interrupted` if `progress` says so.
    pub fn scrub(
        &self,
        restart: bool,
        progress: &mut dyn FnMut(&ScrubReport) -> bool,
    ) -> Result<ScrubReport> {
        let inner = &*self.inner;
        if !inner.has_sums {
            let text = "the store keeps no checksums of data: they are chosen when it is made";
            return Err(Error::unsupported(text));
        }
        let mut next = match inner.scrub.try_lock() {
            Ok(next) => next,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::new(crate::ErrorKind::Busy, "the store is being scrubbed"));
            }
        };
        if restart {
            *next = 0;
        }
        if *next == 0 {
            *lock(&inner.passed) = Passed::default();
            inner.shared().extents.unmark_all();
        }
        let mut report = ScrubReport::default();
        {
            let mut passed = lock(&inner.passed);
            (report.ranges, report.damaged) = (std::mem::take(&mut passed.ranges), passed.damaged);
        }
        let scrubbed = inner.scrub_from(&mut next, &mut report, progress);
        if scrubbed.is_err() {
            let mut passed = lock(&inner.passed);
            (passed.ranges, passed.damaged) = (std::mem::take(&mut report.ranges), report.damaged);
        }
        scrubbed.map(|()| report)
    }
}

impl Store {
    /// After a crash: makes the checksums again of what was being written when the last process ended, and of
    /// what the device has no checksums of. Looks at so many pages of checksums, and reads the data of at most one
    /// that lacks them. Whether there is more. What is damaged or cannot be read is left for who reads it.
    ///
    /// # Errors
    /// `Poisoned`.
    pub fn relearn_checksums(&self, pages: u32) -> Result<bool> {
        let inner = &*self.inner;
        let mut cursor = lock(&inner.relearn);
        let Some(first) = *cursor else { return Ok(false) };
        let last = inner.meta().entries.last_extent();
        let blocks =
            last.map_or(0, |last| u64::from(last) + 1) * inner.extent_bytes as u64 / BLOCK_BYTES;
        let end = blocks.div_ceil(SUMS_PER_PAGE as u64) as u32;
        let stop = first.saturating_add(pages.max(1)).min(end);
        if first < stop {
            inner.load_groups(first..stop);
        }
        let doubtful = |page: &u32| {
            let meta = inner.meta();
            let doubtful = meta.sums.as_ref().is_some_and(|sums| sums.is_doubtful(*page));
            doubtful && meta.is_page_in_use(*page)
        };
        let page = (first..stop).find(doubtful);
        let next = page.map_or(stop, |page| page + 1);
        *cursor = (next < end).then_some(next);
        if let Some(page) = page {
            inner.scrub_page(page, &mut ScrubReport::default(), &mut 0)?;
        }
        Ok(cursor.is_some())
    }
}

/// Blocks to look at: their address, and how many.
type Run = (u64, usize);

impl Inner {
    fn scrub_from(
        &self,
        next: &mut u32,
        report: &mut ScrubReport,
        progress: &mut dyn FnMut(&ScrubReport) -> bool,
    ) -> Result<()> {
        let mut unreadable = 0;
        loop {
            // Extents come into use, or into place, while it goes on.
            let last = self.meta().entries.last_extent();
            let end = last.map_or(0, |last| u64::from(last) + 1) * self.extent_bytes as u64;
            let page_bytes = SUMS_PER_PAGE as u64 * BLOCK_BYTES;
            report.total = end;
            report.done = (u64::from(*next) * page_bytes).min(end);
            let more = report.done < end;
            let moved = std::mem::take(&mut lock(&self.passed).moved);
            moved.into_iter().for_each(|at| self.note_damage(at, BLOCK_BYTES, report));
            if !progress(report) && more {
                let found = match report.damaged {
                    0 => String::new(),
                    bytes => format!(", and {} are damaged so far", format_size(bytes)),
                };
                let text = format!("the scrub was stopped{found}; run it again to go on");
                return Err(Error::new(crate::ErrorKind::Interrupted, text));
            }
            if !more {
                *next = 0;
                // What a crash has cost is learnt with all else.
                *lock(&self.relearn) = None;
                return Ok(());
            }
            self.scrub_page(*next, report, &mut unreadable)?;
            *next += 1;
        }
    }

    fn scrub_page(
        &self,
        page: u32,
        report: &mut ScrubReport,
        unreadable: &mut usize,
    ) -> Result<()> {
        if !self.meta().is_page_in_use(page) {
            return Ok(());
        }
        let window = self.meta().sums.as_ref().map(|sums| sums.window(page));
        // What is read one after the other comes into memory together. First, as what is found damaged
        // there is learnt only by those who begin to read later.
        self.load_pages(window.unwrap_or(page..page + 1));
        let (mut brought, mut lost) = (self.bring(), Vec::new());
        let (runs, fenced) = loop {
            let stopped = {
                let meta = self.meta();
                match meta.runs_in_use(page, &lost) {
                    Ok(runs) => break (runs, self.fence(&meta)),
                    Err(Away(extent)) => extent,
                }
            };
            match brought.of(stopped, 1) {
                Err(error) if is_damage(&error) => lost.push(stopped),
                came => came?,
            }
        };
        for extent in lost {
            // Nobody knows which of its blocks hold data.
            let (address, blocks) = self.meta().part_in_page(extent, page);
            self.note_damage(address, blocks * BLOCK_BYTES, report);
        }
        self.scrub_runs(&runs, fenced.number(), report, unreadable)
    }

    fn scrub_runs(
        &self,
        runs: &[Run],
        fence: u64,
        report: &mut ScrubReport,
        unreadable: &mut usize,
    ) -> Result<()> {
        let bytes = |run: &Run| run.1 * BLOCK_BYTES as usize;
        let mut buf = AlignedBuf::zeroed(runs.iter().map(bytes).sum());
        let mut rest = &mut buf[..];
        let mut requests = Vec::with_capacity(runs.len());
        for run in runs {
            let (part, after) = rest.split_at_mut(bytes(run));
            requests.push(ReadRequest { offset: run.0, buf: part });
            rest = after;
        }
        let together = self.storage.read_many(&mut requests).is_ok();
        for request in requests {
            if together {
                self.scrub_run(request.offset, request.buf, fence, report)?;
                continue;
            }
            // Some block cannot be read: the others are.
            for (at, block) in
                (request.offset..).step_by(BLOCK_BYTES as usize).zip(blocks(request.buf))
            {
                match self.storage.read_at(at, block) {
                    Ok(()) => self.scrub_run(at, block, fence, report)?,
                    Err(_) if *unreadable < UNREADABLE_MAX => {
                        *unreadable += 1;
                        self.note_damage(at, BLOCK_BYTES, report);
                    }
                    Err(error) => {
                        let text = "the device fails to read, here and at 4096 blocks before";
                        return Err(Error::io(error, text));
                    }
                }
            }
        }
        Ok(())
    }

    fn scrub_run(
        &self,
        address: u64,
        buf: &mut [u8],
        fence: u64,
        report: &mut ScrubReport,
    ) -> Result<()> {
        let blocks = buf.chunks_exact(BLOCK_BYTES as usize);
        let mut found: Vec<_> = blocks.map(sums::sum).collect();
        report.checked += buf.len() as u64;
        let mut learnt = 0;
        let asked = self.ask_sums(
            address,
            &mut found,
            |sums, at, found| sums.check(at, found, fence).map(|new| learnt = new as u64),
            |at, block, _| match self.read_again(at, &mut buf[block]) {
                Err(ReadFault::Damaged(_) | ReadFault::Io(_)) => {
                    self.note_damage(at, BLOCK_BYTES, report);
                    Ok(())
                }
                read => read,
            },
        );
        report.learnt += learnt * BLOCK_BYTES;
        asked.map_err(|fault| self.read_error(fault, || "scrubbing failed".to_owned()))
    }

    /// Adds a damaged block to a report, unless it is there: what was moved may be found in both places. A block of a
    /// compressed extent has parts of others, or says where they are: all of the extent counts as damaged.
    fn note_damage(&self, address: u64, length: u64, report: &mut ScrubReport) {
        let (place, length) = {
            let meta = self.meta();
            meta.note_damage(address);
            let inside = address - meta.address(0, 0);
            let extent = inside / self.extent_bytes as u64;
            if meta.entries.is_compressed(extent as u32) {
                (meta.place_of(meta.address(extent as u32, 0)), self.extent_bytes as u64)
            } else {
                (meta.place_of(address), length)
            }
        };
        let known = |range: &DamagedRange| {
            let at = place.offset.checked_sub(range.place.offset);
            let same = DataPlace { offset: place.offset, ..range.place.clone() } == place;
            same && at.is_some_and(|at| at + length <= range.length)
        };
        if report.ranges.iter().any(known) {
            return;
        }
        report.damaged += length;
        let follows = |range: &&mut DamagedRange| {
            let end = range.place.offset + range.length;
            DataPlace { offset: end, ..range.place.clone() } == place
        };
        let room = report.ranges.len() < RANGES_MAX;
        match report.ranges.last_mut().filter(follows) {
            Some(range) => range.length += length,
            None if room => report.ranges.push(DamagedRange { place, length }),
            None => {}
        }
    }

    /// A damaged block is about to be copied to this address.
    pub(super) fn note_moved(&self, address: u64) {
        let mut passed = lock(&self.passed);
        if passed.moved.len() < RANGES_MAX {
            passed.moved.push(address);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn blocks(buf: &mut [u8]) -> impl Iterator<Item = &mut [u8]> {
    buf.chunks_exact_mut(BLOCK_BYTES as usize)
}

impl Meta {
    fn extents_of_page(&self, page: u32) -> Range<u32> {
        let (blocks, per_extent) = (Sums::blocks_of(page), u64::from(self.blocks_per_extent()));
        let end = blocks.end.div_ceil(per_extent) as u32;
        (blocks.start / per_extent) as u32..end.min(self.geometry.data_extents())
    }

    /// Where the part of an extent begins that is in a page, and its blocks.
    fn part_in_page(&self, extent: u32, page: u32) -> (u64, u64) {
        let (blocks, per_extent) = (Sums::blocks_of(page), u64::from(self.blocks_per_extent()));
        let first = u64::from(extent) * per_extent;
        let start = first.max(blocks.start);
        let data = self.geometry.region(RegionKind::Data).offset;
        (data + start * BLOCK_BYTES, blocks.end.min(first + per_extent) - start)
    }

    fn is_page_in_use(&self, page: u32) -> bool {
        self.extents_of_page(page).any(|extent| self.entries.data_blocks(extent) > 0)
    }

    /// The blocks of a page that hold data, but those of some extents.
    pub(super) fn runs_in_use(
        &self,
        page: u32,
        but_of: &[u32],
    ) -> std::result::Result<Vec<Run>, Away> {
        let blocks = Sums::blocks_of(page);
        let per_extent = u64::from(self.blocks_per_extent());
        let data = self.geometry.region(RegionKind::Data).offset;
        let mut runs = Vec::new();
        for extent in self.extents_of_page(page).filter(|extent| !but_of.contains(extent)) {
            let first = u64::from(extent) * per_extent;
            // What is compressed is looked at as it is stored.
            let held = match self.entries.stored_blocks(extent) {
                Some(stored) => Bits::range(&(0..u32::from(stored))),
                None => self.entries.data_bits(extent)?,
            };
            for run in held.runs(per_extent as u32) {
                let start = (first + u64::from(run.start)).max(blocks.start);
                let end = (first + u64::from(run.end)).min(blocks.end);
                if start < end {
                    runs.push((data + start * BLOCK_BYTES, (end - start) as usize));
                }
            }
        }
        Ok(runs)
    }
}
