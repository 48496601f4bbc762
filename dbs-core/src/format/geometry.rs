//! Where everything lies: region table and the arithmetic on it.

use super::block::{BlockKind, PAYLOAD_BYTES};
use super::init::InitOptions;
use super::slots::SLOT_BYTES;
use super::sums::SUMS_PER_PAGE;
use crate::error::{Error, Result};
use crate::limits;
use crate::units::{BLOCK_BYTES, DeviceExtent};

/// Slots in a metadata block of the volume and snapshot tables.
pub const SLOTS_PER_BLOCK: u32 = (PAYLOAD_BYTES / SLOT_BYTES) as u32;
/// Metadata blocks for the labels of one snapshot.
pub const LABEL_BLOCKS: u32 = 2;
/// Bytes in front of the first region: two superblock copies and room.
pub const SUPERBLOCK_REGION_BYTES: u64 = 64 << 10;
/// Where the second superblock copy lies.
pub const SUPERBLOCK_SECOND: u64 = BLOCK_BYTES;

/// Kinds of region.
pub const REGION_KINDS: usize = 8;

/// A region after the superblock. The number is its place in the superblock's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum RegionKind {
    /// Volume table.
    Volumes = 1,
    /// Snapshot table.
    Snapshots = 2,
    /// Labels of snapshots.
    Labels = 3,
    /// Journal ring.
    Journal = 4,
    /// Spare entries: zero runs and zero-only layers.
    Spares = 5,
    /// Extent status.
    Extents = 6,
    /// Data.
    Data = 7,
    /// Checksums of data blocks; a region of no length in a store without them.
    Sums = 8,
}

impl RegionKind {
    /// All of them, in device order.
    pub const ALL: [Self; REGION_KINDS] = [
        Self::Volumes,
        Self::Snapshots,
        Self::Labels,
        Self::Journal,
        Self::Spares,
        Self::Extents,
        Self::Sums,
        Self::Data,
    ];
    /// Those of mirrored metadata blocks that are read whole at open, up to a high-water mark.
    pub const MARKED: [Self; 4] = [Self::Volumes, Self::Snapshots, Self::Spares, Self::Extents];

    /// Index of its high-water mark.
    ///
    /// # Panics
    /// For a region without one: a bug.
    #[must_use]
    pub fn mark(self) -> usize {
        Self::MARKED.iter().position(|kind| *kind == self).expect("region has a high-water mark")
    }

    /// The kind of its blocks.
    ///
    /// # Panics
    /// For the data region, which has none: a bug.
    #[must_use]
    pub fn block_kind(self) -> BlockKind {
        match self {
            Self::Volumes => BlockKind::Volumes,
            Self::Snapshots => BlockKind::Snapshots,
            Self::Labels => BlockKind::Labels,
            Self::Journal => BlockKind::Journal,
            Self::Spares => BlockKind::Spares,
            Self::Extents => BlockKind::Extents,
            Self::Sums => BlockKind::Sums,
            Self::Data => panic!("the data region has no metadata blocks"),
        }
    }

    /// Name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Volumes => "volume table",
            Self::Snapshots => "snapshot table",
            Self::Labels => "labels",
            Self::Journal => "journal",
            Self::Spares => "spare entries",
            Self::Extents => "extent status",
            Self::Data => "data",
            Self::Sums => "checksums",
        }
    }
}

/// Offset and length of a region in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Region {
    /// Byte offset on the device.
    pub offset: u64,
    /// Length in bytes; mirrored regions hold both copies.
    pub length: u64,
}

/// The shape of a store: everything that follows from the superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Store size in bytes.
    pub size: u64,
    /// Extent size in bytes, a power of two.
    pub extent_bytes: u64,
    /// Volume slots.
    pub volumes: u32,
    /// Snapshot slots.
    pub snapshots: u32,
    /// Spare entries.
    pub spares: u32,
    /// Data extents the extent status region has entries for.
    pub extents_max: u32,
    /// Regions by number, less one; the data region ends before the last superblock copy.
    pub regions: [Region; REGION_KINDS],
}

