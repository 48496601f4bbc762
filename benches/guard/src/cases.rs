//! What is measured: requests of one kind on a store prepared for them.

use crate::connection::{Connection, HEADER_BYTES, header, reply_bytes};
use crate::memory::{Memory, Requests};
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, Store, Volume};
use dbs_server::nbd::wire::cmd;
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::sync::Arc;

/// Bytes of the device. What is not written takes no memory.
const DEVICE: u64 = 2 << 30;
/// Bytes of an extent.
const EXTENT: u64 = 1 << 20;
/// Bytes of the journal: requests in a row do not fill it.
const JOURNAL: u64 = 4 << 20;
/// Bytes of the volume, and of the one with many layers: each of them takes extents of its own.
const SIZE: u64 = 64 << 20;
const LAYERED_SIZE: u64 = 4 << 20;
const BLOCK: u64 = 4096;
/// Requests counted: of 4 KiB, each with a flush, of 1 MiB.
const SMALL: usize = 2000;
const FLUSHED: usize = 500;
const LARGE: usize = 64;
const SEED: u64 = 1;

/// All cases.
pub const ALL: &[Case] = &[
    Case { name: "read 4 KiB", prepare: || reads(1) },
    Case { name: "read 4 KiB at depth 256", prepare: || reads(256) },
    Case { name: "read 1 MiB", prepare: large_reads },
    Case { name: "overwrite 4 KiB", prepare: || writes(Content::Full) },
    Case { name: "overwrite 1 MiB", prepare: large_writes },
    Case { name: "first write 4 KiB", prepare: || writes(Content::None) },
    Case { name: "first write 4 KiB and flush", prepare: flushed_writes },
    Case { name: "write 4 KiB after a snapshot", prepare: || writes(Content::Snapshot) },
    Case { name: "flush of nothing", prepare: flushes },
];

/// A result whose error ends the case.
pub type Outcome<T> = Result<T, Box<dyn Error>>;

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
    /// Requests answered; one with its flush counts once.
    pub requests: u64,
    /// What they asked of the device.
    pub device: Requests,
}

impl Case {
    /// Prepares the store, then makes the requests.
    ///
    /// # Errors
    /// A request failed, or a reply is not as long as it must be.
    pub fn run(&self) -> Outcome<Ran> {
        let workload = (self.prepare)()?;
        let before = workload.device.requests();
        let bytes = measured(&workload)?;
        let device = workload.device.requests() - before;
        let expected = workload.reply_bytes;
        if bytes != expected {
            return Err(format!("the replies have {bytes} bytes, not {expected}").into());
        }
        Ok(Ran { requests: workload.requests, device })
    }
}

/// The function, known by its name, whose instructions are counted. Returns bytes of replies.
#[inline(never)]
fn measured(workload: &Workload) -> Outcome<u64> {
    let mut bytes = 0;
    for header in &workload.headers {
        bytes += workload.connection.request(header, &workload.payload)? as u64;
    }
    Ok(bytes)
}

/// Requests to make, and where.
struct Workload {
    device: Arc<Memory>,
    connection: Connection,
    requests: u64,
    headers: Vec<[u8; HEADER_BYTES]>,
    payload: Vec<u8>,
    /// What the replies must add up to.
    reply_bytes: u64,
}

/// What a volume holds before the requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    None,
    Full,
    Snapshot,
}

/// A store with one volume.
struct Prepared {
    device: Arc<Memory>,
    store: Store,
    volume: Volume,
}

impl Prepared {
    fn new(size: u64, content: Content) -> Outcome<Self> {
        let options = InitOptions {
            extent_size: EXTENT,
            journal_size: Some(JOURNAL),
            ..InitOptions::default()
        };
        let device = Memory::new(DEVICE).format(&options)?;
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

    /// So many requests, for which these headers are sent; `data` bytes in each reply.
    fn workload(
        self,
        requests: usize,
        headers: Vec<[u8; HEADER_BYTES]>,
        payload: u64,
        data: u64,
    ) -> Outcome<Workload> {
        Ok(Workload {
            connection: Connection::new(&self.store, "volume")?,
            device: self.device,
            requests: requests as u64,
            reply_bytes: headers.len() as u64 * reply_bytes(data),
            headers,
            payload: vec![2; payload as usize],
        })
    }
}

/// 4 KiB reads of blocks that hold data. Of `depth` layers, each has some blocks of each extent.
fn reads(depth: usize) -> Outcome<Workload> {
    let size = if depth > 1 { LAYERED_SIZE } else { SIZE };
    let prepared = Prepared::new(size, Content::Full)?;
    let mut rng = fastrand::Rng::with_seed(SEED);
    for layer in 1..depth {
        prepared.snapshot(layer)?;
        for extent in (0..size).step_by(EXTENT as usize) {
            let offset = extent + rng.u64(..EXTENT / BLOCK) * BLOCK;
            prepared.volume.write_at(offset, &[layer as u8; BLOCK as usize], false)?;
        }
    }
    // The first look at an extent walks the chain; it is remembered.
    for offset in (0..size).step_by(EXTENT as usize) {
        prepared.volume.read_at(offset, &mut [0; BLOCK as usize])?;
    }
    let offsets = (0..SMALL).map(|_| rng.u64(..size / BLOCK) * BLOCK);
    let headers = offsets.map(|offset| header(cmd::READ, offset, BLOCK)).collect();
    prepared.workload(SMALL, headers, 0, BLOCK)
}

/// 4 KiB writes, each of another block.
fn writes(content: Content) -> Outcome<Workload> {
    let headers = blocks(SMALL).map(|offset| header(cmd::WRITE, offset, BLOCK)).collect();
    Prepared::new(SIZE, content)?.workload(SMALL, headers, BLOCK, 0)
}

fn flushed_writes() -> Outcome<Workload> {
    let pair = |offset| [header(cmd::WRITE, offset, BLOCK), header(cmd::FLUSH, 0, 0)];
    let headers = blocks(FLUSHED).flat_map(pair).collect();
    Prepared::new(SIZE, Content::None)?.workload(FLUSHED, headers, BLOCK, 0)
}

/// 1 MiB reads that begin in one extent and mostly end in the next.
fn large_reads() -> Outcome<Workload> {
    let headers = large().map(|offset| header(cmd::READ, offset, EXTENT)).collect();
    Prepared::new(SIZE, Content::Full)?.workload(LARGE, headers, 0, EXTENT)
}

fn large_writes() -> Outcome<Workload> {
    let headers = large().map(|offset| header(cmd::WRITE, offset, EXTENT)).collect();
    Prepared::new(SIZE, Content::Full)?.workload(LARGE, headers, EXTENT, 0)
}

fn flushes() -> Outcome<Workload> {
    let headers = vec![header(cmd::FLUSH, 0, 0); SMALL];
    Prepared::new(SIZE, Content::Full)?.workload(SMALL, headers, 0, 0)
}

/// Offsets of different blocks, in an order drawn by lot.
fn blocks(count: usize) -> impl Iterator<Item = u64> {
    let mut blocks: Vec<u64> = (0..SIZE / BLOCK).collect();
    fastrand::Rng::with_seed(SEED).shuffle(&mut blocks);
    blocks.into_iter().take(count).map(|block| block * BLOCK)
}

fn large() -> impl Iterator<Item = u64> {
    let mut rng = fastrand::Rng::with_seed(SEED);
    (0..LARGE).map(move |_| rng.u64(..=(SIZE - EXTENT) / BLOCK) * BLOCK)
}
