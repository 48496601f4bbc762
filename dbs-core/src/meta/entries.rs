//! Extent and spare entries in memory: owner and per-block state. An entry costs at most some 13
//! bytes, and less among neighbours alike (`rows`). If its blocks are not all alike but for one stretch of them,
//! it adds a bitmap of its data blocks, and of its zero blocks if it has any.

mod compressed;
mod ids;
mod rows;
mod slab;
mod states;
mod stretch;

use super::counts::Counts;
use super::table::Table;
use crate::format::compressed::{state_of, stored_by};
use crate::format::entry::{EntryBytes, EntryHeader, RUN_LOST};
use crate::format::record::FillState;
use compressed::AllCompressed;
use ids::IdBits;
use rows::{Row, Rows};
use states::{ABSENT, COMPRESSED, FULL, NO_BITS, States, is_away};
use std::ops::Range;
use zerocopy::IntoBytes;

pub use super::bits::Bits;

/// Ids from here on are spare entries: zero runs and zero-only layers, without data space.
pub const SPARE_BASE: u32 = 1 << 30;

/// Bit of a run whose extents are lost: no run is that long.
const LOST: u32 = 1 << 31;

const FREE: Row = Row { snapshot: 0, logical: 0, bits: NO_BITS };

/// The bitmaps of an entry are on the device alone: whoever needs them reads its metadata block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Away(pub u32);

/// Data blocks by owner, being counted again.
#[derive(Debug)]
pub struct Counting {
    /// Changes of the counts when it began.
    changes: u64,
    counts: Counts,
}

/// All entries, data extents and spares.
#[derive(Debug)]
pub struct Entries {
    data: Rows,
    /// Which of them are in use.
    in_use: IdBits,
    spares: Rows,
    /// Length of the run of each spare, with [`LOST`] if it is not one of zeros; 0 for a zero-only
    /// layer.
    runs: Table<u32>,
    states: States,
    /// Those of spares, which never leave memory.
    spare_states: States,
    /// What rows say nothing of.
    compressed: AllCompressed,
    /// Data blocks by owner.
    counts: Counts,
}

impl Entries {
    /// No entries yet, for extents of `blocks` blocks.
    pub fn new(blocks: u32) -> Self {
        Self {
            data: Rows::default(),
            in_use: IdBits::new(),
            spares: Rows::default(),
            runs: Table::new(0),
            states: States::new(blocks),
            spare_states: States::new(blocks),
            compressed: AllCompressed::default(),
            counts: Counts::default(),
        }
    }

    /// Counts the data blocks of each owner, and keeps the counts true from now on. Before, owners
    /// may be anything.
    pub fn start_counting(&mut self) {
        self.counts = self.count();
    }

    /// Begins to count again, to compare.
    pub fn begin_count(&self) -> Counting {
        Counting { changes: self.counts.changes(), counts: Counts::started() }
    }

    /// Counts these extents.
    pub fn count_some(&self, counting: &mut Counting, ids: Range<u32>) {
        for (id, owner, _) in self.extents_in(ids) {
            counting.counts.add(owner, self.data_blocks(id));
        }
    }

    /// Whether the counts are what counting again gave. If they have changed meanwhile, that says nothing.
    pub fn counts_are(&self, counting: &Counting) -> bool {
        self.counts.changes() != counting.changes || counting.counts.is_equal(&self.counts)
    }

    /// The data extents in use among `ids`, with owner and volume extent.
    pub fn extents_in(&self, ids: Range<u32>) -> impl Iterator<Item = (u32, u32, u32)> {
        let end = ids.end.min(self.last_extent().map_or(0, |last| last + 1));
        (ids.start..end).filter_map(|id| self.owner(id).map(|(owner, at)| (id, owner, at)))
    }

    fn count(&self) -> Counts {
        let mut counts = Counts::started();
        for id in used(&self.data, 0, 0) {
            counts.add(self.get(id).snapshot, self.data_blocks(id));
        }
        counts
    }

