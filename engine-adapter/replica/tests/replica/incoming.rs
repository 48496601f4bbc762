//! What comes in from other replicas: unseen until a reload, then like the source; interrupted,
//! repeated, refused.

use crate::support::*;
use dbs_core::ErrorKind;
use dbs_core::info::LayerState;
use dbs_core::volume::{Request, Start};
use longhorn_replica::replica::Disk;
use longhorn_replica::replica::meta::DiskMeta;
use longhorn_wire::names;
use longhorn_wire::proto::ptypes::Replica;
use std::collections::BTreeMap;

const BLOCKS: u64 = SIZE / BLOCK as u64;

fn created(size: u64) -> Bench {
    let bench = Bench::new();
    bench.create(&size.to_string()).unwrap();
    bench.open();
    bench
}

fn snapshots(bench: &Bench) -> BTreeMap<String, Disk> {
    let disks = bench.replica.disks().unwrap().into_iter();
    disks.filter(|(_, disk)| disk.snapshot.is_some()).collect()
}

/// Sends one layer; how many bytes were data.
fn send_layer(from: &Bench, to: &Bench, name: &str) -> u64 {
    let snapshot = names::snapshot_name(name).unwrap();
    let source = from.store.as_ref().unwrap().layer("vol", Some(snapshot)).unwrap();
    let existed = to.replica.incoming().existing(name).unwrap().is_some();
    let target = to.replica.incoming().begin(name, source.size()).unwrap();
    assert_eq!(target.size(), source.size());
    let (mut at, mut sent) = (0, 0);
    while at < source.size() {
        for range in source.map(at, source.size() - at, 16).unwrap() {
            match range.state {
                LayerState::Data => {
                    let mut bytes = vec![0; range.length as usize];
                    source.read_at(range.offset, &mut bytes).unwrap();
                    target.write_at(range.offset, &bytes).unwrap();
                    sent += range.length;
                }
                LayerState::Zero => target.zero(range.offset, range.length).unwrap(),
                LayerState::Absent if existed => target.clear(range.offset, range.length).unwrap(),
                LayerState::Absent => {}
            }
            at = range.offset + range.length;
        }
    }
    sent
}

fn meta(disk: &Disk) -> DiskMeta {
    DiskMeta {
        name: "volume-head-000.img".to_owned(),
        parent: disk.parent.clone(),
        removed: disk.removed,
        user_created: disk.user_created,
        created: disk.created.clone(),
        labels: disk.labels.clone(),
    }
}

/// What the engine does before files are sent: marks the target, removes what the source lacks, and
/// sends the head's description.
fn prepare(from: &Bench, to: &Bench) {
    to.rebuilding(true).unwrap();
    for name in snapshots(to).keys().filter(|name| !snapshots(from).contains_key(*name)) {
        to.remove(name, true).unwrap();
    }
    let head = to.replica.head_disk().unwrap();
    let parent = from.get().parent;
    to.replica.incoming().put_meta(&head, DiskMeta { parent, ..Default::default() }).unwrap();
}

/// Sends everything in an order that parents do not come first in.
fn send(from: &Bench, to: &Bench) {
    for (name, disk) in snapshots(from).iter().rev() {
        to.replica.incoming().put_meta(name, meta(disk)).unwrap();
        send_layer(from, to, name);
    }
    to.replica.incoming().flush().unwrap();
}

fn rebuild(from: &Bench, to: &Bench) {
    prepare(from, to);
    send(from, to);
    to.reload().unwrap();
    to.rebuilding(false).unwrap();
}

/// Both show the same, but for the head's name and counters.
fn same(a: &Bench, b: &Bench) {
    let shape = |replica: &Replica| {
        let head = replica.head.clone();
        let bare = |name: &str| if name == head { "head".to_owned() } else { name.to_owned() };
        let disks: BTreeMap<_, _> = replica
            .disks
            .iter()
            .map(|(name, disk)| {
                let mut disk = disk.clone();
                disk.name = bare(&disk.name);
                disk.children = disk.children.keys().map(|name| (bare(name), true)).collect();
                if *name == head {
                    disk.created.clear();
                    disk.size.clear();
                }
                (bare(name), format!("{disk:?}").len(), disk)
            })
            .map(|(name, _, disk)| (name, disk))
            .collect();
        let chain: Vec<_> = replica.chain.iter().map(|name| bare(name)).collect();
        (disks, chain, replica.parent.clone(), replica.size.clone())
    };
    assert_eq!(shape(&a.get()), shape(&b.get()));
    for (name, disk) in snapshots(a) {
        assert_eq!(snapshots(b)[&name].size, disk.size, "{name}");
        let spec = format!("vol@{}", disk.snapshot.unwrap());
        assert!(content(a, &spec) == content(b, &spec), "{name} differs");
    }
}

