//! Planted mistakes in the reactors' own code, for the test of its tests, as [`crate::rules`] has
//! them for the rules: with the feature `sabotage` one can be switched on for the reactors of a path
//! (`PathOptions::bug`); without it every check is `false`.

dbs_core::planted_bugs! {
    /// A change is acknowledged before the replicas that missed it are `ERR`.
    AcknowledgeFirst,
    /// A replica that a newer controller has is a replica lost, like any other.
    OutliveHandOver,
    /// What replicas have that one lacks which was just lost is answered before they have flushed.
    AnswerBeforeFlush,
    /// A change that the lost replica has ends that, if it is flushed after the loss.
    SettleAtEnd,
    /// After that, what the lost replica missed while it was on its way is answered before a flush.
    TrustSettled,
    /// What waits for a replica whose connections broke is not sent again.
    ForgetAway,
    /// What is sent again is sent as if it were new.
    SendAsNew,
    /// What waits for a replica whose connections broke counts as done.
    BelieveAway,
    /// A replica may be away for as long as it likes.
    WaitForAway,
    /// Connections may break and be made anew for ever, though they carry nothing.
    FlapForEver,
    /// A read may go to and fro for ever between replicas whose connections break.
    BounceForEver,
    /// A reply belongs to whatever request has its place in the array by now.
    AnyUse,
    /// A reply is believed whatever it is about.
    TrustReplies,
    /// Replicas that are being rebuilt are read from.
    ReadFromWo,
    /// Blocks are given back when a change is sent, not when it is done.
    ReleaseEarly,
    /// A pause has begun though requests are in flight.
    PauseEarly,
    /// A pause waits for flushes.
    PauseLong,
    /// A read that failed is tried on the same replica once more.
    RetrySame,
    /// No replica ever becomes `ERR` because it takes too long.
    IgnoreTimeout,
    /// Any answer is proof that no request was lost.
    IgnoreOldest,
    /// A flush has to be answered as soon as a write.
    HurryFlush,
    /// So has a block that is to be healed.
    HurryHealing,
    /// A flush fails with those that were complete when it was asked for.
    FlushOnce,
    /// What waits for a replica that is gone waits on.
    KeepWaiting,
    /// A change that has waited for its blocks for long waits like any other.
    Starve,
    /// What a damaged block is healed with is read and sent without locking the block.
    HealUnlocked,
    /// A replica that refuses to be healed stays.
    KeepUnhealed,
    /// A replica may call a block damaged as often as it likes, if nothing has to be healed.
    BelieveDamage,
    /// The request that met damage is answered when that is healed.
    HealFirst,
}
