//! Damage that is no crash: detected or harmless, never wrong data, never a panic.

use dbs_core::io::Storage;
use dbs_core::sabotage::{Bug, set};
use dbs_core::{ErrorKind, Store};
use dbs_sim::disk::BLOCK;
use dbs_sim::{Config, Fate, Faults, Machine, Op, SimDisk, SimEnv, Step, threshold};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Flips of each sample: every byte in turn is a test of the format's own.
const FLIPS: usize = 4000;

type Contents = BTreeMap<String, Vec<u8>>;

/// A store with something of everything, reopened in good order or after a kill (then its journal
/// is needed), and the size of its metadata.
fn sample(end: Op) -> (SimDisk, u64) {
    sample_of(Config { garbage: false, ..Config::small(3) }, end)
}

fn sample_of(config: Config, end: Op) -> (SimDisk, u64) {
    let mut machine = Machine::new(&config).unwrap();
    for op in threshold::base() {
        machine.step(&Step { op, fate: Fate::Calm, seed: 1 }).unwrap();
    }
    let metadata = machine.store().info().metadata;
    machine.step(&Step { op: end, fate: Fate::Calm, seed: 4 }).unwrap();
    machine.store().flush().unwrap();
    (machine.disk.fork(), metadata)
}

/// Metadata blocks that hold anything.
fn used_blocks(disk: &SimDisk, metadata: u64) -> Vec<u64> {
    let mut block = [0; BLOCK];
    let used = |offset: &u64| {
        disk.read_at(*offset, &mut block).unwrap();
        block.iter().any(|byte| *byte != 0)
    };
    (0..metadata).step_by(BLOCK).filter(used).collect()
}

fn open(disk: SimDisk) -> dbs_core::Result<Store> {
    let disk: Arc<dyn Storage> = Arc::new(disk);
    Store::open_on(disk, None, Arc::new(SimEnv::new(9)), false).map(dbs_sim::image::given)
}

/// All contents; what cannot be read is left out.
fn contents(store: &Store) -> Contents {
    let mut contents = Contents::new();
    let mut read = |spec: String, size: u64| {
        let mut buf = vec![0; size as usize];
        match store.volume(&spec).and_then(|volume| volume.read_at(0, &mut buf)) {
            Ok(()) => drop(contents.insert(spec, buf)),
            Err(error) => assert_ne!(error.kind(), ErrorKind::Invalid, "{spec}: {error}"),
        }
    };
    for volume in store.volumes(false) {
        for snapshot in store.snapshots(&volume.name, false).unwrap_or_default() {
            read(format!("{}@{}", volume.name, snapshot.name), snapshot.size);
        }
        read(volume.name, volume.size);
    }
    contents
}

#[test]
fn flipped_metadata_bits_never_give_wrong_data() {
    for (end, refusals) in [(Op::Reopen, 0), (Op::Kill, 100)] {
        let (disk, metadata) = sample(end.clone());
        let blocks = used_blocks(&disk, metadata);
        let good = contents(&open(disk.fork()).unwrap());
        assert!(good.len() >= 7, "{:?}", good.keys());
        let mut rng = fastrand::Rng::with_seed(11);
        let (mut refused, mut noticed) = (0, 0);
        for _ in 0..FLIPS {
            let block = rng.choice(&blocks).copied().unwrap();
            let (offset, bit) = (block + rng.u64(0..BLOCK as u64), rng.u8(0..8));
            let damaged = disk.fork();
            damaged.flip_bit(offset, bit);
            match open(damaged) {
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "bit {bit} of {offset}: {error}");
                    refused += 1;
                }
                Ok(store) => {
                    noticed += usize::from(!store.info().warnings.is_empty());
                    store.check().unwrap_or_else(|e| panic!("bit {bit} of {offset}: check: {e}"));
                    for (spec, bytes) in contents(&store) {
                        let same = good.get(&spec).is_some_and(|good| *good == bytes);
                        assert!(same, "bit {bit} of {offset}: {spec} reads otherwise");
                    }
                }
            }
        }
        println!(
            "{end:?}: {FLIPS} flips in {} blocks, {refused} refused, {noticed} noticed",
            blocks.len()
        );
        assert!(refused >= refusals && refused + noticed > FLIPS / 4);
    }
}

/// With checksums: each flip in the data region is an error to whoever reads the block, which names a
/// place of its volume, and is found by a scrub; or nobody reads that block.
#[test]
fn flipped_data_bits_are_errors_and_never_wrong_data() {
    let mut config = Config { garbage: false, ..Config::small(3) };
    config.init.checksums = true;
    let size = config.init.size.unwrap();
    let (disk, data) = sample_of(config, Op::Reopen);
    let good = contents(&open(disk.fork()).unwrap());
    let mut rng = fastrand::Rng::with_seed(12);
    let (mut found, mut unread) = (0, 0);
    for offset in (data..size - BLOCK as u64).step_by(BLOCK) {
        let damaged = disk.fork();
        damaged.flip_bit(offset + rng.u64(0..BLOCK as u64), rng.u8(0..8));
        let store = open(damaged).unwrap();
        let read = contents(&store);
        let same = |(spec, bytes): (&String, &Vec<u8>)| good.get(spec) == Some(bytes);
        assert!(read.iter().all(same), "a flip at {offset} is read as data");
        let report = store.scrub(true, &mut |_| true).unwrap();
        if report.damaged == 0 {
            assert_eq!(read.len(), good.len(), "a scrub misses the flip at {offset}");
            unread += 1;
            continue;
        }
        assert_eq!((report.damaged, report.ranges.len()), (BLOCK as u64, 1));
        let mut buf = [0; BLOCK];
        for spec in good.keys().filter(|spec| !read.contains_key(*spec)) {
            let volume = store.volume(spec).unwrap();
            let place = report.ranges[0].place.offset;
            let length = (volume.size() - place).min(BLOCK as u64) as usize;
            let error = volume.read_at(place, &mut buf[..length]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged);
            assert!(error.to_string().contains(&format!("byte {place} of")), "{error}");
        }
        found += 1;
    }
    println!("{found} flips found, {unread} in blocks that hold nothing");
    assert!(found > 40);
}

