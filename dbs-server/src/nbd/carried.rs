//! NBD where requests are not carried out on a store of this process: connections on a reactor, as the
//! [`Front`] of whatever carries requests out there.
//!
//! Handshake, validation and the bytes of replies are those of any other server; what is here is from a
//! valid request to what is carried, and back. Reads and writes go as they are. What has no bound, or no
//! equal, is cut into [`Pieces`]: trims, and zeros, which are written.

use super::export::{BlockSizes, Export, Exports, Extent, Failure, Result, ZeroOptions};
use super::server::{Deliver, ServerHandle, ServerOptions, Shared, start_on};
use super::session::{Admitted, Operation, Reply};
use super::transmission::{Adopted, Client, Message};
use super::wire::Errno;
use crate::frontend::{
    self, Action, Carrier, Carry, Event, FailureKind, Front, Limits, Listen, Outcome, Peers,
    Pieces, Pool, Ready,
};
use dbs_reactor::{Buf, Io, Slab};
use std::any::Any;
use std::io;
use std::sync::Arc;

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
            let (running, next) = (Slab::default(), Vec::new());
            Box::new(Clients { shared, peers, running, next, stopping: false })
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
    fn open(&self, name: &str) -> Result<Arc<dyn Export>> {
        if !name.is_empty() && name != self.name {
            return Err(Failure::invalid(format!("no export {name}; there is {}", self.name)));
        }
        Ok(Arc::new(Shown { name: self.name.clone(), size: (self.size)() }))
    }

    fn list(&self) -> Vec<(String, String)> {
        vec![(self.name.clone(), String::new())]
    }
}

/// What a client is shown of the export.
struct Shown {
    name: String,
    size: u64,
}

/// Requests of no bytes are the only ones that come here.
fn nothing(length: u64) -> Result<()> {
    match length {
        0 => Ok(()),
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
        nothing(buf.len() as u64)
    }

    fn write(&self, _: u64, buf: &[u8], _: bool) -> Result<()> {
        nothing(buf.len() as u64)
    }

    fn trim(&self, _: u64, length: u64, _: bool) -> Result<()> {
        nothing(length)
    }

    fn write_zeroes(&self, _: u64, length: u64, _: ZeroOptions) -> Result<()> {
        nothing(length)
    }

    fn flush(&self) -> Result<()> {
        nothing(1)
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
    stopping: bool,
}

/// A request that is being carried out.
struct Running {
    peer: u32,
    admitted: Admitted,
    /// What is left of it.
    pieces: Option<Pieces>,
}

impl Clients {
    fn adopt(&mut self, io: &mut Io, carrier: &mut dyn Carrier, adopted: Adopted) {
        let Adopted { id, socket, session, tls, received } = adopted;
        let client = Client { id, session: Arc::new(session) };
        let number = self.peers.add(io, socket, client, tls);
        if self.stopping || self.shared.is_stopping() {
            return self.peers.end(io, false, |client| client.id == id);
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
        let carried = match admitted.operation() {
            Some(Operation::Read { offset, length, .. }) if length > 0 => {
                Some((Carry { action: Action::Read, offset, length: length as u32 }, None))
            }
            Some(Operation::Write { offset, fua }) => payload.as_ref().map(|payload| {
                let action = Action::Write { durable: fua };
                (Carry { action, offset, length: payload.len() as u32 }, None)
            }),
            Some(Operation::Flush) => {
                Some((Carry { action: Action::Flush, offset: 0, length: 0 }, None))
            }
            Some(Operation::Trim { offset, length, fua }) => {
                cut(Pieces::discard(offset, length, fua))
            }
            Some(Operation::Zero { options: ZeroOptions { fast: true, .. }, .. }) => {
                let failure = Failure::new(Errno::NotSupported, "zeros are written, as data is");
                let reply = Reply::refused(&admitted, &failure);
                return self.reply(number, &admitted, reply);
            }
            Some(Operation::Zero { offset, length, options }) => {
                cut(Pieces::zeroes(offset, length, options.fua))
            }
            _ => None,
        };
        let Some((first, pieces)) = carried else { return self.run(number, &admitted) };
        let payload = payload.or_else(|| zeros(io, first, pieces.as_ref()));
        let ticket = self.running.insert(Running { peer: number, admitted, pieces });
        carrier.carry(io, first, payload, u64::from(ticket));
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

    /// Carries the next piece of a request.
    fn go_on(&mut self, io: &mut Io, carrier: &mut dyn Carrier, ticket: u32) {
        let Some(running) = self.running.get_mut(ticket) else { return };
        let Some(piece) = running.pieces.as_mut().and_then(Pieces::next) else { return };
        let payload = zeros(io, piece, running.pieces.as_ref());
        carrier.carry(io, piece, payload, u64::from(ticket));
    }
}

/// The first piece, and the rest.
fn cut(mut pieces: Pieces) -> Option<(Carry, Option<Pieces>)> {
    let first = pieces.next()?;
    Some((first, Some(pieces)))
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
            // Its end is the reactor's to tell; no worker has anything to say.
            Message::End | Message::Reply { .. } | Message::Committed(_) => {}
        }
    }

    fn input(&mut self, io: &mut Io, carrier: &mut dyn Carrier, number: u32, event: Event<'_>) {
        let (mut ready, failure) = self.peers.input(io, number, event);
        if let (Some(error), Some(client)) = (failure, self.peers.get(number)) {
            self.shared.client_failed(client.id, &error);
        }
        for request in ready.drain(..) {
            self.start(io, carrier, number, request);
        }
        self.peers.receive(io, number, ready);
    }

    fn answered(&mut self, _: &mut Io, ticket: u64, outcome: Outcome) {
        let ticket = ticket as u32;
        let Some(running) = self.running.get(ticket) else { return };
        let more = running.pieces.as_ref().is_some_and(Pieces::has_more);
        if more && !matches!(outcome, Outcome::Failed(_)) {
            return self.next.push(ticket);
        }
        let Some(Running { peer, admitted, .. }) = self.running.remove(ticket) else { return };
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
        let mut next = std::mem::take(&mut self.next);
        for ticket in next.drain(..) {
            self.go_on(io, carrier, ticket);
        }
        self.next = next;
        let shared = &self.shared;
        self.peers.settle(io, |client| shared.forget(client.id));
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
fn shown(failure: &frontend::Failure) -> Failure {
    let errno = match failure.kind {
        FailureKind::Invalid => Errno::Invalid,
        FailureKind::NoSpace => Errno::NoSpace,
        FailureKind::Io => Errno::Io,
    };
    Failure::new(errno, failure.text.clone())
}
