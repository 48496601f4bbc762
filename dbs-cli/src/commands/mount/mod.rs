//! `dbs mount`: a store as a directory tree, through FUSE.

mod background;
mod files;
mod umount;

pub use background::{Server, start};
pub use files::Files;
pub use umount::Umount;

use crate::context::Context;
use crate::exit;
use crate::signals;
use crate::spec::SnapshotSpec;
use crate::terminal::leave_terminal;
use clap::{Args, ValueEnum};
use dbs_core::{Error, ErrorKind, OpenOptions, Result, Store};
use dbs_fuse::content::parts;
use dbs_fuse::{Options, image_path};
use serde_json::json;
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
    #[command(flatten)]
    how: How,
    /// Mount the file system inside this snapshot. Needs root
    #[arg(long, value_name = "VOLUME@SNAPSHOT")]
    files: Option<SnapshotSpec>,
    /// Number of the partition with the file system, as the kernel counts partitions
    #[arg(long, value_name = "N", requires = "files")]
    partition: Option<u32>,
}

/// How anything is mounted.
#[derive(Debug, Args)]
pub struct How {
    /// Serve the mount in this process, until `dbs umount`, SIGINT, SIGTERM or SIGHUP
    #[arg(long, short)]
    pub foreground: bool,
    /// Mount options, separated by commas; can be repeated
    #[arg(long = "options", short = 'o', value_name = "OPTION", value_enum, value_delimiter = ',')]
    options: Vec<MountOption>,
    /// The process that serves in the background
    #[arg(long, hide = true)]
    pub background: bool,
}

impl How {
    /// Whether other users may read the files.
    pub fn allow_other(&self) -> bool {
        self.options.contains(&MountOption::AllowOther)
    }

    /// Whether this process only starts the one that serves.
    pub fn is_to_start(&self) -> bool {
        !self.foreground && !self.background
    }

    /// The arguments for the process in the background.
    pub fn arguments(&self) -> Vec<String> {
        if self.allow_other() { vec!["--options=allow_other".to_owned()] } else { Vec::new() }
    }
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
        let (store, directory) = (absolute(store)?, absolute(directory)?);
        if self.how.is_to_start() {
            let places = [store.as_os_str(), directory.as_os_str()];
            return start(context, &["mount"], &self.arguments(), places);
        }
        if self.how.background {
            leave_terminal()?;
        }
        // Before anything is mounted, so that no signal leaves it behind.
        let mut signals = signals::watch()?;
        let opened = open(&store, &context.serving_options(true)?)?;
        context.attach_backups(&opened);
        let allow_other = self.how.allow_other();
        let server = Server { context, background: self.how.background };
        let options = Options { store, live: false, allow_other };
        if let Some(spec) = &self.files {
            let what = ("snapshot", spec.to_string());
            let found = parts(&opened.observe(&spec.to_string())?)?;
            let image = image_path(&spec.volume, Some(spec.snapshot.as_str()));
            let files = Files { what, partition: self.partition, directory: &directory };
            let start = |point: &Path| dbs_fuse::Mount::start(&opened, point, options);
            return files.serve(&found, &image, start, &server, &mut signals);
        }
        serve(dbs_fuse::Mount::start(&opened, &directory, options)?, &server, &mut signals)?;
        opened.close()
    }

    /// The arguments for the process in the background, but for the places.
    fn arguments(&self) -> Vec<String> {
        let mut arguments = self.how.arguments();
        arguments.extend(self.files.iter().map(|spec| format!("--files={spec}")));
        arguments.extend(self.partition.map(|number| format!("--partition={number}")));
        arguments
    }
}

/// A path that another process understands.
///
/// # Errors
/// `Io`.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|e| Error::io(e, "finding a path"))
}

/// Says that something is mounted, and serves it until it is unmounted, by whomever.
pub fn serve(mount: dbs_fuse::Mount, server: &Server<'_>, signals: &mut Signals) -> Result<()> {
    announce(server, &mount)?;
    until_unmounted(|| !mount.is_over(), |lazy| mount.unmount(lazy), server, signals)?;
    mount.close()
}

/// Waits until nothing is mounted any more, whoever unmounts it; a signal does it here. A second signal ends the process
/// at once: users of the mount get errors, the store is only read.
fn until_unmounted(
    is_there: impl Fn() -> bool,
    unmount: impl Fn(bool) -> Result<()>,
    server: &Server<'_>,
    signals: &mut Signals,
) -> Result<()> {
    let mut asked = false;
    while is_there() {
        if signals::pending(signals, asked).is_some() {
            if asked {
                std::process::exit(i32::from(exit::INTERRUPTED));
            }
            asked = true;
            if let Err(error) = unmount(false) {
                server.note(&format!(
                    "{error}; the directory shows nothing any more, and the mount ends when \
                     its last user closes the files"
                ));
                unmount(true)?;
            }
        }
        thread::sleep(POLL);
    }
    Ok(())
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
