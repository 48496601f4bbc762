//! Formatting, opening and closing a store.

use super::elsewhere::{Looks, opening};
use super::identity::as_uuid;
use super::last_tail::{OpenedTail, WantedTail, flush_first, take_tail};
use super::{Env, InitOptions, Inner, OpenOptions, Store, TailPlace, recover};
use crate::error::{Error, ErrorKind, Result};
use crate::format::geometry::{SUPERBLOCK_REGION_BYTES, SUPERBLOCK_SECOND};
use crate::format::superblock::{COMPAT_RELEARNT, INCOMPAT_GROUPS};
use crate::format::{Geometry, RegionKind, Superblock};
use crate::info::{Severity, StoreInfo};
use crate::io::env::SystemEnv;
use crate::io::{Storage, TailMemory, WriteRequest, open as drivers};
use crate::meta::commit::WriteBack;
use crate::meta::tail::{self, Tail, TailKey};
use crate::units::BLOCK_BYTES;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

impl Store {
    /// Formats a new store at `path`: a file (made if absent) or a block device.
    ///
    /// # Errors
    /// `Exists` for a known signature without `force`, `Busy` if mounted or open, `Invalid` for
    /// impossible options.
    pub fn init(path: &Path, options: &InitOptions) -> Result<StoreInfo> {
        // Impossible options must not cost what is there now.
        if let Some(size) = options.size {
            Geometry::plan(size, options)?;
        }
        let opened =
            drivers::create_storage(path, options.size, options.force, super::IoDriver::Auto)?;
        let made = Self::init_on(&*opened.storage, options, &SystemEnv::new()?);
        if let Err(error) = made {
            if opened.created {
                // Best effort: the error at hand is the one to report.
                let _ = std::fs::remove_file(path);
            }
            return Err(error.context(path.display()));
        }
        drop(opened);
        let options = OpenOptions { read_only: true, tail: TailPlace::None, ..Default::default() };
        Ok(Self::open(path, &options)?.info())
    }

