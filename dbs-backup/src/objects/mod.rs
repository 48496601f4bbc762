//! Where the files of a backup store are: one small trait, whatever keeps them.

pub(crate) mod azure;
mod directory;
#[cfg(test)]
pub(crate) mod hooked;
mod http;
pub(crate) mod mount;
mod remote;
pub(crate) mod s3;
mod tls;

pub use directory::Directory;
pub use mount::unmount_all;

use dbs_core::{Error, ErrorKind, Result};
use std::time::SystemTime;

/// Size and time of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// Bytes.
    pub size: u64,
    /// When it was last written, by the clock of whoever keeps it.
    pub modified: SystemTime,
}

/// An object whose writing has begun.
#[derive(Debug)]
pub struct Prepared(Option<directory::Fresh>);

/// What is called for each object of a walk, with its path and what gives its bytes.
pub type Found<'a> = &'a mut dyn FnMut(&str, Bytes<'_>) -> Result<()>;

/// Gives the bytes of an object where that is known. In a directory each call asks the file system.
pub type Bytes<'a> = &'a dyn Fn() -> Option<u64>;

/// Asked right before each try of a request whether it may still be made.
pub type Allowed<'a> = &'a (dyn Fn() -> Result<()> + Sync);

/// Keeps objects: byte strings under paths. Many threads may use it at once.
///
/// Errors are `NotFound` where said so, `Io` for whatever may be better later, and others.
#[allow(clippy::missing_errors_doc)]
pub trait Objects: Send + Sync {
    /// The whole object, which has at most `limit` bytes: a longer one is `Corrupt`, none is `NotFound`.
    fn get(&self, path: &str, limit: u64) -> Result<Vec<u8>>;
    /// `most` bytes of an object from `start`, or as many as it has there. A server that gives more than it was asked for,
    /// or another part, is `Corrupt`.
    fn get_range(&self, path: &str, start: u64, most: u64) -> Result<Vec<u8>>;

    /// The first `most` bytes of an object, or all of it.
    fn get_start(&self, path: &str, most: u64) -> Result<Vec<u8>> {
        self.get_range(path, 0, most)
    }

    /// Writes an object, or writes it anew. A reader finds the old or the new content and nothing between, also after
    /// a power loss. On return the new one is durable.
    fn put(&self, path: &str, content: &[u8]) -> Result<()>;
    /// Begins to write an object, where that is worth it. It may be there, and durable, only after [`Objects::complete`],
    /// and may be gone if what this returns is dropped. Whoever has one of these two has both.
    fn prepare(&self, path: &str, content: &[u8]) -> Result<Prepared> {
        self.put(path, content).map(|()| Prepared(None))
    }

    /// Ends the writing of several objects, as [`Objects::put`] does that of one.
    fn complete(&self, prepared: Vec<Prepared>) -> Result<()> {
        if prepared.iter().all(|one| one.0.is_none()) {
            return Ok(());
        }
        Err(Error::unsupported("what was begun to be written is not ended here"))
    }

    /// Whether there is such an object.
    fn stat(&self, path: &str) -> Result<Option<Stat>>;
    /// The names right below a folder, of objects and of folders. A folder that is not there is empty.
    fn list(&self, folder: &str) -> Result<Vec<String>>;
    /// Calls `found` with the path, below the folder, of every object below a folder.
    fn walk(&self, folder: &str, found: Found<'_>) -> Result<()>;
    /// Removes an object, if it is there, and if `allowed` says yes at each try.
    fn remove_if(&self, path: &str, allowed: Allowed<'_>) -> Result<()>;

    /// Removes an object, if it is there.
    fn remove(&self, path: &str) -> Result<()> {
        self.remove_if(path, &|| Ok(()))
    }

    /// Removes everything below a folder, and the folder.
    fn remove_all(&self, folder: &str) -> Result<()>;
    /// Removes a folder and those below it which hold no object, where there are folders without objects.
    fn remove_empty(&self, _folder: &str) -> Result<()> {
        Ok(())
    }

    /// Makes durable what was removed, and what others have written, as far as this side can.
    fn settle(&self) -> Result<()>;
}

/// Reads answers of servers, for the fuzzer.
#[cfg(feature = "testing")]
pub(crate) fn hostile_answer(text: &str) {
    s3::hostile_answer(text);
    azure::hostile_answer(text);
}

/// What is said of an object, rather than of what keeps it.
pub(crate) fn is_verdict(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Corrupt | ErrorKind::NotFound)
}

/// Upstream's words for an object that is not there; Longhorn's manager looks for them.
pub(crate) fn missing(path: &str) -> Error {
    Error::not_found(format!("cannot find {path} in backupstore"))
}

/// An object is longer than it may be.
pub(crate) fn too_long(path: &str, limit: u64) -> Error {
    Error::corrupt(format!("{path} in the backup store is damaged: it has more than {limit} bytes"))
}