    /// Data blocks in all entries of a snapshot.
    pub fn data_blocks_of(&self, snapshot: u32) -> u64 {
        self.counts.get(snapshot)
    }

    /// Blocks in an extent.
    pub fn blocks(&self) -> u32 {
        self.states.blocks()
    }

    /// Owner and volume extent; `None` if free.
    pub fn owner(&self, id: u32) -> Option<(u32, u32)> {
        let entry = self.get(id);
        (entry.snapshot != 0).then_some((entry.snapshot, entry.logical))
    }

    /// Length of the run this spare is, of zeros or of what is lost; 0 for any other entry.
    pub fn run(&self, id: u32) -> u32 {
        self.raw_run(id) & !LOST
    }

    /// Whether this spare is a run of what is lost.
    pub fn is_lost(&self, id: u32) -> bool {
        self.raw_run(id) & LOST != 0
    }

    fn raw_run(&self, id: u32) -> u32 {
        if id < SPARE_BASE { 0 } else { self.runs.get(spare(id)) }
    }

    /// The last data extent in use.
    pub fn last_extent(&self) -> Option<u32> {
        self.in_use.last()
    }

    /// Data extents in use, of those from `first` on.
    pub fn extents_from(&self, first: u32) -> u32 {
        self.in_use.count_from(first)
    }

    /// Ids in use, data extents first.
    pub fn used(&self) -> impl Iterator<Item = u32> {
        self.used_from(0)
    }

    /// As [`Entries::used`], of those from `first` on.
    pub fn used_from(&self, first: u32) -> impl Iterator<Item = u32> {
        let data = used(&self.data, 0, first);
        data.chain(used(&self.spares, SPARE_BASE, first))
    }

    /// Makes an entry a layer of `snapshot` at `logical`, all blocks absent.
    pub fn assign(&mut self, id: u32, snapshot: u32, logical: u32) {
        self.release(id);
        self.set(id, Row { snapshot, logical, bits: ABSENT });
    }

    /// Makes a spare the zero run `logical .. logical + length` of `snapshot`.
    pub fn assign_run(&mut self, id: u32, snapshot: u32, logical: u32, length: u32) {
        self.release(id);
        self.set(id, Row { snapshot, logical, bits: NO_BITS });
        *self.runs.get_mut(spare(id)) = length;
    }

    /// Makes a spare say that what `snapshot` held at `logical .. logical + length` is lost.
    pub fn assign_lost(&mut self, id: u32, snapshot: u32, logical: u32, length: u32) {
        self.assign_run(id, snapshot, logical, length | LOST);
    }

    /// Changes the owner, keeping the blocks.
    pub fn set_owner(&mut self, id: u32, snapshot: u32) {
        let (old, blocks) = (self.get(id).snapshot, self.data_blocks(id));
        self.counts.remove(old, blocks);
        self.counts.add(snapshot, blocks);
        self.set(id, Row { snapshot, ..self.get(id) });
    }

    /// Frees an entry.
    pub fn release(&mut self, id: u32) {
        if self.counts.is_on() {
            self.counts.remove(self.get(id).snapshot, self.data_blocks(id));
        }
        let mut bits = self.get(id).bits;
        if bits == COMPRESSED {
            self.compressed.data -= u64::from(self.data_blocks(id));
            bits = self.compressed.remove(id).unwrap_or(NO_BITS);
        }
        self.set(id, FREE);
        self.states_mut(id).release(bits);
        if id >= SPARE_BASE {
            *self.runs.get_mut(spare(id)) = 0;
        }
    }

    /// Sets the state of a range of blocks.
    pub fn fill(&mut self, id: u32, blocks: Range<u32>, state: FillState) {
        let Row { snapshot, mut bits, .. } = self.get(id);
        if blocks.is_empty() || (bits == FULL && state == FillState::Data) {
            return;
        }
        let is_compressed = bits == COMPRESSED;
        if is_compressed {
            debug_assert!(state != FillState::Data, "nothing is written to compressed blocks");
            bits = self.bits(id);
        }
        let (filled, gained, lost) = self.states_mut(id).fill(bits, &blocks, state);
        self.counts.add(snapshot, gained);
        self.counts.remove(snapshot, lost);
        if is_compressed {
            self.compressed.data -= u64::from(lost);
        }
        if filled != bits {
            self.put_bits(id, filled);
        }
    }

