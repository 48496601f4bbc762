//! How long a replica with damaged data is healed, and when it becomes `ERR`.
//!
//! A replica of DBS that finds a block which is not what was written says so, and where. The block is read
//! from another complete replica while it is locked, as by a change, and sent to the damaged one, which
//! writes it if its checksum is the one that it knows: neither older content than the replica
//! has acknowledged nor that of a replica which differs can get in. One that refuses differs from the
//! others or has forgotten what it held, and becomes `ERR`, unless it is the last.

use std::time::Duration;

/// Blocks that may be damaged together. One lost or misdirected write, or one bad page of flash, spoils
/// up to some 128 KiB, and is no reason to copy a replica anew.
pub const TOGETHER_MAX: u32 = 32;
/// Reads that go well after which one damaged block is forgotten. Where more than one of so many is
/// damaged, it is the device that fails, and what else it holds should not be waited for.
pub const FORGOTTEN_AFTER: u32 = 256;
/// Most blocks that one request has healed before it is answered, if no replica has all it asks for.
pub const ROUNDS_MAX: u8 = 64;

/// How much a replica is trusted to be worth healing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Trust {
    /// Twice the number of blocks that had to be healed, and once for each that did not have to.
    damaged: u32,
    well: u32,
    /// When the last one was healed, or found to be well.
    last: Duration,
}

impl Trust {
    /// It has answered a read.
    #[inline]
    pub fn read(&mut self) {
        if self.damaged > 0 {
            self.well += 1;
            if self.well >= FORGOTTEN_AFTER {
                self.well = 0;
                self.damaged = self.damaged.saturating_sub(2);
            }
        }
    }

    /// One of its blocks had to be healed; whether it is worth going on.
    #[must_use]
    pub fn healed(&mut self, now: Duration) -> bool {
        self.distrust(2, now)
    }

    /// It said to a request, which began at `begun`, that a block is damaged, and then found nothing to heal; whether it
    /// is worth going on. Others that met the same damage before it was healed find nothing either: that is no reason.
    #[must_use]
    pub fn found_well(&mut self, begun: Duration, now: Duration) -> bool {
        begun < self.last || self.distrust(1, now)
    }

    fn distrust(&mut self, by: u32, now: Duration) -> bool {
        self.last = now;
        self.damaged += by;
        self.damaged <= 2 * TOGETHER_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_that_is_rare_is_healed_for_ever() {
        let mut trust = Trust::default();
        for _ in 0..10 * TOGETHER_MAX {
            assert!(trust.healed(Duration::ZERO));
            (0..FORGOTTEN_AFTER).for_each(|_| trust.read());
        }
        assert_eq!(trust, Trust::default());
    }

    #[test]
    fn too_much_of_it_is_not() {
        let mut trust = Trust::default();
        assert!((0..TOGETHER_MAX).all(|_| trust.healed(Duration::ZERO)));
        (1..FORGOTTEN_AFTER).for_each(|_| trust.read());
        assert!(!trust.healed(Duration::ZERO));
    }

    /// Found by review: it was asked for ever, and never for anything but nothing.
    #[test]
    fn damage_that_is_none_counts_once_for_those_that_met_it_together() {
        let mut trust = Trust::default();
        let second = Duration::from_secs;
        assert!(trust.healed(second(5)));
        assert!((0..1000).all(|_| trust.found_well(second(4), second(5))));
        for at in 0..2 * u64::from(TOGETHER_MAX) - 2 {
            assert!(trust.found_well(second(6 + at), second(6 + at)));
        }
        assert!(!trust.found_well(second(1000), second(1000)));
    }
}
