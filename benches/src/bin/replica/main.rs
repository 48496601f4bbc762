//! Measures our Longhorn replica against upstream's over data connections, interleaved, with one
//! client for both; and rebuilds with upstream's engine.
//!
//! `make bench-replica`, or `cargo run --release -p dbs-benches --bin replica -- --dir DIR`

mod rebuild;
mod sections;
mod subject;
mod tables;

use clap::Parser;
use dbs_benches::report::{rewrite, write_json};
use dbs_benches::samples::{Results, progress};
use dbs_benches::{Outcome, machine, process};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use subject::Binaries;

/// What the document has around the tables.
const MARK: &str = "replica";

/// Measure the replica of DBS against that of Longhorn.
#[derive(Debug, Parser)]
struct Args {
    /// Directory for the replicas, on the medium to measure
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Upstream's `longhorn`
    #[arg(long, value_name = "FILE", env = "LONGHORN_BIN")]
    upstream: PathBuf,
    /// Ours; else the one beside this program
    #[arg(long, value_name = "FILE")]
    ours: Option<PathBuf>,
    /// Volume size in MiB
    #[arg(long, default_value_t = 1024)]
    size: u64,
    /// Volume size in MiB for rebuilds
    #[arg(long, default_value_t = 4096)]
    rebuild_size: u64,
    /// Seconds a load
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Rounds, of which the median counts
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// First of the ports to use
    #[arg(long, default_value_t = 27_000)]
    port: u16,
    /// Only these sections; can be repeated
    #[arg(long, value_parser = SECTIONS.map(|section| section.0))]
    only: Vec<String>,
    /// Put the tables into this Markdown file, between its marks
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
    /// Put every single run into this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What all sections need.
struct Bench<'a> {
    binaries: &'a Binaries,
    dir: &'a Path,
    size: u64,
    rebuild_size: u64,
    time: Duration,
    rounds: u32,
    port: u16,
    results: Results,
}

type Section = fn(&mut Bench<'_>) -> Outcome<()>;

const SECTIONS: [(&str, Section); 4] = [
    ("loads", sections::loads),
    ("snapshot", sections::after_snapshot),
    ("chains", sections::chains),
    ("rebuild", rebuild::measure),
];

fn main() -> ExitCode {
    process::exit("replica", run(&Args::parse()))
}

fn run(args: &Args) -> Outcome<()> {
    process::catch_interrupts()?;
    let ours = match &args.ours {
        Some(ours) => ours.clone(),
        None => std::env::current_exe()?.with_file_name("longhorn"),
    };
    let binaries = Binaries { ours, upstream: args.upstream.clone() };
    for binary in [&binaries.ours, &binaries.upstream] {
        if !binary.is_file() {
            return Err(format!("no `longhorn` at {}", binary.display()).into());
        }
    }
    let words: Vec<_> = std::env::args().skip(1).collect();
    let command = format!("make bench-replica, with {}", words.join(" "));
    let about = machine::describe(&args.dir, &command)?;
    let dir = tempfile::Builder::new().prefix("replica-").tempdir_in(&args.dir)?;
    let path = dir.path().canonicalize()?;
    let mut bench = Bench {
        binaries: &binaries,
        dir: &path,
        size: args.size << 20,
        rebuild_size: args.rebuild_size << 20,
        time: Duration::from_secs(args.seconds),
        rounds: args.rounds,
        port: args.port,
        results: Results::default(),
    };
    for (name, section) in SECTIONS {
        if args.only.is_empty() || args.only.iter().any(|only| only == name) {
            progress(name);
            section(&mut bench).map_err(|error| format!("{name}: {error}"))?;
        }
    }
    let about = format!(
        "{about}- volumes of {} MiB (rebuilds: {} MiB), {} s a load, {} rounds: medians\n",
        args.size, args.rebuild_size, args.seconds, args.rounds
    );
    let text = format!("{about}\n{}", tables::all(&bench.results));
    println!("{text}");
    if let Some(path) = &args.json {
        write_json(path, &bench.results.samples)?;
    }
    if let Some(path) = &args.document {
        rewrite(path, MARK, &text)?;
    }
    Ok(dir.close()?)
}
