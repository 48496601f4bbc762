//! Keeping requests in flight, and counting what becomes of them.

use super::catalog::{Operation, Pattern};
use super::histogram::Histogram;
use super::offsets::Offsets;
use dbs_core::io::queue::Action;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, ErrorKind, Result};
use fastrand::Rng;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How often the caller of a load is asked whether to go on.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// One thread's way to requests: slots, each with a buffer and at most one request in flight.
pub trait Queue: Send {
    /// How many slots there are.
    fn slots(&self) -> usize;

    /// The buffer of an idle slot.
    ///
    /// # Errors
    /// Those of the thing that is measured, here and below.
    fn buffer(&mut self, slot: usize) -> Result<&mut [u8]>;

    /// Starts a request of an idle slot.
    fn start(&mut self, slot: usize, action: Action, offset: u64, length: u32) -> Result<()>;

    /// Waits for at least one request, if any is in flight, and appends the slots that are idle
    /// again to `done`.
    fn finish(&mut self, done: &mut Vec<usize>) -> Result<()>;
}

/// A thing that can be measured.
pub trait Subject: Sync {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Why it cannot be written, if so.
    fn refuses_writes(&self) -> Option<String>;

    /// Why it cannot be flushed, if so.
    fn refuses_flushes(&self) -> Option<String>;

    /// The share (0 to 1) of its first `length` bytes that holds data, if it can tell.
    fn data_share(&self, length: u64) -> Result<Option<f64>>;

    /// Queues that have `depth` slots together, for requests of `block` bytes.
    fn queues(&self, depth: u32, block: u32) -> Result<Vec<Box<dyn Queue + '_>>>;
}

/// A load: what to put on a subject.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Where requests go.
    pub pattern: Pattern,
    /// What they do.
    pub operation: Operation,
    /// Bytes of each.
    pub block: u32,
    /// Requests in flight.
    pub depth: u32,
    /// Bytes from the start of the subject that they stay in.
    pub length: u64,
    /// How long; without, until each place had its request.
    pub time: Option<Duration>,
    /// Of a pattern that gives each place one request: how many places, if not all.
    pub most: Option<u64>,
    /// Of offsets and contents.
    pub seed: u64,
}

/// What became of a load.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Latencies; their count is that of the requests.
    pub latencies: Histogram,
    /// From the first request to the last reply.
    pub took: Duration,
}

