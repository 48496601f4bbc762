//! Hashing, sending, exporting, removing and renaming: what upstream does with files.

use crate::support::*;
use dbs_core::{OpenOptions, Store, TailPlace};
use longhorn_sync::image::{Record, Source, SparseFile};
use longhorn_sync::ssync::{ReceiveOptions, Received, receive};
use longhorn_wire::proto::ptypes::*;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// A plain receiver for a file, as upstream's or a backing image manager's.
pub fn receiver(node: &Node, path: &Path) -> (u16, JoinHandle<dbs_core::Result<Received>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = ReceiveOptions { idle: Duration::from_secs(60), ..Default::default() };
    let sink = Arc::new(SparseFile::sink(path));
    let receiving = receive(listener, sink, options, std::future::pending());
    (port, node.runtime.spawn(receiving))
}

pub fn received(node: &Node, task: JoinHandle<dbs_core::Result<Received>>) -> bool {
    match node.runtime.block_on(task).unwrap().unwrap() {
        Received::Closed { opened } => opened,
        other => panic!("{other:?}"),
    }
}

fn sample(node: &Node) {
    node.write(0..300, 1);
    node.snapshot("a");
    node.write((100..600).step_by(2), 2);
    node.discard(0, 20);
    node.snapshot("b");
    node.write(0..5, 3);
}

#[test]
fn a_layer_is_sent_as_the_file_upstream_would_have() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    sample(&node);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("b.img");
    let (port, task) = receiver(&node, &path);
    node.send("volume-snap-b.img", port, false).unwrap();
    assert!(received(&node, task));
    let file = fs::read(&path).unwrap();
    assert_eq!(file.len() as u64, 64 * MIB);
    assert!(file == node.layer("b").1);
    // Zeros that hide what "a" holds are data; what "b" does not say is a hole.
    let image = SparseFile::source(&path).unwrap();
    let first = image.intervals(0, 3).unwrap();
    assert!(first[0].data && first[0].length == 20 * BLOCK, "{first:?}");
    assert!(!first[1].data && first[1].end() == 100 * BLOCK, "{first:?}");

    let meta = dir.path().join("b.img.meta");
    let (port, task) = receiver(&node, &meta);
    node.send("volume-snap-b.img.meta", port, true).unwrap();
    assert!(received(&node, task));
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&meta).unwrap()).unwrap();
    assert_eq!(json["Parent"], "volume-snap-a.img");
    assert_eq!((&json["Removed"], &json["UserCreated"]), (&false.into(), &true.into()));
    assert_eq!(json["Created"], NOW);
    let head = node.replica.head_disk().unwrap();
    let (port, task) = receiver(&node, &meta);
    node.send(&format!("{head}.meta"), port, false).unwrap();
    assert!(received(&node, task));
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&meta).unwrap()).unwrap();
    assert_eq!(json["Parent"], "volume-snap-b.img");
}

#[test]
fn an_export_is_all_that_one_reads() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    sample(&node);
    // The volume grows: older snapshots end with zeros.
    node.replica.expand(80 * MIB as i64).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        let path = dir.path().join(name);
        let (port, task) = receiver(&node, &path);
        node.export(name, port).unwrap();
        assert!(received(&node, task));
        let mut wanted = node.content(&format!("{VOLUME}@{name}"));
        wanted.resize(80 * MIB as usize, 0);
        assert!(fs::read(&path).unwrap() == wanted, "{name}");
        let data: u64 = {
            let image = SparseFile::source(&path).unwrap();
            let all = image.intervals(0, usize::MAX).unwrap();
            all.iter().filter(|i| i.data).map(|i| i.length).sum()
        };
        assert!(data <= 600 * BLOCK, "{name}: {data} bytes of data");
    }
    let error = node.export("nothing", 1).unwrap_err();
    assert_eq!(error.message(), "open volume-snap-nothing.img: no such file or directory");
}

