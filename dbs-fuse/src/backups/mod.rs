//! The tree of a backup store: each backup is a file with the content of its snapshot.
//!
//! Names and facts come from a [`Catalog`], content from a [`Reader`], each on a connection of its own to the backup store.

mod kind;
mod log;
mod piece;

use crate::content::{self, Part};
use crate::node::{Kind as _, Node, Nodes};
use crate::tree::{
    Entry, Open, Owner, RAW, READ_MAX_BYTES, Result, STAT_BLOCK, Space, Tree, text_size,
    with_buffer,
};
use dbs_backup::BackupStore;
use dbs_backup::catalog::{Catalog, Listed};
use dbs_backup::config::Block;
use dbs_backup::read::{OpenBackup, Piece, Place, ReadOptions, Reader};
use dbs_backup::url::Url;
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::{Error, ErrorKind};
use fuser::{Errno, FileAttr, FopenFlags, Notifier, ReplyData};
use kind::Kind;
use log::Log;
use piece::{Image, fill, put};
use serde_json::json;
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// What the kernel may believe for so long: a backup stays what it is until it is deleted.
const BELIEVED: Duration = Duration::from_secs(10);
/// A backup that nobody has open any more stays so for this time, with its lock: the next one to open it need not wait.
const LINGER: Duration = Duration::from_secs(10);
/// How soon the watcher sees that it is to end.
const WATCH_PATIENCE: Duration = Duration::from_millis(200);
/// Blocks in the facts of all backups that are open, unless it is one alone: 1 GiB of memory.
const BLOCKS_MAX: usize = (1 << 30) / size_of::<Block>();

/// How backups are shown.
pub struct BackupOptions {
    /// The store, or a volume or backup in it: only that is shown.
    pub url: Url,
    /// How backups are read.
    pub read: ReadOptions,
    /// Users other than the one who mounts may look at it.
    pub allow_other: bool,
    /// Is told why something cannot be read.
    pub warn: Box<dyn Fn(&str) + Send + Sync>,
}

/// A backup store as a tree.
pub struct Backups {
    url: Url,
    owner: Owner,
    read: ReadOptions,
    begun: SystemTime,
    nodes: Nodes<Kind>,
    log: Log,
    catalog: Catalog,
    /// Its end comes before that of the locks: a backup store that is away does not hold it up.
    reader: Reader,
    /// What is open, or was a moment ago; and since when nobody was seen to have it open.
    open: Mutex<Vec<(Arc<OpenBackup>, Option<Instant>)>>,
}

/// A backup as somebody has it open.
pub struct File {
    backup: Arc<OpenBackup>,
    place: Place,
}

impl Backups {
    /// The tree of what `open` opens, which is called twice.
    ///
    /// # Errors
    /// Those of opening it; `NotFound` if it does not have what the URL names; what keeps that from being read.
    pub fn new(
        options: BackupOptions,
        open: impl Fn() -> dbs_core::Result<BackupStore>,
    ) -> dbs_core::Result<Self> {
        let backups = Self {
            owner: Owner::new(options.allow_other),
            read: options.read,
            begun: SystemTime::now(),
            nodes: Nodes::new(),
            log: Log::new(options.warn),
            open: Mutex::default(),
            catalog: Catalog::new(open()?),
            reader: Reader::start(open()?, options.read)?,
            url: options.url,
        };
        let catalog = &backups.catalog;
        match (&backups.url.volume, &backups.url.backup) {
            (None, _) => {}
            (Some(volume), _) if !catalog.has_volume(volume)? => {
                return Err(Error::not_found(format!("no volume {volume} in the backup store")));
            }
            (Some(volume), Some(backup)) if catalog.backup(volume, backup)?.is_none() => {
                return Err(Error::not_found(format!(
                    "volume {volume} has no complete backup {backup}"
                )));
            }
            (Some(volume), None) => drop(catalog.backups(volume)?),
            (Some(_), Some(_)) => {}
        }
        Ok(backups)
    }

    /// What is mounted, for people.
    pub fn source(&self) -> String {
        self.url.to_string()
    }

    /// Whether users other than the one who mounts may look at it.
    pub fn allow_other(&self) -> bool {
        self.owner.allow_other
    }

    /// Where a backup is in the tree.
    ///
    /// # Errors
    /// `NotFound`; what keeps it from being read.
    pub fn path(&self, volume: &str, backup: &str) -> dbs_core::Result<String> {
        let listed = self.catalog.backup(volume, backup)?.ok_or_else(|| {
            Error::not_found(format!("volume {volume} has no complete backup {backup}"))
        })?;
        Ok(format!("volumes/{volume}/{}{RAW}", listed.stem()))
    }

