//! Requests beside one another and beside commands, on one thread, in an order that follows from a seed: each is
//! started, transferred and finished when its turn comes. Requests share the metadata, and commands
//! have it alone; what one of them holds must keep the others away all the same.

use crate::disk::{Medium, SimDisk};
use crate::env::{SimEnv, TailPlace};
use crate::image;
use crate::machine::Config;
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
const VOLUMES: usize = 2;
const STEPS: usize = 150;
/// Most requests on their way, and snapshots of a volume.
const FLYING: usize = 8;
const SNAPSHOTS: usize = 3;
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

enum Kind {
    Read(May),
    Write(u8),
}

/// A volume, as it is now, as a kill must leave it, and its snapshots.
struct Side {
    name: &'static str,
    handle: Volume,
    now: Vec<May>,
    kept: Vec<May>,
    snapshots: Vec<(String, Vec<May>)>,
}

struct Game {
    rng: fastrand::Rng,
    disk: Arc<SimDisk>,
    place: TailPlace,
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
    (0..STEPS).try_for_each(|step| game.step().map_err(|e| format!("step {step}: {e}")))?;
    game.kill()
}

fn told(error: dbs_core::Error) -> String {
    error.to_string()
}

/// With a tail or without, as the seed says.
fn open(disk: &Arc<SimDisk>, place: &TailPlace, seed: u64) -> Result<Store, String> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    let tail = (!seed.is_multiple_of(3)).then(|| place.attach(disk));
    Store::open_on(storage, tail, Arc::new(SimEnv::new(seed)), false)
        .map(image::given)
        .map_err(told)
}

