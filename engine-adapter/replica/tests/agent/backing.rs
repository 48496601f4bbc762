//! Replicas with a backing file: what they send each other is without it, and zeros that hide it are not lost.

use crate::backup::Place;
use crate::files::{received, receiver};
use crate::support::*;
use longhorn_sync::image::{Interval, Source, SparseFile};
use longhorn_wire::proto::ptypes::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// Blocks of the image.
const IMAGE: u64 = 2000;

fn image(dir: &Path, name: &str, salt: u8) -> PathBuf {
    let bytes: Vec<u8> = (0..IMAGE * BLOCK).map(|at| (at / BLOCK) as u8 ^ salt | 1).collect();
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn on(image: Option<&Path>, volume: &'static str) -> Setup {
    let backing_file = image.map(Path::to_owned);
    Setup { volume, backing_file, ..Setup::default() }
}

/// Writes over the image, zeros in its oldest layer, at and behind its end, too, and both again in another one.
fn sample(node: &Node, volume: &str) {
    let discard = |block: u64, blocks: u64| {
        node.store.volume(volume).unwrap().discard(block * BLOCK, blocks * BLOCK).unwrap();
    };
    node.write(0..10, 1);
    discard(20, 10);
    discard(IMAGE - 10, 20);
    discard(3000, 500);
    node.snapshot("a");
    node.write(25..40, 2);
    discard(5, 2);
    node.snapshot("b");
    node.write(0..3, 3);
}

fn data_of(path: &Path) -> Vec<(u64, u64)> {
    let all = SparseFile::source(path).unwrap().intervals(0, usize::MAX).unwrap();
    let blocks = |i: &Interval| (i.offset / BLOCK, i.end() / BLOCK);
    all.iter().filter(|i| i.data).map(blocks).collect()
}

#[test]
fn layers_and_exports_say_what_hides_the_file() {
    let runtime = runtime();
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), "image", 2);
    let node = Node::with(&runtime, on(Some(&image), VOLUME));
    sample(&node, VOLUME);
    let path = dir.path().join("file");
    // The oldest layer: its zeros hide the file, which has nothing behind its end.
    let (port, task) = receiver(&node, &path);
    node.send("volume-snap-a.img", port, false).unwrap();
    assert!(received(&node, task));
    assert_eq!(data_of(&path), [(0, 10), (20, 30), (IMAGE - 10, IMAGE)]);
    assert!(fs::read(&path).unwrap() == node.layer("a").1);
    // What one reads, without the file and with it.
    let wanted = node.content("vol@b");
    for with_file in [false, true] {
        let path = dir.path().join(format!("export {with_file}"));
        let (port, task) = receiver(&node, &path);
        let request = VolumeExportRequest {
            snapshot_file_name: "b".to_owned(),
            host: "127.0.0.1".to_owned(),
            port: port.into(),
            export_backing_image_if_exist: with_file,
            file_sync_http_client_timeout: 30,
        };
        node.call(|mut c| async move { c.volume_export(request).await }).unwrap();
        assert!(received(&node, task));
        let mut exported = fs::read(&path).unwrap();
        if !with_file {
            assert_eq!(data_of(&path), [(0, 10), (20, 40), (IMAGE - 10, IMAGE)]);
            let end = (40 * BLOCK) as usize;
            assert!(exported[end..].iter().all(|byte| *byte == 0));
            let holes = (10 * BLOCK) as usize..(20 * BLOCK) as usize;
            for range in [holes, end..wanted.len()] {
                exported[range.clone()].copy_from_slice(&wanted[range]);
            }
        }
        assert!(exported == wanted, "with the file: {with_file}");
    }
}

#[test]
fn a_clone_rests_on_the_same_file_or_is_none() {
    let runtime = runtime();
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (image(dir.path(), "image", 2), image(dir.path(), "other", 5));
    let copy = image(dir.path(), "a copy elsewhere", 2);
    let source = Node::with(&runtime, on(Some(&path), "origin"));
    sample(&source, "origin");
    let clone = |target: &Node| {
        let request = SnapshotCloneRequest {
            from_address: source.address.clone(),
            to_host: "tcp://127.0.0.1".to_owned(),
            snapshot_file_name: "b".to_owned(),
            file_sync_http_client_timeout: 30,
            from_volume_name: "origin".to_owned(),
            ..Default::default()
        };
        target.call(|mut c| async move { c.snapshot_clone(request).await })
    };
    for wrong in [None, Some(&*other)] {
        let target = Node::with(&runtime, on(wrong, VOLUME));
        let before = target.content(VOLUME);
        let refused = clone(&target).unwrap_err();
        assert!(refused.message().contains("backing file"), "{refused}");
        assert!(target.content(VOLUME) == before && target.snapshots().is_empty());
    }
    let target = Node::with(&runtime, on(Some(&copy), VOLUME));
    clone(&target).unwrap();
    assert!(target.content(VOLUME) == source.content("origin@b"));
    // Blocks 0 to 9 but for two, and 25 to 39: nothing of the file.
    assert_eq!(target.agent.traffic().received.load(Ordering::Relaxed), (8 + 15) * BLOCK);
    assert_eq!(target.store.check().unwrap().findings, []);
}

