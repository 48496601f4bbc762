//! Observers: they keep nothing from being deleted, and never show anything but what they were made
//! for.

use crate::common::{FixedEnv, Mem, finish_work, init, open, options, pattern};
use dbs_core::info::RangeState;
use dbs_core::store::{Link, SnapshotOptions};
use dbs_core::volume::Observer;
use dbs_core::{ErrorKind, InitOptions, Result, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const KIB: u64 = 1024;
const EXTENT: u64 = 64 * KIB;

fn sample() -> (Arc<Mem>, Store) {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", 4 * EXTENT).unwrap();
    (disk, store)
}

fn write(store: &Store, offset: u64, bytes: &[u8]) {
    store.volume("v").unwrap().write_at(offset, bytes, false).unwrap();
}

fn snapshot(store: &Store, name: &str) {
    store.create_snapshot("v", name, &SnapshotOptions::default()).unwrap();
}

fn read(observer: &Observer, offset: u64, length: usize) -> Result<Vec<u8>> {
    let mut buf = vec![0xaa; length];
    observer.read_at(offset, &mut buf).map(|()| buf)
}

fn is_gone<T: std::fmt::Debug>(result: Result<T>) -> bool {
    result.unwrap_err().kind() == ErrorKind::NotFound
}

#[test]
fn it_sees_what_a_volume_sees() {
    let (_disk, store) = sample();
    write(&store, 8 * KIB, &pattern(1, 8 << 10));
    write(&store, EXTENT - 4096, &pattern(2, 12 << 10));
    snapshot(&store, "s");
    store.volume("v").unwrap().discard(8 * KIB, 4096).unwrap();
    write(&store, 3 * EXTENT, &pattern(3, 4096));
    for (spec, data) in [("v@s", 20 * KIB), ("v", 20 * KIB)] {
        let (observer, volume) = (store.observe(spec).unwrap(), store.volume(spec).unwrap());
        let mut wanted = vec![0; volume.size() as usize];
        volume.read_at(0, &mut wanted).unwrap();
        assert_eq!(read(&observer, 0, wanted.len()).unwrap(), wanted, "{spec}");
        assert_eq!(read(&observer, 8704, 1536).unwrap(), wanted[8704..10240], "{spec}");
        let map = volume.map(0, volume.size(), 99).unwrap();
        assert_eq!(observer.map(0, volume.size(), 99).unwrap(), map);
        assert_eq!(observer.data_bytes().unwrap(), data, "{spec}");
        let seen = observer.look().unwrap();
        assert_eq!((seen.size, seen.settled), (volume.size(), spec == "v@s"));
    }
    let (head, frozen) = (store.observe("v").unwrap(), store.observe("v@s").unwrap());
    assert_eq!(frozen.next_data(0).unwrap(), Some(8 * KIB));
    assert_eq!(frozen.next_data(9 * KIB).unwrap(), Some(9 * KIB));
    assert_eq!(frozen.next_data(16 * KIB).unwrap(), Some(EXTENT - 4096));
    assert_eq!(frozen.next_data(2 * EXTENT).unwrap(), None);
    assert_eq!(frozen.next_hole(0).unwrap(), 0);
    assert_eq!(frozen.next_hole(9 * KIB).unwrap(), 16 * KIB);
    // Over the border of extents, where data goes on.
    assert_eq!(frozen.next_hole(EXTENT - 4096).unwrap(), EXTENT + 8 * KIB);
    assert_eq!(head.next_data(0).unwrap(), Some(12 * KIB), "zeros are no data");
    assert_eq!(head.next_hole(3 * EXTENT).unwrap(), 3 * EXTENT + 4096);
    assert!(read(&head, 4 * EXTENT, 512).unwrap_err().kind() == ErrorKind::Invalid);
    assert!(read(&head, 100, 512).unwrap_err().kind() == ErrorKind::Invalid);
    let names: Vec<_> = head.snapshots().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!((names, head.newest().unwrap()), (vec!["s".to_owned()], Some("s".to_owned())));
    assert_eq!(frozen.snapshot_info().unwrap().unwrap().name, "s");
    assert_eq!(frozen.volume_info().unwrap().name, "v");
}

#[test]
fn what_ends_inside_an_extent_ends_there() {
    let (_disk, store) = sample();
    store.create_volume("odd", EXTENT + 8 * KIB + 512).unwrap();
    let volume = store.volume("odd").unwrap();
    volume.write_at(EXTENT, &pattern(1, 8704), false).unwrap();
    let odd = store.observe("odd").unwrap();
    assert_eq!(odd.next_hole(EXTENT).unwrap(), EXTENT + 8704);
    assert_eq!(odd.data_bytes().unwrap(), 12 * KIB);
    assert_eq!(read(&odd, EXTENT + 8 * KIB, 512).unwrap(), pattern(1, 8704)[8192..]);
}

#[test]
fn it_keeps_nothing_and_outlives_everything() {
    let (_disk, store) = sample();
    write(&store, 0, &pattern(1, 4096));
    snapshot(&store, "s");
    let (frozen, head) = (store.observe("v@s").unwrap(), store.observe("v").unwrap());
    store.rename_snapshot("v", "s", "t").unwrap();
    store.rename_volume("v", "w").unwrap();
    let seen = frozen.look().unwrap();
    assert_eq!((seen.volume.as_str(), seen.snapshot.as_deref()), ("w", Some("t")));
    assert_eq!(read(&frozen, 0, 4096).unwrap(), pattern(1, 4096));
    store.delete_snapshot("w", "t").unwrap();
    assert!(is_gone(read(&frozen, 0, 4096)) && is_gone(frozen.look()));
    assert!(is_gone(frozen.map(0, 4096, 1)) && is_gone(frozen.data_bytes()));
    assert!(is_gone(frozen.next_data(0)) && is_gone(frozen.next_hole(0)));
    assert!(is_gone(frozen.snapshots()) && is_gone(frozen.snapshot_info()));
    assert_eq!(read(&head, 0, 4096).unwrap(), pattern(1, 4096));
    store.delete_volume("w").unwrap();
    assert!(is_gone(read(&head, 0, 4096)) && is_gone(head.look()) && is_gone(head.newest()));
    drop((frozen, head));
    assert_eq!(store.check().unwrap().findings, []);
}

/// Deleted, merged, its place in the table and its extents given to others of the same name.
#[test]
fn what_takes_its_place_is_not_taken_for_it() {
    let (_disk, store) = sample();
    for round in 0..20_u8 {
        write(&store, 0, &pattern(round, 16 << 10));
        snapshot(&store, "s");
        let observer = store.observe("v@s").unwrap();
        assert_eq!(read(&observer, 0, 16 << 10).unwrap(), pattern(round, 16 << 10));
        write(&store, 4096, &pattern(round ^ 0x80, 8192));
        store.delete_snapshot("v", "s").unwrap();
        assert!(is_gone(read(&observer, 0, 4096)), "round {round}, deleted");
        finish_work(&store);
        assert!(is_gone(read(&observer, 0, 4096)), "round {round}, merged");
        snapshot(&store, "s");
        assert!(is_gone(read(&observer, 0, 4096)), "round {round}, replaced");
        let other = store.observe("v@s").unwrap();
        drop(observer);
        assert_eq!(read(&other, 4096, 8192).unwrap(), pattern(round ^ 0x80, 8192));
        store.delete_snapshot("v", "s").unwrap();
    }
    let head = store.observe("v").unwrap();
    store.delete_volume("v").unwrap();
    store.create_volume("v", 4 * EXTENT).unwrap();
    assert!(is_gone(read(&head, 0, 4096)), "a volume of the same name and number");
}

/// By this number others tell whether what they have of the content is still right.
#[test]
fn every_change_of_the_content_is_counted() {
    type Change<'a> = (&'a str, Box<dyn Fn() -> Result<()> + 'a>);
    let (_disk, store) = sample();
    write(&store, 0, &pattern(1, 8192));
    snapshot(&store, "s");
    let (head, frozen) = (store.observe("v").unwrap(), store.observe("v@s").unwrap());
    let count = || head.look().unwrap().writes;
    let volume = store.volume("v").unwrap();
    let layer = store.layer("v", Some("s")).unwrap();
    let link = || Link { snapshot: "s".to_owned(), created_ns: 7, ..Link::default() };
    let changes: [Change<'_>; 11] = [
        ("a first write", Box::new(|| volume.write_at(0, &pattern(2, 4096), false))),
        ("an overwrite", Box::new(|| volume.write_at(0, &pattern(3, 4096), false))),
        ("a part of a block", Box::new(|| volume.write_bytes_at(5, b"x"))),
        ("a discard", Box::new(|| volume.discard(4096, 4096))),
        ("zeros", Box::new(|| volume.write_zeroes(0, 4096, false))),
        ("another size", Box::new(|| store.resize_volume("v", 5 * EXTENT))),
        ("a rollback", Box::new(|| store.rollback("v", "s"))),
        ("a write to a layer", Box::new(|| layer.write_at(0, &pattern(4, 4096)))),
        ("zeros in a layer", Box::new(|| layer.zero(4096, 4096))),
        ("less in a layer", Box::new(|| layer.clear(0, 4096))),
        ("another tree", Box::new(|| store.relink("v", &[link()], None))),
    ];
    for (name, change) in changes {
        store.set_rebuilding("v", name.contains("layer") || name.contains("tree")).unwrap();
        finish_work(&store);
        let before = count();
        read(&head, 0, 4096).unwrap();
        assert_eq!(count(), before, "reading, before {name}");
        change().unwrap();
        assert!(count() > before, "{name}");
        assert_eq!(frozen.look().unwrap().writes, count(), "{name}");
    }
    store.set_rebuilding("v", false).unwrap();
    volume.write_at(0, &pattern(5, 4096), false).unwrap();
    snapshot(&store, "t");
    volume.write_at(0, &pattern(6, 4096), false).unwrap();
    store.set_retired("v", "t", true).unwrap();
    let before = count();
    assert_eq!(store.prune("v", 0, 4 * EXTENT).unwrap(), 4096);
    assert!(count() > before, "a prune");
}

/// The snapshot is deleted while a read of it runs. Its merge, which may copy over blocks that only the
/// snapshot showed, waits for the read.
#[test]
fn a_read_that_a_deletion_overtakes_is_of_what_was_there() {
    let (disk, store) = sample();
    let overtaken = Arc::new(AtomicBool::new(false));
    for (own, later) in [(16, 1), (1, 16), (8, 8)] {
        write(&store, 0, &pattern(1, own * 4096));
        snapshot(&store, "s");
        write(&store, 0, &pattern(2, later * 4096));
        let observer = store.observe("v@s").unwrap();
        let (inside, done) = (store.clone(), Arc::clone(&overtaken));
        disk.on_read(move || {
            inside.delete_snapshot("v", "s").unwrap();
            while inside.work(1).unwrap().done > 0 {}
            assert!(inside.work(1).unwrap().waits);
            inside.volume("v").unwrap().write_at(2 * EXTENT, &pattern(9, 4096), false).unwrap();
            done.store(true, Ordering::SeqCst);
        });
        let found = read(&observer, 0, 4096).unwrap();
        assert!(found == pattern(1, 4096), "{own} and {later} blocks");
        assert!(is_gone(read(&observer, 0, 4096)));
        finish_work(&store);
        assert!(overtaken.swap(false, Ordering::SeqCst));
    }
    assert_eq!(store.check().unwrap().findings, []);
}

/// What is freed while a read of the head runs is not given to others before it ends.
#[test]
fn a_read_of_a_head_is_fenced() {
    let (disk, store) = sample();
    write(&store, 0, &pattern(1, 4096));
    let observer = store.observe("v").unwrap();
    let inside = store.clone();
    disk.on_read(move || {
        let volume = inside.volume("v").unwrap();
        volume.discard(0, EXTENT).unwrap();
        volume.flush().unwrap();
        inside.create_volume("w", EXTENT).unwrap();
        inside.volume("w").unwrap().write_at(0, &pattern(7, 4096), true).unwrap();
    });
    assert_eq!(read(&observer, 0, 4096).unwrap(), pattern(1, 4096));
    assert_eq!(read(&observer, 0, 4096).unwrap(), vec![0; 4096]);
}

#[test]
fn changes_are_counted_and_waited_for() {
    let (_disk, store) = sample();
    let mut seen = store.changes();
    write(&store, 0, &pattern(1, 4096));
    assert_eq!(store.changes(), seen, "content does not count");
    let begun = Instant::now();
    assert_eq!(store.wait_for_change(seen, Duration::from_millis(20)), seen);
    assert!(begun.elapsed() >= Duration::from_millis(20));
    let other = store.clone();
    let waiting = std::thread::spawn(move || other.wait_for_change(seen, Duration::from_secs(600)));
    std::thread::sleep(Duration::from_millis(20));
    snapshot(&store, "s");
    assert!(waiting.join().unwrap() > seen && begun.elapsed() < Duration::from_secs(300));
    let labels = [("a".to_owned(), "b".to_owned())].into();
    let commands: [&dyn Fn() -> Result<()>; 7] = [
        &|| store.rename_snapshot("v", "s", "t"),
        &|| store.set_labels("v", "t", &labels),
        &|| store.set_retired("v", "t", true),
        &|| store.resize_volume("v", 8 * EXTENT),
        &|| store.rename_volume("v", "w"),
        &|| store.delete_snapshot("w", "t"),
        &|| store.delete_volume("w"),
    ];
    for (index, command) in commands.iter().enumerate() {
        seen = store.changes();
        command().unwrap();
        assert!(store.changes() > seen, "command {index}");
    }
}

#[test]
fn maps_and_differences_are_put_together_from_steps() {
    const EXTENTS: u64 = 5000;
    let disk = Arc::new(Mem::new(512 << 20));
    let options = InitOptions { size: Some(512 << 20), journal_size: None, ..options() };
    Store::init_on(&*disk, &options, &FixedEnv::new(1)).unwrap();
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("v", EXTENTS * EXTENT).unwrap();
    for extent in 0..EXTENTS {
        write(&store, extent * EXTENT + 8192, &pattern(1, 4096));
    }
    snapshot(&store, "s");
    let changed = [0, 1, 4095, 4096, 4097, EXTENTS - 1];
    for extent in changed {
        write(&store, extent * EXTENT, &pattern(2, 4096));
    }
    let size = EXTENTS * EXTENT;
    let map = store.volume("v@s").unwrap().map(0, size, usize::MAX).unwrap();
    let data = map.iter().filter(|range| range.state == RangeState::Data);
    let offsets: Vec<_> = data.map(|range| (range.offset, range.length)).collect();
    let wanted: Vec<_> = (0..EXTENTS).map(|extent| (extent * EXTENT + 8192, 4096)).collect();
    assert_eq!(offsets, wanted);
    assert_eq!(map.iter().map(|range| range.length).sum::<u64>(), size, "without gaps");
    let observer = store.observe("v@s").unwrap();
    assert_eq!(observer.map(0, size, usize::MAX).unwrap(), map);
    assert_eq!(observer.map(0, size, 9001).unwrap(), map[..9001]);
    let diff = store.diff("v", Some("s"), None, 0, size).unwrap();
    let offsets: Vec<_> = diff.iter().map(|range| (range.offset, range.length)).collect();
    assert_eq!(offsets, changed.map(|extent| (extent * EXTENT, 4096)));
    let usage = store.snapshot_info("v", "s").unwrap().usage;
    assert_eq!((usage.referenced, usage.exclusive), (EXTENTS * 4096, 0));
    let usage = store.volume_info("v").unwrap().usage;
    let referenced = (EXTENTS + changed.len() as u64) * 4096;
    assert_eq!((usage.referenced, usage.shared), (referenced, 0), "nobody else shows it");
    assert_eq!(usage.allocated, (EXTENTS + changed.len() as u64) * EXTENT);
}
