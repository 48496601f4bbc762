//! Clones and whole families of volumes, between stores in memory.

use super::*;
use crate::memory::MemoryStore;
use crate::stream::{SendOptions, identity, pending, plan, receive, send};
use dbs_core::ErrorKind;
use dbs_core::store::SnapshotOptions;

const BLOCK: u64 = 4096;

fn always(_: u64, _: u64) -> bool {
    true
}

/// Writes a block of the volume and takes a snapshot.
fn step(store: &MemoryStore, spec: &str, block: u64) {
    let (volume, name) = spec.split_once('@').unwrap();
    let data = vec![block as u8 + 1; BLOCK as usize];
    store.open(volume).unwrap().write_at(block * BLOCK, &data).unwrap();
    store.create_snapshot(volume, name, &SnapshotOptions::default()).unwrap();
}

fn clone(store: &MemoryStore, spec: &str, new: &str) {
    let (volume, name) = spec.split_once('@').unwrap();
    store.clone_rebuilding(volume, name, new).unwrap();
    store.complete(new).unwrap();
}

/// `v` with two branches, a clone of one, and a clone of that.
fn family() -> MemoryStore {
    let store = MemoryStore::new(1);
    store.create_volume("v", 9 * BLOCK).unwrap();
    step(&store, "v@a", 0);
    step(&store, "v@b", 1);
    store.rollback("v", "a").unwrap();
    step(&store, "v@c", 2);
    clone(&store, "v@b", "k");
    step(&store, "k@x", 3);
    store.resize_volume("k", 11 * BLOCK).unwrap();
    step(&store, "k@y", 10);
    clone(&store, "k@x", "m");
    step(&store, "m@z", 5);
    store
}

const ALL: [&str; 6] = ["v@a", "v@b", "v@c", "k@x", "k@y", "m@z"];

fn stream(store: &MemoryStore, options: &SendOptions) -> Vec<u8> {
    let mut bytes = Vec::new();
    send(store, options, &mut bytes, &mut always).unwrap();
    bytes
}

fn one(spec: &str, base: &str) -> SendOptions {
    let (volume, snapshot) = spec.split_once('@').unwrap();
    SendOptions {
        volume: volume.into(),
        snapshot: snapshot.into(),
        base: Some(base.into()).filter(|base: &String| !base.is_empty()),
        ..SendOptions::default()
    }
}

fn all(store: &MemoryStore) -> Vec<u8> {
    plan(store, "v").unwrap().iter().flat_map(|options| stream(store, options)).collect()
}

fn take(store: &MemoryStore, options: ReceiveOptions<'_>, bytes: &[u8]) -> Result<Vec<Received>> {
    receive_all(store, &options, bytes, &mut |_| {}, &mut always)
}

fn same(source: &MemoryStore, target: &MemoryStore, spec: &str, there: &str) {
    assert!(
        source.memory(spec).content().bytes == target.memory(there).content().bytes,
        "{spec} as {there}"
    );
    let of = |store: &MemoryStore, spec: &str| {
        let (volume, name) = spec.split_once('@').unwrap();
        let all = store.snapshots(volume).unwrap();
        identity(all.iter().find(|s| s.name == name).unwrap()).to_owned()
    };
    assert_eq!(of(source, spec), of(target, there));
}

