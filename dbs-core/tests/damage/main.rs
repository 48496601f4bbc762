//! Damage that is no crash: any byte of the metadata flipped, the file cut off anywhere, blocks of
//! garbage under a good checksum. It is detected or harmless, and never a panic, a hang or wrong
//! data.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod catalogue;
mod keys;
mod kinds;
mod plant;
mod repairs;

use common::{BLOCK, FixedEnv, Mem, SIZE, contents, fill, init, open, pattern};
use dbs_core::format::crc::crc32c;
use dbs_core::format::{BlockKind, Record, block, journal, record, slots};
use dbs_core::info::{CheckReport, Severity};
use dbs_core::io::Storage;
use dbs_core::{Error, ErrorKind, Store};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Zero bytes flipped: one of this many.
const ZEROS_SAMPLED: u64 = 131;
/// Longest that a test may take before it counts as hanging.
const HANG: Duration = Duration::from_secs(1800);

struct Sample {
    disk: Arc<Mem>,
    bytes: Vec<u8>,
    contents: BTreeMap<String, Vec<u8>>,
    report: CheckReport,
    /// Where the checksums begin, and then the data.
    sums: u64,
    data: u64,
}

impl Sample {
    fn new(clean: bool) -> Self {
        let disk = init(1);
        let store = open(&disk, 2, false).unwrap();
        fill(&store);
        if clean {
            store.close().unwrap();
        } else {
            // Something in the last group that nothing else knows.
            store.volume("beta").unwrap().write_at(0, &pattern(9, 512), true).unwrap();
            drop(store);
        }
        let bytes = disk.bytes();
        let disk = Arc::new(Mem::from_bytes(bytes.clone()));
        let store = open(&disk, 3, true).unwrap();
        let data = store.info().metadata;
        let dump: serde_json::Value = serde_json::from_str(&common::dump(&store)).unwrap();
        let regions = dump["regions"].as_array().unwrap();
        let sums = regions.iter().find(|region| region["name"] == "checksums").unwrap();
        let sums = sums["offset"].as_u64().unwrap();
        let contents = contents(&store);
        assert!(contents.len() >= 6, "{:?}", contents.keys());
        let report = Store::check_on(&*disk).unwrap();
        assert_eq!(report.worst(), None, "{report:?}");
        Self { disk, bytes, contents, report, sums, data }
    }

    /// Whether two stores differ in nothing but pages of checksums, which a repair does not save.
    fn same_but_sums(&self, a: &[u8], b: &[u8]) -> bool {
        let (sums, data) = (self.sums as usize, self.data as usize);
        a.len() == b.len() && a[..sums] == b[..sums] && a[data..] == b[data..]
    }

    /// Whether a block of 4 KiB holds metadata: all that is not zero is in use.
    fn in_use(&self, offset: u64) -> bool {
        let start = offset as usize / BLOCK * BLOCK;
        self.bytes[start..start + BLOCK].iter().any(|byte| *byte != 0)
    }

    fn verify(&self, disk: &Arc<Mem>, read_only: bool, what: &str) {
        match open(disk, 5, read_only) {
            Ok(store) => assert!(contents(&store) == self.contents, "{what}: wrong data"),
            Err(error) => assert_detected(&error, what),
        }
    }
}

fn assert_detected(error: &Error, what: &str) {
    let known = [ErrorKind::Corrupt, ErrorKind::Invalid, ErrorKind::Unsupported];
    assert!(known.contains(&error.kind()), "{what}: {error}");
}

/// Runs `task` in a thread and fails if it does not end.
fn in_time(task: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        task();
        let _ = done.send(());
    });
    match finished.recv_timeout(HANG) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        _ => thread.join().unwrap(),
    }
}

