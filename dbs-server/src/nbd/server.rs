//! The server: one thread that accepts, one for each handshake that runs, reactors for the
//! connections behind it, and a pool of workers for what may block.

use super::connection::Connection;
use super::export::{Exports, Peer};
use super::handshake::Handshake;
use super::known::{ClientInfo, Known};
use super::session::Session;
use super::transmission::{Adopted, Message, Transmission};
use super::wire::rep;
use crate::frontend::tls::TlsConfig;
use crate::frontend::{Listen, Listener, Pool, Socket, Storage, lock, wait_while};
use dbs_reactor::{Io, Remote, Thread};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Connections beyond the maximum that are told so; more are closed at once.
const REFUSALS_MAX: usize = 64;
/// Reactors by default at most: more cores are the clients' and the device's.
const REACTORS_MAX: usize = 4;
/// How long a refused client may take.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// How long whoever disconnects a client waits until it is gone.
const KICK_PATIENCE: Duration = Duration::from_secs(10);
/// Rest after an accept that failed, for lack of descriptors mostly.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Where the server tells what an operator may want to know.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// Limits and surroundings of a server.
#[derive(Clone)]
pub struct ServerOptions {
    /// Threads that serve connections, each its share of them.
    pub reactors: usize,
    /// How they do I/O.
    pub reactor: dbs_reactor::Options,
    /// Threads that execute what may block, for all connections together.
    pub workers: usize,
    /// Connections at once; more are refused.
    pub max_connections: usize,
    /// Time for each step of a handshake; where TLS must be, for all up to its start.
    pub handshake_timeout: Duration,
    /// How long a client may leave its replies unread before it is disconnected.
    pub write_timeout: Duration,
    /// How long clients may take to receive their last replies when the server stops.
    pub stop_grace: Duration,
    /// Requests of one connection in flight; beyond that it is not read from.
    pub requests_max: usize,
    /// Bytes of one connection in flight, likewise.
    pub bytes_max: u64,
    /// With it, clients must use TLS (handed-over connections need not).
    pub tls: Option<TlsConfig>,
    /// Receives one line for each thing that went wrong.
    pub log: Option<Log>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            reactors: thread::available_parallelism().map_or(1, |n| n.get().min(REACTORS_MAX)),
            reactor: dbs_reactor::Options::default(),
            workers: 16,
            max_connections: 1024,
            handshake_timeout: Duration::from_secs(10),
            write_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(5),
            requests_max: 1024,
            bytes_max: 64 << 20,
            tls: None,
            log: None,
        }
    }
}

impl fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerOptions")
            .field("reactors", &self.reactors)
            .field("workers", &self.workers)
            .field("max_connections", &self.max_connections)
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}

/// Starts serving `exports` on `addresses`; with none, only what is handed over by
/// [`ServerHandle::adopt`].
///
/// # Errors
/// An address that cannot be listened on, by name, or threads that cannot be started.
pub fn start(
    addresses: &[Listen],
    exports: Arc<dyn Exports>,
    options: ServerOptions,
) -> io::Result<ServerHandle> {
    let pool = Pool::start("nbd-worker", options.workers.max(1))?;
    let shared = Shared::new(exports, options, pool);
    let (mut handle, listening) = ServerHandle::new(&shared, addresses)?;
    let wanted = 0..shared.options.reactors.max(1);
    let started: Vec<_> = wanted.map(|index| start_reactor(&shared, index)).collect();
    let (started, failed): (Vec<_>, Vec<_>) = started.into_iter().partition(Result::is_ok);
    handle.reactors = started.into_iter().flatten().collect();
    let deliver = |thread: &Thread<Message>| -> Deliver {
        let remote = thread.remote();
        Box::new(move |message| remote.send(message))
    };
    let reactors = handle.reactors.iter().map(deliver).collect();
    shared.reactors.get_or_init(|| reactors);
    if let Some(Err(error)) = failed.into_iter().next() {
        return Err(error);
    }
    handle.accept(listening)?;
    Ok(handle)
}

/// Starts serving on reactors of somebody else, which end later: see [`Carried`](super::Carried).
pub(super) fn start_on(
    reactors: Vec<Deliver>,
    shared: &Arc<Shared>,
    addresses: &[Listen],
) -> io::Result<ServerHandle> {
    let (mut handle, listening) = ServerHandle::new(shared, addresses)?;
    shared.reactors.get_or_init(|| reactors);
    handle.accept(listening)?;
    Ok(handle)
}

