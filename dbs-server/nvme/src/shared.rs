//! What all threads of the server share: which subsystems there are, who is connected, and the way of a connection to
//! its reactor.

use super::auth::Authentication;
use super::command::Status;
use super::connect::{Asked, Connecting, Refused, wrong_data};
use super::controller::{Controller, Disk, Host, QUEUES_MAX, Shows, Tell};
use super::identify::{DISCOVERY_NQN, UUID_NQN};
use super::keys::NvmeOptions;
use super::message::Message;
use super::queue::Queue;
use super::wire::Framing;
use dbs_frontend::{Applicant, Disks, Engine, Opened, Socket, Subject, User, lock};
use dbs_service::log;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

/// Connections at a time at most; more are closed at once.
const CONNECTIONS_MAX: usize = 1024;
/// Connections from which on no host gets a new admin queue: the rest is for the I/O queues of those that have one, which
/// cannot go on without them.
const BEGIN_MAX: usize = CONNECTIONS_MAX - 128;
/// Connections that may be at their beginning: each has a thread.
const CONNECTING_MAX: usize = 64;
/// How long a host may take to connect.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// How long the end of a host is waited for that is disconnected.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// The largest number of a controller.
const NUMBER_MAX: u16 = 0xffef;

/// What all threads share.
pub struct Shared {
    disks: Arc<dyn Disks>,
    /// Where hosts come in, and which.
    pub options: NvmeOptions,
    /// A host may have several paths to a disk, one to each address.
    paths: bool,
    /// The reactors, once they run.
    pub engine: Arc<OnceLock<Engine<Message>>>,
    tell: Tell,
    /// Those that are served, by their numbers among clients.
    pub controllers: Mutex<Controllers>,
    /// Connections: those at their beginning with their socket.
    pub connections: Mutex<Connections>,
    /// What there is, by its uuid.
    subjects: Mutex<(u64, Arc<Subjects>)>,
    /// Held while that is looked for: who looked first must not have the last word.
    looking: Mutex<()>,
    /// A connection has gone.
    pub gone: Condvar,
    /// A controller has.
    pub ended: Condvar,
    /// No more are let in.
    pub stopping: AtomicBool,
    /// The number of the next controller: given out in turn, and begun anywhere, so that a queue that comes late for one
    /// that has ended, maybe in the server before, does not find another.
    next_number: AtomicU64,
}

/// Connections.
#[derive(Default)]
pub struct Connections {
    next: u64,
    /// Those at their beginning.
    pub connecting: BTreeMap<u64, Arc<Socket>>,
    /// How many belong to queues.
    pub served: usize,
}

/// Controllers, by their numbers among clients.
type Controllers = BTreeMap<u64, Arc<Controller>>;
/// Volumes and snapshots, by uuid.
type Subjects = BTreeMap<String, Subject>;

impl Shared {
    /// What there is at the moment, and nobody who is connected.
    pub fn new(disks: Arc<dyn Disks>, options: NvmeOptions, paths: bool) -> Arc<Self> {
        let engine: Arc<OnceLock<Engine<Message>>> = Arc::default();
        let told = Arc::clone(&engine);
        let shared = Self {
            disks,
            options,
            paths,
            engine,
            tell: Arc::new(move |notice| {
                told.get().into_iter().for_each(|engine| engine.tell(|| Message::Notice(notice)));
            }),
            controllers: Mutex::default(),
            connections: Mutex::default(),
            subjects: Mutex::default(),
            looking: Mutex::default(),
            gone: Condvar::new(),
            ended: Condvar::new(),
            stopping: AtomicBool::new(false),
            next_number: AtomicU64::new(RandomState::new().hash_one(0)),
        };
        shared.look();
        Arc::new(shared)
    }

    /// Sends a message to all reactors.
    pub fn tell(&self, message: impl Fn() -> Message) {
        self.engine.get().into_iter().for_each(|engine| engine.tell(&message));
    }

