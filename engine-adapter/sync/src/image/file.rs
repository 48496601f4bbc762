//! A sparse file as an image: what upstream's replicas keep their layers in.

use crate::image::{Checksum, GRAIN, Interval, Record, Sink, Source, check_inside};
use dbs_core::{Error, Result};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use nix::unistd::{Whence, lseek};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A sparse file. Data and holes are what the filesystem says (`SEEK_DATA`), widened to the grain;
/// allocated but never written blocks count as holes.
#[derive(Debug)]
pub struct SparseFile {
    path: PathBuf,
    existed: bool,
    /// Opened at once for a source, with [`Sink::open`] for a sink.
    file: OnceLock<File>,
}

impl SparseFile {
    /// Opens an existing file for reading.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn source(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = open_to_map(&path).map_err(|error| cannot("open", &path, error))?;
        Ok(Self { path, existed: true, file: OnceLock::from(file) })
    }

    /// A file to receive, which may or may not exist; nothing happens to it before [`Sink::open`].
    #[must_use]
    pub fn sink(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self { existed: path.exists(), path, file: OnceLock::new() }
    }

    /// What changes whenever the file does: its change time.
    ///
    /// # Errors
    /// `Io`.
    pub fn stamp(&self) -> Result<String> {
        let metadata =
            self.path.metadata().map_err(|error| cannot("look at", &self.path, error))?;
        Ok(stamp(&metadata))
    }

    fn file(&self) -> Result<&File> {
        self.file.get().ok_or_else(|| {
            Error::invalid(format!("`{}` has not been opened for receiving", self.path.display()))
        })
    }

    fn io<T>(&self, verb: &str, outcome: io::Result<T>) -> Result<T> {
        outcome.map_err(|error| cannot(verb, &self.path, error))
    }
}

/// Opens a file for reading, of which is asked where it has data. Nothing is read ahead: blocks that are allocated and were
/// never written count as data once they are in the page cache.
///
/// # Errors
/// Of opening it.
pub fn open_to_map(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    // Where there is no such advice there is none to give.
    let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM);
    Ok(file)
}

impl Source for SparseFile {
    fn size(&self) -> u64 {
        self.file.get().and_then(|file| file.metadata().ok()).map_or(0, |metadata| metadata.len())
    }

    fn intervals(&self, offset: u64, limit: usize) -> Result<Vec<Interval>> {
        let (file, size) = (self.file()?, self.size());
        let mut intervals = Vec::new();
        let mut at = offset;
        while at < size && intervals.len() < limit {
            let data = self.io("map", seek(file, at, Whence::SeekData))?;
            let start = data.map_or(size, |data| data - data % GRAIN).min(size);
            let next = if start > at {
                Interval { offset: at, length: start - at, data: false }
            } else {
                let from = data.unwrap_or(at).max(at);
                let hole = self.io("map", seek(file, from, Whence::SeekHole))?.unwrap_or(size);
                let end = hole.max(at + 1).next_multiple_of(GRAIN).min(size);
                Interval { offset: at, length: end - at, data: true }
            };
            at = next.end();
            intervals.push(next);
        }
        Ok(intervals)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        check_inside(offset, buf.len() as u64, self.size())?;
        self.io("read", self.file()?.read_exact_at(buf, offset))
    }
}

impl Sink for SparseFile {
    fn existed(&self) -> bool {
        self.existed
    }

    fn open(&self, size: u64) -> Result<()> {
        if self.file.get().is_none() {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false).open(&self.path);
            // Of two that open at once one wins, and the other's is the same file.
            let _ = self.file.set(self.io("create", file)?);
        }
        self.io("resize", self.file()?.set_len(size))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        check_inside(offset, data.len() as u64, self.size())?;
        self.io("write", self.file()?.write_all_at(data, offset))
    }

    fn hole(&self, offset: u64, length: u64) -> Result<()> {
        check_inside(offset, length, self.size())?;
        if length == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let done = fallocate(self.file()?, flags, offset.cast_signed(), length.cast_signed());
        self.io("punch a hole into", done.map_err(io::Error::from))
    }

    fn recorded(&self) -> Result<Option<Record>> {
        if !self.existed {
            return Ok(None);
        }
        let stamp = self.stamp()?;
        Ok(Record::load(&self.path)?.filter(|record| record.is_current(&stamp)))
    }

    fn finish(&self, checksum: Option<&Checksum>) -> Result<()> {
        if let Some(file) = self.file.get() {
            self.io("sync", file.sync_all())?;
        }
        let Some(checksum) = checksum else { return Ok(()) };
        let record = Record {
            method: checksum.method.clone(),
            checksum: checksum.value.clone(),
            change_time: self.stamp()?,
            ..Record::default()
        };
        record.store(&self.path)
    }

    fn abandon(&self) {}
}

/// The next data or hole at or behind `from`; `None` when there is none.
fn seek(file: &File, from: u64, whence: Whence) -> io::Result<Option<u64>> {
    match lseek(file, from.cast_signed(), whence) {
        Ok(at) => Ok(Some(at.cast_unsigned())),
        Err(Errno::ENXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn stamp(metadata: &Metadata) -> String {
    format!("{}.{:09}", metadata.ctime(), metadata.ctime_nsec())
}

fn cannot(verb: &str, path: &Path, error: io::Error) -> Error {
    let text = format!("cannot {verb} `{}`", path.display());
    if error.kind() == io::ErrorKind::NotFound {
        return Error::not_found(format!("{text}: {error}"));
    }
    Error::io(error, text)
}
