//! Which replica is believed: revision counters, and salvage without them.

use crate::support::{
    Engine, EngineOptions, Image, Kind, Lab, MIB, Replica, ReplicaOptions, check_each,
};
use crate::{each, replicas, volume};
use std::time::Duration;

const SIZE: usize = 16 * MIB;

fn counting() -> (ReplicaOptions, EngineOptions) {
    let replica = ReplicaOptions { revision_counter: true, ..ReplicaOptions::new(SIZE) };
    let engine = EngineOptions { revision_counter: true, ..EngineOptions::new(SIZE) };
    (replica, engine)
}

fn counters(replicas: &[Replica]) -> Vec<i64> {
    replicas.iter().map(|replica| replica.rpc().get().revision_counter).collect()
}

#[test]
fn the_highest_revision_counter_is_believed() {
    let Some(lab) = Lab::new("the_highest_revision_counter_is_believed") else { return };
    let (replica_options, options) = counting();
    let mut replicas = ["r0", "r1"]
        .map(|name| lab.replica(Kind::Ours, "", name, &replica_options))
        .into_iter()
        .collect::<Vec<_>>();
    let engine = lab.engine("", &options, &each(&replicas));
    let mut image = Image::zero(SIZE);
    let start = counters(&replicas);
    assert_eq!(start[0], start[1]);
    engine.client().write(0, &[1; 512]).unwrap();
    engine.client().write(0, &[0; 8192]).unwrap();
    engine.client().read(0, &mut [0; 8192]).unwrap();
    assert_eq!(counters(&replicas), [start[0] + 2; 2]);
    engine.exercise(&mut image, 300);
    let full = counters(&replicas);
    assert!(full[0] == full[1] && full[0] > 50, "{full:?}");

    // One misses writes; both die.
    replicas[1].kill();
    engine.wait_for_mode(&replicas[1], "ERR");
    engine.exercise(&mut image, 100);
    engine.kill();
    replicas[0].kill();
    for replica in &mut replicas {
        replica.start();
    }
    let engine = lab.engine("", &options, &each(&replicas));
    assert_eq!(engine.mode(&replicas[0]).as_deref(), Some("RW"));
    assert_eq!(engine.mode(&replicas[1]).as_deref(), Some("ERR"));
    image.check("from the one that has all", &engine.data());
    rejoin(&engine, &replicas, &mut image);

    // One that does not count has no say.
    engine.stop();
    replicas[1].kill();
    replicas[1].options().revision_counter = false;
    replicas[1].start();
    let engine = lab.engine("", &options, &each(&replicas));
    assert_eq!(engine.mode(&replicas[0]).as_deref(), Some("RW"));
    assert_eq!(engine.mode(&replicas[1]).as_deref(), Some("ERR"));
    // Upstream's engine leaves it open; closed, it does not say.
    let refused = replicas[1].rpc().get();
    assert!(refused.state == "closed" || refused.revision_counter_disabled);
    image.check("at the end", &engine.data());
}

fn rejoin(engine: &Engine, replicas: &[Replica], image: &mut Image) {
    engine.remove_replica(&replicas[1]);
    crate::support::eventually("the faulty one is closed", || {
        replicas[1].rpc().get().state == "closed"
    });
    engine.add_replica(&replicas[1], false);
    engine.exercise(image, 100);
    let counters = counters(replicas);
    assert_eq!(counters[0], counters[1]);
    check_each("rebuilt", image, &each(replicas));
}

#[test]
fn salvage_takes_the_replica_changed_last() {
    let Some(lab) = Lab::new("salvage_takes_the_replica_changed_last") else { return };
    let (engine, mut replicas) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let mut image = Image::zero(SIZE);
    engine.exercise(&mut image, 200);
    replicas[1].kill();
    engine.wait_for_mode(&replicas[1], "ERR");
    // Within five seconds the engine would look at the sizes.
    std::thread::sleep(Duration::from_secs(6));
    engine.exercise(&mut image, 200);
    engine.kill();
    replicas[0].kill();
    for replica in &mut replicas {
        replica.start();
    }
    let options =
        EngineOptions { flags: vec!["--salvageRequested".into()], ..EngineOptions::new(SIZE) };
    let engine = lab.engine("", &options, &each(&replicas));
    assert_eq!(engine.mode(&replicas[0]).as_deref(), Some("RW"));
    assert_eq!(engine.mode(&replicas[1]).as_deref(), Some("ERR"));
    image.check("salvaged", &engine.data());
}

#[test]
fn salvage_prefers_the_larger_head() {
    let Some(lab) = Lab::new("salvage_prefers_the_larger_head") else { return };
    let mut replicas = replicas(&lab, "", SIZE, &[Kind::Ours, Kind::Ours]);
    let engine = lab.engine("", &EngineOptions::new(SIZE), &each(&replicas));
    let mut image = Image::zero(SIZE);
    let mut client = engine.client();
    image.write(&mut client, 0, &[5; 64 << 10]);
    replicas[1].kill();
    engine.wait_for_mode(&replicas[1], "ERR");
    image.write(&mut client, MIB, &vec![6; MIB]);
    engine.kill();
    replicas[0].kill();
    for replica in &mut replicas {
        replica.start();
    }
    let options =
        EngineOptions { flags: vec!["--salvageRequested".into()], ..EngineOptions::new(SIZE) };
    let engine = lab.engine("", &options, &each(&replicas));
    assert_eq!(engine.mode(&replicas[0]).as_deref(), Some("RW"));
    image.check("salvaged", &engine.data());
}
