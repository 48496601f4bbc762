//! A machine with one disk and one store on it, and the model beside it: does one step at a time,
//! dies and comes back as told, and compares.

use crate::blind;
use crate::cover::{self, Scene};
use crate::disk::{CrashMode, Faults, Medium, SimDisk, is_stop};
use crate::env::{SimEnv, TailPlace};
use crate::image;
use crate::job::{Job, Went};
use crate::layers;
use crate::model::Model;
use crate::op::{Long, Op, Reads, snapshot_name, volume_name};
use crate::outcomes::{End, Outcomes};
use crate::perform::perform_beside;
use crate::slow::SlowRead;
use crate::step::{Fate, RESERVE_EXTENTS, Stats, Step, full};
use crate::verify::{self, Allow, Found};
use dbs_core::io::{Storage, TailMemory};
use dbs_core::limits::DATA_SHARE;
use dbs_core::sabotage::set_at_once;
use dbs_core::store::{Env, InitOptions};
use dbs_core::{Error, ErrorKind, Store, Volume};
use std::collections::BTreeMap;
use std::sync::Arc;

mod after;

use after::Poisoned;

/// Sectors that [`Op::Fill`] writes at once.
const FILL_SECTORS: u16 = 64;

/// Free extents with which no operation waits for space, and so for reads.
const READS_EXTENTS: u64 = 12;

/// Crash images of each captured moment of a random history.
const IMAGES_EACH: usize = 2;

/// What a machine is built from.
#[derive(Debug, Clone)]
pub struct Config {
    /// Shape of the store.
    pub init: InitOptions,
    /// The disk starts with garbage instead of zeros.
    pub garbage: bool,
    /// Whether there is a tmpfs for the tail.
    pub tail: bool,
    /// Randomness of the disk and the environment.
    pub seed: u64,
    /// Crash images of each moment that is captured.
    pub images_each: usize,
    /// Blocks of data tear at sectors too, as where these are the physical ones.
    pub tears: bool,
    /// There is no memory to remember look-ups, but for the last one.
    pub forgets: bool,
    /// Some volumes are encrypted.
    pub encrypts: bool,
    /// Extents and entries that a step does at once, if that is not to be what it is elsewhere, which is more than volumes
    /// here have.
    pub at_once: Option<u32>,
}

impl Config {
    /// A small store: 64 KiB extents, few slots, the smallest journal.
    #[must_use]
    pub fn small(seed: u64) -> Self {
        let init = InitOptions {
            size: Some(4 << 20),
            extent_size: 64 << 10,
            max_volumes: Some(8),
            max_snapshots: Some(24),
            journal_size: Some(128 << 10),
            max_size: Some(8 << 20),
            ..InitOptions::default()
        };
        let tail = !seed.is_multiple_of(3);
        let garbage = seed % 2 == 1;
        let forgets = seed % 5 == 1;
        Self {
            init,
            garbage,
            tail,
            seed,
            images_each: IMAGES_EACH,
            tears: false,
            forgets,
            encrypts: false,
            at_once: None,
        }
    }
}

/// The machine.
pub struct Machine {
    /// Its disk.
    pub disk: Arc<SimDisk>,
    /// What the store must hold.
    pub model: Model,
    /// What was done so far.
    pub stats: Stats,
    /// Crash images of each moment that is captured.
    pub images_each: usize,
    /// There is no memory for bitmaps and look-ups.
    pub forgets: bool,
    env: Arc<SimEnv>,
    tail: Option<TailPlace>,
    stale_tail: Option<Vec<u8>>,
    store: Option<Store>,
    held: BTreeMap<u32, Volume>,
    slow: Vec<SlowRead>,
    job: Option<Job>,
    poisoned: Option<Poisoned>,
    number: u32,
    hit: bool,
    /// No step since the store was opened.
    fresh: bool,
}

/// A machine that was killed and can be started any number of times.
pub struct Frozen {
    disk: SimDisk,
    tail: Option<Option<Vec<u8>>>,
    model: Model,
    number: u32,
    seed: u64,
    forgets: bool,
}

