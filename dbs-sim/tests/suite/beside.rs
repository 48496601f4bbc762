//! One call amid another, at a moment that histories do not reach: each fails under an edit of dbs-core
//! that all other tests let pass when a reviewer planted it.

use crate::hooked::Hooked;
use dbs_core::io::Storage;
use dbs_core::volume::{Request, Start};
use dbs_core::{ErrorKind, InitOptions, Store};
use dbs_sim::{CrashMode, Faults, Medium, SimDisk, SimEnv, TailPlace};
use std::io;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

const BLOCK: u64 = 4096;
const EXTENT: u64 = 64 << 10;
/// How long a call beside another may take to ask for what it needs.
const HEAD_START: Duration = Duration::from_millis(20);

struct Bench {
    disk: Arc<SimDisk>,
    hooked: Arc<Hooked>,
    store: Store,
    // Keeps the tail.
    _place: TailPlace,
}

fn bench() -> Bench {
    bench_with(true)
}

fn bench_with(checksums: bool) -> Bench {
    let init = InitOptions { checksums, ..dbs_sim::Config::small(1).init };
    let disk = Arc::new(SimDisk::new(Medium::file(4 << 20), 1));
    let env = Arc::new(SimEnv::new(1));
    Store::init_on(&*disk, &init, &*env).unwrap();
    let hooked = Hooked::new(&disk);
    let place = TailPlace::default();
    let storage: Arc<dyn Storage> = Arc::clone(&hooked) as _;
    let store = Store::open_on(storage, Some(place.attach(&disk)), env, false).unwrap();
    disk.set_atomic_from(store.info().metadata);
    Bench { disk, hooked, store, _place: place }
}

/// What a power loss leaves, opened.
fn after_power_loss(disk: &SimDisk) -> Store {
    let image = disk.crash_image(&mut fastrand::Rng::with_seed(1), CrashMode::Kept);
    Store::open_on(Arc::new(image), None, Arc::new(SimEnv::new(2)), false).unwrap()
}

fn block(store: &Store, at: u64) -> u8 {
    let mut bytes = [9; BLOCK as usize];
    store.volume("v").unwrap().read_at(at * BLOCK, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mix");
    bytes[0]
}

/// A write on its way into a fresh extent, and zeroes beside it that are acknowledged as durable.
fn zeroes_beside_a_write(store: &Store) -> Request {
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; 128 << 10], true).unwrap();
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    volume.write_at(64 << 10, &[2; BLOCK as usize], true).unwrap();
    let mut request = Request::new();
    assert_eq!(volume.start_write(0, BLOCK, &mut request).unwrap(), Start::Io);
    volume.write_zeroes(2 * BLOCK, BLOCK, true).unwrap();
    assert_eq!(block(store, 2), 0);
    request
}

#[test]
fn zeroes_beside_a_write_on_its_way_survive_power_loss() {
    let bench = bench();
    let mut request = zeroes_beside_a_write(&bench.store);
    assert_eq!(block(&after_power_loss(&bench.disk), 2), 0, "the snapshot's data is back");
    request.cancel();
}

#[test]
fn zeroes_beside_a_write_that_fails_stay() {
    let bench = bench();
    let mut request = zeroes_beside_a_write(&bench.store);
    assert!(request.finish_write(Err(io::Error::from_raw_os_error(5))).is_err());
    assert_eq!(block(&bench.store, 2), 0, "undone by somebody else's failed write");
}

#[test]
fn a_write_amid_a_vacuum_that_cuts_the_end_off_stays() {
    let Bench { disk, hooked, store, _place } = bench();
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; 64 << 10], true).unwrap();
    let inside = (store.clone(), volume.clone());
    hooked.on_allocate(move || {
        inside.1.write_at(512 << 10, &[7; 256 << 10], false).unwrap();
        inside.0.flush().unwrap();
    });
    store.vacuum(&mut |_, _| true).unwrap();
    assert!(hooked.is_done(), "nothing was reserved");
    let check = |store: &Store, when: &str| {
        (128..192).for_each(|at| assert_eq!(block(store, at), 7, "lost {when}"));
    };
    check(&store, "at once");
    drop((volume, store));
    check(&after_power_loss(&disk), "after a power loss");
}

/// With checksums the block is read again, as it has changed meanwhile; without, only a second look tells.
#[test]
fn what_was_cut_off_while_a_volume_grows_stays_gone() {
    for checksums in [true, false] {
        let Bench { disk, store, .. } = bench_with(checksums);
        let end = 3 * BLOCK + 512;
        store.create_volume("v", end).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &vec![1; end as usize], true).unwrap();
        let inside = (store.clone(), volume.clone());
        disk.after_read(1, move || {
            inside.0.resize_volume("v", 4 * BLOCK).unwrap();
            inside.1.write_at(end, &[7; 512], true).unwrap();
            inside.0.resize_volume("v", end).unwrap();
        });
        store.resize_volume("v", 8 * BLOCK).unwrap();
        assert!(!disk.awaits_read());
        let mut found = [9; 512];
        volume.read_at(end, &mut found).unwrap();
        assert_eq!(found, [0; 512], "bytes that a shrink had cut off are back");
    }
}

