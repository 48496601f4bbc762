//! From blocks read off the device to the state of an open store: choose between copies, redo the
//! journal, then prove (`prove`) that everything fits together before anything trusts it.

mod copies;
mod families;
mod faults;
mod journal;
pub mod mend;
mod paging;
mod prove;

use super::entries::{Entries, SPARE_BASE};
use crate::format::block;
use crate::format::geometry::LABEL_BLOCKS;
use crate::format::journal::Scan;
use crate::format::record::{FillState, Record};
use crate::format::slots::{self, SNAPSHOT_DELETED, SNAPSHOT_LABELLED, SnapshotSlot, VolumeSlot};
use crate::format::superblock::{
    INCOMPAT_BACKED, INCOMPAT_COMPRESSED, INCOMPAT_ENCRYPTED, INCOMPAT_LOST,
};
use crate::format::{Geometry, RegionKind, Superblock, entry};
use crate::info::{Finding, Severity};
use crate::limits::SEQUENCE_START_MAX;
use std::collections::{BTreeSet, HashMap, HashSet};
use zerocopy::{FromBytes, FromZeros};

/// Findings reported at most: a hostile image has any number.
const FINDINGS_MAX: usize = if cfg!(test) { 12 } else { 1000 };
/// Entries of free slots freed at open: no crash leaves any, and their records must fit a group.
const LEAKS_MAX: usize = 100;

/// What the last session said of itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct LastSession {
    /// Its id.
    pub id: u64,
    /// Boot it ran in.
    pub boot: [u8; 16],
    /// Whether it kept a tail.
    pub tail: bool,
}

/// What was found and could not be made sense of.
#[derive(Debug, Default)]
struct Unread {
    /// Blocks of tables and entries without a good copy.
    blocks: Vec<(RegionKind, u32)>,
    /// Entries that cannot be: region, index, and what their header says.
    entries: Vec<(RegionKind, u32, entry::EntryHeader)>,
    /// The first group of those that are needed and cannot be read, and the last one there was.
    groups: Option<(u64, u64)>,
    /// Regions whose high-water mark is behind their end.
    marks: Vec<RegionKind>,
    /// Of `blocks`, those of which the device could not read a copy: it may be a good one.
    refused: Vec<(RegionKind, u32)>,
    /// Blocks of the journal that the device could not read and that may hold the last group.
    ring: Vec<u32>,
    /// Those that hold nothing that is needed.
    spare_ring: Vec<u32>,
}

/// A store being loaded.
pub struct Loader {
    geometry: Geometry,
    uuid: [u8; 16],
    given: Option<[u8; 16]>,
    /// Everything noticed on the way.
    pub findings: Vec<Finding>,
    volumes: Vec<VolumeSlot>,
    snapshots: Vec<SnapshotSlot>,
    labels: HashMap<u32, Vec<u8>>,
    entries: Entries,
    /// Bytes of memory for their bitmaps.
    bitmaps_max: usize,
    /// Metadata blocks whose bitmaps are on the device alone.
    away: HashSet<u32>,
    /// Metadata blocks of extents that the journal changes.
    changed: HashSet<u32>,
    marks: [u32; 4],
    durable_marks: [u32; 4],
    base_marks: [u32; 4],
    lsns: [Vec<u64>; 4],
    groups: Vec<(u64, u32, u32, Vec<u8>)>,
    checkpoint: u64,
    durable: u64,
    head: u32,
    dirty: BTreeSet<(RegionKind, u32)>,
    /// Of blocks whose copies differ, the copy that was chosen.
    trusted: Vec<((RegionKind, u32), u32)>,
    tail: Vec<Vec<u8>>,
    /// Entries whose owner does not exist: freed, so that no later owner of the slot inherits them.
    leaked: Vec<u32>,
    /// Findings of damage, and others.
    damaged: usize,
    noted: usize,
    /// Runs may say that something is lost.
    has_lost: bool,
    /// There may be bases.
    has_bases: bool,
    /// There may be encrypted volumes.
    has_encrypted: bool,
    /// There may be compressed extents.
    has_compressed: bool,
    /// What could not be made sense of, for repair.
    unread: Unread,
    /// The session that ended without closing, if one did.
    pub last_session: Option<LastSession>,
    /// Blocks read.
    pub blocks_read: u64,
}

