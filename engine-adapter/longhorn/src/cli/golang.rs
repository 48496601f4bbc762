//! How upstream's command line is written down: flags as Go programs take them, sizes as
//! `docker/go-units` reads them.

use clap::{Arg, ArgAction};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

/// Flags with one dash become flags with two. Nothing behind `--` is a flag.
pub fn double_dashes(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut flags = true;
    let convert = |arg: OsString| {
        flags &= arg != "--";
        match arg.as_bytes() {
            [b'-', first, _, ..] if flags && first.is_ascii_alphabetic() => {
                OsString::from_vec([b"-", arg.as_bytes()].concat())
            }
            _ => arg,
        }
    };
    args.into_iter().map(convert).collect()
}

/// The value of a boolean flag, as Go's `strconv.ParseBool` takes it.
///
/// # Errors
/// What it should have been.
pub fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("write true or false".to_owned()),
    }
}

/// Options of this type: `--name`, `--name=true` or `--name=false`.
pub(super) trait BooleanOption {
    /// With this default.
    fn boolean(self, default: &'static str) -> Self;
}

impl BooleanOption for Arg {
    fn boolean(self, default: &'static str) -> Self {
        self.action(ArgAction::Set)
            .value_name("BOOL")
            .value_parser(boolean)
            .default_value(default)
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
    }
}

/// Bytes: a number, or one with a unit such as `42kb`, `42MiB` or `1.5g`, all of which are powers
/// of 1024. An empty text is no size.
///
/// # Errors
/// What is wrong with it.
pub fn size(text: &str) -> Result<Option<u64>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let wrong = || format!("`{text}` is no size; write bytes, or 42kb, 42mb, 42gb");
    let unit_at = text.rfind(|c: char| c.is_ascii_digit() || c == '.').ok_or_else(wrong)? + 1;
    let (number, unit) = text.split_at(unit_at);
    let unit = unit.strip_prefix(' ').unwrap_or(unit).to_ascii_lowercase();
    let letter = match unit.as_str() {
        "" | "b" => None,
        other => other.strip_suffix("ib").or(other.strip_suffix('b')).or(Some(other)),
    };
    let shift = match letter {
        None => 0,
        Some("k") => 10,
        Some("m") => 20,
        Some("g") => 30,
        Some("t") => 40,
        Some("p") => 50,
        Some(_) => return Err(wrong()),
    };
    let scaled = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(1 << shift),
        // As upstream does; a fraction of a byte is dropped.
        Err(_) => {
            let number: f64 = number.parse().map_err(|_| wrong())?;
            let bytes = number * (1_u64 << shift) as f64;
            (0.0..9e18).contains(&bytes).then_some(bytes as u64)
        }
    };
    match scaled.filter(|bytes| i64::try_from(*bytes).is_ok()) {
        Some(bytes) => Ok(Some(bytes)),
        None => Err(format!("`{text}` is too large")),
    }
}

/// A time such as `1s`, `250ms` or `2m`; 0 needs no unit.
///
/// # Errors
/// What it should have been.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is no time; write 250ms, 1s or 2m");
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let millis = match unit {
        "ms" => Some(number),
        "s" => number.checked_mul(1000),
        "m" => number.checked_mul(60_000),
        "" if number == 0 => Some(0),
        _ => return Err(wrong()),
    };
    millis.map(Duration::from_millis).ok_or_else(wrong)
}

/// A URL without the quotes that scripts leave around it.
pub fn unquoted(url: &str) -> &str {
    url.trim_start_matches(['"', '\'']).trim_end_matches(['"', '\''])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_dash_or_two() {
        let args = ["longhorn", "-v", "-listen", ":1", "--size", "-5", "-x=y", "--", "-listen"];
        let converted = double_dashes(args.map(OsString::from));
        let expected =
            ["longhorn", "-v", "--listen", ":1", "--size", "-5", "--x=y", "--", "-listen"];
        assert_eq!(converted, expected.map(OsString::from));
    }

    #[test]
    fn sizes_are_read_as_upstream_reads_them() {
        for (text, bytes) in [
            ("0", 0),
            ("42", 42),
            ("42b", 42),
            ("42kb", 42 << 10),
            ("42K", 42 << 10),
            ("42 kb", 42 << 10),
            ("42mb", 42 << 20),
            ("42MiB", 42 << 20),
            ("1.5g", 3 << 29),
            ("42gb", 42 << 30),
            ("2tib", 2 << 40),
            ("1p", 1 << 50),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(size(text), Ok(Some(bytes)), "{text}");
        }
        assert_eq!(size(""), Ok(None));
        for text in ["x", "-1", "1x", "1kbb", "1bb", "1ib", "kb", "1kx", "9223372036854775808"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        for text in ["", "1", "s", "1h", "-1s", "18446744073709551615m"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
