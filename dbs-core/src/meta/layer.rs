//! What one snapshot or head holds itself: volume extent -> entry, and its zero runs.

use super::entries::SPARE_BASE;
use std::collections::BTreeMap;

/// Volume extents in a piece of the map: so many that the few entries of a layer with little in it lie
/// together.
const PIECE: u32 = 1 << 16;
/// Volume extents in a part of a piece.
const PART: u16 = 2048;
/// Parts of a piece.
const PARTS: usize = PIECE as usize / PART as usize;
/// A piece with more entries in a list than this is parted. A part with more becomes an array, which is
/// smaller then.
const SPARSE_MAX: usize = PART as usize * size_of::<u32>() / size_of::<Item>();
/// Array value for "no entry".
const NONE: u32 = u32::MAX;

/// A snapshot's own layer.
#[derive(Debug, Default)]
pub struct Layer {
    pieces: BTreeMap<u32, Piece>,
    len: u32,
    /// Entries that are data extents.
    extents: u32,
    /// Zero runs: first volume extent -> (length, spare id). Never overlapping or adjacent.
    pub runs: BTreeMap<u32, (u32, u32)>,
    /// Runs of what is lost, in the same way: entries there hide them, zero runs do not meet them.
    /// A layer with any does not change until it is freed.
    pub lost: BTreeMap<u32, (u32, u32)>,
}

/// The layer of a snapshot in the tree: everybody may look at it, and [`super::Meta::layer_mut`] alone
/// changes it, since views remember what is in it.
#[derive(Debug, Default)]
pub struct SeenLayer(Layer);

impl SeenLayer {
    /// The layer, to be changed. Views must forget what changes.
    pub(super) fn changeable(&mut self) -> &mut Layer {
        &mut self.0
    }
}

impl std::ops::Deref for SeenLayer {
    type Target = Layer;

    fn deref(&self) -> &Layer {
        &self.0
    }
}

/// Entries of a piece or of a part, by key.
#[derive(Debug)]
enum Piece {
    /// Neighbours that lie in the same order on the device: first key, number, first id.
    Run(u16, u32, u32),
    /// A few entries.
    Sparse(Vec<Item>),
    /// Of a part: an entry or [`NONE`] by key.
    Dense(Box<[u32; PART as usize]>),
    /// Of a piece: its parts.
    Parted(Box<[Piece; PARTS]>),
}

/// Key and id in 6 bytes.
#[derive(Debug, Clone, Copy)]
struct Item([u16; 3]);

impl Item {
    fn new(key: u16, id: u32) -> Self {
        Self([key, id as u16, (id >> 16) as u16])
    }

    fn key(self) -> u16 {
        self.0[0]
    }

    fn id(self) -> u32 {
        u32::from(self.0[1]) | u32::from(self.0[2]) << 16
    }
}

impl Piece {
    /// Nothing.
    const EMPTY: Self = Self::Run(0, 0, 0);

    #[inline]
    fn get(&self, key: u16) -> Option<u32> {
        match self {
            Self::Run(start, count, first) => {
                let index = u32::from(key.wrapping_sub(*start));
                (index < *count).then(|| first + index)
            }
            Self::Sparse(list) => {
                list.binary_search_by_key(&key, |item| item.key()).ok().map(|at| list[at].id())
            }
            Self::Dense(array) => Some(array[key as usize]).filter(|id| *id != NONE),
            Self::Parted(parts) => parts[usize::from(key / PART)].get(key % PART),
        }
    }

