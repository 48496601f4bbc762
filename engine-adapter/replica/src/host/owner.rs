//! Who owns the store in a replica's directory: its control sockets and housekeeping, from the
//! moment it is opened to the moment it is closed or handed over.

use super::file::{Growth, StoreFile};
use super::guard;
use super::handover::{OtherProcess, RELEASE, STATE, SocketPath};
use crate::replica::{OpenStore, Predecessor, Replica};
use crate::upstream::serve::SOURCE;
use dbs_control::api::{Progress, Request};
use dbs_control::{Extra, Service, socket_path};
use dbs_core::{Error, ErrorKind, Result, Store};
use dbs_nbd::{ServerHandle, ServerOptions, StoreExports};
use dbs_server::serve::{Housekeeping, execute_logged, key_of};
use dbs_service::log;
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long the store may be held by a process that is about to end.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two attempts at opening it.
const OPEN_PAUSE: Duration = Duration::from_millis(20);

/// A session that takes over a control connection, offered besides those of the owner.
pub type Offer = Box<dyn Fn(&str, &Value) -> Result<Option<Extra>> + Send + Sync>;

/// The owner. Its store comes and goes.
pub struct Owner {
    file: StoreFile,
    runtime_dir: PathBuf,
    interval: Duration,
    me: Weak<Self>,
    replica: OnceLock<Weak<Replica>>,
    offer: OnceLock<Offer>,
    /// One end at a time.
    giving: Mutex<()>,
    state: Mutex<State>,
    /// Stores handed over on request.
    released: AtomicU64,
}

#[derive(Default)]
struct State {
    owned: Option<Owned>,
    /// Control servers of a store that was handed over: they finish what they are at.
    retired: Vec<dbs_control::Server>,
    ended: bool,
}

/// A store that is open here.
struct Owned {
    store: Store,
    control: Vec<dbs_control::Server>,
    /// Keeps the path of one of them valid.
    _socket: Option<SocketPath>,
    housekeeping: Housekeeping,
    /// For commands that move data; started by the first.
    nbd: Option<Arc<ServerHandle>>,
}

