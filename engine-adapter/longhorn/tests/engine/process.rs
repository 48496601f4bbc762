//! What instance-manager sees of a replica's process: start, health, signals, version.

use crate::support::{
    Image, Kind, Lab, Load, MIB, Mix, Replica, ReplicaOptions, check_each, eventually,
};
use crate::volume;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::process::Command;

const SIZE: usize = 16 * MIB;

/// Ends a replica's process by a signal while the volume is in use.
fn ends_orderly(test: &str, signal: Signal) {
    let Some(lab) = Lab::new(test) else { return };
    let (engine, mut replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let load = Load::start(&engine.data(), Image::zero(SIZE), Mix::gentle());
    load.go_on(50);
    replicas[1].stop(signal);
    load.go_on(50);
    engine.wait_for_mode(&replicas[1], "ERR");
    engine.remove_replica(&replicas[1]);
    replicas[1].start();
    // Not closed by its engine.
    let get = replicas[1].rpc().get();
    assert_eq!((get.state.as_str(), get.dirty), ("closed", true));
    engine.add_replica(&replicas[1], false);
    let mut image = load.stop();
    check_each("after the signal", &mut image, &replicas.iter().collect::<Vec<_>>());
}

#[test]
fn sigterm_ends_a_replica() {
    ends_orderly("sigterm_ends_a_replica", Signal::SIGTERM);
}

#[test]
fn sigint_ends_a_replica() {
    ends_orderly("sigint_ends_a_replica", Signal::SIGINT);
}

#[test]
fn a_replica_is_healthy_from_start_to_end() {
    let Some(lab) = Lab::new("a_replica_is_healthy_from_start_to_end") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Ours]);
    let mut image = Image::zero(SIZE);
    let load = Load::start(&engine.data(), image, Mix::gentle());
    for _ in 0..20 {
        assert!(replicas[0].rpc().healthy());
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    image = load.stop();
    engine.stop();
    assert!(replicas[0].rpc().healthy(), "closed, but alive");
    let mut second = lab.replica(Kind::Ours, "", "second", &ReplicaOptions::new(SIZE));
    assert!(second.rpc().healthy());
    second.stop(Signal::SIGINT);
    image.check_bytes("a replica asked while closed", &reopened(&lab, &replicas[0]));
}

fn reopened(lab: &Lab, replica: &Replica) -> Vec<u8> {
    let engine = lab.engine("", &crate::EngineOptions::new(SIZE), &[replica]);
    let contents = replica.contents(SIZE);
    engine.stop();
    contents
}

#[test]
fn a_vanished_directory_is_noticed() {
    let Some(lab) = Lab::new("a_vanished_directory_is_noticed") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let mut image = Image::zero(SIZE);
    engine.exercise(&mut image, 100);
    std::fs::remove_dir_all(replicas[1].dir()).unwrap();
    // As the manager's poll does. A stock replica looks at its head only then; the next ping tells.
    eventually("the engine notices", || {
        let _ = replicas[1].rpc().get();
        engine.mode(&replicas[1]).as_deref() == Some("ERR")
    });
    engine.exercise(&mut image, 100);
    assert_eq!(engine.mode(&replicas[0]).as_deref(), Some("RW"));
}

#[test]
fn versions_are_those_of_upstream() {
    let Some(lab) = Lab::new("versions_are_those_of_upstream") else { return };
    let version = |program: &std::path::Path| -> Value {
        let output = Command::new(program).args(["version", "--client-only"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let replica = lab.replica(Kind::Ours, "", "r", &ReplicaOptions::new(SIZE));
    let (theirs, ours) = (version(lab.stock()), version(replica.program()));
    assert_eq!(theirs["serverVersion"], ours["serverVersion"]);
    let keys = |value: &Value| {
        value["clientVersion"].as_object().unwrap().keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(keys(&theirs), keys(&ours));
    for (key, value) in theirs["clientVersion"].as_object().unwrap() {
        match value {
            Value::Number(_) => assert_eq!(*value, ours["clientVersion"][key], "{key}"),
            _ => assert!(ours["clientVersion"][key].is_string(), "{key}"),
        }
    }
}
