//! How a volume looks to a guest: the features and the configuration of its disk.

use super::request::{DISCARD_MAX_BYTES, SECTOR_BYTES, ZEROES_MAX_BYTES};

/// Features of the disk, and of its queues.
pub mod feature {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const SIZE_MAX: u64 = 1 << 1;
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const INDIRECT: u64 = 1 << 28;
    pub const EVENT_INDEX: u64 = 1 << 29;
    pub const PROTOCOL: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
}

/// Queues of a disk at most.
pub const QUEUES_MAX: u16 = 64;
/// Bytes of a configuration that a client may ask for.
pub const CONFIG_MAX_BYTES: usize = 256;
/// Pieces of a request, and bytes of each: what a ring of 128 places takes without a table of its own.
const SEGMENTS_MAX: u32 = 126;
const SEGMENT_MAX_BYTES: u32 = 64 << 10;
/// Sectors of a range to be given up.
const DISCARD_MAX_SECTORS: u32 = (DISCARD_MAX_BYTES / SECTOR_BYTES) as u32;
/// Sectors of a range to be made zero.
const ZEROES_MAX_SECTORS: u32 = (ZEROES_MAX_BYTES / SECTOR_BYTES) as u32;
/// Blocks of 4 KiB are written as a whole: as a power of two of sectors.
const BLOCK_SECTORS_LOG: u8 = 3;

/// What a disk can do.
pub fn features(read_only: bool) -> u64 {
    use feature::*;
    let changes = if read_only { RO } else { DISCARD | WRITE_ZEROES };
    let disk = SIZE_MAX | SEG_MAX | BLK_SIZE | FLUSH | TOPOLOGY | MQ | changes;
    disk | INDIRECT | EVENT_INDEX | PROTOCOL | VERSION_1
}

/// The configuration of a disk of so many bytes.
pub fn config(size: u64, read_only: bool) -> [u8; CONFIG_MAX_BYTES] {
    let mut config = [0; CONFIG_MAX_BYTES];
    let mut set = |at: usize, bytes: &[u8]| {
        if let Some(place) = config.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    set(0, &(size / SECTOR_BYTES).to_le_bytes());
    set(8, &SEGMENT_MAX_BYTES.to_le_bytes());
    set(12, &SEGMENTS_MAX.to_le_bytes());
    set(20, &(SECTOR_BYTES as u32).to_le_bytes());
    // The least I/O that is good: a block. The best has no other.
    set(24, &[BLOCK_SECTORS_LOG, 0]);
    set(26, &(1u16 << BLOCK_SECTORS_LOG).to_le_bytes());
    set(34, &QUEUES_MAX.to_le_bytes());
    if !read_only {
        set(36, &DISCARD_MAX_SECTORS.to_le_bytes());
        set(40, &1u32.to_le_bytes());
        set(44, &(1u32 << BLOCK_SECTORS_LOG).to_le_bytes());
        set(48, &ZEROES_MAX_SECTORS.to_le_bytes());
        set(52, &1u32.to_le_bytes());
        // Their space is given up where the guest allows it.
        set(56, &[1]);
    }
    config
}
