//! A controller as its gRPC service has it.

use dbs_core::{Error, Result};
use longhorn_controller::path::{PathKind, ReplicaStats};
use longhorn_controller::rules::Mode;
use longhorn_controller::service::{Control, Counters, DamageCount};
use longhorn_controller::volume::{Controller, VolumeInfo};
use longhorn_wire::proto::controller::{Metrics, ReplicaMode, Volume};
use longhorn_wire::proto::ptypes::SyncFileInfo;
use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::Arc;

/// A volume's controller, and its data path for what is counted.
pub(super) struct Engine {
    pub controller: Arc<Controller>,
    pub data: Arc<super::parts::Data>,
}

/// What does not fit is as much as does.
fn signed<T, U: TryFrom<T>>(value: T, most: U) -> U {
    U::try_from(value).unwrap_or(most)
}

fn bytes(size: i64) -> Result<u64> {
    u64::try_from(size).map_err(|_| Error::invalid(format!("a size of {size} bytes")))
}

fn described(info: VolumeInfo) -> Volume {
    Volume {
        name: info.name,
        size: signed(info.size, i64::MAX),
        replica_count: signed(info.replica_count, i32::MAX),
        endpoint: info.endpoint,
        frontend: info.frontend,
        frontend_state: info.frontend_state.to_owned(),
        is_expanding: info.is_expanding,
        last_expansion_error: info.last_expansion_error,
        last_expansion_failed_at: info.last_expansion_failed_at,
        unmap_mark_snap_chain_removed: info.unmap_mark,
        snapshot_max_count: signed(info.limits.count, i32::MAX),
        snapshot_max_size: signed(info.limits.size, i64::MAX),
    }
}

fn shown(mode: Mode) -> ReplicaMode {
    match mode {
        Mode::Wo => ReplicaMode::Wo,
        Mode::Rw => ReplicaMode::Rw,
        Mode::Err => ReplicaMode::Err,
    }
}

fn meant(mode: ReplicaMode) -> Mode {
    match mode {
        ReplicaMode::Wo => Mode::Wo,
        ReplicaMode::Rw => Mode::Rw,
        ReplicaMode::Err => Mode::Err,
    }
}

/// What is counted of a replica's damage.
fn damage(replica: ReplicaStats) -> DamageCount {
    let ReplicaStats { name, mismatches, healed, .. } = replica;
    DamageCount { replica: name, mismatches, healed }
}

impl Control for Engine {
    fn volume(&self) -> Volume {
        described(self.controller.volume())
    }

    fn start(&self, replicas: &[String], size: i64, current_size: i64) -> Result<()> {
        let started = self.controller.start(replicas, bytes(size)?, bytes(current_size)?);
        started.map_err(|error| Error::new(dbs_core::ErrorKind::Io, error.to_string()))
    }

    fn shutdown(&self) -> Result<()> {
        self.controller.shutdown()
    }

    fn snapshot(
        &self,
        name: &str,
        labels: HashMap<String, String>,
        freeze_filesystem: bool,
    ) -> Result<String> {
        self.controller.snapshot_frozen(name, labels, freeze_filesystem)
    }

    fn revert(&self, snapshot: &str) -> Result<()> {
        self.controller.revert(snapshot)
    }

    fn expand(&self, size: i64) -> Result<()> {
        self.controller.expand(bytes(size)?)
    }

    fn start_frontend(&self, frontend: &str) -> Result<()> {
        self.controller.start_frontend(frontend)
    }

    fn shutdown_frontend(&self) -> Result<()> {
        self.controller.shutdown_frontend()
    }

    fn set_unmap_mark(&self, enabled: bool) -> Result<()> {
        self.controller.set_unmap_mark(enabled)
    }

    fn set_snapshot_max_count(&self, count: i32) -> Result<()> {
        let wrong = || Error::invalid(format!("a maximum of {count} snapshots"));
        self.controller.set_snapshot_max_count(u32::try_from(count).map_err(|_| wrong())?)
    }

    fn set_snapshot_max_size(&self, size: i64) -> Result<()> {
        self.controller.set_snapshot_max_size(bytes(size)?)
    }

    fn replicas(&self) -> Vec<(String, ReplicaMode)> {
        let members = self.controller.replicas().into_iter();
        members.map(|member| (member.target.address, shown(member.mode))).collect()
    }

    fn create_replica(
        &self,
        address: &str,
        snapshot_required: bool,
        mode: ReplicaMode,
    ) -> Result<()> {
        self.controller.create_replica(address, "", snapshot_required, meant(mode))
    }

    fn delete_replica(&self, address: &str) -> Result<()> {
        self.controller.delete_replica(address)
    }

    fn update_replica(&self, address: &str, mode: ReplicaMode) -> Result<()> {
        self.controller.update_replica(address, meant(mode))
    }

    fn prepare_rebuild(&self, address: &str, instance: &str) -> Result<Vec<SyncFileInfo>> {
        let files = self.controller.prepare_rebuild(address, instance)?;
        let same = files.into_iter().map(|file| SyncFileInfo {
            from_file_name: file.name.clone(),
            to_file_name: file.name,
            actual_size: signed(file.size, i64::MAX),
        });
        Ok(same.collect())
    }

    fn verify_rebuild(&self, address: &str, instance: &str) -> Result<()> {
        self.controller.verify_rebuild(address, instance)
    }

    fn sync_limit(&self) -> i32 {
        signed(self.controller.sync_limit(), i32::MAX)
    }

    fn set_sync_limit(&self, limit: i32) -> Result<()> {
        self.controller.set_sync_limit(limit)
    }

    /// On the standard output, where upstream's has it.
    fn journal(&self, limit: i64) {
        let mut out = io::stdout().lock();
        for entry in self.data.path.journal(limit) {
            // Where nobody reads it, nobody misses it.
            if writeln!(out, "{entry}").is_err() {
                return;
            }
        }
    }

    fn metrics(&self) -> Metrics {
        let rates = self.controller.metrics();
        Metrics {
            read_throughput: rates.read_throughput,
            write_throughput: rates.write_throughput,
            read_latency: rates.read_latency,
            write_latency: rates.write_latency,
            read_iops: rates.read_iops,
            write_iops: rates.write_iops,
        }
    }

    fn counters(&self) -> Counters {
        let totals = super::parts::totals(&self.data.path);
        let stats = self.data.path.stats();
        Counters {
            read_errors: stats.errors[PathKind::Read as usize],
            write_errors: stats.errors[PathKind::Write as usize],
            retries: stats.retries,
            faults: self.controller.faults().map(|(fault, count)| (fault.name(), count)).to_vec(),
            damage: stats.replicas.into_iter().map(damage).collect(),
            reads: totals.reads,
            read_bytes: totals.read_bytes,
            read_ns: totals.read_ns,
            writes: totals.writes,
            write_bytes: totals.written_bytes,
            write_ns: totals.write_ns,
        }
    }
}
