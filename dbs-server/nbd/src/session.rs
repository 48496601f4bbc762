//! One connection's transmission phase without threads or sockets: which requests are allowed,
//! what they do to the export, and the bytes of the reply.

use super::export::{Export, Failure, Result, ZeroOptions};
use super::wire::reply::{FLAG_DONE, Head, ReplyTo};
use super::wire::request::{Request, Style};
use super::wire::{CONTEXTS_MAX, Cursor, Errno, cmd, cmd_flag, flag};
use dbs_core::Volume;
use dbs_reactor::Batch;
use std::sync::Arc;
use std::time::Instant;

/// Reads of at least this many bytes look for holes first.
pub(super) const SPARSE_READ_BYTES: u64 = 64 << 10;
/// Most extents of one context in a reply.
pub(super) const EXTENTS_MAX: usize = 8192;
/// Longest payload of `BLOCK_STATUS`: a length and the ids of contexts.
const STATUS_PAYLOAD_MAX_BYTES: u64 = 8 + 4 * CONTEXTS_MAX as u64;

/// What a connection has agreed on.
#[derive(Clone)]
pub struct Session {
    pub(super) export: Arc<dyn Export>,
    size: u64,
    read_only: bool,
    style: Style,
    pub(super) contexts: Vec<String>,
}

/// Bytes of a range of zeros at most that the limits of a volume are charged with: everybody who uses the volume waits
/// until it is paid for.
const LIMITED_ZEROES_BYTES: u64 = 32 << 20;

/// A request found valid, or the reason why it is not.
#[derive(Debug, Clone)]
pub struct Admitted {
    pub(super) to: ReplyTo,
    pub(super) operation: Result<Operation>,
    /// Bytes of payload to read and hand to [`Session::run`].
    pub payload_bytes: usize,
    /// Bytes of payload to read and drop instead.
    pub skip_bytes: u64,
    /// Bytes of memory the request takes until its reply is sent.
    pub cost_bytes: u64,
    /// When the server had all of it.
    pub(super) begun: Option<Instant>,
}

/// What is to be known of a request when it is answered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    /// Bytes of memory that it takes.
    pub cost: u64,
    pub kind: Kind,
    pub begun: Option<Instant>,
}

/// Requests whose latency is counted, and others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Other,
}

/// What a valid request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Read {
        offset: u64,
        length: u64,
        whole: bool,
    },
    Write {
        offset: u64,
        fua: bool,
    },
    Trim {
        offset: u64,
        length: u64,
        fua: bool,
    },
    Zero {
        offset: u64,
        length: u64,
        options: ZeroOptions,
    },
    Flush,
    Cache {
        offset: u64,
        length: u64,
    },
    Status {
        offset: u64,
        length: u64,
        one: bool,
    },
    /// The length and the contexts wanted are in the payload.
    StatusOf {
        offset: u64,
        one: bool,
    },
}

/// A request that a reactor carries out itself, on the volume of the export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direct {
    Read {
        offset: u64,
        length: usize,
        /// Holes are worth telling.
        sparse: bool,
    },
    Write {
        offset: u64,
        fua: bool,
    },
    Flush,
}

impl Admitted {
    /// What the request does, if it is valid.
    pub(super) fn operation(&self) -> Option<Operation> {
        self.operation.as_ref().ok().copied()
    }

    /// The bytes that it transfers, if it is one of those that a volume may limit.
    pub(super) fn limited_bytes(&self) -> Option<u64> {
        match *self.operation.as_ref().ok()? {
            Operation::Read { length, .. } => Some(length),
            Operation::Write { .. } => Some(self.payload_bytes as u64),
            Operation::Zero { length, options, .. } if options.no_hole && !options.fast => {
                Some(length.min(LIMITED_ZEROES_BYTES))
            }
            Operation::Trim { .. } | Operation::Zero { .. } | Operation::Cache { .. } => Some(0),
            Operation::Flush | Operation::Status { .. } | Operation::StatusOf { .. } => None,
        }
    }

    /// The request, if a reactor can do it without a worker.
    pub(super) fn direct(&self) -> Option<Direct> {
        match *self.operation.as_ref().ok()? {
            Operation::Read { offset, length, whole } if length > 0 => {
                let sparse = !whole && self.to.style.chunked() && length >= SPARSE_READ_BYTES;
                Some(Direct::Read { offset, length: usize::try_from(length).ok()?, sparse })
            }
            Operation::Write { offset, fua } => Some(Direct::Write { offset, fua }),
            Operation::Flush => Some(Direct::Flush),
            _ => None,
        }
    }

