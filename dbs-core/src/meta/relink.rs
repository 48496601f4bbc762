//! Building the tree of a volume that is being rebuilt: snapshots that come from elsewhere, and
//! parents and attributes of all of them set anew.

use super::entries::Bits;
use super::tree::{Birth, check_size, encode_labels};
use super::{Meta, Snapshot, Step, Stop};
use crate::error::{Error, Result};
use crate::format::slots::{
    SLOT_BYTES, SNAPSHOT_LABELLED, SNAPSHOT_PROTECTED, SNAPSHOT_RETIRED, SNAPSHOT_USER_CREATED,
};
use crate::info::Labels;
use crate::sabotage::{self, Bug};
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Extents taken out of zero runs under one hold of the lock, fewer if entries are long.
const UNRUN_PER_STEP: usize = 64;
/// Bytes of a record beside what it carries.
const RECORD_BYTES: usize = 16;

/// What [`Store::relink`](crate::Store::relink) makes of a snapshot. Its name and protection stay as they are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Link {
    /// Which one.
    pub snapshot: String,
    /// The snapshot it builds on; none for a root.
    pub parent: Option<String>,
    /// Size in bytes, if it is to change. What the layer holds behind the smaller size goes.
    pub size: Option<u64>,
    /// Taken by a person, not by the system.
    pub user_created: bool,
    /// Its owner has no more use for it.
    pub retired: bool,
    /// Creation time, nanoseconds since the Unix epoch.
    pub created_ns: u64,
    /// All its labels.
    pub labels: Labels,
}

/// What a snapshot becomes.
#[derive(Debug)]
struct Target {
    id: SnapshotId,
    parent: SnapshotId,
    size: u64,
    flags: u32,
    created_ns: u64,
    labels: Vec<u8>,
}

/// A relink, as far as it has come.
#[derive(Debug)]
pub struct Relink {
    volume: VolumeId,
    head: SnapshotId,
    head_parent: SnapshotId,
    targets: Vec<Target>,
    /// Those whose old parent is gone.
    cut: usize,
    /// Those that are done; the head is the last.
    done: usize,
}

impl Meta {
    /// Adds a root without children or content to a volume that is being rebuilt.
    ///
    /// # Errors
    /// `ReadOnly` if it is not, `Exists`, `Invalid`, `NoSpace` when the table is full;
    /// [`Stop::Room`].
    pub fn insert_snapshot(
        &mut self,
        volume: VolumeId,
        name: &str,
        size: u64,
        user_created: bool,
        with: &Labels,
        birth: Birth,
    ) -> Step<SnapshotId> {
        self.check_rebuilding(volume)?;
        self.check_snapshot_name_free(volume, name)?;
        check_size(size)?;
        let encoded = encode_labels(with)?;
        let id = self.next_snapshot()?;
        self.require_labels(id, &encoded)?;
        let snapshot = Snapshot {
            name: name.to_owned(),
            flags: if user_created { SNAPSHOT_USER_CREATED } else { 0 },
            family: self.snapshot(self.volume(volume).head).family,
            ..super::tree::new_head(volume, self.bottom(volume), size, birth)
        };
        self.put_snapshot(id, snapshot);
        self.volume_mut(volume).snapshots.insert(name.to_owned(), id);
        if !encoded.is_empty() {
            self.put_labels(id, encoded);
            self.append_snapshot(id);
        }
        Ok(id)
    }

    /// Finds out what a relink changes; nothing is changed yet.
    ///
    /// # Errors
    /// `ReadOnly` if the volume is not being rebuilt, `NotFound`, `Invalid`, `Busy` if another
    /// volume is tied to this one or a deleted snapshot is still in the tree.
    pub fn plan_relink(
        &self,
        volume: VolumeId,
        links: &[Link],
        head_parent: Option<&str>,
    ) -> Result<Relink> {
        self.check_rebuilding(volume)?;
        self.check_alone(volume)?;
        let name = &self.volume(volume).name;
        let find = |snapshot: &str| {
            let found = self.volume(volume).snapshots.get(snapshot).copied();
            found.ok_or_else(|| Error::not_found(format!("no snapshot `{name}@{snapshot}`")))
        };
        let bottom = self.bottom(volume);
        let mut targets = Vec::with_capacity(links.len());
        let mut seen = BTreeSet::new();
        for link in links {
            let id = find(&link.snapshot)?;
            if !seen.insert(id.0) {
                let text = format!("snapshot `{name}@{}` is given twice", link.snapshot);
                return Err(Error::invalid(text));
            }
            let parent = link.parent.as_deref().map(find).transpose()?;
            targets.push(self.target(id, parent.unwrap_or(bottom), link)?);
        }
        let head_parent = head_parent.map(find).transpose()?.unwrap_or(bottom);
        self.check_loops(volume, &targets)?;
        let head = self.volume(volume).head;
        let relink = Relink { volume, head, head_parent, targets, cut: 0, done: 0 };
        self.check_sizes(&relink)?;
        Ok(relink)
    }

