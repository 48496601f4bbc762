//! Snapshots that commands take of a volume for themselves, under names and with labels that say so.

use crate::context::{Context, typed};
use crate::spec::SnapshotSpec;
use crate::target::Target;
use dbs_control::api::Request;
use dbs_core::Result;
use dbs_core::info::SnapshotInfo;
use dbs_volume_backup::taken::taking;

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
    let request = taking(volume, what, (label, value));
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
    use dbs_volume_backup::taken::{TIME, taken_at};
    use jiff::Timestamp;

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
