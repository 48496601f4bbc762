//! Layers of a store as sparse files: sent, hashed, received.

use crate::support::{Receiver, assert_same, content, layout, options, send_to};
use dbs_core::info::LayerState;
use dbs_core::store::{Link, SnapshotOptions};
use dbs_core::{InitOptions, OpenOptions, Store};
use longhorn_sync::image::{
    Checksum, HashOptions, LayerSink, LayerSource, METHOD, Record, Sink, Source, SparseFile,
    VolumeSource, hash, layer_stamp,
};
use longhorn_sync::ssync::Sent;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::tempdir;

const MIB: u64 = 1024 * 1024;
const SIZE: u64 = 24 * MIB;
const SNAPSHOTS: [&str; 4] = ["a", "b", "c", "d"];
const QUIET: HashOptions<'static> =
    HashOptions { threads: 2, cancelled: &|| false, progress: &|_| {} };

fn store(directory: &Path, name: &str) -> Store {
    let path = directory.join(name);
    let options = InitOptions { size: Some(256 * MIB), ..InitOptions::default() };
    Store::init(&path, &options).unwrap();
    Store::open(&path, &OpenOptions::default()).unwrap()
}

/// Volume `v` with four snapshots, random writes and discards before each; the last is twice the
/// size of the others.
fn history(store: &Store, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    store.create_volume("v", SIZE).unwrap();
    for name in SNAPSHOTS {
        if name == "d" {
            store.resize_volume("v", 2 * SIZE).unwrap();
        }
        let volume = store.volume("v").unwrap();
        let blocks = volume.size() / 4096;
        for _ in 0..40 {
            let start = rng.u64(..blocks);
            let longest = if rng.u8(..) < 24 { 900 } else { 12 };
            let length = rng.u64(1..=longest).min(blocks - start) * 4096;
            if rng.u8(..) < 80 {
                volume.discard(start * 4096, length).unwrap();
            } else {
                let byte = rng.u8(1..);
                volume.write_at(start * 4096, &vec![byte; length as usize], false).unwrap();
            }
        }
        store.create_snapshot("v", name, &SnapshotOptions::default()).unwrap();
    }
}

fn layer(store: &Store, snapshot: &str) -> Arc<LayerSource> {
    Arc::new(LayerSource::to_send(store, "v", Some(snapshot)).unwrap())
}

