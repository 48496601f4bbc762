//! The bytes of the NBD protocol (`doc/proto.md` of the NetworkBlockDevice project) with its
//! extended headers extension: constants and codecs, no sockets. Any bytes give a value or
//! [`Malformed`]; nothing is allocated beyond the length of the input.

pub mod option;
pub mod reply;
pub mod request;

use std::fmt;

/// First eight bytes of the server's greeting.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Start of every option, and the second half of the greeting.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Start of an extended reply chunk.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Longest option data in bytes that is looked at.
pub const OPTION_MAX_BYTES: u32 = 64 << 10;
/// Largest payload of a request, and largest read, in bytes: what every client may count on.
pub const PAYLOAD_MAX_BYTES: u32 = 32 << 20;
/// Longest string in bytes: export names, descriptions, context names, messages.
pub const STRING_MAX_BYTES: usize = 4096;
/// Most metadata contexts one connection can select.
pub const CONTEXTS_MAX: usize = 64;
/// Bytes of the server's greeting.
pub const GREETING_BYTES: usize = 18;

/// Handshake flags, the same bits from server and client.
pub mod handshake_flag {
    /// Options are answered one by one.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No padding after the answer to `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options of the handshake.
pub mod opt {
    /// Choose an export without a way to answer errors.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List exports.
    pub const LIST: u32 = 3;
    /// Switch to TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Choose an export.
    pub const GO: u32 = 7;
    /// Ask for structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Ask for extended headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of option replies.
pub mod rep {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One piece of information about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in every error type.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// Option not known.
    pub const ERR_UNSUP: u32 = ERROR_BIT | 1;
    /// Refused by policy.
    pub const ERR_POLICY: u32 = ERROR_BIT | 2;
    /// Malformed or out of place.
    pub const ERR_INVALID: u32 = ERROR_BIT | 3;
    /// TLS must come first.
    pub const ERR_TLS_REQD: u32 = ERROR_BIT | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = ERROR_BIT | 6;
    /// Request or reply too large.
    pub const ERR_TOO_BIG: u32 = ERROR_BIT | 9;
    /// Extended headers are in force.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT | 10;
}

/// Kinds of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// Text for people.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags.
pub mod flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `FUA` works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `DF` works.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` works.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `FAST_ZERO` works.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// `BLOCK_STATUS` takes a payload.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Commands.
pub mod cmd {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Disconnect.
    pub const DISC: u16 = 2;
    /// Flush.
    pub const FLUSH: u16 = 3;
    /// Discard.
    pub const TRIM: u16 = 4;
    /// Prefetch.
    pub const CACHE: u16 = 5;
    /// Write zeros without sending them.
    pub const WRITE_ZEROES: u16 = 6;
    /// Metadata of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
pub mod cmd_flag {
    /// Durable before the reply.
    pub const FUA: u16 = 1;
    /// Keep the range allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// One content chunk only.
    pub const DF: u16 = 1 << 2;
    /// One extent a context only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail rather than be slow.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload (extended headers).
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Extent flags of the metadata contexts served here.
pub mod extent_flag {
    /// `base:allocation`: not allocated.
    pub const HOLE: u32 = 1;
    /// `base:allocation`: reads as zeros.
    pub const ZERO: u32 = 1 << 1;
    /// `dbs:diff:*`: differs from the snapshot, holds data.
    pub const DIFFERS: u32 = 1;
    /// `dbs:diff:*`: differs from the snapshot, reads as zeros.
    pub const DIFFERS_ZERO: u32 = 1 << 1;
}

/// Bytes that are not what the protocol says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Malformed {}

impl From<Malformed> for std::io::Error {
    fn from(error: Malformed) -> Self {
        Self::new(std::io::ErrorKind::InvalidData, error)
    }
}

/// The error values a reply may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted: the export is read-only.
    Perm = 1,
    /// Input/output error.
    Io = 5,
    /// Invalid argument.
    Invalid = 22,
    /// No space left, or a write past the end.
    NoSpace = 28,
    /// Too large.
    Overflow = 75,
    /// Cannot be done fast.
    NotSupported = 95,
    /// The server is stopping.
    Shutdown = 108,
}

impl Errno {
    /// The value on the wire; what a client does not know counts as invalid, as the protocol says.
    #[must_use]
    pub fn from_wire(value: u32) -> Self {
        [Self::Perm, Self::Io, Self::NoSpace, Self::Overflow, Self::NotSupported, Self::Shutdown]
            .into_iter()
            .find(|errno| *errno as u32 == value)
            .unwrap_or(Self::Invalid)
    }
}

/// The greeting that a server sends first.
#[must_use]
pub fn greeting() -> [u8; GREETING_BYTES] {
    let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    let mut out = [0; GREETING_BYTES];
    out[..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
    out[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    out[16..].copy_from_slice(&flags.to_be_bytes());
    out
}

/// The handshake flags of a greeting.
///
/// # Errors
/// [`Malformed`] if it is not a newstyle greeting.
pub fn decode_greeting(bytes: &[u8]) -> Result<u16, Malformed> {
    let mut cursor = Cursor::new(bytes);
    if cursor.u64()? != GREETING_MAGIC || cursor.u64()? != OPTION_MAGIC {
        return Err(Malformed("not a newstyle NBD server"));
    }
    cursor.u16()
}

/// Reads big-endian fields from the front of a slice.
#[derive(Debug, Clone, Copy)]
pub struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    /// Starts at the front.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// What is left.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// [`Malformed`] if there are fewer; the same for all methods below.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (head, tail) = self.0.split_at_checked(len).ok_or(Malformed("message too short"))?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.bytes(N)?.try_into().map_err(|_| Malformed("message too short"))
    }

    /// A 16-bit field.
    ///
    /// # Errors
    /// See [`Cursor::bytes`].
    pub fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    /// A 32-bit field.
    ///
    /// # Errors
    /// See [`Cursor::bytes`].
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    /// A 64-bit field.
    ///
    /// # Errors
    /// See [`Cursor::bytes`].
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string of `len` bytes.
    ///
    /// # Errors
    /// See [`Cursor::bytes`]; also for a string too long, not UTF-8, or with a NUL in it.
    pub fn string(&mut self, len: usize) -> Result<String, Malformed> {
        if len > STRING_MAX_BYTES {
            return Err(Malformed("string longer than 4096 bytes"));
        }
        let text =
            std::str::from_utf8(self.bytes(len)?).map_err(|_| Malformed("string is not UTF-8"))?;
        if text.contains('\0') {
            return Err(Malformed("string contains NUL"));
        }
        Ok(text.to_owned())
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    /// [`Malformed`] if there is.
    pub fn finish(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("message too long")) }
    }
}

/// The longest prefix of `text` that fits in `max` bytes.
#[must_use]
pub fn truncate(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

#[cfg(test)]
mod tests;
