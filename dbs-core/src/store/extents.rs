//! A map of the device: what its extents hold, and who holds them.
//!
//! It is taken in windows, between which everybody else goes on: each window is of one moment, all of them
//! together are not.

use super::Store;
use crate::error::{Error, Result};
use crate::format::RegionKind;
use crate::format::sums::SUMS_PER_PAGE;
use crate::info::{ExtentCounts, SpaceMap, SpaceOwner, SpaceOwners, SpaceRun};
use crate::meta::Meta;
use crate::units::SnapshotId;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// Extents looked at before others have their turn: some 50 µs.
const WINDOW: u32 = 2048;
/// Extents whose damage is remembered.
const DAMAGED_MAX: usize = 4096;
/// Extents whose owners are looked for by one call.
const OWNED_MAX: u32 = 1 << 16;
/// Owners that are named.
const OWNERS_MAX: usize = 8;

/// What an extent holds.
enum Kind {
    Free,
    Pending,
    Data,
    Shared,
    Dirty,
    Damaged,
}

impl ExtentCounts {
    fn add(&mut self, kind: &Kind) {
        let count = match kind {
            Kind::Free => &mut self.free,
            Kind::Pending => &mut self.pending,
            Kind::Data => &mut self.data,
            Kind::Shared => &mut self.shared,
            Kind::Dirty => &mut self.dirty,
            Kind::Damaged => &mut self.damaged,
        };
        *count += 1;
    }
}

impl Store {
    /// What a part of the data region holds, in at most so many cells of equal size. The part is widened to
    /// whole extents, and cut to the data region. Writers wait for none of it.
    ///
    /// # Errors
    /// `Invalid` for a part that begins behind the data region, or no cells.
    pub fn space_map(&self, offset: u64, length: Option<u64>, cells: u32) -> Result<SpaceMap> {
        if cells == 0 {
            return Err(Error::invalid("a map has at least one cell"));
        }
        let (part, total) = self.extents_of(offset, length)?;
        let per_cell = (part.len() as u32).div_ceil(cells).max(1);
        let extent = self.inner.extent_bytes as u64;
        let mut map = SpaceMap {
            offset: u64::from(part.start) * extent,
            length: part.len() as u64 * extent,
            size: u64::from(total) * extent,
            extent_size: extent,
            cell_size: u64::from(per_cell) * extent,
            runs: Vec::new(),
        };
        let mut cell = ExtentCounts::default();
        self.look_at(part.clone(), |_, id, kind| {
            cell.add(&kind);
            if cell.total() == per_cell || id + 1 == part.end {
                append(&mut map.runs, std::mem::take(&mut cell));
            }
        });
        Ok(map)
    }

    /// Who holds a part of the data region: of its first 65536 extents, the eight that hold most.
    ///
    /// # Errors
    /// `Invalid` for a part that begins behind the data region.
    pub fn space_owners(&self, offset: u64, length: u64) -> Result<SpaceOwners> {
        let (mut part, _) = self.extents_of(offset, Some(length))?;
        part.end = part.end.min(part.start.saturating_add(OWNED_MAX));
        let extent = self.inner.extent_bytes as u64;
        let mut found = SpaceOwners {
            offset: u64::from(part.start) * extent,
            length: part.len() as u64 * extent,
            ..SpaceOwners::default()
        };
        // By snapshot: how many, and the first of them, as it was then.
        let mut by_owner = HashMap::<SnapshotId, SpaceOwner>::new();
        self.look_at(part, |meta, id, kind| {
            found.extents.add(&kind);
            let Some((owner, _)) = meta.entries.owner(id) else { return };
            let new = || SpaceOwner { place: meta.place_of(meta.address(id, 0)), extents: 0 };
            by_owner.entry(SnapshotId(owner)).or_insert_with(new).extents += 1;
        });
        let mut owners: Vec<_> = by_owner.into_iter().collect();
        owners.sort_by_key(|(id, owner)| (std::cmp::Reverse(owner.extents), *id));
        found.others = owners.len().saturating_sub(OWNERS_MAX) as u32;
        found.owners = owners.into_iter().take(OWNERS_MAX).map(|(_, owner)| owner).collect();
        Ok(found)
    }

    /// The extents of a part of the data region, and how many there are in all.
    fn extents_of(&self, offset: u64, length: Option<u64>) -> Result<(Range<u32>, u32)> {
        let extent = self.inner.extent_bytes as u64;
        let total = self.inner.shared().geometry.data_extents();
        let start = offset / extent;
        if start >= u64::from(total) {
            return Err(Error::invalid(format!(
                "offset {offset} is behind the data region, which has {} bytes",
                u64::from(total) * extent
            )));
        }
        let end = length.map_or(u64::MAX, |length| offset.saturating_add(length).div_ceil(extent));
        let end = end.clamp(start + 1, u64::from(total));
        Ok((start as u32..end as u32, total))
    }

    /// Tells of each extent in order, window by window.
    fn look_at(&self, part: Range<u32>, mut tell: impl FnMut(&Meta, u32, Kind)) {
        for start in part.clone().step_by(WINDOW as usize) {
            let window = start..part.end.min(start.saturating_add(WINDOW));
            let meta = self.inner.shared();
            let damaged = meta.extents.marked(window.clone());
            for id in window {
                tell(&meta, id, meta.kind_of(id, &damaged));
            }
        }
    }
}

/// Appends a cell, to the last run if that is of such cells.
fn append(runs: &mut Vec<SpaceRun>, cell: ExtentCounts) {
    match runs.last_mut().filter(|last| last.extents == cell) {
        Some(last) => last.cells += 1,
        None => runs.push(SpaceRun { cells: 1, extents: cell }),
    }
}

impl Meta {
    /// Remembers that the block at `address` is damaged, until its extent is freed or the next scrub begins.
    pub(super) fn note_damage(&self, address: u64) {
        let data = self.geometry.region(RegionKind::Data).offset;
        let extent = (address.saturating_sub(data) / self.geometry.extent_bytes) as u32;
        if self.entries.owner(extent).is_some() {
            self.extents.mark(extent, DAMAGED_MAX);
        }
    }

    fn kind_of(&self, extent: u32, damaged: &BTreeSet<u32>) -> Kind {
        let Some((owner, _)) = self.entries.owner(extent) else {
            return if self.extents.is_free(extent) { Kind::Free } else { Kind::Pending };
        };
        if damaged.contains(&extent) {
            return Kind::Damaged;
        }
        if self.is_dirty(extent) {
            return Kind::Dirty;
        }
        let based = self.try_snapshot(SnapshotId(owner)).is_some_and(|s| !s.children.is_empty());
        if based { Kind::Shared } else { Kind::Data }
    }

    /// Whether the group of checksums of any block of an extent is open.
    fn is_dirty(&self, extent: u32) -> bool {
        let Some(sums) = &self.sums else { return false };
        let blocks = u64::from(self.blocks_per_extent());
        let first = u64::from(extent) * blocks;
        let per_page = SUMS_PER_PAGE as u64;
        let pages = first / per_page..=(first + blocks - 1) / per_page;
        pages.into_iter().any(|page| sums.is_open(page as u32))
    }
}
