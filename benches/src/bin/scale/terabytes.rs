//! Opening a store of several TiB with every extent in use. Its metadata is written by a tool, and
//! its data not at all: the file is sparse.

use crate::probe::probe;
use dbs_benches::device::{Filling, fill};
use dbs_benches::machine::read_time;
use dbs_benches::report::{Table, mib, time};
use dbs_benches::{Bench, Outcome, open};
use dbs_core::info::Severity;
use dbs_core::store::SnapshotOptions;
use dbs_core::{Error, OpenOptions, Store};
use std::path::Path;

const TIB: f64 = (1u64 << 40) as f64;
/// The budget: memory for a TiB mapped in order, and at worst.
const MIB_PER_TIB: [&str; 2] = ["16", "80"];

const IN_ORDER: Filling = Filling { scattered: false, partial: false };
const SCATTERED: Filling = Filling { scattered: true, partial: false };
const PARTIAL: Filling = Filling { scattered: true, partial: true };

/// What is measured: name, layers, filling, which budget.
const CASES: [(&str, u32, Filling, usize); 5] = [
    ("full extents, in order", 1, IN_ORDER, 0),
    ("full extents, scattered", 1, SCATTERED, 1),
    ("half-filled extents, scattered", 1, PARTIAL, 1),
    ("full extents, alternately of 64 snapshots", 64, IN_ORDER, 1),
    ("half-filled extents, scattered, alternately of 64 snapshots", 64, PARTIAL, 1),
];

/// Takes the measurement.
///
/// # Errors
/// Those of the store, or a filled store that a check finds damaged.
pub fn measure(bench: &Bench) -> Outcome<Table> {
    let size: u64 = bench.pick(4 << 40, 16 << 30);
    let title = format!("Opening a store of {} GiB, all of it in use", size >> 30);
    let columns = [
        "extents",
        "open",
        "of it on the CPU",
        "reading its bytes alone",
        "memory",
        "peak",
        "per TiB",
        "budget",
    ];
    let mut table = Table::new(&title, &columns);
    for (number, (name, layers, filling, budget)) in CASES.into_iter().enumerate() {
        let path = bench.init(&format!("terabytes{number}.dbs"), size)?;
        prepare(&path, layers)?;
        let filled = fill(&path, filling)?;
        let probed = probe(&path)?;
        let reading = read_time(&path, filled.offset, filled.length)?;
        let per_tib = probed.memory as f64 / (1 << 20) as f64 / (size as f64 / TIB);
        table.row(&[
            &format!("{} {name}", filled.extents),
            &time(probed.time),
            &time(probed.cpu),
            &time(reading),
            &mib(probed.memory),
            &mib(probed.peak),
            &format!("{per_tib:.1} MiB"),
            &format!("{} MiB", MIB_PER_TIB[budget]),
        ]);
        verify(&path, u64::from(filled.extents))?;
        std::fs::remove_file(&path)?;
    }
    Ok(table)
}

/// Makes a volume as large as all extents, with so many layers.
fn prepare(path: &Path, layers: u32) -> Outcome<()> {
    let store = open(path)?;
    let info = store.info();
    store.create_volume("v", info.extents_total * info.extent_size)?;
    for number in 1..layers {
        store.create_snapshot("v", &format!("s{number}"), &SnapshotOptions::default())?;
    }
    Ok(store.close()?)
}

/// Holds the filled store to be one like any other: a check finds nothing, every extent counts,
/// and its (never written) data can be read.
fn verify(path: &Path, extents: u64) -> Outcome<()> {
    let store = Store::open(path, &OpenOptions { read_only: true, ..OpenOptions::default() })?;
    let report = store.check()?;
    let worst = report.findings.iter().find(|finding| finding.severity > Severity::Note);
    if let Some(finding) = worst {
        return Err(Error::corrupt(finding.message.clone()).into());
    }
    let info = store.info();
    if report.extents_checked != extents || info.extents_free != 0 {
        return Err(format!("{} extents in use, not {extents}", report.extents_checked).into());
    }
    let volume = store.volume("v")?;
    let mut buffer = vec![1; 4096];
    volume.read_at(volume.size() - 4096, &mut buffer)?;
    if buffer.iter().any(|byte| *byte != 0) {
        return Err("a hole of the file does not read as zeros".into());
    }
    Ok(())
}
