//! How fast a volume may be used.
//!
//! Two buckets of tokens, one of requests and one of bytes, kept as the *generic cell rate algorithm* of ATM
//! does: of each bucket only the time is known when it is full again.

use crate::info::VolumeLimits;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

const SECOND_NS: u64 = 1_000_000_000;
/// The least burst: whoever waits is woken some time later than it was told.
const LATENESS_NS: u64 = 10_000_000;

/// The limits of one volume, and how much of them is used up: one for all that use the volume in this process.
///
/// It has no clock. `now` is the time since any moment that is the same for all who ask. Whoever is not let in
/// asks again when it was told to, or later: nothing is reserved.
#[derive(Debug, Default)]
pub struct Pace {
    limited: AtomicBool,
    state: Mutex<State>,
    delayed: AtomicU64,
    delayed_ns: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    limits: VolumeLimits,
    requests: Bucket,
    bytes: Bucket,
}

impl State {
    fn take(&mut self, now: u64, bytes: u64) {
        let VolumeLimits { iops, bandwidth, .. } = self.limits;
        if iops > 0 {
            self.requests.take(now, 1, iops.into());
        }
        if bandwidth > 0 {
            self.bytes.take(now, bytes, bandwidth);
        }
    }
}

/// A bucket that is full, or will be at this time.
#[derive(Debug, Default)]
struct Bucket {
    full_ns: u64,
}

impl Bucket {
    /// How long to wait until one more is let in, however much that one takes.
    fn wait(&self, now: u64, burst: u64) -> u64 {
        self.full_ns.saturating_sub(burst).saturating_sub(now)
    }

    fn take(&mut self, now: u64, amount: u64, per_second: u64) {
        let cost = u128::from(amount) * u128::from(SECOND_NS) / u128::from(per_second.max(1));
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        self.full_ns = self.full_ns.max(now).saturating_add(cost);
    }
}

impl Pace {
    /// With these limits from the start.
    pub(crate) fn new(limits: VolumeLimits) -> Self {
        let pace = Self::default();
        pace.set(limits);
        pace
    }

    /// Whether there is any limit: the quick look of those who use a volume that has none.
    #[inline]
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.limited.load(Relaxed)
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> VolumeLimits {
        self.state().limits
    }

    /// Other limits from now on. What was used up under the former ones counts no more.
    pub fn set(&self, limits: VolumeLimits) {
        let mut state = self.state();
        if state.limits != limits {
            *state = State { limits, ..State::default() };
        }
        self.limited.store(limits.is_some(), Relaxed);
    }

    /// Lets a request in that transfers so many bytes. It may use up more than there is, so that a request
    /// larger than the burst is let in, too; those behind it wait for longer then.
    ///
    /// # Errors
    /// How long to wait before it is worth asking again.
    pub fn admit(&self, now: Duration, bytes: u64) -> Result<(), Duration> {
        if !self.is_limited() {
            return Ok(());
        }
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let mut state = self.state();
        let burst_seconds = state.limits.burst_seconds;
        let burst = (u64::from(burst_seconds) * SECOND_NS).max(LATENESS_NS);
        let wait = state.requests.wait(now, burst).max(state.bytes.wait(now, burst));
        if wait > 0 {
            return Err(Duration::from_nanos(wait));
        }
        state.take(now, bytes);
        Ok(())
    }

    /// Lets a request in, whatever the limits are: those behind it wait for longer.
    pub fn charge(&self, now: Duration, bytes: u64) {
        self.state().take(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX), bytes);
    }

    /// A request has waited for so long.
    pub fn has_delayed(&self, waited: Duration) {
        self.delayed.fetch_add(1, Relaxed);
        self.delayed_ns.fetch_add(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Requests that had to wait, and nanoseconds that they waited together.
    #[must_use]
    pub fn delays(&self) -> (u64, u64) {
        (self.delayed.load(Relaxed), self.delayed_ns.load(Relaxed))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests of `bytes` that are let in from `from` to `to`, by somebody who always has one.
    fn let_in(pace: &Pace, from: Duration, to: Duration, bytes: u64) -> u64 {
        let (mut now, mut count) = (from, 0);
        while now < to {
            match pace.admit(now, bytes) {
                Ok(()) => count += 1,
                Err(wait) => now += wait,
            }
        }
        count
    }

    fn pace(iops: u32, bandwidth: u64, burst_seconds: u32) -> Pace {
        Pace::new(VolumeLimits { iops, bandwidth, burst_seconds })
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn what_is_not_limited_never_waits() {
        let pace = Pace::default();
        assert!((0..1000).all(|_| pace.admit(s(1), 1 << 30).is_ok()));
        assert!(!pace.is_limited());
    }

    #[test]
    fn requests_come_at_the_rate_and_evenly_without_a_burst() {
        let pace = pace(100, 0, 0);
        // One more, as who is told to wait may be woken late.
        assert_eq!(let_in(&pace, s(5), s(15), 4096), 1001);
        pace.admit(s(20), 4096).unwrap();
        pace.admit(s(20), 4096).unwrap();
        assert_eq!(pace.admit(s(20), 4096), Err(Duration::from_millis(10)));
    }

    #[test]
    fn an_idle_volume_saves_up_for_its_burst_and_no_longer() {
        let pace = pace(100, 0, 2);
        // 2 s of them at once, and one that goes into debt.
        assert_eq!(let_in(&pace, s(1000), s(1000) + Duration::from_nanos(1), 512), 201);
        // What a second has brought, but for that debt, and then the rate.
        assert_eq!(let_in(&pace, s(1001), s(1011), 512), 99 + 1000);
    }

    #[test]
    fn the_tighter_limit_counts() {
        // 1 MiB/s in requests of 64 KiB are 16 each second.
        let pace = pace(100, 1 << 20, 0);
        assert_eq!(let_in(&pace, s(1), s(11), 64 << 10), 161);
    }

    #[test]
    fn a_request_larger_than_the_burst_is_paid_for_by_those_behind_it() {
        let pace = pace(0, 1 << 20, 1);
        pace.admit(s(10), 32 << 20).unwrap();
        assert_eq!(pace.admit(s(10), 1), Err(s(31)));
        pace.admit(s(41), 1).unwrap();
    }

    #[test]
    fn other_limits_forgive_debts() {
        let pace = pace(0, 4096, 1);
        pace.admit(s(10), 32 << 20).unwrap();
        assert!(pace.admit(s(10), 1).is_err());
        pace.set(VolumeLimits { iops: 0, bandwidth: 1 << 20, burst_seconds: 1 });
        pace.admit(s(10), 1).unwrap();
        pace.set(VolumeLimits::default());
        assert!(!pace.is_limited());
        pace.admit(s(10), 1 << 40).unwrap();
    }
}
