//! What belongs to the command itself: completions and manual pages.

use crate::context::Context;
use crate::output::print;
use clap::{Args, Command};
use clap_complete::Shell;
use dbs_core::{Error, Result};
use std::path::PathBuf;

/// Print the completion script of a shell.
#[derive(Debug, Args)]
pub struct Completions {
    /// Shell
    shell: Shell,
}

impl Completions {
    /// Prints the script for `command`, the whole command line.
    pub fn run(self, command: &mut Command) -> Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, command, "dbs", &mut script);
        print(&String::from_utf8_lossy(&script))
    }
}

/// Write the manual pages, one for each command.
#[derive(Debug, Args)]
pub struct Man {
    /// Directory for the pages; it is made if absent
    directory: PathBuf,
}

impl Man {
    /// Writes the pages of `command`, the whole command line.
    pub fn run(self, command: Command, context: &Context) -> Result<()> {
        let failed =
            |e| Error::io(e, format!("writing manual pages to {}", self.directory.display()));
        std::fs::create_dir_all(&self.directory).map_err(failed)?;
        let command = command.disable_help_subcommand(true);
        clap_mangen::generate_to(command, &self.directory).map_err(failed)?;
        let directory = self.directory.display().to_string();
        let message = format!("wrote the manual pages to {directory}");
        context.done(&serde_json::json!({ "directory": directory }), &message)
    }
}
