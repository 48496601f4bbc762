//! Background work and long jobs: merging, freeing, hole punching, flattening. One at a time,
//! beside any I/O.

use super::bring::is_damage;
use super::{Inner, Store};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Geometry, sums};
use crate::info::WorkReport;
use crate::io::buffer::AlignedBuf;
use crate::io::{ReadRequest, WriteRequest};
use crate::meta::Meta;
use crate::meta::locks::Space;
use crate::meta::merge::{Copy, Merge, Work};
use crate::sabotage::{self, Bug};
use crate::units::{BLOCK_BYTES, DeviceExtent, SnapshotId, VolumeId};
use std::ops::Range;
use std::sync::{MutexGuard, PoisonError, TryLockError};

/// Extents given back to the device together, neighbours in one request.
const PUNCH_EXTENTS: u64 = 16;
/// Bytes copied by one batch of I/O.
const COPY_BYTES: u64 = 4 << 20;

impl Store {
    /// Does up to `steps` steps of background work: merging deleted snapshots, freeing, hole
    /// punching. Safe to call beside any I/O; `remaining == 0` when idle. It does not wait for reads:
    /// if one must end first, the report says so, and a later call goes on.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub fn work(&self, steps: u64) -> Result<WorkReport> {
        self.work_while(self.take_work(), steps, |_| true)
    }

    /// As [`Store::work`]; `None` if somebody works already, which a flatten or vacuum does for long.
    ///
    /// # Errors
    /// As there.
    pub fn try_work(&self, steps: u64) -> Result<Option<WorkReport>> {
        self.try_take_work().map(|turn| self.work_while(turn, steps, |_| true)).transpose()
    }

    pub(super) fn try_take_work(&self) -> Option<MutexGuard<'_, ()>> {
        match self.inner.work.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(super) fn take_work(&self) -> MutexGuard<'_, ()> {
        self.inner.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Store::work`], for who has writes on their way on this thread: it does not wait for them either.
    ///
    /// # Errors
    /// As there.
    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub fn work_beside(&self, steps: u64) -> Result<WorkReport> {
        self.work_while(self.take_work(), steps, |merge| self.inner.is_unheld(merge))
    }

    /// Does background work until a merge may not be done.
    fn work_while(
        &self,
        _turn: MutexGuard<'_, ()>,
        steps: u64,
        may: impl Fn(&Merge) -> bool,
    ) -> Result<WorkReport> {
        self.inner.check_writable()?;
        let (mut done, mut waits) = (0, false);
        while done < steps {
            match self.inner.work_step(steps - done, &may)? {
                Did::Nothing => break,
                Did::Waits => {
                    waits = true;
                    break;
                }
                Did::Steps(some) => done += some,
            }
        }
        if done < steps {
            if self.inner.meta().extents.quarantined() > 0 {
                self.inner.commit()?;
            }
            while done < steps {
                match self.inner.punch(steps - done)? {
                    0 => break,
                    extents => done += extents,
                }
                // There may be room now for what a merge copies into holes of the file.
                self.inner.meta().end_put_off_for_room();
            }
        }
        let remaining = self.inner.meta().work_remaining();
        Ok(WorkReport { done, remaining, waits })
    }

    /// The next background work tries again what could not be merged, without waiting for its time.
    pub fn retry_put_off(&self) {
        self.inner.meta().end_put_off();
    }

    /// Steps of background work known to remain for the deleted snapshots of a volume; 0 when all
    /// are gone but those that clones or several children need.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn merging_remaining(&self, volume: &str) -> Result<u64> {
        let meta = self.inner.meta();
        Ok(meta.merging_remaining(meta.find_volume(volume)?))
    }

    /// Copies what the volume shares with its origin so that it depends on nothing; can be
    /// stopped (return `false` from `progress(done, total)` in extents) and run again.
    ///
    /// # Errors
    /// `NotFound`, `NoSpace`, `Io`, `Interrupted` if `progress` says so; `Busy` if the volume is being rebuilt, or was
    /// meanwhile.
    pub fn flatten(&self, volume: &str, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        self.inner.check_writable()?;
        let handle = self.head(volume)?;
        let id = handle.ids().0;
        self.inner.meta().check_complete(id)?;
        let _work = self.take_work();
        let (layers, rebuilds) = {
            let meta = self.inner.meta();
            (meta.foreign_children(id), meta.volume(id).rebuilds)
        };
        let below = |layer| {
            let mut next = Some(0);
            while let Some(from) = next {
                next = self.inner.look(|meta| meta.check_can_be_cut(layer, from))?;
            }
            let (mut extents, mut next) = (Vec::new(), Some(0));
            while let Some(first) = next {
                next = self.inner.meta().extents_below((id, layer), first, &mut extents);
            }
            Ok((layer, extents))
        };
        let jobs = layers.into_iter().map(below).collect::<Result<Vec<_>>>()?;
        let total = jobs.iter().map(|(_, extents)| extents.len() as u64).sum();
        let mut done = 0;
        for (layer, extents) in jobs {
            for logical in extents {
                if !progress(done, total) {
                    let text = format!("flattening `{volume}` was stopped; run it again to go on");
                    return Err(Error::new(crate::ErrorKind::Interrupted, text));
                }
                // Who closes the store does not wait for the rest.
                self.inner.check_writable()?;
                self.inner.flatten_extent((id, rebuilds), layer, logical)?;
                self.inner.commit_if_long()?;
                done += 1;
            }
            let _step = self.inner.steps.take();
            // A layer that was merged away meanwhile took its copies along.
            self.inner.command(|meta| {
                meta.check_not_rebuilt(id, rebuilds)?;
                if meta.is_foreign_child(id, layer) {
                    meta.cut(layer);
                }
                Ok(())
            })?;
        }
        progress(total, total);
        drop(handle);
        Ok(())
    }
}

/// What a step of background work did.
pub(super) enum Did {
    /// There is nothing to do.
    Nothing,
    /// Somebody must end what he does first.
    Waits,
    /// Some of what there is to do.
    Steps(u64),
}

/// Whether an extent could not be expanded.
fn is_stuck(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Damaged | ErrorKind::NoSpace)
}

/// The blocks of the extents that are merged.
fn blocks_of(meta: &Meta, merge: &Merge) -> Range<u64> {
    let ends = merge.extents.first().zip(merge.extents.last());
    ends.map_or(0..0, |(first, last)| {
        meta.extent_blocks(*first).start..meta.extent_blocks(*last).end
    })
}

/// What a step of background work uses stays as it is until this is dropped.
pub(super) struct Uses<'a>(&'a Inner);

impl Drop for Uses<'_> {
    fn drop(&mut self) {
        self.0.meta().end_use();
    }
}

impl Inner {
    /// For one step of background work, of which there is one at a time: what its plans name is left
    /// alone by writers who need space.
    pub(super) fn uses(&self) -> Uses<'_> {
        Uses(self)
    }

    /// Takes a step of the work on deleted snapshots, of `most` steps at most, unless that is a merge that may not be done.
    pub(super) fn work_step(&self, most: u64, may: impl Fn(&Merge) -> bool) -> Result<Did> {
        let _step = self.steps.take();
        self.check_writable()?;
        let (work, must_commit) = match self.step(|meta| meta.next_work(most)) {
            Err(error) if self.put_off_next(&error) => return Ok(Did::Steps(0)),
            next => next?,
        };
        let done = match work {
            Work::Idle => return Ok(Did::Nothing),
            Work::Wait => return Ok(Did::Waits),
            Work::Merge(merge) if !may(&merge) => return Ok(Did::Waits),
            Work::Stepped => 1,
            Work::Commit => {
                self.commit()?;
                1
            }
            Work::Merge(merge) => {
                self.merge(&merge)?;
                merge.extents.len() as u64
            }
        };
        if must_commit {
            self.commit()?;
        }
        self.commit_if_long()?;
        Ok(Did::Steps(done))
    }

    /// Whether nobody holds the blocks that are merged.
    pub(super) fn is_unheld(&self, merge: &Merge) -> bool {
        let mut meta = self.meta();
        let blocks = blocks_of(&meta, merge);
        let hold = meta.locks.queue(merge.lock, blocks, true);
        let granted = meta.locks.granted(hold);
        meta.locks.release(hold);
        granted
    }

    /// Commits if background work has recorded a lot.
    pub(super) fn commit_if_long(&self) -> Result<()> {
        let long = {
            let meta = self.meta();
            meta.log.is_long()
        };
        if long { self.commit() } else { Ok(()) }
    }

    /// Whether the deleted snapshot whose turn it is cannot be merged as metadata is damaged: the others are.
    fn put_off_next(&self, error: &Error) -> bool {
        let next = self.meta().last_deleted();
        is_damage(error) && self.put_off(next, error)
    }

    /// Whether a deleted snapshot alone cannot be merged, and not whatever is tried.
    fn put_off(&self, id: SnapshotId, error: &Error) -> bool {
        if self.check_sound().is_err() {
            return false;
        }
        self.meta().put_off(id, error.kind() == ErrorKind::NoSpace);
        self.warn_once(format!("{error}; a deleted snapshot is not merged for that"));
        true
    }

    fn merge(&self, merge: &Merge) -> Result<()> {
        let blocks = blocks_of(&self.meta(), merge);
        let _hold = self.hold_in(merge.lock, blocks, true);
        let _uses = self.uses();
        let (mut brought, away) = (self.bring(), self.meta().away_for(merge));
        // What cannot be brought is told by the plan that needs it.
        let _told_later = brought.blocks(&away);
        let plans = match self.look_with(brought, |meta| meta.plan_merges(merge)) {
            // What is to be expanded for it may be damaged, or have no room.
            Err(error)
                if (is_damage(&error) || is_stuck(&error))
                    && self.put_off(merge.snapshot, &error) =>
            {
                return Ok(());
            }
            plans => plans?,
        };
        let copies: Vec<Copy> = plans.iter().flat_map(|plan| plan.copies.iter().cloned()).collect();
        let finish = || self.finish(|meta| plans.iter().for_each(|plan| meta.finish_merge(plan)));
        if sabotage::is(Bug::MergeBeforeFlush) {
            finish()?;
            self.commit()?;
            return self.copy(&copies);
        }
        if sabotage::is(Bug::RecordMergesEarly) {
            let first = copies.len().min(1);
            self.copy(&copies[..first])?;
            finish()?;
            return self.copy(&copies[first..]);
        }
        match self.copy(&copies) {
            // A block that cannot be read, or a full file system below: the others are merged, and what is free is
            // given back, which may be the room that is wanted.
            Err(error) if self.put_off(merge.snapshot, &error) => Ok(()),
            copied => copied.and_then(|()| finish()),
        }
    }

    fn flatten_extent(
        &self,
        (volume, rebuilds): (VolumeId, u64),
        layer: SnapshotId,
        logical: u32,
    ) -> Result<()> {
        let _step = self.steps.take();
        let blocks = self.meta().extent_blocks(logical);
        let _hold = self.hold(volume, blocks.clone(), true);
        let _layers = self.hold_in(Space::Snapshots(volume), blocks, true);
        let _uses = self.uses();
        // Numbered in the same step as planned: while it waits for space it must not count as a
        // reader that space waits for.
        let (planned, _) = self.step(|meta| {
            meta.check_not_rebuilt(volume, rebuilds)?;
            let plan = meta.plan_flatten(volume, layer, logical)?;
            Ok(plan.map(|plan| (plan, self.fence(meta))))
        })?;
        let Some((plan, fenced)) = planned else { return Ok(()) };
        if let Err(error) = self.copy(&plan.copies) {
            self.meta().abort_flatten(&plan);
            return Err(error);
        }
        drop(fenced);
        // Who fills the volume since then has perhaps been told already that the layer has nothing here.
        let mut checked = Ok(());
        self.finish(|meta| {
            checked = meta.check_not_rebuilt(volume, rebuilds);
            match checked {
                Ok(()) => meta.finish_flatten(&plan),
                Err(_) => meta.abort_flatten(&plan),
            }
        })?;
        checked
    }

    /// Applies the outcome of a background step. Where no tail keeps its records they are
    /// committed before anybody can write in place to what they moved: such a write needs no
    /// record of its own, and must not be lost with them.
    pub(super) fn finish(&self, apply: impl FnOnce(&mut Meta)) -> Result<()> {
        let must_commit = {
            let mut meta = self.meta();
            apply(&mut meta);
            meta.publish()
        };
        if must_commit { self.commit() } else { Ok(()) }
    }

    /// Copies within the data region, and waits for it.
    pub(super) fn copy(&self, copies: &[Copy]) -> Result<()> {
        let failed = |error| Error::io(error, "copying extents failed");
        let bytes = |batch: &[Copy]| batch.iter().map(|copy| copy.length).sum::<u64>() as usize;
        let mut buf = AlignedBuf::zeroed(batches(copies).map(bytes).max().unwrap_or(0));
        for batch in batches(copies) {
            let (mut reads, mut rest) = (Vec::with_capacity(batch.len()), &mut buf[..]);
            for copy in batch {
                let (part, after) = rest.split_at_mut(copy.length as usize);
                match copy.expands {
                    true => self.read_expanded(copy.from, part)?,
                    false => reads.push(ReadRequest { offset: copy.from, buf: part }),
                }
                rest = after;
            }
            self.storage.read_many(&mut reads).map_err(failed)?;
            drop(reads);
            let sums = self.claim_copies(batch, &mut buf)?;
            let (mut writes, mut rest) = (Vec::with_capacity(batch.len()), &buf[..]);
            for copy in batch {
                let (part, after) = rest.split_at(copy.length as usize);
                writes.push(WriteRequest { offset: copy.to, buf: part });
                rest = after;
            }
            let written = self.storage.write_many(&writes);
            self.end_copies(batch, &sums, written.is_ok());
            written.map_err(failed)?;
        }
        Ok(())
    }

    /// Claims the places that blocks are copied to; the sums they will have: those known of what was
    /// read into `buf`, so that what is damaged stays so, or its own. What was only read wrong is
    /// right then.
    fn claim_copies(&self, copies: &[Copy], buf: &mut [u8]) -> Result<Vec<u32>> {
        let mut sums = Vec::new();
        if !self.has_sums {
            return Ok(sums);
        }
        let mut rest = buf;
        for (claimed, copy) in copies.iter().enumerate() {
            let (part, after) = rest.split_at_mut(copy.length as usize);
            rest = after;
            let carried = match copy.expands {
                true => Ok(part.chunks_exact(BLOCK_BYTES as usize).map(sums::sum).collect()),
                false => self.carried_sums(copy.from, copy.to, part),
            };
            let carried = carried.map_err(|error| Error::io(error, "copying extents failed"));
            let claim = |carried: Vec<u32>| {
                sums.extend(carried);
                self.claim(copy.to, copy.blocks())
            };
            if let Err(error) = carried.and_then(claim) {
                copies[..claimed].iter().for_each(|copy| self.unclaim(copy.to, copy.blocks()));
                return Err(error);
            }
        }
        Ok(sums)
    }

    fn end_copies(&self, copies: &[Copy], sums: &[u32], written: bool) {
        let mut rest = sums;
        for copy in copies.iter().filter(|_| self.has_sums) {
            let (known, after) = rest.split_at(copy.blocks());
            rest = after;
            if sabotage::is(Bug::CopyKeepsSums) {
                self.unclaim(copy.to, copy.blocks());
            } else {
                self.end_claim_with(copy.to, copy.length as usize, written.then_some(known));
            }
        }
    }

    /// Gives free extents back to the file system or device, at most so many; how many.
    pub(super) fn punch(&self, most: u64) -> Result<u64> {
        let _step = self.steps.take();
        let (extents, geometry) = {
            let mut meta = self.meta();
            meta.release_freed();
            (meta.extents.take_unpunched(PUNCH_EXTENTS.min(most) as usize), meta.geometry)
        };
        let result = self.give_back(&extents, &geometry);
        // Free they are, whether or not the device took them.
        let mut meta = self.meta();
        meta.extents.punched(&extents);
        drop(meta);
        self.wake();
        result.map(|()| extents.len() as u64)
    }

    /// Gives the storage of extents back, ascending; tries all, whatever fails.
    pub(super) fn give_back(&self, extents: &[u32], geometry: &Geometry) -> Result<()> {
        let mut result = Ok(());
        for run in extents.chunk_by(|a, b| a + 1 == *b) {
            let at = geometry.extent_address(DeviceExtent(run[0]));
            let length = run.len() as u64 * geometry.extent_bytes;
            if let Err(error) = self.storage.discard(at, length) {
                result = Err(Error::io(error, "giving free extents back failed"));
            }
        }
        result
    }
}

/// Groups copies so that one batch moves a few MiB.
fn batches(copies: &[Copy]) -> impl Iterator<Item = &[Copy]> {
    let mut rest = copies;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |copy: &&Copy| {
            bytes += copy.length;
            bytes <= COPY_BYTES
        };
        let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
        let (batch, after) = rest.split_at(count);
        rest = after;
        (!batch.is_empty()).then_some(batch)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{InitOptions, OpenOptions, SnapshotOptions};
    use crate::volume::Volume;
    use std::path::Path;

    const BLOCK: usize = crate::units::BLOCK_BYTES as usize;

    /// A store with a volume `v`, on a deleted snapshot that is to be merged into its head.
    fn with_a_merge(path: &Path) -> (Store, Volume) {
        let (size, extent_size) = (Some(64 << 20), 64 << 10);
        let init = InitOptions { size, extent_size, checksums: false, ..InitOptions::default() };
        Store::init(path, &init).unwrap();
        let store = Store::open(path, &OpenOptions::default()).unwrap();
        store.create_volume("v", 1 << 20).unwrap();
        store.set_rebuilding("v", true).unwrap();
        let volume = store.volume("v").unwrap();
        volume.write_at(0, &[1; 64 << 10], false).unwrap();
        store.create_snapshot("v", "gone", &SnapshotOptions::default()).unwrap();
        volume.write_at(0, &[2; BLOCK], false).unwrap();
        store.delete_snapshot("v", "gone").unwrap();
        (store, volume)
    }

    /// The volume is deleted amid the merge, and a writer finds the store full.
    #[test]
    fn what_a_merge_works_on_is_not_reclaimed_for_a_writer() {
        let directory = tempfile::tempdir().unwrap();
        let (store, volume) = with_a_merge(&directory.path().join("store"));
        drop(volume);
        let Work::Merge(merge) = store.inner.step(|meta| meta.next_work(64)).unwrap().0 else {
            panic!("nothing to merge")
        };
        let plans = store.inner.meta().plan_merges(&merge).unwrap();
        assert!(!plans.is_empty());
        store.delete_volume("v").unwrap();
        assert!(!store.inner.meta().reclaim_leaves(64));
        // It could not copy.
        store.inner.meta().end_use();
        while store.work(64).unwrap().done > 0 {}
        store.flush().unwrap();
        let info = store.info();
        assert_eq!((info.snapshots, info.extents_free), (0, info.extents_total));
        assert!(store.check().unwrap().findings.is_empty());
    }

    /// While it waits for blocks of the head, the head becomes a snapshot, which a rebuild writes to
    /// under another lock.
    #[test]
    fn nothing_is_merged_into_what_became_a_snapshot_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let (store, _volume) = with_a_merge(&directory.path().join("store"));
        let Work::Merge(merge) = store.inner.step(|meta| meta.next_work(64)).unwrap().0 else {
            panic!("nothing to merge")
        };
        store.create_snapshot("v", "new", &SnapshotOptions::default()).unwrap();
        // A write to its layer is on its way.
        let (id, new) = store.inner.meta().find_snapshot("v", "new").unwrap();
        let hold = store.inner.hold_in(Space::Snapshots(id), 4..5, false);
        let mut pieces = Vec::new();
        store.inner.step(|meta| meta.plan_write_to(new, 4..5, &mut pieces)).unwrap();
        store.inner.merge(&merge).unwrap();
        store.inner.storage.write_at(pieces[0].address, &[3; BLOCK]).unwrap();
        store.inner.meta().finish_write_to(new, &pieces);
        drop(hold);
        while store.work(64).unwrap().done > 0 {}
        let mut found = vec![0; 64 << 10];
        store.volume("v@new").unwrap().read_at(0, &mut found).unwrap();
        let blocks: Vec<_> = found.chunks_exact(BLOCK).map(|block| block[0]).collect();
        assert_eq!(blocks, [2, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
        assert!(store.check().unwrap().findings.is_empty());
    }
}
