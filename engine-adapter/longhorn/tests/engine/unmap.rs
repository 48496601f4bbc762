//! Unmapping. Upstream's replica shows old data again after a restart; ours must not, so the scenario is stricter
//! on ours.

use crate::support::{Engine, EngineOptions, Image, Kind, Lab, MIB, Mix, check_each, exercise};
use crate::{each, volume};
use nix::sys::signal::Signal;

const SIZE: usize = 16 * MIB;

fn size_of(engine: &Engine, disk: &str) -> usize {
    engine.tree()[disk]["size"].as_str().unwrap().parse().unwrap()
}

#[test]
fn unmapped_blocks_read_zero_and_their_space_comes_back() {
    let Some(lab) = Lab::new("unmapped_blocks_read_zero_and_their_space_comes_back") else {
        return;
    };
    let (engine, mut replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let strict = replicas.iter().all(|replica| replica.kind() == Kind::Ours);
    let mix = Mix { writes: 40, unmaps: 20, unmapped_is_zero: strict, ..Mix::default() };
    let mut image = Image::zero(SIZE);
    exercise(&engine.data(), &mut image, mix, 800);
    engine.snapshot("s1");
    let mut frozen = image.clone();
    exercise(&engine.data(), &mut image, mix, 800);
    check_each("after unmaps", &mut image, &each(&replicas));

    engine.stop();
    for replica in &mut replicas {
        replica.stop(Signal::SIGTERM);
        replica.start();
    }
    let engine = lab.engine("", &EngineOptions::new(SIZE), &each(&replicas));
    check_each("after unmaps and a restart", &mut image, &each(&replicas));

    // Everything, over a live snapshot: the head gives back its space, the snapshot keeps its own.
    let (head, snapshot) = (size_of(&engine, "volume-head"), size_of(&engine, "s1"));
    assert!(head > MIB && snapshot > MIB, "{head} {snapshot}");
    engine.client().unmap(0, SIZE).unwrap();
    assert!(size_of(&engine, "volume-head") < head / 4, "{}", size_of(&engine, "volume-head"));
    assert_eq!(size_of(&engine, "s1"), snapshot);
    if strict {
        image = Image::zero(SIZE);
        check_each("after unmapping all", &mut image, &each(&replicas));
    }
    engine.revert("s1");
    check_each("the snapshot", &mut frozen, &each(&replicas));
}

#[test]
fn unmap_with_the_mark_flag_removes_snapshots() {
    let Some(lab) = Lab::new("unmap_with_the_mark_flag_removes_snapshots") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let replicas = each(&replicas);
    let strict = replicas.iter().all(|replica| replica.kind() == Kind::Ours);
    let mut image = Image::zero(SIZE);
    for name in ["s1", "s2"] {
        engine.exercise(&mut image, 200);
        engine.snapshot(name);
    }
    engine.exercise(&mut image, 200);
    // Neither flag nor mark: what is below stays.
    let mut client = engine.client();
    client.unmap(0, MIB).unwrap();
    assert_eq!(engine.snapshots(), ["s2", "s1"]);
    engine.cli(&["unmap-mark-snap-chain-removed", "--enable"]);
    assert!(replicas.iter().all(|replica| replica.rpc().get().unmap_mark_disk_chain_removed));
    let before = size_of(&engine, "s1") + size_of(&engine, "s2");
    client.unmap(0, SIZE / 2).unwrap();
    assert_eq!(engine.snapshots(), Vec::<String>::new());
    let tree = engine.tree();
    assert!(tree["s1"]["removed"] == true && tree["s2"]["removed"] == true, "{tree:?}");
    let after = size_of(&engine, "s1") + size_of(&engine, "s2");
    assert!(after < before * 3 / 4, "{before} bytes before, {after} after");
    image.wrote(0, &vec![0; SIZE / 2]);
    if strict {
        check_each("after the unmap", &mut image, &replicas);
    }
    engine.cli(&["unmap-mark-snap-chain-removed", "--disable"]);
    assert!(replicas.iter().all(|replica| !replica.rpc().get().unmap_mark_disk_chain_removed));
    // A rewrite makes the content certain on both kinds.
    image.write(&mut client, 0, &vec![7; SIZE / 2]);
    engine.purge();
    check_each("after the purge", &mut image, &replicas);
    engine.all_rw(&replicas);
}
