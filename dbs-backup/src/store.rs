//! A backup store: what is in it.

use crate::config::{self, BACKUP_LIMIT, BackupConfig, VolumeConfig};
use crate::lock::{Kind, Lock, Times};
use crate::names::{self, BlockName};
use crate::objects::{self, Bytes, Directory, Objects, azure, mount, s3};
use crate::pool::{self, Work};
use crate::repository::{self, Collected, InitOptions, KeyInfo, Repository, Secret};
use crate::url::Url;
use dbs_core::{Error, ErrorKind, Result};
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// Bytes of `volume.cfg`: most of it are labels.
const VOLUME_LIMIT: u64 = 4 << 20;
/// Bytes at the start of a backup's facts: more than what is said before the blocks, unless labels are long.
const START: u64 = 16 << 10;
/// Folders listed at once.
const LISTS: usize = 16;

/// A backup store. One operation on it at a time: open it once more for another.
pub struct BackupStore {
    pub(crate) objects: Arc<dyn Objects>,
    pub(crate) url: Url,
    /// The operation that runs is to end.
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) times: Times,
    /// Bytes that a backup's facts may have.
    limit: u64,
    /// The layout is that of a repository, not Longhorn's.
    pub(crate) repository: Option<Arc<Repository>>,
}

/// The blocks that are there.
pub(crate) enum Present {
    Names(HashSet<BlockName>),
    /// Those that stay, for writers.
    In(Arc<Repository>),
    /// All that can be read.
    Readable(Arc<Repository>),
}

impl Present {
    pub fn contains(&self, name: BlockName) -> bool {
        match self {
            Self::Names(names) => names.contains(&name),
            Self::In(repository) => repository.is_there(name),
            Self::Readable(repository) => repository.is_readable(name),
        }
    }
}

impl BackupStore {
    /// The same store, as the repository that is there, if one is.
    ///
    /// # Errors
    /// `Invalid` if the key is wrong, or if one is given and nothing is encrypted; `Corrupt`, also if only its `config` is
    /// gone; `Unsupported` if the repository has another format; those of the store.
    pub fn with_repository(self, secret: Option<&Secret>) -> Result<Self> {
        let repository = Repository::open(&self.objects, secret, &self.stop)?.map(Arc::new);
        Ok(Self { repository, ..self })
    }

    /// Makes a repository of a place without backups.
    ///
    /// # Errors
    /// `Exists` if there are backups, or a repository; those of the store.
    pub fn init(&self, options: &InitOptions) -> Result<()> {
        repository::init(&self.objects, options)
    }

    /// Makes a repository as a user has asked for it, who has given a key or none.
    ///
    /// # Errors
    /// `Invalid` if it is to be encrypted and there is no key, or the other way round; as [`BackupStore::init`].
    pub fn make_repository(&self, encrypt: bool, secret: Option<Secret>) -> Result<()> {
        match (&secret, encrypt) {
            (None, true) => Err(Error::invalid(
                "set DBS_BACKUP_PASSPHRASE, DBS_BACKUP_PASSPHRASE_FILE or DBS_BACKUP_KEY_FILE to encrypt",
            )),
            (Some(_), false) => Err(Error::invalid(
                "a key is given (DBS_BACKUP_...): have the repository encrypted (--encrypt), or do without it",
            )),
            _ => self.init(&InitOptions { secret, ..InitOptions::default() }),
        }
    }

