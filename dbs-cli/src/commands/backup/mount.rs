//! `dbs backup mount`.

use super::{open, url};
use crate::commands::mount::{Files, How, Server, absolute, serve, start};
use crate::context::Context;
use crate::output;
use crate::signals;
use crate::spec;
use crate::terminal::leave_terminal;
use clap::Args;
use dbs_backup::read::ReadOptions;
use dbs_backup::url::Url;
use dbs_core::Result;
use dbs_fuse::{BackupOptions, Backups};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Show backups as read-only files in a directory.
///
/// A backup is the file DIR/volumes/VOLUME/TIME_BACKUP.raw, with the time of its snapshot in UTC. The
/// files are sparse images, which can be copied, searched and loop-mounted. Blocks are read from the
/// backup store when they are needed, and verified. If something cannot be read, DIR/errors.log says
/// why. While a file is open, no backups of its volume can be deleted. A process in the background
/// serves the mount until `dbs umount DIR`.
#[derive(Debug, Args)]
pub struct Mount {
    /// The backup store, or a volume or backup in it, as `dbs backup list` prints it
    #[arg(value_parser = url)]
    url: Url,
    /// The directory to mount on
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    #[command(flatten)]
    how: How,
    /// Memory for blocks that were read. Blocks in flight need more
    #[arg(long, value_parser = spec::size, default_value = "256MiB", value_name = "SIZE")]
    cache: u64,
    /// Blocks in flight at once; each takes memory for about three blocks
    #[arg(long, default_value_t = 8, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=64))]
    parallel: u8,
    /// Write no locks. The backup store need not be writable then, but somebody may delete a backup
    /// that is being read
    #[arg(long)]
    no_lock: bool,
    /// Mount the file system inside the backup that URL names. Needs root
    #[arg(long)]
    files: bool,
    /// Number of the partition with the file system, as the kernel counts partitions
    #[arg(long, value_name = "N", requires = "files")]
    partition: Option<u32>,
}

impl Mount {
    pub fn run(self, context: &Context) -> Result<()> {
        if self.files {
            self.url.need_backup()?;
        }
        let directory = absolute(&self.directory)?;
        if self.how.is_to_start() {
            let url = self.url.to_string();
            let places = [OsStr::new(&url), directory.as_os_str()];
            return start(context, &["backup", "mount"], &self.arguments(), places);
        }
        if self.how.background {
            leave_terminal()?;
        }
        // Before anything is mounted, so that no signal leaves it behind.
        let mut signals = signals::watch()?;
        let server = Server { context, background: self.how.background };
        let options = BackupOptions {
            url: self.url.clone(),
            read: ReadOptions {
                cache: self.cache,
                parallel: self.parallel.into(),
                lock: !self.no_lock,
                patience: None,
            },
            allow_other: self.how.allow_other(),
            warn: Box::new(output::warn),
        };
        let backups = Backups::new(options, || open(&self.url))?;
        if self.files {
            let (volume, backup) = self.url.need_backup()?;
            let found = backups.parts(volume, backup)?;
            let image = PathBuf::from(backups.path(volume, backup)?);
            let what = ("backup", self.url.to_string());
            let files = Files { what, partition: self.partition, directory: &directory };
            let start = |point: &Path| dbs_fuse::Mount::start_backups(backups, point);
            return files.serve(&found, &image, start, &server, &mut signals);
        }
        serve(dbs_fuse::Mount::start_backups(backups, &directory)?, &server, &mut signals)
    }

    /// The arguments for the process in the background, but for the places.
    fn arguments(&self) -> Vec<String> {
        let mut arguments = self.how.arguments();
        arguments.push(format!("--cache={}", self.cache));
        arguments.push(format!("--parallel={}", self.parallel));
        arguments.extend(self.no_lock.then(|| "--no-lock".to_owned()));
        arguments.extend(self.files.then(|| "--files".to_owned()));
        arguments.extend(self.partition.map(|number| format!("--partition={number}")));
        arguments
    }
}
