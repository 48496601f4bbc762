//! Marking and removing disks.

use super::Replica;
use super::view::Disk;
use dbs_core::{Error, Result, Store};
use dbs_service::log;
use longhorn_sync::image::Record;
use longhorn_wire::names;
use longhorn_wire::proto::ptypes::PrepareRemoveAction;
use std::collections::BTreeMap;

impl Replica {
    /// Marks a disk as removed, given by its disk name or its snapshot's. One that is unknown is
    /// removed already. Does nothing if it is not open.
    ///
    /// # Errors
    /// `Invalid` for the head, those of the store.
    pub fn mark_removed(&self, name: &str) -> Result<()> {
        let Some(_work) = self.begin()? else { return Ok(()) };
        let store = self.take_over()?;
        self.check_taken()?;
        let disks = self.disks()?;
        let Some((name, disk)) = find(&disks, name) else { return Ok(()) };
        let Some(snapshot) = &disk.snapshot else {
            return Err(Error::invalid("cannot mark the active differencing disk as removed"));
        };
        if !disk.removed {
            store.set_retired(&self.options.volume, snapshot, true)?;
            log::info("mark-removed", &[("volume", &self.options.volume), ("disk", &name)]);
        }
        Ok(())
    }

    /// What is to be done to remove a marked disk, given by its disk name or its snapshot's; nothing
    /// for an unknown one, or if it is not open.
    ///
    /// # Errors
    /// `Invalid` for the head or a disk that is not marked.
    pub fn prepare_remove(&self, name: &str) -> Result<Vec<PrepareRemoveAction>> {
        let Some(_work) = self.begin()? else { return Ok(Vec::new()) };
        self.check_taken()?;
        let disks = self.disks()?;
        let Some((name, disk)) = find(&disks, name) else { return Ok(Vec::new()) };
        if disk.snapshot.is_none() {
            return Err(Error::invalid("cannot delete the active differencing disk"));
        }
        if !disk.removed {
            return Err(Error::invalid(format!("disk {name} hasn't been marked as removed")));
        }
        let action = |action: &str, target: &str| PrepareRemoveAction {
            action: action.to_owned(),
            source: name.to_owned(),
            target: target.to_owned(),
        };
        Ok(match disk.children.as_slice() {
            [] => vec![action("remove", "")],
            [child] if disks.get(child).is_some_and(|child| child.snapshot.is_none()) => {
                vec![action("prune", child)]
            }
            [child] => vec![action("coalesce", child), action("replace", child)],
            _ => Vec::new(),
        })
    }

    /// Removes a disk, given by its disk name; what it holds goes to its child, in the background.
    /// With `force` also one with several children; during a rebuild that goes with the next reload, which puts them
    /// elsewhere. One that is unknown is removed already. Does nothing if it is not open.
    ///
    /// # Errors
    /// `Invalid` for the head and, without `force`, for several children; those of the store.
    pub fn remove(&self, name: &str, force: bool) -> Result<()> {
        let Some(_work) = self.begin()? else { return Ok(()) };
        let store = self.take_over()?;
        self.check_taken()?;
        let disks = self.disks()?;
        let Some(disk) = disks.get(name) else { return Ok(()) };
        let Some(snapshot) = &disk.snapshot else {
            return Err(Error::invalid("cannot delete the active differencing disk"));
        };
        if !force {
            check_children(name, disk)?;
        }
        if self.state().rebuilding && disk.children.len() > 1 {
            // Deleted, it would stay below all of them, unseen, and no layer on it could be changed. In the tree that comes
            // in nothing builds on it.
            self.pending().leaving.insert(snapshot.clone());
            log::info("remove", &[("volume", &self.options.volume), ("leaving", snapshot)]);
            return Ok(());
        }
        self.drop_snapshot(&store, name, snapshot, &disk.children)
    }

    /// Makes `target` what `source`, its parent, shows together with it; `source` goes. Does nothing
    /// if it is not open.
    ///
    /// # Errors
    /// `Invalid` for the head as target, and if target is not the only child of source; `NotFound`.
    pub fn replace(&self, target: &str, source: &str) -> Result<()> {
        let Some(_work) = self.begin()? else { return Ok(()) };
        let store = self.take_over()?;
        self.check_taken()?;
        let disks = self.disks()?;
        if disks.get(target).is_some_and(|disk| disk.snapshot.is_none()) {
            return Err(Error::invalid("cannot replace the active differencing disk"));
        }
        let found = disks.get(source).and_then(|disk| Some((disk, disk.snapshot.as_deref()?)));
        let Some((disk, snapshot)) = found else {
            return Err(Error::not_found(format!("cannot find source of replacing: {source}")));
        };
        check_children(source, disk)?;
        if disk.children != [target] {
            let text = format!("cannot replace {target} with {source}, which is not its parent");
            return Err(Error::invalid(text));
        }
        self.drop_snapshot(&store, source, snapshot, &disk.children)
    }

    /// Deletes a snapshot. Its children's layers become more with it, so that checksums of them do
    /// not hold any more.
    pub(super) fn drop_snapshot(
        &self,
        store: &Store,
        disk: &str,
        snapshot: &str,
        children: &[String],
    ) -> Result<()> {
        for disk in children.iter().map(String::as_str).chain([disk]) {
            Record::remove(&self.options.dir.join(disk))?;
        }
        store.delete_snapshot(&self.options.volume, snapshot)?;
        self.state().marked = None;
        self.repeat_in_meta();
        log::info("remove", &[("volume", &self.options.volume), ("snapshot", &snapshot)]);
        Ok(())
    }
}

/// The disk of this name or of the snapshot of this name.
fn find<'a>(disks: &'a BTreeMap<String, Disk>, name: &str) -> Option<(&'a str, &'a Disk)> {
    let found = disks.get_key_value(name);
    let found = found.or_else(|| disks.get_key_value(&names::snapshot_disk(name)));
    found.map(|(name, disk)| (name.as_str(), disk))
}

fn check_children(name: &str, disk: &Disk) -> Result<()> {
    match disk.children.len() {
        0 | 1 => Ok(()),
        n => Err(Error::invalid(format!("cannot remove snapshot {name} with {n} children"))),
    }
}
