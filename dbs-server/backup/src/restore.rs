//! Making a volume of a backup.

use crate::volume::Filled;
use crate::{Host, Pace};
use dbs_backup::{BackupStore, Onto, Restored};
use dbs_control::api::Request;
use dbs_core::{Error, ErrorKind, Result};

/// What to restore, and as what.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// The volume in the backup store.
    pub volume: &'a str,
    /// Its backup.
    pub backup: &'a str,
    /// The volume that is made, or filled further.
    pub name: &'a str,
    /// Go on with a restore that was cut off.
    pub resume: bool,
}

/// Makes a volume of a backup. Until everything is restored, it is incomplete: no client can open it.
///
/// # Errors
/// `Exists` if there is such a volume; `Corrupt` if a block cannot be read; those of both stores.
pub fn restore(
    host: &dyn Host,
    backups: &BackupStore,
    wanted: Wanted<'_>,
    pace: Pace,
) -> Result<Restored> {
    let hint = "go on with `dbs backup restore --resume`, or delete it";
    let (restored, uuid, filled) = fill(host, backups, wanted, pace, (hint, None))?;
    let complete = Request::VolumeComplete { volume: wanted.name.to_owned(), uuid: Some(uuid) };
    host.call(&complete)?;
    // Open until it is complete: nobody else fills it in between.
    drop(filled);
    Ok(restored)
}

/// Makes a volume, or finds the one that is to be filled further, and fills it. It is incomplete, and what is returned
/// keeps others from filling it.
///
/// # Errors
/// As [`restore`]; `hint` says what to do then. If clients read the `content` meanwhile (see `BackupConfig::content`), it is
/// that which is brought, as far as it can be read: blocks that are damaged hold up no others.
pub(crate) fn fill(
    host: &dyn Host,
    backups: &BackupStore,
    wanted: Wanted<'_>,
    pace: Pace,
    (hint, content): (&str, Option<&str>),
) -> Result<(Restored, String, Filled)> {
    let name = wanted.name;
    let mut restoration = backups.restore(wanted.volume, wanted.backup)?;
    if let Some(content) = content {
        if restoration.backup().content() != content {
            return Err(Error::corrupt(format!(
                "backup {} in the backup store is not any more what clients read: somebody has replaced it",
                wanted.backup
            )));
        }
        restoration = restoration.past_damage();
    }
    let size = restoration.backup().volume_size(restoration.volume())?;
    let (onto, uuid) = prepare(host, wanted, size)?;
    let filled = Filled::open(host.store()?, name)?;
    host.check_same(name, &uuid)?;
    let mut meter = host.meter(&format!("restoring {name}"));
    let restored =
        restoration.run(&filled, onto, &mut pace.work(&mut *meter)).map_err(|error| {
            let text = format!("volume {name} is incomplete: {hint}");
            match error.kind() {
                // The backup is there, and is damaged.
                ErrorKind::NotFound => Error::corrupt(format!("{text}: {error}")),
                _ => error.context(text),
            }
        })?;
    drop(meter);
    host.check_same(name, &uuid)?;
    Ok((restored, uuid, filled))
}

/// Makes the volume, or finds the one that is to be filled further; and its identity.
fn prepare(
    host: &dyn Host,
    Wanted { name, resume, .. }: Wanted<'_>,
    size: u64,
) -> Result<(Onto<'static>, String)> {
    if resume {
        let there = host.store()?.volume_info(name)?;
        if !there.rebuilding || there.snapshots > 0 || there.size != size {
            return Err(Error::invalid(format!(
                "volume {name} is not what a restore of this backup has left: restore to another name"
            )));
        }
        return Ok((Onto::Anything, there.uuid));
    }
    let create = Request::VolumeCreate { volume: name.to_owned(), size, rebuilding: true };
    let made = host.call(&create).map_err(|error| match error.kind() {
        ErrorKind::Exists => error
            .context("name another volume, or go on with a restore that was cut off with --resume"),
        _ => error,
    })?;
    let uuid = made["uuid"].as_str().ok_or_else(|| {
        let what = std::io::Error::other("the volume has no identity");
        Error::io(what, "understanding the result")
    })?;
    Ok((Onto::Empty, uuid.to_owned()))
}
