//! One connection in its transmission phase, as its reactor sees it: bytes into requests, replies
//! into batches, and the account of what is in flight.

use super::outgoing::Outgoing;
use super::session::{Admitted, Session};
use super::tls::TlsStream;
use super::wire::request::Request;
use super::wire::{Malformed, PAYLOAD_MAX_BYTES, cmd};
use dbs_reactor::{Buf, Buffers, Socket};
use std::io;
use std::sync::Arc;

/// Longest payload of a refused request that is skipped rather than taken for an attack.
const PAYLOAD_SKIP_MAX_BYTES: u64 = 2 * PAYLOAD_MAX_BYTES as u64;
/// A payload of which at least so much is missing is received straight into its buffer.
const FILL_MIN_BYTES: usize = 16 << 10;
/// Plaintext taken out of TLS at once.
const PLAINTEXT_BYTES: usize = 16 << 10;

/// What one connection may have in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub requests: usize,
    pub bytes: u64,
}

/// A connection.
pub(super) struct Peer {
    /// Its number in the server's registry.
    pub id: u64,
    pub socket: Socket,
    pub session: Arc<Session>,
    pub tls: Option<TlsStream>,
    pub out: Outgoing,
    input: Input,
    limits: Limits,
    in_flight: usize,
    in_flight_bytes: u64,
    /// Something is being received.
    pub receiving: bool,
    /// The client sends no more: what it sent is still to be taken.
    closed: bool,
    /// No more requests will be taken.
    pub ended: bool,
    /// Replies can no longer be sent.
    pub broken: bool,
}

/// What is known of the request being received.
#[derive(Default)]
struct Input {
    header: [u8; Request::EXTENDED_BYTES],
    header_bytes: usize,
    /// Admitted, but there is no room for it yet.
    waiting: Option<Admitted>,
    payload: Option<Incoming>,
    /// Bytes to drop before the next header.
    skip: u64,
    /// Received, but not looked at for want of room.
    backlog: Vec<u8>,
}

/// A payload on its way in.
struct Incoming {
    admitted: Admitted,
    buf: Buf,
    at: usize,
}

/// A request with its payload, ready to run; it counts as in flight.
pub(super) struct Ready {
    pub admitted: Admitted,
    pub payload: Option<Buf>,
}

/// What to receive next.
pub(super) enum Receive {
    /// Whatever comes.
    Any,
    /// The rest of a payload, from this byte of its buffer on.
    Payload(Buf, usize),
    /// Nothing for now.
    Nothing,
}

impl Peer {
    pub fn new(
        id: u64,
        socket: Socket,
        session: Session,
        tls: Option<TlsStream>,
        limits: Limits,
    ) -> Self {
        Self {
            id,
            socket,
            session: Arc::new(session),
            tls,
            out: Outgoing::default(),
            input: Input::default(),
            limits,
            in_flight: 0,
            in_flight_bytes: 0,
            receiving: false,
            closed: false,
            ended: false,
            broken: false,
        }
    }

    /// Takes bytes from the socket; `ready` gets the requests they complete.
    ///
    /// # Errors
    /// The client does not speak the protocol, or its TLS is broken.
    pub fn take(
        &mut self,
        bytes: &[u8],
        buffers: &Buffers,
        ready: &mut Vec<Ready>,
    ) -> io::Result<()> {
        let Some(mut tls) = self.tls.take() else { return self.plain(bytes, buffers, ready) };
        let result = self.decrypt(&mut tls, bytes, buffers, ready);
        self.tls = Some(tls);
        result
    }

    fn decrypt(
        &mut self,
        tls: &mut TlsStream,
        mut bytes: &[u8],
        buffers: &Buffers,
        ready: &mut Vec<Ready>,
    ) -> io::Result<()> {
        let mut plaintext = [0; PLAINTEXT_BYTES];
        loop {
            match tls.read(&mut plaintext)? {
                Some(0) => {
                    self.closed = true;
                    self.end_if_heard_out();
                    return Ok(());
                }
                Some(count) => self.plain(&plaintext[..count], buffers, ready)?,
                None if bytes.is_empty() => return Ok(()),
                None => bytes = &bytes[tls.open(bytes)?..],
            }
        }
    }

    /// Takes up what was left for want of room.
    ///
    /// # Errors
    /// As [`Peer::take`].
    pub fn resume(&mut self, buffers: &Buffers, ready: &mut Vec<Ready>) -> io::Result<()> {
        if self.input.backlog.is_empty() && self.input.waiting.is_none() {
            return Ok(());
        }
        self.plain(&[], buffers, ready)?;
        self.end_if_heard_out();
        Ok(())
    }

    /// Ends the input of a client that sends no more, once all of it is taken.
    fn end_if_heard_out(&mut self) {
        if self.closed && self.input.waiting.is_none() && self.input.backlog.is_empty() {
            self.end();
        }
    }

    fn plain(&mut self, bytes: &[u8], buffers: &Buffers, ready: &mut Vec<Ready>) -> io::Result<()> {
        if self.input.backlog.is_empty() {
            let used = self.parse(bytes, buffers, ready)?;
            self.input.backlog.extend_from_slice(&bytes[used..]);
            return Ok(());
        }
        let mut backlog = std::mem::take(&mut self.input.backlog);
        backlog.extend_from_slice(bytes);
        let used = self.parse(&backlog, buffers, ready)?;
        backlog.drain(..used);
        // An idle connection keeps no memory.
        self.input.backlog = if backlog.is_empty() { Vec::new() } else { backlog };
        Ok(())
    }

