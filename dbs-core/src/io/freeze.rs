//! Freezing of the file systems on a block device: what they hold is on the device then, whole, and
//! nothing more is written to it until they are thawed.

use super::in_use::{Device, parse_mounts};
use super::sys;
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Devices looked at; a stack of devices is never this large.
const DEVICES_MAX: usize = 256;

/// A frozen file system, thawed when this is dropped. Not when the process is killed: who freezes
/// should not do so for long.
#[derive(Debug)]
pub struct Frozen {
    root: File,
    point: PathBuf,
}

impl Frozen {
    /// Where it is mounted, as the process says whose mount it is.
    #[must_use]
    pub fn point(&self) -> &Path {
        &self.point
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // Fails only if somebody else has thawed it.
        let _ = sys::thaw(self.root.as_fd());
    }
}

/// Freezes all file systems on a block device: on itself, its partitions, and devices made of them, in
/// whatever mount namespace of this machine they are. Waits until what they hold in memory is written.
/// With none, nothing is frozen.
///
/// # Errors
/// `device` is none; the system does not say what is mounted; a file system cannot be frozen, and then
/// none is.
pub fn freeze(device: &Path) -> Result<Vec<Frozen>> {
    let failed = |error| Error::io(error, format!("looking at `{}`", device.display()));
    let metadata = fs::metadata(device).map_err(failed)?;
    if !metadata.file_type().is_block_device() {
        return Err(Error::invalid(format!("`{}` is no block device", device.display())));
    }
    let devices = above(Device::of(metadata.rdev()));
    let mounts = mounts_of(&devices)?;
    mounts.into_iter().map(|mount| mount.freeze()).collect()
}

/// Thaws all file systems on the block device with this number, and on what is made of it, whoever has frozen
/// them; answers with where those are mounted that were frozen.
///
/// # Errors
/// The system does not say what is mounted; a file system cannot be thawed, and others may be.
pub fn thaw(number: u64) -> Result<Vec<PathBuf>> {
    let mut points = Vec::new();
    let mut outcome = Ok(());
    for mount in mounts_of(&above(Device::of(number)))? {
        let failed =
            |e| Error::io(e, format!("thawing the file system at `{}`", mount.point.display()));
        let thawed = mount.open(&failed).and_then(|root| match sys::thaw(root.as_fd()) {
            // It is not frozen.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
            thawed => thawed.map(|()| true).map_err(&failed),
        });
        match thawed {
            Ok(true) => points.push(mount.point),
            Ok(false) => {}
            Err(error) => outcome = Err(error),
        }
    }
    outcome.map(|()| points)
}

/// A file system, by one of its mounts.
struct Found {
    device: Device,
    /// Where it is mounted, for whoever sees it.
    point: PathBuf,
    /// The same place, seen from here.
    path: PathBuf,
}

impl Found {
    fn freeze(self) -> Result<Frozen> {
        let failed = |error| {
            Error::io(error, format!("freezing the file system at `{}`", self.point.display()))
        };
        let root = self.open(&failed)?;
        sys::freeze(root.as_fd()).map_err(failed)?;
        Ok(Frozen { root, point: self.point })
    }

    /// Its root.
    fn open(&self, failed: &dyn Fn(io::Error) -> Error) -> Result<File> {
        let mut open = OpenOptions::new();
        open.read(true).custom_flags(libc::O_DIRECTORY | libc::O_NONBLOCK);
        let root = open.open(&self.path).map_err(failed)?;
        // Something else may be mounted there by now.
        if Device::of(root.metadata().map_err(failed)?.dev()) != self.device {
            let text = format!("`{}` is not what it was", self.point.display());
            return Err(Error::busy(text));
        }
        Ok(root)
    }
}

/// A device with its partitions, and what is made of any of these (encrypted, logical volumes).
fn above(device: Device) -> BTreeSet<Device> {
    let mut devices = BTreeSet::new();
    let mut waiting = vec![device];
    while let Some(device) = waiting.pop() {
        if devices.len() >= DEVICES_MAX || !devices.insert(device) {
            continue;
        }
        let sysfs = device.sysfs();
        let number = |entry: PathBuf| Device::parse(&fs::read_to_string(entry.join("dev")).ok()?);
        let entries = |path: PathBuf| {
            fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path())
        };
        waiting.extend(entries(sysfs.join("holders")).filter_map(number));
        let partitions = entries(sysfs).filter(|entry| entry.join("partition").exists());
        waiting.extend(partitions.filter_map(number));
    }
    devices
}

/// The file systems on these devices, each once, by a mount in this namespace or that of any process.
fn mounts_of(devices: &BTreeSet<Device>) -> Result<Vec<Found>> {
    let own = fs::read("/proc/self/mountinfo")
        .map_err(|error| Error::io(error, "reading what is mounted"))?;
    let mut found = Vec::new();
    find(&String::from_utf8_lossy(&own), Path::new("/"), devices, &mut found);
    let mut namespaces = BTreeSet::new();
    namespaces.extend(fs::metadata("/proc/self/ns/mnt").map(|namespace| namespace.ino()));
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let is_process = process.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit);
        // Processes end, and some may not be looked at.
        let namespace = fs::metadata(process.path().join("ns/mnt"));
        let is_new = |namespace: fs::Metadata| namespaces.insert(namespace.ino());
        if is_process
            && namespace.is_ok_and(is_new)
            && let Ok(table) = fs::read(process.path().join("mountinfo"))
        {
            let root = process.path().join("root");
            find(&String::from_utf8_lossy(&table), &root, devices, &mut found);
        }
    }
    Ok(found)
}

