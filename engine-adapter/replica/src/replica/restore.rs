//! Restores of backups: a layer that nobody sees is filled, and takes the place of the snapshot in one step.
//!
//! Meanwhile nothing else may come in, and nobody may use the volume. A replica that was closed, or whose store was with
//! another process, is not the one that the restore was begun on: the step is refused then.

use super::Replica;
use super::generation::Generation;
use super::incoming::{Incoming, MERGE_PATIENCE, SHORT_PATIENCE, link, snapshot_of, staged};
use super::meta::DiskMeta;
use super::pending::Pending;
use dbs_core::info::{Labels, LayerInfo, LayerState};
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::Layer;
use dbs_core::{Error, ErrorKind, Result, Store};
use dbs_service::log;
use longhorn_wire::names;

/// Ranges of a map asked for at once.
const RANGES: usize = 64;

/// A restore that is under way, or a clone that was asked for again, and what it was begun on.
#[derive(Debug)]
pub(super) struct Restoring {
    /// What it is, as errors name it.
    what: &'static str,
    /// The snapshot that is to have the content.
    pub(super) snapshot: String,
    /// The layer that is filled, by its identity, as those that follow.
    layer: String,
    head: String,
    /// The snapshot that has the name of the one that is restored.
    base: Option<String>,
    /// Writes to the volume until then, since the store was opened.
    writes: u64,
    /// The replica was closed, or its store went to another process.
    void: bool,
}

