//! PDUs of NVMe over TCP: bytes to types and back.
//!
//! After the NVM Express TCP Transport Specification (section "PDU"): names, values and offsets are those of its
//! figures. All numbers are little-endian.

use std::fmt;
use std::io;

/// Types of PDUs.
pub mod kind {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const IC_REQ: u8 = 0x00;
    pub const IC_RESP: u8 = 0x01;
    pub const H2C_TERM_REQ: u8 = 0x02;
    pub const C2H_TERM_REQ: u8 = 0x03;
    pub const CAPSULE_CMD: u8 = 0x04;
    pub const CAPSULE_RESP: u8 = 0x05;
    pub const H2C_DATA: u8 = 0x06;
    pub const C2H_DATA: u8 = 0x07;
    pub const R2T: u8 = 0x09;
}

/// Flags of a PDU.
pub mod flag {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const HEADER_DIGEST: u8 = 1 << 0;
    pub const DATA_DIGEST: u8 = 1 << 1;
    pub const LAST: u8 = 1 << 2;
    pub const SUCCESS: u8 = 1 << 3;
}

/// Why a connection is ended, as the host is told.
pub mod fatal {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const INVALID_FIELD: u16 = 1;
    pub const SEQUENCE: u16 = 2;
    pub const HEADER_DIGEST: u16 = 3;
    pub const OUT_OF_RANGE: u16 = 4;
    pub const UNSUPPORTED: u16 = 6;
}

/// Bytes of the common header of all PDUs.
pub const COMMON_BYTES: usize = 8;
/// Bytes of the first PDU of either side.
pub const INIT_BYTES: usize = 128;
/// Bytes of a capsule's header: with its command.
pub const COMMAND_BYTES: usize = 72;
/// Bytes of the other headers.
const SHORT_BYTES: usize = 24;
/// Bytes of a digest.
pub const DIGEST_BYTES: usize = 4;
/// Bytes of the PDU that ends a connection at most.
const TERM_MAX_BYTES: usize = 152;
/// Bytes of data in one PDU from the host: as many as a command transfers, so that one is enough.
pub const H2C_DATA_MAX_BYTES: usize = 1 << 20;

/// The host broke the protocol: the connection ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fatal {
    /// What the host is told; nothing if 0: it has ended the connection itself.
    pub status: u16,
    /// The offset of the field in the header that is wrong, or what was expected.
    pub info: u32,
    /// For the log.
    pub why: &'static str,
    /// The header that is wrong.
    pub header: Vec<u8>,
}

impl Fatal {
    /// A header of which a field is wrong.
    pub fn field(offset: u32, why: &'static str, header: &[u8]) -> Self {
        Self::new(fatal::INVALID_FIELD, offset, why, header)
    }

    /// Anything else.
    pub fn new(status: u16, info: u32, why: &'static str, header: &[u8]) -> Self {
        Self { status, info, why, header: header.to_vec() }
    }

    /// The PDU that says so.
    pub fn pdu(&self) -> Vec<u8> {
        let header = &self.header[..self.header.len().min(TERM_MAX_BYTES - SHORT_BYTES)];
        let mut pdu = vec![0; SHORT_BYTES];
        let length = SHORT_BYTES + header.len();
        common(&mut pdu, kind::C2H_TERM_REQ, 0, 0, length);
        put(&mut pdu, 8, &self.status.to_le_bytes());
        put(&mut pdu, 10, &self.info.to_le_bytes());
        pdu.extend_from_slice(header);
        pdu
    }
}

impl fmt::Display for Fatal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.why)
    }
}

impl std::error::Error for Fatal {}

impl From<Fatal> for io::Error {
    fn from(fatal: Fatal) -> Self {
        Self::new(io::ErrorKind::InvalidData, fatal)
    }
}

/// What both sides have agreed on for one connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Framing {
    /// A digest behind each header.
    pub header_digest: bool,
    /// A digest behind all data.
    pub data_digest: bool,
    /// What the offset of data in a PDU to the host is a multiple of.
    pub alignment: usize,
}

