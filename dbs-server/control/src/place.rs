//! Where the control socket of a store is.

use dbs_core::{Error, Result};
use nix::unistd::Uid;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
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
        (None, None) => shared(uid),
    }
}

/// The default where there is no directory of the user's own: anybody can make it first.
fn shared(uid: Uid) -> PathBuf {
    PathBuf::from(format!("/tmp/dbs-{uid}"))
}

/// Whether a socket in a runtime directory is one of a server that is believed because of its place: not in
/// a directory that another user has made where everybody can.
#[must_use]
pub fn is_trusted(directory: &Path) -> bool {
    let uid = Uid::effective();
    if directory != shared(uid) {
        // Somebody has named it, or nobody else can make it.
        return true;
    }
    fs::symlink_metadata(directory)
        .is_ok_and(|meta| meta.is_dir() && meta.uid() == uid.as_raw() && meta.mode() & 0o022 == 0)
}

/// The control socket of the store with this key ([`dbs_core::Store::key`]). A copy of a store has a
/// socket of its own.
#[must_use]
pub fn socket_path(runtime_dir: &Path, key: &str) -> PathBuf {
    runtime_dir.join(format!("{key}.sock"))
}

/// What tells the store at `path` from every other one on this machine, read without taking its
/// lock.
///
/// # Errors
/// `NotFound`, `Corrupt` if it is no store, `Io`.
pub fn store_key(path: &Path) -> Result<String> {
    dbs_core::store::peek_key(path)
}

/// Which file or device is at `path`: the end of its store's key, for those who may not read it.
///
/// # Errors
/// `NotFound`, `Io`.
pub fn store_place(path: &Path) -> Result<String> {
    dbs_core::store::peek_place(path)
}

/// Control sockets on which somebody listens, in any runtime directory on this machine, of the stores
/// whose keys `wanted` takes: the sockets and the keys.
pub fn listening(wanted: impl Fn(&str) -> bool) -> Vec<(PathBuf, String)> {
    let table = fs::read("/proc/net/unix").unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    let mut found: Vec<_> = parse_listening(&table)
        .filter_map(|path| {
            let key = Path::new(path).file_name()?.to_str()?.strip_suffix(".sock")?;
            wanted(key).then(|| (PathBuf::from(path), key.to_owned()))
        })
        .collect();
    found.sort();
    found.dedup();
    found
}

/// The absolute paths of the sockets in the table that listen. Its columns are an address, references,
/// protocol, flags, type, state, inode and path.
fn parse_listening(table: &str) -> impl Iterator<Item = &str> {
    table.lines().filter_map(|line| {
        let mut rest = line.split_once(':')?.1;
        let mut columns = [""; 6];
        for column in &mut columns {
            (*column, rest) = rest.trim_start().split_once(' ')?;
        }
        let path = rest.trim_start_matches(' ');
        (columns[2] == LISTENS && path.starts_with('/')).then_some(path)
    })
}

/// The flag of a socket that listens (`__SO_ACCEPTCON`), as the table shows it.
const LISTENS: &str = "00010000";

/// Makes the runtime directory, or sees that nobody else could have put something into it. With
/// `passable`, who knows the name of a socket in it can get to it.
///
/// # Errors
/// `Invalid` if it is not a directory of ours that only we can write, `Io`.
pub(super) fn prepare(directory: &Path, passable: bool) -> Result<()> {
    let name = directory.display();
    make(directory)?;
    let meta = fs::symlink_metadata(directory)
        .map_err(|e| Error::io(e, format!("the runtime directory {name}")))?;
    let ours = meta.uid() == Uid::effective().as_raw();
    if !meta.is_dir() || !ours || meta.mode() & 0o022 != 0 {
        return Err(Error::invalid(format!(
            "the runtime directory {name} must be a directory of this user that no other can \
             write; name another with DBS_RUNTIME_DIR"
        )));
    }
    if passable && meta.mode() & PASSABLE != PASSABLE {
        let mode = fs::Permissions::from_mode(meta.mode() & 0o7777 | PASSABLE);
        fs::set_permissions(directory, mode)
            .map_err(|e| Error::io(e, format!("opening the runtime directory {name} to others")))?;
    }
    Ok(())
}

/// Others may pass through a directory, not see what is in it.
const PASSABLE: u32 = 0o011;

/// Makes the directory of a control socket that the user has named, or sees that nobody could put
/// another socket in its place.
///
/// # Errors
/// `Invalid` if somebody could, `Io`.
pub(super) fn check_named(directory: &Path) -> Result<()> {
    let name = directory.display();
    make(directory)?;
    let meta = fs::metadata(directory)
        .map_err(|e| Error::io(e, format!("the control socket's directory {name}")))?;
    let owner = meta.uid();
    let ours = owner == 0 || owner == Uid::effective().as_raw();
    let sticky = meta.mode() & 0o1000 != 0;
    if meta.is_dir() && ours && (sticky || meta.mode() & 0o022 == 0) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "another user could replace a control socket in {name}: choose a directory of this user or of \
         root that no other user can write, or one with the sticky bit, as /tmp has"
    )))
}

fn make(directory: &Path) -> Result<()> {
    if directory.exists() {
        return Ok(());
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|e| Error::io(e, format!("making the directory {}", directory.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_that_listen_are_found_in_the_table() {
        let table = "\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 12345 /run/a b.sock
0000000000000000: 00000003 00000000 00000000 0001 03 12346 /run/connected.sock
0000000000000000: 00000002 00000000 00010000 0001 01 12347 @abstract
0000000000000000: 00000002 00000000 00010000 0001 01 12348
0000000000000000: 00000002 00000000 00010000 0001 01   349 /run/c.sock
";
        assert_eq!(parse_listening(table).collect::<Vec<_>>(), ["/run/a b.sock", "/run/c.sock"]);
    }
}
