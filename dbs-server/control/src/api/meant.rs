//! Which volume or snapshot a request means, where its name may be that of another one when it is carried out.

use super::Request;

impl Request {
    /// Has a request that takes content away, or says that it is complete, mean only the volume or snapshot with this
    /// uuid: `spec` is what was asked for by a name, which something else may have when the request comes to be carried
    /// out. Other requests, and requests of other names, stay as they are.
    pub fn mean(&mut self, spec: &str, uuid: &str) {
        if let Some((of, place)) = self.meant()
            && of == spec
        {
            *place = Some(uuid.to_owned());
        }
    }

    /// The same for a server of a version that knows names alone, and what its client has to compare before: name and
    /// uuid. `None` if it says no more than a name, or something that cannot be compared before.
    #[must_use]
    pub fn by_name(&self) -> Option<(Self, String, String)> {
        if matches!(self, Self::VolumeDelete { rebuilding: true, .. }) {
            return None;
        }
        let mut plain = self.clone();
        let (spec, uuid) = plain.meant()?;
        let uuid = uuid.take()?;
        Some((plain, spec, uuid))
    }

    /// What it names, and where it says which one of that name it means.
    fn meant(&mut self) -> Option<(String, &mut Option<String>)> {
        match self {
            Self::VolumeComplete { volume, uuid }
            | Self::VolumeResize { volume, uuid, .. }
            | Self::VolumeDelete { volume, uuid, .. } => Some((volume.clone(), uuid)),
            Self::SnapshotDelete { volume, snapshot, uuid }
            | Self::SnapshotRollback { volume, snapshot, uuid } => {
                Some((format!("{volume}@{snapshot}"), uuid))
            }
            _ => None,
        }
    }
}
