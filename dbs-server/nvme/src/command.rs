//! Commands: submission queue entries, what they ask for, and how they end.
//!
//! After the NVM Express Base and NVM Command Set Specifications. Data is described by one SGL descriptor, as NVMe over
//! Fabrics has it.

use super::wire::{put, u16_at, u32_at, u64_at};
use dbs_frontend::Demand;
use dbs_reactor::Buf;

/// Bytes of a submission queue entry.
pub const ENTRY_BYTES: usize = 64;
/// Bytes of a logical block: those that volumes are multiples of, on each frontend.
pub const BLOCK_BYTES: u64 = 512;
/// Bytes that a read or write transfers at most, as a power of two of 4 KiB.
pub const TRANSFER_MAX_LOG: u8 = 8;
/// The same in bytes.
pub const TRANSFER_MAX_BYTES: u64 = 4096 << TRANSFER_MAX_LOG;
/// The only namespace of each subsystem.
pub const NAMESPACE: u32 = 1;
/// Ranges of one command that deallocates.
pub const RANGES_MAX: usize = 256;
/// Bytes of such a range.
pub const RANGE_BYTES: usize = 16;

const _: () = assert!(TRANSFER_MAX_BYTES == super::wire::H2C_DATA_MAX_BYTES as u64);

/// Opcodes of commands.
pub mod opcode {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0a;
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0c;
    pub const KEEP_ALIVE: u8 = 0x18;
    pub const FABRICS: u8 = 0x7f;
}

/// How a command ends: status code and its type, and whether the host may try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub u16);

/// Do not retry.
const NO_RETRY: u16 = 1 << 14;

impl Status {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_OPCODE: Self = Self(NO_RETRY | 0x01);
    pub const INVALID_FIELD: Self = Self(NO_RETRY | 0x02);
    /// The host may ask again where it connects next.
    pub const QUEUE_DELETED: Self = Self(0x08);
    pub const INVALID_NAMESPACE: Self = Self(NO_RETRY | 0x0b);
    pub const SEQUENCE: Self = Self(NO_RETRY | 0x0c);
    pub const SGL_LENGTH: Self = Self(NO_RETRY | 0x0f);
    pub const SGL_TYPE: Self = Self(NO_RETRY | 0x11);
    pub const SGL_OFFSET: Self = Self(NO_RETRY | 0x16);
    pub const WRITE_PROTECTED: Self = Self(NO_RETRY | 0x20);
    /// What a digest found out; the next try may do better.
    pub const TRANSPORT: Self = Self(0x22);
    pub const LBA_OUT_OF_RANGE: Self = Self(NO_RETRY | 0x80);
    pub const CAPACITY: Self = Self(NO_RETRY | 0x81);
    pub const EVENTS_EXCEEDED: Self = Self(NO_RETRY | 0x105);
    pub const INVALID_LOG_PAGE: Self = Self(NO_RETRY | 0x109);
    pub const NOT_CHANGEABLE: Self = Self(NO_RETRY | 0x10e);
    pub const CONNECT_FORMAT: Self = Self(NO_RETRY | 0x180);
    /// The host may try again.
    pub const CONNECT_BUSY: Self = Self(0x181);
    pub const CONNECT_PARAMETERS: Self = Self(NO_RETRY | 0x182);
    pub const CONNECT_HOST: Self = Self(NO_RETRY | 0x184);
    pub const AUTHENTICATION: Self = Self(NO_RETRY | 0x191);
    pub const WRITE_FAULT: Self = Self(NO_RETRY | 0x280);
    pub const READ_ERROR: Self = Self(NO_RETRY | 0x281);
    /// Another path of the host may have it.
    pub const INACCESSIBLE: Self = Self(0x302);

    /// That of an error number.
    pub fn of(errno: i32, reads: bool) -> Self {
        use nix::libc;
        match errno {
            libc::ENOSPC => Self::CAPACITY,
            libc::EROFS => Self::WRITE_PROTECTED,
            libc::EINVAL => Self::LBA_OUT_OF_RANGE,
            _ if reads => Self::READ_ERROR,
            _ => Self::WRITE_FAULT,
        }
    }
}

