//! Giving back the space of data that is nothing but zeros.

use super::{ReadPart, Volume};
use crate::error::{Error, ErrorKind, Result};
use crate::info::TrimReport;
use crate::io::buffer::AlignedBuf;
use crate::meta::Meta;
use crate::meta::bits::Bits;
use crate::meta::entries::Away;
use crate::store::is_damage;
use crate::units::{BLOCK_BYTES, VolumeId};

/// Blocks of a volume extent, counted in it.
struct Extent {
    logical: u32,
    blocks: Bits,
}

impl Volume {
    /// Finds blocks of zeros in the data that the volume's head holds, and gives them up as
    /// [`Volume::discard`] does: they read as before, and space comes back. What snapshots hold is
    /// not looked at, as it never changes. With `dry_run` blocks are only found. Durable on return.
    ///
    /// Safe beside writers: the data is read with nothing held, and where there are zeros once more with
    /// their blocks held.
    ///
    /// # Errors
    /// `ReadOnly`, unless it only looks; `Io`, `Poisoned`; `Interrupted` if `progress` returns `false`:
    /// what was given up until then stays so.
    pub fn trim(
        &self,
        dry_run: bool,
        progress: &mut dyn FnMut(&TrimReport) -> bool,
    ) -> Result<TrimReport> {
        if !dry_run || self.handle.snapshot.is_some() {
            self.check_unlocked()?;
        }
        let extent_bytes = u64::from(self.store().meta().blocks_per_extent()) * BLOCK_BYTES;
        let mut buf = AlignedBuf::zeroed(extent_bytes as usize);
        let mut report = TrimReport::default();
        let mut next = 0;
        loop {
            let found = match self.next_own(next) {
                Err(error) if is_damage(&error) => {
                    // Nobody knows which of its blocks are data. A scrub says where.
                    let Some((logical, blocks)) = self.next_count(next) else { break };
                    report.unreadable += u64::from(blocks) * BLOCK_BYTES;
                    next = logical + 1;
                    continue;
                }
                found => found?,
            };
            let Some(extent) = found else { break };
            (report.done, report.total) = (u64::from(extent.logical) * extent_bytes, self.size());
            if !progress(&report) {
                self.end_trim(&report, dry_run)?;
                let text = "the trim was stopped; what it gave up stays given up";
                return Err(Error::new(ErrorKind::Interrupted, text));
            }
            next = extent.logical + 1;
            self.trim_extent(&extent, dry_run, &mut buf, &mut report)?;
        }
        report.total = self.size();
        report.done = report.total;
        self.end_trim(&report, dry_run)?;
        Ok(report)
    }

    /// Freed extents can be used again when that is durable.
    fn end_trim(&self, report: &TrimReport, dry_run: bool) -> Result<()> {
        if dry_run || report.zeros == 0 { Ok(()) } else { self.store().commit() }
    }

    fn trim_extent(
        &self,
        extent: &Extent,
        dry_run: bool,
        buf: &mut [u8],
        report: &mut TrimReport,
    ) -> Result<()> {
        if extent.blocks.is_empty() {
            return Ok(());
        }
        let bytes = |blocks: &Bits| u64::from(blocks.count()) * BLOCK_BYTES;
        let given_up = match if_readable(self.zeros_of(extent, buf))? {
            Some(found) if dry_run || found.blocks.is_empty() => {
                let whole = found.blocks == extent.blocks;
                Some((found.blocks, whole))
            }
            // It reads them again.
            Some(found) => self.give_up_zeros(&found, buf)?,
            None => None,
        };
        let Some((given_up, whole)) = given_up else {
            // No zeros, and a scrub says where.
            report.unreadable += bytes(&extent.blocks);
            return Ok(());
        };
        report.checked += bytes(&extent.blocks);
        report.zeros += bytes(&given_up);
        report.freed += if whole { buf.len() as u64 } else { 0 };
        Ok(())
    }

