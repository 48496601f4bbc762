//! The node of a volume's block device: `/dev/longhorn/VOLUME`.

use dbs_core::{Error, Result};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{Gid, chown};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Rights of the node: those of block devices.
const NODE_MODE: u32 = 0o660;
/// The group of a disk's node, which is that of disks on most systems.
pub(super) const DISKS: u32 = 6;

/// What a device is, as far as it matters who may have made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Ublk,
    /// As a disk of the initiator is.
    Other,
}

/// What is in front of the number in the kernel's name of a device of ublk.
const UBLK_PREFIX: &str = "ublkb";

/// The number of the device that the node `VOLUME` leads to; `None` without such a node.
pub(super) fn number(directory: &Path, volume: &str) -> Option<u64> {
    let there = fs::metadata(directory.join(volume)).ok()?;
    there.file_type().is_block_device().then(|| there.rdev())
}

/// Which kind the device is that the node `VOLUME` leads to, as the kernel shows it below `sys`; `None` if
/// there is no such device.
pub(super) fn kind(sys: &Path, directory: &Path, volume: &str) -> Option<Kind> {
    let number = number(directory, volume)?;
    let shown =
        format!("dev/block/{}:{}", nix::sys::stat::major(number), nix::sys::stat::minor(number));
    let device = fs::read_link(sys.join(shown)).ok()?;
    let is_ublk = device.file_name()?.to_str()?.starts_with(UBLK_PREFIX);
    Some(if is_ublk { Kind::Ublk } else { Kind::Other })
}

/// Removes the node `VOLUME`. It goes before its device: the next device of any volume may have the number.
pub(super) fn remove(directory: &Path, volume: &str) -> Result<()> {
    let node = directory.join(volume);
    let Ok(there) = fs::symlink_metadata(&node) else { return Ok(()) };
    if !there.file_type().is_block_device() && !there.is_symlink() {
        return Ok(());
    }
    fs::remove_file(&node).map_err(|e| Error::io(e, format!("removing {}", node.display())))
}

/// Makes the node `VOLUME` of the device with these numbers, in the place of what an earlier device has left. A
/// group that is given may use it, whatever the process's umask is.
pub(super) fn make(
    directory: &Path,
    volume: &str,
    numbers: (u32, u32),
    group: Option<u32>,
) -> Result<PathBuf> {
    let node = directory.join(volume);
    let failed = |e: io::Error| Error::io(e, format!("making {}", node.display()));
    fs::create_dir_all(directory).map_err(failed)?;
    match fs::symlink_metadata(&node) {
        Ok(there) if there.file_type().is_block_device() || there.is_symlink() => {
            fs::remove_file(&node).map_err(failed)?;
        }
        Ok(_) => return Err(failed(io::ErrorKind::AlreadyExists.into())),
        Err(_) => {}
    }
    let number = makedev(u64::from(numbers.0), u64::from(numbers.1));
    mknod(&node, SFlag::S_IFBLK, Mode::from_bits_truncate(NODE_MODE), number)
        .map_err(|e| failed(e.into()))?;
    if group.is_some() {
        chown(&node, None, group.map(Gid::from_raw)).map_err(|e| failed(e.into()))?;
        fs::set_permissions(&node, Permissions::from_mode(NODE_MODE)).map_err(failed)?;
    }
    Ok(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_tells_which_kind_its_device_is() {
        let directory = tempfile::tempdir().unwrap();
        let (nodes, sys) = (directory.path().join("nodes"), directory.path().join("sys"));
        if let Err(error) = make(&nodes, "v", (259, 77), None) {
            println!("SKIPPED nodes of devices: cannot make one ({error}), which takes root");
            return;
        }
        let shown = sys.join("dev/block/259:77");
        fs::create_dir_all(shown.parent().unwrap()).unwrap();
        assert_eq!(kind(&sys, &nodes, "v"), None, "there is no such device");
        for (name, expected) in [("ublkb12", Kind::Ublk), ("sdb", Kind::Other)] {
            std::os::unix::fs::symlink(format!("../../devices/x/block/{name}"), &shown).unwrap();
            assert_eq!(kind(&sys, &nodes, "v"), Some(expected), "{name}");
            fs::remove_file(&shown).unwrap();
        }
        assert_eq!(number(&nodes, "v"), Some(makedev(259, 77)));
        // Who is no owner of a device of ublk gets no part of it, and disks are those of their group.
        let rights = |node: &Path| {
            let there = fs::metadata(node).unwrap();
            (there.mode() & 0o777, there.gid())
        };
        let own = nix::unistd::getegid().as_raw();
        let (mode, group) = rights(&nodes.join("v"));
        assert!(group == own && mode & 0o007 == 0, "{mode:o} {group}");
        let disk = make(&nodes, "v", (259, 77), Some(DISKS)).unwrap();
        assert_eq!(rights(&disk), (0o660, 6));
        remove(&nodes, "v").unwrap();
        assert_eq!((number(&nodes, "v"), kind(&sys, &nodes, "v")), (None, None));
        // What is no device is nobody's.
        fs::write(nodes.join("w"), "mine").unwrap();
        remove(&nodes, "w").unwrap();
        assert!(nodes.join("w").exists() && number(&nodes, "w").is_none());
    }
}