impl Loader {
    /// Starts from the superblock and the journal: what is needed of it, and from where on.
    pub fn new(superblock: &Superblock, scan: Scan) -> Self {
        let geometry = superblock.geometry;
        let mut loader = Self {
            geometry,
            uuid: superblock.uuid,
            given: superblock.given,
            findings: Vec::new(),
            damaged: 0,
            noted: 0,
            has_lost: superblock.incompat & INCOMPAT_LOST != 0,
            has_bases: superblock.incompat & INCOMPAT_BACKED != 0,
            has_encrypted: superblock.incompat & INCOMPAT_ENCRYPTED != 0,
            has_compressed: superblock.incompat & INCOMPAT_COMPRESSED != 0,
            volumes: Vec::new(),
            snapshots: Vec::new(),
            labels: HashMap::new(),
            entries: Entries::new(geometry.blocks_per_extent()),
            bitmaps_max: usize::MAX,
            away: HashSet::new(),
            changed: HashSet::new(),
            marks: superblock.clean_marks,
            durable_marks: superblock.clean_marks,
            base_marks: superblock.clean_marks,
            lsns: Default::default(),
            groups: Vec::new(),
            checkpoint: superblock.clean_sequence,
            durable: superblock.clean_sequence,
            head: 0,
            dirty: BTreeSet::new(),
            trusted: Vec::new(),
            tail: Vec::new(),
            leaked: Vec::new(),
            unread: Unread::default(),
            last_session: None,
            blocks_read: 0,
        };
        loader.take_journal(scan);
        for kind in RegionKind::MARKED {
            let most = geometry.needed_blocks(kind);
            let mark = &mut loader.base_marks[kind.mark()];
            if *mark > most {
                *mark = most;
                let text = "high-water mark beyond the region: how far it is in use is not known";
                loader.corrupt(kind, None, text);
                loader.unread.marks.push(kind);
            }
        }
        loader.marks = loader.base_marks;
        loader
    }

    /// Whether so much is damaged that there is no use in looking on: such a store is not opened, and
    /// not repaired. What only one of two copies is missing is no damage, however often.
    pub fn is_hopeless(&self) -> bool {
        self.damaged >= FINDINGS_MAX
    }

    /// A sequence behind all that was seen, but for what nobody who only counts has made.
    pub fn next_sequence(&self) -> u64 {
        let blocks = self.lsns.iter().flatten().copied();
        let lost = self.unread.groups.map_or(0, |(_, last)| last);
        let possible = blocks.chain([lost]).filter(|lsn| *lsn < SEQUENCE_START_MAX / 2);
        possible.chain([self.durable]).max().unwrap_or(0) + 1
    }

    /// Last durable group.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// Blocks of the journal that the device could not read and that may hold group `durable + 1`.
    pub fn unreadable_ring(&self) -> &[u32] {
        &self.unread.ring
    }

    /// Blocks of the journal that the device could not read and that hold nothing that is needed.
    pub fn unneeded_ring(&self) -> &[u32] {
        &self.unread.spare_ring
    }

    /// Metadata blocks of a region to read and hand to [`Loader::block`].
    pub fn blocks_to_read(&self, region: RegionKind) -> u32 {
        self.base_marks[region.mark()]
    }

    /// Takes both copies of a metadata block; none is one that the device cannot read.
    pub fn block(&mut self, region: RegionKind, index: u32, copies: [Option<&[u8]>; 2]) {
        self.blocks_read += 1;
        let Some((lsn, bytes)) = self.choose(region, index, copies) else {
            self.lose_block(region, index, copies);
            return;
        };
        if lsn > self.durable {
            let text = "newer than the last commit group: the journal lost one, and what it changed \
                        elsewhere is missing";
            self.corrupt(region, Some(index), text);
            self.lose_groups(self.durable + 1, lsn);
        }
        let lsns = &mut self.lsns[region.mark()];
        lsns.resize(lsns.len().max(index as usize + 1), 0);
        lsns[index as usize] = lsn;
        let payload = block::payload(bytes);
        let items = self.geometry.items_per_block(region);
        for item in 0..items {
            let id = index * items + item;
            let known = match region {
                RegionKind::Volumes => {
                    slots::get(payload, item).map(|slot| self.set_volume(id, slot))
                }
                RegionKind::Snapshots => {
                    slots::get(payload, item).map(|slot| self.set_snapshot(id, slot))
                }
                _ => entry::get(payload, item, self.geometry.entry_bytes())
                    .map(|bytes| self.set_entry(region, id, &bytes)),
            };
            debug_assert!(known.is_some(), "items fit their block");
        }
        if region == RegionKind::Extents && self.entries.bitmap_bytes() > self.bitmaps_max {
            self.let_go(index);
        }
    }

    /// Applies the journal.
    pub fn redo(&mut self) {
        for index in 0..self.groups.len() {
            let sequence = self.groups[index].0;
            let payload = std::mem::take(&mut self.groups[index].3);
            self.apply_all(sequence, &payload, "journal");
        }
        self.durable_marks = self.marks;
    }

