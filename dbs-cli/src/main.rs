//! The `dbs` command.

mod args;
mod backups;
mod commands;
mod confirm;
mod context;
mod exit;
mod globals;
mod old;
mod output;
mod pipes;
mod progress;
mod secret;
mod signals;
mod spec;
mod target;
mod terminal;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind as ClapKind};
use std::process::ExitCode;

fn main() -> ExitCode {
    signals::outlive_file_limit();
    match args::Cli::try_parse() {
        Ok(cli) => {
            let json = cli.globals.json;
            match args::run(cli) {
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
    if let Some(text) = moved(error) {
        exit::print_failure("usage", &text, json);
    } else if json && !asked_for {
        let text = error.to_string();
        exit::print_failure("usage", text.trim_start_matches("error: ").trim_end(), true);
    } else {
        // Nowhere to report that to.
        let _ = error.print();
    }
    if asked_for { ExitCode::SUCCESS } else { ExitCode::from(exit::USAGE) }
}

/// What to use in place of a command that is unknown here, if `longhorn` has it.
fn moved(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let command = match name.as_str() {
        "replica" | "controller" => format!("longhorn {name}"),
        "engine" => "longhorn".to_owned(),
        _ => return None,
    };
    Some(format!("`{name}` is no command of dbs: use `{command}`, which takes the same options"))
}
