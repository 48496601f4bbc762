//! The server of data connections: for one replica or for thousands, a few threads.

use super::STRANGERS;
use super::gate::Gate;
use super::reactor::{Message, Reactor};
use dbs_reactor::{Remote, Thread};
use dbs_server::frontend::{Acceptor, Listen, Listener, Pool, Socket, lock};
use dbs_server::log;
use longhorn_wire::transport;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

/// Reactors by default at most: more cores are the clients' and the device's.
const REACTORS_MAX: usize = 4;

/// Limits and surroundings of a server.
#[derive(Debug, Clone)]
pub struct DataOptions {
    /// Threads that serve connections, each its share of them.
    pub reactors: usize,
    /// How they do I/O.
    pub reactor: dbs_reactor::Options,
    /// Threads that execute what may block, for all connections together.
    pub workers: usize,
    /// Connections at once; more are closed.
    pub max_connections: usize,
    /// How long a client may leave its replies unread before it is disconnected.
    pub write_timeout: Duration,
    /// How long clients may take to receive their last replies when a service ends.
    pub stop_grace: Duration,
    /// Requests of one connection in flight; beyond that it is not read from.
    pub requests_max: usize,
    /// Bytes of one connection in flight, likewise.
    pub bytes_max: u64,
    /// How often what was written is committed in the background.
    pub commit_interval: Duration,
}

impl Default for DataOptions {
    fn default() -> Self {
        Self {
            reactors: thread::available_parallelism().map_or(1, |n| n.get().min(REACTORS_MAX)),
            reactor: dbs_reactor::Options::default(),
            workers: 16,
            max_connections: 16384,
            write_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(5),
            requests_max: 1024,
            bytes_max: 64 << 20,
            commit_interval: Duration::from_secs(1),
        }
    }
}

/// What all threads of a server share.
pub(super) struct Shared {
    pub options: DataOptions,
    pub pool: Arc<Pool>,
    reactors: OnceLock<Vec<Remote<Message>>>,
    /// Connections of all services.
    pub connections: AtomicUsize,
    /// Something was written since commits were last due.
    pub written: AtomicBool,
    next_service: AtomicU64,
    next_reactor: AtomicUsize,
}

impl Shared {
    /// Hands a connection to one of the reactors in turn.
    pub fn adopt(&self, service: &Arc<Service>, socket: Socket, peer: String) {
        if self.connections.fetch_add(1, Ordering::SeqCst) >= self.options.max_connections {
            self.connections.fetch_sub(1, Ordering::SeqCst);
            let max = self.options.max_connections;
            return STRANGERS.warn("data", &[("refused", &peer), ("connections", &max)]);
        }
        let tls = match transport::data_server(&socket) {
            Ok(tls) => tls.map(Box::new),
            Err(error) => {
                self.connections.fetch_sub(1, Ordering::SeqCst);
                return STRANGERS.warn("data", &[("refused", &peer), ("error", &error)]);
            }
        };
        // Not when its reactor takes it: the replica may have been closed by then.
        let session = service.gate.session();
        // Fails only if the peer is gone already, which its reactor finds out.
        let _ = socket.tune();
        let reactors = self.reactors.get().map_or(&[][..], Vec::as_slice);
        let turn = self.next_reactor.fetch_add(1, Ordering::Relaxed);
        if let Some(reactor) = reactors.get(turn % reactors.len().max(1)) {
            let service = Arc::clone(service);
            let socket = socket.into();
            reactor.send(Message::Adopt { service, session, socket, tls, peer });
        }
    }

    /// Lets reactors commit what was written, if anything was.
    pub fn commit_due(&self) {
        if self.written.swap(false, Ordering::SeqCst) {
            self.tell(|| Message::CommitDue);
        }
    }

    fn tell(&self, message: impl Fn() -> Message) {
        self.reactors.get().into_iter().flatten().for_each(|reactor| reactor.send(message()));
    }
}

/// A replica being served.
pub(super) struct Service {
    pub id: u64,
    pub gate: Arc<Gate>,
    /// Reactors that may still have connections.
    reactors: Mutex<usize>,
    gone: Condvar,
}

impl Service {
    /// A reactor has nothing of this service any more.
    pub fn left(&self) {
        *lock(&self.reactors) -= 1;
        self.gone.notify_all();
    }

