//! Damaged blocks healed, of the head and of a snapshot, with the power lost at each change of the disk:
//! what is read afterwards is right or known as damage.

use crate::disk::{CrashMode, Faults, Medium, SimDisk};
use crate::env::SimEnv;
use crate::machine::Config;
use crate::step::count_image;
use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::{Request, Start};
use dbs_core::{ErrorKind, Store};
use std::sync::Arc;

const BLOCK: u64 = 4096;
/// Blocks of the snapshot; the head has as many of its own behind them.
const BLOCKS: u64 = 4;
/// Crash images of each moment.
const IMAGES: u64 = 12;

fn open(disk: &Arc<SimDisk>, env: &Arc<SimEnv>) -> Result<Store, String> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    Store::open_on(storage, None, Arc::clone(env) as _, false).map_err(|e| format!("open: {e}"))
}

fn content(block: u64) -> [u8; BLOCK as usize] {
    [block as u8 + 1; BLOCK as usize]
}

/// A store closed in good order, and where its blocks are.
fn prepare(config: &Config, env: &Arc<SimEnv>) -> Result<(SimDisk, Vec<u64>), String> {
    let failed = |e: dbs_core::Error| format!("preparing: {e}");
    let size = config.init.size.unwrap_or(4 << 20);
    let mut init = config.init.clone();
    init.checksums = true;
    let disk = Arc::new(SimDisk::new(Medium::file(size), config.seed));
    Store::init_on(&*disk, &init, &**env).map_err(failed)?;
    let store = open(&disk, env)?;
    disk.set_atomic_from(store.info().metadata);
    store.create_volume("v", 2 * BLOCKS * BLOCK).map_err(failed)?;
    let volume = store.volume("v").map_err(failed)?;
    let mut places = Vec::new();
    for block in 0..2 * BLOCKS {
        if block == BLOCKS {
            store.create_snapshot("v", "s", &SnapshotOptions::default()).map_err(failed)?;
        }
        volume.write_at(block * BLOCK, &content(block), false).map_err(failed)?;
        let mut request = Request::new();
        let started = volume.start_read(block * BLOCK, BLOCK, &mut request).map_err(failed)?;
        let place = request.segments().first().filter(|_| started == Start::Io);
        places.push(place.ok_or("a block is nowhere")?.device);
        request.cancel();
    }
    drop(volume);
    store.close().map_err(failed)?;
    Ok((disk.fork(), places))
}

/// Every block is what it was, or known as damaged, which only `damaged` may be.
fn judge(disk: SimDisk, env: &Arc<SimEnv>, damaged: u64) -> Result<(), String> {
    let store = open(&Arc::new(disk), env)?;
    let volume = store.volume("v").map_err(|e| e.to_string())?;
    let mut buf = [0; BLOCK as usize];
    for block in 0..2 * BLOCKS {
        match volume.read_at(block * BLOCK, &mut buf) {
            Ok(()) if buf == content(block) => {}
            Ok(()) => return Err(format!("block {block} reads otherwise")),
            Err(error) if error.kind() == ErrorKind::Damaged && block == damaged => {}
            Err(error) => return Err(format!("block {block}: {error}")),
        }
    }
    Ok(())
}

/// Runs it; the number of crash images that were judged.
///
/// # Errors
/// What must not be.
pub fn run(config: &Config) -> Result<u64, String> {
    let env = Arc::new(SimEnv::new(config.seed));
    let (base, places) = prepare(config, &env)?;
    let mut rng = fastrand::Rng::with_seed(config.seed);
    let mut images = 0;
    for (block, place) in (0..).zip(places) {
        let disk = Arc::new(base.fork());
        disk.flip_bit(place + rng.u64(0..BLOCK), rng.u8(0..8));
        let store = open(&disk, &env)?;
        store.flush().map_err(|e| e.to_string())?;
        disk.arm(Faults { captures_at: (1..20).collect(), ..Faults::default() });
        let volume = store.volume("v").map_err(|e| e.to_string())?;
        let healed = volume.heal(block * BLOCK, &content(block)).map_err(|e| e.to_string())?;
        if healed != BLOCK {
            return Err(format!("{healed} bytes of block {block} are healed"));
        }
        let mut moments = disk.take_captures();
        moments.push(disk.fork());
        for moment in &moments {
            for image in 0..IMAGES {
                let mode = if image == 0 { CrashMode::Lost } else { CrashMode::random(&mut rng) };
                images += 1;
                count_image();
                judge(moment.crash_image(&mut rng, mode), &env, block)
                    .map_err(|e| format!("healing block {block} ({mode:?}): {e}"))?;
            }
        }
        // Who else reads the block reads it right; nobody can have it put back wrong.
        drop(volume);
        judge(disk.fork(), &env, u64::MAX)?;
        let spec = if block < BLOCKS { "v@s" } else { "v" };
        let volume = store.volume(spec).map_err(|e| e.to_string())?;
        let mut buf = [0; BLOCK as usize];
        volume.read_at(block * BLOCK, &mut buf).map_err(|e| e.to_string())?;
        if buf != content(block) {
            return Err(format!("block {block} of {spec} is healed and reads otherwise"));
        }
    }
    Ok(images)
}
