//! A plain file as what requests work on: its bytes are the volume's.
//!
//! Nothing in it says what was written last, and there are no snapshots. What can be seen of somebody else
//! who interferes is looked for, so that the file is not believed: it was removed or replaced, or is
//! shorter than the volume.

use super::events::ActiveEvents;
use dbs_core::{Error, ErrorKind, Result};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long an older process may keep the lock of a file that is taken over. A frontend waits up to 90 s for
/// the older controller to end.
pub const HANDOVER: Duration = Duration::from_secs(120);
/// Bytes looked at at once where zeros must be written.
const ZEROS_BYTES: usize = 1 << 20;
/// What a file system takes space for, or for less.
const BLOCK_BYTES: usize = 4096;

/// The files that this process has open. Locks do not keep them apart while an older process has those.
static OPEN: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

/// A file that is open, and locked for whoever has it.
#[derive(Debug)]
pub struct PlainFile {
    path: PathBuf,
    file: File,
    size: AtomicU64,
    /// Whether the lock is held; if not, it must be by `deadline`.
    locked: AtomicBool,
    deadline: Instant,
    /// Makes all durable that must be there for the content to be read: the size as well.
    sync: fn(&File) -> io::Result<()>,
    /// Makes a hole of this offset and length.
    punch: fn(&File, u64, u64) -> io::Result<()>,
    /// Why nothing of it is believed any more. The system says only once that a sync has failed.
    broken: OnceLock<String>,
    /// Behind `file`: whoever opens it next finds it unlocked.
    _claim: Claim,
}

