//! Held backups, in both layouts.

use crate::support::*;
use dbs_backup::{BackupStore, InitOptions, Onto, Retention, Work};
use dbs_core::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A backup store in one of the layouts.
fn open(objects: &Arc<Memory>, repository: bool) -> BackupStore {
    let store = store(objects);
    if !repository {
        return store;
    }
    let options = InitOptions { chunk_size: Some(BLOCK), cheap: true, ..InitOptions::default() };
    match store.init(&options) {
        Err(error) if error.kind() == ErrorKind::Exists => {}
        made => made.unwrap(),
    }
    store.with_repository(None).unwrap()
}

/// Whatever becomes of the backup, what is held of it stays, and nobody deletes it by mistake.
#[test]
fn what_is_held_stays_until_it_is_let_go() {
    for repository in [false, true] {
        let objects = Arc::new(Memory::default());
        let store = open(&objects, repository);
        let mut snapshots = volume(1, 6);
        create(&store, "backup-1", &snapshots.get("one")).unwrap();
        let held = store.hold(VOLUME, "backup-1", "a volume").unwrap();
        let config = store.backup(VOLUME, &held).unwrap();
        assert_eq!(config.held_for(), Some("a volume"));
        assert_eq!(config.content(), store.backup(VOLUME, "backup-1").unwrap().content());
        assert_ne!(held, store.hold(VOLUME, "backup-1", "another").unwrap());

        // It is no backup of a retention, and none to build on.
        assert_eq!(store.volume(VOLUME).unwrap().last_backup_name, "backup-1");
        let judged = store.judge(VOLUME, &Retention { last: 1, ..Retention::default() }).unwrap();
        let kept: Vec<_> = judged.iter().map(|j| (j.backup == "backup-1", &*j.kept_by)).collect();
        assert_eq!(kept, [(false, &["held"][..]), (false, &["held"]), (true, &["last"])]);
        snapshots.push("two", 0, &[7; BLOCK as usize]);
        create(&store, "backup-2", &snapshots.get("two")).unwrap();
        store.hold(VOLUME, "backup-2", "a third one").unwrap();
        assert!(remove(&store, "backup-2").unwrap().found);
        // The newest that is there is held.
        assert_eq!(store.volume(VOLUME).unwrap().last_backup_name, "backup-1");
        assert!(remove(&store, "backup-1").unwrap().found);
        store.collect(&mut Work::new(&mut |_, _| true)).unwrap();
        for refused in [remove(&store, &held).map(drop), remove_volume(&store, VOLUME)] {
            let refused = refused.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
            assert!(refused.to_string().contains("--held"), "{refused}");
        }
        let content = snapshots.get("one").content().to_vec();
        let disk = Disk::new(vec![0; content.len()]);
        restore(&open(&objects, repository), &held, &disk, Onto::Empty).unwrap();
        assert!(disk.content() == content, "repository: {repository}");

        let mut progress = |_, _| true;
        let refused = store.let_go(VOLUME, "backup-1", &mut Work::new(&mut progress)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
        for held in store.backups(VOLUME).unwrap() {
            store.let_go(VOLUME, &held, &mut Work::new(&mut progress)).unwrap();
        }
        let left = objects.paths().into_iter().filter(|path| path.ends_with(".blk")).count();
        assert_eq!((left, store.backups(VOLUME).unwrap().len()), (0, 0));
    }
}

/// The size that a volume has later is none of a backup's that does not say its own.
#[test]
fn what_is_held_says_how_large_it_is() {
    let objects = Arc::new(Memory::default());
    let store = open(&objects, false);
    let snapshots = volume(1, 6);
    create(&store, "backup-1", &snapshots.get("one")).unwrap();
    let held = store.hold(VOLUME, "backup-1", "a volume").unwrap();
    let size = |backup: &str| {
        let mut facts = store.volume(VOLUME).unwrap();
        facts.size *= 2;
        store.backup(VOLUME, backup).unwrap().volume_size(&facts).unwrap()
    };
    assert_eq!(size("backup-1"), 2 * 7 * BLOCK, "it has no label");
    assert_eq!(size(&held), 7 * BLOCK);
}

/// A backup that is deleted in the very moment is not held, or all of it is.
#[test]
fn what_is_deleted_meanwhile_is_not_held() {
    let objects = Arc::new(Memory::default());
    let store = open(&objects, true);
    create(&store, "backup-1", &volume(1, 6).get("one")).unwrap();
    let memory = Arc::downgrade(&objects);
    objects.at_put(move |path, _| {
        if path.contains("/manifests/") {
            memory.upgrade().unwrap().delete("/manifests/");
        }
    });
    let error = store.hold(VOLUME, "backup-1", "a volume").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(objects.paths().iter().all(|path| !path.contains("/manifests/")));
}

/// Found on reading: what was held between the first look of a deletion and its lock went with the volume.
#[test]
fn what_is_held_before_a_deletion_has_its_lock_stays() {
    let objects = Arc::new(Memory::default());
    let store = open(&objects, false);
    create(&store, "backup-1", &volume(1, 6).get("one")).unwrap();
    let memory = Arc::downgrade(&objects);
    let holds = AtomicBool::new(false);
    objects.at_put(move |path, _| {
        if path.ends_with(".lck") && !holds.swap(true, Ordering::SeqCst) {
            open(&memory.upgrade().unwrap(), false).hold(VOLUME, "backup-1", "a volume").unwrap();
        }
    });
    let refused = store.remove_volume(VOLUME, &mut Work::new(&mut |_, _| true)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    assert_eq!(store.backups(VOLUME).unwrap().len(), 2);
}

/// A hold, and its end, that fail or are cut off at each of their calls: what is there is whole, and can be let go.
#[test]
fn a_hold_and_its_end_at_every_call() {
    let snapshots = volume(3, 4);
    let content = snapshots.get("one").content().to_vec();
    let end = |store: &BackupStore, held: &str| {
        store.let_go(VOLUME, held, &mut Work::new(&mut |_, _| true)).map(drop)
    };
    for (repository, ends) in [(false, false), (false, true), (true, false), (true, true)] {
        for fault in [Fault::Fail, Fault::Cut, Fault::CutAfter, Fault::Lost] {
            for call in 0.. {
                let case = format!("repository: {repository}, ends: {ends}, {fault:?} {call}");
                let objects = Arc::new(Memory::default());
                let store = open(&objects, repository);
                create(&store, "backup-1", &snapshots.get("one")).unwrap();
                let first = ends.then(|| store.hold(VOLUME, "backup-1", "a volume").unwrap());
                // A new process.
                let store = open(&objects, repository);
                let before = objects.calls();
                objects.set_fault(Some((call, fault)));
                let outcome = match &first {
                    Some(held) => end(&store, held),
                    None => store.hold(VOLUME, "backup-1", "a volume").map(drop),
                };
                let calls = objects.calls() - before;
                objects.set_fault(None);
                objects.age();
                let store = open(&objects, repository);
                assert!(remove(&store, "backup-1").expect(&case).found, "{case}");
                let held = store.backups(VOLUME).unwrap_or_default();
                assert!(held.len() <= 1, "{case}: {held:?}");
                if outcome.is_ok() {
                    assert_eq!(held.is_empty(), ends, "{case}");
                }
                for held in &held {
                    let disk = Disk::new(vec![0; content.len()]);
                    restore(&store, held, &disk, Onto::Empty).expect(&case);
                    assert!(disk.content() == content, "{case}");
                    end(&store, held).expect(&case);
                }
                assert!(store.backups(VOLUME).unwrap_or_default().is_empty(), "{case}");
                if calls <= call {
                    outcome.expect(&case);
                    assert!(call > 2, "it makes calls");
                    break;
                }
            }
        }
    }
}
