//! Where things lie in a v1.0.0 image, and how one record of each kind reads. Bytes only: no I/O,
//! no judgement on what the records say of each other.

use crate::error::{Error, Result};

/// First bytes of an image.
pub(super) const MAGIC: [u8; 8] = *b"DBS@393!";
/// The only version there is, whatever the table layout.
pub(super) const VERSION: u32 = 0x0001_0000;
/// Bytes of a block, the unit of an extent's bitmap.
pub(super) const BLOCK: u64 = 4096;
/// Bytes of an extent.
pub(super) const EXTENT: u64 = 1 << 20;
/// Slots of the volume table.
pub(super) const VOLUMES: usize = 256;
/// Bytes of a volume slot.
pub(super) const VOLUME_BYTES: usize = 266;
/// Slots of the snapshot table.
pub(super) const SNAPSHOTS: usize = 65535;
/// Bytes of an extent record.
pub(super) const RECORD_BYTES: usize = 38;
/// Bytes of an extent's block bitmap.
pub(super) const BITMAP_BYTES: usize = 32;
/// Where the volume table starts.
pub(super) const VOLUME_TABLE: u64 = BLOCK;
/// Where the snapshot table starts.
pub(super) const SNAPSHOT_TABLE: u64 = VOLUME_TABLE + (VOLUMES * VOLUME_BYTES) as u64;
/// The smallest device the prototype formats.
pub(super) const SIZE_MIN: u64 = 100 << 20;
/// The largest device read: no prototype image came near it, and it bounds the work on a hostile
/// one.
pub(super) const SIZE_MAX: u64 = 64 << 40;

/// The two table layouts, which share one version number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Branch `main` of the prototype.
    Main,
    /// Branch `dev`: snapshots with an origin and labels.
    Dev,
}

impl Layout {
    /// The name users give: `main` or `dev`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Dev => "dev",
        }
    }

    /// Bytes of a snapshot slot.
    pub(super) fn snapshot_bytes(self) -> usize {
        match self {
            Self::Main => 10,
            Self::Dev => 19,
        }
    }

    /// Offset just past the snapshot table: where the labels start, if the layout has any.
    pub(super) fn snapshots_end(self) -> u64 {
        SNAPSHOT_TABLE + (SNAPSHOTS * self.snapshot_bytes()) as u64
    }

    /// Offset of the extent table.
    pub(super) fn extent_table(self) -> u64 {
        self.snapshots_end().next_multiple_of(BLOCK)
    }
}

impl std::str::FromStr for Layout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Main, Self::Dev].into_iter().find(|layout| layout.name() == text).ok_or_else(|| {
            Error::invalid(format!("`{text}` is no layout of a v1 image; write main or dev"))
        })
    }
}

/// The superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Superblock {
    /// Extents the allocator has handed out, from the first on. It may exceed what fits.
    pub allocated: u32,
    /// Size in bytes of the device when it was formatted.
    pub device_size: u64,
}

impl Superblock {
    pub(super) const BYTES: usize = 24;

    /// Reads and judges a superblock.
    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self> {
        if bytes[..8] != MAGIC {
            return Err(Error::corrupt("not a DBS image: the magic is missing"));
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(Error::unsupported(format!(
                "the image has format version {}.{}.{}, not 1.0.0",
                version >> 16,
                version >> 8 & 0xff,
                version & 0xff
            )));
        }
        let device_size = u64_at(bytes, 16);
        if device_size < SIZE_MIN {
            return Err(Error::corrupt(format!(
                "the superblock gives a device size of {device_size} bytes, below the minimum of \
                 {SIZE_MIN}"
            )));
        }
        if device_size > SIZE_MAX {
            return Err(Error::unsupported(format!(
                "the superblock gives a device size of {device_size} bytes; at most {SIZE_MAX} \
                 are supported"
            )));
        }
        Ok(Self { allocated: u32_at(bytes, 12), device_size })
    }
}

