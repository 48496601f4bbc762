//! Units as types: positions on the device and in a volume never mix, and sizes read like sizes.

use crate::error::{Error, Result};
use std::fmt;

/// Bytes in a sector, the alignment of client I/O.
pub const SECTOR_BYTES: u64 = 512;
/// Bytes in a block, the unit of mapping and of metadata I/O.
pub const BLOCK_BYTES: u64 = 4096;

macro_rules! index {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u32);

        impl $name {
            /// As an index into a table in memory.
            #[must_use]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

index! {
    /// Extent of the data region, counted from 0; from the data extents' count on, a spare entry.
    DeviceExtent,
    /// Extent of a volume's address space, counted from 0.
    VolumeExtent,
    /// Slot of the snapshot table plus one; 0 is "none". Heads are slots too.
    SnapshotId,
    /// Slot of the volume table plus one; 0 is "none".
    VolumeId,
}

impl SnapshotId {
    /// No snapshot: the parent of a root, the owner of a free extent.
    pub const NONE: Self = Self(0);

    /// Whether this names no snapshot.
    #[must_use]
    pub fn is_none(self) -> bool {
        self.0 == 0
    }
}

impl VolumeId {
    /// No volume: the owner of a hidden snapshot whose volume is gone.
    pub const NONE: Self = Self(0);

    /// Whether this names no volume.
    #[must_use]
    pub fn is_none(self) -> bool {
        self.0 == 0
    }
}

const SUFFIXES: [(&str, u32); 6] =
    [("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// Parses a size such as `10GiB`, `1.5TiB`, `64K`, `512` or `2g` into bytes. Suffixes are binary;
/// `KB`, `MB`, ... are refused because their meaning is ambiguous.
///
/// # Errors
/// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is no size or exceeds 2^63.
pub fn parse_size(text: &str) -> Result<u64> {
    let invalid = || {
        Error::invalid(format!(
            "`{text}` is not a size; write bytes or 64KiB, 100MiB, 10GiB, 1.5TiB"
        ))
    };
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, suffix) = trimmed.split_at(split);
    let suffix = suffix.trim().to_ascii_lowercase();
    let shift = if suffix.is_empty() || suffix == "b" {
        0
    } else {
        SUFFIXES
            .iter()
            .find(|(name, _)| {
                let name = name.to_ascii_lowercase();
                suffix == name || name.strip_suffix("ib") == Some(&suffix)
            })
            .ok_or_else(invalid)?
            .1
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.len() > 9 || (number.contains('.') && fraction.is_empty()) {
        return Err(invalid());
    }
    let unit = 1u128 << shift;
    let mut bytes = whole.parse::<u64>().map_err(|_| invalid())? as u128 * unit;
    if !fraction.is_empty() {
        let scale = 10u128.pow(fraction.len() as u32);
        let part = fraction.parse::<u128>().map_err(|_| invalid())? * unit;
        if !part.is_multiple_of(scale) && shift == 0 {
            return Err(invalid());
        }
        bytes += part / scale;
    }
    if bytes > 1 << 63 {
        return Err(invalid());
    }
    Ok(bytes as u64)
}

/// Nanoseconds since the Unix epoch as people read them: `2026-11-25T02:45:00Z`.
#[must_use]
pub fn format_time(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days are counted in cycles of 400 years, which begin in a March, so that leap days come last.
    let days = days + 719_468;
    let (cycle, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, later) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = 400 * cycle + year + later;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Formats bytes for people: `10.0 GiB`, `4.0 KiB`, `512 B`.
#[must_use]
pub fn format_size(bytes: u64) -> String {
    for (name, shift) in SUFFIXES {
        if bytes >> shift > 0 {
            return format!("{:.1} {name}", bytes as f64 / (1u64 << shift) as f64);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (1_700_000_000, "2023-11-14T22:13:20Z"),
        ] {
            assert_eq!(format_time(seconds * 1_000_000_000 + 999_999_999), text);
        }
        assert!(format_time(u64::MAX).starts_with("2554-"));
    }

    #[test]
    fn sizes_parse() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("4KiB", 4096),
            ("1.5MiB", 3 << 19),
            ("10GiB", 10 << 30),
            ("2 TiB", 2 << 40),
            ("1PiB", 1 << 50),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "GiB", "-1", "1.2.3", "1.", "10GB", "1e9", "99999999999EiB", "0x10", "1.5"]
        {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_format() {
        assert_eq!(format_size(0), "0 B");
        assert_eq!(format_size(4096), "4.0 KiB");
        assert_eq!(format_size(10 << 30), "10.0 GiB");
    }
}
