//! Who owns a store: an exclusive lock for the one writer, a shared one for readers.
//!
//! The lock has a descriptor of its own. It must end with the storage, and the kernel may keep a
//! descriptor that was registered with io_uring for a moment longer.

use super::in_use;
use crate::error::{Error, Result};
use nix::sys::stat::{major, minor};
use std::fs::{File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A device is also locked in passing by the daemon that looks at new devices, and claimed until
/// the kernel is done with closing it: ask this often before giving up.
const DEVICE_ATTEMPTS: u32 = 20;
const DEVICE_PAUSE: Duration = Duration::from_millis(25);

/// The lock on a file or block device; released when dropped.
#[derive(Debug)]
pub(super) struct StoreLock {
    file: File,
    /// That on the file behind a loop device: by its own name it is the same store.
    behind: Option<Box<StoreLock>>,
    path: PathBuf,
    metadata: Metadata,
    read_only: bool,
}

impl StoreLock {
    /// Locks what is at `path`: shared if `read_only`, else exclusively.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it is neither file nor block device; `Busy` naming the owner.
    pub fn acquire(path: &Path, read_only: bool) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|error| open_failed(error, path))?;
        check_type(&metadata, path)?;
        let attempts = if metadata.file_type().is_block_device() { DEVICE_ATTEMPTS } else { 1 };
        for attempt in 1..=attempts {
            if let Some(mut lock) = Self::attempt(path, &metadata, read_only)? {
                lock.behind = lock_behind(path, &metadata, read_only)?.map(Box::new);
                return Ok(lock);
            }
            if attempt < attempts {
                std::thread::sleep(DEVICE_PAUSE);
            }
        }
        Err(busy(path, &metadata, read_only))
    }

    /// Locks a file this process has just made.
    pub fn of_new(file: File, path: &Path) -> Result<Self> {
        let metadata = file.metadata().map_err(|error| open_failed(error, path))?;
        Self::lock(file, path, &metadata, false)?.ok_or_else(|| busy(path, &metadata, false))
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub fn is_block_device(&self) -> bool {
        self.metadata.file_type().is_block_device()
    }

    /// Which file or device this is, as long as the system runs.
    pub fn place(&self) -> String {
        place_of(&self.metadata)
    }

    /// Checks that `file`, opened by the same path, is what is locked.
    pub fn check_same(&self, file: &File) -> Result<()> {
        let other = file.metadata().map_err(|error| open_failed(error, &self.path))?;
        if identity(&other) == identity(&self.metadata) {
            return Ok(());
        }
        Err(Error::busy(format!("`{}` was replaced while it was opened", self.path.display())))
    }

    fn attempt(path: &Path, metadata: &Metadata, read_only: bool) -> Result<Option<Self>> {
        let exclusive = if metadata.file_type().is_block_device() { libc::O_EXCL } else { 0 };
        // Not to hang should the path have become a pipe.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let open =
            |flags| File::options().read(true).write(!read_only).custom_flags(flags).open(path);
        match open(flags | exclusive) {
            // Many may read: a claim of the device would keep others away. This one was to find out whether somebody has
            // it, as a writer in another container, whose device node and so whose lock is another one.
            Ok(claimed) if read_only && exclusive != 0 => {
                let file = open(flags).map_err(|error| open_failed(error, path))?;
                let lock = Self::lock(file, path, metadata, true);
                drop(claimed);
                lock
            }
            Ok(file) => Self::lock(file, path, metadata, read_only),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(None),
            Err(error) => Err(open_failed(error, path)),
        }
    }

    fn lock(file: File, path: &Path, metadata: &Metadata, read_only: bool) -> Result<Option<Self>> {
        let result = if read_only { file.try_lock_shared() } else { file.try_lock() };
        match result {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => {
                return Err(Error::io(error, format!("cannot lock `{}`", path.display())));
            }
        }
        let lock =
            Self { file, behind: None, path: path.into(), metadata: metadata.clone(), read_only };
        lock.check_same(&lock.file)?;
        Ok(Some(lock))
    }
}

impl Drop for StoreLock {
    fn drop(&mut self) {
        // Explicitly: a child between fork and exec still shares the description, and closing
        // ours would not release it. There is nothing to do about an error.
        let _ = self.file.unlock();
    }
}

/// Locks the file behind a loop device, if the device is one and the file can be reached from here. The
/// kernel holds no lock on it.
fn lock_behind(path: &Path, device: &Metadata, read_only: bool) -> Result<Option<StoreLock>> {
    let Some(file) = in_use::backing_file(device) else { return Ok(None) };
    let Ok(metadata) = std::fs::metadata(&file) else { return Ok(None) };
    let opened = if metadata.is_file() { File::open(&file).ok() } else { None };
    let Some(opened) = opened else { return Ok(None) };
    let lock = StoreLock::lock(opened, &file, &metadata, read_only)?;
    lock.map(Some).ok_or_else(|| {
        busy(&file, &metadata, read_only).context(format!("`{}` is a loop device", path.display()))
    })
}

fn check_type(metadata: &Metadata, path: &Path) -> Result<()> {
    if metadata.is_file() || metadata.file_type().is_block_device() {
        return Ok(());
    }
    let what = if metadata.is_dir() { "a directory" } else { "no regular file or block device" };
    Err(Error::invalid(format!("`{}` is {what}; a store is a file or a device", path.display())))
}

pub(super) fn open_failed(error: io::Error, path: &Path) -> Error {
    let path = path.display();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Error::not_found(format!("no file or device `{path}`"))
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            Error::read_only(format!("`{path}` can only be opened for reading"))
        }
        _ => Error::io(error, format!("cannot open `{path}`")),
    }
}