    /// State of one block.
    ///
    /// # Errors
    /// [`Away`], also if it is compressed.
    #[inline]
    pub fn state(&self, id: u32, block: u32) -> Result<FillState, Away> {
        self.states_of(id).state(self.row_bits(id), block).ok_or(Away(id))
    }

    /// How the blocks of an entry are known, if that is in memory.
    #[inline]
    fn present(&self, id: u32) -> Result<u32, Away> {
        let bits = self.bits(id);
        if is_away(bits) { Err(Away(id)) } else { Ok(bits) }
    }

    /// Whether the bitmaps of an entry are in memory, or it needs none.
    ///
    /// # Errors
    /// [`Away`].
    #[inline]
    pub fn need(&self, id: u32) -> Result<(), Away> {
        self.present(id).map(drop)
    }

    /// Lets the bitmaps of data extents go that are on the device; whether there were any.
    pub fn let_go(&mut self, ids: Range<u32>) -> bool {
        let mut any = false;
        for id in ids {
            if let Some(bits) = self.states.let_go(self.bits(id)) {
                self.put_bits(id, bits);
                any = true;
            }
        }
        any
    }

    /// Takes the bitmaps of a data extent back, if they are away, from its bytes on the device; `false` if
    /// these are not what went.
    #[must_use]
    pub fn take_back(&mut self, id: u32, bytes: &EntryBytes<'_>) -> bool {
        let old = self.bits(id);
        if !is_away(old) {
            return true;
        }
        if bytes.header.snapshot.get() == 0 {
            return false;
        }
        let bits = self.states.load(bytes);
        let is_same = self.states.data_blocks(bits) == self.states.data_blocks(old);
        if is_same {
            self.put_bits(id, bits);
        } else {
            self.states.release(bits);
        }
        is_same
    }

    /// Whether the bitmaps of any of these data extents are on the device alone.
    pub fn any_away(&self, mut ids: Range<u32>) -> bool {
        ids.any(|id| is_away(self.bits(id)))
    }

    /// Bytes of memory for the bitmaps of data extents.
    pub fn bitmap_bytes(&self) -> usize {
        self.states.bytes()
    }

    /// Whether the bitmaps of data extents would have room in half of that.
    pub fn are_bitmaps_sparse(&self) -> bool {
        self.states.is_sparse()
    }

    /// Moves the bitmaps of data extents to where they take less memory.
    pub fn pack_bitmaps(&mut self, ids: Range<u32>) {
        for id in ids {
            let old = self.bits(id);
            let new = self.states.pack(old);
            if new != old {
                self.put_bits(id, new);
            }
        }
    }

    /// Bytes of memory for all bitmaps.
    pub fn bitmap_memory(&self) -> usize {
        self.states.bytes() + self.spare_states.bytes()
    }

    /// Whether all blocks of the range are data; `false` if only the device knows, and of what is compressed.
    pub fn all_data(&self, id: u32, blocks: &Range<u32>) -> bool {
        self.states_of(id).all_data(self.row_bits(id), blocks)
    }

    /// Bitmap of the data blocks.
    ///
    /// # Errors
    /// [`Away`].
    pub fn data_bits(&self, id: u32) -> Result<Bits, Away> {
        let (bits, states) = (self.present(id)?, self.states_of(id));
        Ok(Bits::from_words((0..states.words()).map(|word| states.data_word(bits, word))))
    }

    /// Bitmap of the zero blocks.
    ///
    /// # Errors
    /// [`Away`].
    pub fn zero_bits(&self, id: u32) -> Result<Bits, Away> {
        let (bits, states) = (self.present(id)?, self.states_of(id));
        Ok(Bits::from_words((0..states.words()).map(|word| states.zero_word(bits, word))))
    }

