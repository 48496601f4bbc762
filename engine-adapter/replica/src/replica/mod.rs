//! A Longhorn replica: the state machine of section "ReplicaService", and one volume of a store
//! seen as a chain of disks.
//!
//! What the volume looks like (size, tree, marks, content) is the store's alone, and nothing is
//! remembered of it here. Beside it a replica has the number of its head, whether it was closed in
//! good order (both in `volume.meta`), and its counters (`volume.counters`).
//!
//! **Locks.** `work` is held by whoever changes the replica, for as long as that takes. `state` is
//! held for moments, and never across a call of the store or the gate. What data connections call
//! (module `events`) takes `state` alone, so that [`Gate::set`] may be called under `work`.

mod below;
mod change;
pub(crate) mod counters;
mod events;
mod expand;
mod generation;
mod handover;
mod identity;
pub(crate) mod incoming;
mod lifecycle;
pub mod meta;
mod pending;
mod removal;
mod restore;
mod service;
mod taking;
pub(crate) mod view;

pub use handover::{OpenStore, Predecessor, StoreSource, User};
pub use incoming::Incoming;
pub use service::{ReplicaRpc, SERVICE_NAME};
pub use taking::{KIND, Progress, Taken};
pub use view::{Disk, ReplicaState};

use below::Below;
use counters::Counters;
use dbs_core::info::VolumeInfo;
use dbs_core::{Error, ErrorKind, Result, Store, Volume};
use generation::Generation;
use handover::Waiting;
use longhorn_data::{Access, Durability, Gate, Revision};
use longhorn_wire::frame::handed_over;
use longhorn_wire::proto::ptypes;
use longhorn_wire::{names, time};
use meta::VolumeMeta;
use pending::Pending;
use restore::Restoring;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;
use taking::Taking;
use view::{Limits, SECTOR_SIZE};

/// File of its directory that tells which generation of its content it has.
pub const GENERATION: &str = generation::FILE;
/// Files of its directory, of which it has some from its first start on.
pub const FILES: [&str; 4] =
    [meta::VOLUME_META, counters::COUNTERS_FILE, GENERATION, identity::FILE];

/// What a replica is started with.
#[derive(Debug, Clone)]
pub struct ReplicaOptions {
    /// Its directory.
    pub dir: PathBuf,
    /// Name of its volume in the store.
    pub volume: String,
    /// The store's file, if it lies in the directory: when it is gone, the replica is in error.
    pub store_file: Option<PathBuf>,
    /// The file that the volume rests on, or a directory with nothing else in it.
    pub backing_file: Option<PathBuf>,
    /// Upstream's files, if the volume rests on them, or has until now.
    pub taken: Option<Arc<dyn Taken>>,
    /// Bytes a second that come over from them, if it is not left to us; 0 for no limit.
    pub take_over: Option<u64>,
    /// Whether writes and unmaps are counted.
    pub revision_counter: bool,
    /// Whether unmaps mark the snapshots they reach as removed.
    pub unmap_mark: bool,
    /// Most snapshots.
    pub snapshot_max_count: i32,
    /// Most bytes of snapshots; the engine watches it.
    pub snapshot_max_size: i64,
    /// Whether the content is encrypted: then opening may have to make room for the header.
    pub encrypted: bool,
    /// When writes are acknowledged.
    pub durability: Durability,
    /// Bytes written after which a commit begins.
    pub commit_bytes: u64,
    /// Data connections read and write nothing: it measures the protocol alone.
    pub null_storage: bool,
}

impl ReplicaOptions {
    /// A replica of this directory and volume with upstream's defaults.
    #[must_use]
    pub fn new(dir: &Path, volume: &str) -> Self {
        Self {
            dir: dir.to_owned(),
            volume: volume.to_owned(),
            store_file: None,
            backing_file: None,
            taken: None,
            take_over: None,
            revision_counter: true,
            unmap_mark: false,
            snapshot_max_count: 250,
            snapshot_max_size: 0,
            encrypted: false,
            durability: Durability::default(),
            commit_bytes: longhorn_data::COMMIT_BYTES,
            null_storage: false,
        }
    }
}

