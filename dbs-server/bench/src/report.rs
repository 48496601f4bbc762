//! What `dbs bench` reports: the JSON of `docs/json.md`.

use super::catalog::{Group, Operation, Pattern, Test};
use super::load::Outcome;
use serde::Serialize;
use std::time::Duration;

/// All of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of `dbs`.
    pub version: String,
    /// What was measured.
    pub target: Target,
    /// When it began, nanoseconds since 1970.
    pub started_ns: u64,
    /// How long each test was to take, in seconds.
    pub test_seconds: f64,
    /// Requests in flight, where a test does not say otherwise.
    pub depth: u32,
    /// Seed of offsets and contents.
    pub seed: u64,
    /// What to keep in mind when reading the figures.
    pub notes: Vec<String>,
    /// One for each test, in the order of the catalog.
    pub results: Vec<Measurement>,
}

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Target {
    /// What it is.
    pub kind: TargetKind,
    /// Path, volume or address.
    pub name: String,
    /// Bytes of it that requests went to.
    pub length: u64,
    /// How requests reached it: `io_uring`, `pread`, `nbd`.
    pub driver: String,
    /// Whose CPU time was taken, if anybody's.
    pub cpu_of: Option<CpuOf>,
}

/// Kinds of targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TargetKind {
    /// A temporary volume in a store.
    Store,
    /// A volume or snapshot that was there.
    Volume,
    /// An export of an NBD server.
    Nbd,
    /// A file or block device.
    Device,
}

/// Whose CPU time it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuOf {
    /// That of the server's process.
    Server,
    /// That of this process, in which store and load generator run together.
    Process,
}

/// What came of one test.
#[derive(Debug, Clone, Serialize)]
pub struct Measurement {
    /// The test.
    pub name: &'static str,
    /// What it is about.
    pub group: Group,
    /// Where its requests went.
    pub pattern: Pattern,
    /// What they did.
    pub operation: Operation,
    /// Bytes of each.
    pub block_size: u32,
    /// Requests in flight.
    pub depth: u32,
    /// Layers below the head and with it, for tests of that.
    pub chain_depth: Option<u32>,
    /// Why it did not run; then all below is absent.
    pub skipped: Option<String>,
    /// Requests done.
    pub requests: Option<u64>,
    /// Time they took together, in seconds.
    pub seconds: Option<f64>,
    /// Requests a second.
    pub iops: Option<f64>,
    /// Bytes a second.
    pub bandwidth: Option<f64>,
    /// How long one took; with its flush where it has one.
    pub latency: Option<Latency>,
    /// CPU time of the process named in the target, in seconds.
    pub cpu_seconds: Option<f64>,
}

/// Latencies in nanoseconds, to 1 %.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Latency {
    /// Mean.
    pub mean_ns: u64,
    /// Shortest.
    pub min_ns: u64,
    /// Median.
    pub p50_ns: u64,
    /// 90 % are not longer.
    pub p90_ns: u64,
    /// 99 % are not longer.
    pub p99_ns: u64,
    /// 99.9 % are not longer.
    pub p999_ns: u64,
    /// Longest.
    pub max_ns: u64,
}

impl Measurement {
    /// A test that did not run, and why.
    #[must_use]
    pub fn skipped(test: &Test, depth: u32, why: String) -> Self {
        Self {
            name: test.name,
            group: test.group,
            pattern: test.pattern,
            operation: test.operation,
            block_size: test.block,
            depth: test.depth(depth),
            chain_depth: test.chain_depth,
            skipped: Some(why),
            requests: None,
            seconds: None,
            iops: None,
            bandwidth: None,
            latency: None,
            cpu_seconds: None,
        }
    }

    /// A test that ran.
    #[must_use]
    pub fn of(test: &Test, depth: u32, outcome: &Outcome, cpu: Option<Duration>) -> Self {
        let latencies = &outcome.latencies;
        let seconds = outcome.took.as_secs_f64();
        // No time has passed only if nothing was done.
        let iops = latencies.count() as f64 / seconds.max(1e-9);
        Self {
            skipped: None,
            requests: Some(latencies.count()),
            seconds: Some(seconds),
            iops: Some(iops),
            bandwidth: Some(iops * f64::from(test.block)),
            latency: Some(Latency {
                mean_ns: latencies.mean_ns(),
                min_ns: latencies.min_ns(),
                p50_ns: latencies.percentile_ns(0.5),
                p90_ns: latencies.percentile_ns(0.9),
                p99_ns: latencies.percentile_ns(0.99),
                p999_ns: latencies.percentile_ns(0.999),
                max_ns: latencies.max_ns(),
            }),
            cpu_seconds: cpu.map(|cpu| cpu.as_secs_f64()),
            ..Self::skipped(test, depth, String::new())
        }
    }

    /// CPU seconds for 100,000 requests.
    #[must_use]
    pub fn cpu_per_100k(&self) -> Option<f64> {
        let (cpu, requests) = (self.cpu_seconds?, self.requests?);
        (requests > 0).then(|| cpu * 1e5 / requests as f64)
    }
}
