//! Checksums of data blocks: all I/O for them. A page is opened, durably, before any of its blocks
//! is written, and closed when what was written to them is durable (`docs/format.md`, section 21,
//! has the argument).

use super::{Inner, Store};
use crate::error::{Damage, Error, Result};
use crate::format::RegionKind;
use crate::format::sums::{self, PageSums, Stored};
use crate::info::ChecksumInfo;
use crate::io::buffer::AlignedBuf;
use crate::io::{ReadRequest, WriteRequest};
use crate::limits::SUMS_IDLE;
use crate::meta::sums::{Need, Sums};
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;
use std::ops::Range;
use std::time::Duration;

/// Pages closed with one flush.
const CLOSE_PAGES: usize = 256;

/// Why data was not read.
#[derive(Debug)]
pub(crate) enum ReadFault {
    /// The storage failed.
    Io(std::io::Error),
    /// Something else did.
    Other(Error),
    /// The block at this byte of the device is not what was written there.
    Damaged(u64),
}

impl From<std::io::Error> for ReadFault {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

/// Pages on their way into memory; if that ends early, somebody else may read them.
struct Loading<'a> {
    inner: &'a Inner,
    pages: Vec<u32>,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        if self.pages.is_empty() {
            return;
        }
        if let Some(sums) = &mut self.inner.meta().sums {
            sums.not_loaded(&self.pages);
        }
        self.inner.wake();
    }
}

impl Store {
    /// Closes pages of checksums that have not changed for a while, so that a crash from now on
    /// leaves what they say. For a server's spare moments; costs nothing when there is nothing to
    /// do, and in a store without checksums.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub fn settle_checksums(&self) -> Result<()> {
        self.close_checksums(SUMS_IDLE)
    }

    /// As [`Store::settle_checksums`], with another meaning of a while.
    ///
    /// # Errors
    /// As there.
    pub fn close_checksums(&self, idle: Duration) -> Result<()> {
        if !self.inner.has_sums || self.inner.read_only {
            return Ok(());
        }
        self.inner.check_writable()?;
        let now = self.inner.env.now_ns();
        let until = now.saturating_sub(u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX));
        if let Some(sums) = &mut self.inner.meta().sums {
            sums.tick(now);
        }
        while self.inner.close_pages(until)? {}
        Ok(())
    }

    /// Bounds the memory for checksums as [`OpenOptions`](super::OpenOptions) do; less than the least
    /// is the least.
    pub fn set_checksum_cache(&self, bytes: u64) {
        if let Some(sums) = &mut self.inner.meta().sums {
            sums.set_capacity((bytes / BLOCK_BYTES) as usize);
        }
    }

    /// What has been counted of checksums since the store was opened; `None` if it has none.
    #[must_use]
    pub fn checksums(&self) -> Option<ChecksumInfo> {
        let meta = self.inner.meta();
        meta.sums.as_ref().map(|sums| sums.info())
    }
}

impl Inner {
    /// Reads data. Its blocks are held by the fence number `fence`, or by locks if that is
    /// `u64::MAX`. Requests begin and end at sectors.
    pub(crate) fn read_data(
        &self,
        requests: &mut [ReadRequest<'_>],
        fence: u64,
    ) -> std::result::Result<(), ReadFault> {
        if requests.is_empty() {
            return Ok(());
        }
        if !self.has_sums {
            return Ok(self.storage.read_many(requests)?);
        }
        let whole = |request: &ReadRequest<'_>| {
            request.offset.is_multiple_of(BLOCK_BYTES)
                && (request.buf.len() as u64).is_multiple_of(BLOCK_BYTES)
        };
        if requests.iter().all(whole) {
            self.storage.read_many(requests)?;
            return requests.iter_mut().try_for_each(|r| self.verify(r.offset, r.buf, fence));
        }
        for request in requests {
            let skip = (request.offset % BLOCK_BYTES) as usize;
            let length = (skip + request.buf.len()).next_multiple_of(BLOCK_BYTES as usize);
            let mut blocks = AlignedBuf::zeroed(length);
            let start = request.offset - skip as u64;
            self.storage.read_at(start, &mut blocks)?;
            self.verify(start, &mut blocks, fence)?;
            request.buf.copy_from_slice(&blocks[skip..skip + request.buf.len()]);
        }
        Ok(())
    }

