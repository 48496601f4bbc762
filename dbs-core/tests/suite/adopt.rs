//! A volume that rests on a file gets the same from the snapshots of another volume.

use crate::backing::{BLOCK, EXTENT, SIZE, file_of, fresh, read, sample, snapshot, write};
use crate::common::{finish_work, open};
use dbs_core::store::SnapshotOptions;
use dbs_core::{Error, ErrorKind, Store};
use std::sync::{Arc, Mutex};

/// The volume `w`, whose newest snapshot `top` shows what the file shows, over `a` and `b`; what these show.
fn fill(store: &Store) -> [Vec<u8>; 2] {
    let content = fresh(2);
    store.create_volume("w", SIZE as u64).unwrap();
    let mut model = vec![0; SIZE];
    write(store, "w", 0, &[0x11; 2 * EXTENT], &mut model);
    write(store, "w", 5 * EXTENT, &[0x12; BLOCK], &mut model);
    snapshot(store, "w", "a");
    let a = model.clone();
    write(store, "w", 0, &content[..EXTENT], &mut model);
    snapshot(store, "w", "b");
    let b = model.clone();
    write(store, "w", EXTENT, &content[EXTENT..4 * EXTENT], &mut model);
    write(store, "w", 5 * EXTENT, &[0; BLOCK], &mut model);
    assert!(model == content);
    snapshot(store, "w", "top");
    [a, b]
}

fn refused(error: Result<(), Error>, kind: ErrorKind) {
    let error = error.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
}

