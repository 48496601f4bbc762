//! The data path of a volume: from requests of its frontend to those of its replicas, and back.
//!
//! **Threads.** Each reactor has its own share of the connections to every replica, its own array of
//! requests in flight, and the part of the frontend whose requests it carries out: a request never
//! leaves the reactor that it came in on. What reactors share are a few words of atomics: the modes of
//! the replicas and the blocks that are being changed ([`crate::rules`]). Messages go
//! between them when a replica fails, and when one waits for blocks that another has locked.
//!
//! **A request.** `shard` takes it from a [`Front`], finds a place in the array (`pending`), asks
//! replicas (`backend`, `link`, `local`) and decides with the rules' `FanOut` and `Read` what their replies mean.
//! All that is sent to a replica in one turn of a reactor goes out in one call; the payload of a write
//! is one buffer, which all its sends share.
//!
//! **Order.** A replica that missed a change is `ERR` before the change is acknowledged
//! (`shared::Shared::decide`). Changes that overlap go one after the other. A flush covers what was
//! acknowledged before it came.
//!
//! **Damage.** What a replica of DBS says is damaged is read from another one, and then written again there
//! (`heal`): by the request that met it, which has its blocks then as a change would.

mod away;
mod backend;
mod dial;
mod heal;
mod journal;
mod latch;
#[doc(hidden)]
pub mod link;
mod local;
mod message;
mod pending;
mod reactor;
mod replica;
mod replies;
pub mod sabotage;
mod shard;
mod shared;
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub mod simulated;
#[cfg(feature = "sabotage")]
mod simulated_links;
mod stats;

pub use crate::rules::{Mode, ReplicaId};
pub use dial::BackendAddress;
pub use journal::{JournalEnd, JournalEntry, JournalKind};
pub use local::LocalReplica;
pub use pending::QUEUE_DEPTH_MAX;
pub use shared::Events;
pub use stats::{PathKind, PathStats, ReplicaStats};

use crate::rules::timeout;
use backend::Access;
use dbs_core::info::VolumeLimits;
use dbs_frontend::{Front, ToFront, lock, wait_while};
use dbs_reactor::{Io, Thread};
use latch::Latch;
use longhorn_wire::frame::{Hello, Standing};
use longhorn_wire::transport::DataLink;
use message::Message;
use reactor::Reactor;
use replica::{Anew, Replica};
use shared::Shared;
use std::any::Any;
use std::fmt;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

/// Most reactors.
const REACTORS_MAX: usize = 64;
/// How long reactors have to show their journals.
const JOURNAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Most frontends at once.
const FRONTS_MAX: usize = 16;

/// Settings of a path.
#[derive(Debug, Clone)]
pub struct PathOptions {
    /// Threads, each with its share of the frontend and of the connections; at most 64.
    pub reactors: usize,
    /// How they do I/O.
    pub reactor: dbs_reactor::Options,
    /// Connections to each replica, at least one for each reactor.
    pub connections_per_replica: usize,
    /// Requests in flight on each reactor, at most [`QUEUE_DEPTH_MAX`]; more wait.
    pub queue_depth: usize,
    /// Silence after which a replica with requests in flight becomes `ERR`. The last replica has twice
    /// as long, and so has a single request while others are answered.
    pub short_timeout: Duration,
    /// What a replica may take for a flush.
    pub flush_timeout: Duration,
    /// Time for connecting to a replica, and for its first answer.
    pub connect_timeout: Duration,
    /// Reads from a replica on this machine while there is one that is complete.
    pub prefer_local: bool,
    /// How fast all frontends together may use the volume.
    pub limits: VolumeLimits,
    /// A mistake to make.
    #[cfg(feature = "sabotage")]
    pub bug: Option<sabotage::Bug>,
}

impl Default for PathOptions {
    fn default() -> Self {
        Self {
            reactors: 1,
            reactor: dbs_reactor::Options::default(),
            connections_per_replica: 2,
            queue_depth: 1024,
            short_timeout: timeout::DEFAULT,
            flush_timeout: timeout::FLUSH_DEFAULT,
            connect_timeout: Duration::from_secs(10),
            prefer_local: false,
            limits: VolumeLimits::default(),
            #[cfg(feature = "sabotage")]
            bug: None,
        }
    }
}

