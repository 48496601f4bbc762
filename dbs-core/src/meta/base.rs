//! Bases: snapshots whose content is in a file outside the store.

use super::entries::Bits;
use super::tree::{Birth, check_size, encode_labels, new_head};
use super::view::base_of;
use super::{Meta, Snapshot, Step};
use crate::error::Result;
use crate::format::slots::{SNAPSHOT_BACKED, SNAPSHOT_DELETED};
use crate::info::Labels;
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};

/// The one label of a base: which file it is.
pub const BASE_LABEL: &str = "file";

impl Meta {
    /// Creates a volume on a base: on `file`, of which the labels are given, and where it ends.
    ///
    /// # Errors
    /// As [`Meta::create_volume`].
    pub fn create_backed(
        &mut self,
        name: &str,
        size: u64,
        (labels, end): (&[u8], u64),
        births: [Birth; 3],
    ) -> Step<VolumeId> {
        // As of any volume: what is wrong with the name is told before what there is no room for.
        self.check_volume_name_free(name)?;
        check_size(end)?;
        let base = self.next_snapshot()?;
        self.require_labels(base, labels)?;
        // The head gets another slot; if the volume cannot be, this one stays free.
        self.snapshots_free.remove(base.0 - 1);
        let created = self.create_volume(name, size, SnapshotId::NONE, [births[0], births[1]]);
        self.snapshots_free.insert(base.0 - 1);
        let id = created?;
        let snapshot = Snapshot {
            flags: SNAPSHOT_DELETED | SNAPSHOT_BACKED,
            ..new_head(VolumeId::NONE, SnapshotId::NONE, end, births[2])
        };
        self.put_snapshot(base, snapshot);
        self.put_labels(base, labels.to_vec());
        self.append_snapshot(base);
        // Once nothing builds on it, it is freed.
        self.deleting.insert(base.0);
        self.link(self.volume(id).head, base);
        Ok(id)
    }

    /// The base that a snapshot or head rests on, if it does.
    pub fn base_under(&self, id: SnapshotId) -> Option<SnapshotId> {
        self.chain(id).last().filter(|at| self.snapshot(*at).backed())
    }

    /// What roots of a volume have for a parent: nothing, or the base that the volume rests on.
    pub(super) fn bottom(&self, volume: VolumeId) -> SnapshotId {
        self.base_under(self.volume(volume).head).unwrap_or(SnapshotId::NONE)
    }

    /// Whether a source is the file of a base, which ends before this block.
    pub(super) fn is_behind(&self, source: u32, block: u64) -> bool {
        base_of(source).is_some_and(|base| block * BLOCK_BYTES >= self.snapshot(base).size)
    }

    /// Blocks of a volume extent that a base has in its file.
    pub(super) fn held_in_file(&self, id: SnapshotId, logical: u32) -> Bits {
        let snapshot = self.snapshot(id);
        if !snapshot.backed() {
            return Bits::default();
        }
        let begin = u64::from(logical) * self.geometry.extent_bytes;
        let blocks = snapshot.size.saturating_sub(begin).div_ceil(BLOCK_BYTES);
        Bits::range(&(0..blocks.min(u64::from(self.blocks_per_extent())) as u32))
    }
}

/// The labels of a base.
pub fn encode_base(identity: &str) -> Result<Vec<u8>> {
    encode_labels(&Labels::from([(BASE_LABEL.to_owned(), identity.to_owned())]))
}
