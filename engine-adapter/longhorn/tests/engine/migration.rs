//! A volume in use moves from upstream's replicas onto ours, one by one, and back.

use crate::support::{
    Engine, Image, Kind, Lab, Load, MIB, Mix, Replica, ReplicaOptions, check_each,
};
use crate::{Snapshots, check_snapshots, volume};

const SIZE: usize = 16 * MIB;

#[test]
fn a_live_volume_moves_onto_our_replicas_and_back() {
    let Some(lab) = Lab::new("a_live_volume_moves_onto_our_replicas_and_back") else { return };
    let (engine, replicas) = volume(&lab, SIZE, &[Kind::Stock, Kind::Stock]);
    let mut snapshots = Snapshots::new();
    let load = Load::start(&engine.data(), Image::zero(SIZE), Mix::gentle());
    load.go_on(200);
    load.held(|image| {
        engine.snapshot("s1");
        snapshots.push(("s1", image));
    });
    let mut replicas = replicas;
    for (round, kind) in [Kind::Ours, Kind::Stock].into_iter().enumerate() {
        for index in 0..2 {
            replace(&lab, &engine, &load, &mut replicas, kind, &format!("round{round}-{index}"));
        }
        assert!(replicas.iter().all(|replica| replica.kind() == kind.really()));
        load.held(|mut image| {
            check_each("all moved", &mut image, &replicas.iter().collect::<Vec<_>>())
        });
    }
    let image = load.stop();
    let all = replicas.iter().collect::<Vec<_>>();
    engine.all_rw(&all);
    engine.hash("s1");
    engine.snapshot("now");
    snapshots.push(("now", image));
    check_snapshots(&engine, &all, &mut snapshots);
}

/// The oldest replica goes when a new one is whole.
fn replace(
    lab: &Lab,
    engine: &Engine,
    load: &Load,
    replicas: &mut Vec<Replica>,
    kind: Kind,
    name: &str,
) {
    // So that there are few layers to move: upstream takes six seconds for each.
    engine.purge();
    let new = lab.replica(kind, "", name, &ReplicaOptions::new(SIZE));
    engine.add_replica(&new, true);
    load.go_on(30);
    let old = replicas.remove(0);
    replicas.push(new);
    engine.remove_replica(&old);
    drop(old);
    load.go_on(30);
    let all = replicas.iter().collect::<Vec<_>>();
    engine.all_rw(&all);
    load.held(|mut image| check_each(name, &mut image, &all));
}
