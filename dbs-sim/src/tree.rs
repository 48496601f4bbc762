//! The layers of a volume whose tree is changed: what each snapshot and the head hold themselves,
//! block by block, from which follows what they show once their parents are others.

use crate::content::{Block, Tags};
use dbs_core::info::LayerState;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// What a layer says of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cell {
    /// Nothing.
    Absent,
    /// Zeros.
    Zero,
    /// This.
    Data(Tags),
    /// Nothing or zeros.
    Blank,
    /// Nobody knows.
    Any,
}

/// What a layer may say of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Spot {
    now: Cell,
    /// What may be there instead after a power loss.
    older: Vec<Cell>,
}

/// A layer.
#[derive(Debug, Clone)]
struct Node {
    /// Name of the snapshot; none for the head and for deleted ones that several build on.
    name: Option<String>,
    parent: Option<u32>,
    spots: Vec<Spot>,
    /// Of a head, how many blocks it had at most: what has no place any more is hidden if it gets one again.
    reach: usize,
}

/// All layers of a volume.
#[derive(Debug, Clone)]
pub struct Tree {
    nodes: BTreeMap<u32, Node>,
    head: u32,
    /// What is below the roots.
    base: Arc<[Tags]>,
}

impl Node {
    fn empty(parent: Option<u32>, blocks: usize) -> Self {
        let spot = Spot { now: Cell::Absent, older: Vec::new() };
        Self { name: None, parent, spots: vec![spot; blocks], reach: blocks }
    }
}

impl Cell {
    fn fits(self, state: LayerState) -> bool {
        match self {
            Self::Absent => state == LayerState::Absent,
            Self::Zero => state == LayerState::Zero,
            Self::Data(_) => state == LayerState::Data,
            Self::Blank => state != LayerState::Data,
            Self::Any => true,
        }
    }
}

impl Spot {
    fn set(&mut self, now: Cell) {
        let old = std::mem::replace(&mut self.now, now);
        if old != now && !self.older.contains(&old) {
            self.older.push(old);
        }
    }

    fn all(&self) -> impl Iterator<Item = Cell> {
        std::iter::once(self.now).chain(self.older.iter().copied())
    }
}

impl Tree {
    /// A head without parent and content, over what a file has.
    #[must_use]
    pub fn new(blocks: usize, base: Arc<[Tags]>) -> Self {
        Self { nodes: BTreeMap::from([(0, Node::empty(None, blocks))]), head: 0, base }
    }

    /// What a snapshot, or the head, shows: block by block, of its own size.
    #[must_use]
    pub fn content(&self, snapshot: Option<&str>) -> Vec<Block> {
        let Some(id) = self.find(snapshot) else { return Vec::new() };
        (0..self.nodes[&id].spots.len()).map(|block| self.block(id, block)).collect()
    }

    /// The newest content of a block of the head, if it is known.
    #[must_use]
    pub fn shown(&self, block: usize) -> Option<Tags> {
        let shown = self.block(self.head, block);
        (!shown.any).then_some(shown.now)
    }

    /// Changes blocks of a layer.
    pub fn set(
        &mut self,
        snapshot: Option<&str>,
        blocks: Range<usize>,
        cell: impl Fn(usize) -> Cell,
    ) {
        let Some(id) = self.find(snapshot) else { return };
        let Some(node) = self.nodes.get_mut(&id) else { return };
        for block in blocks {
            if let Some(spot) = node.spots.get_mut(block) {
                spot.set(cell(block));
            }
        }
    }

    /// The head becomes a snapshot, durable with all below it.
    pub fn snapshot(&mut self, name: &str) {
        self.settle();
        let blocks = self.nodes[&self.head].spots.len();
        let frozen = self.head;
        self.rename_node(frozen, name);
        self.head = self.add(Node::empty(Some(frozen), blocks));
    }

    /// A snapshot gets another name.
    pub fn rename(&mut self, name: &str, new: &str) {
        if let Some(id) = self.find(Some(name)) {
            self.rename_node(id, new);
        }
    }

