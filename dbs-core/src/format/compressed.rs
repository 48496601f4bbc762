//! Compressed extents: an index in their first block, then frames of 16 KiB, each compressed by itself.

use super::crc::crc32c;
use crate::io::buffer::AlignedBuf;
use crate::limits::EXTENT_MAX_BYTES;
use crate::units::BLOCK_BYTES;
use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use std::ops::Range;
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What is compressed together: so much is expanded for a read of one block.
pub const FRAME_BYTES: usize = 16 << 10;
/// First bytes of an index.
const MAGIC: [u8; 4] = *b"DBSi";
/// In the low half of the state of an entry: LZ4, in the block format.
const METHOD_LZ4: u32 = 1;
const BLOCK: usize = BLOCK_BYTES as usize;

/// Beginning of an index.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IndexHeader {
    pub(super) magic: [u8; 4],
    pub(super) crc: U32,
    pub(super) frames: U32,
    pub(super) reserved: U32,
}

/// A frame in an index.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IndexFrame {
    pub(super) crc: U32,
    pub(super) length: U16,
    pub(super) reserved: U16,
}

const HEADER: usize = size_of::<IndexHeader>();
const FRAMES_MAX: usize = EXTENT_MAX_BYTES as usize / FRAME_BYTES;
const _: () = assert!(HEADER + FRAMES_MAX * size_of::<IndexFrame>() <= BLOCK);

/// The state of the entry of an extent of which so many blocks are stored.
#[must_use]
pub fn state_of(stored: u16) -> u32 {
    u32::from(stored) << 16 | METHOD_LZ4
}

/// The blocks that are stored of an extent of `blocks` blocks whose entry has this state; `None` if that cannot be.
#[must_use]
pub fn stored_by(state: u32, blocks: u32) -> Option<u16> {
    let stored = state >> 16;
    (state & 0xffff == METHOD_LZ4 && stored > 1 && stored < blocks).then_some(stored as u16)
}

/// Where the frames of a compressed extent lie, and what each of them is when it is expanded.
#[derive(Debug)]
pub struct Index {
    /// Byte in the extent, and bytes; CRC32C of what comes out.
    frames: Vec<(Range<usize>, u32)>,
}

impl Index {
    /// From the first block of an extent of `extent` bytes, of which so many are `stored`; `None` if it is none.
    #[must_use]
    pub fn decode(block: &[u8], extent: usize, stored: usize) -> Option<Self> {
        let (header, rest) = IndexHeader::read_from_prefix(block.get(..BLOCK)?).ok()?;
        let mut zeroed = [0; BLOCK];
        zeroed.copy_from_slice(&block[..BLOCK]);
        zeroed[4..8].fill(0);
        let count = extent / FRAME_BYTES;
        if header.magic != MAGIC
            || header.crc.get() != crc32c(&zeroed)
            || header.frames.get() as usize != count
        {
            return None;
        }
        let (mut frames, mut at) = (Vec::with_capacity(count), BLOCK);
        for frame in rest.chunks_exact(size_of::<IndexFrame>()).take(count) {
            let frame = IndexFrame::read_from_bytes(frame).ok()?;
            let length = usize::from(frame.length.get());
            if length > FRAME_BYTES || at + length > stored {
                return None;
            }
            frames.push((at..at + length, frame.crc.get()));
            at += length;
        }
        Some(Self { frames })
    }

    /// The bytes of the extent in which these frames lie.
    #[must_use]
    pub fn place(&self, frames: &Range<usize>) -> Range<usize> {
        let frames = &self.frames[frames.clone()];
        let ends = frames.first().zip(frames.last());
        ends.map_or(0..0, |((first, _), (last, _))| first.start..last.end)
    }

    /// Expands a frame into `out`, of [`FRAME_BYTES`]; `stored` are the bytes of the extent from `from` on. `false`
    /// if it is not what was compressed.
    #[must_use]
    pub fn expand(&self, frame: usize, stored: &[u8], from: usize, out: &mut [u8]) -> bool {
        let (place, crc) = &self.frames[frame];
        let Some(bytes) = stored.get(place.start - from..place.end - from) else { return false };
        match bytes.len() {
            0 => out.fill(0),
            FRAME_BYTES => out.copy_from_slice(bytes),
            _ => match decompress_into(bytes, out) {
                Ok(FRAME_BYTES) => {}
                _ => return false,
            },
        }
        crc32c(out) == *crc
    }
}

