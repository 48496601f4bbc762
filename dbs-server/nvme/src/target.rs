//! The queues of one reactor: commands are taken, carried out and answered here.

use super::admin::{self, Reply};
use super::command::{Ask, Command, Source, Status, ranges};
use super::controller::{Controller, Notice};
use super::message::{Kind, Message, Ticket};
use super::queue::{Pdu, Queue, is_whole};
use super::shared::Shared;
use super::wire::{Fatal, Head, Piece};
use dbs_frontend::{Answer, Charge, Demand, Event, Limits, Peers, Ready, Requests, Serves};
use dbs_reactor::{Batch, Buf, Handler, Io};
use dbs_service::log;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// What a queue may have under way: more commands than it has entries, as those whose answer is being sent count, and
/// bytes of their data and answers. What the host was asked for comes on top.
const LIMITS: Limits = Limits { requests: 1024, bytes: 32 << 20 };
/// How long a host may leave answers unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// The handler of a reactor.
pub struct Target {
    shared: Arc<Shared>,
    peers: Peers<Queue>,
    requests: Requests<Ticket>,
}

impl Target {
    /// That of a reactor; its operations have `tags`.
    pub fn new(shared: Arc<Shared>, requests: Requests<Ticket>, tags: u64) -> Self {
        Self { shared, peers: Peers::new(LIMITS, WRITE_TIMEOUT).tagged(tags), requests }
    }

    fn adopt(&mut self, io: &mut Io, socket: OwnedFd, queue: Queue) {
        let controller = Arc::clone(&queue.controller);
        let lost = queue.number > 0 && controller.has_lost();
        let number = self.peers.add(io, socket, queue, None);
        // What told the reactors of that may have come before.
        if lost || controller.has_ended() {
            let its = |queue: &Queue| queue.controller.id == controller.id;
            self.peers.end(io, true, |queue| its(queue) && (queue.number > 0 || !lost));
        }
        self.input(io, u64::from(number), Event::Begun(&[]));
        self.tell(number, &controller);
    }

