//! Reads and writes that never block, for servers: one step says where the bytes are on the
//! device, the caller does that I/O in its own way, and a second step ends the request. Each step
//! takes the metadata lock once. The blocking calls of [`Volume`] are made of the same steps.

mod sums;

use super::{Handle, Volume, blocks_of, is_whole};
use crate::error::{Error, Result};
use crate::limits::EXTENTS_PER_WRITE;
use crate::meta::locks::{HoldId, Space};
use crate::meta::plan::{ReadPiece, WritePiece};
use crate::meta::{Meta, Stop};
use crate::units::BLOCK_BYTES;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use sums::Sums;

/// A part of a request: contiguous on the device and in the caller's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Byte offset on the device.
    pub device: u64,
    /// Where it starts in the caller's buffer, in bytes.
    pub start: usize,
    /// Bytes.
    pub length: usize,
}

/// What [`Volume::start_read`] and [`Volume::start_write`] ask their caller to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Transfer [`Request::segments`], fill [`Request::zeros`], and finish the request.
    Io,
    /// The request is over once [`Request::zeros`] are filled; there is nothing to finish.
    Done,
    /// It would have to wait: use the blocking call, on a thread that may. Nothing is held.
    Blocked,
}

/// How a read ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Read {
    /// The buffer holds what was asked for.
    Done,
    /// The bytes are in doubt, for they were written meanwhile or are damaged, or cannot be checked
    /// without waiting: use [`Volume::read_at`], on a thread that may block.
    Again,
}

/// What must come before a write is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Finish {
    /// Nothing.
    Done,
    /// [`Volume::flush`], on a thread that may block.
    Commit,
}

impl Finish {
    pub(super) fn of(must_commit: bool) -> Self {
        if must_commit { Self::Commit } else { Self::Done }
    }
}

/// The state of one read or write under way; used again and again, it allocates nothing.
///
/// Between start and finish it holds its place among others: merges, discards and snapshots wait
/// for it. It must not be finished while the device still works on its segments. A read may be dropped
/// at any time. A write that was started must be finished or, if no transfer was begun,
/// [cancelled](Request::cancel): nobody knows what the device still does with one that is dropped, so
/// nothing is written any more until the store is opened again.
#[derive(Default)]
pub struct Request {
    pub(super) segments: Vec<Segment>,
    zeros: Vec<Range<usize>>,
    pub(super) reads: Vec<ReadPiece>,
    pub(super) writes: Vec<WritePiece>,
    pub(super) sums: Sums,
    pub(super) running: Option<Running>,
}

pub(super) struct Running {
    pub(super) handle: Arc<Handle>,
    kind: Kind,
}

enum Kind {
    Read {
        fence: u64,
    },
    Write {
        hold: HoldId,
        /// `writes` have their places.
        planned: bool,
        must_commit: bool,
    },
}

impl Request {
    /// A request that is not under way.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What to transfer between the device and the caller's buffer, in order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Ranges of the caller's buffer that read as zeros.
    #[must_use]
    pub fn zeros(&self) -> &[Range<usize>] {
        &self.zeros
    }

    /// Whether it is started and not finished.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Gives a started request up, none of whose transfers was begun.
    pub fn cancel(&mut self) {
        self.unclaim();
        self.abandon();
    }

    /// Ends a read with the outcome of its transfers into `buf`.
    ///
    /// # Errors
    /// `Io`, if the outcome is a failure.
    ///
    /// # Panics
    /// If no read is under way.
    pub fn finish_read(&mut self, outcome: io::Result<()>, buf: &[u8]) -> Result<Read> {
        let checks = self.running.as_ref().is_some_and(|running| running.handle.store.has_sums);
        let mut stored = Vec::new();
        if checks && outcome.is_ok() {
            self.take_read_sums(buf);
            stored = self.stored_beside(buf);
        }
        // It may be a page that cannot be read.
        let extra = self.extra_bytes() > 0;
        let (handle, fence) = self.end_read();
        let mut meta = handle.store.meta();
        if extra {
            self.end_beside(&mut meta, &stored);
        }
        let good = outcome.is_err() || self.check_sums(&mut meta, fence);
        meta.fence.end(fence);
        drop(meta);
        handle.store.wake();
        match outcome {
            Ok(()) if good => Ok(Read::Done),
            Ok(()) => Ok(Read::Again),
            Err(_) if extra => Ok(Read::Again),
            Err(error) => Err(Error::io(error, format!("reading `{}` failed", handle.spec))),
        }
    }

