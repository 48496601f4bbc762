//! Copies a snapshot into a file. With the name of an earlier snapshot that the file has the content of, it
//! writes only what has changed since then.
//!
//! `cargo run -p dbs-core --example backup -- STORE VOLUME SNAPSHOT FILE [SINCE]`

use dbs_core::info::RangeState;
use dbs_core::{Error, OpenOptions, Result, Store};
use std::fs::{File, OpenOptions as FileOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes read and written at once.
const STEP: u64 = 1 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [store, volume, snapshot, file, since @ ..] = &arguments[..] else {
        return Err(Error::invalid("usage: backup STORE VOLUME SNAPSHOT FILE [SINCE]"));
    };
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let store = Store::open(Path::new(store), &options)?;
    let written =
        backup(&store, volume, since.first().map(String::as_str), snapshot, Path::new(file))?;
    println!("wrote {written} bytes");
    store.close()
}

/// Makes `file`, which has the content of `since` (of nothing, if there is none), have that of `snapshot`.
/// Returns how many bytes it wrote.
///
/// # Errors
/// `NotFound` for a volume or snapshot that there is not; those of reading the store and writing the file.
pub fn backup(
    store: &Store,
    volume: &str,
    since: Option<&str>,
    snapshot: &str,
    file: &Path,
) -> Result<u64> {
    let source = store.volume(&format!("{volume}@{snapshot}"))?;
    let failed = |error| Error::io(error, format!("writing {} failed", file.display()));
    let target = FileOptions::new()
        .write(true)
        .create(since.is_none())
        .truncate(since.is_none())
        .open(file)
        .map_err(failed)?;
    let mut written = 0;
    let mut buffer = vec![0; STEP as usize];
    for range in store.diff(volume, since, Some(snapshot), 0, source.size())? {
        let end = range.offset + range.length;
        for offset in (range.offset..end).step_by(STEP as usize) {
            let part = &mut buffer[..STEP.min(end - offset) as usize];
            match range.state {
                RangeState::Data => source.read_at(offset, part)?,
                _ => part.fill(0),
            }
            target.write_all_at(part, offset).map_err(failed)?;
            written += part.len() as u64;
        }
    }
    finish(&target, source.size()).map_err(failed)?;
    Ok(written)
}

/// The file is as long as the snapshot, and durable.
fn finish(file: &File, size: u64) -> std::io::Result<()> {
    file.set_len(size)?;
    file.sync_all()
}
