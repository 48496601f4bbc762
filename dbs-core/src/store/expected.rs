//! What a command that takes content away expects of what it names: names are used again.

use super::identity::uuid_text;
use crate::error::{Error, Result};
use crate::meta::Meta;
use crate::units::{SnapshotId, VolumeId};

/// What a command expects of the volume or snapshot that it names. It is compared in the step that carries the command
/// out: whoever looks first, and asks somebody perhaps, cannot know what has the name by then.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Expected {
    /// Its uuid.
    pub uuid: Option<[u8; 16]>,
    /// The volume is being filled, or was being filled by something that has ended: nobody was told that it is complete.
    pub rebuilding: bool,
}

impl Expected {
    /// Refuses a volume that is another one.
    pub(super) fn check_volume(&self, meta: &Meta, id: VolumeId) -> Result<()> {
        let volume = meta.volume(id);
        self.check_uuid(&volume.uuid, || volume.name.clone())?;
        if self.rebuilding && !meta.is_rebuilding(id) {
            return Err(Error::exists(format!("volume `{}` is complete by now", volume.name)));
        }
        Ok(())
    }

    /// Refuses a snapshot that is another one.
    pub(super) fn check_snapshot(
        &self,
        meta: &Meta,
        volume: VolumeId,
        id: SnapshotId,
    ) -> Result<()> {
        let snapshot = meta.snapshot(id);
        let spec = || format!("{}@{}", meta.volume(volume).name, snapshot.name);
        self.check_uuid(&snapshot.uuid, spec)
    }

    fn check_uuid(&self, now: &[u8; 16], spec: impl FnOnce() -> String) -> Result<()> {
        match self.uuid {
            Some(uuid) if uuid != *now => Err(Error::not_found(format!(
                "`{}` was deleted or renamed, and something else has the name now (uuid {}, not {}); look it up again",
                spec(),
                uuid_text(now),
                uuid_text(&uuid)
            ))),
            _ => Ok(()),
        }
    }
}
