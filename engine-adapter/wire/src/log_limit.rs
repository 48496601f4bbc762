//! Lines of the log that strangers can cause: some at once, then one a second, which says how many were left out.

use dbs_service::log;
use std::fmt::Display;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines at once, after as many seconds without any.
const BURST: u32 = 16;
/// From one line to the next when there are too many.
const INTERVAL: Duration = Duration::from_secs(1);

/// Such lines of one kind.
#[derive(Debug)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Lines that may come at once.
    allowed: u32,
    /// When one was added to these last.
    since: Option<Instant>,
    left_out: u64,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new()
    }
}

impl LogLimit {
    /// Nothing has been logged so far.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(State { allowed: BURST, since: None, left_out: 0 }))
    }

    /// Logs this as a warning, or counts it if there are too many.
    pub fn warn(&self, event: &str, fields: &[(&str, &dyn Display)]) {
        let admitted = self.0.lock().unwrap_or_else(PoisonError::into_inner).admit(Instant::now());
        match admitted {
            None => {}
            Some(0) => log::warn(event, fields),
            Some(left_out) => {
                log::warn(event, &[fields, &[("left_out", &left_out as &dyn Display)]].concat());
            }
        }
    }
}

impl State {
    /// Whether a line may come now; how many could not before it.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let since = self.since.unwrap_or(now);
        let earned = now.saturating_duration_since(since).as_secs() / INTERVAL.as_secs();
        let missing = u64::from(BURST - self.allowed);
        if earned >= missing {
            (self.allowed, self.since) = (BURST, Some(now));
        } else {
            self.allowed += earned as u32;
            self.since = Some(since + INTERVAL * earned as u32);
        }
        match self.allowed.checked_sub(1) {
            Some(allowed) => {
                self.allowed = allowed;
                Some(std::mem::take(&mut self.left_out))
            }
            None => {
                self.left_out += 1;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_line_a_second_that_counts_the_others() {
        let begun = Instant::now();
        let at = |ms: u64| begun + Duration::from_millis(ms);
        let mut state = State { allowed: BURST, since: None, left_out: 0 };
        assert!((0..BURST).all(|_| state.admit(at(0)) == Some(0)));
        for second in 0..5 {
            assert!((0..100).all(|n| state.admit(at(second * 1000 + n)).is_none()));
            assert_eq!(state.admit(at((second + 1) * 1000)), Some(100));
        }
        // A calm time earns as much as at the beginning, and not more.
        let later = 3_600_000;
        assert_eq!(state.admit(at(later)), Some(0));
        assert!((1..BURST).all(|_| state.admit(at(later)) == Some(0)));
        assert_eq!(state.admit(at(later)), None);
        assert_eq!(state.admit(at(later + 3000)), Some(1));
        assert!((1..3).all(|_| state.admit(at(later + 3000)) == Some(0)));
        assert_eq!(state.admit(at(later + 3000)), None);
    }
}
