//! What a replica is known by, on whatever ports its processes listen: random bytes in a file of its
//! directory. What is rebuilt in an empty directory is another replica.

use dbs_core::{Error, Result};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

/// The file.
pub(super) const FILE: &str = "volume.identity";

/// The identity of the replica in this directory, made if there is none.
///
/// # Errors
/// `Io`, `NoSpace`.
pub(super) fn of(dir: &Path) -> Result<[u8; 16]> {
    let path = dir.join(FILE);
    let failed = |e| Error::io(e, format!("making `{}`", path.display()));
    match read(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        Ok(text) if let Some(identity) = parse(&text) => return Ok(identity),
        _ => {}
    }
    let mut identity = [0; 16];
    let random = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut identity));
    random.map_err(failed)?;
    let write = || {
        let next = path.with_extension("identity.new");
        let mut file = File::create(&next)?;
        writeln!(file, "{:032x}", u128::from_be_bytes(identity))?;
        file.sync_all()?;
        fs::rename(&next, &path)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(failed)?;
    Ok(identity)
}

/// No more of it than an identity may have.
fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(64).read_to_string(&mut text)?;
    Ok(text)
}

fn parse(text: &str) -> Option<[u8; 16]> {
    let digits = text.trim_end();
    (digits.len() == 32).then(|| u128::from_str_radix(digits, 16).ok())?.map(u128::to_be_bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn it_stays_and_is_nobody_elses() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let identity = of(a.path()).unwrap();
        assert_eq!(of(a.path()).unwrap(), identity);
        assert_ne!(of(b.path()).unwrap(), identity);
        // What a crash has left of it is none.
        fs::write(b.path().join(FILE), "").unwrap();
        let again = of(b.path()).unwrap();
        assert_eq!(of(b.path()).unwrap(), again);
        assert!(of(&a.path().join("none")).is_err());
    }
}
