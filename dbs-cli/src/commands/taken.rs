//! Snapshots that commands take of a volume for themselves, under names and with labels that say so.

use crate::context::{Context, typed};
use crate::spec::SnapshotSpec;
use crate::target::Target;
use dbs_control::api::Request;
use dbs_core::Result;
use dbs_core::info::{Labels, SnapshotInfo};
use jiff::Timestamp;

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
        snapshot: format!("{what}-{}", Timestamp::now().strftime("%Y%m%dT%H%M%S.%3fZ")),
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
    target.clean_up(context, &Request::SnapshotDelete { volume, snapshot })
}
