//! A volume or snapshot opened for I/O.
//!
//! The path of a 4 KiB write: [`Volume::start_write`] checks the range and takes its blocks,
//! `meta::plan::plan_write` says where they are or allocates, the caller (or, in
//! [`Volume::write_at`], the storage driver) writes them, and [`Request::finish_write`] records
//! what is new. Overwriting what the head owns costs one device write and no record.

use crate::error::{Error, Result};
use crate::info::MapRange;
use crate::io::WriteRequest;
use crate::io::buffer::AlignedBuf;
use crate::meta::Meta;
use crate::meta::usage::Ranges;
use crate::store::Inner;
use crate::units::{BLOCK_BYTES, SECTOR_BYTES, SnapshotId, VolumeId};
use std::ops::Range;
use std::sync::Arc;

mod heal;
mod holder;
mod layer;
mod layer_write;
mod many;
mod observer;
mod read;
mod request;
mod trim;
mod zero;

pub use holder::{Claim, RECEIVING};
pub use layer::Layer;
pub use many::ReadPart;
pub use observer::{Observed, Observer};
pub use request::{Finish, Read, Request, Segment, Start};

pub use crate::meta::pace::Pace;
pub use crate::store::{Asked, Flush, StartFlush, Wake};

/// An open volume or snapshot. Cloning the handle is cheap. Offsets and lengths are multiples of
/// 512 bytes inside the size. All calls block and may be made from many threads at once.
#[derive(Clone)]
pub struct Volume {
    handle: Arc<Handle>,
}

struct Handle {
    store: Arc<Inner>,
    volume: VolumeId,
    snapshot: Option<SnapshotId>,
    spec: String,
    pace: Arc<Pace>,
    /// What is read is decrypted, and what is written encrypted; that never changes.
    encrypted: bool,
    /// Blocks are read and written as they are stored, encrypted or not: by who moves them without a key.
    as_stored: bool,
    /// Its number, if it is open in somebody's name.
    holder: Option<u64>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut meta = self.store.meta();
        meta.closed(self.volume, self.snapshot);
        if let Some(holder) = self.holder {
            meta.remove_holder(holder);
        }
    }
}

impl Volume {
    /// `volume` or `volume@snapshot`, as it was when opened.
    #[must_use]
    pub fn spec(&self) -> &str {
        &self.handle.spec
    }

    /// How fast the volume may be used: what a server asks before it starts a request of a client. The calls of
    /// this handle do not ask.
    #[must_use]
    pub fn pace(&self) -> &Arc<Pace> {
        &self.handle.pace
    }

    /// Whether it rests on a file that [is far](crate::Backing::is_far).
    #[must_use]
    pub fn rests_far(&self) -> bool {
        let store = self.store();
        store.has_far() && {
            let meta = store.shared();
            store.is_far(&meta, self.source(&meta))
        }
    }

