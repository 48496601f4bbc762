//! The frontend `socket`: data connections on a unix socket, as replicas have them.
//!
//! What differs from a replica's: a volume without space says so with a type of its own, which block
//! devices are given as such; a hello is answered, so that a client of DBS can flush.

use crate::path::{Attached, Path};
use dbs_frontend::{
    Acceptor, Action, Carrier, Carry, Charge, Event, Failure, FailureKind, Fate, Front, Limits,
    Listen, Listener, Outcome, Peers, Ready, Socket,
};
use dbs_reactor::{Batch, Io, Slab};
use dbs_service::log;
use longhorn_data::request::{Connection, Op, Request};
use longhorn_wire::frame::Hello;
use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Where upstream's clients look for a volume.
const DIRECTORY: &str = "/var/run";
/// What each connection may have in flight, however many there are.
const SHARE_MIN_BYTES: u64 = 64 << 10;
/// What is said to a client that is gone, in case that it is not.
const GONE_TEXT: &str = "its client is gone";
/// A client that takes its leave tells so by closing.
const IDLE: Duration = Duration::from_secs(3600);

/// How long a client waits at most until nothing is left of what others have asked for that are gone.
const GONE_PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked meanwhile whether the frontend ends.
const LOOK: Duration = Duration::from_millis(100);

/// Settings of the frontend.
#[derive(Debug, Clone)]
pub struct SocketOptions {
    /// Where to listen.
    pub address: Listen,
    /// Connections at once; more are closed. Files are what there may be too few of: memory is bounded by
    /// `bytes_max`.
    pub max_connections: usize,
    /// Requests of one connection in flight; beyond that it is not read from.
    pub requests_max: usize,
    /// Bytes of requests in flight, likewise. The first connection may have all of it, and each that comes
    /// an equal share with those that are there, so that a hundred have a few times as much; each may have
    /// one request, however long.
    pub bytes_max: u64,
    /// Whether a write is answered only when it is durable: for clients that ask for no flush, as `tgtd`.
    pub durable_writes: bool,
    /// How long a client may leave its replies unread before it is disconnected.
    pub write_timeout: Duration,
    /// How long clients may take to receive their last replies when the frontend ends.
    pub stop_grace: Duration,
}

impl SocketOptions {
    /// The settings for a volume: its socket is `/var/run/longhorn-<volume>.sock`.
    #[must_use]
    pub fn new(volume: &str) -> Self {
        Self::at(Listen::Unix(PathBuf::from(DIRECTORY).join(format!("longhorn-{volume}.sock"))))
    }

    /// The settings with another address.
    #[must_use]
    pub fn at(address: Listen) -> Self {
        Self {
            address,
            max_connections: 16384,
            requests_max: 1024,
            bytes_max: 64 << 20,
            durable_writes: false,
            write_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(5),
        }
    }
}

/// The frontend, running. Dropping it stops it.
pub struct SocketFrontend {
    acceptor: Acceptor,
    address: Listen,
    attached: Option<Arc<Attached>>,
    ending: Arc<AtomicBool>,
    stop_grace: Duration,
}

/// What a reactor is told.
enum Told {
    /// A new connection, and who it is.
    Adopt(OwnedFd, String),
    /// Look which clients are gone, and drop this when nothing is left of what they have asked for.
    Look(mpsc::Sender<()>),
}

