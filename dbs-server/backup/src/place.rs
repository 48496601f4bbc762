//! Where the backups of a volume are, as the label of the snapshot says it that was taken for the last one.

use dbs_backup::url::Url;
use dbs_core::info::SnapshotInfo;
use dbs_transfer::is_received;

/// The label of snapshots that are taken for backups: where their backups are.
pub(crate) const TAKEN_FOR: &str = "dbs-backup";

/// Where the backups of a volume are, in one spelling for each place; options say how to get there.
#[must_use]
pub fn place(url: &Url, volume: &str) -> String {
    let parts = url.path.split('/').filter(|part| !part.is_empty());
    let path = parts.map(|part| format!("/{part}")).collect();
    Url { path, options: Vec::new(), ..url.with(volume, None) }.to_string()
}

/// The same, of a snapshot's label, which earlier versions wrote as the URL was given.
#[must_use]
pub fn place_of(label: &str) -> Option<String> {
    let url = Url::parse(label).ok()?;
    Some(place(&url, url.volume.as_deref()?))
}

/// Where the backups are that this store took a snapshot for. A received one was taken by another store, whose backups
/// are not ours.
#[must_use]
pub fn taken_for(snapshot: &SnapshotInfo) -> Option<&str> {
    snapshot.labels.get(TAKEN_FOR).filter(|_| !is_received(snapshot)).map(String::as_str)
}
