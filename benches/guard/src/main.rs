//! Counts what each request costs and compares that with `baseline.json`: `dbs-guard` fails if it
//! is more, `dbs-guard accept` makes it the new baseline.

mod baseline;
mod callgrind;

use baseline::{Baseline, Cost, Verdict};
use callgrind::Counted;
use dbs_guard::cases::{self, Case, Ran};
use dbs_guard::{Outcome, Unavailable};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const BASELINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/baseline.json");
/// A child's arguments: run half of a case, or all, and print what was done as JSON.
const RUN: &str = "run";
const HALF: &str = "half";
const WHOLE: &str = "whole";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => check(),
        ["accept"] => accept(),
        [RUN, part, name] => run(name, *part == HALF),
        _ => Err("usage: dbs-guard [accept]".into()),
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
    let mut baseline = read()?;
    let here = Baseline::here();
    if baseline.architecture != here.architecture {
        let (theirs, ours) = (&baseline.architecture, &here.architecture);
        println!("SKIPPED guard of the hot path: the baseline is for {theirs}, this is {ours}");
        return Ok(true);
    }
    // How much the kernel does at once decides how many turns a server takes.
    let kernel = (baseline.kernel != here.kernel).then(|| {
        format!("the baseline was made on Linux {}, this is {}", baseline.kernel, here.kernel)
    });
    let (now, impossible) = count(kernel.as_deref())?;
    baseline.cases.retain(|name, _| !impossible.contains(&name.as_str()));
    let mut names: Vec<&str> = cases::ALL.iter().map(|case| case.name).collect();
    names.retain(|name| !impossible.contains(name));
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
        Verdict::Worse | Verdict::Unknown => {
            println!("\nThe hot path has changed. Where the instructions are shows, for each row,");
            println!("  callgrind_annotate '{}'", profile("ROW")?.display());
            println!("If it is worth it, the commit says why and takes the new baseline along:");
            println!("  make guard-accept");
        }
        Verdict::Better => println!("\nTo keep it that way: make guard-accept"),
        Verdict::Same => {}
    }
    Ok(verdict < Verdict::Unknown)
}

/// Makes what is counted now the baseline.
fn accept() -> Outcome<bool> {
    let (now, impossible) = count(None)?;
    if !impossible.is_empty() {
        return Err("a baseline has all cases; accept it where all can be counted".into());
    }
    let text = serde_json::to_string_pretty(&now)?;
    std::fs::write(BASELINE, text + "\n").map_err(|error| format!("{BASELINE}: {error}"))?;
    println!("{BASELINE} holds the new baseline");
    Ok(true)
}

/// Runs one case, in the process that is being counted.
fn run(name: &str, half: bool) -> Outcome<bool> {
    let case = cases::ALL.iter().find(|case| case.name == name).ok_or("no such case")?;
    let ran = match case.run(half) {
        Ok(ran) => Ok(ran),
        Err(error) => match error.downcast_ref::<Unavailable>() {
            Some(why) => Err(why.to_string()),
            None => return Err(error),
        },
    };
    println!("{}", serde_json::to_string(&ran)?);
    Ok(true)
}

fn read() -> Outcome<Baseline> {
    let text = std::fs::read_to_string(BASELINE).map_err(|error| {
        format!("{BASELINE}: {error}; `make guard-accept` makes a baseline of what is now")
    })?;
    Ok(serde_json::from_str(&text).map_err(|error| format!("{BASELINE}: {error}"))?)
}

/// Counts every case; also the names of those that are impossible here. `unserved` is why those of a
/// server are.
fn count(unserved: Option<&str>) -> Outcome<(Baseline, Vec<&'static str>)> {
    let mut now = Baseline::here();
    let mut impossible = Vec::new();
    for case in cases::ALL {
        let counted = match unserved.filter(|_| case.is_served()) {
            Some(why) => Err(why.to_owned()),
            None => cost(case).map_err(|error| format!("`{}`: {error}", case.name))?,
        };
        match counted {
            Ok(cost) => drop(now.cases.insert(case.name.to_owned(), cost)),
            Err(why) => {
                println!("SKIPPED guard of `{}`: {why}", case.name);
                impossible.push(case.name);
            }
        }
    }
    Ok((now, impossible))
}

/// What a request of this kind costs, or why that cannot be found out here.
fn cost(case: &Case) -> Outcome<Result<Cost, String>> {
    let program = std::env::current_exe()?;
    let profile = profile(case.name)?;
    let run = |part| -> Outcome<(Counted, Result<Ran, String>)> {
        let (counted, output) = callgrind::run(&program, &[RUN, part, case.name], &profile)?;
        Ok((counted, serde_json::from_str(&output)?))
    };
    let ((half, half_ran), (whole, ran)) = (run(HALF)?, run(WHOLE)?);
    let (half_ran, ran) = match (half_ran, ran) {
        (Ok(half), Ok(whole)) => (half, whole),
        (Err(why), _) | (_, Err(why)) => return Ok(Err(why)),
    };
    if whole.instructions <= half.instructions {
        return Err("nothing was counted: valgrind does not find the function".into());
    }
    let requests = (ran.requests - half_ran.requests) as f64;
    let each = |half: u64, whole: u64| {
        let difference = whole.checked_sub(half).ok_or("more requests cost less")?;
        Ok::<_, &str>((difference as f64 / requests * 100.0).round() / 100.0)
    };
    let (before, after) = (half_ran.device, ran.device);
    Ok(Ok(Cost {
        instructions: each(half.instructions, whole.instructions)?.round() as u64,
        allocations: each(half.allocations, whole.allocations)?,
        reads: each(before.reads, after.reads)?,
        writes: each(before.writes, after.writes)?,
        flushes: each(before.flushes, after.flushes)?,
    }))
}

/// Where a case's profile is left for who wants to look into it: beside the program.
fn profile(name: &str) -> Outcome<PathBuf> {
    let program = std::env::current_exe()?;
    let directory = program.parent().unwrap_or(Path::new("."));
    Ok(directory.join(format!("{name}.callgrind")))
}
