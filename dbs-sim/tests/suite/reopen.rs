//! What the next process finds after one that ended at an odd moment, and what it may build on.

use crate::hooked::Hooked;
use dbs_core::io::Storage;
use dbs_core::store::StartFlush;
use dbs_core::{ErrorKind, Store};
use dbs_sim::outcomes::{End, Outcomes};
use dbs_sim::perform::perform;
use dbs_sim::{
    CrashMode, Faults, Medium, Model, Op, SimDisk, SimEnv, TailPlace, threshold, verify,
};
use std::sync::Arc;

const BLOCK: usize = 4096;
const SIZE: u64 = 4 << 20;
/// Places of the superblock's copies.
const COPIES: [u64; 3] = [0, 4096, SIZE - 4096];
/// Where each says as of which group the store was closed.
const CLEAN_SEQUENCE: usize = 120;

/// A store with volume `v`, whose first block holds 1, closed.
fn closed(env: &Arc<SimEnv>) -> Arc<SimDisk> {
    let disk = Arc::new(SimDisk::new(Medium::file(SIZE), 1));
    Store::init_on(&*disk, &dbs_sim::Config::small(1).init, &**env).unwrap();
    let store = open(&disk, env).unwrap();
    disk.set_atomic_from(store.info().metadata);
    store.create_volume("v", 1 << 20).unwrap();
    store.volume("v").unwrap().write_at(0, &[1; BLOCK], false).unwrap();
    store.close().unwrap();
    disk
}

fn open(disk: &Arc<SimDisk>, env: &Arc<SimEnv>) -> dbs_core::Result<Store> {
    Store::open_on(Arc::clone(disk) as _, None, Arc::clone(env) as _, false)
        .map(dbs_sim::image::given)
}

fn first_byte(store: &Store) -> u8 {
    let mut block = [0; BLOCK];
    store.volume("v").unwrap().read_at(0, &mut block).unwrap();
    assert!(block.iter().all(|byte| *byte == block[0]), "a mix");
    block[0]
}

/// Opens a store, and dies as soon as anything has been written. How many writes that were.
fn die_opening(disk: &Arc<SimDisk>, env: &Arc<SimEnv>) -> u64 {
    let ending = Arc::clone(disk);
    disk.arm(Faults::default());
    disk.after_write(move || ending.stop());
    drop(open(disk, env));
    assert!(disk.stopped(), "opening writes nothing");
    let writes = disk.counts().writes;
    disk.revive();
    writes
}

/// Found by review: a vacuum that was cut off between the superblock and the file's end left that end for ever.
#[test]
fn a_vacuum_that_was_cut_off_is_gone_on_with() {
    let env = Arc::new(SimEnv::new(1));
    let closed = closed(&env);
    let mut longer = 0;
    for at in 1..99 {
        let disk = Arc::new(closed.fork());
        let store = open(&disk, &env).unwrap();
        disk.arm(Faults { stop_at: Some(at), ..Faults::default() });
        let vacuumed = store.vacuum(&mut |_, _| true);
        drop(store);
        disk.revive();
        let store = open(&disk, &env).unwrap();
        longer += u32::from(disk.size_bytes() > store.info().size);
        let size = store.vacuum(&mut |_, _| true).unwrap();
        assert_eq!((disk.size_bytes(), store.info().size), (size, size), "cut off at {at}");
        if vacuumed.is_ok() {
            assert!(size < SIZE && longer > 0, "{size}, {longer}");
            return;
        }
    }
    panic!("it never succeeds");
}

/// Processes that die when their first group is in the kernel's cache leave a journal that the next one
/// empties before anything else. The groups it reads must be durable by then: what it writes says that it
/// includes them.
#[test]
fn what_a_killed_process_did_not_flush_is_durable_before_recovery_builds_on_it() {
    let env = Arc::new(SimEnv::new(1));
    let disk = closed(&env);
    let store = open(&disk, &env).unwrap();
    store.volume("v").unwrap().write_at(0, &[2; BLOCK], true).unwrap();
    store.create_volume("w", 1 << 20).unwrap();
    drop(store);
    let mut rng = fastrand::Rng::with_seed(1);
    let mut emptied = 0;
    for died in 0..40 {
        die_opening(&disk, &env);
        let next = Arc::new(disk.fork());
        let writes = die_opening(&next, &env);
        // A group is one write, metadata blocks are several.
        emptied += u32::from(writes > 1);
        for image in 0..12 {
            let mode = CrashMode::random(&mut rng);
            let image_disk = Arc::new(next.crash_image(&mut rng, mode));
            let store = open(&image_disk, &env);
            let store =
                store.unwrap_or_else(|e| panic!("{died} died, image {image} {mode:?}: {e}"));
            assert_eq!((first_byte(&store), store.volumes(false).len()), (2, 2));
        }
    }
    assert!(emptied > 0, "no journal was ever short");
}

