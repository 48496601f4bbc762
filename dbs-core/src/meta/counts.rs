//! How many data blocks each snapshot's own layer holds: kept with every change of a bitmap, so that
//! asking costs nothing.

/// Data blocks by owner, once started.
#[derive(Debug, Default)]
pub struct Counts {
    on: bool,
    blocks: Vec<u64>,
    changes: u64,
}

impl Counts {
    /// Counts from zero.
    pub fn started() -> Self {
        Self { on: true, ..Self::default() }
    }

    /// Whether it was started.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Whether both say the same of every owner.
    pub fn is_equal(&self, other: &Self) -> bool {
        let owners = self.blocks.len().max(other.blocks.len()) as u32;
        (0..owners).all(|owner| self.get(owner) == other.get(owner))
    }

    /// How often they have changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Blocks of an owner.
    pub fn get(&self, owner: u32) -> u64 {
        self.blocks.get(owner as usize).copied().unwrap_or(0)
    }

    /// An owner has blocks more.
    #[inline]
    pub fn add(&mut self, owner: u32, blocks: u32) {
        if blocks == 0 || !self.on {
            return;
        }
        self.changes += 1;
        match self.blocks.get_mut(owner as usize) {
            Some(count) => *count += u64::from(blocks),
            None => self.add_first(owner, blocks),
        }
    }

    #[cold]
    fn add_first(&mut self, owner: u32, blocks: u32) {
        self.blocks.resize(owner as usize + 1, 0);
        self.blocks[owner as usize] = u64::from(blocks);
    }

    /// An owner has blocks less.
    #[inline]
    pub fn remove(&mut self, owner: u32, blocks: u32) {
        if blocks > 0 && self.on {
            self.changes += 1;
            self.blocks[owner as usize] -= u64::from(blocks);
        }
    }
}
