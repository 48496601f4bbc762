//! The layers of a replica, as other replicas and long jobs see them.

use super::peer::layer::{DIGEST, Layer, LayerMut, Run, State, map_digest};
use crate::replica::meta::DiskMeta;
use crate::replica::{Disk, Replica};
use dbs_core::info::{self, LayerState, MapRange, RangeState};
use dbs_core::{Error, Result, Store, Volume, volume};
use dbs_service::log;
use longhorn_sync::image::{Checksum, Interval, Record, Source, layer_stamp};
use longhorn_wire::names;
use longhorn_wire::proto::dbs::{LayerInfo, LayersRequest};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// The layers of a replica. All calls block.
pub struct Shelf {
    replica: Arc<Replica>,
}

impl Shelf {
    /// Of this replica.
    #[must_use]
    pub fn new(replica: Arc<Replica>) -> Self {
        Self { replica }
    }

    /// The store, the snapshot that a disk is, and its layer.
    fn find(&self, disk: &str) -> Result<(Store, String, info::LayerInfo)> {
        let store = self.replica.store()?;
        let Some(snapshot) = names::snapshot_name(disk).filter(|name| !names::is_staging(name))
        else {
            return Err(no_disk(disk));
        };
        let layers = store.layers(self.replica.volume_name())?;
        let found = layers.into_iter().find(|layer| layer.name.as_deref() == Some(snapshot));
        let layer = found.ok_or_else(|| no_disk(disk))?;
        Ok((store, snapshot.to_owned(), layer))
    }

    /// The path that a disk's image would have, beside which its checksum is kept.
    #[must_use]
    pub fn image(&self, disk: &str) -> PathBuf {
        self.replica.dir().join(disk)
    }

