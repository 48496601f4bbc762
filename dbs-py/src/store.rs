//! A store, open here or served, and who else holds on to it.

use crate::convert::{Amount, to_json, to_python};
use crate::error::{closed, invalid, raise};
use crate::slot::{Access, Slot};
use crate::watch::SIGNAL_INTERVAL;
use dbs_client::any_store::AnyStore;
use dbs_control::api::{Progress, Request};
use dbs_core::{Error, ErrorKind, InitOptions, IoDriver, OpenOptions, Store};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Value, json};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::process;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How long closing waits for calls of other threads.
const CALLS_TIME: Duration = Duration::from_secs(3);
/// How often it looks.
const CALLS_WATCH: Duration = Duration::from_millis(1);

/// Levels in what a command takes: the parameters, and labels among them.
const PARAMS_DEPTH: u32 = 3;

/// An open store, as all objects made of it share it.
///
/// Locks are held for moments, or (`closing`) without the interpreter: nobody waits for the
/// interpreter with a lock in hand.
pub struct Shared {
    /// The process that opened it. After a fork the child has the same file and sockets, but none
    /// of the threads, and would write over what the parent knows: it is refused.
    process: u32,
    read_only: bool,
    store: RwLock<Option<Arc<AnyStore>>>,
    /// Volumes that may be open, to be closed with the store.
    slots: Mutex<Vec<Weak<Slot>>>,
    /// Held by who closes it, so that it is closed for all when one has done so.
    closing: Mutex<()>,
}

impl Shared {
    /// The store.
    ///
    /// # Errors
    /// `Closed`; `Busy` in another process.
    pub fn store(&self) -> PyResult<Arc<AnyStore>> {
        self.check_process()?;
        self.open_store().ok_or_else(closed)
    }

    /// Whether this is the process that opened it.
    ///
    /// # Errors
    /// `Busy` if not.
    pub fn check_process(&self) -> PyResult<()> {
        check_process(self.process)
    }

    /// Whether this is the process that opened it.
    pub fn is_ours(&self) -> bool {
        self.process == process::id()
    }

    /// Refuses what a store opened for reading would refuse, where a server would not.
    ///
    /// # Errors
    /// `ReadOnly`.
    pub fn check_writable(&self) -> PyResult<()> {
        if self.read_only {
            return Err(raise(Error::read_only(
                "the store was opened for reading; open it without read_only=True",
            )));
        }
        Ok(())
    }

    /// The store, unless it was closed.
    pub fn open_store(&self) -> Option<Arc<AnyStore>> {
        self.store.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts what was opened into its slot, to be closed with the store; `false` if that was closed
    /// meanwhile.
    pub fn keep(&self, slot: &Arc<Slot>, opened: &Access) -> bool {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if self.open_store().is_none() {
            return false;
        }
        slots.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&Arc::downgrade(slot)));
        slots.push(Arc::downgrade(slot));
        slot.set(Arc::clone(opened));
        true
    }

    /// Closes it and all volumes; once more is nothing. Runs without the interpreter.
    fn close(&self) -> dbs_core::Result<()> {
        let _closing = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let store = self.store.write().unwrap_or_else(PoisonError::into_inner).take();
        let open = std::mem::take(&mut *slots);
        drop(slots);
        let Some(store) = store else { return Ok(()) };
        let used = open.iter().filter_map(Weak::upgrade).filter_map(|slot| slot.take());
        let used: Vec<Access> = used.collect();
        // While a write is under way, the checksums beside it cannot be closed, and would be lost as by a crash.
        wait_for_calls(|| used.iter().all(|access| Arc::strong_count(access) == 1));
        drop(used);
        let closed = match &*store {
            AnyStore::Idle(store, _) => store.clone().close(),
            AnyStore::Served(server) => server.flush_written(),
        };
        // Who opens it next does not find it in use.
        wait_for_calls(|| Arc::strong_count(&store) == 1);
        closed
    }
}

/// Waits until calls of other threads have ended, but not for long: some may wait for a backup store.
fn wait_for_calls(ended: impl Fn() -> bool) {
    let deadline = Instant::now() + CALLS_TIME;
    while !ended() && Instant::now() < deadline {
        thread::sleep(CALLS_WATCH);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let store = self.store.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.is_ours() {
            without_interpreter(store);
        } else {
            // Letting go of it would unlock the parent's file.
            let _leaked = ManuallyDrop::new(store);
        }
    }
}

/// Whether this is the process that opened a store.
///
/// # Errors
/// `Busy` if not.
pub fn check_process(process: u32) -> PyResult<()> {
    if process == std::process::id() {
        return Ok(());
    }
    Err(raise(Error::busy(format!(
        "the store was opened by process {process}: a child made by fork cannot use it; open it in the child, or start \
         processes with the method `spawn`"
    ))))
}

/// Lets go of something that may have to wait for it. For destructors, which have the interpreter.
pub fn without_interpreter<T: Send>(last: T) {
    let mut last = Some(last);
    // Where there is no interpreter any more, nobody waits for it.
    Python::try_attach(|py| py.detach(|| drop(last.take())));
    drop(last);
}

