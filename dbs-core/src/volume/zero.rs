//! Making ranges of a volume read as zeros.

use super::{Finish, Volume};
use crate::error::{ErrorKind, Result};
use crate::limits::EXTENTS_PER_STEP;
use crate::sabotage::at_once;
use crate::store::Inner;
use crate::units::{BLOCK_BYTES, VolumeId};
use std::ops::Range;

impl Volume {
    /// Gives up the content of the whole blocks inside the range: they read as zeros afterwards,
    /// and space comes back. Partial blocks at the edges keep their content, and on a store whose
    /// spare entries are exhausted, or whose file system is full, so may blocks that a parent holds.
    ///
    /// # Errors
    /// `Invalid` outside the volume or unaligned, `ReadOnly`, `Poisoned`.
    pub fn discard(&self, offset: u64, length: u64) -> Result<()> {
        match self.discard_part(offset, length)? {
            Finish::Commit => self.store().commit(),
            Finish::Done => Ok(()),
        }
    }

    /// As [`Volume::discard`] for a part of a request that is carried out step by step: whoever
    /// answers the request commits first if one of its parts says so.
    ///
    /// # Errors
    /// As [`Volume::discard`].
    pub fn discard_part(&self, offset: u64, length: u64) -> Result<Finish> {
        self.check_writable(offset, length)?;
        let (_, must_commit) = self.zero_range(offset..offset + length, false)?;
        Ok(Finish::of(must_commit))
    }

    /// Makes the range read as zeros, to the byte.
    ///
    /// # Errors
    /// `Invalid` outside the volume or unaligned, `ReadOnly`, `NoSpace`, `Io`, `Poisoned`.
    pub fn write_zeroes(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        let finish = self.zero_part(offset, length)?;
        if finish == Finish::Commit || fua { self.store().commit() } else { Ok(()) }
    }

    /// As [`Volume::write_zeroes`] for a part of a request that is carried out step by step: whoever
    /// answers the request commits first if one of its parts says so.
    ///
    /// # Errors
    /// As [`Volume::write_zeroes`].
    pub fn zero_part(&self, offset: u64, length: u64) -> Result<Finish> {
        self.check_writable(offset, length)?;
        let end = offset + length;
        let (zeroed, mut must_commit) = self.zero_range(offset..end, true)?;
        let zeros = [0; BLOCK_BYTES as usize];
        let edges = if zeroed.is_empty() {
            [offset..end, 0..0]
        } else {
            [offset..zeroed.start, zeroed.end..end]
        };
        for part in edges.into_iter().flat_map(block_parts) {
            let zeros = &zeros[..(part.end - part.start) as usize];
            must_commit |= self.write_parts(part.start, zeros)?;
        }
        Ok(Finish::of(must_commit))
    }

    /// Makes the whole blocks of a range of bytes read as zeros, some extents at a time: the bytes that
    /// were, and whether a commit must follow.
    fn zero_range(&self, range: Range<u64>, must: bool) -> Result<(Range<u64>, bool)> {
        let per_extent = u64::from(self.store().meta().blocks_per_extent());
        let step = u64::from(at_once(EXTENTS_PER_STEP)) * per_extent;
        let first = range.start.div_ceil(BLOCK_BYTES);
        let (mut next, last) = (first, range.end.div_ceil(BLOCK_BYTES));
        let mut must_commit = false;
        while next < last {
            let to = last.min((next / step + 1) * step);
            let (reached, unsafe_now) = self.zero_step(next..to, range.end, must)?;
            must_commit |= unsafe_now;
            next = reached;
            if reached < to {
                break;
            }
        }
        Ok((first * BLOCK_BYTES..range.end.min(next * BLOCK_BYTES), must_commit))
    }

    /// One step: the block it got to, and whether a commit must follow. A block that the range ends in, at
    /// byte `end`, counts as whole if the volume ends there too. That is looked at with the block held,
    /// when the size stays: a volume that has grown meanwhile has content behind.
    fn zero_step(&self, blocks: Range<u64>, end: u64, must: bool) -> Result<(u64, bool)> {
        let (store, volume) = (self.store(), self.handle.volume);
        let _hold = store.hold(volume, blocks.clone(), true);
        self.check_inside(&store.shared(), &blocks)?;
        let partial = blocks.end * BLOCK_BYTES > end && self.size() != end;
        let to = blocks.end - u64::from(partial);
        let zeroed = store.step(|meta| meta.zero_blocks(volume, blocks.start..to, must));
        let zeroed = match zeroed {
            // Whoever discards must get on, on a full file system above all.
            Err(error) if !must && error.kind() == ErrorKind::NoSpace => {
                store.step(|meta| meta.zero_within_room(volume, blocks.start..to))
            }
            zeroed => zeroed,
        };
        Ok((to, zeroed?.1))
    }
}