/// A number in each copy of the superblock.
fn in_copies(disk: &SimDisk, at: usize) -> [u64; 3] {
    COPIES.map(|copy| {
        let mut block = [0; BLOCK];
        disk.read_at(copy, &mut block).unwrap();
        u64::from_le_bytes(block[at..at + 8].try_into().unwrap())
    })
}

/// What a power loss left in the midst of closing: of the superblock only the second copy is new.
fn cut_off_closing(env: &Arc<SimEnv>) -> SimDisk {
    let closed = closed(env);
    for changes in 1..40 {
        let disk = Arc::new(closed.fork());
        let store = open(&disk, env).unwrap();
        disk.arm(Faults { stop_at: Some(changes), ..Faults::default() });
        let _cut_off = store.close();
        for seed in 0..40 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let image = disk.crash_image(&mut rng, CrashMode::Writes);
            let [first, second, last] = in_copies(&image, CLEAN_SEQUENCE);
            if second > first && first == last {
                return image;
            }
        }
    }
    panic!("closing writes all copies at once");
}

/// The copy at the end could not be written again when it was older than the others, as a file system
/// that writes elsewhere was full. It stays behind, whole, while the others go on: its sequence says so.
#[test]
fn a_copy_of_the_superblock_that_was_left_behind_does_not_count() {
    let env = Arc::new(SimEnv::new(1));
    let disk = Arc::new(cut_off_closing(&env));
    let hooked = Hooked::new(&disk);
    hooked.full_at(COPIES[2]);
    let store = Store::open_on(hooked, None, Arc::clone(&env) as _, false)
        .map(dbs_sim::image::given)
        .unwrap();
    store.volume("v").unwrap().write_at(0, &[2; BLOCK], false).unwrap();
    store.create_volume("w", 1 << 20).unwrap();
    let metadata = store.info().metadata;
    store.close().unwrap();
    let [first, second, last] = in_copies(&disk, CLEAN_SEQUENCE);
    assert!(first == second && second > last, "{first}, {second}, {last}");
    // A store that was closed needs nothing of its journal: to whoever goes by the old copy it is all there is.
    for at in (COPIES[1] + 4096..metadata).step_by(BLOCK) {
        let mut block = [0; BLOCK];
        disk.read_at(at, &mut block).unwrap();
        if block[..4] == *b"DBSj" {
            disk.write_at(at, &[0; BLOCK]).unwrap();
        }
    }
    let store = open(&disk, &env).unwrap();
    assert_eq!((first_byte(&store), store.volumes(false).len()), (2, 2));
    store.close().unwrap();
    let report = Store::check_on(&*disk).unwrap();
    assert!(report.findings.is_empty(), "{report:?}");
}

/// A session that has made no group but those of its opening.
#[test]
fn a_tail_that_is_gone_is_missed_whatever_the_session_did() {
    let env = Arc::new(SimEnv::new(1));
    let disk = closed(&env);
    for writes in [false, true] {
        let place = TailPlace::default();
        let tail = Some(place.attach(&disk));
        let store = Store::open_on(Arc::clone(&disk) as _, tail, Arc::clone(&env) as _, false)
            .map(dbs_sim::image::given);
        let store = store.unwrap();
        if writes {
            store.volume("v").unwrap().write_at(512 << 10, &[3; BLOCK], false).unwrap();
        }
        disk.stop();
        place.kill();
        drop(store);
        disk.revive();
        place.lose();
        let store = open(&disk, &env).unwrap();
        let warnings = store.info().warnings;
        assert!(warnings.iter().any(|text| text.contains("its tail is gone")), "{warnings:?}");
    }
}

