//! What a server of a store serves for one shim, until that ends.

use super::served::{Served, ServedAgent};
use crate::replica::{Predecessor, Replica, ReplicaState, StoreSource};
use dbs_core::{Error, Result, Store};
use dbs_service::log;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
                    && let Err(e) = self.replica.surrender(None)
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
    /// How often a volume has passed to a newer replica, for the metrics of the server.
    pub handovers: Arc<AtomicU64>,
}

impl OlderReplica {
    /// The store, for a newer replica of the volume: it is had once the older one has given it up. No
    /// lock of a file is between the two, as there is between two processes.
    #[must_use]
    pub fn source(self, store: Store) -> StoreSource {
        let hosted = Arc::clone(&self.hosted);
        let open = Box::new(move || {
            if hosted.replica.has_surrendered() {
                return Ok(store.clone());
            }
            let text = format!(
                "the older process of the replica `{}` still uses its volume",
                hosted.volume
            );
            Err(Error::busy(text))
        });
        StoreSource::HandOver { predecessor: Box::new(self), open }
    }
}

impl Predecessor for OlderReplica {
    fn state(&self) -> Result<ReplicaState> {
        self.hosted.replica.export_state()
    }

    fn release(&self) -> Result<()> {
        let Hosted { replica, succeeded, .. } = &*self.hosted;
        // One that ends gives it up by itself.
        if let Err(e) = replica.surrender(None)
            && !(self.hosted.is_ending() && replica.has_surrendered())
        {
            return Err(e);
        }
        succeeded.store(true, Ordering::SeqCst);
        self.handovers.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic leaves what they guard inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::replica::ReplicaOptions;
    use dbs_core::{ErrorKind, InitOptions, OpenOptions, TailPlace};
    use longhorn_data::Access;
    use std::path::Path;

    fn store(dir: &Path) -> Store {
        let path = dir.join("store.dbs");
        Store::init(&path, &InitOptions { size: Some(64 << 20), ..Default::default() }).unwrap();
        let options = OpenOptions { tail: TailPlace::None, ..Default::default() };
        Store::open(&path, &options).unwrap()
    }

    fn hosted(replica: &Arc<Replica>) -> Arc<Hosted> {
        let (stream, _) = UnixStream::pair().unwrap();
        Arc::new(Hosted {
            id: 0,
            volume: "vol".to_owned(),
            replica: Arc::clone(replica),
            stream,
            served: Mutex::default(),
            ending: AtomicBool::new(false),
            succeeded: AtomicBool::new(false),
        })
    }

    /// A write that the older replica has let through, and that has not reached the device, must not
    /// do so after one that the newer replica has acknowledged.
    #[test]
    fn nobody_takes_over_from_requests_that_do_not_end() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let options = ReplicaOptions::new(dir.path(), "vol");
        let old = Replica::new(options.clone(), StoreSource::Own(store.clone())).unwrap();
        old.create(1 << 20).unwrap();
        old.open(false, 0).unwrap();
        let older = hosted(&old);
        let source = OlderReplica { hosted: Arc::clone(&older), handovers: Arc::default() };
        let new = Replica::new(options, source.source(store)).unwrap();
        new.open(true, 0).unwrap();
        // A reactor that has seen the older one open, and has a request.
        let watch = old.gate().watch(Arc::new(|| {}));
        for _ in 0..2 {
            let text = new.gate().wake().unwrap_err();
            assert!(text.contains("still uses its volume"), "{text}");
            assert!(matches!(new.gate().access(), Access::Dormant(_)));
            assert_eq!(old.surrender(None).err().unwrap().kind(), ErrorKind::Busy);
            assert!(!old.has_surrendered() && !older.is_succeeded());
            assert!(matches!(old.gate().access(), Access::Refused { .. }), "nothing new begins");
        }
        // The request ends.
        drop(watch);
        new.gate().wake().unwrap();
        assert!(matches!(new.gate().access(), Access::Open(_)));
        assert!(old.has_surrendered() && older.is_succeeded());
    }

    /// Its owner closes the store in any case: the file's lock is what a newer process waits for.
    #[test]
    fn a_store_that_is_let_go_of_is_locked_until_requests_have_ended() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let options = ReplicaOptions::new(dir.path(), "vol");
        let old = Replica::new(options, StoreSource::Own(store.clone())).unwrap();
        old.create(1 << 20).unwrap();
        old.open(false, 0).unwrap();
        let watch = old.gate().watch(Arc::new(|| {}));
        let used = watch.look();
        assert_eq!(old.surrender(None).err().unwrap().kind(), ErrorKind::Busy);
        old.let_go();
        assert!(old.has_surrendered());
        store.close().unwrap();
        let path = dir.path().join("store.dbs");
        let options = OpenOptions { tail: TailPlace::None, ..Default::default() };
        let busy = Store::open(&path, &options).err();
        assert_eq!(busy.unwrap().kind(), ErrorKind::Busy);
        drop(used);
        Store::open(&path, &options).unwrap();
    }
}