fn fails<T>(result: Result<T>, kind: ErrorKind, text: &str) {
    let Err(error) = result else { panic!("it did not fail: {text}") };
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn a_clone_is_made_where_its_origin_is() {
    let source = family();
    let clone = stream(&source, &one("k@x", "v@b"));
    let target = MemoryStore::new(2);
    fails(receive(&target, None, &clone[..], &mut always), ErrorKind::NotFound, "the store does");
    assert!(target.volume_info("k").is_err(), "nothing was made");
    // The origin may be there under another name.
    for options in [one("v@a", ""), one("v@b", "a")] {
        receive(&target, Some("golden"), &stream(&source, &options)[..], &mut always).unwrap();
    }
    for length in 0..clone.len() {
        let cut = receive(&target, None, &clone[..length], &mut always);
        assert_eq!(cut.unwrap_err().kind(), ErrorKind::Corrupt);
    }
    let info = target.volume_info("k").unwrap();
    assert!(info.rebuilding && pending(&target, "k").unwrap().is_some());
    let other = stream(&source, &one("m@z", "k@x"));
    let into_k = receive(&target, Some("k"), &other[..], &mut always);
    fails(into_k, ErrorKind::Busy, "give it up: delete volume `k`");
    receive(&target, None, &clone[..], &mut always).unwrap();
    same(&source, &target, "k@x", "k@x");
    let info = target.volume_info("k").unwrap();
    assert_eq!((info.origin.as_deref(), info.rebuilding), (Some("golden@b"), false));
    fails(receive(&target, None, &clone[..], &mut always), ErrorKind::Exists, "already has");
    // It is a volume as others: differences go on top, with another size.
    receive(&target, None, &stream(&source, &one("k@y", "x"))[..], &mut always).unwrap();
    same(&source, &target, "k@y", "k@y");
    // A clone that was just made will do, one of something else or that was written will not.
    for (from, kind) in [("golden@b", None), ("golden@a", Some("that is not the snapshot below"))] {
        self::clone(&target, from, "n");
        let received = receive(&target, Some("n"), &clone[..], &mut always);
        match kind {
            None => assert_eq!(received.unwrap().volume, "n"),
            Some(text) => fails(received, ErrorKind::Exists, text),
        }
        target.delete_volume("n");
    }
    self::clone(&target, "golden@b", "n");
    target.open("n").unwrap().write_at(0, &[9; 512]).unwrap();
    fails(receive(&target, Some("n"), &clone[..], &mut always), ErrorKind::Exists, "makes the");
}

#[test]
fn a_family_arrives_whole() {
    let source = family();
    let bytes = all(&source);
    let streams = plan(&source, "v").unwrap();
    assert_eq!(streams.iter().filter(|stream| stream.more).count(), ALL.len() - 1);
    let parts: Vec<_> = streams.iter().map(|options| stream(&source, options)).collect();
    // Readers of version 1 without the feature refuse all but the last, which alone is none.
    assert!(parts[..ALL.len() - 1].iter().all(|part| part[10..12] == [1, 0]));

    let target = MemoryStore::new(2);
    let received = take(&target, ReceiveOptions::default(), &bytes).unwrap();
    let names: Vec<_> = received.iter().map(|r| format!("{}@{}", r.volume, r.snapshot)).collect();
    assert_eq!(names, ALL);
    assert_eq!(received.iter().map(|r| r.data).sum::<u64>(), 6 * BLOCK, "each block once");
    let parents = |store: &MemoryStore| {
        let volumes = ["v", "k", "m"].map(|volume| store.snapshots(volume).unwrap());
        volumes.concat().into_iter().map(|s| s.parent).collect::<Vec<_>>()
    };
    for spec in ALL {
        same(&source, &target, spec, spec);
    }
    assert_eq!(parents(&source), parents(&target));
    // Once more it brings nothing, and what was added since.
    step(&source, "m@more", 6);
    let received = take(&target, ReceiveOptions::default(), &all(&source)).unwrap();
    assert_eq!(received.iter().map(|r| r.data).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 0, BLOCK]);
    same(&source, &target, "m@more", "m@more");
}

#[test]
fn a_copy_beside_its_source_builds_on_itself() {
    let store = family();
    let bytes = all(&store);
    let plain = ReceiveOptions { volume: Some("w"), ..Default::default() };
    fails(take(&store, plain, &bytes), ErrorKind::Exists, "builds on `v@b`, not on volume `w`");
    store.delete_volume("w");
    let options = ReceiveOptions { volume: Some("w"), prefix: "w-", ..Default::default() };
    take(&store, options, &bytes).unwrap();
    for (spec, there) in ALL.into_iter().zip(["w@a", "w@b", "w@c", "w-k@x", "w-k@y", "w-m@z"]) {
        same(&store, &store, spec, there);
    }
    assert_eq!(store.volume_info("w-k").unwrap().origin.as_deref(), Some("w@b"));
    assert_eq!(store.volume_info("w-m").unwrap().origin.as_deref(), Some("w-k@x"));
}

