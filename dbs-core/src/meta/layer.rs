//! What one snapshot or head holds itself: volume extent -> entry, and its zero runs.

use std::collections::BTreeMap;

/// Volume extents in a piece of the map.
const PIECE: u32 = 512;
/// A piece with more entries than this becomes an array.
const SPARSE_MAX: usize = 128;
/// Array value for "no entry".
const NONE: u32 = u32::MAX;

/// A snapshot's own layer.
#[derive(Debug, Default)]
pub struct Layer {
    pieces: BTreeMap<u32, Piece>,
    len: u32,
    /// Zero runs: first volume extent -> (length, spare id). Never overlapping or adjacent.
    pub runs: BTreeMap<u32, (u32, u32)>,
}

#[derive(Debug)]
enum Piece {
    Sparse(Vec<(u16, u32)>),
    Dense(Box<[u32; PIECE as usize]>),
}

impl Layer {
    /// The entry for a volume extent.
    #[inline]
    pub fn get(&self, logical: u32) -> Option<u32> {
        match self.pieces.get(&(logical / PIECE))? {
            Piece::Sparse(list) => {
                let index = list.binary_search_by_key(&key(logical), |item| item.0).ok()?;
                Some(list[index].1)
            }
            Piece::Dense(array) => {
                let id = array[key(logical) as usize];
                (id != NONE).then_some(id)
            }
        }
    }

    /// Sets the entry for a volume extent; returns the one it replaces.
    pub fn insert(&mut self, logical: u32, id: u32) -> Option<u32> {
        let piece = self.pieces.entry(logical / PIECE).or_insert_with(|| Piece::Sparse(Vec::new()));
        let key = key(logical);
        let old = match piece {
            Piece::Sparse(list) => match list.binary_search_by_key(&key, |item| item.0) {
                Ok(index) => Some(std::mem::replace(&mut list[index].1, id)),
                Err(index) => {
                    list.insert(index, (key, id));
                    None
                }
            },
            Piece::Dense(array) => {
                let old = std::mem::replace(&mut array[key as usize], id);
                (old != NONE).then_some(old)
            }
        };
        if let Piece::Sparse(list) = piece
            && list.len() > SPARSE_MAX
        {
            let mut array = Box::new([NONE; PIECE as usize]);
            list.iter().for_each(|(key, id)| array[*key as usize] = *id);
            *piece = Piece::Dense(array);
        }
        self.len += u32::from(old.is_none());
        old
    }

    /// Removes the entry for a volume extent.
    pub fn remove(&mut self, logical: u32) -> Option<u32> {
        let piece = self.pieces.get_mut(&(logical / PIECE))?;
        let (old, empty) = match piece {
            Piece::Sparse(list) => {
                let index = list.binary_search_by_key(&key(logical), |item| item.0).ok()?;
                (list.remove(index).1, list.is_empty())
            }
            Piece::Dense(array) => {
                let old = std::mem::replace(&mut array[key(logical) as usize], NONE);
                if old == NONE {
                    return None;
                }
                (old, array.iter().all(|id| *id == NONE))
            }
        };
        if empty {
            self.pieces.remove(&(logical / PIECE));
        }
        self.len -= 1;
        Some(old)
    }

    /// Number of entries.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it holds nothing at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0 && self.runs.is_empty()
    }

    /// Entries as (volume extent, id), ascending, from a volume extent on.
    pub fn iter_from(&self, logical: u32) -> impl Iterator<Item = (u32, u32)> {
        self.pieces.range(logical / PIECE..).flat_map(move |(piece, content)| {
            let base = piece * PIECE;
            let (list, array) = match content {
                Piece::Sparse(list) => (list.as_slice(), [].as_slice()),
                Piece::Dense(array) => ([].as_slice(), array.as_slice()),
            };
            let sparse = list.iter().map(move |(key, id)| (base + u32::from(*key), *id));
            let dense = array.iter().enumerate().map(move |(key, id)| (base + key as u32, *id));
            sparse.chain(dense.filter(|(_, id)| *id != NONE)).filter(move |(at, _)| *at >= logical)
        })
    }

    /// All entries as (volume extent, id), ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        self.iter_from(0)
    }

    /// Whether a zero run covers the volume extent.
    #[inline]
    pub fn in_run(&self, logical: u32) -> bool {
        if self.runs.is_empty() {
            return false;
        }
        let before = self.runs.range(..=logical).next_back();
        before.is_some_and(|(start, (length, _))| logical - start < *length)
    }
}

fn key(logical: u32) -> u16 {
    (logical % PIECE) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behaves_as_a_map() {
        let mut layer = Layer::default();
        let mut model = BTreeMap::new();
        let mut rng = fastrand::Rng::with_seed(1);
        for step in 0..20_000 {
            let logical = rng.u32(..1500);
            if rng.u32(..3) == 0 {
                assert_eq!(layer.remove(logical), model.remove(&logical));
            } else {
                assert_eq!(layer.insert(logical, step), model.insert(logical, step));
            }
            assert_eq!(layer.len() as usize, model.len());
        }
        assert!(layer.iter().eq(model.iter().map(|(k, v)| (*k, *v))));
        assert!(layer.iter_from(700).eq(model.range(700..).map(|(k, v)| (*k, *v))));
        for logical in 0..1500 {
            assert_eq!(layer.get(logical), model.get(&logical).copied());
        }
    }
}
