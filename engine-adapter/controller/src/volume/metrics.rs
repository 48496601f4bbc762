//! What went through a volume within the last full second, and how many replicas it lost.

use super::Controller;
use crate::path::{JournalEntry, PathKind, PathStats};
use longhorn_wire::proto::controller::Metrics;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What a replica became `ERR` for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// What the data path saw of it: requests, pings, connections.
    Data,
    /// It was not fit at the volume's start.
    Start,
    /// It lacks a snapshot.
    Snapshot,
    /// It did not go back to a snapshot.
    Revert,
    /// It did not grow.
    Expansion,
    /// It was not complete at the end of its rebuild.
    Rebuild,
    /// It did not take a setting.
    Setting,
    /// Somebody asked for it.
    Request,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Data,
        Self::Start,
        Self::Snapshot,
        Self::Revert,
        Self::Expansion,
        Self::Rebuild,
        Self::Setting,
        Self::Request,
    ];

    /// Name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Start => "start",
            Self::Snapshot => "snapshot",
            Self::Revert => "revert",
            Self::Expansion => "expansion",
            Self::Rebuild => "rebuild",
            Self::Setting => "setting",
            Self::Request => "request",
        }
    }
}

/// How many replicas became `ERR`.
#[derive(Debug, Default)]
pub(super) struct Faults([AtomicU64; Fault::ALL.len()]);

impl Faults {
    pub fn count(&self, fault: Fault) {
        self.0[fault as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Turns what a data path has done, looked at once a second, into rates.
#[derive(Debug, Default)]
pub(super) struct LastSecond {
    before: PathStats,
    rates: Metrics,
}

impl LastSecond {
    /// A second has passed since the last call.
    fn tick(&mut self, now: PathStats) {
        let before = std::mem::replace(&mut self.before, now);
        // A path that began anew counts from 0.
        let since = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let [read, write] = [PathKind::Read, PathKind::Write].map(|kind| {
            let (at, now) = (kind as usize, &self.before);
            let count = since(now.requests[at], before.requests[at]);
            let took = since(nanos(now.time[at]), nanos(before.time[at]));
            (since(now.bytes[at], before.bytes[at]), took.checked_div(count).unwrap_or(0), count)
        });
        self.rates = Metrics {
            read_throughput: read.0,
            write_throughput: write.0,
            read_latency: read.1,
            write_latency: write.1,
            read_iops: read.2,
            write_iops: write.2,
        };
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Controller {
    /// How many replicas became `ERR`, by what for.
    #[must_use]
    pub fn faults(&self) -> [(Fault, u64); Fault::ALL.len()] {
        Fault::ALL.map(|fault| (fault, self.faults.0[fault as usize].load(Ordering::Relaxed)))
    }

    /// To be called once a second.
    pub fn tick(&self) {
        let stats = self.stats();
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner).tick(stats);
    }

    /// What went through it within the last full second.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner).rates
    }

    /// What its data path has done.
    #[must_use]
    pub fn stats(&self) -> PathStats {
        self.parts.path.stats()
    }

    /// The last requests to replicas, at most so many, or all if 0.
    #[must_use]
    pub fn journal(&self, limit: i64) -> Vec<JournalEntry> {
        self.parts.path.journal(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_what_came_since_the_last_second() {
        let mut second = LastSecond::default();
        let stats = |n: u64| PathStats {
            requests: [n, 2 * n, 7, 7],
            bytes: [n * 4096, n * 8192, 7, 7],
            time: [n * 100, n * 500, 7, 7].map(Duration::from_nanos),
            ..PathStats::default()
        };
        second.tick(stats(10));
        second.tick(stats(30));
        let rates = second.rates;
        assert_eq!((rates.read_iops, rates.write_iops), (20, 40));
        assert_eq!((rates.read_throughput, rates.write_throughput), (20 * 4096, 20 * 8192));
        assert_eq!((rates.read_latency, rates.write_latency), (100, 250));
        second.tick(stats(30));
        assert_eq!(second.rates, Metrics::default());
        second.tick(stats(5));
        assert_eq!(second.rates.read_iops, 5);
    }
}
