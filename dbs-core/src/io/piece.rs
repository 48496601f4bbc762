//! Requests cut into pieces that direct I/O accepts, and how far each piece has come. What a
//! driver adds is only how one piece is handed to the kernel.

use super::buffer::AlignedBuf;
use super::{ReadRequest, WriteRequest};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Longest piece: the kernel moves less than 2 GiB at once, and its count must fit an `i32`.
const PIECE_MAX_BYTES: usize = 1 << 30;
/// Longest piece that goes through a bounce buffer; bounds the memory a batch can take.
const BOUNCE_MAX_BYTES: usize = 256 << 10;

/// What a descriptor asks of a request, both in bytes; buffered I/O asks for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Offsets and lengths are multiples of this power of two.
    pub offset: usize,
    /// Addresses in memory are multiples of this power of two.
    pub memory: usize,
}

impl Alignment {
    pub const NONE: Self = Self { offset: 1, memory: 1 };

    fn fits(self, offset: u64, buf: &[u8]) -> bool {
        is_multiple(offset, self.offset)
            && is_multiple(buf.len() as u64, self.offset)
            && is_multiple(buf.as_ptr().addr() as u64, self.memory)
    }
}

/// One transfer between a range of the storage and memory.
pub(super) struct Piece<'a> {
    place: Place<'a>,
    /// Where the whole piece starts.
    offset: u64,
    /// Bytes that must arrive; a widened read may be longer and end past the end of a file.
    needed: usize,
    done: usize,
    granule: usize,
}

/// The memory of a piece.
pub(super) enum Place<'a> {
    Read(&'a mut [u8]),
    /// Read into `buf`, of which the bytes from `skip` on belong to `out`.
    ReadBounced {
        buf: AlignedBuf,
        skip: usize,
        out: &'a mut [u8],
    },
    Write(&'a [u8]),
    WriteBounced(AlignedBuf),
}

impl Piece<'_> {
    /// The memory and its position on the storage, of what is still to do.
    pub fn remaining(&mut self) -> (Remaining<'_>, u64) {
        let done = self.done;
        let rest = match &mut self.place {
            Place::Read(buf) => Remaining::Read(&mut buf[done..]),
            Place::ReadBounced { buf, .. } => Remaining::Read(&mut buf[done..]),
            Place::Write(buf) => Remaining::Write(&buf[done..]),
            Place::WriteBounced(buf) => Remaining::Write(&buf[done..]),
        };
        (rest, self.offset + done as u64)
    }

    /// Takes note of `count` more bytes moved; true when the piece is complete.
    ///
    /// # Errors
    /// `UnexpectedEof` or `WriteZero` if no progress is possible, so that nobody can spin.
    pub fn advance(&mut self, count: usize) -> io::Result<bool> {
        if self.done + count >= self.needed {
            if let Place::ReadBounced { buf, skip, out } = &mut self.place {
                out.copy_from_slice(&buf[*skip..*skip + out.len()]);
            }
            return Ok(true);
        }
        // Direct I/O can only go on at a multiple of the granule. Ending in the middle of one
        // twice means that there is no more.
        let done = round_down((self.done + count) as u64, self.granule) as usize;
        if done == self.done {
            return Err(match self.place {
                Place::Read(_) | Place::ReadBounced { .. } => unexpected_eof(self.offset),
                Place::Write(_) | Place::WriteBounced(_) => io::ErrorKind::WriteZero.into(),
            });
        }
        self.done = done;
        Ok(false)
    }

    /// Moves the whole piece with blocking calls.
    pub fn transfer(mut self, file: &File) -> io::Result<()> {
        while !self.transfer_some(file)? {}
        Ok(())
    }

    /// Moves what one blocking call moves; whether that was all.
    pub fn transfer_some(&mut self, file: &File) -> io::Result<bool> {
        let result = match self.remaining() {
            (Remaining::Read(buf), offset) => file.read_at(buf, offset),
            (Remaining::Write(buf), offset) => file.write_at(buf, offset),
        };
        match result {
            Ok(count) => self.advance(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// What is still to be filled or written.
pub(super) enum Remaining<'a> {
    Read(&'a mut [u8]),
    Write(&'a [u8]),
}

/// The pieces of all reads; those that do not fit the alignment are widened and bounced.
pub(super) fn of_reads<'a>(
    requests: &'a mut [ReadRequest<'_>],
    alignment: Alignment,
) -> impl Iterator<Item = Piece<'a>> {
    requests.iter_mut().flat_map(move |request| {
        let mut offset = request.offset;
        let direct = alignment.fits(offset, request.buf);
        let mut rest: &'a mut [u8] = request.buf;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (len, start) = piece_range(rest.len(), offset, direct, alignment);
            let (out, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            let skip = (offset - start) as usize;
            offset += len as u64;
            let needed = skip + len;
            let place = if direct {
                Place::Read(out)
            } else {
                let buf = AlignedBuf::zeroed(needed.next_multiple_of(alignment.offset));
                Place::ReadBounced { buf, skip, out }
            };
            Some(Piece { place, offset: start, needed, done: 0, granule: alignment.offset })
        })
    })
}

/// The pieces of all writes, whose offsets and lengths fit already; memory that does not fit is
/// bounced.
pub(super) fn of_writes<'a>(
    requests: &'a [WriteRequest<'_>],
    alignment: Alignment,
) -> impl Iterator<Item = Piece<'a>> {
    requests.iter().flat_map(move |request| {
        let mut offset = request.offset;
        let direct = alignment.fits(offset, request.buf);
        let mut rest: &'a [u8] = request.buf;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (len, start) = piece_range(rest.len(), offset, direct, alignment);
            let (bytes, after) = rest.split_at(len);
            rest = after;
            offset += len as u64;
            let place = if direct {
                Place::Write(bytes)
            } else {
                Place::WriteBounced(AlignedBuf::copy_of(bytes))
            };
            Some(Piece { place, offset: start, needed: len, done: 0, granule: alignment.offset })
        })
    })
}

