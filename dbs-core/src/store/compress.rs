//! Compressing extents, reading what is compressed, and expanding what is to be written.
//!
//! Either way an extent moves: its content is written to a free one, and then the entry is moved in one group, as a vacuum
//! does. So a crash leaves either form.

use super::sums::ReadFault;
use super::{Inner, Store};
use crate::error::{Error, ErrorKind, Result};
use crate::format::compressed::{FRAME_BYTES, Index, compress};
use crate::format::superblock::INCOMPAT_COMPRESSED;
use crate::info::CompressReport;
use crate::io::ReadRequest;
use crate::io::buffer::AlignedBuf;
use crate::meta::compress::worth;
use crate::meta::entries::Bits;
use crate::meta::names;
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;
use std::ops::Range;
use std::slice;
use std::sync::PoisonError;

const BLOCK: usize = BLOCK_BYTES as usize;
/// When so much was compressed, the extents that had it are given back.
const GIVE_BACK_BYTES: u64 = 64 << 20;

impl Store {
    /// Compresses extents of a volume (`name`), its head's and those of its snapshots, or of a snapshot
    /// (`name@snapshot`), its own and those of the snapshots of the volume below it: those that take at least a quarter
    /// less by that. What they no longer take is given back to the file system or device; for the store each of them stays
    /// an extent. What is written to later is expanded again. Others read and write meanwhile.
    ///
    /// Return `false` from `progress` to stop; what is done stays done, and the next call goes on with what is not.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if the volume is being rebuilt; `Unsupported` if it is encrypted; `NoSpace` if fewer than
    /// three extents are free; `Interrupted` if `progress` says so; `Io`, `Poisoned`.
    pub fn compress(
        &self,
        spec: &str,
        progress: &mut dyn FnMut(&CompressReport) -> bool,
    ) -> Result<CompressReport> {
        let inner = &*self.inner;
        inner.check_writable()?;
        let (volume, snapshot) = names::split(spec)?;
        let (id, layers) = inner.meta().layers_to_compress(volume, snapshot)?;
        let _work = self.take_work();
        let mut report = CompressReport::default();
        {
            let meta = inner.meta();
            report.total = layers.iter().map(|layer| meta.extents_of_layer(id, *layer)).sum();
        }
        let mut given_back = 0;
        for layer in layers {
            let mut from = 0;
            loop {
                let found = inner.meta().next_to_compress(id, layer, from);
                let Some((extent, passed, next)) = found else { break };
                report.done += passed;
                report.total = report.total.max(report.done);
                if !progress(&report) {
                    let text = format!("compressing `{spec}` was stopped; run it again to go on");
                    return Err(Error::new(ErrorKind::Interrupted, text));
                }
                // Who closes the store does not wait for the rest.
                inner.check_writable()?;
                extent.map_or(Ok(()), |extent| inner.compress_extent(extent, &mut report))?;
                inner.commit_if_long()?;
                // What is left free would take space below, which may be short.
                if report.compressed >= given_back + GIVE_BACK_BYTES {
                    inner.give_back_freed()?;
                    given_back = report.compressed;
                }
                from = next;
            }
        }
        inner.give_back_freed()?;
        progress(&report);
        Ok(report)
    }
}

impl Inner {
    /// Gives back what is freed by now.
    fn give_back_freed(&self) -> Result<()> {
        self.commit()?;
        while self.punch(u64::MAX)? > 0 {}
        Ok(())
    }

    /// Compresses an extent, if that is worth it.
    fn compress_extent(&self, extent: u32, report: &mut CompressReport) -> Result<()> {
        let _step = self.steps.take();
        let (lock, blocks) = {
            let meta = self.meta();
            let Some(lock) = meta.move_lock(extent) else { return Ok(()) };
            (lock, meta.extent_blocks(lock.1))
        };
        let _hold = self.hold_in(lock.0, blocks, true);
        let _uses = self.uses();
        // While it waited, a discard may have freed the extent, or a snapshot frozen it.
        let Some(data) = self.step(|meta| meta.plan_compress(extent, lock))?.0 else {
            return Ok(());
        };
        let mut content = AlignedBuf::zeroed(self.extent_bytes);
        match self.read_blocks(extent, &data, &mut content) {
            Ok(()) => {}
            Err(ReadFault::Damaged(_) | ReadFault::Unreadable(..)) => {
                report.unreadable += u64::from(data.count()) * BLOCK_BYTES;
                return Ok(());
            }
            Err(fault) => return Err(self.read_error(fault, || "compressing failed".to_owned())),
        }
        report.checked += u64::from(data.count()) * BLOCK_BYTES;
        let Some(stored) = compress(&content, worth(data.count()) as usize) else { return Ok(()) };
        self.announce(INCOMPAT_COMPRESSED)?;
        let (to, _) = self.step(|meta| meta.take_to_compress())?;
        let (blocks, whole) = ((stored.len() / BLOCK) as u16, 0..stored.len());
        if sabotage::is(Bug::CompressBeforeWritten) {
            self.end_form(extent, to, Some(blocks))?;
            self.commit()?;
            return self.write_form(to, &stored, slice::from_ref(&whole), "compressing failed");
        }
        // It is durably free. The device may not take it back: then nothing is saved.
        let geometry = self.meta().geometry;
        let _nothing_saved = self.give_back(&[to], &geometry);
        self.write_form(to, &stored, slice::from_ref(&whole), "compressing failed")
            .inspect_err(|_| self.meta().abort_form(to))?;
        self.end_form(extent, to, Some(blocks))?;
        report.compressed += u64::from(data.count()) * BLOCK_BYTES;
        report.stored += stored.len() as u64;
        Ok(())
    }

