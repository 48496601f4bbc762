//! The transmission phase of many connections on one reactor.
//!
//! A read or write of whole blocks is done here from its first byte to its reply: parsed
//! (`peer`), admitted (`session`), mapped (`Volume::start_read`, `start_write`), handed to the
//! ring together with others, and answered in a batch. What would have to wait (for another
//! operation, for space, for a commit) goes to the workers and comes back as a message.

use super::peer::{Limits, Peer, Ready, Receive};
use super::server::Shared;
use super::session::{Admitted, Direct, Reply, Session};
use super::tls::TlsStream;
use dbs_core::Volume;
use dbs_core::volume::{Finish, Request, Start};
use dbs_reactor::{Batch, Buf, File, Handler, Io, Remote, Segment, Slab};
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often clients are looked at that do not take their replies.
const TICK: Duration = Duration::from_secs(1);
/// Requests kept for reuse.
const IDLE_REQUESTS_MAX: usize = 1024;

/// What other threads tell a reactor.
pub(super) enum Message {
    /// A connection whose handshake is done.
    Adopt(Box<Adopted>),
    /// The reply that a worker has made.
    Reply { peer: u32, cost: u64, reply: Reply },
    /// A commit that requests waited for has ended.
    Committed(Result<(), dbs_core::Error>),
    /// Take no more requests; connections end when what is in flight is answered.
    Stop,
    /// Connections end at once.
    Abort,
    /// All connections are gone: end.
    End,
}

/// A connection that enters its transmission phase.
pub(super) struct Adopted {
    pub id: u64,
    pub socket: OwnedFd,
    pub session: Session,
    pub tls: Option<TlsStream>,
    /// Bytes received already, as they came from the socket.
    pub received: Vec<u8>,
}

/// What a reactor does I/O with by itself, if the exports lie in a file or device.
pub(super) struct Storage {
    pub file: File,
    pub offset_alignment: usize,
    pub memory_alignment: usize,
}

/// The connections of one reactor.
pub(super) struct Transmission {
    shared: Arc<Shared>,
    remote: Remote<Message>,
    storage: Option<Storage>,
    peers: Slab<Peer>,
    running: Slab<Running>,
    idle: Vec<Request>,
    /// Waiting for the commit that runs, and for the one after it.
    committing: Vec<Held>,
    to_commit: Vec<Held>,
    /// Connections to look at at the end of the turn: something may be sent or over.
    touched: Vec<u32>,
    ready: Vec<Ready>,
    segments: Vec<Segment>,
    tick: u32,
    ticking: bool,
}

/// A read or write whose bytes are being transferred.
struct Running {
    peer: u32,
    admitted: Admitted,
    request: Request,
    write: Option<bool>,
}

/// A request that is answered after a commit.
struct Held {
    peer: u32,
    admitted: Admitted,
    volume: Volume,
}

impl Transmission {
    pub fn new(shared: Arc<Shared>, remote: Remote<Message>, storage: Option<Storage>) -> Self {
        Self {
            shared,
            remote,
            storage,
            peers: Slab::default(),
            running: Slab::default(),
            idle: Vec::new(),
            committing: Vec::new(),
            to_commit: Vec::new(),
            touched: Vec::new(),
            ready: Vec::new(),
            segments: Vec::new(),
            tick: 0,
            ticking: false,
        }
    }

    fn adopt(&mut self, io: &mut Io, adopted: Adopted) {
        let Adopted { id, socket, session, tls, received } = adopted;
        let options = &self.shared.options;
        let limits = Limits { requests: options.requests_max, bytes: options.bytes_max };
        let socket = io.add_socket(socket);
        let number = self.peers.insert(Peer::new(id, socket, session, tls, limits));
        if self.shared.is_stopping()
            && let Some(peer) = self.peers.get_mut(number)
        {
            peer.end();
        }
        self.input(io, number, |peer, io, ready| peer.take(&received, io.buffers(), ready));
    }

    /// Lets a connection take input, runs the requests that completes and receives on.
    fn input(
        &mut self,
        io: &mut Io,
        number: u32,
        take: impl FnOnce(&mut Peer, &Io, &mut Vec<Ready>) -> io::Result<()>,
    ) {
        let mut ready = std::mem::take(&mut self.ready);
        if let Some(peer) = self.peers.get_mut(number)
            && let Err(error) = take(peer, io, &mut ready)
        {
            self.shared.client_failed(peer.id, &error);
            peer.end();
            // What TLS has to say about it is sent with the last replies.
        }
        for request in ready.drain(..) {
            self.start(io, number, request);
        }
        self.ready = ready;
        self.receive(io, number);
        self.touch(number);
    }