/// Healing opens no page of checksums: a power loss amid it leaves the block right, or known as damaged.
#[test]
fn no_crash_while_a_block_is_healed_makes_damage_right() {
    let mut images = 0;
    for seed in 0..3 {
        images += dbs_sim::heal::run(&Config { tail: false, ..Config::small(seed) }).unwrap();
    }
    println!("{images} crash images");
    assert!(images > 500);
    // With the page opened as for any other write, damage is read as data after some of these.
    set(Some(Bug::HealOpensPage));
    let found = dbs_sim::heal::run(&Config { tail: false, ..Config::small(3) });
    set(None);
    assert!(found.unwrap_err().contains("reads otherwise"));
}

/// A write that is lost or done elsewhere, once, among those of some commands. It is noticed, or nothing that is
/// read is wrong; but what the medium puts over data, or forgets of it, shows while nothing is known of its sums.
#[test]
fn misdirected_and_lost_writes_are_noticed_or_harmless() {
    let (sample, metadata) = sample(Op::Reopen);
    let good = contents(&open(sample.fork()).unwrap());
    let mut outcomes = BTreeMap::<&str, u32>::new();
    for n in 1..60 {
        for (lose, close) in [(true, true), (true, false), (false, true), (false, false)] {
            let disk = sample.fork();
            disk.set_atomic_from(metadata);
            disk.arm(Faults {
                lose_at: Some(n).filter(|_| lose),
                misdirect_at: Some(n).filter(|_| !lose),
                ..Faults::default()
            });
            let what = format!("write {n} lost {lose}, closed {close}");
            *outcomes.entry(survive(disk, metadata, &good, close, &what)).or_default() += 1;
        }
    }
    println!("{outcomes:?}");
    for way in ["refused at reopen", "found by check", "not read", "harmless"] {
        assert!(outcomes.contains_key(way), "never {way}: {outcomes:?}");
    }
}

/// What the commands below leave: of `good` all but the snapshot that they delete, and nothing else.
fn differs(found: &Contents, good: &Contents, is_closed: bool) -> Option<String> {
    let kept = |spec: &str| spec != "v0@s2";
    for (spec, bytes) in found {
        // What was not closed may be as of any of the commands.
        let made = !is_closed && spec.starts_with('n') && bytes.iter().all(|byte| *byte == 0);
        let right = good.get(spec).is_some_and(|good| good == bytes);
        if !made && !(right && (kept(spec) || !is_closed)) {
            return Some(format!("{spec} is there, or reads otherwise"));
        }
    }
    None
}

/// Works on a disk that goes wrong once; any error is fine. How it was noticed.
fn survive(disk: SimDisk, metadata: u64, good: &Contents, close: bool, what: &str) -> &'static str {
    let disk = Arc::new(disk);
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let env = Arc::new(SimEnv::new(5));
    let Ok(store) = Store::open_on(storage, None, env, false).map(dbs_sim::image::given) else {
        return "not opened";
    };
    let worked = (|| {
        for i in 0..8 {
            store.create_volume(&format!("n{i}"), 1 << 16)?;
            store.delete_volume(&format!("n{i}"))?;
        }
        store.delete_snapshot("v0", "s2")?;
        store.work(100)?;
        if close { store.close() } else { Ok(()) }
    })();
    let store = match open(disk.fork()) {
        Ok(store) => store,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}");
            return "refused at reopen";
        }
    };
    let report = store.check().unwrap_or_else(|e| panic!("{what}: check: {e}"));
    let found = contents(&store);
    let is_closed = close && worked.is_ok();
    let noticed = report.worst().is_some() || !store.info().warnings.is_empty();
    if let Some(difference) = differs(&found, good, is_closed) {
        let wronged = disk.wronged().expect("nothing else goes wrong");
        let is_data = |at: u64| at >= metadata;
        let data = is_data(wronged.at) || wronged.instead.is_some_and(is_data);
        assert!(noticed || data && !is_closed, "{what}: {wronged:?}: {difference}");
        return if noticed { "found by check" } else { "data that nothing is known of" };
    }
    let specs = good.keys().filter(|spec| *spec != "v0@s2");
    match (worked, noticed) {
        (Err(_), _) => "failed in time",
        (_, true) => "found by check",
        _ if specs.into_iter().any(|spec| !found.contains_key(spec)) => "not read",
        _ => "harmless",
    }
}
