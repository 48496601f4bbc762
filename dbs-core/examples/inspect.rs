//! Prints what is in a store: its volumes with their snapshots, what each takes and would free, and what a check
//! finds.
//!
//! `cargo run -p dbs-core --example inspect -- STORE`

use dbs_core::{Error, OpenOptions, Result, Store, format_size, format_time};
use std::fmt::Write;
use std::path::Path;

fn main() -> Result<()> {
    let Some(path) = std::env::args().nth(1) else {
        return Err(Error::invalid("usage: inspect STORE"));
    };
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let store = Store::open(Path::new(&path), &options)?;
    print!("{}", inspect(&store)?);
    store.close()
}

/// All of it as text, a line for each thing.
///
/// # Errors
/// Those of reading the store; `NotFound` if somebody deletes a volume meanwhile.
pub fn inspect(store: &Store) -> Result<String> {
    let mut text = String::new();
    let mut line = |indent: usize, what: String| {
        let _ = writeln!(text, "{:indent$}{what}", "");
    };
    let info = store.info();
    line(0, format!("store {}: format {}, {} driver", info.uuid, info.format, info.driver));
    line(0, format!("{} of {} free", format_size(info.free), format_size(info.size)));
    for volume in store.volumes(true) {
        let (size, used) = (format_size(volume.size), format_size(volume.usage.allocated));
        let on = volume.parent.map_or(String::new(), |parent| format!(", on {parent}"));
        line(2, format!("{}: {size}, {used} allocated{on}", volume.name));
        for snapshot in store.snapshots(&volume.name, true)? {
            let frees = format_size(snapshot.usage.reclaimable);
            let taken = format_time(snapshot.created_ns);
            line(4, format!("@{}: taken {taken}, its deletion frees {frees}", snapshot.name));
        }
    }
    let report = store.check()?;
    line(0, format!("check: {} findings", report.findings.len()));
    for finding in report.findings {
        line(2, format!("{:?} in the {}: {}", finding.severity, finding.region, finding.message));
    }
    Ok(text)
}
