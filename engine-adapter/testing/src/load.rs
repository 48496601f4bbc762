//! Load: as many requests in flight as asked for, from one reactor, so that a client's cost hides
//! little of what a server costs, and is the same for every server.

use super::client::ClientError;
use dbs_bench::Histogram;
use dbs_frontend::Listen;
use dbs_reactor::{Batch, Handler, Io, Socket as Number};
use longhorn_wire::frame::{HEADER_BYTES, Header, PAYLOAD_MAX_BYTES, Type};
use std::io;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long the last replies may take.
const GRACE: Duration = Duration::from_secs(30);

/// What to do.
#[derive(Debug, Clone)]
pub struct Load {
    /// Where the server listens.
    pub address: Listen,
    /// Connections, which requests go over in turn.
    pub connections: usize,
    /// Requests in flight, on all connections together.
    pub depth: usize,
    /// Bytes of each request.
    pub length: u32,
    /// Requests are inside so many bytes, at multiples of `length`.
    pub size: u64,
    /// Of a hundred requests, so many are writes.
    pub write_percent: u8,
    /// One after the other instead of anywhere.
    pub sequential: bool,
    /// For how long.
    pub duration: Duration,
    /// Where to begin, and what to draw offsets from.
    pub seed: u64,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct LoadReport {
    /// Requests answered with success.
    pub requests: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// The text of the first of those.
    pub error: Option<String>,
    /// From the first request to the last reply.
    pub elapsed: Duration,
    /// From request to reply, as seen at reception.
    pub latency: Histogram,
}

/// Runs a load on a thread of its own and waits for its end.
///
/// # Errors
/// There is no connection, one was lost, or the last replies do not come.
pub fn run(load: &Load, reactor: &dbs_reactor::Options) -> io::Result<LoadReport> {
    let blocks = load.size / u64::from(load.length.max(1));
    if load.length == 0 || load.length > PAYLOAD_MAX_BYTES || blocks == 0 || load.depth == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a load of nothing, or too much"));
    }
    let connect = |_| {
        let socket = load.address.connect()?;
        socket.tune()?;
        Ok(socket)
    };
    let sockets = (0..load.connections.max(1)).map(connect).collect::<io::Result<Vec<_>>>()?;
    let (ended, end) = mpsc::channel();
    let options = load.clone();
    let thread = dbs_reactor::spawn("data-load", reactor, move |io, _| {
        let peers = sockets.into_iter().map(|socket| Peer::new(io.add_socket(socket.into())));
        let mut generator = Generator::new(options, peers.collect(), ended);
        generator.begin(io);
        generator
    })?;
    let result = end.recv().unwrap_or_else(|_| Err(io::Error::other("the load ended at once")));
    thread.join();
    result
}

/// One connection.
struct Peer {
    socket: Number,
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// Of the reply whose payload is coming.
    reply: Option<(Header, usize)>,
    text: Vec<u8>,
    gathering: Batch,
    idle: Batch,
    sending: bool,
}

impl Peer {
    fn new(socket: Number) -> Self {
        Self {
            socket,
            header: [0; HEADER_BYTES],
            header_bytes: 0,
            reply: None,
            text: Vec::new(),
            gathering: Batch::default(),
            idle: Batch::default(),
            sending: false,
        }
    }
}

/// What is asked for next.
#[derive(Debug, Clone)]
pub struct Draw {
    blocks: u64,
    length: u32,
    write_percent: u8,
    sequential: bool,
    random: u64,
    next: u64,
}

impl Draw {
    /// Requests of `length` bytes inside `size` bytes, of which there must be that many.
    pub fn new(length: u32, size: u64, write_percent: u8, sequential: bool, seed: u64) -> Self {
        let blocks = (size / u64::from(length.max(1))).max(1);
        Self {
            blocks,
            length,
            write_percent,
            sequential,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            next: seed % blocks,
        }
    }

    fn random(&mut self) -> u64 {
        // Xorshift: good enough for offsets.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Whether to write, and where.
    pub fn request(&mut self) -> (bool, u64) {
        let write = self.random() % 100 < u64::from(self.write_percent);
        let block = if self.sequential { self.next } else { self.random() % self.blocks };
        self.next = (self.next + 1) % self.blocks;
        (write, block * u64::from(self.length))
    }
}

struct Generator {
    load: Load,
    draw: Draw,
    peers: Vec<Peer>,
    /// When each request in flight began; its number is the sequence.
    begun: Vec<Instant>,
    /// Numbers to send requests under.
    free: Vec<u32>,
    in_flight: usize,
    start: Instant,
    stop: Instant,
    report: Option<LoadReport>,
    ended: mpsc::Sender<io::Result<LoadReport>>,
}

impl Generator {
    fn new(load: Load, peers: Vec<Peer>, ended: mpsc::Sender<io::Result<LoadReport>>) -> Self {
        let now = Instant::now();
        let report = LoadReport {
            requests: 0,
            errors: 0,
            error: None,
            elapsed: Duration::ZERO,
            latency: Histogram::default(),
        };
        Self {
            draw: Draw::new(load.length, load.size, load.write_percent, load.sequential, load.seed),
            peers,
            begun: vec![now; load.depth],
            free: (0..load.depth as u32).rev().collect(),
            in_flight: 0,
            start: now,
            stop: now + load.duration,
            report: Some(report),
            ended,
            load,
        }
    }

