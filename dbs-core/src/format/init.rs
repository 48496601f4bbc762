//! What is chosen when a store is formatted.

/// How to format a store.
#[derive(Debug, Clone)]
pub struct InitOptions {
    /// Size in bytes; required for a new file, for a device or an existing file its own size.
    pub size: Option<u64>,
    /// Extent size in bytes, a power of two from 64 KiB to 4 MiB.
    pub extent_size: u64,
    /// Volume table capacity; by default chosen by size.
    pub max_volumes: Option<u32>,
    /// Snapshot table capacity (heads included); by default chosen by size.
    pub max_snapshots: Option<u32>,
    /// Journal size in bytes; by default chosen by size.
    pub journal_size: Option<u64>,
    /// Size the store can grow to; by default 16 times its size, at most 64 TiB or its size.
    pub max_size: Option<u64>,
    /// Keep a checksum of each block of data, and compare it at each read: by default. It cannot be
    /// changed later.
    pub checksums: bool,
    /// Format even over a known signature (never a mounted device or an open store).
    pub force: bool,
}

impl Default for InitOptions {
    fn default() -> Self {
        Self {
            size: None,
            extent_size: 1 << 20,
            max_volumes: None,
            max_snapshots: None,
            journal_size: None,
            max_size: None,
            checksums: true,
            force: false,
        }
    }
}
