//! The command `longhorn`.

pub mod args;
mod backing_image;
mod backup;
pub mod backup_args;
mod backup_store;
mod client;
pub mod client_args;
pub mod controller;
mod environment;
pub mod golang;
pub mod moves;
mod output;
mod replica;
mod replica_args;
mod restore_to_file;
mod serve;
mod system_backup;
mod version;

pub use args::{Cli, Command, Globals, TlsArgs};
pub use replica_args::ReplicaArgs;

use crate::process;
use clap::error::ErrorKind;
use dbs_service::log;
use output::Failure;
use std::ffi::OsString;
use std::process::ExitCode;

/// Commands of upstream that there are none of here.
const MISSING_COMMANDS: [&str; 2] = ["export-volume", "export"];

/// How `serve` ends if another machine writes its store, too: as `dbs` does. It is not to be started again.
const EXIT_ELSEWHERE: u8 = 14;

/// Why a command did not do what it should.
enum Failed {
    /// A process that serves, with its last line of log.
    Serving(String),
    /// A server whose store another machine writes, too.
    Elsewhere(String),
    /// A controller, whose exit code tells why.
    Controlling(process::Failed),
    /// A command, with upstream's.
    Command(Failure),
}

impl Failed {
    fn exit_code(&self) -> ExitCode {
        let code = match self {
            Self::Controlling(failed) => u8::try_from(failed.exit_code()).unwrap_or(1),
            Self::Elsewhere(_) => EXIT_ELSEWHERE,
            _ => 1,
        };
        ExitCode::from(code)
    }

    fn report(&self) {
        match self {
            Self::Serving(text) | Self::Elsewhere(text) => log::error("failed", &[("error", text)]),
            Self::Controlling(failed) => log::error("failed", &[("error", failed)]),
            Self::Command(failure) => failure.report(),
        }
    }
}

/// Runs the command line and says how it ended: 0, or 1 as upstream has it for all errors but one:
/// a controller without a good replica ends with 61. `serve`, which is not upstream's, has one of its own.
#[must_use]
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let (cli, variables) = match environment::parse(golang::double_dashes(args)) {
        Ok(parsed) => parsed,
        Err(e) => {
            // Nowhere to report that to.
            let _ = e.print();
            let asked = matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return if asked { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
    };
    exit(run(cli, &variables))
}

fn exit(ended: Result<(), Failed>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            failed.report();
            failed.exit_code()
        }
    }
}

fn run(cli: Cli, variables: &[(String, String)]) -> Result<(), Failed> {
    let globals = &cli.globals;
    let serving = |e: dbs_core::Error| Failed::Serving(e.to_string());
    use Command::{Controller, Replica, Serve, SyncAgent};
    let serves = matches!(cli.command, Controller(_) | Replica(_) | SyncAgent(_) | Serve(_));
    if serves {
        environment::announce(variables);
    }
    globals.tls.choose(serves).map_err(serving)?;
    match cli.command {
        Command::Controller(args) => {
            controller::serve(&args, &globals.engine_instance_name).map_err(Failed::Controlling)
        }
        Command::Replica(replica) => {
            replica::serve(&replica.replica, replica.store.as_deref(), &globals.volume_name)
                .map_err(serving)
        }
        Command::SyncAgent(args) => {
            replica::sync_agent(&args, &globals.volume_name).map_err(serving)
        }
        Command::ReplicaImport(args) => {
            moves::run_import(&args, &globals.volume_name).map_err(Failed::Command)
        }
        Command::ReplicaExport(args) => {
            moves::run_export(&args, &globals.volume_name).map_err(Failed::Command)
        }
        Command::Serve(args) => serve::serve(&args).map_err(|e| match e.kind() {
            dbs_core::ErrorKind::Elsewhere => Failed::Elsewhere(e.to_string()),
            _ => serving(e),
        }),
        Command::Version(args) => version::run(&args, globals).map_err(Failed::Command),
        Command::Backups(backups) => {
            backup::run(&backups.command, globals).map_err(Failed::Command)
        }
        Command::SystemBackup(backups) => {
            system_backup::run(&backups.command).map_err(Failed::Command)
        }
        Command::Client(command) => client::run(&command, globals).map_err(Failed::Command),
        Command::Other(args) => Err(Failed::Serving(other(&args))),
    }
}

/// Why a command that is not ours is not.
fn other(args: &[OsString]) -> String {
    let name = args.first().map(|name| name.to_string_lossy()).unwrap_or_default();
    if MISSING_COMMANDS.contains(&&*name) {
        format!("`{name}` is not supported: run it from upstream's `longhorn`")
    } else {
        format!("unrecognized command: {name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_commands_are_told_from_typing_errors() {
        let say = |name: &str| other(&[OsString::from(name)]);
        assert!(say("export").contains("not supported"));
        assert_eq!(say("snapsots"), "unrecognized command: snapsots");
    }
}
