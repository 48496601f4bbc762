//! Maps by id. The keys are this store's own numbers, so that a quick hash does.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by entry, snapshot, or piece of a volume.
pub type IdMap<V> = HashMap<u32, V, BuildHasherDefault<IdHasher>>;

/// Spreads neighbouring numbers over all bits.
#[derive(Debug, Default)]
pub struct IdHasher(u64);

/// 2^64 divided by the golden ratio: multiples of it lie far apart.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    #[inline]
    fn write_u32(&mut self, id: u32) {
        let mixed = (self.0 ^ u64::from(id)).wrapping_mul(FACTOR);
        // The map uses bits of both ends.
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
