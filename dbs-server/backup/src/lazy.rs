//! Volumes that rest on a backup until all of it has come: `dbs backup restore --lazy`.
//!
//! The volume is made on the backup as one is made on an image file ([`begin`], [`BackupFile`]): what it does not have
//! itself is read from the backup. Whoever has the store then fills a second volume, which is called as the held backup is,
//! freezes it, and has the first one build on that in place of the backup ([`bring`]). Each step is durable before the next
//! one, and finds what an earlier run has done. At the end nobody needs the backup ([`let_go`]).

use crate::restore::fill;
use crate::{Host, Pace, Wanted};
use dbs_backup::read::{OpenBackup, Piece, Place, ReadOptions, Reader};
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Work};
use dbs_control::api::Request;
use dbs_core::info::{Labels, VolumeInfo};
use dbs_core::units::SECTOR_BYTES;
use dbs_core::{Backing, Error, ErrorKind, Result, Store};
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How identities of backups begin.
const KIND: &str = "backup ";
/// Bytes of blocks that all backups of a process keep in memory, what was read once and is needed again soon; and how many blocks
/// are on their way. Each backup has its share.
const CACHE: u64 = 128 << 20;
const PARALLEL: usize = 16;
/// What one backup has at most.
const CACHE_MAX: u64 = 64 << 20;
const PARALLEL_MAX: usize = 8;
/// How long nothing may come before reads fail at once, but for one at a time.
const SILENCE: Duration = Duration::from_secs(60);
/// The snapshot of the second volume that shows all of the backup.
const WHOLE: &str = "whole";
/// The label of that snapshot: what it shows (`BackupConfig::content`).
const LABEL_CONTENT: &str = "dbs-backup-content";

/// A held backup that volumes rest on. It is opened once, and read by many threads.
pub struct BackupFile {
    identity: String,
    /// What it holds (`BackupConfig::content`).
    content: String,
    url: Url,
    reader: Reader,
    backup: Arc<OpenBackup>,
    place: Place,
    reads: Reads,
}

/// Reads of a file.
#[derive(Default)]
struct Reads {
    /// Under way.
    now: AtomicUsize,
    /// All that have begun.
    all: AtomicU64,
}

/// A held backup that is opened when something is read of it.
struct LateFile {
    /// As the store says it.
    identity: String,
    size: u64,
    url: Url,
    open: Box<Open>,
    file: Mutex<Option<Arc<BackupFile>>>,
}

type Open = dyn Fn() -> Result<BackupFile> + Send + Sync;

impl BackupFile {
    /// Opens the held backup that `url` names in its backup store, one of so many (`among`) of this process.
    ///
    /// # Errors
    /// `Invalid` if it is not held, or if the URL names none; those of the backup store.
    pub fn open(url: &Url, backups: BackupStore, among: usize) -> Result<Self> {
        let (volume, name) = url.need_backup()?;
        let among = among.max(1);
        // What is held is not deleted: no lock is needed, and deletions of others go on.
        let options = ReadOptions {
            lock: false,
            cache: (CACHE / among as u64).min(CACHE_MAX),
            parallel: (PARALLEL / among).clamp(1, PARALLEL_MAX),
            patience: Some(SILENCE),
        };
        let reader = Reader::start(backups, options)?;
        let backup = reader.open(volume, name)?;
        if backup.config().held_for().is_none() {
            return Err(Error::invalid(format!(
                "backup {name} of volume {volume} is none that a volume rests on: `dbs backup restore --lazy` makes one of it"
            )));
        }
        let size = backup.size();
        if size == 0 || !size.is_multiple_of(SECTOR_BYTES) {
            return Err(Error::unsupported(format!(
                "the volume of backup {name} has {size} bytes, which is no multiple of {SECTOR_BYTES}"
            )));
        }
        let content = backup.config().content();
        let identity =
            format!("{}{size} bytes, sha256 of its blocks {content}", begins(volume, name));
        let (url, place, reads) = (url.clone(), Place::default(), Reads::default());
        Ok(Self { identity, content, url, reader, backup, place, reads })
    }

    /// Ends it: reads fail, those on their way with this try.
    pub fn end(&self) {
        self.reader.end();
    }

    /// How many reads have begun, if none is under way.
    #[must_use]
    pub fn idle(&self) -> Option<u64> {
        let all = self.reads.all.load(Ordering::SeqCst);
        (self.reads.now.load(Ordering::SeqCst) == 0).then_some(all)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let piece = self.reader.read(&self.backup, &self.place, at, rest.len());
            let count = match piece.map_err(io::Error::other)? {
                Piece::Data(content, range) => {
                    let (now, part) = (range.len(), content.get(range));
                    let (to, part) = (rest.get_mut(..now), part);
                    let (Some(to), Some(part)) = (to, part) else { return Err(outside()) };
                    to.copy_from_slice(part);
                    now
                }
                Piece::Zeros(count) => {
                    rest.get_mut(..count).ok_or_else(outside)?.fill(0);
                    count
                }
            };
            if count == 0 {
                return Err(outside());
            }
            at += count as u64;
            rest = &mut rest[count..];
        }
        Ok(())
    }
}

