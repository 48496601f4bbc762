//! What stands behind the names of files: upstream's agents call layers, their descriptions and their
//! checksums by the files that they keep them in.

use super::Agent;
use dbs_core::{Error, Result};
use longhorn_sync::image::Record;
use longhorn_wire::names;

/// Suffix of a disk's description.
const META: &str = ".meta";
/// Suffix of a disk's checksum.
const CHECKSUM: &str = ".checksum";

/// A file of a replica's directory, had it files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileName {
    /// The layer of a snapshot.
    Snapshot(String),
    /// The description of a snapshot.
    SnapshotMeta(String),
    /// The layer of a head.
    Head(String),
    /// The description of a head.
    HeadMeta(String),
    /// The checksum on record for a layer.
    Checksum(String),
}

impl FileName {
    /// Reads a name; all but the disk's own name is cut off.
    ///
    /// # Errors
    /// `Invalid` for a path, and for what is no file that a replica has.
    pub fn parse(name: &str) -> Result<Self> {
        let name = name.trim();
        let bare = !name.contains(['/', '\0']) && !name.is_empty() && name != "." && name != "..";
        if !bare {
            return Err(Error::invalid(format!("{name:?} is not the name of a file here")));
        }
        let (disk, kind) = if let Some(disk) = name.strip_suffix(META) {
            (disk, Kind::Meta)
        } else if let Some(disk) = name.strip_suffix(CHECKSUM) {
            (disk, Kind::Checksum)
        } else {
            (name, Kind::Image)
        };
        let snapshot = names::snapshot_name(disk).is_some_and(|name| !names::is_staging(name));
        let head = names::head_number(disk).is_some();
        let disk = disk.to_owned();
        match kind {
            Kind::Image if snapshot => Ok(Self::Snapshot(disk)),
            Kind::Image if head => Ok(Self::Head(disk)),
            Kind::Meta if snapshot => Ok(Self::SnapshotMeta(disk)),
            Kind::Meta if head => Ok(Self::HeadMeta(disk)),
            Kind::Checksum if snapshot || head => Ok(Self::Checksum(disk)),
            _ => Err(Error::invalid(format!(
                "{name:?} is no file of a replica: those are volume-snap-NAME.img, \
                 volume-head-NNN.img, and the same with {META} or {CHECKSUM}"
            ))),
        }
    }

    /// The disk that it belongs to.
    #[must_use]
    pub fn disk(&self) -> &str {
        let (Self::Snapshot(disk)
        | Self::SnapshotMeta(disk)
        | Self::Head(disk)
        | Self::HeadMeta(disk)
        | Self::Checksum(disk)) = self;
        disk
    }
}

impl Agent {
    /// Removes what stands behind a name: a checksum on record, or what has come in and is not to
    /// be seen yet.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for what belongs to the volume.
    pub(super) fn file_remove(&self, name: &str) -> Result<()> {
        match FileName::parse(name)? {
            FileName::Checksum(disk) => {
                let image = self.shelf.image(&disk);
                if !Record::path(&image).exists() {
                    return Err(missing("remove", name));
                }
                Record::remove(&image)
            }
            FileName::Snapshot(disk)
            | FileName::SnapshotMeta(disk)
            | FileName::Head(disk)
            | FileName::HeadMeta(disk) => {
                if self.replica.disks()?.contains_key(&disk) {
                    return Err(Error::invalid(format!(
                        "remove {name}: it belongs to a disk of the volume; mark the disk as removed \
                         and purge, or use DiskRemove"
                    )));
                }
                let snapshot = names::snapshot_name(&disk).is_some();
                let gone = snapshot && self.replica.incoming().discard(&disk)?;
                if gone { Ok(()) } else { Err(missing("remove", name)) }
            }
        }
    }

    /// Renames what stands behind a name: a checksum on record. Layers and their descriptions get
    /// the names that they come in under, and snapshots keep theirs.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for all else.
    pub(super) fn file_rename(&self, old: &str, new: &str) -> Result<()> {
        match (FileName::parse(old)?, FileName::parse(new)?) {
            (FileName::Checksum(from), FileName::Checksum(to)) => {
                let [from, to] = [from, to].map(|disk| self.shelf.image(&disk));
                let Some(record) = Record::load(&from)? else { return Err(missing("rename", old)) };
                record.store(&to)?;
                Record::remove(&from)
            }
            (from, _) => {
                if self.is_here(from.disk())? {
                    return Err(Error::invalid(format!(
                        "rename {old}: snapshots of a replica on DBS keep their names; clone the \
                         snapshot instead"
                    )));
                }
                Err(missing("rename", old))
            }
        }
    }

    /// Whether there is a disk of this name, to be seen or coming in.
    fn is_here(&self, disk: &str) -> Result<bool> {
        if self.replica.disks()?.contains_key(disk) {
            return Ok(true);
        }
        let snapshot = names::snapshot_name(disk).is_some();
        Ok(snapshot && self.replica.incoming().existing(disk)?.is_some())
    }
}

fn missing(verb: &str, name: &str) -> Error {
    Error::not_found(format!("{verb} {name}: no such file or directory"))
}

enum Kind {
    Image,
    Meta,
    Checksum,
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::ErrorKind;

    #[test]
    fn names_of_files_say_what_is_meant() {
        let parse = |name| FileName::parse(name).ok();
        let snapshot = "volume-snap-a.img".to_owned();
        assert_eq!(parse("volume-snap-a.img"), Some(FileName::Snapshot(snapshot.clone())));
        assert_eq!(
            parse(" volume-snap-a.img.meta "),
            Some(FileName::SnapshotMeta(snapshot.clone()))
        );
        assert_eq!(parse("volume-snap-a.img.checksum"), Some(FileName::Checksum(snapshot)));
        let head = "volume-head-002.img".to_owned();
        assert_eq!(parse("volume-head-002.img"), Some(FileName::Head(head.clone())));
        assert_eq!(parse("volume-head-002.img.meta"), Some(FileName::HeadMeta(head)));
        let odd = "volume-snap-a.img.meta.img".to_owned();
        assert_eq!(parse("volume-snap-a.img.meta.img.meta"), Some(FileName::SnapshotMeta(odd)));
        for bad in [
            "",
            ".",
            "..",
            "/etc/passwd",
            "../volume-snap-a.img",
            "volume-snap-a/b.img",
            "volume-snap-\0.img",
            "volume-snap-.img",
            "volume-snap-.incoming-a.img",
            "volume.dbs",
            "volume.meta",
            "volume-head-x.img",
            "revision.counter",
        ] {
            let error = FileName::parse(bad).map_err(|error| error.kind());
            assert_eq!(error, Err(ErrorKind::Invalid), "{bad:?}");
        }
    }
}