impl Machine {
    /// Formats a disk and opens the store on it.
    ///
    /// # Errors
    /// What the store said.
    pub fn new(config: &Config) -> Result<Self, String> {
        set_at_once(config.at_once.unwrap_or(u32::MAX));
        let size = config.init.size.unwrap_or(4 << 20);
        let medium = Medium { garbage: config.garbage, ..Medium::file(size) };
        let disk = Arc::new(SimDisk::new(medium, config.seed));
        let env = Arc::new(SimEnv::new(config.seed));
        Store::init_on(&*disk, &config.init, &*env).map_err(|e| format!("init: {e}"))?;
        if disk.dirty() {
            return Err("init left something unflushed".into());
        }
        let mut machine = Self {
            disk,
            model: Model::on(config.tears, config.encrypts),
            stats: Stats::default(),
            images_each: config.images_each,
            forgets: config.forgets,
            env,
            tail: config.tail.then(TailPlace::default),
            stale_tail: None,
            store: None,
            held: BTreeMap::new(),
            slow: Vec::new(),
            job: None,
            poisoned: None,
            number: 0,
            hit: false,
            fresh: true,
        };
        machine.open().map_err(|e| format!("first open: {e}"))?;
        if !config.tears {
            let info = machine.store().info();
            machine.disk.set_atomic_from(info.metadata);
        }
        verify::check(machine.store())?;
        Ok(machine)
    }

    /// The open store.
    ///
    /// # Panics
    /// Between a crash and the next open: a bug of the runner.
    #[must_use]
    pub fn store(&self) -> &Store {
        self.store.as_ref().expect("the store is open")
    }

    /// Does one step and compares what it has to.
    ///
    /// # Errors
    /// Everything that must not be.
    pub fn step(&mut self, step: &Step) -> Result<(), String> {
        self.stats.steps += 1;
        let mut rng = fastrand::Rng::with_seed(step.seed);
        if self.poisoned.is_some() {
            return self.step_poisoned(step, &mut rng);
        }
        match step.op {
            Op::LoseTail => {
                self.ordinary(&Op::Flush, Fate::Calm, &mut rng)?;
                self.tail.iter().for_each(TailPlace::vanish);
                Ok(())
            }
            Op::Verify => self.verify(),
            Op::ReadBegin { vol, of } => self.begin_read(vol, of),
            Op::ReadOn => self.slow.iter_mut().try_for_each(|slow| slow.read_on(&self.disk)),
            Op::ReadEnd => self.end_reads(|_| true),
            Op::Fill { vol } => self.fill(vol, step),
            Op::Reopen => self.reopen(step.fate, &mut rng),
            Op::Kill => {
                let outcomes = Outcomes::settled(&self.model);
                self.end(End::Killed, &outcomes, &mut rng)
            }
            Op::KillWithoutTail => {
                let outcomes = Outcomes::settled(&self.model);
                self.end(End::TailLost, &outcomes, &mut rng)
            }
            Op::PowerLoss => {
                let outcomes = Outcomes::settled(&self.model);
                self.end(End::PowerLost, &outcomes, &mut rng)
            }
            _ => self.ordinary(&step.op, step.fate, &mut rng),
        }
    }

