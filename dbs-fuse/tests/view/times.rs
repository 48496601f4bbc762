//! What programs go by that compare what they have with what is there: times, sizes, numbers of inodes.

use crate::server::{Server, can_mount, noise};
use crate::tools::{has, must};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

const HEAD: &str = "volumes/v/head.raw";
const SNAPSHOT: &str = "volumes/v/snapshots/s.raw";

fn sample() -> Server {
    let server = Server::new(64 << 20);
    server.ask(&json!(["create", "v", 1 << 20]));
    server.ask(&json!(["write", "v", 0, 1, 16384]));
    server.ask(&json!(["snapshot", "v", "s"]));
    server
}

fn time(server: &Server, name: &str) -> i64 {
    let meta = fs::metadata(server.path(name)).unwrap();
    meta.mtime() * 1_000_000_000 + meta.mtime_nsec()
}

/// Another time after each of these, and before them the same however often it is looked at.
fn assert_told(server: &Server, name: &str, changes: &[Value]) {
    let mut last = time(server, name);
    for change in changes {
        fs::read(server.path(name)).unwrap();
        assert_eq!(time(server, name), last, "{name}, before {change}");
        server.ask(change);
        let now = time(server, name);
        assert!(now > last, "{name}, {change}");
        last = now;
    }
    assert_eq!(time(server, name), last);
}

#[test]
fn the_time_of_a_head_changes_with_its_content_only() {
    let true = can_mount() else { return };
    let server = sample();
    assert_told(
        &server,
        HEAD,
        &[
            json!(["write", "v", 0, 2, 4096]),
            json!(["write", "v", 0, 3, 4096]),
            json!(["write", "v", 512, 4, 512]),
            json!(["discard", "v", 0, 4096]),
            json!(["resize", "v", 2 << 20]),
            json!(["rollback", "v", "s"]),
        ],
    );
    let (head, frozen) = (time(&server, HEAD), time(&server, SNAPSHOT));
    server.ask(&json!(["create", "w", 1 << 20]));
    server.ask(&json!(["write", "w", 0, 2, 4096]));
    server.ask(&json!(["snapshot", "v", "t"]));
    assert_eq!((time(&server, HEAD), time(&server, SNAPSHOT)), (head, frozen));
    let archive = server.dir.path().join("archive");
    // It compares the times before and after.
    must("tar", &["-cf", archive.to_str().unwrap(), server.path(HEAD).to_str().unwrap()]);
    if has("rsync") {
        let (from, to) = (server.path(HEAD), server.dir.path().join("copy"));
        let arguments = ["-a", "--itemize-changes", from.to_str().unwrap(), to.to_str().unwrap()];
        assert_ne!(must("rsync", &arguments), "");
        assert_eq!(must("rsync", &arguments), "", "nothing has changed");
        server.ask(&json!(["write", "v", 0, 9, 4096]));
        assert_ne!(must("rsync", &arguments), "");
        assert_eq!(fs::read(to).unwrap()[..4096], noise(9, 4096));
    }
}

#[test]
fn the_time_of_a_snapshot_changes_while_its_content_does() {
    let true = can_mount() else { return };
    let server = sample();
    let taken = time(&server, SNAPSHOT);
    server.ask(&json!(["write", "v", 0, 2, 8192]));
    assert_eq!(time(&server, SNAPSHOT), taken);
    server.ask(&json!(["rebuilding", "v", true]));
    let fill = |seed: u64| json!(["fill", "v", "s", 4096, seed]);
    assert_told(&server, SNAPSHOT, &[fill(1), fill(2), fill(3)]);
    let last = time(&server, SNAPSHOT);
    server.ask(&fill(4));
    server.ask(&json!(["rebuilding", "v", false]));
    // Who has copied it as it was must see that it is another one.
    let filled = time(&server, SNAPSHOT);
    assert!(filled > last && last > taken);
    assert_eq!(fs::read(server.path(SNAPSHOT)).unwrap()[4096..8192], noise(4, 4096));
    server.ask(&json!(["write", "v", 8192, 5, 4096]));
    assert_eq!(time(&server, SNAPSHOT), filled, "it stays from now on");
    server.ask(&json!(["retire", "v", "s"]));
    let pruned = json!(["prune", "v", 1 << 20]);
    assert_told(&server, SNAPSHOT, &[pruned]);
}