#[test]
fn a_volume_leaves_its_file_for_the_snapshots_of_another() {
    let sample = sample();
    let (store, mut model) = (&sample.store, fresh(2));
    write(store, "v", 3 * BLOCK, &[7; BLOCK], &mut model);
    snapshot(store, "v", "later");
    let later = model.clone();
    store.volume("v").unwrap().discard(EXTENT as u64, EXTENT as u64).unwrap();
    model[EXTENT..2 * EXTENT].fill(0);
    write(store, "v", 7 * EXTENT + 100, &[8; 33], &mut model);
    let [a, b] = fill(store);
    let open_before = store.volume("v").unwrap();
    store.adopt("v", "w").unwrap();
    refused(store.adopt("v", "w"), ErrorKind::NotFound);
    let same = |store: &Store, what: &str| {
        for (spec, shown) in [("v", &model), ("v@later", &later), ("v@a", &a), ("v@b", &b)] {
            assert!(read(store, spec) == *shown, "{what}: {spec}");
        }
        assert!(store.backing("v").unwrap().is_none(), "{what}");
        let parent = |name: Option<&str>| {
            let layers = store.layers("v").unwrap();
            layers.into_iter().find(|layer| layer.name.as_deref() == name).unwrap().parent
        };
        assert_eq!(parent(Some("later")).as_deref(), Some("b"), "{what}");
        assert_eq!(parent(Some("a")), None, "{what}");
        assert_eq!(store.layers("v").unwrap().len(), 4, "{what}");
    };
    same(store, "at once");
    let mut buf = vec![0; SIZE];
    open_before.read_at(0, &mut buf).unwrap();
    assert!(buf == model, "who has it open");
    drop(open_before);
    // Nobody gives it the file any more.
    let crashed = open(&sample.disk.fork().into(), 3, false).unwrap();
    same(&crashed, "opened again");
    finish_work(&crashed);
    same(&crashed, "merged");
    assert_eq!((crashed.info().snapshots, crashed.info().volumes), (4, 1));
    write(&crashed, "v", 0, &[9; BLOCK], &mut model.clone());
    crashed.rollback("v", "a").unwrap();
    finish_work(&crashed);
    assert!(read(&crashed, "v") == a);
    crashed.close().unwrap();
    finish_work(store);
    same(store, "merged beside it");
    store.flush().unwrap();
    let report = Store::check_on(&*sample.disk).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

/// The volume leaves its file for snapshots that rest on another one, and rests on that from then on.
#[test]
fn a_volume_leaves_its_file_for_snapshots_on_another_file() {
    let sample = sample();
    let (store, mut model) = (&sample.store, fresh(2));
    write(store, "v", 3 * BLOCK, &[7; BLOCK], &mut model);
    snapshot(store, "v", "later");
    let _other = store.attach_backing(file_of(3));
    store.create_backed("w", SIZE as u64, &file_of(3)).unwrap();
    let mut a = fresh(3);
    write(store, "w", EXTENT, &[0x11; EXTENT], &mut a);
    write(store, "w", 6 * EXTENT, &[0x12; BLOCK], &mut a);
    snapshot(store, "w", "a");
    // All that is not the same in both files, but for what nobody shows.
    let (mut top, content) = (a.clone(), fresh(2));
    write(store, "w", 0, &content[..4 * EXTENT], &mut top);
    write(store, "w", 6 * EXTENT, &[0; BLOCK], &mut top);
    assert!(top == content);
    snapshot(store, "w", "top");
    store.adopt("v", "w").unwrap();
    let same = |store: &Store, what: &str| {
        for (spec, shown) in [("v", &model), ("v@later", &model), ("v@a", &a)] {
            assert!(read(store, spec) == *shown, "{what}: {spec}");
        }
        assert_eq!(store.backing("v").unwrap().unwrap().identity, "file 3", "{what}");
        assert_eq!(store.layers("v").unwrap().len(), 3, "{what}");
    };
    same(store, "at once");
    let crashed = open(&sample.disk.fork().into(), 3, false).unwrap();
    let file = crashed.attach_backing(file_of(3));
    same(&crashed, "opened again");
    finish_work(&crashed);
    same(&crashed, "merged");
    assert_eq!(crashed.info().volumes, 1);
    // What it built on until then is gone; what it builds on now is not.
    drop(file);
    assert_eq!(
        crashed.volume("v@a").unwrap().read_at(0, &mut [0; BLOCK]).unwrap_err().kind(),
        ErrorKind::Io
    );
    crashed.close().unwrap();
    finish_work(store);
    same(store, "merged beside it");
    store.flush().unwrap();
    let report = Store::check_on(&*sample.disk).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn what_cannot_take_the_place_of_a_file_is_refused_and_changes_nothing() {
    let sample = sample();
    let (store, shown) = (&sample.store, fresh(2));
    refused(store.adopt("v", "w"), ErrorKind::NotFound);
    refused(store.adopt("v", "v"), ErrorKind::Invalid);
    store.create_volume("w", SIZE as u64).unwrap();
    refused(store.adopt("v", "w"), ErrorKind::Invalid);
    store.delete_volume("w").unwrap();
    fill(store);
    refused(store.adopt("w", "v"), ErrorKind::Invalid);
    let handle = store.volume("w").unwrap();
    refused(store.adopt("v", "w"), ErrorKind::Busy);
    drop(handle);
    let handle = store.volume("w@a").unwrap();
    refused(store.adopt("v", "w"), ErrorKind::Busy);
    drop(handle);
    for volume in ["v", "w"] {
        store.set_rebuilding(volume, true).unwrap();
        refused(store.adopt("v", "w"), ErrorKind::Busy);
        store.set_rebuilding(volume, false).unwrap();
    }
    store.clone_volume("w", "a", "clone").unwrap();
    refused(store.adopt("v", "w"), ErrorKind::Busy);
    store.delete_volume("clone").unwrap();
    finish_work(store);
    // The name of the newest one is free to be that of another.
    for (name, kind) in [("b", Some(ErrorKind::Exists)), ("top", None)] {
        store.create_snapshot("v", name, &SnapshotOptions::default()).unwrap();
        match kind {
            Some(kind) => refused(store.adopt("v", "w"), kind),
            None => continue,
        }
        store.delete_snapshot("v", name).unwrap();
        finish_work(store);
    }
    store.volume("w").unwrap().write_at(0, &[1; BLOCK], false).unwrap();
    refused(store.adopt("v", "w"), ErrorKind::Invalid);
    store.rollback("w", "top").unwrap();
    finish_work(store);
    assert_eq!(store.backing("v").unwrap().unwrap().identity, "file 2");
    assert_eq!(store.volumes(false).len(), 2);
    assert!(read(store, "v") == shown);
    store.adopt("v", "w").unwrap();
    assert!(read(store, "v") == shown && read(store, "v@top") == shown);
    // Of another size.
    store.create_backed("x", SIZE as u64 + 512, &file_of(2)).unwrap();
    store.create_volume("y", SIZE as u64 + 1024).unwrap();
    snapshot(store, "y", "s");
    refused(store.adopt("x", "y"), ErrorKind::Invalid);
}

/// Between the two groups of an adopt others have their turn. Who opened a snapshot then had it taken from under the handle:
/// its volume was gone.
#[test]
fn who_opens_a_snapshot_while_a_volume_leaves_its_file_keeps_it() {
    let sample = sample();
    let (store, shown) = (&sample.store, fresh(2));
    let [a, b] = fill(store);
    let opened = Arc::new(Mutex::new(None));
    let (opens, slot, mut first) = (store.clone(), Arc::clone(&opened), true);
    sample.disk.on_flush(move || {
        if std::mem::take(&mut first) {
            *slot.lock().unwrap() = Some(opens.volume("w@a").unwrap());
        }
    });
    refused(store.adopt("v", "w"), ErrorKind::Busy);
    let handle = opened.lock().unwrap().take().unwrap();
    let mut buf = vec![0; SIZE];
    handle.read_at(0, &mut buf).unwrap();
    assert!(buf == a && read(store, "v") == shown && read(store, "w@b") == b);
    drop(handle);
    store.adopt("v", "w").unwrap();
    assert!(read(store, "v@a") == a && read(store, "v@b") == b && read(store, "v") == shown);
    finish_work(store);
    store.flush().unwrap();
    assert_eq!(store.info().volumes, 1);
    assert!(Store::check_on(&*sample.disk).unwrap().is_clean());
}
