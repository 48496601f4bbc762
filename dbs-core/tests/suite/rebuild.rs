//! Building a volume out of layers that arrive in any order: what a replica does that is rebuilt.

use crate::common::{Mem, finish_work, init, open, pattern};
use dbs_core::info::LayerState;
use dbs_core::io::Storage;
use dbs_core::store::{Link, SnapshotOptions};
use dbs_core::volume::Layer;
use dbs_core::{ErrorKind, InitOptions, Store};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const EXTENT: u64 = 64 << 10;
const SIZE: u64 = 8 * EXTENT;
const BLOCK: u64 = 4096;

fn read(store: &Store, spec: &str) -> Vec<u8> {
    let volume = store.volume(spec).unwrap();
    let mut buf = vec![0xaa; volume.size() as usize];
    volume.read_at(0, &mut buf).unwrap();
    buf
}

fn insert(store: &Store, name: &str) {
    store.insert_snapshot("v", name, SIZE, &SnapshotOptions::default()).unwrap();
}

fn layer(store: &Store, name: &str) -> Layer {
    store.layer("v", Some(name)).unwrap()
}

fn link(snapshot: &str, parent: Option<&str>) -> Link {
    Link {
        snapshot: snapshot.to_owned(),
        parent: parent.map(str::to_owned),
        user_created: true,
        created_ns: 7,
        ..Link::default()
    }
}

fn is_clean(store: &Store) {
    let findings = store.check().unwrap().findings;
    assert!(findings.is_empty(), "{findings:?}");
}

/// A store with the empty volume `v`, marked as rebuilding.
fn target() -> (Arc<Mem>, Store) {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", SIZE).unwrap();
    store.set_rebuilding("v", true).unwrap();
    (disk, store)
}

/// Block by block: the first layer that has anything says what is shown.
fn expected(layers: &[&[(LayerState, u8)]]) -> Vec<u8> {
    let blocks = (SIZE / BLOCK) as usize;
    let shown = |block: usize| {
        let states = layers.iter().map(|layer| layer[block]);
        match states.into_iter().find(|state| state.0 != LayerState::Absent) {
            Some((LayerState::Data, byte)) => byte,
            _ => 0,
        }
    };
    (0..blocks).flat_map(|block| vec![shown(block); BLOCK as usize]).collect()
}

/// Found on reading again: hiding ended where nothing was held, and what came into a layer later was shown there.
#[test]
fn what_arrives_behind_an_end_that_once_was_stays_hidden() {
    let (_disk, store) = target();
    let (size, far) = (1 << 30, 100 << 20);
    store.resize_volume("v", size).unwrap();
    store.insert_snapshot("v", "s", size, &SnapshotOptions::default()).unwrap();
    store.relink("v", &[link("s", None)], Some("s")).unwrap();
    store.resize_volume("v", EXTENT).unwrap();
    store.resize_volume("v", size).unwrap();
    layer(&store, "s").write_at(far, &pattern(1, BLOCK as usize)).unwrap();
    let mut found = vec![1; BLOCK as usize];
    store.volume("v").unwrap().read_at(far, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0));
    is_clean(&store);
}

