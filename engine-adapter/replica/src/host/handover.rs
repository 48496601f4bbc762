//! Ownership of a replica's store moves between two processes of the same directory: what the newer
//! one asks the older one, over a control socket in the directory.
//!
//! | method | answer |
//! |---|---|
//! | `replica.state` | [`ReplicaState`]: what the newer process answers from until it takes over |
//! | `replica.release` | null, once the older process has closed the store |
//!
//! After its release the older process is closed. Opening it asks the newer one in the same way.

use crate::replica::{Predecessor, ReplicaState};
use dbs_control::Client;
use dbs_core::{Error, ErrorKind, Result};
use serde_json::Value;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Name of the control socket in a replica's directory.
pub const SOCKET: &str = "volume.sock";
/// Method that asks for the state.
pub const STATE: &str = "replica.state";
/// Method that asks for the store.
pub const RELEASE: &str = "replica.release";
/// How long the answer to a question may take.
const STATE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a release may take: requests in flight, a flush.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);

/// A path to the control socket in a directory, however long the directory's own path is.
#[derive(Debug)]
pub struct SocketPath {
    // Keeps the path valid.
    _directory: File,
    path: PathBuf,
}

impl SocketPath {
    /// The socket of the replica in `directory`.
    ///
    /// # Errors
    /// `Io` if the directory cannot be opened.
    pub fn of(directory: &Path) -> Result<Self> {
        let named = |e| Error::io(e, format!("opening `{}`", directory.display()));
        let directory = File::open(directory).map_err(named)?;
        // Unix sockets have addresses of at most 107 bytes.
        let path = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd()));
        Ok(Self { _directory: directory, path })
    }

    /// The path, valid in this process as long as this lives.
    #[must_use]
    pub fn as_path(&self) -> &Path {
        &self.path
    }
}

/// The process that has the store, found by its control socket. It is asked anew each time: between two
/// questions the store may have passed to yet another one.
#[derive(Debug)]
pub struct OtherProcess {
    directory: PathBuf,
}

impl OtherProcess {
    /// Whoever serves the replica in `directory` when it is asked.
    #[must_use]
    pub fn of(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// The one that serves the replica in `directory`.
    ///
    /// # Errors
    /// `NotFound` if nobody does; of the connection.
    pub fn find(directory: &Path) -> Result<Self> {
        let this = Self::of(directory);
        this.call(STATE, STATE_TIMEOUT).map(|_| this)
    }

    fn call(&self, method: &str, timeout: Duration) -> Result<Value> {
        let socket = SocketPath::of(&self.directory)?;
        let mut client = Client::connect(socket.as_path())?;
        let deadline = Instant::now() + timeout;
        let answer = client.call_extra(method, &Value::Null, &mut |_| Instant::now() < deadline);
        answer.map_err(|e| e.context(format!("asking the other process for `{method}`")))
    }
}

impl Predecessor for OtherProcess {
    fn state(&self) -> Result<ReplicaState> {
        let state = self.call(STATE, STATE_TIMEOUT)?;
        serde_json::from_value(state).map_err(|e| {
            Error::new(ErrorKind::Io, format!("the other process answered something else: {e}"))
        })
    }

    fn release(&self) -> Result<()> {
        self.call(RELEASE, RELEASE_TIMEOUT).map(drop)
    }
}
