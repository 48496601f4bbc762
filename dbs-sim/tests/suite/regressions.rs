//! Bugs that were found, each by name with the seed that found it. Where the sequence of events is
//! what matters it is spelled out here, as a seed means another history once the generator changes.

use dbs_core::io::Storage;
use dbs_core::store::SnapshotOptions;
use dbs_core::{ErrorKind, InitOptions, Store};
use dbs_sim::runner::replay_on;
use dbs_sim::{Config, CrashMode, Failure, Fate, Faults, Medium, Op, SimDisk, SimEnv, Stats, Step};
use std::sync::Arc;

const SIZE: u64 = 4 << 20;

fn small_store(env: &SimEnv) -> SimDisk {
    let disk = SimDisk::new(Medium::file(SIZE), 1);
    let options = InitOptions {
        size: Some(SIZE),
        extent_size: 64 << 10,
        max_volumes: Some(8),
        max_snapshots: Some(16),
        journal_size: Some(128 << 10),
        ..InitOptions::default()
    };
    Store::init_on(&disk, &options, env).unwrap();
    disk
}

fn open(disk: &SimDisk, env: &Arc<SimEnv>) -> dbs_core::Result<Store> {
    let storage: Arc<dyn Storage> = Arc::new(disk.fork());
    Store::open_on(storage, None, Arc::clone(env) as _, false)
}

/// Seed 1259: processes that ended soon after opening, one after the other, each added groups to
/// the journal and wrote nothing back, until it was full and the store could not be opened.
#[test]
fn opening_again_and_again_does_not_fill_the_journal() {
    let env = Arc::new(SimEnv::new(1));
    let mut disk = small_store(&env);
    for round in 0..200 {
        let storage = Arc::new(disk.fork());
        let store =
            Store::open_on(Arc::clone(&storage) as _, None, Arc::clone(&env) as _, false).unwrap();
        if round % 10 == 0 {
            store.create_volume(&format!("v{}", round / 10 % 4), 1 << 20).ok();
        }
        drop(store);
        disk = storage.crash_image(&mut fastrand::Rng::with_seed(round), CrashMode::Kept);
    }
    assert_eq!(open(&disk, &env).unwrap().volumes(false).len(), 4);
}

/// The same, ended at each device operation of opening in turn.
#[test]
fn dying_while_opening_does_not_fill_the_journal() {
    for at in 1..24 {
        let env = Arc::new(SimEnv::new(1));
        let mut disk = small_store(&env);
        {
            let storage = Arc::new(disk.fork());
            let store =
                Store::open_on(Arc::clone(&storage) as _, None, Arc::clone(&env) as _, false)
                    .unwrap();
            store.create_volume("v", 1 << 20).unwrap();
            drop(store);
            disk = storage.fork();
        }
        for round in 0..100 {
            let storage = Arc::new(disk.fork());
            storage.arm(Faults { stop_at: Some(at), ..Faults::default() });
            drop(Store::open_on(Arc::clone(&storage) as _, None, Arc::clone(&env) as _, false));
            storage.revive();
            disk = storage.crash_image(&mut fastrand::Rng::with_seed(round), CrashMode::Kept);
        }
        assert_eq!(open(&disk, &env).unwrap().volumes(false).len(), 1, "operation {at}");
    }
}

/// Histories that once failed: 429 (a torn write of a metadata block's only good copy), 1174 (a
/// superblock larger than its file), 1259, 5001687 and 9000829 (a difference that missed what lies
/// behind the end of the shorter snapshot).
#[test]
fn seeds_that_once_failed() {
    for seed in [409, 429, 1174, 1259, 102_676, 5_001_687, 9_000_829] {
        dbs_sim::run(seed, 60).unwrap();
    }
}

