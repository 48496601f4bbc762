//! Checksums of snapshots, by which replicas are compared.

use super::{ByReplica, Engine, Failures, HashStatus, Listed, each, mode_name};
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
                return Err(refuse(format!("{at} is in {} mode", mode_name(replica.mode))));
            }
            let link = replica.link(self)?;
            if link.get().await?.rebuilding {
                return Err(refuse(format!("{at} is rebuilding")));
            }
            if link.is_hashing().await? {
                return Err(refuse(format!("{at} is hashing snapshot")));
            }
        }
        let (engine, name) = (self.clone(), snapshot.to_owned());
        let act = move |replica: Listed| {
            let (engine, name) = (engine.clone(), name.clone());
            async move { replica.link(&engine)?.hash(&name, rehash).await }
        };
        all(&replicas, each(&replicas, act).await)
    }

    /// Ends that.
    ///
    /// # Errors
    /// What failed at which replica.
    pub async fn hash_cancel(&self, snapshot: &str) -> Result<()> {
        let replicas = self.replicas().await?;
        let (engine, name) = (self.clone(), snapshot.to_owned());
        let act = move |replica: Listed| {
            let (engine, name) = (engine.clone(), name.clone());
            async move { replica.link(&engine)?.hash_cancel(&name).await }
        };
        all(&replicas, each(&replicas, act).await)
    }

    /// The checksums, and how far they are.
    ///
    /// # Errors
    /// Those of the controller; a replica's are in its status.
    pub async fn hash_status(&self, snapshot: &str) -> Result<ByReplica<HashStatus>> {
        let replicas = self.replicas().await?;
        let (engine, name) = (self.clone(), snapshot.to_owned());
        let act = move |replica: Listed| {
            let (engine, name) = (engine.clone(), name.clone());
            async move { status(&engine, &replica, &name).await }
        };
        let mut statuses = ByReplica::new();
        for (replica, status) in replicas.iter().zip(each(&replicas, act).await) {
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

async fn status(engine: &Engine, replica: &Listed, snapshot: &str) -> Result<HashStatus> {
    let at = &replica.address;
    if replica.mode != ReplicaMode::Rw {
        let mode = mode_name(replica.mode);
        let text = format!("replica {at} since it is in {mode} mode");
        return Err(Error::new(ErrorKind::Busy, text));
    }
    let link = replica.link(engine)?;
    let state = link.get().await;
    let state =
        state.map_err(|e| e.context(format!("cannot get snapshot hashing status of {at}")))?;
    if state.rebuilding {
        return Err(Error::new(ErrorKind::Busy, format!("replica {at} is rebuilding")));
    }
    let status = link.hash_status(snapshot).await;
    status.map_err(|e| e.context(format!("failed to get snapshot hashing status of {at}")))
}

fn all(replicas: &[Listed], results: Vec<Result<()>>) -> Result<()> {
    let mut failures = Failures::default();
    for (replica, result) in replicas.iter().zip(results) {
        if let Err(e) = result {
            failures.add(replica, e);
        }
    }
    failures.check()
}
