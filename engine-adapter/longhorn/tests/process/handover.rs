//! A newer process on the directory of one that serves, as a live upgrade starts it: nothing is
//! lost, whoever of the two is killed when.

use crate::PROGRAM;
use crate::controller::{TEXT_SIZE, client, controller, modes, replica, run};
use crate::support::*;
use longhorn_testing::DataClient;
use std::time::{Duration, Instant};

const BLOCKS: u64 = 256;

/// Checks that all blocks hold this version.
fn check(data: &DataClient, version: u64) {
    for number in 0..BLOCKS {
        let content = data.read(number * BLOCK as u64, BLOCK as u32).unwrap();
        assert_eq!(version_of(&content, number), Some(version), "block {number}");
    }
}

fn write(data: &DataClient, version: u64) {
    for number in 0..BLOCKS {
        data.write(number * BLOCK as u64, &block(number, version)).unwrap();
    }
}

#[test]
fn each_newer_process_goes_on_where_the_older_one_was() {
    let place = Place::new();
    let mut old = place.start("r", &["--size", "64mb", "--metrics", "127.0.0.1:0"]);
    let mut old_data = old.open();
    write(&old_data, 1);
    old.rpc().snapshot("s1").unwrap();
    for round in 2..6 {
        let new = place.start("r", &["--size", "64mb", "--metrics", "127.0.0.1:0"]);
        assert_eq!(new.field("owner"), "false");
        assert_eq!(new.rpc().state(), "closed", "what the engine insists on");
        let new_data = new.data();
        new.rpc().open(true).unwrap();
        new_data.ping().unwrap();
        // The old engine still works on the old one, and the new one knows what it does.
        write(&old_data, round);
        let name = format!("s{round}");
        old.rpc().snapshot(&name).unwrap();
        let disk = format!("volume-snap-{name}.img");
        eventually("the snapshot shows", || new.rpc().get().unwrap().chain.contains(&disk));
        assert_eq!(
            new.rpc().get().unwrap().revision_counter,
            old.rpc().get().unwrap().revision_counter
        );

        // The first I/O takes over.
        check(&new_data, round);
        let refused = old_data.read(0, 4096).unwrap_err();
        assert!(refused.to_string().contains("handed over"), "{refused}");
        assert!(old_data.ping().is_err() && old_data.write(0, &block(0, 99)).is_err());
        assert!(old.rpc().get().is_err() || old.rpc().state() != "dirty");
        assert!(old.rpc().snapshot("late").is_err() || !place_has(&new, "late"));
        assert_eq!(old.metric("dbs_handovers_total"), 1.0);
        write(&new_data, round + 100);
        check(&new_data, round + 100);
        old.stop();
        write(&new_data, round);
        (old, old_data) = (new, new_data);
    }
    let chain = old.rpc().get().unwrap().chain;
    assert_eq!(chain.len(), 6, "{chain:?}");
    drop(old_data);
    old.stop();
    let replica = place.start("r", &[]);
    check(&replica.open(), 5);
}

/// The newer process is closed, ended, killed, or none of that: opening the older one takes the store back.
#[test]
fn an_upgrade_can_be_rolled_back() {
    let place = Place::new();
    let mut old = place.start("r", &["--size", "64mb"]);
    let data = old.open();
    write(&data, 1);
    let ends: [fn(&mut Process); 4] =
        [|new| drop(new.rpc().close()), Process::stop, Process::kill, |_| {}];
    for (end, version) in ends.into_iter().zip(2..) {
        let mut new = place.start("r", &[]);
        let new_data = new.data();
        let identity = |data: &DataClient| data.hello().unwrap().unwrap().identity.unwrap();
        assert_eq!(identity(&new_data), identity(&old.data()), "wherever it listens");
        new.rpc().open(true).unwrap();
        check(&new_data, version - 1);
        write(&new_data, version);
        let told = |data: &DataClient| data.hello().unwrap().unwrap().generations.unwrap();
        let changed = told(&new_data);
        assert_eq!(changed.now, changed.changed);
        new.rpc().snapshot(&format!("s{version}")).unwrap();
        let disk = format!("volume-snap-s{version}.img");
        eventually("the older one knows", || old.rpc().get().unwrap().parent == disk);
        assert_eq!(old.rpc().state(), "closed");
        assert_ne!(new.rpc().state(), "closed");
        end(&mut new);
        let data = old.open();
        check(&data, version);
        let before = told(&data);
        assert_eq!(before.now, changed.now, "as the newer one has made it");
        write(&data, version);
        assert_eq!(told(&data).now, before.changed);
        if let Ok(replica) = new.rpc().get() {
            assert_eq!(replica.state, "closed");
            assert!(new_data.write(0, &block(0, 99)).is_err());
        }
    }
    old.stop();
    check(&place.start("r", &[]).open(), 5);
}