impl Backing for BackupFile {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn name(&self) -> String {
        format!("`{}`", self.url)
    }

    fn size(&self) -> u64 {
        self.backup.size()
    }

    fn is_far(&self) -> bool {
        true
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.now.fetch_add(1, Ordering::SeqCst);
        self.reads.all.fetch_add(1, Ordering::SeqCst);
        let read = self.read(offset, buf);
        self.reads.now.fetch_sub(1, Ordering::SeqCst);
        read
    }
}

impl LateFile {
    fn file(&self) -> Result<Arc<BackupFile>> {
        // Who comes meanwhile would wait for the same.
        let mut slot = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*slot {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new((self.open)()?);
        if file.identity != self.identity {
            return Err(Error::invalid("it is not the backup that the volume rests on"));
        }
        *slot = Some(Arc::clone(&file));
        Ok(file)
    }
}

impl Backing for LateFile {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn name(&self) -> String {
        format!("`{}`", self.url)
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn is_far(&self) -> bool {
        true
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file().map_err(io::Error::other)?.read_at(offset, buf)
    }
}

/// The file on which volumes of a store rest, if any rest on the backup that `url` names. What it is, the store says; it is opened
/// when something is read of it, so that whoever reads nothing of it does not wait for the backup store.
#[must_use]
pub fn late(
    store: &Store,
    url: &Url,
    open: impl Fn() -> Result<BackupFile> + Send + Sync + 'static,
) -> Option<Arc<dyn Backing>> {
    let identity = resting(store, url).into_iter().find_map(|volume| volume.backing)?;
    let size = size_in(&identity, url)?;
    let (url, open) = (url.clone(), Box::new(open));
    Some(Arc::new(LateFile { identity, size, url, open, file: Mutex::default() }))
}

/// The size that an identity tells.
fn size_in(identity: &str, url: &Url) -> Option<u64> {
    let (volume, held) = url.need_backup().ok()?;
    let rest = identity.strip_prefix(&begins(volume, held))?;
    rest.split_once(" bytes, ")?.0.parse().ok()
}

fn outside() -> io::Error {
    io::Error::other("the backup ends before what is to be read")
}

/// How the identity of a held backup begins.
fn begins(volume: &str, name: &str) -> String {
    format!("{KIND}{name} of volume {volume}, ")
}

/// Whether a volume rests on the backup that `url` names, as far as its name tells.
#[must_use]
pub fn rests_on(volume: &VolumeInfo, url: &Url) -> bool {
    let (Some(there), Some(held)) = (&url.volume, &url.backup) else { return false };
    volume.backing.as_ref().is_some_and(|on| on.starts_with(&begins(there, held)))
}

/// The volumes of a store that rest on this backup.
#[must_use]
pub fn resting(store: &Store, url: &Url) -> Vec<VolumeInfo> {
    let mut volumes = store.volumes(false);
    volumes.retain(|volume| rests_on(volume, url));
    volumes
}

/// Whether a backup is held for a volume of this store, whatever has become of that.
///
/// # Errors
/// Those of the backup store.
pub fn is_own(uuid: &str, url: &Url, backups: &BackupStore) -> Result<bool> {
    let (volume, name) = url.need_backup()?;
    let held_for = backups.held_for(volume, name)?;
    Ok(held_for.is_some_and(|held_for| held_for.ends_with(&of_store(uuid))))
}

fn of_store(uuid: &str) -> String {
    format!(" of store {uuid}")
}

/// A volume that rests on a backup.
pub struct Begun {
    /// The volume.
    pub volume: VolumeInfo,
    /// What is held for it.
    pub url: Url,
    /// Bytes of the blocks of the backup, some of which may be zeros.
    pub data: u64,
}

/// Makes a volume that rests on a backup. `open` opens the backup store.
///
/// # Errors
/// `Exists` if there is such a volume; those of both stores.
pub fn begin(
    store: &Store,
    wanted: Wanted<'_>,
    url: &Url,
    open: &dyn Fn() -> Result<BackupStore>,
) -> Result<Begun> {
    let name = wanted.name;
    if store.volume_info(name).is_ok() {
        let text = format!("there is a volume `{name}` already: name another one");
        return Err(Error::new(ErrorKind::Exists, text));
    }
    let backups = open()?;
    let held_for = format!("volume {name}{}", of_store(&store.info().uuid));
    let held = backups.hold(wanted.volume, wanted.backup, &held_for)?;
    let url = url.with(wanted.volume, Some(&held));
    let made = open().and_then(|reading| {
        let file = BackupFile::open(&url, reading, 1)?;
        let data = file.backup.config().size;
        let file: Arc<dyn Backing> = Arc::new(file);
        Ok((store.create_backed(name, file.size(), &file)?, data))
    });
    match made {
        Ok((volume, data)) => Ok(Begun { volume, url, data }),
        Err(error) => {
            match backups.let_go(wanted.volume, &held, &mut Work::new(&mut |_, _| true)) {
                Ok(_) => Err(error),
                Err(kept) => Err(error.context(format!(
                    "{url} is kept ({kept}): delete it with `dbs backup delete --held`"
                ))),
            }
        }
    }
}

/// Brings all of a backup into a store, and has the volume that rests on it stand alone. Returns its name; nothing if no
/// volume rests on the backup any more: then what has come is deleted.
///
/// It can be done again after it was cut off anywhere: then it goes on.
///
/// # Errors
/// `Busy` if other volumes than that which was restored are all that is left on the backup; `Invalid` if the volume is
/// smaller than it was; those of both stores.
pub fn bring(
    host: &dyn Host,
    store: &Store,
    file: &BackupFile,
    backups: &BackupStore,
    pace: Pace,
) -> Result<Option<String>> {
    let (volume, held) = file.url.need_backup()?;
    let second = store.volumes(false).into_iter().find(|volume| volume.name == held);
    let mut on = resting(store, &file.url);
    if on.is_empty() {
        let Some(second) = second else { return Ok(None) };
        // Cut off right before the end, or the volume was deleted.
        if !second.rebuilding {
            check_untouched(store, held, None)?;
        }
        let uuid = Some(second.uuid);
        host.clean_up(&Request::VolumeDelete { volume: held.to_owned(), uuid, rebuilding: false })?;
        return Ok(None);
    }
    on.retain(|volume| volume.origin.is_none());
    let Some(on) = on.into_iter().next() else {
        return Err(Error::busy(format!(
            "only clones of the volume that was restored rest on {}: delete them, or copy them with `dbs send`",
            file.name()
        )));
    };
    if on.backing.as_deref() != Some(file.identity()) {
        return Err(Error::invalid(format!(
            "{} is not the backup that volume {} rests on, though it has its name",
            file.name(),
            on.name
        )));
    }
    if on.size < file.size() {
        return Err(Error::invalid(format!(
            "volume {} was made smaller while it rested on a backup: make it {} bytes large again",
            on.name,
            file.size()
        )));
    }
    let is_whole = second.as_ref().is_some_and(|second| !second.rebuilding);
    if !is_whole {
        let wanted = Wanted { volume, backup: held, name: held, resume: second.is_some() };
        let hint = "what has come is used when it goes on";
        let (_, uuid, filled) = fill(host, backups, wanted, pace, (hint, Some(&file.content)))?;
        host.check_same(held, &uuid)?;
        // It is frozen in the same moment in which others can open it.
        host.call(&Request::SnapshotCreate {
            volume: held.to_owned(),
            snapshot: WHOLE.to_owned(),
            labels: Labels::from([(LABEL_CONTENT.to_owned(), file.content.clone())]),
            system: true,
            rebuilding: Some(false),
        })?;
        drop(filled);
    }
    // Others can open it from then on, and days may pass.
    check_untouched(store, held, Some(&file.content))?;
    store.adopt(&on.name, held)?;
    Ok(Some(on.name))
}

/// Checks that the second volume shows what was brought: nobody has frozen anything above, and it is the `content` that
/// clients read.
fn check_untouched(store: &Store, held: &str, content: Option<&str>) -> Result<()> {
    for snapshot in store.snapshots(held, false)? {
        let problem = match (snapshot.name == WHOLE, snapshot.labels.get(LABEL_CONTENT), content) {
            (false, ..) => format!(
                "has other snapshots than `{WHOLE}`, which show what somebody has written to it"
            ),
            (true, Some(there), Some(content)) if there != content => {
                "has the content of another backup".to_owned()
            }
            (true, ..) => continue,
        };
        return Err(Error::invalid(format!(
            "volume {held} {problem}: delete that volume, and the backup is brought again"
        )));
    }
    Ok(())
}

/// Deletes a held backup on which no volume rests any more, if somebody else has not yet.
///
/// # Errors
/// `Busy` if somebody makes or restores a backup of the volume; those of the backup store.
pub fn let_go(url: &Url, backups: &BackupStore) -> Result<()> {
    let (volume, held) = url.need_backup()?;
    if !backups.backups(volume)?.iter().any(|backup| backup == held) {
        return Ok(());
    }
    backups.let_go(volume, held, &mut Work::new(&mut |_, _| true)).map(drop)
}