    /// Compares whole blocks that were read from `address` on with their sums; those that differ
    /// are read again.
    pub(crate) fn verify(
        &self,
        address: u64,
        buf: &mut [u8],
        fence: u64,
    ) -> std::result::Result<(), ReadFault> {
        let blocks = buf.chunks_exact(BLOCK_BYTES as usize);
        let mut found: Vec<_> = blocks.map(sums::sum).collect();
        self.ask_sums(
            address,
            &mut found,
            |sums, at, found| sums.check(at, found, fence).map(drop),
            |at, block, _| self.read_again(at, &mut buf[block]),
        )
    }

    /// Reads a block with nobody writing it: now it is what was written, or damaged.
    pub(super) fn read_again(
        &self,
        address: u64,
        block: &mut [u8],
    ) -> std::result::Result<(), ReadFault> {
        let claimed = self.claim_with(
            |sums| sums.claim_to_read(address),
            |page| {
                self.load_page(page);
                Ok(())
            },
        );
        claimed.map_err(ReadFault::Other)?;
        let mut copy = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        let read = self.storage.read_at(address, &mut copy);
        let found = sums::sum(&copy);
        let mut damaged = false;
        if let Some(sums) = &mut self.meta().sums {
            // While it is claimed its page is in memory, and what is read stays what it is.
            damaged = read.is_ok() && sums.check(address, &[found], u64::MAX).is_err();
            sums.unclaim(address, 1);
            sums.counters.mismatches += u64::from(damaged);
        }
        self.wake();
        read?;
        if damaged {
            return Err(ReadFault::Damaged(address));
        }
        block.copy_from_slice(&copy);
        Ok(())
    }

    /// The sums of blocks read from `address` on, with nobody writing them: those that are known, or
    /// else those of what was read. Those that differ are read again, once.
    pub(super) fn carried_sums(&self, address: u64, bytes: &mut [u8]) -> std::io::Result<Vec<u32>> {
        let blocks = bytes.chunks_exact(BLOCK_BYTES as usize);
        let mut found: Vec<_> = blocks.map(sums::sum).collect();
        self.ask_sums(
            address,
            &mut found,
            |sums, at, found| sums.carry(at, found),
            |at, block, known| self.read_carried(at, &mut bytes[block], known),
        )?;
        Ok(found)
    }

    /// Reads a block again that nobody writes, whose sum is `known`: what it holds is left as it is
    /// if that differs again.
    fn read_carried(&self, address: u64, block: &mut [u8], known: u32) -> std::io::Result<()> {
        let mut copy = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        self.storage.read_at(address, &mut copy)?;
        if sums::sum(&copy) == known {
            block.copy_from_slice(&copy);
        } else if let Some(sums) = &mut self.meta().sums {
            sums.counters.mismatches += 1;
        }
        Ok(())
    }

    /// What an error of reading data is called, where `what` was read.
    pub(crate) fn read_error(&self, fault: ReadFault, what: impl FnOnce() -> String) -> Error {
        match fault {
            ReadFault::Io(error) => Error::io(error, what()),
            ReadFault::Other(error) => error.context(what()),
            ReadFault::Damaged(address) => {
                let place = self.meta().place_of(address);
                Error::damaged(format!(
                    "{}: {place} is damaged: its checksum does not match",
                    what()
                ))
            }
        }
    }

    /// As [`Inner::read_error`], for a reader who knows that the damage is `offset` bytes from the
    /// start of what it reads from.
    pub(crate) fn read_error_at(
        &self,
        fault: ReadFault,
        offset: impl FnOnce(u64) -> Option<u64>,
        what: impl FnOnce() -> String,
    ) -> Error {
        let damage = match &fault {
            ReadFault::Damaged(address) => offset(*address).map(|offset| Damage {
                offset,
                in_snapshot: self.meta().place_of(*address).snapshot.is_some(),
            }),
            ReadFault::Io(_) | ReadFault::Other(_) => None,
        };
        let error = self.read_error(fault, what);
        match damage {
            Some(damage) => error.at(damage),
            None => error,
        }
    }

    /// Claims blocks that are about to be written, waiting for what that takes.
    pub(crate) fn claim(&self, address: u64, blocks: usize) -> Result<()> {
        if !self.has_sums {
            return Ok(());
        }
        self.claim_with(|sums| sums.claim(address, blocks), |page| self.open_page(page))
    }

