//! Replicas in a store that this process serves: each for as long as the shim that came with its
//! sockets stays connected.

use super::hosted::{Hosted, OlderReplica, What};
use super::options::Options;
use super::protocol::{self, Expected, REPLICA, STEP_TIMEOUT, SYNC_AGENT};
use super::registry::{Registry, volume_of};
use super::served::{Common, Served, ServedAgent};
use super::sockets::{Sockets, receivers_from, tcp};
use super::{fds, sessions};
use crate::metrics;
use crate::replica::{Replica, StoreSource};
use dbs_control::api::Request;
use dbs_control::{Extra, Failure, Reply};
use dbs_core::info::{Holder, HolderKind};
use dbs_core::volume::Claim;
use dbs_core::{Error, ErrorKind, Result, Store};
use dbs_server::serve::Extension;
use dbs_service::log;
use longhorn_data::DataOptions;
use longhorn_wire::control::Identity;
use longhorn_wire::transport;
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

mod holds;

/// Between two looks whether a replica that is ending has ended.
const ENDING_PAUSE: Duration = Duration::from_millis(10);
/// How often is looked whether all servers still serve.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// How long the end waits for a look at directories.
const SWEEP_PATIENCE: Duration = Duration::from_secs(1);

/// The replicas of one store.
pub struct Hosting {
    store: Store,
    data: DataOptions,
    me: Weak<Self>,
    registry: Registry,
    /// Started for the first replica.
    common: Mutex<Option<Arc<Common>>>,
    state: Mutex<State>,
    /// How often a volume has passed to a newer replica.
    handovers: Arc<AtomicU64>,
    watch: Mutex<Option<(mpsc::Sender<()>, JoinHandle<()>)>>,
}

#[derive(Default)]
struct State {
    /// In the order in which they came: a later one of the same volume succeeds an earlier one.
    replicas: Vec<Arc<Hosted>>,
    /// Of each, by its number: that its volume is its own, for the store to tell others.
    claims: HashMap<u64, Claim>,
    next: u64,
    stopping: bool,
    /// Volumes of which a replica is about to be served, or which are deleted with their directories.
    starting: BTreeSet<String>,
    /// Volumes that running commands change or make, each once for each of them.
    commanded: Vec<String>,
}

impl Hosting {
    /// Replicas in `store`, with threads for data connections as `data` says; looks for vanished
    /// directories at this interval.
    ///
    /// # Errors
    /// `Io` if there is no thread for it.
    pub fn start(store: Store, data: DataOptions, sweep: Duration) -> Result<Arc<Self>> {
        let registry = Registry::new(&store.info().uuid);
        let hosting = Arc::new_cyclic(|me| Self {
            store,
            data,
            me: me.clone(),
            registry,
            common: Mutex::default(),
            state: Mutex::default(),
            handovers: Arc::default(),
            watch: Mutex::default(),
        });
        let (stop, stopped) = mpsc::channel();
        let watched = Arc::downgrade(&hosting);
        let thread = thread::Builder::new()
            .name("replicas".to_owned())
            .spawn(move || watch(&watched, &stopped, sweep))
            .map_err(|e| Error::io(e, "starting the thread that watches replicas"))?;
        *lock(&hosting.watch) = Some((stop, thread));
        Ok(hosting)
    }

    /// Metrics of the store and its replicas.
    #[must_use]
    pub fn metrics(&self) -> String {
        let replicas = self.replicas();
        let sources: Vec<_> = replicas.iter().filter_map(|hosted| hosted.measure()).collect();
        metrics::text(Some(&self.store), &sources, self.handovers.load(Ordering::SeqCst))
    }

