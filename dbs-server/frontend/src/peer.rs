//! One connection, as its reactor sees it: bytes into requests, and the account of what is in
//! flight.

use super::outgoing::{Batches, Outgoing};
use super::tls::TlsStream;
use dbs_reactor::{Buf, Buffers, Socket};
use std::io;

/// Longest header of a request in bytes.
pub const HEADER_MAX_BYTES: usize = 76;
/// A payload of which at least so much is missing is received straight into its buffer.
const FILL_MIN_BYTES: usize = 16 << 10;
/// Plaintext taken out of TLS at once.
const PLAINTEXT_BYTES: usize = 16 << 10;

/// What one connection may have in flight.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests.
    pub requests: usize,
    /// Bytes of memory that they take.
    pub bytes: u64,
}

/// What a connection's messages look like, and its state in that regard.
pub trait Protocol {
    /// A request found valid, or known to be refused.
    type Request: Charge;

    /// Bytes of a request's header, at most [`HEADER_MAX_BYTES`].
    fn header_bytes(&self) -> usize;

    /// Bytes of the whole header, at most [`HEADER_MAX_BYTES`], where [`Protocol::header_bytes`] are but its start, which
    /// tells how long it is.
    ///
    /// # Errors
    /// As [`Protocol::request`].
    fn whole_header_bytes(&self, start: &[u8]) -> io::Result<usize> {
        Ok(start.len())
    }

    /// Makes a request of its header; `None` if the client takes its leave.
    ///
    /// # Errors
    /// The client does not speak the protocol, or asks for the absurd.
    fn request(&self, header: &[u8]) -> io::Result<Option<Self::Request>>;

    /// What is sent behind the last reply when the server ends the connection in good order.
    fn farewell(&self) -> &[u8] {
        &[]
    }

    /// No more requests are taken, though the client has not taken its leave; if the client is lost, it waits
    /// for no replies either. It may ask for the same again on another connection, and then for newer
    /// things, so that what nobody has begun should not be done any more.
    fn ended(&self, lost: bool) {
        let _ = lost;
    }

    /// No more requests are taken, and all that have come but so many are over and answered, or nobody waits for it.
    fn remaining(&mut self, requests: usize) {
        let _ = requests;
    }
}

/// What a request means for its connection.
pub trait Charge {
    /// Bytes of payload that it needs.
    fn payload_bytes(&self) -> usize;
    /// Bytes of payload to drop instead.
    fn skip_bytes(&self) -> u64;
    /// Bytes of memory it takes until its reply is sent.
    fn cost_bytes(&self) -> u64;
}

/// A connection.
pub(super) struct Peer<P: Protocol> {
    /// Dropped before the socket: who sees that closed may count on what it had open being closed, too.
    pub protocol: P,
    pub socket: Socket,
    /// In a place of its own: it is large, and most connections have none.
    pub tls: Option<Box<TlsStream>>,
    pub out: Outgoing,
    input: Input<P::Request>,
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
    /// The client has gone.
    pub lost: bool,
    /// A farewell is due behind the last reply.
    pub farewell: bool,
    /// Tick at which its handshake of TLS began, until that is over.
    pub stranger: Option<u32>,
}

/// What is known of the request being received.
struct Input<R> {
    header: [u8; HEADER_MAX_BYTES],
    header_bytes: usize,
    /// Admitted, but there is no room for it yet.
    waiting: Option<R>,
    payload: Option<Incoming<R>>,
    /// Bytes to drop before the next header.
    skip: u64,
    /// Received, but not looked at for want of room.
    backlog: Vec<u8>,
}

impl<R> Input<R> {
    /// Takes what is missing of the first `length` bytes of a header.
    #[inline]
    fn gather<'a>(&mut self, bytes: &'a [u8], length: usize) -> &'a [u8] {
        let count = bytes.len().min(length.saturating_sub(self.header_bytes));
        let (taken, rest) = bytes.split_at(count);
        self.header[self.header_bytes..][..count].copy_from_slice(taken);
        self.header_bytes += count;
        rest
    }
}

/// A payload on its way in.
struct Incoming<R> {
    request: R,
    buf: Buf,
    at: usize,
}

/// A request with its payload, ready to run; it counts as in flight.
pub struct Ready<R> {
    /// The request.
    pub request: R,
    /// Its payload, if it has one.
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

impl<P: Protocol> Peer<P> {
    pub fn new(socket: Socket, protocol: P, tls: Option<TlsStream>, limits: Limits) -> Self {
        let input = Input {
            header: [0; HEADER_MAX_BYTES],
            header_bytes: 0,
            waiting: None,
            payload: None,
            skip: 0,
            backlog: Vec::new(),
        };
        Self {
            socket,
            protocol,
            tls: tls.map(Box::new),
            out: Outgoing::default(),
            input,
            limits,
            in_flight: 0,
            in_flight_bytes: 0,
            receiving: false,
            closed: false,
            ended: false,
            broken: false,
            lost: false,
            farewell: false,
            stranger: None,
        }
    }

    /// Whether it is still not known who this is; `false` from then on.
    pub fn is_stranger(&mut self) -> bool {
        if self.tls.as_ref().is_none_or(|tls| !tls.is_handshaking()) {
            self.stranger = None;
        }
        self.stranger.is_some()
    }

