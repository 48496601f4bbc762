//! The connections of one reactor: requests from them to the [`Runner`], and its outcomes as replies.

use super::STRANGERS;
use super::lanes::Sent;
use super::request::{Connection, Op, Request};
use super::runner::{Ended, Runner};
use super::shared::{Message, Service, Shared};
use super::stats;
use super::work::Outcome;
use dbs_frontend::tls::TlsStream;
use dbs_frontend::{Charge, Event, Limits, Peers, Ready};
use dbs_reactor::{Batch, Buf, Handler, Io, Payload, Remote};
use dbs_service::log;
use longhorn_wire::frame::{Hello, Lane, Standing, feature};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A replica whose connections this reactor has.
struct Serving {
    service: Arc<Service>,
    connections: usize,
    /// The service is to end, once its connections have.
    leaving: bool,
}

/// A reactor.
pub(super) struct Reactor {
    shared: Arc<Shared>,
    peers: Peers<Connection>,
    runner: Runner<u32>,
    /// By their numbers in the runner.
    serving: BTreeMap<u32, Serving>,
    /// Reused.
    ended: Vec<Ended<u32>>,
}

impl Reactor {
    pub fn new(shared: Arc<Shared>, remote: Remote<Message>) -> Self {
        let options = &shared.options;
        let limits = Limits { requests: options.requests_max, bytes: options.bytes_max };
        let peers = Peers::new(limits, options.write_timeout);
        let runner = Runner::new(Arc::new(move |told| remote.send(Message::Told(told))));
        Self { shared, peers, runner, serving: BTreeMap::new(), ended: Vec::new() }
    }

    fn adopt(
        &mut self,
        io: &mut Io,
        service: Arc<Service>,
        (socket, tls): (OwnedFd, Option<Box<TlsStream>>),
        (session, peer): (u64, String),
    ) {
        let slot = match self.runner.find(service.id) {
            Some(slot) => slot,
            None => {
                let (gate, pool) = (Arc::clone(&service.gate), Arc::clone(&self.shared.pool));
                let slot = self.runner.insert(service.id, gate, pool);
                self.serving.insert(slot, Serving { service, connections: 0, leaving: false });
                slot
            }
        };
        if let Some(serving) = self.serving.get_mut(&slot) {
            serving.connections += 1;
        }
        if let Some(counters) = self.runner.counters(slot) {
            stats::add(&counters.connections, 1);
            stats::add(&counters.connected, 1);
        }
        let connection = Connection::new(slot, session, peer);
        let number = self.peers.add(io, socket, connection, tls.map(|tls| *tls));
        self.input(io, u64::from(number), Event::Begun(&[]));
    }

    /// Lets a connection take input, runs the requests that completes and receives on.
    fn input(&mut self, io: &mut Io, tag: u64, event: Event<'_>) {
        let number = tag as u32;
        let (mut ready, failure) = self.peers.input(io, number, event);
        if let Some(error) = failure {
            let connection = self.peers.get(number);
            if let Some(lane) = connection.and_then(|connection| connection.lane.as_ref()) {
                lane.distrust();
            }
            let peer = connection.map_or("", |connection| &connection.peer);
            STRANGERS.warn("data", &[("client", &peer), ("disconnected", &error)]);
        }
        for request in ready.drain(..) {
            self.start(io, number, request);
        }
        self.answer();
        self.peers.receive(io, number, ready);
    }

    fn start(&mut self, io: &mut Io, number: u32, ready: Ready<Request>) {
        let Ready { request, payload } = ready;
        let Some(connection) = self.peers.get(number) else { return };
        let (slot, session) = (connection.slot, connection.session);
        if request.op == Op::Unknown {
            return self.peers.forget(number, &request);
        }
        let hello = payload.as_deref().and_then(Hello::decode);
        if request.op == Op::Ping
            && let Some(hello) = hello.filter(|hello| !hello.server)
        {
            if let Some(connection) = self.peers.get_mut(number) {
                connection.heals = hello.has(feature::HEAL);
            }
            let standing = hello.lane.and_then(|lane| self.enter(number, (slot, session), lane));
            let ours = Hello { standing, ..self.runner.hello(slot) };
            return self.reply(number, &request, |batch| request.reply_hello(batch, ours));
        }
        if self.runner.open_session(io, slot).is_some_and(|open| session < open) {
            self.peers.forget(number, &request);
            return self.end_former(io, slot);
        }
        if request.again
            && let Some(change) = request.change()
            && let Some(lane) = self.peers.get(number).and_then(|peer| peer.lane.as_ref())
        {
            match lane.look_up(&change) {
                Sent::Done(size) => {
                    return self.reply(number, &request, |batch| request.reply_done(batch, size));
                }
                Sent::Otherwise => {
                    let text = "another change was done under the number of this one";
                    return self.reply(number, &request, |batch| request.reply_error(batch, text));
                }
                Sent::Never => {}
            }
        }
        if request.op == Op::Flush
            && let Some(connection) = self.peers.get_mut(number)
        {
            connection.flushes += 1;
        }
        self.runner.start(io, slot, request, payload.map(Payload::from), number);
    }

    /// Lets a connection into a lane, or looks whether it may be used by now.
    fn enter(&mut self, number: u32, (slot, session): (u32, u64), lane: Lane) -> Option<Standing> {
        let connection = self.peers.get_mut(number)?;
        if let Some(ticket) = &connection.lane {
            return Some(ticket.standing(lane));
        }
        let (standing, ticket) = self.runner.gate(slot)?.lanes.enter(lane, session);
        connection.lane = ticket;
        if standing == Some(Standing::Busy)
            && let Some(serving) = self.serving.get(&slot)
        {
            let id = serving.service.id;
            self.shared.tell(|| Message::Renewed(id));
        }
        standing
    }