impl PlainFile {
    /// Opens a file, which must be there. An older process may still have it for the time of `handover`;
    /// if it has it longer, the file becomes unusable. No time: nobody may have it.
    ///
    /// # Errors
    /// `Invalid`: it is no regular file. `Busy`: somebody else has it, as a backend or as a store.
    pub fn open(path: &Path, handover: Duration) -> Result<Self> {
        // Before it is opened: that alone does something to some devices.
        let metadata = look(path)?;
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = File::options().read(true).write(true).custom_flags(flags).open(path);
        let file = file.map_err(|e| failed(e, "opening", path))?;
        let opened = file.metadata().map_err(|e| failed(e, "opening", path))?;
        if identity(&opened) != identity(&metadata) {
            let text = format!("`{}` was replaced while it was opened", path.display());
            return Err(Error::busy(text));
        }
        let claim = Claim::of(&opened).ok_or_else(|| {
            let text = format!("`{}` is in use by another replica of this process", path.display());
            Error::busy(text)
        })?;
        let locked = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) if !handover.is_zero() => false,
            Err(TryLockError::WouldBlock) => {
                let text = format!("`{}` is in use by another backend or program", path.display());
                return Err(Error::busy(text));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error, "locking", path)),
        };
        Ok(Self {
            path: path.into(),
            file,
            size: AtomicU64::new(opened.len()),
            locked: AtomicBool::new(locked),
            deadline: Instant::now() + handover,
            sync: File::sync_data,
            punch,
            broken: OnceLock::new(),
            _claim: claim,
        })
    }

    /// Bytes of the volume.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    /// What the system says of it.
    ///
    /// # Errors
    /// `Io`.
    pub fn metadata(&self) -> Result<Metadata> {
        self.file.metadata().map_err(|e| failed(e, "looking at", &self.path))
    }

    /// Fills `out` from this byte on.
    ///
    /// # Errors
    /// `Io`; the file was cut off or is unusable.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check_usable()?;
        self.file.read_exact_at(out, offset).map_err(|e| failed(e, "reading", &self.path))
    }

    /// Writes from this byte on.
    ///
    /// # Errors
    /// `NoSpace`, `Io`; the file is unusable, or was cut off: a write would put zeros where there had been
    /// data.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.check_usable()?;
        self.file.write_all_at(data, offset).map_err(|e| failed(e, "writing", &self.path))
    }

    /// Makes it larger. Nobody reads or writes meanwhile. A sync that fails may have lost writes of before:
    /// the file is unusable then, and not as it was.
    ///
    /// # Errors
    /// The first is why, the second why it could not be made as it was, if so.
    pub fn grow(&self, size: u64) -> std::result::Result<(), (Error, Option<Error>)> {
        self.check().map_err(|error| (error, None))?;
        self.resize(size).map_err(|error| (error, self.resize(self.size()).err()))?;
        self.size.store(size, Ordering::SeqCst);
        Ok(())
    }

    fn resize(&self, size: u64) -> Result<()> {
        self.check_believed()?;
        self.file.set_len(size).map_err(|e| failed(e, "resizing", &self.path))?;
        self.sync_file()
    }

    /// Whether it is what it was.
    fn check(&self) -> Result<()> {
        self.check_usable()?;
        let there = fs::metadata(&self.path).ok().map(|metadata| identity(&metadata));
        if there != Some(identity(&self.metadata()?)) {
            let text = format!("`{}` was removed or replaced", self.path.display());
            return Err(Error::new(ErrorKind::Io, text));
        }
        Ok(())
    }

    fn check_usable(&self) -> Result<()> {
        self.check_believed()?;
        self.check_lock()?;
        let (length, size) = (self.metadata()?.len(), self.size());
        if length < size {
            let path = self.path.display();
            let text = format!("`{path}` was cut off: it has {length} bytes, the volume {size}");
            return Err(Error::new(ErrorKind::Io, text));
        }
        Ok(())
    }

    fn check_believed(&self) -> Result<()> {
        match self.broken.get() {
            Some(text) => Err(Error::new(ErrorKind::Io, text.clone())),
            None => Ok(()),
        }
    }

    /// Gets the lock if an older process had it before, which may have ended.
    fn check_lock(&self) -> Result<()> {
        if self.locked.load(Ordering::SeqCst) {
            return Ok(());
        }
        if self.file.try_lock().is_ok() {
            self.locked.store(true, Ordering::SeqCst);
            return Ok(());
        }
        if Instant::now() < self.deadline {
            return Ok(());
        }
        Err(self.give_up(format!(
            "`{}` is still in use by another backend or program after the takeover; end that, and \
             compare the file with other replicas before it is used again",
            self.path.display()
        )))
    }

    /// Nothing of it is believed from now on.
    fn give_up(&self, why: String) -> Error {
        Error::new(ErrorKind::Io, self.broken.get_or_init(|| why).clone())
    }

    /// Makes what was written durable.
    fn sync(&self) -> Result<()> {
        self.check()?;
        self.sync_file()?;
        // What was synced is what the name leads to.
        self.check()
    }

    fn sync_file(&self) -> Result<()> {
        (self.sync)(&self.file).map_err(|e| {
            // By its kind: it is not the lack of space of one write, after which all is as before.
            let path = self.path.display();
            self.give_up(format!("syncing `{path}`: {}; writes may be lost", e.kind()))
        })
    }

    /// Makes it zeros where no hole can be made. That takes no space: what is zeros already, as holes are,
    /// is not written.
    fn write_zeros(&self, offset: u64, length: u64) -> io::Result<()> {
        let (mut at, end) = (offset, offset + length);
        let mut content = vec![0; ZEROS_BYTES];
        while at < end {
            let part = usize::try_from(end - at).map_or(ZEROS_BYTES, |left| left.min(ZEROS_BYTES));
            let part = &mut content[..part];
            self.file.read_exact_at(part, at)?;
            let first = BLOCK_BYTES - (at % BLOCK_BYTES as u64) as usize;
            let (first, rest) = part.split_at_mut(first.min(part.len()));
            for block in std::iter::once(first).chain(rest.chunks_mut(BLOCK_BYTES)) {
                if block.iter().any(|byte| *byte != 0) {
                    block.fill(0);
                    self.file.write_all_at(block, at)?;
                }
                at += block.len() as u64;
            }
        }
        Ok(())
    }
}

impl ActiveEvents for PlainFile {
    fn first_change(&self) {}

    /// Zeros, as with a replica that is a store: reads go to one or the other. What that frees, the file
    /// system does not say; upstream's does nothing, and answers the same.
    fn unmap(&self, offset: u64, length: u64) -> Result<u64> {
        self.check_usable()?;
        let zeroed = match (self.punch)(&self.file, offset, length) {
            Err(error) if needs_zeros(&error) => self.write_zeros(offset, length),
            other => other,
        };
        zeroed.map_err(|e| failed(e, "discarding in", &self.path)).map(|()| 0)
    }