fn content(bench: &Bench, spec: &str) -> Vec<u8> {
    let volume = bench.store.as_ref().unwrap().volume(spec).unwrap();
    let mut bytes = vec![0; volume.size() as usize];
    volume.read_at(0, &mut bytes).unwrap();
    bytes
}

/// A tree with side branches, marks, labels, discards and layers of two sizes.
fn source() -> Bench {
    let bench = created(SIZE);
    (0..20).for_each(|block| bench.write(block, 1));
    bench.snapshot_as("a", true, NOW, &[("k", "v")]).unwrap();
    (0..5).for_each(|block| bench.write(block, 2));
    bench.active().events().unmap(10 * 4096, 3 * 4096).unwrap();
    bench.snapshot_as("b", false, "2026-08-21T10:00:00.5", &[]).unwrap();
    bench.write(BLOCKS - 1, 3);
    bench.snapshot("c");
    bench.revert("a");
    bench.write(3, 4);
    bench.expand(2 * SIZE as i64).unwrap();
    bench.write(BLOCKS + 7, 5);
    bench.snapshot("d");
    bench.mark("b").unwrap();
    bench
}

/// The engine adds a replica: a snapshot on both, and from then on writes go to both.
fn join(from: &Bench, to: &Bench) {
    for bench in [from, to] {
        bench.snapshot_as("joined", false, NOW, &[]).unwrap();
    }
}

fn write_both(benches: [&Bench; 2], block: u64, byte: u8) {
    benches.iter().for_each(|bench| bench.write(block, byte));
}

#[test]
fn a_new_replica_becomes_the_source() {
    let from = source();
    let to = created(2 * SIZE);
    join(&from, &to);
    write_both([&from, &to], 0, 77);
    prepare(&from, &to);
    let before = to.get();
    send(&from, &to);
    write_both([&from, &to], BLOCKS + 1, 78);
    let after = to.get();
    assert_eq!((before.chain, before.disks.len()), (after.chain, after.disks.len()), "unseen");
    let r = to.reload().unwrap();
    assert_eq!((r.state.as_str(), r.disks.len()), ("rebuilding", from.get().disks.len()));
    assert_eq!(to.rebuilding(false).unwrap().state, "dirty");
    same(&from, &to);
    let blocks = [0, 3, 4, 11, BLOCKS - 1, BLOCKS + 1, BLOCKS + 7];
    assert_eq!(blocks.map(|block| to.read(block)), blocks.map(|block| from.read(block)));
    assert_eq!(content(&from, "vol"), content(&to, "vol"));
    // It is an ordinary replica: also after a restart, and for removal.
    to.close();
    let to = Bench::on(to.end(), |_| {});
    assert_eq!(to.open().state, "open");
    same(&from, &to);
    for bench in [&from, &to] {
        bench.remove(&disk("a"), true).unwrap();
        bench.remove(&disk("joined"), false).unwrap();
        bench.work();
    }
    assert_eq!(content(&from, "vol"), content(&to, "vol"));
}

/// Found by review: content of a replica that has "a" below it, described by one that has merged "a" into it.
#[test]
fn content_and_description_have_the_same_parent() {
    let (from, to) = (source(), created(2 * SIZE));
    join(&from, &to);
    prepare(&from, &to);
    send(&from, &to);
    let _fill = to.replica.incoming().begin_fill();
    let (name, b) = (disk("b"), snapshots(&from).remove(&disk("b")).unwrap());
    let merged = DiskMeta { parent: String::new(), ..meta(&b) };
    to.replica.incoming().put_meta(&name, merged.clone()).unwrap();
    to.replica.incoming().came_in(&name, Some(&meta(&b))).unwrap();
    let refused = to.replica.reload().unwrap_err();
    assert!(refused.to_string().contains("differ in what it lies on (nothing, a)"), "{refused}");
    assert!(!snapshots(&to).contains_key(&name));
    // What is sent anew may be of another state.
    let _fill = to.replica.incoming().begin_fill();
    to.replica.incoming().put_meta(&name, meta(&b)).unwrap();
    to.reload().unwrap();
    same(&from, &to);
}