impl Geometry {
    /// Lays a store of `size` bytes out.
    ///
    /// # Errors
    /// `Invalid` if the numbers are impossible or leave no room for data.
    pub fn plan(size: u64, options: &InitOptions) -> Result<Self> {
        let size = size / BLOCK_BYTES * BLOCK_BYTES;
        let extent_bytes = options.extent_size;
        check_extent_bytes(extent_bytes)?;
        if size > limits::STORE_MAX_BYTES {
            return Err(Error::invalid("a store is at most 64 TiB"));
        }
        let max_size =
            options.max_size.unwrap_or((size * 16).min(limits::STORE_MAX_BYTES)).max(size);
        if max_size > limits::STORE_MAX_BYTES {
            return Err(Error::invalid("a store cannot grow beyond 64 TiB"));
        }
        let clamp = |value: u64, low: u64, high: u64| value.clamp(low, high) as u32;
        let volumes = options.max_volumes.unwrap_or(clamp(size >> 22, 64, 16384));
        let snapshots = options.max_snapshots.unwrap_or(clamp(size >> 20, 256, 65536 + 16384));
        if volumes == 0 || volumes > limits::VOLUMES_MAX {
            return Err(Error::invalid(format!(
                "the number of volumes must be 1 to {}",
                limits::VOLUMES_MAX
            )));
        }
        if snapshots < volumes || snapshots > limits::SNAPSHOTS_MAX {
            return Err(Error::invalid(format!(
                "the number of snapshots must be {volumes} (one head for each volume) to {}",
                limits::SNAPSHOTS_MAX
            )));
        }
        let extents_max = (max_size / extent_bytes).max(1) as u32;
        let journal = options
            .journal_size
            .unwrap_or((size / 1024).clamp(256 << 10, 64 << 20) / BLOCK_BYTES * BLOCK_BYTES);
        if !journal.is_multiple_of(BLOCK_BYTES)
            || !(limits::JOURNAL_MIN_BYTES..=limits::JOURNAL_MAX_BYTES).contains(&journal)
        {
            return Err(Error::invalid(
                "the size of the journal must be a multiple of 4 KiB, from 128 KiB to 256 MiB",
            ));
        }
        let mut geometry = Self {
            size,
            extent_bytes,
            volumes,
            snapshots,
            spares: (extents_max / 8).clamp(64, limits::SPARES_MAX as u32),
            extents_max,
            regions: [Region::default(); REGION_KINDS],
        };
        let mut offset = SUPERBLOCK_REGION_BYTES;
        for kind in RegionKind::ALL {
            let length = match kind {
                RegionKind::Journal => journal,
                RegionKind::Sums if !options.checksums => continue,
                RegionKind::Sums => BLOCK_BYTES * u64::from(geometry.needed_blocks(kind)),
                RegionKind::Data => {
                    offset = offset.next_multiple_of(extent_bytes);
                    let room = size.saturating_sub(BLOCK_BYTES).saturating_sub(offset);
                    room / extent_bytes * extent_bytes
                }
                _ => 2 * BLOCK_BYTES * u64::from(geometry.needed_blocks(kind)),
            };
            geometry.regions[kind as usize - 1] = Region { offset, length };
            offset += length;
        }
        if geometry.data_extents() == 0 {
            let needed = geometry.region(RegionKind::Data).offset + extent_bytes + BLOCK_BYTES;
            return Err(Error::invalid(format!(
                "the size is too small for a store: metadata and one extent need {needed} bytes"
            )));
        }
        Ok(geometry)
    }

    /// The same store with another size: only the data region changes.
    ///
    /// # Errors
    /// `Invalid` if the size does not fit the metadata.
    pub fn resized(&self, size: u64) -> Result<Self> {
        let size = size / BLOCK_BYTES * BLOCK_BYTES;
        let mut geometry = *self;
        let data = &mut geometry.regions[RegionKind::Data as usize - 1];
        let room = size.saturating_sub(BLOCK_BYTES).saturating_sub(data.offset);
        let extents = room / self.extent_bytes;
        if size > limits::STORE_MAX_BYTES {
            return Err(Error::invalid("a store is at most 64 TiB"));
        }
        if extents == 0 || extents > u64::from(self.extents_max) {
            let max = self.max_size();
            return Err(Error::invalid(format!(
                "the store cannot have {size} bytes: its metadata has room for at most {max} \
                 bytes; make a new store with a larger --max-size, and copy the volumes"
            )));
        }
        data.length = extents * self.extent_bytes;
        geometry.size = size;
        Ok(geometry)
    }

