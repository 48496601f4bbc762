//! Flattened lookups: for each volume extent of an open volume or snapshot, which entries of its
//! chain count. Found by walking the chain once, then remembered.
//!
//! What is remembered names entries, so it must not outlive them. Two things keep it true. Parents
//! change only through [`Meta::set_parent`], which raises [`Meta::tree_version`]: every piece of a
//! view carries the version it is of, and is empty at any other. Layers change only through
//! [`Meta::layer_mut`] and [`Meta::forget_entry`], which make every view that may look through the
//! layer forget the place.

mod views;

use super::entries::{Away, Bits, SPARE_BASE};
use super::layer::Layer;
use super::{Meta, Step, Stop};
use crate::format::record::FillState;
use crate::sabotage::{self, Bug};
use crate::units::SnapshotId;
use std::ops::Range;
pub use views::Views;
use views::{BASE, MIXED, NOTHING, SINGLE, UNKNOWN};

/// Layers up to this many are walked block by block; more get a table.
const WALKED_LAYERS: usize = 8;
/// Instead of a data extent: what was there is lost.
pub const LOST: u32 = u32::MAX;
/// Instead of a data extent, with the id of a base: the block is in its file.
const BACKED: u32 = 1 << 31;
/// In the source of a block, with the data extent that has it: it is compressed there. Spares hold no data.
const COMPRESSED: u32 = SPARE_BASE;
/// Table value: no layer has the block, or the topmost that has marks it zero.
const ZERO: u16 = u16::MAX;
/// Table value: what is below the layers that count, and is no entry.
const BELOW: u16 = u16::MAX - 1;

/// The base whose file a source is.
pub fn base_of(source: u32) -> Option<SnapshotId> {
    (source & BACKED != 0 && source != LOST).then_some(SnapshotId(source & !BACKED))
}

/// The data extent that a source is, if the blocks are compressed there.
pub fn compressed_in(source: u32) -> Option<u32> {
    (source & (BACKED | COMPRESSED) == COMPRESSED).then_some(source & !COMPRESSED)
}

/// Whether a source is a place on the device where the block lies as it is.
#[inline]
pub fn is_place(source: u32) -> bool {
    source < COMPRESSED
}

/// The source of the blocks of a base.
pub fn source_of(base: SnapshotId) -> u32 {
    BACKED | base.0
}

/// The entries that count for one volume extent, topmost first.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    /// Entry ids.
    pub entries: Vec<u32>,
    /// Instead of zeros, what no entry says: [`LOST`], or a base.
    below: Option<u32>,
    /// With many layers: per block the index of the one that has its data.
    table: Option<Box<[u16]>>,
}

/// Where a volume extent's blocks are.
pub enum Found<'a> {
    /// Nowhere: zeros.
    Nothing,
    /// Nowhere any more, or in the file of a base.
    Below(u32),
    /// In one entry, or nowhere.
    Single(u32),
    /// In several.
    Mixed(&'a Layers),
}

impl Found<'_> {
    /// The data extent that holds a block; `None` for zeros, [`LOST`] if nobody knows, else [`compressed_in`] or
    /// [`base_of`] says where it is.
    #[inline]
    pub fn source(&self, meta: &Meta, block: u32) -> Result<Option<u32>, Away> {
        match self {
            Self::Nothing => Ok(None),
            Self::Below(source) => Ok(Some(*source)),
            Self::Single(id) => match meta.entries.state(*id, block) {
                Ok(state) => Ok((state == FillState::Data).then_some(*id)),
                Err(_) => {
                    let (state, source) = meta.state_far(*id, block)?;
                    Ok((state == FillState::Data).then_some(source))
                }
            },
            Self::Mixed(layers) => layers.source(meta, block),
        }
    }

    /// Whether all blocks are known to have one source, without a look at each.
    pub fn is_uniform(&self, meta: &Meta) -> bool {
        match self {
            Self::Nothing | Self::Below(_) => true,
            Self::Single(id) => meta.entries.is_full(*id),
            Self::Mixed(_) => false,
        }
    }
}

impl Layers {
    /// Whether what no entry says is lost.
    pub fn is_lost_below(&self) -> bool {
        self.below == Some(LOST)
    }