/// The head that was described is a snapshot by the time of the reload: the chain goes through it.
#[test]
fn snapshots_taken_meanwhile_keep_their_place() {
    let from = source();
    let to = created(2 * SIZE);
    join(&from, &to);
    write_both([&from, &to], 0, 77);
    prepare(&from, &to);
    send(&from, &to);
    for (block, name) in [(1, "during0"), (2, "during1")] {
        for bench in [&from, &to] {
            bench.snapshot(name);
        }
        write_both([&from, &to], block, 78);
    }
    to.reload().unwrap();
    to.rebuilding(false).unwrap();
    same(&from, &to);
    assert!(content(&from, "vol") == content(&to, "vol"));
    assert_eq!([0, 1, 2].map(|block| to.read(block)), [77, 78, 78]);
}

/// The description of the head comes when that is a snapshot already: what was acknowledged before the
/// snapshot must not leave the chain.
#[test]
fn a_heads_description_that_comes_after_a_snapshot_is_dropped() {
    let from = source();
    let to = created(2 * SIZE);
    join(&from, &to);
    to.rebuilding(true).unwrap();
    let (head, parent) = (to.replica.head_disk().unwrap(), from.get().parent);
    write_both([&from, &to], 0, 77);
    for bench in [&from, &to] {
        bench.snapshot("during");
    }
    to.replica.incoming().put_meta(&head, DiskMeta { parent, ..Default::default() }).unwrap();
    send(&from, &to);
    write_both([&from, &to], 1, 78);
    to.reload().unwrap();
    to.rebuilding(false).unwrap();
    same(&from, &to);
    assert_eq!([0, 1].map(|block| to.read(block)), [77, 78]);
    assert!(content(&from, "vol") == content(&to, "vol"));
}

/// The head that was described is gone by the time of the reload, which put the new one where it was.
#[test]
fn a_revert_meanwhile_stays() {
    let from = source();
    let to = created(2 * SIZE);
    rebuild(&from, &to);
    let parent = from.get().parent;
    assert_ne!(parent, disk("c"));
    to.rebuilding(true).unwrap();
    let head = to.replica.head_disk().unwrap();
    to.replica.incoming().put_meta(&head, DiskMeta { parent, ..Default::default() }).unwrap();
    let reverted = to.revert("c");
    assert_eq!(reverted.parent, disk("c"));
    assert_eq!(to.reload().unwrap().parent, disk("c"));
    assert_eq!(to.rebuilding(false).unwrap().parent, disk("c"));
    let shown = content(&to, "vol@c");
    assert!(content(&to, "vol")[..shown.len()] == shown);
}

#[test]
fn a_replica_that_was_away_is_brought_up_to_date() {
    let from = source();
    let to = created(2 * SIZE);
    rebuild(&from, &to);
    same(&from, &to);
    // It goes away; a snapshot that was never complete, others that the source loses.
    to.write(30, 9);
    to.snapshot("lost");
    to.write(31, 9);
    from.write(40, 6);
    from.snapshot("e");
    from.remove(&disk("c"), false).unwrap();
    from.remove(&disk("b"), false).unwrap();
    from.work();
    join(&from, &to);
    write_both([&from, &to], 50, 7);
    rebuild(&from, &to);
    same(&from, &to);
    assert_eq!([30, 31, 40, 50].map(|block| to.read(block)), [0, 0, 6, 7]);
    assert_eq!(content(&from, "vol"), content(&to, "vol"));
    to.work();
    same(&from, &to);
}

/// A branch point that the others have no more: deleted, it would stay below both of its children.
#[test]
fn a_branch_point_that_the_source_has_no_more_goes() {
    let (from, to) = (created(SIZE), created(SIZE));
    for bench in [&from, &to] {
        bench.write(0, 1);
        bench.snapshot("p");
        bench.write(1, 2);
        bench.snapshot("b");
        bench.revert("p");
    }
    to.write(2, 3);
    // It fails; the others go on, and lose the branch point.
    from.revert("b");
    from.mark("p").unwrap();
    from.remove(&disk("p"), false).unwrap();
    from.work();
    join(&from, &to);
    assert_eq!(snapshots(&to)[&disk("p")].children.len(), 2);
    write_both([&from, &to], 3, 4);
    rebuild(&from, &to);
    same(&from, &to);
    assert!(content(&from, "vol") == content(&to, "vol"));
    to.work();
    assert_eq!(to.store.as_ref().unwrap().layers("vol").unwrap().len(), 3);
}

