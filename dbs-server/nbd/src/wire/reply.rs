//! Replies of the transmission phase.

use super::request::Style;
use super::{
    Cursor, EXTENDED_REPLY_MAGIC, Errno, Malformed, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC,
    truncate,
};
use std::ops::Deref;

/// Set in the last chunk of a reply.
pub const FLAG_DONE: u16 = 1;
/// Longest error message in bytes that is sent.
pub const MESSAGE_MAX_BYTES: usize = 1024;

/// Types of chunks.
pub mod chunk {
    /// Nothing: the end of a reply.
    pub const NONE: u16 = 0;
    /// Bytes read.
    pub const OFFSET_DATA: u16 = 1;
    /// A range that reads as zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of a metadata context, 32-bit.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents of a metadata context, 64-bit.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Set in every error type.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// The request failed.
    pub const ERROR: u16 = ERROR_BIT | 1;
}

/// What every reply to a request repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyTo {
    /// Headers of the connection.
    pub style: Style,
    /// Cookie of the request.
    pub cookie: u64,
    /// Offset of the request.
    pub offset: u64,
}

/// The header of a reply or chunk, with the fixed fields that follow it.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    bytes: [u8; Self::MAX_BYTES],
    len: usize,
}

impl Head {
    /// An extended header, an offset and a length.
    const MAX_BYTES: usize = 32 + 8 + 4;

    fn new() -> Self {
        Self { bytes: [0; Self::MAX_BYTES], len: 0 }
    }

    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        self.bytes[self.len..self.len + N].copy_from_slice(&bytes);
        self.len += N;
    }
}

impl Deref for Head {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl ReplyTo {
    /// A simple reply's header.
    #[must_use]
    pub fn simple(&self, errno: u32) -> Head {
        let mut head = Head::new();
        head.put(SIMPLE_REPLY_MAGIC.to_be_bytes());
        head.put(errno.to_be_bytes());
        head.put(self.cookie.to_be_bytes());
        head
    }

    /// A chunk's header; `length` bytes of payload are to follow.
    #[must_use]
    pub fn chunk_head(&self, flags: u16, kind: u16, length: usize) -> Head {
        let extended = self.style == Style::Extended;
        let mut head = Head::new();
        let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        head.put(magic.to_be_bytes());
        head.put(flags.to_be_bytes());
        head.put(kind.to_be_bytes());
        head.put(self.cookie.to_be_bytes());
        if extended {
            head.put(self.offset.to_be_bytes());
            head.put((length as u64).to_be_bytes());
        } else {
            head.put((length as u32).to_be_bytes());
        }
        head
    }

    /// What precedes `length` bytes of data at `offset`.
    #[must_use]
    pub fn data_head(&self, flags: u16, offset: u64, length: usize) -> Head {
        if !self.style.chunked() {
            return self.simple(0);
        }
        let mut head = self.chunk_head(flags, chunk::OFFSET_DATA, 8 + length);
        head.put(offset.to_be_bytes());
        head
    }

    /// A whole chunk that says that `length` bytes at `offset` are zeros.
    #[must_use]
    pub fn hole(&self, flags: u16, offset: u64, length: u32) -> Head {
        let mut head = self.chunk_head(flags, chunk::OFFSET_HOLE, 12);
        head.put(offset.to_be_bytes());
        head.put(length.to_be_bytes());
        head
    }

    /// A whole chunk with its payload.
    #[must_use]
    pub fn chunk(&self, flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut out = self.chunk_head(flags, kind, payload.len()).to_vec();
        out.extend_from_slice(payload);
        out
    }

    /// A whole reply of success without content.
    #[must_use]
    pub fn done(&self) -> Head {
        if self.style.chunked() {
            self.chunk_head(FLAG_DONE, chunk::NONE, 0)
        } else {
            self.simple(0)
        }
    }

    /// A whole reply of failure; the message reaches clients of chunked replies only.
    #[must_use]
    pub fn error(&self, errno: Errno, message: &str) -> Vec<u8> {
        if !self.style.chunked() {
            return self.simple(errno as u32).to_vec();
        }
        let message = truncate(message, MESSAGE_MAX_BYTES);
        let mut head = Vec::with_capacity(6 + message.len());
        head.extend((errno as u32).to_be_bytes());
        head.extend((message.len() as u16).to_be_bytes());
        head.extend(message.as_bytes());
        self.chunk(FLAG_DONE, chunk::ERROR, &head)
    }

