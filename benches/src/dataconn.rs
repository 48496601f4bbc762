//! A closed loop of requests over Longhorn's data connections: the same client for every replica and
//! every engine.

use crate::Outcome;
use dbs_frontend::{Listen, Socket};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::Serialize;
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a message's header, and what it begins with.
const HEADER: usize = 26;
const MAGIC: u16 = 0x1b01;
/// Kinds of messages.
const READ: u32 = 0;
const WRITE: u32 = 1;
const RESPONSE: u32 = 2;
/// Seconds that a connection may say nothing.
const SILENCE: i64 = 60;

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
    /// After so many requests on all connections.
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

/// Requests done by one connection.
struct Done {
    count: u64,
    times: Vec<u32>,
}

impl Load {
    /// Runs it against who listens there; `cpu` tells the server's CPU time so far, in seconds.
    ///
    /// # Errors
    /// If a connection fails or a request is refused.
    pub fn run(&self, address: &Listen, cpu: impl Fn() -> Outcome<f64>) -> Outcome<Figures> {
        let busy = self.connections.min(self.depth);
        let sockets = (0..self.connections)
            .map(|_| {
                let socket = address.connect()?;
                socket.tune()?;
                setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(SILENCE))?;
                Ok(socket)
            })
            .collect::<Outcome<Vec<_>>>()?;
        let stop = AtomicBool::new(false);
        let (begun, cpu_before) = (Instant::now(), cpu()?);
        let done = thread::scope(|scope| {
            let workers: Vec<_> = (0..busy)
                .zip(&sockets)
                .map(|(index, socket)| {
                    let depth = self.depth / busy + usize::from(index < self.depth % busy);
                    let stop = &stop;
                    scope.spawn(move || self.connection(socket, index, busy, depth, stop))
                })
                .collect();
            if let Until::Time(time) = self.until {
                let slept = crate::process::sleep(time);
                stop.store(true, Ordering::Relaxed);
                slept?;
            }
            let join = |worker: thread::ScopedJoinHandle<'_, Outcome<Done>>| {
                worker.join().map_err(|_| "a connection's thread panicked")?
            };
            workers.into_iter().map(join).collect::<Outcome<Vec<_>>>()
        })?;
        let (seconds, cpu) = (begun.elapsed().as_secs_f64(), cpu()? - cpu_before);
        let count: u64 = done.iter().map(|d| d.count).sum();
        let mut times: Vec<_> = done.into_iter().flat_map(|d| d.times).collect();
        times.sort_unstable();
        let at = |share: f64| {
            let index = (times.len() as f64 * share) as usize;
            f64::from(times.get(index.min(times.len().saturating_sub(1))).copied().unwrap_or(0))
        };
        Ok(Figures {
            iops: count as f64 / seconds,
            mb_per_s: count as f64 * self.block as f64 / seconds / 1e6,
            p50_us: at(0.5),
            p99_us: at(0.99),
            cpu_per_million: cpu / count.max(1) as f64 * 1e6,
        })
    }

    fn connection(
        &self,
        mut socket: &Socket,
        index: usize,
        connections: usize,
        depth: usize,
        stop: &AtomicBool,
    ) -> Outcome<Done> {
        let mut at = Offsets::new(self, index, connections);
        let share = match self.until {
            Until::Count(all) => all / connections as u64,
            Until::Time(_) => u64::MAX,
        };
        let payload = payload(self.block);
        let mut out = Vec::new();
        let mut input = vec![0; (depth * (HEADER + self.block)).clamp(64 << 10, 4 << 20)];
        let (mut start, mut end) = (0, 0);
        let mut begun = vec![Instant::now(); depth];
        let mut done = Done { count: 0, times: Vec::new() };
        let (mut sent, mut running) = (0, depth.min(usize::try_from(share).unwrap_or(depth)));
        for slot in 0..running {
            self.request(&mut out, slot, at.next(), &payload);
            sent += 1;
        }
        while running > 0 {
            socket.send_all(&out)?;
            out.clear();
            input.copy_within(start..end, 0);
            (start, end) = (0, end - start);
            let received = socket.read(&mut input[end..])?;
            if received == 0 {
                return Err("a data connection was closed".into());
            }
            end += received;
            let now = Instant::now();
            while let Some((slot, length)) = self.reply(&input[start..end])? {
                start += length;
                done.count += 1;
                let begun = begun.get_mut(slot).ok_or("a reply to no request")?;
                done.times.push(now.duration_since(*begun).as_micros() as u32);
                if sent < share && !stop.load(Ordering::Relaxed) {
                    *begun = now;
                    self.request(&mut out, slot, at.next(), &payload);
                    sent += 1;
                } else {
                    running -= 1;
                }
            }
        }
        Ok(done)
    }

    fn request(&self, out: &mut Vec<u8>, slot: usize, offset: u64, payload: &[u8]) {
        let kind = if self.write { WRITE } else { READ };
        let length = if self.write { payload.len() as u32 } else { 0 };
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&(slot as u32).to_le_bytes());
        out.extend_from_slice(&kind.to_le_bytes());
        out.extend_from_slice(&offset.to_le_bytes());
        out.extend_from_slice(&(self.block as u32).to_le_bytes());
        out.extend_from_slice(&length.to_le_bytes());
        if self.write {
            out.extend_from_slice(payload);
        }
    }

    /// The slot of the reply at the start of `input`, and its length, if it is there as a whole.
    fn reply(&self, input: &[u8]) -> Outcome<Option<(usize, usize)>> {
        let Some((header, rest)) = input.split_at_checked(HEADER) else { return Ok(None) };
        let number = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let (kind, length) = (number(6), number(22) as usize);
        let Some(data) = rest.get(..length) else { return Ok(None) };
        let wanted = if self.write { 0 } else { self.block };
        if kind != RESPONSE || length != wanted {
            let text = String::from_utf8_lossy(&data[..length.min(200)]).into_owned();
            return Err(format!("a reply of type {kind}, {length} bytes: {text}").into());
        }
        Ok(Some((number(2) as usize, HEADER + length)))
    }
}

/// Where requests go.
struct Offsets {
    random: fastrand::Rng,
    sequential: bool,
    next: u64,
    step: u64,
    blocks: u64,
    block: u64,
}

impl Offsets {
    fn new(load: &Load, index: usize, connections: usize) -> Self {
        let block = load.block as u64;
        Self {
            random: fastrand::Rng::with_seed(load.span ^ index as u64),
            sequential: load.sequential,
            next: index as u64,
            step: connections as u64,
            blocks: load.span / block,
            block,
        }
    }

    fn next(&mut self) -> u64 {
        if !self.sequential {
            return self.random.u64(..self.blocks) * self.block;
        }
        let at = self.next % self.blocks;
        self.next += self.step;
        at * self.block
    }
}

/// Bytes that no layer below can guess to be zeros or equal.
fn payload(block: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(7);
    std::iter::repeat_with(|| random.u8(..)).take(block).collect()
}
