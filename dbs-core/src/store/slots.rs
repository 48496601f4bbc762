//! Room in the snapshot table.

use super::work::Did;
use super::{Inner, Store};
use crate::error::Result;
use std::time::Duration;

/// Extents that are merged at most for who finds the snapshot table full: a volume's I/O may be paused meanwhile.
const STEPS: u64 = 256;
/// How often, and how long each time, it waits at most for others.
const LOOKS: u32 = 100;
const WAIT: Duration = Duration::from_millis(2);

/// Places in the snapshot table that others leave to who has made sure of them, until this is dropped.
#[must_use]
pub(super) struct Slots<'a> {
    inner: &'a Inner,
    count: u32,
}

impl Drop for Slots<'_> {
    fn drop(&mut self) {
        self.inner.meta().slots_kept -= self.count;
    }
}

impl Store {
    /// Makes sure that so many snapshots have a place in the table, if what is deleted leaves some: who was told that a
    /// deletion is done need not wait for the background. If there are none nevertheless, who creates one says so.
    ///
    /// The caller may have requests on their way on this thread, so it waits for nobody for long.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub(super) fn make_slots(&self, count: u32) -> Result<Slots<'_>> {
        self.inner.meta().slots_kept += count;
        let slots = Slots { inner: &self.inner, count };
        let (mut left, mut patience) = (STEPS, LOOKS);
        while left > 0 && patience > 0 && self.inner.meta().wants_slots() {
            // A flatten or vacuum has the turn for long; who works in the background gives it up soon.
            let did = match self.try_take_work() {
                Some(_turn) => self.inner.work_step(left, |merge| self.inner.is_unheld(merge))?,
                None => Did::Waits,
            };
            match did {
                Did::Nothing => break,
                Did::Steps(some) => left = left.saturating_sub(some),
                Did::Waits => {
                    patience -= 1;
                    std::thread::sleep(WAIT);
                }
            }
        }
        Ok(slots)
    }
}

#[cfg(test)]
mod tests {
    use crate::store::{InitOptions, OpenOptions, SnapshotOptions, Store};

    /// Found by review: of two who needed room at once, one made it for himself, the other found it there and took it, and
    /// the first was refused though more had been deleted.
    #[test]
    fn who_finds_room_that_another_has_made_leaves_it_to_him() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let init = InitOptions {
            size: Some(64 << 20),
            max_volumes: Some(4),
            max_snapshots: Some(8),
            ..InitOptions::default()
        };
        Store::init(&path, &init).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", 1 << 20).unwrap();
        let snapshot = |name: &str| store.create_snapshot("v", name, &SnapshotOptions::default());
        let count = (0..).take_while(|index| snapshot(&format!("s{index}")).is_ok()).count();
        assert!(count > 3);
        for deleted in ["s0", "s1"] {
            store.delete_snapshot("v", deleted).unwrap();
        }
        let made = store.make_slots(1).unwrap();
        snapshot("other").unwrap();
        assert_eq!(store.info().snapshots_deleting, 0);
        drop(made);
        snapshot("own").unwrap();
        assert!(snapshot("more").is_err());
        assert_eq!(store.inner.meta().slots_kept, 0);
    }
}
