//! Layers that come in from other replicas, unseen until they are all there.
//!
//! A layer of a snapshot that is here already is changed in place, as its volume is being rebuilt
//! and nobody trusts it meanwhile. Others are staged as snapshots under a name of their own, which no
//! listing of disks shows. Descriptions are kept in memory. [`Replica::reload`] gives everything its
//! name and place; an interruption before costs no more than the descriptions, which are the least.

use super::Replica;
use super::change::created;
use crate::replica::meta::DiskMeta;
use dbs_core::info::LayerInfo;
use dbs_core::store::{Link, SnapshotOptions};
use dbs_core::volume::Layer;
use dbs_core::{Error, ErrorKind, Result, Store};
use dbs_service::log;
use longhorn_wire::names;
use std::collections::BTreeSet;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Steps of background work at once while a merge is waited for.
const WORK_STEPS: u64 = 64;
/// How long a merge that is waited for may make no progress...
pub(super) const MERGE_PATIENCE: Duration = Duration::from_secs(60);
/// ...and where a snapshot or a newer process waits for who waits.
pub(super) const SHORT_PATIENCE: Duration = Duration::from_secs(1);
/// Before the next attempt at it.
const MERGE_PAUSE: Duration = Duration::from_millis(5);
/// What errors say of it.
const CLONE_AGAIN: &str = "it was cloned again";

/// The receiving side of a replica.
#[derive(Debug)]
pub struct Incoming<'a> {
    pub(super) replica: &'a Replica,
}

impl Replica {
    /// The receiving side.
    #[must_use]
    pub fn incoming(&self) -> Incoming<'_> {
        Incoming { replica: self }
    }
}

