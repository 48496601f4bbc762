//! `ptypes.ControllerService`: requests to calls of [`Controller`], which block, off the runtime's
//! threads; errors to statuses.

use crate::rules::Mode;
use crate::volume::{Controller, Member, signed};
use dbs_core::{Error, ErrorKind};
use longhorn_wire::control::Identity;
use longhorn_wire::proto::controller::controller_service_server::{
    ControllerService, ControllerServiceServer, SERVICE_NAME as NAME,
};
use longhorn_wire::proto::controller::*;
use longhorn_wire::proto::ptypes::{SyncFileInfo, VersionOutput};
use std::io::{self, Write};
use std::sync::Arc;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status};

/// Full name of the service.
pub const SERVICE_NAME: &str = NAME;

/// The service of one controller.
#[derive(Clone)]
pub struct ControllerRpc {
    controller: Arc<Controller>,
}

type Reply<T> = Result<Response<T>, Status>;
type Empty = ();

impl ControllerRpc {
    /// The service, for callers that mean this identity.
    #[must_use]
    pub fn server(
        controller: Arc<Controller>,
        identity: Identity,
    ) -> InterceptedService<ControllerServiceServer<Self>, Identity> {
        ControllerServiceServer::with_interceptor(Self { controller }, identity)
    }

    /// Does something where it may block.
    async fn call<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Arc<Controller>) -> Result<T, Status> + Send + 'static,
    ) -> Reply<T> {
        let controller = Arc::clone(&self.controller);
        let done = tokio::task::spawn_blocking(move || act(&controller)).await;
        let done =
            done.unwrap_or_else(|e| Err(Status::internal(format!("the call ended early: {e}"))));
        done.map(Response::new)
    }

    /// As [`Self::call`], and then says how the volume is.
    async fn change(
        &self,
        act: impl FnOnce(&Arc<Controller>) -> dbs_core::Result<()> + Send + 'static,
    ) -> Reply<Volume> {
        self.call(|controller| act(controller).map(|()| controller.volume()).map_err(failed)).await
    }

    /// As [`Self::call`], and then says how that replica is.
    async fn change_replica(
        &self,
        address: String,
        act: impl FnOnce(&Arc<Controller>, &str) -> dbs_core::Result<()> + Send + 'static,
    ) -> Reply<ControllerReplica> {
        self.call(move |controller| {
            act(controller, &address).map_err(failed)?;
            replica(controller, &address)
        })
        .await
    }
}

/// Callers go by the text.
fn failed(error: Error) -> Status {
    Status::unknown(error.to_string())
}

fn listed(member: Member) -> ControllerReplica {
    let mode = match member.mode {
        Mode::Wo => ReplicaMode::Wo,
        Mode::Rw => ReplicaMode::Rw,
        Mode::Err => ReplicaMode::Err,
    };
    let address = ReplicaAddress { address: member.target.address, instance_name: String::new() };
    ControllerReplica { address: Some(address), mode: mode.into() }
}

fn replica(controller: &Controller, address: &str) -> Result<ControllerReplica, Status> {
    controller.replica(address).map(listed).map_err(|error| Status::not_found(error.to_string()))
}

/// The mode that a number in a request means.
fn mode(number: i32) -> Result<Mode, Status> {
    match ReplicaMode::try_from(number) {
        Ok(ReplicaMode::Wo) => Ok(Mode::Wo),
        Ok(ReplicaMode::Rw) => Ok(Mode::Rw),
        Ok(ReplicaMode::Err) => Ok(Mode::Err),
        Err(_) => Err(Status::invalid_argument(format!("{number} is no mode of a replica"))),
    }
}

fn bytes(size: i64) -> dbs_core::Result<u64> {
    u64::try_from(size).map_err(|_| Error::invalid(format!("a size of {size} bytes")))
}

#[tonic::async_trait]
impl ControllerService for ControllerRpc {
    async fn volume_get(&self, _: Request<Empty>) -> Reply<Volume> {
        self.change(|_| Ok(())).await
    }

    async fn volume_start(&self, request: Request<VolumeStartRequest>) -> Reply<Volume> {
        let VolumeStartRequest { replica_addresses, size, current_size } = request.into_inner();
        self.change(move |controller| {
            let started = controller.start(&replica_addresses, bytes(size)?, bytes(current_size)?);
            started.map_err(|error| Error::new(ErrorKind::Io, error.to_string()))
        })
        .await
    }

    async fn volume_shutdown(&self, _: Request<Empty>) -> Reply<Volume> {
        self.change(|controller| controller.shutdown()).await
    }

    async fn volume_snapshot(
        &self,
        request: Request<VolumeSnapshotRequest>,
    ) -> Reply<VolumeSnapshotReply> {
        let VolumeSnapshotRequest { name, labels, freeze_filesystem } = request.into_inner();
        self.call(move |controller| {
            let name = controller.snapshot(&name, labels, freeze_filesystem).map_err(failed)?;
            Ok(VolumeSnapshotReply { name })
        })
        .await
    }

    async fn volume_revert(&self, request: Request<VolumeRevertRequest>) -> Reply<Volume> {
        let name = request.into_inner().name;
        self.change(move |controller| controller.revert(&name)).await
    }

    async fn volume_expand(&self, request: Request<VolumeExpandRequest>) -> Reply<Volume> {
        let size = request.into_inner().size;
        self.change(move |controller| controller.expand(bytes(size)?)).await
    }

