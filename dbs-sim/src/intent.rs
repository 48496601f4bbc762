//! Groups of checksums opened, written and closed, with memory that is always too small, and the power
//! lost at any change of the disk, twice: what is read is never taken for damaged, nor is it another's.
//!
//! Histories have stores of one group or two, of a page or a few each; here are several with all
//! their pages, one of them never written before.

use crate::disk::{CrashMode, Faults, Medium, SimDisk};
use crate::env::SimEnv;
use crate::step::count_image;
use dbs_core::io::Storage;
use dbs_core::{ErrorKind, InitOptions, Store};
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 4096;
/// Blocks of a volume in each of which another page is at work.
const STEP: u64 = 4 << 20;
/// Those that are written before; the others are of a group that is not.
const OLD: u64 = 30;
const PLACES: u64 = 44;
/// Steps of a history, and of one after a crash.
const STEPS: usize = 24;
const STEPS_AFTER: usize = 5;
/// Changes of the disk before which the power may be lost.
const CHANGES: u64 = 160;
/// Moments at which it is, and images of each.
const MOMENTS: usize = 10;
const IMAGES: usize = 3;

fn open(disk: &Arc<SimDisk>, env: &Arc<SimEnv>) -> Result<Store, String> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    Store::open_on(storage, None, Arc::clone(env) as _, false).map_err(|e| format!("open: {e}"))
}

/// Content that says which place it is of.
fn content(place: u64, tag: u8) -> [u8; BLOCK as usize] {
    let mut content = [tag; BLOCK as usize];
    content[0] = place as u8;
    content
}

/// A store closed in good order: some places written, those of the last group not.
fn prepare(seed: u64, env: &Arc<SimEnv>) -> Result<SimDisk, String> {
    let failed = |e: dbs_core::Error| format!("preparing: {e}");
    let size = 224 << 20;
    let init = InitOptions {
        size: Some(size),
        extent_size: 4 << 20,
        max_size: Some(size),
        max_volumes: Some(8),
        max_snapshots: Some(8),
        journal_size: Some(256 << 10),
        ..InitOptions::default()
    };
    let disk = Arc::new(SimDisk::new(Medium::file(size), seed));
    Store::init_on(&*disk, &init, &**env).map_err(failed)?;
    let store = open(&disk, env)?;
    disk.set_atomic_from(store.info().metadata);
    store.create_volume("v", PLACES * STEP).map_err(failed)?;
    let volume = store.volume("v").map_err(failed)?;
    for place in 0..OLD {
        volume.write_at(place * STEP, &content(place, 1), false).map_err(failed)?;
    }
    drop(volume);
    store.close().map_err(failed)?;
    Ok(disk.fork())
}

/// What every place may hold, by what was written there.
#[derive(Clone)]
struct Written {
    tags: Vec<Vec<u8>>,
    next: u8,
}

impl Written {
    /// What [`prepare`] wrote.
    fn new() -> Self {
        let tags = (0..PLACES).map(|place| if place < OLD { vec![1] } else { Vec::new() });
        Self { tags: tags.collect(), next: 1 }
    }

    fn write(&mut self, place: u64) -> [u8; BLOCK as usize] {
        self.next += 1;
        self.tags[place as usize].push(self.next);
        content(place, self.next)
    }
}

/// Any of what a server does, with what a memory that is too small adds to it.
fn step(store: &Store, rng: &mut fastrand::Rng, written: &mut Written) -> dbs_core::Result<()> {
    let volume = store.volume("v")?;
    // Few places, so that groups meet.
    let place = [rng.u64(0..4), rng.u64(16..20), rng.u64(OLD..PLACES)][rng.usize(0..3)];
    match rng.u8(0..14) {
        0..6 => volume.write_at(place * STEP, &written.write(place), rng.u8(0..6) == 0),
        6 | 7 => store.close_checksums(Duration::ZERO),
        8 | 9 => store.crowd_checksums(true),
        10 => store.crowd_checksums(false),
        11 => store.relearn_checksums(64).map(drop),
        12 => store.flush(),
        _ => volume.read_at(place * STEP, &mut [0; BLOCK as usize]),
    }
}

/// All places are read, and hold what was written there.
fn judge(store: &Store, written: &Written) -> Result<(), String> {
    let volume = store.volume("v").map_err(|e| e.to_string())?;
    let mut buf = [0; BLOCK as usize];
    for (place, tags) in (0..).zip(&written.tags) {
        volume.read_at(place * STEP, &mut buf).map_err(|e| format!("place {place}: {e}"))?;
        let any = tags.iter().any(|tag| buf == content(place, *tag));
        let blank = place >= OLD && buf == [0; BLOCK as usize];
        if !any && !blank {
            return Err(format!("place {place} holds {} {}", buf[0], buf[1]));
        }
    }
    Ok(())
}