    /// Bytes of memory they take.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.heap_bytes()
    }

    /// Of those the ones beside the structure itself.
    pub(super) fn heap_bytes(&self) -> usize {
        let table = self.table.as_deref().map_or(0, size_of_val);
        self.entries.capacity() * size_of::<u32>() + table
    }

    fn source(&self, meta: &Meta, block: u32) -> Result<Option<u32>, Away> {
        if let Some(table) = &self.table {
            return Ok(match table[block as usize] {
                ZERO => None,
                BELOW => self.below,
                index => {
                    let id = self.entries[index as usize];
                    let far = meta.entries.any_compressed() && meta.entries.is_compressed(id);
                    Some(if far { id | COMPRESSED } else { id })
                }
            });
        }
        for id in &self.entries {
            let (state, source) = match meta.entries.state(*id, block) {
                Ok(state) => (state, *id),
                Err(_) => meta.state_far(*id, block)?,
            };
            match state {
                FillState::Data => return Ok(Some(source)),
                FillState::Zero => return Ok(None),
                FillState::Absent => {}
            }
        }
        Ok(self.below)
    }

    fn build_table(&mut self, meta: &Meta) -> Result<(), Away> {
        if self.entries.len() <= WALKED_LAYERS || self.entries.len() >= BELOW as usize {
            return Ok(());
        }
        let mut table = vec![ZERO; meta.blocks_per_extent() as usize].into_boxed_slice();
        let mut open = Bits::range(&(0..meta.blocks_per_extent()));
        for (index, id) in self.entries.iter().enumerate() {
            let (data, zero) = (meta.entries.data_bits(*id)?, meta.entries.zero_bits(*id)?);
            for run in data.and(&open).runs(meta.blocks_per_extent()) {
                table[run.start as usize..run.end as usize].fill(index as u16);
            }
            open = open.without(&data).without(&zero);
        }
        if self.below.is_some() {
            let runs = open.runs(meta.blocks_per_extent());
            runs.for_each(|run| table[run.start as usize..run.end as usize].fill(BELOW));
        }
        self.table = Some(table);
        Ok(())
    }
}

impl Meta {
    /// Looks a volume extent up and remembers the answer.
    ///
    /// # Errors
    /// [`Away`].
    pub fn look_up(&mut self, snapshot: SnapshotId, logical: u32) -> Result<(), Away> {
        if self.snapshot(snapshot).parent.is_none() {
            return Ok(());
        }
        let version = self.tree_version;
        let cell = self.views.get(snapshot.0).map_or(UNKNOWN, |view| view.cell(logical, version));
        if cell == UNKNOWN {
            let mut layers = self.resolve(snapshot, logical)?;
            layers.entries.shrink_to_fit();
            self.views.remember(snapshot.0, logical, version, layers);
        }
        Ok(())
    }

