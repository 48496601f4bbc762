//! A store in memory, for tests: the semantics of the real one, as far as transfers need them.

use super::{BlockAccess, SendOptions, StoreAccess, send};
use dbs_core::info::{Labels, MapRange, RangeState, SnapshotInfo, Usage, VolumeInfo};
use dbs_core::store::{SnapshotOptions, WrappedKey};
use dbs_core::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

const BLOCK: usize = 4096;

/// The stream of this snapshot of volume `v`.
pub(super) fn sent(
    store: &dyn StoreAccess,
    name: &str,
    base: Option<&str>,
    resume: Option<&str>,
) -> Vec<u8> {
    let options = SendOptions {
        volume: "v".into(),
        snapshot: name.into(),
        base: base.map(Into::into),
        resume: resume.map(|token| token.parse().unwrap()),
        more: false,
    };
    let mut bytes = Vec::new();
    send(store, &options, &mut bytes, &mut |_, _| true).unwrap();
    bytes
}

/// Content of a volume or snapshot: its bytes, and what each block is.
#[derive(Clone, PartialEq)]
pub(super) struct Content {
    pub bytes: Vec<u8>,
    pub states: Vec<RangeState>,
}

impl Content {
    fn new(size: u64) -> Self {
        let blocks = (size as usize).div_ceil(BLOCK);
        Self { bytes: vec![0; size as usize], states: vec![RangeState::Hole; blocks] }
    }

    fn resize(&mut self, size: u64) {
        self.bytes.resize(size as usize, 0);
        self.states.resize((size as usize).div_ceil(BLOCK), RangeState::Hole);
    }

    fn set(&mut self, offset: u64, length: u64, state: RangeState) {
        let (start, end) = (offset as usize / BLOCK, ((offset + length) as usize).div_ceil(BLOCK));
        self.states[start..end].fill(state);
    }
}

/// A volume or snapshot on its own.
#[derive(Clone)]
pub(super) struct Memory(Arc<Mutex<Content>>);

impl Memory {
    pub(super) fn new(size: u64) -> Self {
        Self(Arc::new(Mutex::new(Content::new(size))))
    }

    pub(super) fn content(&self) -> MutexGuard<'_, Content> {
        self.0.lock().unwrap()
    }

    /// Bytes that take space.
    pub(super) fn allocated(&self) -> u64 {
        let content = self.content();
        content.states.iter().filter(|s| **s == RangeState::Data).count() as u64 * BLOCK as u64
    }
}

