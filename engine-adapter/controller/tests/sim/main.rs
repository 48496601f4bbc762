//! Deterministic simulation of a volume: the controller and its rules as they are, on simulated replicas,
//! network and clock, under a user who reads and writes, a manager who rebuilds and snapshots, and
//! everything that can go wrong. `docs/testing.md` says how to use it.
#![allow(clippy::unwrap_used, missing_docs)]

mod beside;
mod client;
mod connections;
mod device;
mod directed;
mod history;
mod network;
mod parts;
mod path;
mod referee;
mod replica;
mod world;

use history::Stats;
use longhorn_controller::path::sabotage::Bug as Path;
use longhorn_controller::rules::sabotage::{Bug as Rule, set};
use network::{MISTAKE, Mistake};
use path::PLANTED;
use std::time::Instant;

/// Seeds of a normal run.
const SEEDS: u64 = 1200;
/// Actions of a manager in a history.
const STEPS: usize = 14;
/// Seeds within which a planted mistake must show.
const SABOTAGE_SEEDS: u64 = 6000;
/// Where rare ones have shown, to look there first. What histories do moves that.
const SHOWN: [(Planted, u64); 10] = [
    (Planted::Rule(Rule::UnmapWhileRebuilding), 34),
    (Planted::Rule(Rule::IgnoreCounters), 108),
    (Planted::Rule(Rule::KeepUnexpanded), 289),
    (Planted::Rule(Rule::KeepUnreverted), 72),
    (Planted::Rule(Rule::FaultRefusals), 222),
    (Planted::Rule(Rule::HurryForAny), 132),
    (Planted::Path(Path::SendAsNew), 199),
    (Planted::Path(Path::ForgetAway), 19),
    (Planted::Replica(Mistake::NoFence), 513),
    (Planted::Replica(Mistake::DoneTwice), 199),
];
/// Those that histories show too rarely, if at all; each with a scenario that does not go right then.
const RARE: [(Planted, fn() -> bool); 6] = [
    (Planted::Rule(Rule::KeepWoAhead), directed::who_is_ahead_is_lost),
    (Planted::Path(Path::IgnoreTimeout), directed::who_is_silent_is_lost),
    (Planted::Path(Path::WaitForAway), connections::who_is_away_for_too_long_is_lost),
    (Planted::Path(Path::FlapForEver), connections::who_answers_nothing_is_lost),
    (Planted::Path(Path::BounceForEver), connections::a_read_that_breaks_connections_ends),
    (Planted::Path(Path::FlushOnce), connections::a_flush_outlives_who_was_asked),
];
/// Mistakes of reactors that histories do not show: `tests/path/sabotage.rs` has a test for each.
const ELSEWHERE: [Path; 15] = [
    Path::OutliveHandOver,
    Path::AnswerBeforeFlush,
    Path::SettleAtEnd,
    Path::TrustSettled,
    Path::AnyUse,
    Path::TrustReplies,
    Path::PauseLong,
    Path::RetrySame,
    Path::IgnoreOldest,
    Path::HurryFlush,
    Path::HurryHealing,
    Path::KeepUnhealed,
    Path::Starve,
    Path::BelieveDamage,
    Path::HealFirst,
];

/// A planted mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planted {
    /// In the rules and their use.
    Rule(Rule),
    /// In the code of the reactors.
    Path(Path),
    /// In what simulated replicas do that the real ones must not.
    Replica(Mistake),
}

impl Planted {
    fn all() -> impl Iterator<Item = Self> {
        let paths = Path::ALL.into_iter().filter(|bug| !ELSEWHERE.contains(bug));
        let replicas = Mistake::ALL.into_iter().map(Self::Replica);
        Rule::ALL.into_iter().map(Self::Rule).chain(paths.map(Self::Path)).chain(replicas)
    }

    /// Makes this mistake, or none, on this thread.
    fn plant(planted: Option<Self>) {
        set(match planted {
            Some(Self::Rule(bug)) => Some(bug),
            _ => None,
        });
        PLANTED.set(match planted {
            Some(Self::Path(bug)) => Some(bug),
            _ => None,
        });
        MISTAKE.set(match planted {
            Some(Self::Replica(mistake)) => Some(mistake),
            _ => None,
        });
    }
}

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
                sum.reconnects += stats.reconnects;
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
            sum.reconnects += stats.reconnects;
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
            assert!(stats.rotten > seeds && stats.reconnects > seeds, "{stats:?}");
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
fn find(bug: Planted) -> Option<String> {
    let begun = Instant::now();
    Planted::plant(Some(bug));
    if let Some((_, goes_right)) = RARE.iter().find(|(rare, _)| *rare == bug) {
        let found = !goes_right();
        Planted::plant(None);
        return found.then(|| format!("{bug:?}: by its scenario"));
    }
    let first = SHOWN.iter().filter(|(shown, _)| *shown == bug).map(|(_, seed)| *seed);
    let mut seeds = first.chain(0..SABOTAGE_SEEDS);
    let found = seeds.find_map(|seed| history::run(seed, STEPS).err());
    Planted::plant(None);
    let what = found?;
    let what = what.lines().last().unwrap_or_default();
    Some(format!("{bug:?}, {:?}: {what}", begun.elapsed()))
}

#[test]
fn every_planted_mistake_is_found() {
    if let Ok(name) = std::env::var("DBS_CONTROLLER_BUG") {
        let names = |bug: &Planted| {
            let shown = format!("{bug:?}");
            shown == name || shown.ends_with(&format!("({name})"))
        };
        let bug = Planted::all().find(names);
        return println!("{}", find(bug.unwrap()).unwrap());
    }
    let half = |odd: usize| {
        let bugs = Planted::all().skip(odd).step_by(2);
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
    let paths = Path::ALL.len() - ELSEWHERE.len();
    assert_eq!(all.len(), Rule::ALL.len() + paths + Mistake::ALL.len());
}
