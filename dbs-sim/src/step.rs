//! One step of a history, what may happen during it, and which answers that explains.

use crate::disk::{Counts, Faults};
use crate::image;
use crate::op::Op;
use crate::outcomes::End;
use crate::perform::bytes;
use dbs_core::info::StoreInfo;
use dbs_core::{Error, ErrorKind};
use std::cell::Cell;

thread_local! {
    static IMAGES: Cell<u64> = const { Cell::new(0) };
}

/// Crash images that the calling thread has opened, those of failed histories included.
#[must_use]
pub fn images_taken() -> u64 {
    IMAGES.get()
}

/// One more of them.
pub(crate) fn count_image() {
    IMAGES.set(IMAGES.get() + 1);
}

/// Free extents that a store may keep for itself.
pub(crate) const RESERVE_EXTENTS: u64 = 2;

/// What happens during a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nothing.
    Calm,
    /// Crash images are taken in the middle, before these changes of the disk, and afterwards.
    Images([u64; 2]),
    /// The process is killed at the n-th change.
    KillAt(u64),
    /// Power is lost at the n-th change.
    PowerLossAt(u64),
    /// The n-th change fails.
    EioAt(u64),
    /// The n-th change is refused for lack of space.
    RefusedAt(u64),
    /// The n-th read fails.
    ReadEioAt(u64),
    /// The disk below is full from the n-th request for space.
    EnospcFrom(u64),
    /// No data can be read.
    Unreadable,
}

/// One step of a history; its seed decides all that happens by chance in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What is asked for.
    pub op: Op,
    /// What happens meanwhile.
    pub fate: Fate,
    /// Seed of the step's own chances.
    pub seed: u64,
}

/// What a history did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Steps done.
    pub steps: u64,
    /// Crash images opened and compared; crashes of the history itself included.
    pub images: u64,
    /// Times the history's own store was opened.
    pub opens: u64,
    /// Steps that met their fate.
    pub disturbed: u64,
    /// Commands and writes that the store refused for lack of space.
    pub no_space: u64,
}

impl Stats {
    /// One more crash image.
    pub(crate) fn count_image(&mut self) {
        self.images += 1;
        count_image();
    }
}

impl std::ops::AddAssign for Stats {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.images += other.images;
        self.opens += other.opens;
        self.disturbed += other.disturbed;
        self.no_space += other.no_space;
    }
}

impl Fate {
    /// The faults on a disk whose data begins there.
    pub(crate) fn faults(self, data: u64) -> Faults {
        let mut faults = Faults::default();
        match self {
            Self::Calm => {}
            Self::Images(at) => faults.captures_at = at.to_vec(),
            Self::KillAt(n) | Self::PowerLossAt(n) => faults.stop_at = Some(n),
            Self::EioAt(n) => faults.eio_at = Some(n),
            Self::RefusedAt(n) => faults.refused_at = Some(n),
            Self::ReadEioAt(n) => faults.read_eio_at = Some(n),
            Self::EnospcFrom(n) => faults.enospc_from = Some(n),
            Self::Unreadable => faults.read_eio_in = Some(data..u64::MAX),
        }
        faults
    }

    /// How the process ends of it.
    pub(crate) fn end(self, rng: &mut fastrand::Rng) -> End {
        match self {
            Self::PowerLossAt(_) => End::PowerLost,
            // A failed flush leaves the cache unknown: a power loss shows what it lost, and so does a disk
            // that does not keep it in memory.
            Self::EioAt(_) | Self::RefusedAt(_) if rng.bool() => End::PowerLost,
            Self::EioAt(_) | Self::RefusedAt(_) => End::FlushLost,
            _ => End::Killed,
        }
    }

    /// Whether the disk was used enough for it to come true.
    pub(crate) fn was_hit(self, counts: &Counts) -> bool {
        match self {
            Self::Calm | Self::Unreadable => false,
            Self::Images(at) => at.iter().any(|n| counts.changes >= *n),
            Self::KillAt(n) | Self::PowerLossAt(n) | Self::EioAt(n) | Self::RefusedAt(n) => {
                counts.changes >= n
            }
            Self::ReadEioAt(n) => counts.reads >= n,
            Self::EnospcFrom(n) => counts.space_requests >= n,
        }
    }

    /// Whether the store may fail like this because of the fate.
    pub(crate) fn explains(self, error: &Error) -> bool {
        match self {
            Self::EioAt(_) | Self::ReadEioAt(_) | Self::Unreadable => {
                matches!(error.kind(), ErrorKind::Io | ErrorKind::Poisoned)
            }
            Self::EnospcFrom(_) | Self::RefusedAt(_) => {
                // `Io` of a commit, of which nobody knows what is on the device.
                matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Io | ErrorKind::Poisoned)
            }
            _ => false,
        }
    }
}

/// Whether a store of these figures may refuse `op` for lack of space.
pub(crate) fn full(info: &StoreInfo, op: &Op) -> Result<(), String> {
    let tables = info.snapshots >= info.snapshots_max || info.volumes >= info.volumes_max;
    let is_full = match op {
        // One on a file takes a slot for its base, too.
        Op::CreateVolume { sectors, .. } if image::is_below(*sectors) => {
            tables || info.snapshots + 1 >= info.snapshots_max
        }
        Op::CreateVolume { .. } | Op::CreateSnapshot { .. } | Op::Clone { .. } => tables,
        Op::Rollback { keep_size, .. } => {
            tables || (*keep_size && info.extents_free <= RESERVE_EXTENTS + 1)
        }
        Op::Write { len, .. } | Op::WriteZeroes { len, .. } | Op::Blank { len, .. } => {
            let needed = bytes(*len).div_ceil(info.extent_size) + 1;
            info.extents_free <= needed + RESERVE_EXTENTS
        }
        Op::InsertSnapshot { .. } => tables,
        Op::WriteLayer { count, .. } => {
            let needed = (u64::from(*count) * 4096).div_ceil(info.extent_size) + 1;
            info.extents_free <= needed + RESERVE_EXTENTS
        }
        Op::ZeroLayer { .. } | Op::ClearLayer { .. } => info.extents_free <= RESERVE_EXTENTS + 1,
        Op::Flatten { .. } | Op::Compress { .. } | Op::GoOn { .. } | Op::ResizeVolume { .. } => {
            info.extents_free <= RESERVE_EXTENTS + 1
        }
        _ => return Err("it must always be possible".into()),
    };
    if is_full { Ok(()) } else { Err(format!("yet the store is not full: {info:?}")) }
}
