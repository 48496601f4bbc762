//! What is remembered of look-ups, in pieces, within a bound: the piece that has been
//! there longest goes first. What has gone is looked up again.

use super::{Layers, base_of};
use crate::info::LookupInfo;
use crate::limits::{LOOKUP_CACHE_BYTES, SNAPSHOTS_MAX, SPARES_MAX};
use crate::meta::entries::SPARE_BASE;
use crate::meta::ids::IdMap;
use std::collections::VecDeque;
use std::ops::Range;

/// Volume extents in a piece.
const PIECE: u32 = 512;
/// Cell: not looked up yet.
pub(super) const UNKNOWN: u32 = 0;
/// Cell: nothing in the whole chain.
pub(super) const NOTHING: u32 = 1;
/// Cells from here on are an entry plus this.
pub(super) const SINGLE: u32 = 2;
/// Cells from here on, without the bit below, are a base plus this: nothing but its file.
pub(super) const BASE: u32 = 3 << 29;
const _: () = assert!(SPARE_BASE + SPARES_MAX as u32 + SINGLE <= BASE);
const _: () = assert!(BASE + SNAPSHOTS_MAX < MIXED);
/// Cells with this bit are an index of the piece's `mixed`.
pub(super) const MIXED: u32 = 1 << 31;

/// What is remembered of all volumes and snapshots.
#[derive(Debug)]
pub struct Views {
    views: IdMap<View>,
    /// Which head or snapshot each view is of, by its number.
    owners: IdMap<u32>,
    /// Pieces in the order in which they were made: number of the view, and which. Some have gone.
    order: VecDeque<(u32, u32)>,
    /// Number of the next view.
    next: u32,
    /// Pieces there are.
    pieces: usize,
    /// Bytes of memory they take, and may take.
    bytes: usize,
    capacity: usize,
    /// Pieces that went because others needed the memory.
    forgotten: u64,
}

/// What is remembered of one volume or snapshot.
#[derive(Debug)]
pub struct View {
    /// Its own: the volume's head, which owns it, is another one after each snapshot.
    number: u32,
    pieces: IdMap<Box<Piece>>,
}

#[derive(Debug)]
struct Piece {
    /// [`Meta::tree_version`](crate::meta::Meta) that the cells are of.
    version: u64,
    cells: [u32; PIECE as usize],
    mixed: Vec<Layers>,
    mixed_free: Vec<u32>,
}

impl Piece {
    fn new(version: u64) -> Box<Self> {
        let cells = [UNKNOWN; PIECE as usize];
        Box::new(Self { version, cells, mixed: Vec::new(), mixed_free: Vec::new() })
    }

    /// Bytes of memory it takes.
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.mixed.iter().map(Layers::bytes).sum::<usize>()
    }

    /// Forgets those of the extents that are in the piece `at`; the bytes that were theirs.
    fn clear(&mut self, at: u32, extents: &Range<u32>) -> usize {
        let first = extents.start.max(at * PIECE) - at * PIECE;
        let end = extents.end.min((at + 1) * PIECE) - at * PIECE;
        let mut bytes = 0;
        for cell in &mut self.cells[first as usize..end as usize] {
            let cell = std::mem::replace(cell, UNKNOWN);
            if cell & MIXED != 0 {
                let layers = std::mem::take(&mut self.mixed[(cell & !MIXED) as usize]);
                bytes += layers.heap_bytes();
                self.mixed_free.push(cell & !MIXED);
            }
        }
        bytes
    }

    /// Keeps several layers; their index.
    fn keep(&mut self, layers: Layers) -> u32 {
        match self.mixed_free.pop() {
            Some(index) => {
                self.mixed[index as usize] = layers;
                index
            }
            None => {
                self.mixed.push(layers);
                self.mixed.len() as u32 - 1
            }
        }
    }
}

impl View {
    /// What is remembered of a volume extent at this version of the tree.
    #[inline]
    pub(super) fn cell(&self, logical: u32, version: u64) -> u32 {
        self.look(logical, version).0
    }

    /// As [`View::cell`], and what a mixed cell is an index of.
    #[inline]
    pub(super) fn look(&self, logical: u32, version: u64) -> (u32, &[Layers]) {
        match self.pieces.get(&(logical / PIECE)) {
            Some(piece) if piece.version == version => {
                (piece.cells[(logical % PIECE) as usize], &piece.mixed)
            }
            _ => (UNKNOWN, &[]),
        }
    }

    /// The layers of a volume extent whose cell is a mixed one, to be changed; not how much memory they take.
    pub(super) fn mixed_mut(&mut self, logical: u32, cell: u32) -> &mut Layers {
        let piece = self.pieces.get_mut(&(logical / PIECE)).expect("the cell is in a piece");
        &mut piece.mixed[(cell & !MIXED) as usize]
    }

    /// Forgets what is known of volume extents; the bytes that it took.
    fn forget(&mut self, extents: &Range<u32>) -> usize {
        let pieces = extents.start / PIECE..extents.end.div_ceil(PIECE);
        if pieces.len() > self.pieces.len() {
            let within = self.pieces.iter_mut().filter(|(at, _)| pieces.contains(at));
            within.map(|(at, piece)| piece.clear(*at, extents)).sum()
        } else {
            let clear = |at| Some(self.pieces.get_mut(&at)?.clear(at, extents));
            pieces.filter_map(clear).sum()
        }
    }
}