    /// What its answer needs of it.
    pub(super) fn due(&self) -> Due {
        let kind = match self.operation {
            Ok(Operation::Read { .. }) => Kind::Read,
            Ok(Operation::Write { .. }) => Kind::Write,
            _ => Kind::Other,
        };
        Due { cost: self.cost_bytes, kind, begun: self.begun }
    }

    /// The reply that the request is done.
    pub(super) fn done(&self) -> Head {
        self.to.done()
    }

    /// What precedes the data of a read.
    pub(super) fn data_head(&self, length: usize) -> Head {
        self.to.data_head(FLAG_DONE, self.to.offset, length)
    }

    /// The reply that all of a read is zeros.
    pub(super) fn hole_reply(&self, length: usize) -> Head {
        self.to.hole(FLAG_DONE, self.to.offset, length as u32)
    }
}

/// A reply: pieces to send one after the other.
#[derive(Debug, Default)]
pub struct Reply {
    /// The pieces.
    pub parts: Vec<Vec<u8>>,
}

impl Session {
    /// A session on `export`; the id of a context is its index in `contexts`, as [`Export::select`]
    /// calls them.
    #[must_use]
    pub fn new(export: Arc<dyn Export>, style: Style, contexts: Vec<String>) -> Self {
        let (size, read_only) = (export.size(), export.read_only());
        Self { export, size, read_only, style, contexts }
    }

    /// The headers in use.
    #[must_use]
    pub fn style(&self) -> Style {
        self.style
    }

