//! The sync agent: what happens between replicas, and in the background of one.
//!
//! It runs in the process of its replica and on its own port: [`AgentRpc`] is upstream's
//! `SyncAgentService`, [`peer`] what DBS replicas say to each other instead where both are of this
//! kind. Upstream's agent works on files of the replica's directory; here a name of a file stands for
//! a layer of the volume, its description, or its checksum.

mod backup;
mod clone;
pub(crate) mod files;
pub mod hash;
mod incoming;
pub mod jobs;
pub mod peer;
pub mod ports;
mod purge;
mod queue;
mod rebuild;
mod receive;
mod restore;
mod send;
mod service;
pub mod shelf;
mod uses;

pub use peer::client::Traffic;
pub use ports::ReceiverPorts;
pub use service::AgentRpc;

use crate::replica::{Replica, User};
use backup::Backups;
use dbs_core::{Error, Result};
use hash::{Hashes, Subject};
use jobs::{Job, Jobs, Kind};
use longhorn_sync::image::LayerSource;
use longhorn_wire::control::Identity;
use longhorn_wire::names;
use longhorn_wire::proto::dbs::peer_server::{PeerServer, SERVICE_NAME as PEER};
use longhorn_wire::proto::ptypes::sync_agent_service_server::SERVICE_NAME as AGENT;
use peer::service::PeerService;
use ports::Ports;
use purge::Purge;
use restore::Restores;
use shelf::{Shelf, no_disk};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tonic::service::RoutesBuilder;
use uses::Uses;

/// Names of the services that an agent adds to its port.
pub const SERVICE_NAMES: [&str; 2] = [AGENT, PEER];

/// How long the end waits for what has been told of it.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a purge waits for who reads a snapshot, as a multiple of the pause of rebuilds.
const READERS: u32 = 6;

/// What an agent is started with.
#[derive(Debug)]
pub struct AgentOptions {
    /// Name of the Longhorn volume, as other agents of it know it; empty if unknown. (That of the replica's volume
    /// in the store is another one where replicas share a store.)
    pub volume: String,
    /// Where files are received.
    pub ports: ReceiverPorts,
    /// Where the lock of all replicas of the node is, see [`hash::lock_dir`].
    pub lock_dir: PathBuf,
    /// Where the node's own directories are to be seen, for a rebuild from files on the same node.
    pub host: PathBuf,
    /// The pause before the second attempt at something that failed in a rebuild; it grows. A purge waits for some of
    /// them.
    pub rest: Duration,
}

impl AgentOptions {
    /// With upstream's places, as the environment of this process has them.
    #[must_use]
    pub fn new(volume: &str, ports: ReceiverPorts) -> Self {
        let control_path = std::env::var("LONGHORN_CONTROL_PATH").ok();
        Self {
            volume: volume.to_owned(),
            ports,
            lock_dir: hash::lock_dir(control_path.as_deref()),
            host: PathBuf::from("/host"),
            rest: Duration::from_secs(5),
        }
    }
}

/// The agent of a replica.
pub struct Agent {
    replica: Arc<Replica>,
    volume: String,
    shelf: Arc<Shelf>,
    ports: Arc<Ports>,
    jobs: Jobs,
    hashes: Arc<Hashes>,
    backups: Backups,
    restores: Restores,
    uses: Uses,
    totals: Arc<Traffic>,
    host: PathBuf,
    rest: Duration,
}

impl Agent {
    /// The agent of this replica. It does nothing by itself.
    #[must_use]
    pub fn new(replica: Arc<Replica>, options: AgentOptions) -> Arc<Self> {
        let agent = Arc::new(Self {
            shelf: Arc::new(Shelf::new(Arc::clone(&replica))),
            ports: Ports::new(options.ports),
            jobs: Jobs::default(),
            hashes: Hashes::new(replica.dir(), &options.lock_dir),
            backups: Backups::default(),
            restores: Restores::default(),
            uses: Uses::default(),
            totals: Arc::default(),
            volume: options.volume,
            host: options.host,
            rest: options.rest,
            replica,
        });
        let me: Weak<Self> = Arc::downgrade(&agent);
        agent.replica.used_by(me);
        agent
    }

    /// Adds its services to those of a port, for callers that mean this identity.
    pub fn add_to(self: &Arc<Self>, routes: &mut RoutesBuilder, identity: &Identity) {
        routes.add_service(AgentRpc::server(Arc::clone(self), identity.clone()));
        let peer = PeerService::new(Arc::clone(&self.shelf), self.uses.clone());
        routes.add_service(PeerServer::with_interceptor(peer, identity.clone()));
    }

    /// How its jobs are.
    #[must_use]
    pub fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// Ends what it does with the store, for good: it is served no longer, though its replica may be.
    pub fn stop(&self) {
        self.uses.close();
        self.let_go(Instant::now() + PATIENCE);
    }

    /// What fetching layers and clones has cost since the start.
    #[must_use]
    pub fn traffic(&self) -> &Traffic {
        &self.totals
    }

    /// The pause before a lost connection is taken up again; it grows.
    fn short_rest(&self) -> Duration {
        self.rest / 20
    }

    /// Begins to purge; [`Agent::purge`] is to follow.
    ///
    /// # Errors
    /// `Busy` while it is purging or rebuilding.
    fn begin_purge(&self) -> Result<Job> {
        if self.replica.get()?.rebuilding {
            let text = "replica is rebuilding, snapshots cannot be purged";
            return Err(Error::busy(text));
        }
        if self.restores.is_running() {
            let text = "replica is restoring a backup, snapshots cannot be purged";
            return Err(Error::busy(text));
        }
        self.jobs.begin(Kind::Purge, Vec::new(), "")
    }

    /// Purges, to the end.
    fn purge(&self, job: Job) {
        let readers = self.rest * READERS;
        let (replica, hashes) = (&*self.replica, &self.hashes);
        let outcome = Purge { replica, hashes, job: &job, readers }.run();
        if let Err(error) = &outcome {
            let volume = self.replica.volume_name();
            dbs_service::log::error("purge", &[("volume", &volume), ("error", error)]);
        }
        job.end(&outcome);
    }

    /// Hashes a snapshot in the background. One that is being hashed already goes on.
    fn begin_hash(&self, snapshot: &str, rehash: bool) {
        let (replica, name) = (Arc::clone(&self.replica), snapshot.to_owned());
        match self.hashes.begin(snapshot, rehash, move || Self::subject(replica, &name)) {
            Ok(task) => drop(tokio::spawn(task)),
            Err(error) => {
                dbs_service::log::warn("hash", &[("snapshot", &snapshot), ("error", &error)]);
            }
        }
    }

    /// A snapshot's layer, for hashing.
    fn subject(replica: Arc<Replica>, snapshot: &str) -> Result<Subject> {
        let disk = names::snapshot_disk(snapshot);
        if !replica.disks()?.contains_key(&disk) {
            return Err(no_disk(&disk));
        }
        let source = LayerSource::to_hash(&replica.store()?, replica.volume_name(), snapshot)?;
        let shelf = Shelf::new(replica);
        Ok(Subject { source: Arc::new(source), stamp: Box::new(move || shelf.layer_stamp(&disk)) })
    }
}

impl User for Agent {
    fn let_go(&self, until: Instant) {
        self.uses.tell();
        self.hashes.cancel_all();
        self.restores.cancel(until);
        self.backups.cancel_all(until);
        self.uses.wait(until);
    }
}
