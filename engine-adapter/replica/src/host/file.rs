//! The store of a replica that has one of its own: a sparse file in its directory, which grows so
//! that only a full disk, or the end of what a store can address, is the end of space.

use dbs_core::format::{Geometry, RegionKind};
use dbs_core::io::tail;
use dbs_core::limits::{JOURNAL_MAX_BYTES, STORE_MAX_BYTES};
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, ErrorKind, InitOptions, OpenOptions, Result, Store, TailPlace};
use dbs_service::log;
use nix::errno::Errno;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Name of the file in the replica's directory.
pub const STORE_FILE: &str = "volume.dbs";
/// Free space of the store, beyond what the volume could take at once, that is never fallen short
/// of: more than the fastest writer allocates in the second between two looks.
const FREE_MIN_BYTES: u64 = 256 << 30;
/// What is added beyond that.
const FREE_BYTES: u64 = 1 << 40;
/// Room in the tables: a replica has at most some 250 snapshots, twice that while it is rebuilt.
const SNAPSHOTS_MAX: u32 = 4096;
const VOLUMES_MAX: u32 = 8;
/// Journal of a store whose volume's size is not known yet.
const JOURNAL_BYTES: u64 = 16 << 20;
const JOURNAL_MIN_BYTES: u64 = 1 << 20;
/// How long nothing is tried after the file could not grow.
const GROW_RETRY: Duration = Duration::from_secs(60);

/// How the store is made and opened.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Extent size if it is new.
    pub extent_size: u64,
    /// Whether its data has checksums if it is new.
    pub checksums: bool,
    /// Bytes of memory for checksums, if it is not left to the store.
    pub checksum_cache: Option<u64>,
    /// Directory of the tail, if it is not left to us.
    pub tail: Option<PathBuf>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { extent_size: 1 << 20, checksums: true, checksum_cache: None, tail: None }
    }
}

/// The file of a store.
#[derive(Debug, Clone)]
pub struct StoreFile {
    /// Where it is.
    pub path: PathBuf,
    /// How it is made and opened.
    pub options: StoreOptions,
}

impl StoreFile {
    /// The file in a replica's directory.
    #[must_use]
    pub fn of(dir: &Path, options: StoreOptions) -> Self {
        Self { path: dir.join(STORE_FILE), options }
    }

    /// Opens it for writing; made for a volume of this size if it is absent.
    ///
    /// # Errors
    /// `Busy` if another process has it, those of the store.
    pub fn open_or_create(&self, size: Option<u64>) -> Result<Store> {
        match self.open() {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            result => return result,
        }
        self.create(size)?;
        self.open()
    }

    /// Opens it for writing.
    ///
    /// # Errors
    /// `NotFound`, `Busy` if another process has it, those of the store.
    pub fn open(&self) -> Result<Store> {
        let store = self.open_with_tail(false)?;
        if self.options.checksums && store.checksums().is_none() {
            let path = self.path.display();
            let text = "the store was made without checksums and stays without; a new replica has \
                        them";
            log::warn("checksums", &[("store", &path), ("message", &text)]);
        }
        Ok(store)
    }

    /// Opens it for reading only, with the tail that [`Self::open`] would take. A tail that is not there can still be named
    /// afterwards: [`Self::open`] makes it worth nothing.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn look(&self) -> Result<Store> {
        self.open_with_tail(true)
    }

    fn open_with_tail(&self, read_only: bool) -> Result<Store> {
        let checksum_cache = self.options.checksum_cache;
        let options =
            |tail| OpenOptions { read_only, tail, checksum_cache, ..OpenOptions::default() };
        if let Some(directory) = &self.options.tail {
            return Store::open(&self.path, &options(TailPlace::Directory(directory.clone())));
        }
        if let Some(directory) = host_tail() {
            match Store::open(&self.path, &options(TailPlace::Directory(directory))) {
                // Better a tail in our own system, or none. Not after other errors: a tail that is there may have
                // writes that were acknowledged.
                Err(e) if matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::Unsupported) => {
                    log::warn("tail", &[("error", &e)]);
                }
                result => return result,
            }
        }
        Store::open(&self.path, &options(TailPlace::Auto))
    }

    /// Makes the file. It appears under its name when it is complete.
    fn create(&self, size: Option<u64>) -> Result<()> {
        let new = self.path.with_extension(format!("dbs.{}.new", std::process::id()));
        match fs::remove_file(&new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io(e, format!("removing the old {}", new.display())));
            }
            _ => {}
        }
        let result = self.init(&new, size).and_then(|()| publish(&new, &self.path));
        // Its name is not needed any more, or it is of no use.
        let _gone_already = fs::remove_file(&new);
        result
    }

    fn init(&self, path: &Path, size: Option<u64>) -> Result<()> {
        let volume = size.unwrap_or(0);
        let journal = match size {
            Some(size) => (size / 1024).clamp(JOURNAL_MIN_BYTES, JOURNAL_MAX_BYTES / 4),
            None => JOURNAL_BYTES,
        };
        let options = InitOptions {
            extent_size: self.options.extent_size,
            checksums: self.options.checksums,
            max_volumes: Some(VOLUMES_MAX),
            max_snapshots: Some(SNAPSHOTS_MAX),
            journal_size: Some(journal / BLOCK_BYTES * BLOCK_BYTES),
            max_size: Some(STORE_MAX_BYTES),
            ..InitOptions::default()
        };
        let metadata = Geometry::plan(STORE_MAX_BYTES, &options)?.region(RegionKind::Data).offset;
        let mut data = wanted_data(0, volume);
        loop {
            let size = metadata.saturating_add(data).min(STORE_MAX_BYTES);
            match Store::init(path, &InitOptions { size: Some(size), ..options.clone() }) {
                Ok(_) => return Ok(()),
                // The file system has smaller files; what the volume alone takes must fit.
                Err(e) if is_too_big(&e) && data / 2 > volume => data /= 2,
                Err(e) => return Err(e),
            }
        }
    }
}

