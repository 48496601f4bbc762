//! Verified load on a server whose disk is spoiled on purpose: who asked is told, nobody else
//! notices, nothing is lost, and nothing wrong is ever read.

use crate::disk::rules::{Effect, Operation, Rule};
use crate::disk::{Disk, Mounted};
use crate::support::{Place, Served, can_mount};
use crate::{Random, connect, content, version_of};
use dbs_core::format::{RegionKind, Superblock};
use dbs_nbd::Client;
use fuser::Errno;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const CLIENTS: usize = 4;
/// Blocks of each client, 4 MiB in extents of its own.
const BLOCKS: usize = 1024;
/// Blocks of a request at most; those of more than one can be cut short.
const RUN: usize = 8;
/// How long each kind of fault lasts, if that was enough to see what it does.
const PHASE: Duration = Duration::from_millis(400);
/// Requests that a kind of fault is tried on at least.
const LEAST: u64 = 1000;
/// Longer than this no request may take, whatever happens to others, and no kind of fault lasts.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a block may show: version 0 is zeros.
#[derive(Debug, Clone)]
struct Block {
    /// Its version; several after a write that failed.
    now: Vec<u64>,
    /// Further ones it may have again when the store is opened after a failed flush.
    past: Vec<u64>,
}

/// A client: its connection and its blocks, which are neighbours.
struct Worker {
    client: Client<UnixStream>,
    first: usize,
    blocks: Vec<Block>,
    random: Random,
    version: u64,
    tally: Tally,
}

/// What came of requests.
#[derive(Debug, Default, Clone)]
struct Tally {
    done: BTreeMap<&'static str, u64>,
    failed: BTreeMap<(&'static str, ErrorKind), u64>,
    /// What was said about it.
    texts: Vec<String>,
    slowest: Duration,
}

impl Tally {
    fn add(&mut self, other: Self) {
        other.done.into_iter().for_each(|(key, count)| *self.done.entry(key).or_default() += count);
        for (key, count) in other.failed {
            *self.failed.entry(key).or_default() += count;
        }
        self.texts.extend(other.texts);
        self.slowest = self.slowest.max(other.slowest);
    }

    fn done(&self, operation: &str) -> u64 {
        self.done.get(operation).copied().unwrap_or(0)
    }

    fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    fn requests(&self) -> u64 {
        self.done.values().sum::<u64>() + self.failures()
    }

    /// Whether somebody was told what to do about a store that is poisoned.
    fn says_to_open_again(&self) -> bool {
        self.texts.iter().any(|text| text.contains("open the store again"))
    }

    /// Failures of an operation with this kind, of which there are no others.
    #[track_caller]
    fn only(&self, operation: &str, kind: ErrorKind) -> u64 {
        let expected = |(name, its): &(&str, ErrorKind)| *name == operation && *its == kind;
        assert!(self.failed.keys().all(expected), "{:?} {:?}", self.failed, self.texts.first());
        self.failures()
    }

    #[track_caller]
    fn nothing_failed(&self) {
        assert!(self.failed.is_empty(), "{:?} {:?}", self.failed, self.texts.first());
    }
}

impl Worker {
    fn run(&mut self, time: Duration) -> Tally {
        self.tally = Tally::default();
        let begun = Instant::now();
        while begun.elapsed() < time {
            let first = self.random.below((BLOCKS - RUN) as u64) as usize;
            let range = first..first + 1 + self.random.below(RUN as u64) as usize;
            match self.random.below(20) {
                0 => self.flush(),
                1 => self.write(range, true),
                2..10 => self.write(range, false),
                _ => self.read(range),
            }
        }
        std::mem::take(&mut self.tally)
    }

    fn offset(&self, block: usize) -> u64 {
        ((self.first + block) * BLOCK) as u64
    }

    /// Notes what came of an operation; whether it was done.
    fn note(&mut self, name: &'static str, begun: Instant, result: std::io::Result<()>) -> bool {
        assert!(!self.client.is_broken(), "{name}: the connection is gone: {result:?}");
        self.tally.slowest = self.tally.slowest.max(begun.elapsed());
        match &result {
            Ok(()) => *self.tally.done.entry(name).or_default() += 1,
            Err(error) => {
                *self.tally.failed.entry((name, error.kind())).or_default() += 1;
                if self.tally.texts.len() < 10 {
                    self.tally.texts.push(error.to_string());
                }
            }
        }
        result.is_ok()
    }

    fn write(&mut self, range: Range<usize>, zeros: bool) {
        let offset = self.offset(range.start);
        self.version += 1;
        let version = if zeros { 0 } else { self.version };
        let bytes: Vec<_> =
            range.clone().flat_map(|block| content(self.first + block, version)).collect();
        let begun = Instant::now();
        let result = match zeros {
            true => self.client.write_zeroes(offset, (range.len() * BLOCK) as u64, 0),
            false => self.client.write_at(offset, &bytes, false),
        };
        let done = self.note("write", begun, result);
        for block in &mut self.blocks[range] {
            if done {
                let now = std::mem::replace(&mut block.now, vec![version]);
                block.past.extend(now);
            } else {
                block.now.push(version);
            }
        }
    }

