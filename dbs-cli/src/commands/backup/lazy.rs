//! `dbs backup restore --lazy`, and the end of it on an idle store.

use super::{Commands, open};
use crate::context::Context;
use crate::output;
use crate::target::Target;
use dbs_backup::url::Url;
use dbs_client::any_store::AnyStore;
use dbs_core::{Error, Result, Store};
use dbs_volume_backup::lazy::{self, BackupFile};
use dbs_volume_backup::{Pace, Wanted};

/// Makes a volume that rests on a backup.
pub fn begin(context: &Context, url: &Url, name: &str) -> Result<()> {
    let (volume, backup) = url.need_backup()?;
    let (begun, free) = context.with(true, |target| {
        let Some(store) = idle(target) else {
            return Err(Error::unsupported(
                "a volume that rests on a backup is made in an idle store: end the server of the store, make the volume, \
                 and start the server with --backing-backup",
            ));
        };
        let wanted = Wanted { volume, backup, name, resume: false };
        Ok((lazy::begin(store, wanted, url, &|| open(url))?, store.info().free))
    })?;
    let (made, held) = (begun.volume, begun.url);
    if begun.data > free {
        output::warn(&format!(
            "the backup has up to {} of data, and the store {} of room: enlarge it (`dbs grow`), or delete something, or the \
             volume will not stand alone",
            output::exact_size(begun.data),
            output::exact_size(free)
        ));
    }
    let mut value =
        serde_json::to_value(&made).map_err(|e| Error::io(e.into(), "encoding the result"))?;
    value["backing_backup"] = held.to_string().into();
    let text = format!(
        "made volume {name}, whose content comes from\n{held}\nServe the store with --backing-backup and this URL until all \
         of it has come; `dbs backup restore --resume` with this URL brings all of it now"
    );
    context.done(&value, &text)
}

/// Whether a restore that was begun in this way is to be ended, by who names this volume or none.
pub fn is_begun(target: &Target, url: &Url, wanted: Option<&str>) -> Result<bool> {
    let rests = target.access()?.volumes()?.into_iter().find(|volume| lazy::rests_on(volume, url));
    match (rests, wanted) {
        (Some(rests), Some(wanted)) => Ok(rests.name == wanted),
        (Some(_), None) => Ok(true),
        (None, Some(_)) => Ok(false),
        // Cut off right before the end, or the volume was deleted.
        (None, None) => idle(target)
            .map_or(Ok(false), |store| lazy::is_own(&store.info().uuid, url, &open(url)?)),
    }
}

/// Brings the rest of the backup into the store; returns the volume's name, if it is there.
pub fn finish(context: &Context, target: &Target, url: &Url, pace: Pace) -> Result<Option<String>> {
    let Some(store) = idle(target) else {
        return Err(Error::busy(
            "the server of the store brings the rest of this backup, if it was started with --backing-backup",
        ));
    };
    let file = BackupFile::open(url, open(url)?, 1)?;
    let host = Commands { context, target };
    let name = lazy::bring(&host, store, &file, &open(url)?, pace)?;
    drop(file);
    if let Err(error) = open(url).and_then(|backups| lazy::let_go(url, &backups)) {
        output::warn(&format!(
            "nothing needs {url} any more, and it is kept: {error}. Delete it with `dbs backup delete --held`"
        ));
    }
    // What the volume rested on is merged into it.
    target.settle(context)?;
    Ok(name)
}

fn idle(target: &Target) -> Option<&Store> {
    match target {
        Target::Live(AnyStore::Idle(store, _)) => Some(store),
        _ => None,
    }
}
