//! A closed loop of requests over Longhorn's data connections: the same client for every replica and
//! every engine.

use crate::Outcome;
use dbs_bench::{Operation, Pattern, Queue, Subject};
use dbs_core::io::queue::Action;
use dbs_core::{Error, ErrorKind};
use dbs_frontend::{Listen, Socket};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::Serialize;
use std::io::Read;
use std::time::Duration;

/// Bytes of a message's header, and what it begins with.
const HEADER: usize = 26;
const MAGIC: u16 = 0x1b01;
/// Kinds of messages.
const READ: u32 = 0;
const WRITE: u32 = 1;
const RESPONSE: u32 = 2;
/// Seconds that a connection may say nothing.
const SILENCE: i64 = 60;
/// Most bytes received at once.
const INPUT_MAX: usize = 4 << 20;

/// What to do, and how.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Whether to write; else to read.
    pub write: bool,
    /// Bytes a request.
    pub block: usize,
    /// In order instead of at random.
    pub sequential: bool,
    /// Data connections.
    pub connections: usize,
    /// Requests in flight, over all connections.
    pub depth: usize,
    /// Bytes of the volume, from its start, that are used.
    pub span: u64,
    /// When to stop.
    pub until: Until,
}

/// When a load ends.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// After a time.
    Time(Duration),
    /// After so many requests on all connections, each to another place.
    Count(u64),
}

/// What came of it.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Figures {
    /// Requests a second.
    pub iops: f64,
    /// Megabytes (10^6) a second.
    pub mb_per_s: f64,
    /// Median of the time from request to reply, microseconds.
    pub p50_us: f64,
    /// 99th percentile of it.
    pub p99_us: f64,
    /// CPU seconds the server used for a million requests.
    pub cpu_per_million: f64,
}

impl Load {
    /// Runs it against who listens there; `cpu` tells the server's CPU time so far, in seconds.
    ///
    /// # Errors
    /// If a connection fails, a request is refused, or the user asks for the end.
    pub fn run(&self, address: &Listen, cpu: impl Fn() -> Outcome<f64>) -> Outcome<Figures> {
        let connect = |_| {
            let socket = address.connect()?;
            socket.tune()?;
            setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(SILENCE))?;
            Ok(socket)
        };
        let sockets = (0..self.connections).map(connect).collect::<Outcome<Vec<_>>>()?;
        let (time, most) = match self.until {
            Until::Time(time) => (Some(time), None),
            Until::Count(count) => (None, Some(count)),
        };
        let load = dbs_bench::Load {
            pattern: match (self.sequential, most) {
                (false, None) => Pattern::Random,
                (true, None) => Pattern::Sequential,
                (false, Some(_)) => Pattern::RandomOnce,
                (true, Some(_)) => Pattern::SequentialOnce,
            },
            operation: if self.write { Operation::Write } else { Operation::Read },
            block: self.block as u32,
            depth: self.depth as u32,
            length: self.span,
            time,
            most,
            seed: self.span,
        };
        let cpu_before = cpu()?;
        let goes_on = &mut |_| crate::process::check_interrupted().is_ok();
        let outcome = dbs_bench::run(&load, &Connections { sockets, size: self.span }, goes_on)?;
        let (seconds, cpu) = (outcome.took.as_secs_f64(), cpu()? - cpu_before);
        let (latencies, count) = (&outcome.latencies, outcome.latencies.count());
        let micros = |share| latencies.percentile_ns(share) as f64 / 1e3;
        Ok(Figures {
            iops: count as f64 / seconds,
            mb_per_s: count as f64 * self.block as f64 / seconds / 1e6,
            p50_us: micros(0.5),
            p99_us: micros(0.99),
            cpu_per_million: cpu / count.max(1) as f64 * 1e6,
        })
    }
}

/// All data connections of a client.
struct Connections {
    sockets: Vec<Socket>,
    size: u64,
}

impl Subject for Connections {
    fn size(&self) -> u64 {
        self.size
    }

    fn refuses_writes(&self) -> Option<String> {
        None
    }

    fn refuses_flushes(&self) -> Option<String> {
        Some("the protocol has none".to_owned())
    }

    fn data_share(&self, _: u64) -> dbs_core::Result<Option<f64>> {
        Ok(None)
    }

    fn queues(&self, depth: u32, block: u32) -> dbs_core::Result<Vec<Box<dyn Queue + '_>>> {
        let (depth, block) = (depth as usize, block as usize);
        let busy = self.sockets.len().min(depth);
        let queue = |(index, socket)| -> Box<dyn Queue + '_> {
            let slots = depth / busy + usize::from(index < depth % busy);
            Box::new(Connection::new(socket, slots, block))
        };
        Ok(self.sockets[..busy].iter().enumerate().map(queue).collect())
    }
}

/// A data connection: requests are sent together when replies are waited for.
struct Connection<'a> {
    socket: &'a Socket,
    buffers: Vec<Vec<u8>>,
    /// Whether there is a request in a slot, and that it is a write.
    running: Vec<Option<bool>>,
    out: Vec<u8>,
    /// What was received, and which of it is not used yet.
    input: Vec<u8>,
    unused: std::ops::Range<usize>,
}

