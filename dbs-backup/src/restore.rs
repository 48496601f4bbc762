//! Restoring a backup.

use crate::blocks::{Target, is_zero};
use crate::codec::{self, Method};
use crate::config::{BackupConfig, Block, VolumeConfig};
use crate::lock::Lock;
use crate::names::{self, BlockName};
use crate::objects::is_verdict;
use crate::pool::{self, Rate, Work};
use crate::store::BackupStore;
use dbs_core::{Error, ErrorKind, Result};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

/// What is written at once, or is not if it is zeros.
const PART: usize = 4096;

/// What the target holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Onto<'a> {
    /// Zeros: only blocks of the backup are written.
    Empty,
    /// Anything. What is right already is not read from the backup store: a restore that was cut off goes on in this
    /// way.
    Anything,
    /// What the volume's backing image holds: blocks of the backup are written as a whole.
    Image,
    /// What this backup of the same volume holds: only the differences are written.
    Backup(&'a str),
}

/// What a restore has moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Restored {
    /// Bytes of blocks that were looked at.
    pub length: u64,
    /// Bytes written to the volume.
    pub data: u64,
    /// Bytes read from the backup store, compressed.
    pub downloaded: u64,
}

/// A restore that has begun: the volume is locked in the backup store.
pub struct Restoration<'a> {
    store: &'a BackupStore,
    volume: VolumeConfig,
    backup: BackupConfig,
    block_size: u64,
    method: Method,
    /// What could not be read, if the restore goes on past that: how many blocks, and the first one.
    past: Option<Mutex<Bad>>,
    _lock: Option<Lock>,
}

#[derive(Default)]
struct Bad {
    count: u64,
    first: Option<Error>,
}

enum Job {
    /// Blocks that are read together.
    Write(Vec<Block>),
    Zero(u64, u64),
}

impl BackupStore {
    /// Begins a restore.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if somebody deletes backups of the volume, or if the backup is in progress; `Corrupt`.
    pub fn restore(&self, volume: &str, backup: &str) -> Result<Restoration<'_>> {
        self.begin();
        self.check_name("volume", volume)?;
        let lock = self.lock_work(volume)?;
        let config = self.volume_to_restore(volume, Some(backup))?;
        let backup = self.complete_backup(volume, backup)?;
        let (block_size, method) = (backup.block_size()?, backup.method()?);
        let past = None;
        Ok(Restoration {
            store: self,
            volume: config,
            backup,
            block_size,
            method,
            past,
            _lock: lock,
        })
    }
}

