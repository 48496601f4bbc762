//! Commands that wait for blocks, while the names that they were given move: each is done to what it has
//! waited for, or not at all.

use super::{InitOptions, OpenOptions, SnapshotOptions, Store, TailPlace};
use crate::error::{ErrorKind, Result};
use crate::meta::locks::Space;
use crate::units::VolumeId;
use std::time::{Duration, Instant};

/// How long the command may take to come to its wait.
const LIMIT: Duration = Duration::from_secs(120);

/// Volumes `a` and `b`, being rebuilt, with snapshots `s` and `t` each.
fn store(directory: &tempfile::TempDir) -> Store {
    let path = directory.path().join("store");
    let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
    Store::init(&path, &options).unwrap();
    let open = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
    let store = Store::open(&path, &open).unwrap();
    for volume in ["a", "b"] {
        store.create_volume(volume, 1 << 20).unwrap();
        for (snapshot, byte) in [("s", 1), ("t", 2)] {
            store.volume(volume).unwrap().write_at(0, &[byte; 4096], false).unwrap();
            store.create_snapshot(volume, snapshot, &SnapshotOptions::default()).unwrap();
        }
        store.volume(volume).unwrap().write_at(0, &[3; 4096], false).unwrap();
        store.set_rebuilding(volume, true).unwrap();
    }
    store
}

/// Runs `command` and has it wait for blocks of volume `a` until `rename` is done: its error.
fn refused(
    store: &Store,
    space: fn(VolumeId) -> Space,
    command: impl FnOnce(&Store) -> Result<()> + Send,
    rename: impl FnOnce(&Store) -> Result<()>,
) -> String {
    let id = store.inner.meta().find_volume("a").unwrap();
    let hold = store.inner.hold_in(space(id), 0..u64::MAX, true);
    let outcome = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| command(store));
        let begun = Instant::now();
        while store.inner.meta().locks.sole(space(id), &(0..1)) {
            assert!(begun.elapsed() < LIMIT, "it does not wait");
            std::thread::sleep(Duration::from_millis(1));
        }
        rename(store).unwrap();
        drop(hold);
        waiting.join().unwrap()
    });
    let error = outcome.expect_err("of what?");
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(store.check().unwrap().findings.is_empty());
    error.to_string()
}

fn volumes_move(store: &Store) -> Result<()> {
    store.rename_volume("a", "old")?;
    store.rename_volume("b", "a")
}

fn snapshots_move(store: &Store) -> Result<()> {
    store.rename_snapshot("a", "s", "old")?;
    store.rename_snapshot("a", "t", "s")
}

/// The first byte of a volume.
fn first(store: &Store, volume: &str) -> u8 {
    let mut block = [0; 4096];
    store.volume(volume).unwrap().read_at(0, &mut block).unwrap();
    block[0]
}

#[test]
fn a_rebuild_ends_of_the_volume_whose_layers_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory);
    let end = |store: &Store| store.set_rebuilding("a", false);
    let error = refused(&store, Space::Snapshots, end, volumes_move);
    assert!(error.contains("`a` was renamed meanwhile"), "{error}");
    for volume in ["old", "a"] {
        assert!(store.volume_info(volume).unwrap().rebuilding, "{volume}");
    }
    store.set_rebuilding("a", false).unwrap();
    assert!(!store.volume_info("a").unwrap().rebuilding);
    assert!(store.volume_info("old").unwrap().rebuilding);
}

#[test]
fn a_rollback_that_keeps_the_size_is_of_the_volume_whose_writes_have_ended() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory);
    let back = |store: &Store| store.rollback_keeping_size("a", "s");
    let error = refused(&store, Space::Head, back, volumes_move);
    assert!(error.contains("`a@s` was renamed meanwhile"), "{error}");
    assert_eq!((first(&store, "old"), first(&store, "a")), (3, 3));
    back(&store).unwrap();
    assert_eq!((first(&store, "old"), first(&store, "a")), (3, 1));
}

#[test]
fn a_rollback_that_keeps_the_size_is_to_the_snapshot_that_was_looked_at() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory);
    let back = |store: &Store| store.rollback_keeping_size("a", "s");
    let error = refused(&store, Space::Head, back, snapshots_move);
    assert!(error.contains("`a@s` was renamed meanwhile"), "{error}");
    assert_eq!(first(&store, "a"), 3);
    back(&store).unwrap();
    assert_eq!(first(&store, "a"), 2);
}
