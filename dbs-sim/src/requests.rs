//! Requests beside one another and beside commands, on one thread, in an order that follows from a seed: each is
//! started, transferred and finished when its turn comes. Requests share the metadata, and commands
//! have it alone; what one of them holds must keep the others away all the same.

use crate::disk::{CrashMode, Medium, SimDisk};
use crate::env::{SimEnv, TailPlace};
use crate::image;
use crate::machine::Config;
use dbs_core::info::Severity;
use dbs_core::io::Storage;
use dbs_core::volume::{Finish, Read, Request, Start};
use dbs_core::{ErrorKind, InitOptions, Store, Volume};
use std::io;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 4096;
const EXTENT: u64 = 64 << 10;
/// Blocks of a volume: two extents.
const BLOCKS: u64 = 2 * EXTENT / BLOCK;
/// Volumes that are there all the time. A third comes and goes: a clone of a snapshot of one of them.
const VOLUMES: usize = 2;
const CLONE: usize = VOLUMES;
const STEPS: usize = 150;
/// Times that the process ends on the way, about.
const KILLS: usize = 2;
/// Most requests on their way, and snapshots of a volume.
const FLYING: usize = 8;
const SNAPSHOTS: usize = 3;
/// Most of those whose content nobody wants any more.
const RETIRED: usize = 2;
/// With fewer free extents somebody might wait for space, and so for reads, which are on this thread.
const FREE_EXTENTS: u64 = 12;

/// What a block may hold: several where a write is on its way, or has failed.
type May = Vec<u8>;

/// A request on its way.
struct Flying {
    volume: usize,
    block: u64,
    request: Request,
    buf: Vec<u8>,
    /// Its transfer is done.
    moved: bool,
    kind: Kind,
}

impl Flying {
    fn transfer(&mut self, disk: &SimDisk) -> Outcome {
        for segment in self.request.segments() {
            let part = &mut self.buf[segment.start..segment.start + segment.length];
            match self.kind {
                Kind::Read(_) => disk.read_at(segment.device, part),
                Kind::Write(_) => disk.write_at(segment.device, part),
            }
            .map_err(|e| e.to_string())?;
        }
        self.moved = true;
        Ok(())
    }
}

enum Kind {
    Read(May),
    Write(u8),
}

/// A volume: as it is now, as a kill must leave it, and as a power loss may; and its snapshots.
struct Side {
    name: &'static str,
    handle: Volume,
    now: Vec<May>,
    kept: Vec<May>,
    older: Vec<May>,
    /// Blocks that the head may hold itself. A write of any other leaves what is there, if it fails.
    held: [bool; BLOCKS as usize],
    /// Blocks that it held until they became zeros, which is not durable: a power loss brings them back, and a write over
    /// them that has failed.
    undone: [bool; BLOCKS as usize],
    snapshots: Vec<(String, Vec<May>)>,
    /// Snapshots whose blocks may be given up.
    retired: Vec<String>,
}

struct Game {
    rng: fastrand::Rng,
    disk: Arc<SimDisk>,
    place: TailPlace,
    env: Arc<SimEnv>,
    seed: u64,
    store: Store,
    filler: Volume,
    sides: Vec<Side>,
    flying: Vec<Flying>,
    /// The byte written last.
    last: u8,
    named: usize,
}

type Outcome = Result<(), String>;

/// Runs the history of a seed.
///
/// # Errors
/// What must not be.
pub fn run(seed: u64) -> Outcome {
    let mut game = Game::new(seed)?;
    if seed % 4 == 1 {
        game.zeros_beside_a_write().map_err(|e| format!("opening: {e}"))?;
    }
    for step in 0..STEPS {
        game.step().map_err(|e| format!("step {step}: {e}"))?;
        if game.rng.usize(..STEPS) < KILLS {
            game = game.end().map_err(|e| format!("step {step}: {e}"))?;
        }
    }
    game.end().map(drop)
}

fn told(error: dbs_core::Error) -> String {
    error.to_string()
}

/// With a tail or without, as the seed says.
fn open(
    disk: &Arc<SimDisk>,
    place: &TailPlace,
    env: &Arc<SimEnv>,
    seed: u64,
) -> Result<Store, String> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    let tail = (!seed.is_multiple_of(3)).then(|| place.attach(disk));
    Store::open_on(storage, tail, Arc::clone(env) as _, false).map(image::given).map_err(told)
}

