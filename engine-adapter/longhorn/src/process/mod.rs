//! The process of a controller: `longhorn controller`.

mod device;
mod ledger;
mod local;
mod parts;

pub use local::{LocalOptions, PREFIX as LOCAL_PREFIX};
pub use parts::FrontendOptions;

use dbs_core::{Error, ErrorKind, Result};
use dbs_frontend::ListenAddress;
use dbs_service::log;
use dbs_service::metrics::MetricsServer;
use device::is_device;
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
use parts::{Data, Faults, OnPath};
use signal_hook::consts::SIGHUP;
use std::fmt;
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
/// the process goes without a word: the frontend is the newer one's, and so are the replicas.
///
/// # Errors
/// The volume does not start, or a server ended.
pub fn run(process: &Process) -> std::result::Result<(), Failed> {
    let signals = signals::watch()?;
    let (locals, replicas) = Locals::start(&process.replicas, &process.local)?;
    let outcome = run_on(process, &locals, &replicas, &signals);
    // All that used them is gone.
    let stopped = locals.stop();
    log::info("stopped", &[("volume", &process.options.volume)]);
    outcome.and(stopped.map_err(Failed::Other))
}

/// Serves a volume over these replicas.
fn run_on(
    process: &Process,
    locals: &Locals,
    replicas: &[String],
    signals: &mpsc::Receiver<i32>,
) -> std::result::Result<(), Failed> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .enable_all()
        .thread_name("control")
        .build()
        .map_err(|e| Error::io(e, "starting the runtime"))?;
    let relay = Arc::<Relay>::default();
    let volume = process.options.volume.clone();
    let ledger = Arc::new(Ledger::new(process.frontends.places().ledger(&volume)));
    if !process.options.frontend.as_deref().is_some_and(is_device) {
        // What is done to the volume from here on, nobody tells a device that waits for a controller.
        ledger.end();
    }
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
        host: Arc::new(Machine::default()),
    };
    let controller = Controller::new(process.options.clone(), parts, &relay);
    let alone = if process.null_backend {
        Some(start_alone(process, &data, frontends.as_ref())?)
    } else {
        controller.start(replicas, process.size, process.current_size).map_err(Failed::Start)?;
        None
    };
    let outcome = serve(process, (replicas, locals), &runtime, &controller, driver, signals);
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
    let kind = process.options.frontend.as_deref().unwrap_or(parts::SOCKET);
    let frontend = frontends.create(kind)?;
    frontend.start(&Offer {
        volume: process.options.volume.clone(),
        size: process.size,
        sector_size: SECTOR_BYTES,
        upgrade: process.options.policy.upgrade,
    })?;
    Ok(frontend)
}

/// Serves gRPC and metrics until a signal comes or the server ends. That its port opens is what tells
/// Longhorn that the volume is up.
fn serve(
    process: &Process,
    (replicas, locals): (&[String], &Locals),
    runtime: &Runtime,
    controller: &Arc<Controller>,
    driver: &str,
    signals: &mpsc::Receiver<i32>,
) -> Result<()> {
    let volume = &process.options.volume;
    let identity = Identity::controller(volume, &process.instance);
    let listener = process.listen.bind().map_err(|e| Error::io(e, "serving gRPC"))?;
    let server = service::serve(runtime.handle(), listener, &identity, Arc::clone(controller))?;
    let metrics = start_metrics(process, locals, controller)?;
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
            ("driver", &driver),
            ("pid", &std::process::id()),
        ],
    );
    let ended = wait(controller, &server, signals);
    drop(metrics);
    server.stop(TIMEOUT);
    ended
}

fn start_metrics(
    process: &Process,
    locals: &Locals,
    controller: &Arc<Controller>,
) -> Result<Option<MetricsServer>> {
    let Some(address) = &process.metrics else { return Ok(None) };
    let listener = address.bind().map_err(|e| Error::io(e, "serving metrics"))?;
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
