//! A volume's controller, called by gRPC.

use super::status::Version;
use super::{ReplicaLink, answer, service_url};
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::proto::controller::controller_service_client::ControllerServiceClient;
use longhorn_wire::proto::controller::*;
use longhorn_wire::proto::profilerrpc::profiler_client::ProfilerClient;
use longhorn_wire::proto::profilerrpc::{Op, ProfilerOpRequest};
use longhorn_wire::proto::ptypes::SyncFileInfo;
use longhorn_wire::remote::{Address, Calls, SHORT_CALL, calls_of, within};
use std::collections::HashMap;

/// A connection to a controller, which comes about with the first call.
#[derive(Debug, Clone)]
pub struct Engine {
    /// As texts name it.
    pub(super) url: String,
    pub(super) volume: String,
    calls: Calls,
}

/// A replica as the controller lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// `tcp://host:port`.
    pub address: String,
    /// What it is used for.
    pub mode: ReplicaMode,
}

impl Listed {
    fn decode(replica: ControllerReplica, what: &str) -> Result<Self> {
        let mode = replica.mode();
        let address = replica.address.ok_or_else(|| {
            let text = "controller returned a replica response without an address";
            Error::new(ErrorKind::Io, format!("{what}: {text}"))
        })?;
        Ok(Self { address: address.address, mode })
    }

    /// Connects to it, of whatever instance it is.
    pub(super) fn link(&self, engine: &Engine) -> Result<ReplicaLink> {
        self.link_in(&engine.volume)
    }

    /// The same, for calls that mean this volume.
    pub(super) fn link_in(&self, volume: &str) -> Result<ReplicaLink> {
        ReplicaLink::new(&self.address, volume, "")
    }
}

impl Engine {
    /// The controller at this address, `http://host:port`, `tcp://host:port` or `host:port`. If names
    /// are not empty, it refuses when it is another's. To be called in a runtime's context.
    ///
    /// # Errors
    /// `Invalid` for an address or a name that cannot be used.
    pub fn new(url: &str, volume: &str, instance: &str) -> Result<Self> {
        let url = service_url(url).trim_end_matches('/');
        let address = Address::parse(url).map_err(|_| {
            Error::invalid(format!(
                "invalid controller address {url}: write http://HOST:PORT or HOST:PORT"
            ))
        })?;
        let calls = calls_of(&address, volume, instance)?;
        Ok(Self { url: url.to_owned(), volume: volume.to_owned(), calls })
    }

    /// The volume that calls mean; empty for any.
    #[must_use]
    pub fn volume(&self) -> &str {
        &self.volume
    }

    fn client(&self) -> ControllerServiceClient<Calls> {
        ControllerServiceClient::new(self.calls.clone())
    }

    /// How the volume is.
    ///
    /// # Errors
    /// As all calls: what was being done, and what the controller or the connection says.
    pub async fn volume_get(&self) -> Result<Volume> {
        let reply = self.client().volume_get(within(SHORT_CALL, ())).await;
        answer(reply, format_args!("failed to get volume {}", self.url))
    }

    /// Starts a volume that has no replicas yet; sizes in bytes.
    pub async fn volume_start(
        &self,
        size: i64,
        current_size: i64,
        replicas: &[String],
    ) -> Result<()> {
        let replica_addresses = replicas.to_vec();
        let request = VolumeStartRequest { replica_addresses, size, current_size };
        let reply = self.client().volume_start(within(SHORT_CALL, request)).await;
        answer(reply, format_args!("failed to start volume {}", self.url)).map(drop)
    }

    /// Takes a snapshot; the name it was given.
    pub async fn snapshot(
        &self,
        name: &str,
        labels: HashMap<String, String>,
        freeze_filesystem: bool,
    ) -> Result<String> {
        let request = VolumeSnapshotRequest { name: name.to_owned(), labels, freeze_filesystem };
        let reply = self.client().volume_snapshot(within(SHORT_CALL, request)).await;
        let url = &self.url;
        answer(reply, format_args!("failed to create snapshot {name} for volume {url}"))
            .map(|reply| reply.name)
    }

