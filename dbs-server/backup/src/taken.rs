//! Snapshots that are taken of a volume for an operation, under names and with labels that say so.

use dbs_control::api::Request;
use dbs_core::info::Labels;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// How the time of a snapshot is written in its name.
pub const TIME: &str = "%Y%m%dT%H%M%S.%3fZ";

/// When a snapshot of this name was taken for `what`.
#[must_use]
pub fn taken_at(name: &str, what: &str) -> Option<Timestamp> {
    let time = name.strip_prefix(what)?.strip_prefix('-')?;
    let time = DateTime::strptime("%Y%m%dT%H%M%S.%fZ", time).ok()?;
    Some(time.to_zoned(TimeZone::UTC).ok()?.timestamp())
}

/// Takes one, called `WHAT-TIME`, with a label.
#[must_use]
pub fn taking(volume: &str, what: &str, (label, value): (&str, &str)) -> Request {
    Request::SnapshotCreate {
        volume: volume.to_owned(),
        snapshot: format!("{what}-{}", Timestamp::now().strftime(TIME)),
        labels: Labels::from([(label.to_owned(), value.to_owned())]),
        system: true,
        rebuilding: None,
    }
}