    /// The fence number of a read under way, which the caller gives back.
    fn end_read(&mut self) -> (Arc<Handle>, u64) {
        match self.running.take() {
            Some(Running { handle, kind: Kind::Read { fence } }) => (handle, fence),
            _ => panic!("no read is under way"),
        }
    }

    /// Ends a write with the outcome of its transfers.
    ///
    /// # Errors
    /// `Io` or `NoSpace`, if the outcome is a failure: each block then holds old or new content.
    ///
    /// # Panics
    /// If no write is under way.
    pub fn finish_write(&mut self, outcome: io::Result<()>) -> Result<Finish> {
        if let Err(error) = outcome {
            let Some(running) = &self.running else { panic!("no write is under way") };
            let error = Error::io(error, format!("writing `{}` failed", running.handle.spec));
            self.abandon();
            return Err(error);
        }
        let Some(Running { handle, kind: Kind::Write { hold, planned: true, must_commit } }) =
            self.running.take()
        else {
            panic!("no write is under way");
        };
        let mut meta = handle.store.meta();
        self.end_claims(&mut meta, true);
        meta.finish_write(handle.volume, &self.writes);
        let must_commit = meta.publish() || must_commit;
        meta.locks.release(hold);
        drop(meta);
        handle.store.wake();
        Ok(Finish::of(must_commit))
    }

    fn clear(&mut self) {
        assert!(self.running.is_none(), "the request is under way");
        self.sums.sealed = false;
        self.segments.clear();
        self.zeros.clear();
    }

    /// Gives back what is held, as after a failure.
    fn abandon(&mut self) {
        let Some(Running { handle, kind }) = self.running.take() else { return };
        let mut meta = handle.store.meta();
        match kind {
            Kind::Read { fence } => {
                meta.fence.end(fence);
                self.end_beside(&mut meta, &[]);
            }
            Kind::Write { hold, planned, .. } => {
                self.end_claims(&mut meta, false);
                if planned {
                    meta.abort_write(handle.volume, &self.writes);
                }
                meta.locks.release(hold);
            }
        }
        drop(meta);
        handle.store.wake();
    }

    /// A write goes whose transfers may be under way: what lands in its places later must find nobody
    /// else's data there. Its extents stay allocated, in no record, and nothing is written after it.
    fn lose(&mut self) {
        let Some(Running { handle, kind: Kind::Write { hold, .. } }) = self.running.take() else {
            return;
        };
        handle.store.poison(&format!("a write to `{}` was dropped before it ended", handle.spec));
        let mut meta = handle.store.meta();
        self.end_claims(&mut meta, false);
        meta.locks.release(hold);
        drop(meta);
        handle.store.wake();
    }

    /// Turns the pieces of a read, which begins at `offset`, into segments and zeros.
    fn lay_out_read(&mut self, offset: u64, length: u64) {
        // The first block may begin before the range, the last one end behind it.
        let mut skip = offset % BLOCK_BYTES;
        let mut start = 0;
        for piece in &self.reads {
            let part = (piece.blocks * BLOCK_BYTES - skip).min(length - start as u64) as usize;
            match piece.address {
                Some(address) => {
                    self.segments.push(Segment { device: address + skip, start, length: part });
                }
                None => self.zeros.push(start..start + part),
            }
            start += part;
            skip = 0;
        }
    }

