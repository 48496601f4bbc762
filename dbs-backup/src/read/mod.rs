//! Reading a part of a backup here and a part there: blocks come from the backup store when they are needed, and stay in
//! memory for a while.
//!
//! A backup that is open keeps a lock of its volume, as a restore does, so that nobody deletes its blocks. Without that
//! lock a deletion is noticed: what is read is always compared with its name.

mod breaker;
mod cache;

use crate::codec::Method;
use crate::config::{BackupConfig, Block};
use crate::lock::{Kind, Lock};
use crate::pool::Rate;
use crate::store::BackupStore;
use breaker::Breaker;
use cache::Cache;
use dbs_core::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

/// How backups are read.
#[derive(Debug, Clone, Copy)]
pub struct ReadOptions {
    /// Bytes of blocks that are kept in memory. At least the blocks on their way are.
    pub cache: u64,
    /// Blocks on their way at once.
    pub parallel: usize,
    /// Keep deletions away from what is open. That writes to the backup store.
    pub lock: bool,
    /// How long nothing may come before a read fails at once, as long as others wait; `None`: all wait.
    pub patience: Option<Duration>,
}

impl ReadOptions {
    /// Bytes of blocks in memory, by default.
    pub const CACHE: u64 = 256 << 20;
    /// Blocks on their way at once, by default.
    pub const PARALLEL: usize = 8;
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self { cache: Self::CACHE, parallel: Self::PARALLEL, lock: true, patience: None }
    }
}

/// Reads backups of one store. Many threads use it at once.
pub struct Reader {
    shared: Arc<Shared>,
}

struct Shared {
    store: BackupStore,
    cache: Cache<Job>,
    breaker: Breaker,
    has_locks: bool,
    /// The lock of each volume, as long as somebody holds it.
    locks: Mutex<HashMap<String, Arc<Mutex<Weak<Lock>>>>>,
}

/// A block that somebody may need soon.
struct Job {
    backup: Arc<OpenBackup>,
    block: Block,
}

/// A backup that is open.
pub struct OpenBackup {
    volume: String,
    name: String,
    config: BackupConfig,
    size: u64,
    block_size: u64,
    method: Method,
    digest: u64,
    /// When its facts were written.
    written: SystemTime,
    lock: Mutex<Option<Arc<Lock>>>,
}

/// Where somebody is who reads a backup: who goes on from block to block gets the next ones before they are needed.
#[derive(Debug, Default)]
pub struct Place(Mutex<Run>);

#[derive(Debug, Default)]
struct Run {
    /// Index of the block.
    block: usize,
    /// Where the last read ended.
    end: u64,
    /// Blocks gone through in order.
    streak: u32,
}

/// A part of a backup.
pub enum Piece {
    /// A range of a block.
    Data(Arc<Vec<u8>>, Range<usize>),
    /// So many zeros.
    Zeros(usize),
}

impl Reader {
    /// Reads backups of a store, which is to be used for nothing else.
    ///
    /// # Errors
    /// `Io` if no thread can be started.
    pub fn start(store: BackupStore, options: ReadOptions) -> Result<Self> {
        let parallel = options.parallel.clamp(1, 64);
        let shared = Arc::new(Shared {
            store,
            cache: Cache::new(options.cache, parallel),
            breaker: Breaker::new(options.patience),
            has_locks: options.lock,
            locks: Mutex::default(),
        });
        let reader = Self { shared };
        for _ in 0..parallel {
            let shared = Arc::clone(&reader.shared);
            std::thread::Builder::new()
                .name("backup-ahead".to_owned())
                .spawn(move || shared.cache.work(|job| shared.fetch(&job.backup, &job.block)))
                .map_err(|e| Error::io(e, "starting a thread"))?;
        }
        Ok(reader)
    }

