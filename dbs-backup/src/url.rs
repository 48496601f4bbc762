//! Where backups are: `s3://bucket@region/path`, `vfs:///path`, and one backup there.
//!
//! Source: upstream's `backupstore.go` and `driver.go` (longhorn/backupstore, commit `ab5179e`).

use crate::names;
use dbs_core::{Error, Result};
use std::fmt::Write as _;

/// A backup store, or a volume or backup in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    /// `s3`, `vfs` and others.
    pub scheme: String,
    /// What is before `@`.
    pub user: Option<String>,
    /// What is between `//` or `@`, and the path.
    pub host: String,
    /// With its leading `/`, or empty.
    pub path: String,
    /// Options of the store, in order.
    pub options: Vec<(String, String)>,
    /// A volume in it.
    pub volume: Option<String>,
    /// A backup of the volume.
    pub backup: Option<String>,
}

impl Url {
    /// Parses one.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn parse(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::invalid("destination URL hasn't been specified"));
        }
        let wrong = |what: &str| {
            Error::invalid(format!(
                "`{text}` is no URL of a backup store: {what}. Write it as s3://BUCKET@REGION/PATH, vfs:///PATH, \
                 nfs://HOST:/PATH, cifs://HOST/SHARE or azblob://CONTAINER@SUFFIX/PATH"
            ))
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong("it has no `://`"))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        if text.chars().any(char::is_control) || place.contains('#') {
            return Err(wrong("it has characters that no URL has"));
        }
        let (authority, path) = match place.find('/') {
            Some(slash) => place.split_at(slash),
            None => (place, ""),
        };
        let (user, host) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user.to_owned()), host),
            None => (None, authority),
        };
        let path = decode(path, false).ok_or_else(|| wrong("its path has a bad `%`"))?;
        if path.split('/').any(|part| part == "..") {
            return Err(wrong("its path has a `..`"));
        }
        let mut url = Self {
            scheme: scheme.to_owned(),
            user,
            host: host.to_owned(),
            path,
            options: Vec::new(),
            volume: None,
            backup: None,
        };
        for pair in query.replace("\\u0026", "&").split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decode(value, true).ok_or_else(|| wrong("its options have a bad `%`"))?;
            match key {
                "volume" => url.volume = Some(value),
                "backup" => url.backup = Some(value),
                _ => url.options.push((key.to_owned(), value)),
            }
        }
        url.volume.iter().try_for_each(|name| names::check_any("volume", name))?;
        url.backup.iter().try_for_each(|name| names::check_any("backup", name))?;
        Ok(url)
    }

    /// The same store, and nothing in it.
    #[must_use]
    pub fn store(&self) -> Self {
        Self { volume: None, backup: None, ..self.clone() }
    }

    /// A backup in the same store.
    #[must_use]
    pub fn with(&self, volume: &str, backup: Option<&str>) -> Self {
        Self { volume: Some(volume.to_owned()), backup: backup.map(str::to_owned), ..self.clone() }
    }

    /// An option of the store.
    #[must_use]
    pub fn option(&self, key: &str) -> Option<&str> {
        self.options.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// The volume it names.
    ///
    /// # Errors
    /// `Invalid` if it names none.
    pub fn need_volume(&self) -> Result<&str> {
        self.volume.as_deref().ok_or_else(|| {
            Error::invalid(format!(
                "{self} names no volume: add ?volume=VOLUME, as `dbs backup list` prints it"
            ))
        })
    }

    /// The volume and the backup it names.
    ///
    /// # Errors
    /// `Invalid` if it does not name both.
    pub fn need_backup(&self) -> Result<(&str, &str)> {
        match (&self.volume, &self.backup) {
            (Some(volume), Some(backup)) => Ok((volume, backup)),
            _ => Err(Error::invalid(format!(
                "{self} names no backup: add ?backup=BACKUP&volume=VOLUME, as `dbs backup list` prints it"
            ))),
        }
    }
}

impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://", self.scheme)?;
        self.user.iter().try_for_each(|user| write!(f, "{user}@"))?;
        write!(f, "{}{}", self.host, encode(&self.path, "/:@!$&'()*+,;="))?;
        let mut query: Vec<(&str, &str)> =
            self.options.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        query.extend(self.backup.as_deref().map(|backup| ("backup", backup)));
        query.extend(self.volume.as_deref().map(|volume| ("volume", volume)));
        query.sort();
        for (index, (key, value)) in query.iter().enumerate() {
            let sign = if index == 0 { '?' } else { '&' };
            write!(f, "{sign}{key}={}", encode(value, "").replace("%20", "+"))?;
        }
        Ok(())
    }
}

/// Percent-encoding of all but unreserved characters, and those that are `allowed`.
pub(crate) fn encode(text: &str, allowed: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~');
        if plain || (byte.is_ascii() && allowed.contains(char::from(byte))) {
            out.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

fn decode(text: &str, plus_is_space: bool) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let pair = [bytes.next()?, bytes.next()?];
                let pair = std::str::from_utf8(&pair).ok()?;
                out.push(u8::from_str_radix(pair, 16).ok()?);
            }
            b'+' if plus_is_space => out.push(b' '),
            other => out.push(other),
        }
    }
    let out = String::from_utf8(out).ok()?;
    (!out.contains('\0')).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips() {
        for text in [
            "s3://bucket@us-east-1/path/?backup=backup-1&volume=vol-1",
            "s3://bucket/",
            "vfs:///a%20b/c?volume=vol-1",
            "nfs://host:/export/x?nfsOptions=a%2Cb%3Dc",
            "azblob://c@core.windows.net/p",
        ] {
            assert_eq!(Url::parse(text).unwrap().to_string(), text);
        }
        let url = Url::parse("s3://bucket@region/p?volume=v1\\u0026backup=b-1").unwrap();
        assert_eq!(url.need_backup().unwrap(), ("v1", "b-1"));
        assert_eq!((url.user.as_deref(), &*url.host, &*url.path), (Some("bucket"), "region", "/p"));
        assert_eq!(url.store().with("v1", Some("b-1")), url);
    }

    #[test]
    fn what_is_no_url() {
        for text in [
            "",
            "x",
            "vfs:///a/../b",
            "vfs:///a%2e%2e/%zz",
            "vfs:///%2e%2e/x",
            "vfs:///a?volume=../x",
            "vfs:///a?volume=",
            "vfs:///a\n",
            "vfs:///a?x=%ff",
            "vfs:///a%00",
        ] {
            assert!(Url::parse(text).is_err(), "{text}");
        }
        assert!(Url::parse("vfs:///a").unwrap().need_volume().is_err());
        assert!(Url::parse("vfs:///a?volume=v1").unwrap().need_backup().is_err());
    }
}
