//! The process of a replica with a store of its own.

use super::file::{STORE_FILE, StoreFile, StoreOptions};
use super::guest;
use super::handover::OtherProcess;
use super::options::Options;
use super::owner::Owner;
use super::served::{Common, Served};
use super::signals;
use super::sockets::{DataSocket, SocketFile, Sockets, Wanted};
use crate::agent::ports::ReceiverPorts;
use crate::metrics;
use crate::replica::{Replica, ReplicaOptions, StoreSource, meta};
use crate::upstream::{self, Held};
use dbs_core::{Error, ErrorKind, Result, Store};
use dbs_frontend::ListenAddress;
use dbs_service::log;
use dbs_service::metrics::MetricsServer;
use longhorn_data::DataOptions;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// How long a start waits for a process of the same directory that is about to end.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two attempts.
const START_PAUSE: Duration = Duration::from_millis(50);
/// How often is looked whether all servers still serve.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// How the process is to serve.
#[derive(Debug, Clone)]
pub struct Process {
    /// The replica.
    pub options: Options,
    /// Where it listens.
    pub wanted: Wanted,
    /// Ports for receiving files, behind the sync agent's.
    pub receivers: u16,
    /// Threads for data connections.
    pub data: DataOptions,
    /// Where metrics are served.
    pub metrics: Option<ListenAddress>,
    /// Directory of control sockets.
    pub runtime_dir: PathBuf,
    /// The store.
    pub store: StoreOptions,
    /// Whether upstream's files in the directory are served at once, and how many bytes of them come into the store a second; 0
    /// for no limit.
    pub take_over: Option<u64>,
}

/// A replica with a store of its own, being served in this process.
pub struct Running {
    common: Arc<Common>,
    served: Arc<Served>,
    owner: Arc<Owner>,
    metrics: Option<MetricsServer>,
    /// Of gRPC, data and sync agent.
    addresses: [String; 3],
    _socket: Option<SocketFile>,
    /// Until the store is closed.
    _held: Held,
}

/// Serves until a signal comes.
///
/// # Errors
/// Those of starting; that a server has ended; that the store could not be closed.
pub fn run(process: &Process) -> Result<()> {
    // Before anything is opened, so that no signal ends the process in the middle of it.
    let signals = signals::watch()?;
    let running = Running::start(process)?;
    running.log_ready(&process.options);
    let ended = wait(&signals, &running.served);
    running.stop().and(ended)
}

/// Makes the directory, and checks that it is not another kind of replica's, nor about to become one.
fn prepare(process: &Process) -> Result<Held> {
    let dir = &*process.options.dir;
    fs::create_dir_all(dir).map_err(|e| Error::io(e, format!("making `{}`", dir.display())))?;
    if process.take_over.is_some() && upstream::serve::is_upstream(dir)? {
        let volume = volume_name(&process.options);
        let below = process.options.backing_file.as_deref();
        upstream::serve::begin(dir, volume, below, &process.store, &|_| Ok(()))?;
        log::info("upstream-files", &[("volume", &volume), ("state", &"served")]);
    }
    let held = Held::shared(dir)?;
    upstream::check_settled(dir)?;
    let has = |name: &str| dir.join(name).try_exists().unwrap_or(true);
    if has(upstream::TAKEN) && !has(STORE_FILE) {
        upstream::check_not_served(dir)?;
    }
    if let Err(e) = upstream::serve::remove_gone(dir) {
        log::warn("upstream-files", &[("error", &e)]);
    }
    if has(meta::VOLUME_META) && !has(STORE_FILE) {
        return Err(Error::new(
            ErrorKind::Exists,
            format!(
                "`{}` holds a replica ({}) that is not in a store of its own ({STORE_FILE}): one \
                 of upstream's, which `longhorn replica-import` takes over, and --take-over serves \
                 at once, or one that is in a shared store (--store)",
                dir.display(),
                meta::VOLUME_META
            ),
        ));
    }
    Ok(held)
}

impl Running {
    /// Serves a replica.
    ///
    /// # Errors
    /// Those of its directory, of the sockets, and of the store in it.
    pub fn start(process: &Process) -> Result<Self> {
        let options = &process.options;
        if let Some(path) = &options.backing_file {
            // Before anything is made.
            dbs_backing::file_at(path)?;
        }
        let held = prepare(process)?;
        let sockets = process.wanted.bind()?;
        let socket = match &sockets.data {
            DataSocket::Unix(_) => process.wanted.unix.as_deref().and_then(SocketFile::of),
            DataSocket::Tcp(_) => None,
        };
        let file = StoreFile::of(&options.dir, process.store.clone());
        let path = file.path.clone();
        let interval = process.data.commit_interval;
        let owner = Owner::new(file, process.runtime_dir.clone(), interval);
        let addresses = sockets.describe();
        match start_replica(process, &owner, &path, sockets) {
            Ok((common, served, metrics)) => {
                Ok(Self { common, served, owner, metrics, addresses, _socket: socket, _held: held })
            }
            Err(e) => {
                if let Err(close) = owner.end() {
                    log::error("close", &[("error", &close)]);
                }
                Err(e)
            }
        }
    }

    /// The replica.
    #[must_use]
    pub fn replica(&self) -> &Arc<Replica> {
        self.served.replica()
    }

