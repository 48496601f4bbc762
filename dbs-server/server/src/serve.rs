//! Serving a store: its control socket, its NBD listeners and its housekeeping, from start to a
//! clean end.

use crate::asked::{Asked, Findings, Kept};
use crate::clients::{self, Doors};
use crate::jobs::Jobs;
use crate::machines;
use crate::top::{Started, Top};
use crate::used::Used;
use dbs_control::api::{self, Progress, Request};
use dbs_control::{Extra, Service, Session, socket_path};
use dbs_core::{Error, ErrorKind, IoDriver, OpenOptions, Result, Store};
use dbs_frontend::DiskOptions;
use dbs_nbd::{
    ExportRules, Listen, Listener, ServerHandle, ServerOptions, StoreExports, TlsConfig,
};
pub use dbs_nvme::NvmeOptions;
use dbs_nvme::NvmeTcp;
use dbs_service::{log, privileges};
use dbs_ublk::{AttachOptions, Devices};
use dbs_vhost::VhostUser;
use serde_json::Value;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a piece of background work goes on at least.
const WORK_TIME: Duration = Duration::from_millis(4);
/// Shortest rest between two pieces of background work: a request that comes shows in it.
const WORK_PAUSE_MIN: Duration = Duration::from_millis(1);
/// Rest of background work after it failed.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// What to serve and where.
pub struct ServeOptions {
    /// The store.
    pub store: PathBuf,
    /// How to open it.
    pub open: OpenOptions,
    /// Where to listen for NBD clients; may be empty.
    pub nbd: Vec<Listen>,
    /// Sockets that listen for NBD clients already: those of whoever started this process.
    pub inherited: Vec<OwnedFd>,
    /// Which volumes NBD clients are shown, and which only for reading.
    pub exports: ExportRules,
    /// Directory for sockets that virtual machines connect to, one for each volume and snapshot.
    pub vhost_user: Option<PathBuf>,
    /// Where hosts of NVMe over TCP come in, if anywhere, and which.
    pub nvme: NvmeOptions,
    /// TLS for NBD over TCP and unix sockets.
    pub tls: Option<TlsConfig>,
    /// Threads that serve connections; `None` for as many as suit the machine.
    pub reactors: Option<usize>,
    /// How long they look for the next event before they sleep.
    pub spin: Duration,
    /// Threads that execute NBD requests which have to wait.
    pub workers: usize,
    /// Directory for the control socket that every command looks for.
    pub runtime_dir: PathBuf,
    /// A further control socket.
    pub control: Option<PathBuf>,
    /// Who may use the control sockets.
    pub access: dbs_control::Access,
    /// How long a metadata change may stay uncommitted without a flush.
    pub commit_interval: Duration,
}

impl ServeOptions {
    /// How threads that serve connections do I/O.
    #[must_use]
    pub fn reactor(&self) -> dbs_reactor::Options {
        let driver = reactor_driver(&self.open);
        let defaults = dbs_reactor::Options::default();
        dbs_reactor::Options { driver, spin: self.spin, ..defaults }
    }
}

/// What a program that serves a store adds to it.
pub trait Extension: Send + Sync {
    /// Runs a command that came over the control socket with `run`, or refuses it.
    ///
    /// # Errors
    /// Those of `run`, or why it may not run now.
    fn command(&self, request: &Request, run: &mut dyn FnMut() -> Result<Value>) -> Result<Value>;

    /// As [`Service::extra`].
    ///
    /// # Errors
    /// As [`Service::extra`].
    fn extra(&self, method: &str, params: &Value) -> Result<Option<Extra>>;

    /// Ends what it does with the store, which is closed next.
    fn stop(&self);
}

/// Makes the extension of a store that was opened.
pub type Extend<'a> = &'a dyn Fn(&Store) -> Result<Arc<dyn Extension>>;

/// A store being served.
pub struct Serving {
    store: Store,
    control: Vec<dbs_control::Server>,
    service: Arc<StoreService>,
    nbd: Arc<ServerHandle>,
    vhost: Option<Arc<VhostUser>>,
    nvme: Option<Arc<NvmeTcp>>,
    devices: Arc<Devices>,
    housekeeping: Housekeeping,
    extension: Option<Arc<dyn Extension>>,
}

