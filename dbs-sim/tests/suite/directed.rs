//! Mistakes that random histories do not meet, or hardly ever: each with the one sequence that shows it.

use dbs_core::sabotage::{Bug, set};
use dbs_core::store::{Link, SnapshotOptions};
use dbs_core::{ErrorKind, Store, Volume};
use dbs_sim::{Config, Faults, Medium, SimDisk, SimEnv};
use std::sync::Arc;

const BLOCK: usize = 4096;
const SIZE: u64 = 4 << 20;

/// A store with volume `v`, whose first block holds 1.
fn opened(seed: u64) -> (Arc<SimDisk>, Store, Volume) {
    let env = Arc::new(SimEnv::new(seed));
    let disk = Arc::new(SimDisk::new(Medium::file(SIZE), seed));
    Store::init_on(&*disk, &Config::small(1).init, &*env).unwrap();
    let store = Store::open_on(Arc::clone(&disk) as _, None, env as _, false).unwrap();
    store.create_volume("v", 1 << 20).unwrap();
    let volume = store.volume("v").unwrap();
    volume.write_at(0, &[1; BLOCK], true).unwrap();
    (disk, store, volume)
}

fn first_byte(volume: &Volume, block: u64) -> dbs_core::Result<u8> {
    let mut found = [0; BLOCK];
    volume.read_at(block * BLOCK as u64, &mut found)?;
    assert!(found.iter().all(|byte| *byte == found[0]), "a mix");
    Ok(found[0])
}

/// From here on the next change fails.
fn fail_next(disk: &SimDisk) {
    disk.arm(Faults { eio_at: Some(1), ..Faults::default() });
}

/// What was read before a write that failed may be what is there no more: its checksum is not learnt, neither by a reader
/// nor by a scrub.
#[test]
fn a_read_teaches_nothing_of_before_a_write_that_failed() {
    let mut written = 0;
    for (seed, scrubs) in (0..16).flat_map(|seed| [(seed, false), (seed, true)]) {
        let (disk, store, volume) = opened(seed);
        let (faulty, writer) = (Arc::clone(&disk), volume.clone());
        disk.after_read(1, move || {
            fail_next(&faulty);
            assert!(writer.write_at(0, &[2; BLOCK], false).is_err());
            faulty.arm(Faults::default());
        });
        if scrubs {
            store.scrub(true, &mut |_| true).unwrap();
        } else {
            first_byte(&volume, 0).unwrap();
        }
        assert!(!disk.awaits_read());
        let found = first_byte(&volume, 0);
        let found = found.unwrap_or_else(|e| panic!("disk {seed}, by a scrub {scrubs}: {e}"));
        written += u32::from(found == 2);
    }
    assert!((1..32).contains(&written), "{written}");
}

/// A snapshot whose merge fails for the store's sake is not one that cannot be merged: who works is told.
#[test]
fn a_merge_in_a_store_that_is_poisoned_is_not_put_off() {
    let (disk, store, volume) = opened(1);
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    volume.write_at(BLOCK as u64, &[2; BLOCK], true).unwrap();
    store.delete_snapshot("v", "s").unwrap();
    let (faulty, other) = (Arc::clone(&disk), store.clone());
    disk.after_read(1, move || {
        fail_next(&faulty);
        assert!(other.flush().is_err());
        fail_next(&faulty);
    });
    let worked = store.work(1);
    assert!(!disk.awaits_read(), "nothing is copied");
    assert!(worked.is_err(), "{worked:?}");
    assert_eq!(store.info().snapshots_put_off, 0);
}

/// Closing says what has failed, not that something has.
#[test]
fn closing_tells_the_error_that_it_met() {
    let (disk, store, volume) = opened(1);
    volume.write_at(BLOCK as u64, &[2; BLOCK], false).unwrap();
    fail_next(&disk);
    let error = store.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
}