/// Found by review: shrinking wrote the last copy of the superblock into a hole, and a host file system
/// that was full stopped all writing, until somebody freed space there.
#[test]
fn a_shrink_that_finds_no_space_for_the_superblock_changes_nothing() {
    let env = Arc::new(SimEnv::new(1));
    let disk = Arc::new(small_store(&env));
    let open = |disk: &Arc<SimDisk>| {
        Store::open_on(Arc::clone(disk) as _, None, Arc::clone(&env) as _, false)
    };
    let store = open(&disk).unwrap();
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; 512 << 10], true).unwrap();
    while store.work(100).unwrap().remaining > 0 {}
    store.flush().unwrap();
    disk.arm(Faults { enospc_from: Some(1), ..Faults::default() });
    let error = store.vacuum(&mut |_, _| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    assert_eq!(store.info().size, SIZE);
    volume.write_at(0, &[2; 4096], true).unwrap();
    drop(volume);
    store.close().unwrap();
    let store = open(&disk).unwrap();
    disk.arm(Faults::default());
    assert!(store.vacuum(&mut |_, _| true).unwrap() < SIZE);
    let mut found = [0; 8192];
    store.volume("v").unwrap().read_at(0, &mut found).unwrap();
    assert!(found[..4096] == [2; 4096] && found[4096..] == [1; 4096]);
    store.close().unwrap();
    assert!(Store::check_on(&*disk).unwrap().findings.is_empty());
}

/// A store whose superblock's last copy lies in a hole of its file, as a crash of a shrink on a full file
/// system left it.
fn without_last_superblock(env: &Arc<SimEnv>) -> SimDisk {
    let disk = Arc::new(small_store(env));
    let store = Store::open_on(Arc::clone(&disk) as _, None, Arc::clone(env) as _, false).unwrap();
    store.create_volume("v", 1 << 20).unwrap();
    store.volume("v").unwrap().write_at(0, &[1; 4096], false).unwrap();
    store.close().unwrap();
    disk.set_size(SIZE - 4096).unwrap();
    disk.set_size(SIZE).unwrap();
    disk.flush().unwrap();
    disk.fork()
}

/// Found by review: opening for writing heals all copies of the superblock first, and failed if there was
/// no space for the last one, however good the others were. Ended at each change in turn.
#[test]
fn a_store_is_written_without_its_last_superblock_while_there_is_no_space_for_it() {
    let env = Arc::new(SimEnv::new(1));
    let bare = without_last_superblock(&env);
    let first = |store: &Store| {
        let mut found = [0; 4096];
        store.volume("v").unwrap().read_at(0, &mut found).unwrap();
        found[0]
    };
    let session = |disk: &Arc<SimDisk>| {
        let store = Store::open_on(Arc::clone(disk) as _, None, Arc::clone(&env) as _, false)?;
        assert!(store.info().warnings.iter().any(|text| text.contains("no space")));
        store.volume("v")?.write_at(0, &[2; 4096], true)?;
        store.close()
    };
    let mut at = 1;
    loop {
        let disk = Arc::new(bare.fork());
        disk.arm(Faults { stop_at: Some(at), enospc_from: Some(1), ..Faults::default() });
        let ended = session(&disk);
        for seed in 0..20 {
            let image = disk.crash_image(&mut fastrand::Rng::with_seed(seed), CrashMode::Torn);
            let found = first(&open(&image, &env).unwrap_or_else(|e| panic!("{at}, {seed}: {e}")));
            assert!(found == 2 || ended.is_err() && found == 1, "{at}, {seed}: {found}");
        }
        if !disk.stopped() {
            ended.unwrap();
            // With space again it is whole.
            disk.arm(Faults::default());
            drop(Store::open_on(Arc::clone(&disk) as _, None, Arc::clone(&env) as _, false));
            let report = Store::check_on(&*disk).unwrap();
            assert!(report.findings.is_empty(), "{:?}", report.findings);
            break;
        }
        at += 1;
    }
    assert!(at > 5, "{at} changes");
}

/// The same, with space that comes back while the store is open.
#[test]
fn a_last_superblock_that_could_not_be_written_is_written_by_the_next_change_of_it() {
    let env = Arc::new(SimEnv::new(1));
    for shrink in [false, true] {
        let disk = Arc::new(without_last_superblock(&env));
        disk.arm(Faults { enospc_from: Some(1), ..Faults::default() });
        let store = Store::open_on(Arc::clone(&disk) as _, None, Arc::clone(&env) as _, false);
        let store = store.unwrap();
        disk.arm(Faults::default());
        if shrink {
            assert!(store.vacuum(&mut |_, _| true).unwrap() < SIZE);
        }
        store.close().unwrap();
        assert!(Store::check_on(&*disk).unwrap().findings.is_empty(), "shrink {shrink}");
    }
}

