//! A revision counter is never found without the writes it counts, and never lost by a flush.

use dbs_core::io::Storage;
use dbs_core::store::Env;
use dbs_core::{InitOptions, Store};
use dbs_sim::{CrashMode, Faults, Medium, SimDisk, SimEnv, TailPlace};
use std::sync::Arc;

const SIZE: u64 = 8 << 20;
const BLOCK: u64 = 4096;
/// Blocks written over and over: the later rounds allocate nothing.
const BLOCKS: u64 = 40;

fn options(volumes: u32) -> InitOptions {
    InitOptions {
        size: Some(SIZE),
        extent_size: 64 << 10,
        max_volumes: Some(volumes),
        max_snapshots: Some(2 * volumes),
        journal_size: Some(128 << 10),
        ..InitOptions::default()
    }
}

fn open(disk: &Arc<SimDisk>, tail: Option<&TailPlace>, env: &Arc<SimEnv>) -> Store {
    let storage: Arc<dyn Storage> = Arc::clone(disk) as _;
    let env: Arc<dyn Env> = Arc::clone(env) as _;
    Store::open_on(storage, tail.map(|tail| tail.attach(disk)), env, false).unwrap()
}

/// Writes block after block, counting each write after it was acknowledged, with a flush now and
/// then, until the disk stops or `writes` are done; the last count that a flush covered, and the
/// last count at all.
fn count_writes(store: &Store, writes: u64, flush_every: u64) -> (u64, u64) {
    let volume = store.volume("v").unwrap();
    let (mut flushed, mut counted) = (0, 0);
    for write in 1..=writes {
        let bytes = write.to_le_bytes().repeat(BLOCK as usize / 8);
        if volume.write_at(write % BLOCKS * BLOCK, &bytes, false).is_err() {
            break;
        }
        if store.stage_revision("v", write).is_err() {
            break;
        }
        counted = write;
        if write.is_multiple_of(flush_every) {
            if store.flush().is_err() {
                break;
            }
            flushed = write;
        }
    }
    (flushed, counted)
}

/// Every write up to the count is there.
fn check(store: &Store, flushed: u64, counted: u64, what: &str) -> u64 {
    let revision = store.volume_info("v").unwrap().revision;
    assert!((flushed..=counted).contains(&revision), "{what}: {revision} of {flushed}..={counted}");
    let volume = store.volume("v").unwrap();
    let mut bytes = vec![0; (BLOCKS * BLOCK) as usize];
    volume.read_at(0, &mut bytes).unwrap();
    for block in 0..BLOCKS {
        let word = &bytes[(block * BLOCK) as usize..][..8];
        let found = u64::from_le_bytes(word.try_into().unwrap());
        let newest = (0..=revision).rev().take(BLOCKS as usize).find(|w| w % BLOCKS == block);
        let newest = newest.filter(|write| *write > 0).unwrap_or(0);
        assert!(found >= newest, "{what}: block {block} holds write {found}, counted {newest}");
    }
    assert_eq!(store.check().unwrap().findings, [], "{what}");
    revision
}

#[test]
fn a_count_is_never_found_without_its_writes() {
    let mut seen = std::collections::BTreeSet::new();
    for at in 1..260 {
        let mut rng = fastrand::Rng::with_seed(at);
        let env = Arc::new(SimEnv::new(at));
        let disk = Arc::new(SimDisk::new(Medium::file(SIZE), at));
        Store::init_on(&*disk, &options(8), &*env).unwrap();
        let place = (at % 2 == 0).then(TailPlace::default);
        let store = open(&disk, place.as_ref(), &env);
        disk.set_atomic_from(store.info().metadata);
        store.create_volume("v", BLOCKS * BLOCK).unwrap();
        disk.arm(Faults { stop_at: Some(at), ..Faults::default() });
        let (flushed, counted) = count_writes(&store, 120, 1 + at % 9);
        place.iter().for_each(TailPlace::kill);
        drop(store);
        disk.revive();
        for _ in 0..3 {
            let mode = CrashMode::random(&mut rng);
            let image = Arc::new(disk.crash_image(&mut rng, mode));
            let env = Arc::new(SimEnv::new(at));
            env.reboot();
            let store = open(&image, None, &env);
            let what = format!("power lost at change {at}");
            seen.insert(check(&store, flushed, counted, &what));
        }
    }
    assert!(seen.len() > 10, "few counts were found: {seen:?}");
}

#[test]
fn a_count_needs_no_write_and_survives_closing() {
    let env = Arc::new(SimEnv::new(1));
    let disk = Arc::new(SimDisk::new(Medium::file(SIZE), 1));
    Store::init_on(&*disk, &options(8), &*env).unwrap();
    let store = open(&disk, None, &env);
    store.create_volume("v", BLOCK).unwrap();
    store.stage_revision("v", 7).unwrap();
    assert_eq!(store.volume_info("v").unwrap().revision, 7);
    while store.settle().unwrap() {}
    let durable = store.info().sequence;
    assert!(!store.settle().unwrap() && store.info().sequence == durable, "nothing is left to do");
    store.stage_revision("v", 7).unwrap();
    store.flush().unwrap();
    assert_eq!(store.info().sequence, durable, "the same count is no news");
    store.stage_revision("v", 8).unwrap();
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    store.stage_revision("v", 9).unwrap();
    store.close().unwrap();
    let store = open(&disk, None, &env);
    assert_eq!(store.volume_info("v").unwrap().revision, 9);
    store.stage_revision("v", 10).unwrap();
    store.delete_volume("v").unwrap();
    store.flush().unwrap();
    assert!(store.stage_revision("v", 11).is_err());
    assert_eq!(store.check().unwrap().findings, []);
}

/// More counters than fit a group of the smallest journal: one flush makes all of them durable.
#[test]
fn one_flush_takes_the_counters_of_many_volumes() {
    const VOLUMES: u64 = 100;
    let env = Arc::new(SimEnv::new(1));
    let disk = Arc::new(SimDisk::new(Medium::file(SIZE), 1));
    Store::init_on(&*disk, &options(VOLUMES as u32), &*env).unwrap();
    let store = open(&disk, None, &env);
    for volume in 0..VOLUMES {
        store.create_volume(&format!("v{volume}"), BLOCK).unwrap();
    }
    for round in 1..4 {
        (0..VOLUMES).for_each(|v| {
            store.stage_revision(&format!("v{v}"), v + round).unwrap();
        });
        store.flush().unwrap();
        let image = disk.crash_image(&mut fastrand::Rng::with_seed(round), CrashMode::Lost);
        let found = open(&Arc::new(image), None, &env);
        for v in 0..VOLUMES {
            assert_eq!(found.volume_info(&format!("v{v}")).unwrap().revision, v + round);
        }
    }
}
