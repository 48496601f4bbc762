//! A simulated replica: its layers, its state, and what a request or call does to them.

use longhorn_controller::volume::Call;
use longhorn_wire::control::expansion::ExpandCode;
use longhorn_wire::frame::handed_over;
use longhorn_wire::proto::ptypes;
use std::collections::{BTreeMap, BTreeSet};

/// Sectors of a block. Content is one number for each sector: which write it came from.
pub const SECTORS: usize = 8;

/// How a replica refuses another snapshot that has as many as it may.
pub const FULL_TABLE: &str = "the snapshot table is full";

type Block = [u32; SECTORS];

/// What one snapshot or head holds alone.
#[derive(Debug, Clone, Default)]
pub struct Layer {
    pub parent: Option<String>,
    pub blocks: BTreeMap<usize, Block>,
}

/// A request as a replica gets it; places and counts are in sectors.
#[derive(Debug, Clone)]
pub enum Request {
    Read {
        first: usize,
        count: usize,
    },
    Write {
        first: usize,
        data: Vec<u32>,
    },
    Unmap {
        first: usize,
        count: usize,
    },
    /// What a block should hold.
    Heal {
        block: usize,
        data: Vec<u32>,
    },
    Flush,
    Ping,
}

/// What it answers.
#[derive(Debug, Clone)]
pub enum Reply {
    Data(Vec<u32>),
    Done,
    /// So many sectors were written before it was full, which it does not say.
    NoSpace {
        written: usize,
    },
    /// This block is not what was written.
    Damaged {
        block: usize,
    },
    /// It was healed, or had not to be.
    Healed(bool),
    Failed,
    /// It says why.
    Refused(String),
}

/// A file that came in and counts from the next reload on.
#[derive(Debug, Clone)]
pub enum Staged {
    Blocks(BTreeMap<usize, Block>),
    Parent(Option<String>),
}

/// What a replica knows of a share of a controller's connections that breaks on its own.
#[derive(Debug, Default)]
pub struct Lane {
    /// How often it was made anew.
    pub epoch: u32,
    /// The last change of each place, if it was done.
    pub done: BTreeMap<u32, u32>,
}

/// A replica, and the process that serves it.
#[derive(Debug, Default)]
pub struct Replica {
    // On its disk.
    pub layers: BTreeMap<String, Layer>,
    pub head: Layer,
    pub heads: u64,
    /// The revert that made the head.
    pub revert: Option<String>,
    pub size: usize,
    pub counter: i64,
    pub rebuilding: bool,
    pub dirty: bool,
    pub modified: i64,
    /// Blocks that are not what was written any more, by the snapshot that holds them, or the head. What they
    /// held is remembered as their checksum is.
    pub rotten: BTreeSet<(Option<String>, usize)>,
    /// Blocks that fit, of all layers together.
    pub capacity: usize,
    /// Layers that fit beside the head.
    pub table: usize,
    // Its process.
    pub alive: bool,
    pub open: bool,
    /// Requests that were sent under another number belong to connections that are gone.
    pub session: u64,
    /// How often it was closed: connections of before end when it is opened again.
    pub gate: u64,
    /// By the client and its reactor.
    pub lanes: BTreeMap<(u64, usize), Lane>,
    /// Frozen or cut off until then.
    pub stalled_until: u64,
    /// How long it takes to open its store.
    pub opening: u64,
    pub staged: Vec<(String, Staged)>,
    pub sync_error: String,
    /// Whether what somebody sent came in, and was reloaded, since the rebuild began.
    pub filled: bool,
    /// Layers from before the rebuild began that have not come in since.
    pub stale: BTreeSet<String>,
    /// The head is from before that, too.
    pub head_stale: bool,
    pub syncing: bool,
    /// Requests that are to fail.
    pub failing: u32,
    /// A newer process has its store.
    pub handed_over: bool,
    /// A newer process takes its store just before its head is given a name.
    pub taken_when_named: bool,
    /// Calls that are to fail; odd ones do what they are asked before.
    pub failing_calls: u32,
    /// The next call of this name finds no connection to it.
    pub unsent: Option<&'static str>,
    // For the referee.
    /// Whether something happened to it that may make it `ERR`.
    pub blemished: bool,
    /// Blocks that it was asked to heal since it was connected, twice those that had to be.
    pub healed: u32,
    /// Whether it differs from others in more than what its counter tells.
    pub tainted: bool,
    pub counter_disabled: bool,
}

