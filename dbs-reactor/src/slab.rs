//! Values with small stable numbers.

/// A store of values under numbers that are used again once free. Holds its memory, so that a
/// steady state allocates nothing.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Option<u32>,
    len: usize,
}

#[derive(Debug)]
enum Slot<T> {
    Used(T),
    Free { next: Option<u32> },
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: None, len: 0 }
    }
}

impl<T> Slab<T> {
    /// Stores a value; returns its number.
    pub fn insert(&mut self, value: T) -> u32 {
        self.len += 1;
        if let Some(index) = self.free
            && let Some(slot) = self.slots.get_mut(index as usize)
        {
            if let Slot::Free { next } = *slot {
                self.free = next;
            }
            *slot = Slot::Used(value);
            return index;
        }
        self.slots.push(Slot::Used(value));
        self.slots.len() as u32 - 1
    }

    /// The value under a number.
    #[must_use]
    pub fn get(&self, index: u32) -> Option<&T> {
        match self.slots.get(index as usize) {
            Some(Slot::Used(value)) => Some(value),
            _ => None,
        }
    }

    /// The value under a number.
    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        match self.slots.get_mut(index as usize) {
            Some(Slot::Used(value)) => Some(value),
            _ => None,
        }
    }

    /// Takes a value out; its number is free.
    pub fn remove(&mut self, index: u32) -> Option<T> {
        let slot = self.slots.get_mut(index as usize)?;
        if matches!(slot, Slot::Free { .. }) {
            return None;
        }
        self.len -= 1;
        match std::mem::replace(slot, Slot::Free { next: self.free.replace(index) }) {
            Slot::Used(value) => Some(value),
            Slot::Free { .. } => None,
        }
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All values with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| match slot {
            Slot::Used(value) => Some((index as u32, value)),
            Slot::Free { .. } => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_again() {
        let mut slab = Slab::default();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!((slab.remove(a), slab.remove(a), slab.len()), (Some('a'), None, 1));
        assert_eq!((slab.insert('c'), slab.get(a), slab.get(b)), (a, Some(&'c'), Some(&'b')));
        assert_eq!(slab.insert('d'), 2);
        let all: String = slab.iter().map(|(_, value)| *value).collect();
        assert_eq!(all, "cbd");
    }
}