/// What is compared is what the volume in the store rests on, not what the process was given.
#[test]
fn the_store_says_which_file_is_below() {
    let runtime = runtime();
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "image", 2);
    let node = Node::with(&runtime, on(None, VOLUME));
    assert_eq!(node.replica.backing_identity().unwrap(), "");
    node.replica.close().unwrap();
    node.store.delete_volume(VOLUME).unwrap();
    let file = dbs_backing::open(&path).unwrap();
    node.store.create_backed(VOLUME, 64 * MIB, &file).unwrap();
    assert_eq!(node.replica.backing_identity().unwrap(), file.identity());
    assert!(node.replica.check_same_below("").is_err());
    node.replica.check_same_below(file.identity()).unwrap();
}

fn files(names: &[&str]) -> Vec<SyncFileInfo> {
    let file = |name: &&str| SyncFileInfo {
        from_file_name: (*name).to_owned(),
        to_file_name: (*name).to_owned(),
        actual_size: 0,
    };
    names.iter().map(file).collect()
}

fn rebuild(target: &Node, source: &Node, local: Option<&Path>) -> Outcome<()> {
    let request = FilesSyncRequest {
        from_address_map: [(source.address.clone(), true)].into(),
        to_host: "127.0.0.1".to_owned(),
        sync_file_info_list: files(&["volume-snap-a.img"]),
        fast_sync: true,
        file_sync_http_client_timeout: 30,
        local_sync: local.map(|dir| FileLocalSync {
            source_path: dir.to_str().unwrap().to_owned(),
            target_path: "/unused".to_owned(),
        }),
        ..Default::default()
    };
    target.call(|mut c| async move { c.files_sync(request).await })
}

/// Layers say which file they lie on; who cannot say it, as upstream's, says at least whether there is one.
#[test]
fn a_rebuild_is_from_replicas_on_the_same_file() {
    let runtime = runtime();
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (image(dir.path(), "image", 2), image(dir.path(), "other", 5));
    let images = [None, Some(&*path), Some(&*other)];
    for silent in [false, true] {
        for (from, to) in [(0, 1), (1, 0), (1, 2), (0, 0), (1, 1)] {
            let source = Node::with(&runtime, Setup { silent, ..on(images[from], VOLUME) });
            source.write(0..10, 1);
            source.snapshot("a");
            let target = Node::with(&runtime, on(images[to], VOLUME));
            target.replica.set_rebuilding(true).unwrap();
            let outcome = rebuild(&target, &source, None);
            let what = format!("from {from} to {to}, silent: {silent}: {outcome:?}");
            let refused =
                outcome.as_ref().err().is_some_and(|e| e.message().contains("backing file"));
            // Two files are not told from one another by upstream, whose manager compares them.
            assert_eq!(
                refused,
                if silent { (from == 0) != (to == 0) } else { from != to },
                "{what}"
            );
            assert_eq!(outcome.is_ok(), !silent && from == to, "{what}");
        }
    }
}

#[test]
fn files_of_a_replica_with_a_backing_file_are_not_copied_to_one_without() {
    let runtime = runtime();
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "image", 2);
    let layer = fs::File::create(dir.path().join("volume-snap-a.img")).unwrap();
    layer.set_len(64 * MIB).unwrap();
    for (theirs, ours) in
        [("", None), ("/images/x", Some(&*path)), ("/images/x", None), ("", Some(&path))]
    {
        let meta = format!("{{\"Size\":67108864,\"BackingFilePath\":\"{theirs}\"}}");
        fs::write(dir.path().join("volume.meta"), meta).unwrap();
        let source = Node::with(&runtime, Setup { silent: true, ..on(ours, VOLUME) });
        let host = Some(PathBuf::from("/"));
        let target = Node::with(&runtime, Setup { host, ..on(ours, VOLUME) });
        target.replica.set_rebuilding(true).unwrap();
        let copied = rebuild(&target, &source, Some(dir.path())).is_ok();
        assert_eq!(copied, theirs.is_empty() == ours.is_none(), "{theirs:?} to {ours:?}");
    }
}

/// Asks for a backup that names the image.
fn named(place: &Place, snapshot: &str, backup: &str) -> BackupCreateRequest {
    BackupCreateRequest {
        backing_image_name: "image".to_owned(),
        backing_image_checksum: "sum".to_owned(),
        ..place.request(snapshot, backup)
    }
}

fn backed_up(node: &Node, request: BackupCreateRequest) {
    let backup = request.backup_name.clone();
    node.backup(request).unwrap();
    let status = node.backup_end(&backup);
    assert_eq!((status.state.as_str(), status.error.as_str()), ("complete", ""), "{backup}");
}

