//! Measures reading through our FUSE view against the same through the Rust API, and beside other
//! programs that show an image as a file, on the same data, interleaved.
//!
//! `make bench-fuse`, or `cargo run --release -p dbs-benches --bin fuse -- --dir DIR`

mod subjects;

use clap::Parser;
use dbs_benches::process::check_interrupted;
use dbs_benches::report::{Table, rewrite};
use dbs_benches::samples::progress;
use dbs_benches::server::Dbs;
use dbs_benches::{Outcome, machine, process};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use subjects::{Image, Subject};

/// What the document has around the table.
const MARK: &str = "fuse";
/// What reading through FUSE is to reach of the Rust API.
const TARGET: f64 = 0.7;
/// Readers at once.
const READERS: usize = 16;

/// Measure reading images through FUSE.
#[derive(Debug, Parser)]
struct Args {
    /// Directory for the images, on the medium to measure
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// The command `dbs`; else the one beside this program
    #[arg(long, value_name = "FILE")]
    dbs: Option<PathBuf>,
    /// Size of the image in MiB
    #[arg(long, default_value_t = 2048)]
    size: u64,
    /// Seconds of each load of random reads
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Rounds, of which the median counts
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// A small image and one short round: shows that everything works, not how fast
    #[arg(long)]
    quick: bool,
    /// Put the table into this Markdown file, between its marks
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
}

/// Figures of each round by subject and load.
type Figures = BTreeMap<(&'static str, &'static str), Vec<f64>>;

fn main() -> ExitCode {
    process::exit("fuse", run(&Args::parse()))
}

fn run(args: &Args) -> Outcome<()> {
    process::catch_interrupts()?;
    let dbs = Dbs::find(args.dbs.as_deref())?;
    let (size, rounds) = if args.quick { (64, 1) } else { (args.size, args.rounds) };
    let time = Duration::from_secs_f64(if args.quick { 0.2 } else { args.seconds });
    let words: Vec<_> = std::env::args().skip(1).collect();
    let about =
        machine::describe(&args.dir, &format!("make bench-fuse, with {}", words.join(" ")))?;
    let dir = tempfile::Builder::new().prefix("fuse-").tempdir_in(&args.dir)?;
    let image = Image::make(&dir.path().canonicalize()?, size << 20)?;
    let (subjects, missing) = Subject::start_all(&image, &dbs)?;
    let mut figures = Figures::new();
    for round in 0..rounds {
        progress(&format!("round {} of {rounds}", round + 1));
        for turn in 0..subjects.len() {
            // Each in another place of each round.
            measure(&subjects[(turn + round as usize) % subjects.len()], time, &mut figures)?;
        }
    }
    let names: Vec<_> = subjects.iter().map(|subject| subject.name).collect();
    // Before the directory: they are mounted in it.
    drop(subjects);
    let mut text = format!(
        "{about}- an image of {size} MiB of noise, {} s a load, {rounds} rounds: medians\n",
        time.as_secs_f64()
    );
    missing.iter().for_each(|why| text.push_str(&format!("- not measured: {why}\n")));
    text.push_str(&format!("\n{}", table(&names, &figures)));
    println!("{text}");
    if let Some(path) = &args.document {
        rewrite(path, MARK, &text)?;
    }
    Ok(dir.close()?)
}

fn measure(subject: &Subject, time: Duration, figures: &mut Figures) -> Outcome<()> {
    let loads = [
        ("sequential", subject.sequential()?),
        ("one", subject.random(1, time)?),
        ("many", subject.random(READERS, time)?),
    ];
    for (load, figure) in loads {
        check_interrupted()?;
        progress(&format!("{}, {load}: {figure:.0}", subject.name));
        figures.entry((subject.name, load)).or_default().push(figure);
    }
    Ok(())
}

fn table(names: &[&'static str], figures: &Figures) -> String {
    let median = |name: &'static str, load: &'static str| {
        let mut values = figures.get(&(name, load)).cloned().unwrap_or_default();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or_default()
    };
    let readers = format!("{READERS} readers, IOPS");
    let columns =
        ["", "sequential, MB/s", "of the Rust API", "1 reader, IOPS", &readers, "16 of 1"];
    let mut table = Table::new("Reading an image", &columns);
    let base = median(subjects::API, "sequential");
    for name in names {
        let (sequential, one, many) =
            (median(name, "sequential"), median(name, "one"), median(name, "many"));
        let ratio = format!("{:.2}", sequential / base);
        table.row(&[
            name,
            &format!("{sequential:.0}"),
            &ratio,
            &format!("{one:.0}"),
            &format!("{many:.0}"),
            &format!("{:.1}", many / one),
        ]);
    }
    let reached = median(subjects::VIEW, "sequential") / base;
    let verdict = if reached >= TARGET { "reached" } else { "missed" };
    let text = table.finish();
    format!(
        "{text}\nSequential through FUSE: {reached:.2} of the Rust API; {TARGET} is {verdict}.\n"
    )
}
