//! Blocks shared between a disk and its images.

use std::sync::{Arc, OnceLock};

/// Bytes in a block.
pub(super) const BLOCK: usize = 4096;
/// Sectors in a block.
pub(super) const SECTORS: usize = BLOCK / 512;
/// Blocks that are shared together.
const GROUP: usize = 32;
/// Different blocks of garbage.
const GARBAGE: usize = 16;

/// The bytes of a block.
pub(super) type Block = [u8; BLOCK];

type Group = [Option<Arc<Block>>; GROUP];

/// The blocks of a disk, copied on write by group.
#[derive(Clone)]
pub(super) struct Blocks {
    groups: Vec<Arc<Group>>,
}

impl Blocks {
    pub(super) fn new(blocks: u64, mut content: impl FnMut() -> Option<Arc<Block>>) -> Self {
        let groups = (blocks as usize).div_ceil(GROUP);
        let groups = (0..groups).map(|_| Arc::new(std::array::from_fn(|_| content()))).collect();
        Self { groups }
    }

    fn get(&self, index: u64) -> Option<&Arc<Block>> {
        let index = index as usize;
        self.groups.get(index / GROUP)?[index % GROUP].as_ref()
    }

    /// The block's bytes; a hole reads as zeros.
    pub(super) fn read(&self, index: u64) -> &Block {
        static ZERO: Block = [0; BLOCK];
        self.get(index).map_or(&ZERO, |block| block)
    }

    pub(super) fn is_hole(&self, index: u64) -> bool {
        self.get(index).is_none()
    }

    pub(super) fn set(&mut self, index: u64, block: Arc<Block>) {
        let index = index as usize;
        if let Some(group) = self.groups.get_mut(index / GROUP) {
            Arc::make_mut(group)[index % GROUP] = Some(block);
        }
    }

    /// Makes room for `blocks` blocks; with `cut`, those beyond become holes.
    pub(super) fn resize(&mut self, blocks: u64, cut: bool) {
        let blocks = blocks as usize;
        let groups = blocks.div_ceil(GROUP).max(if cut { 0 } else { self.groups.len() });
        self.groups.resize_with(groups, || Arc::new(std::array::from_fn(|_| None)));
        if cut
            && !blocks.is_multiple_of(GROUP)
            && let Some(group) = self.groups.last_mut()
        {
            Arc::make_mut(group)[blocks % GROUP..].fill(None);
        }
    }
}

/// A block of zeros that takes space.
pub(super) fn zero() -> Arc<Block> {
    static ZERO: OnceLock<Arc<Block>> = OnceLock::new();
    Arc::clone(ZERO.get_or_init(|| Arc::new([0; BLOCK])))
}

/// One of a few blocks of random bytes.
pub(super) fn garbage(rng: &mut fastrand::Rng) -> Arc<Block> {
    static POOL: OnceLock<Vec<Arc<Block>>> = OnceLock::new();
    let pool = POOL.get_or_init(|| {
        let mut rng = fastrand::Rng::with_seed(0x0dd_ba11);
        (0..GARBAGE)
            .map(|_| {
                let mut block = [0; BLOCK];
                rng.fill(&mut block);
                Arc::new(block)
            })
            .collect()
    });
    Arc::clone(&pool[rng.usize(0..pool.len())])
}
