//! The tail's memory: a shared mapping of a file on tmpfs. It outlives the process, not the boot.
#![allow(unsafe_code)]

use super::TailMemory;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::TAIL_BYTES;
use memmap2::{MmapMut, MmapOptions};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, openat};
use nix::sys::stat::Mode;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs, statfs};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};
use std::fmt::Write;
use std::fs::{DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often to try again when the file is removed between being opened and being locked.
const OPEN_ATTEMPTS: u32 = 8;

/// So often, and after such pauses, to look whether a tail that is in use is free: a process that ends has given up
/// the lock of its store a moment before that of its tail, which goes with the last of its memory.
const LOCK_ATTEMPTS: u32 = 200;
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// How the names of tails end.
const END: &str = ".tail";

/// For so long nobody looks again whether the file is still in its place.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// The tail of one store, held exclusively.
///
/// Its file may be removed under it: a user's runtime directory goes with the last login, and so may what
/// is in `/dev/shm`.
#[derive(Debug)]
pub struct FileTail {
    memory: MmapMut,
    // Keeps the lock.
    file: File,
    directory: File,
    name: String,
    path: PathBuf,
    /// Device and inode of the file.
    identity: (u64, u64),
    /// When it was last seen where it should be.
    seen: Instant,
    uuid: [u8; 16],
    place: String,
}

impl FileTail {
    /// Maps `<uuid>-<place>.tail` in `directory`: kept if there, made of zeros if not. The place
    /// tells a store from a copy of it, whose tail must not be taken for its own.
    ///
    /// # Errors
    /// `Unsupported` if the directory is not on tmpfs; `Busy` if another store with this uuid (a
    /// copy) is open; `Invalid` if the file is not only ours; `NoSpace`.
    pub fn open(directory: &Path, uuid: [u8; 16], place: &str) -> Result<Self> {
        let name = file_name(uuid, place);
        let path = directory.join(&name);
        let failed = |error: io::Error, what: &str| {
            Error::io(error, format!("cannot {what} `{}`", path.display()))
        };
        let handle = open_flagged(directory, libc::O_DIRECTORY)
            .map_err(|error| failed(error, "open the directory of the tail"))?;
        if !is_tmpfs(&handle) {
            return Err(Error::unsupported(format!(
                "`{}` is not on tmpfs; a tail must not outlive the boot, name another directory \
                 or none",
                directory.display()
            )));
        }
        for _ in 0..OPEN_ATTEMPTS {
            let file = open_file(&handle, &name).map_err(|error| failed(error, "open the tail"))?;
            match try_lock(&file) {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::busy(format!(
                        "the tail `{}` is in use: a store with the same uuid, a copy, is open; \
                         stop it first",
                        path.display()
                    )));
                }
                Err(TryLockError::Error(error)) => return Err(failed(error, "lock the tail")),
            }
            let metadata = file.metadata().map_err(|error| failed(error, "look at the tail"))?;
            if metadata.nlink() == 0 {
                continue;
            }
            check_ours(&metadata, &path)?;
            reserve(&file).map_err(|error| failed(error, "reserve memory for the tail"))?;
            // SAFETY: the file is ours alone: only this user can open it, and whoever of them is
            // a store takes the lock above first. Its space is reserved, so that touching it
            // cannot fail; nobody shrinks it.
            let memory = unsafe { MmapOptions::new().len(TAIL_BYTES).map_mut(&file) }
                .map_err(|error| failed(error, "map the tail"))?;
            let identity = (metadata.dev(), metadata.ino());
            let (seen, place) = (Instant::now(), place.to_owned());
            return Ok(Self {
                memory,
                file,
                directory: handle,
                name,
                path,
                identity,
                seen,
                uuid,
                place,
            });
        }
        Err(Error::busy(format!("the tail `{}` comes and goes; try again", path.display())))
    }
}

/// A copy of a tail for a reader, which must leave the tail itself to the next writer.
#[derive(Debug)]
pub struct TailCopy(Vec<u8>);

