//! Who needs a block of a backup store that says nothing does not wait for it if others do already.

use dbs_core::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A failure that took less holds nobody up, and says nothing of other blocks.
const LONG: Duration = Duration::from_secs(10);

/// Lets one read at a time try, while the store is known to be silent.
pub(super) struct Breaker {
    /// How long nothing may come before it is; no limit without.
    patience: Option<Duration>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    number: u64,
    /// When those began that wait, in this order.
    awaited: BTreeMap<u64, Instant>,
    /// When something came last.
    heard: Option<Instant>,
    /// How the last one failed, if nothing has come since.
    failed: Option<String>,
}

/// A read that waits for the store, until this is dropped.
pub(super) struct Awaited<'a> {
    breaker: &'a Breaker,
    number: u64,
}

impl Breaker {
    pub fn new(patience: Option<Duration>) -> Self {
        Self { patience, state: Mutex::default() }
    }

    /// Begins to wait.
    ///
    /// # Errors
    /// `Io` if the store is silent, and another one waits.
    pub fn enter(&self, now: Instant) -> Result<Awaited<'_>> {
        let mut state = self.state();
        if let (Some(patience), Some(oldest)) = (self.patience, state.awaited.values().next()) {
            let since = state.heard.map_or(*oldest, |heard| heard.max(*oldest));
            let silent = now.saturating_duration_since(since);
            let why = match &state.failed {
                Some(error) => error.clone(),
                None => format!("nothing has come for {} s", silent.as_secs()),
            };
            if state.failed.is_some() || silent >= patience {
                let text = format!("the backup store does not answer: {why}");
                return Err(Error::new(ErrorKind::Io, text));
            }
        }
        state.number += 1;
        let number = state.number;
        state.awaited.insert(number, now);
        Ok(Awaited { breaker: self, number })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Awaited<'_> {
    /// Notes how it ended: a store that says that something is damaged or absent does answer.
    pub fn ended(self, error: Option<&Error>, now: Instant) {
        let mut state = self.breaker.state();
        let begun = state.awaited.get(&self.number).copied().unwrap_or(now);
        match error.filter(|error| error.kind() == ErrorKind::Io) {
            None => (state.heard, state.failed) = (Some(now), None),
            Some(error) if now.saturating_duration_since(begun) >= LONG => {
                state.failed = Some(error.to_string());
            }
            Some(_) => {}
        }
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.breaker.state().awaited.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_tries_a_store_that_says_nothing() {
        let breaker = Breaker::new(Some(Duration::from_secs(60)));
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let refused = |seconds| breaker.enter(at(seconds)).err().map(|error| error.to_string());
        let (first, second) = (breaker.enter(at(0)).unwrap(), breaker.enter(at(59)).unwrap());
        assert!(refused(60).unwrap().contains("nothing has come for 60 s"));
        // A slow one is not silent.
        first.ended(None, at(70));
        assert_eq!((refused(129), refused(130).is_some()), (None, true));
        second.ended(Some(&Error::new(ErrorKind::Io, "no route")), at(140));
        let trying = breaker.enter(at(141)).unwrap();
        assert!(refused(142).unwrap().contains("no route"), "whatever its age");
        // What fails at once holds nobody up.
        trying.ended(Some(&Error::new(ErrorKind::Io, "no such file")), at(142));
        let trying = breaker.enter(at(150)).unwrap();
        assert!(refused(151).unwrap().contains("no route"));
        trying.ended(Some(&Error::corrupt("damaged")), at(152));
        let _one = breaker.enter(at(153)).unwrap();
        assert_eq!(refused(154), None, "it answers");
        let patient = Breaker::new(None);
        let _one = patient.enter(at(0)).unwrap();
        assert!(patient.enter(at(9999)).is_ok());
    }
}