fn flip_every_byte(clean: bool) {
    let sample = Sample::new(clean);
    let end = SIZE - BLOCK as u64;
    let mut rng = fastrand::Rng::with_seed(1);
    let (mut flips, mut refused) = (0, 0);
    for offset in (0..sample.data).chain(end..SIZE) {
        let zero = sample.bytes[offset as usize] == 0;
        if zero && rng.u64(..ZEROS_SAMPLED) != 0 {
            continue;
        }
        let what = format!("byte {offset} flipped");
        let disk = Arc::new(sample.disk.fork());
        disk.flip(offset, rng.u8(1..));
        sample.verify(&disk, flips % 8 != 0, &what);
        let disk = Arc::new(sample.disk.fork());
        disk.flip(offset, 1 << rng.u8(..8));
        match Store::check_on(&*disk) {
            Ok(report) => {
                let seen = report.findings != sample.report.findings;
                // What is no page of checksums was never written.
                let no_page = (sample.sums..sample.data).contains(&offset) && offset % 4096 < 4;
                assert!(seen || no_page || !sample.in_use(offset), "{what}: not noticed");
                refused += u32::from(report.worst() == Some(Severity::Corrupt));
            }
            Err(error) => assert_detected(&error, &what),
        }
        flips += 1;
    }
    println!("{flips} bytes flipped, {refused} corrupt");
    assert!(flips > 5000);
}

#[test]
fn every_byte_of_a_closed_store_flipped_is_detected_or_harmless() {
    in_time(|| flip_every_byte(true));
}

#[test]
fn every_byte_of_a_crashed_store_flipped_is_detected_or_harmless() {
    in_time(|| flip_every_byte(false));
}

#[test]
fn a_store_cut_off_anywhere_is_refused_by_name() {
    for clean in [true, false] {
        let sample = Sample::new(clean);
        for size in (0..SIZE).step_by(BLOCK) {
            let disk = Arc::new(sample.disk.fork());
            disk.set_size(size).unwrap();
            let error = open(&disk, 5, size % 8192 == 0).err().unwrap();
            assert_detected(&error, "cut off");
            let text = error.to_string();
            assert!(text.contains("truncated") || text.contains("only"), "{size}: {text}");
            if let Ok(report) = Store::check_on(&*disk) {
                assert_eq!(report.worst(), Some(Severity::Corrupt), "{size}");
            }
        }
    }
}

#[test]
fn two_damaged_copies_are_named_with_region_and_block() {
    let sample = Sample::new(true);
    let store = open(&sample.disk, 5, true).unwrap();
    let dump: serde_json::Value = serde_json::from_str(&common::dump(&store)).unwrap();
    for (region, block) in [(0, 0), (1, 0), (2, 2), (2, 3), (4, 0), (5, 0)] {
        let found = &dump["regions"][region];
        let (offset, length) =
            (found["offset"].as_u64().unwrap(), found["length"].as_u64().unwrap());
        let disk = Arc::new(sample.disk.fork());
        for copy in 0..2 {
            let at = offset + copy * length / 2 + block * BLOCK as u64;
            assert!(sample.in_use(at), "region {region} block {block}");
            disk.flip(at + 1000, 1);
        }
        let wanted =
            format!("{} {block}: both copies are damaged", found["name"].as_str().unwrap());
        let error = open(&disk, 5, true).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains(&wanted), "{error}, not {wanted}");
        let report = Store::check_on(&*disk).unwrap();
        let named = report.findings.iter().any(|finding| {
            finding.severity == Severity::Corrupt
                && finding.region == found["name"].as_str().unwrap()
                && finding.index == Some(block)
        });
        assert!(named, "{:?}", report.findings);
    }
}

