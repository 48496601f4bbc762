//! What each live layer holds alone, as a chain of files would: deleted snapshots that still have
//! to be in the tree count as part of what builds on them.

use super::entries::{Away, Bits};
use super::pieces::{Far, ReadPiece, push_read};
use super::plan::split;
use super::{Meta, Snapshot, Step};
use crate::error;
use crate::info::{LayerRange, LayerState};
use crate::units::{BLOCK_BYTES, SnapshotId};
use std::ops::Range;

/// Volume extents looked at under one hold of the lock.
const EXTENTS_PER_HOLD: u32 = 512;

/// A live layer, the hidden ones right below it, and what is below those.
#[derive(Debug)]
pub struct Span {
    /// The layer and the hidden ones, topmost first.
    pub members: Vec<SnapshotId>,
    /// The live snapshot they build on; none for a root, and on a base.
    pub below: SnapshotId,
}

impl Meta {
    /// The span of a live layer.
    pub fn span(&self, id: SnapshotId) -> Span {
        let mut members = vec![id];
        let mut below = self.snapshot(id).parent;
        while !below.is_none() && !self.snapshot(below).live() {
            if self.snapshot(below).backed() {
                below = SnapshotId::NONE;
                break;
            }
            members.push(below);
            below = self.snapshot(below).parent;
        }
        Span { members, below }
    }

    /// Data blocks in the layers of a span.
    pub fn data_blocks(&self, span: &Span) -> u64 {
        span.members.iter().map(|id| self.entries.data_blocks_of(id.0)).sum()
    }

    /// Maps blocks of a span to the end of `out`, until it has more than `limit` ranges or much
    /// has been looked at; where the rest begins.
    ///
    /// # Errors
    /// `Stop::Away`: nothing was added that the next call would not begin with.
    pub fn map_span(
        &self,
        span: &Span,
        blocks: Range<u64>,
        limit: usize,
        out: &mut Vec<LayerRange>,
    ) -> Step<u64> {
        let per_extent = u64::from(self.blocks_per_extent());
        let mut next = blocks.start;
        for _ in 0..EXTENTS_PER_HOLD {
            if next >= blocks.end || out.len() > limit {
                break;
            }
            let logical = (next / per_extent) as u32;
            let base = u64::from(logical) * per_extent;
            if self.layers_of(span).any(|layer| layer.layer.get(logical).is_some()) {
                let end = blocks.end.min(base + per_extent);
                match self.map_extent(span, logical, next..end, out) {
                    Err(_) if next > blocks.start => break,
                    mapped => mapped
                        .map_err(|away| self.ahead(away, &blocks, u64::from(EXTENTS_PER_HOLD)))?,
                }
                next = end;
            } else {
                let (end, state) = self.gap(span, logical);
                let end = end.map_or(blocks.end, |end| u64::from(end) * per_extent);
                let end = end.min(blocks.end);
                push_range(out, next..end, state);
                next = end;
            }
        }
        Ok(next)
    }

    /// Where the blocks of a span are, of those that are data. The caller holds a fence number
    /// until it has read them.
    ///
    /// # Errors
    /// `Corrupt` if the span lost something there; [`Stop::Away`](super::Stop).
    pub fn plan_span_read(
        &self,
        span: &Span,
        blocks: Range<u64>,
        out: &mut Vec<ReadPiece>,
    ) -> Step<()> {
        out.clear();
        for (logical, part) in split(blocks, self.blocks_per_extent()) {
            self.check_span(span, logical)?;
            let sources = self.sources(span, logical)?;
            let source = |block: u32| {
                sources.iter().find(|(_, data)| data.has(block)).map(|(entry, _)| *entry)
            };
            let mut block = part.start;
            while block < part.end {
                let start = block;
                let entry = source(block);
                while block < part.end && source(block) == entry {
                    block += 1;
                }
                let far = entry.filter(|entry| self.entries.is_compressed(*entry));
                let far = far.map(|extent| Far::Compressed { extent, block: start });
                let place = entry.filter(|_| far.is_none());
                let address = place.map(|entry| self.address(entry, start));
                push_read(out, ReadPiece { address, far, blocks: u64::from(block - start) });
            }
        }
        Ok(())
    }

