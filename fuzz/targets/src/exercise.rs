//! Using a store that was opened from doubtful bytes: everything works or fails with a fitting error.

use crate::disk::Disk;
use crate::input::Input;
use crate::sample::{Contents, contents, open, pattern};
use dbs_core::info::Severity;
use dbs_core::io::TailMemory;
use dbs_core::store::SnapshotOptions;
use dbs_core::{Error, ErrorKind, Result, Store};
use std::sync::Arc;
use std::time::Duration;

/// Steps that one input may ask for.
const STEPS_MAX: usize = 24;

/// Opening and checking say what is wrong with the bytes, and nothing else is.
pub(crate) fn assert_detected(error: &Error, what: &str) {
    let known = [ErrorKind::Corrupt, ErrorKind::Invalid, ErrorKind::Unsupported];
    assert!(known.contains(&error.kind()), "{what}: {error} ({:?})", error.kind());
}

/// The storage never fails, so the store must not say so.
fn assert_fitting<T>(result: Result<T>, what: &str) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            let wrong = [ErrorKind::Io, ErrorKind::Poisoned];
            assert!(!wrong.contains(&error.kind()), "{what}: {error} ({:?})", error.kind());
            None
        }
    }
}

/// As [`assert_fitting`], whatever came of it.
fn fitting<T>(result: Result<T>, what: &str) {
    let _whatever = assert_fitting(result, what);
}

/// Checks the bytes, opens them for reading and for writing, uses what opens, and opens it again.
/// Returns whether it opened for writing.
pub(crate) fn survive(
    disk: &Arc<Disk>,
    tail: impl Fn() -> Option<Box<dyn TailMemory>>,
    input: &mut Input<'_>,
) -> bool {
    if let Err(error) = Store::check_on(&**disk) {
        assert_detected(&error, "check");
    }
    let shown = match open(disk, tail(), 5, true) {
        Ok(store) => {
            look(&store);
            Some(contents(&store))
        }
        Err(error) => {
            assert_detected(&error, "open read-only");
            None
        }
    };
    let store = match open(disk, tail(), 6, false) {
        Ok(store) => store,
        Err(error) => {
            // Recovery writes what it found, for which there may be no room: a journal made too
            // small, say.
            if error.kind() != ErrorKind::NoSpace {
                assert_detected(&error, "open");
            }
            return false;
        }
    };
    assert!(shown == Some(contents(&store)), "reading and writing show different contents");
    look(&store);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        step(&store, input);
    }
    end(disk, store, input.flag());
    true
}

/// Ends it and opens it again: what was found good and changed by us is still good.
fn end(disk: &Arc<Disk>, store: Store, close: bool) {
    assert_fitting(store.flush(), "flush");
    let report = assert_fitting(store.check(), "check").expect("an open store can be checked");
    assert!(report.worst() != Some(Severity::Corrupt), "after use: {report:?}");
    let before = contents(&store);
    if close {
        assert_fitting(store.close(), "close");
    } else {
        drop(store);
    }
    let report = Store::check_on(&**disk).expect("a store that was open can be checked");
    assert!(report.worst() != Some(Severity::Corrupt), "after the end: {report:?}");
    let again = open(disk, None, 7, false).expect("a store that was open opens again");
    assert!(agree(&again, &contents(&again), &before), "other contents after opening again");
}

/// Whether two looks at a store show the same. Where data has checksums a crash may cost some of
/// them: what they said is damaged can be read then.
fn agree(store: &Store, one: &Contents, other: &Contents) -> bool {
    if store.info().checksums.is_none() {
        return one == other;
    }
    one.iter().all(|(spec, seen)| other.get(spec).is_none_or(|known| known == seen))
}