    /// Bitmap of the blocks that are data or zeros.
    ///
    /// # Errors
    /// [`Away`].
    pub fn held_bits(&self, id: u32) -> Result<Bits, Away> {
        Ok(self.data_bits(id)?.or(&self.zero_bits(id)?))
    }

    /// Number of data blocks.
    pub fn data_blocks(&self, id: u32) -> u32 {
        self.states_of(id).data_blocks(self.bits(id))
    }

    /// Whether all blocks are data, and not compressed.
    pub fn is_full(&self, id: u32) -> bool {
        self.row_bits(id) == FULL
    }

    /// Replaces both bitmaps. What is compressed stays so.
    pub fn set_bits(&mut self, id: u32, data: &Bits, zero: &Bits) {
        let (snapshot, logical) = (self.get(id).snapshot, self.get(id).logical);
        let stored = self.stored_blocks(id);
        self.assign(id, snapshot, logical);
        for run in zero.runs(self.blocks()) {
            self.fill(id, run, FillState::Zero);
        }
        for run in data.runs(self.blocks()) {
            self.fill(id, run, FillState::Data);
        }
        stored.into_iter().for_each(|stored| self.set_compressed(id, stored));
    }

    /// Sets an entry from its bytes on the device, which the caller has checked.
    pub fn load(&mut self, id: u32, bytes: &EntryBytes<'_>) {
        self.release(id);
        let header = bytes.header;
        if header.snapshot.get() == 0 {
            return;
        }
        if header.run.get() != 0 && id >= SPARE_BASE {
            let lost = if header.state.get() == RUN_LOST { LOST } else { 0 };
            let length = header.run.get() | lost;
            self.assign_run(id, header.snapshot.get(), header.logical.get(), length);
            return;
        }
        let bits = self.states_mut(id).load(bytes);
        let (snapshot, logical) = (header.snapshot.get(), header.logical.get());
        self.set(id, Row { snapshot, logical, bits });
        if id < SPARE_BASE {
            let stored = stored_by(header.state.get(), self.blocks());
            stored.into_iter().for_each(|stored| self.set_compressed(id, stored));
        }
        if self.counts.is_on() {
            self.counts.add(header.snapshot.get(), self.data_blocks(id));
        }
    }

    /// Gives back the memory that loading does not need any more.
    pub fn compact(&mut self) {
        self.data.compact();
        self.spares.compact();
    }

    /// Writes an entry's bytes to `out`, which is zeroed and as long as an entry.
    pub fn encode(&self, id: u32, out: &mut [u8]) {
        let entry = self.get(id);
        if entry.snapshot == 0 {
            return;
        }
        let header = EntryHeader {
            snapshot: entry.snapshot.into(),
            logical: entry.logical.into(),
            run: self.run(id).into(),
            state: match self.stored_blocks(id) {
                Some(stored) => state_of(stored),
                None if self.is_lost(id) => RUN_LOST,
                None => 0,
            }
            .into(),
        };
        let (head, bitmaps) = out.split_at_mut(crate::format::entry::HEADER_BYTES);
        head.copy_from_slice(header.as_bytes());
        let half = bitmaps.len() / 2;
        let (data, zero) = bitmaps.split_at_mut(half);
        self.states_of(id).encode(self.bits(id), data, zero);
    }

    fn get(&self, id: u32) -> Row {
        let (rows, index) = self.place(id);
        rows.get(index).unwrap_or(FREE)
    }

    /// What the row of an entry says of its blocks.
    #[inline]
    fn row_bits(&self, id: u32) -> u32 {
        let (rows, index) = self.place(id);
        rows.bits(index).unwrap_or(NO_BITS)
    }

    #[inline]
    fn states_of(&self, id: u32) -> &States {
        if id < SPARE_BASE { &self.states } else { &self.spare_states }
    }

    fn states_mut(&mut self, id: u32) -> &mut States {
        if id < SPARE_BASE { &mut self.states } else { &mut self.spare_states }
    }

