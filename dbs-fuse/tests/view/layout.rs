//! What is in the tree, and what it looks like.

use crate::server::{Server, can_mount, noise};
use rustix::fs::{self as sys, SeekFrom};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

const KIB: u64 = 1024;

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn sample() -> Server {
    let server = Server::new(64 << 20);
    server.ask(&json!(["create", "v", 1024 * KIB + 512]));
    server.ask(&json!(["write", "v", 8 * KIB, 1, 100 * KIB]));
    server
}

#[test]
fn the_tree_is_as_documented() {
    let true = can_mount() else { return };
    let server = sample();
    assert_eq!(names(&server.path("")), set(&["store.json", "volumes"]));
    let members = ["head.raw", "info.json", "map.json", "snapshots"];
    assert_eq!(names(&server.path("volumes/v")), set(&members), "no snapshot: no link");
    let first = server.ask(&json!(["snapshot", "v", "one"]));
    server.ask(&json!(["write", "v", 8 * KIB, 2, 4096]));
    server.ask(&json!(["snapshot", "v", "two"]));
    assert_eq!(names(&server.path("volumes/v")).len(), 5);
    assert_eq!(names(&server.path("volumes/v/snapshots")), set(&["one.raw", "two.raw"]));
    let latest = fs::read_link(server.path("volumes/v/latest")).unwrap();
    assert_eq!(latest, Path::new("snapshots/two.raw"));
    assert_eq!(&fs::read(server.path("volumes/v/latest")).unwrap()[8192..12288], noise(2, 4096));
    let image = fs::read(server.path("volumes/v/snapshots/one.raw")).unwrap();
    assert_eq!(image.len() as u64, 1024 * KIB + 512);
    assert_eq!(image[8192..][..100 << 10], noise(1, 100 << 10));
    let meta = fs::metadata(server.path("volumes/v/snapshots/one.raw")).unwrap();
    assert_eq!((meta.len(), meta.blocks() * 512), (1024 * KIB + 512, 100 * KIB));
    let time = meta.mtime() as u64 * 1_000_000_000 + meta.mtime_nsec() as u64;
    assert_eq!(Some(time), first.as_u64());
    let parse = |name: &str| -> Value {
        let text = fs::read(server.path(name)).unwrap();
        assert_eq!(fs::metadata(server.path(name)).unwrap().len(), text.len() as u64, "{name}");
        serde_json::from_slice(&text).unwrap()
    };
    assert_eq!(parse("store.json")["store"]["volumes"], 1);
    let info = parse("volumes/v/info.json");
    assert_eq!(
        (&info["volume"]["name"], &info["snapshots"][1]["name"]),
        (&json!("v"), &json!("two"))
    );
    let map = parse("volumes/v/map.json");
    assert_eq!(map["complete"], true);
    let data = json!({ "offset": 8 * KIB, "length": 100 * KIB, "state": "data" });
    assert_eq!(map["ranges"][1], data, "{map}");
    for refused in [
        fs::write(server.path("volumes/v/head.raw"), b"x").unwrap_err(),
        fs::create_dir(server.path("volumes/w")).unwrap_err(),
        fs::remove_file(server.path("volumes/v/snapshots/one.raw")).unwrap_err(),
    ] {
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    }
    for missing in ["x", "volumes/w", "volumes/v@one", "volumes/v/x", "volumes/v/snapshots/one"] {
        let error = fs::metadata(server.path(missing)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{missing}");
    }
}

#[test]
fn the_head_of_an_incomplete_volume_is_not_shown() {
    let true = can_mount() else { return };
    for live in [true, false] {
        let mut server = sample();
        server.ask(&json!(["snapshot", "v", "one"]));
        let all = set(&["head.raw", "info.json", "latest", "map.json", "snapshots"]);
        let without = set(&["info.json", "latest", "snapshots"]);
        assert_eq!(names(&server.path("volumes/v")), all);
        server.ask(&json!(["rebuilding", "v", true]));
        if !live {
            server = server.again(false);
        }
        assert_eq!(names(&server.path("volumes/v")), without, "live {live}");
        for hidden in ["volumes/v/head.raw", "volumes/v/map.json"] {
            let error = File::open(server.path(hidden)).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{hidden}");
        }
        assert_eq!(names(&server.path("volumes/v/snapshots")), set(&["one.raw"]));
        if live {
            server.ask(&json!(["rebuilding", "v", false]));
            assert_eq!(names(&server.path("volumes/v")), all);
        }
    }
}

#[test]
fn names_are_escaped_and_lead_back() {
    let true = can_mount() else { return };
    let server = Server::new(64 << 20);
    let long = "ä".repeat(127);
    let plain = ["a/b", "..", ".", "100%", "%2F", "größe 1", &long];
    for name in plain {
        server.ask(&json!(["create", name, 8192]));
        server.ask(&json!(["snapshot", name, name]));
    }
    let found = names(&server.path("volumes"));
    assert_eq!(found, plain.iter().map(|name| dbs_fuse::escape(name)).collect());
    for name in plain {
        let image = server.path("").join(dbs_fuse::image_path(name, Some(name)));
        assert_eq!(fs::metadata(&image).unwrap().len(), 8192, "{name}");
        let seen = names(image.parent().unwrap());
        assert_eq!(seen, [image.file_name().unwrap().to_string_lossy().into_owned()].into());
    }
}

#[test]
fn holes_and_attributes_are_told() {
    let true = can_mount() else { return };
    let server = sample();
    server.ask(&json!(["write", "v", 640 * KIB, 1, 8 * KIB]));
    server.ask(&json!(["discard", "v", 16 * KIB, 8 * KIB]));
    server.ask(&json!(["snapshot", "v", "s"]));
    server.ask(&json!(["label", "v", "s", "backup", "täglich"]));
    for name in ["head.raw", "snapshots/s.raw"] {
        let file = File::open(server.path("volumes/v").join(name)).unwrap();
        let data = |from| sys::seek(&file, SeekFrom::Data(from));
        let hole = |from| sys::seek(&file, SeekFrom::Hole(from)).unwrap();
        assert_eq!((data(0).unwrap(), hole(0)), (8 * KIB, 0), "{name}");
        assert_eq!((hole(8 * KIB), data(16 * KIB).unwrap()), (16 * KIB, 24 * KIB));
        assert_eq!((hole(24 * KIB), data(200 * KIB).unwrap()), (108 * KIB, 640 * KIB));
        assert_eq!(hole(644 * KIB + 1), 648 * KIB);
        assert_eq!(data(700 * KIB), Err(rustix::io::Errno::NXIO));
        assert_eq!(data(2048 * KIB), Err(rustix::io::Errno::NXIO));
        // At any byte, over borders, and at the end.
        let mut bytes = vec![0; 10_000];
        assert_eq!(file.read_at(&mut bytes, 7_777).unwrap(), 10_000);
        let mut wanted = vec![0; 8192 - 7777];
        wanted.extend(&noise(1, 100 << 10)[..8192]);
        wanted.resize(10_000, 0);
        assert_eq!(bytes, wanted, "{name}");
        assert_eq!(file.read_at(&mut bytes, 1024 * KIB - 88).unwrap(), 600);
        assert_eq!(file.read_at(&mut bytes, 1025 * KIB).unwrap(), 0);
    }
    let attribute = |path: &str, name: &str| {
        let mut value = [0; 300];
        let length = sys::getxattr(server.path(path), name, &mut value[..])?;
        Ok::<_, rustix::io::Errno>(String::from_utf8(value[..length].to_vec()).unwrap())
    };
    let snapshot = "volumes/v/snapshots/s.raw";
    assert_eq!(attribute(snapshot, "user.dbs.name").unwrap(), "s");
    assert_eq!(attribute(snapshot, "user.dbs.label.backup").unwrap(), "täglich");
    assert_eq!(attribute("volumes/v", "user.dbs.snapshots").unwrap(), "1");
    assert_eq!(attribute("volumes/v/head.raw", "user.dbs.parent").unwrap(), "v@s");
    assert_eq!(attribute(snapshot, "user.other"), Err(rustix::io::Errno::NODATA));
    let mut list = vec![0; 4096];
    let length = sys::listxattr(server.path(snapshot), &mut list[..]).unwrap();
    let list = String::from_utf8(list[..length].to_vec()).unwrap();
    assert!(list.split('\0').any(|name| name == "user.dbs.uuid"), "{list:?}");
}

/// The same numbers, times and bytes when it is mounted again, of a store that nobody writes.
#[test]
fn an_idle_store_looks_the_same_each_time() {
    let true = can_mount() else { return };
    let server = sample();
    server.ask(&json!(["snapshot", "v", "s"]));
    let look = |server: &Server| {
        ["volumes/v/snapshots/s.raw", "volumes/v/head.raw", "volumes/v"].map(|name| {
            let meta = fs::metadata(server.path(name)).unwrap();
            (meta.ino(), meta.len(), meta.blocks(), meta.mtime_nsec())
        })
    };
    let live = look(&server);
    let server = server.again(false);
    let idle = look(&server);
    assert_eq!((live[0], live[2], live[1].0), (idle[0], idle[2], idle[1].0));
    let server = server.again(false);
    assert_eq!(look(&server), idle);
    assert_eq!(&fs::read(server.path("volumes/v/head.raw")).unwrap()[8192..][..99], &noise(1, 99));
}
