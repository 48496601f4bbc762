#![allow(clippy::unwrap_used)]

use super::load::{self, Load, Queue, Subject};
use super::runner::{Ground, Moment, Options, Room, Runner};
use super::*;
use dbs_core::io::queue::Action;
use dbs_core::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

const LENGTH: u64 = 16 << 20;

/// A thing that does nothing and remembers what was asked of it.
#[derive(Default)]
struct Fake {
    /// Requests by offset.
    written: Mutex<BTreeMap<u64, u64>>,
    reads: AtomicU64,
    flushes: AtomicU64,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    /// No request is done before so many were in flight at once.
    overlap: usize,
    /// Fails this request, counted from 1.
    fails: u64,
    count: AtomicU64,
    read_only: bool,
    no_flush: bool,
    /// What happened to its volume.
    events: Mutex<Vec<String>>,
    room: Room,
    undeletable: bool,
    /// Slots of its only queue; 0 for a queue each.
    pipelined: bool,
}

impl Default for Room {
    fn default() -> Self {
        Self { bytes: 1 << 40, snapshots: 1 << 16 }
    }
}

struct FakeQueue<'a> {
    fake: &'a Fake,
    bufs: Vec<Vec<u8>>,
    started: Vec<usize>,
}

impl Fake {
    fn written(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.written.lock().unwrap()
    }

    fn event(&self, text: String) {
        self.events.lock().unwrap().push(text);
    }
}

impl Subject for Fake {
    fn size(&self) -> u64 {
        LENGTH
    }

    fn refuses_writes(&self) -> Option<String> {
        self.read_only.then(|| "it is made of stone".to_owned())
    }

    fn refuses_flushes(&self) -> Option<String> {
        self.no_flush.then(|| "it has no flush".to_owned())
    }

    fn data_share(&self, _length: u64) -> Result<Option<f64>> {
        Ok(None)
    }

    fn queues(&self, depth: u32, block: u32) -> Result<Vec<Box<dyn Queue + '_>>> {
        let (queues, slots) = if self.pipelined { (1, depth) } else { (depth, 1) };
        let bufs = || vec![vec![0; block as usize]; slots as usize];
        let queue = |_| FakeQueue { fake: self, bufs: bufs(), started: Vec::new() };
        Ok((0..queues).map(queue).map(|queue| Box::new(queue) as Box<dyn Queue>).collect())
    }
}

impl Queue for FakeQueue<'_> {
    fn slots(&self) -> usize {
        self.bufs.len()
    }

    fn buffer(&mut self, slot: usize) -> Result<&mut [u8]> {
        assert!(!self.started.contains(&slot));
        Ok(&mut self.bufs[slot])
    }

    fn start(&mut self, slot: usize, action: Action, offset: u64, length: u32) -> Result<()> {
        assert!(!self.started.contains(&slot) && offset + u64::from(length) <= LENGTH);
        let fake = self.fake;
        self.started.push(slot);
        let in_flight = fake.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        fake.most_in_flight.fetch_max(in_flight, Ordering::SeqCst);
        match action {
            Action::Read => drop(fake.reads.fetch_add(1, Ordering::SeqCst)),
            Action::Write => *fake.written().entry(offset).or_default() += 1,
            Action::Flush => drop(fake.flushes.fetch_add(1, Ordering::SeqCst)),
        }
        Ok(())
    }

    fn finish(&mut self, done: &mut Vec<usize>) -> Result<()> {
        // Others get to start theirs.
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut waiting = true;
        while waiting {
            std::thread::sleep(Duration::from_micros(100));
            let most = self.fake.most_in_flight.load(Ordering::SeqCst);
            waiting = most < self.fake.overlap && Instant::now() < deadline;
        }
        let Some(slot) = self.started.pop() else { return Ok(()) };
        self.fake.in_flight.fetch_sub(1, Ordering::SeqCst);
        done.push(slot);
        let number = self.fake.count.fetch_add(1, Ordering::SeqCst) + 1;
        if number == self.fake.fails { Err(Error::no_space("full")) } else { Ok(()) }
    }
}

/// A store whose only volume is the fake itself.
impl Ground for Fake {
    fn create(&self, length: u64) -> Result<()> {
        self.event(format!("create {length}"));
        Ok(())
    }

