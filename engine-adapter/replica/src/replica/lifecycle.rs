//! Create, open, close, reload, delete.

use super::events::Events;
use super::generation::Generation;
use super::handover::{OpenStore, Predecessor, Sleeper, Waiting};
use super::incoming::MERGE_PATIENCE;
use super::meta::VolumeMeta;
use super::pending::Pending;
use super::{Opened, Place, Replica, SECTOR_SIZE};
use dbs_core::{Error, Result, Store};
use dbs_service::log;
use longhorn_data::{Access, Active, Target};
use longhorn_sync::image::Record;
use longhorn_wire::time;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

/// What an encrypted volume needs beyond its size.
const LUKS2_HEADER_BYTES: u64 = 16 << 20;

/// How long requests in flight may take to end when the store is handed over. Tests have some that
/// do not.
const SURRENDER_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 30_000 });

/// How long others who use the store for long may take to give it up: before I/O ends, and after.
const USES_TIMEOUT: Duration = Duration::from_secs(2);
const LATE_USES_TIMEOUT: Duration = Duration::from_millis(500);

impl Replica {
    /// Makes the volume, if there is none; else it does nothing.
    ///
    /// # Errors
    /// `Invalid` for an impossible size, those of the store.
    pub fn create(&self, size: u64) -> Result<()> {
        let _work = self.work();
        if !self.facts()?.layers.is_empty() {
            return Ok(());
        }
        if size == 0 {
            return Err(Error::invalid("cannot create a replica of size 0"));
        }
        if !size.is_multiple_of(SECTOR_SIZE) {
            return Err(Error::invalid(format!(
                "size {size} not a multiple of sector size {SECTOR_SIZE}"
            )));
        }
        let store = self.take_over()?;
        let dir = &self.options.dir;
        fs::create_dir_all(dir).map_err(|e| Error::io(e, format!("making `{}`", dir.display())))?;
        self.make_volume(&store, size)?;
        self.take_below(&store)?;
        {
            let mut state = self.state();
            (state.head, state.dirty, state.rebuilding) = (0, false, false);
            state.marked = None;
        }
        self.note_generation(|generation| generation.load(false, store.lost_tail()));
        self.counters.distrust_before(store.lost_tail());
        self.counters.start(0, time::now_ns())?;
        self.write_meta()?;
        self.shut();
        log::info("create", &[("volume", &self.options.volume), ("size", &size)]);
        Ok(())
    }

    /// Opens it for I/O. `is_upgrade` says that another engine may still use it; `expected_size` is
    /// what the engine takes for the size, 0 or less if it does not say.
    ///
    /// # Errors
    /// `Invalid` if it is open or there is no volume, those of the store.
    pub fn open(&self, is_upgrade: bool, expected_size: i64) -> Result<()> {
        let _work = self.work();
        if self.is_open() {
            return Err(Error::invalid("replica is already open"));
        }
        if !self.gate.is_settled() {
            return Err(Error::busy("requests from before the replica was closed still run"));
        }
        self.refresh_copy();
        let size = self.facts()?.size();
        if size == 0 {
            return Err(Error::not_found("there is no volume to open: create it first"));
        }
        if is_upgrade && self.owned().is_none() {
            return self.open_asleep();
        }
        let store = self.take_over()?;
        self.open_here(&store)?;
        let expected = u64::try_from(expected_size).unwrap_or(0);
        if self.options.encrypted && !is_upgrade && expected == size + LUKS2_HEADER_BYTES {
            let grown =
                self.expand_open(&store, expected).map_err(|e| Error::invalid(e.to_string()));
            if let Err(e) = grown {
                self.close_here(&store)?;
                return Err(e);
            }
        }
        Ok(())
    }

    /// Opens it while the store is with another process: the first I/O takes it over.
    fn open_asleep(&self) -> Result<()> {
        let dirty = self.facts()?.dirty;
        self.state().opened =
            Some(Opened { volume: None, dirty, error: String::new(), files: Vec::new() });
        self.gate.set(Access::Dormant(Arc::new(Sleeper(self.me.clone()))));
        log::info("open", &[("volume", &self.options.volume), ("dormant", &true)]);
        Ok(())
    }

    /// Opens it, or goes on with what was open while the store was elsewhere.
    pub(super) fn open_here(&self, store: &Store) -> Result<()> {
        self.take_below(store)?;
        let volume = store.volume(&self.options.volume)?;
        let was_dirty = {
            let mut state = self.state();
            let before = state.opened.as_ref().is_some_and(|opened| opened.dirty);
            std::mem::replace(&mut state.dirty, true) || before
        };
        if let Err(e) = self.note_in_meta() {
            self.state().dirty = was_dirty;
            return Err(e);
        }
        self.note_generation(Generation::open);
        let target = if self.options.null_storage {
            Target::Null { size: volume.size() }
        } else {
            Target::Volume { store: store.clone(), volume: volume.clone() }
        };
        let mut active = Active::new(target, Arc::new(Events(self.me.clone())))
            .with_durability(self.options.durability)
            .with_commit_bytes(self.options.commit_bytes);
        if self.options.revision_counter {
            active = active.with_revision(self.counters.clone());
        }
        let files = self.files()?;
        if self.is_rebuilding() {
            self.distrust(&self.layers(store)?, false);
        }
        {
            let mut state = self.state();
            let opened =
                Opened { volume: Some(volume), dirty: was_dirty, error: String::new(), files };
            state.opened = Some(opened);
            (state.marked, state.checked) = (None, None);
        }
        self.gate.set(Access::Open(Arc::new(active)));
        log::info("open", &[("volume", &self.options.volume)]);
        Ok(())
    }

