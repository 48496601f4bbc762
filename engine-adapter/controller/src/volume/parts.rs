//! What a controller works with, as traits: its replicas, the data path, frontends, the machine. The
//! simulation has its own of each.

use crate::path::{JournalEntry, PathStats};
use crate::rules::call_timeout::CallTimeout;
use crate::rules::start::State;
use crate::rules::{Mode, ReplicaId};
use dbs_core::Result;
use longhorn_wire::proto::ptypes;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::Arc;

/// A replica to be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Of its control API: `tcp://HOST:PORT`.
    pub address: String,
    /// Its instance name if it is to be compared; empty if not.
    pub instance: String,
}

/// A call of a replica's control API. All answer with what the replica is then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// ReplicaGet.
    Get,
    /// ReplicaOpen.
    Open {
        /// Whether another controller still uses it.
        upgrade: bool,
        /// Bytes that the volume has; 0 if unknown.
        expected_size: u64,
    },
    /// ReplicaClose.
    Close,
    /// ReplicaSnapshot.
    Snapshot {
        /// Name of the snapshot, bare.
        name: String,
        /// Whether a user asked for it.
        user_created: bool,
        /// When, in RFC 3339.
        created: String,
        /// Labels on it.
        labels: HashMap<String, String>,
    },
    /// ReplicaRevert.
    Revert {
        /// Disk name of the snapshot.
        disk: String,
        /// When, in RFC 3339.
        created: String,
        /// Names the revert, for all replicas.
        revert: String,
    },
    /// ReplicaExpand, to so many bytes.
    Expand(u64),
    /// RebuildingSet.
    SetRebuilding(bool),
    /// RevisionCounterSet.
    SetCounter(i64),
    /// UnmapMarkDiskChainRemovedSet.
    SetUnmapMark(bool),
    /// SnapshotMaxCountSet.
    SetSnapshotMaxCount(u32),
    /// SnapshotMaxSizeSet, in bytes.
    SetSnapshotMaxSize(u64),
    /// DiskRemove, forced.
    RemoveDisk(String),
}

impl Call {
    /// Whether a replica that is not open does nothing when it is asked this, and answers as if it had.
    #[must_use]
    pub const fn needs_open(&self) -> bool {
        match self {
            Self::Snapshot { .. }
            | Self::Revert { .. }
            | Self::Expand(_)
            | Self::SetCounter(_)
            | Self::RemoveDisk(_) => true,
            Self::Get
            | Self::Open { .. }
            | Self::Close
            | Self::SetRebuilding(_)
            | Self::SetUnmapMark(_)
            | Self::SetSnapshotMaxCount(_)
            | Self::SetSnapshotMaxSize(_) => false,
        }
    }
}

