//! A replica and its sync agent, called by gRPC.

use super::answer;
use super::status::{CloneStatus, HashStatus, PurgeStatus, RebuildStatus};
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::control::expansion::{ExpandCode, ExpandError};
use longhorn_wire::proto::ptypes::replica_service_client::ReplicaServiceClient;
use longhorn_wire::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use longhorn_wire::proto::ptypes::*;
use longhorn_wire::remote::{Address, Calls, LONG_CALL, SHORT_CALL, calls_of, within};
use std::collections::HashMap;
use std::fmt::Write;
use std::time::Duration;

/// Connections to a replica, which come about with the first call of either server.
#[derive(Debug, Clone)]
pub struct ReplicaLink {
    /// As texts name it.
    url: String,
    host: String,
    control: Calls,
    agent: Calls,
}

/// How files are transferred.
#[derive(Debug, Clone, Copy)]
pub struct SyncOptions {
    /// How long a request between a sender and a receiver may take, in seconds.
    pub http_timeout: i32,
    /// How long the whole transfer may take, in seconds; without a limit of its own if 0 or less.
    pub grpc_timeout: i64,
}

impl SyncOptions {
    fn limit(&self) -> Duration {
        u64::try_from(self.grpc_timeout)
            .ok()
            .filter(|limit| *limit > 0)
            .map_or(LONG_CALL, Duration::from_secs)
    }
}

impl ReplicaLink {
    /// The replica at this address, `tcp://host:port` or `host:port`. If names are not empty, it
    /// refuses when it is another's. To be called in a runtime's context.
    ///
    /// # Errors
    /// `Invalid` for an address or a name that cannot be used.
    pub fn new(address: &str, volume: &str, instance: &str) -> Result<Self> {
        let url = super::service_url(address);
        let parsed = Address::parse(url).map_err(|_| {
            Error::invalid(format!("invalid replica address {url}, must have a port in it"))
        })?;
        Ok(Self {
            url: url.to_owned(),
            host: parsed.host().to_owned(),
            control: calls_of(&parsed, volume, instance)?,
            agent: calls_of(&parsed.agent()?, volume, instance)?,
        })
    }

    fn control(&self) -> ReplicaServiceClient<Calls> {
        ReplicaServiceClient::new(self.control.clone())
    }

    fn agent(&self) -> SyncAgentServiceClient<Calls> {
        SyncAgentServiceClient::new(self.agent.clone())
    }

    /// How the replica is.
    ///
    /// # Errors
    /// As all calls: what was being done, and what the replica or the connection says.
    pub async fn get(&self) -> Result<Replica> {
        let reply = self.control().replica_get(within(SHORT_CALL, ())).await;
        let reply = answer(reply, format_args!("failed to get replica {}", self.url))?;
        Ok(reply.replica.unwrap_or_default())
    }

    /// Opens it.
    pub async fn open(&self) -> Result<()> {
        let request = within(SHORT_CALL, ReplicaOpenRequest::default());
        let reply = self.control().replica_open(request).await;
        let url = &self.url;
        answer(reply, format_args!("failed to open replica {url} with IsUpgrade false")).map(drop)
    }

    /// Closes it.
    pub async fn close(&self) -> Result<()> {
        let reply = self.control().replica_close(within(SHORT_CALL, ())).await;
        answer(reply, format_args!("failed to close replica {}", self.url)).map(drop)
    }

    /// Has it show the layers it was given.
    pub async fn reload(&self) -> Result<()> {
        let reply = self.control().replica_reload(within(SHORT_CALL, ())).await;
        answer(reply, format_args!("failed to reload replica {}", self.url)).map(drop)
    }

