//! The lock around the state: many share it, or one has it alone.
//!
//! Who shares it through a lock for readers and writers counts itself there, and so all cores write the
//! same line of memory. Therefore the state is *lent* to threads, once nobody has had it alone for a while:
//! each finds it in a slot of its own, and locks no more than that. Who wants it alone takes
//! it back from all slots.

use crate::meta::lanes::{self, LANES, Lane};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Times it is shared, one after the other, before it is lent: taking it back costs as much.
const LEND_AFTER: u32 = 64;
const _: () = assert!(LANES <= u64::BITS as usize);

/// A value and its lock.
#[derive(Debug)]
pub(crate) struct Share<T> {
    main: RwLock<Main<T>>,
    slots: Box<[Lane<Option<Arc<T>>>]>,
}

#[derive(Debug)]
struct Main<T> {
    /// One of as many as there are slots that have it, and this.
    value: Arc<T>,
    /// Slots that have it, by their bits.
    lent: AtomicU64,
    /// Times that it was shared since somebody had it alone.
    shared: AtomicU32,
}

/// The value, shared.
pub(crate) enum Shared<'a, T> {
    /// By who found it in a slot.
    Lent(MutexGuard<'a, Option<Arc<T>>>),
    /// By who did not.
    Counted(Counted<'a, T>),
}

/// The value, shared with others that are counted.
pub(crate) struct Counted<'a, T>(RwLockReadGuard<'a, Main<T>>);

/// The value, of one alone.
pub(crate) struct Alone<'a, T>(RwLockWriteGuard<'a, Main<T>>);

impl<T> Share<T> {
    /// A value that nobody has.
    pub fn new(value: T) -> Self {
        let main = Main { value: Arc::new(value), lent: 0.into(), shared: 0.into() };
        Self { main: RwLock::new(main), slots: Lane::all() }
    }

    /// The value, shared, and whether somebody panicked who had it alone.
    #[inline]
    pub fn share(&self) -> (Shared<'_, T>, bool) {
        let slot = self.slots[lanes::of_thread()].lock();
        if slot.is_some() {
            return (Shared::Lent(slot), false);
        }
        // In the other order it would wait for who takes back what is lent.
        drop(slot);
        self.share_counted()
    }

    fn share_counted(&self) -> (Shared<'_, T>, bool) {
        let (main, poisoned) = match self.main.read() {
            Ok(main) => (main, false),
            Err(poisoned) => (poisoned.into_inner(), true),
        };
        if main.shared.fetch_add(1, Ordering::Relaxed) >= LEND_AFTER && !poisoned {
            let mine = lanes::of_thread();
            // While it is shared nobody takes it back.
            *self.slots[mine].lock() = Some(Arc::clone(&main.value));
            main.lent.fetch_or(1 << mine, Ordering::Relaxed);
        }
        (Shared::Counted(Counted(main)), poisoned)
    }

    /// The value, alone, and whether somebody panicked who had it so.
    pub fn alone(&self) -> (Alone<'_, T>, bool) {
        let (mut main, poisoned) = match self.main.write() {
            Ok(main) => (main, false),
            Err(poisoned) => (poisoned.into_inner(), true),
        };
        *main.shared.get_mut() = 0;
        let mut lent = std::mem::take(main.lent.get_mut());
        while lent != 0 {
            // Locked for as long as somebody uses it.
            drop(self.slots[lent.trailing_zeros() as usize].lock().take());
            lent &= lent - 1;
        }
        (Alone(main), poisoned)
    }
}

impl<T> Deref for Shared<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        match self {
            Self::Lent(slot) => slot.as_deref().expect("it is lent"),
            Self::Counted(main) => &main.0.value,
        }
    }
}

impl<T> Deref for Alone<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T> DerefMut for Alone<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        Arc::get_mut(&mut self.0.value).expect("it was taken back from all")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// How many do something, and whether one of them does it alone.
    #[derive(Default)]
    struct Seen {
        sharing: AtomicU32,
        alone: AtomicBool,
        changes: u64,
    }

    #[test]
    fn nobody_shares_what_one_has_alone() {
        let share = Share::new(Seen::default());
        let (mut changed, mut lent) = (0, AtomicU64::new(0));
        std::thread::scope(|scope| {
            let changers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..2_000 {
                            let (mut seen, _) = share.alone();
                            assert!(!seen.alone.swap(true, Ordering::SeqCst), "two alone");
                            assert_eq!(seen.sharing.load(Ordering::SeqCst), 0, "shared");
                            seen.changes += 1;
                            seen.alone.store(false, Ordering::SeqCst);
                            drop(seen);
                            std::thread::sleep(std::time::Duration::from_micros(20));
                        }
                    })
                })
                .collect();
            for _ in 0..3 {
                scope.spawn(|| {
                    while share.share().0.changes < 4_000 {
                        let (seen, _) = share.share();
                        lent.fetch_add(
                            u64::from(matches!(seen, Shared::Lent(_))),
                            Ordering::Relaxed,
                        );
                        seen.sharing.fetch_add(1, Ordering::SeqCst);
                        assert!(!seen.alone.load(Ordering::SeqCst), "one has it alone");
                        seen.sharing.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
            changed += changers.len() as u64 * 2_000;
        });
        assert_eq!(share.alone().0.changes, changed);
        assert!(*lent.get_mut() > 0, "it was never lent");
    }

    #[test]
    fn it_is_lent_when_it_was_shared_often_and_taken_back() {
        let share = Share::new(0);
        let is_lent = || matches!(share.share().0, Shared::Lent(_));
        for _ in 0..2 {
            assert!((0..=LEND_AFTER).all(|_| !is_lent()) && is_lent());
            *share.alone().0 += 1;
            assert!(!is_lent());
            *share.alone().0 += 1;
        }
        assert_eq!(*share.share().0, 4);
    }

    #[test]
    fn a_panic_of_who_has_it_alone_is_told() {
        let share = Share::new(0);
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _alone = share.alone();
                panic!("on purpose");
            });
            assert!(panics.join().is_err());
        });
        assert!((0..2 * LEND_AFTER).all(|_| share.share().1) && share.alone().1);
    }
}
