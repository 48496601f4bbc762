//! Snapshots that commands take of a volume for themselves, under names and with labels that say so.

use crate::context::{Context, typed};
use crate::spec::SnapshotSpec;
use crate::target::Target;
use dbs_control::api::Request;
use dbs_core::Result;
use dbs_core::info::{Labels, SnapshotInfo};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// How the time of a snapshot is written in its name.
const TIME: &str = "%Y%m%dT%H%M%S.%3fZ";

/// When a snapshot of this name was taken by [`take`] for `what`.
pub fn taken_at(name: &str, what: &str) -> Option<Timestamp> {
    let time = name.strip_prefix(what)?.strip_prefix('-')?;
    let time = DateTime::strptime("%Y%m%dT%H%M%S.%fZ", time).ok()?;
    Some(time.to_zoned(TimeZone::UTC).ok()?.timestamp())
}

/// Takes one, called `WHAT-TIME`, with a label.
///
/// # Errors
/// Those of the store.
pub fn take(
    context: &Context,
    target: &Target,
    volume: &str,
    what: &str,
    (label, value): (&str, &str),
) -> Result<SnapshotSpec> {
    let request = Request::SnapshotCreate {
        volume: volume.to_owned(),
        snapshot: format!("{what}-{}", Timestamp::now().strftime(TIME)),
        labels: Labels::from([(label.to_owned(), value.to_owned())]),
        system: true,
        rebuilding: None,
    };
    let taken: SnapshotInfo = typed(target.call(context, &request)?)?;
    Ok(SnapshotSpec { volume: taken.volume, snapshot: taken.name })
}

/// Deletes one, also if the command was stopped.
///
/// # Errors
/// Those of the store.
pub fn remove(context: &Context, target: &Target, spec: &SnapshotSpec) -> Result<()> {
    let SnapshotSpec { volume, snapshot } = spec.clone();
    target.clean_up(context, &Request::SnapshotDelete { volume, snapshot, uuid: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_when_it_was_taken() {
        let now = Timestamp::now();
        let taken = taken_at(&format!("export-{}", now.strftime(TIME)), "export").unwrap();
        assert!((now - taken).total(jiff::Unit::Millisecond).unwrap() < 1.0, "{now} {taken}");
        for name in ["export-", "export-1", "backup-20200101T000000.000Z", "20200101T000000.000Z"] {
            assert_eq!(taken_at(name, "export"), None, "{name}");
        }
    }
}
