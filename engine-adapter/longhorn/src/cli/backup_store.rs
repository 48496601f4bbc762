//! The commands for backup stores, which ask no volume. Longhorn's manager runs them from its default engine image.

use super::backup_args::{BackupCommand, ListArgs, RemoveArgs};
use super::client_args::Operands;
use super::golang;
use super::output::print_json;
use crate::client::open_store;
use dbs_backup::config::{BackupConfig, Map, VolumeConfig};
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Work};
use dbs_core::{Error, ErrorKind, Result};
use serde::Serialize;
use std::collections::BTreeMap;

/// What a stored block counts, whatever its size is: upstream's number.
const COUNTED: u64 = 2 << 20;

/// A volume in a backup store. In a list only `messages` and the keys of `backups` say something.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
struct VolumeInfo {
    name: String,
    size: Number,
    labels: Option<Map>,
    created: String,
    last_backup_name: String,
    last_backup_at: String,
    data_stored: Number,
    messages: Map,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    backups: BTreeMap<String, BackupInfo>,
    backing_image_name: String,
    backing_image_checksum: String,
    #[serde(rename = "StorageClassname")]
    storage_class_name: String,
    data_engine: String,
}

/// A backup.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
struct BackupInfo {
    name: String,
    #[serde(rename = "URL")]
    url: String,
    snapshot_name: String,
    snapshot_created: String,
    created: String,
    size: Number,
    labels: Option<Map>,
    parameters: Option<Map>,
    is_incremental: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    compression_method: String,
    newly_uploaded_data_size: Number,
    re_uploaded_data_size: Number,
    #[serde(skip_serializing_if = "String::is_empty")]
    volume_name: String,
    #[serde(skip_serializing_if = "Number::is_zero")]
    volume_size: Number,
    #[serde(skip_serializing_if = "String::is_empty")]
    volume_created: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    volume_backing_image_name: String,
    /// Always null.
    messages: Option<Map>,
}

/// When something was written.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Metadata {
    modification_time: String,
}

/// A number that stands in quotes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Number(u64);

impl Number {
    fn is_zero(&self) -> bool {
        self.0 == 0
    }
}

impl Serialize for Number {
    fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_str(&self.0)
    }
}

/// Does what the command line says.
///
/// # Errors
/// Why not; of what is not there, with `cannot find`, by which Longhorn's manager knows it.
pub fn run(command: &BackupCommand) -> Result<()> {
    use BackupCommand as C;
    match command {
        C::List(args) => list(args),
        C::Remove(args) => remove(args),
        C::Inspect(args) => {
            let url = url(&args.operands)?;
            let (volume, backup) = url.need_backup()?;
            print_json(&inspect(&open_store(&url)?, volume, backup)?)
        }
        C::InspectVolume(args) => {
            let url = url(&args.operands)?;
            print_json(&VolumeInfo::of(open_store(&url)?.volume(url.need_volume()?)?))
        }
        C::Head(args) => head(args),
        _ => dbs_backup::objects::unmount_all(),
    }
}

pub(super) fn url(operands: &[String]) -> Result<Url> {
    match operands.first().map(String::as_str) {
        None | Some("") => Err(Error::invalid("cannot find valid required parameter: dest URL")),
        Some(url) => Url::parse(golang::unquoted(url)),
    }
}

fn list(args: &ListArgs) -> Result<()> {
    let url = url(&args.url)?;
    if !args.volume.is_empty() && !dbs_backup::names::is_valid(&args.volume) {
        return Err(Error::invalid(format!("invalid volume name {} for backup", args.volume)));
    }
    let store = open_store(&url)?;
    let volumes = if args.volume.is_empty() { store.volumes()? } else { vec![args.volume.clone()] };
    let one = |volume: String| {
        let info = listed(&store, &volume, args.volume_only)?;
        Ok((volume, info))
    };
    print_json(&volumes.into_iter().map(one).collect::<Result<BTreeMap<_, _>>>()?)
}

/// What is wrong with a volume is a message, so that the others are listed.
fn listed(store: &BackupStore, volume: &str, volume_only: bool) -> Result<VolumeInfo> {
    let mut info = VolumeInfo::default();
    let found = store.modified(volume, None).and_then(|_| {
        let names = if volume_only { Vec::new() } else { store.backups(volume)? };
        Ok(names.into_iter().map(|name| (name, BackupInfo::default())).collect())
    });
    match found {
        Ok(backups) => info.backups = backups,
        Err(error) => {
            info.messages.insert("error".to_owned(), error.to_string());
        }
    }
    Ok(info)
}

fn inspect(store: &BackupStore, volume: &str, backup: &str) -> Result<BackupInfo> {
    let volume_facts = store.volume(volume)?;
    let facts = store.backup(volume, backup)?;
    if facts.is_in_progress() {
        return Err(Error::busy(format!("backup {backup} is still in progress")));
    }
    let url = store.url().with(volume, Some(backup)).to_string();
    Ok(BackupInfo::of(url, facts, volume_facts))
}

fn head(args: &Operands) -> Result<()> {
    let url = url(&args.operands)?;
    let modified = open_store(&url)?.modified(url.need_volume()?, url.backup.as_deref())?;
    let time = jiff::Timestamp::try_from(modified).map_err(|e| {
        Error::new(ErrorKind::Corrupt, format!("the time of the file cannot be read: {e}"))
    })?;
    print_json(&Metadata { modification_time: time.to_string() })
}

fn remove(args: &RemoveArgs) -> Result<()> {
    let url = url(&args.url)?;
    let mut progress = |_, _| true;
    let work = &mut Work::new(&mut progress);
    if args.volume.is_empty() {
        let (volume, backup) = url.need_backup()?;
        return open_store(&url)?.remove(volume, backup, work).map(drop);
    }
    if !dbs_backup::names::is_valid(&args.volume) {
        return Err(Error::invalid(format!("invalid backup volume name {}", args.volume)));
    }
    open_store(&url)?.remove_volume(&args.volume, work)
}

impl VolumeInfo {
    fn of(facts: VolumeConfig) -> Self {
        let engine = if facts.data_engine.is_empty() { "v1".to_owned() } else { facts.data_engine };
        Self {
            name: facts.name,
            size: Number(facts.size),
            labels: facts.labels,
            created: facts.created_time,
            last_backup_name: facts.last_backup_name,
            last_backup_at: facts.last_backup_at,
            data_stored: Number(facts.block_count.saturating_mul(COUNTED)),
            backing_image_name: facts.backing_image_name,
            backing_image_checksum: facts.backing_image_checksum,
            storage_class_name: facts.storage_class_name,
            data_engine: engine,
            ..Self::default()
        }
    }
}

impl BackupInfo {
    fn of(url: String, facts: BackupConfig, volume: VolumeConfig) -> Self {
        let method = facts.method().map_or(facts.compression_method, |m| m.name().to_owned());
        Self {
            name: facts.name,
            url,
            snapshot_name: facts.snapshot_name,
            snapshot_created: facts.snapshot_created_at,
            created: facts.created_time,
            size: Number(facts.size),
            labels: facts.labels,
            parameters: facts.parameters,
            is_incremental: facts.is_incremental,
            compression_method: method,
            newly_uploaded_data_size: Number(facts.newly_uploaded_data_size),
            re_uploaded_data_size: Number(facts.re_uploaded_data_size),
            volume_name: volume.name,
            volume_size: Number(volume.size),
            volume_created: volume.created_time,
            volume_backing_image_name: volume.backing_image_name,
            messages: None,
        }
    }
}
