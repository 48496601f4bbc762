//! What of an image has been told by the sender.

use std::collections::BTreeMap;

/// More separate ranges than this are not kept: then the image never counts as complete.
const MAX_RANGES: usize = 1 << 18;

/// A set of byte ranges, joined where they touch.
///
/// A sender says `close` with the checksum of its file also when the transfer has failed, so that
/// only an image all of which has been told (and none of which a sender may have found equal by
/// mistake) earns that checksum.
#[derive(Debug, Default)]
pub struct Coverage {
    /// Start and end.
    ranges: BTreeMap<u64, u64>,
    overflow: bool,
}

impl Coverage {
    /// Adds a range.
    pub fn add(&mut self, offset: u64, length: u64) {
        let (mut start, mut end) = (offset, offset + length);
        while let Some((&other, &other_end)) = self.ranges.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            self.ranges.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        self.overflow |= self.ranges.len() >= MAX_RANGES;
        if length > 0 && !self.overflow {
            self.ranges.insert(start, end);
        }
    }

    /// Whether `0..size` has been told.
    pub fn is_complete(&self, size: u64) -> bool {
        size == 0 || (!self.overflow && self.ranges.get(&0).is_some_and(|&end| end >= size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joins_ranges_in_any_order() {
        let mut order: Vec<u64> = (0..200).collect();
        fastrand::Rng::with_seed(3).shuffle(&mut order);
        let mut coverage = Coverage::default();
        for (told, index) in order.iter().enumerate() {
            assert!(!coverage.is_complete(200 * 10), "after {told}");
            // Some overlap, some only touch.
            coverage.add(index * 10, 10 + index % 7);
        }
        assert!(coverage.is_complete(200 * 10));
        assert_eq!(coverage.ranges.len(), 1);
    }

    #[test]
    fn an_empty_image_is_complete() {
        let mut coverage = Coverage::default();
        assert!(coverage.is_complete(0));
        coverage.add(0, 0);
        assert!(!coverage.is_complete(1));
    }
}
