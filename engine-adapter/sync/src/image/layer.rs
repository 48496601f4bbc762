//! Layers of a store as images.

use crate::image::{Interval, Source};
use dbs_core::info::{LayerState, RangeState};
use dbs_core::volume::Layer;
use dbs_core::{Error, Result, Store, Volume};

/// The layer of a snapshot, without its parent: what upstream keeps in one file.
///
/// A layer of a store knows a third state: zeros that hide what the parent holds. Where they hide
/// something they count as data, since a file can say it in no other way; where the parent reads as
/// zeros anyhow they count as a hole.
pub struct LayerSource {
    layer: Layer,
    below: Below,
    size: u64,
}

/// What shows through holes of a layer.
enum Below {
    /// Nothing, or nobody minds.
    Nothing,
    /// Its parent.
    Parent(Volume),
    /// A file that ends there, which is where the layer is sent to as well.
    File(u64),
}

impl Below {
    fn size(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Parent(parent) => parent.size(),
            Self::File(end) => *end,
        }
    }
}

impl LayerSource {
    /// Opens a layer to send it, or that of the head, which nobody may be writing to. Keeps the snapshot and its
    /// parent from being deleted.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn to_send(store: &Store, volume: &str, snapshot: Option<&str>) -> Result<Self> {
        let layers = store.layers(volume)?;
        let info = layers.iter().find(|layer| layer.name.as_deref() == snapshot);
        let parent = match info.map(|info| (&info.parent, &info.origin)) {
            Some((Some(parent), _)) => Some(store.volume(&format!("{volume}@{parent}"))?),
            Some((None, Some(origin))) => Some(store.volume(origin)?),
            _ => None,
        };
        let below = match parent {
            Some(parent) => Below::Parent(parent),
            None => store.backing(volume)?.map_or(Below::Nothing, |file| Below::File(file.end)),
        };
        let layer = store.layer(volume, snapshot)?;
        Ok(Self { size: layer.size(), layer, below })
    }

    /// Opens a layer to read its bytes only: all zeros count as holes.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn to_hash(store: &Store, volume: &str, snapshot: &str) -> Result<Self> {
        let layer = store.layer(volume, Some(snapshot))?;
        Ok(Self { size: layer.size(), layer, below: Below::Nothing })
    }

    /// Adds the intervals of a zero range; whether all of it.
    fn split_zeros(&self, range: Interval, limit: usize, into: &mut Vec<Interval>) -> Result<bool> {
        let shown = self.below.size().clamp(range.offset, range.end()) - range.offset;
        let mut at = range.offset;
        match &self.below {
            Below::Parent(parent) if shown > 0 => {
                for part in parent.map(range.offset, shown, limit - into.len())? {
                    let data = part.state == RangeState::Data;
                    into.push(Interval { offset: part.offset, length: part.length, data });
                    at = part.offset + part.length;
                }
            }
            // The file is never asked: it has something everywhere.
            Below::File(_) if shown > 0 => {
                into.push(Interval { offset: at, length: shown, data: true });
                at += shown;
            }
            _ => {}
        }
        if at < range.offset + shown || (at < range.end() && into.len() >= limit) {
            return Ok(false);
        }
        if at < range.end() {
            into.push(Interval { offset: at, length: range.end() - at, data: false });
        }
        Ok(true)
    }
}

impl Source for LayerSource {
    fn size(&self) -> u64 {
        self.size
    }

    fn intervals(&self, offset: u64, limit: usize) -> Result<Vec<Interval>> {
        let mut intervals = Vec::new();
        if offset >= self.size {
            return Ok(intervals);
        }
        for range in self.layer.map(offset, self.size - offset, limit)? {
            if intervals.len() >= limit {
                break;
            }
            let data = range.state == LayerState::Data;
            let interval = Interval { offset: range.offset, length: range.length, data };
            if range.state != LayerState::Zero {
                intervals.push(interval);
            } else if !self.split_zeros(interval, limit, &mut intervals)? {
                break;
            }
        }
        Ok(intervals)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.layer.read_at(offset, buf)
    }
}

/// What changes whenever the content of a layer may have: for [`crate::image::hash_recorded`].
///
/// Between the events that make a layer more, its data only ever becomes less (pruning). Those
/// events are the removal of its parent and its being received anew; whoever causes one removes the
/// record of the layer (see [`crate::image::Record::remove`]), as this stamp could not tell more
/// followed by as much less.
///
/// # Errors
/// `NotFound`.
pub fn layer_stamp(store: &Store, volume: &str, snapshot: &str) -> Result<String> {
    let layers = store.layers(volume)?;
    let info = layers.iter().find(|layer| layer.name.as_deref() == Some(snapshot));
    let info =
        info.ok_or_else(|| Error::not_found(format!("no snapshot `{volume}@{snapshot}`")))?;
    Ok(format!("{} {} {}", info.uuid, info.size, info.data_bytes))
}

/// A volume or snapshot with all its ancestors, as one image without a parent.
pub struct VolumeSource {
    volume: Volume,
    size: u64,
}

impl VolumeSource {
    /// Opens `volume` or `volume@snapshot`.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn open(store: &Store, spec: &str) -> Result<Self> {
        let volume = store.volume(spec)?;
        Ok(Self { size: volume.size(), volume })
    }
}

impl Source for VolumeSource {
    fn size(&self) -> u64 {
        self.size
    }

    fn intervals(&self, offset: u64, limit: usize) -> Result<Vec<Interval>> {
        if offset >= self.size {
            return Ok(Vec::new());
        }
        let ranges = self.volume.map(offset, self.size - offset, limit)?;
        let interval = |range: dbs_core::info::MapRange| Interval {
            offset: range.offset,
            length: range.length,
            data: range.state == RangeState::Data,
        };
        Ok(ranges.into_iter().map(interval).collect())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.volume.read_at(offset, buf)
    }
}