/// A device that has forgotten a flush.
struct Forgetful {
    disk: Arc<SimDisk>,
    store: Store,
    model: Model,
    /// The disk before the flush that came next.
    before_next: SimDisk,
}

/// The state that the threshold cases begin with, and what these commands do to it, on a disk that answers
/// the `nth` flush from there on and does not do it; none if no other comes after it.
fn with_a_forgotten_flush(nth: u64) -> Option<Forgetful> {
    let env = Arc::new(SimEnv::new(1));
    let disk = Arc::new(SimDisk::new(Medium::file(SIZE), 1));
    Store::init_on(&*disk, &dbs_sim::Config::small(1).init, &*env).unwrap();
    let hooked = Hooked::new(&disk);
    let store = Store::open_on(Arc::clone(&hooked) as _, None, env, false)
        .map(dbs_sim::image::given)
        .unwrap();
    disk.set_atomic_from(store.info().metadata);
    let mut model = Model::default();
    let ops = [
        Op::Write { vol: 0, at: 0, len: 300, fua: true },
        Op::DeleteSnapshot { vol: 0, snap: 1 },
        Op::Work { steps: 100 },
        Op::CreateSnapshot { vol: 0, snap: 3, labels: 203 },
        Op::Write { vol: 0, at: 100, len: 300, fua: true },
        Op::DeleteVolume { vol: 2 },
        Op::CreateVolume { vol: 3, sectors: 512 },
        Op::Write { vol: 3, at: 0, len: 512, fua: true },
    ];
    let base = threshold::base();
    let (send, next) = std::sync::mpsc::channel();
    for (number, op) in (1..).zip(base.iter().chain(&ops)) {
        if number == base.len() as u32 + 1 {
            store.flush().unwrap();
            disk.arm(Faults { forget_flush_at: Some(nth), ..Faults::default() });
            let (disk, send) = (Arc::clone(&disk), send.clone());
            hooked.on_flush(nth + 1, move || send.send(disk.fork()).unwrap());
        }
        model.apply(op, number).unwrap();
        perform(&store, op, model.tag(op, number)).unwrap();
    }
    let before_next = next.try_recv().ok()?;
    Some(Forgetful { disk, store, model, before_next })
}

/// A device that forgets one flush breaks what all promises rest on: after a power loss right then, anything may
/// be lost, and some of it is noticed. It is never a panic. The next flush makes up for it.
#[test]
fn a_flush_that_the_device_forgets_is_made_up_for_by_the_next() {
    let mut rng = fastrand::Rng::with_seed(1);
    let (mut flushes, mut refused, mut opened) = (0, 0, 0);
    for nth in 1.. {
        let Some(Forgetful { disk, store, mut model, before_next }) = with_a_forgotten_flush(nth)
        else {
            break;
        };
        flushes += 1;
        for _ in 0..12 {
            let mode = CrashMode::random(&mut rng);
            let image = Arc::new(before_next.crash_image(&mut rng, mode));
            match open(&image, &Arc::new(SimEnv::new(2))) {
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "flush {nth}, {mode:?}: {error}");
                    refused += 1;
                }
                Ok(store) => {
                    store.check().unwrap();
                    opened += 1;
                }
            }
        }
        store.flush().unwrap();
        model.settle();
        let outcomes = Outcomes::settled(&model);
        for _ in 0..6 {
            let mode = CrashMode::random(&mut rng);
            let image = Arc::new(disk.crash_image(&mut rng, mode));
            let store = open(&image, &Arc::new(SimEnv::new(2))).unwrap();
            let compared = outcomes.compare(&store, End::PowerLost).map(drop);
            compared
                .and_then(|()| verify::check(&store))
                .unwrap_or_else(|e| panic!("flush {nth}, and one more, {mode:?}: {e}"));
        }
    }
    println!("{flushes} flushes forgotten: {refused} images refused, {opened} opened");
    assert!(flushes > 12 && refused > 0 && opened > 0);
}

/// Where a flush fails whose failure the kernel tells once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FailedFlush {
    /// In a commit.
    Commit,
    /// In a flush that a reactor does.
    Reactor,
    /// In the flush that the next process begins with.
    NextOpen,
}

