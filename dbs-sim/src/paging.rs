//! Bitmaps of extents that leave memory and come back, with room for none: all that can leave does. Requests are on
//! their way meanwhile, and commands beside them, on one thread, in an order that follows from a seed; the
//! metadata blocks are several, so that one step needs more than one. What one copy of a metadata
//! block holds is at times what it held before, as a device leaves it that lost a write.

use crate::disk::{CrashMode, Medium, SimDisk};
use crate::env::{SimEnv, TailPlace};
use crate::step::count_image;
use dbs_core::format::{Geometry, RegionKind};
use dbs_core::info::Severity;
use dbs_core::io::Storage;
use dbs_core::volume::{Request, Start};
use dbs_core::{ErrorKind, InitOptions, Store, Volume};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

#[cfg(test)]
mod tests;

const BLOCK: u64 = 4096;
/// So that a metadata block has 14 extents.
const EXTENT: u64 = 4 << 20;
const SIZE: u64 = 224 << 20;
/// Extents of the volume, and blocks of each that are written: no two of them side by side.
const EXTENTS: u64 = 24;
const PLACES: u64 = 4;
/// Places in the extents of the first metadata block.
const PLACES_OF_BLOCK: u64 = 14 * PLACES;
const STEPS: usize = 60;
/// Most requests on their way, and snapshots.
const FLYING: usize = 4;
const SNAPSHOTS: usize = 2;

type Outcome = Result<(), String>;
/// What each place holds, by its number; what is not in it holds zeros.
type Content = BTreeMap<u64, u8>;

struct Game {
    rng: fastrand::Rng,
    disk: Arc<SimDisk>,
    env: Arc<SimEnv>,
    store: Store,
    volume: Volume,
    geometry: Geometry,
    now: Content,
    /// What each place may hold after a power loss, beside what it holds: since the last commit.
    since: BTreeMap<u64, Vec<u8>>,
    snapshots: Vec<(String, Content)>,
    flying: Vec<(u64, u8, Request)>,
    /// A copy of a metadata block as it was: its place and content.
    old: Option<(u64, Vec<u8>)>,
    last: u8,
    named: usize,
    tail: Option<TailPlace>,
}

fn told(error: dbs_core::Error) -> String {
    error.to_string()
}

fn open(disk: &Arc<SimDisk>, env: &Arc<SimEnv>) -> Result<Store, String> {
    open_with(disk, env, None)
}

fn open_with(
    disk: &Arc<SimDisk>,
    env: &Arc<SimEnv>,
    tail: Option<&TailPlace>,
) -> Result<Store, String> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    let tail = tail.map(|place| place.attach(disk));
    Store::open_within(storage, tail, Arc::clone(env) as _, false, Some(0)).map_err(told)
}

fn offset(place: u64) -> u64 {
    place / PLACES * EXTENT + place % PLACES * 2 * BLOCK
}

/// Runs the history of a seed.
///
/// # Errors
/// What must not be, a panic among it.
pub fn run(seed: u64) -> Outcome {
    let history = || {
        let (tail, sums) = (seed % 2 == 1, seed % 4 >= 2);
        let mut game = Game::with(seed, tail.then(TailPlace::default), sums)?;
        (0..STEPS).try_for_each(|step| game.step().map_err(|e| format!("step {step}: {e}")))?;
        game.end()
    };
    catch_unwind(AssertUnwindSafe(history)).unwrap_or_else(|_| Err("it panicked".to_owned()))
}

/// Of a metadata block that stays unreadable the journal keeps what changes, up to half: the other half is for the
/// next process. That redoes it once the device reads the block again, with what a tail holds beside it.
///
/// # Errors
/// What must not be.
pub fn parked() -> Outcome {
    let mut rounds = None;
    for short_of in [0, 1, 2] {
        let place = TailPlace::default();
        let mut game = Game::with(7, Some(place.clone()), false)?;
        (0..2).for_each(|copy| game.rot(0, copy));
        game.volume.discard(0, EXTENT).map_err(told)?;
        (0..PLACES).for_each(|place| game.holds(place, 0));
        let most = rounds.map_or(10_000, |rounds: u64| rounds - short_of);
        let stopped = game.fill_journal(most).err().map(|(rounds, _)| rounds);
        rounds = rounds.or(stopped);
        // In the tail alone, unless no more may come.
        let mut places = PLACES_OF_BLOCK..EXTENTS * PLACES;
        let written = places.try_for_each(|place| game.write(place));
        if (stopped.is_some(), written.is_err()) != (short_of == 0, short_of == 0) {
            return Err(format!("short of {short_of} rounds: {stopped:?}, {written:?}"));
        }
        game.killed_and_healed(&place, short_of > 0)?;
    }
    Ok(())
}