    fn read(&mut self, range: Range<usize>) {
        let mut bytes = vec![0; range.len() * BLOCK];
        let begun = Instant::now();
        let result = self.client.read_at(self.offset(range.start), &mut bytes);
        if self.note("read", begun, result) {
            for (block, bytes) in range.zip(bytes.chunks_exact(BLOCK)) {
                let found = version_of("v", self.first + block, bytes);
                let may = &mut self.blocks[block].now;
                assert!(may.contains(&found), "block {block}: {found:#x}, not of {may:x?}");
                // What was read need not be durable: after a change that failed, either may be there at the next open.
                let others = std::mem::replace(may, vec![found]);
                self.blocks[block]
                    .past
                    .extend(others.into_iter().filter(|version| *version != found));
            }
        }
    }

    fn flush(&mut self) {
        let begun = Instant::now();
        let result = self.client.flush();
        if self.note("flush", begun, result) {
            self.blocks.iter_mut().for_each(|block| block.past.clear());
        }
    }

    /// Reads everything; `reopened` says that the store was opened again.
    fn check(&mut self, reopened: bool) {
        if reopened {
            for block in &mut self.blocks {
                block.now.append(&mut block.past);
            }
        }
        (0..BLOCKS).step_by(128).for_each(|block| self.read(block..block + 128));
        self.tally.nothing_failed();
        if reopened {
            self.blocks.iter_mut().for_each(|block| block.past.clear());
        }
    }
}

/// A served store on a disk with faults.
struct Stage {
    driver: &'static str,
    server: Option<Served>,
    workers: Vec<Worker>,
    disk: Disk,
    _mounted: Mounted,
    place: Place,
}

impl Stage {
    fn new(driver: &'static str, checksums: bool) -> Self {
        let place = Place::new();
        let (disk, mounted) = Disk::at(place.dir.path(), &place.store());
        let sizes = if checksums { "--size 256MiB" } else { "--size 256MiB --no-checksums" };
        place.dbs(&format!("init store.dbs {sizes}")).ok("init");
        // It is not for power cuts, and they would need much memory.
        disk.forget();
        place.json("volume create v 16MiB");
        let (server, workers) = (None, Vec::new());
        let mut stage = Self { driver, server, workers, disk, _mounted: mounted, place };
        stage.start();
        stage.workers = (0..CLIENTS)
            .map(|index| Worker {
                client: connect(&stage.socket(), "v"),
                first: index * BLOCKS,
                blocks: vec![Block { now: vec![0], past: Vec::new() }; BLOCKS],
                random: Random(0x9e37_79b9 + index as u64),
                version: (index as u64 + 1) << 32,
                tally: Tally::default(),
            })
            .collect();
        stage
    }

    fn socket(&self) -> PathBuf {
        self.place.path("nbd.sock")
    }

    /// Bytes of a region.
    fn region(&self, kind: RegionKind) -> Range<u64> {
        let superblock = Superblock::decode(&self.disk.read(0, BLOCK), 0).unwrap();
        let region = superblock.geometry.region(kind);
        region.offset..region.offset + region.length
    }

    /// A rule for requests that touch the data of volumes.
    fn in_data(&self, operations: &'static [Operation], effect: Effect) -> Rule {
        Rule { within: self.region(RegionKind::Data), ..Rule::new(operations, effect) }
    }

    fn start(&mut self) {
        let arguments = "--nbd unix:nbd.sock --commit-interval 50ms";
        let server = self.place.serve(&format!("--driver {} {arguments}", self.driver));
        self.server = Some(server);
    }

    /// Ends the server; its exit code and log.
    fn end(&mut self) -> (i32, String) {
        let (code, log) = self.server.take().unwrap().stop();
        (code.unwrap_or(-1), log)
    }

    /// Verified load under faults, then a look at everything without them.
    fn phase(&mut self, rules: &[Rule]) -> Tally {
        self.phase_until(rules, |tally| tally.requests() >= LEAST)
    }

    /// The same; however slow the machine is, it lasts until what happened is `enough`.
    fn phase_until(&mut self, rules: &[Rule], enough: impl Fn(&Tally) -> bool) -> Tally {
        self.disk.set_rules(rules);
        let begun = Instant::now();
        let mut tally = self.load(PHASE);
        while !enough(&tally) && begun.elapsed() < PATIENCE {
            tally.add(self.load(PHASE));
        }
        self.disk.set_rules(&[]);
        self.check(false);
        println!(
            "{} {rules:?}: {:?}, failed {:?}, slowest {:?}",
            self.driver, tally.done, tally.failed, tally.slowest
        );
        assert!(tally.slowest < PATIENCE, "{rules:?}: {:?}", tally.slowest);
        tally
    }

