//! Planted mistakes for the test of the simulation: with the feature `sabotage` one can be switched on for the
//! calling thread; without it every check is `false`.

dbs_core::planted_bugs! {
    /// Replicas that are being rebuilt are read from.
    ReadFromWo,
    /// A write is acknowledged when the first replica has it.
    AcknowledgeEarly,
    /// A replica that failed a write stays.
    KeepFailed,
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
    /// A rebuild is believed of a replica whose mark somebody has taken away.
    TrustUnmarked,
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
    /// A replica that failed to revert stays.
    KeepUnreverted,
    /// What any replica answers starts the clock of the last complete one.
    HurryForAny,
    /// Who refuses a snapshot is faulted even if all do.
    FaultRefusals,
    /// A replica that holds damaged data becomes `ERR` at the first block.
    BlameDamaged,
    /// A damaged block is not healed.
    NeverHeal,
    /// A write that met damage is not made one of whole blocks.
    NoWideningForDamage,
    /// A write that met damage goes once more to those that have it as well.
    WidenForAll,
}