/// Found by review: the older controller went on with the replicas that the newer one had not used yet, and each of both
/// acknowledged what the replicas of the other one lacked.
#[test]
fn the_older_of_two_controllers_acknowledges_nothing_more() {
    let place = Place::new();
    let olders = ["a", "b"].map(|name| replica(&place, name));
    let addresses = olders.each_ref().map(|(_, address)| address.as_str());
    let older = controller(&place, &addresses, &[]).ready();
    let before = client(&place);
    write(&before, 1);
    let newers = ["a", "b"].map(|name| place.start(name, &["--disableRevCounter"]));
    let addresses = newers.each_ref().map(|newer| format!("tcp://{}", newer.field("grpc")));
    // They are no replicas beside the ones whose directories they have.
    let url = format!("http://{}", older.field("grpc"));
    let add = ["--url", &url, "--volume-name", "vol", "add-replica", &addresses[0]];
    let sizes = ["--size", TEXT_SIZE, "--current-size", TEXT_SIZE];
    let refused = std::process::Command::new(PROGRAM).args(add).args(sizes).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(text.contains(&format!("newer process of {}", olders[0].1)), "{text}");
    assert_eq!(modes(&older), ["RW", "RW"]);

    let addresses = addresses.each_ref().map(String::as_str);
    let newer = controller(&place, &addresses, &["--upgrade"]).ready();
    let after = client(&place);
    write(&before, 2);
    // One of the stores is the newer one's from now on, and the older one can write to the other.
    assert_eq!(version_of(&after.read(4096, BLOCK as u32).unwrap(), 1), Some(2));
    let refused = before.write(0, &block(0, 3)).unwrap_err();
    assert!(
        refused.to_string().contains("handed over") || refused.to_string().contains("no backend")
    );
    assert_eq!(modes(&older), ["ERR", "ERR"]);
    before.read(0, BLOCK as u32).unwrap_err();
    for number in 1..BLOCKS {
        let content = after.read(number * BLOCK as u64, BLOCK as u32).unwrap();
        assert_eq!(version_of(&content, number), Some(2), "block {number}");
    }
    write(&after, 4);
    drop(older);
    check(&after, 4);
    assert_eq!(run(&newer, &["snapshots", "create", "one"]).trim(), "one");
    assert_eq!(modes(&newer), ["RW", "RW"]);
}

fn place_has(process: &Process, snapshot: &str) -> bool {
    process.rpc().get().unwrap().disks.contains_key(&format!("volume-snap-{snapshot}.img"))
}

#[test]
fn a_process_that_is_not_used_takes_nothing() {
    let place = Place::new();
    let mut old = place.start("r", &["--size", "64mb"]);
    let data = old.open();
    write(&data, 1);
    for end in [Process::stop as fn(&mut Process), Process::kill] {
        let mut new = place.start("r", &[]);
        new.data().ping().unwrap_err();
        new.rpc().open(true).unwrap();
        end(&mut new);
        write(&data, 2);
        check(&data, 2);
        write(&data, 1);
    }
    old.stop();
    check(&place.start("r", &[]).open(), 1);
}

#[test]
fn a_killed_predecessor_loses_nothing() {
    let place = Place::new();
    let mut old = place.start("r", &["--size", "64mb"]);
    let data = old.open();
    write(&data, 1);
    let mut new = place.start("r", &[]);
    let new_data = new.data();
    new.rpc().open(true).unwrap();
    write(&data, 2);
    // Acknowledged a moment ago and committed by nobody.
    old.kill();
    check(&new_data, 2);
    write(&new_data, 3);
    new.stop();
    check(&place.start("r", &[]).open(), 3);
}

/// Kills the older or the newer process at some moment of the hand-over, again and again.
#[test]
fn kill_9_amid_the_handover() {
    let place = Place::new();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut version = 0;
    for round in 0..12 {
        let mut old = place.start("r", &["--size", "64mb"]);
        let data = old.open();
        version += 1;
        write(&data, version);
        let mut new = place.start("r", &[]);
        let new_data = new.data();
        new.rpc().open(true).unwrap();
        let delay = Duration::from_micros(random.u64(0..20_000));
        let kills_old = round % 2 == 0;
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                let begun = Instant::now();
                let read = new_data.read(0, BLOCK as u32);
                (read, begun.elapsed())
            });
            std::thread::sleep(delay);
            if kills_old {
                old.kill()
            } else {
                new.kill()
            }
            let (read, took) = first.join().unwrap();
            if kills_old {
                // The newer one gets there with or without the older one's help.
                let content = read.unwrap_or_else(|e| panic!("{e} after {took:?}, {delay:?}"));
                assert_eq!(version_of(&content, 0), Some(version));
            }
        });
        if kills_old {
            check(&new_data, version);
            new.stop();
        } else {
            // It may or may not have given up its store, which it says truthfully.
            match data.read(0, BLOCK as u32) {
                Ok(content) => assert_eq!(version_of(&content, 0), Some(version)),
                Err(e) => assert!(e.to_string().contains("handed over"), "{e}"),
            }
            old.stop();
        }
        let mut last = place.start("r", &[]);
        check(&last.open(), version);
        last.stop();
    }
}