    /// The checksum on record for a snapshot's layer, if it is current.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn recorded(&self, disk: &str) -> Result<Option<Checksum>> {
        let stamp = self.layer_stamp(disk)?;
        let record = Record::load(&self.image(disk))?;
        let current = record.filter(|record| record.tells(&stamp));
        Ok(current.map(|record| record.to_checksum()))
    }

    /// As [`Shelf::recorded`]; a record that cannot be read is none.
    #[must_use]
    pub fn recorded_or_none(&self, disk: &str) -> Option<Checksum> {
        self.recorded(disk).unwrap_or_else(|error| {
            log::warn("checksum-record-ignored", &[("disk", &disk), ("error", &error)]);
            None
        })
    }

    /// The name in the store of a disk's layer, be it to be seen or coming in.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn layer_name(&self, disk: &str) -> Result<String> {
        self.replica.incoming().layer_name(disk)?.ok_or_else(|| no_disk(disk))
    }

    /// Records a layer's checksum as another replica has computed it, also of one that is not to
    /// be seen yet.
    ///
    /// # Errors
    /// `NotFound`, `Io`, `NoSpace`.
    pub fn record(&self, disk: &str, checksum: &Checksum) -> Result<()> {
        // Becoming visible does not change a layer.
        let name = self.layer_name(disk)?;
        let stamp = layer_stamp(&self.replica.store()?, self.replica.volume_name(), &name)?;
        let record = Record {
            method: checksum.method.clone(),
            checksum: checksum.value.clone(),
            change_time: stamp,
            ..Record::default()
        };
        record.store(&self.image(disk))
    }

    /// The digest of a layer's map.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn map_digest(&self, snapshot: &str) -> Result<[u8; DIGEST]> {
        let store = self.replica.store()?;
        map_digest(&StoreLayer(store.layer(self.replica.volume_name(), Some(snapshot))?))
    }

    /// Names the state of a snapshot's layer, for its checksum record.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn layer_stamp(&self, disk: &str) -> Result<String> {
        let (store, snapshot, _) = self.find(disk)?;
        layer_stamp(&store, self.replica.volume_name(), &snapshot)
    }

    /// Describes layers.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn describe(&self, request: &LayersRequest) -> Result<Vec<LayerInfo>> {
        let store = self.replica.store()?;
        let volume = self.replica.volume_name();
        let disks = self.replica.disks()?;
        let file = self.replica.backing_identity()?;
        let layers = store.layers(volume)?;
        let by_name: HashMap<_, _> =
            layers.iter().filter_map(|layer| Some((layer.name.as_deref()?, layer))).collect();
        let describe = |disk: &String| {
            let snapshot = names::snapshot_name(disk).unwrap_or_default();
            let (Some(found), Some(layer)) = (disks.get(disk), by_name.get(snapshot)) else {
                return Err(no_disk(disk));
            };
            let mut info = LayerInfo {
                disk: disk.clone(),
                size: layer.size,
                data_bytes: layer.data_bytes,
                stamp: self.stamp_of(&layers, layer, request.flattened).into(),
                meta: disk_meta(disk, found).to_bytes()?.into(),
                file: file.clone(),
                ..LayerInfo::default()
            };
            if request.flattened {
                info.size = store.volume_size(volume)?;
            } else if let Some(checksum) =
                request.checksums.then(|| self.recorded_or_none(disk)).flatten()
            {
                info.map_digest = self.map_digest(snapshot)?.to_vec().into();
                (info.checksum_method, info.checksum) = (checksum.method, checksum.value);
            }
            Ok(info)
        };
        request.disks.iter().map(describe).collect()
    }

    /// Opens a layer, or what one reads through it.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for what one reads through a snapshot that is marked as removed.
    pub fn open(&self, disk: &str, flattened: bool) -> Result<Arc<dyn Layer>> {
        let (store, snapshot, _) = self.find(disk)?;
        if flattened {
            return Ok(Arc::new(self.flattened(&snapshot, false)?));
        }
        let volume = self.replica.volume_name();
        Ok(Arc::new(StoreLayer(store.layer(volume, Some(&snapshot))?)))
    }

    /// Opens what one reads through a snapshot, with what comes from a file or without.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while it may be incomplete; `Invalid` if it is marked as removed.
    pub fn flattened(&self, snapshot: &str, with_file: bool) -> Result<Flattened> {
        if self.replica.is_rebuilding() {
            return Err(Error::busy("the replica is rebuilding, and its snapshots are incomplete"));
        }
        Flattened::open(&self.replica.store()?, self.replica.volume_name(), snapshot, with_file)
    }

    /// Names the state a layer is in.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn stamp(&self, disk: &str, flattened: bool) -> Result<Vec<u8>> {
        let (store, _, layer) = self.find(disk)?;
        Ok(self.stamp_of(&store.layers(self.replica.volume_name())?, &layer, flattened))
    }

    /// A layer changes when its parent is deleted, when it is pruned, or when it comes in anew, in a volume that is being
    /// rebuilt. How much it holds tells the latter two; elsewhere it means nothing: what it shares with a deleted
    /// parent counts twice until the two are merged. What one reads through a snapshot never changes before it is
    /// marked as removed, and then it is not opened.
    fn stamp_of(
        &self,
        layers: &[info::LayerInfo],
        layer: &info::LayerInfo,
        flattened: bool,
    ) -> Vec<u8> {
        let info::LayerInfo { uuid, size, data_bytes, parent, .. } = layer;
        if flattened {
            return uuid.clone().into_bytes();
        }
        let parent = parent.as_deref().unwrap_or_default();
        let changes = is_pruned(layers, layer) || self.replica.is_rebuilding();
        let held = if changes { data_bytes } else { &0 };
        format!("{uuid} {size} {held} {parent}").into_bytes()
    }
}

/// Whether a layer may be pruned: the head looks through none but retired ones to it.
fn is_pruned(layers: &[info::LayerInfo], layer: &info::LayerInfo) -> bool {
    let find = |name: Option<&str>| layers.iter().find(|layer| layer.name.as_deref() == name);
    let mut at = find(None).and_then(|head| head.parent.as_deref());
    while let Some(found) = at.and_then(|name| find(Some(name))).filter(|found| found.retired) {
        if found.uuid == layer.uuid {
            return true;
        }
        at = found.parent.as_deref();
    }
    false
}

/// What goes over as `<disk>.meta`.
#[must_use]
pub fn disk_meta(name: &str, disk: &Disk) -> DiskMeta {
    DiskMeta {
        name: name.to_owned(),
        parent: disk.parent.clone(),
        removed: disk.removed,
        user_created: disk.user_created,
        created: disk.created.clone(),
        labels: disk.labels.clone(),
    }
}

/// The error for a disk that is not there.
#[must_use]
pub fn no_disk(disk: &str) -> Error {
    Error::not_found(format!("open {disk}: no such file or directory"))
}

/// The error for a snapshot that is not what it was.
#[must_use]
pub fn removed(snapshot: &str) -> Error {
    Error::invalid(format!(
        "snapshot {snapshot} is marked as removed: parts of its content may be gone. Take another one"
    ))
}

/// One layer of a store.
pub struct StoreLayer(pub volume::Layer);

