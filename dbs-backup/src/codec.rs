//! How blocks are compressed, and proven when they are read.
//!
//! Source: upstream's `util/util.go` and `util.go` (longhorn/backupstore, commit `ab5179e`).

use crate::names::{BlockName, plain};
use dbs_core::{Error, Result};
use flate2::read::MultiGzDecoder;
use flate2::{Compression, GzBuilder};
use lz4_flex::block;
use lz4_flex::frame::FrameDecoder;
use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::str::FromStr;
use twox_hash::XxHash32;

/// How an LZ4 frame with the settings of upstream's encoder begins: independent parts of up to 4 MiB, and a checksum of the
/// content at the end.
const LZ4_HEAD: [u8; 7] = [4, 0x22, 0x4d, 0x18, 0x64, 0x70, 0xb9];
/// Content of one part of a frame.
const LZ4_PART: usize = 4 << 20;
/// In the length of a part: it is not compressed.
const LZ4_PLAIN: u32 = 1 << 31;

/// A compression method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Method {
    /// Blocks as they are.
    None,
    /// The frame format of LZ4.
    #[default]
    Lz4,
    /// gzip.
    Gzip,
}

impl Method {
    const ALL: [Self; 3] = [Self::Lz4, Self::Gzip, Self::None];

    /// As it is in the facts of volumes and backups.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Gzip => "gzip",
        }
    }

    /// From the facts of volumes and backups, in which the oldest have nothing.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "none" => Ok(Self::None),
            "lz4" => Ok(Self::Lz4),
            "gzip" | "" => Ok(Self::Gzip),
            _ => {
                Err(Error::unsupported(format!("unsupported compression method: {}", plain(name))))
            }
        }
    }

    /// Compresses a block.
    pub(crate) fn compress(self, block: &[u8]) -> Result<Cow<'_, [u8]>> {
        let compressed = match self {
            Self::None => return Ok(Cow::Borrowed(block)),
            Self::Lz4 => lz4(block),
            Self::Gzip => gzip(block),
        };
        compressed.map(Cow::Owned).map_err(|e| Error::io(e, "compressing a block"))
    }

    /// Exactly `size` bytes. Checksums in what was stored may not be looked at: whoever asks compares the content with its
    /// name.
    pub(crate) fn decompress(self, stored: &[u8], size: u64) -> io::Result<Vec<u8>> {
        if let (Self::Lz4, Some((part, length))) = (self, only_part(stored)) {
            return plain_lz4(part, length, size as usize);
        }
        let mut block = Vec::with_capacity(size as usize);
        // One byte more shows that there is more.
        match self {
            Self::None => stored.take(size + 1).read_to_end(&mut block),
            Self::Lz4 => FrameDecoder::new(stored).take(size + 1).read_to_end(&mut block),
            Self::Gzip => MultiGzDecoder::new(stored).take(size + 1).read_to_end(&mut block),
        }?;
        if block.len() as u64 == size {
            return Ok(block);
        }
        Err(other_size(size))
    }
}

impl FromStr for Method {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|method| method.name() == text);
        found.ok_or_else(|| "write none, lz4 or gzip".to_owned())
    }
}

/// A frame with the settings of upstream's encoder.
fn lz4(content: &[u8]) -> io::Result<Vec<u8>> {
    let parts = content.len().div_ceil(LZ4_PART);
    let most = block::get_maximum_output_size(content.len().min(LZ4_PART)) + size_of::<u32>();
    let mut frame = vec![0; LZ4_HEAD.len() + parts * most + 2 * size_of::<u32>()];
    frame[..LZ4_HEAD.len()].copy_from_slice(&LZ4_HEAD);
    let mut end = LZ4_HEAD.len();
    let put = |frame: &mut [u8], end: &mut usize, word: u32| {
        frame[*end..*end + size_of::<u32>()].copy_from_slice(&word.to_le_bytes());
        *end += size_of::<u32>();
    };
    for part in content.chunks(LZ4_PART) {
        let at = end + size_of::<u32>();
        let length = block::compress_into(part, &mut frame[at..]).map_err(io::Error::other)?;
        // A part has at most 4 MiB.
        if length < part.len() {
            put(&mut frame, &mut end, length as u32);
            end += length;
        } else {
            put(&mut frame, &mut end, part.len() as u32 | LZ4_PLAIN);
            frame[end..end + part.len()].copy_from_slice(part);
            end += part.len();
        }
    }
    put(&mut frame, &mut end, 0);
    put(&mut frame, &mut end, XxHash32::oneshot(0, content));
    frame.truncate(end);
    Ok(frame)
}

/// The part of a frame that is as ours, if it is the only one, and its length with what that says.
fn only_part(frame: &[u8]) -> Option<(&[u8], u32)> {
    let (length, rest) = frame.strip_prefix(&LZ4_HEAD)?.split_first_chunk()?;
    let length = u32::from_le_bytes(*length);
    let (part, end) = rest.split_at_checked((length & !LZ4_PLAIN) as usize)?;
    // The end, and the checksum of the content.
    (end.len() == 2 * size_of::<u32>() && end.starts_with(&[0; 4])).then_some((part, length))
}

