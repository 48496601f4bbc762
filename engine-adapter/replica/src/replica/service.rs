//! `ptypes.ReplicaService`: requests to calls of [`Replica`], which block, off the runtime's
//! threads; errors to statuses.

use super::Replica;
use dbs_core::{Error, ErrorKind};
use longhorn_wire::control::Identity;
use longhorn_wire::control::expansion::ExpandError;
use longhorn_wire::frame::no_space;
use longhorn_wire::proto::ptypes::replica_service_server::{
    ReplicaService, ReplicaServiceServer, SERVICE_NAME as NAME,
};
use longhorn_wire::proto::ptypes::*;
use std::sync::Arc;
use tonic::service::interceptor::InterceptedService;
use tonic::{Code, Request, Response, Status};

/// Full name of the service.
pub const SERVICE_NAME: &str = NAME;

/// The service of one replica.
#[derive(Debug, Clone)]
pub struct ReplicaRpc {
    replica: Arc<Replica>,
}

type Reply<T> = Result<Response<T>, Status>;
type Empty = ();

impl ReplicaRpc {
    /// The calls of a replica in this process, for whoever has it at hand.
    #[must_use]
    pub fn direct(replica: Arc<Replica>) -> Self {
        Self { replica }
    }

    /// The service, for callers that mean this identity.
    #[must_use]
    pub fn server(
        replica: Arc<Replica>,
        identity: Identity,
    ) -> InterceptedService<ReplicaServiceServer<Self>, Identity> {
        ReplicaServiceServer::with_interceptor(Self { replica }, identity)
    }

    /// Does something with the replica where it may block.
    async fn call<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Replica) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let replica = Arc::clone(&self.replica);
        let done = tokio::task::spawn_blocking(move || act(&replica)).await;
        done.unwrap_or_else(|e| Err(Status::internal(format!("the call ended early: {e}"))))
    }

    /// As [`Self::call`], and then says how the replica is.
    async fn change(
        &self,
        act: impl FnOnce(&Replica) -> Result<(), Status> + Send + 'static,
    ) -> Result<Option<longhorn_wire::proto::ptypes::Replica>, Status> {
        self.call(|replica| {
            act(replica)?;
            // Not `failed`: what was asked for has happened, whatever is wrong now.
            replica.get().map(Some).map_err(|error| Status::unknown(error.to_string()))
        })
        .await
    }
}

/// Callers go by the text; only `Unavailable` has a meaning of its own, of which none of these is.
fn failed(error: Error) -> Status {
    Status::unknown(text(&error))
}

/// The same of a call that changes nothing where it is refused: then it has a code that says so.
fn refused(error: Error) -> Status {
    let code = match error.kind() {
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::NoSpace => Code::ResourceExhausted,
        _ => Code::Unknown,
    };
    Status::new(code, text(&error))
}

fn text(error: &Error) -> String {
    match error.kind() {
        ErrorKind::NoSpace => no_space(error.to_string()),
        _ => error.to_string(),
    }
}

fn expansion_failed(error: ExpandError) -> Status {
    Status::new(Code::Internal, error.to_json())
}

/// Sizes are decimal texts; an empty one is none.
fn size(text: &str) -> Result<u64, Status> {
    match text {
        "" => Ok(0),
        text => text.parse().map_err(|e| Status::unknown(format!("size {text:?}: {e}"))),
    }
}

#[tonic::async_trait]
impl ReplicaService for ReplicaRpc {
    async fn replica_create(
        &self,
        request: Request<ReplicaCreateRequest>,
    ) -> Reply<ReplicaCreateResponse> {
        let size = size(&request.into_inner().size)?;
        let replica = self.change(move |replica| replica.create(size).map_err(failed)).await?;
        Ok(Response::new(ReplicaCreateResponse { replica }))
    }

    async fn replica_delete(&self, _: Request<Empty>) -> Reply<Empty> {
        self.call(|replica| replica.delete().map_err(failed)).await.map(Response::new)
    }

    async fn replica_get(&self, _: Request<Empty>) -> Reply<ReplicaGetResponse> {
        let replica = self.change(|_| Ok(())).await?;
        Ok(Response::new(ReplicaGetResponse { replica }))
    }

    async fn replica_open(
        &self,
        request: Request<ReplicaOpenRequest>,
    ) -> Reply<ReplicaOpenResponse> {
        let ReplicaOpenRequest { is_upgrade, expected_backend_size } = request.into_inner();
        let open = move |replica: &Replica| replica.open(is_upgrade, expected_backend_size);
        let replica = self.change(move |replica| open(replica).map_err(failed)).await?;
        Ok(Response::new(ReplicaOpenResponse { replica }))
    }

    async fn replica_close(&self, _: Request<Empty>) -> Reply<ReplicaCloseResponse> {
        let replica = self.change(|replica| replica.close().map_err(failed)).await?;
        Ok(Response::new(ReplicaCloseResponse { replica }))
    }

    async fn replica_reload(&self, _: Request<Empty>) -> Reply<ReplicaReloadResponse> {
        let replica = self.change(|replica| replica.reload().map_err(failed)).await?;
        Ok(Response::new(ReplicaReloadResponse { replica }))
    }

    async fn replica_revert(
        &self,
        request: Request<ReplicaRevertRequest>,
    ) -> Reply<ReplicaRevertResponse> {
        let ReplicaRevertRequest { name, created, revert } = request.into_inner();
        let given = revert;
        let revert = move |replica: &Replica| {
            // With the code of what has changed nothing: who is told so by all replicas need give up none.
            let early = |e| Status::new(Code::InvalidArgument, text(&e));
            replica.check_taken().map_err(early)?;
            match given {
                Some(head) if name.is_empty() => replica.name_head(head),
                given => {
                    let given = given.filter(|revert| !revert.is_empty());
                    replica.revert_as(&name, &created, given)
                }
            }
            .map_err(failed)
        };
        let replica = self.change(revert).await?;
        Ok(Response::new(ReplicaRevertResponse { replica }))
    }

