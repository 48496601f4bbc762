//! Reads and writes that never block, for servers: one step says where the bytes are on the
//! device, the caller does that I/O in its own way, and a second step ends the request. The blocking
//! calls of [`Volume`](super::Volume) are made of the same steps.
//!
//! Reads of what was looked up before, and overwrites, share the metadata lock with one another. Any
//! step that finds that it has more to change takes the lock alone, and begins again.

mod start;
mod sums;

use super::Handle;
use crate::crypt::DataKey;
use crate::error::{Error, Result};
use crate::format::sums::Stored;
use crate::meta::Meta;
use crate::meta::locks::{FenceId, HoldId};
use crate::meta::pieces::ReadPiece;
use crate::meta::plan::WritePiece;
use crate::sabotage::{self, Bug};
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

/// What [`Volume::start_read`](super::Volume::start_read) and
/// [`Volume::start_write`](super::Volume::start_write) ask their caller to do.
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
    /// without waiting: use [`Volume::read_at`](super::Volume::read_at), on a thread that may block.
    Again,
}

/// What must come before a write is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Finish {
    /// Nothing.
    Done,
    /// [`Volume::flush`](super::Volume::flush), on a thread that may block.
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
    /// Of a read that is still to be decrypted, or a write that is still to be encrypted, by who does the I/O.
    key: Option<Arc<DataKey>>,
}

enum Kind {
    Read {
        fence: FenceId,
        /// Where it begins in the volume, in bytes.
        offset: u64,
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
    /// If no read is under way, or one that [`Request::finish_read_own`] has to decrypt.
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
        let good = self.end_read_beside(&handle, fence, &outcome, extra)
            || self.end_read_alone(&handle, fence, &outcome, extra.then_some(&stored[..]));
        handle.store.wake();
        match outcome {
            Ok(()) if good => Ok(Read::Done),
            Ok(()) => Ok(Read::Again),
            Err(_) if extra => Ok(Read::Again),
            Err(error) => Err(Error::io(error, format!("reading `{}` failed", handle.spec))),
        }
    }

    /// As [`Request::finish_read`], of what [`Volume::start_read_beside`](super::Volume::start_read_beside) has started:
    /// what is encrypted is decrypted in `buf`.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If no read is under way.
    pub fn finish_read_own(&mut self, outcome: io::Result<()>, buf: &mut [u8]) -> Result<Read> {
        let Some(running) = &mut self.running else { panic!("no read is under way") };
        let (Some(key), Kind::Read { offset, .. }) = (running.key.take(), &running.kind) else {
            return self.finish_read(outcome, buf);
        };
        let offset = *offset;
        let read = self.finish_read(outcome, buf)?;
        if read == Read::Done {
            // Pages of checksums beside the data are no segments any more.
            for segment in &self.segments {
                let place = if sabotage::is(Bug::TweakByPlace) {
                    segment.device
                } else {
                    offset + segment.start as u64
                };
                key.decrypt(place, &mut buf[segment.start..segment.start + segment.length]);
            }
        }
        Ok(read)
    }

    /// Ends a read of which all is known and right; `false` if it is not, and has not ended.
    #[inline]
    fn end_read_beside(
        &mut self,
        handle: &Handle,
        fence: FenceId,
        outcome: &io::Result<()>,
        extra: bool,
    ) -> bool {
        if outcome.is_err() || extra {
            return false;
        }
        let shared = handle.store.shared();
        let meta: &Meta = &shared;
        let all = self.check_beside(meta);
        if all {
            meta.fence.end(fence);
        }
        all
    }

    /// Ends a read, with the pages `stored` beside it if some were fetched; whether it is right.
    fn end_read_alone(
        &mut self,
        handle: &Handle,
        fence: FenceId,
        outcome: &io::Result<()>,
        stored: Option<&[Stored]>,
    ) -> bool {
        let mut meta = handle.store.meta();
        if let Some(stored) = stored {
            self.end_beside(&mut meta, stored);
        }
        let good = outcome.is_err() || self.check_sums(&mut meta, fence.number);
        meta.fence.end(fence);
        good
    }