/// Merging waits for reads that have begun, of whatever volume.
#[test]
fn a_merge_that_waits_for_a_read_is_waited_for() {
    let (from, to) = (created(SIZE), created(SIZE));
    for bench in [&from, &to] {
        for name in ["a", "b"] {
            bench.write(0, 1);
            bench.snapshot(name);
        }
    }
    from.remove(&disk("a"), false).unwrap();
    from.work();
    join(&from, &to);
    let volume = to.store.as_ref().unwrap().volume("vol").unwrap();
    std::thread::scope(|scope| {
        let (begun, told) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let mut read = Request::new();
            assert_eq!(volume.start_read(0, BLOCK as u64, &mut read).unwrap(), Start::Io);
            begun.send(()).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(300));
            read.cancel();
        });
        told.recv().unwrap();
        // What is deleted from now on waits for it.
        prepare(&from, &to);
        send(&from, &to);
    });
    to.reload().unwrap();
    to.rebuilding(false).unwrap();
    same(&from, &to);
}

#[test]
fn what_came_in_before_an_interruption_is_found_again() {
    let from = source();
    let to = created(2 * SIZE);
    prepare(&from, &to);
    send_layer(&from, &to, &disk("a"));
    send_layer(&from, &to, &disk("b"));
    assert_eq!(to.replica.incoming().existing(&disk("a")).unwrap(), Some(SIZE));
    assert_eq!(to.replica.incoming().existing(&disk("c")).unwrap(), None);
    // Descriptions are gone with the process, layers are not, and nothing of it is seen.
    let to = Bench::on(to.kill(), |_| {});
    assert_eq!(to.open().state, "rebuilding");
    assert_eq!(to.reload().unwrap().disks.len(), 1);
    assert_eq!(to.replica.incoming().existing(&disk("a")).unwrap(), Some(SIZE));
    // As the engine does with one that it finds rebuilding.
    to.rebuilding(false).unwrap();
    to.close();
    to.open();
    rebuild(&from, &to);
    same(&from, &to);

    // What is staged and not wanted any more goes at the end.
    let to = created(2 * SIZE);
    prepare(&from, &to);
    let stray = to.replica.incoming().begin(&disk("stray"), SIZE).unwrap();
    stray.write_at(0, &[1; BLOCK]).unwrap();
    drop(stray);
    send(&from, &to);
    to.reload().unwrap();
    to.rebuilding(false).unwrap();
    same(&from, &to);
    let layers = to.store.as_ref().unwrap().layers("vol").unwrap();
    assert_eq!(layers.len(), from.get().disks.len());
    assert_eq!(to.replica.incoming().existing(&disk("stray")).unwrap(), None);
}

#[test]
fn a_layer_of_another_size_is_cut_or_lengthened() {
    let to = created(SIZE);
    to.rebuilding(true).unwrap();
    let incoming = to.replica.incoming();
    let name = disk("x");
    let layer = incoming.begin(&name, SIZE).unwrap();
    layer.write_at(SIZE - 4096, &[1; BLOCK]).unwrap();
    layer.write_at(0, &[2; BLOCK]).unwrap();
    drop(layer);
    let layer = incoming.begin(&name, SIZE / 2).unwrap();
    assert_eq!(layer.size(), SIZE / 2);
    drop(layer);
    let layer = incoming.begin(&name, SIZE).unwrap();
    assert_eq!(layer.size(), SIZE);
    let mut bytes = vec![9; SIZE as usize];
    layer.read_at(0, &mut bytes).unwrap();
    assert!(bytes[..BLOCK].iter().all(|b| *b == 2) && bytes[BLOCK..].iter().all(|b| *b == 0));
}

