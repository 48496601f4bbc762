//! Objects in memory that fail when told to, and volumes in memory.

use dbs_backup::config::BackupConfig;
use dbs_backup::objects::{Allowed, Found, Objects, Stat};
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, CreateOptions, Created, Onto, Restored, Source, Target, Work};
use dbs_core::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

pub const BLOCK: u64 = 8192;
pub const VOLUME: &str = "vol-1";

/// What happens at the n-th call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails, and later ones do not.
    Fail,
    /// It and all later ones fail: the process was killed.
    Cut,
    /// It is carried out; then as `Cut`.
    CutAfter,
    /// It is carried out, and its answer is lost; later ones do not fail.
    Lost,
}

#[derive(Default)]
pub struct Memory {
    objects: Mutex<BTreeMap<String, (Vec<u8>, SystemTime)>>,
    /// Removed since the last `settle`.
    removed: Mutex<BTreeMap<String, (Vec<u8>, SystemTime)>>,
    /// Not durable before the next `settle`: somebody else has written them.
    volatile: Mutex<BTreeSet<String>>,
    calls: AtomicU64,
    /// Bytes of objects of which the start was read.
    pub read: AtomicU64,
    fault: Mutex<Option<(u64, Fault)>>,
    room: Mutex<Option<u64>>,
    at_put: Mutex<Option<Arc<AtPut>>>,
    at_walk: Mutex<Option<Arc<AtWalk>>>,
    at_remove: Mutex<Option<Arc<AtWalk>>>,
}

type AtPut = dyn Fn(&str, &[u8]) + Send + Sync;
type AtWalk = dyn Fn(&str) + Send + Sync;

thread_local! {
    /// What is written by what is called before a writing is called for nothing.
    static IN_HOOK: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

impl Memory {
    /// Lets the call fail that comes after `calls` further ones.
    pub fn set_fault(&self, fault: Option<(u64, Fault)>) {
        let calls = self.calls.load(Ordering::SeqCst);
        *self.fault.lock().unwrap() = fault.map(|(after, fault)| (calls + after, fault));
    }

    /// Calls this before each object is written.
    pub fn at_put(&self, call: impl Fn(&str, &[u8]) + Send + Sync + 'static) {
        *self.at_put.lock().unwrap() = Some(Arc::new(call));
    }

    /// Calls this before each walk.
    pub fn at_walk(&self, call: impl Fn(&str) + Send + Sync + 'static) {
        *self.at_walk.lock().unwrap() = Some(Arc::new(call));
    }

    /// Calls this before each object is removed.
    pub fn at_remove(&self, call: impl Fn(&str) + Send + Sync + 'static) {
        *self.at_remove.lock().unwrap() = Some(Arc::new(call));
    }

    /// Lets nothing be written that would make more than so many bytes of all objects.
    pub fn set_room(&self, room: Option<u64>) {
        *self.room.lock().unwrap() = room;
    }

    /// Bytes of all objects.
    pub fn bytes(&self) -> u64 {
        self.objects.lock().unwrap().values().map(|object| object.0.len() as u64).sum()
    }

    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    pub fn paths(&self) -> Vec<String> {
        self.objects.lock().unwrap().keys().cloned().collect()
    }

    pub fn edit(&self, part: &str, mut change: impl FnMut(&mut Vec<u8>)) -> usize {
        let mut objects = self.objects.lock().unwrap();
        let found = objects.iter_mut().filter(|(path, _)| path.contains(part));
        found.map(|(_, (content, _))| change(content)).count()
    }

    pub fn delete(&self, part: &str) -> usize {
        let mut objects = self.objects.lock().unwrap();
        let before = objects.len();
        objects.retain(|path, _| !path.contains(part));
        before - objects.len()
    }

    /// Everything that is there is old: locks mean nothing any more.
    pub fn age(&self) {
        self.age_by(Duration::from_secs(4000));
    }

    pub fn age_by(&self, time: Duration) {
        for (_, modified) in self.objects.lock().unwrap().values_mut() {
            *modified -= time;
        }
    }

    pub fn content(&self, path: &str) -> Option<Vec<u8>> {
        self.objects.lock().unwrap().get(path).map(|object| object.0.clone())
    }

    pub fn set(&self, path: &str, content: Option<Vec<u8>>) {
        let mut objects = self.objects.lock().unwrap();
        match content {
            Some(content) => drop(objects.insert(path.to_owned(), (content, SystemTime::now()))),
            None => drop(objects.remove(path)),
        }
    }

    /// Objects whose paths contain this are as somebody else has written them who syncs nothing.
    pub fn unsettle(&self, part: &str) {
        let paths = self.paths().into_iter().filter(|path| path.contains(part));
        self.volatile.lock().unwrap().extend(paths);
    }

    /// A power loss: what was written by others and not settled is gone, and what was removed and not settled is there
    /// again, if its path contains this.
    pub fn lose_power(&self, part: &str) {
        for path in std::mem::take(&mut *self.volatile.lock().unwrap()) {
            self.objects.lock().unwrap().remove(&path);
        }
        let removed = std::mem::take(&mut *self.removed.lock().unwrap());
        let back = removed.into_iter().filter(|(path, _)| path.contains(part));
        self.objects.lock().unwrap().extend(back);
    }

    /// Removes objects, which a power loss may bring back.
    fn take(&self, is_gone: impl Fn(&str) -> bool) {
        let mut objects = self.objects.lock().unwrap();
        let (gone, left): (BTreeMap<_, _>, _) =
            std::mem::take(&mut *objects).into_iter().partition(|(path, _)| is_gone(path));
        *objects = left;
        self.removed.lock().unwrap().extend(gone);
    }

    fn call<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        let fault = *self.fault.lock().unwrap();
        let failed = || Err(Error::io(std::io::Error::other("told to fail"), "the store"));
        match fault {
            Some((at, Fault::Fail)) if call == at => failed(),
            Some((at, Fault::Cut)) if call >= at => failed(),
            Some((at, Fault::CutAfter | Fault::Lost)) if call == at => {
                body();
                failed()
            }
            Some((at, Fault::CutAfter)) if call > at => failed(),
            _ => Ok(body()),
        }
    }
}