    /// Opens a backup that is complete.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if it is not complete, or if somebody deletes backups of the volume; `Corrupt`; `Unsupported` if
    /// the blocks are not all of its content; those of the store.
    pub fn open(&self, volume: &str, backup: &str) -> Result<Arc<OpenBackup>> {
        let store = &self.shared.store;
        // First: what is read from now on is not deleted.
        let lock = self.shared.lock(volume)?;
        let facts = store.volume_to_restore(volume, Some(backup))?;
        let written = store.modified(volume, Some(backup))?;
        let config = store.complete_backup(volume, backup)?;
        Ok(Arc::new(OpenBackup {
            volume: volume.to_owned(),
            name: backup.to_owned(),
            size: config.volume_size(&facts)?,
            block_size: config.block_size()?,
            method: config.method()?,
            digest: config.digest(),
            config,
            written,
            lock: Mutex::new(lock),
        }))
    }

    /// What is at `offset`: of `length` bytes as many as are in one block or between two; none at the end.
    ///
    /// # Errors
    /// `Corrupt` if the block is damaged or is not there; `NotFound` if the backup was deleted; those of the store.
    pub fn read(
        &self,
        backup: &Arc<OpenBackup>,
        place: &Place,
        offset: u64,
        length: usize,
    ) -> Result<Piece> {
        let Shared { cache, breaker, .. } = &*self.shared;
        let length = (length as u64).min(backup.size.saturating_sub(offset));
        let (blocks, size) = (&backup.config.blocks, backup.block_size);
        let index = blocks.partition_point(|block| block.offset + size <= offset);
        let block = match blocks.get(index) {
            Some(block) if block.offset < offset.saturating_add(length) => block,
            _ => return Ok(Piece::Zeros(length as usize)),
        };
        if block.offset > offset {
            return Ok(Piece::Zeros((block.offset - offset) as usize));
        }
        let there = cache.there(block.name);
        let awaited = match &there {
            Some(_) => None,
            None => Some(breaker.enter(Instant::now())?),
        };
        if let Some(depth) = place.touch(index, offset, length, cache.depth(size)) {
            let next = blocks.iter().skip(index + 1).take(depth);
            cache.ahead(
                next.map(|next| {
                    (next.name, size, Job { backup: Arc::clone(backup), block: *next })
                }),
            );
        }
        let content = match there {
            Some(content) => Ok(content),
            None => cache.get(block.name, size, || self.shared.fetch(backup, block)),
        };
        if let Some(awaited) = awaited {
            awaited.ended(content.as_ref().err(), Instant::now());
        }
        let content = content?;
        let start = (offset - block.offset) as usize;
        let end = start + length.min(size - start as u64) as usize;
        if content.len() as u64 != size {
            // Another backup has a block of this name and another size: one of the two is wrong.
            let wrong = Error::corrupt(format!("it has {} bytes, not {size}", content.len()));
            return Err(backup.context(block, wrong));
        }
        Ok(Piece::Data(content, start..end))
    }
}

impl Reader {
    /// Ends it: what is on its way, and the end of each lock, fails with this try; what is not fails at once.
    pub fn end(&self) {
        self.shared.store.stop.store(true, Ordering::SeqCst);
        self.shared.cache.end();
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    /// The lock of a volume: that which others hold, or a new one.
    fn lock(&self, volume: &str) -> Result<Option<Arc<Lock>>> {
        if !self.has_locks || self.store.is_repository() {
            return Ok(None);
        }
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = Arc::clone(locks.entry(volume.to_owned()).or_default());
        drop(locks);
        // Whoever comes while it is taken, which takes seconds, waits for it.
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = slot.upgrade() {
            return Ok(Some(lock));
        }
        crate::names::check("volume", volume)?;
        let taken = self.store.lock_apart(volume, Kind::Work).map_err(|error| match error.kind() {
            ErrorKind::Busy => error,
            _ => error.context(
                "the lock that keeps deletions away cannot be written (`--no-lock` does without it)",
            ),
        });
        let lock = Arc::new(taken?);
        *slot = Arc::downgrade(&lock);
        Ok(Some(lock))
    }

    fn fetch(&self, backup: &OpenBackup, block: &Block) -> Result<Vec<u8>> {
        if self.store.stop.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Io, "nothing more is read: the program ends"));
        }
        let rate = Rate::new(None, &self.store.stop);
        let (name, size) = (block.name, backup.block_size);
        let fetched = self.store.fetch(&backup.volume, name, backup.method, size, &rate);
        fetched.map(|(content, _)| content).map_err(|error| match error.kind() {
            ErrorKind::NotFound if self.is_gone(backup) => Error::not_found(format!(
                "backup {} of volume {} is not there any more: somebody deleted it, or the backup store is gone",
                backup.name, backup.volume
            )),
            // The backup is there, and is damaged.
            ErrorKind::NotFound => backup.context(block, Error::corrupt(error.to_string())),
            _ => backup.context(block, error),
        })
    }

    /// Whether it is sure that the backup is not there, or that its name is another one's.
    fn is_gone(&self, backup: &OpenBackup) -> bool {
        match self.store.modified(&backup.volume, Some(&backup.name)) {
            Ok(written) => written != backup.written,
            Err(error) => error.kind() == ErrorKind::NotFound,
        }
    }
}

