//! A call that stands still where it says so, while the history goes on beside it.
//!
//! It has a thread of its own, but one of the two runs at a time: so a history repeats itself.

use dbs_core::sabotage::{self, Bug};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

/// The call.
pub struct Standing<T> {
    go: Option<Sender<bool>>,
    stands: Receiver<()>,
    thread: Option<JoinHandle<T>>,
}

/// What the call has to say where it stands.
pub struct Stand {
    tell: Sender<()>,
    hears: Receiver<bool>,
}

/// What there is of a call after it was let go on.
pub enum State<T> {
    /// It stands still again.
    Stands(Standing<T>),
    /// It has ended.
    Ended(T),
}

impl Stand {
    /// Stands still; whether it is to go on then, and not to stop.
    #[must_use]
    pub fn still(&self) -> bool {
        self.tell.send(()).is_ok() && self.hears.recv().unwrap_or(false)
    }
}

impl<T: Send + 'static> Standing<T> {
    /// Begins a call, up to where it first stands still.
    #[must_use]
    pub fn begin(call: impl FnOnce(Stand) -> T + Send + 'static) -> State<T> {
        let ((go, hears), (tell, stands)) = (channel(), channel());
        let bug = Bug::ALL.into_iter().find(|bug| sabotage::is(*bug));
        let thread = thread::spawn(move || {
            sabotage::set(bug);
            call(Stand { tell, hears })
        });
        Self { go: Some(go), stands, thread: Some(thread) }.look()
    }

    /// Lets it go on, or stop.
    #[must_use]
    pub fn next(self, go: bool) -> State<T> {
        // If it has ended, it does not hear that.
        let _ended = self.go.as_ref().map(|tell| tell.send(go));
        self.look()
    }

    /// Lets it come to its end, going on or stopping wherever it stands.
    #[must_use]
    pub fn end(mut self, go: bool) -> T {
        loop {
            match self.next(go) {
                State::Stands(call) => self = call,
                State::Ended(ended) => return ended,
            }
        }
    }

    fn look(mut self) -> State<T> {
        if self.stands.recv().is_ok() {
            return State::Stands(self);
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(ended)) => State::Ended(ended),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => unreachable!("a call ends once"),
        }
    }
}

impl<T> Drop for Standing<T> {
    fn drop(&mut self) {
        // Nobody hears from it any more, and it stands nowhere.
        drop(self.go.take());
        let _unheard = self.thread.take().map(JoinHandle::join);
    }
}