#[test]
fn the_time_of_a_text_changes_with_it() {
    let true = can_mount() else { return };
    let server = sample();
    let label = |value: &str| json!(["label", "v", "s", "key", value]);
    assert_told(&server, "volumes/v/info.json", &[label("a"), label("b"), label("a")]);
    let write = |seed: u64, at: u64| json!(["write", "v", at, seed, 4096]);
    assert_told(&server, "volumes/v/map.json", &[write(2, 0), write(2, 512 << 10)]);
    assert_told(&server, "store.json", &[write(3, 700 << 10), json!(["create", "w", 4096])]);
}

#[test]
fn looking_at_a_map_does_not_make_it() {
    let true = can_mount() else { return };
    for live in [true, false] {
        let mut server = sample();
        if !live {
            server = server.again(false);
        }
        let map = server.path("volumes/v/map.json");
        for _ in 0..2 {
            assert_eq!(fs::metadata(&map).unwrap().len(), 0, "nobody has asked for it yet");
        }
        let listed = must("ls", &["-l", server.path("volumes/v").to_str().unwrap()]);
        assert!(listed.contains(" 0 "), "{listed}");
        let text = fs::read(&map).unwrap();
        assert!(serde_json::from_slice::<Value>(&text).unwrap()["complete"] == true);
        let file = File::open(&map).unwrap();
        assert_eq!(file.metadata().unwrap().len(), text.len() as u64);
        let copy = server.dir.path().join("copy");
        must("cp", &[map.to_str().unwrap(), copy.to_str().unwrap()]);
        assert_eq!(fs::read(copy).unwrap(), text);
    }
}

#[test]
fn the_directory_above_has_its_own_number() {
    let true = can_mount() else { return };
    let server = sample();
    let inode = |name: &str| fs::metadata(server.path(name)).unwrap().ino();
    for (name, above) in
        [("", ""), ("volumes", ""), ("volumes/v", "volumes"), ("volumes/v/snapshots", "volumes/v")]
    {
        let directory = File::open(server.path(name)).unwrap();
        let entries = rustix::fs::Dir::read_from(&directory).unwrap();
        let mut dots = 0;
        for entry in entries.map(|entry| entry.unwrap()) {
            let wanted = match entry.file_name().to_bytes() {
                b"." => inode(name),
                b".." => inode(above),
                _ => continue,
            };
            assert_eq!(entry.ino(), wanted, "{:?} of {name:?}", entry.file_name());
            dots += 1;
        }
        assert_eq!(dots, 2, "{name:?}");
    }
}

/// How a backup keeps what it reads, as `docs/mount.md` says.
#[test]
fn a_protected_snapshot_is_there_until_it_is_unprotected() {
    let true = can_mount() else { return };
    let server = sample();
    server.ask(&json!(["protect", "v", "s"]));
    let file = File::open(server.path(SNAPSHOT)).unwrap();
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; 16384];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    };
    server.ask(&json!(["write", "v", 0, 2, 16384]));
    for gone in [json!(["drop", "v", "s"]), json!(["delete", "v"])] {
        let refused = server.try_ask(&gone);
        assert!(refused["error"].as_str().unwrap().contains("protected"), "{refused}");
        assert_eq!(read().unwrap(), noise(1, 16384));
    }
    server.ask(&json!(["unprotect", "v", "s"]));
    server.ask(&json!(["drop", "v", "s"]));
    assert_eq!(file.metadata().unwrap_err().raw_os_error(), Some(libc::ESTALE));
}