    async fn volume_frontend_start(
        &self,
        request: Request<VolumeFrontendStartRequest>,
    ) -> Reply<Volume> {
        let frontend = request.into_inner().frontend;
        self.change(move |controller| controller.start_frontend(&frontend)).await
    }

    async fn volume_frontend_shutdown(&self, _: Request<Empty>) -> Reply<Volume> {
        self.change(|controller| controller.shutdown_frontend()).await
    }

    async fn volume_unmap_mark_snap_chain_removed_set(
        &self,
        request: Request<VolumeUnmapMarkSnapChainRemovedSetRequest>,
    ) -> Reply<Volume> {
        let enabled = request.into_inner().enabled;
        self.change(move |controller| controller.set_unmap_mark(enabled)).await
    }

    async fn volume_snapshot_max_count_set(
        &self,
        request: Request<VolumeSnapshotMaxCountSetRequest>,
    ) -> Reply<Volume> {
        let count = request.into_inner().count;
        self.change(move |controller| {
            let wrong = |_| Error::invalid(format!("a maximum of {count} snapshots"));
            controller.set_snapshot_max_count(u32::try_from(count).map_err(wrong)?)
        })
        .await
    }

    async fn volume_snapshot_max_size_set(
        &self,
        request: Request<VolumeSnapshotMaxSizeSetRequest>,
    ) -> Reply<Volume> {
        let size = request.into_inner().size;
        self.change(move |controller| controller.set_snapshot_max_size(bytes(size)?)).await
    }

    async fn volume_io(&self, _: Request<VolumeIoRequest>) -> Reply<VolumeIoReply> {
        Err(Status::unimplemented("I/O goes through the frontend of the volume"))
    }

    async fn replica_list(&self, _: Request<Empty>) -> Reply<ReplicaListReply> {
        self.call(|controller| {
            let replicas = controller.replicas().into_iter().map(listed).collect();
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
        self.change_replica(request.address, move |controller, address| {
            controller.create_replica(address, "", snapshot, mode)
        })
        .await
    }

    async fn replica_delete(&self, request: Request<ReplicaAddress>) -> Reply<Empty> {
        let address = request.into_inner().address;
        self.call(move |controller| controller.delete_replica(&address).map_err(failed)).await
    }

    async fn replica_update(
        &self,
        request: Request<ControllerReplica>,
    ) -> Reply<ControllerReplica> {
        let ControllerReplica { address, mode: number } = request.into_inner();
        let mode = mode(number)?;
        let address = address.ok_or_else(|| Status::invalid_argument("no replica is named"))?;
        self.call(move |controller| {
            let address = &address.address;
            replica(controller, address)?;
            controller.update_replica(address, mode).map_err(failed)?;
            replica(controller, address)
        })
        .await
    }

    async fn replica_prepare_rebuild(
        &self,
        request: Request<ReplicaAddress>,
    ) -> Reply<ReplicaPrepareRebuildReply> {
        let ReplicaAddress { address, instance_name } = request.into_inner();
        self.call(move |controller| {
            let files = controller.prepare_rebuild(&address, &instance_name).map_err(failed)?;
            let same = files.into_iter().map(|file| SyncFileInfo {
                from_file_name: file.name.clone(),
                to_file_name: file.name,
                actual_size: signed(file.size),
            });
            let sync_file_info_list = same.collect();
            let replica = Some(replica(controller, &address)?);
            Ok(ReplicaPrepareRebuildReply { replica, sync_file_info_list })
        })
        .await
    }

    async fn replica_verify_rebuild(
        &self,
        request: Request<ReplicaAddress>,
    ) -> Reply<ControllerReplica> {
        let ReplicaAddress { address, instance_name } = request.into_inner();
        self.change_replica(address, move |controller, address| {
            controller.verify_rebuild(address, &instance_name)
        })
        .await
    }

    async fn replica_rebuild_concurrent_sync_limit_set(
        &self,
        request: Request<ReplicaRebuildConcurrentSyncLimitSetRequest>,
    ) -> Reply<Empty> {
        let limit = request.into_inner().limit;
        self.call(move |controller| controller.set_sync_limit(limit).map_err(failed)).await
    }

    async fn replica_rebuild_concurrent_sync_limit_get(
        &self,
        _: Request<Empty>,
    ) -> Reply<ReplicaRebuildConcurrentSyncLimitGetReply> {
        self.call(|controller| {
            let limit = i32::try_from(controller.sync_limit()).unwrap_or(i32::MAX);
            Ok(ReplicaRebuildConcurrentSyncLimitGetReply { limit })
        })
        .await
    }

    /// On the standard output, where upstream's has it.
    async fn journal_list(&self, request: Request<JournalListRequest>) -> Reply<Empty> {
        let limit = request.into_inner().limit;
        self.call(move |controller| {
            let mut out = io::stdout().lock();
            // Where nobody reads it, nobody misses it.
            let _ = controller.journal(limit).iter().try_for_each(|entry| writeln!(out, "{entry}"));
            Ok(())
        })
        .await
    }

    async fn version_detail_get(&self, _: Request<Empty>) -> Reply<VersionDetailGetReply> {
        Ok(Response::new(VersionDetailGetReply { version: Some(VersionOutput::ours()) }))
    }

    async fn metrics_get(&self, _: Request<Empty>) -> Reply<MetricsGetReply> {
        self.call(|controller| Ok(MetricsGetReply { metrics: Some(controller.metrics()) })).await
    }
}
