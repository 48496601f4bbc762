//! Replicas in this process: a request goes from a shard to the store and back on the shard's own
//! reactor, without a socket and without a copy of what is written. What would have to wait goes to the
//! replica's workers. All of that is the data server's way of doing it
//! ([`longhorn_data`]'s runner); here it is asked, and its outcomes become replies like any other's.

use super::link::Ask;
use crate::rules::Slot;
use dbs_frontend::Pool;
use dbs_reactor::{Io, Payload, SharedBuf};
use longhorn_data::Gate;
use longhorn_data::request::{Op, Request};
use longhorn_data::runner::{Ended, Runner, Told};
use longhorn_wire::frame::{Hello, Type};
use std::fmt;
use std::io;
use std::sync::Arc;

/// A replica in this process: what its requests may do, and workers of its own, so that one that hangs
/// keeps no other from anything.
#[derive(Clone)]
pub struct LocalReplica {
    gate: Arc<Gate>,
    pool: Arc<Workers>,
}

/// Ends with the last handle of the replica.
struct Workers(Arc<Pool>);

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl LocalReplica {
    /// The replica behind a gate, with so many workers.
    ///
    /// # Errors
    /// There are no threads to be had.
    pub fn new(gate: Arc<Gate>, workers: usize) -> io::Result<Self> {
        let pool = Arc::new(Pool::start("local-worker", workers.max(1))?);
        Ok(Self { gate, pool: Arc::new(Workers(pool)) })
    }

    /// What the replica says of itself.
    #[must_use]
    pub fn hello(&self) -> Hello {
        self.gate.hello()
    }
}

impl fmt::Debug for LocalReplica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalReplica").field("gate", &self.gate).finish_non_exhaustive()
    }
}

/// Which replica was asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asker {
    pub slot: Slot,
    /// Of the replica: a slot is used again.
    pub serial: u64,
}

/// The replicas of this process that a shard asks.
pub(super) struct Locals {
    pub(super) runner: Runner<Asker>,
    /// Handles of them, by their names in the runner: workers are there as long as requests are.
    kept: Vec<(u64, LocalReplica)>,
    /// Reused.
    pub(super) ended: Vec<Ended<Asker>>,
}

impl Locals {
    /// None so far. What is told of their requests, on whatever thread, goes to `tell`.
    pub fn new(tell: Arc<dyn Fn(Told<Asker>) + Send + Sync>) -> Self {
        Self { runner: Runner::new(tell), kept: Vec::new(), ended: Vec::new() }
    }

    /// Takes a replica in; its number.
    pub fn take(&mut self, serial: u64, local: &LocalReplica) -> u32 {
        self.kept.push((serial, local.clone()));
        self.runner.insert(serial, Arc::clone(&local.gate), Arc::clone(&local.pool.0))
    }

    /// Lets go of a replica. Its requests in flight end in nothing.
    pub fn let_go(&mut self, io: &mut Io, number: u32) {
        self.runner.let_go(io, number);
    }

    /// Asks a replica for something. Its reply never comes before this returns.
    pub fn ask(
        &mut self,
        io: &mut Io,
        (number, asker): (u32, Asker),
        ask: Ask,
        sequence: u32,
        payload: Option<SharedBuf>,
    ) {
        let op = match ask.kind {
            Type::Read => Op::Read,
            Type::Write => Op::Write,
            Type::Unmap => Op::Unmap,
            Type::Flush => Op::Flush,
            Type::Heal => Op::Heal,
            // Nothing else is asked.
            _ => Op::Ping,
        };
        let request = Request::local(op, sequence, ask.offset, ask.length);
        self.runner.start(io, number, request, payload.map(Payload::from), asker);
    }

    /// Whether there are replies that nobody has looked at.
    pub fn has_replies(&self) -> bool {
        !self.runner.ended.is_empty()
    }

    /// Whether nothing is left of any replica.
    pub fn is_empty(&self) -> bool {
        self.runner.is_empty()
    }

    /// The end of a turn.
    pub fn turn(&mut self) {
        self.runner.turn();
        for gone in self.runner.gone.drain(..) {
            self.kept.retain(|(serial, _)| *serial != gone);
        }
    }

    /// About once a second: what was written is committed in the background.
    pub fn tick(&mut self) {
        if std::mem::take(&mut self.runner.written) {
            self.runner.commit_due();
        }
    }
}
