//! `dbs umount`.

use super::files::HIDDEN;
use crate::context::Context;
use clap::Args;
use dbs_core::{Error, ErrorKind, Result};
use dbs_fuse::mounts::{self, FILE_SYSTEM, Mounted};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long the process that served it may take to end, and with it its hold on the store.
const PATIENCE: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(10);

/// Unmount what `dbs mount` has mounted.
///
/// The command returns when the process that served the mount has ended, so that other commands can
/// write the store. A mount whose process is dead is removed, too.
#[derive(Debug, Args)]
pub struct Umount {
    /// The directory that is mounted on
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Unmount even if the files are in use: the directory is empty at once, and the mount ends when
    /// its last user closes the files
    #[arg(long, short)]
    lazy: bool,
}

impl Umount {
    pub fn run(self, context: &Context) -> Result<()> {
        let point = mounts::place(&self.directory)?;
        let name = point.display().to_string();
        let nothing = || Error::not_found(format!("nothing of dbs is mounted at {name}"));
        let mounted = mounts::at(&point)?.ok_or_else(nothing)?;
        // Of a file system inside a snapshot, the mount that has the image.
        let view = match mounted.file_system == FILE_SYSTEM {
            true => mounted.clone(),
            false => below(&mounted)?.ok_or_else(nothing)?,
        };
        let dead = mounts::is_dead(&view.point);
        let server = if dead { None } else { server_of(&view.point) };
        let inside = mounted != view;
        mounts::unmount(&point, self.lazy || (dead && !inside)).map_err(|e| match e.kind() {
            ErrorKind::Busy => Error::busy(format!("{e}; --lazy unmounts it nevertheless")),
            _ => e,
        })?;
        if dead && inside {
            mounts::unmount(&view.point, true)?;
            // Made by the process that is dead.
            if is_hidden(&view.point) {
                let _ = fs::remove_dir(&view.point);
            }
        }
        if let Some(pid) = server.filter(|_| !self.lazy) {
            wait_for_end(pid)?;
        }
        let value = json!({ "mountpoint": name, "was_dead": dead, "pid": server });
        let note = if dead { ", whose server was dead" } else { "" };
        context.done(&value, &format!("unmounted {name}{note}"))
    }
}

/// The view that has the image behind a loop device that is mounted.
fn below(mounted: &Mounted) -> Result<Option<Mounted>> {
    let source = mounted.source.to_string_lossy();
    let Some(device) = source.strip_prefix("/dev/loop") else { return Ok(None) };
    let path = format!("/sys/block/loop{device}/loop/backing_file");
    let Ok(backing) = fs::read_to_string(path) else { return Ok(None) };
    let backing = Path::new(backing.trim_end_matches('\n'));
    let views = mounts::all()?.into_iter().rev();
    Ok(views.filter(|m| m.file_system == FILE_SYSTEM).find(|m| backing.starts_with(&m.point)))
}

fn is_hidden(point: &Path) -> bool {
    let name = point.file_name().map(|name| name.to_string_lossy().into_owned());
    name.is_some_and(|name| name.starts_with(HIDDEN))
}

/// The process that serves a view and nothing else.
fn server_of(point: &Path) -> Option<u32> {
    let text = fs::read(point.join("store.json")).ok()?;
    let value: Value = serde_json::from_slice(&text).ok()?;
    let mount = &value["mount"];
    let pid = u32::try_from(mount["pid"].as_u64()?).ok()?;
    // A server of the store goes on without it.
    (mount["live"] == false).then_some(pid)
}

fn wait_for_end(pid: u32) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let process = PathBuf::from(format!("/proc/{pid}"));
    // Dead, and not buried yet, it holds nothing.
    let ended = || match fs::read_to_string(process.join("stat")) {
        Ok(stat) => stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" Z")),
        Err(_) => true,
    };
    while !ended() {
        if Instant::now() > deadline {
            return Err(Error::busy(format!(
                "it is unmounted, but process {pid}, which served it, has not ended"
            )));
        }
        thread::sleep(POLL);
    }
    Ok(())
}
