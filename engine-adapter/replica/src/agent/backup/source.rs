//! A snapshot of the replica, as a backup reads it.

use crate::agent::peer::layer::{Layer, State};
use crate::agent::shelf::{Flattened, no_disk};
use crate::agent::uses::interrupted;
use dbs_backup::Source;
use dbs_backup::config::{BackupConfig, CREATED, Map};
use dbs_core::info::LayerInfo;
use dbs_core::{Error, ErrorKind, Result, Store};
use longhorn_wire::{names, time};
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

/// Ranges of a map asked for at once.
const RANGES: usize = 4096;

/// A snapshot that is backed up, as long as the volume is now.
pub struct SnapshotSource {
    volume: String,
    snapshot: String,
    /// Its identity: names are given anew.
    uuid: String,
    /// Rebuilds of the volume that had begun when it was opened.
    rebuilds: u64,
    created: String,
    size: u64,
    held: RwLock<Option<Arc<Held>>>,
}

/// What keeps the store open, and the snapshot from being deleted.
struct Held {
    store: Store,
    content: Flattened,
}

impl SnapshotSource {
    /// Opens it, with what comes from a backing file or without.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while the volume is rebuilt; those of the store.
    pub fn open(store: Store, volume: &str, snapshot: &str, with_file: bool) -> Result<Self> {
        let layers = store.layers(volume)?;
        let found = find(&layers, snapshot).filter(|_| !names::is_staging(snapshot));
        let layer = found.ok_or_else(|| no_disk(&names::snapshot_disk(snapshot)))?;
        let content = Flattened::open(&store, volume, snapshot, with_file)?;
        // From here on it is not deleted. Which one it is, its name must not have said of another one.
        if uuid_of(&store, volume, snapshot)?.as_ref() != Some(&layer.uuid) {
            let text = format!("snapshot {snapshot} is being replaced: try again");
            return Err(Error::busy(text));
        }
        // Asked before whether one is under way: one that begins in between is one more.
        let rebuilds = store.snapshot_info(volume, snapshot)?.rebuilds;
        if store.volume_info(volume)?.rebuilding {
            return Err(Error::busy("the replica is rebuilding, and its snapshots are incomplete"));
        }
        Ok(Self {
            rebuilds,
            volume: volume.to_owned(),
            snapshot: snapshot.to_owned(),
            uuid: layer.uuid.clone(),
            created: time::text(layer.created_ns),
            size: Layer::size(&content),
            held: RwLock::new(Some(Arc::new(Held { store, content }))),
        })
    }

    /// What the backup says of it, for the next one: when it was created, which is the same on all replicas, and another time
    /// for a snapshot that has been given a name again. No label: those are all the user's.
    pub fn parameters(&self) -> Map {
        let created = Some(self.created.clone()).filter(|created| !created.is_empty());
        created.map(|created| (CREATED.to_owned(), created)).into_iter().collect()
    }

    /// Lets go of the store: from now on nothing can be read.
    pub fn release(&self) {
        *self.held.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn held(&self) -> Result<Arc<Held>> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner).clone();
        held.ok_or_else(interrupted)
    }

    /// The identity of the snapshot of an earlier backup, if that is the very same as one that this snapshot builds on.
    ///
    /// Replicas know a snapshot by its name. After it was deleted, another one may have the name, and the difference to
    /// that is not the difference to the backup. The times tell them apart: that of the snapshot, which the backup
    /// has, or, if upstream has made the backup, that of the backup itself. Without a time it is not known.
    ///
    /// Nor is one that is marked as removed: what is discarded above it may have been taken from it, too, and is no
    /// difference to it then.
    fn base(&self, store: &Store, base: &BackupConfig) -> Result<Option<String>> {
        let layers = store.layers(&self.volume)?;
        let own = find(&layers, &self.snapshot).filter(|layer| layer.uuid == self.uuid);
        let mut at = own.and_then(|layer| layer.parent.as_deref());
        while let Some(layer) = at.and_then(|name| find(&layers, name)) {
            if layer.name.as_ref() == Some(&base.snapshot_name) {
                let created = time::text(layer.created_ns);
                let is_same = match base.told_created() {
                    Some(told) => told == created,
                    // Both are texts of whole seconds in UTC.
                    None => created <= base.snapshot_created_at,
                };
                let is_base = is_same && !created.is_empty() && !layer.retired;
                return Ok(is_base.then(|| layer.uuid.clone()));
            }
            at = layer.parent.as_deref();
        }
        Ok(None)
    }

    fn differences(
        &self,
        held: &Held,
        base: &str,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let points = (Some(base), Some(&*self.snapshot));
        let (mut at, end) = (0, held.content.shown());
        while at < end {
            let (ranges, told) =
                held.store.diff_part(&self.volume, points, (at, end - at), RANGES)?;
            for range in ranges {
                found(range.offset..range.offset + range.length)?;
            }
            at = told;
        }
        Ok(())
    }

    fn data(&self, held: &Held, found: &mut dyn FnMut(Range<u64>) -> Result<()>) -> Result<()> {
        let mut at = 0;
        while at < self.size {
            for run in held.content.map(at, self.size - at, RANGES)? {
                at = run.end();
                // Zeros hide a backing file.
                if run.state != State::Absent {
                    found(run.offset..run.end())?;
                }
            }
        }
        Ok(())
    }
}

impl Source for SnapshotSource {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Layer::read_at(&self.held()?.content, offset, buf)
    }

    fn ranges(
        &self,
        base: Option<&BackupConfig>,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<bool> {
        let held = self.held()?;
        let Some(base) = base else { return self.data(&held, found).map(|()| true) };
        // While it is open it is not deleted.
        let spec = format!("{}@{}", self.volume, base.snapshot_name);
        let is_none = |kind| matches!(kind, ErrorKind::NotFound | ErrorKind::Invalid);
        let opened = match held.store.volume(&spec) {
            Err(error) if is_none(error.kind()) => return Ok(false),
            opened => opened?,
        };
        let Some(uuid) = self.base(&held.store, base)? else { return Ok(false) };
        self.differences(&held, &base.snapshot_name, found)?;
        drop(opened);
        // A restore gives names to others. Then the differences may be those of others, and mean nothing.
        for (name, uuid) in [(&base.snapshot_name, &uuid), (&self.snapshot, &self.uuid)] {
            if uuid_of(&held.store, &self.volume, name)?.as_ref() != Some(uuid) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn check(&self) -> Result<()> {
        let now = self.held()?.store.snapshot_info(&self.volume, &self.snapshot)?;
        if now.uuid == self.uuid && now.rebuilds == self.rebuilds {
            return Ok(());
        }
        Err(Error::busy(format!(
            "the replica was rebuilt, or snapshot {} replaced, while it was backed up: begin again",
            self.snapshot
        )))
    }
}

fn uuid_of(store: &Store, volume: &str, snapshot: &str) -> Result<Option<String>> {
    Ok(find(&store.layers(volume)?, snapshot).map(|layer| layer.uuid.clone()))
}

fn find<'a>(layers: &'a [LayerInfo], name: &str) -> Option<&'a LayerInfo> {
    layers.iter().find(|layer| layer.name.as_deref() == Some(name))
}
