//! The facts of volumes and backups, as JSON.
//!
//! Source: upstream's `backupstore.go` and `config.go` (longhorn/backupstore, commit `ab5179e`). What its encoder makes of
//! the same facts is the same bytes.

use crate::codec::Method;
use crate::names::{BlockName, plain};
use dbs_core::{Error, Result};
use jiff::Timestamp;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Labels and parameters.
pub type Map = BTreeMap<String, String>;

/// The size of a block if nothing else is said.
pub const BLOCK_SIZE: u64 = 2 << 20;
/// Larger blocks than Longhorn's manager allows are not read: they are held in memory.
const LARGEST_BLOCK: u64 = 64 << 20;
/// The largest volume: as large as a DBS store can be.
pub const LARGEST_VOLUME: u64 = 64 << 40;
/// Bytes of a backup's facts: those of the largest volume with blocks of the usual size, each in 128 bytes of JSON. The
/// size in `volume.cfg` is no measure: it is that of the last backup, and earlier ones may be larger. No memory is taken
/// before the bytes are there.
pub(crate) const BACKUP_LIMIT: u64 = LARGEST_VOLUME / BLOCK_SIZE * 128;
/// How the blocks begin in a backup's facts.
const BLOCKS: &[u8] = br#","Blocks":["#;
/// The label with the size of the volume: the layout knows whole blocks alone.
pub const LABEL_SIZE: &str = "dbs-volume-size";
/// The label, or the parameter, with the time when the snapshot was created: the layout has the time when the backup was asked for.
pub const CREATED: &str = "dbs-snapshot-created";
/// The parameter with the size of a backup's blocks.
pub(crate) const PARAMETER_BLOCK_SIZE: &str = "backup-block-size";
/// The parameter that says whether a backup was to be full or incremental.
pub const PARAMETER_MODE: &str = "backup-mode";

/// `volume.cfg`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct VolumeConfig {
    /// Name.
    pub name: String,
    /// Bytes.
    #[serde(with = "number_in_text")]
    pub size: u64,
    /// Labels of the latest backup.
    pub labels: Option<Map>,
    /// When the first backup began.
    pub created_time: String,
    /// The latest complete backup; empty if there is none.
    pub last_backup_name: String,
    /// When that was asked for.
    pub last_backup_at: String,
    /// How many blocks there are.
    #[serde(with = "number_in_text")]
    pub block_count: u64,
    /// The image that the volume is based on, which no backup holds.
    #[serde(with = "text_in_text")]
    pub backing_image_name: String,
    /// Its SHA-512.
    #[serde(with = "text_in_text")]
    pub backing_image_checksum: String,
    /// How the blocks are compressed. The first backup of a volume decides.
    #[serde(with = "text_in_text")]
    pub compression_method: String,
    /// For Kubernetes.
    #[serde(with = "text_in_text")]
    pub storage_class_name: String,
    /// Longhorn's engine: `v1` if empty.
    #[serde(with = "text_in_text")]
    pub data_engine: String,
    /// What versions of upstream to come put here is written again as it was.
    #[serde(flatten)]
    pub(crate) rest: serde_json::Map<String, serde_json::Value>,
}

/// `backup_NAME.cfg`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct BackupConfig {
    /// Name.
    pub name: String,
    /// Volume.
    pub volume_name: String,
    /// Its snapshot.
    pub snapshot_name: String,
    /// When the backup was asked for.
    pub snapshot_created_at: String,
    /// When it was complete; empty while it is not.
    pub created_time: String,
    /// Blocks times their size.
    #[serde(with = "number_in_text")]
    pub size: u64,
    /// Labels.
    pub labels: Option<Map>,
    /// How it was asked for.
    pub parameters: Option<Map>,
    /// It was made from the differences to an earlier one. It holds everything all the same.
    pub is_incremental: bool,
    /// How its blocks are compressed.
    pub compression_method: String,
    /// Bytes uploaded for it, compressed, that were not there before.
    #[serde(with = "number_in_text")]
    pub newly_uploaded_data_size: u64,
    /// Bytes uploaded for it, compressed, that were there before.
    #[serde(with = "number_in_text")]
    pub re_uploaded_data_size: u64,
    /// What upstream's encoder makes of its own notes: `{}` in a full backup, else `null`.
    pub(crate) processing_blocks: Option<Nothing>,
    /// What the volume holds, in order; anything else is zeros, or of the backing image.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "or_default")]
    pub blocks: Vec<Block>,
    /// Only in backups of the oldest versions.
    pub(crate) single_file: SingleFile,
}

