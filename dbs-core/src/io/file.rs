//! A regular file or block device as storage: all but the rings of its io_uring driver.

use super::buffer::AlignedBuf;
use super::lock::StoreLock;
use super::piece::{self, Alignment, Piece};
use super::uring::Pool;
use super::{DirectIo, ReadRequest, Storage, WriteRequest, sys};
use crate::error::{Error, Result};
use crate::units::{BLOCK_BYTES, SECTOR_BYTES};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, fcntl};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long to wait for requests of a writer that has ended: 30 s, as a device may take.
const CLAIM_ATTEMPTS: u32 = 3000;
const CLAIM_PAUSE: Duration = Duration::from_millis(10);

/// Bytes of a hole punched at once. ext4 lets nobody else into the file meanwhile, a third of a millisecond
/// for a MiB. Between two holes others get their turn.
const HOLE_BYTES: u64 = 1 << 20;

/// The holes in which a range of a file is punched: offset and length of each.
pub(super) fn holes(offset: u64, len_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = offset + len_bytes;
    (offset..end)
        .step_by(HOLE_BYTES as usize)
        .map(move |start| (start, HOLE_BYTES.min(end - start)))
}

/// Facts about an opened file or device, for the log and `dbs info`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetInfo {
    /// Size in bytes when it was opened.
    pub size_bytes: u64,
    /// A block device, not a regular file.
    pub is_block_device: bool,
    /// Unit of I/O in bytes: of the device, or what the file system asks of direct I/O.
    pub logical_block_bytes: u32,
    /// Unit in bytes the medium writes without reading first, as far as it says.
    pub physical_block_bytes: u32,
    /// I/O bypasses the page cache.
    pub direct: bool,
}

/// An open file or block device with its lock. Everything but the reading and writing of ranges.
pub(super) struct Target {
    file: File,
    info: TargetInfo,
    alignment: Alignment,
    size_bytes: AtomicU64,
    // Last: the lock goes when nothing can write any more.
    lock: StoreLock,
}

impl Drop for Target {
    fn drop(&mut self) {
        // No request is in flight any more; a ring may keep the description a moment longer.
        let _ = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_UNLCK)));
    }
}

impl Target {
    /// Opens what `lock` holds for I/O, around the page cache where that is possible.
    pub fn open(lock: StoreLock) -> Result<Self> {
        let direct = open_direct(&lock)?;
        Self::with(lock, direct)
    }

    /// As [`Target::open`], through the page cache as on a file system without direct I/O.
    #[cfg(test)]
    pub fn open_buffered(lock: StoreLock) -> Result<Self> {
        Self::with(lock, None)
    }

    fn with(lock: StoreLock, direct: Option<(File, Alignment)>) -> Result<Self> {
        let failed = |error| Error::io(error, format!("cannot open `{}`", lock.path().display()));
        let is_direct = direct.is_some();
        let (file, alignment) = match direct {
            Some(direct) => direct,
            None => (open_as(&lock, 0).map_err(failed)?, Alignment::NONE),
        };
        lock.check_same(&file)?;
        if !lock.is_read_only() {
            claim(&file, lock.path())?;
        }
        let size_bytes = size_of(&file, lock.is_block_device()).map_err(failed)?;
        let (logical_block_bytes, physical_block_bytes) = if lock.is_block_device() {
            sys::block_sizes(&file).map_err(failed)?
        } else {
            let preferred = file.metadata().map_err(failed)?.blksize();
            let logical = (SECTOR_BYTES as u32).max(alignment.offset as u32);
            (logical, u32::try_from(preferred).unwrap_or(logical).max(logical))
        };
        let info = TargetInfo {
            size_bytes,
            is_block_device: lock.is_block_device(),
            logical_block_bytes,
            physical_block_bytes,
            direct: is_direct,
        };
        Ok(Self { file, info, alignment, size_bytes: size_bytes.into(), lock })
    }

