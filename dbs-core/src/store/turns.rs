//! Turns at what one does for all who asked before it began: at commits, and at flushes of the storage.

use super::Inner;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Tells who may not block that a turn has ended, from any thread: it takes no lock of the store.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Who asked, and who has the turn.
#[derive(Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    asked: u64,
    done: u64,
    running: bool,
    /// Who is to look again when the turn ends.
    waiting: Vec<Wake>,
}

/// A turn. Who panics with it gives it back, since others wait for its end, and stops all writing, since nobody
/// knows what it has done.
#[must_use]
pub(super) struct Held<'a> {
    turns: &'a Turns,
    inner: &'a Inner,
}

impl<'a> Held<'a> {
    /// The turn that the caller has.
    pub fn new(turns: &'a Turns, inner: &'a Inner) -> Self {
        Self { turns, inner }
    }

    /// As [`Turns::end`].
    pub fn end(self, covers: Option<u64>) {
        self.turns.end(covers);
        std::mem::forget(self);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.inner.poison("a panic amid a flush or a commit");
        self.turns.end(None);
    }
}

/// What there is for one who asked.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// A turn that began after it was asked has ended.
    Done,
    /// It has the turn, for all who asked so far: the number is for [`Turns::end`].
    Turn(u64),
    /// Somebody else has the turn.
    Busy,
}

impl State {
    fn ask(&mut self) -> u64 {
        self.asked += 1;
        self.asked
    }

    fn look(&mut self, number: u64) -> Look {
        if self.done >= number {
            return Look::Done;
        }
        if self.running {
            return Look::Busy;
        }
        self.running = true;
        Look::Turn(self.asked)
    }
}

impl Turns {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many have asked.
    pub fn asked(&self) -> u64 {
        self.state().asked
    }

    /// Waits for the turn; `None` if somebody has ended one meanwhile that began after this call.
    pub fn take(&self) -> Option<u64> {
        let mut state = self.state();
        let number = state.ask();
        loop {
            match state.look(number) {
                Look::Done => return None,
                Look::Turn(covers) => return Some(covers),
                Look::Busy => {
                    state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// As [`Turns::take`], for who may not wait: if somebody has the turn, `wake` is called when it
    /// ends. `number` is that of who asks, who has none at first.
    pub fn try_take(&self, number: &mut Option<u64>, wake: &Wake) -> Look {
        let mut state = self.state();
        let number = *number.get_or_insert_with(|| state.ask());
        let look = state.look(number);
        if look == Look::Busy {
            state.waiting.push(Arc::clone(wake));
        }
        look
    }

    /// Waits for a turn at which nothing is done for others.
    pub fn take_alone(&self) {
        let state = self.state();
        let waited = self.ended.wait_while(state, |state| state.running);
        waited.unwrap_or_else(PoisonError::into_inner).running = true;
    }

    /// Ends a turn, which has done what so many asked for, or nothing for anybody: who asked since it
    /// began waits for the next.
    pub fn end(&self, covers: Option<u64>) {
        let mut state = self.state();
        state.running = false;
        state.done = covers.unwrap_or(state.done);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.ended.notify_all();
        waiting.iter().for_each(|wake| wake());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_turn_is_for_those_who_asked_before_it_began() {
        let turns = Turns::default();
        let woken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&woken);
        let wake: Wake = Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let covers = turns.take().unwrap();
        let (mut late, mut later) = (None, None);
        assert_eq!(turns.try_take(&mut late, &wake), Look::Busy, "one at a time");
        assert_eq!(woken.load(Ordering::Relaxed), 0);
        turns.end(Some(covers));
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        let Look::Turn(covers) = turns.try_take(&mut late, &wake) else {
            panic!("it was not done")
        };
        assert_eq!(turns.try_take(&mut later, &wake), Look::Busy);
        turns.end(Some(covers));
        assert_eq!(turns.try_take(&mut late, &wake), Look::Done);
        // One that does nothing is for nobody.
        turns.take_alone();
        turns.end(None);
        let mut third = None;
        let Look::Turn(covers) = turns.try_take(&mut third, &wake) else {
            panic!("nothing was done")
        };
        turns.end(Some(covers));
        assert_eq!(turns.try_take(&mut later, &wake), Look::Done, "it shares the next");
    }
}