    /// Goes back to a snapshot.
    pub async fn revert(&self, snapshot: &str) -> Result<()> {
        let request = VolumeRevertRequest { name: snapshot.to_owned() };
        let reply = self.client().volume_revert(within(SHORT_CALL, request)).await;
        let url = &self.url;
        answer(reply, format_args!("failed to revert to snapshot {snapshot} for volume {url}"))
            .map(drop)
    }

    /// Begins an expansion to this many bytes.
    pub async fn expand(&self, size: i64) -> Result<()> {
        let request = within(SHORT_CALL, VolumeExpandRequest { size });
        let reply = self.client().volume_expand(request).await;
        answer(reply, format_args!("failed to expand to size {size} for volume {}", self.url))
            .map(drop)
    }

    /// Starts a frontend.
    pub async fn frontend_start(&self, frontend: &str) -> Result<()> {
        let request = VolumeFrontendStartRequest { frontend: frontend.to_owned() };
        let reply = self.client().volume_frontend_start(within(SHORT_CALL, request)).await;
        let url = &self.url;
        answer(reply, format_args!("failed to start frontend {frontend} for volume {url}"))
            .map(drop)
    }

    /// Ends the frontend.
    pub async fn frontend_shutdown(&self) -> Result<()> {
        let reply = self.client().volume_frontend_shutdown(within(SHORT_CALL, ())).await;
        answer(reply, format_args!("failed to shutdown frontend for volume {}", self.url)).map(drop)
    }

    /// Sets whether unmaps mark the snapshots they reach as removed.
    pub async fn set_unmap_mark(&self, enabled: bool) -> Result<()> {
        let request = VolumeUnmapMarkSnapChainRemovedSetRequest { enabled };
        let request = within(SHORT_CALL, request);
        let reply = self.client().volume_unmap_mark_snap_chain_removed_set(request).await;
        let what =
            format!("failed to set UnmapMarkSnapChainRemoved to {enabled} for volume {}", self.url);
        answer(reply, what).map(drop)
    }

    /// All replicas.
    pub async fn replicas(&self) -> Result<Vec<Listed>> {
        let reply = self.client().replica_list(within(SHORT_CALL, ())).await;
        let reply = answer(reply, format_args!("failed to list replicas for volume {}", self.url))?;
        let what = format!("failed to decode a replica for volume {}", self.url);
        reply.replicas.into_iter().map(|replica| Listed::decode(replica, &what)).collect()
    }

    /// Adds a replica in this mode.
    pub async fn replica_create(
        &self,
        address: &str,
        snapshot_required: bool,
        mode: ReplicaMode,
    ) -> Result<Listed> {
        let request = ControllerReplicaCreateRequest {
            address: address.to_owned(),
            snapshot_required,
            mode: mode.into(),
        };
        let reply = self.client().controller_replica_create(within(SHORT_CALL, request)).await;
        let url = &self.url;
        let what = format_args!("failed to create replica {address} for volume {url}");
        let replica = answer(reply, what)?;
        let what = format!("failed to decode created replica {address} for volume {url}");
        Listed::decode(replica, &what)
    }

    /// Removes a replica.
    pub async fn replica_delete(&self, address: &str) -> Result<()> {
        let request = ReplicaAddress { address: address.to_owned(), ..Default::default() };
        let reply = self.client().replica_delete(within(SHORT_CALL, request)).await;
        let url = &self.url;
        answer(reply, format_args!("failed to delete replica {address} for volume {url}"))
    }