/// Which file or device this is, as long as the system runs.
pub(crate) fn place_of(metadata: &Metadata) -> String {
    let (device, inode, special) = identity(metadata);
    match special {
        0 => format!("{device:x}-{inode:x}"),
        special => format!("{special:x}"),
    }
}

fn identity(metadata: &Metadata) -> (u64, u64, u64) {
    (metadata.dev(), metadata.ino(), metadata.rdev())
}

/// The refusal, with who holds the lock and what to do about it.
fn busy(path: &Path, metadata: &Metadata, read_only: bool) -> Error {
    let table = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let path_text = path.display();
    let Some(owner) = find_owner(&table, metadata) else {
        if let Ok(Some(user)) = in_use::in_use(path) {
            return Error::busy(user);
        }
        return Error::busy(format!(
            "`{path_text}` is open in another process or otherwise in use by the system; stop \
             what uses it"
        ));
    };
    let process = process_name(owner.pid);
    if owner.writes || read_only {
        return Error::busy(format!(
            "`{path_text}` is open for writing by process {process}: go through its control socket \
             if it serves the store, or stop it"
        ));
    }
    Error::busy(format!(
        "`{path_text}` is being read by process {process}: wait for it, or stop it"
    ))
}

#[derive(Debug, PartialEq, Eq)]
struct Owner {
    pid: u32,
    writes: bool,
}

/// Finds a holder of the lock on a file in the text of `/proc/locks`.
fn find_owner(table: &str, metadata: &Metadata) -> Option<Owner> {
    let device = format!("{:02x}:{:02x}", major(metadata.dev()), minor(metadata.dev()));
    let of_inode = || parse_locks(table).filter(|(_, inode)| inode.1 == metadata.ino());
    // Where a file system shows a device number per subvolume, the table has another one: then
    // the process must be seen to have the file open.
    of_inode()
        .find(|(_, inode)| inode.0 == device)
        .or_else(|| of_inode().find(|(owner, _)| has_open(owner.pid, metadata)))
        .map(|(owner, _)| owner)
}

/// Holders of whole-file locks, with the device (`major:minor`, hexadecimal) and inode locked.
fn parse_locks(table: &str) -> impl Iterator<Item = (Owner, (&str, u64))> {
    table.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        // A line of a process that waits has `->` here and holds nothing.
        let (Some("FLOCK"), Some(_), Some(access)) = (fields.next(), fields.next(), fields.next())
        else {
            return None;
        };
        let pid = fields.next()?.parse().ok().filter(|&pid| pid > 0)?;
        let (device, inode) = fields.next()?.rsplit_once(':')?;
        Some((Owner { pid, writes: access == "WRITE" }, (device, inode.parse().ok()?)))
    })
}

fn has_open(pid: u32, metadata: &Metadata) -> bool {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    descriptors
        .flatten()
        .filter_map(|descriptor| std::fs::metadata(descriptor.path()).ok())
        .any(|other| identity(&other) == identity(metadata))
}

fn process_name(pid: u32) -> String {
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("{pid} ({})", name.trim_end()),
        Err(_) => pid.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_tables_are_parsed() {
        let table = "\
1: POSIX  ADVISORY  WRITE 11 fd:00:77 0 EOF
2: FLOCK  ADVISORY  READ 12 fd:1a:77 0 EOF
3: FLOCK  ADVISORY  WRITE 13 fd:00:77 0 EOF
3: -> FLOCK  ADVISORY  WRITE 14 fd:00:78 0 EOF
4: FLOCK  ADVISORY  WRITE -1 fd:00:79 0 EOF
5: FLOCK
6: FLOCK ADVISORY WRITE 15 fd:00:x 0 EOF
";
        let owner = |pid, writes| Owner { pid, writes };
        assert_eq!(
            parse_locks(table).collect::<Vec<_>>(),
            [(owner(12, false), ("fd:1a", 77)), (owner(13, true), ("fd:00", 77))]
        );
    }

    #[test]
    fn owners_are_found_by_inode_and_device_or_open_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let metadata = file.as_file().metadata().unwrap();
        let (major, minor) = (major(metadata.dev()), minor(metadata.dev()));
        let inode = metadata.ino();
        let this = std::process::id();
        let line = |pid, device: &str, inode| {
            format!("1: FLOCK  ADVISORY  WRITE {pid} {device}:{inode} 0 EOF\n")
        };
        let device = format!("{major:02x}:{minor:02x}");
        let found = |table: String| find_owner(&table, &metadata).map(|owner| owner.pid);
        let init_elsewhere = line(1, "ff:ff", inode);
        assert_eq!(found(init_elsewhere.clone() + &line(7, &device, inode)), Some(7));
        assert_eq!(found(init_elsewhere.clone() + &line(this, "ff:fe", inode)), Some(this));
        assert_eq!(found(init_elsewhere), None);
        assert_eq!(found(line(this, &device, inode + 1)), None);
    }

    #[test]
    fn only_files_and_devices_are_stores() {
        use crate::ErrorKind;
        let dir = tempfile::tempdir().unwrap();
        let kind = |path: &Path| StoreLock::acquire(path, true).unwrap_err().kind();
        assert_eq!(kind(dir.path()), ErrorKind::Invalid);
        assert_eq!(kind(Path::new("/dev/null")), ErrorKind::Invalid);
        assert_eq!(kind(&dir.path().join("absent")), ErrorKind::NotFound);
    }
}