    /// Ends I/O and makes everything durable. Does nothing if it is not open.
    ///
    /// # Errors
    /// Those of the store: it is closed all the same, and dirty.
    pub fn close(&self) -> Result<()> {
        let _work = self.work();
        if !self.is_open() {
            return Ok(());
        }
        match self.owned() {
            Some(store) => self.close_here(&store),
            None => {
                self.shut();
                Ok(())
            }
        }
    }

    fn close_here(&self, store: &Store) -> Result<()> {
        self.shut();
        *self.pending() = Pending::default();
        self.commit_to(store)?;
        self.state().dirty = false;
        self.note_in_meta()?;
        self.note_generation(Generation::close);
        log::info("close", &[("volume", &self.options.volume)]);
        Ok(())
    }

    /// Lets no I/O through any more and lets go of the volume.
    pub(super) fn shut(&self) {
        self.void_restore();
        let limits = self.state().limits;
        let closed = self.facts().map(|facts| facts.closed(limits).state);
        let name = closed.unwrap_or_else(|_| "error".to_owned());
        if !self.gate.set(Access::not_open(&name)) {
            log::warn("close", &[("error", &"requests in flight do not end")]);
        }
        self.state().opened = None;
        self.note_generation(Generation::end_session);
    }

    /// Makes everything durable, the revision counter with it.
    pub(super) fn commit_to(&self, store: &Store) -> Result<()> {
        if self.options.revision_counter {
            store.stage_revision(&self.options.volume, self.counters.written())?;
        }
        store.flush()
    }

    /// Reads anew what the store says, and shows what has come in for a rebuild. Does nothing if it
    /// is not open.
    ///
    /// # Errors
    /// Those of the store.
    pub fn reload(&self) -> Result<()> {
        if self.is_open()
            && self.is_rebuilding()
            && let Ok(store) = self.store()
        {
            // May take long, and others wait for who works.
            self.finish_merges(&store, MERGE_PATIENCE)?;
        }
        let Some(_work) = self.begin()? else { return Ok(()) };
        let store = self.take_over()?;
        self.show_incoming(&store)?;
        self.see_filled();
        let mut state = self.state();
        state.marked = None;
        if let Some(opened) = &mut state.opened {
            opened.error.clear();
            state.checked = None;
        }
        drop(state);
        self.repeat_in_meta();
        Ok(())
    }