/// Below that many layers there is a table by block.
#[test]
fn an_overwrite_above_ten_snapshots_is_read() {
    let bench = bench();
    let store = &bench.store;
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    for n in 0..10_u8 {
        volume.write_at(u64::from(n) * BLOCK, &[n + 1; BLOCK as usize], false).unwrap();
        store.create_snapshot("v", &format!("s{n}"), &Default::default()).unwrap();
    }
    volume.write_at(15 * BLOCK, &[99; BLOCK as usize], false).unwrap();
    (0..10).for_each(|n| assert_eq!(block(store, n), n as u8 + 1));
    volume.write_at(0, &[77; BLOCK as usize], false).unwrap();
    assert_eq!(block(store, 0), 77, "an acknowledged overwrite is not read back");
}

/// A write on its way: which block, and the byte it writes.
struct Flying {
    block: u64,
    byte: u8,
    request: Request,
}

/// Writes of single blocks into few extents, several on their way at once, which end in any order: some
/// fail, done or not done. What a block may hold, by its number.
fn many_on_their_way(bench: &Bench, rng: &mut fastrand::Rng) -> Vec<Vec<u8>> {
    const BLOCKS: usize = 64;
    let Bench { disk, store, .. } = bench;
    for name in ["v", "w"] {
        store.create_volume(name, 1 << 20).unwrap();
    }
    let (volume, other) = (store.volume("v").unwrap(), store.volume("w").unwrap());
    other.write_at(0, &[0xee; BLOCK as usize], true).unwrap();
    let mut may = vec![vec![0_u8]; BLOCKS];
    let mut flying: Vec<Flying> = Vec::new();
    for step in 1..60 {
        let begins = rng.u8(0..5) < 3;
        if begins && step < 50 {
            let (block, byte) = (rng.u64(..BLOCKS as u64), step);
            let mut request = Request::new();
            if flying.iter().all(|flying| flying.block != block)
                && volume.start_write(block * BLOCK, BLOCK, &mut request).unwrap() == Start::Io
            {
                request.seal(&[byte; BLOCK as usize]);
                flying.push(Flying { block, byte, request });
            }
        } else if !flying.is_empty() {
            let Flying { block, byte, mut request } = flying.swap_remove(rng.usize(..flying.len()));
            let may = &mut may[block as usize];
            let fails = rng.bool();
            if !fails || rng.bool() {
                disk.write_at(request.segments()[0].device, &[byte; BLOCK as usize]).unwrap();
                may.push(byte);
            }
            if fails {
                assert!(request.finish_write(Err(io::Error::from_raw_os_error(5))).is_err());
            } else {
                let _ = request.finish_write(Ok(())).unwrap();
                *may = vec![byte];
            }
        }
        if rng.u8(0..4) == 0 {
            // Somebody else takes the free extents.
            other.write_at(u64::from(step % 16) * EXTENT, &[0xee; BLOCK as usize], false).unwrap();
        }
    }
    for mut last in flying {
        disk.write_at(last.request.segments()[0].device, &[last.byte; BLOCK as usize]).unwrap();
        let _ = last.request.finish_write(Ok(())).unwrap();
        may[last.block as usize] = vec![last.byte];
    }
    may
}

/// An extent that is new to several writes stays theirs when one of them fails.
#[test]
fn writes_that_fail_beside_others_cost_these_nothing() {
    for seed in 0..100 {
        let bench = bench();
        let may = many_on_their_way(&bench, &mut fastrand::Rng::with_seed(seed));
        let check = |store: &Store, when: &str| {
            for (at, may) in (0..).zip(&may) {
                let found = block(store, at);
                assert!(
                    may.contains(&found),
                    "seed {seed}, block {at} {when}: {found}, not {may:?}"
                );
            }
            let report = store.check().unwrap();
            assert!(report.worst().is_none(), "seed {seed}, {when}: {report:?}");
        };
        check(&bench.store, "at once");
        bench.store.flush().unwrap();
        check(&after_power_loss(&bench.disk), "after a power loss");
    }
}

