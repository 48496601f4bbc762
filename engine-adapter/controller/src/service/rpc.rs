//! `ptypes.ControllerService`: requests to calls of [`Control`], which block, off the runtime's
//! threads; errors to statuses.

use super::Control;
use dbs_core::Error;
use longhorn_wire::control::Identity;
use longhorn_wire::proto::controller::controller_service_server::{
    ControllerService, ControllerServiceServer, SERVICE_NAME as NAME,
};
use longhorn_wire::proto::controller::*;
use longhorn_wire::proto::ptypes::VersionOutput;
use std::sync::Arc;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status};

/// Full name of the service.
pub const SERVICE_NAME: &str = NAME;

/// The service of one controller.
#[derive(Clone)]
pub struct ControllerRpc {
    control: Arc<dyn Control>,
}

type Reply<T> = Result<Response<T>, Status>;
type Empty = ();

impl ControllerRpc {
    /// The service, for callers that mean this identity.
    #[must_use]
    pub fn server(
        control: Arc<dyn Control>,
        identity: Identity,
    ) -> InterceptedService<ControllerServiceServer<Self>, Identity> {
        ControllerServiceServer::with_interceptor(Self { control }, identity)
    }

    /// Does something where it may block.
    async fn call<T: Send + 'static>(
        &self,
        act: impl FnOnce(&dyn Control) -> Result<T, Status> + Send + 'static,
    ) -> Reply<T> {
        let control = Arc::clone(&self.control);
        let done = tokio::task::spawn_blocking(move || act(&*control)).await;
        let done =
            done.unwrap_or_else(|e| Err(Status::internal(format!("the call ended early: {e}"))));
        done.map(Response::new)
    }

    /// As [`Self::call`], and then says how the volume is.
    async fn change(
        &self,
        act: impl FnOnce(&dyn Control) -> dbs_core::Result<()> + Send + 'static,
    ) -> Reply<Volume> {
        self.call(|control| act(control).map(|()| control.volume()).map_err(failed)).await
    }

    /// As [`Self::call`], and then says how that replica is.
    async fn change_replica(
        &self,
        address: String,
        act: impl FnOnce(&dyn Control, &str) -> dbs_core::Result<()> + Send + 'static,
    ) -> Reply<ControllerReplica> {
        self.call(move |control| {
            act(control, &address).map_err(failed)?;
            replica(control, &address)
        })
        .await
    }
}

/// Callers go by the text.
fn failed(error: Error) -> Status {
    Status::unknown(error.to_string())
}

fn listed((address, mode): (String, ReplicaMode)) -> ControllerReplica {
    let address = ReplicaAddress { address, instance_name: String::new() };
    ControllerReplica { address: Some(address), mode: mode.into() }
}

fn replica(control: &dyn Control, address: &str) -> Result<ControllerReplica, Status> {
    let found = control.replicas().into_iter().find(|(known, _)| known == address);
    found.map(listed).ok_or_else(|| {
        let volume = control.volume().name;
        Status::not_found(format!(
            "cannot find the replica with address {address} in the controller server of volume \
             {volume}"
        ))
    })
}

/// The mode that a number in a request means.
fn mode(number: i32) -> Result<ReplicaMode, Status> {
    ReplicaMode::try_from(number)
        .map_err(|_| Status::invalid_argument(format!("{number} is no mode of a replica")))
}

#[tonic::async_trait]
impl ControllerService for ControllerRpc {
    async fn volume_get(&self, _: Request<Empty>) -> Reply<Volume> {
        self.change(|_| Ok(())).await
    }

    async fn volume_start(&self, request: Request<VolumeStartRequest>) -> Reply<Volume> {
        let VolumeStartRequest { replica_addresses, size, current_size } = request.into_inner();
        self.change(move |control| control.start(&replica_addresses, size, current_size)).await
    }

    async fn volume_shutdown(&self, _: Request<Empty>) -> Reply<Volume> {
        self.change(|control| control.shutdown()).await
    }

    async fn volume_snapshot(
        &self,
        request: Request<VolumeSnapshotRequest>,
    ) -> Reply<VolumeSnapshotReply> {
        let VolumeSnapshotRequest { name, labels, freeze_filesystem } = request.into_inner();
        self.call(move |control| {
            let name = control.snapshot(&name, labels, freeze_filesystem).map_err(failed)?;
            Ok(VolumeSnapshotReply { name })
        })
        .await
    }

    async fn volume_revert(&self, request: Request<VolumeRevertRequest>) -> Reply<Volume> {
        let name = request.into_inner().name;
        self.change(move |control| control.revert(&name)).await
    }

    async fn volume_expand(&self, request: Request<VolumeExpandRequest>) -> Reply<Volume> {
        let size = request.into_inner().size;
        self.change(move |control| control.expand(size)).await
    }

    async fn volume_frontend_start(
        &self,
        request: Request<VolumeFrontendStartRequest>,
    ) -> Reply<Volume> {
        let frontend = request.into_inner().frontend;
        self.change(move |control| control.start_frontend(&frontend)).await
    }