#[test]
fn layers_in_any_order_become_the_volume_they_were() {
    let (disk, store) = target();
    // Bitmaps leave memory whenever they can.
    store.set_metadata_memory(0);
    let mut rng = fastrand::Rng::with_seed(5);
    let blocks = (SIZE / BLOCK) as usize;
    let names = ["a", "b", "c"];
    // Head first, then the layers, the lowest last; each written over and over.
    let mut states = vec![vec![(LayerState::Absent, 0); blocks]; 4];
    let head = store.volume("v").unwrap();
    for name in names {
        insert(&store, name);
    }
    for round in 0..600 {
        let which = (round / 150) as usize;
        let at = rng.usize(..blocks);
        let count = match rng.u8(..4) {
            0 => 16.min(blocks - at / 16 * 16),
            _ => rng.usize(1..=(blocks - at).min(24)),
        };
        let at = if count == 16 { at / 16 * 16 } else { at };
        let (offset, length) = (at as u64 * BLOCK, count as u64 * BLOCK);
        let byte = rng.u8(1..);
        let content = vec![byte; length as usize];
        let mut state = match rng.u8(..3) {
            0 => LayerState::Zero,
            1 => LayerState::Absent,
            _ => LayerState::Data,
        };
        if which == 0 {
            match state {
                LayerState::Data => head.write_at(offset, &content, false).unwrap(),
                _ => head.discard(offset, length).unwrap(),
            }
            state = if state == LayerState::Data { state } else { LayerState::Zero };
        } else {
            let layer = layer(&store, names[3 - which]);
            match state {
                LayerState::Data => layer.write_at(offset, &content).unwrap(),
                LayerState::Zero => layer.zero(offset, length).unwrap(),
                LayerState::Absent => layer.clear(offset, length).unwrap(),
            }
        }
        states[which][at..at + count].fill((state, byte));
    }
    for (which, name) in names.iter().rev().enumerate() {
        let mut found = Vec::new();
        for range in layer(&store, name).map(0, SIZE, usize::MAX).unwrap() {
            found.extend(vec![range.state; (range.length / BLOCK) as usize]);
        }
        let wanted: Vec<_> = states[which + 1].iter().map(|state| state.0).collect();
        assert_eq!(found, wanted, "layer {name}");
        assert_eq!(read(&store, &format!("v@{name}")), expected(&[&states[which + 1]]));
    }
    assert_eq!(read(&store, "v"), expected(&[&states[0]]), "the head has no parent yet");
    is_clean(&store);
    drop(head);
    drop(store);
    let store = open(&disk, 3, false).unwrap();
    is_clean(&store);
    let links = [link("a", None), link("b", Some("a")), link("c", Some("b"))];
    store.relink("v", &links, Some("c")).unwrap();
    let all: Vec<&[_]> = states.iter().map(Vec::as_slice).collect();
    let check = |store: &Store| {
        assert_eq!(read(store, "v"), expected(&all));
        assert_eq!(read(store, "v@c"), expected(&all[1..]));
        assert_eq!(read(store, "v@b"), expected(&all[2..]));
        assert_eq!(read(store, "v@a"), expected(&all[3..]));
        is_clean(store);
    };
    check(&store);
    store.set_rebuilding("v", false).unwrap();
    drop(store);
    let store = open(&disk, 4, false).unwrap();
    check(&store);
    store.delete_snapshot("v", "b").unwrap();
    store.delete_snapshot("v", "a").unwrap();
    finish_work(&store);
    assert_eq!(read(&store, "v"), expected(&all));
    assert_eq!(read(&store, "v@c"), expected(&all[1..]));
    store.delete_volume("v").unwrap();
    finish_work(&store);
    store.flush().unwrap();
    let info = store.info();
    assert_eq!(info.extents_free, info.extents_total);
}

#[test]
fn attributes_come_with_the_links() {
    let (disk, store) = target();
    insert(&store, "a");
    let system = SnapshotOptions { system: true, created_ns: Some(5), ..Default::default() };
    let info = store.insert_snapshot("v", "b", SIZE, &system).unwrap();
    assert_eq!((info.created_ns, info.user_created, info.parent), (5, false, None));
    store.set_protected("v", "b", true).unwrap();
    let labels = [("k".to_owned(), "v".repeat(5000))].into();
    store.resize_volume("v", 2 * SIZE).unwrap();
    let b = Link { retired: true, labels, size: Some(2 * SIZE), ..link("b", Some("a")) };
    store.relink("v", std::slice::from_ref(&b), Some("b")).unwrap();
    drop(store);
    let store = open(&disk, 3, false).unwrap();
    let info = store.snapshot_info("v", "b").unwrap();
    assert_eq!(info.parent.as_deref(), Some("v@a"));
    assert_eq!((info.created_ns, info.size, &info.labels), (7, 2 * SIZE, &b.labels));
    assert!(info.user_created && info.retired && info.protected);
    assert_eq!(store.volume_info("v").unwrap().parent.as_deref(), Some("v@b"));
    assert_eq!(store.snapshot_info("v", "a").unwrap().children, ["v@b"]);
    // What is left out stays as it is.
    store.relink("v", &[], None).unwrap();
    assert_eq!(store.snapshot_info("v", "b").unwrap().labels, b.labels);
    assert_eq!(store.volume_info("v").unwrap().parent, None);
    is_clean(&store);
}

