//! What a store must hold: maps and vectors, nothing clever.
//!
//! Each block of a head knows its newest content and, besides, the contents that a power loss may
//! bring back: the last durable one and every later one that was not flushed.

use crate::content::{Block, SECTORS, Tag, Tags};
use crate::image;
use crate::op::{Long, Op, labels, snapshot_name, volume_name};
use crate::tree::Tree;
use dbs_core::ErrorKind;
use dbs_core::info::Labels;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The whole store.
#[derive(Debug, Clone, Default)]
pub struct Model {
    /// Volumes by name.
    pub volumes: BTreeMap<String, Volume>,
    /// A power loss may leave a mix of old and new sectors in a block, not old or new blocks alone.
    pub tears: bool,
    /// A call stands still.
    pub job: bool,
    /// The store was given a uuid whose bytes are all this one.
    pub given: Option<u8>,
    /// Some volumes are encrypted.
    pub encrypts: bool,
    next_id: u32,
}

/// A volume.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Never used again, and part of every tag written to it.
    pub id: u32,
    /// What reads of the head give.
    pub head: Content,
    /// Snapshots by name.
    pub snapshots: BTreeMap<String, Snapshot>,
    /// Somebody holds it open.
    pub held: bool,
    /// So does a call that stands still.
    pub busy: bool,
    /// Nothing was done to it since it was created.
    pub fresh: bool,
    /// What its layers hold, if that is known.
    pub tree: Option<Tree>,
    /// Its content is said to be incomplete.
    pub rebuilding: bool,
    /// It rests on a file.
    pub backed: bool,
    /// It is encrypted, and whether the second of two secrets unlocks it.
    pub secret: Option<bool>,
}

/// A snapshot.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// What it froze.
    pub content: Content,
    /// Refuses deletion.
    pub protected: bool,
    /// Nothing may be based on it, and blocks of it may be given up.
    pub retired: bool,
    /// Labels.
    pub labels: Labels,
}

/// The bytes of a volume or snapshot.
#[derive(Debug, Clone)]
pub struct Content {
    /// Size in sectors.
    pub sectors: u64,
    blocks: Arc<Vec<Block>>,
}

/// Why the model expects a command to fail: any of these kinds will do.
pub type Refusal = Vec<ErrorKind>;

impl Model {
    /// An empty store, on a medium that tears blocks or does not, of which some volumes are encrypted or none.
    #[must_use]
    pub fn on(tears: bool, encrypts: bool) -> Self {
        Self { tears, encrypts, ..Self::default() }
    }

    /// Does `op`, tagging what it writes with `number`. Content it writes is not yet durable;
    /// [`Model::acknowledge`] follows when the store has returned.
    ///
    /// # Errors
    /// The error kinds the store may answer with; the model is then unchanged.
    pub fn apply(&mut self, op: &Op, number: u32) -> Result<(), Refusal> {
        let tag = self.tag(op, number);
        self.apply_flat(op, number)?;
        self.apply_to_layers(op, tag)?;
        self.follow(op, tag);
        Ok(())
    }

    fn apply_flat(&mut self, op: &Op, number: u32) -> Result<(), Refusal> {
        match *op {
            Op::CreateVolume { vol, sectors } => self.create_volume(vol, sectors),
            Op::RenameVolume { vol, new } => self.rename_volume(vol, new),
            Op::ResizeVolume { vol, sectors } => {
                self.volume_mut(vol)?.head.resize(u64::from(sectors));
                Ok(())
            }
            Op::DeleteVolume { vol } => {
                let volume = self.volume_mut(vol)?;
                if volume.held || volume.busy || volume.snapshots.values().any(|s| s.protected) {
                    return Err(vec![ErrorKind::Busy]);
                }
                self.volumes.remove(&volume_name(vol));
                Ok(())
            }
            Op::Rekey { vol } => match &mut self.volume_mut(vol)?.secret {
                Some(second) => {
                    *second = !*second;
                    Ok(())
                }
                None => Err(vec![ErrorKind::Invalid]),
            },
            Op::Clone { vol, snap, new } => self.clone_volume(vol, snap, new),
            Op::Write { vol, at, len, .. } => {
                let tag = self.tag(op, number);
                self.write(vol, at, len, tag)
            }
            Op::WriteZeroes { vol, at, len, .. } | Op::Blank { vol, at, len } => {
                self.write(vol, at, len, Tag::ZERO)
            }
            // What is read stays.
            Op::Trim { vol, .. }
            | Op::Flatten { vol, .. }
            | Op::Begin { long: Long::Flatten { vol } } => match self.volume_mut(vol)?.rebuilding {
                true => Err(vec![ErrorKind::Busy]),
                false => Ok(()),
            },
            Op::Compress { vol, snap, .. } => self.compress(vol, snap),
            Op::Begin { long: Long::Compress { vol } } => self.compress(vol, None),
            Op::Discard { vol, at, len } => self.discard(vol, at, len),
            Op::Prune { vol, at, len } => self.prune(vol, at, len),
            Op::Hold { vol } => {
                let volume = self.volume_mut(vol)?;
                volume.held = !volume.held;
                Ok(())
            }
            Op::FlushVolume { vol } | Op::Fill { vol } => self.volume_mut(vol).map(|_| ()),
            Op::NewUuid { byte } => {
                self.given = Some(byte);
                Ok(())
            }
            _ => self.apply_to_snapshot(op),
        }
    }

