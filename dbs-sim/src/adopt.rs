//! A volume on a file that takes the snapshots of another in its place, more than one commit group takes, with the process or
//! the power lost at each change of the disk: whatever is left must open and show the same, and doing it again must end it.

use crate::disk::{CrashMode, Faults, Medium, SimDisk};
use crate::env::SimEnv;
use crate::machine::Config;
use crate::step::count_image;
use crate::verify;
use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::{Backing, Store};
use std::io;
use std::sync::Arc;

/// Snapshots: more than a group of the smallest journal takes.
const SNAPSHOTS: u8 = 20;
const BLOCK: u64 = 4096;
const BLOCKS: u64 = SNAPSHOTS as u64 + 2;
/// Crash images of each moment.
const IMAGES: u64 = 6;
/// Changes after which it is taken to have no end.
const CHANGES_MAX: u64 = 500;

/// A file that has what the newest of the snapshots shows.
struct File;

impl Backing for File {
    fn identity(&self) -> &str {
        "the file"
    }

    fn name(&self) -> String {
        self.identity().to_owned()
    }

    fn size(&self) -> u64 {
        BLOCKS * BLOCK
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        for (at, sector) in (offset / 512..).zip(buf.chunks_mut(512)) {
            sector.fill(shown(SNAPSHOTS, at * 512 / BLOCK));
        }
        Ok(())
    }
}

/// What block `at` of the snapshot with this number shows: each holds the first block, and one of its own.
fn shown(snapshot: u8, at: u64) -> u8 {
    match at {
        0 => snapshot,
        own if own <= u64::from(snapshot) => own as u8,
        _ => 0,
    }
}

fn name(index: u8) -> String {
    format!("n{index}")
}

fn text(error: dbs_core::Error) -> String {
    error.to_string()
}

fn open(disk: &Arc<SimDisk>, env: &Arc<SimEnv>) -> Result<(Store, Arc<dyn Backing>), String> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    let store = Store::open_on(storage, None, Arc::clone(env) as _, false).map_err(text)?;
    let file = store.attach_backing(Arc::new(File));
    Ok((store, file))
}

/// The volume `v` on the file, with a snapshot and a block of its own, and the snapshots of `w`.
fn prepare(config: &Config, env: &Arc<SimEnv>) -> Result<SimDisk, String> {
    let size = config.init.size.unwrap_or(4 << 20);
    let disk = Arc::new(SimDisk::new(Medium::file(size), config.seed));
    Store::init_on(&*disk, &config.init, &**env).map_err(text)?;
    let (store, file) = open(&disk, env)?;
    disk.set_atomic_from(store.info().metadata);
    let options = SnapshotOptions::default();
    store.create_backed("v", BLOCKS * BLOCK, &file).map_err(text)?;
    store.create_snapshot("v", "own", &options).map_err(text)?;
    let block = [0xff; BLOCK as usize];
    store.volume("v").and_then(|v| v.write_at((BLOCKS - 1) * BLOCK, &block, true)).map_err(text)?;
    store.create_volume("w", BLOCKS * BLOCK).map_err(text)?;
    for index in 1..=SNAPSHOTS {
        let volume = store.volume("w").map_err(text)?;
        for at in [0, u64::from(index)] {
            volume.write_at(at * BLOCK, &[index; BLOCK as usize], false).map_err(text)?;
        }
        store.create_snapshot("w", &name(index), &options).map_err(text)?;
    }
    store.close().map_err(text)?;
    Ok(disk.fork())
}

fn check(store: &Store, spec: &str, wanted: impl Fn(u64) -> u8) -> Result<(), String> {
    let mut buf = vec![0; (BLOCKS * BLOCK) as usize];
    store.volume(spec).and_then(|volume| volume.read_at(0, &mut buf)).map_err(text)?;
    for (at, block) in (0..).zip(buf.chunks_exact(BLOCK as usize)) {
        if block.iter().any(|found| *found != wanted(at)) {
            return Err(format!("block {at} of {spec} is {}, not {}", block[0], wanted(at)));
        }
    }
    Ok(())
}

/// Whatever has come of it, the volume is as it was.
fn check_own(store: &Store) -> Result<(), String> {
    let file = |at| shown(SNAPSHOTS, at);
    check(store, "v@own", file)?;
    check(store, "v", |at| if at == BLOCKS - 1 { 0xff } else { file(at) })
}

/// It is done: all but the newest are the volume's, and it needs no file.
fn check_done(store: &Store) -> Result<(), String> {
    check_own(store)?;
    (1..SNAPSHOTS)
        .try_for_each(|index| check(store, &format!("v@{}", name(index)), |at| shown(index, at)))?;
    let left: Vec<_> = store.volumes(false).into_iter().map(|volume| volume.name).collect();
    match store.backing("v").map_err(text)? {
        None if left == ["v"] => verify::check(store),
        file => Err(format!("there are {left:?}, on {file:?}")),
    }
}

/// What a crash may leave, and that it can be ended; how far it was.
fn judge(disk: SimDisk, env: &Arc<SimEnv>) -> Result<Left, String> {
    let disk = Arc::new(disk);
    let (store, _file) = open(&disk, env)?;
    verify::check(&store)?;
    check_own(&store)?;
    let left = match store.snapshots("w", false) {
        Err(_) => Left::Done,
        Ok(_) if store.backing("v").map_err(text)?.is_some() => Left::OnFile,
        Ok(_) => Left::Between,
    };
    if left != Left::Done {
        store.adopt("v", "w").map_err(|e| format!("once more: {e}"))?;
    }
    check_done(&store)?;
    while store.work(16).map_err(text)?.remaining > 0 {}
    check_done(&store)?;
    Ok(left)
}

/// How far it was when it was cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    OnFile,
    Between,
    Done,
}

/// Runs it; the numbers of crash images that were judged: the volume on its file, between, and done.
///
/// # Errors
/// What must not be.
pub fn run(config: &Config) -> Result<[u64; 3], String> {
    let env = Arc::new(SimEnv::new(config.seed));
    let base = prepare(config, &env)?;
    let mut rng = fastrand::Rng::with_seed(config.seed);
    let mut images = [0; 3];
    for at in 1..CHANGES_MAX {
        let disk = Arc::new(base.fork());
        let (store, file) = open(&disk, &env)?;
        disk.arm(Faults { stop_at: Some(at), ..Faults::default() });
        let result = store.adopt("v", "w");
        if !disk.stopped() {
            result.map_err(text)?;
            check_done(&store)?;
            return Ok(images);
        }
        drop((store, file));
        disk.revive();
        for image in 0..IMAGES {
            let mode = if image == 0 { CrashMode::Kept } else { CrashMode::random(&mut rng) };
            count_image();
            let left = judge(disk.crash_image(&mut rng, mode), &env)
                .map_err(|e| format!("cut off at change {at} ({mode:?}): {e}"))?;
            images[left as usize] += 1;
        }
    }
    Err(format!("it makes more than {CHANGES_MAX} changes"))
}