    /// Waits until all reactors have left; whether they have in this time.
    fn wait(&self, timeout: Duration) -> bool {
        let some = |left: &mut usize| *left > 0;
        let waited = self.gone.wait_timeout_while(lock(&self.reactors), timeout, some);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// A server of data connections. Dropping it, and all its services, ends it.
pub struct DataServer {
    running: Arc<Running>,
}

struct Running {
    shared: Arc<Shared>,
    acceptor: Acceptor,
    threads: Mutex<Vec<Thread<Message>>>,
}

impl DataServer {
    /// Starts the threads.
    ///
    /// # Errors
    /// They cannot be started.
    pub fn start(options: DataOptions) -> io::Result<Self> {
        let wanted = options.reactors.max(1);
        let reactor = options.reactor.clone();
        let shared = Arc::new(Shared {
            pool: Arc::new(Pool::start("data-worker", options.workers.max(1))?),
            options,
            reactors: OnceLock::new(),
            connections: AtomicUsize::new(0),
            written: AtomicBool::new(false),
            next_service: AtomicU64::new(0),
            next_reactor: AtomicUsize::new(0),
        });
        // From here on, what has been started ends when this is dropped.
        let clock = Arc::clone(&shared);
        let interval = shared.options.commit_interval;
        let running = Running {
            acceptor: Acceptor::start("data", interval, move || clock.commit_due())?,
            shared: Arc::clone(&shared),
            threads: Mutex::default(),
        };
        for index in 0..wanted {
            let shared = Arc::clone(&shared);
            let name = format!("data-reactor-{index}");
            let make = move |_: &mut _, remote| Reactor::new(shared, remote);
            lock(&running.threads).push(dbs_reactor::spawn(&name, &reactor, make)?);
        }
        let remotes = lock(&running.threads).iter().map(Thread::remote).collect();
        running.shared.reactors.get_or_init(|| remotes);
        Ok(Self { running: Arc::new(running) })
    }

    /// Name of the driver in use: `io_uring` or `epoll`.
    #[must_use]
    pub fn driver(&self) -> &'static str {
        lock(&self.running.threads).first().map_or("none", Thread::driver)
    }

    /// Serves a replica on sockets that listen already; with none, only what is handed to
    /// [`DataService::adopt`].
    ///
    /// # Errors
    /// A socket has no address.
    pub fn serve(&self, gate: Arc<Gate>, listeners: Vec<Listener>) -> io::Result<DataService> {
        let addresses = listeners.iter().map(Listener::address).collect::<io::Result<_>>()?;
        let running = Arc::clone(&self.running);
        let service = Arc::new(Service {
            id: running.shared.next_service.fetch_add(1, Ordering::Relaxed),
            gate,
            reactors: Mutex::new(lock(&running.threads).len()),
            gone: Condvar::new(),
        });
        let (shared, accepting) = (Arc::clone(&running.shared), Arc::clone(&service));
        let adopt = move |socket, peer| shared.adopt(&accepting, socket, peer);
        running.acceptor.add(service.id, listeners, adopt);
        Ok(DataService { running, service, addresses })
    }
}

impl fmt::Debug for DataServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataServer").field("driver", &self.driver()).finish_non_exhaustive()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.acceptor.stop();
        let threads = std::mem::take(&mut *lock(&self.threads));
        threads.iter().for_each(|thread| thread.remote().send(Message::End));
        threads.into_iter().for_each(Thread::join);
        self.shared.pool.stop();
    }
}

/// A replica being served. Dropping it ends that: its sockets are closed at once, requests in
/// flight are answered, and clients have [`DataOptions::stop_grace`] to take the last replies.
pub struct DataService {
    running: Arc<Running>,
    service: Arc<Service>,
    addresses: Vec<Listen>,
}

impl DataService {
    /// The addresses listened on, with the ports the system chose.
    #[must_use]
    pub fn addresses(&self) -> &[Listen] {
        &self.addresses
    }

    /// Serves a connection that was accepted elsewhere.
    pub fn adopt(&self, socket: Socket, peer: &str) {
        self.running.shared.adopt(&self.service, socket, peer.to_owned());
    }

    /// The gate.
    #[must_use]
    pub fn gate(&self) -> &Arc<Gate> {
        &self.service.gate
    }

    /// Ends the service, as dropping it does.
    pub fn stop(self) {}
}

impl fmt::Debug for DataService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataService").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl Drop for DataService {
    fn drop(&mut self) {
        let Running { shared, acceptor, .. } = &*self.running;
        acceptor.remove(self.service.id);
        let leave = |at_once| Message::Leave { service: Arc::clone(&self.service), at_once };
        shared.tell(|| leave(false));
        if !self.service.wait(shared.options.stop_grace) {
            shared.tell(|| leave(true));
            // Requests end, however long they take: the store's file must not be used after this.
            while !self.service.wait(Duration::from_secs(60)) {
                log::warn("data", &[("waiting", &"requests in flight do not end")]);
            }
        }
    }
}
