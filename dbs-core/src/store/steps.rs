//! Turns at steps of background work, in the order in which they are asked for.
//!
//! A flatten or a vacuum may take hours, and has the turn of background work (`Inner::work`) all the time. Between two of
//! its steps the state is whole. So who needs no more than that takes a turn here, and waits for one step.

use std::sync::{Condvar, Mutex, PoisonError};

/// Who asked, and whose turn it is: by numbers, as who does step after step would take a plain lock again before those
/// who wait for it wake up.
#[derive(Default)]
pub(super) struct Steps {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    asked: u64,
    ended: u64,
}

/// A turn, until it is dropped.
#[must_use]
pub(super) struct StepTurn<'a>(&'a Steps);

impl Steps {
    /// Waits for the turn.
    pub fn take(&self) -> StepTurn<'_> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let number = state.asked;
        state.asked += 1;
        let state = self.ended.wait_while(state, |state| state.ended < number);
        drop(state.unwrap_or_else(PoisonError::into_inner));
        StepTurn(self)
    }
}

impl Drop for StepTurn<'_> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).ended += 1;
        self.0.ended.notify_all();
    }
}
