//! Random histories of a replica against a model of upstream's chain: names, parents, marks, counts,
//! and what is read of the head and of every snapshot one could go back to.

use crate::support::{BLOCK, NOW, disk, open_store, options, tempdir};
use dbs_core::Store;
use dbs_core::info::{Labels, Severity};
use longhorn_data::Access;
use longhorn_replica::replica::{Replica, StoreSource};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};
use std::collections::BTreeMap;
use std::sync::Arc;
use tempfile::TempDir;

const BLOCKS: u64 = 24;
const GROWTH: u64 = 8;
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

#[derive(Debug, Clone)]
enum Op {
    Write(u64, u8),
    /// In bytes.
    Unmap(u64, u64),
    Mark(usize),
    UnmapMark(bool),
    Snapshot(usize, bool),
    Revert(usize),
    Expand,
    Remove(usize, bool),
    Replace(usize, usize),
    Prepare(usize),
    MaxCount(i32),
    Work(u64),
    Reopen,
    Restart,
    Kill,
}

fn op() -> impl Strategy<Value = Op> {
    let name = || 0..NAMES.len();
    prop_oneof![
        8 => (0..BLOCKS + GROWTH, 1u8..).prop_map(|(block, byte)| Op::Write(block, byte)),
        3 => (0..BLOCKS * 8, 0..64u64).prop_map(|(at, n)| Op::Unmap(at * 512, n * 512)),
        4 => name().prop_map(Op::Mark),
        1 => any::<bool>().prop_map(Op::UnmapMark),
        6 => (name(), any::<bool>()).prop_map(|(n, user)| Op::Snapshot(n, user)),
        3 => name().prop_map(Op::Revert),
        1 => Just(Op::Expand),
        3 => (name(), any::<bool>()).prop_map(|(n, force)| Op::Remove(n, force)),
        2 => (name(), name()).prop_map(|(t, s)| Op::Replace(t, s)),
        2 => name().prop_map(Op::Prepare),
        1 => (2..6i32).prop_map(Op::MaxCount),
        3 => (1..20u64).prop_map(Op::Work),
        1 => Just(Op::Reopen),
        1 => Just(Op::Restart),
        1 => Just(Op::Kill),
    ]
}

/// A snapshot: what one reads through it, and its place.
#[derive(Debug, Clone)]
struct Snap {
    parent: Option<String>,
    removed: bool,
    user_created: bool,
    content: Vec<u8>,
}

/// What upstream's replica would know. Blocks are single bytes.
#[derive(Debug, Clone)]
struct Model {
    snaps: BTreeMap<String, Snap>,
    head: u64,
    parent: Option<String>,
    content: Vec<u8>,
    dirty: bool,
    unmap_mark: bool,
    max_count: i32,
}

impl Model {
    fn new() -> Self {
        Self {
            snaps: BTreeMap::new(),
            head: 0,
            parent: None,
            content: vec![0; BLOCKS as usize],
            dirty: false,
            unmap_mark: false,
            max_count: 250,
        }
    }

    /// Snapshots on this one, and whether the head is on it.
    fn children(&self, name: &str) -> (Vec<&String>, bool) {
        let on = |snap: &Snap| snap.parent.as_deref() == Some(name);
        let snaps = self.snaps.iter().filter(|(_, snap)| on(snap)).map(|(name, _)| name);
        (snaps.collect(), self.parent.as_deref() == Some(name))
    }

    fn count(&self, name: &str) -> usize {
        let (snaps, head) = self.children(name);
        snaps.len() + usize::from(head)
    }

    fn usage(&self) -> i32 {
        self.snaps.values().filter(|snap| !snap.removed).count() as i32
    }

    fn freeze(&mut self, name: &str, user_created: bool) -> bool {
        if self.max_count <= self.usage() || self.snaps.contains_key(name) {
            return false;
        }
        let parent = self.parent.replace(name.to_owned());
        let content = self.content.clone();
        let snap = Snap { parent, removed: false, user_created, content };
        self.snaps.insert(name.to_owned(), snap);
        (self.head, self.dirty) = (self.head + 1, true);
        true
    }

    fn revert(&mut self, name: &str) -> bool {
        let Some(snap) = self.snaps.get(name).filter(|snap| !snap.removed) else { return false };
        let size = self.content.len();
        self.content.clone_from(&snap.content);
        self.content.resize(size, 0);
        self.parent = Some(name.to_owned());
        self.head += 1;
        true
    }

    fn expand(&mut self) -> bool {
        let blocks = self.content.len() as u64 + GROWTH;
        if blocks > BLOCKS + GROWTH || !self.freeze(&expansion(blocks), false) {
            return blocks > BLOCKS + GROWTH;
        }
        self.content.resize(blocks as usize, 0);
        true
    }