    /// Checks a geometry read from a device against itself, before any arithmetic trusts it.
    ///
    /// # Errors
    /// `Corrupt` with what does not fit.
    pub fn validate(&self) -> Result<()> {
        let corrupt = |what: &str| Error::corrupt(format!("superblock: {what}"));
        check_extent_bytes(self.extent_bytes).map_err(|_| corrupt("impossible extent size"))?;
        if self.size > limits::STORE_MAX_BYTES || !self.size.is_multiple_of(BLOCK_BYTES) {
            return Err(corrupt("impossible store size"));
        }
        if self.volumes == 0
            || self.volumes > limits::VOLUMES_MAX
            || self.snapshots == 0
            || self.snapshots > limits::SNAPSHOTS_MAX
            || u64::from(self.spares) > limits::SPARES_MAX
            || self.extents_max == 0
            || u64::from(self.extents_max) > limits::DATA_EXTENTS_MAX
        {
            return Err(corrupt("impossible table capacity"));
        }
        let mut end = SUPERBLOCK_REGION_BYTES;
        for kind in RegionKind::ALL {
            let region = self.region(kind);
            if kind == RegionKind::Sums && !self.has_sums() {
                continue;
            }
            let fits = match kind {
                RegionKind::Journal => {
                    (limits::JOURNAL_MIN_BYTES..=limits::JOURNAL_MAX_BYTES).contains(&region.length)
                }
                RegionKind::Data => {
                    region.offset.is_multiple_of(self.extent_bytes)
                        && region.length.is_multiple_of(self.extent_bytes)
                        && region.length / self.extent_bytes <= u64::from(self.extents_max)
                }
                RegionKind::Sums => {
                    region.length / BLOCK_BYTES >= u64::from(self.needed_blocks(kind))
                }
                _ => {
                    region.length.is_multiple_of(2 * BLOCK_BYTES)
                        && region.length / BLOCK_BYTES / 2 >= u64::from(self.needed_blocks(kind))
                }
            };
            let aligned = region.offset.is_multiple_of(BLOCK_BYTES)
                && region.length.is_multiple_of(BLOCK_BYTES);
            let region_end = region.offset.saturating_add(region.length);
            if !fits || !aligned || region.offset < end || region_end > self.size {
                return Err(corrupt(&format!("impossible place of the {} region", kind.name())));
            }
            end = region_end;
        }
        if self.data_extents() == 0 || end > self.size - BLOCK_BYTES {
            return Err(corrupt("no room for data"));
        }
        Ok(())
    }

    /// A region.
    #[must_use]
    pub fn region(&self, kind: RegionKind) -> Region {
        self.regions[kind as usize - 1]
    }

    /// Byte offset behind what is about volumes and snapshots. Checksums come after it: they are of the
    /// data as it is, whatever becomes of that.
    #[must_use]
    pub fn metadata_end(&self) -> u64 {
        let behind = if self.has_sums() { RegionKind::Sums } else { RegionKind::Data };
        self.region(behind).offset
    }

    /// Whether data blocks have checksums.
    #[must_use]
    pub fn has_sums(&self) -> bool {
        self.region(RegionKind::Sums).length > 0
    }

    /// Byte offset of a page of checksums.
    #[must_use]
    pub fn sums_address(&self, page: u32) -> u64 {
        let region = self.region(RegionKind::Sums);
        debug_assert!(u64::from(page) * BLOCK_BYTES < region.length);
        region.offset + u64::from(page) * BLOCK_BYTES
    }

    /// Blocks of 4 KiB in an extent.
    #[must_use]
    pub fn blocks_per_extent(&self) -> u32 {
        (self.extent_bytes / BLOCK_BYTES) as u32
    }