/// What a chain of layer files reads as: the newest data, zeros where there is none.
fn overlay(files: &[PathBuf]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for file in files {
        let file = SparseFile::source(file).unwrap();
        bytes.resize(file.size() as usize, 0);
        let upper = content(&file);
        for interval in layout(&file).iter().filter(|interval| interval.data) {
            let range = interval.offset as usize..interval.end() as usize;
            bytes[range.clone()].copy_from_slice(&upper[range]);
        }
    }
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_sent_as_files_are_the_volume() {
    for seed in 0..4 {
        let dir = tempdir().unwrap();
        let store = store(dir.path(), "s");
        history(&store, seed);
        let mut files = Vec::new();
        for name in SNAPSHOTS {
            let (file, source) = (dir.path().join(name), layer(&store, name));
            let receiver = Receiver::start(Arc::new(SparseFile::sink(&file)));
            send_to(receiver.port, source.clone(), options()).await.unwrap();
            receiver.ended().await;
            assert_same(source.as_ref(), &SparseFile::source(&file).unwrap());
            files.push(file);
            let whole = VolumeSource::open(&store, &format!("v@{name}")).unwrap();
            assert!(overlay(&files) == content(&whole), "seed {seed}, snapshot {name}");
        }
    }
}

#[test]
fn a_layer_hashes_as_its_file() {
    let dir = tempdir().unwrap();
    let store = store(dir.path(), "s");
    history(&store, 7);
    for name in SNAPSHOTS {
        let sent = hash(layer(&store, name).as_ref(), &QUIET).unwrap();
        let plain = LayerSource::to_hash(&store, "v", name).unwrap();
        assert_eq!(hash(&plain, &QUIET).unwrap(), sent);
        let bytes = longhorn_sync::image::Bytes::new(content(&plain));
        assert_eq!(hash(&bytes, &QUIET).unwrap(), sent);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_exported_whole() {
    let dir = tempdir().unwrap();
    let store = store(dir.path(), "s");
    history(&store, 8);
    for spec in ["v@b", "v"] {
        let source = Arc::new(VolumeSource::open(&store, spec).unwrap());
        let file = dir.path().join(spec);
        let receiver = Receiver::start(Arc::new(SparseFile::sink(&file)));
        send_to(receiver.port, source.clone(), options()).await.unwrap();
        receiver.ended().await;
        assert_same(source.as_ref(), &SparseFile::source(&file).unwrap());
    }
}

#[test]
fn a_stamp_changes_with_the_layer() {
    let dir = tempdir().unwrap();
    let store = store(dir.path(), "s");
    history(&store, 9);
    let stamp = |name| layer_stamp(&store, "v", name).unwrap();
    let (b, c) = (stamp("b"), stamp("c"));
    assert_ne!(b, c);
    store.volume("v").unwrap().write_at(0, &[1; 4096], false).unwrap();
    assert_eq!(stamp("b"), b);
    store.delete_snapshot("v", "b").unwrap();
    assert_ne!(stamp("c"), c);
    assert!(layer_stamp(&store, "v", "b").is_err());
}

#[test]
fn zeros_count_as_data_only_where_they_hide_something() {
    let dir = tempdir().unwrap();
    let store = store(dir.path(), "s");
    store.create_volume("v", SIZE).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &vec![1; 3 * MIB as usize], false).unwrap();
    store.create_snapshot("v", "a", &SnapshotOptions::default()).unwrap();
    volume.discard(MIB, MIB).unwrap();
    volume.write_zeroes(2 * MIB, 4 * MIB, false).unwrap();
    store.create_snapshot("v", "b", &SnapshotOptions::default()).unwrap();
    volume.write_zeroes(MIB, 2 * MIB, false).unwrap();
    store.create_snapshot("v", "c", &SnapshotOptions::default()).unwrap();
    let data = |name| -> u64 {
        layout(layer(&store, name).as_ref()).iter().filter(|i| i.data).map(|i| i.length).sum()
    };
    assert_eq!(data("a"), 3 * MIB);
    assert_eq!(data("b"), 2 * MIB);
    assert_eq!(data("c"), 0);
}

/// A store with the empty volume `v`, marked as rebuilding, of the size that [`history`] ends with.
fn target(directory: &Path) -> Store {
    let store = store(directory, "t");
    store.create_volume("v", 2 * SIZE).unwrap();
    store.set_rebuilding("v", true).unwrap();
    store
}

/// Sends an image to a layer, over a socket.
async fn send_layer(source: Arc<dyn Source>, to: &Store, name: &str) -> Sent {
    let sink = LayerSink::new(to, "v", name, None).unwrap();
    let receiver = Receiver::start(Arc::new(sink));
    let sent = send_to(receiver.port, source, options()).await.unwrap();
    receiver.ended().await;
    sent
}

/// Makes a chain of the layers that have arrived.
fn link_up(store: &Store, names: &[&str]) {
    while store.work(100).unwrap().remaining > 0 {}
    let mut links = Vec::new();
    let mut parent = None;
    for name in names {
        let (snapshot, created_ns) = ((*name).to_owned(), links.len() as u64);
        let link = Link { snapshot, parent, created_ns, ..Link::default() };
        parent = Some(link.snapshot.clone());
        links.push(link);
    }
    store.relink("v", &links, parent.as_deref()).unwrap();
}

fn whole(store: &Store, spec: &str) -> Vec<u8> {
    content(&VolumeSource::open(store, spec).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_in_any_order_become_the_volume() {
    for seed in 20..23 {
        let dir = tempdir().unwrap();
        let (from, to) = (store(dir.path(), "s"), target(dir.path()));
        history(&from, seed);
        for name in ["c", "a", "d", "b"] {
            let sent = send_layer(layer(&from, name), &to, name).await;
            assert!(!sent.existed);
        }
        link_up(&to, &SNAPSHOTS);
        to.set_rebuilding("v", false).unwrap();
        for name in SNAPSHOTS {
            let spec = format!("v@{name}");
            assert!(whole(&from, &spec) == whole(&to, &spec), "seed {seed}, {spec}");
            let ours = LayerSource::to_hash(&to, "v", name).unwrap();
            let theirs = LayerSource::to_hash(&from, "v", name).unwrap();
            assert_eq!(hash(&ours, &QUIET).unwrap(), hash(&theirs, &QUIET).unwrap());
            // Zeros that hide something arrived as zeros, not as data.
            let data = |store: &Store| {
                let layers = store.layers("v").unwrap();
                layers.iter().find(|l| l.name.as_deref() == Some(name)).unwrap().data_bytes
            };
            assert!(data(&to) < data(&from) + 4 * MIB, "{} {}", data(&to), data(&from));
        }
        assert!(to.check().unwrap().findings.is_empty());
    }
}

/// A replica that was away: its layers are changed in place, and little is sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_layer_that_existed_gets_only_what_differs() {
    let dir = tempdir().unwrap();
    let (from, to) = (store(dir.path(), "s"), target(dir.path()));
    history(&from, 30);
    for name in SNAPSHOTS {
        send_layer(layer(&from, name), &to, name).await;
    }
    link_up(&to, &SNAPSHOTS);
    to.set_rebuilding("v", false).unwrap();
    // The source merges `b` into `c`; here `b` is removed as well, and `c` and `d` compared.
    from.delete_snapshot("v", "b").unwrap();
    to.set_rebuilding("v", true).unwrap();
    to.delete_snapshot("v", "b").unwrap();
    for name in ["a", "c", "d"] {
        let sent = send_layer(layer(&from, name), &to, name).await;
        assert!(sent.existed && sent.written == 0, "{name}: {sent:?}");
    }
    // One whose content is quite another.
    let file = dir.path().join("other");
    crate::support::random_file(&file, 31, SIZE, 40);
    let source = Arc::new(SparseFile::source(&file).unwrap());
    let sent = send_layer(source.clone(), &to, "c").await;
    assert!(sent.existed && sent.written > 0);
    let layer = LayerSource::to_send(&to, "v", Some("c")).unwrap();
    assert_same(&layer, source.as_ref());
    assert!(to.check().unwrap().findings.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_layer_takes_the_size_of_what_it_receives() {
    let dir = tempdir().unwrap();
    let to = target(dir.path());
    for (seed, size) in [(1, 9 * MIB), (2, 3 * MIB), (3, 12 * MIB)] {
        let file = dir.path().join("file");
        crate::support::random_file(&file, seed, size, 10);
        let source = Arc::new(SparseFile::source(&file).unwrap());
        send_layer(source.clone(), &to, "x").await;
        assert_same(&LayerSource::to_send(&to, "v", Some("x")).unwrap(), source.as_ref());
    }
    assert!(to.check().unwrap().findings.is_empty());
}

#[test]
fn a_layer_cannot_change_unless_its_volume_is_being_rebuilt() {
    let dir = tempdir().unwrap();
    let to = target(dir.path());
    let sink = LayerSink::new(&to, "v", "x", None).unwrap();
    assert!(!sink.existed() && sink.size() == 0);
    assert!(sink.write_at(0, &[1; 4096]).is_err());
    sink.open(8192).unwrap();
    sink.write_at(4096, &[1; 4096]).unwrap();
    assert!(sink.write_at(8192, &[1; 4096]).is_err());
    to.set_rebuilding("v", false).unwrap();
    for outcome in [sink.write_at(0, &[2; 4096]), sink.hole(0, 8192)] {
        assert_eq!(outcome.unwrap_err().kind(), dbs_core::ErrorKind::ReadOnly);
    }
    assert!(LayerSink::new(&to, "w", "x", None).is_err());
}

/// Long zeros take no data space, whoever sends them.
#[test]
fn zeros_that_arrive_are_kept_as_zeros() {
    let dir = tempdir().unwrap();
    let to = target(dir.path());
    let sink = LayerSink::new(&to, "v", "x", None).unwrap();
    sink.open(4 * MIB).unwrap();
    let mut data = vec![0; 2 * MIB as usize];
    data[300_000] = 1;
    sink.write_at(MIB, &data).unwrap();
    let states: Vec<_> = to.layer("v", Some("x")).unwrap().map(0, 4 * MIB, 9).unwrap();
    let data: u64 =
        states.iter().filter(|r| r.state == LayerState::Data).map(|range| range.length).sum();
    let zeros: u64 =
        states.iter().filter(|r| r.state == LayerState::Zero).map(|range| range.length).sum();
    assert_eq!((data, zeros), (4096, 2 * MIB - 4096));
}

/// The record goes with the content: gone when a layer changes, and never a sender's word. A stock
/// sender's may be of a file that a purge has changed since (seed 2388554906274952169 of the engine's
/// random histories).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_layers_follow_their_content() {
    let dir = tempdir().unwrap();
    let to = target(dir.path());
    let image = dir.path().join("volume-snap-x.img");
    let sink = || LayerSink::new(&to, "v", "x", Some(image.clone())).unwrap();
    let first = sink();
    first.open(MIB).unwrap();
    first.write_at(0, &vec![1; MIB as usize]).unwrap();
    let checksum = Checksum { method: METHOD.into(), value: "0123456789abcdef".into() };
    first.finish(Some(&checksum)).unwrap();
    assert_eq!(Record::load(&image).unwrap(), None);
    let record = Record {
        method: METHOD.into(),
        checksum: checksum.value.clone(),
        change_time: layer_stamp(&to, "v", "x").unwrap(),
        ..Record::default()
    };
    record.store(&image).unwrap();
    assert_eq!(first.recorded().unwrap(), None, "not known before");
    assert_eq!(sink().recorded().unwrap().unwrap().to_checksum(), checksum);
    // Renamed and linked, as when the rebuild ends, it is the same layer.
    to.rename_snapshot("v", "x", "y").unwrap();
    link_up(&to, &["y"]);
    let renamed = LayerSink::new(&to, "v", "y", Some(image.clone())).unwrap();
    assert!(renamed.recorded().unwrap().is_some());
    renamed.open(MIB).unwrap();
    assert_eq!(Record::load(&image).unwrap(), None);
}
