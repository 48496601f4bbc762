//! The frontend `null`: requests made where they are carried out, to measure what is behind.

use dbs_bench::Histogram;
use dbs_frontend::{Action, Carrier, Carry, Front, Outcome};
use dbs_reactor::Io;
use longhorn_controller::path::Path;
use longhorn_testing::load::{Draw, LoadReport};
use longhorn_wire::frame::PAYLOAD_MAX_BYTES;
use std::any::Any;
use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How long the last replies may take: as long as the last replica may be silent, and more.
const GRACE: Duration = Duration::from_secs(60);

/// What to ask of a path.
#[derive(Debug, Clone)]
pub struct NullLoad {
    /// Requests in flight on each reactor.
    pub depth: usize,
    /// Bytes of each request.
    pub length: u32,
    /// Of a hundred requests, so many are writes.
    pub write_percent: u8,
    /// One after the other instead of anywhere.
    pub sequential: bool,
    /// For how long.
    pub duration: Duration,
    /// What to draw offsets from.
    pub seed: u64,
}

/// Runs a load on all reactors of a path; the reports of all of them together.
///
/// # Errors
/// The load is of nothing, or too much; the last replies do not come.
pub fn run(path: &Arc<Path>, load: &NullLoad) -> io::Result<LoadReport> {
    let fits = u64::from(load.length) <= path.size() && load.length <= PAYLOAD_MAX_BYTES;
    if load.length == 0 || !fits || load.depth == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a load of nothing, or too much"));
    }
    let (report, reports) = mpsc::channel();
    let size = path.size();
    let attached = path.attach(|reactor, _| {
        let (load, report) = (load.clone(), report.clone());
        let seed = load.seed.wrapping_add(reactor as u64 * 0x5851_f42d);
        move |_: &mut Io, _| -> Box<dyn Front> {
            let NullLoad { length, write_percent, sequential, .. } = load;
            let draw = Draw::new(length, size, write_percent, sequential, seed);
            Box::new(Generator::new(load, draw, report))
        }
    })?;
    // Their first turn comes with a message.
    (0..path.reactors()).for_each(|reactor| attached.send(reactor, Box::new(())));
    let mut all: Option<LoadReport> = None;
    for _ in 0..path.reactors() {
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the last replies do not come");
        let one = reports.recv_timeout(load.duration + GRACE).map_err(late)?;
        all = Some(match all {
            None => one,
            Some(mut all) => {
                all.requests += one.requests;
                all.errors += one.errors;
                all.error = all.error.or(one.error);
                all.elapsed = all.elapsed.max(one.elapsed);
                all.latency.merge(&one.latency);
                all
            }
        });
    }
    all.ok_or_else(|| io::Error::other("the path has no reactors"))
}

struct Generator {
    load: NullLoad,
    draw: Draw,
    /// When each request in flight began; its number is the ticket.
    begun: Vec<Instant>,
    free: Vec<u32>,
    start: Instant,
    report: Option<LoadReport>,
    reports: mpsc::Sender<LoadReport>,
    stopping: bool,
}

impl Generator {
    fn new(load: NullLoad, draw: Draw, reports: mpsc::Sender<LoadReport>) -> Self {
        let now = Instant::now();
        let report = LoadReport {
            requests: 0,
            errors: 0,
            error: None,
            elapsed: Duration::ZERO,
            latency: Histogram::default(),
        };
        Self {
            begun: vec![now; load.depth],
            free: (0..load.depth as u32).rev().collect(),
            start: now,
            report: Some(report),
            reports,
            stopping: false,
            draw,
            load,
        }
    }
}

impl Front for Generator {
    fn message(&mut self, _: &mut Io, _: &mut dyn Carrier, _: Box<dyn Any + Send>) {}

    fn answered(&mut self, _: &mut Io, ticket: u64, outcome: Outcome) {
        self.free.push(ticket as u32);
        let Some(report) = &mut self.report else { return };
        match outcome {
            Outcome::Failed(failure) => {
                report.errors += 1;
                report.error.get_or_insert(failure.text);
            }
            Outcome::Done(_) | Outcome::Data(_) => {
                report.requests += 1;
                if let Some(begun) = self.begun.get(ticket as usize) {
                    report.latency.record(begun.elapsed());
                }
            }
        }
    }

    /// New requests begin here only, so that replicas that answer at once do not keep a turn from
    /// ending.
    fn turn(&mut self, io: &mut Io, carrier: &mut dyn Carrier) {
        let now = Instant::now();
        if !self.stopping && now.saturating_duration_since(self.start) < self.load.duration {
            while let Some(number) = self.free.pop() {
                let (write, offset) = self.draw.request();
                let length = self.load.length;
                // Whatever is in it.
                let payload = write.then(|| io.buffers().take(length as usize));
                let action = if write { Action::Write { durable: false } } else { Action::Read };
                if let Some(begun) = self.begun.get_mut(number as usize) {
                    *begun = now;
                }
                carrier.carry(io, Carry { action, offset, length }, payload, u64::from(number));
            }
        } else if self.free.len() == self.begun.len()
            && let Some(mut report) = self.report.take()
        {
            report.elapsed = self.start.elapsed();
            // An error: nobody waits for it any more.
            let _ = self.reports.send(report);
        }
    }

    fn stop(&mut self, _: &mut Io, _: bool) {
        self.stopping = true;
    }

    fn is_over(&self) -> bool {
        self.free.len() == self.begun.len()
    }
}
