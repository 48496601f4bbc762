//! What may not be done to a replica's volume behind its back: its engine keeps all replicas of a
//! volume alike, and knows nothing of our commands.

use dbs_control::api::Request;
use dbs_core::{Error, ErrorKind, Result};

/// Refuses a command that changes a volume for which `served` holds.
///
/// # Errors
/// `Busy` with the way out.
pub fn check(request: &Request, served: &dyn Fn(&str) -> bool) -> Result<()> {
    let Some(volume) = changed(request).filter(|volume| served(volume)) else { return Ok(()) };
    Err(Error::new(
        ErrorKind::Busy,
        format!(
            "`{volume}` is the volume of a Longhorn replica that is being served: change it \
             through its engine, or stop the replica first"
        ),
    ))
}

/// The volume that a command changes, or makes another depend on.
#[must_use]
pub fn changed(request: &Request) -> Option<&str> {
    use Request as R;
    match request {
        R::VolumeRename { volume, .. }
        | R::VolumeResize { volume, .. }
        | R::VolumeSet { volume, .. }
        | R::VolumeLock { volume }
        | R::VolumeRekey { volume, .. }
        | R::VolumeDelete { volume, .. }
        | R::VolumeComplete { volume, .. }
        | R::VolumeClone { volume, .. }
        | R::VolumeFlatten { volume }
        | R::VolumeRelease { volume, .. }
        | R::VolumeCompress { volume, .. }
        | R::SnapshotCreate { volume, .. }
        | R::SnapshotRename { volume, .. }
        | R::SnapshotDelete { volume, .. }
        | R::SnapshotRollback { volume, .. }
        | R::SnapshotProtect { volume, .. }
        | R::SnapshotUnprotect { volume, .. }
        | R::SnapshotLabel { volume, .. }
        | R::DeviceAttach { volume, snapshot: None, read_only: false, .. } => Some(volume),
        R::Info
        | R::Grow { .. }
        | R::Vacuum { .. }
        | R::Check
        | R::Scrub { .. }
        | R::Dump
        | R::Flush
        | R::Work { .. }
        | R::SpaceMap { .. }
        | R::SpaceOwners { .. }
        | R::VolumeList { .. }
        | R::VolumeShow { .. }
        | R::VolumeCreate { .. }
        | R::VolumeCreateEncrypted { .. }
        | R::VolumeCreateWrapped { .. }
        | R::VolumeWrappedKey { .. }
        | R::VolumeUnlock { .. }
        | R::VolumeChildren { .. }
        | R::VolumeDu { .. }
        | R::VolumeMap { .. }
        | R::VolumeDiff { .. }
        | R::VolumeTrim
        | R::SnapshotList { .. }
        | R::SnapshotShow { .. }
        | R::DeviceAttach { .. }
        | R::DeviceDetach { .. }
        | R::DeviceList
        | R::ClientList { .. }
        | R::Top
        | R::ClientKick { .. } => None,
    }
}

/// The volume that a command gives a name, beside the one that it changes.
#[must_use]
pub fn made(request: &Request) -> Option<&str> {
    match request {
        Request::VolumeRename { new, .. } | Request::VolumeClone { new, .. } => Some(new),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_of_served_volumes_are_refused() {
        let volume = || "v".to_owned();
        let delete =
            Request::SnapshotDelete { volume: volume(), snapshot: "s".to_owned(), uuid: None };
        let refused = check(&delete, &|name| name == "v").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy);
        check(&delete, &|_| false).unwrap();
        check(&Request::VolumeShow { volume: volume(), usage: true }, &|_| true).unwrap();
        check(&Request::Vacuum { keep: None }, &|_| true).unwrap();
    }
}
