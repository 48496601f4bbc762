//! Clone: a snapshot of another volume becomes this one's content.

use crate::support::*;
use longhorn_replica::replica::meta::DiskMeta;
use longhorn_replica::replica::{Replica as Engine, ReplicaOptions, StoreSource};
use longhorn_wire::proto::ptypes::*;
use std::sync::atomic::Ordering;
use tonic::Code;

fn clone(source: &Node, target: &Node, snapshot: &str) -> Outcome<()> {
    let request = request(&source.address, snapshot);
    target.call(|mut c| async move { c.snapshot_clone(request).await })
}

fn request(from: &str, snapshot: &str) -> SnapshotCloneRequest {
    SnapshotCloneRequest {
        from_address: from.to_owned(),
        to_host: "tcp://127.0.0.1".to_owned(),
        snapshot_file_name: snapshot.to_owned(),
        file_sync_http_client_timeout: 30,
        from_volume_name: "origin".to_owned(),
        ..Default::default()
    }
}

fn status(node: &Node) -> SnapshotCloneStatusResponse {
    node.call(|mut c| async move { c.snapshot_clone_status(()).await }).unwrap()
}

fn origin() -> Setup {
    Setup { volume: "origin", ..Setup::default() }
}

#[test]
fn a_snapshot_is_cloned_with_its_holes() {
    let runtime = runtime();
    let source = Node::with(&runtime, origin());
    let target = Node::new(&runtime);
    source.write((0..4000).step_by(3), 1);
    source.snapshot("a");
    source.write(100..200, 2);
    source.store.volume("origin").unwrap().discard(0, 300 * BLOCK).unwrap();
    source.snapshot("b");
    source.write(0..4000, 3);
    assert_eq!(status(&target), Default::default());
    clone(&source, &target, "b").unwrap();
    let done = status(&target);
    assert_eq!((done.state.as_str(), done.progress, done.is_cloning), ("complete", 100, false));
    assert_eq!((&done.from_replica_address, done.snapshot_name.as_str()), (&source.address, "b"));
    let wanted = source.content("origin@b");
    assert!(target.content(VOLUME) == wanted);
    assert!(target.content("vol@b") == wanted);
    let disks = target.replica.disks().unwrap();
    let disk = &disks["volume-snap-b.img"];
    assert_eq!((disk.parent.as_str(), disk.removed, disk.user_created), ("", false, false));
    // 1334 blocks less the 100 discarded; what was written in between is among those.
    assert_eq!(disk.allocated, 1234 * BLOCK);
    assert_eq!(target.agent.traffic().received.load(Ordering::Relaxed), 1234 * BLOCK);
    let head = target.replica.head_disk().unwrap();
    assert_eq!(disks[&head].parent, "volume-snap-b.img");
    assert!(!target.replica.get().unwrap().rebuilding);
    assert_eq!(target.store.check().unwrap().findings, []);
    // It goes on as a volume of its own.
    target.write(0..10, 9);
    assert!(source.content("origin@b") == wanted);
}

/// Found by review: where one replica had it and another had failed, asking again failed for ever; and then, one that had
/// it gave that up before it had new content.
#[test]
fn a_clone_can_be_asked_for_again() {
    let runtime = runtime();
    let source = Node::with(&runtime, Setup { checksums: true, ..origin() });
    let target = Node::new(&runtime);
    source.write(0..100, 1);
    source.snapshot("a");
    source.write(50..60, 2);
    source.snapshot("b");
    let wanted = source.content("origin@a");
    let name = "volume-snap-a.img";
    // Its process ended before the head was put on it.
    let incoming = target.replica.incoming();
    incoming.begin_clone().unwrap();
    incoming.begin(name, 64 * MIB).unwrap();
    incoming.put_meta(name, DiskMeta::default()).unwrap();
    incoming.end_clone(true).unwrap();
    assert_eq!(target.snapshots(), ["a"]);
    let is_cloned = || {
        let head = target.replica.head_disk().unwrap();
        let disks = target.replica.disks().unwrap();
        assert_eq!(
            (target.snapshots(), disks[&head].parent.as_str()),
            (vec!["a".to_owned()], name)
        );
        assert!(target.content(VOLUME) == wanted);
    };
    for _ in 0..2 {
        clone(&source, &target, "a").unwrap();
        assert_eq!(status(&target).state, "complete");
        is_cloned();
    }
    // A source that fails in the middle.
    source.damage("origin@a", 70);
    clone(&source, &target, "a").unwrap_err();
    assert_eq!(status(&target).state, "error");
    is_cloned();
    assert_eq!(target.store.layers(VOLUME).unwrap().len(), 2);
    // Not once it is in use.
    target.write(0..1, 9);
    let content = target.content(VOLUME);
    let refused = clone(&source, &target, "a").unwrap_err();
    assert!(refused.message().contains("already existing"), "{refused}");
    assert!(target.content(VOLUME) == content);
    assert_eq!(target.store.check().unwrap().findings, []);
}