impl Owner {
    /// The owner of the store in this file, which is not opened yet.
    #[must_use]
    pub fn new(file: StoreFile, runtime_dir: PathBuf, interval: Duration) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            file,
            runtime_dir,
            interval,
            me: me.clone(),
            replica: OnceLock::new(),
            offer: OnceLock::new(),
            giving: Mutex::default(),
            state: Mutex::default(),
            released: AtomicU64::new(0),
        })
    }

    /// Names the replica that works on the store, which others may ask for.
    pub fn serves(&self, replica: &Arc<Replica>) {
        let _once = self.replica.set(Arc::downgrade(replica));
    }

    /// Offers further methods on the control sockets.
    pub fn offers(&self, offer: Offer) {
        let _once = self.offer.set(offer);
    }

    /// Stores handed over on request.
    #[must_use]
    pub fn released(&self) -> u64 {
        self.released.load(Ordering::SeqCst)
    }

    /// Opens the store, made for a volume of this size if it is absent, and keeps house from then
    /// on.
    ///
    /// # Errors
    /// `Busy` if another process has it, those of the store.
    pub fn open(&self, size: Option<u64>) -> Result<Store> {
        let store = self.file.open_or_create(size)?;
        self.take(&store)?;
        Ok(store)
    }

    /// Opens the store once the process that has it has closed it.
    ///
    /// # Errors
    /// `Busy` if it does not, those of the store.
    pub fn open_released(&self) -> Result<Store> {
        let deadline = Instant::now() + OPEN_TIMEOUT;
        loop {
            match self.file.open() {
                Err(e) if e.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                    std::thread::sleep(OPEN_PAUSE);
                }
                result => {
                    let store = result?;
                    self.take(&store)?;
                    return Ok(store);
                }
            }
        }
    }

    fn take(&self, store: &Store) -> Result<()> {
        let mut state = self.state();
        if state.ended {
            drop(state);
            store.clone().close()?;
            return Err(Error::busy("the process is about to end"));
        }
        for warning in &store.info().warnings {
            log::warn("store", &[("warning", warning)]);
        }
        let chore = {
            let (me, growth) = (self.me.clone(), Growth::default());
            Arc::new(move || {
                if let Some(owner) = me.upgrade() {
                    owner.look_at_space(&growth);
                }
            })
        };
        let housekeeping =
            Housekeeping::start_with(store.clone(), Some(self.interval), Some(chore))?;
        let (control, socket) = self.listen(store);
        let store = store.clone();
        state.owned = Some(Owned { store, control, _socket: socket, housekeeping, nbd: None });
        Ok(())
    }

    /// Control sockets: in the runtime directory for commands, in the replica's for a successor.
    /// Without them the replica works as well.
    fn listen(&self, store: &Store) -> (Vec<dbs_control::Server>, Option<SocketPath>) {
        let service: Arc<dyn Service> = Arc::new(OwnerService { owner: self.me.clone() });
        let mut servers = Vec::new();
        let default = socket_path(&self.runtime_dir, &store.key().unwrap_or_default());
        match dbs_control::Server::start(&default, Arc::clone(&service)) {
            Ok(server) => servers.push(server),
            Err(e) => log::error("control", &[("path", &default.display()), ("error", &e)]),
        }
        let directory = self.file.path.parent().unwrap_or(std::path::Path::new("."));
        let socket = SocketPath::of(directory).and_then(|socket| {
            servers.push(dbs_control::Server::start_at(socket.as_path(), service)?);
            Ok(socket)
        });
        match socket {
            Ok(socket) => (servers, Some(socket)),
            Err(e) => {
                log::error("control", &[("path", &directory.display()), ("error", &e)]);
                (servers, None)
            }
        }
    }

    fn look_at_space(&self, growth: &Growth) {
        let Ok(store) = self.store() else { return };
        let volume = store.volumes(false).iter().map(|volume| volume.size).max();
        growth.look(&store, volume.unwrap_or(0));
    }

    /// The store, if it is open here.
    ///
    /// # Errors
    /// `Busy` if it is not.
    pub fn store(&self) -> Result<Store> {
        let state = self.state();
        let owned = state.owned.as_ref();
        owned.map(|owned| owned.store.clone()).ok_or_else(|| {
            Error::busy("the store was handed over to a newer process of the replica")
        })
    }

    /// Gives the store up to another process: ends I/O, commits, closes it.
    ///
    /// # Errors
    /// `Busy` if it is not open here. Those of closing it: then it is as after a crash, which
    /// loses nothing.
    pub fn release(&self) -> Result<()> {
        let begun = Instant::now();
        self.give_up(self.way_back())?;
        self.released.fetch_add(1, Ordering::SeqCst);
        let took = format!("{:.3}", begun.elapsed().as_secs_f64());
        log::info("released", &[("store", &self.file.path.display()), ("seconds", &took)]);
        Ok(())
    }

    /// How the store is had again from the process that it goes to.
    fn way_back(&self) -> Option<(Box<dyn Predecessor>, OpenStore)> {
        let other = OtherProcess::of(self.file.path.parent()?);
        let me = self.me.clone();
        let open = Box::new(move || match me.upgrade() {
            Some(owner) => owner.open_released(),
            None => Err(Error::busy("the process is about to end")),
        });
        Some((Box::new(other), open))
    }

    fn give_up(&self, back: Option<(Box<dyn Predecessor>, OpenStore)>) -> Result<()> {
        let _giving = self.giving.lock().unwrap_or_else(PoisonError::into_inner);
        let replica = self.replica.get().and_then(Weak::upgrade);
        // The state is not locked meanwhile: ending I/O may take calls that look for the store.
        let Some(owned) = self.state().owned.take() else {
            return Err(Error::busy("the store is not open here"));
        };
        owned.control.iter().for_each(dbs_control::Server::retire);
        if let Some(replica) = replica
            && let Err(e) = replica.surrender(back)
        {
            log::warn("surrender", &[("error", &e)]);
            replica.let_go();
        }
        owned.housekeeping.stop();
        if let Some(nbd) = owned.nbd.and_then(Arc::into_inner) {
            nbd.stop();
        }
        let closed = owned.store.close();
        self.state().retired.extend(owned.control);
        closed.map_err(|e| e.context("closing the store"))
    }

    /// Closes the store, if it is open here, and everything around it.
    ///
    /// # Errors
    /// As [`Owner::release`].
    pub fn end(&self) -> Result<()> {
        self.state().ended = true;
        let result = match self.give_up(None) {
            Err(e) if e.kind() == ErrorKind::Busy => Ok(()),
            result => result,
        };
        let retired = std::mem::take(&mut self.state().retired);
        retired.into_iter().for_each(dbs_control::Server::stop);
        result
    }

    fn nbd(&self) -> Result<Arc<ServerHandle>> {
        let mut state = self.state();
        let gone = || Error::busy("the store was handed over to a newer process");
        let owned = state.owned.as_mut().ok_or_else(gone)?;
        if let Some(nbd) = &owned.nbd {
            return Ok(Arc::clone(nbd));
        }
        // For reading only: the volume is the engine's to write.
        let exports = Arc::new(StoreExports::new(owned.store.clone(), true));
        let options = ServerOptions {
            reactors: 1,
            workers: 4,
            log: Some(Arc::new(|line: &str| log::warn("nbd", &[("message", &line)]))),
            ..ServerOptions::default()
        };
        let nbd = dbs_nbd::start(&[], exports, options);
        let nbd = Arc::new(nbd.map_err(|e| Error::io(e, "starting the NBD server"))?);
        owned.nbd = Some(Arc::clone(&nbd));
        Ok(nbd)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the control sockets offer.
struct OwnerService {
    owner: Weak<Owner>,
}

impl OwnerService {
    fn owner(&self) -> Result<Arc<Owner>> {
        self.owner.upgrade().ok_or_else(|| Error::busy("the process is about to end"))
    }
}

impl Service for OwnerService {
    fn key(&self) -> Result<String> {
        key_of(&self.owner()?.store()?)
    }

    fn execute(
        &self,
        request: &Request,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Value> {
        let owner = self.owner()?;
        let replica = owner.replica.get().and_then(Weak::upgrade);
        guard::check(request, &|volume| {
            replica.as_ref().is_some_and(|replica| {
                replica.volume_name() == volume
                    // Where upstream's snapshots are until the replica's volume has them.
                    || (volume == SOURCE && replica.taking_progress().is_some())
            })
        })?;
        if matches!(request, Request::Vacuum { .. }) {
            return Err(Error::unsupported(
                "the store of a replica that is being served cannot be shortened; its file is \
                 sparse, and takes no more of the disk than what is stored",
            ));
        }
        execute_logged(&owner.store()?, request, progress)
    }

    fn dump(&self, out: &mut dyn Write) -> Result<()> {
        self.owner()?.store()?.dump(out)
    }

    fn nbd(&self, stream: UnixStream) {
        let adopted = self
            .owner()
            .and_then(|owner| owner.nbd()?.adopt(stream).map_err(|e| Error::io(e, "serving NBD")));
        if let Err(e) = adopted {
            log::warn("nbd", &[("error", &e)]);
        }
    }

    fn extra(&self, method: &str, params: &Value) -> Result<Option<Extra>> {
        let owner = self.owner()?;
        match method {
            STATE => {
                let replica = owner.replica.get().and_then(Weak::upgrade);
                let replica = replica.ok_or_else(|| Error::busy("no replica is served yet"))?;
                Ok(Some(Extra::Answer(json!(replica.export_state()?))))
            }
            RELEASE => {
                owner.release()?;
                Ok(Some(Extra::Answer(Value::Null)))
            }
            _ => owner.offer.get().map_or(Ok(None), |offer| offer(method, params)),
        }
    }
}