impl OpenBackup {
    /// Lets it be deleted at once, whatever blocks of it are still on their way to be there before they are needed. By itself
    /// it is let go of with the last of these.
    pub fn release(&self) {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(lock);
    }

    /// Its facts.
    #[must_use]
    pub fn config(&self) -> &BackupConfig {
        &self.config
    }

    /// As [`BackupConfig::digest`].
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Bytes of the volume.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The next place from `offset` on that is in a block, or that is in none: the end, if there is no other.
    #[must_use]
    pub fn next(&self, offset: u64, data: bool) -> u64 {
        let blocks = &self.config.blocks;
        let index = blocks.partition_point(|block| block.offset + self.block_size <= offset);
        let mut at = offset;
        for block in blocks.iter().skip(index) {
            if data {
                return block.offset.max(offset).min(self.size);
            }
            if block.offset > at {
                break;
            }
            at = block.offset + self.block_size;
        }
        if data { self.size } else { at.min(self.size) }
    }

    fn context(&self, block: &Block, error: Error) -> Error {
        let Block { offset, name } = block;
        error.context(format!(
            "block {name} at {offset} of backup {} of volume {}",
            self.name, self.volume
        ))
    }
}

impl Place {
    fn run(&self) -> MutexGuard<'_, Run> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a read; says how many of the next blocks are to be fetched, if that is news.
    fn touch(&self, block: usize, offset: u64, length: u64, most: usize) -> Option<usize> {
        let mut run = self.run();
        let before = run.streak;
        // The kernel sends several reads at once, and they come in any order.
        let is_late = block + 1 == run.block;
        if block == run.block + 1 {
            run.streak = run.streak.saturating_add(1);
        } else if block == run.block && offset == run.end {
            run.streak = run.streak.max(1);
        } else if block != run.block && !is_late {
            run.streak = 0;
        }
        if is_late {
            return None;
        }
        let is_new = run.block != block || run.streak != before;
        (run.block, run.end) = (block, offset + length);
        let depth = 1_usize.checked_shl(run.streak.min(16)).unwrap_or(most).min(most);
        (is_new && run.streak > 0 && depth > 0).then_some(depth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_goes_on_gets_more_and_more() {
        let place = Place::default();
        let touch = |block, offset| place.touch(block, offset, 10, 8);
        // From the start, and on within the block.
        assert_eq!([touch(0, 0), touch(0, 10), touch(0, 30)], [Some(2), None, None]);
        assert_eq!([touch(1, 100), touch(0, 90), touch(2, 200)], [Some(4), None, Some(8)]);
        assert_eq!([touch(2, 210), touch(3, 300)], [None, Some(8)]);
        // Elsewhere, and there and back.
        assert_eq!([touch(9, 900), touch(9, 950), touch(40, 4000)], [None; 3]);
        assert_eq!([touch(40, 4010), touch(40, 4020)], [Some(2), None]);
        assert_eq!(Place::default().touch(0, 0, 10, 0), None, "no room for it");
    }
}
