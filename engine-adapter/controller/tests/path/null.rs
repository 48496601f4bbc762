//! Load without a socket: requests made where they are carried out, half of them writes, anywhere in the volume.

use dbs_frontend::{Action, Carrier, Carry, Front, Outcome};
use dbs_reactor::Io;
use longhorn_controller::path::Path;
use std::any::Any;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Requests in flight on each reactor.
pub const DEPTH: usize = 32;
/// Bytes of each request.
const LENGTH: u32 = 4096;
/// For how long requests begin.
const DURATION: Duration = Duration::from_millis(200);
/// How long the last replies may take: as long as the last replica may be silent, and more.
const GRACE: Duration = Duration::from_secs(60);

/// What came of it.
#[derive(Debug, Default)]
pub struct Report {
    /// Requests answered with success.
    pub requests: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// The text of the first of those.
    pub error: Option<String>,
}

/// Runs the load on all reactors of a path; the reports of all of them together.
pub fn run(path: &Arc<Path>) -> Report {
    let (report, reports) = mpsc::channel();
    let blocks = path.size() / u64::from(LENGTH);
    let attached = path.attach(|reactor, _| {
        let report = report.clone();
        move |_: &mut Io, _| -> Box<dyn Front> {
            Box::new(Generator {
                random: fastrand::Rng::with_seed(reactor as u64),
                blocks,
                free: (0..DEPTH as u64).collect(),
                start: Instant::now(),
                report: Some(Report::default()),
                reports: report,
                stopping: false,
            })
        }
    });
    let attached = attached.unwrap();
    // Their first turn comes with a message.
    (0..path.reactors()).for_each(|reactor| attached.send(reactor, Box::new(())));
    (0..path.reactors()).fold(Report::default(), |all, _| {
        let one = reports.recv_timeout(DURATION + GRACE).expect("the last replies do not come");
        Report {
            requests: all.requests + one.requests,
            errors: all.errors + one.errors,
            error: all.error.or(one.error),
        }
    })
}

struct Generator {
    random: fastrand::Rng,
    blocks: u64,
    /// Tickets that no request in flight has.
    free: Vec<u64>,
    start: Instant,
    report: Option<Report>,
    reports: mpsc::Sender<Report>,
    stopping: bool,
}

impl Front for Generator {
    fn message(&mut self, _: &mut Io, _: &mut dyn Carrier, _: Box<dyn Any + Send>) {}

    fn answered(&mut self, _: &mut Io, ticket: u64, outcome: Outcome) {
        self.free.push(ticket);
        let Some(report) = &mut self.report else { return };
        match outcome {
            Outcome::Failed(failure) => {
                report.errors += 1;
                report.error.get_or_insert(failure.text);
            }
            Outcome::Done(_) | Outcome::Data(_) => report.requests += 1,
        }
    }

    /// New requests begin here only, so that replicas that answer at once do not keep a turn from
    /// ending.
    fn turn(&mut self, io: &mut Io, carrier: &mut dyn Carrier) {
        if !self.stopping && self.start.elapsed() < DURATION {
            while let Some(ticket) = self.free.pop() {
                let write = self.random.bool();
                let offset = self.random.u64(..self.blocks) * u64::from(LENGTH);
                // Whatever is in it.
                let payload = write.then(|| io.buffers().take(LENGTH as usize));
                let action = if write { Action::Write { durable: false } } else { Action::Read };
                carrier.carry(io, Carry { action, offset, length: LENGTH }, payload, ticket);
            }
        } else if self.is_over()
            && let Some(report) = self.report.take()
        {
            // An error: nobody waits for it any more.
            let _ = self.reports.send(report);
        }
    }

    fn stop(&mut self, _: &mut Io, _: bool) {
        self.stopping = true;
    }

    fn is_over(&self) -> bool {
        self.free.len() == DEPTH
    }
}
