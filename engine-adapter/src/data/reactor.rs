//! The connections of one reactor.
//!
//! A read or write of whole blocks is done here from its first byte to its reply. What would have
//! to wait (parts of blocks, unmaps, commits, whatever is in the way of a request) goes to the
//! workers and comes back as a message.

use super::gate::Target;
use super::request::{Connection, Op, Request, error_text};
use super::server::{Service, Shared};
use super::slot::{Opened, Seen, Slots};
use super::stats;
use super::work::{self, Outcome};
use crate::wire::Hello;
use dbs_core::Error;
use dbs_core::volume::Finish;
use dbs_reactor::{Batch, Buf, Handler, Io, Remote};
use dbs_server::frontend::{Direct, Ended, Event, Limits, Peers, Plan, Ready};
use dbs_server::log;
use std::io;
use std::os::fd::OwnedFd;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Direct I/O on a volume is of whole sectors of so many bytes.
const SECTOR_BYTES: u64 = 512;

/// What other threads tell a reactor.
pub(super) enum Message {
    /// A connection to a replica.
    Adopt { service: Arc<Service>, socket: OwnedFd, peer: String },
    /// The gate of this service has changed.
    Changed(u64),
    /// A worker has carried a request out.
    Worked(Ticket, Outcome),
    /// A worker has woken a replica, or tried to.
    Woken { service: u64, result: Result<(), String> },
    /// A commit that requests waited for has ended.
    Committed { opened: u32, result: Result<(), Error> },
    /// A commit in the background has ended.
    Settled { opened: u32, result: Result<(), Error> },
    /// Commit what has been written.
    CommitDue,
    /// The service ends: with its connections answered, or at once.
    Leave { service: Arc<Service>, at_once: bool },
    /// There is nothing left to serve.
    End,
}

/// What it takes to answer a request.
pub(super) struct Ticket {
    peer: u32,
    pub(super) opened: u32,
    pub(super) request: Request,
    begun: Instant,
}

/// A request that is answered after a commit.
pub(super) struct Held {
    pub(super) ticket: Ticket,
}

/// A reactor.
pub(super) struct Reactor {
    pub(super) shared: Arc<Shared>,
    pub(super) remote: Remote<Message>,
    peers: Peers<Connection>,
    direct: Direct<Ticket>,
    pub(super) slots: Slots,
    /// What was written to in this turn.
    wrote: Vec<u32>,
    /// Time of this turn, once somebody has asked.
    now: Option<Instant>,
}

impl Reactor {
    pub fn new(shared: Arc<Shared>, remote: Remote<Message>) -> Self {
        let options = &shared.options;
        let limits = Limits { requests: options.requests_max, bytes: options.bytes_max };
        let peers = Peers::new(limits, options.write_timeout);
        let (direct, slots) = (Direct::default(), Slots::default());
        Self { shared, remote, peers, direct, slots, wrote: Vec::new(), now: None }
    }

    fn now(&mut self) -> Instant {
        *self.now.get_or_insert_with(Instant::now)
    }

