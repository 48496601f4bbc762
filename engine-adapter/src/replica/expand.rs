//! Growing a replica.

use super::{Replica, names, time};
use dbs_core::info::Labels;
use dbs_core::store::SnapshotOptions;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, ErrorKind, Store};
use dbs_server::log;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Label of the snapshot that an expansion takes first.
const EXPANSION_LABEL: &str = "replica-expansion";

/// How far a failed expansion got: the engine keeps replicas that are as before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExpandCode {
    /// Nobody knows.
    ResultUnknown,
    /// It was refused.
    FunctionFailedWithoutRollback,
    /// It failed, and everything is as before.
    FunctionFailedRollbackSucceeded,
    /// It failed, and not everything is as before.
    FunctionFailedRollbackFailed,
}

/// Why an expansion failed. Its JSON is the message of the gRPC status.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExpandError {
    /// How far it got.
    pub code: ExpandCode,
    /// What went wrong.
    pub message: String,
    /// What went wrong when it was undone.
    pub rollback_message: String,
}

impl ExpandError {
    fn refused(message: impl fmt::Display) -> Self {
        Self {
            code: ExpandCode::FunctionFailedWithoutRollback,
            message: message.to_string(),
            rollback_message: String::new(),
        }
    }

    /// A step failed that does all or nothing; of a broken disk or store nobody knows.
    fn unchanged(error: Error) -> Self {
        let mut refused = Self::refused(&error);
        if !matches!(error.kind(), ErrorKind::Io | ErrorKind::Poisoned) {
            refused.code = ExpandCode::FunctionFailedRollbackSucceeded;
        }
        refused
    }

    /// The message of the status.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Texts always have a form in JSON.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// What the message of a status says, if it is of this form.
    #[must_use]
    pub fn from_json(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

impl fmt::Display for ExpandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: code = {:?}, message = {}", self.code, self.message)?;
        match self.rollback_message.as_str() {
            "" => Ok(()),
            rollback => write!(f, ", rollbackMessage: {rollback}"),
        }
    }
}

impl std::error::Error for ExpandError {}

impl Replica {
    /// Grows the volume, on top of a snapshot that tells of it. Older layers keep their size. Does
    /// nothing if it is not open.
    ///
    /// # Errors
    /// With what has become of the replica.
    pub fn expand(&self, size: i64) -> Result<(), ExpandError> {
        let Some(_work) = self.begin().map_err(ExpandError::refused)? else { return Ok(()) };
        let size = u64::try_from(size)
            .map_err(|_| ExpandError::refused(format!("cannot expand replica to size {size}")))?;
        let store = self.take_over().map_err(ExpandError::refused)?;
        self.expand_open(&store, size)
    }

    pub(super) fn expand_open(&self, store: &Store, size: u64) -> Result<(), ExpandError> {
        if !size.is_multiple_of(BLOCK_BYTES) {
            return Err(ExpandError::refused(format!(
                "failed to expand replica to size {size}, because it is not a multiple of \
                 volume sector size {BLOCK_BYTES}"
            )));
        }
        let facts = self.facts().map_err(ExpandError::refused)?;
        if size < facts.size() {
            let text = format!("cannot expand replica to a smaller size {size}");
            return Err(ExpandError::refused(text));
        }
        if size == facts.size() {
            return Ok(());
        }
        let name = names::expansion_snapshot(size);
        self.clean_up(store, &name).map_err(ExpandError::unchanged)?;
        let labels = Labels::from([(EXPANSION_LABEL.to_owned(), size.to_string())]);
        let options = SnapshotOptions { labels, system: true, created_ns: Some(time::now_ns()) };
        self.freeze(store, &name, &options).map_err(ExpandError::unchanged)?;
        let grown = store.resize_volume(&self.options.volume, size);
        if let Err(e) = grown {
            return Err(self.take_back(store, &name, &e));
        }
        self.repeat_in_meta();
        log::info("expand", &[("volume", &self.options.volume), ("size", &size)]);
        Ok(())
    }

    /// Removes the snapshot of an expansion to this size that was cut off: the volume is smaller,
    /// so it did not succeed.
    fn clean_up(&self, store: &Store, name: &str) -> Result<(), Error> {
        let disks = self.disks()?;
        let leftover = disks.get_key_value(&names::snapshot_disk(name));
        match leftover {
            Some((at, disk)) if !disk.user_created && disk.labels.contains_key(EXPANSION_LABEL) => {
                self.drop_snapshot(store, at, name, &disk.children)
            }
            _ => Ok(()),
        }
    }

    /// Makes everything as it was before the snapshot.
    fn take_back(&self, store: &Store, name: &str, error: &Error) -> ExpandError {
        log::warn("expand", &[("volume", &self.options.volume), ("error", error)]);
        let rollback = store.delete_snapshot(&self.options.volume, name).err();
        self.repeat_in_meta();
        ExpandError {
            code: match rollback {
                None => ExpandCode::FunctionFailedRollbackSucceeded,
                Some(_) => ExpandCode::FunctionFailedRollbackFailed,
            },
            message: format!("failed to create new disk {name}: {error}"),
            rollback_message: rollback.map(|e| e.to_string()).unwrap_or_default(),
        }
    }
}
