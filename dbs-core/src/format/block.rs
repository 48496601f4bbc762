//! The metadata block: 4 KiB with a header that proves what it is, where it belongs and when it
//! was written. Everything but the superblock lives in such blocks.

use super::crc::{crc32c, crc32c_append};
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a metadata block.
pub const BLOCK: usize = BLOCK_BYTES as usize;
/// Bytes of its header.
pub const HEADER_BYTES: usize = 64;
/// Bytes left for content.
pub const PAYLOAD_BYTES: usize = BLOCK - HEADER_BYTES;

/// What a block holds; the value is its magic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum BlockKind {
    /// Volume slots.
    Volumes = u32::from_le_bytes(*b"DBSv"),
    /// Snapshot slots.
    Snapshots = u32::from_le_bytes(*b"DBSs"),
    /// Half of a snapshot's labels.
    Labels = u32::from_le_bytes(*b"DBSl"),
    /// Extent entries.
    Extents = u32::from_le_bytes(*b"DBSe"),
    /// Spare entries.
    Spares = u32::from_le_bytes(*b"DBSz"),
    /// Part of a journal group.
    Journal = u32::from_le_bytes(*b"DBSj"),
    /// Checksums of data blocks.
    Sums = u32::from_le_bytes(*b"DBSc"),
}

/// Header of every metadata block.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct BlockHeader {
    /// A [`BlockKind`].
    pub kind: U32,
    /// CRC32C of the whole block with this field zero.
    pub crc: U32,
    /// Byte offset of this copy on the device.
    pub address: U64,
    /// Sequence of the last commit group this content includes.
    pub lsn: U64,
    /// Identity of the store: blocks of an earlier format of the device are foreign.
    pub store: [u8; 16],
    /// For [`BlockKind::Journal`] the group's facts, for [`BlockKind::Sums`] the page's state,
    /// otherwise zero.
    pub extra: [u8; 24],
}

const _: () = assert!(size_of::<BlockHeader>() == HEADER_BYTES);
const _: () = assert!(std::mem::offset_of!(BlockHeader, store) == 24);
const _: () = assert!(std::mem::offset_of!(BlockHeader, extra) == 40);

/// Why bytes are not the block that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockFault {
    /// All zeros: never written.
    Blank,
    /// Not a block of this kind.
    Kind,
    /// Damaged.
    Checksum,
    /// Intact, but written for another place.
    Address,
    /// Intact, but of another store.
    Foreign,
    /// Intact, but in a state that does not exist.
    State,
    /// The device gives an error instead of it.
    Unreadable,
}

impl BlockFault {
    /// In words.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Blank => "never written",
            Self::Kind => "not a metadata block of this region",
            Self::Checksum => "checksum mismatch",
            Self::Address => "written for another address (misdirected write)",
            Self::Foreign => "belongs to another store",
            Self::State => "in no known state",
            Self::Unreadable => "the device cannot read it",
        }
    }
}

/// Fills in header and checksum of `block`, whose payload is in place.
///
/// # Panics
/// If `block` is not 4 KiB: a bug.
pub fn seal(
    block: &mut [u8],
    kind: BlockKind,
    store: &[u8; 16],
    address: u64,
    lsn: u64,
    extra: [u8; 24],
) {
    assert_eq!(block.len(), BLOCK);
    let header = BlockHeader {
        kind: (kind as u32).into(),
        crc: 0.into(),
        address: address.into(),
        lsn: lsn.into(),
        store: *store,
        extra,
    };
    block[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    let crc = crc32c(block);
    block[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// Checks `block` and returns its header.
///
/// # Errors
/// The fault that makes it unusable.
pub fn open(
    block: &[u8],
    kind: BlockKind,
    store: &[u8; 16],
    address: u64,
) -> Result<BlockHeader, BlockFault> {
    let header = BlockHeader::read_from_prefix(block).map_err(|_| BlockFault::Kind)?.0;
    if block.len() != BLOCK || header.kind.get() != kind as u32 {
        return Err(if is_blank(block) { BlockFault::Blank } else { BlockFault::Kind });
    }
    if header.crc.get() != checksum(block) && !sabotage::is(Bug::IgnoreBlockChecksum) {
        return Err(BlockFault::Checksum);
    }
    if header.store != *store {
        return Err(BlockFault::Foreign);
    }
    if header.address.get() != address {
        return Err(BlockFault::Address);
    }
    Ok(header)
}

/// The content after the header.
#[must_use]
pub fn payload(block: &[u8]) -> &[u8] {
    block.get(HEADER_BYTES..).unwrap_or_default()
}

/// Whether all of it is zeros. Most of a journal is, and all of it is read at each opening: blocks are
/// compared at once, not byte by byte.
#[must_use]
pub fn is_blank(bytes: &[u8]) -> bool {
    static ZEROS: [u8; BLOCK] = [0; BLOCK];
    bytes.chunks(BLOCK).all(|part| *part == ZEROS[..part.len()])
}

fn checksum(block: &[u8]) -> u32 {
    let crc = crc32c(&block[..4]);
    let crc = crc32c_append(crc, &[0; 4]);
    crc32c_append(crc, &block[8..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_detected() {
        let store = [7; 16];
        let mut block = vec![0; BLOCK];
        block[HEADER_BYTES..].fill(0x5a);
        seal(&mut block, BlockKind::Extents, &store, 8192, 3, [0; 24]);
        assert_eq!(open(&block, BlockKind::Extents, &store, 8192).unwrap().lsn.get(), 3);
        for bit in 0..BLOCK * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&block, BlockKind::Extents, &store, 8192).is_err(), "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn misplaced_and_foreign_blocks_are_told_apart() {
        let mut block = vec![0; BLOCK];
        assert_eq!(open(&block, BlockKind::Labels, &[1; 16], 0).unwrap_err(), BlockFault::Blank);
        seal(&mut block, BlockKind::Labels, &[1; 16], 4096, 1, [0; 24]);
        let fault = |kind, store, address| open(&block, kind, &store, address).unwrap_err();
        assert_eq!(fault(BlockKind::Labels, [1; 16], 8192), BlockFault::Address);
        assert_eq!(fault(BlockKind::Labels, [2; 16], 4096), BlockFault::Foreign);
        assert_eq!(fault(BlockKind::Spares, [1; 16], 4096), BlockFault::Kind);
        block[2000] ^= 1;
        let rotten = open(&block, BlockKind::Labels, &[1; 16], 4096).unwrap_err();
        assert_eq!(rotten, BlockFault::Checksum);
        let faults =
            [BlockFault::Blank, BlockFault::Kind, BlockFault::Address, BlockFault::Foreign];
        let texts: std::collections::BTreeSet<_> =
            faults.into_iter().chain([rotten]).map(BlockFault::text).collect();
        assert_eq!(texts.len(), 5);
    }
}
