//! The arguments of the commands for a volume: names and defaults are upstream's.
//!
//! Positional arguments that must be there are asked for by the commands themselves: upstream's take
//! any number and use the first.

use super::golang::BooleanOption as _;
use clap::{Args, Subcommand};

/// Commands for a volume, which go to its controller at `--url`.
#[derive(Debug, Subcommand)]
pub enum ClientCommand {
    /// List the replicas of the volume
    #[command(visible_alias = "ls")]
    LsReplica(NoArgs),
    /// Add a replica and rebuild it; start the volume with it if the volume has no replica
    #[command(visible_alias = "add")]
    AddReplica(AddReplicaArgs),
    /// Remove a replica from the volume
    #[command(visible_alias = "rm")]
    RmReplica(Operands),
    /// Set the mode of a replica
    #[command(visible_alias = "update")]
    UpdateReplica(UpdateReplicaArgs),
    /// Check a replica after its rebuild, and use it from then on
    #[command(visible_alias = "verify-rebuild")]
    VerifyRebuildReplica(VerifyRebuildArgs),
    /// Print the progress of rebuilds
    #[command(visible_alias = "rebuild-status")]
    ReplicaRebuildStatus(NoArgs),
    /// Start the volume with these replicas
    #[command(visible_alias = "start")]
    StartWithReplicas(StartArgs),
    /// Work with the snapshots of the volume; without a subcommand, list them
    #[command(visible_alias = "snapshot")]
    Snapshots(Snapshots),
    /// Compute the checksum of a snapshot
    Hash(HashArgs),
    /// Stop computing the checksum of a snapshot
    HashCancel(Operands),
    /// Print the checksum of a snapshot on each replica
    HashStatus(Operands),
    /// Make the volume larger
    Expand(ExpandArgs),
    /// Print the state of the volume
    Info(NoArgs),
    /// Start or stop the frontend of the volume
    #[command(subcommand)]
    Frontend(FrontendCommand),
    /// Choose whether an unmap marks the snapshots that it reaches as removed
    #[command(visible_alias = "unmap-mark-snap")]
    UnmapMarkSnapChainRemoved(UnmapMarkArgs),
    /// Make the controller log its last requests
    Journal(JournalArgs),
    /// Start, stop or show the profiler of the process at `--url`
    #[command(subcommand)]
    Profiler(ProfilerCommand),
    /// Reset the state of a backup's restoration in all sync agents
    SyncAgentServerReset(NoArgs),
}

/// Arguments that are taken and ignored.
#[derive(Debug, Args)]
pub struct NoArgs {
    #[arg(hide = true)]
    ignored: Vec<String>,
}

/// One name or address; upstream takes more at times.
#[derive(Debug, Args)]
pub struct Operands {
    /// Address `tcp://HOST:PORT` of a replica, or name of a snapshot
    #[arg(value_name = "NAME")]
    pub operands: Vec<String>,
}

/// How files are transferred.
#[derive(Debug, Args)]
pub struct SyncArgs {
    /// Seconds that a request between the sender and the receiver of a file may take
    #[arg(long, value_name = "SECONDS", default_value_t = 5, allow_negative_numbers = true)]
    pub file_sync_http_client_timeout: i32,
    /// Seconds that the whole transfer may take; 0 stands for 24 hours
    #[arg(long, value_name = "SECONDS", default_value_t = 0, allow_negative_numbers = true)]
    pub grpc_timeout_seconds: i64,
}

/// `add-replica`.
#[derive(Debug, Args)]
pub struct AddReplicaArgs {
    /// Address of the replica
    #[arg(value_name = "tcp://HOST:PORT")]
    pub replica: Vec<String>,
    /// The volume is being restored from a backup, and the restoration fills the replica
    #[arg(long, boolean = "false")]
    pub restore: bool,
    /// Sizes of the volume.
    #[command(flatten)]
    pub sizes: SizeArgs,
    /// Do not transfer files whose checksums are equal
    #[arg(long, boolean = "false")]
    pub fast_sync: bool,
    /// Upstream takes and ignores it, too
    #[arg(long, hide = true, boolean = "false")]
    pub sync_local: bool,
    /// How files are transferred.
    #[command(flatten)]
    pub sync: SyncArgs,
    /// Name of the replica's instance; a replica with another instance name refuses the request
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub replica_instance_name: String,
}

/// Sizes of a volume.
#[derive(Debug, Args)]
pub struct SizeArgs {
    /// Size the volume is to have: bytes, or 42kb, 42mb, 42gb
    #[arg(long, default_value = "", hide_default_value = true)]
    pub size: String,
    /// Size that the volume has now
    #[arg(long, value_name = "SIZE", default_value = "", hide_default_value = true)]
    pub current_size: String,
}

/// `update-replica`.
#[derive(Debug, Args)]
pub struct UpdateReplicaArgs {
    /// Address of the replica
    #[arg(value_name = "tcp://HOST:PORT")]
    pub replica: Vec<String>,
    /// New mode: RW or ERR
    #[arg(long, default_value = "", hide_default_value = true)]
    pub mode: String,
}

