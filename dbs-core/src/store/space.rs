//! Growing a store, and compacting and shrinking one.

use super::{Inner, Store};
use crate::error::{Error, Result};
use crate::format::{Geometry, RegionKind};
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

/// Steps of background work between two looks whether a vacuum is to stop.
const WORK_STEPS: u64 = 64;
/// Until a vacuum looks again whether a flatten, for which it waits, has ended.
const WORK_REST: Duration = Duration::from_millis(10);

impl Store {
    /// Grows the store to `size` bytes (a file is extended; a device must already have it).
    ///
    /// # Errors
    /// `Invalid` if it is not larger or beyond the room its metadata has, `NoSpace`, `Io`, `Busy` if a vacuum runs.
    pub fn grow(&self, size: u64) -> Result<()> {
        let _step = self.inner.steps.take();
        self.inner.check_writable()?;
        if self.inner.vacuum.load(Ordering::SeqCst) {
            // It would cut off again what is added.
            return Err(Error::busy(
                "a vacuum of the store runs: wait for its end, or stop it; it can be run again",
            ));
        }
        let old = self.inner.meta().geometry;
        if size < old.size {
            return Err(Error::invalid(format!(
                "the store has {} bytes already; `vacuum` makes a file smaller",
                old.size
            )));
        }
        let new = old.resized(size)?;
        self.inner.look_for_command()?;
        if self.inner.storage.size_bytes() < new.size {
            self.inner
                .storage
                .set_size(new.size)
                .map_err(|error| Error::io(error, "growing the file failed"))?;
            // The superblock must not promise what a power loss takes away.
            if !sabotage::is(Bug::GrowWithoutFlush) {
                self.inner.flush_storage()?;
            }
        }
        self.inner.reserve_superblock(&new, "growing the store failed")?;
        self.inner.update_superblock(|superblock| superblock.geometry = new)?;
        let mut meta = self.inner.meta();
        meta.geometry = new;
        meta.extents.add_free(old.data_extents()..new.data_extents());
        Ok(())
    }

    /// Moves extents towards the start and cuts a file's end off, all that is free; returns the new size.
    ///
    /// # Errors
    /// As [`Store::vacuum_keeping`].
    pub fn vacuum(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<u64> {
        self.vacuum_keeping(0, progress)
    }

    /// As [`Store::vacuum`], but leaves this many bytes free for new data, if there are as many.
    /// Return `false` from `progress(done, total)` to stop.
    ///
    /// # Errors
    /// `Io`, `NoSpace` if the file system below has none, `Interrupted` if `progress` says so; what was moved until then stays moved.
    pub fn vacuum_keeping(
        &self,
        keep: u64,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<u64> {
        let stopped = || {
            let text = "vacuum was stopped; run it again to go on";
            Err(Error::new(crate::ErrorKind::Interrupted, text))
        };
        // First what is merged and freed anyway, which may be long.
        self.retry_put_off();
        loop {
            let report = self.try_work(WORK_STEPS)?;
            if report.is_some_and(|report| report.remaining == 0 || report.done == 0) {
                break;
            }
            if !progress(0, report.map_or(1, |report| report.remaining)) {
                return stopped();
            }
            if report.is_none() {
                sleep(WORK_REST);
            }
        }
        let _vacuum = loop {
            self.inner.check_writable()?;
            if let Some(vacuum) = Vacuum::begin(self) {
                break vacuum;
            }
            if !progress(0, 1) {
                return stopped();
            }
            sleep(WORK_REST);
        };
        self.inner.commit()?;
        let total = self.inner.extents_to_move();
        let mut done = 0;
        // Who closes the store does not wait for the rest.
        while self.inner.check_writable().and_then(|()| self.inner.move_last())? {
            done += 1;
            if !progress(done.min(total), total) {
                return stopped();
            }
            self.inner.commit_if_long()?;
        }
        self.inner.commit()?;
        self.inner.shrink(keep)
    }
}

/// The turn of background work, of a vacuum: until it is dropped.
struct Vacuum<'a> {
    inner: &'a Inner,
    _work: MutexGuard<'a, ()>,
}

impl<'a> Vacuum<'a> {
    /// None while somebody else has it.
    fn begin(store: &'a Store) -> Option<Self> {
        let _work = store.try_take_work()?;
        store.inner.vacuum.store(true, Ordering::SeqCst);
        Some(Self { inner: &store.inner, _work })
    }
}

impl Drop for Vacuum<'_> {
    fn drop(&mut self) {
        // Before the turn is given up.
        self.inner.vacuum.store(false, Ordering::SeqCst);
    }
}