    pub(super) fn claim_with(
        &self,
        claim: impl Fn(&mut Sums) -> std::result::Result<(), Need>,
        provide: impl Fn(u32) -> Result<()>,
    ) -> Result<()> {
        loop {
            let mut meta = self.meta();
            let Some(sums) = &mut meta.sums else { return Ok(()) };
            match claim(sums) {
                Ok(()) => return Ok(()),
                Err(Need::Wait) => drop(self.wait(meta)),
                Err(Need::Page(page)) => {
                    drop(meta);
                    provide(page)?;
                }
            }
        }
    }

    /// Gives claimed blocks, of so many bytes, back: they hold what was written, or nobody knows.
    pub(crate) fn end_claim(&self, address: u64, length: usize, written: Option<&[u8]>) {
        if !self.has_sums {
            return;
        }
        let blocks = |bytes: &[u8]| -> Vec<_> {
            bytes.chunks_exact(BLOCK_BYTES as usize).map(sums::sum).collect()
        };
        self.end_claim_with(address, length, written.map(blocks).as_deref());
    }

    /// As [`Inner::end_claim`], with the sums of what was written.
    pub(super) fn end_claim_with(&self, address: u64, length: usize, sums: Option<&[u32]>) {
        let mut meta = self.meta();
        let fence = meta.fence.next();
        if let Some(known) = &mut meta.sums {
            match sums {
                Some(sums) => known.written(address, sums),
                None => known.failed(address, length / BLOCK_BYTES as usize, fence),
            }
        }
        drop(meta);
        self.wake();
    }

    /// Gives claimed blocks back that nobody wrote to.
    pub(crate) fn unclaim(&self, address: u64, blocks: usize) {
        if let Some(sums) = &mut self.meta().sums {
            sums.unclaim(address, blocks);
        }
        self.wake();
    }

    /// Reads the page if it is not in memory, or waits while somebody else does. It may be gone
    /// again, or on its way, when this returns: who needs it looks again.
    pub(super) fn load_page(&self, page: u32) {
        let mut meta = self.meta();
        while meta.sums.as_ref().is_some_and(|sums| sums.is_loading(page)) {
            meta = self.wait(meta);
        }
        drop(meta);
        self.load_pages(page..page + 1);
    }

    /// Reads those of the pages that are neither in memory nor on their way there.
    pub(super) fn load_pages(&self, pages: Range<u32>) {
        let pages = match &mut self.meta().sums {
            Some(sums) => sums.start_loading(pages),
            None => return,
        };
        if pages.is_empty() {
            return;
        }
        let mut loading = Loading { inner: self, pages };
        let stored = self.read_pages(&loading.pages);
        let (pages, crowded) = {
            let mut meta = self.meta();
            let fence = meta.fence.next();
            let Some(sums) = &mut meta.sums else { return };
            for (page, stored) in loading.pages.iter().zip(&stored) {
                sums.loaded(*page, stored.as_ref());
            }
            // From here on somebody else may forget them, and read them again.
            let pages = std::mem::take(&mut loading.pages);
            let crowded = sums.shrink(self.read_only, &pages, fence);
            (pages, crowded)
        };
        self.wake();
        if crowded && !self.read_only {
            self.make_room(&pages);
        }
    }

    /// What these pages say; `None` of one that cannot be read.
    fn read_pages(&self, pages: &[u32]) -> Vec<Option<Stored>> {
        let (geometry, uuid) = {
            let meta = self.meta();
            (meta.geometry, meta.uuid)
        };
        let block = BLOCK_BYTES as usize;
        let mut buf = AlignedBuf::zeroed(pages.len() * block);
        let parts = pages.iter().zip(buf.chunks_exact_mut(block));
        let mut requests: Vec<_> = parts
            .map(|(page, buf)| ReadRequest { offset: geometry.sums_address(*page), buf })
            .collect();
        let read: Vec<bool> = match self.storage.read_many(&mut requests) {
            Ok(()) => vec![true; pages.len()],
            // One of them does not spoil the others.
            Err(_) => {
                let read = |r: &mut ReadRequest<'_>| self.storage.read_at(r.offset, r.buf).is_ok();
                requests.iter_mut().map(read).collect()
            }
        };
        drop(requests);
        let parts = pages.iter().zip(buf.chunks_exact(block)).zip(read);
        let decode = |((page, bytes), read): ((&u32, &[u8]), bool)| {
            read.then(|| sums::decode(&uuid, geometry.sums_address(*page), bytes))
        };
        parts.map(decode).collect()
    }

