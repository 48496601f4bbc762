//! What all threads of a server share: who is connected, and the way of a connection from the socket that accepted it
//! over its handshake to a reactor.

use super::connection::Connection;
use super::export::{Exports, Peer};
use super::handshake::Handshake;
use super::known::Known;
use super::options::ServerOptions;
use super::session::{Admitted, Due, Reply, Session};
use super::wire::rep;
use dbs_frontend::tls::TlsStream;
use dbs_frontend::{Listener, Pool, Socket, half_of_descriptors, lock};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};
use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

/// Connections beyond the maximum that are told so; more are closed at once.
const REFUSALS_MAX: usize = 64;
/// How long a refused client may take.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Rest after an accept that failed, for lack of descriptors mostly.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How long a client waits for requests of one that is gone, until it is told to come again.
const GONE_PATIENCE: Duration = Duration::from_secs(30);

/// Pieces of 4 KiB that are taken of what a client has sent that is gone.
const DISCARDED_MAX: usize = 256;

/// What other threads tell a reactor.
pub(super) enum Message {
    /// A connection whose handshake is done.
    Adopt(Box<Adopted>),
    /// The reply that a worker has made.
    Reply { peer: u32, due: Due, reply: Reply },
    /// A worker has done all of a request but the commit behind it.
    Commit { peer: u32, admitted: Admitted },
    /// A commit that requests waited for has ended.
    Committed(Result<(), dbs_core::Error>),
    /// Somebody has flushed the storage, whom the commit of this reactor may wait for.
    Flushed,
    /// Take no more requests; connections end when what is in flight is answered.
    Stop,
    /// Connections end at once.
    Abort,
    /// That of this client does.
    Kick(u64),
    /// Look whose client is gone; whoever waits for that sees the sender dropped.
    Look(Sender<()>),
    /// All connections are gone: end.
    End,
}

/// A connection that enters its transmission phase.
pub(super) struct Adopted {
    pub known: Arc<Known>,
    pub socket: OwnedFd,
    pub session: Session,
    pub tls: Option<TlsStream>,
    /// Bytes received already, as they came from the socket.
    pub received: Vec<u8>,
}

/// Sends a message to a reactor.
pub(super) type Deliver = Box<dyn Fn(Message) + Send + Sync>;

/// What all threads of a server share.
pub(crate) struct Shared {
    pub(super) exports: Arc<dyn Exports>,
    pub options: ServerOptions,
    pub pool: Pool,
    pub(super) reactors: OnceLock<Vec<Deliver>>,
    pub(super) registry: Mutex<Registry>,
    /// Signalled when a client leaves the registry.
    pub(super) gone: Condvar,
    pub(super) stopping: AtomicBool,
}

#[derive(Default)]
pub(super) struct Registry {
    next_id: u64,
    pub clients: BTreeMap<u64, Registered>,
}

pub(super) struct Registered {
    pub known: Arc<Known>,
    /// During the handshake; afterwards it is its reactor's.
    pub socket: Option<Arc<Socket>>,
}

impl Registry {
    pub fn number(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    pub fn shutdown(&self, how: Shutdown) {
        for client in self.clients.values() {
            client.socket.iter().for_each(|socket| socket.shutdown(how));
        }
    }
}

impl Shared {
    pub fn new(exports: Arc<dyn Exports>, mut options: ServerOptions, pool: Pool) -> Arc<Self> {
        options.max_connections = options.max_connections.min(half_of_descriptors());
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

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn log(&self, message: impl FnOnce() -> String) {
        if let Some(log) = &self.options.log {
            log(&message());
        }
    }

    /// The accepting thread.
    pub(super) fn accept(self: Arc<Self>, listeners: &[Listener], woken: &UnixStream) {
        let mut failing = false;
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
                self.accept_one(listener, &mut failing);
            }
        }
    }

    /// `failing` is whether the last accept failed, which has been said.
    fn accept_one(self: &Arc<Self>, listener: &Listener, failing: &mut bool) {
        let (socket, peer) = match listener.accept() {
            Ok(accepted) => {
                *failing = false;
                accepted
            }
            Err(error) => {
                let kind = error.kind();
                if !matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) {
                    if !std::mem::replace(failing, true) {
                        self.log(|| format!("nbd: cannot accept a connection: {error}"));
                    }
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
    pub(super) fn admit(
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
        if count >= max + REFUSALS_MAX.min(half_of_descriptors() / 4) {
            return Ok(());
        }
        let id = registry.number();
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
        let mut registry = self.without_the_gone(id, &session)?;
        // Under the lock: whoever stops the server finds the socket here or with its reactor.
        if self.is_stopping() {
            return Err(stopping());
        }
        let client = registry.clients.get_mut(&id).ok_or_else(stopping)?;
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

    /// Waits until nothing is left of what clients that are gone asked this client's export for. Who has lost a
    /// connection asks for the same on the next one, and then for something newer: an old request that
    /// came last would undo that.
    fn without_the_gone(&self, id: u64, session: &Session) -> io::Result<MutexGuard<'_, Registry>> {
        let registry = lock(&self.registry);
        let Some(known) = registry.clients.get(&id).map(|client| Arc::clone(&client.known)) else {
            return Ok(registry);
        };
        known.uses(session);
        let others = |registry: &Registry, gone: bool| {
            registry.clients.iter().any(|(other, client)| {
                *other != id
                    && client.known.writes_what(&known)
                    && (!gone || client.known.has_ended())
            })
        };
        if !others(&registry, false) {
            return Ok(registry);
        }
        drop(registry);
        let (seen, all_seen) = mpsc::channel();
        self.tell_reactors(|| Message::Look(seen.clone()));
        drop(seen);
        // Nothing is sent; it ends when the last reactor has looked.
        let _ = all_seen.recv_timeout(GONE_PATIENCE);
        let left = |registry: &mut Registry| {
            !self.is_stopping() && !known.has_ended() && others(registry, true)
        };
        let (registry, timeout) = self
            .gone
            .wait_timeout_while(lock(&self.registry), GONE_PATIENCE, left)
            .unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            let message = "requests of a client that is gone are still under way; connect again";
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        // Then another connection has what this one asks for, and newer things.
        let gone = |client: &Registered| {
            client.socket.as_deref().is_some_and(|s| dbs_reactor::has_hung_up(s.as_fd()))
        };
        if known.has_ended() || registry.clients.get(&id).is_some_and(gone) {
            let socket = registry.clients.get(&id).and_then(|client| client.socket.clone());
            drop(registry);
            socket.iter().for_each(|socket| discard_received(socket));
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(registry)
    }

    pub(super) fn tell_reactors(&self, message: impl Fn() -> Message) {
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

/// Takes what a client that is gone has sent: it may have been its leave, and a socket that is closed over it tells the
/// client of an error.
fn discard_received(socket: &Socket) {
    let mut buf = [0; 4096];
    let mut take = || recv(socket.as_fd().as_raw_fd(), &mut buf, MsgFlags::MSG_DONTWAIT);
    let _ended = (0..DISCARDED_MAX).take_while(|_| take().is_ok_and(|bytes| bytes > 0)).count();
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