/// A block of a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Block {
    /// Where it is in the volume.
    pub offset: u64,
    /// Its name.
    #[serde(rename = "BlockChecksum", with = "block_name")]
    pub name: BlockName,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Nothing {}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct SingleFile {
    file_path: String,
}

impl VolumeConfig {
    /// From the bytes of `path`.
    ///
    /// # Errors
    /// `Corrupt`.
    pub(crate) fn parse(path: &str, bytes: &[u8]) -> Result<Self> {
        let volume: Self = parse(path, bytes)?;
        if volume.size > LARGEST_VOLUME {
            return Err(bad(path, &format!("a volume of {} bytes is too large", volume.size)));
        }
        Ok(volume)
    }

    /// How blocks of new backups are compressed.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn method(&self) -> Result<Method> {
        Method::parse(&self.compression_method)
    }

    /// Refuses a volume whose backups are not all of its content.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn refuse_image(&self) -> Result<()> {
        if self.backing_image_name.is_empty() {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "the volume is based on the backing image `{}`, which no backup holds: restore it with Longhorn",
            plain(&self.backing_image_name)
        )))
    }
}

impl BackupConfig {
    /// From the bytes of `path`.
    ///
    /// # Errors
    /// `Corrupt`.
    pub(crate) fn parse(path: &str, bytes: &[u8]) -> Result<Self> {
        let backup: Self = parse(path, bytes)?;
        let block_size = backup.block_size().map_err(|e| bad(path, &e.to_string()))?;
        let mut next = 0;
        for block in &backup.blocks {
            let offset = block.offset;
            if !offset.is_multiple_of(block_size) || offset < next || offset >= LARGEST_VOLUME {
                let what = format!(
                    "a block at {offset} cannot be there: blocks of {block_size} bytes are in order"
                );
                return Err(bad(path, &what));
            }
            next = offset + block_size;
        }
        let size = backup.blocks.len() as u64 * block_size;
        // The facts have no checksum. Without its blocks a backup would be restored as zeros.
        if !backup.is_in_progress() && !backup.is_single_file() && backup.size != size {
            let what = format!("its blocks have {size} bytes, and it says {}", backup.size);
            return Err(bad(path, &what));
        }
        Ok(backup)
    }

    /// From the bytes at the start of a file that has more, without the blocks. None if they are not all that a list
    /// needs: the size of the volume is known by the last block, if no label says it.
    pub(crate) fn parse_start(bytes: &[u8]) -> Option<Self> {
        // No string has this in it: there, a quotation mark is escaped.
        let end = bytes.windows(BLOCKS.len()).position(|part| part == BLOCKS)?;
        let head = [bytes.get(..end)?, b"}"].concat();
        let backup: Self = serde_json::from_slice(&head).ok()?;
        backup.block_size().ok()?;
        backup.labels.as_ref()?.contains_key(LABEL_SIZE).then_some(backup)
    }

    /// What is written before the first block.
    pub(crate) fn in_progress(name: &str, volume: &str, method: Method) -> Self {
        Self {
            name: name.to_owned(),
            volume_name: volume.to_owned(),
            compression_method: method.name().to_owned(),
            ..Self::default()
        }
    }

    /// Marks it as full, or as made from the differences to an earlier one.
    pub(crate) fn set_incremental(&mut self, incremental: bool) {
        self.is_incremental = incremental;
        self.processing_blocks = (!incremental).then_some(Nothing {});
    }

    /// Whether it has not been completed, and may never be.
    #[must_use]
    pub fn is_in_progress(&self) -> bool {
        self.created_time.is_empty()
    }

