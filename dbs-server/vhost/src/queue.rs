//! The queues of one reactor: their requests are taken, carried out and answered here.

use super::client::Client;
use super::inflight::Inflight;
use super::memory::Memory;
use super::request::{Ask, ID_BYTES, Request, Status, gather, parse, scatter};
use super::ring::{Broken, Chain, Malformed, Ring};
use dbs_frontend::{Answer, Demand, Post, Report, Requests, Serves, User};
use dbs_reactor::{Buf, File, Handler, Io, Watch};
use dbs_service::log;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};

/// Requests taken from a queue before others have their turn.
const TAKEN_PER_TURN: usize = 256;
/// Bytes under way of one queue; a request more may go beyond.
const BYTES_MAX: u64 = 32 << 20;

/// Requests after which a queue hands on what it has done, in the middle of a turn: what it took to the disk, and what it
/// answered to the guest. So the disk, this thread and the guest's processor work at the same time; each time costs a
/// system call.
const BATCH: usize = 8;

/// Requests that keep their memory.
const IDLE_MAX: usize = 1024;

/// What other threads tell a reactor.
pub enum Message {
    /// Serve a queue.
    Start(Box<Start>),
    /// Signal it in another way.
    Call(u64, Option<std::fs::File>),
    /// Take nothing more from a queue but what a server before has left, and say what would be next once nothing of it is
    /// under way. With `true`, that and long requests are left to whoever serves it next.
    Stop(u64, bool, mpsc::Sender<u16>),
    /// What a worker has done.
    Report(Report<(u64, u16)>),
    /// A queue that had more than its share of a turn.
    Go(u64),
    /// All queues are gone: end.
    End,
}

impl From<Report<(u64, u16)>> for Message {
    fn from(report: Report<(u64, u16)>) -> Self {
        Self::Report(report)
    }
}

/// What a queue is served with.
pub struct Start {
    /// A number that no other queue has had.
    pub number: u64,
    /// Whose it is.
    pub client: Arc<Client>,
    /// Its place among those.
    pub index: u16,
    /// As whom it does what it does.
    pub user: Arc<User>,
    /// The memory that it is in.
    pub memory: Arc<Memory>,
    /// Its ring.
    pub ring: Ring,
    /// Notes of what is under way, and what a server before has left.
    pub inflight: Option<(Inflight, Vec<u16>)>,
    /// Whether what is answered is to be durable: for a guest that never asks for that.
    pub durable: bool,
    /// Tells that there are requests.
    pub kick: OwnedFd,
    /// Is told that there are answers.
    pub call: Option<std::fs::File>,
    /// Is told that the queue is broken.
    pub failed: Option<std::fs::File>,
}

/// The handler of a reactor.
pub struct Queues {
    queues: Vec<Queue>,
    requests: Requests<(u64, u16)>,
    post: Post<Message>,
    /// In the tags of all operations, above the number of a queue.
    tags: u64,
    /// Reused.
    idle: Vec<Chain>,
}

/// A queue.
struct Queue {
    number: u64,
    client: Arc<Client>,
    index: u16,
    user: Arc<User>,
    memory: Arc<Memory>,
    ring: Ring,
    inflight: Option<Inflight>,
    durable: bool,
    /// What a server before has left, the first of it last.
    left: Vec<u16>,
    kick: (File, Watch),
    call: Option<std::fs::File>,
    failed: Option<std::fs::File>,
    /// Requests under way, by their first descriptors.
    running: Vec<Option<Running>>,
    count: usize,
    bytes: u64,
    /// Answers of which the guest was not told yet.
    untold: usize,
    /// Who waits until nothing is under way.
    stopping: Option<mpsc::Sender<u16>>,
    /// What is not begun then is left.
    dropping: bool,
    broken: bool,
    /// A malformed request has been told of.
    complained: bool,
}

/// A request under way.
struct Running {
    request: Request,
    chain: Chain,
    bytes: u64,
}

impl Queues {
    /// Those of a reactor, which `post` sends messages to.
    pub fn new(requests: Requests<(u64, u16)>, post: Post<Message>, tags: u64) -> Self {
        Self { queues: Vec::new(), requests, post, tags, idle: Vec::new() }
    }

