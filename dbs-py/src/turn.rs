//! One operation at a time on what several threads share.

use dbs_core::{Error, ErrorKind, Result};
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// How often it is looked whether another thread is done.
const PAUSE: Duration = Duration::from_millis(20);

/// What is shared.
pub struct Turns<T> {
    shared: Mutex<T>,
    /// The thread that has the turn, if it calls back what may ask for another one.
    taker: Mutex<Option<ThreadId>>,
}

/// Nobody else has it.
pub struct Turn<'a, T> {
    shared: MutexGuard<'a, T>,
    taker: &'a Mutex<Option<ThreadId>>,
}

impl<T> Turns<T> {
    pub fn new(shared: T) -> Self {
        Self { shared: Mutex::new(shared), taker: Mutex::default() }
    }

    /// What is shared, when other threads are done with it; `asker` is the thread of the caller.
    ///
    /// # Errors
    /// `Interrupted` if it does not go on; `Busy` if the caller would wait for itself.
    pub fn take(&self, asker: ThreadId, mut goes_on: impl FnMut() -> bool) -> Result<Turn<'_, T>> {
        loop {
            if *lock(&self.taker) == Some(asker) {
                return Err(Error::busy(
                    "an operation of this object runs, and what it has called asks for another one: open one more object for that",
                ));
            }
            let shared = match self.shared.try_lock() {
                Ok(shared) => Some(shared),
                Err(TryLockError::Poisoned(shared)) => Some(shared.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            // Asked also by who need not wait: the caller may have given up just now.
            if !goes_on() {
                return Err(Error::new(ErrorKind::Interrupted, "stopped before it began"));
            }
            match shared {
                Some(shared) => return Ok(Turn { shared, taker: &self.taker }),
                None => thread::sleep(PAUSE),
            }
        }
    }
}

impl<T> Turn<'_, T> {
    /// Taken by this thread, which calls back.
    #[must_use]
    pub fn here(self) -> Self {
        *lock(self.taker) = Some(thread::current().id());
        self
    }
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.shared
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        *lock(self.taker) = None;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
