use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

const MARK: u64 = 77;

fn panics(why: &str) -> ! {
    panic!("{why}");
}

/// A ledger with these replicas, all complete, their numbers from 1 on.
fn ledger(file: &Path, addresses: &[&str]) -> Ledger {
    let ledger = Ledger { last_resort: panics, ..Ledger::new(file.to_owned()) };
    for (replica, address) in (1..).zip(addresses) {
        ledger.name(replica, address, None);
        ledger.complete(replica);
    }
    ledger
}

fn hello(byte: u8) -> Hello {
    Hello::of_server(Some([byte; 16]))
}

fn listed(file: &Path) -> Listed {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

const A: &str = "tcp://10.0.0.1:10000";
const B: &str = "tcp://10.0.0.2:10000";
const C: &str = "tcp://10.0.0.3:10000";

#[test]
fn who_was_complete_to_the_end_may_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("longhorn/ublk-v.replicas");
    let first = ledger(&file, &[A, B, C]);
    assert!(first.check(MARK, false).is_err(), "nothing is kept yet");
    first.begin(MARK).unwrap();
    first.remove_replica(2);
    assert_eq!(listed(&file).complete.len(), 2);
    // Any of the complete ones, but not with the other, nor for another device.
    for replicas in [&[A, C][..], &[C], &[]] {
        ledger(&file, replicas).check(MARK, false).unwrap();
    }
    let refused = ledger(&file, &[A, B]).check(MARK, false).unwrap_err().to_string();
    assert!(refused.contains(B) && !refused.contains(A), "{refused}");
    assert!(ledger(&file, &[A]).check(MARK + 1, false).is_err());
    // The next one keeps it on, with what it has itself.
    let second = ledger(&file, &[C]);
    second.take_over(MARK, false).unwrap();
    assert!(listed(&file).complete.iter().eq([C]));
    assert!(ledger(&file, &[A]).take_over(MARK, false).is_err());
    second.end();
    assert!(!file.exists());
    assert!(ledger(&file, &[C]).check(MARK, false).is_err());
}

/// The volume may have been reverted since.
#[test]
fn a_device_that_has_ended_does_not_go_on_though_its_list_stays() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    let kept = ledger(&file, &[A]);
    kept.begin(MARK).unwrap();
    let stays = fs::read(&file).unwrap();
    kept.check(MARK, false).unwrap();
    kept.end();
    // As if it could not be removed.
    fs::write(&file, stays).unwrap();
    let refused = kept.take_over(MARK, false).unwrap_err().to_string();
    assert!(refused.contains("the device has ended"), "{refused}");
    // The next device is another one.
    kept.begin(MARK + 1).unwrap();
    kept.check(MARK + 1, false).unwrap();
}

#[test]
fn a_rebuilt_replica_comes_in_and_a_removed_one_never_does() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    let kept = ledger(&file, &[A]);
    kept.begin(MARK).unwrap();
    kept.name(2, B, None);
    assert_eq!(listed(&file).complete.len(), 1, "it is being rebuilt");
    kept.complete(2);
    assert_eq!(listed(&file).complete.len(), 2);
    // It failed before somebody called it complete: the later word does not count.
    kept.name(3, C, None);
    kept.remove_replica(3);
    kept.complete(3);
    assert!(!listed(&file).has(C));
    kept.remove_replica(2);
    kept.complete(2);
    assert!(!listed(&file).has(B));
    // At the same address, another one.
    kept.name(4, B, None);
    kept.complete(4);
    assert!(listed(&file).has(B));
}

#[test]
fn replicas_that_moved_are_known_by_their_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    let kept = ledger(&file, &[A, B, C]);
    kept.begin(MARK).unwrap();
    kept.remove_replica(2);
    let moved = |addresses: &[&str]| ledger(&file, addresses).check(MARK, true).is_ok();
    assert!(moved(&["tcp://10.0.0.1:10100", "tcp://10.0.0.3:10100"]));
    assert!(!moved(&["tcp://10.0.0.2:10100"]), "one failed there");
    assert!(!moved(&["tcp://10.0.0.1:10100", "tcp://10.0.0.1:10200"]), "more than there were");
    assert!(!moved(&["tcp://10.0.0.4:10000"]));
    assert!(ledger(&file, &["tcp://10.0.0.1:10100"]).check(MARK, false).is_err());
}