/// `verify-rebuild-replica`.
#[derive(Debug, Args)]
pub struct VerifyRebuildArgs {
    /// Address of the replica
    #[arg(value_name = "tcp://HOST:PORT")]
    pub replica: Vec<String>,
    /// Name of the replica's instance; a replica with another instance name refuses the request
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub replica_instance_name: String,
}

/// `start-with-replicas`.
#[derive(Debug, Args)]
pub struct StartArgs {
    /// Addresses of the replicas
    #[arg(value_name = "tcp://HOST:PORT")]
    pub replicas: Vec<String>,
    /// Sizes of the volume.
    #[command(flatten)]
    pub sizes: SizeArgs,
}

/// `snapshots`.
#[derive(Debug, Args)]
pub struct Snapshots {
    /// What to do with them.
    #[command(subcommand)]
    pub command: Option<SnapshotCommand>,
}

/// `snapshots ...`.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Take a snapshot and print its name; without NAME, the command chooses a name
    Create(CreateArgs),
    /// Return the volume to a snapshot; the frontend must be down
    Revert(Operands),
    /// List the snapshots in the chain of the head that all replicas have
    Ls(NoArgs),
    /// Mark snapshots as removed
    Rm(Operands),
    /// Start to delete the snapshots that are marked as removed
    Purge(PurgeArgs),
    /// Print the progress of the purge
    PurgeStatus(NoArgs),
    /// Print all snapshots, with the parent and children of each
    Info(NoArgs),
    /// Fill this volume with a snapshot of another volume
    Clone(CloneArgs),
    /// Print the progress of the clone
    CloneStatus(NoArgs),
    /// Compute the checksum of a snapshot
    Hash(HashArgs),
    /// Stop computing the checksum of a snapshot
    HashCancel(Operands),
    /// Print the checksum of a snapshot on each replica
    HashStatus(Operands),
}

/// `snapshots create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Name of the snapshot
    #[arg(value_name = "NAME")]
    pub name: Vec<String>,
    /// A label of the snapshot; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Freeze the file system on the volume while the snapshot is taken
    #[arg(long, boolean = "false")]
    pub freeze_fs: bool,
}

/// `snapshots purge`.
#[derive(Debug, Args)]
pub struct PurgeArgs {
    /// Succeed if a purge is in progress already
    #[arg(long, boolean = "false")]
    pub skip_if_in_progress: bool,
}

/// `snapshots clone`.
#[derive(Debug, Args)]
pub struct CloneArgs {
    /// Name of the snapshot
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub snapshot_name: String,
    /// Address of the controller of the snapshot's volume
    #[arg(long, value_name = "tcp://HOST:PORT", default_value = "", hide_default_value = true)]
    pub from_controller_address: String,
    /// Name of the snapshot's volume; a controller of another volume refuses the request
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub from_volume_name: String,
    /// Name of that controller's instance; a controller with another instance name refuses the request
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub from_controller_instance_name: String,
    /// Also clone the content of a backing image
    #[arg(long, boolean = "false")]
    pub export_backing_image_if_exist: bool,
    /// How files are transferred.
    #[command(flatten)]
    pub sync: SyncArgs,
}

/// `snapshots hash`.
#[derive(Debug, Args)]
pub struct HashArgs {
    /// Name of the snapshot
    #[arg(value_name = "NAME")]
    pub snapshot: Vec<String>,
    /// Compute the checksum even if the snapshot has one
    #[arg(long, boolean = "false")]
    pub rehash: bool,
}

/// `expand`.
#[derive(Debug, Args)]
pub struct ExpandArgs {
    /// New size of the volume in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 0, allow_negative_numbers = true)]
    pub size: i64,
    #[arg(hide = true)]
    ignored: Vec<String>,
}

/// `frontend ...`.
#[derive(Debug, Subcommand)]
pub enum FrontendCommand {
    /// Start the frontend
    Start(Operands),
    /// Stop the frontend
    Shutdown(NoArgs),
}

/// `unmap-mark-snap-chain-removed`.
#[derive(Debug, Args)]
pub struct UnmapMarkArgs {
    /// An unmap marks the snapshots that it reaches as removed
    #[arg(long, boolean = "false")]
    pub enable: bool,
    /// An unmap marks no snapshots as removed
    #[arg(long, boolean = "false")]
    pub disable: bool,
}

/// `journal`.
#[derive(Debug, Args)]
pub struct JournalArgs {
    /// Number of requests to log; 0 stands for all
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub limit: i64,
}

/// `profiler ...`.
#[derive(Debug, Subcommand)]
pub enum ProfilerCommand {
    /// Print the port on which the profiler listens
    Show(NoArgs),
    /// Start the profiler
    Enable(ProfilerEnableArgs),
    /// Stop the profiler
    Disable(NoArgs),
}

/// `profiler enable`.
#[derive(Debug, Args)]
pub struct ProfilerEnableArgs {
    /// Port on which the profiler is to listen, above 30000; by default the port of `--url` plus 20001
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub port: i32,
}