    /// The names of the subsystems that who connects from an address finds, and a number that changes with them; `None` if
    /// it is the one that is known.
    pub fn subsystems_for(&self, address: &str, known: u64) -> Option<(u64, Vec<String>)> {
        let (generation, subjects) = lock(&self.subjects).clone();
        if generation == known {
            return None;
        }
        let visible = |subject: &&Subject| self.disks.access(&subject.volume, address).is_some();
        let visible = subjects.values().filter(visible);
        let names = visible.map(|subject| format!("{UUID_NQN}{}", subject.uuid));
        Some((generation, names.collect()))
    }

    /// The names of all subsystems.
    pub fn subsystems(&self) -> Vec<String> {
        lock(&self.subjects).1.keys().map(|uuid| format!("{UUID_NQN}{uuid}")).collect()
    }

    /// A queue is gone.
    pub fn left(&self, controller: Arc<Controller>, queue: u16) {
        self.leave(controller, queue);
        lock(&self.connections).served -= 1;
        self.gone.notify_all();
    }

    fn leave(&self, controller: Arc<Controller>, queue: u16) {
        if queue == 0 {
            controller.end();
        }
        if controller.leave(queue) {
            let id = controller.id;
            if controller.disk().is_some() {
                log::info("nvme", &[("disconnected", &controller.who)]);
            }
            drop(controller);
            let mut controllers = lock(&self.controllers);
            let removed = controllers.remove(&id);
            // Nothing of it is under way: what comes on the next path comes later.
            if let Some(next) = removed.as_ref().and_then(|ended| next_path(&controllers, ended)) {
                log::info("nvme", &[("takes_over", &next.who)]);
                next.take_over();
            }
            drop(controllers);
            // Who waits for that finds that nobody has the volume open for it.
            drop(removed);
            self.ended.notify_all();
        }
    }

    /// Once a second: ends those whose hosts are silent.
    pub fn strike(&self) {
        let controllers: Vec<_> = lock(&self.controllers).values().cloned().collect();
        for controller in controllers.iter().filter(|controller| controller.strike()) {
            log::warn("nvme", &[("silent", &controller.who)]);
            controller.end();
        }
    }

    /// Looks what there is; whether that has changed.
    pub fn look(&self) -> bool {
        let _looking = lock(&self.looking);
        let found = self.disks.subjects().into_iter().map(|it| (it.uuid.clone(), it));
        let found: Subjects = found.collect();
        let mut subjects = lock(&self.subjects);
        let changed = *subjects.1 != found;
        if changed {
            *subjects = (subjects.0 + 1, Arc::new(found));
        }
        changed
    }

    /// Takes a connection.
    pub fn adopt(self: &Arc<Self>, socket: Socket, peer: String) {
        // The address listened on is loopback, but packets of others may be routed to it (route_localnet).
        if !self.options.insecure_data && !is_loopback(&peer) {
            return log::warn("nvme", &[("refused", &peer), ("why", &"it is not on this machine")]);
        }
        let Some(address) = local(&socket) else { return };
        // Fails only if the peer is gone already, which its thread finds out.
        let _ = socket.tune();
        let socket = Arc::new(socket);
        let mut connections = lock(&self.connections);
        let full = connections.connecting.len() >= CONNECTING_MAX
            || connections.connecting.len() + connections.served >= CONNECTIONS_MAX;
        if full || self.stopping.load(Ordering::SeqCst) {
            drop(connections);
            return log::warn("nvme", &[("refused", &peer), ("why", &"too many connections")]);
        }
        let number = connections.next;
        connections.next += 1;
        connections.connecting.insert(number, Arc::clone(&socket));
        drop(connections);
        let shared = Arc::clone(self);
        let spawned = thread::Builder::new().name("nvme-connect".to_owned()).spawn(move || {
            let served = shared.serve(number, socket, &peer, address);
            lock(&shared.connections).connecting.remove(&number);
            shared.gone.notify_all();
            if let Err(error) = served
                && !shared.stopping.load(Ordering::SeqCst)
            {
                log::warn("nvme", &[("client", &peer), ("error", &error)]);
            }
        });
        if let Err(error) = spawned {
            lock(&self.connections).connecting.remove(&number);
            log::error("nvme", &[("error", &error)]);
        }
    }

