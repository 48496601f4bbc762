//! What else Longhorn keeps in a backup store: images and its own settings.

use dbs_backup::names::BlockName;
use dbs_backup::objects::{Directory, Objects};
use dbs_backup::system::{SystemBackup, SystemConfig};
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Work};
use dbs_core::ErrorKind;
use std::path::Path;
use std::sync::Arc;

fn open(root: &Path) -> BackupStore {
    let url = Url::parse(&format!("vfs://{}", root.display())).unwrap();
    BackupStore::on(&url, Arc::new(Directory::open(root).unwrap())).without_waiting()
}

/// Facts of an image as upstream writes them, with the blocks of these contents.
fn image(root: &Path, name: &str, contents: &[&str], complete: &str) {
    let objects = Directory::open(root).unwrap();
    let mut blocks = Vec::new();
    for content in contents {
        let checksum = BlockName::of(content.as_bytes()).to_string();
        let path = format!("{}/{}/{checksum}.blk", &checksum[..2], &checksum[2..4]);
        objects
            .put(&format!("backupstore/backing-images/blocks/{path}"), content.as_bytes())
            .unwrap();
        blocks.push(format!(r#"{{"Offset":0,"BlockChecksum":"{checksum}"}}"#));
    }
    let facts = format!(
        r#"{{"Name":"{name}","Size":"4194304","BlockCount":"{}","Checksum":"c","Labels":{{"a":"b"}},"CompressionMethod":"lz4","CreatedTime":"t","CompleteTime":"{complete}","Secret":"","SecretNamespace":"","ProcessingBlocks":{{"Blocks":{{}}}},"Blocks":[{}]}}"#,
        contents.len(),
        blocks.join(",")
    );
    let path = format!("backupstore/backing-images/backing-images/{name}/backing-image.cfg");
    objects.put(&path, facts.as_bytes()).unwrap();
}

fn blocks(root: &Path) -> usize {
    let mut count = 0;
    let objects = Directory::open(root).unwrap();
    objects
        .walk("backupstore/backing-images/blocks", &mut |_, _| {
            count += 1;
            Ok(())
        })
        .unwrap();
    count
}

#[test]
fn images_share_blocks() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    assert_eq!(store.images().unwrap(), [""; 0]);
    image(root.path(), "one", &["a", "b"], "t");
    image(root.path(), "two", &["b", "c"], "t");
    image(root.path(), "three", &["d"], "");
    assert_eq!(store.images().unwrap(), ["one", "three", "two"]);
    let facts = store.complete_image("one").unwrap();
    assert_eq!((facts.size, facts.labels.unwrap()["a"].as_str()), (4 << 20, "b"));
    assert_eq!(store.complete_image("three").unwrap_err().kind(), ErrorKind::Busy);
    let missing = store.image("four").unwrap_err();
    assert!(missing.to_string().contains("cannot find backupstore/backing-images"), "{missing}");
    let remove = |name: &str| {
        let mut progress = |_, _| true;
        store.remove_image(name, &mut Work::new(&mut progress)).unwrap();
    };
    // One that is in progress keeps all blocks.
    remove("two");
    assert_eq!(blocks(root.path()), 4);
    remove("three");
    assert_eq!(blocks(root.path()), 2);
    remove("three");
    remove("one");
    assert_eq!((blocks(root.path()), store.images().unwrap().len()), (0, 0));
    // Nothing is left, not even of the lock.
    assert_eq!(store.volumes().unwrap(), [""; 0]);
}

#[test]
fn settings_are_kept_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    assert!(store.systems().unwrap().is_empty());
    let url = format!("vfs://{}/backupstore/system-backups/v1.9.0/daily", root.path().display());
    let backup = SystemBackup::parse(&url).unwrap();
    let facts = SystemConfig {
        manager_image: "m".to_owned(),
        created_at: "2026-11-26T00:00:00Z".to_owned(),
        ..SystemConfig::default()
    };
    store.upload_system(&backup, b"zip", facts.clone()).unwrap();
    let again = store.upload_system(&backup, b"other", facts).unwrap_err();
    let path = "backupstore/system-backups/v1.9.0/daily/system-backup.zip";
    assert_eq!(again.to_string(), format!("{path} already exists"));
    let facts = store.system(&backup).unwrap();
    assert_eq!(
        (&*facts.name, &*facts.longhorn_version, &*facts.manager_image),
        ("daily", "v1.9.0", "m")
    );
    assert_eq!(facts.backup_target_url, format!("vfs://{}", root.path().display()));
    // Of the three letters `zip`.
    assert!(facts.checksum.len() == 64 && facts.checksum.bytes().all(|b| b.is_ascii_hexdigit()));
    assert_eq!(store.download_system(&backup).unwrap(), b"zip");
    assert_eq!(store.systems().unwrap()["daily"], "backupstore/system-backups/v1.9.0/daily");
    std::fs::write(root.path().join(path), b"zap").unwrap();
    let altered = store.download_system(&backup).unwrap_err();
    assert!(altered.to_string().contains("checksum mismatched"), "{altered}");
    store.remove_system(&backup).unwrap();
    store.remove_system(&backup).unwrap();
    assert!(store.systems().unwrap().is_empty());
    assert!(store.system(&backup).unwrap_err().to_string().contains("cannot find"));
}
