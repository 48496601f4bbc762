//! A table by id of which only the parts in use take memory. Ids may be high and far apart: in a store
//! whose low extents were freed, and in what a hostile image or dump says.

/// Items in a piece. One item costs a piece, so that it is small; and a pointer for every piece before
/// it, so that it is not smaller.
const PIECE: usize = 128;

/// Items by index; all that were never asked for are `free`.
#[derive(Debug)]
pub struct Table<T> {
    pieces: Vec<Option<Box<[T; PIECE]>>>,
    free: T,
}

impl<T: Copy> Table<T> {
    /// A table of items that are all `free`.
    pub fn new(free: T) -> Self {
        Self { pieces: Vec::new(), free }
    }

    /// An item.
    #[inline]
    pub fn get(&self, index: usize) -> T {
        match self.pieces.get(index / PIECE) {
            Some(Some(piece)) => piece[index % PIECE],
            _ => self.free,
        }
    }

    /// An item, to be changed.
    #[inline]
    pub fn get_mut(&mut self, index: usize) -> &mut T {
        let (at, free) = (index / PIECE, self.free);
        if self.pieces.len() <= at {
            self.grow(at);
        }
        &mut self.pieces[at].get_or_insert_with(|| Box::new([free; PIECE]))[index % PIECE]
    }

    #[cold]
    fn grow(&mut self, last: usize) {
        self.pieces.resize_with(last + 1, || None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_touched_is_there() {
        let mut table = Table::new(7);
        let last = (1 << 30) - 1;
        assert_eq!((table.get(0), table.get(last)), (7, 7));
        *table.get_mut(last) = 1;
        *table.get_mut(300) += 1;
        assert_eq!(
            (table.get(299), table.get(300), table.get(last), table.get(last + 1)),
            (7, 8, 1, 7)
        );
        assert_eq!(table.pieces.iter().flatten().count(), 2);
    }
}
