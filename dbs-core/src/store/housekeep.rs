//! What a store needs from time to time, as one call.

use super::Store;
use crate::error::Result;
use std::time::{Duration, Instant};

/// Pages looked at between two looks at the clock when checksums are made again.
const RELEARN_PAGES: u32 = 512;

/// Steps of background work between two looks at the clock: short enough to let requests through.
const WORK_STEPS: u64 = 16;

impl Store {
    /// Does what an open store needs from time to time: background work for about `most`, commits what no
    /// flush has committed ([`Store::settle`]), and closes groups of checksums ([`Store::settle_checksums`]).
    /// Whether something is left that another call can go on with.
    ///
    /// Without it nothing is lost, but deleted snapshots keep their space, a crash leaves more to be redone
    /// and more blocks without a checksum, and what no flush was asked for is not durable. Call it every
    /// second or so, and again at once while it says that there is more. The store has no thread of its own.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub fn housekeep(&self, most: Duration) -> Result<bool> {
        if self.inner.read_only {
            return Ok(false);
        }
        // What has failed there keeps nothing from being committed.
        let more = self.work_for(most);
        let dirty = self.settle()?;
        self.settle_checksums()?;
        Ok(more? || dirty)
    }

    /// Background work ([`Store::work`], and after a crash [`Store::relearn_checksums`]) for about `most`;
    /// whether more can be done at once.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub fn work_for(&self, most: Duration) -> Result<bool> {
        let begun = Instant::now();
        let worked = self.work_until(begun, most);
        if matches!(worked, Ok(true)) {
            return worked;
        }
        // What has failed may fail each time: nothing else waits for it.
        while self.relearn_checksums(RELEARN_PAGES)? {
            if begun.elapsed() >= most {
                return worked.map(|_| true);
            }
        }
        worked
    }

    fn work_until(&self, begun: Instant, most: Duration) -> Result<bool> {
        loop {
            // Who works for long, a flatten or vacuum, is not waited for: what else a store needs from time to time
            // would wait too.
            let Some(report) = self.try_work(WORK_STEPS)? else { return Ok(false) };
            if report.remaining == 0 || report.waits {
                return Ok(false);
            }
            if begun.elapsed() >= most {
                return Ok(true);
            }
        }
    }
}
