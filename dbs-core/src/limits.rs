//! Every limit in one place, each with its why.

use crate::units::BLOCK_BYTES;
use std::time::Duration;

/// Bytes of the memory that holds the tail: a header block and two halves.
pub const TAIL_BYTES: usize = 4 << 20;
/// Longest volume or snapshot name in bytes of UTF-8: the slot's field.
pub const NAME_MAX_BYTES: usize = 255;
/// Bytes of encoded labels a snapshot can hold: two label blocks less their length field.
pub const LABELS_MAX_BYTES: usize = 8000;

/// Smallest extent: below it the status region outweighs what it describes.
pub const EXTENT_MIN_BYTES: u64 = 64 << 10;
/// Largest extent: its entry's two bitmaps must leave several entries to a metadata block.
pub const EXTENT_MAX_BYTES: u64 = 4 << 20;

/// Most data extents: the ids above are spare entries, and the topmost bit marks a cached lookup.
pub const DATA_EXTENTS_MAX: u64 = 1 << 30;
/// Most spare entries (zero runs and zero-only layers).
pub const SPARES_MAX: u64 = 1 << 24;
/// Most volumes: the in-memory table is a plain vector.
pub const VOLUMES_MAX: u32 = 1 << 20;
/// Most snapshot slots, heads included.
pub const SNAPSHOTS_MAX: u32 = 1 << 22;

/// Largest volume: 2^30 extents of 64 KiB, for every extent size, so that volumes move between
/// stores whatever their geometry.
pub const VOLUME_MAX_BYTES: u64 = 64 << 40;
/// Largest store.
pub const STORE_MAX_BYTES: u64 = 64 << 40;

/// Smallest journal: a group is at most an eighth of it and must hold a full label set.
pub const JOURNAL_MIN_BYTES: u64 = 32 * BLOCK_BYTES;
/// Largest journal: it is read whole at open.
pub const JOURNAL_MAX_BYTES: u64 = 256 << 20;

/// Highest sequence number: far out of reach, so that adding to one never overflows.
pub const SEQUENCE_MAX: u64 = 1 << 62;
/// Highest sequence from which a store is written or repaired: so many follow that it is never written
/// until it cannot be read. Nobody who only counts comes near it.
pub const SEQUENCE_START_MAX: u64 = 1 << 61;

/// Metadata blocks written back by one commit when the journal is not short of space.
pub const WRITEBACK_BLOCKS: usize = 256;
/// Metadata blocks written back by one commit when it is: bounds the memory of their images, and
/// for how long requests wait while they are taken.
pub const WRITEBACK_BLOCKS_FORCED: usize = 512;

/// Metadata blocks whose storage is reserved ahead, at least: a write that has to wait for that
/// waits for the device, so that it should be rare.
pub const ROOM_BLOCKS: u32 = 16;
/// Volume extents handled under one hold of the metadata lock by discard and flatten. A group of the smallest
/// journal has room for the records of so many entries that are freed, behind those that make it long.
pub const EXTENTS_PER_STEP: u32 = 512;
/// One of so many data extents is left to data when a discard finds no spare entry to mark zeros in: if no
/// more are free, blocks keep their content.
pub const DATA_SHARE: u32 = 16;
/// Extents one step of a write touches: bounds what writes in flight may add to a commit group.
pub const EXTENTS_PER_WRITE: usize = 32;
/// Longest request of an encrypted volume that a reactor encrypts or decrypts itself: while it does, nobody else that it
/// serves gets an answer.
pub const ENCRYPTED_START_MAX: u64 = 1 << 20;
/// The same where the processor has no instructions for AES, and is some 50 times slower.
pub const ENCRYPTED_START_MAX_SLOW: u64 = 64 << 10;

/// Memory for what look-ups have found, unless said otherwise: 16 Mi volume extents with one layer each.
pub const LOOKUP_CACHE_BYTES: u64 = 64 << 20;

/// Memory for checksums, unless said otherwise: those of about 64 GiB of data.
pub const SUMS_CACHE_BYTES: u64 = 64 << 20;
/// Pages of checksums loaded together: those of about 63 MiB.
pub const SUMS_WINDOW: u32 = 16;
/// Groups of checksums open at once, those of about 4 TiB: a crash costs no more checksums than theirs.
pub const SUMS_OPEN_GROUPS: usize = 64 << 10;
/// Least memory for checksums: what one request needs must not be forgotten while more of it is loaded,
/// with its neighbours.
pub const SUMS_CACHE_MIN_BYTES: u64 = 4 * SUMS_WINDOW as u64 * BLOCK_BYTES;
/// How long a group of checksums stays open after its last change. Longer, and a crash costs the
/// checksums of more data; shorter, and more writes wait for their group to be opened.
pub const SUMS_IDLE: Duration = Duration::from_secs(30);

const _: () = assert!(DATA_EXTENTS_MAX + SPARES_MAX < 1 << 31);
const _: () = assert!(EXTENT_MIN_BYTES * DATA_EXTENTS_MAX >= STORE_MAX_BYTES);
const _: () = assert!(VOLUME_MAX_BYTES / EXTENT_MIN_BYTES <= u32::MAX as u64);
const _: () = assert!(LABELS_MAX_BYTES + 4 <= 2 * 4032);
