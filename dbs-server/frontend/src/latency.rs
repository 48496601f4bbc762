//! How long requests took: one thread counts, any thread reads, and tells percentiles of what came between two looks.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Times below this many units have a bucket for each unit; from there on each doubling has so many buckets.
const FINE: u64 = 8;
/// Nanoseconds of a unit, as a shift.
const UNIT_SHIFT: u32 = 7;
/// Up to two minutes; what takes longer is in the last one.
const BUCKETS: usize = 224;

/// How many requests took how long, to an eighth. One that nothing was counted in takes no memory.
#[derive(Debug, Default)]
pub struct Latency(OnceLock<Box<[AtomicU64; BUCKETS]>>);

impl Latency {
    /// A request took so long; on one thread alone.
    #[inline]
    pub fn count(&self, took: Duration) {
        let buckets = self.0.get_or_init(|| Box::new([const { AtomicU64::new(0) }; BUCKETS]));
        if let Some(count) = buckets.get(bucket(took.as_nanos() as u64)) {
            count.store(count.load(Relaxed).wrapping_add(1), Relaxed);
        }
    }

    /// The end of each bucket in nanoseconds, and its requests; without empty ones.
    #[must_use]
    pub fn get(&self) -> Vec<(u64, u64)> {
        let buckets = self.0.get().into_iter().flat_map(|buckets| buckets.iter()).enumerate();
        let counts = buckets.map(|(at, count)| (end(at as u64), count.load(Relaxed)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

/// Ends of ranges of time in nanoseconds, and how many requests took so long.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Times(BTreeMap<u64, u64>);

impl Times {
    /// What was counted since before; of what began anew, all of it.
    #[must_use]
    pub fn since(now: &[(u64, u64)], before: &[(u64, u64)]) -> Self {
        let mut since = Self::default();
        since.add(now);
        for (end, count) in before {
            since.0.entry(*end).and_modify(|now| *now = now.saturating_sub(*count));
        }
        since.0.retain(|_, count| *count > 0);
        since
    }

    /// These and those.
    #[must_use]
    pub fn and(&self, others: &Self) -> Self {
        let mut sum = self.clone();
        others.0.iter().for_each(|(end, count)| *sum.0.entry(*end).or_default() += count);
        sum
    }

    /// Adds what one thread has counted.
    pub fn add(&mut self, counted: &[(u64, u64)]) {
        counted.iter().for_each(|(end, count)| *self.0.entry(*end).or_default() += count);
    }

    /// All that was counted, as [`Latency::get`] tells it.
    #[must_use]
    pub fn counted(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|(end, count)| (*end, *count)).collect()
    }

    /// How many requests that are.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.0.values().sum()
    }

    /// What so many of 100 requests took less than; nothing if there was none.
    #[must_use]
    pub fn percentile(&self, percent: u64) -> Option<u64> {
        let wanted = u128::from(self.requests()) * u128::from(percent);
        let mut seen = 0;
        self.0.iter().find_map(|(end, count)| {
            seen += u128::from(*count) * 100;
            (seen >= wanted).then_some(*end)
        })
    }
}

#[inline]
fn bucket(ns: u64) -> usize {
    let units = ns >> UNIT_SHIFT;
    if units < FINE {
        return units as usize;
    }
    let doublings = units.ilog2() - FINE.ilog2();
    let part = (units >> doublings) - FINE;
    ((u64::from(doublings) + 1) * FINE + part).min(BUCKETS as u64 - 1) as usize
}

/// Where a bucket ends.
fn end(bucket: u64) -> u64 {
    let (doublings, part) = ((bucket / FINE).saturating_sub(1), bucket % FINE);
    let start = if bucket < FINE { part } else { FINE + part };
    ((start + 1) << doublings) << UNIT_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_in_the_bucket_that_ends_behind_it_by_an_eighth_at_most() {
        for shift in 0..37 {
            for ns in [(1 << shift) - 1, 1 << shift, (1 << shift) + (1 << shift) / 3] {
                let end = end(bucket(ns) as u64);
                assert!(end > ns && end <= ns + ns / 8 + 128, "{ns} in the one that ends at {end}");
            }
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert!((0..BUCKETS as u64 - 1).all(|at| bucket(end(at)) as u64 == at + 1));
    }

    #[test]
    fn what_was_counted_is_told() {
        let latency = Latency::default();
        assert_eq!(latency.get(), []);
        for us in [100, 100, 5000] {
            latency.count(Duration::from_micros(us));
        }
        assert_eq!(latency.get(), [(106_496, 2), (5_242_880, 1)]);
    }
}
