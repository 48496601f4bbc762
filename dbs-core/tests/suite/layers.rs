//! Layers one by one: what is listed of them, their maps and their bytes. That together they are the
//! volume the simulator holds against every history (`dbs-sim/src/layers.rs`).

use crate::common::{FixedEnv, Mem, MemTail, contents, finish_work, init, open, options, pattern};
use dbs_core::info::{LayerInfo, LayerRange, LayerState};
use dbs_core::store::SnapshotOptions;
use dbs_core::volume::Layer;
use dbs_core::{ErrorKind, InitOptions, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const KIB: u64 = 1024;

fn snapshot(store: &Store, volume: &str, name: &str) {
    store.create_snapshot(volume, name, &SnapshotOptions::default()).unwrap();
}

/// The map of a whole layer: offset, length in KiB, and the first letter of the state.
fn map(layer: &Layer) -> Vec<(u64, u64, char)> {
    let letter = |range: &LayerRange| match range.state {
        LayerState::Data => 'd',
        LayerState::Zero => 'z',
        LayerState::Absent => 'a',
    };
    let ranges = layer.map(0, layer.size(), 100).unwrap();
    ranges.iter().map(|r| (r.offset / KIB, r.length / KIB, letter(r))).collect()
}

fn named<'a>(layers: &'a [LayerInfo], name: &str) -> &'a LayerInfo {
    layers.iter().find(|layer| layer.name.as_deref() == Some(name)).unwrap()
}

#[test]
fn a_layer_says_only_what_it_holds_itself() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 384 * KIB).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &pattern(1, 200 << 10), false).unwrap();
    snapshot(&store, "v", "a");
    volume.write_at(4 * KIB, &pattern(2, 8192), false).unwrap();
    volume.discard(64 * KIB, 64 * KIB).unwrap();
    volume.discard(32 * KIB, 4 * KIB).unwrap();
    snapshot(&store, "v", "b");
    volume.write_at(380 * KIB, &pattern(3, 4096), false).unwrap();
    let layers = ["a", "b"].map(|name| store.layer("v", Some(name)).unwrap());
    assert_eq!(map(&layers[0]), [(0, 200, 'd'), (200, 184, 'a')]);
    let of_b = [
        (0, 4, 'a'),
        (4, 8, 'd'),
        (12, 20, 'a'),
        (32, 4, 'z'),
        (36, 28, 'a'),
        (64, 64, 'z'),
        (128, 256, 'a'),
    ];
    assert_eq!(map(&layers[1]), of_b);
    assert_eq!(map(&store.layer("v", None).unwrap()), [(0, 380, 'a'), (380, 4, 'd')]);
    let some = layers[1].map(6 * KIB, 30 * KIB, 2).unwrap();
    let wanted = [(6 * KIB, 6 * KIB, LayerState::Data), (12 * KIB, 20 * KIB, LayerState::Absent)];
    assert!(some.iter().map(|r| (r.offset, r.length, r.state)).eq(wanted), "{some:?}");
    let mut bytes = vec![0xaa; 3 << 10];
    layers[1].read_at(3 * KIB, &mut bytes).unwrap();
    assert_eq!(bytes, [vec![0; 1024], pattern(2, 2048)].concat());
    layers[1].read_at(96 * KIB, &mut bytes).unwrap();
    assert_eq!(bytes, vec![0; 3072]);
    assert_eq!(store.check().unwrap().findings, []);
}

