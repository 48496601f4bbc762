//! What can be wrong with a block, slot or entry by itself, and what follows from it, in words.
//! Proving reports it; repairing decides by it.

use crate::format::compressed::stored_by;
use crate::format::geometry::LABEL_BLOCKS;
use crate::format::slots::{
    self, SNAPSHOT_BACKED, SNAPSHOT_DELETED, SNAPSHOT_FLAGS, SNAPSHOT_HEAD, SNAPSHOT_LABELLED,
    SnapshotSlot, VOLUME_FLAGS, VolumeSlot,
};
use crate::format::{Geometry, RegionKind, entry};
use crate::limits::VOLUME_MAX_BYTES;
use crate::meta::names;
use crate::units::SECTOR_BYTES;
use std::fmt;

/// No volume has so many extents; in memory a further bit of a run says what it is of.
const RUN_MAX: u32 = u32::MAX >> 1;

/// What is wrong with a volume slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeFault {
    /// No possible name.
    Name,
    /// No possible size.
    Size(u64),
    /// Flags this version does not know.
    Flags(u32),
    /// A key that this version cannot have written.
    Key,
    /// The table has no such slot.
    Capacity,
}

impl fmt::Display for VolumeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name => f.write_str("impossible name: the volume cannot be found by it"),
            Self::Size(size) => write!(f, "impossible size {size}: where it ends is not known"),
            Self::Flags(flags) => {
                write!(f, "unknown flags {flags:#x}: what they say of its content is not known")
            }
            Self::Key => f.write_str("an impossible key: what it holds cannot be decrypted"),
            Self::Capacity => {
                f.write_str("a volume behind the table's end: nothing can refer to it")
            }
        }
    }
}

/// What is wrong with a volume slot that is not free.
pub fn volume(slot: &VolumeSlot, index: u32, geometry: &Geometry) -> Vec<VolumeFault> {
    let mut faults = Vec::new();
    let name = slots::decode_name(&slot.name, slot.name_bytes);
    if name.is_none_or(|name| names::check_stored("volume", name).is_err()) {
        faults.push(VolumeFault::Name);
    }
    if !is_size(slot.size.get()) {
        faults.push(VolumeFault::Size(slot.size.get()));
    }
    if slot.flags.get() & !VOLUME_FLAGS != 0 {
        faults.push(VolumeFault::Flags(slot.flags.get() & !VOLUME_FLAGS));
    }
    if !slot.key.is_possible() {
        faults.push(VolumeFault::Key);
    }
    if index >= geometry.volumes {
        faults.push(VolumeFault::Capacity);
    }
    faults
}

/// What is wrong with a snapshot slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotFault {
    /// Neither in use nor free.
    Used(u8),
    /// No possible size.
    Size(u64),
    /// Flags this version does not know.
    Flags(u32),
    /// Both a head and deleted.
    HeadAndDeleted,
    /// A base that is something else as well.
    Base,
    /// No possible name, of one that must have one.
    Name,
    /// A name, or bytes in its place, of one that must have none.
    Named,
    /// It belongs to a volume that is not there.
    Volume(u32),
    /// The table has no such slot.
    Capacity,
}

impl fmt::Display for SnapshotFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Used(used) => {
                write!(f, "neither in use nor free ({used}): whether it exists is not known")
            }
            Self::Size(size) => write!(f, "impossible size {size}: where it ends is not known"),
            Self::Flags(flags) => {
                write!(f, "unknown flags {flags:#x}: what they say of its content is not known")
            }
            Self::HeadAndDeleted => {
                f.write_str("both a head and deleted: whether it is needed is not known")
            }
            Self::Base => f.write_str(
                "a base of another kind: what it shows and which file it is in is not known",
            ),
            Self::Name => f.write_str("impossible name: the snapshot cannot be found by it"),
            Self::Named => {
                f.write_str("a name on a head or a deleted one: what it is is not known")
            }
            Self::Volume(volume) => {
                write!(f, "it belongs to volume {volume}, which does not exist: nobody can find it")
            }
            Self::Capacity => {
                f.write_str("a snapshot behind the table's end: nothing can refer to it")
            }
        }
    }
}