/// Found by review: a flush that fails loses data that the tail's records point to, and its failure is told once. The
/// next process in this boot flushed without an error and replayed the tail: it mapped blocks that were
/// never stored, and showed what they had held before, another volume's bytes among them.
#[test]
fn a_tail_does_not_outlive_a_flush_that_failed() {
    for at in [FailedFlush::Commit, FailedFlush::Reactor, FailedFlush::NextOpen] {
        let env = Arc::new(SimEnv::new(1));
        let medium = Medium { garbage: true, ..Medium::file(SIZE) };
        let disk = Arc::new(SimDisk::new(medium, 1));
        let init = dbs_core::InitOptions { checksums: false, ..dbs_sim::Config::small(1).init };
        Store::init_on(&*disk, &init, &*env).unwrap();
        let place = TailPlace::default();
        let with_tail = || {
            let tail = Some(place.attach(&disk));
            Store::open_on(Arc::clone(&disk) as _, tail, Arc::clone(&env) as _, false)
        };
        let store = with_tail().unwrap();
        store.create_volume("v", 1 << 20).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &[1; 4 * BLOCK], true).unwrap();
        let eio = || Faults { eio_at: Some(1), ..Faults::default() };
        let write_all = || volume.write_at(0, &[2; 1 << 20], false).unwrap();
        match at {
            FailedFlush::Commit => {
                write_all();
                disk.arm(eio());
                assert!(volume.flush().is_err());
                assert!(
                    volume.write_at(0, &[3; BLOCK], false).is_err(),
                    "it rests on what is gone"
                );
            }
            FailedFlush::Reactor => {
                let (mut asked, wake) = (Default::default(), Arc::new(|| {}));
                let start = volume.start_flush(&mut asked, &(wake as _)).unwrap();
                let StartFlush::Io(flush) = start else { panic!("there is something to commit") };
                write_all();
                disk.arm(eio());
                assert!(flush.finish(disk.flush()).is_err());
            }
            FailedFlush::NextOpen => write_all(),
        }
        disk.stop();
        place.kill();
        drop((volume, store));
        disk.revive();
        if at == FailedFlush::NextOpen {
            disk.arm(eio());
            assert!(with_tail().is_err());
        }
        disk.arm(Faults::default());
        disk.forget_lost();
        let store = with_tail().unwrap();
        for block in 0..(1 << 20) / BLOCK {
            let mut found = [0; BLOCK];
            let read = store.volume("v").unwrap();
            read.read_at((block * BLOCK) as u64, &mut found).unwrap();
            let first = if block < 4 { 1 } else { 0 };
            let right = [first, 2].map(|byte| [byte; BLOCK]).contains(&found);
            assert!(right, "{at:?}: block {block} holds what nobody wrote");
        }
        let warnings = store.info().warnings;
        assert!(warnings.iter().any(|text| text.contains("its tail is gone")), "{warnings:?}");
    }
}

