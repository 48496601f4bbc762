//! What is measured: requests of one kind on a store prepared for them.

use crate::direct::Direct;
use crate::memory::{Memory, Requests};
use crate::served::Served;
use crate::{Outcome, Path, Request};
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, Store, Volume};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Bytes of the device. What is not written takes no memory.
const DEVICE: u64 = 2 << 30;
const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;
/// Bytes of a large request that a socket takes at once, with nobody at its other end.
const SOCKET: u64 = 64 << 10;
/// Bytes of an extent.
const EXTENT: u64 = MIB;
/// Bytes of the journal: requests in a row do not fill it.
const JOURNAL: u64 = 4 << 20;
/// Bytes of the volume, and of the one with many layers: each of them takes extents of its own.
const SIZE: u64 = 64 << 20;
const LAYERED_SIZE: u64 = 4 << 20;
/// Requests made: of 4 KiB, each with a flush, of more; and those before.
const SMALL: usize = 2000;
const FLUSHED: usize = 500;
const LARGE: usize = 64;
const WARM_UP: usize = 32;
const SEED: u64 = 1;

/// All cases: of the store alone, and of all that serves a request.
pub const ALL: &[Case] = &[
    Case { name: "read 4 KiB", prepare: || reads(1, Content::Full)?.direct() },
    Case { name: "read 4 KiB at depth 256", prepare: || reads(256, Content::Full)?.direct() },
    Case { name: "read 1 MiB", prepare: || large(MIB, Request::Read)?.direct() },
    Case { name: "overwrite 4 KiB", prepare: || writes(Content::Full)?.direct() },
    Case { name: "overwrite 1 MiB", prepare: || large(MIB, Request::Write)?.direct() },
    Case { name: "first write 4 KiB", prepare: || writes(Content::None)?.direct() },
    Case { name: "first write 4 KiB and flush", prepare: || flushed_writes()?.direct() },
    Case { name: "write 4 KiB after a snapshot", prepare: || writes(Content::Snapshot)?.direct() },
    Case { name: "read 4 KiB, no checksums", prepare: || reads(1, Content::Unchecked)?.direct() },
    Case {
        name: "overwrite 4 KiB, no checksums",
        prepare: || writes(Content::Unchecked)?.direct(),
    },
    Case { name: "flush of nothing", prepare: || flushes()?.direct() },
    Case { name: "NBD: read 4 KiB", prepare: || reads(1, Content::Full)?.served() },
    Case { name: "NBD: read 64 KiB", prepare: || large(SOCKET, Request::Read)?.served() },
    Case { name: "NBD: overwrite 4 KiB", prepare: || writes(Content::Full)?.served() },
    Case { name: "NBD: overwrite 64 KiB", prepare: || large(SOCKET, Request::Write)?.served() },
    Case { name: "NBD: first write 4 KiB", prepare: || writes(Content::None)?.served() },
    Case { name: "NBD: flush of nothing", prepare: || flushes()?.served() },
];

/// A kind of request.
#[derive(Clone, Copy)]
pub struct Case {
    /// Name in the baseline and in tables.
    pub name: &'static str,
    prepare: fn() -> Outcome<Workload>,
}

/// What a run of a case did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ran {
    /// Requests done; one with its flush counts once.
    pub requests: u64,
    /// What the store asked of the device, data that a server transfers itself aside.
    pub device: Requests,
}

impl Case {
    /// Whether a server's turns are part of it, as its name says.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.name.starts_with("NBD: ")
    }

    /// Prepares the store, then makes the first half of the requests or all of them. What both
    /// have in common cancels out.
    ///
    /// # Errors
    /// A request failed, or did not do what it should.
    pub fn run(&self, half: bool) -> Outcome<Ran> {
        let Workload { device, warm_up, mut requests, each, mut path } = (self.prepare)()?;
        requests.truncate(if half { requests.len() / 2 } else { requests.len() });
        warm_up.iter().try_for_each(|request| path.request(*request))?;
        let before = device.requests();
        measured(&mut *path, &requests)?;
        let device = device.requests() - before;
        // It has the kernel's attention, and that ends with the process.
        std::mem::forget(path);
        Ok(Ran { requests: (requests.len() / each) as u64, device })
    }
}

/// The function, known by its name, whose instructions are counted.
#[inline(never)]
fn measured(path: &mut dyn Path, requests: &[Request]) -> Outcome<()> {
    requests.iter().try_for_each(|request| path.request(*request))
}

/// Requests to make, and where.
struct Workload {
    device: Arc<Memory>,
    path: Box<dyn Path>,
    /// Made before, not counted: memory that is kept is allocated, layers are looked up.
    warm_up: Vec<Request>,
    requests: Vec<Request>,
    /// Requests that count as one.
    each: usize,
}

/// What a volume holds before the requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    None,
    Full,
    Snapshot,
    /// Full, in a store that keeps no checksums.
    Unchecked,
}

/// A store with one volume.
struct Prepared {
    device: Arc<Memory>,
    store: Store,
    volume: Volume,
}

