//! Replicas that do not answer, and come back.

use crate::lab::{LONGEST, Lab, Replica, SHORT};
use crate::proxy::Proxy;
use nix::sys::signal::Signal;
use std::time::Duration;

/// It is given up; what it does when it goes on is nobody's business. The last one may be silent for longer.
#[test]
fn a_replica_is_stopped_and_goes_on() {
    let lab = Lab::new();
    let (a, b) = (lab.replica("a"), lab.replica("b"));
    let engine = lab.engine(&[&a.address, &b.address]);
    let load = lab.load();
    a.stop();
    let why = engine.faulted(&a.address);
    assert!(why.contains("timeout"), "{why}");
    load.some_more(200);
    a.go_on();
    load.some_more(300);
    assert_eq!(engine.mode(&a.address), Some("ERR"));
    b.stop();
    std::thread::sleep(SHORT.mul_f32(1.3));
    b.go_on();
    load.some_more(300);
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    assert!(report.longest < LONGEST, "{:?}", report.longest);
    assert_eq!(engine.mode(&b.address), Some("RW"));
    lab.check(&mut report, &[&b]);
}

/// Its process was stopped for longer than any timeout: nobody could have answered it meanwhile.
#[test]
fn a_controller_is_stopped_and_goes_on() {
    let lab = Lab::new();
    let (a, b) = (lab.replica("a"), lab.replica("b"));
    let engine = lab.engine(&[&a.address, &b.address]);
    let load = lab.load();
    for _ in 0..2 {
        // So that it waits for answers.
        [&a, &b].into_iter().for_each(Replica::stop);
        std::thread::sleep(Duration::from_millis(200));
        engine.process.signal(Signal::SIGSTOP);
        std::thread::sleep(SHORT.mul_f32(2.5));
        engine.process.signal(Signal::SIGCONT);
        std::thread::sleep(SHORT / 2);
        [&a, &b].into_iter().for_each(Replica::go_on);
        load.some_more(300);
    }
    assert_eq!([&a, &b].map(|replica| engine.mode(&replica.address)), [Some("RW"); 2]);
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    lab.check(&mut report, &[&a, &b]);
}

/// Being slow is no fault, as long as it is not silence.
#[test]
fn a_slow_replica_stays_until_it_is_too_slow() {
    let lab = Lab::new();
    let (a, b) = (lab.replica("a"), lab.replica("b"));
    let slow = Proxy::before(&b);
    let slow_address = slow.address();
    let engine = lab.engine(&[&a.address, &slow_address]);
    let load = lab.load();
    slow.delay(Duration::from_millis(60));
    load.some_more(300);
    assert_eq!(engine.mode(&slow_address), Some("RW"));
    slow.delay(Duration::from_secs(20));
    let why = engine.faulted(&slow_address);
    assert!(why.contains("r/w timeout"), "{why}");
    load.some_more(300);
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    assert!(report.longest < LONGEST, "{:?}", report.longest);
    lab.check(&mut report, &[&a]);
}

/// Nothing arrives and nobody is told so.
#[test]
fn a_replica_is_cut_off() {
    let lab = Lab::new();
    let a = lab.replica("a");
    let Some((b, link)) = lab.replica_apart("a_replica_is_cut_off", "b") else { return };
    let engine = lab.engine(&[&a.address, &b.address]);
    let load = lab.load();
    link.set(false);
    let why = engine.faulted(&b.address);
    assert!(why.contains("r/w timeout"), "{why}");
    load.some_more(300);
    link.set(true);
    load.some_more(300);
    assert_eq!(engine.mode(&b.address), Some("ERR"));
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    assert!(report.longest < LONGEST, "{:?}", report.longest);
    lab.check(&mut report, &[&a]);
}
