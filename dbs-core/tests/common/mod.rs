//! Storage in memory for the tests of the format: cheap to copy, changed byte by byte, with a log
//! of what is written and a hook in each flush.
#![allow(dead_code, reason = "each test file uses its part")]

use dbs_core::io::{ReadRequest, Storage, TailMemory, WriteRequest};
use dbs_core::store::{Env, SnapshotOptions};
use dbs_core::{InitOptions, Store};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub const BLOCK: usize = 4096;

/// What reached the storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Write(u64, usize),
    Flush,
}

type Hook = Box<dyn FnMut() + Send>;

#[derive(Default)]
struct Changes {
    blocks: HashMap<u64, Box<[u8; BLOCK]>>,
    size: u64,
    events: Vec<Event>,
}

/// Storage in memory: a shared image, and blocks that differ from it.
pub struct Mem {
    base: Arc<Vec<u8>>,
    changes: Mutex<Changes>,
    hook: Mutex<Option<Hook>>,
    read_hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    discard_hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Blocks that cannot be read until they are written.
    bad: Mutex<BTreeSet<u64>>,
    /// Blocks that cannot be written.
    refused: Mutex<BTreeMap<u64, i32>>,
    /// No storage can be reserved.
    no_room: AtomicBool,
}

impl Mem {
    pub fn new(size: u64) -> Self {
        Self::from_bytes(vec![0; size as usize])
    }

    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        let changes = Changes { size: bytes.len() as u64, ..Changes::default() };
        Self {
            base: Arc::new(bytes),
            changes: changes.into(),
            hook: None.into(),
            read_hook: None.into(),
            discard_hook: None.into(),
            bad: Mutex::default(),
            refused: Mutex::default(),
            no_room: AtomicBool::default(),
        }
    }

    /// All bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.size_bytes() as usize];
        self.read_at(0, &mut bytes).unwrap();
        bytes
    }

    /// A copy that shares the image; for many copies, take them of [`Mem::bytes`] once.
    pub fn fork(&self) -> Self {
        if self.changes.lock().unwrap().blocks.is_empty() {
            let changes = Changes { size: self.size_bytes(), ..Changes::default() };
            return Self {
                base: Arc::clone(&self.base),
                changes: changes.into(),
                hook: None.into(),
                read_hook: None.into(),
                discard_hook: None.into(),
                bad: Mutex::default(),
                refused: Mutex::default(),
                no_room: AtomicBool::default(),
            };
        }
        Self::from_bytes(self.bytes())
    }

    pub fn put(&self, offset: u64, bytes: &[u8]) {
        let mut changes = self.changes.lock().unwrap();
        for (at, byte) in (offset..).zip(bytes) {
            self.block(&mut changes, at / BLOCK as u64)[at as usize % BLOCK] = *byte;
        }
    }

    pub fn flip(&self, offset: u64, mask: u8) {
        let mut changes = self.changes.lock().unwrap();
        self.block(&mut changes, offset / BLOCK as u64)[offset as usize % BLOCK] ^= mask;
    }

    /// What was written since the last call.
    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.changes.lock().unwrap().events)
    }

    /// What was done last, if that was not taken.
    pub fn last_event(&self) -> Option<Event> {
        self.changes.lock().unwrap().events.last().cloned()
    }

    /// Calls this in every flush, before anything else.
    pub fn on_flush(&self, hook: impl FnMut() + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// Calls this in the next read, before anything else.
    pub fn on_read(&self, hook: impl FnOnce() + Send + 'static) {
        *self.read_hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// Calls this in the next discard, before anything else.
    pub fn on_discard(&self, hook: impl FnOnce() + Send + 'static) {
        *self.discard_hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// From now on the block at `offset` cannot be read, until it is written.
    pub fn spoil(&self, offset: u64) {
        self.bad.lock().unwrap().insert(offset / BLOCK as u64);
    }

    /// From now on the block at `offset` cannot be written.
    pub fn refuse(&self, offset: u64) {
        self.refuse_with(offset, libc::EIO);
    }

    /// As [`Mem::refuse`], with another error.
    pub fn refuse_with(&self, offset: u64, errno: i32) {
        self.refused.lock().unwrap().insert(offset / BLOCK as u64, errno);
    }

    /// From now on no storage can be reserved: that fails as a device does.
    pub fn refuse_room(&self) {
        self.no_room.store(true, Ordering::Relaxed);
    }

    /// All blocks can be read and written: what could not was not of the medium.
    pub fn recover(&self) {
        self.no_room.store(false, Ordering::Relaxed);
        self.bad.lock().unwrap().clear();
        self.refused.lock().unwrap().clear();
    }

    /// Blocks that cannot be read.
    pub fn bad(&self) -> usize {
        self.bad.lock().unwrap().len()
    }

    fn block<'a>(&self, changes: &'a mut Changes, block: u64) -> &'a mut [u8; BLOCK] {
        changes.blocks.entry(block).or_insert_with(|| {
            let mut bytes = Box::new([0; BLOCK]);
            let start = (block as usize * BLOCK).min(self.base.len());
            let end = (start + BLOCK).min(self.base.len());
            bytes[..end - start].copy_from_slice(&self.base[start..end]);
            bytes
        })
    }
}

