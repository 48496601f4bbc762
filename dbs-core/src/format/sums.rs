//! A page of checksums of data blocks: bytes only. What may be believed of one is decided here, and
//! argued in `docs/format.md`, section 21.

use super::block::{self, BLOCK, BlockFault, BlockKind, HEADER_BYTES, PAYLOAD_BYTES};
use super::crc::crc32c;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Data blocks whose sums a page holds: all that fit. It is no power of two, but 63 of the smallest
/// extents, and to divide by a constant costs a multiplication.
pub const SUMS_PER_PAGE: usize = PAYLOAD_BYTES / 4;

/// Of a block whose content is not known. No content has it: see [`sum`].
pub const UNKNOWN: u32 = 0;

/// Pages of a group: those of 63 MiB. The first of them, the *leader*, says whether the group is open.
pub const PAGES_PER_GROUP: u32 = 16;

/// The page says nothing of any block.
const SILENT: u32 = 1;
/// The page has a sum for each block.
const SAYS: u32 = 2;

/// Of a leader: blocks of the group may have been written since, and none of its pages counts.
const GROUP_OPEN: u32 = 1;

/// The `extra` bytes of a page's header.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SumsExtra {
    pub(super) state: U32,
    pub(super) group: U32,
    pub(super) reserved: [u8; 16],
}

const _: () = assert!(size_of::<SumsExtra>() == 24);
const _: () = assert!(SUMS_PER_PAGE.is_multiple_of(16));

/// The sums of a page.
pub type PageSums = [u32; SUMS_PER_PAGE];

/// What a page on the device says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Of its blocks, if its group is not open.
    pub sums: StoredSums,
    /// Of its group, if it is the leader: it is open.
    pub group_open: bool,
}

/// What a page on the device says of its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredSums {
    /// Never written: nothing is known.
    Blank,
    /// Nothing is known.
    Silent,
    /// What each block in use holds, or [`UNKNOWN`].
    Known(Box<PageSums>),
    /// No page of this store and place: nothing is known, and what it turns into is not either.
    Damaged(BlockFault),
}

impl Stored {
    /// Nothing is known of its blocks; its group is open.
    pub const OPEN: Self = Self { sums: StoredSums::Silent, group_open: true };

    fn of(sums: StoredSums) -> Self {
        Self { sums, group_open: false }
    }
}

/// The checksum of a block: its CRC32C, or 1 if that is 0.
#[must_use]
#[inline]
pub fn sum(block: &[u8]) -> u32 {
    crc32c(block).max(1)
}

/// Makes `block` the page to write at `address`: with these sums, or without any. A leader says with
/// `group_open` that its group is open; other pages say `false`.
pub fn encode(
    store: &[u8; 16],
    address: u64,
    sums: Option<&PageSums>,
    group_open: bool,
    block: &mut [u8],
) {
    block.fill(0);
    if let Some(sums) = sums {
        let out = block[HEADER_BYTES..].chunks_exact_mut(4);
        out.zip(sums).for_each(|(out, sum)| out.copy_from_slice(&sum.to_le_bytes()));
    }
    let state = if sums.is_some() { SAYS } else { SILENT };
    let group = if group_open { GROUP_OPEN } else { 0 };
    let extra = SumsExtra { state: state.into(), group: group.into(), reserved: [0; 16] };
    let mut bytes = [0; 24];
    bytes.copy_from_slice(extra.as_bytes());
    block::seal(block, BlockKind::Sums, store, address, 0, bytes);
}

/// What the block read from `address` says.
#[must_use]
pub fn decode(store: &[u8; 16], address: u64, bytes: &[u8]) -> Stored {
    let header = match block::open(bytes, BlockKind::Sums, store, address) {
        Ok(header) => header,
        Err(BlockFault::Blank) => return Stored::of(StoredSums::Blank),
        Err(fault) => return Stored::of(StoredSums::Damaged(fault)),
    };
    let extra = SumsExtra::read_from_bytes(&header.extra);
    let (state, group) = extra.map_or((0, 0), |extra| (extra.state.get(), extra.group.get()));
    let group_open = group == GROUP_OPEN;
    match state {
        _ if group > GROUP_OPEN => Stored::of(StoredSums::Damaged(BlockFault::State)),
        SILENT => Stored { sums: StoredSums::Silent, group_open },
        SAYS => {
            let mut sums = Box::new([UNKNOWN; SUMS_PER_PAGE]);
            let stored = block::payload(bytes).chunks_exact(4);
            for (sum, bytes) in sums.iter_mut().zip(stored) {
                *sum = u32::from_le_bytes(bytes.try_into().unwrap_or_default());
            }
            Stored { sums: StoredSums::Known(sums), group_open }
        }
        _ => Stored::of(StoredSums::Damaged(BlockFault::State)),
    }
}

const _: () = assert!(HEADER_BYTES + SUMS_PER_PAGE * 4 == BLOCK);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_say_what_they_were_told_and_nothing_when_damaged() {
        let store = [3; 16];
        let damaged = |fault| Stored::of(StoredSums::Damaged(fault));
        let mut sums = Box::new([UNKNOWN; SUMS_PER_PAGE]);
        (0..).zip(sums.iter_mut()).for_each(|(i, sum)| *sum = i * 7919);
        let mut page = vec![0xff; BLOCK];
        for group_open in [true, false] {
            encode(&store, 8192, Some(&sums), group_open, &mut page);
            let said = Stored { sums: StoredSums::Known(sums.clone()), group_open };
            assert_eq!(decode(&store, 8192, &page), said);
        }
        assert_eq!(decode(&store, 4096, &page), damaged(BlockFault::Address));
        assert_eq!(decode(&[4; 16], 8192, &page), damaged(BlockFault::Foreign));
        for byte in 0..BLOCK {
            page[byte] ^= 0x10;
            let said = decode(&store, 8192, &page);
            assert!(matches!(said.sums, StoredSums::Damaged(_)), "byte {byte}");
            assert!(!said.group_open);
            page[byte] ^= 0x10;
        }
        encode(&store, 8192, None, true, &mut page);
        assert_eq!(decode(&store, 8192, &page), Stored::OPEN);
        assert_eq!(decode(&store, 8192, &[0; BLOCK]), Stored::of(StoredSums::Blank));
        for extra in [[9; 24], [2; 24]] {
            block::seal(&mut page, BlockKind::Sums, &store, 8192, 0, extra);
            assert_eq!(decode(&store, 8192, &page), damaged(BlockFault::State));
        }
        let mut extra = [0; 24];
        (extra[0], extra[4]) = (2, 2);
        block::seal(&mut page, BlockKind::Sums, &store, 8192, 0, extra);
        assert_eq!(decode(&store, 8192, &page), damaged(BlockFault::State));
    }

    #[test]
    fn no_block_is_unknown() {
        // A block whose CRC32C is 0: that of the first bytes is undone by the last four.
        let mut block = vec![0x5a; BLOCK];
        let tail = crc32c(&block[..BLOCK - 4]);
        block[BLOCK - 4..].copy_from_slice(&forge(tail));
        assert_eq!(crc32c(&block), 0);
        assert_eq!(sum(&block), 1);
    }

    /// Four bytes that make a CRC32C of 0 out of that of what is before them.
    fn forge(crc: u32) -> [u8; 4] {
        // Final register 0xffffffff gives 0; run the register backwards through four bytes.
        let mut register = u32::MAX;
        for _ in 0..32 {
            let top = register >> 31;
            register = if top == 1 { (register ^ 0x82f6_3b78) << 1 | 1 } else { register << 1 };
        }
        (register ^ !crc).to_le_bytes()
    }
}
