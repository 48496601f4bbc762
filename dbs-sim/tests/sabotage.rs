//! The test of the tests: each planted bug must be found, and nothing where there is none.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use dbs_core::sabotage::{Bug, set};
use dbs_sim::threshold::{Kind, cases};
use dbs_sim::{Config, run, runner, threshold};

/// Histories within which a planted bug must show.
const HISTORIES: u64 = 400;

/// The first seed whose history finds the bug, and what it says.
fn found_by_history(bug: Bug) -> Option<String> {
    set(Some(bug));
    let found = (0..HISTORIES).find_map(|seed| run(seed, runner::STEPS).err());
    set(None);
    found.map(|failure| {
        let step = failure.steps.len();
        format!("seed {}, step {step}: {}", failure.seed, first_line(&failure.message))
    })
}

/// What shows without any crash, or when a long relink is cut off.
fn found_soon(bug: Bug) -> Option<String> {
    set(Some(bug));
    let calm = |case| threshold::run_calm(case, &Config { tail: true, ..Config::small(7) }).err();
    let found = cases().iter().find_map(calm);
    let relink = || dbs_sim::relink::run(&Config { tail: false, ..Config::small(3) }).err();
    let found = found.or_else(relink);
    set(None);
    found.map(|message| format!("soon: {}", first_line(&message)))
}

/// What a threshold loop says, for bugs too rare for random histories.
fn found_by_threshold(bug: Bug) -> Option<String> {
    set(Some(bug));
    // Kills first, which are quick; and twice, as a machine that happens to lose power as well while
    // it recovers shows nothing that only the tail had.
    let attempts = [(Kind::Kill, 7), (Kind::Kill, 8), (Kind::PowerLoss, 7)];
    let found = attempts.into_iter().find_map(|(kind, seed)| {
        let config = Config { tail: true, ..Config::small(seed) };
        cases().iter().find_map(|case| threshold::run(case, kind, &config).err())
    });
    let twice = || {
        (0..2).find_map(|seed| {
            threshold::run_twice(&Config { tail: false, ..Config::small(seed) }).err()
        })
    };
    let found = found.or_else(twice);
    set(None);
    found.map(|message| format!("threshold: {}", first_line(&message)))
}

fn first_line(text: &str) -> String {
    text.lines().take(2).map(str::trim).collect::<Vec<_>>().join(" ").chars().take(220).collect()
}

#[test]
fn every_planted_bug_is_found() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        let later = || found_by_history(bug).or_else(|| found_by_threshold(bug));
        match found_soon(bug).or_else(later) {
            Some(how) => println!("{bug:?}: {how}"),
            None => missed.push(bug),
        }
    }
    assert!(Bug::ALL.len() >= 10);
    assert!(missed.is_empty(), "not found: {missed:?}");
}