    fn ordinary(&mut self, op: &Op, fate: Fate, rng: &mut fastrand::Rng) -> Result<(), String> {
        if self.poisoned.is_some() {
            return self.refused(op, fate);
        }
        let scrubs = self.job.as_ref().is_some_and(|job| job.long == Long::Scrub)
            || matches!(op, Op::Begin { long: Long::Scrub });
        let fate = match fate {
            // What it cannot read it reports as damage, at its end.
            Fate::ReadEioAt(_) | Fate::Unreadable if scrubs => Fate::Calm,
            fate => fate,
        };
        if self.model.unpredictable(op) || self.waits_for_job(op) {
            return Ok(());
        }
        self.end_reads_before(op)?;
        self.count(op, fate);
        let before = self.model.clone();
        let mut after = before.clone();
        self.number += 1;
        self.fresh = false;
        let expected = after.apply(op, self.number);
        self.disk.arm(fate.faults(self.store().info().metadata));
        let result = self.perform(op);
        let captures = self.disk.take_captures();
        let outcomes = match &expected {
            Ok(()) => Outcomes::of(op, &before, &after),
            Err(_) => Outcomes::settled(&before),
        };
        let died = self.disk.stopped();
        self.hit = fate.was_hit(&self.disk.counts());
        self.stats.disturbed += u64::from(self.hit);
        if result.is_err() && expected.is_ok() && !op.is_command() {
            // Who reads beside a write sees what it has written, though it failed in the end.
            self.slow.iter_mut().for_each(|slow| slow.note(&after));
        }
        match (&result, &expected) {
            (Ok(()), Ok(())) => {
                after.acknowledge(op);
                self.model = after;
            }
            (Ok(()), Err(kinds)) => {
                return Err(format!("{op:?} succeeded; it should have failed with {kinds:?}"));
            }
            (Err(error), _) if is_stop(error) && died => {}
            (Err(error), Err(kinds)) if kinds.contains(&error.kind()) => {}
            (Err(error), _) if fate.explains(error) && !must_go_on(op, error) => {}
            (Err(error), _) if merges(op) && self.cannot_merge(error) => {}
            (Err(error), Ok(())) if error.kind() == ErrorKind::NoSpace => {
                self.stats.no_space += 1;
                full(&self.store().info(), op).map_err(|e| format!("{op:?}: {error}; {e}"))?;
            }
            (Err(error), _) => {
                return Err(format!("{op:?} failed: {error} ({:?})", error.kind()));
            }
        }
        self.note_job();
        for capture in captures {
            self.images_of(&capture, self.images_each, &outcomes, rng)?;
        }
        let failed = result.as_ref().err().map(Error::kind);
        let known = failed.is_none() && !self.may_keep_discarded(op, fate);
        let outcomes = if known { Outcomes::settled(&self.model) } else { outcomes };
        self.consequence(fate, failed, died, &outcomes, rng)?;
        self.slow.iter_mut().for_each(|slow| slow.note(&self.model));
        Ok(())
    }

    fn count(&self, op: &Op, fate: Fate) {
        if cover::is_on() {
            let (info, job) = (&self.store().info(), self.job.as_ref().map(|job| job.long));
            let (reads, fresh, forgets) = (self.slow.len(), self.fresh, self.forgets);
            let poisoned = self.poisoned.is_some();
            cover::note(
                op,
                fate,
                &self.model,
                &Scene { info, job, reads, fresh, forgets, poisoned },
            );
        }
    }

    fn begin_read(&mut self, vol: u8, of: Reads) -> Result<(), String> {
        let store = self.store().clone();
        let Ok(volume) = self.model.volume_mut(vol) else { return Ok(()) };
        let handle = match of {
            Reads::Head => self.held.get(&volume.id).cloned(),
            Reads::Snapshot(snap) if volume.snapshots.contains_key(&snapshot_name(snap)) => {
                let spec = format!("{}@{}", volume_name(vol), snapshot_name(snap));
                Some(store.volume(&spec).map_err(|e| format!("opening {spec}: {e}"))?)
            }
            Reads::Snapshot(_) => None,
            Reads::Layer(snap) | Reads::Observed(snap) => {
                let known = |snap| volume.snapshots.contains_key(&snapshot_name(snap));
                if snap.is_none_or(known) {
                    self.slow.extend(SlowRead::begin_standing(&store, &self.model, vol, of)?);
                }
                return Ok(());
            }
        };
        if let Some(handle) = handle {
            self.slow.extend(SlowRead::begin(handle, &self.model, vol, of)?);
        }
        Ok(())
    }

    fn end_reads(&mut self, which: impl Fn(&SlowRead) -> bool) -> Result<(), String> {
        let ending = self.slow.extract_if(.., |slow| which(slow)).collect::<Vec<_>>();
        ending.into_iter().try_for_each(|slow| slow.end(&self.disk))
    }