    /// The answer of [`Meta::look_up`]; `None` if nothing was looked up since it was forgotten.
    #[inline]
    pub fn remembered(&self, snapshot: SnapshotId, logical: u32) -> Option<Found<'_>> {
        let owner = self.snapshot(snapshot);
        if owner.parent.is_none() {
            return Some(match owner.layer.get(logical) {
                Some(entry) => Found::Single(entry),
                None if owner.layer.in_lost(logical) => Found::Below(LOST),
                None => Found::Nothing,
            });
        }
        let view = self.views.get(snapshot.0)?;
        Some(match view.look(logical, self.tree_version) {
            (UNKNOWN, _) => return None,
            (NOTHING, _) => Found::Nothing,
            (cell, mixed) if cell & MIXED != 0 => Found::Mixed(&mixed[(cell & !MIXED) as usize]),
            (cell, _) if cell >= BASE => Found::Below(source_of(SnapshotId(cell - BASE))),
            (cell, _) => Found::Single(cell - SINGLE),
        })
    }

    /// The state of a block that is not to be had at once, and its source if it is data.
    #[cold]
    fn state_far(&self, id: u32, block: u32) -> Result<(FillState, u32), Away> {
        if !self.entries.is_compressed(id) {
            return Err(Away(id));
        }
        Ok((self.entries.state_in_compressed(id, block)?, id | COMPRESSED))
    }

    /// Walks the chain for a volume extent.
    ///
    /// # Errors
    /// [`Away`].
    pub fn resolve(&self, snapshot: SnapshotId, logical: u32) -> Result<Layers, Away> {
        let mut layers = Layers::default();
        let mut open = Bits::range(&(0..self.blocks_per_extent()));
        let mut at = snapshot;
        while !at.is_none() && !open.is_empty() {
            let snapshot = self.snapshot(at);
            if let Some(id) = snapshot.layer.get(logical) {
                layers.entries.push(id);
                // Blocks of an entry still being written to first are open below it.
                open = open.without(&self.entries.held_bits(id)?);
            } else if snapshot.layer.in_run(logical) {
                break;
            } else if snapshot.layer.in_lost(logical) {
                layers.below = Some(LOST);
                break;
            }
            if snapshot.backed() {
                layers.below = Some(source_of(at));
                break;
            }
            at = snapshot.parent;
        }
        layers.build_table(self)?;
        Ok(layers)
    }

    /// Tells of the blocks that a snapshot or head shows and that are lost, from a volume extent on: in order,
    /// neighbours together. Where the rest begins.
    ///
    /// # Errors
    /// [`Stop::Away`]: nothing was told.
    pub fn each_lost(
        &self,
        id: SnapshotId,
        from: u32,
        mut tell: impl FnMut(Range<u64>),
    ) -> Step<Option<u32>> {
        let chain: Vec<_> = self.chain(id).map(|at| self.snapshot(at)).collect();
        if chain.iter().all(|snapshot| snapshot.layer.lost.is_empty()) {
            return Ok(None);
        }
        let per_extent = u64::from(self.blocks_per_extent());
        let end = self.snapshot(id).size.div_ceil(self.geometry.extent_bytes) as u32;
        let mut last: Option<Range<u64>> = None;
        let mut logical = from;
        while logical < end {
            let base = u64::from(logical) * per_extent;
            let layers = match self.resolve(id, logical) {
                Err(_) if logical > from => break,
                layers => layers.map_err(|away| Stop::ahead(away, u64::from(end - from)))?,
            };
            let mut add = |blocks: Range<u64>| match &mut last {
                Some(last) if last.end == blocks.start => last.end = blocks.end,
                last => last.replace(blocks).into_iter().for_each(&mut tell),
            };
            if layers.entries.is_empty() {
                // As it is here it is up to where any layer says something else.
                let next = chain.iter().filter_map(|s| s.layer.next_change(logical)).min();
                let next = next.unwrap_or(end).min(end);
                if layers.is_lost_below() {
                    add(base..u64::from(next) * per_extent);
                }
                logical = next;
                continue;
            }
            for block in 0..self.blocks_per_extent() {
                if self.source(&layers, block)? == Some(LOST) {
                    let at = base + u64::from(block);
                    add(at..at + 1);
                }
            }
            logical += 1;
        }
        last.into_iter().for_each(tell);
        Ok((logical < end).then_some(logical))
    }

    /// The data extent that holds a block according to `layers`.
    ///
    /// # Errors
    /// [`Away`].
    pub fn source(&self, layers: &Layers, block: u32) -> Result<Option<u32>, Away> {
        layers.source(self, block)
    }

    /// Blocks of a head's own entry became data: keeps what is remembered true.
    pub(super) fn note_filled(
        &mut self,
        head: SnapshotId,
        logical: u32,
        entry: u32,
        blocks: &Range<u32>,
    ) {
        let Some(view) = self.views.get_mut(head.0) else { return };
        let cell = view.cell(logical, self.tree_version);
        if cell & MIXED == 0 {
            return;
        }
        let layers = view.mixed_mut(logical, cell);
        if let Some(table) = &mut layers.table {
            match layers.entries.iter().position(|id| *id == entry) {
                Some(index) => {
                    table[blocks.start as usize..blocks.end as usize].fill(index as u16);
                }
                None => self.views.forget(head.0, &(logical..logical + 1)),
            }
        }
    }

    /// The layer of a snapshot or head, to be changed at these volume extents. Views forget them.
    pub(super) fn layer_mut(&mut self, owner: SnapshotId, extents: Range<u32>) -> &mut Layer {
        self.forget(owner, &extents);
        self.snapshot_mut(owner).layer.changeable()
    }

    /// The state of blocks of an entry changes: views forget the place.
    pub(super) fn forget_entry(&mut self, entry: u32) {
        if let Some((owner, logical)) = self.entries.owner(entry) {
            self.forget(SnapshotId(owner), &(logical..logical + 1));
        }
    }

    /// All views that may look through a layer forget volume extents.
    fn forget(&mut self, owner: SnapshotId, extents: &Range<u32>) {
        let alone = self.snapshot(owner).children.is_empty();
        if alone {
            self.views.forget(owner.0, extents);
        } else if !sabotage::is(Bug::WriteKeepsViews) {
            self.views.forget_everywhere(extents);
        }
    }
}