    /// A number that tells it from another backup of its name, as long as the process lives.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.created_time, &self.snapshot_created_at, &self.blocks).hash(&mut hasher);
        hasher.finish()
    }

    /// Whether it is one file of the oldest versions, and not made of blocks.
    #[must_use]
    pub fn is_single_file(&self) -> bool {
        !self.single_file.file_path.is_empty()
    }

    /// Where its last block ends.
    pub(crate) fn end(&self, block_size: u64) -> u64 {
        self.blocks.last().map_or(0, |block| block.offset + block_size)
    }

    /// Bytes of the volume that it is restored to: those of the volume when it was backed up, if the backup says so, else
    /// those of the volume today, or more if it was larger.
    ///
    /// # Errors
    /// `Corrupt` if it has blocks behind that; `Unsupported` if the blocks are not all of its content.
    pub fn volume_size(&self, volume: &VolumeConfig) -> Result<u64> {
        volume.refuse_image()?;
        let block_size = self.block_size()?;
        let end = self.end(block_size);
        let label = self.labels.as_ref().and_then(|labels| labels.get(LABEL_SIZE));
        match label.map(|text| text.parse::<u64>()) {
            None => Ok(volume.size.max(end)),
            // The size in volume.cfg is that of the last backup: this one may be larger.
            Some(Ok(size)) if size <= LARGEST_VOLUME && end < size + block_size => Ok(size),
            Some(Ok(size)) if size <= LARGEST_VOLUME => Err(Error::corrupt(format!(
                "its volume has {size} bytes, and it has data up to {end}"
            ))),
            Some(_) => Err(Error::corrupt(format!("label {LABEL_SIZE} of the backup is no size"))),
        }
    }

    /// When its snapshot was created, or, if that is not known, when it was asked for or complete.
    #[must_use]
    pub fn snapshot_time(&self) -> Option<Timestamp> {
        let other = [&*self.snapshot_created_at, &*self.created_time];
        self.told_created().into_iter().chain(other).find_map(|text| text.parse().ok())
    }

    /// When its snapshot was created, as the backup has it.
    #[must_use]
    pub fn told_created(&self) -> Option<&str> {
        let mut maps = [&self.parameters, &self.labels].into_iter().flatten();
        maps.find_map(|map| map.get(CREATED)).map(String::as_str)
    }

    /// The size of its blocks.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn block_size(&self) -> Result<u64> {
        block_size(self.parameters.as_ref())
    }

    /// How its blocks are compressed.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn method(&self) -> Result<Method> {
        Method::parse(&self.compression_method)
    }
}

/// The parameter with the size of a backup's blocks.
pub(crate) fn block_size_parameter(block_size: u64) -> Map {
    [(PARAMETER_BLOCK_SIZE.to_owned(), block_size.to_string())].into()
}

/// The size of blocks that parameters name.
///
/// # Errors
/// `Invalid`.
pub fn block_size(parameters: Option<&Map>) -> Result<u64> {
    let text = parameters.and_then(|map| map.get(PARAMETER_BLOCK_SIZE)).map_or("", String::as_str);
    match quantity(text) {
        Some(0) => Ok(BLOCK_SIZE),
        Some(size) if (4096..=LARGEST_BLOCK).contains(&size) && size.is_multiple_of(4096) => {
            Ok(size)
        }
        _ => Err(Error::invalid(format!(
            "`{text}` is no size of blocks: it is a multiple of 4096 bytes up to {LARGEST_BLOCK}"
        ))),
    }
}

/// A whole number of bytes, with the suffixes of Kubernetes. Nothing at all is 0.
fn quantity(text: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    if number.is_empty() {
        return text.is_empty().then_some(0);
    }
    let factor = match unit {
        "" => 1,
        "k" => 1000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// JSON as upstream's encoder writes it.
pub(crate) fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    let text = serde_json::to_string(value)
        .map_err(|e| Error::io(std::io::Error::other(e), "encoding JSON"))?;
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            // Outside of strings none of these occur.
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out += &format!("\\u{:04x}", u32::from(character))
            }
            other => out.push(other),
        }
    }
    Ok(out.into_bytes())
}