    /// The volume to read and write, if the export is one.
    pub(super) fn volume(&self) -> Option<&Volume> {
        self.export.volume()
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Size in bytes when the session began.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Name of the export.
    #[must_use]
    pub fn name(&self) -> String {
        self.export.name()
    }

    /// What the client is told that it may use.
    #[must_use]
    pub fn transmission_flags(&self) -> u16 {
        let mut flags = flag::HAS_FLAGS
            | flag::SEND_FLUSH
            | flag::SEND_FUA
            | flag::CAN_MULTI_CONN
            | flag::SEND_CACHE;
        flags |= if self.read_only {
            flag::READ_ONLY
        } else {
            flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO
        };
        if self.style.chunked() {
            flags |= flag::SEND_DF;
        }
        if self.style == Style::Extended && !self.contexts.is_empty() {
            flags |= flag::BLOCK_STATUS_PAYLOAD;
        }
        flags
    }

    /// Validates a request: the one place where range, flags, alignment and permission are checked.
    #[must_use]
    pub fn admit(&self, request: &Request) -> Admitted {
        let to = ReplyTo { style: self.style, cookie: request.cookie, offset: request.offset };
        let payload = request.payload_bytes(self.style);
        let operation = self.operation(request, payload);
        let keep = if operation.is_ok() { payload } else { 0 };
        let cost = match &operation {
            Ok(Operation::Read { length, .. }) => *length,
            Ok(Operation::Status { .. } | Operation::StatusOf { .. }) => {
                (EXTENTS_MAX * 16 * self.contexts.len()) as u64
            }
            _ => keep,
        };
        Admitted {
            to,
            operation,
            payload_bytes: keep as usize,
            skip_bytes: payload - keep,
            cost_bytes: cost,
            begun: None,
        }
    }

    /// Makes everything durable that was done so far, and the reply that the request is.
    pub(super) fn commit(&self, admitted: &Admitted) -> Reply {
        match self.export.flush() {
            Ok(()) => Reply { parts: vec![admitted.to.done().to_vec()] },
            Err(failure) => Reply::refused(admitted, &failure),
        }
    }

    fn operation(&self, request: &Request, payload: u64) -> Result<Operation> {
        let Request { offset, length, flags, command, .. } = *request;
        self.check_flags(request)?;
        let fua = flags & cmd_flag::FUA != 0;
        let one = flags & cmd_flag::REQ_ONE != 0;
        if matches!(command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES) && self.read_only {
            return Err(Failure::new(Errno::Perm, "the export is read-only"));
        }
        if command == cmd::FLUSH {
            let blank = offset == 0 && length == 0;
            return if blank {
                Ok(Operation::Flush)
            } else {
                Err(Failure::invalid("flush of a range"))
            };
        }
        if command == cmd::BLOCK_STATUS && flags & cmd_flag::PAYLOAD_LEN != 0 {
            if !(12..=STATUS_PAYLOAD_MAX_BYTES).contains(&payload) || !payload.is_multiple_of(4) {
                return Err(Failure::invalid("block status payload of an impossible length"));
            }
            return Ok(Operation::StatusOf { offset, one });
        }
        self.check_range(command, offset, length)?;
        Ok(match command {
            cmd::READ => Operation::Read { offset, length, whole: flags & cmd_flag::DF != 0 },
            cmd::WRITE => Operation::Write { offset, fua },
            cmd::TRIM => Operation::Trim { offset, length, fua },
            cmd::WRITE_ZEROES => {
                let no_hole = flags & cmd_flag::NO_HOLE != 0;
                let fast = flags & cmd_flag::FAST_ZERO != 0;
                Operation::Zero { offset, length, options: ZeroOptions { fua, no_hole, fast } }
            }
            cmd::CACHE => Operation::Cache { offset, length },
            _ => Operation::Status { offset, length, one },
        })
    }

    fn check_flags(&self, request: &Request) -> Result<()> {
        let extended = self.style == Style::Extended;
        // Clients set FUA on anything, which the protocol tells servers to accept.
        let mut allowed = cmd_flag::FUA;
        allowed |= match request.command {
            cmd::READ if self.style.chunked() => cmd_flag::DF,
            cmd::WRITE if extended => cmd_flag::PAYLOAD_LEN,
            cmd::WRITE_ZEROES => cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO,
            cmd::BLOCK_STATUS if extended => cmd_flag::REQ_ONE | cmd_flag::PAYLOAD_LEN,
            cmd::BLOCK_STATUS => cmd_flag::REQ_ONE,
            cmd::READ | cmd::WRITE | cmd::FLUSH | cmd::TRIM | cmd::CACHE => 0,
            other => return Err(Failure::invalid(format!("unknown command {other}"))),
        };
        if request.flags & !allowed != 0 {
            return Err(Failure::invalid(format!(
                "command {} does not take flags {:#x}",
                request.command, request.flags
            )));
        }
        if extended && request.command == cmd::WRITE && request.flags & cmd_flag::PAYLOAD_LEN == 0 {
            return Err(Failure::invalid("write without a payload"));
        }
        if request.command == cmd::BLOCK_STATUS && self.contexts.is_empty() {
            return Err(Failure::invalid("block status without a metadata context selected"));
        }
        Ok(())
    }

    fn check_range(&self, command: u16, offset: u64, length: u64) -> Result<()> {
        let sizes = self.export.block_sizes();
        let grain = u64::from(sizes.minimum);
        if offset.checked_add(length).is_none_or(|end| end > self.size) {
            let errno = match command {
                cmd::WRITE | cmd::WRITE_ZEROES => Errno::NoSpace,
                _ => Errno::Invalid,
            };
            let message = format!("{length} bytes at {offset} reach past the end at {}", self.size);
            return Err(Failure::new(errno, message));
        }
        if !offset.is_multiple_of(grain) || !length.is_multiple_of(grain) {
            return Err(Failure::invalid(format!(
                "{length} bytes at {offset} are not aligned to {grain} bytes"
            )));
        }
        if matches!(command, cmd::READ | cmd::WRITE) && length > u64::from(sizes.maximum) {
            let read = command == cmd::READ && self.style.chunked();
            let errno = if read { Errno::Overflow } else { Errno::Invalid };
            let message = format!("{length} bytes exceed the maximum of {}", sizes.maximum);
            return Err(Failure::new(errno, message));
        }
        if command == cmd::BLOCK_STATUS && length == 0 {
            return Err(Failure::invalid("block status of an empty range"));
        }
        Ok(())
    }

    /// Length and contexts that a payload of block status asks for.
    pub(super) fn status_payload(&self, offset: u64, payload: &[u8]) -> Result<(u64, Vec<u32>)> {
        let malformed = |_| Failure::invalid("block status payload of an impossible length");
        let mut cursor = Cursor::new(payload);
        let length = cursor.u64().map_err(malformed)?;
        let mut wanted: Vec<u32> = Vec::new();
        while !cursor.rest().is_empty() {
            let id = cursor.u32().map_err(malformed)?;
            if id as usize >= self.contexts.len() || wanted.contains(&id) {
                return Err(Failure::invalid(format!("context {id} unknown or named twice")));
            }
            wanted.push(id);
        }
        self.check_range(cmd::BLOCK_STATUS, offset, length)?;
        Ok((length, wanted))
    }
}

impl Reply {
    /// The reply to a request whose execution panicked.
    #[must_use]
    pub fn internal_error(admitted: &Admitted) -> Self {
        Self::refused(admitted, &Failure::new(Errno::Io, "internal error of the server"))
    }

    /// The reply to a request that failed.
    #[must_use]
    pub fn refused(admitted: &Admitted, failure: &Failure) -> Self {
        Self::failed(&admitted.to, failure)
    }

    pub(super) fn failed(to: &ReplyTo, failure: &Failure) -> Self {
        Self { parts: vec![to.error(failure.errno, &failure.message)] }
    }

    /// Adds its pieces to what is sent.
    pub(super) fn append_to(self, batch: &mut Batch) {
        for part in self.parts {
            batch.push_vec(part);
        }
    }
}