/// Adds the file systems of a mount table that are on these devices and not known yet; `root` is where
/// its paths begin.
fn find(table: &str, root: &Path, devices: &BTreeSet<Device>, found: &mut Vec<Found>) {
    for mount in parse_mounts(table) {
        let is_new = found.iter().all(|other| other.device != mount.device);
        // What cannot be looked at from here may be, from another namespace.
        let path = root.join(mount.point.trim_start_matches('/'));
        let is_there = || {
            let metadata = fs::metadata(&path);
            metadata.is_ok_and(|at| at.is_dir() && Device::of(at.dev()) == mount.device)
        };
        if devices.contains(&mount.device) && is_new && is_there() {
            found.push(Found { device: mount.device, point: mount.point.into(), path });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn mounts_are_found_by_device_and_each_file_system_once() {
        let root = fs::metadata("/").unwrap().dev();
        let device = Device::of(root);
        let table = format!(
            "1 0 {0} / / rw - ext4 /dev/x rw\n2 1 {0} / /proc/self/root rw - ext4 /dev/x rw\n\
             3 1 9999:1 / /nowhere rw - ext4 /dev/y rw\n4 1 {0} / /not/there rw - ext4 /dev/x rw\n",
            format_args!("{}:{}", nix::sys::stat::major(root), nix::sys::stat::minor(root))
        );
        let mut found = Vec::new();
        find(
            &table,
            Path::new("/"),
            &BTreeSet::from([Device::parse("9999:1").unwrap()]),
            &mut found,
        );
        assert!(found.is_empty(), "it cannot be seen");
        find(&table, Path::new("/"), &BTreeSet::from([device]), &mut found);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].point, Path::new("/"));
        // From another place only those that are there.
        let mut found = Vec::new();
        find(&table, Path::new("/not/there"), &BTreeSet::from([device]), &mut found);
        assert!(found.is_empty());
    }

    #[test]
    fn only_devices_have_file_systems_to_freeze() {
        assert!(freeze(Path::new("/")).is_err());
        assert!(freeze(Path::new("/dev/null")).is_err());
        assert!(freeze(Path::new("/dev/none")).is_err());
    }

    /// Output of a command that did well.
    fn run(program: &str, args: &[&str]) -> std::result::Result<String, String> {
        let output = Command::new(program).args(args).stdin(Stdio::null()).output();
        match output {
            Ok(output) if output.status.success() => {
                Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
            }
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// A file system on a loop device, gone at the end.
    struct Mounted {
        directory: tempfile::TempDir,
        device: String,
        point: PathBuf,
    }

    impl Mounted {
        fn new() -> std::result::Result<Self, String> {
            let directory = tempfile::tempdir().unwrap();
            let (image, point) = (directory.path().join("image"), directory.path().join("point"));
            File::create(&image).unwrap().set_len(16 << 20).unwrap();
            fs::create_dir(&point).unwrap();
            let image = image.to_str().unwrap();
            run("mkfs.ext4", &["-q", "-F", image])?;
            let device = run("losetup", &["-f", "--show", image])?;
            let mounted = Self { directory, device, point };
            run("mount", &[&mounted.device, mounted.point.to_str().unwrap()])?;
            Ok(mounted)
        }
    }

    impl Drop for Mounted {
        fn drop(&mut self) {
            let _unmounted = run("umount", &["-l", self.point.to_str().unwrap()]);
            let _detached = run("losetup", &["-d", &self.device]);
            let _ = &self.directory;
        }
    }

    #[test]
    fn a_frozen_file_system_takes_writes_again_when_it_is_thawed() {
        let mounted = match Mounted::new() {
            Ok(mounted) => mounted,
            Err(why) => return println!("SKIPPED freezing: needs root, loop devices, ext4: {why}"),
        };
        let device = Path::new(&mounted.device);
        let frozen = freeze(device).unwrap();
        assert_eq!(frozen.iter().map(Frozen::point).collect::<Vec<_>>(), [mounted.point.as_path()]);
        assert!(freeze(device).is_err(), "it is already");
        let (written, wait) = mpsc::channel();
        let path = mounted.point.join("file");
        let writer = std::thread::spawn(move || {
            let result = fs::write(path, b"late");
            let _ = written.send(result.map_err(|error| error.to_string()));
        });
        let early = wait.recv_timeout(Duration::from_millis(200));
        assert!(early.is_err(), "{early:?}");
        drop(frozen);
        assert_eq!(wait.recv_timeout(Duration::from_secs(120)), Ok(Ok(())));
        writer.join().unwrap();
        // Whoever froze it is gone without a word: another one thaws it, once.
        let root = File::open(&mounted.point).unwrap();
        sys::freeze(root.as_fd()).unwrap();
        drop(root);
        let number = fs::metadata(device).unwrap().rdev();
        assert_eq!(thaw(number).unwrap(), std::slice::from_ref(&mounted.point));
        assert!(thaw(number).unwrap().is_empty());
        fs::write(mounted.point.join("file"), b"later").unwrap();
        run("umount", &[mounted.point.to_str().unwrap()]).unwrap();
        assert!(freeze(device).unwrap().is_empty(), "nothing is mounted");
    }
}