    /// Turns the pieces of a write into segments.
    fn lay_out_write(&mut self) {
        let mut start = 0;
        for piece in &self.writes {
            let length = (piece.blocks.end - piece.blocks.start) as usize * BLOCK_BYTES as usize;
            match self.segments.last_mut() {
                Some(last) if last.device + last.length as u64 == piece.address => {
                    last.length += length;
                }
                _ => self.segments.push(Segment { device: piece.address, start, length }),
            }
            start += length;
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        match self.running {
            Some(Running { kind: Kind::Write { planned: true, .. }, .. }) => self.lose(),
            _ => self.abandon(),
        }
    }
}

impl Volume {
    /// Starts a read of whole sectors. It never waits for other operations, only for the metadata
    /// lock; a very long range is `Blocked`.
    ///
    /// # Errors
    /// `Invalid` outside the volume or unaligned. Nothing is held then.
    ///
    /// # Panics
    /// If the request is under way.
    pub fn start_read(&self, offset: u64, length: u64, request: &mut Request) -> Result<Start> {
        self.start_read_as(offset, length, false, request)
    }

    /// As [`Volume::start_read`], by who has room for [`Request::extra_bytes`] behind the bytes asked
    /// for: what is needed to check them is fetched beside them, as further segments. The buffer
    /// given to [`Request::finish_read`] is the whole.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn start_read_beside(
        &self,
        offset: u64,
        length: u64,
        request: &mut Request,
    ) -> Result<Start> {
        self.start_read_as(offset, length, true, request)
    }

    fn start_read_as(
        &self,
        offset: u64,
        length: u64,
        beside: bool,
        request: &mut Request,
    ) -> Result<Start> {
        request.clear();
        let mut meta = self.store().meta();
        self.check_range_in(&meta, offset, length)?;
        if length == 0 {
            return Ok(Start::Done);
        }
        if length > self.step_bytes() as u64 {
            return Ok(Start::Blocked);
        }
        let fence = self.plan_read(&mut meta, blocks_of(offset, length), request)?;
        if self.store().has_sums
            && let Some(number) = fence
        {
            // Checked are whole blocks only, and only by what is in memory by then.
            let whole = is_whole(offset) && is_whole(length);
            let ready = request.knows_sums(&mut meta)
                || (whole && beside && request.start_beside(&mut meta));
            if !whole || !ready {
                meta.fence.end(number);
                return Ok(Start::Blocked);
            }
        }
        let blocks = blocks_of(offset, length);
        meta.count_read(self.handle.volume, (blocks.end - blocks.start) * BLOCK_BYTES);
        drop(meta);
        Ok(self.begin_read(offset, length, fence, request))
    }

    /// Starts a write. `Blocked` if it would wait for another operation, if space must be made or
    /// reserved for it, if it is not of whole blocks, or is very long.
    ///
    /// # Errors
    /// `Invalid` outside the volume or unaligned, `ReadOnly`, `Poisoned`. Nothing is held then.
    ///
    /// # Panics
    /// If the request is under way.
    pub fn start_write(&self, offset: u64, length: u64, request: &mut Request) -> Result<Start> {
        request.clear();
        let mut meta = self.store().meta();
        self.check_unlocked()?;
        self.check_range_in(&meta, offset, length)?;
        if length == 0 {
            return Ok(Start::Done);
        }
        let whole = is_whole(offset) && is_whole(length);
        if !whole || length > self.step_bytes() as u64 {
            return Ok(Start::Blocked);
        }
        let started = self.try_write(&mut meta, blocks_of(offset, length), request)?;
        drop(meta);
        if !started {
            return Ok(Start::Blocked);
        }
        request.lay_out_write();
        Ok(Start::Io)
    }

    /// Starts a write of whole blocks, waiting for whatever it needs.
    pub(super) fn wait_write(&self, blocks: Range<u64>, request: &mut Request) -> Result<()> {
        request.clear();
        let started = {
            let mut meta = self.store().meta();
            self.store().check_sound()?;
            self.try_write(&mut meta, blocks.clone(), request)?
        };
        if started {
            request.lay_out_write();
            return Ok(());
        }
        // With checksums, writes to the same blocks take their turns.
        self.wait_hold(blocks.clone(), self.store().has_sums, request);
        self.plan_held(blocks, request)
    }