    fn start(&mut self, io: &mut Io, start: Start) {
        let Start { number, client, index, user, memory, ring, inflight, .. } = start;
        let Start { durable, kick, call, failed, .. } = start;
        let kick = io.add_file(kick);
        let kick = (kick, io.watch(kick, self.tags | number));
        let (inflight, mut left) = inflight.unzip();
        left.iter_mut().for_each(|left| left.reverse());
        let running = (0..ring.size()).map(|_| None).collect();
        let (count, bytes, untold, stopping) = (0, 0, 0, None);
        let (dropping, broken, complained) = (false, false, false);
        let left = left.unwrap_or_default();
        self.queues.push(Queue {
            number,
            client,
            index,
            user,
            memory,
            ring,
            inflight,
            durable,
            left,
            kick,
            call,
            failed,
            running,
            count,
            bytes,
            untold,
            stopping,
            dropping,
            broken,
            complained,
        });
        self.take(io, number);
    }

    fn find(&mut self, number: u64) -> Option<&mut Queue> {
        self.queues.iter_mut().find(|queue| queue.number == number)
    }

    /// Takes and starts what there is, as far as there is room for it.
    fn take(&mut self, io: &mut Io, number: u64) {
        for taken in 1..=TAKEN_PER_TURN {
            let Some(queue) = self.queues.iter_mut().find(|queue| queue.number == number) else {
                return;
            };
            match queue.next() {
                Ok(Some(head)) => {
                    let chain = self.idle.pop().unwrap_or_default();
                    if let Some((demand, range)) = queue.begin(io, head, chain) {
                        let user = Arc::clone(&queue.user);
                        self.requests.start(io, &user, (number, head), demand, range);
                    }
                    if taken.is_multiple_of(BATCH) {
                        io.hand_over();
                    }
                }
                Ok(None) => return self.finish(io),
                Err(broken) => {
                    queue.breaks(broken);
                    return self.finish(io);
                }
            }
        }
        self.finish(io);
        (self.post)(Message::Go(number));
    }

    /// Answers what has ended, and goes on where that makes room.
    fn finish(&mut self, io: &mut Io) {
        while let Some(((number, head), answer)) = self.requests.ended() {
            let room = self.idle.len() < IDLE_MAX;
            let Some(queue) = self.find(number) else { continue };
            // A queue that waits for room is told of nothing else.
            let full = !queue.has_room();
            let chain = queue.end(head, answer);
            let go = full && queue.has_room();
            self.idle.extend(chain.filter(|_| room));
            if go {
                (self.post)(Message::Go(number));
            }
        }
        self.leave(io);
    }

    /// Lets go of queues that have stopped.
    fn leave(&mut self, io: &mut Io) {
        let gone = |queue: &Queue| queue.stopping.is_some() && queue.count == 0 && !queue.owes();
        while let Some(index) = self.queues.iter().position(gone) {
            let mut queue = self.queues.swap_remove(index);
            queue.signal();
            io.unwatch(queue.kick.1);
            io.remove_file(queue.kick.0);
            let (next, stopping) = (queue.ring.next(), queue.stopping.take());
            // Who waits for that finds that nobody has the volume open for it.
            drop(queue);
            // An error: nobody waits any more.
            let _ = stopping.map(|stopping| stopping.send(next));
        }
    }
}

impl Queue {
    fn has_room(&self) -> bool {
        self.count < self.running.len() && (self.bytes < BYTES_MAX || self.count == 0)
    }

    /// Whether there is something that it has to begin although it stops: what comes next is behind all that was left.
    fn owes(&self) -> bool {
        !self.left.is_empty() && !self.broken && !self.dropping
    }

