//! Connections that break, while both ends are well.

use crate::lab::{LONGEST, Lab, skip, stock};
use crate::proxy::Proxy;
use crate::support::eventually;
use std::time::Duration;

/// No replica is lost, and all have counted the same changes.
#[test]
fn connections_break_and_are_made_anew() {
    const TEST: &str = "connections_break_and_are_made_anew";
    if stock().is_some() {
        return skip(TEST, "replicas of ours: upstream's cannot be connected to anew");
    }
    let lab = Lab::new();
    let (a, b) = (lab.replica_with("a", &[]), lab.replica_with("b", &[]));
    let proxies = [&a, &b].map(Proxy::before);
    let addresses = [0, 1].map(|index| proxies[index].address());
    let all = [addresses[0].as_str(), addresses[1].as_str()];
    let engine = lab.engine_with(&all, &[]);
    let load = lab.load();
    for round in 0..30 {
        // Each alone, and both at once.
        for (index, proxy) in proxies.iter().enumerate() {
            if round % 3 != index {
                proxy.cut(false);
            }
        }
        load.some_more(40);
    }
    for address in all {
        let enough = || engine.reconnected(address) >= 10.0;
        eventually("connections are made anew", enough);
    }
    let line = engine.process.wait_for("event=reconnected");
    assert!(line.contains("sent_again="), "{line}");
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    assert!(report.longest < LONGEST, "{:?}", report.longest);
    assert_eq!(all.map(|address| engine.mode(address)), [Some("RW"); 2]);
    let counted = [&a, &b].map(|replica| replica.rpc().get().unwrap().revision_counter);
    assert_eq!(counted[0], counted[1]);
    lab.check(&mut report, &[&a, &b]);
}

/// It is waited for only so long.
#[test]
fn a_connection_that_is_not_made_anew_costs_the_replica() {
    let lab = Lab::new();
    let (a, b) = (lab.replica("a"), lab.replica("b"));
    let proxy = Proxy::before(&b);
    let address = proxy.address();
    let engine = lab.engine(&[&a.address, &address]);
    let load = lab.load();
    proxy.cut(true);
    let why = engine.faulted(&address);
    assert!(why.contains("the connection is lost"), "{why}");
    load.some_more(300);
    proxy.cut(false);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(engine.mode(&address), Some("ERR"));
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    assert!(report.longest < LONGEST, "{:?}", report.longest);
    lab.check(&mut report, &[&a]);
}

/// Another process of the same replica may lack what was acknowledged; so it does not lead on from there, however soon it
/// is there.
#[test]
fn a_replica_that_ended_is_not_taken_back() {
    let lab = Lab::new();
    let (a, mut b) = (lab.replica("a"), lab.replica("b"));
    let proxy = Proxy::before(&b);
    let address = proxy.address();
    let engine = lab.engine(&[&a.address, &address]);
    let load = lab.load();
    b.kill();
    lab.restart(&mut b);
    b.rpc().open(false).unwrap();
    let why = engine.faulted(&address);
    assert!(why.contains("the connection is lost"), "{why}");
    load.some_more(300);
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    assert!(report.longest < LONGEST, "{:?}", report.longest);
    lab.check(&mut report, &[&a]);
}
