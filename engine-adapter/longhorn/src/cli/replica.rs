//! `longhorn replica` and `longhorn sync-agent`: arguments to what is to be served.

use super::replica_args::{
    DataProtocol, DurabilityArg, OurArgs, ReplicaArgs, SyncAgentArgs, ThreadArgs,
};
use dbs_core::{Error, Result};
use longhorn_data::DataOptions;
use longhorn_replica::host::file::StoreOptions;
use longhorn_replica::host::options::Options;
use longhorn_replica::host::own::{self, Process};
use longhorn_replica::host::shim;
use longhorn_replica::host::sockets::{self, Wanted};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Threads for what may block, of one replica.
const WORKERS: u16 = 8;

/// Serves a replica until a signal comes: on a store of its own, or in `store`, which a running
/// `longhorn serve` owns.
///
/// # Errors
/// Why it cannot be served, or has ended.
pub fn serve(args: &ReplicaArgs, store: Option<&Path>, volume_name: &str) -> Result<()> {
    let options = options(args, volume_name)?;
    let unix = match args.data_server_protocol {
        DataProtocol::Tcp => None,
        DataProtocol::Unix => {
            let control = std::env::var_os("LONGHORN_CONTROL_PATH").map(PathBuf::from);
            Some(sockets::unix_path(control.as_deref(), volume_name)?)
        }
    };
    let wanted = Wanted { listen: args.listen.clone(), unix, agent: args.sync_agent };
    let receivers = args.sync_agent_port_count;
    if let Some(store) = store {
        let replica = shim::Shim {
            options,
            wanted,
            receivers,
            store: store.to_owned(),
            runtime_dir: runtime_dir(),
        };
        return shim::run(&replica);
    }
    own::run(&Process {
        options,
        wanted,
        receivers,
        data: data_options(&args.ours.threads, WORKERS, args.ours.commit_interval),
        metrics: args.ours.metrics.clone(),
        runtime_dir: runtime_dir(),
        store: store_options(&args.ours),
        take_over: args.ours.take_over.flatten(),
    })
}

fn options(args: &ReplicaArgs, volume_name: &str) -> Result<Options> {
    let absolute = |path: &Path| {
        std::path::absolute(path).map_err(|e| Error::io(e, format!("finding `{}`", path.display())))
    };
    let backing_file =
        Some(Path::new(&args.backing_file)).filter(|path| !path.as_os_str().is_empty());
    Ok(Options {
        dir: absolute(&args.directory)?,
        backing_file: backing_file.map(absolute).transpose()?,
        volume_name: volume_name.to_owned(),
        instance_name: args.replica_instance_name.clone(),
        size: args.size,
        revision_counter: !args.disable_rev_counter,
        unmap_mark: args.unmap_mark_disk_chain_removed,
        snapshot_max_count: args.snapshot_max_count,
        snapshot_max_size: args.snapshot_max_size.unwrap_or(0),
        encrypted: args.encrypted,
        durable_writes: args.ours.durability == DurabilityArg::Power,
        commit_bytes: args.ours.commit_bytes.unwrap_or(0),
        null_storage: args.ours.null_storage,
    })
}

/// The store in the replica's directory.
fn store_options(args: &OurArgs) -> StoreOptions {
    let options = args.checksums.store_options();
    let extent_size = args.extent_size.unwrap_or(options.extent_size);
    StoreOptions { extent_size, tail: args.tail.clone(), ..options }
}

/// Threads and times of data connections.
pub(super) fn data_options(
    threads: &ThreadArgs,
    workers: u16,
    commit_interval: Duration,
) -> DataOptions {
    let defaults = DataOptions::default();
    DataOptions {
        reactors: threads.reactors.map_or(defaults.reactors, usize::from),
        reactor: dbs_reactor::Options { spin: threads.spin, ..defaults.reactor.clone() },
        workers: usize::from(threads.workers.unwrap_or(workers)),
        commit_interval,
        stop_grace: Duration::from_secs(2),
        ..defaults
    }
}

/// Directory of control sockets.
pub(super) fn runtime_dir() -> PathBuf {
    let path = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    dbs_control::runtime_dir(path("DBS_RUNTIME_DIR"), path("XDG_RUNTIME_DIR"))
}

/// Serves a sync agent of the replica in the present directory, which another process serves,
/// until a signal comes or that process ends.
///
/// # Errors
/// Why it cannot be served, or has ended.
pub fn sync_agent(args: &SyncAgentArgs, volume_name: &str) -> Result<()> {
    let dir = std::env::current_dir().map_err(|e| Error::io(e, "finding the directory"))?;
    shim::run_agent(&shim::AgentShim {
        dir,
        volume_name: volume_name.to_owned(),
        instance_name: args.replica_instance_name.clone(),
        listen: args.listen.clone(),
        receivers: args.listen_port_range,
        runtime_dir: runtime_dir(),
    })
}
