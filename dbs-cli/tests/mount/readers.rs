//! Sixteen readers of what `dbs serve --mount` shows, while the volume is written, trimmed and zeroed
//! over NBD, and its snapshots come and go under names that are used again.
//!
//! `DBS_MOUNT_SECONDS` (4) is how long. Timing decides what meets what, so a failure need not come
//! again.

use super::{PATIENCE, Site, can_mount, kill, wait};
use dbs_nbd::{Client, ClientOptions};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const READERS: u64 = 16;
const WRITERS: u64 = 2;
const BLOCK: usize = 4096;
/// Blocks that one request may change: each such run has one writer, which waits for the answer.
const RUN: u64 = 8;
/// Runs of the volume, 16 MiB.
const RUNS: u64 = 512;
const BLOCKS: u64 = RUNS * RUN;
/// Snapshots there are at a time, and names for them.
const KEPT: usize = 6;
const NAMES: usize = 8;
/// Between two snapshots.
const PAUSE: Duration = Duration::from_millis(60);
/// Files that a reader has open, some of them for long.
const HELD: usize = 4;
/// A deleted file, and one of a name that nothing has any more.
const GONE: [i32; 2] = [116, 2];
/// What a block was found to be if it was looked at; versions are stored as one more.
const UNSEEN: u64 = 0;

/// What a change of a run does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Deed {
    WriteOne(u64),
    WriteAll,
    Trim,
    Zero,
}