/// Found by review: growing clears what is behind the end in the last block, then takes hold of the volume.
/// In between others made it larger, wrote there and made it what it was: that showed.
#[test]
fn growing_shows_nothing_that_others_left_behind_the_same_end() {
    const END: u64 = 1536;
    let env = Arc::new(SimEnv::new(1));
    let disk = Arc::new(small_store(&env));
    let store = Store::open_on(Arc::clone(&disk) as _, None, Arc::clone(&env) as _, false).unwrap();
    store.create_volume("v", END).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; END as usize], false).unwrap();
    let other = store.clone();
    disk.after_read(1, move || {
        other.resize_volume("v", 8192).unwrap();
        other.volume("v").unwrap().write_at(END, &[7; 512], false).unwrap();
        other.resize_volume("v", END).unwrap();
    });
    store.resize_volume("v", 8192).unwrap();
    assert!(!disk.awaits_read(), "nobody looked at the last block");
    let mut found = [9; 8192];
    volume.read_at(0, &mut found).unwrap();
    let (shown, behind) = found.split_at(END as usize);
    assert!(shown.iter().all(|byte| *byte == 1), "other content");
    assert!(behind.iter().all(|byte| *byte == 0), "what was freed shows: {:?}", &behind[..4]);
}

/// Seed 10001073: a command cut off by an error shows the same bytes done or not done, but leaves other
/// layers. The model has to go on with those that the store has.
#[test]
fn equal_bytes_of_other_layers_are_told_apart() {
    use Fate::{Calm, EioAt};
    let history = |at| {
        let roll = |snap, keep_size| Op::Rollback { vol: 0, snap, keep_size };
        let ops = [
            (Op::CreateVolume { vol: 0, sectors: 96 }, Calm),
            (Op::Rebuilding { vol: 0, on: true }, Calm),
            (Op::InsertSnapshot { vol: 0, snap: 0, sectors: 24 }, Calm),
            (Op::CreateSnapshot { vol: 0, snap: 3, labels: 0 }, Calm),
            (roll(3, false), Calm),
            (roll(0, true), EioAt(at)),
            (Op::WriteLayer { vol: 0, snap: 0, start: 1, count: 2 }, Calm),
            (Op::Verify, Calm),
        ];
        ops.map(|(op, fate)| Step { op, fate, seed: at })
    };
    for at in 1..=20 {
        let mut config = Config::small(1);
        config.init.max_volumes = Some(2);
        replay_on(&config, &history(at)).unwrap_or_else(|e| panic!("EIO at {at}: {}", e.message));
    }
}

/// Seed 20002160: what a layer holds may have been unknown before it was overwritten; a power loss that
/// may undo that makes it unknown again.
#[test]
fn a_layer_of_unknown_content_stays_unknown() {
    let calm = |op| Step { op, fate: Fate::Calm, seed: 1 };
    let steps = [
        Op::CreateVolume { vol: 0, sectors: 64 },
        Op::Rebuilding { vol: 0, on: true },
        Op::WriteZeroes { vol: 0, at: 0, len: 64, fua: false },
        Op::PowerLoss,
        Op::CreateSnapshot { vol: 0, snap: 0, labels: 0 },
        Op::ZeroLayer { vol: 0, snap: 0, start: 0, count: 4 },
        Op::PowerLoss,
        Op::InsertSnapshot { vol: 0, snap: 1, sectors: 64 },
        Op::Relink { vol: 0, links: vec![(0, Some(1))], head: Some(0), marks: 0 },
        Op::WriteLayer { vol: 0, snap: 1, start: 0, count: 8 },
        Op::Verify,
    ];
    for seed in 0..40 {
        let steps = steps.clone().map(|op| Step { seed, ..calm(op) });
        replay_on(&Config::small(seed), &steps)
            .unwrap_or_else(|e| panic!("seed {seed}: {}", e.message));
    }
}

