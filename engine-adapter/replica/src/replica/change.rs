//! Snapshot and revert.

use super::Replica;
use super::generation::Generation;
use super::view::{self, CREATED_LABEL};
use dbs_core::info::Labels;
use dbs_core::store::SnapshotOptions;
use dbs_core::{Error, ErrorKind, Result, Store};
use dbs_service::log;
use longhorn_wire::{names, time};

impl Replica {
    /// Freezes the head as a snapshot. Does nothing if it is not open.
    ///
    /// # Errors
    /// `Exists` with a text the engine knows, `Invalid` for too many snapshots, an impossible name or
    /// labels that are too long, `NoSpace`; after these nothing has changed. Others of the store.
    pub fn snapshot(
        &self,
        name: &str,
        user_created: bool,
        created: &str,
        labels: Labels,
    ) -> Result<()> {
        check_given(name, created)?;
        let Some(_work) = self.begin()? else { return Ok(()) };
        let store = self.take_over()?;
        let mut labels = labels;
        let created_ns = Some(self::created(created, &mut labels));
        let system = !user_created;
        let options = SnapshotOptions { labels, system, created_ns, ..Default::default() };
        self.freeze(&store, name, &options)?;
        log::info("snapshot", &[("volume", &self.options.volume), ("name", &name)]);
        Ok(())
    }

    /// Takes a snapshot, within the limits.
    pub(super) fn freeze(
        &self,
        store: &Store,
        name: &str,
        options: &SnapshotOptions,
    ) -> Result<()> {
        let facts = self.facts()?;
        let disks = facts.disks();
        if self.state().limits.max_count <= view::count_usage(&disks) {
            let active = view::live_chain(&disks, &facts.head_disk()).len();
            return Err(Error::invalid(format!("too many active disks: {active}")));
        }
        let disk = names::snapshot_disk(name);
        let existing =
            || Error::new(ErrorKind::Exists, format!("snapshot {disk} is already existing"));
        if disks.contains_key(&disk) {
            return Err(existing());
        }
        names::check_snapshot(name, options.labels.clone())?;
        store.create_snapshot(&self.options.volume, name, options).map_err(|e| match e.kind() {
            ErrorKind::Exists => existing(),
            _ => e.context(format!("failed to create new disk {name}")),
        })?;
        self.pending().head_frozen(name);
        self.headed_anew(Some(String::new()));
        Ok(())
    }

    /// Puts a new head on a snapshot, given by its disk name; the old one's content is gone. Does
    /// nothing if it is not open.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` for a removed one, `NoSpace`; after these nothing has changed. Others of the
    /// store.
    pub fn revert(&self, disk: &str, created: &str) -> Result<()> {
        self.revert_as(disk, created, None)
    }

    /// As [`Replica::revert`]; `revert` names it, the same on all replicas of the volume.
    ///
    /// # Errors
    /// As [`Replica::revert`].
    pub fn revert_as(&self, disk: &str, created: &str, revert: Option<String>) -> Result<()> {
        check_given(disk, created)?;
        let Some(_work) = self.begin()? else { return Ok(()) };
        let store = self.take_over()?;
        self.check_taken()?;
        let disks = self.disks()?;
        let found = disks.get(disk).and_then(|found| Some((found, found.snapshot.as_deref()?)));
        let Some((target, snapshot)) = found else {
            return Err(Error::not_found(format!(
                "cannot revert to disk file {disk} since it's not in the disk chain"
            )));
        };
        if target.removed {
            return Err(Error::invalid(format!(
                "cannot revert to disk file {disk} since it's already marked as removed"
            )));
        }
        let dirty = self.state().opened.as_ref().is_some_and(|opened| opened.dirty);
        self.note_generation(Generation::change);
        store.rollback_keeping_size(&self.options.volume, snapshot)?;
        self.state().restored = None;
        self.pending().head_dropped();
        self.headed_anew(revert);
        // Upstream's state does not change with it.
        if let Some(opened) = &mut self.state().opened {
            opened.dirty = dirty;
        }
        log::info("revert", &[("volume", &self.options.volume), ("disk", &disk)]);
        Ok(())
    }

    /// Names the head, the same on all replicas of the volume, if it is not known what made it: from here on it is told
    /// from one that a revert made.
    ///
    /// # Errors
    /// `Busy` once the store has gone to a newer process.
    pub fn name_head(&self, name: String) -> Result<()> {
        let Some(_work) = self.begin()? else { return Ok(()) };
        if self.owned().is_some() && self.state().revert.is_none() {
            self.state().revert = Some(name);
            self.repeat_in_meta();
        }
        Ok(())
    }

    /// There is a new, empty head; and the revert that made it, none, or nothing if that is not known.
    pub(super) fn headed_anew(&self, revert: Option<String>) {
        {
            let mut state = self.state();
            state.head += 1;
            state.revert = revert;
            state.marked = None;
        }
        self.set_dirty();
        self.repeat_in_meta();
    }
}

/// A creation time for the store. Whole seconds of UTC come back from it as they were; any other text
/// is kept as a label. No text is no time.
pub(super) fn created(text: &str, labels: &mut Labels) -> u64 {
    labels.remove(CREATED_LABEL);
    let ns = time::parse(text).unwrap_or(0);
    if time::text(ns) != text {
        labels.insert(CREATED_LABEL.to_owned(), text.to_owned());
    }
    ns
}

/// Refuses what upstream refuses before it looks at the replica.
fn check_given(name: &str, created: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::invalid("cannot accept empty snapshot name"));
    }
    if created.is_empty() {
        return Err(Error::invalid("need to specific created time"));
    }
    Ok(())
}