impl Default for Views {
    fn default() -> Self {
        Self {
            views: IdMap::default(),
            owners: IdMap::default(),
            order: VecDeque::new(),
            next: 0,
            pieces: 0,
            bytes: 0,
            capacity: LOOKUP_CACHE_BYTES as usize,
            forgotten: 0,
        }
    }
}

impl Views {
    /// What is remembered of a head or snapshot.
    #[inline]
    pub fn get(&self, owner: u32) -> Option<&View> {
        self.views.get(&owner)
    }

    /// As [`Views::get`], to be changed; not how much memory it takes.
    pub(super) fn get_mut(&mut self, owner: u32) -> Option<&mut View> {
        self.views.get_mut(&owner)
    }

    /// Forgets all of a head or snapshot.
    pub fn remove(&mut self, owner: u32) {
        let Some(view) = self.views.remove(&owner) else { return };
        self.owners.remove(&view.number);
        self.pieces -= view.pieces.len();
        self.bytes -= view.pieces.values().map(|piece| piece.bytes()).sum::<usize>();
    }

    /// What was remembered of one is true of another.
    pub fn hand_over(&mut self, owner: u32, to: u32) {
        self.remove(to);
        if let Some(view) = self.views.remove(&owner) {
            self.owners.insert(view.number, to);
            self.views.insert(to, view);
        }
    }

    /// Remembers the layers of a volume extent. Other pieces may go for it, its own does not.
    pub(super) fn remember(&mut self, owner: u32, logical: u32, version: u64, layers: Layers) {
        let at = logical / PIECE;
        let view = self.views.entry(owner).or_insert_with(|| {
            self.next = self.next.wrapping_add(1);
            self.owners.insert(self.next, owner);
            View { number: self.next, pieces: IdMap::default() }
        });
        let number = view.number;
        let piece = view.pieces.entry(at).or_insert_with(|| {
            if self.order.len() > 2 * self.pieces + 64 {
                // Those of views that have gone.
                self.order.retain(|(number, _)| self.owners.contains_key(number));
            }
            self.order.push_back((number, at));
            self.pieces += 1;
            self.bytes += size_of::<Piece>();
            Piece::new(version)
        });
        if piece.version != version {
            self.bytes -= piece.bytes();
            *piece = Piece::new(version);
            self.bytes += size_of::<Piece>();
        }
        let base = layers.below.and_then(base_of);
        let cell = match (layers.entries.as_slice(), layers.below, base) {
            ([], None, _) => NOTHING,
            ([], _, Some(base)) => BASE + base.0,
            ([single], None, _) => *single + SINGLE,
            _ => {
                let before = piece.mixed.len();
                self.bytes += layers.heap_bytes();
                let index = piece.keep(layers);
                self.bytes += (piece.mixed.len() - before) * size_of::<Layers>();
                index | MIXED
            }
        };
        piece.cells[(logical % PIECE) as usize] = cell;
        if self.bytes > self.capacity {
            self.shrink((number, at));
        }
    }

    /// Forgets volume extents of a head or snapshot.
    pub(super) fn forget(&mut self, owner: u32, extents: &Range<u32>) {
        if let Some(view) = self.views.get_mut(&owner) {
            self.bytes -= view.forget(extents);
        }
    }

    /// Forgets volume extents of all.
    pub(super) fn forget_everywhere(&mut self, extents: &Range<u32>) {
        self.bytes -= self.views.values_mut().map(|view| view.forget(extents)).sum::<usize>();
    }

    /// Bounds the bytes of memory.
    pub fn set_capacity(&mut self, bytes: u64) {
        let capacity = usize::try_from(bytes).unwrap_or(usize::MAX);
        // What was found last stays, however little that is.
        if std::mem::replace(&mut self.capacity, capacity) == capacity {
            return;
        }
        // No view has this number.
        self.shrink((self.next.wrapping_add(1), 0));
    }

    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memory it takes, and what that costs.
    pub fn info(&self) -> LookupInfo {
        let (memory, memory_max) = (self.bytes as u64, self.capacity as u64);
        LookupInfo { memory, memory_max, forgotten: self.forgotten, ..LookupInfo::default() }
    }

    /// Lets pieces go until the rest has room; `kept` stays.
    #[cold]
    fn shrink(&mut self, kept: (u32, u32)) {
        while self.bytes > self.capacity
            && let Some((number, at)) = self.order.pop_front()
        {
            if (number, at) == kept {
                self.order.push_back(kept);
                if self.pieces == 1 {
                    break;
                }
                continue;
            }
            let owner = self.owners.get(&number);
            let view = owner.and_then(|owner| self.views.get_mut(owner));
            if let Some(piece) = view.and_then(|view| view.pieces.remove(&at)) {
                self.pieces -= 1;
                self.bytes -= piece.bytes();
                self.forgotten += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests;
