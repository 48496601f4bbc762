//! A store: open, close, and everything that is not the reading and writing of one volume.

mod aside;
mod ask;
mod attributes;
pub(crate) mod backing;
mod bring;
mod check;
mod commands;
mod commit;
mod compress;
mod diff;
mod dump;
mod elsewhere;
mod encryption;
mod expected;
mod extents;
pub(crate) mod facts;
mod flush;
mod heal;
mod housekeep;
mod identity;
mod last_tail;
mod layers;
mod open;
mod pages;
mod prune;
mod rebuild;
mod recover;
#[cfg(test)]
mod renamed;
mod repair;
mod restore;
mod rewrite;
mod ring;
mod rollback;
mod scrub;
pub(crate) mod share;
mod slots;
mod space;
mod steps;
mod still;
mod sums;
mod turns;
mod unreadable;
mod watch;
mod work;

pub use crate::format::InitOptions;
#[doc(hidden)]
pub use crate::io::env::Env;
pub use crate::io::open::IoDriver;
pub use crate::meta::relink::Link;
pub use backing::Backing;
pub(crate) use bring::is_damage;
pub use elsewhere::{TAKE_OVER_TIME, is_written_elsewhere};
pub use encryption::WrappedKey;
pub use expected::Expected;
pub use flush::{Asked, Flush, StartFlush};
pub use identity::{is_same_place, parse_uuid, peek_key, peek_place, peek_uuid, uuid_text};
pub use repair::{OpenRepair, Repair, RepairOptions};
pub use turns::Wake;

use crate::crypt::Secret;
use crate::error::{Error, Result};
use crate::format::{RegionKind, Superblock};
use crate::info::Labels;
use crate::io::{DirectIo, Storage};
use crate::limits::SUMS_CACHE_MIN_BYTES;
use crate::looks;
use crate::meta::locks::{FenceId, HoldId, Space};
use crate::meta::{Meta, Seen, Sight, Step, Stop};
use crate::units::{BLOCK_BYTES, VolumeId, format_size};
use share::{Alone, Share};
use std::ops::{Deref, Range};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use turns::Turns;

/// Where the tail lives.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum TailPlace {
    /// A runtime directory on tmpfs, none if there is none.
    #[default]
    Auto,
    /// No tail: allocating writes commit before they are acknowledged.
    None,
    /// This directory, which must be on tmpfs.
    Directory(PathBuf),
}

/// How to open a store.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Open for reading only (shared lock).
    pub read_only: bool,
    /// I/O driver.
    pub driver: IoDriver,
    /// Tail.
    pub tail: TailPlace,
    /// Bytes of memory for checksums, at least 256 KiB; by default 64 MiB, which hold those of about
    /// 64 GiB of data. Nothing in a store without them.
    pub checksum_cache: Option<u64>,
    /// Bytes of memory for bitmaps of extents that are neither full nor one stretch of written blocks, and for
    /// what was found by looking through the layers of volumes and snapshots: 64 MiB hold the bitmaps of 1.3 TiB.
    /// Bitmaps that are not in memory are read from the store, by the first request that needs them. By
    /// default all bitmaps stay in memory, and `lookup_memory` counts.
    pub metadata_memory: Option<u64>,
    /// Bytes of memory for what was found by looking through layers, if there is no `metadata_memory`; by default
    /// 64 MiB. What is not remembered is looked up again: that costs a request microseconds for each
    /// hundred snapshots below.
    pub lookup_memory: Option<u64>,
    /// Files that volumes rest on, for as long as the store is open ([`Store::attach_backing`]).
    pub backing: Vec<Arc<dyn Backing>>,
    /// Unlocks encrypted volumes when they are opened: those whose secret it is ([`Store::unlock`]).
    pub secret: Option<Secret>,
}

