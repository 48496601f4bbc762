//! Deleting backups, and the blocks that nothing refers to any more.
//!
//! In this order: `volume.cfg` names another backup as the last one; the backup's facts go, durably; blocks go to which
//! no facts refer; `volume.cfg` counts what is left. So no facts ever refer to a block that was deleted, whenever it is cut
//! off. What stays then goes with the next deletion.
//!
//! Nobody begins a backup while the deletion's lock is good, and whoever begins one later lists the blocks later. So each
//! removal must have ended when the lock goes out of date: [`Lock::check_fresh`] is asked before each try of each removal,
//! also of facts, under whose name somebody may have created a backup by then. What no check in this process can stop is
//! a `hard` mount of a network file system that carries a removal out when the server is back.
//!
//! Upstream takes a lock that is good for one out of date if its clock is ahead. What it has begun is in the list of
//! backups before it lists blocks. So that list is looked at again, right before blocks go and as often as a lock is written.

use crate::config::BackupConfig;
use crate::lock::{Kind, Lock};
use crate::names::{self, BlockName, TEMPORARY};
use crate::pool::{self, Work};
use crate::store::BackupStore;
use dbs_core::{Error, ErrorKind, Result};
use serde::Serialize;
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// What a deletion has deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// There were such backups. If there were none, what is deleted is the rest of earlier ones.
    pub found: bool,
    /// Blocks that were deleted.
    pub blocks: u64,
    /// Blocks that are left.
    pub blocks_left: u64,
    /// Why blocks that nothing refers to were not looked for.
    pub kept: Option<String>,
}

/// What the facts of all other backups say.
struct Others {
    names: Vec<String>,
    referenced: HashSet<BlockName>,
    /// The newest of them and when it was asked for.
    last: Option<(jiff::Timestamp, String, String)>,
    /// Why no block may be deleted.
    kept: Option<String>,
}

impl BackupStore {
    /// Deletes a backup, complete or not, and the blocks to which no other backup refers.
    ///
    /// # Errors
    /// `Busy` if somebody creates or restores a backup of the volume, or if the backup is held; `NotFound` if there is no
    /// such volume; `Interrupted`, after which the next deletion deletes the rest.
    pub fn remove(&self, volume: &str, backup: &str, work: &mut Work<'_>) -> Result<Removed> {
        self.begin();
        self.refuse_held(volume, &[backup])?;
        self.remove_some(volume, &[backup], work)
    }

    /// Deletes backups of a volume together: blocks are looked for once.
    ///
    /// # Errors
    /// As [`BackupStore::remove`]. Some of the backups may be deleted then.
    pub fn remove_some(
        &self,
        volume: &str,
        backups: &[&str],
        work: &mut Work<'_>,
    ) -> Result<Removed> {
        self.begin();
        self.check_name("volume", volume)?;
        backups.iter().try_for_each(|backup| self.check_name("backup", backup))?;
        if let Some(repository) = &self.repository {
            let found = repository.remove(volume, backups)?;
            return Ok(Removed { found, ..Removed::default() });
        }
        let lock = self.lock(volume, Kind::Deletion)?;
        self.remove_locked(volume, backups, &lock, work)
    }