    fn begin(&mut self, io: &mut Io) {
        for (tag, peer) in self.peers.iter().enumerate() {
            io.receive(peer.socket, tag as u64);
        }
        io.wake_at(Some(self.stop));
        self.turn(io);
    }

    /// Adds a request to what is sent next.
    fn request(&mut self, io: &Io, number: u32, now: Instant) {
        let (write, offset) = self.draw.request();
        let (length, offset) = (self.load.length, offset as i64);
        let connections = self.peers.len();
        let peer = &mut self.peers[number as usize % connections];
        if write {
            let header = Header::with_payload(Type::Write, number, offset, length);
            peer.gathering.push(&header.encode());
            // Whatever is in it.
            peer.gathering.push_buf(io.buffers().take(length as usize));
        } else {
            peer.gathering.push(&Header::new(Type::Read, number, offset, length).encode());
        }
        self.begun[number as usize] = now;
        self.in_flight += 1;
    }

    /// Takes the bytes of replies.
    fn take(&mut self, tag: usize, mut bytes: &[u8]) -> io::Result<()> {
        let now = Instant::now();
        loop {
            let peer = &mut self.peers[tag];
            if let Some((header, left)) = &mut peer.reply {
                let count = bytes.len().min(*left);
                if header.kind() == Some(Type::Error) {
                    peer.text.extend_from_slice(&bytes[..count]);
                }
                *left -= count;
                bytes = &bytes[count..];
                if *left > 0 {
                    return Ok(());
                }
                let header = *header;
                peer.reply = None;
                self.replied(tag, &header, now)?;
                continue;
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let count = bytes.len().min(HEADER_BYTES - peer.header_bytes);
            peer.header[peer.header_bytes..][..count].copy_from_slice(&bytes[..count]);
            peer.header_bytes += count;
            bytes = &bytes[count..];
            if peer.header_bytes == HEADER_BYTES {
                peer.header_bytes = 0;
                let header = Header::decode(&peer.header)?;
                peer.reply = Some((header, header.length as usize));
            }
        }
    }

    fn replied(&mut self, tag: usize, header: &Header, now: Instant) -> io::Result<()> {
        let Some(begun) = self.begun.get(header.sequence as usize) else {
            return Err(io::Error::other(ClientError::Unexpected(*header).to_string()));
        };
        let Some(report) = &mut self.report else { return Ok(()) };
        let text = std::mem::take(&mut self.peers[tag].text);
        match header.kind() {
            Some(Type::Response) if header.size == self.load.length => {
                report.requests += 1;
                report.latency.record(now.saturating_duration_since(*begun));
            }
            Some(Type::Error) => {
                report.errors += 1;
                let text = || String::from_utf8_lossy(&text).into_owned();
                report.error.get_or_insert_with(text);
            }
            _ => return Err(io::Error::other(ClientError::Unexpected(*header).to_string())),
        }
        self.in_flight -= 1;
        self.free.push(header.sequence);
        Ok(())
    }

    fn end(&mut self, io: &mut Io, result: io::Result<()>) {
        if let Some(mut report) = self.report.take() {
            report.elapsed = self.start.elapsed();
            // An error: nobody waits for it any more.
            let _ = self.ended.send(result.map(|()| report));
        }
        self.peers.iter().for_each(|peer| io.shutdown(peer.socket));
        io.wake_at(None);
        io.stop();
    }
}

impl Handler for Generator {
    type Message = ();

    fn message(&mut self, _: &mut Io, (): ()) {}

    fn received(&mut self, io: &mut Io, tag: u64, data: io::Result<&[u8]>) {
        if self.report.is_none() {
            return;
        }
        let taken = match data {
            Ok([]) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => self.take(tag as usize, bytes),
            Err(error) => Err(error),
        };
        match taken {
            Ok(()) => io.receive(self.peers[tag as usize].socket, tag),
            Err(error) => self.end(io, Err(error)),
        }
    }

    fn sent(&mut self, io: &mut Io, tag: u64, mut batch: Batch, result: io::Result<()>) {
        batch.clear();
        let peer = &mut self.peers[tag as usize];
        (peer.idle, peer.sending) = (batch, false);
        if let Err(error) = result {
            self.end(io, Err(error));
        }
    }

    fn turn(&mut self, io: &mut Io) {
        if self.report.is_none() {
            return;
        }
        let now = Instant::now();
        if now < self.stop {
            while let Some(number) = self.free.pop() {
                self.request(io, number, now);
            }
        } else if self.in_flight == 0 {
            return self.end(io, Ok(()));
        }
        for (tag, peer) in self.peers.iter_mut().enumerate() {
            if !peer.sending && !peer.gathering.is_empty() {
                let batch = std::mem::replace(&mut peer.gathering, std::mem::take(&mut peer.idle));
                peer.sending = true;
                io.send(peer.socket, batch, tag as u64);
            }
        }
    }

    fn tick(&mut self, io: &mut Io) {
        let late = self.stop + GRACE;
        if self.in_flight == 0 {
            self.end(io, Ok(()));
        } else if Instant::now() < late {
            io.wake_at(Some(late));
        } else {
            let missing = format!("{} replies do not come", self.in_flight);
            self.end(io, Err(io::Error::new(io::ErrorKind::TimedOut, missing)));
        }
    }
}