    /// Refuses a layer on one that is larger, and on one that is smaller and ends within a block:
    /// behind its end a layer shows nothing, which none of them could then say.
    fn check_sizes(&self, relink: &Relink) -> Result<()> {
        let given: BTreeMap<u32, (u32, u64)> =
            relink.targets.iter().map(|t| (t.id.0, (t.parent.0, t.size))).collect();
        let of = |id: u32| match given.get(&id) {
            Some(given) => *given,
            None if id == relink.head.0 => (relink.head_parent.0, self.snapshot(relink.head).size),
            None => (self.snapshot(SnapshotId(id)).parent.0, self.snapshot(SnapshotId(id)).size),
        };
        let volume = self.volume(relink.volume);
        for id in volume.snapshots.values().chain([&relink.head]) {
            let (parent, size) = of(id.0);
            let changed =
                *id == relink.head || [id.0, parent].iter().any(|id| given.contains_key(id));
            if parent == 0 || !changed {
                continue;
            }
            let (_, below) = of(parent);
            // A base ends with a block, in which the volume may end.
            let on_file = self.snapshot(SnapshotId(parent)).backed();
            let size = if on_file { size.next_multiple_of(BLOCK_BYTES) } else { size };
            if size < below || (size > below && !below.is_multiple_of(BLOCK_BYTES)) {
                let above = match self.snapshot(*id).name.as_str() {
                    "" => "the head",
                    name => name,
                };
                return Err(Error::invalid(format!(
                    "`{}`: {above} of {size} bytes cannot build on {} of {below}: a parent is no \
                     larger, and ends with a block if it is smaller",
                    volume.name,
                    if on_file {
                        "its backing file"
                    } else {
                        &self.snapshot(SnapshotId(parent)).name
                    }
                )));
            }
        }
        Ok(())
    }

    fn target(&self, id: SnapshotId, parent: SnapshotId, link: &Link) -> Result<Target> {
        let snapshot = self.snapshot(id);
        let size = link.size.unwrap_or(snapshot.size);
        check_size(size)?;
        if size > snapshot.size && !snapshot.size.is_multiple_of(BLOCK_BYTES) {
            return Err(Error::invalid(format!(
                "snapshot `{}` of {} bytes ends within a block: it cannot grow",
                link.snapshot, snapshot.size
            )));
        }
        let labels = encode_labels(&link.labels)?;
        let kept = snapshot.flags & (SNAPSHOT_PROTECTED | SNAPSHOT_LABELLED);
        let flag = |on, flag| if on { flag } else { 0 };
        let flags = kept
            | flag(link.user_created, SNAPSHOT_USER_CREATED)
            | flag(link.retired, SNAPSHOT_RETIRED);
        Ok(Target { id, parent, size, flags, created_ns: link.created_ns, labels })
    }

    /// Refuses a volume whose tree other volumes or deleted snapshots are part of.
    pub(super) fn check_alone(&self, volume: VolumeId) -> Result<()> {
        let name = &self.volume(volume).name;
        for (_, snapshot) in self.snapshots() {
            let parent = self.try_snapshot(snapshot.parent);
            let owners = [Some(snapshot.volume), parent.map(|parent| parent.volume)];
            let [Some(own), below] = owners else { continue };
            let on_file = parent.is_some_and(Snapshot::backed);
            if !on_file
                && below.is_some_and(|below| below != own)
                && (own == volume || below == Some(volume))
            {
                return Err(Error::busy(format!(
                    "volume `{name}` and another volume share snapshots through a clone; flatten \
                     or delete the clone, and try again when background work has ended"
                )));
            }
            if own == volume && !snapshot.live() {
                return Err(Error::busy(format!(
                    "a deleted snapshot of `{name}` is still in its tree; delete the snapshots \
                     and clones that build on it, and try again when background work has ended"
                )));
            }
        }
        Ok(())
    }