    /// Waits for blocks, which the request then holds.
    pub(super) fn wait_hold(&self, blocks: Range<u64>, exclusive: bool, request: &mut Request) {
        request.clear();
        let hold = self.store().hold(self.handle.volume, blocks, exclusive).keep();
        request.running = Some(self.writing(hold, false, false));
    }

    /// Finds places for the blocks that the request holds, waiting for space.
    pub(super) fn plan_held(&self, blocks: Range<u64>, request: &mut Request) -> Result<()> {
        let volume = self.handle.volume;
        let writes = &mut request.writes;
        let length = (blocks.end - blocks.start) * BLOCK_BYTES;
        let step = self.store().step(|meta| {
            meta.plan_write(volume, blocks.clone(), writes)?;
            meta.count_write(volume, length);
            Ok(())
        });
        match (step, &mut request.running) {
            (
                Ok(((), early)),
                Some(Running { kind: Kind::Write { planned, must_commit, .. }, .. }),
            ) => {
                (*planned, *must_commit) = (true, early);
                request.lay_out_write();
                self.claim(request)
            }
            (Ok(_), _) => panic!("the blocks are not held"),
            (Err(error), _) => {
                request.abandon();
                Err(error)
            }
        }
    }

    /// Starts a write of whole blocks if nothing is in its way.
    fn try_write(
        &self,
        meta: &mut Meta,
        blocks: Range<u64>,
        request: &mut Request,
    ) -> Result<bool> {
        let volume = self.handle.volume;
        meta.requests += 1;
        let length = (blocks.end - blocks.start) * BLOCK_BYTES;
        let hold = meta.locks.queue(Space::Head(volume), blocks.clone(), false);
        let mut planned = if meta.locks.granted(hold) {
            meta.plan_write(volume, blocks, &mut request.writes)
        } else {
            Err(Stop::Space)
        };
        if planned.is_ok() && !request.try_claim(meta) {
            meta.abort_write(volume, &request.writes);
            planned = Err(Stop::Space);
        }
        match planned {
            Ok(()) => {
                meta.count_write(volume, length);
                let early = meta.publish();
                request.running = Some(self.writing(hold, true, early));
                Ok(true)
            }
            Err(stop) => {
                // Nobody has seen it in the queue, so that nobody need be woken.
                meta.locks.release(hold);
                if let Stop::Error(error) = stop { Err(error) } else { Ok(false) }
            }
        }
    }

    fn writing(&self, hold: HoldId, planned: bool, must_commit: bool) -> Running {
        let kind = Kind::Write { hold, planned, must_commit };
        Running { handle: Arc::clone(&self.handle), kind }
    }

    /// Where the blocks are; a fence number if any is on the device.
    fn plan_read(
        &self,
        meta: &mut Meta,
        blocks: Range<u64>,
        request: &mut Request,
    ) -> Result<Option<u64>> {
        let source = self.source(meta);
        meta.requests += 1;
        meta.plan_read(source, blocks, &mut request.reads)?;
        let any = request.reads.iter().any(|piece| piece.address.is_some());
        Ok(any.then(|| meta.fence.begin()))
    }

    fn begin_read(
        &self,
        offset: u64,
        length: u64,
        fence: Option<u64>,
        request: &mut Request,
    ) -> Start {
        request.lay_out_read(offset, length);
        request.lay_out_beside(length);
        let Some(fence) = fence else { return Start::Done };
        let handle = Arc::clone(&self.handle);
        request.running = Some(Running { handle, kind: Kind::Read { fence } });
        Start::Io
    }

    /// Bytes of a write that is planned in one step.
    pub(super) fn step_bytes(&self) -> usize {
        EXTENTS_PER_WRITE * self.store().extent_bytes
    }
}
