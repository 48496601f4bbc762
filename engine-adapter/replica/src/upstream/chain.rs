//! Upstream's chain of files, with the backing image below it, as one image: a volume rests on it until their content is in the
//! store.

use super::files::Files;
use crate::replica::KIND;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Backing, Error, Result};
use longhorn_sync::image::open_to_map;
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

/// Blocks that are samples, of all images together.
const SAMPLES: u64 = 256;
/// Files of at most so many bytes are read as a whole.
const SMALL: u64 = 64 << 10;

/// The head and what it builds on, as they were when the volume was made on them.
pub struct Chain {
    dir: PathBuf,
    identity: String,
    size: u64,
    /// The head comes first.
    images: Vec<Image>,
    /// What shows where none of them has anything.
    below: Option<Arc<dyn Backing>>,
}

struct Image {
    file: File,
    size: u64,
}

impl Chain {
    /// Opens the images, which may lie on a backing image.
    ///
    /// # Errors
    /// `Io`.
    pub fn open(files: &Files, below: Option<Arc<dyn Backing>>) -> Result<Self> {
        let mut images = Vec::new();
        let mut disk = files.meta.head.as_str();
        while let Some(meta) = files.disks.get(disk) {
            let path = files.image(disk);
            let opened = open_to_map(&path)
                .and_then(|file| Ok(Image { size: file.metadata()?.len(), file }))
                .map_err(|e| Error::io(e, format!("opening `{}`", path.display())))?;
            images.push(opened);
            disk = &meta.parent;
        }
        let mut identity = identity(files)
            .map_err(|e| Error::io(e, format!("reading files in `{}`", files.dir.display())))?;
        if let Some(below) = &below {
            identity = format!("{identity}; below them: {}", below.identity());
        }
        Ok(Self { dir: files.dir.clone(), identity, size: files.meta.size, images, below })
    }
}

impl Backing for Chain {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn name(&self) -> String {
        format!("`{}`", self.dir.display())
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        // What no image so far has.
        let mut missing: Vec<_> = std::iter::once(offset..offset + buf.len() as u64).collect();
        for image in &self.images {
            let mut below = Vec::new();
            for range in missing {
                let start = (range.start - offset) as usize;
                let part = &mut buf[start..start + (range.end - range.start) as usize];
                image.read(range, part, &mut below)?;
            }
            missing = below;
            if missing.is_empty() {
                return Ok(());
            }
        }
        for range in missing {
            let part = &mut buf[(range.start - offset) as usize..(range.end - offset) as usize];
            self.read_below(range.start, part)?;
        }
        Ok(())
    }
}

impl Chain {
    /// Reads what no image has: zeros where the backing image ends, or there is none.
    fn read_below(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let size = self.below.as_ref().map_or(0, |below| below.size());
        let inside = size.saturating_sub(offset).min(buf.len() as u64) as usize;
        let (buf, behind) = buf.split_at_mut(inside);
        behind.fill(0);
        match &self.below {
            Some(below) if !buf.is_empty() => below.read_at(offset, buf),
            _ => Ok(()),
        }
    }
}

impl Image {
    /// Reads what it has of a range, and adds what it has not to `holes`. A block of which it has a part is its own.
    fn read(
        &self,
        range: Range<u64>,
        buf: &mut [u8],
        holes: &mut Vec<Range<u64>>,
    ) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let begin = at;
            // Asked block by block: where a long run of data ends may take the file system long to find out.
            let mut block = at - at % BLOCK_BYTES;
            let mut data = self.next_data(block)?;
            while at < range.end && data < block + BLOCK_BYTES {
                block += BLOCK_BYTES;
                at = block.min(range.end);
                data = if at < range.end { self.next_data(block)? } else { data };
            }
            let held = (at - begin) as usize;
            let from = (begin - range.start) as usize;
            self.fill(begin, &mut buf[from..from + held])?;
            if at < range.end {
                let end = (data - data % BLOCK_BYTES).min(range.end);
                holes.push(at..end);
                at = end;
            }
        }
        Ok(())
    }

    /// Where data begins from an offset on; far behind the end if there is none.
    fn next_data(&self, offset: u64) -> io::Result<u64> {
        if offset >= self.size {
            return Ok(u64::MAX);
        }
        match lseek(&self.file, offset.cast_signed(), Whence::SeekData) {
            Ok(at) => Ok(at.cast_unsigned()),
            // Or it ends before that: it was cut. What is below is not what it held then.
            Err(Errno::ENXIO) if self.file.metadata()?.len() < self.size => {
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            Err(Errno::ENXIO) => Ok(u64::MAX),
            Err(e) => Err(e.into()),
        }
    }

    /// Reads; behind its end are zeros.
    fn fill(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let inside = self.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        let (buf, behind) = buf.split_at_mut(inside);
        behind.fill(0);
        self.file.read_exact_at(buf, offset)
    }
}

/// What tells these files from others, and from what they would be if one of them was written to: their names, sizes and times,
/// and parts of their content.
fn identity(files: &Files) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let samples = (SAMPLES / files.disks.len().max(1) as u64).max(1);
    let mut bytes = 0;
    for name in files.names() {
        let file = open_to_map(&files.dir.join(name))?;
        let m = file.metadata()?;
        let image = Image { file, size: m.len() };
        bytes += image.size;
        let facts = format!("{name}\n{} {}.{:09}\n", image.size, m.mtime(), m.mtime_nsec());
        hasher.update(facts.as_bytes());
        let blocks = image.size.div_ceil(BLOCK_BYTES);
        let count = if image.size <= SMALL { blocks } else { samples };
        for sample in 0..count {
            // Where a file has nothing are zeros; see `open_to_map` for why that is not read.
            let mut part = [0; BLOCK_BYTES as usize];
            let at =
                (u128::from(sample) * u128::from(blocks) / u128::from(count)) as u64 * BLOCK_BYTES;
            if image.next_data(at)? < at + BLOCK_BYTES {
                image.fill(at, &mut part)?;
            }
            hasher.update(&part);
        }
    }
    let hash = hasher.finalize().to_hex();
    Ok(format!(
        "{KIND}, {} of {bytes} bytes, BLAKE3 of names, times and parts {hash}",
        files.names().len()
    ))
}
