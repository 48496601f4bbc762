//! The commands for a volume.

use super::args::Globals;
use super::client_args::*;
use super::golang;
use super::output::{Failure, print, print_json, table};
use crate::client::{CloneOptions, Engine, RebuildOptions, SyncOptions, service_url};
use dbs_core::{Error, ErrorKind, Result};
use longhorn_wire::labels;
use longhorn_wire::proto::controller::ReplicaMode;
use longhorn_wire::proto::profilerrpc::Op;

/// From the port of a controller to that of its profiler.
const PROFILER_PORT: i32 = 20_001;
/// Ports up to this one are for controllers and replicas.
const PROFILER_PORT_MIN: i32 = 30_000;

/// Does what the command line says.
///
/// # Errors
/// Why not, in upstream's words.
pub fn run(command: &ClientCommand, globals: &Globals) -> std::result::Result<(), Failure> {
    let (doing, behind) = doing(command);
    let failed = |e: Error| {
        if behind { Failure::behind(doing, e) } else { Failure::beside(doing, e) }
    };
    block_on(act(command, globals)).map_err(failed)
}

/// Waits for what a command asks of others.
pub(super) fn block_on<T>(act: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|e| Error::io(e, "starting a runtime"))?.block_on(act)
}

/// What a command is called when it fails, and whether the reason stands behind that.
fn doing(command: &ClientCommand) -> (&'static str, bool) {
    use ClientCommand as C;
    let beside = match command {
        C::LsReplica(_) => "Error running ls command",
        C::AddReplica(_) => "Error running add replica command",
        C::RmReplica(_) => "Error running rm replica command",
        C::UpdateReplica(_) => "Error running update replica command",
        C::VerifyRebuildReplica(_) => "Error running verify rebuild replica command",
        C::ReplicaRebuildStatus(_) => "Error running replica rebuild status",
        C::StartWithReplicas(_) => "Error running start-with-replica command",
        C::Snapshots(snapshots) => {
            snapshots.command.as_ref().map_or("Error running snapshot command", doing_snapshot)
        }
        C::Hash(_) => "Error running hash snapshot command",
        C::HashCancel(_) => "Error running cancel hashing snapshot command",
        C::HashStatus(_) => "Error running snapshot hash status command",
        C::Expand(_) => "Error running expand command",
        C::Frontend(FrontendCommand::Start(_)) => "Error running frontend start command",
        C::Frontend(FrontendCommand::Shutdown(_)) => "Error running frontend shutdown command",
        C::Profiler(ProfilerCommand::Show(_)) => "Error running profiler show",
        C::Profiler(ProfilerCommand::Enable(_)) => "Error running profiler enable",
        C::Profiler(ProfilerCommand::Disable(_)) => "Error running profiler disable",
        C::SyncAgentServerReset(_) => "Error running sync-agent-server-reset command",
        C::Info(_) => return ("Error running info command", true),
        C::Journal(_) => return ("Error running journal command", true),
        C::UnmapMarkSnapChainRemoved(_) => {
            return ("Error running unmap-mark-snap-chain-removed command", true);
        }
    };
    (beside, false)
}

fn doing_snapshot(command: &SnapshotCommand) -> &'static str {
    use SnapshotCommand as C;
    match command {
        C::Create(_) => "Error running create snapshot command",
        C::Revert(_) => "Error running revert snapshot command",
        C::Ls(_) => "Error running ls snapshot command",
        C::Rm(_) => "Error running rm snapshot command",
        C::Purge(_) => "Error running purge snapshot command",
        C::PurgeStatus(_) => "Error running snapshot purge status command",
        C::Info(_) => "Error running snapshot info command",
        C::Clone(_) => "Error running snapshot clone command",
        C::CloneStatus(_) => "Error running snapshot clone status command",
        C::Hash(_) => "Error running hash snapshot command",
        C::HashCancel(_) => "Error running cancel hashing snapshot command",
        C::HashStatus(_) => "Error running snapshot hash status command",
    }
}

/// The controller of the volume.
pub(super) fn connect(globals: &Globals) -> Result<Engine> {
    Engine::new(&globals.url, &globals.volume_name, &globals.engine_instance_name)
}