    fn receive(&mut self, io: &mut Io, number: u32) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        let socket = peer.socket;
        match peer.wants() {
            Receive::Nothing => return,
            Receive::Any => io.receive(socket, u64::from(number)),
            Receive::Payload(buf, start) => io.fill(socket, buf, start, u64::from(number)),
        }
        peer.receiving = true;
    }

    fn touch(&mut self, number: u32) {
        if self.touched.last() != Some(&number) {
            self.touched.push(number);
        }
    }

    /// Starts a request in the best way there is for it.
    fn start(&mut self, io: &mut Io, number: u32, ready: Ready) {
        let Ready { admitted, payload } = ready;
        let Some(peer) = self.peers.get(number) else { return };
        let (Some(direct), Some(volume)) = (admitted.direct(), peer.session.volume()) else {
            return self.work(number, admitted, payload);
        };
        match direct {
            Direct::Flush if peer.session.read_only() => self.work(number, admitted, payload),
            Direct::Flush => {
                let volume = volume.clone();
                self.commit(Held { peer: number, admitted, volume });
            }
            Direct::Read { offset, length, sparse } => {
                self.read(io, number, admitted, (offset, length), sparse);
            }
            Direct::Write { offset, fua } => match payload {
                Some(payload) => self.write(io, number, admitted, offset, payload, fua),
                None => self.work(number, admitted, None),
            },
        }
    }

    fn read(
        &mut self,
        io: &mut Io,
        number: u32,
        admitted: Admitted,
        (offset, length): (u64, usize),
        sparse: bool,
    ) {
        let mut request = self.idle.pop().unwrap_or_default();
        let Some(volume) = self.volume(number) else { return };
        match volume.start_read(offset, length as u64, &mut request) {
            Err(error) => self.fail(number, &admitted, error),
            Ok(Start::Blocked) => self.work(number, admitted, None),
            Ok(Start::Done) if sparse => self.answer(number, admitted.cost_bytes, |batch| {
                batch.push(&admitted.hole_reply(length));
            }),
            Ok(Start::Done) => {
                let mut buf = io.buffers().take(length);
                buf.fill(0);
                self.answer_read(number, &admitted, buf);
            }
            // Holes are shown as holes to whom they are worth it.
            Ok(Start::Io) if sparse && !request.zeros().is_empty() => {
                let finished = request.finish_read(Ok(()));
                match finished {
                    Ok(()) => self.work(number, admitted, None),
                    Err(error) => self.fail(number, &admitted, error),
                }
            }
            Ok(Start::Io) => {
                let Some(file) = self.lay_out(&request) else {
                    drop(std::mem::take(&mut request));
                    return self.work(number, admitted, None);
                };
                let mut buf = io.buffers().take(length);
                for zeros in request.zeros() {
                    buf[zeros.clone()].fill(0);
                }
                let running = Running { peer: number, admitted, request, write: None };
                let tag = u64::from(self.running.insert(running));
                return io.read(file, &self.segments, buf, tag);
            }
        }
        self.keep(request);
    }

    fn write(
        &mut self,
        io: &mut Io,
        number: u32,
        admitted: Admitted,
        offset: u64,
        payload: Buf,
        fua: bool,
    ) {
        let mut request = self.idle.pop().unwrap_or_default();
        let Some(volume) = self.volume(number) else { return };
        match volume.start_write(offset, payload.len() as u64, &mut request) {
            Err(error) => self.fail(number, &admitted, error),
            Ok(Start::Blocked | Start::Done) => self.work(number, admitted, Some(payload)),
            Ok(Start::Io) => {
                let Some(file) = self.lay_out(&request) else {
                    drop(std::mem::take(&mut request));
                    return self.work(number, admitted, Some(payload));
                };
                let running = Running { peer: number, admitted, request, write: Some(fua) };
                let tag = u64::from(self.running.insert(running));
                return io.write(file, &self.segments, payload, tag);
            }
        }
        self.keep(request);
    }

    fn volume(&self, number: u32) -> Option<&Volume> {
        self.peers.get(number).and_then(|peer| peer.session.volume())
    }

    /// Turns a request's segments into the ring's; `None` if direct I/O does not take them as
    /// they are.
    fn lay_out(&mut self, request: &Request) -> Option<File> {
        let storage = self.storage.as_ref()?;
        self.segments.clear();
        for segment in request.segments() {
            let (offset, start, len) = (segment.device, segment.start, segment.length);
            let on_device = (offset as usize | len) % storage.offset_alignment;
            if on_device != 0 || !start.is_multiple_of(storage.memory_alignment) {
                return None;
            }
            self.segments.push(Segment { offset, start, len });
        }
        Some(storage.file)
    }

    fn keep(&mut self, request: Request) {
        if self.idle.len() < IDLE_REQUESTS_MAX {
            self.idle.push(request);
        }
    }

    /// Hands a request to the workers.
    fn work(&self, number: u32, admitted: Admitted, payload: Option<Buf>) {
        let Some(peer) = self.peers.get(number) else { return };
        let (session, remote) = (Arc::clone(&peer.session), self.remote.clone());
        self.shared.pool.submit(move || {
            let cost = admitted.cost_bytes;
            let reply = run(&session, &admitted, payload.as_deref().unwrap_or_default());
            // Its memory is free before the reply makes room for the next request.
            drop(payload);
            remote.send(Message::Reply { peer: number, cost, reply });
        });
    }

    /// Answers a request once everything acknowledged so far is durable; all that ask while a
    /// commit runs share the next one.
    fn commit(&mut self, held: Held) {
        self.to_commit.push(held);
        if self.committing.is_empty() {
            self.start_commit();
        }
    }

    fn start_commit(&mut self) {
        std::mem::swap(&mut self.committing, &mut self.to_commit);
        let Some(held) = self.committing.first() else { return };
        let (volume, remote) = (held.volume.clone(), self.remote.clone());
        self.shared.pool.submit(move || {
            let result = catch_unwind(AssertUnwindSafe(|| volume.flush()));
            let crashed = |_| Err(dbs_core::Error::invalid("internal error of the server"));
            remote.send(Message::Committed(result.unwrap_or_else(crashed)));
        });
    }

    fn committed(&mut self, result: &Result<(), dbs_core::Error>) {
        let mut committing = std::mem::take(&mut self.committing);
        for Held { peer, admitted, .. } in committing.drain(..) {
            match result {
                Ok(()) => {
                    self.answer(peer, admitted.cost_bytes, |batch| batch.push(&admitted.done()))
                }
                Err(error) => {
                    let text = error.to_string();
                    self.fail(peer, &admitted, dbs_core::Error::new(error.kind(), text));
                }
            }
        }
        self.committing = committing;
        if !self.to_commit.is_empty() {
            self.start_commit();
        }
    }

    fn answer_read(&mut self, number: u32, admitted: &Admitted, buf: Buf) {
        self.answer(number, admitted.cost_bytes, |batch| {
            batch.push(&admitted.data_head(buf.len()));
            batch.push_buf(buf);
        });
    }

    fn fail(&mut self, number: u32, admitted: &Admitted, error: dbs_core::Error) {
        let reply = Reply::refused(admitted, &error.into());
        self.answer(number, admitted.cost_bytes, |batch| reply.append_to(batch));
    }

    /// Adds a reply to those that go out at the end of the turn.
    fn answer(&mut self, number: u32, cost: u64, reply: impl FnOnce(&mut Batch)) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        if peer.broken {
            peer.release(1, cost);
        } else {
            reply(peer.out.reply(cost));
        }
        self.touch(number);
    }

    /// Sends what has gathered for a connection, or takes leave of it.
    fn settle(&mut self, io: &mut Io, number: u32) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        if !peer.broken {
            peer.prepare_goodbye();
            match peer.out.next(peer.tls.as_mut(), self.tick) {
                Ok(Some(batch)) => {
                    io.send(peer.socket, batch, u64::from(number));
                    if !self.ticking {
                        self.ticking = true;
                        io.wake_at(Some(Instant::now() + TICK));
                    }
                }
                Ok(None) => {}
                Err(_) => Self::give_up(io, peer),
            }
        }
        if peer.is_over() {
            io.shutdown(peer.socket);
            io.remove(peer.socket);
            let id = peer.id;
            self.peers.remove(number);
            self.shared.forget(id);
        }
    }

    /// The peer is gone, or too slow.
    fn give_up(io: &mut Io, peer: &mut Peer) {
        peer.broken = true;
        let (requests, bytes) = peer.out.abandon();
        peer.release(requests, bytes);
        peer.end();
        io.shutdown(peer.socket);
    }

    fn end_all(&mut self, io: &mut Io, at_once: bool) {
        let numbers: Vec<u32> = self.peers.iter().map(|(number, _)| number).collect();
        for number in numbers {
            if let Some(peer) = self.peers.get_mut(number) {
                if at_once {
                    Self::give_up(io, peer);
                } else {
                    peer.end();
                    io.stop_receiving(peer.socket);
                }
            }
            self.touch(number);
        }
    }
}

