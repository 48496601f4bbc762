//! NBD where requests are not carried out on a store of this process: connections on a reactor, as the
//! [`Front`] of whatever carries requests out there.
//!
//! Handshake, validation and the bytes of replies are those of any other server; what is here is from a
//! valid request to what is carried, and back. Reads and writes go as they are. What has no bound, or no
//! equal, is cut into [`Pieces`]: trims, and zeros, which are written. Of a client's requests that are cut a few
//! are carried out at a time; what is left of them is dropped when the client is gone.

use super::export::{BlockSizes, Export, Exports, Extent, Failure, Peer, Result, ZeroOptions};
use super::options::ServerOptions;
use super::server::{ServerHandle, start_on};
use super::session::{Admitted, Operation, Reply};
use super::shared::{Adopted, Deliver, Message, Shared};
use super::transmission::Client;
use super::wire::Errno;
use dbs_core::volume::Finish;
use dbs_frontend::{
    Action, Carrier, Carry, Event, FailureKind, Fate, Front, Limits, Listen, Outcome, Peers,
    Pieces, Pool, Ready,
};
use dbs_reactor::{Buf, Io, Slab};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;

/// Requests of a client that are cut into pieces, and carried out at a time.
const CUT_MAX: usize = 4;

/// A server whose connections are served on reactors of somebody else.
pub struct Carried {
    shared: Arc<Shared>,
}

impl Carried {
    /// A server that is not started. Of `exports` names and sizes count; what is asked of one is carried
    /// out on the reactor, whichever it is.
    ///
    /// # Errors
    /// None at present: no thread is started.
    pub fn new(exports: Arc<dyn Exports>, options: ServerOptions) -> io::Result<Self> {
        Ok(Self { shared: Shared::new(exports, options, Pool::start("nbd-worker", 0)?) })
    }

    /// Makes its part on one reactor, with the bits that the tags of its operations have.
    pub fn front(&self) -> impl FnOnce(u64) -> Box<dyn Front> + Send + use<> {
        let shared = Arc::clone(&self.shared);
        move |tags| {
            let options = &shared.options;
            let limits = Limits { requests: options.requests_max, bytes: options.bytes_max };
            let peers = Peers::new(limits, options.write_timeout).tagged(tags);
            let (running, next, cut) = (Slab::default(), Vec::new(), HashMap::new());
            Box::new(Clients { shared, peers, running, next, cut, stopping: false })
        }
    }

    /// Starts to serve: `deliver` hands what it is given to the part on the reactor of this number, for
    /// [`Front::message`]. All those parts exist already, and go only when the server has stopped.
    ///
    /// # Errors
    /// An address that cannot be listened on, or no thread.
    pub fn start(
        self,
        addresses: &[Listen],
        reactors: usize,
        deliver: impl Fn(usize, Box<dyn Any + Send>) + Send + Sync + 'static,
    ) -> io::Result<ServerHandle> {
        let deliver = Arc::new(deliver);
        let to = |index: usize| -> Deliver {
            let deliver = Arc::clone(&deliver);
            Box::new(move |message| deliver(index, Box::new(message)))
        };
        start_on((0..reactors.max(1)).map(to).collect(), &self.shared, addresses)
    }
}

/// The one export of a server whose requests are carried out elsewhere: by its name, or as the default.
pub struct OneExport {
    name: String,
    size: Arc<dyn Fn() -> u64 + Send + Sync>,
}

impl OneExport {
    /// An export of this name, with `size` bytes whenever it is opened.
    pub fn new(name: &str, size: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self { name: name.to_owned(), size: Arc::new(size) }
    }
}

impl Exports for OneExport {
    fn open(&self, name: &str, _: &Peer) -> Result<Arc<dyn Export>> {
        if !name.is_empty() && name != self.name {
            return Err(Failure::invalid(format!("no export {name}; there is {}", self.name)));
        }
        Ok(Arc::new(Shown { name: self.name.clone(), size: (self.size)() }))
    }

    fn list(&self, _: &Peer) -> Vec<(String, String)> {
        vec![(self.name.clone(), String::new())]
    }
}

/// What a client is shown of the export.
struct Shown {
    name: String,
    size: u64,
}

/// Requests of no bytes are the only ones that come here.
fn nothing(length: u64) -> Result<Finish> {
    match length {
        0 => Ok(Finish::Done),
        _ => Err(Failure::new(Errno::Io, "internal error of the server")),
    }
}

impl Export for Shown {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn description(&self) -> String {
        String::new()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_only(&self) -> bool {
        false
    }

