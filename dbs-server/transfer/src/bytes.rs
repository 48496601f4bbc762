//! Any bytes of a volume, where [`BlockAccess`] knows whole sectors: for callers that think of a
//! volume as of a file.

use super::{BlockAccess, MapWalk};
use dbs_core::info::RangeState;
use dbs_core::units::SECTOR_BYTES;
use dbs_core::volume::ReadPart;
use dbs_core::{Error, Result};

const SECTOR: usize = SECTOR_BYTES as usize;

/// A range of bytes, cut where whole sectors begin and end.
struct Cut {
    /// Bytes in a sector that begins before the range.
    head: usize,
    /// Bytes of whole sectors.
    middle: usize,
    /// Bytes in a sector that ends behind the range.
    tail: usize,
}

impl Cut {
    fn new(offset: u64, length: usize) -> Self {
        let before = (offset % SECTOR_BYTES) as usize;
        let head = if before == 0 { 0 } else { (SECTOR - before).min(length) };
        let tail = (length - head) % SECTOR;
        Self { head, middle: length - head - tail, tail }
    }
}

/// Fills `buf` from `offset`, at any byte, in one turn.
///
/// # Errors
/// `Invalid` outside the volume, and those of the volume.
pub fn read_bytes_at(access: &dyn BlockAccess, offset: u64, buf: &mut [u8]) -> Result<()> {
    check_range(access.size(), offset, buf.len() as u64)?;
    if buf.is_empty() {
        return Ok(());
    }
    let cut = Cut::new(offset, buf.len());
    if cut.head == 0 && cut.tail == 0 {
        return access.read_at(offset, buf);
    }
    let before = (offset % SECTOR_BYTES) as usize;
    let (mut first, mut last) = ([0; SECTOR], [0; SECTOR]);
    let (head, rest) = buf.split_at_mut(cut.head);
    let (middle, tail) = rest.split_at_mut(cut.middle);
    let middle_offset = offset + cut.head as u64;
    let mut reads = Vec::with_capacity(3);
    if cut.head > 0 {
        reads.push(ReadPart { offset: offset - before as u64, buf: &mut first });
    }
    if cut.middle > 0 {
        reads.push(ReadPart { offset: middle_offset, buf: middle });
    }
    if cut.tail > 0 {
        reads.push(ReadPart { offset: middle_offset + cut.middle as u64, buf: &mut last });
    }
    access.read_many(&mut reads)?;
    head.copy_from_slice(&first[before..][..cut.head]);
    tail.copy_from_slice(&last[..cut.tail]);
    Ok(())
}

/// Makes any range of bytes read as zeros.
///
/// # Errors
/// `Invalid` outside the volume, and those of the volume.
pub fn zero_bytes_at(access: &dyn BlockAccess, offset: u64, length: u64) -> Result<()> {
    let zeros = [0; SECTOR];
    let head = (offset.wrapping_neg() % SECTOR_BYTES).min(length);
    let tail = (length - head) % SECTOR_BYTES;
    let middle = length - head - tail;
    check_range(access.size(), offset, length)?;
    if head > 0 {
        access.write_bytes_at(offset, &zeros[..head as usize])?;
    }
    if middle > 0 {
        access.write_zeroes(offset + head, middle)?;
    }
    if tail > 0 {
        access.write_bytes_at(offset + head + middle, &zeros[..tail as usize])?;
    }
    Ok(())
}

/// Gives up the content of the whole blocks inside any range of bytes.
///
/// # Errors
/// `Invalid` outside the volume, and those of the volume.
pub fn discard_bytes_at(access: &dyn BlockAccess, offset: u64, length: u64) -> Result<()> {
    check_range(access.size(), offset, length)?;
    let start = offset.next_multiple_of(SECTOR_BYTES);
    let end = (offset + length) / SECTOR_BYTES * SECTOR_BYTES;
    if start < end { access.discard(start, end - start) } else { Ok(()) }
}

/// The first byte at or behind `offset` that is data, or with `data` off none; the size if there is none.
/// Any offset will do.
pub fn find_bytes(access: &dyn BlockAccess, offset: u64, data: bool) -> Result<u64> {
    let size = access.size();
    let first = offset - offset % SECTOR_BYTES;
    let Some(length) = size.checked_sub(first) else { return Ok(size) };
    // Few are looked at before one fits: kinds of ranges take turns.
    for range in (MapWalk { limit: 1, ..MapWalk::new(access, first, length) }) {
        let range = range?;
        if (range.state == RangeState::Data) == data {
            return Ok(range.offset.max(offset).min(size));
        }
    }
    Ok(size)
}

