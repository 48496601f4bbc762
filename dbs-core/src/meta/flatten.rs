//! Detaching a clone: copying down what it shows of other volumes' layers, one volume extent at a
//! time. No step changes what anything shows, so a crash or a stop in between needs no care.

use super::entries::{Away, Bits, SPARE_BASE};
use super::locks::Space;
use super::merge::Copy;
use super::view::{LOST, base_of, compressed_in};
use super::{Meta, Step};
use crate::error::{Error, Result};
use crate::format::record::FillState;
use crate::sabotage::{self, Bug};
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};

/// How one volume extent is copied down.
#[derive(Debug)]
pub struct FlattenPlan {
    layer: SnapshotId,
    logical: u32,
    entry: u32,
    /// The extent was allocated for this.
    fresh: bool,
    data: Bits,
    /// To be done before [`Meta::finish_flatten`].
    pub copies: Vec<Copy>,
}

/// How an extent is moved elsewhere on the device.
#[derive(Debug)]
pub struct MovePlan {
    from: u32,
    /// Where to.
    pub to: u32,
    /// What it holds: its blocks are held meanwhile.
    data: Bits,
    zero: Bits,
    /// Blocks that it is stored in by then, if they are compressed.
    stored: Option<u16>,
    /// To be done before [`Meta::finish_move`].
    pub copies: Vec<Copy>,
}

impl MovePlan {
    /// Whether what moves is compressed.
    pub fn is_compressed(&self) -> bool {
        self.stored.is_some()
    }
}

impl Meta {
    /// The layers of a volume that build on another volume's.
    pub fn foreign_children(&self, volume: VolumeId) -> Vec<SnapshotId> {
        self.snapshots().map(|(id, _)| id).filter(|id| self.is_foreign_child(volume, *id)).collect()
    }

    /// Refuses to detach a volume whose layers change in a rebuild, or did since there were so many `rebuilds` of it:
    /// what was cleared in a layer shows the parent, which must stay there.
    ///
    /// # Errors
    /// `Busy`.
    pub fn check_not_rebuilt(&self, id: VolumeId, rebuilds: u64) -> Result<()> {
        self.check_complete(id)?;
        let volume = self.volume(id);
        if volume.rebuilds == rebuilds {
            return Ok(());
        }
        let text = format!("volume `{}` was rebuilt meanwhile: flatten it again", volume.name);
        Err(Error::busy(text))
    }

    /// Whether a snapshot or head is a layer of `volume` that builds on another volume's: while a job on
    /// it waited, it may have been merged away, and its number been given to another.
    pub fn is_foreign_child(&self, volume: VolumeId, id: SnapshotId) -> bool {
        self.try_snapshot(id).is_some_and(|s| {
            let foreign = || {
                let parent = self.snapshot(s.parent);
                parent.volume != volume && !parent.backed()
            };
            s.volume == volume && !s.parent.is_none() && foreign()
        })
    }

    /// Plans copying what `id`, a layer of `volume`, shows of another volume's layers at a volume extent;
    /// `None` if it shows nothing of theirs, or is no such layer any more. The caller takes a fence number
    /// in the same step, and holds the blocks exclusively.
    ///
    /// # Errors
    /// [`Stop::Space`](super::Stop::Space), [`Stop::Room`](super::Stop::Room), [`Stop::Expand`](super::Stop::Expand).
    pub fn plan_flatten(
        &mut self,
        volume: VolumeId,
        id: SnapshotId,
        logical: u32,
    ) -> Step<Option<FlattenPlan>> {
        if !self.is_foreign_child(volume, id) {
            return Ok(None);
        }
        self.check_not_lost(id)?;
        let own = self.snapshot(id).layer.get(logical);
        if own.is_none() && self.snapshot(id).layer.in_run(logical) {
            return Ok(None);
        }
        let held = own.map_or(Ok(Bits::default()), |entry| self.entries.held_bits(entry))?;
        let parent = self.snapshot(id).parent;
        let layers = self.resolve(parent, logical)?;
        let shown = |block: u32| self.source(&layers, block);
        let mut sources = Vec::new();
        for block in (0..self.blocks_per_extent()).filter(|block| !held.has(*block)) {
            match shown(block)? {
                Some(LOST) => return Err(self.is_lost(id, logical, block).into()),
                Some(source) if base_of(source).is_some() => return Err(on_file().into()),
                Some(source) => sources.push((block, source)),
                None => {}
            }
        }
        if sources.is_empty() {
            return Ok(None);
        }
        let (entry, fresh) = match own {
            Some(entry) if self.entries.is_compressed(entry) => return Err(self.to_expand(entry)),
            Some(entry) if entry < SPARE_BASE => (entry, false),
            _ => (self.allocate(id, logical)?, true),
        };
        let mut data = Bits::default();
        let mut copies: Vec<Copy> = Vec::new();
        for (block, source) in sources {
            data = data.or(&Bits::range(&(block..block + 1)));
            let far = compressed_in(source);
            let (from, to) =
                (self.address(far.unwrap_or(source), block), self.address(entry, block));
            let (length, expands) = (BLOCK_BYTES, far.is_some());
            match copies.last_mut() {
                Some(last) if last.from + last.length == from && last.to + last.length == to => {
                    last.length += length;
                }
                _ => copies.push(Copy { from, to, length, expands }),
            }
        }
        self.use_snapshots(&[id]);
        self.pin(entry);
        Ok(Some(FlattenPlan { layer: id, logical, entry, fresh, data, copies }))
    }

