//! The test of the tests: how a planted bug is found, and how much it takes.

use crate::machine::Config;
use crate::runner;
use crate::step::images_taken;
use crate::threshold::{self, Kind, cases};
use dbs_core::sabotage::{Bug, is, set};

/// Bugs that histories of groups of checksums are for.
const INTENT_BUGS: [Bug; 7] = [
    Bug::LoseIntent,
    Bug::LateIntent,
    Bug::ClearIntentEarly,
    Bug::TrustOpenGroup,
    Bug::CloseKeepsDoubts,
    Bug::WriteFreshPages,
    Bug::ForgetKeepsPage,
];
/// Such histories within which one of them must show.
const INTENTS: u64 = 200;

/// Bugs that histories of requests beside one another are for.
const REQUEST_BUGS: [Bug; 4] =
    [Bug::WriteBesideHolds, Bug::ReadOutsideFence, Bug::ClaimTwice, Bug::OverwriteBeforeTail];
/// Such histories within which one of them must show.
const REQUESTS: u64 = 600;

/// Random histories within which a bug must show, or it is looked for in another way.
const HISTORIES: u64 = 1000;

/// A way of looking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Every command without a crash; a long relink, and the healing of a block, cut off; flushes
    /// beside one another, those of reactors among them; requests
    /// beside one another.
    Calm,
    /// Random histories.
    Histories,
    /// Every command cut off at each change of the disk, for bugs too rare for random histories.
    Thresholds,
}

/// How a bug was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Catch {
    /// How: for a history its seed and step.
    pub by: String,
    /// Crash images opened until then.
    pub images: u64,
    /// The beginning of what it says.
    pub message: String,
}

/// Plants the bug and looks for it in these ways, one after the other.
#[must_use]
pub fn find(bug: Bug, ways: &[Way]) -> Option<Catch> {
    let before = images_taken();
    set(Some(bug));
    let found = ways.iter().find_map(|way| match way {
        Way::Calm => calm(),
        Way::Histories => histories(),
        Way::Thresholds => thresholds(),
    });
    set(None);
    found.map(|(by, message)| Catch {
        by,
        images: images_taken() - before,
        message: beginning(&message),
    })
}

fn calm() -> Option<(String, String)> {
    let config = Config { tail: true, ..Config::small(7) };
    let found = || cases().iter().find_map(|case| threshold::run_calm(case, &config).err());
    let relink = || crate::relink::run(&Config { tail: false, ..Config::small(3) }).err();
    let beside = || crate::beside::run(&Config::small(3)).err();
    let shared = || crate::beside::run_shared(&Config::small(3)).err();
    let heal = || crate::heal::run(&Config { tail: false, ..Config::small(3) }).err();
    let named = |by: &str, message: Option<String>| message.map(|text| (by.to_owned(), text));
    ringed()
        .or_else(|| named("a command without a crash", found()))
        .or_else(intents)
        .or_else(requests)
        .or_else(trees)
        .or_else(|| named("a long relink", relink()))
        .or_else(|| named("a flush beside one that fails", beside()))
        .or_else(|| named("a page opened beside a flush", shared()))
        .or_else(|| named("a block healed", heal()))
}

/// Histories of groups of checksums.
fn intents() -> Option<(String, String)> {
    if !INTENT_BUGS.iter().any(|bug| is(*bug)) {
        return None;
    }
    let found = |seed| Some((seed, crate::intent::run(seed).err()?));
    let (seed, message) = (0..INTENTS).find_map(found)?;
    Some((format!("history of groups {seed}"), message))
}

/// Histories of flushes that reactors do within which a bug of them must show.
const RINGED: u64 = 200;

fn ringed() -> Option<(String, String)> {
    let found = |seed| Some((seed, crate::ringed::run(seed).err()?));
    let (seed, message) = (0..RINGED).find_map(found)?;
    Some((format!("history of flushes {seed}"), message))
}

/// Histories of requests beside one another.
fn requests() -> Option<(String, String)> {
    if !REQUEST_BUGS.iter().any(|bug| is(*bug)) {
        return None;
    }
    let held = crate::beside::run_held(&Config::small(3)).err();
    let held = held.map(|message| ("a write beside one that excludes".to_owned(), message));
    held.or_else(|| {
        let found = |seed| Some((seed, crate::requests::run(seed).err()?));
        let (seed, message) = (0..REQUESTS).find_map(found)?;
        Some((format!("history of requests {seed}"), message))
    })
}

/// Histories of trees within which a bug must show.
const TREES: u64 = 1000;

fn trees() -> Option<(String, String)> {
    let found = (0..TREES).find_map(|seed| runner::run_trees(seed, runner::TREE_STEPS).err());
    found.map(|failure| {
        let by = format!("history of trees {}, step {}", failure.seed, failure.steps.len());
        (by, failure.message)
    })
}

/// The first seed whose history finds it.
fn histories() -> Option<(String, String)> {
    let found = (0..HISTORIES).find_map(|seed| runner::run(seed, runner::STEPS).err());
    found.map(|failure| {
        let by = format!("history {}, step {}", failure.seed, failure.steps.len());
        (by, failure.message)
    })
}

fn thresholds() -> Option<(String, String)> {
    // Kills first, which are quick; and twice, as a machine that happens to lose power as well while
    // it recovers shows nothing that only the tail had.
    let attempts = [(Kind::Kill, 7), (Kind::Kill, 8), (Kind::PowerLoss, 7)];
    let found = attempts.into_iter().find_map(|(kind, seed)| {
        let config = Config { tail: true, ..Config::small(seed) };
        let failed = |case| threshold::run(case, kind, &config).err();
        cases().iter().find_map(failed).map(|message| (format!("thresholds, {kind:?}"), message))
    });
    let twice = |seed| threshold::run_twice(&Config { tail: false, ..Config::small(seed) }).err();
    found.or_else(|| {
        let message = (0..2).find_map(twice)?;
        Some(("thresholds, power lost twice".to_owned(), message))
    })
}

fn beginning(text: &str) -> String {
    text.lines().take(2).map(str::trim).collect::<Vec<_>>().join(" ").chars().take(220).collect()
}
