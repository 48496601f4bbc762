//! Disk names: layers called as upstream's files are.

use dbs_core::info::Labels;
use dbs_core::store::SnapshotOptions;
use dbs_core::{Error, Result};

/// What snapshots are staged under while they come in; hidden from all listings.
pub const STAGING_PREFIX: &str = ".incoming-";

const HEAD_PREFIX: &str = "volume-head-";
const SNAPSHOT_PREFIX: &str = "volume-snap-";
const SUFFIX: &str = ".img";
/// Longest name of a snapshot: with the longest name of a file that upstream and we make for one, a checksum's
/// record while it is written.
const NAME_MAX_BYTES: usize = 255 - SNAPSHOT_PREFIX.len() - SUFFIX.len() - ".checksum.tmp".len();

/// The disk name of the head with this number.
#[must_use]
pub fn head_disk(number: u64) -> String {
    format!("{HEAD_PREFIX}{number:03}{SUFFIX}")
}

/// The number in the disk name of a head.
#[must_use]
pub fn head_number(disk: &str) -> Option<u64> {
    let digits = disk.strip_prefix(HEAD_PREFIX)?.strip_suffix(SUFFIX)?;
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// The disk name of a snapshot.
#[must_use]
pub fn snapshot_disk(name: &str) -> String {
    format!("{SNAPSHOT_PREFIX}{name}{SUFFIX}")
}

/// The snapshot whose disk has this name.
#[must_use]
pub fn snapshot_name(disk: &str) -> Option<&str> {
    disk.strip_prefix(SNAPSHOT_PREFIX)?.strip_suffix(SUFFIX).filter(|name| !name.is_empty())
}

/// The name of the snapshot that an expansion to this size takes first.
#[must_use]
pub fn expansion_snapshot(size: u64) -> String {
    format!("expand-{size}")
}

/// Whether a replica can have a snapshot of this name with these labels: for itself, and for a
/// controller before it asks all of them at once.
///
/// # Errors
/// `Invalid`. Names that are kept for staging, or could not be files of the directory, are no names.
pub fn check_snapshot(name: &str, labels: Labels) -> Result<()> {
    if is_staging(name) || name.contains('/') {
        return Err(Error::invalid(format!("{name:?} cannot be the name of a snapshot")));
    }
    if name.len() > NAME_MAX_BYTES {
        return Err(Error::invalid(format!(
            "the name of a snapshot has {} bytes, and may have {NAME_MAX_BYTES}: replicas have files with it",
            name.len()
        )));
    }
    SnapshotOptions { labels, ..SnapshotOptions::default() }.check(name)
}

/// Whether a controller may take a snapshot of this name, with these labels. Whoever fills a replica refuses lists with
/// something in them that looks like a head: upstream's command line and library by such a test.
///
/// # Errors
/// As [`check_snapshot`].
pub fn check_new_snapshot(name: &str, labels: Labels) -> Result<()> {
    if name.contains("volume-head") {
        return Err(Error::invalid(format!(
            "{name:?} cannot be the name of a snapshot: it contains `volume-head`, and no replica could be rebuilt"
        )));
    }
    check_snapshot(name, labels)
}

/// Whether a snapshot's name is kept for staging.
#[must_use]
pub fn is_staging(name: &str) -> bool {
    name.starts_with(STAGING_PREFIX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        assert_eq!(head_disk(7), "volume-head-007.img");
        assert_eq!(head_disk(1234), "volume-head-1234.img");
        for number in [0, 7, 999, 1000, u64::MAX] {
            assert_eq!(head_number(&head_disk(number)), Some(number));
        }
        for name in ["a", "volume-snap-x.img", "expand-8192", "\u{e4}.img", "-"] {
            assert_eq!(snapshot_name(&snapshot_disk(name)), Some(name));
        }
        for other in ["volume-head-.img", "volume-head-+1.img", "volume-head-1", "head", ""] {
            assert_eq!(head_number(other), None, "{other}");
        }
        for other in ["volume-snap-.img", "volume-snap-a", "volume-head-000.img", "a", ""] {
            assert_eq!(snapshot_name(other), None, "{other}");
        }
    }

    #[test]
    fn what_no_replica_can_have_is_told_beforehand() {
        let labels = |length: usize| Labels::from([("k".to_owned(), "v".repeat(length))]);
        for name in ["a@b", "a/b", " a", "a ", ".incoming-x", "", "\n", &"n".repeat(227)] {
            let refused = check_snapshot(name, Labels::new()).unwrap_err();
            assert_eq!(refused.kind(), dbs_core::ErrorKind::Invalid, "{name:?}");
        }
        check_snapshot(&"n".repeat(226), labels(7000)).unwrap();
        check_snapshot("a b", labels(8000)).unwrap_err();
        for name in ["volume-head", "my-volume-head-001", "a@b"] {
            check_new_snapshot(name, Labels::new()).unwrap_err();
        }
        check_new_snapshot("head", labels(7000)).unwrap();
        // One that there is from before is taken by a rebuild.
        check_snapshot("volume-head", Labels::new()).unwrap();
    }
}
