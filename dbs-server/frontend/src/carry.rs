//! The seam between a frontend and what carries its requests out, both on one reactor.
//!
//! A [`Front`] owns its clients (sockets, queues of a device); a [`Carrier`] owns the way to the
//! data, such as connections to replicas. The reactor's handler owns both, passes each what happened
//! to its operations, by the bits of their tags, and the answers of one to the other.

use super::delayed::Fate;
use super::peers::Event;
use dbs_reactor::ublk::{UblkQueue, UblkRequest};
use dbs_reactor::{Buf, Io};
use std::any::Any;
use std::fmt;
use std::io;

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Reads; answered with [`Outcome::Data`].
    Read,
    /// Writes the payload, durably if so asked.
    Write {
        /// The answer means that it survives a loss of power (forced unit access).
        durable: bool,
    },
    /// Gives up the content of whole blocks in the range; what they read as is not said.
    Discard,
    /// Makes everything answered so far durable.
    Flush,
}

/// A request of a frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carry {
    /// What to do.
    pub action: Action,
    /// First byte; 0 for a flush.
    pub offset: u64,
    /// Bytes; for a write those of its payload, 0 for a flush.
    pub length: u32,
}

/// How a request has ended.
#[derive(Debug)]
pub enum Outcome {
    /// It is done, on so many bytes: those written, or those a discard has freed.
    Done(u32),
    /// What was read.
    Data(Buf),
    /// It failed.
    Failed(Failure),
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What a protocol makes an error number of.
    pub kind: FailureKind,
    /// The whole story.
    pub text: String,
}

/// Kinds of failure that a client can tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The range is not inside the volume, or the request asks for what cannot be.
    Invalid,
    /// There is no space left for it; reading goes on.
    NoSpace,
    /// Anything else.
    Io,
}

impl Failure {
    /// A failure of a kind with its text.
    #[must_use]
    pub fn new(kind: FailureKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What carries requests out.
pub trait Carrier {
    /// Size of the volume in bytes, which may change between any two calls.
    fn size(&self) -> u64;

    /// Starts a request, or keeps it until it can be started. It ends in exactly one
    /// [`Front::answered`] with this ticket, never before this returns. How many a front has
    /// in flight is its own to limit.
    fn carry(&mut self, io: &mut Io, request: Carry, payload: Option<Buf>, ticket: u64);
}

/// A frontend's part on one reactor.
pub trait Front {
    /// Something that the frontend's own threads have sent it.
    fn message(&mut self, io: &mut Io, carrier: &mut dyn Carrier, message: Box<dyn Any + Send>);

    /// Something has happened to the socket with this number in the lower half of its tag.
    fn input(&mut self, io: &mut Io, carrier: &mut dyn Carrier, number: u32, event: Event<'_>) {
        let _ = (io, carrier, number, event);
    }

    /// Whether this queue of a block device is one of this frontend's.
    fn has_queue(&self, queue: UblkQueue) -> bool {
        let _ = queue;
        false
    }

    /// See [`dbs_reactor::Handler::fetched`].
    fn fetched(
        &mut self,
        io: &mut Io,
        carrier: &mut dyn Carrier,
        queue: UblkQueue,
        tag: u16,
        request: io::Result<UblkRequest>,
    ) {
        let _ = (io, carrier, queue, tag, request);
    }

    /// See [`dbs_reactor::Handler::moved`].
    fn moved(
        &mut self,
        io: &mut Io,
        carrier: &mut dyn Carrier,
        tag: u64,
        buf: Buf,
        result: io::Result<()>,
    ) {
        let _ = (io, carrier, tag, buf, result);
    }

    /// See [`dbs_reactor::Handler::signalled`]; the number is the lower half of the tag.
    fn signalled(
        &mut self,
        io: &mut Io,
        carrier: &mut dyn Carrier,
        number: u32,
        result: io::Result<()>,
    ) {
        let _ = (io, carrier, number, result);
    }

    /// What is to become of the request with this ticket, which the limits of the volume delay.
    fn fate(&self, ticket: u64) -> Fate {
        let _ = ticket;
        Fate::Wait
    }

    /// A request that was carried out.
    fn answered(&mut self, io: &mut Io, ticket: u64, outcome: Outcome);

    /// The end of a turn: see [`dbs_reactor::Handler::turn`].
    fn turn(&mut self, io: &mut Io, carrier: &mut dyn Carrier);

    /// About once a second. The clock of the reactor is its handler's alone: [`Io::wake_at`] has no
    /// effect on it.
    fn tick(&mut self, io: &mut Io) {
        let _ = io;
    }

    /// Takes no more requests and ends when those in flight are answered, or as soon as it can
    /// without their replies.
    fn stop(&mut self, io: &mut Io, at_once: bool);

    /// Whether it has ended: nothing of it runs anywhere.
    fn is_over(&self) -> bool;
}
