//! The superblock: identity, geometry, feature masks. Three copies: at 0, at 4096, and in the
//! store's last block; the valid one with the highest sequence counts.

use super::crc::crc32c;
use super::geometry::{Geometry, REGION_KINDS, Region, RegionKind};
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

/// Features that anybody may ignore. Who does not know one clears it.
pub const COMPAT_KNOWN: u64 = COMPAT_RELEARNT;
/// No group of checksums was left open when the store was last closed.
pub const COMPAT_RELEARNT: u64 = 1;
/// Features that a writer must know, a reader need not.
pub const RO_COMPAT_KNOWN: u64 = RO_COMPAT_SUMS | RO_COMPAT_GIVEN;
/// Data blocks have checksums. Whoever writes data without keeping them would make them wrong.
pub const RO_COMPAT_SUMS: u64 = 1;
/// The store was given another uuid than the one in its metadata. Whoever writes the superblock
/// without it would take that away.
pub const RO_COMPAT_GIVEN: u64 = 1 << 1;
/// Features that everybody must know.
pub const INCOMPAT_KNOWN: u64 = INCOMPAT_LOST
    | INCOMPAT_REPAIRING
    | INCOMPAT_GROUPS
    | INCOMPAT_BACKED
    | INCOMPAT_ENCRYPTED
    | INCOMPAT_COMPRESSED;
/// There are runs of what is lost: to whoever does not know them, they are zeros.
pub const INCOMPAT_LOST: u64 = 1;
/// The metadata is being written anew, and is neither what it was nor what it will be.
pub const INCOMPAT_REPAIRING: u64 = 1 << 1;
/// Pages of checksums count only while their group is not open: to whoever does not know groups, data
/// would look damaged after a crash.
pub const INCOMPAT_GROUPS: u64 = 1 << 2;
/// There are snapshots whose content is in a file outside the store: to whoever does not know them, it is
/// zeros.
pub const INCOMPAT_BACKED: u64 = 1 << 3;
/// There are volumes whose data is encrypted: who does not know that would read what nobody wrote, and write what
/// nobody can read.
pub const INCOMPAT_ENCRYPTED: u64 = 1 << 4;
/// There are compressed extents: who does not know that would read their bytes as data.
pub const INCOMPAT_COMPRESSED: u64 = 1 << 5;

/// What a store says in the middle of a repair.
pub const INTERRUPTED: &str = "superblock: a repair or restore-metadata of this store was \
                               interrupted; put the saved metadata back with `dbs repair --undo \
                               FILE`, then begin again";

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
    /// In every block of metadata, and never changed.
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
    /// The uuid the store was given since, or zeros.
    pub(super) given_uuid: [u8; 16],
    pub(super) reserved1: [u8; 3552],
}

const _: () = assert!(size_of::<SuperblockBytes>() == 4096);
const _: () = assert!(std::mem::offset_of!(SuperblockBytes, version) == 8);
const _: () = assert!(std::mem::offset_of!(SuperblockBytes, regions) == 144);

/// The superblock, proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// What all metadata of the store, its journal and its tail are marked with: the uuid it was made
    /// with.
    pub uuid: [u8; 16],
    /// The uuid it was given since, if it was.
    pub given: Option<[u8; 16]>,
    /// Counts rewrites.
    pub sequence: u64,
    /// Creation time, nanoseconds since the Unix epoch.
    pub created_ns: u64,
    /// Known features in use that anybody may ignore.
    pub compat: u64,
    /// Read-only-compatible features this version does not know: no writing.
    pub unknown_ro: u64,
    /// Incompatible features in use.
    pub incompat: u64,
    /// Shape of the store.
    pub geometry: Geometry,
    /// Last commit group when last closed in good order.
    pub clean_sequence: u64,
    /// High-water marks at that time.
    pub clean_marks: [u32; 4],
}

/// What a copy of the superblock says of itself, of any version and with any features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// What its metadata is marked with.
    pub uuid: [u8; 16],
    /// The uuid it has.
    pub identity: [u8; 16],
    /// Counts rewrites.
    pub sequence: u64,
    /// Last commit group when last closed in good order.
    pub clean_sequence: u64,
    /// All metadata is being written anew.
    pub repairing: bool,
}

impl SuperblockBytes {
    fn given(&self) -> Option<[u8; 16]> {
        (self.ro_compat.get() & RO_COMPAT_GIVEN != 0).then_some(self.given_uuid)
    }
}

impl Superblock {
    /// The uuid of the store, for its users.
    #[must_use]
    pub fn identity(&self) -> [u8; 16] {
        self.given.unwrap_or(self.uuid)
    }

    /// Says whether no group of checksums is left open.
    pub fn set_relearnt(&mut self, relearnt: bool) {
        let relearnt = relearnt && self.geometry.has_sums();
        self.compat = self.compat & !COMPAT_RELEARNT | if relearnt { COMPAT_RELEARNT } else { 0 };
    }