    /// The next request, if there is one and may be begun.
    fn next(&mut self) -> Result<Option<u16>, Broken> {
        if self.broken || self.dropping || !self.has_room() {
            return Ok(None);
        }
        if let Some(head) = self.left.pop() {
            return Ok(Some(head));
        }
        if self.stopping.is_some() {
            return Ok(None);
        }
        let head = match self.ring.pop(&self.memory)? {
            None if self.ring.ask(&self.memory)? => self.ring.pop(&self.memory)?,
            found => found,
        };
        let Some(head) = head else { return Ok(None) };
        if self.running.get(usize::from(head)).is_none_or(Option::is_some) {
            return Err(Broken("a request is made available while it is under way"));
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.begin(head)?;
        }
        Ok(Some(head))
    }

    /// Begins a request; what is to be carried out for it, and where, unless it is answered already.
    fn begin(&mut self, io: &mut Io, head: u16, mut chain: Chain) -> Option<(Demand, (u64, u64))> {
        let parsed = self.ring.follow(&self.memory, head, &mut chain);
        let request = match parsed.and_then(|()| parse(&self.memory, &chain)) {
            Ok(request) => request,
            Err(malformed) => {
                self.complain(malformed);
                self.push(head, 0);
                return None;
            }
        };
        self.client.count(self.index, &request.ask);
        let (demand, range) = match request.ask {
            Ask::Read(offset, length) => (Demand::Read, (offset, length)),
            Ask::Write(offset, length) => {
                let mut payload = io.buffers().take(length as usize);
                // It was looked at as a whole: this cannot fail.
                gather(&self.memory, &chain.readable, 16, &mut payload)?;
                (Demand::Write(payload, self.durable), (offset, length))
            }
            Ask::Flush => (Demand::Flush, (0, 0)),
            Ask::Discard(offset, length) => (Demand::Discard(self.durable), (offset, length)),
            Ask::Zeroes(offset, length, true) => (Demand::Zeroes(self.durable), (offset, length)),
            Ask::Zeroes(offset, length, false) => {
                (Demand::KeepZeroes(self.durable), (offset, length))
            }
            Ask::Name => {
                let name = self.client.name();
                scatter(&self.memory, &cut(&chain, ID_BYTES), &name);
                self.outcome(head, request.status, Status::Ok, ID_BYTES as u32);
                return None;
            }
            Ask::Refuse(status) => {
                self.outcome(head, request.status, status, 0);
                return None;
            }
        };
        let bytes = if matches!(demand, Demand::Read | Demand::Write(..)) { range.1 } else { 0 };
        self.count += 1;
        self.bytes += bytes;
        if let Some(place) = self.running.get_mut(usize::from(head)) {
            *place = Some(Running { request, chain, bytes });
        }
        Some((demand, range))
    }

    /// Ends a request that was carried out; gives back its memory.
    fn end(&mut self, head: u16, answer: Answer) -> Option<Chain> {
        let running = self.running.get_mut(usize::from(head))?.take()?;
        let Running { request, chain, bytes } = running;
        self.count -= 1;
        self.bytes -= bytes;
        match answer {
            Answer::Done(data) => self.done(head, &request, &chain, &data),
            Answer::Failed(_) => self.outcome(head, request.status, Status::Failed, 0),
            // It stays noted for whoever serves the queue next.
            Answer::Dropped => {}
        }
        Some(chain)
    }

    fn done(&mut self, head: u16, request: &Request, chain: &Chain, data: &Buf) {
        let written = scatter(&self.memory, &chain.writable, data);
        let status = if written.is_some() { Status::Ok } else { Status::Failed };
        self.outcome(head, request.status, status, data.len() as u32);
    }

    fn outcome(&mut self, head: u16, at: u64, status: Status, written: u32) {
        // It was seen to be there.
        let _ = self.memory.write(at, &[status as u8]);
        self.push(head, written + 1);
    }

    fn push(&mut self, head: u16, written: u32) {
        if self.broken {
            return;
        }
        let pushed = self.push_noted(head, written);
        pushed.err().into_iter().for_each(|broken| self.breaks(broken));
        self.untold += 1;
        if self.untold >= BATCH {
            self.signal();
        }
    }

    fn push_noted(&mut self, head: u16, written: u32) -> Result<(), Broken> {
        let Some(inflight) = &mut self.inflight else {
            return self.ring.push(&self.memory, head, written);
        };
        inflight.ends(head)?;
        self.ring.push(&self.memory, head, written)?;
        inflight.ended(head, self.ring.used())
    }