    /// Ends the connections of a replica whose clients have newer ones.
    fn end_renewed(&mut self, io: &mut Io, id: u64) {
        let Some(slot) = self.runner.find(id) else { return };
        // The slot first: whether it is a former one takes a lock.
        self.peers.end(io, true, |connection| {
            connection.slot == slot && connection.lane.as_ref().is_some_and(|lane| lane.is_former())
        });
    }

    /// Ends the connections of a replica that are of sessions before the one it is open in: nothing
    /// that is still to come from them is carried out.
    fn end_former(&mut self, io: &mut Io, slot: u32) {
        let Some(session) = self.runner.open_session(io, slot) else { return };
        let former =
            |connection: &Connection| connection.slot == slot && connection.session < session;
        for (number, connection) in self.peers.iter() {
            if !former(connection) || self.peers.has_ended(number) {
                continue;
            }
            log::warn(
                "data",
                &[("client", &connection.peer), ("disconnected", &"the replica was closed since")],
            );
        }
        self.peers.end(io, true, former);
    }

    /// Replies to what has ended, and tells who waits for the end of a service.
    fn answer(&mut self) {
        if !self.runner.ended.is_empty() {
            let idle = std::mem::take(&mut self.ended);
            let mut ended = std::mem::replace(&mut self.runner.ended, idle);
            for Ended { whose, request, outcome } in ended.drain(..) {
                let connection = self.peers.get_mut(whose);
                let heals = connection.as_ref().is_some_and(|connection| connection.heals);
                if let Some(connection) = connection {
                    connection.flushes -= usize::from(request.op == Op::Flush);
                    if let (Some(change), Some(lane)) = (request.change(), &connection.lane) {
                        let done =
                            if let Outcome::Done(size) = outcome { Some(size) } else { None };
                        lane.note(&change, done);
                    }
                }
                self.reply(whose, &request, |batch| match outcome {
                    Outcome::Done(size) => request.reply_done(batch, size),
                    Outcome::Data(data, range) if range == (0..data.len()) => {
                        request.reply_data(batch, data);
                    }
                    Outcome::Data(data, range) => request.reply_bytes(batch, &data[range]),
                    Outcome::Damaged(damaged) if heals => request.reply_damaged(batch, &damaged),
                    Outcome::Damaged(damaged) => request.reply_error(batch, &damaged.text),
                    Outcome::Failed(text) => request.reply_error(batch, &text),
                });
            }
            self.ended = ended;
        }
        for id in self.runner.gone.drain(..) {
            let number = self.serving.iter().find(|(_, serving)| serving.service.id == id);
            if let Some(serving) = number.map(|(number, _)| *number)
                && let Some(Serving { service, .. }) = self.serving.remove(&serving)
            {
                service.left();
            }
        }
    }

    fn reply(&mut self, peer: u32, request: &Request, reply: impl FnOnce(&mut Batch)) {
        self.peers.answer(peer, request.cost_bytes(), reply);
    }

    fn leave(&mut self, io: &mut Io, service: &Arc<Service>, at_once: bool) {
        let Some(number) = self.runner.find(service.id) else {
            if !at_once {
                service.left();
            }
            return;
        };
        let Some(serving) = self.serving.get_mut(&number) else { return };
        serving.leaving = true;
        let unused = serving.connections == 0;
        self.peers.end(io, at_once, |connection| connection.slot == number);
        if unused {
            self.runner.let_go(io, number);
        }
    }
}

impl Handler for Reactor {
    type Message = Message;

    fn message(&mut self, io: &mut Io, message: Message) {
        match message {
            Message::Adopt { service, session, socket, tls, peer } => {
                self.adopt(io, service, (socket, tls), (session, peer));
            }
            Message::Told(told) => self.runner.told(io, told),
            Message::Renewed(id) => self.end_renewed(io, id),
            Message::CommitDue => self.runner.commit_due(),
            Message::Leave { service, at_once } => self.leave(io, &service, at_once),
            Message::End => io.stop(),
        }
        self.answer();
    }

    fn received(&mut self, io: &mut Io, tag: u64, data: io::Result<&[u8]>) {
        self.input(io, tag, Event::Received(data));
    }

    fn filled(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.input(io, tag, Event::Filled(buf, result));
    }

    fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.runner.moved(io, tag, buf, result);
        self.answer();
    }

    fn sent(&mut self, io: &mut Io, tag: u64, batch: Batch, result: io::Result<()>) {
        self.input(io, tag, Event::Sent(batch, result));
    }

    fn turn(&mut self, io: &mut Io) {
        self.runner.turn();
        let Self { peers, runner, serving, shared, .. } = self;
        if std::mem::take(&mut runner.written) {
            shared.written.store(true, Ordering::SeqCst);
        }
        let mut left = Vec::new();
        peers.settle(io, |connection| {
            shared.connections.fetch_sub(1, Ordering::SeqCst);
            if let Some(counters) = runner.counters(connection.slot) {
                stats::add(&counters.connected, u64::MAX);
            }
            if let Some(serving) = serving.get_mut(&connection.slot) {
                serving.connections -= 1;
                if serving.leaving && serving.connections == 0 {
                    left.push(connection.slot);
                }
            }
        });
        for slot in left {
            self.runner.let_go(io, slot);
        }
        self.answer();
    }

    fn tick(&mut self, io: &mut Io) {
        self.peers.tick(io);
    }
}