impl BlockAccess for Memory {
    fn size(&self) -> u64 {
        self.content().bytes.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let offset = offset as usize;
        buf.copy_from_slice(&self.content().bytes[offset..offset + buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let mut content = self.content();
        content.bytes[offset as usize..][..buf.len()].copy_from_slice(buf);
        content.set(offset, buf.len() as u64, RangeState::Data);
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        let mut content = self.content();
        content.bytes[offset as usize..][..length as usize].fill(0);
        if offset.is_multiple_of(BLOCK as u64) && length.is_multiple_of(BLOCK as u64) {
            content.set(offset, length, RangeState::Zero);
        }
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.write_zeroes(offset, length)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<MapRange>> {
        let content = self.content();
        let mut ranges = Vec::new();
        let mut at = offset;
        while at < offset + length && ranges.len() <= limit {
            let index = at as usize / BLOCK;
            let end = ((index as u64 + 1) * BLOCK as u64).min(offset + length);
            push(&mut ranges, at, end, content.states[index]);
            at = end;
        }
        ranges.truncate(limit);
        Ok(ranges)
    }
}

fn push(ranges: &mut Vec<MapRange>, at: u64, end: u64, state: RangeState) {
    match ranges.last_mut() {
        Some(last) if last.state == state && last.offset + last.length == at => {
            last.length = end - last.offset;
        }
        _ => ranges.push(MapRange { offset: at, length: end - at, state }),
    }
}

struct MemoryVolume {
    head: Memory,
    /// The snapshot below the head, with its volume.
    parent: Option<String>,
    snapshots: Vec<(SnapshotInfo, Memory)>,
    rebuilding: bool,
}

/// What others do while something is looked at.
type Meanwhile = Box<dyn FnMut(&MemoryStore) + Send>;

/// The store.
#[derive(Default)]
pub(super) struct MemoryStore {
    volumes: Mutex<BTreeMap<String, MemoryVolume>>,
    uuids: Mutex<u64>,
    meanwhile: Mutex<Option<Meanwhile>>,
}

impl MemoryStore {
    /// A store whose uuids start with this number.
    pub(super) fn new(seed: u64) -> Self {
        Self { uuids: Mutex::new(seed << 16), ..Self::default() }
    }

    pub(super) fn create_volume(&self, name: &str, size: u64) -> Result<()> {
        self.create_rebuilding(name, size)?;
        self.complete(name)
    }

    pub(super) fn delete_volume(&self, volume: &str) {
        self.volumes.lock().unwrap().remove(volume).unwrap();
    }

    /// Has this done right before and right after each difference that is asked for.
    pub(super) fn meanwhile(&self, others: impl FnMut(&Self) + Send + 'static) {
        *self.meanwhile.lock().unwrap() = Some(Box::new(others));
    }

    fn others(&self) {
        if let Some(others) = &mut *self.meanwhile.lock().unwrap() {
            others(self);
        }
    }

    pub(super) fn memory(&self, spec: &str) -> Memory {
        self.find(spec).unwrap()
    }

    fn find(&self, spec: &str) -> Result<Memory> {
        let volumes = self.volumes.lock().unwrap();
        let (volume, snapshot) = spec.split_once('@').unwrap_or((spec, ""));
        let volume = volumes.get(volume).ok_or_else(|| Error::not_found(spec))?;
        if snapshot.is_empty() {
            return Ok(volume.head.clone());
        }
        let found = volume.snapshots.iter().find(|s| s.0.name == snapshot);
        found.map(|s| s.1.clone()).ok_or_else(|| Error::not_found(spec))
    }

    fn with<T>(&self, volume: &str, f: impl FnOnce(&mut MemoryVolume) -> Result<T>) -> Result<T> {
        let mut volumes = self.volumes.lock().unwrap();
        f(volumes.get_mut(volume).ok_or_else(|| Error::not_found(volume))?)
    }
}

impl StoreAccess for MemoryStore {
    fn volumes(&self) -> Result<Vec<VolumeInfo>> {
        let names: Vec<_> = self.volumes.lock().unwrap().keys().cloned().collect();
        names.iter().map(|name| self.volume_info(name)).collect()
    }

    fn volume_info(&self, volume: &str) -> Result<VolumeInfo> {
        self.with(volume, |v| {
            let own = format!("{volume}@");
            let parents = v.snapshots.iter().filter_map(|s| s.0.parent.clone());
            Ok(VolumeInfo {
                name: volume.into(),
                uuid: String::new(),
                size: v.head.size(),
                created_ns: 0,
                parent: v.parent.clone(),
                origin: parents.chain(v.parent.clone()).find(|spec| !spec.starts_with(&own)),
                snapshots: v.snapshots.len() as u64,
                depth: 0,
                open: false,
                rebuilding: v.rebuilding,
                revision: 0,
                limits: Default::default(),
                backing: None,
                encryption: None,
                usage: Usage::default(),
            })
        })
    }

    fn snapshots(&self, volume: &str) -> Result<Vec<SnapshotInfo>> {
        self.with(volume, |v| Ok(v.snapshots.iter().map(|s| s.0.clone()).collect()))
    }

    fn snapshot_info(&self, volume: &str, snapshot: &str) -> Result<SnapshotInfo> {
        let found = self.snapshots(volume)?.into_iter().find(|s| s.name == snapshot);
        found.ok_or_else(|| Error::not_found(snapshot))
    }

    fn children(&self, volume: &str, snapshot: Option<&str>) -> Result<Vec<String>> {
        assert_eq!(snapshot, None, "nothing here has no name");
        let own = format!("{volume}@");
        let of_own = |info: &VolumeInfo| info.origin.as_ref().is_some_and(|o| o.starts_with(&own));
        let all = self.volumes()?.into_iter();
        Ok(all.filter(of_own).map(|info| info.name).collect())
    }

    fn create_rebuilding(&self, name: &str, size: u64) -> Result<()> {
        let (head, snapshots) = (Memory::new(size), Vec::new());
        let volume = MemoryVolume { head, parent: None, snapshots, rebuilding: true };
        match self.volumes.lock().unwrap().insert(name.into(), volume) {
            None => Ok(()),
            Some(_) => Err(Error::exists(name)),
        }
    }

    fn create_wrapped(&self, _: &str, _: u64, _: &WrappedKey) -> Result<()> {
        Err(Error::unsupported("nothing here is encrypted"))
    }

    fn wrapped_key(&self, _: &str) -> Result<WrappedKey> {
        Err(Error::unsupported("nothing here is encrypted"))
    }

    fn open_stored(&self, _: &str) -> Result<Box<dyn BlockAccess>> {
        Err(Error::unsupported("nothing here is encrypted"))
    }

    fn clone_rebuilding(&self, volume: &str, snapshot: &str, new: &str) -> Result<()> {
        let spec = format!("{volume}@{snapshot}");
        let content = self.find(&spec)?.content().clone();
        self.create_rebuilding(new, 0)?;
        self.with(new, |v| {
            (v.head, v.parent) = (Memory(Arc::new(Mutex::new(content))), Some(spec));
            Ok(())
        })
    }

    fn complete(&self, volume: &str) -> Result<()> {
        self.with(volume, |v| {
            v.rebuilding = false;
            Ok(())
        })
    }

    fn resize_volume(&self, name: &str, size: u64) -> Result<()> {
        self.find(name)?.content().resize(size);
        Ok(())
    }

    fn create_snapshot(&self, volume: &str, name: &str, options: &SnapshotOptions) -> Result<()> {
        let mut uuids = self.uuids.lock().unwrap();
        *uuids += 1;
        self.with(volume, |v| {
            if v.snapshots.iter().any(|s| s.0.name == name) {
                return Err(Error::exists(name));
            }
            // Else somebody could begin to fill it once more before it is complete.
            let open = Arc::strong_count(&v.head.0) > 1;
            assert!(open || options.rebuilding != Some(false), "{volume} is open by nobody");
            let content = v.head.content().clone();
            let info = SnapshotInfo {
                volume: volume.into(),
                name: name.into(),
                uuid: format!("00000000-0000-4000-8000-{:012x}", *uuids),
                size: content.bytes.len() as u64,
                created_ns: *uuids,
                parent: v.parent.clone(),
                children: Vec::new(),
                protected: false,
                retired: false,
                user_created: !options.system,
                labels: options.labels.clone(),
                rebuilds: 0,
                usage: Usage::default(),
            };
            v.snapshots.push((info, Memory(Arc::new(Mutex::new(content)))));
            v.parent = Some(format!("{volume}@{name}"));
            v.rebuilding = options.rebuilding.unwrap_or(v.rebuilding);
            Ok(())
        })
    }

    fn delete_snapshot(&self, volume: &str, name: &str) -> Result<()> {
        self.with(volume, |v| {
            let index = v.snapshots.iter().position(|s| s.0.name == name);
            let (gone, _) = v.snapshots.remove(index.ok_or_else(|| Error::not_found(name))?);
            let full = format!("{volume}@{name}");
            for (info, _) in &mut v.snapshots {
                if info.parent.as_ref() == Some(&full) {
                    info.parent.clone_from(&gone.parent);
                }
            }
            if v.parent == Some(full) {
                v.parent = gone.parent;
            }
            Ok(())
        })
    }

    fn rollback(&self, volume: &str, snapshot: &str) -> Result<()> {
        let content = self.find(&format!("{volume}@{snapshot}"))?.content().clone();
        self.with(volume, |v| {
            v.head = Memory(Arc::new(Mutex::new(content)));
            v.parent = Some(format!("{volume}@{snapshot}"));
            Ok(())
        })
    }

    fn set_labels(&self, volume: &str, snapshot: &str, labels: &Labels) -> Result<()> {
        self.with(volume, |v| {
            let found = v.snapshots.iter_mut().find(|s| s.0.name == snapshot);
            found.ok_or_else(|| Error::not_found(snapshot))?.0.labels.clone_from(labels);
            Ok(())
        })
    }

    fn diff(
        &self,
        volume: &str,
        from: Option<&str>,
        to: Option<&str>,
        offset: u64,
        length: u64,
    ) -> Result<Vec<MapRange>> {
        self.others();
        let to = to.map_or_else(|| volume.to_owned(), |to| format!("{volume}@{to}"));
        let to = self.find(&to)?.content().clone();
        let from = match from {
            Some(from) if from.contains('@') => self.find(from)?.content().clone(),
            Some(from) => self.find(&format!("{volume}@{from}"))?.content().clone(),
            None => Content::new(to.bytes.len() as u64),
        };
        let mut ranges = Vec::new();
        for at in (offset..offset + length).step_by(BLOCK) {
            let end = (at as usize + BLOCK).min(to.bytes.len());
            let new = &to.bytes[at as usize..end];
            let same = from.bytes.get(at as usize..end) == Some(new);
            if !same {
                push(&mut ranges, at, end as u64, to.states[at as usize / BLOCK]);
            }
        }
        self.others();
        Ok(ranges)
    }

    fn open(&self, spec: &str) -> Result<Box<dyn BlockAccess>> {
        Ok(Box::new(self.find(spec)?))
    }

    fn open_to_fill(&self, volume: &str, stored: bool) -> Result<Box<dyn BlockAccess>> {
        assert!(!stored);
        assert!(self.volume_info(volume)?.rebuilding, "{volume} is complete");
        self.open(volume)
    }
}
