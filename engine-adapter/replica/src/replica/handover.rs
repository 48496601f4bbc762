//! A store that is with another process of the same directory: an upgrade starts the new process
//! while the old one serves, and ownership moves when the new one is first used. It moves back when the
//! old one is opened again.

use super::{Place, Replica, ReplicaState};
use dbs_core::{Result, Store};
use dbs_service::log;
use longhorn_data::Wake;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How old a copy of the state may be before the older process is asked again.
const COPY_AGE: Duration = Duration::from_secs(2);

/// The process that has the store. Calls may block for as long as its requests in flight take.
pub trait Predecessor: Send + Sync {
    /// What it knows of the replica: [`Replica::export_state`] over there.
    ///
    /// # Errors
    /// Of the connection to it.
    fn state(&self) -> Result<ReplicaState>;

    /// Makes it hand the store over: [`Replica::surrender`] over there, and closing it.
    ///
    /// # Errors
    /// Of the connection to it.
    fn release(&self) -> Result<()>;
}

/// Who uses a replica's store for long, beside data connections.
pub trait User: Send + Sync {
    /// Gives it up: the store goes, or has gone, and whoever gets it must not wait. May block until then.
    fn let_go(&self, until: Instant);
}

/// Opens the store once it has been released, and fails as long as the older process may still
/// write to it.
pub type OpenStore = Box<dyn Fn() -> Result<Store> + Send + Sync>;

/// Where a replica has its store from.
pub enum StoreSource {
    /// It is open here.
    Own(Store),
    /// An older process has it.
    HandOver {
        /// That process.
        predecessor: Box<dyn Predecessor>,
        /// Opens the store once that has released it.
        open: OpenStore,
    },
}

impl fmt::Debug for StoreSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own(_) => "Own",
            Self::HandOver { .. } => "HandOver",
        })
    }
}

pub(super) struct Waiting {
    predecessor: Box<dyn Predecessor>,
    open: OpenStore,
    copy: Mutex<(ReplicaState, Instant)>,
}

impl Waiting {
    pub fn new(predecessor: Box<dyn Predecessor>, open: OpenStore) -> Result<Self> {
        let state = predecessor.state()?;
        Ok(Self::with(predecessor, open, state))
    }

    /// For a process of which `state` is known already.
    pub fn with(predecessor: Box<dyn Predecessor>, open: OpenStore, state: ReplicaState) -> Self {
        Self { predecessor, open, copy: Mutex::new((state, Instant::now())) }
    }

    pub fn copy(&self) -> ReplicaState {
        self.copy.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    fn keep(&self, state: Option<ReplicaState>) {
        let mut copy = self.copy.lock().unwrap_or_else(PoisonError::into_inner);
        copy.1 = Instant::now();
        if let Some(state) = state {
            copy.0 = state;
        }
    }

    /// Asks again if the copy is older than that. Without an answer the copy stays: the older
    /// process may have ended, and then nothing changes any more.
    fn refresh(&self, age: Duration) {
        let asked = self.copy.lock().unwrap_or_else(PoisonError::into_inner).1;
        if asked.elapsed() < age {
            return;
        }
        match self.predecessor.state() {
            Ok(state) => self.keep(Some(state)),
            Err(e) => {
                log::warn("predecessor", &[("error", &e)]);
                self.keep(None);
            }
        }
    }
}

impl Replica {
    /// Names somebody who uses the store for long, besides those who are there.
    pub fn used_by(&self, user: Weak<dyn User>) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.retain(|user| user.strong_count() > 0);
        users.push(user);
    }

    /// Has all of them give it up, and waits so long for that.
    pub(super) fn end_uses(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let users = self.users.lock().unwrap_or_else(PoisonError::into_inner).clone();
        users.iter().filter_map(Weak::upgrade).for_each(|user| user.let_go(until));
    }

    /// Asks the older process, if there is one, how the replica is; not if it was asked just now.
    pub(super) fn look_over(&self) {
        self.refresh(COPY_AGE);
    }

    /// Asks the older process, if there is one, how the replica is.
    pub(super) fn refresh_copy(&self) {
        self.refresh(Duration::ZERO);
    }

    fn refresh(&self, age: Duration) {
        let waiting = match &self.state().store {
            Place::Waiting(waiting) | Place::Surrendered(Some(waiting)) => Arc::clone(waiting),
            Place::Own(_) | Place::Surrendered(None) => return,
        };
        waiting.refresh(age);
        self.note_generation(|generation| {
            generation.look_again();
            Ok(())
        });
    }

    /// The store, from the process that has it.
    fn fetch(&self) -> Result<Store> {
        let waiting = match &self.state().store {
            Place::Waiting(waiting) | Place::Surrendered(Some(waiting)) => Arc::clone(waiting),
            Place::Own(_) | Place::Surrendered(None) => return Err(self.surrendered()),
        };
        if let Err(e) = waiting.predecessor.release() {
            // It may have ended, or have given the store up before. If not, it cannot be opened.
            log::warn("take-over", &[("error", &e)]);
        }
        let store = (waiting.open)()?;
        let mut state = self.state();
        state.store = Place::Own(store.clone());
        state.unsettled = true;
        Ok(store)
    }

    /// The store, taken over from another process if it is there. Called under `work`.
    ///
    /// # Errors
    /// `Busy` if a newer process has it for good, or the other one does not let go; those of opening it.
    pub(super) fn take_over(&self) -> Result<Store> {
        let begun = Instant::now();
        let unsettled = self.state().unsettled;
        let store = match self.owned() {
            Some(store) if !unsettled => return Ok(store),
            Some(store) => store,
            None => self.fetch()?,
        };
        let taken = self
            .take_below(&store)
            .and_then(|()| self.settle_in(&store))
            .and_then(|()| if self.is_open() { self.open_here(&store) } else { Ok(()) });
        if let Err(e) = taken {
            // Whoever comes next tries again, from a store that is here; and who asks for the store is given it.
            log::error("take-over", &[("error", &e)]);
            return Err(e);
        }
        self.state().unsettled = false;
        let took = format!("{:.3}", begun.elapsed().as_secs_f64());
        log::info("take-over", &[("volume", &self.options.volume), ("seconds", &took)]);
        Ok(store)
    }
}

/// Takes the store over at the first I/O.
pub(super) struct Sleeper(pub Weak<Replica>);

impl Wake for Sleeper {
    fn wake(&self) -> std::result::Result<(), String> {
        let replica = self.0.upgrade().ok_or("the replica has ended")?;
        let _work = replica.work();
        let asleep =
            || replica.state().opened.as_ref().is_some_and(|opened| opened.volume.is_none());
        // It may have been closed or woken meanwhile: the gate knows.
        if !asleep() {
            return Ok(());
        }
        let store = replica.take_over().map_err(|e| e.to_string())?;
        if asleep() { replica.open_here(&store).map_err(|e| e.to_string()) } else { Ok(()) }
    }
}
