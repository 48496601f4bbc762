//! Damaged and hostile content of a backup store: an error that names it, or nothing that matters; never a panic, and
//! never wrong data.

use crate::support::*;
use dbs_backup::objects::Directory;
use dbs_backup::{BackupStore, Onto, Work};
use dbs_core::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn every_byte_of_the_facts() {
    let volume = volume(11, 2);
    let content = volume.get("one").content().to_vec();
    for part in ["volume.cfg", "backup_backup-1.cfg"] {
        let objects = Arc::new(Memory::default());
        let store = store(&objects);
        create(&store, "backup-1", &volume.get("one")).unwrap();
        let facts = store.backup(VOLUME, "backup-1").unwrap();
        let mut length = 0;
        objects.edit(part, |content| length = content.len());
        for at in 0..length {
            let mut good = Vec::new();
            for change in [0, 0xff, b'0', b'"', b'9'] {
                objects.edit(part, |content| {
                    good.clone_from(content);
                    content[at] = change;
                });
                let disk = Disk::new(vec![0; content.len()]);
                match restore(&store, "backup-1", &disk, Onto::Empty) {
                    // Places that are others cannot be told from true ones: there is no checksum of the facts.
                    Ok(_) => {
                        let blocks = store.backup(VOLUME, "backup-1").unwrap().blocks;
                        assert_eq!(blocks.len(), facts.blocks.len(), "{part} {at} {change}");
                        let is_right = disk.content() == content;
                        assert_eq!(is_right, blocks == facts.blocks, "{part} {at} {change}");
                    }
                    Err(error) => assert!(
                        matches!(
                            error.kind(),
                            ErrorKind::Corrupt
                                | ErrorKind::NotFound
                                | ErrorKind::Unsupported
                                | ErrorKind::Busy
                                | ErrorKind::Invalid
                        ) && !error.to_string().is_empty(),
                        "{part} {at} {change}: {error}"
                    ),
                }
                objects.edit(part, |content| content.clone_from(&good));
            }
            objects.edit(part, |content| content.truncate(at));
            assert!(restore(&store, "backup-1", &Disk::new(content.clone()), Onto::Empty).is_err());
            objects.edit(part, |content| content.clone_from(&good));
        }
    }
}

#[test]
fn damaged_blocks_are_never_restored() {
    let volume = volume(12, 4);
    let content = volume.get("one").content();
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    for change in [
        (|content: &mut Vec<u8>| content.clear()) as fn(&mut Vec<u8>),
        |content| content.truncate(content.len() / 2),
        |content| content.truncate(content.len() - 5),
        |content| content.extend([0; 1 << 16]),
        |content| content.fill(0),
        |content| *content = vec![0xff; 100],
    ] {
        let mut good = Vec::new();
        assert!(
            objects.edit(".blk", |content| {
                good.push(content.clone());
            }) > 0
        );
        objects.edit(".blk", change);
        let disk = Disk::new(vec![0; content.len()]);
        if restore(&store, "backup-1", &disk, Onto::Empty).is_ok() {
            assert!(disk.content() == content);
        }
        let verified =
            store.verify(VOLUME, "backup-1", true, &mut Work::new(&mut |_, _| true)).unwrap();
        let restored = restore(&store, "backup-1", &disk, Onto::Empty);
        assert_eq!(verified.bad.is_empty(), restored.is_ok());
        if let Err(error) = restored {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        }
        let mut back = good.into_iter();
        objects.edit(".blk", |content| *content = back.next().unwrap());
    }
}

/// Where that is wanted, they hold up no others, and are an error at the end.
#[test]
fn a_restore_goes_past_what_is_damaged() {
    let volume = volume(12, 9);
    let content = volume.get("one").content();
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let blocks = store.backup(VOLUME, "backup-1").unwrap().blocks;
    let bad = [blocks[0], blocks[4]];
    objects.edit(&bad[0].name.to_string(), |content| content.truncate(3));
    for count in [1, 2] {
        for onto in [Onto::Empty, Onto::Anything] {
            let before = if onto == Onto::Empty { 0 } else { 9 };
            let disk = Disk::new(vec![before; content.len()]);
            let restoration = store.restore(VOLUME, "backup-1").unwrap().past_damage();
            let error = restoration
                .run(&disk, onto, &mut Work { workers: 1, ..Work::new(&mut |_, _| true) })
                .unwrap_err();
            let text = error.to_string();
            assert!(is_damage(error.kind()) && text.contains(&bad[0].name.to_string()), "{text}");
            assert_eq!(text.contains("all but 2 blocks"), count == 2, "{text}");
            let mut expected = content.to_vec();
            for block in &bad[..count] {
                let end = expected.len().min((block.offset + BLOCK) as usize);
                expected[block.offset as usize..end].fill(before);
            }
            assert!(disk.content() == expected, "{count} {onto:?}");
        }
        objects.delete(&bad[1].name.to_string());
    }
}