    fn open(&self) -> Result<Box<dyn Subject + '_>> {
        Ok(Box::new(ByReference(self)))
    }

    fn snapshot(&self, name: &str) -> Result<()> {
        self.event(format!("snapshot {name}"));
        Ok(())
    }

    fn delete(&self) -> Result<()> {
        self.event("delete".to_owned());
        if self.undeletable { Err(Error::busy("volume kept")) } else { Ok(()) }
    }

    fn room(&self) -> Result<Room> {
        Ok(self.room)
    }
}

struct ByReference<'a>(&'a Fake);

impl Subject for ByReference<'_> {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn refuses_writes(&self) -> Option<String> {
        self.0.refuses_writes()
    }

    fn refuses_flushes(&self) -> Option<String> {
        self.0.refuses_flushes()
    }

    fn data_share(&self, length: u64) -> Result<Option<f64>> {
        self.0.data_share(length)
    }

    fn queues(&self, depth: u32, block: u32) -> Result<Vec<Box<dyn Queue + '_>>> {
        self.0.queues(depth, block)
    }
}

fn load(pattern: Pattern, operation: Operation, depth: u32) -> Load {
    let time = Some(Duration::from_millis(60));
    Load { pattern, operation, block: 4096, depth, length: LENGTH, time, most: None, seed: 1 }
}

fn options(only: &[&str]) -> Options {
    let tests = TESTS.iter().filter(|test| only.is_empty() || only.contains(&test.name)).collect();
    Options { tests, time: Duration::from_millis(5), depth: 4, seed: 1, length: LENGTH }
}

