//! Flushes that reactors do by themselves (`Volume::start_flush`), beside writes on their way, commits of a
//! worker, and a flush that fails, in any order: what was answered as durable is there after a power loss.

use crate::disk::{CrashMode, Faults, Medium, SimDisk};
use crate::env::{SimEnv, TailPlace};
use crate::machine::Config;
use crate::step::count_image;
use dbs_core::io::Storage;
use dbs_core::volume::{Asked, Flush, Request, Start, StartFlush, Wake};
use dbs_core::{Error, InitOptions, Store, Volume};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

const BLOCK: u64 = 4096;
/// Blocks written to, so far apart that some are in extents of their own.
const BLOCKS: usize = 12;
const APART: u64 = 5 * BLOCK;
const REACTORS: usize = 3;
/// Steps of a history: versions of content are bytes.
const STEPS: usize = 120;

/// A block: which versions of it there are.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// The newest that was written, and the newest whose write has ended.
    written: u8,
    acknowledged: u8,
    /// The newest that was acknowledged before a flush that was answered.
    durable: u8,
}

/// A write on its way.
struct Flying {
    at: usize,
    request: Request,
    version: u8,
}

/// One that asks for flushes.
struct Reactor {
    asked: Asked,
    wake: Wake,
    woken: Arc<AtomicBool>,
    /// What was acknowledged when it asked.
    needs: [u8; BLOCKS],
}

/// A flush on its way: whose it is, and the first write that it does not cover.
struct Running {
    reactor: usize,
    flush: Flush,
    mark: u64,
}

/// A commit that blocks, and what was acknowledged when it was asked for.
struct Worker {
    thread: JoinHandle<dbs_core::Result<()>>,
    needs: [u8; BLOCKS],
}

struct Machine {
    disk: Arc<SimDisk>,
    volume: Volume,
    _place: TailPlace,
    rng: fastrand::Rng,
    blocks: [Block; BLOCKS],
    flying: Vec<Flying>,
    reactors: Vec<Reactor>,
    running: Option<Running>,
    worker: Option<Worker>,
    failed: bool,
    images: u64,
    /// Flushes that were answered, and those that reactors did.
    answered: u64,
    ringed: u64,
}

/// Runs a history; crash images that were looked at, flushes that were answered, and those that reactors did.
///
/// # Errors
/// What must not be.
pub fn run(seed: u64) -> Result<[u64; 3], String> {
    let mut machine = Machine::new(seed).map_err(|e| format!("seed {seed}, preparing: {e}"))?;
    let outcome = (0..STEPS).try_for_each(|step| {
        machine.step(step as u8 + 1).map_err(|text| format!("seed {seed}, step {step}: {text}"))
    });
    machine.flying.iter_mut().for_each(|flying| flying.request.cancel());
    outcome.map(|()| [machine.images, machine.answered, machine.ringed])
}

impl Machine {
    fn new(seed: u64) -> dbs_core::Result<Self> {
        let init = InitOptions { checksums: false, ..Config::small(seed).init };
        let size = init.size.unwrap_or(4 << 20);
        let (env, disk) = (SimEnv::new(seed), Arc::new(SimDisk::new(Medium::file(size), seed)));
        Store::init_on(&*disk, &init, &env)?;
        let (storage, place) = (Arc::clone(&disk) as Arc<dyn Storage>, TailPlace::default());
        let store = Store::open_on(storage, Some(place.attach(&disk)), Arc::new(env), false)?;
        disk.set_atomic_from(store.info().metadata);
        store.create_volume("v", 1 << 20)?;
        let volume = store.volume("v")?;
        // Half of the blocks are there; and the metadata has its space, which a reactor cannot reserve.
        for at in (0..BLOCKS as u64).step_by(2) {
            volume.write_at(at * APART, &[0; BLOCK as usize], true)?;
        }
        let reactor = |_| {
            let woken = Arc::new(AtomicBool::new(false));
            let tell = Arc::clone(&woken);
            let wake: Wake = Arc::new(move || tell.store(true, Ordering::Relaxed));
            Reactor { asked: Asked::default(), wake, woken, needs: [0; BLOCKS] }
        };
        Ok(Self {
            disk,
            volume,
            _place: place,
            rng: fastrand::Rng::with_seed(seed),
            blocks: [Block::default(); BLOCKS],
            flying: Vec::new(),
            reactors: (0..REACTORS).map(reactor).collect(),
            running: None,
            worker: None,
            failed: false,
            images: 0,
            answered: 0,
            ringed: 0,
        })
    }

    fn step(&mut self, version: u8) -> Result<(), String> {
        match self.rng.u8(0..20) {
            0..5 => self.begin_write(version),
            5..10 => self.end_write(),
            10..14 => self.ask(),
            14..18 => self.end_flush(),
            18 => self.lose_power(),
            _ => {
                self.commit();
                Ok(())
            }
        }?;
        for number in 0..REACTORS {
            if self.reactors[number].woken.swap(false, Ordering::Relaxed) {
                self.look(number)?;
            }
        }
        // Nobody is in its way.
        if self.running.is_none() { self.end_commit() } else { Ok(()) }
    }

