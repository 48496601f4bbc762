//! Plain files as replicas: `file://PATH`, where the controller was told to take such.
//!
//! Whoever reaches the controller may name any file then. What a file says of itself is what upstream's
//! backend of this name says. Snapshots it refuses, where upstream's answers as if there were one.

use super::parts::{Call, CallError, Called, done};
use dbs_core::{Error, Result};
use longhorn_data::plain::{self, HANDOVER, PlainFile};
use longhorn_data::{Access, Active, Gate, Target};
use longhorn_wire::control::expansion::{ExpandCode, ExpandError};
use longhorn_wire::proto::ptypes;
use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How their addresses begin.
const FILE: &str = "file";
const TCP: &str = "tcp";
const SECTOR_BYTES: i64 = 4096;
/// What each of them says that it has counted, and holds.
const REVISION: i64 = 1;
const SNAPSHOTS: i32 = 1;

/// A kind of replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// Servers: `tcp://HOST:PORT`.
    Tcp,
    /// Files: `file://PATH`.
    File,
}

impl std::str::FromStr for BackendKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            TCP => Ok(Self::Tcp),
            FILE => Ok(Self::File),
            _ => Err(Error::unsupported(format!(
                "Unsupported backend: {text}; there are `{TCP}` and `{FILE}`"
            ))),
        }
    }
}

/// The kinds that replicas of a volume may be of, and those that are files.
#[derive(Debug, Clone)]
pub struct Backends {
    tcp: bool,
    files: Option<Files>,
}

impl Default for Backends {
    fn default() -> Self {
        Self { tcp: true, files: None }
    }
}

impl Backends {
    /// These kinds, and no others.
    #[must_use]
    pub fn new(kinds: &[BackendKind]) -> Self {
        let files = kinds.contains(&BackendKind::File).then(Files::default);
        Self { tcp: kinds.contains(&BackendKind::Tcp), files }
    }

    /// The files, if the address is of one; `None` if it is of a server.
    ///
    /// # Errors
    /// `Unsupported`: it is of a kind that is not to be used.
    pub fn find(&self, address: &str) -> Result<Option<&Files>> {
        let why = match (address.split_once("://").map_or(TCP, |(kind, _)| kind), &self.files) {
            (TCP, _) if self.tcp => return Ok(None),
            (FILE, Some(files)) => return Ok(Some(files)),
            (kind @ (TCP | FILE), _) => {
                format!("the controller was started without `--enable-backend {kind}`")
            }
            _ => format!("it begins neither with `{TCP}://` nor with `{FILE}://`"),
        };
        Err(Error::unsupported(format!("failed to find factory for {address}: {why}")))
    }
}

/// The files that are in use, by their addresses.
#[derive(Debug, Clone, Default)]
pub struct Files(Arc<Mutex<HashMap<String, Arc<FileReplica>>>>);

/// A file as a replica.
#[derive(Debug)]
struct FileReplica {
    address: String,
    path: PathBuf,
    gate: Arc<Gate>,
    open: Mutex<Option<Arc<PlainFile>>>,
}

impl Files {
    /// What the data path asks the file with this address, open or not.
    #[must_use]
    pub fn gate(&self, address: &str) -> Arc<Gate> {
        Arc::clone(&self.replica(address).gate)
    }

    /// Makes a call. It may wait for the disk.
    ///
    /// # Errors
    /// What the file, or its kind, cannot do.
    pub fn call(&self, address: &str, call: Call) -> Called {
        let (needs_open, may_end) =
            (call.needs_open(), matches!(call, Call::Open { .. } | Call::Close));
        let replica = match call {
            Call::Open { .. } => self.replica(address),
            // Who only asks leaves nothing behind.
            _ => self.all().get(address).cloned().unwrap_or_else(|| FileReplica::new(address)),
        };
        let answer = replica.call(call).map_err(|failed| match failed {
            Failed::Expand(error) => CallError::unknown(error.to_json()),
            Failed::Refused(text) => CallError { unavailable: false, refused: true, text },
            Failed::Other(error) => CallError::unknown(error.to_string()),
        });
        if may_end && replica.open().is_none() {
            self.all().remove(address);
        }
        done(needs_open, answer?)
    }

