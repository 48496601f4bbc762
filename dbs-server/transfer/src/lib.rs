//! Moving whole volumes: images in ([`import_file`], [`import_stream`]) and out
//! ([`export_path`], [`export_stream`]), and snapshots from store to store ([`send`], [`receive`]).
//!
//! All of it works on [`BlockAccess`], so that a volume may be open in this process or served by
//! another one.
//!
//! This crate owns the bytes of an image and of a stream (`docs/stream.md`) on their way. It opens no store.
//!
//! Main types: [`BlockAccess`], a volume to read or write; [`StoreAccess`], the store that a stream comes from or goes
//! to; [`StreamHeader`], what a stream says first.
//!
//! Enter at [`import_stream`] and [`export_stream`] for images, at [`send`] and [`receive`] for streams.

mod bytes;
mod export;
mod import;
#[cfg(test)]
mod memory;
mod nbd;
mod pipeline;
mod stream;
#[cfg(test)]
mod tests;

pub use bytes::{discard_bytes_at, find_bytes, read_bytes_at, write_around, zero_bytes_at};
pub use export::{NewFile, export_file, export_path, export_stream};
pub use import::{import_file, import_stream};
pub use nbd::{NbdAccess, translate};
pub use stream::{
    BaseSnapshot, EXPORT_LABEL, EXPORT_NAME, ReceiveOptions, Received, ResumeToken, SendOptions,
    StoreAccess, StreamHeader, check_same, check_whole, is_of_export, is_received, pending, plan,
    receive, receive_all, send,
};

use dbs_core::info::{MapRange, RangeState};
use dbs_core::units::{BLOCK_BYTES, SECTOR_BYTES};
use dbs_core::volume::ReadPart;
use dbs_core::{Error, ErrorKind, Result, Volume, v1};
use serde::Serialize;

/// Bytes moved at once.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of a range without data that are passed over at once: progress is seen and a stop is
/// obeyed in between.
const ZERO_PIECE_BYTES: u64 = 1 << 30;
/// Entries of a map asked for at once.
const MAP_LIMIT: usize = 4096;

/// Called with the bytes done and the bytes in all; returning false stops the transfer with
/// [`ErrorKind::Interrupted`].
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// What a transfer moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Copied {
    /// Bytes of the volume that were passed over, from the first on.
    pub length: u64,
    /// Bytes of data written.
    pub data: u64,
}

/// A volume or snapshot to read and write, wherever it is. Offsets and lengths are multiples of
/// 512 bytes inside the size.
pub trait BlockAccess: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// Those of the store or the connection, here and below.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Writes `buf` at `offset`.
    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()>;
    /// Makes the range read as zeros, to the byte.
    fn write_zeroes(&self, offset: u64, length: u64) -> Result<()>;
    /// Gives up the content of the whole blocks inside the range.
    fn discard(&self, offset: u64, length: u64) -> Result<()>;
    /// Makes everything written durable.
    fn flush(&self) -> Result<()>;
    /// The map of the range, in order and without gaps, at most `limit` entries.
    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>>;

    /// Ends the access: on return nobody holds the volume open because of it. `go_on` is asked now and then
    /// whether to wait for that, if it takes long.
    ///
    /// # Errors
    /// `Interrupted` if it is not to be waited for.
    fn close(self: Box<Self>, go_on: &mut dyn FnMut() -> bool) -> Result<()> {
        let _ = go_on;
        Ok(())
    }

    /// Fills the buffers of all `reads`, at once where that can be done.
    ///
    /// # Errors
    /// As above; the buffers are then undefined.
    fn read_many(&self, reads: &mut [ReadPart<'_>]) -> Result<()> {
        reads.iter_mut().try_for_each(|read| self.read_at(read.offset, read.buf))
    }

    /// Writes `buf` at any byte. Without an implementation of its own, nobody else may write the
    /// sectors around it meanwhile.
    fn write_bytes_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let read = |at, part: &mut [u8]| self.read_at(at, part);
        bytes::write_around(self.size(), offset, buf, &read, &|at, part| self.write_at(at, part))
    }
}

