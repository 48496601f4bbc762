//! What is done with a volume from outside: calls of its controller and, where the controller has no
//! part in it, of its replicas and their sync agents.
//!
//! Upstream keeps these workflows in a library that its command line and its instance manager share:
//! adding a replica, removing and purging snapshots, cloning, hashing, backing up and restoring. The controller alone does none
//! of them. This is that library; it works with upstream's controllers and replicas as with ours, and
//! its errors read as upstream's do, since callers match on them.

mod backup;
mod clone;
mod engine;
mod hash;
mod rebuild;
mod replica;
mod snapshots;
mod status;

pub use backup::{BackupBegun, ReplicaError, RestoreError, credential, open_store};
pub use clone::CloneOptions;
pub use engine::{Engine, Listed};
pub use rebuild::RebuildOptions;
pub use replica::{ReplicaLink, SyncOptions};
pub(crate) use snapshots::{disks, purge, remove_snapshot};
pub use status::{
    BackupStatus, CloneStatus, DiskInfo, HashStatus, PurgeStatus, RebuildStatus, RestoreStatus,
    Version,
};

use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::remote;
use std::collections::BTreeMap;
use std::fmt::Display;
use tonic::{Code, Response, Status};

/// Something about each of some replicas, by their addresses.
pub type ByReplica<T> = BTreeMap<String, T>;

/// An address as texts name it: without scheme and version.
#[must_use]
pub fn service_url(url: &str) -> &str {
    let url = url.strip_prefix("tcp://").unwrap_or(url);
    let url = url.strip_prefix("http://").unwrap_or(url);
    url.strip_suffix("/v1").unwrap_or(url)
}

/// The answer to a call; if it failed, what was being done and what the status says, as a Go program
/// prints that.
fn answer<T>(reply: std::result::Result<Response<T>, Status>, what: impl Display) -> Result<T> {
    let failed = |status: Status| {
        let code = match status.code() {
            // The one that Go spells otherwise.
            Code::Cancelled => "Canceled".to_owned(),
            code => format!("{code:?}"),
        };
        let text = remote::text(&status);
        let text = format!("{what}: rpc error: code = {code} desc = {text}");
        Error::new(remote::kind(&status), text)
    };
    reply.map(Response::into_inner).map_err(failed)
}

/// Does something with all of these replicas of a volume at once; results in their order.
async fn each<T, F>(
    volume: &str,
    replicas: &[Listed],
    act: impl Fn(Listed, ReplicaLink) -> F,
) -> Vec<Result<T>>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let start = |of: &Listed| of.link_in(volume).map(|link| tokio::spawn(act(of.clone(), link)));
    let tasks: Vec<_> = replicas.iter().map(start).collect();
    let mut results = Vec::with_capacity(tasks.len());
    for task in tasks {
        let ended = |e| Error::new(ErrorKind::Io, format!("a call ended early: {e}"));
        results.push(match task {
            Ok(task) => task.await.map_err(ended).and_then(|result| result),
            Err(error) => Err(error),
        });
    }
    results
}

/// What failed at which replicas.
#[derive(Default)]
struct Failures(Vec<(String, Error)>);

impl Failures {
    /// Those among the results of these replicas.
    fn of(replicas: &[Listed], results: Vec<Result<()>>) -> Self {
        let mut failures = Self::default();
        for (replica, result) in replicas.iter().zip(results) {
            if let Err(error) = result {
                failures.add(replica, error);
            }
        }
        failures
    }

    fn add(&mut self, replica: &Listed, error: Error) {
        self.0.push((replica.address.clone(), error));
    }

    /// # Errors
    /// One for all of them.
    fn check(self) -> Result<()> {
        let Some((_, first)) = self.0.first() else { return Ok(()) };
        let kind = first.kind();
        let texts: Vec<_> = self.0.iter().map(|(at, error)| format!("{at}: {error}")).collect();
        Err(Error::new(kind, texts.join("; ")))
    }
}
