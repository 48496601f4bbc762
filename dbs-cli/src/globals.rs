//! The options of every command.

use clap::{Args, ValueEnum};
use dbs_backup::url::Url;
use std::path::PathBuf;

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Globals {
    /// The store: a block device or file. If a server has the store open, the command asks the server
    #[arg(long, short, global = true, env = "DBS_STORE", value_name = "PATH")]
    pub store: Option<PathBuf>,
    /// Print JSON: the result on the standard output, an error on the standard error output
    #[arg(long, global = true)]
    pub json: bool,
    /// Do not ask before data is destroyed
    #[arg(long, short, global = true)]
    pub yes: bool,
    /// Print no messages and no progress
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Show progress even if the standard error output is no terminal
    #[arg(long, global = true)]
    pub progress: bool,
    /// An image (raw or qcow2) that volumes of an idle store rest on; can be repeated. If a server has the
    /// store open, give the image to the server instead
    #[arg(long, global = true, env = "DBS_BACKING_FILE", value_name = "FILE")]
    pub backing_file: Vec<PathBuf>,
    /// URL of the backup that a volume rests on, as `dbs backup restore --lazy` printed it; can be repeated. If a
    /// server has the store open, give the URL to the server instead
    #[arg(long, global = true, env = "DBS_BACKING_BACKUP", value_name = "URL", value_parser = backup)]
    pub backing_backup: Vec<Url>,
    /// How to do I/O on an idle store
    #[arg(long, global = true, value_enum, default_value_t = Driver::Auto)]
    pub driver: Driver,
}

/// I/O drivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Driver {
    /// io_uring where the kernel allows it, else pread
    Auto,
    /// io_uring
    Uring,
    /// pread and pwrite
    Pread,
}

/// Parses the URL of a backup, for clap.
fn backup(text: &str) -> std::result::Result<Url, String> {
    let parsed = Url::parse(text).and_then(|url| url.need_backup().map(|_| ()).map(|()| url));
    parsed.map_err(|e| e.to_string())
}