    /// Sets a replica's mode.
    pub async fn replica_update(&self, address: &str, mode: ReplicaMode) -> Result<Listed> {
        let address_of = ReplicaAddress { address: address.to_owned(), ..Default::default() };
        let request = ControllerReplica { address: Some(address_of), mode: mode.into() };
        let reply = self.client().replica_update(within(SHORT_CALL, request)).await;
        let url = &self.url;
        let what = format_args!("failed to update replica {address} for volume {url}");
        let replica = answer(reply, what)?;
        let what = format!("failed to decode updated replica {address} for volume {url}");
        Listed::decode(replica, &what)
    }

    /// Makes a replica in mode WO ready to be filled; what it has to be given.
    pub async fn prepare_rebuild(
        &self,
        address: &str,
        instance: &str,
    ) -> Result<Vec<SyncFileInfo>> {
        let request = named(address, instance);
        let reply = self.client().replica_prepare_rebuild(within(SHORT_CALL, request)).await;
        let url = &self.url;
        answer(
            reply,
            format_args!("failed to prepare rebuilding replica {address} for volume {url}"),
        )
        .map(|reply| reply.sync_file_info_list)
    }

    /// Has the controller check a replica that has been filled, and use it.
    pub async fn verify_rebuild(&self, address: &str, instance: &str) -> Result<()> {
        let request = named(address, instance);
        let reply = self.client().replica_verify_rebuild(within(SHORT_CALL, request)).await;
        let url = &self.url;
        answer(reply, format_args!("failed to verify rebuilt replica {address} for volume {url}"))
            .map(drop)
    }

    /// From how many replicas one may be filled at once.
    pub async fn rebuild_sync_limit(&self) -> Result<i32> {
        let request = within(SHORT_CALL, ());
        let reply = self.client().replica_rebuild_concurrent_sync_limit_get(request).await;
        let url = &self.url;
        answer(reply, format_args!("failed to get rebuild concurrent sync limit for volume {url}"))
            .map(|reply| reply.limit)
    }

    /// Has the controller write its last requests to its log, so many of them at most, or all if 0.
    pub async fn journal(&self, limit: i64) -> Result<()> {
        let request = within(SHORT_CALL, JournalListRequest { limit });
        let reply = self.client().journal_list(request).await;
        answer(reply, format_args!("failed to list journal for volume {}", self.url))
    }

    /// The controller's version.
    pub async fn version(&self) -> Result<Version> {
        let reply = self.client().version_detail_get(within(SHORT_CALL, ())).await;
        let what = format_args!("failed to get version detail of {}", self.url);
        let version = answer(reply, what)?.version;
        Ok(version.unwrap_or_default())
    }

    /// Asks for or switches the profiler of the process; where it then listens, or nothing.
    pub async fn profiler(&self, op: Op, port: i32) -> Result<String> {
        let mut client = ProfilerClient::new(self.calls.clone());
        let request = ProfilerOpRequest { request_op: op.into(), port_number: port };
        let reply = client.profiler_op(within(SHORT_CALL, request)).await;
        let name = op.as_str_name();
        answer(reply, format_args!("failed to {name} the profiler of {}", self.url))
            .map(|reply| reply.profiler_addr)
    }
}

fn named(address: &str, instance: &str) -> ReplicaAddress {
    ReplicaAddress { address: address.to_owned(), instance_name: instance.to_owned() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_named_as_upstream_names_them() {
        for (url, named) in [
            ("http://localhost:9501", "localhost:9501"),
            ("tcp://10.0.0.1:2/v1", "10.0.0.1:2"),
            ("[::1]:2", "[::1]:2"),
            ("localhost", "localhost"),
        ] {
            assert_eq!(service_url(url), named);
        }
    }

    #[tokio::test]
    async fn addresses_that_are_none_are_refused() {
        for url in ["localhost", "http://", "http://a:b", ""] {
            let text = Engine::new(url, "v", "").unwrap_err().to_string();
            assert!(text.contains("invalid controller address"), "{url}: {text}");
        }
        assert!(Engine::new("http://localhost:1/", "v\n", "").is_err());
        assert!(Engine::new("http://localhost:1/", "v", "e").is_ok());
    }
}
