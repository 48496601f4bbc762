//! `dbs volume export`.

use super::taken::{remove, take};
use crate::confirm::confirm;
use crate::context::{Context, typed};
use crate::output;
use crate::pipes::Output;
use crate::progress::Unit;
use crate::spec::{SnapshotSpec, Spec};
use crate::target::Target;
use clap::Args;
use dbs_client::any_store::AnyStore;
use dbs_control::api::Request;
use dbs_core::info::VolumeInfo;
use dbs_core::io::open::claim;
use dbs_core::store::is_same_place;
use dbs_core::{Error, ErrorKind, Result, format_size};
use dbs_server::top::Top;
use dbs_transfer::{
    BlockAccess, Copied, EXPORT_LABEL, EXPORT_NAME, check_same, check_whole, export_path,
    export_stream, is_of_export,
};
use dbs_volume_backup::taken::taken_at;
use jiff::{SignedDuration, Timestamp};
use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Write a volume or snapshot as a raw image.
///
/// If somebody has the volume open, the command takes a snapshot, exports that, and deletes it: the image is
/// what a power cut at that moment would have left.
#[derive(Debug, Args)]
pub struct Export {
    /// VOLUME, or VOLUME@SNAPSHOT
    spec: Spec,
    /// A new file, or `-` for the standard output. Blocks without data become holes. Until all of it is
    /// written, the file is called FILE.RANDOM.partial
    file: PathBuf,
    /// Overwrite an existing file or block device. Mounted devices and open stores are never
    /// overwritten, other stores only after a question
    #[arg(long)]
    force: bool,
    /// Export a volume as it is, without a snapshot, also while it is written. The image is then not of one
    /// moment: file systems and databases in it can be damaged
    #[arg(long)]
    live: bool,
}

impl Export {
    pub fn run(self, context: &Context) -> Result<()> {
        let to_stdout = self.file.as_os_str() == "-";
        refuse_terminal(to_stdout)?;
        if self.force && !to_stdout {
            self.check_overwritten(context)?;
        }
        context.stop.on_signals()?;
        let copied = context.with(false, |target| {
            if self.spec.snapshot.is_some() || !is_writable(context, target)? {
                return self.copy(context, target, &self.spec);
            }
            let volume = &self.spec.volume;
            remove_left(context, target, volume);
            match !self.live && target.access()?.volume_info(volume)?.open {
                true => self.at_one_moment(context, target),
                false => self.copy(context, target, &self.spec),
            }
        })?;
        if to_stdout {
            return Ok(());
        }
        let (size, data) = (format_size(copied.length), format_size(copied.data));
        context.done(&copied, &format!("exported {}, {size}, {data} of data", self.spec))
    }
}

impl Export {
    /// Exports a snapshot that is taken for it. The map and the parts of a volume that is written are of different
    /// moments: an image of them can lack what was flushed first and hold what was written later.
    fn at_one_moment(&self, context: &Context, target: &Target) -> Result<Copied> {
        let volume = &self.spec.volume;
        let taken = take(context, target, volume, EXPORT_NAME, EXPORT_LABEL);
        let taken = taken.map_err(|error| {
            error.context(format!(
                "no snapshot of volume {volume} can be taken for the export. Export one that is there, or the volume \
                 as it is with --live"
            ))
        })?;
        let (volume, snapshot) = (taken.volume.clone(), Some(taken.snapshot.clone()));
        let copied = self.copy(context, target, &Spec { volume, snapshot });
        let removed = remove(context, target, &taken);
        if let Some(error) = removed.err().filter(|error| error.kind() != ErrorKind::NotFound) {
            output::warn(&format!("snapshot {taken} is kept: {error}"));
        }
        copied
    }

    fn copy(&self, context: &Context, target: &Target, spec: &Spec) -> Result<Copied> {
        // Nobody changes an image of format 1.0.0.
        let store = target.access().ok();
        let snapshot = match (store, &spec.snapshot) {
            (Some(store), Some(name)) => Some((store, store.snapshot_info(&spec.volume, name)?)),
            _ => None,
        };
        let before = written(context, target, &spec.volume)?;
        let volume = target.open_spec(&spec.to_string())?;
        let check = || match &snapshot {
            Some((store, snapshot)) => check_same(*store, [snapshot]),
            None if !self.live && written(context, target, &spec.volume)? != before => {
                Err(Error::busy(format!(
                    "somebody has begun to write to volume {}, or its server was started anew",
                    spec.volume
                )))
            }
            // A rebuild may have begun.
            None => match target.open_spec(&spec.to_string()) {
                Err(error) if error.kind() == ErrorKind::Busy => Err(error),
                _ => Ok(()),
            },
        };
        let whole =
            snapshot.iter().try_for_each(|(store, snapshot)| check_whole(*store, [snapshot]));
        let copied = whole.and_then(|()| self.write(context, &*volume, &check));
        let closed = volume.close(&mut || true);
        copied.and_then(|copied| closed.map(|()| copied))
    }

