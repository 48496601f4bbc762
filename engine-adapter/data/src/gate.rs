//! What data connections may do at the moment: decided by the replica, obeyed by the reactors.
//!
//! A reactor looks once and goes on with what it saw, without a lock or an atomic operation for
//! each request, until it is told that something has changed. [`Gate::set`] tells it, and waits
//! until every reactor has let go of what was before: its requests have ended, its handles of the
//! volume and of the store's file are closed.
//!
//! **Sessions.** From one close to the next is a session. A connection belongs to the one it was
//! accepted in, and ends when the replica is open in a later one: what a controller that is gone had
//! sent may still lie in a socket, or be on its way, when the next controller opens the replica, and
//! must not be carried out for that one. Controllers connect before they open, so an open ends none.

use super::events::ActiveEvents;
use super::lanes::Lanes;
use super::plain::PlainFile;
use super::stats::{Counters, DataStats};
use dbs_core::{Error, Store, Volume};
use longhorn_wire::frame::{Generations, Hello};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::Duration;

/// How long [`Gate::set`] waits for requests in flight.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes written after which a background commit begins, unless said otherwise.
pub const COMMIT_BYTES: u64 = 64 << 20;

/// What a data connection may do.
#[derive(Clone)]
pub enum Access {
    /// Requests go to this volume.
    Open(Arc<Active>),
    /// Every request is answered with an error, and connections stay.
    Refused {
        /// The text for reads, writes and unmaps, such as `replica no longer exist`.
        io: String,
        /// The text for pings, such as `ping failure: replica state closed`.
        ping: String,
    },
    /// Nothing is opened before it is needed. Pings succeed. The first read, write or unmap calls
    /// [`Wake::wake`] once, on a thread of its own; those that come meanwhile wait for its end and
    /// then find what [`Gate::set`] has made of it.
    Dormant(Arc<dyn Wake>),
}

impl Access {
    /// What a replica that is not open answers; `state` is one of the states of its own kind.
    #[must_use]
    pub fn not_open(state: &str) -> Self {
        Self::Refused {
            io: "replica no longer exist".to_owned(),
            ping: format!("ping failure: replica state {state}"),
        }
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(active) => f.debug_tuple("Open").field(active).finish(),
            Self::Refused { io, ping } => {
                f.debug_struct("Refused").field("io", io).field("ping", ping).finish()
            }
            Self::Dormant(_) => f.write_str("Dormant"),
        }
    }
}

/// Makes a dormant replica ready for I/O.
pub trait Wake: Send + Sync {
    /// Takes the store over, opens it and calls [`Gate::set`]. It may block.
    ///
    /// # Errors
    /// The text that requests which waited for it are answered with. A later request tries again.
    fn wake(&self) -> Result<(), String>;
}

/// A count of changes that survives the process.
pub trait Revision: Send + Sync {
    /// One write or unmap has reached the store: the next commit is to say so. A change that waits for a commit is
    /// counted when it is acknowledged, after the commit; but the count that the commit stores must have it. Called
    /// on reactors: it may not block.
    fn note_written(&self);

    /// Counts one that was noted. Called on reactors before the reply is sent: it may not block.
    fn count(&self);

    /// Both, for one that waits for no commit.
    fn bump(&self) {
        self.note_written();
        self.count();
    }
}

/// When a write is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// Once it survives the end of the process; commits follow in the background.
    #[default]
    Interval,
    /// Once it survives the loss of power: after a commit, which all that wait for one share.
    Power,
}

/// What requests work on.
pub enum Target {
    /// A volume of a store.
    Volume {
        /// Its store, whose file reactors read and write by themselves.
        store: Store,
        /// The volume, opened for writing.
        volume: Volume,
    },
    /// A plain file. Workers read and write it.
    File(Arc<PlainFile>),
    /// Nothing: writes are forgotten, reads give zeros. It measures the protocol alone.
    Null {
        /// Its size in bytes.
        size: u64,
    },
}

/// A replica open for I/O. It is let go of when the next [`Gate::set`] returns.
pub struct Active {
    target: Target,
    events: Arc<dyn ActiveEvents>,
    revision: Option<Arc<dyn Revision>>,
    durability: Durability,
    commit_bytes: u64,
    first_change: Once,
    /// Bytes acknowledged since the last background commit began.
    written: AtomicU64,
    committing: AtomicBool,
}

impl Active {
    /// A target with who is told about it; no revision counter, [`Durability::Interval`],
    /// [`COMMIT_BYTES`].
    #[must_use]
    pub fn new(target: Target, events: Arc<dyn ActiveEvents>) -> Self {
        Self {
            target,
            events,
            revision: None,
            durability: Durability::default(),
            commit_bytes: COMMIT_BYTES,
            first_change: Once::new(),
            written: AtomicU64::new(0),
            committing: AtomicBool::new(false),
        }
    }

    /// Counts writes and unmaps with `revision`.
    #[must_use]
    pub fn with_revision(mut self, revision: Arc<dyn Revision>) -> Self {
        self.revision = Some(revision);
        self
    }

