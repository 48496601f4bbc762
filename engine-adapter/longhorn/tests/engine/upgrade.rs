//! A live upgrade: new processes on directories that older ones still serve. The socket frontend cannot be upgraded,
//! so the new engine has none, and the first I/O to the new replicas comes from the test itself.

use crate::support::{
    EngineOptions, Frontend, Image, Kind, Lab, Load, MIB, Mix, Replica, ReplicaOptions, check_each,
};
use crate::{each, volume};
use nix::sys::signal::Signal;

const SIZE: usize = 16 * MIB;

fn upgrading(size: usize) -> EngineOptions {
    EngineOptions { flags: vec!["--upgrade".into()], ..EngineOptions::without_frontend(size) }
}

fn successors(lab: &Lab, old: &[Replica]) -> Vec<Replica> {
    let start = |replica: &Replica| {
        let name = format!("{}-new", replica.name());
        lab.replica_in(Kind::Ours, "", &name, replica.dir(), &ReplicaOptions::new(SIZE))
    };
    old.iter().map(start).collect()
}

#[test]
fn a_volume_in_use_is_upgraded() {
    let Some(lab) = Lab::new("a_volume_in_use_is_upgraded") else { return };
    let (engine, mut old) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let mut image = Image::zero(SIZE);
    engine.exercise(&mut image, 300);
    engine.snapshot("s1");
    let load = Load::start(&engine.data(), image, Mix::gentle());
    load.go_on(50);
    let mut new = successors(&lab, &old);
    for replica in &new {
        let get = replica.rpc().get();
        assert_eq!((get.state.as_str(), get.size), ("closed", SIZE.to_string()));
    }
    load.go_on(50);
    let next = lab.engine("", &upgrading(SIZE), &each(&new));
    next.all_rw(&each(&new));
    assert_eq!(next.snapshots(), ["s1"]);
    // The old engine is still the volume's.
    load.go_on(100);
    let mut image = load.stop();

    // The switch: from here on the new replicas are written to, and nothing is missing there.
    check_each("at the new replicas", &mut image, &each(&new));
    for replica in &new {
        image.write(&mut replica.client(), 5 * 4096, &[0xab; 3 * 4096]);
    }
    if Kind::Ours.really() == Kind::Ours {
        for replica in &old {
            let error = replica.client().write(0, &[0xcd; 4096]).unwrap_err();
            assert!(error.reply.is_some(), "{error}");
            assert!(replica.client().read(0, &mut [0; 4096]).is_err());
        }
    }
    engine.signal(Signal::SIGHUP);
    for replica in &mut old {
        replica.stop(Signal::SIGINT);
    }
    check_each("after the old ones' end", &mut image, &each(&new));
    next.snapshot("s2");
    next.all_rw(&each(&new));
    next.stop();
    let engine = lab.engine("", &EngineOptions::new(SIZE), &each(&new));
    assert_eq!(engine.snapshots(), ["s2", "s1"]);
    engine.exercise(&mut image, 300);
    engine.kill();
    for replica in &mut new {
        replica.kill();
        replica.start();
    }
    let engine = lab.engine("", &EngineOptions::new(SIZE), &each(&new));
    image.check("after all", &engine.data());
    check_each("after all", &mut image, &each(&new));
}

#[test]
fn an_upgrade_whose_old_side_dies_loses_nothing() {
    let Some(lab) = Lab::new("an_upgrade_whose_old_side_dies_loses_nothing") else { return };
    let (engine, mut old) = volume(&lab, SIZE, &[Kind::Ours]);
    let mut image = Image::zero(SIZE);
    engine.exercise(&mut image, 300);
    let new = successors(&lab, &old);
    let next = lab.engine("", &upgrading(SIZE), &each(&new));
    engine.exercise(&mut image, 300);
    engine.kill();
    old[0].kill();
    check_each("after the old one's death", &mut image, &each(&new));
    next.snapshot("s1");
    next.stop();
    let engine = lab.engine("", &EngineOptions::new(SIZE), &each(&new));
    engine.exercise(&mut image, 200);
}

#[test]
fn an_upgrade_that_is_given_up_leaves_the_old_side_working() {
    let Some(lab) = Lab::new("an_upgrade_that_is_given_up_leaves_the_old_side_working") else {
        return;
    };
    let (engine, old) = volume(&lab, SIZE, &[Kind::Ours, Kind::Ours]);
    let mut image = Image::zero(SIZE);
    engine.exercise(&mut image, 200);
    // Upstream's engine opens the new replicas, finds that its frontend cannot do it, and ends; ours
    // can, and dies before anybody uses it.
    let mut new = successors(&lab, &old);
    let options = EngineOptions { frontend: Frontend::Socket, ..upgrading(SIZE) };
    let socket = engine.data();
    let kept = lab.path().join("kept.sock");
    // A new engine's start takes the path of the socket; the old one listens on.
    let crate::support::Address::Socket(path) = &socket else { unreachable!() };
    std::fs::rename(path, &kept).unwrap();
    let kept = crate::support::Address::Socket(kept);
    match lab.try_engine("", &options, &each(&new)) {
        Ok(next) => next.kill(),
        Err((status, _)) => assert_eq!(status.code(), Some(1), "no upgrade with a socket"),
    }
    for replica in &mut new {
        replica.stop(Signal::SIGINT);
    }
    engine.all_rw(&each(&old));
    crate::support::exercise(&kept, &mut image, Mix::default(), 300);
    engine.snapshot("s1");
    crate::support::exercise(&kept, &mut image, Mix::default(), 100);
    check_each("the old replicas", &mut image, &each(&old));
}
