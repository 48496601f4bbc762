//! Looking at a volume or snapshot without keeping it: by identity, so that what takes the place
//! of something deleted is never taken for it.

use super::entries::Bits;
use super::{Meta, Snapshot, Step, Stop};
use crate::format::record::Record;
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};

/// Data blocks that are shown, by volume extent.
pub type ShownData = Vec<(u32, Bits)>;

/// Whether a record changes what is said of volumes and snapshots, apart from their content.
pub fn is_seen(record: &Record<'_>) -> bool {
    matches!(
        record,
        Record::Volume { .. }
            | Record::Snapshot { .. }
            | Record::Drop { .. }
            | Record::Labels { .. }
    )
}

impl Meta {
    /// The head of a volume that is still the one with this identity.
    pub fn watched_head(&self, id: VolumeId, uuid: &[u8; 16]) -> Option<SnapshotId> {
        let volume = self.volumes.get(id.index().wrapping_sub(1))?.as_ref()?;
        (volume.uuid == *uuid).then_some(volume.head)
    }

    /// The snapshot that is still the one with this identity, and not deleted.
    pub fn watched_snapshot(&self, id: SnapshotId, uuid: &[u8; 16]) -> Option<&Snapshot> {
        let snapshot = self.try_snapshot(id)?;
        (snapshot.uuid == *uuid && snapshot.live() && !snapshot.head()).then_some(snapshot)
    }

    /// Drops what was remembered for a head or snapshot, unless a handle uses it.
    pub fn forget_watched(&mut self, id: SnapshotId) {
        let Some(snapshot) = self.try_snapshot(id) else { return };
        let open = match snapshot.head() {
            true => self.open_volumes.contains_key(&snapshot.volume.0),
            false => self.open_snapshots.contains_key(&id.0),
        };
        if !open {
            self.views.remove(id.0);
        }
    }

    /// The data blocks that a head or snapshot shows, by volume extent: of the first `most` extents
    /// from `first` on at which its chain holds anything. The second value is where to go on.
    ///
    /// # Errors
    /// [`Stop::Away`].
    pub fn shown_data(
        &self,
        id: SnapshotId,
        first: u32,
        most: usize,
    ) -> Step<(ShownData, Option<u32>)> {
        let end = self.snapshot(id).size.div_ceil(BLOCK_BYTES);
        let per_extent = u64::from(self.blocks_per_extent());
        let mut shown = Vec::new();
        let mut next = first;
        let most = most.min(self.extents_per_hold(id) as usize);
        for _ in 0..most {
            let held = self.next_held(id, next);
            // Behind the end nothing is shown, whatever layers hold there.
            let Some(held) = held.filter(|held| u64::from(*held) * per_extent < end) else {
                return Ok((shown, None));
            };
            let (mut data, _) = match self.states(id, held) {
                Err(_) if next > first => break,
                states => states.map_err(|away| Stop::ahead(away, most as u64))?,
            };
            let inside = (end - u64::from(held) * per_extent).min(per_extent) as u32;
            data = data.and(&Bits::range(&(0..inside)));
            if !data.is_empty() {
                shown.push((held, data));
            }
            next = held + 1;
        }
        Ok((shown, Some(next)))
    }
}
