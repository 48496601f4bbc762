//! Directories of upstream's replicas become ours, and ours upstream's: while nobody serves them.
//!
//! Both ways the new form is made in a directory of its own inside the replica's, and the old form stays as it was until
//! all of the new one is durable. Then one rename decides, that of the store: `volume.dbs` is in the replica's
//! directory, or it is not. What is left to do after it needs nothing but renames and removals, and can be done as
//! often as need be.
//!
//! | in the replica's directory | a command that was cut off has | the next one |
//! |---|---|---|
//! | `volume.import/`, no `volume.dbs` | not taken everything over | goes on where it was |
//! | `volume.import/`, and `volume.dbs` | taken everything over | removes upstream's files |
//! | `volume.export/`, and `volume.dbs` | not written everything | goes on with the next file |
//! | `volume.export/`, no `volume.dbs` | written everything | puts upstream's files in their places |
//!
//! While one of the two is there, a replica is not started ([`check_settled`]). [`Held`] keeps commands and
//! processes of replicas out of each other's way.
//!
//! [`serve`] is the third way in: the replica is served from upstream's files while their content comes over.
//!
//! | part | does |
//! |---|---|
//! | [`files`] | looks at upstream's files |
//! | [`import`](mod@import) | `longhorn replica-import` |
//! | [`export`](mod@export) | `longhorn replica-export` |
//! | [`chain`] | upstream's chain of files as one image |
//! | [`serve`] | `longhorn replica --take-over` |

pub mod chain;
pub mod export;
pub mod files;
pub mod import;
pub mod serve;

pub use export::export;
pub use import::import;

use crate::agent::files::FileName;
use crate::host::file::STORE_FILE;
use crate::replica::FILES;
use dbs_core::{Error, ErrorKind, Result, Store, format_size};
use dbs_service::log;
use longhorn_sync::image::Source;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Directory in which a store is filled.
pub const IMPORT: &str = "volume.import";
/// Directory in which upstream's files are written.
pub const EXPORT: &str = "volume.export";
/// Directory with upstream's files that are kept.
pub const KEPT: &str = "volume.upstream";

/// Directory with upstream's files from which a replica is served.
pub const TAKEN: &str = "volume.taken";
/// What [`serve`] makes, until it has its name.
const NEW: &str = "volume.new";

/// Bytes copied at once.
const PIECE_BYTES: usize = 1 << 20;
/// Most bytes of a file system that are left to others.
const SPARE_MAX_BYTES: u64 = 1 << 30;
/// Intervals asked for at once.
const INTERVALS: usize = 256;

/// How far it is. Told after each step, and after each piece of content.
pub use crate::replica::Progress;

impl Progress {
    /// Nothing of these files.
    fn of(files: &files::Files) -> Self {
        Self { total: files.allocated(), ..Self::default() }
    }
}

/// Who is told; an error ends the command, which can be given again.
pub type Told<'a> = &'a dyn Fn(Progress) -> Result<()>;

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moved {
    /// Size of the volume.
    pub size: u64,
    /// Snapshots, removed ones and side branches among them.
    pub snapshots: usize,
    /// Bytes of content in all layers.
    pub bytes: u64,
}

/// The lock on a replica's directory: shared by the processes that serve it, or one command's alone.
#[derive(Debug)]
pub struct Held {
    directory: File,
}

impl Drop for Held {
    fn drop(&mut self) {
        // Explicitly, as a child between fork and exec shares the description.
        let _ = self.directory.unlock();
    }
}

impl Held {
    /// For a process that is to serve the replica. Where a file system knows no locks there is none.
    ///
    /// # Errors
    /// `Busy` while a command moves the replica; `Io`.
    pub fn shared(dir: &Path) -> Result<Self> {
        let directory = open(dir)?;
        if let Err(TryLockError::WouldBlock) = directory.try_lock_shared() {
            let text =
                "is being moved from or to upstream's files: wait until the command has ended";
            return Err(Error::busy(format!("the replica in `{}` {text}", dir.display())));
        }
        Ok(Self { directory })
    }