#[test]
fn a_sequence_that_was_cut_is_received_again() {
    let source = family();
    let bytes = all(&source);
    for length in (0..bytes.len()).step_by(97) {
        let target = MemoryStore::new(2);
        let cut = take(&target, ReceiveOptions::default(), &bytes[..length]).unwrap_err();
        assert_eq!(cut.kind(), ErrorKind::Corrupt, "{length}: {cut}");
        take(&target, ReceiveOptions::default(), &bytes).unwrap();
        for spec in ALL {
            same(&source, &target, spec, spec);
        }
        assert!(["v", "k", "m"].iter().all(|v| pending(&target, v).unwrap().is_none()));
    }
}

#[test]
fn nothing_that_was_written_is_lost_to_a_sequence() {
    let source = family();
    let bytes = all(&source);
    let target = MemoryStore::new(2);
    receive(&target, None, &stream(&source, &one("v@a", ""))[..], &mut always).unwrap();
    target.open("v").unwrap().write_at(0, &[9; 512]).unwrap();
    let refused = take(&target, ReceiveOptions::default(), &bytes);
    fails(refused, ErrorKind::Invalid, "dbs snapshot rollback v@a");
    // What the user names is rolled back, not what else the input names.
    take(&target, ReceiveOptions { force: true, ..Default::default() }, &bytes).unwrap();
    target.rollback("k", "x").unwrap();
    target.delete_snapshot("k", "y").unwrap();
    target.open("k").unwrap().write_at(0, &[9; 512]).unwrap();
    let refused = take(&target, ReceiveOptions { force: true, ..Default::default() }, &bytes);
    fails(refused, ErrorKind::Invalid, "dbs snapshot rollback k@x");
}

/// Found by a tester: what sends a volume every night failed the second time, if the volume had one snapshot.
#[test]
fn a_sequence_of_one_snapshot_can_be_repeated() {
    let source = family();
    let bytes = stream(&source, &one("v@a", ""));
    let target = MemoryStore::new(2);
    take(&target, ReceiveOptions::default(), &bytes).unwrap();
    let again = take(&target, ReceiveOptions::default(), &bytes).unwrap();
    assert_eq!((again[0].snapshot.as_str(), again[0].data), ("a", 0));
    assert_eq!(names(&target, "v"), ["a"]);
    // Read to its end, or whoever sends it would fail; and damage in it is found.
    let cut = &bytes[..bytes.len() - 1];
    assert!(take(&target, ReceiveOptions::default(), cut).is_err());
    let single = ReceiveOptions { single: true, ..Default::default() };
    fails(take(&target, single, &bytes), ErrorKind::Exists, "already has snapshot");
}

#[test]
fn what_cannot_be_sent_whole_is_refused() {
    let source = family();
    let single = ReceiveOptions { single: true, ..Default::default() };
    let target = MemoryStore::new(2);
    fails(take(&target, single, &all(&source)), ErrorKind::Invalid, "several snapshots");
    assert!(target.volumes().unwrap().is_empty());
    take(&target, single, &stream(&source, &one("v@a", ""))).unwrap();
    fails(plan(&source, "w"), ErrorKind::NotFound, "no volume `w`");
    clone(&source, "v@c", "new");
    fails(plan(&source, "v"), ErrorKind::Invalid, "dbs snapshot create new@NAME");
    source.delete_volume("new");
    source.clone_rebuilding("v", "c", "half").unwrap();
    fails(plan(&source, "v"), ErrorKind::Busy, "`half` is incomplete");
    // A clone that is sent alone is complete in itself.
    let steps = plan(&source, "k").unwrap();
    assert_eq!(steps[0].base, None);
    assert_eq!(steps[2].base.as_deref(), Some("k@x"));
}

/// The streams of the family, each by itself.
fn parts(source: &MemoryStore) -> Vec<Vec<u8>> {
    plan(source, "v").unwrap().iter().map(|options| stream(source, options)).collect()
}

fn names(store: &MemoryStore, volume: &str) -> Vec<String> {
    store.snapshots(volume).unwrap().into_iter().map(|s| s.name).collect()
}