#[test]
fn what_may_not_come_in() {
    let to = created(SIZE);
    let incoming = to.replica.incoming();
    let kind = |outcome: Result<(), dbs_core::Error>| outcome.unwrap_err().kind();
    let begin = |name: &str| incoming.begin(name, SIZE).map(drop);
    assert_eq!(kind(begin(&disk("a"))), ErrorKind::Invalid, "not rebuilding");
    assert_eq!(kind(incoming.put_meta(&disk("a"), DiskMeta::default())), ErrorKind::Invalid);
    to.rebuilding(true).unwrap();
    for name in ["volume-head-000.img", "a", "", "volume-snap-.img", "volume-snap-.incoming-a.img"]
    {
        assert_eq!(kind(begin(name)), ErrorKind::Invalid, "{name}");
    }
    assert_eq!(kind(begin(&disk("a@b"))), ErrorKind::Invalid);
    assert_eq!(kind(incoming.put_meta("x.img", DiskMeta::default())), ErrorKind::Invalid);
    assert!(incoming.begin(&disk("a"), 1000).is_err());

    // A description without its layer, a parent that never came, a loop.
    incoming.put_meta(&disk("a"), DiskMeta::default()).unwrap();
    let status = to.reload().unwrap_err();
    assert!(status.message().contains("volume-snap-a.img"), "{status}");
    assert!(incoming.discard(&disk("a")).unwrap());
    assert!(!incoming.discard(&disk("a")).unwrap());
    to.reload().unwrap();
    let on = |parent: &str| DiskMeta { parent: parent.to_owned(), ..Default::default() };
    begin(&disk("a")).unwrap();
    incoming.put_meta(&disk("a"), on(&disk("nowhere"))).unwrap();
    to.reload().unwrap_err();
    incoming.put_meta(&disk("a"), on(&disk("a"))).unwrap();
    to.reload().unwrap_err();
    incoming.put_meta(&disk("a"), on("")).unwrap();
    let head = DiskMeta { parent: disk("a"), ..Default::default() };
    incoming.put_meta("volume-head-000.img", head).unwrap();
    assert_eq!(to.reload().unwrap().chain, ["volume-head-000.img", "volume-snap-a.img"]);
    assert_eq!(to.get().disks[&disk("a")].created, "");
    // Given up while it is staged.
    begin(&disk("b")).unwrap();
    assert!(incoming.discard(&disk("b")).unwrap());
    assert_eq!(incoming.existing(&disk("b")).unwrap(), None);
    assert_eq!(incoming.existing(&disk("a")).unwrap(), Some(SIZE));
    to.close();
    assert_eq!(kind(begin(&disk("c"))), ErrorKind::Invalid, "closed");
}

/// One reads through the snapshot of another volume as through a layer of its own.
fn clone_layer(to: &Bench) {
    let layer = to.replica.incoming().begin(&disk("clone"), SIZE).unwrap();
    layer.write_at(8192, &[5; BLOCK]).unwrap();
}

#[test]
fn a_clone_comes_in_beside_what_is_here() {
    let to = created(2 * SIZE);
    to.write(0, 1);
    to.snapshot("own");
    let incoming = to.replica.incoming();
    incoming.begin_clone().unwrap();
    assert_eq!(to.get().state, "dirty", "it is not being rebuilt");
    clone_layer(&to);
    let exists = incoming.begin(&disk("own"), SIZE).map(drop).unwrap_err();
    assert_eq!(exists.kind(), ErrorKind::Exists);
    assert_eq!(to.get().disks.len(), 2);
    incoming.put_meta(&disk("clone"), DiskMeta::default()).unwrap();
    incoming.end_clone(true).unwrap();
    let r = to.get();
    assert_eq!((r.disks.len(), r.disks[&disk("clone")].parent.as_str()), (3, ""));
    assert_eq!(r.chain, ["volume-head-001.img", "volume-snap-own.img"]);
    assert_eq!(to.revert("clone").chain, ["volume-head-002.img", "volume-snap-clone.img"]);
    assert_eq!([0, 2, BLOCKS].map(|block| to.read(block)), [0, 5, 0]);
    assert!(incoming.begin(&disk("more"), SIZE).is_err(), "it is over");
}

