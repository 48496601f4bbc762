//! Proving that what is encrypted is so throughout.

use super::Loader;
use crate::format::RegionKind;
use crate::meta::{Snapshot, Volume};
use crate::units::SnapshotId;

impl Loader {
    /// Proves that one chain has one key, or none: else what is encrypted would be shown as it lies there, or decrypted
    /// with another key, and so would what is not.
    pub(super) fn check_families(
        &mut self,
        volumes: &[Option<Volume>],
        snapshots: &[Option<Snapshot>],
    ) {
        let get =
            |id: SnapshotId| snapshots.get(id.index().wrapping_sub(1)).and_then(Option::as_ref);
        for (index, snapshot) in snapshots.iter().enumerate() {
            let Some(snapshot) = snapshot else { continue };
            let volume = volumes.get(snapshot.volume.index().wrapping_sub(1));
            let head = volume.and_then(Option::as_ref).and_then(|volume| get(volume.head));
            let differs = |other: &Snapshot| other.family != snapshot.family;
            let fault = if snapshot.encrypted() && !self.has_encrypted {
                "encrypted, which the superblock does not tell of: an older version would not know"
            } else if snapshot.encrypted() && snapshot.backed() {
                "a base that is encrypted: what is in its file is not"
            } else if get(snapshot.parent).is_some_and(differs) || head.is_some_and(differs) {
                "encrypted with another key than what it belongs to: what it shows is not known"
            } else {
                continue;
            };
            self.corrupt(RegionKind::Snapshots, Some(index as u32), fault);
        }
        for (index, volume) in volumes.iter().enumerate() {
            let Some(volume) = volume else { continue };
            let differs = |head: &Snapshot| !volume.key_slot.fits(&head.family);
            if get(volume.head).is_some_and(differs) {
                let text = "a key that is not that of its data: what it shows is not known";
                self.corrupt(RegionKind::Volumes, Some(index as u32), text);
            }
        }
    }
}
