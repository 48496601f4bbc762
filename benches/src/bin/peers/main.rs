//! Measures the NBD server of `dbs` against its peers and the bare file, interleaved, with fio.
//!
//! `make bench`, or `cargo run --release -p dbs-benches --bin peers -- --dir DIR`

mod bench;
mod beside;
mod depth;
mod first;
mod reach;
mod results;
mod steady;
mod systems;
mod tables;

use bench::{Bench, Sizes};
use clap::Parser;
use dbs_benches::report::{rewrite, write_json};
use dbs_benches::{Outcome, machine, process};
use results::{Results, progress};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use systems::Tools;

/// What the document has around the tables.
const MARK: &str = "peers";

/// Measure `dbs serve` against qemu-nbd, nbdkit, the Go prototype and the bare file.
#[derive(Debug, Parser)]
struct Args {
    /// Directory for images, on the medium to measure; default sizes need 40 GiB
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    #[command(flatten)]
    sizes: Sizes,
    /// Only these sections; can be repeated
    #[arg(long, value_parser = SECTIONS.map(|section| section.0))]
    only: Vec<String>,
    /// The `dbs` to measure; else the one beside this program
    #[arg(long, value_name = "FILE")]
    dbs: Option<PathBuf>,
    /// Command that serves the Go prototype: it makes a volume of {size} bytes on {file} and
    /// exports it over NBD, with the empty name, on the unix socket {socket} until SIGTERM
    #[arg(long, value_name = "COMMAND", env = "DBS_PROTOTYPE")]
    prototype: Option<String>,
    /// Put the tables into this Markdown file, between its marks
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
    /// Put every single run into this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

type Section = fn(&mut Bench) -> Outcome<()>;

const SECTIONS: [(&str, Section); 8] = [
    ("random", steady::random_loads),
    ("flushed", steady::flushed_loads),
    ("sequential", steady::sequential_loads),
    ("checksums", steady::checked_loads),
    ("first", first::measure),
    ("depth", depth::measure),
    ("snapshots", beside::snapshots),
    ("deletion", beside::deletion),
];

fn main() -> ExitCode {
    process::exit("peers", run(&Args::parse()))
}

fn run(args: &Args) -> Outcome<()> {
    process::catch_interrupts()?;
    let tools = Tools::find(args.dbs.as_deref(), args.prototype.clone())?;
    for (system, version) in tools.versions() {
        if let Err(reason) = version {
            eprintln!("{} is missing: {reason}", system.title());
        }
    }
    let free = nix::sys::statvfs::statvfs(&args.dir)?;
    let (free, needed) = (free.blocks_available() * free.fragment_size(), args.sizes.needed());
    if free < needed {
        let [free, needed] = [free, needed].map(|bytes| bytes >> 20);
        return Err(
            format!("{needed} MiB are needed, {free} are free: use a smaller --size").into()
        );
    }
    let about = about(args, &tools)?;
    let dir = tempfile::Builder::new().prefix("peers-").tempdir_in(&args.dir)?;
    // Commands run elsewhere need the whole path.
    let path = dir.path().canonicalize()?;
    let results = Results::default();
    let mut bench = Bench { tools: &tools, sizes: args.sizes.clone(), dir: &path, results };
    for (name, section) in SECTIONS {
        if args.only.is_empty() || args.only.iter().any(|only| only == name) {
            progress(name);
            section(&mut bench).map_err(|error| format!("{name}: {error}"))?;
        }
    }
    let results = bench.results;
    let text = format!("{about}\n{}{}", reach::table(&results), tables::all(&results));
    println!("{text}");
    report(args, &tools, &about, &results, &text)?;
    progress("removing the images");
    Ok(dir.close()?)
}

/// Machine, versions, sizes: as Markdown.
fn about(args: &Args, tools: &Tools) -> Outcome<String> {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let command = format!("cargo run --release -p dbs-benches --bin peers -- {}", words.join(" "));
    let mut text = machine::describe(&args.dir, command.trim_end())?;
    for (system, version) in tools.versions() {
        let version = match version {
            Ok(version) => version.clone(),
            Err(reason) => format!("missing ({reason})"),
        };
        text += &format!("- {}: {version}\n", system.title());
    }
    let sizes = &args.sizes;
    text += &format!(
        "- images of {} MiB, chains of {} MiB, {} s a load, {} rounds{}\n",
        sizes.image() >> 20,
        sizes.chain() >> 20,
        sizes.seconds(),
        sizes.rounds(),
        if sizes.quick { "; **a quick run: for a glance only**" } else { "" },
    );
    Ok(text)
}

fn report(args: &Args, tools: &Tools, about: &str, results: &Results, text: &str) -> Outcome<()> {
    if let Some(path) = &args.json {
        let versions = tools.versions().iter().map(|(system, version)| {
            let (Ok(version) | Err(version)) = version;
            json!({ "system": system, "version": version })
        });
        let raw = json!({
            "about": about,
            "systems": versions.collect::<Vec<_>>(),
            "results": results,
        });
        write_json(path, &raw)?;
    }
    if let Some(path) = &args.document {
        rewrite(path, MARK, text)?;
    }
    Ok(())
}
