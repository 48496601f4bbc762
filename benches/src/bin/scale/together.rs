//! Snapshots of one chain that are deleted together: what each extent of the oldest costs.

use dbs_benches::device::{Filling, fill};
use dbs_benches::report::{Table, time};
use dbs_benches::{Bench, Outcome, drain, open, timed};
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, Store};

const EXTENT_BYTES: u64 = 64 << 10;
const SNAPSHOTS: usize = 16;

/// Takes the measurement.
pub fn measure(bench: &Bench) -> Outcome<Table> {
    let extents: u64 = bench.pick(1 << 20, 1 << 10);
    let title = format!(
        "{SNAPSHOTS} snapshots deleted together, the oldest with {extents} extents, the others with none"
    );
    let mut table = Table::new(&title, &["order", "deleted", "merged"]);
    let oldest_first: Vec<_> = (0..SNAPSHOTS).collect();
    let newest_first: Vec<_> = (0..SNAPSHOTS).rev().collect();
    for (order, numbers) in [("oldest first", oldest_first), ("newest first", newest_first)] {
        let path = bench.dir.join("together.dbs");
        let size = Some(extents * EXTENT_BYTES);
        let options = InitOptions { size, extent_size: EXTENT_BYTES, ..InitOptions::default() };
        Store::init(&path, &options)?;
        let store = open(&path)?;
        store.create_volume("v", store.info().extents_total * EXTENT_BYTES)?;
        store.close()?;
        fill(&path, Filling { scattered: false, partial: false })?;
        let store = open(&path)?;
        for number in 0..SNAPSHOTS {
            store.create_snapshot("v", &number.to_string(), &SnapshotOptions::default())?;
        }
        let delete = |number: &usize| store.delete_snapshot("v", &number.to_string());
        let ((), deleted) = timed(|| numbers.iter().try_for_each(delete))?;
        table.row(&[&order, &time(deleted), &time(drain(&store)?.merged)]);
        store.close()?;
        std::fs::remove_file(path)?;
    }
    Ok(table)
}