fn start_reactor(shared: &Arc<Shared>, index: usize) -> io::Result<Thread<Message>> {
    let options = &shared.options.reactor;
    let shared = Arc::clone(shared);
    let name = format!("nbd-reactor-{index}");
    dbs_reactor::spawn(&name, options, move |io, remote| shared.transmission(io, remote))
}

/// Where connections come in, and what wakes who waits for them.
type Listening = (Vec<Listener>, UnixStream);

/// A running server. Dropping it stops it.
pub struct ServerHandle {
    shared: Arc<Shared>,
    addresses: Vec<Listen>,
    acceptor: Option<JoinHandle<()>>,
    reactors: Vec<Thread<Message>>,
    wake: UnixStream,
}

impl ServerHandle {
    /// A server that listens, and nobody accepts yet.
    fn new(shared: &Arc<Shared>, addresses: &[Listen]) -> io::Result<(Self, Listening)> {
        let listeners = addresses.iter().map(Listener::bind).collect::<io::Result<Vec<_>>>()?;
        let addresses = listeners.iter().map(Listener::address).collect::<io::Result<Vec<_>>>()?;
        let (wake, woken) = UnixStream::pair()?;
        let (shared, reactors) = (Arc::clone(shared), Vec::new());
        Ok((Self { shared, addresses, acceptor: None, reactors, wake }, (listeners, woken)))
    }

    fn accept(&mut self, (listeners, woken): Listening) -> io::Result<()> {
        if !listeners.is_empty() {
            let (acceptor, shared) =
                (thread::Builder::new().name("nbd-accept".into()), Arc::clone(&self.shared));
            self.acceptor = Some(acceptor.spawn(move || shared.accept(&listeners, &woken))?);
        }
        Ok(())
    }

    /// The addresses listened on, with the ports the system chose.
    #[must_use]
    pub fn addresses(&self) -> &[Listen] {
        &self.addresses
    }

    /// Serves a connection accepted elsewhere, such as on the control socket: the handshake starts
    /// from its beginning, without TLS.
    ///
    /// # Errors
    /// The server is stopping, or a thread cannot be started.
    pub fn adopt(&self, stream: UnixStream) -> io::Result<()> {
        self.adopt_for(stream, Arc::clone(&self.shared.exports))
    }

    /// As [`ServerHandle::adopt`], for a client that finds other exports of the same store.
    ///
    /// # Errors
    /// As [`ServerHandle::adopt`].
    pub fn adopt_for(&self, stream: UnixStream, exports: Arc<dyn Exports>) -> io::Result<()> {
        self.shared.admit(Socket::Unix(stream), "unix:handed over".to_owned(), Some(exports))
    }

    /// Who is connected.
    #[must_use]
    pub fn clients(&self) -> Vec<ClientInfo> {
        lock(&self.shared.registry).clients.values().map(|client| client.known.info()).collect()
    }

    /// Disconnects a client, and waits until nothing of it is left; what it was, if it was there. What it
    /// had asked for and was not told to be done may be done or not.
    #[must_use]
    pub fn kick(&self, id: u64) -> Option<ClientInfo> {
        let shared = &self.shared;
        let registry = lock(&shared.registry);
        let client = registry.clients.get(&id)?;
        client.known.ends(true);
        client.socket.iter().for_each(|socket| socket.shutdown(Shutdown::Both));
        let info = client.known.info();
        // Behind its arrival there, if it is on its way.
        shared.tell_reactors(|| Message::Kick(id));
        let there = |registry: &mut Registry| registry.clients.contains_key(&id);
        // Something of its may still wait for the device; it is told to go all the same.
        drop(shared.gone.wait_timeout_while(registry, KICK_PATIENCE, there));
        Some(info)
    }

    /// Stops accepting, lets requests in flight finish, closes all connections and waits for
    /// that. Clients have [`ServerOptions::stop_grace`] to take their last replies.
    pub fn stop(mut self) {
        self.stop_now();
    }

