//! Writing a volume or snapshot out as a raw image.

use super::pipeline::pipeline;
use super::{BlockAccess, Copied, PIECE_BYTES, Piece, Progress, VolumeSource, report};
use dbs_core::io::open::{Claim, claim};
use dbs_core::{Error, ErrorKind, Result};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile};

/// Bytes of a file's name in the name that it has at first, which has more: names have 255 at the most.
const NAME_BYTES: usize = 200;

static ZEROS: [u8; PIECE_BYTES as usize] = [0; PIECE_BYTES as usize];

/// A new file, which gets its name when all of it is there: nobody is to take a part for the whole, also after
/// a `kill -9`. Until then it is `NAME.….partial` beside it, and is removed unless it is kept in the end; only
/// a process that is killed leaves it.
#[derive(Debug)]
pub struct NewFile {
    file: NamedTempFile,
    path: PathBuf,
}

impl NewFile {
    /// Makes it.
    ///
    /// # Errors
    /// `Exists`, `Io`.
    pub fn create(path: &Path) -> Result<Self> {
        if path.symlink_metadata().is_ok() {
            return Err(exists(path));
        }
        let failed = |e| Error::io(e, format!("creating {}", path.display()));
        if path.as_os_str().as_bytes().ends_with(b"/") {
            return Err(Error::not_found(format!("no directory {}", path.display())));
        }
        let name = path.file_name().unwrap_or_default().as_bytes();
        let mut prefix = OsStr::from_bytes(name.get(..NAME_BYTES).unwrap_or(name)).to_owned();
        prefix.push(".");
        let made = Builder::new()
            .prefix(&prefix)
            .suffix(".partial")
            // As of any new file, less what the umask takes.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory_of(path));
        Ok(Self { file: made.map_err(failed)?, path: path.to_owned() })
    }

    /// What to write to.
    #[must_use]
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Makes what was written durable, and then gives it its name.
    ///
    /// # Errors
    /// `Exists` if something has got the name meanwhile; `Io`. It is removed then, unless it has its name already.
    pub fn keep(self) -> Result<()> {
        let path = self.path;
        let failed = |e| Error::io(e, format!("syncing {}", path.display()));
        self.file.as_file().sync_all().map_err(failed)?;
        let kept =
            self.file.persist_noclobber(&path).or_else(|refused| match refused.error.kind() {
                io::ErrorKind::AlreadyExists => Err(exists(&path)),
                _ => replace_empty(refused.file, &path),
            });
        kept?;
        File::open(directory_of(&path)).and_then(|directory| directory.sync_all()).map_err(failed)
    }
}

/// Gives a file its name on a file system without links, and without renames that replace nothing: an empty file claims
/// the name first, and is replaced.
fn replace_empty(file: NamedTempFile, path: &Path) -> Result<File> {
    let claimed = OpenOptions::new().write(true).create_new(true).open(path);
    let named = claimed.and_then(|_| {
        file.persist(path).map_err(|refused| {
            // What is left of the claim would be in the way of the next try.
            let _ = std::fs::remove_file(path);
            refused.error
        })
    });
    named.map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => exists(path),
        _ => Error::io(e, format!("giving {} its name", path.display())),
    })
}

fn exists(path: &Path) -> Error {
    Error::exists(format!("{} exists", path.display()))
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Exports to a new file, or with `force` over an existing file or block device, unless that is an open
/// store or used by the system. A named pipe or character device needs no force. What an export that
/// fails has written to a file is removed, so that nobody takes it for an image.
///
/// # Errors
/// `Exists` without `force`; `Busy` if it is in use; those of [`export_file`].
pub fn export_path(
    access: &dyn BlockAccess,
    path: &Path,
    force: bool,
    progress: Progress<'_>,
) -> Result<Copied> {
    let context = |error: Error| error.context(path.display());
    match NewFile::create(path) {
        Ok(new) => {
            let copied = export_file(access, new.file(), progress).map_err(context)?;
            return new.keep().map(|()| copied);
        }
        Err(error) if error.kind() == ErrorKind::Exists => {}
        Err(error) => return Err(error),
    }
    let (file, _claim) = open_existing(path, force).map_err(context)?;
    export_file(access, &file, progress).map_err(|error| {
        if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            let _ = file.set_len(0);
        }
        context(error)
    })
}

/// What is there already, claimed if it keeps what is written to it.
fn open_existing(path: &Path, force: bool) -> Result<(File, Option<Claim>)> {
    let kind = std::fs::metadata(path).map_err(write_error)?.file_type();
    let keeps = kind.is_file() || kind.is_block_device();
    if keeps && !force {
        return Err(Error::exists("it exists; use --force to overwrite it"));
    }
    let claim = keeps.then(|| claim(path)).transpose()?;
    let file = OpenOptions::new().write(true).open(path).map_err(write_error)?;
    if let Some(claim) = &claim {
        claim.check_same(&file)?;
    }
    Ok((file, claim))
}