/// The first JSON document in `bytes`.
pub(crate) fn parse<'a, T: Deserialize<'a>>(path: &str, bytes: &'a [u8]) -> Result<T> {
    // What follows the document is passed over, as upstream's decoder does.
    match serde_json::Deserializer::from_slice(bytes).into_iter().next() {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => Err(bad(path, &error.to_string())),
        None => Err(bad(path, "it is empty")),
    }
}

/// Facts read and written again, and as they were: for tests.
///
/// # Errors
/// `Corrupt`.
#[cfg(feature = "testing")]
pub fn again(path: &str, bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
    let encoded = if path.ends_with("volume.cfg") {
        encode(&VolumeConfig::parse(path, bytes)?)
    } else {
        encode(&BackupConfig::parse(path, bytes)?)
    };
    Ok((encoded?, bytes.to_vec()))
}

fn bad(path: &str, what: &str) -> Error {
    Error::corrupt(format!("{path} in the backup store is damaged: {}", plain(what)))
}

/// A list that may be absent or null.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> std::result::Result<Vec<T>, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

/// A number that JSON has as a string.
pub(crate) mod number_in_text {
    use super::*;

    pub fn serialize<S: Serializer>(value: &u64, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<u64, D::Error> {
        from.deserialize_any(Number)
    }

    struct Number;

    impl Visitor<'_> for Number {
        type Value = u64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number in quotation marks")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<u64, E> {
            text.parse().map_err(|_| E::custom(format!("`{text}` is no number of bytes")))
        }

        fn visit_u64<E>(self, value: u64) -> std::result::Result<u64, E> {
            Ok(value)
        }

        fn visit_unit<E>(self) -> std::result::Result<u64, E> {
            Ok(0)
        }
    }
}

/// A string that JSON has as a string with a JSON string in it: what Go's option `string` does to one.
mod text_in_text {
    use super::*;

    pub fn serialize<S: Serializer>(value: &str, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.serialize_str(&serde_json::to_string(value).map_err(serde::ser::Error::custom)?)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> std::result::Result<String, D::Error> {
        let text: String = Option::deserialize(from)?.unwrap_or_default();
        if text.starts_with('"') {
            return serde_json::from_str(&text).map_err(de::Error::custom);
        }
        Ok(text)
    }
}

/// A block's name, as JSON has it.
pub(crate) mod block_name {
    use super::*;

    pub fn serialize<S: Serializer>(
        name: &BlockName,
        to: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        to.collect_str(name)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> std::result::Result<BlockName, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = BlockName;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("64 hexadecimal digits")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<BlockName, E> {
                BlockName::parse(text)
                    .ok_or_else(|| E::custom("a block's name is no 64 hexadecimal digits"))
            }
        }

