//! What commands cost on a store, one by one.

use crate::probe::Probe;
use dbs_benches::curve::Unit;
use dbs_benches::report::spread;
use dbs_benches::{Outcome, drain, timed};
use dbs_core::Store;
use dbs_core::store::SnapshotOptions;
use std::time::Duration;

/// How often each is timed.
const REPEATS: usize = 16;

/// Columns of what `opened` and `commands` give.
pub const COLUMNS: [(&str, Unit); 9] = [
    ("open", Unit::Time),
    ("create a volume", Unit::Time),
    ("take a snapshot", Unit::Time),
    ("clone it", Unit::Time),
    ("delete the clone", Unit::Time),
    ("delete the snapshot", Unit::Time),
    ("merge it", Unit::Time),
    ("memory when open", Unit::Memory),
    ("peak while opening", Unit::Memory),
];

/// The values of all columns; medians of the commands, until each is durable. What is merged is the
/// snapshot that holds all that the volume had.
pub fn values(probe: &Probe, store: &Store, volume: &str) -> Outcome<Vec<f64>> {
    let mut times = [const { Vec::new() }; 5];
    for number in 0..REPEATS {
        let name = format!("cost{number}");
        let options = SnapshotOptions::default();
        let took = [
            timed(|| store.create_volume(&name, 1 << 20).map(drop))?.1,
            timed(|| store.create_snapshot(volume, &name, &options).map(drop))?.1,
            timed(|| store.clone_volume(volume, &name, &format!("{name}clone")).map(drop))?.1,
            timed(|| store.delete_volume(&format!("{name}clone")))?.1,
        ];
        times.iter_mut().zip(took).for_each(|(all, one)| all.push(one));
        store.delete_volume(&name)?;
    }
    // Newest first: the oldest holds everything, and so is merged but once.
    let mut merged = Duration::ZERO;
    for number in (0..REPEATS).rev() {
        times[4].push(timed(|| store.delete_snapshot(volume, &format!("cost{number}")))?.1);
        merged = drain(store)?.merged;
    }
    let medians = times.map(|times| spread(times)[0].as_secs_f64());
    let memory = [probe.memory, probe.peak].map(|bytes| bytes as f64);
    let merged = merged.as_secs_f64();
    Ok([&[probe.time.as_secs_f64()], &medians[..], &[merged], &memory[..]].concat())
}
