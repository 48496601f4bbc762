//! The server: where hosts connect, which subsystems there are, and who is connected.

use super::controller::{Changed, ClientInfo, Controller};
use super::keys::NvmeOptions;
use super::message::Message;
use super::shared::{Connections, PATIENCE, Shared};
use super::target::Target;
use dbs_core::info::HolderKind;
use dbs_core::{Error, Result, Store};
use dbs_frontend::{
    Acceptor, DiskOptions, Engine, Front, Hosted, Listen, Listener, OneDisk, Requests, StoreDisks,
    ToFront, lock, raise_descriptors, wait_while,
};
use dbs_service::log;
use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long hosts may take to receive their last answers when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// Between two looks who is silent.
const CLOCK: Duration = Duration::from_secs(1);

/// The volumes and snapshots of a store, or one volume that something else carries the requests of out, each a subsystem of
/// NVMe over TCP. Dropping it stops it.
pub struct NvmeTcp {
    shared: Arc<Shared>,
    addresses: Vec<Listen>,
    acceptor: Option<Acceptor>,
}

/// A server that is not started, whose queues are on reactors of somebody else.
pub struct HostedNvme(Arc<Shared>);

impl HostedNvme {
    /// Of a disk whose requests are carried out there.
    #[must_use]
    pub fn new(disk: OneDisk, options: &NvmeOptions) -> Self {
        Self(Shared::new(Arc::new(disk), options.clone(), true))
    }

    /// Its part on one reactor, to be made there; its operations have `tags`.
    pub fn front(&self) -> impl FnOnce(u64) -> Box<dyn Front> + Send + use<> {
        let shared = Arc::clone(&self.0);
        move |tags| Box::new(Hosted::new(Target::new(shared, Requests::carried(), tags)))
    }

    /// Starts to serve: `to` reaches those parts, which exist already.
    ///
    /// # Errors
    /// Those of [`NvmeTcp::start`].
    pub fn start(self, reactors: usize, to: &ToFront) -> Result<NvmeTcp> {
        NvmeTcp::serve(self.0, || Ok(Engine::hosted(reactors, to)))
    }
}

impl NvmeTcp {
    /// Serves all volumes and snapshots of a store.
    ///
    /// # Errors
    /// An address that cannot be listened on, or may not be; threads that cannot be started.
    pub fn start(store: Store, options: &NvmeOptions, serving: DiskOptions) -> Result<Self> {
        let serving = Arc::new(serving);
        let disks = StoreDisks::new(store.clone(), HolderKind::NvmeTcp, Arc::clone(&serving));
        let shared = Shared::new(Arc::new(disks), options.clone(), false);
        let its = Arc::clone(&shared);
        let engine = || {
            let make = move |requests, _| Target::new(Arc::clone(&its), requests, 0);
            Engine::start("nvme", &store, &serving, make, || Message::End)
        };
        Self::serve(shared, engine)
    }

    fn serve(
        shared: Arc<Shared>,
        engine: impl FnOnce() -> io::Result<Engine<Message>>,
    ) -> Result<Self> {
        let failed = |e| Error::io(e, "starting the NVMe/TCP server");
        let mut listeners = Vec::new();
        let options = &shared.options;
        for address in &options.listen {
            check(address, options)?;
            listeners.push(Listener::bind(address).map_err(failed)?);
        }
        let addresses = listeners.iter().map(Listener::address).collect::<io::Result<_>>();
        let addresses: Vec<Listen> = addresses.map_err(failed)?;
        // A name may mean something else by now.
        addresses.iter().try_for_each(|address| check(address, options))?;
        let open = addresses.iter().filter(|address| is_open(address));
        open.for_each(|address| {
            let why = "any user may listen on such a port when the server does not, and hosts take that for it: use one below 1024";
            log::warn("nvme", &[("listening", address), ("note", &why)]);
        });
        raise_descriptors();
        let engine = engine().map_err(failed)?;
        shared.engine.get_or_init(|| engine);
        let mut this = Self { shared, addresses, acceptor: None };
        this.accept(listeners).map_err(failed)?;
        Ok(this)
    }

    fn accept(&mut self, listeners: Vec<Listener>) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let acceptor = Acceptor::start("nvme", CLOCK, move || shared.strike())?;
        for (number, listener) in listeners.into_iter().enumerate() {
            let shared = Arc::clone(&self.shared);
            acceptor.add(number as u64, vec![listener], move |socket, peer| {
                shared.adopt(socket, peer);
            });
        }
        self.acceptor = Some(acceptor);
        Ok(())
    }

    /// The names of the subsystems that there are.
    #[must_use]
    pub fn subsystems(&self) -> Vec<String> {
        self.shared.subsystems()
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
                controller.changed(Changed::Shown);
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
        shared.engine.get().into_iter().for_each(|engine| engine.stop(|| Message::End));
    }
}

impl Drop for NvmeTcp {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Whether any user may listen on an address.
fn is_open(address: &Listen) -> bool {
    matches!(address, Listen::Tcp(_, 1024..))
}

/// Refuses an address that others than this machine reach, unless they are to.
fn check(address: &Listen, options: &NvmeOptions) -> Result<()> {
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
    match (&options.keys, options.insecure_data) {
        (Some(_), true) => Ok(()),
        (None, _) => Err(Error::invalid(format!(
            "NVMe/TCP does not listen on {address} without authentication (--nvme-keys), so that whoever reaches the port \
             could read and write each volume; and even with it, data goes unprotected (--nvme-insecure-data). Listen on loopback \
             (tcp:{port}), and reach it from another machine through a tunnel (WireGuard, `ssh -L`); or serve NBD with TLS"
        ))),
        (Some(_), false) => Err(Error::invalid(format!(
            "NVMe/TCP does not listen on {address}: it has no TLS. Hosts prove who they are when they connect, but whoever is \
             on the way can read and change what follows. Listen on loopback (tcp:{port}), and reach it from another machine \
             through a tunnel (WireGuard, `ssh -L`); or serve NBD with TLS. On a network whose machines you all trust, say \
             --nvme-insecure-data"
        ))),
    }
}
