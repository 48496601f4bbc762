//! Backup stores, and the volumes of stores that are backed up to them.

use crate::backup_file::{Opened, RawBackup};
use crate::convert::{Amount, to_json, to_python};
use crate::error::{closed, invalid, raise};
use crate::store::{RawStore, check_process, without_interpreter};
use crate::turn::{Turn, Turns};
use crate::watch::{Watcher, apart, watched};
use dbs_backup::codec::Method;
use dbs_backup::config::Map;
use dbs_backup::read::{ReadOptions, Reader};
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Retention, Secret};
use dbs_client::any_store::AnyStore;
use dbs_control::api::Request;
use dbs_core::{Error, ErrorKind};
use dbs_transfer::StoreAccess;
use dbs_volume_backup::{Host, Meter, Options, Pace, Wanted, create, restore};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::mem;
use std::num::NonZeroU64;
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, ThreadId};

type Result<T> = dbs_core::Result<T>;
/// The values of environment variables.
type Variables = HashMap<OsString, OsString>;

/// Levels in what an operation takes: its parameters, and labels among them.
const PARAMS_DEPTH: u32 = 3;

/// What says nothing before its end.
#[derive(Debug, Deserialize)]
#[serde(tag = "method", content = "params", rename_all = "snake_case")]
enum Look {
    Volumes {},
    Volume { volume: String },
    Backups { volume: String },
    Backup { volume: String, backup: String },
    Judge { volume: String, rules: Rules },
    Mend {},
    Keys {},
    AddKey { passphrase: Option<String>, key_file: Option<String> },
    RemoveKey { key: String },
}

impl Look {
    /// Whether it changes something.
    fn changes(&self) -> bool {
        matches!(self, Self::Mend {} | Self::AddKey { .. } | Self::RemoveKey { .. })
    }
}

/// What takes long.
#[derive(Debug, Deserialize)]
#[serde(tag = "method", content = "params", rename_all = "snake_case")]
enum Operation {
    Verify { volume: String, backup: String, data: bool, pace: Speed },
    Delete { volume: String, backup: String },
    DeleteVolume { volume: String },
    Prune { volume: String, rules: Rules },
    Collect {},
}

/// How many backups to keep.
#[derive(Debug, Deserialize)]
struct Rules {
    last: u32,
    hourly: u32,
    daily: u32,
    weekly: u32,
    monthly: u32,
    yearly: u32,
    in_progress: bool,
}

impl From<Rules> for Retention {
    fn from(rules: Rules) -> Self {
        let Rules { last, hourly, daily, weekly, monthly, yearly, in_progress } = rules;
        Self { last, hourly, daily, weekly, monthly, yearly, in_progress }
    }
}

/// How much at once.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Speed {
    parallel: u8,
    rate: Option<u64>,
}

impl From<Speed> for Pace {
    fn from(speed: Speed) -> Self {
        Self { workers: speed.parallel.into(), rate: speed.rate.and_then(NonZeroU64::new) }
    }
}

/// How to back up.
#[derive(Debug, Deserialize)]
struct HowToCreate {
    name: Option<String>,
    to: Option<String>,
    full: bool,
    compression: String,
    block_size: Option<u64>,
    labels: Map,
    pace: Speed,
}

/// How to restore.
#[derive(Debug, Deserialize)]
struct HowToRestore {
    volume: String,
    backup: String,
    name: String,
    resume: bool,
    pace: Speed,
}

/// A backup store, as all threads share it.
struct Inner {
    url: Url,
    variables: Variables,
    read: ReadOptions,
    is_repository: bool,
    /// One operation at a time.
    store: Turns<BackupStore>,
    /// For files, once there is one.
    reader: Mutex<Option<Arc<Reader>>>,
}

fn open(url: &Url, variables: &Variables) -> Result<BackupStore> {
    open_bare(url, variables)?.with_repository(secret(variables)?.as_ref())
}

/// Without a look for a repository.
fn open_bare(url: &Url, variables: &Variables) -> Result<BackupStore> {
    let value = |name: &str| variables.get(OsStr::new(name)).and_then(|value| value.to_str());
    BackupStore::open(url, &|name| value(name).filter(|v| !v.is_empty()).map(str::to_owned))
}

