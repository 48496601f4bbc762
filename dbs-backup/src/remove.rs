//! Deleting backups, and the blocks that nothing refers to any more.
//!
//! In this order: `volume.cfg` names another backup as the last one; the backup's facts go, durably; blocks go to which
//! no facts refer; `volume.cfg` counts what is left. So no facts ever refer to a block that was deleted, whenever it is cut
//! off. What stays then goes with the next deletion.

use crate::config::BackupConfig;
use crate::lock::{Kind, Lock};
use crate::names::{self, BlockName, TEMPORARY};
use crate::objects::Objects;
use crate::pool::{self, Work};
use crate::store::BackupStore;
use dbs_core::{ErrorKind, Result};
use serde::Serialize;
use std::collections::HashSet;

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
    /// `Busy` if somebody creates or restores a backup of the volume; `NotFound` if there is no such volume;
    /// `Interrupted`, after which the next deletion deletes the rest.
    pub fn remove(&self, volume: &str, backup: &str, work: &mut Work<'_>) -> Result<Removed> {
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
        names::check("volume", volume)?;
        backups.iter().try_for_each(|backup| names::check("backup", backup))?;
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
        let paths: Vec<_> =
            backups.iter().map(|backup| names::backup_config(volume, backup)).collect();
        let mut config = match self.volume(volume) {
            Ok(config) => config,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                // Nobody can restore them.
                paths.iter().try_for_each(|path| self.objects.remove(path))?;
                return Err(error.context("cannot find volume in backupstore"));
            }
            Err(error) => return Err(error),
        };
        let mut found = true;
        for path in &paths {
            found &= self.objects.stat(path)?.is_some();
        }
        let others = self.others(volume, backups)?;
        if backups.contains(&config.last_backup_name.as_str()) {
            let last = others.last.clone().filter(|_| others.kept.is_none());
            (config.last_backup_at, config.last_backup_name) =
                last.map(|(_, at, name)| (at, name)).unwrap_or_default();
            self.save_volume(&config)?;
        }
        self.remove_facts(|objects| {
            paths.iter().try_for_each(|path| {
                lock.check()?;
                objects.remove(path)
            })
        })?;
        let mut removed = self.collect(volume, &others, lock, work)?;
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
    /// `Busy` if somebody creates or restores a backup of it; `Interrupted`, after which the next deletion deletes the
    /// rest.
    pub fn remove_volume(&self, volume: &str, work: &mut Work<'_>) -> Result<()> {
        self.begin();
        names::check("volume", volume)?;
        let folder = names::volume(volume);
        if self.objects.list(&folder)?.is_empty() {
            return Ok(());
        }
        let lock = self.lock(volume, Kind::Deletion)?;
        // Facts before blocks, durably, and the lock last.
        for folder in [names::backups(volume), names::blocks(volume)] {
            let mut all = Vec::new();
            self.walk(&folder, work, &mut |path, _| all.push(path.to_owned()))?;
            self.sweep(&folder, all, &lock, work)?;
            self.objects.settle()?;
        }
        lock.check()?;
        self.objects.remove(&names::volume_config(volume))?;
        self.objects.remove_all(&names::locks(volume))?;
        self.objects.remove_all(&folder)
    }

    /// Removes facts, durably: a power loss must not bring them back without their blocks.
    pub(crate) fn remove_facts(
        &self,
        remove: impl FnOnce(&dyn Objects) -> Result<()>,
    ) -> Result<()> {
        remove(&*self.objects)?;
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
    fn collect(
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
        for file in self.objects.list(&names::backups(volume))? {
            if file.contains(TEMPORARY) {
                self.objects.remove(&format!("{}/{file}", names::backups(volume)))?;
            }
        }
        // Whoever took the lock for one out of date has begun a backup by now.
        if self.backups(volume)? != others.names {
            removed.kept = Some("a new backup was begun meanwhile".to_owned());
            return Ok(removed);
        }
        removed.blocks =
            garbage.iter().filter(|path| names::block_of(path).is_some()).count() as u64;
        self.sweep(&folder, garbage, lock, work)?;
        Ok(removed)
    }

    /// Removes objects in a folder for as long as the lock is good.
    pub(crate) fn sweep(
        &self,
        folder: &str,
        paths: Vec<String>,
        lock: &Lock,
        work: &mut Work<'_>,
    ) -> Result<()> {
        let (total, mut done) = (paths.len() as u64, 0);
        pool::each(
            work.workers,
            &self.stop,
            paths.into_iter(),
            |path| {
                lock.check()?;
                self.objects.remove(&format!("{folder}/{path}"))
            },
            |removed| {
                done += u64::from(removed.is_some());
                if (work.progress)(done, total) { Ok(()) } else { Err(pool::interrupted()) }
            },
        )
    }
}

impl Others {
    fn add(&mut self, name: &str, backup: &BackupConfig) {
        self.referenced.extend(backup.blocks.iter().map(|block| block.name));
        let asked_at = &backup.snapshot_created_at;
        // A time that cannot be read is not the newest.
        let Ok(time) = asked_at.parse::<jiff::Timestamp>() else { return };
        if self.last.as_ref().is_none_or(|(last, _, _)| time > *last) {
            self.last = Some((time, asked_at.clone(), name.to_owned()));
        }
    }
}
