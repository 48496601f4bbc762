//! Checksums of snapshots, by which replicas are compared.

use super::{ByReplica, Engine, Failures, HashStatus, Listed, ReplicaLink, each};
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::proto::controller::ReplicaMode;

const REFUSED: &str = "cannot request hashing snapshot";

impl Engine {
    /// Begins to compute a snapshot's checksum on all replicas; even if there is one with `rehash`.
    ///
    /// # Errors
    /// That a replica is not usable, or its machine is computing one; what failed at which replica.
    pub async fn hash(&self, snapshot: &str, rehash: bool) -> Result<()> {
        let replicas = self.replicas().await?;
        for replica in &replicas {
            let at = &replica.address;
            let refuse =
                |why: String| Error::new(ErrorKind::Busy, format!("{REFUSED} because {why}"));
            if replica.mode != ReplicaMode::Rw {
                return Err(refuse(format!("{at} is in {} mode", replica.mode.as_str_name())));
            }
            let link = replica.link(self)?;
            if link.get().await?.rebuilding {
                return Err(refuse(format!("{at} is rebuilding")));
            }
            if link.is_hashing().await? {
                return Err(refuse(format!("{at} is hashing snapshot")));
            }
        }
        let act = |_, link: ReplicaLink| {
            let name = snapshot.to_owned();
            async move { link.hash(&name, rehash).await }
        };
        Failures::of(&replicas, each(&self.volume, &replicas, act).await).check()
    }

    /// Ends that.
    ///
    /// # Errors
    /// What failed at which replica.
    pub async fn hash_cancel(&self, snapshot: &str) -> Result<()> {
        let replicas = self.replicas().await?;
        let act = |_, link: ReplicaLink| {
            let name = snapshot.to_owned();
            async move { link.hash_cancel(&name).await }
        };
        Failures::of(&replicas, each(&self.volume, &replicas, act).await).check()
    }

    /// The checksums, and how far they are.
    ///
    /// # Errors
    /// Those of the controller; a replica's are in its status.
    pub async fn hash_status(&self, snapshot: &str) -> Result<ByReplica<HashStatus>> {
        let replicas = self.replicas().await?;
        let act = |replica, link| {
            let name = snapshot.to_owned();
            async move { status(&replica, &link, &name).await }
        };
        let mut statuses = ByReplica::new();
        for (replica, status) in replicas.iter().zip(each(&self.volume, &replicas, act).await) {
            let status = status.unwrap_or_else(|e| HashStatus {
                state: "error".to_owned(),
                error: e.to_string(),
                ..Default::default()
            });
            statuses.insert(replica.address.clone(), status);
        }
        Ok(statuses)
    }
}

async fn status(replica: &Listed, link: &ReplicaLink, snapshot: &str) -> Result<HashStatus> {
    let at = &replica.address;
    if replica.mode != ReplicaMode::Rw {
        let mode = replica.mode.as_str_name();
        let text = format!("replica {at} since it is in {mode} mode");
        return Err(Error::new(ErrorKind::Busy, text));
    }
    let state = link.get().await;
    let state =
        state.map_err(|e| e.context(format!("cannot get snapshot hashing status of {at}")))?;
    if state.rebuilding {
        return Err(Error::new(ErrorKind::Busy, format!("replica {at} is rebuilding")));
    }
    let status = link.hash_status(snapshot).await;
    status.map_err(|e| e.context(format!("failed to get snapshot hashing status of {at}")))
}
