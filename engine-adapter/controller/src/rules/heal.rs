//! How long a replica with damaged data is healed, and when it becomes `ERR`.
//!
//! A replica of DBS that finds a block which is not what was written says so, and where. The block is read
//! from another complete replica while it is locked, as by a change, and sent to the damaged one, which
//! writes it if its checksum is the one that it knows: neither older content than the replica
//! has acknowledged nor that of a replica which differs can get in. One that refuses differs from the
//! others or has forgotten what it held, and becomes `ERR`, unless it is the last.

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
    damaged: u32,
    well: u32,
}

impl Trust {
    /// It has answered a read.
    #[inline]
    pub fn read(&mut self) {
        if self.damaged > 0 {
            self.well += 1;
            if self.well >= FORGOTTEN_AFTER {
                self.well = 0;
                self.damaged -= 1;
            }
        }
    }

    /// One of its blocks had to be healed; whether it is worth going on.
    #[must_use]
    pub fn healed(&mut self) -> bool {
        self.damaged += 1;
        self.damaged <= TOGETHER_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_that_is_rare_is_healed_for_ever() {
        let mut trust = Trust::default();
        for _ in 0..10 * TOGETHER_MAX {
            assert!(trust.healed());
            (0..FORGOTTEN_AFTER).for_each(|_| trust.read());
        }
        assert_eq!(trust, Trust::default());
    }

    #[test]
    fn too_much_of_it_is_not() {
        let mut trust = Trust::default();
        assert!((0..TOGETHER_MAX).all(|_| trust.healed()));
        (1..FORGOTTEN_AFTER).for_each(|_| trust.read());
        assert!(!trust.healed());
    }
}