/// Blocks that some bytes at `offset` lie in.
fn blocks(offset: u64, bytes: &[u8]) -> std::ops::Range<u64> {
    offset / BLOCK as u64..(offset + bytes.len() as u64).div_ceil(BLOCK as u64)
}

impl Storage for Mem {
    fn size_bytes(&self) -> u64 {
        self.changes.lock().unwrap().size
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        // Not held while it runs: it may read.
        let hook = self.read_hook.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        let changes = self.changes.lock().unwrap();
        for request in requests {
            let end = request.offset.checked_add(request.buf.len() as u64);
            if end.is_none_or(|end| end > changes.size) {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "behind the end"));
            }
            if self.bad.lock().unwrap().range(blocks(request.offset, request.buf)).next().is_some()
            {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            let mut at = request.offset as usize;
            let mut rest = &mut *request.buf;
            while !rest.is_empty() {
                let skip = at % BLOCK;
                let (part, after) = rest.split_at_mut(rest.len().min(BLOCK - skip));
                match changes.blocks.get(&((at / BLOCK) as u64)) {
                    Some(block) => part.copy_from_slice(&block[skip..skip + part.len()]),
                    None => {
                        part.fill(0);
                        let known = self.base.get(at..).unwrap_or_default();
                        let count = known.len().min(part.len());
                        part[..count].copy_from_slice(&known[..count]);
                    }
                }
                at += part.len();
                rest = after;
            }
        }
        Ok(())
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        let mut changes = self.changes.lock().unwrap();
        for request in requests {
            if request.offset + request.buf.len() as u64 > changes.size {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "behind the end"));
            }
            let written = blocks(request.offset, request.buf);
            if let Some((_, errno)) = self.refused.lock().unwrap().range(written).next() {
                return Err(io::Error::from_raw_os_error(*errno));
            }
            changes.events.push(Event::Write(request.offset, request.buf.len()));
            let written = blocks(request.offset, request.buf);
            self.bad.lock().unwrap().retain(|block| !written.contains(block));
            let mut at = request.offset as usize;
            let mut rest = request.buf;
            while !rest.is_empty() {
                let skip = at % BLOCK;
                let (part, after) = rest.split_at(rest.len().min(BLOCK - skip));
                let block = self.block(&mut changes, (at / BLOCK) as u64);
                block[skip..skip + part.len()].copy_from_slice(part);
                at += part.len();
                rest = after;
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let hook = self.hook.lock().unwrap().take();
        if let Some(mut hook) = hook {
            hook();
            self.hook.lock().unwrap().get_or_insert(hook);
        }
        self.changes.lock().unwrap().events.push(Event::Flush);
        Ok(())
    }

    fn discard(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        let hook = self.discard_hook.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        Ok(())
    }

    fn allocate(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        let refused = self.no_room.load(Ordering::Relaxed);
        if refused { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.changes.lock().unwrap().size = size_bytes;
        Ok(())
    }

    fn driver(&self) -> &'static str {
        "memory"
    }
}

/// Time and identities that repeat themselves.
pub struct FixedEnv(AtomicU64);

impl FixedEnv {
    pub fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed << 20))
    }
}

impl Env for FixedEnv {
    fn now_ns(&self) -> u64 {
        1_700_000_000_000_000_000 + self.0.fetch_add(1, Ordering::Relaxed) * 1_000_000
    }

    fn random(&self) -> [u8; 16] {
        let seed = self.0.fetch_add(1, Ordering::Relaxed);
        fastrand::Rng::with_seed(seed).u128(..).to_le_bytes()
    }

    fn secret(&self, bytes: &mut [u8]) -> dbs_core::Result<()> {
        fastrand::Rng::with_seed(self.0.fetch_add(1, Ordering::Relaxed)).fill(bytes);
        Ok(())
    }

    fn boot_id(&self) -> [u8; 16] {
        [7; 16]
    }
}

/// A tail that is gone with its store.
pub struct MemTail(pub Vec<u8>);

impl MemTail {
    pub fn boxed() -> Box<dyn TailMemory> {
        Box::new(Self(vec![0; dbs_core::limits::TAIL_BYTES]))
    }
}

impl TailMemory for MemTail {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn remove(&mut self) {}
}

pub const SIZE: u64 = 4 << 20;

