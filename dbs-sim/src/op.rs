//! What a history is made of.

use proptest::prelude::*;

/// Volume names in use: `v0`, `v1`, ...
pub const VOLUMES: u8 = 6;
/// Snapshot names in use: `s0`, `s1`, ... More than the layers that a look-up walks block by block.
pub const SNAPSHOTS: u8 = 14;
/// Largest volume in sectors.
pub const SECTORS_MAX: u16 = 640;

/// One step of a history. Names are small numbers, so that they collide; offsets and lengths are
/// sectors of 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are what they say")]
pub enum Op {
    CreateVolume {
        vol: u8,
        sectors: u16,
    },
    RenameVolume {
        vol: u8,
        new: u8,
    },
    ResizeVolume {
        vol: u8,
        sectors: u16,
    },
    DeleteVolume {
        vol: u8,
    },
    /// Gives an encrypted volume another secret.
    Rekey {
        vol: u8,
    },
    CreateSnapshot {
        vol: u8,
        snap: u8,
        labels: u8,
    },
    RenameSnapshot {
        vol: u8,
        snap: u8,
        new: u8,
    },
    DeleteSnapshot {
        vol: u8,
        snap: u8,
    },
    Rollback {
        vol: u8,
        snap: u8,
        keep_size: bool,
    },
    Protect {
        vol: u8,
        snap: u8,
        on: bool,
    },
    Retire {
        vol: u8,
        snap: u8,
        on: bool,
    },
    Rebuilding {
        vol: u8,
        on: bool,
    },
    SetLabels {
        vol: u8,
        snap: u8,
        labels: u8,
    },
    Clone {
        vol: u8,
        snap: u8,
        new: u8,
    },
    /// Stops after `limit` calls of its progress function.
    Flatten {
        vol: u8,
        limit: u8,
    },
    Write {
        vol: u8,
        at: u16,
        len: u16,
        fua: bool,
    },
    Discard {
        vol: u8,
        at: u16,
        len: u16,
    },
    WriteZeroes {
        vol: u8,
        at: u16,
        len: u16,
        fua: bool,
    },
    /// Writes zeros as data.
    Blank {
        vol: u8,
        at: u16,
        len: u16,
    },
    /// Gives up blocks of zeros; stops after `limit` calls of its progress function.
    Trim {
        vol: u8,
        limit: u8,
    },
    /// Compresses what a volume or a snapshot of it holds; stops after `limit` calls of its progress function.
    Compress {
        vol: u8,
        snap: Option<u8>,
        limit: u8,
    },
    Prune {
        vol: u8,
        at: u16,
        len: u16,
    },
    /// Adds a snapshot to a volume that is being rebuilt.
    InsertSnapshot {
        vol: u8,
        snap: u8,
        sectors: u16,
    },
    /// Writes blocks of a snapshot's layer.
    WriteLayer {
        vol: u8,
        snap: u8,
        start: u8,
        count: u8,
    },
    ZeroLayer {
        vol: u8,
        snap: u8,
        start: u8,
        count: u8,
    },
    ClearLayer {
        vol: u8,
        snap: u8,
        start: u8,
        count: u8,
    },
    /// Gives snapshots, and the head, these parents; `marks` says which become retired.
    Relink {
        vol: u8,
        links: Vec<(u8, Option<u8>)>,
        head: Option<u8>,
        marks: u8,
    },
    /// Writes the whole volume, until the store is full.
    Fill {
        vol: u8,
    },
    FlushVolume {
        vol: u8,
    },
    Flush,
    /// Flushes, and then the file of the tail is removed.
    LoseTail,
    Work {
        steps: u8,
    },
    /// Grows the store by this many extents.
    Grow {
        extents: u8,
    },
    /// Gives the store a uuid whose bytes are all this one.
    NewUuid {
        byte: u8,
    },
    /// Stops after `limit` calls of its progress function.
    Vacuum {
        limit: u8,
    },
    /// Begins a long call that stands still after each of its steps, unless there is one.
    Begin {
        long: Long,
    },
    /// Lets it go on.
    GoOn {
        steps: u8,
    },
    /// Stops it.
    Stop,
    /// Opens a handle and keeps it, or drops the one that is kept.
    Hold {
        vol: u8,
    },
    /// Begins to read something of a volume, the head through a handle that is kept; the disk is read at
    /// [`Op::ReadOn`] or [`Op::ReadEnd`].
    ReadBegin {
        vol: u8,
        of: Reads,
    },
    /// All reads that have begun read the disk, and do not end.
    ReadOn,
    /// Ends all reads that have begun.
    ReadEnd,
    /// Compares everything with the model.
    Verify,
    /// Closes the store and opens it again.
    Reopen,
    /// The process is killed.
    Kill,
    /// The process is killed and the next one finds no tail.
    KillWithoutTail,
    /// Power loss.
    PowerLoss,
}