impl Game {
    /// The process is killed, and the device reads the first metadata block of extents again. All is there then; of
    /// what was refused nobody knows.
    fn killed_and_healed(self, tail: &TailPlace, is_all_known: bool) -> Outcome {
        tail.kill();
        (0..2).for_each(|copy| self.rot(0, copy));
        let Self { disk, env, store, volume, now, .. } = self;
        drop((volume, store));
        let store = open_with(&disk, &env, Some(tail))?;
        let volume = store.volume("v").map_err(told)?;
        let known = if is_all_known { EXTENTS * PLACES } else { PLACES_OF_BLOCK };
        for place in 0..known {
            let mut buf = [0; BLOCK as usize];
            volume.read_at(offset(place), &mut buf).map_err(told)?;
            if buf[0] != now.get(&place).copied().unwrap_or(0) {
                return Err(format!("place {place} holds {} after a kill", buf[0]));
            }
        }
        drop(volume);
        store.close().map_err(told)?;
        let report = open(&disk, &env)?.check().map_err(told)?;
        if report.worst().is_some() { Err(format!("{report:?}")) } else { Ok(()) }
    }

    fn with(seed: u64, tail: Option<TailPlace>, checksums: bool) -> Result<Self, String> {
        let init = InitOptions {
            size: Some(SIZE),
            max_size: Some(SIZE),
            extent_size: EXTENT,
            max_volumes: Some(8),
            max_snapshots: Some(8),
            journal_size: Some(256 << 10),
            checksums,
            ..InitOptions::default()
        };
        let geometry = Geometry::plan(SIZE, &init).map_err(told)?;
        let (env, disk) = (SimEnv::new(seed), SimDisk::new(Medium::file(SIZE), seed));
        Store::init_on(&disk, &init, &env).map_err(told)?;
        let (env, disk) = (Arc::new(env), Arc::new(disk));
        let store = open_with(&disk, &env, tail.as_ref())?;
        disk.set_atomic_from(store.info().metadata);
        store.create_volume("v", EXTENTS * EXTENT).map_err(told)?;
        let volume = store.volume("v").map_err(told)?;
        let mut game = Self {
            rng: fastrand::Rng::with_seed(seed),
            disk,
            env,
            store,
            volume,
            geometry,
            now: Content::new(),
            since: BTreeMap::new(),
            snapshots: Vec::new(),
            flying: Vec::new(),
            old: None,
            last: 0,
            named: 0,
            tail,
        };
        for place in (0..EXTENTS * PLACES).filter(|place| place % PLACES < 2) {
            game.write(place)?;
        }
        game.settle()?;
        Ok(game)
    }

    fn address(&self, block: u32, copy: u32) -> u64 {
        self.geometry.block_address(RegionKind::Extents, block, copy)
    }

    fn rot(&self, block: u32, copy: u32) {
        self.disk.flip_bit(self.address(block, copy) + 777, 3);
    }

    /// Discards and writes, each with a commit, so often at most, or until that fails; how often that did not.
    fn fill_journal(&mut self, rounds: u64) -> Result<(), (u64, dbs_core::Error)> {
        for round in 0..rounds {
            let place = PLACES_OF_BLOCK + round % (EXTENTS * PLACES - PLACES_OF_BLOCK);
            let buf = [round as u8 | 1; BLOCK as usize];
            let step = self.volume.discard(offset(place), BLOCK);
            let step = step.and_then(|()| self.volume.write_at(offset(place), &buf, true));
            if let Err(error) = step {
                return Err((round, error));
            }
            self.holds(place, round as u8 | 1);
        }
        Ok(())
    }

    fn step(&mut self) -> Outcome {
        let place = self.rng.u64(..EXTENTS * PLACES);
        let quiet = self.flying.is_empty();
        match self.rng.u8(..28) {
            0..4 if !self.is_written(place) => self.write(place),
            4..7 => self.start(place),
            7..10 => self.finish(),
            10..12 => self.read(place),
            12 if quiet => self.snapshot(),
            13 if quiet => self.delete_snapshot(),
            14 if quiet => self.store.work(8).map(drop).map_err(told),
            15 if quiet => self.discard(place),
            24 | 25 if quiet => self.discard_extents(place),
            26 if quiet => self.clone_snapshot(),
            16 if quiet => self.rollback(),
            17 => self.store.diff("v", None, None, 0, EXTENTS * EXTENT).map(drop).map_err(told),
            18 => self.store.usage("v", None).map(drop).map_err(told),
            19 | 20 => self.settle(),
            21 => self.age(),
            22 if quiet => {
                self.store.vacuum_keeping(100 << 20, &mut |_, _| true).map_err(told)?;
                if self.rng.bool() { self.store.grow(SIZE).map_err(told) } else { Ok(()) }
            }
            23 if quiet => self.scrub(),
            _ => {
                self.store.flush().map_err(told)?;
                self.since.clear();
                Ok(())
            }
        }
    }

