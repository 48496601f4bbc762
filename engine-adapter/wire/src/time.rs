//! Times as upstream writes them: RFC 3339, UTC, whole seconds.

use jiff::Timestamp;
use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds since the Unix epoch, now.
#[must_use]
pub fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// A time as text; the epoch stands for an unknown one, which has none.
#[must_use]
pub fn text(ns: u64) -> String {
    match i64::try_from(ns / 1_000_000_000).map(Timestamp::from_second) {
        Ok(Ok(time)) if ns > 0 => time.to_string(),
        _ => String::new(),
    }
}

/// What a text says, if it is RFC 3339 (a missing zone is taken for UTC) and not before the epoch.
#[must_use]
pub fn parse(text: &str) -> Option<u64> {
    let time = text.parse::<Timestamp>().or_else(|_| format!("{text}Z").parse()).ok()?;
    u64::try_from(time.as_nanosecond()).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn whole_seconds_in_utc_come_back_as_they_were() {
        for time in ["2026-08-21T10:00:00Z", "1970-01-01T00:00:01Z", "2262-01-01T00:00:00Z"] {
            assert_eq!(text(parse(time).unwrap()), time);
        }
        assert_eq!(text(parse("2026-08-21T12:00:00.5+02:00").unwrap()), "2026-08-21T10:00:00Z");
        assert_eq!(parse("2026-08-21T10:00:00.25"), Some(1_787_306_400_250_000_000));
        for bad in ["", "now", "1969-12-31T23:59:59Z", "2026-13-01T00:00:00Z", "0"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(text(0), "");
        assert!(text(u64::MAX).starts_with("2554"));
    }
}
