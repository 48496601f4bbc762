//! Counts what each request costs and compares that with `baseline.json`: `dbs-guard` fails if it
//! is more, `dbs-guard accept` makes it the new baseline.

mod baseline;
mod callgrind;

use baseline::{Baseline, Cost, Verdict};
use dbs_guard::cases::{self, Case, Outcome, Ran};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const BASELINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/baseline.json");
/// Child's argument: run one case, and print what it did as JSON.
const RUN: &str = "run";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => check(),
        ["accept"] => accept(),
        [RUN, name] => run(name),
        _ => Err("usage: dbs-guard [accept | run CASE]".into()),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("dbs-guard: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether nothing costs more than in the baseline.
fn check() -> Outcome<bool> {
    let baseline = read()?;
    let here = Baseline::here();
    if baseline.architecture != here.architecture {
        let (theirs, ours) = (&baseline.architecture, &here.architecture);
        println!(
            "SKIPPED guard of the hot path: the baseline is for {theirs}, this machine is {ours}"
        );
        return Ok(true);
    }
    let now = count()?;
    let names: Vec<&str> = cases::ALL.iter().map(|case| case.name).collect();
    let (table, verdict) = baseline.compare(&now, &names);
    print!("{table}");
    if baseline.compiler != here.compiler {
        println!(
            "\nThe baseline was made by {}, this is {}: they do not compare. If nothing else \
             changed, `make guard-accept` takes the counts above as the new baseline.",
            baseline.compiler, here.compiler
        );
        return Ok(false);
    }
    match verdict {
        Verdict::Worse | Verdict::Unknown => println!(
            "\nThe hot path has changed. To see where the instructions are:\n  callgrind_annotate \
             '{}'\nIf it is worth it, say why in the commit, which takes the new baseline along:\n  \
             make guard-accept",
            profile(&cases::ALL[0])?.with_file_name("CASE.callgrind").display()
        ),
        Verdict::Better => println!("\nTo keep it that way: make guard-accept"),
        Verdict::Same => {}
    }
    Ok(verdict < Verdict::Unknown)
}

/// Makes what is counted now the baseline.
fn accept() -> Outcome<bool> {
    let now = count()?;
    let text = serde_json::to_string_pretty(&now)?;
    std::fs::write(BASELINE, text + "\n").map_err(|error| format!("{BASELINE}: {error}"))?;
    println!("{BASELINE} holds the new baseline");
    Ok(true)
}

/// Runs one case, in the process that is being counted.
fn run(name: &str) -> Outcome<bool> {
    let case = cases::ALL.iter().find(|case| case.name == name).ok_or("no such case")?;
    println!("{}", serde_json::to_string(&case.run()?)?);
    Ok(true)
}

fn read() -> Outcome<Baseline> {
    let text = std::fs::read_to_string(BASELINE).map_err(|error| {
        format!("{BASELINE}: {error}; `make guard-accept` makes a baseline of what is now")
    })?;
    Ok(serde_json::from_str(&text).map_err(|error| format!("{BASELINE}: {error}"))?)
}

/// Counts every case.
fn count() -> Outcome<Baseline> {
    let mut now = Baseline::here();
    for case in cases::ALL {
        let cost = cost(case).map_err(|error| format!("`{}`: {error}", case.name))?;
        now.cases.insert(case.name.to_owned(), cost);
    }
    Ok(now)
}

fn cost(case: &Case) -> Outcome<Cost> {
    let program = std::env::current_exe()?;
    let (counted, output) = callgrind::run(&program, &[RUN, case.name], &profile(case)?)?;
    let ran: Ran = serde_json::from_str(&output)?;
    let each = |count: u64| (count as f64 / ran.requests as f64 * 100.0).round() / 100.0;
    Ok(Cost {
        instructions: each(counted.instructions).round() as u64,
        allocations: each(counted.allocations),
        reads: each(ran.device.reads),
        writes: each(ran.device.writes),
        flushes: each(ran.device.flushes),
    })
}

/// Where a case's profile is left for who wants to look into it: beside the program.
fn profile(case: &Case) -> Outcome<PathBuf> {
    let program = std::env::current_exe()?;
    let directory = program.parent().unwrap_or(Path::new("."));
    Ok(directory.join(format!("{}.callgrind", case.name.replace([' ', ','], "-"))))
}
