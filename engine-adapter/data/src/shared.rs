//! What the threads of a server share, and what they tell each other.

use super::STRANGERS;
use super::gate::Gate;
use super::runner::Told;
use dbs_frontend::tls::TlsStream;
use dbs_frontend::{Pool, Socket, lock};
use dbs_reactor::Remote;
use longhorn_wire::transport;
use std::os::fd::OwnedFd;
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
    pub reactors: OnceLock<Vec<Remote<Message>>>,
    /// Connections of all services.
    pub connections: AtomicUsize,
    /// Something was written since commits were last due.
    pub written: AtomicBool,
    pub next_service: AtomicU64,
    pub next_reactor: AtomicUsize,
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

    /// Tells all reactors.
    pub fn tell(&self, message: impl Fn() -> Message) {
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
    /// A service that so many reactors may have connections of.
    pub fn new(id: u64, gate: Arc<Gate>, reactors: usize) -> Self {
        Self { id, gate, reactors: Mutex::new(reactors), gone: Condvar::new() }
    }

    /// A reactor has nothing of this service any more.
    pub fn left(&self) {
        *lock(&self.reactors) -= 1;
        self.gone.notify_all();
    }

    /// Waits until all reactors have left; whether they have in this time.
    pub fn wait(&self, timeout: Duration) -> bool {
        let some = |left: &mut usize| *left > 0;
        let waited = self.gone.wait_timeout_while(lock(&self.reactors), timeout, some);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// What other threads tell a reactor.
pub(super) enum Message {
    /// A connection to a replica.
    Adopt {
        service: Arc<Service>,
        session: u64,
        socket: OwnedFd,
        /// At its start, if the client must use it.
        tls: Option<Box<TlsStream>>,
        peer: String,
    },
    /// Something about requests; whose each is says the number of its connection.
    Told(Told<u32>),
    /// A client has connected anew to the service of this name: its former connections end.
    Renewed(u64),
    /// Commit what has been written.
    CommitDue,
    /// The service ends: with its connections answered, or at once.
    Leave { service: Arc<Service>, at_once: bool },
    /// There is nothing left to serve.
    End,
}