impl Handler for Transmission {
    type Message = Message;

    fn message(&mut self, io: &mut Io, message: Message) {
        match message {
            Message::Adopt(adopted) => self.adopt(io, *adopted),
            Message::Reply { peer, cost, reply } => {
                self.answer(peer, cost, |batch| reply.append_to(batch));
            }
            Message::Committed(result) => self.committed(&result),
            Message::Stop => self.end_all(io, false),
            Message::Abort => self.end_all(io, true),
            Message::End => io.stop(),
        }
    }

    fn received(&mut self, io: &mut Io, tag: u64, data: io::Result<&[u8]>) {
        self.input(io, tag as u32, |peer, io, ready| {
            peer.receiving = false;
            match data {
                Ok(data) if !data.is_empty() => peer.take(data, io.buffers(), ready),
                // A client that goes away is no error.
                _ => {
                    peer.end();
                    Ok(())
                }
            }
        });
    }

    fn filled(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.input(io, tag as u32, |peer, _, ready| {
            peer.receiving = false;
            match result {
                Ok(()) => peer.payload_filled(buf, ready),
                Err(_) => peer.end(),
            }
            Ok(())
        });
    }

    fn moved(&mut self, _: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        let Some(running) = self.running.remove(tag as u32) else { return };
        let Running { peer, admitted, mut request, write } = running;
        match write {
            None => match request.finish_read(result) {
                Ok(()) => self.answer_read(peer, &admitted, buf),
                Err(error) => self.fail(peer, &admitted, error),
            },
            Some(fua) => {
                // The memory is free before the reply makes room for the next request.
                drop(buf);
                match request.finish_write(result) {
                    Err(error) => self.fail(peer, &admitted, error),
                    Ok(Finish::Done) if !fua => {
                        self.answer(peer, admitted.cost_bytes, |batch| {
                            batch.push(&admitted.done())
                        });
                    }
                    Ok(_) => {
                        if let Some(volume) = self.volume(peer).cloned() {
                            self.commit(Held { peer, admitted, volume });
                        }
                    }
                }
            }
        }
        self.keep(request);
    }

