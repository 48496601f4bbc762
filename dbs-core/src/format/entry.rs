//! Extent and spare entries: who owns an extent, which part of its volume it is, and per block
//! whether it holds data, zeros, or nothing.

use crate::limits::EXTENT_MAX_BYTES;
use crate::units::BLOCK_BYTES;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of the fixed part of an entry; the data bitmap and the zero bitmap follow.
pub const HEADER_BYTES: usize = 16;
/// Bytes of an entry of the largest extents.
pub const ENTRY_MAX_BYTES: usize = HEADER_BYTES + (EXTENT_MAX_BYTES / BLOCK_BYTES) as usize / 4;

/// State of a run of extents that are lost instead of zero.
pub const RUN_LOST: u32 = 1;

/// Fixed part of an entry. All zeros is a free entry.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct EntryHeader {
    /// Owning snapshot id; 0 is free.
    pub snapshot: U32,
    /// Volume extent this is the layer of, or the first one of a zero run.
    pub logical: U32,
    /// Spare entries only: volume extents in the zero run; 0 means a zero-only layer (bitmaps).
    pub run: U32,
    /// [`RUN_LOST`], that of a [compressed](super::compressed) extent, or zero.
    pub state: U32,
}

const _: () = assert!(size_of::<EntryHeader>() == HEADER_BYTES);

/// An entry in bytes: header and the two bitmaps (LSB first; bit b of byte b/8 is block b).
#[derive(Debug, Clone, Copy)]
pub struct EntryBytes<'a> {
    /// Fixed part.
    pub header: EntryHeader,
    /// Blocks that hold data.
    pub data: &'a [u8],
    /// Blocks that read as zeros whatever the parent holds.
    pub zero: &'a [u8],
}

/// The entry at `index` of a block's payload, for entries of `entry_bytes`.
#[must_use]
pub fn get(payload: &[u8], index: u32, entry_bytes: usize) -> Option<EntryBytes<'_>> {
    let start = index as usize * entry_bytes;
    parse(payload.get(start..start + entry_bytes)?)
}

/// An entry from exactly its bytes.
#[must_use]
pub fn parse(bytes: &[u8]) -> Option<EntryBytes<'_>> {
    let (header, bitmaps) = EntryHeader::read_from_prefix(bytes).ok()?;
    let (data, zero) = bitmaps.split_at_checked(bitmaps.len() / 2)?;
    Some(EntryBytes { header, data, zero })
}