impl Objects for Memory {
    fn get(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let found = self.call(|| self.objects.lock().unwrap().get(path).map(|o| o.0.clone()))?;
        let found =
            found.ok_or_else(|| Error::not_found(format!("cannot find {path} in backupstore")))?;
        if found.len() as u64 > limit { Err(Error::corrupt("too long")) } else { Ok(found) }
    }

    fn get_range(&self, path: &str, start: u64, most: u64) -> Result<Vec<u8>> {
        let content = self.get(path, u64::MAX)?;
        let content: Vec<u8> =
            content.into_iter().skip(start as usize).take(most as usize).collect();
        self.read.fetch_add(content.len() as u64, Ordering::SeqCst);
        Ok(content)
    }

    fn put(&self, path: &str, content: &[u8]) -> Result<()> {
        let call = self.at_put.lock().unwrap().clone();
        if let Some(call) = call.filter(|_| !IN_HOOK.replace(true)) {
            call(path, content);
            IN_HOOK.set(false);
        }
        let room = *self.room.lock().unwrap();
        if room.is_some_and(|room| self.bytes() + content.len() as u64 > room) {
            return Err(Error::io(std::io::ErrorKind::StorageFull.into(), path.to_owned()));
        }
        let object = (content.to_vec(), SystemTime::now());
        self.call(|| {
            self.volatile.lock().unwrap().remove(path);
            self.objects.lock().unwrap().insert(path.to_owned(), object);
        })
    }

    fn stat(&self, path: &str) -> Result<Option<Stat>> {
        self.call(|| {
            let objects = self.objects.lock().unwrap();
            objects.get(path).map(|o| Stat { size: o.0.len() as u64, modified: o.1 })
        })
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        self.call(|| {
            let mut names = Vec::new();
            for path in self.objects.lock().unwrap().keys() {
                if let Some(rest) = path.strip_prefix(&format!("{folder}/")) {
                    names.push(rest.split('/').next().unwrap().to_owned());
                }
            }
            names.dedup();
            names
        })
    }

    fn walk(&self, folder: &str, found: Found<'_>) -> Result<()> {
        let call = self.at_walk.lock().unwrap().clone();
        if let Some(call) = call.filter(|_| !IN_HOOK.replace(true)) {
            call(folder);
            IN_HOOK.set(false);
        }
        let paths = self.call(|| self.paths())?;
        let size = |path: &String| self.objects.lock().unwrap().get(path).map(|o| o.0.len() as u64);
        let prefix = format!("{folder}/");
        let below = paths.iter().filter_map(|path| Some((path.strip_prefix(&prefix)?, size(path))));
        below.into_iter().try_for_each(|(path, size)| found(path, &|| size))
    }

    fn remove_if(&self, path: &str, allowed: Allowed<'_>) -> Result<()> {
        allowed()?;
        let call = self.at_remove.lock().unwrap().clone();
        if let Some(call) = call.filter(|_| !IN_HOOK.replace(true)) {
            call(path);
            IN_HOOK.set(false);
        }
        self.call(|| self.take(|there| there == path))
    }

    fn remove_all(&self, folder: &str) -> Result<()> {
        let prefix = format!("{folder}/");
        self.call(|| self.take(|there| there.starts_with(&prefix)))
    }

