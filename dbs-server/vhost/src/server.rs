//! The sockets of a store's volumes and snapshots in a directory, and who is connected to them.

use super::client::{Client, ClientInfo};
use super::queue::{Message, Queues};
use super::session::{OtherVolume, Session};
use dbs_core::info::HolderKind;
use dbs_core::{Error, Result, Store};
use dbs_frontend::{
    Acceptor, Applicant, DiskOptions, Disks, Engine, Listen, Listener, OneDisk, Socket, StoreDisks,
    ToFront, half_of_descriptors, lock, raise_descriptors,
};
use dbs_service::log;
use nix::unistd::Uid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// Bytes of the path of a socket at most.
const PATH_MAX_BYTES: usize = 107;
/// Clients at a time at most: each has a thread.
const CLIENTS_MAX: usize = 1024;
/// How long the end of a client is waited for that is disconnected.
const PATIENCE: Duration = Duration::from_secs(5);
/// The thread that accepts has nothing else to do.
const NEVER: Duration = Duration::from_secs(1 << 20);

/// The reactors that serve queues.
type Queueing = Arc<Engine<Message>>;

/// Where the sockets are.
enum Place {
    /// One for each volume and snapshot, in a directory.
    Directory(PathBuf),
    /// The only one.
    Socket(PathBuf),
}

/// Disks of virtual machines: the volumes of a store, or one that something else carries the requests of out. Dropping it
/// stops it.
pub struct VhostUser {
    shared: Arc<Shared>,
    acceptor: Acceptor,
}

struct Shared {
    disks: Arc<dyn Disks>,
    place: Place,
    /// Started for the first client.
    engine: Mutex<Option<Queueing>>,
    start: Box<dyn Fn() -> io::Result<Engine<Message>> + Send + Sync>,
    /// By what they serve: the number that the acceptor knows them by.
    sockets: Mutex<BTreeMap<String, u64>>,
    next_socket: AtomicU64,
    clients: Mutex<BTreeMap<u64, Arc<Client>>>,
    /// A client has gone.
    gone: Condvar,
    stopping: AtomicBool,
}

impl VhostUser {
    /// Makes a socket for each volume and snapshot of a store, in a directory.
    ///
    /// # Errors
    /// The directory is not private, or somebody else listens on one of the sockets.
    pub fn start(store: Store, directory: PathBuf, serving: DiskOptions) -> Result<Self> {
        prepare(&directory)?;
        let serving = Arc::new(serving);
        let disks = StoreDisks::new(store.clone(), HolderKind::VhostUser, Arc::clone(&serving));
        let start = move || {
            let make = |requests, post| Queues::new(requests, post, 0);
            Engine::start("vhost", &store, &serving, make, || Message::End)
        };
        Self::serve(Arc::new(disks), Place::Directory(directory), Box::new(start))
    }

    /// Makes the only socket of a disk whose requests are carried out by others: by reactors that have a
    /// [`front`](crate::front) each, which `to` reaches.
    ///
    /// # Errors
    /// Somebody else listens on the socket.
    pub fn hosted(disk: OneDisk, socket: PathBuf, reactors: usize, to: ToFront) -> Result<Self> {
        if socket.as_os_str().len() > PATH_MAX_BYTES {
            let path = socket.display();
            return Err(Error::invalid(format!("{path} is longer than a socket's path can be")));
        }
        let start = move || Ok(Engine::hosted(reactors, &to));
        Self::serve(Arc::new(disk), Place::Socket(socket), Box::new(start))
    }

    fn serve(
        disks: Arc<dyn Disks>,
        place: Place,
        start: Box<dyn Fn() -> io::Result<Engine<Message>> + Send + Sync>,
    ) -> Result<Self> {
        raise_descriptors();
        let shared = Arc::new(Shared {
            disks,
            place,
            engine: Mutex::default(),
            start,
            sockets: Mutex::default(),
            next_socket: AtomicU64::new(0),
            clients: Mutex::default(),
            gone: Condvar::new(),
            stopping: AtomicBool::new(false),
        });
        let failed = |e| Error::io(e, "starting the vhost-user server");
        let acceptor = Acceptor::start("vhost-user", NEVER, || {}).map_err(failed)?;
        let this = Self { shared, acceptor };
        match this.shared.look(&this.acceptor).into_iter().next() {
            None => Ok(this),
            Some(error) => {
                this.stop();
                Err(error)
            }
        }
    }

    /// Where the sockets are, or the only one is.
    #[must_use]
    pub fn path(&self) -> &Path {
        match &self.shared.place {
            Place::Directory(path) | Place::Socket(path) => path,
        }
    }