    /// Takes what it can use of `bytes`; returns how many those are.
    fn parse(
        &mut self,
        bytes: &[u8],
        buffers: &Buffers,
        ready: &mut Vec<Ready>,
    ) -> io::Result<usize> {
        let mut rest = bytes;
        while !self.ended {
            if let Some(admitted) = self.input.waiting.take() {
                if !self.reserve(admitted.cost_bytes) {
                    self.input.waiting = Some(admitted);
                    break;
                }
                self.accept(admitted, buffers, ready);
            } else if self.input.skip > 0 {
                let count = self.input.skip.min(rest.len() as u64);
                self.input.skip -= count;
                rest = &rest[count as usize..];
            } else if let Some(incoming) = &mut self.input.payload {
                let count = rest.len().min(incoming.buf.len() - incoming.at);
                incoming.buf[incoming.at..][..count].copy_from_slice(&rest[..count]);
                incoming.at += count;
                rest = &rest[count..];
                self.payload_received(ready);
            } else {
                rest = self.header(rest)?;
            }
            if rest.is_empty() && self.input.waiting.is_none() {
                break;
            }
        }
        Ok(if self.ended { bytes.len() } else { bytes.len() - rest.len() })
    }

    /// Takes bytes of a header; what is admitted waits for room.
    fn header<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Malformed> {
        let style = self.session.style();
        let input = &mut self.input;
        let count = bytes.len().min(style.request_bytes() - input.header_bytes);
        let (taken, rest) = bytes.split_at(count);
        input.header[input.header_bytes..][..count].copy_from_slice(taken);
        input.header_bytes += count;
        if input.header_bytes < style.request_bytes() {
            return Ok(rest);
        }
        input.header_bytes = 0;
        let request = Request::decode(style, &input.header[..style.request_bytes()])?;
        if request.command == cmd::DISC {
            self.ended = true;
            return Ok(rest);
        }
        let admitted = self.session.admit(&request);
        if admitted.skip_bytes > PAYLOAD_SKIP_MAX_BYTES {
            return Err(Malformed("payload of an absurd length"));
        }
        self.input.waiting = Some(admitted);
        Ok(rest)
    }

    fn accept(&mut self, admitted: Admitted, buffers: &Buffers, ready: &mut Vec<Ready>) {
        self.input.skip = admitted.skip_bytes;
        if admitted.payload_bytes == 0 {
            return ready.push(Ready { admitted, payload: None });
        }
        let buf = buffers.take(admitted.payload_bytes);
        self.input.payload = Some(Incoming { admitted, buf, at: 0 });
    }

    fn payload_received(&mut self, ready: &mut Vec<Ready>) {
        if let Some(Incoming { admitted, buf, .. }) =
            self.input.payload.take_if(|incoming| incoming.at == incoming.buf.len())
        {
            ready.push(Ready { admitted, payload: Some(buf) });
        }
    }

    /// What to receive now.
    pub fn wants(&mut self) -> Receive {
        let full = self.input.waiting.is_some() || !self.input.backlog.is_empty();
        if self.receiving || self.ended || full {
            return Receive::Nothing;
        }
        let long = |incoming: &&mut Incoming| incoming.buf.len() - incoming.at >= FILL_MIN_BYTES;
        match self.input.payload.as_mut().filter(long) {
            Some(incoming) if self.tls.is_none() => {
                let buf = std::mem::replace(&mut incoming.buf, Buf::empty());
                Receive::Payload(buf, incoming.at)
            }
            _ => Receive::Any,
        }
    }

    /// [`Receive::Payload`] is complete.
    pub fn payload_filled(&mut self, buf: Buf, ready: &mut Vec<Ready>) {
        if let Some(incoming) = &mut self.input.payload {
            incoming.at = buf.len();
            incoming.buf = buf;
        }
        self.payload_received(ready);
    }

    /// Takes no more requests. Half a write is no write.
    pub fn end(&mut self) {
        self.ended = true;
        if let Some(Incoming { admitted, .. }) = self.input.payload.take() {
            self.release(1, admitted.cost_bytes);
        }
        self.input.waiting = None;
        self.input.backlog = Vec::new();
    }

    /// Lets TLS announce the end of the stream behind the last reply.
    pub fn prepare_goodbye(&mut self) {
        let last = self.ended && self.in_flight == 0;
        if last && let Some(tls) = self.tls.as_mut() {
            tls.end();
        }
    }

    /// Whether nothing of this connection runs anywhere.
    pub fn is_over(&self) -> bool {
        self.ended && !self.receiving && self.in_flight == 0 && !self.out.is_busy()
    }

    /// Makes room for a request; one is always let in, however large.
    fn reserve(&mut self, bytes: u64) -> bool {
        let full = self.in_flight > 0
            && (self.in_flight >= self.limits.requests
                || self.in_flight_bytes + bytes > self.limits.bytes);
        if !full {
            self.in_flight += 1;
            self.in_flight_bytes += bytes;
        }
        !full
    }

    /// Requests have been answered, or need no answer any more.
    pub fn release(&mut self, requests: usize, bytes: u64) {
        self.in_flight -= requests;
        self.in_flight_bytes -= bytes;
    }
}