/// Writes `buf` at any byte with functions that read and write whole sectors of a volume of `size`
/// bytes. Nobody else may change the sectors around the range meanwhile: see to that first.
pub fn write_around(
    size: u64,
    offset: u64,
    buf: &[u8],
    read: &dyn Fn(u64, &mut [u8]) -> Result<()>,
    write: &dyn Fn(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    check_range(size, offset, buf.len() as u64)?;
    let cut = Cut::new(offset, buf.len());
    let (head, rest) = buf.split_at(cut.head);
    let (middle, tail) = rest.split_at(cut.middle);
    let mut at = offset;
    for (part, whole) in [(head, false), (middle, true), (tail, false)] {
        if whole && !part.is_empty() {
            write(at, part)?;
        } else if !part.is_empty() {
            let mut sector = [0; SECTOR];
            let before = (at % SECTOR_BYTES) as usize;
            read(at - before as u64, &mut sector)?;
            sector[before..][..part.len()].copy_from_slice(part);
            write(at - before as u64, &sector)?;
        }
        at += part.len() as u64;
    }
    Ok(())
}

/// Checks the bytes, as the sectors around them are inside for more ranges.
fn check_range(size: u64, offset: u64, length: u64) -> Result<()> {
    if offset.checked_add(length).is_none_or(|end| end > size) {
        return Err(Error::invalid(format!(
            "range {offset}+{length} is outside the volume of {size} bytes"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::memory::Memory;
    use dbs_core::ErrorKind;

    #[test]
    fn any_range_as_in_memory() {
        const SIZE: usize = 8192;
        let volume = Memory::new(SIZE as u64);
        let mut model = vec![0_u8; SIZE];
        let mut random = fastrand::Rng::with_seed(11);
        for round in 0..2000 {
            let start = random.usize(..=SIZE);
            let longest = (SIZE - start).min(if random.bool() { 600 } else { 3000 });
            let part = start..start + random.usize(..=longest);
            let offset = start as u64;
            match random.u8(..4) {
                0 => {
                    model[part.clone()].fill_with(|| random.u8(..));
                    volume.write_bytes_at(offset, &model[part]).unwrap();
                }
                1 => {
                    model[part.clone()].fill(0);
                    zero_bytes_at(&volume, offset, part.len() as u64).unwrap();
                }
                _ => {
                    let mut buf = vec![1; part.len()];
                    read_bytes_at(&volume, offset, &mut buf).unwrap();
                    assert!(buf == model[part.clone()], "round {round}, {part:?}");
                }
            }
        }
    }

    #[test]
    fn outside_is_refused_to_the_byte() {
        let volume = Memory::new(8192);
        for (offset, length) in [(8192, 1), (8191, 2), (0, 8193), (u64::MAX, 1), (8193, 0)] {
            let mut buf = vec![0; length];
            let length = length as u64;
            for result in [
                read_bytes_at(&volume, offset, &mut buf),
                volume.write_bytes_at(offset, &buf),
                zero_bytes_at(&volume, offset, length),
                discard_bytes_at(&volume, offset, length),
            ] {
                assert_eq!(result.unwrap_err().kind(), ErrorKind::Invalid, "{offset}+{length}");
            }
        }
    }

    #[test]
    fn data_and_holes_are_found_from_any_byte_on() {
        const SIZE: u64 = 5 * 4096;
        let volume = Memory::new(SIZE);
        volume.write_bytes_at(4096, &[7; 8192]).unwrap();
        volume.write_zeroes(12288, 4096).unwrap();
        for (offset, data, found) in [
            (0, true, 4096),
            (5000, true, 5000),
            (13000, true, SIZE),
            (SIZE, true, SIZE),
            (u64::MAX, true, SIZE),
            (0, false, 0),
            (5000, false, 12288),
            (SIZE - 1, false, SIZE - 1),
            (SIZE, false, SIZE),
        ] {
            assert_eq!(find_bytes(&volume, offset, data).unwrap(), found, "{offset}, {data}");
        }
    }

    #[test]
    fn a_discard_keeps_what_is_around_it() {
        let volume = Memory::new(3 * 4096);
        volume.write_bytes_at(0, &[7; 3 * 4096]).unwrap();
        discard_bytes_at(&volume, 4095, 4098).unwrap();
        let mut buf = [0; 3 * 4096];
        read_bytes_at(&volume, 0, &mut buf).unwrap();
        assert_eq!((buf[4095], buf[4096], buf[8191], buf[8192]), (7, 0, 0, 7));
        discard_bytes_at(&volume, 1, 3).unwrap();
    }
}