    fn begin_write(&mut self, version: u8) -> Result<(), String> {
        let at = self.rng.usize(0..BLOCKS);
        if self.flying.iter().any(|flying| flying.at == at) {
            return Ok(());
        }
        let mut request = Request::new();
        match self.volume.start_write(at as u64 * APART, BLOCK, &mut request) {
            Ok(Start::Io) => {
                request.seal(&[version; BLOCK as usize]);
                self.blocks[at].written = version;
                self.flying.push(Flying { at, request, version });
            }
            Ok(_) => {}
            Err(error) if !self.failed => return Err(error.to_string()),
            Err(_) => {}
        }
        Ok(())
    }

    fn end_write(&mut self) -> Result<(), String> {
        if self.flying.is_empty() {
            return Ok(());
        }
        let which = self.rng.usize(..self.flying.len());
        let Flying { at, mut request, version } = self.flying.swap_remove(which);
        let device = request.segments()[0].device;
        self.disk.write_at(device, &[version; BLOCK as usize]).map_err(|e| e.to_string())?;
        // Whether a commit must come first does not matter: nothing is killed here.
        let _ = request.finish_write(Ok(())).map_err(|e| e.to_string())?;
        self.blocks[at].acknowledged = version;
        Ok(())
    }

    /// A reactor has a request for a flush.
    fn ask(&mut self) -> Result<(), String> {
        let number = self.rng.usize(0..REACTORS);
        let busy = self.running.as_ref().is_some_and(|running| running.reactor == number);
        if busy || self.reactors[number].asked.is_waiting() {
            return Ok(());
        }
        self.reactors[number].needs = self.blocks.map(|block| block.acknowledged);
        self.look(number)
    }

    /// A reactor begins with its flush, or goes on with it.
    fn look(&mut self, number: usize) -> Result<(), String> {
        let Reactor { asked, wake, .. } = &mut self.reactors[number];
        match self.volume.start_flush(asked, wake) {
            Ok(StartFlush::Io(flush)) => {
                self.ringed += 1;
                self.running = Some(Running { reactor: number, flush, mark: self.disk.mark() });
                Ok(())
            }
            Ok(StartFlush::Done) => self.told(Ok(()), self.reactors[number].needs),
            Ok(StartFlush::Later) => Ok(()),
            Ok(StartFlush::Blocked) => {
                self.commit();
                Ok(())
            }
            Err(error) => self.told(Err(error), self.reactors[number].needs),
        }
    }

    fn end_flush(&mut self) -> Result<(), String> {
        let Some(Running { reactor, flush, mark }) = self.running.take() else { return Ok(()) };
        let fails = self.rng.u8(0..30) == 0;
        if fails {
            self.disk.arm(Faults { eio_at: Some(1), ..Faults::default() });
            self.failed = true;
        }
        let outcome = self.disk.flush_from(mark);
        self.disk.arm(Faults::default());
        let finished = flush.finish(outcome);
        self.told(finished, self.reactors[reactor].needs)
    }

    /// Gives a worker a commit, which waits for a flush that is on its way.
    fn commit(&mut self) {
        if self.worker.is_none() {
            let (volume, needs) =
                (self.volume.clone(), self.blocks.map(|block| block.acknowledged));
            let thread = thread::spawn(move || volume.flush());
            self.worker = Some(Worker { thread, needs });
        }
    }

    fn end_commit(&mut self) -> Result<(), String> {
        let Some(Worker { thread, needs }) = self.worker.take() else { return Ok(()) };
        let flushed = thread.join().map_err(|_| "a commit panicked".to_owned())?;
        self.told(flushed, needs)
    }

    /// Somebody is told that what was acknowledged then is durable, or not.
    fn told(&mut self, flushed: Result<(), Error>, needs: [u8; BLOCKS]) -> Result<(), String> {
        match flushed {
            Ok(()) => self.answered += 1,
            Err(_) if self.failed => return Ok(()),
            Err(error) => return Err(error.to_string()),
        }
        for (block, version) in self.blocks.iter_mut().zip(needs) {
            block.durable = block.durable.max(version);
        }
        // What a flush that failed has lost shows at once.
        if self.failed { self.lose_power() } else { Ok(()) }
    }

    /// What a power loss now would leave.
    fn lose_power(&mut self) -> Result<(), String> {
        self.images += 1;
        count_image();
        let mode = if self.rng.bool() { CrashMode::Lost } else { CrashMode::Torn };
        let image = self.disk.crash_image(&mut self.rng, mode);
        let env = SimEnv::new(1);
        let store = Store::open_on(Arc::new(image), None, Arc::new(env), false)
            .map_err(|e| format!("open after a power loss: {e}"))?;
        let volume = store.volume("v").map_err(|e| e.to_string())?;
        for (at, block) in self.blocks.iter().enumerate() {
            let mut found = [0; BLOCK as usize];
            volume.read_at(at as u64 * APART, &mut found).map_err(|e| e.to_string())?;
            let [first, last] = [found[0], found[found.len() - 1]];
            if first != last || first < block.durable || first > block.written {
                return Err(format!(
                    "block {at} holds {first} and {last} after a power loss, not what is in {block:?}"
                ));
            }
        }
        Ok(())
    }
}