    /// Takes bytes from the socket; `ready` gets the requests they complete.
    ///
    /// # Errors
    /// The client does not speak the protocol, or its TLS is broken.
    pub fn take(
        &mut self,
        bytes: &[u8],
        buffers: &Buffers,
        ready: &mut Vec<Ready<P::Request>>,
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
        ready: &mut Vec<Ready<P::Request>>,
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
    pub fn resume(
        &mut self,
        buffers: &Buffers,
        ready: &mut Vec<Ready<P::Request>>,
    ) -> io::Result<()> {
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

    fn plain(
        &mut self,
        bytes: &[u8],
        buffers: &Buffers,
        ready: &mut Vec<Ready<P::Request>>,
    ) -> io::Result<()> {
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
        ready: &mut Vec<Ready<P::Request>>,
    ) -> io::Result<usize> {
        let mut rest = bytes;
        while !self.ended {
            if let Some(request) = self.input.waiting.take() {
                if !self.reserve(request.cost_bytes()) {
                    self.input.waiting = Some(request);
                    break;
                }
                self.accept(request, buffers, ready);
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
    fn header<'a>(&mut self, bytes: &'a [u8]) -> io::Result<&'a [u8]> {
        let start = self.protocol.header_bytes();
        let input = &mut self.input;
        let mut rest = input.gather(bytes, start);
        if input.header_bytes < start {
            return Ok(rest);
        }
        let length = self.protocol.whole_header_bytes(&input.header[..start])?;
        if length > start {
            rest = input.gather(rest, length);
            if input.header_bytes < length {
                return Ok(rest);
            }
        }
        input.header_bytes = 0;
        match self.protocol.request(&input.header[..length])? {
            None => self.ended = true,
            request => input.waiting = request,
        }
        Ok(rest)
    }

    fn accept(
        &mut self,
        request: P::Request,
        buffers: &Buffers,
        ready: &mut Vec<Ready<P::Request>>,
    ) {
        self.input.skip = request.skip_bytes();
        let length = request.payload_bytes();
        if length == 0 {
            return ready.push(Ready { request, payload: None });
        }
        self.input.payload = Some(Incoming { request, buf: buffers.take(length), at: 0 });
    }

    fn payload_received(&mut self, ready: &mut Vec<Ready<P::Request>>) {
        if let Some(Incoming { request, buf, .. }) =
            self.input.payload.take_if(|incoming| incoming.at == incoming.buf.len())
        {
            ready.push(Ready { request, payload: Some(buf) });
        }
    }

    /// What to receive now.
    pub fn wants(&mut self) -> Receive {
        let full = self.input.waiting.is_some() || !self.input.backlog.is_empty();
        if self.receiving || self.ended || full {
            return Receive::Nothing;
        }
        let long = |incoming: &&mut Incoming<P::Request>| {
            incoming.buf.len() - incoming.at >= FILL_MIN_BYTES
        };
        match self.input.payload.as_mut().filter(long) {
            Some(incoming) if self.tls.is_none() => {
                let buf = std::mem::replace(&mut incoming.buf, Buf::empty());
                Receive::Payload(buf, incoming.at)
            }
            _ => Receive::Any,
        }
    }

    /// Whether nothing is received until requests have been answered.
    pub fn is_full(&self) -> bool {
        !self.receiving && !self.ended && self.input.waiting.is_some()
    }

    /// [`Receive::Payload`] is complete.
    pub fn payload_filled(&mut self, buf: Buf, ready: &mut Vec<Ready<P::Request>>) {
        if let Some(incoming) = &mut self.input.payload {
            incoming.at = buf.len();
            incoming.buf = buf;
        }
        self.payload_received(ready);
    }

    /// The client is gone without having taken its leave.
    pub fn lose(&mut self) {
        // An end that the server has begun is not the client's.
        if !self.ended {
            self.lost = true;
            self.protocol.ended(true);
        }
        self.end();
    }

    /// Takes no more requests. Half a write is no write.
    pub fn end(&mut self) {
        self.ended = true;
        self.protocol.ended(self.broken);
        if let Some(Incoming { request, .. }) = self.input.payload.take() {
            self.release(1, request.cost_bytes());
        }
        self.input.waiting = None;
        self.input.backlog = Vec::new();
    }

    /// Behind the last reply: a farewell if one is due, and the end of the stream of TLS.
    #[inline]
    pub fn prepare_goodbye(&mut self, batches: &mut Batches) {
        if !self.ended || self.in_flight > 0 {
            return;
        }
        if std::mem::take(&mut self.farewell) && !self.protocol.farewell().is_empty() {
            self.out.message(batches).push(self.protocol.farewell());
        }
        if let Some(tls) = self.tls.as_mut() {
            tls.end();
        }
    }

    /// Whether nothing of this connection runs anywhere.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.remaining() == Some(0)
    }

    /// How many requests still run of one that has ended, once nothing else of it does.
    #[inline]
    pub fn remaining(&self) -> Option<usize> {
        (self.ended && !self.receiving && !self.out.is_busy()).then_some(self.in_flight)
    }

    /// Makes room for a request; one is always let in, however large.
    #[inline]
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
    #[inline]
    pub fn release(&mut self, requests: usize, bytes: u64) {
        self.in_flight -= requests;
        self.in_flight_bytes -= bytes;
    }
}
