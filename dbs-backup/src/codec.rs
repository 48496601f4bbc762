//! How blocks are compressed, and proven when they are read.
//!
//! Source: upstream's `util/util.go` and `util.go` (longhorn/backupstore, commit `ab5179e`).

use crate::names::{BlockName, plain};
use dbs_core::{Error, Result};
use flate2::read::MultiGzDecoder;
use flate2::{Compression, GzBuilder};
use lz4_flex::frame::{BlockMode, BlockSize, FrameDecoder, FrameEncoder, FrameInfo};
use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::str::FromStr;

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

    /// Exactly `size` bytes.
    fn decompress(self, stored: &[u8], size: u64) -> io::Result<Vec<u8>> {
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
        Err(io::Error::other(format!("it has another size than {size} bytes")))
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
fn lz4(block: &[u8]) -> io::Result<Vec<u8>> {
    let info = FrameInfo::new()
        .block_size(BlockSize::Max4MB)
        .block_mode(BlockMode::Independent)
        .content_checksum(true);
    let mut encoder = FrameEncoder::with_frame_info(info, Vec::with_capacity(room(block)));
    encoder.write_all(block)?;
    encoder.finish().map_err(io::Error::other)
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
