//! The arguments of `longhorn backups`: names and defaults are upstream's.

use super::client_args::{NoArgs, Operands};
use super::golang::BooleanOption as _;
use clap::{Args, Subcommand};

/// `backups`.
#[derive(Debug, Args)]
pub struct Backups {
    /// What to do with them.
    #[command(subcommand)]
    pub command: BackupCommand,
}

/// `backups ...`.
#[derive(Debug, Subcommand)]
pub enum BackupCommand {
    /// Start to back up a snapshot of the volume, and print the name of the backup as JSON
    Create(CreateArgs),
    /// Print the progress of a backup
    Status(StatusArgs),
    /// Start to restore a backup to the volume; the frontend must be down
    Restore(RestoreArgs),
    /// Print the progress of the restore on each replica
    RestoreStatus(NoArgs),
    /// Restore a backup to an image file
    RestoreToFile(RestoreToFileArgs),
    /// List the volumes of a backup store and their backups
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Delete a backup; or a volume with all its backups
    #[command(visible_aliases = ["rm", "delete"])]
    Remove(RemoveArgs),
    /// Print what a backup store says of a backup
    Inspect(Operands),
    /// Print what a backup store says of a volume
    InspectVolume(Operands),
    /// Print when the facts of a backup, or of a volume, were last written
    Head(Operands),
    /// Unmount all backup stores that are mounted
    CleanupAllMounts(NoArgs),
    /// List the backing images in a backup store
    LsBackingImage(Operands),
    /// Print what a backup store says of a backing image
    InspectBackingImage(Operands),
    /// Delete the backup of a backing image
    RmBackingImage(Operands),
}

/// `system-backup`.
#[derive(Debug, Args)]
pub struct SystemBackups {
    /// What to do with them.
    #[command(subcommand)]
    pub command: SystemCommand,
}

/// `system-backup ...`.
#[derive(Debug, Subcommand)]
pub enum SystemCommand {
    /// Keep a zip file of Longhorn's settings: PATH URL
    Upload(UploadArgs),
    /// Write a zip file to the disk: URL PATH
    Download(Operands),
    /// Print what a backup store says of a zip file
    GetConfig(Operands),
    /// List the zip files in a backup store
    List(Operands),
    /// Delete a zip file
    Delete(Operands),
}

/// `system-backup upload`.
#[derive(Debug, Args)]
pub struct UploadArgs {
    /// The file, and STORE/backupstore/system-backups/VERSION/NAME
    #[arg(value_names = ["PATH", "URL"], num_args = 0..)]
    pub operands: Vec<String>,
    /// Commit of Longhorn
    #[arg(long, default_value = "", hide_default_value = true)]
    pub git_commit: String,
    /// Image of Longhorn's manager
    #[arg(long, default_value = "", hide_default_value = true)]
    pub manager_image: String,
    /// Image of Longhorn's engine
    #[arg(long, default_value = "", hide_default_value = true)]
    pub engine_image: String,
}

/// `backups create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Name of the snapshot
    #[arg(value_name = "SNAPSHOT")]
    pub snapshot: Vec<String>,
    /// The backup store, as s3://BUCKET@REGION/PATH/ or vfs:///PATH/
    #[arg(long, value_name = "URL", default_value = "", hide_default_value = true)]
    pub dest: String,
    /// Name of the backing image of the volume
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub backing_image_name: String,
    /// SHA-512 of that image
    #[arg(long, value_name = "CHECKSUM", default_value = "", hide_default_value = true)]
    pub backing_image_checksum: String,
    /// A label of the backup; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Name of the backup; by default a random one
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub backup_name: String,
    /// How blocks are compressed: lz4, gzip or none
    #[arg(long, value_name = "METHOD", default_value = "lz4")]
    pub compression_method: String,
    /// Blocks in flight at once
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub concurrent_limit: i32,
    /// Storage class of the volume's claim
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub storage_class_name: String,
    /// Size of the backup's blocks in MiB
    #[arg(long, value_name = "MIB", default_value_t = 2, allow_negative_numbers = true)]
    pub backup_block_size: i64,
}

/// `backups status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Name of the backup
    #[arg(value_name = "BACKUP")]
    pub backup: Vec<String>,
    /// Address of the replica that makes it; by default all are asked
    #[arg(long, value_name = "tcp://HOST:PORT", default_value = "", hide_default_value = true)]
    pub replica: String,
    /// Name of the replica's instance; a replica with another instance name refuses the request
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub replica_instance_name: String,
}

/// `backups restore`.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// URL of the backup
    #[arg(value_name = "URL")]
    pub backup: Vec<String>,
    /// Blocks in flight at once, of each replica
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub concurrent_limit: i32,
    /// The volume is encrypted, and 16 MiB larger than the volume of the backup
    #[arg(long, boolean = "false")]
    pub need_correct_encrypted_volume_size: bool,
}

/// `backups restore-to-file`.
#[derive(Debug, Args)]
pub struct RestoreToFileArgs {
    /// URL of the backup
    #[arg(value_name = "URL")]
    pub backup: Vec<String>,
    /// The backing image of the volume, as a qcow2 file; or the directory with that file alone
    #[arg(long, value_name = "PATH", default_value = "", hide_default_value = true)]
    pub backing_file: String,
    /// The file to write; by default volume.FORMAT
    #[arg(long, value_name = "PATH", default_value = "", hide_default_value = true)]
    pub output_file: String,
    /// Its format: qcow2 or raw
    #[arg(long, value_name = "FORMAT", default_value = "qcow2")]
    pub output_format: String,
    /// Blocks in flight at once
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true)]
    pub concurrent_limit: i32,
}

/// `backups ls`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// URL of the backup store
    #[arg(value_name = "URL")]
    pub url: Vec<String>,
    /// Only this volume
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub volume: String,
    /// Only volumes, without their backups
    #[arg(long, boolean = "false")]
    pub volume_only: bool,
}

/// `backups rm`.
#[derive(Debug, Args)]
pub struct RemoveArgs {
    /// URL of the backup; with --volume, of the backup store
    #[arg(value_name = "URL")]
    pub url: Vec<String>,
    /// Delete this volume with all its backups
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub volume: String,
}
