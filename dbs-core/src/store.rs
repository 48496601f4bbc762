//! A store: open, close, and everything that is not the reading and writing of one volume.

use crate::error::Result;
use crate::info::{CheckReport, Labels, MapRange, SnapshotInfo, StoreInfo, Usage, VolumeInfo, WorkReport};
use crate::io::{Storage, TailMemory};
use crate::volume::Volume;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How to format a store.
#[derive(Debug, Clone)]
pub struct InitOptions {
    /// Size in bytes; required for a new file, for a device or an existing file its own size.
    pub size: Option<u64>,
    /// Extent size in bytes, a power of two from 64 KiB to 4 MiB.
    pub extent_size: u64,
    /// Volume table capacity; by default chosen by size.
    pub max_volumes: Option<u32>,
    /// Snapshot table capacity (heads included); by default chosen by size.
    pub max_snapshots: Option<u32>,
    /// Journal size in bytes; by default chosen by size.
    pub journal_size: Option<u64>,
    /// Size the store can grow to; by default 16 times its size, at most 64 TiB or its size.
    pub max_size: Option<u64>,
    /// Format even over a known signature (never a mounted device or an open store).
    pub force: bool,
}

impl Default for InitOptions {
    fn default() -> Self {
        Self {
            size: None,
            extent_size: 1 << 20,
            max_volumes: None,
            max_snapshots: None,
            journal_size: None,
            max_size: None,
            force: false,
        }
    }
}

/// Which I/O driver to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoDriver {
    /// io_uring where the kernel allows it, else `pread`.
    #[default]
    Auto,
    /// io_uring with `O_DIRECT`.
    Uring,
    /// `pread`/`pwrite`, with `O_DIRECT` where the file system allows it.
    Pread,
}

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
}

/// Source of time and identity, so that a simulation can repeat itself.
pub trait Env: Send + Sync {
    /// Nanoseconds since the Unix epoch.
    fn now_ns(&self) -> u64;
    /// 16 random bytes.
    fn random(&self) -> [u8; 16];
    /// Identity of this boot.
    fn boot_id(&self) -> [u8; 16];
}

/// What a snapshot is created with.
#[derive(Debug, Clone, Default)]
pub struct SnapshotOptions {
    /// Labels to start with.
    pub labels: Labels,
    /// Taken by the system, not by a person.
    pub system: bool,
}

/// An open store. Cloning the handle is cheap; all handles are the same store. All calls block
/// and may be made from many threads at once.
#[derive(Clone)]
pub struct Store {}

#[allow(unused_variables)]
impl Store {
    /// Formats a new store at `path`: a file (made if absent) or a block device.
    ///
    /// # Errors
    /// `Exists` for a known signature without `force`, `Busy` if mounted or open, `Invalid` for
    /// impossible options.
    pub fn init(path: &Path, options: &InitOptions) -> Result<StoreInfo> { todo!() }
    /// Opens the store at `path`. After a crash this replays what was acknowledged.
    ///
    /// # Errors
    /// `NotFound`, `Busy` with the owner's pid, `Corrupt` with region and block.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> { todo!() }
    /// As [`Store::init`], on storage of the caller's.
    pub fn init_on(storage: &dyn Storage, options: &InitOptions, env: &dyn Env) -> Result<()> { todo!() }
    /// As [`Store::open`], on storage of the caller's.
    pub fn open_on(storage: Arc<dyn Storage>, tail: Option<Box<dyn TailMemory>>, env: Arc<dyn Env>, read_only: bool) -> Result<Self> { todo!() }
    /// Commits, checkpoints and marks the store clean. Handles still open keep working on an
    /// error only.
    pub fn close(self) -> Result<()> { todo!() }

    /// Facts about the store.
    pub fn info(&self) -> StoreInfo { todo!() }
    /// All volumes by name. `usage` is filled only if `with_usage`, as it walks every layer.
    pub fn volumes(&self, with_usage: bool) -> Vec<VolumeInfo> { todo!() }
    /// One volume with its usage.
    pub fn volume_info(&self, volume: &str) -> Result<VolumeInfo> { todo!() }
    /// Snapshots of a volume, oldest first.
    pub fn snapshots(&self, volume: &str, with_usage: bool) -> Result<Vec<SnapshotInfo>> { todo!() }
    /// One snapshot with its usage.
    pub fn snapshot_info(&self, volume: &str, snapshot: &str) -> Result<SnapshotInfo> { todo!() }
    /// Volumes and snapshots whose parent is this volume's snapshot (all of its snapshots if
    /// `None`) in other volumes: its clones.
    pub fn children(&self, volume: &str, snapshot: Option<&str>) -> Result<Vec<String>> { todo!() }
    /// Space of a volume (head) or snapshot.
    pub fn usage(&self, volume: &str, snapshot: Option<&str>) -> Result<Usage> { todo!() }

