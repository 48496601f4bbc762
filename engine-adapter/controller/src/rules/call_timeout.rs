//! Timeouts of calls that go to several replicas at once, while I/O of the volume may be paused.
//!
//! - The first *success of a complete replica* starts the clock for the others, because the volume can go
//!   on with this replica. An answer of a replica that is being rebuilt starts no clock. So the last
//!   complete replica has as long as a call may take.
//! - If complete replicas have only *failed* so far, a replica that has not answered may be the last good
//!   one. It has twice as long, as on the data path ([`super::timeout::long`]). But a replica that hangs
//!   does not keep I/O paused for as long as a call may take.

use super::mode::{Slot, Slots};
use super::sabotage::{Bug, is};
use super::timeout::long;
use std::time::Duration;

/// The timeouts of some calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallTimeout {
    /// Those whose answers count, by their places among the calls.
    counted: Slots,
    /// From the first success of one of them.
    others: Duration,
    /// From the first failure of one of them, as long as none has succeeded.
    failed: Duration,
    /// From the beginning.
    all: Option<Duration>,
}

impl CallTimeout {
    /// For calls whose answers are all worth the same.
    #[must_use]
    pub const fn among_equals(short: Duration) -> Self {
        let counted = Slots::from_bits(u64::MAX);
        Self { counted, others: short, failed: long(short), all: None }
    }

    /// For calls that all replicas make while I/O is paused. They have flushed right before, so little is
    /// left to make durable, and one that hangs must not keep I/O waiting; `complete` are the
    /// places of complete replicas among them.
    #[must_use]
    pub fn for_all(complete: Slots, short: Duration) -> Self {
        let others = long(short);
        let counted = if is(Bug::HurryForAny) { Slots::from_bits(u64::MAX) } else { complete };
        Self { counted, others, failed: long(others), all: None }
    }

    /// For calls that fail after this time.
    #[must_use]
    pub const fn at_most(time: Duration) -> Self {
        Self { all: Some(time), ..Self::among_equals(time) }
    }
}

/// Calls that are being waited for.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    timeout: Option<CallTimeout>,
    succeeded: bool,
    end: Option<Duration>,
}

impl Waiting {
    /// From now on; without a timeout until all have answered.
    #[must_use]
    pub fn begin(timeout: Option<CallTimeout>) -> Self {
        let end = timeout.and_then(|timeout| timeout.all);
        Self { timeout, succeeded: false, end }
    }

    /// Notes the answer to the call at this place, so long after the beginning.
    pub fn answered(&mut self, place: usize, success: bool, now: Duration) {
        let Some(timeout) = self.timeout else { return };
        if !Slot::new(place).is_some_and(|place| timeout.counted.contains(place)) {
            return;
        }
        let limit = match (success, self.succeeded, self.end) {
            (true, false, _) => timeout.others,
            (false, false, None) => timeout.failed,
            _ => return,
        };
        self.succeeded |= success;
        let end = now.saturating_add(limit);
        self.end = Some(timeout.all.map_or(end, |all| all.min(end)));
    }

    /// When the waiting ends, so long after the beginning, if that is known.
    #[must_use]
    pub const fn end(&self) -> Option<Duration> {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn places(places: &[usize]) -> Slots {
        places.iter().filter_map(|place| Slot::new(*place)).collect()
    }

    /// When waiting for calls ends: the first so many are of complete replicas.
    fn end(complete: usize, answers: &[(usize, bool, u64)]) -> Option<u64> {
        let complete: Vec<_> = (0..complete).collect();
        let timeout = CallTimeout::for_all(places(&complete), s(8));
        let mut waiting = Waiting::begin(Some(timeout));
        for (place, success, at) in answers {
            waiting.answered(*place, *success, s(*at));
        }
        waiting.end().map(|end| end.as_secs())
    }

    #[test]
    fn only_a_complete_replica_starts_the_clock_of_others() {
        for (complete, answers, ends) in [
            (2, &[(0, true, 3)][..], Some(19)),
            (2, &[(0, true, 3), (1, true, 9)], Some(19)),
            // One that is rebuilt, or is empty and to join.
            (1, &[(1, true, 1)], None),
            (1, &[(1, true, 1), (2, false, 2)], None),
            (1, &[(1, true, 1), (0, true, 20)], Some(36)),
            // Nobody has it: the last one may be the good one.
            (2, &[(0, false, 3)], Some(35)),
            (3, &[(0, false, 3), (1, false, 30)], Some(35)),
            (3, &[(0, false, 3), (1, true, 30)], Some(46)),
            (3, &[(0, true, 3), (1, false, 10)], Some(19)),
            (1, &[(1, false, 1)], None),
            (0, &[(0, true, 1)], None),
        ] {
            assert_eq!(end(complete, answers), ends, "{complete} {answers:?}");
        }
    }

    #[test]
    fn a_call_waits_as_long_as_what_it_does_may_take() {
        let mut waiting = Waiting::begin(Some(CallTimeout::for_all(places(&[0]), s(30))));
        waiting.answered(0, true, s(1));
        assert_eq!(waiting.end(), Some(s(61)));
        let mut waiting = Waiting::begin(Some(CallTimeout::among_equals(s(8))));
        waiting.answered(5, true, s(1));
        assert_eq!(waiting.end(), Some(s(9)));
        let mut waiting = Waiting::begin(Some(CallTimeout::at_most(s(8))));
        assert_eq!(waiting.end(), Some(s(8)));
        waiting.answered(0, false, s(7));
        assert_eq!(waiting.end(), Some(s(8)));
        let mut waiting = Waiting::begin(None);
        waiting.answered(0, true, s(1));
        assert_eq!(waiting.end(), None);
    }
}
