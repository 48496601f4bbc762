//! The catalogue of damage: every kind of it is planted, found by `check`, told by name and
//! consequence, and never a panic.

use crate::kinds::{Expect, Kind, kinds};
use crate::plant::Plant;
use crate::{Sample, common, in_time, use_all};
use dbs_core::info::{CheckReport, Severity};
use dbs_core::{ErrorKind, Store};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Kinds there must be at least.
const KINDS_MIN: usize = 60;

/// The stores that are damaged: closed in good order, and left behind by a crash.
pub struct Stores {
    pub closed: (Sample, serde_json::Value),
    pub crashed: (Sample, serde_json::Value),
}

impl Stores {
    pub fn new() -> Self {
        let with_dump = |sample: Sample| {
            let store = common::open(&sample.disk, 5, true).unwrap();
            let dump = serde_json::from_str(&common::dump(&store)).unwrap();
            (sample, dump)
        };
        Self { closed: with_dump(Sample::new(true)), crashed: with_dump(Sample::new(false)) }
    }

    /// A copy of the store that a kind is about, damaged so; what the finding should name.
    pub fn plant(&self, kind: &Kind) -> (&Sample, Arc<common::Mem>, Option<u64>) {
        let (sample, dump) = if kind.crashed { &self.crashed } else { &self.closed };
        let disk = Arc::new(sample.disk.fork());
        let index = (kind.plant)(&Plant { disk: &disk, dump });
        (sample, disk, index)
    }
}

/// What a check should have said and did not.
fn is_found(
    kind: &Kind,
    index: Option<u64>,
    result: &dbs_core::Result<CheckReport>,
) -> Result<(), String> {
    match (&kind.expect, result) {
        (Expect::Finding(severity, region), Ok(report)) => {
            let found = report.findings.iter().any(|finding| {
                finding.severity == *severity
                    && finding.region == *region
                    && finding.index == index
                    && kind.says.iter().all(|text| finding.message.contains(text))
            });
            let wanted = (severity, region, index, kind.says);
            if !found {
                return Err(format!("no {wanted:?} among {:?}", report.findings));
            }
            match report.worst() {
                Some(worst) if worst > *severity => Err(format!("worse: {:?}", report.findings)),
                _ => Ok(()),
            }
        }
        (Expect::Error(wanted), Err(error)) => {
            let text = error.to_string();
            let right = error.kind() == *wanted && kind.says.iter().all(|part| text.contains(part));
            if right { Ok(()) } else { Err(text) }
        }
        (_, result) => Err(format!("{result:?}")),
    }
}

fn is_safe_to_open(kind: &Kind, sample: &Sample, disk: &Arc<common::Mem>) -> Result<(), String> {
    for read_only in [true, false] {
        let opened = common::open(disk, 5, read_only);
        match (&kind.expect, opened) {
            (Expect::Finding(Severity::Corrupt, _), Err(error)) => {
                if error.kind() != ErrorKind::Corrupt {
                    return Err(format!("opening it: {error}"));
                }
            }
            (Expect::Error(wanted), Err(error)) if error.kind() == *wanted => {}
            (Expect::Finding(Severity::Note | Severity::Leak, _), Ok(store)) => {
                if common::contents(&store) != sample.contents {
                    return Err("wrong data".to_owned());
                }
                use_all(&store);
            }
            (_, opened) => return Err(format!("opening it: {:?}", opened.err())),
        }
    }
    Ok(())
}

fn every_kind() {
    let stores = Stores::new();
    let kinds = kinds();
    let (mut names, mut failures) = (BTreeSet::new(), Vec::new());
    for kind in &kinds {
        assert!(names.insert(kind.name), "{} twice", kind.name);
        let (sample, disk, index) = stores.plant(kind);
        let found = is_found(kind, index, &Store::check_on(&*disk));
        if let Err(text) = found.and_then(|()| is_safe_to_open(kind, sample, &disk)) {
            let text: String = text.chars().take(2000).collect();
            failures.push(format!("{}: {text}", kind.name));
        }
    }
    println!("catalogue: {} kinds of damage, {} found", kinds.len(), kinds.len() - failures.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(kinds.len() >= KINDS_MIN);
}

#[test]
fn every_kind_of_damage_is_found_and_named() {
    in_time(every_kind);
}