    fn check_loops(&self, volume: VolumeId, targets: &[Target]) -> Result<()> {
        let of = self.volume(volume).snapshots.values();
        let mut parents: BTreeMap<u32, u32> =
            of.map(|id| (id.0, self.snapshot(*id).parent.0)).collect();
        parents.extend(targets.iter().map(|target| (target.id.0, target.parent.0)));
        let mut ends = BTreeSet::from([0]);
        for start in parents.keys() {
            let mut path = BTreeSet::new();
            let mut at = *start;
            while !ends.contains(&at) {
                if !path.insert(at) {
                    return Err(Error::invalid(format!(
                        "the parents given for `{}` form a loop at `{}`",
                        self.volume(volume).name,
                        self.snapshot(SnapshotId(at)).name
                    )));
                }
                at = parents.get(&at).copied().unwrap_or(0);
            }
            ends.extend(path);
        }
        Ok(())
    }

    /// Snapshots that hold something behind the end they have or get which must not show through
    /// what builds on them, and the blocks to clear.
    ///
    /// # Errors
    /// [`Stop::Away`].
    pub fn relink_ends(&self, relink: &Relink) -> Step<Vec<(SnapshotId, Range<u64>)>> {
        let sizes: BTreeMap<u32, u64> = relink.targets.iter().map(|t| (t.id.0, t.size)).collect();
        let per_extent = u64::from(self.blocks_per_extent());
        let all = self.volume(relink.volume).snapshots.values();
        let behind = all.filter_map(|id| {
            let snapshot = self.snapshot(*id);
            let size = sizes.get(&id.0).copied().unwrap_or(snapshot.size);
            let first = size.min(snapshot.size).div_ceil(BLOCK_BYTES);
            let data = match self.data_behind(*id, first) {
                Ok(data) => data,
                Err(stop) => return Some(Err(stop)),
            };
            // Marks behind the end hide nothing, unless the end is to be behind them.
            let end = if size > snapshot.size { Some(size.div_ceil(BLOCK_BYTES)) } else { None };
            let end = data.map(|logical| u64::from(logical + 1) * per_extent).max(end)?;
            Some(Ok((*id, first..end)))
        });
        behind.collect()
    }

    /// The last volume extent at which a layer has data from a block on.
    fn data_behind(&self, id: SnapshotId, first: u64) -> Step<Option<u32>> {
        let per_extent = u64::from(self.blocks_per_extent());
        let (logical, block) = ((first / per_extent) as u32, (first % per_extent) as u32);
        let layer = &self.snapshot(id).layer;
        let mut last = None;
        for (at, entry) in layer.iter_from(logical) {
            let behind = Bits::range(&(block..self.blocks_per_extent()));
            let holds = match at == logical {
                true => !self.entries.data_bits(entry)?.and(&behind).is_empty(),
                false => self.entries.data_blocks(entry) > 0,
            };
            last = if holds { Some(at) } else { last };
        }
        Ok(last)
    }

    /// Roots that a relink gives a parent.
    pub fn relink_roots(&self, relink: &Relink) -> Vec<SnapshotId> {
        let all = relink.targets.iter().map(|target| (target.id, target.parent));
        let all = all.chain([(relink.head, relink.head_parent)]);
        all.filter(|(id, parent)| !parent.is_none() && self.snapshot(*id).parent.is_none())
            .map(|(id, _)| id)
            .collect()
    }

