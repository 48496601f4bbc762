//! Long work: without the interpreter, with a look now and then whether a signal such as Ctrl-C has come.

use crate::error::raise;
use dbs_core::{Error, ErrorKind};
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use std::cell::RefCell;
use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// How often it is looked for a signal, and the caller is told how far it is.
pub const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Who waits for it.
pub struct Watcher {
    progress: Option<Py<PyAny>>,
    /// How far it is, if the caller does not know it yet.
    news: Option<(u64, u64)>,
    /// What ended it.
    failed: Option<PyErr>,
    last: Instant,
    warnings: Vec<String>,
}

impl Watcher {
    /// Notes how far it is; says whether to go on.
    pub fn goes_on(&mut self, done: u64, total: u64) -> bool {
        if total > 0 {
            self.news = Some((done, total));
        }
        if self.failed.is_none() && self.last.elapsed() >= SIGNAL_INTERVAL {
            self.last = Instant::now();
            self.failed =
                Python::attach(|py| py.check_signals().and_then(|()| self.tell(py))).err();
        }
        self.failed.is_none()
    }

    /// Notes something that went wrong and is no failure.
    pub fn warn(&mut self, text: &str) {
        self.warnings.push(text.to_owned());
    }

    fn tell(&mut self, py: Python<'_>) -> PyResult<()> {
        match (&self.progress, self.news.take()) {
            (Some(progress), Some((done, total))) => progress.call1(py, (done, total)).map(drop),
            _ => Ok(()),
        }
    }
}

/// Runs something long on this thread. `progress` is called with how far it is, and ends the work if it raises something.
pub fn watched<T: Send>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    work: impl FnOnce(&RefCell<Watcher>) -> dbs_core::Result<T> + Send,
) -> PyResult<T> {
    let (result, mut watcher) = py.detach(|| {
        let (news, failed, warnings) = (None, None, Vec::new());
        let watcher =
            RefCell::new(Watcher { progress, news, failed, last: Instant::now(), warnings });
        let result = work(&watcher);
        (result, watcher.into_inner())
    });
    if result.is_ok() && watcher.failed.is_none() {
        // The end of it.
        watcher.failed = watcher.tell(py).err();
    }
    match (result, watcher.failed.take()) {
        (Err(error), Some(signal)) if Error::kind(&error) == ErrorKind::Interrupted => Err(signal),
        // It was too late to stop it.
        (Ok(_), Some(signal)) => Err(signal),
        (result, _) => {
            let category = py.get_type::<PyRuntimeWarning>();
            for text in &watcher.warnings {
                let text = CString::new(text.replace('\0', "")).unwrap_or_default();
                PyErr::warn(py, &category, &text, 1)?;
            }
            result.map_err(raise)
        }
    }
}

/// Runs something that says nothing before its end, on a thread of its own: a signal ends the waiting, and leaves it to
/// end by itself, which it may do at once when it sees that it was given up. What changes something is waited for
/// nevertheless, unless another signal comes: else nobody would know whether, and when, it is done.
pub fn apart<T: Send + 'static>(
    py: Python<'_>,
    changes: bool,
    work: impl FnOnce(&AtomicBool) -> dbs_core::Result<T> + Send + 'static,
) -> PyResult<T> {
    let (send, mut results) = sync_channel(1);
    let given_up = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&given_up);
    let spawned = thread::Builder::new().name("dbs-apart".to_owned()).spawn(move || {
        // Nobody may be there any more.
        let _ = send.send(work(&seen));
    });
    spawned.map_err(|e| raise(Error::io(e, "starting a thread")))?;
    let mut signal = None;
    loop {
        let results = &mut results;
        match py.detach(move || results.recv_timeout(SIGNAL_INTERVAL)) {
            Ok(result) => return ended(result, signal),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(error) = py.check_signals() {
                    given_up.store(true, Ordering::SeqCst);
                    if !changes || signal.replace(error.clone_ref(py)).is_some() {
                        return Err(error);
                    }
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(raise(Error::io(std::io::Error::other("it panicked"), "a thread")));
            }
        }
    }
}

/// What the caller is told of work that has ended, and of the signal that came before.
fn ended<T>(result: dbs_core::Result<T>, signal: Option<PyErr>) -> PyResult<T> {
    match (result, signal) {
        (Err(error), Some(signal)) if error.kind() == ErrorKind::Interrupted => Err(signal),
        // It was too late to stop it.
        (Ok(_), Some(signal)) => Err(signal),
        (result, _) => result.map_err(raise),
    }
}