    /// The thread of a connection at its beginning.
    fn serve(
        &self,
        number: u64,
        socket: Arc<Socket>,
        peer: &str,
        address: SocketAddr,
    ) -> io::Result<()> {
        let mut connecting = Connecting::begin(&socket, CONNECT_PATIENCE)?;
        let Some(asked) = connecting.asked()? else { return Ok(()) };
        let mut joined = None;
        let let_in = self.let_in(&mut connecting, &asked, (peer, address), &mut joined);
        let (framing, commands) = (connecting.framing(), connecting.commands());
        let Some(controller) = joined else { return let_in.map(drop) };
        let handed = match let_in {
            Ok(true) => {
                let queue = (Arc::clone(&controller), &asked, commands);
                self.hand_over(number, socket, queue, framing).map(|()| true)
            }
            refused => refused,
        };
        if !matches!(handed, Ok(true)) {
            controller.end();
            self.leave(controller, asked.queue);
        }
        handed.map(drop)
    }

    /// Lets a host in that may come in, and has proven who it is if that is asked for; whether it has. Which controller it
    /// has joined is told as soon as it has.
    fn let_in(
        &self,
        connecting: &mut Connecting<'_>,
        asked: &Asked,
        (peer, address): (&str, SocketAddr),
        joined: &mut Option<Arc<Controller>>,
    ) -> io::Result<bool> {
        let Some(keys) = &self.options.keys else {
            return match self.controller(asked, peer, address, None) {
                Ok(controller) => {
                    connecting.accept(joined.insert(controller).number).map(|()| true)
                }
                Err(refused) => connecting.refuse(refused).map(|()| false),
            };
        };
        let who = format!("NVMe host {} at {peer}", asked.host.name);
        let Some(keys) = keys.of(&asked.host.name) else {
            log::warn("nvme", &[("refused", &who), ("why", &"there is no key of it")]);
            return connecting.refuse((Status::CONNECT_HOST, 0)).map(|()| false);
        };
        // What it asks for is neither opened nor disturbed before it has proven who it is.
        let number = match asked.queue {
            0 => match self.subject(asked, peer).and_then(|_| self.free_number()) {
                Ok(number) => number,
                Err(refused) => return connecting.refuse(refused).map(|()| false),
            },
            _ => asked.controller,
        };
        let mut authentication = Authentication::new(keys, &asked.host.name, &asked.subsystem);
        let proven = connecting.accept_proven(number, &mut authentication, &mut || {
            *joined = Some(self.controller(asked, peer, address, Some(number))?);
            Ok(())
        });
        if let Some(why) = authentication.failure() {
            log::warn("nvme", &[("refused", &who), ("why", &why)]);
        }
        proven
    }

    fn hand_over(
        &self,
        number: u64,
        socket: Arc<Socket>,
        (controller, asked, commands): (Arc<Controller>, &Asked, u16),
        framing: Framing,
    ) -> io::Result<()> {
        socket.set_read_timeout(None)?;
        let mut connections = lock(&self.connections);
        let stopping = || io::Error::other("the server is stopping");
        // Nobody else has it then: who stops the server finds it here or with its reactor.
        connections.connecting.remove(&number).ok_or_else(stopping)?;
        let socket = Arc::into_inner(socket).ok_or_else(stopping)?;
        let (_, post) = self.engine.get().ok_or_else(stopping)?.next();
        let user = controller.disk().map(|disk| {
            // The flush of a shutdown must not use up what an application is to be told: Linux does not look at it.
            let lost =
                if asked.queue == 0 { Arc::default() } else { Arc::clone(&disk.opened.lost) };
            let Opened { disk, read_only, .. } = &*disk.opened;
            // A flag of its own: a queue may end without its controller.
            User::new(disk.clone(), *read_only, controller.id, lost, Arc::default())
        });
        let (place, flow_control) = ((asked.queue, asked.entries), asked.flow_control);
        let queue = Queue::new(controller, user, place, framing, flow_control.then_some(commands));
        connections.served += 1;
        post(Message::Adopt(Box::new((socket.into(), queue))));
        Ok(())
    }