    async fn replica_snapshot(
        &self,
        request: Request<ReplicaSnapshotRequest>,
    ) -> Reply<ReplicaSnapshotResponse> {
        let ReplicaSnapshotRequest { name, user_created, created, labels } = request.into_inner();
        let labels = labels.into_iter().collect();
        let take = move |replica: &Replica| {
            replica.snapshot(&name, user_created, &created, labels).map_err(refused)
        };
        let replica = self.change(take).await?;
        Ok(Response::new(ReplicaSnapshotResponse { replica }))
    }

    async fn replica_expand(
        &self,
        request: Request<ReplicaExpandRequest>,
    ) -> Reply<ReplicaExpandResponse> {
        let size = request.into_inner().size;
        let replica =
            self.change(move |replica| replica.expand(size).map_err(expansion_failed)).await?;
        Ok(Response::new(ReplicaExpandResponse { replica }))
    }

    async fn disk_remove(&self, request: Request<DiskRemoveRequest>) -> Reply<DiskRemoveResponse> {
        let DiskRemoveRequest { name, force } = request.into_inner();
        let replica =
            self.change(move |replica| replica.remove(&name, force).map_err(failed)).await?;
        Ok(Response::new(DiskRemoveResponse { replica }))
    }

    async fn disk_replace(
        &self,
        request: Request<DiskReplaceRequest>,
    ) -> Reply<DiskReplaceResponse> {
        let DiskReplaceRequest { target, source } = request.into_inner();
        let replica =
            self.change(move |replica| replica.replace(&target, &source).map_err(failed)).await?;
        Ok(Response::new(DiskReplaceResponse { replica }))
    }

    async fn disk_prepare_remove(
        &self,
        request: Request<DiskPrepareRemoveRequest>,
    ) -> Reply<DiskPrepareRemoveResponse> {
        let name = request.into_inner().name;
        let operations =
            self.call(move |replica| replica.prepare_remove(&name).map_err(failed)).await?;
        Ok(Response::new(DiskPrepareRemoveResponse { operations }))
    }

    async fn disk_mark_as_removed(
        &self,
        request: Request<DiskMarkAsRemovedRequest>,
    ) -> Reply<DiskMarkAsRemovedResponse> {
        let name = request.into_inner().name;
        let replica =
            self.change(move |replica| replica.mark_removed(&name).map_err(failed)).await?;
        Ok(Response::new(DiskMarkAsRemovedResponse { replica }))
    }

    async fn rebuilding_set(
        &self,
        request: Request<RebuildingSetRequest>,
    ) -> Reply<RebuildingSetResponse> {
        let rebuilding = request.into_inner().rebuilding;
        let replica =
            self.change(move |replica| replica.set_rebuilding(rebuilding).map_err(failed)).await?;
        Ok(Response::new(RebuildingSetResponse { replica }))
    }

    async fn revision_counter_set(
        &self,
        request: Request<RevisionCounterSetRequest>,
    ) -> Reply<RevisionCounterSetResponse> {
        let counter = request.into_inner().counter;
        let replica =
            self.change(move |replica| replica.set_revision(counter).map_err(failed)).await?;
        Ok(Response::new(RevisionCounterSetResponse { replica }))
    }

    async fn unmap_mark_disk_chain_removed_set(
        &self,
        request: Request<UnmapMarkDiskChainRemovedSetRequest>,
    ) -> Reply<UnmapMarkDiskChainRemovedSetResponse> {
        let enabled = request.into_inner().enabled;
        let replica = self.change(move |replica| {
            replica.set_unmap_mark(enabled);
            Ok(())
        });
        Ok(Response::new(UnmapMarkDiskChainRemovedSetResponse { replica: replica.await? }))
    }

    async fn snapshot_max_count_set(
        &self,
        request: Request<SnapshotMaxCountSetRequest>,
    ) -> Reply<SnapshotMaxCountSetResponse> {
        let count = request.into_inner().count;
        let replica = self.change(move |replica| {
            replica.set_snapshot_max_count(count);
            Ok(())
        });
        Ok(Response::new(SnapshotMaxCountSetResponse { replica: replica.await? }))
    }

    async fn snapshot_max_size_set(
        &self,
        request: Request<SnapshotMaxSizeSetRequest>,
    ) -> Reply<SnapshotMaxSizeSetResponse> {
        let size = request.into_inner().size;
        let replica = self.change(move |replica| {
            replica.set_snapshot_max_size(size);
            Ok(())
        });
        Ok(Response::new(SnapshotMaxSizeSetResponse { replica: replica.await? }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhorn_controller::rules::snapshot::Said;

    /// What the kernel says of a full disk is not what upstream's controller looks for.
    #[test]
    fn a_full_disk_is_told_in_the_words_that_controllers_know() {
        let enospc = || std::io::Error::from_raw_os_error(28);
        let status = failed(Error::io(enospc(), "cannot reserve space for the labels"));
        assert_eq!(status.code(), Code::Unknown);
        assert_eq!(Said::of_error(status.message(), false), Said::NoSpace, "{status}");
        let status = refused(Error::no_space("the snapshot table is full"));
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.message(), "the snapshot table is full: no space left on device");
        assert_eq!(refused(Error::invalid("a@b")).code(), Code::InvalidArgument);
        let broken = Error::io(std::io::Error::from_raw_os_error(5), "writing the journal");
        assert_eq!(Said::of_error(refused(broken).message(), false), Said::Failed);
    }
}