impl BlockAccess for Volume {
    fn size(&self) -> u64 {
        Volume::size(self)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Volume::read_at(self, offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        Volume::write_at(self, offset, buf, false)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        Volume::write_zeroes(self, offset, length, false)
    }

    fn discard(&self, offset: u64, length: u64) -> Result<()> {
        Volume::discard(self, offset, length)
    }

    fn flush(&self) -> Result<()> {
        Volume::flush(self)
    }

    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        Volume::map(self, offset, length, limit)
    }

    fn read_many(&self, reads: &mut [ReadPart<'_>]) -> Result<()> {
        Volume::read_many(self, reads)
    }

    fn write_bytes_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        Volume::write_bytes_at(self, offset, buf)
    }
}

/// A volume or snapshot of a v1 image, for export.
impl BlockAccess for v1::View<'_> {
    fn size(&self) -> u64 {
        v1::View::size(self)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        v1::View::read_at(self, offset, buf)
    }

    fn write_at(&self, _offset: u64, _buf: &[u8]) -> Result<()> {
        Err(read_only_image())
    }

    fn write_zeroes(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(read_only_image())
    }

    fn discard(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(read_only_image())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        v1::View::map(self, offset, length, limit)
    }
}

fn read_only_image() -> Error {
    Error::read_only("images of format 1.0.0 are only read; copy them with `dbs upgrade OLD NEW`")
}

/// The map of a range, asked for piece by piece and checked: a server is not trusted to give one
/// that is complete and in order.
struct MapWalk<'a> {
    access: &'a dyn BlockAccess,
    at: u64,
    end: u64,
    /// Entries asked for at once.
    limit: usize,
    batch: std::vec::IntoIter<MapRange>,
}

impl<'a> MapWalk<'a> {
    fn new(access: &'a dyn BlockAccess, offset: u64, length: u64) -> Self {
        let batch = Vec::new().into_iter();
        Self { access, at: offset, end: offset + length, limit: MAP_LIMIT, batch }
    }

    fn step(&mut self) -> Result<MapRange> {
        let range = match self.batch.next() {
            Some(range) => Some(range),
            None => {
                let length = self.end - self.at;
                self.batch = self.access.map(self.at, length, self.limit)?.into_iter();
                self.batch.next()
            }
        };
        match range {
            Some(r) if r.offset == self.at && (1..=self.end - self.at).contains(&r.length) => {
                self.at += r.length;
                Ok(r)
            }
            _ => Err(Error::corrupt(format!("the map of the volume breaks off at {}", self.at))),
        }
    }
}

impl Iterator for MapWalk<'_> {
    type Item = Result<MapRange>;

    fn next(&mut self) -> Option<Self::Item> {
        (self.at < self.end).then(|| self.step())
    }
}

/// A part of a volume on its way: its bytes, or the fact that they are zeros.
#[derive(Default)]
struct Piece {
    offset: u64,
    length: u64,
    is_data: bool,
    /// Holds `length` bytes if `is_data`; otherwise what an earlier piece left.
    buf: Vec<u8>,
}

impl Piece {
    fn set_zero(&mut self, offset: u64, length: u64) {
        (self.offset, self.length, self.is_data) = (offset, length, false);
    }

    /// Makes room for data and returns it; the bytes are undefined until filled.
    fn set_data(&mut self, offset: u64, length: u64) -> &mut [u8] {
        (self.offset, self.length, self.is_data) = (offset, length, true);
        // Pieces are at most `PIECE_BYTES` long.
        self.buf.resize(length as usize, 0);
        &mut self.buf
    }

    fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// Its runs of zero and other blocks.
    fn runs(&self) -> Vec<Run<'_>> {
        if !self.is_data {
            return vec![Run { offset: self.offset, length: self.length, data: None }];
        }
        let mut runs: Vec<(usize, usize, bool)> = Vec::new();
        for block in self.buf.chunks(BLOCK_BYTES as usize) {
            let is_data = block.iter().any(|byte| *byte != 0);
            match runs.last_mut() {
                Some((_, end, last)) if *last == is_data => *end += block.len(),
                _ => {
                    let start = runs.last().map_or(0, |(_, end, _)| *end);
                    runs.push((start, start + block.len(), is_data));
                }
            }
        }
        runs.into_iter()
            .map(|(start, end, is_data)| Run {
                offset: self.offset + start as u64,
                length: (end - start) as u64,
                data: is_data.then(|| &self.buf[start..end]),
            })
            .collect()
    }
}

/// A run of blocks of one kind.
struct Run<'a> {
    offset: u64,
    length: u64,
    /// The bytes, unless all are zero.
    data: Option<&'a [u8]>,
}

/// A volume being filled: zeros are written only over data.
struct Filler<'a> {
    access: &'a dyn BlockAccess,
    /// Nothing was written to it before: it reads as zeros where nothing is written now.
    fresh: bool,
    data: u64,
}

impl<'a> Filler<'a> {
    fn new(access: &'a dyn BlockAccess) -> Result<Self> {
        Ok(Self { access, fresh: !holds_data(access)?, data: 0 })
    }

    fn fill(&mut self, piece: &Piece) -> Result<()> {
        for run in piece.runs() {
            match run.data {
                Some(data) => {
                    self.access.write_at(run.offset, data)?;
                    self.data += run.length;
                }
                None => self.zero(run.offset, run.length)?,
            }
        }
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64) -> Result<()> {
        if self.fresh {
            return Ok(());
        }
        for range in MapWalk::new(self.access, offset, length) {
            let range = range?;
            if range.state == RangeState::Data {
                self.access.write_zeroes(range.offset, range.length)?;
            }
        }
        Ok(())
    }
}

/// Whether any range of a volume holds data.
fn holds_data(access: &dyn BlockAccess) -> Result<bool> {
    for range in MapWalk::new(access, 0, access.size()) {
        if range?.state == RangeState::Data {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads a volume piece by piece.
struct VolumeSource<'a> {
    access: &'a dyn BlockAccess,
    walk: MapWalk<'a>,
    /// What is left of the current range.
    range: MapRange,
}

impl<'a> VolumeSource<'a> {
    fn new(access: &'a dyn BlockAccess, offset: u64) -> Self {
        Self {
            access,
            walk: MapWalk::new(access, offset, access.size() - offset),
            range: MapRange { offset, length: 0, state: RangeState::Hole },
        }
    }

    fn next(&mut self, piece: &mut Piece) -> Result<bool> {
        if self.range.length == 0 {
            match self.walk.next() {
                None => return Ok(false),
                Some(range) => self.range = range?,
            }
        }
        read_part(self.access, &mut self.range, piece)?;
        Ok(true)
    }
}

/// Takes the next piece off the front of a range, reading it if it is data.
fn read_part(access: &dyn BlockAccess, range: &mut MapRange, piece: &mut Piece) -> Result<()> {
    let offset = range.offset;
    let length = if range.state == RangeState::Data {
        let length = range.length.min(PIECE_BYTES - offset % PIECE_BYTES);
        access.read_at(offset, piece.set_data(offset, length))?;
        length
    } else {
        let length = range.length.min(ZERO_PIECE_BYTES);
        piece.set_zero(offset, length);
        length
    };
    range.offset += length;
    range.length -= length;
    Ok(())
}

fn report(progress: &mut dyn FnMut(u64, u64) -> bool, done: u64, total: u64) -> Result<()> {
    if progress(done, total) {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::Interrupted, format!("stopped at {done} of {total} bytes")))
    }
}

/// The length of a volume that holds an image of `length` bytes.
fn padded(length: u64) -> u64 {
    length.next_multiple_of(SECTOR_BYTES)
}
