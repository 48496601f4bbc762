//! `dbs controller` and `dbs engine`.

use clap::Args;
use engine_adapter::cli::client_args::ClientCommand;
use engine_adapter::cli::controller::ControllerArgs;
use engine_adapter::cli::{self, Globals, TlsArgs};
use std::process::ExitCode;

/// Serve a Longhorn volume over its replicas, until SIGINT or SIGTERM.
///
/// The command `longhorn controller` does the same and takes its arguments just as Longhorn's instance
/// manager gives them. Ends with exit code 61 if no replica is good.
#[derive(Debug, Args)]
pub struct Controller {
    /// Name of the engine's instance, which callers that name another are refused by
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    engine_instance_name: String,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    controller: ControllerArgs,
}

impl Controller {
    pub fn run(self) -> ExitCode {
        cli::control(&self.controller, &self.engine_instance_name, &self.tls)
    }
}

/// Steer a Longhorn volume through its controller.
///
/// The command `longhorn` has the same commands. What they print is Longhorn's: `--json` has no effect.
#[derive(Debug, Args)]
pub struct Engine {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    command: ClientCommand,
}

impl Engine {
    pub fn run(self) -> ExitCode {
        cli::steer(&self.command, &self.globals)
    }
}
