//! Checksums of one read or write under way: taken from its bytes without a lock, and compared or
//! recorded with the metadata lock that its end takes anyway, shared or alone.

use super::{Request, Segment};
use crate::error::Result;
use crate::format::sums::{Stored, decode, sum};
use crate::meta::Meta;
use crate::meta::pieces::ReadPiece;
use crate::meta::sums::{Need, Who};
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;
use crate::volume::Volume;

/// What a request knows of checksums; it stays empty in a store without them.
#[derive(Default)]
pub(in crate::volume) struct Sums {
    /// Of a write, how many of its pieces are claimed.
    claimed: usize,
    /// Of all blocks of a sealed write, or of a read, in their order.
    taken: Vec<u32>,
    /// Blocks of them that were recorded or compared beside other requests.
    done: usize,
    /// Those of a write were taken.
    sealed: bool,
    /// Pages that a read fetches beside its data, which nobody else does: each and where it is.
    beside: Vec<(u32, u64)>,
    /// What they are marked with.
    uuid: [u8; 16],
}

impl Sums {
    /// For another request.
    pub(in crate::volume) fn clear(&mut self) {
        (self.sealed, self.done) = (false, 0);
    }
}

/// Most pages fetched beside data.
const BESIDE_MAX: usize = 8;

impl Request {
    /// Takes the checksums of what a started write is about to write, before its transfers begin;
    /// `payload` is all of it. Nothing in a store without them. Blocks of a write that was not
    /// sealed are not checked until they are written again.
    #[inline]
    pub fn seal(&mut self, payload: &[u8]) {
        if self.sums.claimed > 0 {
            let blocks = payload.chunks_exact(BLOCK_BYTES as usize);
            self.sums.taken.clear();
            self.sums.taken.extend(blocks.map(sum));
            self.sums.sealed = true;
        }
    }

    /// As [`Request::seal`], by who owns the memory of the payload: what is to be encrypted is encrypted there. The device
    /// is given the payload as it is afterwards, and nobody reads it any more.
    #[inline]
    pub fn seal_own(&mut self, payload: &mut [u8]) {
        if let Some(key) = self.running.as_mut().and_then(|running| running.key.take()) {
            key.encrypt(self.first_block() * BLOCK_BYTES, payload);
        }
        self.seal(payload);
    }