    /// Acknowledges writes as `durability` says.
    #[must_use]
    pub fn with_durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Commits in the background after so many bytes, 0 after each turn of a reactor.
    #[must_use]
    pub fn with_commit_bytes(mut self, bytes: u64) -> Self {
        self.commit_bytes = bytes;
        self
    }

    /// What requests work on.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The volume, if there is one.
    #[must_use]
    pub fn volume(&self) -> Option<&Volume> {
        match &self.target {
            Target::Volume { volume, .. } => Some(volume),
            Target::File(_) | Target::Null { .. } => None,
        }
    }

    /// Current size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        match &self.target {
            Target::Volume { volume, .. } => volume.size(),
            Target::File(file) => file.size(),
            Target::Null { size } => *size,
        }
    }

    /// Who is told about what happens.
    #[must_use]
    pub fn events(&self) -> &dyn ActiveEvents {
        &*self.events
    }

    /// When a write is acknowledged.
    #[must_use]
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Whether [`ActiveEvents::first_change`] has been called and has returned.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        self.first_change.is_completed()
    }

    /// Calls [`ActiveEvents::first_change`] if nobody has, and waits for its end.
    pub fn change(&self) {
        // Forced: after a panic in it, the next change tells again.
        self.first_change.call_once_force(|_| self.events.first_change());
    }

    /// A write or unmap is about to wait for a commit.
    pub(crate) fn note_change(&self) {
        if let Some(revision) = &self.revision {
            revision.note_written();
        }
    }

    /// Counts a write or unmap that is about to be acknowledged, and was noted or not.
    pub(crate) fn count_change(&self, noted: bool) {
        match &self.revision {
            Some(revision) if noted => revision.count(),
            Some(revision) => revision.bump(),
            None => {}
        }
    }

    /// So many bytes have been written; whether the caller is to call
    /// [`Active::commit_in_background`] for it, on a worker.
    pub(crate) fn wrote(&self, bytes: u64) -> bool {
        let written = self.written.fetch_add(bytes, Ordering::SeqCst) + bytes;
        written > self.commit_bytes && !self.committing.swap(true, Ordering::SeqCst)
    }

    /// Whether something has been written since the last commit, and none runs in the background:
    /// the caller is to call [`Active::commit_in_background`] then, on a worker.
    pub(crate) fn is_due(&self) -> bool {
        self.written.load(Ordering::SeqCst) > 0 && !self.committing.swap(true, Ordering::SeqCst)
    }

    /// Whether something has been written since the last commit began.
    pub(crate) fn is_uncommitted(&self) -> bool {
        self.written.load(Ordering::SeqCst) > 0
    }

    /// What [`Active::wrote`] or [`Active::is_due`] has asked for.
    ///
    /// # Errors
    /// As [`Active::commit`].
    pub(crate) fn commit_in_background(&self) -> Result<(), Error> {
        /// Also after a panic.
        struct Ended<'a>(&'a AtomicBool);
        impl Drop for Ended<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::SeqCst);
            }
        }
        let _ended = Ended(&self.committing);
        self.commit()
    }

    /// Makes everything acknowledged so far durable.
    ///
    /// # Errors
    /// Those of the store; what was to be committed is due again.
    pub(crate) fn commit(&self) -> Result<(), Error> {
        let written = self.written.swap(0, Ordering::SeqCst);
        let result = self.events.commit();
        if result.is_err() {
            self.written.fetch_add(written, Ordering::SeqCst);
        }
        result
    }
}

impl fmt::Debug for Active {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Active")
            .field("volume", &self.volume().map(Volume::spec))
            .field("durability", &self.durability)
            .finish_non_exhaustive()
    }
}

/// Says what data connections of one replica may do. The replica sets it, reactors watch it.
pub struct Gate {
    state: Mutex<State>,
    /// Held while a dormant replica is woken.
    waking: Mutex<()>,
    /// Which replica it is, as controllers are told.
    identity: OnceLock<[u8; 16]>,
    /// Whose changes it has, as they are told.
    generations: Mutex<Option<Generations>>,
    /// What clients may make anew.
    pub(crate) lanes: Lanes,
    /// Signalled when a watcher has let go of something or is gone.
    released: Condvar,
}

struct State {
    /// Grows with each change.
    generation: u64,
    /// Grows with each close.
    session: u64,
    access: Access,
    next_watcher: u64,
    watchers: Vec<Watcher>,
    /// What watchers that are gone have counted.
    past: DataStats,
}

struct Watcher {
    id: u64,
    /// It holds nothing older than this generation.
    released: u64,
    notify: Arc<dyn Fn() + Send + Sync>,
    counters: Arc<Counters>,
}

impl Gate {
    /// A gate that begins with `access`.
    #[must_use]
    pub fn new(access: Access) -> Arc<Self> {
        let state = State {
            generation: 0,
            session: 0,
            access,
            next_watcher: 0,
            watchers: Vec::new(),
            past: DataStats::default(),
        };
        let (state, waking) = (Mutex::new(state), Mutex::default());
        let (identity, generations, lanes) = (OnceLock::new(), Mutex::default(), Lanes::default());
        Arc::new(Self { state, waking, identity, generations, lanes, released: Condvar::new() })
    }

