//! Options from environment variables. An instance manager passes fixed arguments, so what matters in a cluster can be
//! given in the environment of its pod.

use super::Cli;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory, Error, FromArgMatches};
use dbs_service::log;
use std::ffi::OsString;
use std::fmt::Display;

/// Parses a command line, and looks at the environment for options that it does not have.
///
/// # Errors
/// Those of clap. If a variable has the wrong value, the text names it.
pub(super) fn parse(args: Vec<OsString>) -> Result<(Cli, Vec<(String, String)>), Error> {
    let mut command = without_empty(Cli::command());
    let matches = command.clone().try_get_matches_from(&args);
    let matches = matches.map_err(|error| naming_variable(error, &command, &args))?;
    let cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    Ok((cli, taken(&command, &matches)))
}

/// Says which options a process has from its environment: whoever looks for a reason sees only the arguments else.
pub(super) fn announce(taken: &[(String, String)]) {
    let fields: Vec<_> =
        taken.iter().map(|(name, value)| (name.as_str(), value as &dyn Display)).collect();
    if !fields.is_empty() {
        log::info("environment", &fields);
    }
}

fn variable(arg: &Arg) -> Option<(String, OsString)> {
    let name = arg.get_env()?.to_string_lossy().into_owned();
    let value = std::env::var_os(&name)?;
    Some((name, value))
}

/// The definition, in which a variable that is empty counts as absent: a template may leave one.
fn without_empty(command: Command) -> Command {
    let command = command.mut_args(|arg| match variable(&arg) {
        Some((_, value)) if value.is_empty() => arg.env(None::<&'static str>),
        _ => arg,
    });
    command.mut_subcommands(without_empty)
}

/// The error, naming a variable if it is the variable's value that is wrong.
fn naming_variable(mut error: Error, command: &Command, args: &[OsString]) -> Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let (Some(option), Some(wrong)) =
        (text(ContextKind::InvalidArg), text(ContextKind::InvalidValue))
    else {
        return error;
    };
    let long = option.trim_start_matches('-').split([' ', '[', '=']).next().unwrap_or_default();
    let subcommand = args.iter().skip(1).find_map(|arg| command.find_subcommand(arg));
    let blamed = [Some(command), subcommand].into_iter().flatten().flat_map(Command::get_arguments);
    let blamed = blamed.filter(|arg| arg.get_long() == Some(long)).filter_map(variable);
    if let Some((name, _)) = blamed.into_iter().find(|(_, value)| *value == *wrong) {
        let option = format!("{option} (environment variable {name})");
        error.insert(ContextKind::InvalidArg, ContextValue::String(option));
    }
    error
}

/// Variables that options have their values from.
fn taken(command: &Command, matches: &ArgMatches) -> Vec<(String, String)> {
    let from_environment =
        |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::EnvVariable);
    let own = command.get_arguments().filter(from_environment).filter_map(variable);
    let own = own.map(|(name, value)| (name, value.to_string_lossy().into_owned()));
    let below = matches.subcommand().and_then(|(name, matches)| {
        command.find_subcommand(name).map(|command| taken(command, matches))
    });
    own.chain(below.unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_variable_is_documented() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/kubernetes.md");
        let page = std::fs::read_to_string(page).unwrap();
        let command = Cli::command();
        let processes =
            ["replica", "controller"].map(|name| command.find_subcommand(name).unwrap());
        let options = [&command].into_iter().chain(processes).flat_map(Command::get_arguments);
        let mut looked_at = 0;
        for option in options.filter(|option| option.get_env().is_some()) {
            let (name, long) = (option.get_env().unwrap(), option.get_long().unwrap());
            let row = format!("| `{}` | `--{long}` |", name.to_string_lossy());
            assert!(page.contains(&row), "docs/kubernetes.md has no row {row}");
            looked_at += 1;
        }
        assert!(looked_at > 20, "only {looked_at} variables");
    }
}
