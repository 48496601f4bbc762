//! The parts of a read: on the device, nowhere, or where somebody must wait for them.

use super::Meta;
use super::view::{base_of, compressed_in};
use crate::units::{BLOCK_BYTES, SnapshotId};

/// A part of a read: bytes to fetch, or zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadPiece {
    /// Byte offset on the device; `None` reads as zeros, or is far.
    pub address: Option<u64>,
    /// Where they are instead, for who may wait.
    pub far: Option<Far>,
    /// Blocks.
    pub blocks: u64,
}

/// Where blocks are that have no place of their own on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Far {
    /// In the file of this base.
    Base(SnapshotId),
    /// In a compressed extent, from this one of its blocks on.
    Compressed {
        /// Data extent.
        extent: u32,
        /// Block in it.
        block: u32,
    },
}

impl ReadPiece {
    /// The base in whose file they are.
    pub fn base(&self) -> Option<SnapshotId> {
        match self.far {
            Some(Far::Base(base)) => Some(base),
            _ => None,
        }
    }

    /// Whether they are read from the device.
    #[inline]
    pub fn is_on_device(&self) -> bool {
        self.address.is_some() || matches!(self.far, Some(Far::Compressed { .. }))
    }
}

impl Meta {
    /// Where a block is whose source is no place; none if it is lost.
    #[cold]
    pub(super) fn far(&self, source: u32, block: u32) -> Option<Far> {
        match compressed_in(source) {
            Some(extent) => Some(Far::Compressed { extent, block }),
            None => base_of(source).map(Far::Base),
        }
    }
}

/// Adds a part to a read, joined with the last one if it follows it.
pub(super) fn push_read(out: &mut Vec<ReadPiece>, piece: ReadPiece) {
    if let Some(last) = out.last_mut() {
        let follows = match (last.address, piece.address) {
            (None, None) => last.far == piece.far,
            (Some(a), Some(b)) => a + last.blocks * BLOCK_BYTES == b,
            _ => false,
        };
        if follows {
            last.blocks += piece.blocks;
            return;
        }
    }
    out.push(piece);
}