    pub fn info(&self) -> TargetInfo {
        self.info
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn direct_io(&self) -> io::Result<DirectIo> {
        Ok(DirectIo {
            file: self.file.try_clone()?.into(),
            offset_alignment: self.alignment.offset,
            memory_alignment: self.alignment.memory,
        })
    }

    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Current size in bytes; a device may have grown since it was opened.
    pub fn size_bytes(&self) -> u64 {
        if self.info.is_block_device
            && let Ok(size) = size_of(&self.file, true)
        {
            self.size_bytes.store(size, Ordering::Relaxed);
        }
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// The one check of every read, before any of them starts.
    pub fn check_reads(&self, requests: &[ReadRequest<'_>]) -> io::Result<()> {
        for request in requests {
            check_sectors(request.offset, request.buf.len() as u64)?;
            if !self.contains(request.offset, request.buf.len() as u64) {
                return Err(piece::unexpected_eof(request.offset));
            }
        }
        Ok(())
    }

    /// The one check of every write, before any of them starts.
    pub fn check_writes(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        for request in requests {
            let len = request.buf.len() as u64;
            self.check_change(request.offset, len)?;
            let granule = self.alignment.offset;
            if !piece::is_multiple(request.offset | len, granule) {
                return Err(invalid_input(format!(
                    "a write of {len} bytes at byte {} does not fit the {granule}-byte blocks of \
                     `{}`",
                    request.offset,
                    self.lock.path().display()
                )));
            }
        }
        Ok(())
    }

    pub fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    pub fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.check_change(offset, len_bytes)?;
        if !self.info.is_block_device {
            let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            return holes(offset, len_bytes)
                .try_for_each(|(start, length)| self.fallocate(mode, start, length));
        }
        // A device takes whole blocks only: what sticks out stays.
        let granule = self.info.logical_block_bytes as usize;
        let start = offset.next_multiple_of(granule as u64);
        let end = piece::round_down(offset + len_bytes, granule);
        if start >= end {
            return Ok(());
        }
        advisory(|| sys::discard_blocks(&self.file, start, end - start))
    }

    pub fn allocate(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.check_change(offset, len_bytes)?;
        if self.info.is_block_device {
            return Ok(());
        }
        self.fallocate(FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, len_bytes)
    }

    pub fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        if self.info.is_block_device {
            let actual = self.size_bytes();
            if actual == size_bytes {
                return Ok(());
            }
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "the device `{}` has {actual} bytes and cannot be made to have {size_bytes}; \
                     resize the device itself first",
                    self.lock.path().display()
                ),
            ));
        }
        // While a file shrinks no request may start beyond its new end.
        self.size_bytes.fetch_min(size_bytes, Ordering::Relaxed);
        let result = self.file.set_len(size_bytes);
        self.size_bytes.store(size_of(&self.file, false)?, Ordering::Relaxed);
        result
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, len_bytes: u64) -> io::Result<()> {
        if len_bytes == 0 {
            return Ok(());
        }
        // In bounds of the file, whose size the kernel keeps in the same type.
        let (offset, len) = (offset.cast_signed(), len_bytes.cast_signed());
        advisory(|| Ok(nix::fcntl::fallocate(&self.file, mode, offset, len)?))
    }

    fn check_change(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        check_sectors(offset, len_bytes)?;
        if self.contains(offset, len_bytes) {
            return Ok(());
        }
        Err(invalid_input(format!("{len_bytes} bytes at byte {offset} end past the storage's end")))
    }

    pub fn check_writable(&self) -> io::Result<()> {
        if self.lock.is_read_only() {
            let text = format!("`{}` is open for reading only", self.lock.path().display());
            return Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, text));
        }
        Ok(())
    }

    fn contains(&self, offset: u64, len_bytes: u64) -> bool {
        let size = self.size_bytes.load(Ordering::Relaxed);
        offset.checked_add(len_bytes).is_some_and(|end| end <= size)
    }
}

/// A file or block device as storage, by one of two drivers.
pub(super) struct FileStorage {
    // First: a ring has the target's descriptor registered.
    pub(super) rings: Option<Pool>,
    target: Target,
}

impl FileStorage {
    /// By the driver that works everywhere: one blocking call after another.
    pub(super) fn pread(target: Target) -> Self {
        Self { rings: None, target }
    }

    /// By the driver for kernels that allow io_uring.
    pub(super) fn uring(target: Target) -> io::Result<Self> {
        let rings = Some(Pool::new(target.file().as_raw_fd())?);
        Ok(Self { rings, target })
    }

    fn run<'a>(&self, mut pieces: impl Iterator<Item = Piece<'a>>) -> io::Result<()> {
        match &self.rings {
            Some(rings) => rings.run(pieces),
            None => pieces.try_for_each(|piece| piece.transfer(self.target.file())),
        }
    }
}

