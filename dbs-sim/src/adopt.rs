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
const SNAPSHOTS: u8 = 19;
const BLOCK: u64 = 4096;
const BLOCKS: u64 = SNAPSHOTS as u64 + 2;
/// Crash images of each moment.
const IMAGES: u64 = 12;
/// Identity of the file below the snapshots.
const LOWEST: &str = "the file below";
/// Changes after which it is taken to have no end.
const CHANGES_MAX: u64 = 500;

/// What the second volume rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Below {
    /// Nothing.
    Zeros,
    /// Another file, which is as long as the volume.
    File,
}

/// A file that has what the newest of the snapshots shows; and the one below these snapshots.
enum File {
    Newest(Below),
    Lowest,
}

impl Backing for File {
    fn identity(&self) -> &str {
        match self {
            Self::Newest(_) => "the file",
            Self::Lowest => LOWEST,
        }
    }

    fn name(&self) -> String {
        self.identity().to_owned()
    }

    fn size(&self) -> u64 {
        BLOCKS * BLOCK
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        for (at, sector) in (offset / 512..).zip(buf.chunks_mut(512)) {
            let block = at * 512 / BLOCK;
            sector.fill(match self {
                Self::Newest(below) => shown(SNAPSHOTS, block, *below),
                Self::Lowest => lowest(block),
            });
        }
        Ok(())
    }
}

/// What the file below has in block `at`.
fn lowest(at: u64) -> u8 {
    0x40 + at as u8
}

/// What block `at` of the snapshot with this number shows: each holds the first block, and one of its own.
fn shown(snapshot: u8, at: u64, below: Below) -> u8 {
    match at {
        0 => snapshot,
        own if own <= u64::from(snapshot) => own as u8,
        _ if below == Below::File => lowest(at),
        _ => 0,
    }
}

fn name(index: u8) -> String {
    format!("n{index}")
}

fn text(error: dbs_core::Error) -> String {
    error.to_string()
}

/// The store, and the files that it was given.
type Opened = (Store, [Arc<dyn Backing>; 2]);

fn open(disk: &Arc<SimDisk>, env: &Arc<SimEnv>, below: Below) -> Result<Opened, String> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    let store = Store::open_on(storage, None, Arc::clone(env) as _, false).map_err(text)?;
    let files =
        [File::Newest(below), File::Lowest].map(|file| store.attach_backing(Arc::new(file)));
    Ok((store, files))
}

/// The volume `v` on the file, with a snapshot and a block of its own, and the snapshots of `w`.
fn prepare(config: &Config, env: &Arc<SimEnv>, below: Below) -> Result<SimDisk, String> {
    let size = config.init.size.unwrap_or(4 << 20);
    let disk = Arc::new(SimDisk::new(Medium::file(size), config.seed));
    Store::init_on(&*disk, &config.init, &**env).map_err(text)?;
    let (store, [file, lowest]) = open(&disk, env, below)?;
    disk.set_atomic_from(store.info().metadata);
    let options = SnapshotOptions::default();
    store.create_backed("v", BLOCKS * BLOCK, &file).map_err(text)?;
    store.create_snapshot("v", "own", &options).map_err(text)?;
    let block = [0xff; BLOCK as usize];
    store.volume("v").and_then(|v| v.write_at((BLOCKS - 1) * BLOCK, &block, true)).map_err(text)?;
    match below {
        Below::Zeros => store.create_volume("w", BLOCKS * BLOCK),
        Below::File => store.create_backed("w", BLOCKS * BLOCK, &lowest),
    }
    .map_err(text)?;
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
fn check_own(store: &Store, below: Below) -> Result<(), String> {
    let file = |at| shown(SNAPSHOTS, at, below);
    check(store, "v@own", file)?;
    check(store, "v", |at| if at == BLOCKS - 1 { 0xff } else { file(at) })
}

/// It is done: all but the newest are the volume's, and it needs no file but the one below them.
fn check_done(store: &Store, below: Below) -> Result<(), String> {
    check_own(store, below)?;
    (1..SNAPSHOTS).try_for_each(|index| {
        check(store, &format!("v@{}", name(index)), |at| shown(index, at, below))
    })?;
    let left: Vec<_> = store.volumes(false).into_iter().map(|volume| volume.name).collect();
    let file = store.backing("v").map_err(text)?.map(|file| file.identity);
    let needed = (below == Below::File).then_some(LOWEST);
    if file.as_deref() != needed || left != ["v"] {
        return Err(format!("there are {left:?}, on {file:?}"));
    }
    verify::check(store)
}

/// What a crash may leave, and that it can be ended; how far it was.
fn judge(disk: SimDisk, env: &Arc<SimEnv>, below: Below) -> Result<Left, String> {
    let disk = Arc::new(disk);
    let (store, _files) = open(&disk, env, below)?;
    verify::check(&store)?;
    check_own(&store, below)?;
    let left = match store.snapshots("w", false) {
        Err(_) => Left::Done,
        Ok(_) if is_on_file(&store)? => Left::OnFile,
        Ok(_) => Left::Between,
    };
    if left != Left::Done {
        store.adopt("v", "w").map_err(|e| format!("once more: {e}"))?;
    }
    check_done(&store, below)?;
    while store.work(16).map_err(text)?.remaining > 0 {}
    check_done(&store, below)?;
    Ok(left)
}

fn is_on_file(store: &Store) -> Result<bool, String> {
    let file = store.backing("v").map_err(text)?;
    Ok(file.is_some_and(|file| file.identity != LOWEST))
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
pub fn run(config: &Config, below: Below) -> Result<[u64; 3], String> {
    let env = Arc::new(SimEnv::new(config.seed));
    let base = prepare(config, &env, below)?;
    let mut rng = fastrand::Rng::with_seed(config.seed);
    let mut images = [0; 3];
    for at in 1..CHANGES_MAX {
        let disk = Arc::new(base.fork());
        let (store, files) = open(&disk, &env, below)?;
        disk.arm(Faults { stop_at: Some(at), ..Faults::default() });
        let result = store.adopt("v", "w");
        if !disk.stopped() {
            result.map_err(text)?;
            check_done(&store, below)?;
            return Ok(images);
        }
        drop((store, files));
        disk.revive();
        for image in 0..IMAGES {
            let mode = if image == 0 { CrashMode::Kept } else { CrashMode::random(&mut rng) };
            count_image();
            let left = judge(disk.crash_image(&mut rng, mode), &env, below)
                .map_err(|e| format!("cut off at change {at} ({mode:?}): {e}"))?;
            images[left as usize] += 1;
        }
    }
    Err(format!("it makes more than {CHANGES_MAX} changes"))
}