/// What a clone shows of a block that neither it nor its parent held when it was flattened, once the parent's space is
/// another volume's. Nothing was copied, so only the cut itself can make its view forget the parent.
fn shown_after_flatten() -> u8 {
    let (_disk, store, volume) = opened(1);
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    store.clone_volume("v", "s", "clone").unwrap();
    let clone = store.volume("clone").unwrap();
    // It hides all that the parent has in the extent.
    clone.write_at(0, &[2; BLOCK], true).unwrap();
    // The layer that is cut off, with the head, which looks through it, above.
    store.create_snapshot("clone", "t", &Default::default()).unwrap();
    assert_eq!((first_byte(&clone, 0).unwrap(), first_byte(&clone, 1).unwrap()), (2, 0));
    store.flatten("clone", &mut |_, _| true).unwrap();
    drop(volume);
    store.delete_volume("v").unwrap();
    while store.work(64).unwrap().remaining > 0 {}
    store.flush().unwrap();
    // Who takes all the space gets the extent.
    store.create_volume("w", 8 << 20).unwrap();
    let other = store.volume("w").unwrap();
    let full =
        (0..128).find(|extent| other.write_at(extent << 16, &[9; 16 * BLOCK], true).is_err());
    assert!(full.is_some());
    first_byte(&clone, 1).unwrap()
}

#[test]
fn a_flattened_clone_forgets_its_parent_though_nothing_was_copied() {
    assert_eq!(shown_after_flatten(), 0);
    set(Some(Bug::CutKeepsViews));
    let shown = shown_after_flatten();
    set(None);
    assert_eq!(shown, 9, "the test would not notice");
}

/// Found by a history: who made a volume on a file, or an encrypted one, in a store that takes no more changes was told what
/// else was wrong with it, or that a table is full, and not to open the store again.
#[test]
fn a_poisoned_store_says_so_whatever_else_is_wrong() {
    let (disk, store, volume) = opened(1);
    volume.write_at(BLOCK as u64, &[2; BLOCK], false).unwrap();
    fail_next(&disk);
    assert!(store.flush().is_err());
    disk.arm(Faults::default());
    let made = [
        store.create_volume("v", 1 << 20),
        store.create_backed("v", 1 << 20, dbs_sim::image::file()),
        store.create_encrypted("v", 1 << 20, &dbs_sim::image::secret(false)),
    ];
    for made in made {
        assert_eq!(made.unwrap_err().kind(), ErrorKind::Poisoned);
    }
}

/// Found on reading again: a volume that is being rebuilt shrank, and the process was killed before anything was hidden behind
/// the new end. It had nothing there to hide as yet. What came into a layer later was shown when the volume had grown again.
#[test]
fn what_arrives_behind_an_end_that_a_kill_made_stays_hidden() {
    let (small, block) = (64 << 10, 100);
    let mut shrunk = 0;
    for changes in 1.. {
        let (disk, store, volume) = opened(1);
        drop(volume);
        store.set_rebuilding("v", true).unwrap();
        store.insert_snapshot("v", "s", 1 << 20, &SnapshotOptions::default()).unwrap();
        store.relink("v", &[Link { snapshot: "s".into(), ..Link::default() }], Some("s")).unwrap();
        disk.arm(Faults { stop_at: Some(changes), ..Faults::default() });
        let resized = store.resize_volume("v", small);
        disk.stop();
        drop(store);
        disk.revive();
        disk.arm(Faults::default());
        let env = Arc::new(SimEnv::new(2));
        let store = Store::open_on(Arc::clone(&disk) as _, None, env as _, false).unwrap();
        if store.volume_size("v").unwrap() == small {
            shrunk += 1;
            store.resize_volume("v", 1 << 20).unwrap();
            let layer = store.layer("v", Some("s")).unwrap();
            layer.write_at(block * BLOCK as u64, &[3; BLOCK]).unwrap();
            assert_eq!(first_byte(&store.volume("v").unwrap(), block).unwrap(), 0, "{changes}");
            // Where it never was so large, what comes is its content.
            store.resize_volume("v", 2 << 20).unwrap();
            store.insert_snapshot("v", "t", 2 << 20, &SnapshotOptions::default()).unwrap();
            let links = [("s", None), ("t", Some("s"))];
            let links = links.map(|(name, parent)| Link {
                snapshot: name.into(),
                parent: parent.map(String::from),
                ..Link::default()
            });
            store.relink("v", &links, Some("t")).unwrap();
            let layer = store.layer("v", Some("t")).unwrap();
            for at in [block, 300] {
                layer.write_at(at * BLOCK as u64, &[4; BLOCK]).unwrap();
            }
            let volume = store.volume("v").unwrap();
            let shown = [block, 300].map(|at| first_byte(&volume, at).unwrap());
            assert_eq!(shown, [0, 4], "{changes}");
            assert!(store.check().unwrap().findings.is_empty());
        }
        if resized.is_ok() {
            break;
        }
    }
    assert!(shrunk > 1);
}
