//! The server of data connections: for one replica or for thousands, a few threads.

use super::gate::Gate;
use super::reactor::Reactor;
use super::shared::{DataOptions, Message, Service, Shared};
use dbs_frontend::{Acceptor, Listen, Listener, Pool, Socket, lock};
use dbs_reactor::Thread;
use dbs_service::log;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

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
        let id = running.shared.next_service.fetch_add(1, Ordering::Relaxed);
        let service = Arc::new(Service::new(id, gate, lock(&running.threads).len()));
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
