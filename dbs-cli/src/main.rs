//! The `dbs` command.

mod args;
mod commands;
mod confirm;
mod context;
mod exit;
mod old;
mod output;
mod progress;
mod spec;
mod target;

use clap::Parser;
use clap::error::ErrorKind as ClapKind;
use std::process::ExitCode;

fn main() -> ExitCode {
    match args::Cli::try_parse() {
        Ok(cli) => {
            let json = cli.globals.json;
            match commands::run(cli) {
                Ok(code) => code,
                Err(error) => exit::report(&error, json),
            }
        }
        Err(error) => usage(&error),
    }
}

/// Prints help or what is wrong with the arguments.
fn usage(error: &clap::Error) -> ExitCode {
    let asked_for = matches!(error.kind(), ClapKind::DisplayHelp | ClapKind::DisplayVersion);
    let json = std::env::args_os().take_while(|a| a != "--").any(|a| a == "--json");
    if json && !asked_for {
        let text = error.to_string();
        exit::print_failure("usage", text.trim_start_matches("error: ").trim_end(), true);
    } else {
        // Nowhere to report that to.
        let _ = error.print();
    }
    if asked_for { ExitCode::SUCCESS } else { ExitCode::from(exit::USAGE) }
}
