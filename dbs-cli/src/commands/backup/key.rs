//! `dbs backup key`: the keys that open an encrypted repository.

use super::{open, url};
use crate::confirm::confirm;
use crate::context::Context;
use crate::output::{self, Table};
use clap::{Args, Subcommand};
use dbs_backup::url::Url;
use dbs_backup::{KeyInfo, Secret};
use dbs_core::Result;
use serde_json::json;
use std::path::PathBuf;

/// Commands on the keys of an encrypted repository.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    #[command(visible_alias = "ls")]
    List(List),
    Add(Add),
    #[command(visible_alias = "rm")]
    Remove(Remove),
}

impl KeyCommand {
    pub fn run(self, context: &Context) -> Result<()> {
        match self {
            Self::List(command) => command.run(context),
            Self::Add(command) => command.run(context),
            Self::Remove(command) => command.run(context),
        }
    }
}

/// List the keys that open a repository.
#[derive(Debug, Args)]
pub struct List {
    /// The repository
    #[arg(value_parser = url)]
    url: Url,
}

impl List {
    fn run(self, context: &Context) -> Result<()> {
        let keys = open(&self.url)?.keys()?;
        if context.json { output::print_json(&keys) } else { output::print(&table(&keys)) }
    }
}

/// Add a key that opens a repository, besides those that do.
///
/// Give a present key in the environment, as for all commands. To change a passphrase, add the new one, then give
/// that one in the environment and remove the old one.
#[derive(Debug, Args)]
pub struct Add {
    /// The repository
    #[arg(value_parser = url)]
    url: Url,
    #[command(flatten)]
    new: New,
}

/// A new key.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct New {
    /// File whose first line is the new passphrase; /dev/stdin reads it from there
    #[arg(long, value_name = "FILE")]
    passphrase_file: Option<PathBuf>,
    /// File of 32 random bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

impl Add {
    fn run(self, context: &Context) -> Result<()> {
        let secret = match (&self.new.passphrase_file, &self.new.key_file) {
            (Some(file), _) => Secret::read_passphrase_file(file),
            (None, file) => Secret::read_key_file(file.as_deref().unwrap_or("".as_ref())),
        }?;
        let id = open(&self.url)?.add_key(&secret)?;
        context.done(&json!({ "id": id }), &format!("added key {id}"))
    }
}

/// Remove a key of a repository.
///
/// The key in the environment must be another one: so one is left that somebody has. Whoever has the removed
/// key and a copy of the repository's files from before can still read the backups: to shut somebody out, make a new
/// repository.
#[derive(Debug, Args)]
pub struct Remove {
    /// The repository
    #[arg(value_parser = url)]
    url: Url,
    /// The key, as `dbs backup key list` prints it
    key: String,
}

impl Remove {
    fn run(self, context: &Context) -> Result<()> {
        let store = open(&self.url)?;
        let (key, place) = (&self.key, self.url.store());
        confirm(context, &format!("Remove key {key} of {place}?"))?;
        store.remove_key(key)?;
        context.done(&json!({ "id": key }), &format!("removed key {key}"))
    }
}

fn table(keys: &[KeyInfo]) -> String {
    let mut table = Table::new(&["KEY", "KIND", "ADDED", "STATE"]);
    for key in keys {
        let state = match (&key.problem, key.used) {
            (Some(problem), _) => problem,
            (None, true) => "in use",
            (None, false) => "",
        };
        let kind = key.kind.unwrap_or("-").to_owned();
        table.row(vec![key.id.clone(), kind, key.added.clone(), state.to_owned()]);
    }
    table.text()
}
