//! The start of a stream: what it carries.

use dbs_core::info::Labels;
use dbs_core::limits::NAME_MAX_BYTES;
use dbs_core::store::WrappedKey;
use dbs_core::units::{BLOCK_BYTES, SECTOR_BYTES};
use dbs_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// First bytes of a stream.
pub(super) const MAGIC: [u8; 8] = *b"DBS-SEND";
/// The version written and read.
pub(super) const VERSION: u16 = 1;
/// Feature bit: another stream of the same sequence follows this one.
const MORE: u16 = 1;
/// Feature bit: the blocks are encrypted, and the description has the key that they need, wrapped.
const ENCRYPTED: u16 = 2;
/// All feature bits that are known.
const FEATURES: u16 = MORE | ENCRYPTED;
/// Bytes of magic, version, features and length.
pub(super) const PREFIX_BYTES: usize = 16;
/// Most bytes of the description.
pub(super) const DESCRIPTION_MAX_BYTES: usize = 64 << 10;
/// Bytes of a uuid as text.
const UUID_BYTES: usize = 36;

/// What a stream carries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamHeader {
    /// Volume it was sent from.
    pub volume: String,
    /// Name of the snapshot.
    pub snapshot: String,
    /// Identity of the snapshot.
    pub uuid: String,
    /// What the stream is the difference to; none if it is complete in itself.
    pub base: Option<BaseSnapshot>,
    /// Size of the snapshot in bytes.
    pub size: u64,
    /// When the snapshot was taken, in nanoseconds since the Unix epoch.
    pub created_ns: u64,
    /// Taken by a person, not by the system.
    pub user_created: bool,
    /// Its labels.
    pub labels: Labels,
    /// Where the stream starts: 0, or the offset of the token it was resumed with.
    pub start: u64,
    /// The key of its volume, which is encrypted: the stream carries blocks as they are stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<WrappedKey>,
    /// Another stream of the same sequence follows.
    #[serde(skip)]
    pub more: bool,
}

/// The snapshot a difference builds on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseSnapshot {
    /// Name, where it was sent from.
    pub snapshot: String,
    /// Identity.
    pub uuid: String,
    /// Its volume, if that is another one: the stream makes a clone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
}

impl StreamHeader {
    /// The prefix and the description, without the checksum.
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        self.validate()?;
        let description = serde_json::to_vec(self)
            .map_err(|error| Error::invalid(format!("describing the snapshot: {error}")))?;
        let length = description.len();
        if length > DESCRIPTION_MAX_BYTES {
            return Err(Error::invalid(format!("the labels of {} are too long", self.snapshot)));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        let more = if self.more { MORE } else { 0 };
        let encrypted = if self.encryption.is_some() { ENCRYPTED } else { 0 };
        bytes.extend((more | encrypted).to_le_bytes());
        bytes.extend((length as u32).to_le_bytes());
        bytes.extend(description);
        Ok(bytes)
    }

    /// Judges the prefix; returns the length of the description, and the features.
    pub(super) fn decode_prefix(prefix: &[u8; PREFIX_BYTES]) -> Result<(usize, u16)> {
        let (magic, rest) = prefix.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(Error::invalid("the input is no stream made by `dbs send`"));
        }
        let [v0, v1, f0, f1, length @ ..] = rest else {
            return Err(Error::corrupt("the stream's prefix is short"));
        };
        let (version, features) = (u16::from_le_bytes([*v0, *v1]), u16::from_le_bytes([*f0, *f1]));
        if version != VERSION || features & !FEATURES != 0 {
            return Err(Error::unsupported(format!(
                "the stream has version {version} and features {features:#x}; this program reads \
                 version {VERSION} with features {FEATURES:#x} alone: use a newer one, or an older one to send"
            )));
        }
        let length = length.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        if length > DESCRIPTION_MAX_BYTES {
            return Err(Error::corrupt(format!("the stream's description has {length} bytes")));
        }
        Ok((length, features))
    }

    /// Reads the description, whose checksum was right.
    pub(super) fn decode(description: &[u8], features: u16) -> Result<Self> {
        let header: Self = serde_json::from_slice(description)
            .map_err(|error| Error::corrupt(format!("the stream's description: {error}")))?;
        let header = Self { more: features & MORE != 0, ..header };
        // Ciphertext would be taken for content, or the other way round.
        if header.encryption.is_some() != (features & ENCRYPTED != 0) {
            return Err(Error::corrupt(
                "the stream's features and its description contradict each other",
            ));
        }
        header.validate()?;
        Ok(header)
    }

    fn validate(&self) -> Result<()> {
        let base = self.base.as_ref();
        let names = [
            Some(&self.volume),
            Some(&self.snapshot),
            base.map(|base| &base.snapshot),
            base.and_then(|base| base.volume.as_ref()),
        ];
        for name in names.into_iter().flatten() {
            if name.is_empty() || name.len() > NAME_MAX_BYTES || name.contains('@') {
                return Err(Error::corrupt(format!(
                    "the stream gives the impossible name `{}`",
                    name.escape_debug()
                )));
            }
        }
        let uuids = [Some(&self.uuid), self.base.as_ref().map(|base| &base.uuid)];
        for uuid in uuids.into_iter().flatten() {
            check_uuid(uuid)?;
        }
        if let Some(key) = &self.encryption {
            let wrong = |error: Error| Error::corrupt(format!("the stream's key: {error}"));
            key.check().map_err(wrong)?;
        }
        let unit = if self.encryption.is_some() { BLOCK_BYTES } else { SECTOR_BYTES };
        let aligned = self.size.is_multiple_of(SECTOR_BYTES)
            && (self.start.is_multiple_of(unit) || self.start == self.size);
        if self.size == 0 || self.size > 1 << 62 || self.start > self.size || !aligned {
            return Err(Error::corrupt(format!(
                "the stream gives the impossible size {} or start {}",
                self.size, self.start
            )));
        }
        Ok(())
    }
}

/// How far a stream was received: `<uuid of the snapshot>:<offset>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumeToken {
    /// Identity of the snapshot.
    pub uuid: String,
    /// Everything before this byte was received.
    pub offset: u64,
}

impl fmt::Display for ResumeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.uuid, self.offset)
    }
}

impl FromStr for ResumeToken {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = || Error::invalid(format!("`{text}` is no token that `dbs receive` printed"));
        let (uuid, offset) = text.split_once(':').ok_or_else(invalid)?;
        check_uuid(uuid).map_err(|_| invalid())?;
        let offset = offset.parse::<u64>().map_err(|_| invalid())?;
        if !offset.is_multiple_of(SECTOR_BYTES) {
            return Err(invalid());
        }
        Ok(Self { uuid: uuid.to_owned(), offset })
    }
}

fn check_uuid(text: &str) -> Result<()> {
    let dashes = text.bytes().enumerate().all(|(index, byte)| match index {
        8 | 13 | 18 | 23 => byte == b'-',
        _ => byte.is_ascii_hexdigit(),
    });
    if dashes && text.len() == UUID_BYTES {
        Ok(())
    } else {
        Err(Error::corrupt(format!("`{}` is no uuid", text.escape_debug())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_round_trip() {
        let text = "01234567-89ab-cdef-0123-456789abcdef:1024";
        assert_eq!(text.parse::<ResumeToken>().unwrap().to_string(), text);
        for wrong in ["", ":", "x:0", &text[1..], &format!("{text}1"), &text.replace(':', "-")] {
            assert!(wrong.parse::<ResumeToken>().is_err(), "{wrong}");
        }
    }
}
