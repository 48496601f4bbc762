//! Reading parts of backups, and looking at many.

use crate::support::*;
use dbs_backup::catalog::{Catalog, Listed};
use dbs_backup::read::{OpenBackup, Piece, Place, ReadOptions, Reader};
use dbs_core::{ErrorKind, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Objects with backups `backup-1` and `backup-2` of a volume of 20 blocks and a half.
fn backups() -> (Arc<Memory>, Snapshots) {
    let objects = Arc::new(Memory::default());
    let mut volume = volume(30, 20);
    create(&store(&objects), "backup-1", &volume.get("one")).unwrap();
    volume.push("two", 5 * BLOCK, &[7; 100]);
    create(&store(&objects), "backup-2", &volume.get("two")).unwrap();
    (objects, volume)
}

fn reader(objects: &Arc<Memory>, options: ReadOptions) -> Reader {
    Reader::start(store(objects), options).unwrap()
}

/// Without threads that come before, so that calls can be counted.
fn alone() -> ReadOptions {
    ReadOptions { cache: 0, ..ReadOptions::default() }
}

fn read(reader: &Reader, backup: &Arc<OpenBackup>, offset: u64, length: usize) -> Result<Vec<u8>> {
    read_from(reader, backup, &Place::default(), offset, length)
}

fn read_from(
    reader: &Reader,
    backup: &Arc<OpenBackup>,
    place: &Place,
    offset: u64,
    length: usize,
) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < length {
        match reader.read(backup, place, offset + bytes.len() as u64, length - bytes.len())? {
            Piece::Data(content, range) => bytes.extend_from_slice(&content[range]),
            Piece::Zeros(0) => break,
            Piece::Zeros(count) => bytes.resize(bytes.len() + count, 0),
        }
    }
    Ok(bytes)
}

/// The content of a snapshot, to the end of its last block.
fn content(volume: &Snapshots, snapshot: &str) -> Vec<u8> {
    let mut content = volume.get(snapshot).content().to_vec();
    content.resize(content.len().next_multiple_of(BLOCK as usize), 0);
    content
}

#[test]
fn what_is_read_is_what_was_backed_up() {
    let (objects, volume) = backups();
    for cache in [0, 4 * BLOCK, 1 << 20] {
        let reader = reader(&objects, ReadOptions { cache, parallel: 3, ..Default::default() });
        for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two")] {
            let wanted = content(&volume, snapshot);
            let open = reader.open(VOLUME, backup).unwrap();
            assert_eq!(open.size(), wanted.len() as u64);
            assert!(read(&reader, &open, 0, wanted.len() + 100).unwrap() == wanted);
            assert!(read(&reader, &open, open.size() + 5, 10).unwrap().is_empty());
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (reader, open, wanted) = (&reader, &open, &wanted);
                    scope.spawn(move || {
                        let mut random = fastrand::Rng::with_seed(thread);
                        let place = Place::default();
                        for _ in 0..300 {
                            let at = random.usize(..wanted.len());
                            let length = random.usize(..3 * BLOCK as usize).min(wanted.len() - at);
                            let found = read_from(reader, open, &place, at as u64, length).unwrap();
                            assert!(found == wanted[at..at + length], "{at} {length}");
                        }
                    });
                }
            });
            // Data and holes take turns.
            let next = |at, data| open.next(at, data) / BLOCK;
            assert_eq!((next(0, true), next(0, false), next(BLOCK, true)), (0, 1, 2));
        }
    }
}

