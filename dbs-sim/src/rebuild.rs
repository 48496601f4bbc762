//! The model of volumes that are being rebuilt. The layers are known of those that were marked as
//! rebuilding when they were empty; what is done to others then is left out.

use crate::content::{SECTORS, Tag, Tags};
use crate::image;
use crate::layers::Observed;
use crate::model::{Content, Model, Refusal, Snapshot, Volume};
use crate::op::{Op, labels, snapshot_name, volume_name};
use crate::tree::{Cell, Tree};
use dbs_core::ErrorKind;
use std::ops::Range;

/// Blocks of a layer, or of a volume's range.
fn blocks(start: u8, count: u8) -> Range<usize> {
    usize::from(start)..usize::from(start) + usize::from(count)
}

impl Model {
    /// Whether it cannot be said what `op` does: the layers it changes are not known.
    #[must_use]
    pub fn unpredictable(&self, op: &Op) -> bool {
        let (Op::WriteLayer { vol, .. }
        | Op::ZeroLayer { vol, .. }
        | Op::ClearLayer { vol, .. }
        | Op::Relink { vol, .. }) = op
        else {
            return false;
        };
        self.volumes.get(&volume_name(*vol)).is_some_and(|v| v.rebuilding && v.tree.is_none())
    }

    /// What is allowed in a rebuilding volume only.
    pub(crate) fn apply_to_layers(&mut self, op: &Op, tag: Tag) -> Result<(), Refusal> {
        match op {
            Op::InsertSnapshot { vol, snap, sectors } => {
                let volume = self.rebuilding(*vol)?;
                if volume.snapshots.contains_key(&snapshot_name(*snap)) {
                    return Err(vec![ErrorKind::Exists]);
                }
                let content = Content::fresh(u64::from(*sectors), volume.backed);
                if let Some(tree) = &mut volume.tree {
                    tree.insert(&snapshot_name(*snap), content.blocks().len());
                }
                let snapshot =
                    Snapshot { content, protected: false, retired: false, labels: labels(0) };
                volume.snapshots.insert(snapshot_name(*snap), snapshot);
                Ok(())
            }
            Op::WriteLayer { vol, snap, start, count } => {
                self.change(*vol, *snap, blocks(*start, *count), Cell::Data([tag; SECTORS]))
            }
            Op::ZeroLayer { vol, snap, start, count } => {
                self.change(*vol, *snap, blocks(*start, *count), Cell::Zero)
            }
            Op::ClearLayer { vol, snap, start, count } => {
                self.change(*vol, *snap, blocks(*start, *count), Cell::Absent)
            }
            Op::Relink { vol, links, head, marks } => self.relink(*vol, links, *head, *marks),
            _ => Ok(()),
        }
    }

    /// Whether the layers that are known may be those that were found.
    #[must_use]
    pub fn built_of(&self, found: &Observed) -> bool {
        found.iter().all(|(name, layers)| {
            let tree = self.volumes.get(name).and_then(|volume| volume.tree.as_ref());
            tree.is_none_or(|tree| tree.fits(layers))
        })
    }

    fn rebuilding(&mut self, vol: u8) -> Result<&mut Volume, Refusal> {
        let volume = self.volume_mut(vol)?;
        if volume.rebuilding { Ok(volume) } else { Err(vec![ErrorKind::ReadOnly]) }
    }

    fn change(
        &mut self,
        vol: u8,
        snap: u8,
        blocks: Range<usize>,
        cell: Cell,
    ) -> Result<(), Refusal> {
        let name = snapshot_name(snap);
        let volume = self.volume_mut(vol)?;
        let snapshot = volume.snapshots.get(&name).ok_or_else(|| vec![ErrorKind::NotFound])?;
        let mut refusal = Vec::new();
        if blocks.end > snapshot.content.blocks().len() {
            refusal.push(ErrorKind::Invalid);
        }
        if !volume.rebuilding {
            refusal.push(ErrorKind::ReadOnly);
        }
        if cell == Cell::Absent && volume.tree.as_ref().is_some_and(|tree| tree.hides(Some(&name)))
        {
            refusal.push(ErrorKind::Busy);
        }
        if !refusal.is_empty() {
            return Err(refusal);
        }
        if let Some(tree) = &mut volume.tree {
            tree.set(Some(&name), blocks, |_| cell);
        }
        Ok(())
    }

