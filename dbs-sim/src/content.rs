//! Sector contents that say who wrote them, so that foreign bytes are recognised by sight.

use std::fmt;

/// Bytes in a sector.
pub const SECTOR: usize = 512;
/// Sectors in a block.
pub const SECTORS: usize = 8;

/// Who wrote a sector: an operation and a volume; zero for zeros.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Tag(u64);

/// The sectors of a block.
pub type Tags = [Tag; SECTORS];

/// The possible contents of a block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Block {
    /// What reads give.
    pub now: Tags,
    /// What may be there instead after a power loss.
    pub older: Vec<Tags>,
    /// It was given up: anything that was written there once may show.
    pub any: bool,
    /// It was so, and may be so again after a power loss.
    pub older_any: bool,
}

impl Tag {
    /// Zeros.
    pub const ZERO: Self = Self(0);

    /// The mark of operation `op` on volume `volume`; `op` is not zero.
    #[must_use]
    pub fn new(op: u32, volume: u32) -> Self {
        Self(u64::from(op) << 32 | u64::from(volume))
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ZERO {
            return f.write_str("0");
        }
        write!(f, "op{}/vol{}", self.0 >> 32, self.0 as u32)
    }
}

/// Fills whole sectors, the first of which is sector `first` of the volume.
pub fn fill(buf: &mut [u8], first: u64, tag: Tag) {
    for (sector, position) in buf.chunks_exact_mut(SECTOR).zip(first..) {
        let (base, step) = (base(tag, position), step(tag));
        for (word, i) in sector.chunks_exact_mut(8).zip(0u64..) {
            word.copy_from_slice(&base.wrapping_add(i.wrapping_mul(step)).to_le_bytes());
        }
        sector[..8].copy_from_slice(&tag.0.to_le_bytes());
        sector[8..16].copy_from_slice(&position.to_le_bytes());
    }
}

/// Who wrote this sector, found as sector `position` of a volume.
///
/// # Errors
/// A description of bytes that no write put there.
pub fn identify(sector: &[u8], position: u64) -> Result<Tag, String> {
    // With a length that the compiler knows, several words are compared at once: the simulation spends much of its time
    // here.
    let Ok(sector) = <&[u8; SECTOR]>::try_from(sector) else {
        return Err(format!("{} bytes, which are no sector", sector.len()));
    };
    let (words, _) = sector.as_chunks();
    let tag = Tag(u64::from_le_bytes(words[0]));
    if tag == Tag::ZERO {
        let zeros = words.iter().fold(0, |or, word| or | u64::from_le_bytes(*word)) == 0;
        return if zeros { Ok(tag) } else { Err("bytes that nobody wrote".into()) };
    }
    let found = u64::from_le_bytes(words[1]);
    let step = step(tag);
    let mut wanted = base(tag, found).wrapping_add(step);
    let mut wrong = 0;
    for word in &words[2..] {
        wanted = wanted.wrapping_add(step);
        wrong |= u64::from_le_bytes(*word) ^ wanted;
    }
    if wrong != 0 {
        return Err(format!("bytes that nobody wrote ({tag:?}, sector {found}, if whole)"));
    }
    if found != position {
        return Err(format!("the bytes of {tag:?} for sector {found}"));
    }
    Ok(tag)
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// What words differ by: of most writes by nothing, as their content can be compressed.
fn step(tag: Tag) -> u64 {
    if (tag.0 >> 32).is_multiple_of(4) { STEP } else { 0 }
}

fn base(tag: Tag, position: u64) -> u64 {
    (tag.0 ^ position.wrapping_mul(0xbf58_476d_1ce4_e5b9)).wrapping_mul(STEP) | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_recognised() {
        let mut buf = vec![0; 2 * SECTOR];
        for tag in [Tag::new(7, 3), Tag::new(8, 3)] {
            fill(&mut buf, 40, tag);
            assert_eq!(identify(&buf[..SECTOR], 40), Ok(tag));
            assert_eq!(identify(&buf[SECTOR..], 41), Ok(tag));
            assert!(identify(&buf[SECTOR..], 40).unwrap_err().contains("sector 41"));
            buf[100] ^= 1;
            assert!(identify(&buf[..SECTOR], 40).is_err());
        }
        assert_eq!(identify(&[0; SECTOR], 9), Ok(Tag::ZERO));
        let mut almost = [0; SECTOR];
        almost[511] = 1;
        assert!(identify(&almost, 9).is_err());
    }
}