impl TailCopy {
    /// Copies the tail that [`FileTail::open`] would map.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Invalid` if the file is not only ours or no tail, `Io`.
    pub fn read(directory: &Path, uuid: [u8; 16], place: &str) -> Result<Self> {
        let path = directory.join(file_name(uuid, place));
        let failed =
            |error: io::Error| Error::io(error, format!("cannot read `{}`", path.display()));
        let metadata = std::fs::symlink_metadata(&path).map_err(failed)?;
        check_ours(&metadata, &path)?;
        let no_tail = |bytes: usize| {
            let text = format!("`{}` of {bytes} bytes is no tail", path.display());
            Error::new(ErrorKind::Invalid, text)
        };
        if metadata.len() != TAIL_BYTES as u64 {
            return Err(no_tail(metadata.len() as usize));
        }
        let bytes = std::fs::read(&path).map_err(failed)?;
        if bytes.len() == TAIL_BYTES { Ok(Self(bytes)) } else { Err(no_tail(bytes.len())) }
    }
}

impl TailMemory for TailCopy {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn remove(&mut self) {}
}

impl TailMemory for FileTail {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    fn remove(&mut self) {
        // A tail that stays is recognised as old by its journal position.
        let _ = unlinkat(&self.directory, self.name.as_str(), UnlinkatFlags::NoRemoveDir);
    }

    fn is_kept(&mut self) -> bool {
        // Each time, as it costs little: whether it was removed. Now and then, by its path as the next
        // process does: a file system that is only unmounted keeps its files.
        let removed = self.file.metadata().is_ok_and(|metadata| metadata.nlink() == 0);
        let now = Instant::now();
        if !removed && now.duration_since(self.seen) < LOOK_AGAIN {
            return true;
        }
        let found = std::fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| (found.dev(), found.ino()) == self.identity) {
            self.seen = now;
            return true;
        }
        let directory = self.path.parent().map(Path::to_path_buf).unwrap_or_default();
        if is_usable(&directory)
            && let Ok(mut new) = Self::open(&directory, self.uuid, &self.place)
        {
            new.memory.fill(0);
            *self = new;
        }
        false
    }
}

impl Drop for FileTail {
    fn drop(&mut self) {
        // Explicitly, as a child between fork and exec shares the description.
        let _ = self.file.unlock();
    }
}

/// The directory to use of those that a tail may be in: the one that has this store's, else the first that
/// is usable. Which ones there are changes between two processes, as users log in and out.
#[must_use]
pub fn find_directory(candidates: &[PathBuf], uuid: [u8; 16], place: &str) -> Option<PathBuf> {
    let has_it = |path: &&PathBuf| find_file(path, uuid, place).is_some() && is_usable(path);
    candidates.iter().find(has_it).cloned().or_else(|| pick_directory(candidates))
}

/// The file of a store's tail in a directory of this user, if it is there, or may be as far as one can look.
#[must_use]
pub fn find_file(directory: &Path, uuid: [u8; 16], place: &str) -> Option<PathBuf> {
    if !is_of_this_user(directory) {
        return None;
    }
    let path = directory.join(file_name(uuid, place));
    let gone = std::fs::symlink_metadata(&path).is_err_and(|error| {
        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
    });
    (!gone).then_some(path)
}

/// In other directories no process of this user has kept a tail, and what they are says nothing.
fn is_of_this_user(directory: &Path) -> bool {
    let ours = |found: std::fs::Metadata| found.is_dir() && found.uid() == geteuid().as_raw();
    std::fs::symlink_metadata(directory).is_ok_and(ours)
}

/// Whether no process has a tail open. One that ends has it a moment longer than its store.
#[must_use]
pub fn is_free(path: &Path) -> bool {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    // Unlocked explicitly, as a child between fork and exec shares the description.
    open_flagged(path, flags).is_ok_and(|file| try_lock(&file).is_ok() && file.unlock().is_ok())
}

/// The file of a store's tail in a directory.
#[must_use]
pub fn path_of(directory: &Path, uuid: [u8; 16], place: &str) -> PathBuf {
    directory.join(file_name(uuid, place))
}

/// The other places of stores with this uuid that have a file for a tail in a directory of this user.
#[must_use]
pub fn find_of_other_places(directory: &Path, uuid: [u8; 16], place: &str) -> Vec<String> {
    if !is_of_this_user(directory) {
        return Vec::new();
    }
    let (own, any) = (file_name(uuid, place), file_name(uuid, ""));
    let prefix = any.strip_suffix(END).unwrap_or(&any);
    let names = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let places = names.filter(|name| *name != own).filter_map(|name| {
        let place = name.strip_prefix(prefix)?.strip_suffix(END)?;
        Some(place.to_owned())
    });
    places.collect()
}