impl Incoming<'_> {
    /// Size of what is here under this disk name: an older version, or what has come in of the
    /// present one, be it before an interruption.
    ///
    /// # Errors
    /// `Invalid` for a head, those of the store.
    pub fn existing(&self, disk: &str) -> Result<Option<u64>> {
        let snapshot = snapshot_of(disk)?;
        let layers = self.layers()?;
        Ok(self.coming(&layers, snapshot).map(|layer| layer.size))
    }

    /// The name in the store of a disk's layer, be it to be seen or coming in.
    ///
    /// # Errors
    /// `Invalid` for a head, those of the store; nothing if there is none.
    pub fn layer_name(&self, disk: &str) -> Result<Option<String>> {
        let snapshot = snapshot_of(disk)?;
        let layers = self.layers()?;
        let found = self.coming(&layers, snapshot).or_else(|| find(&layers, snapshot));
        Ok(found.and_then(|layer| layer.name.clone()))
    }

    /// The layer that content for a snapshot goes to. Of a clone that is never the one that is seen, which may be what
    /// an earlier clone brought.
    fn coming<'a>(&self, layers: &'a [LayerInfo], snapshot: &str) -> Option<&'a LayerInfo> {
        let beside = self.replica.pending().cloning && !self.replica.state().rebuilding;
        if beside { named(layers, &staged(snapshot)) } else { find(layers, snapshot) }
    }

    /// Opens the layer that is to become the one of this disk, `size` bytes long.
    ///
    /// # Errors
    /// `Invalid` if nothing may come in or for a head, `Exists` for a snapshot of a volume that is
    /// not being rebuilt, those of the store.
    pub fn begin(&self, disk: &str, size: u64) -> Result<Layer> {
        let snapshot = snapshot_of(disk)?;
        if self.existing(disk)?.is_some() {
            // May take long, and a snapshot of the volume is waited for only so long.
            self.replica.finish_merges(&self.ready()?, MERGE_PATIENCE)?;
        }
        let _work = self.replica.work();
        let store = self.ready()?;
        let volume = &self.replica.options.volume;
        let layers = self.layers_for(&store, snapshot)?;
        self.replica.pending().stale.insert(snapshot.to_owned());
        let Some(found) = self.coming(&layers, snapshot) else {
            let name = staged(snapshot);
            if named(&layers, snapshot).is_some() {
                self.check_unused(&store, &layers, snapshot)?;
                return self.stage_beside(&store, snapshot, size, CLONE_AGAIN);
            }
            let options = SnapshotOptions { system: true, ..Default::default() };
            store.insert_snapshot(volume, &name, size, &options)?;
            return store.layer(volume, Some(&name));
        };
        let name = found.name.clone().unwrap_or_default();
        if !names::is_staging(&name) && !self.replica.state().rebuilding {
            let text = format!("snapshot {disk} is already existing");
            return Err(Error::new(ErrorKind::Exists, text));
        }
        self.replica.finish_merges(&store, SHORT_PATIENCE)?;
        if found.size != size {
            let head = layers.iter().find(|layer| layer.name.is_none());
            let link = Link { size: Some(size), ..link_as_is(found) };
            store.relink(volume, &[link], head.and_then(|head| head.parent.as_deref()))?;
        }
        store.layer(volume, Some(&name))
    }

    /// All layers. What an attempt before has left beside a snapshot is none of this one's.
    fn layers_for(&self, store: &Store, snapshot: &str) -> Result<Vec<LayerInfo>> {
        let layers = self.layers()?;
        let left = self.replica.pending().cloning
            && self.replica.state().restoring.is_none()
            && [snapshot, &staged(snapshot)].iter().all(|name| named(&layers, name).is_some());
        if left {
            store.delete_snapshot(&self.replica.options.volume, &staged(snapshot))?;
            return self.layers();
        }
        Ok(layers)
    }

    /// Whether a snapshot is what an earlier clone brought, and nobody has used the volume since: one of several replicas
    /// may have failed, or this one before its head was put on it, and all are asked again.
    fn check_unused(&self, store: &Store, layers: &[LayerInfo], snapshot: &str) -> Result<()> {
        let cloned = |layer: &LayerInfo| !layer.user_created && layer.parent.is_none();
        let is_on_it =
            |layer: &LayerInfo| layer.name.is_some() && layer.parent.as_deref() == Some(snapshot);
        if named(layers, snapshot).is_some_and(cloned)
            && !layers.iter().any(is_on_it)
            && self.replica.is_head_empty(store)?
        {
            return Ok(());
        }
        let disk = names::snapshot_disk(snapshot);
        Err(Error::new(ErrorKind::Exists, format!("snapshot {disk} is already existing")))
    }

    /// Takes the description of a disk, to hold from the next reload on; of a head, only its parent
    /// counts, and nothing of one that has become a snapshot since: below that is what its sender
    /// meant, and the present head would lose the snapshot as its parent.
    ///
    /// # Errors
    /// `Invalid` if nothing may come in, or for a name that is no disk's.
    pub fn put_meta(&self, disk: &str, meta: DiskMeta) -> Result<()> {
        let _work = self.replica.work();
        self.ready()?;
        let present = self.replica.state().head;
        let mut pending = self.replica.pending();
        match names::head_number(disk) {
            Some(number) if number == present => pending.head = Some(meta),
            Some(_) => {
                let volume = &self.replica.options.volume;
                log::warn("incoming", &[("volume", volume), ("late", &disk)]);
            }
            None => {
                pending.described(snapshot_of(disk)?, meta);
            }
        }
        Ok(())
    }

    /// Gives up what has come in for a disk and is not seen yet; whether there was something.
    ///
    /// # Errors
    /// `Busy` while it is being received, those of the store.
    pub fn discard(&self, disk: &str) -> Result<bool> {
        let snapshot = snapshot_of(disk)?;
        let _work = self.replica.work();
        let described = self.replica.pending().snapshots.remove(snapshot).is_some();
        let (store, name) = (self.replica.store()?, staged(snapshot));
        let is_here = self.layers()?.iter().any(|layer| layer.name.as_deref() == Some(&name));
        if is_here {
            store.delete_snapshot(&self.replica.options.volume, &name)?;
        }
        Ok(is_here || described)
    }

    /// Lets a snapshot of another volume come in, beside what is here.
    ///
    /// # Errors
    /// `Invalid` if the replica is not open, those of the store.
    pub fn begin_clone(&self) -> Result<()> {
        let replica = self.replica;
        let Some(_work) = replica.begin()? else {
            return Err(Error::invalid("the replica is not open"));
        };
        self.mark()?;
        let mut pending = replica.pending();
        pending.forget();
        pending.cloning = true;
        Ok(())
    }

    /// Marks in the store that something comes in beside what is here. Called under `work`.
    pub(super) fn mark(&self) -> Result<Store> {
        let replica = self.replica;
        if replica.state().restoring.is_some() {
            return Err(Error::busy("a backup is being restored to the replica"));
        }
        let store = replica.take_over()?;
        if !replica.state().rebuilding {
            // It may still tell of a rebuild that ended when there was no room to write it. The mark
            // that follows would be taken for that rebuild's.
            replica.write_meta()?;
        }
        store.set_rebuilding(&replica.options.volume, true)?;
        replica.state().restored = None;
        Ok(store)
    }

    /// Ends that, and shows what has come in if it went well. Says whether the head is on it already: where an earlier
    /// clone was replaced. Who puts it there once more would drop what was written since.
    ///
    /// # Errors
    /// Those of the store; nothing is seen then.
    pub fn end_clone(&self, went_well: bool) -> Result<bool> {
        let replica = self.replica;
        if went_well && let Ok(store) = replica.store() {
            // What fails here fails again below.
            let _ = replica.finish_merges(&store, MERGE_PATIENCE);
        }
        let _work = replica.work();
        let store = replica.store().inspect_err(|_| {
            // Whoever has the store has cleared it of what was begun.
            replica.pending().forget();
            replica.state().restoring = None;
        })?;
        let shown = if went_well { self.show_clone(&store) } else { Ok(false) };
        replica.state().restoring = None;
        let named = replica.name_restored(&store);
        let cleared = named.and_then(|()| match replica.drop_staged(&store) {
            // Somebody reads what the clone has replaced: that goes at the next start.
            Err(error) if error.kind() == ErrorKind::Busy => {
                let volume = &replica.options.volume;
                log::warn("settle", &[("volume", volume), ("error", &error)]);
                Ok(())
            }
            dropped => dropped,
        });
        replica.pending().forget();
        let rebuilding = replica.state().rebuilding;
        if !rebuilding {
            store.set_rebuilding(&replica.options.volume, false)?;
        }
        shown.and_then(|headed| cleared.map(|()| headed))
    }

    /// Shows what a clone has brought. Until then what an earlier one brought stays, and is replaced in one step, with the
    /// head on it; says whether that was so.
    fn show_clone(&self, store: &Store) -> Result<bool> {
        let replica = self.replica;
        let again = replica.state().restoring.as_ref().map(|begun| begun.snapshot.clone());
        let Some(snapshot) = again else { return replica.show_incoming(store).map(|()| false) };
        self.check_unused(store, &self.layers()?, &snapshot)?;
        self.put_in_place(store, &snapshot)?;
        replica.headed_anew(None);
        let volume = &replica.options.volume;
        log::info("clone-again", &[("volume", volume), ("snapshot", &snapshot)]);
        Ok(true)
    }

    /// Makes what has come in durable.
    ///
    /// # Errors
    /// Those of the store.
    pub fn flush(&self) -> Result<()> {
        self.replica.store()?.flush()
    }

    fn layers(&self) -> Result<Vec<LayerInfo>> {
        self.replica.store()?.layers(&self.replica.options.volume)
    }

    /// The store, if something may come in.
    fn ready(&self) -> Result<Store> {
        let cloning = self.replica.pending().cloning;
        let may = {
            let state = self.replica.state();
            state.opened.is_some() && (state.rebuilding || cloning)
        };
        if !may {
            return Err(Error::invalid("cannot receive content: the replica is not being rebuilt"));
        }
        self.replica.take_over()
    }
}

