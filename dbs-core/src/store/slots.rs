//! Room in the snapshot table.

use super::work::Did;
use super::{Inner, Store};
use crate::error::Result;
use crate::meta::Meta;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Extents that are merged before it is looked whether there is a place.
const STEPS: u64 = 256;
/// How long is merged at most for who finds the snapshot table full: a volume's I/O may be paused meanwhile.
const LONGEST: Duration = Duration::from_secs(if cfg!(test) { 3600 } else { 4 });
/// How often, and how long each time, it waits at most for others.
const LOOKS: u32 = 100;
const WAIT: Duration = Duration::from_millis(2);

/// Places in the snapshot table that others leave to who has made sure of them, until they are taken or this is dropped.
#[must_use]
pub(super) struct Slots<'a> {
    inner: &'a Inner,
    count: Cell<u32>,
}

impl Slots<'_> {
    /// They are in use now: while that is made durable, others need leave none for it.
    pub(super) fn taken(&self, meta: &mut Meta) {
        meta.slots_kept -= self.count.take();
    }
}

impl Drop for Slots<'_> {
    fn drop(&mut self) {
        self.taken(&mut self.inner.meta());
    }
}

impl Store {
    /// Makes sure that so many snapshots have a place in the table, if what is deleted leaves some: who was told that a
    /// deletion is done need not wait for the background. If there are none nevertheless, who creates one says so.
    ///
    /// The caller may have requests on their way on this thread, so it waits for nobody for long; but it merges on for as
    /// long as that gets on, and some seconds at most.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub(super) fn make_slots(&self, count: u32) -> Result<Slots<'_>> {
        self.inner.meta().slots_kept += count;
        let slots = Slots { inner: &self.inner, count: Cell::new(count) };
        let (begun, mut patience) = (Instant::now(), LOOKS);
        while patience > 0 && self.inner.meta().wants_slots() && begun.elapsed() < LONGEST {
            // A flatten or vacuum has the turn for long; who works in the background gives it up soon.
            let did = match self.try_take_work() {
                Some(_turn) => self.inner.work_step(STEPS, |merge| self.inner.is_unheld(merge))?,
                None => Did::Waits,
            };
            match did {
                Did::Nothing => break,
                Did::Steps(_) => {}
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
    use crate::info::Labels;
    use crate::store::{InitOptions, OpenOptions, SnapshotOptions, Store};
    use crate::units::VolumeId;

    /// A store whose snapshot table is full of snapshots of `v`, each with blocks of its own in so many extents.
    fn full(extents: u64) -> (tempfile::TempDir, Store) {
        const EXTENT: u64 = 64 << 10;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let init = InitOptions {
            size: Some(256 << 20),
            extent_size: EXTENT,
            max_volumes: Some(4),
            max_snapshots: Some(8),
            checksums: false,
            ..InitOptions::default()
        };
        Store::init(&path, &init).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", extents * EXTENT).unwrap();
        let volume = store.volume("v").unwrap();
        let made = (0..).take_while(|number: &u64| {
            for extent in 0..extents {
                let block = 2 * (number % 8);
                volume.write_at(extent * EXTENT + block * 4096, &[1; 8192], false).unwrap();
            }
            store.create_snapshot("v", &format!("s{number}"), &SnapshotOptions::default()).is_ok()
        });
        assert!(made.count() > 3);
        (directory, store)
    }

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

    /// While what has taken its place was made durable, others made room that nobody needed.
    #[test]
    fn a_place_that_is_taken_is_not_kept_any_more() {
        let (_directory, store) = full(1);
        store.delete_snapshot("v", "s0").unwrap();
        store.delete_snapshot("v", "s1").unwrap();
        let slots = store.make_slots(1).unwrap();
        assert_eq!(store.inner.meta().slots_kept, 1);
        let births = store.inner.births(None);
        let made = store.inner.step(|meta| {
            let made = meta.create_snapshot(VolumeId(1), "new", true, &Labels::new(), births)?;
            slots.taken(meta);
            Ok(made)
        });
        made.unwrap();
        assert_eq!(store.inner.meta().slots_kept, 0);
        drop(slots);
        assert_eq!(store.inner.meta().slots_kept, 0);
    }

    /// Found by review: who needed a place was refused, once, if merging what was deleted took more than 256 extents.
    #[test]
    fn a_place_is_made_however_much_the_deleted_snapshot_holds() {
        let (_directory, store) = full(400);
        store.delete_snapshot("v", "s0").unwrap();
        store.create_snapshot("v", "new", &SnapshotOptions::default()).unwrap();
        assert!(store.check().unwrap().findings.is_empty());
    }
}