    /// What is read stays.
    fn compress(&mut self, vol: u8, snap: Option<u8>) -> Result<(), Refusal> {
        if let Some(snap) = snap {
            self.snapshot_mut(vol, snap)?;
        }
        let volume = self.volume_mut(vol)?;
        if volume.rebuilding {
            return Err(vec![ErrorKind::Busy]);
        }
        if volume.secret.is_some() { Err(vec![ErrorKind::Unsupported]) } else { Ok(()) }
    }

    fn apply_to_snapshot(&mut self, op: &Op) -> Result<(), Refusal> {
        match *op {
            Op::CreateSnapshot { vol, snap, labels: number } => {
                let volume = self.volume_mut(vol)?;
                let name = snapshot_name(snap);
                if volume.snapshots.contains_key(&name) {
                    return Err(vec![ErrorKind::Exists]);
                }
                // Its content must never change again, so it has to be durable first.
                volume.head.settle();
                let snapshot = Snapshot {
                    content: volume.head.clone(),
                    protected: false,
                    retired: false,
                    labels: labels(number),
                };
                volume.snapshots.insert(name, snapshot);
            }
            Op::RenameSnapshot { vol, snap, new } => {
                let old = self.snapshot_mut(vol, snap).err();
                let volume = self.volume_mut(vol)?;
                let taken = snap != new && volume.snapshots.contains_key(&snapshot_name(new));
                let mut refusal = old.unwrap_or_default();
                if taken {
                    refusal.push(ErrorKind::Exists);
                }
                if !refusal.is_empty() {
                    return Err(refusal);
                }
                if let Some(snapshot) = volume.snapshots.remove(&snapshot_name(snap)) {
                    volume.snapshots.insert(snapshot_name(new), snapshot);
                }
            }
            Op::DeleteSnapshot { vol, snap } => {
                if self.snapshot_mut(vol, snap)?.protected {
                    return Err(vec![ErrorKind::Busy]);
                }
                self.volume_mut(vol)?.snapshots.remove(&snapshot_name(snap));
            }
            Op::Rollback { vol, snap, keep_size } => {
                let content = self.base(vol, snap)?;
                let head = &mut self.volume_mut(vol)?.head;
                let sectors = head.sectors;
                *head = content;
                if keep_size {
                    head.resize(sectors);
                }
            }
            Op::Protect { vol, snap, on } => self.snapshot_mut(vol, snap)?.protected = on,
            Op::Retire { vol, snap, on } => self.snapshot_mut(vol, snap)?.retired = on,
            Op::Rebuilding { vol, on } => self.volume_mut(vol)?.rebuilding = on,
            Op::SetLabels { vol, snap, labels: number } => {
                self.snapshot_mut(vol, snap)?.labels = labels(number);
            }
            _ => {}
        }
        Ok(())
    }

    /// The mark of what `op` writes as operation `number`.
    #[must_use]
    pub fn tag(&self, op: &Op, number: u32) -> Tag {
        match op {
            Op::Write { vol, .. } | Op::WriteLayer { vol, .. } => {
                let id = self.volumes.get(&volume_name(*vol)).map_or(0, |v| v.id);
                Tag::new(number, id)
            }
            _ => Tag::ZERO,
        }
    }

