//! The transmission phase of many connections on one reactor.
//!
//! A read or write of whole blocks is done here from its first byte to its reply: parsed
//! (`frontend::Peers`), admitted (`session`), mapped (`Volume::start_read`, `start_write`), handed to the
//! ring together with others, and answered in a batch. What would have to wait (for another
//! operation, for space, for a commit) goes to the workers and comes back as a message.

use super::export::Failure;
use super::known::Known;
use super::session::{Admitted, Direct as Op, Due, Reply, Session};
use super::shared::{Adopted, Message, Shared};
use super::steps::{Progress, Steps};
use super::wire::Errno;
use super::wire::request::Request;
use super::wire::{Malformed, PAYLOAD_MAX_BYTES, cmd};
use dbs_core::Volume;
use dbs_core::volume::Finish;
use dbs_frontend::{
    Charge, Commits, Delayed, Direct, Ended, Event, Fate, Flushing, Going, HEADER_MAX_BYTES,
    Limits, Peers, Plan, Protocol, Ready, Storage, Work, turns_of,
};
use dbs_reactor::{Batch, Buf, Handler, Io, Remote};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

/// Longest payload of a refused request that is skipped rather than taken for an attack.
const PAYLOAD_SKIP_MAX_BYTES: u64 = 2 * PAYLOAD_MAX_BYTES as u64;

const _: () = assert!(Request::EXTENDED_BYTES <= HEADER_MAX_BYTES);

/// A connection in its transmission phase.
pub struct Client {
    pub(super) known: Arc<Known>,
    pub(super) session: Arc<Session>,
}

#[cfg(feature = "testing")]
impl Client {
    /// A connection that is in no registry.
    #[must_use]
    pub fn offline(session: Arc<Session>) -> Self {
        Self { known: Arc::default(), session }
    }
}

impl Protocol for Client {
    type Request = Admitted;

    fn header_bytes(&self) -> usize {
        self.session.style().request_bytes()
    }

    #[inline]
    fn request(&self, header: &[u8]) -> io::Result<Option<Admitted>> {
        let request = Request::decode(self.session.style(), header)?;
        if request.command == cmd::DISC {
            return Ok(None);
        }
        let admitted = self.session.admit(&request);
        if admitted.skip_bytes > PAYLOAD_SKIP_MAX_BYTES {
            return Err(Malformed("payload of an absurd length").into());
        }
        Ok(Some(admitted))
    }

    fn ended(&self, lost: bool) {
        self.known.ends(lost);
    }
}

impl Charge for Admitted {
    fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    fn skip_bytes(&self) -> u64 {
        self.skip_bytes
    }

    fn cost_bytes(&self) -> u64 {
        self.cost_bytes
    }
}

/// The connections of one reactor.
pub(super) struct Transmission {
    shared: Arc<Shared>,
    remote: Remote<Message>,
    storage: Option<Storage>,
    peers: Peers<Client>,
    direct: Direct<Running>,
    commits: Commits<Held>,
    flushing: Flushing,
    /// Requests that the limits of their volume delay, with the number of their connection.
    delayed: Delayed<(u32, Ready<Admitted>)>,
    /// The time of this turn, if somebody needed it.
    now: Option<Instant>,
}

/// A read or write whose bytes are being transferred.
struct Running {
    peer: u32,
    admitted: Admitted,
    fua: bool,
}

/// A request that is answered after a commit.
struct Held {
    peer: u32,
    admitted: Admitted,
    volume: Volume,
}

impl Transmission {
    /// What a reactor runs.
    pub fn on(shared: Arc<Shared>, io: &mut Io, remote: Remote<Message>) -> Self {
        let storage = shared.exports.direct_io().map(|direct| Storage {
            file: io.add_file(direct.file),
            offset_alignment: direct.offset_alignment,
            memory_alignment: direct.memory_alignment,
        });
        Self::new(shared, remote, storage)
    }

    fn new(shared: Arc<Shared>, remote: Remote<Message>, storage: Option<Storage>) -> Self {
        let options = &shared.options;
        let limits = Limits { requests: options.requests_max, bytes: options.bytes_max };
        let peers = Peers::new(limits, options.write_timeout);
        let other = remote.clone();
        let wake = Arc::new(move || other.send(Message::Flushed));
        let (direct, commits, flushing) =
            (Direct::default(), Commits::default(), Flushing::new(wake));
        Self {
            shared,
            remote,
            storage,
            peers,
            direct,
            commits,
            flushing,
            delayed: Delayed::default(),
            now: None,
        }
    }