/// The data path of a volume. Dropping it closes all connections, once its frontends are detached.
pub struct Path {
    shared: Arc<Shared>,
    threads: Mutex<Vec<Thread<Message>>>,
    /// Whether somebody has paused it.
    paused: Arc<(Mutex<bool>, Condvar)>,
    /// Numbers of frontends that are in use.
    fronts: Mutex<[bool; FRONTS_MAX]>,
}

impl Path {
    /// A path to a volume of `size` bytes without replicas: requests fail until one is
    /// [added](Path::add) as [`Mode::Rw`].
    ///
    /// # Errors
    /// A reactor cannot be started.
    pub fn new(
        mut options: PathOptions,
        size: u64,
        events: Arc<dyn Events>,
    ) -> io::Result<Arc<Self>> {
        options.reactors = options.reactors.clamp(1, REACTORS_MAX);
        let shared = Arc::new(Shared::new(options, size, events, Instant::now()));
        let path = Self::of(&shared);
        for index in 0..shared.options.reactors {
            let shared = Arc::clone(&shared);
            let options = shared.options.reactor.clone();
            let make = move |_: &mut Io, remote| Reactor::new(shared, index, remote);
            let thread = dbs_reactor::spawn(&format!("path-{index}"), &options, make)?;
            lock(&path.threads).push(thread);
        }
        shared.connect(lock(&path.threads).iter().map(Thread::remote).collect());
        Ok(Arc::new(path))
    }