#[test]
fn a_layer_hashes_like_a_file_of_the_same_content() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    sample(&node);
    let dir = tempfile::tempdir().unwrap();
    let unknown = node.hash_status("b");
    assert_eq!(unknown.state, "error");
    let mut sums = Vec::new();
    for name in ["a", "b"] {
        let status = node.hashed(name, false);
        assert_eq!((status.state.as_str(), status.error.as_str()), ("complete", ""));
        let path = dir.path().join(name);
        fs::write(&path, node.layer(name).1).unwrap();
        assert_eq!(status.checksum, hash_of(&path));
        assert!(!status.silently_corrupted);
        sums.push(status.checksum);
    }
    // On record: found again after a restart, and sent along.
    let image = node.dir.path().join("volume-snap-b.img");
    let record = Record::load(&image).unwrap().unwrap();
    assert_eq!((record.method.as_str(), &record.checksum), ("crc64", &sums[1]));
    node.call(|mut c| async move { c.reset(()).await }).unwrap();
    assert_eq!(node.hash_status("b").checksum, sums[1]);
    assert_eq!(node.hashed("b", true).checksum, sums[1]);
    let path = dir.path().join("copy");
    for again in [false, true] {
        let (port, task) = receiver(&node, &path);
        node.send("volume-snap-b.img", port, true).unwrap();
        assert_eq!(received(&node, task), !again, "the second time there is nothing to send");
        let stamp = SparseFile::source(&path).unwrap().stamp().unwrap();
        Record { change_time: stamp, ..record.clone() }.store(&path).unwrap();
    }

    // A record that does not fit is found out, and stays as evidence.
    let wrong = Record { checksum: "0123456789abcdef".into(), ..record };
    wrong.store(&image).unwrap();
    assert_eq!(node.hashed("b", false).checksum, wrong.checksum);
    let status = node.hashed("b", true);
    assert!(status.silently_corrupted);
    assert!(Record::load(&image).unwrap().unwrap().silently_corrupted);
}

#[test]
fn purging_what_a_layer_builds_on_makes_its_checksum_void() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    sample(&node);
    let before = node.hashed("b", false).checksum;
    node.hashed("a", false);
    node.replica.mark_removed("a").unwrap();
    assert_eq!(node.purged().state, "complete");
    let names: Vec<_> = fs::read_dir(node.dir.path())
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".checksum"))
        .collect();
    assert!(names.is_empty(), "{names:?}");
    let after = node.hashed("b", false);
    assert_eq!(after.state, "complete");
    assert_ne!(after.checksum, before);
}

#[test]
fn hashing_waits_for_its_turn_on_the_node_and_can_be_cancelled() {
    let runtime = runtime();
    let shared = tempfile::tempdir().unwrap();
    let lock_dir = shared.path().join("longhorn/.lock");
    let setup = Setup { lock_dir: Some(lock_dir.clone()), ..Setup::default() };
    let node = Node::with(&runtime, setup);
    sample(&node);
    let locked = || {
        node.call(|mut c| async move { c.snapshot_hash_lock_state(()).await }).unwrap().is_locked
    };
    assert!(!locked());
    let file = fs::File::open(lock_dir.join("hash")).unwrap();
    let theirs = nix_lock(file);
    assert!(locked());
    node.hash("a", false).unwrap();
    node.hash("a", false).unwrap();
    node.hash("b", false).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(node.hash_status("a").state, "in_progress");
    let cancel = |name: &str| {
        let request = SnapshotHashCancelRequest { snapshot_name: name.to_owned() };
        node.call(|mut c| async move { c.snapshot_hash_cancel(request).await })
    };
    cancel("a").unwrap();
    cancel("unknown").unwrap();
    let status = wait(|| Some(node.hash_status("a")).filter(|s| s.state != "in_progress"));
    assert!(status.state == "error" && status.error.contains("cancelled"), "{status:?}");
    drop(theirs);
    let status = wait(|| Some(node.hash_status("b")).filter(|s| s.state != "in_progress"));
    assert_eq!(status.state, "complete");
    for status in [node.hash("", false).unwrap_err(), cancel("").unwrap_err()] {
        assert_eq!(status.message(), "snapshot name is required");
    }
    let status = node.hashed("unknown", false);
    assert_eq!(status.state, "error");
    assert!(status.error.contains("volume-snap-unknown.img"), "{}", status.error);
}

fn nix_lock(file: fs::File) -> nix::fcntl::Flock<fs::File> {
    nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusive).unwrap()
}

/// One request on a connection that stays; the first line of the answer, all of which is read.
fn ask(stream: &mut TcpStream, request: &str, body: &[u8]) -> String {
    let head = format!("{request} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    let mut answer = Vec::new();
    let mut byte = [0];
    while !answer.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        answer.push(byte[0]);
    }
    let head = String::from_utf8(answer).unwrap().to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.trim().parse().unwrap())];
    stream.read_exact(&mut body).unwrap();
    head.lines().next().unwrap().to_owned()
}

