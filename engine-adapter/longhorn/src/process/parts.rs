//! The parts of a controller as they really are: the data path, and the frontends on it.

use super::device::{DeviceVolume, Places, is_device};
use super::ledger::Ledger;
use super::local::{Local, WORKERS};
use dbs_core::{Error, Result};
use dbs_frontend::tls::TlsConfig;
use dbs_frontend::{Listen, lock};
use dbs_service::log;
use longhorn_controller::frontend::{NbdFrontend, SocketFrontend, SocketOptions, UblkOptions};
use longhorn_controller::path::{
    self, BackendAddress, JournalEntry, LocalReplica, Path, PathStats, Pause,
};
use longhorn_controller::rules::{Mode, ReplicaId};
use longhorn_controller::volume::file::Backends;
use longhorn_controller::volume::{DataPath, Events, Frontend, Frontends, Offer, Paused, Relay};
use longhorn_wire::frame::Hello;
use longhorn_wire::remote::Address;
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// The frontend of a volume without replicas, if none is asked for.
pub const SOCKET: &str = "socket";
const NBD: &str = "nbd";
/// Where upstream's sockets are, and below it what is ours alone.
const RUN: &str = "/var/run";

/// What the path says goes to the volume's controller, and before that into the list of complete
/// replicas.
pub(super) struct Faults {
    pub relay: Arc<Relay>,
    pub ledger: Arc<Ledger>,
}

impl path::Events for Faults {
    fn faulting(&self, replica: ReplicaId) {
        self.ledger.remove_replica(replica);
    }

    fn faulted(&self, replica: ReplicaId, why: &str) {
        Events::faulted(self.relay.as_ref(), replica, why);
    }
}

/// The data path of a volume, by the addresses that its replicas have in the control plane.
pub(super) struct Data {
    pub path: Arc<Path>,
    /// Where the only replica listens for data, if it is not the port after that of its gRPC.
    pub unix: Option<PathBuf>,
    pub ledger: Arc<Ledger>,
    /// Those of this process.
    pub locals: HashMap<String, Local>,
    /// The kinds that there may be, and the files.
    pub backends: Backends,
}

/// While it is there, the path pauses all I/O.
struct PausedPath {
    _pause: Pause,
}

impl Paused for PausedPath {}

impl DataPath for Data {
    fn connect(&self, replica: ReplicaId, address: &str) -> io::Result<()> {
        if let Some(local) = self.locals.get(address) {
            // Its ports are others each time.
            let hello = Hello { identity: None, ..local.replica.hello() };
            self.ledger.name(replica, &local.name, Some(hello));
            let backend = BackendAddress::Local(local.replica.clone());
            return self.path.connect(replica, address, &backend).map(drop);
        }
        if let Some(files) = self.backends.find(address).map_err(invalid)? {
            let file = LocalReplica::new(files.gate(address), WORKERS)?;
            self.ledger.name(replica, address, None);
            return self.path.connect(replica, address, &BackendAddress::Local(file)).map(drop);
        }
        let listen = match &self.unix {
            Some(path) => Listen::Unix(path.clone()),
            None => Address::parse(address).and_then(|address| address.data()).map_err(invalid)?,
        };
        let hello = self.path.connect(replica, address, &BackendAddress::Remote(listen))?;
        // It has no mode yet: nothing that it may miss is sent before the ledger knows it.
        self.ledger.name(replica, address, hello);
        Ok(())
    }

    fn set_mode(&self, replica: ReplicaId, mode: Mode) -> bool {
        if mode == Mode::Rw {
            // If it has failed already, that is known there.
            self.ledger.complete(replica);
        }
        self.path.set_mode(replica, mode);
        self.path.mode(replica) == Some(mode)
    }

    fn remove(&self, replica: ReplicaId) {
        self.path.remove(replica);
    }

    fn flush(&self) {
        self.path.flush();
    }

    fn pause(&self, all: bool) -> Box<dyn Paused + '_> {
        Box::new(PausedPath { _pause: self.path.pause(all) })
    }

    fn resize(&self, size: u64) {
        self.path.resize(size);
    }

    fn set_expanding(&self, expanding: bool) {
        self.path.set_expanding(expanding);
    }

    fn stats(&self) -> PathStats {
        self.path.stats()
    }

    fn journal(&self, limit: i64) -> Vec<JournalEntry> {
        self.path.journal(limit)
    }
}

fn invalid(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error.to_string())
}