#[test]
fn a_layer_that_changes_its_size_has_nothing_behind_the_smaller_one() {
    let (_disk, store) = target();
    insert(&store, "a");
    layer(&store, "a").write_at(0, &vec![1; SIZE as usize]).unwrap();
    let sized = |size| Link { size: Some(size), ..link("a", None) };
    store.relink("v", &[sized(EXTENT + BLOCK)], Some("a")).unwrap();
    let shown = |bytes: u64| {
        let mut all = vec![1; bytes as usize];
        all.resize(SIZE as usize, 0);
        all
    };
    assert_eq!(read(&store, "v"), shown(EXTENT + BLOCK));
    store.relink("v", &[sized(SIZE)], Some("a")).unwrap();
    assert_eq!(read(&store, "v"), shown(EXTENT + BLOCK));
    let error = store.relink("v", &[sized(2 * SIZE)], Some("a")).unwrap_err();
    assert!(error.to_string().contains("a parent is no larger"), "{error}");
    store.relink("v", &[sized(EXTENT - 512)], None).unwrap();
    let error = store.relink("v", &[sized(SIZE)], None).unwrap_err();
    assert!(error.to_string().contains("ends within a block"), "{error}");
    let odd = layer(&store, "a");
    odd.write_at(EXTENT - BLOCK, &[2; BLOCK as usize - 512]).unwrap();
    assert_eq!(read(&store, "v@a")[(EXTENT - BLOCK) as usize..], [2; BLOCK as usize - 512]);
    let error = store.relink("v", &[], Some("a")).unwrap_err();
    assert!(error.to_string().contains("ends with a block"), "{error}");
    odd.zero(EXTENT - BLOCK, BLOCK - 512).unwrap();
    assert_eq!(read(&store, "v@a")[(EXTENT - BLOCK) as usize..], [0; BLOCK as usize - 512]);
    for (offset, length) in [(EXTENT - BLOCK, BLOCK), (512, BLOCK), (0, 512)] {
        let error = odd.write_at(offset, &vec![0; length as usize]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    is_clean(&store);
}

#[test]
fn what_others_rely_on_is_refused() {
    let (_disk, store) = target();
    insert(&store, "a");
    insert(&store, "b");
    let kind = |result: dbs_core::Result<()>| result.unwrap_err().kind();
    let write = |name| layer(&store, name).write_at(0, &[1; BLOCK as usize]);
    write("a").unwrap();
    let loops = [link("a", Some("b")), link("b", Some("a"))];
    assert_eq!(kind(store.relink("v", &loops, None)), ErrorKind::Invalid);
    assert_eq!(kind(store.relink("v", &[link("a", Some("a"))], None)), ErrorKind::Invalid);
    let twice = [link("a", None), link("a", None)];
    assert_eq!(kind(store.relink("v", &twice, None)), ErrorKind::Invalid);
    assert_eq!(kind(store.relink("v", &[link("x", None)], None)), ErrorKind::NotFound);
    assert_eq!(kind(store.relink("v", &[], Some("x"))), ErrorKind::NotFound);
    store.relink("v", &[link("b", Some("a"))], Some("b")).unwrap();
    assert_eq!(kind(store.clone_volume("v", "a", "k").map(drop)), ErrorKind::Busy);
    assert_eq!(kind(store.layer("v", None).unwrap().clear(0, BLOCK)), ErrorKind::Invalid);
    // A deleted snapshot that is not yet part of the one above.
    store.delete_snapshot("v", "a").unwrap();
    assert_eq!(kind(store.relink("v", &[link("b", None)], None)), ErrorKind::Busy);
    assert_eq!(kind(layer(&store, "b").clear(0, BLOCK)), ErrorKind::Busy);
    finish_work(&store);
    assert_eq!(read(&store, "v")[..BLOCK as usize], [1; BLOCK as usize]);
    layer(&store, "b").clear(0, BLOCK).unwrap();
    assert_eq!(read(&store, "v")[..BLOCK as usize], [0; BLOCK as usize]);
    store.set_rebuilding("v", false).unwrap();
    for error in [
        kind(write("b")),
        kind(layer(&store, "b").zero(0, BLOCK)),
        kind(layer(&store, "b").clear(0, BLOCK)),
        kind(store.insert_snapshot("v", "c", SIZE, &Default::default()).map(drop)),
        kind(store.relink("v", &[], None)),
    ] {
        assert_eq!(error, ErrorKind::ReadOnly);
    }
    store.clone_volume("v", "b", "k").unwrap();
    store.set_rebuilding("v", true).unwrap();
    assert_eq!(kind(write("b")), ErrorKind::Busy);
    assert_eq!(kind(store.relink("v", &[], None)), ErrorKind::Busy);
    assert_eq!(read(&store, "k"), vec![0; SIZE as usize]);
    is_clean(&store);
}

#[test]
fn a_full_store_refuses_and_goes_on() {
    let (_disk, store) = target();
    store.insert_snapshot("v", "a", 16 << 20, &SnapshotOptions::default()).unwrap();
    let layer = layer(&store, "a");
    let chunk = pattern(3, EXTENT as usize);
    let full = (0..).find(|i| match layer.write_at(i * EXTENT, &chunk) {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            true
        }
    });
    let full = full.unwrap();
    layer.write_at(0, &[9; BLOCK as usize]).unwrap();
    layer.clear(EXTENT, 2 * EXTENT).unwrap();
    layer.zero(3 * EXTENT, EXTENT + BLOCK).unwrap();
    layer.write_at(full * EXTENT, &chunk).unwrap();
    let mut found = vec![0; EXTENT as usize];
    layer.read_at(full * EXTENT, &mut found).unwrap();
    assert_eq!(found, chunk);
    is_clean(&store);
}

/// The chain of a thousand snapshots turned around, on a store with the journal it gets by default.
#[test]
fn a_thousand_snapshots_are_linked_anew() {
    let disk = Arc::new(Mem::new(64 << 20));
    let options = InitOptions {
        size: Some(64 << 20),
        extent_size: EXTENT,
        max_snapshots: Some(1100),
        ..Default::default()
    };
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    Store::init_on(&*storage, &options, &crate::common::FixedEnv::new(1)).unwrap();
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", SIZE).unwrap();
    store.set_rebuilding("v", true).unwrap();
    let name = |i: usize| format!("snapshot-{i}");
    let count = 1024;
    for i in 0..count {
        insert(&store, &name(i));
    }
    layer(&store, &name(0)).write_at(0, &[1; BLOCK as usize]).unwrap();
    layer(&store, &name(count - 1)).write_at(0, &[2; BLOCK as usize]).unwrap();
    let label = |i: usize| [("n".to_owned(), i.to_string())].into();
    for turned in [false, true] {
        let place = |i: usize| if turned { name(count - 1 - i) } else { name(i) };
        let links: Vec<_> = (0..count)
            .map(|i| Link {
                labels: label(i),
                ..link(&place(i), (i > 0).then(|| place(i - 1)).as_deref())
            })
            .collect();
        store.relink("v", &links, Some(&place(count - 1))).unwrap();
        let top = if turned { 1 } else { 2 };
        assert_eq!(read(&store, "v")[..BLOCK as usize], [top; BLOCK as usize]);
        assert_eq!(store.volume_info("v").unwrap().depth, count as u64 + 1);
    }
    drop(store);
    let store = open(&disk, 3, false).unwrap();
    assert_eq!(read(&store, "v")[..BLOCK as usize], [1; BLOCK as usize]);
    is_clean(&store);
}

/// Threads write to two layers and the head while what is deleted is merged and extents are moved:
/// each writes places of its own, and finds there what it wrote last.
#[test]
fn many_write_at_once() {
    let (_disk, store) = target();
    for name in ["a", "b", "c"] {
        insert(&store, name);
    }
    layer(&store, "a").write_at(0, &vec![250; SIZE as usize]).unwrap();
    let links = [link("b", Some("a")), link("c", Some("b"))];
    store.relink("v", &links, Some("c")).unwrap();
    let blocks = SIZE / BLOCK;
    let mut states = std::collections::BTreeMap::new();
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u64)
            .map(|id| {
                let store = &store;
                scope.spawn(move || write_own(store, id, blocks))
            })
            .collect();
        let head = store.volume("v").unwrap();
        for round in 0..60u8 {
            head.write_at(0, &[round; BLOCK as usize], false).unwrap();
            if round == 20 {
                store.delete_snapshot("v", "a").unwrap();
            }
            store.work(3).unwrap();
            if round % 10 == 5 {
                store.vacuum(&mut |_, _| true).unwrap();
                store.grow(4 << 20).unwrap();
            }
        }
        writers.into_iter().for_each(|writer| states.extend(writer.join().unwrap()));
    });
    finish_work(&store);
    for (name, others) in [("b", &["b"][..]), ("c", &["c", "b"])] {
        let found = read(&store, &format!("v@{name}"));
        for block in 1..blocks {
            let own = others.iter().find_map(|layer| states.get(&(*layer, block)).copied()?);
            let at = (block * BLOCK) as usize;
            let wanted = [own.unwrap_or(250); BLOCK as usize];
            assert_eq!(found[at..at + BLOCK as usize], wanted, "{name} {block}");
        }
    }
    assert_eq!(read(&store, "v")[..BLOCK as usize], [59; BLOCK as usize]);
    is_clean(&store);
}

