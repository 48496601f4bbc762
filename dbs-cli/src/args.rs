//! The command line: which commands there are, and which code runs each.

use crate::commands::{
    attach, backup, bench, clients, doctor, encryption, export, import, mount, repair, scrub,
    serve, snapshot, store, stream, tools, top, volume,
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

/// All commands. The doc comment of each command's arguments is its help text.
#[derive(Debug, Subcommand)]
pub enum Command {
    Init(store::Init),
    Info(store::Info),
    Grow(store::Grow),
    Vacuum(store::Vacuum),
    #[command(visible_alias = "reguid")]
    NewUuid(store::NewUuid),
    /// Work with volumes
    #[command(subcommand, visible_alias = "vol")]
    Volume(VolumeCommand),
    /// Work with snapshots
    #[command(subcommand, visible_alias = "snap")]
    Snapshot(SnapshotCommand),
    Check(store::Check),
    Scrub(scrub::Scrub),
    Repair(repair::Repair),
    Dump(store::Dump),
    RestoreMetadata(repair::RestoreMetadata),
    Upgrade(store::Upgrade),
    Send(stream::SendSnapshot),
    Receive(stream::Receive),
    /// Back up snapshots to S3, Azure, a directory, NFS or SMB, and restore them
    #[command(subcommand)]
    Backup(BackupCommand),
    Attach(attach::Attach),
    Detach(attach::Detach),
    Attached(attach::List),
    Preflight(attach::Check),
    Doctor(doctor::Doctor),
    Mount(mount::Mount),
    Umount(mount::Umount),
    Serve(Box<serve::Serve>),
    Clients(clients::Clients),
    Top(top::Top),
    Bench(Box<bench::Bench>),
    Completions(tools::Completions),
    Man(tools::Man),
}

/// Commands on volumes.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    Create(volume::Create),
    #[command(visible_alias = "ls")]
    List(volume::List),
    Show(volume::Show),
    #[command(visible_alias = "mv")]
    Rename(volume::Rename),
    Resize(volume::Resize),
    Set(volume::Set),
    Unlock(encryption::Unlock),
    Lock(encryption::Lock),
    Rekey(encryption::Rekey),
    #[command(visible_alias = "rm")]
    Delete(volume::Delete),
    Clone(volume::CloneFrom),
    Flatten(volume::Flatten),
    Children(volume::Children),
    Import(import::Import),
    Export(export::Export),
    Map(volume::Map),
    Diff(volume::Diff),
    Du(volume::Du),
    Trim(volume::Trim),
    Compress(volume::Compress),
}

/// Commands on snapshots.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    Create(snapshot::Create),
    #[command(visible_alias = "ls")]
    List(snapshot::List),
    Show(snapshot::Show),
    #[command(visible_alias = "mv")]
    Rename(snapshot::Rename),
    #[command(visible_alias = "rm")]
    Delete(snapshot::Delete),
    Rollback(snapshot::Rollback),
    Protect(snapshot::Protect),
    Unprotect(snapshot::Unprotect),
    Label(snapshot::Label),
}

/// Commands on backups.
#[derive(Debug, Subcommand)]
pub enum BackupCommand {
    Create(backup::Create),
    #[command(visible_alias = "ls")]
    List(backup::List),
    #[command(visible_alias = "inspect")]
    Show(backup::Show),
    Restore(backup::Restore),
    Mount(backup::Mount),
    Verify(backup::Verify),
    #[command(visible_alias = "rm")]
    Delete(backup::Delete),
    Prune(backup::Prune),
    Init(backup::Init),
    Collect(backup::Collect),
    #[command(subcommand)]
    Key(backup::KeyCommand),
}

/// Runs the command; most only succeed or fail.
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
        Command::Doctor(command) => return command.run(context),
        Command::Scrub(command) => return command.run(context),
        Command::Repair(command) => return command.run(context),
        Command::RestoreMetadata(command) => command.run(context),
        Command::Dump(command) => command.run(context),
        Command::Upgrade(command) => command.run(context),
        Command::Send(command) => command.run(context),
        Command::Receive(command) => command.run(context),
        Command::Backup(command) => return run_backup(command, context),
        Command::Mount(command) => command.run(context),
        Command::Umount(command) => command.run(context),
        Command::Serve(command) => command.run(context),
        Command::Clients(command) => command.run(context),
        Command::Top(command) => command.run(context),
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
        VolumeCommand::Set(command) => command.run(context),
        VolumeCommand::Unlock(command) => command.run(context),
        VolumeCommand::Lock(command) => command.run(context),
        VolumeCommand::Rekey(command) => command.run(context),
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
        VolumeCommand::Compress(command) => command.run(context),
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

fn run_backup(command: BackupCommand, context: &Context) -> Result<ExitCode> {
    match command {
        BackupCommand::Create(command) => command.run(context),
        BackupCommand::List(command) => command.run(context),
        BackupCommand::Show(command) => command.run(context),
        BackupCommand::Restore(command) => command.run(context),
        BackupCommand::Mount(command) => command.run(context),
        BackupCommand::Verify(command) => return command.run(context),
        BackupCommand::Delete(command) => command.run(context),
        BackupCommand::Prune(command) => command.run(context),
        BackupCommand::Init(command) => command.run(context),
        BackupCommand::Collect(command) => command.run(context),
        BackupCommand::Key(command) => command.run(context),
    }
    .map(|()| ExitCode::SUCCESS)
}