    /// Creates an empty volume; `size` in bytes, a multiple of 512.
    pub fn create_volume(&self, name: &str, size: u64) -> Result<VolumeInfo> { todo!() }
    /// Renames a volume.
    pub fn rename_volume(&self, name: &str, new: &str) -> Result<()> { todo!() }
    /// Changes the size; shrinking discards what is beyond (the caller has asked the user).
    pub fn resize_volume(&self, name: &str, size: u64) -> Result<()> { todo!() }
    /// Deletes a volume and its snapshots. Clones made from them live on.
    ///
    /// # Errors
    /// `Busy` if it is open or a snapshot is protected.
    pub fn delete_volume(&self, name: &str) -> Result<()> { todo!() }
    /// Creates a volume on a snapshot, in constant time.
    pub fn clone_volume(&self, volume: &str, snapshot: &str, new: &str) -> Result<VolumeInfo> { todo!() }
    /// Copies what the volume shares with its origin so that it depends on nothing; can be
    /// stopped (return `false` from `progress(done, total)` in extents) and run again.
    pub fn flatten(&self, volume: &str, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> { todo!() }

    /// Takes a snapshot of the head.
    pub fn create_snapshot(&self, volume: &str, name: &str, options: &SnapshotOptions) -> Result<SnapshotInfo> { todo!() }
    /// Renames a snapshot.
    pub fn rename_snapshot(&self, volume: &str, name: &str, new: &str) -> Result<()> { todo!() }
    /// Deletes a snapshot. Its space comes back through [`Store::work`].
    pub fn delete_snapshot(&self, volume: &str, name: &str) -> Result<()> { todo!() }
    /// Discards the head and starts a new one on the snapshot. Later snapshots stay, as a side
    /// branch.
    pub fn rollback(&self, volume: &str, snapshot: &str) -> Result<()> { todo!() }
    /// Sets or clears the protection from deletion.
    pub fn set_protected(&self, volume: &str, snapshot: &str, protected: bool) -> Result<()> { todo!() }
    /// Replaces all labels of a snapshot.
    pub fn set_labels(&self, volume: &str, snapshot: &str, labels: &Labels) -> Result<()> { todo!() }

    /// Opens a volume (`name`) for reading and writing, or a snapshot (`name@snapshot`) for
    /// reading. The handle keeps it from being deleted.
    pub fn volume(&self, spec: &str) -> Result<Volume> { todo!() }
    /// What differs between two points of one tree: ranges of `to` (the head if `None`) whose
    /// content may differ from `from` (nothing: an empty volume, if `None`).
    pub fn diff(&self, volume: &str, from: Option<&str>, to: Option<&str>, offset: u64, length: u64) -> Result<Vec<MapRange>> { todo!() }

    /// Makes everything acknowledged durable.
    pub fn flush(&self) -> Result<()> { todo!() }
    /// Does up to `steps` steps of background work: merging deleted snapshots, freeing, hole
    /// punching, checkpointing. Safe to call beside any I/O; `remaining == 0` when idle.
    pub fn work(&self, steps: u64) -> Result<WorkReport> { todo!() }
    /// Grows the store to `size` bytes (a file is extended; a device must already have it).
    pub fn grow(&self, size: u64) -> Result<()> { todo!() }
    /// Moves extents towards the start and cuts a file's end off; returns the new size.
    /// Return `false` from `progress(done, total)` to stop.
    pub fn vacuum(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<u64> { todo!() }
    /// Checks all metadata, on disk and in memory, changing nothing.
    pub fn check(&self) -> Result<CheckReport> { todo!() }
    /// All metadata as text for people and tools (JSON object).
    pub fn dump(&self, out: &mut dyn std::io::Write) -> Result<()> { todo!() }
}