/// One replica. All methods block; all are safe to call from many threads.
pub struct Replica {
    options: ReplicaOptions,
    below: Option<Below>,
    /// Upstream's files, until all of them is in the store.
    taking: Mutex<Option<Arc<Taking>>>,
    gate: Arc<Gate>,
    counters: Arc<Counters>,
    generation: Generation,
    me: Weak<Self>,
    /// One change at a time.
    work: Mutex<()>,
    state: Mutex<State>,
    pending: Mutex<Pending>,
    /// Who else uses the store for long.
    users: Mutex<Vec<Weak<dyn User>>>,
}

struct State {
    store: Place,
    /// The store came from another process, and was not found to be what this one can serve.
    unsettled: bool,
    /// Number of the head.
    head: u64,
    /// The revert that made it, or an empty text if none did; nothing if that is not known.
    revert: Option<String>,
    /// What `volume.meta` says: open, or not closed in good order.
    dirty: bool,
    /// As the store says.
    rebuilding: bool,
    /// Nothing if the replica is closed.
    opened: Option<Opened>,
    limits: Limits,
    max_size: i64,
    /// The head below which snapshots have been marked for unmaps; nothing if that is to be done.
    marked: Option<u64>,
    checked: Option<Instant>,
    /// A backup is being restored.
    restoring: Option<Restoring>,
    /// Identity of the layer that a backup was restored to; nothing once it may have become something else.
    restored: Option<String>,
}

/// Where the store is.
enum Place {
    /// Here.
    Own(Store),
    /// Still with an older process of the same directory.
    Waiting(Arc<Waiting>),
    /// With a newer one, which can be asked to give it back if it is known how.
    Surrendered(Option<Arc<Waiting>>),
}

struct Opened {
    /// Keeps the volume from being deleted; absent while the store is elsewhere.
    volume: Option<Volume>,
    /// Changed since it was opened, or not closed in good order before.
    dirty: bool,
    /// What is wrong with it, if something is.
    error: String,
    /// The files it depends on, as they were when it was opened.
    files: Vec<(PathBuf, FileId)>,
}

/// Device and inode.
type FileId = (u64, u64);

impl Replica {
    /// The replica of a directory and a store. It is closed, or initial if there is no volume yet.
    ///
    /// # Errors
    /// `Io` if its files cannot be read or written, those of the store.
    pub fn new(options: ReplicaOptions, source: StoreSource) -> Result<Arc<Self>> {
        let below = options.backing_file.as_deref().map(Below::open).transpose()?;
        let taking = options.taken.as_ref().map(|files| Taking::new(files, options.take_over));
        let counters = Arc::new(Counters::new(&options.dir));
        let generation = Generation::new(&options.dir);
        let limits = Limits {
            max_count: options.snapshot_max_count,
            unmap_mark: options.unmap_mark,
            revision: options.revision_counter,
        };
        let place = match source {
            StoreSource::Own(store) => Place::Own(store),
            StoreSource::HandOver { predecessor, open } => {
                Place::Waiting(Arc::new(Waiting::new(predecessor, open)?))
            }
        };
        let state = State {
            store: place,
            unsettled: false,
            head: 0,
            revert: None,
            dirty: false,
            rebuilding: false,
            opened: None,
            limits,
            max_size: options.snapshot_max_size,
            marked: None,
            checked: None,
            restoring: None,
            restored: None,
        };
        let gate = Gate::new(Access::not_open("initial"));
        match identity::of(&options.dir) {
            Ok(identity) => gate.identify(identity),
            // It is known by its address then.
            Err(e) => dbs_service::log::warn("identity", &[("error", &e)]),
        }
        let replica = Arc::new_cyclic(|me| Self {
            options,
            below,
            taking: Mutex::new(taking),
            gate,
            counters,
            generation,
            me: me.clone(),
            work: Mutex::default(),
            state: Mutex::new(state),
            pending: Mutex::default(),
            users: Mutex::default(),
        });
        match replica.owned() {
            Some(store) => replica.settle_in(&store)?,
            // Nothing that the older process has acknowledged is lost.
            None => replica.note_generation(|generation| generation.load(false, None)),
        }
        replica.shut();
        Ok(replica)
    }

    /// What data connections may do.
    #[must_use]
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// The store, if it is with this process and has all that the replica is to have.
    ///
    /// # Errors
    /// `Busy` if it is with another, or upstream's files are still needed.
    pub fn store(&self) -> Result<Store> {
        let (store, unsettled) = {
            let state = self.state();
            match &state.store {
                Place::Own(store) => (store.clone(), state.unsettled),
                Place::Waiting(_) => {
                    return Err(Error::busy("the store is still with an older process"));
                }
                Place::Surrendered(_) => return Err(self.surrendered()),
            }
        };
        if unsettled {
            self.take_below(&store)?;
        }
        self.check_taken()?;
        Ok(store)
    }

