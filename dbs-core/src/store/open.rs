//! Formatting, opening and closing a store.

use super::{Env, InitOptions, Inner, OpenOptions, Store, TailPlace, recover};
use crate::error::{Error, Result};
use crate::format::geometry::{SUPERBLOCK_REGION_BYTES, SUPERBLOCK_SECOND};
use crate::format::{Geometry, RegionKind, Superblock};
use crate::info::{Severity, StoreInfo};
use crate::io::env::SystemEnv;
use crate::io::{Storage, TailMemory, WriteRequest, open as drivers, tail as tails};
use crate::meta::commit::WriteBack;
use crate::meta::tail::{self, Tail, TailKey};
use crate::units::BLOCK_BYTES;
use std::path::Path;
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
    /// `NotFound`, `Busy` with the owner's pid, `Corrupt` with region and block.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
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
        let (tail, warning) = wanted.open()?;
        let store = Self::open_on(opened.storage, tail, Arc::new(env), options.read_only);
        let store = store.map_err(named)?;
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
            sequence: 1,
            created_ns: env.now_ns(),
            unknown_ro: 0,
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
    pub fn open_on(
        storage: Arc<dyn Storage>,
        mut tail: Option<Box<dyn TailMemory>>,
        env: Arc<dyn Env>,
        read_only: bool,
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
            storage.flush().map_err(|error| Error::io(error, "flush failed"))?;
        }
        let mut loader = recover::load(&*storage, &superblock)?;
        let mut warnings = Vec::new();
        if let Some(last) = loader.last_session {
            let key = TailKey { store: superblock.uuid, boot: env.boot_id(), session: last.id };
            let durable = loader.durable();
            let memory = tail.as_deref_mut();
            match memory.and_then(|memory| tail::replay(memory, &key, durable)) {
                Some(batches) => loader.replay_tail(batches),
                None if last.tail && last.boot == env.boot_id() => warnings.push(
                    "the last process to write the store ended without closing it and its tail is \
                     gone: writes it acknowledged after its last flush may be lost"
                        .to_owned(),
                ),
                None => {}
            }
        }
        recover::load_labels(&*storage, &superblock.geometry, &mut loader)?;
        let session = u64::from_le_bytes(env.random()[..8].try_into().unwrap_or_default());
        let (meta, findings) = loader.finish(session, env.boot_id())?;
        notes.extend(findings);
        warnings.extend(notes.iter().map(|f| format!("{}: {}", f.region, f.message)));
        let superblocks = notes.iter().filter(|f| f.region == "superblock");
        let damaged: Vec<_> =
            superblocks.filter_map(|f| f.index).map(|block| block * BLOCK_BYTES).collect();
        let inner = Arc::new(Inner {
            storage,
            env,
            meta: meta.into(),
            changed: Default::default(),
            waiting: 0.into(),
            commits: Default::default(),
            commit_done: Default::default(),
            work: Default::default(),
            superblock: superblock.into(),
            read_only,
            extent_bytes: superblock.geometry.extent_bytes as usize,
            poison: Default::default(),
            warnings: warnings.into(),
            watch: Default::default(),
        });
        if !read_only {
            inner.begin_session(tail, &damaged)?;
        }
        debug_assert!(notes.iter().all(|f| f.severity != Severity::Corrupt));
        Ok(Self { inner })
    }

    /// Commits, writes all metadata back and marks the store clean. Other handles of the store
    /// find it closed for writing.
    ///
    /// # Errors
    /// What the last writes failed with; the store is then as after a crash.
    pub fn close(self) -> Result<()> {
        if self.inner.read_only {
            return Ok(());
        }
        let _work = self.inner.work.lock().unwrap_or_else(PoisonError::into_inner);
        self.inner.commit()?;
        let result = self.inner.close();
        self.inner.poison("the store was closed");
        result
    }
}

impl Inner {
    /// Makes what recovery found durable under a new session, and only then starts a new tail:
    /// until that moment a crash finds the old one.
    fn begin_session(
        &self,
        tail: Option<Box<dyn TailMemory>>,
        damaged_superblocks: &[u64],
    ) -> Result<()> {
        self.heal_superblock(damaged_superblocks)?;
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
        self.commit_once(WriteBack::Session)
    }

    /// Writes all blocks back as of the last group and lets the superblock say so. That takes no
    /// room in the journal, so that processes that die soon after opening, one after the other,
    /// cannot fill it. Nothing may be pending.
    fn empty_journal(&self) -> Result<()> {
        let mut copies = self.meta().capture_durable();
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
        self.update_superblock(|superblock| {
            superblock.clean_sequence = durable;
            superblock.clean_marks = marks;
        })?;
        self.meta().log.release_journal();
        Ok(())
    }