    /// A path whose reactors are still to come.
    fn of(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            threads: Mutex::default(),
            paused: Arc::default(),
            fronts: Mutex::new([false; FRONTS_MAX]),
        }
    }

    /// Name of the driver in use: `io_uring` or `epoll`.
    #[must_use]
    pub fn driver(&self) -> &'static str {
        lock(&self.threads).first().map_or("none", Thread::driver)
    }

    /// Number of reactors.
    #[must_use]
    pub fn reactors(&self) -> usize {
        self.shared.options.reactors
    }

    /// Connects to a replica and uses it as `mode` says from when this returns.
    ///
    /// # Errors
    /// See [`Path::connect`].
    pub fn add(
        &self,
        id: ReplicaId,
        name: &str,
        backend: &BackendAddress,
        mode: Mode,
    ) -> io::Result<()> {
        self.connect(id, name, backend)?;
        self.set_mode(id, mode);
        Ok(())
    }

    /// Connects to a replica, which is asked nothing before it has a [mode](Path::set_mode): it need not
    /// be open yet. `name` stands in error texts, such as `tcp://127.0.0.1:10000`. Answers with what the
    /// replica says of itself, if it says anything.
    ///
    /// # Errors
    /// It cannot be reached or does not answer a ping; its number is in use, or 64 replicas are.
    pub fn connect(
        &self,
        id: ReplicaId,
        name: &str,
        backend: &BackendAddress,
    ) -> io::Result<Option<Hello>> {
        let options = &self.shared.options;
        let (mut hello, mut anew) = (None, None);
        let (shares, flushes, local) = match backend {
            BackendAddress::Remote(address) => {
                let connections = options.connections_per_replica.max(options.reactors);
                let client = dial::client();
                let lane = |index| self.shared.lane(client, index % options.reactors, 0);
                let dialled = dial::dial(address, connections, options.connect_timeout, lane)?;
                hello = dialled.hello;
                let resumes = dialled.standing == Some(Standing::Ready);
                anew = resumes.then(|| Anew::Remote { address: address.clone(), client });
                let shares = share(dialled.links, options.reactors).into_iter();
                (shares.map(Access::Links).collect(), dialled.flushes, dialled.local)
            }
            BackendAddress::Local(local) => {
                let shares = (0..options.reactors).map(|_| Access::Local(local.clone()));
                (shares.collect(), true, true)
            }
            #[cfg(feature = "sabotage")]
            BackendAddress::Simulated(backend) => {
                let shares = backend.shares(options.reactors).into_iter();
                anew = backend.anew.clone().map(Anew::Simulated);
                (shares.map(Access::Simulated).collect(), backend.flushes, false)
            }
            BackendAddress::Null => {
                ((0..options.reactors).map(|_| Access::Null).collect(), false, true)
            }
        };
        let (shares, preferred): (Vec<_>, _) = (shares, local && options.prefer_local);
        let Some(replica) = self.shared.register(id, name, (flushes, preferred), anew) else {
            let text = format!("replica {name}: its number {id} is in use, or there are too many");
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        };
        let latch = Latch::new(options.reactors);
        for (index, access) in shares.into_iter().enumerate() {
            let (replica, latch) = (Arc::clone(&replica), Arc::clone(&latch));
            self.shared.send(index, Message::Add { replica, access, latch });
        }
        self.shared.wait(&latch);
        Ok(hello)
    }

    /// Sets the mode of a replica. [`Mode::Err`] is final until it is removed; [`Events::faulted`] is
    /// not called for it.
    pub fn set_mode(&self, id: ReplicaId, mode: Mode) {
        if let Some(replica) = self.shared.replica(id) {
            self.shared.set_mode(&replica, mode);
        }
    }

    /// The mode of a replica.
    #[must_use]
    pub fn mode(&self, id: ReplicaId) -> Option<Mode> {
        let replica = self.shared.replica(id)?;
        self.shared.modes.of(replica.slot)
    }

    /// Forgets a replica and closes its connections; requests that wait for it alone fail.
    pub fn remove(&self, id: ReplicaId) {
        let Some(replica) = self.shared.replica(id) else { return };
        self.shared.set_mode(&replica, Mode::Err);
        let removed = self.ask(|latch| Message::Remove { replica: Arc::clone(&replica), latch });
        self.shared.wait(&removed);
        self.shared.unregister(&replica);
    }

    /// Has replicas make durable what they have taken, while I/O goes on. Returns when all have that know
    /// how to, or have become `ERR`.
    pub fn flush(&self) {
        let latch = Latch::new(1);
        self.shared.send(0, Message::Flush { latch: Arc::clone(&latch) });
        self.shared.wait(&latch);
    }

    /// Pauses all I/O: new requests wait. Returns when none but flushes is in flight, which a replica
    /// that hangs delays until its timeout; waits for another [`Pause`] to end before. Requests that
    /// have a block healed, which may take as long as a flush, are waited for only if `all` says so.
    #[must_use]
    pub fn pause(&self, all: bool) -> Pause {
        let (paused, changed) = &*self.paused;
        *wait_while(changed, lock(paused), |paused| *paused) = true;
        self.shared.wait(&self.ask(|latch| Message::Pause { all, latch }));
        Pause { shared: Arc::clone(&self.shared), paused: Arc::clone(&self.paused) }
    }

    /// Sets the size of the volume in bytes.
    pub fn resize(&self, size: u64) {
        self.shared.size.store(size, Ordering::SeqCst);
    }

    /// Size of the volume in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.size.load(Ordering::SeqCst)
    }

    /// While the volume is being expanded, discards fail.
    pub fn set_expanding(&self, expanding: bool) {
        self.shared.expanding.store(expanding, Ordering::SeqCst);
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> PathStats {
        let mut stats = PathStats::default();
        self.shared.counters.iter().for_each(|counters| stats.add(counters));
        let describe = |replica: &Arc<Replica>| ReplicaStats {
            id: replica.id,
            name: replica.name.clone(),
            // Without a mode while it is being added: nothing is sent to it.
            mode: self.shared.modes.of(replica.slot).unwrap_or(Mode::Err),
            flushes: replica.flushes,
            why: replica.why.get().cloned(),
            mismatches: replica.mismatches.load(Ordering::Relaxed),
            healed: replica.healed.load(Ordering::Relaxed),
            reconnected: replica.reconnected.load(Ordering::Relaxed),
        };
        stats.replicas = self.shared.replicas().iter().map(describe).collect();
        stats
    }

    /// The last requests to replicas since this was asked for last, oldest first, and those that they
    /// have not answered; `limit` of those that have ended, if it is not 0 or less. A reactor that does
    /// not answer is left out.
    #[must_use]
    pub fn journal(&self, limit: i64) -> Vec<JournalEntry> {
        let (sender, receiver) = mpsc::channel();
        self.shared.tell(|_| Message::Journal(sender.clone()));
        drop(sender);
        let until = Instant::now() + JOURNAL_TIMEOUT;
        let mut all = Vec::new();
        while let Ok(part) = receiver.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            all.extend(part);
        }
        journal::newest(all, limit)
    }

    /// Attaches a frontend: `make` is called for each reactor, with its number and the way to the frontend's parts on
    /// all of them, and what it returns is called there to make the frontend's part, with the bits that the tags of
    /// all its operations have to have. What is sent when the frontend is detached goes nowhere.
    ///
    /// # Errors
    /// There are too many.
    pub fn attach<F, M>(self: &Arc<Self>, mut make: F) -> io::Result<Attached>
    where
        F: FnMut(usize, &ToFront) -> M,
        M: FnOnce(&mut Io, u64) -> Box<dyn Front> + Send + 'static,
    {
        let number = {
            let mut used = lock(&self.fronts);
            let free = used.iter().position(|used| !used);
            let free = free.ok_or_else(|| io::Error::other("there are too many frontends"))?;
            used[free] = true;
            free
        };
        let (shared, reactors) = (Arc::clone(&self.shared), self.reactors());
        // It keeps neither the path nor the frontend: a part on a reactor may have it, which must not end either.
        let to: ToFront = Arc::new(move |reactor: usize, message: Box<dyn Any + Send>| {
            shared.send(reactor % reactors, Message::Front { number, message });
        });
        for index in 0..reactors {
            self.shared.send(index, Message::Attach { number, make: Box::new(make(index, &to)) });
        }
        Ok(Attached { path: Arc::clone(self), number, to })
    }

    /// Asks all reactors for something that they will say when it is done.
    fn ask(&self, message: impl Fn(Arc<Latch>) -> Message) -> Arc<Latch> {
        let latch = Latch::new(self.reactors());
        self.shared.tell(|_| message(Arc::clone(&latch)));
        latch
    }
}

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Path").field("size", &self.size()).finish_non_exhaustive()
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        self.shared.tell(|_| Message::End);
        for thread in lock(&self.threads).drain(..) {
            thread.remote().send(Message::End);
            thread.join();
        }
    }
}

