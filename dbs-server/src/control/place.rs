//! Where the control socket of a store is.

use dbs_core::{Error, Result};
use nix::unistd::Uid;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The directory for sockets: `configured` if given (the caller's `DBS_RUNTIME_DIR`), else
/// `/run/dbs` for root, else `dbs` in `xdg` (the caller's `XDG_RUNTIME_DIR`), else
/// `/tmp/dbs-<uid>`.
#[must_use]
pub fn runtime_dir(configured: Option<PathBuf>, xdg: Option<PathBuf>) -> PathBuf {
    let uid = Uid::effective();
    match (configured, xdg) {
        (Some(configured), _) => configured,
        (None, _) if uid.is_root() => PathBuf::from("/run/dbs"),
        (None, Some(xdg)) => xdg.join("dbs"),
        (None, None) => PathBuf::from(format!("/tmp/dbs-{uid}")),
    }
}

/// The control socket of the store with this uuid (text form).
#[must_use]
pub fn socket_path(runtime_dir: &Path, uuid: &str) -> PathBuf {
    runtime_dir.join(format!("{uuid}.sock"))
}

/// The uuid of the store at `path` in text form, read without taking its lock.
///
/// # Errors
/// `NotFound`, `Corrupt` if it is no store, `Io`.
pub fn store_uuid(path: &Path) -> Result<String> {
    dbs_core::store::peek_uuid(path).map(|uuid| uuid_text(&uuid))
}

/// A uuid in the usual 8-4-4-4-12 form.
#[must_use]
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Makes the runtime directory, or sees that nobody else could have put something into it.
///
/// # Errors
/// `Invalid` if it is not a directory of ours that only we can write, `Io`.
pub(super) fn prepare(directory: &Path) -> Result<()> {
    let name = directory.display();
    if !directory.exists() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|e| Error::io(e, format!("making the runtime directory {name}")))?;
    }
    let meta = fs::symlink_metadata(directory)
        .map_err(|e| Error::io(e, format!("the runtime directory {name}")))?;
    let ours = meta.uid() == Uid::effective().as_raw();
    if !meta.is_dir() || !ours || meta.mode() & 0o022 != 0 {
        return Err(Error::invalid(format!(
            "the runtime directory {name} must be a directory of this user that no other can \
             write; name another with DBS_RUNTIME_DIR"
        )));
    }
    Ok(())
}
