//! Keys in the wrong place, as tables have them whose blocks were written back at different times: a repair tells apart
//! what is encrypted with which key and what is not, and loses nothing beyond that.

use crate::common::{
    BLOCK, FixedEnv, Mem, contents, dump, finish_work, init, open, options, pattern,
};
use crate::plant::{Plant, SNAPSHOTS, VOLUMES};
use dbs_core::format::slots::{self, KeySlot};
use dbs_core::format::{VolumeSlot, block};
use dbs_core::info::{LostRange, RepairKind, RepairReport};
use dbs_core::store::SnapshotOptions;
use dbs_core::{ErrorKind, InitOptions, Secret, Store};
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::FromZeros;

const STORE: u64 = 4 << 20;
const SIZE: u64 = 256 << 10;

type Contents = BTreeMap<String, Vec<u8>>;

fn secret(byte: u8) -> Secret {
    Secret::KeyFile([byte; 32].into())
}

/// Whether each volume that is encrypted could be unlocked, with the secret of one of them.
fn unlock(store: &Store) -> bool {
    let all = store.volumes(false).into_iter().filter(|volume| volume.encryption.is_some());
    all.map(|volume| [1, 2].iter().any(|byte| store.unlock(&volume.name, &secret(*byte)).is_ok()))
        .fold(true, |all, one| all & one)
}

/// `plain` with a snapshot; `v`, encrypted, with two, and a clone `c` of the first; `w` with another key. Each has something
/// of its own in each block of 16 KiB, and each layer something else.
fn sample() -> (Arc<Mem>, Contents) {
    let disk = Arc::new(Mem::new(STORE));
    let wide = InitOptions { max_volumes: Some(8), max_snapshots: Some(32), ..options() };
    Store::init_on(&*disk, &wide, &FixedEnv::new(1)).unwrap();
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("plain", SIZE).unwrap();
    store.create_encrypted("v", SIZE, &secret(1)).unwrap();
    store.create_encrypted("w", SIZE, &secret(2)).unwrap();
    let mut written = 0;
    let mut write = |volume: &str, part: u64| {
        written += 1;
        let bytes = pattern(written, 16 << 10);
        store.volume(volume).unwrap().write_at(part * (16 << 10), &bytes, false).unwrap();
    };
    for (volume, snapshots) in [("plain", &["p1"][..]), ("v", &["one", "two"]), ("w", &["w1"])] {
        for (at, snapshot) in (0..).zip(snapshots) {
            write(volume, at);
            write(volume, 5);
            store.create_snapshot(volume, snapshot, &SnapshotOptions::default()).unwrap();
        }
        write(volume, 3);
    }
    store.clone_volume("v", "one", "c").unwrap();
    write("c", 7);
    let contents = contents(&store);
    store.close().unwrap();
    (disk, contents)
}

/// Repairs it: it is clean then, and a second repair finds nothing to do.
fn repair(disk: &Arc<Mem>) -> RepairReport {
    let plan = || Store::plan_repair_on(&**disk, None, &FixedEnv::new(9), false).unwrap();
    let report = plan().carry_out(&**disk).unwrap();
    let check = Store::check_on(&**disk).unwrap();
    assert!(check.is_clean(), "{check:?} after {:?}", report.steps);
    assert!(plan().report().steps.is_empty(), "{report:?}");
    report
}

/// How many blocks of a volume or snapshot are lost; all others are as they were.
fn lost(store: &Store, spec: &str, before: &[u8]) -> usize {
    let volume = store.volume(spec).unwrap();
    assert_eq!(volume.size() as usize, before.len(), "{spec}");
    let mut lost = 0;
    for (index, wanted) in before.chunks(BLOCK).enumerate() {
        let mut found = vec![0xaa; wanted.len()];
        match volume.read_at((index * BLOCK) as u64, &mut found) {
            Ok(()) => assert!(found == wanted, "{spec}: block {index} is another"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{spec}: {error}");
                lost += 1;
            }
        }
    }
    lost
}

/// What is planted, what a step says of it, which volumes and snapshots are called otherwise then, and of which only what
/// they hold themselves is left.
struct Case {
    plant: fn(&Plant<'_>) -> Option<u64>,
    told: &'static str,
    renamed: &'static [(&'static str, &'static str)],
    partly: &'static [&'static str],
}

