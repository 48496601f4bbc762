//! Compressing extents of layers, and expanding what is to be written. Either moves an extent to a free one, in
//! another form.

use super::entries::{Bits, SPARE_BASE};
use super::locks::Space;
use super::{Meta, Snapshot, Step};
use crate::error::{Error, Result};
use crate::sabotage::at_once;
use crate::units::{SnapshotId, VolumeId};

/// Fewer blocks of data than these are never stored in less: an index, and what is in the frames.
const DATA_MIN: u32 = 3;
/// Extents looked at under one hold of the metadata lock.
const EXTENTS_PER_LOOK: u32 = 1024;
/// Of so many blocks compressing saves one, or is not worth it.
const SAVED_OF: u32 = 4;

/// The most blocks that so many blocks of data may take when they are compressed.
pub fn worth(data: u32) -> u32 {
    data - data.div_ceil(SAVED_OF)
}

impl Meta {
    /// The layers of a volume, or those that a snapshot of it shows, from which extents are compressed.
    ///
    /// # Errors
    /// `NotFound`, `Busy` if the volume is being rebuilt, `Unsupported` if it is encrypted.
    pub fn layers_to_compress(
        &self,
        volume: &str,
        snapshot: Option<&str>,
    ) -> Result<(VolumeId, Vec<SnapshotId>)> {
        let (id, layers): (_, Vec<_>) = match snapshot {
            Some(name) => {
                let (id, snapshot) = self.find_snapshot(volume, name)?;
                (id, self.chain(snapshot).collect())
            }
            None => {
                let id = self.find_volume(volume)?;
                (id, self.snapshots().map(|(id, _)| id).collect())
            }
        };
        self.check_complete(id)?;
        if self.is_encrypted(id) {
            return Err(Error::unsupported(format!(
                "volume `{volume}` is encrypted, and encrypted volumes are not compressed"
            )));
        }
        let own = |layer: &SnapshotId| self.snapshot(*layer).volume == id;
        Ok((id, layers.into_iter().filter(own).collect()))
    }

    /// A layer whose extents are compressed; none if it is gone, or about to. Its number may be another's by then.
    fn layer_to_compress(&self, volume: VolumeId, id: SnapshotId) -> Option<&Snapshot> {
        let layer = self.try_snapshot(id).filter(|layer| layer.volume == volume)?;
        // A deleted one is hidden as long as several build on it.
        (layer.live() || layer.children.len() > 1).then_some(layer)
    }

    /// Extents of a layer that are looked at to compress it.
    pub fn extents_of_layer(&self, volume: VolumeId, layer: SnapshotId) -> u64 {
        let layer = self.layer_to_compress(volume, layer);
        layer.map_or(0, |layer| u64::from(layer.layer.extents()))
    }

    /// Looks at some extents of a layer, from a volume extent on, up to the first that may be worth compressing: that
    /// one, how many were looked at, and where to go on; none if there are no more.
    pub fn next_to_compress(
        &self,
        volume: VolumeId,
        layer: SnapshotId,
        from: u32,
    ) -> Option<(Option<u32>, u64, u32)> {
        let layer = self.layer_to_compress(volume, layer)?;
        let extents = layer.layer.iter_from(from).filter(|(_, entry)| *entry < SPARE_BASE);
        let (mut passed, mut next) = (0, None);
        for (logical, entry) in extents.take(at_once(EXTENTS_PER_LOOK) as usize) {
            (passed, next) = (passed + 1, Some(logical + 1));
            let data = self.entries.data_blocks(entry);
            if !self.entries.is_compressed(entry) && data >= DATA_MIN {
                return Some((Some(entry), passed, logical + 1));
            }
        }
        next.map(|next| (None, passed, next))
    }

    /// What an extent holds that is to be compressed. The caller holds the blocks at `lock` exclusively; `None` if that is
    /// not where the extent is, or it is not to be compressed any more.
    ///
    /// # Errors
    /// [`super::Stop::Away`].
    pub fn plan_compress(&mut self, extent: u32, lock: (Space, u32)) -> Step<Option<Bits>> {
        let owner = self.entries.owner(extent).map(|(owner, _)| SnapshotId(owner));
        let Some(owner) = owner.filter(|_| self.move_lock(extent) == Some(lock)) else {
            return Ok(None);
        };
        let data = self.entries.data_bits(extent)?;
        let refused = self.entries.is_compressed(extent)
            || self.snapshot(owner).encrypted()
            || self.is_rebuilding(self.snapshot(owner).volume)
            || data.count() < DATA_MIN;
        if refused {
            return Ok(None);
        }
        self.log_entry(extent);
        self.use_snapshots(&[owner]);
        Ok(Some(data))
    }

    /// Takes a free extent to move content to.
    ///
    /// # Errors
    /// [`super::Stop::Space`], [`super::Stop::Room`].
    pub fn take_to_move(&mut self) -> Step<u32> {
        let to = self.take_any()?;
        self.moving.insert(to);
        Ok(to)
    }

    /// As [`Meta::take_to_move`], to compress what can stay as it is: leaves those that moves need later.
    ///
    /// # Errors
    /// As there.
    pub fn take_to_compress(&mut self) -> Step<u32> {
        self.leave_for_moves()?;
        self.take_to_move()
    }

    /// Nothing was moved there.
    pub fn abort_form(&mut self, to: u32) {
        if self.moving.remove(&to) {
            self.extents.put_back(to);
        }
    }

    /// The content of `from` has been written to `to`, in so many blocks if it is compressed there: moves the entry,
    /// with what it says by now, unless it was freed meanwhile.
    ///
    /// # Errors
    /// [`super::Stop::Away`].
    pub fn finish_form(&mut self, from: u32, to: u32, stored: Option<u16>) -> Step<()> {
        if self.entries.owner(from).is_none()
            || self.entries.is_compressed(from) == stored.is_some()
        {
            self.abort_form(to);
            return Ok(());
        }
        let plan = self.plan_form(from, to, stored)?;
        self.moving.remove(&to);
        self.finish_move(&plan);
        Ok(())
    }

    /// Extents that content is being moved to.
    pub fn moving(&self) -> u32 {
        self.moving.len() as u32
    }
}