/// Bytes the next piece takes of a request, and where on the storage it starts.
fn piece_range(rest: usize, offset: u64, direct: bool, alignment: Alignment) -> (usize, u64) {
    if direct {
        return (rest.min(PIECE_MAX_BYTES), offset);
    }
    let start = round_down(offset, alignment.offset);
    let skip = (offset - start) as usize;
    (rest.min(BOUNCE_MAX_BYTES.max(alignment.offset) - skip), start)
}

/// The error of a read past the end.
pub(super) fn unexpected_eof(offset: u64) -> io::Error {
    let text = format!("the storage ends inside the read at byte {offset}");
    io::Error::new(io::ErrorKind::UnexpectedEof, text)
}

/// Whether `value` is a multiple of `granule`, a power of two.
pub(super) fn is_multiple(value: u64, granule: usize) -> bool {
    value & (granule as u64 - 1) == 0
}

/// `value` rounded down to a multiple of `granule`, a power of two.
pub(super) fn round_down(value: u64, granule: usize) -> u64 {
    value & !(granule as u64 - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Alignment = Alignment { offset: 4096, memory: 512 };

    fn shapes(offset: u64, buf: &mut [u8]) -> Vec<(u64, usize, usize, bool)> {
        let mut requests = [ReadRequest { offset, buf }];
        let mut shapes = Vec::new();
        for mut piece in of_reads(&mut requests, DISK) {
            let needed = piece.needed;
            let bounced = matches!(piece.place, Place::ReadBounced { .. });
            let (Remaining::Read(rest), at) = piece.remaining() else { unreachable!() };
            assert_eq!(at % 4096, 0);
            assert_eq!(rest.len() % 4096, 0);
            assert_eq!(rest.as_ptr().addr() % 512, 0);
            shapes.push((at, rest.len(), needed, bounced));
        }
        shapes
    }

    #[test]
    fn reads_are_widened_to_the_granule() {
        let mut buf = AlignedBuf::zeroed(1 << 20);
        assert_eq!(shapes(8192, &mut buf[..8192]), [(8192, 8192, 8192, false)]);
        assert_eq!(shapes(8192, &mut buf[..512]), [(8192, 4096, 512, true)]);
        assert_eq!(shapes(512, &mut buf[..4096]), [(0, 8192, 4608, true)]);
        assert_eq!(shapes(4096, &mut buf[1..4097]), [(4096, 4096, 4096, true)]);
        let long = shapes(512, &mut buf[..600 << 10]);
        let bounce = BOUNCE_MAX_BYTES as u64;
        assert_eq!(long[0], (0, BOUNCE_MAX_BYTES, BOUNCE_MAX_BYTES, true));
        assert_eq!(long[1], (bounce, BOUNCE_MAX_BYTES, BOUNCE_MAX_BYTES, true));
        assert_eq!(long[2].0, 2 * bounce);
        assert_eq!(long.len(), 3);
    }

    #[test]
    fn short_transfers_go_on_at_the_granule_and_end_at_the_end() {
        let mut buf = AlignedBuf::zeroed(16384);
        let mut requests = [ReadRequest { offset: 4096, buf: &mut buf }];
        let mut piece = of_reads(&mut requests, DISK).next().unwrap();
        assert!(!piece.advance(5000).unwrap());
        assert_eq!(piece.remaining().1, 8192);
        assert!(!piece.advance(4096).unwrap());
        assert_eq!(piece.remaining().1, 12288);
        assert_eq!(piece.advance(100).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(piece.advance(0).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(piece.advance(8192).unwrap());

        let bytes = [1; 8192];
        let requests = [WriteRequest { offset: 0, buf: &bytes }];
        let mut piece = of_writes(&requests, Alignment::NONE).next().unwrap();
        assert!(!piece.advance(5000).unwrap());
        assert_eq!(piece.remaining().1, 5000);
        assert_eq!(piece.advance(0).unwrap_err().kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn a_widened_read_may_end_early_but_not_before_what_was_asked() {
        let mut buf = [9; 512];
        let mut requests = [ReadRequest { offset: 512, buf: &mut buf }];
        let mut piece = of_reads(&mut requests, DISK).next().unwrap();
        assert_eq!(piece.advance(1023).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(piece.advance(1024).unwrap());
        drop(piece);
        assert_eq!(buf, [0; 512]);
    }
}