/// Puts a load on a subject. `watch` is called now and then with the time since the start; false
/// ends it.
///
/// # Errors
/// The first of any request; `Interrupted` if `watch` ended it.
pub fn run(
    load: &Load,
    subject: &dyn Subject,
    watch: &mut dyn FnMut(Duration) -> bool,
) -> Result<Outcome> {
    let queues = subject.queues(load.depth, load.block)?;
    let shared = Shared {
        load,
        offsets: Offsets::new(load.pattern, load.block, load.length, load.seed).at_most(load.most),
        stop: AtomicBool::new(false),
        begin: Barrier::new(queues.len()),
    };
    let (sender, receiver) = channel();
    thread::scope(|scope| {
        for (index, queue) in queues.into_iter().enumerate() {
            let (shared, sender) = (&shared, sender.clone());
            scope.spawn(move || {
                let result = Worker::new(shared, queue, index as u64).run();
                if result.is_err() {
                    shared.stop.store(true, Ordering::Relaxed);
                }
                // The receiver waits for every sender.
                let _ = sender.send(result);
            });
        }
        drop(sender);
        let begun = Instant::now();
        let mut spans = Vec::new();
        let mut latencies = Histogram::default();
        let mut failure = None;
        loop {
            match receiver.recv_timeout(WATCH_INTERVAL) {
                Ok(Ok((part, span))) => {
                    latencies.merge(&part);
                    spans.push(span);
                }
                Ok(Err(error)) => failure = failure.or(Some(error)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if !watch(begun.elapsed()) {
                shared.stop.store(true, Ordering::Relaxed);
                failure.get_or_insert_with(interrupted);
            }
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(Outcome { latencies, took: together(&spans) }),
        }
    })
}

/// The error of a measurement that was stopped.
pub fn interrupted() -> Error {
    Error::new(ErrorKind::Interrupted, "stopped before everything was measured")
}

/// From the first beginning to the last end.
fn together(spans: &[(Instant, Instant)]) -> Duration {
    let first = spans.iter().map(|span| span.0).min();
    let last = spans.iter().map(|span| span.1).max();
    first.zip(last).map(|(first, last)| last.duration_since(first)).unwrap_or_default()
}

/// What all threads of a load share.
struct Shared<'a> {
    load: &'a Load,
    offsets: Offsets,
    stop: AtomicBool,
    begin: Barrier,
}

/// A slot's request.
#[derive(Debug, Clone, Copy)]
struct Request {
    since: Instant,
    /// Its flush follows when it is done.
    to_flush: bool,
}

/// One thread of a load.
struct Worker<'a> {
    shared: &'a Shared<'a>,
    queue: Box<dyn Queue + 'a>,
    random: Rng,
    requests: Vec<Request>,
    in_flight: usize,
    /// Requests written, which makes every block written differ from the others.
    written: u64,
    latencies: Histogram,
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared<'a>, queue: Box<dyn Queue + 'a>, index: u64) -> Self {
        let random = Rng::with_seed(shared.load.seed.wrapping_add(index << 32));
        let request = Request { since: Instant::now(), to_flush: false };
        let requests = vec![request; queue.slots()];
        let latencies = Histogram::default();
        Self { shared, queue, random, requests, in_flight: 0, written: index << 48, latencies }
    }

    /// Runs until time, offsets or patience end; latencies, beginning and end.
    fn run(mut self) -> Result<(Histogram, (Instant, Instant))> {
        let prepared = self.prepare();
        // Reached by all, also those that failed.
        self.shared.begin.wait();
        prepared?;
        let begun = Instant::now();
        let deadline = self.shared.load.time.map(|time| begun + time);
        for slot in 0..self.requests.len() {
            self.next(slot, Instant::now())?;
        }
        let mut done = Vec::with_capacity(self.requests.len());
        let mut now = begun;
        while self.in_flight > 0 {
            self.queue.finish(&mut done)?;
            for slot in done.drain(..) {
                now = Instant::now();
                self.in_flight -= 1;
                let Request { since, to_flush } = self.requests[slot];
                if to_flush {
                    self.start(slot, Action::Flush, 0, Request { since, to_flush: false })?;
                    continue;
                }
                self.latencies.record(now.duration_since(since));
                let stopped = self.shared.stop.load(Ordering::Relaxed);
                if !stopped && deadline.is_none_or(|deadline| now < deadline) {
                    self.next(slot, now)?;
                }
            }
        }
        Ok((self.latencies, (begun, now)))
    }

    /// Fills the buffers with bytes that do not compress.
    fn prepare(&mut self) -> Result<()> {
        if self.shared.load.operation != Operation::Read {
            for slot in 0..self.requests.len() {
                self.random.fill(self.queue.buffer(slot)?);
            }
        }
        Ok(())
    }

    /// Starts the next request of the load in an idle slot, if there is one.
    fn next(&mut self, slot: usize, now: Instant) -> Result<()> {
        let Some(offset) = self.shared.offsets.next(&mut self.random) else { return Ok(()) };
        let operation = self.shared.load.operation;
        let request = Request { since: now, to_flush: operation == Operation::WriteFlush };
        if operation == Operation::Read {
            return self.start(slot, Action::Read, offset, request);
        }
        self.written += 1;
        stamp(self.queue.buffer(slot)?, self.written);
        self.start(slot, Action::Write, offset, request)
    }

    fn start(&mut self, slot: usize, action: Action, offset: u64, request: Request) -> Result<()> {
        self.requests[slot] = request;
        self.queue.start(slot, action, offset, self.shared.load.block)?;
        self.in_flight += 1;
        Ok(())
    }
}

/// Makes each block of a buffer one that was never written before: nothing below can share them.
pub fn stamp(buf: &mut [u8], number: u64) {
    for block in buf.chunks_mut(BLOCK_BYTES as usize) {
        if let Some(start) = block.first_chunk_mut() {
            *start = number.to_le_bytes();
        }
    }
}
