//! What backups there are, for those who look often: what is known of a complete backup stays known.

use crate::config::{BackupConfig, Map, VolumeConfig};
use crate::names;
use crate::pool;
use crate::store::BackupStore;
use dbs_core::{Error, ErrorKind, Result};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Facts of backups that are read at once.
const AT_ONCE: usize = 8;
/// After this time it is asked whether a backup is still there.
const FRESH: Duration = Duration::from_secs(10);

/// A complete backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Volume.
    pub volume: String,
    /// Backup.
    pub backup: String,
    /// Snapshot.
    pub snapshot: String,
    /// When it was asked for, and when it was complete, as the backup store has it.
    pub asked_at: String,
    /// The second of the two.
    pub created: String,
    /// When the snapshot was created, as far as that is known.
    pub time: Timestamp,
    /// Bytes of the volume.
    pub size: u64,
    /// Bytes of blocks.
    pub data: u64,
    /// Made from the differences to an earlier one.
    pub incremental: bool,
    /// Labels.
    pub labels: Map,
}

/// The backups of a store. One thread at a time asks the store.
pub struct Catalog {
    store: Mutex<BackupStore>,
    known: Mutex<Known>,
}

/// Backups by volume and name.
type Known = HashMap<String, HashMap<String, Seen>>;

/// A backup that was there at some time.
#[derive(Debug, Clone)]
struct Seen {
    listed: Arc<Listed>,
    at: Instant,
}

impl Seen {
    fn now(listed: Arc<Listed>) -> Self {
        Self { listed, at: Instant::now() }
    }
}

/// Backups of a volume.
#[derive(Debug, Default)]
pub struct Backups {
    /// Those that are complete, oldest first.
    pub complete: Vec<Arc<Listed>>,
    /// What keeps others from being read.
    pub problems: Vec<Error>,
}

impl Listed {
    fn new(volume: &VolumeConfig, name: &str, backup: &BackupConfig) -> Result<Self> {
        Ok(Self {
            volume: volume.name.clone(),
            backup: name.to_owned(),
            snapshot: backup.snapshot_name.clone(),
            asked_at: backup.snapshot_created_at.clone(),
            created: backup.created_time.clone(),
            time: backup.snapshot_time().unwrap_or(Timestamp::UNIX_EPOCH),
            size: backup.volume_size(volume)?,
            data: backup.size,
            incremental: backup.is_incremental,
            labels: backup.labels.clone().unwrap_or_default(),
        })
    }

    /// Its time and its name: `2026-11-24T03-00-00Z_BACKUP`. The order of such texts is that of the times.
    #[must_use]
    pub fn stem(&self) -> String {
        let time = TimeZone::UTC.to_datetime(self.time).strftime("%Y-%m-%dT%H-%M-%SZ");
        format!("{time}_{}", self.backup)
    }

    /// The backup that such a text names.
    #[must_use]
    pub fn backup_of(stem: &str) -> Option<&str> {
        stem.split_once('_').map(|(_, backup)| backup).filter(|backup| names::is_name(backup))
    }

    /// The same of the system's time.
    #[must_use]
    pub fn system_time(&self) -> SystemTime {
        self.time.into()
    }

    fn key(&self) -> [&str; 4] {
        [&self.volume, &self.backup, &self.asked_at, &self.created]
    }

    /// Whether both are the same backup.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.key() == other.key()
    }

    /// Whether a backup is this one, and no other of its name.
    #[must_use]
    pub fn is(&self, backup: &BackupConfig) -> bool {
        self.created == backup.created_time && self.asked_at == backup.snapshot_created_at
    }
}

impl Catalog {
    /// Of a store that is to be used for nothing else.
    #[must_use]
    pub fn new(store: BackupStore) -> Self {
        Self { store: Mutex::new(store), known: Mutex::default() }
    }

    /// As [`BackupStore::volumes`].
    ///
    /// # Errors
    /// Those of the store.
    pub fn volumes(&self) -> Result<Vec<String>> {
        self.with(BackupStore::volumes)
    }