    /// Lets a connection take input, carries out what is complete, and receives on.
    fn input(&mut self, io: &mut Io, tag: u64, event: Event<'_>) {
        let number = tag as u32;
        let (mut ready, mut failure) = self.peers.input(io, number, event);
        loop {
            if let Some(error) = failure {
                let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Fatal>());
                if let Some(fatal) = inner {
                    self.fails(io, number, fatal);
                }
            }
            if ready.is_empty() {
                break;
            }
            self.take(io, number, &mut ready);
            // Pieces of data are not answered: there may be room for more already.
            failure = self.peers.resume(io, number, &mut ready);
        }
        self.peers.receive(io, number, ready);
        self.finish(io);
    }

    /// Carries out what is complete.
    fn take(&mut self, io: &mut Io, number: u32, ready: &mut Vec<Ready<Pdu>>) {
        for Ready { request, payload } in ready.drain(..) {
            let payload = payload.unwrap_or_else(Buf::empty);
            let taken = match request {
                Pdu::Command(command, head, _) => {
                    let cost = request.cost_bytes();
                    self.command(io, number, (&command, &head, cost), payload)
                }
                Pdu::Data(piece, head) => self.data(io, number, (&piece, &head), payload),
            };
            if let Err(fatal) = taken {
                self.peers.forget(number, &request);
                self.fails(io, number, &fatal);
            }
        }
    }

    /// Ends a connection whose host broke the protocol, and says so.
    fn fails(&mut self, io: &mut Io, number: u32, fatal: &Fatal) {
        let Some(queue) = self.peers.get(number) else { return };
        // Others of the controller end at once, this one when the host was told.
        queue.closing.set(true);
        let (controller, its) = (Arc::clone(&queue.controller), queue.number);
        if !controller.has_ended() {
            log::warn("nvme", &[("client", &controller.who), ("error", &fatal)]);
        }
        if fatal.status != 0 {
            self.peers.tell(number, |batch| batch.push_vec(fatal.pdu()));
        }
        let is_it = |queue: &Queue| queue.controller.id == controller.id && queue.number == its;
        self.peers.end(io, false, is_it);
        controller.end();
    }

    /// Takes a command.
    fn command(
        &mut self,
        io: &mut Io,
        number: u32,
        (command, head, cost): (&Command, &Head, u64),
        mut payload: Buf,
    ) -> Result<(), Fatal> {
        let Some(queue) = self.peers.get_mut(number) else { return Ok(()) };
        queue.take_entry(command)?;
        queue.controller.heard();
        let ticket = Ticket { peer: number, command: command.id(), cost, kind: Kind::Other };
        // Nobody waits for it, and what comes on the next connection may be newer.
        if queue.controller.has_ended() {
            self.answer(ticket, Status::QUEUE_DELETED, 0);
        } else if !is_whole(head, &mut payload) {
            self.answer(ticket, Status::TRANSPORT, 0);
        } else if queue.number == 0 {
            self.admin(io, ticket, command);
        } else {
            self.disk(io, ticket, command, payload);
        }
        Ok(())
    }

    fn admin(&mut self, io: &mut Io, ticket: Ticket, command: &Command) {
        let Some(queue) = self.peers.get(ticket.peer) else { return };
        let (controller, user) = (Arc::clone(&queue.controller), queue.user.clone());
        if let Some(counts) = controller.counts(0) {
            counts.other();
        }
        let shared = &self.shared;
        let subsystems =
            |controller: &Controller, known| shared.subsystems_for(&controller.address, known);
        match admin::answer(&controller, &subsystems, command) {
            Err(status) => self.answer(ticket, status, 0),
            Ok(Reply::Done(result)) => self.answer(ticket, Status::SUCCESS, result),
            Ok(Reply::Data(data)) => {
                let mut buf = io.buffers().take(data.len());
                buf.copy_from_slice(&data);
                self.answer_data(ticket, buf);
            }
            Ok(Reply::Wait) => self.hold(ticket),
            Ok(Reply::Reset) => {
                controller.lose_queues();
                self.answer(ticket, Status::SUCCESS, 0);
            }
            Ok(Reply::Shutdown) => match user {
                Some(user) => {
                    let ticket = Ticket { kind: Kind::Shutdown, ..ticket };
                    self.requests.start(io, &user, ticket, Demand::Flush, (0, 0));
                }
                None => {
                    controller.shut_down(true);
                    self.answer(ticket, Status::SUCCESS, 0);
                }
            },
        }
        self.tell(ticket.peer, &controller);
    }

    /// Keeps a command that waits for an event: it takes no memory, and no entry that others could need.
    fn hold(&mut self, ticket: Ticket) {
        if let Some(queue) = self.peers.get_mut(ticket.peer) {
            queue.open -= 1;
        }
        self.peers.release(ticket.peer, ticket.cost);
    }

    /// Tells the host of a controller of an event, if there is one and it waits for that.
    fn tell(&mut self, number: u32, controller: &Controller) {
        let Some(queue) = self.peers.get_mut(number).filter(|queue| queue.number == 0) else {
            return;
        };
        if let Some((command, event)) = controller.event() {
            queue.open += 1;
            let completion = queue.completion(command, Status::SUCCESS, event.into());
            let framing = queue.framing;
            self.peers.tell(number, |batch| batch.push_vec(framing.response(&completion)));
        }
    }

    /// Takes a command for the namespace.
    fn disk(&mut self, io: &mut Io, ticket: Ticket, command: &Command, payload: Buf) {
        let Some(queue) = self.peers.get_mut(ticket.peer) else { return };
        let Some(size) = queue.controller.disk().map(|disk| disk.opened.disk.size()) else {
            return;
        };
        if !queue.controller.is_accessible() {
            return self.answer(ticket, Status::INACCESSIBLE, 0);
        }
        let ask = match Ask::of(command, size) {
            Ok(ask) => ask,
            Err(status) => return self.answer(ticket, status, 0),
        };
        if let Some(counts) = queue.controller.counts(queue.number) {
            match ask {
                Ask::Read { length, .. } => counts.read(length),
                Ask::Write { length, .. } | Ask::Zeroes { length, .. } => counts.write(length),
                Ask::Flush | Ask::Deallocate { .. } => counts.other(),
            }
        }
        let needed = ask.host_bytes();
        let source = if needed > 0 {
            command.source(needed, payload.len())
        } else if payload.is_empty() {
            Ok(Source::Capsule)
        } else {
            Err(Status::INVALID_FIELD)
        };
        match source {
            Err(status) => self.answer(ticket, status, 0),
            Ok(Source::Capsule) => self.start(io, ticket, &ask, payload, 0),
            Ok(Source::Host) => {
                queue.wait(ticket.command, ask);
                self.peers.release(ticket.peer, ticket.cost);
                self.ask(ticket.peer);
            }
        }
    }

    /// Asks the host for data that there is room for.
    fn ask(&mut self, number: u32) {
        while let Some(queue) = self.peers.get_mut(number)
            && let Some((command, tag, length)) = queue.ask()
        {
            let ready = queue.framing.ready(command, tag, length);
            self.peers.tell(number, |batch| batch.push(&ready));
        }
    }

    /// Takes data that the host was asked for.
    fn data(
        &mut self,
        io: &mut Io,
        number: u32,
        (piece, head): (&Piece, &Head),
        payload: Buf,
    ) -> Result<(), Fatal> {
        let Some(queue) = self.peers.get_mut(number) else { return Ok(()) };
        let Some(complete) = queue.piece((piece, head), payload, io.buffers())? else {
            self.peers.release(number, 0);
            return Ok(());
        };
        let kind = Kind::Write(complete.asked);
        let ticket = Ticket { peer: number, command: complete.command, cost: 0, kind };
        let ended = queue.controller.has_ended();
        match complete.data {
            _ if ended => self.answer(ticket, Status::QUEUE_DELETED, 0),
            None => self.answer(ticket, Status::TRANSPORT, 0),
            Some(data) => self.start(io, ticket, &complete.ask, data, complete.asked),
        }
        Ok(())
    }

    /// Starts what a command asks for, which has its data.
    fn start(&mut self, io: &mut Io, ticket: Ticket, ask: &Ask, payload: Buf, asked: usize) {
        let Some(queue) = self.peers.get_mut(ticket.peer) else { return };
        let Some(user) = queue.user.clone() else { return };
        if let Ask::Deallocate { ranges: count, does, .. } = *ask {
            let size = queue.controller.disk().map_or(0, |disk| disk.opened.disk.size());
            queue.free(asked);
            return match ranges(&payload, count, size) {
                Ok(mut ranges) if does => {
                    ranges.reverse();
                    let left = queue.ranges.insert((ticket.command, ranges));
                    self.next_range(io, Ticket { kind: Kind::Ranges(left), ..ticket });
                }
                found => {
                    let status = found.err().unwrap_or(Status::SUCCESS);
                    self.answer(Ticket { kind: Kind::Other, ..ticket }, status, 0);
                }
            };
        }
        let kind = match ask {
            Ask::Read { .. } => Kind::Read,
            Ask::Write { .. } => Kind::Write(asked),
            _ => Kind::Other,
        };
        if let Some((demand, range)) = ask.demand(Some(payload)) {
            self.requests.start(io, &user, Ticket { kind, ..ticket }, demand, range);
        }
    }

    /// Gives up the next range of a command, or answers it.
    fn next_range(&mut self, io: &mut Io, ticket: Ticket) {
        let Kind::Ranges(left) = ticket.kind else { return };
        let Some(queue) = self.peers.get_mut(ticket.peer) else { return };
        let next = queue.ranges.get_mut(left).and_then(|(_, ranges)| ranges.pop());
        match (next, queue.user.clone()) {
            (Some(range), Some(user)) => {
                self.requests.start(io, &user, ticket, Demand::Discard(false), range);
            }
            _ => self.answer(ticket, Status::SUCCESS, 0),
        }
    }

    /// Answers what has ended.
    fn finish(&mut self, io: &mut Io) {
        while let Some((ticket, answer)) = self.requests.ended() {
            match (ticket.kind, answer) {
                (Kind::Shutdown, answer) => {
                    if let Some(queue) = self.peers.get(ticket.peer) {
                        queue.controller.shut_down(matches!(answer, Answer::Done(_)));
                    }
                    self.answer(ticket, Status::SUCCESS, 0);
                }
                (Kind::Read, Answer::Done(data)) => self.answer_data(ticket, data),
                (Kind::Ranges(_), Answer::Done(_)) => self.next_range(io, ticket),
                (_, Answer::Done(_)) => self.answer(ticket, Status::SUCCESS, 0),
                (kind, Answer::Failed(errno)) => {
                    let reads = matches!(kind, Kind::Read);
                    self.answer(ticket, Status::of(errno, reads), 0);
                }
                (_, Answer::Dropped) => self.answer(ticket, Status::QUEUE_DELETED, 0),
            }
        }
    }

    /// Answers a command without data.
    fn answer(&mut self, ticket: Ticket, status: Status, result: u64) {
        let Some(queue) = self.peers.get_mut(ticket.peer) else { return };
        match ticket.kind {
            Kind::Write(asked) => queue.free(asked),
            Kind::Ranges(left) => drop(queue.ranges.remove(left)),
            _ => {}
        }
        let completion = queue.completion(ticket.command, status, result);
        let response = queue.framing.response(&completion);
        self.peers.answer(ticket.peer, ticket.cost, |batch| batch.push(&response));
        self.ask(ticket.peer);
    }

    /// Answers a command with data, which is sent as it is.
    fn answer_data(&mut self, ticket: Ticket, data: Buf) {
        let Some(queue) = self.peers.get_mut(ticket.peer) else { return };
        let (framing, done) = (queue.framing, !queue.flow_control);
        let completion = queue.completion(ticket.command, Status::SUCCESS, 0);
        let header = framing.data(ticket.command, data.len(), done);
        let digest = framing.behind(&data);
        self.peers.answer(ticket.peer, ticket.cost, |batch| {
            batch.push(&header);
            batch.push_buf(data);
            digest.iter().for_each(|digest| batch.push(digest));
            if !done {
                batch.push(&framing.response(&completion));
            }
        });
    }
}

