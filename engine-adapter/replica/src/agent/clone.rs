//! Clone: becoming what one reads through a snapshot of another volume.

use super::Agent;
use super::jobs::{Job, Kind};
use super::peer::client::{Remote, Traffic, Transfer};
use super::send::{blocking, broken};
use super::shelf::{StoreLayer, removed};
use crate::replica::meta::DiskMeta;
use dbs_core::{Error, Result};
use dbs_service::log;
use longhorn_sync::image::Record;
use longhorn_wire::proto::dbs::LayersRequest;
use longhorn_wire::proto::ptypes;
use longhorn_wire::proto::ptypes::replica_service_client::ReplicaServiceClient;
use longhorn_wire::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use longhorn_wire::proto::ptypes::{SnapshotCloneRequest, VolumeExportRequest};
use longhorn_wire::remote::{self, Address};
use longhorn_wire::{names, time};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How often the progress is told.
const TICK: Duration = Duration::from_millis(200);

impl Agent {
    /// Becomes a clone, to the end; a caller that goes away does not stop it.
    ///
    /// Without a source that answers and has the snapshot nothing has begun, so no status is left: Longhorn's manager
    /// takes one with an error for the end of the clone, and else tries again.
    ///
    /// # Errors
    /// `Busy` while it is at that already, `NotFound` without that snapshot; of the other replica,
    /// of the store.
    pub(super) async fn snapshot_clone(
        self: &Arc<Self>,
        request: SnapshotCloneRequest,
    ) -> Result<()> {
        let source = find_source(&request).await;
        let source = source.or_else(|error| {
            let outcome = Err(error);
            self.log_clone(&request, &outcome);
            outcome
        })?;
        let from = vec![request.from_address.clone()];
        let job = self.jobs.begin(Kind::Clone, from, &request.snapshot_file_name)?;
        let me = Arc::clone(self);
        let task = tokio::spawn(async move {
            let passed = Arc::<AtomicU64>::default();
            let whole = Arc::<AtomicU64>::default();
            let mut tick = tokio::time::interval(TICK);
            let mut cloning = std::pin::pin!(me.clone_from(&request, &source, &whole, &passed));
            let outcome = loop {
                tokio::select! {
                    outcome = &mut cloning => break outcome,
                    _ = tick.tick() => tell(&job, &whole, &passed),
                }
            };
            me.log_clone(&request, &outcome);
            job.end(&outcome);
            outcome
        });
        task.await.map_err(broken)?
    }

    fn log_clone<T>(&self, request: &SnapshotCloneRequest, outcome: &Result<T>) {
        let SnapshotCloneRequest { from_address, snapshot_file_name: snapshot, .. } = request;
        let volume = self.replica.volume_name();
        match outcome {
            Ok(_) => log::info("clone", &[("volume", &volume), ("snapshot", snapshot)]),
            Err(error) => log::error(
                "clone",
                &[
                    ("volume", &volume),
                    ("from", from_address),
                    ("snapshot", snapshot),
                    ("error", error),
                ],
            ),
        }
    }

    async fn clone_from(
        self: &Arc<Self>,
        request: &SnapshotCloneRequest,
        source: &ptypes::Replica,
        whole: &Arc<AtomicU64>,
        passed: &Arc<AtomicU64>,
    ) -> Result<()> {
        let SnapshotCloneRequest { from_address, snapshot_file_name: snapshot, .. } = request;
        let address = Address::parse(from_address)?;
        let disk = names::snapshot_disk(snapshot);
        let has_file = !self.replica.backing_identity()?.is_empty();
        let size = size_of_source(&address, request, source, &disk, has_file)?;
        let ours = {
            let me = Arc::clone(self);
            blocking(move || me.replica.store()?.volume_size(me.replica.volume_name())).await?
        };
        if size > ours {
            return Err(Error::invalid(format!(
                "the volume of {size} bytes cannot be cloned into one of {ours}"
            )));
        }
        whole.store(size, Ordering::Relaxed);
        let agent = address.agent()?;
        let me = Arc::clone(self);
        blocking(move || me.replica.incoming().begin_clone()).await?;
        let met = Remote::meet(&agent, &request.from_volume_name, self.short_rest()).await;
        let moved = match met {
            Ok(Some(peer)) => self.clone_by_blocks(&peer, &disk, passed).await,
            Ok(None) => self.clone_by_file(&agent, request, &disk, passed).await,
            Err(error) => Err(error),
        };
        let me = Arc::clone(self);
        let created = time::text(time::now_ns());
        blocking(move || {
            let outcome = moved.and_then(|()| {
                // As upstream's: with no parent, and nothing else known.
                me.replica.incoming().put_meta(&disk, DiskMeta::default())
            });
            let ended = me.replica.incoming().end_clone(outcome.is_ok());
            let headed = outcome.and(ended)?;
            if headed { Ok(()) } else { me.replica.revert(&disk, &created) }
        })
        .await
    }