/// On a store that is full but for what is being given back to the device, and a little more.
#[test]
fn what_is_being_given_back_to_the_device_is_given_to_nobody() {
    for seed in 0..20 {
        let Bench { hooked, store, .. } = bench();
        let mut rng = fastrand::Rng::with_seed(seed);
        store.create_volume("v", 8 << 20).unwrap();
        let volume = store.volume("v").unwrap();
        let whole = |extent: u64, byte| volume.write_at(extent * EXTENT, &[byte; 64 << 10], false);
        let full = (0..128).find(|extent| whole(*extent, 1).is_err()).unwrap();
        // One step gives sixteen back: these are left.
        let left = rng.u64(1..5);
        let mut extents: Vec<u64> = (0..full).collect();
        rng.shuffle(&mut extents);
        for extent in &extents[..16 + left as usize] {
            volume.discard(extent * EXTENT, EXTENT).unwrap();
        }
        store.flush().unwrap();
        let inside = volume.clone();
        hooked.on_discard(move || {
            for extent in full..full + left {
                inside.write_at(extent * EXTENT, &[7; EXTENT as usize], true).unwrap();
            }
        });
        store.work(1).unwrap();
        assert!(hooked.is_done(), "nothing was given back");
        for at in full * 16..(full + left) * 16 {
            assert_eq!(block(&store, at), 7, "seed {seed}: block {at} was punched");
        }
    }
}

/// A write that comes amid a commit, at its first flush or at its second, and asks for the next one.
#[test]
fn who_asks_for_a_commit_while_one_runs_is_told_of_the_next() {
    for nth in [1, 2].repeat(4) {
        let Bench { disk, store, .. } = bench();
        store.create_volume("v", 1 << 20).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &[1; BLOCK as usize], false).unwrap();
        let (send, late) = mpsc::channel();
        let inside = (Arc::clone(&disk), volume.clone());
        let ask = move || {
            let (disk, volume) = inside;
            let asking = std::thread::spawn(move || {
                volume.write_at(8 * EXTENT, &[2; BLOCK as usize], true).unwrap();
                // What was not flushed is lost.
                disk.crash_image(&mut fastrand::Rng::with_seed(1), CrashMode::Lost)
            });
            // If the commit is over before it has asked, that shows nothing, and is no error.
            std::thread::sleep(HEAD_START);
            send.send(asking).unwrap();
        };
        if nth == 1 {
            disk.in_flush(ask);
        } else {
            let again = Arc::clone(&disk);
            disk.in_flush(move || again.in_flush(ask));
        }
        volume.flush().unwrap();
        let image = late.recv().unwrap().join().unwrap();
        let store = Store::open_on(Arc::new(image), None, Arc::new(SimEnv::new(2)), false).unwrap();
        assert_eq!(block(&store, 8 * 16), 2, "acknowledged as durable, and lost (flush {nth})");
    }
}

/// Calls `call` amid the next flush, from a thread of its own, and lets it come as far as it can by then.
fn amid_the_next_flush<T: Send + 'static>(
    disk: &SimDisk,
    call: impl FnOnce() -> T + Send + 'static,
) -> mpsc::Receiver<JoinHandle<T>> {
    let (send, called) = mpsc::channel();
    disk.in_flush(move || {
        let calling = std::thread::spawn(call);
        std::thread::sleep(HEAD_START);
        send.send(calling).unwrap();
    });
    called
}

/// Found by injecting faults under load: the next commit wrote its group behind the one that was
/// missing, its callers were told that they were durable, and the store could not be opened.
#[test]
fn who_waits_for_a_commit_that_fails_commits_nothing() {
    let Bench { disk, store, .. } = bench();
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; BLOCK as usize], true).unwrap();
    volume.write_at(BLOCK, &[1; BLOCK as usize], false).unwrap();
    let inside = volume.clone();
    let second = amid_the_next_flush(&disk, move || {
        inside.write_at(2 * BLOCK, &[1; BLOCK as usize], false).and_then(|()| inside.flush())
    });
    // The flush of the data, the write of whoever comes meanwhile, and then what is committed.
    disk.arm(Faults { eio_at: Some(3), ..Faults::default() });
    assert_eq!(volume.flush().unwrap_err().kind(), ErrorKind::Io);
    let second = second.recv().unwrap().join().unwrap();
    assert_eq!(second.unwrap_err().kind(), ErrorKind::Poisoned);
    drop((store, volume));
    Store::open_on(Arc::new(disk.fork()), None, Arc::new(SimEnv::new(2)), false).unwrap();
}

/// Opening pages of checksums flushes, and so do commits. The kernel says once that it failed.
#[test]
fn who_flushes_beside_a_flush_that_fails_is_told_too() {
    let Bench { disk, store, .. } = bench();
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; BLOCK as usize], true).unwrap();
    store.close_checksums(Duration::ZERO).unwrap();
    let inside = volume.clone();
    let beside = amid_the_next_flush(&disk, move || inside.flush());
    disk.arm(Faults { eio_at: Some(2), ..Faults::default() });
    let opening = volume.write_at(0, &[2; BLOCK as usize], false);
    let beside = beside.recv().unwrap().join().unwrap();
    assert_eq!(opening.unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(beside.unwrap_err().kind(), ErrorKind::Poisoned);
}