        from.deserialize_str(Name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::ErrorKind;

    /// As upstream's code has written them (`tests/fixtures`).
    #[test]
    fn the_same_bytes_as_upstream() {
        let volume = VolumeConfig {
            name: "vol-1".into(),
            size: 4 << 20,
            labels: Some([("k".to_owned(), "<v>&".to_owned())].into()),
            created_time: "2026-11-25T11:00:00Z".into(),
            compression_method: "lz4".into(),
            ..VolumeConfig::default()
        };
        let text = r#"{"Name":"vol-1","Size":"4194304","Labels":{"k":"\u003cv\u003e\u0026"},"CreatedTime":"2026-11-25T11:00:00Z","LastBackupName":"","LastBackupAt":"","BlockCount":"0","BackingImageName":"\"\"","BackingImageChecksum":"\"\"","CompressionMethod":"\"lz4\"","StorageClassName":"\"\"","DataEngine":"\"\""}"#;
        assert_eq!(String::from_utf8(encode(&volume).unwrap()).unwrap(), text);
        assert_eq!(VolumeConfig::parse("x", text.as_bytes()).unwrap(), volume);
        let backup = BackupConfig::in_progress("backup-1", "vol-1", Method::Lz4);
        let text = r#"{"Name":"backup-1","VolumeName":"vol-1","SnapshotName":"","SnapshotCreatedAt":"","CreatedTime":"","Size":"0","Labels":null,"Parameters":null,"IsIncremental":false,"CompressionMethod":"lz4","NewlyUploadedDataSize":"0","ReUploadedDataSize":"0","ProcessingBlocks":null,"SingleFile":{"FilePath":""}}"#;
        assert_eq!(String::from_utf8(encode(&backup).unwrap()).unwrap(), text);
        assert_eq!(BackupConfig::parse("x", text.as_bytes()).unwrap(), backup);
    }

    #[test]
    fn little_is_enough() {
        let volume =
            VolumeConfig::parse("x", br#"{"Name":"x","Size":null,"New":{"a":[1]}} trailing"#)
                .unwrap();
        assert_eq!(volume.method().unwrap(), Method::Gzip);
        let backup = BackupConfig::parse("x", br#"{"Blocks":null,"CreatedTime":""}"#).unwrap();
        assert!(backup.is_in_progress() && backup.block_size().unwrap() == BLOCK_SIZE);
    }

    #[test]
    fn the_start_of_facts_is_enough_for_a_list() {
        let text = |labels: &str, blocks: &str| {
            format!(
                r#"{{"Name":"b","CreatedTime":"t","Size":"7","Labels":{{{labels}}},"Blocks":[{blocks}"#
            )
        };
        let start = |text: String| BackupConfig::parse_start(text.as_bytes());
        let size = r#""dbs-volume-size":"5","k":"\",\"Blocks\":[""#;
        let found = start(text(size, r#"{"Offset":0,"Blo"#)).unwrap();
        assert_eq!((&*found.name, &*found.created_time, found.size), ("b", "t", 7));
        assert_eq!(found.labels.unwrap()["k"], "\",\"Blocks\":[");
        // What is said behind the blocks is not known.
        assert_eq!(start(text(r#""a":"b""#, "")), None);
        assert_eq!(start(r#"{"x":{"y":1,"Blocks":[1]},"Labels":{}}"#.to_owned()), None);
        assert_eq!(start(r#"{"Labels":{"dbs-volume-size":"5"}}"#.to_owned()), None);
    }

    #[test]
    fn hostile_facts_are_refused() {
        let name = "a".repeat(64);
        let at = |offset: &str| format!(r#"{{"Offset":{offset},"BlockChecksum":"{name}"}}"#);
        let blocks = |list: &str| format!(r#"{{"Blocks":[{list}]}}"#);
        for text in [
            String::new(),
            "{corrupt: definitely".to_owned(),
            "[".repeat(100_000),
            blocks(&at("1")),
            blocks(&at("-2097152")),
            blocks(&at("18446744073709551615")),
            blocks(&at("9223372036854775808")),
            blocks(&format!("{},{}", at("2097152"), at("0"))),
            blocks(&format!("{},{}", at("0"), at("0"))),
            blocks(r#"{"Offset":0,"BlockChecksum":"../../../../etc/passwd"}"#),
            blocks("{}"),
            r#"{"Parameters":{"backup-block-size":"1Gi"}}"#.to_owned(),
            r#"{"Parameters":{"backup-block-size":"-1"}}"#.to_owned(),
        ] {
            let error = BackupConfig::parse("x.cfg", text.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{text:.80}");
            assert!(error.to_string().contains("x.cfg"));
        }
        for text in [
            r#"{"Size":"-1"}"#,
            r#"{"Size":"9223372036854775807"}"#,
            r#"{"CompressionMethod":"\"x"}"#,
        ] {
            assert!(VolumeConfig::parse("x", text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_of_blocks() {
        let size = |text: &str| {
            block_size(Some(&[(PARAMETER_BLOCK_SIZE.to_owned(), text.to_owned())].into())).ok()
        };
        assert_eq!(block_size(None).unwrap(), BLOCK_SIZE);
        for (text, bytes) in
            [("", BLOCK_SIZE), ("0", BLOCK_SIZE), ("2Mi", 2 << 20), ("16777216", 16 << 20)]
        {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["x", "1", "2Ti", "4097", "18446744073709551616", "18446744073709551615Gi"] {
            assert_eq!(size(text), None, "{text}");
        }
    }
}