    /// Sets an entry; returns the one it replaces.
    fn insert(&mut self, key: u16, id: u32, is_part: bool) -> Option<u32> {
        if let Self::Run(start, count, first) = self {
            if *count == 0 {
                *self = Self::Run(key, 1, id);
                return None;
            }
            if (u32::from(key), id) == (u32::from(*start) + *count, *first + *count) {
                *count += 1;
                return None;
            }
        }
        match self.changeable(is_part) {
            Self::Sparse(list) => match list.binary_search_by_key(&key, |item| item.key()) {
                Ok(at) => Some(std::mem::replace(&mut list[at], Item::new(key, id)).id()),
                Err(at) => {
                    if list.len() == list.capacity() {
                        // Doubling would waste what the compact form saves.
                        list.reserve_exact(4.max(list.len() / 4));
                    }
                    list.insert(at, Item::new(key, id));
                    if list.len() > SPARSE_MAX {
                        *self = Self::spread(self, is_part);
                    }
                    None
                }
            },
            Self::Dense(array) => {
                let old = std::mem::replace(&mut array[key as usize], id);
                (old != NONE).then_some(old)
            }
            Self::Parted(parts) => parts[usize::from(key / PART)].insert(key % PART, id, true),
            Self::Run(..) => unreachable!("changeable"),
        }
    }

    /// Removes an entry; returns it.
    fn remove(&mut self, key: u16, is_part: bool) -> Option<u32> {
        let old = self.get(key)?;
        if let Self::Run(start, count, first) = self
            && key == *start
        {
            // How background work goes through a layer.
            *self = match *count {
                1 => Self::EMPTY,
                _ => Self::Run(*start + 1, *count - 1, *first + 1),
            };
            return Some(old);
        }
        match self.changeable(is_part) {
            Self::Sparse(list) => list.retain(|item| item.key() != key),
            Self::Dense(array) => array[key as usize] = NONE,
            Self::Parted(parts) => {
                let part = &mut parts[usize::from(key / PART)];
                part.remove(key % PART, true);
                if part.is_empty() {
                    *part = Self::EMPTY;
                }
            }
            Self::Run(..) => unreachable!("changeable"),
        }
        Some(old)
    }

    /// The piece in a form that can take any change.
    fn changeable(&mut self, is_part: bool) -> &mut Self {
        if let Self::Run(_, count, _) = *self {
            *self = match count as usize <= SPARSE_MAX {
                true => Self::Sparse(self.iter().map(|(key, id)| Item::new(key, id)).collect()),
                false => Self::spread(self, is_part),
            };
        }
        self
    }

    /// Many entries as an array, or as parts.
    fn spread(from: &Self, is_part: bool) -> Self {
        if is_part {
            let mut array = Box::new([NONE; PART as usize]);
            from.iter().for_each(|(key, id)| array[usize::from(key)] = id);
            return Self::Dense(array);
        }
        let mut parts = Box::new([const { Self::EMPTY }; PARTS]);
        if let Self::Run(start, count, first) = *from {
            // Not entry by entry: there may be as many as a piece has, and others wait meanwhile.
            let start = u32::from(start);
            for (base, part) in (0..).step_by(PART.into()).zip(parts.iter_mut()) {
                let (low, high) = (start.max(base), (start + count).min(base + u32::from(PART)));
                if low < high {
                    *part = Self::Run((low - base) as u16, high - low, first + low - start);
                }
            }
            return Self::Parted(parts);
        }
        for (key, id) in from.iter() {
            parts[usize::from(key / PART)].insert(key % PART, id, true);
        }
        Self::Parted(parts)
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Run(_, count, _) => *count == 0,
            Self::Sparse(list) => list.is_empty(),
            Self::Dense(array) => array.iter().all(|id| *id == NONE),
            Self::Parted(parts) => parts.iter().all(Self::is_empty),
        }
    }

    /// Gives back memory that is kept for more entries.
    fn compact(&mut self) {
        match self {
            Self::Sparse(list) => list.shrink_to_fit(),
            Self::Parted(parts) => parts.iter_mut().for_each(Self::compact),
            Self::Run(..) | Self::Dense(_) => {}
        }
    }

    /// All entries as (key, id), ascending.
    fn iter(&self) -> impl Iterator<Item = (u16, u32)> {
        self.iter_from(0)
    }

    /// Entries as (key, id), ascending, from a key on.
    fn iter_from(&self, from: u16) -> impl Iterator<Item = (u16, u32)> {
        let (whole, parts) = match self {
            Self::Parted(parts) => (None, Some(parts)),
            whole => (Some(whole), None),
        };
        let first = usize::from(from / PART);
        let parts = parts.into_iter().flat_map(move |parts| (0..).zip(parts.iter()).skip(first));
        let parts = parts.flat_map(move |(at, part)| {
            let from = if at == from / PART { from % PART } else { 0 };
            part.iter_part(from).map(move |(key, id)| (at * PART + key, id))
        });
        whole.into_iter().flat_map(move |whole| whole.iter_part(from)).chain(parts)
    }

    /// As [`Piece::iter_from`], of one without parts.
    fn iter_part(&self, from: u16) -> impl Iterator<Item = (u16, u32)> {
        let (run, list, array) = match self {
            Self::Run(start, count, first) => {
                let skipped = u32::from(from.saturating_sub(*start)).min(*count);
                ((u32::from(*start) + skipped, count - skipped, first + skipped), &[][..], &[][..])
            }
            Self::Sparse(list) => {
                let before = list.partition_point(|item| item.key() < from);
                ((0, 0, 0), &list[before..], &[][..])
            }
            Self::Dense(array) => ((0, 0, 0), [].as_slice(), &array[usize::from(from)..]),
            Self::Parted(_) => unreachable!("parts have none"),
        };
        let run = (run.0..run.0 + run.1).map(|key| key as u16).zip(run.2..);
        let sparse = list.iter().map(|item| (item.key(), item.id()));
        let dense = array.iter().copied().enumerate().filter(|(_, id)| *id != NONE);
        let dense = dense.map(move |(index, id)| (from + index as u16, id));
        run.chain(sparse).chain(dense)
    }
}

