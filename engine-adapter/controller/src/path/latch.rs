//! Waiting for all reactors.

use dbs_frontend::{lock, wait_while};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Waits for a number of others.
pub(super) struct Latch {
    left: Mutex<usize>,
    changed: Condvar,
}

impl Latch {
    pub fn new(count: usize) -> Arc<Self> {
        Arc::new(Self { left: Mutex::new(count), changed: Condvar::new() })
    }

    pub fn count_down(&self) {
        let mut left = lock(&self.left);
        *left = left.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Whether all are done.
    #[cfg(feature = "sabotage")]
    pub fn is_open(&self) -> bool {
        *lock(&self.left) == 0
    }

    pub fn wait(&self) {
        drop(wait_while(&self.changed, lock(&self.left), |left| *left > 0));
    }

    /// Whether all were done in this time.
    pub fn wait_for(&self, timeout: Duration) -> bool {
        let some = |left: &mut usize| *left > 0;
        match self.changed.wait_timeout_while(lock(&self.left), timeout, some) {
            Ok((left, _)) => *left == 0,
            Err(poisoned) => *poisoned.into_inner().0 == 0,
        }
    }
}
