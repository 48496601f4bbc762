//! `ptypes.SyncAgentService`: requests to calls of [`Agent`], errors to statuses.

use super::Agent;
use super::peer::layer::is_damage;
use super::send::blocking;
use longhorn_wire::control::{Identity, is_refusal};
use longhorn_wire::names;
use longhorn_wire::proto::ptypes::sync_agent_service_server::{
    SyncAgentService, SyncAgentServiceServer,
};
use longhorn_wire::proto::ptypes::*;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status};

/// The service of one agent.
#[derive(Clone)]
pub struct AgentRpc {
    agent: Arc<Agent>,
}

type Reply<T> = Result<Response<T>, Status>;

impl AgentRpc {
    /// The service, for callers that mean this identity.
    #[must_use]
    pub fn server(
        agent: Arc<Agent>,
        identity: Identity,
    ) -> InterceptedService<SyncAgentServiceServer<Self>, Identity> {
        SyncAgentServiceServer::with_interceptor(Self { agent }, identity)
    }

    /// Does something with the agent where it may block.
    async fn call<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Arc<Agent>) -> dbs_core::Result<T> + Send + 'static,
    ) -> Reply<T> {
        let agent = Arc::clone(&self.agent);
        answer(blocking(move || act(&agent)).await)
    }
}

/// Upstream's callers go by the text, and by `Unavailable`, which none of these is; its manager also by
/// the `FailedPrecondition` of a replica that another one was to be asked for; ours also by `DataLoss`.
fn answer<T>(outcome: dbs_core::Result<T>) -> Reply<T> {
    outcome.map(Response::new).map_err(|error| {
        let text = error.to_string();
        if is_damage(&error) {
            Status::data_loss(text)
        } else if is_refusal(&text) {
            Status::failed_precondition(text)
        } else {
            Status::unknown(text)
        }
    })
}

fn named(snapshot: &str) -> Result<(), Status> {
    match snapshot {
        "" => Err(Status::unknown("snapshot name is required")),
        _ => Ok(()),
    }
}

#[tonic::async_trait]
impl SyncAgentService for AgentRpc {
    async fn file_remove(&self, request: Request<FileRemoveRequest>) -> Reply<()> {
        let name = request.into_inner().file_name;
        self.call(move |agent| agent.file_remove(&name)).await
    }

    async fn file_rename(&self, request: Request<FileRenameRequest>) -> Reply<()> {
        let FileRenameRequest { old_file_name, new_file_name } = request.into_inner();
        self.call(move |agent| agent.file_rename(&old_file_name, &new_file_name)).await
    }

    async fn file_send(&self, request: Request<FileSendRequest>) -> Reply<()> {
        answer(self.agent.file_send(request.into_inner()).await)
    }

    async fn files_sync(&self, request: Request<FilesSyncRequest>) -> Reply<()> {
        answer(self.agent.files_sync(request.into_inner()).await)
    }

    async fn volume_export(&self, request: Request<VolumeExportRequest>) -> Reply<()> {
        answer(self.agent.volume_export(request.into_inner()).await)
    }

    async fn receiver_launch(
        &self,
        request: Request<ReceiverLaunchRequest>,
    ) -> Reply<ReceiverLaunchResponse> {
        let name = request.into_inner().to_file_name;
        let (traffic, passed) = (Arc::clone(&self.agent.totals), Arc::<AtomicU64>::default());
        let receiver = self.agent.receiver(&name, traffic, passed).await;
        answer(receiver.map(|receiver| {
            let port = receiver.port.into();
            receiver.detach(name);
            ReceiverLaunchResponse { port }
        }))
    }

    async fn backup_create(
        &self,
        request: Request<BackupCreateRequest>,
    ) -> Reply<BackupCreateResponse> {
        answer(self.agent.backup_create(request.into_inner()).await)
    }

    async fn backup_status(
        &self,
        request: Request<BackupStatusRequest>,
    ) -> Reply<BackupStatusResponse> {
        answer(self.agent.backups.status(&request.into_inner().backup))
    }

    async fn backup_remove(&self, request: Request<BackupRemoveRequest>) -> Reply<()> {
        answer(self.agent.backup_remove(request.into_inner()).await)
    }

    async fn backup_restore(&self, request: Request<BackupRestoreRequest>) -> Reply<()> {
        answer(self.agent.backup_restore(request.into_inner()).await)
    }

    async fn reset(&self, _: Request<()>) -> Reply<()> {
        answer(self.agent.restores.reset())?;
        self.agent.jobs.reset();
        self.agent.hashes.reset();
        self.agent.backups.reset();
        Ok(Response::new(()))
    }

    async fn restore_status(&self, _: Request<()>) -> Reply<RestoreStatusResponse> {
        Ok(Response::new(self.agent.restores.status()))
    }

    async fn snapshot_purge(&self, _: Request<()>) -> Reply<()> {
        let agent = Arc::clone(&self.agent);
        self.call(move |_| {
            let job = agent.begin_purge()?;
            tokio::task::spawn_blocking(move || agent.purge(job));
            Ok(())
        })
        .await
    }

    async fn snapshot_purge_status(&self, _: Request<()>) -> Reply<SnapshotPurgeStatusResponse> {
        Ok(Response::new(self.agent.jobs.purge()))
    }

    async fn replica_rebuild_status(&self, _: Request<()>) -> Reply<ReplicaRebuildStatusResponse> {
        Ok(Response::new(self.agent.jobs.rebuild()))
    }

    async fn snapshot_clone(&self, request: Request<SnapshotCloneRequest>) -> Reply<()> {
        answer(self.agent.snapshot_clone(request.into_inner()).await)
    }

    async fn snapshot_clone_status(&self, _: Request<()>) -> Reply<SnapshotCloneStatusResponse> {
        Ok(Response::new(self.agent.jobs.clone_status()))
    }

    async fn snapshot_hash(&self, request: Request<SnapshotHashRequest>) -> Reply<()> {
        let SnapshotHashRequest { snapshot_name, rehash } = request.into_inner();
        named(&snapshot_name)?;
        self.agent.begin_hash(&snapshot_name, rehash);
        Ok(Response::new(()))
    }

    async fn snapshot_hash_status(
        &self,
        request: Request<SnapshotHashStatusRequest>,
    ) -> Reply<SnapshotHashStatusResponse> {
        let name = request.into_inner().snapshot_name;
        self.call(move |agent| {
            let stamp = || agent.shelf.layer_stamp(&names::snapshot_disk(&name));
            Ok(agent.hashes.status(&name, stamp))
        })
        .await
    }

    async fn snapshot_hash_cancel(&self, request: Request<SnapshotHashCancelRequest>) -> Reply<()> {
        let name = request.into_inner().snapshot_name;
        named(&name)?;
        self.agent.hashes.cancel(&name);
        Ok(Response::new(()))
    }

    async fn snapshot_hash_lock_state(
        &self,
        _: Request<()>,
    ) -> Reply<SnapshotHashLockStateResponse> {
        let locked = self.call(|agent| agent.hashes.is_locked()).await?;
        let is_locked = locked.into_inner();
        Ok(Response::new(SnapshotHashLockStateResponse { is_locked }))
    }
}
