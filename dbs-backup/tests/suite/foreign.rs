//! What others have written into a backup store: other sizes, other names, and two who create at once.

use crate::support::*;
use dbs_backup::config::LARGEST_VOLUME;
use dbs_backup::objects::{Directory, Objects};
use dbs_backup::{BackupStore, CreateOptions, Onto, Work};
use dbs_core::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const BACKUPS: &str = "backupstore/volumes/5e/23/vol-1/backups";

/// `volume.cfg` has the size of the last backup: it says nothing of earlier ones.
#[test]
fn the_size_in_volume_cfg_is_that_of_the_last_backup() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let mut volume = volume(30, 9);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let small = volume.0[0].1[..BLOCK as usize + 512].to_vec();
    volume.0.push(("two".to_owned(), small));
    // Larger blocks, of which the size of the first is no multiple, and the other way round.
    let source = volume.get("two");
    let options = CreateOptions { block_size: Some(3 * BLOCK), ..options("backup-2", "two") };
    store.create(&source, options).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
    for size in [3 * BLOCK, 512, BLOCK + 1, 4096 * 7] {
        objects.edit("volume.cfg", |content| {
            let mut config: serde_json::Value = serde_json::from_slice(content).unwrap();
            config["Size"] = size.to_string().into();
            *content = config.to_string().into_bytes();
        });
        for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two")] {
            let content = volume.get(snapshot).content();
            let disk = Disk::new(vec![0; content.len()]);
            restore(&store, backup, &disk, Onto::Empty).expect(backup);
            assert!(disk.content() == content, "{size} {backup}");
        }
    }
    // Facts that are long, for whatever reason, are read; too long ones are not called damaged.
    objects.edit("backup_backup-1.cfg", |content| content.resize(17 << 20, b' '));
    store.complete_backup(VOLUME, "backup-1").unwrap();
    let store = store.with_limit(16 << 20);
    assert_eq!(store.backup(VOLUME, "backup-1").unwrap_err().kind(), ErrorKind::Unsupported);
    let error = remove(&store, "backup-2").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(!error.to_string().to_lowercase().contains("delete"), "{error}");
    assert_eq!(LARGEST_VOLUME, 64 << 40);
}