    /// Reads end where this one thread would wait for them, or the model does not know of them.
    fn end_reads_before(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Hold { vol } => {
                let id = self.model.volume_mut(vol).map_or(0, |v| v.id);
                return self.end_reads(|slow| slow.of == Reads::Head && slow.id == id);
            }
            // It is refused while a handle is there.
            Op::DeleteVolume { vol } | Op::DeleteSnapshot { vol, .. } => {
                let id = self.model.volume_mut(vol).map_or(0, |v| v.id);
                self.end_reads(|slow| slow.has_handle() && slow.id == id)?;
            }
            _ => {}
        }
        // A layer is written once what a clone showed of it is read by nobody any more.
        if merges(op)
            || matches!(op, Op::WriteLayer { .. })
            || self.store().info().extents_free <= READS_EXTENTS
        {
            self.end_reads(|_| true)?;
            if self.job.is_some() && !self.has_turn() {
                self.stop_job().map_err(|e| format!("stopping what reads: {e}"))?;
                self.note_job();
            }
        }
        Ok(())
    }

    /// What follows from a step: a crash, a look at what a failed write left, or crash images.
    fn consequence(
        &mut self,
        fate: Fate,
        failed: Option<ErrorKind>,
        died: bool,
        outcomes: &Outcomes,
        rng: &mut fastrand::Rng,
    ) -> Result<(), String> {
        match fate {
            Fate::KillAt(_) | Fate::PowerLossAt(_) if died => {
                return self.end(fate.end(rng), outcomes, rng);
            }
            Fate::EioAt(_) | Fate::RefusedAt(_)
                if self.hit && failed != Some(ErrorKind::NoSpace) =>
            {
                self.disk.arm(Faults::default());
                return self.after_error(failed, outcomes, fate.end(rng), rng);
            }
            Fate::ReadEioAt(_) | Fate::EnospcFrom(_) | Fate::RefusedAt(_) | Fate::Unreadable
                if failed.is_some() =>
            {
                self.disk.arm(Faults::default());
                return self.after_error(failed, outcomes, End::Killed, rng);
            }
            _ => {}
        }
        self.disk.arm(Faults::default());
        if !outcomes.certain() {
            let (index, found) = outcomes.compare(self.store(), End::Killed)?;
            self.adopt(outcomes, index, &found, End::Killed);
        }
        if matches!(fate, Fate::Images(_)) {
            let settled = Outcomes::settled(&self.model);
            let disk = self.disk.fork();
            self.images_of(&disk, 2 * self.images_each, &settled, rng)?;
        }
        Ok(())
    }

    /// Whether a discard may have left content: on a full store there may be no entry to mark it.
    fn may_keep_discarded(&self, op: &Op, fate: Fate) -> bool {
        let refused = self.hit && matches!(fate, Fate::EnospcFrom(_) | Fate::RefusedAt(_));
        let full = || {
            let info = self.store().info();
            info.extents_free <= RESERVE_EXTENTS + info.extents_total / u64::from(DATA_SHARE)
        };
        matches!(op, Op::Discard { .. }) && (refused || full())
    }

    fn adopt(&mut self, outcomes: &Outcomes, index: usize, found: &Found, end: End) {
        self.model = outcomes.model(index).clone();
        let exact = end == End::Killed && outcomes.certain();
        let durable = matches!(end, End::PowerLost | End::FlushLost);
        verify::adopt(&mut self.model, found, durable, exact);
        self.note_job();
    }

    fn fill(&mut self, vol: u8, step: &Step) -> Result<(), String> {
        let Ok(volume) = self.model.volume_mut(vol) else { return Ok(()) };
        let sectors = volume.head.sectors as u16;
        let mut rng = fastrand::Rng::with_seed(step.seed);
        let full = self.stats.no_space;
        for at in (0..sectors).step_by(usize::from(FILL_SECTORS)) {
            let len = FILL_SECTORS.min(sectors - at);
            self.ordinary(&Op::Write { vol, at, len, fua: false }, Fate::Calm, &mut rng)?;
            if self.stats.no_space > full {
                break;
            }
        }
        Ok(())
    }

    /// Compares the running store with the model.
    ///
    /// # Errors
    /// How they differ, or what the checker found.
    pub fn verify(&mut self) -> Result<(), String> {
        verify::compare(self.store(), &[&self.model], Allow::Newest)?;
        if self.poisoned.is_none() {
            verify::check(self.store())?;
        }
        verify::check_maps(self.store(), &self.model)?;
        layers::check(self.store(), &self.model)
    }

    fn reopen(&mut self, fate: Fate, rng: &mut fastrand::Rng) -> Result<(), String> {
        self.end_reads(|_| true)?;
        self.stop_job().map_err(|e| format!("stopping what is under way: {e}"))?;
        self.held.clear();
        self.forget_handles();
        let outcomes = Outcomes::settled(&self.model);
        self.disk.arm(fate.faults(self.store().info().metadata));
        let Some(store) = self.store.take() else { return Ok(()) };
        let closed = store.close();
        self.hit = fate.was_hit(&self.disk.counts());
        for capture in self.disk.take_captures() {
            self.images_of(&capture, self.images_each, &outcomes, rng)?;
        }
        if self.disk.stopped() || closed.as_ref().is_err_and(|error| fate.explains(error)) {
            return self.end(fate.end(rng), &outcomes, rng);
        }
        self.disk.arm(Faults::default());
        closed.map_err(|e| format!("close: {e}"))?;
        self.alone()?;
        if self.disk.dirty() {
            return Err("a closed store has unflushed writes".into());
        }
        self.model.settle();
        let outcomes = Outcomes::settled(&self.model);
        self.recover(End::Killed, &outcomes, rng)
    }

    /// Ends the process as told, starts the next one, and compares.
    ///
    /// # Errors
    /// Everything that must not be.
    pub fn end(
        &mut self,
        end: End,
        outcomes: &Outcomes,
        rng: &mut fastrand::Rng,
    ) -> Result<(), String> {
        self.die(end, rng)?;
        self.recover(end, outcomes, rng)
    }

    fn die(&mut self, end: End, rng: &mut fastrand::Rng) -> Result<(), String> {
        self.disk.stop();
        if let Some(tail) = &self.tail {
            tail.kill();
        }
        // Nobody hears what it says.
        let _unheard = self.stop_job();
        self.slow.clear();
        self.held.clear();
        self.forget_handles();
        self.store = None;
        self.alone()?;
        self.disk.revive();
        if end == End::PowerLost {
            let mode = CrashMode::random(rng);
            self.disk = Arc::new(self.disk.crash_image(rng, mode));
            self.env.reboot();
        }
        if end == End::FlushLost {
            self.disk.forget_lost();
        }
        let Some(tail) = &self.tail else { return Ok(()) };
        let last = tail.copy_if(rng.u8(0..8) == 0 || end == End::TailLost);
        if matches!(end, End::PowerLost | End::TailLost) {
            tail.lose();
            // Some tmpfs is none, and keeps an old tail over the boot.
            if rng.u8(0..4) == 0 {
                tail.put(if end == End::PowerLost && last.is_some() {
                    last.clone()
                } else {
                    self.stale_tail.clone()
                });
            }
        }
        if last.is_some() {
            self.stale_tail = last;
        }
        Ok(())
    }

    /// Whether the fate of the last step came true: whether the step got that far.
    #[must_use]
    pub fn hit(&self) -> bool {
        self.hit
    }

    /// Kills the process and keeps what it leaves.
    ///
    /// # Errors
    /// Something kept the store alive.
    pub fn freeze(mut self, seed: u64) -> Result<Frozen, String> {
        // So that who opens it without memory for bitmaps has none of them.
        while self.forgets && self.settle()? {}
        self.disk.stop();
        self.tail.iter().for_each(TailPlace::kill);
        let _unheard = self.stop_job();
        self.slow.clear();
        self.held.clear();
        self.forget_handles();
        self.store = None;
        self.alone()?;
        self.disk.revive();
        let tail = self.tail.as_ref().map(|tail| tail.copy_if(true));
        let Self { disk, model, number, forgets, .. } = self;
        Ok(Frozen { disk: disk.fork(), tail, model, number, seed, forgets })
    }

    fn settle(&self) -> Result<bool, String> {
        let store = self.store.as_ref().ok_or("it is closed")?;
        store.settle().map_err(|e| format!("settling: {e}"))
    }

    /// Nothing may keep the disk or the tail when the store is dropped.
    fn alone(&self) -> Result<(), String> {
        let tail = self.tail.as_ref().is_some_and(TailPlace::attached);
        if tail || Arc::strong_count(&self.disk) != 1 {
            return Err("the store lives on after its last handle".into());
        }
        Ok(())
    }

    fn forget_handles(&mut self) {
        self.model.job = false;
        for volume in self.model.volumes.values_mut() {
            (volume.held, volume.busy) = (false, false);
        }
    }

    fn open(&mut self) -> Result<(), Error> {
        let tail = self.tail.as_ref().map(|tail| tail.attach(&self.disk));
        self.open_with(tail)
    }

    fn open_with(&mut self, tail: Option<Box<dyn TailMemory>>) -> Result<(), Error> {
        self.stats.opens += 1;
        self.fresh = true;
        let disk: Arc<dyn Storage> = Arc::clone(&self.disk) as _;
        let env: Arc<dyn Env> = Arc::clone(&self.env) as _;
        let memory = self.forgets.then_some(0);
        let store = image::given(Store::open_within(disk, tail, env, false, memory)?);
        self.store = Some(store);
        Ok(())
    }

    /// Opens after an end, sometimes dying again meanwhile.
    fn recover(
        &mut self,
        mut end: End,
        outcomes: &Outcomes,
        rng: &mut fastrand::Rng,
    ) -> Result<(), String> {
        self.stats.count_image();
        for _ in 0..2 {
            if rng.u8(0..6) != 0 {
                break;
            }
            let stop_at = Some(rng.u64(1..12));
            self.disk.arm(Faults { stop_at, ..Faults::default() });
            let opened = self.open();
            if !self.disk.stopped() {
                opened.map_err(|e| format!("open after {end:?}: {e}"))?;
            }
            self.stats.count_image();
            // The tail of a process that died in its recovery is as good as the first.
            let again = if rng.bool() { End::PowerLost } else { End::Killed };
            self.die(again, rng)?;
            end = if again == End::PowerLost { again } else { end };
        }
        self.disk.arm(Faults::default());
        let shown = match self.store.is_none() && rng.u8(0..4) == 0 {
            true => Some(self.look(end, outcomes)?),
            false => None,
        };
        if self.store.is_none() {
            self.open().map_err(|e| format!("open after {end:?}: {e}"))?;
        }
        let after = |message| format!("after {end:?}: {message}");
        let mut outcomes = outcomes.clone();
        for model in outcomes.all_mut() {
            model.job = false;
            model.volumes.values_mut().for_each(|v| (v.held, v.busy) = (false, false));
        }
        let (index, found) = outcomes.compare(self.store(), end).map_err(after)?;
        if shown.is_some_and(|shown| shown != found) {
            return Err(after("who only reads it is shown something else".to_owned()));
        }
        self.adopt(&outcomes, index, &found, end);
        verify::check(self.store()).map_err(after)
    }

    /// Opens what a process has left for reading only, which changes nothing; what it shows.
    fn look(&self, end: End, outcomes: &Outcomes) -> Result<Found, String> {
        let failed = |e: String| format!("reading only after {end:?}: {e}");
        let memory = self.tail.as_ref().map(|tail| tail.copy_if(true));
        let place = TailPlace::default();
        let tail = memory.map(|memory| {
            place.put(memory);
            place.attach(&self.disk)
        });
        let disk: Arc<dyn Storage> = Arc::clone(&self.disk) as _;
        let env: Arc<dyn Env> = Arc::clone(&self.env) as _;
        let store = Store::open_within(disk, tail, env, true, self.forgets.then_some(0));
        let store = image::given(store.map_err(|e| failed(e.to_string()))?);
        let (index, found) = outcomes.compare(&store, end).map_err(failed)?;
        verify::check(&store).map_err(failed)?;
        layers::check(&store, outcomes.model(index)).map_err(failed)?;
        match self.disk.counts().changes {
            0 => Ok(found),
            _ => Err(failed("it has changed the disk".to_owned())),
        }
    }

    /// Takes crash images of `disk` and opens each of them beside the history.
    ///
    /// # Errors
    /// What one of them holds that it may not.
    pub fn images_of(
        &mut self,
        disk: &SimDisk,
        count: usize,
        outcomes: &Outcomes,
        rng: &mut fastrand::Rng,
    ) -> Result<(), String> {
        let count = if disk.dirty() { count } else { 1 };
        for _ in 0..count {
            let mode = CrashMode::random(rng);
            let image = disk.crash_image(rng, mode);
            self.stats.count_image();
            verify_image(Arc::new(image), outcomes, rng)
                .map_err(|e| format!("crash image ({mode:?}): {e}"))?;
        }
        Ok(())
    }

    fn perform(&mut self, op: &Op) -> Result<(), Error> {
        let store = self.store().clone();
        let locks = self.model.encrypts && op.needs_no_key() && self.number.is_multiple_of(2);
        if locks {
            image::lock_all(&store);
        }
        let done = self.perform_in(&store, op);
        if locks {
            image::unlock_all(&store);
        }
        done
    }

    fn perform_in(&mut self, store: &Store, op: &Op) -> Result<(), Error> {
        match *op {
            Op::Hold { vol } => self.toggle_handle(store, vol),
            Op::Begin { long } => self.begin_job(store, long),
            Op::GoOn { steps } => match self.job.take() {
                Some(job) => self.keep_job(job.go_on(steps)),
                None => Ok(()),
            },
            Op::Stop => self.stop_job(),
            Op::CreateVolume { vol, sectors }
                if self.model.encrypts && image::is_encrypted(sectors) =>
            {
                let (name, size) = (volume_name(vol), crate::perform::bytes(sectors));
                store.create_encrypted(&name, size, &image::secret(false)).map(drop)
            }
            _ => {
                let tag = self.model.tag(op, self.number);
                perform_beside(store, op, tag, self.job.as_ref().map(|job| job.long))
            }
        }
    }

    fn begin_job(&mut self, store: &Store, long: Long) -> Result<(), Error> {
        let id = match long {
            Long::Flatten { vol } => self.model.volume_mut(vol).map_or(0, |v| v.id),
            Long::Compress { .. } | Long::Vacuum | Long::Scrub | Long::Relearn => 0,
        };
        self.keep_job(Job::begin(store, long, id))
    }

    fn keep_job(&mut self, state: Went) -> Result<(), Error> {
        match state {
            Went::On(job) => {
                self.job = Some(job);
                Ok(())
            }
            Went::Ended(ended) => ended,
        }
    }

    fn stop_job(&mut self) -> Result<(), Error> {
        self.job.take().map_or(Ok(()), Job::stop)
    }

    /// The model knows of the call that stands still.
    fn note_job(&mut self) {
        let id = self.job.as_ref().map_or(0, |job| job.id);
        self.model.job = self.job.is_some();
        self.model.volumes.values_mut().for_each(|volume| volume.busy = volume.id == id);
    }

    fn has_turn(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.long.has_turn())
    }

    /// Whether something is refused as what is deleted below is not merged now.
    fn cannot_merge(&self, error: &Error) -> bool {
        let waits = self.has_turn() || self.store().info().snapshots_put_off > 0;
        waits && matches!(error.kind(), ErrorKind::Busy | ErrorKind::Corrupt)
    }

    /// Whether an operation would wait for the call that stands still, or be refused for it.
    fn waits_for_job(&self, op: &Op) -> bool {
        let Some(job) = &self.job else { return false };
        let long = matches!(op, Op::Flatten { .. } | Op::Compress { .. } | Op::Vacuum { .. });
        (long && job.long.has_turn())
            || matches!(op, Op::Begin { .. })
            || (job.long == Long::Vacuum && matches!(op, Op::Grow { .. }))
    }

    fn toggle_handle(&mut self, store: &Store, vol: u8) -> Result<(), Error> {
        let id = self.model.volume_mut(vol).map_or(0, |v| v.id);
        if self.held.remove(&id).is_none() {
            self.held.insert(id, store.volume(&volume_name(vol))?);
        }
        Ok(())
    }
}