#[test]
fn a_clone_is_not_received_into_its_origin() {
    let source = family();
    let target = MemoryStore::new(2);
    let as_clone = ReceiveOptions { volume: Some("k"), ..Default::default() };
    fails(take(&target, as_clone, &all(&source)), ErrorKind::Exists, "another volume `k`");
    assert_eq!(names(&target, "k"), ["a", "b", "c"], "of the origin alone");
    target.delete_volume("k");

    for options in [one("v@a", ""), one("v@b", "a")] {
        receive(&target, None, &stream(&source, &options)[..], &mut always).unwrap();
    }
    let clone = stream(&source, &one("k@x", "v@b"));
    let into_v = ReceiveOptions { volume: Some("v"), ..Default::default() };
    fails(take(&target, into_v, &clone), ErrorKind::Exists, "makes a clone of `v@b`");
    target.open("v").unwrap().write_at(0, &[9; 512]).unwrap();
    let forced = ReceiveOptions { force: true, ..into_v };
    fails(take(&target, forced, &clone), ErrorKind::Exists, "makes a clone of `v@b`");
    assert_eq!(target.memory("v").content().bytes[..512], [9; 512]);
    assert_eq!(names(&target, "v"), ["a", "b"]);
}

#[test]
fn a_write_beside_a_rollback_is_kept() {
    let source = family();
    let parts = parts(&source);
    let target = MemoryStore::new(2);
    take(&target, ReceiveOptions::default(), &parts[..2].concat()).unwrap_err();
    let mut calls = 0;
    target.meanwhile(move |store| {
        calls += 1;
        // The head was found to be as the snapshot below it.
        if calls == 2 && !store.volume_info("v").unwrap().rebuilding {
            store.open("v").unwrap().write_at(0, &[9; 512]).unwrap();
        }
    });
    let refused = take(&target, ReceiveOptions::default(), &parts.concat());
    fails(refused, ErrorKind::Invalid, "dbs snapshot rollback v@a");
    assert_eq!(target.memory("v").content().bytes[..512], [9; 512]);
    assert_eq!(names(&target, "v"), ["a", "b"]);
    assert!(!target.volume_info("v").unwrap().rebuilding);
}

#[test]
fn a_head_elsewhere_is_left_there() {
    let source = family();
    let parts = parts(&source);
    let target = MemoryStore::new(2);
    take(&target, ReceiveOptions::default(), &parts[..2].concat()).unwrap_err();
    target.create_snapshot("v", "mine", &SnapshotOptions::default()).unwrap();
    let refused = take(&target, ReceiveOptions::default(), &parts.concat());
    fails(refused, ErrorKind::Invalid, "dbs snapshot rollback v@a");
    assert_eq!(target.volume_info("v").unwrap().parent.as_deref(), Some("v@mine"));
}

#[test]
fn a_rollback_that_was_killed_is_made_again() {
    let source = family();
    let parts = parts(&source);
    let target = MemoryStore::new(2);
    take(&target, ReceiveOptions::default(), &parts[..2].concat()).unwrap_err();
    // It had the head marked, for the snapshot that is to go on top of `a`.
    let identity_of = |name: &str| {
        let all = source.snapshots("v").unwrap();
        all.into_iter().find(|s| s.name == name).unwrap().uuid
    };
    let labels = [
        ("dbs.receiving".to_owned(), format!("{}:0", identity_of("c"))),
        ("dbs.receiving-base".to_owned(), identity_of("b")),
    ];
    let options = SnapshotOptions {
        labels: labels.into(),
        system: true,
        rebuilding: Some(true),
        ..Default::default()
    };
    target.create_snapshot("v", "dbs-receiving", &options).unwrap();
    let alone = receive(&target, None, &stream(&source, &one("v@c", "a"))[..], &mut always);
    fails(alone, ErrorKind::Busy, "in the middle of another stream");
    // Killed after the rollback: the marker cannot be deleted while the volume is incomplete.
    target.rollback("v", "a").unwrap();
    let refused = take(&target, ReceiveOptions::default(), &parts.concat());
    let rollback = "complete the rollback first with `dbs snapshot rollback v@a`, then";
    fails(refused, ErrorKind::Busy, rollback);
    // As the command does.
    target.complete("v").unwrap();
    let refused = take(&target, ReceiveOptions::default(), &parts.concat());
    fails(refused, ErrorKind::Busy, "with `dbs snapshot delete v@dbs-receiving`");
    target.rollback("v", "b").unwrap();
    target.delete_snapshot("v", "dbs-receiving").unwrap();
    target.create_snapshot("v", "dbs-receiving", &options).unwrap();
    take(&target, ReceiveOptions::default(), &parts.concat()).unwrap();
    for spec in ALL {
        same(&source, &target, spec, spec);
    }
    assert_eq!(names(&target, "v"), ["a", "b", "c"]);
}