    /// Moves a compressed extent to one that can be written, unless somebody else has: `owner` is whose it was when that was
    /// asked for. What another layer has there by now is not the caller's to move: a merge may count on it.
    ///
    /// # Errors
    /// `NoSpace`, `Damaged`, `Io`, `Poisoned`.
    pub(super) fn expand(&self, extent: u32, owner: Option<(u32, u32)>) -> Result<()> {
        let _turn = self.expanding.lock().unwrap_or_else(PoisonError::into_inner);
        // Numbered in the same step as planned: as long as it is read nobody else is given the extent.
        let (planned, _) = self.step(|meta| {
            let same = meta.entries.owner(extent) == owner;
            if !same || !meta.entries.is_compressed(extent) {
                return Ok(None);
            }
            let data = meta.entries.data_bits(extent)?;
            Ok(Some((data, meta.take_to_move()?, self.fence(meta))))
        })?;
        let Some((data, to, fenced)) = planned else { return Ok(()) };
        let mut content = AlignedBuf::zeroed(self.extent_bytes);
        let read = self.read_compressed(extent, 0, &mut content, fenced.number());
        let what = || "expanding a compressed extent failed".to_owned();
        let written = read.map_err(|fault| self.read_error(fault, what)).and_then(|()| {
            let runs: Vec<_> = data
                .runs((self.extent_bytes / BLOCK) as u32)
                .map(|run| run.start as usize * BLOCK..run.end as usize * BLOCK)
                .collect();
            if sabotage::is(Bug::ExpandBeforeWritten) {
                self.end_form(extent, to, None)?;
                self.commit()?;
            }
            self.write_form(to, &content, &runs, &what())
        });
        if written.is_err() || sabotage::is(Bug::ExpandBeforeWritten) {
            return written.inspect_err(|_| self.meta().abort_form(to));
        }
        self.end_form(extent, to, None)
    }

    /// Moves the entry of an extent whose content was written to `to` in another form.
    fn end_form(&self, from: u32, to: u32, stored: Option<u16>) -> Result<()> {
        let ended = self.step(|meta| meta.finish_form(from, to, stored));
        let ((), must_commit) = ended.inspect_err(|_| self.meta().abort_form(to))?;
        // As `Inner::finish`: nobody writes in place to what was moved before that is safe.
        if must_commit { self.commit() } else { Ok(()) }
    }

    /// Reads blocks of an extent that its reader holds, each to its place in `content`.
    fn read_blocks(
        &self,
        extent: u32,
        blocks: &Bits,
        content: &mut [u8],
    ) -> std::result::Result<(), ReadFault> {
        let start = self.meta().address(extent, 0);
        let (mut reads, mut rest, mut at) = (Vec::new(), content, 0);
        for run in blocks.runs((self.extent_bytes / BLOCK) as u32) {
            let (first, end) = (run.start as usize * BLOCK, run.end as usize * BLOCK);
            let (buf, after) = rest[first - at..].split_at_mut(end - first);
            reads.push(ReadRequest { offset: start + first as u64, buf });
            (rest, at) = (after, end);
        }
        self.read_data(&mut reads, u64::MAX).map_err(|fault| self.find_unreadable(fault, &reads))
    }

    /// Writes ranges of bytes of an extent that no layer has.
    fn write_form(
        &self,
        to: u32,
        content: &[u8],
        ranges: &[Range<usize>],
        what: &str,
    ) -> Result<()> {
        let start = self.meta().address(to, 0);
        for range in ranges {
            let (at, bytes) = (start + range.start as u64, &content[range.clone()]);
            self.claim(at, bytes.len() / BLOCK)?;
            let written = self.storage.write_at(at, bytes);
            self.end_claim(at, bytes.len(), written.is_ok().then_some(bytes));
            written.map_err(|error| Error::io(error, what))?;
        }
        Ok(())
    }

