//! The records of a stream, to bytes and back. `docs/stream.md` is the specification.

use super::header::{PREFIX_BYTES, StreamHeader};
use crate::PIECE_BYTES;
use dbs_core::format::crc::{crc32c, crc32c_append};
use dbs_core::units::{BLOCK_BYTES, SECTOR_BYTES};
use dbs_core::{Error, Result};
use std::io::{self, Read, Write};

/// Bytes of a record without its payload.
const RECORD_BYTES: usize = 32;
/// Bytes of the payload of an end record.
const END_BYTES: usize = 32;

/// What a record says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The bytes of a range.
    Data,
    /// A range reads as zeros.
    Zero,
    /// Nothing before the offset follows.
    Checkpoint,
    /// The stream is complete.
    End,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Data, Self::Zero, Self::Checkpoint, Self::End];

    fn code(self) -> u16 {
        match self {
            Self::Data => 1,
            Self::Zero => 2,
            Self::Checkpoint => 3,
            Self::End => 4,
        }
    }
}

/// A record that was read and found whole.
#[derive(Debug)]
pub(super) struct Record {
    pub kind: Kind,
    pub offset: u64,
    pub length: u64,
    /// The bytes of a data record.
    pub payload: Vec<u8>,
}

impl Default for Record {
    fn default() -> Self {
        Self { kind: Kind::Checkpoint, offset: 0, length: 0, payload: Vec::new() }
    }
}

/// What both sides keep count of, and compare at the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Tally {
    /// Checksum of the header, with which those of all records begin.
    seed: u32,
    /// Records so far, and so the number of the next.
    records: u64,
    data: u64,
    zero: u64,
    /// Checksum of all bytes so far.
    crc: u32,
}

impl Tally {
    fn start(header: &[u8]) -> Self {
        let seed = crc32c(header);
        let crc = crc32c_append(seed, &seed.to_le_bytes());
        Self { seed, crc, ..Self::default() }
    }

    fn add(&mut self, kind: Kind, length: u64, parts: [&[u8]; 2]) {
        self.records += 1;
        match kind {
            Kind::Data => self.data += length,
            Kind::Zero => self.zero += length,
            Kind::Checkpoint | Kind::End => {}
        }
        self.crc = crc32c_append(crc32c_append(self.crc, parts[0]), parts[1]);
    }

    fn end_payload(&self) -> [u8; END_BYTES] {
        let mut payload = [0; END_BYTES];
        payload[..8].copy_from_slice(&self.data.to_le_bytes());
        payload[8..16].copy_from_slice(&self.zero.to_le_bytes());
        payload[16..24].copy_from_slice(&self.records.to_le_bytes());
        payload[24..28].copy_from_slice(&self.crc.to_le_bytes());
        payload
    }
}

/// Writes a stream.
pub(super) struct Encoder<W> {
    output: W,
    tally: Tally,
}

impl<W: Write> Encoder<W> {
    pub(super) fn new(mut output: W, header: &StreamHeader) -> Result<Self> {
        let bytes = header.encode()?;
        let tally = Tally::start(&bytes);
        output
            .write_all(&bytes)
            .and_then(|()| output.write_all(&tally.seed.to_le_bytes()))
            .map_err(write_error)?;
        Ok(Self { output, tally })
    }

    /// At most [`PIECE_BYTES`] of data.
    pub(super) fn data(&mut self, offset: u64, payload: &[u8]) -> Result<()> {
        self.record(Kind::Data, offset, payload.len() as u64, payload)
    }

    pub(super) fn zero(&mut self, offset: u64, length: u64) -> Result<()> {
        self.record(Kind::Zero, offset, length, &[])
    }

    pub(super) fn checkpoint(&mut self, offset: u64) -> Result<()> {
        self.record(Kind::Checkpoint, offset, 0, &[])?;
        self.output.flush().map_err(write_error)
    }

    /// Completes the stream of a snapshot of `size` bytes.
    pub(super) fn finish(mut self, size: u64) -> Result<()> {
        let payload = self.tally.end_payload();
        self.record(Kind::End, size, END_BYTES as u64, &payload)?;
        self.output.flush().map_err(write_error)
    }

    fn record(&mut self, kind: Kind, offset: u64, length: u64, payload: &[u8]) -> Result<()> {
        let mut bytes = [0; RECORD_BYTES];
        bytes[4..6].copy_from_slice(&kind.code().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.tally.records.to_le_bytes());
        bytes[16..24].copy_from_slice(&offset.to_le_bytes());
        bytes[24..32].copy_from_slice(&length.to_le_bytes());
        let crc = checksum(self.tally.seed, &bytes, payload);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        self.tally.add(kind, length, [&bytes, payload]);
        self.output
            .write_all(&bytes)
            .and_then(|()| self.output.write_all(payload))
            .map_err(write_error)
    }
}

/// Reads a stream. Nothing it returns is damaged, out of order or outside the snapshot.
pub(super) struct Decoder<R> {
    input: R,
    tally: Tally,
    size: u64,
    /// What ranges begin and end with: a part of an encrypted block means nothing.
    unit: u64,
    /// Where the next record may start.
    at: u64,
}