/// A store: `dbs.Store` is made of it.
#[pyclass(frozen, module = "dbs._dbs")]
pub struct RawStore {
    pub shared: Arc<Shared>,
}

#[pymethods]
impl RawStore {
    /// Opens a store, or connects to its server.
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        read_only: bool,
        driver: &str,
        checksum_cache: Option<Amount>,
        runtime_dir: Option<PathBuf>,
        xdg_runtime_dir: Option<PathBuf>,
    ) -> PyResult<Self> {
        let driver = match driver {
            "auto" => IoDriver::Auto,
            "uring" => IoDriver::Uring,
            "pread" => IoDriver::Pread,
            other => {
                return Err(invalid(format!("no driver `{other}`: auto, uring or pread")));
            }
        };
        let checksum_cache = checksum_cache.map(|amount| amount.0);
        let options = OpenOptions { read_only, driver, checksum_cache, ..OpenOptions::default() };
        let runtime_dir = dbs_control::runtime_dir(runtime_dir, xdg_runtime_dir);
        let store = py.detach(|| AnyStore::open(&path, &options, &runtime_dir)).map_err(raise)?;
        Ok(Self {
            shared: Arc::new(Shared {
                process: process::id(),
                read_only,
                store: RwLock::new(Some(Arc::new(store))),
                slots: Mutex::default(),
                closing: Mutex::default(),
            }),
        })
    }

    /// Formats a new store.
    #[staticmethod]
    fn init(py: Python<'_>, path: PathBuf, options: &Bound<'_, PyDict>) -> PyResult<()> {
        let number = |name| -> PyResult<Option<u64>> {
            let value = options.get_item(name)?.filter(|value| !value.is_none());
            value.map(|value| value.extract::<Amount>().map(|amount| amount.0)).transpose()
        };
        let count = |name| -> PyResult<Option<u32>> {
            let value = number(name)?;
            let narrow = |value| {
                u32::try_from(value).map_err(|_| invalid(format!("{name} {value} is too large")))
            };
            value.map(narrow).transpose()
        };
        let flag = |name| -> PyResult<bool> {
            options.get_item(name)?.map_or(Ok(false), |value| value.is_truthy())
        };
        let init = InitOptions {
            size: number("size")?,
            extent_size: number("extent_size")?.unwrap_or(InitOptions::default().extent_size),
            max_volumes: count("max_volumes")?,
            max_snapshots: count("max_snapshots")?,
            journal_size: number("journal_size")?,
            max_size: number("max_size")?,
            checksums: flag("checksums")?,
            force: flag("force")?,
        };
        py.detach(|| Store::init(&path, &init)).map(drop).map_err(raise)
    }

    /// Runs a command of `docs/json.md`, and what it leaves to be done, if these volumes and snapshots
    /// still have these identities.
    fn call<'py>(
        &self,
        py: Python<'py>,
        method: &str,
        params: &Bound<'py, PyDict>,
        same: Vec<(String, String)>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let store = self.shared.store()?;
        let request = match to_json(params, PARAMS_DEPTH)? {
            Value::Object(none) if none.is_empty() => json!({ "method": method }),
            params => json!({ "method": method, "params": params }),
        };
        let mut request: Request = Request::from_wire(request)
            .map_err(|error| invalid(format!("the command {method}: {error}")))?;
        same.iter().for_each(|(spec, uuid)| request.mean(spec, uuid));
        if request.writes() {
            self.shared.check_writable()?;
        }
        let mut stopped = None;
        let mut last = Instant::now();
        let mut watch = |_: Option<Progress>| {
            if stopped.is_none() && last.elapsed() >= SIGNAL_INTERVAL {
                last = Instant::now();
                stopped = Python::attach(|py| py.check_signals()).err();
            }
            stopped.is_none()
        };
        let check = || same.iter().try_for_each(|(spec, uuid)| store.check_same(spec, uuid));
        let value = py.detach(|| {
            check()?;
            let value = store.call(&request, &mut watch)?;
            if !request.writes() {
                // What it tells is of these if they were the same all the time.
                check()?;
            }
            if request.leaves_work() {
                store.settle(&mut watch)?;
            }
            Ok(value)
        });
        match (value, stopped) {
            (Err(error), Some(signal)) if Error::kind(&error) == ErrorKind::Interrupted => {
                Err(signal)
            }
            // It was too late to stop it.
            (Ok(_), Some(signal)) => Err(signal),
            (value, _) => to_python(py, &value.map_err(raise)?),
        }
    }

    /// Closes the store and all volumes opened from it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.check_process()?;
        py.detach(|| self.shared.close()).map_err(raise)
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.open_store().is_none()
    }

    /// Whether a server owns it.
    #[getter]
    fn served(&self) -> PyResult<bool> {
        Ok(matches!(&*self.shared.store()?, AnyStore::Served(_)))
    }

    /// The process of the server that owns it, if there is one that can be seen from here.
    #[getter]
    fn server_process(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        let store = self.shared.store()?;
        Ok(py.detach(|| match &*store {
            AnyStore::Served(server) => server.server_process(),
            AnyStore::Idle(..) => None,
        }))
    }
}