/// A call that may take long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are what they say")]
pub enum Long {
    Flatten { vol: u8 },
    Compress { vol: u8 },
    Vacuum,
    Scrub,
    Relearn,
}

impl Long {
    /// Whether it has the turn of background work, so that others wait.
    #[must_use]
    pub fn has_turn(self) -> bool {
        matches!(self, Self::Flatten { .. } | Self::Compress { .. } | Self::Vacuum)
    }
}

/// What of a volume is read for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// The head, as a reactor does it.
    Head,
    /// This snapshot, as a reactor does it.
    Snapshot(u8),
    /// The layer of this snapshot, or of the head.
    Layer(Option<u8>),
    /// This snapshot, or the head, by an observer.
    Observed(Option<u8>),
}

impl Reads {
    /// The snapshot.
    #[must_use]
    pub fn snapshot(self) -> Option<u8> {
        match self {
            Self::Head => None,
            Self::Snapshot(snap) => Some(snap),
            Self::Layer(snap) | Self::Observed(snap) => snap,
        }
    }
}

impl Op {
    /// Whether it changes what the model holds through one command that is wholly done or not.
    #[must_use]
    pub fn is_command(&self) -> bool {
        matches!(
            self,
            Self::CreateVolume { .. }
                | Self::RenameVolume { .. }
                | Self::ResizeVolume { .. }
                | Self::DeleteVolume { .. }
                | Self::Rekey { .. }
                | Self::CreateSnapshot { .. }
                | Self::RenameSnapshot { .. }
                | Self::DeleteSnapshot { .. }
                | Self::Rollback { .. }
                | Self::Protect { .. }
                | Self::Retire { .. }
                | Self::Rebuilding { .. }
                | Self::SetLabels { .. }
                | Self::InsertSnapshot { .. }
                | Self::Relink { .. }
                | Self::Clone { .. }
                | Self::NewUuid { .. }
        )
    }

    /// Whether it does the same while all volumes are locked.
    #[must_use]
    pub fn needs_no_key(&self) -> bool {
        match self {
            Self::ResizeVolume { .. } | Self::Rollback { keep_size: true, .. } => false,
            Self::Flatten { .. } | Self::Work { .. } | Self::Vacuum { .. } | Self::Grow { .. } => {
                true
            }
            op => op.is_command(),
        }
    }

    /// The volume it is about, if its layers or marks may change.
    #[must_use]
    pub fn volume(&self) -> Option<u8> {
        match *self {
            Self::ResizeVolume { vol, .. }
            | Self::CreateSnapshot { vol, .. }
            | Self::RenameSnapshot { vol, .. }
            | Self::DeleteSnapshot { vol, .. }
            | Self::Rollback { vol, .. }
            | Self::Rebuilding { vol, .. }
            | Self::Write { vol, .. }
            | Self::Discard { vol, .. }
            | Self::WriteZeroes { vol, .. }
            | Self::Blank { vol, .. }
            | Self::Prune { vol, .. }
            | Self::InsertSnapshot { vol, .. }
            | Self::WriteLayer { vol, .. }
            | Self::ZeroLayer { vol, .. }
            | Self::ClearLayer { vol, .. }
            | Self::Relink { vol, .. } => Some(vol),
            _ => None,
        }
    }

    /// Whether a volume is no longer as it was created.
    #[must_use]
    pub fn changes_layers(&self) -> bool {
        self.volume().is_some() && !matches!(self, Self::Rebuilding { .. })
    }

    /// Whether it ends the process.
    #[must_use]
    pub fn ends_process(&self) -> bool {
        matches!(self, Self::Reopen | Self::Kill | Self::KillWithoutTail | Self::PowerLoss)
    }
}