    fn commit(&self) -> Result<()> {
        self.sync()
    }

    fn healthy(&self) -> std::result::Result<(), String> {
        self.check().map_err(|error| format!("ping failure due to {error}"))
    }
}

fn punch(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    loop {
        match fallocate(file, flags, offset.cast_signed(), length.cast_signed()) {
            Err(Errno::EINTR) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

/// Whether zeros are to be written instead: the file system has no holes, or is so full that it cannot
/// note one.
fn needs_zeros(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    [libc::EOPNOTSUPP, libc::ENOSYS, libc::ENOSPC].iter().any(|known| number == Some(*known))
}

/// That a file is open in this process.
#[derive(Debug)]
struct Claim((u64, u64));

impl Claim {
    /// `None` if it is open already.
    fn of(metadata: &Metadata) -> Option<Self> {
        let identity = identity(metadata);
        opened().insert(identity).then(|| Self(identity))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        opened().remove(&self.0);
    }
}

fn opened() -> MutexGuard<'static, BTreeSet<(u64, u64)>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What there is by this name, if it is a regular file.
///
/// # Errors
/// `NotFound`; `Invalid`: it is something else.
pub fn look(path: &Path) -> Result<Metadata> {
    let metadata = fs::metadata(path).map_err(|e| failed(e, "opening", path))?;
    if metadata.is_file() {
        return Ok(metadata);
    }
    let kind = metadata.file_type();
    let what = if kind.is_dir() {
        "a directory"
    } else if kind.is_block_device() || kind.is_char_device() {
        "a device"
    } else {
        "no regular file"
    };
    Err(Error::invalid(format!("`{}` is {what}; a backend is a regular file", path.display())))
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn failed(error: io::Error, doing: &str, path: &Path) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => Error::not_found(format!(
            "there is no file `{}`; make one of the volume's size, with `truncate -s SIZE`",
            path.display()
        )),
        _ => Error::io(error, format!("{doing} `{}`", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    const SIZE: u64 = 3 << 20;

    fn make() -> (TempDir, PathBuf) {
        let place = TempDir::new().unwrap();
        let path = place.path().join("file");
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        (place, path)
    }

    /// Somebody else who has it.
    fn older(path: &Path) -> File {
        let file = File::open(path).unwrap();
        file.try_lock().unwrap();
        file
    }

    fn is_locked(path: &Path) -> bool {
        File::open(path).unwrap().try_lock().is_err()
    }

    fn fails(_: &File) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EIO))
    }

    #[test]
    fn a_takeover_gets_the_lock_when_the_older_one_ends() {
        let (_place, path) = make();
        let older = older(&path);
        assert_eq!(PlainFile::open(&path, Duration::ZERO).unwrap_err().kind(), ErrorKind::Busy);
        let file = PlainFile::open(&path, HANDOVER).unwrap();
        file.healthy().unwrap();
        file.write_at(0, &[1; 512]).unwrap();
        drop(older);
        assert!(!is_locked(&path));
        file.healthy().unwrap();
        assert!(is_locked(&path));
        drop(file);
        assert!(!is_locked(&path));
    }

    #[test]
    fn a_takeover_that_does_not_get_the_lock_ends() {
        let (_place, path) = make();
        let older = older(&path);
        let file = PlainFile::open(&path, Duration::from_nanos(1)).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        let why = file.healthy().unwrap_err();
        assert!(why.contains("still in use"), "{why}");
        drop(older);
        // It may have written meanwhile.
        assert!(file.read_at(0, &mut [0; 512]).is_err() && file.write_at(0, &[1; 512]).is_err());
        assert!(file.commit().is_err() && file.unmap(0, 4096).is_err() && file.healthy().is_err());
    }

    #[test]
    fn a_takeover_does_not_get_one_file_twice() {
        let (place, path) = make();
        let link = place.path().join("link");
        symlink(&path, &link).unwrap();
        let _older = older(&path);
        let file = PlainFile::open(&path, HANDOVER).unwrap();
        let refused = PlainFile::open(&link, HANDOVER).unwrap_err();
        assert!(refused.to_string().contains("another replica of this process"), "{refused}");
        drop(file);
        PlainFile::open(&link, HANDOVER).unwrap();
    }

    #[test]
    fn a_sync_that_fails_while_it_grows_is_not_forgotten() {
        let (_place, path) = make();
        let mut file = PlainFile::open(&path, Duration::ZERO).unwrap();
        file.write_at(0, &[1; 512]).unwrap();
        file.sync = fails;
        let (error, rollback) = file.grow(2 * SIZE).unwrap_err();
        assert!(error.to_string().contains("writes may be lost"), "{error}");
        assert!(rollback.is_some(), "not as it was: writes may be lost");
        // The system says it once.
        file.sync = File::sync_data;
        assert!(file.healthy().is_err() && file.commit().is_err());
        assert!(file.write_at(0, &[1; 512]).is_err());
    }

    #[test]
    fn a_size_that_cannot_be_is_rolled_back() {
        let (_place, path) = make();
        let file = PlainFile::open(&path, Duration::ZERO).unwrap();
        let (_, rollback) = file.grow(u64::MAX).unwrap_err();
        assert!(rollback.is_none(), "{rollback:?}");
        file.healthy().unwrap();
        assert_eq!((file.size(), fs::metadata(&path).unwrap().len()), (SIZE, SIZE));
        file.grow(2 * SIZE).unwrap();
        assert_eq!((file.size(), fs::metadata(&path).unwrap().len()), (2 * SIZE, 2 * SIZE));
    }

    #[test]
    fn a_flush_of_what_is_gone_fails() {
        let (place, path) = make();
        let mut file = PlainFile::open(&path, Duration::ZERO).unwrap();
        file.commit().unwrap();
        let aside = place.path().join("aside");
        fs::rename(&path, &aside).unwrap();
        let why = file.commit().unwrap_err();
        assert!(why.to_string().contains("was removed or replaced"), "{why}");
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        assert!(file.commit().is_err());
        fs::rename(&aside, &path).unwrap();
        file.commit().unwrap();
        // Cut off while the sync runs.
        file.sync = |file| file.set_len(0);
        assert!(file.commit().is_err());
    }

    #[test]
    fn what_was_discarded_is_zeros() {
        let (_place, path) = make();
        let file = PlainFile::open(&path, Duration::ZERO).unwrap();
        let (start, end) = (4096, SIZE as usize - 4096);
        let check = |zero: &dyn Fn(u64, u64)| {
            file.write_at(0, &vec![1; SIZE as usize]).unwrap();
            zero(start as u64, (end - start) as u64);
            let mut content = vec![2; SIZE as usize];
            file.read_at(0, &mut content).unwrap();
            assert!(content[start..end].iter().all(|byte| *byte == 0));
            assert!(content[..start].iter().chain(&content[end..]).all(|byte| *byte == 1));
        };
        check(&|offset, length| assert_eq!(file.unmap(offset, length).unwrap(), 0));
        check(&|offset, length| file.write_zeros(offset, length).unwrap());
        assert_eq!(file.metadata().unwrap().len(), SIZE);
    }

    #[test]
    fn a_discard_on_a_full_file_system_takes_no_space() {
        let (_place, path) = make();
        let mut file = PlainFile::open(&path, Duration::ZERO).unwrap();
        file.punch = |_, _, _| Err(io::Error::from_raw_os_error(libc::ENOSPC));
        // Of neighbours one has data, the other is a hole.
        for at in (0..SIZE).step_by(4 * BLOCK_BYTES) {
            file.write_at(at, &[1; BLOCK_BYTES]).unwrap();
        }
        file.commit().unwrap();
        let before = file.metadata().unwrap().blocks();
        file.unmap(512, SIZE - 1024).unwrap();
        file.commit().unwrap();
        assert!(file.metadata().unwrap().blocks() <= before);
        let mut content = vec![2; SIZE as usize];
        file.read_at(0, &mut content).unwrap();
        assert!(content[512..].iter().all(|byte| *byte == 0) && content[..512] == [1; 512]);
        file.punch = |_, _, _| Err(io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(file.unmap(0, SIZE).unwrap_err().kind(), ErrorKind::Io);
    }
}
