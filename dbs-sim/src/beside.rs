//! Two flushes beside one another, and two writes.
//!
//! One flush fails while somebody else is about to flush: the device tells one of them, and forgets what it could
//! not keep. The other one must not take its own flush for a success. Two threads are not needed, nor
//! their timing. A page of checksums is opened by a write and a flush; between the two, on the same thread,
//! the disk calls another handle's flush, which fails.
//!
//! One runs while somebody else writes, and asks for a flush: what runs does not promise that.
//!
//! A write of a part of a block reads the block, changes it, and writes it. Amid that somebody else writes the
//! block: that must wait, or be there afterwards.

use crate::disk::{CrashMode, Faults, Medium, SimDisk};
use crate::env::SimEnv;
use crate::machine::Config;
use crate::step::count_image;
use dbs_core::io::Storage;
use dbs_core::sabotage::{self, Bug};
use dbs_core::volume::{Request, Start};
use dbs_core::{Error, InitOptions, Store, Volume};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
/// How long somebody may take to ask for a flush.
const HEAD_START: Duration = Duration::from_millis(20);
/// Disks; what one that fails forgets follows from its seed.
const DISKS: u64 = 12;

fn open(disk: &Arc<SimDisk>, env: &Arc<SimEnv>) -> Result<Store, String> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    Store::open_on(storage, None, Arc::clone(env) as _, false).map_err(|e| format!("open: {e}"))
}

/// Runs it; the number of crash images that were looked at.
///
/// # Errors
/// What must not be.
pub fn run(config: &Config) -> Result<u64, String> {
    (0..DISKS).try_for_each(|seed| one(config, seed))?;
    Ok(DISKS)
}

/// Amid a flush another thread opens a page of checksums, which flushes, and writes a block of it.
///
/// # Errors
/// What must not be.
pub fn run_shared(config: &Config) -> Result<u64, String> {
    (0..DISKS).try_for_each(|seed| shared(config, seed))?;
    Ok(DISKS)
}

fn shared(config: &Config, seed: u64) -> Result<(), String> {
    let Prepared { env, disk, store, volume } = prepare(config, seed)?;
    // Nothing is left that the flush would have to write: it is one flush of the disk, no more.
    while store.settle().map_err(|e| format!("preparing: {e}"))? {}
    let (send, opening) = mpsc::channel();
    disk.in_flush(move || {
        let opening = thread::spawn(move || volume.write_at(0, &[2; BLOCK], false));
        // Time to ask for its flush. If the one that runs is over first, that shows nothing, and is no error.
        thread::sleep(HEAD_START);
        let _ = send.send(opening);
    });
    let flushed = store.flush();
    let opening = opening.recv().map_err(|_| "no flush was in between".to_owned())?;
    let written = opening.join().map_err(|_| "the write in between panicked".to_owned())?;
    flushed.and(written).map_err(|e| e.to_string())?;
    // The block is there, and of the page what was flushed.
    let image = disk.crash_image(&mut fastrand::Rng::with_seed(seed), CrashMode::OnlyLast);
    drop(store);
    shows(Arc::new(image), &env)
}

/// Opens what a power loss has left: the block must be one of the two, and be read.
fn shows(image: Arc<SimDisk>, env: &Arc<SimEnv>) -> Result<(), String> {
    count_image();
    env.reboot();
    let store = open(&image, env)?;
    let mut found = [0; BLOCK];
    let read = store.volume("v").and_then(|volume| volume.read_at(0, &mut found));
    read.map_err(|e| e.to_string())?;
    match found[0] {
        1 | 2 => Ok(()),
        other => Err(format!("the block holds {other}")),
    }
}

/// A store with a volume whose page of checksums is closed.
struct Prepared {
    env: Arc<SimEnv>,
    disk: Arc<SimDisk>,
    store: Store,
    volume: Volume,
}

fn prepare(config: &Config, seed: u64) -> Result<Prepared, String> {
    prepare_with(config, seed, true)
}

fn prepare_with(config: &Config, seed: u64, checksums: bool) -> Result<Prepared, String> {
    let failed = |e: Error| format!("preparing: {e}");
    let env = Arc::new(SimEnv::new(seed));
    let disk = Arc::new(SimDisk::new(Medium::file(config.init.size.unwrap_or(4 << 20)), seed));
    let init = InitOptions { checksums, ..config.init.clone() };
    Store::init_on(&*disk, &init, &*env).map_err(failed)?;
    let store = open(&disk, &env)?;
    disk.set_atomic_from(store.info().metadata);
    store.create_volume("v", 1 << 16).map_err(failed)?;
    let volume = store.volume("v").map_err(failed)?;
    volume.write_at(0, &[1; BLOCK], true).map_err(failed)?;
    store.close_checksums(Duration::ZERO).map_err(failed)?;
    store.flush().map_err(failed)?;
    Ok(Prepared { env, disk, store, volume })
}

