//! Returning a volume to one of its snapshots: durable on return, and wholly done or not at all.

use super::expected::Expected;
use super::{Store, still_named};
use crate::error::{Error, Result};
use crate::meta::Meta;
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use crate::volume::Volume;

impl Store {
    /// Discards the head and starts a new one on the snapshot, whose size the volume takes. Later
    /// snapshots stay, as a side branch.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` if the snapshot is retired, `NoSpace` when the table is full.
    pub fn rollback(&self, volume: &str, snapshot: &str) -> Result<()> {
        self.rollback_if(volume, snapshot, &Expected::default())
    }

    /// As [`Store::rollback`], to a snapshot that is as expected.
    ///
    /// # Errors
    /// As [`Store::rollback`]; `NotFound` if it is not as expected.
    pub fn rollback_if(&self, volume: &str, snapshot: &str, expected: &Expected) -> Result<()> {
        self.inner.check_writable()?;
        let id = self.inner.meta().find_volume(volume)?;
        // Before anybody has to wait.
        self.inner.meta().check_unheld(id, "rolling back")?;
        let slots = self.make_slots(1)?;
        let birth = self.inner.birth();
        let _hold = self.inner.hold_all(id);
        self.inner.command(|meta| {
            still_named(meta, volume, id)?;
            meta.check_unheld(id, "rolling back")?;
            let (id, to) = meta.find_base(volume, snapshot)?;
            expected.check_snapshot(meta, id, to)?;
            meta.rollback(id, to, birth)?;
            slots.taken(meta);
            Ok(())
        })
    }

    /// As [`Store::rollback`], but the volume keeps its size: of a smaller snapshot the rest reads
    /// as zeros, of a larger one the rest is not seen.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` if the snapshot is retired, `NoSpace` when the table is full or the
    /// metadata that hides older content behind the snapshot's end needs space there is none of,
    /// `Io`.
    pub fn rollback_keeping_size(&self, volume: &str, snapshot: &str) -> Result<()> {
        self.inner.check_writable()?;
        // The handle keeps the snapshot from being deleted meanwhile.
        let base = self.volume(&format!("{volume}@{snapshot}"))?;
        let slots = self.make_slots(1)?;
        let birth = self.inner.birth();
        let edge = base.last_block_cut(base.size())?;
        // Vacuum must not cut off the extent that is written before anything refers to it.
        let _step = edge.as_ref().map(|_| self.inner.steps.take());
        let _hold = self.inner.hold_all(base.ids().0);
        let grows = {
            let meta = self.inner.meta();
            let (id, to) = same_base(&meta, volume, snapshot, &base)?;
            meta.volume(id).size > meta.snapshot(to).size
        };
        let edge = match edge.filter(|_| grows) {
            Some(block) => {
                let number = base.size() / BLOCK_BYTES;
                let encrypted = base.encrypt(number * BLOCK_BYTES, &block)?;
                Some(self.place_block(number, encrypted.as_deref().unwrap_or(&block))?)
            }
            None => None,
        };
        let taken = self.inner.step_in_group(|meta| {
            let (id, to) = same_base(meta, volume, snapshot, &base)?;
            meta.rollback_keeping_size(id, to, edge, birth)?;
            slots.taken(meta);
            Ok(())
        });
        match (taken, edge) {
            (Ok(_), _) => {
                drop(base);
                self.inner.commit()
            }
            (Err(error), None) => Err(error),
            (Err(error), Some(extent)) => {
                self.inner.meta().extents.put_back(extent);
                Err(error)
            }
        }
    }

    /// Writes a block of a volume to its place in a free data extent, which nothing refers to yet.
    fn place_block(&self, block: u64, bytes: &[u8]) -> Result<u32> {
        let (extent, _) = self.inner.step(Meta::take_extent)?;
        let address = {
            let meta = self.inner.meta();
            meta.address(extent, (block % u64::from(meta.blocks_per_extent())) as u32)
        };
        let written = self.inner.claim(address, 1).and_then(|()| {
            let written = self.inner.storage.write_at(address, bytes);
            self.inner.end_claim(address, bytes.len(), written.is_ok().then_some(bytes));
            written.map_err(|e| Error::io(e, "writing the last block of a rollback failed"))
        });
        written.inspect_err(|_| self.inner.meta().extents.put_back(extent)).map(|()| extent)
    }
}

/// The snapshot to go back to, which must still be the one that is open.
fn same_base(
    meta: &Meta,
    volume: &str,
    snapshot: &str,
    base: &Volume,
) -> Result<(VolumeId, SnapshotId)> {
    let (id, to) = meta.find_base(volume, snapshot)?;
    if base.ids() != (id, Some(to)) {
        return Err(Error::not_found(format!("`{volume}@{snapshot}` was renamed meanwhile")));
    }
    Ok((id, to))
}