impl Frozen {
    /// Starts a machine from here.
    ///
    /// # Errors
    /// The store does not open.
    pub fn thaw(&self) -> Result<Machine, String> {
        let tail = self.tail.as_ref().map(|memory| {
            let place = TailPlace::default();
            place.put(memory.clone());
            place
        });
        let mut machine = Machine {
            disk: Arc::new(self.disk.fork()),
            model: self.model.clone(),
            stats: Stats::default(),
            images_each: IMAGES_EACH,
            forgets: self.forgets,
            env: Arc::new(SimEnv::new(self.seed)),
            tail,
            stale_tail: None,
            store: None,
            held: BTreeMap::new(),
            slow: Vec::new(),
            job: None,
            poisoned: None,
            number: self.number,
            hit: false,
            fresh: true,
        };
        machine.open().map_err(|e| format!("open: {e}"))?;
        Ok(machine)
    }
}

/// Opens a crash image, compares it, and sometimes goes on working with it.
///
/// # Errors
/// What it holds that it may not.
pub fn verify_image(
    disk: Arc<SimDisk>,
    outcomes: &Outcomes,
    rng: &mut fastrand::Rng,
) -> Result<(), String> {
    let env = Arc::new(SimEnv::new(rng.u64(..)));
    env.reboot();
    let half = (rng.u8(0..8) == 0).then(|| disk.fork());
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let store = Store::open_on(storage, None, Arc::clone(&env) as _, false)
        .map(image::given)
        .map_err(|e| format!("open: {e}"))?;
    let (index, found) = outcomes.compare(&store, End::PowerLost)?;
    verify::check(&store)?;
    if let Some(half) = half {
        blind::open(half, store.info().metadata, outcomes, rng)?;
    }
    if rng.u8(0..16) != 0 {
        return Ok(());
    }
    let mut machine = Machine {
        disk,
        model: Model::default(),
        stats: Stats::default(),
        images_each: IMAGES_EACH,
        forgets: false,
        env,
        tail: None,
        stale_tail: None,
        store: Some(store),
        held: BTreeMap::new(),
        slow: Vec::new(),
        job: None,
        poisoned: None,
        number: u32::MAX / 2,
        hit: false,
        fresh: true,
    };
    machine.adopt(outcomes, index, &found, End::PowerLost);
    machine.go_on(rng).map_err(|e| format!("going on after the crash: {e}"))
}