#[test]
fn a_volume_that_somebody_fills_is_not_completed() {
    let source = family();
    let parts = parts(&source);
    let target = MemoryStore::new(2);
    take(&target, ReceiveOptions::default(), &parts[..2].concat()).unwrap_err();
    let rebuilding = SnapshotOptions { rebuilding: Some(true), ..Default::default() };
    target.create_snapshot("v", "gone", &rebuilding).unwrap();
    target.delete_snapshot("v", "gone").unwrap();
    let refused = take(&target, ReceiveOptions::default(), &parts.concat());
    fails(refused, ErrorKind::Busy, "volume `v` is incomplete");
    assert!(target.volume_info("v").unwrap().rebuilding);
    assert_eq!(names(&target, "v"), ["a", "b"]);
}

#[test]
fn a_clone_is_completed_on_its_own_origin_alone() {
    let source = family();
    let parts = parts(&source);
    let cut = [parts[..3].concat(), parts[3][..parts[3].len() - 1].to_vec()].concat();
    let identity = source.snapshots("k").unwrap()[0].uuid.clone();
    // Killed before it was complete, and right before the marker was deleted.
    for killed_late in [false, true] {
        let target = MemoryStore::new(2);
        take(&target, ReceiveOptions::default(), &cut).unwrap_err();
        if killed_late {
            let labels = [("dbs.received-uuid".to_owned(), identity.clone())].into();
            let rebuilding = Some(false);
            let options = SnapshotOptions { labels, rebuilding, ..Default::default() };
            let _filled = target.open_to_fill("k", false).unwrap();
            target.create_snapshot("k", "x", &options).unwrap();
        }
        let elsewhere = ReceiveOptions { volume: Some("w"), ..Default::default() };
        let refused = take(&target, elsewhere, &parts.concat());
        fails(refused, ErrorKind::Exists, "builds on `v@b`, not on volume `w`");
        assert!(pending(&target, "k").unwrap().is_some(), "as it was");
        take(&target, ReceiveOptions::default(), &parts.concat()).unwrap();
        same(&source, &target, "k@x", "k@x");
        assert!(pending(&target, "k").unwrap().is_none());
    }
}

#[test]
fn a_single_clone_is_cleaned_up_wherever_its_origin_is() {
    let source = family();
    let target = MemoryStore::new(2);
    for options in [one("v@a", ""), one("v@b", "a")] {
        receive(&target, Some("golden"), &stream(&source, &options)[..], &mut always).unwrap();
    }
    let clone = stream(&source, &one("k@x", "v@b"));
    receive(&target, None, &clone[..clone.len() - 1], &mut always).unwrap_err();
    let identity = source.snapshots("k").unwrap()[0].uuid.clone();
    let labels = [("dbs.received-uuid".to_owned(), identity)].into();
    let options = SnapshotOptions { labels, rebuilding: Some(false), ..Default::default() };
    let filled = target.open_to_fill("k", false).unwrap();
    target.create_snapshot("k", "x", &options).unwrap();
    drop(filled);
    assert_eq!(receive(&target, None, &clone[..], &mut always).unwrap().data, 0);
    assert_eq!(names(&target, "k"), ["x"]);
}

#[test]
fn a_sequence_carries_each_snapshot_once() {
    let source = family();
    let parts = parts(&source);
    let target = MemoryStore::new(2);
    let twice = [&parts[0][..], &parts[0]].concat();
    fails(take(&target, ReceiveOptions::default(), &twice), ErrorKind::Invalid, "twice");
    let alone = receive(&target, Some("w"), &parts[0][..], &mut always);
    fails(alone, ErrorKind::Invalid, "several snapshots");
    assert!(target.volume_info("w").is_err(), "a part is not taken for the whole");
}
