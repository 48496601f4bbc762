//! A tree too large for one commit group, turned around, with the process or the power lost at each
//! change of the disk: whatever is left must open, and doing it again must put it right.

use crate::disk::{CrashMode, Faults, Medium, SimDisk};
use crate::env::SimEnv;
use crate::machine::Config;
use crate::step::count_image;
use crate::verify;
use dbs_core::Store;
use dbs_core::io::Storage;
use dbs_core::store::{Link, SnapshotOptions};
use std::sync::Arc;

/// Snapshots: more than a group of the smallest journal takes.
const SNAPSHOTS: usize = 20;
const BLOCK: u64 = 4096;
/// Crash images of each moment.
const IMAGES: u64 = 6;
/// Changes after which it is taken to have no end.
const CHANGES_MAX: u64 = 500;

fn name(index: usize) -> String {
    format!("n{index}")
}

/// The chain of all snapshots, the first one at the bottom or on top. The top comes first, so that
/// each would point at one that still points back if the old parents were not gone.
fn chain(turned: bool) -> (Vec<Link>, String) {
    let place = |i: usize| name(if turned { SNAPSHOTS - 1 - i } else { i });
    let link = |i: usize| Link {
        snapshot: place(i),
        parent: i.checked_sub(1).map(place),
        created_ns: 1,
        ..Link::default()
    };
    ((0..SNAPSHOTS).rev().map(link).collect(), place(SNAPSHOTS - 1))
}

fn open(disk: &Arc<SimDisk>, env: &Arc<SimEnv>) -> Result<Store, String> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    Store::open_on(storage, None, Arc::clone(env) as _, false).map_err(|e| format!("open: {e}"))
}

fn relink(store: &Store, turned: bool) -> dbs_core::Result<()> {
    let (links, top) = chain(turned);
    store.relink("v", &links, Some(&top))
}

/// Every layer holds one block of its own, and the first block.
fn prepare(config: &Config, env: &Arc<SimEnv>) -> Result<SimDisk, String> {
    let failed = |e: dbs_core::Error| format!("preparing: {e}");
    let size = config.init.size.unwrap_or(4 << 20);
    let disk = Arc::new(SimDisk::new(Medium::file(size), config.seed));
    Store::init_on(&*disk, &config.init, &**env).map_err(failed)?;
    let store = open(&disk, env)?;
    disk.set_atomic_from(store.info().metadata);
    let bytes = (SNAPSHOTS as u64 + 1) * BLOCK;
    store.create_volume("v", bytes).map_err(failed)?;
    store.set_rebuilding("v", true).map_err(failed)?;
    for index in 0..SNAPSHOTS {
        let options = SnapshotOptions::default();
        store.insert_snapshot("v", &name(index), bytes, &options).map_err(failed)?;
        let layer = store.layer("v", Some(&name(index))).map_err(failed)?;
        let block = [index as u8 + 1; BLOCK as usize];
        for at in [0, index as u64 + 1] {
            layer.write_at(at * BLOCK, &block).map_err(failed)?;
        }
    }
    relink(&store, false).map_err(failed)?;
    store.close().map_err(failed)?;
    Ok(disk.fork())
}

/// Whether the head shows the chain as it is, or turned.
fn shows(store: &Store, turned: bool) -> Result<(), String> {
    let mut buf = vec![0; (SNAPSHOTS + 1) * BLOCK as usize];
    let volume = store.volume("v").map_err(|e| e.to_string())?;
    volume.read_at(0, &mut buf).map_err(|e| e.to_string())?;
    let top = if turned { 1 } else { SNAPSHOTS as u8 };
    let wanted = std::iter::once(top).chain(1..=SNAPSHOTS as u8);
    for (index, (block, byte)) in buf.chunks_exact(BLOCK as usize).zip(wanted).enumerate() {
        if block.iter().any(|found| *found != byte) {
            return Err(format!("block {index} shows {}, not {byte}", block[0]));
        }
    }
    Ok(())
}

/// What a crash may leave, and that it can be put right.
fn judge(disk: SimDisk, env: &Arc<SimEnv>) -> Result<(), String> {
    let disk = Arc::new(disk);
    let store = open(&disk, env)?;
    verify::check(&store)?;
    let info = store.volume_info("v").map_err(|e| e.to_string())?;
    if !info.rebuilding || info.snapshots != SNAPSHOTS as u64 {
        return Err(format!("the volume is {info:?}"));
    }
    // Something remembered of the old tree must not survive.
    let mut buf = vec![0; BLOCK as usize];
    let head = store.volume("v").map_err(|e| e.to_string())?;
    head.read_at(0, &mut buf).map_err(|e| e.to_string())?;
    relink(&store, true).map_err(|e| format!("once more: {e}"))?;
    shows(&store, true)?;
    verify::check(&store)
}

/// Runs it; the number of crash images that were judged.
///
/// # Errors
/// What must not be.
pub fn run(config: &Config) -> Result<u64, String> {
    let env = Arc::new(SimEnv::new(config.seed));
    let base = prepare(config, &env)?;
    let mut rng = fastrand::Rng::with_seed(config.seed);
    let mut images = 0;
    for at in 1..CHANGES_MAX {
        let disk = Arc::new(base.fork());
        let store = open(&disk, &env)?;
        disk.arm(Faults { stop_at: Some(at), ..Faults::default() });
        let result = relink(&store, true);
        if !disk.stopped() {
            result.map_err(|e| format!("relink: {e}"))?;
            shows(&store, true)?;
            return Ok(images);
        }
        drop(store);
        disk.revive();
        for image in 0..IMAGES {
            let mode = if image == 0 { CrashMode::Kept } else { CrashMode::random(&mut rng) };
            images += 1;
            count_image();
            judge(disk.crash_image(&mut rng, mode), &env)
                .map_err(|e| format!("cut off at change {at} ({mode:?}): {e}"))?;
        }
    }
    Err(format!("it makes more than {CHANGES_MAX} changes"))
}