#[test]
fn a_hidden_snapshot_counts_with_what_builds_on_it() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 256 * KIB).unwrap();
    let volume = store.volume("v").unwrap();
    for (at, name) in ["a", "b", "c"].into_iter().enumerate() {
        volume.write_at(at as u64 * 64 * KIB, &pattern(at as u8, 8192), false).unwrap();
        snapshot(&store, "v", name);
    }
    store.clone_volume("v", "b", "w").unwrap();
    store.delete_snapshot("v", "b").unwrap();
    store.delete_snapshot("v", "a").unwrap();
    let before = ["v", "w"].map(|name| store.layers(name).unwrap());
    for step in 0..8 {
        let layers = store.layers("v").unwrap();
        let c = named(&layers, "c");
        assert_eq!((&c.parent, &c.origin, &c.children), (&None, &None, &vec![None]));
        assert_eq!((c.data_bytes, layers[1].parent.as_deref()), (24 << 10, Some("c")));
        let layer = store.layer("v", Some("c")).unwrap();
        let own = [(0, 8, 'd'), (8, 56, 'a'), (64, 8, 'd'), (72, 56, 'a'), (128, 8, 'd')];
        assert_eq!(map(&layer)[..5], own, "step {step}");
        let clone = store.layer("w", None).unwrap();
        assert_eq!(map(&clone)[..3], own[..3], "step {step}");
        assert_eq!(["v", "w"].map(|name| store.layers(name).unwrap()), before);
        store.work(1).unwrap();
    }
    // Nothing of "b" is hidden any more when it has only one child.
    store.delete_volume("w").unwrap();
    finish_work(&store);
    assert_eq!(named(&store.layers("v").unwrap(), "c").data_bytes, 24 << 10);
    assert_eq!(store.check().unwrap().findings, []);
}

#[test]
fn what_is_left_to_merge_is_told_for_each_volume() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    for volume in ["v", "w"] {
        store.create_volume(volume, 256 * KIB).unwrap();
        for name in ["a", "b"] {
            store.volume(volume).unwrap().write_at(0, &pattern(1, 8192), false).unwrap();
            snapshot(&store, volume, name);
        }
    }
    let left = |store: &Store| ["v", "w"].map(|volume| store.merging_remaining(volume).unwrap());
    assert_eq!(left(&store), [0, 0]);
    store.delete_snapshot("v", "a").unwrap();
    assert!(left(&store)[0] > 0 && left(&store)[1] == 0);
    store.clone_volume("w", "a", "x").unwrap();
    store.delete_snapshot("w", "a").unwrap();
    finish_work(&store);
    assert_eq!(left(&store), [0, 0], "what a clone needs stays");
    store.delete_volume("x").unwrap();
    let mut seen = 0;
    while store.work(1).unwrap().remaining > 0 {
        seen = seen.max(left(&store)[1]);
    }
    assert!(seen > 0 && left(&store) == [0, 0]);
    assert_eq!(store.merging_remaining("y").unwrap_err().kind(), ErrorKind::NotFound);
}

/// All orders of some things.
fn orders(of: &[usize]) -> Vec<Vec<usize>> {
    if of.is_empty() {
        return vec![Vec::new()];
    }
    let first = |at: &usize| (*at, of.iter().copied().filter(|other| other != at).collect());
    let parts = of.iter().map(first).collect::<Vec<(usize, Vec<usize>)>>();
    let all = parts
        .iter()
        .flat_map(|(at, rest)| orders(rest).into_iter().map(|order| [vec![*at], order].concat()));
    all.collect()
}

/// Extents of the oldest snapshot in [`with_a_chain`]: more than background work moves in one step.
const OLDEST: u64 = 80;

/// A volume on five snapshots. Each holds an extent that all of them hold, and one of its own; the oldest
/// holds [`OLDEST`] of its own.
fn with_a_chain() -> Store {
    let disk = Arc::new(Mem::new(16 << 20));
    let options = InitOptions { max_size: Some(16 << 20), ..options() };
    Store::init_on(&*disk, &options, &FixedEnv::new(1)).unwrap();
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", (OLDEST + 8) * 64 * KIB).unwrap();
    let volume = store.volume("v").unwrap();
    for extent in 5..5 + OLDEST {
        volume.write_at(extent * 64 * KIB, &pattern(extent as u8, 8192), false).unwrap();
    }
    for number in 0..5u64 {
        if number > 0 {
            volume.write_at(number * 64 * KIB, &pattern(number as u8, 8192), false).unwrap();
        }
        volume.write_at(number * 4096, &pattern(number as u8, 8192), false).unwrap();
        snapshot(&store, "v", &number.to_string());
    }
    volume.write_at(8192, &pattern(9, 4096), false).unwrap();
    drop(volume);
    store
}

