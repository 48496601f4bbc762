//! What a page about a served store asks its server, beside commands.

use crate::top::Top;
use dbs_control::api::Request;
use dbs_core::{Result, Store};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Entries of a report that are kept.
const ENTRIES_MAX: usize = 1000;

/// Answers what is asked about a served store.
pub trait Asked: Send + Sync + 'static {
    /// The store.
    fn store(&self) -> &Store;

    /// All that happens, at this moment.
    fn top(&self) -> Top;

    /// What the last check and the last scrub have found.
    fn findings(&self) -> Findings;

    /// Says of what is not as its user wants it: in the log, and as a warning of the store to who asks for them.
    fn notice(&self, text: String);

    /// Runs a command, as if it came over the control socket. One that takes long asks now and then whether to go
    /// on.
    ///
    /// # Errors
    /// The command's; `Interrupted` if it was not to go on.
    fn command(&self, request: &Request, go_on: &mut dyn FnMut() -> bool) -> Result<Value>;
}

/// What was found by the commands of this server that look for damage.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// The last check that ended.
    pub check: Option<Report>,
    /// The last scrub that ended.
    pub scrub: Option<Report>,
}

/// What a command has found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// When it ended.
    pub at_ns: u64,
    /// Its result, as the command gave it, with at most a thousand `findings` or `ranges`.
    pub report: Value,
    /// How many of these were left out.
    pub left_out: u64,
}

/// Keeps them.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<Findings>);

impl Kept {
    /// Keeps the result of a command, if it is one that looks for damage.
    pub(crate) fn note(&self, request: &Request, result: &Value) {
        let report = || {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let mut report = result.clone();
            let mut left_out = 0;
            for entries in ["findings", "ranges"] {
                if let Some(entries) = report.get_mut(entries).and_then(Value::as_array_mut) {
                    left_out += entries.len().saturating_sub(ENTRIES_MAX) as u64;
                    entries.truncate(ENTRIES_MAX);
                }
            }
            let at_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
            Some(Report { at_ns, report, left_out })
        };
        match request {
            Request::Check => self.all().check = report(),
            Request::Scrub { .. } => self.all().scrub = report(),
            _ => {}
        }
    }

    pub(crate) fn list(&self) -> Findings {
        self.all().clone()
    }

    fn all(&self) -> MutexGuard<'_, Findings> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
