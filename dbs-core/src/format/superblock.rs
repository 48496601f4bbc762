//! The superblock: identity, geometry, feature masks. Three copies: at 0, at 4096, and in the
//! store's last block; the valid one with the highest sequence counts.

use super::geometry::{Geometry, Region, RegionKind};
use crate::error::{Error, Result};
use crate::limits::SEQUENCE_MAX;
use crate::units::BLOCK_BYTES;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First 8 bytes of every DBS store of any version.
pub const MAGIC: [u8; 8] = *b"DBS@393!";
/// Version 2.0.0: major, minor, patch in the upper three bytes as in v1.0.0.
pub const VERSION: u32 = 0x0002_0000;
/// Version of the Go prototype's images.
pub const VERSION_1: u32 = 0x0001_0000;
/// Entries of the region table.
const REGIONS: usize = 16;

/// Features that a reader may ignore.
pub const COMPAT_KNOWN: u64 = 0;
/// Features that a writer must know, a reader need not.
pub const RO_COMPAT_KNOWN: u64 = 0;
/// Features that everybody must know.
pub const INCOMPAT_KNOWN: u64 = 0;

/// Entry of the region table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(super) struct RegionEntry {
    pub(super) kind: U32,
    pub(super) reserved: U32,
    pub(super) offset: U64,
    pub(super) length: U64,
}

/// The superblock on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SuperblockBytes {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    /// CRC32C of the 4096 bytes with this field zero.
    pub(super) crc: U32,
    pub(super) uuid: [u8; 16],
    /// Counts rewrites; the copy with the highest one is current.
    pub(super) sequence: U64,
    /// Byte offset of this copy.
    pub(super) address: U64,
    pub(super) compat: U64,
    pub(super) ro_compat: U64,
    pub(super) incompat: U64,
    pub(super) created_ns: U64,
    pub(super) size: U64,
    pub(super) extent_bytes: U64,
    pub(super) block_bytes: U32,
    pub(super) volumes: U32,
    pub(super) snapshots: U32,
    pub(super) spares: U32,
    pub(super) extents_max: U32,
    pub(super) reserved0: U32,
    /// Sequence of the last commit group when the store was last closed in good order.
    pub(super) clean_sequence: U64,
    /// High-water marks at that time, in the order volumes, snapshots, spares, extents.
    pub(super) clean_marks: [U32; 4],
    pub(super) regions: [RegionEntry; REGIONS],
    pub(super) reserved1: [u8; 3568],
}

const _: () = assert!(size_of::<SuperblockBytes>() == 4096);
const _: () = assert!(std::mem::offset_of!(SuperblockBytes, version) == 8);
const _: () = assert!(std::mem::offset_of!(SuperblockBytes, regions) == 144);

/// The superblock, proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// Identity of the store.
    pub uuid: [u8; 16],
    /// Counts rewrites.
    pub sequence: u64,
    /// Creation time, nanoseconds since the Unix epoch.
    pub created_ns: u64,
    /// Read-only-compatible features this version does not know: no writing.
    pub unknown_ro: u64,
    /// Shape of the store.
    pub geometry: Geometry,
    /// Last commit group when last closed in good order.
    pub clean_sequence: u64,
    /// High-water marks at that time.
    pub clean_marks: [u32; 4],
}