    /// For a command.
    ///
    /// # Errors
    /// `Busy` while a process serves the replica, or another command moves it; `Io`.
    pub fn alone(dir: &Path) -> Result<Self> {
        let directory = open(dir)?;
        match directory.try_lock() {
            Ok(()) => Ok(Self { directory }),
            Err(TryLockError::WouldBlock) => Err(Error::busy(format!(
                "the replica in `{}` is being served, or another command moves it: stop it first",
                dir.display()
            ))),
            Err(TryLockError::Error(e)) => {
                Err(Error::io(e, format!("locking `{}`", dir.display())))
            }
        }
    }
}

/// Refuses a directory in which a command was cut off.
///
/// # Errors
/// `Exists` with the command that ends it.
pub fn check_settled(dir: &Path) -> Result<()> {
    check_not(dir, IMPORT)?;
    check_not(dir, EXPORT)
}

/// Refuses a replica that is served from upstream's files.
///
/// # Errors
/// `Busy` with what to do.
pub fn check_not_served(dir: &Path) -> Result<()> {
    if !exists(&dir.join(TAKEN))? {
        return Ok(());
    }
    let dir = dir.display();
    Err(Error::busy(format!(
        "the replica in `{dir}` is served from upstream's files, which are in `{TAKEN}` there: start it again, with \
         --take-over, until their content is in its store; or, if there is no {STORE_FILE} yet, move them back, and remove \
         `{TAKEN}`"
    )))
}

/// Refuses a directory in which one of the commands was cut off: by where it was at work.
fn check_not(dir: &Path, place: &str) -> Result<()> {
    if !exists(&dir.join(place))? {
        return Ok(());
    }
    let command = if place == IMPORT { "replica-import" } else { "replica-export" };
    let dir = dir.display();
    let text = format!(
        "`longhorn {command}` was cut off in `{dir}`, and the replica is neither here nor there: give \
         `longhorn {command} {dir}` again, with the options that it had"
    );
    Err(Error::new(ErrorKind::Exists, text))
}

/// Copies what a source has, in order. What lies before `from` is there already.
fn copy(
    source: &dyn Source,
    from: u64,
    write: &dyn Fn(u64, &[u8]) -> Result<()>,
    count: &mut Count<'_>,
) -> Result<()> {
    let mut buf = dbs_core::io::buffer::AlignedBuf::zeroed(PIECE_BYTES);
    let mut at = 0;
    while at < source.size() {
        let intervals = source.intervals(at, INTERVALS)?;
        let Some(last) = intervals.last() else { break };
        at = last.end();
        for interval in intervals.iter().filter(|interval| interval.data) {
            let mut next = interval.offset;
            while next < interval.end() {
                let length = (PIECE_BYTES as u64).min(interval.end() - next);
                if next + length > from {
                    let piece = &mut buf[..length as usize];
                    source.read_at(next, piece)?;
                    write(next, piece)?;
                    count.progress.copied += length;
                }
                count.add(length)?;
                next += length;
            }
        }
    }
    Ok(())
}

/// Counts what was copied.
struct Count<'a> {
    progress: Progress,
    told: Told<'a>,
}

impl Count<'_> {
    fn add(&mut self, bytes: u64) -> Result<()> {
        self.progress.bytes += bytes;
        (self.told)(self.progress)
    }
}

/// Refuses if a file system has less room than so many bytes take, and what describes them.
fn check_room(place: &Path, bytes: u64) -> Result<()> {
    let needed = bytes + bytes / 20;
    let system = nix::sys::statvfs::statvfs(place)
        .map_err(|e| Error::io(e.into(), format!("looking at `{}`", place.display())))?;
    let free = system.blocks_available() * system.fragment_size();
    if free >= needed {
        return Ok(());
    }
    let (needed, free) = (format_size(needed), format_size(free));
    Err(Error::new(
        ErrorKind::NoSpace,
        format!("the content is copied, for which {needed} are needed, and there are {free} free"),
    ))
}

