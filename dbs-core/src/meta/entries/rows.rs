//! Entries by id, in pieces of three columns: owner, volume extent, and how its blocks are known. A
//! column whose neighbours follow a rule is one number: extents that were filled in order cost next
//! to nothing.

/// Entries in a piece: as in a [`Table`](crate::meta::table::Table).
const PIECE: usize = 128;
/// All of a piece in use.
const ALL: u128 = u128::MAX;

/// One entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Owner.
    pub snapshot: u32,
    /// Volume extent.
    pub logical: u32,
    /// How its blocks are known.
    pub bits: u32,
}

/// Entries by id; only pieces in use take memory.
#[derive(Debug, Default)]
pub struct Rows {
    pieces: Vec<Option<Box<Piece>>>,
}

#[derive(Debug)]
struct Piece {
    used: u128,
    snapshot: Column<0>,
    logical: Column<1>,
    bits: Column<0>,
}

/// Numbers by index, of which those of entries that are free say nothing.
#[derive(Debug)]
enum Column<const STEP: u32> {
    /// The first one; each is `STEP` more than the one before.
    Line(u32),
    Each(Box<[u32; PIECE]>),
}

impl<const STEP: u32> Column<STEP> {
    #[inline]
    fn get(&self, index: usize) -> u32 {
        match self {
            Self::Line(first) => first.wrapping_add(STEP * index as u32),
            Self::Each(all) => all[index],
        }
    }

    /// Sets one; `others` are in use.
    #[inline]
    fn set(&mut self, index: usize, value: u32, others: u128) {
        match self {
            Self::Each(all) => {
                all[index] = value;
                // Mostly the neighbour says that there is no rule.
                if others == ALL ^ 1 << index && STEP == 0 && all[(index + 1) % PIECE] == value {
                    self.compact(ALL);
                }
            }
            Self::Line(_) if self.get(index) == value => {}
            Self::Line(_) => self.part(index, value, others),
        }
    }

    /// Sets one that does not follow the rule.
    #[cold]
    fn part(&mut self, index: usize, value: u32, others: u128) {
        if others == 0 {
            *self = Self::Line(value.wrapping_sub(STEP * index as u32));
            return;
        }
        let mut all = Box::new([0; PIECE]);
        all.iter_mut().enumerate().for_each(|(index, held)| *held = self.get(index));
        all[index] = value;
        *self = Self::Each(all);
    }

    /// Makes it one number if those in use allow.
    fn compact(&mut self, used: u128) {
        let Self::Each(all) = self else { return };
        let first = (used.trailing_zeros() as usize).min(PIECE - 1);
        let line = Self::Line(all[first].wrapping_sub(STEP * first as u32));
        let follows = |index| used >> index & 1 == 0 || line.get(index) == all[index];
        if (first..PIECE).all(follows) {
            *self = line;
        }
    }
}

impl Rows {
    /// An entry; `None` if it is free.
    #[inline]
    pub fn get(&self, index: usize) -> Option<Row> {
        let (piece, index) = self.piece(index)?;
        let (snapshot, logical) = (piece.snapshot.get(index), piece.logical.get(index));
        Some(Row { snapshot, logical, bits: piece.bits.get(index) })
    }

    /// How the blocks of an entry are known; `None` if it is free.
    #[inline]
    pub fn bits(&self, index: usize) -> Option<u32> {
        self.piece(index).map(|(piece, index)| piece.bits.get(index))
    }

    #[inline]
    fn piece(&self, index: usize) -> Option<(&Piece, usize)> {
        let piece = self.pieces.get(index / PIECE)?.as_deref()?;
        let index = index % PIECE;
        // A shift of all 128 bits takes more instructions.
        let half = if index < 64 { piece.used as u64 } else { (piece.used >> 64) as u64 };
        (half >> (index % 64) & 1 == 1).then_some((piece, index))
    }

    /// Sets an entry, or frees it.
    pub fn set(&mut self, index: usize, row: Option<Row>) {
        let (at, index) = (index / PIECE, index % PIECE);
        if self.pieces.len() <= at {
            self.pieces.resize_with(at + 1, || None);
        }
        let place = &mut self.pieces[at];
        let Some(row) = row else {
            if let Some(piece) = place {
                piece.used &= !(1 << index);
                if piece.used == 0 {
                    *place = None;
                }
            }
            return;
        };
        let piece = place.get_or_insert_with(|| {
            let (snapshot, logical, bits) = (Column::Line(0), Column::Line(0), Column::Line(0));
            Box::new(Piece { used: 0, snapshot, logical, bits })
        });
        let others = piece.used & !(1 << index);
        piece.snapshot.set(index, row.snapshot, others);
        piece.logical.set(index, row.logical, others);
        piece.bits.set(index, row.bits, others);
        piece.used |= 1 << index;
    }