/// A store, and the requests for it.
struct Planned {
    prepared: Prepared,
    length: u64,
    warm_up: Vec<Request>,
    requests: Vec<Request>,
    each: usize,
}

impl Prepared {
    fn new(size: u64, content: Content) -> Outcome<Self> {
        let options = InitOptions {
            extent_size: EXTENT,
            journal_size: Some(JOURNAL),
            checksums: content != Content::Unchecked,
            ..InitOptions::default()
        };
        let device = Memory::new(DEVICE)?.format(&options)?;
        let store = device.open(true)?;
        store.create_volume("volume", size)?;
        let volume = store.volume("volume")?;
        let prepared = Self { device, store, volume };
        if content != Content::None {
            let bytes = vec![1; EXTENT as usize];
            for offset in (0..size).step_by(EXTENT as usize) {
                prepared.volume.write_at(offset, &bytes, false)?;
            }
        }
        if content == Content::Snapshot {
            prepared.snapshot(0)?;
        }
        // What is recorded so far is not the requests' business.
        prepared.volume.flush()?;
        Ok(prepared)
    }

    fn snapshot(&self, number: usize) -> Outcome<()> {
        self.store.create_snapshot("volume", &number.to_string(), &SnapshotOptions::default())?;
        Ok(())
    }

    fn plan(self, length: u64, warm_up: Vec<Request>, requests: Vec<Request>) -> Planned {
        Planned { prepared: self, length, warm_up, requests, each: 1 }
    }
}

impl Planned {
    fn direct(self) -> Outcome<Workload> {
        let Prepared { device, volume, .. } = &self.prepared;
        let path = Direct::new(Arc::clone(device), volume.clone(), self.length);
        Ok(self.through(path))
    }

    fn served(self) -> Outcome<Workload> {
        let path = Served::new(&self.prepared.store, "volume", self.length)?;
        Ok(self.through(path))
    }

    fn through(self, path: impl Path + 'static) -> Workload {
        let Self { prepared, warm_up, requests, each, .. } = self;
        Workload { device: prepared.device, path: Box::new(path), warm_up, requests, each }
    }
}

/// 4 KiB reads of blocks that hold data. Of `depth` layers, each has a block of each extent.
fn reads(depth: usize, content: Content) -> Outcome<Planned> {
    let size = if depth > 1 { LAYERED_SIZE } else { SIZE };
    let prepared = Prepared::new(size, content)?;
    let mut rng = fastrand::Rng::with_seed(SEED);
    for layer in 1..depth {
        prepared.snapshot(layer)?;
        for extent in (0..size).step_by(EXTENT as usize) {
            let offset = extent + rng.u64(..EXTENT / BLOCK) * BLOCK;
            prepared.volume.write_at(offset, &[1; BLOCK as usize], false)?;
        }
    }
    let warm_up = (0..size).step_by(EXTENT as usize).map(Request::Read).collect();
    let requests = (0..SMALL).map(|_| Request::Read(rng.u64(..size / BLOCK) * BLOCK)).collect();
    Ok(prepared.plan(BLOCK, warm_up, requests))
}

/// 4 KiB writes, each of another block.
fn writes(content: Content) -> Outcome<Planned> {
    let mut requests = blocks().map(Request::Write);
    let warm_up = requests.by_ref().take(WARM_UP).collect();
    Ok(Prepared::new(SIZE, content)?.plan(BLOCK, warm_up, requests.take(SMALL).collect()))
}

fn flushed_writes() -> Outcome<Planned> {
    let mut pairs = blocks().map(|offset| [Request::Write(offset), Request::Flush]);
    let warm_up = pairs.by_ref().take(WARM_UP).flatten().collect();
    let requests = pairs.take(FLUSHED).flatten().collect();
    let planned = Prepared::new(SIZE, Content::None)?.plan(BLOCK, warm_up, requests);
    Ok(Planned { each: 2, ..planned })
}

fn flushes() -> Outcome<Planned> {
    let prepared = Prepared::new(SIZE, Content::Full)?;
    Ok(prepared.plan(BLOCK, vec![Request::Flush; WARM_UP], vec![Request::Flush; SMALL]))
}

/// Requests of more than a block, some of which begin in one extent and end in the next.
fn large(length: u64, request: fn(u64) -> Request) -> Outcome<Planned> {
    let mut rng = fastrand::Rng::with_seed(SEED);
    let mut next = || request(rng.u64(..=(SIZE - length) / BLOCK) * BLOCK);
    let [warm_up, requests] = [WARM_UP, LARGE].map(|count| (0..count).map(|_| next()).collect());
    Ok(Prepared::new(SIZE, Content::Full)?.plan(length, warm_up, requests))
}

/// Offsets of all blocks, in an order drawn by lot.
fn blocks() -> impl Iterator<Item = u64> {
    let mut blocks: Vec<u64> = (0..SIZE / BLOCK).collect();
    fastrand::Rng::with_seed(SEED).shuffle(&mut blocks);
    blocks.into_iter().map(|block| block * BLOCK)
}