impl Serving {
    /// Opens the store and starts everything; returns when clients can connect.
    ///
    /// # Errors
    /// Those of opening the store and of listening.
    pub fn start(options: &ServeOptions) -> Result<Self> {
        Self::start_with(options, None)
    }

    /// As [`Serving::start`], with an extension.
    ///
    /// # Errors
    /// As [`Serving::start`], and those of `extend`.
    pub fn start_with(options: &ServeOptions, extend: Option<Extend<'_>>) -> Result<Self> {
        // Before there are other threads, the store's among them.
        dbs_ublk::serve_devices_from_here();
        dbs_frontend::raise_descriptors();
        if options.open.secret.is_some() || options.nvme.keys.is_some() {
            privileges::hide_memory()?;
        }
        let store = Store::open(&options.store, &options.open)?;
        match Self::start_on(store.clone(), options, extend) {
            Ok(serving) => Ok(serving),
            Err(e) => {
                if let Err(close) = store.close() {
                    log::error("close", &[("error", &close)]);
                }
                Err(e)
            }
        }
    }

    fn start_on(store: Store, options: &ServeOptions, extend: Option<Extend<'_>>) -> Result<Self> {
        let extension = extend.map(|extend| extend(&store)).transpose()?;
        let devices = Arc::new(Devices::new(
            store.clone(),
            &options.store,
            &options.runtime_dir,
            options.reactor(),
            options.workers,
        ));
        // Before anybody can be a client. Their users have waited since the last server ended.
        devices.hold_left_over();
        let exports = StoreExports::new(store.clone(), options.open.read_only);
        let exports = exports.with_rules(options.exports.clone());
        let filling = Arc::new(exports.to_fill());
        let exports = Arc::new(exports);
        let defaults = ServerOptions::default();
        let server_options = ServerOptions {
            reactors: options.reactors.unwrap_or(defaults.reactors),
            reactor: options.reactor(),
            workers: options.workers,
            tls: options.tls.clone(),
            log: Some(Arc::new(|line: &str| log::warn("nbd", &[("message", &line)]))),
            ..defaults
        };
        let nbd = listeners(options)
            .and_then(|listeners| dbs_nbd::start_listening(listeners, exports, server_options))
            .map_err(|e| Error::io(e, "starting the NBD server"))?;
        let nbd = Arc::new(nbd);
        let vhost = serve_machines(&store, options, &nbd)?;
        let nvme = serve_hosts(&store, options, &nbd)?;
        let service = Arc::new(StoreService {
            store: store.clone(),
            nbd: Arc::clone(&nbd),
            vhost: vhost.clone(),
            nvme: nvme.clone(),
            filling,
            devices: Arc::clone(&devices),
            extension: extension.clone(),
            started: Started::now(),
            jobs: Arc::default(),
            found: Kept::default(),
            notices: Mutex::default(),
        });
        let interval = (!options.open.read_only).then_some(options.commit_interval);
        let housekeeping = Housekeeping::start(store.clone(), interval)?;
        // Before anybody asks for anything.
        let begun = devices.recover().and_then(|()| open_control(options, &service));
        match begun {
            Ok(control) => Ok(Self {
                store,
                control,
                service,
                nbd,
                vhost,
                nvme,
                devices,
                housekeeping,
                extension,
            }),
            Err(e) => {
                devices.leave();
                housekeeping.stop();
                Err(e)
            }
        }
    }

    /// The control sockets.
    pub fn control(&self) -> impl Iterator<Item = &std::path::Path> {
        self.control.iter().map(dbs_control::Server::path)
    }

    /// Where NBD clients can connect.
    #[must_use]
    pub fn nbd(&self) -> &[Listen] {
        self.nbd.addresses()
    }

    /// Where the sockets are that virtual machines connect to, if there are any.
    #[must_use]
    pub fn vhost_user(&self) -> Option<&std::path::Path> {
        self.vhost.as_deref().map(VhostUser::path)
    }

