//! What the medium itself does: fio on as many files as a row has replicas. Where an engine comes close
//! to it, no other could be further ahead.

use dbs_benches::Outcome;
use dbs_benches::dataconn::Figures;
use dbs_benches::fio::{Job, Running, Target};
use std::fs::{create_dir_all, remove_dir_all};
use std::path::PathBuf;
use std::time::Duration;

/// The subject's name.
pub const BARE: &str = "bare files";

/// Files of a volume's size, one for each replica, written once.
pub struct Bare {
    files: Vec<PathBuf>,
    size: u64,
    seconds: u32,
}

impl Drop for Bare {
    fn drop(&mut self) {
        for dir in &self.files {
            let _ = remove_dir_all(dir);
        }
    }
}

impl Bare {
    /// Writes them.
    pub fn make(dir: PathBuf, replicas: u16, size: u64, time: Duration) -> Outcome<Self> {
        let seconds = u32::try_from(time.as_secs().max(1))?;
        let files = (0..replicas).map(|number| dir.with_extension(format!("{number}"))).collect();
        let bare = Self { files, size, seconds };
        for dir in &bare.files {
            create_dir_all(dir)?;
            Job::fill(size).run(&Target::File(dir.join("raw")), dir)?;
        }
        Ok(bare)
    }

    /// What a volume over these files could do at most: each has all writes, and its share of the
    /// reads.
    pub fn measure(&self, write: bool, block: u64, depth: u32) -> Outcome<Figures> {
        let count = self.files.len() as u32;
        let pattern = match (block > 4096, write) {
            (true, true) => "write",
            (true, false) => "read",
            (false, true) => "randwrite",
            (false, false) => "randread",
        };
        let depth = if write { depth } else { (depth / count).max(1) };
        let job = Job { block, ..Job::random(pattern, depth, self.size, self.seconds) };
        let start = |dir: &PathBuf| job.start(&Target::File(dir.join("raw")), dir);
        let running: Vec<Running> = self.files.iter().map(start).collect::<Outcome<_>>()?;
        let mut sum = Figures::default();
        for run in running {
            let figures = run.finish()?;
            sum.iops += figures.iops;
            sum.mb_per_s += figures.mb_per_s;
            sum.p50_us = sum.p50_us.max(figures.p50_us);
            sum.p99_us = sum.p99_us.max(figures.p99_us);
            sum.cpu_per_million += figures.cpu_per_100k() * 10.0 / f64::from(count);
        }
        if write {
            sum.iops /= f64::from(count);
            sum.mb_per_s /= f64::from(count);
        }
        Ok(sum)
    }
}