    fn block_sizes(&self) -> BlockSizes {
        BlockSizes::default()
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> Result<()> {
        nothing(buf.len() as u64).map(drop)
    }

    fn write(&self, _: u64, buf: &[u8]) -> Result<Finish> {
        nothing(buf.len() as u64)
    }

    fn trim(&self, _: u64, length: u64) -> Result<Finish> {
        nothing(length)
    }

    fn write_zeroes(&self, _: u64, length: u64, _: ZeroOptions) -> Result<Finish> {
        nothing(length)
    }

    fn flush(&self) -> Result<()> {
        nothing(1).map(drop)
    }

    /// Replicas do not say where they have data.
    fn contexts(&self, _: &str) -> Vec<String> {
        Vec::new()
    }

    fn block_status(&self, _: &str, _: u64, _: u64, _: usize) -> Result<Vec<Extent>> {
        Err(Failure::invalid("no such context"))
    }
}

/// The connections of one reactor.
struct Clients {
    shared: Arc<Shared>,
    peers: Peers<Client>,
    running: Slab<Running>,
    /// Requests of which the next piece is due at the end of the turn.
    next: Vec<u32>,
    /// Of each client that has some: its requests that are cut into pieces.
    cut: HashMap<u32, Cut>,
    stopping: bool,
}

/// A request that is being carried out.
struct Running {
    peer: u32,
    admitted: Admitted,
    /// What is left of it.
    pieces: Option<Pieces>,
}

/// Requests of a client that are cut into pieces.
#[derive(Default)]
struct Cut {
    /// How many of them are being carried out.
    running: usize,
    /// Those that wait for one of these to end.
    waiting: VecDeque<u32>,
}

impl Clients {
    fn adopt(&mut self, io: &mut Io, carrier: &mut dyn Carrier, adopted: Adopted) {
        let Adopted { known, socket, session, tls, received } = adopted;
        let id = known.peer.id;
        let client = Client { known, session: Arc::new(session) };
        let number = self.peers.add(io, socket, client, tls);
        if self.stopping || self.shared.is_stopping() {
            return self.peers.end(io, false, |client| client.known.peer.id == id);
        }
        self.input(io, carrier, number, Event::Begun(&received));
    }

    fn start(
        &mut self,
        io: &mut Io,
        carrier: &mut dyn Carrier,
        number: u32,
        ready: Ready<Admitted>,
    ) {
        let Ready { request: admitted, payload } = ready;
        if let Some(client) = self.peers.get(number) {
            client.known.count(admitted.operation(), payload.as_ref().map_or(0, |data| data.len()));
        }
        let carry = match admitted.operation() {
            Some(Operation::Read { offset, length, .. }) if length > 0 => {
                Some(Carry { action: Action::Read, offset, length: length as u32 })
            }
            Some(Operation::Write { offset, fua }) => payload.as_ref().map(|payload| {
                let action = Action::Write { durable: fua };
                Carry { action, offset, length: payload.len() as u32 }
            }),
            Some(Operation::Flush) => Some(Carry { action: Action::Flush, offset: 0, length: 0 }),
            Some(Operation::Trim { offset, length, fua }) => {
                return self.start_cut(number, admitted, Pieces::discard(offset, length, fua));
            }
            Some(Operation::Zero { options: ZeroOptions { fast: true, .. }, .. }) => {
                let failure = Failure::new(Errno::NotSupported, "zeros are written, as data is");
                let reply = Reply::refused(&admitted, &failure);
                return self.reply(number, &admitted, reply);
            }
            Some(Operation::Zero { offset, length, options }) => {
                let pieces = Pieces::zeroes(offset, length, options.fua);
                return self.start_cut(number, admitted, pieces);
            }
            _ => None,
        };
        let Some(carry) = carry else { return self.run(number, &admitted) };
        let ticket = self.running.insert(Running { peer: number, admitted, pieces: None });
        carrier.carry(io, carry, payload, u64::from(ticket));
    }

    /// Starts a request piece by piece, or lets it wait for the client's others.
    fn start_cut(&mut self, number: u32, admitted: Admitted, pieces: Pieces) {
        if !pieces.has_more() {
            return self.run(number, &admitted);
        }
        let ticket = self.running.insert(Running { peer: number, admitted, pieces: Some(pieces) });
        let cut = self.cut.entry(number).or_default();
        if cut.running < CUT_MAX {
            cut.running += 1;
            self.next.push(ticket);
        } else {
            cut.waiting.push_back(ticket);
        }
    }

    /// A request that was cut into pieces is over: the client's next one begins.
    fn cut_ended(&mut self, number: u32) {
        let Some(cut) = self.cut.get_mut(&number) else { return };
        match cut.waiting.pop_front() {
            Some(ticket) => self.next.push(ticket),
            None if cut.running == 1 => drop(self.cut.remove(&number)),
            None => cut.running -= 1,
        }
    }

    /// Answers what needs nobody: what is not allowed, and what is nothing.
    fn run(&mut self, number: u32, admitted: &Admitted) {
        let Some(client) = self.peers.get(number) else { return };
        let reply = client.session.run(admitted, &[]);
        self.reply(number, admitted, reply);
    }

    fn reply(&mut self, number: u32, admitted: &Admitted, reply: Reply) {
        self.peers.answer(number, admitted.cost_bytes, |batch| reply.append_to(batch));
    }