/// Found by review: a repair that goes on without a group which is lost replayed the tail all the same, over the hole:
/// records of blocks came upon entries of other owners. Of the last group nobody knows what the tail had no room for.
#[test]
fn a_tail_is_not_replayed_over_a_group_that_is_lost() {
    const EXTENT: u64 = 64 << 10;
    for (is_last, shown) in [(false, [1, 0, 0, 0]), (true, [1, 2, 0, 0])] {
        let env = Arc::new(SimEnv::new(1));
        let disk = closed(&env);
        let place = TailPlace::default();
        let tail = Some(place.attach(&disk));
        let store = Store::open_on(Arc::clone(&disk) as _, tail, Arc::clone(&env) as _, false)
            .map(dbs_sim::image::given)
            .unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(EXTENT, &[2; BLOCK], true).unwrap();
        let first = store.info().sequence;
        volume.write_at(2 * EXTENT, &[3; BLOCK], true).unwrap();
        let last = store.info().sequence;
        assert!(last > first);
        volume.write_at(3 * EXTENT, &[4; BLOCK], false).unwrap();
        let metadata = store.info().metadata;
        disk.stop();
        place.kill();
        drop((volume, store));
        disk.revive();
        let lost = if is_last { last } else { first };
        let mut block = [0; BLOCK];
        for at in (0..metadata).step_by(BLOCK) {
            disk.read_at(at, &mut block).unwrap();
            if block[..4] == *b"DBSj" && block[16..24] == lost.to_le_bytes() {
                // One that is gone is missed by its number, but for the last one.
                let (range, byte) = if is_last { (64..65, 0xff) } else { (0..BLOCK, 0) };
                block[range].fill(byte);
                disk.write_at(at, &block).unwrap();
            }
        }
        let mut tail = place.attach(&disk);
        let repair = Store::plan_repair_on(&*disk, Some(&mut *tail), &*env, true).unwrap();
        let steps = repair.report().steps.clone();
        assert!(steps.iter().any(|step| step.message.contains("tail is left out")), "{steps:?}");
        repair.carry_out(&*disk).unwrap();
        drop(tail);
        let store = open(&disk, &env).unwrap();
        let volume = store.volume("v").unwrap();
        for (extent, wanted) in (0..).zip(shown) {
            volume.read_at(extent * EXTENT, &mut block).unwrap();
            assert_eq!(block, [wanted; BLOCK], "extent {extent}");
        }
    }
}

/// Found by review: a step of background work or a discard made a group longer than an eighth of a small journal,
/// which is what there is room for in any case; and what a kill left of it and of the next group, all of which
/// the next process puts into one group, was twice as long. Where that had no room, the store could not be opened any more.
#[test]
fn what_a_tail_holds_fits_the_journal() {
    const EXTENT: u64 = 4 << 20;
    const EXTENTS: u64 = 1200;
    const SIZE: u64 = 6 << 30;
    const SEEDS: u64 = 6;
    let env = Arc::new(SimEnv::new(1));
    let disk = Arc::new(SimDisk::new(Medium::file(SIZE), 1));
    let init = dbs_core::InitOptions {
        size: Some(SIZE),
        max_size: Some(SIZE),
        extent_size: EXTENT,
        checksums: false,
        ..dbs_sim::Config::small(1).init
    };
    Store::init_on(&*disk, &init, &*env).unwrap();
    let store = open(&disk, &env).unwrap();
    for (name, extents) in [("v", EXTENTS), ("u", 100)] {
        store.create_volume(name, EXTENTS * EXTENT).unwrap();
        let volume = store.volume(name).unwrap();
        (0..extents).for_each(|at| volume.write_at(at * EXTENT, &[1; BLOCK], false).unwrap());
    }
    store.create_snapshot("u", "s", &Default::default()).unwrap();
    store.delete_snapshot("u", "s").unwrap();
    store.close().unwrap();
    for (seed, ends) in (0..SEEDS).flat_map(|seed| [(seed, 1), (seed, 2)]) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let disk = Arc::new(disk.fork());
        let hooked = Hooked::new(&disk);
        let place = TailPlace::default();
        let tail = Some(place.attach(&disk));
        let store = Store::open_on(hooked.clone(), tail, Arc::clone(&env) as _, false).unwrap();
        let volume = store.volume("v").unwrap();
        let write = |volume: &dbs_core::Volume, block: u64| {
            let at = block % 50 * EXTENT + (1 + block / 50) * 2 * BLOCK as u64;
            volume.write_at(at, &[2; BLOCK], false)
        };
        // So that the ring is as full as it gets, and its end comes at any place.
        let mut next = 2000;
        for _ in 0..rng.u64(10..30) {
            let end = next + rng.u64(100..590);
            (next..end).for_each(|block| write(&volume, block).unwrap());
            next = end;
            volume.flush().unwrap();
        }
        // As much as is recorded without a commit.
        (0..590).for_each(|block| write(&volume, block).unwrap());
        let (worker, ending) = (volume.clone(), Arc::clone(&disk));
        hooked.on_flush(ends, move || {
            // It may have to wait for the commit that this is in, and fails then.
            let worked = std::thread::spawn(move || {
                (1000..1590).try_for_each(|block| write(&worker, block))?;
                worker.discard(0, 1024 * EXTENT)
            });
            for _ in 0..40 {
                std::thread::sleep(std::time::Duration::from_millis(1));
                if worked.is_finished() {
                    break;
                }
            }
            if ends == 2 {
                ending.flush().unwrap();
            }
            ending.stop();
        });
        assert!(store.work(100).is_err(), "it commits");
        place.kill();
        drop((volume, store));
        while place.attached() {
            std::thread::yield_now();
        }
        disk.revive();
        let tail = Some(place.attach(&disk));
        let store = Store::open_on(Arc::clone(&disk) as _, tail, Arc::clone(&env) as _, false);
        let metadata = store.unwrap_or_else(|error| panic!("seed {seed}: {error}")).info().metadata;
        let mut block = [0; BLOCK];
        for at in (0..metadata).step_by(BLOCK) {
            disk.read_at(at, &mut block).unwrap();
            let blocks = u32::from_le_bytes(block[44..48].try_into().unwrap());
            let fits = block[..4] != *b"DBSj" || blocks <= 32 / 8;
            assert!(fits, "seed {seed}, flush {ends}: a group of {blocks} blocks");
        }
    }
}