/// Writes, zeroes and clears every fourth block of `b` and `c`; what each holds at last.
fn write_own(
    store: &Store,
    id: u64,
    blocks: u64,
) -> std::collections::BTreeMap<(&'static str, u64), Option<u8>> {
    let mut states = std::collections::BTreeMap::new();
    let mut rng = fastrand::Rng::with_seed(id);
    for _ in 0..300 {
        let name = if rng.bool() { "b" } else { "c" };
        let block = rng.u64(..blocks / 4) * 4 + id;
        let layer = layer(store, name);
        let state = match rng.u8(..4) {
            0 => layer.zero(block * BLOCK, BLOCK).map(|()| Some(0)),
            // Of the one above a deleted snapshot nothing is given up until that is merged.
            1 if name == "c" => layer.clear(block * BLOCK, BLOCK).map(|()| None),
            _ => {
                let byte = rng.u8(1..200);
                layer.write_at(block * BLOCK, &[byte; BLOCK as usize]).map(|()| Some(byte))
            }
        };
        states.insert((name, block), state.unwrap());
    }
    states
}

/// Found by review: what was cleared in a layer while its volume was flattened read as zeros, not as the parent, from which
/// the layer was cut off.
#[test]
fn a_volume_that_is_rebuilt_is_not_flattened() {
    for (when, ends) in [(0, false), (0, true), (1, false), (1, true), (2, false)] {
        let disk = init(1);
        let store = open(&disk, 2, false).unwrap();
        store.create_volume("w", SIZE).unwrap();
        let content = pattern(3, 2 * EXTENT as usize);
        store.volume("w").unwrap().write_at(0, &content, false).unwrap();
        store.create_snapshot("w", "s", &SnapshotOptions::default()).unwrap();
        store.clone_volume("w", "s", "v").unwrap();
        store.create_snapshot("v", "t", &SnapshotOptions::default()).unwrap();
        let flattened = store.flatten("v", &mut |done, _| {
            if done == when {
                store.set_rebuilding("v", true).unwrap();
                layer(&store, "t").clear(0, EXTENT).unwrap();
                if ends {
                    store.set_rebuilding("v", false).unwrap();
                }
            } else if done == 1 && when == 2 {
                // While the last extent is copied: it stays as it was told.
                let store = store.clone();
                disk.on_read(move || store.set_rebuilding("v", true).unwrap());
            }
            true
        });
        assert_eq!(flattened.unwrap_err().kind(), ErrorKind::Busy, "{when}, {ends}");
        let next = layer(&store, "t").map(when.min(1) * EXTENT, EXTENT, 1).unwrap();
        assert_eq!(next[0].state, LayerState::Absent, "{when}, {ends}: copied after that");
        assert_eq!(store.flatten("v", &mut |_, _| true).is_ok(), ends, "{when}, {ends}");
        store.set_rebuilding("v", false).unwrap();
        assert!(read(&store, "v@t")[..content.len()] == content, "{when}, {ends}");
        store.flatten("v", &mut |_, _| true).unwrap();
        assert_eq!(store.volume_info("v").unwrap().origin, None);
        assert!(read(&store, "v@t")[..content.len()] == content, "{when}, {ends}");
        is_clean(&store);
    }
}