/// The frontends on a path.
pub(super) struct OnPath {
    pub path: Arc<Path>,
    /// Settings of all of them.
    pub options: FrontendOptions,
    pub ledger: Arc<Ledger>,
}

/// Settings of frontends.
#[derive(Debug, Clone)]
pub struct FrontendOptions {
    /// Directory of their sockets, if not the usual one.
    pub sockets: Option<PathBuf>,
    /// Where the frontend `nbd` listens besides its socket.
    pub nbd: Vec<Listen>,
    /// Certificates for that, if clients over TCP must use TLS.
    pub nbd_tls: Option<TlsConfig>,
    /// Queues and depth of a block device.
    pub device: UblkOptions,
    /// Directory of the nodes of block devices.
    pub nodes: PathBuf,
}

impl FrontendOptions {
    /// Where the volume's block device is to be remembered and shown.
    pub(super) fn places(&self) -> Places {
        Places { run: self.run(), nodes: self.nodes.clone() }
    }

    fn run(&self) -> PathBuf {
        let directory = self.sockets.clone().unwrap_or_else(|| PathBuf::from(RUN));
        directory.join("longhorn")
    }
}

impl Frontends for OnPath {
    fn create(&self, kind: &str) -> Result<Arc<dyn Frontend>> {
        let path = Arc::clone(&self.path);
        let options = &self.options;
        if is_device(kind) {
            return Ok(Arc::new(DeviceVolume {
                kind: kind.to_owned(),
                path,
                options: options.device,
                places: options.places(),
                ledger: Arc::clone(&self.ledger),
                running: Mutex::default(),
            }));
        }
        // A device that a dead controller left can never be given back to its users.
        self.ledger.end();
        match kind {
            SOCKET => {
                let sockets = options.sockets.clone();
                Ok(Arc::new(SocketVolume { path, sockets, running: Mutex::default() }))
            }
            NBD => {
                let (run, more, tls) =
                    (options.run(), options.nbd.clone(), options.nbd_tls.clone());
                Ok(Arc::new(NbdVolume { path, run, more, tls, running: Mutex::default() }))
            }
            "tgt-iscsi" => Err(Error::unsupported(
                "frontend `tgt-iscsi` is not in this build: `tgt-blockdev` is a block device on this \
                 machine, `nbd` serves other machines",
            )),
            _ => Err(Error::unsupported(format!(
                "frontend `{kind}` is not in this build; `tgt-blockdev`, `ublk`, `nbd` and `socket` are"
            ))),
        }
    }
}

/// Removes the socket of an older engine, whose clients connect to this one next time.
fn take_place(path: &std::path::Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(e, format!("removing {}", path.display())))
        }
        _ => Ok(()),
    }
}

/// The frontend `nbd` of a volume.
struct NbdVolume {
    path: Arc<Path>,
    run: PathBuf,
    more: Vec<Listen>,
    tls: Option<TlsConfig>,
    running: Mutex<Option<(String, NbdFrontend)>>,
}

impl Frontend for NbdVolume {
    fn name(&self) -> &str {
        NBD
    }

    fn endpoint(&self) -> String {
        let running = lock(&self.running);
        running.as_ref().map_or_else(String::new, |(endpoint, _)| endpoint.clone())
    }

    fn is_up(&self) -> bool {
        lock(&self.running).is_some()
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        let volume = &offer.volume;
        let failed = |e| Error::io(e, format!("serving `{volume}`"));
        std::fs::create_dir_all(&self.run).map_err(failed)?;
        let socket = self.run.join(format!("nbd-{volume}.sock"));
        if offer.upgrade {
            take_place(&socket)?;
        }
        let endpoint = format!("nbd+unix:///{volume}?socket={}", socket.display());
        let addresses = [&[Listen::Unix(socket)], self.more.as_slice()].concat();
        let started = NbdFrontend::start(&self.path, volume, &addresses, self.tls.clone());
        let started = started.map_err(failed)?;
        for address in started.addresses() {
            log::info("listening", &[("volume", volume), ("nbd", address)]);
        }
        *lock(&self.running) = Some((endpoint, started));
        Ok(())
    }

    /// Requests are checked against what the export was when their connection began; the next one sees
    /// the new size.
    fn expand(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn stop(&self) -> Result<()> {
        let running = lock(&self.running).take();
        if let Some((_, frontend)) = running {
            frontend.stop();
        }
        Ok(())
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
            take_place(path)?;
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
