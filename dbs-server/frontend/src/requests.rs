//! Requests of one reactor for disks: the seam between a frontend on queues or connections and what carries its requests
//! out.
//!
//! A frontend hands each request over with a ticket, and is given the ticket back with the answer. Volumes of a store of
//! this process are read and written right here (`stored.rs`); the requests for any other volume go to a
//! [`Carrier`](super::Carrier) on the same reactor (`carried.rs`), which [`Hosted`](super::Hosted) sees to.

use super::carried::Carried;
use super::carry::{Carry, Outcome};
use super::delayed::Fate;
use super::demand::{Answer, Demand, User};
use super::pool::Pool;
use super::stored::{Deliver, Report, Stored};
use dbs_core::Store;
use dbs_reactor::{Buf, Io};
use std::io;
use std::sync::Arc;

/// The requests of a reactor, each under a ticket by which its owner knows it again.
pub struct Requests<T>(By<T>);

/// What carries them out.
enum By<T> {
    Store(Box<Stored<T>>),
    Carrier(Carried<T>),
}

impl<T: Copy + Send + 'static> Requests<T> {
    /// Those of the reactor behind `io`, for volumes of a store: `deliver` sends reports to the reactor, and `pool` does
    /// what may block.
    pub fn new(io: &mut Io, store: &Store, pool: Arc<Pool>, deliver: Deliver<T>) -> Self {
        Self(By::Store(Box::new(Stored::new(io, store, pool, deliver))))
    }

    /// Those of a reactor that has a [`Carrier`](super::Carrier).
    #[must_use]
    pub fn carried() -> Self {
        Self(By::Carrier(Carried::default()))
    }

    /// Starts a request in the best way there is for it, when the limits of its volume let it in. It ends as
    /// [`Requests::ended`] tells.
    pub fn start(
        &mut self,
        io: &mut Io,
        user: &Arc<User>,
        request: T,
        demand: Demand,
        range: (u64, u64),
    ) {
        match &mut self.0 {
            By::Store(stored) => stored.start(io, user, request, demand, range),
            By::Carrier(carried) => carried.start(user, request, demand, range),
        }
    }

    /// What [`dbs_reactor::Handler::reminded`] tells.
    pub fn reminded(&mut self, io: &mut Io) {
        if let By::Store(stored) = &mut self.0 {
            stored.reminded(io);
        }
    }

    /// After [`User::ends_delays`]: sees to what the limits of its volume have delayed. A carrier looks by itself.
    pub fn let_go(&mut self, io: &mut Io) {
        if let By::Store(stored) = &mut self.0 {
            stored.let_go(io);
        }
    }

    /// Takes what another thread has told.
    pub fn report(&mut self, io: &mut Io, report: Report<T>) {
        if let By::Store(stored) = &mut self.0 {
            stored.report(io, report);
        }
    }

    /// What [`dbs_reactor::Handler::moved`] tells of tags below 2^32 that are no others'.
    pub fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        if let By::Store(stored) = &mut self.0 {
            stored.moved(io, tag, buf, result);
        }
    }

    /// What [`dbs_reactor::Handler::synced`] tells.
    pub fn synced(&mut self, io: &mut Io, result: io::Result<()>) {
        if let By::Store(stored) = &mut self.0 {
            stored.synced(io, result);
        }
    }

    /// A request that has ended, as long as there is one: to be asked after each of the other methods.
    pub fn ended(&mut self) -> Option<(T, Answer)> {
        match &mut self.0 {
            By::Store(stored) => stored.ended(),
            By::Carrier(carried) => carried.ended(),
        }
    }

    /// What the carrier is to carry out next, and its number.
    pub(super) fn next_carry(&mut self, io: &Io) -> Option<(Carry, Option<Buf>, u64)> {
        match &mut self.0 {
            By::Store(_) => None,
            By::Carrier(carried) => carried.next(io.buffers()),
        }
    }

    /// Whether there is such a thing.
    pub(super) fn has_due(&self) -> bool {
        matches!(&self.0, By::Carrier(carried) if carried.has_due())
    }

    /// What the carrier was given under this number has ended.
    pub(super) fn carried_out(&mut self, number: u64, outcome: Outcome) {
        if let By::Carrier(carried) = &mut self.0 {
            carried.answered(number, outcome);
        }
    }

    /// What is to become of it while the limits of the volume delay it.
    pub(super) fn fate(&self, number: u64) -> Fate {
        match &self.0 {
            By::Store(_) => Fate::Go,
            By::Carrier(carried) => carried.fate(number),
        }
    }
}