impl SocketFrontend {
    /// Listens, and serves the volume behind a path. A socket file that nobody listens on is
    /// replaced.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub fn start(path: &Arc<Path>, options: &SocketOptions) -> io::Result<Self> {
        let listener = Listener::bind(&options.address)?;
        let address = listener.address()?;
        let connections = Arc::new(AtomicUsize::new(0));
        let limits = Limits { requests: options.requests_max, bytes: options.bytes_max };
        let (write_timeout, durable) = (options.write_timeout, options.durable_writes);
        let attached = path.attach(|_, _| {
            let connections = Arc::clone(&connections);
            move |_: &mut Io, tags| -> Box<dyn Front> {
                let peers = Peers::new(limits, write_timeout).tagged(tags);
                let tickets = Slab::default();
                let (looking, stopping) = (Vec::new(), false);
                Box::new(Clients {
                    peers,
                    limits,
                    tickets,
                    connections,
                    durable,
                    looking,
                    stopping,
                })
            }
        })?;
        let attached = Arc::new(attached);
        let acceptor = Acceptor::start("socket", IDLE, || {})?;
        let max = options.max_connections.min(dbs_frontend::half_of_descriptors());
        let front = Arc::clone(&attached);
        let next = AtomicUsize::new(0);
        let ending = Arc::<AtomicBool>::default();
        let ends = Arc::clone(&ending);
        let adopt = move |socket: Socket, peer: String| {
            if connections.fetch_add(1, Ordering::SeqCst) >= max {
                connections.fetch_sub(1, Ordering::SeqCst);
                return log::warn("socket", &[("refused", &peer), ("connections", &max)]);
            }
            if !without_the_gone(&front, &ends) {
                connections.fetch_sub(1, Ordering::SeqCst);
                let why = "requests of a client that is gone are still under way";
                return log::warn("socket", &[("refused", &peer), ("error", &why)]);
            }
            // Fails only if the peer is gone already, which its reactor finds out.
            let _ = socket.tune();
            let turn = next.fetch_add(1, Ordering::Relaxed);
            front.send(turn, Box::new(Told::Adopt(socket.into(), peer)));
        };
        acceptor.add(0, vec![listener], adopt);
        let attached = Some(attached);
        Ok(Self { acceptor, address, attached, ending, stop_grace: options.stop_grace })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> &Listen {
        &self.address
    }

    /// Stops: no new connections and requests, those in flight are answered.
    pub fn stop(self) {}
}

impl fmt::Debug for SocketFrontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SocketFrontend").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Drop for SocketFrontend {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        // With its thread its handle of what is attached is gone.
        self.acceptor.stop();
        if let Some(attached) = self.attached.take().and_then(Arc::into_inner) {
            attached.detach(self.stop_grace);
        }
    }
}

/// Waits until nothing is left of what clients that are gone have asked for: who has lost a connection asks for the
/// same on the next one, and then for something newer, which an old request that came last would undo. Says whether
/// it is so.
fn without_the_gone(front: &Attached, ends: &AtomicBool) -> bool {
    let (sender, all_gone) = mpsc::channel::<()>();
    for reactor in 0..front.path().reactors() {
        front.send(reactor, Box::new(Told::Look(sender.clone())));
    }
    drop(sender);
    let until = Instant::now() + GONE_PATIENCE;
    while !ends.load(Ordering::SeqCst) && Instant::now() < until {
        // Nothing is sent; it ends when the last reactor has let go of it.
        if all_gone.recv_timeout(LOOK) == Err(RecvTimeoutError::Disconnected) {
            return true;
        }
    }
    false
}

/// The connections of one reactor.
struct Clients {
    peers: Peers<Connection>,
    /// Of all connections.
    limits: Limits,
    /// Requests that are being carried out, and whose they are.
    tickets: Slab<(u32, Request)>,
    /// Of all reactors.
    connections: Arc<AtomicUsize>,
    /// Whether writes are answered only when they are durable.
    durable: bool,
    /// Who waits until nothing is left of clients that are gone.
    looking: Vec<mpsc::Sender<()>>,
    stopping: bool,
}

impl Clients {
    /// Tells who waits for it that nothing is left of clients that are gone.
    fn let_in(&mut self) {
        let Self { peers, tickets, looking, .. } = self;
        if !looking.is_empty()
            && !tickets
                .iter()
                .any(|(_, (number, _))| peers.is_lost(*number) || peers.has_ended(*number))
        {
            looking.clear();
        }
    }