#[test]
fn a_clone_that_fails_leaves_nothing() {
    let to = created(SIZE);
    let incoming = to.replica.incoming();
    incoming.begin_clone().unwrap();
    clone_layer(&to);
    incoming.end_clone(false).unwrap();
    assert_eq!(to.get().disks.len(), 1);
    to.work();
    assert_eq!(to.store.as_ref().unwrap().layers("vol").unwrap().len(), 1);
    // Nor does one that a crash cuts off.
    incoming.begin_clone().unwrap();
    clone_layer(&to);
    let to = Bench::on(to.kill(), |_| {});
    let r = to.open();
    assert_eq!((r.state.as_str(), r.rebuilding, r.disks.len()), ("dirty", false, 1));
    assert_eq!(to.store.as_ref().unwrap().layers("vol").unwrap().len(), 1);
    assert!(!to.store.as_ref().unwrap().volume_info("vol").unwrap().rebuilding);
    // During a rebuild the mark stays.
    to.rebuilding(true).unwrap();
    let incoming = to.replica.incoming();
    incoming.begin_clone().unwrap();
    incoming.end_clone(false).unwrap();
    assert!(to.store.as_ref().unwrap().volume_info("vol").unwrap().rebuilding);
    to.close();
    assert!(to.replica.incoming().begin_clone().is_err(), "closed");
}

/// What an earlier clone brought stays until all of the next one is here, and is replaced in one step.
#[test]
fn a_clone_that_is_asked_for_again_gives_nothing_up_before_its_end() {
    let to = created(SIZE);
    let begin = |to: &Bench, byte: u8| {
        to.replica.incoming().begin_clone().unwrap();
        let layer = to.replica.incoming().begin(&disk("clone"), SIZE).unwrap();
        layer.write_at(8192, &[byte; BLOCK]).unwrap();
        to.replica.incoming().put_meta(&disk("clone"), DiskMeta::default()).unwrap();
    };
    let holds = |to: &Bench, byte: u8| {
        assert_eq!((to.read(2), to.get().chain[1].as_str()), (byte, "volume-snap-clone.img"));
        let store = to.store.as_ref().unwrap();
        assert_eq!(store.layers("vol").unwrap().len(), 2, "nothing is left over");
        assert!(!store.volume_info("vol").unwrap().rebuilding);
    };
    begin(&to, 5);
    assert!(!to.replica.incoming().end_clone(true).unwrap(), "the head is to be put on it");
    to.revert("clone");
    holds(&to, 5);
    // One that fails, and one that is cut off.
    begin(&to, 6);
    assert_eq!(to.read(2), 5);
    to.replica.incoming().end_clone(false).unwrap();
    holds(&to, 5);
    begin(&to, 6);
    let to = Bench::on(to.kill(), |_| {});
    to.open();
    holds(&to, 5);
    begin(&to, 6);
    assert!(
        to.replica.incoming().end_clone(true).unwrap(),
        "the head is on it, and may be written"
    );
    holds(&to, 6);
    // While the replaced one is read it stays, and goes at the next start.
    let reader = to.store.as_ref().unwrap().volume("vol@clone").unwrap();
    begin(&to, 7);
    to.replica.incoming().end_clone(true).unwrap();
    assert_eq!((to.read(2), to.get().disks.len()), (7, 2));
    drop(reader);
    let to = Bench::on(to.kill(), |_| {});
    to.open();
    holds(&to, 7);
    // Somebody writes while it comes in.
    begin(&to, 8);
    to.write(0, 1);
    let refused = to.replica.incoming().end_clone(true).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists);
    assert_eq!(to.read(0), 1);
    holds(&to, 7);
    let refused = {
        to.replica.incoming().begin_clone().unwrap();
        to.replica.incoming().begin(&disk("clone"), SIZE).map(drop).unwrap_err()
    };
    assert_eq!(refused.kind(), ErrorKind::Exists);
    to.replica.incoming().end_clone(false).unwrap();
    holds(&to, 7);
}

/// The file that tells of a rebuild could not be written when that ended. A clone that is cut off
/// later is not taken for the rebuild.
#[test]
fn a_clone_after_a_rebuild_whose_end_could_not_be_written() {
    let to = created(SIZE);
    to.write(0, 1);
    to.rebuilding(true).unwrap();
    to.no_room_for_meta();
    assert_eq!(to.rebuilding(false).unwrap().state, "dirty");
    to.replica.incoming().begin_clone().unwrap();
    clone_layer(&to);
    let to = Bench::on(to.kill(), |_| {});
    let r = to.open();
    assert_eq!((r.state.as_str(), r.rebuilding, r.disks.len()), ("dirty", false, 1));
    assert_eq!(to.read(0), 1);
    // Without room for its beginning there is no clone.
    to.no_room_for_meta();
    let refused = to.replica.incoming().begin_clone().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    assert!(!to.store.as_ref().unwrap().volume_info("vol").unwrap().rebuilding);
}
