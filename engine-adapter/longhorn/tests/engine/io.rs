//! Verified I/O over one to three replicas, through restarts.

use crate::support::{
    EngineOptions, Image, Kind, Lab, MIB, Mix, ReplicaOptions, check_each, exercise, skip,
};
use crate::{each, volume};
use nix::sys::signal::Signal;

const SIZE: usize = 32 * MIB;

fn io_survives_restarts(test: &str, count: usize) {
    let Some(lab) = Lab::new(test) else { return };
    let (engine, mut replicas) = volume(&lab, SIZE, &vec![Kind::Ours; count]);
    engine.all_rw(&each(&replicas));
    let mut image = Image::zero(SIZE);
    image.check("a new volume", &engine.data());
    engine.exercise(&mut image, 1500);
    check_each("after I/O", &mut image, &each(&replicas));

    // An orderly end closes the replicas.
    assert_eq!(replicas[0].rpc().get().state, "dirty");
    engine.stop();
    for replica in &mut replicas {
        let get = replica.rpc().get();
        assert_eq!((get.state.as_str(), get.dirty), ("closed", false), "{get:?}");
        replica.stop(Signal::SIGTERM);
        replica.start();
    }
    let engine = lab.engine("", &EngineOptions::new(SIZE), &each(&replicas));
    image.check("after a restart", &engine.data());
    let large = Mix { largest: 2 * MIB, ..Mix::default() };
    exercise(&engine.data(), &mut image, large, 300);
    engine.exercise(&mut image, 500);
    check_each("after a restart and I/O", &mut image, &each(&replicas));

    // All of it dies. What was acknowledged is there.
    engine.kill();
    for replica in &mut replicas {
        replica.kill();
        replica.start();
    }
    let engine = lab.engine("", &EngineOptions::new(SIZE), &each(&replicas));
    engine.all_rw(&each(&replicas));
    image.check("after kill -9", &engine.data());
    check_each("after kill -9", &mut image, &each(&replicas));
    engine.exercise(&mut image, 500);
}

#[test]
fn io_over_one_replica_survives_restarts() {
    io_survives_restarts("io_over_one_replica_survives_restarts", 1);
}

#[test]
fn io_over_two_replicas_survives_restarts() {
    io_survives_restarts("io_over_two_replicas_survives_restarts", 2);
}

#[test]
fn io_over_three_replicas_survives_restarts() {
    io_survives_restarts("io_over_three_replicas_survives_restarts", 3);
}

/// As Longhorn's manager does for a volume that stays on one machine.
#[test]
fn io_over_a_unix_socket() {
    let Some(lab) = Lab::new("io_over_a_unix_socket") else { return };
    let Some(dir) = lab.socket_dir() else {
        skip::<()>("io_over_a_unix_socket", "no directory below /host");
        return;
    };
    let protocol = ["--data-server-protocol".to_owned(), "unix".to_owned()];
    let options = ReplicaOptions { flags: protocol.to_vec(), ..ReplicaOptions::new(SIZE) };
    let mut replica = lab.replica(Kind::Ours, "", "r", &options);
    let options = EngineOptions { flags: protocol.to_vec(), ..EngineOptions::new(SIZE) };
    let engine = lab.engine("", &options, &[&replica]);
    let mut image = Image::zero(SIZE);
    engine.exercise(&mut image, 500);
    engine.snapshot("s1");
    engine.kill();
    replica.kill();
    // Upstream's replica does not start on a socket left by its own death.
    let socket = dir.join(format!("{}.sock", lab.volume("")));
    assert!(socket.exists(), "{}", socket.display());
    if replica.kind() == Kind::Stock {
        std::fs::remove_file(&socket).unwrap();
    }
    replica.start();
    let engine = lab.engine("", &options, &[&replica]);
    image.check("after kill -9", &engine.data());
    engine.exercise(&mut image, 300);
}