impl Layer for StoreLayer {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Run>> {
        let ranges = self.0.map(offset, length, limit)?;
        let run = |range: info::LayerRange| Run {
            offset: range.offset,
            length: range.length,
            state: match range.state {
                LayerState::Data => State::Data,
                LayerState::Zero => State::Zero,
                LayerState::Absent => State::Absent,
            },
        };
        Ok(ranges.into_iter().map(run).collect())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.0.read_at(offset, buf)
    }
}

impl LayerMut for StoreLayer {
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.0.write_at(offset, data)
    }

    fn zero(&self, offset: u64, length: u64) -> Result<()> {
        self.0.zero(offset, length)
    }

    fn clear(&self, offset: u64, length: u64) -> Result<()> {
        self.0.clear(offset, length)
    }
}

/// What one reads through a snapshot, as long as the volume is now, with nothing below: zeros are
/// absent. If the volume rests on a file, it may be without that: then the same file is to be below, and
/// zeros hide it, up to its end.
pub struct Flattened {
    snapshot: Volume,
    shown: u64,
    size: u64,
    /// Where the file ends that is to be below, if one is.
    over_file: Option<u64>,
}

impl Flattened {
    /// Opens it, with what comes from a file or without.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it is marked as removed.
    pub fn open(store: &Store, volume: &str, name: &str, with_file: bool) -> Result<Self> {
        let size = store.volume_size(volume)?;
        let file = if with_file { None } else { store.backing(volume)? };
        let over_file = file.map(|file| file.end);
        let snapshot = store.volume(&format!("{volume}@{name}"))?;
        // Looked at now that it is open: from here on nothing of it is given up.
        let layers = store.layers(volume)?;
        if layers.iter().any(|layer| layer.name.as_deref() == Some(name) && layer.retired) {
            return Err(removed(name));
        }
        Ok(Self { shown: snapshot.size().min(size), snapshot, size, over_file })
    }

    /// Adds a range as one reads it. Zeros hide the file where it has something.
    fn push(&self, range: &MapRange, runs: &mut Vec<Run>) {
        let end = range.offset + range.length;
        let hidden = match range.state {
            RangeState::Data => end,
            RangeState::Zero => self.over_file.unwrap_or(0).clamp(range.offset, end),
            RangeState::Hole => range.offset,
        };
        let shown = if range.state == RangeState::Data { State::Data } else { State::Zero };
        for (from, to, state) in [(range.offset, hidden, shown), (hidden, end, State::Absent)] {
            if from < to {
                runs.push(Run { offset: from, length: to - from, state });
            }
        }
    }

    /// Bytes that the snapshot has of it: the volume may have grown since.
    #[must_use]
    pub fn shown(&self) -> u64 {
        self.shown
    }
}

impl Layer for Flattened {
    fn size(&self) -> u64 {
        self.size
    }

    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Run>> {
        let end = offset + length;
        let mut runs = Vec::new();
        let shown = self.shown.min(end);
        if offset < shown {
            let ranges = match self.over_file {
                Some(_) => self.snapshot.map_layers(offset, shown - offset, limit)?,
                None => self.snapshot.map(offset, shown - offset, limit)?,
            };
            ranges.iter().for_each(|range| self.push(range, &mut runs));
            // The one that the end of the file is in has become two.
            runs.truncate(limit.max(1));
        }
        // Behind what the snapshot had: nothing.
        let at = runs.last().map_or(offset.max(shown), Run::end);
        if at >= shown && at < end && runs.len() < limit {
            runs.push(Run { offset: at, length: end - at, state: State::Absent });
        }
        Ok(runs)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(buf.len() as u64);
        if end > self.size {
            return Err(Error::invalid(format!("{offset}+{} is outside the volume", buf.len())));
        }
        let inside = self.shown.clamp(offset, end) - offset;
        let (shown, behind) = buf.split_at_mut(inside as usize);
        behind.fill(0);
        if shown.is_empty() { Ok(()) } else { self.snapshot.read_at(offset, shown) }
    }
}

impl Source for Flattened {
    fn size(&self) -> u64 {
        self.size
    }

    fn intervals(&self, offset: u64, limit: usize) -> Result<Vec<Interval>> {
        if offset >= self.size {
            return Ok(Vec::new());
        }
        let runs = self.map(offset, self.size - offset, limit)?;
        let interval = |run: Run| Interval {
            offset: run.offset,
            length: run.length,
            // A file says in no other way that zeros hide what is below.
            data: run.state != State::Absent,
        };
        Ok(runs.into_iter().map(interval).collect())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Layer::read_at(self, offset, buf)
    }
}
