//! What is on its way to the device: records of the next commit group, metadata blocks they made
//! dirty, blocks being written back, and the journal ring's free space.

use crate::format::journal::GROUP_BLOCK_BYTES;
use crate::format::record::Record;
use crate::format::{PAYLOAD_BYTES, RegionKind, journal};
use crate::meta::tail::Tail;
use crate::sabotage::{self, Bug};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// More than the record takes that each group begins with.
const HEADER_BYTES: usize = 64;

/// A mirrored metadata block.
pub type BlockKey = (RegionKind, u32);

/// A captured metadata block on its way to its two places. The second copy is written only when
/// the first is durable, so that a torn write never costs both.
#[derive(Debug)]
pub struct WriteBack {
    /// Which block.
    pub key: BlockKey,
    /// Payload as of group `lsn`.
    pub image: Image,
    /// Group it includes.
    pub lsn: u64,
    /// First group it needs until it is durable twice.
    first: u64,
    /// The copy to write first: never the only good one.
    start: u32,
    /// Copies written so far.
    written: u32,
    /// Copies durable so far.
    durable: u32,
}

/// The payload of a block, among those captured with it.
#[derive(Debug, Clone)]
pub struct Image {
    all: Arc<Vec<u8>>,
    index: usize,
}

impl Image {
    /// The image at `index` of many.
    pub fn new(all: &Arc<Vec<u8>>, index: usize) -> Self {
        Self { all: Arc::clone(all), index }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.all[self.index * PAYLOAD_BYTES..][..PAYLOAD_BYTES]
    }
}

/// Records taken out of the log for one group.
#[derive(Debug)]
pub struct TakenGroup {
    /// Its sequence.
    pub sequence: u64,
    /// Its first block in the ring.
    pub position: u32,
    /// Blocks.
    pub blocks: u32,
    /// The record in front.
    header: Vec<u8>,
    /// The others.
    records: Vec<u8>,
}

impl TakenGroup {
    /// All records.
    pub fn payload(&self) -> Vec<u8> {
        [self.header.as_slice(), &self.records].concat()
    }
}

/// The log.
pub struct Log {
    pending: Vec<u8>,
    /// Empty, with the memory of an earlier group's records.
    emptied: Vec<u8>,
    /// Bytes of records that writes in flight may add.
    expected: usize,
    batch_start: usize,
    /// Sequence the pending records will be committed with.
    pub next: u64,
    /// Last durable group.
    pub durable: u64,
    /// Session id in every group.
    pub session: u64,
    tail: Option<Tail>,
    /// Last group with records that the tail does not hold.
    untailed: u64,
    dirty: HashMap<BlockKey, u64>,
    dirty_order: BTreeSet<(u64, RegionKind, u32)>,
    /// Dirty blocks that cannot be written back, as what they hold cannot be read ([`Log::park`]).
    parked: BTreeMap<BlockKey, u64>,
    /// Blocks being written back.
    pub pipeline: Vec<WriteBack>,
    in_pipeline: HashSet<BlockKey>,
    /// Blocks of which recovery trusted one copy more, and which.
    trusted: HashMap<BlockKey, u32>,
    ring: Ring,
}

impl Log {
    /// A log whose last durable group is `durable`.
    pub fn new(durable: u64, session: u64, ring: Ring) -> Self {
        Self {
            pending: Vec::new(),
            emptied: Vec::new(),
            expected: 0,
            batch_start: 0,
            next: durable + 1,
            durable,
            session,
            tail: None,
            untailed: 0,
            dirty: HashMap::new(),
            dirty_order: BTreeSet::new(),
            parked: BTreeMap::new(),
            pipeline: Vec::new(),
            in_pipeline: HashSet::new(),
            trusted: HashMap::new(),
            ring,
        }
    }

    /// Keeps acknowledged records in `tail` from now on.
    pub fn set_tail(&mut self, tail: Tail) {
        // The next process puts what it holds into one group, for which there is room if it is as long as any.
        let group = self.ring.blocks as usize / 8 * GROUP_BLOCK_BYTES;
        self.tail = Some(tail.limited(group - HEADER_BYTES));
    }

    /// Whether there is a tail.
    pub fn has_tail(&self) -> bool {
        self.tail.is_some()
    }

