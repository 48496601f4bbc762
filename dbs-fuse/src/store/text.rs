//! What is said of volumes and snapshots: JSON files and extended attributes.

use dbs_core::info::{MapRange, SnapshotInfo, VolumeInfo};
use dbs_core::volume::Observer;
use dbs_core::{Error, ErrorKind, Result, Store};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::cell::Cell;
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
    let failed = Cell::new(None);
    let text = encode(&Info {
        snapshots: Snapshots { all: volume.snapshots()?, failed: &failed },
        volume: without_usage(&volume.volume_info()?),
    });
    failed.take().map_or(Ok(text), Err)
}

#[derive(Serialize)]
struct Info<'a> {
    snapshots: Snapshots<'a>,
    volume: Value,
}

/// Told one by one: all of them as values take many times the memory of their text.
struct Snapshots<'a> {
    all: Vec<(String, Observer)>,
    failed: &'a Cell<Option<Error>>,
}

impl Serialize for Snapshots<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_seq(self.all.iter().filter_map(|(_, snapshot)| {
            match snapshot.snapshot_info() {
                Ok(info) => info.map(|info| without_usage(&info)),
                // Deleted a moment ago.
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => {
                    self.failed.set(Some(error));
                    None
                }
            }
        }))
    }
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
            Err(error) if error.kind() == ErrorKind::Invalid => break,
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

fn encode(value: &impl Serialize) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use dbs_core::store::SnapshotOptions;
    use dbs_core::{InitOptions, OpenOptions};
    use std::alloc::{GlobalAlloc, Layout, System};

    thread_local! {
        /// Bytes that this thread holds, and the most there were.
        static HELD: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
    }

    struct Counting;

    fn hold(bytes: i64) {
        let (held, most) = HELD.get();
        HELD.set((held + bytes, most.max(held + bytes)));
    }

    // SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
    #[allow(unsafe_code)]
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            hold(layout.size() as i64);
            // SAFETY: the caller's promises are passed on.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
            hold(-(layout.size() as i64));
            // SAFETY: the caller's promises are passed on.
            unsafe { System.dealloc(ptr, layout) }
        }
    }

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    /// Found by review: of ten thousand snapshots, `info.json` took a hundred megabytes for a text of four.
    #[test]
    fn a_long_text_takes_little_memory_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let size = Some(64 << 20);
        let options = InitOptions { size, max_snapshots: Some(1024), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("v", 1 << 20).unwrap();
        for index in 0..1000 {
            let name = format!("s{index}");
            store.create_snapshot("v", &name, &SnapshotOptions::default()).unwrap();
        }
        let volume = store.observe("v").unwrap();
        let before = HELD.get().0;
        HELD.set((before, before));
        let text = info(&volume).unwrap();
        let most = HELD.get().1 - before;
        let value: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(value["snapshots"].as_array().unwrap().len(), 1000);
        assert!(value["volume"]["name"] == "v" && value["snapshots"][7]["name"] == "s7");
        assert!(most < 4 * text.len() as i64, "{most} bytes for a text of {}", text.len());
    }
}