    /// The store has returned from `op`: what it made durable is settled.
    pub fn acknowledge(&mut self, op: &Op) {
        match op {
            Op::Flush
            | Op::FlushVolume { .. }
            | Op::Write { fua: true, .. }
            | Op::WriteZeroes { fua: true, .. } => self.settle(),
            _ => {}
        }
    }

    /// Everything is durable.
    pub fn settle(&mut self) {
        for volume in self.volumes.values_mut() {
            volume.head.settle();
            if let Some(tree) = &mut volume.tree {
                tree.settle();
            }
            volume.show_layers();
        }
    }

    /// What may be found when the process dies in the middle of an operation that leads from
    /// `before` to `self`, and the machine goes on: block by block the one or the other.
    #[must_use]
    pub fn in_flight_of(mut self, before: &Self) -> Self {
        for (name, volume) in &mut self.volumes {
            let old = before.volumes.get(name).filter(|v| v.id == volume.id);
            volume.head.alternatives_from(old.map(|v| &v.head));
            for (name, snapshot) in &mut volume.snapshots {
                let old = old.and_then(|v| v.snapshots.get(name));
                snapshot.content.alternatives_from(old.map(|s| &s.content));
            }
        }
        self
    }

    /// What may be found where each block may also be as in `other`.
    #[must_use]
    pub fn or_blocks_of(mut self, other: &Self) -> Self {
        for (name, volume) in &mut self.volumes {
            let Some(other) = other.volumes.get(name).filter(|v| v.id == volume.id) else {
                continue;
            };
            volume.head.add_alternatives(&other.head);
            for (name, snapshot) in &mut volume.snapshots {
                let other = other.snapshots.get(name);
                other.into_iter().for_each(|s| snapshot.content.add_alternatives(&s.content));
            }
        }
        self
    }

    /// The volume's content to compare with, by name.
    #[must_use]
    pub fn content(&self, volume: &str, snapshot: Option<&str>) -> Option<&Content> {
        let volume = self.volumes.get(volume)?;
        match snapshot {
            None => Some(&volume.head),
            Some(name) => volume.snapshots.get(name).map(|s| &s.content),
        }
    }