impl Framing {
    /// Takes the host's first PDU.
    ///
    /// # Errors
    /// It is none, or of another version.
    pub fn of(pdu: &[u8; INIT_BYTES]) -> Result<Self, Fatal> {
        let field = |offset, why| Err(Fatal::field(offset, why, pdu));
        if pdu[0] != kind::IC_REQ {
            let why = "the first PDU does not initialize the connection";
            return Err(Fatal::new(fatal::SEQUENCE, 0, why, pdu));
        }
        if usize::from(pdu[2]) != INIT_BYTES {
            return field(2, "wrong length of a header");
        }
        if u32_at(pdu, 4) as usize != INIT_BYTES {
            return field(4, "wrong length of a PDU");
        }
        if u16_at(pdu, 8) != 0 {
            let why = "an unknown version of the format of PDUs";
            return Err(Fatal::new(fatal::UNSUPPORTED, 8, why, pdu));
        }
        if pdu[10] > 31 {
            return field(10, "data aligned to more than 128 bytes");
        }
        Ok(Self {
            header_digest: pdu[11] & 1 != 0,
            data_digest: pdu[11] & 2 != 0,
            alignment: (usize::from(pdu[10]) + 1) * 4,
        })
    }

    /// The answer to it.
    pub fn answer(&self) -> [u8; INIT_BYTES] {
        let mut pdu = [0; INIT_BYTES];
        common(&mut pdu, kind::IC_RESP, 0, 0, INIT_BYTES);
        pdu[11] = u8::from(self.header_digest) | u8::from(self.data_digest) << 1;
        put(&mut pdu, 12, &(H2C_DATA_MAX_BYTES as u32).to_le_bytes());
        pdu
    }

    /// Looks at the first bytes of a PDU from the host, with at most `capsule_max` bytes of data in a capsule.
    ///
    /// # Errors
    /// A length or an offset that cannot be.
    pub fn head(&self, start: &[u8], capsule_max: usize) -> Result<Head, Fatal> {
        let field = |offset, why| Err(Fatal::field(offset, why, start));
        let (kind, flags) = (start[0], start[1]);
        let length = u32_at(start, 4) as usize;
        let (header, data_max) = match kind {
            kind::CAPSULE_CMD => (COMMAND_BYTES, capsule_max),
            kind::H2C_DATA => (SHORT_BYTES, H2C_DATA_MAX_BYTES),
            kind::H2C_TERM_REQ => (SHORT_BYTES, TERM_MAX_BYTES - SHORT_BYTES),
            kind::IC_REQ => {
                let why = "the connection is initialized already";
                return Err(Fatal::new(fatal::SEQUENCE, 0, why, start));
            }
            _ => return field(0, "a PDU of an unknown type"),
        };
        if usize::from(start[2]) != header {
            return field(2, "wrong length of a header");
        }
        // The end of a connection has no digests.
        let digests = kind != kind::H2C_TERM_REQ;
        let header_digest = digests && self.header_digest;
        if (flags & flag::HEADER_DIGEST != 0) != header_digest {
            return field(1, "a digest of the header that was not agreed on, or none");
        }
        let header_bytes = header + if header_digest { DIGEST_BYTES } else { 0 };
        let Some(rest) = length.checked_sub(header_bytes) else {
            return field(4, "a PDU shorter than its header");
        };
        let data_digest = digests && self.data_digest && rest > 0;
        let data_bytes = if data_digest { rest.saturating_sub(DIGEST_BYTES) } else { rest };
        let none = data_bytes == 0 && (rest > 0 || kind == kind::H2C_DATA);
        if none || data_bytes > data_max {
            return field(4, "a PDU of a length that cannot be");
        }
        if rest > 0 && digests {
            if (flags & flag::DATA_DIGEST != 0) != data_digest {
                return field(1, "a digest of data that was not agreed on, or none");
            }
            if usize::from(start[3]) != header_bytes {
                return field(3, "data at another offset than was agreed on");
            }
        }
        Ok(Head { kind, header_bytes, data_bytes, data_digest, header_digest })
    }

    /// Begins a PDU to the host, of so many bytes with its header, and with so much data behind it.
    fn begin<const BYTES: usize>(&self, kind: u8, flags: u8, data: usize) -> [u8; BYTES] {
        let mut pdu = [0; BYTES];
        let digest = if self.header_digest { DIGEST_BYTES } else { 0 };
        let mut flags = flags;
        if self.header_digest {
            flags |= flag::HEADER_DIGEST;
        }
        let (mut offset, mut length) = (0, BYTES + digest);
        if data > 0 {
            offset = length.next_multiple_of(self.alignment.max(1));
            length = offset + data;
            if self.data_digest {
                flags |= flag::DATA_DIGEST;
                length += DIGEST_BYTES;
            }
        }
        common(&mut pdu, kind, flags, offset as u8, length);
        pdu
    }