/// Runs tests and returns their results, and what went wrong.
fn run(
    options: Options,
    body: impl FnOnce(&mut Runner<'_>) -> Result<()>,
) -> (Vec<Measurement>, Result<()>) {
    let mut watch = |_: &Moment| true;
    let mut runner = Runner::new(options, None, &mut watch).unwrap();
    let result = body(&mut runner);
    (runner.finish(), result)
}

#[test]
fn requests_are_kept_in_flight() {
    for pipelined in [false, true] {
        for depth in [1, 16] {
            let fake = Fake { pipelined, overlap: depth as usize, ..Fake::default() };
            let load = load(Pattern::Random, Operation::Read, depth);
            let outcome = load::run(&load, &fake, &mut |_| true).unwrap();
            assert_eq!(fake.most_in_flight.load(Ordering::SeqCst), depth as usize);
            assert_eq!(fake.in_flight.load(Ordering::SeqCst), 0, "all were waited for");
            assert_eq!(outcome.latencies.count(), fake.reads.load(Ordering::SeqCst));
            assert!(outcome.took >= Duration::from_millis(60), "{:?}", outcome.took);
            // Known to three digits.
            assert!(outcome.latencies.min_ns() >= 99_900, "each waited that long");
        }
    }
}

#[test]
fn every_write_has_its_flush() {
    let fake = Fake::default();
    let load = load(Pattern::Random, Operation::WriteFlush, 3);
    let outcome = load::run(&load, &fake, &mut |_| true).unwrap();
    let writes: u64 = fake.written().values().sum();
    assert_eq!(writes, fake.flushes.load(Ordering::SeqCst));
    assert_eq!(writes, outcome.latencies.count(), "both are one request");
}

#[test]
fn each_place_once_ends_by_itself() {
    let fake = Fake { pipelined: true, ..Fake::default() };
    let load =
        Load { time: None, block: 1 << 20, ..load(Pattern::SequentialOnce, Operation::Write, 8) };
    let outcome = load::run(&load, &fake, &mut |_| true).unwrap();
    assert_eq!(outcome.latencies.count(), 16);
    assert!(fake.written().values().all(|count| *count == 1));
}

#[test]
fn failures_and_stops_end_a_load() {
    let fake = Fake { fails: 20, ..Fake::default() };
    let load = Load { time: None, ..load(Pattern::Random, Operation::Write, 4) };
    let error = load::run(&load, &fake, &mut |_| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    let stop = AtomicBool::new(false);
    let mut watch = |_| !stop.swap(true, Ordering::SeqCst);
    let error = load::run(&load, &Fake::default(), &mut watch).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
}

#[test]
fn what_is_there_is_only_read_unless_allowed() {
    let fake = Fake::default();
    let (results, ran) = run(options(&[]), |runner| runner.on_existing(&fake, false));
    ran.unwrap();
    assert!(fake.written().is_empty());
    assert_eq!(results.len(), TESTS.len());
    for (result, test) in results.iter().zip(&TESTS) {
        assert_eq!(result.name, test.name, "in the order of the catalog");
        let measured = !test.writes() && !test.needs_store();
        assert_eq!(result.iops.is_some(), measured, "{}", test.name);
        assert_eq!(result.skipped.is_none(), measured, "{}", test.name);
    }
    let (results, ran) = run(options(&[]), |runner| runner.on_existing(&fake, true));
    ran.unwrap();
    let missing: Vec<_> = results.iter().filter(|r| r.iops.is_none()).map(|r| r.name).collect();
    assert_eq!(missing.len(), 6, "{missing:?}");
    let why = results.iter().find_map(|result| result.skipped.clone()).unwrap();
    assert!(why.starts_with("not possible on this target"), "{why}");
    let blocks = fake.written().keys().filter(|at| at.is_multiple_of(1 << 20)).count();
    assert_eq!(blocks, 16, "it was filled first");
}

#[test]
fn what_cannot_be_done_is_said() {
    let reason = |fake: &Fake, only: &[&str], write| {
        let (results, ran) = run(options(only), |runner| runner.on_existing(fake, write));
        ran.unwrap();
        results.into_iter().find_map(|result| result.skipped)
    };
    let stone = Fake { read_only: true, ..Fake::default() };
    let why = reason(&stone, &["seq-read-lat", "seq-write-lat"], true).unwrap();
    assert!(why.contains("made of stone"), "{why}");
    let leaky = Fake { no_flush: true, ..Fake::default() };
    let why = reason(&leaky, &["seq-write-lat", "write-flush-1"], true).unwrap();
    assert!(why.contains("no flush"), "{why}");
    let (_, ran) = run(options(&["first-write"]), |r| r.on_existing(&stone, true));
    assert_eq!(ran.unwrap_err().kind(), ErrorKind::Invalid, "nothing could run");
    let small = Options { length: LENGTH - 1, ..options(&[]) };
    assert!(Runner::new(small, None, &mut |_| true).is_err());
    assert!(Runner::new(options(&["?"]), None, &mut |_| true).is_err());
}

#[test]
fn a_store_is_left_as_it_was() {
    let fake = Fake { pipelined: true, ..Fake::default() };
    let (results, ran) = run(options(&[]), |runner| runner.on_store(&fake));
    ran.unwrap();
    assert!(results.iter().all(|result| result.iops.is_some()), "all ran");
    let events = fake.events.lock().unwrap().clone();
    let count = |what: &str| events.iter().filter(|event| event.starts_with(what)).count();
    assert_eq!((count("create"), count("delete")), (3, 3));
    assert_eq!(count("snapshot"), 1 + 255, "255 snapshots and the head are 256 layers");
    assert_eq!(events.last().unwrap(), "delete");
}

#[test]
fn the_volume_goes_whatever_happens() {
    // It fails while the volume is filled: of what comes after, time says how much there is.
    let fake = Fake { fails: 10, ..Fake::default() };
    let (_, ran) = run(options(&["rand-read-iops"]), |runner| runner.on_store(&fake));
    assert_eq!(ran.unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(fake.events.lock().unwrap().last().unwrap(), "delete");
    let fake = Fake { fails: 10, undeletable: true, ..Fake::default() };
    let (_, ran) = run(options(&["rand-read-iops"]), |runner| runner.on_store(&fake));
    let error = ran.unwrap_err();
    assert!(error.to_string().contains("volume kept"), "{error}");
    assert_eq!(error.kind(), ErrorKind::NoSpace, "what went wrong first counts");
}

#[test]
fn room_is_looked_at_first() {
    let room = Room { bytes: LENGTH, snapshots: 20 };
    let fake = Fake { room, ..Fake::default() };
    let (_, ran) = run(options(&["after-snapshot"]), |runner| runner.on_store(&fake));
    assert_eq!(ran.unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(fake.events.lock().unwrap().is_empty(), "nothing was made");
    // Each chain by itself: what is too long does not run, and the rest does.
    let fake = Fake { room: Room { bytes: 1 << 30, ..room }, ..Fake::default() };
    let chains = ["read-chain-1", "read-chain-16", "read-chain-64", "read-chain-256"];
    let (results, ran) = run(options(&chains), |runner| runner.on_store(&fake));
    ran.unwrap();
    let ran: Vec<_> = results.iter().map(|result| result.iops.is_some()).collect();
    assert_eq!(ran, [true, true, false, false]);
    assert!(results[2].skipped.as_ref().unwrap().contains("20 more snapshots"));
}
