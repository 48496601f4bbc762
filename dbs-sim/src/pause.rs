//! A gate at which a chosen change of the disk waits, so that a test can put another call
//! exactly there.

use crate::lock;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Holds one change, the n-th to arrive, until opened.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    until: u64,
    holding: bool,
    open: bool,
    over: bool,
}

impl Gate {
    /// A gate that holds the `nth` change, counted from 1.
    #[must_use]
    pub fn new(nth: u64) -> Self {
        Self {
            state: Mutex::new(GateState { until: nth, holding: false, open: false, over: false }),
            changed: Condvar::new(),
        }
    }

    /// Passes, waiting if it is this call's turn to be held.
    pub fn pass(&self) {
        let mut state = lock(&self.state);
        if state.until == 0 {
            return;
        }
        state.until -= 1;
        if state.until > 0 || state.open {
            return;
        }
        state.holding = true;
        self.changed.notify_all();
        while !state.open {
            state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        state.holding = false;
    }

    /// Waits until a change is held; false if none came within `limit`.
    pub fn wait_held(&self, limit: Duration) -> bool {
        let state = lock(&self.state);
        let (state, _) = self
            .changed
            .wait_timeout_while(state, limit, |state| !state.holding && !state.over)
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        state.holding
    }

    /// The call that was to be held has returned: nobody need wait for it.
    pub fn arrived(&self) {
        let mut state = lock(&self.state);
        state.over = true;
        self.changed.notify_all();
    }

    /// Lets the held change, and all others, go on.
    pub fn open(&self) {
        lock(&self.state).open = true;
        self.changed.notify_all();
    }
}