/// Found by review: once a replica on a host had left, no upgrade was let through any more.
#[test]
fn replicas_that_moved_are_known_by_their_identities() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    let named = |replicas: &[(&str, Option<u8>)]| {
        let ledger = ledger(&file, &[]);
        for (replica, (address, identity)) in (1..).zip(replicas) {
            ledger.name(replica, address, identity.map(hello));
            ledger.complete(replica);
        }
        ledger
    };
    let moved = |replicas: &[(&str, Option<u8>)]| named(replicas).check(MARK, true).is_ok();
    // One has left, and another was rebuilt on its host; the third one has no identity.
    let kept = named(&[(A, Some(1)), (B, Some(2)), (C, None)]);
    kept.begin(MARK).unwrap();
    kept.remove_replica(1);
    kept.name(4, "tcp://10.0.0.1:10050", Some(hello(4)));
    kept.complete(4);
    let (a, b, c) = ("tcp://10.0.0.1:10100", "tcp://10.0.0.2:10100", "tcp://10.0.0.3:10100");
    assert!(moved(&[(a, Some(4)), (b, Some(2)), (c, None)]));
    assert!(named(&[(b, Some(4)), (a, Some(2))]).check(MARK, false).is_ok(), "wherever they are");
    assert!(!moved(&[(a, Some(1))]), "it failed, though another one is there");
    assert!(!moved(&[(A, None)]) && !moved(&[(a, Some(9))]));
    // It was rebuilt itself.
    kept.name(5, A, Some(hello(1)));
    kept.complete(5);
    assert!(moved(&[(a, Some(1)), (c, None)]));
    // The list of a controller that knows no identities yet.
    ledger(&file, &[A, B]).begin(MARK).unwrap();
    assert!(moved(&[(a, Some(1)), (b, Some(2))]) && !moved(&[(c, Some(3))]));
}

/// Both say the same of themselves: the one that failed is not to be taken for the one that is complete.
#[test]
fn replicas_with_the_identity_of_another_are_known_by_their_addresses() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    let kept = ledger(&file, &[]);
    for (replica, address) in (1..).zip([A, B]) {
        kept.name(replica, address, Some(hello(1)));
        kept.complete(replica);
    }
    kept.begin(MARK).unwrap();
    kept.remove_replica(1);
    let next = ledger(&file, &[]);
    next.name(1, A, Some(hello(1)));
    next.complete(1);
    next.check(MARK, true).unwrap_err();
    // One that is named again is itself.
    next.name(1, A, Some(hello(1)));
    next.begin(MARK).unwrap();
    let again = ledger(&file, &[]);
    again.name(1, "tcp://10.0.0.1:10100", Some(hello(1)));
    again.complete(1);
    again.check(MARK, false).unwrap();
}

/// Found by review: a device that was left behind was taken over after the volume had been used on another
/// machine, and what its kernel still had to write came over what was written there.
#[test]
fn replicas_that_somebody_else_has_changed_are_not_taken_over_with() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    let named = |generations: &[Option<(u64, u64)>]| {
        let ledger = ledger(&file, &[]);
        for (replica, generations) in (1..).zip(generations) {
            let generations = generations.map(|(now, changed)| Generations { now, changed });
            ledger.name(replica, A, Some(Hello { generations, ..hello(replica as u8) }));
            ledger.complete(replica);
        }
        ledger
    };
    named(&[Some((10, 11)), Some((20, 21))]).begin(MARK).unwrap();
    let check = |generations: &[Option<(u64, u64)>], moved| named(generations).check(MARK, moved);
    for moved in [false, true] {
        // Both were changed by the controller that left the device, or one of them, or none.
        for now in [(11, 21), (10, 21), (10, 20)] {
            check(&[Some((now.0, 12)), Some((now.1, 22))], moved).unwrap();
        }
        let refused = check(&[Some((11, 12)), Some((23, 22))], moved).unwrap_err().to_string();
        assert!(refused.contains("changed by another controller"), "{refused}");
        // One that does not say.
        check(&[Some((11, 12)), None], moved).unwrap();
    }
    // The next controller goes on, and its changes count from then on.
    named(&[Some((11, 12)), Some((21, 22))]).take_over(MARK, false).unwrap();
    assert!(check(&[Some((12, 13)), Some((22, 23))], false).is_ok());
    assert!(check(&[Some((10, 13)), Some((22, 23))], false).is_err());
    // In an upgrade, the older process of a replica may go on until the device is handed over.
    named(&[Some((11, 14)), Some((21, 24))]).take_over(MARK, true).unwrap();
    for now in [12, 14] {
        assert!(check(&[Some((now, 15)), Some((24, 25))], false).is_ok());
    }
    // The list of an older version.
    let mut list = listed(&file);
    list.generations.clear();
    fs::write(&file, serde_json::to_vec(&list).unwrap()).unwrap();
    assert!(check(&[Some((99, 98)), Some((1, 2))], false).is_ok());
}

