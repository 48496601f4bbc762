//! Small stores with something of everything, that inputs damage.

use crate::disk::Disk;
use dbs_core::format::crc::crc32c_append;
use dbs_core::format::{Geometry, Record, RegionKind, Superblock, journal};
use dbs_core::info::Labels;
use dbs_core::io::{Storage, TailMemory};
use dbs_core::store::{Env, SnapshotOptions};
use dbs_core::{InitOptions, Result, Store};
use dbs_sim::TailPlace;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Size of the device.
pub(crate) const SIZE: u64 = 4 << 20;
/// Size of tails: less than real ones have, which cost more than all else that an input does.
pub(crate) const TAIL: usize = 64 << 10;
/// As much of each volume is compared.
pub(crate) const CONTENT_MAX_BYTES: u64 = 1 << 20;

/// How the sample's last process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// In good order.
    Closed,
    /// Killed: its last records are in the journal and in the tail.
    Killed,
}

/// A sample.
pub(crate) struct Sample {
    pub bytes: Arc<Vec<u8>>,
    pub tail: Vec<u8>,
    pub uuid: [u8; 16],
    pub geometry: Geometry,
    /// The last durable group.
    pub sequence: u64,
    pub session: u64,
    /// What its journal holds.
    pub scan: journal::Scan,
    /// As an undamaged copy shows them without a tail.
    pub contents: Contents,
    /// The same, byte by byte.
    pub shown: BTreeMap<String, Vec<u8>>,
    /// All metadata as text.
    pub dump: Vec<u8>,
}

impl Sample {
    /// The sample, made once.
    pub fn get(end: End) -> &'static Self {
        Self::of(end, false)
    }

    /// The sample, made once, with checksums of its data or without.
    pub fn of(end: End, checksums: bool) -> &'static Self {
        static SAMPLES: [OnceLock<Sample>; 4] = [const { OnceLock::new() }; 4];
        let index = usize::from(end == End::Killed) + 2 * usize::from(checksums);
        SAMPLES[index].get_or_init(|| Self::make(end, checksums))
    }

    fn make(end: End, checksums: bool) -> Self {
        let disk = Arc::new(Disk::empty(SIZE as usize));
        let options = InitOptions { checksums, ..options() };
        Store::init_on(&*disk, &options, &FixedEnv::new(1)).unwrap();
        let tail = TailPlace::default();
        tail.put(Some(vec![0; TAIL]));
        let store = open(&disk, Some(tail.attach_beside(Weak::new())), 2, false).unwrap();
        fill(&store);
        store.flush().unwrap();
        let sequence = store.info().sequence;
        if end == End::Killed {
            // What only the tail knows.
            let alpha = store.volume("alpha").unwrap();
            alpha.write_at(220 << 10, &pattern(9, 8192), false).unwrap();
            drop(alpha);
            drop(store);
        } else {
            store.close().unwrap();
        }
        let tail = tail.copy_if(true).unwrap_or_else(|| vec![0; TAIL]);
        let bytes = Arc::new(disk.bytes());
        let superblock = Superblock::decode(&bytes[..4096], 0).unwrap();
        let disk = Arc::new(Disk::new(Arc::clone(&bytes)));
        let store = open(&disk, None, 3, true).unwrap();
        let ring = superblock.geometry.region(RegionKind::Journal);
        let range = ring.offset as usize..(ring.offset + ring.length) as usize;
        let mut dump = Vec::new();
        store.dump(&mut dump).unwrap();
        let contents = contents(&store);
        let show = |spec: &String| {
            let volume = store.volume(spec).unwrap();
            let mut bytes = vec![0; volume.size() as usize];
            volume.read_at(0, &mut bytes).unwrap();
            (spec.clone(), bytes)
        };
        Self {
            shown: contents.keys().map(show).collect(),
            contents,
            dump,
            scan: journal::scan(&bytes[range], &superblock.uuid, ring.offset),
            bytes,
            session: u64::from_le_bytes(tail[40..48].try_into().unwrap()),
            tail,
            uuid: superblock.uuid,
            geometry: superblock.geometry,
            sequence: sequence.max(superblock.clean_sequence),
        }
    }

    /// The block of the ring behind its newest group.
    pub fn newest_end(&self) -> u64 {
        let newest = self.scan.groups.values().next_back();
        newest.map_or(0, |group| u64::from(group.position + group.blocks))
    }

    /// The high-water marks that the newest group gives.
    pub fn marks(&self) -> [u32; 4] {
        self.header().1
    }

    /// The group up to which all is written back, as the newest group says.
    pub fn checkpoint(&self) -> u64 {
        self.header().0
    }

    fn header(&self) -> (u64, [u32; 4]) {
        let newest = self.scan.groups.values().next_back();
        match newest.and_then(|group| Record::decode(&mut &group.payload[..])) {
            Some(Record::Checkpoint { sequence, marks, .. }) => (sequence, marks),
            other => panic!("{other:?}"),
        }
    }

    /// A copy of the device.
    pub fn disk(&self) -> Disk {
        Disk::new(Arc::clone(&self.bytes))
    }

    /// Where the data begins.
    pub fn metadata_bytes(&self) -> u64 {
        self.geometry.region(RegionKind::Data).offset
    }

    /// The tail of its last process.
    pub fn tail(&self) -> Box<dyn TailMemory> {
        attach(self.tail.clone())
    }
}