/// A controller takes the next snapshot once it hears that the head's description was sent: what is
/// described is below that snapshot then.
#[test]
fn a_description_is_the_replicas_when_its_sender_is_told_so() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    sample(&node);
    node.replica.set_rebuilding(true).unwrap();
    let to_file_name = format!("{}.meta", node.replica.head_disk().unwrap());
    let launch = ReceiverLaunchRequest { to_file_name };
    let port = node.call(|mut c| async move { c.receiver_launch(launch).await }).unwrap().port;
    let meta = br#"{"Parent":"volume-snap-a.img"}"#;
    let mut sender = TcpStream::connect(("127.0.0.1", port as u16)).unwrap();
    let end = meta.len();
    let open = format!("GET /v1-ssync/open?begin=0&directIO=false&end={end}");
    assert!(ask(&mut sender, &open, b"").contains("200"));
    let write = format!("POST /v1-ssync/writeData?begin=0&end={end}");
    assert!(ask(&mut sender, &write, meta).contains("200"));
    // Another of its connections, with a request whose body is still to come.
    let mut other = TcpStream::connect(("127.0.0.1", port as u16)).unwrap();
    let half = format!("{write} HTTP/1.1\r\nHost: x\r\nContent-Length: {end}\r\n\r\n{{");
    other.write_all(half.as_bytes()).unwrap();
    assert!(
        ask(&mut sender, "POST /v1-ssync/close?checksum=&checksumMethod=", b"").contains("200")
    );
    node.snapshot("c");
    node.replica.reload().unwrap();
    let replica = node.replica.get().unwrap();
    assert_eq!(replica.chain[1..], ["volume-snap-c.img", "volume-snap-a.img"]);
    drop(other);
}

#[test]
fn what_belongs_to_the_volume_is_neither_removed_nor_renamed() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    sample(&node);
    node.hashed("a", false);
    let remove = |name: &str| {
        let request = FileRemoveRequest { file_name: name.to_owned() };
        node.call(|mut c| async move { c.file_remove(request).await })
    };
    let rename = |old: &str, new: &str| {
        let (old_file_name, new_file_name) = (old.to_owned(), new.to_owned());
        let request = FileRenameRequest { old_file_name, new_file_name };
        node.call(|mut c| async move { c.file_rename(request).await })
    };
    let text = |outcome: Outcome<()>| outcome.unwrap_err().message().to_owned();
    let precious = node.dir.path().join("volume.dbs");
    for name in ["../volume.dbs", "/etc/passwd", "", ".", "volume.dbs", "volume.meta", "a/b.img"] {
        assert!(
            text(remove(name)).contains("no file of a replica")
                || text(remove(name)).contains("not the name"),
            "{name}"
        );
        assert!(rename(name, "volume-snap-x.img").is_err());
        assert!(rename("volume-snap-a.img", name).is_err());
    }
    let head = node.replica.head_disk().unwrap();
    for name in ["volume-snap-a.img", "volume-snap-a.img.meta", &head] {
        assert!(text(remove(name)).contains("belongs to a disk"), "{name}");
        assert!(text(rename(name, "volume-snap-x.img")).contains("keep their names"));
    }
    assert_eq!(
        text(remove("volume-snap-x.img")),
        "remove volume-snap-x.img: no such file or directory"
    );
    assert!(text(rename("volume-snap-x.img", "volume-snap-y.img")).contains("no such file"));
    rename("volume-snap-a.img.checksum", "volume-snap-x.img.checksum").unwrap();
    assert!(text(remove("volume-snap-a.img.checksum")).contains("no such file"));
    remove("volume-snap-x.img.checksum").unwrap();
    assert!(precious.exists());
    assert_eq!(node.snapshots(), ["a", "b"]);
    for (name, says) in [
        (head.as_str(), "is the head"),
        ("volume-snap-x.img", "no such file"),
        ("volume-snap-a.img.checksum", "not by itself"),
        ("../x", "not the name"),
    ] {
        assert!(text(node.send(name, 1, false)).contains(says), "{name}");
    }
}

/// A newer process waits for the lock of the store's file, and the engine for that.
#[test]
fn nothing_that_is_sent_keeps_the_store_from_the_next_process() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    node.write(0..8000, 1);
    node.snapshot("a");
    // One that takes connections, and reads nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = i32::from(silent.local_addr().unwrap().port());
    let host = "127.0.0.1".to_owned();
    let export = VolumeExportRequest {
        snapshot_file_name: "a".to_owned(),
        host: host.clone(),
        port,
        ..Default::default()
    };
    let from_file_name = "volume-snap-a.img".to_owned();
    let send = FileSendRequest { from_file_name, host, port, ..Default::default() };
    let (mut exporting, mut sending) = (node.client.clone(), node.client.clone());
    runtime.spawn(async move { exporting.volume_export(export).await });
    runtime.spawn(async move { sending.file_send(send).await });
    let _connected = [silent.accept().unwrap(), silent.accept().unwrap()];
    // Two that fetch, of which one does not read what comes, and one asks for nothing more.
    let fetching = |length| crate::peer::fetching(&node, "volume-snap-a.img", length);
    let _fetched = [64 * MIB, MIB].map(|length| runtime.block_on(fetching(length)));

    node.replica.surrender(None).unwrap();
    let Node { dir, store, .. } = node;
    let begun = Instant::now();
    store.close().unwrap();
    let path = dir.path().join("volume.dbs");
    let open = || Store::open(&path, &OpenOptions { tail: TailPlace::None, ..Default::default() });
    while let Err(busy) = open() {
        assert!(begun.elapsed() < Duration::from_secs(2), "{busy}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
