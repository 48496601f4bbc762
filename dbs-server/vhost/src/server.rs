//! The sockets of a store's volumes and snapshots in a directory, and who is connected to them.

use super::client::{Client, ClientInfo};
use super::engine::Engine;
use super::session::{OtherVolume, Session};
use dbs_core::info::{Holder, HolderInfo, HolderKind, VolumeInfo};
use dbs_core::units::VolumeId;
use dbs_core::{Error, Result, Store};
use dbs_frontend::{Acceptor, Listen, Listener, Socket, lock, raise_descriptors};
use dbs_service::log;
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::Uid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of the path of a socket at most.
const PATH_MAX_BYTES: usize = 107;
/// Clients at a time at most: each has a thread.
const CLIENTS_MAX: usize = 1024;
/// How long who wants to write a volume waits for who writes it.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it looks for writers who are no machines.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// The thread that accepts has nothing else to do.
const NEVER: Duration = Duration::from_secs(1 << 20);

/// What may be done with a volume by who connects to a socket: nothing, or only reading (`true`), or all.
pub type Access = Box<dyn Fn(&str, &Path) -> Option<bool> + Send + Sync>;

/// How to serve.
pub struct VhostOptions {
    /// Where the sockets are.
    pub directory: PathBuf,
    /// Threads that serve queues.
    pub reactors: usize,
    /// How they do I/O.
    pub reactor: dbs_reactor::Options,
    /// Threads for requests that have to wait.
    pub workers: usize,
    /// Which volumes have sockets.
    pub access: Access,
    /// Numbers for clients.
    pub number: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Nothing is written to the store.
    pub read_only: bool,
}

/// The volumes of a store, served to virtual machines. Dropping it stops it.
pub struct VhostUser {
    shared: Arc<Shared>,
    acceptor: Acceptor,
}

struct Shared {
    store: Store,
    options: VhostOptions,
    /// Started for the first client.
    engine: Mutex<Option<Arc<Engine>>>,
    /// By what they serve: the number that the acceptor knows them by.
    sockets: Mutex<BTreeMap<String, u64>>,
    next_socket: AtomicU64,
    clients: Mutex<BTreeMap<u64, Arc<Client>>>,
    /// Whose guests are to be told that a server before lost what it had acknowledged, by the volume.
    lost: Mutex<BTreeMap<VolumeId, Arc<AtomicBool>>>,
    /// A client has gone.
    gone: Condvar,
    stopping: AtomicBool,
}