/// Its directory is all that a replica in the process is known by.
#[test]
fn a_replica_of_this_process_moves_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    ledger(&file, &["local:/a", B]).begin(MARK).unwrap();
    for moved in [false, true] {
        assert!(ledger(&file, &["local:/a", B]).check(MARK, moved).is_ok());
        assert!(ledger(&file, &["local:/b"]).check(MARK, moved).is_err());
    }
}

/// Whatever goes wrong with the file: when a removal returns, nobody takes the replica for complete.
#[test]
fn a_list_that_cannot_be_changed_is_removed_or_the_process_ends() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    let kept = ledger(&file, &[A, B]);
    kept.begin(MARK).unwrap();
    // Where the new list would be written there is a directory.
    fs::create_dir(dir.path().join("list.new")).unwrap();
    kept.remove_replica(2);
    assert!(!file.exists(), "rather none than a stale one");
    assert!(ledger(&file, &[B]).check(MARK, false).is_err());
    // Neither does it come back later without being true.
    fs::remove_dir(dir.path().join("list.new")).unwrap();
    kept.name(3, C, None);
    kept.complete(3);
    assert!(!listed(&file).has(B));
    // Nor can it be removed: a directory is in its place.
    fs::remove_file(&file).unwrap();
    fs::create_dir_all(file.join("x")).unwrap();
    let ended = catch_unwind(AssertUnwindSafe(|| kept.remove_replica(1)));
    let why = ended.unwrap_err().downcast::<String>().unwrap();
    assert!(why.contains("neither"), "{why}");
}

#[test]
fn what_is_no_list_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("list");
    for text in ["", "{", "[]", r#"{"mark":77}"#] {
        fs::write(&file, text).unwrap();
        assert!(ledger(&file, &[]).check(MARK, true).is_err(), "{text}");
    }
}

#[test]
fn a_list_that_is_kept_is_no_others() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ledger");
    let ledger = Ledger::new(file.clone());
    ledger.begin(MARK).unwrap();
    ledger.end_of_others();
    assert!(file.exists());
    Ledger::new(file.clone()).end_of_others();
    assert!(!file.exists());
}

#[test]
fn a_newer_process_of_a_complete_replica_is_known() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = Ledger::new(directory.path().join("ledger"));
    let told = |byte, now| {
        let generations = Some(Generations { now, changed: now + 1 });
        Some(Hello { generations, ..hello(byte) })
    };
    ledger.name(1, A, told(1, 10));
    assert_eq!(ledger.newer_of(told(1, 10)), None, "it is not complete");
    ledger.complete(1);
    for now in [10, 11] {
        assert_eq!(ledger.newer_of(told(1, now)).as_deref(), Some(A));
    }
    // Another one, a copy that has changed since, one that says nothing of itself.
    for other in [told(2, 10), told(1, 12), Some(hello(1)), None] {
        assert_eq!(ledger.newer_of(other), None);
    }
    ledger.remove_replica(1);
    assert_eq!(ledger.newer_of(told(1, 10)), None);
}