    /// The copies of a plan have been written.
    pub fn finish_flatten(&mut self, plan: &FlattenPlan) {
        self.unpin(plan.entry);
        self.log_entry(plan.entry);
        self.fill_all(plan.entry, &plan.data, FillState::Data);
    }

    /// The copies of a plan could not be written.
    pub fn abort_flatten(&mut self, plan: &FlattenPlan) {
        self.unpin(plan.entry);
        if plan.fresh {
            self.unallocate(plan.layer, plan.logical);
        }
    }

    /// Makes a layer a root: its ancestors show nothing through it any more.
    pub fn cut(&mut self, id: SnapshotId) {
        self.set_parent(id, SnapshotId::NONE, Bug::CutKeepsViews);
    }

    /// Refuses to cut a layer off a chain that lost something, from a volume extent on, or rests on a file: that
    /// would read as zeros without it. Where the rest begins.
    ///
    /// # Errors
    /// `Corrupt`, `Unsupported`; [`Stop::Away`](super::Stop::Away).
    pub fn check_can_be_cut(&self, id: SnapshotId, from: u32) -> Step<Option<u32>> {
        if self.base_under(id).is_some() {
            return Err(on_file().into());
        }
        let mut first = None;
        let next = self.each_lost(id, from, |lost| first = first.or(Some(lost.start)))?;
        let Some(lost) = first else { return Ok(next) };
        let per_extent = u64::from(self.blocks_per_extent());
        Err(self.is_lost(id, (lost / per_extent) as u32, (lost % per_extent) as u32).into())
    }

    /// Adds volume extents, from `first` on, at which the chain below a layer holds anything, until much
    /// has been looked at; where the rest begins. Nothing of a layer that is gone.
    pub fn extents_below(
        &self,
        (volume, id): (VolumeId, SnapshotId),
        first: u32,
        extents: &mut Vec<u32>,
    ) -> Option<u32> {
        if !self.is_foreign_child(volume, id) {
            return None;
        }
        let parent = self.snapshot(id).parent;
        let mut next = first;
        for _ in 0..self.extents_per_hold(parent) {
            let logical = self.next_entry(parent, next)?;
            extents.push(logical);
            next = logical + 1;
        }
        Some(next)
    }

    /// The last data extent in use, and the lowest free one if that is before it.
    pub fn next_move(&self) -> Option<(u32, u32)> {
        let last = self.entries.last_extent()?;
        let free = self.extents.lowest()?;
        (free < last).then_some((last, free))
    }

    /// Plans moving a data extent to the lowest free one. The caller holds the blocks at `lock`
    /// exclusively; `None` if that is not where the extent is, or it is not the one to move any more.
    ///
    /// # Errors
    /// [`Stop::Space`](super::Stop::Space), [`Stop::Room`](super::Stop::Room).
    pub fn plan_move(&mut self, from: u32, lock: Option<(Space, u32)>) -> Step<Option<MovePlan>> {
        let due = self.next_move().is_some_and(|(extent, _)| extent == from);
        if !due || self.move_lock(from) != lock {
            return Ok(None);
        }
        let (data, zero) = (self.entries.data_bits(from)?, self.entries.zero_bits(from)?);
        self.log_entry(from);
        self.forget_preference();
        let to = self.take_any()?;
        if let Some((owner, _)) = self.entries.owner(from) {
            self.use_snapshots(&[SnapshotId(owner)]);
        }
        let stored = self.entries.stored_blocks(from);
        let blocks = stored.map_or(data, |stored| Bits::range(&(0..u32::from(stored))));
        let copies = blocks
            .runs(self.blocks_per_extent())
            .map(|run| Copy {
                from: self.address(from, run.start),
                to: self.address(to, run.start),
                length: u64::from(run.end - run.start) * BLOCK_BYTES,
                expands: false,
            })
            .collect();
        Ok(Some(MovePlan { from, to, data, zero, stored, copies }))
    }

    /// The move was not made: its target is free again.
    pub fn abort_move(&mut self, plan: &MovePlan) {
        self.extents.put_back(plan.to);
    }

    /// The copies of a plan have been written.
    pub fn finish_move(&mut self, plan: &MovePlan) {
        let Some((owner, logical)) = self.entries.owner(plan.from) else { return };
        self.entries.assign(plan.to, owner, logical);
        self.entries.set_bits(plan.to, &plan.data, &plan.zero);
        plan.stored.into_iter().for_each(|stored| self.entries.set_compressed(plan.to, stored));
        self.layer_mut(SnapshotId(owner), logical..logical + 1).insert(logical, plan.to);
        self.append_entry(plan.to);
        self.free_entry(plan.from);
    }

    /// The plan of moving an extent, whose blocks are held, to another form.
    pub(super) fn plan_form(
        &self,
        from: u32,
        to: u32,
        stored: Option<u16>,
    ) -> std::result::Result<MovePlan, Away> {
        let (data, mut zero) = (self.entries.data_bits(from)?, self.entries.zero_bits(from)?);
        if sabotage::is(Bug::ExpandForgetsZeros) {
            zero = Bits::default();
        }
        Ok(MovePlan { from, to, data, zero, stored, copies: Vec::new() })
    }

    /// Where the blocks of which volume extent must be held while an extent moves; `None` if it is
    /// free.
    pub fn move_lock(&self, extent: u32) -> Option<(Space, u32)> {
        let (owner, logical) = self.entries.owner(extent)?;
        Some((self.snapshot(SnapshotId(owner)).space(), logical))
    }
}

fn on_file() -> Error {
    Error::unsupported(
        "the clone rests on a backing file, which cannot be copied into it: export it, and import it as a new \
         volume",
    )
}
