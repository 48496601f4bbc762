//! What all threads of a server know of a client.

use super::export::Peer;
use super::session::{Due, Kind, Operation, Session};
use dbs_core::units::VolumeId;
use dbs_core::volume::Volume;
use dbs_frontend::{Counted, Counts, Fate, Latency};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Its requests are carried out.
const SERVED: u8 = 0;
/// The server ends the connection; what is short is still answered.
const ENDING: u8 = 1;
/// It is gone, and waits for no reply.
const LOST: u8 = 2;

/// A client.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Who it is.
    pub peer: Peer,
    /// When it connected, since the Unix epoch.
    since: Duration,
    /// The export it uses, once it has chosen one.
    export: OnceLock<Used>,
    end: AtomicU8,
    counts: Counts,
    answers: Answers,
}

/// What a client uses.
#[derive(Debug)]
struct Used {
    name: String,
    read_only: bool,
    /// The volume behind the name, if there is one.
    volume: Option<VolumeId>,
}

/// What a client was answered, counted by its reactor alone.
#[derive(Debug, Default)]
struct Answers {
    all: AtomicU64,
    reads: Latency,
    writes: Latency,
}

/// A connected client, and what it has asked for since it connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientInfo {
    /// Its number, which no other client of the server has had.
    pub id: u64,
    /// Where it comes from: `tcp:ADDRESS`, or `unix:` and the socket it used.
    pub peer: String,
    /// The same for people, with its process.
    pub who: String,
    /// The export it uses; `None` during its handshake.
    pub export: Option<String>,
    /// Whether it may only read.
    pub read_only: bool,
    /// When it connected, nanoseconds since the Unix epoch.
    pub since_ns: u64,
    /// Reads.
    pub reads: u64,
    /// Bytes of these.
    pub read_bytes: u64,
    /// Writes, and ranges made zero.
    pub writes: u64,
    /// Bytes of these.
    pub written_bytes: u64,
    /// Other requests.
    pub others: u64,
    /// Requests that are not answered yet.
    pub in_flight: u64,
    /// How long reads took, from when the server had the request until it had the reply: ends of ranges in
    /// nanoseconds, and how many took less than that and no less than the range before.
    pub read_latency: Vec<(u64, u64)>,
    /// The same of writes.
    pub write_latency: Vec<(u64, u64)>,
}

impl Known {
    pub fn new(peer: Peer) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { peer, since, ..Self::default() }
    }

    /// It uses the export of this session from now on.
    pub fn uses(&self, session: &Session) {
        self.export.get_or_init(|| Used {
            name: session.name(),
            read_only: session.read_only(),
            volume: session.volume().map(Volume::id),
        });
    }

    /// Whether both may write the same.
    pub fn writes_what(&self, other: &Self) -> bool {
        match (self.export.get(), other.export.get()) {
            (Some(one), Some(two)) if !one.read_only && !two.read_only => {
                match (one.volume, two.volume) {
                    (Some(one), Some(two)) => one == two,
                    _ => one.name == two.name,
                }
            }
            _ => false,
        }
    }

    /// Whether it is gone, or is to go.
    pub fn has_ended(&self) -> bool {
        self.end.load(Relaxed) != SERVED
    }

    /// Its connection is to end.
    pub fn ends(&self, lost: bool) {
        self.end.fetch_max(if lost { LOST } else { ENDING }, Relaxed);
    }

    /// Whether a request of it is to be dropped: one that takes long, or none can be answered.
    pub fn drops(&self, long: bool) -> bool {
        match self.end.load(Relaxed) {
            SERVED => false,
            ENDING => long,
            _ => true,
        }
    }

    /// What is to become of a request of it that the limits of the volume delay.
    pub fn fate(&self) -> Fate {
        match self.end.load(Relaxed) {
            SERVED => Fate::Wait,
            ENDING => Fate::Go,
            _ => Fate::Drop,
        }
    }

    /// Counts a request, with the length of its payload; on the thread of the client's reactor.
    #[inline]
    pub fn count(&self, operation: Option<Operation>, payload: usize) {
        let counts = &self.counts;
        match operation {
            Some(Operation::Read { length, .. }) => counts.read(length),
            Some(Operation::Write { .. }) => counts.write(payload as u64),
            Some(Operation::Zero { length, .. }) => counts.write(length),
            _ => counts.other(),
        }
    }

    /// Counts a reply; on the thread of the client's reactor.
    #[inline]
    pub fn answered(&self, due: Due, now: Instant) {
        let Answers { all, reads, writes } = &self.answers;
        all.store(all.load(Relaxed).wrapping_add(1), Relaxed);
        match (due.kind, due.begun) {
            (Kind::Read, Some(begun)) => reads.count(now.duration_since(begun)),
            (Kind::Write, Some(begun)) => writes.count(now.duration_since(begun)),
            _ => {}
        }
    }

    pub fn info(&self) -> ClientInfo {
        // Before what it is taken from.
        let answered = self.answers.all.load(Relaxed);
        let export = self.export.get();
        let Counted { reads, read_bytes, writes, written_bytes, others } = self.counts.get();
        ClientInfo {
            id: self.peer.id,
            peer: self.peer.address.clone(),
            who: self.peer.to_string(),
            export: export.map(|used| used.name.clone()),
            read_only: export.is_some_and(|used| used.read_only),
            since_ns: u64::try_from(self.since.as_nanos()).unwrap_or(u64::MAX),
            reads,
            read_bytes,
            writes,
            written_bytes,
            others,
            in_flight: (reads + writes + others).saturating_sub(answered),
            read_latency: self.answers.reads.get(),
            write_latency: self.answers.writes.get(),
        }
    }
}