fn key_of(p: &Plant<'_>, volume: &str) -> KeySlot {
    let slot = p.volume_slot(volume);
    let payload = p.get(p.address(VOLUMES, slot / 8, 0), BLOCK).split_off(block::HEADER_BYTES);
    slots::get::<VolumeSlot>(&payload, (slot % 8) as u32).unwrap().key
}

fn id(p: &Plant<'_>, spec: &str) -> u32 {
    p.snapshot_slot(spec) as u32 + 1
}

const CASES: [Case; 10] = [
    // A chain of two kinds.
    Case {
        plant: |p| p.snapshot("c", |slot| slot.parent = id(p, "plain@p1").into()),
        told: "does not have its key: what it shows of others is lost",
        renamed: &[],
        partly: &["c"],
    },
    Case {
        plant: |p| p.snapshot("plain", |slot| slot.parent = id(p, "v@one").into()),
        told: "does not have its key: what it shows of others is lost",
        renamed: &[],
        partly: &["plain"],
    },
    Case {
        plant: |p| p.snapshot("w@w1", |slot| slot.parent = id(p, "v@one").into()),
        told: "does not have its key: what it shows of others is lost",
        renamed: &[],
        partly: &["w@w1", "w"],
    },
    // A volume of two kinds.
    Case {
        plant: |p| {
            p.snapshot("plain@p1", |slot| slot.volume = (p.volume_slot("v") as u32 + 1).into())
        },
        told: "does not have the key of volume 2, is volume 5's now",
        renamed: &[("plain@p1", "repaired-5@p1")],
        partly: &[],
    },
    Case {
        plant: |p| {
            let plain = p.volume_slot("plain") as u32 + 1;
            p.snapshot("v@one", |slot| slot.volume = plain.into());
            p.snapshot("v@two", |slot| slot.volume = plain.into())
        },
        told: "volume 5 gets the key in the slot of volume 2",
        renamed: &[("v@one", "repaired-5@one"), ("v@two", "repaired-5@two")],
        partly: &[],
    },
    // A key that is not the volume's.
    Case {
        plant: |p| p.volume("plain", |slot| slot.key = key_of(p, "v")),
        told: "volume 1 is not encrypted: the key in its slot is not its own",
        renamed: &[],
        partly: &[],
    },
    Case {
        plant: |p| {
            let (v, w) = (key_of(p, "v"), key_of(p, "w"));
            p.volume("w", |slot| slot.key = v);
            p.volume("v", |slot| slot.key = w)
        },
        told: "volume 3 gets the key in the slot of volume 2",
        renamed: &[],
        partly: &[],
    },
    // The one that has it needs none.
    Case {
        plant: |p| {
            let key = key_of(p, "w");
            p.volume("plain", |slot| slot.key = key);
            p.volume("w", |slot| slot.key = KeySlot::new_zeroed())
        },
        told: "volume 3 gets the key in the slot of volume 1",
        renamed: &[],
        partly: &[],
    },
    // No key, and none that can be: a clone has it.
    Case {
        plant: |p| p.volume("v", |slot| slot.key = KeySlot::new_zeroed()),
        told: "volume 2 gets the key in the slot of volume 4",
        renamed: &[],
        partly: &[],
    },
    Case {
        plant: |p| p.volume("v", |slot| slot.key.method = 2),
        told: "volume 2 gets the key in the slot of volume 4",
        renamed: &[],
        partly: &[],
    },
];

