//! Creating a backup.
//!
//! What is written in which order in Longhorn's layout (in a repository: section 8 of `docs/repository.md`), and why a backup never refers to a block that is not there:
//!
//! 1. The lock, which keeps everybody from deleting blocks of the volume.
//! 2. `volume.cfg`, if it is not there.
//! 3. The backup's facts without blocks, *in progress*. While they are there, upstream deletes no block of the volume
//!    either, even if it took the lock for one out of date.
//! 4. The blocks that are there are listed: after 3, so that none of them is deleted any more.
//! 5. Blocks that are not there. A worker makes those durable together that it has read together, before it goes on.
//! 6. What was found in 4 is made durable: whoever wrote it may not have come to that.
//! 7. The lock is looked at: if it was out of date at any time, the list of 4 means nothing.
//! 8. The backup's facts, complete, and the lock once more: if it was out of date by then, the facts go again. From here on there is a backup. Its blocks were all found in 4 or written in 5, also
//!    those that come from an earlier backup: what that has lost is read from the snapshot again.
//! 9. `volume.cfg`, in which the backup is the last one.
//!
//! Cut off before 8, blocks stay that the next run uses again, or the next deletion collects. Cut off before 9, the
//! backup is there, and the next one is made from the differences to an earlier one.

mod chunked;
mod locked;

use crate::blocks::{Source, is_zero};
use crate::codec::Method;
use crate::config::{
    self, BLOCK_SIZE, BackupConfig, Block, LARGEST_VOLUME, Map, PARAMETER_MODE, VolumeConfig,
    block_size_parameter,
};
use crate::lock::{Kind, Lock};
use crate::names::{self, BlockName};
use crate::objects::Prepared;
use crate::pool::{self, Rate, Work};
use crate::repository::{LABELS_MAX, Repository, Writer};
use crate::store::{BackupStore, Present};
use dbs_core::{Error, ErrorKind, Result};
use jiff::Timestamp;
use serde::Serialize;
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

thread_local! {
    /// The blocks that a thread has in hand: allocators give little of such large buffers back.
    static CONTENT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// What to back up, and how.
#[derive(Debug, Clone, Default)]
pub struct CreateOptions {
    /// The volume's name in the backup store.
    pub volume: String,
    /// The snapshot's name.
    pub snapshot: String,
    /// The backup's name; by default a random one.
    pub backup: Option<String>,
    /// How blocks are compressed, if it is the first backup of the volume.
    pub method: Method,
    /// The size of blocks; by default 2 MiB.
    pub block_size: Option<u64>,
    /// Read everything, and write every block again, also those that are there: this mends a damaged backup store.
    pub full: bool,
    /// Keep blocks of zeros: what the volume is based on has something else there.
    pub keep_zeros: bool,
    /// Labels.
    pub labels: Map,
    /// Parameters, besides those that say how it was made.
    pub parameters: Map,
    /// The image that the volume is based on.
    pub backing_image_name: String,
    /// Its SHA-512.
    pub backing_image_checksum: String,
    /// For Kubernetes.
    pub storage_class_name: String,
}

/// A backup that was created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Created {
    /// The backup, as commands name it.
    pub url: String,
    /// Volume.
    pub volume: String,
    /// Backup.
    pub backup: String,
    /// The backup to which it has the differences.
    pub base: Option<String>,
    /// Bytes of the blocks of the backup.
    pub size: u64,
    /// Bytes read from the volume.
    pub read: u64,
    /// Bytes written to the backup store, compressed.
    pub uploaded: u64,
}

/// A backup that has begun: the volume is locked, and it is known whether the backup is incremental.
pub struct Creation<'a, S: Source> {
    store: &'a BackupStore,
    source: &'a S,
    options: CreateOptions,
    name: String,
    asked_at: String,
    block_size: u64,
    method: Method,
    base: Option<BackupConfig>,
    /// Blocks that hold data or differences.
    changed: Vec<bool>,
    kept: Kept,
}

/// What keeps others from deleting what the backup relies on.
enum Kept {
    /// In Longhorn's layout.
    Lock(Lock),
    /// In a repository nothing does: what is gone at the end is written again.
    Repository(Arc<Repository>, Box<Writer>),
}

/// What became of one block.
struct Done {
    offset: u64,
    /// None if it is zeros.
    name: Option<BlockName>,
    /// Bytes written.
    uploaded: Option<u64>,
    /// It was there.
    again: bool,
}