#[test]
fn blocks_stay_in_memory_and_come_before_they_are_needed() {
    let (objects, volume) = backups();
    let wanted = content(&volume, "one");
    let reader = reader(&objects, ReadOptions::default());
    let open = reader.open(VOLUME, "backup-1").unwrap();
    let before = objects.calls();
    for _ in 0..3 {
        assert!(read(&reader, &open, 0, wanted.len()).unwrap() == wanted);
    }
    assert_eq!(objects.calls() - before, open.config().blocks.len() as u64);
    // All others are there but the one block that differs.
    let second = reader.open(VOLUME, "backup-2").unwrap();
    let before = objects.calls();
    assert!(read(&reader, &second, 0, wanted.len()).unwrap() == content(&volume, "two"));
    assert_eq!(objects.calls() - before, 1);

    // Two blocks, in order: the next ones are fetched, and not all.
    let reader = self::reader(&objects, ReadOptions { parallel: 2, ..Default::default() });
    let open = reader.open(VOLUME, "backup-1").unwrap();
    let (before, place) = (objects.calls(), Place::default());
    for block in [0, 2] {
        read_from(&reader, &open, &place, block * BLOCK, BLOCK as usize).unwrap();
    }
    let begun = Instant::now();
    while objects.calls() - before < 6 {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing comes before it is needed");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(objects.calls() - before, 6);
}

/// Never a zero in the place of damaged data; and what is mended is read.
#[test]
fn damage_is_an_error_that_names_it() {
    let (objects, volume) = backups();
    let reader = reader(&objects, alone());
    let open = reader.open(VOLUME, "backup-1").unwrap();
    let block = open.config().blocks[3];
    let name = block.name.to_string();
    let mut before = Vec::new();
    objects.edit(&name, |content| {
        before.clone_from(content);
        content[9] ^= 1;
    });
    let error = read(&reader, &open, block.offset + 5, 10).unwrap_err();
    let place = format!("block {name} at {} of backup backup-1 of volume {VOLUME}", block.offset);
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().starts_with(&place), "{error}");
    // A read that only ends there fails, too; others do not.
    assert!(read(&reader, &open, block.offset - 10, 20).is_err());
    assert_eq!(read(&reader, &open, block.offset - 10, 10).unwrap(), [0; 10]);
    objects.edit(&name, |content| content.clone_from(&before));
    let wanted = content(&volume, "one");
    assert!(read(&reader, &open, 0, wanted.len()).unwrap() == wanted);

    objects.delete(&name);
    let error = read(&reader, &open, block.offset, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("cannot find"), "{error}");
}