    fn close(&self) -> Result<()> {
        // Nobody else commits: `commit` is refused once poisoned, and until then it is serial.
        while !self.meta().is_idle() {
            self.commit_once(WriteBack::All)?;
        }
        let (durable, marks) = {
            let meta = self.meta();
            (meta.log.durable, meta.marks())
        };
        self.update_superblock(|superblock| {
            superblock.clean_sequence = durable;
            superblock.clean_marks = marks;
        })?;
        if let Some(tail) = self.meta().log.take_tail() {
            tail.remove();
        }
        Ok(())
    }

    /// Writes the copies of the superblock that are not good again, and only those: there may be
    /// no more than one good one, and a torn write of it would leave none.
    fn heal_superblock(&self, damaged: &[u64]) -> Result<()> {
        let superblock = *self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
        for address in damaged {
            let written = self.storage.write_at(*address, &superblock.encode(*address));
            written.and_then(|()| self.storage.flush()).map_err(|error| {
                self.poison("writing the superblock failed");
                Error::io(error, "writing the superblock failed")
            })?;
        }
        Ok(())
    }

    /// Changes the superblock, all copies of it, each of which is good: [`Inner::heal_superblock`]
    /// came first.
    pub(super) fn update_superblock(&self, change: impl FnOnce(&mut Superblock)) -> Result<()> {
        let mut superblock = self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut new = *superblock;
        change(&mut new);
        new.sequence += 1;
        write_superblock(&*self.storage, &new).map_err(|error| {
            self.poison("writing the superblock failed");
            Error::io(error, "writing the superblock failed")
        })?;
        *superblock = new;
        Ok(())
    }
}

/// The uuid of the store at `path`, without locking it.
///
/// # Errors
/// `NotFound`, or what the superblock cannot be read for.
pub fn peek_uuid(path: &Path) -> Result<[u8; 16]> {
    use std::os::unix::fs::FileExt;
    let missing = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Error::not_found(format!("no store at `{}`", path.display()))
        }
        _ => Error::io(error, format!("cannot read `{}`", path.display())),
    };
    let file = std::fs::File::open(path).map_err(missing)?;
    let mut first = Err(Error::invalid("not a DBS store"));
    for address in [0, SUPERBLOCK_SECOND] {
        let mut block = [0; BLOCK_BYTES as usize];
        let decoded = file
            .read_exact_at(&mut block, address)
            .map_err(|_| Error::invalid("not a DBS store: too short"))
            .and_then(|()| Superblock::decode(&block, address));
        match decoded {
            Ok(superblock) => return Ok(superblock.uuid),
            Err(error) if address == 0 => first = Err(error.context(path.display())),
            Err(_) => {}
        }
    }
    first
}

/// Writes all copies, never two at once that a torn write could cost.
fn write_superblock(storage: &dyn Storage, superblock: &Superblock) -> std::io::Result<()> {
    let last = superblock.geometry.superblock_last();
    for addresses in [&[SUPERBLOCK_SECOND, last][..], &[0]] {
        let blocks: Vec<_> = addresses.iter().map(|at| (*at, superblock.encode(*at))).collect();
        let writes: Vec<_> =
            blocks.iter().map(|(offset, buf)| WriteRequest { offset: *offset, buf }).collect();
        storage.write_many(&writes)?;
        storage.flush()?;
    }
    Ok(())
}

type OpenedTail = (Option<Box<dyn TailMemory>>, Option<String>);

struct WantedTail<'a> {
    place: &'a TailPlace,
    uuid: [u8; 16],
    /// Which file or device the store is.
    store: &'a str,
    knows_boot: bool,
    read_only: bool,
}

impl WantedTail<'_> {
    /// The tail, or why there is none.
    fn open(&self) -> Result<OpenedTail> {
        let directory = match self.place {
            TailPlace::None => return Ok((None, None)),
            TailPlace::Directory(directory) => Some(directory.clone()),
            TailPlace::Auto => tails::pick_directory(&tails::default_candidates()),
        };
        if self.read_only {
            let copy = directory.and_then(|at| tails::TailCopy::read(&at, self.uuid, self.store));
            return Ok((copy.map(|copy| Box::new(copy) as _), None));
        }
        let reason = match directory {
            None => "no directory on tmpfs for a tail".to_owned(),
            Some(_) if !self.knows_boot => "the system does not say which boot this is".to_owned(),
            Some(directory) => match tails::FileTail::open(&directory, self.uuid, self.store) {
                Ok(tail) => return Ok((Some(Box::new(tail)), None)),
                Err(error) if *self.place == TailPlace::Auto => error.to_string(),
                Err(error) => return Err(error),
            },
        };
        let effect = "allocating writes commit before they are acknowledged";
        Ok((None, Some(format!("{reason}: {effect}"))))
    }
}

/// Random bytes as a version 4 uuid.
pub(super) fn as_uuid(mut random: [u8; 16]) -> [u8; 16] {
    random[6] = random[6] & 0x0f | 0x40;
    random[8] = random[8] & 0x3f | 0x80;
    random
}

/// A uuid as text.
#[must_use]
pub(super) fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}