impl Superblock {
    /// The 4 KiB to write at `address`.
    #[must_use]
    pub fn encode(&self, address: u64) -> Vec<u8> {
        let blank =
            RegionEntry { kind: 0.into(), reserved: 0.into(), offset: 0.into(), length: 0.into() };
        let mut regions = [blank; REGIONS];
        for (entry, kind) in regions.iter_mut().zip(RegionKind::ALL) {
            let region = self.geometry.region(kind);
            entry.kind = (kind as u32).into();
            entry.offset = region.offset.into();
            entry.length = region.length.into();
        }
        let bytes = SuperblockBytes {
            magic: MAGIC,
            version: VERSION.into(),
            crc: 0.into(),
            uuid: self.uuid,
            sequence: self.sequence.into(),
            address: address.into(),
            compat: 0.into(),
            ro_compat: self.unknown_ro.into(),
            incompat: 0.into(),
            created_ns: self.created_ns.into(),
            size: self.geometry.size.into(),
            extent_bytes: self.geometry.extent_bytes.into(),
            block_bytes: 4096.into(),
            volumes: self.geometry.volumes.into(),
            snapshots: self.geometry.snapshots.into(),
            spares: self.geometry.spares.into(),
            extents_max: self.geometry.extents_max.into(),
            reserved0: 0.into(),
            clean_sequence: self.clean_sequence.into(),
            clean_marks: self.clean_marks.map(Into::into),
            regions,
            reserved1: [0; 3568],
        };
        let mut block = bytes.as_bytes().to_vec();
        let crc = crc32c::crc32c(&block);
        block[12..16].copy_from_slice(&crc.to_le_bytes());
        block
    }

    /// Proves the copy read from `address`.
    ///
    /// # Errors
    /// `Unsupported` for another version or unknown features, `Corrupt` for damage, `Invalid` if
    /// this is no store at all.
    pub fn decode(block: &[u8], address: u64) -> Result<Self> {
        let bytes = SuperblockBytes::read_from_bytes(block)
            .map_err(|_| Error::invalid("not a DBS store: too short"))?;
        if bytes.magic != MAGIC {
            return Err(Error::invalid("not a DBS store: no magic `DBS@393!`"));
        }
        match bytes.version.get() {
            VERSION => {}
            VERSION_1 => {
                return Err(Error::unsupported(
                    "a v1.0.0 image of the Go prototype: read it with `info`, `list` and `export`, \
                     or convert it with `dbs upgrade OLD NEW`",
                ));
            }
            other => {
                let (major, minor, patch) = (other >> 16, other >> 8 & 0xff, other & 0xff);
                return Err(Error::unsupported(format!(
                    "store format {major}.{minor}.{patch}: this version of dbs reads 2.0.0; use a newer one"
                )));
            }
        }
        let mut zeroed = block.to_vec();
        zeroed[12..16].fill(0);
        if crc32c::crc32c(&zeroed) != bytes.crc.get() {
            return Err(Error::corrupt("superblock: checksum mismatch"));
        }
        if bytes.address.get() != address {
            return Err(Error::corrupt("superblock: copy written for another address"));
        }
        if bytes.incompat.get() & !INCOMPAT_KNOWN != 0 {
            return Err(Error::unsupported(format!(
                "store uses features this version does not know (mask {:#x}); use a newer dbs",
                bytes.incompat.get()
            )));
        }
        if u64::from(bytes.block_bytes.get()) != BLOCK_BYTES {
            return Err(Error::corrupt("superblock: impossible block size"));
        }
        if bytes.sequence.get().max(bytes.clean_sequence.get()) > SEQUENCE_MAX {
            return Err(Error::corrupt("superblock: impossible sequence"));
        }
        let mut regions = [Region::default(); 7];
        for (region, (entry, kind)) in
            regions.iter_mut().zip(bytes.regions.iter().zip(RegionKind::ALL))
        {
            if entry.kind.get() != kind as u32 {
                return Err(Error::corrupt("superblock: region table out of order"));
            }
            *region = Region { offset: entry.offset.get(), length: entry.length.get() };
        }
        let geometry = Geometry {
            size: bytes.size.get(),
            extent_bytes: bytes.extent_bytes.get(),
            volumes: bytes.volumes.get(),
            snapshots: bytes.snapshots.get(),
            spares: bytes.spares.get(),
            extents_max: bytes.extents_max.get(),
            regions,
        };
        geometry.validate()?;
        Ok(Self {
            uuid: bytes.uuid,
            sequence: bytes.sequence.get(),
            created_ns: bytes.created_ns.get(),
            unknown_ro: bytes.ro_compat.get() & !RO_COMPAT_KNOWN,
            geometry,
            clean_sequence: bytes.clean_sequence.get(),
            clean_marks: bytes.clean_marks.map(U32::get),
        })
    }
}
