//! The arguments of the commands that steer a volume: names and defaults are upstream's.
//!
//! Positional arguments that must be there are asked for by the commands themselves: upstream's take
//! any number and use the first.

use super::golang::BooleanOption as _;
use clap::{Args, Subcommand};

/// Commands that steer a volume through its controller, at `--url`.
#[derive(Debug, Subcommand)]
pub enum ClientCommand {
    /// List the replicas of the volume
    #[command(visible_alias = "ls")]
    LsReplica(NoArgs),
    /// Add a replica and fill it, or start the volume with it
    #[command(visible_alias = "add")]
    AddReplica(AddReplicaArgs),
    /// Remove a replica from the volume
    #[command(visible_alias = "rm")]
    RmReplica(Operands),
    /// Set the mode of a replica
    #[command(visible_alias = "update")]
    UpdateReplica(UpdateReplicaArgs),
    /// Have a replica that was filled checked and used
    #[command(visible_alias = "verify-rebuild")]
    VerifyRebuildReplica(VerifyRebuildArgs),
    /// Print how far replicas are with being filled
    #[command(visible_alias = "rebuild-status")]
    ReplicaRebuildStatus(NoArgs),
    /// Start the volume with these replicas
    #[command(visible_alias = "start")]
    StartWithReplicas(StartArgs),
    /// Snapshots of the volume; by itself, list them
    #[command(visible_alias = "snapshot")]
    Snapshots(Snapshots),
    /// Compute the checksum of a snapshot
    Hash(HashArgs),
    /// End computing it
    HashCancel(Operands),
    /// Print the checksums of a snapshot
    HashStatus(Operands),
    /// Make the volume larger
    Expand(ExpandArgs),
    /// Print how the volume is
    Info(NoArgs),
    /// The frontend of the volume
    #[command(subcommand)]
    Frontend(FrontendCommand),
    /// Whether an unmap marks the snapshots it reaches as removed
    #[command(visible_alias = "unmap-mark-snap")]
    UnmapMarkSnapChainRemoved(UnmapMarkArgs),
    /// Have the controller log its last requests
    Journal(JournalArgs),
    /// The profiler of the process at `--url`
    #[command(subcommand)]
    Profiler(ProfilerCommand),
    /// Have all sync agents forget the restoration of a backup
    SyncAgentServerReset(NoArgs),
}

/// Arguments that are taken and ignored.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct NoArgs {
    #[arg(hide = true)]
    ignored: Vec<String>,
}

/// One name or address; upstream takes more at times.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct Operands {
    /// Address `tcp://HOST:PORT` of a replica, or name of a snapshot
    #[arg(value_name = "NAME")]
    pub operands: Vec<String>,
}

/// How files are transferred.
#[derive(Debug, Args)]
pub struct SyncArgs {
    /// Seconds a request between a sender and a receiver may take
    #[arg(long, value_name = "SECONDS", default_value_t = 5, allow_negative_numbers = true)]
    pub file_sync_http_client_timeout: i32,
    /// Seconds the whole may take; 24 hours if 0
    #[arg(long, value_name = "SECONDS", default_value_t = 0, allow_negative_numbers = true)]
    pub grpc_timeout_seconds: i64,
}

/// `add-replica`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct AddReplicaArgs {
    /// Address of the replica
    #[arg(value_name = "tcp://HOST:PORT")]
    pub replica: Vec<String>,
    /// The volume is one that a backup is restored to, which fills the replica
    #[arg(long, boolean = "false")]
    pub restore: bool,
    /// Sizes of the volume.
    #[command(flatten)]
    pub sizes: SizeArgs,
    /// Leave files of equal checksum as they are
    #[arg(long, boolean = "false")]
    pub fast_sync: bool,
    /// Upstream takes and ignores it, too
    #[arg(long, hide = true, boolean = "false")]
    pub sync_local: bool,
    /// How files are transferred.
    #[command(flatten)]
    pub sync: SyncArgs,
    /// Name of the replica's instance, which refuses if it is another
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub replica_instance_name: String,
}

/// Sizes of a volume.
#[derive(Debug, Args)]
pub struct SizeArgs {
    /// Size the volume is to have: bytes, or 42kb, 42mb, 42gb
    #[arg(long, default_value = "", hide_default_value = true)]
    pub size: String,
    /// Size it has
    #[arg(long, value_name = "SIZE", default_value = "", hide_default_value = true)]
    pub current_size: String,
}