impl BackupStore {
    /// Begins a backup: locks the volume in the backup store, and looks what there is.
    ///
    /// # Errors
    /// `Busy` if somebody deletes backups of the volume; `Exists` if there is such a backup; those of both sides.
    pub fn create<'a, S: Source>(
        &'a self,
        source: &'a S,
        options: CreateOptions,
    ) -> Result<Creation<'a, S>> {
        self.begin();
        let asked_at = now();
        self.check_name("volume", &options.volume)?;
        let name = options.backup.clone().map_or_else(|| names::random("backup"), Ok)?;
        self.check_name("backup", &name)?;
        names::check_new("backup", &name)?;
        let block_size = self.block_size(&options, source.size(), &name)?;
        let kept = match &self.repository {
            None => Kept::Lock(self.lock(&options.volume, Kind::Work)?),
            Some(there) => Kept::Repository(Arc::clone(there), Box::new(Writer::new(there))),
        };
        let volume = self.volume_for(source, &options, block_size, &asked_at)?;
        let method = match &kept {
            Kept::Lock(_) => volume.method()?,
            Kept::Repository(..) => options.method,
        };
        self.refuse_complete(&options.volume, &name)?;
        let blocks = source.size().div_ceil(block_size);
        let mut creation = Creation {
            store: self,
            source,
            options,
            name,
            asked_at,
            block_size,
            method,
            base: None,
            changed: vec![false; blocks as usize],
            kept,
        };
        match creation.find_base(&volume) {
            Some(base) if creation.look(Some(&base))? => creation.base = Some(base),
            _ => {
                creation.look(None)?;
            }
        }
        Ok(creation)
    }

    /// The size of blocks of a backup with these options, of which a repository knows only some.
    fn block_size(&self, options: &CreateOptions, size: u64, backup: &str) -> Result<u64> {
        let Some(repository) = &self.repository else {
            let block_size = options.block_size.unwrap_or(BLOCK_SIZE);
            config::block_size(Some(&block_size_parameter(block_size)))?;
            return Ok(block_size);
        };
        let chunk_size = repository.chunk_size();
        [&*options.volume, backup].into_iter().try_for_each(Repository::check_new)?;
        let problem = if options.block_size.is_some_and(|size| size != chunk_size) {
            format!("all blocks of this repository have {chunk_size} bytes: do not give a size")
        } else if options.method == Method::Gzip {
            "a repository compresses by lz4, or not at all".to_owned()
        } else if options.labels.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>() > LABELS_MAX
        {
            format!("the labels of a backup have at most {LABELS_MAX} bytes")
        } else if size > LARGEST_VOLUME.min(repository.largest_volume()) || size == 0 {
            format!("a volume of {size} bytes is not backed up")
        } else if !options.backing_image_name.is_empty() {
            "a volume that is based on a backing image cannot be backed up to a repository"
                .to_owned()
        } else {
            return Ok(chunk_size);
        };
        Err(Error::invalid(problem))
    }

    /// The volume's facts, written if there are none.
    fn volume_for<S: Source>(
        &self,
        source: &S,
        options: &CreateOptions,
        block_size: u64,
        now: &str,
    ) -> Result<VolumeConfig> {
        match self.volume(&options.volume) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            // Of backups that cannot be read nobody needs anything.
            Err(error) if error.kind() == ErrorKind::Corrupt && self.repository.is_some() => {}
            Ok(volume) if volume.backing_image_name != options.backing_image_name => {
                return Err(Error::invalid(format!(
                    "volume {} in the backup store is based on {}, and this one on {}: back it up under another name",
                    volume.name,
                    image(&volume.backing_image_name),
                    image(&options.backing_image_name)
                )));
            }
            volume => return volume,
        }
        names::check_new("volume", &options.volume)?;
        let volume = VolumeConfig {
            name: options.volume.clone(),
            size: source.size().next_multiple_of(block_size),
            labels: Some(options.labels.clone()),
            created_time: now.to_owned(),
            compression_method: options.method.name().to_owned(),
            backing_image_name: options.backing_image_name.clone(),
            backing_image_checksum: options.backing_image_checksum.clone(),
            storage_class_name: options.storage_class_name.clone(),
            ..VolumeConfig::default()
        };
        if self.repository.is_none() {
            self.save_volume(&volume)?;
        }
        Ok(volume)
    }

    fn refuse_complete(&self, volume: &str, backup: &str) -> Result<()> {
        match self.facts(volume, backup) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Ok(config) if config.is_in_progress() => Ok(()),
            Err(error) if error.kind() != ErrorKind::Corrupt => Err(error),
            _ => Err(Error::new(
                ErrorKind::Exists,
                format!(
                    "volume {volume} has a backup {backup} already: choose another name, or delete it"
                ),
            )),
        }
    }
}