/// All I/O of a path is paused until this is dropped.
pub struct Pause {
    shared: Arc<Shared>,
    paused: Arc<(Mutex<bool>, Condvar)>,
}

impl fmt::Debug for Pause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pause").finish_non_exhaustive()
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        self.shared.tell(|_| Message::Resume);
        let (paused, changed) = &*self.paused;
        *lock(paused) = false;
        changed.notify_all();
    }
}

/// A frontend of a path. Dropping it detaches it at once.
pub struct Attached {
    path: Arc<Path>,
    number: usize,
    to: ToFront,
}

impl Attached {
    /// The path.
    #[must_use]
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Sends something to the frontend's part on a reactor, for its
    /// [`Front::message`].
    pub fn send(&self, reactor: usize, message: Box<dyn Any + Send>) {
        (self.to)(reactor, message);
    }

    /// The way to the frontend's parts.
    #[must_use]
    pub fn to(&self) -> &ToFront {
        &self.to
    }

    /// The limits of the volume delay nothing of it any more: somebody waits for the end of what it has under way.
    pub fn ends_delays(&self) {
        let number = self.number;
        self.path.shared.tell(|_| Message::Hurry { number });
    }

    /// Detaches it: no new requests, those in flight are answered, and clients have `grace` to take
    /// the replies.
    pub fn detach(self, grace: Duration) {
        self.stop(grace);
    }

    fn stop(&self, grace: Duration) {
        let number = self.number;
        let detach =
            |at_once| self.path.ask(move |latch| Message::Detach { number, at_once, latch });
        if grace.is_zero() || !detach(false).wait_for(grace) {
            self.path.shared.wait(&detach(true));
        }
    }
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
        lock(&self.path.fronts)[self.number] = false;
    }
}

/// Deals connections out to reactors.
fn share(links: Vec<DataLink>, reactors: usize) -> Vec<Vec<DataLink>> {
    let mut shares: Vec<Vec<DataLink>> = (0..reactors).map(|_| Vec::new()).collect();
    for (index, link) in links.into_iter().enumerate() {
        shares[index % reactors].push(link);
    }
    shares
}