    /// Sets how the blocks of an entry in use are known.
    ///
    /// # Panics
    /// If it is free.
    #[inline]
    pub fn set_bits(&mut self, index: usize, bits: u32) {
        let (at, index) = (index / PIECE, index % PIECE);
        let piece = self.pieces[at].as_deref_mut().expect("the entry is in use");
        piece.bits.set(index, bits, piece.used & !(1 << index));
    }

    /// Entries in use from an index on, in order.
    pub fn iter_from(&self, first: usize) -> impl Iterator<Item = usize> {
        let pieces = self.pieces.iter().enumerate().skip(first / PIECE);
        let used = pieces.filter_map(|(at, piece)| Some((at * PIECE, piece.as_ref()?.used)));
        let each = used.flat_map(|(base, mut used)| {
            std::iter::from_fn(move || {
                let index = (used != 0).then(|| used.trailing_zeros() as usize)?;
                used &= used - 1;
                Some(base + index)
            })
        });
        each.skip_while(move |index| *index < first)
    }

    /// Gives the memory back that is not needed, after many were set in no order.
    pub fn compact(&mut self) {
        self.pieces.shrink_to_fit();
        for piece in self.pieces.iter_mut().flatten() {
            let used = piece.used;
            piece.snapshot.compact(used);
            piece.logical.compact(used);
            piece.bits.compact(used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn lines(rows: &Rows) -> usize {
        let lines = |piece: &Piece| {
            usize::from(matches!(piece.snapshot, Column::Line(_)))
                + usize::from(matches!(piece.logical, Column::Line(_)))
                + usize::from(matches!(piece.bits, Column::Line(_)))
        };
        rows.pieces.iter().flatten().map(|piece| lines(piece)).sum()
    }

    #[test]
    fn rows_are_what_was_set() {
        let mut rng = fastrand::Rng::with_seed(5);
        let (mut rows, mut model) = (Rows::default(), BTreeMap::new());
        for step in 0..200_000u32 {
            let at = rng.usize(..500);
            match rng.u8(..8) {
                0 | 1 => {
                    rows.set(at, None);
                    model.remove(&at);
                }
                2 => {
                    if let Some(row) = model.get_mut(&at) {
                        let bits = rng.u32(..2);
                        rows.set_bits(at, bits);
                        *row = Row { bits, ..*row };
                    }
                }
                _ => {
                    // In order at times, so that columns follow their rule.
                    let neat = step / 20_000 % 2 == 0;
                    let logical = if neat { at as u32 + 7 } else { rng.u32(..) };
                    let row = Row { snapshot: rng.u32(1..3), logical, bits: rng.u32(..2) };
                    rows.set(at, Some(row));
                    model.insert(at, row);
                }
            }
            if step % 1000 == 0 {
                rows.compact();
                for at in 0..520 {
                    assert_eq!(rows.get(at), model.get(&at).copied(), "{at}");
                    assert_eq!(rows.bits(at), model.get(&at).map(|row| row.bits));
                }
                let first = rng.usize(..520);
                assert!(rows.iter_from(first).eq(model.range(first..).map(|(at, _)| *at)));
            }
        }
    }

    #[test]
    fn neighbours_alike_are_one_number() {
        let mut rows = Rows::default();
        let row = |at: usize| Row { snapshot: 3, logical: at as u32 - 50, bits: 9 };
        for at in 200..600 {
            rows.set(at, Some(row(at)));
        }
        assert_eq!(lines(&rows), 3 * 4);
        // Each is written in parts and becomes whole again, from the first one to the last.
        for at in 256..384 {
            rows.set_bits(at, 1);
        }
        assert_eq!(lines(&rows), 3 * 4);
        rows.set_bits(300, 2);
        assert_eq!((lines(&rows), rows.bits(299), rows.bits(300)), (3 * 4 - 1, Some(1), Some(2)));
        rows.set_bits(300, 1);
        assert_eq!(lines(&rows), 3 * 4);
        for at in 200..600 {
            rows.set(at, None);
        }
        assert!(rows.pieces.iter().all(Option::is_none));
    }
}