    /// Writes the image, and calls `check` when all was read, before a new file gets its name.
    fn write(
        &self,
        context: &Context,
        volume: &dyn BlockAccess,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Copied> {
        let mut meter = context.meter("exporting", Unit::Bytes);
        let mut failed = None;
        let mut progress = |done, total| {
            failed = if done == total { check().err() } else { None };
            meter.update(done, total) && failed.is_none()
        };
        let copied = match self.file.as_os_str() == "-" {
            true => {
                let failed = |e| Error::io(e, STDOUT);
                let output = Output::new(&context.stop).map_err(failed)?;
                let copied = export_stream(volume, &output, &mut progress);
                copied.and_then(|copied| output.sync().map(|()| copied).map_err(failed))
            }
            false => export_path(volume, &self.file, self.force, &mut progress),
        };
        match failed {
            Some(error) => Err(error.context("the export is incomplete, begin again")),
            None => copied.map_err(|error| context.stop.explain(error)),
        }
    }

    /// Refuses to overwrite the store itself, and what its volumes rest on; asks before another one is.
    fn check_overwritten(&self, context: &Context) -> Result<()> {
        let (file, Ok(kind)) = (self.file.display(), std::fs::metadata(&self.file)) else {
            return Ok(());
        };
        if !kind.is_file() && !kind.file_type().is_block_device() {
            return Ok(());
        }
        context.refuse_store(&self.file)?;
        for image in context.backing_files() {
            // One that is not there stops nothing: see `Context::open_options`.
            if is_same_place(&self.file, image).unwrap_or(false) {
                return Err(rested_on(&file));
            }
        }
        if is_rested_on(context, &self.file)? {
            return Err(rested_on(&file));
        }
        match claim(&self.file)?.content()? {
            Some(what) if what.starts_with(STORE) => {
                confirm(context, &format!("{file} contains {what}. Destroy it?"))
            }
            _ => Ok(()),
        }
    }
}

fn rested_on(file: &dyn Display) -> Error {
    Error::invalid(format!(
        "{file} is the image that volumes of the store rest on: name another file"
    ))
}

/// Whether volumes of the store rest on this file, though nobody has named it.
fn is_rested_on(context: &Context, file: &Path) -> Result<bool> {
    let volumes: Vec<VolumeInfo> = typed(context.call(&Request::VolumeList { usage: false })?)?;
    let mut below = volumes.into_iter().filter_map(|volume| volume.backing).peekable();
    // It is read for that alone.
    Ok(below.peek().is_some()
        && dbs_backing::open(file).is_ok_and(|image| below.any(|below| below == image.identity())))
}

/// Whether somebody else may write meanwhile: users of a server.
fn is_writable(context: &Context, target: &Target) -> Result<bool> {
    let Target::Live(AnyStore::Served(_)) = target else { return Ok(false) };
    Ok(target.call(context, &Request::Info)?["read_only"] != true)
}

/// Removes what exports that were killed have left. It does no harm that it stays.
fn remove_left(context: &Context, target: &Target, volume: &str) {
    let all = target.access().and_then(|store| store.snapshots(volume)).unwrap_or_default();
    let is_old = |name: &str| {
        taken_at(name, EXPORT_NAME).is_some_and(|at| Timestamp::now().duration_since(at) >= BEGIN)
    };
    for left in all.into_iter().filter(|taken| is_of_export(taken) && is_old(&taken.name)) {
        // That of an export that runs is open: it is refused, and stays.
        let left = SnapshotSpec { volume: volume.to_owned(), snapshot: left.name };
        let _ = remove(context, target, &left);
    }
}

/// What a volume is, and how often it was written and changed since its store was opened, and when that was, where that
/// is counted: a write counts as one when it begins, and as a change when it ends.
fn written(context: &Context, target: &Target, volume: &str) -> Result<Option<(String, [u64; 3])>> {
    let Target::Live(AnyStore::Served(_)) = target else { return Ok(None) };
    let top: Top = typed(target.call(context, &Request::Top)?)?;
    let found = top.volumes.into_iter().find(|load| load.name == volume);
    Ok(found.map(|found| (found.uuid, [found.io.writes, found.io.changes, top.started_ns])))
}

/// What errors of the standard output name.
pub(super) const STDOUT: &str = "the standard output";

/// An export has opened its snapshot when that is so old.
const BEGIN: SignedDuration = SignedDuration::from_secs(60);

/// How what is known of a file begins if that is a store, of any version.
const STORE: &str = "a DBS store";

/// Binary data on a terminal is never what was meant.
pub fn refuse_terminal(to_stdout: bool) -> Result<()> {
    if to_stdout && io::stdout().is_terminal() {
        return Err(Error::invalid("the standard output is a terminal: name a file or pipe it on"));
    }
    Ok(())
}
