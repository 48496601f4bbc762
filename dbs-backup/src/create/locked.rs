//! A backup in Longhorn's layout, from its facts in progress to `volume.cfg`: steps 3 to 9 of what is argued in
//! `create.rs`.

use super::{Created, Creation, Kept};
use crate::blocks::Source;
use crate::config::{self, BackupConfig};
use crate::names;
use crate::pool::Work;
use dbs_core::{ErrorKind, Result};
use std::sync::atomic::Ordering;

impl<S: Source> Creation<'_, S> {
    /// Creates it.
    pub(super) fn run_locked(&mut self, work: &mut Work<'_>) -> Result<Created> {
        let volume = self.options.volume.clone();
        let path = names::backup_config(&volume, &self.name);
        let begun = BackupConfig::in_progress(&self.name, &volume, self.method);
        // Locks of backups share: another may have completed one of this name.
        self.store.refuse_complete(&volume, &self.name)?;
        let mut facts = None;
        let made = self.store.objects.put(&path, &config::encode(&begun)?).and_then(|()| {
            // Whoever deletes from now on finds these facts. Who had begun before is found by the lock.
            self.check_others()?;
            let (backup, created, new_blocks) = self.make(work)?;
            self.source.check()?;
            self.complete(&path, facts.insert(backup))?;
            Ok((created, new_blocks))
        });
        let (created, new_blocks) = match made {
            Ok(made) => made,
            Err(error) => {
                self.undo(&path, facts.as_ref());
                return Err(error);
            }
        };
        let backup = facts.unwrap_or(begun);
        self.finish(&backup, new_blocks).map_err(|error| {
            error.context(format!(
                "backup {} is complete, but volume.cfg does not say so",
                self.name
            ))
        })?;
        Ok(created)
    }

    fn check_lock(&self) -> Result<()> {
        if let Kept::Lock(lock) = &self.kept { lock.check() } else { Ok(()) }
    }

    fn check_others(&self) -> Result<()> {
        match &self.kept {
            Kept::Lock(lock) => lock.check_others(&self.options.volume),
            Kept::Repository(..) => Ok(()),
        }
    }

    /// Writes the facts of a backup whose blocks are there.
    fn complete(&self, path: &str, backup: &BackupConfig) -> Result<()> {
        let facts = config::encode(backup)?;
        self.store.objects.settle()?;
        self.store.refuse_complete(&self.options.volume, &self.name)?;
        self.check_lock()?;
        self.store.objects.put(path, &facts)?;
        // The writing may have taken longer than the lock is good for; and whoever deletes the volume has removed all locks
        // before the last of its blocks.
        self.check_lock()?;
        self.check_others()
    }

    /// Removes what a backup that failed has begun: it would stop the collection of blocks. What somebody else has
    /// completed under the name stays; so does what is complete here, unless its blocks may have been deleted.
    fn undo(&self, path: &str, facts: Option<&BackupConfig>) {
        // What stopped the backup does not stop this. The lock, which goes out of date, is not worth such patience.
        let stopped = self.store.stop.swap(false, Ordering::SeqCst);
        if let Ok(there) = self.store.backup(&self.options.volume, &self.name) {
            let others = || self.check_others().is_err_and(|error| error.kind() == ErrorKind::Busy);
            let is_unsafe = facts == Some(&there) && (self.check_lock().is_err() || others());
            if there.is_in_progress() || is_unsafe {
                let objects = &self.store.objects;
                // If that fails, it can be deleted as any backup.
                let _ = objects.remove(path).and_then(|()| objects.settle());
            }
        }
        self.store.stop.store(stopped, Ordering::SeqCst);
    }

    /// Makes it the volume's last backup.
    fn finish(&self, backup: &BackupConfig, new_blocks: u64) -> Result<()> {
        let options = &self.options;
        let mut volume = self.store.volume(&options.volume)?;
        volume.last_backup_name.clone_from(&backup.name);
        volume.last_backup_at.clone_from(&backup.snapshot_created_at);
        volume.block_count = volume.block_count.saturating_add(new_blocks);
        volume.size = self.source.size().next_multiple_of(self.block_size);
        volume.labels = Some(options.labels.clone());
        volume.backing_image_name.clone_from(&options.backing_image_name);
        volume.backing_image_checksum.clone_from(&options.backing_image_checksum);
        self.method.name().clone_into(&mut volume.compression_method);
        volume.storage_class_name.clone_from(&options.storage_class_name);
        if volume.data_engine.is_empty() {
            "v1".clone_into(&mut volume.data_engine);
        }
        self.store.save_volume(&volume)
    }
}
