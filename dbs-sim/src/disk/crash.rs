//! What a power loss can leave of the cache.

use super::blocks::Block;
use super::contents::{Contents, Piece};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Which unflushed writes survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashMode {
    /// None.
    Lost,
    /// All.
    Kept,
    /// Only the last one.
    OnlyLast,
    /// All but the last one.
    AllButLast,
    /// All up to a random one: the cache wrote in order.
    Prefix,
    /// Each write as a whole, at random.
    Writes,
    /// Each sector of each write at random (where blocks do not tear: each block).
    Torn,
}

impl CrashMode {
    /// Every mode.
    pub const ALL: [Self; 7] = [
        Self::Lost,
        Self::Kept,
        Self::OnlyLast,
        Self::AllButLast,
        Self::Prefix,
        Self::Writes,
        Self::Torn,
    ];

    /// A random mode, the richer ones more often.
    #[must_use]
    pub fn random(rng: &mut fastrand::Rng) -> Self {
        match rng.u8(0..16) {
            0 => Self::Lost,
            1 => Self::Kept,
            2 => Self::OnlyLast,
            3 => Self::AllButLast,
            4..7 => Self::Prefix,
            7..11 => Self::Writes,
            _ => Self::Torn,
        }
    }
}

/// Decides for each unit of each write.
struct Choice {
    mode: CrashMode,
    last: u64,
    prefix: u64,
    seed: u64,
    /// Survivors out of 256.
    share: u64,
}

impl Choice {
    fn keeps(&self, write: u64, unit: u64) -> bool {
        match self.mode {
            CrashMode::Lost => false,
            CrashMode::Kept => true,
            CrashMode::OnlyLast => write == self.last,
            CrashMode::AllButLast => write != self.last,
            CrashMode::Prefix => write <= self.prefix,
            CrashMode::Writes => mix(self.seed ^ write) & 255 < self.share,
            CrashMode::Torn => mix(mix(self.seed ^ write) ^ unit) & 255 < self.share,
        }
    }
}

impl Contents {
    pub(super) fn crash(&self, rng: &mut fastrand::Rng, mode: CrashMode) -> Self {
        let writes = || self.cache.values().flat_map(|cached| &cached.pieces).map(|p| p.write);
        let first = writes().min().unwrap_or(0);
        let last = writes().max().unwrap_or(0);
        let choice = Choice {
            mode,
            last,
            prefix: rng.u64(first..=last),
            seed: rng.u64(..),
            share: [32, 128, 224][rng.usize(0..3)],
        };
        let mut image = Self {
            durable: self.durable.clone(),
            cache: BTreeMap::new(),
            size: self.size,
            durable_size: self.size,
            medium: self.medium.clone(),
            next_write: self.next_write,
        };
        for (index, cached) in &self.cache {
            let tears = index * (super::BLOCK as u64) < self.medium.atomic_from;
            if let Some(block) =
                survivor(self.durable.read(*index), *index, &cached.pieces, tears, &choice)
            {
                image.durable.set(*index, block);
            }
        }
        // A new size that was not flushed may be lost as well.
        let size_lost = match mode {
            CrashMode::Lost => true,
            CrashMode::Kept | CrashMode::OnlyLast => false,
            _ => rng.bool(),
        };
        if size_lost && self.durable_size < self.size {
            image.set_size(self.durable_size);
        } else if size_lost && self.durable_size > self.size {
            image.durable.resize(self.durable_size.div_ceil(super::BLOCK as u64), false);
            image.size = self.durable_size;
        }
        image.durable_size = image.size;
        image
    }
}

/// The block after the crash, if it is not the durable one.
fn survivor(
    durable: &Block,
    index: u64,
    pieces: &[Piece],
    tears: bool,
    choice: &Choice,
) -> Option<Arc<Block>> {
    let mut result: Option<Arc<Block>> = None;
    for piece in pieces {
        let mut sectors = piece.sectors;
        if tears {
            for sector in 0..8 {
                if !choice.keeps(piece.write, index * 8 + sector) {
                    sectors &= !(1 << sector);
                }
            }
        } else if !choice.keeps(piece.write, index * 8) {
            sectors = 0;
        }
        if sectors == u8::MAX {
            result = Some(Arc::clone(&piece.bytes));
        } else if sectors != 0 {
            let block = Arc::make_mut(result.get_or_insert_with(|| Arc::new(*durable)));
            for sector in (0..8).filter(|s| sectors & (1 << s) != 0) {
                let range = sector * 512..(sector + 1) * 512;
                block[range.clone()].copy_from_slice(&piece.bytes[range]);
            }
        }
    }
    result
}

/// A well-mixed function of a number.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value ^ (value >> 32)
}
