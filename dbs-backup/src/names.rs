//! Where things are in a backup store, and what they are called.
//!
//! Source: upstream's `config.go`, `util.go`, `lock.go` and `util/util.go` (longhorn/backupstore, commit `ab5179e`).

use dbs_core::{Error, Result};
use std::fmt::{self, Write as _};

/// The folder of everything.
pub const BASE: &str = "backupstore";
/// How the name of a file with a backup's facts begins, and that of every such file ends.
const BACKUP_PREFIX: &str = "backup_";
const CONFIG_SUFFIX: &str = ".cfg";
const BLOCK_SUFFIX: &str = ".blk";
const LOCK_SUFFIX: &str = ".lck";
/// Letters in a new name: it is a part of a file name.
const LONGEST: usize = 200;
/// Part of the name of a file that is still being written.
pub const TEMPORARY: &str = ".tmp.";

/// What names a block: in Longhorn's layout the first half of the SHA-512 of its content, in a repository a keyed BLAKE3.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockName([u8; 32]);

impl BlockName {
    /// The name of a block with this content in Longhorn's layout.
    #[must_use]
    pub fn of(content: &[u8]) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA512, content);
        let mut half = [0; 32];
        half.copy_from_slice(&digest.as_ref()[..32]);
        Self(half)
    }

    /// From 64 hexadecimal digits in lower case.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text: &[u8; 64] = text.as_bytes().try_into().ok()?;
        let mut name = [0; 32];
        for (byte, pair) in name.iter_mut().zip(text.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(name))
    }

    /// The bytes of a name.
    pub(crate) fn bytes(self) -> [u8; 32] {
        self.0
    }

    /// A name of these bytes.
    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

/// The value of a hexadecimal digit in lower case.
pub(crate) fn digit(character: u8) -> Option<u8> {
    match character {
        b'0'..=b'9' => Some(character - b'0'),
        b'a'..=b'f' => Some(character - b'a' + 10),
        _ => None,
    }
}

impl fmt::Display for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text from outside, on one line of a terminal.
pub(crate) fn plain(text: &str) -> String {
    text.chars().take(300).map(|c| if dbs_core::is_hidden(c) { '\u{fffd}' } else { c }).collect()
}

/// Bytes as hexadecimal digits in lower case.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Whether something may be the name of a volume or a backup in Longhorn's layout: a letter or digit, then at least one
/// letter, digit, `_`, `.` or `-`.
#[must_use]
pub fn is_valid(name: &str) -> bool {
    name.len() > 1 && is_name(name)
}

/// Whether something may be the name of a volume or a backup in one of the layouts: in a repository, one letter or digit
/// is enough.
pub(crate) fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    let first = bytes.next().is_some_and(|b| b.is_ascii_alphanumeric());
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    first && bytes.all(inner)
}

/// Refuses what cannot be the name of a volume or backup in Longhorn's layout.
pub(crate) fn check(what: &str, name: &str) -> Result<()> {
    if is_valid(name) { Ok(()) } else { Err(refused(what, name, "2 or more letters")) }
}

/// Refuses what cannot be the name of a volume or backup in either layout.
pub(crate) fn check_any(what: &str, name: &str) -> Result<()> {
    if is_name(name) { Ok(()) } else { Err(refused(what, name, "letters")) }
}

fn refused(what: &str, name: &str, letters: &str) -> Error {
    Error::invalid(format!(
        "`{name}` cannot be the name of a {what} in a backup store: it needs {letters}, digits, `_`, `.` and `-`, of which \
         the first is a letter or digit"
    ))
}

/// Refuses names that are too long for a new volume or backup. Longer names that are there already, others have given.
pub(crate) fn check_new(what: &str, name: &str) -> Result<()> {
    if name.len() <= LONGEST {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the name of a {what} has at most {LONGEST} letters: `{name:.50}...`"
    )))
}

/// A name with 16 random hexadecimal digits, as upstream makes them for backups and locks.
///
/// # Errors
/// `Io`.
pub fn random(prefix: &str) -> Result<String> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::io(std::io::Error::other(e), "getting random bytes"))?;
    Ok(format!("{prefix}-{}", hex(&bytes)))
}

/// The folder with all volumes.
pub(crate) fn volumes() -> String {
    format!("{BASE}/volumes")
}

/// The folder of a volume.
pub(crate) fn volume(volume: &str) -> String {
    let digits = BlockName::of(volume.as_bytes()).to_string();
    format!("{BASE}/volumes/{}/{}/{volume}", &digits[..2], &digits[2..4])
}