impl Handler for Target {
    type Message = Message;

    fn message(&mut self, io: &mut Io, message: Message) {
        match message {
            Message::Adopt(adopted) => self.adopt(io, adopted.0, adopted.1),
            Message::Report(report) => self.requests.report(io, report),
            Message::Notice(Notice::End(id)) => {
                self.peers.end(io, true, |queue| queue.controller.id == id && !queue.closing.get());
                self.requests.let_go(io);
            }
            Message::Notice(Notice::EndQueues(id)) => {
                let its = |queue: &Queue| queue.controller.id == id && queue.number != 0;
                self.peers.iter().filter(|(_, queue)| its(queue)).for_each(|(_, queue)| {
                    queue.closing.set(true);
                });
                self.peers.end(io, true, its);
                self.requests.let_go(io);
            }
            Message::Notice(Notice::Changed(id)) => {
                let its =
                    |(_, queue): &(u32, &Queue)| queue.controller.id == id && queue.number == 0;
                let found = self.peers.iter().find(its);
                if let Some((number, controller)) =
                    found.map(|(number, queue)| (number, Arc::clone(&queue.controller)))
                {
                    self.tell(number, &controller);
                }
            }
            Message::Stop => {
                self.peers.iter().for_each(|(_, queue)| queue.closing.set(true));
                self.peers.end(io, false, |_| true);
                self.requests.let_go(io);
            }
            Message::Abort => self.peers.end(io, true, |_| true),
            Message::End => io.stop(),
        }
        self.finish(io);
    }