    /// Opens the store at `path`. After a crash this replays what was acknowledged.
    ///
    /// # Errors
    /// `NotFound`, `Busy` with the owner's pid, `Corrupt` with region and block, `Invalid` for options
    /// that cannot be, `Elsewhere` if another machine writes it.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        options.check_checksum_cache()?;
        let opened = drivers::open_storage(path, options.read_only, options.driver)?;
        let named = |error: Error| error.context(path.display());
        let env = SystemEnv::new()?;
        let superblock = recover::read_superblock(&*opened.storage).map_err(named)?.0;
        let wanted = WantedTail {
            place: &options.tail,
            uuid: superblock.uuid,
            store: &opened.place,
            knows_boot: env.knows_boot(),
            read_only: options.read_only,
        };
        let mut tail = wanted.open()?;
        let warning = tail.warning.take();
        let (env, memory) = (Arc::new(env), options.metadata_memory);
        let store = Self::open_with(opened.storage, tail, env, options.read_only, memory);
        let store = store.map_err(named)?;
        if let Some(bytes) = options.lookup_memory {
            store.inner.meta().set_lookup_memory(bytes);
        }
        // Of a store on storage of the caller's nobody knows.
        let _once = store.inner.place.set(opened.place);
        if let Some(bytes) = options.checksum_cache {
            store.set_checksum_cache(bytes);
        }
        store.keep_backing(&options.backing);
        if let Some(secret) = &options.secret {
            // Once, when it is opened.
            let _ = store.inner.secret.set(secret.clone());
        }
        if let Some(warning) = warning {
            store.inner.warn(warning);
        }
        let physical = opened.info.physical_block_bytes;
        if opened.info.is_block_device && u64::from(physical) < BLOCK_BYTES {
            store.inner.warn(format!(
                "the device writes {physical} bytes at once: a power loss may leave a mix of old \
                 and new sectors in a block that was overwritten and not flushed"
            ));
        }
        Ok(store)
    }

    /// As [`Store::init`], on storage of the caller's.
    ///
    /// # Errors
    /// As [`Store::init`].
    #[doc(hidden)]
    pub fn init_on(storage: &dyn Storage, options: &InitOptions, env: &dyn Env) -> Result<()> {
        let geometry = Geometry::plan(storage.size_bytes(), options)?;
        let failed = |error| Error::io(error, "formatting failed");
        let journal = geometry.region(RegionKind::Journal);
        storage.allocate(0, SUPERBLOCK_REGION_BYTES).map_err(failed)?;
        storage.allocate(journal.offset, journal.length).map_err(failed)?;
        let zeros = vec![0; SUPERBLOCK_REGION_BYTES as usize];
        storage.write_at(0, &zeros).map_err(failed)?;
        // What the device held before must not look like a damaged group.
        let zeros = vec![0; journal.length.min(1 << 20) as usize];
        for at in (0..journal.length).step_by(zeros.len()) {
            let part = (journal.length - at).min(zeros.len() as u64) as usize;
            storage.write_at(journal.offset + at, &zeros[..part]).map_err(failed)?;
        }
        storage.flush().map_err(failed)?;
        let superblock = Superblock {
            uuid: as_uuid(env.random()),
            given: None,
            sequence: 1,
            created_ns: env.now_ns(),
            compat: if geometry.has_sums() { COMPAT_RELEARNT } else { 0 },
            unknown_ro: 0,
            incompat: if geometry.has_sums() { INCOMPAT_GROUPS } else { 0 },
            geometry,
            clean_sequence: 0,
            clean_marks: [0; 4],
        };
        write_superblock(storage, &superblock).map_err(failed)
    }

    /// As [`Store::open`], on storage of the caller's.
    ///
    /// # Errors
    /// As [`Store::open`].
    #[doc(hidden)]
    pub fn open_on(
        storage: Arc<dyn Storage>,
        tail: Option<Box<dyn TailMemory>>,
        env: Arc<dyn Env>,
        read_only: bool,
    ) -> Result<Self> {
        Self::open_within(storage, tail, env, read_only, None)
    }

    /// As [`Store::open_on`], with so many bytes of [`OpenOptions::metadata_memory`].
    ///
    /// # Errors
    /// As [`Store::open`].
    #[doc(hidden)]
    pub fn open_within(
        storage: Arc<dyn Storage>,
        tail: Option<Box<dyn TailMemory>>,
        env: Arc<dyn Env>,
        read_only: bool,
        memory: Option<u64>,
    ) -> Result<Self> {
        let tail = OpenedTail { memory: tail, ..OpenedTail::default() };
        Self::open_with(storage, tail, env, read_only, memory)
    }

    fn open_with(
        storage: Arc<dyn Storage>,
        mut tail: OpenedTail,
        env: Arc<dyn Env>,
        read_only: bool,
        memory: Option<u64>,
    ) -> Result<Self> {
        let (superblock, mut notes) = recover::read_superblock(&*storage)?;
        if superblock.unknown_ro != 0 && !read_only {
            return Err(Error::unsupported(format!(
                "the store uses features this version can only read (mask {:#x}); open it \
                 read-only or use a newer dbs",
                superblock.unknown_ro
            )));
        }
        if !read_only {
            // What a killed predecessor wrote without flushing is read below as if durable.
            flush_first(&*storage, || {
                if let Some(memory) = tail.memory.as_deref_mut() {
                    tail::forget(memory);
                }
            })?;
        }
        let load = if read_only { recover::load_to_read } else { recover::load_within };
        let mut loader = load(&*storage, &superblock, memory)?;
        if !read_only && recover::is_used_up(&superblock, loader.durable()) {
            return Err(Error::corrupt(recover::USED_UP));
        }
        let gone = take_tail(&*storage, &superblock, &mut loader, &mut tail, &*env)?;
        let tail_is_gone = gone.is_some();
        let mut warnings: Vec<_> = gone.into_iter().collect();
        recover::load_labels(&*storage, &superblock.geometry, &mut loader)?;
        let ring = superblock.geometry.region(RegionKind::Journal).offset;
        let unread = loader.unneeded_ring().iter();
        let unread: Vec<_> = unread.map(|block| ring + u64::from(*block) * BLOCK_BYTES).collect();
        let all_learnt = loader.last_session.is_none() && superblock.compat & COMPAT_RELEARNT != 0;
        let relearn = !all_learnt && superblock.geometry.has_sums();
        let last_session = loader.last_session;
        let session = u64::from_le_bytes(env.random()[..8].try_into().unwrap_or_default());
        let (mut meta, findings) = loader.finish(session, env.boot_id())?;
        let times = memory.map_or(0, |bytes| meta.set_metadata_memory(bytes));
        (0..times).for_each(|_| meta.shrink_bitmaps());
        notes.extend(findings);
        warnings.extend(notes.iter().map(|f| format!("{}: {}", f.region, f.message)));
        let superblocks = notes.iter().filter(|f| f.region == "superblock");
        let damaged: Vec<_> =
            superblocks.filter_map(|f| f.index).map(|block| block * BLOCK_BYTES).collect();
        let looks = Looks::new(meta.log.durable, meta.log.head());
        let inner = Arc::new(Inner {
            storage,
            env,
            meta: super::share::Share::new(meta),
            changes: Default::default(),
            changed: Default::default(),
            waiting: 0.into(),
            lost_tail: tail_is_gone.then_some(session),
            commits: Default::default(),
            flushes: Default::default(),
            work: Default::default(),
            steps: Default::default(),
            expanding: Default::default(),
            vacuum: Default::default(),
            superblock: superblock.into(),
            last_copy_missing: Default::default(),
            read_only,
            extent_bytes: superblock.geometry.extent_bytes as usize,
            has_sums: superblock.geometry.has_sums(),
            closing: Default::default(),
            poison: Default::default(),
            warnings: warnings.into(),
            scrub: Default::default(),
            passed: Default::default(),
            relearn: relearn.then_some(0).into(),
            again: Default::default(),
            watch: Default::default(),
            looks,
            still: Default::default(),
            stills: Default::default(),
            files: Default::default(),
            given: Default::default(),
            secret: Default::default(),
            not_secret: Default::default(),
            place: Default::default(),
        });
        if let Some(sums) = &mut inner.meta().sums {
            sums.tick(inner.env.now_ns());
            sums.set_read_only(read_only);
        }
        if !read_only {
            let waited = inner.watch_elsewhere(last_session.as_ref())?;
            inner.fill_holes();
            let begun = inner.begin_session(tail.memory, &damaged, &unread, waited);
            begun.map_err(opening)?;
        }
        debug_assert!(notes.iter().all(|f| f.severity != Severity::Corrupt));
        Ok(Self { inner })
    }

    /// Commits, writes all metadata back and marks the store clean. Other handles of the store
    /// find it closed for writing, from the moment this begins on. Writes under way fail, or are
    /// kept like all that was acknowledged.
    ///
    /// # Errors
    /// What the last writes failed with; the store is then as after a crash.
    pub fn close(self) -> Result<()> {
        if self.inner.read_only {
            return Ok(());
        }
        // A process that ends before it has made them again leaves that to the next one.
        let learnt = *self.inner.relearn.lock().unwrap_or_else(PoisonError::into_inner);
        // Those who go on writing would keep it from ever being done; and a flatten or a vacuum, which may take hours,
        // ends at its next step.
        self.inner.closing.store(true, Ordering::Relaxed);
        let _work = self.inner.work.lock().unwrap_or_else(PoisonError::into_inner);
        let _step = self.inner.steps.take();
        self.inner.commit()?;
        self.inner.close_all_groups(learnt)?;
        self.inner.without_commits(|| {
            let result = self.inner.check_sound().and_then(|()| self.inner.close(learnt.is_none()));
            // Who waits for the turn finds that: nothing follows what closing has written.
            self.inner.poison("the store was closed");
            result
        })
    }
}

