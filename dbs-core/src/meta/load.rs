//! From blocks read off the device to the state of an open store: choose between copies, redo the
//! journal, then prove that everything fits together before anything trusts it.

use super::alloc::{Allocator, FreeSet};
use super::entries::{Entries, SPARE_BASE};
use super::layer::Layer;
use super::locks::{Fence, RangeLocks};
use super::log::{Log, Ring};
use super::{Meta, Snapshot, Volume};
use crate::error::{Error, Result};
use crate::format::block::{self, BlockFault};
use crate::format::geometry::LABEL_BLOCKS;
use crate::format::journal::Scan;
use crate::format::record::{FillState, Record};
use crate::format::slots::{
    self, SNAPSHOT_DELETED, SNAPSHOT_FLAGS, SNAPSHOT_HEAD, SNAPSHOT_LABELLED, SnapshotSlot,
    VolumeSlot,
};
use crate::format::{Geometry, RegionKind, Superblock, entry};
use crate::info::{CheckReport, Finding, Severity};
use crate::limits::{EXTENT_MIN_BYTES, LABELS_MAX_BYTES, VOLUME_MAX_BYTES};
use crate::units::{BLOCK_BYTES, SECTOR_BYTES, SnapshotId, VolumeId};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
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

    /// Proves that everything fits together and builds the state. With `strict`, anything corrupt
    /// is an error; otherwise look at [`Loader::findings`] first.
    ///
    /// # Errors
    /// `Corrupt` with the first finding.
    pub fn finish(mut self, session: u64, boot: [u8; 16]) -> Result<(Meta, Vec<Finding>)> {
        self.first_corruption()?;
        let (volumes, names) = self.build_volumes();
        let mut snapshots = self.build_snapshots(&volumes);
        self.link(&mut snapshots);
        self.first_corruption()?;
        self.check_heads(&volumes, &snapshots);
        let volumes = self.name_snapshots(volumes, &snapshots);
        self.build_layers(&mut snapshots);
        self.first_corruption()?;
        Ok(self.assemble(volumes, names, snapshots, (session, boot)))
    }

    /// Proves as much as can be proven of a store that may be damaged, and reports it.
    pub fn verify(mut self) -> CheckReport {
        let (volumes, _) = self.build_volumes();
        let mut snapshots = self.build_snapshots(&volumes);
        self.link(&mut snapshots);
        self.check_heads(&volumes, &snapshots);
        let volumes = self.name_snapshots(volumes, &snapshots);
        self.build_layers(&mut snapshots);
        CheckReport {
            blocks_checked: self.blocks_read,
            extents_checked: self.entries.used().count() as u64,
            volumes_checked: volumes.iter().flatten().count() as u64,
            snapshots_checked: snapshots.iter().flatten().count() as u64,
            findings: self.findings,
        }
    }

    fn first_corruption(&self) -> Result<()> {
        match self.findings.iter().find(|f| f.severity == Severity::Corrupt) {
            None => Ok(()),
            Some(f) => {
                let index = f.index.map_or(String::new(), |index| format!(" {index}"));
                Err(Error::corrupt(format!(
                    "{}{index}: {}; `dbs check` lists all damage",
                    f.region, f.message
                )))
            }
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
        let mut seen = Vec::new();
        for (copy, bytes) in copies.into_iter().enumerate() {
            let address = self.geometry.block_address(region, index, copy as u32);
            match block::open(bytes, region.block_kind(), &self.uuid, address) {
                Ok(header) => {
                    let lsn = header.lsn.get();
                    seen.push(Ok(lsn));
                    if best.is_none_or(|(newest, _)| lsn > newest) {
                        best = Some((lsn, bytes));
                        chosen = copy as u32;
                    }
                }
                Err(fault) => seen.push(Err(fault)),
            }
        }
        if let [Ok(first), Ok(second)] = seen[..]
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
        let clash = bits.clone().any(|(data, zero)| data & zero != 0);
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

    fn build_volumes(&mut self) -> (Vec<Option<Volume>>, HashMap<String, VolumeId>) {
        let mut volumes = Vec::new();
        let mut names = HashMap::new();
        for (index, slot) in std::mem::take(&mut self.volumes).into_iter().enumerate() {
            if slot == VolumeSlot::new_zeroed() {
                volumes.push(None);
                continue;
            }
            let name = slots::decode_name(&slot.name, slot.name_bytes).unwrap_or_default();
            let size = slot.size.get();
            let sane = super::names::check("volume", name).is_ok()
                && size != 0
                && size.is_multiple_of(SECTOR_BYTES)
                && size <= VOLUME_MAX_BYTES
                && index < self.geometry.volumes as usize
                && slot.flags.get() == 0;
            let twin = names.insert(name.to_owned(), VolumeId(index as u32 + 1)).is_some();
            if !sane || twin {
                self.corrupt(RegionKind::Volumes, Some(index as u32), "impossible volume slot");
            }
            volumes.push(Some(Volume {
                name: name.to_owned(),
                uuid: slot.uuid,
                size,
                created_ns: slot.created_ns.get(),
                revision: slot.revision.get(),
                head: SnapshotId(slot.head.get()),
                snapshots: BTreeMap::new(),
            }));
        }
        (volumes, names)
    }

    fn build_snapshots(&mut self, volumes: &[Option<Volume>]) -> Vec<Option<Snapshot>> {
        let mut snapshots = Vec::new();
        for (index, slot) in std::mem::take(&mut self.snapshots).into_iter().enumerate() {
            if slot.used == 0 && slot == SnapshotSlot::new_zeroed() {
                snapshots.push(None);
                continue;
            }
            let flags = slot.flags.get();
            let (head, deleted) = (flags & SNAPSHOT_HEAD != 0, flags & SNAPSHOT_DELETED != 0);
            let name = slots::decode_name(&slot.name, slot.name_bytes);
            let named = name.is_some_and(|name| super::names::check("snapshot", name).is_ok());
            let unnamed = name == Some("");
            let volume = slot.volume.get() as usize;
            let has_volume = volume != 0 && volumes.get(volume - 1).is_some_and(Option::is_some);
            let size = slot.size.get();
            let sane = slot.used == 1
                && size != 0
                && size.is_multiple_of(SECTOR_BYTES)
                && size <= VOLUME_MAX_BYTES
                && flags & !SNAPSHOT_FLAGS == 0
                && !(head && deleted)
                && (if head || deleted { unnamed } else { named })
                && (has_volume || (deleted && volume == 0))
                && index < self.geometry.snapshots as usize;
            if !sane {
                self.corrupt(RegionKind::Snapshots, Some(index as u32), "impossible snapshot slot");
            }
            let labels = self.build_labels(index as u32, flags);
            snapshots.push(Some(Snapshot {
                name: name.unwrap_or_default().to_owned(),
                uuid: slot.uuid,
                size: slot.size.get(),
                created_ns: slot.created_ns.get(),
                revision: slot.revision.get(),
                volume: VolumeId(volume as u32),
                parent: SnapshotId(slot.parent.get()),
                flags,
                labels,
                children: BTreeSet::new(),
                layer: Layer::default(),
            }));
        }
        snapshots
    }

    fn build_labels(&mut self, index: u32, flags: u32) -> Vec<u8> {
        if flags & SNAPSHOT_LABELLED == 0 {
            return Vec::new();
        }
        let mut all = Vec::new();
        for part in 0..LABEL_BLOCKS {
            let mut bytes = self.labels.remove(&(index * LABEL_BLOCKS + part)).unwrap_or_default();
            bytes.resize(crate::format::PAYLOAD_BYTES, 0);
            all.extend_from_slice(&bytes);
        }
        let length = u32::from_le_bytes([all[0], all[1], all[2], all[3]]) as usize;
        let labels = all.get(4..4usize.saturating_add(length)).map(<[u8]>::to_vec);
        match labels {
            Some(labels)
                if length <= LABELS_MAX_BYTES
                    && crate::format::labels::decode(&labels).is_some() =>
            {
                labels
            }
            _ => {
                self.corrupt(RegionKind::Labels, Some(index * LABEL_BLOCKS), "impossible labels");
                Vec::new()
            }
        }
    }

    /// Fills in children, and proves that parents exist and lead to a root.
    fn link(&mut self, snapshots: &mut [Option<Snapshot>]) {
        let parents: Vec<_> =
            snapshots.iter().map(|s| s.as_ref().map_or(0, |s| s.parent.0)).collect();
        let used: Vec<_> = snapshots.iter().map(Option::is_some).collect();
        for (index, parent) in parents.iter().enumerate() {
            let at = *parent as usize;
            if at == 0 {
                continue;
            }
            match snapshots.get_mut(at - 1).and_then(Option::as_mut) {
                Some(parent) => {
                    parent.children.insert(index as u32 + 1);
                }
                None => {
                    self.corrupt(
                        RegionKind::Snapshots,
                        Some(index as u32),
                        "parent does not exist",
                    );
                }
            }
        }
        // 0 unknown, 1 on the present path, 2 leads to a root.
        let mut state = vec![0u8; parents.len()];
        for start in (0..parents.len()).filter(|index| used[*index]) {
            let mut path = Vec::new();
            let mut at = start;
            let mut ends = false;
            while state[at] == 0 {
                state[at] = 1;
                path.push(at);
                match parents[at] as usize {
                    parent if (1..=parents.len()).contains(&parent) => at = parent - 1,
                    _ => {
                        ends = true;
                        break;
                    }
                }
            }
            if !ends && state[at] == 1 {
                self.corrupt(RegionKind::Snapshots, Some(start as u32), "its parents form a loop");
            }
            path.into_iter().for_each(|index| state[index] = 2);
        }
    }

    fn check_heads(&mut self, volumes: &[Option<Volume>], snapshots: &[Option<Snapshot>]) {
        let get =
            |id: SnapshotId| snapshots.get(id.index().wrapping_sub(1)).and_then(Option::as_ref);
        let mut heads = BTreeSet::new();
        for (index, volume) in volumes.iter().enumerate() {
            let Some(volume) = volume else { continue };
            let head = get(volume.head);
            if head.is_none_or(|h| {
                !h.head() || h.volume.index() != index + 1 || !h.children.is_empty()
            }) {
                self.corrupt(
                    RegionKind::Volumes,
                    Some(index as u32),
                    "its head is not a head of it",
                );
            }
            heads.insert(volume.head.0);
        }
        for (index, snapshot) in snapshots.iter().enumerate() {
            let stray = snapshot.as_ref().is_some_and(|s| s.head());
            if stray && !heads.contains(&(index as u32 + 1)) {
                self.corrupt(RegionKind::Snapshots, Some(index as u32), "a head of no volume");
            }
        }
    }

    fn name_snapshots(
        &mut self,
        mut volumes: Vec<Option<Volume>>,
        snapshots: &[Option<Snapshot>],
    ) -> Vec<Option<Volume>> {
        for (index, snapshot) in snapshots.iter().enumerate() {
            let Some(snapshot) = snapshot.as_ref().filter(|s| s.live() && !s.head()) else {
                continue;
            };
            let at = snapshot.volume.index().wrapping_sub(1);
            let Some(volume) = volumes.get_mut(at).and_then(Option::as_mut) else { continue };
            let id = SnapshotId(index as u32 + 1);
            if volume.snapshots.insert(snapshot.name.clone(), id).is_some() {
                self.corrupt(RegionKind::Snapshots, Some(index as u32), "name occurs twice");
            }
        }
        volumes
    }

    fn build_layers(&mut self, snapshots: &mut [Option<Snapshot>]) {
        let most = VOLUME_MAX_BYTES / EXTENT_MIN_BYTES.max(self.geometry.extent_bytes);
        let used: Vec<_> = self.entries.used().collect();
        for id in used {
            let (region, index) = match id.checked_sub(SPARE_BASE) {
                Some(index) => (RegionKind::Spares, index),
                None => (RegionKind::Extents, id),
            };
            let Some((owner, logical)) = self.entries.owner(id) else { continue };
            let run = self.entries.run(id);
            if region == RegionKind::Extents && id >= self.geometry.data_extents() {
                self.corrupt(region, Some(index), "extent in use beyond the data region");
                continue;
            }
            if u64::from(logical) + u64::from(run) > most {
                self.corrupt(region, Some(index), "beyond the end of any volume");
                continue;
            }
            let Some(snapshot) =
                snapshots.get_mut((owner as usize).wrapping_sub(1)).and_then(Option::as_mut)
            else {
                let text =
                    format!("owned by snapshot slot {owner}, which is free: a writer frees it");
                self.finding(Severity::Leak, region, Some(index), &text);
                self.leaked.push(id);
                if self.leaked.len() == LEAKS_MAX {
                    self.corrupt(region, Some(index), "too many entries are owned by free slots");
                }
                continue;
            };
            let layer = &mut snapshot.layer;
            let clash = if run == 0 {
                layer.insert(logical, id).is_some()
            } else {
                let before = layer.runs.range(..logical + run).next_back();
                let overlaps = before.is_some_and(|(s, (length, _))| s + length > logical);
                layer.runs.insert(logical, (run, id));
                overlaps
            };
            if clash {
                self.corrupt(region, Some(index), "another entry claims the same volume extent");
            }
        }
    }

    fn assemble(
        mut self,
        volumes: Vec<Option<Volume>>,
        names: HashMap<String, VolumeId>,
        snapshots: Vec<Option<Snapshot>>,
        (session, boot): (u64, [u8; 16]),
    ) -> (Meta, Vec<Finding>) {
        let geometry = self.geometry;
        self.leaked.iter().for_each(|id| self.entries.release(*id));
        let free_slots = |capacity: u32, used: &dyn Fn(usize) -> bool| {
            let mut free = FreeSet::default();
            (0..capacity).filter(|slot| !used(*slot as usize)).for_each(|slot| free.insert(slot));
            free
        };
        let volumes_free =
            free_slots(geometry.volumes, &|i| volumes.get(i).is_some_and(Option::is_some));
        let snapshots_free =
            free_slots(geometry.snapshots, &|i| snapshots.get(i).is_some_and(Option::is_some));
        let deleting = snapshots
            .iter()
            .enumerate()
            .filter(|(_, s)| s.as_ref().is_some_and(|s| !s.live()))
            .map(|(index, _)| index as u32 + 1)
            .collect();
        let labelled = |(index, s): (usize, &Option<Snapshot>)| {
            s.as_ref().filter(|s| !s.labels.is_empty()).map(|_| index as u32)
        };
        let label_room = snapshots.iter().enumerate().filter_map(labelled).collect();
        let mut extents = Allocator::new(true);
        let mut spares = Allocator::new(false);
        extents.add_free(0..geometry.data_extents());
        spares.add_free(0..geometry.spares);
        for id in self.entries.used() {
            match id.checked_sub(SPARE_BASE) {
                Some(spare) => spares.withdraw(spare..spare + 1),
                None => extents.withdraw(id..id + 1),
            }
        }
        let ring_blocks = (geometry.region(RegionKind::Journal).length / BLOCK_BYTES) as u32;
        let live = self.ring_groups();
        let mut log = Log::new(self.durable, session, Ring::new(ring_blocks, live, self.head));
        for key in self.dirty {
            log.mark_dirty_since(key, self.checkpoint + 1);
        }
        for (key, copy) in self.trusted {
            log.trust_copy(key, copy);
        }
        let mut meta = Meta {
            geometry,
            uuid: self.uuid,
            boot,
            volumes,
            volume_names: names,
            volumes_free,
            snapshots,
            snapshots_free,
            deleting,
            entries: self.entries,
            extents,
            spares,
            unlogged: HashMap::new(),
            next_extent: 0,
            sight_group: self.durable + 1,
            marks: self.marks,
            group_marks: self.durable_marks,
            room: self.marks,
            label_room,
            log,
            locks: RangeLocks::default(),
            fence: Fence::default(),
            views: HashMap::new(),
            open_volumes: HashMap::new(),
            open_snapshots: HashMap::new(),
        };
        for batch in &self.tail {
            let mut rest = batch.as_slice();
            while let Some(record) = Record::decode(&mut rest) {
                meta.append(&record);
            }
        }
        self.leaked.iter().for_each(|id| meta.append(&Record::Free { entry: *id }));
        (meta, self.findings)
    }

    fn ring_groups(&self) -> VecDeque<(u64, u32, u32)> {
        self.groups.iter().map(|(sequence, at, blocks, _)| (*sequence, *at, *blocks)).collect()
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
