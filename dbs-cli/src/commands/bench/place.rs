//! What is measured in a store: temporary volumes, and volumes that are there.

use crate::context::{Context, typed};
use crate::old;
use crate::target::Target;
use dbs_bench::{Ground, NbdSubject, Room, Subject, VolumeSubject};
use dbs_client::any_store::AnyStore;
use dbs_control::api::Request;
use dbs_core::info::StoreInfo;
use dbs_core::io::open::claim;
use dbs_core::{ErrorKind, Result};
use dbs_server::serve::Housekeeping;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How often an idle store is committed while it is measured: as `dbs serve` does by default.
const COMMIT_INTERVAL: Duration = Duration::from_secs(1);
/// How long a server may take to notice that a connection has ended.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// A store with room for a temporary volume.
pub struct StorePlace<'a> {
    context: &'a Context,
    target: &'a Target,
    name: String,
    _keeper: Keeper,
}

impl<'a> StorePlace<'a> {
    /// Nothing is made yet.
    ///
    /// # Errors
    /// `Unsupported` for an old image, which cannot be written.
    pub fn new(context: &'a Context, target: &'a Target) -> Result<Self> {
        if let Target::Old(_) = target {
            return Err(old::unsupported());
        }
        let name = format!("dbs-bench-{:08x}", fastrand::Rng::new().u32(..));
        Ok(Self { context, target, name, _keeper: Keeper::of(target)? })
    }

    fn call(&self, request: &Request) -> Result<serde_json::Value> {
        // To its end also after the user has stopped the command.
        match self.target {
            Target::Live(store) => store.call(request, &mut |_| true),
            Target::Old(_) => Err(old::unsupported()),
        }
    }

    /// Deletes the volume once its last user is gone.
    fn delete_volume(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            match self.call(&Request::VolumeDelete {
                volume: self.name.clone(),
                uuid: None,
                rebuilding: false,
            }) {
                Err(e) if e.kind() == ErrorKind::Busy && begun.elapsed() < BUSY_TIMEOUT => {
                    thread::sleep(BUSY_PAUSE);
                }
                other => return other.map(drop),
            }
        }
    }
}

impl Ground for StorePlace<'_> {
    fn create(&self, length: u64) -> Result<()> {
        let volume = self.name.clone();
        self.call(&Request::VolumeCreate { volume, size: length, rebuilding: false }).map(drop)
    }

    fn open(&self) -> Result<Box<dyn Subject + '_>> {
        open(self.target, &self.name)
    }

    fn snapshot(&self, name: &str) -> Result<()> {
        let (volume, snapshot) = (self.name.clone(), name.to_owned());
        let labels = Default::default();
        let request =
            Request::SnapshotCreate { volume, snapshot, labels, system: true, rebuilding: None };
        self.call(&request).map(drop)
    }

    fn delete(&self) -> Result<()> {
        self.delete_volume().map_err(|e| {
            e.context(format!("the temporary volume {} could not be deleted", self.name))
        })?;
        if self.context.stop.asked() {
            // The rest of its space comes back in the background, or the next time.
            return Ok(());
        }
        self.target.call(self.context, &Request::VolumeTrim).map(drop)
    }

    fn room(&self) -> Result<Room> {
        let info: StoreInfo = typed(self.call(&Request::Info)?)?;
        Ok(Room {
            bytes: info.extents_free.saturating_mul(info.extent_size),
            snapshots: info.snapshots_max.saturating_sub(info.snapshots),
        })
    }
}

/// Opens a volume or snapshot for measuring.
///
/// # Errors
/// `NotFound`, and those of the store or its server.
pub fn open<'a>(target: &'a Target, spec: &str) -> Result<Box<dyn Subject + 'a>> {
    if let Target::Live(AnyStore::Served(server)) = target {
        // The store has better words than NBD for a volume that is not there.
        drop(target.open_spec(spec)?);
        let connect = || Ok(Box::new(server.connect_nbd()?) as Box<_>);
        return Ok(Box::new(NbdSubject::new(connect, spec)?));
    }
    let read_only = match target {
        Target::Old(_) => Some("images of format 1.0.0 are only read".to_owned()),
        _ if spec.contains('@') => Some("a snapshot is never written".to_owned()),
        Target::Live(store) => store.check_unwritten(spec).err().map(|error| error.to_string()),
    };
    Ok(Box::new(VolumeSubject { access: target.open_spec(spec)?, read_only }))
}

/// Commits an idle store now and then, as a server does, until it is dropped.
pub struct Keeper(Option<Housekeeping>);

impl Keeper {
    /// For a store that is open here for writing; others need none.
    ///
    /// # Errors
    /// Those of starting its thread.
    pub fn of(target: &Target) -> Result<Self> {
        let Target::Live(AnyStore::Idle(store, _)) = target else { return Ok(Self(None)) };
        let interval = (!store.info().read_only).then_some(COMMIT_INTERVAL);
        Housekeeping::start(store.clone(), interval).map(|keeper| Self(Some(keeper)))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(keeper) = self.0.take() {
            keeper.stop();
        }
    }
}

/// Refuses what the system uses, or has open as a store; says what is on the rest, if that is known.
///
/// # Errors
/// `Busy`, `NotFound`, `Io`.
pub fn check_unused(path: &Path) -> Result<Option<&'static str>> {
    claim(path)?.content()
}