    /// What is inside a backup.
    pub fn parts(&self, volume: &str, backup: &str) -> dbs_core::Result<Vec<Part>> {
        let (reader, place) = (&self.reader, Place::default());
        content::parts(&Image { reader, place, backup: self.reader.open(volume, backup)? })
    }

    /// Whether a volume is shown.
    fn shows(&self, volume: &str) -> bool {
        self.url.volume.as_ref().is_none_or(|only| only == volume)
    }

    /// The backups of a volume that are shown, oldest first.
    fn listed(&self, volume: &str) -> Result<Vec<Arc<Listed>>> {
        let found = self.catalog.backups(volume).map_err(|error| {
            self.failed(error.context(format!("listing the backups of volume {volume}")))
        })?;
        for problem in &found.problems {
            self.log.add(&format!("a backup is not shown: {problem}"));
        }
        Ok(self.shown(found.complete))
    }

    /// Those of them that are shown.
    fn shown(&self, mut all: Vec<Arc<Listed>>) -> Vec<Arc<Listed>> {
        all.retain(|listed| self.url.backup.as_ref().is_none_or(|only| *only == listed.backup));
        all
    }

    fn newest(&self, volume: &str) -> Result<Arc<Listed>> {
        self.listed(volume)?.pop().ok_or(Errno::ENOENT)
    }

    /// The backup that a file name names.
    fn find(&self, volume: &str, name: &str) -> Result<Arc<Listed>> {
        let stem = name.strip_suffix(RAW).ok_or(Errno::ENOENT)?;
        let backup = Listed::backup_of(stem).ok_or(Errno::ENOENT)?;
        if self.url.backup.as_ref().is_some_and(|only| only != backup) {
            return Err(Errno::ENOENT);
        }
        let found = self.catalog.backup(volume, backup).map_err(|error| self.failed(error))?;
        found.filter(|listed| listed.stem() == stem).ok_or(Errno::ENOENT)
    }

    fn store_json(&self) -> Vec<u8> {
        let mount = json!({
            "pid": std::process::id(),
            // The process ends with the mount.
            "live": false,
            "cache": self.read.cache,
            "parallel": self.read.parallel,
            "locks": self.read.lock,
            "version": env!("CARGO_PKG_VERSION"),
        });
        let value = json!({ "backup_store": { "url": self.source() }, "mount": mount });
        let mut text = serde_json::to_vec_pretty(&value).unwrap_or_default();
        text.push(b'\n');
        text
    }

    /// Notes why something failed; returns the number that the kernel is told.
    fn failed(&self, error: Error) -> Errno {
        let errno = match error.kind() {
            ErrorKind::NotFound => Errno::ESTALE,
            ErrorKind::Busy => Errno::EBUSY,
            _ => Errno::EIO,
        };
        self.log.add(&error.to_string());
        errno
    }

    fn opened(&self) -> MutexGuard<'_, Vec<(Arc<OpenBackup>, Option<Instant>)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a backup, or finds it open.
    fn open_backup(&self, listed: &Listed) -> Result<Arc<OpenBackup>> {
        let (volume, name) = (&listed.volume, &listed.backup);
        let backup = self.reader.open(volume, name).map_err(|error| {
            self.failed(error.context(format!("opening backup {name} of volume {volume}")))
        })?;
        if !listed.is(backup.config()) {
            // Somebody deleted it, and made another one of its name.
            self.catalog.forget(volume, name);
            return Err(Errno::ESTALE);
        }
        let mut open = self.opened();
        let blocks = |backup: &OpenBackup| backup.config().blocks.len();
        let others: usize = open.iter().map(|(other, _)| blocks(other)).sum();
        if others > 0 && others + blocks(&backup) > BLOCKS_MAX {
            drop(open);
            self.log.add(&format!(
                "opening backup {name} of volume {volume}: the facts of those that are open take too much memory"
            ));
            return Err(Errno::ENFILE);
        }
        open.push((Arc::clone(&backup), None));
        Ok(backup)
    }

    /// Lets go of what nobody has open any more.
    fn sweep(&self) {
        let mut closed = Vec::new();
        self.opened().retain_mut(|(backup, since)| {
            let ends = has_lingered(Arc::strong_count(backup) > 1, since, Instant::now());
            if ends {
                closed.push(Arc::clone(backup));
            }
            !ends
        });
        // That asks the backup store to remove a lock, without ours.
        drop(closed);
    }

