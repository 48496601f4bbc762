//! Content of a volume that can be told from any other: each 4 KiB block holds its own number and
//! a version.

use crate::Outcome;
use dbs_core::Volume;
use dbs_core::io::buffer::AlignedBuf;

/// Bytes of a block.
pub const BLOCK: usize = 4096;
/// Blocks moved at once by [`Content::write_all`] and [`Content::verify`].
const STEP: u64 = 256;

/// What a volume should hold. Version 0 is zeros.
#[derive(Debug, Clone)]
pub struct Content {
    seed: u64,
    versions: Vec<u32>,
}

impl Content {
    /// An empty volume of so many blocks; `seed` tells volumes apart.
    #[must_use]
    pub fn new(seed: u64, blocks: u64) -> Self {
        Self { seed, versions: vec![0; blocks as usize] }
    }

    /// Blocks of the volume.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.versions.len() as u64
    }

    /// Writes the next version of `count` blocks from `first` on.
    ///
    /// # Errors
    /// Those of the write; the content is then as before.
    pub fn write(&mut self, volume: &Volume, first: u64, count: u64) -> dbs_core::Result<()> {
        let mut buffer = AlignedBuf::zeroed(count as usize * BLOCK);
        let range = first as usize..(first + count) as usize;
        for (block, bytes) in range.clone().zip(buffer.chunks_exact_mut(BLOCK)) {
            self.expected(block, self.versions[block] + 1, bytes);
        }
        volume.write_at(first * BLOCK as u64, &buffer, false)?;
        self.versions[range].iter_mut().for_each(|version| *version += 1);
        Ok(())
    }

    /// Writes every block, in order, until the end or the first error.
    ///
    /// # Errors
    /// Those of the writes; what was written before is remembered.
    pub fn write_all(&mut self, volume: &Volume) -> dbs_core::Result<()> {
        let mut first = 0;
        while first < self.blocks() {
            let count = STEP.min(self.blocks() - first);
            self.write(volume, first, count)?;
            first += count;
        }
        Ok(())
    }

    /// Blocks that hold anything.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.versions.iter().filter(|version| **version > 0).count() as u64
    }

    /// Reads blocks and compares them.
    ///
    /// # Errors
    /// Those of the read, or the first block that differs.
    pub fn check(&self, volume: &Volume, first: u64, count: u64) -> Outcome<()> {
        let mut found = AlignedBuf::zeroed(count as usize * BLOCK);
        volume.read_at(first * BLOCK as u64, &mut found)?;
        let mut expected = vec![0; BLOCK];
        for (block, bytes) in (first as usize..).zip(found.chunks_exact(BLOCK)) {
            self.expected(block, self.versions[block], &mut expected);
            if bytes != expected {
                let version = self.versions[block];
                return Err(
                    format!("{}: block {block} is not version {version}", volume.spec()).into()
                );
            }
        }
        Ok(())
    }

    /// Compares the whole volume.
    ///
    /// # Errors
    /// As [`Content::check`].
    pub fn verify(&self, volume: &Volume) -> Outcome<()> {
        let mut first = 0;
        while first < self.blocks() {
            let count = STEP.min(self.blocks() - first);
            self.check(volume, first, count)?;
            first += count;
        }
        Ok(())
    }

    fn expected(&self, block: usize, version: u32, out: &mut [u8]) {
        if version == 0 {
            out.fill(0);
            return;
        }
        let mut word = [0; 16];
        word[..8].copy_from_slice(&(self.seed << 40 ^ block as u64).to_le_bytes());
        word[8..12].copy_from_slice(&version.to_le_bytes());
        word[12..].copy_from_slice(b"DBS.");
        out.chunks_exact_mut(16).for_each(|part| part.copy_from_slice(&word));
    }
}
