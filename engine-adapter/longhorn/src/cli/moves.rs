//! `longhorn replica-import` and `longhorn replica-export`.

use super::golang::{self, BooleanOption as _};
use super::output::{Failure, print, print_line};
use super::replica_args::{ChecksumArgs, OURS, Size};
use clap::Args;
use dbs_core::{Error, Result, format_size};
use dbs_service::log;
use longhorn_replica::host::file::StoreOptions;
use longhorn_replica::upstream::export::{ExportOptions, export};
use longhorn_replica::upstream::import::{ImportOptions, import};
use longhorn_replica::upstream::{Moved, Progress};
use serde_json::json;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often the log tells how far it is.
const TELL_INTERVAL: Duration = Duration::from_secs(2);

/// `longhorn replica-import`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct ImportArgs {
    /// Directory of the replica, which is stopped
    pub directory: PathBuf,
    /// Backing image below the volume, as for `replica`
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub backing_file: String,
    /// Keep upstream's files, in the directory `volume.upstream`
    #[arg(long, boolean = "false")]
    pub keep: bool,
    /// Extent size of the store
    #[arg(long, value_name = "SIZE", default_value = "1mb", value_parser = golang::size)]
    #[arg(help_heading = OURS)]
    pub extent_size: Size,
    /// Checksums of data.
    #[command(flatten)]
    pub checksums: ChecksumArgs,
    /// How it is told.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// `longhorn replica-export`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct ExportArgs {
    /// Directory of the replica, which is stopped
    pub directory: PathBuf,
    /// Write the files there, to a new or an empty directory, and keep the replica as it is; otherwise they take the
    /// place of the store
    #[arg(long, value_name = "DIRECTORY")]
    pub to: Option<PathBuf>,
    /// How it is told.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// What both take.
#[derive(Debug, Args)]
pub struct CommonArgs {
    /// Directory on tmpfs for changes that are not committed yet, as for `replica`
    #[arg(long, value_name = "DIRECTORY", help_heading = OURS, env = "DBS_TAIL")]
    pub tail: Option<PathBuf>,
    /// Print JSON
    #[arg(long, boolean = "false")]
    pub json: bool,
}

/// Does what the command line says.
///
/// # Errors
/// Why not.
pub fn run_import(args: &ImportArgs, volume_name: &str) -> std::result::Result<(), Failure> {
    let failed = |e| Failure::beside("Error running replica-import command", e);
    if volume_name.is_empty() {
        let text = "name the volume: longhorn --volume-name NAME replica-import DIRECTORY. The replica only starts \
                    under that name";
        return Err(failed(Error::invalid(text)));
    }
    let checksums = args.checksums.store_options();
    let extent_size = args.extent_size.unwrap_or(checksums.extent_size);
    let backing = Path::new(&args.backing_file);
    let options = ImportOptions {
        dir: args.directory.clone(),
        volume: volume_name.to_owned(),
        backing_file: Some(backing).filter(|path| !path.as_os_str().is_empty()).map(PathBuf::from),
        store: StoreOptions { extent_size, tail: args.common.tail.clone(), ..checksums },
        keep: args.keep,
    };
    run(&args.common, &args.directory, |told| import(&options, told)).map_err(failed)
}

/// Does what the command line says.
///
/// # Errors
/// Why not.
pub fn run_export(args: &ExportArgs, volume_name: &str) -> std::result::Result<(), Failure> {
    let options = ExportOptions {
        dir: args.directory.clone(),
        volume: volume_name.to_owned(),
        to: args.to.clone(),
        store: StoreOptions { tail: args.common.tail.clone(), ..StoreOptions::default() },
    };
    let result = args.to.as_ref().unwrap_or(&args.directory);
    run(&args.common, result, |told| export(&options, told))
        .map_err(|e| Failure::beside("Error running replica-export command", e))
}

fn run(
    args: &CommonArgs,
    result: &Path,
    act: impl FnOnce(&dyn Fn(Progress) -> Result<()>) -> Result<Option<Moved>>,
) -> Result<()> {
    let begun = Instant::now();
    let last = Cell::new(begun);
    let moved = act(&|progress| {
        if progress.total > 0 && last.get().elapsed() >= TELL_INTERVAL {
            last.set(Instant::now());
            let percent = (progress.bytes * 100 / progress.total).min(100);
            log::info("progress", &[("percent", &percent), ("bytes", &progress.bytes)]);
        }
        Ok(())
    })?;
    let (directory, seconds) = (result.display().to_string(), begun.elapsed().as_secs_f64());
    let Moved { size, snapshots, bytes } = moved.unwrap_or_default();
    if args.json {
        return print_line(&json!({
            "directory": directory,
            "resumed_at_end": moved.is_none(),
            "size": size,
            "snapshots": snapshots,
            "bytes": bytes,
            "seconds": seconds,
        }));
    }
    print(&match moved {
        None => format!("`{directory}` is complete: only the last steps were left"),
        Some(_) => format!(
            "`{directory}` is complete: a volume of {}, {snapshots} snapshots, {} of content, {seconds:.1} s",
            format_size(size),
            format_size(bytes)
        ),
    })
}