/// Found by review: who writes a layer waited for whatever had been lost sight of last, and a guest that trims another
/// volume all the time held it up for ever.
#[test]
fn a_layer_is_written_while_another_volume_is_pruned_all_the_time() {
    const MOST: u64 = 50;
    let (disk, store) = target();
    insert(&store, "s");
    store.create_volume("w", SIZE).unwrap();
    let other = store.volume("w").unwrap();
    for snapshot in [Some("r"), None] {
        other.write_at(0, &pattern(1, SIZE as usize), false).unwrap();
        if let Some(name) = snapshot {
            store.create_snapshot("w", name, &SnapshotOptions::default()).unwrap();
            store.set_retired("w", name, true).unwrap();
        }
    }
    store.flush().unwrap();
    let pruned = Arc::new(AtomicU64::new(0));
    let (pruning, count) = (store.clone(), Arc::clone(&pruned));
    let prune = move || {
        let nth = count.load(Ordering::Relaxed);
        if nth < MOST && pruning.prune("w", nth * BLOCK, BLOCK).unwrap() > 0 {
            count.store(nth + 1, Ordering::Relaxed);
        }
    };
    prune();
    disk.on_flush(prune);
    layer(&store, "s").write_at(0, &[7; BLOCK as usize]).unwrap();
    let pruned = pruned.load(Ordering::Relaxed);
    assert!((2..10).contains(&pruned), "{pruned} prunes went before");
    disk.on_flush(|| {});
    is_clean(&store);
}