    /// Deletes the volume and what belongs to it in the directory. Does nothing if it is not open.
    ///
    /// # Errors
    /// Those of the store; it is closed then.
    pub fn delete(&self) -> Result<()> {
        let Some(_work) = self.begin()? else { return Ok(()) };
        let store = self.take_over()?;
        self.check_taken()?;
        let disks = self.disks()?;
        self.note_generation(Generation::change);
        self.shut();
        store.delete_volume(&self.options.volume)?;
        for disk in disks.keys() {
            Record::remove(&self.options.dir.join(disk))?;
        }
        self.counters.remove();
        let meta = self.options.dir.join(super::meta::VOLUME_META);
        match fs::remove_file(&meta) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                log::warn("delete", &[("path", &meta.display()), ("error", &e)]);
            }
            _ => {}
        }
        {
            let mut state = self.state();
            (state.head, state.dirty, state.rebuilding) = (0, false, false);
        }
        self.shut();
        log::info("delete", &[("volume", &self.options.volume)]);
        Ok(())
    }

    /// Says that the content is incomplete, or that it is complete. Said again, a rebuild begins anew: a mark
    /// from before need not be taken away for it. That it is complete may be said again as well: the controller and
    /// whoever asks it for a rebuild both do.
    ///
    /// # Errors
    /// `Invalid` from another state than open, dirty or rebuilding; if `volume.meta` cannot tell of
    /// a rebuild that is to begin; those of the store. Nothing has changed then.
    pub fn set_rebuilding(&self, rebuilding: bool) -> Result<()> {
        let _work = self.work();
        let name = self.state_name()?;
        match (name.as_str(), rebuilding) {
            ("rebuilding", _) | ("open" | "dirty", true) => {}
            ("open" | "dirty", false) => return Ok(()),
            _ => {
                let text = format!("cannot set rebuilding={rebuilding} from state {name}");
                return Err(Error::invalid(text));
            }
        }
        if rebuilding && self.state().restoring.is_some() {
            return Err(Error::busy("a backup is being restored to the replica"));
        }
        let store = self.take_over()?;
        self.check_taken()?;
        self.state().restored = None;
        let layers = self.layers(&store)?;
        if rebuilding {
            // Durable before the store's mark: that alone is what a clone has, and is taken away at the
            // next start if there is no clone. A rebuild that was cut off would count as complete.
            VolumeMeta { rebuilding, ..self.meta()? }.write(&self.options.dir)?;
        }
        if let Err(e) = store.set_rebuilding(&self.options.volume, rebuilding) {
            self.repeat_in_meta();
            return Err(e);
        }
        let was_marked = std::mem::replace(&mut self.state().rebuilding, rebuilding);
        if rebuilding {
            self.distrust(&layers, was_marked);
            return Ok(());
        }
        *self.pending() = Pending::default();
        self.note_in_meta()
    }

    /// Sets the count of changes. Does nothing if it is not open.
    ///
    /// # Errors
    /// `Invalid` if changes are not counted.
    pub fn set_revision(&self, counter: i64) -> Result<()> {
        let Some(_work) = self.begin()? else { return Ok(()) };
        if !self.options.revision_counter {
            return Err(Error::invalid("the revision counter of this replica is disabled"));
        }
        let counter = u64::try_from(counter)
            .map_err(|_| Error::invalid(format!("{counter} is no revision counter")))?;
        let store = self.take_over()?;
        self.counters.set_revision(counter);
        self.commit_to(&store)
    }

    /// Whether unmaps mark the snapshots they reach as removed, from now on.
    pub fn set_unmap_mark(&self, enabled: bool) {
        self.state().limits.unmap_mark = enabled;
    }

    /// Most snapshots, from now on.
    pub fn set_snapshot_max_count(&self, count: i32) {
        self.state().limits.max_count = count;
    }

    /// Most bytes of snapshots, from now on; the engine watches it.
    pub fn set_snapshot_max_size(&self, size: i64) {
        self.state().max_size = size;
    }

    /// Most bytes of snapshots; 0 for no limit.
    #[must_use]
    pub fn snapshot_max_size(&self) -> i64 {
        self.state().max_size
    }

    /// Hands the store over to a newer process of the directory: refuses I/O from now on, waits for
    /// what is in flight, makes it durable, and has others who use the store give it up. The caller closes the store. With `back`, how that
    /// process is asked and the store opened again, the replica is closed afterwards: it tells its state,
    /// and opening it takes the store back. Without, all calls are errors.
    ///
    /// # Errors
    /// `Busy` if it was handed over already, or if what is in flight does not end: then it still
    /// has the store, refuses I/O, and may be asked again. Those of taking it over first.
    pub fn surrender(&self, back: Option<(Box<dyn Predecessor>, OpenStore)>) -> Result<Store> {
        // While I/O goes on.
        self.end_uses(USES_TIMEOUT);
        let store = self.give_away(back)?;
        // What has begun meanwhile: from now on nobody is given it.
        self.end_uses(LATE_USES_TIMEOUT);
        Ok(store)
    }

    fn give_away(&self, back: Option<(Box<dyn Predecessor>, OpenStore)>) -> Result<Store> {
        let _work = self.work();
        if self.has_surrendered() && !self.is_open() {
            return Err(self.surrendered());
        }
        let store = match self.owned() {
            Some(store) => store,
            None => self.take_over()?,
        };
        let text = self.surrendered().to_string();
        let refused = Access::Refused { io: text.clone(), ping: text };
        if !self.gate.set_within(refused, SURRENDER_TIMEOUT) {
            // A write among them would destroy what the newer one acknowledges meanwhile.
            let dir = self.options.dir.display();
            let text = format!("the store of `{dir}` is in use by requests that do not end");
            return Err(Error::busy(text));
        }
        // The store was open for a reason: its flag says so until the newer process closes it. Of a store that this
        // process cannot serve, it knows nothing to write there.
        let unsettled = self.state().unsettled;
        if !unsettled && let Err(e) = self.commit_to(&store) {
            log::error("surrender", &[("error", &e)]);
        }
        let facts = self.facts();
        let back = back.zip(facts.ok()).map(|((other, open), facts)| {
            // It is as the newer process finds it.
            Arc::new(Waiting::with(other, open, facts))
        });
        self.void_restore();
        // What it changes when it has the store again is of another session.
        self.note_generation(Generation::end_session);
        let mut state = self.state();
        state.store = Place::Surrendered(back);
        state.opened = None;
        Ok(store)
    }

    /// Lets go of a store that its owner closes, though [`Replica::surrender`] has failed. It stays
    /// locked, for whoever opens its file, until the requests that use it have ended.
    pub fn let_go(&self) {
        let work = self.work();
        self.void_restore();
        let mut state = self.state();
        if matches!(state.store, Place::Own(_)) {
            state.store = Place::Surrendered(None);
            state.opened = None;
        }
        drop((state, work));
        self.end_uses(LATE_USES_TIMEOUT);
    }

    /// Whether the store was handed over to a newer process.
    #[must_use]
    pub fn has_surrendered(&self) -> bool {
        matches!(self.state().store, Place::Surrendered(_))
    }
}