fn mix(run: u64, version: u64) -> u64 {
    let state =
        run.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version.wrapping_mul(0xd6e8_feb8_6659_fd93);
    (state ^ (state >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

/// What is done to a run for the `version`th time, from 1 on.
fn deed(run: u64, version: u64) -> Deed {
    let number = mix(run, version);
    match number % 16 {
        0..=9 => Deed::WriteOne((number >> 8) % RUN),
        10..=12 => Deed::WriteAll,
        13 | 14 => Deed::Trim,
        _ => Deed::Zero,
    }
}

/// Which version's bytes a block holds once its run was changed `version` times; 0 is zeros.
fn state(block: u64, version: u64) -> u64 {
    let (run, within) = (block / RUN, block % RUN);
    let last = (1..=version).rev().find_map(|version| match deed(run, version) {
        Deed::WriteAll => Some(version),
        Deed::WriteOne(one) => (one == within).then_some(version),
        Deed::Trim | Deed::Zero => Some(0),
    });
    last.unwrap_or(0)
}

fn content(block: u64, version: u64) -> Vec<u8> {
    let mut word = (block + 1).to_le_bytes().to_vec();
    word.extend(version.to_le_bytes());
    word.repeat(BLOCK / word.len())
}

/// The version whose bytes these are, all of them; none if they are of no version or another block.
fn version_of(block: u64, bytes: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    let right = if version == 0 { vec![0; BLOCK] } else { content(block, version) };
    (bytes == right).then_some(version)
}

/// How often each run was changed: begun, and acknowledged.
struct Changes {
    begun: Vec<AtomicU64>,
    done: Vec<AtomicU64>,
}

impl Changes {
    fn new() -> Self {
        let zeros = || (0..RUNS).map(|_| AtomicU64::new(0)).collect();
        Self { begun: zeros(), done: zeros() }
    }

    fn begun(&self, block: u64) -> u64 {
        self.begun[(block / RUN) as usize].load(Ordering::SeqCst)
    }

    fn done(&self, block: u64) -> u64 {
        self.done[(block / RUN) as usize].load(Ordering::SeqCst)
    }

    fn all(versions: &[AtomicU64]) -> Vec<u64> {
        versions.iter().map(|version| version.load(Ordering::SeqCst)).collect()
    }
}

/// A snapshot: what may be in it, and what was found in it.
struct Taken {
    name: String,
    /// Tells it from others of its name: they have their files' times.
    created_ns: u64,
    /// How often each run had been changed before, at least, and at most.
    least: Vec<u64>,
    most: Vec<u64>,
    found: Vec<AtomicU64>,
    /// Its deletion was asked for.
    doomed: AtomicBool,
}

impl Taken {
    /// Holds what was read against what may be there, and what was there before.
    fn check(&self, first: u64, bytes: &[u8]) {
        for (block, bytes) in (first..).zip(bytes.chunks(BLOCK)) {
            let run = (block / RUN) as usize;
            let name = &self.name;
            let version = version_of(block, bytes);
            let version = version.unwrap_or_else(|| panic!("{name}: block {block} is none"));
            let may = (self.least[run]..=self.most[run]).any(|v| state(block, v) == version);
            assert!(
                may,
                "{name}: block {block} has version {version}, of {} to {}",
                self.least[run], self.most[run]
            );
            let before = self.found[block as usize].swap(version + 1, Ordering::SeqCst);
            assert!(
                before == UNSEEN || before == version + 1,
                "{name}: block {block} was version {}, and is {version}",
                before - 1
            );
        }
    }

    /// Whether this is how a file looks that is being deleted; any other error is one.
    fn is_gone(&self, error: &io::Error) -> bool {
        let expected = error.raw_os_error().is_some_and(|code| GONE.contains(&code));
        assert!(expected && self.doomed.load(Ordering::SeqCst), "{}: {error}", self.name);
        true
    }
}

#[derive(Default)]
struct Counts {
    reads: AtomicU64,
    bytes: AtomicU64,
    head_reads: AtomicU64,
    gone: AtomicU64,
    replaced: AtomicU64,
    writes: AtomicU64,
    trims: AtomicU64,
    zeroes: AtomicU64,
    taken: AtomicU64,
    deleted: AtomicU64,
}

impl Counts {
    /// What must have happened, each at least once.
    fn least(&self) -> [u64; 7] {
        [
            &self.reads,
            &self.head_reads,
            &self.writes,
            &self.trims,
            &self.zeroes,
            &self.deleted,
            &self.gone,
        ]
        .map(|counter| counter.load(Ordering::SeqCst))
    }
}

fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

struct Scene<'a> {
    site: &'a Site,
    changes: Changes,
    snapshots: RwLock<VecDeque<Arc<Taken>>>,
    counts: Counts,
    done: AtomicBool,
}

/// Ends the others, too, when one fails.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Scene<'_> {
    fn is_over(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    fn connect(&self, export: &str) -> Client<UnixStream> {
        let socket = self.site.place.path("nbd.sock");
        Client::connect_unix(&socket, export, &ClientOptions::default()).unwrap()
    }

    fn write(&self, writer: u64) {
        let mut client = self.connect("v");
        let mut random = fastrand::Rng::with_seed(writer);
        while !self.is_over() {
            let run = random.u64(..RUNS / WRITERS) * WRITERS + writer;
            let first = run * RUN;
            let version = self.changes.begun(first) + 1;
            self.changes.begun[run as usize].store(version, Ordering::SeqCst);
            let (offset, length) = (first * BLOCK as u64, RUN * BLOCK as u64);
            let counts = &self.counts;
            match deed(run, version) {
                Deed::WriteOne(within) => {
                    let block = first + within;
                    let bytes = content(block, version);
                    client.write_at(block * BLOCK as u64, &bytes, random.u8(..50) == 0).unwrap();
                    count(&counts.writes, 1);
                }
                Deed::WriteAll => {
                    let bytes: Vec<_> =
                        (first..first + RUN).flat_map(|b| content(b, version)).collect();
                    client.write_at(offset, &bytes, false).unwrap();
                    count(&counts.writes, 1);
                }
                Deed::Trim => {
                    client.trim(offset, length, false).unwrap();
                    count(&counts.trims, 1);
                }
                Deed::Zero => {
                    client.write_zeroes(offset, length, 0).unwrap();
                    count(&counts.zeroes, 1);
                }
            }
            self.changes.done[run as usize].store(version, Ordering::SeqCst);
            if random.u8(..100) == 0 {
                client.flush().unwrap();
            }
        }
        client.disconnect().unwrap();
    }

    /// Takes snapshots, and deletes old ones, until the time is over.
    fn rotate(&self, time: Duration) {
        let mut random = fastrand::Rng::with_seed(99);
        let begun = Instant::now();
        let mut round = 0;
        // On a busy machine longer, so that there is something to read and to delete.
        let more = |round| round < 2 * NAMES || self.counts.least().contains(&0);
        while (begun.elapsed() < time || more(round) && begun.elapsed() < time + PATIENCE)
            && !self.is_over()
        {
            let name = format!("s{}", round % NAMES);
            let least = Changes::all(&self.changes.done);
            let made = self.site.json(&format!("snapshot create v@{name}"));
            let most = Changes::all(&self.changes.begun);
            let created_ns = made["created_ns"].as_u64().unwrap();
            let found = (0..BLOCKS).map(|_| AtomicU64::new(UNSEEN)).collect();
            let doomed = AtomicBool::new(false);
            let taken = Taken { name, created_ns, least, most, found, doomed };
            let mut snapshots = self.snapshots.write().unwrap();
            snapshots.push_back(Arc::new(taken));
            // Mostly the oldest.
            let index = if random.bool() { 0 } else { random.usize(..KEPT) };
            let doomed = if snapshots.len() > KEPT { snapshots.remove(index) } else { None };
            // Names come again in order.
            let next = format!("s{}", (round + 1) % NAMES);
            let in_the_way = snapshots.iter().position(|s| s.name == next);
            let in_the_way = in_the_way.and_then(|index| snapshots.remove(index));
            drop(snapshots);
            count(&self.counts.taken, 1);
            for doomed in [doomed, in_the_way].into_iter().flatten() {
                doomed.doomed.store(true, Ordering::SeqCst);
                let name = &doomed.name;
                self.site.json(&format!("--yes snapshot delete v@{name}"));
                let path = self.site.path(&format!("volumes/v/snapshots/{name}.raw"));
                assert!(!path.exists(), "{name} is there after its deletion");
                count(&self.counts.deleted, 1);
            }
            round += 1;
            thread::sleep(PAUSE);
        }
    }

    /// Opens some snapshot; none if it has gone meanwhile, or another has its name.
    fn open(&self, random: &mut fastrand::Rng) -> Option<(Arc<Taken>, File)> {
        let taken = {
            let snapshots = self.snapshots.read().unwrap();
            Arc::clone(snapshots.get(random.usize(..snapshots.len().max(1)))?)
        };
        let path = self.site.path(&format!("volumes/v/snapshots/{}.raw", taken.name));
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (meta, file) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                count(&self.counts.gone, u64::from(taken.is_gone(&error)));
                return None;
            }
        };
        assert_eq!(meta.len(), BLOCKS * BLOCK as u64);
        let time = meta.mtime() as u64 * 1_000_000_000 + meta.mtime_nsec() as u64;
        if time != taken.created_ns {
            assert!(taken.doomed.load(Ordering::SeqCst), "{} is another one", taken.name);
            count(&self.counts.replaced, 1);
            return None;
        }
        Some((taken, file))
    }

    /// Reads some places of a snapshot; whether it is there still.
    fn read_snapshot(
        &self,
        (taken, file): &(Arc<Taken>, File),
        random: &mut fastrand::Rng,
        buffer: &mut [u8],
    ) -> bool {
        let all = random.u8(..32) == 0;
        for part in 0..16 {
            let (first, blocks) = match random.bool() {
                _ if all => (part * BLOCKS / 16, BLOCKS / 16),
                true => (random.u64(..BLOCKS), 1),
                false => (random.u64(..BLOCKS - 32), 32),
            };
            let buffer = &mut buffer[..blocks as usize * BLOCK];
            if let Err(error) = file.read_exact_at(buffer, first * BLOCK as u64) {
                count(&self.counts.gone, u64::from(taken.is_gone(&error)));
                return false;
            }
            taken.check(first, buffer);
            count(&self.counts.reads, 1);
            count(&self.counts.bytes, buffer.len() as u64);
        }
        true
    }

    /// Each block of the head is as some change left it that may have been the last one when it was
    /// read. A write may pass meanwhile, so each word is looked at for itself.
    fn read_head(&self, head: &File, random: &mut fastrand::Rng, buffer: &mut [u8]) {
        let blocks = if random.bool() { 1 } else { RUN };
        let first = random.u64(..BLOCKS / blocks) * blocks;
        let buffer = &mut buffer[..blocks as usize * BLOCK];
        let least = self.changes.done(first);
        head.read_exact_at(buffer, first * BLOCK as u64).unwrap();
        let most = self.changes.begun(first);
        for (block, bytes) in (first..).zip(buffer.chunks(BLOCK)) {
            let may: Vec<_> = (least..=most).map(|version| state(block, version)).collect();
            for pair in bytes.chunks(16) {
                let [place, version] =
                    [&pair[..8], &pair[8..]].map(|w| u64::from_le_bytes(w.try_into().unwrap()));
                let right = may.contains(&version)
                    && (place == block + 1 && may.iter().any(|v| *v > 0)
                        || place == 0 && may.contains(&0));
                assert!(
                    right,
                    "the head: block {block} has a word of block {place}, version {version}, when \
                     it was of {least} to {most}"
                );
            }
        }
        count(&self.counts.head_reads, 1);
        count(&self.counts.bytes, buffer.len() as u64);
    }

    fn read(&self, reader: u64) {
        let mut random = fastrand::Rng::with_seed(reader + 1000);
        let mut buffer = vec![0; BLOCKS as usize / 16 * BLOCK];
        let head = File::open(self.site.path("volumes/v/head.raw")).unwrap();
        let mut held = VecDeque::new();
        while !self.is_over() {
            if held.len() < HELD || random.bool() {
                held.truncate(HELD - 1);
                held.extend(self.open(&mut random));
            }
            if !held.is_empty() {
                let index = random.usize(..held.len());
                if !self.read_snapshot(&held[index], &mut random, &mut buffer) {
                    held.remove(index);
                }
            }
            for _ in 0..4 {
                self.read_head(&head, &mut random, &mut buffer);
            }
            if random.u8(..64) == 0 {
                let names = fs::read_dir(self.site.path("volumes/v/snapshots")).unwrap();
                assert!(names.count() <= KEPT + 1, "more snapshots than there are");
            }
        }
    }

    /// Once nobody writes: every snapshot whole, through the mount and over NBD.
    fn compare(&self) {
        let mut buffer = vec![0; BLOCKS as usize * BLOCK];
        for taken in self.snapshots.read().unwrap().iter() {
            let name = &taken.name;
            self.connect(&format!("v@{name}")).read_at(0, &mut buffer).unwrap();
            taken.check(0, &buffer);
            let path = self.site.path(&format!("volumes/v/snapshots/{name}.raw"));
            assert!(fs::read(path).unwrap() == buffer, "{name}");
        }
        self.connect("v").read_at(0, &mut buffer).unwrap();
        assert!(fs::read(self.site.path("volumes/v/head.raw")).unwrap() == buffer, "the head");
        for (block, bytes) in (0..).zip(buffer.chunks(BLOCK)) {
            let (version, last) = (version_of(block, bytes), self.changes.done(block));
            assert_eq!(version, Some(state(block, last)), "the head's block {block}");
        }
    }

    fn told(&self, time: Duration) {
        let [reads, bytes, head_reads, gone, replaced] = [
            &self.counts.reads,
            &self.counts.bytes,
            &self.counts.head_reads,
            &self.counts.gone,
            &self.counts.replaced,
        ]
        .map(|counter| counter.load(Ordering::SeqCst));
        let [writes, trims, zeroes, taken, deleted] = [
            &self.counts.writes,
            &self.counts.trims,
            &self.counts.zeroes,
            &self.counts.taken,
            &self.counts.deleted,
        ]
        .map(|counter| counter.load(Ordering::SeqCst));
        println!(
            "{} s: {writes} writes, {trims} trims, {zeroes} zeroed, {taken} snapshots taken and \
             {deleted} deleted; {READERS} readers did {reads} reads of snapshots and {head_reads} of \
             the head, {} MiB; {gone} met one deleted, {replaced} one with its name",
            time.as_secs(),
            bytes >> 20
        );
        let least = self.counts.least();
        assert!(!least.contains(&0), "{least:?}");
    }
}

