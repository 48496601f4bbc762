//! A long call that stands still between two of its steps, while the history goes on beside it.
//!
//! It has a thread of its own, but one of the two runs at a time: so a history repeats itself.

use crate::op::{Long, volume_name};
use dbs_core::sabotage::{self, Bug};
use dbs_core::{Error, ErrorKind, Store};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

/// The call.
pub struct Job {
    /// What it does.
    pub long: Long,
    /// The model's number of the volume that it has open; 0 for none.
    pub id: u32,
    go: Sender<bool>,
    stands: Receiver<()>,
    thread: JoinHandle<Result<(), Error>>,
}

/// What there is of a call after it was let go on.
pub enum State {
    /// It stands still again.
    Stands(Job),
    /// It has ended.
    Ended(Result<(), Error>),
}

impl Job {
    /// Begins a call, up to its first step.
    #[must_use]
    pub fn begin(store: &Store, long: Long, id: u32) -> State {
        let ((go, hears), (tell, stands)) = (channel(), channel());
        let (store, bug) = (store.clone(), Bug::ALL.into_iter().find(|bug| sabotage::is(*bug)));
        let thread = thread::spawn(move || {
            sabotage::set(bug);
            let mut stood = false;
            let mut step = |_, _| {
                stood = true;
                tell.send(()).is_ok() && hears.recv().unwrap_or(false)
            };
            match long {
                Long::Flatten { vol } => match flatten(&store, vol, &mut step) {
                    // A rebuild of the volume began while it stood still.
                    Err(error) if stood && error.kind() == ErrorKind::Busy => Ok(()),
                    flattened => flattened,
                },
                Long::Vacuum => store.vacuum(&mut step).map(drop).or_else(not_stopped),
            }
        });
        Self { long, id, go, stands, thread }.look()
    }

    /// Lets it do so many steps.
    #[must_use]
    pub fn go_on(mut self, steps: u8) -> State {
        for _ in 0..steps {
            match self.next(true) {
                State::Stands(job) => self = job,
                ended @ State::Ended(_) => return ended,
            }
        }
        State::Stands(self)
    }

    /// Stops it.
    ///
    /// # Errors
    /// Those of the call.
    pub fn stop(mut self) -> Result<(), Error> {
        loop {
            match self.next(false) {
                State::Stands(job) => self = job,
                State::Ended(ended) => return ended,
            }
        }
    }

    fn next(self, go: bool) -> State {
        // If it has ended, it does not hear that.
        let _ended = self.go.send(go);
        self.look()
    }

    fn look(self) -> State {
        if self.stands.recv().is_ok() {
            return State::Stands(self);
        }
        State::Ended(self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

/// Flattens a volume; it may be stopped.
pub(crate) fn flatten(
    store: &Store,
    vol: u8,
    step: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(), Error> {
    match store.flatten(&volume_name(vol), step) {
        // A clone that rests on a file.
        Err(error)
            if error.kind() == ErrorKind::Unsupported
                && store.backing(&volume_name(vol))?.is_some() =>
        {
            Ok(())
        }
        flattened => flattened.or_else(not_stopped),
    }
}

/// Being stopped by the progress function is what was asked for.
pub(crate) fn not_stopped(error: Error) -> Result<(), Error> {
    if error.kind() == ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}
