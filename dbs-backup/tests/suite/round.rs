//! What is backed up is restored.

use crate::support::*;
use dbs_backup::codec::Method;
use dbs_backup::objects::Directory;
use dbs_backup::{BackupStore, CreateOptions, Judged, Onto, Retention, Work};
use dbs_core::ErrorKind;
use std::num::NonZeroU64;
use std::sync::Arc;

fn check(store: &BackupStore, backup: &str, content: &[u8]) {
    let disk = Disk::new(vec![0; content.len()]);
    restore(store, backup, &disk, Onto::Empty).unwrap();
    assert!(disk.content() == content, "{backup}");
    let mut progress = |_, _| true;
    let verified = store.verify(VOLUME, backup, true, &mut Work::new(&mut progress)).unwrap();
    assert_eq!(verified.bad, []);
}

#[test]
fn full_and_incremental_with_every_method() {
    for method in [Method::None, Method::Lz4, Method::Gzip] {
        let root = tempfile::tempdir().unwrap();
        let objects = Arc::new(Directory::open(root.path()).unwrap());
        let store = BackupStore::on(&url(), objects).without_waiting();
        let mut volume = volume(1, 10);
        volume.push("two", 3 * BLOCK + 5, b"changed");
        volume.push("three", 4 * BLOCK, &[0; BLOCK as usize]);
        for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two"), ("backup-3", "three")]
        {
            let source = volume.get(snapshot);
            let options = CreateOptions { method, ..options(backup, snapshot) };
            let creation = store.create(&source, options).unwrap();
            assert_eq!(creation.is_incremental(), snapshot != "one");
            let created = creation.run(&mut Work::new(&mut |_, _| true)).unwrap();
            let read = *source.read.lock().unwrap();
            if snapshot != "one" {
                assert_eq!(
                    read,
                    BLOCK + BLOCK / 2,
                    "what changed, and the last block, which is half one"
                );
            }
            assert_eq!(created.size % BLOCK, 0);
        }
        for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two"), ("backup-3", "three")]
        {
            check(&store, backup, volume.get(snapshot).content());
        }
        let (first, third) =
            (store.backup(VOLUME, "backup-1").unwrap(), store.backup(VOLUME, "backup-3").unwrap());
        assert_eq!(first.blocks.len(), 6, "blocks of zeros are not kept");
        assert_eq!(third.blocks.len(), 6, "a block that became zeros is left out");
        let config = store.volume(VOLUME).unwrap();
        assert_eq!((&*config.last_backup_name, config.block_count), ("backup-3", 7));
        assert_eq!(store.volumes().unwrap(), [VOLUME]);
        assert_eq!(store.backups(VOLUME).unwrap(), ["backup-1", "backup-2", "backup-3"]);

        // Only one block of the first is used by nothing else.
        assert_eq!(remove(&store, "backup-1").unwrap().blocks, 0);
        assert_eq!(remove(&store, "backup-2").unwrap().blocks, 1);
        check(&store, "backup-3", volume.get("three").content());
        assert_eq!(remove(&store, "backup-3").unwrap().blocks, 6);
        remove_volume(&store, VOLUME).unwrap();
        remove_volume(&store, VOLUME).unwrap();
        let left = std::fs::read_dir(root.path().join("backupstore")).unwrap().count();
        assert_eq!(left, 0);
    }
}

#[test]
fn restores_onto_what_is_there() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let mut volume = volume(2, 8);
    volume.push("two", 0, &[7; 3 * BLOCK as usize]);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    create(&store, "backup-2", &volume.get("two")).unwrap();
    let (one, two) = (volume.get("one").content().to_vec(), volume.get("two").content().to_vec());
    // Differences, in both directions.
    let disk = Disk::new(one.clone());
    let moved = restore(&store, "backup-2", &disk, Onto::Backup("backup-1")).unwrap();
    assert!(disk.content() == two && moved.length == 3 * BLOCK);
    restore(&store, "backup-1", &disk, Onto::Backup("backup-2")).unwrap();
    assert!(disk.content() == one);
    // Anything at all; what is right is not downloaded.
    let disk = Disk::new(vec![9; one.len()]);
    assert!(restore(&store, "backup-1", &disk, Onto::Anything).unwrap().downloaded > 0);
    assert!(disk.content() == one);
    assert_eq!(restore(&store, "backup-1", &disk, Onto::Anything).unwrap().downloaded, 0);
    // Too small.
    let small = Disk::new(vec![0; BLOCK as usize]);
    assert_eq!(
        restore(&store, "backup-1", &small, Onto::Empty).unwrap_err().kind(),
        ErrorKind::Invalid
    );
}

