//! Replicas in the controller's own process, beside others.

use crate::data_support::{DRIVERS, MIB, Replica, Setup, eventually, pattern};
use crate::support::{
    Load, SIZE, Volume, address, content, options, refused, replicas, short_timeouts,
};
use dbs_core::ErrorKind;
use longhorn_controller::path::{BackendAddress, LocalReplica, Mode, PathOptions};
use longhorn_data::{Access, DataOptions, DataStats, Kind};
use longhorn_testing::ClientError;
use longhorn_wire::frame::Type;
use std::sync::atomic::Ordering;

/// The way to a replica that does without its server.
pub fn local(replica: &Replica) -> BackendAddress {
    BackendAddress::Local(LocalReplica::new(replica.gate.clone(), 4).unwrap())
}

fn asked(replica: &Replica, kind: Kind) -> u64 {
    DataStats::of(&replica.gate.stats().requests, kind)
}

#[test]
fn it_holds_what_others_hold() {
    for (driver, reactors, seed) in [(DRIVERS[0], 2, 1), (DRIVERS[1], 1, 2)] {
        let reactor = dbs_reactor::Options { driver, ..Default::default() };
        let volume = Volume::new(PathOptions { reactor, ..options(reactors) });
        let replicas = replicas(3);
        volume.add(1, &local(&replicas[0]), Mode::Rw);
        volume.add(2, &address(&replicas[1]), Mode::Rw);
        volume.add(3, &local(&replicas[2]), Mode::Rw);
        let load = Load { flushes: true, seed, ..Load::default() };
        let image = load.during(&volume, |load| {
            load.some_more(700);
            let pause = volume.path.pause(false);
            assert!(content(&replicas[0]) == content(&replicas[1]), "nothing is on its way");
            drop(pause);
            load.some_more(300);
        });
        for replica in &replicas {
            assert!(content(replica) == image);
            assert!(replica.events.commits.load(Ordering::SeqCst) > 0, "flushes came");
            assert!(asked(replica, Kind::Read) > 100, "all are read from");
            assert!(replica.events.revision.load(Ordering::SeqCst) > 100);
        }
        let connections = |replica: &Replica| replica.gate.stats().connections;
        assert_eq!(connections(&replicas[0]) + connections(&replicas[2]), 0);
        assert_eq!((volume.faults(), volume.path.stats().retries), (Vec::new(), 0));
        drop(volume);
        replicas.into_iter().for_each(Replica::finish);
    }
}

#[test]
fn it_is_preferred_for_reads_and_pinged() {
    let volume = Volume::new(PathOptions { prefer_local: true, ..options(1) });
    let replicas = replicas(2);
    // The other one is on this machine as well; the first of these is preferred.
    volume.add(1, &local(&replicas[0]), Mode::Rw);
    volume.add(2, &address(&replicas[1]), Mode::Rw);
    let image = Load::default().during(&volume, |load| load.some_more(300));
    assert!(content(&replicas[0]) == image && content(&replicas[1]) == image);
    assert!(asked(&replicas[0], Kind::Read) > 100);
    assert_eq!(asked(&replicas[1], Kind::Read), 0);
    *replicas[0].events.trouble.lock().unwrap() = Some("the directory is gone".to_owned());
    assert_eq!(volume.faulted(1), "the directory is gone");
    assert_eq!(volume.client(1).read(0, 4096).unwrap(), image[..4096]);
}

/// It is rebuilt as any other is: it gets changes, and is not read.
#[test]
fn it_comes_and_goes_under_load() {
    let volume = Volume::new(options(2));
    let replicas = replicas(2);
    volume.add(1, &local(&replicas[0]), Mode::Rw);
    volume.add(2, &address(&replicas[1]), Mode::Rw);
    let image = Load { flushes: true, ..Load::default() }.during(&volume, |load| {
        volume.path.remove(1);
        load.some_more(200);
        // Nothing of it is in use, so that it can be closed and opened.
        assert!(replicas[0].gate.set(Access::not_open("closed")));
        replicas[0].gate.set(Access::Open(replicas[0].active.clone()));
        let pause = volume.path.pause(false);
        let now = content(&replicas[1]);
        replicas[0].active.volume().unwrap().write_at(0, &now, false).unwrap();
        let reads = asked(&replicas[0], Kind::Read);
        volume.add(3, &local(&replicas[0]), Mode::Wo);
        drop(pause);
        load.some_more(200);
        assert_eq!(asked(&replicas[0], Kind::Read), reads);
        volume.path.set_mode(3, Mode::Rw);
        load.some_more(200);
        volume.path.remove(2);
        load.some_more(200);
    });
    assert!(content(&replicas[0]) == image);
    assert_eq!(volume.faults(), []);
    drop(volume);
    replicas.into_iter().for_each(Replica::finish);
}