fn secret(variables: &Variables) -> Result<Option<Secret>> {
    Secret::from_variables("DBS_BACKUP", &|name| variables.get(OsStr::new(name)).cloned())
}

fn parse(url: &str) -> PyResult<Url> {
    let url = Url::parse(url).map_err(raise)?;
    match url.volume.is_some() || url.backup.is_some() {
        false => Ok(url),
        true => Err(invalid(format!("{url} names something in a backup store: name the store"))),
    }
}

fn json_of(value: &impl Serialize) -> Result<Value> {
    serde_json::to_value(value).map_err(|e| Error::io(std::io::Error::other(e), "encoding JSON"))
}

/// Parameters of Python as those of an operation.
fn typed<T: for<'de> Deserialize<'de>>(value: Value) -> PyResult<T> {
    serde_json::from_value(value).map_err(|e| invalid(format!("a parameter: {e}")))
}

impl Inner {
    fn open(url: Url, variables: Variables, read: ReadOptions) -> Result<Self> {
        let store = open(&url, &variables)?;
        let (is_repository, store) = (store.is_repository(), Turns::new(store));
        Ok(Self { url, variables, read, is_repository, store, reader: Mutex::default() })
    }

    /// The store, when other threads are done with it.
    fn turn(
        &self,
        asker: ThreadId,
        goes_on: impl FnMut() -> bool,
    ) -> Result<Turn<'_, BackupStore>> {
        let store = self.store.take(asker, goes_on)?;
        // What ended the one before does not end this one.
        store.begin();
        Ok(store)
    }

    fn watched(&self, watcher: &RefCell<Watcher>) -> Result<Turn<'_, BackupStore>> {
        let asker = thread::current().id();
        self.turn(asker, || watcher.borrow_mut().goes_on(0, 0)).map(Turn::here)
    }

    fn look(&self, what: Look, asker: ThreadId, given_up: &AtomicBool) -> Result<Value> {
        let store = self.turn(asker, || !given_up.load(Ordering::SeqCst))?;
        match what {
            Look::Volumes {} => json_of(&store.volume_infos()?),
            Look::Volume { volume } => {
                store.known_backups(&volume)?;
                json_of(&store.volume_info(&volume)?)
            }
            Look::Backups { volume } => json_of(&store.backup_infos(&volume)?),
            Look::Backup { volume, backup } => {
                let names = store.known_backups(&volume)?;
                if !names.contains(&backup) {
                    let text = format!("volume {volume} has no backup {backup}");
                    return Err(Error::not_found(text));
                }
                json_of(&store.backup_info(&volume, &backup)?)
            }
            Look::Judge { volume, rules } => {
                store.known_backups(&volume)?;
                json_of(&store.judge(&volume, &rules.into())?)
            }
            Look::Mend {} => json_of(&store.mend()?),
            Look::Keys {} => json_of(&store.keys()?),
            Look::AddKey { passphrase, key_file } => {
                let secret = match (passphrase, key_file) {
                    (Some(text), None) if !text.is_empty() => Secret::passphrase(&text)?,
                    (None, Some(file)) => Secret::read_key_file(Path::new(&file))?,
                    _ => return Err(Error::invalid("give a passphrase or a key file")),
                };
                json_of(&store.add_key(&secret)?)
            }
            Look::RemoveKey { key } => json_of(&store.remove_key(&key)?),
        }
    }

    fn operate(&self, what: Operation, watcher: &RefCell<Watcher>) -> Result<Value> {
        let store = self.watched(watcher)?;
        let mut progress = |done, total| watcher.borrow_mut().goes_on(done, total);
        let pace = match &what {
            Operation::Verify { pace, .. } => (*pace).into(),
            _ => Pace::default(),
        };
        let mut work = pace.work(&mut progress);
        match what {
            Operation::Verify { volume, backup, data, .. } => {
                json_of(&store.verify(&volume, &backup, data, &mut work)?)
            }
            Operation::Delete { volume, backup } => {
                let removed = store.remove(&volume, &backup, &mut work)?;
                if !removed.found {
                    let text = format!("volume {volume} has no backup {backup}");
                    return Err(Error::not_found(text));
                }
                json_of(&removed)
            }
            Operation::DeleteVolume { volume } => {
                // One whose facts are lost may have backups all the same.
                if store.backups(&volume)?.is_empty() {
                    store.volume(&volume)?;
                }
                json_of(&store.remove_volume(&volume, &mut work)?)
            }
            Operation::Prune { volume, rules } => {
                let rules = Retention::from(rules);
                store.known_backups(&volume)?;
                let mut judged = store.judge(&volume, &rules)?;
                if judged.iter().any(|backup| backup.kept_by.is_empty()) {
                    store.prune(&volume, &rules, &mut judged, &mut work)?;
                }
                json_of(&judged)
            }
            Operation::Collect {} => json_of(&store.collect(&mut work)?),
        }
    }

    /// What reads files. It uses a store of its own.
    fn reader(&self) -> Result<Arc<Reader>> {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reader) = &*reader {
            return Ok(Arc::clone(reader));
        }
        let started = Arc::new(Reader::start(open(&self.url, &self.variables)?, self.read)?);
        Ok(Arc::clone(reader.insert(started)))
    }
}

