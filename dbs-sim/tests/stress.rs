//! Many threads on one store: writers, readers, snapshotters, deleters, flushers. Not deterministic: the
//! threads run as they come, so a failure may need several runs to come back.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_core::io::{Storage, TailMemory};
use dbs_core::volume::{Finish, Read, Request, Start};
use dbs_core::{ErrorKind, Store, Volume};
use dbs_sim::{CrashMode, Medium, SimDisk, SimEnv, TailPlace};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const VOLUME_BLOCKS: u64 = 128;
const WRITERS: u64 = 4;
const RUN: Duration = Duration::from_secs(3);

/// A block says which volume and block it is of, and the sequence number of its write.
fn stamp(volume: u64, block: u64, sequence: u64) -> Vec<u8> {
    let mut buf = vec![0; BLOCK];
    for chunk in buf.chunks_exact_mut(32) {
        for (field, value) in chunk.chunks_exact_mut(8).zip([volume, block, sequence, !sequence]) {
            field.copy_from_slice(&value.to_le_bytes());
        }
    }
    buf
}

/// The sequence number, 0 for a block never written; panics on anything else or a mix.
fn sequence(volume: u64, block: u64, buf: &[u8]) -> u64 {
    let sequence = u64::from_le_bytes(buf[16..24].try_into().unwrap());
    if sequence == 0 {
        assert!(buf.iter().all(|b| *b == 0), "volume {volume} block {block}: torn or foreign");
    } else {
        let whole = buf == stamp(volume, block, sequence);
        let of = u64::from_le_bytes(buf[..8].try_into().unwrap());
        let at = u64::from_le_bytes(buf[8..16].try_into().unwrap());
        assert!(whole, "volume {volume} block {block}: torn, or of volume {of} block {at}");
    }
    sequence
}

/// What the threads share.
struct Shared {
    store: Store,
    disk: Arc<SimDisk>,
    stop: AtomicBool,
    /// Sequence numbers acknowledged and issued, by volume and block.
    acknowledged: Vec<Vec<AtomicU64>>,
    issued: Vec<Vec<AtomicU64>>,
    /// What a flush has made durable.
    durable: Mutex<BTreeMap<(u64, u64), u64>>,
    done: AtomicU64,
}

fn counters() -> Vec<Vec<AtomicU64>> {
    let volume = || (0..VOLUME_BLOCKS).map(|_| AtomicU64::new(0)).collect();
    (0..WRITERS).map(|_| volume()).collect()
}