    /// Where hosts of NVMe over TCP can connect.
    #[must_use]
    pub fn nvme(&self) -> &[Listen] {
        self.nvme.as_deref().map_or(&[], NvmeTcp::addresses)
    }

    /// Runs a command, as if it came over the control socket.
    ///
    /// # Errors
    /// The command's.
    pub fn execute(&self, request: &Request) -> Result<Value> {
        self.service.execute(request, &mut |_| true)
    }

    /// What answers questions about it, until the server is stopped.
    #[must_use]
    pub fn asked(&self) -> Arc<dyn Asked> {
        Arc::clone(&self.service) as Arc<dyn Asked>
    }

    /// The long commands that run, to which its user may add other things.
    #[must_use]
    pub fn jobs(&self) -> Arc<Jobs> {
        Arc::clone(&self.service.jobs)
    }

    /// Says of what is not as its user wants it, and does not keep the store from being served: in the log, and as
    /// a warning of the store to who asks for them.
    pub fn notice(&self, text: String) {
        self.service.notice(text);
    }

    /// The block devices of its volumes.
    #[must_use]
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Whether nobody uses the store: no block device, no NBD client, no virtual machine, no host, no
    /// command.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        // The commands first: one may become an NBD client, or leave a device behind.
        self.control.iter().all(dbs_control::Server::is_idle)
            && self.nbd.clients().is_empty()
            && self.vhost.as_ref().is_none_or(|vhost| vhost.clients().is_empty())
            && self.nvme.as_ref().is_none_or(|nvme| nvme.clients().is_empty())
            && self.devices.is_idle()
    }

    /// The store being served.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Why nothing can be written any more before the store is opened again, if that is so: a flush or a write of
    /// metadata has failed.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.housekeeping.failure()
    }

    /// Ends everything in good order: no new clients, requests in flight finish, the store is
    /// committed and closed. Users of block devices wait for the next server.
    pub fn stop(self) -> Result<()> {
        self.control.into_iter().for_each(dbs_control::Server::stop);
        if let Some(extension) = self.extension {
            extension.stop();
        }
        self.devices.leave();
        self.vhost.iter().for_each(|vhost| vhost.stop());
        self.nvme.iter().for_each(|nvme| nvme.stop());
        drop(self.service);
        // Whoever still has it: its clients see it end before the store is closed.
        self.nbd.end();
        self.housekeeping.stop();
        self.store.close()
    }
}

/// Makes the sockets for virtual machines, if there are to be any.
fn serve_machines(
    store: &Store,
    options: &ServeOptions,
    nbd: &Arc<ServerHandle>,
) -> Result<Option<Arc<VhostUser>>> {
    let Some(directory) = options.vhost_user.clone() else { return Ok(None) };
    let started = VhostUser::start(store.clone(), directory, disk_options(options, nbd))?;
    Ok(Some(Arc::new(started)))
}

/// Listens for hosts of NVMe over TCP, if it is to.
fn serve_hosts(
    store: &Store,
    options: &ServeOptions,
    nbd: &Arc<ServerHandle>,
) -> Result<Option<Arc<NvmeTcp>>> {
    if options.nvme.listen.is_empty() {
        return Ok(None);
    }
    let started = NvmeTcp::start(store.clone(), &options.nvme, disk_options(options, nbd))?;
    Ok(Some(Arc::new(started)))
}

/// How volumes are served as disks.
fn disk_options(options: &ServeOptions, nbd: &Arc<ServerHandle>) -> DiskOptions {
    DiskOptions {
        reactors: options.reactors.unwrap_or(ServerOptions::default().reactors),
        reactor: options.reactor(),
        workers: options.workers,
        access: machines::access(options.exports.clone()),
        number: machines::numbers(nbd),
        read_only: options.open.read_only,
    }
}

/// Where NBD clients come in.
fn listeners(options: &ServeOptions) -> io::Result<Vec<Listener>> {
    let inherited = options.inherited.iter().map(|socket| Listener::from_fd(socket.try_clone()?));
    inherited.chain(options.nbd.iter().map(Listener::bind)).collect()
}

