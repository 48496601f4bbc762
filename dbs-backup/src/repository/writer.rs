//! Writing packs and indexes: section 8 of `docs/repository.md`.

use super::format::{
    self, BLOBS_MAX, BlobKind, Entry, INDEX_LIMIT, INDEX_PACKS, LIST, Manifest, PackIndex,
};
use super::keys::{Kind, Sealer};
use super::{Id, Repository};
use crate::blocks::is_zero;
use crate::codec::Method;
use crate::config::BackupConfig;
use crate::names::{BlockName, hex};
use crate::pool::Rate;
use dbs_core::{Error, Result};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// A pack is closed when its blobs have so many bytes.
const PACK_FULL: usize = 32 << 20;
/// Packs that are sent at once: each takes memory for two.
const SENT_AT_ONCE: usize = 2;

/// Writes what a backup needs and is not there.
pub(crate) struct Writer {
    repository: Arc<Repository>,
    /// Packs that are filled: one of chunks and one of lists, so that the lists of a backup are together.
    open: [Mutex<Option<Open>>; 2],
    /// Packs that no index names yet.
    written: Mutex<Vec<PackIndex>>,
    turns: [Mutex<()>; SENT_AT_ONCE],
    turn: AtomicUsize,
    uploaded: AtomicU64,
}

/// A pack that is filled.
struct Open {
    id: Id,
    sealer: Sealer,
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

/// What became of the end of a backup.
pub(crate) enum Ended {
    /// It is complete.
    Complete,
    /// Something that it needs has gone.
    Gone,
}

impl Writer {
    pub fn new(repository: &Arc<Repository>) -> Self {
        Self {
            repository: Arc::clone(repository),
            open: Default::default(),
            written: Mutex::default(),
            turns: Default::default(),
            turn: AtomicUsize::new(0),
            uploaded: AtomicU64::new(0),
        }
    }

    /// Bytes of objects that were written.
    pub fn uploaded(&self) -> u64 {
        self.uploaded.load(Ordering::SeqCst)
    }

    /// Adds a chunk; returns the bytes that it takes. It is durable after the next `flush`.
    ///
    /// # Errors
    /// Those of the store.
    pub fn add_chunk(
        &self,
        name: BlockName,
        content: &[u8],
        method: Method,
        rate: &Rate<'_>,
    ) -> Result<u64> {
        let compressed = match method {
            Method::None => None,
            _ => Some(lz4_flex::block::compress(content)),
        };
        let compressed = compressed.filter(|compressed| compressed.len() < content.len());
        let stored = compressed.as_deref().unwrap_or(content);
        rate.wait(stored.len() as u64);
        let entry = (BlobKind::Chunk, name, content.len() as u32, compressed.is_some());
        self.add(entry, stored)?;
        Ok(stored.len() as u64)
    }

    /// Adds a list. It is durable after the next `flush`.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn add_list(&self, name: BlockName, ids: &[u8]) -> Result<()> {
        self.add((BlobKind::List, name, ids.len() as u32, false), ids)
    }

    fn add(&self, blob: (BlobKind, BlockName, u32, bool), stored: &[u8]) -> Result<()> {
        let (kind, name, bytes, is_lz4) = blob;
        let full = {
            let mut open = lock(&self.open[kind as usize - 1]);
            let pack = match &mut *open {
                Some(pack) => pack,
                none => none.insert(self.begin()?),
            };
            let offset = pack.bytes.len() as u32;
            pack.sealer.seal(pack.entries.len() as u64, stored, &mut pack.bytes);
            let length = pack.bytes.len() as u32 - offset;
            pack.entries.push(Entry { name, offset, length, bytes, kind, is_lz4 });
            let is_full = pack.bytes.len() >= PACK_FULL || pack.entries.len() == BLOBS_MAX;
            open.take_if(|_| is_full)
        };
        full.map_or(Ok(()), |pack| self.end(pack))
    }

