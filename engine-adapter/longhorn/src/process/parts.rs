//! The parts of a controller as they really are: the data path, and the frontends on it.

use super::block::{BlockDevice, BlockVolume};
use super::device::{DeviceVolume, Places, UBLK};
use super::disk::{self, NVME_TCP, VHOST_USER};
use super::iscsi::{BLOCK_DEVICE, IscsiOptions, IscsiVolume, TARGET};
use super::ledger::Ledger;
use super::local::{Local, WORKERS};
use super::running::Running;
use super::socket::{NBD, NbdVolume, SOCKET, SocketVolume};
use dbs_core::{Error, Result};
use dbs_frontend::Listen;
use dbs_frontend::tls::TlsConfig;
use longhorn_controller::frontend::{NvmeOptions, UblkOptions};
use longhorn_controller::path::{
    self, BackendAddress, JournalEntry, LocalReplica, Path, PathStats, Pause,
};
use longhorn_controller::rules::{Mode, ReplicaId};
use longhorn_controller::volume::file::Backends;
use longhorn_controller::volume::{DataPath, Events, Frontend, Frontends, Paused, Relay};
use longhorn_wire::frame::Hello;
use longhorn_wire::remote::Address;
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

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
    /// Whether the frontend may be a device or disk that an earlier controller left.
    pub outlives: bool,
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
        if let Some(other) = self.ledger.newer_of(hello) {
            self.path.remove(replica);
            let text = format!(
                "it is a newer process of {other}, which is complete: remove that one first"
            );
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        // It has no mode yet: nothing that it may miss is sent before the ledger knows it.
        self.ledger.name(replica, address, hello);
        Ok(())
    }

    fn set_mode(&self, replica: ReplicaId, mode: Mode) -> bool {
        if mode == Mode::Rw {
            // What is done to the volume from here on, nobody tells a device that waits for a controller. As long as
            // no replica is open here, another controller may have the device, and need the list.
            if !self.outlives {
                self.ledger.end_of_others();
            }
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
    /// Whether writes of clients that ask for no flush are answered only when they are durable; if it is not
    /// said, those of `tgtd` are, which asks for no flush on behalf of users who do.
    pub durable_writes: Option<bool>,
    /// Where the frontend `nbd` listens besides its socket.
    pub nbd: Vec<Listen>,
    /// Certificates for that, if clients over TCP must use TLS.
    pub nbd_tls: Option<TlsConfig>,
    /// Where hosts come in over the frontend `nvme-tcp`, if not on any port of loopback, and which.
    pub nvme: NvmeOptions,
    /// What `tgt-blockdev` is to be.
    pub block_device: BlockDevice,
    /// Queues and depth of a block device of `ublk`.
    pub device: UblkOptions,
    /// Directory of the nodes of block devices.
    pub nodes: PathBuf,
    /// How long `tgtd` waits for the answer to a request, and the kernel for that of a disk over iSCSI.
    pub request_timeout: Duration,
    /// See [`FrontendOptions::request_timeout`].
    pub disk_timeout: Duration,
}

impl FrontendOptions {
    /// Where the volume's block device is to be remembered and shown.
    pub(super) fn places(&self) -> Places {
        Places { run: self.run(), nodes: self.nodes.clone() }
    }

    /// Of sockets.
    pub(super) fn directory(&self) -> PathBuf {
        self.sockets.clone().unwrap_or_else(|| PathBuf::from(RUN))
    }

    fn run(&self) -> PathBuf {
        self.directory().join("longhorn")
    }
}

impl OnPath {
    fn block(&self, kind: &'static str, wanted: BlockDevice) -> BlockVolume {
        let ublk = DeviceVolume {
            path: Arc::clone(&self.path),
            options: self.options.device,
            places: self.options.places(),
            ledger: Arc::clone(&self.ledger),
            running: Running::default(),
        };
        BlockVolume {
            kind,
            wanted,
            ublk,
            iscsi: self.iscsi(BLOCK_DEVICE),
            chosen: Mutex::default(),
        }
    }

    fn iscsi(&self, kind: &'static str) -> IscsiVolume {
        let options = &self.options;
        let iscsi = IscsiOptions {
            nodes: options.nodes.clone(),
            request_timeout: options.request_timeout,
            disk_timeout: options.disk_timeout,
        };
        let durable = options.durable_writes.unwrap_or(true);
        let socket = SocketVolume::new(Arc::clone(&self.path), options.directory(), durable);
        IscsiVolume::new(kind, iscsi, socket, Arc::clone(&self.ledger))
    }
}

impl Frontends for OnPath {
    fn create(&self, kind: &str) -> Result<Arc<dyn Frontend>> {
        let options = &self.options;
        match kind {
            UBLK => return Ok(Arc::new(self.block(UBLK, BlockDevice::Ublk))),
            BLOCK_DEVICE => return Ok(Arc::new(self.block(BLOCK_DEVICE, options.block_device))),
            TARGET => return Ok(Arc::new(self.iscsi(TARGET))),
            _ => {}
        }
        let disk = disk::create(kind, &self.path, &self.ledger, options.run(), &options.nvme);
        if let Some(disk) = disk {
            return Ok(disk);
        }
        // A device or disk that a dead controller left can never be given back to its users.
        self.ledger.end();
        let path = Arc::clone(&self.path);
        match kind {
            SOCKET => {
                let durable = options.durable_writes.unwrap_or(false);
                Ok(Arc::new(SocketVolume::new(path, options.directory(), durable)))
            }
            NBD => {
                let (run, more, tls) =
                    (options.run(), options.nbd.clone(), options.nbd_tls.clone());
                Ok(Arc::new(NbdVolume { path, run, more, tls, running: Running::default() }))
            }
            _ => Err(Error::unsupported(format!(
                "frontend `{kind}` is not in this build; `{BLOCK_DEVICE}`, `{UBLK}`, `{TARGET}`, `{VHOST_USER}`, \
                 `{NVME_TCP}`, `{NBD}` and `{SOCKET}` are"
            ))),
        }
    }
}

/// Whether a frontend of this kind may be a device or disk that outlives its controller.
pub(super) fn may_outlive(kind: &str) -> bool {
    matches!(kind, UBLK | BLOCK_DEVICE | VHOST_USER | NVME_TCP)
}