    /// The header of a PDU as it is sent: with its digest, and up to its data.
    fn finish(&self, header: &[u8]) -> Vec<u8> {
        let mut bytes = header.to_vec();
        if self.header_digest {
            bytes.extend(crc_fast::crc32_iscsi(header).to_le_bytes());
        }
        bytes.resize(bytes.len().max(usize::from(header[3])), 0);
        bytes
    }

    /// The answer to a command.
    pub fn response(&self, completion: &[u8; 16]) -> Vec<u8> {
        let mut pdu: [u8; SHORT_BYTES] = self.begin(kind::CAPSULE_RESP, 0, 0);
        put(&mut pdu, 8, completion);
        self.finish(&pdu)
    }

    /// What precedes all data of a command in one PDU; with `done` no answer follows.
    pub fn data(&self, command: u16, length: usize, done: bool) -> Vec<u8> {
        let flags = flag::LAST | if done { flag::SUCCESS } else { 0 };
        let mut pdu: [u8; SHORT_BYTES] = self.begin(kind::C2H_DATA, flags, length);
        put(&mut pdu, 8, &command.to_le_bytes());
        put(&mut pdu, 16, &(length as u32).to_le_bytes());
        self.finish(&pdu)
    }

    /// What follows data.
    pub fn behind(&self, data: &[u8]) -> Option<[u8; DIGEST_BYTES]> {
        self.data_digest.then(|| crc_fast::crc32_iscsi(data).to_le_bytes())
    }

    /// Asks for all data of a command, to be sent under this tag.
    pub fn ready(&self, command: u16, tag: u16, length: usize) -> Vec<u8> {
        let mut pdu: [u8; SHORT_BYTES] = self.begin(kind::R2T, 0, 0);
        put(&mut pdu, 8, &command.to_le_bytes());
        put(&mut pdu, 10, &tag.to_le_bytes());
        put(&mut pdu, 16, &(length as u32).to_le_bytes());
        self.finish(&pdu)
    }
}

/// What the first bytes of a PDU say of its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Its type.
    pub kind: u8,
    /// Bytes up to its data.
    pub header_bytes: usize,
    /// Bytes of data.
    pub data_bytes: usize,
    /// Whether a digest follows them.
    pub data_digest: bool,
    header_digest: bool,
}

impl Head {
    /// Bytes behind the header.
    pub fn payload_bytes(&self) -> usize {
        self.data_bytes + if self.data_digest { DIGEST_BYTES } else { 0 }
    }

    /// Compares the header with its digest.
    ///
    /// # Errors
    /// They differ.
    pub fn check(&self, header: &[u8]) -> Result<(), Fatal> {
        if !self.header_digest {
            return Ok(());
        }
        let (bytes, digest) = header.split_at(header.len() - DIGEST_BYTES);
        let found = u32_at(digest, 0);
        if crc_fast::crc32_iscsi(bytes) == found {
            return Ok(());
        }
        let why = "a header that its digest is not of";
        Err(Fatal::new(fatal::HEADER_DIGEST, found, why, bytes))
    }
}

/// A piece of a command's data, as the header before it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The command.
    pub command: u16,
    /// The tag under which it was asked for.
    pub tag: u16,
    /// Where it begins.
    pub offset: u32,
    /// Its bytes.
    pub length: u32,
    /// It is the last.
    pub last: bool,
}

impl Piece {
    /// Of a header.
    pub fn decode(header: &[u8]) -> Self {
        Self {
            command: u16_at(header, 8),
            tag: u16_at(header, 10),
            offset: u32_at(header, 12),
            length: u32_at(header, 16),
            last: header[1] & flag::LAST != 0,
        }
    }
}

/// Whether data is what the digest behind it is of.
pub fn is_intact(data: &[u8], digest: &[u8]) -> bool {
    crc_fast::crc32_iscsi(data).to_le_bytes() == *digest
}

fn common(pdu: &mut [u8], kind: u8, flags: u8, offset: u8, length: usize) {
    let header = pdu.len() as u8;
    put(pdu, 0, &[kind, flags, header, offset]);
    put(pdu, 4, &(length as u32).to_le_bytes());
}

/// Sets bytes at an offset that is inside.
pub fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..][..value.len()].copy_from_slice(value);
}

/// A number at an offset that is inside.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// A number at an offset that is inside.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// A number at an offset that is inside.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