impl OpenOptions {
    /// Whether there can be so little memory for checksums.
    ///
    /// # Errors
    /// `Invalid` if not.
    pub fn check_checksum_cache(&self) -> Result<()> {
        let Some(bytes) = self.checksum_cache.filter(|bytes| *bytes < SUMS_CACHE_MIN_BYTES) else {
            return Ok(());
        };
        Err(Error::invalid(format!(
            "the memory for checksums must be at least {}, and not {bytes} bytes",
            format_size(SUMS_CACHE_MIN_BYTES)
        )))
    }
}

/// What a snapshot is created with.
#[derive(Debug, Clone, Default)]
pub struct SnapshotOptions {
    /// Labels to start with.
    pub labels: Labels,
    /// Taken by the system, not by a person.
    pub system: bool,
    /// Creation time in nanoseconds since the Unix epoch, where it is known from elsewhere; by
    /// default the clock's.
    pub created_ns: Option<u64>,
    /// Says in the same step whether the volume is rebuilding from then on
    /// ([`Store::set_rebuilding`]). That this begins needs that nobody has the volume open.
    pub rebuilding: Option<bool>,
}

impl SnapshotOptions {
    /// Whether a snapshot of this name could be created with these, wherever there is room for it.
    ///
    /// # Errors
    /// `Invalid` for an impossible name, or for labels that are too long.
    pub fn check(&self, name: &str) -> Result<()> {
        crate::meta::names::check("snapshot", name)?;
        crate::meta::tree::encode_labels(&self.labels).map(drop)
    }
}

/// An open store. Cloning the handle is cheap; all handles are the same store. All calls block
/// and may be made from many threads at once.
#[derive(Clone)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

/// What all handles share. Locks, and turns at commits and flushes, are taken in this order: `scrub`, `relearn`,
/// `stills`, `work`, `steps`, `expanding`, `commits`, `superblock`, `flushes`, `meta`; `changes`, `poison`, `warnings`, `passed`, `files`, `again` and `still` are leaves. Held across
/// I/O are `scrub` (one scrub), `relearn`, `stills` (one check), `work` (one job in the background), `steps` (one of its
/// steps), `expanding` (one extent), `superblock` (while it is updated), and a turn. `meta`, which requests take, never is.
pub(crate) struct Inner {
    pub(crate) storage: Arc<dyn Storage>,
    env: Arc<dyn Env>,
    /// Who changes it has it alone, but for requests: see [`Shared`].
    meta: Share<Meta>,
    /// Something that others may wait for has changed in `meta`: how often.
    changes: Mutex<u64>,
    changed: Condvar,
    waiting: AtomicUsize,
    commits: Turns,
    /// Turns at flushing the storage.
    flushes: Turns,
    /// One piece of background work at a time.
    work: Mutex<()>,
    /// Turns at its steps: who holds `work` for long gives them up in between.
    steps: steps::Steps,
    /// Held by who expands an extent, for as long as that takes.
    expanding: Mutex<()>,
    /// A vacuum runs.
    vacuum: AtomicBool,
    superblock: Mutex<Superblock>,
    /// There was no space for the superblock's last copy. Changed with `superblock` locked.
    last_copy_missing: AtomicBool,
    pub(crate) read_only: bool,
    /// Extent size; it never changes.
    pub(crate) extent_bytes: usize,
    /// Whether data has checksums; it never changes.
    pub(crate) has_sums: bool,
    /// Somebody closes the store: nothing new begins.
    closing: AtomicBool,
    /// Why nothing is written any more.
    poison: OnceLock<String>,
    warnings: Mutex<Vec<String>>,
    /// This session, if the tail of the one before was gone.
    lost_tail: Option<u64>,
    /// The page a scrub goes on with.
    scrub: Mutex<u32>,
    /// Damage that a scrub which goes on will not come by again: what it found before it was stopped, and what was
    /// found when it was moved.
    passed: Mutex<scrub::Passed>,
    /// The page from which on checksums are to be made again that a crash has cost.
    relearn: Mutex<Option<u32>>,
    /// When what could not be read of metadata is tried again.
    again: Mutex<bring::Again>,
    watch: watch::Watch,
    /// Whether another machine writes the store.
    looks: elsewhere::Looks,
    /// Somebody reads the metadata as it was.
    still: Mutex<Option<Arc<still::Still>>>,
    /// Held by who does.
    stills: Mutex<()>,
    /// The files that were given for volumes which rest on one.
    files: Mutex<backing::Files>,
    /// Those that were given with the options.
    given: OnceLock<Vec<Arc<dyn Backing>>>,
    /// The secret that was given with them.
    secret: OnceLock<Secret>,
    /// Volumes that it is not tried for.
    not_secret: Mutex<encryption::NotGiven>,
    /// Which file or device this is, as long as the system runs.
    place: OnceLock<String>,
}