impl Incoming<'_> {
    /// Opens the layer that a backup is restored to, for this disk, beside what is here.
    ///
    /// # Errors
    /// `Invalid` if the replica is not open, or for an impossible name; `Busy` while something else comes in; those of
    /// the store. Nothing has changed then.
    pub fn begin_restore(&self, disk: &str) -> Result<Layer> {
        let snapshot = snapshot_of(disk)?;
        names::check_snapshot(snapshot, Labels::new())?;
        let replica = self.replica;
        let Some(_work) = replica.begin()? else {
            return Err(Error::invalid("the replica is not open"));
        };
        // What is with another process is not known here.
        replica.store()?;
        if replica.state().rebuilding {
            return Err(Error::busy("cannot do restore for normal rebuilding replica"));
        }
        if replica.pending().cloning {
            return Err(Error::busy("cannot do restore now since the replica is cloning"));
        }
        let store = self.mark()?;
        let staged = self.stage_restore(&store, snapshot);
        if staged.is_err() {
            replica.clear_restore(&store)?;
        }
        staged
    }

    fn stage_restore(&self, store: &Store, snapshot: &str) -> Result<Layer> {
        let replica = self.replica;
        replica.settle_staged(store)?;
        *replica.pending() = Pending::default();
        let size = store.volume_size(&replica.options.volume)?;
        self.stage_beside(store, snapshot, size, "a backup was restored")
    }

    /// Opens a layer that is to take the place of a snapshot in one step ([`Incoming::put_in_place`]), beside what is here.
    pub(super) fn stage_beside(
        &self,
        store: &Store,
        snapshot: &str,
        size: u64,
        what: &'static str,
    ) -> Result<Layer> {
        let replica = self.replica;
        let volume = &replica.options.volume;
        let name = staged(snapshot);
        // As upstream's, of which nothing is known but the content.
        let created_ns = Some(0);
        let options = SnapshotOptions { system: true, created_ns, ..Default::default() };
        store.insert_snapshot(volume, &name, size, &options)?;
        let layer = store.layer(volume, Some(&name))?;
        let layers = store.layers(volume)?;
        let uuid = |name: Option<&str>| find(&layers, name).map(|layer| layer.uuid.clone());
        let restoring = Restoring {
            what,
            snapshot: snapshot.to_owned(),
            layer: uuid(Some(&name)).unwrap_or_default(),
            head: uuid(None).unwrap_or_default(),
            base: uuid(Some(snapshot)),
            writes: replica.writes(store),
            void: false,
        };
        replica.state().restoring = Some(restoring);
        Ok(layer)
    }

    /// Gives up what is being restored; nothing if nothing is, or if the store is elsewhere: who has it does so.
    ///
    /// # Errors
    /// Those of the store; it goes later then.
    pub fn give_up_restore(&self) -> Result<()> {
        let replica = self.replica;
        let _work = replica.work();
        let begun = replica.state().restoring.take();
        match replica.owned().filter(|_| begun.is_some()) {
            // That ends with the staged layers, too.
            Some(_) if replica.state().rebuilding => Ok(()),
            Some(store) => replica.clear_restore(&store),
            None => Ok(()),
        }
    }

    /// Makes what was restored the snapshot of this disk, durably and in one step: of an older one of that name, what was
    /// restored is the difference if it is `onto` that, and else the successor, with a new head.
    ///
    /// The step is the one that puts the head on what was restored. Names follow; if that is cut off, it is done when
    /// the replica is started again, or restored again (`settle_staged`).
    ///
    /// # Errors
    /// `Invalid` if the replica was closed or its store elsewhere meanwhile, or if somebody has used the volume; those of
    /// the store.
    pub fn end_restore(&self, disk: &str, onto: bool) -> Result<()> {
        let snapshot = snapshot_of(disk)?;
        let replica = self.replica;
        if onto {
            // May take long, and a snapshot of the volume is waited for only so long.
            replica.finish_merges(&replica.store()?, MERGE_PATIENCE)?;
        }
        let _work = replica.work();
        // Nothing is taken back from another process for this.
        let (store, volume) = (replica.store()?, &replica.options.volume);
        let staged = staged(snapshot);
        store.flush()?;
        let restored = if onto {
            replica.finish_merges(&store, SHORT_PATIENCE)?;
            let restored = self.check_restore(&store, snapshot, onto)?;
            replica.note_generation(Generation::change);
            let meta = DiskMeta { parent: disk.to_owned(), ..DiskMeta::default() };
            store.relink(volume, &[link(&staged, &meta)], Some(&staged))?;
            replica.state().restoring = None;
            restored
        } else {
            self.put_in_place(&store, snapshot)?
        };
        // Where that fails the mark stays, and the next start does it.
        let settled = replica.clear_restore(&store);
        replica.headed_anew(None);
        settled?;
        replica.state().restored = Some(restored);
        Ok(())
    }

    /// Puts the head on the layer that was filled for a snapshot; its identity. Names follow ([`Replica::settle_staged`]).
    pub(super) fn put_in_place(&self, store: &Store, snapshot: &str) -> Result<String> {
        let replica = self.replica;
        let filled = self.check_restore(store, snapshot, false)?;
        replica.note_generation(Generation::change);
        store.rollback_keeping_size(&replica.options.volume, &staged(snapshot))?;
        replica.state().restoring = None;
        Ok(filled)
    }

    /// The identity of the layer that was filled, if everything is as it was when the restore was begun.
    fn check_restore(&self, store: &Store, snapshot: &str, onto: bool) -> Result<String> {
        let replica = self.replica;
        let layers = store.layers(&replica.options.volume)?;
        let is_empty = !onto || replica.is_head_empty(store)?;
        let writes = replica.writes(store);
        let state = replica.state();
        let what = state.restoring.as_ref().map_or("a backup was restored", |begun| begun.what);
        let begun = state.restoring.as_ref().filter(|begun| !begun.void);
        let Some(begun) = begun.filter(|_| state.opened.is_some() && !state.rebuilding) else {
            return Err(Error::invalid(format!("the replica was closed while {what}")));
        };
        let has = |name: Option<&str>, uuid: &str| {
            find(&layers, name).is_some_and(|layer| layer.uuid == uuid)
        };
        let is_head = has(None, &begun.head) && writes == begun.writes;
        let is_based = || {
            begun.base.as_deref().is_some_and(|base| has(Some(snapshot), base))
                && find(&layers, None).and_then(|head| head.parent.as_deref()) == Some(snapshot)
        };
        if !(is_head && is_empty && has(Some(&staged(snapshot)), &begun.layer))
            || (onto && !is_based())
        {
            return Err(Error::invalid(format!("somebody has changed the volume while {what}")));
        }
        Ok(begun.layer.clone())
    }

    /// Whether the volume still is what was restored last, and the disk that restore's: neither written nor changed in
    /// another way, nor with another process since.
    ///
    /// # Errors
    /// `Invalid` for a head; those of the store.
    pub fn is_as_restored(&self, disk: &str) -> Result<bool> {
        let snapshot = snapshot_of(disk)?;
        let replica = self.replica;
        let _work = replica.work();
        let store = replica.store()?;
        let layers = store.layers(&replica.options.volume)?;
        let restored = replica.state().restored.clone();
        let is_that = |layer: &LayerInfo| restored.as_ref() == Some(&layer.uuid) && !layer.retired;
        let parent = find(&layers, None).and_then(|head| head.parent.as_deref());
        let is_there = find(&layers, Some(snapshot)).is_some_and(is_that);
        Ok(is_there && parent == Some(snapshot) && replica.is_head_empty(&store)?)
    }
}