    async fn volume_frontend_shutdown(&self, _: Request<Empty>) -> Reply<Volume> {
        self.change(|control| control.shutdown_frontend()).await
    }

    async fn volume_unmap_mark_snap_chain_removed_set(
        &self,
        request: Request<VolumeUnmapMarkSnapChainRemovedSetRequest>,
    ) -> Reply<Volume> {
        let enabled = request.into_inner().enabled;
        self.change(move |control| control.set_unmap_mark(enabled)).await
    }

    async fn volume_snapshot_max_count_set(
        &self,
        request: Request<VolumeSnapshotMaxCountSetRequest>,
    ) -> Reply<Volume> {
        let count = request.into_inner().count;
        self.change(move |control| control.set_snapshot_max_count(count)).await
    }

    async fn volume_snapshot_max_size_set(
        &self,
        request: Request<VolumeSnapshotMaxSizeSetRequest>,
    ) -> Reply<Volume> {
        let size = request.into_inner().size;
        self.change(move |control| control.set_snapshot_max_size(size)).await
    }

    async fn volume_io(&self, _: Request<VolumeIoRequest>) -> Reply<VolumeIoReply> {
        Err(Status::unimplemented("I/O goes through the frontend of the volume"))
    }

    async fn replica_list(&self, _: Request<Empty>) -> Reply<ReplicaListReply> {
        self.call(|control| {
            let replicas = control.replicas().into_iter().map(listed).collect();
            Ok(ReplicaListReply { replicas })
        })
        .await
    }

    async fn replica_get(&self, request: Request<ReplicaAddress>) -> Reply<ControllerReplica> {
        self.change_replica(request.into_inner().address, |_, _| Ok(())).await
    }

    async fn controller_replica_create(
        &self,
        request: Request<ControllerReplicaCreateRequest>,
    ) -> Reply<ControllerReplica> {
        let request = request.into_inner();
        let (mode, snapshot) = (mode(request.mode)?, request.snapshot_required);
        self.change_replica(request.address, move |control, address| {
            control.create_replica(address, snapshot, mode)
        })
        .await
    }

    async fn replica_delete(&self, request: Request<ReplicaAddress>) -> Reply<Empty> {
        let address = request.into_inner().address;
        self.call(move |control| control.delete_replica(&address).map_err(failed)).await
    }

    async fn replica_update(
        &self,
        request: Request<ControllerReplica>,
    ) -> Reply<ControllerReplica> {
        let ControllerReplica { address, mode: number } = request.into_inner();
        let mode = mode(number)?;
        let address = address.ok_or_else(|| Status::invalid_argument("no replica is named"))?;
        self.change_replica(address.address, move |control, address| {
            control.update_replica(address, mode)
        })
        .await
    }

    async fn replica_prepare_rebuild(
        &self,
        request: Request<ReplicaAddress>,
    ) -> Reply<ReplicaPrepareRebuildReply> {
        let ReplicaAddress { address, instance_name } = request.into_inner();
        self.call(move |control| {
            let sync_file_info_list =
                control.prepare_rebuild(&address, &instance_name).map_err(failed)?;
            let replica = Some(replica(control, &address)?);
            Ok(ReplicaPrepareRebuildReply { replica, sync_file_info_list })
        })
        .await
    }

    async fn replica_verify_rebuild(
        &self,
        request: Request<ReplicaAddress>,
    ) -> Reply<ControllerReplica> {
        let ReplicaAddress { address, instance_name } = request.into_inner();
        self.change_replica(address, move |control, address| {
            control.verify_rebuild(address, &instance_name)
        })
        .await
    }

    async fn replica_rebuild_concurrent_sync_limit_set(
        &self,
        request: Request<ReplicaRebuildConcurrentSyncLimitSetRequest>,
    ) -> Reply<Empty> {
        let limit = request.into_inner().limit;
        self.call(move |control| control.set_sync_limit(limit).map_err(failed)).await
    }

    async fn replica_rebuild_concurrent_sync_limit_get(
        &self,
        _: Request<Empty>,
    ) -> Reply<ReplicaRebuildConcurrentSyncLimitGetReply> {
        self.call(|control| {
            Ok(ReplicaRebuildConcurrentSyncLimitGetReply { limit: control.sync_limit() })
        })
        .await
    }

    async fn journal_list(&self, request: Request<JournalListRequest>) -> Reply<Empty> {
        let limit = request.into_inner().limit;
        self.call(move |control| {
            control.journal(limit);
            Ok(())
        })
        .await
    }

    async fn version_detail_get(&self, _: Request<Empty>) -> Reply<VersionDetailGetReply> {
        Ok(Response::new(VersionDetailGetReply { version: Some(VersionOutput::ours()) }))
    }

    async fn metrics_get(&self, _: Request<Empty>) -> Reply<MetricsGetReply> {
        self.call(|control| Ok(MetricsGetReply { metrics: Some(control.metrics()) })).await
    }
}
