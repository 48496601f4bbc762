//! What the extents of a device hold, for a map of it.

use super::DataPlace;
use serde::{Deserialize, Serialize};

/// Extents by what they hold. Each is counted once, as the last of these that it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ExtentCounts {
    /// Free for new data.
    pub free: u32,
    /// Freed, and not free for new data yet.
    pub pending: u32,
    /// Held by a head, or by a snapshot on which nothing else is based.
    pub data: u32,
    /// Held by a snapshot on which others are based: heads, snapshots and clones may show it.
    pub shared: u32,
    /// In use, and its group of checksums is open: it was written lately.
    pub dirty: u32,
    /// In use, and damage was met in it since the last scrub began, or the store was opened.
    pub damaged: u32,
}

impl ExtentCounts {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.free + self.pending + self.data + self.shared + self.dirty + self.damaged
    }
}

/// Cells beside each other that hold the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceRun {
    /// How many cells.
    pub cells: u32,
    /// The extents of each of them.
    #[serde(flatten)]
    pub extents: ExtentCounts,
}

/// What a part of the data region holds, in cells of equal size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SpaceMap {
    /// Where the part begins in the data region, in whole extents.
    pub offset: u64,
    /// Its length, in whole extents.
    pub length: u64,
    /// Bytes of the data region.
    pub size: u64,
    /// Bytes of an extent.
    pub extent_size: u64,
    /// Bytes of a cell; the last one may have fewer extents than that.
    pub cell_size: u64,
    /// The cells in order, those that hold the same as one.
    pub runs: Vec<SpaceRun>,
}

/// A volume or snapshot, and how many extents of a part of the data region it holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceOwner {
    /// The first of these extents: which volume and snapshot hold it, and what part of them it is.
    #[serde(flatten)]
    pub place: DataPlace,
    /// How many.
    pub extents: u32,
}

/// Who holds a part of the data region.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SpaceOwners {
    /// Where the part begins in the data region.
    pub offset: u64,
    /// How much of it was looked at, in bytes of whole extents.
    pub length: u64,
    /// What it holds.
    pub extents: ExtentCounts,
    /// Those that hold most of it, the first of them first.
    pub owners: Vec<SpaceOwner>,
    /// How many others hold some of it.
    pub others: u32,
}
