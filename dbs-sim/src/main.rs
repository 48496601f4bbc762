//! `dbs-sim`: runs histories from seeds.

use dbs_core::sabotage::Bug;
use dbs_sim::bugs::{Way, find};
use dbs_sim::{Failure, Stats, cover, generate::Generator, runner};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const USAGE: &str = "usage: dbs-sim run --seed N [--steps N] [--images N] [--trees] [--shrink]
       dbs-sim soak --seconds N [--seed N] [--steps N] [--images N] [--trees] [--threads N]
       dbs-sim cover --seconds N [as for soak]
       dbs-sim groups --seconds N [--seed N]
       dbs-sim requests --seconds N [--seed N]
       dbs-sim bugs [NAME]";

#[derive(Default)]
struct Arguments {
    seed: Option<u64>,
    steps: Option<u64>,
    seconds: Option<u64>,
    threads: Option<u64>,
    /// Crash images of each moment.
    images: Option<u64>,
    /// Histories without crashes, about trees that change under handles and reads.
    trees: bool,
    shrink: bool,
    /// The only planted bug to look for.
    bug: Option<String>,
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let arguments = match parse(args) {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("dbs-sim: {message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match (command.as_str(), arguments.seed, arguments.seconds) {
        ("run", Some(seed), None) => run(seed, &arguments),
        ("soak", _, Some(seconds)) => soak(seconds, &arguments),
        ("cover", _, Some(seconds)) => {
            cover::start();
            let code = soak(seconds, &arguments);
            println!("{}", cover::table());
            code
        }
        ("groups", _, Some(seconds)) => groups(seconds, arguments.seed.unwrap_or(0)),
        ("requests", _, Some(seconds)) => requests(seconds, arguments.seed.unwrap_or(0)),
        ("bugs", None, None) => bugs(arguments.bug.as_deref()),
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut arguments = Arguments::default();
    while let Some(name) = args.next() {
        match name.as_str() {
            "--shrink" => arguments.shrink = true,
            "--trees" => arguments.trees = true,
            bug if !bug.starts_with('-') => arguments.bug = Some(name),
            _ => {
                let value = args.next().ok_or_else(|| format!("{name} needs a number"))?;
                arguments.set(&name, &value)?;
            }
        }
    }
    Ok(arguments)
}

impl Arguments {
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let number = value.parse().map_err(|_| format!("{name} {value}: not a number"))?;
        match name {
            "--seed" => self.seed = Some(number),
            "--steps" => self.steps = Some(number),
            "--seconds" => self.seconds = Some(number),
            "--images" => self.images = Some(number),
            "--threads" => self.threads = Some(number),
            _ => return Err(format!("{name}: no such option")),
        }
        Ok(())
    }

    fn steps(&self) -> usize {
        let usual = if self.trees { runner::TREE_STEPS } else { runner::STEPS };
        self.steps.map_or(usual, |steps| steps as usize)
    }

    fn history(&self, seed: u64) -> Result<Stats, Box<Failure>> {
        if self.trees {
            return runner::run_trees(seed, self.steps());
        }
        let mut config = Generator::config(seed);
        config.images_each = self.images.map_or(config.images_each, |images| images as usize);
        runner::run_on(&config, self.steps())
    }
}

fn run(seed: u64, arguments: &Arguments) -> ExitCode {
    println!("{:?}", Generator::config(seed));
    match arguments.history(seed) {
        Ok(stats) => {
            println!("seed {seed}: {stats:?}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            report(failure, arguments);
            ExitCode::FAILURE
        }
    }
}

fn report(failure: Box<Failure>, arguments: &Arguments) {
    println!("{failure}");
    if arguments.steps.is_some() {
        println!("        with --steps {}", arguments.steps());
    }
    if let Some(images) = arguments.images {
        println!("        with --images {images}");
    }
    if arguments.shrink {
        // Each replay that still fails may panic: once was enough to read.
        std::panic::set_hook(Box::new(|_| {}));
        println!("\nshortened:\n{}", runner::shrink(failure));
    }
}

fn soak(seconds: u64, arguments: &Arguments) -> ExitCode {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let first = arguments.seed.unwrap_or(now);
    let threads = arguments.threads.unwrap_or_else(|| {
        std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64)
    });
    println!("seeds from {first} on, {threads} threads, {seconds} s");
    let end = Instant::now() + Duration::from_secs(seconds);
    let next = AtomicU64::new(first);
    let total = Mutex::new((Stats::default(), None::<Box<Failure>>));
    let failed = || lock(&total).1.is_some();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while Instant::now() < end && !failed() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    match arguments.history(seed) {
                        Ok(stats) => lock(&total).0 += stats,
                        Err(failure) => lock(&total).1 = Some(failure),
                    }
                }
            });
        }
    });
    let (stats, failure) = total.into_inner().unwrap_or_else(|e| e.into_inner());
    println!("{} histories, {stats:?}", next.into_inner() - first);
    match failure {
        None => ExitCode::SUCCESS,
        Some(failure) => {
            report(failure, arguments);
            ExitCode::FAILURE
        }
    }
}

/// Histories of groups of checksums, one after the other.
fn groups(seconds: u64, first: u64) -> ExitCode {
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut seed, mut images) = (first, 0);
    while Instant::now() < end {
        let run = dbs_sim::intent::run(seed);
        match run.and_then(|images| Ok(images + dbs_sim::intent::run_with_errors(seed)?.0)) {
            Ok(more) => images += more,
            Err(message) => {
                println!("{message}");
                return ExitCode::FAILURE;
            }
        }
        seed += 1;
    }
    println!("{} histories from {first} on, {images} crash images", seed - first);
    ExitCode::SUCCESS
}

/// Histories of requests beside one another, one after the other.
fn requests(seconds: u64, first: u64) -> ExitCode {
    let (end, mut seed) = (Instant::now() + Duration::from_secs(seconds), first);
    while Instant::now() < end {
        if let Err(message) = dbs_sim::requests::run(seed) {
            println!("seed {seed}: {message}");
            return ExitCode::FAILURE;
        }
        seed += 1;
    }
    println!("{} histories from {first} on", seed - first);
    ExitCode::SUCCESS
}

/// Plants each bug and says how it was found, as a table.
fn bugs(only: Option<&str>) -> ExitCode {
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = 0;
    println!("| bug | crash images until found | by |\n|---|---|---|");
    for bug in Bug::ALL.into_iter().filter(|bug| only.is_none_or(|only| format!("{bug:?}") == only))
    {
        match find(bug, &[Way::Calm, Way::Histories, Way::Thresholds]) {
            Some(found) => println!("| {bug:?} | {} | {} |", found.images, found.by),
            None => {
                missed += 1;
                println!("| {bug:?} | not found | |");
            }
        }
    }
    if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