async fn act(command: &ClientCommand, globals: &Globals) -> Result<()> {
    use ClientCommand as C;
    let engine = || connect(globals);
    match command {
        C::LsReplica(_) => list(&engine()?).await,
        C::AddReplica(args) => add(args, &engine).await,
        C::RmReplica(args) => {
            let replica = first(&args.operands, "replica address")?;
            engine()?.replica_delete(replica).await
        }
        C::UpdateReplica(args) => {
            let replica = first(&args.replica, "replica address")?;
            let mode = ReplicaMode::from_str_name(&args.mode).ok_or_else(|| {
                Error::invalid(format!("unsupported replica mode: {}", args.mode))
            })?;
            engine()?.replica_update(replica, mode).await.map(drop)
        }
        C::VerifyRebuildReplica(args) => {
            let replica = first(&args.replica, "replica address")?;
            engine()?.verify_rebuild(replica, &args.replica_instance_name).await
        }
        C::ReplicaRebuildStatus(_) => print_json(&engine()?.rebuild_status().await?),
        C::StartWithReplicas(args) => {
            first(&args.replicas, "replica address")?;
            let (size, current) = sizes(&args.sizes)?;
            engine()?.start_with_replicas(size, current, &args.replicas).await
        }
        C::Snapshots(snapshots) => match &snapshots.command {
            None => list_snapshots(&engine()?).await,
            Some(command) => snapshot(command, &engine).await,
        },
        C::Hash(args) => hash(args, &engine()?).await,
        C::HashCancel(args) => hash_cancel(args, &engine()?).await,
        C::HashStatus(args) => hash_status(args, &engine()?).await,
        C::Expand(args) => engine()?.expand(args.size).await,
        C::Info(_) => print_json(&engine()?.volume_get().await?),
        C::Frontend(FrontendCommand::Start(args)) => match args.operands.first() {
            Some(frontend) if !frontend.is_empty() => engine()?.frontend_start(frontend).await,
            _ => Err(Error::invalid("missing required parameter frontendName")),
        },
        C::Frontend(FrontendCommand::Shutdown(_)) => engine()?.frontend_shutdown().await,
        C::UnmapMarkSnapChainRemoved(args) => match (args.enable, args.disable) {
            (true, true) => {
                Err(Error::invalid("cannot enable and disable this option simultaneously"))
            }
            (false, false) => Err(Error::invalid("this option is not specified")),
            (enable, _) => engine()?.set_unmap_mark(enable).await,
        },
        C::Journal(args) => engine()?.journal(args.limit).await,
        C::Profiler(command) => profiler(command, &globals.url, &engine()?).await,
        C::SyncAgentServerReset(_) => engine()?.reset_agents().await,
    }
}

/// The first operand.
fn first<'a>(operands: &'a [String], what: &str) -> Result<&'a String> {
    operands.first().ok_or_else(|| Error::invalid(format!("{what} is required")))
}

async fn list(engine: &Engine) -> Result<()> {
    let mut rows = vec![["ADDRESS", "MODE", "CHAIN"].map(str::to_owned)];
    for replica in engine.replicas().await? {
        // One that cannot be asked is listed without its chain.
        let chain = match replica.mode {
            ReplicaMode::Err => None,
            _ => engine.chain(&replica).await.ok(),
        };
        let chain = chain.map(|chain| format!("[{}]", chain.join(" "))).unwrap_or_default();
        rows.push([replica.address, replica.mode.as_str_name().to_owned(), chain]);
    }
    print(&table(&rows))
}

fn sizes(args: &SizeArgs) -> Result<(i64, i64)> {
    let size = |text: &str, what: &str| match golang::size(text) {
        Ok(Some(size)) => i64::try_from(size).map_err(|_| no_size(text)),
        Ok(None) => Err(Error::invalid(format!("{what} is required"))),
        Err(_) => Err(no_size(text)),
    };
    Ok((size(&args.size, "size")?, size(&args.current_size, "current-size")?))
}

/// What upstream says of a text that is no size.
fn no_size(text: &str) -> Error {
    let suffix = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    Error::invalid(if suffix.is_empty() || suffix.len() == text.len() {
        format!("invalid size: '{text}'")
    } else {
        format!("invalid suffix: '{suffix}'")
    })
}

fn sync_options(args: &SyncArgs) -> SyncOptions {
    SyncOptions {
        http_timeout: args.file_sync_http_client_timeout,
        grpc_timeout: args.grpc_timeout_seconds,
    }
}

async fn add(args: &AddReplicaArgs, engine: &impl Fn() -> Result<Engine>) -> Result<()> {
    let address = first(&args.replica, "replica address")?;
    let engine = engine()?;
    let (size, current_size) = sizes(&args.sizes)?;
    let options = RebuildOptions {
        address: address.clone(),
        instance: args.replica_instance_name.clone(),
        size,
        current_size,
        fast_sync: args.fast_sync,
        sync: sync_options(&args.sync),
    };
    if args.restore {
        engine.add_restore_replica(&options).await
    } else {
        engine.add_replica(&options).await
    }
}