    fn load(&mut self, time: Duration) -> Tally {
        let mut all = Tally::default();
        let tallies: Vec<_> = thread::scope(|scope| {
            let run = |worker| scope.spawn(move || Worker::run(worker, time));
            let threads: Vec<_> = self.workers.iter_mut().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        tallies.into_iter().for_each(|tally| all.add(tally));
        all
    }

    fn check(&mut self, reopened: bool) {
        self.workers.iter_mut().for_each(|worker| worker.check(reopened));
    }

    /// Faults that poison the store: everybody is told and told what to do, reads go on, and what
    /// was flushed is there when the store is opened again.
    fn poisoned_by(&mut self, rule: Rule) {
        self.phase(&[]).nothing_failed();
        let rules = [Rule { left: 1, ..rule }];
        let enough = |tally: &Tally| tally.done("read") > 0 && tally.says_to_open_again();
        let tally = self.phase_until(&rules, enough);
        assert!(tally.done("read") > 0, "{rules:?}: reads go on");
        assert!(tally.failed.keys().all(|(name, _)| *name != "read"), "{:?}", tally.failed);
        assert!(tally.says_to_open_again(), "{rules:?}: {:?}", tally.texts);
        // For good, though the device is well again.
        let tally = self.load(PHASE / 4);
        assert_eq!((tally.done("write"), tally.done("flush")), (0, 0), "{rules:?}");
        let refused = self.place.dbs("volume create w 1MiB");
        assert_ne!(refused.code, 0);
        assert!(refused.stderr.contains("open the store again"), "{}", refused.stderr);
        let (code, log) = self.end();
        assert_ne!(code, 0, "{log}");
        assert!(
            log.contains("level=error")
                && log.contains("flush failed") | log.contains("writing metadata failed"),
            "{log}"
        );
        self.place.dbs("check").ok("check");
        self.start();
        for worker in &mut self.workers {
            worker.client = connect(&self.place.path("nbd.sock"), "v");
        }
        self.check(true);
    }
}

#[test]
fn faults_are_told_to_who_asked_and_nothing_is_lost() {
    use Effect::{Delay, Fail, Short};
    use Operation::{Allocate, Read, Sync, Write};
    let true = can_mount() else { return };
    // Without checksums nobody reads again what was read wrong.
    for (driver, checksums) in [("auto", true), ("auto", false), ("pread", true), ("pread", false)]
    {
        let mut stage = Stage::new(driver, checksums);
        stage.phase(&[]).nothing_failed();
        let now_and_then = |rule: Rule, chance| [Rule { chance, ..rule }];
        let rule = stage.in_data(&[Read], Fail(Errno::EIO));
        let tally = stage.phase(&now_and_then(rule, 0.15));
        let failed = tally.only("read", ErrorKind::Other);
        assert!(failed > 0 && tally.done("read") > failed, "{tally:?}");
        let rule = stage.in_data(&[Write], Fail(Errno::EIO));
        let tally = stage.phase(&now_and_then(rule, 0.15));
        let failed = tally.only("write", ErrorKind::Other);
        assert!(failed > 0 && tally.done("write") > failed, "{tally:?}");
        // Not with io_uring: Linux 6.18 itself goes on with a short transfer of a FUSE file, at the place where
        // it began.
        if driver == "pread" {
            let before = stage.disk.hits();
            stage.phase(&now_and_then(Rule::new(&[Read, Write], Short), 0.5)).nothing_failed();
            assert!(stage.disk.hits() > before, "nothing was cut short");
        }
        let full = stage.in_data(&[Write, Allocate], Fail(Errno::ENOSPC));
        let tally = stage.phase(&[full]);
        let failed = tally.only("write", ErrorKind::StorageFull);
        assert!(failed > 0 && tally.done("read") > 5, "{tally:?}");
        stage.phase(&[]).nothing_failed();
        // Those that are hit wait for a second, the others do not wait for them.
        let second = Duration::from_secs(1);
        let waited = |tally: &Tally| tally.slowest >= second;
        let late = now_and_then(Rule::new(&[Read, Write], Delay(second)), 0.05);
        let tally = stage.phase_until(&late, waited);
        tally.nothing_failed();
        assert!(tally.slowest >= second, "{tally:?}");
        stage.poisoned_by(Rule::new(&[Sync], Fail(Errno::EIO)));
        let within = stage.region(RegionKind::Journal);
        stage.poisoned_by(Rule { within, ..Rule::new(&[Write], Fail(Errno::EIO)) });
        stage.phase(&[]).nothing_failed();
        let (code, log) = stage.end();
        assert_eq!(code, 0, "{log}");
        stage.place.dbs("check").ok("check");
        println!("{driver}, checksums: {checksums}: {} faults", stage.disk.hits());
        assert!(stage.disk.hits() > 20, "{}", stage.disk.hits());
    }
}
