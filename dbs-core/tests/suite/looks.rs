//! How long the metadata is held: all requests of a store wait for that. By the layers that are looked at, as time says
//! nothing on a busy machine.

use crate::common::{BLOCK, FixedEnv, Mem, options, pattern};
use crate::durability::open_with_tail;
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, Store, looks};
use std::io;
use std::sync::Arc;

const SNAPSHOTS: u64 = 5_000;
/// Of each of two snapshots.
const CLONES: u64 = 2_500;
const EXTENT: u64 = 64 << 10;
/// Of each volume.
const EXTENTS: u64 = 64;
/// What one hold may look at: all snapshots there are, each a few times, as lists do and as one extent takes; and not
/// each of them for each of the others.
const MOST: u64 = 8 * (SNAPSHOTS + 2 * CLONES);

/// Volume `v` with thousands of snapshots one above the other, and thousands of clones of the newest; and volume `g` with one
/// snapshot, and as many clones of that. All extents are written before the first snapshot.
fn deep_and_wide() -> Store {
    let options = InitOptions {
        max_volumes: Some(2 * CLONES as u32 + 8),
        max_snapshots: Some((SNAPSHOTS + 2 * CLONES) as u32 + 16),
        journal_size: Some(16 << 20),
        max_size: None,
        ..options()
    };
    let disk = Mem::new(512 << 20);
    Store::init_on(&disk, &options, &FixedEnv::new(1)).unwrap();
    let store = open_with_tail(&Arc::new(disk));
    for (name, snapshots) in [("v", SNAPSHOTS), ("g", 1)] {
        store.create_volume(name, EXTENTS * EXTENT).unwrap();
        let volume = store.volume(name).unwrap();
        for extent in 0..EXTENTS {
            volume.write_at(extent * EXTENT, &pattern(1, BLOCK), false).unwrap();
        }
        for index in 0..snapshots {
            store.create_snapshot(name, &format!("s{index}"), &SnapshotOptions::default()).unwrap();
        }
        for index in 0..CLONES {
            let newest = format!("s{}", snapshots - 1);
            store.clone_volume(name, &newest, &format!("{name}{index}")).unwrap();
        }
    }
    for name in ["v", "v0", "g0", "g"] {
        store.volume(name).unwrap().write_zeroes(0, EXTENTS * EXTENT / 2, false).unwrap();
    }
    store
}

/// For who wants nothing of what was found.
fn done<T>(_found: T) {}

/// Found by review: commands that only look stopped all I/O for seconds, beside many snapshots, many clones, or both.
#[test]
fn no_look_at_a_store_asks_all_layers_for_each_of_the_others() {
    let store = &deep_and_wide();
    let (size, newest) = (EXTENTS * EXTENT, &*format!("s{}", SNAPSHOTS - 1));
    let at_newest = &*format!("v@{newest}");
    let specs = ["v", "v@s0", "v@s2500", at_newest, "v0", "v7", "g", "g@s0", "g0", "g7"];
    let usage = |volume, snapshot| done(store.usage(volume, snapshot).unwrap());
    let diff = |volume, from, to| done(store.diff(volume, from, to, 0, size).unwrap());
    let observed = || specs.iter().map(|spec| store.observe(spec).unwrap());
    let opened = || specs.iter().map(|spec| store.volume(spec).unwrap());
    let commands: [(&str, &dyn Fn()); _] = [
        ("info", &|| done(store.info())),
        ("volumes", &|| assert_eq!(store.volumes(false).len() as u64, 2 * CLONES + 2)),
        ("volumes with their I/O", &|| done(store.volume_io())),
        ("snapshots", &|| assert_eq!(store.snapshots("v", false).unwrap().len() as u64, SNAPSHOTS)),
        ("layers", &|| done(store.layers("v").unwrap())),
        ("children of a volume", &|| done(store.children("v", None).unwrap())),
        ("children of a snapshot", &|| done(store.children("v", Some(newest)).unwrap())),
        ("usage of a volume", &|| usage("v", None)),
        ("usage of the oldest", &|| usage("v", Some("s0"))),
        ("usage of one in the middle", &|| usage("v", Some("s2500"))),
        ("usage of the newest", &|| usage("v", Some(newest))),
        ("usage of a clone", &|| {
            ["v0", "v7", "g0", "g7"].into_iter().for_each(|clone| usage(clone, None));
        }),
        ("usage of an image", &|| usage("g", None)),
        ("usage of its snapshot", &|| usage("g", Some("s0"))),
        ("difference of a volume", &|| diff("v", None, None)),
        ("difference to the oldest", &|| diff("v", Some("s0"), None)),
        ("difference of snapshots", &|| diff("v", Some("s0"), Some("s4000"))),
        ("difference of a clone", &|| diff("v0", Some(at_newest), None)),
        ("all of a volume and its snapshots", &|| done(store.observe_volumes())),
        ("observers", &|| {
            for observer in observed() {
                done((observer.look().unwrap(), observer.volume_info().unwrap()));
                done((observer.snapshot_info().unwrap(), observer.newest().unwrap()));
                done(observer.snapshots().unwrap());
            }
        }),
        ("maps", &|| observed().for_each(|one| done(one.map(0, size, 1 << 16).unwrap()))),
        ("places of data", &|| {
            for observer in observed() {
                done((observer.data_bytes().unwrap(), observer.next_data(0).unwrap()));
                done(observer.next_hole(0).unwrap());
            }
        }),
        ("reads", &|| opened().for_each(|v| v.read_at(0, &mut [0; 4 * BLOCK]).unwrap())),
        ("maps of volumes", &|| opened().for_each(|v| done(v.map(0, size, 1 << 16).unwrap()))),
        ("maps of layers", &|| opened().for_each(|v| done(v.map_layers(0, size, 9).unwrap()))),
        ("space", &|| done(store.space_map(0, None, 64).unwrap())),
        ("owners", &|| done(store.space_owners(0, 512 << 20).unwrap())),
        ("check", &|| assert_eq!(store.check().unwrap().findings, [])),
        ("dump", &|| store.dump(&mut io::sink()).unwrap()),
    ];
    let mut wrong = Vec::new();
    for (what, command) in commands {
        done(looks::take_most());
        command();
        let most = looks::take_most();
        if most > MOST {
            wrong.push((what, most));
        }
    }
    assert!(wrong.is_empty(), "looks in one hold: {wrong:?}, of {MOST}");
}