    /// Fills `out` from a byte of what a compressed extent holds. The extent is kept by the fence number `fence`, or by
    /// locks if that is `u64::MAX`.
    pub(crate) fn read_compressed(
        &self,
        extent: u32,
        offset: usize,
        out: &mut [u8],
        fence: u64,
    ) -> std::result::Result<(), ReadFault> {
        let start = self.shared().address(extent, 0);
        let damaged = |what: &str| {
            let place = self.meta().place_of(start);
            let text = format!("the compressed extent of {place} is damaged: {what}");
            ReadFault::Other(Error::damaged(text))
        };
        // Which of its blocks is damaged says nothing to people: each holds parts of others.
        let whole = |fault| match fault {
            ReadFault::Damaged(_) => damaged("a checksum of what is stored does not match"),
            ReadFault::Unreadable(_, error) => {
                let place = self.meta().place_of(start);
                let text = format!("the compressed extent of {place} cannot be read");
                ReadFault::Other(Error::io(error, text))
            }
            fault => fault,
        };
        let mut index = AlignedBuf::zeroed(BLOCK);
        self.read_blocks_at(start, &mut index, fence).map_err(whole)?;
        // Freed since, as the fence keeps it, nobody knows how many blocks are stored.
        let stored = self.shared().entries.stored_blocks(extent);
        let stored = stored.map_or(self.extent_bytes, |stored| usize::from(stored) * BLOCK);
        let index = Index::decode(&index, self.extent_bytes, stored)
            .ok_or_else(|| damaged("its index is none"))?;
        let frames = offset / FRAME_BYTES..(offset + out.len()).div_ceil(FRAME_BYTES);
        let place = index.place(&frames);
        let first = place.start / BLOCK * BLOCK;
        let mut stored = AlignedBuf::zeroed(place.end.next_multiple_of(BLOCK) - first);
        self.read_blocks_at(start + first as u64, &mut stored, fence).map_err(whole)?;
        let mut frame = vec![0; FRAME_BYTES];
        let (mut rest, mut at) = (out, offset);
        for number in frames {
            let skip = at - number * FRAME_BYTES;
            let (part, after) = rest.split_at_mut(rest.len().min(FRAME_BYTES - skip));
            let expands = match part.len() {
                FRAME_BYTES => index.expand(number, &stored, first, part),
                _ => index.expand(number, &stored, first, &mut frame),
            };
            if !expands {
                return Err(damaged("it cannot be expanded"));
            }
            if part.len() < FRAME_BYTES {
                part.copy_from_slice(&frame[skip..skip + part.len()]);
            }
            at += part.len();
            rest = after;
        }
        Ok(())
    }

    fn read_blocks_at(
        &self,
        address: u64,
        buf: &mut [u8],
        fence: u64,
    ) -> std::result::Result<(), ReadFault> {
        if buf.is_empty() {
            return Ok(());
        }
        let mut reads = [ReadRequest { offset: address, buf }];
        self.read_data(&mut reads, fence).map_err(|fault| self.find_unreadable(fault, &reads))
    }

    /// As [`Inner::read_compressed`], of so many bytes at an address that the extent would have if it was not
    /// compressed.
    pub(super) fn read_expanded(&self, address: u64, out: &mut [u8]) -> Result<()> {
        let (extent, offset) = {
            let meta = self.shared();
            let start = meta.address(0, 0);
            let extent = (address - start) / self.extent_bytes as u64;
            (extent as u32, (address - start) as usize % self.extent_bytes)
        };
        let read = self.read_compressed(extent, offset, out, u64::MAX);
        read.map_err(|fault| self.read_error(fault, || "copying extents failed".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use crate::store::{InitOptions, OpenOptions, Store};

    const EXTENT: u64 = 64 << 10;

    /// Found by review: who waited for its turn to expand an extent expanded another volume's, if that had moved there
    /// meanwhile: beside a merge that counts on it.
    #[test]
    fn an_extent_that_is_anothers_by_then_is_not_expanded() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options =
            InitOptions { size: Some(32 << 20), extent_size: EXTENT, ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        for name in ["v", "w"] {
            store.create_volume(name, EXTENT).unwrap();
            store.volume(name).unwrap().write_at(0, &[7; EXTENT as usize], false).unwrap();
        }
        let entry = |name: &str| {
            let meta = store.inner.meta();
            let head = meta.volume(meta.find_volume(name).unwrap()).head;
            meta.snapshot(head).layer.get(0).unwrap()
        };
        let vacuum = || store.vacuum_keeping(8 << 20, &mut |_, _| true).unwrap();
        store.compress("v", &mut |_| true).unwrap();
        vacuum();
        let extent = entry("v");
        let owner = store.inner.meta().entries.owner(extent);
        store.volume("v").unwrap().write_at(0, &[1; 4096], true).unwrap();
        store.compress("w", &mut |_| true).unwrap();
        vacuum();
        assert_eq!(entry("w"), extent, "the test wants it where v's was");
        // As the second of two writers to v, which has waited for the first.
        store.inner.expand(extent, owner).unwrap();
        assert_eq!(entry("w"), extent);
        assert!(store.inner.meta().entries.is_compressed(extent));
    }
}