    fn begin(&self) -> Result<Open> {
        let id = Id::new()?;
        let sealer = self.repository.keys.object(Kind::Pack, id);
        let mut bytes = Vec::with_capacity(PACK_FULL + (2 << 20));
        bytes.extend_from_slice(&sealer.header);
        Ok(Open { id, sealer, bytes, entries: Vec::new() })
    }

    /// Writes a pack, and an index if there are enough.
    fn end(&self, pack: Open) -> Result<()> {
        let Open { id, sealer, mut bytes, entries } = pack;
        format::end_pack(&sealer, &entries, &mut bytes);
        let turn = self.turn.fetch_add(1, Ordering::SeqCst) % SENT_AT_ONCE;
        {
            let _turn = lock(&self.turns[turn]);
            self.repository.objects.put(&format::pack_path(id), &bytes)?;
        }
        self.uploaded.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        let written = PackIndex { id, length: bytes.len() as u64, entries };
        let full = {
            let mut all = lock(&self.written);
            all.push(written);
            let is_full = all.len() >= INDEX_PACKS;
            if is_full { std::mem::take(&mut *all) } else { Vec::new() }
        };
        self.index(full)
    }

    /// Writes an index of packs.
    fn index(&self, packs: Vec<PackIndex>) -> Result<()> {
        if packs.is_empty() {
            return Ok(());
        }
        let bytes = match self.repository.put_index(&packs) {
            Ok(bytes) => bytes,
            Err(error) => {
                lock(&self.written).extend(packs);
                return Err(error);
            }
        };
        self.uploaded.fetch_add(bytes, Ordering::SeqCst);
        let mut state = self.repository.state();
        packs.into_iter().for_each(|pack| state.wrote(pack));
        Ok(())
    }

    /// Has the next index name packs that none names yet.
    ///
    /// # Errors
    /// Those of the store.
    pub fn adopt(&self) -> Result<()> {
        self.repository.adopt()?;
        let orphans = std::mem::take(&mut self.repository.state().orphans);
        lock(&self.written).extend(orphans);
        Ok(())
    }

    /// Writes the packs that are open, and an index: everything that was added is there.
    pub(super) fn flush(&self) -> Result<()> {
        for open in &self.open {
            let pack = lock(open).take();
            pack.map_or(Ok(()), |pack| self.end(pack))?;
        }
        self.save()
    }

    /// Writes an index of the packs that were written, for the next backup.
    pub fn save(&self) -> Result<()> {
        let packs = std::mem::take(&mut *lock(&self.written));
        self.index(packs)
    }

    /// Removes what was written and no index names.
    pub(super) fn withdraw(&self) {
        for pack in std::mem::take(&mut *lock(&self.written)) {
            // One that stays is a copy, of which a later run lets one go.
            let _ = self.repository.objects.remove(&format::pack_path(pack.id));
        }
    }

    /// The lists of a backup, of which those are written that are not there; with `all`, all are. Without one of its lists
    /// no backup can be read, and lists are small: those that are there are proven.
    fn lists(&self, config: &BackupConfig, size: u64, all: bool) -> Result<Vec<Option<BlockName>>> {
        let (repository, mut there) = (&self.repository, Vec::new());
        let lists = self.each_list(config, size, |name, _| {
            if !all && repository.state().is_there(BlobKind::List, name) {
                there.push(name);
            }
            Ok(())
        })?;
        let mut there = repository.proven_lists(&there)?;
        self.each_list(config, size, |name, ids| match there.insert(name) {
            true => self.add_list(name, ids),
            false => Ok(()),
        })?;
        Ok(lists)
    }

    fn each_list(
        &self,
        config: &BackupConfig,
        size: u64,
        mut each: impl FnMut(BlockName, &[u8]) -> Result<()>,
    ) -> Result<Vec<Option<BlockName>>> {
        let chunk_size = self.repository.chunk_size;
        let slots = size.div_ceil(chunk_size) as usize;
        let mut blocks = config.blocks.iter().peekable();
        let mut lists = Vec::new();
        for first in (0..slots).step_by(LIST) {
            let count = LIST.min(slots - first);
            let mut ids = vec![0; count * 32];
            let end = (first + count) as u64 * chunk_size;
            while let Some(block) = blocks.next_if(|block| block.offset < end) {
                let at = ((block.offset / chunk_size) as usize - first) * 32;
                ids[at..at + 32].copy_from_slice(&block.name.bytes());
            }
            if is_zero(&ids) {
                lists.push(None);
                continue;
            }
            let name = self.repository.keys.list(&ids);
            each(name, &ids)?;
            lists.push(Some(name));
        }
        Ok(lists)
    }