impl Inner {
    /// Reserves what the metadata in use takes of a file. A copy of one has holes where nothing was written yet, and
    /// a group that finds no space stops all writing.
    pub(super) fn fill_holes(&self) {
        // A file of the system, and no storage of the caller's.
        if !self.storage.may_be_shared() || !self.storage.resizable() {
            return;
        }
        let (geometry, marks) = {
            let meta = self.meta();
            (meta.geometry, meta.marks())
        };
        let journal = geometry.region(RegionKind::Journal);
        let regions = RegionKind::MARKED.into_iter().flat_map(|region| {
            let bytes = u64::from(marks[region.mark()]) * BLOCK_BYTES;
            (0..2).map(move |copy| (geometry.block_address(region, 0, copy), bytes))
        });
        let ranges = std::iter::once((journal.offset, journal.length)).chain(regions);
        for (at, bytes) in ranges {
            // A full file system may say so of what is reserved, too, after a long search for space; and what is written
            // may be what gives space back.
            if self.storage.allocate(at, bytes).is_err() {
                break;
            }
        }
    }

    /// Extents in use behind the place the last one could have.
    fn extents_to_move(&self) -> u64 {
        let meta = self.meta();
        let used = meta.entries.extents_from(0);
        u64::from(meta.entries.extents_from(used))
    }

    /// Moves the last extent in use to the lowest free place; `false` if it is there.
    fn move_last(&self) -> Result<bool> {
        let _step = self.steps.take();
        let (last, lock, blocks) = {
            let meta = self.meta();
            let Some((last, _)) = meta.next_move() else { return Ok(false) };
            let lock = meta.move_lock(last);
            (last, lock, lock.map(|(space, logical)| (space, meta.extent_blocks(logical))))
        };
        let _hold = blocks.map(|(space, blocks)| self.hold_in(space, blocks, true));
        let _uses = self.uses();
        // While it waited, a discard may have freed the extent, or a snapshot frozen it.
        let Some(plan) = self.step(|meta| meta.plan_move(last, lock))?.0 else { return Ok(true) };
        if plan.is_compressed() {
            // What it saves is not to be in use there either. The device may not take it back.
            let geometry = self.meta().geometry;
            let _nothing_saved = self.give_back(&[plan.to], &geometry);
        }
        if let Err(error) = self.copy(&plan.copies) {
            self.meta().abort_move(&plan);
            return Err(error);
        }
        self.finish(|meta| meta.finish_move(&plan))?;
        Ok(true)
    }

    /// Cuts the free end off but for so many bytes; returns the store's size.
    fn shrink(&self, keep: u64) -> Result<u64> {
        let _step = self.steps.take();
        // A vacuum that was cut off may have left an end that is no part of the store any more.
        self.cut_file()?;
        let (old, used, kept) = {
            let mut meta = self.meta();
            meta.release_freed();
            (meta.geometry, meta.extents_end(), meta.kept_extents())
        };
        let free = keep.div_ceil(old.extent_bytes).max(kept);
        let extents = u64::from(used.max(1)).saturating_add(free);
        if extents >= u64::from(old.data_extents()) {
            return Ok(old.size);
        }
        let size = old.region(RegionKind::Data).offset + extents * old.extent_bytes + BLOCK_BYTES;
        if size >= old.size || self.is_device() {
            return Ok(old.size);
        }
        let new = old.resized(size)?;
        self.reserve_superblock(&new, "shrinking the store failed")?;
        {
            let mut meta = self.meta();
            if meta.extents_end() > new.data_extents() {
                // Somebody wrote or freed meanwhile: leave the end to them.
                return Ok(old.size);
            }
            meta.extents.withdraw(new.data_extents()..old.data_extents());
            meta.geometry = new;
        }
        self.update_superblock(|superblock| superblock.geometry = new)?;
        self.cut_file()?;
        Ok(new.size)
    }

    /// Cuts off what the file has behind the store.
    fn cut_file(&self) -> Result<()> {
        let size = self.meta().geometry.size;
        if self.is_device() || self.storage.size_bytes() <= size {
            return Ok(());
        }
        let cut = self.storage.set_size(size);
        cut.map_err(|error| Error::io(error, "cutting the file's end off failed"))?;
        self.flush_storage()
    }

    /// Reserves storage for the last copy of the superblock, before a new geometry moves it: on a
    /// full file system writing it to a hole would fail, which poisons.
    fn reserve_superblock(&self, new: &Geometry, failure: &str) -> Result<()> {
        let reserved = self.storage.allocate(new.superblock_last(), BLOCK_BYTES);
        reserved.map_err(|error| Error::io(error, failure))
    }

    /// Whether the storage has a fixed size: setting it to any other fails.
    fn is_device(&self) -> bool {
        !self.storage.resizable()
    }
}