#[test]
fn what_cannot_be_cloned_is_refused_and_leaves_nothing() {
    let runtime = runtime();
    let source = Node::with(&runtime, origin());
    let target = Node::new(&runtime);
    let text = |outcome: Outcome<()>| outcome.unwrap_err().message().to_owned();
    let refused = text(clone(&source, &target, "x"));
    assert!(refused.contains("cannot find snapshot x in the source replica tcp://"), "{refused}");
    // With no snapshot, or nobody there, nothing has begun: who asks for the status does not take it for the end.
    assert_eq!(status(&target), Default::default());
    let nobody = request("tcp://127.0.0.1:1", "x");
    target.call(|mut c| async move { c.snapshot_clone(nobody).await }).unwrap_err();
    assert_eq!(status(&target), Default::default());
    source.write(0..10, 1);
    source.snapshot("a");
    let small = Node::with(&runtime, Setup { size: 32 * MIB, ..Setup::default() });
    let refused = text(clone(&source, &small, "a"));
    assert!(refused.contains("cannot be cloned into"), "{refused}");
    let failed = status(&small);
    assert_eq!((failed.state.as_str(), failed.is_cloning), ("error", false));
    assert_eq!(failed.error, refused);
    let other = Node::with(&runtime, Setup { volume: "third", ..Setup::default() });
    let refused = clone(&other, &target, "a").unwrap_err();
    assert!(refused.message().contains("incorrect volume name origin"), "{refused}");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(target.snapshots().is_empty());
    assert!(!target.replica.get().unwrap().rebuilding);
    assert_eq!(target.content(VOLUME), vec![0; 64 * MIB as usize]);
    clone(&source, &target, "a").unwrap();
    assert_eq!(target.snapshots(), ["a"]);
}

/// Parts of its content may be gone, and nobody would notice.
#[test]
fn a_snapshot_that_is_marked_as_removed_is_not_cloned() {
    let runtime = runtime();
    let (source, target) = (Node::with(&runtime, origin()), Node::new(&runtime));
    source.write(0..1, 1);
    source.snapshot("s");
    source.write(0..1, 2);
    source.replica.mark_removed("s").unwrap();
    assert_eq!(source.purged().state, "complete");
    let refused = clone(&source, &target, "s").unwrap_err();
    assert!(refused.message().contains("is marked as removed"), "{refused}");
    assert!(target.snapshots().is_empty());
    // The source looks as well: the mark may come between two connections.
    let info = crate::peer::layer(&source, "volume-snap-s.img", true);
    let first = crate::peer::start("volume-snap-s.img", true, &info.stamp);
    let refused = crate::peer::fetch(&source, vec![first]).unwrap_err();
    assert!(refused.message().contains("is marked as removed"), "{refused}");
    let dir = tempdir();
    let (port, _task) = crate::files::receiver(&source, &dir.path().join("s"));
    let refused = source.export("s", port).unwrap_err();
    assert!(refused.message().contains("is marked as removed"), "{refused}");
}

/// Where replicas share a store, the replica that comes next finds the store as its predecessor has left it, in
/// the same process.
#[test]
fn a_clone_under_way_ends_with_its_replica() {
    let runtime = runtime();
    let (source, target) = (Node::with(&runtime, origin()), Node::new(&runtime));
    source.write(0..8000, 1);
    source.snapshot("s");
    let (address, passed) = stalling(&source, 2 * MIB);
    let (mut client, request) = (target.client.clone(), request(&address, "s"));
    let call = runtime.spawn(async move { client.snapshot_clone(request).await });
    wait(|| (passed.load(Ordering::SeqCst) > 2 * MIB).then_some(()));
    assert!(target.store.layers(VOLUME).unwrap().len() > 1, "a layer is coming in");
    target.replica.surrender(None).unwrap();
    let options = ReplicaOptions::new(target.dir.path(), VOLUME);
    let next = Engine::new(options, StoreSource::Own(target.store.clone())).unwrap();
    assert_eq!(target.store.layers(VOLUME).unwrap().len(), 1);
    assert!(!target.store.volume_info(VOLUME).unwrap().rebuilding);
    next.open(false, 0).unwrap();
    let ended = runtime.block_on(call).unwrap().unwrap_err();
    assert!(ended.message().contains("gave up its store"), "{ended}");
}