#[test]
fn keys_and_families_that_disagree_are_told_apart() {
    let (disk, before) = sample();
    assert_eq!(before.len(), 8, "{:?}", before.keys());
    let bytes = disk.bytes();
    for (number, case) in CASES.iter().enumerate() {
        let disk = Arc::new(Mem::from_bytes(bytes.clone()));
        let text = dump(&open(&disk, 3, true).unwrap());
        (case.plant)(&Plant { disk: &disk, dump: &serde_json::from_str(&text).unwrap() });
        let refused = open(&disk, 4, true).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{number}: {refused}");
        let report = repair(&disk);
        let told = report.steps.iter().any(|step| step.message.contains(case.told));
        assert!(told, "{number}: {:?}", report.steps);
        let store = open(&disk, 5, false).unwrap();
        assert!(unlock(&store), "{number}: {:?}", report.steps);
        for (spec, bytes) in &before {
            let renamed = case.renamed.iter().find(|(from, _)| from == spec);
            let lost = lost(&store, renamed.map_or(spec, |(_, to)| to), bytes);
            let partly = case.partly.contains(&spec.as_str());
            assert_eq!(lost > 0, partly, "{number}: {spec}: {lost}, {:?}", report.steps);
            // What it holds itself is there.
            assert!(lost < bytes.len() / BLOCK, "{number}: {spec}");
        }
        // What is written now is read again, also when it is opened anew.
        for volume in ["plain", "v", "w", "c"] {
            store.volume(volume).unwrap().write_at(0, &pattern(99, BLOCK), true).unwrap();
        }
        store.close().unwrap();
        let store = open(&disk, 6, false).unwrap();
        assert!(unlock(&store));
        for volume in ["plain", "v", "w", "c"] {
            let mut found = vec![0; BLOCK];
            store.volume(volume).unwrap().read_at(0, &mut found).unwrap();
            assert!(found == pattern(99, BLOCK), "{number}: {volume}");
        }
    }
}

/// A key that nobody has any more is told as lost, once.
#[test]
fn a_key_that_nobody_has_is_lost() {
    let (disk, before) = sample();
    let text = dump(&open(&disk, 3, true).unwrap());
    let p = Plant { disk: &disk, dump: &serde_json::from_str(&text).unwrap() };
    p.volume("w", |slot| slot.key = key_of(&p, "v"));
    let report = repair(&disk);
    let told = "volume 3 has a key that is not that of its data, which is lost";
    let of_it = |kind| report.steps.iter().filter(|step| step.kind == kind).count();
    assert!(report.steps.iter().any(|step| step.message == told), "{:?}", report.steps);
    assert_eq!((of_it(RepairKind::Lost), report.steps.len()), (1, 1), "{:?}", report.steps);
    let lost_of = |snapshot: Option<&str>| LostRange {
        volume: "w".to_owned(),
        snapshot: snapshot.map(str::to_owned),
        offset: 0,
        length: SIZE,
    };
    assert_eq!(report.lost.len(), 2, "{:?}", report.lost);
    assert!([None, Some("w1")].map(lost_of).iter().all(|one| report.lost.contains(one)));
    let store = open(&disk, 5, false).unwrap();
    assert!(!unlock(&store));
    for byte in [1, 2] {
        assert_eq!(store.unlock("w", &secret(byte)).unwrap_err().kind(), ErrorKind::Corrupt);
    }
    let mut found = [0xaa; BLOCK];
    let error = store.volume("w").unwrap().read_at(0, &mut found).unwrap_err();
    assert!(error.to_string().contains("its key is lost"), "{error}");
    assert!(found == [0xaa; BLOCK], "shown");
    let rest: Vec<_> = before.iter().filter(|(spec, _)| !spec.starts_with('w')).collect();
    assert!(rest.iter().all(|(spec, bytes)| lost(&store, spec, bytes) == 0));
}