    /// The controller that a host asks for: a new one, or that of an I/O queue.
    fn controller(
        &self,
        asked: &Asked,
        peer: &str,
        address: SocketAddr,
        number: Option<u16>,
    ) -> std::result::Result<Arc<Controller>, Refused> {
        if asked.queue > 0 {
            return self.join(asked);
        }
        if lock(&self.connections).served >= BEGIN_MAX {
            return Err((Status::CONNECT_BUSY, 0));
        }
        let id = self.disks.number();
        let who = format!("NVMe host {} at {peer}", asked.host.name);
        let subject = match self.subject(asked, peer)? {
            None => Shows::Discovery(address),
            Some(subject) => {
                let opened = match self.other_path(asked, address) {
                    Some(opened) => opened,
                    None => Arc::new(self.open(&subject, (id, &who), peer)?),
                };
                let reactors = self.engine.get().map_or(1, Engine::reactors);
                let queues_max = QUEUES_MAX.min((2 * reactors).max(4) as u16);
                Shows::Disk(Disk { opened, paths: self.paths, queues_max })
            }
        };
        let mut controllers = lock(&self.controllers);
        if self.stopping.load(Ordering::SeqCst) {
            return Err((Status::CONNECT_BUSY, 0));
        }
        // One that was told to its host may be another's by now, if that came in between.
        let number = match number {
            Some(number) if is_used(&controllers, number) => None,
            Some(number) => Some(number),
            None => self.next_free(&controllers),
        };
        let number = number.ok_or((Status::CONNECT_BUSY, 0))?;
        let has_it = |other: &Arc<Controller>| other.disk().is_some() && other.is_accessible();
        let accessible = !self.paths || !controllers.values().any(has_it);
        let controller = Arc::new(Controller::new(
            (id, number),
            asked.host.clone(),
            (who, peer.to_owned(), address),
            (subject, accessible),
            asked.keep_alive_ms,
            Arc::clone(&self.tell),
        ));
        if controller.disk().is_some() {
            log::info("nvme", &[("connected", &controller.who), ("to", &asked.subsystem)]);
        }
        controllers.insert(id, Arc::clone(&controller));
        Ok(controller)
    }

    fn join(&self, asked: &Asked) -> std::result::Result<Arc<Controller>, Refused> {
        let its = |other: &&Arc<Controller>| other.number == asked.controller;
        let found = lock(&self.controllers).values().find(its).cloned();
        // One that has ended, or of the server before: the host begins anew.
        let number = (1..=NUMBER_MAX).contains(&asked.controller);
        let unknown = || if number { (Status::CONNECT_BUSY, 0) } else { wrong_data(16) };
        let controller = found.ok_or_else(unknown)?;
        if controller.subsystem() != asked.subsystem {
            return Err(wrong_data(256));
        }
        let Host { name, id } = &controller.host;
        if (name, id) != (&asked.host.name, &asked.host.id) {
            return Err((Status::CONNECT_HOST, 0));
        }
        if controller.disk().is_none_or(|disk| asked.queue > disk.queues_max) {
            return Err((Status::CONNECT_PARAMETERS, 42));
        }
        controller.join(asked.queue).map_err(|status| (status, 0))?;
        Ok(controller)
    }

    /// The number of a controller that is to be made.
    fn free_number(&self) -> std::result::Result<u16, Refused> {
        self.next_free(&lock(&self.controllers)).ok_or((Status::CONNECT_BUSY, 0))
    }

    fn next_free(&self, controllers: &Controllers) -> Option<u16> {
        let next = self.next_number.fetch_add(1, Ordering::Relaxed);
        let mut numbers = (0..NUMBER_MAX.into()).map(|step| number_at(next.wrapping_add(step)));
        numbers.find(|number| !is_used(controllers, *number))
    }