    fn relink(
        &mut self,
        vol: u8,
        links: &[(u8, Option<u8>)],
        head: Option<u8>,
        marks: u8,
    ) -> Result<(), Refusal> {
        let volume = self.rebuilding(vol)?;
        let mut refusal = Vec::new();
        let named = links.iter().flat_map(|(snap, parent)| std::iter::once(*snap).chain(*parent));
        if named.chain(head).any(|snap| !volume.snapshots.contains_key(&snapshot_name(snap))) {
            refusal.push(ErrorKind::NotFound);
        }
        let twice = |i: usize| links[..i].iter().any(|(snap, _)| *snap == links[i].0);
        if (0..links.len()).any(twice) {
            refusal.push(ErrorKind::Invalid);
        }
        let names: Vec<_> = links
            .iter()
            .map(|(snap, parent)| (snapshot_name(*snap), parent.map(snapshot_name)))
            .collect();
        let mut tree = volume.tree.clone();
        if let Some(tree) = &mut tree {
            if tree.hides(None) {
                refusal.push(ErrorKind::Busy);
            }
            if !tree.relink(&names, head.map(snapshot_name).as_deref()) {
                refusal.push(ErrorKind::Invalid);
            }
        }
        if smaller_than_parent(volume, &names, head.map(snapshot_name)) {
            refusal.push(ErrorKind::Invalid);
        }
        if !refusal.is_empty() {
            return Err(refusal);
        }
        volume.tree = tree;
        for (name, _) in &names {
            if let Some(snapshot) = volume.snapshots.get_mut(name) {
                (snapshot.retired, snapshot.labels) = link_marks(name, marks);
            }
        }
        Ok(())
    }

    /// Does to the layers what `op` has done, and shows what follows from them.
    pub(crate) fn follow(&mut self, op: &Op, tag: Tag) {
        let Some(vol) = op.volume() else { return };
        let Ok(volume) = self.volume_mut(vol) else { return };
        if let Op::Rebuilding { on, .. } = op {
            let aligned = volume.head.sectors.is_multiple_of(SECTORS as u64);
            if !on {
                volume.forget_layers();
            } else if volume.tree.is_none() && volume.fresh && aligned {
                let base = Content::fresh(image::SECTORS, volume.backed);
                let base = base.blocks().iter().map(|block| block.now).collect();
                volume.tree = Some(Tree::new(volume.head.blocks().len(), base));
            }
            return;
        }
        if op.changes_layers() {
            volume.fresh = false;
        }
        let Some(mut tree) = volume.tree.take() else { return };
        let known = volume.follow(op, &mut tree, tag);
        volume.tree = Some(tree);
        match known {
            true => volume.show_layers(),
            false => volume.forget_layers(),
        }
    }
}

/// Whether a link puts a layer on a larger one, or on a larger file.
fn smaller_than_parent(
    volume: &Volume,
    links: &[(String, Option<String>)],
    head: Option<String>,
) -> bool {
    let size = |name: &String| volume.snapshots.get(name).map_or(0, |s| s.content.sectors);
    let file = if volume.backed { image::SECTORS.next_multiple_of(SECTORS as u64) } else { 0 };
    let below = |parent: &Option<String>| parent.as_ref().map_or(file, size);
    let given = |name: &str| links.iter().any(|(given, _)| given == name);
    // One that a head became which had been cut off may be smaller than what it builds on.
    let others = volume.snapshots.keys().filter(|name| !given(name)).any(|name| {
        let parent = volume.tree.as_ref().and_then(|tree| tree.parent(name)).filter(|p| given(p));
        parent.is_some_and(|parent| size(name) < size(&parent.to_owned()))
    });
    others
        || links.iter().any(|(name, parent)| size(name) < below(parent))
        || volume.head.sectors < below(&head)
}

/// Whether a link retires its snapshot, and the labels it gives.
pub fn link_marks(name: &str, marks: u8) -> (bool, dbs_core::info::Labels) {
    let number: u8 = name[1..].parse().unwrap_or(0);
    (marks >> (number % 8) & 1 == 1, labels(number))
}

