//! The JSON that upstream keeps beside its images, as far as somebody reads it: the manager parses
//! `volume.meta`, and a rebuild carries `.img.meta` from one replica to another.

use dbs_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

/// File of a replica directory that says what the replica is.
pub const VOLUME_META: &str = "volume.meta";

/// Longest metadata that is read: far above what labels can add up to.
const META_MAX_BYTES: u64 = 1 << 20;

/// `volume.meta`. Of these, the head's name, the revert that made it and `dirty` are kept here alone; the rest repeats what
/// the store says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct VolumeMeta {
    /// Size in bytes.
    pub size: u64,
    /// Disk name of the head.
    pub head: String,
    /// Open, or not closed in good order.
    pub dirty: bool,
    /// Being rebuilt.
    pub rebuilding: bool,
    /// Why it cannot be used; always empty on disk.
    pub error: String,
    /// Disk name of the head's parent, or nothing.
    pub parent: String,
    /// Bytes of a sector.
    pub sector_size: u64,
    /// Path of the file that the volume rests on, or nothing.
    pub backing_file_path: String,
    /// The volume's content is encrypted by its user.
    pub encrypted: bool,
    /// The revert that made the head, or an empty text if none did; absent if that is not known. Only replicas of DBS
    /// have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_revert: Option<String>,
}

impl VolumeMeta {
    /// Reads it from a replica directory; `None` if it is missing or unreadable as JSON, which
    /// costs no more than a head number.
    ///
    /// # Errors
    /// `Io`.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(VOLUME_META);
        let failed = |e| Error::io(e, format!("reading `{}`", path.display()));
        let file = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(failed)?,
        };
        let mut bytes = Vec::new();
        file.take(META_MAX_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        // A struct would be taken from an array, too.
        let value: Option<serde_json::Value> = serde_json::from_slice(&bytes).ok();
        Ok(value.filter(serde_json::Value::is_object).and_then(|v| serde_json::from_value(v).ok()))
    }

    /// Replaces it in a replica directory, wholly or not at all, durable on return.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let path = dir.join(VOLUME_META);
        let temporary = dir.join(format!("{VOLUME_META}.tmp"));
        let write = || {
            let mut file = File::create(&temporary)?;
            serde_json::to_writer(&mut file, self)?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(dir)?.sync_all()
        };
        write().map_err(|e: io::Error| {
            // Best effort: the error at hand is the one to report.
            let _ = fs::remove_file(&temporary);
            Error::io(e, format!("writing `{}`", path.display()))
        })
    }
}

/// `<disk>.img.meta`. The name in it is that of the head the disk once was: the file's name counts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct DiskMeta {
    /// Stale.
    pub name: String,
    /// Disk name of the parent, or nothing.
    pub parent: String,
    /// Marked as removed.
    pub removed: bool,
    /// Taken by a person.
    pub user_created: bool,
    /// Creation time, RFC 3339, or nothing.
    pub created: String,
    /// Labels; absent, `null` and none are the same.
    #[serde(deserialize_with = "none_as_default")]
    pub labels: BTreeMap<String, String>,
}

fn none_as_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    from: D,
) -> std::result::Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl DiskMeta {
    /// Reads it from the bytes of a file.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn parse(disk: &str, bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 > META_MAX_BYTES {
            return Err(Error::invalid(format!("the metadata of {disk:?} is too long")));
        }
        // Upstream's receiver pads files to whole blocks in places.
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        serde_json::from_slice(&bytes[..end])
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("the metadata of {disk:?}: {e}")))
    }

    /// The bytes of the file.
    ///
    /// # Errors
    /// Never in practice: texts and flags have a form in JSON.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec(self)
            .map_err(|e| Error::invalid(format!("encoding metadata: {e}")))?;
        bytes.push(b'\n');
        Ok(bytes)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn volume_meta_is_written_as_the_manager_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(VolumeMeta::read(dir.path()).unwrap(), None);
        let meta = VolumeMeta {
            size: 4096,
            head: "volume-head-003.img".into(),
            dirty: true,
            sector_size: 512,
            parent: "volume-snap-a.img".into(),
            ..Default::default()
        };
        meta.write(dir.path()).unwrap();
        assert_eq!(VolumeMeta::read(dir.path()).unwrap(), Some(meta));
        let text = fs::read_to_string(dir.path().join(VOLUME_META)).unwrap();
        let expected = r#"{"Size":4096,"Head":"volume-head-003.img","Dirty":true,"Rebuilding":false,"Error":"","Parent":"volume-snap-a.img","SectorSize":512,"BackingFilePath":"","Encrypted":false}"#;
        assert_eq!(text, format!("{expected}\n"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file stays");
        for damage in ["", "{", "[]", "{\"Size\":-1}"] {
            fs::write(dir.path().join(VOLUME_META), damage).unwrap();
            assert_eq!(VolumeMeta::read(dir.path()).unwrap(), None, "{damage}");
        }
        let gone = dir.path().join("gone");
        assert_eq!(VolumeMeta::default().write(&gone).unwrap_err().kind(), ErrorKind::Io);
    }

    #[test]
    fn disk_meta_bears_what_others_leave_out() {
        let meta = DiskMeta::parse("x", br#"{"Parent":""}"#).unwrap();
        assert_eq!(meta, DiskMeta::default());
        let text = br#"{"Name":"volume-head-000.img","Parent":"volume-snap-a.img","Removed":true,"UserCreated":true,"Created":"2026-08-21T10:00:00Z","Labels":null,"New":1}
"#;
        let meta = DiskMeta::parse("x", text).unwrap();
        assert!(meta.removed && meta.user_created && meta.labels.is_empty());
        assert_eq!(DiskMeta::parse("x", &meta.to_bytes().unwrap()).unwrap(), meta);
        let padded = [&br#"{"Labels":{"a":"b"}}"#[..], &[0; 100]].concat();
        assert_eq!(DiskMeta::parse("x", &padded).unwrap().labels["a"], "b");
        for damage in [&b""[..], b"{", b"\0\0", b"{\"Removed\":3}"] {
            assert_eq!(DiskMeta::parse("x", damage).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}
