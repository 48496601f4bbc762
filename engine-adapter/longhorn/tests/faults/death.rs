//! Processes that end without a word.

use crate::lab::{LONGEST, Lab, SHORT};
use crate::support::eventually;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// One, then two at once, then the last one; and a start that takes the one that has everything.
#[test]
fn replicas_die_one_then_two_at_once_then_the_last() {
    let lab = Lab::new();
    let mut replicas: Vec<_> =
        ["a", "b", "c", "d"].map(|name| lab.replica_with(name, &[])).into_iter().collect();
    let addresses: Vec<_> = replicas.iter().map(|replica| replica.address.clone()).collect();
    let all: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let mut engine = lab.engine_with(&all, &[]);
    let load = lab.load();
    replicas[0].kill();
    engine.faulted(all[0]);
    load.some_more(300);
    replicas[1].kill();
    replicas[2].kill();
    engine.faulted(all[1]);
    engine.faulted(all[2]);
    load.some_more(300);
    assert_eq!(engine.mode(all[3]), Some("RW"));
    replicas[3].kill();
    engine.faulted(all[3]);
    load.fails();
    let mut report = load.finish();
    assert!(report.longest < LONGEST, "{:?}", report.longest);
    assert!(report.texts.contains("no backend available"), "{:?}", report.texts);
    engine.process.kill();
    for replica in &mut replicas {
        lab.restart(replica);
    }
    let engine = lab.engine_with(&all, &[]);
    let modes: Vec<_> = all.iter().map(|address| engine.mode(address).unwrap()).collect();
    assert_eq!(modes, ["ERR", "ERR", "ERR", "RW"], "{}", engine.process.log());
    lab.check(&mut report, &[&replicas[3]]);
}

/// The controller's end amid I/O: what it had sent may still be on its way when the next one begins, and one
/// replica was not even listening.
#[test]
fn a_controller_dies_and_another_takes_its_place() {
    let lab = Lab::new();
    let (a, b) = (lab.replica("a"), lab.replica("b"));
    let addresses = [a.address.as_str(), b.address.as_str()];
    let mut engine = lab.engine(&addresses);
    let load = lab.load();
    for _ in 0..3 {
        a.stop();
        std::thread::sleep(Duration::from_millis(50));
        engine.process.kill();
        a.go_on();
        for replica in [&a, &b] {
            replica.rpc().close().unwrap();
        }
        let _ = std::fs::remove_file(lab.place.path().join("longhorn-vol.sock"));
        engine = lab.engine(&addresses);
        load.some_more(300);
    }
    assert_eq!(addresses.map(|address| engine.mode(address)), [Some("RW"); 2]);
    lab.check(&mut load.finish(), &[&a, &b]);
    engine.process.stop();
}

/// A replica whose disk is full while another has room.
#[test]
fn a_full_replica_is_given_up() {
    const TEST: &str = "a_full_replica_is_given_up";
    let lab = Lab::new();
    let place = lab.place.replica("full");
    let Some(_disk) = disk::Disk::mount(TEST, &lab, &place) else { return };
    let (a, full) = (lab.replica("a"), lab.replica("full"));
    let engine = lab.engine(&[&a.address, &full.address]);
    let load = lab.load();
    let why = engine.faulted(&full.address);
    assert!(why.contains("space"), "{why}");
    load.some_more(300);
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    assert!(report.longest < LONGEST, "{:?}", report.longest);
    lab.check(&mut report, &[&a]);
    drop((engine, full));
}

/// What is killed while snapshots are taken is missing in none that is said to be taken.
#[test]
fn replicas_fail_amid_snapshots() {
    let lab = Lab::new();
    let (mut a, b, c) = (lab.replica("a"), lab.replica("b"), lab.replica("c"));
    let engine = lab.engine(&[&a.address, &b.address, &c.address]);
    let load = lab.load();
    let ended = AtomicBool::new(false);
    let taken: Vec<String> = std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            let names = (0..200).map(|number| format!("s{number}"));
            let names = names.take_while(|_| !ended.load(Ordering::SeqCst));
            names.filter(|name| engine.run(&["snapshots", "create", name]).is_ok()).collect()
        });
        std::thread::sleep(Duration::from_millis(300));
        a.kill();
        std::thread::sleep(Duration::from_millis(150));
        b.stop();
        engine.faulted(&a.address);
        engine.faulted(&b.address);
        std::thread::sleep(Duration::from_millis(150));
        ended.store(true, Ordering::SeqCst);
        taking.join().unwrap()
    });
    load.some_more(300);
    b.go_on();
    load.some_more(100);
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    // One that is stopped while it takes a snapshot is waited for a little longer.
    assert!(report.longest < LONGEST + 2 * SHORT, "{:?}", report.longest);
    let listed = engine.run(&["snapshots"]).unwrap();
    let missing = |name: &&String| !listed.lines().any(|line| line.trim() == name.as_str());
    assert!(!taken.is_empty());
    assert_eq!(taken.iter().find(missing), None, "{listed}");
    eventually("one is left", || engine.mode(&c.address) == Some("RW"));
    lab.check(&mut report, &[&c]);
}

mod disk {
    //! A disk that is too small.

    use crate::lab::{Lab, output, skip, stock};
    use std::path::{Path, PathBuf};
    use std::process::Command;

    pub struct Disk(PathBuf);

    impl Disk {
        /// Mounts one there; `None`, said so, where that cannot be done.
        pub fn mount(test: &str, lab: &Lab, at: &Path) -> Option<Self> {
            if stock().is_some() {
                skip(test, "replicas of ours: upstream's do not work on a tmpfs");
                return None;
            }
            std::fs::create_dir_all(at).unwrap();
            let mut command = Command::new("mount");
            command.args(["-t", "tmpfs", "-o", "size=8m,mode=700", "dbs-faults"]).arg(at);
            match output(command, lab.place.path()) {
                Ok(_) => Some(Self(at.to_owned())),
                Err(error) => {
                    skip(test, &format!("a file system to fill: {}", error.trim()));
                    None
                }
            }
        }
    }

    impl Drop for Disk {
        fn drop(&mut self) {
            let mut command = Command::new("umount");
            command.arg("-l").arg(&self.0);
            let _ = output(command, &std::env::temp_dir());
        }
    }
}
