//! A volume of upstream's is taken over in place, and given back: one replica after the other, while nobody uses it.

use crate::support::{
    Engine, EngineOptions, Image, Kind, Lab, MIB, Replica, ReplicaOptions, check_each, ours,
};
use crate::{Snapshots, check_snapshots, each};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::process::Command;

const SIZE: usize = 16 * MIB;

/// Stops it, moves its directory, and starts one of the other kind there.
fn moved(lab: &Lab, mut replica: Replica, kind: Kind, command: &str) -> Replica {
    replica.stop(Signal::SIGTERM);
    let (name, dir) = (replica.name().to_owned(), replica.dir().to_owned());
    let mut program = Command::new(ours());
    program.args(["--volume-name", &lab.volume(""), command, "--json"]).arg(&dir);
    let output = program.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {error}");
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["size"], SIZE, "{told}");
    let options = replica.options().clone();
    lab.replica_in(kind, "", &name, &dir, &options)
}

/// All that is told of snapshots but what they take, and since when there is the head.
fn tree(engine: &Engine) -> Vec<(String, Value)> {
    let lasting = |(name, mut value): (String, Value)| {
        let facts = value.as_object_mut().unwrap();
        facts.remove("size");
        if name == "volume-head" {
            facts.remove("created");
        }
        (name, value)
    };
    engine.tree().into_iter().map(lasting).collect()
}

fn exercise_and_snapshot(
    engine: &Engine,
    name: &'static str,
    image: &mut Image,
    snapshots: &mut Snapshots,
) {
    engine.exercise(image, 60);
    engine.snapshot(name);
    snapshots.push((name, image.clone()));
}

#[test]
fn a_volume_is_taken_over_in_place_and_given_back() {
    let Some(lab) = Lab::new("a_volume_is_taken_over_in_place_and_given_back") else { return };
    if Kind::Ours.really() != Kind::Ours {
        return;
    }
    let options = ReplicaOptions { revision_counter: true, ..ReplicaOptions::new(SIZE) };
    let start = |name| lab.replica(Kind::Stock, "", name, &options);
    let mut replicas = vec![start("r0"), start("r1")];
    let options = EngineOptions { revision_counter: true, ..EngineOptions::new(SIZE) };
    let mut engine = lab.engine("", &options, &each(&replicas));
    let (mut image, mut snapshots) = (Image::zero(SIZE), Snapshots::new());
    exercise_and_snapshot(&engine, "s1", &mut image, &mut snapshots);
    exercise_and_snapshot(&engine, "side", &mut image, &mut snapshots);
    engine.revert("s1");
    image = snapshots[0].1.clone();
    exercise_and_snapshot(&engine, "gone", &mut image, &mut snapshots);
    exercise_and_snapshot(&engine, "s2", &mut image, &mut snapshots);
    engine.remove_snapshot("gone");
    snapshots.retain(|(name, _)| *name != "gone");
    engine.exercise(&mut image, 60);
    let hash = engine.hash("s1");

    for (kind, command, name) in
        [(Kind::Ours, "replica-import", "moved"), (Kind::Stock, "replica-export", "back")]
    {
        // In between they are of two kinds, and the counters of changes must be equal.
        for _ in 0..2 {
            let before = tree(&engine);
            engine.stop();
            let next = replicas.remove(0);
            replicas.push(moved(&lab, next, kind, command));
            engine = lab.engine("", &options, &each(&replicas));
            engine.all_rw(&each(&replicas));
            check_each(command, &mut image, &each(&replicas));
            assert_eq!(tree(&engine), before, "{command}");
            assert_eq!(engine.hash("s1"), hash, "{command}");
            engine.exercise(&mut image, 60);
        }
        assert!(replicas.iter().all(|replica| replica.kind() == kind));
        exercise_and_snapshot(&engine, name, &mut image, &mut snapshots);
        check_snapshots(&engine, &each(&replicas), &mut snapshots);
    }
}