impl Inner {
    /// Makes what recovery found durable under a new session, and only then starts a new tail:
    /// until that moment a crash finds the old one. `waited`: see [`Inner::let_notice`].
    fn begin_session(
        &self,
        tail: Option<Box<dyn TailMemory>>,
        damaged_superblocks: &[u64],
        unread_journal: &[u64],
        waited: bool,
    ) -> Result<()> {
        self.heal_superblock(damaged_superblocks)?;
        self.heal_journal(unread_journal)?;
        self.begin_groups()?;
        // A journal left short by processes that died right here gets no further group first,
        // unless a tail brought records that need one: the next time there is no such tail.
        let short = {
            let meta = self.meta();
            meta.journal_short() && meta.log.pending_bytes() == 0
        };
        if short {
            self.empty_journal()?;
        }
        self.commit_once(WriteBack::Session)?;
        if waited {
            self.let_notice();
        }
        self.look_begun()?;
        if self.meta().journal_short() {
            self.empty_journal()?;
        }
        if let Some(memory) = tail {
            let mut meta = self.meta();
            let key = TailKey { store: meta.uuid, boot: meta.boot, session: meta.log.session };
            let next = meta.log.next;
            meta.log.set_tail(Tail::start(memory, &key, next));
        }
        // The group above said that there is no tail; from here on groups say there is.
        self.commit_once(WriteBack::Session)?;
        self.look_begun()
    }

