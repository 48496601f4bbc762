//! Beside somebody who works with the store: what is made appears, what is deleted is gone.

use crate::server::{Server, can_mount, noise};
use serde_json::json;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

fn read(file: &File, offset: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4096];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// The error of reading what was deleted; what the kernel still keeps must be right meanwhile.
fn error_soon(file: &File, right: &[u8]) -> Option<i32> {
    let deadline = Instant::now() + Duration::from_secs(120);
    while Instant::now() < deadline {
        match read(file, 0) {
            Ok(bytes) => assert_eq!(bytes, right, "other bytes than the snapshot's"),
            Err(error) => return error.raw_os_error(),
        }
    }
    None
}

#[test]
fn what_is_made_appears_and_what_is_written_is_read() {
    let true = can_mount() else { return };
    let server = Server::new(64 << 20);
    server.ask(&json!(["create", "v", 1 << 20]));
    let head = File::open(server.path("volumes/v/head.raw")).unwrap();
    for round in 0..20_u64 {
        server.ask(&json!(["write", "v", 0, round, 4096]));
        assert_eq!(read(&head, 0).unwrap(), noise(round, 4096), "the head, round {round}");
        let name = format!("s{round}");
        let path = server.path(&format!("volumes/v/snapshots/{name}.raw"));
        assert!(!path.exists());
        server.ask(&json!(["snapshot", "v", name]));
        assert_eq!(fs::read(&path).unwrap()[..4096], noise(round, 4096));
        let count = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(count as u64, round + 1);
        let latest = fs::read_link(server.path("volumes/v/latest")).unwrap();
        assert!(latest.ends_with(path.file_name().unwrap()));
    }
    server.ask(&json!(["rename", "v", "s3", "renamed"]));
    assert!(!server.path("volumes/v/snapshots/s3.raw").exists());
    let renamed = fs::read(server.path("volumes/v/snapshots/renamed.raw")).unwrap();
    assert_eq!(renamed[..4096], noise(3, 4096));
    server.ask(&json!(["resize", "v", 2 << 20]));
    assert_eq!(head.metadata().unwrap().len(), 2 << 20);
    server.ask(&json!(["write", "v", 1 << 20, 7, 4096]));
    assert_eq!(read(&head, 1 << 20).unwrap(), noise(7, 4096));
    server.ask(&json!(["clone", "v", "renamed", "w"]));
    assert_eq!(fs::read(server.path("volumes/w/head.raw")).unwrap()[..4096], noise(3, 4096));
    // Nothing that looks keeps a volume.
    server.ask(&json!(["delete", "v"]));
    assert!(!server.path("volumes/v").exists());
    assert_eq!(read(&head, 0).unwrap_err().raw_os_error(), Some(libc::ESTALE));
}

#[test]
fn what_was_rebuilt_under_an_open_file_is_read_anew() {
    let true = can_mount() else { return };
    let server = Server::new(64 << 20);
    server.ask(&json!(["create", "v", 1 << 20]));
    server.ask(&json!(["write", "v", 0, 1, 4096]));
    server.ask(&json!(["snapshot", "v", "s"]));
    let file = File::open(server.path("volumes/v/snapshots/s.raw")).unwrap();
    assert_eq!(read(&file, 0).unwrap(), noise(1, 4096));
    for round in 2..6 {
        server.ask(&json!(["rebuilding", "v", true]));
        // The kernel has been told by then, and keeps what is read while it is rebuilt.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(read(&file, 0).unwrap(), noise(round - 1, 4096), "round {round}");
        server.ask(&json!(["fill", "v", "s", 0, round]));
        server.ask(&json!(["rebuilding", "v", false]));
        let deadline = Instant::now() + Duration::from_secs(60);
        while read(&file, 0).unwrap() != noise(round, 4096) {
            assert!(Instant::now() < deadline, "round {round}: the content of before");
        }
    }
}

#[test]
fn what_is_deleted_is_stale_and_never_something_else() {
    let true = can_mount() else { return };
    let server = Server::new(64 << 20);
    server.ask(&json!(["create", "v", 1 << 20]));
    let path = server.path("volumes/v/snapshots/s.raw");
    let mut old = Vec::new();
    for round in 0..8_u64 {
        server.ask(&json!(["write", "v", 0, round, 64 << 10]));
        server.ask(&json!(["snapshot", "v", "s"]));
        let file = File::open(&path).unwrap();
        assert_eq!(read(&file, 0).unwrap(), noise(round, 64 << 10)[..4096], "round {round}");
        // Merged, and its place taken by another of the same name.
        server.ask(&json!(["write", "v", 0, round + 100, 32 << 10]));
        server.ask(&json!(["drop", "v", "s"]));
        assert!(!path.exists());
        server.ask(&json!(["work"]));
        let right = &noise(round, 64 << 10)[..4096];
        assert_eq!(error_soon(&file, right), Some(libc::ESTALE), "round {round}");
        assert_eq!(file.metadata().unwrap_err().raw_os_error(), Some(libc::ESTALE));
        old.push(file);
        server.ask(&json!(["snapshot", "v", "s"]));
        let file = File::open(&path).unwrap();
        assert_eq!(read(&file, 0).unwrap(), noise(round + 100, 32 << 10)[..4096]);
        server.ask(&json!(["drop", "v", "s"]));
    }
    for file in &old {
        assert_eq!(read(file, 8192).unwrap_err().raw_os_error(), Some(libc::ESTALE));
    }
}