    /// Whether there is a volume of this name, or a backup of one.
    ///
    /// # Errors
    /// Those of the store.
    pub fn has_volume(&self, volume: &str) -> Result<bool> {
        if !names::is_name(volume) {
            return Ok(false);
        }
        self.with(|store| match store.volume(volume) {
            Err(_) if store.check_name("volume", volume).is_err() => Ok(false),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Ok(!store.backups(volume)?.is_empty())
            }
            Err(error) if error.kind() != ErrorKind::Corrupt => Err(error),
            _ => Ok(true),
        })
    }

    /// The backups of a volume: the facts of new ones are read, several at once.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume; `Corrupt` if its facts are damaged; `Unsupported` if it is based on an image;
    /// those of the store.
    pub fn backups(&self, volume: &str) -> Result<Backups> {
        self.with(|store| {
            let facts = facts(store, volume)?;
            let names = store.backups(volume)?;
            let mut known = self.known().get(volume).cloned().unwrap_or_default();
            known.retain(|name, _| names.binary_search(name).is_ok());
            known.values_mut().for_each(|seen| seen.at = Instant::now());
            let news = names.iter().filter(|name| !known.contains_key(*name));
            let news: Vec<&String> = news.collect();
            let mut problems = Vec::new();
            let load = |name: &String| match load(store, &facts, name) {
                // Not complete, or deleted meanwhile.
                Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound) => {
                    Ok(None)
                }
                Err(error) if is_verdict(error.kind()) => Ok(Some(Err(error))),
                loaded => loaded.map(|listed| Some(Ok(listed))),
            };
            let done = pool::each(AT_ONCE, &store.stop, news.into_iter(), load, |done| {
                match done.flatten() {
                    Some(Ok(listed)) => {
                        known.insert(listed.backup.clone(), Seen::now(listed));
                    }
                    Some(Err(error)) => problems.push(error),
                    None => {}
                }
                Ok(())
            });
            // What was read stays known if others could not be.
            self.known().insert(volume.to_owned(), known);
            done?;
            Ok(Backups { complete: self.complete(volume), problems })
        })
    }

    /// The complete backups of a volume, oldest first, as they are known without asking the store.
    #[must_use]
    pub fn complete(&self, volume: &str) -> Vec<Arc<Listed>> {
        let known = self.known();
        let mut all: Vec<_> = known
            .get(volume)
            .into_iter()
            .flatten()
            .map(|(_, seen)| Arc::clone(&seen.listed))
            .collect();
        drop(known);
        all.sort_by(|a, b| (a.time, &a.backup).cmp(&(b.time, &b.backup)));
        all
    }

    /// A backup; none if it is not complete or not there.
    ///
    /// # Errors
    /// As [`Catalog::backups`], and what keeps the backup from being read.
    pub fn backup(&self, volume: &str, backup: &str) -> Result<Option<Arc<Listed>>> {
        let found = self.known().get(volume).and_then(|known| known.get(backup)).cloned();
        if let Some(seen) = found.as_ref().filter(|seen| seen.at.elapsed() < FRESH) {
            return Ok(Some(Arc::clone(&seen.listed)));
        }
        let loaded = self.with(|store| match found {
            // Whether it is another one of its name is seen when it is opened.
            Some(seen) => store.modified(volume, Some(backup)).map(|_| seen.listed),
            None => load(store, &facts(store, volume)?, backup),
        });
        match loaded {
            Ok(listed) => {
                let mut known = self.known();
                let of_volume = known.entry(volume.to_owned()).or_default();
                of_volume.insert(backup.to_owned(), Seen::now(Arc::clone(&listed)));
                Ok(Some(listed))
            }
            Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound) => {
                self.forget(volume, backup);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Forgets a backup: it is another one by now.
    pub fn forget(&self, volume: &str, backup: &str) {
        if let Some(known) = self.known().get_mut(volume) {
            known.remove(backup);
        }
    }

    fn with<T>(&self, ask: impl FnOnce(&BackupStore) -> Result<T>) -> Result<T> {
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        store.begin();
        ask(&store)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The facts of a volume whose backups are all of its content.
fn facts(store: &BackupStore, volume: &str) -> Result<VolumeConfig> {
    let facts = store.volume_to_restore(volume, None)?;
    facts.refuse_image()?;
    Ok(facts)
}

fn load(store: &BackupStore, volume: &VolumeConfig, backup: &str) -> Result<Arc<Listed>> {
    let config = store.listed_backup(&volume.name, backup)?;
    let listed = Listed::new(volume, backup, &config);
    listed
        .map(Arc::new)
        .map_err(|e| e.context(format!("backup {backup} of volume {}", volume.name)))
}

/// Whether an error is about the backup alone.
fn is_verdict(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Corrupt | ErrorKind::Unsupported)
}