    /// Ends a backup whose chunks were added, or are there.
    ///
    /// # Errors
    /// `Exists`; `Busy` if it took so long that what it needs may have gone; those of the store.
    pub fn finish(
        &self,
        config: &BackupConfig,
        size: u64,
        all: bool,
        check: impl FnOnce() -> Result<()>,
    ) -> Result<Ended> {
        let lists = self.lists(config, size, all)?;
        self.flush()?;
        let repository = &self.repository;
        repository.objects.settle()?;
        check()?;
        let begun = (Instant::now(), SystemTime::now());
        let has_all = || -> Result<bool> {
            repository.look_again()?;
            repository.check_clear()?;
            let state = repository.state();
            Ok(config.blocks.iter().all(|block| state.is_there(BlobKind::Chunk, block.name))
                && lists.iter().flatten().all(|list| state.is_there(BlobKind::List, *list)))
        };
        if !has_all()? {
            return Ok(Ended::Gone);
        }
        let manifest = self.manifest(config, size, &lists);
        let place = repository.put_manifest(&manifest)?;
        let checked = match repository.is_late(begun) {
            true => has_all().and_then(|all| if all { Ok(()) } else { Err(late()) }),
            false => Ok(()),
        };
        let checked = checked.and_then(|()| repository.check_alone(&place, &manifest));
        if let Err(error) = checked {
            // If that fails, the backup is there, and `verify` tells what it is worth.
            let _ = repository.objects.remove(&place.path());
            return Err(error);
        }
        Ok(Ended::Complete)
    }

    fn manifest(&self, config: &BackupConfig, size: u64, lists: &[Option<BlockName>]) -> Manifest {
        Manifest {
            volume: config.volume_name.clone(),
            backup: config.name.clone(),
            snapshot: config.snapshot_name.clone(),
            asked_at: config.snapshot_created_at.clone(),
            // With fractions of a second: the order of backups of one second is known.
            created: jiff::Timestamp::now().to_string(),
            size,
            chunks: config.blocks.len() as u64,
            uploaded: self.uploaded(),
            incremental: config.is_incremental,
            labels: config.labels.clone().unwrap_or_default(),
            lists: lists.iter().map(|list| list.map(format::ListName)).collect(),
        }
    }
}

impl Repository {
    /// Writes an index, or several if one were too long for readers; returns their bytes.
    pub(super) fn put_index(&self, packs: &[PackIndex]) -> Result<u64> {
        let id = Id::new()?;
        let plain = format::encode_index(packs);
        let object = format::seal_object(&self.keys, Kind::Index, id, &plain);
        if packs.len() > INDEX_PACKS || object.len() as u64 > INDEX_LIMIT && packs.len() > 1 {
            let (first, second) = packs.split_at(packs.len() / 2);
            return Ok(self.put_index(first)? + self.put_index(second)?);
        }
        self.objects.put(&format::path(&format!("index/{}", hex(&id.0))), &object)?;
        Ok(object.len() as u64)
    }

    /// Whether so much time went by that packs may have been condemned and removed.
    pub(super) fn is_late(&self, since: (Instant, SystemTime)) -> bool {
        self.took_longer(since, self.grace / 2)
    }

    /// Whether what has begun then has taken longer than this.
    pub(super) fn took_longer(&self, since: (Instant, SystemTime), than: Duration) -> bool {
        // One of the two clocks goes on while the machine sleeps, the other one cannot be set.
        let slept = since.1.elapsed().unwrap_or(Duration::MAX);
        since.0.elapsed().max(slept) > than
    }
}

fn late() -> Error {
    Error::busy(
        "the end of the backup took so long that what it needs was collected: create it again",
    )
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
