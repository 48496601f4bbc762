//! Space of retired snapshots, back at once.

use super::Store;
use crate::error::{Error, Result};
use crate::meta::locks::Space;
use crate::units::BLOCK_BYTES;

impl Store {
    /// Gives up what retired snapshots hold in the range and the volume cannot show any more: of
    /// the unbroken run of retired snapshots directly under the head, each with one child, neither
    /// protected nor open, every whole block that the head or a member of the run above it covers
    /// with data or zeros. Returns the bytes of data given up; extents that are left empty are free
    /// after the next commit.
    ///
    /// What the volume and every snapshot that is not retired show stays as it is. What the
    /// retired ones show changes. Space that a crash takes back is found by the next call.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` outside the volume, `Io`, `Poisoned`.
    pub fn prune(&self, volume: &str, offset: u64, length: u64) -> Result<u64> {
        self.inner.check_writable()?;
        // The handle keeps the volume from being deleted meanwhile.
        let handle = self.volume(volume)?;
        let id = handle.ids().0;
        let size = handle.size();
        let Some(end) = offset.checked_add(length).filter(|end| *end <= size) else {
            return Err(Error::invalid(format!(
                "range {offset}+{length} is outside `{volume}` of {size} bytes"
            )));
        };
        let end = if end == size { end.div_ceil(BLOCK_BYTES) } else { end / BLOCK_BYTES };
        let blocks = offset.div_ceil(BLOCK_BYTES)..end;
        if blocks.is_empty() {
            return Ok(0);
        }
        let per_extent = u64::from(self.inner.meta().blocks_per_extent());
        let mut next = (blocks.start / per_extent) as u32;
        let last = blocks.end.div_ceil(per_extent) as u32;
        let mut freed = 0;
        let next_prune = |next| self.inner.meta().next_prune(id, next, last);
        while let Some(extents) = next_prune(next) {
            let (start, end) =
                (u64::from(extents.start) * per_extent, u64::from(extents.end) * per_extent);
            let some = start.max(blocks.start)..end.min(blocks.end);
            // Ordinary writes may go on: they only ever cover more.
            let _head = self.inner.hold_in(Space::Head(id), some.clone(), false);
            let _layers = self.inner.hold_in(Space::Snapshots(id), some.clone(), false);
            // No commit before the answer: losing the records changes nothing that shows.
            self.inner.step(|meta| meta.prune_blocks(id, some.clone(), &mut freed))?;
            next = extents.end;
        }
        Ok(freed * BLOCK_BYTES)
    }
}