/// Looks at everything.
fn look(store: &Store) {
    assert_fitting(store.dump(&mut std::io::sink()), "dump");
    for volume in store.volumes(true) {
        assert_fitting(store.children(&volume.name, None), "children");
        assert_fitting(store.layers(&volume.name), "layers");
        assert_fitting(store.usage(&volume.name, None), "usage");
        let snapshots = assert_fitting(store.snapshots(&volume.name, true), "snapshots");
        let snapshots = snapshots.unwrap_or_default();
        for snapshot in snapshots.iter().take(8) {
            let length = volume.size.min(1 << 20);
            let from = Some(snapshot.name.as_str());
            assert_fitting(store.diff(&volume.name, from, None, 0, length), "diff");
        }
        let specs = snapshots.iter().map(|s| format!("{}@{}", volume.name, s.name));
        for spec in specs.chain([volume.name.clone()]) {
            let Some(open) = assert_fitting(store.volume(&spec), &spec) else { continue };
            let size = open.size();
            assert_fitting(open.map(0, size, 100), "map");
            let mut end = vec![0; size.min(8192) as usize];
            assert_fitting(open.read_at(size - end.len() as u64, &mut end), &spec);
        }
    }
}

fn step(store: &Store, input: &mut Input<'_>) {
    let kind = input.u8();
    let volumes = store.volumes(false);
    let chosen = input.below(volumes.len().max(1) as u64) as usize;
    let volume = volumes.get(chosen).map_or_else(|| "none".to_owned(), |v| v.name.clone());
    let snapshots = store.snapshots(&volume, false).unwrap_or_default();
    let chosen = input.below(snapshots.len().max(1) as u64) as usize;
    let snapshot = snapshots.get(chosen).map_or_else(|| "none".to_owned(), |s| s.name.clone());
    let name = format!("n{}", input.below(8));
    let plain = SnapshotOptions::default();
    match kind % 20 {
        0 => fitting(store.create_volume(&name, 512 * input.below(2000)), "create"),
        1 => fitting(store.delete_volume(&volume), "delete"),
        2 => fitting(store.create_snapshot(&volume, &name, &plain), "snapshot"),
        3 => fitting(store.delete_snapshot(&volume, &snapshot), "delete snapshot"),
        4 => fitting(store.rollback(&volume, &snapshot), "rollback"),
        5 => fitting(store.clone_volume(&volume, &snapshot, &name), "clone"),
        6 => fitting(store.flatten(&volume, &mut |_, _| true), "flatten"),
        7 => fitting(store.work(input.below(300)), "work"),
        8 => fitting(store.vacuum(&mut |_, _| true), "vacuum"),
        9 => fitting(store.flush(), "flush"),
        10 => {
            fitting(store.resize_volume(&volume, 512 * input.below(3000)), "resize");
        }
        11 => fitting(store.rename_volume(&volume, &name), "rename"),
        12 => fitting(store.grow((4 << 20) + (input.below(64) << 16)), "grow"),
        13 => fitting(store.set_retired(&volume, &snapshot, input.flag()), "retire"),
        14 => fitting(store.prune(&volume, 0, 1 << 20), "prune"),
        15 => transfer(store, &volume, input, |open, at, length, _| open.discard(at, length)),
        16 => transfer(store, &volume, input, |open, at, length, fua| {
            open.write_zeroes(at, length, fua)
        }),
        17 => fitting(store.close_checksums(Duration::ZERO), "close checksums"),
        18 => fitting(store.scrub(input.flag(), &mut |_| true), "scrub"),
        _ => transfer(store, &volume, input, |open, at, length, fua| {
            let data = pattern(length as u8, length.min(256 << 10) as usize);
            open.write_at(at, &data, fua)
        }),
    }
}

fn transfer(
    store: &Store,
    volume: &str,
    input: &mut Input<'_>,
    what: impl FnOnce(&dbs_core::Volume, u64, u64, bool) -> Result<()>,
) {
    let Some(open) = assert_fitting(store.volume(volume), volume) else { return };
    let at = 512 * input.below((open.size() / 512).max(1));
    let length = 512 * (1 + input.below(300));
    assert_fitting(what(&open, at, length, input.flag()), "transfer");
}
