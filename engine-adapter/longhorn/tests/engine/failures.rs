//! A replica is killed under load and replaced; an engine is.

use crate::support::{
    Engine, EngineOptions, Image, Kind, Lab, Load, MIB, Mix, ReplicaOptions, check_each,
};
use crate::{Snapshots, check_snapshots, each, volume};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SIZE: usize = 16 * MIB;

#[test]
fn a_killed_replica_is_replaced_under_load() {
    let Some(lab) = Lab::new("a_killed_replica_is_replaced_under_load") else { return };
    let (engine, mut replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let mut snapshots = Snapshots::new();
    let load = Load::start(&engine.data(), Image::zero(SIZE), Mix::gentle());
    load.go_on(200);
    load.held(|image| {
        engine.snapshot("s1");
        snapshots.push(("s1", image));
    });
    load.go_on(100);
    replicas[1].kill();
    load.go_on(100);
    engine.wait_for_mode(&replicas[1], "ERR");
    assert_eq!(engine.mode(&replicas[0]).as_deref(), Some("RW"));
    engine.remove_replica(&replicas[1]);
    load.held(|image| {
        engine.snapshot("s2");
        snapshots.push(("s2", image));
    });
    load.go_on(100);

    // A new one.
    let new = lab.replica(Kind::Ours, "", "new", &ReplicaOptions::new(SIZE));
    let rebuilding = AtomicBool::new(true);
    let during = std::thread::scope(|scope| {
        // Snapshots are taken of a replica that is not whole yet, too.
        let during = scope.spawn(|| snapshots_while(&engine, &rebuilding));
        engine.add_replica(&new, false);
        rebuilding.store(false, Ordering::SeqCst);
        during.join().unwrap()
    });
    for name in &during {
        engine.hash(name);
    }
    load.go_on(100);
    load.held(|mut image| {
        engine.all_rw(&[&replicas[0], &new]);
        check_each("a rebuilt replica", &mut image, &[&replicas[0], &new]);
    });

    // The killed one, with what it had.
    replicas[1].start();
    engine.add_replica(&replicas[1], false);
    load.go_on(100);
    let mut image = load.stop();
    let all = [&replicas[0], &replicas[1], &new];
    engine.all_rw(&all);
    check_each("a replica that was away", &mut image, &all);
    for name in ["s1", "s2"] {
        engine.hash(name);
    }
    engine.snapshot("now");
    snapshots.push(("now", image));
    check_snapshots(&engine, &all, &mut snapshots);
}

fn snapshots_while(engine: &Engine, going_on: &AtomicBool) -> Vec<String> {
    let mut names = Vec::new();
    while going_on.load(Ordering::SeqCst) && names.len() < 4 {
        let name = format!("during{}", names.len());
        // Refused only while the replica's list of layers is taken.
        if engine.try_cli(&["snapshot", "create", &name]).is_ok() {
            names.push(name);
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    names
}

#[test]
fn a_rebuild_that_was_interrupted_starts_anew() {
    let Some(lab) = Lab::new("a_rebuild_that_was_interrupted_starts_anew") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Ours]);
    let (mut image, mut snapshots) = (Image::zero(SIZE), Snapshots::new());
    engine.exercise(&mut image, 300);
    engine.snapshot("s1");
    snapshots.push(("s1", image.clone()));
    let mut new = lab.replica(Kind::Ours, "", "new", &ReplicaOptions::new(SIZE));
    let load = Load::start(&engine.data(), image, Mix::gentle());
    std::thread::scope(|scope| {
        let rebuild = scope.spawn(|| engine.try_add_replica(&new, false));
        // It may be over before: then a whole replica is killed, which must be no worse.
        crate::support::eventually("the rebuild begins", || engine.mode(&new).is_some());
        new.signal(nix::sys::signal::Signal::SIGKILL);
        let _ = rebuild.join().unwrap();
    });
    new.wait();
    load.go_on(50);
    engine.wait_for_mode(&new, "ERR");
    engine.remove_replica(&new);
    new.start();
    engine.add_replica(&new, false);
    load.go_on(50);
    let mut image = load.stop();
    let all = [&replicas[0], &new];
    check_each("after the second attempt", &mut image, &all);
    engine.hash("s1");
    engine.snapshot("now");
    snapshots.push(("now", image));
    check_snapshots(&engine, &all, &mut snapshots);
}

#[test]
fn a_lost_engine_leaves_its_replicas_as_they_are() {
    let Some(lab) = Lab::new("a_lost_engine_leaves_its_replicas_as_they_are") else { return };
    let (engine, mut replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let mut image = Image::zero(SIZE);
    engine.exercise(&mut image, 300);
    engine.kill();
    let get = replicas[0].rpc().get();
    assert_eq!((get.state.as_str(), get.dirty), ("dirty", true));
    // Open replicas may have another engine: they are not taken over.
    let (status, log) =
        lab.try_engine("", &EngineOptions::new(SIZE), &each(&replicas)).err().unwrap();
    assert_eq!(status.code(), Some(61), "{log}");
    for replica in &mut replicas {
        replica.kill();
        replica.start();
        let get = replica.rpc().get();
        assert_eq!((get.state.as_str(), get.dirty), ("closed", true));
    }
    let engine = lab.engine("", &EngineOptions::new(SIZE), &each(&replicas));
    image.check("after the engine's end", &engine.data());
    check_each("after the engine's end", &mut image, &each(&replicas));
}
