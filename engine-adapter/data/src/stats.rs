//! What data connections have done: counted by each reactor for itself, added up on demand.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the latency histogram's buckets; one more holds everything slower.
pub const LATENCY_BOUNDS: [Duration; 12] = [
    Duration::from_micros(50),
    Duration::from_micros(100),
    Duration::from_micros(250),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_micros(2500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(250),
    Duration::from_secs(1),
    Duration::from_secs(5),
];
const BUCKETS: usize = LATENCY_BOUNDS.len() + 1;

/// Kinds of requests, in the order of all counts by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Unmaps.
    Unmap,
    /// Pings.
    Ping,
    /// Flushes, which only DBS sends.
    Flush,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Read, Self::Write, Self::Unmap, Self::Ping, Self::Flush];

    /// Name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Unmap => "unmap",
            Self::Ping => "ping",
            Self::Flush => "flush",
        }
    }
}

/// What a reactor counts for one replica. Only that reactor writes it; it has cache lines of its
/// own.
#[derive(Default)]
#[repr(align(128))]
pub struct Counters {
    requests: [AtomicU64; 5],
    bytes: [AtomicU64; 5],
    errors: [AtomicU64; 5],
    latency: [AtomicU64; BUCKETS],
    latency_ns: AtomicU64,
    /// Connections so far.
    pub connections: AtomicU64,
    /// Connections now.
    pub connected: AtomicU64,
    /// Requests in flight now.
    pub in_flight: AtomicU64,
}

/// Adds without a locked instruction: there is one writer.
pub fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(count), Relaxed);
}

impl Counters {
    /// A request has been answered.
    pub fn answered(&self, kind: Kind, bytes: u64, ok: bool, took: Duration) {
        let at = kind as usize;
        add(&self.requests[at], 1);
        if ok {
            add(&self.bytes[at], bytes);
        } else {
            add(&self.errors[at], 1);
        }
        let bucket = LATENCY_BOUNDS.partition_point(|bound| took > *bound);
        add(&self.latency[bucket], 1);
        add(&self.latency_ns, u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// What data connections of a replica have done since it was started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataStats {
    /// Requests answered, by [`Kind`].
    pub requests: [u64; 5],
    /// Bytes read, written and freed, by [`Kind`].
    pub bytes: [u64; 5],
    /// Requests answered with an error, by [`Kind`].
    pub errors: [u64; 5],
    /// Requests that took no longer than each of [`LATENCY_BOUNDS`] and longer than the one before,
    /// and those slower than all; from reception to reply, to the accuracy of a reactor's turn.
    pub latency: [u64; BUCKETS],
    /// All of those times together.
    pub latency_sum: Duration,
    /// Connections ever made.
    pub connections: u64,
    /// Connections now.
    pub connected: u64,
    /// Requests now in flight.
    pub in_flight: u64,
}

impl DataStats {
    /// The count of one kind in an array of counts by kind.
    #[must_use]
    pub fn of(counts: &[u64; 5], kind: Kind) -> u64 {
        counts[kind as usize]
    }

    /// Adds what one reactor has counted.
    pub fn add(&mut self, counters: &Counters) {
        let sum = |to: &mut [u64], from: &[AtomicU64]| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from.load(Relaxed));
        };
        sum(&mut self.requests, &counters.requests);
        sum(&mut self.bytes, &counters.bytes);
        sum(&mut self.errors, &counters.errors);
        sum(&mut self.latency, &counters.latency);
        self.latency_sum += Duration::from_nanos(counters.latency_ns.load(Relaxed));
        self.connections += counters.connections.load(Relaxed);
        self.connected += counters.connected.load(Relaxed);
        self.in_flight += counters.in_flight.load(Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_by_kind_outcome_and_time() {
        let counters = Counters::default();
        counters.answered(Kind::Read, 4096, true, Duration::from_micros(50));
        counters.answered(Kind::Read, 4096, false, Duration::from_micros(51));
        counters.answered(Kind::Unmap, 1, true, Duration::from_secs(6));
        let mut stats = DataStats::default();
        stats.add(&counters);
        stats.add(&counters);
        assert_eq!(DataStats::of(&stats.requests, Kind::Read), 4);
        assert_eq!(DataStats::of(&stats.errors, Kind::Read), 2);
        assert_eq!(DataStats::of(&stats.bytes, Kind::Read), 8192);
        assert_eq!((stats.latency[0], stats.latency[1], stats.latency[12]), (2, 2, 2));
        assert!(stats.latency_sum > Duration::from_secs(12));
    }
}