/// Volumes of a discard that comes when the group is nearly as long as one gets, and how long a group is made before it.
const EXTENT: u64 = 64 << 10;
const DISCARDED: u64 = 64;

/// The disk on which the power went when such a discard had been answered: `v`, whose parent has data everywhere and
/// whose head has a block in each extent, was discarded behind so many writes of others.
fn discarded_behind(writes: u64, env: &Arc<SimEnv>) -> SimDisk {
    const DISK: u64 = 64 << 20;
    let disk = Arc::new(SimDisk::new(Medium::file(DISK), 1));
    let small = dbs_sim::Config::small(1).init;
    let init =
        dbs_core::InitOptions { size: Some(DISK), max_size: None, checksums: false, ..small };
    Store::init_on(&*disk, &init, &**env).unwrap();
    let place = TailPlace::default();
    let tail = Some(place.attach(&disk));
    let store = Store::open_on(Arc::clone(&disk) as _, tail, Arc::clone(env) as _, false).unwrap();
    disk.set_atomic_from(store.info().metadata);
    store.create_volume("v", DISCARDED * EXTENT).unwrap();
    store.create_volume("w", 512 * EXTENT).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &vec![1; (DISCARDED * EXTENT) as usize], false).unwrap();
    store.create_snapshot("v", "below", &Default::default()).unwrap();
    for extent in 0..DISCARDED {
        volume.write_at(extent * EXTENT, &[2; BLOCK], false).unwrap();
    }
    store.flush().unwrap();
    let others = store.volume("w").unwrap();
    for extent in 0..writes {
        others.write_at(extent * EXTENT, &[3; BLOCK], false).unwrap();
    }
    volume.discard(0, DISCARDED * EXTENT).unwrap();
    let image = disk.crash_image(&mut fastrand::Rng::with_seed(writes), CrashMode::Lost);
    disk.stop();
    place.kill();
    image
}

/// Found by review: a group could end between the run of zeros that a discard lays and the entries inside it that it gives
/// up. After a power loss there were entries with absent blocks inside a run: they showed the parent's data, and
/// zeros as soon as something was merged.
#[test]
fn a_discard_is_cut_by_no_group_between_its_run_and_its_entries() {
    let mut kept = 0;
    for writes in (0..440).step_by(8) {
        let env = Arc::new(SimEnv::new(1));
        let image = Arc::new(discarded_behind(writes, &env));
        let store = open(&image, &env).unwrap();
        let volume = store.volume("v").unwrap();
        let read = || {
            let mut found = vec![0; (DISCARDED * EXTENT) as usize];
            volume.read_at(0, &mut found).unwrap();
            found
        };
        let before = read();
        assert!(before.iter().all(|byte| *byte <= 2));
        kept += usize::from(before.iter().any(|byte| *byte > 0));
        store.create_snapshot("v", "above", &Default::default()).unwrap();
        store.delete_snapshot("v", "above").unwrap();
        for _ in 0..8 {
            store.work(64).unwrap();
            store.flush().unwrap();
        }
        assert!(read() == before, "behind {writes} writes: a merge changed what the volume shows");
    }
    assert!(kept > 0, "a discard that is not durable may be lost");
}
