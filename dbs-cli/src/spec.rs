//! `volume` and `volume@snapshot` on the command line.

use dbs_control::api::{MARKER, OWN_LABELS};
use dbs_core::{Error, OpenOptions, parse_size};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A volume or one of its snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Volume.
    pub volume: String,
    /// Its snapshot, if one is meant.
    pub snapshot: Option<String>,
}

/// A snapshot of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotSpec {
    /// Volume.
    pub volume: String,
    /// Snapshot.
    pub snapshot: String,
}

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (volume, snapshot) = match text.split_once('@') {
            None => (text, None),
            Some((volume, snapshot)) => (volume, Some(snapshot)),
        };
        let second = snapshot.is_some_and(|s| s.is_empty() || s.contains('@'));
        if volume.is_empty() || second {
            return Err("write VOLUME or VOLUME@SNAPSHOT".to_owned());
        }
        Ok(Self { volume: volume.to_owned(), snapshot: snapshot.map(str::to_owned) })
    }
}

impl FromStr for SnapshotSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(Spec { volume, snapshot: Some(snapshot) }) => Ok(Self { volume, snapshot }),
            _ => Err("write VOLUME@SNAPSHOT".to_owned()),
        }
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.volume)?;
        self.snapshot.iter().try_for_each(|snapshot| write!(f, "@{snapshot}"))
    }
}

impl fmt::Display for SnapshotSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.volume, self.snapshot)
    }
}

/// Refuses the name of the snapshot that marks a volume which is being received.
///
/// # Errors
/// `Invalid`.
pub fn check_new_snapshot(name: &str) -> dbs_core::Result<()> {
    if name == MARKER {
        return Err(Error::invalid(format!(
            "a snapshot `{MARKER}` marks a volume that is being received: choose another name"
        )));
    }
    Ok(())
}

/// A change of a label: `key=value` sets it, `key-` removes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LabelChange {
    /// Add or replace.
    Set(String, String),
    /// Remove.
    Remove(String),
}

impl FromStr for LabelChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text.split_once('='), text.strip_suffix('-')) {
            (Some((key, _)), _) if key.starts_with(OWN_LABELS) => Err(format!(
                "labels that begin with `{OWN_LABELS}` are those of `dbs` itself: choose another key"
            )),
            (Some((key, value)), _) if !key.is_empty() => Ok(Self::Set(key.into(), value.into())),
            (None, Some(key)) if !key.is_empty() => Ok(Self::Remove(key.into())),
            _ => Err("write KEY=VALUE to set a label, KEY- to remove it".to_owned()),
        }
    }
}

/// Parses `key=value`.
///
/// # Errors
/// What is wrong with it, for clap.
pub fn label(text: &str) -> Result<(String, String), String> {
    match text.parse() {
        Ok(LabelChange::Set(key, value)) => Ok((key, value)),
        _ => Err("write KEY=VALUE".to_owned()),
    }
}

/// Parses a size.
///
/// # Errors
/// What is wrong with it, for clap.
pub fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|e| e.to_string())
}

/// A limit of requests in a second; `none` is 0.
///
/// # Errors
/// What is wrong with it, for clap.
pub fn iops(text: &str) -> Result<u32, String> {
    match text.parse() {
        _ if text == "none" => Ok(0),
        Ok(iops) if iops > 0 => Ok(iops),
        _ => Err("write a number from 1 to 4294967295, or `none`".to_owned()),
    }
}

/// A limit of bytes in a second; `none` is 0.
///
/// # Errors
/// What is wrong with it, for clap.
pub fn bandwidth(text: &str) -> Result<u64, String> {
    match size(text) {
        _ if text == "none" => Ok(0),
        Ok(0) => Err("write a size such as 100MiB, or `none`".to_owned()),
        size => size,
    }
}

/// Parses the size of a cache of checksums.
///
/// # Errors
/// What is wrong with it, for clap.
pub fn checksum_cache(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    let options = OpenOptions { checksum_cache: Some(bytes), ..OpenOptions::default() };
    options.check_checksum_cache().map(|()| bytes).map_err(|e| e.to_string())
}

/// Parses a time such as `500ms`, `1s` or `2m`, from 1 ms to a day.
///
/// # Errors
/// What is wrong with it, for clap.
pub fn duration(text: &str) -> Result<Duration, String> {
    time(text)
        .filter(|time| time.as_millis() >= 1)
        .ok_or_else(|| "write a time such as 500ms, 1s or 2m".to_owned())
}

/// A time as short as microseconds, or `0`.
///
/// # Errors
/// What is wrong with it, for clap.
pub fn short_duration(text: &str) -> Result<Duration, String> {
    let time = if text == "0" { Some(Duration::ZERO) } else { time(text) };
    time.filter(|time| time.as_secs() < 1)
        .ok_or_else(|| "write a time below a second such as 50us or 1ms, or 0".to_owned())
}

/// For clap: a time up to a minute over which something is measured, or 0 for not at all.
pub fn interval(text: &str) -> Result<Duration, String> {
    let time = if text == "0" { Some(Duration::ZERO) } else { time(text) };
    time.filter(|time| time.as_secs() <= 60)
        .ok_or_else(|| "write a time up to a minute such as 200ms or 5s, or 0".to_owned())
}

fn time(text: &str) -> Option<Duration> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit_us = match unit {
        "us" => 1,
        "ms" => 1000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        _ => return None,
    };
    let us = number.parse::<u64>().ok()?.checked_mul(unit_us)?;
    (us <= 86_400_000_000).then(|| Duration::from_micros(us))
}

/// The mode of a socket: octal, and of reading and writing, which its owner may.
///
/// # Errors
/// What else it is.
pub fn socket_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| mode & !0o666 == 0 && mode & 0o600 == 0o600)
        .ok_or_else(|| format!("`{text}` is no mode of a socket; write it as 0600, 0660 or 0666"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::limits::SUMS_CACHE_BYTES;

    #[test]
    fn specs() {
        assert_eq!("a".parse(), Ok(Spec { volume: "a".into(), snapshot: None }));
        assert_eq!("a@b".parse::<SnapshotSpec>().unwrap().to_string(), "a@b");
        for text in ["", "@", "a@", "@b", "a@b@c"] {
            assert!(text.parse::<Spec>().is_err(), "{text}");
        }
        assert!("a".parse::<SnapshotSpec>().is_err());
    }

    #[test]
    fn labels() {
        assert_eq!("a=b=c".parse(), Ok(LabelChange::Set("a".into(), "b=c".into())));
        assert_eq!("a=".parse(), Ok(LabelChange::Set("a".into(), String::new())));
        assert_eq!("a-".parse(), Ok(LabelChange::Remove("a".into())));
        assert_eq!("a-b=c-".parse(), Ok(LabelChange::Set("a-b".into(), "c-".into())));
        for text in ["", "-", "=", "=b", "a"] {
            assert!(text.parse::<LabelChange>().is_err(), "{text}");
        }
    }

    #[test]
    fn caches_of_checksums() {
        assert_eq!(checksum_cache("64MiB"), Ok(SUMS_CACHE_BYTES), "the default");
        assert_eq!(checksum_cache("262144"), Ok(256 << 10));
        assert!(checksum_cache("255KiB").unwrap_err().contains("at least"));
        assert!(checksum_cache("-1").is_err() && checksum_cache("much").is_err());
    }

    #[test]
    fn durations() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for text in ["", "1", "s", "0s", "-1s", "1.5s", "25h", "99999999999999999999s"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