#[test]
fn a_damaged_last_group_is_not_taken_for_a_torn_one() {
    let sample = Sample::new(false);
    let store = open(&sample.disk, 5, true).unwrap();
    let newest = store.info().sequence;
    let dump: serde_json::Value = serde_json::from_str(&common::dump(&store)).unwrap();
    let (ring, length) = (
        dump["regions"][3]["offset"].as_u64().unwrap() as usize,
        dump["regions"][3]["length"].as_u64().unwrap() as usize,
    );
    let uuid = sample.bytes[16..32].try_into().unwrap();
    let scan = journal::scan(&sample.bytes[ring..ring + length], &uuid, ring as u64);
    let at = ring as u64 + u64::from(scan.groups[&newest].position) * BLOCK as u64;
    for byte in 0..BLOCK as u64 {
        let disk = Arc::new(sample.disk.fork());
        disk.flip(at + byte, 4);
        let sequence = open(&disk, 5, true).map(|store| store.info().sequence);
        assert!(sequence.is_err() || sequence.as_ref().is_ok_and(|s| *s == newest), "byte {byte}");
        // A stamp says nothing that the block does not: damaged alone, it costs nothing.
        assert_eq!(sequence.is_ok(), byte % 512 >= 504, "byte {byte}");
    }
    // Torn instead, so that none of its sectors is new: the state before it.
    let disk = Arc::new(sample.disk.fork());
    disk.put(at, &vec![0; BLOCK]);
    assert_eq!(open(&disk, 5, true).unwrap().info().sequence, newest - 1);
}

/// A metadata block of the sample, or a journal group, with a changed payload.
#[derive(Debug, Clone)]
enum Hostile {
    /// Bytes of a superblock field, all copies.
    Superblock(u16, Vec<u8>),
    /// Bytes of a table block, both copies.
    Table(u8, u16, Vec<u8>),
    /// A 32-bit value of a table block at a multiple of 4.
    Value(u8, u16, u32),
    /// Another group after the last: these bytes.
    Group(Vec<u8>),
    /// Another group: these records.
    Records(Vec<Vec<u8>>),
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![0..70u32, (1u32 << 30)..(1 << 30) + 70, any::<u32>()]
}

fn any_record() -> impl Strategy<Value = Vec<u8>> {
    let encoded = |record: Record<'_>| {
        let mut out = Vec::new();
        record.encode(&mut out);
        out
    };
    let state = prop_oneof![
        Just(record::FillState::Absent),
        Just(record::FillState::Data),
        Just(record::FillState::Zero)
    ];
    let bytes =
        |length| proptest::collection::vec(prop_oneof![3 => Just(0), 1 => any::<u8>()], length);
    let head = Record::Checkpoint { sequence: 0, marks: [9; 4], boot: [0; 16], tail: false };
    prop_oneof![
        (small(), bytes(504))
            .prop_map(move |(index, slot)| encoded(Record::Volume { index, slot: &slot })),
        (small(), bytes(504))
            .prop_map(move |(index, slot)| encoded(Record::Snapshot { index, slot: &slot })),
        (small(), bytes(40))
            .prop_map(move |(index, bytes)| encoded(Record::Labels { index, bytes: &bytes })),
        (small(), bytes(20))
            .prop_map(move |(entry, bytes)| encoded(Record::Entry { entry, bytes: &bytes })),
        (small(), 0..20u16, 0..20u16, state).prop_map(move |(entry, start, count, state)| encoded(
            Record::Fill { entry, start, count, state }
        )),
        small().prop_map(move |entry| encoded(Record::Free { entry })),
        (small(), 0..6u8)
            .prop_map(move |(blocks, region)| encoded(Record::Mark { region, blocks })),
        (small(), small()).prop_map(move |(index, volume)| encoded(Record::Drop { index, volume })),
        Just(encoded(head)),
    ]
}

fn hostile() -> impl Strategy<Value = Hostile> {
    let bytes = || proptest::collection::vec(any::<u8>(), 1..9);
    prop_oneof![
        (32..400u16, bytes()).prop_map(|(at, bytes)| Hostile::Superblock(at, bytes)),
        (0..6u8, 0..4020u16, bytes())
            .prop_map(|(block, at, bytes)| Hostile::Table(block, at, bytes)),
        (0..6u8, 0..320u16, small())
            .prop_map(|(block, at, value)| Hostile::Value(block, at, value)),
        proptest::collection::vec(any::<u8>(), 0..5000).prop_map(Hostile::Group),
        proptest::collection::vec(any_record(), 1..6).prop_map(Hostile::Records),
    ]
}

