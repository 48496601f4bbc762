//! A replica as one reactor sees it.

use super::local::LocalReplica;
use super::replica::Replica;
use crate::rules::heal::Trust;
use crate::rules::timeout::{PING_INTERVAL, Silence};
use longhorn_wire::transport::DataLink;
use std::sync::Arc;
use std::time::Duration;

/// From one time that connections are made to the next, at least: some may break as soon as they are there.
pub(super) const RESPITE: Duration = Duration::from_millis(100);

/// A reactor's share of the access to a replica.
pub(super) enum Access {
    /// These connections.
    Links(Vec<DataLink>),
    /// These connections of a simulation.
    #[cfg(feature = "sabotage")]
    Simulated(Vec<u64>),
    /// It is in this process.
    Local(LocalReplica),
    /// There is nothing.
    Null,
}

/// How a replica is reached.
pub(super) enum Way {
    /// Over these connections: what a turn of the reactor has to say goes over one of them, so that it
    /// costs one send here and one reception there; the next turn takes the next.
    Links { numbers: Vec<u32>, next: usize, turn: u64 },
    /// In this process, under this number of the runner.
    Local(u32),
    /// Not at all: everything succeeds at once, and reads as zeros.
    Null,
}

impl Way {
    /// Over connections that begin, with what was received on each.
    pub fn over(begun: &[(u32, Vec<u8>)]) -> Self {
        Self::Links { numbers: begun.iter().map(|(number, _)| *number).collect(), next: 0, turn: 0 }
    }
}

/// A replica.
pub(super) struct Backend {
    pub replica: Arc<Replica>,
    pub way: Way,
    pub silence: Silence,
    /// Nothing goes to it, and nothing that comes from it counts.
    pub lost: bool,
    /// How often its connections were made anew.
    pub epoch: u32,
    /// Its connections broke, and until then there may be others.
    pub away: Option<Duration>,
    /// Until when that was, the last time.
    pub away_until: Duration,
    /// Since when there are the present connections, or were the last ones.
    pub since: Duration,
    /// From then to the next ones, at least.
    pub respite: Duration,
    /// It has answered something on them.
    pub heard: bool,
    /// Number of the ping that was sent and not answered.
    pub pinged: Option<u32>,
    /// When it was sent.
    pub ping_asked: Duration,
    /// When the next one is due.
    pub ping_due: Duration,
    /// The number of its name in the journal.
    pub target: u16,
    /// Whether it is worth healing.
    pub trust: Trust,
}

impl Backend {
    pub fn new(replica: Arc<Replica>, way: Way, now: Duration, target: u16) -> Self {
        Self {
            replica,
            way,
            silence: Silence::default(),
            lost: false,
            epoch: 0,
            away: None,
            away_until: now,
            since: now,
            respite: RESPITE,
            // Before there is any other connection, it has answered a hello and calls.
            heard: true,
            pinged: None,
            ping_asked: now,
            ping_due: now + PING_INTERVAL,
            target,
            trust: Trust::default(),
        }
    }

    /// The connection to use in this turn, by the number of the turn.
    #[inline]
    pub fn link(&mut self, now: u64) -> Option<u32> {
        let Way::Links { numbers, next, turn } = &mut self.way else { return None };
        if *turn != now {
            *turn = now;
            *next = if *next + 1 < numbers.len() { *next + 1 } else { 0 };
        }
        numbers.get(*next).copied()
    }
}