    /// A snapshot is deleted: what it holds becomes part of the only layer that builds on it.
    pub fn delete(&mut self, name: &str) {
        if let Some(id) = self.find(Some(name))
            && let Some(node) = self.nodes.get_mut(&id)
        {
            node.name = None;
        }
        self.tidy();
    }

    /// The head is given up for an empty one on a snapshot.
    pub fn rollback(&mut self, name: &str) {
        let Some(id) = self.find(Some(name)) else { return };
        self.nodes.remove(&self.head);
        self.head = self.add(Node::empty(Some(id), self.nodes[&id].spots.len()));
        self.tidy();
    }

    /// The head gets so many blocks. New ones read as zeros. Where it had some before, and where there is something
    /// below, it says so itself, whatever comes below later.
    pub fn resize(&mut self, blocks: usize) {
        let (head, old) = (self.head, self.nodes[&self.head].spots.len());
        let now = |block: usize| {
            let hidden = block < self.nodes[&head].reach || self.has_data_below(head, block);
            if hidden { Cell::Zero } else { Cell::Blank }
        };
        let grown: Vec<_> =
            (old..blocks).map(|block| Spot { now: now(block), older: Vec::new() }).collect();
        if let Some(node) = self.nodes.get_mut(&head) {
            node.spots.truncate(blocks);
            node.spots.extend(grown);
            node.reach = node.reach.max(blocks);
        }
    }

    /// Adds an empty snapshot.
    pub fn insert(&mut self, name: &str, blocks: usize) {
        self.add(Node { name: Some(name.to_owned()), ..Node::empty(None, blocks) });
    }

    /// Whether a deleted snapshot is still needed: of any layer, or right below this one.
    #[must_use]
    pub fn hides(&self, above: Option<&str>) -> bool {
        let hidden = |id: &u32| *id != self.head && self.nodes[id].name.is_none();
        match above {
            None => self.nodes.keys().any(hidden),
            Some(name) => {
                let parent = self.find(Some(name)).and_then(|id| self.nodes[&id].parent);
                parent.is_some_and(|parent| hidden(&parent))
            }
        }
    }

    /// Gives layers other parents; false, and nothing is changed, if that makes a loop.
    pub fn relink(&mut self, links: &[(String, Option<String>)], head: Option<&str>) -> bool {
        let mut nodes = self.nodes.clone();
        let mut point = |id: Option<u32>, parent: Option<&str>| {
            let parent = parent.and_then(|parent| self.find(Some(parent)));
            if let Some(node) = id.and_then(|id| nodes.get_mut(&id)) {
                node.parent = parent;
            }
        };
        for (name, parent) in links {
            point(self.find(Some(name)), parent.as_deref());
        }
        point(Some(self.head), head);
        let loops = nodes.keys().any(|start| {
            let mut at = Some(*start);
            let steps = std::iter::from_fn(|| {
                at = nodes[&at?].parent;
                at
            });
            steps.take(nodes.len() + 1).count() > nodes.len()
        });
        if !loops {
            self.nodes = nodes;
        }
        !loops
    }

    /// Some blocks of snapshots directly under the head may be gone: those that a layer above
    /// covers, as far down as `retired` says.
    pub fn prune(&mut self, blocks: Range<usize>, retired: impl Fn(&str) -> bool) {
        let mut child = self.head;
        let mut above = vec![child];
        while let Some(id) = self.nodes[&child].parent {
            let only = self.nodes.values().filter(|node| node.parent == Some(id)).count() == 1;
            let named = self.nodes[&id].name.as_deref().is_some_and(&retired);
            if !only || !named {
                break;
            }
            for block in blocks.clone() {
                let covers = |id: &u32| {
                    let spot = self.nodes[id].spots.get(block);
                    spot.is_some_and(|spot| spot.now != Cell::Absent)
                };
                let covered = above.iter().any(covers);
                let spot = self.nodes.get_mut(&id).and_then(|node| node.spots.get_mut(block));
                if let Some(spot) = spot.filter(|spot| covered && spot.now != Cell::Absent) {
                    // Absent, or zero within a run of zeros.
                    *spot = Spot { now: Cell::Any, older: Vec::new() };
                }
            }
            above.push(id);
            child = id;
        }
    }

