//! From a path to locked storage with the right driver.

use super::Storage;
use super::buffer::AlignedBuf;
use super::file::{FileStorage, Target, TargetInfo};
use super::lock::{StoreLock, open_failed};
use super::probe::{PROBE_BYTES, in_use, signature};
use super::uring::uring_available;
use crate::error::{Error, Result};
use crate::units::{SECTOR_BYTES, format_size};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// What is in a file that may be anybody's document.
const UNKNOWN: &str = "data of unknown kind";
/// Bytes looked at at once whether they are zeros.
const ZEROS_BYTES: usize = 1 << 20;

/// Which I/O driver to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoDriver {
    /// io_uring where the kernel allows it, else `pread`.
    #[default]
    Auto,
    /// io_uring with `O_DIRECT`.
    Uring,
    /// `pread`/`pwrite`, with `O_DIRECT` where the file system allows it.
    Pread,
}

/// Storage that is locked for as long as it lives.
pub struct OpenedStorage {
    /// The storage; the lock ends with the last handle.
    pub storage: Arc<dyn Storage>,
    /// Facts for the log and `dbs info`.
    pub info: TargetInfo,
    /// Which file or device this is, as long as the system runs: names its tail.
    pub place: String,
    /// The file was made by [`create_storage`]: who gives up on it should remove it.
    pub created: bool,
}

impl std::fmt::Debug for OpenedStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenedStorage")
            .field("driver", &self.storage.driver())
            .field("info", &self.info)
            .field("created", &self.created)
            .finish()
    }
}

/// Opens the file or block device at `path`, locked: shared if `read_only`, else exclusively.
///
/// # Errors
/// `NotFound`; `Busy` naming the process that holds it; `Invalid` if it is neither file nor block
/// device; `Unsupported` if `driver` cannot work here; `ReadOnly` or `Io` from the system.
pub fn open_storage(path: &Path, read_only: bool, driver: IoDriver) -> Result<OpenedStorage> {
    with_driver(StoreLock::acquire(path, read_only)?, driver, false)
}

/// Opens what is to become a store, locked exclusively: a block device, a file that may be
/// written over, or a new file (mode 0600). A new or empty file gets `size` bytes; a file or
/// device with content keeps its own size, or gets `size` if it is a file and one is given.
///
/// # Errors
/// `Exists` naming what is there, unless `force` (a file is then emptied); `Busy` if it is open
/// or used by the system, whatever `force` says; `Invalid` if a size is needed, or is not the
/// device's; and as [`open_storage`].
pub fn create_storage(
    path: &Path,
    size: Option<u64>,
    force: bool,
    driver: IoDriver,
) -> Result<OpenedStorage> {
    let (lock, is_new) = match fs::metadata(path) {
        Ok(_) => (claim(path)?.0, false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            check_size(path, size)?;
            (StoreLock::of_new(create_file(path)?, path)?, true)
        }
        Err(error) => return Err(open_failed(error, path)),
    };
    let clean_up = |_: &Error| {
        if is_new {
            // It is empty; the error at hand is the one to report.
            let _ = fs::remove_file(path);
        }
    };
    let mut opened = with_driver(lock, driver, is_new).inspect_err(clean_up)?;
    prepare(path, &opened, size, force).inspect_err(clean_up)?;
    opened.info.size_bytes = opened.storage.size_bytes();
    Ok(opened)
}

/// A file or block device that may be written over, locked like a store as long as this lives.
#[derive(Debug)]
pub struct Claim(StoreLock);

/// Claims the file or block device at `path`, to write over it.
///
/// # Errors
/// `Busy` if it is a store that is open, or used by the system: mounted, swap, or below another device;
/// `NotFound`; `Invalid` if it is neither file nor block device; `Io`.
pub fn claim(path: &Path) -> Result<Claim> {
    fs::metadata(path).map_err(|error| open_failed(error, path))?;
    if let Some(user) = in_use(path)? {
        return Err(Error::busy(user));
    }
    StoreLock::acquire(path, false).map(Claim)
}

impl Claim {
    /// What is known to be there, as words with an article.
    ///
    /// # Errors
    /// `Io`.
    pub fn content(&self) -> Result<Option<&'static str>> {
        let failed = |error| Error::io(error, "looking at what is there");
        let file = self.0.file();
        let size = (&*file).seek(SeekFrom::End(0)).map_err(failed)?;
        let length = size.min(PROBE_BYTES as u64);
        let (mut head, mut tail) = (vec![0; length as usize], vec![0; length as usize]);
        file.read_exact_at(&mut head, 0).map_err(failed)?;
        file.read_exact_at(&mut tail, size - length).map_err(failed)?;
        Ok(signature(&head, &tail, size))
    }

    /// Checks that `file`, opened by the same path, is what is claimed.
    ///
    /// # Errors
    /// `Busy` if it was replaced meanwhile.
    pub fn check_same(&self, file: &File) -> Result<()> {
        self.0.check_same(file)
    }
}

