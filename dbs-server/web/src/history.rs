//! What the graphs of a page show, from before it was opened.

use serde::{Serialize, Serializer};
use std::collections::VecDeque;
use std::iter::once;
use std::time::Duration;

/// How many are kept: at one in a second, those of an hour.
pub const SAMPLES_MAX: usize = 3600;

/// The last figures, oldest first.
#[derive(Debug)]
pub struct History<const N: usize>(VecDeque<Sample<N>>);

/// Figures of a moment; in JSON an array, with the time in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample<const N: usize> {
    /// Goes up from one to the next.
    turn: u64,
    /// When, in milliseconds by the clock of who takes them.
    at_ms: u64,
    values: [u64; N],
}

impl<const N: usize> Default for History<N> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<const N: usize> History<N> {
    /// Takes figures in; `turn` is higher than the last time.
    pub fn push(&mut self, turn: u64, at: Duration, values: [u64; N]) {
        if self.0.len() == SAMPLES_MAX {
            self.0.pop_front();
        }
        let at_ms = u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
        self.0.push_back(Sample { turn, at_ms, values });
    }

    /// Those of later turns than this one.
    #[must_use]
    pub fn since(&self, turn: u64) -> Vec<Sample<N>> {
        let first = self.0.partition_point(|sample| sample.turn <= turn);
        self.0.range(first..).copied().collect()
    }
}

impl<const N: usize> Serialize for Sample<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(once(self.at_ms).chain(self.values))
    }
}

/// So many a second.
#[must_use]
pub fn rate(count: u64, over: Duration) -> u64 {
    let nanos = over.as_nanos().max(1);
    u64::try_from(u128::from(count) * 1_000_000_000 / nanos).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_hour_is_kept_and_told_from_where_a_page_was() {
        let mut history = History::default();
        assert!(history.since(0).is_empty());
        let all = SAMPLES_MAX as u64 + 5;
        for turn in 1..=all {
            history.push(turn, Duration::from_millis(turn * 1000), [turn, 7]);
        }
        assert_eq!(history.since(0).len(), SAMPLES_MAX);
        assert_eq!(history.since(3).len(), SAMPLES_MAX, "the oldest are gone");
        let last = history.since(all - 2);
        let shown = serde_json::to_value(&last).unwrap();
        let row = |turn: u64| serde_json::json!([turn * 1000, turn, 7]);
        assert_eq!(shown, serde_json::json!([row(all - 1), row(all)]));
        assert!(history.since(all).is_empty());
    }

    #[test]
    fn rates_are_by_the_second() {
        assert_eq!(rate(10, Duration::from_secs(2)), 5);
        assert_eq!(rate(u64::MAX, Duration::from_nanos(1)), u64::MAX);
        assert_eq!(rate(7, Duration::ZERO), 7_000_000_000);
    }
}
