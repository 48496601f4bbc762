//! Backing up a volume or a snapshot.

use crate::place::{TAKEN_FOR, place, place_of, taken_for};
use crate::taken::{taken_at, taking};
use crate::volume::SnapshotSource;
use crate::{Host, Pace};
use dbs_backup::codec::Method;
use dbs_backup::config::Map;
use dbs_backup::{BackupStore, CreateOptions, Created};
use dbs_control::api::Request;
use dbs_core::info::SnapshotInfo;
use dbs_core::{Error, Result};

/// How the labels begin that a backup has from `dbs`.
const OWN_LABELS: &str = "dbs-";
/// The sizes of blocks that Longhorn's manager allows.
const BLOCK_SIZES: [u64; 2] = [2 << 20, 16 << 20];
/// How the names of snapshots begin that are taken for backups.
const TAKEN_AS: &str = "backup";

/// How to back up.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Name of the backup; by default a random one.
    pub name: Option<String>,
    /// Name of the volume in the backup store; by default its name in the store.
    pub to: Option<String>,
    /// Read everything, and write every block again.
    pub full: bool,
    /// How blocks are compressed.
    pub compression: Method,
    /// Size of blocks.
    pub block_size: Option<u64>,
    /// Labels of the backup.
    pub labels: Map,
}

impl Options {
    /// Refuses what no backup has.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check(&self) -> Result<()> {
        if self.block_size.is_some_and(|size| !BLOCK_SIZES.contains(&size)) {
            return Err(Error::invalid("a size of blocks is 2MiB or 16MiB"));
        }
        match self.labels.keys().find(|key| key.starts_with(OWN_LABELS)) {
            None => Ok(()),
            Some(key) => Err(Error::invalid(format!(
                "label `{key}`: labels that begin with `{OWN_LABELS}` are those of `dbs` itself"
            ))),
        }
    }

    /// What the volume is called in the backup store.
    fn name_there<'a>(&'a self, volume: &'a str) -> &'a str {
        self.to.as_deref().unwrap_or(volume)
    }
}

/// Backs up a snapshot of a volume; or, without its name, one that is taken for it, and deletes the one that was taken for
/// the backup before.
///
/// # Errors
/// `Invalid` for a name that the backup store cannot have; those of both stores.
pub fn create(
    host: &dyn Host,
    backups: &BackupStore,
    (volume, snapshot): (&str, Option<&str>),
    options: &Options,
    pace: Pace,
) -> Result<Created> {
    options.check()?;
    let there = options.name_there(volume);
    // Before a snapshot is taken.
    backups.check_name("volume", there).map_err(|error| {
        Error::invalid(format!("{error}. Give the volume another name there (--to)"))
    })?;
    let info = host.store()?.volume_info(volume);
    if info.is_ok_and(|info| info.encryption.is_some()) && !backups.is_encrypted() {
        host.warn(&format!(
            "volume {volume} is encrypted, and its backup is not: `dbs backup init --encrypt` makes a repository that encrypts"
        ));
    }
    match snapshot {
        Some(snapshot) => back_up(host, backups, (volume, snapshot), options, pace),
        None => take_and_back_up(host, backups, volume, options, pace),
    }
}

fn take_and_back_up(
    host: &dyn Host,
    backups: &BackupStore,
    volume: &str,
    options: &Options,
    pace: Pace,
) -> Result<Created> {
    let place = place(backups.url(), options.name_there(volume));
    let taken = host.call(&taking(volume, TAKEN_AS, (TAKEN_FOR, &place)))?;
    let taken = taken["name"].as_str().ok_or_else(|| {
        let what = std::io::Error::other("it names no snapshot");
        Error::io(what, "understanding the result")
    })?;
    let created = back_up(host, backups, (volume, taken), options, pace);
    // The next backup needs the difference to the snapshot of the last complete one, and to no other.
    let useless = |other: &SnapshotInfo| match &created {
        Ok(_) => other.name != taken,
        Err(_) => other.name == taken,
    };
    // What became of the backup is not hidden by what becomes of snapshots.
    let snapshots = host.store()?.snapshots(volume).unwrap_or_else(|error| {
        host.warn(&format!("snapshots that no backup needs are kept: {error}"));
        Vec::new()
    });
    let of_here = |label: &str| place_of(label).as_ref() == Some(&place);
    let labels: Vec<_> = snapshots.iter().filter_map(taken_for).collect();
    let is_first = created.is_ok() && labels.iter().filter(|l| of_here(l)).count() == 1;
    if let Some(other) = labels.iter().find(|l| is_first && !of_here(l)) {
        host.note(&format!(
            "this is the first backup of {volume} to {place}. Snapshots that were taken for backups to {other} stay, and take \
             space: delete them if you no longer back up to there"
        ));
    }
    for snapshot in snapshots {
        // One with another name is its user's.
        let is_ours = !snapshot.user_created && taken_at(&snapshot.name, TAKEN_AS).is_some();
        if is_ours && taken_for(&snapshot).is_some_and(of_here) && useless(&snapshot) {
            let (volume, snapshot) = (volume.to_owned(), snapshot.name);
            let spec = format!("{volume}@{snapshot}");
            let delete = Request::SnapshotDelete { volume, snapshot, uuid: None };
            if let Err(error) = host.clean_up(&delete) {
                host.warn(&format!("snapshot {spec} is kept: {error}"));
            }
        }
    }
    created
}

fn back_up(
    host: &dyn Host,
    backups: &BackupStore,
    (volume, snapshot): (&str, &str),
    options: &Options,
    pace: Pace,
) -> Result<Created> {
    let source = SnapshotSource::open(host.store()?, volume, snapshot)?;
    let mut labels = source.labels();
    labels.extend(options.labels.clone());
    let creation = backups.create(
        &source,
        CreateOptions {
            volume: options.name_there(volume).to_owned(),
            snapshot: snapshot.to_owned(),
            backup: options.name.clone(),
            method: options.compression,
            block_size: options.block_size,
            full: options.full,
            labels,
            ..CreateOptions::default()
        },
    )?;
    let mut meter = host.meter(&format!("backing up {volume}@{snapshot}"));
    creation.run(&mut pace.work(&mut *meter))
}
