//! Small parts of the state that requests change beside one another, each with a lock of its own that is
//! held for a moment. They lie so that two cores with two of them are not in each other's way.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Lanes of each kind.
pub const LANES: usize = 64;

/// A part.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Lane<T>(Mutex<T>);

impl<T: Default> Lane<T> {
    /// All of a kind.
    pub fn all() -> Box<[Self]> {
        (0..LANES).map(|_| Self::default()).collect()
    }

    /// The part, for who shares the state. A panic while it was locked has poisoned the store, as in any
    /// step of the state.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The part, for who has the state alone.
    #[inline]
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

static NEXT: AtomicUsize = AtomicUsize::new(0);
thread_local! {
    static MINE: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The lane that this thread takes where any will do.
#[inline]
pub fn of_thread() -> usize {
    let mine = MINE.get();
    if mine < LANES { mine } else { first_of_thread() }
}

/// The lanes that threads have taken until now are those below it.
pub fn used() -> usize {
    NEXT.load(Ordering::Relaxed).min(LANES)
}

#[cold]
fn first_of_thread() -> usize {
    let mine = NEXT.fetch_add(1, Ordering::Relaxed) % LANES;
    MINE.set(mine);
    mine
}