    /// Takes entries with absent blocks out of a layer's zero runs, some from a volume extent on; where to go
    /// on. A root may have such entries, a layer with a parent may not. It changes nothing that shows.
    ///
    /// # Errors
    /// `NoSpace` if there is no spare entry to split a run with; [`Stop::Room`], [`Stop::Long`], [`Stop::Away`].
    pub fn unrun_some(&mut self, id: SnapshotId, from: u32) -> Step<Option<u32>> {
        self.check_log()?;
        let most = self.entries_per_step(UNRUN_PER_STEP);
        let (all, layer) = (self.all_blocks(), &self.snapshot(id).layer);
        let covering = layer.runs.range(..from).next_back().into_iter();
        let inside = covering.chain(layer.runs.range(from..)).flat_map(|(start, (length, _))| {
            let end = start + length;
            layer.iter_from(from.max(*start)).take_while(move |(logical, _)| *logical < end)
        });
        let some: Vec<_> = inside.take(most).collect();
        let mut open = Vec::new();
        for (logical, entry) in &some {
            // Those of the other ones of this step are needed, too.
            let ahead = u64::from(some.last().map_or(0, |(last, _)| last - logical)) + 1;
            let held = self.entries.held_bits(*entry).map_err(|away| Stop::ahead(away, ahead))?;
            if held != all {
                open.push(*logical);
            }
        }
        if !open.is_empty() {
            self.check_not_lost(id)?;
        }
        for logical in &open {
            self.carve_runs(id, &(*logical..*logical + 1))?;
        }
        Ok(some.get(most - 1).map(|(logical, _)| logical + 1))
    }

    /// Asks for the storage that the labels of a relink need.
    ///
    /// # Errors
    /// [`Stop::Room`].
    pub fn prepare_relink(&self, relink: &Relink) -> Step<()> {
        relink.targets.iter().try_for_each(|target| self.require_labels(target.id, &target.labels))
    }

    /// Does as much of a relink as the next group may still take, all of it if it is short enough
    /// for one group; whether it is done.
    ///
    /// Of a longer one the old parents go first, all of them: what is there in between has no
    /// loops, whatever a crash leaves of it.
    ///
    /// # Errors
    /// `NotFound` if a snapshot was deleted since it was planned; [`Stop::Long`].
    pub fn relink_some(&mut self, relink: &mut Relink) -> Step<bool> {
        let gone = |target: &&Target| {
            self.try_snapshot(target.id).is_none_or(|s| !s.live() || s.volume != relink.volume)
        };
        if relink.targets.iter().any(|target| gone(&target)) {
            let text = "a snapshot was deleted while the parents of the volume's snapshots were \
                        set; try again";
            return Err(Stop::Error(Error::not_found(text)));
        }
        self.note_write(relink.head);
        let needed = relink.targets.iter().map(|target| self.relink_bytes(target)).sum::<usize>()
            + SLOT_BYTES
            + RECORD_BYTES;
        if relink.cut == 0 && needed <= self.log.pending_soft_max() {
            // The whole of it or, until there is room, nothing.
            if !self.log.is_short() {
                return Err(Stop::Long);
            }
            relink.cut = relink.targets.len() + 1;
        }
        if sabotage::is(Bug::RelinkWithoutCutting) {
            relink.cut = relink.targets.len() + 1;
        }
        if relink.cut <= relink.targets.len() {
            let bottom = self.bottom(relink.volume);
            while relink.cut <= relink.targets.len() {
                self.check_log()?;
                let id = relink.targets.get(relink.cut).map_or(relink.head, |target| target.id);
                self.reparent(id, bottom);
                relink.cut += 1;
            }
        }
        let whole = needed <= self.log.pending_soft_max();
        while relink.done < relink.targets.len() {
            if !whole {
                self.check_log()?;
            }
            self.apply_target(&relink.targets[relink.done]);
            relink.done += 1;
        }
        self.reparent(relink.head, relink.head_parent);
        Ok(true)
    }

    /// Bytes of the records that one snapshot takes, at most.
    fn relink_bytes(&self, target: &Target) -> usize {
        let labels = if self.snapshot(target.id).labels == target.labels {
            0
        } else {
            target.labels.len() + 4 + 2 * RECORD_BYTES
        };
        SLOT_BYTES + RECORD_BYTES + labels
    }

    fn apply_target(&mut self, target: &Target) {
        let snapshot = self.snapshot_mut(target.id);
        snapshot.size = target.size;
        snapshot.created_ns = target.created_ns;
        snapshot.flags = target.flags;
        if snapshot.labels != target.labels {
            self.put_labels(target.id, target.labels.clone());
        }
        if self.snapshot(target.id).parent == target.parent {
            self.append_snapshot(target.id);
        } else {
            self.reparent(target.id, target.parent);
        }
    }

    /// Gives a snapshot or head another parent.
    fn reparent(&mut self, id: SnapshotId, parent: SnapshotId) {
        if self.snapshot(id).parent != parent {
            self.set_parent(id, parent, Bug::RelinkKeepsViews);
        }
    }
}
