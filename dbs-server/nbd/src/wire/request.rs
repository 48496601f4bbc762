//! Requests of the transmission phase.

use super::{Cursor, EXTENDED_REQUEST_MAGIC, Malformed, REQUEST_MAGIC, cmd, cmd_flag};

/// The message headers that a connection has agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Style {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, replies in chunks.
    Structured,
    /// Extended requests and replies: 64-bit lengths.
    Extended,
}

impl Style {
    /// Bytes of a request header.
    #[must_use]
    pub fn request_bytes(self) -> usize {
        if self == Self::Extended { Request::EXTENDED_BYTES } else { Request::COMPACT_BYTES }
    }

    /// Whether replies come in chunks.
    #[must_use]
    pub fn chunked(self) -> bool {
        self != Self::Simple
    }
}

/// A request header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Bits of [`cmd_flag`].
    pub flags: u16,
    /// One of [`cmd`], or something unknown.
    pub command: u16,
    /// Chosen by the client, returned in the reply.
    pub cookie: u64,
    /// Byte offset.
    pub offset: u64,
    /// Bytes of the range, or of the payload.
    pub length: u64,
}

impl Request {
    /// Bytes of a compact header.
    pub const COMPACT_BYTES: usize = 28;
    /// Bytes of an extended header.
    pub const EXTENDED_BYTES: usize = 32;

    /// Decodes a header of `style`.
    ///
    /// # Errors
    /// [`Malformed`] for a wrong magic or length; the stream is then out of step.
    pub fn decode(style: Style, bytes: &[u8]) -> Result<Self, Malformed> {
        let extended = style == Style::Extended;
        let mut cursor = Cursor::new(bytes);
        if cursor.u32()? != if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC } {
            return Err(Malformed("request without its magic number"));
        }
        let request = Self {
            flags: cursor.u16()?,
            command: cursor.u16()?,
            cookie: cursor.u64()?,
            offset: cursor.u64()?,
            length: if extended { cursor.u64()? } else { u64::from(cursor.u32()?) },
        };
        cursor.finish()?;
        Ok(request)
    }

    /// Encodes a header of `style`; a compact one carries the low 32 bits of the length.
    #[must_use]
    pub fn encode(&self, style: Style) -> Vec<u8> {
        let extended = style == Style::Extended;
        let mut out = Vec::with_capacity(Self::EXTENDED_BYTES);
        out.extend(if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC }.to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        out.extend(self.command.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        out.extend(self.offset.to_be_bytes());
        if extended {
            out.extend(self.length.to_be_bytes());
        } else {
            out.extend((self.length as u32).to_be_bytes());
        }
        out
    }

    /// Bytes of payload that follow the header.
    #[must_use]
    pub fn payload_bytes(&self, style: Style) -> u64 {
        let has_payload = match style {
            Style::Extended => self.flags & cmd_flag::PAYLOAD_LEN != 0,
            _ => self.command == cmd::WRITE,
        };
        if has_payload { self.length } else { 0 }
    }
}