    /// Makes a store of before there were groups of checksums one that has them, all closed: what its
    /// pages say stays right.
    fn begin_groups(&self) -> Result<()> {
        let superblock = self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
        let known = superblock.incompat & INCOMPAT_GROUPS != 0;
        drop(superblock);
        if known || !self.has_sums {
            return Ok(());
        }
        self.update_superblock(|superblock| superblock.incompat |= INCOMPAT_GROUPS)
    }

    /// Writes all blocks back as of the last group and lets the superblock say so. That takes no
    /// room in the journal, so that processes that die soon after opening, one after the other,
    /// cannot fill it. Nothing may be pending.
    fn empty_journal(&self) -> Result<()> {
        let brought = self.bring_dirty(usize::MAX);
        let mut copies = self.meta().capture_durable();
        drop(brought);
        self.meta().check_none_parked()?;
        while !copies.is_empty() {
            self.write_metadata(&copies, None)?;
            self.flush_storage()?;
            let mut meta = self.meta();
            meta.copies_written(&copies);
            copies = meta.flushed();
        }
        let (durable, marks) = {
            let meta = self.meta();
            (meta.log.durable, meta.marks())
        };
        let relearnt = self.has_relearnt();
        self.update_superblock(|superblock| {
            // The journal will not say any more that there was a crash.
            superblock.set_relearnt(relearnt);
            superblock.clean_sequence = durable;
            superblock.clean_marks = marks;
        })?;
        self.meta().log.release_journal();
        Ok(())
    }