/// The file of a store's tail where another user keeps tails, if there is one; only root can look.
#[must_use]
pub fn find_of_others(uuid: [u8; 16], place: &str) -> Option<PathBuf> {
    if !geteuid().is_root() {
        return None;
    }
    let names = |directory: &str| std::fs::read_dir(directory).into_iter().flatten().flatten();
    let ours =
        |entry: &std::fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b"dbs-");
    let shared = names("/dev/shm").filter(ours).map(|entry| entry.path());
    let own = names("/run/user").map(|entry| entry.path().join("dbs"));
    let mut directories = shared.chain(own).filter(|path| {
        std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && found.uid() != 0)
    });
    directories.find_map(|path| {
        let file = path.join(file_name(uuid, place));
        std::fs::symlink_metadata(&file).is_ok().then_some(file)
    })
}

/// The directories to try, best first, for the user this process runs as. A user's runtime directory is
/// the last, as it is removed when the user logs out, whatever still runs.
#[must_use]
pub fn default_candidates() -> Vec<PathBuf> {
    let uid = geteuid();
    let mut candidates = Vec::new();
    if uid.is_root() {
        candidates.push(PathBuf::from("/run/dbs"));
    }
    candidates.push(PathBuf::from(format!("/dev/shm/dbs-{uid}")));
    candidates.push(PathBuf::from(format!("/run/user/{uid}/dbs")));
    candidates
}

/// The first candidate that is, or can be made, a directory on tmpfs that only this user can
/// change. The directory itself is made (mode 0700), its parents are not.
#[must_use]
pub fn pick_directory(candidates: &[PathBuf]) -> Option<PathBuf> {
    candidates.iter().find(|path| is_usable(path)).cloned()
}

fn is_usable(path: &Path) -> bool {
    let on_tmpfs = |path: &Path| statfs(path).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC);
    // Looked at before it is made, to leave nothing behind on a disk.
    if !path.exists() && path.parent().is_some_and(on_tmpfs) {
        // If it cannot be made, or another process was first, the checks below decide.
        let _ = DirBuilder::new().mode(0o700).create(path);
    }
    let Ok(handle) = open_flagged(path, libc::O_DIRECTORY | libc::O_NOFOLLOW) else {
        return false;
    };
    let ours = handle
        .metadata()
        .is_ok_and(|metadata| metadata.uid() == geteuid().as_raw() && metadata.mode() & 0o022 == 0);
    ours && is_tmpfs(&handle)
}

fn open_flagged(path: &Path, flags: i32) -> io::Result<File> {
    File::options().read(true).custom_flags(flags).open(path)
}

fn is_tmpfs(file: &File) -> bool {
    fstatfs(file).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC)
}

fn try_lock(file: &File) -> std::result::Result<(), TryLockError> {
    for _ in 1..LOCK_ATTEMPTS {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            other => return other,
        }
    }
    file.try_lock()
}