/// A completion queue entry.
pub fn completion(result: u64, head: u16, command: u16, status: Status) -> [u8; 16] {
    let mut entry = [0; 16];
    put(&mut entry, 0, &result.to_le_bytes());
    put(&mut entry, 8, &head.to_le_bytes());
    put(&mut entry, 12, &command.to_le_bytes());
    put(&mut entry, 14, &(status.0 << 1).to_le_bytes());
    entry
}

/// A submission queue entry.
#[derive(Debug, Clone, Copy)]
pub struct Command(pub [u8; ENTRY_BYTES]);

/// Where the data of a command comes from that the host sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The capsule.
    Capsule,
    /// It is to be asked for.
    Host,
}

impl Command {
    /// What kind it is.
    pub fn opcode(&self) -> u8 {
        self.0[0]
    }

    /// Its number.
    pub fn id(&self) -> u16 {
        u16_at(&self.0, 2)
    }

    /// Which of the commands of Fabrics it is.
    pub fn fabrics_type(&self) -> u8 {
        self.0[4]
    }

    /// The namespace that it is for.
    pub fn namespace(&self) -> u32 {
        u32_at(&self.0, 4)
    }

    /// One of the doublewords that mean something else for each kind, by its number.
    pub fn dword(&self, number: usize) -> u32 {
        u32_at(&self.0, number * 4)
    }

    /// Two doublewords.
    pub fn qword(&self, number: usize) -> u64 {
        u64_at(&self.0, number * 4)
    }

    /// Bytes of data, as its SGL says.
    pub fn data_length(&self) -> u32 {
        u32_at(&self.0, 32)
    }

    /// What all commands have in common: neither fused, nor with data described by PRPs.
    ///
    /// # Errors
    /// They are.
    pub fn check(&self) -> Result<(), Status> {
        let flags = self.0[1];
        if flags & 0x03 != 0 || flags >> 6 != 1 {
            return Err(Status::INVALID_FIELD);
        }
        Ok(())
    }

    /// Where `needed` bytes come from that the host sends, `capsule` bytes being in the capsule.
    ///
    /// # Errors
    /// The SGL says something else.
    pub fn source(&self, needed: usize, capsule: usize) -> Result<Source, Status> {
        let source = match self.0[39] {
            0x01 if u64_at(&self.0, 24) != 0 => return Err(Status::SGL_OFFSET),
            0x01 => Source::Capsule,
            0x5a => Source::Host,
            _ => return Err(Status::SGL_TYPE),
        };
        let found = if source == Source::Capsule { needed } else { 0 };
        if self.data_length() as usize != needed || capsule != found {
            return Err(Status::SGL_LENGTH);
        }
        Ok(source)
    }

    /// Whether the host takes so many bytes.
    ///
    /// # Errors
    /// The SGL says something else.
    pub fn takes(&self, bytes: u64) -> Result<(), Status> {
        if self.0[39] != 0x5a {
            return Err(Status::SGL_TYPE);
        }
        if u64::from(self.data_length()) != bytes {
            return Err(Status::SGL_LENGTH);
        }
        Ok(())
    }

    /// Bytes of memory that its answer takes.
    pub fn answer_bytes(&self, admin: bool) -> u64 {
        let answers = if admin {
            matches!(self.opcode(), opcode::IDENTIFY | opcode::GET_LOG_PAGE)
        } else {
            self.opcode() == opcode::READ
        };
        // What is longer is refused.
        if answers { u64::from(self.data_length()).min(TRANSFER_MAX_BYTES) } else { 0 }
    }
}

/// What a valid command for a namespace asks for; offset and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    Read {
        offset: u64,
        length: u64,
    },
    Write {
        offset: u64,
        length: u64,
        durable: bool,
    },
    Flush,
    Zeroes {
        offset: u64,
        length: u64,
        durable: bool,
        frees: bool,
    },
    /// Gives up so many ranges, with which its data of so many bytes begins; or only says that they are of no use.
    Deallocate {
        ranges: usize,
        bytes: usize,
        does: bool,
    },
}

