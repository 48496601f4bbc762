//! What there is to say of volumes and backups, also of those whose facts cannot be read.

use crate::config::Map;
use crate::store::BackupStore;
use dbs_core::{ErrorKind, Result};
use serde::Serialize;

/// A volume in a backup store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VolumeInfo {
    /// What names it.
    pub url: String,
    /// Its name.
    pub volume: String,
    /// Bytes.
    pub size: u64,
    /// When its first backup was made.
    pub created: String,
    /// How many backups there are.
    pub backups: u64,
    /// The last complete one.
    pub last_backup: Option<String>,
    /// When that was asked for.
    pub last_backup_at: Option<String>,
    /// Blocks that it has.
    pub blocks: u64,
    /// How they are compressed.
    pub compression: String,
    /// Labels of the last backup.
    pub labels: Map,
    /// Why its facts cannot be read.
    pub problem: Option<String>,
}

/// A backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BackupInfo {
    /// What names it.
    pub url: String,
    /// Its volume.
    pub volume: String,
    /// Its name.
    pub backup: String,
    /// `complete`, `in_progress` or `damaged`.
    pub state: &'static str,
    /// The snapshot that it is of.
    pub snapshot: String,
    /// When it was asked for.
    pub asked_at: String,
    /// When it was complete.
    pub created: String,
    /// Bytes of its blocks.
    pub size: u64,
    /// Bytes of one.
    pub block_size: u64,
    /// It was made from the differences to an earlier one.
    pub incremental: bool,
    /// Bytes that were written for it.
    pub uploaded: u64,
    /// How blocks are compressed.
    pub compression: String,
    /// Labels.
    pub labels: Map,
    /// How it was made.
    pub parameters: Map,
    /// Why its facts cannot be read.
    pub problem: Option<String>,
}

impl BackupStore {
    /// The names of the backups of a volume that is there.
    ///
    /// # Errors
    /// `NotFound` if it is not; those of the store.
    pub fn known_backups(&self, volume: &str) -> Result<Vec<String>> {
        let names = self.backups(volume)?;
        if names.is_empty() {
            self.volume(volume)?;
        }
        Ok(names)
    }

    /// What there is to say of all volumes.
    ///
    /// # Errors
    /// Those of the store.
    pub fn volume_infos(&self) -> Result<Vec<VolumeInfo>> {
        self.volumes()?.iter().map(|volume| self.volume_info(volume)).collect()
    }

    /// What there is to say of a volume, also if its facts cannot be read.
    ///
    /// # Errors
    /// Those of the store.
    pub fn volume_info(&self, volume: &str) -> Result<VolumeInfo> {
        let backups = self.backups(volume)?.len() as u64;
        let (config, problem) = told(self.volume(volume))?;
        let some = |text: String| Some(text).filter(|text| !text.is_empty());
        Ok(VolumeInfo {
            url: self.url().with(volume, None).to_string(),
            volume: volume.to_owned(),
            size: config.size,
            compression: config.method().map_or("", |method| method.name()).to_owned(),
            created: config.created_time,
            backups,
            last_backup: some(config.last_backup_name),
            last_backup_at: some(config.last_backup_at),
            blocks: config.block_count,
            labels: config.labels.unwrap_or_default(),
            problem,
        })
    }

    /// What there is to say of the backups of a volume that is there, oldest first.
    ///
    /// # Errors
    /// `NotFound` if it is not; those of the store.
    pub fn backup_infos(&self, volume: &str) -> Result<Vec<BackupInfo>> {
        let names = self.known_backups(volume)?;
        let mut all: Vec<_> =
            names.iter().map(|name| self.backup_info(volume, name)).collect::<Result<_>>()?;
        all.sort_by(|a, b| (&a.asked_at, &a.backup).cmp(&(&b.asked_at, &b.backup)));
        Ok(all)
    }

    /// What there is to say of a backup, also if its facts cannot be read.
    ///
    /// # Errors
    /// Those of the store.
    pub fn backup_info(&self, volume: &str, backup: &str) -> Result<BackupInfo> {
        let (config, problem) = told(self.backup(volume, backup))?;
        let state = match (&problem, config.is_in_progress()) {
            (Some(_), _) => "damaged",
            (None, true) => "in_progress",
            (None, false) => "complete",
        };
        Ok(BackupInfo {
            url: self.url().with(volume, Some(backup)).to_string(),
            volume: volume.to_owned(),
            backup: backup.to_owned(),
            state,
            block_size: config.block_size().unwrap_or(0),
            compression: config.method().map_or("", |method| method.name()).to_owned(),
            snapshot: config.snapshot_name,
            asked_at: config.snapshot_created_at,
            created: config.created_time,
            size: config.size,
            incremental: config.is_incremental,
            uploaded: config.newly_uploaded_data_size.saturating_add(config.re_uploaded_data_size),
            labels: config.labels.unwrap_or_default(),
            parameters: config.parameters.unwrap_or_default(),
            problem,
        })
    }
}

/// Facts, or none and what is wrong with them.
fn told<T: Default>(facts: Result<T>) -> Result<(T, Option<String>)> {
    match facts {
        Ok(facts) => Ok((facts, None)),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Unsupported
            ) =>
        {
            Ok((T::default(), Some(error.to_string())))
        }
        Err(error) => Err(error),
    }
}
