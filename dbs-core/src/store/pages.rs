//! Pages of checksums that say nothing, as they are damaged or their group is open: finding them for a
//! check, and mending them for a repair. They cost checksums and no data.

use super::recover;
use crate::error::{Error, Result};
use crate::format::sums::{self, PAGES_PER_GROUP, SUMS_PER_PAGE, Stored, StoredSums};
use crate::format::{BlockFault, RegionKind, Superblock};
use crate::info::{Finding, RepairKind, RepairStep, Severity};
use crate::io::Storage;
use crate::io::buffer::AlignedBuf;
use crate::units::BLOCK_BYTES;

/// Pages read at once.
const PAGES_AT_ONCE: u32 = 256;
/// Damaged ones told of one by one.
const PAGES_LISTED: usize = if cfg!(test) { 12 } else { 1000 };

/// The pages that a store may use: those of the extents that have entries.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages {
    superblock: Superblock,
    count: u32,
}

/// Damaged pages. A hostile image has any number.
#[derive(Debug, Default)]
pub(super) struct Damaged {
    listed: Vec<(u32, BlockFault)>,
    more: u64,
    /// Groups that are open.
    open: u64,
}

impl Pages {
    /// Those of the first `extents` extents.
    pub(super) fn new(superblock: &Superblock, extents: u64) -> Self {
        let geometry = &superblock.geometry;
        let extents = match geometry.has_sums() {
            true => u64::from(geometry.data_extents()).min(extents),
            false => 0,
        };
        let blocks = extents * u64::from(geometry.blocks_per_extent());
        Self { superblock: *superblock, count: blocks.div_ceil(SUMS_PER_PAGE as u64) as u32 }
    }

    /// Those of a store that was closed, or is about to be written anew.
    pub(super) fn below_marks(superblock: &Superblock) -> Self {
        let region = RegionKind::Extents;
        let blocks = u64::from(superblock.clean_marks[region.mark()]);
        Self::new(superblock, blocks * u64::from(superblock.geometry.items_per_block(region)))
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// # Errors
    /// `Io`.
    pub(super) fn damaged(&self, storage: &dyn Storage) -> Result<Damaged> {
        let mut damaged = Damaged::default();
        damaged.open = self.each_damaged(storage, |page, fault| {
            damaged.add(page, fault);
            Ok(())
        })?;
        Ok(damaged)
    }

    /// Writes the damaged ones, durably, so that they say nothing, as before, and nothing is wrong with
    /// them. Of a group whose leader is damaged nobody knows whether it was open: all its pages are
    /// written so, the leader last, as from then on they count.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(super) fn silence_damaged(&self, storage: &dyn Storage) -> Result<()> {
        let failed = |error| Error::io(error, "writing the checksums failed");
        let mut silent = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        let mut write = |page| {
            let at = self.address(page);
            sums::encode(&self.superblock.uuid, at, None, false, &mut silent);
            storage.write_at(at, &silent).map_err(failed)
        };
        let mut leaders = Vec::new();
        self.each_damaged(storage, |page, _| {
            if page.is_multiple_of(PAGES_PER_GROUP) {
                leaders.push(page);
                return Ok(());
            }
            write(page)
        })?;
        // Also those of extents that are not in use: they may come to be.
        let all = self.superblock.geometry.needed_blocks(RegionKind::Sums);
        for leader in &leaders {
            (leader + 1..(leader + PAGES_PER_GROUP).min(all)).try_for_each(&mut write)?;
        }
        storage.flush().map_err(failed)?;
        leaders.into_iter().try_for_each(&mut write)?;
        storage.flush().map_err(failed)
    }

    fn address(&self, page: u32) -> u64 {
        self.superblock.geometry.sums_address(page)
    }

    /// Calls `act` for each damaged page that is not one of an open group; how many groups are open.
    fn each_damaged(
        &self,
        storage: &dyn Storage,
        mut act: impl FnMut(u32, BlockFault) -> Result<()>,
    ) -> Result<u64> {
        // A whole number of groups is looked at together.
        let (mut open, mut is_open) = (0, false);
        let block = BLOCK_BYTES as usize;
        let mut buf = AlignedBuf::zeroed(PAGES_AT_ONCE.min(self.count) as usize * block);
        let failed = |error| Error::io(error, "reading the checksums failed");
        for first in (0..self.count).step_by(PAGES_AT_ONCE as usize) {
            let count = PAGES_AT_ONCE.min(self.count - first);
            let part = &mut buf[..count as usize * block];
            let unreadable =
                recover::read_blocks(storage, self.address(first), part).map_err(failed)?;
            for (page, bytes) in (first..).zip(part.chunks_exact_mut(block)) {
                if page.is_multiple_of(PAGES_PER_GROUP) {
                    is_open = self.said(page, bytes).group_open;
                    open += u64::from(is_open);
                }
                if unreadable.contains(&(page - first)) {
                    act(page, BlockFault::Unreadable)?;
                    continue;
                }
                if is_open || self.fault(page, bytes).is_none() {
                    continue;
                }
                // In a store that is open it may have been written just now.
                storage.read_at(self.address(page), bytes).map_err(failed)?;
                if let Some(fault) = self.fault(page, bytes) {
                    act(page, fault)?;
                }
            }
        }
        Ok(open)
    }

    fn said(&self, page: u32, bytes: &[u8]) -> Stored {
        sums::decode(&self.superblock.uuid, self.address(page), bytes)
    }

    /// What is wrong with a page. What is none of this store was never written: the region holds what
    /// the device held before.
    fn fault(&self, page: u32, bytes: &[u8]) -> Option<BlockFault> {
        match self.said(page, bytes).sums {
            StoredSums::Damaged(BlockFault::Foreign | BlockFault::Kind) => None,
            StoredSums::Damaged(fault) => Some(fault),
            StoredSums::Blank | StoredSums::Silent | StoredSums::Known(_) => None,
        }
    }
}

const _: () = assert!(PAGES_AT_ONCE.is_multiple_of(PAGES_PER_GROUP));

impl Damaged {
    fn add(&mut self, page: u32, fault: BlockFault) {
        if self.listed.len() < PAGES_LISTED {
            self.listed.push((page, fault));
        } else {
            self.more += 1;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.listed.is_empty()
    }

    /// Bytes of data, at most, whose groups are open.
    pub(super) fn open_bytes(&self) -> u64 {
        self.open * u64::from(PAGES_PER_GROUP) * SUMS_PER_PAGE as u64 * BLOCK_BYTES
    }

    /// What a check says of them.
    pub(super) fn findings(&self) -> impl Iterator<Item = Finding> {
        self.told().map(|(index, what)| Finding {
            severity: Severity::Note,
            region: RegionKind::Sums.name().to_owned(),
            index,
            message: format!("{what}: what it is about is checked no more"),
        })
    }

    /// What a repair does about them.
    pub(super) fn steps(&self) -> impl Iterator<Item = RepairStep> {
        self.told().map(|(index, what)| RepairStep {
            kind: RepairKind::Mended,
            region: RegionKind::Sums.name().to_owned(),
            index,
            message: format!("{what}: begun anew, with the checksums of what is there by then"),
        })
    }

    fn told(&self) -> impl Iterator<Item = (Option<u64>, String)> {
        let more = (self.more > 0).then(|| (None, format!("{} more such pages", self.more)));
        let listed = self.listed.iter();
        listed.map(|(page, fault)| (Some(u64::from(*page)), fault.text().to_owned())).chain(more)
    }
}
