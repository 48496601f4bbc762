//! Planted bugs for the tests of the tests: with the feature `sabotage`, one of them can be
//! switched on; without it every check compiles to `false`.

/// Makes the enum `Bug` of these, and `set` and `is` to switch one on and to ask for it. The feature is that of
/// the crate that uses this.
#[doc(hidden)]
#[macro_export]
macro_rules! planted_bugs {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A planted bug.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Bug {
            $($(#[$doc])* $name,)*
        }

        impl Bug {
            /// All of them.
            pub const ALL: [Self; [$(stringify!($name)),*].len()] = [$(Self::$name),*];
        }

        #[cfg(feature = "sabotage")]
        thread_local! {
            static ACTIVE: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
        }

        /// Switches a planted bug on (or all off) for the calling thread.
        #[cfg(feature = "sabotage")]
        pub fn set(bug: Option<Bug>) {
            ACTIVE.set(bug);
        }

        /// Whether this planted bug is on.
        #[cfg(feature = "sabotage")]
        #[must_use]
        pub fn is(bug: Bug) -> bool {
            ACTIVE.get() == Some(bug)
        }

        /// Whether this planted bug is on: never, without the feature.
        #[cfg(not(feature = "sabotage"))]
        #[must_use]
        #[inline(always)]
        pub const fn is(_bug: Bug) -> bool {
            false
        }
    };
}

#[cfg(feature = "sabotage")]
thread_local! {
    static AT_ONCE: std::cell::Cell<u32> = const { std::cell::Cell::new(u32::MAX) };
}

/// From now on no step of the calling thread does more than this at once: a simulation's volumes are smaller than the
/// steps that others take, and whatever happens between two of them would never happen there.
#[cfg(feature = "sabotage")]
pub fn set_at_once(most: u32) {
    AT_ONCE.set(most);
}

/// How much a step does at once that may do so much.
#[cfg(feature = "sabotage")]
#[must_use]
pub fn at_once(most: u32) -> u32 {
    AT_ONCE.get().clamp(1, most)
}

/// How much a step does at once that may do so much: all of it, without the feature.
#[cfg(not(feature = "sabotage"))]
#[must_use]
#[inline(always)]
pub const fn at_once(most: u32) -> u32 {
    most
}

// Each breaks one step that a promise of `docs/format.md` rests on.
planted_bugs! {
    /// The journal group is written without flushing the data it points to.
    SkipDataFlush,
    /// A commit returns without flushing its journal group.
    SkipGroupFlush,
    /// Neither the checksum over a whole journal group nor its later blocks' headers are compared.
    IgnoreGroupChecksum,
    /// A freed extent is reused before its freeing is durable.
    ReuseFreedEarly,
    /// A tail is replayed without comparing session and group.
    ReplayStaleTail,
    /// A write is acknowledged without its records in the tail.
    SkipTail,
    /// Nobody looks whether the tail is still there.
    TrustLostTail,
    /// Metadata blocks are written back before the group they include is durable.
    WriteBackEarly,
    /// Both copies of a metadata block are written at once.
    WriteBothCopies,
    /// Journal space is released before the blocks that replace it are durable.
    ReleaseJournalEarly,
    /// A discard over a parent's data frees the block without marking it zero.
    ForgetZeroOnDiscard,
    /// A merge commits before the copied blocks are flushed.
    MergeBeforeFlush,
    /// A batch of merges is recorded when its first copy is written, before the others are.
    RecordMergesEarly,
    /// A merge marks zeros in an entry that is in no record yet, and does not record it.
    MarkUnrecorded,
    /// A snapshot's merge ignores the zero marks of the child.
    MergeIgnoresZeros,
    /// The checksum of a metadata block is not compared.
    IgnoreBlockChecksum,
    /// A flush with nothing to commit does not reach the device.
    SkipEmptyFlush,
    /// After a crash, the only good copy of a metadata block is written over first.
    OverwriteGoodCopy,
    /// The superblock promises a larger store before its size is durable.
    GrowWithoutFlush,
    /// A prune takes an extent that the head holds for one that it covers.
    PruneUncovered,
    /// A prune goes on below a snapshot that others look through too.
    PruneShared,
    /// A write to a snapshot's layer is recorded and committed before its data is written.
    RecordLayerEarly,
    /// A write to a snapshot's layer leaves what others remember of the place.
    WriteKeepsViews,
    /// What is remembered of a volume's content outlives a change of its tree.
    RelinkKeepsViews,
    /// What is remembered of a clone's content outlives its being cut off from its origin.
    CutKeepsViews,
    /// A merge does not wait for reads that began before something lost sight of a snapshot.
    MergeBesideReads,
    /// A relink too long for one group gives parents before old ones are gone.
    RelinkWithoutCutting,
    /// A discard in a rebuilding volume marks nothing zero where there is no parent yet.
    ForgetZeroInRebuilding,
    /// Blocks are written while the device says that their group of checksums is closed.
    LoseIntent,
    /// Blocks are written before it is durable that their group of checksums is open.
    LateIntent,
    /// The device says that a group of checksums is closed before what it speaks of is durable.
    ClearIntentEarly,
    /// Checksums of a group that was open when the last process ended are believed.
    TrustOpenGroup,
    /// A group is closed with pages that nobody may believe.
    CloseKeepsDoubts,
    /// A page is written to a group that is not open, before what it speaks of is durable.
    WriteFreshPages,
    /// What the device says of a page is believed though later checksums of it were forgotten.
    ForgetKeepsPage,
    /// Blocks that are copied keep the checksums of what they held.
    CopyKeepsSums,
    /// A write that failed leaves the checksum of what was there.
    FailedWriteKeepsSums,
    /// A commit does not ask whether an earlier one failed.
    CommitAfterFailure,
    /// Who flushes after a flush that failed meanwhile takes its own for a success.
    FlushBesideFailure,
    /// Who asks for a flush while one runs takes that one for its own.
    ShareRunningFlush,
    /// Who asks for a flush while another one runs is answered at once.
    AnswerAmidFlush,
    /// A flush that a reactor does is taken for a success though it failed.
    IgnoreFlushFailure,
    /// The tail is kept when a flush has failed.
    KeepTailAfterFailure,
    /// A reactor flushes the storage, and no more, though there is something to commit.
    FlushUncommitted,
    /// A block of the journal that cannot be read is one that nothing is in.
    PassOverUnreadable,
    /// The page of a block that is healed is opened first, as for any other write.
    HealOpensPage,
    /// A write that overwrites does not look at who holds its blocks.
    WriteBesideHolds,
    /// Who excludes looks only at those who share and took their holds on the same thread.
    ExcludeOwnLane,
    /// Bitmaps leave memory that the device does not have yet.
    DirtyBitmapsGo,
    /// Bitmaps come back from whichever copy of their metadata block is there.
    OlderBitmapsCome,
    /// Bitmaps leave memory that a write is about to change.
    PlannedBitmapsGo,
    /// A metadata block that cannot be read keeps groups in the journal, and more come until it is full.
    FillHeldJournal,
    /// A read that was looked up before is not known to those who free what it reads.
    ReadOutsideFence,
    /// Two writes of the same block are under way, and of its checksums the later one counts.
    ClaimTwice,
    /// A write that overwrites is acknowledged while the record of its place is not safe.
    OverwriteBeforeTail,
    /// The number of an encrypted block is that of its place on the device, which other blocks may get.
    TweakByPlace,
    /// The entry of an extent says that it is compressed before the compressed blocks are written.
    CompressBeforeWritten,
    /// The entry of an extent says that it is expanded before its blocks are written.
    ExpandBeforeWritten,
    /// What is compressed or expanded shows its parent where it was zero.
    ExpandForgetsZeros,
}
