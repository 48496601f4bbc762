//! What is in a backup store.

use super::{names, open, url};
use crate::context::Context;
use crate::output::{self, Table, exact_size, facts};
use clap::Args;
use dbs_backup::BackupStore;
use dbs_backup::config::Map;
use dbs_backup::url::Url;
use dbs_core::{ErrorKind, Result, format_size};
use serde::Serialize;

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

/// A volume in a backup store.
#[derive(Debug, Serialize)]
struct VolumeInfo {
    url: String,
    volume: String,
    size: u64,
    created: String,
    backups: u64,
    last_backup: Option<String>,
    last_backup_at: Option<String>,
    blocks: u64,
    compression: String,
    labels: Map,
    problem: Option<String>,
}

/// A backup.
#[derive(Debug, Serialize)]
struct BackupInfo {
    url: String,
    volume: String,
    backup: String,
    state: &'static str,
    snapshot: String,
    asked_at: String,
    created: String,
    size: u64,
    block_size: u64,
    incremental: bool,
    uploaded: u64,
    compression: String,
    labels: Map,
    parameters: Map,
    problem: Option<String>,
}

impl List {
    pub fn run(self, context: &Context) -> Result<()> {
        let store = open(&self.url)?;
        if let Some(volume) = &self.url.volume {
            let mut all: Vec<BackupInfo> = names(&store, volume)?
                .iter()
                .map(|name| backup_info(&store, volume, name))
                .collect::<Result<_>>()?;
            all.sort_by(|a, b| (&a.asked_at, &a.backup).cmp(&(&b.asked_at, &b.backup)));
            return if context.json {
                output::print_json(&all)
            } else {
                output::print(&backups(&all))
            };
        }
        let all: Vec<VolumeInfo> = store
            .volumes()?
            .iter()
            .map(|volume| volume_info(&store, volume))
            .collect::<Result<_>>()?;
        if context.json { output::print_json(&all) } else { output::print(&volumes(&all)) }
    }
}

impl Show {
    pub fn run(self, context: &Context) -> Result<()> {
        let store = open(&self.url)?;
        let volume = self.url.need_volume()?;
        let Some(backup) = &self.url.backup else {
            store.volume(volume)?;
            let info = volume_info(&store, volume)?;
            return if context.json {
                output::print_json(&info)
            } else {
                output::print(&volume_facts(&info))
            };
        };
        store.backup(volume, backup)?;
        let info = backup_info(&store, volume, backup)?;
        if context.json { output::print_json(&info) } else { output::print(&backup_facts(&info)) }
    }
}

/// What there is to say of a volume, also if its facts cannot be read.
fn volume_info(store: &BackupStore, volume: &str) -> Result<VolumeInfo> {
    let backups = store.backups(volume)?.len() as u64;
    let (config, problem) = told(store.volume(volume))?;
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    Ok(VolumeInfo {
        url: store.url().with(volume, None).to_string(),
        volume: volume.to_owned(),
        size: config.size,
        compression: config.method().map_or("", |method| method.name()).to_owned(),
        created: config.created_time,
        backups,
        last_backup: some(config.last_backup_name),
        last_backup_at: some(config.last_backup_at),
        blocks: config.block_count,
        labels: config.labels.unwrap_or_default(),
        problem,
    })
}

fn backup_info(store: &BackupStore, volume: &str, backup: &str) -> Result<BackupInfo> {
    let (config, problem) = told(store.backup(volume, backup))?;
    let state = match (&problem, config.is_in_progress()) {
        (Some(_), _) => "damaged",
        (None, true) => "in_progress",
        (None, false) => "complete",
    };
    Ok(BackupInfo {
        url: store.url().with(volume, Some(backup)).to_string(),
        volume: volume.to_owned(),
        backup: backup.to_owned(),
        state,
        block_size: config.block_size().unwrap_or(0),
        compression: config.method().map_or("", |method| method.name()).to_owned(),
        snapshot: config.snapshot_name,
        asked_at: config.snapshot_created_at,
        created: config.created_time,
        size: config.size,
        incremental: config.is_incremental,
        uploaded: config.newly_uploaded_data_size.saturating_add(config.re_uploaded_data_size),
        labels: config.labels.unwrap_or_default(),
        parameters: config.parameters.unwrap_or_default(),
        problem,
    })
}

/// Facts, or none and what is wrong with them.
fn told<T: Default>(facts: Result<T>) -> Result<(T, Option<String>)> {
    match facts {
        Ok(facts) => Ok((facts, None)),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Unsupported
            ) =>
        {
            Ok((T::default(), Some(error.to_string())))
        }
        Err(error) => Err(error),
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
        let state = match (backup.state, backup.incremental) {
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