/// A tail of these bytes.
pub(crate) fn attach(bytes: Vec<u8>) -> Box<dyn TailMemory> {
    let place = TailPlace::default();
    place.put(Some(bytes));
    place.attach_beside(Weak::new())
}

/// The shape of all small stores here.
pub(crate) fn options() -> InitOptions {
    InitOptions {
        extent_size: 64 << 10,
        max_volumes: Some(6),
        max_snapshots: Some(16),
        journal_size: Some(128 << 10),
        max_size: Some(2 * SIZE),
        ..InitOptions::default()
    }
}

/// Opens a store in memory.
pub(crate) fn open(
    disk: &Arc<Disk>,
    tail: Option<Box<dyn TailMemory>>,
    seed: u64,
    read_only: bool,
) -> Result<Store> {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    Store::open_on(storage, tail, Arc::new(FixedEnv::new(seed)), read_only)
}

/// Size of [`empty`] stores.
const EMPTY_SIZE: usize = 8 << 20;

/// An empty store.
pub(crate) fn empty() -> (Arc<Disk>, Store) {
    static IMAGE: OnceLock<Arc<Vec<u8>>> = OnceLock::new();
    let image = IMAGE.get_or_init(|| {
        let disk = Disk::empty(EMPTY_SIZE);
        let options = InitOptions { max_size: None, ..options() };
        Store::init_on(&disk, &options, &FixedEnv::new(7)).unwrap();
        Arc::new(disk.bytes())
    });
    let disk = Arc::new(Disk::new(Arc::clone(image)));
    let store = open(&disk, None, 8, false).unwrap();
    (disk, store)
}

/// Bytes that follow from a seed and are nowhere zero for long.
pub(crate) fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8 ^ seed)).collect()
}

/// Volumes, snapshots, a side branch, a clone, a hidden snapshot, zeros, labels.
pub(crate) fn fill(store: &Store) {
    let plain = SnapshotOptions::default();
    let labels: Labels = [("kind".to_owned(), "nightly".to_owned())].into();
    let system = SnapshotOptions { labels, system: true, ..Default::default() };
    store.create_volume("alpha", 256 << 10).unwrap();
    let alpha = store.volume("alpha").unwrap();
    alpha.write_at(0, &pattern(1, 150 << 10), false).unwrap();
    store.create_snapshot("alpha", "one", &plain).unwrap();
    alpha.write_at(4096, &pattern(2, 8192), false).unwrap();
    alpha.discard(64 << 10, 64 << 10).unwrap();
    alpha.write_at(200 << 10, &pattern(3, 512), true).unwrap();
    store.create_snapshot("alpha", "two", &system).unwrap();
    store.clone_volume("alpha", "one", "copy").unwrap();
    let copy = store.volume("copy").unwrap();
    copy.write_at(130 << 10, &pattern(4, 30 << 10), false).unwrap();
    store.create_snapshot("copy", "x", &plain).unwrap();
    copy.write_zeroes(128 << 10, 128 << 10, false).unwrap();
    store.create_snapshot("alpha", "three", &plain).unwrap();
    store.rollback("alpha", "two").unwrap();
    alpha.write_at(0, &pattern(6, 512), false).unwrap();
    store.create_volume("beta", 4096 * 3 + 512).unwrap();
    store.volume("beta").unwrap().write_at(512, &pattern(7, 12 << 10), true).unwrap();
    store.delete_snapshot("alpha", "one").unwrap();
}

/// Sizes and checksums of volumes and snapshots, by spec.
pub(crate) type Contents = BTreeMap<String, (u64, u32)>;

/// Contents of all volumes and snapshots; what cannot be read is left out.
pub(crate) fn contents(store: &Store) -> Contents {
    let mut contents = BTreeMap::new();
    let mut buf = vec![0; 64 << 10];
    for volume in store.volumes(false) {
        let snapshots = store.snapshots(&volume.name, false).unwrap_or_default();
        let snapshots = snapshots.iter().map(|s| format!("{}@{}", volume.name, s.name));
        for spec in snapshots.chain([volume.name.clone()]) {
            let Ok(open) = store.volume(&spec) else { continue };
            // A hostile image may say that a volume has 64 TiB.
            let end = open.size().min(CONTENT_MAX_BYTES);
            let crc = (0..end).step_by(buf.len()).try_fold(0, |crc, at| {
                let part = &mut buf[..(end - at).min(64 << 10) as usize];
                open.read_at(at, part).map(|()| crc32c_append(crc, part))
            });
            if let Ok(crc) = crc {
                contents.insert(spec, (open.size(), crc));
            }
        }
    }
    contents
}

/// Time and identities that repeat themselves.
pub(crate) struct FixedEnv(AtomicU64);

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

    fn boot_id(&self) -> [u8; 16] {
        [7; 16]
    }
}