#[test]
fn what_is_not_incremental() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let mut volume = volume(3, 4);
    volume.push("two", 0, b"two");
    let is_incremental = |snapshots: &Snapshots, backup: &str, snapshot: &str, full: bool| {
        let source = snapshots.get(snapshot);
        let options = CreateOptions { full, ..options(backup, snapshot) };
        let creation = store.create(&source, options).unwrap();
        let incremental = creation.is_incremental();
        let created = creation.run(&mut Work::new(&mut |_, _| true)).unwrap();
        check(&store, backup, source.content());
        (incremental, created.uploaded > 0)
    };
    assert_eq!(is_incremental(&volume, "backup-1", "one", false), (false, true));
    assert_eq!(is_incremental(&volume, "backup-2", "one", false), (false, false), "the same again");
    assert_eq!(is_incremental(&volume, "backup-3", "two", true), (false, true), "asked for");
    assert!(store.backup(VOLUME, "backup-3").unwrap().re_uploaded_data_size > 0);
    // The snapshot of the last backup is gone.
    let mut other = Snapshots(vec![volume.0[0].clone()]);
    other.push("three", 5, b"three");
    assert_eq!(is_incremental(&other, "backup-4", "three", false), (false, true));
    // The last backup is gone.
    remove(&store, "backup-4").unwrap();
    volume.push("four", 6, b"four");
    assert_eq!(is_incremental(&volume, "backup-5", "four", false), (true, true), "on backup-3");
    assert_eq!(store.volume(VOLUME).unwrap().last_backup_name, "backup-5");
    let exists = create(&store, "backup-5", &volume.get("one")).unwrap_err();
    assert_eq!(exists.kind(), ErrorKind::Exists);
}

/// What an earlier backup has lost is read from the snapshot again: no backup is made that cannot be restored.
#[test]
fn blocks_that_the_base_has_lost_are_written_again() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let mut volume = volume(4, 6);
    volume.push("two", BLOCK, b"two");
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let lost = store.backup(VOLUME, "backup-1").unwrap().blocks[1].name.to_string();
    assert_eq!(objects.delete(&lost), 1);
    let verify = |backup: &str, content| {
        store.verify(VOLUME, backup, content, &mut Work::new(&mut |_, _| true)).unwrap().bad
    };
    for content in [false, true] {
        let bad = verify("backup-1", content);
        assert_eq!((bad.len(), bad[0].offset, &bad[0].block), (1, 2 * BLOCK, &lost));
    }
    create(&store, "backup-2", &volume.get("two")).unwrap();
    check(&store, "backup-2", volume.get("two").content());
    assert_eq!(verify("backup-1", false), [], "the older one has it again, too");
}

#[test]
fn a_volume_that_shrinks_and_grows() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let mut volume = volume(5, 9);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let mut small = volume.0[0].1[..3 * BLOCK as usize].to_vec();
    small[0] ^= 1;
    volume.0.push(("two".to_owned(), small));
    create(&store, "backup-2", &volume.get("two")).unwrap();
    check(&store, "backup-2", volume.get("two").content());
    let mut large = volume.0[1].1.clone();
    large.resize(20 * BLOCK as usize, 3);
    volume.0.push(("three".to_owned(), large));
    create(&store, "backup-3", &volume.get("three")).unwrap();
    check(&store, "backup-3", volume.get("three").content());
    check(&store, "backup-1", volume.get("one").content());
}

