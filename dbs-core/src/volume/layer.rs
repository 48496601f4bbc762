//! A single layer opened for reading: what a snapshot or head holds itself, without its parent.

use super::{Handle, blocks_of, outside, unaligned};
use crate::error::Result;
use crate::info::LayerRange;
use crate::meta::Meta;
use crate::store::Store;
use crate::units::{SECTOR_BYTES, SnapshotId};
use std::sync::Arc;

/// The layer of a snapshot, or of a volume's head: of the head it has at each call, and at each
/// moment of a long call. Cloning the handle is cheap. It keeps the snapshot, or the volume, from
/// being deleted. All calls block and may be made from many threads at once.
///
/// A hidden snapshot (deleted, but still needed) counts as part of each layer that builds on it.
/// So a layer's map and content become more when its parent is deleted, and only then: merging in
/// the background does not show (but that zeros may become absent where there is no parent). Read all layers from the root of a chain to its head, each over
/// what is there by then, and there is what [`Volume::read_at`](super::Volume::read_at) gives.
#[derive(Clone)]
pub struct Layer {
    pub(super) handle: Arc<Handle>,
}

impl Store {
    /// Opens the layer of a snapshot, or of the head.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn layer(&self, volume: &str, snapshot: Option<&str>) -> Result<Layer> {
        self.inner.unlock_with_given(|meta| meta.find_volume(volume).ok());
        let mut meta = self.inner.meta();
        let (volume_id, id) = match snapshot {
            None => (meta.find_volume(volume)?, None),
            Some(name) => {
                let (volume_id, id) = meta.find_snapshot(volume, name)?;
                (volume_id, Some(id))
            }
        };
        meta.opened(volume_id, id);
        let (pace, encrypted) =
            (Arc::clone(&meta.volume(volume_id).pace), meta.is_encrypted(volume_id));
        let spec = snapshot.map_or_else(|| volume.to_owned(), |name| format!("{volume}@{name}"));
        let store = Arc::clone(&self.inner);
        let (volume, snapshot) = (volume_id, id);
        let as_stored = false;
        let handle =
            Handle { store, volume, snapshot, spec, pace, encrypted, as_stored, holder: None };
        Ok(Layer { handle: Arc::new(handle) })
    }
}

impl Layer {
    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        let meta = self.handle.store.meta();
        meta.snapshot(self.id(&meta)).size
    }

    /// What the layer says of a range: in order, without gaps, at most `limit` entries (the last
    /// one ends where a further call continues). Entries end at block borders or at the range's
    /// end. Ranges of which the layer says nothing cost nothing.
    ///
    /// # Errors
    /// `Invalid` outside the layer or unaligned.
    pub fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<LayerRange>> {
        self.check_range(offset, length)?;
        let limit = limit.max(1);
        let blocks = blocks_of(offset, length);
        let mut ranges = Vec::new();
        let mut next = blocks.start;
        // One more than asked for, so that the last of those is known to be complete.
        while next < blocks.end && ranges.len() <= limit {
            next = self.handle.store.look(|meta| {
                let span = meta.span(self.id(meta));
                meta.map_span(&span, next..blocks.end, limit, &mut ranges)
            })?;
        }
        ranges.truncate(limit);
        for range in &mut ranges {
            let start = range.offset.max(offset);
            let end = (range.offset + range.length).min(offset + length);
            (range.offset, range.length) = (start, end - start);
        }
        Ok(ranges)
    }

    /// Fills `buf` from `offset` with the layer's data; what is zero or absent there reads as
    /// zeros.
    ///
    /// # Errors
    /// `Invalid` outside the layer or unaligned, `Io`.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.check_range(offset, buf.len() as u64)?;
        let name = || format!("the layer `{}`", self.handle.spec);
        self.handle.store.read_in_steps(offset, buf, &name, |meta, at, length, out| {
            let id = self.id(meta);
            let span = meta.span(id);
            meta.plan_span_read(&span, blocks_of(at, length), out)?;
            Ok(meta.key_for(id)?)
        })
    }

    fn id(&self, meta: &Meta) -> SnapshotId {
        self.handle.snapshot.unwrap_or_else(|| meta.volume(self.handle.volume).head)
    }

    fn check_range(&self, offset: u64, length: u64) -> Result<()> {
        if !offset.is_multiple_of(SECTOR_BYTES) || !length.is_multiple_of(SECTOR_BYTES) {
            return Err(unaligned(offset, length));
        }
        let size = self.size();
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(outside(offset, length, size, &self.handle.spec));
        }
        Ok(())
    }
}