    /// What replicas share, started if it is not there yet.
    ///
    /// # Errors
    /// `Io` if its threads cannot be had.
    pub fn common(&self) -> Result<Arc<Common>> {
        let mut common = lock(&self.common);
        if let Some(common) = &*common {
            return Ok(Arc::clone(common));
        }
        let started = Arc::new(Common::start(self.data.clone())?);
        *common = Some(Arc::clone(&started));
        Ok(started)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn replicas(&self) -> Vec<Arc<Hosted>> {
        self.state().replicas.clone()
    }

    /// The newest replica of a volume that has not been succeeded.
    fn newest(&self, volume: &str) -> Option<Arc<Hosted>> {
        let state = self.state();
        let newest = state.replicas.iter().rev().find(|hosted| {
            hosted.volume == volume && !hosted.is_succeeded() && hosted.is_replica()
        });
        newest.cloned()
    }

    /// As [`Hosting::newest`], once one that is ending has ended.
    fn newest_to_stay(&self, volume: &str) -> Result<Option<Arc<Hosted>>> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            match self.newest(volume) {
                Some(hosted) if hosted.is_ending() => {
                    if Instant::now() >= deadline {
                        let text =
                            format!("the replica of `{volume}` that was served does not end");
                        return Err(Error::busy(text));
                    }
                    thread::sleep(ENDING_PAUSE);
                }
                other => return Ok(other),
            }
        }
    }

    /// A shim's session, from its sockets to the moment they are served.
    fn session(&self, stream: UnixStream, request: &protocol::Replica) {
        let begun = Instant::now();
        let hosted = receive(&stream, request.descriptors())
            .and_then(|files| self.serve_replica(&stream, request, files));
        let took = format!("{:.3}", begun.elapsed().as_secs_f64());
        let dir = request.options.dir.display();
        match &hosted {
            Ok(hosted) => log::info(
                "replica",
                &[("directory", &dir), ("volume", &hosted.volume), ("seconds", &took)],
            ),
            Err(e) => log::warn("replica", &[("directory", &dir), ("error", e)]),
        }
        self.answer(stream, hosted);
    }

    /// Tells the shim how it went, and stays with it.
    fn answer(&self, stream: UnixStream, hosted: Result<Arc<Hosted>>) {
        let hosted = match hosted {
            Ok(hosted) => hosted,
            Err(e) => {
                // If it is gone it does not want to know.
                let _gone = protocol::reply(&stream, &Reply::Error(Failure::from(&e)));
                return;
            }
        };
        let served = Reply::Result(json!({ "volume": hosted.volume }));
        let me = self.me.clone();
        let stays =
            protocol::reply(&stream, &served).and_then(|()| self.common()).and_then(|common| {
                let id = hosted.id;
                sessions::when_over(common.runtime(), stream, move |stream| {
                    let Some(hosting) = me.upgrade() else { return };
                    hosting.end(id);
                    let _gone = protocol::reply(stream, &Reply::Result(Value::Null));
                })
            });
        if let Err(e) = stays {
            log::warn("replica", &[("volume", &hosted.volume), ("error", &e)]);
            self.end(hosted.id);
        }
    }

    fn serve_replica(
        &self,
        stream: &UnixStream,
        request: &protocol::Replica,
        files: Vec<OwnedFd>,
    ) -> Result<Arc<Hosted>> {
        transport::check_wanted(request.tls)?;
        let options = &request.options;
        let mut files = files.into_iter();
        check_directory(&options.dir, files.next())?;
        let sockets = Sockets::from_files(&mut files, request.unix, request.agent)?;
        let receivers = receivers_from(files)?;
        let volume = volume_of(&options.dir)?;
        let common = self.common()?;
        let stream = stream.try_clone().map_err(|e| Error::io(e, "keeping the connection"))?;

        let _starting = self.begin(&volume)?;
        let replica = Replica::new(options.replica(&volume, None), self.source(options, &volume)?)?;
        if let Some(size) = options.size {
            replica.create(size)?;
        }
        let served = Served::start(&common, Arc::clone(&replica), options, sockets, receivers)?;
        self.add(volume.clone(), replica, stream, What::Replica(served))
    }

    /// The store; from an older replica of the volume, if there is one.
    fn source(&self, options: &Options, volume: &str) -> Result<StoreSource> {
        let Some(older) = self.newest_to_stay(volume)? else {
            self.registry.admit(&self.store, &options.dir)?;
            let open = self.store.volumes(false).iter().any(|v| v.name == volume && v.open);
            if open {
                let mut holders = self.store.holders().into_iter();
                let holder = holders.find(|h| h.volume == volume && h.snapshot.is_none());
                let who = holder.map_or_else(|| "somebody".to_owned(), |h| h.holder.who);
                return Err(Error::busy(format!("the volume `{volume}` is in use by {who}")));
            }
            return Ok(StoreSource::Own(self.store.clone()));
        };
        log::info("predecessor", &[("volume", &volume)]);
        let older = OlderReplica { hosted: older, handovers: Arc::clone(&self.handovers) };
        Ok(older.source(self.store.clone()))
    }

    fn add(
        &self,
        volume: String,
        replica: Arc<Replica>,
        stream: UnixStream,
        what: What,
    ) -> Result<Arc<Hosted>> {
        let mut state = self.state();
        let id = state.next;
        state.next += 1;
        let hosted = Hosted::new(id, volume, replica, stream, what);
        if state.stopping {
            drop(state);
            hosted.stop();
            return Err(Error::busy("the server is about to end"));
        }
        let holder = Holder {
            kind: HolderKind::Replica,
            who: "a Longhorn replica".to_owned(),
            id: None,
            writes: true,
            alone: true,
            remedy: "change it through its engine, or stop the replica first".to_owned(),
        };
        let claim = self.store.claim(&hosted.volume, holder);
        state.claims.insert(id, claim);
        state.replicas.push(Arc::clone(&hosted));
        Ok(hosted)
    }

    /// Ends what was served for a shim.
    fn end(&self, id: u64) {
        let hosted = self.replicas().into_iter().find(|hosted| hosted.id == id);
        let Some(hosted) = hosted else { return };
        hosted.stop();
        // Not before: who comes meanwhile must find it, to take over from it.
        let mut state = self.state();
        state.replicas.retain(|other| other.id != id);
        state.claims.remove(&id);
        drop(state);
        log::info("replica-end", &[("volume", &hosted.volume)]);
    }

    /// A sync agent's session.
    fn agent_session(&self, stream: UnixStream, request: &protocol::SyncAgent) {
        let hosted = receive(&stream, request.descriptors())
            .and_then(|files| self.serve_agent(&stream, request, files));
        self.answer(stream, hosted);
    }

    fn serve_agent(
        &self,
        stream: &UnixStream,
        request: &protocol::SyncAgent,
        files: Vec<OwnedFd>,
    ) -> Result<Arc<Hosted>> {
        transport::check_wanted(request.tls)?;
        let mut files = files.into_iter();
        check_directory(&request.dir, files.next())?;
        let listener = tcp(files.next())?;
        let receivers = receivers_from(files)?;
        let volume = volume_of(&request.dir)?;
        let found = self.newest(&volume).map(|hosted| Arc::clone(&hosted.replica));
        let replica = found.ok_or_else(|| {
            Error::not_found(format!("no replica of `{}` is being served", request.dir.display()))
        })?;
        let others = self.replicas();
        if others.iter().any(|other| Arc::ptr_eq(&other.replica, &replica) && other.has_agent()) {
            return Err(Error::new(ErrorKind::Exists, "the replica has a sync agent already"));
        }
        let stream = stream.try_clone().map_err(|e| Error::io(e, "keeping the connection"))?;
        let identity = Identity::replica(&request.volume_name, &request.instance_name);
        let common = self.common()?;
        let agent =
            ServedAgent::start(&common, Arc::clone(&replica), &identity, listener, receivers)?;
        self.add(volume, replica, stream, What::Agent(agent))
    }
}