    /// The counter of writes and unmaps.
    #[must_use]
    pub fn revision_counter(&self) -> &dyn Revision {
        &*self.counters
    }

    /// Name of its volume in the store.
    #[must_use]
    pub fn volume_name(&self) -> &str {
        &self.options.volume
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.options.dir
    }

    /// The replica in Longhorn's words. Cheap: it is polled.
    ///
    /// # Errors
    /// `Busy` once the store has gone to a newer process; those of the store.
    pub fn get(&self) -> Result<ptypes::Replica> {
        // A trouble that nobody has noticed yet shows in the state.
        let _noticed = self.check_health();
        self.look_over();
        let facts = self.facts()?;
        let state = self.state();
        let limits = state.limits;
        let mut message = match &state.opened {
            None => facts.closed(limits),
            Some(opened) => {
                let name = state_name(opened, facts.rebuilding);
                ReplicaState { dirty: opened.dirty, ..facts }.open(name, limits)
            }
        };
        drop(state);
        self.show_below(&mut message);
        let lacks = message.rebuilding.then(|| self.unfilled(&message.disks));
        let revert = self.owned().and_then(|_| self.state().revert.clone());
        message.dbs = Some(ptypes::Facts { unfilled: lacks.unwrap_or_default(), revert });
        Ok(message)
    }

    /// The state's name, as in [`Replica::get`].
    ///
    /// # Errors
    /// As [`Replica::get`].
    pub fn state_name(&self) -> Result<String> {
        Ok(self.get()?.state)
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.state().opened.is_some()
    }

    /// Disks by name, whether it is open or not.
    ///
    /// # Errors
    /// As [`Replica::get`].
    pub fn disks(&self) -> Result<BTreeMap<String, Disk>> {
        Ok(self.facts()?.disks())
    }

    /// Disk name of the head.
    ///
    /// # Errors
    /// As [`Replica::get`].
    pub fn head_disk(&self) -> Result<String> {
        Ok(self.facts()?.head_disk())
    }

    /// What a newer process of the directory needs to know to answer for this one.
    ///
    /// # Errors
    /// As [`Replica::get`].
    pub fn export_state(&self) -> Result<ReplicaState> {
        self.facts()
    }

    /// All that is known, from the store or from the copy.
    fn facts(&self) -> Result<ReplicaState> {
        let (store, mut facts) = {
            let state = self.state();
            match &state.store {
                Place::Waiting(waiting) | Place::Surrendered(Some(waiting)) => {
                    return Ok(waiting.copy());
                }
                Place::Surrendered(None) => return Err(self.surrendered()),
                Place::Own(store) => (
                    store.clone(),
                    ReplicaState {
                        head: state.head,
                        dirty: state.dirty,
                        rebuilding: state.rebuilding,
                        revision: self.counters.revision(),
                        modified_ns: self.counters.modified_ns(),
                        layers: Vec::new(),
                    },
                ),
            }
        };
        facts.layers = self.layers(&store)?;
        Ok(facts)
    }

    /// Takes up what the directory and the store say.
    fn settle_in(&self, store: &Store) -> Result<()> {
        let name = &self.options.volume;
        let volumes = store.volumes(false);
        let Some(volume) = volumes.iter().find(|volume| volume.name == *name) else {
            return self.check_new(&volumes);
        };
        self.take_below(store)?;
        let meta = VolumeMeta::read(&self.options.dir)?;
        let head = meta.as_ref().and_then(|meta| names::head_number(&meta.head));
        let layers = self.layers(store)?;
        let parent = ReplicaState { layers, ..Default::default() }.parent_disk();
        // A clone or restore that was cut off: the store has its mark, but the replica was not rebuilding. Of a
        // rebuild the file tells before the store does, and it may go on telling of it for want of
        // room; so without the store's mark there is none, and nothing has been changed by one.
        let cut_off = volume.rebuilding && meta.as_ref().is_some_and(|meta| !meta.rebuilding);
        let rebuilding = volume.rebuilding && !cut_off;
        {
            let mut state = self.state();
            state.head = head.unwrap_or(0);
            // The file may be from before the head: for want of room, or by an older version.
            let meta = meta.as_ref().filter(|meta| meta.parent == parent);
            state.revert = meta.and_then(|meta| meta.head_revert.clone());
            state.dirty = meta.as_ref().is_none_or(|meta| meta.dirty);
            state.rebuilding = rebuilding;
            state.restored = None;
        }
        self.settle_begun(store, rebuilding, cut_off)?;
        let (dirty, lost_tail) = (self.state().dirty, store.lost_tail());
        self.note_generation(|generation| generation.load(dirty, lost_tail));
        self.counters.distrust_before(lost_tail);
        self.counters.load(volume.revision, time::now_ns())?;
        self.begin_taking(store)?;
        let told = meta.is_some_and(|meta| meta.rebuilding == rebuilding);
        if told { Ok(()) } else { self.note_in_meta() }
    }