    /// Current size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        let meta = self.store().shared();
        meta.snapshot(self.source(&meta)).size
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.handle.snapshot.is_some() || self.store().read_only
    }

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// `Invalid` outside the volume or unaligned, `Io`.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_parts(&mut [ReadPart { offset, buf }], true)
    }

    /// Writes `buf` at `offset`; with `fua` it is durable on return, with all acknowledged before.
    ///
    /// # Errors
    /// `Invalid` outside the volume or unaligned, `ReadOnly`, `NoSpace`, `Io`, `Poisoned`.
    pub fn write_at(&self, offset: u64, buf: &[u8], fua: bool) -> Result<()> {
        let finish = self.write_part(offset, buf)?;
        if finish == Finish::Commit || fua { self.store().commit() } else { Ok(()) }
    }

    /// As [`Volume::write_at`] for a part of a request that is carried out step by step: whoever
    /// answers the request commits first if one of its parts says so.
    ///
    /// # Errors
    /// As [`Volume::write_at`].
    pub fn write_part(&self, offset: u64, buf: &[u8]) -> Result<Finish> {
        self.check_writable(offset, buf.len() as u64)?;
        let must_commit = match buf {
            [] => false,
            _ if is_whole(offset) && is_whole(buf.len() as u64) => self.write_whole(offset, buf)?,
            _ => self.write_edges(offset, buf)?,
        };
        Ok(Finish::of(must_commit))
    }

    /// Writes `buf` at any byte: for protocols that know no sectors.
    ///
    /// # Errors
    /// `Invalid` outside the volume, `ReadOnly`, `NoSpace`, `Io`, `Poisoned`.
    pub fn write_bytes_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let end = offset.saturating_add(buf.len() as u64);
        if offset.is_multiple_of(SECTOR_BYTES) && end.is_multiple_of(SECTOR_BYTES) {
            return self.write_at(offset, buf, false);
        }
        // The sectors around it are checked as a range of their own.
        let start = offset - offset % SECTOR_BYTES;
        let sectors = end.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(u64::MAX) - start;
        self.check_writable(start, sectors)?;
        if !buf.is_empty() && self.write_edges(offset, buf)? {
            self.store().commit()?;
        }
        Ok(())
    }

    /// Makes everything acknowledged so far durable.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub fn flush(&self) -> Result<()> {
        if self.read_only() { Ok(()) } else { self.store().commit() }
    }

    /// As [`Volume::flush`], for who may not wait, and flushes the storage itself: if nothing but a flush is
    /// to be done. Who is to ask again later is told by `wake`, and asks with the same `asked`.
    ///
    /// # Errors
    /// `Poisoned`.
    pub fn start_flush(&self, asked: &mut Asked, wake: &Wake) -> Result<StartFlush> {
        if self.read_only() {
            return Ok(StartFlush::Done);
        }
        self.handle.store.start_flush(asked, wake)
    }

    /// The map of the range, in order and without gaps, at most `limit` entries (the last one
    /// ends where a further call continues). Entries end at block borders or at the range's end.
    /// Long ranges are looked at step by step: of a head that is being written, at different moments.
    ///
    /// # Errors
    /// `Invalid` outside the volume.
    pub fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        self.map_with(offset, length, Ranges::new(limit.max(1)))
    }

    /// As [`Volume::map`], but as if a [file](crate::Backing) that the volume rests on was not there: what comes from
    /// it is a hole, and zeros that hide it are told as ever.
    ///
    /// # Errors
    /// As [`Volume::map`].
    pub fn map_layers(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        self.map_with(offset, length, Ranges::new(limit.max(1)).without_file())
    }

    fn map_with(&self, offset: u64, length: u64, mut ranges: Ranges) -> Result<Vec<MapRange>> {
        self.check_range(offset, length)?;
        let blocks = blocks_of(offset, length);
        let mut next = blocks.start;
        while next < blocks.end && !ranges.full() {
            next = self
                .store()
                .look(|meta| meta.map_step(self.source(meta), next..blocks.end, &mut ranges))?;
        }
        Ok(ranges.into_clipped(offset, length))
    }

    /// As [`Volume::map`], but of no more than is looked at in a moment, however long the range is:
    /// the map ends where the next call is to begin.
    ///
    /// # Errors
    /// As [`Volume::map`].
    pub fn map_part(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        let mut ranges = Ranges::new(limit.max(1));
        let next = self.store().look(|meta| {
            self.check_range_in(meta, offset, length)?;
            meta.map_step(self.source(meta), blocks_of(offset, length), &mut ranges)
        })?;
        let reached = (next * BLOCK_BYTES).clamp(offset, offset + length);
        Ok(ranges.into_clipped(offset, reached - offset))
    }

    /// The volume's number in its store; another volume has it once this one is deleted.
    #[must_use]
    pub fn id(&self) -> VolumeId {
        self.handle.volume
    }

    /// Volume and snapshot it is of.
    pub(crate) fn ids(&self) -> (VolumeId, Option<SnapshotId>) {
        (self.handle.volume, self.handle.snapshot)
    }

    /// The block that holds the end at `size`, if it does not end there, with zeros behind it;
    /// `None` if they are there.
    pub(crate) fn last_block_cut(&self, size: u64) -> Result<Option<AlignedBuf>> {
        let partial = (size % BLOCK_BYTES) as usize;
        if partial == 0 {
            return Ok(None);
        }
        let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        self.read_inside(size - partial as u64, &mut block)?;
        let behind = &mut block[partial..];
        let dirty = behind.iter().any(|byte| *byte != 0);
        behind.fill(0);
        Ok(dirty.then_some(block))
    }

    /// Clears what a shrunk volume left behind its end in its last block, before it grows.
    pub(crate) fn zero_last_block_behind(&self, size: u64) -> Result<()> {
        if let Some(block) = self.last_block_cut(size)? {
            // Where the volume has grown meanwhile, what is behind this end is somebody's content. While the
            // block is held the size stays: changing it takes all of the volume.
            let zeros = &block[(size % BLOCK_BYTES) as usize..];
            self.write_parts_if(size, zeros, || self.size() == size)?;
        }
        Ok(())
    }

    fn store(&self) -> &Inner {
        &self.handle.store
    }

    fn source(&self, meta: &Meta) -> SnapshotId {
        self.handle.snapshot.unwrap_or_else(|| meta.volume(self.handle.volume).head)
    }

    fn check_range(&self, offset: u64, length: u64) -> Result<()> {
        self.check_range_in(&self.store().shared(), offset, length)
    }

    fn check_range_in(&self, meta: &Meta, offset: u64, length: u64) -> Result<()> {
        if !offset.is_multiple_of(SECTOR_BYTES) || !length.is_multiple_of(SECTOR_BYTES) {
            return Err(unaligned(offset, length));
        }
        let size = meta.snapshot(self.source(meta)).size;
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(outside(offset, length, size, self.spec()));
        }
        Ok(())
    }

    /// Whether blocks lie in the volume, by who holds them or is about to: since the request for them was
    /// checked the volume may have shrunk. Entries behind its end are given up without asking who writes.
    fn check_inside(&self, meta: &Meta, blocks: &Range<u64>) -> Result<()> {
        let size = meta.snapshot(self.source(meta)).size;
        if blocks.end > size.div_ceil(BLOCK_BYTES) {
            let length = (blocks.end - blocks.start) * BLOCK_BYTES;
            return Err(outside(blocks.start * BLOCK_BYTES, length, size, self.spec()));
        }
        Ok(())
    }

    fn check_writable(&self, offset: u64, length: u64) -> Result<()> {
        self.check_unlocked()?;
        if self.handle.encrypted {
            self.store().shared().check_not_locked(self.handle.volume)?;
        }
        self.check_range(offset, length)
    }

    /// What is to be stored in place of bytes at `offset`, in memory of its own, as the caller's is not to be changed;
    /// none if that is the bytes themselves.
    pub(crate) fn encrypt(&self, offset: u64, bytes: &[u8]) -> Result<Option<AlignedBuf>> {
        if !self.handle.encrypted {
            return Ok(None);
        }
        let key = {
            let meta = self.store().shared();
            meta.key_for(self.source(&meta))?
        };
        Ok(key.map(|key| {
            let mut buf = AlignedBuf::copy_of(bytes);
            key.encrypt(offset, &mut buf);
            buf
        }))
    }

    /// Whether the volume may be written at all. Who asks with the metadata locked knows that no write
    /// that it might overtake was dropped.
    fn check_unlocked(&self) -> Result<()> {
        if self.handle.snapshot.is_some() {
            return Err(Error::read_only(format!("`{}` is a snapshot", self.spec())));
        }
        self.store().check_writable()
    }

    /// Reads blocks of the volume, whatever its size is.
    fn read_inside(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_parts(&mut [ReadPart { offset, buf }], false)
    }

    /// Fills buffers, all from one moment; if `checked`, only from inside the volume as it is then.
    fn read_parts(&self, parts: &mut [ReadPart<'_>], checked: bool) -> Result<()> {
        let name = || format!("`{}`", self.spec());
        self.store().read_parts(parts, &name, Some(self.handle.volume), |meta, part, pieces| {
            let length = part.buf.len() as u64;
            if checked {
                self.check_range_in(meta, part.offset, length)?;
            }
            let source = self.source(meta);
            meta.plan_read(source, blocks_of(part.offset, length), pieces)?;
            if self.handle.as_stored {
                return Ok(None);
            }
            Ok(meta.key_for(source)?)
        })
    }

    /// Writes whole blocks, so many at a time that their records stay short.
    fn write_whole(&self, offset: u64, buf: &[u8]) -> Result<bool> {
        let mut request = Request::new();
        let mut must_commit = false;
        let mut at = offset;
        for part in buf.chunks(self.step_bytes()) {
            self.wait_write(blocks_of(at, part.len() as u64), &mut request)?;
            must_commit |= self.write_started(part, &mut request)?;
            at += part.len() as u64;
        }
        Ok(must_commit)
    }

    /// Transfers and finishes a write; whether a commit must follow. Every blocking write of data to a head comes here,
    /// and is encrypted here, before its checksums are taken.
    fn write_started(&self, buf: &[u8], request: &mut Request) -> Result<bool> {
        let encrypted = match self.handle.encrypted {
            true => self.encrypt(request.first_block() * BLOCK_BYTES, buf),
            false => Ok(None),
        };
        let encrypted = encrypted.inspect_err(|_| request.cancel())?;
        let buf = encrypted.as_deref().unwrap_or(buf);
        request.seal(buf);
        let writes: Vec<_> = request
            .segments()
            .iter()
            .map(|part| WriteRequest {
                offset: part.device,
                buf: &buf[part.start..part.start + part.length],
            })
            .collect();
        let outcome = self.store().storage.write_many(&writes);
        Ok(request.finish_write(outcome)? == Finish::Commit)
    }

    /// Writes a range whose first or last block is partial, so many blocks at a time.
    fn write_edges(&self, offset: u64, buf: &[u8]) -> Result<bool> {
        let mut must_commit = false;
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let step = self.step_bytes() - (at % BLOCK_BYTES) as usize;
            let (part, after) = rest.split_at(step.min(rest.len()));
            must_commit |= self.write_parts(at, part)?;
            (at, rest) = (at + part.len() as u64, after);
        }
        Ok(must_commit)
    }

    /// Writes a range whose first or last block is partial: read, change, write, with the blocks
    /// held so that nobody's bytes in between are lost.
    fn write_parts(&self, offset: u64, buf: &[u8]) -> Result<bool> {
        self.write_parts_if(offset, buf, || true)
    }

    /// As [`Volume::write_parts`], if that is still wanted when the blocks are held.
    fn write_parts_if(
        &self,
        offset: u64,
        buf: &[u8],
        wanted: impl FnOnce() -> bool,
    ) -> Result<bool> {
        let blocks = blocks_of(offset, buf.len() as u64);
        let mut request = Request::new();
        self.wait_hold(blocks.clone(), true, &mut request);
        if !wanted() {
            return Ok(false);
        }
        let start = blocks.start * BLOCK_BYTES;
        let mut whole = AlignedBuf::zeroed(((blocks.end - blocks.start) * BLOCK_BYTES) as usize);
        let last = whole.len() - BLOCK_BYTES as usize;
        let block = BLOCK_BYTES as usize;
        if !is_whole(offset) {
            self.read_inside(start, &mut whole[..block])?;
        }
        if !is_whole(offset + buf.len() as u64) && (last > 0 || is_whole(offset)) {
            self.read_inside(start + last as u64, &mut whole[last..])?;
        }
        whole[(offset - start) as usize..][..buf.len()].copy_from_slice(buf);
        self.plan_held(blocks, &mut request)?;
        self.write_started(&whole, &mut request)
    }
}

#[cold]
fn unaligned(offset: u64, length: u64) -> Error {
    Error::invalid(format!("offset {offset} and length {length} must be multiples of 512"))
}

#[cold]
fn outside(offset: u64, length: u64, size: u64, spec: &str) -> Error {
    Error::invalid(format!("range {offset}+{length} is outside `{spec}` of {size} bytes"))
}

fn is_whole(bytes: u64) -> bool {
    bytes.is_multiple_of(BLOCK_BYTES)
}

fn blocks_of(offset: u64, length: u64) -> Range<u64> {
    offset / BLOCK_BYTES..(offset + length).div_ceil(BLOCK_BYTES)
}