    /// Whether no group is lost: what a tail holds builds on them, also on one behind the last that is there.
    pub fn is_complete(&self) -> bool {
        self.unread.groups.is_none()
    }

    /// Applies what a tail held beyond the last group.
    pub fn replay_tail(&mut self, batches: Vec<Vec<u8>>) {
        for batch in &batches {
            self.apply_all(self.durable + 1, batch, "tail");
        }
        self.tail = batches;
    }

    /// Label blocks to read and hand to [`Loader::label_block`].
    pub fn labels_to_read(&self) -> Vec<u32> {
        let slots = self.snapshots.iter().enumerate();
        slots
            .filter(|(_, s)| s.used == 1 && s.flags.get() & SNAPSHOT_LABELLED != 0)
            .flat_map(|(i, _)| (0..LABEL_BLOCKS).map(move |p| i as u32 * LABEL_BLOCKS + p))
            .filter(|index| !self.labels.contains_key(index))
            .collect()
    }

    /// Takes both copies of a label block; none is one that the device cannot read.
    pub fn label_block(&mut self, index: u32, copies: [Option<&[u8]>; 2]) {
        self.blocks_read += 1;
        match self.choose(RegionKind::Labels, index, copies) {
            Some((_, bytes)) => {
                self.labels.insert(index, block::payload(bytes).to_vec());
            }
            None => self.lose_block(RegionKind::Labels, index, copies),
        }
    }

    fn apply_all(&mut self, sequence: u64, payload: &[u8], what: &str) {
        let mut rest = payload;
        while !rest.is_empty() {
            let applied = Record::decode(&mut rest).and_then(|r| self.apply(sequence, &r));
            if applied.is_none() {
                let text = format!(
                    "impossible record in {what} group {sequence}: this change and later ones are \
                     lost"
                );
                self.corrupt(RegionKind::Journal, None, &text);
                self.lose_groups(sequence, self.durable);
                return;
            }
        }
    }

    /// Applies one record unless its block includes it already; `None` if it is impossible.
    fn apply(&mut self, sequence: u64, record: &Record<'_>) -> Option<()> {
        match *record {
            Record::Checkpoint { .. } => {}
            Record::Mark { region, blocks } => {
                let kind = *RegionKind::MARKED.get(region as usize)?;
                if blocks > self.geometry.needed_blocks(kind) {
                    return None;
                }
                let mark = &mut self.marks[kind.mark()];
                for block in *mark..blocks {
                    self.dirty.insert((kind, block));
                }
                *mark = (*mark).max(blocks);
                let lsns = &mut self.lsns[kind.mark()];
                lsns.resize(lsns.len().max(blocks as usize), 0);
            }
            Record::Volume { index, slot } => {
                let slot = VolumeSlot::read_from_bytes(slot).ok()?;
                if self.due(RegionKind::Volumes, index, sequence)? {
                    self.set_volume(index, slot);
                }
            }
            Record::Snapshot { index, slot } => {
                let slot = SnapshotSlot::read_from_bytes(slot).ok()?;
                if self.due(RegionKind::Snapshots, index, sequence)? {
                    self.set_snapshot(index, slot);
                }
            }
            Record::Drop { index, volume } => {
                if self.due(RegionKind::Snapshots, index, sequence)? {
                    let lost = self.is_lost(RegionKind::Snapshots, index);
                    let slot = self.snapshots.get_mut(index as usize).filter(|slot| slot.used == 1);
                    if slot.is_none() && lost {
                        return Some(());
                    }
                    let slot = slot?;
                    slot.flags = SNAPSHOT_DELETED.into();
                    slot.volume = volume.into();
                    slot.name = [0; 256];
                    slot.name_bytes = 0.into();
                }
            }
            Record::Labels { index, bytes } => {
                if index >= self.geometry.snapshots * LABEL_BLOCKS {
                    return None;
                }
                self.labels.insert(index, bytes.to_vec());
                self.dirty.insert((RegionKind::Labels, index));
            }
            Record::Entry { entry, .. } | Record::Fill { entry, .. } | Record::Free { entry } => {
                return self.apply_entry(sequence, entry, record);
            }
        }
        Some(())
    }