/// What is wrong with a snapshot slot that is not free. `is_volume` tells whether a volume id is in
/// use.
pub fn snapshot(
    slot: &SnapshotSlot,
    index: u32,
    geometry: &Geometry,
    is_volume: impl Fn(u32) -> bool,
) -> Vec<SnapshotFault> {
    let mut faults = Vec::new();
    let flags = slot.flags.get();
    let (head, deleted) = (flags & SNAPSHOT_HEAD != 0, flags & SNAPSHOT_DELETED != 0);
    if slot.used != 1 {
        faults.push(SnapshotFault::Used(slot.used));
    }
    if !is_size(slot.size.get()) {
        faults.push(SnapshotFault::Size(slot.size.get()));
    }
    if flags & !SNAPSHOT_FLAGS != 0 {
        faults.push(SnapshotFault::Flags(flags & !SNAPSHOT_FLAGS));
    }
    if head && deleted {
        faults.push(SnapshotFault::HeadAndDeleted);
    }
    let base = flags & !(SNAPSHOT_BACKED | SNAPSHOT_LABELLED) == SNAPSHOT_DELETED
        && (slot.parent.get(), slot.volume.get()) == (0, 0);
    if flags & SNAPSHOT_BACKED != 0 && !base {
        faults.push(SnapshotFault::Base);
    }
    let name = slots::decode_name(&slot.name, slot.name_bytes);
    if head || deleted {
        if name != Some("") {
            faults.push(SnapshotFault::Named);
        }
    } else if name.is_none_or(|name| names::check_stored("snapshot", name).is_err()) {
        faults.push(SnapshotFault::Name);
    }
    let volume = slot.volume.get();
    if !(is_volume(volume) || (deleted && volume == 0)) {
        faults.push(SnapshotFault::Volume(volume));
    }
    if index >= geometry.snapshots {
        faults.push(SnapshotFault::Capacity);
    }
    faults
}

/// Whether this is a size that a volume can have.
pub fn is_size(size: u64) -> bool {
    size != 0 && size.is_multiple_of(SECTOR_BYTES) && size <= VOLUME_MAX_BYTES
}

/// What is wrong with an entry.
pub fn entry(region: RegionKind, bytes: &entry::EntryBytes<'_>) -> Option<&'static str> {
    let header = bytes.header;
    let free = header == entry::EntryHeader::default();
    let bits = bytes.data.iter().zip(bytes.zero);
    // Folds, not searches: for millions of entries the compiler's vectors pay.
    let (clash, any_data, any_zero) = bits.fold((0, 0, 0), |(clash, any, zeros), (data, zero)| {
        (clash | (data & zero), any | data, zeros | zero)
    });
    let spare = region == RegionKind::Spares;
    if clash != 0 {
        Some("blocks both data and zero: which they are is not known")
    } else if spare && any_data != 0 {
        Some("data where there is no room for any: where it is is not known")
    } else if header.snapshot.get() == 0 && (!free || any_data | any_zero != 0) {
        Some("free and not empty: whose it was is not known")
    } else if header.state.get() != 0
        && !is_lost_run(region, &header)
        && !(region == RegionKind::Extents && is_compressed(bytes))
    {
        Some("in an unknown state: what it says is not known")
    } else if header.run.get() > RUN_MAX {
        Some("a run behind the end of any volume: what it covers is not known")
    } else if !spare && header.run.get() != 0 {
        Some("a run of zeros with room for data: what it holds is not known")
    } else if spare && header.run.get() != 0 && any_zero != 0 {
        Some("a run of zeros with single blocks: what it covers is not known")
    } else {
        None
    }
}

/// Whether an entry of a data extent says that its blocks are compressed.
fn is_compressed(bytes: &entry::EntryBytes<'_>) -> bool {
    let blocks = bytes.data.len() as u32 * 8;
    bytes.header.run.get() == 0 && stored_by(bytes.header.state.get(), blocks).is_some()
}

/// Whether an entry marks extents as lost.
pub fn is_lost_run(region: RegionKind, header: &entry::EntryHeader) -> bool {
    region == RegionKind::Spares && header.run.get() != 0 && header.state.get() == entry::RUN_LOST
}

/// What is lost with a block that has no good copy.
pub fn lost_block(region: RegionKind, index: u32, items: u32) -> String {
    let first = u64::from(index) * u64::from(items);
    let last = first + u64::from(items) - 1;
    match region {
        RegionKind::Volumes => format!("volumes of slots {first} to {last} are lost"),
        RegionKind::Snapshots => format!("snapshots and heads of slots {first} to {last} are lost"),
        RegionKind::Labels => {
            format!("the labels of the snapshot in slot {} are lost", index / LABEL_BLOCKS)
        }
        RegionKind::Spares => {
            format!(
                "zeros in any range of any layer with a parent are lost (entries {first} to {last})"
            )
        }
        _ => format!(
            "content of any range of any layer is lost (what data extents {first} to {last} held)"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In memory the highest bit says that a run is lost: from the device it would have been taken for that.
    #[test]
    fn a_run_longer_than_any_volume_is_a_fault() {
        let fault = |run: u32| {
            let header = entry::EntryHeader {
                snapshot: 1.into(),
                run: run.into(),
                ..entry::EntryHeader::default()
            };
            entry(RegionKind::Spares, &entry::EntryBytes { header, data: &[0; 2], zero: &[0; 2] })
        };
        assert_eq!(fault(RUN_MAX), None);
        assert!(fault(1 << 31).is_some());
        assert!(fault(u32::MAX).is_some());
    }
}