    /// What a host asks for; none is discovery.
    fn subject(&self, asked: &Asked, peer: &str) -> std::result::Result<Option<Subject>, Refused> {
        if asked.subsystem == DISCOVERY_NQN {
            return Ok(None);
        }
        let unknown = || wrong_data(256);
        let uuid = asked.subsystem.strip_prefix(UUID_NQN).ok_or_else(unknown)?;
        let subjects = Arc::clone(&lock(&self.subjects).1);
        let subject = subjects.get(uuid).ok_or_else(unknown)?;
        self.disks.access(&subject.volume, peer).ok_or_else(unknown)?;
        Ok(Some(subject.clone()))
    }

    /// Opens what a host asks for.
    fn open(
        &self,
        subject: &Subject,
        (id, who): (u64, &str),
        peer: &str,
    ) -> std::result::Result<Opened, Refused> {
        let remedy = format!("disconnect it there first, or with `dbs clients kick {id}`");
        let by = Applicant { id, who, from: peer, remedy: &remedy };
        self.disks.open(subject, &by, &self.stopping).map_err(|error| {
            log::warn("nvme", &[("refused", &who), ("error", &error)]);
            (Status::CONNECT_BUSY, 0)
        })
    }

    /// The disk that the same host has on a path to another address already. One that comes again to the same address has
    /// lost its connections, and waits for their end: it may know of no paths.
    fn other_path(&self, asked: &Asked, address: SocketAddr) -> Option<Arc<Opened>> {
        let controllers = lock(&self.controllers);
        // It may look what there is at any of them.
        let is_path = |other: &&Arc<Controller>| other.disk().is_some() && !other.has_ended();
        let its = |other: &&Arc<Controller>| self.paths && other.host == asked.host;
        let mut its = controllers.values().filter(is_path).filter(its);
        if its.clone().any(|controller| controller.at == address) {
            return None;
        }
        its.find_map(|controller| controller.disk()).map(|disk| Arc::clone(&disk.opened))
    }
}

/// Where a host has come in: where one address stands for all of the machine, that which it knows.
fn local(socket: &Socket) -> Option<SocketAddr> {
    let Socket::Tcp(stream) = socket else { return None };
    let mut address = stream.local_addr().ok()?;
    // A socket for both families says an IPv4 address in IPv6's way.
    address.set_ip(address.ip().to_canonical());
    Some(address)
}

/// Whether a peer, as `tcp:ADDRESS:PORT`, is this machine.
fn is_loopback(peer: &str) -> bool {
    let address = peer.strip_prefix("tcp:").and_then(|peer| peer.parse::<SocketAddr>().ok());
    address.is_some_and(|address| address.ip().is_loopback())
}

/// The path that is to be used behind one that has ended, if that was used: the oldest.
fn next_path(controllers: &Controllers, ended: &Controller) -> Option<Arc<Controller>> {
    let is_path = |other: &Controller| other.disk().is_some_and(|disk| disk.paths);
    if !is_path(ended) || !ended.is_accessible() {
        return None;
    }
    let is_next =
        |other: &&Arc<Controller>| is_path(other) && other.host == ended.host && !other.has_ended();
    controllers.values().find(is_next).cloned()
}

/// Whether a controller has this number.
fn is_used(controllers: &Controllers, number: u16) -> bool {
    controllers.values().any(|other| other.number == number)
}

/// The number of a controller, of those that are given out in turn.
fn number_at(place: u64) -> u16 {
    (place % u64::from(NUMBER_MAX)) as u16 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for peer in ["tcp:127.0.0.1:1", "tcp:127.8.9.10:65535", "tcp:[::1]:4420"] {
            assert!(is_loopback(peer), "{peer}");
        }
        for peer in ["tcp:192.0.2.1:4420", "tcp:[2001:db8::1]:4420", "127.0.0.1:1", "tcp:", ""] {
            assert!(!is_loopback(peer), "{peer}");
        }
    }

    #[test]
    fn numbers_of_controllers_are_all_that_there_are_in_turn() {
        let most = u64::from(NUMBER_MAX);
        assert_eq!(
            [0, 1, most - 1, most, u64::MAX].map(number_at).map(|number| number > 0),
            [true; 5]
        );
        assert_eq!((number_at(0), number_at(most - 1), number_at(most)), (1, NUMBER_MAX, 1));
    }
}