    /// Carries the next piece of a request, unless nobody waits for it any more.
    fn go_on(&mut self, io: &mut Io, carrier: &mut dyn Carrier, ticket: u32) {
        let Some(running) = self.running.get_mut(ticket) else { return };
        let (peer, long) = (running.peer, running.pieces.as_ref().is_some_and(Pieces::is_long));
        if self.peers.get(peer).is_none_or(|client| client.known.drops(long)) {
            if let Some(Running { admitted, .. }) = self.running.remove(ticket) {
                let text = "the connection ends before this is done";
                let failure = Failure::new(Errno::Shutdown, text);
                self.reply(peer, &admitted, Reply::refused(&admitted, &failure));
            }
            return self.cut_ended(peer);
        }
        let Some(piece) = running.pieces.as_mut().and_then(Pieces::next) else { return };
        let payload = zeros(io, piece, running.pieces.as_ref());
        carrier.carry(io, piece, payload, u64::from(ticket));
    }
}

/// What a piece that zeroes writes.
fn zeros(io: &Io, piece: Carry, pieces: Option<&Pieces>) -> Option<Buf> {
    let writes = pieces.is_some() && matches!(piece.action, Action::Write { .. });
    writes.then(|| {
        let mut zeros = io.buffers().take(piece.length as usize);
        zeros.fill(0);
        zeros
    })
}

impl Front for Clients {
    fn message(&mut self, io: &mut Io, carrier: &mut dyn Carrier, message: Box<dyn Any + Send>) {
        let Ok(message) = message.downcast::<Message>() else { return };
        match *message {
            Message::Adopt(adopted) => self.adopt(io, carrier, *adopted),
            Message::Stop => self.peers.end(io, false, |_| true),
            Message::Abort => self.peers.end(io, true, |_| true),
            Message::Kick(id) => self.peers.end(io, true, |client| client.known.peer.id == id),
            Message::Look(seen) => {
                self.peers.look(io);
                drop(seen);
            }
            // Its end is the reactor's to tell; no worker has anything to say.
            Message::End
            | Message::Reply { .. }
            | Message::Commit { .. }
            | Message::Committed(_)
            | Message::Flushed => {}
        }
    }

    fn input(&mut self, io: &mut Io, carrier: &mut dyn Carrier, number: u32, event: Event<'_>) {
        let (mut ready, failure) = self.peers.input(io, number, event);
        if let (Some(error), Some(client)) = (failure, self.peers.get(number)) {
            self.shared.client_failed(client.known.peer.id, &error);
        }
        for request in ready.drain(..) {
            self.start(io, carrier, number, request);
        }
        self.peers.receive(io, number, ready);
    }

    fn fate(&self, ticket: u64) -> Fate {
        let client =
            self.running.get(ticket as u32).and_then(|running| self.peers.get(running.peer));
        client.map_or(Fate::Drop, |client| client.known.fate())
    }

    fn answered(&mut self, _: &mut Io, ticket: u64, outcome: Outcome) {
        let ticket = ticket as u32;
        let Some(running) = self.running.get(ticket) else { return };
        let more = running.pieces.as_ref().is_some_and(Pieces::has_more);
        if more && !matches!(outcome, Outcome::Failed(_)) {
            return self.next.push(ticket);
        }
        let Some(Running { peer, admitted, pieces }) = self.running.remove(ticket) else { return };
        if pieces.is_some() {
            self.cut_ended(peer);
        }
        match outcome {
            Outcome::Done(_) => {
                self.peers.answer(peer, admitted.cost_bytes, |batch| batch.push(&admitted.done()));
            }
            Outcome::Data(data) => self.peers.answer(peer, admitted.cost_bytes, |batch| {
                batch.push(&admitted.data_head(data.len()));
                batch.push_buf(data);
            }),
            Outcome::Failed(failure) => {
                let reply = Reply::refused(&admitted, &shown(&failure));
                self.reply(peer, &admitted, reply);
            }
        }
    }

    fn turn(&mut self, io: &mut Io, carrier: &mut dyn Carrier) {
        // One that is dropped lets another begin.
        while let Some(ticket) = self.next.pop() {
            self.go_on(io, carrier, ticket);
        }
        let shared = &self.shared;
        self.peers.settle(io, |client| {
            let id = client.known.peer.id;
            // Whoever waits for its end finds that it holds nothing.
            drop(client);
            shared.forget(id);
        });
    }

    fn tick(&mut self, io: &mut Io) {
        self.peers.tick(io);
    }

    fn stop(&mut self, io: &mut Io, at_once: bool) {
        self.stopping = true;
        self.peers.end(io, at_once, |_| true);
    }

    fn is_over(&self) -> bool {
        self.stopping && self.peers.is_empty()
    }
}

/// A failure as clients are told.
fn shown(failure: &dbs_frontend::Failure) -> Failure {
    let errno = match failure.kind {
        FailureKind::Invalid => Errno::Invalid,
        FailureKind::NoSpace => Errno::NoSpace,
        FailureKind::Io => Errno::Io,
    };
    Failure::new(errno, failure.text.clone())
}