    fn stop_now(&mut self) {
        let shared = &self.shared;
        shared.stopping.store(true, Ordering::SeqCst);
        // Wakes the acceptor, which sees the end of the stream.
        let _ = self.wake.shutdown(Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            // A panic there has been reported already.
            let _ = acceptor.join();
        }
        let registry = lock(&shared.registry);
        registry.shutdown(Shutdown::Read);
        shared.tell_reactors(|| Message::Stop);
        let waited = shared
            .gone
            .wait_timeout_while(registry, shared.options.stop_grace, |r| !r.clients.is_empty());
        let registry = match waited {
            Ok((registry, _)) => registry,
            Err(poisoned) => poisoned.into_inner().0,
        };
        registry.shutdown(Shutdown::Both);
        shared.tell_reactors(|| Message::Abort);
        drop(wait_while(&shared.gone, registry, |r| !r.clients.is_empty()));
        shared.tell_reactors(|| Message::End);
        self.reactors.drain(..).for_each(Thread::join);
        shared.pool.stop();
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        self.stop_now();
    }
}

/// Sends a message to a reactor.
pub(super) type Deliver = Box<dyn Fn(Message) + Send + Sync>;

/// What all threads of a server share.
pub(crate) struct Shared {
    exports: Arc<dyn Exports>,
    pub options: ServerOptions,
    pub pool: Pool,
    reactors: OnceLock<Vec<Deliver>>,
    registry: Mutex<Registry>,
    /// Signalled when a client leaves the registry.
    gone: Condvar,
    stopping: AtomicBool,
}

#[derive(Default)]
struct Registry {
    next_id: u64,
    clients: BTreeMap<u64, Registered>,
}

struct Registered {
    known: Arc<Known>,
    /// During the handshake; afterwards it is its reactor's.
    socket: Option<Arc<Socket>>,
}

impl Registry {
    fn shutdown(&self, how: Shutdown) {
        for client in self.clients.values() {
            client.socket.iter().for_each(|socket| socket.shutdown(how));
        }
    }
}

impl Shared {
    pub fn new(exports: Arc<dyn Exports>, options: ServerOptions, pool: Pool) -> Arc<Self> {
        Arc::new(Self {
            exports,
            options,
            pool,
            reactors: OnceLock::new(),
            registry: Mutex::default(),
            gone: Condvar::new(),
            stopping: AtomicBool::new(false),
        })
    }

