//! The process of a controller: `longhorn controller`.

mod block;
mod device;
mod disk;
mod iscsi;
mod ledger;
mod local;
mod node;
mod page;
mod parts;
mod running;
mod socket;

pub use block::BlockDevice;
pub use local::{LocalOptions, PREFIX as LOCAL_PREFIX};
pub use page::PageOptions;
pub use parts::FrontendOptions;

use dbs_core::{Error, ErrorKind, Result};
use dbs_frontend::{ListenAddress, Reserved};
use dbs_service::log;
use dbs_service::metrics::MetricsServer;
use dbs_web::WebServer;
use iscsi::refuse_over_iscsi;
use ledger::Ledger;
use local::Locals;
use longhorn_controller::path::{BackendAddress, Path, PathOptions};
use longhorn_controller::rules::Mode;
use longhorn_controller::rules::start::{EXIT_FAILURE, StartError};
use longhorn_controller::service;
use longhorn_controller::volume::file::{BackendKind, Backends};
use longhorn_controller::volume::remote::RemoteReplicas;
use longhorn_controller::volume::{
    Controller, DataPath, Frontend, Frontends, Machine, Offer, Options, Parts, Relay,
};
use longhorn_replica::host::signals;
use longhorn_wire::control::{ControlServer, Identity};
use parts::{Data, Faults, OnPath, may_outlive};
use signal_hook::consts::SIGHUP;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// How often rates are taken, and whether the server still serves.
const SECOND: Duration = Duration::from_secs(1);
/// How long calls may take to end when the process does.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Threads of the control plane.
const CONTROL_THREADS: usize = 2;
/// Number and sector size of the backend that is none.
const NULL_REPLICA: u32 = 0;
const SECTOR_BYTES: u64 = 512;

/// How a controller is to run.
#[derive(Debug, Clone)]
pub struct Process {
    /// The volume.
    pub options: Options,
    /// Its data path.
    pub path: PathOptions,
    /// Name of the engine's instance; empty for any.
    pub instance: String,
    /// Its bytes, and those it had when it was last seen; 0 if that is not known.
    pub size: u64,
    /// See [`Process::size`].
    pub current_size: u64,
    /// The replicas to start with, `tcp://HOST:PORT`, `local:DIRECTORY` or `file://PATH`; without any it
    /// is started over gRPC.
    pub replicas: Vec<String>,
    /// The kinds that they may be of, at any time.
    pub backends: Vec<BackendKind>,
    /// Those in this process.
    pub local: LocalOptions,
    /// Instead of replicas, nothing: to measure what is in front of them.
    pub null_backend: bool,
    /// Where the replica's data server listens, if not on a port.
    pub data_socket: Option<PathBuf>,
    /// Seconds for a request of a file's transfer.
    pub http_timeout_s: i32,
    /// Where gRPC is served.
    pub listen: ListenAddress,
    /// Where metrics are served.
    pub metrics: Option<ListenAddress>,
    /// The web page.
    pub web: Option<PageOptions>,
    /// Settings of its frontend.
    pub frontends: FrontendOptions,
}

/// Why a controller ended badly.
#[derive(Debug)]
pub enum Failed {
    /// The volume did not start.
    Start(StartError),
    /// Anything else.
    Other(Error),
}