impl<'a> Connection<'a> {
    fn new(socket: &'a Socket, slots: usize, block: usize) -> Self {
        let input = (slots * (HEADER + block)).clamp(64 << 10, INPUT_MAX.max(HEADER + block));
        Self {
            socket,
            buffers: vec![vec![0; block]; slots],
            running: vec![None; slots],
            out: Vec::new(),
            input: vec![0; input],
            unused: 0..0,
        }
    }

    /// The slot of the reply that was received as a whole, if one was.
    fn reply(&mut self) -> dbs_core::Result<Option<usize>> {
        let input = &self.input[self.unused.clone()];
        let Some((header, rest)) = input.split_at_checked(HEADER) else { return Ok(None) };
        let number = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let (slot, kind, length) = (number(2) as usize, number(6), number(22) as usize);
        let Some(data) = rest.get(..length) else { return Ok(None) };
        let wrong = |text: String| Err(Error::new(ErrorKind::Io, text));
        let Some(write) = self.running.get_mut(slot).and_then(Option::take) else {
            return wrong(format!("a reply to no request, of type {kind}"));
        };
        let wanted = if write { 0 } else { self.buffers[slot].len() };
        if kind != RESPONSE || length != wanted {
            let text = String::from_utf8_lossy(&data[..length.min(200)]).into_owned();
            return wrong(format!("a reply of type {kind}, {length} bytes: {text}"));
        }
        self.unused.start += HEADER + length;
        Ok(Some(slot))
    }
}

impl Queue for Connection<'_> {
    fn slots(&self) -> usize {
        self.running.len()
    }

    fn buffer(&mut self, slot: usize) -> dbs_core::Result<&mut [u8]> {
        Ok(&mut self.buffers[slot])
    }

    fn start(
        &mut self,
        slot: usize,
        action: Action,
        offset: u64,
        length: u32,
    ) -> dbs_core::Result<()> {
        let write = match action {
            Action::Read => false,
            Action::Write => true,
            Action::Flush => return Err(Error::unsupported("the protocol has no flush")),
        };
        let (kind, payload) = if write { (WRITE, length) } else { (READ, 0) };
        self.out.extend_from_slice(&MAGIC.to_le_bytes());
        self.out.extend_from_slice(&(slot as u32).to_le_bytes());
        self.out.extend_from_slice(&kind.to_le_bytes());
        self.out.extend_from_slice(&offset.to_le_bytes());
        self.out.extend_from_slice(&length.to_le_bytes());
        self.out.extend_from_slice(&payload.to_le_bytes());
        self.out.extend_from_slice(&self.buffers[slot][..payload as usize]);
        self.running[slot] = Some(write);
        Ok(())
    }

    fn finish(&mut self, done: &mut Vec<usize>) -> dbs_core::Result<()> {
        let failed = |error| Error::io(error, "a data connection");
        self.socket.send_all(&self.out).map_err(failed)?;
        self.out.clear();
        while done.is_empty() && self.running.iter().any(Option::is_some) {
            self.input.copy_within(self.unused.clone(), 0);
            self.unused = 0..self.unused.len();
            let mut socket = self.socket;
            let received = socket.read(&mut self.input[self.unused.end..]).map_err(failed)?;
            if received == 0 {
                return Err(Error::new(ErrorKind::Io, "a data connection was closed"));
            }
            self.unused.end += received;
            while let Some(slot) = self.reply()? {
                done.push(slot);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_frontend::Listen;
    use std::io::Write;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// Answers requests in pieces, until the client goes; how many of them there were.
    fn answer(listener: &UnixListener) -> u64 {
        let (mut socket, _) = listener.accept().unwrap();
        let (mut header, mut count) = ([0; HEADER], 0);
        while socket.read_exact(&mut header).is_ok() {
            count += 1;
            let length = u32::from_le_bytes(header[22..].try_into().unwrap()) as usize;
            socket.read_exact(&mut vec![0; length]).unwrap();
            let answered = if header[6] == 0 { 4096 } else { 0 };
            header[6..10].copy_from_slice(&RESPONSE.to_le_bytes());
            header[22..].copy_from_slice(&(answered as u32).to_le_bytes());
            let mut reply = header.to_vec();
            reply.resize(HEADER + answered, 7);
            for piece in reply.chunks(1000) {
                socket.write_all(piece).unwrap();
            }
        }
        count
    }

    #[test]
    fn each_request_is_answered_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        for write in [false, true] {
            let load = Load {
                write,
                block: 4096,
                sequential: false,
                connections: 2,
                depth: 7,
                span: 1 << 20,
                until: Until::Count(100),
            };
            thread::scope(|scope| {
                let servers = [0, 1].map(|_| scope.spawn(|| answer(&listener)));
                let figures = load.run(&Listen::Unix(path.clone()), || Ok(0.0)).unwrap();
                assert!(figures.iops > 0.0 && figures.p50_us <= figures.p99_us, "{figures:?}");
                let counts = servers.map(|server| server.join().unwrap());
                assert_eq!(counts.iter().sum::<u64>(), 100, "{counts:?}");
            });
        }
    }
}
