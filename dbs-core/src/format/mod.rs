//! On-disk format v2: bytes to types and back, no I/O. `docs/format.md` is the specification.

pub mod block;
pub mod compressed;
pub mod crc;
#[cfg(test)]
mod doc_tests;
pub mod entry;
pub mod geometry;
pub mod init;
pub mod journal;
pub mod labels;
pub mod record;
pub mod slots;
pub mod sums;
pub mod superblock;

pub use block::{BlockFault, BlockHeader, BlockKind, PAYLOAD_BYTES};
pub use geometry::{Geometry, Region, RegionKind};
pub use init::InitOptions;
pub use record::Record;
pub use slots::{SnapshotSlot, VolumeSlot};
pub use superblock::Superblock;