/// The name of a volume.
#[must_use]
pub fn volume_name(vol: u8) -> String {
    format!("v{vol}")
}

/// The name of a snapshot.
#[must_use]
pub fn snapshot_name(snap: u8) -> String {
    format!("s{snap}")
}

/// Labels that follow from a number: none for 0, more and longer ones for larger numbers,
/// up to more than one metadata block holds.
#[must_use]
pub fn labels(number: u8) -> dbs_core::info::Labels {
    (0..number % 4)
        .map(|i| (format!("key{i}"), "x".repeat(usize::from(number) * 4 * (1 + usize::from(i)))))
        .collect()
}

/// Operations without crashes for proptest, few names, so that short histories do something.
pub fn strategy() -> impl Strategy<Value = Op> {
    let vol = || 0..3u8;
    let snap = || prop_oneof![2 => 0..3u8, 1 => 0..SNAPSHOTS];
    let io = || (0..3u8, 0..256u16, 1..96u16);
    let sectors = || prop_oneof![Just(256u16), 1..320u16];
    prop_oneof![
        4 => (vol(), sectors()).prop_map(|(vol, sectors)| Op::CreateVolume { vol, sectors }),
        1 => (vol(), vol()).prop_map(|(vol, new)| Op::RenameVolume { vol, new }),
        2 => (vol(), sectors()).prop_map(|(vol, sectors)| Op::ResizeVolume { vol, sectors }),
        1 => vol().prop_map(|vol| Op::DeleteVolume { vol }),
        6 => (vol(), snap(), 0..200u8)
            .prop_map(|(vol, snap, labels)| Op::CreateSnapshot { vol, snap, labels }),
        1 => (vol(), snap(), snap())
            .prop_map(|(vol, snap, new)| Op::RenameSnapshot { vol, snap, new }),
        3 => (vol(), snap()).prop_map(|(vol, snap)| Op::DeleteSnapshot { vol, snap }),
        2 => (vol(), snap(), any::<bool>())
            .prop_map(|(vol, snap, keep_size)| Op::Rollback { vol, snap, keep_size }),
        1 => (vol(), snap(), any::<bool>())
            .prop_map(|(vol, snap, on)| Op::Protect { vol, snap, on }),
        1 => (vol(), snap(), any::<bool>())
            .prop_map(|(vol, snap, on)| Op::Retire { vol, snap, on }),
        1 => (vol(), any::<bool>()).prop_map(|(vol, on)| Op::Rebuilding { vol, on }),
        1 => (vol(), snap(), any::<u8>())
            .prop_map(|(vol, snap, labels)| Op::SetLabels { vol, snap, labels }),
        3 => (vol(), snap(), vol()).prop_map(|(vol, snap, new)| Op::Clone { vol, snap, new }),
        1 => (vol(), 0..4u8).prop_map(|(vol, limit)| Op::Flatten { vol, limit }),
        20 => (io(), any::<bool>())
            .prop_map(|((vol, at, len), fua)| Op::Write { vol, at, len, fua }),
        5 => io().prop_map(|(vol, at, len)| Op::Discard { vol, at, len }),
        4 => (io(), any::<bool>())
            .prop_map(|((vol, at, len), fua)| Op::WriteZeroes { vol, at, len, fua }),
        2 => io().prop_map(|(vol, at, len)| Op::Blank { vol, at, len }),
        2 => (vol(), 0..8u8).prop_map(|(vol, limit)| Op::Trim { vol, limit }),
        2 => io().prop_map(|(vol, at, len)| Op::Prune { vol, at, len }),
        1 => vol().prop_map(|vol| Op::Fill { vol }),
        2 => vol().prop_map(|vol| Op::FlushVolume { vol }),
        1 => Just(Op::Flush),
        3 => (1..32u8).prop_map(|steps| Op::Work { steps }),
        1 => (0..4u8).prop_map(|extents| Op::Grow { extents }),
        1 => (1..4u8).prop_map(|byte| Op::NewUuid { byte }),
        1 => (0..8u8).prop_map(|limit| Op::Vacuum { limit }),
        1 => vol().prop_map(|vol| Op::Hold { vol }),
        3 => Just(Op::Verify),
        1 => Just(Op::Reopen),
    ]
}
