//! A connection without a socket: its bytes are given, not received. For fuzzing.

use super::peer::{Charge, Limits, Peer, Protocol, Ready, Receive};
use dbs_reactor::{Buffers, Socket};
use std::io;

/// What a reactor does with the input of one connection, step by step as it does it.
pub struct Offline<P: Protocol> {
    peer: Peer<P>,
    buffers: Buffers,
    ready: Vec<Ready<P::Request>>,
}

impl<P: Protocol> Offline<P> {
    /// A connection at its start.
    ///
    /// # Errors
    /// No memory for its buffers.
    pub fn new(protocol: P, limits: Limits) -> io::Result<Self> {
        let peer = Peer::new(Socket::nowhere(), protocol, None, limits);
        Ok(Self { peer, buffers: Buffers::new(0)?, ready: Vec::new() })
    }

    /// Takes some of `bytes`, at most `most` of them unless it waits for a payload, and returns what is
    /// left; `None` if it takes nothing now, as there is no room or it has ended.
    ///
    /// # Errors
    /// The peer does not speak the protocol.
    pub fn receive<'a>(&mut self, bytes: &'a [u8], most: usize) -> io::Result<Option<&'a [u8]>> {
        match self.peer.wants() {
            Receive::Nothing => Ok(None),
            Receive::Any => {
                let (now, later) = bytes.split_at(most.max(1).min(bytes.len()));
                self.peer.take(now, &self.buffers, &mut self.ready)?;
                Ok(Some(later))
            }
            Receive::Payload(mut buf, start) => {
                let wanted = buf.len() - start;
                let Some((now, later)) = bytes.split_at_checked(wanted) else {
                    // The connection ended before all of it had come.
                    self.peer.end();
                    return Ok(None);
                };
                buf[start..].copy_from_slice(now);
                self.peer.payload_filled(buf, &mut self.ready);
                Ok(Some(later))
            }
        }
    }

    /// The requests that are complete, in order.
    pub fn ready(&mut self) -> Vec<Ready<P::Request>> {
        std::mem::take(&mut self.ready)
    }

    /// A request has been answered; takes up what was left for want of room.
    ///
    /// # Errors
    /// The peer does not speak the protocol.
    pub fn answered(&mut self, request: &P::Request) -> io::Result<()> {
        self.peer.release(1, request.cost_bytes());
        self.peer.resume(&self.buffers, &mut self.ready)
    }

    /// Whether it has ended and nothing of it is in flight.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.peer.is_over()
    }

    /// Whether no more requests are taken.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.peer.ended
    }

    /// The client sends no more.
    pub fn end(&mut self) {
        self.peer.end();
    }
}