    fn received(&mut self, io: &mut Io, tag: u64, data: io::Result<&[u8]>) {
        self.input(io, tag, Event::Received(data));
    }

    fn filled(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.input(io, tag, Event::Filled(buf, result));
    }

    fn sent(&mut self, io: &mut Io, tag: u64, batch: Batch, result: io::Result<()>) {
        self.input(io, tag, Event::Sent(batch, result));
    }

    fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.requests.moved(io, tag, buf, result);
        self.finish(io);
    }

    fn synced(&mut self, io: &mut Io, _: u64, result: io::Result<()>) {
        self.requests.synced(io, result);
        self.finish(io);
    }

    fn reminded(&mut self, io: &mut Io) {
        self.requests.reminded(io);
        self.finish(io);
    }

    fn tick(&mut self, io: &mut Io) {
        self.peers.tick(io);
    }

    fn turn(&mut self, io: &mut Io) {
        let shared = &self.shared;
        self.peers.settle(io, |queue| {
            let (controller, number) = (Arc::clone(&queue.controller), queue.number);
            // Who waits for its end finds that nobody has the volume open for it.
            drop(queue);
            shared.left(controller, number);
        });
    }
}

impl Serves for Target {
    type Ticket = Ticket;

    fn requests(&self) -> &Requests<Ticket> {
        &self.requests
    }

    fn requests_mut(&mut self) -> &mut Requests<Ticket> {
        &mut self.requests
    }

    fn answer(&mut self, io: &mut Io) {
        self.finish(io);
    }

    fn leave(&mut self, io: &mut Io, at_once: bool) {
        self.peers.end(io, at_once, |_| true);
    }

    fn is_idle(&self) -> bool {
        self.peers.is_empty()
    }
}
