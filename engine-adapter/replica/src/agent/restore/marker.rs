//! The file of a restore: empty, and named as the one in which upstream's agent keeps what it has restored so far.
//!
//! Who looks after a replica's directory sees by it that a restore is under way, or did not come to its end; and what
//! refuses upstream's file (no room, no right, something else of that name) refuses the restore before it changes anything.
//! Only empty files are removed, under names that were checked: the store's file may be in the same directory.

use dbs_core::{Error, Result};
use nix::errno::Errno;
use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

/// The suffix of a disk that is restored anew beside the old one.
const TEMPORARY: &str = ".snap_tmp";
/// How the names begin of what holds the differences to a backup.
const DELTA: &str = "volume-delta-";

/// Such a file.
pub struct Marker(PathBuf);

impl Marker {
    /// Of the first restore of a process.
    ///
    /// # Errors
    /// `Invalid` for what cannot be made, or if something else than an empty file has the name.
    pub fn snapshot(dir: &Path, disk: &str) -> Result<Self> {
        Self::make(dir, disk, "before restore")
    }

    /// Of a full restore after others.
    ///
    /// # Errors
    /// As [`Marker::snapshot`].
    pub fn temporary(dir: &Path, disk: &str) -> Result<Self> {
        Self::snapshot(dir, &format!("{disk}{TEMPORARY}"))
    }

    /// Of the differences to a backup.
    ///
    /// # Errors
    /// As [`Marker::snapshot`].
    pub fn delta(dir: &Path, base: &str) -> Result<Self> {
        let name = format!("{DELTA}{base}.img");
        Self::make(dir, &name, "before incremental restore")
    }

    fn make(dir: &Path, name: &str, when: &str) -> Result<Self> {
        sweep(dir);
        let path = dir.join(name);
        let cannot = |why: &str| {
            let text = format!("failed to clean up the existing file {name} {when}");
            Error::invalid(format!("{text}: remove {name}: {why}"))
        };
        match path.symlink_metadata() {
            Ok(meta) if is_empty_file(&meta) => {
                fs::remove_file(&path).map_err(|e| cannot(&go(&e)))?;
            }
            // Never ours, and somebody may need it.
            Ok(_) => return Err(cannot("it is not an empty file: move it away")),
            Err(_) => {}
        }
        match File::create_new(&path) {
            Ok(_) => Ok(Self(path)),
            Err(e) => Err(Error::invalid(format!("open {name}: {}", go(&e)))),
        }
    }

    /// Removes it.
    pub fn remove(&self) {
        // It means nothing where it stays.
        let _ = fs::remove_file(&self.0);
    }
}

/// Removes the files of restores that were cut off.
fn sweep(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_marker = name.ends_with(TEMPORARY) || name.starts_with(DELTA);
        if is_marker && entry.metadata().is_ok_and(|meta| is_empty_file(&meta)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn is_empty_file(meta: &Metadata) -> bool {
    meta.is_file() && meta.len() == 0
}

/// An error as Go writes it.
fn go(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(code) => Errno::from_raw(code).desc().to_lowercase(),
        None => error.to_string(),
    }
}
