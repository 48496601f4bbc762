//! The tree of a volume that is being rebuilt. Its layers are written by [`crate::volume::Layer`].

use super::facts::snapshot_info;
use super::{Inner, SnapshotOptions, Store};
use crate::error::Result;
use crate::info::SnapshotInfo;
use crate::limits::EXTENTS_PER_STEP;
use crate::meta::locks::Space;
use crate::meta::relink::Link;
use crate::sabotage::at_once;
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::ops::Range;

impl Store {
    /// Adds an empty snapshot of `size` bytes to a volume that is being rebuilt. It has no parent,
    /// and nothing builds on it, until [`Store::relink`] says otherwise.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly` if the volume is not being rebuilt, `Exists`, `Invalid`, `NoSpace`
    /// when the table is full.
    pub fn insert_snapshot(
        &self,
        volume: &str,
        name: &str,
        size: u64,
        options: &SnapshotOptions,
    ) -> Result<SnapshotInfo> {
        self.inner.check_writable()?;
        let slots = self.make_slots(1)?;
        let mut birth = self.inner.birth();
        birth.now_ns = options.created_ns.unwrap_or(birth.now_ns);
        self.inner.command(|meta| {
            let id = meta.find_volume(volume)?;
            let (system, labels) = (options.system, &options.labels);
            let id = meta.insert_snapshot(id, name, size, !system, labels, birth)?;
            slots.taken(meta);
            Ok(snapshot_info(meta, id))
        })
    }

    /// Gives the snapshots listed, and the head, of a volume that is being rebuilt other parents
    /// and attributes. Other snapshots stay as they are. Layers keep what they hold, so that what
    /// each snapshot shows follows from its new parents.
    ///
    /// It is durable on return. A crash leaves all of it or nothing, if it is short enough for a
    /// commit group (a sixteenth of the journal; a snapshot takes 520 bytes, and its labels if they
    /// change). Of a longer one a crash may leave a part: a tree without loops, of a volume still
    /// marked as rebuilding, that a further call puts right. Writers wait until it is done.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly` if the volume is not being rebuilt, `Invalid` for parents that form a
    /// loop or are larger than what builds on them, a snapshot listed twice, or an impossible size,
    /// `Busy` if another volume is tied to this one by a clone or a deleted snapshot has still to be
    /// merged ([`Store::work`]), `NoSpace`.
    pub fn relink(&self, volume: &str, links: &[Link], head_parent: Option<&str>) -> Result<()> {
        self.inner.check_writable()?;
        // The handle keeps the volume from being deleted meanwhile.
        let handle = self.volume(volume)?;
        let id = handle.ids().0;
        let inner = &*self.inner;
        // Steps of background work change layers, and use snapshots as this does.
        let _step = inner.steps.take();
        let _head = inner.hold_all(id);
        let _layers = inner.hold_in(Space::Snapshots(id), 0..u64::MAX, true);
        let _uses = inner.uses();
        let mut relink = {
            let mut meta = inner.meta();
            let relink = meta.plan_relink(id, links, head_parent)?;
            let all: Vec<_> = meta.volume(id).snapshots.values().copied().collect();
            meta.use_snapshots(&all);
            relink
        };
        let ends = inner.look(|meta| meta.relink_ends(&relink))?;
        for (snapshot, blocks) in ends {
            inner.clear_behind(id, snapshot, blocks)?;
        }
        let roots = inner.meta().relink_roots(&relink);
        for root in roots {
            let mut next = Some(0);
            while let Some(from) = next {
                next = inner.step(|meta| meta.unrun_some(root, from))?.0;
            }
        }
        inner.step(|meta| meta.prepare_relink(&relink))?;
        let linked = inner.step(|meta| meta.relink_some(&mut relink));
        // What was done before it failed is acknowledged as little as it is lost.
        inner.commit()?;
        linked.map(drop)
    }
}

impl Inner {
    /// Clears what a layer holds behind its end. Its blocks are held.
    fn clear_behind(&self, volume: VolumeId, id: SnapshotId, blocks: Range<u64>) -> Result<()> {
        let step = u64::from(at_once(EXTENTS_PER_STEP)) * (self.extent_bytes as u64 / BLOCK_BYTES);
        let mut next = blocks.start;
        while next < blocks.end {
            let end = blocks.end.min((next / step + 1) * step);
            self.step(|meta| {
                meta.check_rebuilding(volume)?;
                meta.clear_blocks(id, next..end)
            })?;
            next = end;
        }
        Ok(())
    }
}
