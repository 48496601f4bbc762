//! The server: where hosts connect, which subsystems there are, and who is connected.

use super::controller::{ClientInfo, Controller};
use super::message::Message;
use super::shared::{Connections, NvmeOptions, PATIENCE, Shared};
use super::target::Target;
use dbs_core::{Error, Result, Store};
use dbs_frontend::{Acceptor, Listen, Listener, Pool, lock, raise_descriptors, wait_while};
use dbs_reactor::Thread;
use dbs_service::log;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long hosts may take to receive their last answers when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// Between two looks who is silent.
const CLOCK: Duration = Duration::from_secs(1);

/// The volumes and snapshots of a store, each a subsystem of NVMe over TCP. Dropping it stops it.
pub struct NvmeTcp {
    shared: Arc<Shared>,
    addresses: Vec<Listen>,
    acceptor: Option<Acceptor>,
    threads: Mutex<Vec<Thread<Message>>>,
    pool: Arc<Pool>,
}

impl NvmeTcp {
    /// Serves all volumes and snapshots.
    ///
    /// # Errors
    /// An address that cannot be listened on, or may not be; threads that cannot be started.
    pub fn start(store: Store, options: NvmeOptions) -> Result<Self> {
        let failed = |e| Error::io(e, "starting the NVMe/TCP server");
        let mut listeners = Vec::new();
        for address in &options.listen {
            check_loopback(address)?;
            listeners.push(Listener::bind(address).map_err(failed)?);
        }
        let addresses = listeners.iter().map(Listener::address).collect::<io::Result<_>>();
        let addresses: Vec<Listen> = addresses.map_err(failed)?;
        // A name may mean something else by now.
        addresses.iter().try_for_each(check_loopback)?;
        let open = addresses.iter().filter(|address| is_open(address));
        open.for_each(|address| {
            let why = "any user may listen on such a port when the server does not, and hosts take that for it: use one below 1024";
            log::warn("nvme", &[("listening", address), ("note", &why)]);
        });
        raise_descriptors();
        let pool = Arc::new(Pool::start("nvme-worker", options.workers.max(1)).map_err(failed)?);
        let shared = Shared::new(store, options);
        let threads = Mutex::default();
        let mut this = Self { shared, addresses, acceptor: None, threads, pool };
        this.start_threads(listeners).map_err(failed)?;
        Ok(this)
    }

    fn start_threads(&mut self, listeners: Vec<Listener>) -> io::Result<()> {
        let options = &self.shared.options;
        let mut threads = lock(&self.threads);
        for index in 0..options.reactors.max(1) {
            let (store, pool) = (self.shared.store.clone(), Arc::clone(&self.pool));
            let shared = Arc::clone(&self.shared);
            let make = move |io: &mut dbs_reactor::Io, remote| {
                Target::new(io, &store, (shared, pool), remote)
            };
            let name = format!("nvme-reactor-{index}");
            threads.push(dbs_reactor::spawn(&name, &options.reactor, make)?);
        }
        self.shared.reactors.get_or_init(|| threads.iter().map(Thread::remote).collect());
        drop(threads);
        let shared = Arc::clone(&self.shared);
        let acceptor = Acceptor::start("nvme", CLOCK, move || shared.strike())?;
        for (number, (listener, address)) in listeners.into_iter().zip(&self.addresses).enumerate()
        {
            let shared = Arc::clone(&self.shared);
            let Some(address) = socket_address(address) else { continue };
            acceptor.add(number as u64, vec![listener], move |socket, peer| {
                shared.adopt(socket, peer, address);
            });
        }
        self.acceptor = Some(acceptor);
        Ok(())
    }

    /// The addresses listened on, with the ports the system chose.
    #[must_use]
    pub fn addresses(&self) -> &[Listen] {
        &self.addresses
    }

    /// Looks which volumes and snapshots there are, and tells hosts of new sizes: to be called when a command has changed
    /// something.
    pub fn follow(&self) {
        let changed = self.shared.look();
        let controllers: Vec<_> = lock(&self.shared.controllers).values().cloned().collect();
        for controller in controllers {
            controller.follow();
            if changed && controller.disk().is_none() {
                controller.changed();
            }
        }
    }

    /// Who is connected, but those who only look what there is.
    #[must_use]
    pub fn clients(&self) -> Vec<ClientInfo> {
        lock(&self.shared.controllers).values().filter_map(|controller| controller.info()).collect()
    }

    /// Disconnects a client, and waits until nothing of it is left; whether it was there.
    #[must_use]
    pub fn kick(&self, id: u64) -> bool {
        let controllers = lock(&self.shared.controllers);
        let Some(controller) = controllers.get(&id).cloned() else { return false };
        controller.end();
        drop(controller);
        let there =
            |controllers: &mut BTreeMap<u64, Arc<Controller>>| controllers.contains_key(&id);
        drop(self.shared.ended.wait_timeout_while(controllers, PATIENCE, there));
        true
    }

    /// Ends all connections when what is under way is done; hosts ask the next server for the rest.
    pub fn stop(&self) {
        let shared = &self.shared;
        shared.stopping.store(true, Ordering::SeqCst);
        self.acceptor.iter().for_each(Acceptor::stop);
        let connections = lock(&shared.connections);
        connections.connecting.values().for_each(|socket| socket.shutdown(Shutdown::Both));
        let connecting = |c: &Connections| !c.connecting.is_empty();
        drop(wait_while(&shared.gone, connections, |c| connecting(c)));
        // Behind the last that was connected.
        shared.tell(|| Message::Stop);
        let there = |c: &mut Connections| c.served > 0;
        drop(shared.gone.wait_timeout_while(lock(&shared.connections), STOP_GRACE, there));
        shared.tell(|| Message::Abort);
        drop(wait_while(&shared.gone, lock(&shared.connections), |c| c.served > 0));
        let threads = std::mem::take(&mut *lock(&self.threads));
        threads.iter().for_each(|thread| thread.remote().send(Message::End));
        threads.into_iter().for_each(Thread::join);
        self.pool.stop();
    }
}

impl Drop for NvmeTcp {
    fn drop(&mut self) {
        self.stop();
    }
}

fn socket_address(address: &Listen) -> Option<SocketAddr> {
    let Listen::Tcp(host, port) = address else { return None };
    let ip = host.parse().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    Some(SocketAddr::new(ip, *port))
}

/// Whether any user may listen on an address.
fn is_open(address: &Listen) -> bool {
    matches!(address, Listen::Tcp(_, 1024..))
}

/// Refuses an address that others than this machine reach.
fn check_loopback(address: &Listen) -> Result<()> {
    let Listen::Tcp(host, port) = address else {
        return Err(Error::invalid(format!(
            "NVMe/TCP cannot listen on {address}: hosts connect over TCP; write tcp:PORT, which is loopback"
        )));
    };
    let resolved = (host.as_str(), *port).to_socket_addrs();
    let mut resolved = resolved.map_err(|e| Error::io(e, format!("looking up {address}")))?;
    if resolved.all(|address| address.ip().is_loopback()) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "NVMe/TCP does not listen on {address}: it has neither TLS nor authentication yet, so that whoever reaches the port \
         could read and write each volume. Listen on loopback (tcp:{port}), and reach it from another machine \
         through a tunnel (`ssh -L`); or serve NBD with TLS (--nbd, --tls-cert)"
    )))
}