    /// Deletes backups while nobody creates any.
    pub(crate) fn remove_locked(
        &self,
        volume: &str,
        backups: &[&str],
        lock: &Lock,
        work: &mut Work<'_>,
    ) -> Result<Removed> {
        let facts = || backups.iter().map(|backup| names::backup_file(backup)).collect();
        let mut config = match self.volume(volume) {
            Ok(config) => config,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                // Nobody can restore them.
                self.remove_facts(&names::backups(volume), facts(), lock, work)?;
                return Err(error.context("cannot find volume in backupstore"));
            }
            Err(error) => return Err(error),
        };
        let mut found = true;
        for backup in backups {
            found &= self.objects.stat(&names::backup_config(volume, backup))?.is_some();
        }
        let others = self.others(volume, backups)?;
        if backups.contains(&config.last_backup_name.as_str()) {
            let last = others.last.clone().filter(|_| others.kept.is_none());
            (config.last_backup_at, config.last_backup_name) =
                last.map(|(_, at, name)| (at, name)).unwrap_or_default();
            self.save_volume(&config)?;
        }
        self.remove_facts(&names::backups(volume), facts(), lock, work)?;
        let mut removed = self.collect_blocks(volume, &others, lock, work)?;
        removed.found = found;
        if removed.kept.is_none() {
            config.block_count = removed.blocks_left;
            self.save_volume(&config)?;
        }
        Ok(removed)
    }

    /// Deletes a volume with all its backups. One that is not there is no error.
    ///
    /// # Errors
    /// `Busy` if somebody creates or restores a backup of it, or if one of them is held; `Interrupted`, after which the
    /// next deletion deletes the rest.
    pub fn remove_volume(&self, volume: &str, work: &mut Work<'_>) -> Result<()> {
        self.begin();
        self.check_name("volume", volume)?;
        let backups = self.backups(volume)?;
        self.refuse_held(volume, &backups.iter().map(String::as_str).collect::<Vec<_>>())?;
        if let Some(repository) = &self.repository {
            return repository.remove_volume(volume);
        }
        let folder = names::volume(volume);
        if self.objects.list(&folder)?.is_empty() {
            return Ok(());
        }
        let lock = self.lock(volume, Kind::Deletion)?;
        let before = self.backups(volume)?;
        // It may have been held before the lock was there.
        self.refuse_held(volume, &before.iter().map(String::as_str).collect::<Vec<_>>())?;
        let is_new = || self.has_new(volume, &before);
        // Facts before blocks, durably, and then the rest.
        for part in [names::backups(volume), names::blocks(volume), folder.clone()] {
            let mut all = Vec::new();
            self.walk(&part, work, &mut |path, _| {
                if format!("{part}/{path}") != lock.path() {
                    all.push(path.to_owned());
                }
            })?;
            if is_new()? {
                return Err(begun());
            }
            self.sweep(&part, all, &lock, work, &is_new)?;
            self.objects.settle()?;
        }
        // Whoever begins a backup from here on finds nothing that is still to go.
        self.objects.remove(lock.path())?;
        self.objects.remove_empty(&folder)
    }

    /// Removes facts, durably: a power loss must not bring them back without their blocks.
    pub(crate) fn remove_facts(
        &self,
        folder: &str,
        files: Vec<String>,
        lock: &Lock,
        work: &mut Work<'_>,
    ) -> Result<()> {
        self.sweep(folder, files, lock, work, &|| Ok(false))?;
        self.objects.settle()
    }

    fn others(&self, volume: &str, without: &[&str]) -> Result<Others> {
        let mut names = self.backups(volume)?;
        names.retain(|name| !without.contains(&name.as_str()));
        let mut others = Others { names, referenced: HashSet::new(), last: None, kept: None };
        for name in others.names.clone() {
            match self.backup(volume, &name) {
                Ok(backup) if backup.is_in_progress() => {
                    others.kept = Some(format!(
                        "backup {name} is in progress, or was cut off: delete it if nobody creates it"
                    ));
                }
                Ok(backup) => others.add(&name, &backup),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    others.kept = Some(format!("{error}. Delete backup {name}"));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(others)
    }

    /// Deletes blocks that nothing refers to, and files whose writers were killed.
    fn collect_blocks(
        &self,
        volume: &str,
        others: &Others,
        lock: &Lock,
        work: &mut Work<'_>,
    ) -> Result<Removed> {
        let mut removed = Removed { kept: others.kept.clone(), ..Removed::default() };
        if removed.kept.is_some() {
            return Ok(removed);
        }
        let folder = names::blocks(volume);
        let mut garbage = Vec::new();
        self.walk(&folder, work, &mut |path, _| match names::block_of(path) {
            Some(name) if others.referenced.contains(&name) => removed.blocks_left += 1,
            Some(_) => garbage.push(path.to_owned()),
            None if path.contains(TEMPORARY) => garbage.push(path.to_owned()),
            None => {}
        })?;
        let mut left = self.objects.list(&names::backups(volume))?;
        left.retain(|file| file.contains(TEMPORARY));
        self.sweep(&names::backups(volume), left, lock, work, &|| Ok(false))?;
        let is_new = || self.has_new(volume, &others.names);
        // Whoever took the lock for one out of date has begun a backup by now.
        if is_new()? {
            removed.kept = Some("a new backup was begun meanwhile".to_owned());
            return Ok(removed);
        }
        removed.blocks =
            garbage.iter().filter(|path| names::block_of(path).is_some()).count() as u64;
        self.sweep(&folder, garbage, lock, work, &is_new)?;
        Ok(removed)
    }

    /// Whether there is a backup besides these, which are sorted.
    fn has_new(&self, volume: &str, known: &[String]) -> Result<bool> {
        Ok(self.backups(volume)?.iter().any(|name| known.binary_search(name).is_err()))
    }

    /// Removes objects in a folder for as long as the lock is good, and there is no new backup.
    ///
    /// # Errors
    /// `Busy`; `Interrupted`; those of the store.
    pub(crate) fn sweep(
        &self,
        folder: &str,
        paths: Vec<String>,
        lock: &Lock,
        work: &mut Work<'_>,
        is_new: IsNew<'_>,
    ) -> Result<()> {
        let (total, mut done) = (paths.len() as u64, 0);
        let looked = Mutex::new(Instant::now());
        let is_due = || {
            let mut looked = looked.lock().unwrap_or_else(PoisonError::into_inner);
            let is_due = looked.elapsed() >= self.times.refresh;
            if is_due {
                *looked = Instant::now();
            }
            is_due
        };
        pool::each(
            work.workers,
            &self.stop,
            paths.into_iter(),
            |path| {
                if is_due() && is_new()? {
                    return Err(begun());
                }
                self.objects.remove_if(&format!("{folder}/{path}"), &|| lock.check_fresh())
            },
            |removed| {
                done += u64::from(removed.is_some());
                if (work.progress)(done, total) { Ok(()) } else { Err(pool::interrupted()) }
            },
        )
    }
}

/// Whether somebody has begun a backup since the lock was taken.
pub(crate) type IsNew<'a> = &'a (dyn Fn() -> Result<bool> + Sync);

fn begun() -> Error {
    Error::busy(
        "somebody has begun a backup during this deletion, and took its lock for one out of date: look at the clocks. No \
         further blocks are deleted; delete again when that backup has ended",
    )
}

impl Others {
    fn add(&mut self, name: &str, backup: &BackupConfig) {
        self.referenced.extend(backup.blocks.iter().map(|block| block.name));
        if backup.held_for().is_some() {
            return;
        }
        let asked_at = &backup.snapshot_created_at;
        // A time that cannot be read is not the newest.
        let Ok(time) = asked_at.parse::<jiff::Timestamp>() else { return };
        if self.last.as_ref().is_none_or(|(last, _, _)| time > *last) {
            self.last = Some((time, asked_at.clone(), name.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::hooked::Hooked;
    use crate::objects::{Directory, Objects};
    use crate::store::Present;
    use crate::url::Url;
    use crate::{CreateOptions, Created, Source};
    use std::ops::Range;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::SystemTime;

    const BLOCK: u64 = 8192;
    const VOLUME: &str = "vol-1";

    /// Makes a lock an old one.
    type Aging = Box<dyn Fn() + Send>;

    /// Blocks of these bytes.
    struct Bytes(Vec<u8>);

    impl Source for Bytes {
        fn size(&self) -> u64 {
            self.0.len() as u64 * BLOCK
        }

        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            buf.fill(self.0[(offset / BLOCK) as usize]);
            Ok(())
        }

        fn ranges(
            &self,
            base: Option<&BackupConfig>,
            found: &mut dyn FnMut(Range<u64>) -> Result<()>,
        ) -> Result<bool> {
            found(0..self.size())?;
            Ok(base.is_none())
        }
    }

    fn create(store: &BackupStore, backup: &str, bytes: &[u8]) -> Result<Created> {
        let options = CreateOptions {
            volume: VOLUME.to_owned(),
            snapshot: backup.to_owned(),
            backup: Some(backup.to_owned()),
            block_size: Some(BLOCK),
            ..CreateOptions::default()
        };
        let source = Bytes(bytes.to_vec());
        store.create(&source, options)?.run(&mut Work::new(&mut |_, _| true))
    }

    fn store(objects: Arc<dyn Objects>) -> BackupStore {
        BackupStore::on(&Url::parse("vfs:///x").unwrap(), objects).without_waiting()
    }

    /// A directory, and a deletion of whose removals of blocks the first one calls `meanwhile`, and is made once more.
    fn deletion(
        root: &Path,
        meanwhile: impl Fn() + Send + Sync + 'static,
    ) -> (BackupStore, BackupStore) {
        let inner: Arc<dyn Objects> = Arc::new(Directory::open(root).unwrap());
        let first = AtomicBool::new(true);
        let remove = move |path: &str| {
            let is_first = path.ends_with(".blk") && first.swap(false, Ordering::SeqCst);
            if is_first {
                meanwhile();
            }
            is_first
        };
        let hooked = Hooked { remove: Box::new(remove), ..Hooked::on(Arc::clone(&inner)) };
        (store(inner), store(Arc::new(hooked)))
    }

    fn bad(store: &BackupStore, backup: &str) -> usize {
        store.verify(VOLUME, backup, true, &mut Work::new(&mut |_, _| true)).unwrap().bad.len()
    }

    /// Found by review: a removal whose way to the server broke was tried again when somebody had taken the lock for one
    /// out of date and relied on the block.
    #[test]
    fn a_removal_is_not_tried_again_when_its_lock_is_out_of_date() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().to_owned();
        let aging: Arc<Mutex<Option<Aging>>> = Arc::default();
        let age = Arc::clone(&aging);
        let (other, deleting) = deletion(root.path(), move || {
            age.lock().unwrap().take().unwrap()();
            let locks = path.join(names::locks(VOLUME));
            for lock in std::fs::read_dir(locks).unwrap() {
                let file = std::fs::File::options().write(true).open(lock.unwrap().path()).unwrap();
                file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
            }
            let other = store(Arc::new(Directory::open(&path).unwrap()));
            create(&other, "backup-2", &[1, 2, 3]).unwrap();
        });
        create(&other, "backup-1", &[1, 2, 3]).unwrap();
        let lock = deleting.lock(VOLUME, Kind::Deletion).unwrap();
        *aging.lock().unwrap() = Some(Box::new(lock.aging()));
        let mut progress = |_, _| true;
        let mut work = Work { workers: 1, ..Work::new(&mut progress) };
        let error = deleting.remove_locked(VOLUME, &["backup-1"], &lock, &mut work).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert_eq!(bad(&other, "backup-2"), 0);
    }

    /// Found by review: what had begun when the lock was gone was removed with what was left of the volume.
    #[test]
    fn a_backup_that_begins_when_the_lock_is_gone_stays() {
        let root = tempfile::tempdir().unwrap();
        let inner: Arc<dyn Objects> = Arc::new(Directory::open(root.path()).unwrap());
        let other = store(Arc::clone(&inner));
        create(&other, "backup-1", &[1, 2, 3]).unwrap();
        // As upstream can leave it.
        std::fs::create_dir(root.path().join(names::blocks(VOLUME)).join("empty")).unwrap();
        let beside = store(Arc::clone(&inner));
        let remove = move |path: &str| {
            if path == names::volume(VOLUME) {
                create(&beside, "backup-2", &[1, 2, 3]).unwrap();
            }
            false
        };
        let hooked = Hooked { remove: Box::new(remove), ..Hooked::on(inner) };
        store(Arc::new(hooked)).remove_volume(VOLUME, &mut Work::new(&mut |_, _| true)).unwrap();
        assert_eq!((bad(&other, "backup-2"), other.backups(VOLUME).unwrap().len()), (0, 1));
        other.remove_volume(VOLUME, &mut Work::new(&mut |_, _| true)).unwrap();
        assert_eq!(other.volumes().unwrap(), [""; 0]);
    }

    /// Found by review: upstream, whose clock is ahead, begins a backup although the lock is good.
    #[test]
    fn a_backup_that_somebody_begins_ends_the_deletion() {
        for whole in [false, true] {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join(names::backup_config(VOLUME, "backup-2"));
            let (other, mut deleting) = deletion(root.path(), move || {
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(&path, "{}").unwrap();
            });
            create(&other, "backup-1", &[1, 2, 3]).unwrap();
            deleting.times.refresh = std::time::Duration::from_nanos(2);
            let mut progress = |_, _| true;
            let mut work = Work { workers: 1, ..Work::new(&mut progress) };
            let error = match whole {
                false => deleting.remove(VOLUME, "backup-1", &mut work).map(drop).unwrap_err(),
                true => deleting.remove_volume(VOLUME, &mut work).unwrap_err(),
            };
            assert!(error.to_string().contains("look at the clocks"), "{error}");
            let left = other.blocks(VOLUME, &mut Work::new(&mut |_, _| true)).unwrap();
            let Present::Names(left) = left else { panic!("it is no repository") };
            assert_eq!(left.len(), 2, "the one that was on its way is gone");
        }
    }
}