impl Replica {
    /// Whether layers may come in in place of those that are here.
    #[must_use]
    pub fn is_rebuilding(&self) -> bool {
        self.state().rebuilding
    }

    /// Gives everything that has come in its name and place.
    ///
    /// # Errors
    /// `NotFound` for a description without its layer or a parent that is not here, `Invalid` if content and
    /// descriptions are of replicas whose trees differ, those of the store.
    pub(super) fn show_incoming(&self, store: &Store) -> Result<()> {
        let volume = &self.options.volume;
        let (described, head, frozen) = {
            let pending = self.pending();
            pending.check_parents()?;
            (pending.snapshots.clone(), pending.head.clone(), pending.frozen.clone())
        };
        if described.is_empty() && head.is_none() && frozen.is_none() {
            return Ok(());
        }
        self.state().restored = None;
        self.finish_merges(store, SHORT_PATIENCE)?;
        let layers = store.layers(volume)?;
        for name in described.keys() {
            let Some(layer) = find(&layers, name) else {
                let disk = names::snapshot_disk(name);
                let text = format!(
                    "the replica has a description of {disk}, but never received its content"
                );
                return Err(Error::not_found(text));
            };
            if let Some(staged) = layer.name.as_deref().filter(|name| names::is_staging(name)) {
                // Seen from here on, without a parent as yet.
                store.rename_snapshot(volume, staged, name)?;
            }
        }
        let mut links: Vec<_> = described.iter().map(|(name, meta)| link(name, meta)).collect();
        if let Some((name, meta)) = frozen
            && !described.contains_key(&name)
            && let Some(layer) = find(&layers, &name)
        {
            links.push(Link { parent: parent_of(&meta), ..link_as_is(layer) });
        }
        let present = layers.iter().find(|layer| layer.name.is_none());
        let present = present.and_then(|head| head.parent.clone());
        let parent = head.map_or(present, |head| parent_of(&head));
        store.relink(volume, &links, parent.as_deref())?;
        let count = links.len();
        log::info("incoming", &[("volume", volume), ("snapshots", &count)]);
        let mut pending = self.pending();
        pending.snapshots.clear();
        pending.parents.clear();
        pending.head = None;
        pending.frozen = None;
        let mut leaving = std::mem::take(&mut pending.leaving);
        drop(pending);
        leaving.retain(|name| !described.contains_key(name));
        self.drop_staged(store)?;
        self.drop_leaving(store, &leaving)?;
        self.set_dirty();
        Ok(())
    }