fn plain_lz4(part: &[u8], length: u32, size: usize) -> io::Result<Vec<u8>> {
    let block = if length & LZ4_PLAIN != 0 {
        part.to_vec()
    } else {
        let mut block = vec![0; size];
        let length = block::decompress_into(part, &mut block).map_err(io::Error::other)?;
        block.truncate(length);
        block
    };
    if block.len() == size { Ok(block) } else { Err(other_size(size as u64)) }
}

fn other_size(size: u64) -> io::Error {
    io::Error::other(format!("it has another size than {size} bytes"))
}

/// Room for what does not become smaller: growing step by step would take twice as much.
fn room(block: &[u8]) -> usize {
    block.len() + block.len() / 1024 + 64
}

/// A member with the header of upstream's encoder: no time, and no operating system.
fn gzip(block: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzBuilder::new()
        .operating_system(255)
        .write(Vec::with_capacity(room(block)), Compression::default());
    encoder.write_all(block)?;
    encoder.finish()
}

/// The content of a block that was read from the store: `size` bytes that have its name. Blocks of one volume can be
/// compressed in different ways, so any method is tried, `method` first.
///
/// # Errors
/// `Corrupt` with upstream's words for it.
pub(crate) fn open(stored: &[u8], method: Method, name: BlockName, size: u64) -> Result<Vec<u8>> {
    let mut first = None;
    for method in std::iter::once(method).chain(Method::ALL.into_iter().filter(|m| *m != method)) {
        let problem = match method.decompress(stored, size) {
            Ok(block) if BlockName::of(&block) == name => return Ok(block),
            Ok(_) => "its content is another".to_owned(),
            Err(error) => error.to_string(),
        };
        first.get_or_insert(problem);
    }
    let problem = first.unwrap_or_default();
    Err(Error::corrupt(format!("checksum verification failed for block {name}: {problem}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::ErrorKind;

    const SIZE: usize = 2 << 20;

    fn blocks() -> Vec<Vec<u8>> {
        let mut random = vec![0; SIZE];
        fastrand::Rng::with_seed(1).fill(&mut random);
        vec![vec![0; SIZE], random, b"abcd".repeat(SIZE / 4)]
    }

    #[test]
    fn round_trips_and_headers() {
        for block in blocks() {
            let name = BlockName::of(&block);
            for method in Method::ALL {
                let stored = method.compress(&block).unwrap();
                match method {
                    Method::Lz4 => assert_eq!(stored[..7], [4, 0x22, 0x4d, 0x18, 0x64, 0x70, 0xb9]),
                    Method::Gzip => {
                        assert_eq!(stored[..10], [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255])
                    }
                    Method::None => assert_eq!(*stored, *block),
                }
                for told in Method::ALL {
                    assert_eq!(open(&stored, told, name, SIZE as u64).unwrap(), block);
                }
            }
        }
    }

    /// The reader of frames checks what ours does not look at: the checksum of the content.
    #[test]
    fn frames_as_others_read_and_write_them() {
        let info = lz4_flex::frame::FrameInfo::new()
            .block_size(lz4_flex::frame::BlockSize::Max4MB)
            .block_mode(lz4_flex::frame::BlockMode::Independent)
            .content_checksum(true);
        let blocks = blocks();
        let large =
            [&blocks[1][..], &blocks[2], &blocks[0], &blocks[1], &blocks[2][..4096]].concat();
        for block in blocks.iter().chain([&large]) {
            let (ours, mut read) = (lz4(block).unwrap(), Vec::new());
            FrameDecoder::new(&ours[..]).read_to_end(&mut read).unwrap();
            assert!(read == *block);
            let mut theirs =
                lz4_flex::frame::FrameEncoder::with_frame_info(info.clone(), Vec::new());
            theirs.write_all(block).unwrap();
            let theirs = theirs.finish().unwrap();
            for frame in [&ours, &theirs] {
                assert_eq!(only_part(frame).is_some(), block.len() <= LZ4_PART);
                assert!(Method::Lz4.decompress(frame, block.len() as u64).unwrap() == *block);
                for other in [block.len() as u64 - 1, block.len() as u64 + 1] {
                    assert!(Method::Lz4.decompress(frame, other).is_err());
                }
            }
        }
    }

    #[test]
    fn damaged_blocks_are_found() {
        let block = &blocks()[2];
        let name = BlockName::of(block);
        for method in Method::ALL {
            let stored = method.compress(block).unwrap().into_owned();
            for at in [0, 5, stored.len() / 2] {
                let mut damaged = stored.clone();
                damaged[at] ^= 0x10;
                // A few bits of a header mean nothing for the content.
                if let Ok(read) = open(&damaged, method, name, SIZE as u64) {
                    assert_eq!(read, *block);
                }
                let error = open(&stored[..at], method, name, SIZE as u64).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                assert!(error.to_string().contains("checksum verification failed"));
            }
        }
    }

    /// A few bytes that become many take no more memory than a block.
    #[test]
    fn a_bomb_is_not_unpacked() {
        let large = vec![0; 16 << 20];
        for (method, bomb) in [(Method::Gzip, gzip(&large)), (Method::Lz4, lz4(&large))] {
            // Whoever unpacks all comes to the end, which is missing.
            let mut bomb = bomb.unwrap();
            bomb.truncate(bomb.len() - 6);
            let error = method.decompress(&bomb, SIZE as u64).unwrap_err();
            assert!(error.to_string().contains("another size"), "{method:?}: {error}");
            assert!(open(&bomb, method, BlockName::of(b""), SIZE as u64).is_err());
        }
    }
}