/// Gives a complete new store its name, unless another process was first.
pub fn publish(new: &Path, path: &Path) -> Result<()> {
    let failed = |e| Error::io(e, format!("giving {} its name", path.display()));
    match fs::hard_link(new, path) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        // A file system without links.
        Err(_) => fs::rename(new, path).map_err(failed)?,
    }
    let directory = path.parent().unwrap_or(Path::new("."));
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)
}

/// Bytes of data a store should have room for, with so much in use.
fn wanted_data(allocated: u64, volume: u64) -> u64 {
    allocated.saturating_add(volume.saturating_mul(8)).saturating_add(FREE_BYTES)
}

fn is_too_big(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|e| e.downcast_ref::<io::Error>());
    source.and_then(io::Error::raw_os_error) == Some(Errno::EFBIG as i32)
}

/// A directory of the host's on tmpfs: a container's own would not outlive it.
fn host_tail() -> Option<PathBuf> {
    let here = tail::default_candidates();
    let host = |path: &PathBuf| Some(Path::new("/host").join(path.strip_prefix("/").ok()?));
    tail::pick_directory(&here.iter().filter_map(host).collect::<Vec<_>>())
}

/// Grows a store before its space is used up.
#[derive(Debug, Default)]
pub struct Growth {
    failed: Mutex<Option<Instant>>,
}

impl Growth {
    /// Grows `store` if it has less free than its volumes, now of `volume` bytes, could soon need.
    pub fn look(&self, store: &Store, volume: u64) {
        let info = store.info();
        let free = info.extents_free.saturating_mul(info.extent_size);
        if free >= volume.saturating_mul(4).saturating_add(FREE_MIN_BYTES)
            || info.size >= info.max_size
        {
            return;
        }
        let mut failed = self.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if failed.is_some_and(|at| at.elapsed() < GROW_RETRY) {
            return;
        }
        let wanted = info.metadata.saturating_add(wanted_data(info.allocated, volume));
        let mut target = wanted.min(info.max_size);
        let mut troubled = false;
        while target > info.size {
            let Err(e) = store.grow(target) else { break };
            if !troubled {
                log::warn("grow", &[("size", &target), ("error", &e)]);
            }
            troubled = true;
            let stopped = matches!(e.kind(), ErrorKind::Poisoned | ErrorKind::Elsewhere);
            if stopped || target - info.size < FREE_MIN_BYTES / 4 {
                break;
            }
            // The file system may have room for a part of it.
            target = info.size + (target - info.size) / 2;
        }
        *failed = troubled.then(Instant::now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_new_store_is_sparse_and_grows_with_its_volume() {
        let directory = tempfile::tempdir().unwrap();
        let file = StoreFile::of(directory.path(), StoreOptions::default());
        assert_eq!(file.open().err().unwrap().kind(), ErrorKind::NotFound);
        // What a process that was killed in the middle has left.
        let left = file.path.with_extension(format!("dbs.{}.new", std::process::id()));
        fs::write(&left, "half").unwrap();
        let volume = 64 << 20;
        let store = file.open_or_create(Some(volume)).unwrap();
        assert!(!left.exists());
        let meta = fs::metadata(&file.path).unwrap();
        assert!(meta.len() > FREE_BYTES && meta.blocks() * 512 < 8 << 20, "{meta:?}");
        assert_eq!(file.open().err().unwrap().kind(), ErrorKind::Busy);
        let growth = Growth::default();
        growth.look(&store, volume);
        assert_eq!(store.info().size, meta.len(), "there is enough");

        let volume = 1 << 40;
        growth.look(&store, volume);
        let info = store.info();
        assert!(info.extents_free * info.extent_size > 8 * volume, "{info:?}");
        store.close().unwrap();
        let size = file.open_or_create(None).unwrap().info().size;
        assert_eq!(size, info.size, "it is the same store");
    }

    #[test]
    fn a_store_has_checksums_if_it_was_made_with_them() {
        for checksums in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let file = |checksums| {
                let options = StoreOptions { checksums, ..StoreOptions::default() };
                StoreFile::of(directory.path(), options)
            };
            let store = file(checksums).open_or_create(Some(64 << 20)).unwrap();
            let meta = fs::metadata(&file(true).path).unwrap();
            assert!(meta.len() > FREE_BYTES && meta.blocks() * 512 < 8 << 20, "{meta:?}");
            store.close().unwrap();
            let store = file(!checksums).open_or_create(Some(64 << 20)).unwrap();
            assert_eq!(store.checksums().is_some(), checksums);
        }
    }

    #[test]
    fn what_another_process_has_made_is_taken() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(STORE_FILE);
        let new = directory.path().join("new");
        fs::write(&path, "theirs").unwrap();
        fs::write(&new, "ours").unwrap();
        publish(&new, &path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"theirs");
    }

    #[test]
    fn the_end_of_what_can_be_addressed_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let file = StoreFile::of(directory.path(), StoreOptions::default());
        let store = file.open_or_create(Some(1 << 20)).unwrap();
        let growth = Growth::default();
        for _ in 0..3 {
            growth.look(&store, 1 << 50);
        }
        let size = store.info().size;
        growth.look(&store, 1 << 50);
        assert_eq!(store.info().size, size);
        store.create_volume("v", 1 << 20).unwrap();
        store.volume("v").unwrap().write_at(0, &[1; 4096], true).unwrap();
    }
}