    /// Whether what the tail held was lost since the last call.
    pub fn take_tail_lost(&mut self) -> bool {
        self.tail.as_mut().is_some_and(Tail::take_lost)
    }

    /// Removes the tail: what it holds is acknowledged no more, nor is what rests on it.
    pub fn give_tail_up(&mut self) {
        if let Some(tail) = self.tail.take() {
            self.untailed = self.next;
            tail.remove();
        }
    }

    /// Gives the tail up, at an orderly close.
    pub fn take_tail(&mut self) -> Option<Tail> {
        self.tail.take()
    }

    /// Appends a record to the next group. [`Log::publish`] ends the batch it belongs to.
    pub fn append(&mut self, record: &Record<'_>, block: Option<BlockKey>) {
        record.encode(&mut self.pending);
        if let Some(key) = block {
            self.mark_dirty(key);
        }
    }

    /// Ends a batch of records that one operation made: they reach the tail together.
    pub fn publish(&mut self) {
        let batch = &self.pending[self.batch_start..];
        if batch.is_empty() {
            return;
        }
        let tailed = self.tail.as_mut().is_some_and(|tail| tail.append(batch));
        if !tailed {
            self.untailed = self.next;
        }
        self.batch_start = self.pending.len();
    }

    /// Whether there are records that a killed process would lose. Whoever acknowledges commits
    /// first, even if the records are another's: a block that one of them made data is overwritten
    /// without a record.
    pub fn is_unsafe(&self) -> bool {
        self.untailed > self.durable
    }

    /// Bytes of records waiting for the next group.
    pub fn pending_bytes(&self) -> usize {
        self.pending.len()
    }

    /// Records of the next group above which operations should commit first.
    pub fn pending_soft_max(&self) -> usize {
        self.ring.blocks as usize / 16 * GROUP_BLOCK_BYTES
    }

    /// Whether the next group, with what writes in flight will add, is as long as it may get.
    pub fn is_long(&self) -> bool {
        self.pending.len() + self.expected > self.pending_soft_max()
    }

    /// Whether the next group is short enough, with what writes in flight will add, to take as much
    /// again as [`Log::pending_soft_max`] at once.
    pub fn is_short(&self) -> bool {
        self.pending.len() + self.expected <= self.pending_soft_max() / 2
    }

    /// A write in flight may add records of this many bytes.
    pub fn expect_records(&mut self, bytes: usize) {
        self.expected += bytes;
    }

    /// Bytes of records that writes in flight may add.
    pub fn expected_records(&self) -> usize {
        self.expected
    }

    /// It has, or will not.
    pub fn expected_records_came(&mut self, bytes: usize) {
        self.expected -= bytes;
    }