impl Restoration<'_> {
    /// Has it go on past blocks that are damaged or missing. At the end they are an error all the same.
    #[must_use]
    pub fn past_damage(mut self) -> Self {
        self.past = Some(Mutex::default());
        self
    }

    /// The facts of the backup.
    #[must_use]
    pub fn backup(&self) -> &BackupConfig {
        &self.backup
    }

    /// The facts of its volume.
    #[must_use]
    pub fn volume(&self) -> &VolumeConfig {
        &self.volume
    }

    /// Bytes that a volume needs: those of the volume, or more if the volume was larger when it was backed up.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.volume.size.max(self.end())
    }

    /// Whether an earlier backup has blocks at places where this one has none.
    #[must_use]
    pub fn lacks(&self, base: &BackupConfig) -> bool {
        let mut ours = self.backup.blocks.iter().map(|block| block.offset).peekable();
        base.blocks.iter().any(|block| {
            while ours.next_if(|at| *at < block.offset).is_some() {}
            ours.peek() != Some(&block.offset)
        })
    }

    fn end(&self) -> u64 {
        self.backup.end(self.block_size)
    }

    /// Restores it. On success everything is durable.
    ///
    /// # Errors
    /// `Invalid` if the target is too small, or if `onto` is a backup of which this one cannot be the difference;
    /// `Corrupt` if a block is not what its name says; `NotFound` if it is not there; `Interrupted`; those of both sides.
    pub fn run(
        &self,
        target: &impl Target,
        onto: Onto<'_>,
        work: &mut Work<'_>,
    ) -> Result<Restored> {
        let end = self.end();
        if end >= target.size() + self.block_size {
            return Err(Error::invalid(format!(
                "the target has {} bytes, and backup {} has data up to {end}",
                target.size(),
                self.backup.name
            )));
        }
        let jobs = match onto {
            Onto::Empty | Onto::Image => {
                self.backup.blocks.iter().map(|block| Job::Write(vec![*block])).collect()
            }
            Onto::Anything => self.everything(target.size()),
            Onto::Backup(base) => self.differences(base)?,
        };
        let mut run = self.store.run(self.block_size);
        if !self.store.is_repository() {
            // Each worker has some. In a repository what is read together is one request.
            run = run.min(jobs.len().div_ceil(work.workers.max(1)));
        }
        let jobs = joined(jobs, run);
        let total = jobs.iter().map(|job| job.length(self.block_size)).sum();
        let (stop, mut all) = (&*self.store.stop, Restored::default());
        let rate = Rate::new(work.rate, stop);
        pool::each(
            work.workers,
            stop,
            jobs.into_iter(),
            |job| self.carry_out_past(&job, target, onto, &rate),
            |done: Option<Restored>| {
                if let Some(done) = done {
                    all.length += done.length;
                    all.data += done.data;
                    all.downloaded += done.downloaded;
                }
                if (work.progress)(all.length, total) { Ok(()) } else { Err(pool::interrupted()) }
            },
        )?;
        target.flush()?;
        self.check_bad()?;
        Ok(all)
    }

    /// What was gone past.
    fn check_bad(&self) -> Result<()> {
        let Some(past) = &self.past else { return Ok(()) };
        let bad = std::mem::take(&mut *past.lock().unwrap_or_else(PoisonError::into_inner));
        let Some(first) = bad.first else { return Ok(()) };
        Err(match bad.count {
            1 => first.context("all but one block was restored"),
            count => first.context(format!("all but {count} blocks were restored; the first")),
        })
    }

    /// As [`Restoration::carry_out`], and past what is damaged, if that is wanted: then block by block.
    fn carry_out_past(
        &self,
        job: &Job,
        target: &impl Target,
        onto: Onto<'_>,
        rate: &Rate<'_>,
    ) -> Result<Restored> {
        let failed = match self.carry_out(job, target, onto, rate) {
            Err(error) if is_verdict(error.kind()) => error,
            done => return done,
        };
        let (Some(past), Job::Write(blocks)) = (&self.past, job) else { return Err(failed) };
        let mut all = Restored::default();
        for block in blocks {
            match self.carry_out(&Job::Write(vec![*block]), target, onto, rate) {
                Ok(done) => {
                    all.data += done.data;
                    all.downloaded += done.downloaded;
                }
                Err(error) if is_verdict(error.kind()) => {
                    let mut bad = past.lock().unwrap_or_else(PoisonError::into_inner);
                    bad.count += 1;
                    bad.first.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Restored { length: job.length(self.block_size), ..all })
    }

    /// All blocks, and zeros between them, up to `end`.
    fn everything(&self, end: u64) -> Vec<Job> {
        let (mut jobs, mut at) = (Vec::new(), 0);
        for block in &self.backup.blocks {
            if block.offset > at {
                jobs.push(Job::Zero(at, block.offset - at));
            }
            jobs.push(Job::Write(vec![*block]));
            at = block.offset + self.block_size;
        }
        if end > at {
            jobs.push(Job::Zero(at, end - at));
        }
        jobs
    }

    /// What differs from an earlier backup: blocks that only that one has are zeros now.
    fn differences(&self, base: &str) -> Result<Vec<Job>> {
        let base = self.store.complete_backup(&self.volume.name, base)?;
        let base_size = base.block_size()?;
        if base_size != self.block_size {
            return Err(Error::invalid(format!(
                "backup block size is changed from {base_size} to {}: restore the whole backup",
                self.block_size
            )));
        }
        let (mut jobs, mut old) = (Vec::new(), base.blocks.iter().peekable());
        for block in &self.backup.blocks {
            while let Some(gone) = old.next_if(|old| old.offset < block.offset) {
                jobs.push(Job::Zero(gone.offset, self.block_size));
            }
            if old.next_if(|old| old.offset == block.offset) != Some(block) {
                jobs.push(Job::Write(vec![*block]));
            }
        }
        jobs.extend(old.map(|gone| Job::Zero(gone.offset, self.block_size)));
        Ok(jobs)
    }

    fn carry_out(
        &self,
        job: &Job,
        target: &impl Target,
        onto: Onto<'_>,
        rate: &Rate<'_>,
    ) -> Result<Restored> {
        let length = job.length(self.block_size);
        match job {
            Job::Zero(offset, length) => {
                let end = (offset + length).min(target.size());
                if *offset < end {
                    target.zero(*offset, end - offset)?;
                }
                Ok(Restored { length: *length, ..Restored::default() })
            }
            Job::Write(blocks) => {
                let mut needed = Vec::new();
                for block in blocks {
                    if onto != Onto::Anything || !self.is_there(block, target)? {
                        needed.push(*block);
                    }
                }
                self.write_blocks(&needed, target, onto, rate, length)
            }
        }
    }

    fn write_blocks(
        &self,
        blocks: &[Block],
        target: &impl Target,
        onto: Onto<'_>,
        rate: &Rate<'_>,
        length: u64,
    ) -> Result<Restored> {
        let names: Vec<_> = blocks.iter().map(|block| block.name).collect();
        let (volume, size) = (&self.volume.name, self.block_size);
        let (contents, downloaded) =
            self.store.fetch_some(volume, &names, self.method, size, rate)?;
        let mut data = 0;
        for (offset, content) in
            blocks.iter().filter_map(|b| Some((b.offset, contents.get(&b.name)?)))
        {
            data += write(target, offset, content, onto != Onto::Empty)?;
        }
        Ok(Restored { length, data, downloaded })
    }

    /// Whether the target has the block already.
    fn is_there(&self, block: &Block, target: &impl Target) -> Result<bool> {
        let mut content = vec![0; self.block_size as usize];
        let length = self.block_size.min(target.size() - block.offset);
        target.read_at(block.offset, &mut content[..length as usize])?;
        Ok(self.store.name_of(&content) == block.name)
    }
}

impl Job {
    fn length(&self, block_size: u64) -> u64 {
        match self {
            Self::Write(blocks) => blocks.len() as u64 * block_size,
            Self::Zero(_, length) => *length,
        }
    }
}

/// Blocks that follow each other are one job, of at most `run` blocks.
fn joined(jobs: Vec<Job>, run: usize) -> Vec<Job> {
    let mut all: Vec<Job> = Vec::with_capacity(jobs.len());
    for job in jobs {
        match (all.last_mut(), job) {
            (Some(Job::Write(before)), Job::Write(blocks)) if before.len() < run => {
                before.extend(blocks);
            }
            (_, job) => all.push(job),
        }
    }
    all
}

impl BackupStore {
    /// Blocks of this size that are read together.
    pub(crate) fn run(&self, block_size: u64) -> usize {
        self.repository.as_ref().map_or(pool::run(block_size), |repository| repository.run())
    }

    /// The content of blocks by their names, and the bytes that were read.
    pub(crate) fn fetch_some(
        &self,
        volume: &str,
        names: &[BlockName],
        method: Method,
        size: u64,
        rate: &Rate<'_>,
    ) -> Result<(HashMap<BlockName, Vec<u8>>, u64)> {
        if let Some(repository) = &self.repository {
            return repository.fetch_some(names, rate);
        }
        let (mut found, mut downloaded) = (Vec::with_capacity(names.len()), 0);
        for name in names {
            if self.stop.load(Ordering::SeqCst) {
                return Err(pool::interrupted());
            }
            let opened = match self.stored(volume, *name, size, rate, &mut downloaded) {
                // Compressed as others are, its content is compared with its name together with theirs.
                Ok(stored) => method
                    .decompress(&stored, size)
                    .or_else(|_| codec::open(&stored, method, *name, size)),
                Err(error) => Err(error),
            };
            match opened {
                Ok(content) => found.push((*name, content)),
                Err(error) if error.kind() == ErrorKind::Corrupt => {}
                Err(error) => return Err(error),
            }
        }
        found.retain(|(name, content)| BlockName::of(content) == *name);
        let mut contents: HashMap<_, _> = found.into_iter().collect();
        for name in names {
            if !contents.contains_key(name) {
                let (content, bytes) = self.fetch(volume, *name, method, size, rate)?;
                contents.insert(*name, content);
                downloaded += bytes;
            }
        }
        Ok((contents, downloaded))
    }

    /// The facts of a volume, without which none of its backups can be restored. In a repository each backup has its own.
    pub(crate) fn volume_to_restore(
        &self,
        volume: &str,
        backup: Option<&str>,
    ) -> Result<VolumeConfig> {
        if let (Some(repository), Some(backup)) = (&self.repository, backup) {
            return repository.volume_of(volume, backup);
        }
        let config = self.volume(volume).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                error.context(format!("Source volume doesn't exist in backupstore: {volume}"))
            }
            _ => error,
        })?;
        if config.size == 0 {
            return Err(Error::corrupt(format!("volume {volume}: invalid volume size 0")));
        }
        Ok(config)
    }

    /// The content of a block, which has its name, and the bytes that were read.
    pub(crate) fn fetch(
        &self,
        volume: &str,
        name: BlockName,
        method: Method,
        size: u64,
        rate: &Rate<'_>,
    ) -> Result<(Vec<u8>, u64)> {
        if let Some(repository) = &self.repository {
            return repository.fetch(name, rate);
        }
        let mut downloaded = 0;
        let mut once = || {
            let stored = self.stored(volume, name, size, rate, &mut downloaded)?;
            codec::open(&stored, method, name, size)
        };
        let content = match once() {
            // What was damaged on its way may come through when it is sent again.
            Err(error) if error.kind() == ErrorKind::Corrupt => once(),
            content => content,
        };
        content.map(|content| (content, downloaded))
    }

    /// A block as it is stored.
    fn stored(
        &self,
        volume: &str,
        name: BlockName,
        size: u64,
        rate: &Rate<'_>,
        downloaded: &mut u64,
    ) -> Result<Vec<u8>> {
        // Compressed blocks that are longer than blocks are so by their headers.
        let limit = size + size / 16 + 4096;
        let stored = self.objects.get(&names::block(volume, name), limit)?;
        *downloaded += stored.len() as u64;
        rate.wait(stored.len() as u64);
        Ok(stored)
    }
}

