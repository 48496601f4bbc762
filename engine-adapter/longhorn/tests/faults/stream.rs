//! Bytes that are changed, lost or cut off on their way. What a payload carries has no checksum on the wire, so that
//! nobody notices a changed byte there; all else is noticed before it does harm.

use crate::lab::{LONGEST, Lab, Replica, stock};
use crate::proxy::{Damage, Fault, Proxy, Way};
use crate::support::eventually;
use longhorn_wire::frame::{HEADER_BYTES, Header, Type};

/// Where the fields of a header are.
const MAGIC: usize = 0;
const SEQUENCE: usize = 2;
const KIND: usize = 6;
const OFFSET: usize = 10;
const SIZE: usize = 18;
const LENGTH: usize = 22;

/// Messages that something may happen to.
type Which = fn(&Header) -> bool;

fn is_read(header: &Header) -> bool {
    header.kind() == Some(Type::Read)
}

fn is_write(header: &Header) -> bool {
    header.kind() == Some(Type::Write)
}

fn has_data(header: &Header) -> bool {
    header.length > 0
}

fn has_none(header: &Header) -> bool {
    // Not that of a flush or ping, which are of no range.
    header.length == 0 && header.size > 0
}

/// One good replica, and one for each kind of damage.
fn survive(way: Way, faults: &[(Which, Damage)]) {
    let lab = Lab::new();
    let good = lab.replica("good");
    let others: Vec<Replica> =
        (0..faults.len()).map(|index| lab.replica(&format!("r{index}"))).collect();
    let proxies: Vec<Proxy> = others.iter().map(Proxy::before).collect();
    let mut addresses = vec![good.address.clone()];
    addresses.extend(proxies.iter().map(Proxy::address));
    let all: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let engine = lab.engine(&all);
    let load = lab.load();
    for (proxy, (to, damage)) in proxies.iter().zip(faults) {
        proxy.plan(Fault { way, to: *to, damage: *damage });
        eventually("it happens", || !proxy.is_planned());
        load.some_more(30);
    }
    for (address, (_, damage)) in all[1..].iter().zip(faults) {
        // Nothing is wrong with what has come: another connection is made.
        if matches!(damage, Damage::Cut(_)) && stock().is_none() {
            eventually("there is another connection", || engine.reconnected(address) > 0.0);
            assert_eq!(engine.mode(address), Some("RW"));
            continue;
        }
        let why = engine.faulted(address);
        println!("{damage:?}: {why}");
    }
    load.some_more(200);
    let mut report = load.finish();
    assert_eq!(report.failed, 0, "{:?}", report.texts);
    assert!(report.longest < LONGEST, "{:?}", report.longest);
    lab.check(&mut report, &[&good]);
}

#[test]
fn replies_are_damaged() {
    survive(
        Way::Replies,
        &[
            (has_data, Damage::Flip(MAGIC, 1)),
            (has_data, Damage::Flip(OFFSET + 1, 0x10)),
            (has_none, Damage::Flip(SEQUENCE, 1)),
            (has_none, Damage::Flip(KIND, 1)),
            (has_none, Damage::Flip(SIZE + 1, 0x10)),
            (has_data, Damage::Flip(LENGTH, 0x10)),
            (has_data, Damage::Cut(HEADER_BYTES + 1000)),
            (has_none, Damage::Lose),
            (has_data, Damage::Insert(7)),
        ],
    );
}

#[test]
fn requests_are_damaged() {
    survive(
        Way::Requests,
        &[
            (is_write, Damage::Flip(MAGIC, 1)),
            // Of a read, or far outside: no proof against a write elsewhere but the reply.
            (is_read, Damage::Flip(OFFSET + 1, 0x10)),
            (is_write, Damage::Flip(OFFSET + 5, 1)),
            (is_write, Damage::Flip(SEQUENCE, 1)),
            (is_write, Damage::Flip(KIND, 4)),
            (is_read, Damage::Flip(SIZE, 0x10)),
            (is_write, Damage::Flip(LENGTH + 3, 0x40)),
            (is_write, Damage::Cut(HEADER_BYTES + 1000)),
            (is_write, Damage::Lose),
        ],
    );
}
