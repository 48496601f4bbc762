//! Requests as they come in, and the bytes of their replies.

use super::lanes::{Change, Ticket};
use super::stats::Kind;
use dbs_core::{Error, ErrorKind};
use dbs_frontend::{Charge, Protocol};
use dbs_reactor::{Batch, Buf};
use longhorn_wire::frame::{Damaged, HEADER_BYTES, Header, Hello, PAYLOAD_MAX_BYTES, Type};
use std::io;

/// Longest payload of a ping that is looked at.
const PING_PAYLOAD_MAX_BYTES: u32 = 128;

/// A connection.
pub struct Connection {
    /// Number of its replica on this reactor.
    pub slot: u32,
    /// The session of the replica that it was accepted in.
    pub session: u64,
    /// Who it is, for the log.
    pub peer: String,
    /// It knows what to make of [`Type::Damaged`].
    pub heals: bool,
    /// What it belongs to, if it is one that is made anew when it breaks.
    pub lane: Option<Ticket>,
    /// Flushes that have not been answered.
    pub flushes: usize,
    farewell: [u8; HEADER_BYTES],
}

impl Connection {
    /// A connection to the replica with this number on its reactor.
    #[must_use]
    pub fn new(slot: u32, session: u64, peer: String) -> Self {
        let farewell = Header::new(Type::Close, 0, 0, 0).encode();
        Self { slot, session, peer, heals: false, lane: None, flushes: 0, farewell }
    }
}

impl Protocol for Connection {
    type Request = Request;

    fn header_bytes(&self) -> usize {
        HEADER_BYTES
    }

    fn request(&self, header: &[u8]) -> io::Result<Option<Request>> {
        let header = Header::decode(header)?;
        // Nobody but who was told knows of it.
        let unknown = match header.kind() {
            Some(Type::Heal) => !self.heals,
            Some(Type::WriteAgain | Type::UnmapAgain) => self.lane.is_none(),
            _ => false,
        };
        let number = if unknown { u32::MAX } else { header.number };
        Ok(Some(Request::new(&Header { number, ..header })))
    }

    fn farewell(&self) -> &[u8] {
        &self.farewell
    }

    /// A flush changes nothing: it may run on beside newer connections, on which it is asked for again.
    fn remaining(&mut self, requests: usize) {
        if requests == self.flushes {
            self.lane = None;
        }
    }
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Bytes of the volume.
    Read,
    /// To change bytes.
    Write,
    /// To discard bytes.
    Unmap,
    /// Whether the replica is well.
    Ping,
    /// To make what was written durable.
    Flush,
    /// To write a damaged block again.
    Heal,
    /// Nothing that a server knows: it is skipped, and there is no reply.
    Unknown,
}

/// A request.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// What it asks for.
    pub op: Op,
    sequence: u32,
    /// As the client said it, to be echoed.
    offset: i64,
    /// Bytes to read, write or unmap.
    pub size: u32,
    payload: u32,
    skip: u32,
    /// It was sent on a connection that broke, and may have been done.
    pub again: bool,
}

impl Request {
    /// The request that a header announces.
    #[must_use]
    pub fn new(header: &Header) -> Self {
        let Header { sequence, offset, size, length, .. } = *header;
        let (op, size, payload) = match header.kind() {
            Some(Type::Read) => (Op::Read, size, 0),
            // What is written is what came.
            Some(Type::Write | Type::WriteAgain) => (Op::Write, length, length),
            Some(Type::Unmap | Type::UnmapAgain) => (Op::Unmap, size, 0),
            Some(Type::Ping) if length <= PING_PAYLOAD_MAX_BYTES => (Op::Ping, 0, length),
            Some(Type::Ping) => (Op::Ping, 0, 0),
            Some(Type::Flush) => (Op::Flush, 0, 0),
            Some(Type::Heal) => (Op::Heal, length, length),
            _ => (Op::Unknown, 0, 0),
        };
        let again = matches!(header.kind(), Some(Type::WriteAgain | Type::UnmapAgain));
        Self { op, sequence, offset, size, payload, skip: length - payload, again }
    }

    /// One that came over no connection, with its payload beside it.
    #[must_use]
    pub fn local(op: Op, sequence: u32, offset: u64, size: u32) -> Self {
        // Inside a volume, whose size is an `i64` on the wire as well.
        Self { op, sequence, offset: offset as i64, size, payload: 0, skip: 0, again: false }
    }

    /// The number that its reply has, too.
    pub fn sequence(&self) -> u32 {
        self.sequence
    }

    /// The offset that its reply repeats, as it was given.
    pub fn offset(&self) -> i64 {
        self.offset
    }

