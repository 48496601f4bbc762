//! Requests on open replicas, from their beginning to their outcome, on one reactor.
//!
//! A read or write of whole blocks is carried out here. What would have to wait (parts of blocks,
//! unmaps, commits, whatever is in the way of a request) goes to workers and comes back as a
//! message. Who asks, over which way, and how it is told the outcome is not of interest: `T` says whose
//! a request is, for servers of data connections and for controllers with a replica in their process.

use super::gate::{Active, Gate, Target};
use super::request::{Op, Request, error_text};
use super::slot::{Opened, Parked, Seen, Slots};
use super::stats::{self, Counters};
use super::ticket::Ticket;
use super::work::{self, Outcome};
use dbs_core::volume::Finish;
use dbs_core::{Error, ErrorKind};
use dbs_frontend::{Direct, Ended as Moved, Plan, Pool, Work};
use dbs_reactor::{Buf, Buffers, Io, Payload};
use longhorn_wire::frame::Hello;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Direct I/O on a volume is of whole sectors of so many bytes.
const SECTOR_BYTES: u64 = 512;

/// What other threads tell a runner, by way of its reactor.
pub enum Told<T> {
    /// The gate of the replica of this name has changed.
    Changed(u64),
    /// A worker has carried a request out.
    Worked(Ticket<T>, Outcome),
    /// A replica has been woken, or could not be.
    Woken(u64, Result<(), String>),
    /// A commit that requests waited for has ended.
    Committed(u32, Result<(), Error>),
    /// A commit in the background has ended.
    Settled(u32, Result<(), Error>),
}

/// A request that has ended, whose it was, and how.
pub struct Ended<T> {
    /// Whose it was.
    pub whose: T,
    /// What was asked.
    pub request: Request,
    /// What came of it.
    pub outcome: Outcome,
}

/// Requests on open replicas.
pub struct Runner<T> {
    pub(super) tell: Arc<dyn Fn(Told<T>) + Send + Sync>,
    direct: Direct<Ticket<T>>,
    pub(super) slots: Slots<T>,
    /// What was written to in this turn.
    wrote: Vec<u32>,
    /// For the owner to take, after everything it calls.
    pub ended: Vec<Ended<T>>,
    /// Replicas that were let go of, likewise.
    pub gone: Vec<u64>,
    /// Something was written and not committed; the owner resets it.
    pub written: bool,
    /// Time of this turn, once somebody has asked.
    now: Option<Instant>,
}