    fn is_written(&self, place: u64) -> bool {
        self.flying.iter().any(|(at, ..)| *at == place)
    }

    fn byte(&mut self) -> u8 {
        self.last = self.last.wrapping_add(1).max(1);
        self.last
    }

    fn holds(&mut self, place: u64, byte: u8) {
        let before = self.now.insert(place, byte).unwrap_or(0);
        self.since.entry(place).or_default().push(before);
    }

    fn write(&mut self, place: u64) -> Outcome {
        let byte = self.byte();
        let buf = [byte; BLOCK as usize];
        self.volume.write_at(offset(place), &buf, false).map_err(told)?;
        self.holds(place, byte);
        Ok(())
    }

    fn start(&mut self, place: u64) -> Outcome {
        if self.flying.len() == FLYING || self.is_written(place) {
            return Ok(());
        }
        let (byte, mut request) = (self.byte(), Request::new());
        let started = self.volume.start_write(offset(place), BLOCK, &mut request);
        match started.map_err(told)? {
            Start::Io => {
                let at = request.segments()[0].device;
                let buf = [byte; BLOCK as usize];
                request.seal(&buf);
                self.disk.write_at(at, &buf).map_err(|e| e.to_string())?;
                self.flying.push((place, byte, request));
                Ok(())
            }
            // By itself it would read its bitmaps.
            _ => self.write(place),
        }
    }

    fn finish(&mut self) -> Outcome {
        if self.flying.is_empty() {
            return Ok(());
        }
        let at = self.rng.usize(..self.flying.len());
        let (place, byte, mut request) = self.flying.swap_remove(at);
        let _commits = request.finish_write(Ok(())).map_err(told)?;
        self.holds(place, byte);
        Ok(())
    }

    fn read(&self, place: u64) -> Outcome {
        if self.is_written(place) {
            return Ok(());
        }
        let mut content = vec![("v".to_owned(), &self.now)];
        content.extend(self.snapshots.iter().map(|(name, of)| (format!("v@{name}"), of)));
        for (name, content) in content {
            let mut buf = [0; BLOCK as usize];
            let volume = self.store.volume(&name).map_err(told)?;
            volume.read_at(offset(place), &mut buf).map_err(told)?;
            let expected = content.get(&place).copied().unwrap_or(0);
            if buf != [expected; BLOCK as usize] {
                return Err(format!("{name}, place {place}: {} instead of {expected}", buf[0]));
            }
        }
        Ok(())
    }

    fn scrub(&self) -> Outcome {
        if self.store.checksums().is_none() {
            return Ok(());
        }
        let report = self.store.scrub(true, &mut |_| true).map_err(told)?;
        if report.damaged > 0 { Err(format!("{report:?}")) } else { Ok(()) }
    }

    fn snapshot(&mut self) -> Outcome {
        if self.snapshots.len() == SNAPSHOTS || self.store.info().extents_free < EXTENTS {
            return Ok(());
        }
        self.named += 1;
        let name = self.named.to_string();
        self.store.create_snapshot("v", &name, &Default::default()).map_err(told)?;
        self.snapshots.push((name, self.now.clone()));
        self.since.clear();
        Ok(())
    }

    fn delete_snapshot(&mut self) -> Outcome {
        if self.snapshots.is_empty() {
            return Ok(());
        }
        let (name, _) = self.snapshots.remove(self.rng.usize(..self.snapshots.len()));
        self.store.delete_snapshot("v", &name).map_err(told)?;
        self.since.clear();
        Ok(())
    }

    fn rollback(&mut self) -> Outcome {
        let Some((name, content)) = self.rng.choice(&self.snapshots) else { return Ok(()) };
        self.store.rollback("v", name).map_err(told)?;
        self.now.clone_from(content);
        self.since.clear();
        Ok(())
    }

    fn discard(&mut self, place: u64) -> Outcome {
        self.volume.discard(offset(place), BLOCK).map_err(told)?;
        self.holds(place, 0);
        Ok(())
    }

