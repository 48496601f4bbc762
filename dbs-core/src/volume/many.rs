//! Many small reads in one call: one look at the metadata and one batch of device reads for all of
//! them, where a loop of [`Volume::read_at`] would wait for each.

use super::{Volume, blocks_of};
use crate::error::Result;
use crate::io::ReadRequest;
use crate::meta::plan::ReadPiece;
use crate::store::Inner;
use crate::units::BLOCK_BYTES;

/// Most reads planned under one hold of the metadata lock, so that others get their turn.
const READS_PER_STEP: usize = 256;

/// One of many reads.
#[derive(Debug)]
pub struct ReadPart<'a> {
    /// Offset in the volume in bytes.
    pub offset: u64,
    /// Filled completely on success.
    pub buf: &'a mut [u8],
}

/// A number of the fence, given back whatever happens.
struct Fenced<'a> {
    store: &'a Inner,
    id: u64,
}

impl Drop for Fenced<'_> {
    fn drop(&mut self) {
        self.store.meta().fence.end(self.id);
        self.store.wake();
    }
}

impl Volume {
    /// Fills the buffers of all `reads`, in any order and at once. They see the volume at one
    /// moment each, not all at the same.
    ///
    /// # Errors
    /// `Invalid` if one is outside the volume or unaligned, `Io`; the buffers are then undefined.
    pub fn read_many(&self, reads: &mut [ReadPart<'_>]) -> Result<()> {
        {
            // Before anything is read; each step looks again, as the size may change meanwhile.
            let meta = self.store().meta();
            for read in &*reads {
                self.check_range_in(&meta, read.offset, read.buf.len() as u64)?;
            }
        }
        let mut rest = reads;
        while !rest.is_empty() {
            let (step, after) = rest.split_at_mut(self.reads_in_step(rest));
            self.read_step(step)?;
            rest = after;
        }
        Ok(())
    }

    /// How many of `reads`, at least one, are planned at once.
    fn reads_in_step(&self, reads: &[ReadPart<'_>]) -> usize {
        let limit = self.step_bytes();
        let mut bytes = 0_usize;
        let fits = |read: &&ReadPart<'_>| {
            bytes = bytes.saturating_add(read.buf.len());
            bytes <= limit
        };
        reads.iter().take(READS_PER_STEP).take_while(fits).count().max(1)
    }

    fn read_step(&self, reads: &mut [ReadPart<'_>]) -> Result<()> {
        let store = self.store();
        // Pieces of all reads one after the other, and how many are of each.
        let (mut pieces, mut counts) = (Vec::with_capacity(reads.len()), Vec::new());
        let fence = {
            let mut meta = store.meta();
            let source = self.source(&meta);
            let mut found = Vec::new();
            for read in &*reads {
                let length = read.buf.len() as u64;
                self.check_range_in(&meta, read.offset, length)?;
                meta.requests += 1;
                found.clear();
                if length > 0 {
                    meta.plan_read(source, blocks_of(read.offset, length), &mut found)?;
                }
                counts.push(found.len());
                pieces.append(&mut found);
            }
            let any = pieces.iter().any(|piece| piece.address.is_some());
            any.then(|| Fenced { store, id: meta.fence.begin() })
        };
        let mut transfers = Vec::with_capacity(pieces.len());
        let mut pieces = pieces.into_iter();
        for (read, count) in reads.iter_mut().zip(counts) {
            lay_out(read, pieces.by_ref().take(count), &mut transfers);
        }
        let Some(fence) = fence else { return Ok(()) };
        let outcome = store.read_data(&mut transfers, fence.id);
        outcome.map_err(|fault| {
            store.read_error(fault, || format!("reading `{}` failed", self.spec()))
        })
    }
}

/// Turns the pieces of a read into transfers; what is a hole is zeroed here.
fn lay_out<'a>(
    read: &'a mut ReadPart<'_>,
    pieces: impl Iterator<Item = ReadPiece>,
    transfers: &mut Vec<ReadRequest<'a>>,
) {
    // The first block may begin before the read, the last one end behind it.
    let mut skip = read.offset % BLOCK_BYTES;
    let mut rest = &mut *read.buf;
    for piece in pieces {
        let length = (piece.blocks * BLOCK_BYTES - skip).min(rest.len() as u64) as usize;
        let (part, after) = rest.split_at_mut(length);
        match piece.address {
            Some(address) => transfers.push(ReadRequest { offset: address + skip, buf: part }),
            None => part.fill(0),
        }
        (rest, skip) = (after, 0);
    }
}