/// Writes a volume or snapshot to a file of which nothing is kept, with holes where it holds no
/// data; to a block device in full. On success everything is durable. What is neither is treated
/// as [`export_stream`] does.
///
/// # Errors
/// `Invalid` if it is a block device and too small; `Interrupted`; those of either side.
pub fn export_file(
    access: &dyn BlockAccess,
    file: &File,
    progress: Progress<'_>,
) -> Result<Copied> {
    let kind = file.metadata().map_err(write_error)?.file_type();
    let size = access.size();
    let copied = if kind.is_file() {
        file.set_len(0).map_err(write_error)?;
        let copied = copy(access, progress, |piece| write_sparse(file, piece))?;
        // A file that is there is written in its place: what a kill leaves is not as long as the whole.
        file.set_len(size).map_err(write_error)?;
        copied
    } else if kind.is_block_device() {
        let mut device = file;
        let room = device.seek(SeekFrom::End(0)).map_err(write_error)?;
        if room < size {
            return Err(Error::invalid(format!(
                "the device has {room} bytes and the volume {size}; choose a larger one"
            )));
        }
        device.rewind().map_err(write_error)?;
        copy(access, progress, |piece| write_all(&mut device, piece))?
    } else {
        return export_stream(access, file, progress);
    };
    file.sync_all().map_err(write_error)?;
    Ok(copied)
}

/// Writes all bytes of a volume or snapshot, zeros included, to a pipe or anything else.
///
/// # Errors
/// `Interrupted`; those of either side.
pub fn export_stream(
    access: &dyn BlockAccess,
    mut output: impl Write,
    progress: Progress<'_>,
) -> Result<Copied> {
    let copied = copy(access, progress, |piece| write_all(&mut output, piece))?;
    output.flush().map_err(write_error)?;
    Ok(copied)
}

fn copy(
    access: &dyn BlockAccess,
    progress: Progress<'_>,
    mut write: impl FnMut(&Piece) -> io::Result<u64>,
) -> Result<Copied> {
    let mut source = VolumeSource::new(access, 0);
    let mut copied = Copied::default();
    pipeline(
        |piece| source.next(piece),
        |piece: &Piece| {
            copied.data += write(piece).map_err(write_error)?;
            copied.length = piece.end();
            report(progress, copied.length, access.size())
        },
    )?;
    Ok(copied)
}

/// Writes the blocks of a piece that are not zero.
fn write_sparse(file: &File, piece: &Piece) -> io::Result<u64> {
    let mut written = 0;
    for run in piece.runs() {
        if let Some(data) = run.data {
            file.write_all_at(data, run.offset)?;
            written += run.length;
        }
    }
    Ok(written)
}

fn write_all(output: &mut impl Write, piece: &Piece) -> io::Result<u64> {
    if piece.is_data {
        output.write_all(&piece.buf)?;
        return Ok(piece.length);
    }
    let mut rest = piece.length;
    while rest > 0 {
        let length = rest.min(PIECE_BYTES);
        output.write_all(&ZEROS[..length as usize])?;
        rest -= length;
    }
    Ok(0)
}

fn write_error(error: io::Error) -> Error {
    Error::io(error, "writing the image")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Found by review: an export that was killed left a file of its name and full length, with holes.
    #[test]
    fn a_new_file_has_its_name_only_when_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let names = || fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
        let new = NewFile::create(&path).unwrap();
        new.file().write_all_at(b"content", 0).unwrap();
        assert!(!path.exists());
        let partial = names().next().unwrap().into_string().unwrap();
        assert!(partial.starts_with("image.") && partial.ends_with(".partial"), "{partial}");
        new.keep().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"content");
        // As of any new file.
        fs::write(dir.path().join("other"), b"").unwrap();
        let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode("image"), mode("other"));
        fs::remove_file(dir.path().join("other")).unwrap();
        // What is there stays, also if it came meanwhile.
        assert_eq!(NewFile::create(&path).unwrap_err().kind(), ErrorKind::Exists);
        fs::remove_file(&path).unwrap();
        let new = NewFile::create(&path).unwrap();
        fs::write(&path, b"another").unwrap();
        assert_eq!(new.keep().unwrap_err().kind(), ErrorKind::Exists);
        assert_eq!(fs::read(&path).unwrap(), b"another");
        drop(NewFile::create(&dir.path().join("third")).unwrap());
        assert_eq!(names().count(), 1);
        drop(NewFile::create(&dir.path().join("n".repeat(255))).unwrap());
        let folder = NewFile::create(&dir.path().join("none/"));
        assert_eq!(folder.unwrap_err().kind(), ErrorKind::NotFound);
    }

    /// As where neither links nor renames that replace nothing are known.
    #[test]
    fn a_new_file_gets_its_name_without_links() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let new = || NewFile::create(&dir.path().join("new")).unwrap().file;
        let first = new();
        first.as_file().write_all_at(b"content", 0).unwrap();
        replace_empty(first, &path).unwrap();
        assert_eq!(replace_empty(new(), &path).unwrap_err().kind(), ErrorKind::Exists);
        assert_eq!(fs::read(&path).unwrap(), b"content");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
