//! Filling a volume with another's snapshot.

use super::{ByReplica, CloneStatus, Engine, Failures, Listed, ReplicaLink, SyncOptions, each};
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::proto::controller::ReplicaMode;

/// What is cloned, and how.
#[derive(Debug, Clone)]
pub struct CloneOptions {
    /// Bare name of the snapshot.
    pub snapshot: String,
    /// Whether the source's backing image is part of it.
    pub export_backing_image: bool,
    /// How it is transferred.
    pub sync: SyncOptions,
}

impl Engine {
    /// Fills all replicas of this volume with a snapshot of another one, whose controller is `from`.
    /// Whatever the volume held is lost; its frontend must not be up. Returns when that is done.
    ///
    /// # Errors
    /// That the frontend is up, or a replica is not usable; what failed at which replica.
    pub async fn clone_from(&self, from: &Engine, options: &CloneOptions) -> Result<()> {
        let usable = |replica: &Listed| replica.mode == ReplicaMode::Rw;
        let source = from.replicas().await?.into_iter().find(usable).ok_or_else(|| {
            Error::not_found("cannot find a RW replica in the source volume for cloning")
        })?;
        // Longhorn's manager attaches a volume that is to be filled without a frontend.
        if self.volume_get().await?.frontend_state == "up" {
            return Err(Error::busy("volume frontend enabled, cannot perform snapshot clone"));
        }
        let replicas = self.replicas().await?;
        if let Some(other) = replicas.iter().find(|replica| !usable(replica)) {
            let Listed { address, mode } = other;
            let mode = mode.as_str_name();
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "cannot do snapshot clone because replica {address} in {mode} mode. All replicas \
                     in the target volume must be in RW mode"
                ),
            ));
        }
        let act = |_, link: ReplicaLink| {
            let CloneOptions { snapshot, export_backing_image, sync } = options.clone();
            let (source, volume) = (source.address.clone(), from.volume().to_owned());
            async move {
                link.clone_snapshot(&source, &volume, &snapshot, export_backing_image, &sync).await
            }
        };
        Failures::of(&replicas, each(&self.volume, &replicas, act).await).check()
    }

    /// How far replicas are with being filled from another volume.
    ///
    /// # Errors
    /// Those of the controller; a replica's are in its status.
    pub async fn clone_status(&self) -> Result<ByReplica<CloneStatus>> {
        let mut statuses = ByReplica::new();
        for replica in self.replicas().await? {
            let at = &replica.address;
            let status = replica.link(self)?.clone_status().await;
            let status = status.unwrap_or_else(|e| CloneStatus {
                error: format!("failed to get snapshot clone status of {at}: {e}"),
                ..Default::default()
            });
            statuses.insert(replica.address, status);
        }
        Ok(statuses)
    }
}