impl Inner {
    /// Zeroes a volume's blocks from inside the store, whatever its size is at the moment: all behind which anything may
    /// show. The volume's I/O waits meanwhile, so it does not go on to an end that is far behind that.
    pub(crate) fn zero_behind(&self, volume: VolumeId, blocks: Range<u64>) -> Result<()> {
        let per_extent = u64::from(self.meta().blocks_per_extent());
        let step = u64::from(at_once(EXTENTS_PER_STEP)) * per_extent;
        let mut next = blocks.start;
        // In what is being rebuilt, layers below may get content later.
        let shows_more = |next| {
            let meta = self.meta();
            let logical = (next / per_extent) as u32;
            meta.is_rebuilding(volume) || meta.holds_behind(meta.volume(volume).head, logical)
        };
        while next < blocks.end && (next == blocks.start || shows_more(next)) {
            let end = blocks.end.min((next / step + 1) * step);
            self.step(|meta| meta.zero_blocks(volume, next..end, true))?;
            next = end;
        }
        Ok(())
    }
}

/// Splits a byte range at block borders.
fn block_parts(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut next = range.start;
    std::iter::from_fn(move || {
        let start = next;
        next = range.end.min((start / BLOCK_BYTES + 1) * BLOCK_BYTES);
        (start < range.end).then_some(start..next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{InitOptions, OpenOptions, Store};
    use crate::volume::Request;

    const END: u64 = 3 * BLOCK_BYTES + 512;

    /// Found by review: the end of the volume was rounded up before its last block was held. What was
    /// written behind the end of a volume that had grown by then was zeroed with it.
    #[test]
    fn a_volume_that_grows_amid_a_discard_keeps_what_is_behind_its_old_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", END).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &[1; END as usize], false).unwrap();
        // Both were planned when the volume ended at END, and get the blocks only now.
        store.resize_volume("v", 2 * END).unwrap();
        volume.write_at(END, &[2; 512], false).unwrap();
        for must in [false, true] {
            assert_eq!(volume.zero_step(0..4, END, must).unwrap().0, 3);
        }
        let mut found = [0; 2 * END as usize];
        volume.read_at(0, &mut found).unwrap();
        let (zeros, kept) = found[..END as usize + 512].split_at(3 * BLOCK_BYTES as usize);
        assert!(zeros.iter().all(|byte| *byte == 0) && kept[..512] == [1; 512]);
        assert_eq!(kept[512..], [2; 512], "what was written behind the old end");
        // To the byte, whole or not.
        volume.write_zeroes(512, END - 512, false).unwrap();
        volume.read_at(0, &mut found).unwrap();
        assert!(found[..END as usize].iter().all(|byte| *byte == 0));
        assert_eq!(found[END as usize..][..512], [2; 512]);
    }

    /// Found by review: a write was checked before the volume shrank and planned afterwards. A discard up to the
    /// end took its extent, as behind the end there is nothing, and the write's end recorded data in an
    /// extent that was free, or another volume's: the store did not open any more.
    #[test]
    fn what_was_checked_before_a_volume_shrank_is_refused_behind_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options =
            InitOptions { size: Some(64 << 20), extent_size: 64 << 10, ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", 10 * BLOCK_BYTES).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &[1; 10 * BLOCK_BYTES as usize], false).unwrap();
        store.resize_volume("v", 5 * BLOCK_BYTES).unwrap();
        let refused = |outcome: Result<()>| {
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("outside `v` of 20480 bytes"), "{error}");
        };
        let mut request = Request::new();
        refused(volume.wait_write(7..8, &mut request));
        volume.wait_hold(7..8, true, &mut request);
        refused(volume.plan_held(7..8, &mut request));
        refused(volume.zero_step(4..8, 8 * BLOCK_BYTES, true).map(drop));
        volume.wait_write(4..5, &mut request).unwrap();
        request.cancel();
        volume.discard(0, 5 * BLOCK_BYTES).unwrap();
        drop((request, volume));
        store.close().unwrap();
        Store::open(&path, &OpenOptions::default()).unwrap();
    }
}