    /// From a replica of our kind.
    async fn clone_by_blocks(
        self: &Arc<Self>,
        peer: &Remote,
        disk: &str,
        passed: &Arc<AtomicU64>,
    ) -> Result<()> {
        let request =
            LayersRequest { disks: vec![disk.to_owned()], flattened: true, checksums: false };
        let Some(info) = peer.layers(request).await?.pop() else {
            return Err(Error::invalid("the other replica described nothing"));
        };
        self.replica.check_same_below(&info.file)?;
        let (me, name, size) = (Arc::clone(self), disk.to_owned(), info.size);
        let used = self.uses.begin();
        let target = blocking(move || {
            Record::remove(&me.shelf.image(&name))?;
            Ok(StoreLayer(me.replica.incoming().begin(&name, size)?))
        });
        let traffic = Arc::<Traffic>::default();
        let transfer = Transfer {
            info,
            flattened: true,
            target: Arc::new(target.await?),
            traffic: Arc::clone(&traffic),
            passed: Arc::clone(passed),
            used,
        };
        let outcome = peer.fetch(transfer).await;
        self.totals.add(&traffic);
        outcome
    }

    /// From a replica of upstream's kind.
    async fn clone_by_file(
        self: &Arc<Self>,
        agent: &Address,
        request: &SnapshotCloneRequest,
        disk: &str,
        passed: &Arc<AtomicU64>,
    ) -> Result<()> {
        let traffic = Arc::<Traffic>::default();
        let receiver = self.receiver(disk, Arc::clone(&traffic), Arc::clone(passed)).await?;
        let export = VolumeExportRequest {
            snapshot_file_name: request.snapshot_file_name.clone(),
            host: remote::bare_host(&request.to_host).to_owned(),
            port: receiver.port.into(),
            export_backing_image_if_exist: false,
            file_sync_http_client_timeout: request.file_sync_http_client_timeout,
        };
        let calls = remote::calls(agent, &request.from_volume_name)?;
        let export = remote::within(remote::LONG_CALL, export);
        let mut client = SyncAgentServiceClient::new(calls);
        let what = format!("having {agent} export the snapshot");
        let exported = client.volume_export(export).await.map(drop);
        let outcome = receiver.end(exported.map_err(|status| remote::failed(&status, &what))).await;
        self.totals.add(&traffic);
        outcome
    }
}

/// What a source replica says of itself, if it has a backing file as well as this one has, or neither has.
pub(super) async fn source_with(
    address: &Address,
    volume: &str,
    has_file: bool,
) -> Result<ptypes::Replica> {
    let replica = source(address, volume).await?;
    check_files(address, &replica, has_file)?;
    Ok(replica)
}

async fn source(address: &Address, volume: &str) -> Result<ptypes::Replica> {
    let calls = remote::calls(address, volume)?;
    let call = remote::within(remote::SHORT_CALL, ());
    let answer = ReplicaServiceClient::new(calls).replica_get(call).await;
    let answer = answer.map_err(|status| {
        remote::failed(&status, &format!("asking the source replica {address}"))
    })?;
    Ok(answer.into_inner().replica.unwrap_or_default())
}

fn check_files(address: &Address, replica: &ptypes::Replica, has_file: bool) -> Result<()> {
    if replica.backing_file.is_empty() == has_file {
        let (theirs, ours) = if has_file { ("no", "one") } else { ("a", "none") };
        return Err(Error::invalid(format!(
            "the source replica {address} has {theirs} backing file, and this one has {ours}"
        )));
    }
    Ok(())
}

/// The source of a clone, if it has the snapshot.
async fn find_source(request: &SnapshotCloneRequest) -> Result<ptypes::Replica> {
    let SnapshotCloneRequest { from_address, snapshot_file_name: snapshot, .. } = request;
    let replica = source(&Address::parse(from_address)?, &request.from_volume_name).await?;
    if !replica.disks.contains_key(&names::snapshot_disk(snapshot)) {
        return Err(Error::not_found(format!(
            "cannot find snapshot {snapshot} in the source replica {from_address}"
        )));
    }
    Ok(replica)
}

/// The size of the volume of which a snapshot is to be cloned, if both have a backing file or none has.
fn size_of_source(
    address: &Address,
    request: &SnapshotCloneRequest,
    source: &ptypes::Replica,
    disk: &str,
    has_file: bool,
) -> Result<u64> {
    check_files(address, source, has_file)?;
    if source.disks.get(disk).is_some_and(|disk| disk.removed) {
        return Err(removed(&request.snapshot_file_name));
    }
    let size = source.size.parse();
    size.map_err(|_| Error::invalid(format!("{:?} is no size of a replica", source.size)))
}

fn tell(job: &Job, whole: &AtomicU64, passed: &AtomicU64) {
    job.progress(passed.load(Ordering::Relaxed), whole.load(Ordering::Relaxed));
}