    fn settle(&self) -> Result<()> {
        self.call(|| {
            self.removed.lock().unwrap().clear();
            self.volatile.lock().unwrap().clear();
        })
    }
}

pub fn url() -> Url {
    Url::parse("vfs:///memory").unwrap()
}

pub fn store(objects: &Arc<Memory>) -> BackupStore {
    BackupStore::on(&url(), Arc::clone(objects) as Arc<dyn Objects>).without_waiting()
}

/// Snapshots of a volume, oldest first.
#[derive(Default, Clone)]
pub struct Snapshots(pub Vec<(String, Vec<u8>)>);

impl Snapshots {
    pub fn get(&self, name: &str) -> Snapshot<'_> {
        let at = self.0.iter().position(|(found, _)| found == name).expect(name);
        Snapshot { all: self, at, read: Mutex::default() }
    }

    /// The newest, changed at `offset`.
    pub fn push(&mut self, name: &str, offset: u64, bytes: &[u8]) {
        let mut content = self.0.last().unwrap().1.clone();
        content[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
        self.0.push((name.to_owned(), content));
    }
}

pub struct Snapshot<'a> {
    all: &'a Snapshots,
    at: usize,
    /// Bytes that were read.
    pub read: Mutex<u64>,
}

impl<'a> Snapshot<'a> {
    pub fn name(&self) -> &'a str {
        &self.all.0[self.at].0
    }

    pub fn content(&self) -> &'a [u8] {
        &self.all.0[self.at].1
    }
}

impl Source for Snapshot<'_> {
    fn size(&self) -> u64 {
        self.content().len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        *self.read.lock().unwrap() += buf.len() as u64;
        buf.copy_from_slice(&self.content()[offset as usize..offset as usize + buf.len()]);
        Ok(())
    }

    fn ranges(
        &self,
        base: Option<&BackupConfig>,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<bool> {
        let empty = vec![0; self.content().len()];
        let base = match base {
            None => &empty,
            Some(base) => match self.all.0.iter().find(|(name, _)| *name == base.snapshot_name) {
                None => return Ok(false),
                Some((_, content)) => content,
            },
        };
        for (index, part) in self.content().chunks(512).enumerate() {
            let at = index * 512;
            if base.get(at..at + part.len()) != Some(part) {
                found(at as u64..(at + part.len()) as u64)?;
            }
        }
        Ok(true)
    }
}

/// A volume that is restored to.
pub struct Disk(pub Mutex<Vec<u8>>);

impl Disk {
    pub fn new(content: Vec<u8>) -> Self {
        Self(Mutex::new(content))
    }

    pub fn content(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

impl Target for Disk {
    fn size(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        buf.copy_from_slice(&self.0.lock().unwrap()[offset as usize..offset as usize + buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.0.lock().unwrap()[offset as usize..offset as usize + buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64) -> Result<()> {
        self.0.lock().unwrap()[offset as usize..(offset + length) as usize].fill(0);
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }
}

pub fn options(backup: &str, snapshot: &str) -> CreateOptions {
    CreateOptions {
        volume: VOLUME.to_owned(),
        snapshot: snapshot.to_owned(),
        backup: Some(backup.to_owned()),
        block_size: Some(BLOCK),
        ..CreateOptions::default()
    }
}

pub fn create(store: &BackupStore, backup: &str, source: &Snapshot<'_>) -> Result<Created> {
    store.create(source, options(backup, source.name()))?.run(&mut Work::new(&mut |_, _| true))
}

pub fn restore(store: &BackupStore, backup: &str, disk: &Disk, onto: Onto<'_>) -> Result<Restored> {
    store.restore(VOLUME, backup)?.run(disk, onto, &mut Work::new(&mut |_, _| true))
}

pub fn remove(store: &BackupStore, backup: &str) -> Result<dbs_backup::Removed> {
    store.remove(VOLUME, backup, &mut Work::new(&mut |_, _| true))
}

/// Deletes backups together.
pub fn remove_some(store: &BackupStore, backups: &[&str]) -> Result<dbs_backup::Removed> {
    store.remove_some(VOLUME, backups, &mut Work::new(&mut |_, _| true))
}

pub fn remove_volume(store: &BackupStore, volume: &str) -> Result<()> {
    store.remove_volume(volume, &mut Work::new(&mut |_, _| true))
}

/// A volume of `blocks` blocks and a half, with different content in every second one.
pub fn volume(seed: u64, blocks: u64) -> Snapshots {
    let mut content = vec![0; (blocks * BLOCK + BLOCK / 2) as usize];
    let mut random = fastrand::Rng::with_seed(seed);
    for block in content.chunks_mut(BLOCK as usize).step_by(2) {
        random.fill(block);
    }
    Snapshots(vec![("one".to_owned(), content)])
}