impl Layer {
    /// The entry for a volume extent.
    #[inline]
    pub fn get(&self, logical: u32) -> Option<u32> {
        self.pieces.get(&(logical / PIECE))?.get(key(logical))
    }

    /// Sets the entry for a volume extent; returns the one it replaces.
    pub fn insert(&mut self, logical: u32, id: u32) -> Option<u32> {
        let key = key(logical);
        let piece = self.pieces.entry(logical / PIECE).or_insert(Piece::EMPTY);
        let old = piece.insert(key, id, false);
        self.len += u32::from(old.is_none());
        self.extents += u32::from(id < SPARE_BASE);
        self.extents -= u32::from(old.is_some_and(|old| old < SPARE_BASE));
        old
    }

    /// Removes the entry for a volume extent.
    pub fn remove(&mut self, logical: u32) -> Option<u32> {
        let piece = self.pieces.get_mut(&(logical / PIECE))?;
        let old = piece.remove(key(logical), false)?;
        if piece.is_empty() {
            self.pieces.remove(&(logical / PIECE));
        }
        self.len -= 1;
        self.extents -= u32::from(old < SPARE_BASE);
        Some(old)
    }

    /// Gives back memory that is kept for more entries, after many were inserted.
    pub fn compact(&mut self) {
        self.pieces.values_mut().for_each(Piece::compact);
    }

    /// Number of entries.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Number of entries that are data extents.
    pub fn extents(&self) -> u32 {
        self.extents
    }

    /// Whether it holds nothing at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0 && self.runs.is_empty() && self.lost.is_empty()
    }

    /// Entries as (volume extent, id), ascending, from a volume extent on.
    pub fn iter_from(&self, logical: u32) -> impl Iterator<Item = (u32, u32)> {
        self.pieces.range(logical / PIECE..).flat_map(move |(piece, content)| {
            let base = piece * PIECE;
            let from = if *piece == logical / PIECE { key(logical) } else { 0 };
            content.iter_from(from).map(move |(key, id)| (base + u32::from(key), id))
        })
    }

    /// All entries as (volume extent, id), ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        self.iter_from(0)
    }

    /// Whether a zero run covers the volume extent.
    #[inline]
    pub fn in_run(&self, logical: u32) -> bool {
        !self.runs.is_empty() && covers(&self.runs, logical)
    }

    /// The first volume extent behind this one at which an entry is, or a run begins or ends.
    pub fn next_change(&self, logical: u32) -> Option<u32> {
        let entry = self.iter_from(logical + 1).next().map(|(at, _)| at);
        let borders = [&self.runs, &self.lost].into_iter().flat_map(|runs| {
            let before = runs.range(..=logical).next_back();
            let end = before.map(|(start, (length, _))| start + length);
            let start = runs.range(logical + 1..).next().map(|(start, _)| *start);
            end.filter(|end| *end > logical).into_iter().chain(start)
        });
        entry.into_iter().chain(borders).min()
    }

    /// Whether what it held at the volume extent is lost, if there is no entry for it.
    #[inline]
    pub fn in_lost(&self, logical: u32) -> bool {
        !self.lost.is_empty() && covers(&self.lost, logical)
    }
}