    #[inline]
    fn place(&self, id: u32) -> (&Rows, usize) {
        match id.checked_sub(SPARE_BASE) {
            None => (&self.data, id as usize),
            Some(spare) => (&self.spares, spare as usize),
        }
    }

    fn place_mut(&mut self, id: u32) -> (&mut Rows, usize) {
        match id.checked_sub(SPARE_BASE) {
            None => (&mut self.data, id as usize),
            Some(spare) => (&mut self.spares, spare as usize),
        }
    }

    fn set(&mut self, id: u32, row: Row) {
        let is_used = row.snapshot != 0;
        let (rows, index) = self.place_mut(id);
        rows.set(index, is_used.then_some(row));
        if id < SPARE_BASE {
            self.in_use.set(id, is_used);
        }
    }
}

fn spare(id: u32) -> usize {
    (id - SPARE_BASE) as usize
}

fn used(rows: &Rows, base: u32, first: u32) -> impl Iterator<Item = u32> {
    rows.iter_from(first.saturating_sub(base) as usize).map(move |index| base + index as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn extents_in_use_are_counted_and_the_last_is_known() {
        let mut entries = Entries::new(16);
        assert_eq!((entries.last_extent(), entries.extents_from(0)), (None, 0));
        for id in [3, 64, 200, 1000] {
            entries.assign(id, 1, id);
        }
        entries.assign_run(SPARE_BASE + 5000, 1, 7, 2);
        for first in [0, 3, 4, 200, 201, 1000, 1001, SPARE_BASE, SPARE_BASE + 5000, u32::MAX] {
            let from: Vec<_> = entries.used().filter(|id| *id >= first).collect();
            assert_eq!(Vec::from_iter(entries.used_from(first)), from, "{first}");
        }
        assert_eq!(entries.last_extent(), Some(1000));
        let counts = [0, 3, 4, 64, 65, 1000, 1001, 5000].map(|id| entries.extents_from(id));
        assert_eq!(counts, [4, 4, 3, 3, 2, 1, 0, 0]);
        entries.release(200);
        entries.release(1000);
        assert_eq!((entries.last_extent(), entries.extents_from(0)), (Some(64), 2));
        entries.set_owner(64, 9);
        entries.release(64);
        entries.release(64);
        entries.release(3);
        assert_eq!((entries.last_extent(), entries.extents_from(0)), (None, 0));
    }

    #[test]
    fn fill_tracks_every_state() {
        let mut entries = Entries::new(256);
        entries.assign(3, 1, 9);
        entries.fill(3, 10..70, FillState::Data);
        entries.fill(3, 60..80, FillState::Zero);
        assert_eq!(entries.state(3, 9).unwrap(), FillState::Absent);
        assert_eq!(entries.state(3, 59).unwrap(), FillState::Data);
        assert_eq!(entries.state(3, 60).unwrap(), FillState::Zero);
        assert_eq!(entries.data_bits(3).unwrap().count(), 50);
        assert!(entries.data_bits(3).unwrap().runs(256).eq(std::iter::once(10..60)));
        entries.fill(3, 0..256, FillState::Data);
        assert_eq!(entries.bitmap_memory(), 0, "a full extent keeps no bitmaps");
        entries.fill(3, 5..6, FillState::Absent);
        assert_eq!(entries.data_bits(3).unwrap().count(), 255);
        assert!(entries.all_data(3, &(6..256)) && !entries.all_data(3, &(5..6)));
    }

    /// An entry, block by block.
    #[derive(Debug, Clone, Default)]
    struct Plain {
        owner: Option<u32>,
        is_run: bool,
        blocks: Vec<FillState>,
    }

    impl Plain {
        fn owned(owner: u32, blocks: u32) -> Self {
            let blocks = vec![FillState::Absent; blocks as usize];
            Self { owner: Some(owner), is_run: false, blocks }
        }

        fn data(&self) -> u64 {
            self.blocks.iter().filter(|state| **state == FillState::Data).count() as u64
        }
    }

    /// Every change of entries beside one that knows no bitmaps: extents of one word, of less, and of
    /// several.
    #[test]
    fn states_and_counts_are_those_of_each_block() {
        for blocks in [16, 64, 256, 1024] {
            let mut rng = fastrand::Rng::with_seed(3);
            let mut entries = Entries::new(blocks);
            let mut plain: HashMap<u32, Plain> = HashMap::new();
            entries.assign(0, 1, 0);
            plain.insert(0, Plain::owned(1, blocks));
            entries.start_counting();
            for _ in 0..4000 {
                let id = if rng.u8(..8) == 0 { SPARE_BASE + rng.u32(..3) } else { rng.u32(..6) };
                change(&mut entries, &mut plain, id, &mut rng);
                let model = plain.get(&id).cloned().unwrap_or_default();
                assert_eq!(entries.owner(id).map(|owner| owner.0), model.owner);
                for (block, state) in (0..).zip(&model.blocks) {
                    assert_eq!(entries.state(id, block), Ok(*state), "block {block} of {id}");
                }
                let is_full = entries.is_full(id);
                assert_eq!(is_full, model.owner.is_some() && model.data() == u64::from(blocks));
                for snapshot in 1..5 {
                    let own = plain.values().filter(|entry| entry.owner == Some(snapshot));
                    let data = own.map(Plain::data).sum::<u64>();
                    assert_eq!(entries.data_blocks_of(snapshot), data);
                }
            }
        }
    }

    /// Changes an entry in one of the ways there are, and what it must be.
    fn change(
        entries: &mut Entries,
        plain: &mut HashMap<u32, Plain>,
        id: u32,
        rng: &mut fastrand::Rng,
    ) {
        let blocks = entries.blocks();
        let start = rng.u32(..blocks);
        // Ends at and beside the border of a word are as likely as any other.
        let end =
            if rng.bool() { rng.u32(start..=blocks) } else { start / 64 * 64 + rng.u32(63..66) };
        let range = if rng.u8(..6) == 0 { 0..blocks } else { start..end.clamp(start, blocks) };
        let (is_spare, snapshot) = (id >= SPARE_BASE, rng.u32(1..5));
        let known = plain.get(&id).cloned().unwrap_or_default();
        let has_blocks = known.owner.is_some() && !known.is_run;
        let within = |block: usize| range.contains(&(block as u32));
        match rng.u8(..10) {
            0 => {
                entries.assign(id, snapshot, 0);
                plain.insert(id, Plain::owned(snapshot, blocks));
            }
            1 if is_spare => {
                entries.assign_run(id, snapshot, 0, 2);
                let run = Plain { owner: Some(snapshot), is_run: true, blocks: Vec::new() };
                plain.insert(id, run);
            }
            2 => {
                entries.release(id);
                plain.remove(&id);
            }
            3 if known.owner.is_some() => {
                entries.set_owner(id, snapshot);
                plain.insert(id, Plain { owner: Some(snapshot), ..known });
            }
            4 if !is_spare => {
                let mut bytes = vec![0; 16 + blocks as usize / 4];
                let from = rng.u32(..6);
                entries.encode(from, &mut bytes);
                entries.load(id, &crate::format::entry::parse(&bytes).unwrap());
                let copied = plain.get(&from).cloned().unwrap_or_default();
                plain.insert(id, copied);
            }
            5 if has_blocks => {
                let data = if is_spare { Bits::default() } else { Bits::range(&range) };
                entries.set_bits(id, &data, &Bits::range(&(0..blocks)).without(&data));
                let is_data = |block| !is_spare && within(block);
                let state = |block| if is_data(block) { FillState::Data } else { FillState::Zero };
                let blocks = (0..blocks as usize).map(state).collect();
                plain.insert(id, Plain { blocks, ..known });
            }
            _ if has_blocks => {
                let states = [FillState::Zero, FillState::Absent, FillState::Data];
                let state = states[rng.usize(..if is_spare { 2 } else { 3 })];
                entries.fill(id, range.clone(), state);
                let kept = known.blocks.iter().enumerate();
                let blocks = kept.map(|(i, old)| if within(i) { state } else { *old }).collect();
                plain.insert(id, Plain { blocks, ..known });
            }
            _ => {}
        }
    }

    /// Bitmaps that go leave the counts and owners, and those that come back are the same; others are refused.
    #[test]
    fn bitmaps_go_and_come_back() {
        for blocks in [16, 256, 1024] {
            let mut entries = Entries::new(blocks);
            let bytes = |entries: &Entries, id| {
                let mut bytes = vec![0; 16 + blocks as usize / 4];
                entries.encode(id, &mut bytes);
                bytes
            };
            for id in 0..4 {
                entries.assign(id, 1, id);
                entries.fill(id, 0..4, FillState::Data);
            }
            // Two stretches, three states, one stretch, all.
            entries.fill(0, 9..11, FillState::Data);
            entries.fill(1, 2..6, FillState::Zero);
            entries.fill(3, 0..blocks, FillState::Data);
            entries.start_counting();
            let known = [0, 1].map(|id| (entries.data_bits(id), entries.zero_bits(id)));
            let (first, second) = (bytes(&entries, 0), bytes(&entries, 1));
            assert!(entries.let_go(0..4) && !entries.let_go(0..4));
            assert_eq!(entries.bitmap_bytes(), 0);
            for id in [0, 1] {
                assert_eq!(
                    (entries.data_bits(id), entries.need(id)),
                    (Err(Away(id)), Err(Away(id)))
                );
                assert_eq!(
                    (entries.state(id, 0), entries.zero_bits(id)),
                    (Err(Away(id)), Err(Away(id)))
                );
                assert!(!entries.all_data(id, &(0..1)) && !entries.is_full(id));
            }
            assert!(entries.need(2).is_ok() && entries.need(3).is_ok());
            entries.set_owner(0, 2);
            assert_eq!([1, 2].map(|of| entries.data_blocks_of(of)), [2 + 4 + u64::from(blocks), 6]);
            let parsed = |bytes| crate::format::entry::parse(bytes).unwrap();
            assert!(
                entries.take_back(0, &parsed(&first)) && entries.take_back(1, &parsed(&second))
            );
            for (id, known) in (0..).zip(known) {
                assert_eq!((entries.data_bits(id), entries.zero_bits(id)), known);
            }
            assert_eq!(entries.owner(0), Some((2, 0)));
            entries.let_go(0..2);
            assert!(!entries.take_back(0, &parsed(&second)), "another count");
            assert_eq!(entries.data_bits(0), Err(Away(0)));
            entries.release(1);
            assert_eq!(entries.data_blocks_of(1), 4 + u64::from(blocks));
            assert!(entries.take_back(1, &parsed(&second)), "it is free by now");
            assert_eq!((entries.owner(1), entries.data_blocks(1)), (None, 0));
        }
    }

    #[test]
    fn entries_round_trip_for_every_extent_size() {
        for blocks in [16, 32, 256, 1024] {
            let mut entries = Entries::new(blocks);
            entries.assign(SPARE_BASE + 2, 4, 5);
            entries.fill(SPARE_BASE + 2, 1..9, FillState::Zero);
            entries.assign(0, 4, 6);
            entries.fill(0, 0..blocks, FillState::Data);
            entries.assign_run(SPARE_BASE, 7, 8, 9);
            for id in [SPARE_BASE + 2, 0, SPARE_BASE] {
                let mut bytes = vec![0; 16 + blocks as usize / 4];
                entries.encode(id, &mut bytes);
                let mut again = Entries::new(blocks);
                again.load(id, &crate::format::entry::parse(&bytes).unwrap());
                assert_eq!(again.owner(id), entries.owner(id));
                assert_eq!(again.run(id), entries.run(id));
                assert_eq!(again.data_bits(id), entries.data_bits(id));
                assert_eq!(again.zero_bits(id), entries.zero_bits(id));
            }
        }
    }
}