    /// The volume with this number.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn volume_mut(&mut self, vol: u8) -> Result<&mut Volume, Refusal> {
        self.volumes.get_mut(&volume_name(vol)).ok_or_else(|| vec![ErrorKind::NotFound])
    }

    fn snapshot_mut(&mut self, vol: u8, snap: u8) -> Result<&mut Snapshot, Refusal> {
        let volume = self.volume_mut(vol)?;
        volume.snapshots.get_mut(&snapshot_name(snap)).ok_or_else(|| vec![ErrorKind::NotFound])
    }

    /// What a head put on the snapshot shows.
    fn base(&mut self, vol: u8, snap: u8) -> Result<Content, Refusal> {
        let snapshot = self.snapshot_mut(vol, snap)?;
        if snapshot.retired {
            return Err(vec![ErrorKind::Invalid]);
        }
        Ok(snapshot.content.clone())
    }

    fn vacant(&self, vol: u8) -> Result<(), Refusal> {
        match self.volumes.contains_key(&volume_name(vol)) {
            true => Err(vec![ErrorKind::Exists]),
            false => Ok(()),
        }
    }

    fn create_volume(&mut self, vol: u8, sectors: u16) -> Result<(), Refusal> {
        self.vacant(vol)?;
        let backed = image::is_below(sectors);
        let secret = (self.encrypts && image::is_encrypted(sectors)).then_some(false);
        self.insert(vol, Content::fresh(u64::from(sectors), backed), backed, true);
        self.volume_mut(vol)?.secret = secret;
        Ok(())
    }

    fn clone_volume(&mut self, vol: u8, snap: u8, new: u8) -> Result<(), Refusal> {
        let content = self.base(vol, snap);
        let busy = self.volume_mut(vol).is_ok_and(|volume| volume.rebuilding);
        let content = match content {
            Ok(_) if busy => Err(vec![ErrorKind::Busy]),
            content => content,
        };
        match (content, self.vacant(new)) {
            (Ok(content), Ok(())) => {
                let Volume { backed, secret, .. } = *self.volume_mut(vol)?;
                self.insert(new, content, backed, false);
                self.volume_mut(new)?.secret = secret;
                Ok(())
            }
            (content, vacant) => {
                Err([content.err(), vacant.err()].into_iter().flatten().flatten().collect())
            }
        }
    }

    fn insert(&mut self, vol: u8, head: Content, backed: bool, fresh: bool) {
        self.next_id += 1;
        let (id, snapshots) = (self.next_id, BTreeMap::new());
        let (held, busy, rebuilding, tree, secret) = (false, false, false, None, None);
        let volume =
            Volume { id, head, snapshots, held, busy, rebuilding, backed, secret, fresh, tree };
        self.volumes.insert(volume_name(vol), volume);
    }

    fn rename_volume(&mut self, vol: u8, new: u8) -> Result<(), Refusal> {
        let mut refusal = self.volume_mut(vol).err().unwrap_or_default();
        if vol != new && self.vacant(new).is_err() {
            refusal.push(ErrorKind::Exists);
        }
        if !refusal.is_empty() {
            return Err(refusal);
        }
        if let Some(volume) = self.volumes.remove(&volume_name(vol)) {
            self.volumes.insert(volume_name(new), volume);
        }
        Ok(())
    }

    fn write(&mut self, vol: u8, at: u16, len: u16, tag: Tag) -> Result<(), Refusal> {
        let head = &mut self.volume_mut(vol)?.head;
        let (at, end) = (u64::from(at), u64::from(at) + u64::from(len));
        if end > head.sectors {
            return Err(vec![ErrorKind::Invalid]);
        }
        head.change(at..end, |now, range| now[range].fill(tag));
        Ok(())
    }

    fn discard(&mut self, vol: u8, at: u16, len: u16) -> Result<(), Refusal> {
        let head = &mut self.volume_mut(vol)?.head;
        let (at, mut end) = (u64::from(at), u64::from(at) + u64::from(len));
        if end > head.sectors {
            return Err(vec![ErrorKind::Invalid]);
        }
        // The volume's last block may be short; all of it is a whole block.
        if end == head.sectors {
            end = end.next_multiple_of(SECTORS as u64);
        }
        head.change(at..end, |now, range| {
            if range.len() == SECTORS {
                *now = Tags::default();
            }
        });
        Ok(())
    }
}

impl Model {
    /// Which blocks go depends on the layers, which the model does not know: any of those of the
    /// retired snapshots may.
    fn prune(&mut self, vol: u8, at: u16, len: u16) -> Result<(), Refusal> {
        let volume = self.volume_mut(vol)?;
        let (at, end) = (u64::from(at), u64::from(at) + u64::from(len));
        if end > volume.head.sectors {
            return Err(vec![ErrorKind::Invalid]);
        }
        let unit = SECTORS as u64;
        let end = if end == volume.head.sectors { end.div_ceil(unit) } else { end / unit };
        for snapshot in volume.snapshots.values_mut().filter(|s| s.retired && !s.protected) {
            let blocks = Arc::make_mut(&mut snapshot.content.blocks);
            let first = at.div_ceil(unit) as usize;
            let count = (end as usize).saturating_sub(first);
            blocks.iter_mut().skip(first).take(count).for_each(|block| block.any = true);
        }
        Ok(())
    }
}

impl Content {
    pub(crate) fn zeros(sectors: u64) -> Self {
        let blocks = sectors.div_ceil(SECTORS as u64) as usize;
        Self { sectors, blocks: Arc::new(vec![Block::default(); blocks]) }
    }

    /// What a volume shows of which no layer has anything.
    pub(crate) fn fresh(sectors: u64, backed: bool) -> Self {
        let mut content = Self::zeros(sectors);
        if backed {
            let blocks = Arc::make_mut(&mut content.blocks);
            for sector in 0..sectors.min(image::SECTORS) as usize {
                blocks[sector / SECTORS].now[sector % SECTORS] = image::tag();
            }
        }
        content
    }

    /// The blocks; of the last one the sectors beyond the size are zeros.
    #[must_use]
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// What the layers show.
    pub(crate) fn set_blocks(&mut self, blocks: Vec<Block>) {
        self.blocks = Arc::new(blocks);
    }