/// What the blocks of the sample are: region, its kind, and block in it.
const TABLES: [(usize, BlockKind, u64); 7] = [
    (0, BlockKind::Volumes, 0),
    (1, BlockKind::Snapshots, 0),
    (2, BlockKind::Labels, 2),
    (2, BlockKind::Labels, 3),
    (4, BlockKind::Spares, 0),
    (5, BlockKind::Extents, 0),
    (1, BlockKind::Snapshots, 1),
];

struct Attacker {
    sample: Sample,
    regions: Vec<(u64, u64)>,
    uuid: [u8; 16],
    sequence: u64,
    opened: AtomicU32,
}

impl Attacker {
    fn new() -> Self {
        let sample = Sample::new(true);
        let store = open(&sample.disk, 5, true).unwrap();
        let dump: serde_json::Value = serde_json::from_str(&common::dump(&store)).unwrap();
        let regions = dump["regions"].as_array().unwrap();
        let regions =
            regions.iter().map(|r| (r["offset"].as_u64().unwrap(), r["length"].as_u64().unwrap()));
        let uuid = sample.bytes[16..32].try_into().unwrap();
        Self {
            regions: regions.collect(),
            uuid,
            sequence: store.info().sequence,
            sample,
            opened: 0.into(),
        }
    }

    fn apply(&self, disk: &Mem, hostile: &Hostile) {
        match hostile {
            Hostile::Superblock(at, bytes) => {
                for address in [0, BLOCK as u64, SIZE - BLOCK as u64] {
                    disk.put(address + u64::from(*at), bytes);
                    disk.put(address + 12, &[0; 4]);
                    let mut block = vec![0; BLOCK];
                    disk.read_at(address, &mut block).unwrap();
                    disk.put(address + 12, &crc32c(&block).to_le_bytes());
                }
            }
            Hostile::Table(block, at, bytes) => self.reseal(disk, *block, *at as usize, bytes),
            Hostile::Value(block, at, value) => {
                self.reseal(disk, *block, *at as usize * 4, &value.to_le_bytes());
            }
            Hostile::Group(payload) => self.group(disk, payload),
            Hostile::Records(records) => {
                let mut payload = Vec::new();
                let (sequence, boot) = (self.sequence, [0; 16]);
                let header =
                    Record::Checkpoint { sequence, marks: [1, 2, 1, 1], boot, tail: false };
                header.encode(&mut payload);
                records.iter().for_each(|record| payload.extend_from_slice(record));
                self.group(disk, &payload);
            }
        }
    }

    fn reseal(&self, disk: &Mem, block: u8, at: usize, bytes: &[u8]) {
        let (region, kind, block) = TABLES[block as usize];
        let (offset, length) = self.regions[region];
        for copy in 0..2 {
            let address = offset + copy * length / 2 + block * BLOCK as u64;
            let mut sealed = vec![0; BLOCK];
            disk.read_at(address, &mut sealed).unwrap();
            let end = (block::HEADER_BYTES + at + bytes.len()).min(BLOCK);
            let start = block::HEADER_BYTES + at;
            sealed[start..end].copy_from_slice(&bytes[..end - start]);
            block::seal(&mut sealed, kind, &self.uuid, address, self.sequence, [0; 24]);
            disk.put(address, &sealed);
        }
    }

    fn group(&self, disk: &Mem, payload: &[u8]) {
        let at = self.regions[3].0;
        disk.put(at, &journal::encode(payload, self.sequence + 1, 1, &self.uuid, at));
    }

    /// Reads whatever opens, writes to it, and opens it again.
    fn survive(&self, what: &[Hostile]) {
        let disk = Arc::new(self.sample.disk.fork());
        what.iter().for_each(|hostile| self.apply(&disk, hostile));
        if let Err(error) = Store::check_on(&*disk) {
            assert_detected(&error, "check");
        }
        for read_only in [true, false] {
            match open(&disk, 5, read_only) {
                Ok(store) => {
                    self.opened.fetch_add(1, Ordering::Relaxed);
                    use_all(&store);
                }
                Err(error) => assert_detected(&error, "open"),
            }
        }
        if let Err(error) = open(&disk, 6, true) {
            assert_detected(&error, "open again");
        }
    }
}