/// The state, shared by requests that run beside one another. They only look at it, but for what is in
/// [lanes](crate::meta::lanes).
pub(crate) struct Shared<'a> {
    inner: &'a Inner,
    meta: share::Shared<'a, Meta>,
}

impl Deref for Shared<'_> {
    type Target = Meta;

    #[inline]
    fn deref(&self) -> &Meta {
        &self.meta
    }
}

impl Drop for Shared<'_> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.inner.poison(INCONSISTENT);
        }
    }
}

const INCONSISTENT: &str = "an internal error left the state inconsistent";

/// Blocks of a volume held by an operation, until it ends.
pub(crate) struct Hold<'a> {
    inner: &'a Inner,
    id: HoldId,
}

impl Hold<'_> {
    /// The number of the hold, which the caller gives back itself.
    pub(crate) fn keep(self) -> HoldId {
        std::mem::ManuallyDrop::new(self).id
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.inner.meta().locks.release(self.id);
        self.inner.wake();
    }
}

/// A number of the fence. What was planned in the same step stays where it is until this is dropped:
/// space freed since then is not used again, and nothing is merged that has got out of sight since then.
pub(crate) struct Fenced<'a> {
    inner: &'a Inner,
    id: FenceId,
}

impl Fenced<'_> {
    /// Its number.
    pub(crate) fn number(&self) -> u64 {
        self.id.number
    }
}

impl Drop for Fenced<'_> {
    fn drop(&mut self) {
        self.inner.meta().fence.end(self.id);
        self.inner.wake();
    }
}

impl Store {
    /// Reads and writes of volumes begun since the store was opened: whether it is in use shows in
    /// the difference.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.inner.meta().requests_begun()
    }

    /// What the storage driver reads and writes with, for a caller that transfers the segments of
    /// a [`Request`](crate::volume::Request) itself; `None` if the storage has no descriptor.
    ///
    /// # Errors
    /// `Io` if the process may open no more descriptors.
    pub fn direct_io(&self) -> Result<Option<DirectIo>> {
        let found = self.inner.storage.direct_io();
        found.map_err(|error| Error::io(error, "duplicating the store's descriptor failed"))
    }

    /// Whether it is known that the device writes a block of 4 KiB whole or not at all, also when the power fails: that
    /// of a store in a file is not known.
    #[must_use]
    pub fn writes_whole_blocks(&self) -> bool {
        self.inner.storage.writes_whole_blocks()
    }
}