    fn adopt(&mut self, io: &mut Io, adopted: Adopted) {
        let Adopted { known, socket, session, tls, received } = adopted;
        let id = known.peer.id;
        let client = Client { known, session: Arc::new(session) };
        let number = self.peers.add(io, socket, client, tls);
        if self.shared.is_stopping() {
            return self.peers.end(io, false, |client| client.known.peer.id == id);
        }
        self.input(io, u64::from(number), Event::Begun(&received));
    }

    /// Lets a connection take input, runs the requests that completes and receives on.
    fn input(&mut self, io: &mut Io, tag: u64, event: Event<'_>) {
        let number = tag as u32;
        let (mut ready, failure) = self.peers.input(io, number, event);
        if let (Some(error), Some(client)) = (failure, self.peers.get(number)) {
            self.shared.client_failed(client.known.peer.id, &error);
        }
        for request in ready.drain(..) {
            self.take(io, number, request);
        }
        self.peers.receive(io, number, ready);
    }

    /// Takes a request, and starts it when the limits of its volume let it in.
    fn take(&mut self, io: &mut Io, number: u32, mut ready: Ready<Admitted>) {
        ready.request.begun = Some(self.now());
        let Some(client) = self.peers.get(number) else { return };
        let payload = ready.payload.as_ref().map_or(0, |data| data.len());
        client.known.count(ready.request.operation(), payload);
        let is_free = |volume: &Volume| self.delayed.is_free(volume.pace());
        if client.session.volume().is_none_or(is_free) {
            self.start(io, number, ready);
        } else {
            self.take_limited(io, number, ready);
        }
    }

    #[cold]
    fn take_limited(&mut self, io: &mut Io, number: u32, ready: Ready<Admitted>) {
        let Self { peers, delayed, .. } = self;
        let volume = peers.get(number).and_then(|client| client.session.volume());
        let admitted = match (volume, ready.request.limited_bytes()) {
            (Some(volume), Some(bytes)) => delayed.admit(io, volume.pace(), bytes, (number, ready)),
            _ => Some((number, ready)),
        };
        if let Some((_, ready)) = admitted {
            self.start(io, number, ready);
        }
    }

