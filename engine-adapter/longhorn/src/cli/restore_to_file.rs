//! `longhorn backup restore-to-file`: a backup as an image file, raw or qcow2.

use super::backup_args::RestoreToFileArgs;
use super::golang;
use crate::client::open_store;
use dbs_backup::url::Url;
use dbs_backup::{Onto, Target, Work, names};
use dbs_core::{Error, Result};
use nix::fcntl::OFlag;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program that knows qcow2, as in upstream.
const QEMU_IMG: &str = "qemu-img";

/// A file that is filled.
struct Image {
    file: File,
    size: u64,
}

/// A file of this process beside the one that it becomes: there is room, and renaming is one step. It goes unless it is
/// renamed.
struct Scratch(PathBuf);

impl Scratch {
    /// Makes it, empty. What is there already is never opened.
    fn new(output: &Path, what: &str) -> Result<Self> {
        let mut path = output.as_os_str().to_owned();
        path.push(format!(".{}", names::random(what)?));
        let path = PathBuf::from(path);
        let made = OpenOptions::new().write(true).create_new(true).open(&path);
        made.map_err(|e| Error::io(e, format!("making `{}`", path.display())))?;
        Ok(Self(path))
    }

    /// Opens it, and nothing else that has got its name.
    fn open(&self) -> Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(OFlag::O_NOFOLLOW.bits());
        let opened = options.open(&self.0);
        opened.map_err(|e| Error::io(e, format!("opening `{}`", self.0.display())))
    }

    /// Gives it its name, durably.
    fn become_file(self, output: &Path) -> Result<()> {
        let failed = |e| Error::io(e, format!("renaming to `{}`", output.display()));
        self.open()?.sync_all().map_err(failed)?;
        check_output(output)?;
        fs::rename(&self.0, output).map_err(failed)?;
        let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = File::open(folder.unwrap_or(Path::new(".")));
        folder.and_then(|folder| folder.sync_all()).map_err(failed)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // It was renamed, or is of no use.
        let _ = fs::remove_file(&self.0);
    }
}

/// Refuses to put a file in place of something that is none.
fn check_output(output: &Path) -> Result<()> {
    match fs::symlink_metadata(output) {
        Ok(meta) if !meta.is_file() => Err(Error::invalid(format!(
            "`{}` is not a regular file: name another output file, or move it away",
            output.display()
        ))),
        _ => Ok(()),
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
    check_output(&output)?;
    let raw = Scratch::new(&output, "raw")?;
    let has_backing = backing(&args.backing_file, &raw.0)?;
    restore(golang::unquoted(url), raw.open()?, has_backing, args.concurrent_limit)?;
    if format == "raw" {
        return raw.become_file(&output);
    }
    let converted = Scratch::new(&output, "converted")?;
    qemu_img(&["convert", "-f", "raw", "-O", format], &[&raw.0, &converted.0])?;
    converted.become_file(&output)
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

fn restore(url: &str, file: File, has_backing: bool, concurrent_limit: i32) -> Result<()> {
    let url = Url::parse(url)?;
    let (volume, backup) = url.need_backup()?;
    let store = open_store(&url)?;
    let restoration = store.restore(volume, backup)?;
    let image = &restoration.volume().backing_image_name;
    if !image.is_empty() && !has_backing {
        return Err(Error::invalid(format!(
            "volume {volume} is based on the backing image {image}, which no backup holds: name its file with \
             --backing-file"
        )));
    }
    let size = restoration.size();
    file.set_len(size).map_err(|e| Error::io(e, "making the image as long as the volume"))?;
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Who may write in the folder must not choose what is written, nor what is in the image.
    #[test]
    fn what_has_got_the_name_of_a_scratch_file_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let (output, victim) = (dir.path().join("a.raw"), dir.path().join("victim"));
        fs::write(&victim, b"kept").unwrap();
        let scratch = Scratch::new(&output, "raw").unwrap();
        assert_ne!(scratch.0, Scratch::new(&output, "raw").unwrap().0);
        fs::remove_file(&scratch.0).unwrap();
        std::os::unix::fs::symlink(&victim, &scratch.0).unwrap();
        assert!(scratch.open().is_err());
        assert!(scratch.become_file(&output).is_err());
        assert_eq!(fs::read(&victim).unwrap(), b"kept");
        assert!(!output.exists());
    }
}
