//! Waiting for a change of what volumes and snapshots there are, and of what is said of them.

use super::Store;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The last number of changes that was told, and who waits for more. Apart from what waits for
/// blocks: that is woken by every write.
#[derive(Debug, Default)]
pub(super) struct Watch {
    told: AtomicU64,
    waiting: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Watch {
    /// There have been so many changes. Without any since the last call, and without anybody who
    /// waits, it costs a load.
    pub(super) fn note(&self, changes: u64) {
        if self.told.load(Ordering::SeqCst) >= changes {
            return;
        }
        self.told.fetch_max(changes, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Who waits has either seen the number or is in `wait` by now.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }

    fn wait(&self, seen: u64, patience: Duration) {
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let same = |(): &mut ()| self.told.load(Ordering::SeqCst) <= seen;
        // Woken, late or too early: the caller looks at the number itself.
        drop(self.changed.wait_timeout_while(guard, patience, same));
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Store {
    /// Counts changes of what volumes and snapshots there are, and of their names, sizes, labels
    /// and flags. It grows by any number at once, and also where in the end nothing is different.
    /// Reads and writes of content do not count.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.inner.meta().changes
    }

    /// Waits until [`Store::changes`] exceeds `seen`, or for so long; returns what it is then. A
    /// change counts as soon as it shows, which may be a little before it is durable.
    #[must_use]
    pub fn wait_for_change(&self, seen: u64, patience: Duration) -> u64 {
        let changes = self.changes();
        if changes > seen {
            return changes;
        }
        self.inner.watch.wait(seen, patience);
        self.changes()
    }
}
