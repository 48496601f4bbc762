//! What a shim and the process that serves its replica say to each other, on a control socket.
//!
//! 1. The shim sends `{"method":"replica","params":Replica}` or `{"method":"sync-agent",...}`, and is
//!    answered `{"result":{"descriptors":N}}`, or an error.
//! 2. It sends one message with N open files ([`super::fds`]): the directory, then listening sockets.
//! 3. It is answered `{"result":{...}}` when they are served, or `{"error":{...}}` and the end.
//! 4. It stays. A line from it, or the end of the connection, ends what is served for it; then, if
//!    it is still there, it is told `{"result":null}`. If the server ends the connection first, there
//!    is nothing served any more.

use super::options::Options;
use dbs_control::Reply;
use dbs_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// Method for a replica.
pub const REPLICA: &str = "replica";
/// Method for a sync agent of a replica that is being served.
pub const SYNC_AGENT: &str = "sync-agent";
/// How long a peer may take for a step.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest line.
const LINE_MAX_BYTES: u64 = 64 << 10;
/// What ends it.
pub const STOP: &[u8] = b"stop\n";

/// A replica to be served, and the sockets that come for it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replica {
    /// How.
    pub options: Options,
    /// The data server's socket is a unix socket.
    pub unix: bool,
    /// There is a socket for the sync agent.
    pub agent: bool,
    /// Sockets for receiving files.
    pub receivers: usize,
    /// It is to be served with TLS, or not at all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls: bool,
}

impl Replica {
    /// Files that are passed for it.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        3 + usize::from(self.agent) + self.receivers
    }
}

/// A sync agent to be served, and the sockets that come for it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SyncAgent {
    /// The replica's directory.
    pub dir: PathBuf,
    /// Longhorn's name of the volume, which callers are checked by.
    pub volume_name: String,
    /// Name of the instance, likewise.
    pub instance_name: String,
    /// Sockets for receiving files.
    pub receivers: usize,
    /// As of a [`Replica`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls: bool,
}

impl SyncAgent {
    /// Files that are passed for it.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        2 + self.receivers
    }
}

/// The first answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Expected {
    /// Files to be passed.
    pub descriptors: usize,
}

/// Sends a reply.
///
/// # Errors
/// `Io`.
pub fn reply(mut stream: &UnixStream, reply: &Reply) -> Result<()> {
    let failed = |e| Error::io(e, "answering the shim");
    stream.set_write_timeout(Some(STEP_TIMEOUT)).map_err(failed)?;
    let mut line = serde_json::to_vec(reply)
        .map_err(|e| Error::new(ErrorKind::Io, format!("encoding an answer: {e}")))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(failed)
}

/// Reads a reply, which may take so long; without a limit if `None`. `None` if the peer has ended
/// the connection.
///
/// # Errors
/// The one that was sent, `Io`.
pub fn read_reply(stream: &UnixStream, timeout: Option<Duration>) -> Result<Option<Value>> {
    let failed = |e| Error::io(e, "waiting for the server of the store");
    stream.set_read_timeout(timeout).map_err(failed)?;
    let mut line = Vec::new();
    // Byte by byte: what comes after the line is not ours yet.
    let mut reader = BufReader::with_capacity(1, stream).take(LINE_MAX_BYTES);
    reader.read_until(b'\n', &mut line).map_err(failed)?;
    if line.last() != Some(&b'\n') {
        return Ok(None);
    }
    match serde_json::from_slice(&line) {
        Ok(Reply::Result(value)) => Ok(Some(value)),
        Ok(Reply::Error(failure)) => Err(failure.into()),
        Ok(Reply::Progress(_) | Reply::Part(_)) | Err(_) => {
            Err(Error::new(ErrorKind::Io, "the server of the store answered something else"))
        }
    }
}
