//! What a replica remembers of what comes in: descriptions, and how far a rebuild is.

use super::Replica;
use super::incoming::{Incoming, parent_of, snapshot_of};
use super::meta::DiskMeta;
use dbs_core::info::LayerInfo;
use dbs_core::{Error, Result};
use longhorn_wire::names;
use longhorn_wire::proto::ptypes;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

/// What has come in besides layers.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Descriptions of snapshots, by their names.
    pub snapshots: BTreeMap<String, DiskMeta>,
    /// Description of the head.
    pub head: Option<DiskMeta>,
    /// Snapshot that the described head has become since, with that description.
    pub frozen: Option<(String, DiskMeta)>,
    /// Snapshots that are to go once what comes in has left them.
    pub leaving: BTreeSet<String>,
    /// A snapshot of another volume is coming in, into a volume that is not being rebuilt.
    pub cloning: bool,
    /// How far a rebuild is since it began, or since the replica was opened.
    filling: Filling,
    /// What each snapshot lies on, as whoever sent its content or its description has it.
    pub parents: BTreeMap<String, BTreeSet<Option<String>>>,
    /// Snapshots of a replica that is being rebuilt whose content is not known to be that of the volume: what was
    /// here when it was marked or opened, and has not come in since.
    pub stale: BTreeSet<String>,
    /// The head is from before that, too: the snapshot that it becomes is another one.
    head_stale: bool,
}

/// How far a rebuild is.
#[derive(Debug, Default)]
enum Filling {
    /// Nothing has come in.
    #[default]
    Empty,
    /// Layers are coming in, or some did not come.
    Coming(Arc<()>),
    /// All layers are here, and not seen yet.
    Here,
    /// The volume has them.
    Seen,
}

/// Layers that are coming in, all that a rebuild is to bring.
#[derive(Debug)]
pub struct Fill(Weak<()>);

impl Pending {
    /// The head has become this snapshot: what is to be below it is to be below the snapshot now, and
    /// the new head stays on that.
    pub fn head_frozen(&mut self, snapshot: &str) {
        if std::mem::take(&mut self.head_stale) {
            self.stale.insert(snapshot.to_owned());
        }
        if let Some(head) = self.head.take() {
            self.frozen = Some((snapshot.to_owned(), head));
        }
    }

    /// Of a replica that is marked, or opened with the mark: nothing of these layers has come in.
    fn of_marked(layers: &[LayerInfo], head_stale: bool) -> Self {
        let names = layers.iter().filter_map(|layer| layer.name.as_deref());
        let bare = |name: &str| name.strip_prefix(names::STAGING_PREFIX).unwrap_or(name).to_owned();
        Self { stale: names.map(bare).collect(), head_stale, ..Self::default() }
    }

    /// Forgets what has come in, but not what has not.
    pub fn forget(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        *self = Self { stale, head_stale: self.head_stale, ..Self::default() };
    }

    /// A snapshot's description has come in.
    pub fn described(&mut self, snapshot: &str, meta: DiskMeta) {
        // Else one that is sent anew takes the place of another.
        if let Filling::Coming(_) = self.filling {
            self.lies_on(snapshot, &meta);
        }
        self.snapshots.insert(snapshot.to_owned(), meta);
    }

    /// Notes what somebody who has sent something of a snapshot has below it.
    fn lies_on(&mut self, snapshot: &str, meta: &DiskMeta) {
        self.parents.entry(snapshot.to_owned()).or_default().insert(parent_of(meta));
    }

    /// Refuses content and descriptions that do not belong together: of two replicas one has merged a snapshot
    /// into the next, and the other has not.
    pub fn check_parents(&self) -> Result<()> {
        let odd = self.parents.iter().find(|(_, parents)| parents.len() > 1);
        let Some((name, parents)) = odd else { return Ok(()) };
        let named =
            |parent: &Option<String>| parent.clone().unwrap_or_else(|| "nothing".to_owned());
        let parents: Vec<_> = parents.iter().map(named).collect();
        Err(Error::invalid(format!(
            "{} came in from replicas that differ in what it lies on ({}): purge the volume's snapshots, and rebuild \
             the replica again",
            names::snapshot_disk(name),
            parents.join(", ")
        )))
    }

    /// The head is gone, and what was to be below it concerns nobody: the new one is where it should be.
    pub fn head_dropped(&mut self) {
        self.head = None;
    }
}

impl Incoming<'_> {
    /// Begins to bring all that a rebuild is to bring.
    #[must_use]
    pub fn begin_fill(&self) -> Fill {
        let begun = Arc::new(());
        let fill = Fill(Arc::downgrade(&begun));
        let mut pending = self.replica.pending();
        pending.filling = Filling::Coming(begun);
        pending.parents.clear();
        fill
    }

    /// The content of a disk has come in, or was found to be what it is; from a replica that has this description
    /// of it, if that is known.
    ///
    /// # Errors
    /// `Invalid` for a head.
    pub fn came_in(&self, disk: &str, meta: Option<&DiskMeta>) -> Result<()> {
        let snapshot = snapshot_of(disk)?;
        let mut pending = self.replica.pending();
        // The mark may be another one since.
        if let Filling::Coming(_) = pending.filling {
            pending.stale.remove(snapshot);
            if let Some(meta) = meta {
                pending.lies_on(snapshot, meta);
            }
        }
        Ok(())
    }

    /// All of it has come in. It is of no use to a rebuild that began later, nor to a replica that was closed.
    pub fn end_fill(&self, fill: &Fill) {
        let mut pending = self.replica.pending();
        if let Filling::Coming(begun) = &pending.filling
            && fill.0.ptr_eq(&Arc::downgrade(begun))
        {
            pending.filling = Filling::Here;
        }
    }
}

impl Replica {
    pub(super) fn pending(&self) -> MutexGuard<'_, Pending> {
        // Nothing that can panic leaves it inconsistent.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a replica with these disks that is being rebuilt lacks; nothing if it has all that it was to get.
    pub(super) fn unfilled(&self, disks: &HashMap<String, ptypes::DiskInfo>) -> String {
        let pending = self.pending();
        let text = match pending.filling {
            Filling::Empty => "no layers have come in since its rebuild began",
            Filling::Coming(_) => "not all layers have come in",
            Filling::Here => "the layers that have come in are not seen before the next reload",
            Filling::Seen => {
                // Whoever had layers sent may have had a list from before, of another state of the volume.
                let stale = pending.stale.iter().map(|name| names::snapshot_disk(name));
                let stale = stale.into_iter().find(|disk| disks.contains_key(disk));
                return stale.map_or_else(String::new, |disk| {
                    format!("{disk} has not come in since its rebuild began")
                });
            }
        };
        text.to_owned()
    }

    /// It is marked as being rebuilt: nothing that it has counts before it has come in. The head counts if it was
    /// made after an earlier mark, and has got every write since.
    pub(super) fn distrust(&self, layers: &[LayerInfo], was_marked: bool) {
        let mut pending = self.pending();
        let head_stale = !was_marked || pending.head_stale;
        *pending = Pending::of_marked(layers, head_stale);
    }

    /// What has come in is part of the volume.
    pub(super) fn see_filled(&self) {
        let mut pending = self.pending();
        if matches!(pending.filling, Filling::Here) {
            pending.filling = Filling::Seen;
        }
    }
}