/// Checks that what is there may be written over, and gives it its size.
fn prepare(path: &Path, opened: &OpenedStorage, size: Option<u64>, force: bool) -> Result<()> {
    let storage = &*opened.storage;
    let failed = |what: &str| {
        let what = format!("cannot {what} `{}`", path.display());
        move |error| Error::io(error, what)
    };
    let actual = storage.size_bytes();
    let is_device = opened.info.is_block_device;
    let wanted = match size {
        Some(size) if is_device && size != actual => {
            return Err(Error::invalid(format!(
                "the device `{}` has {actual} bytes ({}), not {size}; leave the size out",
                path.display(),
                format_size(actual)
            )));
        }
        None if actual > 0 => check_size(path, Some(actual))?,
        _ => check_size(path, size)?,
    };
    let found = find_content(path, storage, is_device).map_err(failed("look at what is in"))?;
    if let Some(what) = found {
        if !force {
            return Err(Error::exists(format!(
                "`{}` contains {what}; write over it with `--force`",
                path.display()
            )));
        }
        if !is_device {
            // What was there must not be taken for ours later.
            storage.set_size(0).map_err(failed("empty"))?;
        }
    }
    if wanted != storage.size_bytes() {
        storage.set_size(wanted).map_err(failed("set the size of"))?;
    }
    Ok(())
}

/// What stands in the way of writing over the storage. A device counts as free if nothing known
/// is on it; a file, which may be anybody's document, only if it is zeros.
fn find_content(
    path: &Path,
    storage: &dyn Storage,
    is_device: bool,
) -> io::Result<Option<&'static str>> {
    let size = storage.size_bytes();
    // A file that is not whole sectors cannot be read to its end, and is no disk image.
    if !size.is_multiple_of(SECTOR_BYTES) {
        return Ok(Some(UNKNOWN));
    }
    let length = PROBE_BYTES.min(usize::try_from(size).unwrap_or(PROBE_BYTES));
    let mut head = AlignedBuf::zeroed(length);
    let mut tail = AlignedBuf::zeroed(length);
    storage.read_at(0, &mut head)?;
    storage.read_at(size - length as u64, &mut tail)?;
    let known = signature(&head, &tail, size);
    if known.is_none() && !is_device && !is_zeros(&File::open(path)?, size)? {
        return Ok(Some(UNKNOWN));
    }
    Ok(known)
}

/// Whether a file holds nothing but zeros. Its holes are not read.
fn is_zeros(file: &File, size: u64) -> io::Result<bool> {
    let mut buf = vec![0; ZEROS_BYTES];
    let mut at = 0;
    while at < size {
        let from = i64::try_from(at).map_err(io::Error::other)?;
        at = match lseek(file, from, Whence::SeekData) {
            Ok(data) => data.unsigned_abs(),
            // No data from here on.
            Err(Errno::ENXIO) => break,
            // No holes are known.
            Err(Errno::EINVAL) => at,
            Err(error) => return Err(error.into()),
        };
        let part = &mut buf[..ZEROS_BYTES.min(usize::try_from(size - at).unwrap_or(ZEROS_BYTES))];
        file.read_exact_at(part, at)?;
        if part.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        at += part.len() as u64;
    }
    Ok(true)
}

fn check_size(path: &Path, size: Option<u64>) -> Result<u64> {
    let size = size.ok_or_else(|| {
        let path = path.display();
        Error::invalid(format!("`{path}` is a new file; say how large with `--size`"))
    })?;
    if size == 0 || !size.is_multiple_of(SECTOR_BYTES) {
        return Err(Error::invalid(format!(
            "{size} bytes is no size for `{}`; take a multiple of {SECTOR_BYTES}",
            path.display()
        )));
    }
    Ok(size)
}

/// Makes an empty file whose name survives a power loss.
fn create_file(path: &Path) -> Result<File> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            Error::busy(format!("`{}` is just being made by another process", path.display()))
        }
        io::ErrorKind::NotFound => {
            Error::not_found(format!("no directory to make `{}` in", path.display()))
        }
        _ => Error::io(error, format!("cannot make `{}`", path.display())),
    };
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))
        .and_then(|directory| directory.sync_all())
        .map_err(failed)?;
    Ok(file)
}

fn with_driver(lock: StoreLock, driver: IoDriver, created: bool) -> Result<OpenedStorage> {
    let path = lock.path().to_path_buf();
    let place = lock.place();
    let ring = use_ring(driver, uring_available())?;
    let target = Target::open(lock)?;
    let info = target.info();
    let storage = if ring {
        FileStorage::uring(target).map_err(|error| {
            Error::io(error, format!("cannot set up io_uring for `{}`", path.display()))
        })?
    } else {
        FileStorage::pread(target)
    };
    Ok(OpenedStorage { storage: Arc::new(storage), info, place, created })
}

fn use_ring(driver: IoDriver, available: io::Result<()>) -> Result<bool> {
    match (driver, available) {
        (IoDriver::Pread, _) | (IoDriver::Auto, Err(_)) => Ok(false),
        (IoDriver::Auto | IoDriver::Uring, Ok(())) => Ok(true),
        (IoDriver::Uring, Err(error)) => {
            Err(Error::unsupported(format!("io_uring cannot be used here ({error}); use `pread`")))
        }
    }
}

#[cfg(test)]
mod tests;
