//! Damaged pages of checksums, and groups of pages that are open: a check finds and counts them, a repair
//! empties the damaged pages. Both cost checksums, and no data.

use super::unreadable;
use crate::error::{Error, Result};
use crate::format::sums::{self, PAGES_PER_GROUP, SUMS_PER_PAGE, Stored, StoredSums};
use crate::format::{BlockFault, RegionKind, Superblock};
use crate::info::{Finding, RepairKind, RepairStep, Severity};
use crate::io::Storage;
use crate::io::buffer::AlignedBuf;
use crate::units::BLOCK_BYTES;

/// Pages read at once.
const PAGES_AT_ONCE: u32 = 256;
/// Damaged pages that are reported one by one.
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

    /// Empties the damaged pages, durably: they say nothing of any block, and nothing is wrong with them.
    /// If a leader is damaged, nobody knows whether its group was open. So all pages of the group are
    /// emptied, the leader last, because from then on the pages count.
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
                unreadable::read_blocks(storage, self.address(first), part).map_err(failed)?;
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

    /// What is wrong with a page. A block that is no page of this store was never written: the region
    /// still holds what the device held before the store was made.
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
        self.told().map(|told| Finding {
            severity: Severity::Note,
            region: RegionKind::Sums.name().to_owned(),
            index: told.index,
            message: format!("{}: {} not compared with checksums", told.what, told.data_is),
        })
    }

    /// What a repair does about them.
    pub(super) fn steps(&self) -> impl Iterator<Item = RepairStep> {
        self.told().map(|told| RepairStep {
            kind: RepairKind::Mended,
            region: RegionKind::Sums.name().to_owned(),
            index: told.index,
            message: format!(
                "{}: {} emptied; the checksums are made again from the data when it is read",
                told.what, told.pages_are
            ),
        })
    }

    fn told(&self) -> impl Iterator<Item = Told> {
        let listed = self.listed.iter().map(|(page, fault)| {
            let (data_is, pages_are) = match page.is_multiple_of(PAGES_PER_GROUP) {
                true => ("the data of this group of pages is", "all pages of this group are"),
                false => ("the data of this page is", "this page is"),
            };
            let (index, what) = (Some(u64::from(*page)), fault.text().to_owned());
            Told { index, what, data_is, pages_are }
        });
        let more = (self.more > 0).then(|| Told {
            index: None,
            what: format!("{} more such pages", self.more),
            data_is: "their data is",
            pages_are: "they are",
        });
        listed.chain(more)
    }
}

/// A damaged page, or how many there are beyond the listed ones, and what it concerns.
struct Told {
    index: Option<u64>,
    what: String,
    data_is: &'static str,
    pages_are: &'static str,
}
