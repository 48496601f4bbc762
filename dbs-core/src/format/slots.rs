//! Slots of the volume and snapshot tables.

use crate::limits::NAME_MAX_BYTES;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a slot of either table.
pub const SLOT_BYTES: usize = 504;

/// Snapshot is the writable top of its volume.
pub const SNAPSHOT_HEAD: u32 = 1;
/// Snapshot was taken by a person.
pub const SNAPSHOT_USER_CREATED: u32 = 1 << 1;
/// Snapshot refuses deletion.
pub const SNAPSHOT_PROTECTED: u32 = 1 << 2;
/// Snapshot is deleted: it has no name any more and is merged, reclaimed or hidden.
pub const SNAPSHOT_DELETED: u32 = 1 << 3;
/// Snapshot has labels in the label region.
pub const SNAPSHOT_LABELLED: u32 = 1 << 4;
/// Snapshot is not wanted any more by its owner, but listed and kept until it is deleted.
pub const SNAPSHOT_RETIRED: u32 = 1 << 5;
/// Snapshot is a base: what it holds is in a file outside the store, which its label names.
pub const SNAPSHOT_BACKED: u32 = 1 << 6;
/// All flags of snapshots this version knows.
pub const SNAPSHOT_FLAGS: u32 = 0x7f;

/// Volume's content is incomplete: a replica is being filled.
pub const VOLUME_REBUILDING: u32 = 1;
/// All flags of volumes this version knows.
pub const VOLUME_FLAGS: u32 = 1;

/// The data key of an encrypted volume, wrapped ([`crate::crypt`]). All zeros is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct KeySlot {
    /// How data is encrypted: 1; 0 if it is not, 255 if the key is lost.
    pub method: u8,
    /// Kind of the secret it is wrapped for.
    pub secret: u8,
    /// Lanes of the derivation of the wrapping key.
    pub lanes: U16,
    /// Its memory in KiB.
    pub memory_kib: U32,
    /// Its passes.
    pub passes: U32,
    /// Its salt.
    pub salt: [u8; 16],
    /// The data key, wrapped.
    pub wrapped: [u8; 72],
    /// Which key it is: that of the snapshots and heads with the same.
    pub family: [u8; 16],
}

/// A volume. All zeros is a free slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct VolumeSlot {
    /// Identity.
    pub uuid: [u8; 16],
    /// Provisioned size in bytes, a multiple of 512.
    pub size: U64,
    /// Creation time, nanoseconds since the Unix epoch.
    pub created_ns: U64,
    /// Revision counter, for the replica.
    pub revision: U64,
    /// Snapshot id of the head; 0 in a free slot only.
    pub head: U32,
    /// `VOLUME_*` flags.
    pub flags: U32,
    /// Bytes of the name.
    pub name_bytes: U16,
    /// Zero.
    pub reserved0: [u8; 14],
    /// Name in UTF-8, padded with zeros.
    pub name: [u8; 256],
    /// Most requests of clients in a second; 0 if there is no limit.
    pub limit_iops: U32,
    /// What the limits allow in so many seconds may be used at once.
    pub limit_burst_seconds: U32,
    /// Most bytes that clients transfer in a second; 0 if there is no limit.
    pub limit_bandwidth: U64,
    /// Key of what its layers hold, if they are encrypted.
    pub key: KeySlot,
    /// Zero.
    pub reserved1: [u8; 52],
}

/// A snapshot or head. All zeros is a free slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SnapshotSlot {
    /// Identity.
    pub uuid: [u8; 16],
    /// Size of the volume at that time, in bytes.
    pub size: U64,
    /// Creation time, nanoseconds since the Unix epoch.
    pub created_ns: U64,
    /// Revision counter when it was taken, for the replica.
    pub revision: U64,
    /// Volume id; 0 for a deleted one whose volume is gone.
    pub volume: U32,
    /// Parent snapshot id; 0 for a root.
    pub parent: U32,
    /// `SNAPSHOT_*` flags.
    pub flags: U32,
    /// Bytes of the name; 0 for heads and deleted ones.
    pub name_bytes: U16,
    /// 1 if the slot is in use: a head without name and parent is not free.
    pub used: u8,
    /// Zero.
    pub reserved0: [u8; 9],
    /// Name in UTF-8, padded with zeros.
    pub name: [u8; 256],
    /// Which key its data is encrypted with: the same in all that build on it; zeros if it is not.
    pub family: [u8; 16],
    /// Zero.
    pub reserved1: [u8; 168],
}

const _: () = assert!(size_of::<VolumeSlot>() == SLOT_BYTES);
const _: () = assert!(size_of::<SnapshotSlot>() == SLOT_BYTES);
const _: () = assert!(size_of::<KeySlot>() == 116);
const _: () = assert!(std::mem::offset_of!(VolumeSlot, name) == 64);
const _: () = assert!(std::mem::offset_of!(SnapshotSlot, name) == 64);
const _: () = assert!(NAME_MAX_BYTES < 256);

/// The name field for a name, which the caller has checked.
#[must_use]
pub fn encode_name(name: &str) -> ([u8; 256], U16) {
    let mut field = [0; 256];
    let bytes = name.as_bytes();
    assert!(bytes.len() <= NAME_MAX_BYTES, "names are checked before they are stored");
    field[..bytes.len()].copy_from_slice(bytes);
    (field, (bytes.len() as u16).into())
}

/// The name in a name field, if it is a possible one.
#[must_use]
pub fn decode_name(field: &[u8; 256], bytes: U16) -> Option<&str> {
    let (name, rest) = field.split_at_checked(bytes.get() as usize)?;
    if bytes.get() as usize > NAME_MAX_BYTES || rest.iter().any(|byte| *byte != 0) {
        return None;
    }
    std::str::from_utf8(name).ok()
}

/// The slot at `index` of a block's payload.
#[must_use]
pub fn get<T: FromBytes + KnownLayout + Immutable>(payload: &[u8], index: u32) -> Option<T> {
    let start = index as usize * SLOT_BYTES;
    T::read_from_bytes(payload.get(start..start + SLOT_BYTES)?).ok()
}

/// Stores the slot at `index` of a block's payload.
pub fn put<T: IntoBytes + Immutable>(payload: &mut [u8], index: u32, slot: &T) {
    let start = index as usize * SLOT_BYTES;
    payload[start..start + SLOT_BYTES].copy_from_slice(slot.as_bytes());
}