/// What a layer says of a block.
fn state(layer: &Layer, block: u64) -> (LayerState, u8) {
    let state = layer.map(block * BLOCK, BLOCK, 2).unwrap()[0].state;
    let mut bytes = vec![0xaa; BLOCK as usize];
    layer.read_at(block * BLOCK, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mix at {block}");
    (state, bytes[0])
}

/// Several write, zero and clear blocks of the same extents of two layers and the head, each blocks of its own, while others
/// relink, resize, insert, delete, merge and commit: each finds what it did last.
#[test]
fn who_changes_other_blocks_of_the_same_layers_is_in_nobodys_way() {
    const WRITERS: u64 = 4;
    const ROUNDS: usize = 300;
    let (disk, store) = target();
    // Bitmaps leave memory whenever they can.
    store.set_metadata_memory(0);
    ["a", "b"].iter().for_each(|name| insert(&store, name));
    let links = [link("a", None), link("b", Some("a"))];
    store.relink("v", &links, Some("b")).unwrap();
    let writing = AtomicU64::new(WRITERS);
    let write = |number: u64| {
        let layers = [layer(&store, "a"), layer(&store, "b")];
        let head = store.volume("v").unwrap();
        let mut rng = fastrand::Rng::with_seed(number);
        let mut model = BTreeMap::new();
        for round in 0..ROUNDS {
            let block = rng.u64(..SIZE / BLOCK / WRITERS) * WRITERS + number;
            let (at, byte) = (block * BLOCK, round as u8 | 1);
            let (which, action) = (rng.usize(..3), rng.u8(..4));
            let now = match (which, action) {
                (2, 0) => head.write_zeroes(at, BLOCK, false).map(|()| (LayerState::Zero, 0)),
                (2, _) => head
                    .write_at(at, &[byte; BLOCK as usize], false)
                    .map(|()| (LayerState::Data, byte)),
                (_, 0) => layers[which].zero(at, BLOCK).map(|()| (LayerState::Zero, 0)),
                (_, 1) => layers[which].clear(at, BLOCK).map(|()| (LayerState::Absent, 0)),
                _ => layers[which]
                    .write_at(at, &[byte; BLOCK as usize])
                    .map(|()| (LayerState::Data, byte)),
            };
            model.insert((block, which), now.unwrap());
            let said =
                |which| model.get(&(block, which)).copied().filter(|s| s.0 != LayerState::Absent);
            let mut shown = vec![0xaa; BLOCK as usize];
            head.read_at(at, &mut shown).unwrap();
            let wanted = [2, 1, 0].into_iter().find_map(said).map_or(0, |(_, byte)| byte);
            assert!(shown == vec![wanted; BLOCK as usize], "{number} {round}: {block}");
        }
        writing.fetch_sub(1, Ordering::SeqCst);
        model
    };
    let disturb = |number: u64| {
        let mut rng = fastrand::Rng::with_seed(100 + number);
        while writing.load(Ordering::SeqCst) > 0 {
            let done = match rng.u8(..7) {
                0 => store.relink("v", &links, Some("b")),
                1 => store.resize_volume("v", 2 * SIZE),
                2 => store.resize_volume("v", SIZE),
                3 => store.insert_snapshot("v", "x", SIZE, &Default::default()).map(drop),
                4 => store.delete_snapshot("v", "x"),
                5 => store.work(4).map(drop),
                _ => store.flush(),
            };
            if let Err(error) = done {
                let others = [ErrorKind::Busy, ErrorKind::NotFound, ErrorKind::Exists];
                assert!(others.contains(&error.kind()), "{error}");
            }
        }
    };
    let models: Vec<_> = std::thread::scope(|scope| {
        let (write, disturb) = (&write, &disturb);
        let writers: Vec<_> =
            (0..WRITERS).map(|number| scope.spawn(move || write(number))).collect();
        (0..2).for_each(|number| drop(scope.spawn(move || disturb(number))));
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    let all_right = |store: &Store| {
        let layers = [layer(store, "a"), layer(store, "b"), store.layer("v", None).unwrap()];
        for ((block, which), wanted) in models.iter().flatten() {
            assert_eq!(state(&layers[*which], *block), *wanted, "{block} of {which}");
        }
        is_clean(store);
    };
    all_right(&store);
    store.flush().unwrap();
    drop(store);
    all_right(&open(&disk, 3, false).unwrap());
}
