//! Cost along the size of a store, and along the extents in use.

use crate::cost::{COLUMNS, values};
use crate::probe::probe;
use dbs_benches::curve::Curve;
use dbs_benches::device::{Filling, fill};
use dbs_benches::report::Table;
use dbs_benches::{Bench, Outcome, open};
use dbs_core::{InitOptions, Store};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
/// Smaller than usual, so that the most extents fit into a file of ext4, which has 16 TiB at most.
const EXTENT_BYTES: u64 = 512 << 10;
/// Files there may be larger than the file systems of disks allow.
const MEMORY: &str = "/dev/shm";

/// Empty stores of growing size.
pub fn sizes(bench: &Bench) -> Outcome<Table> {
    let sizes = bench.pick(&[1, 16, 256, 4096, 16_000, 65_536][..], &[1, 16][..]);
    let title = "A store of growing size, nothing in it";
    let mut curve = Curve::new(title, "GiB", &COLUMNS);
    for size in sizes {
        let place = Place::with_room(bench, size * GIB)?;
        let path = place.path();
        Store::init(&path, &InitOptions { size: Some(size * GIB), ..InitOptions::default() })?;
        measure(&mut curve, *size as f64, &path, EXTENT_BYTES)?;
        std::fs::remove_file(path)?;
    }
    bench.finish("sizes", &curve)
}

/// Stores with a growing number of extents, all of them in use by one volume.
pub fn extents(bench: &Bench) -> Outcome<Table> {
    let powers = bench.pick(&[10, 14, 18, 20, 22, 24][..], &[8, 10][..]);
    let title = "A store with a growing number of extents (of 512 KiB), all in use";
    let mut curve = Curve::new(title, "extents", &COLUMNS);
    for power in powers {
        let size = EXTENT_BYTES << power;
        let place = Place::with_room(bench, size)?;
        let path = place.path();
        let options =
            InitOptions { size: Some(size), extent_size: EXTENT_BYTES, ..InitOptions::default() };
        Store::init(&path, &options)?;
        let store = open(&path)?;
        store.create_volume("v", store.info().extents_total * EXTENT_BYTES)?;
        store.close()?;
        let filled = fill(&path, Filling { scattered: false, partial: false })?;
        measure(&mut curve, f64::from(filled.extents), &path, 0)?;
        std::fs::remove_file(path)?;
    }
    bench.finish("extents", &curve)
}

/// Adds a row for a closed store; without a volume `v` if `create` gives the size of one.
fn measure(curve: &mut Curve, x: f64, path: &Path, create: u64) -> Outcome<()> {
    let probed = probe(path)?;
    let store = open(path)?;
    if create > 0 {
        store.create_volume("v", create)?;
    }
    curve.add(x, values(&probed, &store, "v")?);
    Ok(store.close()?)
}

/// Where a store is made.
enum Place {
    Here(PathBuf),
    Memory(TempDir),
}

impl Place {
    /// The directory given, or memory where its file system has no files so large.
    fn with_room(bench: &Bench, size: u64) -> Outcome<Self> {
        let path = bench.dir.join("grow.dbs");
        let fits = std::fs::File::create(&path)?.set_len(size).is_ok();
        std::fs::remove_file(&path)?;
        if fits { Ok(Self::Here(path)) } else { Ok(Self::Memory(tempfile::tempdir_in(MEMORY)?)) }
    }

    fn path(&self) -> PathBuf {
        match self {
            Self::Here(path) => path.clone(),
            Self::Memory(dir) => dir.path().join("grow.dbs"),
        }
    }
}