/// Starts what a crash has left, goes on, and lets that crash as well, or end in good order.
fn survive(
    disk: SimDisk,
    env: &Arc<SimEnv>,
    rng: &mut fastrand::Rng,
    written: &Written,
) -> Result<(), String> {
    count_image();
    let disk = Arc::new(disk);
    let mut written = written.clone();
    let look = rng.bool();
    let store = open(&disk, env)?;
    if look {
        judge(&store, &written)?;
    }
    for _ in 0..STEPS_AFTER {
        step(&store, rng, &mut written).map_err(|e| format!("after a crash: {e}"))?;
    }
    let next = if rng.bool() {
        store.close().map_err(|e| format!("closing after a crash: {e}"))?;
        disk.fork()
    } else {
        drop(store);
        let mode = CrashMode::random(rng);
        disk.crash_image(rng, mode)
    };
    let next = Arc::new(next);
    let store = open(&next, env)?;
    judge(&store, &written).map_err(|e| format!("after that: {e}"))?;
    let report = store.scrub(true, &mut |_| true).map_err(|e| e.to_string())?;
    if report.damaged > 0 {
        return Err(format!("a scrub finds {report:?}"));
    }
    Ok(())
}

/// Runs one history; the number of crash images that were judged.
///
/// # Errors
/// What must not be.
pub fn run(seed: u64) -> Result<u64, String> {
    let env = Arc::new(SimEnv::new(seed));
    let disk = Arc::new(prepare(seed, &env)?);
    let mut rng = fastrand::Rng::with_seed(seed);
    let store = open(&disk, &env)?;
    let mut moments: Vec<u64> = (1..CHANGES).collect();
    rng.shuffle(&mut moments);
    moments.truncate(MOMENTS);
    disk.arm(Faults { captures_at: moments, ..Faults::default() });
    let mut written = Written::new();
    for _ in 0..STEPS {
        step(&store, &mut rng, &mut written).map_err(|e| format!("seed {seed}: {e}"))?;
    }
    judge(&store, &written).map_err(|e| format!("seed {seed}, without a crash: {e}"))?;
    let mut moments = disk.take_captures();
    moments.push(disk.fork());
    let judged = crash(&moments, &env, &mut rng, &written);
    judged.map_err(|e| format!("seed {seed}, {e}"))
}

/// As [`run`], on a disk that fails to write, or has no space, now and then; also which part of the steps
/// succeeded.
///
/// # Errors
/// As there.
pub fn run_with_errors(seed: u64) -> Result<(u64, f64), String> {
    let env = Arc::new(SimEnv::new(seed));
    let disk = Arc::new(prepare(seed, &env)?);
    let mut rng = fastrand::Rng::with_seed(seed);
    let store = open(&disk, &env)?;
    let mut written = Written::new();
    let (mut moments, mut done) = (Vec::new(), 0);
    for number in 0..STEPS {
        let at = Some(rng.u64(1..10));
        disk.arm(match rng.u8(0..6) {
            0 => Faults { eio_at: at, ..Faults::default() },
            1 | 2 => Faults { refused_at: at, ..Faults::default() },
            _ => Faults::default(),
        });
        match step(&store, &mut rng, &mut written) {
            Err(error) if error.kind() == ErrorKind::Damaged => {
                return Err(format!("seed {seed}, step {number}: {error}"));
            }
            outcome => done += usize::from(outcome.is_ok()),
        }
        if rng.u8(0..3) == 0 {
            moments.push(disk.fork());
        }
    }
    disk.arm(Faults::default());
    judge(&store, &written).map_err(|e| format!("seed {seed}, without a crash: {e}"))?;
    // What it could not write, or could: it says which it is.
    let closed = store.close();
    moments.push(disk.fork());
    let judged = crash(&moments, &env, &mut rng, &written);
    let images = judged.map_err(|e| format!("seed {seed}, closed: {closed:?}, {e}"))?;
    Ok((images, done as f64 / STEPS as f64))
}

/// Lets the power be lost at each of these moments, and judges what is left: of how many images.
fn crash(
    moments: &[SimDisk],
    env: &Arc<SimEnv>,
    rng: &mut fastrand::Rng,
    written: &Written,
) -> Result<u64, String> {
    let mut images = 0;
    for (number, moment) in moments.iter().enumerate() {
        for _ in 0..IMAGES {
            let mode = CrashMode::random(rng);
            images += 1;
            env.reboot();
            let image = moment.crash_image(rng, mode);
            survive(image, env, rng, written)
                .map_err(|e| format!("moment {number}, {mode:?}: {e}"))?;
        }
    }
    Ok(images)
}
