//! The commands: each its arguments and what it does.

pub mod attach;
pub mod bench;
pub mod clients;
pub mod export;
pub mod import;
pub mod mount;
pub mod repair;
pub mod scrub;
pub mod serve;
pub mod snapshot;
pub mod store;
pub mod stream;
pub mod tools;
pub mod volume;

use crate::args::{Cli, Command, SnapshotCommand, VolumeCommand};
use crate::context::Context;
use dbs_core::Result;
use std::process::ExitCode;

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
        Command::Completions(command) => command.run(),
        Command::Man(command) => command.run(context),
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
