//! Writes that are not of whole blocks, while a replica is being rebuilt.
//!
//! A replica completes a partial block with what it has; one being rebuilt may not have it yet, and
//! what it would take from below is replaced when its layers come in, though the head now says that it
//! has the block. So such a write is made one of whole blocks by reading the first and the last from a
//! complete replica. Nothing else may be writing these blocks meanwhile: see [`super::block_locks`].

use super::sabotage::{Bug, is};

/// Bytes of a block.
pub const BLOCK: u64 = 4096;

/// A write and the whole blocks around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Widened {
    /// First byte of the wide write.
    pub offset: u64,
    /// Bytes of the wide write, at most two blocks more than asked.
    pub length: u64,
    /// Bytes to put in front of the payload.
    pub before: u64,
    /// Bytes to put behind it.
    pub after: u64,
}

impl Widened {
    /// The blocks around a write; `None` if it is of whole blocks, or empty. The last block of a volume
    /// ends where the volume does.
    #[must_use]
    pub fn new(offset: u64, length: u64, volume_size: u64) -> Option<Self> {
        if length == 0 || is(Bug::NoWidening) {
            return None;
        }
        let start = offset - offset % BLOCK;
        let end = (offset + length).next_multiple_of(BLOCK).min(volume_size.max(offset + length));
        let widened = Self {
            offset: start,
            length: end - start,
            before: offset - start,
            after: end - (offset + length),
        };
        (widened.before > 0 || widened.after > 0).then_some(widened)
    }

    /// What to read, as offset and length: the block in front, then the one behind. One is enough
    /// where both are the same or an edge is whole; the other is `None`.
    #[must_use]
    pub fn reads(&self) -> [Option<(u64, u64)>; 2] {
        let last = (self.offset + self.length - 1) / BLOCK * BLOCK;
        let behind = (last, self.offset + self.length - last);
        let front = (self.offset, BLOCK.min(self.length));
        match (self.before > 0, self.after > 0) {
            (true, true) if last != self.offset => [Some(front), Some(behind)],
            (true, _) => [Some(front), None],
            (false, _) => [None, Some(behind)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_stay_as_they_are() {
        for (offset, length) in [(0, 4096), (8192, 65536), (512, 0), (4096, 4096)] {
            assert_eq!(Widened::new(offset, length, 1 << 20), None);
        }
    }

    #[test]
    fn partial_blocks_are_completed_at_both_ends() {
        for (offset, length, start, end, reads) in [
            (512, 512, 0, 4096, [Some((0, 4096)), None]),
            (0, 512, 0, 4096, [None, Some((0, 4096))]),
            (4096, 4608, 4096, 12288, [None, Some((8192, 4096))]),
            (4608, 3584, 4096, 8192, [Some((4096, 4096)), None]),
            (4095, 2, 0, 8192, [Some((0, 4096)), Some((4096, 4096))]),
            (1, 20000, 0, 20480, [Some((0, 4096)), Some((16384, 4096))]),
            // A volume that ends within a block.
            (16896, 512, 16384, 18432, [Some((16384, 2048)), None]),
        ] {
            let wide = Widened::new(offset, length, 18432.max(end)).unwrap();
            assert_eq!((wide.offset, wide.offset + wide.length), (start, end), "{offset}+{length}");
            assert_eq!(wide.before + length + wide.after, wide.length);
            assert_eq!(wide.reads(), reads, "{offset}+{length}");
        }
    }

    #[test]
    fn what_is_read_covers_what_is_missing() {
        for offset in (0..12288).step_by(512) {
            for length in (512..12288).step_by(512) {
                let Some(wide) = Widened::new(offset, length, 1 << 20) else { continue };
                let read = |byte: u64| {
                    wide.reads().iter().flatten().any(|(at, size)| (*at..at + size).contains(&byte))
                };
                let missing =
                    (wide.offset..offset).chain(offset + length..wide.offset + wide.length);
                assert!(missing.step_by(511).all(read), "{offset}+{length}");
                assert!(wide.offset % BLOCK == 0 && wide.length % BLOCK == 0);
            }
        }
    }
}