    /// Says which replica it is; the first word counts.
    pub fn identify(&self, identity: [u8; 16]) {
        let _first = self.identity.set(identity);
    }

    /// Says whose changes it has.
    pub fn set_generations(&self, generations: Option<Generations>) {
        *self.generations.lock().unwrap_or_else(PoisonError::into_inner) = generations;
    }

    /// What controllers are told of it.
    #[must_use]
    pub fn hello(&self) -> Hello {
        let generations = *self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        Hello { generations, ..Hello::of_server(self.identity.get().copied()) }
    }

    /// What holds now.
    #[must_use]
    pub fn access(&self) -> Access {
        self.state().access.clone()
    }

    /// Changes what requests may do, for all that come from now on, and waits until those let
    /// through before have ended and nobody uses what they used any more. Whether that was so
    /// within 30 s: only then nothing of the former volume and store is in use here.
    ///
    /// A caller must not hold a lock that a method of [`ActiveEvents`] may wait for.
    pub fn set(&self, access: Access) -> bool {
        self.set_within(access, DRAIN_TIMEOUT)
    }

    /// [`Gate::set`] that waits no longer than `timeout`.
    pub fn set_within(&self, access: Access, timeout: Duration) -> bool {
        let mut state = self.state();
        state.generation += 1;
        let generation = state.generation;
        let former = std::mem::replace(&mut state.access, access);
        let closed = matches!(state.access, Access::Refused { .. });
        if closed && !matches!(former, Access::Refused { .. }) {
            state.session += 1;
            self.lanes.forget();
        }
        let notify: Vec<_> = state.watchers.iter().map(|w| Arc::clone(&w.notify)).collect();
        drop(state);
        // It may hold the last handle of a store.
        drop(former);
        notify.iter().for_each(|notify| notify());
        let held = |state: &mut State| state.watchers.iter().any(|w| w.released < generation);
        let waited = self.released.wait_timeout_while(self.state(), timeout, held);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Whether nothing of what was before the last change is in use: what [`Gate::set`] said of it,
    /// or has become so since.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let state = self.state();
        state.watchers.iter().all(|watcher| watcher.released >= state.generation)
    }

    /// The session that a connection accepted now belongs to.
    pub(crate) fn session(&self) -> u64 {
        self.state().session
    }

    /// What has been done through this gate, since it was made.
    #[must_use]
    pub fn stats(&self) -> DataStats {
        let state = self.state();
        let mut stats = state.past.clone();
        state.watchers.iter().for_each(|watcher| stats.add(&watcher.counters));
        stats
    }

    /// Wakes the replica if it is dormant, or waits until it has been. It may block.
    ///
    /// # Errors
    /// The text of [`Wake::wake`].
    pub fn wake(&self) -> Result<(), String> {
        let _alone = self.waking.lock().unwrap_or_else(PoisonError::into_inner);
        let access = self.access();
        if let Access::Dormant(wake) = access { wake.wake() } else { Ok(()) }
    }

    /// Watches for changes, of which `notify` tells; it may be called from any thread.
    #[must_use]
    pub fn watch(self: &Arc<Self>, notify: Arc<dyn Fn() + Send + Sync>) -> Watch {
        let mut state = self.state();
        let id = state.next_watcher;
        state.next_watcher += 1;
        let counters = Arc::<Counters>::default();
        let released = state.generation;
        state.watchers.push(Watcher { id, released, notify, counters: counters.clone() });
        drop(state);
        Watch { gate: Arc::clone(self), id, counters }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic leaves it inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("access", &self.access()).finish_non_exhaustive()
    }
}

/// A reactor's view of a gate. Dropping it says that nothing is held any more.
pub struct Watch {
    gate: Arc<Gate>,
    id: u64,
    /// What this watcher counts.
    pub counters: Arc<Counters>,
}

/// What a watcher sees.
pub struct View {
    /// What [`Watch::release`] is to be called with once nothing older is held.
    pub generation: u64,
    /// Connections of earlier sessions end when the replica is open.
    pub session: u64,
    /// What the gate lets requests do.
    pub access: Access,
}

impl Watch {
    /// What holds now.
    #[must_use]
    pub fn look(&self) -> View {
        let State { generation, session, access, .. } = &*self.gate.state();
        View { generation: *generation, session: *session, access: access.clone() }
    }

    /// Nothing older than this generation is held by this watcher; with `None`, nothing at all.
    pub fn release(&self, generation: Option<u64>) {
        let mut state = self.gate.state();
        let released = generation.unwrap_or(state.generation);
        if let Some(watcher) = state.watchers.iter_mut().find(|w| w.id == self.id) {
            watcher.released = released;
        }
        drop(state);
        self.gate.released.notify_all();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        state.watchers.retain(|w| w.id != self.id);
        state.past.add(&self.counters);
        drop(state);
        self.gate.released.notify_all();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