/// Seed 7004740: the head of a volume on a file was cut off, frozen, and grew again. Where the layer that was cut off has an
/// end, it hides the file nevertheless.
#[test]
fn a_layer_that_was_cut_off_may_hide_the_file_behind_its_end() {
    let steps = [
        Op::CreateVolume { vol: 2, sectors: 632 },
        Op::Rebuilding { vol: 2, on: true },
        Op::ResizeVolume { vol: 2, sectors: 32 },
        Op::CreateSnapshot { vol: 2, snap: 5, labels: 0 },
        Op::ResizeVolume { vol: 2, sectors: 448 },
        Op::CreateSnapshot { vol: 2, snap: 11, labels: 0 },
        Op::ClearLayer { vol: 2, snap: 11, start: 22, count: 7 },
        Op::Verify,
    ];
    let steps = steps.map(|op| Step { op, fate: Fate::Calm, seed: 1 });
    replay_on(&Config::small(1), &steps).unwrap_or_else(|e| panic!("{}", e.message));
}

/// A volume with a snapshot of all its content, on a disk that has no more space from then on, opened again
/// there or not.
fn full_after_a_snapshot(env: &Arc<SimEnv>, reopened: bool) -> (Arc<SimDisk>, Store) {
    let disk = Arc::new(small_store(env));
    let open =
        || Store::open_on(Arc::clone(&disk) as _, None, Arc::clone(env) as _, false).unwrap();
    let store = open();
    store.create_volume("v", 1 << 20).unwrap();
    store.volume("v").unwrap().write_at(0, &[1; 512 << 10], true).unwrap();
    if !reopened {
        store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
        disk.arm(Faults { enospc_from: Some(1), ..Faults::default() });
        return (disk, store);
    }
    // As if it had been full already when the snapshot was taken.
    disk.arm(Faults { enospc_from: Some(1), ..Faults::default() });
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    store.close().unwrap();
    let store = open();
    (disk, store)
}

#[test]
fn a_discard_over_a_snapshot_has_space_on_a_full_file_system() {
    let env = Arc::new(SimEnv::new(1));
    let (disk, store) = full_after_a_snapshot(&env, false);
    let allocated = store.info().allocated;
    let volume = store.volume("v").unwrap();
    volume.discard(0, 256 << 10).unwrap();
    volume.discard(300 << 10, 8 << 10).unwrap();
    volume.flush().unwrap();
    let mut found = [9; 4096];
    for at in [0, 252 << 10, 300 << 10] {
        volume.read_at(at, &mut found).unwrap();
        assert_eq!(found, [0; 4096], "at {at}");
    }
    // Nor may it take an extent of data: where all of them are in use there is none.
    assert_eq!(store.info().allocated, allocated);
    drop(volume);
    store.close().unwrap();
    assert!(Store::check_on(&*disk).unwrap().findings.is_empty());
}

#[test]
fn a_discard_without_space_for_it_succeeds() {
    let env = Arc::new(SimEnv::new(1));
    let (disk, store) = full_after_a_snapshot(&env, true);
    let volume = store.volume("v").unwrap();
    volume.discard(0, 256 << 10).unwrap();
    volume.discard(300 << 10, 8 << 10).unwrap();
    let mut found = [9; 4096];
    for at in [0, 252 << 10, 300 << 10] {
        volume.read_at(at, &mut found).unwrap();
        assert!(found == [0; 4096] || found == [1; 4096], "at {at}");
    }
    // Where zeros are demanded, that there is no space is an error.
    let error = volume.write_zeroes(0, 64 << 10, true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    disk.arm(Faults::default());
    volume.discard(0, 256 << 10).unwrap();
    volume.read_at(0, &mut found).unwrap();
    assert_eq!(found, [0; 4096], "once there is space");
    drop(volume);
    store.close().unwrap();
    assert!(Store::check_on(&*disk).unwrap().findings.is_empty());
}

/// The command that a failing history of trees printed ran another history, which passed.
#[test]
fn a_failing_history_of_trees_prints_its_option() {
    for (trees, option) in [(false, ""), (true, " --trees")] {
        let (config, message, stats) = (Config::small(7), String::new(), Stats::default());
        let failure = Failure { seed: 7, config, trees, steps: Vec::new(), message, stats };
        assert!(failure.to_string().ends_with(&format!("run --seed 7{option}")), "{failure}");
    }
}
