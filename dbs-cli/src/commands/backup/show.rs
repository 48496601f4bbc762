//! What is in a backup store.

use super::{open, url};
use crate::context::Context;
use crate::output::{self, Table, exact_size, facts};
use clap::Args;
use dbs_backup::LABEL_HELD;
use dbs_backup::config::Map;
use dbs_backup::info::{BackupInfo, VolumeInfo};
use dbs_backup::url::Url;
use dbs_core::{Result, format_size};

/// List the volumes of a backup store, or the backups of one volume.
#[derive(Debug, Args)]
pub struct List {
    /// The backup store, or a volume in it, as this command prints it
    #[arg(value_parser = url)]
    url: Url,
}

/// Show a backup, or a volume in a backup store.
#[derive(Debug, Args)]
pub struct Show {
    /// The backup or volume, as `dbs backup list` prints it
    #[arg(value_parser = url)]
    url: Url,
}

impl List {
    pub fn run(self, context: &Context) -> Result<()> {
        let store = open(&self.url)?;
        if let Some(volume) = &self.url.volume {
            let all = store.backup_infos(volume)?;
            return if context.json {
                output::print_json(&all)
            } else {
                output::print(&backups(&all))
            };
        }
        let all = store.volume_infos()?;
        if context.json { output::print_json(&all) } else { output::print(&volumes(&all)) }
    }
}

impl Show {
    pub fn run(self, context: &Context) -> Result<()> {
        let store = open(&self.url)?;
        let volume = self.url.need_volume()?;
        let Some(backup) = &self.url.backup else {
            store.volume(volume)?;
            let info = store.volume_info(volume)?;
            return if context.json {
                output::print_json(&info)
            } else {
                output::print(&volume_facts(&info))
            };
        };
        store.backup(volume, backup)?;
        let info = store.backup_info(volume, backup)?;
        if context.json { output::print_json(&info) } else { output::print(&backup_facts(&info)) }
    }
}

fn volumes(all: &[VolumeInfo]) -> String {
    let mut table = Table::new(&["VOLUME", ">SIZE", ">BACKUPS", "LAST", "URL"]);
    for volume in all {
        let last = volume.problem.clone().or_else(|| volume.last_backup_at.clone());
        table.row(vec![
            volume.volume.clone(),
            format_size(volume.size),
            volume.backups.to_string(),
            last.unwrap_or_else(|| "-".to_owned()),
            volume.url.clone(),
        ]);
    }
    table.text()
}

fn backups(all: &[BackupInfo]) -> String {
    let mut table =
        Table::new(&["BACKUP", "SNAPSHOT", "ASKED FOR", ">SIZE", ">WRITTEN", "STATE", "URL"]);
    for backup in all {
        let is_held = backup.labels.contains_key(LABEL_HELD);
        let state = match (backup.state, backup.incremental) {
            ("complete", _) if is_held => "held",
            ("complete", true) => "incremental",
            ("complete", false) => "full",
            ("in_progress", _) => "in progress",
            (other, _) => other,
        };
        table.row(vec![
            backup.backup.clone(),
            backup.snapshot.clone(),
            backup.asked_at.clone(),
            format_size(backup.size),
            format_size(backup.uploaded),
            state.to_owned(),
            backup.url.clone(),
        ]);
    }
    table.text()
}

fn volume_facts(volume: &VolumeInfo) -> String {
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    facts(&[
        ("volume", volume.volume.clone()),
        ("url", volume.url.clone()),
        ("size", exact_size(volume.size)),
        ("first backup", volume.created.clone()),
        ("backups", volume.backups.to_string()),
        ("last backup", or_none(&volume.last_backup)),
        ("asked for", or_none(&volume.last_backup_at)),
        ("blocks", volume.blocks.to_string()),
        ("compression", volume.compression.clone()),
        ("labels", labels(&volume.labels)),
    ])
}

fn backup_facts(backup: &BackupInfo) -> String {
    facts(&[
        ("backup", backup.backup.clone()),
        ("volume", backup.volume.clone()),
        ("url", backup.url.clone()),
        ("state", backup.state.replace('_', " ")),
        ("snapshot", backup.snapshot.clone()),
        ("asked for", backup.asked_at.clone()),
        ("complete", backup.created.clone()),
        ("size", exact_size(backup.size)),
        ("block size", exact_size(backup.block_size)),
        ("written", exact_size(backup.uploaded)),
        ("incremental", if backup.incremental { "yes" } else { "no" }.to_owned()),
        ("compression", backup.compression.clone()),
        ("labels", labels(&backup.labels)),
    ])
}

fn labels(labels: &Map) -> String {
    let all: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    if all.is_empty() { "-".to_owned() } else { all.join(", ") }
}