/// The name inside `volume.cfg` is no path, and no other volume's facts are written over.
#[test]
fn a_name_in_volume_cfg_that_is_another() {
    let root = tempfile::tempdir().unwrap();
    let inner = root.path().join("a/b/c/d/e/f/g");
    std::fs::create_dir_all(&inner).unwrap();
    let objects = Arc::new(Directory::open(&inner).unwrap());
    let store = BackupStore::on(&url(), Arc::clone(&objects) as Arc<dyn Objects>).without_waiting();
    let volume = volume(31, 3);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let other = CreateOptions { volume: "vol-2".to_owned(), ..options("backup-1", "one") };
    store.create(&volume.get("one"), other).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
    let second = store.volume("vol-2").unwrap();
    let path = "backupstore/volumes/5e/23/vol-1/volume.cfg";
    let good = objects.get(path, 1 << 20).unwrap();
    for name in ["../../../../../../../escaped", "vol-2", "/tmp/x"] {
        let bad = String::from_utf8(good.clone()).unwrap().replace("vol-1", name);
        objects.put(path, bad.as_bytes()).unwrap();
        assert_eq!(store.volume(VOLUME).unwrap_err().kind(), ErrorKind::Corrupt, "{name}");
        let source = volume.get("one");
        assert!(create(&store, "backup-2", &source).is_err(), "{name}");
        let disk = Disk::new(vec![0; source.content().len()]);
        assert!(restore(&store, "backup-1", &disk, Onto::Empty).is_err(), "{name}");
        assert_eq!(store.volume("vol-2").unwrap(), second, "{name}");
    }
    let above = std::fs::read_dir(root.path()).unwrap().count();
    assert_eq!(above, 1, "nothing is written elsewhere");
    // As `docs/backup.md` says: enough to restore.
    objects.put(path, br#"{"Size":"28672","CompressionMethod":"\"lz4\""}"#).unwrap();
    let disk = Disk::new(vec![0; volume.get("one").content().len()]);
    restore(&store, "backup-1", &disk, Onto::Empty).unwrap();
    assert!(disk.content() == volume.get("one").content());
}

/// Facts whose blocks cannot be read are no empty volume.
#[test]
fn facts_without_their_blocks_are_damaged() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    create(&store, "backup-1", &volume(32, 3).get("one")).unwrap();
    objects.edit("backup_backup-1.cfg", |content| {
        *content =
            String::from_utf8(content.clone()).unwrap().replace("\"Blocks\"", "\"Blooks\"").into();
    });
    let error = store.backup(VOLUME, "backup-1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

/// Of two who create a backup of one name, the second is refused, and takes nothing from the first.
#[test]
fn two_who_create_a_backup_of_one_name() {
    let volume = volume(33, 4);
    let content = volume.get("one").content();
    for late in [false, true] {
        let objects = Arc::new(Memory::default());
        let (first, second) = (store(&objects), store(&objects));
        let (a, b) = (volume.get("one"), volume.get("one"));
        let loser = first.create(&a, options("backup-1", "one")).unwrap();
        let mut winner = second.create(&b, options("backup-1", "one")).ok();
        let win = |winner: &mut Option<dbs_backup::Creation<'_, _>>| {
            if let Some(winner) = winner.take() {
                winner.run(&mut Work::new(&mut |_, _| true)).unwrap();
            }
        };
        if !late {
            win(&mut winner);
        }
        let mut progress = |done: u64, total: u64| {
            if done == total && total > 0 {
                win(&mut winner);
            }
            true
        };
        let error = loser.run(&mut Work::new(&mut progress)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exists, "{late}: {error}");
        let disk = Disk::new(vec![0; content.len()]);
        restore(&first, "backup-1", &disk, Onto::Empty).unwrap();
        assert!(disk.content() == content, "{late}");
    }
}

/// A lock that goes out of date while the facts are written does not leave them.
#[test]
fn a_lock_that_lapses_at_the_last_write() {
    let volume = volume(34, 4);
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let source = volume.get("one");
    let creation = store.create(&source, options("backup-1", "one")).unwrap();
    let age = creation.aging();
    // The last write takes longer than the lock is good for.
    objects.at_put(move |path, content| {
        if path.contains("backup_") && String::from_utf8_lossy(content).contains("\"Blocks\":[") {
            age();
        }
    });
    let error = creation.run(&mut Work::new(&mut |_, _| true)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(store.backups(VOLUME).unwrap().is_empty());
}

/// Found by review: upstream's deletion of a volume removes all locks before it removes what is left of the volume. A
/// backup that began in between said that it is complete, and lacked its first blocks.
#[test]
fn a_volume_that_goes_while_it_is_backed_up_leaves_no_backup() {
    let volume = volume(40, 4);
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let source = volume.get("one");
    let creation = store.create(&source, options("backup-1", "one")).unwrap();
    let (removing, seen) = (Arc::clone(&objects), AtomicUsize::new(0));
    objects.at_put(move |path, _| {
        if path.contains("/blocks/") && seen.fetch_add(1, Ordering::SeqCst) == 1 {
            removing.delete("/vol-1/");
        }
    });
    let error = creation.run(&mut Work::new(&mut |_, _| true)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(!objects.paths().iter().any(|path| path.contains("backup_")), "{:?}", objects.paths());
}

/// Found by review: of a deletion and a backup that began together, each could take its own lock for the first. The
/// deletion has looked at what is referred to by then.
#[test]
fn a_deletion_that_holds_its_lock_ends_a_backup_that_has_one_too() {
    let volume = volume(38, 4);
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let source = volume.get("one");
    create(&store, "backup-1", &source).unwrap();
    let creation = store.create(&source, options("backup-2", "one")).unwrap();
    let path = format!("{}locks/lock-other.lck", BACKUPS.trim_end_matches("backups"));
    let lock = |acquired| format!(r#"{{"Name":"lock-other","Type":2,"Acquired":{acquired}}}"#);
    objects.put(&path, lock(true).as_bytes()).unwrap();
    let error = creation.run(&mut Work::new(&mut |_, _| true)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(store.backups(VOLUME).unwrap(), ["backup-1"], "what was begun is removed");
    // One that still waits gives way by itself.
    let creation = {
        objects.remove(&path).unwrap();
        store.create(&source, options("backup-2", "one")).unwrap()
    };
    objects.put(&path, lock(false).as_bytes()).unwrap();
    creation.run(&mut Work::new(&mut |_, _| true)).unwrap();
}

/// Longer names than ours are read: what is passed over loses its blocks.
#[test]
fn long_names_of_others_keep_their_blocks() {
    let mut volume = volume(35, 4);
    volume.push("two", 0, b"two");
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    create(&store, "backup-2", &volume.get("two")).unwrap();
    let long = "x".repeat(240);
    let facts = objects.get(&format!("{BACKUPS}/backup_backup-1.cfg"), 1 << 20).unwrap();
    objects.put(&format!("{BACKUPS}/backup_{long}.cfg"), &facts).unwrap();
    remove(&store, "backup-1").unwrap();
    let content = volume.get("one").content();
    let disk = Disk::new(vec![0; content.len()]);
    restore(&store, &long, &disk, Onto::Empty).unwrap();
    assert!(disk.content() == content);
    let source = volume.get("one");
    let error = store.create(&source, options(&"x".repeat(201), "one")).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

/// What a volume is based on does not change by a backup of another volume of the name.
#[test]
fn the_backing_image_of_a_volume_stays() {
    let volume = volume(36, 3);
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let source = volume.get("one");
    let on = |backup: &str, image: &str| {
        let options =
            CreateOptions { backing_image_name: image.to_owned(), ..options(backup, "one") };
        store.create(&source, options).and_then(|c| c.run(&mut Work::new(&mut |_, _| true)))
    };
    on("backup-1", "img").unwrap();
    let error = on("backup-2", "").unwrap_err();
    assert!(error.to_string().contains("backing image `img`"), "{error}");
    assert_eq!(on("backup-2", "other").unwrap_err().kind(), ErrorKind::Invalid);
    on("backup-2", "img").unwrap();
    assert_eq!(store.volume(VOLUME).unwrap().backing_image_name, "img");
}

/// A deletion of a volume ends when its lock is out of date, and when its caller wants it.
#[test]
fn a_deletion_of_a_volume_ends() {
    let volume = volume(37, 8);
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let blocks = || objects.paths().iter().filter(|path| path.ends_with(".blk")).count();
    let before = blocks();
    let error = store.remove_volume(VOLUME, &mut Work::new(&mut |_, _| false)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    assert_eq!(blocks(), before);
    remove_volume(&store, VOLUME).unwrap();
    assert!(objects.paths().is_empty());
}