    /// The extents of one context as a chunk. Lengths must fit the style: 32 bits unless extended.
    #[must_use]
    pub fn block_status(&self, flags: u16, id: u32, extents: &[(u64, u32)]) -> Vec<u8> {
        let mut head = Vec::with_capacity(8 + extents.len() * 16);
        head.extend(id.to_be_bytes());
        if self.style == Style::Extended {
            head.extend((extents.len() as u32).to_be_bytes());
            for (length, status) in extents {
                head.extend(length.to_be_bytes());
                head.extend(u64::from(*status).to_be_bytes());
            }
            return self.chunk(flags, chunk::BLOCK_STATUS_EXT, &head);
        }
        for (length, status) in extents {
            head.extend((*length as u32).to_be_bytes());
            head.extend(status.to_be_bytes());
        }
        self.chunk(flags, chunk::BLOCK_STATUS, &head)
    }
}

/// A reply's header as a client sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyHeader {
    /// A simple reply.
    Simple {
        /// Error value, 0 for success.
        errno: u32,
        /// Cookie of the request.
        cookie: u64,
    },
    /// A chunk.
    Chunk {
        /// Whether it is the last.
        done: bool,
        /// One of [`chunk`], or something unknown.
        kind: u16,
        /// Cookie of the request.
        cookie: u64,
        /// Bytes of payload that follow.
        length: u64,
    },
}

impl ReplyHeader {
    /// Cookie of the request this answers.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        match self {
            Self::Simple { cookie, .. } | Self::Chunk { cookie, .. } => *cookie,
        }
    }

    /// Bytes of a simple reply, and the first part of any header.
    pub const SIMPLE_BYTES: usize = 16;

    /// Bytes of the whole header that starts with these [`ReplyHeader::SIMPLE_BYTES`] bytes.
    ///
    /// # Errors
    /// [`Malformed`] for a magic that `style` does not allow.
    pub fn bytes(style: Style, start: &[u8]) -> Result<usize, Malformed> {
        match (Cursor::new(start).u32()?, style) {
            (SIMPLE_REPLY_MAGIC, Style::Simple | Style::Structured) => Ok(Self::SIMPLE_BYTES),
            (STRUCTURED_REPLY_MAGIC, Style::Structured) => Ok(20),
            (EXTENDED_REPLY_MAGIC, Style::Extended) => Ok(32),
            _ => Err(Malformed("reply without its magic number")),
        }
    }

    /// Decodes a whole header.
    ///
    /// # Errors
    /// [`Malformed`] for a wrong magic or length.
    pub fn decode(style: Style, bytes: &[u8]) -> Result<Self, Malformed> {
        let expected = Self::bytes(style, bytes)?;
        let mut cursor = Cursor::new(bytes);
        cursor.u32()?;
        let header = if expected == Self::SIMPLE_BYTES {
            Self::Simple { errno: cursor.u32()?, cookie: cursor.u64()? }
        } else {
            let done = cursor.u16()? & FLAG_DONE != 0;
            let kind = cursor.u16()?;
            let cookie = cursor.u64()?;
            let length = if style == Style::Extended {
                cursor.u64()?;
                cursor.u64()?
            } else {
                u64::from(cursor.u32()?)
            };
            Self::Chunk { done, kind, cookie, length }
        };
        cursor.finish()?;
        Ok(header)
    }
}

/// The extents of a status chunk's payload: context id, then (bytes, status) of each.
///
/// # Errors
/// [`Malformed`] if there is none, one is empty, or the length is wrong.
pub fn decode_block_status(kind: u16, payload: &[u8]) -> Result<(u32, Vec<(u64, u64)>), Malformed> {
    let mut cursor = Cursor::new(payload);
    let id = cursor.u32()?;
    let extended = kind == chunk::BLOCK_STATUS_EXT;
    let count = if extended { Some(cursor.u32()? as usize) } else { None };
    let mut extents = Vec::new();
    while !cursor.rest().is_empty() {
        let extent = if extended {
            (cursor.u64()?, cursor.u64()?)
        } else {
            (u64::from(cursor.u32()?), u64::from(cursor.u32()?))
        };
        if extent.0 == 0 {
            return Err(Malformed("empty extent in a block status reply"));
        }
        extents.push(extent);
    }
    if extents.is_empty() || count.is_some_and(|count| count != extents.len()) {
        return Err(Malformed("wrong number of extents in a block status reply"));
    }
    Ok((id, extents))
}

/// The error and message of an error chunk's payload.
///
/// # Errors
/// [`Malformed`] if it is too short or reports success.
pub fn decode_error(payload: &[u8]) -> Result<(Errno, String), Malformed> {
    let mut cursor = Cursor::new(payload);
    let errno = cursor.u32()?;
    let length = cursor.u16()? as usize;
    let message = String::from_utf8_lossy(cursor.bytes(length)?).into_owned();
    if errno == 0 {
        return Err(Malformed("error chunk without an error"));
    }
    Ok((Errno::from_wire(errno), message))
}