impl Machine {
    /// A few steps of every kind: what recovered must also work.
    ///
    /// # Errors
    /// Everything that must not be.
    pub fn go_on(&mut self, rng: &mut fastrand::Rng) -> Result<(), String> {
        self.forget_handles();
        let names: Vec<u8> = (0..crate::op::VOLUMES).collect();
        let vol = rng.choice(&names).copied().unwrap_or(0);
        let at = rng.u16(0..64);
        let ops = [
            Op::CreateVolume { vol, sectors: 128 },
            Op::Write { vol, at, len: rng.u16(1..40), fua: false },
            Op::CreateSnapshot { vol, snap: rng.u8(0..3), labels: 1 },
            Op::Write { vol, at: at / 2, len: rng.u16(1..24), fua: false },
            Op::DeleteSnapshot { vol, snap: rng.u8(0..3) },
            Op::Work { steps: 20 },
            Op::FlushVolume { vol },
        ];
        for op in ops {
            self.ordinary(&op, Fate::Calm, rng)?;
        }
        if self.poisoned.is_some() {
            return self.end_poisoned(rng);
        }
        let outcomes = Outcomes::settled(&self.model);
        self.end(End::PowerLost, &outcomes, rng)
    }
}

/// Whether it first merges what is deleted.
fn merges(op: &Op) -> bool {
    matches!(op, Op::ClearLayer { .. } | Op::Relink { .. })
}

/// Whether what was refused must go on where there is no space at all.
fn must_go_on(op: &Op, error: &Error) -> bool {
    matches!(op, Op::Discard { .. } | Op::Trim { .. }) && error.kind() == ErrorKind::NoSpace
}
