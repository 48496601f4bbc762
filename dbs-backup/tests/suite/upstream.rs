//! Against what upstream's own code has written, and what it reads. `tests/fixtures` was made by upstream's library
//! (longhorn/backupstore, commit `ab5179e`) through `scripts/upstream-backup.go`, for the content that [`content`] makes.
//! With `BACKUPSTORE_BIN=/path/to/that/program` the same is done with the program itself, in both directions.

use crate::support::*;
use dbs_backup::codec::Method;
use dbs_backup::objects::{Directory, Objects};
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, CreateOptions, Onto, Work};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

const METHODS: [Method; 3] = [Method::None, Method::Lz4, Method::Gzip];

/// Two snapshots of six blocks.
fn content() -> Snapshots {
    let one = |seed: u32| {
        let mut all = Vec::new();
        let mut random = seed;
        for block in 0..6_u64 {
            all.extend((0..BLOCK).map(|at| match block {
                2 => 0,
                4 => {
                    random = random.wrapping_mul(1_103_515_245).wrapping_add(12345) & 0x7fff_ffff;
                    (random >> 16) as u8
                }
                _ => (block * 7 + at / 64) as u8,
            }));
        }
        all
    };
    let (first, mut second) = (one(12345), one(12346));
    second[5..12].copy_from_slice(b"changed");
    second[3 * BLOCK as usize..4 * BLOCK as usize].fill(0);
    Snapshots(vec![("one".to_owned(), first), ("two".to_owned(), second)])
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (entry, target) =
            (entry.as_ref().unwrap(), to.join(entry.as_ref().unwrap().file_name()));
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn open(root: &Path) -> BackupStore {
    let url = Url::parse(&format!("vfs://{}", root.display())).unwrap();
    BackupStore::on(&url, Arc::new(Directory::open(root).unwrap())).without_waiting()
}

fn restores(store: &BackupStore, backup: &str, content: &[u8]) {
    let disk = Disk::new(vec![0; content.len()]);
    restore(store, backup, &disk, Onto::Empty).unwrap();
    assert!(disk.content() == content, "{backup}");
}

#[test]
fn what_upstream_has_written() {
    let volume = content();
    for method in METHODS {
        let root = tempfile::tempdir().unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        copy(&fixtures.join(method.name()), root.path());
        let store = open(root.path());
        assert_eq!(store.volumes().unwrap(), [VOLUME]);
        assert_eq!(store.backups(VOLUME).unwrap(), ["backup-1", "backup-2"]);
        let config = store.volume(VOLUME).unwrap();
        assert_eq!((config.size, config.block_count), (6 * BLOCK, 8));
        assert_eq!((config.method().unwrap(), &*config.data_engine), (method, "v1"));
        for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two")] {
            restores(&store, backup, volume.get(snapshot).content());
            let mut progress = |_, _| true;
            let verified =
                store.verify(VOLUME, backup, true, &mut Work::new(&mut progress)).unwrap();
            assert_eq!((verified.blocks, verified.bad), (5, vec![]));
        }
        // The next one builds on what upstream has made, and shares its blocks.
        let mut next = volume.clone();
        next.push("three", 5 * BLOCK, b"three");
        let created = create(&store, "backup-3", &next.get("three")).unwrap();
        assert_eq!((created.base.as_deref(), created.read), (Some("backup-2"), BLOCK));
        restores(&store, "backup-3", next.get("three").content());
        for backup in ["backup-2", "backup-1"] {
            remove(&store, backup).unwrap();
            restores(&store, "backup-3", next.get("three").content());
        }
        assert_eq!(remove(&store, "backup-3").unwrap().blocks_left, 0);
    }
}

/// The facts are the same bytes again, so that nothing of what upstream has written is lost.
#[test]
fn facts_are_the_same_bytes_again() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for method in METHODS {
        let objects = Directory::open(&fixtures.join(method.name())).unwrap();
        let mut files = 0;
        objects
            .walk("backupstore", &mut |path, _| {
                if !path.ends_with(".cfg") {
                    return Ok(());
                }
                files += 1;
                let bytes = objects.get(&format!("backupstore/{path}"), 1 << 20).unwrap();
                let (again, there) = dbs_backup::config::again(path, &bytes)?;
                assert_eq!(String::from_utf8(again).unwrap(), String::from_utf8(there).unwrap());
                Ok(())
            })
            .unwrap();
        assert_eq!(files, 3);
    }
    // What later versions put into the facts of a volume stays.
    let bytes = br#"{"Name":"vol-1","Size":"2097152","Later":{"Key":[1,"\u003c"]}}"#;
    let (again, _) = dbs_backup::config::again("volume.cfg", bytes).unwrap();
    let again = String::from_utf8(again).unwrap();
    assert!(again.contains(r#""Later":{"Key":[1,"\u003c"]}"#), "{again}");
}

/// Runs upstream's program; none if there is none.
fn upstream(arguments: &[&str]) -> Option<String> {
    let Some(program) = std::env::var_os("BACKUPSTORE_BIN") else {
        println!("SKIPPED: no BACKUPSTORE_BIN");
        return None;
    };
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{arguments:?}: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(text)
}

#[test]
fn both_directions() {
    let (root, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut volume = content();
    volume.push("three", 2 * BLOCK, b"three");
    let file = |name: &str| -> PathBuf { files.path().join(name) };
    for (name, content) in &volume.0 {
        fs::write(file(name), content).unwrap();
    }
    for method in METHODS {
        let root = root.path().join(method.name());
        fs::create_dir(&root).unwrap();
        let store = open(&root);
        let destination = format!("vfs://{}", root.display());
        let source = volume.get("one");
        let options = CreateOptions { method, ..options("backup-1", "one") };
        store.create(&source, options).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
        let (snapshots, size) = (files.path().to_str().unwrap(), BLOCK.to_string());
        // Upstream's increment on ours, ours on upstream's.
        let created = [
            "create",
            &destination,
            VOLUME,
            snapshots,
            "two",
            "lz4",
            "incremental",
            &size,
            "backup-2",
        ];
        let Some(said) = upstream(&created) else { return };
        assert!(said.starts_with("incremental true"), "{said}");
        create(&store, "backup-3", &volume.get("three")).unwrap();
        assert!(store.backup(VOLUME, "backup-3").unwrap().is_incremental);
        for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two"), ("backup-3", "three")]
        {
            let content = volume.get(snapshot).content();
            restores(&store, backup, content);
            let restored = file("restored");
            let _ = fs::remove_file(&restored);
            let url = format!("{destination}?backup={backup}&volume={VOLUME}");
            upstream(&["restore", &url, restored.to_str().unwrap()]);
            assert!(fs::read(&restored).unwrap() == content, "{backup} by upstream");
            let said = upstream(&["inspect", &url]).unwrap();
            assert!(said.contains(&format!("\"SnapshotName\": \"{snapshot}\"")), "{said}");
        }
        // Each deletes what the other has made, and collects its blocks.
        upstream(&["rm", &format!("{destination}?backup=backup-1&volume={VOLUME}")]);
        remove(&store, "backup-2").unwrap();
        restores(&store, "backup-3", volume.get("three").content());
        upstream(&["rm", &format!("{destination}?backup=backup-3&volume={VOLUME}")]);
        let mut left = 0;
        store_blocks(&root, &mut left);
        assert_eq!(left, 0);
    }
}

fn store_blocks(root: &Path, count: &mut usize) {
    let objects = Directory::open(root).unwrap();
    let walked = objects.walk("backupstore", &mut |path, _| {
        *count += usize::from(path.ends_with(".blk"));
        Ok(())
    });
    walked.unwrap();
}