/// A backup that names the image is for a volume on the image: it has what hides the image, zeros too.
#[test]
fn backups_are_of_what_hides_the_file() {
    let runtime = runtime();
    let (dir, place) = (tempfile::tempdir().unwrap(), Place::new());
    let other = Place::new();
    let image = image(dir.path(), "image", 2);
    let node = Node::with(&runtime, on(Some(&image), VOLUME));
    for at in [0, 20 * MIB] {
        node.store.volume(VOLUME).unwrap().discard(at, 2 * MIB).unwrap();
    }
    node.write(600..610, 1);
    node.snapshot("a");
    backed_up(&node, named(&place, "a", "backup-1"));
    assert_eq!(place.blocks(), 2, "zeros, and what was written; nothing that only the file has");
    // Found by review: nor zeros where the file has nothing.
    assert_eq!(place.store().backup(VOLUME, "backup-1").unwrap().size, 4 * MIB);

    // Who names none later means that one, as with upstream's engine.
    node.write([700], 2);
    node.snapshot("b");
    backed_up(&node, place.request("b", "backup-2"));
    let (volume, backup) = (place.store().volume(VOLUME), place.store().backup(VOLUME, "backup-2"));
    let (volume, backup) = (volume.unwrap(), backup.unwrap());
    let name = (volume.backing_image_name.as_str(), volume.backing_image_checksum.as_str());
    assert_eq!((name, backup.size, backup.is_incremental), (("image", "sum"), 4 * MIB, true));

    // If none is named, it has what the image has, too.
    node.backed_up(&other, "a", "backup-1");
    assert!(other.content("backup-1", 64 * MIB) == node.content("vol@a"));

    // Its zeros would not be there: nothing says where there is an image to hide.
    let plain = Node::new(&runtime);
    plain.snapshot("a");
    let refused = plain.backup(named(&place, "a", "backup-3")).unwrap_err();
    assert!(refused.message().contains("and its backup is to name image"), "{refused}");
}

#[test]
fn backups_are_restored_over_the_file() {
    let runtime = runtime();
    let (dir, place) = (tempfile::tempdir().unwrap(), Place::new());
    let path = image(dir.path(), "image", 2);
    let source = Node::with(&runtime, on(Some(&path), VOLUME));
    let bare = source.content(VOLUME);
    sample(&source, VOLUME);
    for (snapshot, backup) in [("a", "backup-1"), ("b", "backup-2")] {
        backed_up(&source, named(&place, snapshot, backup));
    }
    // Of another branch, which does not hide what the first one does.
    let branch = Node::with(&runtime, on(Some(&path), VOLUME));
    branch.write([1500], 7);
    branch.snapshot("c");
    backed_up(&branch, named(&place, "c", "backup-3"));
    // Nothing was written at all.
    let unwritten = Node::with(&runtime, on(Some(&path), VOLUME));
    unwritten.snapshot("d");
    backed_up(&unwritten, named(&place, "d", "backup-4"));
    assert_eq!(place.store().backup(VOLUME, "backup-4").unwrap().size, 0);

    let target = Node::with(&runtime, on(Some(&path), VOLUME));
    let wanted = [
        ("backup-1", source.content("vol@a")),
        ("backup-2", source.content("vol@b")),
        ("backup-3", branch.content("vol@c")),
        ("backup-4", bare.clone()),
        ("backup-2", source.content("vol@b")),
    ];
    for (backup, content) in &wanted {
        target.restored(&place, backup);
        assert!(target.content(VOLUME) == *content, "{backup}");
    }

    // Without the image it would be another volume.
    let plain = Node::new(&runtime);
    let refused = plain.restore(&place, "backup-1").unwrap_err();
    assert!(refused.message().contains("has no backing file"), "{refused}");
}

/// What a backup that names no image does not have is zeros, whatever is below.
#[test]
fn backups_without_an_image_are_restored_over_a_file() {
    let runtime = runtime();
    let (dir, place) = (tempfile::tempdir().unwrap(), Place::new());
    let path = image(dir.path(), "image", 2);
    let plain = Node::new(&runtime);
    for (at, snapshot) in [(10, "a"), (900, "b")] {
        plain.write([at], 1);
        plain.snapshot(snapshot);
        plain.backed_up(&place, snapshot, &format!("backup-{snapshot}"));
    }
    assert_eq!(place.store().backup(VOLUME, "backup-b").unwrap().size, 4 * MIB);
    let target = Node::with(&runtime, on(Some(&path), VOLUME));
    for snapshot in ["a", "b", "a"] {
        target.restored(&place, &format!("backup-{snapshot}"));
        assert!(target.content(VOLUME) == plain.content(&format!("vol@{snapshot}")), "{snapshot}");
    }
}