    /// How to measure it and its store, for as long as it is there.
    pub fn measure(
        &self,
    ) -> impl Fn() -> Option<(metrics::Source, Option<Store>)> + Send + Sync + use<> {
        let (owner, served) = (Arc::clone(&self.owner), Arc::downgrade(&self.served));
        move || Some((served.upgrade()?.measure(), owner.store().ok()))
    }

    /// Where gRPC is served.
    #[must_use]
    pub fn grpc(&self) -> &str {
        &self.addresses[0]
    }

    fn log_ready(&self, options: &Options) {
        let [grpc, data, agent] = &self.addresses;
        let metrics = self.metrics.as_ref();
        let metrics = metrics.map_or_else(|| "none".to_owned(), MetricsServer::address);
        log::info(
            "ready",
            &[
                ("replica", &options.dir.display()),
                ("volume", &self.replica().volume_name()),
                ("grpc", grpc),
                ("data", data),
                ("agent", agent),
                ("metrics", &metrics),
                ("driver", &self.common.driver()),
                ("owner", &self.owner.store().is_ok()),
                ("pid", &std::process::id()),
            ],
        );
    }

    /// Ends in good order, with the store closed.
    ///
    /// # Errors
    /// Those of closing the store.
    pub fn stop(self) -> Result<()> {
        let Self { common, served, owner, metrics, _socket, _held, .. } = self;
        drop(metrics);
        served.stop();
        let closed = owner.end();
        drop(common);
        log::info("stopped", &[]);
        closed
    }
}

fn start_replica(
    process: &Process,
    owner: &Arc<Owner>,
    store_file: &Path,
    sockets: Sockets,
) -> Result<(Arc<Common>, Arc<Served>, Option<MetricsServer>)> {
    let options = &process.options;
    let source = source(owner, options)?;
    let replica = options.replica(volume_name(options), Some(store_file));
    let taken = upstream::serve::find(&options.dir, options.backing_file.as_deref())?;
    let replica = ReplicaOptions { taken, take_over: process.take_over, ..replica };
    let replica = Replica::new(replica, source)?;
    owner.serves(&replica);
    if let Some(size) = options.size {
        replica.create(size)?;
    }
    let common = Arc::new(Common::start(process.data.clone())?);
    let receivers = match sockets.receivers(process.receivers) {
        Some((first, last)) => {
            ReceiverPorts::Range(process.wanted.listen.host.clone(), first, last)
        }
        None => ReceiverPorts::Bound(Vec::new()),
    };
    let served = Served::start(&common, Arc::clone(&replica), options, sockets, receivers)?;
    let has_agent = served.has_agent();
    owner.offers(guest::offer(Arc::clone(&common), replica.clone(), has_agent));
    let served = Arc::new(served);
    let metrics = start_metrics(process, owner, &served)?;
    Ok((common, served, metrics))
}

/// The volume in the store.
fn volume_name(options: &Options) -> &str {
    if options.volume_name.is_empty() { "volume" } else { &options.volume_name }
}

/// The store of the directory, or the process that has it.
fn source(owner: &Arc<Owner>, options: &Options) -> Result<StoreSource> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let busy = match owner.open(options.size) {
            Ok(store) => return Ok(StoreSource::Own(store)),
            Err(e) if e.kind() == ErrorKind::Busy => e,
            Err(e) => return Err(e),
        };
        match OtherProcess::find(&options.dir) {
            Ok(older) => {
                log::info("predecessor", &[("replica", &options.dir.display())]);
                let owner = Arc::clone(owner);
                let open = Box::new(move || owner.open_released());
                return Ok(StoreSource::HandOver { predecessor: Box::new(older), open });
            }
            // It may be starting, or about to end.
            Err(e) if Instant::now() >= deadline => return Err(busy.context(e)),
            Err(_) => thread::sleep(START_PAUSE),
        }
    }
}

fn start_metrics(
    process: &Process,
    owner: &Arc<Owner>,
    served: &Arc<Served>,
) -> Result<Option<MetricsServer>> {
    let Some(address) = &process.metrics else { return Ok(None) };
    let listener = address.bind().map_err(|e| Error::io(e, "serving metrics"))?;
    let (owner, served) = (Arc::clone(owner), Arc::downgrade(served));
    let collect = Arc::new(move || {
        let (store, served) = (owner.store().ok(), served.upgrade());
        let replicas = served.iter().map(|served| served.measure()).collect::<Vec<_>>();
        metrics::text(store.as_ref(), &replicas, owner.released())
    });
    MetricsServer::start(listener, collect).map(Some)
}

/// Waits for a signal, or for a server to end, which is an error.
fn wait(signals: &mpsc::Receiver<i32>, served: &Served) -> Result<()> {
    loop {
        match signals.recv_timeout(WATCH_INTERVAL) {
            Ok(signal) => {
                log::info("stopping", &[("signal", &signal)]);
                return Ok(());
            }
            Err(RecvTimeoutError::Timeout) if served.is_running() => {}
            Err(_) => {
                log::error("stopping", &[("error", &"a server has ended")]);
                return Err(Error::new(ErrorKind::Io, "a server of the replica has ended"));
            }
        }
    }
}