    fn start(
        &mut self,
        io: &mut Io,
        carrier: &mut dyn Carrier,
        number: u32,
        ready: Ready<Request>,
    ) {
        let Ready { request, payload } = ready;
        // It may have come again, on another connection.
        if self.peers.is_lost(number) {
            return self.reply(number, &request, |batch| request.reply_error(batch, GONE_TEXT));
        }
        let action = match request.op {
            Op::Read => Action::Read,
            Op::Write => Action::Write { durable: self.durable },
            Op::Unmap => Action::Discard,
            Op::Flush => Action::Flush,
            Op::Ping => {
                let hello = payload.as_deref().and_then(Hello::decode);
                let greeted = hello.is_some_and(|hello| !hello.server);
                return self.reply(number, &request, |batch| match greeted {
                    true => request.reply_hello(batch, Hello::of_frontend()),
                    false => request.reply_done(batch, 0),
                });
            }
            // Nobody was told that it is known here.
            Op::Heal | Op::Unknown => return self.peers.forget(number, &request),
        };
        let range = if action == Action::Flush { Ok((0, 0)) } else { request.range() };
        match range {
            Err(text) => self.reply(number, &request, |batch| request.reply_error(batch, &text)),
            Ok((offset, length)) => {
                let ticket = u64::from(self.tickets.insert((number, request)));
                let carry = Carry { action, offset, length: length as u32 };
                carrier.carry(io, carry, payload, ticket);
            }
        }
    }

    fn reply(&mut self, number: u32, request: &Request, reply: impl FnOnce(&mut Batch)) {
        self.peers.answer(number, request.cost_bytes(), reply);
    }
}

impl Front for Clients {
    fn message(&mut self, io: &mut Io, carrier: &mut dyn Carrier, message: Box<dyn Any + Send>) {
        let Ok(told) = message.downcast::<Told>() else { return };
        let (socket, peer) = match *told {
            Told::Adopt(socket, peer) => (socket, peer),
            Told::Look(seen) => {
                self.peers.look(io);
                self.looking.push(seen);
                return self.let_in();
            }
        };
        if self.stopping {
            self.connections.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let connections = self.connections.load(Ordering::SeqCst).max(1) as u64;
        let bytes = (self.limits.bytes / connections).max(SHARE_MIN_BYTES);
        self.peers.limit(Limits { bytes, ..self.limits });
        let number = self.peers.add(io, socket, Connection::new(0, 0, peer), None);
        self.input(io, carrier, number, Event::Begun(&[]));
    }

    fn input(&mut self, io: &mut Io, carrier: &mut dyn Carrier, number: u32, event: Event<'_>) {
        let (mut ready, failure) = self.peers.input(io, number, event);
        if let Some(error) = failure {
            let peer = self.peers.get(number).map_or("", |connection| &connection.peer);
            log::warn("socket", &[("client", &peer), ("disconnected", &error)]);
        }
        for request in ready.drain(..) {
            self.start(io, carrier, number, request);
        }
        self.peers.receive(io, number, ready);
    }

    fn fate(&self, ticket: u64) -> Fate {
        match self.tickets.get(ticket as u32) {
            Some((number, _)) if !self.peers.is_lost(*number) => {
                if self.peers.has_ended(*number) {
                    Fate::Go
                } else {
                    Fate::Wait
                }
            }
            // What it asked for may come again, on another connection.
            _ => Fate::Drop,
        }
    }

    fn answered(&mut self, _: &mut Io, ticket: u64, outcome: Outcome) {
        let Some((number, request)) = self.tickets.remove(ticket as u32) else { return };
        self.reply(number, &request, |batch| match outcome {
            Outcome::Done(size) => request.reply_done(batch, size),
            Outcome::Data(data) => request.reply_data(batch, data),
            Outcome::Failed(Failure { kind: FailureKind::NoSpace, text }) => {
                request.reply_no_space(batch, &text);
            }
            Outcome::Failed(Failure { text, .. }) => request.reply_error(batch, &text),
        });
    }

    fn turn(&mut self, io: &mut Io, _: &mut dyn Carrier) {
        let connections = &self.connections;
        self.peers.settle(io, |_| {
            connections.fetch_sub(1, Ordering::SeqCst);
        });
        self.let_in();
    }

    fn tick(&mut self, io: &mut Io) {
        self.peers.tick(io);
    }

    fn stop(&mut self, io: &mut Io, at_once: bool) {
        self.stopping = true;
        self.peers.end(io, at_once, |_| true);
    }

    fn is_over(&self) -> bool {
        self.stopping && self.peers.is_empty()
    }
}