/// A store whose volumes are backed up or restored.
struct Volumes<'a> {
    store: &'a AnyStore,
    watcher: &'a RefCell<Watcher>,
}

impl Host for Volumes<'_> {
    fn store(&self) -> Result<&(dyn StoreAccess + Sync)> {
        Ok(self.store.access())
    }

    fn call(&self, request: &Request) -> Result<Value> {
        let mut watch = |_| self.watcher.borrow_mut().goes_on(0, 0);
        let value = self.store.call(request, &mut watch)?;
        if request.leaves_work() {
            self.store.settle(&mut watch)?;
        }
        Ok(value)
    }

    fn clean_up(&self, request: &Request) -> Result<()> {
        self.store.call(request, &mut |_| true)?;
        match self.store.settle(&mut |_| self.watcher.borrow_mut().goes_on(0, 0)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            settled => settled,
        }
    }

    fn check_same(&self, spec: &str, uuid: &str) -> Result<()> {
        self.store.check_same(spec, uuid)
    }

    fn note(&self, text: &str) {
        self.warn(text);
    }

    fn warn(&self, text: &str) {
        self.watcher.borrow_mut().warn(text);
    }

    fn meter(&self, _label: &str) -> Meter<'_> {
        Box::new(|done, total| self.watcher.borrow_mut().goes_on(done, total))
    }
}

/// A backup store: `dbs.BackupStore` is made of it.
#[pyclass(frozen, module = "dbs._dbs")]
pub struct RawBackupStore {
    process: u32,
    inner: RwLock<Option<Arc<Inner>>>,
}

impl RawBackupStore {
    fn inner(&self) -> PyResult<Arc<Inner>> {
        check_process(self.process)?;
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner).clone();
        inner.ok_or_else(closed)
    }

    fn take(&self) -> Option<Arc<Inner>> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for RawBackupStore {
    fn drop(&mut self) {
        let inner = self.take();
        if self.process == process::id() {
            without_interpreter(inner);
        } else {
            // Its connections and locks are the parent's.
            mem::forget(inner);
        }
    }
}

#[pymethods]
impl RawBackupStore {
    /// Opens the backup store that a URL names; credentials and keys are among the variables.
    #[new]
    fn new(
        py: Python<'_>,
        url: &str,
        variables: HashMap<OsString, OsString>,
        cache: Amount,
        lock: bool,
    ) -> PyResult<Self> {
        let (url, read) = (parse(url)?, ReadOptions { cache: cache.0, lock, ..Default::default() });
        let inner = apart(py, false, move |_| Inner::open(url, variables, read))?;
        Ok(Self { process: process::id(), inner: RwLock::new(Some(Arc::new(inner))) })
    }