impl Extension for Hosting {
    fn command(&self, request: &Request, run: &mut dyn FnMut() -> Result<Value>) -> Result<Value> {
        let _no_replica_comes = self.begin_command(request)?;
        run()
    }

    fn extra(&self, method: &str, params: &Value) -> Result<Option<Extra>> {
        let invalid = |e: serde_json::Error| Error::invalid(format!("no request: {e}"));
        let Some(me) = self.me.upgrade() else { return Ok(None) };
        match method {
            REPLICA => {
                let request: protocol::Replica =
                    serde_json::from_value(params.clone()).map_err(invalid)?;
                let answer = expect(request.descriptors())?;
                let session = Box::new(move |stream| me.session(stream, &request));
                Ok(Some(Extra::Session(answer, session)))
            }
            SYNC_AGENT => {
                let request: protocol::SyncAgent =
                    serde_json::from_value(params.clone()).map_err(invalid)?;
                let answer = expect(request.descriptors())?;
                let session = Box::new(move |stream| me.agent_session(stream, &request));
                Ok(Some(Extra::Session(answer, session)))
            }
            _ => Ok(None),
        }
    }

    fn stop(&self) {
        self.state().stopping = true;
        if let Some((stop, thread)) = lock(&self.watch).take() {
            drop(stop);
            // A panic there has been reported already.
            let _panicked = thread.join();
        }
        let replicas = self.replicas();
        let stops: Vec<_> = replicas
            .iter()
            .map(|hosted| {
                let hosted = Arc::clone(hosted);
                thread::Builder::new().spawn(move || hosted.stop())
            })
            .collect();
        for stop in stops.into_iter().flatten() {
            let _panicked = stop.join();
        }
        // If there was no thread for one of them.
        replicas.iter().for_each(|hosted| hosted.stop());
        for hosted in replicas {
            hosted.hang_up();
        }
        let mut state = self.state();
        state.replicas.clear();
        state.claims.clear();
        drop(state);
        lock(&self.common).take();
    }
}

