//! The test of the tests: how a planted bug is found, and how much it takes.

use crate::machine::Config;
use crate::runner;
use crate::step::images_taken;
use crate::threshold::{self, Kind, cases, compressed};
use dbs_core::sabotage::{Bug, set};

/// Where each planted bug was found by the last `dbs-sim bugs`.
const KNOWN: &str = include_str!("../planted.md");

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

/// Bugs that histories of requests beside one another are for.
const REQUEST_BUGS: [Bug; 6] = [
    Bug::MarkUnrecorded,
    Bug::WriteBesideHolds,
    Bug::ExcludeOwnLane,
    Bug::ReadOutsideFence,
    Bug::ClaimTwice,
    Bug::OverwriteBeforeTail,
];

/// Bugs that histories of bitmaps that leave memory are for.
const PAGING_BUGS: [Bug; 4] =
    [Bug::DirtyBitmapsGo, Bug::OlderBitmapsCome, Bug::PlannedBitmapsGo, Bug::FillHeldJournal];

/// Bugs that commands on compressed extents are for.
const COMPRESS_BUGS: [Bug; 3] =
    [Bug::CompressBeforeWritten, Bug::ExpandBeforeWritten, Bug::ExpandForgetsZeros];

/// A way of looking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Where it was found before.
    Known,
    /// Every command without a crash; a long relink, and the healing of a block, cut off; flushes
    /// beside one another, those of reactors among them; requests
    /// beside one another.
    Calm,
    /// Random histories.
    Histories,
    /// Every command cut off at each change of the disk, for bugs too rare for random histories.
    Thresholds,
}

/// What one run of the simulator can show; a number is its seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Every command without a crash.
    Commands,
    /// A flush beside one that fails.
    Flush,
    /// A page opened beside a flush.
    Page,
    /// A block healed.
    Heal,
    /// A write beside one that excludes.
    Held,
    /// One that excludes beside a write.
    Excluding,
    /// A long relink.
    Relink,
    /// A history of groups of checksums.
    Groups(u64),
    /// A history of flushes that reactors do.
    Flushes(u64),
    /// A history of requests beside one another.
    Requests(u64),
    /// Commands on compressed extents, with power lost at each change of the disk.
    Compressed(u64),
    /// A metadata block that stays unreadable while its bitmaps are away.
    Parked,
    /// A history of bitmaps that leave memory.
    Bitmaps(u64),
    /// A history of trees.
    Trees(u64),
    /// A history of everything.
    History(u64),
    /// Every command killed at each change of the disk.
    Kills(u64),
    /// Power lost at each change of the disk.
    Cuts(u64),
    /// Power lost again while the store is opened.
    Twice(u64),
}

/// How a bug was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Catch {
    /// The run that found it.
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
    let places = ways.iter().flat_map(|way| way.places(bug));
    let found = places.into_iter().find_map(|place| Some((place, place.look()?)));
    set(None);
    found.map(|(place, message)| Catch {
        by: format!("{place:?}"),
        images: images_taken() - before,
        message: beginning(&message),
    })
}

impl Way {
    fn places(self, bug: Bug) -> Vec<Place> {
        let some = |which: &[Bug], places: Vec<Place>| match which.contains(&bug) {
            true => places,
            false => Vec::new(),
        };
        match self {
            Self::Known => known(bug).into_iter().collect(),
            Self::Calm => [
                (0..200).map(Place::Flushes).collect(),
                vec![Place::Commands],
                some(&INTENT_BUGS, (0..200).map(Place::Groups).collect()),
                some(&[Bug::FillHeldJournal], vec![Place::Parked]),
                some(&COMPRESS_BUGS, vec![Place::Compressed(7)]),
                some(&PAGING_BUGS, (0..200).map(Place::Bitmaps).collect()),
                some(&REQUEST_BUGS, vec![Place::Held, Place::Excluding]),
                some(&REQUEST_BUGS, (0..600).map(Place::Requests).collect()),
                (0..1000).map(Place::Trees).collect(),
                vec![Place::Relink, Place::Flush, Place::Page, Place::Heal],
            ]
            .concat(),
            Self::Histories => (0..1000).map(Place::History).collect(),
            // Kills first, which are quick; and twice, as a machine that happens to lose power as
            // well while it recovers shows nothing that only the tail had.
            Self::Thresholds => vec![
                Place::Kills(7),
                Place::Kills(8),
                Place::Cuts(7),
                Place::Twice(0),
                Place::Twice(1),
            ],
        }
    }
}

