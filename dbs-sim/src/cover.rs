//! What histories do in which states, counted: what they never do no history can find a fault in.

use crate::lock;
use crate::model::Model;
use crate::op::{Long, Op};
use crate::step::{Fate, RESERVE_EXTENTS};
use dbs_core::info::StoreInfo;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

static ON: AtomicBool = AtomicBool::new(false);
static COUNTS: Mutex<BTreeMap<(String, &str), u64>> = Mutex::new(BTreeMap::new());

/// What a step met besides the model.
pub struct Scene<'a> {
    /// The store.
    pub info: &'a StoreInfo,
    /// The call that stands still.
    pub job: Option<Long>,
    /// Reads on their way.
    pub reads: usize,
    /// It is the first step since the store was opened.
    pub fresh: bool,
    /// Bitmaps leave memory whenever they can.
    pub forgets: bool,
    /// The store takes no changes any more.
    pub poisoned: bool,
}

/// Counts from now on, for the whole process.
pub fn start() {
    ON.store(true, Ordering::Relaxed);
}

/// Whether anybody wants to know.
#[must_use]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Counts an operation.
pub fn note(op: &Op, fate: Fate, model: &Model, scene: &Scene<'_>) {
    let info = scene.info;
    let volumes = || model.volumes.values();
    let of = op.volume().and_then(|vol| model.volumes.get(&crate::op::volume_name(vol)));
    let states = [
        ("all", true),
        ("flatten", matches!(scene.job, Some(Long::Flatten { .. }))),
        ("flatten, same volume", of.is_some_and(|volume| volume.busy)),
        ("compress", matches!(scene.job, Some(Long::Compress { .. }))),
        ("vacuum", scene.job == Some(Long::Vacuum)),
        ("scrub", scene.job == Some(Long::Scrub)),
        ("relearn", scene.job == Some(Long::Relearn)),
        ("merging", info.snapshots_deleting > 0),
        ("put off", info.snapshots_put_off > 0),
        ("handle", volumes().any(|volume| volume.held)),
        ("reads", scene.reads > 0),
        ("rebuilding", volumes().any(|volume| volume.rebuilding)),
        ("retired", volumes().any(|v| v.snapshots.values().any(|s| s.retired))),
        ("on a file", of.is_some_and(|volume| volume.backed)),
        ("full", info.extents_free <= RESERVE_EXTENTS),
        ("slots full", info.snapshots >= info.snapshots_max),
        ("no tail", !info.tail),
        ("just opened", scene.fresh),
        ("paging", scene.forgets),
        ("poisoned", scene.poisoned),
        ("disturbed", fate != Fate::Calm),
    ];
    let text = format!("{op:?}");
    let kind = match op {
        Op::Begin { long: Long::Vacuum } => "Begin vacuum",
        Op::Begin { long: Long::Scrub } => "Begin scrub",
        Op::Begin { long: Long::Relearn } => "Begin relearn",
        _ => text.split([' ', '{']).next().unwrap_or_default(),
    };
    let mut counts = lock(&COUNTS);
    for (state, _) in states.into_iter().filter(|(_, is)| *is) {
        *counts.entry((kind.to_owned(), state)).or_default() += 1;
    }
}

/// The counts as a table.
#[must_use]
pub fn table() -> String {
    let counts = lock(&COUNTS);
    let states: BTreeSet<_> = counts.keys().map(|(_, state)| *state).collect();
    let kinds: BTreeSet<_> = counts.keys().map(|(kind, _)| kind).collect();
    let mut text = String::from("| operation |");
    states.iter().for_each(|state| text.extend([" ", state, " |"]));
    text += "\n|---|";
    text += &"---:|".repeat(states.len());
    for kind in kinds {
        let _ = write!(text, "\n| {kind} |");
        for state in &states {
            let count = counts.get(&(kind.clone(), *state)).copied().unwrap_or(0);
            let _ = write!(text, " {count} |");
        }
    }
    text
}