/// `update-replica`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct UpdateReplicaArgs {
    /// Address of the replica
    #[arg(value_name = "tcp://HOST:PORT")]
    pub replica: Vec<String>,
    /// RW or ERR; the controller takes no other
    #[arg(long, default_value = "", hide_default_value = true)]
    pub mode: String,
}

/// `verify-rebuild-replica`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct VerifyRebuildArgs {
    /// Address of the replica
    #[arg(value_name = "tcp://HOST:PORT")]
    pub replica: Vec<String>,
    /// Name of the replica's instance, which refuses if it is another
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub replica_instance_name: String,
}

/// `start-with-replicas`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
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
#[command(args_override_self = true)]
pub struct Snapshots {
    /// What to do with them.
    #[command(subcommand)]
    pub command: Option<SnapshotCommand>,
}

/// `snapshots ...`.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Take a snapshot and print its name, which is made up if not given
    Create(CreateArgs),
    /// Go back to a snapshot; the frontend must be down
    Revert(Operands),
    /// List the snapshots under the head that all replicas have
    Ls(NoArgs),
    /// Mark snapshots as removed
    Rm(Operands),
    /// Begin to remove what is marked as removed
    Purge(PurgeArgs),
    /// Print how far that is
    PurgeStatus(NoArgs),
    /// Print all snapshots and how they are related
    Info(NoArgs),
    /// Fill this volume with a snapshot of another
    Clone(CloneArgs),
    /// Print how far that is
    CloneStatus(NoArgs),
    /// Compute the checksum of a snapshot
    Hash(HashArgs),
    /// End computing it
    HashCancel(Operands),
    /// Print the checksums of a snapshot
    HashStatus(Operands),
}

/// `snapshots create`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct CreateArgs {
    /// Name of the snapshot
    #[arg(value_name = "NAME")]
    pub name: Vec<String>,
    /// A label of the snapshot; may be given again
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Freeze the file system on the volume meanwhile
    #[arg(long, boolean = "false")]
    pub freeze_fs: bool,
}

/// `snapshots purge`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct PurgeArgs {
    /// A purge that goes on already is no error
    #[arg(long, boolean = "false")]
    pub skip_if_in_progress: bool,
}

/// `snapshots clone`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct CloneArgs {
    /// Name of the snapshot
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub snapshot_name: String,
    /// Address of the controller of the volume it is of
    #[arg(long, value_name = "tcp://HOST:PORT", default_value = "", hide_default_value = true)]
    pub from_controller_address: String,
    /// Name of that volume, which refuses if it is another
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub from_volume_name: String,
    /// Name of that controller's instance, likewise
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub from_controller_instance_name: String,
    /// Clone what is in a backing image as well
    #[arg(long, boolean = "false")]
    pub export_backing_image_if_exist: bool,
    /// How files are transferred.
    #[command(flatten)]
    pub sync: SyncArgs,
}

/// `snapshots hash`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct HashArgs {
    /// Name of the snapshot
    #[arg(value_name = "NAME")]
    pub snapshot: Vec<String>,
    /// Even if there is one
    #[arg(long, boolean = "false")]
    pub rehash: bool,
}

/// `expand`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct ExpandArgs {
    /// Bytes the volume is to have
    #[arg(long, value_name = "BYTES", default_value_t = 0, allow_negative_numbers = true)]
    pub size: i64,
    #[arg(hide = true)]
    ignored: Vec<String>,
}

/// `frontend ...`.
#[derive(Debug, Subcommand)]
pub enum FrontendCommand {
    /// Start it
    Start(Operands),
    /// End it
    Shutdown(NoArgs),
}

/// `unmap-mark-snap-chain-removed`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct UnmapMarkArgs {
    /// It does
    #[arg(long, boolean = "false")]
    pub enable: bool,
    /// It does not
    #[arg(long, boolean = "false")]
    pub disable: bool,
}

/// `journal`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct JournalArgs {
    /// Most requests; all if 0
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub limit: i64,
}

/// `profiler ...`.
#[derive(Debug, Subcommand)]
pub enum ProfilerCommand {
    /// Print where it listens
    Show(NoArgs),
    /// Start it
    Enable(ProfilerEnableArgs),
    /// End it
    Disable(NoArgs),
}

/// `profiler enable`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct ProfilerEnableArgs {
    /// Where it is to listen, above 30000; by default that of `--url` and 20001
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub port: i32,
}