    fn apply_entry(&mut self, sequence: u64, id: u32, record: &Record<'_>) -> Option<()> {
        let (region, index) = match id.checked_sub(SPARE_BASE) {
            Some(index) => (RegionKind::Spares, index),
            None => (RegionKind::Extents, id),
        };
        let capacity = match region {
            RegionKind::Spares => self.geometry.spares,
            _ => self.geometry.extents_max,
        };
        if index >= capacity {
            return None;
        }
        if !self.due(region, index, sequence)? {
            return Some(());
        }
        match *record {
            Record::Entry { bytes, .. } => {
                if bytes.len() != self.geometry.entry_bytes() {
                    return None;
                }
                self.set_entry(region, index, &entry::parse(bytes)?);
            }
            Record::Fill { start, count, state, .. } => {
                let end = u32::from(start) + u32::from(count);
                let no_place = region == RegionKind::Spares || self.entries.is_compressed(id);
                let usable = self.entries.owner(id).is_some()
                    && self.entries.run(id) == 0
                    && !(no_place && state == FillState::Data);
                if !usable && self.entries.owner(id).is_none() && self.is_lost(region, index) {
                    // Of an entry that is lost it tells less than nothing; the group's other records are right.
                    return Some(());
                }
                if !usable || end > self.geometry.blocks_per_extent() {
                    return None;
                }
                self.entries.fill(id, u32::from(start)..end, state);
            }
            _ => self.entries.release(id),
        }
        Some(())
    }

    /// Whether an item is in a block of which there is no good copy.
    fn is_lost(&self, region: RegionKind, index: u32) -> bool {
        let block = index / self.geometry.items_per_block(region);
        self.unread.blocks.contains(&(region, block))
    }

    /// Whether a record is not yet in its metadata block; `None` if there is no such block.
    fn due(&mut self, region: RegionKind, index: u32, sequence: u64) -> Option<bool> {
        let block = index / self.geometry.items_per_block(region);
        let lsn = *self.lsns[region.mark()].get(block as usize)?;
        if sequence > lsn {
            self.dirty.insert((region, block));
        }
        Some(sequence > lsn)
    }

    /// Takes a volume slot.
    pub fn set_volume(&mut self, index: u32, slot: VolumeSlot) {
        if self.volumes.len() <= index as usize {
            self.volumes.resize(index as usize + 1, VolumeSlot::new_zeroed());
        }
        self.volumes[index as usize] = slot;
    }

    /// Takes a snapshot slot.
    pub fn set_snapshot(&mut self, index: u32, slot: SnapshotSlot) {
        if self.snapshots.len() <= index as usize {
            self.snapshots.resize(index as usize + 1, SnapshotSlot::new_zeroed());
        }
        self.snapshots[index as usize] = slot;
    }

    /// Takes labels, encoded, of a snapshot slot.
    pub fn set_labels(&mut self, index: u32, encoded: &[u8]) {
        for part in 0..LABEL_BLOCKS {
            self.labels.insert(index * LABEL_BLOCKS + part, super::label_part(encoded, part));
        }
    }

    /// Takes an entry; what cannot be one is a finding.
    pub fn set_entry(&mut self, region: RegionKind, index: u32, bytes: &entry::EntryBytes<'_>) {
        let (id, capacity) = match region {
            RegionKind::Spares => (SPARE_BASE + index, self.geometry.spares),
            _ => (index, self.geometry.extents_max),
        };
        let free = bytes.header == entry::EntryHeader::default();
        if index >= capacity {
            if !free {
                let text = "entry beyond the region's capacity: nothing can be where it says";
                self.corrupt(region, Some(index), text);
                self.unread.entries.push((region, index, bytes.header));
            }
        } else if let Some(fault) = faults::entry(region, bytes) {
            self.corrupt(region, Some(index), &format!("impossible entry: {fault}"));
            if self.entries.owner(id).is_some() {
                // What a record replaces is right no more.
                self.entries.release(id);
            }
            self.unread.entries.push((region, index, bytes.header));
        } else if !free || self.entries.owner(id).is_some() {
            self.entries.load(id, bytes);
        }
    }

    fn note(&mut self, region: RegionKind, index: u32, message: &str) {
        self.finding(Severity::Note, region, Some(index), message);
    }

    fn corrupt(&mut self, region: RegionKind, index: Option<u32>, message: &str) {
        self.finding(Severity::Corrupt, region, index, message);
    }

    fn finding(&mut self, severity: Severity, region: RegionKind, index: Option<u32>, text: &str) {
        let count = match severity {
            Severity::Corrupt => &mut self.damaged,
            _ => &mut self.noted,
        };
        // A list of thousands helps nobody; of each kind there are some in it.
        if *count >= FINDINGS_MAX {
            return;
        }
        *count += 1;
        self.findings.push(Finding {
            severity,
            region: region.name().to_owned(),
            index: index.map(u64::from),
            message: text.to_owned(),
        });
    }
}