async fn snapshot(command: &SnapshotCommand, engine: &impl Fn() -> Result<Engine>) -> Result<()> {
    use SnapshotCommand as C;
    match command {
        C::Create(args) => {
            let labels = labels::parse(&args.label)
                .map_err(|why| Error::invalid(format!("cannot parse backup labels: {why}")))?;
            let name = args.name.first().map_or("", String::as_str);
            print(&engine()?.snapshot(name, labels, args.freeze_fs).await?)
        }
        C::Revert(args) => match first(&args.operands, "snapshot name")?.as_str() {
            "" => Err(Error::invalid("missing parameter for snapshot")),
            name => engine()?.revert(name).await,
        },
        C::Ls(_) => list_snapshots(&engine()?).await,
        C::Rm(args) => remove_snapshots(&args.operands, &engine()?).await,
        C::Purge(args) => {
            let purged = engine()?.purge(args.skip_if_in_progress).await;
            purged.map_err(|e| e.context("failed to purge snapshots"))
        }
        C::PurgeStatus(_) => print_json(&engine()?.purge_status().await?),
        C::Info(_) => print_json(&engine()?.snapshot_info().await?),
        C::Clone(args) => clone(args, &engine()?).await,
        C::CloneStatus(_) => print_json(&engine()?.clone_status().await?),
        C::Hash(args) => hash(args, &engine()?).await,
        C::HashCancel(args) => hash_cancel(args, &engine()?).await,
        C::HashStatus(args) => hash_status(args, &engine()?).await,
    }
}

async fn list_snapshots(engine: &Engine) -> Result<()> {
    let mut lines = vec!["ID".to_owned()];
    lines.extend(engine.snapshots().await?);
    print(&lines.join("\n"))
}

/// All of them, even if one cannot be removed.
async fn remove_snapshots(names: &[String], engine: &Engine) -> Result<()> {
    let mut last = Ok(());
    for name in names {
        if let Err(e) = engine.remove_snapshot(name).await {
            use std::io::Write;
            // Nowhere to report that to.
            let _ = writeln!(std::io::stderr(), "Failed to delete {name}: {e}");
            last = Err(e);
        }
    }
    last
}

async fn clone(args: &CloneArgs, engine: &Engine) -> Result<()> {
    let missing = |what: &str| Error::invalid(format!("missing required parameter --{what}"));
    if args.snapshot_name.is_empty() {
        return Err(missing("snapshot-name"));
    }
    let from = match args.from_controller_address.as_str() {
        "" => return Err(missing("from-controller-address")),
        address => {
            Engine::new(address, &args.from_volume_name, &args.from_controller_instance_name)?
        }
    };
    let options = CloneOptions {
        snapshot: args.snapshot_name.clone(),
        export_backing_image: args.export_backing_image_if_exist,
        sync: sync_options(&args.sync),
    };
    engine.clone_from(&from, &options).await
}

async fn hash(args: &HashArgs, engine: &Engine) -> Result<()> {
    let name = first(&args.snapshot, "snapshot name")?;
    let hashed = engine.hash(name, args.rehash).await;
    hashed.map_err(|e| e.context(format!("failed to hash snapshot {name}")))
}

async fn hash_cancel(args: &Operands, engine: &Engine) -> Result<()> {
    let name = first(&args.operands, "snapshot name")?;
    let canceled = engine.hash_cancel(name).await;
    canceled.map_err(|e| e.context(format!("failed to cancel hashing snapshot {name}")))
}

async fn hash_status(args: &Operands, engine: &Engine) -> Result<()> {
    let name = first(&args.operands, "snapshot name")?;
    print_json(&engine.hash_status(name).await?)
}

async fn profiler(command: &ProfilerCommand, url: &str, engine: &Engine) -> Result<()> {
    match command {
        ProfilerCommand::Show(_) => match engine.profiler(Op::Show, 0).await?.as_str() {
            "" => print("Profiler is not enabled"),
            address => print(&format!("Profiler enabled at Addr: *{address}")),
        },
        ProfilerCommand::Enable(args) => {
            let address = engine.profiler(Op::Enable, profiler_port(args.port, url)?).await?;
            print(&format!("Profiler enabled at Addr: *{address}"))
        }
        ProfilerCommand::Disable(_) => {
            engine.profiler(Op::Disable, 0).await?;
            print("Profiler is disabled!")
        }
    }
}

fn profiler_port(port: i32, url: &str) -> Result<i32> {
    match port {
        0 => {
            let port =
                service_url(url).rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
            let port = port.map(|port| i32::from(port) + PROFILER_PORT);
            port.ok_or_else(|| Error::invalid("failed to get grpc server port"))
        }
        1..PROFILER_PORT_MIN => Err(Error::new(
            ErrorKind::Invalid,
            "port number should be bigger than 30000. The reserved port number is [10000 - 30000]",
        )),
        port => Ok(port),
    }
}