/// Opens all control sockets, or none.
fn open_control(
    options: &ServeOptions,
    service: &Arc<StoreService>,
) -> Result<Vec<dbs_control::Server>> {
    let default = socket_path(&options.runtime_dir, &service.key()?);
    let first = dbs_control::Server::start_for(&default, service.clone(), &options.access)?;
    let Some(path) = &options.control else { return Ok(vec![first]) };
    match dbs_control::Server::start_named(path, service.clone(), &options.access) {
        Ok(second) => Ok(vec![first, second]),
        Err(e) => {
            first.stop();
            Err(e)
        }
    }
}

/// Who asks for plain reads and writes of the store gets them for sockets, too.
fn reactor_driver(open: &OpenOptions) -> dbs_reactor::Driver {
    match open.driver {
        IoDriver::Auto => dbs_reactor::Driver::Auto,
        IoDriver::Uring => dbs_reactor::Driver::Uring,
        IoDriver::Pread => dbs_reactor::Driver::Epoll,
    }
}

/// What the control socket offers.
struct StoreService {
    store: Store,
    nbd: Arc<ServerHandle>,
    vhost: Option<Arc<VhostUser>>,
    nvme: Option<Arc<NvmeTcp>>,
    /// What connections that fill a volume may open.
    filling: Arc<StoreExports>,
    devices: Arc<Devices>,
    extension: Option<Arc<dyn Extension>>,
    /// Since when its counts count.
    started: Started,
    jobs: Arc<Jobs>,
    /// By the last check and scrub.
    found: Kept,
    /// What is not as its user wants it, and does not keep the store from being served.
    notices: Mutex<Vec<String>>,
}

impl StoreService {
    fn notices(&self) -> MutexGuard<'_, Vec<String>> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn doors(&self) -> Doors<'_> {
        Doors { nbd: &self.nbd, vhost: self.vhost.as_deref(), nvme: self.nvme.as_deref() }
    }

    /// Runs a command on the store or on its devices.
    fn run(&self, request: &Request, progress: &mut dyn FnMut(Progress) -> bool) -> Result<Value> {
        match request {
            Request::DeviceAttach { volume, snapshot, queues, depth, read_only, id } => {
                let defaults = AttachOptions::default();
                let options = AttachOptions {
                    queues: queues.unwrap_or(defaults.queues),
                    depth: depth.unwrap_or(defaults.depth),
                    read_only: *read_only,
                    id: *id,
                };
                encode(&self.devices.attach(volume, snapshot.as_deref(), &options)?)
            }
            Request::DeviceDetach { target } => encode(&self.devices.detach(target)?),
            Request::DeviceList => encode(&self.devices.list()),
            Request::Top => encode(&self.top()),
            Request::Info => {
                let mut info = self.store.info();
                info.warnings.extend(self.notices().iter().cloned());
                encode(&info)
            }
            Request::ClientList { interval_ms } => {
                let interval = interval_ms.map(Duration::from_millis);
                encode(&clients::list(&self.store, self.doors(), interval, progress)?)
            }
            Request::ClientKick { client } => {
                let kicked = clients::kick(&self.store, self.doors(), *client)?;
                log::info("kicked", &[("client", &kicked.who)]);
                encode(&kicked)
            }
            _ => {
                let settled = self.devices.settle_before(request);
                let executed = execute_logged(&self.store, request, progress);
                // One that failed half way has changed something, too.
                if request.writes() {
                    self.vhost.iter().for_each(|vhost| vhost.follow());
                    self.nvme.iter().for_each(|nvme| nvme.follow());
                }
                let mut value = executed?;
                self.found.note(request, &value);
                self.devices.follow(request, settled);
                if let Request::VolumeUnlock { .. } = request {
                    self.devices.recover_left()?;
                }
                if let Request::VolumeResize { volume, .. } = request
                    && let Some(size) = self.devices.size(volume)
                {
                    // Not every kernel lets it follow.
                    value["device_size"] = size.into();
                }
                Ok(value)
            }
        }
    }
}

