//! The parts of a controller as they really are: the data path, and the frontends on it.

use crate::agent::remote::Address;
use crate::controller::frontend::{SocketFrontend, SocketOptions};
use crate::controller::path::{self, BackendAddress, Hold, Path, PathKind};
use crate::controller::rules::{Mode, ReplicaId};
use crate::controller::volume::{
    DataPath, Events, Frontend, Frontends, Held, Offer, Relay, Totals,
};
use dbs_core::{Error, Result};
use dbs_server::frontend::{Listen, lock};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// The only frontend of ours so far.
pub const SOCKET: &str = "socket";

/// What the path says goes to the volume's controller.
pub(super) struct Faults(pub Arc<Relay>);

impl path::Events for Faults {
    fn faulted(&self, replica: ReplicaId, why: &str) {
        Events::faulted(self.0.as_ref(), replica, why);
    }
}

/// The data path of a volume, by the addresses that its replicas have in the control plane.
pub(super) struct Data {
    pub path: Arc<Path>,
    /// Where the only replica listens for data, if it is not the port after that of its gRPC.
    pub unix: Option<PathBuf>,
}

impl Held for Hold {}

impl DataPath for Data {
    fn connect(&self, replica: ReplicaId, address: &str) -> io::Result<()> {
        let listen = match &self.unix {
            Some(path) => Listen::Unix(path.clone()),
            None => Address::parse(address).and_then(|address| address.data()).map_err(invalid)?,
        };
        self.path.connect(replica, address, &BackendAddress::Remote(listen))
    }

    fn set_mode(&self, replica: ReplicaId, mode: Mode) -> bool {
        self.path.set_mode(replica, mode);
        self.path.mode(replica) == Some(mode)
    }

    fn remove(&self, replica: ReplicaId) {
        self.path.remove(replica);
    }

    fn hold(&self) -> Box<dyn Held + '_> {
        Box::new(self.path.hold())
    }

    fn resize(&self, size: u64) {
        self.path.resize(size);
    }

    fn set_expanding(&self, expanding: bool) {
        self.path.set_expanding(expanding);
    }

    fn totals(&self) -> Totals {
        totals(&self.path)
    }
}

/// What went through a path.
pub(super) fn totals(path: &Path) -> Totals {
    let stats = path.stats();
    let [read, write] = [PathKind::Read, PathKind::Write].map(|kind| kind as usize);
    let nanos = |kind: usize| u64::try_from(stats.time[kind].as_nanos()).unwrap_or(u64::MAX);
    Totals {
        reads: stats.requests[read],
        read_bytes: stats.bytes[read],
        read_ns: nanos(read),
        writes: stats.requests[write],
        written_bytes: stats.bytes[write],
        write_ns: nanos(write),
    }
}

fn invalid(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error.to_string())
}

/// The frontends on a path.
pub(super) struct OnPath {
    pub path: Arc<Path>,
    /// Directory of sockets, if not the usual one.
    pub sockets: Option<PathBuf>,
}

impl Frontends for OnPath {
    fn create(&self, kind: &str) -> Result<Arc<dyn Frontend>> {
        if kind != SOCKET {
            return Err(Error::unsupported(format!(
                "frontend `{kind}` is not in this build; `{SOCKET}` is"
            )));
        }
        let (path, sockets) = (Arc::clone(&self.path), self.sockets.clone());
        Ok(Arc::new(SocketVolume { path, sockets, running: Mutex::default() }))
    }
}

/// The frontend `socket` of a volume.
struct SocketVolume {
    path: Arc<Path>,
    sockets: Option<PathBuf>,
    running: Mutex<Option<SocketFrontend>>,
}

impl Frontend for SocketVolume {
    fn name(&self) -> &str {
        SOCKET
    }

    fn endpoint(&self) -> String {
        let running = lock(&self.running);
        running.as_ref().map_or_else(String::new, |frontend| match frontend.address() {
            Listen::Unix(path) => path.display().to_string(),
            address => address.to_string(),
        })
    }

    fn is_up(&self) -> bool {
        lock(&self.running).is_some()
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        let mut options = SocketOptions::new(&offer.volume);
        if let (Some(directory), Listen::Unix(path)) = (&self.sockets, &options.address)
            && let Some(name) = path.file_name()
        {
            options.address = Listen::Unix(directory.join(name));
        }
        if let (true, Listen::Unix(path)) = (offer.upgrade, &options.address) {
            // The older engine listens there; its clients connect to this one next time.
            match std::fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::io(e, format!("removing {}", path.display())));
                }
                _ => {}
            }
        }
        let started = SocketFrontend::start(&self.path, &options)
            .map_err(|e| Error::io(e, format!("serving `{}`", offer.volume)))?;
        *lock(&self.running) = Some(started);
        Ok(())
    }

    /// Requests are checked against the size of the path, which has grown.
    fn expand(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn stop(&self) -> Result<()> {
        let running = lock(&self.running).take();
        if let Some(frontend) = running {
            frontend.stop();
        }
        Ok(())
    }
}
