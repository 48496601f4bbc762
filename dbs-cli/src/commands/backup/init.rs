//! `dbs backup init` and `dbs backup collect`: repositories.

use super::{open, secret, url, variable};
use crate::context::Context;
use crate::progress::Unit;
use clap::Args;
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Collected, Work};
use dbs_core::{Error, Result, format_size};
use serde_json::json;

/// Make a repository: blocks that all volumes share, in few large objects, perhaps encrypted.
///
/// All `dbs backup` commands find it at its URL. Longhorn cannot read it. With --encrypt, set one of
/// DBS_BACKUP_PASSPHRASE, DBS_BACKUP_PASSPHRASE_FILE (a file whose first line is the passphrase) and
/// DBS_BACKUP_KEY_FILE (a file of 32 random bytes), for this and all later commands. Nobody can read the
/// backups without it.
#[derive(Debug, Args)]
pub struct Init {
    /// The place, where there are no backups yet
    #[arg(value_parser = url)]
    url: Url,
    /// Encrypt everything with the key from the environment
    #[arg(long)]
    encrypt: bool,
}

impl Init {
    pub fn run(self, context: &Context) -> Result<()> {
        if self.url.volume.is_some() {
            return Err(Error::invalid("name a backup store, and no volume in it"));
        }
        let secret = secret()?;
        BackupStore::open(&self.url, &variable)?.make_repository(self.encrypt, secret)?;
        let how = if self.encrypt { "an encrypted repository" } else { "a repository" };
        context.done(
            &json!({ "url": self.url.to_string(), "encrypted": self.encrypt }),
            &format!("made {how} at {}", self.url),
        )
    }
}

/// Remove what no backup in a repository needs.
///
/// This takes two runs, a day apart: the first one notes what nobody needs, and the second one removes that.
/// `dbs backup prune` does the same at its end. Backups can be made meanwhile.
#[derive(Debug, Args)]
pub struct Collect {
    /// The repository
    #[arg(value_parser = url)]
    url: Url,
}

impl Collect {
    pub fn run(self, context: &Context) -> Result<()> {
        let store = open(&self.url)?;
        context.stop.on_signals()?;
        let Some(collected) = collect(context, &store)? else {
            return Err(Error::invalid(format!(
                "{} is no repository: there, `dbs backup delete` and `prune` delete the blocks",
                self.url.store()
            )));
        };
        context.done(&collected, &describe(&collected))
    }
}

/// Collects, in a repository.
pub(super) fn collect(context: &Context, store: &BackupStore) -> Result<Option<Collected>> {
    if !store.is_repository() {
        return Ok(None);
    }
    let mut meter = context.meter("collecting", Unit::Steps);
    let mut progress = |done, total| meter.update(done, total);
    store.collect(&mut Work::new(&mut progress))
}

/// What a collection has done.
pub(super) fn describe(collected: &Collected) -> String {
    let mut text = format!(
        "removed {} ({} packs); {} are kept",
        format_size(collected.removed_bytes),
        collected.removed,
        format_size(collected.bytes)
    );
    if collected.rewritten > 0 {
        text += &format!(
            "; {} packs were of little use, and {} of them written anew",
            collected.rewritten,
            format_size(collected.rewritten_bytes)
        );
    }
    if let Some(seconds) = collected.next_seconds {
        text += &format!(
            "; {} that no backup needs can be removed in {} h",
            format_size(collected.condemned_bytes),
            seconds.div_ceil(3600)
        );
    }
    text
}