fn covers(runs: &BTreeMap<u32, (u32, u32)>, logical: u32) -> bool {
    let before = runs.range(..=logical).next_back();
    before.is_some_and(|(start, (length, _))| logical - start < *length)
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
        for step in 0..60_000 {
            // Full in parts, and little over all of several pieces.
            let logical = if rng.bool() { rng.u32(..5000) } else { rng.u32(..4 * PIECE) };
            // Falls back to few entries in the middle, after arrays were made.
            let removed = if step / 20_000 == 1 { 3 } else { 1 };
            let id = if rng.bool() { step } else { SPARE_BASE + step };
            if rng.u32(..4) < removed {
                assert_eq!(layer.remove(logical), model.remove(&logical));
            } else {
                assert_eq!(layer.insert(logical, id), model.insert(logical, id));
            }
            assert_eq!(layer.len() as usize, model.len());
            if step % 5000 == 0 {
                let extents = model.values().filter(|id| **id < SPARE_BASE).count();
                assert_eq!(layer.extents() as usize, extents);
                layer = Layer::default();
                model.iter().for_each(|(k, v)| assert_eq!(layer.insert(*k, *v), None));
                layer.compact();
            }
        }
        assert!(layer.iter().eq(model.iter().map(|(k, v)| (*k, *v))));
        for from in [0, 700, 2047, 2048, 4999, PIECE - 1, PIECE, 2 * PIECE + 2049] {
            assert!(layer.iter_from(from).eq(model.range(from..).map(|(k, v)| (*k, *v))));
        }
        for logical in 0..4 * PIECE {
            assert_eq!(layer.get(logical), model.get(&logical).copied());
        }
    }

    #[test]
    fn neighbours_in_order_need_no_array() {
        let is_run = |layer: &Layer| layer.pieces.values().all(|p| matches!(p, Piece::Run(..)));
        let all = || (PIECE - 9..3 * PIECE).map(|at| (at, at + 100));
        let mut layer = Layer::default();
        all().for_each(|(at, id)| assert_eq!(layer.insert(at, id), None));
        assert!(is_run(&layer) && layer.iter().eq(all()));
        for from in [0, PIECE - 9, PIECE + 7, 3 * PIECE - 1, 3 * PIECE] {
            assert!(layer.iter_from(from).eq(all().filter(|(at, _)| *at >= from)));
        }
        let mut loaded = Layer::default();
        all().for_each(|(at, id)| assert_eq!(loaded.insert(at, id), None));
        loaded.compact();
        assert!(is_run(&loaded) && loaded.iter().eq(all()) && loaded.len() == layer.len());
        for middle in [PIECE - 5, 2 * PIECE - 1, 2 * PIECE + 1] {
            assert_eq!(layer.remove(middle), Some(middle + 100));
            assert_eq!((layer.get(middle), layer.remove(middle)), (None, None));
            assert_eq!(layer.insert(middle, 5), None);
            assert_eq!(layer.insert(middle, middle + 100), Some(5));
            assert!(layer.iter().eq(all()));
        }
        for (at, id) in all() {
            assert_eq!(loaded.remove(at), Some(id));
            assert!(is_run(&loaded) && loaded.get(at).is_none());
        }
        assert!(loaded.is_empty());
    }
}