/// Whether the second volume is encrypted, and all requests are started as by a server that owns the memory of their payload.
fn owns(seed: u64) -> bool {
    seed % 8 >= 6
}

impl Game {
    fn new(seed: u64) -> Result<Self, String> {
        let init = InitOptions { checksums: seed.is_multiple_of(2), ..Config::small(seed).init };
        let disk = Arc::new(SimDisk::new(Medium::file(4 << 20), seed));
        let env = Arc::new(SimEnv::new(seed));
        Store::init_on(&*disk, &init, &*env).map_err(told)?;
        let place = TailPlace::default();
        let store = open(&disk, &place, &env, seed)?;
        disk.set_atomic_from(store.info().metadata);
        let side = |name: &'static str| {
            match owns(seed) && name == "b" {
                true => store.create_encrypted(name, BLOCKS * BLOCK, &image::secret(false)),
                false => store.create_volume(name, BLOCKS * BLOCK),
            }
            .map_err(told)?;
            let handle = store.volume(name).map_err(told)?;
            // Of the second extent nothing is written yet.
            handle.write_at(0, &[1; EXTENT as usize], true).map_err(told)?;
            let now: Vec<May> =
                (0..BLOCKS).map(|block| vec![u8::from(block * BLOCK < EXTENT)]).collect();
            let held = std::array::from_fn(|block| now[block] == [1]);
            let (kept, older) = (now.clone(), now.clone());
            let (snapshots, retired) = (Vec::new(), Vec::new());
            let undone = [false; BLOCKS as usize];
            Ok::<_, String>(Side {
                name,
                handle,
                kept,
                older,
                now,
                held,
                undone,
                snapshots,
                retired,
            })
        };
        let sides = ["a", "b"].map(side).into_iter().collect::<Result<_, _>>()?;
        store.create_volume("filler", 1 << 20).map_err(told)?;
        let filler = store.volume("filler").map_err(told)?;
        let rng = fastrand::Rng::with_seed(seed);
        let flying = Vec::new();
        Ok(Self { rng, disk, place, env, seed, store, filler, sides, flying, last: 1, named: 0 })
    }

    fn step(&mut self) -> Outcome {
        let volume = self.rng.usize(..self.sides.len());
        match self.rng.u8(..20) {
            0..6 => self.start_write(volume),
            6..10 => self.start_read(volume),
            10..16 => self.go_on(),
            _ => self.command(volume),
        }
    }

    fn writes(&self, volume: usize, block: Option<u64>) -> bool {
        let is = |flying: &Flying| {
            let same = block.is_none_or(|block| flying.block == block);
            flying.volume == volume && same && matches!(flying.kind, Kind::Write(_))
        };
        self.flying.iter().any(is)
    }

    /// A write makes an entry in an extent whose zeros are those of a run below, and has not ended when
    /// background work marks them in the entry; then it fails.
    fn zeros_beside_a_write(&mut self) -> Outcome {
        const FIRST: u64 = EXTENT / BLOCK;
        let handle = self.sides[0].handle.clone();
        let data = [1; EXTENT as usize];
        handle.write_at(FIRST * BLOCK, &data, true).map_err(told)?;
        (FIRST..BLOCKS).for_each(|block| self.wrote(0, block, 1, true));
        self.snapshot(0)?;
        self.zero(0, FIRST, EXTENT / BLOCK, false)?;
        self.snapshot(0)?;
        self.zero(0, FIRST + 1, 1, true)?;
        self.write(0, FIRST + BLOCKS / 4)?;
        self.delete_snapshot_at(0, 1)?;
        for _ in 0..4 {
            self.store.work_beside(8).map_err(told)?;
        }
        self.sides[0].held = [true; BLOCKS as usize];
        match self.flying.pop() {
            Some(flying) => self.fail(flying),
            None => Ok(()),
        }
    }

    /// In few blocks, so that requests meet.
    fn block(&mut self) -> u64 {
        self.rng.u64(..4) * (BLOCKS / 4)
    }

    fn start_write(&mut self, volume: usize) -> Outcome {
        let block = self.block();
        self.write(volume, block)
    }

    fn write(&mut self, volume: usize, block: u64) -> Outcome {
        // Without checksums two such writes are both right, and nobody knows which one is there.
        let meets = self.writes(volume, Some(block));
        if self.flying.len() == FLYING || (meets && self.store.checksums().is_none()) {
            return Ok(());
        }
        self.last = self.last.wrapping_add(1).max(2);
        let (byte, mut request) = (self.last, Request::new());
        let mut buf = vec![byte; BLOCK as usize];
        let handle = &self.sides[volume].handle;
        let started = match owns(self.seed) {
            true => handle.start_write_own(block * BLOCK, BLOCK, &mut request),
            false => handle.start_write(block * BLOCK, BLOCK, &mut request),
        };
        match started.map_err(told)? {
            Start::Io => {}
            // By itself it would wait for what is on its way here.
            _ if !self.flying.is_empty() => return Ok(()),
            _ => {
                handle.write_at(block * BLOCK, &buf, false).map_err(told)?;
                self.wrote(volume, block, byte, true);
                return Ok(());
            }
        }
        match owns(self.seed) {
            true => request.seal_own(&mut buf),
            false => request.seal(&buf),
        }
        for flying in &mut self.flying {
            if let Kind::Read(may) = &mut flying.kind
                && (flying.volume, flying.block) == (volume, block)
            {
                may.push(byte);
            }
        }
        let kind = Kind::Write(byte);
        self.flying.push(Flying { volume, block, request, buf, moved: false, kind });
        Ok(())
    }

    fn wrote(&mut self, volume: usize, block: u64, byte: u8, acknowledged: bool) {
        let (side, at) = (&mut self.sides[volume], block as usize);
        side.now[at] = vec![byte];
        side.older[at].push(byte);
        side.held[at] = true;
        match acknowledged {
            true => side.kept[at] = vec![byte],
            false => side.kept[at].push(byte),
        }
    }

    /// Of the head or of a snapshot.
    fn start_read(&mut self, volume: usize) -> Outcome {
        let block = self.block();
        if self.flying.len() == FLYING {
            return Ok(());
        }
        let side = &self.sides[volume];
        let mut may = side.now[block as usize].clone();
        may.extend(self.flying.iter().filter_map(|flying| match flying.kind {
            Kind::Write(byte) if (flying.volume, flying.block) == (volume, block) => Some(byte),
            _ => None,
        }));
        let mut handle = side.handle.clone();
        if self.rng.u8(..3) == 0
            && let Some((name, content)) = self.rng.choice(&side.snapshots)
        {
            may.clone_from(&content[block as usize]);
            handle = self.store.volume(&format!("{}@{name}", side.name)).map_err(told)?;
        }
        let (mut request, mut buf) = (Request::new(), vec![0; BLOCK as usize]);
        let started = match owns(self.seed) {
            true => handle.start_read_beside(block * BLOCK, BLOCK, &mut request),
            false => handle.start_read(block * BLOCK, BLOCK, &mut request),
        };
        match started.map_err(told)? {
            Start::Io => {
                buf.resize(buf.len() + request.extra_bytes(), 0);
                // Others would wait for what it fetches beside.
                let at_once = request.extra_bytes() > 0;
                let kind = Kind::Read(may);
                let mut flying = Flying { volume, block, request, buf, moved: false, kind };
                if at_once {
                    flying.transfer(&self.disk)?;
                    return self.finish(flying);
                }
                self.flying.push(flying);
                Ok(())
            }
            Start::Done => fits(&buf, &may),
            Start::Blocked => self.read_now(volume, block),
        }
    }

    /// Reads a block that nobody writes, waiting.
    fn read_now(&self, volume: usize, block: u64) -> Outcome {
        if self.writes(volume, Some(block)) {
            return Ok(());
        }
        let (side, mut buf) = (&self.sides[volume], [0; BLOCK as usize]);
        side.handle.read_at(block * BLOCK, &mut buf).map_err(told)?;
        fits(&buf, &side.now[block as usize])
    }

    /// Transfers a request, or finishes one.
    fn go_on(&mut self) -> Outcome {
        if self.flying.is_empty() {
            return Ok(());
        }
        let at = self.rng.usize(..self.flying.len());
        let flying = &mut self.flying[at];
        if flying.moved {
            let flying = self.flying.swap_remove(at);
            return self.finish(flying);
        }
        flying.transfer(&self.disk)
    }

    fn finish(&mut self, flying: Flying) -> Outcome {
        let Flying { volume, block, mut request, mut buf, kind, .. } = flying;
        match kind {
            Kind::Read(may) => {
                let read = match owns(self.seed) {
                    true => request.finish_read_own(Ok(()), &mut buf),
                    false => request.finish_read(Ok(()), &buf),
                };
                match read.map_err(told)? {
                    Read::Done => fits(&buf[..BLOCK as usize], &may),
                    Read::Again => self.read_now(volume, block),
                }
            }
            Kind::Write(_) if self.rng.u8(..3) == 0 => {
                self.fail(Flying { volume, block, request, buf, moved: true, kind })
            }
            Kind::Write(byte) => {
                let finish = request.finish_write(Ok(())).map_err(told)?;
                self.wrote(volume, block, byte, finish == Finish::Done);
                Ok(())
            }
        }
    }

    /// Ends a write that has failed, and may have reached the disk.
    fn fail(&mut self, flying: Flying) -> Outcome {
        let Flying { volume, block, mut request, kind, .. } = flying;
        if request.finish_write(Err(io::Error::from_raw_os_error(5))).is_ok() {
            return Err("a failed write is a success".to_owned());
        }
        let (side, at) = (&mut self.sides[volume], block as usize);
        if let Kind::Write(byte) = kind {
            if side.held[at] {
                side.now[at].push(byte);
                side.kept[at].push(byte);
            }
            if side.held[at] || side.undone[at] {
                side.older[at].push(byte);
            }
        }
        let mut buf = [0; BLOCK as usize];
        if self.writes(volume, Some(block)) {
            return Ok(());
        }
        self.sides[volume].handle.read_at(block * BLOCK, &mut buf).map_err(told)?;
        fits(&buf, &self.sides[volume].now[at]).map_err(|e| format!("failed write: {e}"))
    }

    /// Zeros, written or by a discard, of blocks that no write is on its way to.
    fn zero(&mut self, volume: usize, first: u64, count: u64, written: bool) -> Outcome {
        if (first..first + count).any(|block| self.writes(volume, Some(block))) {
            return Ok(());
        }
        let (handle, at, bytes) = (&self.sides[volume].handle, first * BLOCK, count * BLOCK);
        match written {
            true => handle.write_zeroes(at, bytes, false),
            false => handle.discard(at, bytes),
        }
        .map_err(told)?;
        for block in first..first + count {
            let side = &mut self.sides[volume];
            let held = side.held[block as usize];
            side.undone[block as usize] |= held;
            self.wrote(volume, block, 0, true);
            self.sides[volume].held[block as usize] = false;
        }
        Ok(())
    }

    /// What is finished is durable now.
    fn durable(&mut self) {
        for side in &mut self.sides {
            side.kept.clone_from(&side.now);
            side.older.clone_from(&side.now);
            side.undone = [false; BLOCKS as usize];
        }
    }

    /// One that waits for none of what is on its way.
    fn command(&mut self, volume: usize) -> Outcome {
        let is_written = self.writes(volume, None);
        let any_written = self.flying.iter().any(|flying| matches!(flying.kind, Kind::Write(_)));
        match self.rng.u8(..16) {
            11 => self.clone_of(volume),
            12 => self.flatten(),
            13 | 14 => self.prune(volume),
            15 => self.give_up(volume),
            0 if !is_written => self.snapshot(volume),
            1 if !is_written => self.rollback(volume),
            2 => self.delete_snapshot(volume),
            3 => {
                let first = self.rng.u64(..2) * EXTENT / BLOCK;
                self.zero(volume, first, EXTENT / BLOCK, false)
            }
            9 | 10 => {
                let count = self.rng.u64(1..6);
                let first = self.rng.u64(..=BLOCKS - count);
                let written = self.rng.bool();
                self.zero(volume, first, count, written)
            }
            4 => {
                self.store.flush().map_err(told)?;
                self.durable();
                Ok(())
            }
            5 => {
                self.store.work_beside(8).map_err(told)?;
                // What was a deleted snapshot's may be the head's now.
                self.sides.iter_mut().for_each(|side| side.held = [true; BLOCKS as usize]);
                Ok(())
            }
            6 => self.fill(),
            7 => self.store.close_checksums(Duration::ZERO).map_err(told),
            8 if !any_written => self.store.crowd_checksums(self.rng.bool()).map_err(told),
            _ => Ok(()),
        }
    }

    fn snapshot(&mut self, volume: usize) -> Outcome {
        let is_crowded = self.is_crowded();
        let side = &mut self.sides[volume];
        if side.snapshots.len() == SNAPSHOTS || is_crowded {
            return Ok(());
        }
        self.named += 1;
        let name = self.named.to_string();
        self.store.create_snapshot(side.name, &name, &Default::default()).map_err(told)?;
        side.snapshots.push((name, side.now.clone()));
        side.held = [false; BLOCKS as usize];
        self.durable();
        Ok(())
    }

    /// Whether something new might find no place.
    fn is_crowded(&self) -> bool {
        let info = self.store.info();
        info.extents_free < FREE_EXTENTS || info.snapshots + 2 > info.snapshots_max
    }

    fn clone_of(&mut self, volume: usize) -> Outcome {
        if self.sides.len() > CLONE || self.is_crowded() {
            return Ok(());
        }
        let (name, side) = ("c", &self.sides[volume]);
        let Some((snapshot, content)) = self.rng.choice(&side.snapshots) else { return Ok(()) };
        self.store.clone_volume(side.name, snapshot, name).map_err(told)?;
        let handle = self.store.volume(name).map_err(told)?;
        let [now, kept, older] = [content; 3].map(Clone::clone);
        let ([held, undone], snapshots, retired) =
            ([[false; BLOCKS as usize]; 2], Vec::new(), Vec::new());
        self.sides.push(Side { name, handle, now, kept, older, held, undone, snapshots, retired });
        self.durable();
        Ok(())
    }

    /// Cuts the clone off, beside all but its own writes.
    fn flatten(&mut self) -> Outcome {
        if self.sides.len() <= CLONE || self.writes(CLONE, None) || self.is_crowded() {
            return Ok(());
        }
        let mut left = self.rng.u8(1..6);
        let mut go_on = |_, _| {
            left -= 1;
            left > 0
        };
        match self.store.flatten(self.sides[CLONE].name, &mut go_on) {
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(told(error)),
            // Where nothing was left to cut off, it makes nothing durable.
            _ => {}
        }
        self.sides[CLONE].held = [true; BLOCKS as usize];
        Ok(())
    }

    /// Gives up what nobody wants of retired snapshots, beside writes that cover it or fail.
    fn prune(&mut self, volume: usize) -> Outcome {
        let side = &mut self.sides[volume];
        if side.retired.len() < RETIRED && !side.snapshots.is_empty() && self.rng.bool() {
            let at = self.rng.usize(..side.snapshots.len());
            let (name, _) = &side.snapshots[at];
            self.store.set_retired(side.name, name, true).map_err(told)?;
            side.retired.push(side.snapshots.remove(at).0);
            self.durable();
        }
        self.store.prune(self.sides[volume].name, 0, BLOCKS * BLOCK).map(drop).map_err(told)
    }

    /// Deletes a retired snapshot, or the clone.
    fn give_up(&mut self, volume: usize) -> Outcome {
        let is_used = self.flying.iter().any(|flying| flying.volume == volume);
        let deleted = match self.sides[volume].retired.pop() {
            Some(name) => match self.store.delete_snapshot(self.sides[volume].name, &name) {
                Err(error) if error.kind() == ErrorKind::Busy => {
                    self.sides[volume].retired.push(name);
                    return Ok(());
                }
                deleted => deleted,
            },
            None if volume == CLONE && !is_used => {
                self.sides.pop();
                self.store.delete_volume("c")
            }
            None => return Ok(()),
        };
        self.durable();
        deleted.map_err(told)
    }

    fn rollback(&mut self, volume: usize) -> Outcome {
        if self.is_crowded() {
            return Ok(());
        }
        let side = &mut self.sides[volume];
        let Some((name, content)) = self.rng.choice(&side.snapshots) else { return Ok(()) };
        self.store.rollback(side.name, name).map_err(told)?;
        side.now.clone_from(content);
        side.held = [false; BLOCKS as usize];
        self.durable();
        Ok(())
    }

    fn delete_snapshot(&mut self, volume: usize) -> Outcome {
        let side = &mut self.sides[volume];
        if side.snapshots.is_empty() {
            return Ok(());
        }
        let at = self.rng.usize(..side.snapshots.len());
        self.delete_snapshot_at(volume, at)
    }

    fn delete_snapshot_at(&mut self, volume: usize, at: usize) -> Outcome {
        let side = &mut self.sides[volume];
        match self.store.delete_snapshot(side.name, &side.snapshots[at].0) {
            Ok(()) => drop(side.snapshots.remove(at)),
            // Somebody reads it.
            Err(error) if error.kind() == ErrorKind::Busy => return Ok(()),
            Err(error) => return Err(told(error)),
        }
        self.durable();
        Ok(())
    }

    /// Somebody else takes what is free, and gives it back.
    fn fill(&mut self) -> Outcome {
        let at = self.rng.u64(..16) * EXTENT;
        if self.store.info().extents_free < FREE_EXTENTS || self.rng.bool() {
            return self.filler.discard(at, EXTENT).map_err(told);
        }
        self.filler.write_at(at, &[0xee; EXTENT as usize], false).map_err(told)
    }

    /// Ends the process with all that is on its way, or the machine, and goes on: what was acknowledged is there,
    /// or what was durable.
    fn end(mut self) -> Result<Self, String> {
        let lost = self.rng.u8(..3) == 0;
        for flying in &self.flying {
            if let Kind::Write(byte) = flying.kind {
                let (side, at) = (&mut self.sides[flying.volume], flying.block as usize);
                side.kept[at].push(byte);
                side.older[at].push(byte);
            }
        }
        self.disk.stop();
        self.place.kill();
        self.flying.clear();
        let old: Vec<_> = self.sides.drain(..).map(Old::from).collect();
        let Self { mut rng, mut disk, place, env, seed, store, filler, last, named, .. } = self;
        drop((filler, store));
        disk.revive();
        if lost {
            let mode = CrashMode::random(&mut rng);
            disk = Arc::new(disk.crash_image(&mut rng, mode));
            place.lose();
            env.reboot();
        }
        let how = if lost { "power lost" } else { "killed" };
        let store = open(&disk, &place, &env, seed)?;
        let sides = old.into_iter().map(|old| old.find(&store, lost));
        let sides = sides.collect::<Result<_, _>>().map_err(|e| format!("{how}: {e}"))?;
        let report = store.check().map_err(told)?;
        if report.worst() == Some(Severity::Corrupt) {
            return Err(format!("{how}: {report:?}"));
        }
        let filler = store.volume("filler").map_err(told)?;
        let flying = Vec::new();
        Ok(Self { rng, disk, place, env, seed, store, filler, sides, flying, last, named })
    }
}

