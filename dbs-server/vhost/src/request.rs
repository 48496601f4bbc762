//! What a request of a guest says: a header, data, and a byte for the outcome, over pieces of memory cut in any way.

use super::memory::Memory;
use super::ring::{Chain, Malformed, Segment};

/// Unit of all that a guest names.
pub const SECTOR_BYTES: u64 = 512;
/// Bytes of one request at most. A guest that keeps to what it is told has less.
pub const REQUEST_MAX_BYTES: u64 = 32 << 20;
/// Bytes of a range to be given up at most.
pub const DISCARD_MAX_BYTES: u64 = 1 << 30;
/// Bytes of a range to be made zero at most: it may have to be written, and who stops the queue waits for that.
pub const ZEROES_MAX_BYTES: u64 = 32 << 20;
/// Bytes of a name that a guest is told.
pub const ID_BYTES: usize = 20;

const HEADER_BYTES: u64 = 16;
const RANGE_BYTES: u64 = 16;
/// In the flags of a range to be made zero: its space may be given up.
const UNMAP: u32 = 1;

/// What the guest is told of the outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Failed.
    Failed = 1,
    /// Such requests there are not.
    Unsupported = 2,
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Read so many bytes from an offset on.
    Read(u64, u64),
    /// Write so many bytes.
    Write(u64, u64),
    /// Make durable what was answered.
    Flush,
    /// What the disk is called.
    Name,
    /// Give up a range.
    Discard(u64, u64),
    /// Make a range zero; its space may be given up, or not.
    Zeroes(u64, u64, bool),
    /// Nothing that can be done.
    Refuse(Status),
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What it asks for.
    pub ask: Ask,
    /// Where its outcome goes.
    pub status: u64,
}

/// Reads a request out of its memory.
///
/// # Errors
/// It has no header, or no place for its outcome.
pub fn parse(memory: &Memory, chain: &Chain) -> Result<Request, Malformed> {
    let (readable, writable) = (total(&chain.readable), total(&chain.writable));
    let last = chain.writable.iter().rev().find(|segment| segment.length > 0);
    let last = last.ok_or(Malformed("it has no place for its outcome"))?;
    let status = last.address + u64::from(last.length) - 1;
    let mut header = [0; HEADER_BYTES as usize];
    gather(memory, &chain.readable, 0, &mut header).ok_or(Malformed("it has no header"))?;
    let [k0, k1, k2, k3, _, _, _, _, s0, s1, s2, s3, s4, s5, s6, s7] = header;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let (given, room) = (readable - HEADER_BYTES, writable - 1);
    let fits = |length: u64| length.is_multiple_of(SECTOR_BYTES) && length <= REQUEST_MAX_BYTES;
    let ask = match (u32::from_le_bytes([k0, k1, k2, k3]), sector.checked_mul(SECTOR_BYTES)) {
        (0, Some(offset)) if given == 0 && fits(room) => Ask::Read(offset, room),
        (1, Some(offset)) if room == 0 && fits(given) => Ask::Write(offset, given),
        (4, _) if given == 0 && room == 0 => Ask::Flush,
        (8, _) if given == 0 && room <= ID_BYTES as u64 => Ask::Name,
        (kind @ (11 | 13), _) if given == RANGE_BYTES && room == 0 => {
            let mut range = [0; RANGE_BYTES as usize];
            gather(memory, &chain.readable, HEADER_BYTES, &mut range)
                .ok_or(Malformed("its range cannot be read"))?;
            ask_of_range(kind, range)
        }
        (0 | 1 | 4 | 8 | 11 | 13, _) => Ask::Refuse(Status::Failed),
        _ => Ask::Refuse(Status::Unsupported),
    };
    Ok(Request { ask, status })
}

fn ask_of_range(kind: u32, range: [u8; RANGE_BYTES as usize]) -> Ask {
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = range;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let length = u64::from(u32::from_le_bytes([n0, n1, n2, n3])) * SECTOR_BYTES;
    let flags = u32::from_le_bytes([f0, f1, f2, f3]);
    let Some(offset) = sector.checked_mul(SECTOR_BYTES) else { return Ask::Refuse(Status::Failed) };
    match (kind, flags) {
        (11, 0) if length > DISCARD_MAX_BYTES => Ask::Refuse(Status::Failed),
        (13, 0 | UNMAP) if length > ZEROES_MAX_BYTES => Ask::Refuse(Status::Failed),
        (11, 0) => Ask::Discard(offset, length),
        (13, 0 | UNMAP) => Ask::Zeroes(offset, length, flags == UNMAP),
        // As the specification has it, for flags that are not known, or make no sense.
        _ => Ask::Refuse(Status::Unsupported),
    }
}

/// Copies out of pieces, from a place on.
pub fn gather(memory: &Memory, pieces: &[Segment], from: u64, bytes: &mut [u8]) -> Option<()> {
    let (mut skip, mut done) = (from, 0);
    for piece in pieces {
        let skipped = skip.min(piece.length.into());
        skip -= skipped;
        let count = ((u64::from(piece.length) - skipped) as usize).min(bytes.len() - done);
        if count == 0 {
            continue;
        }
        let part = bytes.get_mut(done..done + count)?;
        memory.read(piece.address + skipped, part)?;
        done += count;
    }
    (done == bytes.len()).then_some(())
}

/// Copies into pieces.
pub fn scatter(memory: &Memory, pieces: &[Segment], bytes: &[u8]) -> Option<()> {
    let mut rest = bytes;
    for piece in pieces {
        let (part, behind) = rest.split_at((piece.length as usize).min(rest.len()));
        if !part.is_empty() {
            memory.write(piece.address, part)?;
        }
        rest = behind;
    }
    rest.is_empty().then_some(())
}

fn total(pieces: &[Segment]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.length)).sum()
}