    fn sent(&mut self, io: &mut Io, tag: u64, batch: Batch, result: io::Result<()>) {
        let number = tag as u32;
        if let Some(peer) = self.peers.get_mut(number) {
            let (requests, bytes) = peer.out.sent(batch);
            peer.release(requests, bytes);
            if result.is_err() && !peer.broken {
                Self::give_up(io, peer);
            }
        }
        self.input(io, number, |peer, io, ready| peer.resume(io.buffers(), ready));
    }

    fn turn(&mut self, io: &mut Io) {
        let mut touched = std::mem::take(&mut self.touched);
        for number in touched.drain(..) {
            self.settle(io, number);
        }
        self.touched = touched;
    }

    fn tick(&mut self, io: &mut Io) {
        self.tick = self.tick.wrapping_add(1);
        let patience = self.shared.options.write_timeout.as_secs().max(1);
        let mut sending = false;
        let numbers: Vec<u32> = self.peers.iter().map(|(number, _)| number).collect();
        for number in numbers {
            let Some(peer) = self.peers.get_mut(number) else { continue };
            if peer.out.is_busy() {
                peer.out.progress(io.sent_so_far(peer.socket), self.tick);
            }
            let Some(since) = peer.out.since() else { continue };
            sending = true;
            if u64::from(self.tick.wrapping_sub(since)) > patience && !peer.broken {
                Self::give_up(io, peer);
            }
        }
        self.ticking = sending;
        io.wake_at(sending.then(|| Instant::now() + TICK));
    }
}

/// Runs a request so that a bug in an export costs one reply, not a worker.
fn run(session: &Session, admitted: &Admitted, payload: &[u8]) -> Reply {
    catch_unwind(AssertUnwindSafe(|| session.run(admitted, payload)))
        .unwrap_or_else(|_| Reply::internal_error(admitted))
}