/// Both copies of the block of snapshots are gone in a store that once had an encrypted volume. What was not encrypted is
/// there as in any other store, unless there is a key: then nobody knows what it was.
#[test]
fn plain_snapshots_come_back_where_no_volume_is_encrypted_any_more() {
    for left in [None, Some(VOLUMES), Some(SNAPSHOTS)] {
        let disk = init(1);
        let store = open(&disk, 2, false).unwrap();
        store.create_encrypted("gone", SIZE, &secret(1)).unwrap();
        store.create_volume("plain", SIZE).unwrap();
        let plain = store.volume("plain").unwrap();
        plain.write_at(0, &pattern(1, BLOCK), false).unwrap();
        store.create_snapshot("plain", "below", &SnapshotOptions::default()).unwrap();
        plain.write_at(4096, &pattern(2, BLOCK), false).unwrap();
        store.create_snapshot("plain", "leaf", &SnapshotOptions::default()).unwrap();
        drop(plain);
        store.rollback("plain", "below").unwrap();
        if left != Some(SNAPSHOTS) {
            store.delete_volume("gone").unwrap();
        }
        finish_work(&store);
        store.close().unwrap();
        let text = dump(&open(&disk, 3, true).unwrap());
        let p = Plant { disk: &disk, dump: &serde_json::from_str(&text).unwrap() };
        p.rot_both(SNAPSHOTS, 0);
        if left == Some(VOLUMES) {
            p.rot_both(VOLUMES, 0);
        }
        repair(&disk);
        let store = open(&disk, 5, false).unwrap();
        let mut shown = 0;
        for volume in store.volumes(false) {
            for snapshot in store.snapshots(&volume.name, false).unwrap() {
                let spec = format!("{}@{}", volume.name, snapshot.name);
                let mut found = [0; BLOCK];
                let read = store.volume(&spec).unwrap().read_at(4096, &mut found);
                shown += usize::from(read.is_ok() && found == pattern(2, BLOCK)[..]);
            }
        }
        assert_eq!(shown, usize::from(left.is_none()), "{left:?}");
    }
}

/// Found by review: a stream says itself which family it is of, and the key of what was received from a stranger was taken
/// before that of a clone, if it stood before it.
#[test]
fn a_clone_has_the_key_rather_than_what_says_that_it_is_of_the_family() {
    let disk = init(1);
    let store = open(&disk, 2, false).unwrap();
    store.create_volume("place", SIZE).unwrap();
    store.create_encrypted("v", SIZE, &secret(1)).unwrap();
    store.volume("v").unwrap().write_at(0, &pattern(1, BLOCK), false).unwrap();
    store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    store.create_encrypted("w", SIZE, &secret(2)).unwrap();
    store.clone_volume("v", "s", "c").unwrap();
    let mut forged = store.wrapped_key("w").unwrap();
    forged.family = store.wrapped_key("v").unwrap().family;
    store.delete_volume("place").unwrap();
    finish_work(&store);
    store.create_wrapped_rebuilding("stranger", SIZE, &forged).unwrap();
    store.close().unwrap();
    let text = dump(&open(&disk, 3, true).unwrap());
    let p = Plant { disk: &disk, dump: &serde_json::from_str(&text).unwrap() };
    assert!(p.volume_slot("stranger") < p.volume_slot("v"), "it has to stand first");
    p.volume("v", |slot| slot.key = KeySlot::new_zeroed());
    repair(&disk);
    let store = open(&disk, 5, false).unwrap();
    store.unlock("v", &secret(1)).unwrap();
    let mut found = vec![0; BLOCK];
    store.volume("v").unwrap().read_at(0, &mut found).unwrap();
    assert!(found == pattern(1, BLOCK));
}

/// Found by review: where nothing is encrypted a key that cannot be was replaced by the mark of one that is lost, which
/// cannot be there either: the store was refused for good.
#[test]
fn a_key_where_nothing_is_encrypted_goes() {
    let possible = {
        let (disk, _) = sample();
        let text = dump(&open(&disk, 3, true).unwrap());
        key_of(&Plant { disk: &disk, dump: &serde_json::from_str(&text).unwrap() }, "v")
    };
    for key in [KeySlot { method: 2, ..possible }, possible] {
        let disk = init(1);
        let store = open(&disk, 2, false).unwrap();
        store.create_volume("plain", SIZE).unwrap();
        store.volume("plain").unwrap().write_at(0, &pattern(1, BLOCK), false).unwrap();
        let before = contents(&store);
        store.close().unwrap();
        let text = dump(&open(&disk, 3, true).unwrap());
        let p = Plant { disk: &disk, dump: &serde_json::from_str(&text).unwrap() };
        p.volume("plain", |slot| slot.key = key);
        assert_eq!(open(&disk, 4, true).map(drop).unwrap_err().kind(), ErrorKind::Corrupt);
        let report = repair(&disk);
        assert!(report.lost.is_empty(), "{report:?}");
        let store = open(&disk, 5, false).unwrap();
        assert_eq!(lost(&store, "plain", &before["plain"]), 0);
    }
}