    /// Whether anything can still be written: records, dirty blocks, unfinished write-backs.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.dirty.is_empty() && self.pipeline.is_empty()
    }

    /// Notes that a block differs from the device since the next group.
    pub fn mark_dirty(&mut self, key: BlockKey) {
        self.mark_dirty_since(key, self.next);
    }

    /// Notes that a block differs from the device since group `first`.
    pub fn mark_dirty_since(&mut self, key: BlockKey, first: u64) {
        if self.parked.contains_key(&key) {
            return;
        }
        if let std::collections::hash_map::Entry::Vacant(entry) = self.dirty.entry(key) {
            entry.insert(first);
            self.dirty_order.insert((first, key.0, key.1));
        }
    }

    /// A dirty block cannot be written back, as what it holds on the device cannot be read. The journal keeps
    /// what it needs.
    pub fn park(&mut self, key: BlockKey) {
        if let Some(first) = self.dirty.remove(&key) {
            self.dirty_order.remove(&(first, key.0, key.1));
            self.parked.insert(key, first);
        }
    }

    /// What a parked block holds is in memory now.
    pub fn unpark(&mut self, key: BlockKey) {
        if let Some(first) = self.parked.remove(&key) {
            self.mark_dirty_since(key, first);
        }
    }

    /// Blocks that [`Log::park`] was called for.
    pub fn parked(&self) -> impl Iterator<Item = BlockKey> {
        self.parked.keys().copied()
    }

    /// Whether parked blocks keep the oldest groups in the journal: writing others back makes no room.
    pub fn is_held(&self) -> bool {
        let parked = self.parked.values().min();
        parked.is_some_and(|first| *first - 1 == self.checkpoint())
    }

    /// Whether a group that announces the checkpoint would make room in the journal.
    pub fn makes_room(&self) -> bool {
        self.ring.live.front().is_some_and(|oldest| oldest.0 <= self.checkpoint())
    }

    /// Notes that only this copy of a block is good, or that it is the newer one: the other one
    /// is written first, as a torn write of this one would leave none.
    pub fn trust_copy(&mut self, key: BlockKey, copy: u32) {
        self.trusted.insert(key, copy);
    }

    /// Last group that no block needs any more.
    pub fn checkpoint(&self) -> u64 {
        if sabotage::is(Bug::ReleaseJournalEarly) {
            return self.next - 1;
        }
        let dirty = self.dirty_order.first().map(|entry| entry.0);
        let pipeline = self.pipeline.iter().map(|item| item.first).min();
        let parked = self.parked.values().copied().min();
        dirty.into_iter().chain(pipeline).chain(parked).min().unwrap_or(self.next) - 1
    }

    /// Takes the records of the next group, `header` first, and finds its place in the ring.
    /// `None` if there is none: nothing is taken then.
    pub fn take_group(&mut self, header: &Record<'_>) -> Option<TakenGroup> {
        self.publish();
        let mut head = Vec::new();
        header.encode(&mut head);
        let blocks = journal::blocks_for(head.len() + self.pending.len());
        let position = self.ring.place(self.next, blocks)?;
        let records = std::mem::replace(&mut self.pending, std::mem::take(&mut self.emptied));
        self.batch_start = 0;
        if let Some(tail) = &mut self.tail {
            tail.next_group();
        }
        self.next += 1;
        Some(TakenGroup { sequence: self.next - 1, position, blocks, header: head, records })
    }

    /// Takes the memory of a group's records back, for those of a later one.
    pub fn recycle(&mut self, group: TakenGroup) {
        self.emptied = group.records;
        self.emptied.clear();
    }

    /// Up to `max` dirty blocks to write back that are not `away`, those first that hold the most journal.
    pub fn pick_dirty(
        &mut self,
        max: usize,
        away: impl Fn(&BlockKey) -> bool,
    ) -> Vec<(BlockKey, u64)> {
        let mut picked = Vec::with_capacity(max.min(self.dirty.len()));
        let mut kept = Vec::new();
        while picked.len() < max
            && let Some(entry) = self.dirty_order.pop_first()
        {
            let key = (entry.1, entry.2);
            if self.in_pipeline.contains(&key) || away(&key) {
                kept.push(entry);
            } else {
                self.dirty.remove(&key);
                picked.push((key, entry.0));
            }
        }
        self.dirty_order.extend(kept);
        picked
    }

    /// Up to `max` dirty blocks, those first that [`Log::pick_dirty`] picks first.
    pub fn dirty_first(&self, max: usize) -> impl Iterator<Item = BlockKey> {
        let all = self.dirty_order.iter().map(|entry| (entry.1, entry.2));
        all.filter(|key| !self.in_pipeline.contains(key)).take(max)
    }

    /// Whether both copies of a block on the device are as it is in memory, and durable.
    pub fn is_clean(&self, key: BlockKey) -> bool {
        let is_waiting = self.dirty.contains_key(&key) || self.parked.contains_key(&key);
        !is_waiting && !self.in_pipeline.contains(&key)
    }

    /// Dirty blocks.
    pub fn dirty_blocks(&self) -> usize {
        self.dirty.len()
    }

    /// Starts the write-back of a block picked with [`Log::pick_dirty`].
    pub fn start_write_back(&mut self, key: BlockKey, first: u64, image: Image, lsn: u64) {
        self.in_pipeline.insert(key);
        let careless = u32::from(sabotage::is(Bug::OverwriteGoodCopy));
        let start = self.trusted.remove(&key).map_or(0, |good| (1 - good) ^ careless);
        self.pipeline.push(WriteBack { key, image, lsn, first, start, written: 0, durable: 0 });
    }

    /// All copies written so far are durable now; blocks with two are done: those, each with the group that
    /// it includes.
    pub fn write_backs_flushed(&mut self) -> Vec<(BlockKey, u64)> {
        let mut done = Vec::new();
        for item in &mut self.pipeline {
            item.durable = item.written;
            if item.durable == 2 {
                self.in_pipeline.remove(&item.key);
                done.push((item.key, item.lsn));
            }
        }
        self.pipeline.retain(|item| item.durable < 2);
        done
    }

    /// The copies to write now, as (block, copy, index in the pipeline): the second of blocks whose
    /// first is durable, or the first of blocks whose group is.
    pub fn copies_due(&self) -> Vec<(BlockKey, u32, usize)> {
        let early = sabotage::is(Bug::WriteBackEarly);
        let both = sabotage::is(Bug::WriteBothCopies);
        let mut due = Vec::new();
        for (index, item) in self.pipeline.iter().enumerate() {
            if item.lsn > self.durable && !early {
                continue;
            }
            if item.written == item.durable {
                due.push((item.key, item.start ^ item.written, index));
            }
            if both && item.written == 0 {
                due.push((item.key, item.start ^ 1, index));
            }
        }
        due
    }

    /// Notes that a copy of [`Log::copies_due`] was written.
    pub fn copy_written(&mut self, index: usize) {
        self.pipeline[index].written += 1;
    }

    /// Group `sequence`, whose header announces `checkpoint`, is durable.
    pub fn group_durable(&mut self, sequence: u64, checkpoint: u64) {
        self.durable = sequence;
        if let Some(tail) = &mut self.tail {
            tail.group_durable(sequence);
        }
        self.ring.release(checkpoint);
    }

    /// The superblock says that no group is needed any more.
    pub fn release_journal(&mut self) {
        self.ring.release(self.durable);
    }

    /// The block of the ring behind the last group.
    pub fn head(&self) -> u32 {
        self.ring.head
    }

    /// Blocks of the ring in use, and in all.
    pub fn ring_usage(&self) -> (u32, u32) {
        (self.ring.used(), self.ring.blocks)
    }
}

