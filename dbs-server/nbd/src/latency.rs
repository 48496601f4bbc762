//! How long requests took: one thread counts, any thread reads.

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
pub(crate) struct Latency(OnceLock<Box<[AtomicU64; BUCKETS]>>);

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
    pub fn get(&self) -> Vec<(u64, u64)> {
        let buckets = self.0.get().into_iter().flat_map(|buckets| buckets.iter()).enumerate();
        let counts = buckets.map(|(at, count)| (end(at as u64), count.load(Relaxed)));
        counts.filter(|(_, count)| *count > 0).collect()
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
