//! The command line: which commands there are, and which code runs each.

use crate::commands::{
    attach, bench, clients, export, import, mount, repair, scrub, serve, snapshot, store, stream,
    tools, volume,
};
use crate::context::Context;
use crate::exit;
use crate::globals::Globals;
use clap::{CommandFactory, Parser, Subcommand};
use dbs_core::Result;
use std::process::ExitCode;

/// Thin volumes, snapshots and clones directly on one block device or file.
#[derive(Debug, Parser)]
#[command(name = "dbs", version, after_long_help = exit::HELP, max_term_width = 100)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub globals: Globals,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// All commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Format a new store
    Init(store::Init),
    /// Show facts about the store
    Info(store::Info),
    /// Grow the store in place
    Grow(store::Grow),
    /// Compact a store in a file and cut off its end
    Vacuum(store::Vacuum),
    /// Give an idle store a new uuid: to a copy of a store, which has the other's
    #[command(visible_alias = "reguid")]
    NewUuid(store::NewUuid),
    /// Work with volumes
    #[command(subcommand, visible_alias = "vol")]
    Volume(VolumeCommand),
    /// Work with snapshots
    #[command(subcommand, visible_alias = "snap")]
    Snapshot(SnapshotCommand),
    /// Check all metadata, changing nothing: exit code 3 for leaks, 4 for damage
    Check(store::Check),
    /// Compare all data with its checksums: exit code 4 for damage
    Scrub(scrub::Scrub),
    /// Repair a damaged store, or undo that: prints the plan, asks, saves the present metadata in a file
    Repair(repair::Repair),
    /// Print all metadata as JSON
    Dump(store::Dump),
    /// Write the metadata of a dump over what a store has, or into a new file
    RestoreMetadata(repair::RestoreMetadata),
    /// Copy an image of format 1.0.0 into a new store
    Upgrade(store::Upgrade),
    /// Write a snapshot, or the difference between two, as a stream
    Send(stream::SendSnapshot),
    /// Make a snapshot from a stream
    Receive(stream::Receive),
    /// Make a block device of a volume or snapshot
    Attach(attach::Attach),
    /// Remove the block device of a volume or snapshot
    Detach(attach::Detach),
    /// List volumes and snapshots that are block devices
    Attached(attach::List),
    /// Say what this machine lacks for block devices, and what works without
    Preflight(attach::Check),
    /// Show volumes and snapshots as files in a directory, for reading
    Mount(mount::Mount),
    /// Unmount what `dbs mount` has mounted
    Umount(mount::Umount),
    /// Serve the store's volumes over NBD, until SIGINT or SIGTERM
    Serve(Box<serve::Serve>),
    /// List who uses the volumes of a served store, or disconnect an NBD client
    Clients(clients::Clients),
    /// Measure how fast a store, an NBD export or a device is
    Bench(Box<bench::Bench>),
    /// Print the completion script of a shell
    Completions(tools::Completions),
    /// Write the manual pages, one for each command
    Man(tools::Man),
}

/// Commands on volumes.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create an empty volume
    Create(volume::Create),
    /// List all volumes
    #[command(visible_alias = "ls")]
    List(volume::List),
    /// Show one volume
    Show(volume::Show),
    /// Rename a volume
    #[command(visible_alias = "mv")]
    Rename(volume::Rename),
    /// Change the size of a volume
    Resize(volume::Resize),
    /// Delete a volume and its snapshots; clones of them live on
    #[command(visible_alias = "rm")]
    Delete(volume::Delete),
    /// Create a volume on a snapshot, in no time
    Clone(volume::CloneFrom),
    /// Make a clone independent of its origin, by copying what they share
    Flatten(volume::Flatten),
    /// List the clones made from a volume or snapshot
    Children(volume::Children),
    /// Create a volume from a raw image
    Import(import::Import),
    /// Write a volume or snapshot as a raw image
    Export(export::Export),
    /// Show where a volume or snapshot has data, zeros and holes
    Map(volume::Map),
    /// Show where a volume or snapshot differs from an earlier snapshot
    Diff(volume::Diff),
    /// Show the space of a volume or snapshot
    Du(volume::Du),
    /// Give the space of what was deleted and discarded back to the file system or device
    Trim(volume::Trim),
}

