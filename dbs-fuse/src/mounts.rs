//! What is mounted where, according to the kernel, and taking it away.

use dbs_core::{Error, ErrorKind, Result};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, io};

/// The type of file system that views have.
pub const FILE_SYSTEM: &str = "fuse.dbs";

/// A mounted file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    /// Where.
    pub point: PathBuf,
    /// Its type, as `ext4` or `fuse.dbs`.
    pub file_system: String,
    /// What is mounted.
    pub source: OsString,
    /// Device number, `major:minor`.
    pub device: String,
}

/// All that is mounted, in the order in which it was; what is on top of another comes later.
///
/// # Errors
/// `Io`.
pub fn all() -> Result<Vec<Mounted>> {
    let text = fs::read("/proc/self/mountinfo")
        .map_err(|e| Error::io(e, "reading /proc/self/mountinfo"))?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// What is mounted at a place, the topmost.
///
/// # Errors
/// `Io`.
pub fn at(point: &Path) -> Result<Option<Mounted>> {
    Ok(all()?.into_iter().rfind(|mounted| mounted.point == point))
}

/// The path of a place for mounting, without links: also of one whose server is dead.
///
/// # Errors
/// `Io`.
pub fn place(directory: &Path) -> Result<PathBuf> {
    let failed = |e| Error::io(e, format!("finding {}", directory.display()));
    let path = std::path::absolute(directory).map_err(failed)?;
    match path.canonicalize() {
        Ok(path) => Ok(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Error::not_found(format!("there is no directory {}", path.display())))
        }
        // Only its own entry can be asked about; the way to it is alive.
        Err(_) => match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => Ok(parent.canonicalize().map_err(failed)?.join(name)),
            _ => Ok(path),
        },
    }
}

/// Whether the server of what is mounted there is gone.
#[must_use]
pub fn is_dead(point: &Path) -> bool {
    let error = fs::metadata(point).err().and_then(|error| error.raw_os_error());
    // The second one while it dies.
    matches!(error, Some(libc::ENOTCONN | libc::ECONNABORTED))
}

/// Takes away what is mounted topmost at a place: at once, or, if `lazily`, when its last user is
/// gone, but out of sight at once.
///
/// # Errors
/// `Busy` if it is in use, `Io`.
pub fn unmount(point: &Path, lazily: bool) -> Result<()> {
    let flags = if lazily { MntFlags::MNT_DETACH } else { MntFlags::empty() };
    let busy = || {
        Error::busy(format!(
            "{} is in use: a file is open, a directory entered, or an image mounted",
            point.display()
        ))
    };
    match umount2(point, flags | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::EBUSY) => Err(busy()),
        Err(Errno::EPERM) => unmount_as_user(point, lazily, busy),
        Err(error) => Err(Error::io(error.into(), format!("unmounting {}", point.display()))),
    }
}

/// Through the program that may do it for users.
fn unmount_as_user(point: &Path, lazily: bool, busy: impl Fn() -> Error) -> Result<()> {
    let mut command = Command::new("fusermount3");
    command.arg("-u").args(lazily.then_some("-z")).arg("--").arg(point).stdin(Stdio::null());
    let output = command.env("LC_ALL", "C").output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => no_fusermount(),
        _ => Error::io(error, "running fusermount3"),
    })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    if text.contains("busy") {
        return Err(busy());
    }
    Err(Error::new(ErrorKind::Io, format!("unmounting {}: {}", point.display(), text.trim())))
}

/// What to do where the program is missing.
pub fn no_fusermount() -> Error {
    Error::unsupported(
        "mounting as a user other than root needs the program fusermount3: install the package \
         `fuse3`",
    )
}

/// A line: id, parent, device, root, point, options, optional fields, `-`, type, source, options.
fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = String::from_utf8(fields.nth(2)?.to_vec()).ok()?;
    let point = PathBuf::from(plain(fields.nth(1)?));
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let file_system = String::from_utf8(fields.next()?.to_vec()).ok()?;
    let source = plain(fields.next()?);
    Some(Mounted { point, file_system, source, device })
}

/// Undoes the kernel's escapes, which are octal.
fn plain(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, after @ ..] = rest {
        let octal = (*first == b'\\').then(|| after.get(..3)).flatten();
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &after[3..];
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let line = b"36 35 98:0 / /mnt/a\\040b rw,noatime shared:1 master:2 - fuse.dbs /x\\134y ro";
        let wanted = Mounted {
            point: "/mnt/a b".into(),
            file_system: "fuse.dbs".into(),
            source: "/x\\y".into(),
            device: "98:0".into(),
        };
        assert_eq!(parse(line), Some(wanted));
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"36 35 98:0 / /mnt"), None);
        assert!(all().is_ok_and(|all| all.iter().any(|m| m.point == Path::new("/proc"))));
    }
}
