//! The server: one thread that accepts, one for each handshake that runs, reactors for the
//! connections behind it, and a pool of workers for what may block.

use super::export::Exports;
use super::known::ClientInfo;
use super::options::ServerOptions;
use super::shared::{Deliver, Message, Registry, Shared};
use super::transmission::Transmission;
use dbs_frontend::{Listen, Listener, Pool, Socket, lock, wait_while};
use dbs_reactor::Thread;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How long whoever disconnects a client waits until it is gone.
const KICK_PATIENCE: Duration = Duration::from_secs(10);
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
    start_listening(bind(addresses)?, exports, options)
}

/// As [`start`], on sockets that listen already.
///
/// # Errors
/// Threads that cannot be started.
pub fn start_listening(
    listeners: Vec<Listener>,
    exports: Arc<dyn Exports>,
    options: ServerOptions,
) -> io::Result<ServerHandle> {
    let pool = Pool::start("nbd-worker", options.workers.max(1))?;
    let shared = Shared::new(exports, options, pool);
    let (handle, listening) = ServerHandle::new(&shared, listeners)?;
    let wanted = 0..shared.options.reactors.max(1);
    let started: Vec<_> = wanted.map(|index| start_reactor(&shared, index)).collect();
    let (started, failed): (Vec<_>, Vec<_>) = started.into_iter().partition(Result::is_ok);
    let started: Vec<_> = started.into_iter().flatten().collect();
    let deliver = |thread: &Thread<Message>| -> Deliver {
        let remote = thread.remote();
        Box::new(move |message| remote.send(message))
    };
    let reactors = started.iter().map(deliver).collect();
    lock(&handle.reactors).extend(started);
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
    let (handle, listening) = ServerHandle::new(shared, bind(addresses)?)?;
    shared.reactors.get_or_init(|| reactors);
    handle.accept(listening)?;
    Ok(handle)
}

fn bind(addresses: &[Listen]) -> io::Result<Vec<Listener>> {
    addresses.iter().map(Listener::bind).collect()
}

fn start_reactor(shared: &Arc<Shared>, index: usize) -> io::Result<Thread<Message>> {
    let options = &shared.options.reactor;
    let shared = Arc::clone(shared);
    let name = format!("nbd-reactor-{index}");
    dbs_reactor::spawn(&name, options, move |io, remote| Transmission::on(shared, io, remote))
}

/// Where connections come in, and what wakes who waits for them.
type Listening = (Vec<Listener>, UnixStream);

/// A running server. Dropping it stops it.
pub struct ServerHandle {
    shared: Arc<Shared>,
    addresses: Vec<Listen>,
    acceptor: Mutex<Option<JoinHandle<()>>>,
    reactors: Mutex<Vec<Thread<Message>>>,
    wake: UnixStream,
}

impl ServerHandle {
    /// A server that listens, and nobody accepts yet.
    fn new(shared: &Arc<Shared>, listeners: Vec<Listener>) -> io::Result<(Self, Listening)> {
        let addresses = listeners.iter().map(Listener::address).collect::<io::Result<Vec<_>>>()?;
        let (wake, woken) = UnixStream::pair()?;
        let (shared, acceptor, reactors) = (Arc::clone(shared), Mutex::default(), Mutex::default());
        Ok((Self { shared, addresses, acceptor, reactors, wake }, (listeners, woken)))
    }

    fn accept(&self, (listeners, woken): Listening) -> io::Result<()> {
        if !listeners.is_empty() {
            let (acceptor, shared) =
                (thread::Builder::new().name("nbd-accept".into()), Arc::clone(&self.shared));
            let acceptor = acceptor.spawn(move || shared.accept(&listeners, &woken))?;
            *lock(&self.acceptor) = Some(acceptor);
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

    /// A number for a client of another frontend of the store, which no other client has or gets.
    #[must_use]
    pub fn number(&self) -> u64 {
        lock(&self.shared.registry).number()
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
        // It may wait for requests of others.
        shared.gone.notify_all();
        // Behind its arrival there, if it is on its way.
        shared.tell_reactors(|| Message::Kick(id));
        let there = |registry: &mut Registry| registry.clients.contains_key(&id);
        // Something of its may still wait for the device; it is told to go all the same.
        drop(shared.gone.wait_timeout_while(registry, KICK_PATIENCE, there));
        Some(info)
    }

    /// Stops accepting, lets requests in flight finish, closes all connections and waits for
    /// that. Clients have [`ServerOptions::stop_grace`] to take their last replies.
    pub fn stop(self) {
        self.end();
    }

    /// As [`ServerHandle::stop`], also if others have it: it takes no more clients then.
    pub fn end(&self) {
        let shared = &self.shared;
        shared.stopping.store(true, Ordering::SeqCst);
        // Wakes the acceptor, which sees the end of the stream.
        let _ = self.wake.shutdown(Shutdown::Both);
        if let Some(acceptor) = lock(&self.acceptor).take() {
            // A panic there has been reported already.
            let _ = acceptor.join();
        }
        let registry = lock(&shared.registry);
        registry.shutdown(Shutdown::Read);
        // Whoever waits for requests of others finds that the server stops.
        shared.gone.notify_all();
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
        lock(&self.reactors).drain(..).for_each(Thread::join);
        shared.pool.stop();
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        self.end();
    }
}
