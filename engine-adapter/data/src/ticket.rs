//! A request in flight, as its end needs it.

use super::request::Request;
use std::time::Instant;

/// What it takes to end a request.
pub struct Ticket<T> {
    pub(super) whose: T,
    pub(super) opened: u32,
    pub(super) request: Request,
    pub(super) begun: Instant,
    /// Whether the next commit counts it, see [`Revision::note_written`](super::gate::Revision::note_written).
    pub(super) noted: bool,
}

impl<T> Ticket<T> {
    pub(super) fn opened(&self) -> u32 {
        self.opened
    }
}