    /// The store was found to hold `found`: each block's newest content is known again. If all of
    /// it is `durable`, it is also the only one that can ever come back.
    pub fn adopt(&mut self, found: &[Tags], durable: bool) {
        for (block, found) in Arc::make_mut(&mut self.blocks).iter_mut().zip(found) {
            let was = std::mem::replace(&mut block.now, *found);
            block.older_any = (block.older_any || block.any) && !durable;
            block.any = false;
            if durable {
                block.older.clear();
            } else if was != *found {
                block.older.push(was);
            }
        }
    }

    fn change(
        &mut self,
        sectors: std::ops::Range<u64>,
        mut change: impl FnMut(&mut Tags, std::ops::Range<usize>),
    ) {
        let blocks = Arc::make_mut(&mut self.blocks);
        let unit = SECTORS as u64;
        for index in sectors.start / unit..sectors.end.div_ceil(unit) {
            let start = sectors.start.saturating_sub(index * unit) as usize;
            let end = (sectors.end - index * unit).min(unit) as usize;
            let block = &mut blocks[index as usize];
            let before = block.now;
            change(&mut block.now, start..end);
            if end - start == SECTORS {
                block.older_any |= block.any;
                block.any = false;
            }
            if block.now != before && !block.older.contains(&before) {
                block.older.push(before);
            }
        }
    }

    fn resize(&mut self, sectors: u64) {
        let unit = SECTORS as u64;
        let blocks = Arc::make_mut(&mut self.blocks);
        blocks.resize_with(sectors.div_ceil(unit) as usize, Block::default);
        if sectors < self.sectors
            && !sectors.is_multiple_of(unit)
            && let Some(block) = blocks.last_mut()
        {
            let cut = (sectors % unit) as usize;
            block.now[cut..].fill(Tag::ZERO);
            block.older.iter_mut().for_each(|tags| tags[cut..].fill(Tag::ZERO));
        }
        self.sectors = sectors;
    }

    fn settle(&mut self) {
        if self.blocks.iter().any(|block| !block.older.is_empty() || block.older_any) {
            for block in Arc::make_mut(&mut self.blocks) {
                block.older.clear();
                block.older_any = false;
            }
        }
    }

    fn add_alternatives(&mut self, other: &Self) {
        let blocks = Arc::make_mut(&mut self.blocks);
        for (block, other) in blocks.iter_mut().zip(other.blocks.iter()) {
            block.older_any |= other.any;
            if other.now != block.now && !block.older.contains(&other.now) {
                block.older.push(other.now);
            }
        }
    }

    fn alternatives_from(&mut self, old: Option<&Self>) {
        let blocks = Arc::make_mut(&mut self.blocks);
        for (i, block) in blocks.iter_mut().enumerate() {
            block.older.clear();
            let before = old.and_then(|old| old.blocks.get(i));
            block.older_any = before.is_some_and(|before| before.any);
            if let Some(before) = before.filter(|before| before.now != block.now) {
                block.older.push(before.now);
            }
        }
    }
}

impl Block {
    /// Whether the block may hold `found`: its newest content, or with `older` any that a crash
    /// may bring back.
    #[must_use]
    pub fn allows(&self, found: &Tags, older: bool) -> bool {
        self.any || self.now == *found || (older && (self.older_any || self.older.contains(found)))
    }