/// Looks at everything; what fails must fail with an error.
fn use_all(store: &Store) {
    let _ = common::dump(store);
    let _ = store.check();
    for volume in store.volumes(true) {
        let snapshots = store.snapshots(&volume.name, true).unwrap_or_default();
        let snapshots = snapshots.iter().map(|s| format!("{}@{}", volume.name, s.name));
        for spec in snapshots.chain([volume.name.clone()]) {
            let Ok(open) = store.volume(&spec) else { continue };
            let size = open.size();
            let mut bytes = vec![0; size.min(1 << 18) as usize];
            let _ = open.read_at(0, &mut bytes);
            let _ = open.read_at(size - bytes.len() as u64, &mut bytes);
            let _ = open.map(0, size, 100);
            let _ = store.diff(&volume.name, None, None, 0, size.min(1 << 20));
        }
        let _ = store.children(&volume.name, None);
        let _ = store.delete_volume(&volume.name);
    }
    if !store.info().read_only {
        let _ = store.work(1000);
        let _ = store.create_volume("new", 1 << 16);
        if let Ok(new) = store.volume("new") {
            let _ = new.write_at(0, &pattern(1, 1 << 16), true);
        }
        let _ = store.vacuum(&mut |_, _| true);
    }
}

#[test]
fn garbage_under_a_good_checksum_is_survived() {
    in_time(|| {
        let attacker = Attacker::new();
        let cases = proptest::collection::vec(hostile(), 1..4);
        let config =
            ProptestConfig { cases: 3000, failure_persistence: None, ..Default::default() };
        let mut runner = proptest::test_runner::TestRunner::new(config);
        runner
            .run(&cases, |case| {
                attacker.survive(&case);
                Ok(())
            })
            .unwrap();
        let opened = attacker.opened.load(Ordering::Relaxed);
        println!("{opened} of 6000 opened");
        assert!((200..5800).contains(&opened), "the cases are not both good and bad: {opened}");
    });
}

