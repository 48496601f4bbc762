//! What went through a volume within the last full second, and how many replicas it lost.

use super::{Controller, Totals};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// Rates over the last full second, as `MetricsGet` has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Metrics {
    /// Bytes read.
    pub read_throughput: u64,
    /// Bytes written.
    pub write_throughput: u64,
    /// Mean nanoseconds of a read.
    pub read_latency: u64,
    /// Mean nanoseconds of a write.
    pub write_latency: u64,
    /// Reads.
    pub read_iops: u64,
    /// Writes.
    pub write_iops: u64,
}

/// Turns totals, looked at once a second, into rates.
#[derive(Debug, Clone, Copy, Default)]
pub struct LastSecond {
    before: Totals,
    rates: Metrics,
}

impl LastSecond {
    /// A second has passed since the last call.
    pub fn tick(&mut self, now: Totals) {
        let before = std::mem::replace(&mut self.before, now);
        // A path that began anew counts from 0.
        let since = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let reads = since(now.reads, before.reads);
        let writes = since(now.writes, before.writes);
        let mean = |sum: u64, count: u64| sum.checked_div(count).unwrap_or(0);
        self.rates = Metrics {
            read_throughput: since(now.read_bytes, before.read_bytes),
            write_throughput: since(now.written_bytes, before.written_bytes),
            read_latency: mean(since(now.read_ns, before.read_ns), reads),
            write_latency: mean(since(now.write_ns, before.write_ns), writes),
            read_iops: reads,
            write_iops: writes,
        };
    }

    /// The rates of the last full second.
    #[must_use]
    pub const fn rates(&self) -> Metrics {
        self.rates
    }
}

impl Controller {
    /// How many replicas became `ERR`, by what for.
    #[must_use]
    pub fn faults(&self) -> [(Fault, u64); Fault::ALL.len()] {
        Fault::ALL.map(|fault| (fault, self.faults.0[fault as usize].load(Ordering::Relaxed)))
    }

    /// To be called once a second.
    pub fn tick(&self) {
        let totals = self.parts.path.totals();
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner).tick(totals);
    }

    /// What went through it within the last full second.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner).rates()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_what_came_since_the_last_second() {
        let mut second = LastSecond::default();
        let totals = |n: u64| Totals {
            reads: n,
            read_bytes: n * 4096,
            read_ns: n * 100,
            writes: 2 * n,
            written_bytes: n * 8192,
            write_ns: n * 500,
        };
        second.tick(totals(10));
        second.tick(totals(30));
        let rates = second.rates();
        assert_eq!((rates.read_iops, rates.write_iops), (20, 40));
        assert_eq!((rates.read_throughput, rates.write_throughput), (20 * 4096, 20 * 8192));
        assert_eq!((rates.read_latency, rates.write_latency), (100, 250));
        second.tick(totals(30));
        assert_eq!(second.rates(), Metrics::default());
        second.tick(totals(5));
        assert_eq!(second.rates().read_iops, 5);
    }
}
