//! Writing to the layer of a snapshot, in a volume that is being rebuilt.

use super::{Layer, blocks_of, is_whole, outside};
use crate::error::{Error, Result};
use crate::io::WriteRequest;
use crate::io::buffer::AlignedBuf;
use crate::limits::{EXTENTS_PER_STEP, EXTENTS_PER_WRITE};
use crate::meta::locks::Space;
use crate::meta::plan::WritePiece;
use crate::meta::{Meta, Step};
use crate::sabotage::{self, Bug, at_once};
use crate::units::{BLOCK_BYTES, SnapshotId};
use std::ops::Range;

/// Changing a snapshot's layer. Its volume must be marked as rebuilding
/// ([`Store::set_rebuilding`]), and no other volume may build on the snapshot. What the snapshot
/// shows, and all that builds on it, changes with it: the promise that a snapshot never changes is
/// suspended until the mark is taken off.
///
/// Offsets are multiples of 4096, and so are lengths, unless the range ends with the layer. Each
/// call is acknowledged like a write to a volume: it survives the process, and the next
/// [`Store::flush`] makes it durable. Calls may be made from many threads; writes to different
/// blocks do not wait for one another.
///
/// [`Store::set_rebuilding`]: crate::Store::set_rebuilding
/// [`Store::flush`]: crate::Store::flush
impl Layer {
    /// Writes `buf` at `offset`: these blocks become data.
    ///
    /// It may wait for reads that began before: a thread with a [`Request`](super::Request) of its own under way would
    /// wait for itself.
    ///
    /// # Errors
    /// `Invalid` outside the layer or unaligned, `ReadOnly` if the volume is not being rebuilt,
    /// `Busy` if another one builds on the snapshot, `NoSpace`, `Io`, `Poisoned`.
    pub fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let owner = self.check_write(offset, buf.len() as u64)?;
        let step = EXTENTS_PER_WRITE * self.handle.store.extent_bytes;
        let (whole, edge) = buf.split_at(buf.len() - buf.len() % BLOCK_BYTES as usize);
        let mut must_commit = false;
        let mut at = offset;
        for part in whole.chunks(step) {
            must_commit |= self.write_step(owner, at, part)?;
            at += part.len() as u64;
        }
        if !edge.is_empty() {
            // Behind the end of the layer there are zeros.
            let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
            block[..edge.len()].copy_from_slice(edge);
            must_commit |= self.write_step(owner, at, &block)?;
        }
        if must_commit { self.handle.store.commit() } else { Ok(()) }
    }

    /// Makes the range zero in this layer, whatever the parent holds.
    ///
    /// # Errors
    /// As [`Layer::write_at`].
    pub fn zero(&self, offset: u64, length: u64) -> Result<()> {
        let owner = self.check_write(offset, length)?;
        self.step_by_step(offset, length, &mut |meta, blocks| {
            meta.check_layer_writable(owner, &blocks)?;
            meta.zero_blocks_of(owner, blocks, true)
        })
    }

    /// Makes the range absent in this layer: the parent shows through. Space that holds nothing
    /// more is free after the next commit.
    ///
    /// # Errors
    /// As [`Layer::write_at`]; also `Busy` while a deleted snapshot has still to become part of
    /// this one ([`Store::work`](crate::Store::work)).
    pub fn clear(&self, offset: u64, length: u64) -> Result<()> {
        let owner = self.check_write(offset, length)?;
        self.step_by_step(offset, length, &mut |meta, blocks| {
            meta.check_layer_writable(owner, &blocks)?;
            meta.clear_blocks(owner, blocks)
        })
    }

    /// Writes whole blocks; whether a commit must come before the answer.
    fn write_step(&self, owner: SnapshotId, offset: u64, buf: &[u8]) -> Result<bool> {
        let store = &self.handle.store;
        let blocks = blocks_of(offset, buf.len() as u64);
        let encrypted = self.encrypt(owner, offset, buf)?;
        let buf = encrypted.as_deref().unwrap_or(buf);
        // With checksums, writes to the same blocks take their turns.
        let _hold = store.hold_in(self.space(), blocks.clone(), store.has_sums);
        let mut pieces = Vec::new();
        let (mut early, mut first) = (false, None);
        while pieces.is_empty() {
            let (until, must_commit) = store.step(|meta| {
                meta.check_layer_writable(owner, &blocks)?;
                // A clone that has just been cut off may show these blocks: to a read that began before, or after a
                // power loss, which brings it back. From here on nobody clones the volume: what is lost sight of
                // later is nothing of this layer.
                let until = *first.get_or_insert(meta.sight());
                if meta.still_seen(until).is_some() {
                    return Ok(Some(until));
                }
                meta.plan_write_to(owner, blocks.clone(), &mut pieces).map(|()| None)
            })?;
            early |= must_commit;
            until.map_or(Ok(()), |until| store.wait_until_unseen(until))?;
        }
        if let Err(error) = self.claim(&pieces) {
            store.meta().abort_write_to(owner, &pieces);
            return Err(error);
        }
        let mut rest = buf;
        let writes: Vec<_> = pieces
            .iter()
            .map(|piece| {
                let length = u64::from(piece.blocks.end - piece.blocks.start) * BLOCK_BYTES;
                let (part, after) = rest.split_at(length as usize);
                rest = after;
                WriteRequest { offset: piece.address, buf: part }
            })
            .collect();
        let finish = || {
            let mut meta = store.meta();
            meta.finish_write_to(owner, &pieces);
            meta.publish()
        };
        let failed =
            |error| Error::io(error, format!("writing the layer `{}` failed", self.handle.spec));
        if sabotage::is(Bug::RecordLayerEarly) {
            finish();
            store.commit()?;
            let written = store.storage.write_many(&writes);
            writes.iter().for_each(|w| store.end_claim(w.offset, w.buf.len(), Some(w.buf)));
            return written.map_err(failed).map(|()| true);
        }
        let written = store.storage.write_many(&writes);
        for write in &writes {
            let sums = written.is_ok().then_some(write.buf);
            store.end_claim(write.offset, write.buf.len(), sums);
        }
        if let Err(error) = written {
            store.meta().abort_write_to(owner, &pieces);
            return Err(failed(error));
        }
        Ok(finish() || early)
    }

    /// What is to be stored in place of bytes at `offset`; none if that is the bytes themselves.
    fn encrypt(&self, owner: SnapshotId, offset: u64, bytes: &[u8]) -> Result<Option<AlignedBuf>> {
        if !self.handle.encrypted {
            return Ok(None);
        }
        let key = self.handle.store.meta().key_for(owner)?;
        Ok(key.map(|key| {
            let mut buf = AlignedBuf::copy_of(bytes);
            key.encrypt(offset, &mut buf);
            buf
        }))
    }

    /// Claims all blocks of a write, or none of them.
    fn claim(&self, pieces: &[WritePiece]) -> Result<()> {
        let store = &self.handle.store;
        for (claimed, piece) in pieces.iter().enumerate() {
            if let Err(error) = store.claim(piece.address, piece.blocks.len()) {
                let done = pieces[..claimed].iter();
                done.for_each(|piece| store.unclaim(piece.address, piece.blocks.len()));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Changes whole blocks, some extents at a time, each time holding them exclusively.
    fn step_by_step(
        &self,
        offset: u64,
        length: u64,
        change: &mut dyn FnMut(&mut Meta, Range<u64>) -> Step<()>,
    ) -> Result<()> {
        let store = &self.handle.store;
        let blocks = blocks_of(offset, length);
        let step = u64::from(at_once(EXTENTS_PER_STEP)) * (store.extent_bytes as u64 / BLOCK_BYTES);
        let mut must_commit = false;
        let mut next = blocks.start;
        while next < blocks.end {
            let end = blocks.end.min((next / step + 1) * step);
            let _hold = store.hold_in(self.space(), next..end, true);
            must_commit |= store.step(|meta| change(meta, next..end))?.1;
            next = end;
        }
        if must_commit { store.commit() } else { Ok(()) }
    }

    fn space(&self) -> Space {
        Space::Snapshots(self.handle.volume)
    }

    /// The snapshot, if it may be written to and the range is one of whole blocks.
    fn check_write(&self, offset: u64, length: u64) -> Result<SnapshotId> {
        self.handle.store.check_writable()?;
        let spec = &self.handle.spec;
        let Some(owner) = self.handle.snapshot else {
            let text = format!("`{spec}` is a head: write to the volume");
            return Err(Error::invalid(text));
        };
        let size = self.size();
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(outside(offset, length, size, spec));
        }
        if !is_whole(offset) || !(is_whole(length) || offset + length == size) {
            return Err(Error::invalid(format!(
                "offset {offset} and length {length} must be multiples of 4096 bytes, or end with \
                 the layer `{spec}` of {size}"
            )));
        }
        self.handle.store.meta().check_layer_writable(owner, &blocks_of(offset, length))?;
        Ok(owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{InitOptions, OpenOptions, SnapshotOptions, Store};
    use crate::volume::{Read, Request, Start};

    const BLOCK: usize = BLOCK_BYTES as usize;

    /// A store with a volume `v` that is being rebuilt, whose snapshot `s` a clone `c` has shown until now: a read of it
    /// is on its way, and that it was cut off is not durable.
    fn cut_off(path: &std::path::Path) -> (Store, Request) {
        let init = InitOptions { size: Some(64 << 20), checksums: false, ..InitOptions::default() };
        Store::init(path, &init).unwrap();
        let store = Store::open(path, &OpenOptions::default()).unwrap();
        store.create_volume("v", 1 << 20).unwrap();
        store.volume("v").unwrap().write_at(0, &[1; BLOCK], false).unwrap();
        store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
        store.clone_volume("v", "s", "c").unwrap();
        store.set_rebuilding("v", true).unwrap();
        let clone = store.volume("c").unwrap();
        let mut read = Request::new();
        clone.read_at(0, &mut [0; BLOCK]).unwrap();
        assert_eq!(clone.start_read(0, BLOCK_BYTES, &mut read).unwrap(), Start::Io);
        let mut meta = store.inner.meta();
        let head = meta.volume(clone.ids().0).head;
        meta.cut(head);
        drop(meta);
        (store, read)
    }

    /// Found by review: a layer was written in place as soon as no clone was built on it, beside reads of the clone that
    /// had begun before. They got the new content.
    #[test]
    fn a_layer_is_not_written_beside_reads_of_a_clone_that_was_cut_off() {
        let directory = tempfile::tempdir().unwrap();
        let (store, mut read) = cut_off(&directory.path().join("store"));
        let layer = store.layer("v", Some("s")).unwrap();
        std::thread::scope(|scope| {
            let writes = scope.spawn(|| layer.write_at(0, &[2; BLOCK]));
            while !writes.is_finished() && !store.inner.is_waited_for() {
                std::thread::yield_now();
            }
            let mut found = [0; BLOCK];
            store.inner.storage.read_at(read.segments()[0].device, &mut found).unwrap();
            assert_eq!(read.finish_read(Ok(()), &found).unwrap(), Read::Done);
            assert_eq!(found, [1; BLOCK], "of the volume that it was cloned from");
            writes.join().unwrap().unwrap();
        });
        let mut found = [0; BLOCK];
        layer.read_at(0, &mut found).unwrap();
        assert_eq!(found, [2; BLOCK]);
    }

    /// A power loss would bring the clone back.
    #[test]
    fn a_layer_is_not_written_before_it_is_durable_that_a_clone_was_cut_off() {
        let directory = tempfile::tempdir().unwrap();
        let (store, mut read) = cut_off(&directory.path().join("store"));
        assert_eq!(read.finish_read(Ok(()), &[1; BLOCK]).unwrap(), Read::Done);
        let durable = || {
            let mut meta = store.inner.meta();
            let until = meta.sight();
            meta.still_seen(until).is_none()
        };
        assert!(!durable());
        store.layer("v", Some("s")).unwrap().write_at(0, &[2; BLOCK]).unwrap();
        assert!(durable(), "written before");
    }
}