/// Where the extents of a device of one size lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Offset of the extent table.
    pub table: u64,
    /// Offset of extent 0's data.
    pub data: u64,
    /// Number of extents.
    pub extents: u64,
}

impl Geometry {
    /// The geometry of a device of `size` bytes, at least [`SIZE_MIN`].
    pub(super) fn new(layout: Layout, size: u64) -> Self {
        let table = layout.extent_table();
        let first_guess = size.saturating_sub(table) / EXTENT;
        let records = RECORD_BYTES as u64 * first_guess;
        Self {
            table,
            data: (table + records).next_multiple_of(EXTENT),
            extents: first_guess - records / EXTENT,
        }
    }
}

/// One slot of the volume table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VolumeSlot {
    /// The head; 0 marks a free slot.
    pub head: u16,
    pub size: u64,
    /// Up to the first NUL. What a shorter name left behind after it means nothing.
    pub name: Vec<u8>,
}

impl VolumeSlot {
    pub(super) fn decode(bytes: &[u8]) -> Self {
        let name = &bytes[10..VOLUME_BYTES];
        let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
        Self { head: u16_at(bytes, 0), size: u64_at(bytes, 2), name: name[..end].to_vec() }
    }
}

/// One slot of the snapshot table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SnapshotSlot {
    /// Parent, 0 for a root.
    pub parent: u16,
    /// Unix seconds; 0 marks a free slot.
    pub created: i64,
    /// 0 or 1; always 1 in the layout that does not tell.
    pub user_created: u8,
    /// 0 on every disk the prototype wrote; kept only to tell the layouts apart.
    pub size: u64,
}

impl SnapshotSlot {
    pub(super) fn decode(layout: Layout, bytes: &[u8]) -> Self {
        let (user_created, size) = match layout {
            Layout::Main => (1, 0),
            Layout::Dev => (bytes[10], u64_at(bytes, 11)),
        };
        Self { parent: u16_at(bytes, 0), created: u64_at(bytes, 2) as i64, user_created, size }
    }

    pub(super) fn is_live(&self) -> bool {
        self.created != 0
    }
}

/// The fixed part of an extent record; its bitmap is read when the extent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    /// Owner, 0 for a free extent.
    pub snapshot: u16,
    /// Extent of the volume.
    pub logical: u32,
}

impl Record {
    pub(super) fn decode(bytes: &[u8]) -> Self {
        Self { snapshot: u16_at(bytes, 0), logical: u32_at(bytes, 2) }
    }
}

// The callers pass slices of the fixed sizes above, so the ranges exist.

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_lie_where_the_prototype_put_them() {
        assert_eq!(SNAPSHOT_TABLE, 72192);
        assert_eq!(Layout::Main.extent_table(), 729_088);
        assert_eq!(Layout::Dev.snapshots_end(), 1_317_357);
        assert_eq!(Layout::Dev.extent_table(), 1_318_912);
    }

    #[test]
    fn geometry_matches_images_the_prototype_made() {
        for (layout, size_mib, data_mib, extents) in [
            (Layout::Main, 100, 1, 99),
            (Layout::Main, 1024, 1, 1023),
            (Layout::Main, 100_000, 5, 99_996),
            (Layout::Dev, 1024, 2, 1022),
        ] {
            let geometry = Geometry::new(layout, size_mib << 20);
            assert_eq!(geometry.data, data_mib << 20, "{layout:?} {size_mib} MiB");
            assert_eq!(geometry.extents, extents, "{layout:?} {size_mib} MiB");
        }
    }

    #[test]
    fn superblocks_of_others_are_refused() {
        let mut bytes = [0; Superblock::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&(1u64 << 30).to_le_bytes());
        assert_eq!(
            Superblock::decode(&bytes).unwrap(),
            Superblock { allocated: 0, device_size: 1 << 30 }
        );
        for (at, value) in [(0, 0), (8, 1), (10, 2), (19, 0), (23, 1)] {
            let mut wrong = bytes;
            wrong[at] = value;
            assert!(Superblock::decode(&wrong).is_err(), "byte {at} = {value}");
        }
    }
}
