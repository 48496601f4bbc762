//! Measures what grows with the number of volumes, snapshots and extents, through the public API,
//! and prints Markdown. Everything written is verified: a measurement of wrong data is an error.
//!
//! `cargo run --release -p dbs-benches --bin scale -- --dir DIR`

mod beside;
mod caches;
mod churn;
mod cost;
mod extents;
mod grow;
mod many;
mod probe;
mod served;
mod snapshots;
mod terabytes;
mod together;

use clap::Parser;
use dbs_benches::report::{Table, rewrite};
use dbs_benches::server::Dbs;
use dbs_benches::{Bench, Outcome, machine, process};
use std::path::PathBuf;
use std::process::ExitCode;

/// Measure how DBS scales.
#[derive(Debug, Parser)]
struct Args {
    /// Directory for stores, on the medium to measure; 34 GiB of it are used, 8 without `caches`
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Small sizes, in seconds: to see that it works, not how fast
    #[arg(long)]
    quick: bool,
    /// Only these measurements
    #[arg(long, value_parser = PARTS.map(|part| part.0))]
    only: Vec<String>,
    /// The `dbs` to measure; else the one beside this program
    #[arg(long, value_name = "FILE")]
    dbs: Option<PathBuf>,
    /// Put the tables into this Markdown file, between its marks
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
    /// Put plots into this directory
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Open this store in a process of its own and print seconds and bytes of memory
    #[arg(long, hide = true)]
    probe: Option<PathBuf>,
}

/// What the document has around the tables.
const MARK: &str = "scale";

type Measure = fn(&Bench) -> Outcome<Table>;

const PARTS: [(&str, Measure); 13] = [
    ("snapshots", snapshots::measure),
    ("many", many::measure),
    ("churn", churn::measure),
    ("extents", extents::measure),
    ("terabytes", terabytes::measure),
    ("beside", beside::measure),
    ("caches", caches::measure),
    ("together", together::measure),
    ("curve-sizes", grow::sizes),
    ("curve-extents", grow::extents),
    ("curve-volumes", served::volumes),
    ("curve-clients", served::clients),
    ("curve-chain", served::chain),
];

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match &args.probe {
        Some(store) => probe::answer(store),
        None => run(&args),
    };
    process::exit("scale", result)
}

fn run(args: &Args) -> Outcome<()> {
    let command: Vec<_> = std::env::args().skip(1).collect();
    let command =
        format!("cargo run --release -p dbs-benches --bin scale -- {}", command.join(" "));
    process::catch_interrupts()?;
    let dbs = Dbs::find(args.dbs.as_deref())?;
    let mut text = machine::describe(&args.dir, command.trim_end())? + "\n";
    if args.quick {
        text += "Quick run: these figures say nothing about speed.\n\n";
    }
    print!("{text}");
    for (name, measure) in PARTS {
        if !args.only.is_empty() && !args.only.iter().any(|only| only == name) {
            continue;
        }
        // One store at a time: each part's directory goes before the next begins.
        let dir = tempfile::tempdir_in(&args.dir)?;
        let bench = Bench {
            // fio runs elsewhere, and needs the whole path.
            dir: dir.path().canonicalize()?,
            quick: args.quick,
            dbs: dbs.clone(),
            plots: args.plots.clone(),
        };
        let table = measure(&bench).map_err(|error| format!("{name}: {error}"))?.finish();
        println!("{table}");
        text += &format!("{table}\n");
        process::check_interrupted()?;
    }
    match &args.document {
        None => Ok(()),
        Some(path) => rewrite(path, MARK, &text),
    }
}
