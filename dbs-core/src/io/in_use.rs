//! Whether the system itself uses a device or file: mounted, swap, or below another device.

use crate::error::{Error, Result};
use nix::sys::stat::{major, minor};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Devices looked at for one question; a stack of devices is never this large.
const DEVICES_MAX: usize = 4096;

/// What uses the device or file at `path`, if anything does, as a sentence with the way out.
///
/// # Errors
/// `path` or the system's tables cannot be read.
pub fn in_use(path: &Path) -> Result<Option<String>> {
    let failed = |what: &Path| {
        let what = what.display().to_string();
        move |error| Error::io(error, format!("cannot look at `{what}`"))
    };
    let metadata = fs::metadata(path).map_err(failed(path))?;
    let mut devices = BTreeSet::new();
    if metadata.file_type().is_block_device() {
        let device = Device::of(metadata.rdev());
        if let Some(holder) = collect(device, &mut devices) {
            return Ok(Some(format!(
                "`{}` is part of the device `{holder}`; take that down first",
                path.display()
            )));
        }
    }
    let is_same = |other: &Path| {
        fs::metadata(other).is_ok_and(|other| {
            let same = (other.dev(), other.ino()) == (metadata.dev(), metadata.ino());
            same || other.file_type().is_block_device()
                && devices.contains(&Device::of(other.rdev()))
        })
    };
    if !devices.is_empty() {
        let table = Path::new("/proc/self/mountinfo");
        let mounts = fs::read(table).map_err(failed(table))?;
        for mount in parse_mounts(&String::from_utf8_lossy(&mounts)) {
            // Some file systems show a device number of their own, but name the device.
            let named = mount.source.starts_with("/dev/") && is_same(Path::new(&mount.source));
            if devices.contains(&mount.device) || named {
                return Ok(Some(format!(
                    "`{}` is mounted at `{}`; unmount it first",
                    path.display(),
                    mount.point
                )));
            }
        }
    }
    // Without swap in the kernel there is no such table.
    let swaps = fs::read("/proc/swaps").unwrap_or_default();
    let swaps = String::from_utf8_lossy(&swaps);
    if parse_swaps(&swaps).any(|swap| is_same(Path::new(&swap))) {
        let path = path.display();
        return Ok(Some(format!("`{path}` is used as swap; run `swapoff` on it first")));
    }
    Ok(loop_device(path)
        .map(|device| format!("`{}` is behind `/dev/{device}`; detach that first", path.display())))
}

/// The file behind a loop device, or behind the one that a partition is on.
pub fn backing_file(device: &fs::Metadata) -> Option<PathBuf> {
    if !device.file_type().is_block_device() {
        return None;
    }
    let sysfs = Device::of(device.rdev()).sysfs();
    let tables = [sysfs.join("loop/backing_file"), sysfs.join("../loop/backing_file")];
    let path = tables.iter().find_map(|table| fs::read(table).ok())?;
    let path = path.strip_suffix(b"\n").unwrap_or(&path);
    Some(PathBuf::from(OsStr::from_bytes(path)))
}

/// Number of a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Device {
    major: u64,
    minor: u64,
}

impl Device {
    pub(super) fn of(number: u64) -> Self {
        Self { major: major(number), minor: minor(number) }
    }

    /// From `major:minor` in decimal.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.trim().split_once(':')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }

    pub(super) fn sysfs(self) -> PathBuf {
        PathBuf::from(format!("/sys/dev/block/{}:{}", self.major, self.minor))
    }
}

/// Adds a device and its partitions to `devices`; returns the name of a device made from one of
/// them (a logical volume, an array), if there is any.
fn collect(device: Device, devices: &mut BTreeSet<Device>) -> Option<String> {
    let mut waiting = vec![device];
    while let Some(device) = waiting.pop() {
        if devices.len() >= DEVICES_MAX || !devices.insert(device) {
            continue;
        }
        let sysfs = device.sysfs();
        if let Some(holder) = entries(&sysfs.join("holders")).next() {
            return Some(holder.file_name()?.to_string_lossy().into_owned());
        }
        let partitions = entries(&sysfs)
            .filter(|entry| entry.join("partition").exists())
            .filter_map(|entry| Device::parse(&fs::read_to_string(entry.join("dev")).ok()?));
        waiting.extend(partitions);
    }
    None
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// The loop device whose backing file is at `path`.
fn loop_device(path: &Path) -> Option<String> {
    let path = fs::canonicalize(path).ok()?;
    entries(Path::new("/sys/block")).find_map(|device| {
        let backing = fs::read_to_string(device.join("loop/backing_file")).ok()?;
        (Path::new(backing.trim_end_matches('\n')) == path)
            .then(|| device.file_name().map(|name| name.to_string_lossy().into_owned()))?
    })
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mount {
    pub device: Device,
    pub point: String,
    source: String,
}

/// The lines of a mountinfo table: id, parent, device, root, mount point, options, any number of
/// tags, a dash, type, source, options of the file system.
pub(super) fn parse_mounts(table: &str) -> impl Iterator<Item = Mount> {
    table.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(2);
        let device = Device::parse(fields.next()?)?;
        let point = unescape(fields.nth(1)?);
        let source = unescape(fields.skip_while(|&field| field != "-").nth(2)?);
        Some(Mount { device, point, source })
    })
}

/// The files and devices of a swap table, whose first line is a heading.
fn parse_swaps(table: &str) -> impl Iterator<Item = String> {
    table.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().next().map(unescape))
}

/// Undoes the kernel's escapes of a backslash and three octal digits.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..] if first == b'\\' => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_parsed() {
        let table = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 /@home /mnt/with\\040space\\134 rw master:2 shared:3 - btrfs /dev/sda2 rw
31 22 0:26
x y z
32 22 0:27 / /run rw - tmpfs tmpfs rw
";
        let device = |major, minor| Device { major, minor };
        let mount = |device, point: &str, source: &str| Mount {
            device,
            point: point.into(),
            source: source.into(),
        };
        let mounts: Vec<_> = parse_mounts(table).collect();
        assert_eq!(
            mounts,
            [
                mount(device(254, 0), "/", "/dev/vda"),
                mount(device(0, 25), "/mnt/with space\\", "/dev/sda2"),
                mount(device(0, 27), "/run", "tmpfs"),
            ]
        );
    }

    #[test]
    fn swaps_are_parsed() {
        let table = "Filename\tType\tSize\tUsed\tPriority\n/dev/sda3 partition 1 0 -2\n/swap\\011x file 1 0 -3\n";
        assert_eq!(parse_swaps(table).collect::<Vec<_>>(), ["/dev/sda3", "/swap\tx"]);
        assert_eq!(unescape("a\\0"), "a\\0");
        assert_eq!(unescape("\\999\\"), "\\999\\");
    }

    #[test]
    fn a_file_on_its_own_is_free_and_the_root_device_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(in_use(file.path()).unwrap(), None);
        let root = fs::metadata("/").unwrap().dev();
        let device = Device::of(root);
        let mut devices = BTreeSet::new();
        assert_eq!(collect(device, &mut devices), None);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(parse_mounts(&mounts).any(|mount| devices.contains(&mount.device)));
    }
}
