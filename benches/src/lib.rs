//! What the measurements share: known content that can be verified, Markdown tables, facts about
//! the machine, and a tool that fills a store's metadata without writing its data.

pub mod content;
pub mod curve;
pub mod dataconn;
pub mod device;
pub mod fio;
pub mod machine;
pub mod plot;
pub mod process;
pub mod report;
pub mod samples;
pub mod server;

use crate::curve::Curve;
use crate::process::check_interrupted;
use crate::report::Table;
use crate::server::Dbs;
use dbs_core::{InitOptions, OpenOptions, Store};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A result whose error ends the measurement.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Steps of background work between two looks at what remains.
const WORK_STEPS: u64 = 256;

/// Where to measure, and how much.
#[derive(Debug, Clone)]
pub struct Bench {
    /// Directory for stores; removed afterwards by its owner.
    pub dir: PathBuf,
    /// Small sizes: shows that everything works, not how fast.
    pub quick: bool,
    /// The command `dbs`, for what is measured over NBD.
    pub dbs: Dbs,
    /// Directory for plots.
    pub plots: Option<PathBuf>,
}

impl Bench {
    /// The one of two sizes that was asked for.
    pub fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Gives a curve as a table, and writes its plot.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn finish(&self, name: &str, curve: &Curve) -> Outcome<Table> {
        if let Some(plots) = &self.plots {
            std::fs::create_dir_all(plots)?;
            std::fs::write(plots.join(name).with_extension("svg"), curve.svg())?;
        }
        Ok(curve.table())
    }

    /// A new store in the directory, sparse and `size` bytes long.
    pub fn init(&self, name: &str, size: u64) -> Outcome<PathBuf> {
        let path = self.dir.join(name);
        Store::init(&path, &InitOptions { size: Some(size), ..InitOptions::default() })?;
        Ok(path)
    }
}

/// Opens a store for writing, as a server does.
///
/// # Errors
/// Those of [`Store::open`].
pub fn open(path: &Path) -> Outcome<Store> {
    Ok(Store::open(path, &OpenOptions::default())?)
}

/// Background work, by what it waits for.
#[derive(Debug, Clone, Copy)]
pub struct Drained {
    /// Until everything deleted was merged or reclaimed, and its space could be used again.
    pub merged: Duration,
    /// From then on, until the space was given back to the file system or device.
    pub given_back: Duration,
}

/// Does all background work there is.
///
/// # Errors
/// Those of [`Store::work`].
pub fn drain(store: &Store) -> Outcome<Drained> {
    let begun = Instant::now();
    while store.info().snapshots_deleting > 0 && store.work(WORK_STEPS)?.done > 0 {
        check_interrupted()?;
    }
    let merged = begun.elapsed();
    while store.work(WORK_STEPS)?.remaining > 0 {
        check_interrupted()?;
    }
    Ok(Drained { merged, given_back: begun.elapsed() - merged })
}

/// Runs something and says how long it took.
pub fn timed<T, E>(run: impl FnOnce() -> Result<T, E>) -> Result<(T, Duration), E> {
    let begun = Instant::now();
    let value = run()?;
    Ok((value, begun.elapsed()))
}