impl Ask {
    /// That of a command for a namespace of so many bytes.
    ///
    /// # Errors
    /// It cannot be done.
    pub fn of(command: &Command, size: u64) -> Result<Self, Status> {
        command.check()?;
        let is_flush = command.opcode() == opcode::FLUSH;
        // A flush may be for all namespaces.
        if command.namespace() != NAMESPACE && !(is_flush && command.namespace() == u32::MAX) {
            return Err(Status::INVALID_NAMESPACE);
        }
        let dword = command.dword(12);
        // Both are in the places where the commands that have a range have it.
        let range = |most: u64| {
            let length = (u64::from(dword & 0xffff) + 1) * BLOCK_BYTES;
            let offset = command.qword(10).checked_mul(BLOCK_BYTES);
            let end = offset.and_then(|offset| offset.checked_add(length));
            match (offset, end) {
                _ if length > most => Err(Status::INVALID_FIELD),
                (Some(offset), Some(end)) if end <= size => Ok((offset, length)),
                _ => Err(Status::LBA_OUT_OF_RANGE),
            }
        };
        let durable = dword & 1 << 30 != 0;
        match command.opcode() {
            opcode::FLUSH => Ok(Self::Flush),
            opcode::READ => {
                let (offset, length) = range(TRANSFER_MAX_BYTES)?;
                command.takes(length)?;
                Ok(Self::Read { offset, length })
            }
            opcode::WRITE => {
                let (offset, length) = range(TRANSFER_MAX_BYTES)?;
                Ok(Self::Write { offset, length, durable })
            }
            opcode::WRITE_ZEROES => {
                let (offset, length) = range(u64::MAX)?;
                Ok(Self::Zeroes { offset, length, durable, frees: dword & 1 << 25 != 0 })
            }
            opcode::DATASET_MANAGEMENT => {
                let ranges = (command.dword(10) & 0xff) as usize + 1;
                // Linux always sends as much as there may be.
                let bytes = command.data_length() as usize;
                if !(ranges * RANGE_BYTES..=RANGES_MAX * RANGE_BYTES).contains(&bytes) {
                    return Err(Status::SGL_LENGTH);
                }
                Ok(Self::Deallocate { ranges, bytes, does: command.dword(11) & 1 << 2 != 0 })
            }
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    /// Bytes that the host sends for it.
    pub fn host_bytes(&self) -> usize {
        match *self {
            Self::Write { length, .. } => length as usize,
            Self::Deallocate { bytes, .. } => bytes,
            _ => 0,
        }
    }

    /// What is to be done, and where; `None` for what is done range by range.
    pub fn demand(&self, payload: Option<Buf>) -> Option<(Demand, (u64, u64))> {
        Some(match *self {
            Self::Read { offset, length } => (Demand::Read, (offset, length)),
            Self::Write { offset, length, durable } => {
                (Demand::Write(payload?, durable), (offset, length))
            }
            Self::Flush => (Demand::Flush, (0, 0)),
            Self::Zeroes { offset, length, durable, frees: true } => {
                (Demand::Zeroes(durable), (offset, length))
            }
            Self::Zeroes { offset, length, durable, frees: false } => {
                (Demand::KeepZeroes(durable), (offset, length))
            }
            Self::Deallocate { .. } => return None,
        })
    }
}

/// The ranges, offset and length in bytes, that a command gives up in a namespace of so many bytes; its data begins with
/// `count` of them.
///
/// # Errors
/// One is not inside.
pub fn ranges(data: &[u8], count: usize, size: u64) -> Result<Vec<(u64, u64)>, Status> {
    let mut ranges = Vec::new();
    for range in data.chunks_exact(RANGE_BYTES).take(count) {
        let length = u64::from(u32_at(range, 4)) * BLOCK_BYTES;
        let offset = u64_at(range, 8).checked_mul(BLOCK_BYTES);
        let inside = |offset: &u64| offset.checked_add(length).is_some_and(|end| end <= size);
        let offset = offset.filter(inside).ok_or(Status::LBA_OUT_OF_RANGE)?;
        if length > 0 {
            ranges.push((offset, length));
        }
    }
    Ok(ranges)
}