    /// Refuses a volume extent of which a layer of the span lost what it held.
    fn check_span(&self, span: &Span, logical: u32) -> error::Result<()> {
        let lost = |id: &&SnapshotId| {
            let layer = &self.snapshot(**id).layer;
            layer.get(logical).is_none() && layer.in_lost(logical)
        };
        match span.members.iter().find(lost) {
            Some(_) => Err(self.is_lost(span.members[0], logical, 0)),
            None => Ok(()),
        }
    }

    fn layers_of(&self, span: &Span) -> impl Iterator<Item = &Snapshot> {
        span.members.iter().map(|id| self.snapshot(*id))
    }

    /// The entries of a volume extent that have data to show, each with its blocks.
    fn sources(&self, span: &Span, logical: u32) -> Result<Vec<(u32, Bits)>, Away> {
        let mut sources = Vec::new();
        let mut open = self.all_blocks();
        for snapshot in self.layers_of(span) {
            if let Some(entry) = snapshot.layer.get(logical) {
                let data = self.entries.data_bits(entry)?.and(&open);
                open = open.without(&data).without(&self.entries.zero_bits(entry)?);
                if !data.is_empty() {
                    sources.push((entry, data));
                }
            } else if snapshot.layer.in_run(logical) {
                break;
            }
            if open.is_empty() {
                break;
            }
        }
        Ok(sources)
    }

    /// Maps blocks of a volume extent at which a layer of the span has an entry.
    fn map_extent(
        &self,
        span: &Span,
        logical: u32,
        blocks: Range<u64>,
        out: &mut Vec<LayerRange>,
    ) -> Result<(), Away> {
        let top = self.snapshot(span.members[0]).layer.get(logical);
        if top.is_some_and(|entry| self.entries.is_full(entry)) {
            push_range(out, blocks, LayerState::Data);
            return Ok(());
        }
        let (data, zero) = self.states_in(span.members.iter().copied(), logical)?;
        let base = u64::from(logical) * u64::from(self.blocks_per_extent());
        for block in blocks {
            let at = (block - base) as u32;
            let state = if data.has(at) {
                LayerState::Data
            } else if zero.has(at) {
                LayerState::Zero
            } else {
                LayerState::Absent
            };
            push_range(out, block..block + 1, state);
        }
        Ok(())
    }

    /// From a volume extent without entries on: the first one that may be otherwise, and what is
    /// there until then.
    fn gap(&self, span: &Span, logical: u32) -> (Option<u32>, LayerState) {
        let layers = || self.layers_of(span).map(|snapshot| &snapshot.layer);
        let entry = layers().filter_map(|layer| Some(layer.iter_from(logical).next()?.0)).min();
        if layers().any(|layer| layer.in_lost(logical)) {
            return (Some(logical + 1), LayerState::Data);
        }
        let covered = layers().filter_map(|layer| {
            let (start, (length, _)) = layer.runs.range(..=logical).next_back()?;
            Some(start + length).filter(|end| *end > logical)
        });
        if let Some(end) = covered.max() {
            let lost = layers().filter_map(|layer| Some(*layer.lost.range(logical..).next()?.0));
            let next = entry.into_iter().chain(lost.min()).chain([end]).min();
            return (next, LayerState::Zero);
        }
        let run = layers().filter_map(|layer| Some(*layer.runs.range(logical..).next()?.0));
        let lost = layers().filter_map(|layer| Some(*layer.lost.range(logical..).next()?.0));
        (entry.into_iter().chain(run).chain(lost).min(), LayerState::Absent)
    }
}

/// Adds blocks to a map, joined with its last range if they are alike.
fn push_range(out: &mut Vec<LayerRange>, blocks: Range<u64>, state: LayerState) {
    let (offset, length) = (blocks.start * BLOCK_BYTES, (blocks.end - blocks.start) * BLOCK_BYTES);
    match out.last_mut() {
        Some(last) if last.state == state => last.length += length,
        _ => out.push(LayerRange { offset, length, state }),
    }
}
