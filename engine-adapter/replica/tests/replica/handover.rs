//! A new process on the directory of one that still serves: who answers what, and when the store
//! changes hands.

use crate::support::*;
use dbs_core::ErrorKind;
use longhorn_data::Access;
use longhorn_wire::frame::is_handed_over;
use longhorn_wire::proto::ptypes;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tonic::Code;

/// The first I/O on a data connection.
fn wake(bench: &Bench) -> Result<(), String> {
    match bench.replica.gate().access() {
        Access::Dormant(wake) => wake.wake(),
        other => panic!("not dormant: {other:?}"),
    }
}

fn check_surrendered(old: &Bench) {
    let status = old.try_get().unwrap_err();
    assert_eq!(status.code(), Code::Unknown);
    // Nothing is before or behind it: a controller goes by all of the text.
    let text = status.message();
    assert!(is_handed_over(text), "{status}");
    let refused = [
        old.open_as(false, 0).unwrap_err(),
        old.create("4096").unwrap_err(),
        old.reload().unwrap_err(),
        old.snapshot_as("x", true, NOW, &[]).unwrap_err(),
        old.revert_to("x", NOW).unwrap_err(),
        old.mark("a").unwrap_err(),
        old.prepare("a").unwrap_err(),
        old.remove("a", true).unwrap_err(),
        old.replace("a", "b").unwrap_err(),
        old.rebuilding(true).unwrap_err(),
        old.revision(1).unwrap_err(),
        old.delete().unwrap_err(),
    ];
    for status in refused {
        assert_eq!(status.message(), text);
    }
    // This one has it in the code of an expansion.
    let error = old.expand(4096).unwrap_err();
    assert!(error.message().contains(&format!("\"{text}\"")), "{error}");
    match old.replica.gate().access() {
        Access::Refused { io, ping } => assert_eq!((&*io, &*ping), (text, text)),
        other => panic!("{other:?}"),
    }
    assert!(old.replica.store().is_err());
    assert_eq!(old.replica.surrender(None).err().unwrap().kind(), ErrorKind::Busy);
    old.try_close().unwrap_err();
}

#[test]
fn an_upgrade_takes_the_store_at_the_first_request() {
    let (old, new, older) = pair();
    let told = |bench: &Bench| bench.replica.gate().hello().generations.unwrap();
    let closed = new.get();
    assert_eq!((closed.state.as_str(), closed.dirty), ("closed", true));
    assert_eq!(
        (closed.head.as_str(), closed.parent.as_str()),
        ("volume-head-001.img", "volume-snap-a.img")
    );
    assert_eq!((closed.size.as_str(), closed.sector_size), ("4194304", 512));
    assert_eq!(new.create("4096").unwrap(), closed, "there is one");
    // What happens over there meanwhile is seen when it is opened.
    old.snapshot("b");
    old.write(0, 3);
    let opened = new.open_as(true, 0).unwrap();
    assert_eq!((opened.state.as_str(), opened.revision_counter), ("dirty", 41));
    assert_eq!(opened.chain, ["volume-head-002.img", "volume-snap-b.img", "volume-snap-a.img"]);
    assert_eq!(opened.disks[&disk("a")].labels["k"], "v");
    let mut has_store = old.get();
    // Only who has the store knows how the head was made.
    assert_eq!(has_store.dbs.take().unwrap().revert.as_deref(), Some(""));
    has_store.dbs = Some(ptypes::Facts::default());
    assert_eq!(opened, has_store, "both say the same");
    new.unmap_mark(true);
    new.max_count(100);
    assert_eq!(older.releases.load(Ordering::SeqCst), 0, "nothing of this takes it over");
    old.write(0, 4);
    let counters = old.replica.revision_counter();
    counters.bump();
    new.get();
    let (its, ours) = (told(&old), told(&new));
    assert_eq!((its.now, ours.now), (its.changed, its.changed), "as the older one made it");

    wake(&new).unwrap();
    assert_eq!(older.releases.load(Ordering::SeqCst), 1);
    assert_eq!(new.read(0), 4, "what the older one acknowledged last");
    let after = new.get();
    assert_eq!((after.state.as_str(), after.revision_counter), ("dirty", 42));
    assert_eq!((after.chain, after.remain_snapshots), (opened.chain, 98));
    assert!(after.unmap_mark_disk_chain_removed);
    check_surrendered(&old);
    new.write(1, 5);
    assert_eq!(told(&new).now, ours.changed);
    assert_ne!(told(&old).changed, its.changed, "it may get the store back");
    assert_eq!(new.snapshot("c").head, "volume-head-003.img");
    new.close();
    assert_eq!(new.open().state, "open");
    assert_eq!((new.read(0), new.read(1)), (4, 5));
    assert_eq!(older.releases.load(Ordering::SeqCst), 1);
}