    /// What a reactor runs.
    pub(super) fn transmission(
        self: Arc<Self>,
        io: &mut Io,
        remote: Remote<Message>,
    ) -> Transmission {
        let storage = self.exports.direct_io().map(|direct| Storage {
            file: io.add_file(direct.file),
            offset_alignment: direct.offset_alignment,
            memory_alignment: direct.memory_alignment,
        });
        Transmission::new(self, remote, storage)
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn log(&self, message: impl FnOnce() -> String) {
        if let Some(log) = &self.options.log {
            log(&message());
        }
    }

    /// The accepting thread.
    fn accept(self: Arc<Self>, listeners: &[Listener], woken: &UnixStream) {
        while !self.is_stopping() {
            let mut fds: Vec<PollFd<'_>> = listeners
                .iter()
                .map(|listener| PollFd::new(listener.as_fd(), PollFlags::POLLIN))
                .collect();
            fds.push(PollFd::new(woken.as_fd(), PollFlags::POLLIN));
            if let Err(error) = poll(&mut fds, PollTimeout::NONE)
                && error != nix::errno::Errno::EINTR
            {
                self.log(|| format!("nbd: cannot wait for connections: {error}"));
                thread::sleep(ACCEPT_RETRY);
            }
            for listener in listeners {
                self.accept_one(listener);
            }
        }
    }

    fn accept_one(self: &Arc<Self>, listener: &Listener) {
        let (socket, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                let kind = error.kind();
                if !matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) {
                    self.log(|| format!("nbd: cannot accept a connection: {error}"));
                    thread::sleep(ACCEPT_RETRY);
                }
                return;
            }
        };
        // Fails only if the peer is gone already, which its thread finds out.
        let _ = socket.tune();
        if let Err(error) = self.admit(socket, peer, None)
            && !self.is_stopping()
        {
            self.log(|| format!("nbd: cannot serve a connection: {error}"));
        }
    }

    /// Starts a connection's thread, to serve it or to tell it why not. One that was handed over comes
    /// with its exports, and needs no TLS.
    fn admit(
        self: &Arc<Self>,
        socket: Socket,
        address: String,
        handed: Option<Arc<dyn Exports>>,
    ) -> io::Result<()> {
        let socket = Arc::new(socket);
        let mut registry = lock(&self.registry);
        if self.is_stopping() {
            return Err(io::Error::other("the NBD server is stopping"));
        }
        let (count, max) = (registry.clients.len(), self.options.max_connections);
        let refused = count >= max;
        if count >= max + REFUSALS_MAX {
            return Ok(());
        }
        let id = registry.next_id;
        registry.next_id += 1;
        let trusted = handed.is_some();
        let peer = Peer { id, address, process: socket.peer_process(), trusted };
        let known = Arc::new(Known::new(peer.clone()));
        registry.clients.insert(id, Registered { known, socket: Some(socket.clone()) });
        drop(registry);
        let shared = self.clone();
        let spawned = thread::Builder::new().name("nbd-handshake".into()).spawn(move || {
            let leaving = Leaving { shared: &shared, id };
            if shared.serve(peer, Connection::new(socket), handed, refused) {
                // From here on its reactor tells when it is over.
                std::mem::forget(leaving);
            }
        });
        if spawned.is_err() {
            self.forget(id);
        }
        spawned.map(drop)
    }

    /// A connection is over.
    pub fn forget(&self, id: u64) {
        lock(&self.registry).clients.remove(&id);
        self.gone.notify_all();
    }

    /// The thread of a handshake; whether a reactor has taken the connection over.
    fn serve(
        &self,
        peer: Peer,
        mut connection: Connection,
        handed: Option<Arc<dyn Exports>>,
        refused: bool,
    ) -> bool {
        let (id, options) = (peer.id, &self.options);
        let tls = connection.initial_tls(options, peer.trusted);
        let exports = handed.unwrap_or_else(|| self.exports.clone());
        let mut handshake = Handshake::new(exports, tls).of(peer);
        let mut timeout = options.handshake_timeout;
        if refused {
            let message =
                format!("all {} connections of this server are in use", options.max_connections);
            self.log(|| format!("nbd: a client is refused: {message}"));
            handshake.refuse(rep::ERR_POLICY, message);
            timeout = timeout.min(REFUSAL_TIMEOUT);
        }
        let result = connection.negotiate(handshake, timeout, options);
        let handed = result.and_then(|session| match session {
            Some(session) => self.hand_over(id, connection, session).map(|()| true),
            None => Ok(false),
        });
        handed.unwrap_or_else(|error| {
            self.client_failed(id, &error);
            false
        })
    }

    fn hand_over(&self, id: u64, connection: Connection, session: Session) -> io::Result<()> {
        let stopping = || io::Error::other("the NBD server is stopping");
        let mut registry = lock(&self.registry);
        // Under the lock: whoever stops the server finds the socket here or with its reactor.
        if self.is_stopping() {
            return Err(stopping());
        }
        let client = registry.clients.get_mut(&id).ok_or_else(stopping)?;
        client.known.uses(session.name(), session.read_only());
        client.socket = None;
        let known = Arc::clone(&client.known);
        let (socket, tls, received) = connection.into_parts()?;
        let adopted = Adopted { known, socket: socket.into(), session, tls, received };
        let reactors = self.reactors.get().ok_or_else(stopping)?;
        // Ids are dense, so that clients are spread evenly.
        let reactor = reactors.get(id as usize % reactors.len().max(1)).ok_or_else(stopping)?;
        reactor(Message::Adopt(Box::new(adopted)));
        Ok(())
    }

    fn tell_reactors(&self, message: impl Fn() -> Message) {
        self.reactors.get().into_iter().flatten().for_each(|deliver| deliver(message()));
    }

    /// Tells why a client was disconnected, unless it just went away.
    pub fn client_failed(&self, id: u64, error: &io::Error) {
        if is_departure(error) || self.is_stopping() {
            return;
        }
        let peer =
            lock(&self.registry).clients.get(&id).map(|client| client.known.peer.address.clone());
        self.log(|| format!("nbd: {} disconnected: {error}", peer.unwrap_or_default()));
    }
}

/// Whether the client just went away, which is no news.
fn is_departure(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

/// Takes a connection out of the registry whatever happens to its thread: stopping waits for that.
struct Leaving<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.shared.forget(self.id);
    }
}