impl Replica {
    pub fn new(size: usize, counter_disabled: bool) -> Self {
        let capacity = usize::MAX;
        // As its first start has named it.
        let revert = Some(String::new());
        let table = usize::MAX;
        Self { size, revert, alive: true, capacity, table, counter_disabled, ..Self::default() }
    }

    /// Sectors.
    pub fn sectors(&self) -> usize {
        self.size * SECTORS
    }

    /// The layers from this one down.
    fn chain<'a>(&'a self, mut top: Option<&'a Layer>) -> impl Iterator<Item = &'a Layer> {
        // A rebuilt replica may have a parent that it has not got yet.
        std::iter::from_fn(move || {
            let layer = top?;
            top = layer.parent.as_ref().and_then(|parent| self.layers.get(parent));
            Some(layer)
        })
    }

    fn block(&self, top: &Layer, block: usize) -> Block {
        let mut chain = self.chain(Some(top));
        chain.find_map(|layer| layer.blocks.get(&block).copied()).unwrap_or_default()
    }

    /// Who holds what is read of a block: a snapshot, or the head; `None` if nobody does.
    fn holder(&self, block: usize) -> Option<Option<String>> {
        if self.head.blocks.contains_key(&block) {
            return Some(None);
        }
        let mut name = self.head.parent.as_ref();
        while let Some(disk) = name {
            let layer = self.layers.get(disk)?;
            if layer.blocks.contains_key(&block) {
                return Some(Some(disk.clone()));
            }
            name = layer.parent.as_ref();
        }
        None
    }

    /// Whether what is read of a block is not what was written.
    pub fn is_rotten(&self, block: usize) -> bool {
        !self.rotten.is_empty()
            && self.holder(block).is_some_and(|holder| self.rotten.contains(&(holder, block)))
    }

    /// The medium loses what is read of a block.
    pub fn rot(&mut self, block: usize) {
        if let Some(holder) = self.holder(block) {
            self.rotten.insert((holder, block));
        }
    }

    /// The first rotten block that a request has to read.
    fn met(&self, request: &Request) -> Option<usize> {
        let (first, end, partial) = match request {
            Request::Read { first, count } => (*first, first + count, false),
            Request::Write { first, data } => (*first, first + data.len(), true),
            Request::Unmap { .. } | Request::Heal { .. } | Request::Flush | Request::Ping => {
                return None;
            }
        };
        let whole = |block: &usize| first <= block * SECTORS && (block + 1) * SECTORS <= end;
        let mut blocks = first / SECTORS..end.div_ceil(SECTORS);
        blocks.find(|block| !(partial && whole(block)) && self.is_rotten(*block))
    }

    /// Takes what a block should hold: it is written if it is what the block did hold.
    fn heal(&mut self, block: usize, data: &[u32]) -> Reply {
        if !self.is_rotten(block) {
            return Reply::Healed(false);
        }
        let Some(holder) = self.holder(block) else { return Reply::Healed(false) };
        if self.block(&self.head, block)[..] != *data {
            return Reply::Failed;
        }
        self.rotten.remove(&(holder, block));
        Reply::Healed(true)
    }

    /// All that is seen from a layer.
    pub fn view(&self, top: &Layer) -> Vec<u32> {
        (0..self.size).flat_map(|block| self.block(top, block)).collect()
    }

