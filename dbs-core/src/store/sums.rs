//! Checksums of data blocks: who reads compares with them, who writes claims and records. The I/O for
//! them is in `groups` and `memory`.

mod groups;
mod memory;

use super::unreadable::is_unreadable;
use super::{Inner, Store};
use crate::error::{Damage, Error, Result};
use crate::format::sums;
use crate::info::ChecksumInfo;
use crate::io::ReadRequest;
use crate::io::buffer::AlignedBuf;
use crate::limits::SUMS_IDLE;
use crate::meta::sums::{Need, Who};
use crate::units::BLOCK_BYTES;
use std::time::Duration;

/// Why data was not read.
#[derive(Debug)]
pub(crate) enum ReadFault {
    /// The storage failed.
    Io(std::io::Error),
    /// Something else did.
    Other(Error),
    /// The block at this byte of the device is not what was written there.
    Damaged(u64),
    /// The device cannot read the block at this byte.
    Unreadable(u64, std::io::Error),
}

impl From<std::io::Error> for ReadFault {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl Store {
    /// Closes groups of checksums that have not changed for a while, so that a crash from now on
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
        self.inner.close_groups(until)
    }

    /// Bounds the memory for checksums as [`OpenOptions`](super::OpenOptions) do; less than the least
    /// is the least.
    pub fn set_checksum_cache(&self, bytes: u64) {
        if let Some(sums) = &mut self.inner.meta().sums {
            sums.set_capacity(bytes);
        }
    }

    /// As if there were no memory for checksums left: what is known of them is written, or not, and
    /// forgotten. For tests.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    #[doc(hidden)]
    pub fn crowd_checksums(&self, write: bool) -> Result<()> {
        if write && !self.inner.read_only {
            self.inner.check_writable()?;
            // If they cannot be written they are lost, as ever.
            while self.inner.write_some().unwrap_or(false) {}
            self.inner.check_sound()?;
        }
        let mut meta = self.inner.meta();
        let fence = meta.fence.next();
        if let Some(sums) = &mut meta.sums {
            sums.forget_all(fence);
        }
        Ok(())
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
            self.read_beside_sums(requests)?;
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
        self.claim_to_read(address).map_err(ReadFault::Other)?;
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
        if damaged {
            self.shared().note_damage(address);
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
    /// else those of what was read. Those that differ are read again, once. Damage is noted for a scrub, which may
    /// have been at `to` already, where the blocks go.
    pub(super) fn carried_sums(
        &self,
        address: u64,
        to: u64,
        bytes: &mut [u8],
    ) -> std::io::Result<Vec<u32>> {
        let blocks = bytes.chunks_exact(BLOCK_BYTES as usize);
        let mut found: Vec<_> = blocks.map(sums::sum).collect();
        self.ask_sums(
            address,
            &mut found,
            |sums, at, found| sums.carry(at, found),
            |at, block, known| {
                let right = self.read_carried(at, &mut bytes[block], known)?;
                if !right {
                    self.note_moved(to + (at - address));
                }
                Ok::<_, std::io::Error>(())
            },
        )?;
        Ok(found)
    }

    /// Reads a block again that nobody writes, whose sum is `known`: what it holds is left as it is
    /// if that differs again. Whether it is right now.
    fn read_carried(&self, address: u64, block: &mut [u8], known: u32) -> std::io::Result<bool> {
        let mut copy = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        self.storage.read_at(address, &mut copy)?;
        let right = sums::sum(&copy) == known;
        if right {
            block.copy_from_slice(&copy);
        } else if let Some(sums) = &mut self.meta().sums {
            sums.counters.mismatches += 1;
        }
        Ok(right)
    }

    /// Finds the block that the device cannot read, if that is why these reads failed. A read of one
    /// block is not tried again: a device may take seconds for each try. If all can be read now, it was
    /// one of them: the first stands for it.
    pub(crate) fn find_unreadable(&self, fault: ReadFault, reads: &[ReadRequest<'_>]) -> ReadFault {
        let ReadFault::Io(error) = fault else { return fault };
        if !is_unreadable(&error) {
            return ReadFault::Io(error);
        }
        let blocks = |read: &ReadRequest<'_>| {
            let end = read.offset + read.buf.len() as u64;
            (read.offset - read.offset % BLOCK_BYTES..end).step_by(BLOCK_BYTES as usize)
        };
        let mut all = reads.iter().flat_map(blocks);
        let Some(first) = all.next() else { return ReadFault::Io(error) };
        if all.next().is_none() {
            return ReadFault::Unreadable(first, error);
        }
        let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        for address in reads.iter().flat_map(blocks) {
            match self.storage.read_at(address, &mut block) {
                Err(error) if is_unreadable(&error) => {
                    return ReadFault::Unreadable(address, error);
                }
                _ => {}
            }
        }
        ReadFault::Unreadable(first, error)
    }

    /// What an error of reading data is called, where `what` was read.
    pub(crate) fn read_error(&self, fault: ReadFault, what: impl FnOnce() -> String) -> Error {
        match fault {
            ReadFault::Io(error) => Error::io(error, what()),
            ReadFault::Other(error) => error.context(what()),
            ReadFault::Unreadable(address, error) => {
                let place = self.meta().place_of(address);
                Error::io(error, format!("{}: {place} cannot be read", what()))
            }
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
            ReadFault::Damaged(address) | ReadFault::Unreadable(address, _) => offset(*address)
                .map(|offset| Damage {
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
        let mut who = Who::Waiting;
        loop {
            let mut meta = self.meta();
            let Some(sums) = &mut meta.sums else { return Ok(()) };
            match sums.claim(address, blocks, who) {
                Ok(()) => return Ok(()),
                Err(Need::Wait) => drop(self.wait(meta)),
                Err(Need::Group(page)) => {
                    drop(meta);
                    self.open_group(page)?;
                }
                Err(Need::Room | Need::Page(_)) => {
                    drop(meta);
                    self.make_room(&[]);
                    // What is in the way of that may be what the caller has claimed.
                    who = Who::Served;
                }
            }
        }
    }

    /// Claims a block that is about to be read again, with its page in memory.
    pub(super) fn claim_to_read(&self, address: u64) -> Result<()> {
        loop {
            let mut meta = self.meta();
            let Some(sums) = &mut meta.sums else { return Ok(()) };
            match sums.claim_to_read(address) {
                Ok(()) => return Ok(()),
                Err(Need::Page(page)) => {
                    drop(meta);
                    self.load_page(page);
                }
                Err(_) => drop(self.wait(meta)),
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
}
