//! Deterministic simulation of a volume: the controller and its rules as they are, on simulated replicas,
//! network and clock, under a user who reads and writes, a manager who rebuilds and snapshots, and
//! everything that can go wrong. `docs/testing.md` says how to use it.
#![allow(clippy::unwrap_used, missing_docs)]

mod client;
mod directed;
mod heal;
mod history;
mod parts;
mod path;
mod referee;
mod replica;
mod world;

use history::Stats;
use longhorn_controller::rules::sabotage::{Bug, set};
use std::time::Instant;

/// Seeds of a normal run.
const SEEDS: u64 = 3000;
/// Actions of a manager in a history.
const STEPS: usize = 14;
/// Seeds within which a planted mistake must show.
const SABOTAGE_SEEDS: u64 = 6000;
/// Where rare ones have shown, to look there first. What histories do moves that.
const SHOWN: [(Bug, u64); 7] = [
    (Bug::KeepAllFull, 4437),
    (Bug::KeepWoAhead, 1948),
    (Bug::KeepUnexpanded, 296),
    (Bug::KeepExtraLayers, 99),
    (Bug::KeepUnreverted, 484),
    (Bug::FaultRefusals, 222),
    (Bug::HealFromBefore, 414),
];

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs seeds on two threads; the first that fails, or what all came to.
fn run_all(seeds: std::ops::Range<u64>) -> Result<Stats, String> {
    let half = |odd: u64| {
        let seeds = seeds.clone().filter(move |seed| seed % 2 == odd);
        move || -> Result<Stats, String> {
            let mut sum = Stats::default();
            for seed in seeds {
                let stats = history::run(seed, STEPS)?;
                sum.requests += stats.requests;
                sum.rebuilds += stats.rebuilds;
                sum.snapshots += stats.snapshots;
                sum.restarts += stats.restarts;
                sum.checks += stats.checks;
                sum.rotten += stats.rotten;
            }
            Ok(sum)
        }
    };
    std::thread::scope(|scope| {
        let threads = [scope.spawn(half(0)), scope.spawn(half(1))];
        let mut sum = Stats::default();
        for thread in threads {
            let stats = thread.join().map_err(|_| "a history panicked".to_owned())??;
            sum.requests += stats.requests;
            sum.rebuilds += stats.rebuilds;
            sum.snapshots += stats.snapshots;
            sum.restarts += stats.restarts;
            sum.checks += stats.checks;
            sum.rotten += stats.rotten;
        }
        Ok(sum)
    })
}

#[test]
fn no_history_shows_what_must_not_be() {
    if let Some(seed) = number("DBS_CONTROLLER_SEED") {
        let outcome = history::run(seed, STEPS);
        println!("{outcome:?}");
        if let Err(what) = outcome {
            panic!("{what}");
        }
        return;
    }
    let seeds = number("DBS_CONTROLLER_SEEDS").unwrap_or(SEEDS);
    let begun = Instant::now();
    match run_all(0..seeds) {
        Err(what) => panic!("{what}"),
        Ok(stats) => {
            println!("{seeds} seeds in {:?}: {stats:?}", begun.elapsed());
            assert!(stats.rebuilds > seeds / 4 && stats.snapshots > seeds, "{stats:?}");
            assert!(stats.rotten > seeds, "{stats:?}");
        }
    }
}

#[test]
fn a_seed_means_the_same_each_time() {
    let seeds = 0..20;
    let all = || seeds.clone().map(|seed| format!("{:?}", history::run(seed, STEPS)));
    assert!(all().eq(all()));
}

/// The first seed that shows a planted mistake, and how.
fn find(bug: Bug) -> Option<String> {
    let begun = Instant::now();
    set(Some(bug));
    let first = SHOWN.iter().filter(|(shown, _)| *shown == bug).map(|(_, seed)| *seed);
    let mut seeds = first.chain(0..SABOTAGE_SEEDS);
    let found = seeds.find_map(|seed| history::run(seed, STEPS).err());
    set(None);
    let what = found?;
    let what = what.lines().last().unwrap_or_default();
    Some(format!("{bug:?}, {:?}: {what}", begun.elapsed()))
}

#[test]
fn every_planted_mistake_is_found() {
    if let Ok(name) = std::env::var("DBS_CONTROLLER_BUG") {
        let bug = Bug::ALL.into_iter().find(|bug| format!("{bug:?}") == name).unwrap();
        return println!("{}", find(bug).unwrap());
    }
    let half = |odd: usize| {
        let bugs = Bug::ALL.into_iter().skip(odd).step_by(2);
        move || bugs.map(|bug| (bug, find(bug))).collect::<Vec<_>>()
    };
    let mut all = Vec::new();
    std::thread::scope(|scope| {
        for thread in [scope.spawn(half(0)), scope.spawn(half(1))] {
            all.extend(thread.join().unwrap());
        }
    });
    for how in all.iter().filter_map(|(_, found)| found.as_ref()) {
        println!("{how}");
    }
    let missed: Vec<_> =
        all.iter().filter(|(_, found)| found.is_none()).map(|(bug, _)| bug).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
    assert_eq!(all.len(), Bug::ALL.len());
}