    fn replica(&self, address: &str) -> Arc<FileReplica> {
        let mut all = self.all();
        let replica = all.entry(address.to_owned()).or_insert_with(|| FileReplica::new(address));
        Arc::clone(replica)
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, Arc<FileReplica>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a call has failed.
enum Failed {
    /// The file did not grow.
    Expand(ExpandError),
    /// No file can do that.
    Refused(String),
    Other(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl FileReplica {
    fn new(address: &str) -> Arc<Self> {
        let path = address.split_once("://").map_or(address, |(_, path)| path).into();
        let gate = Gate::new(Access::not_open("closed"));
        Arc::new(Self { address: address.to_owned(), path, gate, open: Mutex::default() })
    }

    fn open(&self) -> MutexGuard<'_, Option<Arc<PlainFile>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, call: Call) -> std::result::Result<ptypes::Replica, Failed> {
        let mut open = self.open();
        let what = match call {
            Call::Open { upgrade, .. } => {
                if open.is_some() {
                    return Err(Error::busy("it is open already").into());
                }
                let handover = if upgrade { HANDOVER } else { Duration::ZERO };
                let file = Arc::new(PlainFile::open(&self.path, handover)?);
                let events = Arc::clone(&file);
                let active = Active::new(Target::File(Arc::clone(&file)), events);
                self.gate.set(Access::Open(Arc::new(active)));
                return Ok(described(&open.insert(file).metadata()?, true));
            }
            Call::Close => {
                // First out of use, then closed: another one may open it at once.
                self.gate.set(Access::not_open("closed"));
                *open = None;
                return Ok(ptypes::Replica { state: "closed".to_owned(), ..Default::default() });
            }
            Call::Expand(size) => {
                if let Some(file) = &*open {
                    expand(file, size).map_err(Failed::Expand)?;
                }
                None
            }
            Call::Snapshot { .. } => Some("snapshots"),
            Call::Revert { .. } => Some("revert"),
            Call::RemoveDisk(_) => Some("removing disks"),
            // There is nothing of the kind to be set.
            Call::Get
            | Call::SetRebuilding(_)
            | Call::SetCounter(_)
            | Call::SetUnmapMark(_)
            | Call::SetSnapshotMaxCount(_)
            | Call::SetSnapshotMaxSize(_) => None,
        };
        if let Some(what) = what {
            return Err(Failed::Refused(format!(
                "backend {} does not support {what}",
                self.address
            )));
        }
        match &*open {
            Some(file) => Ok(described(&file.metadata()?, true)),
            None => Ok(described(&plain::look(&self.path)?, false)),
        }
    }
}

fn expand(file: &PlainFile, size: u64) -> std::result::Result<(), ExpandError> {
    use ExpandCode::{
        FunctionFailedRollbackFailed, FunctionFailedRollbackSucceeded,
        FunctionFailedWithoutRollback,
    };
    if size == file.size() {
        return Ok(());
    }
    if size < file.size() {
        let text = format!("cannot truncate to a smaller size {size} for the backend type file");
        return Err(ExpandError::new(FunctionFailedWithoutRollback, text));
    }
    file.grow(size).map_err(|(error, rollback)| {
        let message = format!("failed to expand the file to size {size}: {error}");
        let code = match rollback {
            None => FunctionFailedRollbackSucceeded,
            Some(_) => FunctionFailedRollbackFailed,
        };
        let rollback_message = rollback.map_or_else(String::new, |error| error.to_string());
        ExpandError { code, message, rollback_message }
    })
}

/// What a file says of itself.
fn described(metadata: &Metadata, open: bool) -> ptypes::Replica {
    let size = i64::try_from(metadata.len()).unwrap_or(i64::MAX);
    ptypes::Replica {
        state: if open { "open" } else { "closed" }.to_owned(),
        size: size.to_string(),
        sector_size: SECTOR_BYTES,
        revision_counter: REVISION,
        last_modify_time: metadata.mtime().saturating_mul(1_000_000_000) + metadata.mtime_nsec(),
        head_file_size: size,
        snapshot_count_usage: SNAPSHOTS,
        snapshot_count_total: SNAPSHOTS,
        ..Default::default()
    }
}