impl Shared {
    fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// One thread for each half of each volume: a block has one writer, so its order is known.
    fn writer(&self, volume: u64, half: u64) {
        let mut rng = fastrand::Rng::with_seed(volume * 2 + half);
        let handle = self.store.volume(&format!("w{volume}")).unwrap();
        let mut next = 1;
        while self.running() {
            let block = rng.u64(0..VOLUME_BLOCKS / 2) * 2 + half;
            let (v, b) = (volume as usize, block as usize);
            self.issued[v][b].store(next, Ordering::SeqCst);
            let buf = stamp(volume, block, next);
            match self.write(&handle, block, &buf, rng.u8(0..50)) {
                Ok(()) => self.acknowledged[v][b].store(next, Ordering::SeqCst),
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    self.store.work(16).unwrap();
                }
                Err(error) => panic!("write: {error}"),
            }
            let found = sequence(volume, block, &self.read(&handle, block));
            assert!(found >= self.acknowledged[v][b].load(Ordering::SeqCst), "an older block");
            next += 1;
            self.done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reads what the writers of a volume are writing.
    fn reader(&self, volume: u64) {
        let mut rng = fastrand::Rng::with_seed(volume + 50);
        let handle = self.store.volume(&format!("w{volume}")).unwrap();
        while self.running() {
            let block = rng.u64(0..VOLUME_BLOCKS);
            let (v, b) = (volume as usize, block as usize);
            let least = self.acknowledged[v][b].load(Ordering::SeqCst);
            let found = sequence(volume, block, &self.read(&handle, block));
            let most = self.issued[v][b].load(Ordering::SeqCst);
            assert!(found >= least && found <= most, "{found} is not within {least} and {most}");
        }
    }

    /// Writes a block, mostly as a server does.
    fn write(&self, handle: &Volume, block: u64, buf: &[u8], lot: u8) -> dbs_core::Result<()> {
        let mut request = Request::new();
        let at = block * BLOCK as u64;
        if lot < 10 || handle.start_write(at, BLOCK as u64, &mut request)? != Start::Io {
            return handle.write_at(at, buf, lot == 0);
        }
        request.seal(buf);
        let written = self.disk.write_at(request.segments()[0].device, buf);
        match request.finish_write(written)? {
            Finish::Done => Ok(()),
            Finish::Commit => handle.flush(),
        }
    }

    /// Reads a block as a server does.
    fn read(&self, handle: &Volume, block: u64) -> Vec<u8> {
        let (mut request, mut buf) = (Request::new(), vec![0; BLOCK]);
        let at = block * BLOCK as u64;
        let done = match handle.start_read(at, BLOCK as u64, &mut request).unwrap() {
            Start::Io => {
                let read = self.disk.read_at(request.segments()[0].device, &mut buf);
                request.finish_read(read, &buf).unwrap() == Read::Done
            }
            Start::Done => true,
            Start::Blocked => false,
        };
        if !done {
            handle.read_at(at, &mut buf).unwrap();
        }
        buf
    }

    /// Takes snapshots, reads each twice, and deletes it.
    fn snapshotter(&self, volume: u64) {
        let name = format!("w{volume}");
        let mut round = 0;
        while self.running() {
            round += 1;
            let snap = format!("s{round}");
            let before: Vec<u64> = self.load(&self.acknowledged, volume);
            match self.store.create_snapshot(&name, &snap, &Default::default()) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    self.store.work(64).unwrap();
                    continue;
                }
                Err(error) => panic!("snapshot: {error}"),
            }
            let after = self.load(&self.issued, volume);
            let spec = format!("{name}@{snap}");
            let first = self.read_all(&spec, volume);
            for (block, found) in first.iter().enumerate() {
                assert!(*found >= before[block], "{spec} block {block} is older than the command");
                assert!(*found <= after[block], "{spec} block {block} is newer than the command");
            }
            std::thread::sleep(Duration::from_millis(3));
            assert!(self.read_all(&spec, volume) == first, "{spec} has changed");
            self.store.delete_snapshot(&name, &snap).unwrap();
        }
    }

    fn load(&self, counters: &[Vec<AtomicU64>], volume: u64) -> Vec<u64> {
        counters[volume as usize].iter().map(|c| c.load(Ordering::SeqCst)).collect()
    }

    fn read_all(&self, spec: &str, volume: u64) -> Vec<u64> {
        read_all(&self.store, spec, volume)
    }

    fn flusher(&self) {
        while self.running() {
            let mut seen = Vec::new();
            for volume in 0..WRITERS {
                for (block, value) in self.load(&self.acknowledged, volume).into_iter().enumerate()
                {
                    seen.push(((volume, block as u64), value));
                }
            }
            self.store.flush().unwrap();
            self.durable.lock().unwrap().extend(seen);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn worker(&self) {
        while self.running() {
            if self.store.work(8).unwrap().remaining == 0 {
                std::thread::sleep(Duration::from_millis(1));
                if self.store.checksums().is_some() {
                    let report = self.store.scrub(true, &mut |_| true).unwrap();
                    assert_eq!(report.damaged, 0, "{report:?}");
                }
            }
            self.store.close_checksums(Duration::ZERO).unwrap();
        }
    }

    /// Creates, clones and deletes volumes beside all this.
    fn creator(&self) {
        let mut rng = fastrand::Rng::with_seed(99);
        while self.running() {
            let made = self.store.create_volume("extra", 1 << 20).and_then(|_| {
                let handle = self.store.volume("extra")?;
                handle.write_at(0, &stamp(77, 0, 1), false)?;
                handle.discard(0, 1 << 19)?;
                handle.write_at(8192, &stamp(77, 2, 1), rng.bool())?;
                drop(handle);
                self.store.create_snapshot("extra", "s", &Default::default())?;
                self.store.clone_volume("extra", "s", "extra2")?;
                Ok(())
            });
            if let Err(error) = &made {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            }
            for name in ["extra", "extra2"] {
                match self.store.delete_volume(name) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => panic!("delete {name}: {error}"),
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn read_all(store: &Store, spec: &str, volume: u64) -> Vec<u64> {
    let mut buf = vec![0; BLOCK * VOLUME_BLOCKS as usize];
    store.volume(spec).unwrap().read_at(0, &mut buf).unwrap();
    buf.chunks_exact(BLOCK).zip(0..).map(|(b, i)| sequence(volume, i, b)).collect()
}

fn storage(
    checksums: bool,
    with_tail: bool,
    memory: Option<u64>,
) -> (Arc<SimDisk>, TailPlace, Store) {
    let disk = Arc::new(SimDisk::new(Medium::file(24 << 20), 5));
    let env = Arc::new(SimEnv::new(5));
    let options = dbs_core::InitOptions {
        size: Some(24 << 20),
        extent_size: 64 << 10,
        max_volumes: Some(16),
        max_snapshots: Some(64),
        journal_size: Some(256 << 10),
        checksums,
        ..Default::default()
    };
    Store::init_on(&*disk, &options, &*env).unwrap();
    let tail = TailPlace::default();
    let store = open(Arc::clone(&disk), with_tail.then(|| tail.attach(&disk)), memory);
    disk.set_atomic_from(store.info().metadata);
    (disk, tail, store)
}

fn open(disk: Arc<SimDisk>, tail: Option<Box<dyn TailMemory>>, memory: Option<u64>) -> Store {
    let disk: Arc<dyn Storage> = disk;
    Store::open_within(disk, tail, Arc::new(SimEnv::new(6)), false, memory).unwrap()
}

/// Opens crash images of the running store: what was flushed before must be there.
fn crash(shared: &Shared, disk: &SimDisk, rng: &mut fastrand::Rng) {
    let durable = shared.durable.lock().unwrap().clone();
    let mode = CrashMode::random(rng);
    let image = Arc::new(disk.crash_image(rng, mode));
    let issued: Vec<Vec<u64>> = (0..WRITERS).map(|v| shared.load(&shared.issued, v)).collect();
    let store = open(image, None, Some(0));
    for volume in 0..WRITERS {
        for (block, found) in read_all(&store, &format!("w{volume}"), volume).iter().enumerate() {
            let least = durable.get(&(volume, block as u64)).copied().unwrap_or(0);
            assert!(*found >= least, "{mode:?}: volume {volume} block {block}: {found} < {least}");
            assert!(*found <= issued[volume as usize][block], "from the future");
        }
    }
    let report = store.check().unwrap();
    assert!(report.worst() < Some(dbs_core::info::Severity::Leak), "{mode:?}: {report:#?}");
}

#[test]
fn threads_do_not_disturb_each_other() {
    println!("not deterministic: threads run as they come");
    for (checksums, with_tail) in [(false, true), (true, true), (true, false)] {
        disturb(checksums, with_tail, None);
    }
}

/// As above, with no memory for bitmaps of extents: they leave and come back all the time.
#[test]
fn threads_do_not_disturb_each_other_when_memory_is_short() {
    for (checksums, with_tail) in [(false, true), (true, false)] {
        disturb(checksums, with_tail, Some(0));
    }
}

fn disturb(checksums: bool, with_tail: bool, memory: Option<u64>) {
    let (disk, tail, store) = storage(checksums, with_tail, memory);
    for volume in 0..WRITERS {
        store.create_volume(&format!("w{volume}"), VOLUME_BLOCKS * BLOCK as u64).unwrap();
    }
    let shared = Shared {
        store,
        disk: Arc::clone(&disk),
        stop: AtomicBool::new(false),
        acknowledged: counters(),
        issued: counters(),
        durable: Mutex::default(),
        done: AtomicU64::new(0),
    };
    let mut images = 0;
    std::thread::scope(|scope| {
        let shared = &shared;
        let mut threads = Vec::new();
        for volume in 0..WRITERS {
            threads.push(scope.spawn(move || shared.writer(volume, 0)));
            threads.push(scope.spawn(move || shared.writer(volume, 1)));
            threads.push(scope.spawn(move || shared.reader(volume)));
            threads.push(scope.spawn(move || shared.snapshotter(volume)));
        }
        threads.push(scope.spawn(|| shared.flusher()));
        threads.push(scope.spawn(|| shared.worker()));
        threads.push(scope.spawn(|| shared.creator()));
        let end = Instant::now() + RUN;
        let mut rng = fastrand::Rng::with_seed(1);
        while Instant::now() < end && threads.iter().all(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
            let crashed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                crash(shared, &disk, &mut rng);
            }));
            images += 1;
            if let Err(panic) = crashed {
                shared.stop.store(true, Ordering::Relaxed);
                std::panic::resume_unwind(panic);
            }
        }
        shared.stop.store(true, Ordering::Relaxed);
    });
    println!("{} writes, {images} crash images", shared.done.load(Ordering::Relaxed));
    let reads = shared.store.info().lookups.bitmap_reads;
    assert_eq!(reads > 0, memory.is_some(), "{reads} metadata blocks came back");
    if let Some(sums) = shared.store.checksums() {
        println!("{sums:?}");
        assert!(sums.mismatches == 0 && sums.verified > 0, "{sums:?}");
    }
    after_kill(shared, disk, tail, with_tail);
}

/// Every acknowledged write survives the process.
fn after_kill(shared: Shared, disk: Arc<SimDisk>, tail: TailPlace, with_tail: bool) {
    let wanted: Vec<_> = (0..WRITERS).map(|v| shared.load(&shared.acknowledged, v)).collect();
    disk.stop();
    tail.kill();
    drop(shared);
    assert!(!tail.attached(), "the store lives on");
    disk.revive();
    let tail = with_tail.then(|| tail.attach(&disk));
    let store = open(disk, tail, Some(0));
    for volume in 0..WRITERS {
        let found = read_all(&store, &format!("w{volume}"), volume);
        for (block, (found, wanted)) in found.iter().zip(&wanted[volume as usize]).enumerate() {
            assert!(found >= wanted, "volume {volume} block {block} lost {wanted}, has {found}");
        }
    }
    let report = store.check().unwrap();
    assert!(report.worst() < Some(dbs_core::info::Severity::Leak), "{report:#?}");
}
