//! Purge: what goes, what stays, and that nobody sees a difference in what is left.

use crate::support::*;
use dbs_core::store::SnapshotOptions;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What one reads through the head and the given snapshots.
fn contents(node: &Node, snapshots: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let specs = snapshots.iter().map(|name| format!("{VOLUME}@{name}"));
    let all = specs.chain([VOLUME.to_owned()]);
    all.map(|spec| (spec.clone(), node.content(&spec))).collect()
}

#[test]
fn removed_and_system_snapshots_go_and_contents_stay() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    node.write(0..2000, 1);
    node.snapshot("a");
    node.write((0..2000).step_by(3), 2);
    node.snapshot("b");
    node.write((0..2000).step_by(7), 3);
    node.system_snapshot("c");
    node.discard(100, 50);
    node.write(3000..3100, 4);
    node.snapshot("d");
    node.write((0..4000).step_by(11), 5);
    assert_eq!(node.purge_status().state, "");
    node.replica.mark_removed("b").unwrap();
    let before = contents(&node, &["a", "d"]);
    let status = node.purged();
    assert_eq!((status.state.as_str(), status.error.as_str()), ("complete", ""));
    assert_eq!((status.progress, status.is_purging), (100, false));
    assert_eq!(node.snapshots(), ["a", "d"]);
    assert_eq!(contents(&node, &["a", "d"]), before);
    // Space is back: nothing is left to be merged.
    assert_eq!(node.store.merging_remaining(VOLUME).unwrap(), 0);
    assert_eq!(node.store.check().unwrap().findings, []);
    // Nothing to do is done at once.
    assert_eq!(node.purged().progress, 100);
    assert_eq!(contents(&node, &["a", "d"]), before);
}

#[test]
fn what_is_under_the_head_is_pruned_and_stays_listed() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    node.write(0..1000, 1);
    node.snapshot("a");
    node.write(500..1500, 2);
    node.snapshot("b");
    node.write(800..1200, 3);
    for name in ["a", "b"] {
        node.replica.mark_removed(name).unwrap();
    }
    let before = node.content(VOLUME);
    assert_eq!(node.purged().state, "complete");
    assert_eq!(node.snapshots(), ["b"]);
    assert_eq!(node.content(VOLUME), before);
    // What the head overrides is given up: 1500 blocks, less 400.
    let left = node.replica.disks().unwrap()["volume-snap-b.img"].allocated;
    assert_eq!(left, 1100 * BLOCK);
    assert_eq!(node.store.check().unwrap().findings, []);
}

#[test]
fn side_branches_go_from_their_ends() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    node.write(0..100, 1);
    node.snapshot("root");
    node.write(0..50, 2);
    node.snapshot("side1");
    node.write(50..60, 3);
    node.snapshot("side2");
    node.replica.revert("volume-snap-root.img", NOW).unwrap();
    node.write(60..70, 4);
    node.snapshot("main");
    // The root has two children: it stays, though marked, while both are there.
    node.replica.mark_removed("root").unwrap();
    let before = contents(&node, &["main", "side1", "side2"]);
    assert_eq!(node.purged().state, "complete");
    assert_eq!(node.snapshots(), ["main", "root", "side1", "side2"]);
    assert_eq!(contents(&node, &["main", "side1", "side2"]), before);
    for name in ["side1", "side2"] {
        node.replica.mark_removed(name).unwrap();
    }
    assert_eq!(node.purged().state, "complete");
    assert_eq!(node.snapshots(), ["main"]);
    assert_eq!(node.content(VOLUME), before[VOLUME]);
    assert_eq!(node.content("vol@main"), before["vol@main"]);
}

#[test]
fn it_is_refused_while_it_runs_and_while_rebuilding() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    node.replica.set_rebuilding(true).unwrap();
    let refused = node.purge().unwrap_err();
    assert!(refused.message().contains("rebuilding"), "{refused}");
    node.replica.set_rebuilding(false).unwrap();
    node.write(0..8000, 1);
    node.snapshot("a");
    node.write(0..8000, 2);
    node.snapshot("b");
    node.replica.mark_removed("a").unwrap();
    node.purge().unwrap();
    // It may be over by now; if not, a second one is refused.
    if let Err(refused) = node.purge() {
        assert_eq!(refused.message(), "replica is already purging snapshots");
    }
    wait(|| Some(()).filter(|()| !node.purge_status().is_purging));
    assert_eq!(node.snapshots(), ["b"]);
    // A closed replica has nothing to purge.
    node.replica.mark_removed("b").unwrap();
    node.replica.close().unwrap();
    assert_eq!(node.purged().state, "complete");
    assert_eq!(node.snapshots(), ["b"]);
}

/// Found by review: one that somebody read kept all others, and the trees of the volume's replicas differed.
#[test]
fn what_somebody_reads_keeps_nothing_else() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    for name in ["a", "b", "c"] {
        node.write(0..10, 1);
        node.snapshot(name);
    }
    node.snapshot("d");
    for name in ["a", "c"] {
        node.replica.mark_removed(name).unwrap();
    }
    let reads = node.store.volume("vol@a").unwrap();
    let status = node.purged();
    assert!(status.error.contains("volume-snap-a.img"), "{}", status.error);
    assert_eq!(node.snapshots(), ["a", "b", "d"]);
    drop(reads);
    assert_eq!(
        (node.purged().error.as_str(), node.snapshots()),
        ("", vec!["b".to_owned(), "d".to_owned()])
    );
}

#[test]
fn reset_forgets_how_it_went() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    assert_eq!(node.purged().state, "complete");
    node.call(|mut c| async move { c.reset(()).await }).unwrap();
    assert_eq!(node.purge_status(), Default::default());
}

#[test]
fn it_ends_when_the_replica_is_closed() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    for name in ["a", "b", "c"] {
        node.write(0..100, 1);
        node.snapshot(name);
    }
    for name in ["a", "b"] {
        node.replica.mark_removed(name).unwrap();
    }
    // A purge waits for whoever reads.
    let read = node.store.layer(VOLUME, Some("a")).unwrap();
    node.purge().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(node.purge_status().is_purging);
    node.replica.close().unwrap();
    let closed = Instant::now();
    while node.purge_status().is_purging && closed.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(20));
    }
    if node.purge_status().is_purging {
        // So that it ends, and the test.
        drop(read);
        node.replica.open(false, 0).unwrap();
        panic!("it goes on");
    }
    assert!(node.purge_status().error.contains("the replica was closed"));
    drop(read);
    assert_eq!(node.snapshots(), ["a", "b", "c"]);
}

/// Earlier versions took them: no file has such a name, but nothing needs one.
#[test]
fn a_snapshot_whose_name_is_too_long_for_files_goes() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    let name = "n".repeat(240);
    node.write(0..100, 1);
    node.store.create_snapshot(VOLUME, &name, &SnapshotOptions::default()).unwrap();
    node.write(50..150, 2);
    node.snapshot("b");
    node.replica.mark_removed(&name).unwrap();
    let before = contents(&node, &["b"]);
    let status = node.purged();
    assert_eq!((status.state.as_str(), status.error.as_str()), ("complete", ""));
    assert_eq!(node.snapshots(), ["b"]);
    assert_eq!(contents(&node, &["b"]), before);
}