impl Replica {
    /// A restore that is under way does not come to its step any more.
    pub(super) fn void_restore(&self) {
        if let Some(restoring) = &mut self.state().restoring {
            restoring.void = true;
        }
    }

    /// Ends a restore in the store; the mark stays if that fails.
    fn clear_restore(&self, store: &Store) -> Result<()> {
        self.settle_staged(store)?;
        store.set_rebuilding(&self.options.volume, false)
    }

    /// Ends what was begun with staged snapshots: the one that the head is on was restored, and gets its name. Others are
    /// of no use any more.
    pub(super) fn settle_staged(&self, store: &Store) -> Result<()> {
        self.name_restored(store)?;
        self.drop_staged(store)
    }

    /// Ends at a start what was begun with staged snapshots: all but a rebuild, which goes on with what has come in. `cut_off`
    /// says that the store has the mark of it.
    pub(super) fn settle_begun(
        &self,
        store: &Store,
        rebuilding: bool,
        cut_off: bool,
    ) -> Result<()> {
        let volume = &self.options.volume;
        let settled = match rebuilding {
            true => self.name_restored(store),
            false => self.settle_staged(store),
        };
        match settled {
            Ok(()) if cut_off => store.set_rebuilding(volume, false),
            Ok(()) => Ok(()),
            // Somebody still has a layer that nobody sees: it goes, with the mark, at the next start.
            Err(e) if !cut_off || e.kind() == ErrorKind::Busy => {
                log::warn("settle", &[("volume", volume), ("error", &e)]);
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Gives the staged snapshot that the head is on its name, in place of the one that has it.
    pub(super) fn name_restored(&self, store: &Store) -> Result<()> {
        let volume = &self.options.volume;
        let layers = store.layers(volume)?;
        let restored = find(&layers, None).and_then(|head| head.parent.as_deref());
        if let Some((restored, name)) =
            restored.and_then(|staged| Some((staged, staged.strip_prefix(names::STAGING_PREFIX)?)))
        {
            if find(&layers, Some(name)).is_some() {
                // Somebody may be reading it: a name can be taken from it all the same.
                let other = format!("{}{}", names::STAGING_PREFIX, longhorn_wire::time::now_ns());
                store.rename_snapshot(volume, name, &other)?;
            }
            store.rename_snapshot(volume, restored, name)?;
            log::info("restored", &[("volume", volume), ("snapshot", &name)]);
        }
        Ok(())
    }

    /// Whether the head holds nothing: neither data nor zeros.
    pub(super) fn is_head_empty(&self, store: &Store) -> Result<bool> {
        let head = store.layer(&self.options.volume, None)?;
        let (mut at, end) = (0, head.size());
        while at < end {
            let ranges = head.map(at, end - at, RANGES)?;
            let Some(last) = ranges.last() else { break };
            at = last.offset + last.length;
            if ranges.iter().any(|range| range.state != LayerState::Absent) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes to the volume since the store was opened.
    fn writes(&self, store: &Store) -> u64 {
        let all = store.volume_io();
        let found = all.iter().find(|(volume, _)| volume.name == self.options.volume);
        found.map_or(0, |(_, io)| io.writes)
    }
}

fn find<'a>(layers: &'a [LayerInfo], name: Option<&str>) -> Option<&'a LayerInfo> {
    layers.iter().find(|layer| layer.name.as_deref() == name)
}