    /// Makes its volume larger.
    pub async fn expand(&self, size: i64) -> Result<()> {
        let request = within(SHORT_CALL, ReplicaExpandRequest { size });
        let Err(status) = self.control().replica_expand(request).await else { return Ok(()) };
        let context = format!("failed to expand replica {}", self.url);
        let unknown =
            || ExpandError::new(ExpandCode::ResultUnknown, longhorn_wire::remote::text(&status));
        let error = ExpandError::from_json(status.message()).unwrap_or_else(unknown);
        let message = format!("{context}: {}", error.message);
        Err(Error::new(ErrorKind::Io, ExpandError { message, ..error }.to_string()))
    }

    /// Marks a snapshot, or disk, as removed.
    pub async fn mark_as_removed(&self, disk: &str) -> Result<()> {
        let request = DiskMarkAsRemovedRequest { name: disk.to_owned() };
        let reply = self.control().disk_mark_as_removed(within(SHORT_CALL, request)).await;
        let url = &self.url;
        answer(reply, format_args!("failed to mark disk {disk} as removed for replica {url}"))
            .map(drop)
    }

    /// Sets whether it is being filled.
    pub async fn set_rebuilding(&self, rebuilding: bool) -> Result<()> {
        let request = within(SHORT_CALL, RebuildingSetRequest { rebuilding });
        let reply = self.control().rebuilding_set(request).await;
        let url = &self.url;
        answer(reply, format_args!("failed to set rebuilding to {rebuilding} for replica {url}"))
            .map(drop)
    }

    /// Has it fetch these files from these replicas; returns when it has them.
    pub async fn sync_files(
        &self,
        from: &[String],
        files: Vec<SyncFileInfo>,
        fast_sync: bool,
        options: &SyncOptions,
    ) -> Result<()> {
        let what = format!("failed to sync files {} from {}", go_files(&files), go_map(from));
        let request = FilesSyncRequest {
            // For replicas that do not know the map.
            from_address: from.first().cloned().unwrap_or_default(),
            to_host: self.host.clone(),
            sync_file_info_list: files,
            fast_sync,
            file_sync_http_client_timeout: options.http_timeout,
            grpc_timeout_seconds: options.grpc_timeout,
            local_sync: None,
            from_address_map: from.iter().map(|address| (address.clone(), true)).collect(),
        };
        answer(self.agent().files_sync(within(options.limit(), request)).await, what)
    }

    /// How far it is with being filled.
    pub async fn rebuild_status(&self) -> Result<RebuildStatus> {
        let reply = self.agent().replica_rebuild_status(within(SHORT_CALL, ())).await;
        answer(reply, "failed to get replica rebuild status").map(RebuildStatus::from)
    }

    /// Begins a backup.
    pub async fn backup_create(
        &self,
        request: BackupCreateRequest,
    ) -> Result<BackupCreateResponse> {
        let what = format!(
            "failed to create backup to {} for volume {}",
            request.backup_target, request.volume_name
        );
        answer(self.agent().backup_create(within(LONG_CALL, request)).await, what)
    }

    /// How far it is with that.
    pub async fn backup_status(&self, backup: &str) -> Result<BackupStatusResponse> {
        let request = within(SHORT_CALL, BackupStatusRequest { backup: backup.to_owned() });
        let reply = self.agent().backup_status(request).await;
        answer(reply, "failed to get backup status")
    }

    /// Begins to restore a backup to a disk.
    pub async fn backup_restore(
        &self,
        backup: &str,
        disk: &str,
        credential: HashMap<String, String>,
        concurrent_limit: i32,
    ) -> Result<()> {
        let what = format!("failed to restore backup data {backup} to snapshot file {disk}");
        let request = BackupRestoreRequest {
            backup: backup.to_owned(),
            snapshot_disk_name: disk.to_owned(),
            credential,
            concurrent_limit,
        };
        answer(self.agent().backup_restore(within(LONG_CALL, request)).await, what)
    }

    /// How far it is with the restoration of a backup.
    pub async fn restore_status(&self) -> Result<RestoreStatusResponse> {
        let reply = self.agent().restore_status(within(SHORT_CALL, ())).await;
        answer(reply, "failed to get restore status")
    }