impl Storage for FileStorage {
    fn size_bytes(&self) -> u64 {
        self.target.size_bytes()
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        self.target.check_reads(requests)?;
        self.run(piece::of_reads(requests, self.target.alignment()))
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        self.target.check_writes(requests)?;
        self.run(piece::of_writes(requests, self.target.alignment()))
    }

    fn flush(&self) -> io::Result<()> {
        self.target.flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.target.discard(offset, len_bytes)
    }

    fn allocate(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.target.allocate(offset, len_bytes)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.target.set_size(size_bytes)
    }

    fn resizable(&self) -> bool {
        !self.target.info().is_block_device
    }

    fn may_be_shared(&self) -> bool {
        true
    }

    fn direct_io(&self) -> io::Result<Option<DirectIo>> {
        self.target.direct_io().map(Some)
    }

    fn writes_whole_blocks(&self) -> bool {
        let info = self.target.info();
        // What is below a file is not known.
        info.is_block_device && u64::from(info.physical_block_bytes) >= BLOCK_BYTES
    }

    fn driver(&self) -> &'static str {
        if self.rings.is_some() { "io_uring" } else { "pread" }
    }
}

/// Waits until no earlier writer's request can still reach the medium. The store's lock ends with
/// the process that held it, but requests it had given to the kernel may not have: landing later,
/// they could hit an extent that has a new owner. They hold on to their file description, and so
/// to this second lock.
fn claim(file: &File, path: &std::path::Path) -> Result<()> {
    for _ in 0..CLAIM_ATTEMPTS {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_WRLCK))) {
            Ok(_) => return Ok(()),
            Err(Errno::EAGAIN | Errno::EACCES) => std::thread::sleep(CLAIM_PAUSE),
            // A file system without such locks cannot tell; the requests end within moments.
            Err(_) => return Ok(()),
        }
    }
    Err(Error::busy(format!(
        "I/O on `{}` of a process that has ended is still under way; try again when it is done",
        path.display()
    )))
}

fn whole_file(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// Opens with `O_DIRECT`; `None` where that cannot work or not with blocks of 4 KiB.
fn open_direct(lock: &StoreLock) -> Result<Option<(File, Alignment)>> {
    let failed = |error| Error::io(error, format!("cannot open `{}`", lock.path().display()));
    let file = match open_as(lock, libc::O_DIRECT) {
        Ok(file) => file,
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let block = BLOCK_BYTES as usize;
    let alignment = match sys::direct_io(&file) {
        sys::DirectIo::Refused => return Ok(None),
        sys::DirectIo::Aligned { offset, memory } => {
            Alignment { offset: offset as usize, memory: memory as usize }
        }
        sys::DirectIo::Unknown => Alignment { offset: block, memory: block },
    };
    let usable = |bytes: usize| bytes.is_power_of_two() && bytes <= block;
    if !usable(alignment.offset) || !usable(alignment.memory) {
        return Ok(None);
    }
    // Some file systems take the flag and then refuse the I/O.
    match file.read_at(&mut AlignedBuf::zeroed(block), 0) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(None),
        Err(error) => Err(Error::io(error, format!("cannot read `{}`", lock.path().display()))),
        Ok(_) => Ok(Some((file, alignment))),
    }
}

fn open_as(lock: &StoreLock, flags: i32) -> io::Result<File> {
    File::options()
        .read(true)
        .write(!lock.is_read_only())
        .custom_flags(flags | libc::O_NOCTTY)
        .open(lock.path())
}

fn size_of(mut file: &File, is_block_device: bool) -> io::Result<u64> {
    if is_block_device { file.seek(SeekFrom::End(0)) } else { Ok(file.metadata()?.len()) }
}

/// Runs a call that storage need not support, again when a signal interrupts it.
fn advisory(call: impl Fn() -> io::Result<()>) -> io::Result<()> {
    loop {
        let Err(error) = call() else { return Ok(()) };
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EINTR) => {}
            Some(Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(()),
            _ => return Err(error),
        }
    }
}

fn check_sectors(offset: u64, len_bytes: u64) -> io::Result<()> {
    if piece::is_multiple(offset | len_bytes, SECTOR_BYTES as usize) {
        return Ok(());
    }
    Err(invalid_input(format!("{len_bytes} bytes at byte {offset} are not whole sectors")))
}

fn invalid_input(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}