/// Amid a write of a part of a block, between its read and its write, somebody starts one of the whole.
///
/// # Errors
/// What must not be.
pub fn run_held(config: &Config) -> Result<(), String> {
    // With checksums the block would be read again.
    let Prepared { disk, store, volume, .. } = prepare_with(config, 1, false)?;
    let (inside, file, (send, receive)) = (volume.clone(), Arc::clone(&disk), mpsc::channel());
    disk.after_read(1, move || {
        let mut request = Request::new();
        let started = inside.start_write(0, BLOCK as u64, &mut request);
        if matches!(started, Ok(Start::Io)) {
            request.seal(&[2; BLOCK]);
            let written = file.write_at(request.segments()[0].device, &[2; BLOCK]);
            // What the other has read is of before.
            let _ = send.send(request.finish_write(written));
        }
    });
    volume.write_at(512, &[3; 512], false).map_err(|e| e.to_string())?;
    let mut found = [0; BLOCK];
    volume.read_at(0, &mut found).map_err(|e| e.to_string())?;
    drop(store);
    let other = if receive.try_recv().is_ok() { 2 } else { 1 };
    if found[0] == other { Ok(()) } else { Err("an acknowledged write is gone".to_owned()) }
}

/// A write of a whole block is on its way, and another thread writes a part of the block.
///
/// # Errors
/// What must not be.
pub fn run_excluding(config: &Config) -> Result<(), String> {
    // With checksums the block would be locked for them as well.
    let Prepared { disk, store, volume, .. } = prepare_with(config, 1, false)?;
    let mut request = Request::new();
    match volume.start_write(0, BLOCK as u64, &mut request) {
        Ok(Start::Io) => request.seal(&[2; BLOCK]),
        other => return Err(format!("the write did not start: {other:?}")),
    }
    let (file, request) = (Arc::clone(&disk), Arc::new(Mutex::new(request)));
    let finish = move || {
        let mut request = request.lock().unwrap_or_else(PoisonError::into_inner);
        if request.is_running() {
            let written = file.write_at(request.segments()[0].device, &[2; BLOCK]);
            // What the other has read is of before.
            return request.finish_write(written).map(drop);
        }
        Ok(())
    };
    let (amid, has_read) = (finish.clone(), Arc::new(AtomicBool::new(false)));
    let reads = Arc::clone(&has_read);
    disk.after_read(1, move || {
        reads.store(true, Ordering::SeqCst);
        drop(amid());
    });
    let (other, bug) = (volume.clone(), Bug::ALL.into_iter().find(|bug| sabotage::is(*bug)));
    let part = thread::spawn(move || {
        sabotage::set(bug);
        other.write_at(512, &[3; 512], false)
    });
    // If it has not begun to wait by then, that shows nothing, and is no error. With a bug it reads, however busy
    // the machine is.
    let (begun, most) = (Instant::now(), if bug.is_some() { 100 * HEAD_START } else { HEAD_START });
    while !has_read.load(Ordering::SeqCst) && begun.elapsed() < most {
        thread::sleep(Duration::from_millis(1));
    }
    let finished = finish();
    let part = part.join().map_err(|_| "the write of a part panicked".to_owned())?;
    finished.and(part).map_err(|e| e.to_string())?;
    let mut found = [0; BLOCK];
    volume.read_at(0, &mut found).map_err(|e| e.to_string())?;
    drop(store);
    match (found[0], found[512]) {
        (2, 3) => Ok(()),
        (first, part) => Err(format!("an acknowledged write is gone: {first}, {part}")),
    }
}

fn one(config: &Config, seed: u64) -> Result<(), String> {
    let Prepared { env, disk, store, volume } = prepare(config, seed)?;
    let told = Arc::new(AtomicBool::new(false));
    let (other, failing, tell) = (store.clone(), Arc::clone(&disk), Arc::clone(&told));
    disk.after_write(move || {
        failing.arm(Faults { eio_at: Some(1), ..Faults::default() });
        tell.store(other.flush().is_err(), Ordering::Relaxed);
    });
    let written = volume.write_at(0, &[2; BLOCK], false);
    if !told.load(Ordering::Relaxed) {
        return Err("the flush in between did not fail".to_owned());
    }
    drop((volume, store));
    let image = disk.crash_image(&mut fastrand::Rng::with_seed(seed), CrashMode::Kept);
    shows(Arc::new(image), &env)
        .map_err(|e| format!("after a write that ended with {written:?}: {e}"))
}
