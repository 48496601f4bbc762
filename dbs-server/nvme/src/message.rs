//! What reactors are told, and what they know of a command under way.

use super::controller::Notice;
use super::queue::Queue;
use dbs_frontend::Report;
use std::os::fd::OwnedFd;

/// What other threads tell a reactor.
pub enum Message {
    /// Serve a queue.
    Adopt(Box<(OwnedFd, Queue)>),
    /// What a worker has done.
    Report(Report<Ticket>),
    /// What is to be done for a controller.
    Notice(Notice),
    /// All queues end when what is under way is answered.
    Stop,
    /// All queues end at once.
    Abort,
    /// All queues are gone: end.
    End,
}

impl From<Report<Ticket>> for Message {
    fn from(report: Report<Ticket>) -> Self {
        Self::Report(report)
    }
}

/// A command under way.
#[derive(Debug, Clone, Copy)]
pub struct Ticket {
    /// Its connection.
    pub peer: u32,
    /// Its number.
    pub command: u16,
    /// Bytes of the account of its connection.
    pub cost: u64,
    /// What kind it is.
    pub kind: Kind,
}

/// What is to be known of a command when it ends.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// It reads.
    Read,
    /// It writes; the bytes that the host was asked for.
    Write(usize),
    /// Anything else.
    Other,
    /// What is left of its ranges.
    Ranges(u32),
    /// The controller is shut down with it.
    Shutdown,
}