impl<T: Send + 'static> Runner<T> {
    /// A runner of no replicas, which gets what `tell` is called with by [`Runner::told`].
    pub fn new(tell: Arc<dyn Fn(Told<T>) + Send + Sync>) -> Self {
        Self {
            tell,
            direct: Direct::default(),
            slots: Slots::default(),
            wrote: Vec::new(),
            ended: Vec::new(),
            gone: Vec::new(),
            written: false,
            now: None,
        }
    }

    /// Takes a replica in, under a name that no other has; its number.
    pub fn insert(&mut self, id: u64, gate: Arc<Gate>, pool: Arc<Pool>) -> u32 {
        let tell = Arc::clone(&self.tell);
        let watch = gate.watch(Arc::new(move || tell(Told::Changed(id))));
        self.slots.insert(id, gate, pool, watch)
    }

    /// The number of a replica.
    pub fn find(&self, id: u64) -> Option<u32> {
        self.slots.find(id)
    }

    /// Whether there are no replicas, nor anything of those that were.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// What controllers are told of a replica.
    pub fn hello(&self, number: u32) -> Hello {
        self.slots.get(number).map_or_else(|| Hello::of_server(None), |slot| slot.gate.hello())
    }

    /// What a replica's requests may do.
    pub(super) fn gate(&self, number: u32) -> Option<&Gate> {
        self.slots.get(number).map(|slot| &*slot.gate)
    }

    /// What is counted for a replica.
    pub fn counters(&self, number: u32) -> Option<&Counters> {
        self.slots.get(number).map(|slot| &*slot.watch.counters)
    }

    /// The session that a replica is open in, or asleep; requests of earlier ones are not to be started.
    pub fn open_session(&mut self, io: &mut Io, number: u32) -> Option<u64> {
        self.slots.look(io, number)?;
        self.slots.open_session(number)
    }

    /// Lets go of a replica, now or when its requests have ended: [`Runner::gone`].
    pub fn let_go(&mut self, io: &mut Io, number: u32) {
        self.slots.set_leaving(number);
        self.leave(io, number);
    }

    pub(super) fn leave(&mut self, io: &mut Io, number: u32) {
        self.gone.extend(self.slots.leave(io, number));
    }

    fn now(&mut self) -> Instant {
        *self.now.get_or_insert_with(Instant::now)
    }

    /// Something that another thread has told.
    pub fn told(&mut self, io: &mut Io, told: Told<T>) {
        match told {
            Told::Changed(id) => {
                if let Some(slot) = self.slots.find(id) {
                    self.slots.changed(io, slot);
                }
            }
            Told::Worked(ticket, outcome) => self.worked(io, ticket, outcome),
            Told::Woken(id, result) => self.woken(io, id, result),
            Told::Committed(opened, result) => self.committed(io, opened, &result),
            Told::Settled(opened, result) => self.settled(io, opened, &result),
        }
    }

    /// Starts a request of a replica in the best way there is for it.
    pub fn start(
        &mut self,
        io: &mut Io,
        slot: u32,
        request: Request,
        payload: Option<Payload>,
        whose: T,
    ) {
        match self.slots.look(io, slot) {
            Some(Seen::Open(opened)) => {
                let opened = *opened;
                let begun = self.now();
                self.begin(io, Ticket { whose, opened, request, begun, noted: false }, payload);
            }
            Some(Seen::Refused(texts)) => {
                let texts = Arc::clone(texts);
                let text = if request.op == Op::Ping { &texts.ping } else { &texts.io };
                self.refuse(slot, whose, request, text);
            }
            Some(Seen::Dormant) if request.op == Op::Ping => {
                self.ended.push(Ended { whose, request, outcome: Outcome::Done(0) });
            }
            Some(Seen::Dormant) => {
                let session = self.slots.open_session(slot).unwrap_or_default();
                self.park(slot, Parked { whose, request, payload, session });
            }
            None => self.refuse(slot, whose, request, "the replica is not served any more"),
        }
    }

    /// Starts a request on an open replica.
    fn begin(&mut self, io: &mut Io, ticket: Ticket<T>, payload: Option<Payload>) {
        let Self { slots, direct, .. } = self;
        if let Some(slot) = slots.slot_of(ticket.opened) {
            stats::add(&slot.watch.counters.in_flight, 1);
        }
        let Some(opened) = slots.opened_mut(ticket.opened) else { return };
        opened.in_flight += 1;
        let Opened { active, storage, .. } = opened;
        let range = ticket.request.range().unwrap_or((1, 0));
        let whole = range.1 > 0 && (range.0 | range.1).is_multiple_of(SECTOR_BYTES);
        let direct_write = whole && active.is_changed();
        match (ticket.request.op, active.target()) {
            (Op::Flush, _) => self.commit(ticket),
            (Op::Read, Target::Volume { volume, .. }) if whole => {
                let length = range.1 as usize;
                let plan = direct.plan_read(volume, storage.as_ref(), (range.0, length), false);
                match plan {
                    Ok(Plan::Io(planned)) => direct.read(io, planned, length, ticket),
                    Ok(Plan::Zeros) => {
                        let data = zeros(io, length);
                        self.end_data(io, ticket, data);
                    }
                    Ok(Plan::Blocked | Plan::Holes) => self.work(io, ticket, payload),
                    Err(error) => self.fail(io, ticket, &error),
                }
            }
            (Op::Write, Target::Volume { volume, .. }) if direct_write => {
                let Some(payload) = payload else { return self.work(io, ticket, None) };
                match direct.plan_write(volume, storage.as_ref(), range.0, payload.len()) {
                    Ok(Some(planned)) => direct.write(io, planned, payload, ticket),
                    Ok(None) => self.work(io, ticket, Some(payload)),
                    Err(error) => self.fail(io, ticket, &error),
                }
            }
            (Op::Read, Target::Null { size }) if whole && range.0 + range.1 <= *size => {
                let data = zeros(io, range.1 as usize);
                self.end_data(io, ticket, data);
            }
            (Op::Write, Target::Null { size }) if direct_write && range.0 + range.1 <= *size => {
                drop(payload);
                self.finished(io, ticket, Finish::Done);
            }
            _ => self.work(io, ticket, payload),
        }
    }

    /// Hands a request to the workers.
    fn work(&self, io: &Io, ticket: Ticket<T>, payload: Option<Payload>) {
        let Some(opened) = self.slots.opened(ticket.opened) else { return };
        let Some(slot) = self.slots.slot_of(ticket.opened) else { return };
        let (active, tell) = (Arc::clone(&opened.active), Arc::clone(&self.tell));
        let buffers = io.buffers().clone();
        let progress = work::Progress::default();
        let job = Some(Job { active, tell, buffers, progress, payload, ticket });
        slot.pool.submit(slot.id, Waiting(job));
    }

    fn worked(&mut self, io: &mut Io, ticket: Ticket<T>, outcome: Outcome) {
        match outcome {
            Outcome::Done(size) if ticket.request.changes() => {
                self.note_written(ticket.opened, u64::from(size));
                let power = self.slots.opened(ticket.opened).is_some_and(|opened| opened.power);
                if power { self.commit(ticket) } else { self.end_done(io, ticket, size) }
            }
            outcome => self.end(io, ticket, outcome),
        }
    }

    /// Transfers of the reactor's own have ended: see [`dbs_reactor::Handler::moved`].
    pub fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        let Some((ticket, ended)) = self.direct.moved(tag, buf, result) else { return };
        match ended {
            Ok(Moved::Read(buf)) => self.end_data(io, ticket, buf),
            Ok(Moved::Again) => self.work(io, ticket, None),
            Ok(Moved::Write(finish)) => self.finished(io, ticket, finish),
            // Somebody who may wait finds out which block cannot be read: another replica has it.
            Err(error) if ticket.request.op == Op::Read && error.kind() == ErrorKind::Io => {
                self.work(io, ticket, None);
            }
            Err(error) => self.fail(io, ticket, &error),
        }
    }

    /// A write has reached the device.
    fn finished(&mut self, io: &mut Io, ticket: Ticket<T>, finish: Finish) {
        let size = ticket.request.size;
        self.note_written(ticket.opened, u64::from(size));
        let power = self.slots.opened(ticket.opened).is_some_and(|opened| opened.power);
        if power || finish == Finish::Commit {
            self.commit(ticket);
        } else {
            self.end_done(io, ticket, size);
        }
    }

    fn note_written(&mut self, number: u32, bytes: u64) {
        let Some(opened) = self.slots.opened_mut(number) else { return };
        if opened.wrote == 0 {
            self.wrote.push(number);
        }
        // An unmap that freed nothing is to be committed, too.
        opened.wrote += bytes.max(1);
    }

    pub(super) fn end_done(&mut self, io: &mut Io, ticket: Ticket<T>, size: u32) {
        self.end(io, ticket, Outcome::Done(size));
    }

    fn end_data(&mut self, io: &mut Io, ticket: Ticket<T>, data: Buf) {
        let range = 0..data.len();
        self.end(io, ticket, Outcome::Data(data, range));
    }

    pub(super) fn fail(&mut self, io: &mut Io, ticket: Ticket<T>, error: &Error) {
        let size = self.slots.opened(ticket.opened).map_or(0, |opened| opened.active.size());
        let text = error_text(&ticket.request, size, error);
        self.end(io, ticket, Outcome::Failed(text));
    }

    /// Ends a request of an open replica.
    fn end(&mut self, io: &mut Io, ticket: Ticket<T>, outcome: Outcome) {
        let took = self.now().saturating_duration_since(ticket.begun);
        let Ticket { whose, opened, request, noted, .. } = ticket;
        let bytes = match &outcome {
            Outcome::Done(size) => Some(u64::from(*size)),
            Outcome::Data(_, range) => Some(range.len() as u64),
            Outcome::Damaged(_) | Outcome::Failed(_) => None,
        };
        if let Some(slot) = self.slots.slot_of(opened) {
            let counters = &slot.watch.counters;
            if let Some(kind) = request.kind() {
                counters.answered(kind, bytes.unwrap_or(0), bytes.is_some(), took);
            }
            stats::add(&counters.in_flight, u64::MAX);
        }
        if request.changes()
            && bytes.is_some()
            && let Some(opened) = self.slots.opened(opened)
        {
            opened.active.count_change(noted);
        }
        self.ended.push(Ended { whose, request, outcome });
        self.release(io, opened);
    }

    /// One that uses something opened has ended.
    pub(super) fn release(&mut self, io: &mut Io, opened: u32) {
        if let Some(leaving) = self.slots.ended(io, opened) {
            self.leave(io, leaving);
        }
    }

    /// Ends a request with an error without having begun it.
    pub(super) fn refuse(&mut self, slot: u32, whose: T, request: Request, text: &str) {
        if let (Some(slot), Some(kind)) = (self.slots.get(slot), request.kind()) {
            slot.watch.counters.answered(kind, 0, false, Duration::ZERO);
        }
        self.ended.push(Ended { whose, request, outcome: Outcome::Failed(text.to_owned()) });
    }

    /// The end of a turn.
    pub fn turn(&mut self) {
        self.now = None;
        while let Some(number) = self.wrote.pop() {
            let Some(opened) = self.slots.opened_mut(number) else { continue };
            self.written = true;
            if opened.active.wrote(std::mem::take(&mut opened.wrote)) {
                self.settle_later(number);
            }
        }
    }
}

/// A request that a worker carries out.
struct Job<T> {
    active: Arc<Active>,
    tell: Arc<dyn Fn(Told<T>) + Send + Sync>,
    buffers: Buffers,
    progress: work::Progress,
    payload: Option<Payload>,
    ticket: Ticket<T>,
}

/// The same, until it has ended.
struct Waiting<T>(Option<Job<T>>);

impl<T: Send> Work for Waiting<T> {
    fn step(&mut self) -> bool {
        let Some(job) = &mut self.0 else { return false };
        let bytes = job.payload.as_deref().unwrap_or_default();
        let (request, progress) = (&job.ticket.request, &mut job.progress);
        let Some(outcome) = work::step(&job.active, request, progress, bytes, &job.buffers) else {
            return true;
        };
        if let Some(Job { active, payload, tell, ticket, .. }) = self.0.take() {
            // Whoever waits for the end of the request finds nothing of it left.
            drop((active, payload));
            tell(Told::Worked(ticket, outcome));
        }
        false
    }
}

fn zeros(io: &Io, length: usize) -> Buf {
    let mut buf = io.buffers().take(length);
    buf.fill(0);
    buf
}
