//! Random requests over more data than the memory for checksums covers, against the same store with
//! memory for all of them, in turns.

use dbs_benches::fio::Job;
use dbs_benches::report::Table;
use dbs_benches::samples::progress;
use dbs_benches::server::Served;
use dbs_benches::{Bench, Outcome};
use std::path::Path;

/// The least memory for checksums there may be, and the data it covers.
const CACHE: &str = "256KiB";
const COVERED_BYTES: u64 = 256 << 20;
const ALL: &str = "64MiB";
const ROUNDS: usize = 3;

/// A served store: with little memory for checksums, or with enough.
struct Side {
    served: Served,
    store: std::path::PathBuf,
}

/// Takes the measurement.
pub fn measure(bench: &Bench) -> Outcome<Table> {
    let sizes: &[u64] = bench.pick(&[1, 4, 16, 64], &[1]);
    let largest = sizes.last().copied().unwrap_or(1) * COVERED_BYTES;
    let [all, few] = [side(bench, "all", ALL, largest)?, side(bench, "few", CACHE, largest)?];
    let title =
        format!("4 KiB over NBD with {CACHE} of memory for checksums, against memory for all");
    let columns = [
        "data over what the memory covers",
        "load",
        "IOPS, memory for all",
        "IOPS",
        "ratio, of each round",
        "openings in 1000 writes",
    ];
    let mut table = Table::new(&title, &columns);
    for times in sizes {
        let size = times * COVERED_BYTES;
        for side in [&all, &few] {
            read_all(bench, side, size)?;
        }
        for (pattern, load) in [("randwrite", "overwrite"), ("randread", "read")] {
            for depth in [1, 32, 128] {
                let job = Job::random(pattern, depth, size, bench.pick(4, 1));
                let mut rounds = Vec::new();
                let before = few.openings(bench)?;
                let mut requests = 0;
                for round in 0..bench.pick(ROUNDS, 1) {
                    let run = |side: &Side| side.served.measure(&job, &bench.dir);
                    // Neither always comes first.
                    let (all, few) = if round % 2 == 0 {
                        let all = run(&all)?;
                        (all, run(&few)?)
                    } else {
                        let few = run(&few)?;
                        (run(&all)?, few)
                    };
                    requests += few.requests;
                    rounds.push((all.iops, few.iops));
                }
                let opened = (few.openings(bench)? - before) as f64 * 1e3 / requests.max(1) as f64;
                let opened =
                    if pattern == "randwrite" { format!("{opened:.2}") } else { String::new() };
                let [all, few] =
                    [median(&rounds, |round| round.0), median(&rounds, |round| round.1)];
                let ratios: Vec<_> = rounds.iter().map(|r| format!("{:.2}", r.1 / r.0)).collect();
                let (name, ratios) = (format!("{load}, QD {depth}"), ratios.join(", "));
                progress(&format!("{times} times, {name}: {all:.0} {few:.0}, {ratios}"));
                let figures = (format!("{all:.0}"), format!("{few:.0}"));
                table.row(&[times, &name, &figures.0, &figures.1, &ratios, &opened]);
            }
        }
    }
    Ok(table)
}

/// A store with a volume of `size`, all of it written, and its server.
fn side(bench: &Bench, name: &str, cache: &str, size: u64) -> Outcome<Side> {
    let store = bench.init(&format!("{name}.dbs"), size + size / 8 + (1 << 30))?;
    bench.dbs.run(&store, &["volume", "create", "v", &size.to_string()])?;
    let socket = bench.dir.join(format!("{name}.sock"));
    let served = serve(bench, &store, &socket, cache)?;
    served.measure(&Job::fill(size), &bench.dir)?;
    Ok(Side { served, store })
}

fn serve(bench: &Bench, store: &Path, socket: &Path, cache: &str) -> Outcome<Served> {
    bench.dbs.serve_with(store, "v", socket, &["--checksum-cache", cache])
}

/// Reads everything once, so that what fits is in memory.
fn read_all(bench: &Bench, side: &Side, size: u64) -> Outcome<()> {
    let job = Job { pattern: "read", ..Job::fill(size) };
    side.served.measure(&job, &bench.dir).map(drop)
}

impl Side {
    /// Groups of checksums opened so far.
    fn openings(&self, bench: &Bench) -> Outcome<u64> {
        let text = bench.dbs.run(&self.store, &["--json", "info"])?;
        let info: serde_json::Value = serde_json::from_str(&text)?;
        info["checksums"]["openings"].as_u64().ok_or_else(|| "no openings in info".into())
    }
}

fn median(rounds: &[(f64, f64)], of: impl Fn(&(f64, f64)) -> f64) -> f64 {
    let mut values: Vec<_> = rounds.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
