//! What is said of volumes and snapshots: JSON files and extended attributes.

use dbs_core::info::{MapRange, SnapshotInfo, VolumeInfo};
use dbs_core::volume::Observer;
use dbs_core::{Result, Store};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;

/// Ranges in a `map.json`: what bounds the memory it takes, some MiB.
const MAP_RANGES: usize = 1 << 16;
/// Bytes whose map is made under one hold of the metadata lock.
const MAP_STEP: u64 = 1 << 30;

/// `store.json`, of a store at this path; `live` if others work with it meanwhile.
pub fn store(store: &Store, path: &Path, live: bool) -> Vec<u8> {
    let mount = json!({
        "pid": std::process::id(),
        "store": path.display().to_string(),
        "live": live,
        "version": env!("CARGO_PKG_VERSION"),
    });
    encode(&json!({ "store": store.info(), "mount": mount }))
}

/// Of it what tells whether anything has changed: reading counts in the rest.
pub fn store_facts(store: &Store) -> Vec<u8> {
    let mut info = store.info();
    info.checksums = None;
    encode(&json!(info))
}

/// `info.json`.
pub fn info(volume: &Observer) -> Result<Vec<u8>> {
    let info = without_usage(&volume.volume_info()?);
    let mut snapshots = Vec::new();
    for (_, snapshot) in volume.snapshots()? {
        match snapshot.snapshot_info() {
            Ok(Some(info)) => snapshots.push(without_usage(&info)),
            Ok(None) => {}
            // Deleted a moment ago.
            Err(error) if error.kind() == dbs_core::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(encode(&json!({ "volume": info, "snapshots": snapshots })))
}

/// `map.json`: of the head, as far as it goes.
pub fn map(volume: &Observer) -> Result<Vec<u8>> {
    let size = volume.size()?;
    let mut ranges: Vec<MapRange> = Vec::new();
    let mut at = 0;
    while at < size && ranges.len() < MAP_RANGES {
        let step = MAP_STEP.min(size - at);
        let found = match volume.map(at, step, MAP_RANGES - ranges.len()) {
            // It shrank meanwhile.
            Err(error) if error.kind() == dbs_core::ErrorKind::Invalid => break,
            found => found?,
        };
        for range in found {
            at = range.offset + range.length;
            match ranges.last_mut() {
                Some(last) if last.state == range.state => last.length += range.length,
                _ => ranges.push(range),
            }
        }
    }
    let complete = at >= size;
    Ok(encode(&json!({ "size": size, "complete": complete, "ranges": ranges })))
}

/// Extended attributes of a volume.
pub fn volume_facts(volume: &Observer) -> Result<Vec<(String, String)>> {
    let info: VolumeInfo = volume.volume_info()?;
    let mut facts = vec![
        fact("name", &info.name),
        fact("uuid", &info.uuid),
        fact("size", &info.size),
        fact("created_ns", &info.created_ns),
        fact("snapshots", &info.snapshots),
        fact("depth", &info.depth),
        fact("rebuilding", &info.rebuilding),
        fact("revision", &info.revision),
    ];
    facts.extend(info.parent.map(|parent| fact("parent", &parent)));
    facts.extend(info.origin.map(|origin| fact("origin", &origin)));
    Ok(facts)
}

/// Extended attributes of a snapshot.
pub fn snapshot_facts(snapshot: &Observer) -> Result<Vec<(String, String)>> {
    let Some(info): Option<SnapshotInfo> = snapshot.snapshot_info()? else { return Ok(Vec::new()) };
    let mut facts = vec![
        fact("volume", &info.volume),
        fact("name", &info.name),
        fact("uuid", &info.uuid),
        fact("size", &info.size),
        fact("created_ns", &info.created_ns),
        fact("protected", &info.protected),
        fact("user_created", &info.user_created),
        fact("retired", &info.retired),
        fact("children", &info.children.join("\n")),
    ];
    facts.extend(info.parent.map(|parent| fact("parent", &parent)));
    let labels = info.labels.into_iter();
    // An attribute's name is at most 255 bytes; longer ones are in `info.json`.
    let labels = labels.filter(|(key, _)| key.len() <= 200 && !key.contains('\0'));
    facts.extend(labels.map(|(key, value)| (format!("label.{key}"), value)));
    Ok(facts)
}

fn fact(name: &str, value: &impl ToString) -> (String, String) {
    (name.to_owned(), value.to_string())
}

/// Counting it takes long where volumes are large: `dbs volume du` does.
fn without_usage(value: &impl Serialize) -> Value {
    let mut value = serde_json::to_value(value).unwrap_or_default();
    if let Some(fields) = value.as_object_mut() {
        fields.remove("usage");
    }
    value
}

fn encode(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
    text.push(b'\n');
    text
}