    /// Makes a repository.
    #[staticmethod]
    fn init(
        py: Python<'_>,
        url: &str,
        variables: HashMap<OsString, OsString>,
        encrypt: bool,
    ) -> PyResult<()> {
        let url = parse(url)?;
        apart(py, true, move |_| {
            open_bare(&url, &variables)?.make_repository(encrypt, secret(&variables)?)
        })
    }

    /// What names it.
    #[getter]
    fn url(&self) -> PyResult<String> {
        Ok(self.inner()?.url.to_string())
    }

    /// Whether it is a repository.
    #[getter]
    fn is_repository(&self) -> PyResult<bool> {
        Ok(self.inner()?.is_repository)
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Lets go of it; files that are open stay so.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        let inner = self.take();
        py.detach(|| drop(inner));
        Ok(())
    }

    /// Runs something that says nothing before its end.
    fn look<'py>(
        &self,
        py: Python<'py>,
        method: &str,
        params: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (inner, params) = (self.inner()?, to_json(params, PARAMS_DEPTH)?);
        let asker = thread::current().id();
        let what: Look = typed(json!({ "method": method, "params": params }))?;
        let value = apart(py, what.changes(), move |given_up| inner.look(what, asker, given_up))?;
        to_python(py, &value)
    }

    /// Runs something that takes long.
    fn operate<'py>(
        &self,
        py: Python<'py>,
        method: &str,
        params: &Bound<'py, PyDict>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (inner, params) = (self.inner()?, to_json(params, PARAMS_DEPTH)?);
        let what = typed(json!({ "method": method, "params": params }))?;
        let value = watched(py, progress, move |watcher| inner.operate(what, watcher))?;
        to_python(py, &value)
    }

    /// Backs up a volume (`name`) or a snapshot (`name@snapshot`) which has this identity.
    fn create<'py>(
        &self,
        py: Python<'py>,
        store: &RawStore,
        spec: &str,
        uuid: &str,
        how: &Bound<'py, PyDict>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (inner, from) = (self.inner()?, store.shared.store()?);
        let how: HowToCreate = typed(to_json(how, PARAMS_DEPTH)?)?;
        let (volume, snapshot) = match spec.split_once('@') {
            Some((volume, snapshot)) => (volume, Some(snapshot)),
            None => (spec, None),
        };
        if snapshot.is_none() {
            store.shared.check_writable()?;
        }
        let options = Options {
            name: how.name,
            to: how.to,
            full: how.full,
            compression: how.compression.parse::<Method>().map_err(invalid)?,
            block_size: how.block_size,
            labels: how.labels,
        };
        let value = watched(py, progress, |watcher| {
            let host = Volumes { store: &from, watcher };
            from.check_same(spec, uuid)?;
            let backups = inner.watched(watcher)?;
            let created = create(&host, &backups, (volume, snapshot), &options, how.pace.into())?;
            // What was read was this one if it still is.
            from.check_same(spec, uuid)?;
            json_of(&created)
        })?;
        to_python(py, &value)
    }

    /// Makes a volume of a backup.
    fn restore(
        &self,
        py: Python<'_>,
        store: &RawStore,
        how: &Bound<'_, PyDict>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let (inner, onto) = (self.inner()?, store.shared.store()?);
        store.shared.check_writable()?;
        let how: HowToRestore = typed(to_json(how, PARAMS_DEPTH)?)?;
        watched(py, progress, |watcher| {
            let host = Volumes { store: &onto, watcher };
            let backups = inner.watched(watcher)?;
            let wanted = Wanted {
                volume: &how.volume,
                backup: &how.backup,
                name: &how.name,
                resume: how.resume,
            };
            restore(&host, &backups, wanted, how.pace.into()).map(drop)
        })
    }

    /// Opens a backup for reading.
    fn open(&self, py: Python<'_>, volume: String, backup: String) -> PyResult<RawBackup> {
        let inner = self.inner()?;
        let spec = inner.url.with(&volume, Some(&backup)).to_string();
        let opened = apart(py, false, move |_| {
            let reader = inner.reader()?;
            let backup = reader.open(&volume, &backup)?;
            Ok(Opened::new(backup, reader))
        })?;
        Ok(RawBackup::new(spec, opened))
    }
}
