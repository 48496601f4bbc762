//! Bytes of a backup that are in several blocks, or in none.

use crate::content;
use dbs_backup::read::{OpenBackup, Piece, Place, Reader};
use dbs_core::{Error, Result};
use std::sync::Arc;

/// A backup in which file systems are looked for.
pub struct Image<'a> {
    /// Reads it.
    pub reader: &'a Reader,
    /// Where.
    pub place: Place,
    /// The backup.
    pub backup: Arc<OpenBackup>,
}

impl content::Source for Image<'_> {
    fn size(&self) -> Result<u64> {
        Ok(self.backup.size())
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        fill(self.reader, &self.backup, &self.place, offset, buf)
    }
}

/// Fills a buffer with what is at `offset`.
pub fn fill(
    reader: &Reader,
    backup: &Arc<OpenBackup>,
    place: &Place,
    offset: u64,
    buffer: &mut [u8],
) -> Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let (at, left) = (offset + filled as u64, buffer.len() - filled);
        match put(&mut buffer[filled..], &reader.read(backup, place, at, left)?) {
            0 => return Err(Error::invalid("the volume ends before that")),
            more => filled += more,
        }
    }
    Ok(())
}

/// Puts a piece at the start of a buffer; returns its bytes.
pub fn put(buffer: &mut [u8], piece: &Piece) -> usize {
    match piece {
        Piece::Data(content, range) => {
            buffer[..range.len()].copy_from_slice(&content[range.clone()]);
            range.len()
        }
        Piece::Zeros(length) => {
            buffer[..*length].fill(0);
            *length
        }
    }
}