impl<R: Read> Decoder<R> {
    pub(super) fn new(mut input: R) -> Result<(Self, StreamHeader)> {
        let mut bytes = vec![0; PREFIX_BYTES];
        read_exact(&mut input, &mut bytes)?;
        let mut prefix = [0; PREFIX_BYTES];
        prefix.copy_from_slice(&bytes);
        let (length, features) = StreamHeader::decode_prefix(&prefix)?;
        bytes.resize(PREFIX_BYTES + length, 0);
        read_exact(&mut input, &mut bytes[PREFIX_BYTES..])?;
        let mut crc = [0; 4];
        read_exact(&mut input, &mut crc)?;
        let tally = Tally::start(&bytes);
        if u32::from_le_bytes(crc) != tally.seed {
            return Err(Error::corrupt("the stream is damaged in its description"));
        }
        let header = StreamHeader::decode(&bytes[PREFIX_BYTES..], features)?;
        let unit = if header.encryption.is_some() { BLOCK_BYTES } else { SECTOR_BYTES };
        let decoder = Self { input, tally, size: header.size, unit, at: header.start };
        Ok((decoder, header))
    }

    /// Reads the next record.
    ///
    /// # Errors
    /// `Corrupt` if the stream is damaged or ends early; `Io`.
    pub(super) fn next(&mut self, record: &mut Record) -> Result<()> {
        let mut bytes = [0; RECORD_BYTES];
        read_exact(&mut self.input, &mut bytes)?;
        let field = |at: usize| {
            bytes[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
        };
        let (number, offset, length) = (field(8), field(16), field(24));
        let code = u16::from_le_bytes([bytes[4], bytes[5]]);
        let damaged = || {
            Error::corrupt(format!("the stream is damaged in its record {}", self.tally.records))
        };
        let kind = Kind::ALL.into_iter().find(|k| k.code() == code).ok_or_else(damaged)?;
        let payload_length = match kind {
            Kind::Data if length <= PIECE_BYTES => length as usize,
            Kind::End if length == END_BYTES as u64 => END_BYTES,
            Kind::Zero | Kind::Checkpoint => 0,
            Kind::Data | Kind::End => return Err(damaged()),
        };
        record.payload.resize(payload_length, 0);
        read_exact(&mut self.input, &mut record.payload)?;
        let crc = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if crc != checksum(self.tally.seed, &bytes, &record.payload)
            || number != self.tally.records
            || bytes[6..8] != [0; 2]
            || !self.fits(kind, offset, length)
            || (kind == Kind::End && record.payload != self.tally.end_payload())
        {
            return Err(damaged());
        }
        self.tally.add(kind, length, [&bytes, &record.payload]);
        (record.kind, record.offset, record.length) = (kind, offset, length);
        if kind != Kind::End {
            self.at = offset + length;
        }
        Ok(())
    }

    fn fits(&self, kind: Kind, offset: u64, length: u64) -> bool {
        let on_border = |at: u64| at.is_multiple_of(self.unit) || at == self.size;
        let aligned = on_border(offset) && offset.checked_add(length).is_some_and(on_border);
        match kind {
            Kind::Data | Kind::Zero => {
                let end = offset.checked_add(length);
                aligned && length > 0 && offset >= self.at && end.is_some_and(|e| e <= self.size)
            }
            Kind::Checkpoint => aligned && length == 0 && (self.at..=self.size).contains(&offset),
            Kind::End => offset == self.size,
        }
    }
}

/// Of a record, its own checksum field left out.
fn checksum(seed: u32, bytes: &[u8; RECORD_BYTES], payload: &[u8]) -> u32 {
    crc32c_append(crc32c_append(seed, &bytes[4..]), payload)
}

fn read_exact(input: &mut impl Read, buf: &mut [u8]) -> Result<()> {
    input.read_exact(buf).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Error::corrupt("the stream ends early"),
        _ => Error::io(error, "reading the stream"),
    })
}

fn write_error(error: io::Error) -> Error {
    Error::io(error, "writing the stream")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> StreamHeader {
        StreamHeader {
            volume: "v".into(),
            snapshot: "s".into(),
            uuid: "00000000-0000-4000-8000-000000000001".into(),
            base: None,
            size: 8192,
            created_ns: 0,
            user_created: true,
            labels: Default::default(),
            start: 0,
            encryption: None,
            more: false,
        }
    }

    /// A stream of three records and the end, after something was done to the writer's count.
    fn stream(alter: impl FnOnce(&mut Tally)) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, &header()).unwrap();
        for sector in [0, 1, 2] {
            encoder.zero(sector * 512, 512).unwrap();
        }
        alter(&mut encoder.tally);
        encoder.finish(8192).unwrap();
        bytes
    }

    /// Records that are found right.
    fn right(bytes: &[u8]) -> usize {
        let (mut decoder, _) = Decoder::new(bytes).unwrap();
        let mut record = Record::default();
        let mut count = 0;
        while decoder.next(&mut record).is_ok() {
            count += 1;
        }
        count
    }

    #[test]
    fn records_left_out_or_repeated_are_noticed_at_once() {
        let whole = stream(|_| {});
        assert_eq!(right(&whole), 4);
        let start = whole.len() - 4 * RECORD_BYTES - END_BYTES;
        for gone in 0..3 {
            let at = start + gone * RECORD_BYTES;
            let record = whole[at..at + RECORD_BYTES].to_vec();
            let mut fewer = whole.clone();
            fewer.drain(at..at + RECORD_BYTES);
            assert_eq!(right(&fewer), gone);
            let mut more = whole.clone();
            more.splice(at..at, record);
            assert_eq!(right(&more), gone + 1);
        }
    }

    #[test]
    fn end_that_counts_otherwise_is_refused() {
        for alter in [
            (|tally| tally.crc ^= 1) as fn(&mut Tally),
            |tally| tally.data += 512,
            |tally| tally.zero -= 512,
        ] {
            assert_eq!(right(&stream(alter)), 3);
        }
    }
}