    /// Refuses what cannot be the name of a volume or backup (`what`) in this layout.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check_name(&self, what: &str, name: &str) -> Result<()> {
        match &self.repository {
            Some(_) => names::check_any(what, name),
            None => names::check(what, name),
        }
    }

    /// Whether it is a repository.
    #[must_use]
    pub fn is_repository(&self) -> bool {
        self.repository.is_some()
    }

    /// Whether what is in it is encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.repository.as_ref().is_some_and(|repository| repository.is_encrypted())
    }

    /// Collects what no backup needs. None in Longhorn's layout, where deletions do that.
    ///
    /// # Errors
    /// `Corrupt` if a backup cannot be read: nothing is removed then; `Interrupted`; those of the store.
    pub fn collect(&self, work: &mut Work<'_>) -> Result<Option<Collected>> {
        self.begin();
        self.repository.as_ref().map(|repository| repository.collect(work)).transpose()
    }

    /// Has the next backups write anew what verifications by this object have found damaged, as far as the volumes still have
    /// it. Returns how many packs that concerns.
    ///
    /// # Errors
    /// `Invalid` in Longhorn's layout, where a full backup does that; those of the store.
    pub fn mend(&self) -> Result<u64> {
        self.begin();
        match &self.repository {
            Some(repository) => repository.condemn_damaged(),
            None => Err(Error::invalid(
                "in Longhorn's layout, `dbs backup create --full` mends damaged blocks",
            )),
        }
    }

    /// The keys that open the repository.
    ///
    /// # Errors
    /// `Invalid` if it is none, or is not encrypted; those of the store.
    pub fn keys(&self) -> Result<Vec<KeyInfo>> {
        self.need_repository()?.list_keys()
    }

    /// Adds a key to the repository, which opens it like those that are there; returns what names it.
    ///
    /// # Errors
    /// As [`BackupStore::keys`]; `Exists` if it opens the repository already; `Busy` if somebody else changes the keys.
    pub fn add_key(&self, secret: &Secret) -> Result<String> {
        self.need_repository()?.add_key(secret)
    }

    /// Removes a key, other than the one that was given to open the repository.
    ///
    /// # Errors
    /// As [`BackupStore::keys`]; `NotFound`; `Busy` if somebody else changes the keys.
    pub fn remove_key(&self, id: &str) -> Result<()> {
        self.need_repository()?.remove_key(id)
    }

    fn need_repository(&self) -> Result<&Repository> {
        self.repository
            .as_deref()
            .ok_or_else(|| Error::invalid(format!("{} is no repository: it has no keys", self.url)))
    }

    /// Opens the store in Longhorn's layout that a URL names. Credentials, endpoints and certificates come from `variable`,
    /// which gives the value of an environment variable.
    ///
    /// # Errors
    /// `Unsupported` for a scheme that nobody knows; those of reaching the store.
    pub fn open(url: &Url, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let objects: Arc<dyn Objects> = match url.scheme.as_str() {
            "vfs" if !url.host.is_empty() => {
                return Err(Error::invalid("VFS path must follow: vfs:///path/ format"));
            }
            "vfs" if url.path.is_empty() => return Err(Error::invalid("cannot find vfs path")),
            "vfs" => Arc::new(Directory::open(Path::new(&url.path))?),
            "nfs" | "cifs" => Arc::new(mount::open(url, variable)?),
            "azblob" => Arc::new(azure::open(url, variable, &stop)?),
            "s3" => Arc::new(s3::open(url, variable, &stop)?),
            other => {
                return Err(Error::unsupported(format!("driver {other} is not supported")));
            }
        };
        let store = Self { stop, ..Self::on(url, objects) };
        // Tests are alone, and do not wait for others who take a lock at the same time. No release does that.
        let alone = cfg!(debug_assertions) && variable("DBS_TEST_ALONE").is_some();
        Ok(if alone { store.without_waiting() } else { store })
    }

    /// A store on objects of the caller's, which `url` names.
    #[must_use]
    pub fn on(url: &Url, objects: Arc<dyn Objects>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        Self {
            objects,
            url: url.store(),
            stop,
            times: Times::default(),
            limit: BACKUP_LIMIT,
            repository: None,
        }
    }

    /// Without the pause in which two who take a lock at the same time see each other: for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn without_waiting(mut self) -> Self {
        self.times.wait = std::time::Duration::ZERO;
        self
    }

    /// With another limit for the bytes of a backup's facts: for tests.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn with_limit(mut self, limit: u64) -> Self {
        self.limit = limit;
        self
    }

    /// What names it.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// The names of all volumes, sorted.
    ///
    /// # Errors
    /// Those of the store, here and below.
    pub fn volumes(&self) -> Result<Vec<String>> {
        self.stop.store(false, Ordering::SeqCst);
        if let Some(repository) = &self.repository {
            return repository.volumes();
        }
        let mut folders = vec![names::volumes()];
        for _ in 0..3 {
            let mut below = Vec::new();
            let list = |folder: String| {
                let names = self.objects.list(&folder)?;
                Ok(names.into_iter().map(|name| format!("{folder}/{name}")).collect::<Vec<_>>())
            };
            pool::each(LISTS, &self.stop, folders.into_iter(), list, |found| {
                below.extend(found.into_iter().flatten());
                Ok(())
            })?;
            folders = below;
        }
        let mut found: Vec<String> = folders
            .iter()
            .filter_map(|path| {
                let name = path.rsplit('/').next().filter(|name| names::is_valid(name))?;
                // Whatever else is there is at another place than its name says.
                (names::volume(name) == *path).then(|| name.to_owned())
            })
            .collect();
        found.sort();
        Ok(found)
    }

    /// The facts of a volume.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`, also if they are those of another volume.
    pub fn volume(&self, volume: &str) -> Result<VolumeConfig> {
        self.check_name("volume", volume)?;
        if let Some(repository) = &self.repository {
            return repository.volume(volume);
        }
        let path = names::volume_config(volume);
        let mut config = VolumeConfig::parse(&path, &self.objects.get(&path, VOLUME_LIMIT)?)?;
        if config.name.is_empty() {
            volume.clone_into(&mut config.name);
        }
        // The name is a part of the path that the facts are written to.
        if config.name != volume {
            return Err(Error::corrupt(format!(
                "{path} in the backup store is damaged: it is of another volume, `{}`",
                names::plain(&config.name)
            )));
        }
        Ok(config)
    }

    /// When the facts of a volume, or of a backup of it, were last written.
    ///
    /// # Errors
    /// `NotFound`; those of the store.
    pub fn modified(&self, volume: &str, backup: Option<&str>) -> Result<SystemTime> {
        self.check_name("volume", volume)?;
        backup.iter().try_for_each(|backup| self.check_name("backup", backup))?;
        if let Some(repository) = &self.repository {
            return repository.modified(volume, backup);
        }
        let path = match backup {
            Some(backup) => names::backup_config(volume, backup),
            None => names::volume_config(volume),
        };
        let stat = self.objects.stat(&path)?;
        stat.map(|stat| stat.modified).ok_or_else(|| objects::missing(&path))
    }

    /// The names of a volume's backups, complete or not, sorted.
    ///
    /// # Errors
    /// Those of the store.
    pub fn backups(&self, volume: &str) -> Result<Vec<String>> {
        self.check_name("volume", volume)?;
        if let Some(repository) = &self.repository {
            return repository.backups(volume);
        }
        let files = self.objects.list(&names::backups(volume))?;
        let mut found: Vec<String> =
            files.iter().filter_map(|file| names::backup_of(file)).map(str::to_owned).collect();
        found.sort();
        Ok(found)
    }

    /// The facts of a backup, complete or not.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`; `Unsupported` if there is more of them than `dbs` reads.
    pub fn backup(&self, volume: &str, backup: &str) -> Result<BackupConfig> {
        self.check_name("volume", volume)?;
        self.check_name("backup", backup)?;
        if let Some(repository) = &self.repository {
            return repository.backup(volume, backup);
        }
        let path = names::backup_config(volume, backup);
        let bytes = self.objects.get(&path, self.limit).map_err(|error| match error.kind() {
            // Too much to read is no damage, for which users delete backups.
            ErrorKind::Corrupt => Error::unsupported(format!(
                "{path} in the backup store has more than {} bytes: restore the backup with Longhorn",
                self.limit
            )),
            _ => error,
        })?;
        BackupConfig::parse(&path, &bytes)
    }

    /// The facts of a backup that is complete.
    ///
    /// # Errors
    /// As [`BackupStore::backup`]; `Busy` if it is not; `Unsupported` if it is not made of blocks.
    pub fn complete_backup(&self, volume: &str, backup: &str) -> Result<BackupConfig> {
        complete(backup, self.backup(volume, backup)?)
    }

    /// The facts of a backup that is complete, perhaps without its blocks: a large file is read as far as they begin,
    /// if what is said up to there is all that a list needs.
    pub(crate) fn listed_backup(&self, volume: &str, backup: &str) -> Result<BackupConfig> {
        self.check_name("backup", backup)?;
        if let Some(repository) = &self.repository {
            return repository.listed(volume, backup);
        }
        let path = names::backup_config(volume, backup);
        match self.objects.get_start(&path, START) {
            Ok(all) if (all.len() as u64) < START => {
                return complete(backup, BackupConfig::parse(&path, &all)?);
            }
            Ok(start) => {
                if let Some(config) = BackupConfig::parse_start(&start) {
                    return complete(backup, config);
                }
            }
            // A server without ranges.
            Err(error) if error.kind() == ErrorKind::Corrupt => {}
            Err(error) => return Err(error),
        }
        self.complete_backup(volume, backup)
    }

    /// The facts of a backup, complete or not, perhaps without its blocks.
    pub(crate) fn facts(&self, volume: &str, backup: &str) -> Result<BackupConfig> {
        match &self.repository {
            Some(repository) => repository.listed(volume, backup),
            None => self.backup(volume, backup),
        }
    }

    pub(crate) fn save_volume(&self, volume: &VolumeConfig) -> Result<()> {
        self.objects.put(&names::volume_config(&volume.name), &config::encode(volume)?)
    }

    /// The blocks that are there. An empty file is none: a power loss can leave one where a program wrote a block
    /// without a sync.
    pub(crate) fn blocks(&self, volume: &str, work: &mut Work<'_>) -> Result<Present> {
        if let Some(repository) = &self.repository {
            repository.load(work.workers, &mut || (work.progress)(0, 0))?;
            return Ok(Present::In(Arc::clone(repository)));
        }
        let mut found = HashSet::new();
        self.walk(&names::blocks(volume), work, &mut |path, size| {
            found.extend(names::block_of(path).filter(|_| size() != Some(0)));
        })?;
        Ok(Present::Names(found))
    }

    /// The blocks that a reader finds.
    pub(crate) fn readable(&self, volume: &str, work: &mut Work<'_>) -> Result<Present> {
        let present = self.blocks(volume, work)?;
        let Present::In(repository) = present else { return Ok(present) };
        repository.adopt()?;
        Ok(Present::Readable(repository))
    }

    /// The name of a block with this content.
    pub(crate) fn name_of(&self, content: &[u8]) -> BlockName {
        match &self.repository {
            Some(repository) => repository.name_of(content),
            None => BlockName::of(content),
        }
    }

    /// As [`Objects::walk`]. The caller can end it at any time:
    /// a list can be long, and the server slow.
    pub(crate) fn walk(
        &self,
        folder: &str,
        work: &mut Work<'_>,
        found: &mut (dyn FnMut(&str, Bytes<'_>) + Send),
    ) -> Result<()> {
        let (found, stop) = (Mutex::new(found), &*self.stop);
        let walk = |()| {
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            self.objects.walk(folder, &mut |path, size| {
                found(path, size);
                if stop.load(Ordering::SeqCst) { Err(pool::interrupted()) } else { Ok(()) }
            })
        };
        pool::each(1, stop, std::iter::once(()), walk, |done| match done {
            None if !(work.progress)(0, 0) => Err(pool::interrupted()),
            _ => Ok(()),
        })
    }

    /// The lock of a backup or restore. A repository has none.
    pub(crate) fn lock_work(&self, volume: &str) -> Result<Option<Lock>> {
        match &self.repository {
            Some(_) => Ok(None),
            None => self.lock(volume, Kind::Work).map(Some),
        }
    }

    pub(crate) fn lock(&self, volume: &str, kind: Kind) -> Result<Lock> {
        Lock::take(&self.objects, volume, kind, self.times, &self.stop)
    }

    /// A lock that others do not depend on who use this store at the same time: its end does not stop them.
    pub(crate) fn lock_apart(&self, volume: &str, kind: Kind) -> Result<Lock> {
        Lock::take(&self.objects, volume, kind, self.times, &Arc::default())
    }

    /// What ended the operation before does not end the next one. Most operations begin with that; those that only look may
    /// be asked for while another one runs, and leave it to the caller.
    pub fn begin(&self) {
        self.stop.store(false, Ordering::SeqCst);
    }
}

/// Refuses what is not complete, and what is not made of blocks.
fn complete(backup: &str, config: BackupConfig) -> Result<BackupConfig> {
    if config.is_in_progress() {
        return Err(Error::busy(format!(
            "backup {backup} is still in progress, or was cut off: create it again under this name, or delete it"
        )));
    }
    if config.is_single_file() {
        return Err(Error::unsupported(format!(
            "backup {backup} is one file, as Longhorn's first versions made them: restore it with Longhorn"
        )));
    }
    Ok(config)
}
