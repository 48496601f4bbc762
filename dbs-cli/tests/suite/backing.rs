//! Volumes that rest on a file outside the store, which commands and servers are given.

use crate::support::Place;
use dbs_core::{OpenOptions, Store, TailPlace};
use dbs_nbd::{Client, ClientOptions};
use std::fs;
use std::process::Command;

const FILE: usize = 96 << 10;

/// A store with the volume `v` on the file `image`; what it shows.
fn sample(place: &Place) -> Vec<u8> {
    place.init();
    let content: Vec<u8> = (0..FILE).map(|at| (at / 512) as u8 | 1).collect();
    fs::write(place.path("image"), &content).unwrap();
    place.dbs("volume create v 256KiB --on image").ok("create");
    let options = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
    let store = Store::open(&place.store(), &options).unwrap();
    store.volume("v").unwrap().write_at(8192, &[7; 4096], true).unwrap();
    store.close().unwrap();
    let mut shown = content;
    shown[8192..12288].fill(7);
    shown.resize(256 << 10, 0);
    shown
}

/// Found by a tester: the store itself was taken as an image, under any of its names, and the volume could never be
/// read.
#[test]
fn the_store_itself_is_no_image() {
    let place = Place::with_store();
    fs::hard_link(place.store(), place.path("link")).unwrap();
    for command in ["volume create v --on link", "volume import v link --format raw"] {
        let refused = place.dbs(command).exits(2, command);
        assert!(refused.stderr.contains("link is the store itself"), "{}", refused.stderr);
    }
    assert_eq!(place.json("volume list"), serde_json::json!([]));
    place.dbs("volume create v --on missing").exits(10, "no such file");
}

#[test]
fn an_export_needs_the_file_and_is_never_zeros() {
    let place = Place::new();
    let shown = sample(&place);
    let refused = place.dbs("volume export v out.raw");
    assert!(refused.code != 0, "without the file");
    assert!(refused.stderr.contains("give that file with --backing-file"), "{}", refused.stderr);
    fs::write(place.path("other"), [2; FILE]).unwrap();
    let refused = place.dbs("--backing-file other volume export v out2.raw");
    assert!(refused.code != 0, "with another file");
    place.dbs("--backing-file image volume export v out3.raw").ok("export");
    assert!(fs::read(place.path("out3.raw")).unwrap() == shown);
    for name in ["out.raw", "out2.raw"] {
        assert!(!place.path(name).exists(), "{name} is left");
    }
}

/// A path that is stale, or names no file, stops nothing that reads nothing of it.
#[test]
fn a_stale_path_stops_only_what_reads_the_file() {
    let place = Place::new();
    sample(&place);
    assert!(Command::new("mkfifo").arg(place.path("fifo")).status().unwrap().success());
    for wrong in ["gone", "fifo"] {
        for command in ["check", "repair --dry-run", "volume list", "info"] {
            let run = place.dbs(&format!("--backing-file {wrong} {command}")).ok(command);
            if command != "repair --dry-run" {
                assert!(run.stderr.contains(wrong), "{command}: {}", run.stderr);
            }
        }
        let refused = place.dbs(&format!("--backing-file {wrong} volume export v out.raw"));
        assert!(refused.code != 0 && refused.stderr.contains(wrong), "{}", refused.stderr);
        let refused = place.dbs(&format!("--backing-file {wrong} serve"));
        assert!(refused.code != 0 && refused.stderr.contains(wrong), "{}", refused.stderr);
        // It talks to a server, of which there is none here.
        let run = place.dbs(&format!("--backing-file {wrong} detach v"));
        assert!(!run.stderr.contains(wrong), "{}", run.stderr);
    }
}

/// An NBD client is told of an I/O error, as of a disk that fails, and the rest goes on.
#[test]
fn a_client_reads_eio_where_the_file_is_missing() {
    let place = Place::new();
    let shown = sample(&place);
    let socket = place.path("nbd");
    let connect = || Client::connect_unix(&socket, "v", &ClientOptions::default()).unwrap();
    let served = place.serve(&format!("--nbd unix:{}", socket.display()));
    let mut client = connect();
    let mut found = [0; 4096];
    let error = client.read_at(0, &mut found).unwrap_err();
    assert!(error.to_string().contains("(Io)"), "{error}");
    client.read_at(8192, &mut found).unwrap();
    assert_eq!(found, [7; 4096]);
    drop(client);
    served.stop();
    let served = place.serve(&format!("--backing-file image --nbd unix:{}", socket.display()));
    let mut all = vec![0; shown.len()];
    connect().read_at(0, &mut all).unwrap();
    assert!(all == shown);
    served.stop();
}

/// Fifty virtual machines from one image: the size is that of the image, and clones take no space.
#[test]
fn volumes_are_made_on_an_image() {
    let place = Place::with_store();
    let content: Vec<u8> = (0..FILE).map(|at| (at / 512) as u8 | 1).collect();
    fs::write(place.path("image"), &content).unwrap();
    let made = place.dbs("--json volume create golden --on image").ok("create").json();
    assert_eq!(made["size"].as_u64(), Some(FILE as u64));
    let shown = place.dbs("volume show golden").ok("show").text();
    assert!(shown.contains(made["backing"].as_str().unwrap()), "{shown}");
    place.dbs("snapshot create golden@v1").ok("snapshot");
    for clone in ["vm-1", "vm-2"] {
        place.dbs(&format!("volume clone golden@v1 {clone}")).ok("clone");
    }
    place.dbs("--backing-file image volume export vm-2 out.raw").ok("export");
    assert!(fs::read(place.path("out.raw")).unwrap() == content);

    place.dbs("volume create none").exits(2, "neither size nor image");
    place.dbs("volume create small 4KiB --on image").exits(2, "smaller than the image");
    place.dbs("volume create lost --on gone").exits(10, "no such image");
    let served = place.serve("--backing-file image");
    let refused = place.dbs("volume create v --on image").exits(1, "served");
    assert!(refused.stderr.contains("--backing-file"), "{}", refused.stderr);
    served.stop();
}

/// Found by review: an export with `--force` onto the image emptied it before it read it, and all volumes on it
/// showed zeros.
#[test]
fn the_image_that_volumes_rest_on_is_never_written_over() {
    let place = Place::new();
    sample(&place);
    let content = fs::read(place.path("image")).unwrap();
    let export = "--backing-file image volume export v image --force";
    let refused = place.dbs(export).exits(2, "the image itself").stderr;
    assert!(refused.contains("that volumes of the store rest on"), "{refused}");
    std::os::unix::fs::symlink("image", place.path("link")).unwrap();
    place.dbs("--backing-file link volume export v image --force").exits(2, "by another name");
    // Nor if it is not named again, as nothing needs it that is under way.
    let refused = place.dbs("volume export v image --force").exits(2, "not named").stderr;
    assert!(refused.contains("that volumes of the store rest on"), "{refused}");
    // Nor by who does not know that it is one.
    place.dbs("-s other.dbs init other.dbs --size 64MiB").ok("init");
    place.dbs("-s other.dbs volume create w 1MiB").ok("create");
    let served = place.serve("--backing-file image");
    for command in ["volume export w image --force", "init image --size 64MiB --force"] {
        let refused = place.dbs(&format!("-s other.dbs --yes {command}")).exits(11, command).stderr;
        assert!(refused.contains("being read by process"), "{refused}");
    }
    place.dbs("--backing-file image volume export v out.raw").ok("several may read it");
    served.stop();
    assert!(fs::read(place.path("image")).unwrap() == content);
    place.dbs("-s other.dbs volume export w image --force").ok("nobody needs it any more");
}
