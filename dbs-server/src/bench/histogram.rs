//! Latencies, counted.

use std::time::Duration;

/// Buckets for each power of two: a value is known to 1/128 of itself.
const STEPS_LOG2: u32 = 7;
const STEPS: usize = 1 << STEPS_LOG2;
/// Powers of two that are told apart; below 2^7 ns every value has a bucket.
const BUCKETS: usize = (u64::BITS - STEPS_LOG2 + 1) as usize * STEPS;

/// Counts of latencies in buckets whose width grows with the value.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    sum_ns: u64,
    min_ns: u64,
    max_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], count: 0, sum_ns: 0, min_ns: u64::MAX, max_ns: 0 }
    }
}

impl Histogram {
    /// Counts one latency.
    pub fn record(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(ns)] += 1;
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds all that another one has counted.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.count += other.count;
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Latencies counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean in nanoseconds, 0 if nothing was counted; so for all below.
    #[must_use]
    pub fn mean_ns(&self) -> u64 {
        self.sum_ns.checked_div(self.count).unwrap_or(0)
    }

    /// The shortest.
    #[must_use]
    pub fn min_ns(&self) -> u64 {
        if self.count == 0 { 0 } else { self.min_ns }
    }

    /// The longest.
    #[must_use]
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The latency that `share` (0 to 1) of all do not exceed.
    #[must_use]
    pub fn percentile_ns(&self, share: f64) -> u64 {
        let rank = ((self.count as f64 * share).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return highest(index).clamp(self.min_ns, self.max_ns);
            }
        }
        0
    }
}

/// The bucket of a value: its highest bits.
fn bucket(ns: u64) -> usize {
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(STEPS_LOG2 + 1);
    // Below 2^8 the value itself; above, a power of two and the seven bits behind its first.
    (shift as usize) * STEPS + (ns >> shift) as usize
}

/// The highest value of a bucket.
fn highest(index: usize) -> u64 {
    if index < 2 * STEPS {
        return index as u64;
    }
    let shift = index / STEPS - 1;
    let start = (index - shift * STEPS) as u128;
    u64::try_from(((start + 1) << shift) - 1).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_narrow() {
        let mut last = None;
        for power in 0..64 {
            for add in [0, 1, 77, u64::MAX] {
                let value = (1u64 << power).saturating_add(add.min((1 << power) - 1));
                let top = highest(bucket(value));
                assert!(top >= value && (top - value) as f64 <= value as f64 / 128.0, "{value}");
                assert_eq!(bucket(top), bucket(value));
                if let Some(next) = top.checked_add(1) {
                    assert_eq!(bucket(next), bucket(value) + 1, "{value}");
                }
                assert!(last.is_none_or(|last| last <= bucket(value)));
                last = Some(bucket(value));
            }
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles() {
        let mut histogram = Histogram::default();
        assert_eq!((histogram.percentile_ns(0.5), histogram.mean_ns()), (0, 0));
        let mut half = Histogram::default();
        for us in 1..=1000 {
            let into = if us % 2 == 0 { &mut histogram } else { &mut half };
            into.record(Duration::from_micros(us));
        }
        histogram.merge(&half);
        assert_eq!(histogram.count(), 1000);
        assert_eq!((histogram.min_ns(), histogram.max_ns()), (1000, 1_000_000));
        assert_eq!(histogram.mean_ns(), 500_500);
        for (share, us) in [(0.0, 1), (0.5, 500), (0.99, 990), (0.999, 999), (1.0, 1000)] {
            let ns = histogram.percentile_ns(share) as f64;
            let expected = f64::from(us) * 1000.0;
            assert!(ns >= expected && ns <= expected * 1.01, "{share}: {ns} for {expected}");
        }
    }
}