    /// Gives up those of the blocks that are still data of the head, and zeros, now that nobody writes
    /// them: these, and whether nothing of the extent is left; `None` if they cannot be read any more.
    fn give_up_zeros(&self, found: &Extent, buf: &mut [u8]) -> Result<Option<(Bits, bool)>> {
        let (store, volume) = (self.store(), self.ids().0);
        let first = self.store().meta().extent_blocks(found.logical).start;
        let runs = |blocks: &Bits| blocks.runs((buf.len() as u64 / BLOCK_BYTES) as u32);
        let (Some(start), Some(end)) = (
            runs(&found.blocks).next().map(|run| run.start),
            runs(&found.blocks).last().map(|run| run.end),
        ) else {
            return Ok(Some((Bits::default(), false)));
        };
        let absolute =
            |run: std::ops::Range<u32>| first + u64::from(run.start)..first + u64::from(run.end);
        let _hold = store.hold(volume, absolute(start..end), true);
        let Some(held) = if_readable(self.own(found.logical))? else { return Ok(None) };
        let Some(held) = held else { return Ok(Some((Bits::default(), false))) };
        let blocks = held.blocks.and(&found.blocks);
        let zeros = if_readable(self.zeros_of(&Extent { blocks, ..held }, buf))?;
        let Some(Extent { blocks: zeros, .. }) = zeros else { return Ok(None) };
        let give_up = |meta: &mut Meta, within_room: bool| {
            zeros.runs((buf.len() as u64 / BLOCK_BYTES) as u32).try_for_each(
                |run| match within_room {
                    true => meta.zero_within_room(volume, absolute(run)),
                    false => meta.zero_blocks(volume, absolute(run), false),
                },
            )
        };
        match store.step(|meta| give_up(meta, false)) {
            // As a discard, it must get on where space is needed most.
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                store.step(|meta| give_up(meta, true))?;
            }
            done => drop(done?),
        }
        // They are given up, whatever can be read of the others now.
        let left = if_readable(self.own(found.logical))?;
        let is_empty = |left: Option<Extent>| left.is_none_or(|left| left.blocks.is_empty());
        Ok(Some((zeros, left.is_some_and(is_empty))))
    }

    /// Those of the blocks that hold zeros.
    fn zeros_of(&self, extent: &Extent, buf: &mut [u8]) -> Result<Extent> {
        let per_extent = (buf.len() as u64 / BLOCK_BYTES) as u32;
        let first = u64::from(extent.logical) * buf.len() as u64;
        let mut parts = Vec::new();
        let (mut rest, mut at) = (&mut buf[..], 0);
        for run in extent.blocks.runs(per_extent) {
            let range =
                run.start as usize * BLOCK_BYTES as usize..run.end as usize * BLOCK_BYTES as usize;
            let (part, after) = rest[range.start - at..].split_at_mut(range.len());
            parts.push(ReadPart { offset: first + range.start as u64, buf: part });
            (rest, at) = (after, range.end);
        }
        self.read_parts(&mut parts, false)?;
        let mut zeros = Bits::default();
        for (block, bytes) in (0..).zip(buf.chunks_exact(BLOCK_BYTES as usize)) {
            if extent.blocks.has(block) && is_zeros(bytes) {
                zeros = zeros.or(&Bits::range(&(block..block + 1)));
            }
        }
        Ok(Extent { logical: extent.logical, blocks: zeros })
    }

    /// The first volume extent from `logical` on of which the head has an entry, and its data there.
    fn next_own(&self, logical: u32) -> Result<Option<Extent>> {
        let found = self.store().look(|meta| Ok(meta.next_own_data(self.ids().0, logical)?))?;
        Ok(found.map(|(logical, blocks)| Extent { logical, blocks }))
    }

    /// As [`Volume::next_own`], and how many of its blocks hold data.
    fn next_count(&self, logical: u32) -> Option<(u32, u32)> {
        let meta = self.store().meta();
        let layer = &meta.snapshot(meta.volume(self.ids().0).head).layer;
        let (logical, entry) = layer.iter_from(logical).next()?;
        Some((logical, meta.entries.data_blocks(entry)))
    }

    /// What the head has of a volume extent.
    fn own(&self, logical: u32) -> Result<Option<Extent>> {
        Ok(self.next_own(logical)?.filter(|extent| extent.logical == logical))
    }
}

impl Meta {
    /// The first volume extent from `logical` on of which a volume's head has an entry, and the blocks
    /// that hold data there.
    fn next_own_data(
        &self,
        volume: VolumeId,
        logical: u32,
    ) -> std::result::Result<Option<(u32, Bits)>, Away> {
        let layer = &self.snapshot(self.volume(volume).head).layer;
        let Some((logical, entry)) = layer.iter_from(logical).next() else { return Ok(None) };
        Ok(Some((logical, self.entries.data_bits(entry)?)))
    }
}

/// What was read; `None` if it cannot be.
fn if_readable<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Err(error) if error.kind() == ErrorKind::Damaged || is_damage(&error) => Ok(None),
        read => read.map(Some),
    }
}

/// Whether a block holds nothing but zeros.
fn is_zeros(block: &[u8]) -> bool {
    block.chunks_exact(64).all(|part| part.iter().fold(0, |seen, byte| seen | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{InitOptions, OpenOptions, Store};

    const BLOCK: usize = BLOCK_BYTES as usize;

    fn store(directory: &std::path::Path) -> Store {
        let path = directory.join("store");
        let options =
            InitOptions { size: Some(64 << 20), extent_size: 64 << 10, ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        Store::open(&path, &OpenOptions::default()).unwrap()
    }

    /// What a writer put there between the two looks stays.
    #[test]
    fn a_block_that_is_written_after_it_was_found_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path());
        store.create_volume("v", 64 << 10).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &[0; 4 * BLOCK], false).unwrap();
        let mut buf = AlignedBuf::zeroed(64 << 10);
        let found = volume.zeros_of(&volume.own(0).unwrap().unwrap(), &mut buf).unwrap();
        assert_eq!(found.blocks, Bits::range(&(0..4)));
        volume.write_at(BLOCK_BYTES, &[7; BLOCK], false).unwrap();
        let (given_up, whole) = volume.give_up_zeros(&found, &mut buf).unwrap().unwrap();
        assert_eq!(given_up, Bits::range(&(0..1)).or(&Bits::range(&(2..4))));
        assert!(!whole);
        let mut all = [1; 4 * BLOCK];
        volume.read_at(0, &mut all).unwrap();
        assert!(all[BLOCK..2 * BLOCK].iter().all(|byte| *byte == 7));
        assert!(all[..BLOCK].iter().chain(&all[2 * BLOCK..]).all(|byte| *byte == 0));
        // In a snapshot since, it is none of the head's any more.
        let found = volume.own(0).unwrap().unwrap();
        store.create_snapshot("v", "s", &Default::default()).unwrap();
        assert!(volume.give_up_zeros(&found, &mut buf).unwrap().unwrap().0.is_empty());
        // Nor if the head has others there.
        volume.write_at(0, &[0; 2 * BLOCK], false).unwrap();
        let found = volume.zeros_of(&volume.own(0).unwrap().unwrap(), &mut buf).unwrap();
        store.create_snapshot("v", "t", &Default::default()).unwrap();
        volume.write_at(BLOCK_BYTES, &[0; 2 * BLOCK], false).unwrap();
        let (given_up, _) = volume.give_up_zeros(&found, &mut buf).unwrap().unwrap();
        assert_eq!(given_up, Bits::range(&(1..2)));
    }
}
