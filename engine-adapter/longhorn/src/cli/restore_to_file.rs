//! `longhorn backup restore-to-file`: a backup as an image file, raw or qcow2.

use super::backup_args::RestoreToFileArgs;
use super::golang;
use crate::client::open_store;
use dbs_backup::url::Url;
use dbs_backup::{Onto, Target, Work};
use dbs_core::{Error, Result};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program that knows qcow2, as in upstream.
const QEMU_IMG: &str = "qemu-img";

/// A file that is filled.
struct Image {
    file: File,
    size: u64,
}

/// A file that goes unless it is kept.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // It was renamed, or is of no use.
        let _ = fs::remove_file(&self.0);
    }
}

/// Does what the command line says.
///
/// # Errors
/// In upstream's words; those of the backup store, of files, and of `qemu-img`.
pub fn run(args: &RestoreToFileArgs) -> Result<()> {
    let format = &*args.output_format;
    if !["qcow2", "raw"].contains(&format) {
        return Err(Error::invalid(format!("unsupported output image format: {format}")));
    }
    let url = args.backup.first().filter(|url| !url.is_empty());
    let url =
        url.ok_or_else(|| Error::invalid("missing the first argument, it should be backup-url"))?;
    let output = match &*args.output_file {
        "" => PathBuf::from(format!("volume.{format}")),
        path => PathBuf::from(path),
    };
    // Beside the file that it becomes: there must be room, and renaming is one step.
    let raw = Scratch(beside(&output, "raw"));
    let image = backing(&args.backing_file, &raw.0)?;
    restore(golang::unquoted(url), &raw.0, image, args.concurrent_limit)?;
    if format == "raw" {
        return renamed(&raw.0, &output);
    }
    let converted = Scratch(beside(&output, "converted"));
    qemu_img(&["convert", "-f", "raw", "-O", format], &[&raw.0, &converted.0])?;
    renamed(&converted.0, &output)
}

fn beside(output: &Path, what: &str) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(format!(".{what}.{}", std::process::id()));
    PathBuf::from(name)
}

fn renamed(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|e| Error::io(e, format!("renaming to `{}`", to.display())))
}

/// Makes the backing image the beginning of the file, if there is one.
fn backing(path: &str, raw: &Path) -> Result<bool> {
    if path.is_empty() {
        return Ok(false);
    }
    let found = file_at(Path::new(path))?;
    let info = Command::new(QEMU_IMG).arg("info").arg(&found).output();
    let info = info.map_err(|e| Error::io(e, format!("running {QEMU_IMG}")))?;
    let said = String::from_utf8_lossy(&info.stdout);
    if !said.contains("file format: qcow2") {
        return Err(Error::invalid(format!(
            "the format of backing file is not qcow2. backing file info={said}"
        )));
    }
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw"], &[&found, raw])?;
    Ok(true)
}

/// The file, or the only file of the directory.
fn file_at(path: &Path) -> Result<PathBuf> {
    let failed = |e| Error::io(e, format!("looking for the backing file `{}`", path.display()));
    if !fs::metadata(path).map_err(failed)?.is_dir() {
        return Ok(path.to_owned());
    }
    let entries: Vec<_> = fs::read_dir(path).and_then(Iterator::collect).map_err(failed)?;
    match entries.as_slice() {
        [one] => Ok(one.path()),
        _ => Err(Error::invalid(format!(
            "`{}` has {} files, and not exactly one: name the backing file",
            path.display(),
            entries.len()
        ))),
    }
}

fn restore(url: &str, path: &Path, has_backing: bool, concurrent_limit: i32) -> Result<()> {
    let url = Url::parse(url)?;
    let (volume, backup) = url.need_backup()?;
    let store = open_store(&url)?;
    let restoration = store.restore(volume, backup)?;
    let size = restoration.size();
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let file = opened
        .and_then(|file| file.set_len(size).map(|()| file))
        .map_err(|e| Error::io(e, format!("making `{}`", path.display())))?;
    let mut progress = |_, _| true;
    let workers = usize::try_from(concurrent_limit).unwrap_or(1).max(1);
    let mut work = Work { workers, ..Work::new(&mut progress) };
    let onto = if has_backing { Onto::Image } else { Onto::Empty };
    restoration.run(&Image { file, size }, onto, &mut work).map(drop)
}

fn qemu_img(args: &[&str], paths: &[&Path]) -> Result<()> {
    let output = Command::new(QEMU_IMG).args(args).arg("--").args(paths).output();
    let output = output.map_err(|e| {
        Error::io(e, format!("running {QEMU_IMG}, which qcow2 images need: install qemu-utils"))
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::invalid(format!("{QEMU_IMG} {}: {}", args.join(" "), said.trim())))
}

impl Target for Image {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buf, offset).map_err(|e| Error::io(e, "reading the image"))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.file.write_all_at(buf, offset).map_err(|e| Error::io(e, "writing the image"))
    }

    fn zero(&self, offset: u64, length: u64) -> Result<()> {
        let zeros = vec![0; length as usize];
        self.write_at(offset, &zeros)
    }

    fn flush(&self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io(e, "writing the image"))
    }
}