/// What is known of a volume whose process has ended.
struct Old {
    name: &'static str,
    kept: Vec<May>,
    older: Vec<May>,
    snapshots: Vec<(String, Vec<May>)>,
    retired: Vec<String>,
}

impl From<Side> for Old {
    fn from(side: Side) -> Self {
        let Side { name, kept, older, snapshots, retired, .. } = side;
        Self { name, kept, older, snapshots, retired }
    }
}

impl Old {
    /// Compares what is there, which is what the volume holds from here on.
    fn find(self, store: &Store, lost: bool) -> Result<Side, String> {
        let found = |spec: &str, may: &[May]| {
            let handle = store.volume(spec).map_err(told)?;
            let mut now = Vec::new();
            for (block, may) in (0..).zip(may) {
                let mut buf = [0; BLOCK as usize];
                handle.read_at(block * BLOCK, &mut buf).map_err(told)?;
                fits(&buf, may).map_err(|e| format!("{spec}, block {block}: {e}"))?;
                now.push(vec![buf[0]]);
            }
            Ok::<_, String>(now)
        };
        let now = found(self.name, if lost { &self.older } else { &self.kept })?;
        let snapshots = self.snapshots.into_iter().map(|(name, may)| {
            let content = found(&format!("{}@{name}", self.name), &may)?;
            Ok::<_, String>((name, content))
        });
        let snapshots = snapshots.collect::<Result<_, _>>()?;
        let handle = store.volume(self.name).map_err(told)?;
        let (kept, older, held) = (now.clone(), now.clone(), [true; BLOCKS as usize]);
        let (name, retired, undone) = (self.name, self.retired, [false; BLOCKS as usize]);
        Ok(Side { name, handle, now, kept, older, held, undone, snapshots, retired })
    }
}

fn fits(buf: &[u8], may: &[u8]) -> Outcome {
    let byte = buf[0];
    if buf.iter().any(|other| *other != byte) {
        return Err("a mix within a block".to_owned());
    }
    if may.contains(&byte) { Ok(()) } else { Err(format!("{byte} is read, and not {may:?}")) }
}
