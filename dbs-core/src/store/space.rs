//! Growing a store, and compacting and shrinking one.

use super::{Inner, Store};
use crate::error::{Error, Result};
use crate::format::{Geometry, RegionKind};
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

/// How long growing waits for background work, whose steps are short.
const GROW_PATIENCE: Duration = Duration::from_secs(5);
const GROW_POLL: Duration = Duration::from_millis(1);

/// Steps of background work between two looks whether a vacuum is to stop.
const WORK_STEPS: u64 = 64;

impl Store {
    /// Grows the store to `size` bytes (a file is extended; a device must already have it).
    ///
    /// # Errors
    /// `Invalid` if it is not larger or beyond the room its metadata has, `NoSpace`, `Io`, `Busy` if a flatten or a
    /// vacuum runs.
    pub fn grow(&self, size: u64) -> Result<()> {
        self.inner.check_writable()?;
        let _work = self.inner.wait_for_work()?;
        let old = self.inner.meta().geometry;
        if size < old.size {
            return Err(Error::invalid(format!(
                "the store has {} bytes already; `vacuum` makes a file smaller",
                old.size
            )));
        }
        let new = old.resized(size)?;
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
            let report = self.work(WORK_STEPS)?;
            if report.remaining == 0 || report.done == 0 {
                break;
            }
            if !progress(0, report.remaining) {
                return stopped();
            }
        }
        let _job = self.take_job();
        self.inner.commit()?;
        let total = self.inner.extents_to_move();
        let mut done = 0;
        while self.inner.move_last()? {
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

impl Inner {
    /// Waits for who does background work, but not as long as a flatten or vacuum may take.
    ///
    /// # Errors
    /// `Busy`.
    fn wait_for_work(&self) -> Result<MutexGuard<'_, ()>> {
        let deadline = Instant::now() + GROW_PATIENCE;
        loop {
            match self.work.try_lock() {
                Ok(turn) => return Ok(turn),
                Err(TryLockError::Poisoned(turn)) => return Ok(turn.into_inner()),
                // Steps of work that follow one another give it up, and take it again at once.
                Err(TryLockError::WouldBlock) if !self.job.load(Ordering::SeqCst) => {
                    return Ok(self.work.lock().unwrap_or_else(PoisonError::into_inner));
                }
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(GROW_POLL);
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::busy(
                        "a flatten or a vacuum of the store runs: wait for its end, or stop it; it can be run again",
                    ));
                }
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
        if let Err(error) = self.copy(&plan.copies) {
            self.meta().abort_move(&plan);
            return Err(error);
        }
        self.finish(|meta| meta.finish_move(&plan))?;
        Ok(true)
    }

    /// Cuts the free end off but for so many bytes; returns the store's size.
    fn shrink(&self, keep: u64) -> Result<u64> {
        // A vacuum that was cut off may have left an end that is no part of the store any more.
        self.cut_file()?;
        let (old, used) = {
            let mut meta = self.meta();
            meta.release_freed();
            (meta.geometry, meta.extents_end())
        };
        let extents = u64::from(used.max(1)).saturating_add(keep.div_ceil(old.extent_bytes));
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