/// Looks after replicas and removed directories until told to stop.
fn watch(hosting: &Weak<Hosting>, stopped: &mpsc::Receiver<()>, sweep: Duration) {
    let mut swept: Option<Instant> = None;
    let mut sweeping: Option<JoinHandle<()>> = None;
    while stopped.recv_timeout(WATCH_INTERVAL.min(sweep)) == Err(RecvTimeoutError::Timeout) {
        let Some(hosting) = hosting.upgrade() else { return };
        for hosted in hosting.replicas() {
            if !hosted.is_running() {
                log::error("replica", &[("volume", &hosted.volume), ("error", &"a server ended")]);
                // Its shim's session ends with that.
                hosted.hang_up();
            }
        }
        let is_due = swept.is_none_or(|at| at.elapsed() >= sweep);
        if is_due && sweeping.as_ref().is_none_or(JoinHandle::is_finished) {
            swept = Some(Instant::now());
            // By itself: a directory whose file system hangs holds up nothing else, nor the end of the process.
            let swept = thread::Builder::new().name("sweep".to_owned()).spawn(move || {
                let Hosting { registry, store, .. } = &*hosting;
                registry.sweep(store, &|volume| hosting.serves(volume), &|volume| {
                    hosting.hold_unserved(volume)
                });
            });
            sweeping = swept.ok();
        }
    }
    let begun = Instant::now();
    while sweeping.as_ref().is_some_and(|sweeping| !sweeping.is_finished())
        && begun.elapsed() < SWEEP_PATIENCE
    {
        thread::sleep(ENDING_PAUSE);
    }
}

fn expect(descriptors: usize) -> Result<Value> {
    if descriptors > fds::MAX {
        return Err(Error::invalid(format!("{descriptors} sockets are too many to pass")));
    }
    Ok(json!(Expected { descriptors }))
}

pub(super) fn receive(stream: &UnixStream, count: usize) -> Result<Vec<OwnedFd>> {
    stream
        .set_read_timeout(Some(STEP_TIMEOUT))
        .map_err(|e| Error::io(e, "waiting for the shim's sockets"))?;
    fds::receive(stream, count)
}

/// Checks that the shim and this process mean the same directory.
pub(super) fn check_directory(path: &Path, file: Option<OwnedFd>) -> Result<()> {
    let file = file.ok_or_else(|| Error::invalid("the directory is missing"))?;
    let failed = |e| Error::io(e, format!("looking at `{}`", path.display()));
    let theirs = File::from(file).metadata().map_err(failed)?;
    let same = std::fs::metadata(path).is_ok_and(|ours| {
        ours.is_dir() && (ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino())
    });
    if same {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the server of the store does not see the directory `{}` under this path: it must run where \
         the replicas' directories are mounted as they are for their processes",
        path.display()
    )))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic leaves what they guard inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
