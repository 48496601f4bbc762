//! What a frontend has up. While it is being ended, it counts as up: its users may be there still.

use dbs_core::Result;
use dbs_frontend::lock;
use std::sync::Mutex;

/// A frontend's, or nothing.
pub(super) struct Running<T> {
    state: Mutex<State<T>>,
    /// Held by whoever ends it: who comes later waits.
    ending: Mutex<()>,
}

enum State<T> {
    Down,
    Up(T),
    Ending,
}

impl<T> Default for Running<T> {
    fn default() -> Self {
        Self { state: Mutex::new(State::Down), ending: Mutex::default() }
    }
}

impl<T> Running<T> {
    /// Whether users may be there.
    pub fn is_up(&self) -> bool {
        !matches!(*lock(&self.state), State::Down)
    }

    /// Whether its end has begun, and has not come.
    pub fn is_ending(&self) -> bool {
        matches!(*lock(&self.state), State::Ending)
    }

    /// It is up.
    pub fn set(&self, running: T) {
        *lock(&self.state) = State::Up(running);
    }

    /// Something of it; `None` if it is down or being ended. `what` must not wait.
    pub fn with<R>(&self, what: impl FnOnce(&T) -> R) -> Option<R> {
        match &*lock(&self.state) {
            State::Up(running) => Some(what(running)),
            State::Down | State::Ending => None,
        }
    }

    /// Ends it, if it is up. `how` may take its time, and answers with what is there still.
    pub fn end(&self, how: impl FnOnce(T) -> (Option<T>, Result<()>)) -> Result<()> {
        let _turn = lock(&self.ending);
        let running = {
            let mut state = lock(&self.state);
            match std::mem::replace(&mut *state, State::Ending) {
                State::Up(running) => running,
                other => {
                    *state = other;
                    return Ok(());
                }
            }
        };
        let (left, outcome) = how(running);
        *lock(&self.state) = left.map_or(State::Down, State::Up);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::Error;
    use std::sync::Arc;
    use std::sync::mpsc;

    #[test]
    fn what_is_being_ended_is_up_until_it_has_ended() {
        let running = Arc::new(Running::default());
        assert!(!running.is_up());
        running.set(1);
        assert_eq!(
            (running.is_up(), running.is_ending(), running.with(|x| *x)),
            (true, false, Some(1))
        );
        let (begun, wait) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        let its = Arc::clone(&running);
        let ending = std::thread::spawn(move || {
            its.end(|_| {
                begun.send(()).unwrap();
                gone.recv().unwrap();
                (None, Ok(()))
            })
        });
        wait.recv().unwrap();
        assert_eq!(
            (running.is_up(), running.is_ending(), running.with(|x| *x)),
            (true, true, None)
        );
        // Who ends it as well returns when it has ended.
        let its = Arc::clone(&running);
        let other = std::thread::spawn(move || its.end(|_| unreachable!()).map(|()| its.is_up()));
        go.send(()).unwrap();
        ending.join().unwrap().unwrap();
        assert!(!other.join().unwrap().unwrap() && !running.is_up());
        running.end(|_| unreachable!()).unwrap();
        // What cannot be ended is up.
        running.set(2);
        running.end(|x| (Some(x + 1), Err(Error::busy("in use")))).unwrap_err();
        assert_eq!((running.with(|x| *x), running.is_ending()), (Some(3), false));
    }
}
