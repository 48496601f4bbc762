//! Latencies, counted.

use hdrhistogram::Histogram as Counts;
use std::time::Duration;

/// Digits to which a latency is known.
const DIGITS: u8 = 3;
/// Longer ones count as so long: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// Counts of latencies in nanoseconds, to three digits each. All are 0 if nothing was counted.
#[derive(Debug, Clone)]
pub struct Histogram(Counts<u64>);

impl Default for Histogram {
    fn default() -> Self {
        Self(Counts::new_with_bounds(1, LONGEST_NS, DIGITS).expect("the bounds are in order"))
    }
}

impl Histogram {
    /// Counts one latency.
    pub fn record(&mut self, latency: Duration) {
        self.0.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds all that another one has counted.
    pub fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("both have the same bounds");
    }

    /// Latencies counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The mean.
    #[must_use]
    pub fn mean_ns(&self) -> u64 {
        self.0.mean() as u64
    }

    /// The shortest.
    #[must_use]
    pub fn min_ns(&self) -> u64 {
        self.0.min()
    }

    /// The longest.
    #[must_use]
    pub fn max_ns(&self) -> u64 {
        self.0.max()
    }

    /// The latency that `share` (0 to 1) of all do not exceed.
    #[must_use]
    pub fn percentile_ns(&self, share: f64) -> u64 {
        self.0.value_at_quantile(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_known_to_three_digits() {
        let mut histogram = Histogram::default();
        assert_eq!(
            (histogram.percentile_ns(0.5), histogram.mean_ns(), histogram.min_ns()),
            (0, 0, 0)
        );
        let mut half = Histogram::default();
        for us in 1..=1000 {
            let into = if us % 2 == 0 { &mut histogram } else { &mut half };
            into.record(Duration::from_micros(us));
        }
        histogram.merge(&half);
        assert_eq!(histogram.count(), 1000);
        let near =
            |ns: u64, us: f64| assert!((ns as f64 / 1000.0 / us - 1.0).abs() < 0.002, "{ns}");
        near(histogram.min_ns(), 1.0);
        near(histogram.max_ns(), 1000.0);
        near(histogram.mean_ns(), 500.5);
        for (share, us) in [(0.0, 1.0), (0.5, 500.0), (0.99, 990.0), (0.999, 999.0), (1.0, 1000.0)]
        {
            near(histogram.percentile_ns(share), us);
        }
        histogram.record(Duration::MAX);
        near(histogram.max_ns(), LONGEST_NS as f64 / 1000.0);
    }
}