/// The file with a volume's facts.
pub(crate) fn volume_config(name: &str) -> String {
    format!("{}/volume.cfg", volume(name))
}

/// The folder of a volume's backups.
pub(crate) fn backups(name: &str) -> String {
    format!("{}/backups", volume(name))
}

/// The file with a backup's facts.
pub(crate) fn backup_config(volume: &str, backup: &str) -> String {
    format!("{}/{}", backups(volume), backup_file(backup))
}

/// The name of that file.
pub(crate) fn backup_file(backup: &str) -> String {
    format!("{BACKUP_PREFIX}{backup}{CONFIG_SUFFIX}")
}

/// The backup whose facts are in a file of this name; others are passed over, as upstream does.
pub(crate) fn backup_of(file: &str) -> Option<&str> {
    let name = file.strip_prefix(BACKUP_PREFIX)?.strip_suffix(CONFIG_SUFFIX)?;
    is_valid(name).then_some(name)
}

/// The folder of a volume's blocks.
pub(crate) fn blocks(name: &str) -> String {
    format!("{}/blocks", volume(name))
}

/// The file of a block.
pub(crate) fn block(volume: &str, name: BlockName) -> String {
    let digits = name.to_string();
    format!("{}/{}/{}/{digits}{BLOCK_SUFFIX}", blocks(volume), &digits[..2], &digits[2..4])
}

/// The block in the file at this path below [`blocks`], if the path is that of a block.
pub(crate) fn block_of(path: &str) -> Option<BlockName> {
    let name = BlockName::parse(path.rsplit('/').next()?.strip_suffix(BLOCK_SUFFIX)?)?;
    let digits = name.to_string();
    let place = format!("{}/{}/{digits}{BLOCK_SUFFIX}", &digits[..2], &digits[2..4]);
    (place == path).then_some(name)
}

/// The folder of a volume's locks.
pub(crate) fn locks(name: &str) -> String {
    format!("{}/locks", volume(name))
}

/// The file of a lock.
pub(crate) fn lock(volume: &str, lock: &str) -> String {
    format!("{}/{lock}{LOCK_SUFFIX}", locks(volume))
}

/// The lock in a file of this name.
pub(crate) fn lock_of(file: &str) -> Option<&str> {
    file.strip_suffix(LOCK_SUFFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths as upstream's code makes them.
    #[test]
    fn places() {
        assert_eq!(volume_config("vol-1"), "backupstore/volumes/5e/23/vol-1/volume.cfg");
        assert_eq!(
            backup_config("vol-1", "backup-a"),
            "backupstore/volumes/5e/23/vol-1/backups/backup_backup-a.cfg"
        );
        assert_eq!(lock("vol-1", "lock-1"), "backupstore/volumes/5e/23/vol-1/locks/lock-1.lck");
        let name = BlockName::of(&[0; 2 << 20]);
        let place = block("vol-1", name);
        assert_eq!(
            block_of(place.strip_prefix(&blocks("vol-1")).unwrap().trim_start_matches('/')),
            Some(name)
        );
        assert_eq!(block_of(&format!("{name}.blk")), None, "at another place");
    }

    #[test]
    fn names_that_are_valid() {
        for name in ["ab", "a.", "0-", "pvc-1234_x.y", &"x".repeat(253)] {
            assert!(is_valid(name), "{name}");
        }
        for name in ["", "a", ".a", "-a", "a/b", "a b", "ä1", "..", "a\n"] {
            assert!(!is_valid(name), "{name}");
            // In a repository, which has no paths of names.
            assert_eq!(is_name(name), name == "a", "{name}");
        }
        assert!(check_new("backup", &"x".repeat(200)).is_ok());
        assert!(check_new("backup", &"x".repeat(201)).is_err());
        assert_eq!(backup_of("backup_b-1.cfg"), Some("b-1"));
        for file in [
            "backup_1234@failure.cfg",
            "backup_b-1.cfg.tmp.12",
            "b-1.cfg",
            "backup_.cfg",
            "backup_../../x.cfg",
        ] {
            assert_eq!(backup_of(file), None, "{file}");
        }
    }

    #[test]
    fn names_of_blocks() {
        let name = BlockName::of(b"");
        assert_eq!(
            name.to_string(),
            "cf83e1357eefb8bdf1542850d66d8007d620e4050b5715dc83f4a921d36ce9ce"
        );
        assert_eq!(BlockName::parse(&name.to_string()), Some(name));
        for text in ["", "00", &"g".repeat(64), &"A".repeat(64), &"0".repeat(65), &"ü".repeat(32)]
        {
            assert_eq!(BlockName::parse(text), None, "{text}");
        }
    }
}