impl<S: Source> Creation<'_, S> {
    /// The backup's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is made from the differences to an earlier backup.
    #[must_use]
    pub fn is_incremental(&self) -> bool {
        self.base.is_some()
    }

    /// Makes the lock one out of date, when called: for tests.
    ///
    /// # Panics
    /// In a repository, which has no locks.
    #[cfg(feature = "testing")]
    pub fn aging(&self) -> impl Fn() + Send + 'static {
        match &self.kept {
            Kept::Lock(lock) => lock.aging(),
            Kept::Repository(..) => panic!("a repository has no locks"),
        }
    }

    /// The last backup, if this one may build on it. That it cannot be read is no reason to have no backup.
    fn find_base(&self, volume: &VolumeConfig) -> Option<BackupConfig> {
        let last = &volume.last_backup_name;
        if self.options.full || last.is_empty() {
            return None;
        }
        let base = self.store.backup(&self.options.volume, last).ok()?;
        let fits = !base.is_in_progress()
            && !base.snapshot_name.is_empty()
            && base.snapshot_name != self.options.snapshot
            && base.block_size().ok() == Some(self.block_size);
        fits.then_some(base)
    }

    /// Marks the blocks that hold data or differences; false if the base is not known.
    fn look(&mut self, base: Option<&BackupConfig>) -> Result<bool> {
        let (size, block_size, changed) = (self.source.size(), self.block_size, &mut self.changed);
        self.source.ranges(base, &mut |range| {
            let end = range.end.min(size);
            if range.start < end {
                let (first, last) = (range.start / block_size, (end - 1) / block_size);
                // Inside the size, for which there is room.
                changed[first as usize..=last as usize].fill(true);
            }
            Ok(())
        })
    }

    /// Creates it. If that fails, what was begun goes again where that is possible; the next run uses the blocks.
    ///
    /// # Errors
    /// Those of both sides; `Interrupted`; `Busy` if what the backup relies on could not be kept.
    pub fn run(mut self, work: &mut Work<'_>) -> Result<Created> {
        match &self.kept {
            Kept::Lock(_) => self.run_locked(work),
            Kept::Repository(repository, _) => {
                let repository = Arc::clone(repository);
                self.run_in(&repository, work)
            }
        }
    }

    /// Writes the blocks.
    fn make(&mut self, work: &mut Work<'_>) -> Result<(BackupConfig, Created, u64)> {
        let present = self.store.blocks(&self.options.volume, work)?;
        if let Kept::Repository(_, writer) = &self.kept {
            writer.adopt()?;
        }
        let carried = self.carried(&present);
        let done = self.upload(&present, work)?;
        let again: u64 = done.iter().filter(|d| d.again).filter_map(|d| d.uploaded).sum();
        let new: u64 = done.iter().filter(|d| !d.again).filter_map(|d| d.uploaded).sum();
        let new_blocks = done.iter().filter(|d| !d.again && d.uploaded.is_some()).count() as u64;
        let read = done.len() as u64 * self.block_size;
        let mut blocks = carried;
        blocks.extend(done.iter().filter_map(|d| Some(Block { offset: d.offset, name: d.name? })));
        blocks.sort_unstable_by_key(|block| block.offset);
        let mut backup = BackupConfig::in_progress(&self.name, &self.options.volume, self.method);
        backup.snapshot_name.clone_from(&self.options.snapshot);
        backup.snapshot_created_at.clone_from(&self.asked_at);
        backup.created_time = now();
        backup.size = blocks.len() as u64 * self.block_size;
        backup.labels = Some(self.options.labels.clone());
        backup.parameters = Some(self.parameters());
        backup.set_incremental(self.base.is_some());
        backup.newly_uploaded_data_size = new;
        backup.re_uploaded_data_size = again;
        backup.blocks = blocks;
        let created = Created {
            url: self.store.url.with(&self.options.volume, Some(&self.name)).to_string(),
            volume: self.options.volume.clone(),
            backup: self.name.clone(),
            base: self.base.as_ref().map(|base| base.name.clone()),
            size: backup.size,
            read,
            uploaded: new + again,
        };
        Ok((backup, created, new_blocks))
    }

    /// The blocks of the base that did not change. Those that the backup store has lost are read again.
    fn carried(&mut self, present: &Present) -> Vec<Block> {
        let Some(base) = &self.base else { return Vec::new() };
        if !self.source.size().is_multiple_of(self.block_size)
            && let Some(last) = self.changed.last_mut()
        {
            // If the volume was larger, the base has data there behind the end, which is no difference.
            *last = true;
        }
        let mut carried = Vec::new();
        for block in &base.blocks {
            match self.changed.get_mut((block.offset / self.block_size) as usize) {
                // The volume is smaller now, or the block has other content.
                None | Some(true) => {}
                Some(_) if present.contains(block.name) => carried.push(*block),
                Some(changed) => *changed = true,
            }
        }
        carried
    }

    fn upload(&self, present: &Present, work: &mut Work<'_>) -> Result<Vec<Done>> {
        let stop = &*self.store.stop;
        let rate = Rate::new(work.rate, stop);
        let begun = Mutex::new(HashSet::new());
        let offsets = self.changed.iter().enumerate().filter(|(_, changed)| **changed);
        let mut offsets = offsets.map(|(index, _)| index as u64 * self.block_size);
        let count = offsets.clone().count();
        let total = count as u64 * self.block_size;
        // Together, but so that each worker has some.
        let most = match &self.kept {
            Kept::Lock(_) => pool::run(self.block_size),
            Kept::Repository(..) => 1,
        };
        let run = most.min(count.div_ceil(work.workers.max(1)));
        let runs = std::iter::from_fn(|| {
            let run: Vec<_> = offsets.by_ref().take(run).collect();
            (!run.is_empty()).then_some(run)
        });
        let mut all = Vec::new();
        pool::each(
            work.workers,
            stop,
            runs,
            |run| self.blocks(&run, present, &begun, &rate),
            |done| {
                all.extend(done.into_iter().flatten());
                let done = all.len() as u64 * self.block_size;
                if (work.progress)(done, total) { Ok(()) } else { Err(pool::interrupted()) }
            },
        )?;
        Ok(all)
    }

    /// Reads blocks, and writes those that are not there.
    fn blocks(
        &self,
        offsets: &[u64],
        present: &Present,
        begun: &Mutex<HashSet<BlockName>>,
        rate: &Rate<'_>,
    ) -> Result<Vec<Done>> {
        CONTENT.with_borrow_mut(|contents| {
            contents.resize(offsets.len() * self.block_size as usize, 0);
            let mut blocks = Vec::with_capacity(offsets.len());
            for (offset, content) in
                offsets.iter().zip(contents.chunks_exact_mut(self.block_size as usize))
            {
                let length = self.block_size.min(self.source.size() - offset) as usize;
                self.source.read_at(*offset, &mut content[..length])?;
                content[length..].fill(0);
                blocks.push((*offset, &*content));
            }
            let is_left_out = |content| !self.options.keep_zeros && is_zero(content);
            let (zeros, data): (Vec<_>, Vec<_>) =
                blocks.into_iter().partition(|(_, content)| is_left_out(content));
            let zeros = zeros
                .into_iter()
                .map(|(offset, _)| Ok(Done { offset, name: None, uploaded: None, again: false }));
            let mut prepared = Vec::new();
            let data = data.iter().map(|(offset, content)| {
                let name = self.store.name_of(content);
                self.write(*offset, content, name, present, (begun, rate), &mut prepared)
            });
            let done = zeros.chain(data).collect::<Result<_>>();
            // Also if something has failed: the next run uses what was written before.
            let completed = self.store.objects.complete(prepared);
            done.and_then(|done| completed.map(|()| done))
        })
    }

    fn write(
        &self,
        offset: u64,
        content: &[u8],
        name: BlockName,
        present: &Present,
        (begun, rate): (&Mutex<HashSet<BlockName>>, &Rate<'_>),
        prepared: &mut Vec<Prepared>,
    ) -> Result<Done> {
        if self.store.stop.load(Ordering::SeqCst) {
            return Err(pool::interrupted());
        }
        // Who comes second relies on the first: if that one fails, the backup does. In full mode each block is written
        // once, whether it is there or not.
        let is_there = present.contains(name);
        let mut begun = begun.lock().unwrap_or_else(PoisonError::into_inner);
        if (is_there && !self.options.full) || !begun.insert(name) {
            return Ok(Done { offset, name: Some(name), uploaded: None, again: false });
        }
        drop(begun);
        let stored = match &self.kept {
            Kept::Repository(_, writer) => writer.add_chunk(name, content, self.method, rate)?,
            Kept::Lock(_) => {
                let stored = self.method.compress(content)?;
                rate.wait(stored.len() as u64);
                let path = names::block(&self.options.volume, name);
                prepared.push(self.store.objects.prepare(&path, &stored)?);
                stored.len() as u64
            }
        };
        Ok(Done { offset, name: Some(name), uploaded: Some(stored), again: is_there })
    }

    fn parameters(&self) -> Map {
        let mode = if self.options.full { "full" } else { "incremental" };
        let mut parameters = self.options.parameters.clone();
        parameters.extend(block_size_parameter(self.block_size));
        parameters.insert(PARAMETER_MODE.to_owned(), mode.to_owned());
        parameters
    }
}

fn image(name: &str) -> String {
    if name.is_empty() {
        "no backing image".to_owned()
    } else {
        format!("the backing image `{}`", names::plain(name))
    }
}

/// The time as upstream writes it.
fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