/// The smallest store there is: 64 KiB extents, tiny tables.
pub fn options() -> InitOptions {
    InitOptions {
        extent_size: 64 << 10,
        max_volumes: Some(4),
        max_snapshots: Some(16),
        journal_size: Some(128 << 10),
        max_size: Some(2 * SIZE),
        ..InitOptions::default()
    }
}

pub fn init(seed: u64) -> Arc<Mem> {
    init_with(seed, &options())
}

/// A store without checksums of data.
pub fn init_unchecked(seed: u64) -> Arc<Mem> {
    init_with(seed, &InitOptions { checksums: false, ..options() })
}

fn init_with(seed: u64, options: &InitOptions) -> Arc<Mem> {
    let disk = Mem::new(SIZE);
    Store::init_on(&disk, options, &FixedEnv::new(seed)).unwrap();
    Arc::new(disk)
}

pub fn open(disk: &Arc<Mem>, seed: u64, read_only: bool) -> dbs_core::Result<Store> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    Store::open_on(storage, None, Arc::new(FixedEnv::new(seed)), read_only)
}

/// Bytes that follow from a seed and are nowhere zero for long.
pub fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8 ^ seed)).collect()
}

/// A store with something of everything: volumes, snapshots, a side branch, a clone, a hidden
/// snapshot, zero runs, zero-only layers, labels.
pub fn fill(store: &Store) {
    let system = SnapshotOptions {
        labels: [("kind", "nightly"), ("größe", "klein")].map(|(k, v)| (k.into(), v.into())).into(),
        system: true,
        ..Default::default()
    };
    store.create_volume("alpha", 384 << 10).unwrap();
    let alpha = store.volume("alpha").unwrap();
    alpha.write_at(0, &pattern(1, 150 << 10), false).unwrap();
    store.create_snapshot("alpha", "one", &SnapshotOptions::default()).unwrap();
    alpha.write_at(4096, &pattern(2, 8192), false).unwrap();
    alpha.discard(64 << 10, 64 << 10).unwrap();
    alpha.discard(8 << 10, 4 << 10).unwrap();
    alpha.write_at(200 << 10, &pattern(3, 512), true).unwrap();
    store.create_snapshot("alpha", "two", &system).unwrap();
    store.set_protected("alpha", "two", true).unwrap();
    store.clone_volume("alpha", "one", "copy").unwrap();
    let copy = store.volume("copy").unwrap();
    copy.write_at(130 << 10, &pattern(4, 30 << 10), false).unwrap();
    copy.discard(0, 4096).unwrap();
    store.create_snapshot("copy", "x", &SnapshotOptions::default()).unwrap();
    copy.write_zeroes(128 << 10, 128 << 10, false).unwrap();
    alpha.write_at(300 << 10, &pattern(5, 20 << 10), false).unwrap();
    // Hidden: both the head of `alpha` and its side branch build on it.
    store.create_snapshot("alpha", "three", &SnapshotOptions::default()).unwrap();
    store.rollback("alpha", "two").unwrap();
    alpha.write_at(0, &pattern(6, 512), false).unwrap();
    store.create_volume("beta", 4096 * 3 + 512).unwrap();
    store.volume("beta").unwrap().write_at(512, &pattern(7, 12 << 10), true).unwrap();
    store.delete_snapshot("alpha", "one").unwrap();
}

/// Background work, to its end.
pub fn finish_work(store: &Store) {
    let ends = (0..100_000).any(|_| store.work(16).unwrap().remaining == 0);
    assert!(ends, "background work does not end");
}

/// All volumes and snapshots.
pub fn specs(store: &Store) -> Vec<String> {
    let mut specs = Vec::new();
    for volume in store.volumes(false) {
        let snapshots = store.snapshots(&volume.name, false).unwrap();
        specs.extend(snapshots.iter().map(|s| format!("{}@{}", volume.name, s.name)));
        specs.push(volume.name);
    }
    specs
}

/// Contents of all volumes and snapshots, by spec.
pub fn contents(store: &Store) -> BTreeMap<String, Vec<u8>> {
    let read = |spec: String| {
        let open = store.volume(&spec).unwrap();
        let mut bytes = vec![0xaa; open.size() as usize];
        open.read_at(0, &mut bytes).unwrap();
        (spec, bytes)
    };
    specs(store).into_iter().map(read).collect()
}

/// All metadata as text.
/// A dump without its checksum, as one that somebody changes.
pub fn unsummed(dump: &str) -> String {
    let end = dump.rfind(",\n  \"crc32c\"").unwrap();
    format!("{}\n}}\n", &dump[..end])
}

pub fn dump(store: &Store) -> String {
    let mut out = Vec::new();
    store.dump(&mut out).unwrap();
    String::from_utf8(out).unwrap()
}