/// From the oldest on, as their numbers are, each would be moved through all the others.
#[test]
fn extents_of_snapshots_deleted_together_move_once_whatever_the_order() {
    let kept = contents(&with_a_chain());
    for order in orders(&[0, 1, 3, 4]) {
        let store = with_a_chain();
        for number in &order {
            store.delete_snapshot("v", &number.to_string()).unwrap();
        }
        let steps = (0..1000).map_while(|_| Some(store.work(1).unwrap().done).filter(|n| *n > 0));
        // Each moves what its child has not (the oldest in two steps), is merged where all have an extent,
        // and goes; and the extents freed by that are given back.
        assert_eq!(steps.sum::<u64>(), 4 * 3 + 1 + 4, "{order:?}");
        for (spec, bytes) in contents(&store) {
            assert!(kept[&spec] == bytes, "{spec} after {order:?}");
        }
        assert_eq!(store.check().unwrap().findings, []);
    }
}

/// What nobody needs is freed where it is, not merged into what goes as well.
#[test]
fn a_volume_deleted_with_its_snapshots_is_freed_and_not_merged() {
    let store = with_a_chain();
    store.delete_volume("v").unwrap();
    let steps = (0..1000).map_while(|_| Some(store.work(1).unwrap().done).filter(|n| *n > 0));
    // Six layers (the oldest in two steps), and what they held: their own extents, and one of each layer.
    assert_eq!(steps.sum::<u64>(), 6 + 1 + OLDEST + 4 + 6);
    let info = store.info();
    assert_eq!((info.snapshots_deleting, info.extents_free), (0, info.extents_total));
}