#[test]
fn a_store_that_goes_away_and_comes_back() {
    let (objects, volume) = backups();
    let reader = reader(&objects, alone());
    let open = reader.open(VOLUME, "backup-2").unwrap();
    objects.set_fault(Some((0, Fault::Cut)));
    assert_eq!(read(&reader, &open, 0, 10).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(reader.open(VOLUME, "backup-1").map(drop).unwrap_err().kind(), ErrorKind::Io);
    objects.set_fault(None);
    let wanted = content(&volume, "two");
    assert!(read(&reader, &open, 0, wanted.len()).unwrap() == wanted);
    reader.open(VOLUME, "backup-1").unwrap();
}

/// Found by trying: a file of Python that was closed kept its backup from being deleted for a moment, as a block that was read
/// ahead had it.
#[test]
fn what_is_let_go_of_is_deleted_whatever_is_read_ahead() {
    let (objects, _) = backups();
    let one = reader(&objects, ReadOptions::default());
    let backup = one.open(VOLUME, "backup-1").unwrap();
    let ahead = Arc::clone(&backup);
    assert_eq!(remove(&store(&objects), "backup-1").unwrap_err().kind(), ErrorKind::Busy);
    backup.release();
    remove(&store(&objects), "backup-1").unwrap();
    drop((backup, ahead));
}

#[test]
fn what_is_open_is_not_deleted() {
    let (objects, volume) = backups();
    let one = reader(&objects, alone());
    let first = one.open(VOLUME, "backup-1").unwrap();
    let again = one.open(VOLUME, "backup-2").unwrap();
    let locks = || objects.paths().iter().filter(|path| path.ends_with(".lck")).count();
    assert_eq!(locks(), 1, "one lock for all that is open of a volume");
    assert_eq!(remove(&store(&objects), "backup-1").unwrap_err().kind(), ErrorKind::Busy);
    create(&store(&objects), "backup-3", &volume.get("one")).unwrap();
    drop(first);
    assert_eq!(remove(&store(&objects), "backup-1").unwrap_err().kind(), ErrorKind::Busy);
    drop(again);
    assert_eq!(locks(), 0);

    // Without a lock it is deleted, and that is noticed: also if another one has its name.
    let free = reader(&objects, ReadOptions { lock: false, ..alone() });
    let open = free.open(VOLUME, "backup-2").unwrap();
    assert_eq!(locks(), 0);
    let block = open.config().blocks.iter().find(|block| block.offset == 4 * BLOCK).unwrap();
    read(&free, &open, block.offset, 1).unwrap();
    remove(&store(&objects), "backup-2").unwrap();
    // Others need most of the blocks.
    read(&free, &open, 0, 10).unwrap();
    let changed = 5 * BLOCK;
    let gone = || read(&free, &open, changed, 1).unwrap_err();
    assert_eq!(gone().kind(), ErrorKind::NotFound, "{}", gone());
    std::thread::sleep(Duration::from_millis(2));
    create(&store(&objects), "backup-2", &volume.get("one")).unwrap();
    assert_eq!(gone().kind(), ErrorKind::NotFound, "{}", gone());

    // While somebody deletes, nothing is opened.
    objects.edit("nothing", |_| ());
    let lock = format!("{}/locks/lock_other.lck", folder(&objects));
    put(&objects, &lock, r#"{"Name":"lock_other","Type":2,"Acquired":true}"#);
    assert_eq!(one.open(VOLUME, "backup-3").map(drop).unwrap_err().kind(), ErrorKind::Busy);
}

fn folder(objects: &Memory) -> String {
    let config = objects.paths().into_iter().find(|path| path.ends_with("volume.cfg")).unwrap();
    config.trim_end_matches("/volume.cfg").to_owned()
}

fn put(objects: &Arc<Memory>, path: &str, text: &str) {
    use dbs_backup::objects::Objects;
    objects.put(path, text.as_bytes()).unwrap();
}

#[test]
fn what_cannot_be_opened() {
    let (objects, _) = backups();
    let reader = reader(&objects, alone());
    let kind = |volume: &str, backup: &str| {
        let error = reader.open(volume, backup).map(drop).unwrap_err();
        assert!(!objects.paths().iter().any(|path| path.ends_with(".lck")), "a lock stays");
        error.kind()
    };
    assert_eq!(kind(VOLUME, "backup-9"), ErrorKind::NotFound);
    assert_eq!(kind("other", "backup-1"), ErrorKind::NotFound);
    assert_eq!(kind("../x", "backup-1"), ErrorKind::Invalid);
    let edit = |part: &str, from: &str, to: &str| {
        let edited = objects.edit(part, |content| {
            let text = String::from_utf8(content.clone()).unwrap();
            assert!(text.contains(from), "{text}");
            *content = text.replace(from, to).into_bytes();
        });
        assert_eq!(edited, 1);
    };
    // Data behind the end of the volume, and no size at all.
    edit("backup_backup-1", r#""Labels":{}"#, r#""Labels":{"dbs-volume-size":"8192"}"#);
    assert_eq!(kind(VOLUME, "backup-1"), ErrorKind::Corrupt);
    edit("backup_backup-1", r#""8192""#, r#""x""#);
    assert_eq!(kind(VOLUME, "backup-1"), ErrorKind::Corrupt);
    edit("backup_backup-2", r#""CreatedTime":"20"#, r#""CreatedTime":"","x":"20"#);
    assert_eq!(kind(VOLUME, "backup-2"), ErrorKind::Busy);
    // What is not in blocks is not zeros.
    edit("volume.cfg", r#""BackingImageName":"\"\"""#, r#""BackingImageName":"\"image\"""#);
    assert_eq!(kind(VOLUME, "backup-2"), ErrorKind::Busy);
    edit("backup_backup-2", r#""CreatedTime":"","x":"20"#, r#""CreatedTime":"20"#);
    assert_eq!(kind(VOLUME, "backup-2"), ErrorKind::Unsupported);
    objects.edit("volume.cfg", |content| content.clear());
    assert_eq!(kind(VOLUME, "backup-2"), ErrorKind::Corrupt);
}

#[test]
fn facts_are_read_once() {
    let (objects, _) = backups();
    let folder = folder(&objects);
    let text = |name: &str| {
        format!(
            r#"{{"Name":"{name}","SnapshotCreatedAt":"2026-11-24T03:00:00Z","CreatedTime":"2026-11-24T03:05:00Z","Labels":{{"dbs-snapshot-created":"2026-11-20T00:00:00Z"}}}}"#
        )
    };
    for number in 0..500 {
        let name = format!("night-{number}");
        put(&objects, &format!("{folder}/backups/backup_{name}.cfg"), &text(&name));
    }
    put(&objects, &format!("{folder}/backups/backup_bad.cfg"), "{");
    put(&objects, &format!("{folder}/backups/backup_begun.cfg"), r#"{"CreatedTime":""}"#);
    let catalog = Catalog::new(store(&objects));
    let found = catalog.backups(VOLUME).unwrap();
    assert_eq!((found.complete.len(), found.problems.len()), (502, 1));
    assert!(found.problems[0].to_string().contains("backup_bad.cfg"), "{:?}", found.problems);
    // By the time of the snapshot, not by that of the backup.
    let first = &found.complete[0];
    assert_eq!(first.stem(), "2026-11-20T00-00-00Z_night-0");
    assert_eq!(Listed::backup_of(&first.stem()), Some("night-0"));
    let before = objects.calls();
    assert_eq!(catalog.backups(VOLUME).unwrap().complete.len(), 502);
    assert_eq!(
        objects.calls() - before,
        4,
        "the volume, the list, and the two that are not complete"
    );
    assert_eq!(catalog.backup(VOLUME, "night-7").unwrap().unwrap().backup, "night-7");
    assert_eq!(objects.calls() - before, 4);
    // What is deleted goes; what is new comes.
    objects.delete("backup_night-7.cfg");
    put(&objects, &format!("{folder}/backups/backup_new.cfg"), &text("new"));
    let names = |found: dbs_backup::catalog::Backups| {
        found.complete.iter().map(|listed| listed.backup.clone()).collect::<Vec<_>>()
    };
    let names = names(catalog.backups(VOLUME).unwrap());
    assert!(!names.contains(&"night-7".to_owned()) && names.contains(&"new".to_owned()));
    assert!(catalog.backup(VOLUME, "begun").unwrap().is_none());
    assert!(catalog.backup(VOLUME, "none").unwrap().is_none());
    assert_eq!(catalog.volumes().unwrap(), [VOLUME]);
    assert!(catalog.has_volume(VOLUME).unwrap() && !catalog.has_volume("other").unwrap());
    // Of large facts the start is enough, if it says how large the volume is; else they are read as a whole.
    let blocks: Vec<_> = (0..1000)
        .map(|number| {
            format!(r#"{{"Offset":{},"BlockChecksum":"{:064}"}}"#, number * BLOCK, number)
        })
        .collect();
    for (name, label) in [("large", "dbs-volume-size"), ("other", "x")] {
        let text = format!(
            r#"{{"Name":"{name}","CreatedTime":"t","Size":"{}","Labels":{{"{label}":"8191999"}},"Parameters":{{"backup-block-size":"{BLOCK}"}},"Blocks":[{}]}}"#,
            1000 * BLOCK,
            blocks.join(",")
        );
        put(&objects, &format!("{folder}/backups/backup_{name}.cfg"), &text);
        let before = objects.read.load(std::sync::atomic::Ordering::SeqCst);
        let calls = objects.calls();
        let listed = catalog.backup(VOLUME, name).unwrap().unwrap();
        let read = objects.read.load(std::sync::atomic::Ordering::SeqCst) - before;
        let wanted = if label == "x" { (8_192_000, 3) } else { (8_191_999, 2) };
        assert_eq!((listed.size, objects.calls() - calls), wanted, "{name}");
        assert_eq!((listed.data, read), (1000 * BLOCK, 16 << 10));
        objects.delete(&format!("backup_{name}.cfg"));
    }
    // A store that does not answer is no store without backups, and the next look finds it again.
    objects.set_fault(Some((3, Fault::Cut)));
    let again = Catalog::new(store(&objects));
    assert_eq!(again.backups(VOLUME).map(drop).unwrap_err().kind(), ErrorKind::Io);
    objects.set_fault(None);
    assert_eq!(again.backups(VOLUME).unwrap().complete.len(), 502);
}
