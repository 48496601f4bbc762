//! Connections to replicas of a simulation.

use crate::rules::ReplicaId;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Connections to a replica of a simulation.
#[derive(Debug, Clone)]
pub struct Backend {
    /// Their names: that at place `n` is one of the reactor `n % reactors`.
    pub links: Vec<u64>,
    /// It is told to flush.
    pub flushes: bool,
    /// Who is asked for others when they break, if there may be others.
    pub anew: Option<Anew>,
}

impl Backend {
    /// Deals the connections out to reactors.
    pub(super) fn shares(&self, reactors: usize) -> Vec<Vec<u64>> {
        let of = |index| self.links.iter().skip(index).step_by(reactors).copied().collect();
        (0..reactors).map(of).collect()
    }
}

/// Is asked for connections in place of those that broke.
#[derive(Clone)]
pub struct Anew(pub Arc<dyn Fn(Redial) + Send + Sync>);

impl fmt::Debug for Anew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Anew").finish_non_exhaustive()
    }
}

/// A reactor wants connections in place of those that broke.
pub struct Redial {
    /// To this one.
    pub replica: ReplicaId,
    /// For this reactor.
    pub lane: usize,
    /// Which attempt this is.
    pub epoch: u32,
    /// So many.
    pub count: usize,
    /// After so long.
    pub respite: Duration,
    pub(super) answer: Box<dyn FnOnce(Result<Vec<u64>, String>) + Send>,
}

impl Redial {
    /// They are there, under these names; or there will be none.
    pub fn answer(self, links: Result<Vec<u64>, String>) {
        (self.answer)(links);
    }
}

impl fmt::Debug for Redial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { replica, lane, epoch, count, respite, .. } = self;
        f.debug_struct("Redial")
            .field("replica", replica)
            .field("lane", lane)
            .field("epoch", epoch)
            .field("count", count)
            .field("respite", respite)
            .finish_non_exhaustive()
    }
}
