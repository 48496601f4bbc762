//! From blocks read off the device to the state of an open store: choose between copies, redo the
//! journal, then prove (`prove`) that everything fits together before anything trusts it.

mod prove;

use super::entries::{Entries, SPARE_BASE};
use crate::format::block::{self, BlockFault};
use crate::format::geometry::LABEL_BLOCKS;
use crate::format::journal::Scan;
use crate::format::record::{FillState, Record};
use crate::format::slots::{self, SNAPSHOT_DELETED, SNAPSHOT_LABELLED, SnapshotSlot, VolumeSlot};
use crate::format::{Geometry, RegionKind, Superblock, entry};
use crate::info::{Finding, Severity};
use std::collections::{BTreeSet, HashMap};
use zerocopy::{FromBytes, FromZeros};

/// Findings reported at most: a hostile image has any number.
const FINDINGS_MAX: usize = 1000;
/// Entries of free slots freed at open: no crash leaves any, and their records must fit a group.
const LEAKS_MAX: usize = 100;
/// Entries whose memory is reserved before they are seen.
const ENTRIES_RESERVED: u64 = 16 << 20;

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

/// A store being loaded.
pub struct Loader {
    geometry: Geometry,
    uuid: [u8; 16],
    /// Everything noticed on the way.
    pub findings: Vec<Finding>,
    volumes: Vec<VolumeSlot>,
    snapshots: Vec<SnapshotSlot>,
    labels: HashMap<u32, Vec<u8>>,
    entries: Entries,
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
            findings: Vec::new(),
            volumes: Vec::new(),
            snapshots: Vec::new(),
            labels: HashMap::new(),
            entries: Entries::new(geometry.blocks_per_extent()),
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
            last_session: None,
            blocks_read: 0,
        };
        loader.take_journal(scan);
        for kind in RegionKind::MARKED {
            let most = geometry.needed_blocks(kind);
            let mark = &mut loader.base_marks[kind.mark()];
            if *mark > most {
                *mark = most;
                loader.corrupt(kind, None, "high-water mark beyond the region");
            }
        }
        loader.marks = loader.base_marks;
        let items = |kind: RegionKind| {
            u64::from(loader.base_marks[kind.mark()]) * u64::from(geometry.items_per_block(kind))
        };
        let (data, spares) = (items(RegionKind::Extents), items(RegionKind::Spares));
        loader.entries.reserve(
            data.min(u64::from(geometry.extents_max)).min(ENTRIES_RESERVED) as u32,
            spares.min(u64::from(geometry.spares)).min(ENTRIES_RESERVED) as u32,
        );
        loader
    }

    fn take_journal(&mut self, mut scan: Scan) {
        let newest = scan.groups.keys().next_back().copied().unwrap_or(0);
        if let Some(group) = scan.groups.get(&newest) {
            self.head = group.position + group.blocks;
        }
        self.judge_damaged(&scan, newest.max(self.durable));
        if newest <= self.durable {
            // Closed in good order: nothing in the journal is needed.
            if scan.newest_seen > self.durable + 1 {
                self.corrupt(RegionKind::Journal, None, "a commit group is missing");
            }
            return;
        }
        if scan.newest_seen > newest + 1 {
            self.corrupt(
                RegionKind::Journal,
                None,
                &format!("commit group {} is damaged: later changes are lost", newest + 1),
            );
        }
        let header = scan.groups.get(&newest).and_then(|g| Record::decode(&mut &g.payload[..]));
        let Some(Record::Checkpoint { sequence, boot, tail, .. }) = header else {
            self.corrupt(RegionKind::Journal, None, "last commit group has no header record");
            return;
        };
        let id = scan.groups.get(&newest).map_or(0, |group| group.session);
        self.last_session = Some(LastSession { id, boot, tail });
        // The superblock may be newer than the checkpoint this group announced.
        let clean = self.durable;
        self.durable = newest;
        if sequence >= newest {
            self.corrupt(RegionKind::Journal, None, "last commit group announces itself");
            return;
        }
        if sequence > clean {
            self.checkpoint = sequence;
        }
        for sequence in self.checkpoint + 1..=newest {
            match scan.groups.remove(&sequence) {
                Some(g) => self.groups.push((sequence, g.position, g.blocks, g.payload)),
                None => {
                    self.corrupt(
                        RegionKind::Journal,
                        None,
                        &format!("commit group {sequence} is missing or damaged"),
                    );
                    return;
                }
            }
        }
        // The blocks valid without redo are those below the marks before the first group of it.
        let first = self.groups.first().and_then(|g| Record::decode(&mut &g.3[..]));
        if sequence > clean
            && let Some(Record::Checkpoint { marks, .. }) = first
        {
            self.base_marks = marks;
        }
    }

    /// Whether so much is wrong that there is no use in looking on.
    pub fn is_hopeless(&self) -> bool {
        self.findings.len() >= FINDINGS_MAX
    }

    /// Tells damage of what may have been the last group from damage of what is not needed. A
    /// group that a crash kept from being complete has no broken sector.
    fn judge_damaged(&mut self, scan: &Scan, last: u64) {
        for damaged in &scan.damaged {
            if damaged.is_of(last + 1) {
                let text = format!(
                    "commit group {} is damaged and was the last one: what it made durable is lost",
                    last + 1
                );
                self.corrupt(RegionKind::Journal, Some(damaged.position), &text);
            } else {
                self.note(RegionKind::Journal, damaged.position, "damaged");
            }
        }
    }

    /// Last durable group.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// Metadata blocks of a region to read and hand to [`Loader::block`].
    pub fn blocks_to_read(&self, region: RegionKind) -> u32 {
        self.base_marks[region.mark()]
    }

    /// Takes both copies of a metadata block.
    pub fn block(&mut self, region: RegionKind, index: u32, copies: [&[u8]; 2]) {
        self.blocks_read += 1;
        let Some((lsn, bytes)) = self.choose(region, index, copies) else {
            self.corrupt(region, Some(index), "both copies are damaged");
            return;
        };
        if lsn > self.durable {
            self.corrupt(
                region,
                Some(index),
                "newer than the last commit group: the journal lost one",
            );
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

    /// Takes both copies of a label block.
    pub fn label_block(&mut self, index: u32, copies: [&[u8]; 2]) {
        self.blocks_read += 1;
        match self.choose(RegionKind::Labels, index, copies) {
            Some((_, bytes)) => {
                self.labels.insert(index, block::payload(bytes).to_vec());
            }
            None => self.corrupt(RegionKind::Labels, Some(index), "both copies are damaged"),
        }
    }

    fn choose<'a>(
        &mut self,
        region: RegionKind,
        index: u32,
        copies: [&'a [u8]; 2],
    ) -> Option<(u64, &'a [u8])> {
        let mut best: Option<(u64, &[u8])> = None;
        let mut chosen = 0;
        let mut seen = [Err(BlockFault::Blank); 2];
        for (copy, bytes) in copies.into_iter().enumerate() {
            let address = self.geometry.block_address(region, index, copy as u32);
            match block::open(bytes, region.block_kind(), &self.uuid, address) {
                Ok(header) => {
                    let lsn = header.lsn.get();
                    seen[copy] = Ok(lsn);
                    if best.is_none_or(|(newest, _)| lsn > newest) {
                        best = Some((lsn, bytes));
                        chosen = copy as u32;
                    }
                }
                Err(fault) => seen[copy] = Err(fault),
            }
        }
        if let [Ok(first), Ok(second)] = seen
            && first == second
        {
            return best;
        }
        // One copy is older, torn or rotten: what a crash leaves, or damage. Both are healed.
        self.dirty.insert((region, index));
        self.trusted.push(((region, index), chosen));
        for (copy, fault) in seen.into_iter().enumerate() {
            if let Err(fault) = fault
                && best.is_some()
                && fault != BlockFault::Blank
            {
                self.note(
                    region,
                    index,
                    &format!("copy {copy}: {}; the other copy is good", fault.text()),
                );
            }
        }
        best
    }

    fn apply_all(&mut self, sequence: u64, payload: &[u8], what: &str) {
        let mut rest = payload;
        while !rest.is_empty() {
            let applied = Record::decode(&mut rest).and_then(|r| self.apply(sequence, &r));
            if applied.is_none() {
                let text = format!("impossible record in {what} group {sequence}");
                self.corrupt(RegionKind::Journal, None, &text);
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
                    let slot = self.snapshots.get_mut(index as usize)?;
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
                let spare_data = region == RegionKind::Spares && state == FillState::Data;
                let usable =
                    self.entries.owner(id).is_some() && self.entries.run(id) == 0 && !spare_data;
                if !usable || end > self.geometry.blocks_per_extent() {
                    return None;
                }
                self.entries.fill(id, u32::from(start)..end, state);
            }
            _ => self.entries.release(id),
        }
        Some(())
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

    fn set_volume(&mut self, index: u32, slot: VolumeSlot) {
        if self.volumes.len() <= index as usize {
            self.volumes.resize(index as usize + 1, VolumeSlot::new_zeroed());
        }
        self.volumes[index as usize] = slot;
    }

    fn set_snapshot(&mut self, index: u32, slot: SnapshotSlot) {
        if self.snapshots.len() <= index as usize {
            self.snapshots.resize(index as usize + 1, SnapshotSlot::new_zeroed());
        }
        self.snapshots[index as usize] = slot;
    }

    fn set_entry(&mut self, region: RegionKind, index: u32, bytes: &entry::EntryBytes<'_>) {
        let (id, capacity) = match region {
            RegionKind::Spares => (SPARE_BASE + index, self.geometry.spares),
            _ => (index, self.geometry.extents_max),
        };
        let free = bytes.header == entry::EntryHeader::default();
        let bits = bytes.data.iter().zip(bytes.zero);
        // A fold, not a search: for millions of entries the compiler's vectors pay.
        let clash = bits.fold(0, |any, (data, zero)| any | (data & zero)) != 0;
        let spare_data = region == RegionKind::Spares && bytes.data.iter().any(|b| *b != 0);
        let odd = bytes.header.reserved.get() != 0
            || (bytes.header.snapshot.get() == 0 && !free)
            || (region == RegionKind::Extents && bytes.header.run.get() != 0);
        if index >= capacity {
            if !free {
                self.corrupt(region, Some(index), "entry beyond the region's capacity");
            }
        } else if clash || spare_data || odd {
            self.corrupt(region, Some(index), "impossible entry");
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
        if self.is_hopeless() {
            return;
        }
        self.findings.push(Finding {
            severity,
            region: region.name().to_owned(),
            index: index.map(u64::from),
            message: text.to_owned(),
        });
    }
}
