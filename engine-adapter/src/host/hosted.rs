//! What a server of a store serves for one shim, until that ends.

use super::hosting::Hosting;
use super::served::{Served, ServedAgent};
use crate::replica::{Predecessor, Replica, ReplicaState};
use dbs_core::Result;
use dbs_server::log;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A replica, or a sync agent alone, with its shim's connection.
pub struct Hosted {
    /// Unique in its server.
    pub id: u64,
    /// Its volume in the store.
    pub volume: String,
    /// The replica.
    pub replica: Arc<Replica>,
    stream: UnixStream,
    served: Mutex<Option<What>>,
    /// It has begun to end.
    ending: AtomicBool,
    /// A newer one has its volume.
    succeeded: AtomicBool,
}

/// What is served.
pub enum What {
    /// A replica, with its sync agent or without.
    Replica(Served),
    /// A sync agent of a replica that was started by itself.
    Agent(ServedAgent),
}

impl Hosted {
    /// Serves `what` of `replica` for the shim on `stream`.
    #[must_use]
    pub fn new(
        id: u64,
        volume: String,
        replica: Arc<Replica>,
        stream: UnixStream,
        what: What,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            volume,
            replica,
            stream,
            served: Mutex::new(Some(what)),
            ending: AtomicBool::new(false),
            succeeded: AtomicBool::new(false),
        })
    }

    /// Ends it in good order.
    pub fn stop(&self) {
        self.ending.store(true, Ordering::SeqCst);
        let what = lock(&self.served).take();
        match what {
            Some(What::Replica(served)) => {
                served.stop();
                // One that waits for its store has nothing to give up.
                if self.replica.store().is_ok()
                    && let Err(e) = self.replica.surrender()
                {
                    log::warn("replica-end", &[("volume", &self.volume), ("error", &e)]);
                }
            }
            Some(What::Agent(agent)) => agent.stop(),
            None => {}
        }
    }

    /// Ends the shim's session.
    pub fn hang_up(&self) {
        let _gone = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether it has begun to end.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// Whether a newer one has its volume.
    #[must_use]
    pub fn is_succeeded(&self) -> bool {
        self.succeeded.load(Ordering::SeqCst)
    }

    /// What the replica contributes to metrics; nothing if it is an agent alone.
    #[must_use]
    pub fn measure(&self) -> Option<crate::metrics::Source> {
        match &*lock(&self.served) {
            Some(What::Replica(served)) => Some(served.measure()),
            _ => None,
        }
    }

    /// Whether it is more than an agent.
    #[must_use]
    pub fn is_replica(&self) -> bool {
        !matches!(*lock(&self.served), Some(What::Agent(_)))
    }

    /// Whether there is a sync agent.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        match &*lock(&self.served) {
            Some(What::Replica(served)) => served.has_agent(),
            Some(What::Agent(_)) => true,
            None => false,
        }
    }

    /// Whether all its servers still serve.
    #[must_use]
    pub fn is_running(&self) -> bool {
        match &*lock(&self.served) {
            Some(What::Replica(served)) => served.is_running(),
            Some(What::Agent(agent)) => agent.is_running(),
            None => true,
        }
    }
}

/// The older of two replicas of a volume in this process.
pub struct OlderReplica {
    /// The older one.
    pub hosted: Arc<Hosted>,
    /// Where both are.
    pub hosting: Weak<Hosting>,
}

impl Predecessor for OlderReplica {
    fn state(&self) -> Result<ReplicaState> {
        self.hosted.replica.export_state()
    }

    fn release(&self) -> Result<()> {
        let result = self.hosted.replica.surrender();
        self.hosted.succeeded.store(true, Ordering::SeqCst);
        if let Err(e) = result
            && !self.hosted.is_ending()
        {
            return Err(e);
        }
        if let Some(hosting) = self.hosting.upgrade() {
            hosting.count_handover();
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic leaves what they guard inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