    /// Whole extents from that of a place on: a run of zeros over what a snapshot holds.
    fn discard_extents(&mut self, place: u64) -> Outcome {
        let first = place / PLACES;
        let end = (first + self.rng.u64(1..12)).min(EXTENTS);
        self.volume.discard(first * EXTENT, (end - first) * EXTENT).map_err(told)?;
        (first * PLACES..end * PLACES).for_each(|place| self.holds(place, 0));
        Ok(())
    }

    /// A clone shows what its snapshot does, also when it depends on nothing any more.
    fn clone_snapshot(&mut self) -> Outcome {
        let Some((name, content)) = self.rng.choice(&self.snapshots) else { return Ok(()) };
        self.store.clone_volume("v", name, "c").map_err(told)?;
        let read = || {
            let volume = self.store.volume("c").map_err(told)?;
            (0..EXTENTS * PLACES).try_for_each(|place| {
                let mut buf = [0; BLOCK as usize];
                volume.read_at(offset(place), &mut buf).map_err(told)?;
                let expected = content.get(&place).copied().unwrap_or(0);
                let is_right = buf == [expected; BLOCK as usize];
                is_right.then_some(()).ok_or_else(|| format!("place {place} of the clone"))
            })
        };
        read()?;
        match self.store.flatten("c", &mut |_, _| true) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {}
            done => done.map_err(told)?,
        }
        read()?;
        self.store.delete_volume("c").map_err(told)?;
        self.since.clear();
        Ok(())
    }

    /// Lets all metadata be written back, so that all bitmaps can leave. Those stay that a write on its way may
    /// change, and nothing else does.
    fn settle(&mut self) -> Outcome {
        self.store.flush().map_err(told)?;
        while self.store.settle().map_err(told)? {}
        self.store.set_metadata_memory(0);
        self.since.clear();
        let left = self.store.info().lookups.bitmap_memory;
        if left > 0 && self.flying.is_empty() {
            return Err(format!("{left} bytes of bitmaps stay in memory"));
        }
        Ok(())
    }

    /// Notes what a copy of a metadata block holds, or puts back what it held.
    fn age(&mut self) -> Outcome {
        let failed = |e: std::io::Error| e.to_string();
        if let Some((at, bytes)) = self.old.take() {
            // Of what is on its way to the device, either copy may be the only good one.
            self.settle()?;
            self.disk.write_at(at, &bytes).map_err(failed)?;
            return self.read(self.rng.clone().u64(..EXTENTS * PLACES));
        }
        let (block, copy) = (self.rng.u32(..3), self.rng.u32(..2));
        let at = self.geometry.block_address(RegionKind::Extents, block, copy);
        let mut bytes = vec![0; BLOCK as usize];
        self.disk.read_at(at, &mut bytes).map_err(failed)?;
        self.old = Some((at, bytes));
        Ok(())
    }

    /// All is read; then the power is lost, or the process is killed, and it is read again.
    fn end(mut self) -> Outcome {
        while !self.flying.is_empty() {
            self.finish()?;
        }
        (0..EXTENTS * PLACES).try_for_each(|place| self.read(place))?;
        let report = self.store.check().map_err(told)?;
        if let Some(Severity::Corrupt) = report.worst() {
            return Err(format!("{report:?}"));
        }
        let Self { mut rng, disk, env, store, volume, now, mut since, tail, .. } = self;
        let killed = tail.filter(|_| rng.bool());
        killed.iter().for_each(TailPlace::kill);
        drop((volume, store));
        count_image();
        let (image, how) = match &killed {
            Some(_) => (disk, "a kill"),
            None => {
                env.reboot();
                let mode = CrashMode::random(&mut rng);
                (Arc::new(disk.crash_image(&mut rng, mode)), "a power loss")
            }
        };
        if killed.is_some() {
            since.clear();
        }
        let store = open_with(&image, &env, killed.as_ref());
        let store = store.map_err(|e| format!("after {how}: {e}"))?;
        let volume = store.volume("v").map_err(told)?;
        for place in 0..EXTENTS * PLACES {
            let mut buf = [0; BLOCK as usize];
            volume.read_at(offset(place), &mut buf).map_err(told)?;
            let is_now = now.get(&place).copied().unwrap_or(0) == buf[0];
            if !is_now && !since.get(&place).is_some_and(|may| may.contains(&buf[0])) {
                return Err(format!("place {place} holds {} after {how}", buf[0]));
            }
        }
        Ok(())
    }
}
