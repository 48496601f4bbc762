//! Repositories that the first version has written are read byte for byte by all later ones.

use super::*;
use std::path::{Path, PathBuf};

fn root(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/repository-1-beta").join(name)
}

fn kinds() -> [(&'static str, Option<Secret>); 3] {
    [
        ("plain", None),
        ("passphrase", Some(passphrase())),
        ("key-file", Some(Secret::KeyFile([3; 32].into()))),
    ]
}

/// What is in them: chunks that compress and chunks that do not, zeros, and a last chunk that is none whole.
fn content() -> Snapshots {
    let mut content = vec![0; 6 * BLOCK as usize + 100];
    noise(&mut content[BLOCK as usize..2 * BLOCK as usize]);
    content[3 * BLOCK as usize..4 * BLOCK as usize].fill(b'a');
    content[6 * BLOCK as usize..].fill(b'z');
    let mut volume = Snapshots(vec![("one".to_owned(), content)]);
    volume.push("two", 5 * BLOCK, b"more");
    volume
}

/// Bytes that do not compress, and that no version of another crate changes.
fn noise(bytes: &mut [u8]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for byte in bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = state.to_le_bytes()[4];
    }
}

/// Run it to make them: `cargo test ... golden -- --ignored`. Never again for this format.
#[test]
#[ignore = "it writes the fixtures"]
fn write_golden_repositories() {
    for (name, secret) in kinds() {
        std::fs::create_dir_all(root(name)).unwrap();
        let objects = Arc::new(Directory::open(&root(name)).unwrap());
        let options = InitOptions { secret: secret.clone(), chunk_size: Some(BLOCK), cheap: true };
        let store = BackupStore::on(&url(), objects);
        store.init(&options).unwrap();
        let store = store.with_repository(secret.as_ref()).unwrap();
        let volume = content();
        create(&store, "backup-1", &volume.get("one")).unwrap();
        create(&store, "backup-2", &volume.get("two")).unwrap();
    }
}

#[test]
fn golden_repositories_are_read() {
    for (name, secret) in kinds() {
        let objects = Arc::new(Directory::open(&root(name)).unwrap());
        let store = BackupStore::on(&url(), objects).with_repository(secret.as_ref()).unwrap();
        assert!(store.is_repository());
        let volume = content();
        assert_eq!(store.volumes().unwrap(), [VOLUME]);
        assert_eq!(store.backups(VOLUME).unwrap(), ["backup-1", "backup-2"]);
        for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two")] {
            check(&store, backup, volume.get(snapshot).content());
            let config = store.backup(VOLUME, backup).unwrap();
            assert_eq!(
                (&*config.snapshot_name, config.is_incremental),
                (snapshot, snapshot == "two")
            );
        }
    }
}
