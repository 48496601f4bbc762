//! Measures what grows with the number of volumes, snapshots and extents, through the public API,
//! and prints Markdown. Everything written is verified: a measurement of wrong data is an error.
//!
//! `cargo run --release -p dbs-benches --bin scale -- --dir DIR`

mod churn;
mod extents;
mod many;
mod probe;
mod snapshots;
mod terabytes;

use clap::Parser;
use dbs_benches::report::Table;
use dbs_benches::{Bench, Outcome, machine};
use std::path::PathBuf;
use std::process::ExitCode;

/// Measure how DBS scales.
#[derive(Debug, Parser)]
struct Args {
    /// Directory for stores, on the medium to measure; 8 GiB of it are used
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Small sizes, in seconds: to see that it works, not how fast
    #[arg(long)]
    quick: bool,
    /// Only these measurements
    #[arg(long, value_parser = PARTS.map(|part| part.0))]
    only: Vec<String>,
    /// Open this store in a process of its own and print seconds and bytes of memory
    #[arg(long, hide = true)]
    probe: Option<PathBuf>,
}

type Measure = fn(&Bench) -> Outcome<Table>;

const PARTS: [(&str, Measure); 5] = [
    ("snapshots", snapshots::measure),
    ("many", many::measure),
    ("churn", churn::measure),
    ("extents", extents::measure),
    ("terabytes", terabytes::measure),
];

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match &args.probe {
        Some(store) => probe::answer(store),
        None => run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scale: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Outcome<()> {
    let command: Vec<_> = std::env::args().skip(1).collect();
    let command =
        format!("cargo run --release -p dbs-benches --bin scale -- {}", command.join(" "));
    if args.quick {
        println!("Quick run: these figures say nothing about speed.\n");
    }
    println!("{}", machine::describe(&args.dir, command.trim_end())?);
    for (name, measure) in PARTS {
        if !args.only.is_empty() && !args.only.iter().any(|only| only == name) {
            continue;
        }
        // One store at a time: each part's directory goes before the next begins.
        let dir = tempfile::tempdir_in(&args.dir)?;
        let bench = Bench { dir: dir.path().to_owned(), quick: args.quick };
        println!("{}", measure(&bench).map_err(|error| format!("{name}: {error}"))?.finish());
    }
    Ok(())
}