/// What journal and tables may say of each other under good checksums.
#[test]
fn a_journal_that_contradicts_the_store_is_named() {
    let attacker = Attacker::new();
    let last = attacker.sequence;
    let head = |sequence| {
        let mut out = Vec::new();
        Record::Checkpoint { sequence, marks: [1, 2, 1, 1], boot: [0; 16], tail: false }
            .encode(&mut out);
        out
    };
    // The first `blocks` of a group; what it has no room for is records of nothing.
    let group = |disk: &Mem, at: u64, sequence, payload: &[u8], blocks: usize| {
        let at = attacker.regions[3].0 + at * BLOCK as u64;
        let bytes = journal::encode(payload, sequence, 1, &attacker.uuid, at);
        disk.put(at, &bytes[..blocks * BLOCK]);
    };
    let newer = |disk: &Mem| {
        let (offset, length) = attacker.regions[0];
        for address in [offset, offset + length / 2] {
            let mut block = vec![0; BLOCK];
            disk.read_at(address, &mut block).unwrap();
            let kind = BlockKind::Volumes;
            block::seal(&mut block, kind, &attacker.uuid, address, last + 1, [0; 24]);
            disk.put(address, &block);
        }
    };
    let long = vec![0; 2 * BLOCK];
    type Change<'a> = Box<dyn Fn(&Mem) + 'a>;
    let cases: [(&str, Change<'_>); 6] = [
        (
            "no header record",
            Box::new(|disk| group(disk, 0, last + 1, &[8, 0, 4, 0, 1, 0, 0, 0], 1)),
        ),
        ("announces itself", Box::new(|disk| group(disk, 0, last + 1, &head(last + 1), 1))),
        ("is missing: this change", Box::new(|disk| group(disk, 0, last + 2, &long, 1))),
        (
            "is damaged: this change",
            Box::new(|disk| {
                group(disk, 0, last + 1, &head(last), 1);
                group(disk, 4, last + 3, &long, 1);
            }),
        ),
        ("is missing or damaged", Box::new(|disk| group(disk, 0, last + 3, &head(last + 1), 1))),
        ("the journal lost one", Box::new(newer)),
    ];
    for (text, change) in cases {
        let disk = Arc::new(attacker.sample.disk.fork());
        change(&disk);
        let error = open(&disk, 5, true).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{text}: {error}");
        assert!(error.to_string().contains(text), "{text}: {error}");
        assert_eq!(Store::check_on(&*disk).unwrap().worst(), Some(Severity::Corrupt), "{text}");
    }
}

#[test]
fn another_store_or_none_is_refused_by_name() {
    let empty = Arc::new(Mem::new(SIZE));
    let error = open(&empty, 1, true).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let tiny = Mem::new(8192);
    assert!(Store::init_on(&tiny, &common::options(), &FixedEnv::new(1)).is_err());
    // A feature under which this version may only read.
    let attacker = Attacker::new();
    attacker.apply(&attacker.sample.disk, &Hostile::Superblock(56, vec![4]));
    assert_eq!(open(&attacker.sample.disk, 5, false).err().unwrap().kind(), ErrorKind::Unsupported);
    let store = open(&attacker.sample.disk, 5, true).unwrap();
    assert!(contents(&store) == attacker.sample.contents);
}

/// A store at the end of all sequences was opened and written, and from then on nobody could read it.
#[test]
fn a_store_without_sequences_left_is_not_written() {
    for (at, sequence) in [(32, 1u64 << 62), (32, (1 << 61) + 1), (120, 1 << 62)] {
        let attacker = Attacker::new();
        let disk = &attacker.sample.disk;
        attacker.apply(disk, &Hostile::Superblock(at, sequence.to_le_bytes().into()));
        let error = open(disk, 5, false).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{at} {sequence}: {error}");
        assert!(error.to_string().contains("impossible sequence"), "{error}");
        assert!(contents(&open(disk, 5, true).unwrap()) == attacker.sample.contents);
        assert_eq!(Store::check_on(&**disk).unwrap().worst(), Some(Severity::Corrupt));
        let error = Store::plan_repair_on(&**disk, None, &FixedEnv::new(9), true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
    // The highest from which one goes on.
    for at in [32, 120] {
        let attacker = Attacker::new();
        let disk = &attacker.sample.disk;
        attacker.apply(disk, &Hostile::Superblock(at, (1u64 << 61).to_le_bytes().into()));
        open(disk, 5, false).unwrap().close().unwrap();
        assert!(contents(&open(disk, 6, true).unwrap()) == attacker.sample.contents);
    }
}

/// Its metadata was written anew without what this version does not know.
#[test]
fn a_store_with_unknown_features_is_not_repaired() {
    let attacker = Attacker::new();
    let disk = &attacker.sample.disk;
    let dump = common::dump(&open(disk, 5, true).unwrap());
    attacker.apply(disk, &Hostile::Superblock(56, vec![4]));
    disk.flip(attacker.regions[0].0 + 777, 0x10);
    let error = Store::plan_repair_on(&**disk, None, &FixedEnv::new(9), false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let error = Store::plan_restore_on(&**disk, dump.as_bytes()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

/// What else was wrong with a slot that had been freed made the repair refuse the store.
#[test]
fn a_free_slot_full_of_garbage_is_freed() {
    let attacker = Attacker::new();
    let disk = Arc::new(attacker.sample.disk.fork());
    // The last slot of the second block; neither its name nor its flags nor its size can be.
    let garbage = Hostile::Table(6, (7 * slots::SLOT_BYTES) as u16, vec![0xff; 300]);
    attacker.apply(&disk, &Hostile::Superblock(132, vec![2]));
    attacker.apply(&disk, &garbage);
    assert_eq!(Store::check_on(&*disk).unwrap().worst(), Some(Severity::Corrupt));
    let repair = Store::plan_repair_on(&*disk, None, &FixedEnv::new(9), false).unwrap();
    let report = repair.carry_out(&*disk).unwrap();
    assert_eq!(report.lost, []);
    assert!(Store::check_on(&*disk).unwrap().is_clean());
    assert!(contents(&open(&disk, 6, true).unwrap()) == attacker.sample.contents);
}