/// Compresses a whole extent to at most `most` blocks, index and all; `None` if that does not do.
#[must_use]
pub fn compress(extent: &[u8], most: usize) -> Option<AlignedBuf> {
    let mut out = AlignedBuf::zeroed(most * BLOCK);
    let mut frame = vec![0; get_maximum_output_size(FRAME_BYTES)];
    let (mut index, mut at) = (Vec::new(), BLOCK);
    for content in extent.chunks_exact(FRAME_BYTES) {
        let bytes = match compress_into(content, &mut frame).ok()? {
            _ if content.iter().all(|byte| *byte == 0) => &[],
            length if length < FRAME_BYTES => &frame[..length],
            _ => content,
        };
        out.get_mut(at..at + bytes.len())?.copy_from_slice(bytes);
        at += bytes.len();
        let (crc, length) = (crc32c(content).into(), (bytes.len() as u16).into());
        index.extend_from_slice(IndexFrame { crc, length, reserved: 0.into() }.as_bytes());
    }
    let frames = ((extent.len() / FRAME_BYTES) as u32).into();
    let header = IndexHeader { magic: MAGIC, crc: 0.into(), frames, reserved: 0.into() };
    out.get_mut(..HEADER)?.copy_from_slice(header.as_bytes());
    out[HEADER..HEADER + index.len()].copy_from_slice(&index);
    let crc = crc32c(&out[..BLOCK]);
    out[4..8].copy_from_slice(&crc.to_le_bytes());
    // No state says less than that.
    Some(AlignedBuf::copy_of(&out[..at.next_multiple_of(BLOCK).max(2 * BLOCK)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: usize = 64 << 10;

    fn expanded(stored: &[u8]) -> Option<Vec<u8>> {
        let index = Index::decode(stored, EXTENT, stored.len())?;
        let mut out = vec![1; EXTENT];
        let whole = index.place(&(0..EXTENT / FRAME_BYTES));
        for (at, out) in out.chunks_exact_mut(FRAME_BYTES).enumerate() {
            if !index.expand(at, stored.get(whole.clone())?, whole.start, out) {
                return None;
            }
        }
        Some(out)
    }

    #[test]
    fn what_is_compressed_comes_back_and_what_is_damaged_does_not() {
        let mut rng = fastrand::Rng::with_seed(7);
        // A frame of noise, one of zeros, and what repeats itself.
        let line: [u8; 64] = std::array::from_fn(|_| rng.u8(..));
        let mut extent = line.repeat(EXTENT / line.len());
        extent[..FRAME_BYTES].fill_with(|| rng.u8(..));
        extent[FRAME_BYTES..2 * FRAME_BYTES].fill(0);
        let stored = compress(&extent, 12).unwrap();
        assert_eq!(stored.len(), 6 * BLOCK);
        assert_eq!(expanded(&stored).unwrap(), extent);
        assert!(compress(&extent, 5).is_none());
        let used = Index::decode(&stored, EXTENT, stored.len()).unwrap().place(&(0..4)).end;
        for at in (0..HEADER + 32).chain((BLOCK..used).step_by(7)) {
            let mut damaged = stored.to_vec();
            damaged[at] ^= 0x10;
            assert_eq!(expanded(&damaged), None, "byte {at}");
        }
        // Lengths that a hostile image may have, with a right checksum.
        for length in [FRAME_BYTES as u16 + 1, u16::MAX, 9000] {
            let mut hostile = stored.to_vec();
            hostile[HEADER + 12..HEADER + 14].copy_from_slice(&length.to_le_bytes());
            hostile[4..8].fill(0);
            let crc = crc32c(&hostile[..BLOCK]);
            hostile[4..8].copy_from_slice(&crc.to_le_bytes());
            assert_eq!(expanded(&hostile), None, "{length}");
        }
        assert!(Index::decode(&stored[..100], EXTENT, stored.len()).is_none());
        assert!(Index::decode(&stored, 2 * EXTENT, stored.len()).is_none());
        // The entry says how many blocks are stored: a vacuum moves no more.
        assert!(Index::decode(&stored, EXTENT, used).is_some());
        assert!(Index::decode(&stored, EXTENT, used - 1).is_none());
    }

    #[test]
    fn an_extent_of_zeros_takes_two_blocks() {
        let stored = compress(&[0; EXTENT], 12).unwrap();
        assert_eq!(stored.len(), 2 * BLOCK);
        assert_eq!(expanded(&stored).unwrap(), [0; EXTENT]);
        assert_eq!(stored_by(state_of(2), 16), Some(2));
        for state in [0, 1, 2 << 16, 1 << 16 | 1, 16 << 16 | 1, 2 << 16 | 2] {
            assert_eq!(stored_by(state, 16), None, "{state:#x}");
        }
    }
}