/// Free space of the journal ring. Groups lie in order, never across the end.
#[derive(Debug)]
pub struct Ring {
    /// Size in blocks.
    pub blocks: u32,
    head: u32,
    live: VecDeque<(u64, u32, u32)>,
}

impl Ring {
    /// A ring holding these groups (sequence, position, blocks), oldest first; writing goes on
    /// behind the last.
    pub fn new(blocks: u32, live: VecDeque<(u64, u32, u32)>, head: u32) -> Self {
        Self { blocks, head, live }
    }

    /// Finds room for a group of `blocks`; `None` if a checkpoint must come first.
    fn place(&mut self, sequence: u64, blocks: u32) -> Option<u32> {
        let position = match self.live.front() {
            None if blocks > self.blocks => return None,
            None if self.head + blocks <= self.blocks => self.head,
            None => 0,
            Some((_, oldest, _)) if self.head > *oldest => {
                if self.head + blocks <= self.blocks {
                    self.head
                } else if blocks < *oldest {
                    0
                } else {
                    return None;
                }
            }
            Some((_, oldest, _)) if self.head + blocks < *oldest => self.head,
            Some(_) => return None,
        };
        self.live.push_back((sequence, position, blocks));
        self.head = position + blocks;
        Some(position)
    }

    fn release(&mut self, checkpoint: u64) {
        while self.live.front().is_some_and(|group| group.0 <= checkpoint) {
            self.live.pop_front();
        }
    }

    fn used(&self) -> u32 {
        match self.live.front() {
            None => 0,
            Some((_, oldest, _)) if self.head > *oldest => self.head - oldest,
            Some((_, oldest, _)) => self.blocks - oldest + self.head,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_never_overwrites_a_live_group() {
        let mut rng = fastrand::Rng::with_seed(2);
        let mut ring = Ring::new(32, VecDeque::new(), 0);
        let mut live: VecDeque<(u64, std::ops::Range<u32>)> = VecDeque::new();
        for sequence in 1..20_000 {
            let blocks = rng.u32(1..6);
            while let Some(first) = live.front().map(|group| group.0) {
                if ring.used() + blocks < 20 && rng.u32(..4) > 0 {
                    break;
                }
                ring.release(first);
                live.pop_front();
            }
            let position = ring.place(sequence, blocks).expect("room");
            let range = position..position + blocks;
            assert!(range.end <= 32);
            assert!(live.iter().all(|(_, r)| r.end <= range.start || range.end <= r.start));
            live.push_back((sequence, range));
        }
    }
}