impl Game {
    fn new(seed: u64) -> Result<Self, String> {
        let init = InitOptions { checksums: seed.is_multiple_of(2), ..Config::small(seed).init };
        let disk = Arc::new(SimDisk::new(Medium::file(4 << 20), seed));
        Store::init_on(&*disk, &init, &SimEnv::new(seed)).map_err(told)?;
        let place = TailPlace::default();
        let store = open(&disk, &place, seed)?;
        disk.set_atomic_from(store.info().metadata);
        let side = |name: &'static str| {
            store.create_volume(name, BLOCKS * BLOCK).map_err(told)?;
            let handle = store.volume(name).map_err(told)?;
            // Of the second extent nothing is written yet.
            handle.write_at(0, &[1; EXTENT as usize], true).map_err(told)?;
            let now: Vec<May> =
                (0..BLOCKS).map(|block| vec![u8::from(block * BLOCK < EXTENT)]).collect();
            Ok::<_, String>(Side { name, handle, kept: now.clone(), now, snapshots: Vec::new() })
        };
        let sides = ["a", "b"].map(side).into_iter().collect::<Result<_, _>>()?;
        store.create_volume("filler", 1 << 20).map_err(told)?;
        let filler = store.volume("filler").map_err(told)?;
        let rng = fastrand::Rng::with_seed(seed);
        let flying = Vec::new();
        Ok(Self { rng, disk, place, seed, store, filler, sides, flying, last: 1, named: 0 })
    }

    fn step(&mut self) -> Outcome {
        let volume = self.rng.usize(..VOLUMES);
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

    /// In few blocks, so that requests meet.
    fn block(&mut self) -> u64 {
        self.rng.u64(..4) * (BLOCKS / 4)
    }

    fn start_write(&mut self, volume: usize) -> Outcome {
        let block = self.block();
        // Without checksums two such writes are both right, and nobody knows which one is there.
        let meets = self.writes(volume, Some(block));
        if self.flying.len() == FLYING || (meets && self.store.checksums().is_none()) {
            return Ok(());
        }
        self.last = self.last.wrapping_add(1).max(2);
        let (byte, mut request) = (self.last, Request::new());
        let buf = vec![byte; BLOCK as usize];
        let handle = &self.sides[volume].handle;
        match handle.start_write(block * BLOCK, BLOCK, &mut request).map_err(told)? {
            Start::Io => {}
            // By itself it would wait for what is on its way here.
            _ if !self.flying.is_empty() => return Ok(()),
            _ => {
                handle.write_at(block * BLOCK, &buf, false).map_err(told)?;
                self.wrote(volume, block, byte, true);
                return Ok(());
            }
        }
        request.seal(&buf);
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
        let (mut request, buf) = (Request::new(), vec![0; BLOCK as usize]);
        let started = handle.start_read(block * BLOCK, BLOCK, &mut request).map_err(told)?;
        match started {
            Start::Io => {
                let kind = Kind::Read(may);
                self.flying.push(Flying { volume, block, request, buf, moved: false, kind });
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
        let place = flying.request.segments()[0].device;
        match flying.kind {
            Kind::Read(_) => self.disk.read_at(place, &mut flying.buf),
            Kind::Write(_) => self.disk.write_at(place, &flying.buf),
        }
        .map_err(|e| e.to_string())?;
        flying.moved = true;
        Ok(())
    }

    fn finish(&mut self, flying: Flying) -> Outcome {
        let Flying { volume, block, mut request, buf, kind, .. } = flying;
        match kind {
            Kind::Read(may) => match request.finish_read(Ok(()), &buf).map_err(told)? {
                Read::Done => fits(&buf, &may),
                Read::Again => self.read_now(volume, block),
            },
            Kind::Write(byte) if self.rng.u8(..10) == 0 => {
                let failed = io::Error::from_raw_os_error(5);
                if request.finish_write(Err(failed)).is_ok() {
                    return Err("a failed write is a success".to_owned());
                }
                self.sides[volume].now[block as usize].push(byte);
                self.sides[volume].kept[block as usize].push(byte);
                Ok(())
            }
            Kind::Write(byte) => {
                let finish = request.finish_write(Ok(())).map_err(told)?;
                self.wrote(volume, block, byte, finish == Finish::Done);
                Ok(())
            }
        }
    }

    /// What is finished is durable now.
    fn durable(&mut self) {
        self.sides.iter_mut().for_each(|side| side.kept.clone_from(&side.now));
    }

    /// One that waits for none of what is on its way.
    fn command(&mut self, volume: usize) -> Outcome {
        let is_written = self.writes(volume, None);
        let any_written = self.flying.iter().any(|flying| matches!(flying.kind, Kind::Write(_)));
        match self.rng.u8(..9) {
            0 if !is_written => self.snapshot(volume),
            1 if !is_written => self.rollback(volume),
            2 => self.delete_snapshot(volume),
            3 if !is_written => {
                let extent = self.rng.u64(..2);
                self.sides[volume].handle.discard(extent * EXTENT, EXTENT).map_err(told)?;
                let (first, count) = (extent * EXTENT / BLOCK, EXTENT / BLOCK);
                (first..first + count).for_each(|block| self.wrote(volume, block, 0, true));
                Ok(())
            }
            4 => {
                self.store.flush().map_err(told)?;
                self.durable();
                Ok(())
            }
            5 if !any_written => self.store.work(8).map(drop).map_err(told),
            6 => self.fill(),
            7 => self.store.close_checksums(Duration::ZERO).map_err(told),
            8 if !any_written => self.store.crowd_checksums(self.rng.bool()).map_err(told),
            _ => Ok(()),
        }
    }

    fn snapshot(&mut self, volume: usize) -> Outcome {
        let side = &mut self.sides[volume];
        if side.snapshots.len() == SNAPSHOTS || self.store.info().extents_free < FREE_EXTENTS {
            return Ok(());
        }
        self.named += 1;
        let name = self.named.to_string();
        self.store.create_snapshot(side.name, &name, &Default::default()).map_err(told)?;
        side.snapshots.push((name, side.now.clone()));
        self.durable();
        Ok(())
    }

    fn rollback(&mut self, volume: usize) -> Outcome {
        let side = &mut self.sides[volume];
        let Some((name, content)) = self.rng.choice(&side.snapshots) else { return Ok(()) };
        self.store.rollback(side.name, name).map_err(told)?;
        side.now.clone_from(content);
        self.durable();
        Ok(())
    }

    fn delete_snapshot(&mut self, volume: usize) -> Outcome {
        let side = &mut self.sides[volume];
        if side.snapshots.is_empty() {
            return Ok(());
        }
        let at = self.rng.usize(..side.snapshots.len());
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

    /// Kills the process with all that is on its way: what was acknowledged is there.
    fn kill(mut self) -> Outcome {
        for flying in &self.flying {
            if let Kind::Write(byte) = flying.kind {
                self.sides[flying.volume].kept[flying.block as usize].push(byte);
            }
        }
        self.disk.stop();
        self.place.kill();
        self.flying.clear();
        let kept: Vec<_> = self.sides.drain(..).map(|side| (side.name, side.kept)).collect();
        let Self { disk, place, seed, store, filler, .. } = self;
        drop((filler, store));
        disk.revive();
        let store = open(&disk, &place, seed)?;
        for (name, kept) in &kept {
            let handle = store.volume(name).map_err(told)?;
            for (block, may) in (0..).zip(kept) {
                let mut buf = [0; BLOCK as usize];
                handle.read_at(block * BLOCK, &mut buf).map_err(told)?;
                fits(&buf, may).map_err(|e| format!("{name}, block {block}, killed: {e}"))?;
            }
        }
        let report = store.check().map_err(told)?;
        match report.worst() {
            None | Some(dbs_core::info::Severity::Leak) => Ok(()),
            Some(_) => Err(format!("{report:?}")),
        }
    }
}

fn fits(buf: &[u8], may: &[u8]) -> Outcome {
    let byte = buf[0];
    if buf.iter().any(|other| *other != byte) {
        return Err("a mix within a block".to_owned());
    }
    if may.contains(&byte) { Ok(()) } else { Err(format!("{byte} is read, and not {may:?}")) }
}