    /// All that is read.
    pub fn content(&self) -> Vec<u32> {
        self.view(&self.head)
    }

    /// Blocks that it holds.
    pub fn used(&self) -> usize {
        self.layers.values().chain([&self.head]).map(|layer| layer.blocks.len()).sum()
    }

    /// Takes a request; the process is running and open, or refuses.
    pub fn serve(&mut self, request: &Request, now: u64) -> Reply {
        if self.handed_over {
            return Reply::Refused(handed_over("/data"));
        }
        if !self.open {
            return Reply::Refused("the volume is not open".to_owned());
        }
        if self.failing > 0 {
            self.failing -= 1;
            self.blemished = true;
            // Sometimes it is half done.
            if let Request::Write { first, data } = request
                && data[0].is_multiple_of(2)
                && self.met(request).is_none()
            {
                self.write(*first, &data[..data.len() / 2]);
            }
            return Reply::Failed;
        }
        let (first, count) = match request {
            Request::Read { first, count } | Request::Unmap { first, count } => (*first, *count),
            Request::Write { first, data } => (*first, data.len()),
            Request::Heal { block, data } => (block * SECTORS, data.len()),
            Request::Flush | Request::Ping => (0, 0),
        };
        if first + count > self.sectors() {
            return Reply::Failed;
        }
        if let Some(block) = self.met(request) {
            return Reply::Damaged { block };
        }
        match request {
            Request::Flush | Request::Ping => Reply::Done,
            Request::Heal { block, data } => self.heal(*block, data),
            Request::Read { .. } => {
                let all = (first..first + count)
                    .map(|sector| self.block(&self.head, sector / SECTORS)[sector % SECTORS]);
                Reply::Data(all.collect())
            }
            Request::Write { data, .. } => {
                let written = self.write(first, data);
                self.dirty = true;
                self.modified = now as i64 * 1000;
                if written < data.len() {
                    self.blemished = true;
                    return Reply::NoSpace { written };
                }
                self.counter += 1;
                Reply::Done
            }
            Request::Unmap { .. } => {
                self.unmap(first, count);
                self.counter += 1;
                Reply::Done
            }
        }
    }

    /// Writes until it is full; answers with the sectors written.
    fn write(&mut self, first: usize, data: &[u32]) -> usize {
        for (done, value) in data.iter().enumerate() {
            let sector = first + done;
            let number = sector / SECTORS;
            if !self.head.blocks.contains_key(&number) {
                if self.used() >= self.capacity {
                    return done;
                }
                let block = self.block(&self.head, number);
                self.head.blocks.insert(number, block);
            }
            if let Some(block) = self.head.blocks.get_mut(&number) {
                block[sector % SECTORS] = *value;
            }
            // Only whole blocks get here that are rotten.
            self.rotten.remove(&(None, number));
        }
        data.len()
    }

    /// Discards whole blocks: what is seen from below is covered with zeros.
    fn unmap(&mut self, first: usize, count: usize) {
        for number in first.div_ceil(SECTORS)..(first + count) / SECTORS {
            self.head.blocks.remove(&number);
            self.rotten.remove(&(None, number));
            if self.block(&self.head, number) != Block::default() {
                self.head.blocks.insert(number, Block::default());
            }
        }
    }

    /// The process ends, by itself or by force.
    pub fn stop(&mut self) {
        self.alive = false;
        self.reset();
    }

    /// Nothing that was connected stays so.
    pub fn reset(&mut self) {
        self.open = false;
        self.session += 1;
        self.lanes.clear();
        self.staged.clear();
        self.syncing = false;
        self.sync_error.clear();
        self.filled = false;
    }