impl Inner {
    /// The state, for who changes it. A panic while it was held makes it untrustworthy: nothing is
    /// written after.
    pub(crate) fn meta(&self) -> Alone<'_, Meta> {
        let (meta, is_broken) = self.meta.alone();
        looks::begin();
        if is_broken {
            self.poison(INCONSISTENT);
        }
        meta
    }

    /// The state, for a request that only looks at it and changes what is in lanes.
    #[inline]
    pub(crate) fn shared(&self) -> Shared<'_> {
        let (meta, is_broken) = self.meta.share();
        looks::begin();
        if is_broken {
            self.poison(INCONSISTENT);
        }
        Shared { inner: self, meta }
    }

    /// Waits until something in the state has changed.
    fn wait<'a>(&'a self, meta: Alone<'a, Meta>) -> Alone<'a, Meta> {
        // Before the state is let go: who changes it from then on sees that somebody waits.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = *changes;
        drop(meta);
        let changes = self.changed.wait_while(changes, |now| *now == seen);
        drop(changes.unwrap_or_else(PoisonError::into_inner));
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.meta()
    }

    /// Whether anybody waits for a change.
    #[cfg(test)]
    pub(crate) fn is_waited_for(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Wakes those who wait for a change, if anybody does.
    #[inline]
    pub(crate) fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&self) {
        *self.changes.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }

    /// Waits for blocks of a volume's head.
    pub(crate) fn hold(&self, volume: VolumeId, blocks: Range<u64>, exclusive: bool) -> Hold<'_> {
        self.hold_in(Space::Head(volume), blocks, exclusive)
    }

    /// Waits for blocks.
    pub(crate) fn hold_in(&self, space: Space, blocks: Range<u64>, exclusive: bool) -> Hold<'_> {
        let mut meta = self.meta();
        let id = meta.locks.queue(space, blocks, exclusive);
        while !meta.locks.granted(id) {
            meta = self.wait(meta);
        }
        Hold { inner: self, id }
    }

    /// Keeps what is planned in this hold of the state where it is.
    pub(crate) fn fence(&self, meta: &Meta) -> Fenced<'_> {
        Fenced { inner: self, id: meta.fence.begin() }
    }

    /// Waits for a whole volume: no write is in flight while the guard lives.
    pub(crate) fn hold_all(&self, volume: VolumeId) -> Hold<'_> {
        self.hold(volume, 0..u64::MAX, true)
    }

    /// Waits until nobody can be shown any more what was lost sight of until `until`.
    ///
    /// # Errors
    /// `Io`, `Poisoned`.
    pub(crate) fn wait_until_unseen(&self, until: Sight) -> Result<()> {
        let mut meta = self.meta();
        while let Some(seen) = meta.still_seen(until) {
            self.check_sound()?;
            meta = match seen {
                Seen::ByReads => self.wait(meta),
                Seen::ByCrash => {
                    drop(meta);
                    self.commit()?;
                    self.meta()
                }
            };
        }
        Ok(())
    }

    /// Takes a step of the state machine, doing what it asks for until it succeeds. The second
    /// value says that a commit must come before the acknowledgement.
    pub(crate) fn step<T>(&self, mut take: impl FnMut(&mut Meta) -> Step<T>) -> Result<(T, bool)> {
        let mut brought = self.bring();
        loop {
            let mut meta = self.meta();
            // Blocks that the caller holds may be those of a write that was dropped.
            self.check_sound()?;
            let stop = match take(&mut meta) {
                Ok(value) => {
                    let must_commit = meta.publish();
                    let changes = meta.changes;
                    drop(meta);
                    self.watch.note(changes);
                    return Ok((value, must_commit));
                }
                Err(stop) => stop,
            };
            let available = meta.extents.available();
            drop(meta);
            match stop {
                Stop::Error(error) => return Err(error),
                Stop::Room(region, blocks) => self.reserve(region, blocks)?,
                Stop::Long => self.commit()?,
                Stop::Space => self.make_space(available)?,
                Stop::Away { extent, ahead } => brought.of(extent, ahead)?,
                Stop::Expand { extent, owner } => self.expand(extent, owner)?,
            }
        }
    }

    /// As [`Inner::step`], for commands: what they did is durable on return.
    pub(crate) fn command<T>(&self, take: impl FnMut(&mut Meta) -> Step<T>) -> Result<T> {
        self.check_writable()?;
        let value = self.step_in_group(take)?;
        self.commit()?;
        Ok(value)
    }

    /// As [`Inner::step`], once the next group has room for the records of a command: those of many commands that come
    /// while one commit runs may be longer than the journal.
    pub(crate) fn step_in_group<T>(&self, mut take: impl FnMut(&mut Meta) -> Step<T>) -> Result<T> {
        let (value, _) = self.step(|meta| {
            meta.check_log()?;
            take(meta)
        })?;
        Ok(value)
    }

    /// Whether anything new may be written.
    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_sound()?;
        if self.closing.load(Ordering::Relaxed) {
            return Err(poisoned("the store is being closed"));
        }
        Ok(())
    }

    /// Whether what was begun may be written: that goes on while the store is being closed.
    pub(crate) fn check_sound(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::read_only("the store is open for reading only"));
        }
        self.poison.get().map_or(Ok(()), |why| Err(poisoned(why)))
    }

    /// Stops all writing: after a failed write of metadata or a failed flush nobody knows what is
    /// on the device, and only recovery finds out.
    pub(crate) fn poison(&self, why: &str) {
        self.poison.get_or_init(|| why.to_owned());
    }

    /// Stops all writing for this error. Gives back what whoever met it is told: never `NoSpace`, after
    /// which callers go on as if nothing had happened.
    pub(crate) fn poison_by(&self, error: Error) -> Error {
        self.poison(&error.to_string());
        error.stopping()
    }

    pub(crate) fn warn(&self, text: String) {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }

    /// Reserves storage for metadata blocks, so that writing them back cannot fail for space.
    fn reserve(&self, region: RegionKind, blocks: Range<u32>) -> Result<()> {
        let geometry = self.meta().geometry;
        let length = u64::from(blocks.end - blocks.start) * BLOCK_BYTES;
        for copy in 0..2 {
            let at = geometry.block_address(region, blocks.start, copy);
            self.storage.allocate(at, length).map_err(|error| {
                Error::io(error, format!("cannot reserve space for the {}", region.name()))
            })?;
        }
        self.meta().reserved(region, &blocks);
        Ok(())
    }

    /// Reserves storage for the metadata of discards over what a snapshot holds, while the file system has
    /// some: they take no data, and are what is tried when it is full.
    fn reserve_for_discards(&self) {
        let blocks = self.meta().spares_to_reserve();
        if let Some(blocks) = blocks {
            // Without it they go on as well, and blocks may keep their content.
            let _full_already = self.reserve(RegionKind::Spares, blocks);
        }
    }

    /// Makes deleted space allocatable, more extents than the `before` that did not suffice.
    ///
    /// # Errors
    /// `NoSpace` if there is none.
    fn make_space(&self, before: u32) -> Result<()> {
        let hope = {
            let mut meta = self.meta();
            let full_log = meta.log.is_long();
            let reclaimed = meta.reclaim_leaves(64);
            meta.publish();
            full_log || reclaimed || meta.extents.quarantined() > 0
        };
        self.commit()?;
        let mut meta = self.meta();
        loop {
            meta.release_freed();
            if meta.extents.available() > before {
                return Ok(());
            }
            // Free extents on their way to the device come back in a moment.
            if !meta.extents_wait_for_reads() && meta.extents.punching() == 0 {
                break;
            }
            meta = self.wait(meta);
        }
        // What was freed since the commit needs another one.
        if hope || meta.extents.quarantined() > 0 { Ok(()) } else { Err(meta.no_space()) }
    }
}

/// Makes sure that a name is still that of the volume whose blocks were waited for: what is done by
/// that name to another one would be done beside its writes.
fn still_named(meta: &Meta, name: &str, held: VolumeId) -> Result<()> {
    if meta.find_volume(name)? == held {
        return Ok(());
    }
    Err(Error::not_found(format!("`{name}` was renamed meanwhile")))
}

fn poisoned(why: &str) -> Error {
    if is_written_elsewhere(why) {
        return Error::new(crate::ErrorKind::Elsewhere, why);
    }
    let text =
        format!("the store takes no more writes since an error: {why}; open the store again");
    Error::new(crate::ErrorKind::Poisoned, text)
}