    /// Has it forget the restoration of a backup.
    pub async fn reset(&self) -> Result<()> {
        let reply = self.agent().reset(within(SHORT_CALL, ())).await;
        answer(reply, "failed to clean up restore info in Sync Agent Server")
    }

    /// Begins a purge.
    pub async fn purge(&self) -> Result<()> {
        let reply = self.agent().snapshot_purge(within(SHORT_CALL, ())).await;
        answer(reply, "failed to start snapshot purge")
    }

    /// How far it is with a purge.
    pub async fn purge_status(&self) -> Result<PurgeStatus> {
        let reply = self.agent().snapshot_purge_status(within(SHORT_CALL, ())).await;
        answer(reply, "failed to get snapshot purge status")
    }

    /// Has it fetch a snapshot of another volume's replica and go back to it.
    pub async fn clone_snapshot(
        &self,
        from: &str,
        from_volume: &str,
        snapshot: &str,
        export_backing_image: bool,
        options: &SyncOptions,
    ) -> Result<()> {
        let host = &self.host;
        let what =
            format!("failed to clone snapshot {snapshot} from replica {from} to host {host}");
        let request = SnapshotCloneRequest {
            from_address: from.to_owned(),
            to_host: host.clone(),
            snapshot_file_name: snapshot.to_owned(),
            export_backing_image_if_exist: export_backing_image,
            file_sync_http_client_timeout: options.http_timeout,
            from_volume_name: from_volume.to_owned(),
        };
        answer(self.agent().snapshot_clone(within(options.limit(), request)).await, what)
    }

    /// How far it is with that.
    pub async fn clone_status(&self) -> Result<CloneStatus> {
        let reply = self.agent().snapshot_clone_status(within(SHORT_CALL, ())).await;
        answer(reply, "failed to get snapshot clone status")
    }

    /// Begins to compute a snapshot's checksum.
    pub async fn hash(&self, snapshot: &str, rehash: bool) -> Result<()> {
        let request = SnapshotHashRequest { snapshot_name: snapshot.to_owned(), rehash };
        let reply = self.agent().snapshot_hash(within(SHORT_CALL, request)).await;
        answer(reply, "failed to start hashing snapshot")
    }

    /// How far it is with that.
    pub async fn hash_status(&self, snapshot: &str) -> Result<HashStatus> {
        let request = SnapshotHashStatusRequest { snapshot_name: snapshot.to_owned() };
        let reply = self.agent().snapshot_hash_status(within(SHORT_CALL, request)).await;
        answer(reply, "failed to get snapshot hash status")
    }

    /// Ends that.
    pub async fn hash_cancel(&self, snapshot: &str) -> Result<()> {
        let request = SnapshotHashCancelRequest { snapshot_name: snapshot.to_owned() };
        let reply = self.agent().snapshot_hash_cancel(within(SHORT_CALL, request)).await;
        answer(reply, format_args!("failed to cancel snapshot {snapshot} hash task"))
    }

    /// Whether a checksum is being computed on its machine.
    pub async fn is_hashing(&self) -> Result<bool> {
        let reply = self.agent().snapshot_hash_lock_state(within(SHORT_CALL, ())).await;
        answer(reply, "failed to get snapshot hash lock state").map(|reply| reply.is_locked)
    }
}

/// A list of files as a Go program prints it.
fn go_files(files: &[SyncFileInfo]) -> String {
    let mut text = "[".to_owned();
    for (index, file) in files.iter().enumerate() {
        let space = if index > 0 { " " } else { "" };
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "{space}{{FromFileName:{} ToFileName:{} ActualSize:{}}}",
            file.from_file_name, file.to_file_name, file.actual_size
        );
    }
    text + "]"
}

/// A set of addresses as a Go program prints it.
fn go_map(addresses: &[String]) -> String {
    let mut sorted = addresses.to_vec();
    sorted.sort();
    let entries: Vec<_> = sorted.iter().map(|address| format!("{address}:true")).collect();
    format!("map[{}]", entries.join(" "))
}