/// A replica on a store that another volume has filled.
fn full() -> Replica {
    let options = DataOptions { reactors: 1, workers: 4, ..DataOptions::default() };
    let setup = Setup { volume_size: SIZE, store_size: 16 * MIB, options, ..Setup::default() };
    let replica = setup.start().unwrap();
    replica.store.create_volume("other", 64 * MIB).unwrap();
    let other = replica.store.volume("other").unwrap();
    let mut at = 0;
    loop {
        match other.write_at(at, &[1; 1 << 20], false) {
            Ok(()) => at += MIB,
            Err(error) if error.kind() == ErrorKind::NoSpace => break,
            Err(error) => panic!("{error}"),
        }
    }
    replica
}

#[test]
fn a_full_one_is_faulted_unless_all_are_full() {
    let volume = Volume::new(options(1));
    let (full, roomy) = (full(), replicas(1));
    volume.add(1, &local(&full), Mode::Rw);
    let client = volume.client(1);
    match client.write(0, &[1; 4096]).unwrap_err() {
        ClientError::Unexpected(reply) => assert_eq!(reply.kind(), Some(Type::NoSpace)),
        other => panic!("{other}"),
    }
    assert_eq!(client.read(0, 4096).unwrap(), [0; 4096], "reading goes on");
    assert_eq!(volume.mode(1), Mode::Rw);
    volume.add(2, &address(&roomy[0]), Mode::Rw);
    client.write(0, &[2; 4096]).unwrap();
    let why = volume.faulted(1);
    assert!(why.contains("no space left on device"), "{why}");
    assert_eq!(client.read(0, 4096).unwrap(), [2; 4096]);
}

#[test]
fn one_whose_store_is_cut_off_is_not_believed() {
    let volume = Volume::new(PathOptions { prefer_local: true, ..options(2) });
    let replicas = replicas(2);
    volume.add(1, &local(&replicas[0]), Mode::Rw);
    volume.add(2, &address(&replicas[1]), Mode::Rw);
    let client = volume.client(2);
    let data = pattern(1, MIB as usize);
    client.write(0, &data).unwrap();
    client.flush().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&replicas[0].path).unwrap();
    file.set_len(4096).unwrap();
    assert!(client.read(0, MIB as u32).unwrap() == data, "the other one has it");
    volume.faulted(1);
    assert_eq!(volume.mode(2), Mode::Rw);
    // As one that is not open any more.
    let volume = Volume::new(options(1));
    volume.add(1, &local(&replicas[1]), Mode::Rw);
    replicas[1].gate.set(Access::not_open("closed"));
    let text = refused(volume.client(1).write(0, &[1; 4096]));
    assert_eq!(text, "tcp://r1: replica no longer exist");
    volume.faulted(1);
}

/// What hangs in it is given up as with any other, and ends in nothing.
#[test]
fn one_that_hangs_is_given_up() {
    let volume = Volume::new(short_timeouts(1));
    let replicas = replicas(2);
    volume.add(1, &local(&replicas[0]), Mode::Rw);
    volume.add(2, &address(&replicas[1]), Mode::Rw);
    let client = volume.client(2);
    client.write(0, &[1; 4096]).unwrap();
    let held = replicas[0].events.delay.lock().unwrap();
    client.unmap(0, 4096).unwrap();
    assert_eq!(volume.faulted(1), "r/w timeout");
    client.write(4096, &[2; 4096]).unwrap();
    assert_eq!(volume.mode(2), Mode::Rw);
    drop(held);
    volume.path.remove(1);
    eventually("what hung ends", || replicas[0].gate.stats().in_flight == 0);
    drop((client, volume));
    replicas.into_iter().for_each(Replica::finish);
}