    /// Does what a call asks. What a stock replica may refuse, it refuses.
    pub fn call(&mut self, call: &Call, now: u64) -> Result<ptypes::Replica, String> {
        if self.handed_over {
            let text = handed_over("/data");
            return Err(match call {
                Call::Expand(_) => failure(ExpandCode::FunctionFailedWithoutRollback, &text),
                _ => text,
            });
        }
        let fails = self.failing_calls > 0 && !matches!(call, Call::Get | Call::Close);
        if fails {
            self.failing_calls -= 1;
            self.blemished = true;
            if self.failing_calls.is_multiple_of(2) {
                return Err(self.refusal(call));
            }
        }
        if call.needs_open() && !self.open {
            return Ok(self.info());
        }
        match call {
            Call::Open { .. } if self.open => return Err("replica is already open".to_owned()),
            Call::Open { .. } => {
                self.open = true;
                self.distrust(true);
            }
            // It may come late, when somebody else has opened it.
            Call::Close => {
                self.dirty = false;
                self.open = false;
                self.gate += 1;
                self.lanes.clear();
                self.blemished = true;
            }
            Call::SetRebuilding(rebuilding) => {
                let begins = !std::mem::replace(&mut self.rebuilding, *rebuilding);
                self.distrust(begins || self.head_stale);
                self.staged.clear();
                self.filled = false;
            }
            Call::SetCounter(counter) => self.counter = *counter,
            Call::Snapshot { name, .. } => self.snapshot(name)?,
            Call::Revert { disk, .. } if disk.is_empty() && self.taken_when_named => {
                self.handed_over = true;
                return Err(handed_over("/data"));
            }
            Call::Revert { disk, revert, .. } if disk.is_empty() => {
                self.revert.get_or_insert_with(|| revert.clone());
            }
            Call::Revert { disk, revert, .. } => self.revert(disk, revert)?,
            Call::Expand(size) => self.expand(*size as usize / (SECTORS * 512))?,
            Call::RemoveDisk(disk) => {
                self.rotten.retain(|(holder, _)| holder.as_ref() != Some(disk));
                let gone = self.layers.remove(disk);
                let parent = gone.and_then(|layer| layer.parent);
                for layer in self.layers.values_mut().chain([&mut self.head]) {
                    if layer.parent.as_ref() == Some(disk) {
                        layer.parent.clone_from(&parent);
                    }
                }
            }
            Call::Get
            | Call::SetUnmapMark(_)
            | Call::SetSnapshotMaxCount(_)
            | Call::SetSnapshotMaxSize(_) => {}
        }
        if call.needs_open() {
            self.modified = now as i64 * 1000;
        }
        if fails { Err("the answer was lost".to_owned()) } else { Ok(self.info()) }
    }

    /// Nothing that a marked replica has is known to be the volume's.
    fn distrust(&mut self, head: bool) {
        self.head_stale = self.rebuilding && head;
        let marked = self.layers.keys().filter(|_| self.rebuilding);
        self.stale = marked.cloned().collect();
    }

    /// Why it is not complete.
    fn unfilled(&self) -> String {
        let stale = self.stale.iter().find(|disk| self.layers.contains_key(*disk));
        match (self.filled, stale) {
            _ if !self.rebuilding => String::new(),
            (false, _) => "nothing came in".to_owned(),
            (true, stale) => {
                stale.map_or_else(String::new, |disk| format!("{disk} did not come in"))
            }
        }
    }

    fn refusal(&self, call: &Call) -> String {
        if let Call::Expand(_) = call {
            let code = if self.session.is_multiple_of(2) {
                ExpandCode::FunctionFailedRollbackSucceeded
            } else {
                ExpandCode::FunctionFailedWithoutRollback
            };
            return failure(code, "injected");
        }
        "injected".to_owned()
    }