fn open_file(directory: &File, name: &str) -> io::Result<File> {
    let flags = OFlag::O_RDWR
        | OFlag::O_CREAT
        | OFlag::O_NOFOLLOW
        | OFlag::O_NONBLOCK
        | OFlag::O_NOCTTY
        | OFlag::O_CLOEXEC;
    Ok(openat(directory, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
}

/// Refuses a file that somebody else put there, or could change.
fn check_ours(metadata: &std::fs::Metadata, path: &Path) -> Result<()> {
    let ours = metadata.is_file()
        && metadata.uid() == geteuid().as_raw()
        && metadata.nlink() == 1
        && metadata.mode() & 0o077 == 0;
    if ours {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Invalid,
        format!(
            "`{}` is not a plain file that only this user can change; find out who made it, then \
             remove it",
            path.display()
        ),
    ))
}

/// Makes the file long enough and gives all of it memory: a mapping of a hole kills the process
/// (`SIGBUS`) when tmpfs is full.
fn reserve(file: &File) -> io::Result<()> {
    loop {
        match nix::fcntl::fallocate(file, FallocateFlags::empty(), 0, TAIL_BYTES as libc::off_t) {
            Err(Errno::EINTR) => {}
            result => return Ok(result?),
        }
    }
}

fn file_name(uuid: [u8; 16], place: &str) -> String {
    let mut name = String::with_capacity(41);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            name.push('-');
        }
        // Writing to a string cannot fail.
        let _ = write!(name, "{byte:02x}");
    }
    name + "-" + place + END
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    const UUID: [u8; 16] = *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff";
    const NAME: &str = "00112233-4455-6677-8899-aabbccddeeff-1-2.tail";

    fn tmpfs() -> Option<tempfile::TempDir> {
        let directory = tempfile::tempdir_in("/dev/shm").ok();
        if directory.as_ref().is_none_or(|d| !is_tmpfs(&File::open(d.path()).unwrap())) {
            eprintln!("skipped: /dev/shm is no tmpfs one can write to");
            return None;
        }
        directory
    }

    #[test]
    fn content_is_kept_until_removed() {
        let Some(directory) = tmpfs() else { return };
        let mut tail = FileTail::open(directory.path(), UUID, "1-2").unwrap();
        assert_eq!(tail.bytes_mut().len(), TAIL_BYTES);
        assert!(tail.bytes_mut().iter().all(|&byte| byte == 0));
        tail.bytes_mut()[TAIL_BYTES - 1] = 42;
        let metadata = std::fs::metadata(directory.path().join(NAME)).unwrap();
        assert_eq!(metadata.mode() & 0o7777, 0o600);
        assert!(metadata.blocks() * 512 >= TAIL_BYTES as u64, "space is reserved");
        drop(tail);

        let mut tail = FileTail::open(directory.path(), UUID, "1-2").unwrap();
        assert_eq!(tail.bytes_mut()[TAIL_BYTES - 1], 42);
        tail.remove();
        drop(tail);
        assert!(!directory.path().join(NAME).exists());
        assert_eq!(
            FileTail::open(directory.path(), UUID, "1-2").unwrap().bytes_mut()[TAIL_BYTES - 1],
            0
        );
    }

    #[test]
    fn two_stores_with_one_uuid_do_not_share() {
        let Some(directory) = tmpfs() else { return };
        let tail = FileTail::open(directory.path(), UUID, "1-2").unwrap();
        assert_eq!(
            FileTail::open(directory.path(), UUID, "1-2").unwrap_err().kind(),
            ErrorKind::Busy
        );
        drop(tail);
        FileTail::open(directory.path(), UUID, "1-2").unwrap();
    }

    /// Found by review: who opened a store at once after its last process had ended went on without a tail.
    #[test]
    fn a_process_that_ends_is_waited_for() {
        let Some(directory) = tmpfs() else { return };
        let tail = FileTail::open(directory.path(), UUID, "1-2").unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(2 * LOCK_PAUSE);
                drop(tail);
            });
            FileTail::open(directory.path(), UUID, "1-2").unwrap();
        });
    }

    #[test]
    fn what_others_could_change_is_refused() {
        let Some(directory) = tmpfs() else { return };
        let path = directory.path().join(NAME);
        let other = directory.path().join("other");
        std::fs::write(&other, b"precious").unwrap();

        symlink(&other, &path).unwrap();
        assert!(FileTail::open(directory.path(), UUID, "1-2").is_err());
        std::fs::remove_file(&path).unwrap();
        let set_mode = |mode| {
            std::fs::set_permissions(&other, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set_mode(0o600);
        std::fs::hard_link(&other, &path).unwrap();
        assert_eq!(
            FileTail::open(directory.path(), UUID, "1-2").unwrap_err().kind(),
            ErrorKind::Invalid
        );
        std::fs::remove_file(&path).unwrap();
        set_mode(0o644);
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(
            FileTail::open(directory.path(), UUID, "1-2").unwrap_err().kind(),
            ErrorKind::Invalid
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(FileTail::open(directory.path(), UUID, "1-2").is_err());
    }

    #[test]
    fn a_file_that_is_gone_is_noticed_and_made_anew() {
        let Some(directory) = tmpfs() else { return };
        let place = directory.path().join("dbs");
        assert!(is_usable(&place));
        let mut tail = FileTail::open(&place, UUID, "1-2").unwrap();
        tail.bytes_mut()[7] = 42;
        std::thread::sleep(LOOK_AGAIN);
        assert!(tail.is_kept());
        std::fs::remove_dir_all(&place).unwrap();
        assert!(!tail.is_kept(), "with its directory");
        assert!(tail.is_kept() && tail.bytes_mut()[7] == 0);
        tail.bytes_mut()[7] = 43;
        // Another file by its name is not it.
        std::fs::rename(place.join(NAME), place.join("old")).unwrap();
        std::fs::copy(place.join("old"), place.join(NAME)).unwrap();
        std::thread::sleep(LOOK_AGAIN);
        assert!(!tail.is_kept() && tail.bytes_mut()[7] == 0);
        drop(tail);
        let mut tail = FileTail::open(&place, UUID, "1-2").unwrap();
        assert_eq!(tail.bytes_mut()[7], 0);
        // Without a place it goes on being gone.
        std::fs::remove_dir_all(&place).unwrap();
        std::fs::write(&place, b"in the way").unwrap();
        std::thread::sleep(LOOK_AGAIN);
        assert!(!tail.is_kept() && !tail.is_kept());
    }

    #[test]
    fn the_directory_that_has_the_tail_comes_first() {
        let Some(directory) = tmpfs() else { return };
        let places = ["first", "second"].map(|name| directory.path().join(name));
        assert_eq!(find_directory(&places, UUID, "1-2"), Some(places[0].clone()));
        assert!(is_usable(&places[1]));
        drop(FileTail::open(&places[1], UUID, "1-2").unwrap());
        assert_eq!(find_directory(&places, UUID, "1-2"), Some(places[1].clone()));
        assert_eq!(find_directory(&places, UUID, "1-3"), Some(places[0].clone()));
        // It is there, if in a place that will not do any more.
        std::fs::set_permissions(&places[1], std::fs::Permissions::from_mode(0o770)).unwrap();
        assert_eq!(find_directory(&places, UUID, "1-2"), Some(places[0].clone()));
        assert_eq!(find_file(&places[1], UUID, "1-2"), Some(places[1].join(NAME)));
        assert_eq!(find_file(&places[0], UUID, "1-2"), None);
        assert_eq!(find_file(&directory.path().join("third"), UUID, "1-2"), None);
        // Nobody of this user has kept one in a directory of somebody else.
        if geteuid().is_root() {
            std::os::unix::fs::chown(&places[1], Some(65534), None).unwrap();
            assert_eq!(find_file(&places[1], UUID, "1-2"), None);
        }
    }

    #[test]
    fn only_tmpfs_will_do() {
        let file = tempfile::tempdir().unwrap();
        if is_tmpfs(&File::open(file.path()).unwrap()) {
            eprintln!("skipped: the directory for temporary files is on tmpfs");
            return;
        }
        let error = FileTail::open(file.path(), UUID, "1-2").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(!file.path().join(NAME).exists());
        assert_eq!(pick_directory(&[file.path().to_path_buf(), file.path().join("new")]), None);
        assert!(!file.path().join("new").exists());
    }

    #[test]
    fn the_first_safe_directory_is_picked() {
        let Some(directory) = tmpfs() else { return };
        let make = |name: &str, mode| {
            let path = directory.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let open_to_all = make("open-to-all", 0o777);
        let open_to_group = make("open-to-group", 0o770);
        let link = directory.path().join("link");
        symlink(make("target", 0o700), &link).unwrap();
        let no_parent = directory.path().join("absent/dbs");
        let new = directory.path().join("new");
        let candidates = [open_to_all, open_to_group, link, no_parent, new.clone()];
        assert_eq!(pick_directory(&candidates[..4]), None);
        assert_eq!(pick_directory(&candidates), Some(new.clone()));
        assert_eq!(std::fs::metadata(&new).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(pick_directory(&candidates), Some(new.clone()));
        if geteuid().is_root() {
            std::os::unix::fs::chown(&new, Some(65534), None).unwrap();
            assert_eq!(pick_directory(&candidates), None);
        } else {
            eprintln!("skipped: giving a directory to another user needs root");
        }
    }
}