    /// The fence number of a read under way, which the caller gives back.
    fn end_read(&mut self) -> (Arc<Handle>, FenceId) {
        match self.running.take() {
            Some(Running { handle, kind: Kind::Read { fence, .. }, key: None }) => (handle, fence),
            _ => panic!("no read is under way, or it is still to be decrypted"),
        }
    }

    /// Ends a write with the outcome of its transfers.
    ///
    /// # Errors
    /// `Io` or `NoSpace`, if the outcome is a failure: each block then holds old or new content.
    ///
    /// # Panics
    /// If no write is under way, or one whose bytes were to be encrypted, and were not.
    pub fn finish_write(&mut self, outcome: io::Result<()>) -> Result<Finish> {
        if let Err(error) = outcome {
            let Some(running) = &self.running else { panic!("no write is under way") };
            let error = Error::io(error, format!("writing `{}` failed", running.handle.spec));
            self.abandon();
            return Err(error);
        }
        let Some(Running {
            handle,
            kind: Kind::Write { hold, planned: true, must_commit },
            key: None,
        }) = self.running.take()
        else {
            panic!("no write is under way, or what was written is not encrypted");
        };
        let ended = self.end_overwrite(&handle, hold);
        let must_commit = must_commit | ended.unwrap_or_else(|| self.end_write(&handle, hold));
        handle.store.wake();
        Ok(Finish::of(must_commit))
    }

    /// Ends a write that leaves all metadata as it is, but for checksums; whether a commit must follow.
    /// `None` if it is another, and has not ended.
    #[inline]
    fn end_overwrite(&mut self, handle: &Handle, hold: HoldId) -> Option<bool> {
        let shared = handle.store.shared();
        let meta: &Meta = &shared;
        // One that excludes is given back by who has the state alone.
        let HoldId::Shared(hold) = hold else { return None };
        if !meta.is_overwrite(&self.writes) || !self.end_claims_beside(meta) {
            return None;
        }
        meta.note_overwrite(handle.volume);
        // Another's record may say that this place is data.
        let must_commit = meta.log.is_unsafe() && !sabotage::is(Bug::OverwriteBeforeTail);
        meta.locks.release_shared(hold);
        Some(must_commit)
    }

    /// Ends a write; whether a commit must follow.
    fn end_write(&mut self, handle: &Handle, hold: HoldId) -> bool {
        let mut meta = handle.store.meta();
        self.end_claims(&mut meta, true);
        meta.finish_write(handle.volume, &self.writes);
        let must_commit = meta.publish();
        meta.locks.release(hold);
        must_commit
    }

    /// The first block of a planned write, counted in its volume.
    pub(super) fn first_block(&self) -> u64 {
        let Some(Running { handle, .. }) = &self.running else { panic!("no write is under way") };
        let per_extent = handle.store.extent_bytes as u64 / BLOCK_BYTES;
        let first = &self.writes[0];
        if sabotage::is(Bug::TweakByPlace) {
            return first.address / BLOCK_BYTES;
        }
        u64::from(first.logical) * per_extent + u64::from(first.blocks.start)
    }

    fn clear(&mut self) {
        assert!(self.running.is_none(), "the request is under way");
        self.sums.clear();
        self.segments.clear();
        self.zeros.clear();
    }

    /// Gives back what is held, as after a failure.
    fn abandon(&mut self) {
        let Some(Running { handle, kind, .. }) = self.running.take() else { return };
        let mut meta = handle.store.meta();
        match kind {
            Kind::Read { fence, .. } => {
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
        let Some(Running { handle, kind: Kind::Write { hold, .. }, .. }) = self.running.take()
        else {
            return;
        };
        handle.store.poison(&format!("a write to `{}` was dropped before it ended", handle.spec));
        let mut meta = handle.store.meta();
        self.end_claims(&mut meta, false);
        meta.locks.release(hold);
        drop(meta);
        handle.store.wake();
    }

    /// Whether a part of a read is in a file, or compressed: that is for a thread that may wait.
    fn is_far(&self) -> bool {
        self.reads.iter().any(|piece| piece.far.is_some())
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