impl Volume {
    /// From now on only what is shown counts. A command has made it durable.
    fn forget_layers(&mut self) {
        if let Some(mut tree) = self.tree.take() {
            tree.settle();
            for (name, snapshot) in &mut self.snapshots {
                snapshot.content.set_blocks(tree.content(Some(name)));
            }
        }
    }

    /// Whether the layers are still known.
    fn follow(&mut self, op: &Op, tree: &mut Tree, tag: Tag) -> bool {
        let unit = SECTORS as u64;
        match *op {
            Op::Write { at, len, .. } => write(tree, u64::from(at), u64::from(len), tag),
            Op::Blank { at, len, .. } => write(tree, u64::from(at), u64::from(len), Tag::ZERO),
            Op::WriteZeroes { at, len, .. } => {
                let (at, end) = (u64::from(at), u64::from(at) + u64::from(len));
                write(tree, at, u64::from(len), Tag::ZERO);
                let whole = at.div_ceil(unit) as usize..(end / unit) as usize;
                tree.set(None, whole, |_| Cell::Zero);
            }
            Op::Discard { at, len, .. } => {
                let (at, end) = (u64::from(at), u64::from(at) + u64::from(len));
                tree.set(None, at.div_ceil(unit) as usize..(end / unit) as usize, |_| Cell::Zero);
            }
            Op::CreateSnapshot { snap, .. } => tree.snapshot(&snapshot_name(snap)),
            Op::RenameSnapshot { snap, new, .. } => {
                tree.rename(&snapshot_name(snap), &snapshot_name(new));
            }
            Op::DeleteSnapshot { snap, .. } => tree.delete(&snapshot_name(snap)),
            Op::Rollback { snap, keep_size, .. } => {
                let blocks = self.head.blocks().len();
                tree.rollback(&snapshot_name(snap));
                return !keep_size || tree.content(None).len() == blocks;
            }
            Op::Prune { at, len, .. } => {
                let (at, end) = (u64::from(at), u64::from(at) + u64::from(len));
                let whole = at.div_ceil(unit) as usize..(end / unit) as usize;
                let retired = |name: &str| {
                    self.snapshots.get(name).is_some_and(|s| s.retired && !s.protected)
                };
                tree.prune(whole, retired);
            }
            // What is in a part of a block behind the end is not known.
            Op::ResizeVolume { sectors, .. } if u64::from(sectors).is_multiple_of(unit) => {
                tree.resize((u64::from(sectors) / unit) as usize);
            }
            Op::ResizeVolume { .. } => return false,
            _ => {}
        }
        true
    }

    /// After a crash, or a command that was cut off: makes the layers fit what was found.
    pub(crate) fn fit_layers<'a>(
        &mut self,
        found: impl Fn(Option<&str>) -> Option<&'a [Tags]>,
        durable: bool,
    ) {
        if let Some(tree) = &mut self.tree {
            tree.narrow(found, durable);
        }
        self.show_layers();
    }

    /// What head and snapshots show follows from the layers.
    pub(crate) fn show_layers(&mut self) {
        let Some(tree) = &self.tree else { return };
        self.head.set_blocks(tree.content(None));
        for (name, snapshot) in &mut self.snapshots {
            snapshot.content.set_blocks(tree.content(Some(name)));
        }
    }
}

/// Writes sectors of the head: whole blocks, the rest of which is what was shown.
fn write(tree: &mut Tree, at: u64, len: u64, tag: Tag) {
    let unit = SECTORS as u64;
    for block in at / unit..(at + len).div_ceil(unit) {
        let start = at.saturating_sub(block * unit) as usize;
        let end = (at + len - block * unit).min(unit) as usize;
        let block = block as usize;
        let below = if end - start == SECTORS { Some(Tags::default()) } else { tree.shown(block) };
        let cell = below.map_or(Cell::Any, |mut tags| {
            tags[start..end].fill(tag);
            Cell::Data(tags)
        });
        tree.set(None, block..block + 1, |_| cell);
    }
}