    fn drop_snap(&mut self, name: &str) {
        let gone = self.snaps.remove(name).unwrap();
        for snap in self.snaps.values_mut().filter(|snap| snap.parent.as_deref() == Some(name)) {
            snap.parent.clone_from(&gone.parent);
        }
        if self.parent.as_deref() == Some(name) {
            self.parent = gone.parent;
        }
    }

    fn remove(&mut self, name: &str, force: bool) -> bool {
        if self.count(name) > 1 && !force {
            return false;
        }
        if self.snaps.contains_key(name) {
            self.drop_snap(name);
        }
        true
    }

    fn replace(&mut self, target: &str, source: &str) -> bool {
        let (snaps, head) = self.children(source);
        let fits = !head && snaps == [target];
        if fits {
            self.drop_snap(source);
        }
        fits
    }

    /// Actions by name, or `None` for an error.
    fn prepare(&self, name: &str) -> Option<Vec<&'static str>> {
        let Some(snap) = self.snaps.get(name) else { return Some(Vec::new()) };
        let (snaps, head) = self.children(name);
        snap.removed.then(|| match (snaps.len(), head) {
            (0, false) => vec!["remove"],
            (0, true) => vec!["prune"],
            (1, false) => vec!["coalesce", "replace"],
            _ => Vec::new(),
        })
    }

    fn unmap(&mut self, offset: u64, length: u64) {
        let size = self.content.len() as u64 * BLOCK as u64;
        let end = (offset + length).min(size) / BLOCK as u64;
        let start = offset.div_ceil(BLOCK as u64);
        if start >= end {
            return;
        }
        self.content[start as usize..end as usize].fill(0);
        let mut next = self.parent.clone().filter(|_| self.unmap_mark);
        while let Some(name) = next.filter(|name| self.count(name) == 1) {
            let snap = self.snaps.get_mut(&name).unwrap();
            snap.removed = true;
            next = snap.parent.clone();
        }
    }

    fn chain(&self) -> Vec<String> {
        let mut chain = vec![self.head_disk()];
        let mut next = self.parent.clone();
        while let Some(name) = next {
            let snap = &self.snaps[&name];
            if !snap.removed {
                chain.push(disk(&name));
            }
            next = snap.parent.clone();
        }
        chain
    }

    fn head_disk(&self) -> String {
        format!("volume-head-{:03}.img", self.head)
    }
}

fn expansion(blocks: u64) -> String {
    format!("expand-{}", blocks * BLOCK as u64)
}

/// The replica in a process that may end.
struct Real {
    dir: Arc<TempDir>,
    store: Store,
    replica: Arc<Replica>,
}

impl Real {
    fn start(dir: Arc<TempDir>, model: &Model) -> Self {
        let store = open_store(dir.path());
        let mut options = options(dir.path());
        options.unmap_mark = model.unmap_mark;
        options.snapshot_max_count = model.max_count;
        let replica = Replica::new(options, StoreSource::Own(store.clone())).unwrap();
        Self { dir, store, replica }
    }

    /// Ends the process, and starts and opens another.
    fn restart(self, model: &Model, orderly: bool) -> Self {
        let Self { dir, store, replica } = self;
        drop(replica);
        if orderly {
            store.close().unwrap();
        } else {
            drop(store);
        }
        let next = Self::start(dir, model);
        next.replica.open(false, 0).unwrap();
        next
    }

    fn active(&self) -> Arc<longhorn_data::Active> {
        match self.replica.gate().access() {
            Access::Open(active) => active,
            other => panic!("{other:?}"),
        }
    }

    fn content(&self, spec: &str) -> Vec<u8> {
        let volume = self.store.volume(spec).unwrap();
        let mut bytes = vec![0; volume.size() as usize];
        volume.read_at(0, &mut bytes).unwrap();
        let blocks = bytes.chunks(BLOCK).map(|block| {
            assert!(block.iter().all(|byte| *byte == block[0]), "{spec}: a mixed block");
            block[0]
        });
        blocks.collect()
    }
}