    /// Whether no checksums are left that a crash has cost and that are to be made again.
    fn has_relearnt(&self) -> bool {
        self.relearn.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Nobody else commits meanwhile, or afterwards.
    ///
    /// What was recorded when the tail is taken is in a durable group. Who records anything later
    /// finds no tail, and has to wait for a commit that never comes before it acknowledges: what the
    /// superblock is about to say leaves out nothing that was acknowledged.
    fn close(&self, relearnt: bool) -> Result<()> {
        // What could not be read may be read by now.
        drop(self.bring_parked());
        let (durable, marks, tail) = loop {
            let mut meta = self.meta();
            if meta.is_idle() {
                meta.check_none_parked()?;
                // The tail ends here, not when its file goes: a write that another handle has in flight
                // must not be acknowledged for being in it.
                break (meta.log.durable, meta.marks(), meta.log.take_tail());
            }
            drop(meta);
            self.commit_once(WriteBack::All)?;
        };
        let left_open = self.meta().sums.as_ref().map_or(0, |sums| sums.open_groups());
        self.update_superblock(|superblock| {
            superblock.set_relearnt(relearnt && left_open == 0);
            superblock.clean_sequence = durable;
            superblock.clean_marks = marks;
        })?;
        if let Some(tail) = tail {
            tail.remove();
        }
        Ok(())
    }

    /// Writes the copies of the superblock that are not good again, and only those: there may be
    /// no more than one good one, and a torn write of it would leave none. The last one, whose turn is
    /// last, may have to wait for space.
    fn heal_superblock(&self, damaged: &[u64]) -> Result<()> {
        let superblock = self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
        for address in damaged {
            if !self.write_copy(&superblock, *address)? {
                self.last_copy_missing.store(true, Ordering::Relaxed);
                self.warn(format!(
                    "superblock: no space to write the copy at {address}; the other copies are \
                     good, and this copy is written when there is space"
                ));
            }
        }
        Ok(())
    }

    /// Writes one copy of the superblock. `false` if that is the last one and there is no space for
    /// it: a crash of a shrink may have left it in a hole of the file, and what is open for writing
    /// may be what has to give space back.
    fn write_copy(&self, superblock: &Superblock, address: u64) -> Result<bool> {
        let written = self.storage.write_at(address, &superblock.encode(address));
        let Err(error) = written else { return self.flush_storage().map(|()| true) };
        let error = Error::io(error, "writing the superblock failed");
        if error.kind() == ErrorKind::NoSpace && address == superblock.geometry.superblock_last() {
            return Ok(false);
        }
        Err(self.poison_by(error))
    }

    /// Makes blocks of the journal readable that hold nothing that is needed. The next group may come to
    /// lie in front of one: then nobody could tell whether a further one is in it.
    fn heal_journal(&self, unread: &[u64]) -> Result<()> {
        if unread.is_empty() {
            return Ok(());
        }
        let zeros = [0; BLOCK_BYTES as usize];
        let mut writes = unread.iter().map(|address| self.storage.write_at(*address, &zeros));
        let written = writes.try_for_each(|written| written);
        written.and_then(|()| self.storage.flush()).map_err(|error| {
            let what = "writing a block of the journal that cannot be read failed";
            self.poison_by(Error::io(error, what))
        })
    }

    /// Changes the superblock, all copies of it, each of which is good: [`Inner::heal_superblock`]
    /// came first. If it left the last one out, that one comes after the others.
    pub(super) fn update_superblock(&self, change: impl FnOnce(&mut Superblock)) -> Result<()> {
        let mut superblock = self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_superblock(&superblock)?;
        let mut new = *superblock;
        change(&mut new);
        new.sequence += 1;
        let last = new.geometry.superblock_last();
        // A new place for it is reserved.
        let missing = self.last_copy_missing.load(Ordering::Relaxed)
            && last == superblock.geometry.superblock_last();
        self.flushing("writing the superblock failed", || {
            write_copies(&*self.storage, &new, !missing, &|| self.flush_device())
        })?;
        *superblock = new;
        let missing = missing && !self.write_copy(&new, last)?;
        self.last_copy_missing.store(missing, Ordering::Relaxed);
        Ok(())
    }
}

/// Writes all copies, never two at once that a torn write could cost.
pub(super) fn write_superblock(
    storage: &dyn Storage,
    superblock: &Superblock,
) -> std::io::Result<()> {
    write_copies(storage, superblock, true, &|| storage.flush())
}

/// As [`write_superblock`], or without the last copy: each of the other two is enough.
fn write_copies(
    storage: &dyn Storage,
    superblock: &Superblock,
    with_last: bool,
    flush: &dyn Fn() -> std::io::Result<()>,
) -> std::io::Result<()> {
    let last = superblock.geometry.superblock_last();
    let early = [SUPERBLOCK_SECOND, last];
    for addresses in [&early[..1 + usize::from(with_last)], &[0]] {
        let blocks: Vec<_> = addresses.iter().map(|at| (*at, superblock.encode(*at))).collect();
        let writes: Vec<_> =
            blocks.iter().map(|(offset, buf)| WriteRequest { offset: *offset, buf }).collect();
        storage.write_many(&writes)?;
        flush()?;
    }
    Ok(())
}