/// Kills the server if the rest has not ended in time, and with it all that waits for it.
fn watch(pid: u32, time: Duration) -> mpsc::Sender<()> {
    let (cancel, cancelled) = mpsc::channel();
    thread::spawn(move || {
        if cancelled.recv_timeout(time) == Err(mpsc::RecvTimeoutError::Timeout) {
            kill(u64::from(pid), "KILL");
        }
    });
    cancel
}

fn is_listening(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}

#[test]
fn sixteen_readers_beside_a_server_that_is_written() {
    let true = can_mount() else { return };
    let seconds = std::env::var("DBS_MOUNT_SECONDS").map_or(4, |text| text.parse().unwrap());
    let time = Duration::from_secs(seconds);
    let site = Site::new();
    fs::remove_file(site.place.store()).unwrap();
    site.dbs("init store.dbs --size 2GiB").ok("init");
    site.json("volume create v 16MiB");
    let mut server = site.foreground("--quiet serve --mount mnt --nbd unix:nbd.sock");
    super::wait_for("NBD", || is_listening(&site.place.path("nbd.sock")));
    let watched = watch(server.0.id(), time + 4 * PATIENCE);
    let scene = Scene {
        site: &site,
        changes: Changes::new(),
        snapshots: RwLock::default(),
        counts: Counts::default(),
        done: AtomicBool::new(false),
    };
    let begun = Instant::now();
    thread::scope(|scope| {
        let scene = &scene;
        for writer in 0..WRITERS {
            scope.spawn(move || {
                let _ending = Ending(&scene.done);
                scene.write(writer);
            });
        }
        for reader in 0..READERS {
            scope.spawn(move || {
                let _ending = Ending(&scene.done);
                scene.read(reader);
            });
        }
        let _ending = Ending(&scene.done);
        scene.rotate(time);
    });
    let time = begun.elapsed();
    scene.compare();
    drop(watched);
    server.signal("TERM");
    assert_eq!(wait(&mut server.0, "serve"), 0);
    site.dbs("check").ok("check");
    scene.told(time);
}