impl VhostUser {
    /// Makes a socket for each volume and snapshot.
    ///
    /// # Errors
    /// The directory is not private, or somebody else listens on one of the sockets.
    pub fn start(store: Store, options: VhostOptions) -> Result<Self> {
        prepare(&options.directory)?;
        raise_descriptors();
        let shared = Arc::new(Shared {
            store,
            options,
            engine: Mutex::default(),
            sockets: Mutex::default(),
            next_socket: AtomicU64::new(0),
            clients: Mutex::default(),
            lost: Mutex::default(),
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

    /// Where the sockets are.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.shared.options.directory
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
        // The threads of connections let go of it right after.
        let engine = lock(&shared.engine).take();
        if let Some(engine) = engine.and_then(Engine::alone) {
            engine.stop();
        }
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
        let mut wanted = BTreeSet::new();
        for volume in self.store.volumes(false) {
            let allowed =
                |spec: &String| (self.options.access)(&volume.name, &self.path(spec)).is_some();
            // One that has gone since has no snapshots.
            let snapshots = self.store.snapshots(&volume.name, false).unwrap_or_default();
            let of_snapshots = snapshots.iter().map(|s| format!("{}@{}", volume.name, s.name));
            wanted.extend(of_snapshots.filter(allowed));
            if !volume.rebuilding && allowed(&volume.name) {
                wanted.insert(volume.name);
            }
        }
        wanted
    }

    /// The socket of a volume or snapshot. What cannot be in the name of a file is written as in an URL.
    fn path(&self, spec: &str) -> PathBuf {
        let name = spec.replace('%', "%25").replace('/', "%2F");
        self.options.directory.join(format!("{name}.sock"))
    }

    fn listen(
        self: &Arc<Self>,
        acceptor: &Acceptor,
        spec: &str,
        number: u64,
        sockets: usize,
    ) -> Result<bool> {
        let path = self.path(spec);
        let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft / 2);
        let why = if path.as_os_str().len() > PATH_MAX_BYTES {
            "its path would be longer than 107 bytes"
        } else if sockets as u64 >= most {
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
        let has_lost = || Arc::new(AtomicBool::new(self.store.lost_tail().is_some()));
        let lost = lock(&self.lost).entry(client.volume.id()).or_insert_with(has_lost).clone();
        let ended = Session::new(socket, Arc::clone(&client), engine, lost).run();
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
        let of_volume = |volume: VolumeInfo| {
            let snapshots = self.store.snapshots(&volume.name, false).unwrap_or_default();
            let snapshot = snapshots.into_iter().find(|snapshot| snapshot.uuid == uuid);
            let snapshot = snapshot.map(|snapshot| format!("{}@{}", volume.name, snapshot.name));
            snapshot.or((volume.uuid == uuid).then_some(volume.name))
        };
        let now = match self.store.volumes(false).into_iter().find_map(of_volume) {
            Some(spec) => format!(
                "which is called `{spec}` now: give it back the name that it had, and the machine goes on; or shut the \
                 machine down, and start it with {}",
                self.path(&spec).display()
            ),
            None => "which is not in the store any more: shut the machine down".to_owned(),
        };
        format!(
            "the requests that the machine has under way are of another volume (uuid {uuid}), {now}. None of them was \
             carried out here"
        )
    }

    fn start_engine(&self) -> io::Result<Engine> {
        let VhostOptions { reactors, reactor, workers, .. } = &self.options;
        Engine::start(&self.store, *reactors, reactor, *workers)
    }

    fn open(&self, socket: &UnixStream, spec: &str, process: Option<u32>) -> Result<Client> {
        let (id, path) = ((self.options.number)(), self.path(spec));
        let (name, snapshot) = spec.split_once('@').map_or((spec, None), |(v, s)| (v, Some(s)));
        let uuid = self.uuid(name, snapshot)?;
        let access = (self.options.access)(name, &path);
        let asked = access.ok_or_else(|| Error::not_found(format!("no volume `{name}`")))?;
        let read_only = self.options.read_only || asked || snapshot.is_some();
        if !read_only {
            self.wait_for_writers(name)?;
        }
        let mut who = format!("virtual machine at {}", path.display());
        if let Some(process) = process {
            who = format!("{who} (process {process})");
        }
        let holder = Holder {
            kind: HolderKind::VhostUser,
            who: who.clone(),
            id: Some(id),
            writes: !read_only,
            alone: !read_only,
            remedy: format!("shut it down first, or disconnect it with `dbs clients kick {id}`"),
        };
        let volume = self.store.volume_for(spec, holder)?.complete()?;
        // It is held from here on, and may have another name than when the machine came: another may have that.
        let its = |held: &HolderInfo| {
            held.holder.kind == HolderKind::VhostUser && held.holder.id == Some(id)
        };
        let own = self.store.holders().into_iter().find(its);
        let found = own.and_then(|own| self.uuid(&own.volume, own.snapshot.as_deref()).ok());
        if found.as_ref() != Some(&uuid) {
            return Err(Error::busy(format!("`{spec}` has got another name meanwhile")));
        }
        let read_only = read_only || volume.read_only();
        let clone = socket.try_clone().map_err(|e| Error::io(e, "a connection"))?;
        Ok(Client::new((id, who), volume, read_only, uuid, clone))
    }

    fn uuid(&self, volume: &str, snapshot: Option<&str>) -> Result<String> {
        Ok(match snapshot {
            Some(snapshot) => self.store.snapshot_info(volume, snapshot)?.uuid,
            None => self.store.volume_info(volume)?.uuid,
        })
    }

    /// Who writes a volume and is no machine: whoever came for writing before a machine would go on.
    fn writer(&self, volume: &str) -> Option<HolderInfo> {
        self.store.holders().into_iter().find(|held| {
            let Holder { kind, alone, writes, .. } = held.holder;
            let same = held.snapshot.is_none() && held.volume == volume;
            (alone || writes) && kind != HolderKind::VhostUser && same
        })
    }

    /// Waits before the volume is held: one that is being ended has a moment for that.
    fn wait_for_writers(&self, volume: &str) -> Result<()> {
        let begun = Instant::now();
        while let Some(held) = self.writer(volume) {
            if begun.elapsed() > PATIENCE || self.stopping.load(Ordering::SeqCst) {
                return Err(written(&held.holder.who, &held.holder.remedy));
            }
            thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Makes a client known that nobody else writes beside.
    fn register(&self, client: &Arc<Client>) -> Result<Arc<Engine>> {
        // Whoever comes from now on finds the volume held. It may have another name than it was opened by.
        let its = |held: &HolderInfo| held.holder.id == Some(client.id) && held.holder.alone;
        let own = self.store.holders().into_iter().find(its);
        if let Some(held) = own.and_then(|own| self.writer(&own.volume)) {
            return Err(written(&held.holder.who, &held.holder.remedy));
        }
        let same = |other: &&Arc<Client>| {
            !client.read_only && !other.read_only && other.volume.id() == client.volume.id()
        };
        let clients = lock(&self.clients);
        let waited = self.gone.wait_timeout_while(clients, PATIENCE, |clients| {
            clients.values().any(|other| same(&other))
        });
        let mut clients = waited.unwrap_or_else(PoisonError::into_inner).0;
        if let Some(other) = clients.values().find(same) {
            return Err(written(&other.who, "shut that down first"));
        }
        if self.stopping.load(Ordering::SeqCst) || clients.len() >= CLIENTS_MAX {
            return Err(Error::busy("the server is stopping, or has 1024 clients"));
        }
        let mut engine = lock(&self.engine);
        let engine = match &*engine {
            Some(engine) => Arc::clone(engine),
            None => {
                let started = self.start_engine().map(Arc::new);
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

fn written(who: &str, remedy: &str) -> Error {
    Error::busy(format!("it is written by the {who}; {remedy}"))
}
