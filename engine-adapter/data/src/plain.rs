//! A plain file as what requests work on: its bytes are the volume's.
//!
//! Nothing in it says what was written last, and there are no snapshots. What can be seen of somebody else
//! who interferes is looked for, so that the file is not believed: it was removed or replaced, or is
//! shorter than the volume.

use super::events::ActiveEvents;
use dbs_core::{Error, ErrorKind, Result};
use nix::libc;
use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A file that is open, and locked for whoever has it.
#[derive(Debug)]
pub struct PlainFile {
    path: PathBuf,
    file: File,
    size: AtomicU64,
    /// Why nothing of it is believed any more. The system says only once that a sync has failed.
    broken: OnceLock<String>,
}

impl PlainFile {
    /// Opens a file, which must be there. With `shared`, another process may still use it, which is to
    /// end soon.
    ///
    /// # Errors
    /// `Invalid`: it is no regular file. `Busy`: somebody else has it, as a backend or as a store.
    pub fn open(path: &Path, shared: bool) -> Result<Self> {
        // Before it is opened: that alone does something to some devices.
        let metadata = look(path)?;
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = File::options().read(true).write(true).custom_flags(flags).open(path);
        let file = file.map_err(|e| failed(e, "opening", path))?;
        let opened = file.metadata().map_err(|e| failed(e, "opening", path))?;
        if identity(&opened) != identity(&metadata) {
            let text = format!("`{}` was replaced while it was opened", path.display());
            return Err(Error::busy(text));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) if shared => {}
            Err(TryLockError::WouldBlock) => {
                let text = format!("`{}` is in use by another backend or program", path.display());
                return Err(Error::busy(text));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error, "locking", path)),
        }
        let size = AtomicU64::new(opened.len());
        Ok(Self { path: path.into(), file, size, broken: OnceLock::new() })
    }

    /// Bytes of the volume.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    /// What the system says of it.
    ///
    /// # Errors
    /// `Io`.
    pub fn metadata(&self) -> Result<Metadata> {
        self.file.metadata().map_err(|e| failed(e, "looking at", &self.path))
    }

    /// Fills `out` from this byte on.
    ///
    /// # Errors
    /// `Io`; the file was cut off.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check_length()?;
        self.file.read_exact_at(out, offset).map_err(|e| failed(e, "reading", &self.path))
    }

    /// Writes from this byte on.
    ///
    /// # Errors
    /// `NoSpace`, `Io`; the file was cut off: a write would put zeros where there had been data.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.check_length()?;
        self.file.write_all_at(data, offset).map_err(|e| failed(e, "writing", &self.path))
    }

    /// Makes it larger. Nobody reads or writes meanwhile.
    ///
    /// # Errors
    /// The first is why, the second why it could not be made as it was, if so.
    pub fn grow(&self, size: u64) -> std::result::Result<(), (Error, Option<Error>)> {
        let resize = |size| {
            let resized = self.file.set_len(size).and_then(|()| self.file.sync_all());
            resized.map_err(|e| failed(e, "resizing", &self.path))
        };
        resize(size).map_err(|error| (error, resize(self.size()).err()))?;
        self.size.store(size, Ordering::SeqCst);
        Ok(())
    }

    /// Whether it is what it was.
    fn check(&self) -> Result<()> {
        self.check_length()?;
        let there = fs::metadata(&self.path).ok().map(|metadata| identity(&metadata));
        if there != Some(identity(&self.metadata()?)) {
            let text = format!("`{}` was removed or replaced", self.path.display());
            return Err(Error::new(ErrorKind::Io, text));
        }
        Ok(())
    }

    fn check_length(&self) -> Result<()> {
        if let Some(text) = self.broken.get() {
            return Err(Error::new(ErrorKind::Io, text.clone()));
        }
        let (length, size) = (self.metadata()?.len(), self.size());
        if length < size {
            let path = self.path.display();
            let text = format!("`{path}` was cut off: it has {length} bytes, the volume {size}");
            return Err(Error::new(ErrorKind::Io, text));
        }
        Ok(())
    }

    /// Makes what was written durable.
    fn sync(&self) -> Result<()> {
        self.check_length()?;
        self.file.sync_data().map_err(|e| {
            // By its kind: it is not the lack of space of one write, after which all is as before.
            let text =
                format!("syncing `{}`: {}; writes may be lost", self.path.display(), e.kind());
            Error::new(ErrorKind::Io, self.broken.get_or_init(|| text).clone())
        })
    }
}

impl ActiveEvents for PlainFile {
    fn first_change(&self) {}

    /// Nothing, as upstream's.
    fn unmap(&self, _offset: u64, _length: u64) -> Result<u64> {
        Ok(0)
    }

    fn commit(&self) -> Result<()> {
        self.sync()
    }

    fn healthy(&self) -> std::result::Result<(), String> {
        self.check().map_err(|error| format!("ping failure due to {error}"))
    }
}

/// What there is by this name, if it is a regular file.
///
/// # Errors
/// `NotFound`; `Invalid`: it is something else.
pub fn look(path: &Path) -> Result<Metadata> {
    let metadata = fs::metadata(path).map_err(|e| failed(e, "opening", path))?;
    if metadata.is_file() {
        return Ok(metadata);
    }
    let kind = metadata.file_type();
    let what = if kind.is_dir() {
        "a directory"
    } else if kind.is_block_device() || kind.is_char_device() {
        "a device"
    } else {
        "no regular file"
    };
    Err(Error::invalid(format!("`{}` is {what}; a backend is a regular file", path.display())))
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn failed(error: io::Error, doing: &str, path: &Path) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => Error::not_found(format!(
            "there is no file `{}`; make one of the volume's size, with `truncate -s SIZE`",
            path.display()
        )),
        _ => Error::io(error, format!("{doing} `{}`", path.display())),
    }
}
