//! Bitmaps of one length, many to an allocation. An allocation that none is left in is given back.

use std::collections::BTreeSet;

/// Bitmaps of a chunk: a bit each says whether it is taken.
const CHUNK: u32 = u64::BITS;

/// The bitmaps, by index.
#[derive(Debug)]
pub struct Slab {
    words: usize,
    chunks: Vec<Chunk>,
    /// Chunks with room. The first one is filled first, so that the last ones become empty.
    roomy: BTreeSet<u32>,
    taken: usize,
    allocated: usize,
}

#[derive(Debug, Default)]
struct Chunk {
    taken: u64,
    /// None while nothing is taken.
    all: Box<[u64]>,
}

impl Slab {
    /// None yet, of so many words.
    pub fn new(words: usize) -> Self {
        Self { words, chunks: Vec::new(), roomy: BTreeSet::new(), taken: 0, allocated: 0 }
    }

    /// An index whose words are zero.
    pub fn take(&mut self) -> u32 {
        let next = self.chunks.len() as u32;
        let at = self.roomy.first().copied().unwrap_or(next);
        if at == next {
            self.chunks.push(Chunk::default());
            self.roomy.insert(at);
        }
        let chunk = &mut self.chunks[at as usize];
        if chunk.taken == 0 {
            chunk.all = vec![0; CHUNK as usize * self.words].into_boxed_slice();
            self.allocated += 1;
        }
        let slot = chunk.taken.trailing_ones();
        chunk.taken |= 1 << slot;
        if chunk.taken == u64::MAX {
            self.roomy.remove(&at);
        }
        self.taken += 1;
        let index = at * CHUNK + slot;
        self.get_mut(index).fill(0);
        index
    }

    /// Gives a bitmap back.
    pub fn give_back(&mut self, index: u32) {
        let at = index / CHUNK;
        let chunk = &mut self.chunks[at as usize];
        if chunk.taken == u64::MAX {
            self.roomy.insert(at);
        }
        chunk.taken &= !(1 << (index % CHUNK));
        self.taken -= 1;
        if chunk.taken == 0 {
            chunk.all = Box::default();
            self.allocated -= 1;
        }
        while self.chunks.last().is_some_and(|chunk| chunk.taken == 0) {
            self.chunks.pop();
            self.roomy.remove(&(self.chunks.len() as u32));
        }
    }

    /// Moves a bitmap to the first chunk that has room, if that is before its own: where it is then.
    pub fn pack(&mut self, index: u32) -> u32 {
        if self.roomy.first().is_none_or(|first| *first >= index / CHUNK) {
            return index;
        }
        let new = self.take();
        let [from, to] = [index, new].map(|index| (index / CHUNK, index % CHUNK));
        let words = |slot: u32| slot as usize * self.words..(slot as usize + 1) * self.words;
        if let Ok([source, target]) = self.chunks.get_disjoint_mut([from.0 as usize, to.0 as usize])
        {
            target.all[words(to.1)].copy_from_slice(&source.all[words(from.1)]);
        }
        self.give_back(index);
        new
    }

    /// Bytes of memory of one chunk.
    pub fn chunk_bytes(&self) -> usize {
        CHUNK as usize * self.words * size_of::<u64>()
    }

    /// Bytes of the bitmaps that are taken.
    pub fn taken_bytes(&self) -> usize {
        self.taken * self.words * size_of::<u64>()
    }

    /// Bytes of memory for them.
    pub fn bytes(&self) -> usize {
        self.allocated * self.chunk_bytes()
    }

    /// The words of a bitmap.
    #[inline]
    pub fn get(&self, index: u32) -> &[u64] {
        let first = (index % CHUNK) as usize * self.words;
        &self.chunks[(index / CHUNK) as usize].all[first..first + self.words]
    }

    /// As [`Slab::get`], to change.
    #[inline]
    pub fn get_mut(&mut self, index: u32) -> &mut [u64] {
        let first = (index % CHUNK) as usize * self.words;
        &mut self.chunks[(index / CHUNK) as usize].all[first..first + self.words]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory goes with the last bitmap of a chunk, and what has come back is taken first, from below.
    #[test]
    fn memory_is_given_back() {
        let mut slab = Slab::new(4);
        let all: Vec<u32> = (0..1000).map(|_| slab.take()).collect();
        assert!(all.iter().copied().eq(0..1000));
        assert_eq!((slab.taken_bytes(), slab.bytes()), (1000 * 32, 16 * 2048));
        slab.get_mut(70).fill(7);
        (64..1000).for_each(|index| slab.give_back(index));
        assert_eq!((slab.taken_bytes(), slab.bytes()), (64 * 32, 2048));
        slab.give_back(5);
        assert_eq!([slab.take(), slab.take()], [5, 64]);
        let next = slab.take();
        assert!((64..128).contains(&next) && slab.get(70).iter().all(|word| *word == 0));
        (0..64).chain([64, next]).for_each(|index| slab.give_back(index));
        assert_eq!((slab.taken_bytes(), slab.bytes()), (0, 0));
        assert!(slab.chunks.is_empty() && slab.roomy.is_empty());
    }

    /// Few that are left in many chunks come together in as few as there can be, each with its words.
    #[test]
    fn few_among_many_come_together() {
        let mut slab = Slab::new(2);
        for index in 0..1000 {
            assert_eq!(slab.take(), index);
            slab.get_mut(index).fill(u64::from(index));
        }
        let mut kept: Vec<u32> = (0..1000).filter(|index| index % 50 == 49).collect();
        (0..1000).filter(|index| index % 50 != 49).for_each(|index| slab.give_back(index));
        assert_eq!(slab.bytes(), 16 * slab.chunk_bytes());
        let known: Vec<u32> = kept.clone();
        kept.iter_mut().for_each(|index| *index = slab.pack(*index));
        assert_eq!(slab.bytes(), slab.chunk_bytes());
        for (index, word) in kept.iter().zip(known) {
            assert_eq!(slab.get(*index), [u64::from(word); 2]);
        }
        kept.iter().for_each(|index| assert_eq!(slab.pack(*index), *index));
        kept.iter().for_each(|index| slab.give_back(*index));
        assert_eq!(slab.bytes(), 0);
    }
}