    /// Tells the guest of answers, if there are any that it wants to be told of.
    fn signal(&mut self) {
        self.untold = 0;
        match self.ring.wants_signal(&self.memory) {
            // Full only if nobody looks.
            Ok(true) => drop(self.call.as_mut().map(add_one)),
            Ok(false) => {}
            Err(broken) => self.breaks(broken),
        }
    }

    fn breaks(&mut self, Broken(why): Broken) {
        if !std::mem::replace(&mut self.broken, true) {
            log::error("vhost-user", &[("client", &self.client.who), ("queue", &why)]);
            drop(self.failed.as_mut().map(add_one));
        }
    }

    fn complain(&mut self, Malformed(why): Malformed) {
        if !std::mem::replace(&mut self.complained, true) {
            log::warn("vhost-user", &[("client", &self.client.who), ("request", &why)]);
        }
    }
}

/// The first bytes of what a request has written for it, without its outcome.
fn cut(chain: &Chain, most: usize) -> Vec<super::ring::Segment> {
    let mut room = most as u32;
    let cut = |segment: &super::ring::Segment| {
        let length = segment.length.min(room);
        room -= length;
        super::ring::Segment { length, ..*segment }
    };
    chain.writable.iter().map(cut).collect()
}

/// Adds one to an eventfd, which waits for nobody.
fn add_one(event: &mut std::fs::File) -> io::Result<()> {
    #[allow(clippy::host_endian_bytes, reason = "what the kernel takes")]
    event.write_all(&1u64.to_ne_bytes())
}

impl Handler for Queues {
    type Message = Message;

    fn message(&mut self, io: &mut Io, message: Message) {
        match message {
            Message::Start(start) => self.start(io, *start),
            Message::Call(number, call) => {
                if let Some(queue) = self.find(number) {
                    queue.call = call;
                    // What came before was signalled elsewhere, or nowhere.
                    drop(queue.call.as_mut().map(add_one));
                }
            }
            Message::Stop(number, dropping, stopped) => {
                let Some(queue) = self.find(number) else { return };
                if dropping {
                    queue.user.drop_long();
                }
                (queue.stopping, queue.dropping) = (Some(stopped), dropping);
                // Without notes, nobody would be given again what was dropped.
                queue.user.ends_delays(dropping && queue.inflight.is_some());
                self.requests.let_go(io);
                self.finish(io);
            }
            Message::Report(report) => {
                self.requests.report(io, report);
                self.finish(io);
            }
            Message::Go(number) => self.take(io, number),
            Message::End => io.stop(),
        }
    }

    fn signalled(&mut self, io: &mut Io, number: u64, result: io::Result<()>) {
        match result {
            Ok(()) => self.take(io, number),
            Err(_) => {
                let broken = Broken("the kernel does not watch its eventfd");
                self.find(number).into_iter().for_each(|queue| queue.breaks(broken));
            }
        }
    }

    fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        self.requests.moved(io, tag, buf, result);
        self.finish(io);
    }

    fn reminded(&mut self, io: &mut Io) {
        self.requests.reminded(io);
        self.finish(io);
    }

    fn synced(&mut self, io: &mut Io, _: u64, result: io::Result<()>) {
        self.requests.synced(io, result);
        self.finish(io);
    }

    fn turn(&mut self, _: &mut Io) {
        self.queues.iter_mut().for_each(Queue::signal);
    }
}

impl Serves for Queues {
    type Ticket = (u64, u16);

    fn requests(&self) -> &Requests<(u64, u16)> {
        &self.requests
    }

    fn requests_mut(&mut self) -> &mut Requests<(u64, u16)> {
        &mut self.requests
    }

    fn answer(&mut self, io: &mut Io) {
        self.finish(io);
    }

    /// Their connections have ended before: nothing is left, unless one is lost.
    fn leave(&mut self, _: &mut Io, _: bool) {}

    fn is_idle(&self) -> bool {
        self.queues.is_empty()
    }
}