fn is_damage(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Corrupt | ErrorKind::NotFound)
}

/// A backup whose facts cannot be read can be deleted, and stops the collection until it is.
#[test]
fn corrupt_facts_are_deleted() {
    let mut volume = volume(13, 4);
    volume.push("two", 0, b"two");
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    create(&store, "backup-2", &volume.get("two")).unwrap();
    objects.edit("backup_backup-1.cfg", |content| *content = b"{corrupt: definitely".to_vec());
    let error = store.backup(VOLUME, "backup-1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let kept = remove(&store, "backup-2").unwrap().kept.unwrap();
    assert!(kept.contains("Delete backup backup-1"), "{kept}");
    let removed = remove(&store, "backup-1").unwrap();
    assert_eq!((removed.blocks, removed.blocks_left), (4, 0));
    // Without the facts of the volume.
    create(&store, "backup-3", &volume.get("two")).unwrap();
    objects.delete("volume.cfg");
    let error = remove(&store, "backup-3").unwrap_err();
    assert!(error.to_string().starts_with("cannot find volume in backupstore: cannot find "));
    assert_eq!(store.volumes().unwrap(), [VOLUME]);
    remove_volume(&store, VOLUME).unwrap();
    assert!(store.volumes().unwrap().is_empty() && objects.paths().is_empty());
}

/// What has no blocks for another reason than that it is empty is not restored as zeros.
#[test]
fn a_single_file_is_refused() {
    let volume = volume(14, 2);
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    objects.edit("backup_backup-1.cfg", |content| {
        let text = String::from_utf8(content.clone()).unwrap();
        *content = text.replace("\"FilePath\":\"\"", "\"FilePath\":\"x.bak\"").into_bytes();
    });
    let error = restore(&store, "backup-1", &Disk::new(Vec::new()), Onto::Empty).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

/// Texts of a backup store do not move the cursor of who reads an error.
#[test]
fn errors_are_plain() {
    let objects = Arc::new(Memory::default());
    let store = store(&objects);
    create(&store, "backup-1", &volume(15, 1).get("one")).unwrap();
    for text in [r#"{"Size":"\u001b[2J"}"#, r#"{"CompressionMethod":"\u001b[2J"}"#] {
        objects.edit("backup_backup-1.cfg", |content| *content = text.as_bytes().to_vec());
        let backup = store.backup(VOLUME, "backup-1");
        let error = backup.and_then(|backup| backup.method()).unwrap_err().to_string();
        assert!(error.contains("[2J") && !error.contains('\u{1b}'), "{error}");
    }
}

#[test]
fn names_that_leave_the_store() {
    let store = store(&Arc::new(Memory::default()));
    for name in ["../../etc", "", "a/b", ".", "x"] {
        assert_eq!(store.volume(name).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(store.backup(VOLUME, name).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(remove_volume(&store, name).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

/// Found by review: whoever opened a FIFO waited for somebody to write into it, and a folder in the place of a lock
/// stopped everything.
#[test]
fn what_is_no_file_stops_nothing() {
    let root = tempfile::tempdir().unwrap();
    let store = BackupStore::on(&url(), Arc::new(Directory::open(root.path()).unwrap()));
    let (store, volume) = (store.without_waiting(), volume(13, 2));
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let folder = root.path().join("backupstore/volumes/5e/23/vol-1");
    std::fs::create_dir_all(folder.join("locks/folder.lck/inner")).unwrap();
    let fifo = |path: &str| {
        let path = folder.join(path);
        let _ = std::fs::remove_file(&path);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    };
    fifo("locks/fifo.lck");
    let begun = Instant::now();
    create(&store, "backup-2", &volume.get("one")).unwrap();
    let disk = Disk::new(vec![0; volume.get("one").content().len()]);
    restore(&store, "backup-2", &disk, Onto::Empty).unwrap();
    remove(&store, "backup-2").unwrap();
    fifo("backups/backup_backup-1.cfg");
    let error = store.backup(VOLUME, "backup-1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("is no file"), "{error}");
    fifo("volume.cfg");
    assert_eq!(store.volume(VOLUME).unwrap_err().kind(), ErrorKind::NotFound);
    // It is written anew.
    create(&store, "backup-3", &volume.get("one")).unwrap();
    restore(&store, "backup-3", &disk, Onto::Empty).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(60), "somebody waited");
}