/// Commands on snapshots.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Take a snapshot of a volume
    Create(snapshot::Create),
    /// List the snapshots of a volume, oldest first
    #[command(visible_alias = "ls")]
    List(snapshot::List),
    /// Show one snapshot
    Show(snapshot::Show),
    /// Rename a snapshot
    #[command(visible_alias = "mv")]
    Rename(snapshot::Rename),
    /// Delete a snapshot
    #[command(visible_alias = "rm")]
    Delete(snapshot::Delete),
    /// Return a volume to a snapshot; what was written since is lost, later snapshots stay
    Rollback(snapshot::Rollback),
    /// Protect a snapshot from deletion
    Protect(snapshot::Protect),
    /// Take the protection away
    Unprotect(snapshot::Unprotect),
    /// Set labels with KEY=VALUE, remove them with KEY-
    Label(snapshot::Label),
}

/// Runs the command; most only succeed or fail.
///
/// # Errors
/// Those of the command.
pub fn run(cli: Cli) -> Result<ExitCode> {
    let context = &Context::new(cli.globals);
    match cli.command {
        Command::Init(command) => command.run(context),
        Command::Info(command) => command.run(context),
        Command::Grow(command) => command.run(context),
        Command::Vacuum(command) => command.run(context),
        Command::NewUuid(command) => command.run(context),
        Command::Volume(command) => run_volume(command, context),
        Command::Snapshot(command) => run_snapshot(command, context),
        Command::Check(command) => return command.run(context),
        Command::Scrub(command) => return command.run(context),
        Command::Repair(command) => return command.run(context),
        Command::RestoreMetadata(command) => command.run(context),
        Command::Dump(command) => command.run(context),
        Command::Upgrade(command) => command.run(context),
        Command::Send(command) => command.run(context),
        Command::Receive(command) => command.run(context),
        Command::Mount(command) => command.run(context),
        Command::Umount(command) => command.run(context),
        Command::Serve(command) => command.run(context),
        Command::Clients(command) => command.run(context),
        Command::Attach(command) => command.run(context),
        Command::Detach(command) => command.run(context),
        Command::Attached(command) => command.run(context),
        Command::Preflight(command) => command.run(context),
        Command::Bench(command) => command.run(context),
        Command::Completions(command) => command.run(&mut Cli::command()),
        Command::Man(command) => command.run(Cli::command(), context),
    }
    .map(|()| ExitCode::SUCCESS)
}

fn run_volume(command: VolumeCommand, context: &Context) -> Result<()> {
    match command {
        VolumeCommand::Create(command) => command.run(context),
        VolumeCommand::List(command) => command.run(context),
        VolumeCommand::Show(command) => command.run(context),
        VolumeCommand::Rename(command) => command.run(context),
        VolumeCommand::Resize(command) => command.run(context),
        VolumeCommand::Delete(command) => command.run(context),
        VolumeCommand::Clone(command) => command.run(context),
        VolumeCommand::Flatten(command) => command.run(context),
        VolumeCommand::Children(command) => command.run(context),
        VolumeCommand::Import(command) => command.run(context),
        VolumeCommand::Export(command) => command.run(context),
        VolumeCommand::Map(command) => command.run(context),
        VolumeCommand::Diff(command) => command.run(context),
        VolumeCommand::Du(command) => command.run(context),
        VolumeCommand::Trim(command) => command.run(context),
    }
}

fn run_snapshot(command: SnapshotCommand, context: &Context) -> Result<()> {
    match command {
        SnapshotCommand::Create(command) => command.run(context),
        SnapshotCommand::List(command) => command.run(context),
        SnapshotCommand::Show(command) => command.run(context),
        SnapshotCommand::Rename(command) => command.run(context),
        SnapshotCommand::Delete(command) => command.run(context),
        SnapshotCommand::Rollback(command) => command.run(context),
        SnapshotCommand::Protect(command) => command.run(context),
        SnapshotCommand::Unprotect(command) => command.run(context),
        SnapshotCommand::Label(command) => command.run(context),
    }
}