    fn drop_leaving(&self, store: &Store, leaving: &BTreeSet<String>) -> Result<()> {
        let disks = self.disks()?;
        for name in leaving {
            if let Some(disk) = disks.get(&names::snapshot_disk(name)) {
                let dropped =
                    self.drop_snapshot(store, &names::snapshot_disk(name), name, &disk.children);
                if let Err(e) = dropped {
                    // All is here; somebody reads it, and it goes with another reload.
                    let volume = &self.options.volume;
                    log::warn("remove", &[("volume", volume), ("snapshot", name), ("error", &e)]);
                    self.pending().leaving.insert(name.clone());
                }
            }
        }
        Ok(())
    }

    /// Deletes what was staged and is of no use any more.
    pub(super) fn drop_staged(&self, store: &Store) -> Result<()> {
        for layer in store.layers(&self.options.volume)? {
            if let Some(name) = layer.name.filter(|name| names::is_staging(name)) {
                store.delete_snapshot(&self.options.volume, &name)?;
            }
        }
        Ok(())
    }

    /// Waits until what deleted snapshots held has become part of their children: layers are
    /// compared and changed only then. With `patience` it may make no progress for so long.
    pub(super) fn finish_merges(&self, store: &Store, patience: Duration) -> Result<()> {
        let mut progress = Instant::now();
        while store.merging_remaining(&self.options.volume)? > 0 {
            if store.work(WORK_STEPS)?.done > 0 {
                progress = Instant::now();
            } else if progress.elapsed() < patience {
                // A read of any volume that has begun is to end first, or somebody else takes the last steps.
                sleep(MERGE_PAUSE);
            } else {
                let text = "deleted snapshots are not merged yet, and the merge makes no progress";
                return Err(Error::busy(text));
            }
        }
        Ok(())
    }
}

/// The snapshot of a disk that may come in.
pub(super) fn snapshot_of(disk: &str) -> Result<&str> {
    names::snapshot_name(disk)
        .filter(|name| !names::is_staging(name))
        .ok_or_else(|| Error::invalid(format!("{disk:?} is not the disk of a snapshot")))
}

pub(crate) fn staged(snapshot: &str) -> String {
    format!("{}{snapshot}", names::STAGING_PREFIX)
}

/// The layer of a snapshot, or the one that is to become it.
fn find<'a>(layers: &'a [LayerInfo], snapshot: &str) -> Option<&'a LayerInfo> {
    named(layers, snapshot).or_else(|| named(layers, &staged(snapshot)))
}

fn named<'a>(layers: &'a [LayerInfo], name: &str) -> Option<&'a LayerInfo> {
    layers.iter().find(|layer| layer.name.as_deref() == Some(name))
}

pub(super) fn parent_of(meta: &DiskMeta) -> Option<String> {
    names::snapshot_name(&meta.parent).map(str::to_owned)
}

/// What a description makes of a snapshot.
pub(crate) fn link(name: &str, meta: &DiskMeta) -> Link {
    let mut labels = meta.labels.clone();
    let created_ns = created(&meta.created, &mut labels);
    Link {
        snapshot: name.to_owned(),
        parent: parent_of(meta),
        size: None,
        user_created: meta.user_created,
        retired: meta.removed,
        created_ns,
        labels,
    }
}

fn link_as_is(layer: &LayerInfo) -> Link {
    Link {
        snapshot: layer.name.clone().unwrap_or_default(),
        parent: layer.parent.clone(),
        size: None,
        user_created: layer.user_created,
        retired: layer.retired,
        created_ns: layer.created_ns,
        labels: layer.labels.clone(),
    }
}