    /// Data extents in the data region.
    #[must_use]
    pub fn data_extents(&self) -> u32 {
        (self.region(RegionKind::Data).length / self.extent_bytes) as u32
    }

    /// Bytes of an extent entry.
    #[must_use]
    pub fn entry_bytes(&self) -> usize {
        super::entry::HEADER_BYTES + self.blocks_per_extent() as usize / 4
    }

    /// Items (slots, entries) in a metadata block of a region.
    #[must_use]
    pub fn items_per_block(&self, kind: RegionKind) -> u32 {
        match kind {
            RegionKind::Volumes | RegionKind::Snapshots => SLOTS_PER_BLOCK,
            RegionKind::Spares | RegionKind::Extents => (PAYLOAD_BYTES / self.entry_bytes()) as u32,
            RegionKind::Sums => SUMS_PER_PAGE as u32,
            RegionKind::Labels | RegionKind::Journal | RegionKind::Data => 1,
        }
    }

    /// Metadata blocks, of each copy, a region must have for its capacity.
    #[must_use]
    pub fn needed_blocks(&self, kind: RegionKind) -> u32 {
        let items = match kind {
            RegionKind::Volumes => self.volumes,
            RegionKind::Snapshots => self.snapshots,
            RegionKind::Labels => self.snapshots * LABEL_BLOCKS,
            RegionKind::Spares => self.spares,
            RegionKind::Extents => self.extents_max,
            RegionKind::Sums => {
                let blocks = u64::from(self.extents_max) * u64::from(self.blocks_per_extent());
                return blocks.div_ceil(SUMS_PER_PAGE as u64) as u32;
            }
            RegionKind::Journal | RegionKind::Data => 0,
        };
        items.div_ceil(self.items_per_block(kind))
    }

    /// Byte offset of copy 0 or 1 of a mirrored metadata block.
    #[must_use]
    pub fn block_address(&self, kind: RegionKind, block: u32, copy: u32) -> u64 {
        let region = self.region(kind);
        let half = region.length / 2;
        debug_assert!(u64::from(block) * BLOCK_BYTES < half);
        region.offset + u64::from(copy) * half + u64::from(block) * BLOCK_BYTES
    }

    /// Byte offset of a data extent.
    ///
    /// # Panics
    /// If it is beyond the data region: a bug.
    #[must_use]
    pub fn extent_address(&self, extent: DeviceExtent) -> u64 {
        assert!(extent.0 < self.data_extents(), "extent {extent} beyond the data region");
        self.region(RegionKind::Data).offset + u64::from(extent.0) * self.extent_bytes
    }

    /// Byte offset of the superblock copy at the store's end.
    #[must_use]
    pub fn superblock_last(&self) -> u64 {
        self.size - BLOCK_BYTES
    }

    /// Size the store can grow to: what its metadata has room for, and no more than any store may have.
    #[must_use]
    pub fn max_size(&self) -> u64 {
        let described = self.region(RegionKind::Data).offset
            + u64::from(self.extents_max) * self.extent_bytes
            + BLOCK_BYTES;
        described.min(limits::STORE_MAX_BYTES)
    }
}

