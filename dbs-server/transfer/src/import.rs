//! Filling a volume from a raw image.

use super::pipeline::pipeline;
use super::{BlockAccess, Copied, Filler, PIECE_BYTES, Piece, Progress, ZERO_PIECE_BYTES};
use super::{padded, report};
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, Result};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::time::SystemTime;

/// Fills a volume from its start with the content of a file or block device; holes and blocks of
/// zeros take no space. A length that is no multiple of 512 is padded with zeros; what the volume
/// has beyond it stays. On success everything is durable.
///
/// # Errors
/// `Invalid` if the volume is smaller; `Interrupted`; those of either side.
pub fn import_file(
    file: &File,
    access: &dyn BlockAccess,
    progress: Progress<'_>,
) -> Result<Copied> {
    let mut source = FileSource::new(file)?;
    let total = source.end;
    if total > access.size() {
        return Err(too_long(&format!("is {} bytes long", source.length), access.size()));
    }
    fill(access, total, progress, |piece| source.next(piece))
}

/// As [`import_file`], from a pipe or anything else that is read to its end.
///
/// # Errors
/// `Invalid` if it is longer than the volume, which by then holds its start.
pub fn import_stream(
    mut input: impl Read + Send,
    access: &dyn BlockAccess,
    progress: Progress<'_>,
) -> Result<Copied> {
    let size = access.size();
    let mut at = 0;
    fill(access, size, progress, move |piece| {
        let buf = piece.set_data(at, PIECE_BYTES.min(size - at));
        let count = read_full(&mut input, buf).map_err(|e| Error::io(e, "reading the input"))?;
        if count < buf.len() {
            let length = padded(count as u64);
            buf[count..length as usize].fill(0);
            piece.set_data(at, length);
        } else if at + count as u64 == size && has_more(&mut input)? {
            return Err(too_long("goes on", size));
        }
        at += piece.length;
        Ok(piece.length > 0)
    })
}

fn too_long(what: &str, size: u64) -> Error {
    Error::invalid(format!(
        "the input {what} and the volume has {size} bytes; create or resize it larger"
    ))
}

fn fill(
    access: &dyn BlockAccess,
    total: u64,
    progress: Progress<'_>,
    next: impl FnMut(&mut Piece) -> Result<bool> + Send,
) -> Result<Copied> {
    let mut filler = Filler::new(access)?;
    let mut length = 0;
    pipeline(next, |piece: &Piece| {
        filler.fill(piece)?;
        length = piece.end();
        report(progress, length, total)
    })?;
    // A pipe ends early if the same signal has ended who writes to it.
    report(progress, length, total)?;
    access.flush()?;
    Ok(Copied { length, data: filler.data })
}

/// A file read sparsely, in blocks: its data and holes are widened to block boundaries.
struct FileSource<'a> {
    file: &'a File,
    length: u64,
    /// When it was written last, of a regular file.
    written: Option<SystemTime>,
    /// The length, padded.
    end: u64,
    at: u64,
    segment_end: u64,
    is_data: bool,
}

impl<'a> FileSource<'a> {
    fn new(file: &'a File) -> Result<Self> {
        let (length, written) = state_of(file)?;
        let end = padded(length);
        Ok(Self { file, length, written, end, at: 0, segment_end: 0, is_data: false })
    }

    fn next(&mut self, piece: &mut Piece) -> Result<bool> {
        if self.at == self.end {
            return self.check_unchanged().map(|()| false);
        }
        if self.at >= self.segment_end {
            self.find_segment().map_err(|e| Error::io(e.into(), "finding holes in the file"))?;
        }
        let rest = self.segment_end - self.at;
        if self.is_data {
            let length = rest.min(PIECE_BYTES - self.at % PIECE_BYTES);
            let buf = piece.set_data(self.at, length);
            let stored = (self.length - self.at).min(length) as usize;
            let (stored, padding) = buf.split_at_mut(stored);
            self.file.read_exact_at(stored, self.at).map_err(|error| {
                Error::io(error, format!("reading the file at byte {}", self.at))
            })?;
            padding.fill(0);
        } else {
            piece.set_zero(self.at, rest.min(ZERO_PIECE_BYTES));
        }
        self.at = piece.end();
        Ok(true)
    }

    /// Refuses a file that somebody has written to meanwhile: where it is cut off, or not written again yet, it looks like
    /// a hole.
    fn check_unchanged(&self) -> Result<()> {
        if state_of(self.file)? == (self.length, self.written) {
            return Ok(());
        }
        Err(Error::busy(
            "somebody has written to the input meanwhile: import it again when that has ended",
        ))
    }

    /// Sets the segment that starts at `at`, which is below the length.
    fn find_segment(&mut self) -> nix::Result<()> {
        let data = match self.seek(Whence::SeekData) {
            // No data from here on.
            Err(Errno::ENXIO) => self.end,
            // No holes are known of devices and of some file systems.
            Err(Errno::EINVAL) => {
                (self.is_data, self.segment_end) = (true, self.end);
                return Ok(());
            }
            found => found? / BLOCK_BYTES * BLOCK_BYTES,
        };
        self.is_data = data <= self.at;
        let end = if self.is_data {
            self.seek(Whence::SeekHole)?.next_multiple_of(BLOCK_BYTES)
        } else {
            data
        };
        // Whatever the file does meanwhile, each segment gets us on.
        self.segment_end = end.max(self.at + BLOCK_BYTES).min(self.end);
        Ok(())
    }

    fn seek(&self, whence: Whence) -> nix::Result<u64> {
        let from = i64::try_from(self.at).map_err(|_| Errno::EOVERFLOW)?;
        let found = lseek(self.file, from, whence)?;
        u64::try_from(found).map_err(|_| Errno::EOVERFLOW)
    }
}

/// The length, also of a block device, whose metadata does not tell it; and when a regular file was written last.
fn state_of(mut file: &File) -> Result<(u64, Option<SystemTime>)> {
    let failed = |e| Error::io(e, "looking at the file");
    let metadata = file.metadata().map_err(failed)?;
    let written = if metadata.is_file() { metadata.modified().ok() } else { None };
    Ok((file.seek(SeekFrom::End(0)).map_err(failed)?, written))
}

/// Reads until `buf` is full or the input ends; returns the bytes read.
fn read_full(input: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match input.read(&mut buf[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn has_more(input: &mut impl Read) -> Result<bool> {
    let count = read_full(input, &mut [0]).map_err(|e| Error::io(e, "reading the input"))?;
    Ok(count > 0)
}