    /// Makes sockets for what has come, removes those of what has gone, and tells clients of new sizes: to be called when
    /// a command has changed something.
    pub fn follow(&self) {
        for error in self.shared.look(&self.acceptor) {
            log::warn("vhost-user", &[("error", &error)]);
        }
        lock(&self.shared.clients).values().for_each(|client| client.follow());
    }

    /// Who is connected.
    #[must_use]
    pub fn clients(&self) -> Vec<ClientInfo> {
        lock(&self.shared.clients).values().map(|client| client.info()).collect()
    }

    /// Disconnects a client, and waits until nothing of it is left; whether it was there.
    #[must_use]
    pub fn kick(&self, id: u64) -> bool {
        let clients = lock(&self.shared.clients);
        let Some(client) = clients.get(&id) else { return false };
        client.end();
        let there = |clients: &mut BTreeMap<u64, Arc<Client>>| clients.contains_key(&id);
        drop(self.shared.gone.wait_timeout_while(clients, PATIENCE, there));
        true
    }

    /// Ends all connections when what is under way is done; requests that take long are left to the next server.
    pub fn stop(&self) {
        let shared = &self.shared;
        shared.stopping.store(true, Ordering::SeqCst);
        self.acceptor.stop();
        let clients = lock(&shared.clients);
        clients.values().for_each(|client| client.end());
        drop(dbs_frontend::wait_while(&shared.gone, clients, |clients| !clients.is_empty()));
        let engine = lock(&shared.engine).take();
        engine.iter().for_each(|engine| engine.stop(|| Message::End));
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    /// Makes the sockets be those of what there is; what has failed.
    fn look(self: &Arc<Self>, acceptor: &Acceptor) -> Vec<Error> {
        let mut sockets = lock(&self.sockets);
        let wanted = self.wanted();
        sockets.retain(|spec, number| {
            let stays = wanted.contains(spec);
            if !stays {
                acceptor.remove(*number);
            }
            stays
        });
        let mut failed = Vec::new();
        for spec in wanted {
            if sockets.contains_key(&spec) {
                continue;
            }
            let number = self.next_socket.fetch_add(1, Ordering::Relaxed);
            match self.listen(acceptor, &spec, number, sockets.len()) {
                Ok(true) => drop(sockets.insert(spec, number)),
                Ok(false) => {}
                Err(error) => failed.push(error),
            }
        }
        failed
    }

    /// What is to have a socket.
    fn wanted(&self) -> BTreeSet<String> {
        let specs = self.disks.subjects().into_iter().map(|it| (it.to_string(), it.volume));
        let allowed = specs.filter(|(spec, volume)| {
            self.disks.access(volume, &address(&self.path(spec))).is_some()
        });
        allowed.map(|(spec, _)| spec).collect()
    }

    /// The socket of a volume or snapshot. What cannot be in the name of a file is written as in an URL.
    fn path(&self, spec: &str) -> PathBuf {
        match &self.place {
            Place::Socket(path) => path.clone(),
            Place::Directory(directory) => {
                let name = spec.replace('%', "%25").replace('/', "%2F");
                directory.join(format!("{name}.sock"))
            }
        }
    }

    fn listen(
        self: &Arc<Self>,
        acceptor: &Acceptor,
        spec: &str,
        number: u64,
        sockets: usize,
    ) -> Result<bool> {
        let path = self.path(spec);
        let why = if path.as_os_str().len() > PATH_MAX_BYTES {
            "its path would be longer than 107 bytes"
        } else if sockets >= half_of_descriptors() {
            "half of the open files that the process may have are sockets: see `ulimit -Hn`"
        } else {
            let listener = Listener::bind(&Listen::Unix(path));
            let listener = listener.map_err(|e| Error::io(e, "serving virtual machines"))?;
            let (shared, spec) = (Arc::clone(self), spec.to_owned());
            acceptor.add(number, vec![listener], move |socket, _| shared.adopt(socket, &spec));
            return Ok(true);
        };
        log::warn("vhost-user", &[("no_socket_for", &spec), ("why", &why)]);
        Ok(false)
    }

    /// Takes a connection to the socket of a volume or snapshot.
    fn adopt(self: &Arc<Self>, socket: Socket, spec: &str) {
        let process = socket.peer_process();
        let Socket::Unix(stream) = socket else { return };
        let (shared, spec) = (Arc::clone(self), spec.to_owned());
        let spawned = thread::Builder::new().name("vhost-session".to_owned()).spawn(move || {
            if let Err(error) = shared.serve(stream, &spec, process) {
                log::warn("vhost-user", &[("volume", &spec), ("error", &error)]);
            }
        });
        if let Err(error) = spawned {
            log::error("vhost-user", &[("error", &error)]);
        }
    }

    fn serve(&self, socket: UnixStream, spec: &str, process: Option<u32>) -> Result<()> {
        let failed = |e| Error::io(e, "serving a virtual machine");
        let client = Arc::new(self.open(&socket, spec, process)?);
        let engine = self.register(&client)?;
        log::info("vhost-user", &[("connected", &client.who), ("volume", &spec)]);
        let ended = Session::new(socket, Arc::clone(&client), engine).run();
        log::info("vhost-user", &[("disconnected", &client.who), ("volume", &spec)]);
        lock(&self.clients).remove(&client.id);
        drop(client);
        self.gone.notify_all();
        match ended {
            // A process that is killed.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
            Err(error) => match error.get_ref().and_then(|e| e.downcast_ref::<OtherVolume>()) {
                Some(OtherVolume(uuid)) => Err(Error::busy(self.of_another(uuid))),
                None => Err(failed(error)),
            },
            Ok(()) => Ok(()),
        }
    }

    /// What to say to a machine that knows the disk here as the volume or snapshot with this uuid.
    fn of_another(&self, uuid: &str) -> String {
        let found = self.disks.subjects().into_iter().find(|subject| subject.uuid == uuid);
        let now = match found.map(|subject| subject.to_string()) {
            Some(spec) => format!(
                "which is called `{spec}` now: give it back the name that it had, and the machine goes on; or shut the \
                 machine down, and start it with {}",
                self.path(&spec).display()
            ),
            None => "which is not here any more: shut the machine down".to_owned(),
        };
        format!(
            "the requests that the machine has under way are of another volume (uuid {uuid}), {now}. None of them was \
             carried out here"
        )
    }

    fn open(&self, socket: &UnixStream, spec: &str, process: Option<u32>) -> Result<Client> {
        let (id, path) = (self.disks.number(), self.path(spec));
        let (name, snapshot) = spec.split_once('@').map_or((spec, None), |(v, s)| (v, Some(s)));
        let subject = self.disks.subject(name, snapshot)?;
        let mut who = format!("virtual machine at {}", path.display());
        if let Some(process) = process {
            who = format!("{who} (process {process})");
        }
        let remedy = format!("shut it down first, or disconnect it with `dbs clients kick {id}`");
        let by = Applicant { id, who: &who, from: &address(&path), remedy: &remedy };
        let opened = self.disks.open(&subject, &by, &self.stopping)?;
        let clone = socket.try_clone().map_err(|e| Error::io(e, "a connection"))?;
        Ok(Client::new((id, who), opened, clone))
    }

    /// Makes a client known.
    fn register(&self, client: &Arc<Client>) -> Result<Queueing> {
        let mut clients = lock(&self.clients);
        if self.stopping.load(Ordering::SeqCst) || clients.len() >= CLIENTS_MAX {
            return Err(Error::busy("the server is stopping, or has 1024 clients"));
        }
        let mut engine = lock(&self.engine);
        let engine = match &*engine {
            Some(engine) => Arc::clone(engine),
            None => {
                let started = (self.start)().map(Arc::new);
                let started = started.map_err(|e| Error::io(e, "starting threads for queues"))?;
                Arc::clone(engine.insert(started))
            }
        };
        clients.insert(client.id, Arc::clone(client));
        Ok(engine)
    }
}

/// Makes the directory of the sockets, or sees that it is private; and removes what a server has left there that was
/// killed.
fn prepare(directory: &Path) -> Result<()> {
    let named = |e| Error::io(e, format!("the directory for sockets {}", directory.display()));
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(named(error)),
        _ => {}
    }
    let meta = fs::metadata(directory).map_err(named)?;
    if !meta.is_dir() || meta.uid() != Uid::effective().as_raw() || meta.mode() & 0o077 != 0 {
        return Err(Error::invalid(format!(
            "{} is not private: who gets to a socket in it may read and write the volume. It must be a directory of \
             the user who serves the store, and nobody else's (`chmod 700`)",
            directory.display()
        )));
    }
    for entry in fs::read_dir(directory).map_err(named)?.flatten() {
        let path = entry.path();
        let is_ours = path.extension().is_some_and(|extension| extension == "sock")
            && entry.file_type().is_ok_and(|kind| kind.is_socket());
        if is_ours
            && UnixStream::connect(&path)
                .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        {
            fs::remove_file(&path).map_err(named)?;
        }
    }
    Ok(())
}

/// A socket as rules of access know it.
fn address(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}