    /// As [`Block::allows`] with older content, each sector for itself.
    #[must_use]
    pub fn allows_sectors(&self, found: &Tags) -> bool {
        let may = |i: usize, tag| self.now[i] == tag || self.older.iter().any(|old| old[i] == tag);
        self.allows(found, true) || found.iter().enumerate().all(|(i, tag)| may(i, *tag))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Op = Op::Write { vol: 0, at: 4, len: 8, fua: false };

    fn model() -> Model {
        let mut model = Model::default();
        model.apply(&Op::CreateVolume { vol: 0, sectors: 64 }, 1).unwrap();
        model
    }

    fn block(model: &Model, index: usize) -> &Block {
        &model.content("v0", None).unwrap().blocks()[index]
    }

    #[test]
    fn unflushed_blocks_may_be_old_and_flushed_ones_not() {
        let mut model = model();
        model.apply(&WRITE, 2).unwrap();
        let tag = Tag::new(2, 1);
        let (old, mut new) = (Tags::default(), Tags::default());
        new[4..].fill(tag);
        let mut mix = new;
        mix[7] = Tag::ZERO;
        assert!(block(&model, 0).allows(&new, false) && !block(&model, 0).allows(&old, false));
        assert!(block(&model, 0).allows(&old, true) && !block(&model, 0).allows(&mix, true));
        assert!(block(&model, 0).allows_sectors(&mix));
        mix[7] = Tag::new(1, 1);
        assert!(!block(&model, 0).allows_sectors(&mix), "nobody wrote that");
        model.acknowledge(&WRITE);
        assert!(block(&model, 0).allows(&old, true));
        model.acknowledge(&Op::Flush);
        assert!(!block(&model, 0).allows(&old, true));
    }

    #[test]
    fn snapshots_freeze_and_settle() {
        let mut model = model();
        model.apply(&WRITE, 2).unwrap();
        model.apply(&Op::CreateSnapshot { vol: 0, snap: 0, labels: 0 }, 3).unwrap();
        let frozen = block(&model, 0).clone();
        assert!(frozen.older.is_empty());
        model.apply(&Op::Discard { vol: 0, at: 0, len: 64 }, 4).unwrap();
        assert_eq!(block(&model, 0).now, Tags::default());
        let snapshot = model.content("v0", Some("s0")).unwrap();
        assert_eq!(snapshot.blocks()[0], frozen);
        model.apply(&Op::Rollback { vol: 0, snap: 0, keep_size: false }, 5).unwrap();
        assert_eq!(*block(&model, 0), frozen);
    }

    #[test]
    fn discard_spares_partial_blocks_but_the_last() {
        let mut model = Model::default();
        model.apply(&Op::CreateVolume { vol: 0, sectors: 21 }, 1).unwrap();
        model.apply(&Op::Write { vol: 0, at: 0, len: 21, fua: true }, 2).unwrap();
        model.apply(&Op::Discard { vol: 0, at: 1, len: 20 }, 3).unwrap();
        assert_ne!(block(&model, 0).now, Tags::default());
        assert_eq!(block(&model, 1).now, Tags::default());
        assert_eq!(block(&model, 2).now, Tags::default());
    }

    #[test]
    fn a_shrunk_volume_grows_zeros() {
        let mut model = model();
        model.apply(&Op::Write { vol: 0, at: 0, len: 16, fua: false }, 2).unwrap();
        model.apply(&Op::ResizeVolume { vol: 0, sectors: 5 }, 3).unwrap();
        model.apply(&Op::ResizeVolume { vol: 0, sectors: 64 }, 4).unwrap();
        let tags = block(&model, 0).now;
        assert_ne!(tags[4], Tag::ZERO);
        assert_eq!(tags[5..], [Tag::ZERO; 3]);
        assert_eq!(block(&model, 1).now, Tags::default());
    }

    #[test]
    fn refusals_name_every_reason() {
        let mut model = model();
        let clone = |new| Op::Clone { vol: 0, snap: 0, new };
        assert_eq!(model.apply(&clone(1), 2), Err(vec![ErrorKind::NotFound]));
        assert_eq!(model.apply(&clone(0), 2), Err(vec![ErrorKind::NotFound, ErrorKind::Exists]));
        let create = Op::CreateVolume { vol: 0, sectors: 1 };
        assert_eq!(model.apply(&create, 2), Err(vec![ErrorKind::Exists]));
        let write = Op::Write { vol: 0, at: 60, len: 5, fua: false };
        assert_eq!(model.apply(&write, 2), Err(vec![ErrorKind::Invalid]));
        model.apply(&Op::Hold { vol: 0 }, 2).unwrap();
        assert_eq!(model.apply(&Op::DeleteVolume { vol: 0 }, 2), Err(vec![ErrorKind::Busy]));
    }

    #[test]
    fn in_flight_is_block_by_block() {
        let before = model();
        let mut after = before.clone();
        after.apply(&WRITE, 2).unwrap();
        let both = after.clone().in_flight_of(&before);
        assert!(block(&both, 0).allows(&Tags::default(), true));
        assert!(block(&both, 0).allows(&block(&after, 0).now, true));
        assert!(block(&both, 2).older.is_empty());
    }
}
