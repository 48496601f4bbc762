//! A gate at which a chosen operation of the disk waits, so that a test can put another call
//! exactly there.

use crate::lock;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// An operation of the disk, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The n-th change, before it is made: a batch of writes, a flush, a discard, an allocation or a
    /// change of size.
    Change(u64),
    /// The n-th batch of reads, when it has been answered and before the caller knows.
    Read(u64),
}

/// Holds one operation until opened.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    /// What is still to come.
    at: At,
    holding: bool,
    open: bool,
    over: bool,
}

impl Gate {
    /// A gate that holds this operation.
    #[must_use]
    pub fn new(at: At) -> Self {
        Self {
            state: Mutex::new(GateState { at, holding: false, open: false, over: false }),
            changed: Condvar::new(),
        }
    }

    /// A change passes, waiting if it is its turn to be held.
    pub(crate) fn pass_change(&self) {
        self.pass(|at| if let At::Change(left) = at { Some(left) } else { None });
    }

    /// A batch of reads passes, waiting if it is its turn to be held.
    pub(crate) fn pass_read(&self) {
        self.pass(|at| if let At::Read(left) = at { Some(left) } else { None });
    }

    fn pass(&self, counted: impl FnOnce(&mut At) -> Option<&mut u64>) {
        let mut state = lock(&self.state);
        let Some(left) = counted(&mut state.at).filter(|left| **left > 0) else { return };
        *left -= 1;
        if *left > 0 || state.open {
            return;
        }
        state.holding = true;
        self.changed.notify_all();
        while !state.open {
            state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        state.holding = false;
    }

    /// Waits until an operation is held; false if none came within `limit`.
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

    /// Lets the held operation, and all others, go on.
    pub fn open(&self) {
        lock(&self.state).open = true;
        self.changed.notify_all();
    }
}
