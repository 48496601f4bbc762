//! Measures our engine (controller and replicas) against upstream's, through the socket frontend,
//! interleaved, with one client for both: whole, without storage, and the frontend alone.
//!
//! `make bench-engine`, or `cargo run --release -p dbs-benches --bin engine -- --dir DIR`

mod bare;
mod loads;
mod stack;
mod tables;

use clap::Parser;
use dbs_benches::report::{rewrite, write_json};
use dbs_benches::samples::{Results, progress};
use dbs_benches::{Outcome, machine, process};
use loads::Bench;
use stack::{Binaries, ROWS};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// What the document has around the tables.
const MARK: &str = "engine";

/// Measure the engine of DBS against that of Longhorn.
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
    /// A flag for our controller alone; can be repeated
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    flag: Vec<String>,
    /// Volume size in MiB
    #[arg(long, default_value_t = 1024)]
    size: u64,
    /// Seconds a load
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Rounds, of which the median counts
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// First of the ports to use
    #[arg(long, default_value_t = 28_000)]
    port: u16,
    /// Only these rows; can be repeated
    #[arg(long, value_parser = ROWS.map(|row| row.name))]
    only: Vec<String>,
    /// Put the tables into this Markdown file, between its marks
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
    /// Put every single run into this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    process::exit("engine", run(&Args::parse()))
}

fn run(args: &Args) -> Outcome<()> {
    process::catch_interrupts()?;
    let ours = match &args.ours {
        Some(ours) => ours.clone(),
        None => std::env::current_exe()?.with_file_name("longhorn"),
    };
    let flags = args.flag.clone();
    let binaries = Binaries { ours, upstream: args.upstream.clone(), flags };
    for binary in [&binaries.ours, &binaries.upstream] {
        if !binary.is_file() {
            return Err(format!("no `longhorn` at {}", binary.display()).into());
        }
    }
    let words: Vec<_> = std::env::args().skip(1).collect();
    let command = format!("make bench-engine, with {}", words.join(" "));
    let about = machine::describe(&args.dir, &command)?;
    let dir = tempfile::Builder::new().prefix("engine-").tempdir_in(&args.dir)?;
    let path = dir.path().canonicalize()?;
    let mut bench = Bench {
        binaries: &binaries,
        dir: &path,
        size: args.size << 20,
        time: Duration::from_secs(args.seconds),
        rounds: args.rounds,
        port: args.port,
        results: Results::default(),
    };
    for row in ROWS {
        if args.only.is_empty() || args.only.iter().any(|only| only == row.name) {
            progress(row.name);
            bench.row(&row).map_err(|error| format!("{}: {error}", row.name))?;
        }
    }
    let about = format!(
        "{about}- volumes of {} MiB, {} s a load, {} rounds: medians\n",
        args.size, args.seconds, args.rounds
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