    /// Its range if that is one: neither negative nor more than can be answered.
    pub fn range(&self) -> Result<(u64, u64), String> {
        let Ok(offset) = u64::try_from(self.offset) else {
            return Err(format!("offset {} is negative", self.offset));
        };
        if self.op == Op::Read && self.size > PAYLOAD_MAX_BYTES {
            return Err(format!(
                "a read of {} bytes; at most {PAYLOAD_MAX_BYTES} can be answered",
                self.size
            ));
        }
        Ok((offset, u64::from(self.size)))
    }

    /// How it is counted.
    pub fn kind(&self) -> Option<Kind> {
        Some(match self.op {
            Op::Read => Kind::Read,
            Op::Write => Kind::Write,
            Op::Unmap => Kind::Unmap,
            Op::Ping => Kind::Ping,
            Op::Flush => Kind::Flush,
            // The store counts what came of it.
            Op::Heal | Op::Unknown => return None,
        })
    }

    /// What it changes, if it does.
    pub(crate) fn change(&self) -> Option<Change> {
        let Self { op, sequence, offset, size, .. } = *self;
        self.changes().then_some(Change { sequence, unmap: op == Op::Unmap, offset, size })
    }

    /// Whether it changes the volume.
    pub fn changes(&self) -> bool {
        matches!(self.op, Op::Write | Op::Unmap)
    }

    /// The reply that it succeeded, about so many bytes.
    pub fn reply_done(&self, batch: &mut Batch, size: u32) {
        batch.push(&Header::new(Type::Response, self.sequence, self.offset, size).encode());
    }

    /// The reply with what was read.
    pub fn reply_data(&self, batch: &mut Batch, data: Buf) {
        batch.push(&self.head(Type::Response, data.len()));
        batch.push_buf(data);
    }

    /// The reply with bytes that are copied.
    pub fn reply_bytes(&self, batch: &mut Batch, data: &[u8]) {
        batch.push(&self.head(Type::Response, data.len()));
        batch.push(data);
    }

    /// The reply of one side of DBS to the other's greeting.
    pub fn reply_hello(&self, batch: &mut Batch, hello: Hello) {
        self.reply_bytes(batch, &hello.encode());
    }

    /// The reply that it failed for damage, to one who knows what to make of it.
    pub fn reply_damaged(&self, batch: &mut Batch, damaged: &Damaged) {
        let bytes = damaged.encode();
        batch.push(&self.head(Type::Damaged, bytes.len()));
        batch.push(&bytes);
    }

    /// The reply that it failed.
    pub fn reply_error(&self, batch: &mut Batch, text: &str) {
        batch.push(&self.head(Type::Error, text.len()));
        batch.push(text.as_bytes());
    }

    /// The reply of a controller that there is no space: never one of a replica.
    pub fn reply_no_space(&self, batch: &mut Batch, text: &str) {
        batch.push(&self.head(Type::NoSpace, text.len()));
        batch.push(text.as_bytes());
    }

    fn head(&self, kind: Type, length: usize) -> [u8; HEADER_BYTES] {
        Header::with_payload(kind, self.sequence, self.offset, length as u32).encode()
    }
}

impl Charge for Request {
    fn payload_bytes(&self) -> usize {
        self.payload as usize
    }

    fn skip_bytes(&self) -> u64 {
        u64::from(self.skip)
    }

    fn cost_bytes(&self) -> u64 {
        match self.op {
            // What is too much is refused, which takes no memory.
            Op::Read if self.size <= PAYLOAD_MAX_BYTES => u64::from(self.size),
            _ => u64::from(self.payload),
        }
    }
}

/// The text for a store's error, `size` being the volume's.
pub fn error_text(request: &Request, size: u64, error: &Error) -> String {
    match error.kind() {
        ErrorKind::NoSpace => longhorn_wire::frame::no_space(error.to_string()),
        ErrorKind::Invalid => match beyond_end(request, size) {
            Some(text) => text,
            None => error.to_string(),
        },
        _ => error.to_string(),
    }
}

/// What to say of a range that is not inside a volume of this size.
pub fn beyond_end(request: &Request, size: u64) -> Option<String> {
    let (offset, length) = request.range().ok()?;
    if offset.checked_add(length).is_some_and(|end| end <= size) {
        return None;
    }
    Some(match request.op {
        Op::Read => longhorn_wire::frame::UNEXPECTED_EOF_TEXT.to_owned(),
        op => {
            let what = if op == Op::Write { "write" } else { "unmap" };
            format!("{what} of {length} bytes at {offset} is beyond the end of the volume, {size}")
        }
    })
}