fn check_extent_bytes(bytes: u64) -> Result<()> {
    let range = limits::EXTENT_MIN_BYTES..=limits::EXTENT_MAX_BYTES;
    if bytes.is_power_of_two() && range.contains(&bytes) {
        return Ok(());
    }
    Err(Error::invalid(format!("extent size {bytes} must be a power of two from 64 KiB to 4 MiB")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 64 << 20;

    fn plain() -> InitOptions {
        InitOptions { extent_size: 64 << 10, ..InitOptions::default() }
    }

    #[test]
    fn impossible_options_are_refused() {
        let above = limits::STORE_MAX_BYTES + SIZE;
        let most = limits::SNAPSHOTS_MAX + 1;
        let cases = [
            (above, plain(), "at most 64 TiB"),
            (SIZE, InitOptions { max_size: Some(above), ..plain() }, "beyond 64 TiB"),
            (SIZE, InitOptions { max_volumes: Some(0), ..plain() }, "volumes must be 1 to"),
            (SIZE, InitOptions { max_volumes: Some(1 << 21), ..plain() }, "volumes must be 1 to"),
            (SIZE, InitOptions { max_snapshots: Some(3), ..plain() }, "one head for each volume"),
            (SIZE, InitOptions { max_snapshots: Some(most), ..plain() }, "number of snapshots"),
            (SIZE, InitOptions { journal_size: Some(4096), ..plain() }, "size of the journal"),
            (SIZE, InitOptions { journal_size: Some(1 << 29), ..plain() }, "size of the journal"),
            (
                SIZE,
                InitOptions { journal_size: Some((1 << 20) + 512), ..plain() },
                "size of the journal",
            ),
            (SIZE, InitOptions { extent_size: 3 << 16, ..plain() }, "power of two"),
            (SIZE, InitOptions { extent_size: 8 << 20, ..plain() }, "power of two"),
            (64 << 10, plain(), "too small"),
        ];
        for (size, options, text) in cases {
            let error = Geometry::plan(size, &options).unwrap_err();
            assert!(error.to_string().contains(text), "{options:?}: {error}");
        }
    }

    #[test]
    fn a_size_that_the_tables_do_not_cover_is_refused() {
        let geometry = Geometry::plan(SIZE, &plain()).unwrap();
        for size in [0, 1 << 20, 64 * SIZE] {
            let error = geometry.resized(size).unwrap_err();
            assert!(error.to_string().contains("has room for at most"), "{error}");
        }
        assert!(geometry.resized(2 * SIZE).unwrap().data_extents() > geometry.data_extents());
    }

    /// Found by review: a store that may grow to 64 TiB of data could grow beyond what a store may have, its
    /// metadata included, and was never opened again.
    #[test]
    fn a_store_grows_no_further_than_it_can_be_opened() {
        for extent_size in [64 << 10, 1 << 20] {
            let max_size = Some(limits::STORE_MAX_BYTES);
            let options = InitOptions { extent_size, max_size, ..plain() };
            let geometry = Geometry::plan(8 << 40, &options).unwrap();
            let most = geometry.resized(geometry.max_size()).unwrap();
            most.validate().unwrap();
            let error = geometry.resized(most.size + BLOCK_BYTES).unwrap_err();
            assert!(error.to_string().contains("at most 64 TiB"), "{error}");
        }
    }

    /// What a superblock may say under a good checksum.
    #[test]
    fn impossible_geometries_are_named() {
        type Change = fn(&mut Geometry);
        let cases: [(Change, &str); 17] = [
            (|g| g.extent_bytes = 0, "extent size"),
            (|g| g.extent_bytes = 3 << 16, "extent size"),
            (|g| g.size += 1, "store size"),
            (|g| g.size = u64::MAX, "store size"),
            (|g| g.volumes = 0, "table capacity"),
            (|g| g.volumes = u32::MAX, "table capacity"),
            (|g| g.snapshots = 0, "table capacity"),
            (|g| g.snapshots = u32::MAX, "table capacity"),
            (|g| g.spares = u32::MAX, "table capacity"),
            (|g| g.extents_max = 0, "table capacity"),
            (|g| g.extents_max = u32::MAX, "table capacity"),
            (|g| g.regions[0].offset = 0, "place of the volume table region"),
            (|g| g.regions[1].length += 4096, "place of the snapshot table region"),
            (|g| g.regions[3].length = 4096, "place of the journal region"),
            (|g| g.regions[5].offset = u64::MAX - 4095, "place of the extent status region"),
            (|g| g.regions[6].offset += 4096, "place of the data region"),
            (|g| g.regions[6].length = 0, "no room for data"),
        ];
        let good = Geometry::plan(SIZE, &plain()).unwrap();
        good.validate().unwrap();
        for (number, (change, text)) in cases.into_iter().enumerate() {
            let mut geometry = good;
            change(&mut geometry);
            let error = geometry.validate().unwrap_err();
            assert!(error.to_string().contains(text), "case {number}: {error}");
        }
    }
}