    /// The 4 KiB to write at `address`.
    #[must_use]
    pub fn encode(&self, address: u64) -> Vec<u8> {
        let blank =
            RegionEntry { kind: 0.into(), reserved: 0.into(), offset: 0.into(), length: 0.into() };
        let mut regions = [blank; REGIONS];
        for kind in RegionKind::ALL {
            if kind == RegionKind::Sums && !self.geometry.has_sums() {
                continue;
            }
            let region = self.geometry.region(kind);
            regions[kind as usize - 1] = RegionEntry {
                kind: (kind as u32).into(),
                reserved: 0.into(),
                offset: region.offset.into(),
                length: region.length.into(),
            };
        }
        let sums = if self.geometry.has_sums() { RO_COMPAT_SUMS } else { 0 };
        let given = if self.given.is_some() { RO_COMPAT_GIVEN } else { 0 };
        let bytes = SuperblockBytes {
            magic: MAGIC,
            version: VERSION.into(),
            crc: 0.into(),
            uuid: self.uuid,
            sequence: self.sequence.into(),
            address: address.into(),
            compat: self.compat.into(),
            ro_compat: (self.unknown_ro | sums | given).into(),
            incompat: self.incompat.into(),
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
            given_uuid: self.given.unwrap_or_default(),
            reserved1: [0; 3552],
        };
        let mut block = bytes.as_bytes().to_vec();
        let crc = crc32c(&block);
        block[12..16].copy_from_slice(&crc.to_le_bytes());
        block
    }

    /// What a copy says whose checksum is right, though it may not be one to go by.
    #[must_use]
    pub fn claim(block: &[u8]) -> Option<Claim> {
        let bytes = SuperblockBytes::read_from_bytes(block).ok()?;
        let mut zeroed = block.to_vec();
        zeroed[12..16].fill(0);
        let proven = bytes.magic == MAGIC && crc32c(&zeroed) == bytes.crc.get();
        proven.then(|| Claim {
            uuid: bytes.uuid,
            identity: bytes.given().unwrap_or(bytes.uuid),
            sequence: bytes.sequence.get(),
            clean_sequence: bytes.clean_sequence.get(),
            repairing: bytes.incompat.get() & INCOMPAT_REPAIRING != 0,
        })
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
                    "the store has format {major}.{minor}.{patch}, and this version of dbs reads \
                     format 2.0.0; use a newer dbs"
                )));
            }
        }
        let mut zeroed = block.to_vec();
        zeroed[12..16].fill(0);
        if crc32c(&zeroed) != bytes.crc.get() {
            return Err(Error::corrupt("superblock: checksum mismatch"));
        }
        if bytes.address.get() != address {
            return Err(Error::corrupt("superblock: copy written for another address"));
        }
        if bytes.incompat.get() & INCOMPAT_REPAIRING != 0 {
            return Err(Error::corrupt(INTERRUPTED));
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
        let has_sums = bytes.ro_compat.get() & RO_COMPAT_SUMS != 0;
        let mut regions = [Region::default(); REGION_KINDS];
        for kind in RegionKind::ALL {
            if kind == RegionKind::Sums && !has_sums {
                continue;
            }
            let entry = bytes.regions[kind as usize - 1];
            if entry.kind.get() != kind as u32 {
                return Err(Error::corrupt("superblock: region table out of order"));
            }
            let region = Region { offset: entry.offset.get(), length: entry.length.get() };
            if kind == RegionKind::Sums && region.length == 0 {
                return Err(Error::corrupt("superblock: checksums without a place"));
            }
            regions[kind as usize - 1] = region;
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
            given: bytes.given(),
            sequence: bytes.sequence.get(),
            created_ns: bytes.created_ns.get(),
            compat: bytes.compat.get() & COMPAT_KNOWN,
            unknown_ro: bytes.ro_compat.get() & !RO_COMPAT_KNOWN,
            incompat: bytes.incompat.get(),
            geometry,
            clean_sequence: bytes.clean_sequence.get(),
            clean_marks: bytes.clean_marks.map(U32::get),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::format::InitOptions;

    fn sealed(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let options = InitOptions { extent_size: 64 << 10, ..InitOptions::default() };
        let superblock = Superblock {
            uuid: [3; 16],
            given: Some([4; 16]),
            sequence: 5,
            created_ns: 1,
            compat: COMPAT_RELEARNT,
            unknown_ro: 0,
            incompat: 0,
            geometry: Geometry::plan(64 << 20, &options).unwrap(),
            clean_sequence: 4,
            clean_marks: [1; 4],
        };
        let mut block = superblock.encode(4096);
        assert_eq!(Superblock::decode(&block, 4096).unwrap(), superblock);
        change(&mut block);
        block[12..16].fill(0);
        let crc = crc32c(&block);
        block[12..16].copy_from_slice(&crc.to_le_bytes());
        block
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        type Change = fn(&mut [u8]);
        let cases: [(Change, ErrorKind, &str); 8] = [
            (|b| b[0] ^= 1, ErrorKind::Invalid, "no magic"),
            (|b| b[10] = 1, ErrorKind::Unsupported, "v1.0.0 image"),
            (|b| b[8..12].copy_from_slice(&[7, 2, 3, 0]), ErrorKind::Unsupported, "format 3.2.7"),
            (|b| b[40] ^= 1, ErrorKind::Corrupt, "another address"),
            (|b| b[64] = 0x40, ErrorKind::Unsupported, "mask 0x40"),
            (|b| b[96] = 1, ErrorKind::Corrupt, "block size"),
            (|b| b[39] = 0xff, ErrorKind::Corrupt, "sequence"),
            (|b| b[144] = 9, ErrorKind::Corrupt, "out of order"),
        ];
        for (change, kind, text) in cases {
            let error = Superblock::decode(&sealed(change), 4096).unwrap_err();
            assert!(error.kind() == kind && error.to_string().contains(text), "{text}: {error}");
        }
        assert_eq!(Superblock::decode(&[0; 100], 0).unwrap_err().kind(), ErrorKind::Invalid);
        let mut torn = sealed(|_| ());
        torn[2000] ^= 1;
        assert!(Superblock::decode(&torn, 4096).unwrap_err().to_string().contains("checksum"));
        // A feature that older versions may only read.
        assert_eq!(Superblock::decode(&sealed(|b| b[56] = 4), 4096).unwrap().unknown_ro, 4);
    }
}