/// Writes a block, as far as the target reaches; returns the bytes of data in it.
fn write(target: &impl Target, offset: u64, content: &[u8], zeros: bool) -> Result<u64> {
    let length = (content.len() as u64).min(target.size() - offset) as usize;
    let (content, beyond) = content.split_at(length);
    if !is_zero(beyond) {
        return Err(Error::invalid(format!(
            "the backup has data beyond the {} bytes of the target",
            target.size()
        )));
    }
    let (mut at, mut data) = (0, 0);
    for run in content.chunks(PART).collect::<Vec<_>>().chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let length: usize = run.iter().map(|part| part.len()).sum();
        let place = offset + at as u64;
        if !is_zero(run[0]) {
            target.write_at(place, &content[at..at + length])?;
            data += length as u64;
        } else if zeros {
            target.zero(place, length as u64)?;
        }
        at += length;
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::hooked::Hooked;
    use crate::objects::{Directory, Objects};
    use crate::url::Url;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    const VOLUME: &str = "vol-1";
    const SIZE: u64 = 8192;

    /// Blocks that are hashed together: one that was damaged on its way is read again, alone; others may be compressed in
    /// another way. One that stays damaged is an error.
    #[test]
    fn of_blocks_that_are_fetched_together_a_damaged_one_is_fetched_again() {
        let root = tempfile::tempdir().unwrap();
        let inner: Arc<dyn Objects> = Arc::new(Directory::open(root.path()).unwrap());
        let contents: Vec<_> = (1..=8_u8).map(|byte| vec![byte; SIZE as usize]).collect();
        let names: Vec<_> = contents.iter().map(|content| BlockName::of(content)).collect();
        let put = |at: usize, method: Method, content: usize| {
            let stored = method.compress(&contents[content]).unwrap();
            inner.put(&names::block(VOLUME, names[at]), &stored).unwrap();
        };
        (0..8).for_each(|at| put(at, if at == 5 { Method::Gzip } else { Method::Lz4 }, at));
        let (stop, forever) = (AtomicBool::new(false), AtomicBool::new(false));
        let (rate, forever) = (Rate::new(None, &stop), Arc::new(forever));
        for damaged in [&Method::Lz4.compress(&contents[7]).unwrap()[..], b"nothing", b""] {
            let path = names::block(VOLUME, names[2]);
            inner.put(&path, damaged).unwrap();
            let (right, other) = (Method::Lz4.compress(&contents[2]).unwrap(), Arc::clone(&inner));
            let (right, stays) = (right.into_owned(), Arc::clone(&forever));
            let get = move |read: &str| {
                if read == path && !stays.load(Ordering::SeqCst) {
                    other.put(read, &right).unwrap();
                }
            };
            let hooked = Hooked { get: Box::new(get), ..Hooked::on(Arc::clone(&inner)) };
            let store = BackupStore::on(&Url::parse("vfs:///x").unwrap(), Arc::new(hooked));
            let fetch = || store.fetch_some(VOLUME, &names, Method::Lz4, SIZE, &rate);
            forever.store(true, Ordering::SeqCst);
            assert_eq!(fetch().unwrap_err().kind(), ErrorKind::Corrupt);
            forever.store(false, Ordering::SeqCst);
            let (found, _) = fetch().unwrap();
            assert_eq!(found.len(), 8);
            for (name, content) in names.iter().zip(&contents) {
                assert!(found[name] == *content, "{name}");
            }
        }
    }
}
