//! Growing a replica.

use super::Replica;
use dbs_core::info::Labels;
use dbs_core::store::SnapshotOptions;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, ErrorKind, Store};
use dbs_service::log;
use longhorn_wire::control::expansion::{ExpandCode, ExpandError};
use longhorn_wire::{names, time};
use std::fmt;

/// Label of the snapshot that an expansion takes first.
const EXPANSION_LABEL: &str = "replica-expansion";

/// Nothing was done.
fn refused(message: impl fmt::Display) -> ExpandError {
    ExpandError::new(ExpandCode::FunctionFailedWithoutRollback, message)
}

/// A step failed that does all or nothing; of a broken disk or store nobody knows.
fn unchanged(error: Error) -> ExpandError {
    match error.kind() {
        ErrorKind::Io | ErrorKind::Poisoned | ErrorKind::Elsewhere => refused(error),
        _ => ExpandError::new(ExpandCode::FunctionFailedRollbackSucceeded, error),
    }
}

impl Replica {
    /// Grows the volume, on top of a snapshot that tells of it. Older layers keep their size. Does
    /// nothing if it is not open.
    ///
    /// # Errors
    /// With what has become of the replica.
    pub fn expand(&self, size: i64) -> Result<(), ExpandError> {
        let Some(_work) = self.begin().map_err(refused)? else { return Ok(()) };
        let size = u64::try_from(size)
            .map_err(|_| refused(format!("cannot expand replica to size {size}")))?;
        let store = self.take_over().map_err(refused)?;
        self.expand_open(&store, size)
    }

    pub(super) fn expand_open(&self, store: &Store, size: u64) -> Result<(), ExpandError> {
        if !size.is_multiple_of(BLOCK_BYTES) {
            return Err(refused(format!(
                "failed to expand replica to size {size}, because it is not a multiple of \
                 volume sector size {BLOCK_BYTES}"
            )));
        }
        self.check_taken().map_err(unchanged)?;
        let facts = self.facts().map_err(refused)?;
        if size < facts.size() {
            let text = format!("cannot expand replica to a smaller size {size}");
            return Err(refused(text));
        }
        if size == facts.size() {
            return Ok(());
        }
        let present = facts.size();
        if !present.is_multiple_of(BLOCK_BYTES) {
            // A layer that ends within a block cannot have a larger one on it, and no rebuild would bring the two.
            return Err(refused(format!(
                "failed to expand replica of size {present}, because it is not a multiple of volume sector size \
                 {BLOCK_BYTES}"
            )));
        }
        let name = names::expansion_snapshot(size);
        self.clean_up(store, &name).map_err(unchanged)?;
        let labels = Labels::from([(EXPANSION_LABEL.to_owned(), size.to_string())]);
        let created_ns = Some(time::now_ns());
        let options = SnapshotOptions { labels, system: true, created_ns, ..Default::default() };
        self.freeze(store, &name, &options).map_err(unchanged)?;
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