    /// Everything is durable.
    pub fn settle(&mut self) {
        let spots = self.nodes.values_mut().flat_map(|node| &mut node.spots);
        spots.for_each(|spot| spot.older.clear());
    }

    /// After a crash, or a command that was cut off: keeps of what layers may say what fits what
    /// they were found to show. If all of it is `durable`, nothing else can come back.
    pub fn narrow<'a>(
        &mut self,
        found: impl Fn(Option<&str>) -> Option<&'a [Tags]>,
        durable: bool,
    ) {
        let shown: BTreeMap<u32, Option<Vec<Tags>>> = self
            .nodes
            .iter()
            .map(|(id, node)| {
                let visible = *id == self.head || node.name.is_some();
                let tags = visible.then(|| found(node.name.as_deref())).flatten();
                (*id, tags.map(<[Tags]>::to_vec))
            })
            .collect();
        let base = &self.base;
        for (id, node) in &mut self.nodes {
            // What shrinks is cut off first, and hidden then, if the process lives so long.
            node.reach = node.spots.len();
            for (block, spot) in node.spots.iter_mut().enumerate().filter(|s| !s.1.older.is_empty())
            {
                let Some(tags) = shown[id].as_ref().and_then(|tags| tags.get(block)) else {
                    *spot = Spot { now: Cell::Any, older: Vec::new() };
                    continue;
                };
                let below = match node.parent {
                    None => Some(base.get(block).copied().unwrap_or_default()),
                    Some(parent) => shown[&parent]
                        .as_ref()
                        .map(|tags| tags.get(block).copied().unwrap_or_default()),
                };
                let written = spot.all().any(|cell| cell == Cell::Data(*tags));
                let fits = |cell: &Cell| match cell {
                    Cell::Absent => below.is_none_or(|below| below == *tags),
                    Cell::Zero => *tags == Tags::default(),
                    Cell::Data(data) => data == tags,
                    Cell::Blank => *tags == Tags::default(),
                    // Where it was unknown before, only what was written since is told from it.
                    Cell::Any => !written || *tags == Tags::default(),
                };
                let fitting: Vec<Cell> = spot.all().filter(fits).collect();
                let blank = fitting.iter().all(|cell| !matches!(cell, Cell::Data(_) | Cell::Any));
                let now = match fitting[..] {
                    [one] => one,
                    [_, _, ..] if blank => Cell::Blank,
                    _ => Cell::Any,
                };
                let older = spot.all().filter(|cell| *cell != now && !durable).collect();
                *spot = Spot { now, older };
            }
        }
    }

    /// Whether layers that stand on one another like this, and say this of their blocks, may be these.
    #[must_use]
    pub fn fits(
        &self,
        found: &BTreeMap<Option<String>, (Option<String>, Vec<LayerState>)>,
    ) -> bool {
        found.iter().all(|(name, (parent, states))| {
            let Some(id) = self.find(name.as_deref()) else { return false };
            let mut below = self.nodes[&id].parent;
            // What a hidden layer holds is told of those above it.
            let hidden = |id: u32| self.nodes[&id].name.is_none();
            let mut merged = false;
            while let Some(id) = below.filter(|id| hidden(*id)) {
                (below, merged) = (self.nodes[&id].parent, true);
            }
            let named = below.and_then(|id| self.nodes[&id].name.as_deref());
            let spots = &self.nodes[&id].spots;
            let fit =
                |(spot, state): (&Spot, &LayerState)| spot.all().any(|cell| cell.fits(*state));
            named == parent.as_deref()
                && spots.len() == states.len()
                && (merged || spots.iter().zip(states).all(fit))
        })
    }

    fn find(&self, snapshot: Option<&str>) -> Option<u32> {
        match snapshot {
            None => Some(self.head),
            Some(_) => self.nodes.iter().find(|(_, n)| n.name.as_deref() == snapshot).map(|n| *n.0),
        }
    }

    fn add(&mut self, node: Node) -> u32 {
        let id = self.nodes.keys().last().map_or(0, |last| last + 1).max(self.head + 1);
        self.nodes.insert(id, node);
        id
    }

    fn rename_node(&mut self, id: u32, name: &str) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.name = Some(name.to_owned());
        }
    }

    /// What a layer shows of a block.
    fn block(&self, id: u32, block: usize) -> Block {
        let Some(spot) = self.nodes[&id].spots.get(block) else {
            // Behind the end of a head that was cut off there are marks, unless a relink took them.
            let base = self.base.get(block).is_some_and(|tags| *tags != Tags::default());
            let parent = self.nodes[&id].parent;
            let any = parent.map_or(base, |parent| self.nodes[&parent].spots.len() > block);
            return Block { any, ..self.below(id, block) };
        };
        let of = |cell| match cell {
            Cell::Absent => self.below(id, block),
            Cell::Zero => Block::default(),
            Cell::Data(now) => Block { now, ..Block::default() },
            Cell::Blank => {
                let below = self.below(id, block);
                let zeros = below.now == Tags::default() && below.older.is_empty();
                let any = !zeros || below.any || below.older_any;
                Block { any, ..Block::default() }
            }
            Cell::Any => Block { any: true, ..Block::default() },
        };
        let mut shown = of(spot.now);
        for other in spot.older.iter().map(|cell| of(*cell)) {
            shown.older_any |= other.any || other.older_any;
            shown.older.push(other.now);
            shown.older.extend(other.older);
        }
        let now = shown.now;
        shown.older.retain(|tags| *tags != now);
        shown.older.dedup();
        shown
    }

    /// Whether a layer below has data there, durable or not.
    fn has_data_below(&self, id: u32, block: usize) -> bool {
        let below = std::iter::successors(self.nodes[&id].parent, |id| self.nodes[id].parent);
        let is_data = |spot: &Spot| matches!(spot.now, Cell::Data(_)) && spot.older.is_empty();
        below.into_iter().any(|id| self.nodes[&id].spots.get(block).is_some_and(is_data))
    }

    /// Which snapshot a snapshot builds on.
    #[must_use]
    pub fn parent(&self, name: &str) -> Option<&str> {
        let parent = self.nodes[&self.find(Some(name))?].parent?;
        self.nodes[&parent].name.as_deref()
    }

    fn below(&self, id: u32, block: usize) -> Block {
        let now = self.base.get(block).copied().unwrap_or_default();
        let base = || Block { now, ..Block::default() };
        self.nodes[&id].parent.map_or_else(base, |parent| self.block(parent, block))
    }

    /// Takes deleted snapshots out that at most one layer builds on.
    fn tidy(&mut self) {
        loop {
            let children = |id: u32| {
                let of = self.nodes.iter().filter(move |(_, node)| node.parent == Some(id));
                of.map(|(child, _)| *child).collect::<Vec<_>>()
            };
            let due = self.nodes.iter().find_map(|(id, node)| {
                let hidden = *id != self.head && node.name.is_none();
                let children = children(*id);
                (hidden && children.len() <= 1).then(|| (*id, children.first().copied()))
            });
            let Some((id, child)) = due else { return };
            let Some(gone) = self.nodes.remove(&id) else { return };
            let Some(child) = child.and_then(|child| self.nodes.get_mut(&child)) else { continue };
            child.parent = gone.parent;
            for (spot, lower) in child.spots.iter_mut().zip(&gone.spots) {
                let over = |cell: Cell| match cell {
                    Cell::Absent => lower.all().collect(),
                    Cell::Blank if lower.all().any(|cell| matches!(cell, Cell::Data(_))) => {
                        vec![Cell::Any]
                    }
                    cell => vec![cell],
                };
                let now = over(spot.now)[0];
                let mut older: Vec<Cell> = spot.all().flat_map(over).collect();
                older.retain(|cell| *cell != now);
                older.dedup();
                *spot = Spot { now, older };
            }
        }
    }
}
