//! Putting a volume's head back on a snapshot, as one batch of records.

use super::entries::{Bits, SPARE_BASE};
use super::tree::{Birth, new_head};
use super::{Meta, Step, Stop};
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::ops::Range;

/// Entries taken for a head that hides what its parent holds behind the parent's end.
#[derive(Debug, Default)]
struct Cover {
    /// Entry for a volume extent that only ends behind the parent's end.
    partial: Option<Partial>,
    /// Spare entry for a zero run over these volume extents.
    run: Option<(u32, Range<u32>)>,
}

#[derive(Debug)]
struct Partial {
    entry: u32,
    logical: u32,
    /// Block that the caller has written to the entry's extent.
    data: Range<u32>,
    zero: Range<u32>,
}

impl Meta {
    /// Replaces the head by an empty one on a snapshot, whose size the volume takes. The caller
    /// has made sure that no write is in flight.
    ///
    /// # Errors
    /// `NoSpace` when the table is full; [`Stop::Room`].
    pub fn rollback(&mut self, id: VolumeId, to: SnapshotId, birth: Birth) -> Step<()> {
        self.replace_head(id, to, self.snapshot(to).size, birth)?;
        Ok(())
    }

    /// As [`Meta::rollback`], but the volume keeps its size: what is behind the snapshot's end
    /// reads as zeros. `edge` is a data extent, taken and in no record, that holds the snapshot's
    /// last block with zeros behind its end, if the snapshot itself has something else there.
    ///
    /// # Errors
    /// `NoSpace` when the table is full; [`Stop::Room`]; [`Stop::Space`]. Nothing has changed then.
    pub fn rollback_keeping_size(
        &mut self,
        id: VolumeId,
        to: SnapshotId,
        edge: Option<u32>,
        birth: Birth,
    ) -> Step<()> {
        self.next_snapshot()?;
        let size = self.volume(id).size;
        let cover = self.take_cover(to, size, edge)?;
        match self.replace_head(id, to, size, birth) {
            Ok(head) => {
                self.lay_cover(head, cover);
                Ok(())
            }
            Err(stop) => {
                self.put_back_cover(cover, edge);
                Err(stop)
            }
        }
    }

    /// Takes what a head of `size` bytes on `to` needs to read as zeros behind the end of `to`.
    fn take_cover(&mut self, to: SnapshotId, size: u64, edge: Option<u32>) -> Step<Cover> {
        let per_extent = u64::from(self.blocks_per_extent());
        let behind = self.snapshot(to).size.div_ceil(BLOCK_BYTES);
        let first = behind - u64::from(edge.is_some());
        // Blocks behind the volume's end hold nothing: the last extent counts as whole.
        let end = size.div_ceil(BLOCK_BYTES).div_ceil(per_extent) as u32;
        let mut cover = Cover::default();
        let mut logical = (first / per_extent) as u32;
        if size <= self.snapshot(to).size
            || (edge.is_none() && !self.holds_behind(to, (behind / per_extent) as u32))
        {
            return Ok(cover);
        }
        if edge.is_some() || !first.is_multiple_of(per_extent) {
            let base = u64::from(logical) * per_extent;
            let (first, behind) = ((first - base) as u32, (behind - base) as u32);
            let entry = match edge {
                Some(extent) => extent,
                None => match self.take_spare()? {
                    Some(spare) => spare,
                    None => self.take_extent()?,
                },
            };
            let zero = behind..per_extent as u32;
            cover.partial = Some(Partial { entry, logical, data: first..behind, zero });
            logical += 1;
        }
        if logical < end {
            match self.take_spare() {
                Ok(Some(spare)) => cover.run = Some((spare, logical..end)),
                stopped => {
                    self.put_back_cover(cover, edge);
                    return Err(stopped.err().unwrap_or(Stop::Space));
                }
            }
        }
        Ok(cover)
    }

    fn lay_cover(&mut self, head: SnapshotId, cover: Cover) {
        if let Some(Partial { entry, logical, data, zero }) = cover.partial {
            self.entries.assign(entry, head.0, logical);
            self.entries.set_bits(entry, &Bits::range(&data), &Bits::range(&zero));
            self.layer_mut(head, logical..logical + 1).insert(logical, entry);
            self.append_entry(entry);
        }
        if let Some((spare, extents)) = cover.run {
            let length = extents.end - extents.start;
            self.entries.assign_run(spare, head.0, extents.start, length);
            let start = extents.start;
            self.layer_mut(head, extents).runs.insert(start, (length, spare));
            self.append_entry(spare);
        }
    }

    /// Gives back what was taken, but for the caller's `edge`.
    fn put_back_cover(&mut self, cover: Cover, edge: Option<u32>) {
        let partial =
            cover.partial.map(|partial| partial.entry).filter(|entry| Some(*entry) != edge);
        for entry in partial.into_iter().chain(cover.run.map(|run| run.0)) {
            match entry.checked_sub(SPARE_BASE) {
                Some(spare) => self.spares.put_back(spare),
                None => self.extents.put_back(entry),
            }
        }
    }

    /// Drops the head and puts an empty one of `size` bytes on `to`.
    fn replace_head(
        &mut self,
        id: VolumeId,
        to: SnapshotId,
        size: u64,
        birth: Birth,
    ) -> Step<SnapshotId> {
        let new = self.next_snapshot()?;
        let old = self.volume(id).head;
        self.put_snapshot(new, new_head(id, to, size, birth));
        self.drop_snapshot(old, id);
        let volume = self.volume_mut(id);
        volume.head = new;
        volume.size = size;
        self.note_write(new);
        self.append_volume(id);
        Ok(new)
    }
}