/// What an answer of success has come to. Upstream's replicas, and so ours, ignore some calls while they are
/// not open; only the state that they answer with says so.
///
/// # Errors
/// Nothing was done.
pub fn done(needs_open: bool, replica: ptypes::Replica) -> Called {
    match State::parse(&replica.state) {
        Some(State::Initial | State::Closed) if needs_open => {
            Err(CallError::unknown(format!("nothing was done: the replica is {}", replica.state)))
        }
        _ => Ok(replica),
    }
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallError {
    /// Whether the replica could not be reached at all.
    pub unavailable: bool,
    /// Whether it has done nothing for sure: its status says that it refused, or the call was never sent.
    pub refused: bool,
    /// What it said.
    pub text: String,
}

impl CallError {
    /// What the call has come to, if to anything, is not known.
    pub fn unknown(text: impl Into<String>) -> Self {
        Self { unavailable: false, refused: false, text: text.into() }
    }

    /// No connection came about, perhaps for want of something here: the replica has not heard of the call.
    pub fn never_sent(text: impl Into<String>) -> Self {
        Self { unavailable: true, refused: true, text: text.into() }
    }

    /// Whether the replica has not heard of the call.
    #[must_use]
    pub const fn was_never_sent(&self) -> bool {
        self.unavailable && self.refused
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for CallError {}

/// What a call came to.
pub type Called = std::result::Result<ptypes::Replica, CallError>;

/// How a rebuild is doing, as the sync agent of its target says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RebuildStatus {
    /// Whether layers are still coming in.
    pub running: bool,
    /// Why the last one failed; empty if it did not.
    pub error: String,
}

/// The control side of replicas. All methods block.
pub trait Replicas: Send + Sync {
    /// Makes all these calls at once; answers in the same order. With `timeout`, those that have not
    /// answered when it ends have failed; what becomes of them is not known.
    fn call_all(&self, calls: Vec<(Target, Call)>, timeout: Option<CallTimeout>) -> Vec<Called>;

    /// Has a file sent from one replica to another, where it gets this name.
    ///
    /// # Errors
    /// It is not there, or not whole.
    fn copy_file(
        &self,
        from: (&Target, &str),
        to: (&Target, &str),
    ) -> std::result::Result<(), CallError>;

    /// How a rebuild of this replica is doing.
    ///
    /// # Errors
    /// Its sync agent does not say.
    fn rebuild_status(&self, target: &Target) -> std::result::Result<RebuildStatus, CallError>;

    /// Closes a replica that is no longer part of the volume, without waiting long.
    fn close_soon(&self, target: &Target);
}

/// Keeps I/O from going on as long as it lives.
pub trait Paused {
    /// Whether it has kept I/O from going on until now.
    fn holds(&self) -> bool {
        true
    }
}

/// The data side of a volume. It makes replicas `ERR` on its own, and says so to its [`Events`].
pub trait DataPath: Send + Sync {
    /// Connects to the data port of a replica, which is not open yet. No request goes to it before it
    /// has a mode.
    ///
    /// # Errors
    /// No connection comes about.
    fn connect(&self, replica: ReplicaId, address: &str) -> io::Result<()>;

    /// Sets the mode of a replica, which is `ERR` for good once it is; says whether it has this one now.
    fn set_mode(&self, replica: ReplicaId, mode: Mode) -> bool;

    /// Closes the connections to a replica. Requests in flight to it have failed, and only there.
    /// Nothing happens if there is none.
    fn remove(&self, replica: ReplicaId);

    /// Has replicas make durable what they have taken, while I/O goes on; returns when all have, or have
    /// become `ERR`.
    fn flush(&self);

    /// Waits until no request is in flight and keeps new ones waiting. What is being healed changes no
    /// content, and goes on, unless `all` says otherwise. Not to be nested.
    fn pause(&self, all: bool) -> Box<dyn Paused + '_>;

    /// Sets the size in bytes; requests behind it fail.
    fn resize(&self, size: u64);

    /// Discards fail during an expansion.
    fn set_expanding(&self, expanding: bool);

    /// What it has done.
    fn stats(&self) -> PathStats;

    /// The last requests to replicas, see [`Path::journal`](crate::path::Path::journal).
    fn journal(&self, limit: i64) -> Vec<JournalEntry>;
}

/// What a data path tells its volume, from any thread; must not wait.
pub trait Events: Send + Sync {
    /// A replica has become `ERR`.
    fn faulted(&self, replica: ReplicaId, why: &str);
}

/// A volume, as a frontend offers it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Its name.
    pub volume: String,
    /// Its bytes.
    pub size: u64,
    /// Bytes of a sector, as replicas say.
    pub sector_size: u64,
    /// Whether another controller's frontend is to be taken over.
    pub upgrade: bool,
}

/// How a volume is offered to users. What it says of itself it says at once, and without asking the
/// volume anything.
pub trait Frontend: Send + Sync {
    /// Its kind.
    fn name(&self) -> &str;
    /// Where it is; empty if it is not up.
    fn endpoint(&self) -> String;
    /// What its block device is made with, where there is a choice; empty otherwise, and if it is not up.
    fn block_device(&self) -> &'static str {
        ""
    }
    /// Whether it is up, as it is also until its end has come.
    fn is_up(&self) -> bool;
    /// Whether its end has begun, and has not come.
    fn is_ending(&self) -> bool {
        false
    }
    /// Offers the volume.
    ///
    /// # Errors
    /// It cannot be offered.
    fn start(&self, offer: &Offer) -> Result<()>;
    /// The volume has grown; the data path takes requests of the new size already. Does nothing where its
    /// users see this size.
    ///
    /// # Errors
    /// Its users do not see the new size.
    fn expand(&self, size: u64) -> Result<()>;
    /// Offers it no more; what is in flight has been answered when this returns.
    ///
    /// # Errors
    /// It is still there.
    fn stop(&self) -> Result<()>;
}

/// The frontends that there are.
pub trait Frontends: Send + Sync {
    /// A frontend of this kind, not started.
    ///
    /// # Errors
    /// There is no such kind.
    fn create(&self, kind: &str) -> Result<Arc<dyn Frontend>>;
}

/// The machine that a controller runs on.
pub trait Host: Send + Sync {
    /// Now, in nanoseconds since the epoch.
    fn now_ns(&self) -> u64;
    /// A name that no other has.
    fn unique_name(&self) -> String;
    /// Notes what somebody should see; what went wrong and stays wrong, if `error`.
    fn log(&self, error: bool, event: &str, fields: &[(&str, &dyn fmt::Display)]);
    /// Has file systems write what they keep in memory, as far as that can be had in a short time.
    ///
    /// # Errors
    /// It is not known to have happened.
    fn sync(&self) -> Result<()>;
    /// Freezes the file systems on a block device until what this returns is dropped, or for some
    /// seconds at most. `None` if there are none.
    ///
    /// # Errors
    /// They cannot be frozen, or not soon; they are not frozen then.
    fn freeze(&self, device: &str) -> Result<Option<Box<dyn Paused>>>;
    /// Thaws what is frozen, before the process ends.
    fn thaw(&self) {}
}