    /// Starts a request in the best way there is for it.
    #[inline]
    fn start(&mut self, io: &mut Io, number: u32, ready: Ready<Admitted>) {
        let Ready { request: admitted, payload } = ready;
        let Some(client) = self.peers.get(number) else { return };
        let (Some(direct), Some(volume)) = (admitted.direct(), client.session.volume()) else {
            return self.work(number, admitted, payload);
        };
        match direct {
            Op::Flush if client.session.read_only() => self.work(number, admitted, payload),
            Op::Flush => {
                let volume = volume.clone();
                self.commit(io, Held { peer: number, admitted, volume });
            }
            Op::Read { offset, length, sparse } => {
                self.read(io, number, admitted, (offset, length), sparse);
            }
            Op::Write { offset, fua } => match payload {
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
        range: (u64, usize),
        sparse: bool,
    ) {
        let length = range.1;
        let Self { peers, direct, storage, .. } = self;
        let Some(volume) = peers.get(number).and_then(|client| client.session.volume()) else {
            return;
        };
        match direct.plan_read(volume, storage.as_ref(), range, sparse) {
            Err(error) => self.fail(number, &admitted, error),
            // Holes are shown as holes to whom they are worth it.
            Ok(Plan::Blocked | Plan::Holes) => self.work(number, admitted, None),
            Ok(Plan::Zeros) if sparse => self.answer(number, admitted.due(), |batch| {
                batch.push(&admitted.hole_reply(length));
            }),
            Ok(Plan::Zeros) => {
                let mut buf = io.buffers().take(length);
                buf.fill(0);
                self.answer_read(number, &admitted, buf);
            }
            Ok(Plan::Io(planned)) => {
                let running = Running { peer: number, admitted, fua: false };
                direct.read(io, planned, length, running);
            }
        }
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
        let Self { peers, direct, storage, .. } = self;
        let Some(volume) = peers.get(number).and_then(|client| client.session.volume()) else {
            return;
        };
        match direct.plan_write(volume, storage.as_ref(), offset, payload.len()) {
            Err(error) => self.fail(number, &admitted, error),
            Ok(None) => self.work(number, admitted, Some(payload)),
            Ok(Some(planned)) => {
                let running = Running { peer: number, admitted, fua };
                direct.write(io, planned, payload, running);
            }
        }
    }

    fn volume(&self, number: u32) -> Option<&Volume> {
        self.peers.get(number).and_then(|client| client.session.volume())
    }

    /// Hands a request to the workers.
    fn work(&self, number: u32, admitted: Admitted, payload: Option<Buf>) {
        let Some(Client { known, session }) = self.peers.get(number) else { return };
        let (session, remote) = (Arc::clone(session), self.remote.clone());
        let steps = Steps::new(&session, &admitted, payload.as_deref().unwrap_or_default());
        let known = Arc::clone(known);
        let client = known.peer.id;
        let client = session.volume().map_or(client, |volume| turns_of(volume, client));
        let state = Some(JobState { session, admitted, payload, steps });
        let job = Job { peer: number, known, remote, state };
        self.shared.pool.submit(client, job);
    }

    /// Answers a request once everything acknowledged so far is durable; all that ask while a
    /// commit runs share the next one.
    fn commit(&mut self, io: &mut Io, held: Held) {
        if self.commits.add(held) {
            self.start_commit(io);
        }
    }

    fn start_commit(&mut self, io: &mut Io) {
        if self.commits.begin().is_some() {
            self.go_on(io);
        }
    }

    fn go_on(&mut self, io: &mut Io) {
        let Some(Held { volume, .. }) = self.commits.running() else { return };
        match self.flushing.start(io, self.storage.as_ref(), volume, 0) {
            Going::Ended(result) => return self.committed(io, &result),
            Going::Flushing => return,
            Going::Blocked => {}
        }
        let (volume, remote) = (volume.clone(), self.remote.clone());
        self.shared.pool.submit_first(move || {
            let result = catch_unwind(AssertUnwindSafe(|| volume.flush()));
            // When the answer is there, nothing holds the volume but its client.
            drop(volume);
            let crashed = |_| Err(dbs_core::Error::invalid("internal error of the server"));
            remote.send(Message::Committed(result.unwrap_or_else(crashed)));
        });
    }

    fn committed(&mut self, io: &mut Io, result: &Result<(), dbs_core::Error>) {
        let mut committing = self.commits.take();
        for Held { peer, admitted, .. } in committing.drain(..) {
            match result {
                Ok(()) => self.answer(peer, admitted.due(), |batch| batch.push(&admitted.done())),
                Err(error) => {
                    let text = error.to_string();
                    self.fail(peer, &admitted, dbs_core::Error::new(error.kind(), text));
                }
            }
        }
        if self.commits.ended(committing) {
            self.start_commit(io);
        }
    }

    fn answer_read(&mut self, number: u32, admitted: &Admitted, buf: Buf) {
        self.answer(number, admitted.due(), |batch| {
            batch.push(&admitted.data_head(buf.len()));
            batch.push_buf(buf);
        });
    }

    fn fail(&mut self, number: u32, admitted: &Admitted, error: dbs_core::Error) {
        let reply = Reply::refused(admitted, &error.into());
        self.answer(number, admitted.due(), |batch| reply.append_to(batch));
    }

    fn answer(&mut self, number: u32, due: Due, reply: impl FnOnce(&mut Batch)) {
        let now = self.now();
        if let Some(client) = self.peers.get(number) {
            client.known.answered(due, now);
        }
        self.peers.answer(number, due.cost, reply);
    }

    /// The time, looked at once a turn.
    fn now(&mut self) -> Instant {
        *self.now.get_or_insert_with(Instant::now)
    }
}

impl Handler for Transmission {
    type Message = Message;

    fn message(&mut self, io: &mut Io, message: Message) {
        match message {
            Message::Adopt(adopted) => self.adopt(io, *adopted),
            Message::Reply { peer, due, reply } => {
                self.answer(peer, due, |batch| reply.append_to(batch));
            }
            Message::Commit { peer, admitted } => {
                if let Some(volume) = self.volume(peer).cloned() {
                    self.commit(io, Held { peer, admitted, volume });
                }
            }
            Message::Committed(result) => self.committed(io, &result),
            Message::Flushed if self.flushing.is_waiting() => self.go_on(io),
            Message::Flushed => {}
            Message::Stop => self.peers.end(io, false, |_| true),
            Message::Abort => self.peers.end(io, true, |_| true),
            Message::Kick(id) => self.peers.end(io, true, |client| client.known.peer.id == id),
            Message::Look(seen) => {
                self.peers.look(io);
                drop(seen);
            }
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
        let Some((running, ended)) = self.direct.moved(tag, buf, result) else { return };
        let Running { peer, admitted, fua } = running;
        match ended {
            Err(error) => self.fail(peer, &admitted, error),
            Ok(Ended::Read(buf)) => self.answer_read(peer, &admitted, buf),
            Ok(Ended::Again) => self.work(peer, admitted, None),
            Ok(Ended::Write(Finish::Done)) if !fua => {
                self.answer(peer, admitted.due(), |batch| batch.push(&admitted.done()));
            }
            Ok(Ended::Write(_)) => {
                if let Some(volume) = self.volume(peer).cloned() {
                    self.commit(io, Held { peer, admitted, volume });
                }
            }
        }
    }

    fn synced(&mut self, io: &mut Io, _: u64, result: io::Result<()>) {
        let result = self.flushing.synced(result);
        self.committed(io, &result);
    }

    fn sent(&mut self, io: &mut Io, tag: u64, batch: Batch, result: io::Result<()>) {
        self.input(io, tag, Event::Sent(batch, result));
    }

    fn turn(&mut self, io: &mut Io) {
        self.now = None;
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

    fn reminded(&mut self, io: &mut Io) {
        loop {
            let Self { delayed, peers, .. } = self;
            let fate = |(number, _): &(u32, Ready<Admitted>)| {
                peers.get(*number).map_or(Fate::Drop, |client| client.known.fate())
            };
            let Some(((number, ready), begins)) = delayed.next(io, fate) else { return };
            if begins {
                self.start(io, number, ready);
                continue;
            }
            let admitted = &ready.request;
            let failure = Failure::new(Errno::Shutdown, "the connection ends before this is done");
            let reply = Reply::refused(admitted, &failure);
            self.answer(number, admitted.due(), |batch| reply.append_to(batch));
        }
    }
}

/// A request at the workers.
struct Job {
    peer: u32,
    known: Arc<Known>,
    remote: Remote<Message>,
    /// Until it is over.
    state: Option<JobState>,
}

struct JobState {
    session: Arc<Session>,
    admitted: Admitted,
    payload: Option<Buf>,
    steps: Steps,
}

impl Job {
    /// The next step, so that a bug in an export costs one reply, not a worker.
    fn next(&mut self) -> Progress {
        let Self { known, state, .. } = self;
        let Some(JobState { session, admitted, payload, steps }) = state else {
            return Progress::More;
        };
        if known.drops(steps.is_long()) {
            let failure = Failure::new(Errno::Shutdown, "the connection ends before this is done");
            return Progress::Reply(Reply::refused(admitted, &failure));
        }
        let payload = payload.as_deref().unwrap_or_default();
        let stepped = catch_unwind(AssertUnwindSafe(|| match steps.step(session, payload) {
            // An export of nothing that the reactor knows flushes by itself.
            Progress::Commit if session.volume().is_none() => {
                Progress::Reply(session.commit(admitted))
            }
            progress => progress,
        }));
        stepped.unwrap_or_else(|_| Progress::Reply(Reply::internal_error(admitted)))
    }
}

impl Work for Job {
    fn step(&mut self) -> bool {
        let progress = self.next();
        if matches!(progress, Progress::More) {
            return self.state.is_some();
        }
        // Its memory is free before the reply makes room for the next request, and its volume before the
        // client knows that it is done.
        let Some(JobState { session, admitted, payload, steps }) = self.state.take() else {
            return false;
        };
        drop((session, payload, steps));
        let (peer, due) = (self.peer, admitted.due());
        self.remote.send(match progress {
            Progress::Reply(reply) => Message::Reply { peer, due, reply },
            _ => Message::Commit { peer, admitted },
        });
        false
    }
}