    /// A replica with a store of its own is there as soon as that has a volume, whatever its name: an empty one beside
    /// it would be taken for it.
    fn check_new(&self, volumes: &[VolumeInfo]) -> Result<()> {
        let Some(other) = volumes.first().filter(|_| self.options.store_file.is_some()) else {
            return Ok(());
        };
        let (dir, name) = (self.options.dir.display(), &self.options.volume);
        Err(Error::invalid(format!(
            "the replica in `{dir}` is one of the volume `{}`, not of `{name}`: start it with that --volume-name",
            other.name
        )))
    }

    /// Writes `volume.meta`.
    fn write_meta(&self) -> Result<()> {
        self.meta()?.write(&self.options.dir)
    }

    /// What `volume.meta` is to say.
    fn meta(&self) -> Result<VolumeMeta> {
        let facts = self.facts()?;
        Ok(VolumeMeta {
            size: facts.size(),
            head: facts.head_disk(),
            dirty: facts.dirty,
            rebuilding: facts.rebuilding,
            parent: facts.parent_disk(),
            sector_size: SECTOR_SIZE,
            backing_file_path: self.backing_path().to_owned(),
            encrypted: self.options.encrypted,
            head_revert: self.state().revert.clone(),
            ..Default::default()
        })
    }

    /// As [`Replica::write_meta`], but a file system without room is no reason to refuse what is being
    /// done: who cannot open the volume can neither read it nor delete what takes the room.
    ///
    /// It is safe because the store is the truth. The file then tells of a head number that is too
    /// small, or of an older size and parent, which nobody depends on (`host::registry` knows that they
    /// may be old); of a replica that was closed in order though it was not, or the other way round,
    /// which is shown and decides nothing (recovery is the store's, at each open); or of a rebuild that
    /// is over, which the store contradicts. What a rebuild needs the file for is written before it
    /// begins, or it does not.
    fn note_in_meta(&self) -> Result<()> {
        match self.write_meta() {
            Err(e) if e.kind() == ErrorKind::NoSpace => {
                dbs_service::log::warn("volume-meta", &[("error", &e)]);
                Ok(())
            }
            result => result,
        }
    }

    /// As [`Replica::write_meta`], after a change that is done and durable in the store: it only
    /// repeats that.
    fn repeat_in_meta(&self) {
        if let Err(e) = self.write_meta() {
            dbs_service::log::warn("volume-meta", &[("error", &e)]);
        }
    }

    /// The store, if it is here.
    fn owned(&self) -> Option<Store> {
        match &self.state().store {
            Place::Own(store) => Some(store.clone()),
            Place::Waiting(_) | Place::Surrendered(_) => None,
        }
    }

    fn surrendered(&self) -> Error {
        Error::busy(handed_over(self.options.dir.display()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic leaves it inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a change of an open replica; nothing is to be done if it is not open.
    ///
    /// # Errors
    /// `Busy` once the store has gone to a newer process.
    fn begin(&self) -> Result<Option<MutexGuard<'_, ()>>> {
        let work = self.work();
        let state = self.state();
        if matches!(state.store, Place::Surrendered(_)) && state.opened.is_none() {
            return Err(self.surrendered());
        }
        Ok(state.opened.is_some().then_some(work))
    }

    fn work(&self) -> MutexGuard<'_, ()> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica").field("options", &self.options).finish_non_exhaustive()
    }
}

/// The name of an open replica's state.
fn state_name(opened: &Opened, rebuilding: bool) -> &'static str {
    if !opened.error.is_empty() {
        "error"
    } else if rebuilding {
        "rebuilding"
    } else if opened.dirty {
        "dirty"
    } else {
        "open"
    }
}