impl Failed {
    /// The exit code by which managers tell them apart.
    #[must_use]
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Start(error) => error.exit_code(),
            Self::Other(_) => EXIT_FAILURE,
        }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(error) => write!(f, "{error}"),
            Self::Other(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Failed {}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Serves a volume until a signal comes. On SIGHUP, by which Longhorn ends an engine that was upgraded,
/// the process goes without a word: the frontend is the newer one's, and so are the replicas. Nothing of it
/// stays frozen.
///
/// # Errors
/// The volume does not start, or a server ended.
pub fn run(process: &Process) -> std::result::Result<(), Failed> {
    dbs_frontend::raise_descriptors();
    let signals = signals::watch()?;
    if process.options.policy.upgrade {
        let (options, frontends) = (&process.options, &process.frontends);
        let places = (frontends.nodes.as_path(), frontends.directory());
        refuse_over_iscsi((places.0, &places.1), options.frontend.as_deref(), &options.volume)?;
    }
    let (locals, replicas) = Locals::start(&process.replicas, &process.local)?;
    let outcome = run_on(process, &locals, &replicas, &signals);
    // All that used them is gone.
    let stopped = locals.stop();
    log::info("stopped", &[("volume", &process.options.volume)]);
    outcome.and(stopped.map_err(Failed::Other))
}

/// The addresses of gRPC and metrics. They are taken before the volume starts: a port that is taken must not
/// take anything from an older controller. They are listened on when it has started: that its port opens is what
/// tells Longhorn that the volume is up.
struct Addresses {
    grpc: Taken,
    metrics: Option<Taken>,
}

/// An address; not taken yet if an older controller may have it, which ends when its device is taken over.
struct Taken {
    address: ListenAddress,
    reserved: Option<Reserved>,
}

impl Addresses {
    fn reserve(process: &Process) -> Result<Self> {
        let options = &process.options;
        let is_device = options.frontend.as_deref().is_some_and(may_outlive);
        let ends_older = options.policy.upgrade && is_device;
        let metrics = process.metrics.as_ref();
        let metrics = metrics.map(|at| Taken::reserve(at, ends_older, "serving metrics"));
        Ok(Self {
            grpc: Taken::reserve(&process.listen, ends_older, "serving gRPC")?,
            metrics: metrics.transpose()?,
        })
    }
}

impl Taken {
    fn reserve(address: &ListenAddress, ends_older: bool, doing: &'static str) -> Result<Self> {
        let reserved = match address.reserve() {
            Err(e) if ends_older && e.kind() == io::ErrorKind::AddrInUse => None,
            reserved => Some(reserved.map_err(|e| Error::io(e, doing))?),
        };
        Ok(Self { address: address.clone(), reserved })
    }

    /// Listens. If it was not the older controller's, the process ends, and leaves a device that it has taken over
    /// to the next one.
    fn listen(self, doing: &'static str) -> Result<TcpListener> {
        let waited = self.reserved.is_none();
        let listener = self.reserved.map_or_else(|| self.address.bind(), Reserved::listen);
        listener.map_err(|e| Error::io(e, doing)).inspect_err(|error| {
            if waited {
                log::error("stopping", &[("error", error), ("frontend", &"left")]);
                std::process::exit(EXIT_FAILURE);
            }
        })
    }
}

/// Serves a volume over these replicas.
fn run_on(
    process: &Process,
    locals: &Locals,
    replicas: &[String],
    signals: &mpsc::Receiver<i32>,
) -> std::result::Result<(), Failed> {
    let addresses = Addresses::reserve(process)?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .enable_all()
        .thread_name("control")
        .build()
        .map_err(|e| Error::io(e, "starting the runtime"))?;
    let relay = Arc::<Relay>::default();
    let volume = process.options.volume.clone();
    let places = process.frontends.places();
    let (ledger, frozen) = (Arc::new(Ledger::new(places.ledger(&volume))), places.frozen(&volume));
    let outlives = process.options.frontend.as_deref().is_some_and(may_outlive);
    let faults = Arc::new(Faults { relay: Arc::clone(&relay), ledger: Arc::clone(&ledger) });
    let path = Path::new(process.path.clone(), process.size, faults)
        .map_err(|e| Error::io(e, "starting the data path"))?;
    let driver = path.driver();
    let (unix, local) = (process.data_socket.clone(), locals.data());
    let backends = Backends::new(&process.backends);
    let data = Arc::new(Data {
        path: Arc::clone(&path),
        unix,
        ledger: Arc::clone(&ledger),
        outlives,
        locals: local,
        backends: backends.clone(),
    });
    let frontends = Arc::new(OnPath { path, options: process.frontends.clone(), ledger });
    let parts = Parts {
        replicas: Arc::new(
            RemoteReplicas::new(runtime.handle().clone(), volume, process.http_timeout_s)
                .with_locals(locals.control())
                .with_backends(backends),
        ),
        path: Arc::clone(&data) as Arc<dyn DataPath>,
        frontends: Arc::clone(&frontends) as Arc<dyn Frontends>,
        host: Arc::new(Machine::noting(frozen)),
    };
    let controller = Controller::new(process.options.clone(), parts, &relay);
    let alone = if process.null_backend {
        Some(start_alone(process, &data, frontends.as_ref())?)
    } else {
        controller.start(replicas, process.size, process.current_size).map_err(Failed::Start)?;
        None
    };
    let serving = (addresses, replicas, locals);
    let outcome = serve(process, serving, &runtime, &controller, driver, signals);
    if let Some(frontend) = alone {
        frontend.stop()?;
    }
    let closed = controller.shutdown();
    // A call that hangs in a replica of this process does not keep it from ending.
    runtime.shutdown_timeout(TIMEOUT);
    outcome.and(closed).map_err(Failed::Other)
}

/// Starts the frontend on a path that answers by itself.
fn start_alone(process: &Process, data: &Data, frontends: &OnPath) -> Result<Arc<dyn Frontend>> {
    data.path
        .add(NULL_REPLICA, "null", &BackendAddress::Null, Mode::Rw)
        .map_err(|e| Error::io(e, "adding the null backend"))?;
    let kind = process.options.frontend.as_deref().unwrap_or(socket::SOCKET);
    let frontend = frontends.create(kind)?;
    frontend.start(&Offer {
        volume: process.options.volume.clone(),
        size: process.size,
        sector_size: SECTOR_BYTES,
        upgrade: process.options.policy.upgrade,
    })?;
    Ok(frontend)
}

/// Serves gRPC and metrics until a signal comes or the server ends.
fn serve(
    process: &Process,
    (addresses, replicas, locals): (Addresses, &[String], &Locals),
    runtime: &Runtime,
    controller: &Arc<Controller>,
    driver: &str,
    signals: &mpsc::Receiver<i32>,
) -> Result<()> {
    let volume = &process.options.volume;
    let identity = Identity::controller(volume, &process.instance);
    let listener = addresses.grpc.listen("serving gRPC")?;
    let server = service::serve(runtime.handle(), listener, &identity, Arc::clone(controller))?;
    let metrics = start_metrics(addresses.metrics, locals, controller)?;
    let web = page::serve(process.web.as_ref(), controller, runtime.handle());
    log::info(
        "ready",
        &[
            ("volume", volume),
            ("grpc", &server.address()),
            ("replicas", &replicas.join(",")),
            (
                "metrics",
                &metrics.as_ref().map_or_else(|| "none".to_owned(), MetricsServer::address),
            ),
            ("web", &web.as_ref().map_or("none", WebServer::url)),
            ("driver", &driver),
            ("pid", &std::process::id()),
        ],
    );
    let ended = wait(controller, &server, signals);
    drop((metrics, web));
    server.stop(TIMEOUT);
    ended
}

fn start_metrics(
    address: Option<Taken>,
    locals: &Locals,
    controller: &Arc<Controller>,
) -> Result<Option<MetricsServer>> {
    let Some(address) = address else { return Ok(None) };
    let listener = address.listen("serving metrics")?;
    let (controller, locals) = (Arc::clone(controller), locals.measure());
    let collect = Arc::new(move || service::metrics_text(&controller) + &locals());
    MetricsServer::start(listener, collect).map(Some)
}

fn wait(
    controller: &Controller,
    server: &ControlServer,
    signals: &mpsc::Receiver<i32>,
) -> Result<()> {
    loop {
        match signals.recv_timeout(SECOND) {
            Ok(SIGHUP) => {
                controller.thaw();
                log::info("stopping", &[("signal", &SIGHUP), ("frontend", &"left")]);
                std::process::exit(0);
            }
            Ok(signal) => {
                log::info("stopping", &[("signal", &signal)]);
                return Ok(());
            }
            Err(RecvTimeoutError::Timeout) if server.is_running() => controller.tick(),
            Err(_) => {
                log::error("stopping", &[("error", &"a server has ended")]);
                return Err(Error::new(ErrorKind::Io, "the server of the controller has ended"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It was refused, though a block device's older controller ends before.
    #[test]
    fn a_port_of_a_controller_that_is_to_end_is_waited_for() {
        let older = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = older.local_addr().unwrap().to_string().parse().unwrap();
        assert!(Taken::reserve(&address, false, "serving gRPC").is_err());
        let taken = Taken::reserve(&address, true, "serving gRPC").unwrap();
        drop(older);
        let newer = taken.listen("serving gRPC").unwrap();
        assert_eq!(newer.local_addr().unwrap().to_string(), address.to_string());
        assert!(
            Taken::reserve(&"127.0.0.1:0".parse().unwrap(), true, "").unwrap().reserved.is_some()
        );
    }
}
