//! Many small reads in one call: one look at the metadata and one batch of device reads for all of
//! them, where a loop of [`Volume::read_at`] would wait for each.

use super::Volume;
use crate::error::Result;

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
            self.read_parts(step, true)?;
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
}