#[test]
fn the_list_is_the_tree_with_its_side_branches() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 128 * KIB).unwrap();
    let options = SnapshotOptions {
        labels: [("k".to_owned(), "v".to_owned())].into(),
        system: true,
        created_ns: Some(5),
        ..Default::default()
    };
    store.create_snapshot("v", "a", &options).unwrap();
    snapshot(&store, "v", "b");
    store.rollback("v", "a").unwrap();
    snapshot(&store, "v", "c");
    store.set_retired("v", "b", true).unwrap();
    store.clone_volume("v", "c", "w").unwrap();
    let layers = store.layers("v").unwrap();
    let names: Vec<_> = layers.iter().map(|layer| layer.name.as_deref()).collect();
    assert_eq!(names, [Some("a"), Some("b"), Some("c"), None]);
    let a = named(&layers, "a");
    assert_eq!((a.created_ns, a.user_created, &a.labels), (5, false, &options.labels));
    assert_eq!(a.children, [Some("b".to_owned()), Some("c".to_owned())]);
    let b = named(&layers, "b");
    assert!(b.retired && b.user_created && b.children.is_empty());
    assert_eq!(b.uuid, store.snapshot_info("v", "b").unwrap().uuid);
    // Clones are no layers of this volume.
    assert_eq!(
        (named(&layers, "c").children.as_slice(), &layers[3].parent),
        (&[None][..], &Some("c".into()))
    );
    let clone = store.layers("w").unwrap();
    assert_eq!((clone[0].origin.as_deref(), &clone[0].parent), (Some("v@c"), &None));
    let json = serde_json::to_value(a).unwrap();
    assert_eq!(json["children"], serde_json::json!(["b", "c"]));
    assert_eq!(store.layers("x").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_handle_keeps_its_layer_and_knows_its_bounds() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 128 * KIB).unwrap();
    snapshot(&store, "v", "a");
    store.resize_volume("v", 256 * KIB).unwrap();
    let layer = store.layer("v", Some("a")).unwrap();
    let head = store.layer("v", None).unwrap();
    assert_eq!((layer.size(), head.size()), (128 * KIB, 256 * KIB));
    assert_eq!(store.delete_snapshot("v", "a").unwrap_err().kind(), ErrorKind::Busy);
    let mut buf = vec![0; 1024];
    for (offset, length) in [(128 * KIB, 512), (u64::MAX - 511, 1024), (100, 512), (0, 100)] {
        let error = layer.map(offset, length, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let error = layer.read_at(offset, &mut buf[..length as usize]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    assert_eq!(layer.map(128 * KIB, 0, 1).unwrap(), []);
    layer.read_at(0, &mut []).unwrap();
    drop(layer);
    store.delete_snapshot("v", "a").unwrap();
    assert_eq!(store.delete_volume("v").unwrap_err().kind(), ErrorKind::Busy);
    drop(head);
    store.delete_volume("v").unwrap();
    assert_eq!(store.layer("v", None).err().map(|e| e.kind()), Some(ErrorKind::NotFound));
}

/// A store of 64 KiB extents in memory, with a tail.
fn in_memory(size: u64) -> (Arc<Mem>, Store) {
    let disk = Arc::new(Mem::new(size));
    let options = InitOptions { extent_size: 64 << 10, ..Default::default() };
    Store::init_on(&*disk, &options, &FixedEnv::new(1)).unwrap();
    let env = Arc::new(FixedEnv::new(2));
    let store = Store::open_on(Arc::clone(&disk) as _, Some(MemTail::boxed()), env, false);
    (disk, store.unwrap())
}

#[test]
fn maps_of_many_extents_and_of_huge_holes_are_whole() {
    let (_, store) = in_memory(256 << 20);
    let size = 60 << 40;
    store.create_volume("v", size).unwrap();
    let volume = store.volume("v").unwrap();
    // More extents than one look takes, some full, some with a block; then nearly nothing.
    let mut wanted = Vec::new();
    for extent in 0..1400u64 {
        let (at, length) = (extent * 64 * KIB, if extent % 3 == 0 { 64 * KIB } else { 4 * KIB });
        volume.write_at(at, &vec![7; length as usize], false).unwrap();
        wanted.push((at, length));
    }
    volume.write_at(40 << 40, &[9; 4096], false).unwrap();
    wanted.push((40 << 40, 4 * KIB));
    snapshot(&store, "v", "a");
    let layer = store.layer("v", Some("a")).unwrap();
    let map = layer.map(0, size, usize::MAX).unwrap();
    let mut next = 0;
    let mut data = Vec::new();
    for range in &map {
        assert_eq!(range.offset, next);
        next += range.length;
        if range.state == LayerState::Data {
            data.push((range.offset, range.length));
        }
    }
    assert_eq!(next, size);
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (at, length) in wanted {
        match joined.last_mut() {
            Some(last) if last.0 + last.1 == at => last.1 += length,
            _ => joined.push((at, length)),
        }
    }
    assert_eq!(data, joined);
    let bytes: u64 = data.iter().map(|range| range.1).sum();
    assert_eq!(store.layers("v").unwrap()[0].data_bytes, bytes);
    // Zeros over much of it are one range.
    volume.discard(0, 64 << 30).unwrap();
    let head = store.layer("v", None).unwrap();
    let zeros = LayerRange { offset: 0, length: 64 << 30, state: LayerState::Zero };
    assert_eq!(head.map(0, size, 1).unwrap(), [zeros]);
    // One read of many extents.
    let mut buf = vec![0xaa; 5 << 20];
    layer.read_at(512, &mut buf).unwrap();
    let mut whole = vec![0xaa; 5 << 20];
    store.volume("v@a").unwrap().read_at(512, &mut whole).unwrap();
    assert!(buf == whole);
}

/// A layer reads the same while what it builds on is merged into it, other layers are merged, and
/// the head is written to.
#[test]
fn reading_stays_right_while_others_merge_and_write() {
    let (_, store) = in_memory(24 << 20);
    let size = 2 << 20;
    store.create_volume("v", size).unwrap();
    let volume = store.volume("v").unwrap();
    let done = AtomicBool::new(false);
    for round in 0..6u8 {
        for (step, name) in (0u64..).zip(["gone", "kept", "other", "top"]) {
            for block in 0..size / 4096 {
                if (block * 7 + step * 3 + u64::from(round)) % 5 < 2 {
                    let bytes = pattern((block as u8) ^ (step as u8) << 5 ^ round, 4096);
                    volume.write_at(block * 4096, &bytes, false).unwrap();
                }
            }
            snapshot(&store, "v", name);
        }
        for name in ["gone", "other"] {
            store.delete_snapshot("v", name).unwrap();
        }
        let layers = ["kept", "top"].map(|name| store.layer("v", Some(name)).unwrap());
        let read = |layer: &Layer| {
            let mut bytes = vec![0xaa; size as usize];
            layer.read_at(0, &mut bytes).unwrap();
            let data =
                |r: &LayerRange| (r.state == LayerState::Data).then_some((r.offset, r.length));
            let map = layer.map(0, size, usize::MAX).unwrap();
            (bytes, map.iter().filter_map(data).collect::<Vec<_>>())
        };
        let wanted = layers.each_ref().map(read);
        done.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let readers = [0, 1].map(|at| {
                let (layer, wanted, done) = (&layers[at], &wanted[at], &done);
                scope.spawn(move || {
                    let mut last = false;
                    while !last {
                        last = done.load(Ordering::Relaxed);
                        assert!(read(layer) == *wanted, "round {round}, layer {at}");
                    }
                })
            });
            let mut seed = u64::from(round) + 1;
            let head = store.layer("v", None).unwrap();
            while store.work(1).unwrap().remaining > 0 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (seed >> 33) % (size / 4096) * 4096;
                volume.write_at(at, &pattern(seed as u8, 4096), false).unwrap();
                let mut block = vec![0; 4096];
                head.read_at(at, &mut block).unwrap();
                assert_eq!(block, pattern(seed as u8, 4096));
            }
            done.store(true, Ordering::Relaxed);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
        drop(layers);
        store.delete_snapshot("v", "kept").unwrap();
        store.delete_snapshot("v", "top").unwrap();
        finish_work(&store);
    }
    assert_eq!(store.check().unwrap().findings, []);
}

/// While the device reads, the extents planned to be read are freed by a merge, and everything that
/// may be is given to others.
#[test]
fn what_is_being_read_is_not_given_away() {
    let (disk, store) = in_memory(24 << 20);
    let size = 512 * KIB;
    store.create_volume("v", size).unwrap();
    let volume = store.volume("v").unwrap();
    // In half of the extents the parent has more, in the others the child: each frees some.
    let write = |seed, odd: u64| {
        for extent in 0..8u64 {
            let blocks = if extent % 2 == odd { 12 } else { 4 };
            let bytes = pattern(seed + extent as u8, blocks << 12);
            volume.write_at(extent * 64 * KIB + odd * 16 * KIB, &bytes, false).unwrap();
        }
    };
    write(1, 0);
    snapshot(&store, "v", "a");
    write(101, 1);
    snapshot(&store, "v", "b");
    store.delete_snapshot("v", "a").unwrap();
    let layer = store.layer("v", Some("b")).unwrap();
    let mut wanted = vec![0xaa; size as usize];
    layer.read_at(0, &mut wanted).unwrap();
    let inner = store.clone();
    disk.on_read(move || {
        while inner.work(16).unwrap().done > 0 {}
        inner.flush().unwrap();
        let info = inner.info();
        assert_eq!((info.snapshots_deleting, info.extents_pending), (0, 8));
        inner.create_volume("other", info.extents_free * 64 * KIB).unwrap();
        let other = inner.volume("other").unwrap();
        for extent in 0..info.extents_free {
            other.write_at(extent * 64 * KIB, &[0xee; 64 << 10], false).unwrap();
        }
    });
    let mut found = vec![0xaa; size as usize];
    layer.read_at(0, &mut found).unwrap();
    assert!(found == wanted);
    assert_eq!(store.info().extents_pending, 0, "reusable when the read is over");
    layer.read_at(0, &mut found).unwrap();
    assert!(found == wanted);
}
