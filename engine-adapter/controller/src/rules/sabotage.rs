//! Planted mistakes for the test of the simulation: with the feature `sabotage` one can be switched on for the
//! calling thread; without it every check is `false`.

#[cfg(feature = "sabotage")]
pub use switch::{is, set};

/// A planted mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// Replicas that are being rebuilt are read from.
    ReadFromWo,
    /// A write that failed on one replica is acknowledged, the replica faulted some time later.
    AcknowledgeFirst,
    /// A write is acknowledged when the first replica has it.
    AcknowledgeEarly,
    /// A replica that failed a write stays.
    KeepFailed,
    /// All full replicas stay, whatever they wrote.
    KeepAllFull,
    /// A full replica stays although others have the write.
    KeepFullBehindDone,
    /// A replica being rebuilt stays though it has what no complete one has.
    KeepWoAhead,
    /// The first replica is blamed for every failure.
    BlameFirst,
    /// Unaligned writes go as they are to a replica being rebuilt.
    NoWidening,
    /// Requests that overlap are sent at once.
    NoBlockLocks,
    /// A discard goes to a replica being rebuilt.
    UnmapWhileRebuilding,
    /// A replica whose snapshot failed stays.
    KeepWithoutSnapshot,
    /// Snapshots are taken without pausing I/O.
    SnapshotWithoutPause,
    /// A rebuild is believed without comparing names of layers.
    SkipVerify,
    /// A rebuild is believed of a replica that says that nothing has come in.
    TrustUnfilled,
    /// Layers that the source lacks stay in the rebuilt replica.
    KeepExtraLayers,
    /// Revision counters are not compared.
    IgnoreCounters,
    /// The counter is not copied to the rebuilt replica.
    SkipCounterCopy,
    /// A replica that failed to expand stays as it is.
    KeepUnexpanded,
    /// A replica of another size takes part.
    IgnoreSize,
    /// A replica whose requests timed out stays.
    IgnoreTimeout,
    /// A replica that failed to revert stays.
    KeepUnreverted,
    /// What any replica answers starts the clock of the last complete one.
    HurryForAny,
    /// Who refuses a snapshot is faulted even if all do.
    FaultRefusals,
    /// A replica that holds damaged data becomes `ERR` at the first block.
    BlameDamaged,
    /// The content to heal a block with is read before the block is locked.
    HealFromBefore,
    /// The blocks that are healed are not locked.
    HealUnlocked,
    /// A damaged block is not healed.
    NeverHeal,
    /// A write that met damage is not made one of whole blocks.
    NoWideningForDamage,
    /// A write that met damage goes once more to those that have it as well.
    WidenForAll,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 30] = [
        Self::ReadFromWo,
        Self::AcknowledgeFirst,
        Self::AcknowledgeEarly,
        Self::KeepFailed,
        Self::KeepAllFull,
        Self::KeepFullBehindDone,
        Self::KeepWoAhead,
        Self::BlameFirst,
        Self::NoWidening,
        Self::NoBlockLocks,
        Self::UnmapWhileRebuilding,
        Self::KeepWithoutSnapshot,
        Self::SnapshotWithoutPause,
        Self::SkipVerify,
        Self::TrustUnfilled,
        Self::KeepExtraLayers,
        Self::IgnoreCounters,
        Self::SkipCounterCopy,
        Self::KeepUnexpanded,
        Self::IgnoreSize,
        Self::IgnoreTimeout,
        Self::KeepUnreverted,
        Self::HurryForAny,
        Self::FaultRefusals,
        Self::BlameDamaged,
        Self::HealFromBefore,
        Self::HealUnlocked,
        Self::NeverHeal,
        Self::NoWideningForDamage,
        Self::WidenForAll,
    ];
}

/// Whether this one is on: never, without the feature.
#[cfg(not(feature = "sabotage"))]
#[must_use]
#[inline(always)]
pub const fn is(_bug: Bug) -> bool {
    false
}

#[cfg(feature = "sabotage")]
mod switch {
    use super::Bug;
    use std::cell::Cell;

    thread_local! {
        static ACTIVE: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Switches one on (or all off) for the calling thread.
    pub fn set(bug: Option<Bug>) {
        ACTIVE.set(bug);
    }

    /// Whether this one is on.
    #[must_use]
    pub fn is(bug: Bug) -> bool {
        ACTIVE.get() == Some(bug)
    }
}
