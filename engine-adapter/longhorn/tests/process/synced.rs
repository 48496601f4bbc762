//! A disk that counts its syncs, in front of a file: that of the power cuts of `dbs serve`, which remembers more.

#[allow(dead_code, reason = "what a power cut leaves is not looked at here")]
#[path = "../../../../dbs-cli/tests/powercut/disk.rs"]
mod recorded;

use fuser::BackgroundSession;
use recorded::NAME;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// The disk, as long as it is mounted.
pub struct Disk {
    disk: recorded::Disk,
    _session: BackgroundSession,
}

impl Disk {
    /// Puts a disk with the content of a file in its place: the file's name leads there from now on. `None`, with a
    /// message, where nothing can be mounted.
    pub fn before(path: &Path) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() || !nix::unistd::geteuid().is_root() {
            println!("SKIPPED whether syncs reach the disk: needs /dev/fuse and root");
            return None;
        }
        let mount = path.with_extension("mount");
        fs::create_dir(&mount).unwrap();
        let disk = recorded::Disk::default();
        let session = disk.mount(&mount);
        // A store is sparse, and larger than memory.
        let mut copy = Command::new("cp");
        copy.args(["--sparse=always", "--reflink=never"]).arg(path).arg(mount.join(NAME));
        assert!(copy.status().unwrap().success());
        fs::remove_file(path).unwrap();
        symlink(mount.join(NAME), path).unwrap();
        Some(Self { disk, _session: session })
    }

    /// A sync reaches the disk before this work has ended.
    pub fn synced(&self, what: &str, work: impl FnOnce()) {
        let before = self.disk.len();
        work();
        assert!(self.disk.syncs_from(before) > 0, "{what}: no sync reached the disk");
    }
}
