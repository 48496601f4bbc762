//! The checksum of an image, kept beside it so that equal images need not be compared again.

use dbs_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The only method: CRC-64/GO-ISO over the whole image, holes as zeros.
pub const METHOD: &str = "crc64";

/// A checksum of a whole image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checksum {
    /// How it was computed: [`METHOD`], unless a peer knows others.
    pub method: String,
    /// Its value: 16 lower-case hexadecimal digits with [`METHOD`].
    pub value: String,
}

/// What a `.checksum` file holds, as upstream writes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`METHOD`].
    #[serde(default)]
    pub method: String,
    /// 16 lower-case hexadecimal digits.
    #[serde(default)]
    pub checksum: String,
    /// The image's stamp when it was hashed: an image with another stamp has changed since. Each
    /// replica compares it with its own only, so that its form is nobody else's business.
    #[serde(default)]
    pub change_time: String,
    /// RFC 3339 in UTC; empty when the checksum came from a sender.
    #[serde(default)]
    pub last_hashed_at: String,
    /// A later hash differed although the stamp had not changed.
    #[serde(default)]
    pub silently_corrupted: bool,
}

/// No record is longer; what is, was not written by a replica.
const MAX_BYTES: u64 = 64 * 1024;

impl Record {
    /// The path of the record of an image at `image`.
    #[must_use]
    pub fn path(image: &Path) -> PathBuf {
        let mut name = image.as_os_str().to_owned();
        name.push(".checksum");
        name.into()
    }

    /// Reads the record of an image; `None` if there is none. What a power cut has left empty is none.
    ///
    /// # Errors
    /// `Io`; `Corrupt` when it is no record.
    pub fn load(image: &Path) -> Result<Option<Self>> {
        let path = Self::path(image);
        let text = match read_short(&path) {
            Err(error) if is_none(&error) => return Ok(None),
            Ok(text) if text.is_empty() => return Ok(None),
            other => {
                other.map_err(|e| Error::io(e, format!("cannot read `{}`", path.display())))?
            }
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| {
            let text = format!("`{}` is no checksum record, remove it: {error}", path.display());
            Error::new(dbs_core::ErrorKind::Corrupt, text)
        })
    }

    /// Replaces the record of an image, whole or not at all. A record lost in a power cut is only
    /// computed again, so that nothing is synced.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub fn store(&self, image: &Path) -> Result<()> {
        let path = Self::path(image);
        let mut temporary = path.clone().into_os_string();
        temporary.push(".tmp");
        let text = serde_json::to_vec(self).map_err(io::Error::from);
        let outcome = text
            .and_then(|text| File::create(&temporary)?.write_all(&text))
            .and_then(|()| fs::rename(&temporary, &path));
        outcome.map_err(|error| {
            let _ = fs::remove_file(&temporary);
            Error::io(error, format!("cannot write `{}`", path.display()))
        })
    }

    /// Removes the record of an image, if there is one, for good: a power cut does not bring it
    /// back beside an image that has changed since.
    ///
    /// # Errors
    /// `Io`.
    pub fn remove(image: &Path) -> Result<()> {
        let path = Self::path(image);
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let outcome = match fs::remove_file(&path) {
            Err(error) if is_none(&error) => Ok(()),
            Ok(()) => File::open(directory.unwrap_or(Path::new("."))).and_then(|at| at.sync_all()),
            other => other,
        };
        outcome.map_err(|error| Error::io(error, format!("cannot remove `{}`", path.display())))
    }

    /// Whether it tells the checksum of an image whose stamp is `stamp`.
    #[must_use]
    pub fn is_current(&self, stamp: &str) -> bool {
        !self.checksum.is_empty() && !self.method.is_empty() && self.change_time == stamp
    }

    /// Whether an image whose stamp is `stamp` has its checksum, as far as is known.
    #[must_use]
    pub fn tells(&self, stamp: &str) -> bool {
        self.is_current(stamp) && !self.silently_corrupted
    }

    /// Its checksum.
    #[must_use]
    pub fn to_checksum(&self) -> Checksum {
        Checksum { method: self.method.clone(), value: self.checksum.clone() }
    }
}

/// Whether there is no such file, or can be none for the length of its name.
fn is_none(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidFilename)
}

fn read_short(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read;
    let mut text = Vec::new();
    File::open(path)?.take(MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}