/// Found by review: what a larger volume had in the last block, behind the end of the smaller one, was carried over.
#[test]
fn a_volume_that_shrinks_within_a_block_and_grows() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let mut volume = Snapshots(vec![("one".to_owned(), vec![7; 4 * BLOCK as usize])]);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let small = (2 * BLOCK + BLOCK / 2) as usize;
    volume.0.push(("two".to_owned(), vec![7; small]));
    let second = create(&store, "backup-2", &volume.get("two")).unwrap();
    assert_eq!((second.base.as_deref(), second.read), (Some("backup-1"), BLOCK));
    check(&store, "backup-2", volume.get("two").content());
    let mut large = vec![7; small];
    large.resize(4 * BLOCK as usize, 0);
    volume.0.push(("three".to_owned(), large));
    create(&store, "backup-3", &volume.get("three")).unwrap();
    check(&store, "backup-3", volume.get("three").content());
}

#[test]
fn a_stop_and_a_rate() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let volume = volume(6, 20);
    let source = volume.get("one");
    let creation = store.create(&source, options("backup-1", "one")).unwrap();
    let mut progress = |done, total| done * 2 < total;
    let mut work = Work { workers: 2, rate: NonZeroU64::new(1 << 30), progress: &mut progress };
    let error = creation.run(&mut work).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    assert!(store.backups(VOLUME).unwrap().is_empty());
    // It goes on where it was.
    let there = objects.paths().iter().filter(|path| path.contains(".blk")).count() as u64;
    assert!(there > 0);
    let created = create(&store, "backup-1", &source).unwrap();
    assert!(created.uploaded < created.size, "{created:?}");
    check(&store, "backup-1", source.content());
}

/// What no block holds shows the image; what a block holds hides it, zeros too.
#[test]
fn a_backing_image_shows_where_there_is_no_block() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    let mut content = vec![0; 4 * BLOCK as usize];
    content[BLOCK as usize..BLOCK as usize + 5].copy_from_slice(b"bytes");
    let volume = Snapshots(vec![("one".to_owned(), content.clone())]);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let disk = Disk::new(vec![7; content.len()]);
    restore(&store, "backup-1", &disk, Onto::Image).unwrap();
    let mut expected = vec![7; content.len()];
    let block = BLOCK as usize..2 * BLOCK as usize;
    expected[block.clone()].copy_from_slice(&content[block]);
    assert!(disk.content() == expected);
}

/// Found by review: with a clock that was behind, `prune` deleted the backup that had just been made.
#[test]
fn the_backup_that_was_completed_last_is_kept_whatever_its_time() {
    let objects = Arc::new(Memory::default());
    let (store, volume) = (store(&objects), volume(8, 4));
    for name in ["backup-1", "backup-2", "backup-3"] {
        create(&store, name, &volume.get("one")).unwrap();
    }
    let retention = Retention { last: 2, ..Retention::default() };
    let set_time = |name: &str, time: &str| {
        objects.edit(&format!("backup_{name}.cfg"), |content| {
            let mut facts: serde_json::Value = serde_json::from_slice(content).unwrap();
            facts["SnapshotCreatedAt"] = time.into();
            *content = facts.to_string().into_bytes();
        });
    };
    set_time("backup-1", "2026-11-01T00:00:00Z");
    set_time("backup-2", "2026-11-02T00:00:00Z");
    set_time("backup-3", "1970-01-01T00:00:07Z");
    let kept = |judged: &[Judged], name: &str| {
        judged.iter().find(|judged| judged.backup == name).unwrap().kept_by.clone()
    };
    let mut judged = store.judge(VOLUME, &retention).unwrap();
    assert_eq!(kept(&judged, "backup-3"), ["latest"]);
    let mut progress = |_, _| true;
    let pruned = store.prune(VOLUME, &retention, &mut judged, &mut Work::new(&mut progress));
    assert_eq!(pruned.unwrap(), None, "nothing is to be deleted");
    let retention = Retention { last: 1, ..Retention::default() };
    let mut judged = store.judge(VOLUME, &retention).unwrap();
    let pruned = store.prune(VOLUME, &retention, &mut judged, &mut Work::new(&mut progress));
    pruned.unwrap().unwrap();
    assert_eq!(store.backups(VOLUME).unwrap(), ["backup-2", "backup-3"]);
}