    fn adopt(&mut self, io: &mut Io, service: Arc<Service>, socket: OwnedFd, peer: String) {
        let slot = match self.slots.find(service.id) {
            Some(slot) => slot,
            None => {
                let (remote, id) = (self.remote.clone(), service.id);
                let notify = Arc::new(move || remote.send(Message::Changed(id)));
                let watch = service.gate.watch(notify);
                self.slots.insert(service, watch)
            }
        };
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.connections += 1;
            stats::add(&slot.watch.counters.connections, 1);
            stats::add(&slot.watch.counters.connected, 1);
        }
        let number = self.peers.add(io, socket, Connection::new(slot, peer), None);
        self.input(io, u64::from(number), Event::Begun(&[]));
    }

    /// Lets a connection take input, runs the requests that completes and receives on.
    fn input(&mut self, io: &mut Io, tag: u64, event: Event<'_>) {
        let number = tag as u32;
        let (mut ready, failure) = self.peers.input(io, number, event);
        if let Some(error) = failure {
            let peer = self.peers.get(number).map_or("", |connection| &connection.peer);
            log::warn("data", &[("client", &peer), ("disconnected", &error)]);
        }
        for request in ready.drain(..) {
            self.start(io, number, request);
        }
        self.peers.receive(io, number, ready);
    }

    /// Starts a request in the best way there is for it.
    pub(super) fn start(&mut self, io: &mut Io, number: u32, ready: Ready<Request>) {
        let request = ready.request;
        let Some(slot) = self.peers.get(number).map(|connection| connection.slot) else { return };
        if request.op == Op::Unknown {
            return self.peers.forget(number, &request);
        }
        let hello = ready.payload.as_deref().and_then(Hello::decode);
        if request.op == Op::Ping && hello.is_some_and(|hello| !hello.server) {
            return self.reply(number, &request, |batch| request.reply_hello(batch));
        }
        match self.slots.look(io, slot) {
            Some(Seen::Open(opened)) => {
                let opened = *opened;
                self.begin(io, (number, opened), request, ready.payload);
            }
            Some(Seen::Refused(texts)) => {
                let texts = Arc::clone(texts);
                let text = if request.op == Op::Ping { &texts.ping } else { &texts.io };
                self.refuse(number, slot, &request, text);
            }
            Some(Seen::Dormant) if request.op == Op::Ping => {
                self.reply(number, &request, |batch| request.reply_done(batch, 0));
            }
            Some(Seen::Dormant) => self.park(slot, number, ready),
            None => {}
        }
    }

    /// Starts a request on an open replica.
    fn begin(
        &mut self,
        io: &mut Io,
        (peer, number): (u32, u32),
        request: Request,
        payload: Option<Buf>,
    ) {
        let begun = self.now();
        let ticket = Ticket { peer, opened: number, request, begun };
        let Self { slots, direct, .. } = self;
        if let Some(slot) = slots.slot_of(number) {
            stats::add(&slot.watch.counters.in_flight, 1);
        }
        let Some(opened) = slots.opened_mut(number) else { return };
        opened.in_flight += 1;
        let Opened { active, storage, .. } = opened;
        let range = request.range().unwrap_or((1, 0));
        let whole = range.1 > 0 && (range.0 | range.1).is_multiple_of(SECTOR_BYTES);
        let direct_write = whole && active.is_changed();
        match (request.op, active.target()) {
            (Op::Flush, _) => self.commit(ticket),
            (Op::Read, Target::Volume { volume, .. }) if whole => {
                let length = range.1 as usize;
                let plan = direct.plan_read(volume, storage.as_ref(), (range.0, length), false);
                match plan {
                    Ok(Plan::Io(planned)) => direct.read(io, planned, length, ticket),
                    Ok(Plan::Zeros) => {
                        let data = zeros(io, length);
                        self.answer_data(io, &ticket, data);
                    }
                    Ok(Plan::Blocked | Plan::Holes) => self.work(io, ticket, payload),
                    Err(error) => self.fail(io, &ticket, &error),
                }
            }
            (Op::Write, Target::Volume { volume, .. }) if direct_write => {
                let Some(payload) = payload else { return self.work(io, ticket, None) };
                match direct.plan_write(volume, storage.as_ref(), range.0, payload.len()) {
                    Ok(Some(planned)) => direct.write(io, planned, payload, ticket),
                    Ok(None) => self.work(io, ticket, Some(payload)),
                    Err(error) => self.fail(io, &ticket, &error),
                }
            }
            (Op::Read, Target::Null { size }) if whole && range.0 + range.1 <= *size => {
                let data = zeros(io, range.1 as usize);
                self.answer_data(io, &ticket, data);
            }
            (Op::Write, Target::Null { size }) if direct_write && range.0 + range.1 <= *size => {
                drop(payload);
                self.written(io, ticket, Finish::Done);
            }
            _ => self.work(io, ticket, payload),
        }
    }

    /// Hands a request to the workers.
    fn work(&self, io: &Io, ticket: Ticket, payload: Option<Buf>) {
        let Some(opened) = self.slots.opened(ticket.opened) else { return };
        let (active, remote) = (Arc::clone(&opened.active), self.remote.clone());
        let buffers = io.buffers().clone();
        self.shared.pool.submit(move || {
            let payload = payload;
            let bytes = payload.as_deref().unwrap_or_default();
            let outcome = work::execute(&active, &ticket.request, bytes, &buffers);
            // Whoever waits for the end of the request finds nothing of it left.
            drop((active, payload));
            remote.send(Message::Worked(ticket, outcome));
        });
    }

    fn worked(&mut self, io: &mut Io, ticket: Ticket, outcome: Outcome) {
        let request = ticket.request;
        match outcome {
            Outcome::Failed(text) => self.fail_with(io, &ticket, &text),
            Outcome::Done(size) if request.changes() => {
                self.note_written(ticket.opened, u64::from(size));
                let power = self.slots.opened(ticket.opened).is_some_and(|opened| opened.power);
                if power { self.commit(ticket) } else { self.answer_done(io, &ticket, size) }
            }
            Outcome::Done(size) => self.answer_done(io, &ticket, size),
            Outcome::Data(buf, range) if range == (0..buf.len()) => {
                self.answer_data(io, &ticket, buf);
            }
            Outcome::Data(buf, range) => {
                let count = range.len() as u64;
                self.answer(io, &ticket, Some(count), |batch| {
                    request.reply_bytes(batch, &buf[range]);
                });
            }
        }
    }

    /// A write has reached the device.
    fn written(&mut self, io: &mut Io, ticket: Ticket, finish: Finish) {
        self.note_written(ticket.opened, u64::from(ticket.request.size));
        let power = self.slots.opened(ticket.opened).is_some_and(|opened| opened.power);
        if power || finish == Finish::Commit {
            self.commit(ticket);
        } else {
            let size = ticket.request.size;
            self.answer_done(io, &ticket, size);
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

    pub(super) fn answer_done(&mut self, io: &mut Io, ticket: &Ticket, size: u32) {
        let request = &ticket.request;
        self.answer(io, ticket, Some(u64::from(size)), |batch| request.reply_done(batch, size));
    }

    fn answer_data(&mut self, io: &mut Io, ticket: &Ticket, data: Buf) {
        let request = &ticket.request;
        let count = data.len() as u64;
        self.answer(io, ticket, Some(count), |batch| request.reply_data(batch, data));
    }

    pub(super) fn fail(&mut self, io: &mut Io, ticket: &Ticket, error: &Error) {
        let size = self.slots.opened(ticket.opened).map_or(0, |opened| opened.active.size());
        self.fail_with(io, ticket, &error_text(&ticket.request, size, error));
    }

    fn fail_with(&mut self, io: &mut Io, ticket: &Ticket, text: &str) {
        let request = &ticket.request;
        self.answer(io, ticket, None, |batch| request.reply_error(batch, text));
    }

    /// Answers a request of an open replica; `bytes` if it succeeded.
    fn answer(
        &mut self,
        io: &mut Io,
        ticket: &Ticket,
        bytes: Option<u64>,
        reply: impl FnOnce(&mut Batch),
    ) {
        let took = self.now().saturating_duration_since(ticket.begun);
        let Ticket { peer, opened, request, .. } = ticket;
        if let Some(slot) = self.slots.slot_of(*opened) {
            let counters = &slot.watch.counters;
            if let Some(kind) = request.kind() {
                counters.answered(kind, bytes.unwrap_or(0), bytes.is_some(), took);
            }
            stats::add(&counters.in_flight, u64::MAX);
        }
        if request.changes()
            && bytes.is_some()
            && let Some(opened) = self.slots.opened(*opened)
        {
            opened.active.bump();
        }
        self.reply(*peer, request, reply);
        self.slots.ended(io, *opened);
    }

    /// Answers a request with an error without having begun it.
    pub(super) fn refuse(&mut self, peer: u32, slot: u32, request: &Request, text: &str) {
        if let (Some(slot), Some(kind)) = (self.slots.get(slot), request.kind()) {
            slot.watch.counters.answered(kind, 0, false, std::time::Duration::ZERO);
        }
        self.reply(peer, request, |batch| request.reply_error(batch, text));
    }

    fn reply(&mut self, peer: u32, request: &Request, reply: impl FnOnce(&mut Batch)) {
        use dbs_server::frontend::Charge;
        self.peers.answer(peer, request.cost_bytes(), reply);
    }

    fn leave(&mut self, io: &mut Io, service: &Arc<Service>, at_once: bool) {
        let Some(number) = self.slots.find(service.id) else {
            if !at_once {
                service.left();
            }
            return;
        };
        if let Some(slot) = self.slots.get_mut(number) {
            slot.leaving = true;
        }
        self.peers.end(io, at_once, |connection| connection.slot == number);
        self.slots.leave(io, number);
    }
}

impl Handler for Reactor {
    type Message = Message;

    fn message(&mut self, io: &mut Io, message: Message) {
        match message {
            Message::Adopt { service, socket, peer } => self.adopt(io, service, socket, peer),
            Message::Changed(service) => {
                if let Some(slot) = self.slots.find(service) {
                    self.slots.changed(io, slot);
                }
            }
            Message::Worked(ticket, outcome) => self.worked(io, ticket, outcome),
            Message::Woken { service, result } => self.woken(io, service, result),
            Message::Committed { opened, result } => self.committed(io, opened, &result),
            Message::Settled { opened, result } => self.settled(io, opened, &result),
            Message::CommitDue => self.commit_due(),
            Message::Leave { service, at_once } => self.leave(io, &service, at_once),
            Message::End => io.stop(),
        }
    }

    fn received(&mut self, io: &mut Io, tag: u64, data: io::Result<&[u8]>) {
        self.input(io, tag, Event::Received(data));
    }

    fn filled(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.input(io, tag, Event::Filled(buf, result));
    }

    fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        let Some((ticket, ended)) = self.direct.moved(tag, buf, result) else { return };
        match ended {
            Ok(Ended::Read(buf)) => self.answer_data(io, &ticket, buf),
            Ok(Ended::Write(finish)) => self.written(io, ticket, finish),
            Err(error) => self.fail(io, &ticket, &error),
        }
    }

    fn sent(&mut self, io: &mut Io, tag: u64, batch: Batch, result: io::Result<()>) {
        self.input(io, tag, Event::Sent(batch, result));
    }

    fn turn(&mut self, io: &mut Io) {
        self.now = None;
        while let Some(number) = self.wrote.pop() {
            let Some(opened) = self.slots.opened_mut(number) else { continue };
            self.shared.written.store(true, Ordering::Relaxed);
            if opened.active.wrote(std::mem::take(&mut opened.wrote)) {
                self.settle_later(number);
            }
        }
        let Self { peers, slots, shared, .. } = self;
        let mut left = Vec::new();
        peers.settle(io, |connection| {
            shared.connections.fetch_sub(1, Ordering::SeqCst);
            if let Some(slot) = slots.get_mut(connection.slot) {
                slot.connections -= 1;
                stats::add(&slot.watch.counters.connected, u64::MAX);
                if slot.leaving {
                    left.push(connection.slot);
                }
            }
        });
        for slot in left {
            slots.leave(io, slot);
        }
    }

    fn tick(&mut self, io: &mut Io) {
        self.peers.tick(io);
    }
}

fn zeros(io: &Io, length: usize) -> Buf {
    let mut buf = io.buffers().take(length);
    buf.fill(0);
    buf
}