#[test]
fn a_copy_is_asked_for_again_while_it_waits() {
    let (old, new, _older) = pair();
    assert_eq!(new.get().head, "volume-head-001.img");
    old.snapshot("b");
    let until = Instant::now() + Duration::from_secs(120);
    while new.get().head != "volume-head-002.img" {
        assert!(Instant::now() < until, "the copy stays old");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_change_takes_the_store_as_well() {
    type Change = fn(&Bench);
    let changes: [Change; 8] = [
        |new| assert_eq!(new.snapshot("b").chain.len(), 3),
        |new| assert_eq!(new.revert("a").chain.len(), 2),
        |new| assert_eq!(new.expand(2 * SIZE as i64).unwrap().chain.len(), 3),
        |new| assert_eq!(new.mark("a").unwrap().chain.len(), 1),
        |new| assert_eq!(new.remove(&disk("a"), false).unwrap().disks.len(), 1),
        |new| assert_eq!(new.rebuilding(true).unwrap().state, "rebuilding"),
        |new| assert_eq!(new.revision(7).unwrap().revision_counter, 7),
        |new| new.delete().unwrap(),
    ];
    for change in changes {
        let (old, new, older) = pair();
        new.open_as(true, 0).unwrap();
        change(&new);
        assert_eq!(older.releases.load(Ordering::SeqCst), 1);
        check_surrendered(&old);
        if new.get().state != "initial" {
            new.write(3, 3);
            assert_eq!(new.read(3), 3);
        }
    }
}

#[test]
fn opening_without_an_upgrade_takes_the_store_at_once() {
    let (old, new, _older) = pair();
    assert_eq!(new.open().state, "dirty");
    assert_eq!(new.read(0), 2);
    check_surrendered(&old);
}

#[test]
fn closing_what_slept_leaves_the_older_one_alone() {
    let (old, new, older) = pair();
    new.open_as(true, 0).unwrap();
    assert_eq!(new.open_as(true, 0).unwrap_err().message(), "replica is already open");
    assert_eq!(new.close().state, "closed");
    assert!(matches!(new.replica.gate().access(), Access::Refused { .. }));
    old.write(0, 9);
    assert_eq!(old.read(0), 9);
    assert_eq!(older.releases.load(Ordering::SeqCst), 0);
}

#[test]
fn an_older_process_that_has_died_is_no_hindrance() {
    let (old, new, older) = pair();
    new.open_as(true, 0).unwrap();
    *older.replica.lock().unwrap() = None;
    // Alive after all: the store is locked, and nothing breaks.
    let error = wake(&new).unwrap_err();
    assert!(!error.is_empty());
    assert_eq!(old.read(0), 2);
    assert_eq!(new.get().state, "dirty");
    assert_eq!(new.snapshot_as("x", true, NOW, &[]).unwrap_err().code(), Code::Unknown);
    let _dir = old.kill();
    wake(&new).unwrap();
    assert_eq!(new.read(0), 2);
}

#[test]
fn a_third_takes_over_from_one_that_never_did() {
    let (old, new, _older) = pair();
    new.open_as(true, 0).unwrap();
    let between = Arc::new(Older::default());
    *between.replica.lock().unwrap() = Some(Arc::clone(&new.replica));
    let third = newer(&new, &between);
    assert_eq!(third.open_as(true, 0).unwrap().chain.len(), 2);
    wake(&third).unwrap();
    assert_eq!(third.read(0), 2);
    check_surrendered(&old);
    check_surrendered(&new);
}

/// What upstream's test of upgrades does: the older process is used again after the newer one was.
#[test]
fn a_store_goes_back_when_the_older_one_is_opened_again() {
    for upgrade in [false, true] {
        let (old, new, older) = pair();
        let newest = Arc::new(Older::default());
        *newest.replica.lock().unwrap() = Some(Arc::clone(&new.replica));
        *older.newer.lock().unwrap() = Some(Arc::clone(&newest));
        *older.dir.lock().unwrap() = Some(Arc::clone(&old.dir));
        assert_eq!(new.open().state, "dirty");
        new.write(1, 5);
        new.snapshot("b");
        // The older one is closed, and tells of what the newer one does.
        assert_eq!(old.try_close().unwrap().state, "closed");
        let until = Instant::now() + Duration::from_secs(120);
        while old.get().head != "volume-head-002.img" {
            assert!(Instant::now() < until, "the copy stays old");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(
            old.snapshot_as("x", true, NOW, &[]).unwrap_err().message().contains("handed over")
        );
        let incoming = old.replica.incoming();
        let ended = [incoming.discard(&disk("x")).map(drop), incoming.end_clone(false).map(drop)];
        assert!(
            ended.iter().all(|ended| ended
                .as_ref()
                .unwrap_err()
                .to_string()
                .contains("handed over"))
        );
        assert_eq!(newest.releases.load(Ordering::SeqCst), 0, "nothing of this takes it back");
        new.write(1, 6);

        let opened = old.open_as(upgrade, 0).unwrap();
        assert_eq!(opened.chain.len(), 3);
        if upgrade {
            new.write(1, 7);
            wake(&old).unwrap();
        }
        assert_eq!(newest.releases.load(Ordering::SeqCst), 1);
        assert_eq!((old.read(0), old.read(1)), (2, if upgrade { 7 } else { 6 }));
        check_surrendered(&new);
        old.write(1, 8);
        assert_eq!(old.snapshot("c").chain.len(), 4);
        old.close();
    }
}

/// A new process with another backing file below, or none, never has the store, however often it tries; one
/// with the right file then takes it.
#[test]
fn an_upgrade_to_another_backing_file_is_refused_each_time() {
    let dir = tempdir();
    let [image, other] = [1, 2].map(|byte| {
        let path = dir.path().join(format!("image {byte}"));
        std::fs::write(&path, vec![byte; 64 << 10]).unwrap();
        path
    });
    for (first, second, says) in [
        (Some(&*image), Some(&*other), "is not the file that the volume"),
        (Some(&image), None, "start the replica with --backing-file"),
        (None, Some(&image), "start the replica without --backing-file"),
    ] {
        let (old, new, older) = pair_on(first, second);
        let refused = |outcome: Outcome<ptypes::Replica>| {
            let status = outcome.unwrap_err();
            assert!(status.message().contains(says), "{status}");
        };
        for _ in 0..3 {
            refused(new.open_as(false, 0));
            assert!(new.replica.store().is_err(), "{says}: it has the store");
        }
        refused(new.open_as(true, 0));
        check_surrendered(&old);
        assert_eq!(older.releases.load(Ordering::SeqCst), 1);
        // Who asks for the store is given it.
        new.replica.surrender(None).unwrap().close().unwrap();
        let right = Bench::on(Arc::clone(&old.dir), |options| {
            options.backing_file = first.map(std::path::Path::to_owned);
        });
        right.open();
        assert_eq!(right.read(0), 2);
        let identity = right.replica.backing_identity().unwrap();
        assert_eq!(identity.is_empty(), first.is_none());
        // One that asks for the store at its first I/O.
        let (_old, new, _older) = pair_on(first, second);
        new.open_as(true, 0).unwrap();
        for _ in 0..3 {
            let status = wake(&new).unwrap_err();
            assert!(status.contains(says), "{status}");
            refused(new.snapshot_as("x", true, NOW, &[]));
            refused(new.expand(2 * SIZE as i64));
        }
    }
}

/// Found by review: a restore was refused ever after, for a clone that had ended.
#[test]
fn a_clone_that_was_cut_off_by_a_hand_over_is_in_nobodys_way() {
    let (old, new, older) = pair();
    let newest = Arc::new(Older::default());
    *newest.replica.lock().unwrap() = Some(Arc::clone(&new.replica));
    *older.newer.lock().unwrap() = Some(Arc::clone(&newest));
    *older.dir.lock().unwrap() = Some(Arc::clone(&old.dir));
    let incoming = old.replica.incoming();
    incoming.begin_clone().unwrap();
    new.open();
    assert!(incoming.end_clone(true).is_err());
    old.open_as(false, 0).unwrap();
    incoming.begin_restore(&disk("r")).unwrap();
}

/// A restore ends when it notices that the store is gone, which may be late.
#[test]
fn a_restore_that_ends_late_takes_no_store_back() {
    for gives_up in [true, false] {
        let (old, new, older) = pair();
        let newest = Arc::new(Older::default());
        *newest.replica.lock().unwrap() = Some(Arc::clone(&new.replica));
        *older.newer.lock().unwrap() = Some(Arc::clone(&newest));
        *older.dir.lock().unwrap() = Some(Arc::clone(&old.dir));
        let incoming = old.replica.incoming();
        let layer = incoming.begin_restore(&disk("r")).unwrap();
        layer.write_at(0, &[7; 4096]).unwrap();
        drop(layer);
        assert_eq!(new.open().state, "dirty");
        new.write(1, 5);
        if gives_up {
            // Who has the store has cleared what was begun.
            incoming.give_up_restore().unwrap();
        }
        assert!(incoming.end_restore(&disk("r"), false).is_err());
        assert_eq!(newest.releases.load(Ordering::SeqCst), 0, "it takes it back");
        // It is here again, and what the other process has written is in it.
        old.open_as(false, 0).unwrap();
        assert_eq!(newest.releases.load(Ordering::SeqCst), 1);
        let refused = incoming.end_restore(&disk("r"), false).unwrap_err().to_string();
        assert!(refused.contains("was closed while"), "{refused}");
        incoming.give_up_restore().unwrap();
        assert_eq!((old.read(1), old.get().disks.len()), (5, 2));
    }
}
