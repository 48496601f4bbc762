//! Held backups: a volume that was restored in part rests on one, and nothing but that volume lets it go.
//!
//! A held backup is a backup like any other under a name of its own, with the blocks of the one that is restored. So
//! whatever becomes of that one, by whichever program, deletions and collections keep the blocks: Longhorn's do, too. No
//! rule of a retention counts it or deletes it, no later backup builds on it, and [`BackupStore::remove`] refuses it.

use crate::config::{self, BackupConfig, CREATED, LABEL_SIZE, Map};
use crate::names;
use crate::pool::Work;
use crate::remove::Removed;
use crate::store::BackupStore;
use dbs_core::{Error, ErrorKind, Result};

/// The label of a held backup: who rests on it.
pub const LABEL_HELD: &str = "dbs-held-for";
/// How the names of held backups begin.
const HELD: &str = "held";

impl BackupConfig {
    /// Who rests on it, if it is held.
    #[must_use]
    pub fn held_for(&self) -> Option<&str> {
        self.labels.as_ref()?.get(LABEL_HELD).map(String::as_str)
    }

    /// A SHA-256 of which blocks it has and where: two backups with the same one, in one backup store, have the same
    /// content.
    #[must_use]
    pub fn content(&self) -> String {
        let mut hasher = ring::digest::Context::new(&ring::digest::SHA256);
        for block in &self.blocks {
            hasher.update(&block.offset.to_le_bytes());
            hasher.update(&block.name.bytes());
        }
        names::hex(hasher.finish().as_ref())
    }
}

impl BackupStore {
    /// Makes a held backup of a complete one; returns its name.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if somebody deletes backups of the volume, or if the backup is in progress; `Corrupt`;
    /// `Unsupported` if the blocks are not all of its content; those of the store.
    pub fn hold(&self, volume: &str, backup: &str, held_for: &str) -> Result<String> {
        self.begin();
        self.check_name("volume", volume)?;
        let name = names::random(HELD)?;
        // First: what is read from now on is not deleted.
        let lock = self.lock_work(volume)?;
        let facts = self.volume_to_restore(volume, Some(backup))?;
        let mut config = self.complete_backup(volume, backup)?;
        let mut labels = Map::from([
            (LABEL_HELD.to_owned(), held_for.to_owned()),
            // The size in `volume.cfg` is that of the last backup, and changes.
            (LABEL_SIZE.to_owned(), config.volume_size(&facts)?.to_string()),
        ]);
        labels.extend(config.told_created().map(|told| (CREATED.to_owned(), told.to_owned())));
        if let Some(repository) = &self.repository {
            repository.hold(volume, backup, &name, labels)?;
            return Ok(name);
        }
        config.name.clone_from(&name);
        config.labels = Some(labels);
        let path = names::backup_config(volume, &name);
        let put = self.objects.put(&path, &config::encode(&config)?);
        let kept = put.and_then(|()| {
            self.objects.settle()?;
            // Until it was there, the lock has kept its blocks.
            lock.iter().try_for_each(|lock| lock.check_others(volume).and_then(|()| lock.check()))
        });
        match kept {
            Ok(()) => Ok(name),
            Err(error) => {
                // Without its blocks it is worth nothing; with them, what stays keeps some space.
                let _ = self.objects.remove(&path);
                Err(error)
            }
        }
    }

    /// Deletes a held backup, on which nothing rests any more, and the blocks to which no other backup refers.
    ///
    /// # Errors
    /// `Invalid` if it is none; as [`BackupStore::remove`].
    pub fn let_go(&self, volume: &str, held: &str, work: &mut Work<'_>) -> Result<Removed> {
        self.check_name("volume", volume)?;
        if !self.is_held(volume, held)? {
            return Err(Error::invalid(format!("backup {held} of volume {volume} is not held")));
        }
        self.remove_some(volume, &[held], work)
    }

    /// Who rests on a backup, if it is there and held.
    ///
    /// # Errors
    /// As [`BackupStore::restore`].
    pub fn held_for(&self, volume: &str, backup: &str) -> Result<Option<String>> {
        if !backup.starts_with(HELD) {
            return Ok(None);
        }
        match self.facts(volume, backup) {
            Ok(config) => Ok(config.held_for().map(str::to_owned)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Refuses what is held, of these backups.
    ///
    /// # Errors
    /// `Busy`; those of the store.
    pub(crate) fn refuse_held(&self, volume: &str, backups: &[&str]) -> Result<()> {
        for backup in backups {
            if self.is_held(volume, backup)? {
                return Err(Error::busy(format!(
                    "backup {backup} of volume {volume} is held: a volume that was restored with --lazy reads its blocks from \
                     it. It goes when that volume is complete; if that volume is gone, delete it with --held"
                )));
            }
        }
        Ok(())
    }

    /// Whether a backup is held; also one that cannot be read, and has such a name.
    fn is_held(&self, volume: &str, backup: &str) -> Result<bool> {
        if !backup.starts_with(HELD) {
            return Ok(false);
        }
        match self.facts(volume, backup) {
            Ok(config) => Ok(config.held_for().is_some()),
            Err(error) => match error.kind() {
                ErrorKind::NotFound => Ok(false),
                ErrorKind::Corrupt | ErrorKind::Unsupported => Ok(true),
                _ => Err(error),
            },
        }
    }
}
