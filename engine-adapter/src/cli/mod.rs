//! The command `longhorn`, which is also `dbs replica`.

pub mod args;
pub mod golang;
mod replica;
pub mod version;

pub use args::{Cli, Command, ReplicaArgs};
pub use replica::serve;

use clap::Parser;
use clap::error::ErrorKind;
use dbs_server::log;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

/// Commands of upstream that belong to its engine.
const ENGINE_COMMANDS: [&str; 30] = [
    "controller",
    "sync-agent-server-reset",
    "start-with-replicas",
    "start",
    "add-replica",
    "add",
    "verify-rebuild-replica",
    "verify-rebuild",
    "ls-replica",
    "ls",
    "rm-replica",
    "rm",
    "update-replica",
    "update",
    "replica-rebuild-status",
    "rebuild-status",
    "snapshots",
    "snapshot",
    "backups",
    "backup",
    "expand",
    "unmap-mark-snap-chain-removed",
    "unmap-mark-snap",
    "journal",
    "info",
    "frontend",
    "system-backup",
    "profiler",
    "export-volume",
    "export",
];

/// Runs the command line and says how it ended: 0, or 1 as upstream has it for all errors.
#[must_use]
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(golang::double_dashes(args)) {
        Ok(cli) => cli,
        Err(e) => {
            // Nowhere to report that to.
            let _ = e.print();
            let asked = matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return if asked { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            log::error("failed", &[("error", &text)]);
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), String> {
    let globals = &cli.globals;
    match cli.command {
        Command::Replica(replica) => {
            serve(&replica.replica, replica.store.as_deref(), &globals.volume_name)
                .map_err(|e| e.to_string())
        }
        Command::SyncAgent(args) => {
            replica::sync_agent(&args, &globals.volume_name).map_err(|e| e.to_string())
        }
        Command::Version(args) => {
            let engine = version::Engine {
                url: &globals.url,
                volume_name: &globals.volume_name,
                instance_name: &globals.engine_instance_name,
            };
            print(&version::versions((!args.client_only).then_some(&engine))?)
        }
        Command::Other(args) => Err(other(&args)),
    }
}

fn print(text: &str) -> Result<(), String> {
    writeln!(std::io::stdout(), "{text}").map_err(|e| format!("printing: {e}"))
}

/// Why a command that is not ours is not.
fn other(args: &[OsString]) -> String {
    let name = args.first().map(|name| name.to_string_lossy()).unwrap_or_default();
    if ENGINE_COMMANDS.contains(&&*name) {
        format!("the command `{name}` comes with the controller (not in this build)")
    } else {
        format!("unrecognized command: {name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_the_engine_are_told_from_typing_errors() {
        let say = |name: &str| other(&[OsString::from(name)]);
        assert!(say("snapshots").contains("comes with the controller"));
        assert_eq!(say("snapsots"), "unrecognized command: snapsots");
    }
}