/// Bytes that are left to others of the same file system by who is in no hurry.
fn spare(place: &Path) -> Result<u64> {
    let system = nix::sys::statvfs::statvfs(place)
        .map_err(|e| Error::io(e.into(), format!("looking at `{}`", place.display())))?;
    Ok((system.blocks() * system.fragment_size() / 100).min(SPARE_MAX_BYTES))
}

/// Whether a file is what a process that was killed has left of [`NEW`]: a store that is made has such a name.
fn is_half_made(name: &str) -> bool {
    name == NEW || (name.starts_with(&format!("{STORE_FILE}.")) && name.ends_with(".new"))
}

/// What to do if there is no room, which others may need more.
fn told_of_room(error: Error, place: &Path) -> Error {
    if error.kind() != ErrorKind::NoSpace {
        return error;
    }
    let text =
        format!("{error}. Free space, and give the command again; or remove `{}`", place.display());
    Error::new(ErrorKind::NoSpace, text)
}

/// Bytes that a file takes; nothing if there is none.
fn allocated(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |m| m.blocks() * 512)
}

/// Tells what there is to be told of a store that was opened.
fn warn(store: &Store) {
    for warning in &store.info().warnings {
        log::warn("store", &[("warning", warning)]);
    }
}

fn open(dir: &Path) -> Result<File> {
    let opened = File::open(dir);
    opened.map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            Error::not_found(format!("there is no directory `{}`", dir.display()))
        }
        _ => Error::io(e, format!("opening `{}`", dir.display())),
    })
}

/// Whether there is something; an error is no answer.
fn exists(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        found => found
            .map(|_| true)
            .map_err(|e| Error::io(e, format!("looking at `{}`", path.display()))),
    }
}

/// Refuses a place of work, if it is there, that is not one of these commands': they remove what is in it.
fn check_place(place: &Path) -> Result<()> {
    if !exists(place)? {
        return Ok(());
    }
    let m = fs::symlink_metadata(place)
        .map_err(|e| Error::io(e, format!("looking at `{}`", place.display())))?;
    let foreign =
        if m.is_dir() { list(place)?.into_iter().find(|name| !is_ours(name)) } else { None };
    if m.is_dir() && foreign.is_none() {
        return Ok(());
    }
    let text = match foreign {
        Some(name) => {
            format!("`{}` holds `{name}`, which is none of the command's", place.display())
        }
        None => format!("`{}` is no directory", place.display()),
    };
    Err(Error::new(ErrorKind::Exists, format!("{text}: move it away")))
}

/// Whether one of the commands makes files of this name where it is at work.
fn is_ours(name: &str) -> bool {
    let name = name.strip_suffix(".tmp").unwrap_or(name);
    let own = [
        import::SOURCE,
        import::KEEP,
        import::TAKEN,
        export::DONE,
        export::COMPLETE,
        files::REVISION_FILE,
    ];
    own.contains(&name)
        || FILES.contains(&name)
        || name.starts_with(STORE_FILE)
        || FileName::parse(name).is_ok()
}

/// Makes a directory, durably; it may be there.
fn make_dir(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::io(e, format!("making `{}`", path.display())));
        }
        _ => {}
    }
    sync(path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")))
}

/// Makes a file or directory durable.
fn sync(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|file| file.sync_all());
    synced.map_err(|e| Error::io(e, format!("making `{}` durable", path.display())))
}

/// Writes a small file, durable when its directory is.
fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| Error::io(e, format!("writing `{}`", path.display())))
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|e| Error::io(e, format!("renaming `{}`", from.display())))
}

/// Removes a file; it may be gone.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(e, format!("removing `{}`", path.display())))
        }
        _ => Ok(()),
    }
}

/// Names in a directory, sorted.
fn list(dir: &Path) -> Result<Vec<String>> {
    let read = || -> io::Result<Vec<String>> {
        let names =
            fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    };
    let mut names = read().map_err(|e| Error::io(e, format!("reading `{}`", dir.display())))?;
    names.sort();
    Ok(names)
}

fn absolute(dir: &Path) -> Result<PathBuf> {
    std::path::absolute(dir).map_err(|e| Error::io(e, format!("finding `{}`", dir.display())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
