//! What a path has done: counted by each reactor for itself, added up on demand.

use crate::rules::{Mode, ReplicaId};
use dbs_frontend::{Action, Latency, Times};
use longhorn_data::stats::add;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Kinds of requests, in the order of all counts by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Discards.
    Unmap,
    /// Flushes.
    Flush,
}

impl PathKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Unmap, Self::Flush];

    /// Name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Unmap => "unmap",
            Self::Flush => "flush",
        }
    }

    pub(super) fn of(action: Action) -> Self {
        match action {
            Action::Read => Self::Read,
            Action::Write { .. } => Self::Write,
            Action::Discard => Self::Unmap,
            Action::Flush => Self::Flush,
        }
    }
}

/// What one reactor counts; only that one writes it.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Counters {
    requests: [AtomicU64; 4],
    bytes: [AtomicU64; 4],
    errors: [AtomicU64; 4],
    nanos: [AtomicU64; 4],
    /// How long reads and writes took.
    latency: [Latency; 2],
    /// Reads that another replica was asked for again.
    pub retries: AtomicU64,
    /// Writes that were made one of whole blocks.
    pub widened: AtomicU64,
    /// Requests that have not been answered.
    pub in_flight: AtomicU64,
}

impl Counters {
    /// A request has been answered; `bytes` if it succeeded.
    #[inline]
    pub fn answered(&self, action: Action, bytes: Option<u32>, took: Duration) {
        let at = PathKind::of(action) as usize;
        add(&self.requests[at], 1);
        match bytes {
            Some(bytes) => add(&self.bytes[at], u64::from(bytes)),
            None => add(&self.errors[at], 1),
        }
        add(&self.nanos[at], u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        // Reads and writes are the first two kinds.
        if let Some(latency) = self.latency.get(at) {
            latency.count(took);
        }
    }
}

/// A replica of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaStats {
    /// Its number.
    pub id: ReplicaId,
    /// Its name, as error texts have it.
    pub name: String,
    /// Its mode.
    pub mode: Mode,
    /// Whether it is told to flush.
    pub flushes: bool,
    /// Why it became [`Mode::Err`].
    pub why: Option<String>,
    /// Requests that met data in it which is not what was written.
    pub mismatches: u64,
    /// Blocks of it that were healed from another replica.
    pub healed: u64,
    /// How often connections to it broke, and were made anew.
    pub reconnected: u64,
}

/// What a path has done since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathStats {
    /// Requests answered, by [`PathKind`].
    pub requests: [u64; 4],
    /// Bytes read, written and freed, by [`PathKind`].
    pub bytes: [u64; 4],
    /// Requests answered with an error, by [`PathKind`].
    pub errors: [u64; 4],
    /// Time that requests took, all together, by [`PathKind`].
    pub time: [Duration; 4],
    /// How long reads took, and writes, to an eighth.
    pub latency: [Times; 2],
    /// Reads that another replica was asked for again.
    pub retries: u64,
    /// Unaligned writes that were widened for a replica being rebuilt.
    pub widened: u64,
    /// Requests that have not been answered.
    pub in_flight: u64,
    /// The replicas.
    pub replicas: Vec<ReplicaStats>,
}

impl PathStats {
    pub(super) fn add(&mut self, counters: &Counters) {
        let sum = |to: &mut [u64], from: &[AtomicU64]| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from.load(Relaxed));
        };
        sum(&mut self.requests, &counters.requests);
        sum(&mut self.bytes, &counters.bytes);
        sum(&mut self.errors, &counters.errors);
        for (to, from) in self.time.iter_mut().zip(&counters.nanos) {
            *to += Duration::from_nanos(from.load(Relaxed));
        }
        for (to, from) in self.latency.iter_mut().zip(&counters.latency) {
            to.add(&from.get());
        }
        self.retries += counters.retries.load(Relaxed);
        self.widened += counters.widened.load(Relaxed);
        self.in_flight += counters.in_flight.load(Relaxed);
    }
}