    fn snapshot(&mut self, name: &str) -> Result<(), String> {
        let disk = format!("volume-snap-{name}.img");
        if self.layers.contains_key(&disk) {
            return Err(format!("snapshot {disk} is already existing"));
        }
        if self.layers.len() >= self.table {
            return Err(format!("failed to create new disk {name}: {FULL_TABLE}"));
        }
        if std::mem::take(&mut self.head_stale) {
            self.stale.insert(disk.clone());
        }
        let layer = std::mem::take(&mut self.head);
        let rotten = std::mem::take(&mut self.rotten).into_iter();
        let holder = |holder: Option<String>| holder.unwrap_or_else(|| disk.clone());
        self.rotten = rotten.map(|(its, block)| (Some(holder(its)), block)).collect();
        self.layers.insert(disk.clone(), layer);
        self.head.parent = Some(disk);
        self.heads += 1;
        self.revert = Some(String::new());
        Ok(())
    }

    fn revert(&mut self, disk: &str, revert: &str) -> Result<(), String> {
        if !self.layers.contains_key(disk) {
            return Err(format!("cannot revert to disk file {disk}"));
        }
        self.head = Layer { parent: Some(disk.to_owned()), ..Layer::default() };
        self.rotten.retain(|(holder, _)| holder.is_some());
        self.heads += 1;
        self.revert = Some(revert.to_owned());
        Ok(())
    }

    fn expand(&mut self, size: usize) -> Result<(), String> {
        if size > self.size {
            let taken = self.snapshot(&format!("expand-{}", size * SECTORS * 512));
            taken.map_err(|text| match text.as_str() {
                FULL_TABLE => failure(ExpandCode::FunctionFailedRollbackSucceeded, &text),
                _ => text,
            })?;
            self.size = size;
        }
        Ok(())
    }

    /// What came in becomes part of it.
    pub fn reload(&mut self) {
        for (disk, staged) in std::mem::take(&mut self.staged) {
            if let Staged::Blocks(_) = staged {
                self.stale.remove(&disk);
                self.rotten.retain(|(holder, _)| holder.as_ref() != Some(&disk));
            }
            let layer = self.layers.entry(disk).or_default();
            match staged {
                Staged::Blocks(blocks) => layer.blocks = blocks,
                Staged::Parent(parent) => layer.parent = parent,
            }
        }
    }

    pub fn state(&self) -> &'static str {
        match (self.open, self.rebuilding, self.dirty) {
            (false, ..) => "closed",
            (true, true, _) => "rebuilding",
            (true, false, true) => "dirty",
            (true, false, false) => "open",
        }
    }

    /// What ReplicaGet says.
    pub fn info(&self) -> ptypes::Replica {
        let mut info = ptypes::Replica {
            dirty: self.dirty,
            rebuilding: self.rebuilding,
            size: (self.sectors() * 512).to_string(),
            sector_size: 512,
            state: self.state().to_owned(),
            dbs: Some(ptypes::Facts { unfilled: self.unfilled(), revert: self.revert.clone() }),
            ..ptypes::Replica::default()
        };
        if !self.open {
            return info;
        }
        let head = format!("volume-head-{:03}.img", self.heads);
        info.chain = vec![head.clone()];
        let disk = |layer: &Layer| ptypes::DiskInfo {
            parent: layer.parent.clone().unwrap_or_default(),
            size: (layer.blocks.len() * 4096).to_string(),
            ..ptypes::DiskInfo::default()
        };
        info.disks = self.layers.iter().map(|(name, layer)| (name.clone(), disk(layer))).collect();
        info.disks.insert(head.clone(), disk(&self.head));
        info.head = head;
        info.snapshot_count_usage = self.layers.len() as i32;
        info.snapshot_count_total = self.layers.len() as i32 + 1;
        info.head_file_size = self.head.blocks.len() as i64 * 4096;
        info.last_modify_time = self.modified;
        info.revision_counter = self.counter;
        info.revision_counter_disabled = self.counter_disabled;
        info
    }
}

/// How a replica says that it failed to expand.
fn failure(code: ExpandCode, message: &str) -> String {
    format!(r#"{{"code":"{code:?}","message":"{message}","rollbackMessage":""}}"#)
}
