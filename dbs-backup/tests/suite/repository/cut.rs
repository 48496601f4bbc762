//! An operation that fails, or is cut off, at each of its calls of the store of objects.

use super::*;

const FAULTS: [Fault; 3] = [Fault::Fail, Fault::Cut, Fault::CutAfter];

/// Lets `operation` fail at its first, second, ... call until it succeeds, and looks at what each failure leaves.
fn at_every_call(
    secret: Option<&Secret>,
    prepare: impl Fn(&Memory, &BackupStore, &Snapshots),
    operation: impl Fn(&BackupStore, &Snapshots) -> Result<()>,
) {
    let mut volume = volume(7, 5);
    volume.push("two", BLOCK - 3, &[5; BLOCK as usize]);
    volume.push("three", 0, &[0; BLOCK as usize]);
    volume.push("other", 0, &[8; 3 * BLOCK as usize]);
    for fault in FAULTS {
        for call in 0.. {
            let (objects, store) = fresh(secret);
            prepare(&objects, &store, &volume);
            // A new process.
            let store = open(&objects, secret);
            let before = objects.calls();
            objects.set_fault(Some((call, fault)));
            let outcome = operation(&store, &volume);
            let calls = objects.calls() - before;
            objects.set_fault(None);
            after(secret, &objects, &volume, &format!("{fault:?} {call}"));
            if calls <= call {
                outcome.unwrap();
                assert!(call > 2, "it makes calls");
                break;
            }
        }
    }
}

/// What must hold whatever happened.
fn after(secret: Option<&Secret>, objects: &Arc<Memory>, volume: &Snapshots, case: &str) {
    let store = open(objects, secret);
    let restores = |backup: &str| {
        let config = store.backup(VOLUME, backup).expect(case);
        let content = volume.get(&config.snapshot_name).content();
        assert!(
            restored(&store, backup, content.len()).expect(case) == content,
            "{case}: {backup}"
        );
        assert_eq!(verify(&store, backup, true).expect(case).bad, [], "{case}: {backup}");
    };
    let there = store.backups(VOLUME).unwrap();
    there.iter().for_each(|backup| restores(backup));
    create(&store, "backup-new", &volume.get("three")).expect(case);
    for _ in 0..2 {
        objects.age_by(LONG);
        collect(&store).expect(case);
        there.iter().for_each(|backup| restores(backup));
        restores("backup-new");
    }
    remove_volume(&store, VOLUME).expect(case);
    for _ in 0..3 {
        objects.age_by(LONG);
        collect(&open(objects, secret)).expect(case);
    }
    let mut left = objects.paths();
    left.retain(|path| !path.contains("/keys/"));
    assert_eq!(left, ["dbs-repository/config"], "{case}");
}

#[test]
fn a_first_backup() {
    for secret in [None, Some(&passphrase())] {
        at_every_call(
            secret,
            |_, _, _| {},
            |store, volume| create(store, "backup-1", &volume.get("one")).map(drop),
        );
    }
}

#[test]
fn an_incremental_backup() {
    at_every_call(
        None,
        |_, store, volume| drop(create(store, "backup-1", &volume.get("one")).unwrap()),
        |store, volume| create(store, "backup-2", &volume.get("two")).map(drop),
    );
}

#[test]
fn a_deletion() {
    at_every_call(
        None,
        |_, store, volume| {
            create(store, "backup-1", &volume.get("one")).unwrap();
            create(store, "backup-2", &volume.get("two")).unwrap();
        },
        |store, _| remove_some(store, &["backup-1", "backup-2"]).map(drop),
    );
}

#[test]
fn a_collection_that_condemns() {
    at_every_call(
        None,
        |objects, store, volume| {
            create(store, "backup-1", &volume.get("one")).unwrap();
            create(store, "backup-2", &volume.get("two")).unwrap();
            remove(store, "backup-1").unwrap();
            objects.age_by(LONG);
        },
        |store, _| collect(store).map(drop),
    );
}

#[test]
fn a_collection_that_removes() {
    at_every_call(
        None,
        |objects, store, volume| {
            create(store, "backup-1", &volume.get("one")).unwrap();
            create(store, "backup-2", &volume.get("two")).unwrap();
            remove_volume(store, VOLUME).unwrap();
            create(store, "backup-3", &volume.get("three")).unwrap();
            remove_volume(store, VOLUME).unwrap();
            objects.age_by(LONG);
            assert!(collect(store).unwrap().condemned > 0);
            objects.age_by(LONG);
        },
        |store, _| collect(store).map(drop),
    );
}

