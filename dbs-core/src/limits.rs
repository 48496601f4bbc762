//! Every limit in one place, each with its why.

/// Bytes of the memory that holds the tail (two halves and a header block).
pub const TAIL_BYTES: usize = 4 << 20;
/// Longest volume or snapshot name in bytes of UTF-8.
pub const NAME_MAX_BYTES: usize = 255;
/// Bytes of encoded labels a snapshot can hold.
pub const LABELS_MAX_BYTES: usize = 8000;