impl Asked for StoreService {
    fn store(&self) -> &Store {
        &self.store
    }

    fn top(&self) -> Top {
        let clients = clients::loads(&self.store, self.doors());
        Top::now(&self.store, self.started, clients, self.devices.list(), self.jobs.list())
    }

    fn notice(&self, text: String) {
        log::error("serve", &[("error", &text)]);
        self.notices().push(text);
    }

    fn findings(&self) -> Findings {
        self.found.list()
    }

    fn command(&self, request: &Request, go_on: &mut dyn FnMut() -> bool) -> Result<Value> {
        self.execute(request, &mut |_| go_on())
    }
}

/// What a store in a file or on a device has.
///
/// # Errors
/// `Unsupported` if it is on something else.
pub fn key_of(store: &Store) -> Result<String> {
    store.key().ok_or_else(|| Error::unsupported("a store that is neither file nor device"))
}

impl Service for StoreService {
    fn key(&self) -> Result<String> {
        key_of(&self.store)
    }

    fn execute(
        &self,
        request: &Request,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Value> {
        let mut run =
            || self.jobs.watched(request, progress, |progress| self.run(request, progress));
        match &self.extension {
            Some(extension) => extension.command(request, &mut run),
            None => run(),
        }
    }

    fn list(
        &self,
        request: &Request,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<()> {
        let mut run = || {
            self.jobs.watched(request, progress, |progress| {
                api::list(&self.store, request, out, progress).map(|()| Value::Null)
            })
        };
        let done = match &self.extension {
            Some(extension) => extension.command(request, &mut run),
            None => run(),
        };
        done.map(drop)
    }

    fn dump(&self, out: &mut dyn Write) -> Result<()> {
        self.store.dump(out)
    }

    fn nbd(&self, stream: UnixStream) {
        log_failure(self.nbd.adopt(stream));
    }

    fn fill(&self) -> Result<Session> {
        let (nbd, filling) = (Arc::clone(&self.nbd), Arc::clone(&self.filling));
        Ok(Box::new(move |stream| log_failure(nbd.adopt_for(stream, filling))))
    }

    fn stored(&self, fill: bool) -> Result<Session> {
        let (nbd, exports) = (Arc::clone(&self.nbd), Arc::new(self.filling.as_stored(fill)));
        Ok(Box::new(move |stream| log_failure(nbd.adopt_for(stream, exports))))
    }

    fn extra(&self, method: &str, params: &Value) -> Result<Option<Extra>> {
        self.extension.as_ref().map_or(Ok(None), |extension| extension.extra(method, params))
    }
}

fn log_failure(adopted: io::Result<()>) {
    if let Err(e) = adopted {
        log::warn("nbd", &[("error", &e)]);
    }
}

/// Runs a command on a store, and logs it if it changes something.
///
/// # Errors
/// The command's.
pub fn execute_logged(
    store: &Store,
    request: &Request,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Value> {
    // It leaves a key with this process.
    if request.has_secret() {
        privileges::hide_memory()?;
    }
    let begun = Instant::now();
    let result = api::execute(store, request, progress);
    if request.writes() {
        let took = format!("{:.3}", begun.elapsed().as_secs_f64());
        match &result {
            Ok(_) => log::info("command", &[("request", &request.for_log()), ("seconds", &took)]),
            Err(e) => log::warn("command", &[("request", &request.for_log()), ("error", e)]),
        }
    }
    result
}

fn encode(value: &impl serde::Serialize) -> Result<Value> {
    serde_json::to_value(value).map_err(|e| Error::invalid(format!("encoding a result: {e}")))
}

/// What else housekeeping does in each round, at least once in an interval.
pub type Chore = Arc<dyn Fn() + Send + Sync>;

/// The thread that commits what nobody flushed and does background work in small steps.
pub struct Housekeeping {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Stop {
    asked: Mutex<bool>,
    changed: Condvar,
    /// Why nothing can be written any more.
    failed: OnceLock<String>,
}

impl Stop {
    /// Waits so long, or until asked to stop; says whether it was.
    fn wait(&self, pause: Duration) -> bool {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(asked, pause, |asked| !*asked);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn ask(&self) {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }
}

impl Housekeeping {
    /// Keeps house from now on. With no interval there is nothing to keep: the store is read-only.
    ///
    /// # Errors
    /// `Io` if there is no thread for it.
    pub fn start(store: Store, interval: Option<Duration>) -> Result<Self> {
        Self::start_with(store, interval, None)
    }

    /// As [`Housekeeping::start`], with something else to do.
    ///
    /// # Errors
    /// As [`Housekeeping::start`].
    pub fn start_with(
        store: Store,
        interval: Option<Duration>,
        chore: Option<Chore>,
    ) -> Result<Self> {
        let stop = Arc::new(Stop::default());
        let Some(interval) = interval else { return Ok(Self { stop, thread: None }) };
        let thread = {
            let stop = Arc::clone(&stop);
            thread::Builder::new()
                .name("dbs-housekeeping".to_owned())
                .spawn(move || {
                    let kept = || keep(&store, interval, chore.as_ref(), &stop);
                    if catch_unwind(AssertUnwindSafe(kept)).is_err() {
                        let text = "housekeeping has panicked: nothing is committed any more that nobody flushes";
                        stop.failed.get_or_init(|| text.to_owned());
                        log::error("housekeeping", &[("error", &text)]);
                    }
                })
                .map_err(|e| Error::io(e, "starting the housekeeping thread"))?
        };
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Why nothing can be written any more before the store is opened again, if that is so.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.stop.failed.get().map(String::as_str)
    }

    /// Ends it; returns when it has ended.
    pub fn stop(self) {
        self.stop.ask();
        let _ended = self.thread.map(JoinHandle::join);
    }
}

/// What housekeeping remembers from round to round.
struct Past {
    committed: Instant,
    /// Requests that the store had seen when the last work was done.
    requests: u64,
    /// When work has failed: it is let be for a while, and what was written is committed all the same.
    failed: Option<Instant>,
}

fn keep(store: &Store, interval: Duration, chore: Option<&Chore>, stop: &Stop) {
    let mut pause = interval;
    let mut used = Used::default();
    let mut past = Past { committed: Instant::now(), requests: 0, failed: None };
    let mut failure = String::new();
    while !stop.wait(pause) {
        if let Some(chore) = chore {
            chore();
        }
        used.look(store.requests(), dbs_reactor::give_memory_back);
        pause = match step(store, interval, &mut past) {
            Ok(pause) => {
                if past.failed.is_none() {
                    failure.clear();
                }
                pause
            }
            Err(e) => {
                if matches!(e.kind(), ErrorKind::Poisoned | ErrorKind::Elsewhere) {
                    stop.failed.get_or_init(|| e.to_string());
                }
                // Once, and not each time it fails in the same way.
                if failure != e.to_string() {
                    failure = e.to_string();
                    log::error("housekeeping", &[("error", &failure)]);
                }
                past.failed = Some(Instant::now());
                interval
            }
        };
    }
}

/// One round; returns the rest before the next. While requests come in, background work takes at
/// most a fifth of the time; alone it hardly rests.
fn step(store: &Store, interval: Duration, past: &mut Past) -> Result<Duration> {
    if past.committed.elapsed() >= interval {
        store.settle()?;
        store.settle_checksums()?;
        past.committed = Instant::now();
    }
    if past.failed.is_some_and(|at| at.elapsed() < RETRY_PAUSE) {
        return Ok(interval);
    }
    let begun = Instant::now();
    let more = store.work_for(WORK_TIME)?;
    past.failed = None;
    if !more {
        return Ok(interval);
    }
    // Since the last round: its rest counts, too.
    if store.requests() == std::mem::replace(&mut past.requests, store.requests()) {
        return Ok(WORK_PAUSE_MIN);
    }
    Ok((begun.elapsed() * 4).clamp(WORK_PAUSE_MIN, interval.max(WORK_PAUSE_MIN)))
}