#[test]
fn a_collection_that_rewrites() {
    for secret in [None, Some(&passphrase())] {
        at_every_call(
            secret,
            |objects, store, volume| {
                create(store, "backup-1", &volume.get("one")).unwrap();
                // All but two of its chunks change.
                create(store, "backup-2", &volume.get("other")).unwrap();
                remove(store, "backup-1").unwrap();
                objects.age_by(LONG);
            },
            |store, _| {
                let collected = collect(store)?;
                assert!(collected.rewritten > 0, "{collected:?}");
                Ok(())
            },
        );
    }
}

#[test]
fn a_collection_that_merges_indexes() {
    at_every_call(
        None,
        |objects, store, volume| {
            let mut volume = volume.clone();
            for number in 0..9 {
                let name = format!("s{number}");
                volume.push(&name, 0, &[number + 1; 100]);
                create(store, &format!("old-{number}"), &volume.get(&name)).unwrap();
            }
            create(store, "backup-1", &volume.get("one")).unwrap();
            for number in 0..9 {
                remove(store, &format!("old-{number}")).unwrap();
            }
            objects.age_by(LONG);
        },
        |store, _| collect(store).map(drop),
    );
}

/// What was written before the cut is not written again.
#[test]
fn a_backup_goes_on_where_it_was() {
    let volume = volume(9, 5);
    for fault in [Fault::Cut, Fault::CutAfter] {
        for call in 0.. {
            let (objects, store) = fresh(None);
            objects.set_fault(Some((call, fault)));
            let cut = create(&store, "backup-1", &volume.get("one"));
            objects.set_fault(None);
            let before = packs(&objects);
            if cut.is_ok() {
                break;
            }
            let store = open(&objects, None);
            if store.backups(VOLUME).unwrap().is_empty() {
                create(&store, "backup-1", &volume.get("one")).unwrap();
            }
            // A pack of chunks and one of lists, whoever has written them.
            assert_eq!(packs(&objects).len(), 2, "{fault:?} {call}: {before:?}");
        }
    }
}

/// The power goes: what was removed and is not durable comes back, and nobody takes it for something.
#[test]
fn a_collection_and_a_power_loss() {
    let mut volume = volume(10, 4);
    volume.push("two", 0, &[5; BLOCK as usize]);
    for part in ["/packs/", "/condemned/", "/index/", "/manifests/"] {
        for call in 0.. {
            let (objects, store) = fresh(None);
            create(&store, "backup-1", &volume.get("one")).unwrap();
            create(&store, "backup-2", &volume.get("two")).unwrap();
            remove(&store, "backup-1").unwrap();
            objects.age_by(LONG);
            collect(&store).unwrap();
            objects.age_by(LONG);
            let before = objects.calls();
            objects.set_fault(Some((call, Fault::Cut)));
            let outcome = collect(&store);
            let calls = objects.calls() - before;
            objects.set_fault(None);
            objects.lose_power(part);
            let store = open(&objects, None);
            create(&store, "backup-3", &volume.get("one")).unwrap();
            for _ in 0..2 {
                objects.age_by(LONG);
                collect(&store).unwrap();
            }
            check(&store, "backup-2", volume.get("two").content());
            check(&store, "backup-3", volume.get("one").content());
            if calls <= call {
                outcome.unwrap();
                break;
            }
        }
    }
}

/// A backup whose manifest is there is complete, also if the answer to its writing was lost.
#[test]
fn a_lost_answer() {
    let volume = volume(27, 3);
    for call in 0.. {
        let (objects, store) = fresh(None);
        let before = objects.calls();
        objects.set_fault(Some((call, Fault::Lost)));
        let created = create(&store, "backup-1", &volume.get("one")).map(drop);
        let calls = objects.calls() - before;
        objects.set_fault(None);
        let there = open(&objects, None).backups(VOLUME).unwrap();
        assert_eq!(there.len(), usize::from(created.is_ok()), "{call}: {created:?}");
        if calls <= call {
            break;
        }
    }
}