    /// Whether the payload of a started write is still to be encrypted, by [`Request::seal_own`].
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.key.is_some())
    }

    /// Bytes that a read needs behind those asked for: [`Volume::start_read_beside`].
    #[must_use]
    pub fn extra_bytes(&self) -> usize {
        self.sums.beside.len() * BLOCK_BYTES as usize
    }

    /// Takes the checksums of what was read into `buf`.
    pub(in crate::volume) fn take_read_sums(&mut self, buf: &[u8]) {
        self.sums.taken.clear();
        let data = self.segments.len() - self.sums.beside.len();
        for segment in &self.segments[..data] {
            let bytes = &buf[segment.start..segment.start + segment.length];
            self.sums.taken.extend(bytes.chunks_exact(BLOCK_BYTES as usize).map(sum));
        }
    }

    /// Whether all that was read is known and right, and nothing has to be forgotten for it.
    #[inline]
    pub(in crate::volume) fn check_beside(&mut self, meta: &Meta) -> bool {
        let Some(sums) = &meta.sums else { return true };
        for segment in &self.segments {
            let blocks = segment.length / BLOCK_BYTES as usize;
            let found = &self.sums.taken[self.sums.done..][..blocks];
            let right = sums.check_beside(segment.device, found);
            self.sums.done += right;
            if right < blocks {
                return false;
            }
        }
        !sums.is_over()
    }

    /// Whether what was read under the fence number `fence` is what is known of it.
    pub(in crate::volume) fn check_sums(&mut self, meta: &mut Meta, fence: u64) -> bool {
        let mut done = std::mem::take(&mut self.sums.done);
        let Some(sums) = &mut meta.sums else { return true };
        let mut rest = &self.sums.taken[..];
        let good = self.segments.iter().all(|segment| {
            let (found, after) = rest.split_at(segment.length / BLOCK_BYTES as usize);
            rest = after;
            let skip = done.min(found.len());
            done -= skip;
            sums.check(segment.device + skip as u64 * BLOCK_BYTES, &found[skip..], fence).is_ok()
        });
        // Not before: it may be what has just been read.
        sums.forget_some();
        good
    }

    /// Whether there is anything to read that has to be checked.
    #[inline]
    pub(in crate::volume) fn needs_sums(&self, meta: &Meta) -> bool {
        meta.sums.is_some() && self.reads.iter().any(|piece| piece.address.is_some())
    }

    /// Whether the checksums of what is to be read are in memory.
    #[inline]
    pub(in crate::volume) fn knows_sums(&self, meta: &Meta) -> bool {
        let Some(sums) = &meta.sums else { return true };
        let known = |piece: &ReadPiece| match piece.address {
            Some(address) => sums.knows(address, piece.blocks as usize),
            None => true,
        };
        self.reads.iter().all(known)
    }

    /// Begins to fetch the pages that are missing for what is to be read; `false` if somebody who may
    /// wait is to do it.
    pub(in crate::volume) fn start_beside(&mut self, meta: &mut Meta) -> bool {
        let (geometry, uuid) = (meta.geometry, meta.uuid);
        let Some(sums) = &mut meta.sums else { return true };
        let pages = |piece: &ReadPiece| {
            piece.address.map(|address| sums.pages_at(address, piece.blocks as usize))
        };
        let all: Vec<_> = self.reads.iter().filter_map(pages).collect();
        let count: usize = all.iter().map(ExactSizeIterator::len).sum();
        // A part of a page becomes a whole one, which somebody has to write first where there are many.
        if count > BESIDE_MAX
            || sums.is_crowded()
            || !all.iter().all(|pages| sums.can_load(pages.clone()))
        {
            return false;
        }
        self.sums.uuid = uuid;
        for pages in all {
            let reading = sums.start_loading(pages);
            let places = reading.into_iter().map(|page| (page, geometry.sums_address(page)));
            self.sums.beside.extend(places);
        }
        true
    }

    /// Lays out the pages fetched beside `length` bytes of data: behind them.
    pub(in crate::volume) fn lay_out_beside(&mut self, length: u64) {
        let mut start = length as usize;
        for (_, device) in &self.sums.beside {
            let length = BLOCK_BYTES as usize;
            self.segments.push(Segment { device: *device, start, length });
            start += length;
        }
    }

    /// What the pages say that were fetched.
    pub(in crate::volume) fn stored_beside(&self, buf: &[u8]) -> Vec<Stored> {
        let count = self.sums.beside.len();
        let segments = &self.segments[self.segments.len() - count..];
        let parts = self.sums.beside.iter().zip(segments);
        let decode = |((_, address), segment): (&(u32, u64), &Segment)| {
            let bytes = &buf[segment.start..segment.start + segment.length];
            decode(&self.sums.uuid, *address, bytes)
        };
        parts.map(decode).collect()
    }

    /// Ends the fetching of pages, with what they say, or without.
    pub(in crate::volume) fn end_beside(&mut self, meta: &mut Meta, stored: &[Stored]) {
        let beside = std::mem::take(&mut self.sums.beside);
        self.segments.truncate(self.segments.len() - beside.len());
        let fence = meta.fence.next();
        let Some(sums) = &mut meta.sums else { return };
        if stored.len() == beside.len() {
            let pages = beside.iter().zip(stored);
            pages.for_each(|((page, _), stored)| sums.loaded(*page, Some(stored), fence));
        } else {
            let pages: Vec<_> = beside.iter().map(|(page, _)| *page).collect();
            sums.not_loaded(&pages);
        }
    }

    /// Claims all blocks of a planned write, or none of them.
    #[inline]
    pub(in crate::volume) fn try_claim(
        &mut self,
        meta: &Meta,
        who: Who,
    ) -> std::result::Result<(), Need> {
        let Some(sums) = &meta.sums else { return Ok(()) };
        for (claimed, piece) in self.writes.iter().enumerate() {
            if let Err(need) = sums.claim(piece.address, piece.blocks.len(), who) {
                for piece in &self.writes[..claimed] {
                    sums.unclaim(piece.address, piece.blocks.len());
                }
                return Err(need);
            }
        }
        self.sums.claimed = self.writes.len();
        Ok(())
    }

    /// As [`Request::try_claim`], by who has the state alone; whether they are claimed. One that is told to
    /// have room made sees to that: the others go on meanwhile.
    pub(in crate::volume) fn try_claim_alone(&mut self, meta: &mut Meta, who: Who) -> bool {
        let outcome = self.try_claim(meta, who);
        if let (Err(Need::Room), Some(sums)) = (outcome, &mut meta.sums) {
            sums.ask_for_room();
        }
        outcome.is_ok()
    }

    /// Gives claimed blocks back that nobody wrote to.
    pub(in crate::volume) fn unclaim(&mut self) {
        let claimed = std::mem::take(&mut self.sums.claimed);
        let Some(running) = &self.running else { return };
        if let Some(sums) = &mut running.handle.store.meta().sums {
            for piece in &self.writes[..claimed] {
                sums.unclaim(piece.address, piece.blocks.len());
            }
        }
    }

    /// Gives claimed blocks back that hold what was sealed, if nothing but their sums changes by that;
    /// `false` if some are left.
    #[inline]
    pub(in crate::volume) fn end_claims_beside(&mut self, meta: &Meta) -> bool {
        let Some(sums) = &meta.sums else { return true };
        if !self.sums.sealed || sums.is_over() {
            return false;
        }
        for piece in &self.writes[..self.sums.claimed] {
            let known = &self.sums.taken[self.sums.done..][..piece.blocks.len()];
            let ended = sums.written_beside(piece.address, known);
            self.sums.done += ended;
            if ended < known.len() {
                return false;
            }
        }
        (self.sums.claimed, self.sums.sealed) = (0, false);
        true
    }

    /// Gives claimed blocks back, but for those done; `written` says that they hold what was sealed.
    pub(in crate::volume) fn end_claims(&mut self, meta: &mut Meta, written: bool) {
        let claimed = std::mem::take(&mut self.sums.claimed);
        let mut done = std::mem::take(&mut self.sums.done);
        let known = self.sums.sealed && written;
        // Only what nobody knows changes anything for those who read.
        let fence = if known { 0 } else { meta.fence.next() };
        let Some(sums) = &mut meta.sums else { return };
        let mut rest = &self.sums.taken[..];
        for piece in &self.writes[..claimed] {
            let blocks = piece.blocks.len();
            if known {
                let (known, after) = rest.split_at(blocks);
                let skip = done.min(blocks);
                done -= skip;
                sums.written(piece.address + skip as u64 * BLOCK_BYTES, &known[skip..]);
                rest = after;
            } else if sabotage::is(Bug::FailedWriteKeepsSums) {
                sums.unclaim(piece.address, blocks);
            } else {
                sums.failed(piece.address, blocks, fence);
            }
        }
        self.sums.sealed = false;
    }
}

impl Volume {
    /// Claims the blocks of a planned write, waiting for what that takes.
    pub(in crate::volume) fn claim(&self, request: &mut Request) -> Result<()> {
        if !self.store().has_sums {
            return Ok(());
        }
        for index in 0..request.writes.len() {
            let piece = &request.writes[index];
            if let Err(error) = self.store().claim(piece.address, piece.blocks.len()) {
                request.cancel();
                return Err(error);
            }
            request.sums.claimed = index + 1;
        }
        Ok(())
    }
}