/// Does the same to both; whether both agree that it works.
fn step(op: &Op, real: &mut Option<Real>, model: &mut Model) -> Result<(), TestCaseError> {
    let here = real.as_ref().unwrap();
    let replica = &here.replica;
    let agree = |expected: bool, outcome: Result<(), String>| {
        prop_assert_eq!(outcome.is_ok(), expected, "{:?}: {:?}", op, outcome);
        Ok(())
    };
    let text = |outcome: dbs_core::Result<()>| outcome.map_err(|e| e.to_string());
    match *op {
        Op::Write(block, byte) => {
            if block < model.content.len() as u64 {
                model.content[block as usize] = byte;
                model.dirty = true;
                let active = here.active();
                let volume = active.volume().unwrap();
                volume.write_at(block * BLOCK as u64, &[byte; BLOCK], false).unwrap();
                active.change();
            }
        }
        Op::Unmap(offset, length) => {
            let active = here.active();
            let length = length.min(active.size() - offset);
            active.events().unmap(offset, length).unwrap();
            model.unmap(offset, length);
        }
        Op::Mark(name) => {
            agree(true, text(replica.mark_removed(NAMES[name])))?;
            if let Some(snap) = model.snaps.get_mut(NAMES[name]) {
                snap.removed = true;
            }
        }
        Op::UnmapMark(on) => {
            replica.set_unmap_mark(on);
            model.unmap_mark = on;
        }
        Op::Snapshot(name, user) => {
            let name = NAMES[name];
            let done = replica.snapshot(name, user, NOW, Labels::new());
            agree(model.freeze(name, user), text(done))?;
        }
        Op::Revert(name) => {
            let done = replica.revert(&disk(NAMES[name]), NOW);
            agree(model.revert(NAMES[name]), text(done))?;
        }
        Op::Expand => {
            let size = (model.content.len() as u64 + GROWTH).min(BLOCKS + GROWTH) * BLOCK as u64;
            let done = replica.expand(size as i64).map_err(|e| e.to_string());
            agree(model.expand(), done)?;
        }
        Op::Remove(name, force) => {
            let done = replica.remove(&disk(NAMES[name]), force);
            agree(model.remove(NAMES[name], force), text(done))?;
        }
        Op::Replace(target, source) => {
            let (target, source) = (NAMES[target], NAMES[source]);
            let done = replica.replace(&disk(target), &disk(source));
            agree(model.replace(target, source), text(done))?;
        }
        Op::Prepare(name) => {
            let done = replica.prepare_remove(NAMES[name]);
            let done = done.ok().map(|all| all.into_iter().map(|a| a.action).collect::<Vec<_>>());
            let expected = model.prepare(NAMES[name]);
            let expected = expected.map(|all| all.into_iter().map(str::to_owned).collect());
            prop_assert_eq!(done, expected);
        }
        Op::MaxCount(count) => {
            replica.set_snapshot_max_count(count);
            model.max_count = count;
        }
        Op::Work(steps) => {
            here.store.work(steps).unwrap();
        }
        Op::Reopen => {
            replica.close().unwrap();
            replica.open(false, 0).unwrap();
            model.dirty = false;
        }
        Op::Restart | Op::Kill => {
            let orderly = matches!(op, Op::Restart);
            // A process that ends without being told has no time to close the replica.
            *real = Some(real.take().unwrap().restart(model, orderly));
            model.dirty = true;
        }
    }
    Ok(())
}

fn compare(real: &Real, model: &Model) -> Result<(), TestCaseError> {
    let message = real.replica.get().unwrap();
    prop_assert_eq!(message.state, if model.dirty { "dirty" } else { "open" });
    prop_assert_eq!(&message.head, &model.head_disk());
    prop_assert_eq!(message.size, (model.content.len() * BLOCK).to_string());
    prop_assert_eq!(message.chain, model.chain());
    prop_assert_eq!(message.parent, model.parent.as_deref().map(disk).unwrap_or_default());
    prop_assert_eq!(message.snapshot_count_usage, model.usage());
    prop_assert_eq!(message.remain_snapshots, model.max_count - model.usage());
    prop_assert_eq!(message.snapshot_count_total as usize, model.snaps.len() + 1);
    prop_assert_eq!(message.disks.len(), model.snaps.len() + 1);
    for (name, snap) in &model.snaps {
        let info = &message.disks[&disk(name)];
        prop_assert_eq!(&info.parent, &snap.parent.as_deref().map(disk).unwrap_or_default());
        prop_assert_eq!((info.removed, info.user_created), (snap.removed, snap.user_created));
        prop_assert_eq!(info.children.len(), model.count(name));
        prop_assert_eq!(info.size.parse::<u64>().unwrap() % BLOCK as u64, 0);
        if !snap.removed {
            prop_assert_eq!(real.content(&format!("vol@{name}")), snap.content.clone());
        }
    }
    prop_assert_eq!(real.content("vol"), model.content.clone());
    Ok(())
}

#[test]
fn random_histories_look_as_upstreams_chain_would() {
    let cases = std::env::var("DBS_REPLICA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    proptest!(config, |(ops in proptest::collection::vec(op(), 1..80))| {
        let mut model = Model::new();
        let real = Real::start(Arc::new(tempdir()), &model);
        real.replica.create(BLOCKS * BLOCK as u64).unwrap();
        real.replica.open(false, 0).unwrap();
        let mut real = Some(real);
        for op in &ops {
            step(op, &mut real, &mut model)?;
            compare(real.as_ref().unwrap(), &model)?;
        }
        let real = real.unwrap();
        while real.store.work(64).unwrap().remaining > 0 {}
        compare(&real, &model)?;
        let Real { dir, store, replica } = real;
        replica.close().unwrap();
        drop(replica);
        store.close().unwrap();
        let report = Store::check_path(&crate::support::store_file(dir.path())).unwrap();
        prop_assert!(report.worst().is_none_or(|worst| worst < Severity::Leak));
    });
}
