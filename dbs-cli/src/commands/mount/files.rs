//! `dbs mount --files`: the file system inside a snapshot or backup, by the kernel's driver, on a loop device
//! over its file in a mount that nobody sees.

use super::{POLL, Server, until_unmounted};
use dbs_core::{Error, ErrorKind, Result, format_size};
use dbs_fuse::Mount;
use dbs_fuse::content::{Part, choose, mount_options};
use dbs_fuse::mounts::{self, Mounted};
use serde_json::json;
use signal_hook::iterator::Signals;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long the kernel may take to let go of the loop device.
const LOOP_PATIENCE: Duration = Duration::from_secs(10);
/// How the directories of hidden mounts begin.
pub const HIDDEN: &str = "files-";

/// What to mount where.
pub struct Files<'a> {
    /// What the file system is in: a word for it, and its name.
    pub what: (&'static str, String),
    pub partition: Option<u32>,
    pub directory: &'a Path,
}

/// The directory of a hidden mount, as long as it lives.
struct Hidden(PathBuf);

impl Drop for Hidden {
    fn drop(&mut self) {
        // What is mounted there still keeps it.
        let _ = fs::remove_dir(&self.0);
    }
}

impl Files<'_> {
    /// Mounts it, serves it, and cleans up once it is unmounted. What has the `found` parts is the file `image` in the tree
    /// that `start` mounts.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` if there is no single file system in it, `Unsupported` for what this
    /// machine or user lacks, `Io`.
    pub fn serve(
        &self,
        found: &[Part],
        image: &Path,
        start: impl FnOnce(&Path) -> Result<Mount>,
        server: &Server<'_>,
        signals: &mut Signals,
    ) -> Result<()> {
        let point = mounts::place(self.directory)?;
        let part = choose(found, self.partition).map_err(|e| e.context(&self.what.1))?;
        check_machine()?;
        let hidden = hidden_directory(&server.context.runtime_dir())?;
        let under = start(&hidden.0)?;
        let served = mount_part(&hidden.0.join(image), part, &point)
            .and_then(|mounted| self.announce(server, part, &point).map(|()| mounted))
            .and_then(|mounted| wait(&mounted, server, signals));
        let closed = close(under);
        served.and(closed)
    }

    fn announce(&self, server: &Server<'_>, part: &Part, point: &Path) -> Result<()> {
        let (word, name) = &self.what;
        let mut value = json!({
            "mountpoint": point,
            "pid": std::process::id(),
            "partition": part.number,
            "file_system": part.file_system,
        });
        value[word] = json!(name);
        let what = part.file_system.unwrap_or_default();
        let size = format_size(part.length);
        let message = format!("mounted {name} ({what}, {size}) at {}", point.display());
        server.ready(&value, &message)
    }
}

/// Says what this machine or user lacks, before anything is done.
fn check_machine() -> Result<()> {
    let instead = "`dbs mount` without --files shows the image itself";
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::unsupported(format!(
            "mounting the file system inside an image needs root, for the loop device and the \
             kernel's driver; {instead}"
        )));
    }
    if !Path::new("/dev/loop-control").exists() {
        return Err(Error::unsupported(format!(
            "there are no loop devices here: the kernel's module is missing (`modprobe loop`), or \
             this container was not given /dev/loop-control; {instead}"
        )));
    }
    Ok(())
}

fn hidden_directory(runtime_dir: &Path) -> Result<Hidden> {
    let path = runtime_dir.join(format!("{HIDDEN}{}", std::process::id()));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&path)
        .map_err(|e| Error::io(e, format!("making {}", path.display())))?;
    let path = path.canonicalize().map_err(|e| Error::io(e, "finding the hidden directory"))?;
    Ok(Hidden(path))
}

/// Has the kernel mount a part of an image; `mount` makes the loop device, which goes with it.
fn mount_part(image: &Path, part: &Part, point: &Path) -> Result<Mounted> {
    let Some(file_system) = part.file_system else {
        return Err(Error::invalid("no known file system is in this partition"));
    };
    let options = format!(
        "loop,nosuid,nodev,{},offset={},sizelimit={}",
        mount_options(file_system),
        part.offset,
        part.length
    );
    let output = Command::new("mount")
        .args(["-t", file_system, "-o", &options, "--"])
        .args([image, point])
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                Error::unsupported("the program `mount` is missing: install util-linux")
            }
            _ => Error::io(e, "running mount"),
        })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let missing = text.contains("unknown filesystem type");
        let kind = if missing { ErrorKind::Unsupported } else { ErrorKind::Io };
        return Err(Error::new(kind, format!("mounting the {file_system}: {}", text.trim())));
    }
    mounts::at(point)?.ok_or_else(|| Error::busy("somebody unmounted it at once"))
}

/// Waits until it is unmounted.
fn wait(mounted: &Mounted, server: &Server<'_>, signals: &mut Signals) -> Result<()> {
    let is_there = || {
        let all = mounts::all().unwrap_or_default();
        all.iter().any(|m| m.device == mounted.device && m.source == mounted.source)
    };
    until_unmounted(is_there, |lazy| mounts::unmount(&mounted.point, lazy), server, signals)
}

/// Ends the hidden mount, as soon as the loop device has let go of its file.
fn close(under: Mount) -> Result<()> {
    let deadline = Instant::now() + LOOP_PATIENCE;
    while let Err(error) = under.unmount(false) {
        if error.kind() != ErrorKind::Busy || Instant::now() > deadline {
            under.unmount(true)?;
            break;
        }
        thread::sleep(POLL);
    }
    under.close()
}
