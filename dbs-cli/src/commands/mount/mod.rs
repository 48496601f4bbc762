//! `dbs mount`: a store as a directory tree, through FUSE.

mod background;
mod files;
mod umount;

pub use umount::Umount;

use crate::context::Context;
use crate::exit;
use crate::spec::SnapshotSpec;
use crate::terminal::leave_terminal;
use background::Server;
use clap::{Args, ValueEnum};
use dbs_core::{Error, ErrorKind, OpenOptions, Result, Store};
use dbs_fuse::Options;
use files::Files;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// How often to see whether somebody has unmounted it.
const POLL: Duration = Duration::from_millis(100);

/// Show the volumes and snapshots of an idle store as read-only files in a directory.
///
/// A volume is the file DIR/volumes/NAME/head.raw, a snapshot DIR/volumes/NAME/snapshots/SNAPSHOT.raw.
/// The files are sparse images, which can be copied, searched and loop-mounted. JSON files beside them,
/// and their extended attributes (user.dbs.*), describe them. A process in the background serves the
/// mount until `dbs umount DIR`. Until then other commands can read the store, but not write it. To
/// show a store while it is written, use `dbs serve --mount DIR`.
#[derive(Debug, Args)]
#[command(override_usage = "dbs mount [OPTIONS] [STORE] <DIR>")]
pub struct Mount {
    /// The directory to mount on. Put the store before it, if neither --store nor DBS_STORE names the
    /// store
    #[arg(value_name = "PATH", num_args = 1..=2, required = true)]
    places: Vec<PathBuf>,
    /// Serve the mount in this process, until `dbs umount`, SIGINT or SIGTERM
    #[arg(long, short)]
    foreground: bool,
    /// Mount options, separated by commas; can be repeated
    #[arg(long = "options", short = 'o', value_name = "OPTION", value_enum, value_delimiter = ',')]
    options: Vec<MountOption>,
    /// Mount the file system inside this snapshot. Needs root
    #[arg(long, value_name = "VOLUME@SNAPSHOT")]
    files: Option<SnapshotSpec>,
    /// Number of the partition with the file system, as the kernel counts partitions
    #[arg(long, value_name = "N", requires = "files")]
    partition: Option<u32>,
    /// The process that serves in the background
    #[arg(long, hide = true)]
    background: bool,
}

/// Options of mounts, under the names that they have elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum MountOption {
    /// Let other users read the files, too
    AllowOther,
    /// Read-only, as every mount is
    Ro,
}

impl Mount {
    pub fn run(self, context: &Context) -> Result<()> {
        let (store, directory) = match self.places.as_slice() {
            [store, directory] => (store.as_path(), directory),
            [directory] => (context.store()?, directory),
            _ => return Err(Error::invalid("name one directory")),
        };
        let absolute =
            |path: &Path| std::path::absolute(path).map_err(|e| Error::io(e, "finding a path"));
        let (store, directory) = (absolute(store)?, absolute(directory)?);
        if !self.foreground && !self.background {
            return background::start(context, &store, &directory, &self.arguments());
        }
        if self.background {
            leave_terminal()?;
        }
        // Before anything is mounted, so that no signal leaves it behind.
        let mut signals = watch_signals()?;
        let opened = open(&store, &context.serving_options(true)?)?;
        let allow_other = self.options.contains(&MountOption::AllowOther);
        let server = Server { context, background: self.background };
        let options = Options { store, live: false, allow_other };
        if let Some(spec) = &self.files {
            let files = Files { spec, partition: self.partition, directory: &directory };
            return files.serve(&opened, options, &server, &mut signals);
        }
        let mount = dbs_fuse::Mount::start(&opened, &directory, options)?;
        announce(&server, &mount)?;
        let mut asked = false;
        while !mount.is_over() {
            if signals.pending().next().is_some() {
                end_on(asked);
                asked = true;
                if let Err(error) = mount.unmount(false) {
                    server.note(&format!(
                        "{error}; the directory shows nothing any more, and the mount ends when \
                         its last user closes the files"
                    ));
                    mount.unmount(true)?;
                }
            }
            thread::sleep(POLL);
        }
        mount.close()?;
        opened.close()
    }

    /// The arguments for the process in the background, but for the places.
    fn arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        if self.options.contains(&MountOption::AllowOther) {
            arguments.push("--options=allow_other".to_owned());
        }
        arguments.extend(self.files.iter().map(|spec| format!("--files={spec}")));
        arguments.extend(self.partition.map(|number| format!("--partition={number}")));
        arguments
    }
}

/// Mounts a store that this process serves.
///
/// # Errors
/// As [`dbs_fuse::Mount::start`].
pub fn mount_served(
    store: &Store,
    path: &Path,
    directory: &Path,
    options: &[MountOption],
) -> Result<dbs_fuse::Mount> {
    let store_path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let allow_other = options.contains(&MountOption::AllowOther);
    let options = Options { store: store_path, live: true, allow_other };
    dbs_fuse::Mount::start(store, directory, options)
}

/// Unmounts what this process serves and is about to end. Its users, if there are any, find that
/// their files are gone.
///
/// # Errors
/// Those of unmounting; it is in use, and out of sight.
pub fn end_served(mount: dbs_fuse::Mount) -> Result<()> {
    if mount.unmount(false).is_err() {
        mount.unmount(true)?;
    }
    mount.close()
}

fn watch_signals() -> Result<Signals> {
    Signals::new([SIGINT, SIGTERM]).map_err(|e| Error::io(e, "watching for signals"))
}

/// A second signal ends the process at once: users of the mount get errors, the store is only read.
fn end_on(asked_before: bool) {
    if asked_before {
        std::process::exit(i32::from(exit::INTERRUPTED));
    }
}

fn open(store: &Path, options: &OpenOptions) -> Result<Store> {
    Store::open(store, options).map_err(|error| match error.kind() {
        ErrorKind::Busy => Error::busy(format!(
            "{error}; a store that is being served is mounted by its server: `dbs serve --mount DIR`"
        )),
        _ => error,
    })
}

fn announce(server: &Server<'_>, mount: &dbs_fuse::Mount) -> Result<()> {
    let point = mount.point().display().to_string();
    let value = json!({ "mountpoint": point, "pid": std::process::id() });
    server.ready(&value, &format!("mounted at {point}"))
}