    /// Copies a part of a backup that is in several blocks.
    fn copy<'a>(
        &self,
        file: &File,
        range: Range<u64>,
        first: &Piece,
        buffer: &'a mut AlignedBuf,
    ) -> dbs_core::Result<&'a [u8]> {
        let length = (range.end - range.start) as usize;
        let filled = put(&mut buffer[..length], first);
        let (reader, at) = (&self.reader, range.start + filled as u64);
        fill(reader, &file.backup, &file.place, at, &mut buffer[filled..length])?;
        Ok(&buffer[..length])
    }
}

impl Tree for Backups {
    type Kind = Kind;
    type File = File;

    fn nodes(&self) -> &Nodes<Kind> {
        &self.nodes
    }

    fn lifetime(&self) -> Duration {
        BELIEVED
    }

    fn child(&self, directory: &Kind, name: &OsStr) -> Result<Kind> {
        let name = name.to_str().ok_or(Errno::ENOENT)?;
        match directory {
            Kind::Root => match name {
                "store.json" => Ok(Kind::StoreJson),
                "errors.log" => Ok(Kind::Errors),
                "volumes" => Ok(Kind::Volumes),
                _ => Err(Errno::ENOENT),
            },
            Kind::Volumes => {
                let is_there = self.shows(name)
                    && self.catalog.has_volume(name).map_err(|error| self.failed(error))?;
                if is_there { Ok(Kind::Volume(name.into())) } else { Err(Errno::ENOENT) }
            }
            Kind::Volume(volume) if name == "latest" => {
                self.newest(volume)?;
                Ok(Kind::Latest(Arc::clone(volume)))
            }
            Kind::Volume(volume) => self.find(volume, name).map(Kind::Backup),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn entries(&self, directory: &Kind) -> Result<Vec<Entry<Kind>>> {
        let entry = Entry::new;
        let parent = if let Kind::Volume(_) = directory { Kind::Volumes } else { Kind::Root };
        let mut entries = vec![entry(".", directory.clone()), entry("..", parent)];
        match directory {
            Kind::Root => {
                entries.push(entry("errors.log", Kind::Errors));
                entries.push(entry("store.json", Kind::StoreJson));
                entries.push(entry("volumes", Kind::Volumes));
            }
            Kind::Volumes => {
                let volumes = match &self.url.volume {
                    Some(only) => vec![only.clone()],
                    None => self.catalog.volumes().map_err(|error| self.failed(error))?,
                };
                entries.extend(volumes.iter().map(|v| entry(v, Kind::Volume(v.as_str().into()))));
            }
            Kind::Volume(volume) => {
                let all = self.listed(volume)?;
                if !all.is_empty() {
                    entries.push(entry("latest", Kind::Latest(Arc::clone(volume))));
                }
                let file =
                    |listed: Arc<Listed>| entry(&(listed.stem() + RAW), Kind::Backup(listed));
                entries.extend(all.into_iter().map(file));
            }
            _ => return Err(Errno::ENOTDIR),
        }
        Ok(entries)
    }

    fn target(&self, link: &Kind) -> Result<String> {
        let Kind::Latest(volume) = link else { return Err(Errno::EINVAL) };
        Ok(self.newest(volume)?.stem() + RAW)
    }

    fn attributes(&self, number: u64, node: &Node<Kind>) -> Result<(FileAttr, bool)> {
        let (space, time) = match &node.kind {
            Kind::Backup(listed) => {
                ((listed.size, listed.data.min(listed.size) / STAT_BLOCK), listed.system_time())
            }
            Kind::StoreJson => (text_size(self.store_json().len() as u64), self.begun),
            Kind::Errors => (text_size(self.log.text().len() as u64), self.log.written()),
            Kind::Latest(volume) => {
                let newest = self.shown(self.catalog.complete(volume)).pop();
                let target = newest.map(|listed| listed.stem() + RAW);
                ((target.map_or(0, |target| target.len() as u64), 0), self.begun)
            }
            _ => ((0, 0), self.begun),
        };
        let stays = !matches!(node.kind, Kind::Errors | Kind::Latest(_));
        Ok((self.owner.shape(number, node.kind.file_type(), space, time), stays))
    }

    fn quick_attributes(&self, number: u64, node: &Node<Kind>) -> Result<(FileAttr, bool)> {
        self.attributes(number, node)
    }

    fn extended(&self, kind: &Kind) -> Result<Vec<(String, String)>> {
        let Kind::Backup(listed) = kind else { return Ok(Vec::new()) };
        let fact = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let mut facts = vec![
            fact("volume", &listed.volume),
            fact("backup", &listed.backup),
            fact("snapshot", &listed.snapshot),
            fact("asked_at", &listed.asked_at),
            fact("created", &listed.created),
            fact("size", &listed.size.to_string()),
            fact("incremental", &listed.incremental.to_string()),
        ];
        let labels = listed.labels.iter();
        let labels = labels.filter(|(key, _)| key.len() <= 200 && !key.contains('\0'));
        facts.extend(labels.map(|(key, value)| fact(&format!("label.{key}"), value)));
        Ok(facts)
    }

    fn open(&self, node: &Node<Kind>) -> Result<Open<File>> {
        match &node.kind {
            Kind::Backup(listed) => {
                // Others who open it wait: it is opened once.
                let mut seen = node.seen.0.lock().unwrap_or_else(PoisonError::into_inner);
                let backup = match seen.open.upgrade() {
                    Some(backup) => backup,
                    None => self.open_backup(listed)?,
                };
                let digest = Some(backup.digest());
                let keeps = seen.digest == digest;
                seen.digest = digest;
                seen.open = Arc::downgrade(&backup);
                let flags = if keeps { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() };
                Ok(Open::File(File { backup, place: Place::default() }, flags))
            }
            Kind::StoreJson => Ok(Open::Text(self.store_json())),
            Kind::Errors => Ok(Open::Text(self.log.text())),
            Kind::Latest(_) => Err(Errno::ELOOP),
            _ => Err(Errno::EISDIR),
        }
    }

    fn read(&self, _: &Kind, file: Option<&File>, offset: u64, size: usize, reply: ReplyData) {
        let Some(file) = file else { return reply.error(Errno::EISDIR) };
        let stop = file.backup.size().min(offset.saturating_add(size.min(READ_MAX_BYTES) as u64));
        if offset >= stop {
            return reply.data(&[]);
        }
        let length = (stop - offset) as usize;
        let first = match self.reader.read(&file.backup, &file.place, offset, length) {
            Ok(Piece::Data(content, range)) if range.len() == length => {
                return reply.data(&content[range]);
            }
            Ok(piece) => piece,
            Err(error) => return reply.error(self.failed(error)),
        };
        with_buffer(|buffer| match self.copy(file, offset..stop, &first, buffer) {
            Ok(bytes) => reply.data(bytes),
            Err(error) => reply.error(self.failed(error)),
        });
    }

    fn seek(&self, _: &Kind, file: Option<&File>, offset: i64, whence: i32) -> Result<i64> {
        let backup = &file.ok_or(Errno::EINVAL)?.backup;
        let from = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
        if from >= backup.size() {
            return Err(Errno::ENXIO);
        }
        let found = match whence {
            libc::SEEK_DATA => {
                let found = backup.next(from, true);
                if found >= backup.size() {
                    return Err(Errno::ENXIO);
                }
                found
            }
            libc::SEEK_HOLE => backup.next(from, false),
            _ => return Err(Errno::EINVAL),
        };
        i64::try_from(found).map_err(|_| Errno::EOVERFLOW)
    }

    /// Nobody knows how large a backup store is.
    fn space(&self) -> Space {
        Space::default()
    }

    fn is_watched(&self) -> bool {
        true
    }

    fn watch(&self, _: &Notifier, stop: &AtomicBool) {
        while !stop.load(Ordering::SeqCst) {
            std::thread::sleep(WATCH_PATIENCE);
            self.sweep();
        }
    }

    fn end(&self) {
        self.reader.end();
    }
}

/// Whether a backup is to be let go of; `since` tells since when it was seen that nobody has it open. A watcher that comes late,
/// as the machine is busy, has not seen when that began.
fn has_lingered(is_open: bool, since: &mut Option<Instant>, now: Instant) -> bool {
    if is_open {
        *since = None;
        return false;
    }
    now.duration_since(*since.get_or_insert(now)) >= LINGER
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It was counted from when it was last seen to be open: who closed it after a while in which nobody looked had to wait for
    /// a new lock.
    #[test]
    fn what_is_closed_lingers_however_long_nobody_looked() {
        let (begun, mut since) = (Instant::now(), None);
        let mut look =
            |is_open: bool, after: Duration| has_lingered(is_open, &mut since, begun + after);
        assert!(!look(true, Duration::ZERO));
        assert!(!look(false, LINGER * 3));
        assert!(!look(false, LINGER * 4 - WATCH_PATIENCE));
        assert!(!look(true, LINGER * 5), "open again");
        assert!(!look(false, LINGER * 6));
        assert!(look(false, LINGER * 7));
    }
}