/// The place of a line `| bug | images | place |`.
fn known(bug: Bug) -> Option<Place> {
    let name = format!("{bug:?}");
    let fields = |line: &'static str| line.split('|').map(str::trim).collect::<Vec<_>>();
    let line = KNOWN.lines().map(fields).find(|fields| fields.get(1) == Some(&name.as_str()))?;
    let (place, seed) = line.get(3)?.trim_end_matches(')').split_once('(').unzip();
    let seed = seed.and_then(|seed: &str| seed.parse().ok()).unwrap_or(0);
    Some(match place.or_else(|| line.get(3).copied())? {
        "Commands" => Place::Commands,
        "Flush" => Place::Flush,
        "Page" => Place::Page,
        "Heal" => Place::Heal,
        "Held" => Place::Held,
        "Excluding" => Place::Excluding,
        "Relink" => Place::Relink,
        "Groups" => Place::Groups(seed),
        "Flushes" => Place::Flushes(seed),
        "Requests" => Place::Requests(seed),
        "Compressed" => Place::Compressed(seed),
        "Parked" => Place::Parked,
        "Bitmaps" => Place::Bitmaps(seed),
        "Trees" => Place::Trees(seed),
        "History" => Place::History(seed),
        "Kills" => Place::Kills(seed),
        "Cuts" => Place::Cuts(seed),
        "Twice" => Place::Twice(seed),
        _ => return None,
    })
}

impl Place {
    /// What is wrong there, if anything is.
    fn look(self) -> Option<String> {
        let small = Config::small(3);
        let tail = |tail, seed| Config { tail, ..Config::small(seed) };
        let threshold = |kind, seed| {
            let failed = |case| threshold::run(case, kind, &tail(true, seed)).err();
            cases().iter().find_map(failed)
        };
        match self {
            Self::Commands => {
                let config = tail(true, 7);
                cases().iter().find_map(|case| threshold::run_calm(case, &config).err())
            }
            Self::Flush => crate::beside::run(&small).err(),
            Self::Page => crate::beside::run_shared(&small).err(),
            Self::Heal => crate::heal::run(&tail(false, 3)).err(),
            Self::Held => crate::beside::run_held(&small).err(),
            Self::Excluding => crate::beside::run_excluding(&small).err(),
            Self::Relink => crate::relink::run(&tail(false, 3)).err(),
            Self::Groups(seed) => crate::intent::run(seed).err(),
            Self::Flushes(seed) => crate::ringed::run(seed).err(),
            Self::Requests(seed) => crate::requests::run(seed).err(),
            Self::Compressed(seed) => compressed()
                .iter()
                .find_map(|case| threshold::run(case, Kind::PowerLoss, &tail(false, seed)).err()),
            Self::Parked => crate::paging::parked().err(),
            Self::Bitmaps(seed) => crate::paging::run(seed).err(),
            Self::Trees(seed) => {
                runner::run_trees(seed, runner::TREE_STEPS).err().map(|failure| failure.message)
            }
            Self::History(seed) => {
                runner::run(seed, runner::STEPS).err().map(|failure| failure.message)
            }
            Self::Kills(seed) => threshold(Kind::Kill, seed),
            Self::Cuts(seed) => threshold(Kind::PowerLoss, seed),
            Self::Twice(seed) => threshold::run_twice(&tail(false, seed)).err(),
        }
    }
}

fn beginning(text: &str) -> String {
    text.lines().take(2).map(str::trim).collect::<Vec<_>>().join(" ").chars().take(220).collect()
}
