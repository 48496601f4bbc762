//! A disk that counts its syncs, in front of a file: the one of the power cuts of `dbs serve`, which does more.

use crate::disk::{self, Mounted};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

/// The disk, as long as it is mounted.
pub struct Disk {
    disk: disk::Disk,
    _mounted: Mounted,
}

impl Disk {
    /// Puts a disk with the content of a file in its place: the file's name leads there from now on. `None`, with a
    /// message, where nothing can be mounted.
    pub fn before(path: &Path) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() || !nix::unistd::geteuid().is_root() {
            println!("SKIPPED whether syncs reach the disk: needs /dev/fuse and root");
            return None;
        }
        let content = File::options().read(true).write(true).open(path).unwrap();
        fs::remove_file(path).unwrap();
        let (disk, mounted) = disk::Disk::mount(Box::new(content), path.with_extension("mount"));
        symlink(mounted.file(), path).unwrap();
        Some(Self { disk, _mounted: mounted })
    }

    /// A sync reaches the disk before this work has ended.
    pub fn synced(&self, what: &str, work: impl FnOnce()) {
        let before = self.disk.len();
        work();
        assert!(!self.disk.syncs_from(before).is_empty(), "{what}: no sync reached the disk");
    }
}
