//! Image files that volumes of a store rest on: raw ones, and qcow2.
//!
//! This crate owns what a file's bytes mean, and what tells one file from another. Which volume rests on which
//! file is the store's. It writes nothing.
//!
//! Enter at [`open`].

mod qcow2;

use dbs_core::{Backing, Error, Result};
use qcow2::Qcow2;
use ring::digest::{Context, SHA256};
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Granularity of the content of an image.
const SECTOR: u64 = 512;
/// Bytes at either end of a file that its digest covers, and of each sample between them.
const ENDS: u64 = 64 << 10;
const SAMPLE: u64 = 4 << 10;
/// Samples, spread evenly.
const SAMPLES: u64 = 256;

/// How formats begin that are not read, and where.
const FOREIGN: [(&str, u64, &[u8]); 6] = [
    ("vmdk", 0, b"KDMV"),
    ("vmdk", 0, b"# Disk DescriptorFile"),
    ("vhdx", 0, b"vhdxfile"),
    ("vpc", 0, b"conectix"),
    ("vdi", 0x40, &[0x7f, 0x10, 0xda, 0xbe]),
    ("qed", 0, b"QED\0"),
];

/// An open image.
struct Image {
    path: PathBuf,
    identity: String,
    size: u64,
    content: Content,
    _lock: ReadLock,
}

/// A shared lock as of who reads a store: who would write over the file, as `dbs` does with `--force`, is
/// refused as long as this lives.
struct ReadLock(File);

impl ReadLock {
    fn take(file: &File) -> Result<Self> {
        let cannot = |error| Error::io(error, "it cannot be read");
        let file = file.try_clone().map_err(cannot)?;
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => {
                Err(Error::busy("another process writes to it: wait for that, or stop it"))
            }
            // Some file systems have no locks.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Self(file)),
        }
    }
}

impl Drop for ReadLock {
    fn drop(&mut self) {
        // Explicitly, as a child between fork and exec shares the description.
        let _ = self.0.unlock();
    }
}

enum Content {
    Raw(File),
    Qcow2(Box<Qcow2>),
}

impl Backing for Image {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn name(&self) -> String {
        format!("`{}`", self.path.display())
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match &self.content {
            Content::Raw(file) => file.read_exact_at(buf, offset),
            Content::Qcow2(image) => image.read_at(offset, buf),
        }
    }
}

/// Opens the image at `path`, which may be a directory with nothing else in it. It must not change any more.
///
/// # Errors
/// `NotFound`, `Io`; `Unsupported` for other formats, and for features of qcow2 that are not read; `Invalid` for
/// what is no image; `Busy` if it is locked by who writes to it.
pub fn open(path: &Path) -> Result<Arc<dyn Backing>> {
    let path = file_at(path)?;
    let named = |error: Error| error.context(format!("the backing file `{}`", path.display()));
    let image = open_file(&path).map_err(named)?;
    Ok(Arc::new(image))
}

/// The file that is meant: what is at the path, or the only file in the directory there.
///
/// # Errors
/// `NotFound`, `Io`; `Invalid` for another directory.
pub fn file_at(path: &Path) -> Result<PathBuf> {
    let cannot = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => {
            Error::not_found(format!("there is no backing file `{}`", path.display()))
        }
        _ => Error::io(error, format!("finding the backing file `{}`", path.display())),
    };
    if !fs::metadata(path).map_err(cannot)?.is_dir() {
        return Ok(path.to_owned());
    }
    let entries = fs::read_dir(path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(cannot)?;
    let [entry] = entries.as_slice() else {
        return Err(Error::invalid(format!(
            "the backing file `{}`: expected exactly one file, found {} files/subdirectories",
            path.display(),
            entries.len()
        )));
    };
    if fs::metadata(entry.path()).map_err(cannot)?.is_dir() {
        return Err(Error::invalid(format!(
            "the backing file `{}`: expected exactly one file, found a subdirectory",
            path.display()
        )));
    }
    Ok(entry.path())
}

fn open_file(path: &Path) -> Result<Image> {
    let cannot = |error| Error::io(error, "it cannot be read");
    // Before it is opened: opening a FIFO waits for somebody who writes.
    if !fs::metadata(path).map_err(cannot)?.is_file() {
        return Err(Error::invalid("it is no regular file"));
    }
    let file = File::open(path).map_err(cannot)?;
    let lock = ReadLock::take(&file)?;
    let length = file.metadata().map_err(cannot)?.len();
    let digest = digest(&file, length).map_err(cannot)?;
    let mut magic = [0; 4];
    read_to_end_of(&file, 0, &mut magic).map_err(cannot)?;
    let (format, size, content) = if magic == qcow2::MAGIC {
        let image = Qcow2::open(file, length)?;
        ("qcow2", image.size(), Content::Qcow2(Box::new(image)))
    } else {
        refuse_foreign(&file)?;
        ("raw", length, Content::Raw(file))
    };
    if size == 0 || !size.is_multiple_of(SECTOR) {
        return Err(Error::invalid(format!(
            "the backing file size {size} should be a multiple of 512 bytes since Longhorn uses directIO by \
             default"
        )));
    }
    let identity = format!("{format}, {length} bytes, {size} of content, sha256 of parts {digest}");
    Ok(Image { path: path.to_owned(), identity, size, content, _lock: lock })
}

fn refuse_foreign(file: &File) -> Result<()> {
    for (format, at, begin) in FOREIGN {
        let mut found = [0; 32];
        let found = &mut found[..begin.len()];
        read_to_end_of(file, at, found).map_err(|e| Error::io(e, "it cannot be read"))?;
        if found == begin {
            return Err(Error::unsupported(format!(
                "format {format} is not supported: convert it to qcow2 or raw"
            )));
        }
    }
    Ok(())
}

/// A digest of the ends of a file and of samples between them: of all of a small one. `docs/format.md` has it.
fn digest(file: &File, length: u64) -> io::Result<String> {
    let mut hasher = Context::new(&SHA256);
    let mut buf = vec![0; ENDS as usize];
    let mut add = |at: u64, most: u64| {
        let part = &mut buf[..most.min(length.saturating_sub(at)) as usize];
        file.read_exact_at(part, at)?;
        hasher.update(part);
        io::Result::Ok(())
    };
    if length <= 2 * ENDS + SAMPLES * SAMPLE {
        (0..length.div_ceil(ENDS)).try_for_each(|part| add(part * ENDS, ENDS))?;
    } else {
        add(0, ENDS)?;
        let step = (length - 2 * ENDS) / SAMPLES;
        (0..SAMPLES).try_for_each(|sample| add(ENDS + sample * step, SAMPLE))?;
        add(length - ENDS, ENDS)?;
    }
    let digest = hasher.finish();
    Ok(digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Fills `buf` from `offset`; what is behind the end of the file is zeros.
fn read_to_end_of(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    buf[done..].fill(0);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