    /// Closes pages so that there are some to forget, but none of `keep`: what is known must not be
    /// forgotten before the device has it, unless that fails.
    fn make_room(&self, keep: &[u32]) {
        let pauses = self.meta().sums.as_mut().is_some_and(|sums| sums.pauses_closing());
        let lost = pauses || !matches!(self.try_close_pages(u64::MAX), Ok(Some(_)));
        let mut meta = self.meta();
        let fence = meta.fence.next();
        if let Some(sums) = &mut meta.sums {
            sums.shrink(lost, keep, fence);
        }
    }

    /// Opens the page, with its neighbours, so that their blocks may be written.
    fn open_page(&self, page: u32) -> Result<()> {
        let window = match &self.meta().sums {
            Some(sums) => sums.window(page),
            None => return Ok(()),
        };
        self.load_pages(window.clone());
        let opening = match &mut self.meta().sums {
            Some(sums) => sums.start_opening(window, page),
            None => return Ok(()),
        };
        if opening.is_empty() {
            return Ok(());
        }
        let pages: Vec<_> = opening.iter().map(|page| (*page, None)).collect();
        let opened = self.check_sound().and_then(|()| match sabotage::is(Bug::SkipPageOpening) {
            true => Ok(()),
            false => {
                // If only some were written too: what is read as open later is so durably.
                let written = self.write_pages(&pages);
                let flushed = self.flush_storage();
                written.and(flushed)
            }
        });
        if let Some(sums) = &mut self.meta().sums {
            sums.opened(&opening, opened.is_ok());
        }
        self.wake();
        opened
    }

    /// Closes some pages that have not changed since `until_ns`; whether there may be more.
    pub(super) fn close_pages(&self, until_ns: u64) -> Result<bool> {
        // Without them the sums are as after a crash: nothing is lost that was promised, and space
        // for them may come.
        Ok(self.try_close_pages(until_ns)? == Some(CLOSE_PAGES))
    }

    /// Closes some pages that have not changed since `until_ns`: how many, or `None` if they could
    /// not be written.
    fn try_close_pages(&self, until_ns: u64) -> Result<Option<usize>> {
        let closing = match &mut self.meta().sums {
            Some(sums) => sums.start_closing(until_ns, CLOSE_PAGES),
            None => return Ok(Some(0)),
        };
        if closing.is_empty() {
            return Ok(Some(0));
        }
        let flushed = self.check_sound().and_then(|()| {
            // What the sums are of must not be lost once they say so.
            if sabotage::is(Bug::ClosePagesEarly) { Ok(()) } else { self.flush_storage() }
        });
        if let Err(error) = flushed {
            if let Some(sums) = &mut self.meta().sums {
                sums.not_closed(&closing);
            }
            self.wake();
            return Err(error);
        }
        let pages: Vec<_> = closing.iter().map(|(page, sums)| (*page, Some(&**sums))).collect();
        let written = self.write_pages(&pages);
        if let Some(sums) = &mut self.meta().sums {
            sums.closed(&closing, written.is_ok());
        }
        self.wake();
        Ok(written.is_ok().then_some(closing.len()))
    }

    fn write_pages(&self, pages: &[(u32, Option<&PageSums>)]) -> Result<()> {
        let (geometry, uuid) = {
            let meta = self.meta();
            (meta.geometry, meta.uuid)
        };
        let block = BLOCK_BYTES as usize;
        let mut buf = AlignedBuf::zeroed(pages.len() * block);
        for ((page, sums), block) in pages.iter().zip(buf.chunks_exact_mut(block)) {
            sums::encode(&uuid, geometry.sums_address(*page), *sums, block);
        }
        let writes: Vec<_> = pages
            .iter()
            .zip(buf.chunks_exact(block))
            .map(|((page, _), buf)| WriteRequest { offset: geometry.sums_address(*page), buf })
            .collect();
        self.storage.write_many(&writes).map_err(|error| {
            Error::io(error, format!("writing the {} failed", RegionKind::Sums.name()))
        })
    }
}
