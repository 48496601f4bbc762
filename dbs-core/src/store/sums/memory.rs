//! Pages of checksums read into memory, and written out of it.

use super::super::Inner;
use crate::error::{Error, Result};
use crate::format::RegionKind;
use crate::format::sums::{self, PageSums, Stored, StoredSums};
use crate::io::buffer::AlignedBuf;
use crate::io::{ReadRequest, WriteRequest};
use crate::meta::sums::leader_of;
use crate::units::BLOCK_BYTES;
use std::ops::Range;

/// Pages read together with data.
const BESIDE_PAGES: usize = 64;

/// A page to write: its number, its sums if it has any, and whether it says that its group is open.
pub(super) type PageOut<'a> = (u32, Option<&'a PageSums>, bool);

/// Pages and groups on their way into memory; if that ends early, somebody else may read them.
struct Loading<'a> {
    inner: &'a Inner,
    pages: Vec<u32>,
    groups: Vec<u32>,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        if self.pages.is_empty() && self.groups.is_empty() {
            return;
        }
        if let Some(sums) = &mut self.inner.meta().sums {
            sums.not_loaded(&self.pages);
            sums.groups_not_loaded(&self.groups);
        }
        self.inner.wake();
    }
}

impl Inner {
    /// Reads data, and beside it, in the same batch, the pages of checksums that are missing.
    pub(super) fn read_beside_sums(&self, requests: &mut [ReadRequest<'_>]) -> std::io::Result<()> {
        let missing = match &mut self.meta().sums {
            Some(sums) => {
                let pages = requests.iter().filter_map(|request| {
                    let blocks = request.buf.len() / BLOCK_BYTES as usize;
                    let known = sums.knows(request.offset, blocks);
                    (!known).then(|| sums.pages_at(request.offset, blocks))
                });
                pages.collect::<Vec<_>>()
            }
            None => Vec::new(),
        };
        if missing.is_empty() {
            return self.storage.read_many(requests);
        }
        let (mut asked, mut pages) = (Vec::new(), Vec::new());
        for missing in missing {
            self.load_groups(missing.clone());
            if let Some(sums) = &mut self.meta().sums {
                // Where one is read after the other, those behind it too.
                let window = sums.window(missing.start);
                let end = missing.end.max(window.end).min(missing.start + BESIDE_PAGES as u32);
                pages.extend(sums.start_loading(missing.start..end));
                asked.extend(missing.start..end);
            }
        }
        let mut loading = Loading { inner: self, pages, groups: Vec::new() };
        let mut stored = Vec::new();
        let read = self.read_with_pages(&loading.pages, requests, &mut stored);
        self.take_loaded(&mut loading, &stored, &asked);
        read
    }

    /// Reads the page if it is not in memory, or waits while somebody else does. It may be gone
    /// again, or on its way, when this returns: who needs it looks again.
    pub(in crate::store) fn load_page(&self, page: u32) {
        let mut meta = self.meta();
        while meta.sums.as_ref().is_some_and(|sums| sums.is_loading(page)) {
            meta = self.wait(meta);
        }
        drop(meta);
        self.load_pages(page..page + 1);
    }

    /// Reads those of the pages that are neither in memory nor on their way there.
    pub(in crate::store) fn load_pages(&self, pages: Range<u32>) {
        self.load_groups(pages.clone());
        let asked: Vec<_> = pages.clone().collect();
        let pages = match &mut self.meta().sums {
            Some(sums) => sums.start_loading(pages),
            None => return,
        };
        self.load_started(pages, &asked);
    }

    /// Reads pages of which it was said that this caller does, of those `asked` for.
    fn load_started(&self, pages: Vec<u32>, asked: &[u32]) {
        let mut loading = Loading { inner: self, pages, groups: Vec::new() };
        let mut stored = Vec::new();
        // Only pages: what becomes of each is in `stored`.
        if !loading.pages.is_empty() {
            let _pages_alone = self.read_with_pages(&loading.pages, &mut [], &mut stored);
        }
        self.take_loaded(&mut loading, &stored, asked);
    }

    /// Pages that were `asked` for are in memory, read or as those of which nothing is known: there may
    /// be too many now, and others are forgotten.
    fn take_loaded(&self, loading: &mut Loading<'_>, stored: &[Option<Stored>], asked: &[u32]) {
        let crowded = {
            let mut meta = self.meta();
            let fence = meta.fence.next();
            let Some(sums) = &mut meta.sums else { return };
            for (page, stored) in loading.pages.iter().zip(stored) {
                sums.loaded(*page, stored.as_ref(), fence);
            }
            // From here on somebody else may forget them, and read them again.
            loading.pages.clear();
            sums.shrink(false, asked, fence)
        };
        self.wake();
        if crowded && !self.read_only {
            self.make_room(asked);
        }
    }

    /// Reads the leaders of the groups of these pages, if nobody did, or waits while somebody does.
    pub(in crate::store) fn load_groups(&self, pages: Range<u32>) {
        let mut meta = self.meta();
        while meta
            .sums
            .as_ref()
            .is_some_and(|sums| pages.clone().any(|page| sums.is_loading_group(page)))
        {
            meta = self.wait(meta);
        }
        let groups = match &mut meta.sums {
            Some(sums) => sums.start_loading_groups(pages),
            None => return,
        };
        drop(meta);
        if groups.is_empty() {
            return;
        }
        let mut loading = Loading { inner: self, pages: Vec::new(), groups };
        let mut stored = Vec::new();
        let leaders: Vec<_> = loading.groups.iter().map(|group| leader_of(*group)).collect();
        let _pages_alone = self.read_with_pages(&leaders, &mut [], &mut stored);
        let blank: Vec<_> = stored
            .iter()
            .zip(&loading.groups)
            .map(|(leader, group)| is_blank(leader.as_ref()) && self.is_blank_group(*group))
            .collect();
        if let Some(sums) = &mut self.meta().sums {
            for (group, (leader, blank)) in loading.groups.iter().zip(stored.iter().zip(blank)) {
                sums.group_loaded(*group, leader.as_ref(), blank);
            }
        }
        loading.groups.clear();
        self.wake();
    }

    /// Whether no page of the group was ever written.
    fn is_blank_group(&self, group: u32) -> bool {
        let Some(pages) = self.meta().sums.as_ref().map(|sums| sums.pages_of(group)) else {
            return false;
        };
        let pages: Vec<_> = pages.collect();
        let mut stored = Vec::new();
        let _pages_alone = self.read_with_pages(&pages, &mut [], &mut stored);
        stored.iter().all(|page| is_blank(page.as_ref()))
    }

    /// Reads data, and pages with it: what these say, `None` of one that cannot be read. Neither
    /// spoils the other.
    fn read_with_pages(
        &self,
        pages: &[u32],
        data: &mut [ReadRequest<'_>],
        stored: &mut Vec<Option<Stored>>,
    ) -> std::io::Result<()> {
        let (geometry, uuid) = {
            let meta = self.meta();
            (meta.geometry, meta.uuid)
        };
        let block = BLOCK_BYTES as usize;
        let mut buf = AlignedBuf::zeroed(pages.len() * block);
        let runs = runs(pages);
        let mut rest = &mut buf[..];
        let mut requests: Vec<_> = data
            .iter_mut()
            .map(|request| ReadRequest { offset: request.offset, buf: &mut *request.buf })
            .collect();
        for run in &runs {
            let (part, after) = rest.split_at_mut(run.len() * block);
            requests.push(ReadRequest { offset: geometry.sums_address(run.start), buf: part });
            rest = after;
        }
        let together = self.storage.read_many(&mut requests);
        drop(requests);
        let mut read = vec![true; pages.len()];
        let mut outcome = Ok(());
        if together.is_err() {
            if !data.is_empty() {
                outcome = self.storage.read_many(data);
            }
            let parts = pages.iter().zip(buf.chunks_exact_mut(block)).zip(&mut read);
            for ((page, buf), read) in parts {
                *read = self.storage.read_at(geometry.sums_address(*page), buf).is_ok();
            }
        }
        let parts = pages.iter().zip(buf.chunks_exact(block)).zip(read);
        stored.extend(parts.map(|((page, bytes), read)| {
            read.then(|| sums::decode(&uuid, geometry.sums_address(*page), bytes))
        }));
        outcome
    }

    /// Writes pages that know what the device does not, so that there are some to forget, but none
    /// of `keep`; what is known must not be forgotten before the device has it, unless that fails.
    pub(super) fn make_room(&self, keep: &[u32]) {
        let started = match &mut self.meta().sums {
            Some(sums) => sums.start_making_room().then(|| sums.pauses_writing()),
            None => None,
        };
        let Some(pauses) = started else { return };
        // Without these sums it is as after a crash: nothing is lost that was promised.
        let lost = pauses || self.write_some().is_err();
        let mut meta = self.meta();
        let fence = meta.fence.next();
        if let Some(sums) = &mut meta.sums {
            sums.end_making_room();
            sums.shrink(lost, keep, fence);
        }
        drop(meta);
        self.wake();
    }

    /// Writes some pages; whether any could be.
    pub(super) fn write_some(&self) -> Result<bool> {
        let pages = match &mut self.meta().sums {
            Some(sums) => sums.start_writing(),
            None => return Ok(false),
        };
        if pages.is_empty() {
            return Ok(false);
        }
        let mut tried = Vec::new();
        let written = self.check_sound().and_then(|()| self.write_started(&pages, &mut tried));
        if let Some(sums) = &mut self.meta().sums {
            sums.pages_written(&pages, &tried, written.is_ok());
        }
        self.wake();
        written.map(|()| !tried.is_empty())
    }

    /// Writes these pages, which nobody changes: of those in `tried` it began to.
    ///
    /// To a group that is open they may go at any time. A fresh one is opened first: a page of one that
    /// is not counts as soon as the device has it. Other groups count, but nobody writes to their blocks:
    /// what is learnt of them is right once they are durable.
    fn write_started(&self, pages: &[u32], tried: &mut Vec<u32>) -> Result<()> {
        let (parts, groups) = match &mut self.meta().sums {
            Some(sums) => (sums.parts_of(pages), sums.closed_groups(pages)),
            None => return Ok(()),
        };
        self.load_started(parts, pages);
        let flushed = self.open_groups_of(&groups, pages)?;
        let (are_open, out) = match &mut self.meta().sums {
            Some(sums) => (sums.are_open(pages), sums.pages_to_write(pages)),
            None => return Ok(()),
        };
        if !are_open && !flushed {
            self.flush_storage()?;
        }
        let writes: Vec<PageOut<'_>> =
            out.iter().map(|(page, sums, says)| (*page, Some(&**sums), *says)).collect();
        tried.extend(out.iter().map(|(page, ..)| *page));
        self.write_pages(&writes)
    }

    pub(super) fn write_pages(&self, pages: &[PageOut<'_>]) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let (geometry, uuid) = {
            let meta = self.meta();
            (meta.geometry, meta.uuid)
        };
        let block = BLOCK_BYTES as usize;
        let mut buf = AlignedBuf::zeroed(pages.len() * block);
        for ((page, sums, says), block) in pages.iter().zip(buf.chunks_exact_mut(block)) {
            sums::encode(&uuid, geometry.sums_address(*page), *sums, *says, block);
        }
        let numbers: Vec<_> = pages.iter().map(|(page, ..)| *page).collect();
        let mut rest = &buf[..];
        let mut writes = Vec::new();
        for run in runs(&numbers) {
            let (part, after) = rest.split_at(run.len() * block);
            writes.push(WriteRequest { offset: geometry.sums_address(run.start), buf: part });
            rest = after;
        }
        self.storage.write_many(&writes).map_err(|error| {
            Error::io(error, format!("writing the {} failed", RegionKind::Sums.name()))
        })
    }
}

fn is_blank(page: Option<&Stored>) -> bool {
    page.is_some_and(|page| page.sums == StoredSums::Blank)
}

/// Neighbours among pages.
fn runs(pages: &[u32]) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(run) if run.end == *page => run.end += 1,
            _ => runs.push(*page..*page + 1),
        }
    }
    runs
}
